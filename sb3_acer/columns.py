"""Columns of the replay buffer: what is stored of each step of all environments, in a ring of rows."""

import math
from typing import Any

import numpy as np
import torch as th

from sb3_acer.frames import FrameStack


class Column:
    """
    Rows stored as they are.

    :param n_rows: rows of the ring
    :param shape: shape of a row, ``(n_envs, ...)``
    :param dtype: type of its numbers
    :param device: where the ring is stored
    :param fill: value of rows that have not been written
    """

    def __init__(
        self,
        n_rows: int,
        shape: tuple[int, ...],
        dtype: Any,
        device: th.device | str = "cpu",
        fill: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.ring: Any  # an array on the CPU, where torch takes several times as long to write a row; else a tensor
        if th.device(device).type == "cpu":
            # Zeros take no memory until they are written.
            self.ring = np.full((n_rows, *shape), fill, dtype) if fill else np.zeros((n_rows, *shape), dtype)
        else:
            of_torch = th.from_numpy(np.empty(0, dtype)).dtype
            self.ring = th.full((n_rows, *shape), fill, dtype=of_torch, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return int(self.ring.nbytes)

    def write(self, row: int, values: Any, provisional: bool = False) -> None:
        """
        :param row: of the ring
        :param values: ``[n_envs, ...]``, or one number for all of it
        :param provisional: see :meth:`FrameColumn.write`
        """
        is_array = isinstance(self.ring, np.ndarray)
        self.ring[row] = values if is_array else th.from_numpy(np.asarray(values, self.dtype))

    def take(self, places: np.ndarray) -> th.Tensor:
        """
        :param places: rows of the ring times the number of environments plus environments, ``[T, B]``
        :return: ``[T, B, ...]``
        """
        return take(self.ring, places, 2)

    def state_dict(self, n_rows: int) -> dict[str, Any]:
        """
        :param n_rows: rows of the ring that are in use
        :return: all arrays that the column consists of, not copied
        """
        return {"ring": self.ring[:n_rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        :param state: what :meth:`state_dict` returned for a column of the same sizes
        """
        rows: Any = th.as_tensor(state["ring"])
        is_array = isinstance(self.ring, np.ndarray)
        rows = rows.numpy(force=True) if is_array else rows
        if rows.dtype != self.ring.dtype or rows.shape[1:] != self.ring.shape[1:]:
            raise TypeError(f"rows of {self.ring.dtype} and shape {tuple(self.ring.shape[1:])} are needed")
        if is_array and len(rows) == len(self.ring):
            self.ring = rows  # without a second copy in memory
        else:
            self.ring[: len(rows)] = rows


class SideTable:
    """
    Rows that few steps have. Their places are reused.

    :param device: where the rows are stored
    """

    def __init__(self, device: th.device | str) -> None:
        self.rows: dict[str, th.Tensor] = {}
        self._device = device
        self._free: list[int] = []

    def extend(self, name: str, row: np.ndarray) -> None:
        """
        Add a field. It is 0 in all rows stored before.

        :param name: its name
        :param row: an array of its shape and type
        """
        n_places = max(map(len, self.rows.values()), default=0)
        self.rows[name] = th.from_numpy(np.zeros((n_places, *row.shape), row.dtype)).to(self._device)

    def put(self, row: dict[str, np.ndarray]) -> int:
        """
        :return: the place of the row, from which :func:`take` reads it
        """
        if not self._free:
            n_places = len(next(iter(self.rows.values())))
            added = max(n_places, 16)
            for name, rows in self.rows.items():
                self.rows[name] = th.cat((rows, rows.new_zeros((added, *rows.shape[1:]))))
            self._free = list(range(n_places, n_places + added))
        place = self._free.pop()
        for name, rows in self.rows.items():
            rows[place] = th.as_tensor(row[name], device=rows.device)
        return place

    def free(self, places: np.ndarray) -> None:
        """
        :param places: places of rows that are no longer needed; negative numbers are no places
        """
        self._free.extend(places[places >= 0].tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"rows": dict(self.rows), "free": np.array(self._free, np.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = {name: th.as_tensor(state["rows"][name]).to(rows.device) for name, rows in self.rows.items()}
        self._free = np.asarray(state["free"]).tolist()


# What precedes a stack that does not continue the one before; places of a side table are at least 0.
_ZEROS, _REPEATED = -1, -2


class FrameColumn:
    """
    Stacks of frames, of which each new frame is stored once. Sampling restores the stacks, equal to the bit.

    Where a stack is not the previous one shifted by one new frame, as after a reset, its older frames are stored in a
    side table, unless they are zeros or repeat the newest frame.

    :param n_rows: see :class:`Column`
    :param stack: how an observation is made of frames
    :param example: observations of all environments, ``[n_envs, ...]``, for their shape and type
    :param device: see :class:`Column`
    """

    def __init__(self, n_rows: int, stack: FrameStack, example: np.ndarray, device: th.device | str) -> None:
        frames = stack.split(example)
        n_envs = len(example)
        self.stack = stack
        self._frames = Column(n_rows, (n_envs, *frames.shape[2:]), frames.dtype, device)
        # Rows since the stack last began anew, up to the number of older frames.
        self._ages = Column(n_rows, (n_envs,), np.min_scalar_type(-stack.n_frames - 1))
        # Of stacks that began anew, the older frames: a place of the side table, _ZEROS or _REPEATED.
        self._pasts = Column(n_rows, (n_envs,), np.int32, fill=_ZEROS)
        self.older = SideTable(device)
        """older frames of stacks that began anew"""
        self.older.extend("frames", frames[0, :-1])
        self._last: np.ndarray | None = None  # observations of the last row, [n_envs, ...]

    @property
    def nbytes(self) -> int:
        """See :attr:`Column.nbytes`."""
        return sum(column.nbytes for column in self._columns().values())

    def require_continues(self, rows: np.ndarray, ended: np.ndarray) -> None:
        """
        :param rows: ``[n_envs, ...]``
        :param ended: whether the step before ended its episode, bool, ``[n_envs]``
        :raises ValueError: if a stack in the midst of an episode is not the previous one shifted by one new frame
        """
        unexpected = ~(self._continues(rows) | ended)
        if unexpected.any():
            raise ValueError(
                "frame_stack must be the number of frames of an observation, got "
                f"{self.stack.n_frames!r}: in the midst of an episode of environment "
                f"{int(np.flatnonzero(unexpected)[0])} an observation is not the previous one shifted by a frame"
            )

    def _continues(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool) if self._last is None else self.stack.goes_on(rows, self._last)

    def write(self, row: int, rows: np.ndarray, provisional: bool = False) -> None:
        """
        :param row: of the ring
        :param rows: ``[n_envs, ...]``
        :param provisional: whether this row follows a slot's last step, and the next slot's first step overwrites it
        """
        stack, continues = self.stack, self._continues(rows)
        frames = stack.split(rows)
        replaced = self._pasts.ring[row].copy()
        ages = np.where(continues, self._ages.ring[row - 1] + 1, 0)
        pasts = np.full(len(rows), _ZEROS)
        for env in np.flatnonzero(~continues).tolist():
            pasts[env] = self._keep_older(frames[env])
        self._frames.write(row, frames[:, -1])
        self._ages.write(row, np.minimum(ages, stack.n_frames - 1))
        self._pasts.write(row, pasts)
        self.older.free(replaced)
        if not provisional:
            self._last = np.array(rows)

    def _keep_older(self, frames: np.ndarray) -> int:
        if not frames[:-1].any():
            return _ZEROS
        if (frames[:-1] == frames[-1]).all():
            return _REPEATED
        return self.older.put({"frames": frames[:-1]})

    def take(self, places: np.ndarray) -> th.Tensor:
        """See :meth:`Column.take`."""
        ring, stack = self._frames.ring, self.stack
        n_rows, n_envs = ring.shape[:2]
        places = places[..., np.newaxis]
        ages = self._ages.ring.reshape(-1)[places].astype(np.int64)
        pasts = self._pasts.ring.reshape(-1)[places - ages * n_envs]
        back = np.arange(stack.n_frames)[::-1]  # rows before, for each frame of a stack
        # Frames from before a stack began anew are filled in below; until then they are its first frame.
        sources = (places - np.minimum(back, ages) * n_envs) % (n_rows * n_envs)
        frames = take(ring, sources, 2)
        older = back > ages
        blank = (older & (pasts == _ZEROS)).nonzero()
        kept = (older & (pasts >= 0)).nonzero()
        if len(blank[0]):
            frames[tuple(map(th.from_numpy, blank))] = 0
        if len(kept[0]):
            # rows_before is 1 for the frame just before the stack began anew.
            place, rows_before = np.broadcast_to(pasts, older.shape)[kept], (back - ages)[kept]
            table = self.older.rows["frames"]
            frames[tuple(map(th.from_numpy, kept))] = table[th.from_numpy(place), th.from_numpy(-rows_before)]
        stacks = stack.join(frames.flatten(0, 1))
        return stacks.view(*places.shape[:-1], *stacks.shape[1:])

    def state_dict(self, n_rows: int) -> dict[str, Any]:
        """See :meth:`Column.state_dict`."""
        state = {name: column.state_dict(n_rows) for name, column in self._columns().items()}
        return {**state, "older": self.older.state_dict(), "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Column.load_state_dict`."""
        for name, column in self._columns().items():
            column.load_state_dict(state[name])
        self.older.load_state_dict(state["older"])
        self._last = None if state["last"] is None else np.asarray(state["last"])

    def _columns(self) -> dict[str, Column]:
        return {"frames": self._frames, "ages": self._ages, "pasts": self._pasts}


def take(table: np.ndarray | th.Tensor, places: np.ndarray, n_axes: int = 1) -> th.Tensor:
    """
    :param table: ``[N, ...]``
    :param places: of any shape ``[...]``
    :param n_axes: number of the table's first axes that the places count through
    :return: the table's rows at these places
    """
    if isinstance(table, np.ndarray) or table.is_cpu:  # numpy takes a tenth of torch's time for few rows
        rows = np.asarray(table)
        return th.from_numpy(rows.reshape(math.prod(rows.shape[:n_axes]), *rows.shape[n_axes:]).take(places, axis=0))
    indices = th.from_numpy(places).to(table.device)
    return table.flatten(0, n_axes - 1).index_select(0, indices.flatten()).view(*places.shape, *table.shape[n_axes:])
