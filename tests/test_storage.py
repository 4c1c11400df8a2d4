"""Files: what is written is read, of other files nothing is run, and a file that is whole is not lost."""

import errno
import io
import json
import os
import pickle
import resource
import signal
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit, TransformObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from sb3_acer import ACER
from sb3_acer.storage import FORMAT, move, named, opened, read_state, replacing, write_state
from tests.helpers import Catch, in_a_fork
from tests.mutations import attempt, memory_for, mutated, mutated_zip, zipped

arrays = arrays_of.arrays(
    st.sampled_from([np.float32, np.float64, np.int8, np.int64, np.uint16, np.bool_]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
plain = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
parts = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
states = st.dictionaries(st.sampled_from(["array", "dict", "header", "a", ""]), parts, max_size=4)


def written(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    write_state(file, state)
    return file.getvalue()


def read(content: bytes) -> dict[str, Any]:
    return read_state(io.BytesIO(content), "the diary")


def assert_equal(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, part in expected.items():
            assert_equal(got[key], part)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            assert_equal(ours, theirs)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    else:
        assert got == expected


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(states)
def test_what_is_written_is_read(state: dict[str, Any]) -> None:
    assert_equal(read(written(state)), state)


def test_tensors_are_read_as_arrays_and_tuples_as_lists() -> None:
    tensor = th.arange(6.0).view(2, 3).requires_grad_()
    state = read(written({"tensor": tensor, "tuple": (1, th.tensor([True]))}))
    assert_equal(state, {"tensor": np.arange(6, dtype=np.float32).reshape(2, 3), "tuple": [1, np.array([True])]})


def test_views_of_arrays_are_written_as_they_appear() -> None:
    whole = np.arange(12).reshape(3, 4)
    assert_equal(
        read(written({"part": whole[1:, ::2], "turned": whole.T})), {"part": whole[1:, ::2], "turned": whole.T}
    )


def test_writing_leaves_the_file_open_and_reading_too() -> None:
    file = io.BytesIO()
    write_state(file, {"a": np.zeros(3)})
    file.seek(0)
    read_state(file, "the diary")
    assert not file.closed


class Runs:
    """An object whose pickle runs code when it is loaded."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Runs, "ran", True)


def test_objects_are_not_written() -> None:
    for value in (np.array([Runs()], object), Runs(), {1, 2}, lambda: None):
        with pytest.raises((ValueError, TypeError)):
            written({"a": value})


def header(content: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def npz(**members: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_member(content: bytes) -> bytes:
    """A zip file whose only member is the header, of any content."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.npy", content)
    return file.getvalue()


WHOLE = written({"a": np.arange(2000.0), "b": {"c": np.ones((3, 4), np.uint8)}, "d": "text"})
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "text": b"some text that is no archive",
    "half": WHOLE[: len(WHOLE) // 2],
    "without its end": WHOLE[:-30],
    "without its beginning": WHOLE[100:],
    "changed in the middle": WHOLE[:3000] + bytes(100) + WHOLE[3100:],
    "an array": npz(a=np.ones(3)),
    "one array that is no archive": npy(np.ones(3)),
    "another format": npz(header=header({"format": "sb3-acer 0", "state": {"dict": {}}})),
    "no format": npz(header=header({"state": {"dict": {}}})),
    "no state": npz(header=header({"format": FORMAT})),
    "a list": npz(header=header([])),
    "a number": npz(header=header(3)),
    "a header that is no JSON": npz(header=np.frombuffer(b"{", np.uint8)),
    "a header that is no text": npz(header=np.frombuffer(b"\xff\xfe\xff", np.uint8)),
    "an array that is missing": npz(header=header({"format": FORMAT, "state": {"dict": {"a": {"array": 0}}}})),
    "a dict that is none": npz(header=header({"format": FORMAT, "state": {"dict": []}})),
    "a header that is no array": with_member(b"no array"),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_other_files_and_damaged_ones_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"the diary must be a whole file of the format 'sb3-acer 1', got another"):
        read(content)


def test_a_pickle_is_refused_and_never_run() -> None:
    pickled = pickle.dumps(Runs())
    in_an_array = npz(header=np.array([Runs()], object))
    array = npz(header=header({"format": FORMAT, "state": {"array": 0}}), **{"0": np.array([Runs()], object)})
    Runs.ran = False
    for content in (pickled, in_an_array, array, with_member(pickled)):
        with pytest.raises(ValueError, match="the diary must be a whole file"):
            read(content)
    assert not Runs.ran
    pickle.loads(pickled)
    assert Runs.ran  # which is what did not happen


def test_the_format_that_was_found_is_told() -> None:
    with pytest.raises(ValueError, match="of the format 'sb3-acer 0'"):
        read(DAMAGED["another format"])


def test_arrays_beyond_the_limit_of_plain_zip_files_are_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB, which the frames of a replay buffer pass; here it is 1000 bytes."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    file, array = io.BytesIO(), np.arange(500)
    write_state(file, {"ring": array, "other": array[:5]})
    state = read_state(file, "the file")
    np.testing.assert_array_equal(state["ring"], array)
    np.testing.assert_array_equal(state["other"], array[:5])


# A file is replaced at once, or not at all


def write(path: Any, content: bytes, **options: Any) -> None:
    with replacing(path, "txt", **options) as file:
        file.write(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_takes_the_place_of_an_older_one_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"old")
    with replacing(tmp_path / "a.txt", "txt") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "a.txt").read_bytes() == b"old"
    assert contents(tmp_path) == {"a.txt": b"new"}


def test_a_file_is_whole_on_the_disk_before_it_takes_the_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a machine that loses power would have an empty one."""
    order: list[Any] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append(os.fstat(number).st_size))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append(replace(*paths)))
    write(tmp_path / "a.txt", b"whole")
    assert order == [len(b"whole"), None]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_while_writing_keeps_the_older_file_and_leaves_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    write(tmp_path / "a.txt", b"old")

    def fail(file: io.BufferedIOBase) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error), replacing(tmp_path / "a.txt", "txt") as file:
        fail(file)
    assert contents(tmp_path) == {"a.txt": b"old"}


def test_an_error_of_no_system_call_has_its_own_text(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="an older file, if there is one, is kept: no room"),
        replacing(tmp_path / "a", ""),
    ):
        raise OSError("no room")


@pytest.mark.parametrize("n_refusals", [2, 99])
def test_a_file_that_is_being_read_is_moved_later(
    n_refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, which refuses it until the other program has closed the file."""
    tries, replace = [0], os.replace

    def refuse_at_first(*paths: Path) -> None:
        tries[0] += 1
        if tries[0] <= n_refusals:
            raise PermissionError(errno.EACCES, "in use")
        replace(*paths)

    monkeypatch.setattr(os, "replace", refuse_at_first)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "new").write_text("new")
    with pytest.raises(PermissionError) if n_refusals == 99 else nullcontext():
        move(tmp_path / "new", tmp_path / "old")
    moved = [path.name for path in tmp_path.iterdir()]
    assert moved == (["new"] if n_refusals == 99 else ["old"])


def test_names_may_be_as_long_as_file_systems_allow(tmp_path: Path) -> None:
    for name in (f"{'a' * 251}.txt", f"{'é' * 125}.txt"):  # 255 and 254 bytes
        write(tmp_path / name, b"1")
        assert (tmp_path / name).read_bytes() == b"1"


def test_paths_are_understood_as_sb3_understands_them(tmp_path: Path) -> None:
    write(str(tmp_path / "a"), b"1")
    write(tmp_path / "b.other", b"2")
    with pytest.warns(UserWarning, match=r"Path '.*new' does not exist. Will create it"):
        write(tmp_path / "new" / "c", b"3")
    (tmp_path / "folder.txt").mkdir()
    with pytest.warns(UserWarning, match=r"Path '.*folder.txt' is a folder. Will save instead to .*folder.txt_2"):
        write(tmp_path / "folder", b"4")
    with pytest.warns(UserWarning, match=r"Path '.*a.txt' exists, will overwrite it"):
        write(tmp_path / "a", b"5", verbose=2)
    assert contents(tmp_path / "new") == {"c.txt": b"3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.other", "folder.txt", "folder.txt_2", "new"]
    for name in ("a", "a.txt"):
        with opened(tmp_path / name, "txt") as file:
            assert file.read() == b"5"
        assert file.closed
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "a", f"{tmp_path}/a", f"{tmp_path}/a/"):
        with opened(path, "txt") as file:
            assert file.read() == b"5"
    for name in ("c", "c.txt"):
        with pytest.raises(FileNotFoundError, match=r"'.*/c\.txt'"), opened(tmp_path / name, "txt"):
            pass
    rule = r"^agent must be the path of a file; load_checkpoint takes folders of checkpoints, got '.*/new'$"
    with pytest.raises(ValueError, match=rule), opened(tmp_path / "new", "txt", "agent"):
        pass


