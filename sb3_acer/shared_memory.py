"""
What the ranks of one machine tell each other through memory that they share. A message takes a millisecond, as long as
a small network's update; this takes some microseconds.
"""

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch as th

PART = 2**18
"""Bytes that a rank posts at once."""

_FOLDER = Path("/dev/shm")
_LINE = 64  # bytes of a processor's cache line: ranks that write to the same one slow each other down
_LOOKS = 1000  # before a rank sleeps between two looks, some milliseconds
_SLEEP = 1e-4  # seconds
_LOOKS_A_CHECK = 5000
_TIME_LIMIT = 1800.0  # seconds, as torch's groups have it


def create(n_ranks: int) -> str:
    """
    :param n_ranks: number of ranks
    :return: the name of a file in memory for all of them to :meth:`~Board.open`, to be removed when they have; empty if
        this machine has no such files, or no room for it
    """
    # Only x86 promises that others see the stores of a processor in the order in which it made them.
    if platform.machine() != "x86_64" or not _FOLDER.is_dir():
        return ""
    file, name = tempfile.mkstemp(prefix="sb3_acer-", dir=_FOLDER)
    try:
        os.posix_fallocate(file, 0, _size(n_ranks))
    except OSError:
        os.unlink(name)
        return ""
    finally:
        os.close(file)
    return name


def _size(n_ranks: int) -> int:
    return n_ranks * (_LINE + 2 * PART)


class Board:
    """
    Memory in which every rank posts part after part, for all to read. All ranks must make the same calls.

    A rank has two places, used in turns: whoever has posted its part of the next turn has read those of this one.

    :param memory: zeros at first, the same on all ranks
    :param rank: number of this rank
    :param n_ranks: number of ranks
    :param check: called about every second of waiting; raises an error if others will not come
    """

    def __init__(self, memory: mmap.mmap, rank: int, n_ranks: int, check: Callable[[], None]) -> None:
        lines = n_ranks * _LINE
        self._turns = np.frombuffer(memory, np.int64, lines // 8).reshape(n_ranks, -1)[:, 0]
        self._places = th.frombuffer(memory, dtype=th.uint8, offset=lines).view(2, n_ranks, PART)
        self._rank, self._turn, self._check = rank, 0, check

    @classmethod
    def open(cls, name: str, rank: int, n_ranks: int, check: Callable[[], None]) -> "Board | None":
        """
        :param name: what :func:`create` returned on one rank
        :return: the board; None if there is no such file, because that rank is on another machine, say
        """
        try:
            with open(name, "r+b") as file:
                return cls(mmap.mmap(file.fileno(), _size(n_ranks)), rank, n_ranks, check)
        except OSError:
            return None

    def post(self, part: th.Tensor) -> th.Tensor:
        """
        :param part: at most :data:`PART` bytes, uint8, ``[n]``
        :return: the parts of all ranks, and what is behind shorter ones, ``[n_ranks, PART]``; valid until the next call
        """
        self._turn += 1
        place = self._places[self._turn % 2]
        place[self._rank, : len(part)] = part
        self._turns[self._rank] = self._turn
        self._wait()
        return place

    def sum(self, vector: th.Tensor) -> None:
        """
        Replace a vector by the sum over the ranks, which is equal on all ranks to the bit.

        :param vector: on the CPU, contiguous, of the same size on all ranks
        """
        for chunk in th.split(vector.view(-1), PART // vector.element_size()):
            own = chunk.view(th.uint8)
            th.sum(self.post(own)[:, : len(own)].view(chunk.dtype), 0, out=chunk)

    def gather(self, own: bytes) -> list[bytes]:
        """
        :param own: of any length
        :return: the bytes of all ranks, by rank
        """
        lengths = self.post(th.tensor([len(own)]).view(th.uint8))[:, :8].view(th.int64).flatten().tolist()
        all_own = th.frombuffer(bytearray(own) + b"\0", dtype=th.uint8)  # frombuffer takes nothing that is empty
        whole = [bytearray() for _ in lengths]
        for start in range(0, max(lengths), PART):
            parts = self.post(all_own[start : start + PART]).numpy()
            for received, part, length in zip(whole, parts, lengths, strict=True):
                received += part[: max(length - start, 0)].tobytes()
        return [bytes(received) for received in whole]

    def _wait(self) -> None:
        """Until all ranks have posted their parts of this turn."""
        start = time.monotonic()
        n_looks = 0
        while self._turns.min() < self._turn:
            n_looks += 1
            if n_looks < _LOOKS:
                os.sched_yield()  # another rank may need this core
                continue
            time.sleep(_SLEEP)
            if n_looks % _LOOKS_A_CHECK == 0:
                self._check()
                if time.monotonic() - start > _TIME_LIMIT:
                    raise RuntimeError(f"the other ranks have not come within {_TIME_LIMIT:.0f} seconds")
