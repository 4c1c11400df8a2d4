"""A replay buffer of sequences, each step with the distribution that acted."""

import io
import pickle
import warnings
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer.frames import FrameStack, make_frame_stack

NumpyObs = np.ndarray | dict[str, np.ndarray]

# torch can hardly index these
_STORED_AS = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


# What may come before a stack of frames that does not follow from the row before; places of a table are positive.
_ZEROS, _REPEATED = -1, -2


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


class _SideTable:
    """
    Rows that few steps have, at places that are used again.

    :param rows: no rows yet, but their columns
    """

    def __init__(self, rows: dict[str, th.Tensor]) -> None:
        self.rows = rows
        self._free: list[int] = []

    def put(self, row: dict[str, np.ndarray]) -> int:
        """
        :return: where the row is now
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

    def free(self, places: th.Tensor | np.ndarray) -> None:
        """Places of rows that are no longer wanted; negative numbers are none."""
        self._free.extend(places[places >= 0].tolist())


class SequenceReplayBuffer(ReplayBuffer):
    """
    A ring of slots. One slot is a rollout of ``n_steps`` by all environments, and a finished slot can be sampled whole:
    nothing in the buffer is invalid.

    Slots follow one another in one ring of rows, so a slot's border row (the observations after its last step) is its
    successor's first row. The rollout under way is kept apart until it is finished. Final observations of truncated
    steps are rare and live in a table of their own. What a recurrent policy remembered is kept of each slot's first
    step. Memory is allocated when the first step is added.

    Of observations that are stacks of frames each new frame is stored once, and sampling puts the stacks together
    again, equal to the bit. Where an observation is not the one before and a new frame, as at a reset, its older frames
    are stored too, unless they are zeros or repeat the newest. The slots before the oldest that can be sampled keep its
    past.

    :param buffer_size: steps of the vectorised environment to keep, at least one slot; transitions are that many times
        ``n_envs``
    :param observation_space: observation space
    :param action_space: action space
    :param device: device that batches are sent to
    :param n_envs: number of environments
    :param optimize_memory_usage: there for SB3's sake: next observations are never stored apart
    :param n_steps: steps of a slot (T)
    :param frame_stack: frames that an image observation is made of, for Dict observations a dict of such by keys; 1 to
        store observations as they come; None to be told by :meth:`expect_frame_stack`
    :param storage_device: device that observations are stored on
    :raises ValueError: if ``buffer_size`` or ``n_steps`` is less than 1, if ``frame_stack`` does not divide the
        channels, and if there is no such device
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
        frame_stack: int | dict[str, int] | None = None,
        storage_device: th.device | str = "cpu",
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
        try:
            self.storage_device = th.empty(0, device=storage_device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"storage_device must be a device of this machine, got {storage_device!r}") from error
        self.frame_stack = frame_stack
        self._stacks: dict[str, FrameStack] = {}  # by the names of columns
        if frame_stack is not None:
            self._stacks = self._make_stacks(frame_stack)
        self.reset()

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        self.pos = 0  # the slot that is written next; it is not sampled, nor are others that keep the past of frames
        self.full = False
        self.step = 0  # steps of the rollout under way
        self._rollout: dict[str, np.ndarray] = {}  # under way, [n_steps (+ 1 for observations), n_envs, ...]
        self._rows: dict[str, th.Tensor] = {}  # the ring, [n_ring_slots * n_steps, n_envs, ...]
        self._states = th.zeros(0)  # before each slot's first step, [n_ring_slots, n_envs, W]
        self._following: dict[str, np.ndarray] = {}  # observations after the last step, [n_envs, ...]
        self._finals = _SideTable({})  # final observations of truncated steps
        self._ended = np.ones(self.n_envs, bool)  # whether the next row begins an episode
        self._last_stacks: dict[str, np.ndarray] = {}  # observations of the last row, [n_envs, ...]
        self._pasts: dict[str, _SideTable] = {}  # older frames of stacks that do not follow from the row before

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
        :raises ValueError: if observations turn out to be no stacks of as many frames as ``frame_stack`` says; nothing
            of the step is stored then
        """
        states = np.zeros((self.n_envs, 0), np.float32) if states is None else states
        if not self._rollout:
            self._allocate(action, behaviour, states)
        rollout, step = self._rollout, self.step
        if step == 0:
            self._states[self.pos] = th.from_numpy(states)
        done = np.asarray(done, bool)
        for name, rows in _columns(obs):
            self._write_observations(name, step, rows)
        for name, rows in _columns(next_obs):
            self._following[name][...] = rows
        rollout["actions"][step] = action
        rollout["behaviour"][step] = behaviour
        rollout["rewards"][step] = reward
        rollout["terminated"][step] = done
        rollout["truncated"][step] = False
        rollout["final_place"][step] = -1
        if done.any():
            cut = done & np.array([info.get("TimeLimit.truncated", False) for info in infos])
            rollout["terminated"][step] ^= cut
            self._truncate(rollout, step, cut)
        self._ended = done
        self.step += 1
        if self.step == self.n_steps:
            self._finish_slot()

    def end_episodes(self) -> None:
        """
        The environments were reset from outside: the steps added last are truncated where they did not end an episode.
        """
        if self.step:
            columns, row = self._rollout, self.step - 1
        elif self.size():
            columns = {name: self._rows[name].numpy() for name in ("terminated", "truncated", "final_place")}
            row = self.pos * self.n_steps - 1  # -1 is the ring's last row
        else:
            return
        self._truncate(columns, row, ~(columns["terminated"][row] | columns["truncated"][row]))
        self._ended = np.ones(self.n_envs, bool)

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
            self.buffer_size,
            self.observation_space,
            self.action_space,
            self.device,
            n_envs,
            n_steps=self.n_steps,
            frame_stack=self.frame_stack,
            storage_device=self.storage_device,
        )
        other._stacks = self._stacks
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

    def write(self, file: io.BufferedIOBase) -> None:
        """
        Save the buffer without a second copy in memory: pickled without its ring, whose rows follow as they are.

        :param file: to write to
        """
        skeleton = copy(self)
        skeleton._rows = {name: rows.to("meta") for name, rows in self._rows.items()}
        pickle.dump(skeleton, file)
        for rows in self._rows.values():
            for slot in rows.view(-1, self.n_steps, *rows.shape[1:]):
                file.write(slot.cpu().numpy())

    @staticmethod
    def read(file: io.BufferedIOBase) -> Any:
        """
        What :meth:`write` wrote, or whatever has been pickled.

        :param file: to read from
        :raises ValueError: if it ends too soon
        """
        buffer = pickle.load(file)
        for name, rows in getattr(buffer, "_rows", {}).items():
            if rows.is_meta:
                buffer._rows[name] = buffer._read_rows(file, rows, name)
        return buffer

    def _read_rows(self, file: io.BufferedIOBase, rows: th.Tensor, name: str) -> th.Tensor:
        rows = th.empty_like(rows, device=self.storage_device if name in self._following else "cpu")
        for slot in rows.view(-1, self.n_steps, *rows.shape[1:]):
            there = slot.cpu().numpy()  # on the CPU these are the rows themselves
            if file.readinto(there.reshape(-1).view(np.uint8)) != there.nbytes:
                raise ValueError(f"a saved replay buffer must be whole, got a file that ends within {name!r}")
            if slot.device.type != "cpu":
                slot.copy_(th.from_numpy(there))
        return rows

    def expect_frame_stack(self, n_frames: int) -> None:
        """
        Store each frame once, unless ``frame_stack`` has been said or something is stored already.

        :param n_frames: frames that the image observations are made of, where that divides their channels
        """
        if self.frame_stack is None and not self._rollout:
            self._stacks = self._make_stacks(n_frames)

    def _make_stacks(self, frame_stack: int | dict[str, int]) -> dict[str, FrameStack]:
        stacks = {}
        for name, space in _columns(self._observation_spaces()):
            key = name.removeprefix("observations/")
            n_frames = frame_stack.get(key, 1) if isinstance(frame_stack, dict) else frame_stack
            stack = make_frame_stack(space, n_frames, strict=self.frame_stack is not None)
            if stack is not None:
                stacks[name] = stack
        return stacks

    def _observation_spaces(self) -> Any:
        space = self.observation_space
        return space.spaces if isinstance(space, spaces.Dict) else space

    def _allocate(self, action: np.ndarray, behaviour: np.ndarray, states: np.ndarray) -> None:
        whole = {
            name: np.zeros((self.n_envs, *space.shape), _STORED_AS.get(space.dtype, space.dtype))
            for name, space in _columns(self._observation_spaces())
        }
        stacks = {name: stack.split(whole[name]) for name, stack in self._stacks.items()}
        columns: dict[str, tuple[tuple[int, ...], Any]] = {
            "actions": (action.shape[1:], action.dtype),
            "behaviour": (behaviour.shape[1:], np.float32),
            "rewards": ((), np.float32),
            "terminated": ((), np.bool_),
            "truncated": ((), np.bool_),
            "final_place": ((), np.int64),  # place in the table of final observations, -1 for none
        }
        for name, rows in whole.items():
            columns[name] = (rows.shape[1:], rows.dtype)
        for name, frames in stacks.items():
            columns[name] = (frames.shape[2:], frames.dtype)
            columns[f"age/{name}"] = ((), np.int8)  # rows since the stack last began anew, up to all that it reaches
            columns[f"past/{name}"] = ((), np.int32)  # what was before, if it begins anew: a place, ZEROS or REPEATED
        # Rows before the oldest that is sampled: its past, and one that the newest slot's border lies in.
        n_before = max((stack.n_frames for stack in self._stacks.values()), default=1)
        n_ring_slots = self.n_slots + -(-n_before // self.n_steps)
        self._warn_of_memory(n_ring_slots, columns, states.nbytes)
        for name, (shape, dtype) in columns.items():
            device = self.storage_device if name in whole else th.device("cpu")
            n_steps = self.n_steps + name.startswith(("observations", "age/", "past/"))
            self._rollout[name] = np.zeros((n_steps, self.n_envs, *shape), dtype)
            ring = th.from_numpy(np.zeros((n_ring_slots * self.n_steps, self.n_envs, *shape), dtype))
            self._rows[name] = ring.to(device)
        self._rows["final_place"].fill_(-1)
        self._states = th.from_numpy(np.zeros((n_ring_slots, *states.shape), np.float32))
        self._following = whole
        self._finals = _SideTable({name: self._no_rows(rows[0]) for name, rows in whole.items()})
        for name, frames in stacks.items():
            self._pasts[name] = _SideTable({"frames": self._no_rows(frames[0, :-1])})
            self._rows[f"past/{name}"].fill_(_ZEROS)

    def _no_rows(self, row: np.ndarray) -> th.Tensor:
        return th.from_numpy(np.zeros((0, *row.shape), row.dtype)).to(self.storage_device)

    def _warn_of_memory(
        self, n_ring_slots: int, columns: dict[str, tuple[tuple[int, ...], Any]], state_bytes: int
    ) -> None:
        row_bytes = sum(
            self.n_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in columns.values()
        )
        needed = n_ring_slots * (self.n_steps * row_bytes + state_bytes)
        if self.storage_device.type == "cuda":
            available = th.cuda.mem_get_info(self.storage_device)[0]
        else:
            available = psutil.virtual_memory().available
        if needed > available:
            warnings.warn(
                f"the replay buffer will need {needed / 1e9:.2f} GB, and {available / 1e9:.2f} GB are "
                f"available: buffer_size={self.buffer_size} counts steps of all {self.n_envs} environments together",
                stacklevel=3,
            )

    def _write_observations(self, name: str, step: int, rows: np.ndarray) -> None:
        """Into the rollout under way: all of them, or the newest frames where they are stacks."""
        if name not in self._stacks:
            self._rollout[name][step] = rows
            return
        stack, last = self._stacks[name], self._last_stacks.get(name)
        goes_on = np.zeros(self.n_envs, bool) if last is None else stack.goes_on(rows, last)
        unexpected = ~(goes_on | self._ended)
        # Of the border row the next step tells, before it is stored: this one is already.
        if self.frame_stack is not None and step < self.n_steps and unexpected.any():
            env = int(np.flatnonzero(unexpected)[0])
            raise ValueError(
                "frame_stack must be how many frames observations are made of: in the midst of an episode of "
                f"environment {env} they are not the last ones and a new frame, got {self.frame_stack!r}"
            )
        frames = stack.split(rows)
        ages, pasts = self._rollout[f"age/{name}"], self._rollout[f"past/{name}"]
        ages[step] = np.where(goes_on, np.minimum(ages[(step - 1) % self.n_steps] + 1, stack.n_frames - 1), 0)
        pasts[step] = _ZEROS
        for env in np.flatnonzero(~goes_on).tolist():
            pasts[step, env] = self._keep_past(name, frames[env])
        self._rollout[name][step] = frames[:, -1]
        if step < self.n_steps:  # the border row comes again as the next slot's first
            self._last_stacks[name] = np.array(rows)

    def _keep_past(self, name: str, frames: np.ndarray) -> int:
        """What comes before the newest frame: a place in a table unless it is one of two common things."""
        if not frames[:-1].any():
            return _ZEROS
        if (frames[:-1] == frames[-1]).all():
            return _REPEATED
        return self._pasts[name].put({"frames": frames[:-1]})

    def _truncate(self, columns: dict[str, np.ndarray], row: int, envs: np.ndarray) -> None:
        """Mark the last step, in the row ``row`` of the columns, as truncated for some environments."""
        columns["truncated"][row] |= envs
        for env in np.flatnonzero(envs):
            final = {name: rows[env] for name, rows in self._following.items()}
            columns["final_place"][row, env] = self._finals.put(final)

    def _finish_slot(self) -> None:
        """Move the rollout under way into the ring, over a slot that is not sampled."""
        for name, rows in self._following.items():
            self._write_observations(name, self.n_steps, rows)
        slot = slice(self.pos * self.n_steps, (self.pos + 1) * self.n_steps)
        self._finals.free(self._rows["final_place"][slot])
        for name, pasts in self._pasts.items():
            pasts.free(self._rows[f"past/{name}"][slot])
        for name, column in self._rollout.items():
            self._rows[name][slot] = th.from_numpy(column[: self.n_steps])
        self.step = 0
        self.full = self.full or self.pos + 1 == self.n_slots
        self.pos = (self.pos + 1) % len(self._states)
        border = self.pos * self.n_steps
        for name, pasts in self._pasts.items():
            pasts.free(self._rows[f"past/{name}"][border])
        for name, column in self._rollout.items():
            if len(column) > self.n_steps:
                self._rows[name][border] = th.from_numpy(column[self.n_steps])

    def _gather(
        self, slots: np.ndarray, envs: np.ndarray, env: VecNormalize | None, device: th.device
    ) -> SequenceBatch:
        """The sequences of some slots (integers, modulo the ring) and environments, time-major."""
        if not self.size():
            raise ValueError("sequences can be sampled once a rollout is finished, got an empty replay buffer")
        n_rows = len(self._rows["rewards"])
        rows = (slots * self.n_steps + np.arange(self.n_steps + 1)[:, np.newaxis]) % n_rows
        slot_places = th.from_numpy(slots % len(self._states) * self.n_envs + envs)
        steps = th.from_numpy(rows[:-1] * self.n_envs + envs)
        taken = {
            name: _take(column.flatten(0, 1), steps)
            for name, column in self._rows.items()
            if len(self._rollout[name]) == self.n_steps
        }
        observations = {name: self._take_observations(name, rows, envs) for name in self._following}
        final_places = taken["final_place"].flatten()
        final_steps = (final_places >= 0).nonzero().squeeze(-1)
        finals = {name: _take(table, final_places[final_steps]) for name, table in self._finals.rows.items()}
        rewards = taken["rewards"]
        if env is not None:
            rewards = th.from_numpy(env.normalize_reward(rewards.numpy()))
        return SequenceBatch(
            self._to_observations(observations, env, device),
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

    def _take_observations(self, name: str, rows: np.ndarray, envs: np.ndarray) -> th.Tensor:
        """What was observed in some rows of the ring, ``[T + 1, B]``, by the environments ``[B]``."""
        column = self._rows[name].flatten(0, 1)
        if name not in self._stacks:
            return _take(column, th.from_numpy(rows * self.n_envs + envs))
        stack, n_rows = self._stacks[name], len(self._rows[name])
        ages = self._rows[f"age/{name}"].numpy()[rows, envs].astype(np.int64)[..., np.newaxis]
        pasts = self._rows[f"past/{name}"].numpy()[rows - ages[..., 0], envs][..., np.newaxis]
        back = np.arange(stack.n_frames)[::-1]  # how many rows before, for each frame of a stack
        # What came before a stack began anew is, for now, the first frame again.
        sources = (rows[..., np.newaxis] - np.minimum(back, ages)) % n_rows * self.n_envs + envs[:, np.newaxis]
        frames = _take(column, th.from_numpy(sources))
        older = back > ages
        blank = (older & (pasts == _ZEROS)).nonzero()
        kept = (older & (pasts >= 0)).nonzero()
        if len(blank[0]):
            frames[tuple(map(th.from_numpy, blank))] = 0
        if len(kept[0]):
            place, newer = np.broadcast_to(pasts, older.shape)[kept], (back - ages)[kept]
            table = self._pasts[name].rows["frames"]
            frames[tuple(map(th.from_numpy, kept))] = table[th.from_numpy(place), th.from_numpy(-newer)]
        stacks = stack.join(frames.flatten(0, 1))
        return stacks.view(*rows.shape, *stacks.shape[1:])

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
    return table.index_select(0, places.flatten().to(table.device)).view(*places.shape, *table.shape[1:])