def test_an_older_file_is_warned_of_from_verbose_2_on(tmp_path: Path) -> None:
    agent = small_agent()
    for verbose, warns in ((0, False), (1, False), (2, True)):
        agent.verbose = verbose
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            agent.save_replay_buffer(tmp_path / "buffer")
        assert any("exists, will overwrite it" in str(each.message) for each in caught) == warns


def test_links_and_permissions_of_an_older_file_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"old")
    (tmp_path / "a.txt").chmod(0o640)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_an_open_file_is_written_and_read_and_stays_open() -> None:
    file = io.BytesIO()
    write(file, b"some")
    file.seek(0)
    with opened(file, "txt") as same:
        assert same.read() == b"some"
    assert not file.closed


@pytest.mark.parametrize("path", [None, 5, b"a", ["a"], io.StringIO()])
def test_what_is_neither_a_path_nor_a_file_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match="path must be a path or an open binary file, got"):
        write(path, b"")
    with pytest.raises(ValueError, match="path must be a path or an open binary file, got"), opened(path, "txt"):
        pass


# Agents and replay buffers


def small_agent() -> ACER:
    return ACER("MlpPolicy", "CartPole-v1", n_steps=5, buffer_size=50, replay_ratio=0, device="cpu").learn(20)


def steps_of_agent(path: Path) -> int:
    return ACER.load(path, device="cpu").num_timesteps


