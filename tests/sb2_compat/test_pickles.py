"""Untrusted files: no code of theirs runs, and their use of time and memory is bounded."""

import codecs
import copyreg
import functools
import importlib
import io
import operator
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from sb3_acer.sb2_compat.migration import MigrationError, load_obs_rms, load_stable_baselines
from sb3_acer.sb2_compat.pickles import MAX_BYTES, MAX_OPCODES, PickleReader, Record, listed, read_npy, to_array
from tests.mutations import memory_for, mutated, mutated_zip, zipped
from tests.sb2_compat.old_agents import (
    AGENTS,
    N_ACTIONS,
    VECTOR,
    Graph,
    assert_same_policy,
    built,
    old_data,
    pickled,
    write,
    write_pickle,
    write_zip,
)


class Gadget:
    """Pickles as a function call, which unpickling would execute."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call

    def __call__(self) -> None:
        """Makes a gadget callable, so that it can be pickled in place of a function."""


def hostile(canary: Path) -> dict[str, Any]:
    """Objects that create a file when they are unpickled."""
    code = f"open({str(canary)!r}, 'w')"
    touch = f"touch {canary}"
    array_of_objects = np.empty(1, object)
    array_of_objects[0] = Gadget(os.system, touch)
    return {
        "os.system": Gadget(os.system, touch),
        "subprocess": Gadget(subprocess.call, ["touch", str(canary)]),
        "eval": Gadget(eval, code),
        "exec": Gadget(exec, code),
        "getattr of import": Gadget(Gadget(getattr, Gadget(importlib.import_module, "os"), "system"), touch),
        "partial": Gadget(Gadget(functools.partial, os.system), touch),
        "methodcaller": Gadget(Gadget(operator.methodcaller, "system", touch), Gadget(importlib.import_module, "os")),
        "pickle in pickle": Gadget(pickle.loads, pickle.dumps(Gadget(os.system, touch))),
        "numpy's runstring": Gadget(np.testing.runstring, code, {}),
        "reconstructed array": Gadget(copyreg._reconstructor, Gadget(os.system, touch), object, None),  # type: ignore[attr-defined]
        "encoded": Gadget(codecs.encode, Gadget(os.system, touch), "latin1"),
        "array of objects": array_of_objects,
        "argument of a dtype": Gadget(np.dtype, Gadget(os.system, touch)),
    }


HOSTILE = sorted(hostile(Path("canary")))


@pytest.mark.parametrize("name", HOSTILE)
def test_the_canary_falls_to_the_plain_unpickler(tmp_path: Path, name: str) -> None:
    """Shows that the objects are dangerous."""
    content = pickle.dumps(hostile(tmp_path / "canary")[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(TypeError, AttributeError):  # most calls return a value that the next call cannot take
            pickle.loads(content)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_of_a_hostile_file_runs(tmp_path: Path, name: str, protocol: int) -> None:
    canary, path, venv = tmp_path / "canary", tmp_path / "agent", make_vec_env("CartPole-v1")
    gadget = hostile(canary)[name]
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    parameters = list(graph.variables.values())
    honest = old_data("MlpPolicy", VECTOR, N_ACTIONS)
    files: list[Any] = [gadget, (honest, gadget), (gadget, parameters), (honest, [*parameters[:-1], gadget])]
    files += [({**honest, key: gadget}, parameters) for key in ("policy", "action_space", "observation_space")]
    for file in files:
        path.write_bytes(pickled(file, honest["policy"], protocol=protocol))
        with pytest.raises(MigrationError, match=re.escape(str(path))):
            load_stable_baselines(path)
        with pytest.raises(MigrationError, match=re.escape(str(path))):
            load_obs_rms(path, venv)
    data = {**honest, "more": gadget, "gamma": gadget}
    for written in (
        write_pickle(path, data, graph.variables, protocol=protocol),
        write_zip(path, data, graph.variables),
    ):
        with pytest.warns(UserWarning, match=r"agent: left out .*gamma"):
            assert_same_policy(load_stable_baselines(written, device="cpu"), graph, VECTOR)
    assert not canary.exists()


def test_what_a_file_names_besides_is_said(tmp_path: Path) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    gadget = hostile(tmp_path / "canary")["getattr of import"]
    data = old_data("MlpPolicy", VECTOR, N_ACTIONS, more=gadget)
    for path in (
        write_pickle(tmp_path / "a.pkl", data, graph.variables),
        write_zip(tmp_path / "a.zip", data, graph.variables),
    ):
        with pytest.warns(UserWarning, match=r"left out builtins.getattr, importlib.import_module"):
            load_stable_baselines(path)


def test_of_many_things_that_a_file_names_ten_are_listed_and_the_others_counted() -> None:
    assert listed([*"abcdefghij"]) == "a, b, c, d, e, f, g, h, i, j"
    assert listed([*"abcdefghi", {}, "k" * 10**6, 3]) == "a, b, c, d, e, f, g, h, i, a dict and 2 more"


def test_the_reader_builds_what_a_plain_pickle_holds() -> None:
    value: dict[str, Any] = {
        "a": [1, -2, 2**70, 0.5, True, None, ""],
        "b": ("ü", b"\0\xff" * 300, (), [[]], {}),
        "c": [0] * 3000,
    }
    for protocol in (3, 4, 5):
        assert PickleReader().read(pickle.dumps(value, protocol)) == value
    for protocol in (0, 1, 2):
        read = PickleReader().read(pickle.dumps(value, protocol))
        assert {**read, "b": 0} == {**value, "b": 0}
        assert isinstance(read["b"][1], Record)


def lying_npz(shape: str, dtype: str = "<f4") -> bytes:
    """An archive of an array of eight bytes whose header says otherwise."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    return agent_zip(names=b'["a"]', arrays=zipped({"a.npy": npy}))


