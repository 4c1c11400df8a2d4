"""A replay buffer of sequences, each step with the distribution that acted."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

NumpyObs = np.ndarray | dict[str, np.ndarray]

# torch can hardly index these
_STORED_AS = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class SequenceBatch(NamedTuple):
    """B sequences of T steps, time-major. On-policy and replayed ones look alike."""

    observations: PyTorchObs
    """``[T + 1, B, ...]``; the last row bootstraps"""
    actions: th.Tensor
    """as the policy sampled them, ``[T, B, D]``"""
    behaviour: th.Tensor
    """statistics of the distribution mu that acted, ``[T, B, P]``"""
    rewards: th.Tensor
    """``[T, B]``"""
    terminated: th.Tensor
    """whether the step ended its episode in a terminal state, bool, ``[T, B]``"""
    truncated: th.Tensor
    """whether the episode was cut at the step (by a time limit, by a reset from outside), bool, ``[T, B]``"""
    final_observations: PyTorchObs
    """what followed the truncated steps, ``[F, ...]``"""
    final_steps: th.Tensor
    """which steps those are, as t * B + b, ``[F]``"""
    states: th.Tensor
    """what the policy that acted remembered before the first step, ``[B, W]``"""
    envs: np.ndarray
    """the environment that each sequence is from, ``[B]``"""

    @property
    def ends(self) -> th.Tensor:
        """whether an episode ended at the step, in whatever way, bool, ``[T, B]``"""
        return self.terminated | self.truncated

    def after(self, n_steps: int, states: th.Tensor) -> "SequenceBatch":
        """
        The same sequences without their first steps.

        :param n_steps: how many steps to leave out
        :param states: what is remembered after them, ``[B, W]``
        """
        observations = self.observations
        first_row = n_steps * len(self.envs)
        kept = self.final_steps >= first_row
        finals = self.final_observations
        return SequenceBatch(
            {key: rows[n_steps:] for key, rows in observations.items()}
            if isinstance(observations, dict)
            else observations[n_steps:],
            self.actions[n_steps:],
            self.behaviour[n_steps:],
            self.rewards[n_steps:],
            self.terminated[n_steps:],
            self.truncated[n_steps:],
            {key: rows[kept] for key, rows in finals.items()} if isinstance(finals, dict) else finals[kept],
            self.final_steps[kept] - first_row,
            states,
            self.envs,
        )


class SequenceReplayBuffer(ReplayBuffer):
    """
    A ring of slots. One slot is a rollout of ``n_steps`` by all environments, and a finished slot can be sampled whole:
    nothing in the buffer is invalid.

    Slots follow one another in one ring of rows, so a slot's border row (the observations after its last step) is its
    successor's first row. The rollout under way is kept apart until it is finished. Final observations of truncated
    steps are rare and live in a table of their own. What a recurrent policy remembered is kept of each slot's first
    step. Memory is allocated when the first step is added.

    :param buffer_size: steps of the vectorised environment to keep, at least one slot; transitions are that many times
        ``n_envs``
    :param observation_space: observation space
    :param action_space: action space
    :param device: device that batches are sent to
    :param n_envs: number of environments
    :param optimize_memory_usage: there for SB3's sake: next observations are never stored apart
    :param n_steps: steps of a slot (T)
    :raises ValueError: if ``buffer_size`` or ``n_steps`` is less than 1
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        n_steps: int = 20,
    ) -> None:
        for name, value in (("buffer_size", buffer_size), ("n_steps", n_steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        # ReplayBuffer's own constructor would allocate arrays of single transitions.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = True
        self.n_steps = n_steps
        self.n_slots = max(buffer_size // n_steps, 1)
        self.reset()

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        self.pos = 0  # the slot that is written next, one of n_slots + 1: it is not sampled
        self.full = False
        self.step = 0  # steps of the rollout under way
        self._rollout: dict[str, np.ndarray] = {}  # under way, [n_steps (+ 1 for observations), n_envs, ...]
        self._rows: dict[str, th.Tensor] = {}  # the ring, [(n_slots + 1) * n_steps, n_envs, ...]
        self._states = th.zeros(0)  # before each slot's first step, [n_slots + 1, n_envs, W]
        self._finals: dict[str, th.Tensor] = {}  # final observations of truncated steps, [places, ...]
        self._free_places: list[int] = []

    def size(self) -> int:
        """
        :return: steps of the vectorised environment that can be sampled
        """
        return (self.n_slots if self.full else self.pos) * self.n_steps

    def add(  # type: ignore[override]
        self,
        obs: NumpyObs,
        next_obs: NumpyObs,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
        *,
        behaviour: np.ndarray,
        states: np.ndarray | None = None,
    ) -> None:
        """
        Add one step of all environments.

        :param obs: observations that were acted on, ``[n_envs, ...]``
        :param next_obs: what followed; the final observation where an episode ended, ``[n_envs, ...]``
        :param action: actions as the policy sampled them, ``[n_envs, D]``
        :param reward: ``[n_envs]``
        :param done: whether the episode ended, ``[n_envs]``
        :param infos: ``TimeLimit.truncated`` in them says that the end is no terminal state
        :param behaviour: statistics of the distribution that acted, ``[n_envs, P]``
        :param states: what the policy that acted remembered before, ``[n_envs, W]``; None if it has no memory
        """
        states = np.zeros((self.n_envs, 0), np.float32) if states is None else states
        if not self._rollout:
            self._allocate(action, behaviour, states)
        rollout, step = self._rollout, self.step
        if step == 0:
            self._states[self.pos] = th.from_numpy(states)
        done = np.asarray(done, bool)
        for name, rows in _columns(obs):
            rollout[name][step] = rows
        for name, rows in _columns(next_obs):
            rollout[name][step + 1] = rows
        rollout["actions"][step] = action
        rollout["behaviour"][step] = behaviour
        rollout["rewards"][step] = reward
        rollout["terminated"][step] = done
        rollout["truncated"][step] = False
        rollout["final_place"][step] = -1
        if done.any():
            cut = done & np.array([info.get("TimeLimit.truncated", False) for info in infos])
            rollout["terminated"][step] ^= cut
            self._truncate(rollout, step, step + 1, cut)
        self.step += 1
        if self.step == self.n_steps:
            self._finish_slot()

    def end_episodes(self) -> None:
        """
        The environments were reset from outside: the steps added last are truncated where they did not end an episode.
        """
        if self.step:
            columns, row, border = self._rollout, self.step - 1, self.step
        elif self.size():
            columns = {name: column.numpy() for name, column in self._rows.items()}
            border = self.pos * self.n_steps
            row = border - 1  # -1 is the ring's last row
        else:
            return
        self._truncate(columns, row, border, ~(columns["terminated"][row] | columns["truncated"][row]))

    def latest(self, env: VecNormalize | None = None) -> SequenceBatch:
        """
        :param env: normalises observations and rewards, if given
        :return: the rollout that was finished last, one sequence an environment
        """
        return self._gather(np.full(self.n_envs, self.pos - 1), np.arange(self.n_envs), env, self.device)

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None, rng: np.random.Generator | None = None
    ) -> SequenceBatch:
        """
        Sequences of finished rollouts, independent and uniform.

        :param batch_size: number of sequences (B)
        :param env: normalises observations and rewards, if given
        :param rng: source of the random draws; a fresh one by default
        """
        rng = np.random.default_rng() if rng is None else rng
        ages = rng.integers(max(self.size() // self.n_steps, 1), size=batch_size)
        return self._gather(self.pos - 1 - ages, rng.integers(self.n_envs, size=batch_size), env, self.device)

    def with_envs(self, n_envs: int) -> "SequenceReplayBuffer":
        """
        The finished sequences, oldest first, in a buffer for another number of environments. Where their number is no
        multiple of ``n_envs``, the last rollout is made up with the oldest ones.

        :param n_envs: number of environments of the new buffer
        """
        other = type(self)(
            self.buffer_size, self.observation_space, self.action_space, self.device, n_envs, n_steps=self.n_steps
        )
        n_sequences = self.size() // self.n_steps * self.n_envs
        for first in range(0, n_sequences, n_envs):
            sequences = np.arange(first, first + n_envs) % n_sequences
            slots = self.pos - (n_sequences - sequences + self.n_envs - 1) // self.n_envs
            other._add_sequences(self._gather(slots, sequences % self.n_envs, None, th.device("cpu")))
        return other

    def _add_sequences(self, batch: SequenceBatch) -> None:
        """Add a rollout that does not go on where the last one ended."""
        self.end_episodes()
        observations = dict(_columns(batch.observations))
        following = {name: rows[1:].clone() for name, rows in observations.items()}
        for name, finals in _columns(batch.final_observations):
            following[name].flatten(0, 1)[batch.final_steps] = finals
        for step in range(self.n_steps):
            self.add(
                self._from_columns({name: rows[step].numpy() for name, rows in observations.items()}),
                self._from_columns({name: rows[step].numpy() for name, rows in following.items()}),
                batch.actions[step].numpy(),
                batch.rewards[step].numpy(),
                (batch.terminated | batch.truncated)[step].numpy(),
                [{"TimeLimit.truncated": cut} for cut in batch.truncated[step].tolist()],
                behaviour=batch.behaviour[step].numpy(),
                states=batch.states.numpy(),
            )

    def _allocate(self, action: np.ndarray, behaviour: np.ndarray, states: np.ndarray) -> None:
        parts = (
            self.observation_space.spaces if isinstance(self.observation_space, spaces.Dict) else self.observation_space
        )
        observations = {
            name: (space.shape, _STORED_AS.get(space.dtype, space.dtype)) for name, space in _columns(parts)
        }
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            **observations,
            "actions": (action.shape[1:], action.dtype),
            "behaviour": (behaviour.shape[1:], np.float32),
            "rewards": ((), np.float32),
            "terminated": ((), np.bool_),
            "truncated": ((), np.bool_),
            "final_place": ((), np.int64),  # place in the table of final observations, -1 for none
        }
        n_rows = (self.n_slots + 1) * self.n_steps
        row_bytes = sum(
            self.n_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in columns.values()
        )
        available = psutil.virtual_memory().available
        if n_rows * row_bytes > available:
            warnings.warn(
                f"the replay buffer will need {n_rows * row_bytes / 1e9:.2f} GB, and {available / 1e9:.2f} GB are "
                f"available: buffer_size={self.buffer_size} counts steps of all {self.n_envs} environments together",
                stacklevel=2,
            )
        for name, (shape, dtype) in columns.items():
            n_steps = self.n_steps + (name in observations)
            self._rollout[name] = np.zeros((n_steps, self.n_envs, *shape), dtype)
            self._rows[name] = th.from_numpy(np.zeros((n_rows, self.n_envs, *shape), dtype))
        self._rows["final_place"].fill_(-1)
        self._states = th.zeros((self.n_slots + 1, *states.shape))
        self._finals = {name: self._rows[name].new_zeros((0, *shape)) for name, (shape, _) in observations.items()}

    def _truncate(self, columns: dict[str, np.ndarray], row: int, border: int, envs: np.ndarray) -> None:
        """Mark the step ``row`` of some environments as truncated; what followed it is in the row ``border``."""
        columns["truncated"][row] |= envs
        for env in np.flatnonzero(envs):
            if not self._free_places:
                n_places = len(next(iter(self._finals.values())))
                added = max(n_places, 16)
                self._finals = {
                    name: th.cat((table, table.new_zeros((added, *table.shape[1:]))))
                    for name, table in self._finals.items()
                }
                self._free_places = list(range(n_places, n_places + added))
            place = self._free_places.pop()
            columns["final_place"][row, env] = place
            for name, table in self._finals.items():
                table[place] = th.as_tensor(columns[name][border, env])

    def _finish_slot(self) -> None:
        """Move the rollout under way into the ring, over the slot that is not sampled."""
        first = self.pos * self.n_steps
        slot = slice(first, first + self.n_steps)
        overwritten = self._rows["final_place"][slot]
        self._free_places.extend(overwritten[overwritten >= 0].tolist())
        for name, column in self._rollout.items():
            self._rows[name][slot] = th.from_numpy(column[: self.n_steps])
        self.step = 0
        self.full = self.full or self.pos + 1 == self.n_slots
        self.pos = (self.pos + 1) % (self.n_slots + 1)
        for name in self._finals:
            self._rows[name][self.pos * self.n_steps] = th.from_numpy(self._rollout[name][self.n_steps])

    def _gather(
        self, slots: np.ndarray, envs: np.ndarray, env: VecNormalize | None, device: th.device
    ) -> SequenceBatch:
        """The sequences of some slots (integers, modulo the ring) and environments, time-major."""
        if not self.size():
            raise ValueError("sequences can be sampled once a rollout is finished, got an empty replay buffer")
        n_rows = len(self._rows["rewards"])
        rows = (slots * self.n_steps + np.arange(self.n_steps + 1)[:, np.newaxis]) % n_rows
        places = th.from_numpy(rows * self.n_envs + envs)
        slot_places = th.from_numpy(slots % (self.n_slots + 1) * self.n_envs + envs)
        steps, last = places.flatten(), len(envs)
        taken = {}
        for name, column in self._rows.items():
            indices = steps if name in self._finals else steps[:-last]
            taken[name] = column.flatten(0, 1).index_select(0, indices).view(-1, last, *column.shape[2:])
        final_places = taken["final_place"].flatten()
        final_steps = (final_places >= 0).nonzero().squeeze(-1)
        finals = {name: _take(table, final_places[final_steps]) for name, table in self._finals.items()}
        rewards = taken["rewards"]
        if env is not None:
            rewards = th.from_numpy(env.normalize_reward(rewards.numpy()))
        return SequenceBatch(
            self._to_observations({name: taken[name] for name in self._finals}, env, device),
            taken["actions"].to(device),
            taken["behaviour"].to(device),
            rewards.to(device),
            taken["terminated"].to(device),
            taken["truncated"].to(device),
            self._to_observations(finals, env, device),
            final_steps.to(device),
            self._states.flatten(0, 1).index_select(0, slot_places).to(device),
            envs,
        )

    def _to_observations(
        self, columns: dict[str, th.Tensor], env: VecNormalize | None, device: th.device
    ) -> PyTorchObs:
        if env is not None:
            normalized = env.normalize_obs(self._from_columns({name: rows.numpy() for name, rows in columns.items()}))
            columns = {name: th.from_numpy(rows) for name, rows in _columns(normalized)}
        observations: PyTorchObs = self._from_columns({name: rows.to(device) for name, rows in columns.items()})
        return observations

    def _from_columns(self, columns: dict[str, Any]) -> Any:
        """The inverse of :func:`_columns`."""
        if isinstance(self.observation_space, spaces.Dict):
            return {name.removeprefix("observations/"): rows for name, rows in columns.items()}
        return columns["observations"]


def _columns(observations: Any) -> Iterator[tuple[str, Any]]:
    """Observations, or whatever has their structure, by the names of the columns that store them."""
    if isinstance(observations, dict):
        yield from ((f"observations/{key}", part) for key, part in observations.items())
    else:
        yield "observations", observations


def _take(table: th.Tensor, places: th.Tensor) -> th.Tensor:
    return table.index_select(0, places.flatten()).view(*places.shape, *table.shape[1:])