def steps_of_buffer(path: Path) -> int:
    agent = ACER("MlpPolicy", "CartPole-v1", n_steps=5, buffer_size=50, replay_ratio=0, device="cpu")
    agent.load_replay_buffer(path)
    return agent.replay_buffer.size()


Save = Callable[[ACER, Path], None]
SAVES: dict[str, tuple[Save, Callable[[Path], int]]] = {
    "agent": (ACER.save, steps_of_agent),
    "replay buffer": (ACER.save_replay_buffer, steps_of_buffer),
}
every_kind = pytest.mark.parametrize(("save", "steps_in"), SAVES.values(), ids=SAVES)


@every_kind
@pytest.mark.parametrize("n_kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_program_killed_while_it_saves_leaves_a_whole_file(
    save: Save, steps_in: Callable[[Path], int], n_kills: int, tmp_path: Path
) -> None:
    rng, agent, path = np.random.default_rng(0), small_agent(), tmp_path / "file.zip"
    save(agent, path)

    def save_for_ever() -> None:
        while True:
            save(agent, path)

    interrupted = 0
    for _ in range(20 * n_kills):  # until enough kills have come while it was writing
        assert in_a_fork(save_for_ever, 0.05 + 0.05 * rng.random()) == -signal.SIGKILL
        unfinished = list(tmp_path.glob("file.zip.*.unfinished"))
        interrupted += bool(unfinished)
        for left in unfinished:  # or every later kill would count
            left.unlink()
        assert steps_in(path) == 20
        if interrupted == n_kills:
            break
    assert interrupted == n_kills


def test_threads_that_save_to_one_path_leave_a_whole_file(tmp_path: Path) -> None:
    agent, path = small_agent(), tmp_path / "agent.zip"
    with ThreadPoolExecutor(4) as threads:
        for saved in [threads.submit(agent.save, path) for _ in range(40)]:
            saved.result()
    assert contents(tmp_path).keys() == {"agent.zip"}
    assert steps_of_agent(path) == 20


