"""
What the processes of a torch.distributed group, its ranks, tell each other in data-parallel training.

Without a group, or in a group of one, the functions return at once. All others must be called by all ranks, in the same
order. Ranks of one machine share memory for it, others send messages. Objects are sent as pickles, so all ranks must be
trusted.
"""

import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import torch as th
import torch.distributed as dist

from sb3_acer import shared_memory
from sb3_acer.shared_memory import Board

_LOST = "sb3_acer/lost"
_SECONDS_TO_DIE = 5.0  # from the end of a process's connections to its own

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank has failed or ended, and training cannot go on without it."""


class Moments(NamedTuple):
    """Mean, variance and number of some values."""

    mean: np.ndarray
    var: np.ndarray
    n: float


class Process(NamedTuple):
    """The process of a rank."""

    host: str
    pid: int
    created: float
    """seconds since the epoch: a process's number may be given again"""


def world_size() -> int:
    """
    :return: the number of ranks; 1 without a group
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """
    :return: the number of this rank, from 0
    """
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def torchrun_group() -> Iterator[None]:
    """
    The group that torchrun describes in environment variables, if it has started this process: gloo for tensors on the
    CPU, nccl for those on GPUs, of which each rank has its own.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    if th.cuda.is_available():
        th.cuda.set_device(int(os.environ["LOCAL_RANK"]) % th.cuda.device_count())
    store, own_rank, n_ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # The store outlives a restart of the ranks, and then holds the addresses of those that have ended.
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    dist.init_process_group(store=store, rank=own_rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def average(vectors: Sequence[th.Tensor]) -> None:
    """
    Replace vectors by their means over the ranks, which are equal on all ranks to the bit.

    :param vectors: of the same sizes on all ranks
    """
    n_ranks = world_size()
    if n_ranks == 1:
        return
    board = _board(dist.group.WORLD)
    with _lost_rank_named():
        for vector in vectors:
            if board is None or vector.device.type != "cpu":
                dist.all_reduce(vector)
            else:
                board.sum(vector)
            vector.div_(n_ranks)


def gather(value: T) -> list[T]:
    """
    :param value: anything that can be pickled
    :return: the values of all ranks, by rank
    """
    if world_size() == 1:
        return [value]
    board = _board(dist.group.WORLD)
    if board is None:
        return _gather_by_messages(value)
    with _lost_rank_named():
        return [pickle.loads(of_rank) for of_rank in board.gather(pickle.dumps(value))]


def _gather_by_messages(value: T) -> list[T]:
    values: list[Any] = [None] * world_size()
    with _lost_rank_named():
        dist.all_gather_object(values, value)
    return values


def together(function: Callable[[], T]) -> list[T]:
    """
    Call a function in which the ranks do not meet. If it fails on one of them, it fails on all.

    :param function: the function
    :return: what it returned on all ranks, by rank
    :raises RankError: if it has failed on another rank, with what was raised there
    """
    if world_size() == 1:
        return [function()]
    try:
        value = function()
    except Exception as error:
        gather((None, f"rank {rank()} has failed: {type(error).__name__}: {error}"))
        raise
    outcomes = gather((value, ""))
    errors = [error for _, error in outcomes if error]
    if errors:
        raise RankError(f"training stops: {'; '.join(errors)}")
    return [value for value, _ in outcomes]


def from_first(value: T) -> T:
    """
    :param value: tensors, arrays and other values that can be pickled; those of other ranks than the first are not used
    :return: the value of rank 0; tensors are on the CPU
    """
    if world_size() == 1:
        return value
    file = io.BytesIO()
    if rank() == 0:
        th.save(value, file)
    sent = [file.getvalue()]
    with _lost_rank_named():
        dist.broadcast_object_list(sent)
    received: T = th.load(io.BytesIO(sent[0]), "cpu", weights_only=False)
    return received


def require_equal(values: dict[str, Any]) -> None:
    """
    :param values: values by their names
    :raises ValueError: on all ranks, if a value is not the same on all of them
    """
    of_ranks = gather(values)
    for name in values:
        each = [of_rank[name] for of_rank in of_ranks]
        if any(value != each[0] for value in each[1:]):
            raise ValueError(f"{name} must be equal on all ranks, got {each}")


def pooled(common: Moments, of_ranks: Sequence[Moments]) -> Moments:
    """
    Moments of the values of all ranks together.

    :param common: moments that all ranks had
    :param of_ranks: those of each rank after some more values
    :return: the moments of the values before and of all ranks' later values
    """
    count = common.n + sum(each.n - common.n for each in of_ranks)
    if count == common.n:
        return common
    # Sums of the values and of their squares, as distances from the common mean: nothing large cancels.
    shifts = [each.mean - common.mean for each in of_ranks]
    before = common.n * common.var
    total = sum(each.n * shift for each, shift in zip(of_ranks, shifts, strict=True))
    squares = sum(each.n * (each.var + shift**2) - before for each, shift in zip(of_ranks, shifts, strict=True))
    shift = total / count
    return Moments(common.mean + shift, (before + squares) / count - shift**2, count)


@lru_cache(maxsize=1)
def _processes(group: Any) -> list[Process]:
    """The processes of all ranks of a group, from which a rank that is lost is named later."""
    return _gather_by_messages(Process(socket.gethostname(), os.getpid(), psutil.Process().create_time()))


@lru_cache(maxsize=1)
def _board(group: Any) -> Board | None:
    """Memory that all ranks of a group share; None where they cannot, on several machines for one."""
    _processes(group)
    (name, *_) = _gather_by_messages(shared_memory.create(world_size()) if rank() == 0 else "")
    board = Board.open(name, rank(), world_size(), _require_all)
    opened = _gather_by_messages(board is not None)
    if name and rank() == 0:
        os.unlink(name)
    return board if all(opened) else None


@contextmanager
def _lost_rank_named() -> Iterator[None]:
    """
    :raises RankError: in place of the error of a connection, which does not say whose it was
    """
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        lost = _find_lost()
        if not lost:
            raise
        # The others leave next. They find the first message, unless the store was in the process that has ended.
        with suppress(RuntimeError):
            lost = dist.distributed_c10d._get_default_store().compare_set(_LOST, "", lost).decode()
        raise RankError(f"training stops: {lost}") from error


def _find_lost() -> str:
    """Which ranks on this machine have ended, or which may have, on others; empty if none is known."""
    if not _processes.cache_info().currsize:
        return ""
    ranks = list(enumerate(_processes(dist.group.WORLD)))
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < deadline:
        if ended := _find_ended():
            return ended
        time.sleep(0.05)
    here = socket.gethostname()
    others = [f"{number} on {each.host}" for number, each in ranks if each.host != here]
    return f"a rank on another machine has ended, one of {', '.join(others)}" if others else ""


def _find_ended() -> str:
    """Which ranks on this machine have ended; empty if none has."""
    here, ranks = socket.gethostname(), _processes(dist.group.WORLD)
    of_here = [(number, each) for number, each in enumerate(ranks) if each.host == here]
    ended = [f"rank {number} (process {each.pid})" for number, each in of_here if _ended(each)]
    return f"{' and '.join(ended)} of {len(ranks)} on {here} has ended" if ended else ""


def _require_all() -> None:
    """
    :raises RuntimeError: if a rank on this machine has ended
    """
    if ended := _find_ended():
        raise RuntimeError(ended)


def _ended(process: Process) -> bool:
    try:
        found = psutil.Process(process.pid)
        return bool(found.status() == psutil.STATUS_ZOMBIE or found.create_time() != process.created)
    except psutil.NoSuchProcess:
        return True