def agent_zip(data: bytes = b"{}", names: bytes = b"[]", arrays: bytes = b"") -> bytes:
    return zipped({"data": data, "parameters": arrays or zipped({}), "parameter_list": names})


LONG = 2**24
HUGE = (2**40).to_bytes(8, "little")
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntC\x01btR"
F4 = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4I0\nI1\ntR(I3\nX\x01\x00\x00\x00<NNNI-1\nI-1\nI0\ntb"


def sized(opcode: bytes, content: bytes) -> bytes:
    return opcode + len(content).to_bytes(4, "little") + content


def array_pickle(shape: bytes, content: bytes) -> bytes:
    return ARRAY + b"(I1\n(" + shape + b"t" + F4 + b"I00\n" + content + b"tb"


def many(value: bytes) -> bytes:
    """A list that contains one value many times."""
    return value + b"\x940](" + b"h\0" * 30_000 + b"e"


BOMBS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no end": lambda: b"N",
    "memo": lambda: b"Nr\xff\xff\xff\xff.",
    "bytes": lambda: b"\x8e" + HUGE + b".",
    "bytearray": lambda: b"\x96" + HUGE + b".",
    "string": lambda: b"\x8d" + HUGE + b".",
    "frame": lambda: b"\x95" + HUGE + b"N.",
    "marks": lambda: b"(" * 10**7,
    "dicts": lambda: b"}" * 10**7 + b".",
    "deep tuple as a key": lambda: b"})" + b"\x85" * (MAX_OPCODES - 10) + b"Ns.",
    "wide tuple as a key": lambda: b"})" + b"2\x86" * 60 + b"Ns.",
    "wide tuple as a policy": lambda: pickled((old_data(0, VECTOR, 2), [])).replace(
        b"policy\x94K\0", b"policy\x94)" + b"2\x86" * 60
    ),
    "wide tuple as a space": lambda: b"}X\x0c\0\0\0action_space)" + b"2\x86" * 60 + b"s]\x86.",
    "deep list": lambda: b"}" + b"]" * 40_000 + b"a" * 39_999 + b"\x86.",
    "long as a key": lambda: b"}" + sized(b"\x8b", b"\x7f" * LONG) + b"\x94" + b"Nsh\0" * 20_000 + b".",
    "decimal": lambda: b"I" + b"9" * 10**6 + b"\n.",
    "long name": lambda: sized(b"X", b"a" * LONG) + b"\x94" + b"h\0h\0\x930" * 10_000 + b".",
    "array of a terabyte": lambda: b"}]" + array_pickle(b"L1000000000000L\n", b"C\0") + b"a\x86.",
    "array of negative axes": lambda: b"}]" + array_pickle(b"I-1\nI-4\n", sized(b"B", bytes(16))) + b"a\x86.",
    "one array many times": lambda: b"}" + many(array_pickle(b"I4194304\n", sized(b"B", bytes(LONG)))) + b"\x86.",
    "one string many times": lambda: b"}" + many(array_pickle(b"I4194304\n", sized(b"X", bytes(LONG)))) + b"\x86.",
    "persistent": lambda: b"Pname\n.",
    "extension": lambda: b"\x82\x01.",
    "file too large": lambda: bytes(MAX_BYTES + 1),
    "zip of zeros": lambda: zipped({"data": bytes(MAX_BYTES + 1)}),
    "zip of much JSON": lambda: agent_zip(b"[" + b"[]," * (2**24 // 3) + b"[]]"),
    "zip of deep JSON": lambda: agent_zip(b"[" * 10**6),
    "zip of many members": lambda: zipped({str(i): b"" for i in range(1100)}, zipfile.ZIP_STORED),
    "zip packed by lzma": lambda: zipped({"data": b"{}"}, zipfile.ZIP_LZMA),
    "zip of stable-baselines3": lambda: zipped({"data": b"{}", "policy.pth": b""}),
    "zip of a list": lambda: agent_zip(b"[]"),
    "zip with an array of a terabyte": lambda: lying_npz("(1000000000000,)"),
    "zip with an expression": lambda: lying_npz("(10**12,)"),
    "zip with objects": lambda: lying_npz("(1,)", "|O"),
    "zip with records": lambda: lying_npz("(1,)", "|V8"),
    "zip of zeros in the npz": lambda: agent_zip(arrays=zipped({"a.npy": bytes(MAX_BYTES + 1)})),
    "names that are no names": lambda: agent_zip(names=b"[[[]]]"),
}  # fmt: skip


# Those that only a bound refuses before they take time or memory: without it they are refused for another reason, late.
BOUNDS = {
    "marks": "more than 100000 opcodes",
    "dicts": "more than 100000 opcodes",
    "file too large": "the file has more than",
    "zip of zeros": "the zip archive holds more than",
    "zip of much JSON": "data has more than 16777216 bytes",
    "zip of zeros in the npz": "the zip archive holds more than",
    "zip of many members": "the zip archive has more than 1000 members",
    "zip packed by lzma": "another method than deflate",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    """Measured in processor time, which does not depend on other programs."""
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[name]())
    start = time.process_time()
    with pytest.raises(MigrationError, match=f"bomb cannot be migrated: .*{BOUNDS.get(name, '.{4,}')}"):
        load_stable_baselines(path)
    assert time.process_time() - start < 5


def test_dimensions_of_a_lie_are_not_allocated(tmp_path: Path) -> None:
    """Two arrays whose sizes, multiplied, far exceed the size of the file."""
    names = [f"{layer}/{part}" for layer in ("shared_fc0", "shared_fc1", "vf", "pi", "q") for part in "wb"]
    lies = {name: np.zeros(2**18, np.float32) for name in names}
    path = write_pickle(tmp_path / "agent", old_data("MlpPolicy", VECTOR, N_ACTIONS), lies, named=True)
    with pytest.raises(MigrationError, match=r"expected an array of shape \(5, 262144\), found \(262144,\)"):
        load_stable_baselines(path)
    for space in (spaces.Discrete(2**40), spaces.MultiBinary(2**40)):
        graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
        with pytest.raises(MigrationError, match=r"expected an array of shape \(1099511627776, 64\)"):
            load_stable_baselines(write(tmp_path, "4", graph, space, {}))


# --- mutations ---


def old_files(folder: Path) -> list[bytes]:
    files = [AGENTS / "CartPole-v1.pkl", AGENTS / "Acrobot-v1.pkl"]
    mlp = built(Graph("MlpPolicy", N_ACTIONS, [8, {"pi": [7], "vf": [6]}]), VECTOR)
    lstm = built(Graph("MlpLnLstmPolicy", N_ACTIONS, layers=[6]), VECTOR)
    for i, kind in enumerate(("0", "2", "4", "5", "named", "zip")):
        for graph in (mlp, lstm):
            arch = {"layers": [6]} if graph is lstm else {"net_arch": mlp.net_arch}
            files.append(write(folder, kind, graph, VECTOR, arch).rename(folder / f"{i}{graph.policy}"))
    return [file.read_bytes() for file in files]


def load_mutations(folder: Path, n: int) -> dict[str, int]:
    """Outcomes of loading mutated files, and how often each occurred. None may take five seconds."""
    rng = np.random.default_rng(0)
    files = old_files(folder)
    with_gadgets = [*files, *(pickle.dumps(gadget) for gadget in hostile(folder / "canary").values())]
    path = folder / "agent"
    outcomes: dict[str, int] = {}
    for i in range(n):
        content = files[i % len(files)]
        change = mutated_zip if content.startswith(b"PK") and rng.random() < 0.8 else mutated
        path.write_bytes(change(content, with_gadgets, rng))
        start = time.process_time()
        try:
            load_stable_baselines(path, device="cpu")
            outcome = "loaded"
        except MigrationError as error:
            outcome = "refused" if str(path) in str(error) else f"without the file's name: {error}"
        assert time.process_time() - start < 5
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_files_load_or_raise_one_error(n: int, tmp_path: Path) -> None:
    with memory_for(2**32) as used:
        outcomes = load_mutations(tmp_path, n)
        assert used() < 2**29
    assert outcomes["loaded"] + outcomes["refused"] == n
    assert outcomes["loaded"] > n // 50
    assert outcomes["refused"] > n // 4
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6, dtype=">i4").reshape(2, 3)],
    ids=["Fortran's order", "big-endian"],
)
def test_arrays_of_any_order_are_read(array: np.ndarray, protocol: int) -> None:
    file = io.BytesIO()
    np.save(file, array)
    for found in (to_array(PickleReader().read(pickle.dumps(array, protocol))), read_npy(file.getvalue())):
        np.testing.assert_array_equal(found, array)
        assert found.dtype.isnative