@every_kind
def test_a_full_disk_keeps_the_older_file(save: Save, steps_in: Callable[[Path], int], tmp_path: Path) -> None:
    agent, path = small_agent(), tmp_path / "file.zip"
    save(agent, path)
    size = path.stat().st_size
    before = contents(tmp_path)

    def save_with_little_space() -> None:
        for limit in (0, 100, size // 2, size - 100):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with pytest.raises(OSError, match=r"an older file, if there is one, is kept: File too large: .*zip"):
                save(agent, path)

    assert in_a_fork(save_with_little_space) == 0
    assert contents(tmp_path) == before
    assert steps_in(path) == 20


@pytest.fixture
def folder_of_everyone() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        Path(folder).chmod(0o755)


@every_kind
def test_a_folder_that_cannot_be_written_is_one_clear_error(
    save: Save, steps_in: Callable[[Path], int], folder_of_everyone: Path
) -> None:
    agent, path = small_agent(), folder_of_everyone / "file.zip"
    save(agent, path)
    before = contents(folder_of_everyone)
    folder_of_everyone.chmod(0o555)

    def save_as_nobody() -> None:
        if os.geteuid() == 0:  # whom no permission stops
            os.setuid(65534)
        with pytest.raises(PermissionError, match="an older file, if there is one, is kept: Permission denied"):
            save(agent, path)

    assert in_a_fork(save_as_nobody) == 0
    assert contents(folder_of_everyone) == before
    assert steps_in(path) == 20


@every_kind
def test_a_path_below_a_file_is_one_clear_error(save: Save, steps_in: Callable[[Path], int], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OSError, match="could not be saved") as caught:
            save(small_agent(), tmp_path / "file" / "agent.zip")
    assert caught.value.errno == errno.ENOTDIR


# Damaged files


def held_images() -> ACER:
    """An agent whose buffer has side tables: of frames, and of final observations."""
    env = DummyVecEnv([lambda: TimeLimit(Catch(), 3)])
    kwargs: dict[str, Any] = {"features_extractor_kwargs": {"features_dim": 4}}
    stacked = VecFrameStack(env, 3)
    model = ACER("CnnPolicy", stacked, n_steps=5, buffer_size=20, replay_ratio=0, policy_kwargs=kwargs, device="cpu")
    return model.learn(60)


def load_agent(agent: ACER, path: Path) -> None:
    ACER.load(path, device="cpu").predict(agent.observation_space.sample())


def load_buffer(agent: ACER, path: Path) -> None:
    agent.load_replay_buffer(path)
    agent.replay_buffer.sample(30)


def recurrent_agent() -> ACER:
    kwargs = {"lstm_hidden_size": 8, "net_arch": [8]}
    return ACER("MlpLstmPolicy", "Pendulum-v1", n_steps=5, buffer_size=50, policy_kwargs=kwargs, device="cpu").learn(5)


LOADS: dict[str, Any] = {
    "agent": (recurrent_agent, ACER.save, load_agent),
    "replay buffer": (held_images, ACER.save_replay_buffer, load_buffer),
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("other", "save", "load"), LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("n", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_files_load_or_raise_one_error_that_names_them(
    n: int, other: Any, save: Any, load: Any, tmp_path: Path
) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "file.zip"
    agents, files = [small_agent(), other()], []
    for agent in agents:
        save(agent, path)
        load(agent, path)  # undamaged
        files.append(path.read_bytes())
    n_loaded, wrong = 0, []
    with memory_for(2**32) as used:
        for i in range(n):
            agent, content = agents[i % 2], files[i % 2]
            path.write_bytes((mutated_zip if rng.random() < 0.8 else mutated)(content, files, rng))
            buffer = agent.replay_buffer
            loaded, error = attempt(partial(load, agent, path), str(path))
            n_loaded += loaded
            wrong += [f"{i}: {error}"] if error else []
            agent.replay_buffer = buffer
        assert used() < 2**30
    assert not wrong
    assert n_loaded < n * 0.9


def test_a_pickle_in_place_of_a_replay_buffer_is_refused_and_never_run(tmp_path: Path) -> None:
    Runs.ran = False
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match=r"buffer.pkl could not be loaded: the replay buffer must be a whole file"):
        small_agent().load_replay_buffer(tmp_path / "buffer.pkl")
    assert not Runs.ran


def test_a_replay_buffer_of_other_spaces_or_with_bad_numbers_is_refused_and_the_own_one_kept(tmp_path: Path) -> None:
    agent, other = small_agent(), ACER("MlpPolicy", "Pendulum-v1", n_steps=5, buffer_size=50, device="cpu").learn(20)
    mine = agent.replay_buffer
    other.save_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match=r"buffer could not be loaded: the replay buffer must have observations and"):
        agent.load_replay_buffer(tmp_path / "buffer")
    spoiled = small_agent()
    ring = spoiled.replay_buffer._ring
    assert ring is not None
    columns: list[Any] = [ring.steps["rewards"], ring.steps["behaviour"], ring.observations[""]]
    for column in columns:
        whole = column.ring[3].copy()
        column.ring[3] = th.nan
        spoiled.save_replay_buffer(tmp_path / "buffer")
        with pytest.raises(ValueError, match=r"buffer could not be loaded: the replay buffer must hold finite numbers"):
            agent.load_replay_buffer(tmp_path / "buffer")
        column.ring[3] = whole
    actions: Any = ring.steps["actions"]
    actions.ring[3] = 2
    spoiled.save_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match=r"the replay buffer must hold actions of Discrete\(2\), got others"):
        agent.load_replay_buffer(tmp_path / "buffer")
    assert agent.replay_buffer is mine


