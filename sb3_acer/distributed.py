"""
What the processes of a torch.distributed group, its ranks, tell each other in data-parallel training.

Without a group, or in a group of one, the functions return at once. Otherwise all ranks must call them, in the same
order. On one machine they share memory where they can; otherwise they send messages. Objects are sent as pickles, so
all ranks must be trusted.
"""

import io
import os
import pickle
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import torch as th
import torch.distributed as dist

from sb3_acer.shared_memory import Board, ExchangeError, shared_file

_AVAILABLE = dist.is_available()
_LOST = "sb3_acer/lost"
_SECONDS_TO_DIE = 5.0  # between the end of a process's connections and that of the process

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
    namespace: str
    """of process numbers, on Linux; empty elsewhere"""
    pid: int


class Group(NamedTuple):
    """What is known of the group that this process is in."""

    world: Callable[[], Any]
    """a weak reference to torch's group"""
    processes: list[Process]
    """of all ranks"""
    board: Board | None
    """memory that all ranks share; None where they cannot"""


_group: Group | None = None


def world_size() -> int:
    """
    :return: the number of ranks; 1 without a group
    """
    return dist.get_world_size() if _AVAILABLE and dist.is_initialized() else 1


def rank() -> int:
    """
    :return: the number of this rank, from 0
    """
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def torchrun_group() -> Iterator[None]:
    """
    The group that torchrun describes in environment variables, if it has started this process: gloo for tensors on the
    CPU, nccl for those on GPUs. If a machine has fewer GPUs than ranks, its ranks share them, and gloo is for all.
    """
    if not _AVAILABLE or not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    n_gpus = th.cuda.device_count()
    if n_gpus:
        th.cuda.set_device(int(os.environ["LOCAL_RANK"]) % n_gpus)
    store, own_rank, n_ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    # The store outlives a restart of the ranks, and then holds the addresses of those that have ended.
    name = _agree_on_a_name(store, own_rank, n_ranks)
    own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    own_store.set(f"GPUs of rank {own_rank}", str(int(n_gpus >= int(os.environ["LOCAL_WORLD_SIZE"]))))
    has_own = [own_store.get(f"GPUs of rank {each}") == b"1" for each in range(n_ranks)]
    backend = None if all(has_own) else "gloo"  # to nccl two ranks on one GPU are an error
    dist.init_process_group(backend, store=own_store, rank=own_rank, world_size=n_ranks)
    try:
        if n_ranks > 1:
            _own_group()  # from now on a rank that ends is named
        yield
    finally:
        _leave()
        dist.destroy_process_group()


def is_outside_group() -> bool:
    """Whether torchrun has started several processes, and this one has joined no group."""
    if not _AVAILABLE or not dist.is_torchelastic_launched() or dist.is_initialized():
        return False
    return int(os.environ["WORLD_SIZE"]) > 1


def _agree_on_a_name(store: Any, own_rank: int, n_ranks: int) -> str:
    """
    A name that the ranks of this start share, and that no earlier start had. torchrun's count of restarts would not do,
    since each machine has a count of its own.

    Rank 0 chooses the name. Each other rank posts a number of its own and waits for the answer to that number, so that
    what ended ranks have posted does no harm.

    :param store: the store that all starts use
    :raises RuntimeError: if a rank does not come within the store's timeout
    """
    if own_rank > 0:
        number = uuid.uuid4().hex
        store.set(f"sb3_acer/rank {own_rank}", number)
        name: str = store.get(f"sb3_acer/answer to {number}").decode()
        store.set(f"{name}/rank {own_rank}", "")
        return name
    name = f"sb3_acer/start {uuid.uuid4().hex}"
    waiting, deadline = set(range(1, n_ranks)), time.monotonic() + store.timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise RuntimeError(f"all {n_ranks} ranks must start within {store.timeout}, got none of {sorted(waiting)}")
        for each in [each for each in waiting if store.check([f"sb3_acer/rank {each}"])]:
            store.set(f"sb3_acer/answer to {store.get(f'sb3_acer/rank {each}').decode()}", name)
        time.sleep(0.05)
        waiting = {each for each in waiting if not store.check([f"{name}/rank {each}"])}
    return name


def all_reduce_mean(vectors: Sequence[th.Tensor]) -> None:
    """
    Replace vectors by their means over the ranks, which are equal on all ranks to the bit.

    :param vectors: of the same sizes and dtypes on all ranks
    """
    n_ranks = world_size()
    if n_ranks == 1 or not vectors:
        return
    board = _own_group().board
    for vector in vectors:
        whole = vector.contiguous()
        with _exchange():
            if board is not None and whole.device.type == "cpu":
                board.sum(whole)
            else:
                if board is not None:
                    board.gather(b"")  # fails if a rank has been lost, for which nccl would wait for minutes
                dist.all_reduce(whole)
        whole.div_(n_ranks)
        if whole is not vector:
            vector.copy_(whole)


