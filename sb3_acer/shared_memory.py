"""
What the ranks of one machine tell each other through memory that they share. Sending a message takes about a
millisecond, as long as an update of a small network. Exchanging a small vector here takes some microseconds.
"""

import mmap
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch as th

PART = 2**18
"""Bytes that a rank posts at once."""

_FOLDER = Path("/dev/shm")
_LINE = 64  # bytes of a processor's cache line: ranks that write to the same one slow each other down
_LOOKS = 1000  # at what others have posted, before the first sleep: a few milliseconds in all
_LONGEST_SLEEP = 0.01  # seconds
_CHECK_EVERY = 1.0  # seconds
_AT_END = -1


class ExchangeError(RuntimeError):
    """The ranks can exchange nothing more."""


@contextmanager
def shared_file(n_ranks: int) -> Iterator[str]:
    """
    The name of a file in memory, for all ranks to :meth:`~Board.open` within the block. It is empty if this machine
    has no such files, or no room for one.
    """
    name = ""
    # Only x86 promises that others see the stores of a processor in the order in which it made them.
    if platform.machine() == "x86_64" and _FOLDER.is_dir():
        with suppress(OSError):
            file, name = tempfile.mkstemp(prefix="sb3_acer-", dir=_FOLDER)
            os.close(file)
    try:
        yield name if name and _has_room(name, _size(n_ranks)) else ""
    finally:
        if name:
            os.unlink(name)


def _has_room(name: str, size: int) -> bool:
    """Whether the file can grow to this size. If not, writing to the memory would end the process."""
    with suppress(OSError), open(name, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return True
    return False


def _size(n_ranks: int) -> int:
    return n_ranks * (_LINE + 2 * PART)


class Board:
    """
    Memory in which every rank posts part after part, for all to read. All ranks must make the same calls.

    A rank writes to its two places alternately. It posts in turn n + 1 only after it has read all parts of turn n, so
    nobody overwrites in turn n + 2 what another still reads.

    :param memory: zeros at first, the same on all ranks
    :param rank: number of this rank
    :param n_ranks: number of ranks
    :param check: called every second of waiting; raises an error if others will not come
    :param timeout: seconds to wait at most
    """

    def __init__(self, memory: mmap.mmap, rank: int, n_ranks: int, check: Callable[[], None], timeout: float) -> None:
        lines = np.frombuffer(memory, np.int64, n_ranks * _LINE // 8).reshape(n_ranks, -1)
        self._turns = lines[:, 0]
        self._left = lines[:, 1]  # the turn that a rank has not finished; -1 if it has left after its last one
        self._headers = lines[:, 2:6].reshape(n_ranks, 2, 2)  # of the parts in both places: a kind and a length
        self._places = th.frombuffer(memory, dtype=th.uint8, offset=n_ranks * _LINE).view(2, n_ranks, PART)
        self._rank, self._turn, self._check, self._timeout = rank, 0, check, timeout

    @classmethod
    def open(
        cls, name: str, rank: int, n_ranks: int, check: Callable[[], None], timeout: float = 1800
    ) -> "Board | None":
        """
        :param name: the name of a :func:`shared_file`
        :return: the board; None if there is no such file
        """
        try:
            with open(name, "r+b") as file:
                return cls(mmap.mmap(file.fileno(), _size(n_ranks)), rank, n_ranks, check, timeout)
        except OSError:
            return None

    def leave(self, in_midst: bool = False) -> None:
        """
        Post nothing more. Others that wait for this rank get an :class:`ExchangeError`, now or later.

        :param in_midst: whether this rank leaves during an exchange. The others then get the error in the same exchange
            or in their next one.
        """
        self._left[self._rank] = self._turn if in_midst else _AT_END

    def sum(self, vector: th.Tensor) -> None:
        """
        Replace a vector by the sum over the ranks, which is equal on all ranks to the bit.

        :param vector: on the CPU and contiguous, of the same size and dtype on all ranks
        :raises ExchangeError: if another rank has left, will not come, or does something else
        """
        kind = zlib.crc32(str(vector.dtype).encode())
        for chunk in th.split(vector.view(-1), PART // vector.element_size()):
            own = chunk.view(th.uint8)
            parts, lengths = self._post(own, kind, vector.numel())
            if (lengths != vector.numel()).any():
                raise ExchangeError(f"ranks must exchange vectors of one length, got {lengths.tolist()}")
            th.sum(parts[:, : len(own)].view(chunk.dtype), 0, out=chunk)

    def gather(self, own: bytes) -> list[bytes]:
        """
        :param own: of any length
        :return: the bytes of all ranks, by rank
        :raises ExchangeError: see :meth:`sum`
        """
        all_own = th.frombuffer(bytearray(own) + b"\0", dtype=th.uint8)[: len(own)]  # frombuffer takes nothing empty
        whole = [bytearray() for _ in self._turns]
        start, longest = 0, 1
        while start < longest:
            parts, lengths = self._post(all_own[start : start + PART], 0, len(own))
            for received, part, length in zip(whole, parts.numpy(), lengths, strict=True):
                received += part[: max(length - start, 0)].tobytes()
            start, longest = start + PART, max(lengths)
        return [bytes(received) for received in whole]

    def _post(self, part: th.Tensor, kind: int, length: int) -> tuple[th.Tensor, np.ndarray]:
        """
        :param part: at most :data:`PART` bytes, uint8, ``[n]``
        :param kind: what is done, the same number on all ranks
        :param length: of the whole that this is a part of
        :return: the parts of all ranks, each filled up with old bytes, ``[n_ranks, PART]``, valid until the next call;
            and the lengths, ``[n_ranks]``
        """
        self._turn += 1
        broken = self._broken()
        broken[self._rank] |= self._left[self._rank] == _AT_END
        self._require_none_left(broken)
        place = self._turn % 2
        self._headers[self._rank, place] = kind, length
        self._places[place, self._rank, : len(part)] = part
        self._turns[self._rank] = self._turn
        self._wait()
        self._require_none_left(self._broken())
        kinds, lengths = self._headers[:, place].T
        if (kinds != kind).any():
            raise ExchangeError("ranks must make the same calls with the same dtypes, got different ones")
        return self._places[place], lengths

    def _wait(self) -> None:
        """Wait until all ranks have posted their parts of this turn."""
        start = checked = time.monotonic()
        n_looks = 0
        while self._turns.min() < self._turn:
            left = self._left != 0  # before their turns: they may have posted this one and then left
            self._require_none_left(left & (self._turns < self._turn))
            n_looks += 1
            if n_looks < _LOOKS:
                os.sched_yield()  # another rank may need this core
                continue
            now = time.monotonic()
            if now - checked > _CHECK_EVERY:
                checked = now
                self._check()
            if now - start > self._timeout:
                raise ExchangeError(f"other ranks have not come within {self._timeout:g} seconds")
            time.sleep(min((now - start) / 10, _LONGEST_SLEEP))

    def _broken(self) -> np.ndarray:
        """Which ranks have not finished this turn or an earlier one, ``[n_ranks]``."""
        broken: np.ndarray = (self._left > 0) & (self._left <= self._turn)
        return broken

    def _require_none_left(self, left: np.ndarray) -> None:
        if left.any():
            raise ExchangeError(f"rank {left.argmax()} has left its group")