def test_a_replay_buffer_whose_observations_are_no_categories_of_the_agents_is_refused(tmp_path: Path) -> None:
    def agent(n: int) -> ACER:
        env = TransformObservation(gym.make("CartPole-v1"), lambda _: n - 1, spaces.Discrete(n))
        return ACER("MlpPolicy", env, n_steps=5, buffer_size=50, replay_start=5, device="cpu").learn(50)

    agent(4).save_replay_buffer(tmp_path / "buffer")
    agent(4).load_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match=r"the replay buffer must hold observations of Discrete\(3\), got others"):
        agent(3).load_replay_buffer(tmp_path / "buffer")


def test_members_of_a_file_that_are_packed_lie_about_their_size_or_are_there_twice_are_refused() -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, header=header({"format": FORMAT, "state": {"dict": {}}}), bomb=np.zeros(10**6))
    longer = with_member(npy(np.ones(3)).replace(b"(3,)", b"(9,)"))
    members = {
        "header.npy": npy(header({"format": FORMAT, "state": {"dict": {"a": {"array": 0}}}})),
        "0.npy": npy(np.ones(3)),
    }
    read(zipped(members, zipfile.ZIP_STORED))  # without a lie
    lie = {"0.npy": members["0.npy"].replace(b"(3,)", b"(2,)")}
    shorter = zipped(members | lie, zipfile.ZIP_STORED)
    same_name = io.BytesIO(zipped(members, zipfile.ZIP_STORED))
    with warnings.catch_warnings(), zipfile.ZipFile(same_name, "a") as archive:
        warnings.simplefilter("ignore")  # zipfile's, of the second name
        archive.writestr("0.npy", members["0.npy"])
    twice = io.BytesIO()
    state = {"dict": {"a": {"array": 0}, "b": {"array": 0}}}
    np.savez(twice, header=header({"format": FORMAT, "state": state}), **{"0": np.zeros(1000)})  # type: ignore[arg-type]
    for content in (packed.getvalue(), longer, shorter, same_name.getvalue(), twice.getvalue()):
        with pytest.raises(ValueError, match="the diary must be a whole file"):
            read(content)


def test_an_error_without_a_message_has_its_name() -> None:
    with pytest.raises(ValueError, match=r"agent.zip could not be loaded: EOFError"), named("agent.zip"):
        raise EOFError
    with pytest.raises(ValueError, match=r"^the open file could not be loaded: EOFError"), named(io.BytesIO()):
        raise EOFError


def test_members_larger_than_the_file_are_refused_before_they_are_read() -> None:
    members = {"header.npy": npy(header({"format": FORMAT, "state": {"dict": {}}})), "0.npy": npy(np.ones(3))}
    content = bytearray(zipped(members, zipfile.ZIP_STORED))
    place = content.rfind(b"PK\x01\x02")
    content[place + 24 : place + 28] = struct.pack("<I", 2**31)  # the last member's size in the directory
    with pytest.raises(ValueError, match="no larger than the file"):
        read_state(io.BytesIO(bytes(content)), "the diary")
