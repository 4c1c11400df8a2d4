"""Nested dicts of arrays as files: what is written is read, and of other files nothing is run."""

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from sb3_acer.storage import FORMAT, read_state, write_state

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
