"""The ring of slots: all columns of the replay buffer together."""

from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_acer.columns import Column, FrameColumn, SideTable, take
from sb3_acer.frames import FrameStack

# torch can hardly index these
_STORED_AS = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class Taken(NamedTuple):
    """B sequences of T steps."""

    steps: dict[str, th.Tensor]
    """columns of the steps, ``[T, B, ...]``"""
    observations: dict[str, th.Tensor]
    """by key, ``[T + 1, B, ...]``"""
    finals: dict[str, th.Tensor]
    """observations that followed the truncated steps, by key, ``[F, ...]``"""
    final_steps: np.ndarray
    """these steps, as t * B + b, ``[F]``"""
    states: th.Tensor
    """recurrent states at the first step, ``[B, W]``"""


class Ring:
    """
    Slots of ``n_steps`` rows of all environments, and the rollout under way.

    Observations are dicts here; those of a space that is not a Dict have the key "".

    :param n_slots: slots that can be sampled; the ring has some more, which keep the past of stacked frames
    :param n_steps: rows of a slot (T)
    :param observation_spaces: by keys
    :param stacks: how observations are made of frames, by keys; those without one are stored as they are
    :param strict: whether a stack in the midst of an episode must be the previous one shifted by one new frame
    :param action: actions of all environments, ``[n_envs, D]``, for their shape and type
    :param behaviour: statistics of all environments, ``[n_envs, P]``, for their shape
    :param states: recurrent states of all environments, ``[n_envs, W]``, for their shape
    :param device: where observations are stored
    """

    def __init__(
        self,
        n_slots: int,
        n_steps: int,
        observation_spaces: dict[str, spaces.Space[Any]],
        stacks: dict[str, FrameStack],
        strict: bool,
        action: np.ndarray,
        behaviour: np.ndarray,
        states: np.ndarray,
        device: th.device,
    ) -> None:
        self.n_steps, self.n_envs = n_steps, len(action)
        self.n_slots = n_slots + _n_spare(n_steps, stacks)
        self._stacks, self._strict, self._device = stacks, strict, device
        of_steps: dict[str, tuple[tuple[int, ...], Any, int]] = {
            "actions": (action.shape, action.dtype, 0),
            "behaviour": (behaviour.shape, np.float32, 0),
            "rewards": ((self.n_envs,), np.float32, 0),
            "terminated": ((self.n_envs,), np.bool_, 0),
            "truncated": ((self.n_envs,), np.bool_, 0),
            "final_place": ((self.n_envs,), np.int64, -1),  # place in the table of final observations, -1 for none
        }
        self.steps = {
            name: Column(self.n_slots, n_steps, shape, dtype, fill=fill)
            for name, (shape, dtype, fill) in of_steps.items()
        }
        self.states = th.from_numpy(np.zeros((self.n_slots, *states.shape), np.float32))
        """recurrent states at each slot's first step, ``[n_slots, n_envs, W]``"""
        self.finals = SideTable(device)
        """final observations of truncated steps"""
        self._replaced: list[tuple[SideTable, th.Tensor]] | None = None  # places that finish has made useless
        self.following: dict[str, np.ndarray] = {}
        """observations after the last step, ``[n_envs, ...]``"""
        self.observations: dict[str, Column | FrameColumn] = {}
        for key, space in observation_spaces.items():
            self.observe(key, space)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        columns = *self.steps.values(), *self.observations.values()
        return self.states.nbytes + sum(column.nbytes for column in columns)

    def observe(self, key: str, space: spaces.Space[Any]) -> None:
        """
        Give the observations one more part, which is 0 in those that are stored.

        :param key: its key
        :param space: its space
        """
        dtype: Any = _STORED_AS.get(np.dtype(space.dtype), space.dtype)
        rows = self.following[key] = np.zeros((self.n_envs, *(space.shape or ())), dtype)
        self.finals.extend(key, rows[0])
        if key in self._stacks:
            self.observations[key] = FrameColumn(self.n_slots, self.n_steps, self._stacks[key], rows, self._device)
        else:
            self.observations[key] = Column(self.n_slots, self.n_steps, rows.shape, rows.dtype, True, self._device)

    def write(
        self,
        step: int,
        observations: dict[str, np.ndarray],
        following: dict[str, np.ndarray],
        row: dict[str, np.ndarray],
        starts: np.ndarray,
    ) -> None:
        """
        Write a step of the rollout under way.

        :param step: its row
        :param observations: before the step, ``[n_envs, ...]``
        :param following: after the step, ``[n_envs, ...]``
        :param row: what else is stored of a step, by the names of the columns, ``[n_envs, ...]``
        :param starts: whether the step begins an episode, bool, ``[n_envs]``
        :raises ValueError: if stacks must continue and one does not; nothing is written then
        """
        for key, column in self.observations.items():
            if self._strict and isinstance(column, FrameColumn):
                column.require_continues(observations[key], starts)
        for key, rows in observations.items():
            self.observations[key].write(step, rows)
        for key, rows in following.items():
            self.following[key][...] = rows
        for name, values in row.items():
            self.steps[name].rollout[step] = values
        self.steps["truncated"].rollout[step] = False
        self.steps["final_place"].rollout[step] = -1

    def truncate(self, step: int | None, slot: int, envs: np.ndarray | None = None) -> None:
        """
        Mark the last step as truncated, with what follows as its final observation.

        :param step: its row in the rollout under way; None if it is the last step of the slot before ``slot``
        :param slot: the slot that is written next
        :param envs: the environments, bool, ``[n_envs]``; None for those whose episode goes on
        """
        columns = {name: self.steps[name] for name in ("terminated", "truncated", "final_place")}
        row = slot * self.n_steps - 1 if step is None else step  # -1 is the ring's last row
        terminated, truncated, places = (
            (column.ring.numpy() if step is None else column.rollout)[row] for column in columns.values()
        )
        if envs is None:
            envs = ~(terminated | truncated)
        else:
            terminated ^= envs
        truncated |= envs
        for env in np.flatnonzero(envs):
            places[env] = self.finals.put({key: rows[env] for key, rows in self.following.items()})

    def finish(self, slot: int) -> None:
        """
        Move the rollout under way into a slot. If this is interrupted, it can be called again, before
        :meth:`free_replaced`.

        :param slot: a slot that is not sampled
        """
        for key, rows in self.following.items():
            self.observations[key].write(self.n_steps, rows)
        if self._replaced is None:
            stacked = [column for column in self.observations.values() if isinstance(column, FrameColumn)]
            first = slot * self.n_steps
            finals = self.steps["final_place"].ring[first : first + self.n_steps].clone()
            self._replaced = [(self.finals, finals), *((column.older, column.places_of(slot)) for column in stacked)]
        for column in (*self.steps.values(), *self.observations.values()):
            column.finish(slot)

    def free_replaced(self) -> None:
        """Free the places in side tables of the rows that :meth:`finish` has replaced."""
        replaced, self._replaced = self._replaced or [], None
        for table, places in replaced:
            table.free(places)

    def take(self, slots: np.ndarray, envs: np.ndarray) -> Taken:
        """
        :param slots: ``[B]``
        :param envs: ``[B]``
        :return: the sequences of these slots and environments
        """
        rows = (slots * self.n_steps + np.arange(self.n_steps + 1)[:, np.newaxis]) % (self.n_slots * self.n_steps)
        places = rows * self.n_envs + envs
        steps = {name: column.take(places[:-1]) for name, column in self.steps.items()}
        observations = {key: column.take(places) for key, column in self.observations.items()}
        final_places = steps["final_place"].numpy().reshape(-1)
        final_steps = np.flatnonzero(final_places >= 0)
        finals = {key: take(table, final_places[final_steps]) for key, table in self.finals.rows.items()}
        return Taken(steps, observations, finals, final_steps, take(self.states, slots * self.n_envs + envs, 2))

    def state_dict(self, n_rows: int) -> dict[str, Any]:
        """
        :param n_rows: rows that are in use
        :return: everything, as nested dicts of arrays that are not copied
        """
        return {
            "observations": {key: column.state_dict(n_rows) for key, column in self.observations.items()},
            "steps": {name: column.state_dict(n_rows) for name, column in self.steps.items()},
            "states": self.states,
            "following": dict(self.following),
            "finals": self.finals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        :param state: what :meth:`state_dict` returned for a ring of the same sizes
        """
        for key, column in self.observations.items():
            column.load_state_dict(state["observations"][key])
        for name, column in self.steps.items():
            column.load_state_dict(state["steps"][name])
        self.states.copy_(th.as_tensor(state["states"]))
        for key, rows in self.following.items():
            rows[...] = state["following"][key]
        self.finals.load_state_dict(state["finals"])


def _n_spare(n_steps: int, stacks: dict[str, FrameStack]) -> int:
    """Slots before the oldest that is sampled: for its past, and for the border row of the newest slot."""
    return -(-max((stack.n_frames for stack in stacks.values()), default=1) // n_steps)
