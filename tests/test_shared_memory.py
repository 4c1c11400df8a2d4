"""What ranks post on a board, all of them read."""

import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th

from sb3_acer import distributed, shared_memory
from sb3_acer.shared_memory import PART, Board, ExchangeError, shared_file
from tests.ranks import on_ranks

HAS_BOARDS = platform.machine() == "x86_64" and Path("/dev/shm").is_dir()
pytestmark = pytest.mark.skipif(not HAS_BOARDS, reason="ranks share memory on Linux, on x86 only")

SIZES = [0, 1, 7, PART // 4, PART // 4 + 1, PART]


@pytest.fixture
def name() -> Any:
    with shared_file(3) as name:
        yield name


def opened(name: str, rank: int, **arguments: Any) -> Board:
    board = Board.open(name, rank, 3, **{"check": lambda: None, **arguments})
    assert board is not None
    return board


def numbers(rank: int, size: int, dtype: th.dtype = th.float32) -> th.Tensor:
    return th.randn(size, generator=th.Generator().manual_seed(100 * rank + size)).to(dtype)


def test_sums_are_right_and_equal_on_all_ranks_to_the_bit(name: str) -> None:
    def act(rank: int) -> Any:
        board, random, found = opened(name, rank), np.random.default_rng(rank), []
        for size in SIZES:
            for dtype in (th.float32, th.float64):
                time.sleep(random.uniform(0, 0.01))  # now one rank is first and now another
                vector = numbers(rank, size, dtype)
                board.sum(vector)
                found.append(vector)
        return found

    results = on_ranks(act, 3)
    pairs = [(size, dtype) for size in SIZES for dtype in (th.float32, th.float64)]
    for (size, dtype), *vectors in zip(pairs, *results, strict=True):
        th.testing.assert_close(vectors[0], sum(numbers(rank, size, dtype) for rank in range(3)))
        assert all(th.equal(vector, vectors[0]) for vector in vectors)


def test_a_sum_keeps_the_shape_of_a_matrix(name: str) -> None:
    def act(rank: int) -> Any:
        matrix = th.full((3, 5), float(rank + 1))
        opened(name, rank).sum(matrix)
        return matrix

    for matrix in on_ranks(act, 3):
        assert th.equal(matrix, th.full((3, 5), 6.0))


def test_bytes_of_any_length_are_gathered(name: str) -> None:
    lengths = [[0, 0, 0], [0, 5, PART], [2, 0, 0], [PART - 1, PART, PART + 1], [3 * PART + 2, 1, 0]]

    def own(rank: int, turn: int) -> bytes:
        return np.random.default_rng([rank, turn]).bytes(lengths[turn][rank])

    def act(rank: int) -> Any:
        board = opened(name, rank)
        return [board.gather(own(rank, turn)) for turn in range(len(lengths))]

    expected = [[own(rank, turn) for rank in range(3)] for turn in range(len(lengths))]
    for result in on_ranks(act, 3):
        assert result == expected


def test_nobody_reads_a_part_before_or_after_its_turn(name: str) -> None:
    def act(rank: int) -> Any:
        board, random = opened(name, rank), np.random.default_rng(rank)
        wrong = 0
        for turn in range(3000):
            if random.random() < 0.01:
                time.sleep(0.001)
            total = th.full((64,), float((rank + 1) * turn))
            board.sum(total)
            wrong += int((total != 6 * turn).sum())
        return wrong

    assert on_ranks(act, 3) == [0, 0, 0]


def test_a_rank_that_waits_asks_whether_others_will_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CHECK_EVERY", 0.01)

    def check() -> None:
        raise ExchangeError("one has ended")

    with pytest.raises(ExchangeError, match="one has ended"):
        opened(name, 0, check=check).sum(th.zeros(3))


def test_a_rank_does_not_wait_for_ever(name: str) -> None:
    with pytest.raises(ExchangeError, match="other ranks have not come within"):
        opened(name, 0, timeout=0.1).sum(th.zeros(3))


def test_a_rank_that_waits_long_sleeps_between_its_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, yields, sleeps = [0.0], [0], []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += max(seconds, 1e-3)

    monkeypatch.setattr(os, "sched_yield", lambda: yields.__setitem__(0, yields[0] + 1))
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(ExchangeError):
        opened(name, 0, timeout=10).sum(th.zeros(3))
    assert yields[0] < shared_memory._LOOKS
    assert sleeps == sorted(sleeps)
    assert sleeps[-1] == shared_memory._LONGEST_SLEEP


def test_a_rank_that_has_left_posts_nothing_more_and_the_others_hear_of_it(name: str) -> None:
    def act(rank: int) -> Any:
        board, total = opened(name, rank), th.ones(2)
        board.sum(total)
        if rank == 1:
            board.leave()
        with pytest.raises(ExchangeError, match="rank 1 has left its group"):
            board.sum(th.ones(2))
        return total

    for total in on_ranks(act, 3):
        assert total.tolist() == [3, 3]


def test_after_an_exchange_that_was_not_finished_there_is_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rank: int) -> bool:
        board = opened(name, rank)
        board.gather(b"before")
        if rank == 0:
            monkeypatch.setattr(board, "_wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                board.gather(b"the first")  # posted
            monkeypatch.undo()
            board.leave(in_midst=True)
        while not board._left[0]:
            time.sleep(0.01)
        with pytest.raises(ExchangeError, match="rank 0 has left its group"):
            board.gather(b"the second")
        return True

    assert on_ranks(act, 3) == [True] * 3


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([lambda board: board.sum(th.zeros(4)), lambda board: board.sum(th.zeros(5))], "of one length, got"),
        ([lambda board: board.sum(th.zeros(4)), lambda board: board.sum(th.zeros(4).double())], "the same dtypes"),
        ([lambda board: board.sum(th.zeros(4)), lambda board: board.gather(b"four")], "make the same calls"),
    ],
    ids=["lengths", "dtypes", "calls"],
)
def test_ranks_that_do_different_things_hear_of_it(name: str, calls: list[Any], message: str) -> None:
    def act(rank: int) -> bool:
        with pytest.raises(ExchangeError, match=message):
            calls[rank % 2](opened(name, rank))
        return True

    assert on_ranks(act, 3) == [True] * 3


def test_without_room_there_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_room(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with shared_file(2) as name:
        assert name == ""
    assert not list(tmp_path.iterdir())
    assert Board.open("", 0, 2, lambda: None) is None


def test_where_no_file_can_be_made_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(**_: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkstemp", denied)
    with shared_file(2) as name:
        assert name == ""


def test_nothing_is_left_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    assert on_ranks(lambda rank: distributed.gather(rank)) == [[0, 1]] * 2
    assert not list(tmp_path.iterdir())
