"""The ring of slots: all columns of the replay buffer together."""

import math
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_acer.columns import Column, FrameColumn, SideTable, take
from sb3_acer.frames import FrameStack

# torch can hardly index these
_STORED_AS = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}
_Rows = dict[str, th.Tensor]  # by names of columns, or by keys of observations


class Ring:
    """
    Slots of ``n_steps`` rows of all environments. The row after a slot's last step, with the observation that followed,
    is the first row of the next slot.

    Observations are dicts here; those of a space that is not a Dict have the key "".

    :param n_slots: slots that can be sampled. The ring also has the slot that is written, and room for the row after
        it and for the frames before the oldest slot that can be sampled.
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
        n_frames = max((stack.n_frames for stack in stacks.values()), default=1)
        self.n_all_slots = n_slots + 1 + math.ceil(n_frames / n_steps)  # n_frames - 1 older frames, and the row after
        self.n_rows = self.n_all_slots * n_steps
        self._stacks, self._strict, self._device = stacks, strict, device
        per_env = (self.n_envs,)
        self.steps = {
            "actions": Column(self.n_rows, action.shape, action.dtype),
            "behaviour": Column(self.n_rows, behaviour.shape, np.float32),
            "rewards": Column(self.n_rows, per_env, np.float32),
            "terminated": Column(self.n_rows, per_env, np.bool_),
            "truncated": Column(self.n_rows, per_env, np.bool_),
            "final_place": Column(self.n_rows, per_env, np.int64, fill=-1),  # in the table of finals; -1 for none
        }
        self.states = th.from_numpy(np.zeros((self.n_all_slots, *states.shape), np.float32))
        """recurrent states at each slot's first step, ``[n_all_slots, n_envs, W]``"""
        self.finals = SideTable(device)
        """final observations of truncated steps"""
        self.following: dict[str, np.ndarray] = {}
        """observations after the last step, ``[n_envs, ...]``"""
        self.observations: dict[str, Column | FrameColumn] = {}
        for key, space in observation_spaces.items():
            self.add_observation_key(key, space)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        columns = *self.steps.values(), *self.observations.values()
        return self.states.nbytes + sum(column.nbytes for column in columns)

    def add_observation_key(self, key: str, space: spaces.Space[Any]) -> None:
        """
        Add a key to the observations. It is 0 in all that were stored before.

        :param key: its key
        :param space: its space
        """
        dtype: Any = _STORED_AS.get(np.dtype(space.dtype), space.dtype)
        rows = self.following[key] = np.zeros((self.n_envs, *(space.shape or ())), dtype)
        self.finals.extend(key, rows[0])
        if key in self._stacks:
            self.observations[key] = FrameColumn(self.n_rows, self._stacks[key], rows, self._device)
        else:
            self.observations[key] = Column(self.n_rows, rows.shape, rows.dtype, self._device)

    def write(
        self,
        row: int,
        observations: dict[str, np.ndarray],
        following: dict[str, np.ndarray],
        step: dict[str, np.ndarray],
        ended: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """
        Write a step.

        :param row: its row, in a slot that is not sampled
        :param observations: before the step, ``[n_envs, ...]``
        :param following: after the step, ``[n_envs, ...]``
        :param step: what else is stored of a step, by the names of the columns, ``[n_envs, ...]``
        :param ended: whether the step before ended its episode, bool, ``[n_envs]``
        :return: the observations after the step, as they are stored
        :raises ValueError: if stacks must continue and one does not; nothing is written then
        """
        for key, column in self.observations.items():
            if self._strict and isinstance(column, FrameColumn):
                column.require_continues(observations[key], ended)
        for key, rows in observations.items():
            self.observations[key].write(row, rows)
        replaced = self.steps["final_place"].ring[row].copy()
        for name, values in {**step, "truncated": np.False_, "final_place": np.int64(-1)}.items():
            self.steps[name].write(row, values)
        self.finals.free(replaced)
        stored = {key: np.empty_like(rows) for key, rows in self.following.items()}
        for key, rows in stored.items():
            rows[...] = following[key]
            if (row + 1) % self.n_steps == 0:  # the last step of a slot
                self.observations[key].write((row + 1) % self.n_rows, rows, provisional=True)
        return stored

    def truncate(self, row: int, following: dict[str, np.ndarray], envs: np.ndarray) -> None:
        """
        Mark a step as truncated instead of terminated.

        :param row: its row
        :param following: the observations after it, which become final observations, ``[n_envs, ...]``
        :param envs: in which environments, bool, ``[n_envs]``
        """
        terminated, truncated, places = (
            self.steps[name].ring[row] for name in ("terminated", "truncated", "final_place")
        )
        terminated &= ~envs
        truncated |= envs
        for env in np.flatnonzero(envs):
            places[env] = self.finals.put({key: rows[env] for key, rows in following.items()})

    def take(self, slots: np.ndarray, envs: np.ndarray) -> tuple[_Rows, _Rows, _Rows, np.ndarray, th.Tensor]:
        """
        :param slots: ``[B]``
        :param envs: ``[B]``
        :return: of the sequences of these slots and environments: the columns of the steps, ``[T, B, ...]``; the
            observations, ``[T + 1, B, ...]``; those that followed the truncated steps, ``[F, ...]``; these steps, as
            t * B + b, ``[F]``; and the recurrent states at the first step, ``[B, W]``
        """
        rows = (slots * self.n_steps + np.arange(self.n_steps + 1)[:, np.newaxis]) % self.n_rows
        places = rows * self.n_envs + envs
        steps = {name: column.take(places[:-1]) for name, column in self.steps.items()}
        observations = {key: column.take(places) for key, column in self.observations.items()}
        final_places = steps["final_place"].numpy().reshape(-1)
        final_steps = np.flatnonzero(final_places >= 0)
        finals = {key: take(table, final_places[final_steps]) for key, table in self.finals.rows.items()}
        return steps, observations, finals, final_steps, take(self.states, slots * self.n_envs + envs, 2)

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