def gather(value: T) -> list[T]:
    """
    :param value: anything that can be pickled
    :return: the values of all ranks, by rank
    """
    if world_size() == 1:
        return [value]
    board = _own_group().board
    if board is None:
        return _gather_by_messages(value)
    own = pickle.dumps(value)
    with _exchange():
        of_ranks = board.gather(own)
    return [pickle.loads(each) for each in of_ranks]


def _gather_by_messages(value: T) -> list[T]:
    values: list[Any] = [None] * world_size()
    with _exchange():
        dist.all_gather_object(values, value)
    return values


def on_all_ranks(function: Callable[[], T]) -> list[T]:
    """
    Call a function that exchanges nothing between the ranks. If it raises an error on one rank, all ranks raise one.

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
    :return: the value of rank 0; in a group its tensors are on the CPU
    """
    if world_size() == 1:
        return value
    file = io.BytesIO()
    if rank() == 0:
        th.save(value, file)
    received: T = th.load(io.BytesIO(gather(file.getvalue())[0]), "cpu", weights_only=False)
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


def _own_group() -> Group:
    """The group of this process. At the first call its ranks make themselves known to each other."""
    global _group
    if _group is None or _group.world() is not dist.group.WORLD:
        _group = None
        processes = _gather_by_messages(Process(*_here(), os.getpid()))
        _group = Group(weakref.ref(dist.group.WORLD), processes, _open_board(processes))
    return _group


def _here() -> tuple[str, str]:
    """This machine, and the namespace of process numbers."""
    try:
        return socket.gethostname(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname(), ""


def _open_board(processes: list[Process]) -> Board | None:
    if len({each[:2] for each in processes}) > 1:
        return None
    with shared_file(world_size()) if rank() == 0 else nullcontext("") as own_name:
        name = _gather_by_messages(own_name)[0]
        board = Board.open(name, rank(), world_size(), _require_all, _timeout())
        opened = _gather_by_messages(board is not None)
    return board if all(opened) else None


def _timeout() -> float:
    """Seconds that the group waits for a message."""
    try:
        backend: Any = dist.group.WORLD._get_backend(th.device("cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a group for GPUs alone
        return 1800.0


def _leave() -> None:
    """Others that wait for this rank hear that it has left."""
    global _group
    if _group is not None and _group.board is not None:
        _group.board.leave()
    _group = None


@contextmanager
def _exchange() -> Iterator[None]:
    """
    One exchange between the ranks. A rank that fails during it leaves the group, so that the others fail too.

    :raises RankError: in place of errors that do not say which rank was lost
    """
    try:
        yield
    except BaseException as error:
        reason = ""
        if isinstance(error, ExchangeError):
            reason = str(error)
        elif isinstance(error, RuntimeError):
            reason = _find_lost()
        if reason:
            # The others leave next. They find the first reason, unless the store was in the process that has ended.
            with suppress(RuntimeError):
                reason = dist.distributed_c10d._get_default_store().compare_set(_LOST, "", reason).decode()
        if _group is not None and _group.board is not None:
            _group.board.leave(in_midst=True)
        if reason:
            raise RankError(f"training stops: {reason}") from error
        raise


def _find_lost() -> str:
    """The ranks on this machine that have ended, or else those on others that may have; empty if there are none."""
    if _group is None:
        return ""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < deadline:
        if ended := _find_ended():
            return ended
        time.sleep(0.05)
    others = [f"{number} on {each.host}" for number, each in enumerate(_group.processes) if each[:2] != _here()]
    return f"a rank on another machine has ended, one of {', '.join(others)}" if others else ""


def _find_ended() -> str:
    """The ranks on this machine that have ended, in words; empty if none has."""
    assert _group is not None
    ended = [
        f"rank {number} (process {each.pid})"
        for number, each in enumerate(_group.processes)
        if each[:2] == _here() and _has_ended(each.pid)
    ]
    verb = "has" if len(ended) == 1 else "have"
    return f"{' and '.join(ended)} of {len(_group.processes)} on {_here()[0]} {verb} ended" if ended else ""


def _require_all() -> None:
    """
    :raises ExchangeError: if a rank on this machine has ended
    """
    if ended := _find_ended():
        raise ExchangeError(ended)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
