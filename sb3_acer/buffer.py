"""A replay buffer of sequences. Each step is stored with the distribution that its action was sampled from."""

import io
from collections.abc import Iterable
from copy import copy, deepcopy
from typing import Any, TypeVar

import numpy as np
import psutil
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer.checks import LARGEST, check_array, check_boolean, check_device, check_integer, require, warn
from sb3_acer.distributions import make_family
from sb3_acer.frames import FrameStack, make_frame_stack
from sb3_acer.ring import Ring
from sb3_acer.sequences import SequenceBatch, are_categories, by_key, spaces_by_key
from sb3_acer.storage import read_state, write_state

NumpyObs = np.ndarray | dict[str, np.ndarray]
_INVALID = "<invalid actions>"  # the ring's key of the negated masks: rows of 0 have no invalid action
SelfBuffer = TypeVar("SelfBuffer", bound="SequenceReplayBuffer")


class _Unshared(dict[str, Any]):
    """A state whose arrays a buffer may use without copying them, since nobody else has them."""


class SequenceReplayBuffer(ReplayBuffer):
    """
    A ring of slots. A slot is a rollout of ``n_steps`` steps of all environments. A finished slot can be sampled whole,
    so every sequence in the buffer is valid.

    Slots follow one another in one ring of rows, so the row after a slot's last step is the first row of the next slot.
    The slot of the rollout under way is not sampled. Final observations of truncated steps are rare and have a table of
    their own. The recurrent state of the behaviour policy is stored at the first step of each slot. Memory is allocated
    when the first step is added.

    Masks of invalid actions are stored from the first step on that is added with masks. In steps that are added without
    masks all actions count as valid.

    :meth:`extend` and the buffers of other algorithms cannot fill it: their transitions lack the behaviour policy.

    Of observations that are stacks of frames each new frame is stored once, and sampling restores the stacks, equal to
    the bit, see :class:`~sb3_acer.columns.FrameColumn`. Spare slots keep the frames before the oldest sequences.

    To sample by priority, override :meth:`sample`: :meth:`gather` returns the sequences of given slots and
    environments, and ``weights`` of the batch multiply their gradients. A subclass with arrays of its own extends
    :meth:`reset`, :meth:`state_dict` and :meth:`load_state_dict`, where it first calls the base class's, which calls
    :meth:`reset`. Slots are numbered from 0 to n_slots + ceil(k / n_steps), where k is the number of frames in a stack,
    1 without stacks.

    :param buffer_size: steps of the vectorised environment to keep, at least one slot; that is ``buffer_size * n_envs``
        transitions
    :param observation_space: observation space
    :param action_space: action space
    :param device: device that batches are sent to
    :param n_envs: number of environments
    :param optimize_memory_usage: unused: next observations are never stored separately
    :param handle_timeout_termination: whether a time limit truncates an episode; False: it is a terminal state
    :param n_steps: steps of a slot (T)
    :param frame_stack: number of frames of an image observation, for Dict observations a dict of such by key; 1 to
        store observations as they are; None to be told by :meth:`expect_frame_stack`
    :param storage_device: device that observations are stored on, see :func:`~sb3_acer.checks.check_device`; "cuda"
        without a number: the GPU of ``device``
    :raises ValueError: if ``buffer_size``, ``n_envs`` or ``n_steps`` is less than 1, if ``frame_stack`` does not divide
        the channels, and for a device that this machine does not have
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_steps: int = 20,
        frame_stack: int | dict[str, int] | None = None,
        storage_device: th.device | str = "cpu",
    ) -> None:
        buffer_size, n_steps = check_integer("buffer_size", buffer_size), check_integer("n_steps", n_steps)
        n_envs = check_integer("n_envs", n_envs, 1, 2**20)
        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            require(isinstance(space, spaces.Space), name, "a space of gymnasium", space)
        device = check_device("device", device)
        # ReplayBuffer's own constructor would allocate arrays of single transitions.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.optimize_memory_usage = check_boolean("optimize_memory_usage", optimize_memory_usage)
        self.handle_timeout_termination = check_boolean("handle_timeout_termination", handle_timeout_termination)
        self.n_steps = n_steps
        self.n_slots = max(buffer_size // n_steps, 1)
        if str(storage_device) == device.type:  # a GPU without a number would be the current one
            storage_device = device
        self.storage_device = check_device("storage_device", storage_device)
        self.frame_stack = frame_stack
        self._stacks = {} if frame_stack is None else self._make_stacks(frame_stack)  # by keys of observations
        self.reset()

    def reset(self) -> None:
        """Forget all steps and release the memory."""
        self.pos = 0  # the slot that is written next. Neither it nor the spare slots are sampled.
        self.full = False
        self.step = 0  # steps of the rollout under way
        self._ring: Ring | None = None
        self.ended = np.ones(self.n_envs, bool)  # whether the last step ended its episode: the next one begins another

    def size(self) -> int:
        """
        :return: steps of the vectorised environment that can be sampled
        """
        return self.n_rollouts * self.n_steps

    @property
    def n_rollouts(self) -> int:
        """Number of finished rollouts, those that can be sampled."""
        return self.n_slots if self.full else self.pos

    @property
    def state_size(self) -> int | None:
        """Width of the recurrent states (W); None before the first step."""
        return None if self._ring is None else self._ring.states.shape[-1]

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
        masks: np.ndarray | None = None,
        next_masks: np.ndarray | None = None,
    ) -> None:
        """
        Add one step of all environments.

        :param obs: observations before the step, ``[n_envs, ...]``
        :param next_obs: observations after the step; where an episode ended its final observation, ``[n_envs, ...]``
        :param action: actions as the policy sampled them, ``[n_envs, D]``
        :param reward: ``[n_envs]``
        :param done: whether the episode ended, ``[n_envs]``
        :param infos: ``TimeLimit.truncated`` in them says that an end is a truncation
        :param behaviour: statistics of the distribution that the actions were sampled from, ``[n_envs, P]``
        :param states: recurrent states before the step, ``[n_envs, W]``; None for a feed-forward policy
        :param masks: whether actions are valid in ``obs``, bool, ``[n_envs, P]``; None if all are
        :param next_masks: the same for ``next_obs``
        :raises ValueError: if observations turn out not to be stacks of ``frame_stack`` frames; nothing of the step is
            stored then
        """
        require(len(action) == self.n_envs, "rows of action", f"{self.n_envs}, as n_envs", len(action))
        states = np.zeros((self.n_envs, 0), np.float32) if states is None else states
        ring = self._ring = self._ring or self._make_ring(action, behaviour, states, masks is not None)
        if masks is not None and _INVALID not in ring.observations:
            ring.add_observation_key(_INVALID, _flags(behaviour))
        done = np.array(done, bool)  # a copy: environments may fill the same array again
        step = {"actions": action, "behaviour": behaviour, "rewards": reward, "terminated": done}
        now, then = self._with_masks(obs, masks), self._with_masks(next_obs, next_masks)
        row = self.pos * self.n_steps + self.step
        following = ring.write(row, now, then, step, self.ended)
        if self.step == 0:
            ring.states[self.pos] = th.from_numpy(states)
        if done.any() and self.handle_timeout_termination:
            truncated = done & np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
            ring.truncate(row, following, truncated)
        pos, next_step = divmod((row + 1) % ring.n_rows, self.n_steps)
        # Without a call in between, so that Ctrl-C leaves a step that is stored, or none.
        ring.following, self.ended, self.pos, self.step = following, done, pos, next_step
        self.full = self.full or pos == self.n_slots

    def _with_masks(self, obs: NumpyObs, masks: np.ndarray | None) -> dict[str, np.ndarray]:
        """Observations and masks by the keys of the ring."""
        assert self._ring is not None
        if _INVALID not in self._ring.observations:
            return by_key(obs)
        return {**by_key(obs), _INVALID: np.array(False) if masks is None else np.logical_not(masks)}

    def end_episodes(self) -> None:
        """
        Truncate the episodes under way, because the environments were reset from outside after the last step.
        """
        if self._ring is not None:
            last = self.pos * self.n_steps + self.step - 1  # -1 is the ring's last row
            self._ring.truncate(last, self._ring.following, ~self.ended)
        self.ended = np.ones(self.n_envs, bool)

    def latest(self, env: VecNormalize | None = None) -> SequenceBatch:
        """
        :param env: normalises observations and rewards, if given
        :return: the rollout that was finished last, one sequence per environment
        :raises ValueError: if no rollout is finished
        """
        return self._rollout(self.pos - 1, env)

    def _rollout(self, slot: int, env: VecNormalize | None = None, device: th.device | None = None) -> SequenceBatch:
        return self.gather(np.full(self.n_envs, slot), np.arange(self.n_envs), env, device)

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None, rng: np.random.Generator | None = None
    ) -> SequenceBatch:
        """
        Draw sequences of finished rollouts, independently and uniformly.

        :param batch_size: number of sequences (B)
        :param env: normalises observations and rewards, if given
        :param rng: source of the random draws; None for a fresh one
        :return: B sequences of T steps
        :raises ValueError: if no rollout is finished
        """
        batch_size = check_integer("batch_size", batch_size)
        rng = np.random.default_rng() if rng is None else rng
        n_sequences = max(self.n_rollouts, 1) * self.n_envs  # of an empty buffer gather raises the error
        ages, envs = divmod(rng.integers(n_sequences, size=batch_size), self.n_envs)
        return self.gather(self.pos - 1 - ages, envs, env)

    def gather(
        self,
        slots: np.ndarray,
        envs: np.ndarray,
        env: VecNormalize | None = None,
        device: th.device | None = None,
    ) -> SequenceBatch:
        """
        :param slots: slots of finished rollouts, integers modulo the ring: the last one is ``pos - 1``, ``[B]``
        :param envs: environments, integers, ``[B]``
        :param env: normalises observations and rewards, if given
        :param device: device of the batch; None for the buffer's
        :return: the sequences of these slots and environments
        :raises ValueError: if no rollout is finished, for slots that hold none, for environments out of range, and for
            what is no array of integers
        """
        if self._ring is None or not self.n_rollouts:
            raise ValueError("the replay buffer must hold a finished rollout to be sampled, got an empty one")
        slots, envs = _indices("slots", slots), _indices("envs", envs)
        require(len(envs) == len(slots), "the number of envs", f"{len(slots)}, as that of slots", len(envs))
        n_rollouts, n_slots = self.n_rollouts, self._ring.n_all_slots
        is_held = bool(((self.pos - 1 - slots) % n_slots < n_rollouts).all())
        require(is_held, "slots", f"from {self.pos - n_rollouts} to {self.pos - 1}, modulo {n_slots}", slots)
        require(bool(((envs >= 0) & (envs < self.n_envs)).all()), "envs", f"from 0 to {self.n_envs - 1}", envs)
        device = self.device if device is None else device
        slots = slots % n_slots
        steps, observations, finals, final_steps, states = self._ring.take(slots, envs)
        masks = final_masks = None
        if _INVALID in observations:
            masks, final_masks = ((rows.pop(_INVALID) == 0).to(device) for rows in (observations, finals))
        rewards = steps["rewards"]
        if env is not None:
            rewards = th.from_numpy(env.normalize_reward(rewards.numpy()))
        return SequenceBatch(
            observations=self._to_observations(observations, env, device),
            actions=steps["actions"].to(device),
            behaviour=steps["behaviour"].to(device),
            rewards=rewards.to(device),
            terminated=steps["terminated"].to(device),
            truncated=steps["truncated"].to(device),
            final_observations=self._to_observations(finals, env, device),
            final_steps=th.from_numpy(final_steps).to(device),
            states=states.to(device),
            weights=th.ones((self.n_steps, len(envs)), dtype=th.float32, device=device),
            slots=slots,
            envs=envs,
            masks=masks,
            final_masks=final_masks,
        )

    def with_envs(self: SelfBuffer, n_envs: int, n_slots: int | None = None) -> SelfBuffer:
        """
        The finished sequences, oldest first, in a buffer for another number of environments. Where their number is not
        a multiple of ``n_envs``, the oldest ones fill the last rollout.

        :param n_envs: number of environments of the new buffer
        :param n_slots: number of its rollouts; None for as many as this one has
        """
        n_envs = check_integer("n_envs", n_envs, 1, 2**20)
        other = self.emptied(n_envs)
        other.n_slots = n_slots or self.n_slots
        n_sequences = self.n_rollouts * self.n_envs
        n_kept = other.n_slots * n_envs
        if n_sequences > n_kept:
            warn(
                f"a replay buffer of buffer_size={self.buffer_size} for n_envs={n_envs} keeps the newest "
                f"{n_kept * self.n_steps} of {n_sequences * self.n_steps} transitions"
            )
        for first in range(max(n_sequences - n_kept, 0), n_sequences, n_envs):
            rollouts, envs = divmod(np.arange(first, first + n_envs) % n_sequences, self.n_envs)
            slots = self.pos - self.n_rollouts + rollouts
            other._add_sequences(self.gather(slots, envs, None, th.device("cpu")))
        return other

    def emptied(self: SelfBuffer, n_envs: int) -> SelfBuffer:
        """
        :param n_envs: number of environments
        :return: a copy of this buffer after :meth:`reset`, which a subclass may extend
        """
        other = copy(self)  # with the attributes of subclasses
        other.n_envs = n_envs
        other.reset()
        return other

    def add_rollouts(self: SelfBuffer, other: SelfBuffer, ages: Iterable[int]) -> None:
        """
        Add finished rollouts of another buffer for as many environments.

        :param other: the other buffer
        :param ages: which of its rollouts, 0 for the one that was finished last
        """
        for age in ages:
            self._add_sequences(other._rollout(other.pos - 1 - age, device=th.device("cpu")))

    def _add_sequences(self, batch: SequenceBatch) -> None:
        """Add a rollout that does not continue the last one."""
        self.end_episodes()
        observations = by_key(batch.observations)
        following = {key: rows[1:].clone() for key, rows in observations.items()}
        for key, finals in by_key(batch.final_observations).items():
            following[key].flatten(0, 1)[batch.final_steps] = finals
        masks, next_masks = batch.masks, None
        if masks is not None and batch.final_masks is not None:
            next_masks = masks[1:].clone()
            next_masks.flatten(0, 1)[batch.final_steps] = batch.final_masks
        handled, self.handle_timeout_termination = self.handle_timeout_termination, True  # it has been by the batch
        for step in range(self.n_steps):
            self.add(
                self._from_keys({key: rows[step].numpy() for key, rows in observations.items()}),
                self._from_keys({key: rows[step].numpy() for key, rows in following.items()}),
                batch.actions[step].numpy(),
                batch.rewards[step].numpy(),
                batch.ends[step].numpy(),
                [{"TimeLimit.truncated": truncated} for truncated in batch.truncated[step].tolist()],
                behaviour=batch.behaviour[step].numpy(),
                states=batch.states.numpy(),
                masks=None if masks is None else masks[step].numpy(),
                next_masks=None if next_masks is None else next_masks[step].numpy(),
            )
        self.handle_timeout_termination = handled

    def expect_frame_stack(self, n_frames: int) -> None:
        """
        Store each frame once, unless ``frame_stack`` was given or something is stored already.

        :param n_frames: number of frames of the image observations, where it divides their channels
        """
        if self.frame_stack is None and self._ring is None:
            self._stacks = self._make_stacks(n_frames)

    def state_dict(self) -> dict[str, Any]:
        """
        :return: everything that the buffer holds, as nested dicts of arrays (not copied) and plain values
        """
        state: dict[str, Any] = {
            "sizes": {name: getattr(self, name) for name in ("buffer_size", "n_steps", "n_envs")},
            "spaces": self._describe_spaces(),
            "stacks": {key: list(stack) for key, stack in self._stacks.items()},
            "pos": self.pos,
            "full": self.full,
            "step": self.step,
            "ended": self.ended,
            "columns": None,
        }
        if self._ring is not None:
            # The rows that have been written, with the one after the last finished slot.
            n_rows = self._ring.n_rows if self.full else self.pos * self.n_steps + max(self.step, 1)
            state["columns"] = self._ring.state_dict(n_rows)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        :param state: what :meth:`state_dict` returned for a buffer of the same sizes
        :raises ValueError: if it is the state of a buffer of other sizes or spaces, or cannot be sampled
        """
        state = state if isinstance(state, _Unshared) else deepcopy(state)
        for name, value in state["sizes"].items():
            if value != getattr(self, name):
                raise ValueError(f"the replay buffer must have {name}={getattr(self, name)}, got {value}")
        if state["spaces"] != self._describe_spaces():
            raise ValueError(
                f"the replay buffer must have observations and actions of {self._describe_spaces()}, got "
                f"{state['spaces']}"
            )
        self.reset()
        self._stacks = {key: FrameStack(*stack) for key, stack in state["stacks"].items()}
        columns = state["columns"]
        if columns is not None:
            action, behaviour = (np.asarray(columns["steps"][name]["ring"])[0] for name in ("actions", "behaviour"))
            states, masked = np.asarray(columns["states"])[0], _INVALID in columns["observations"]
            ring = self._ring = self._make_ring(action, behaviour, states, masked)
            ring.load_state_dict(columns)
        n_slots = self.n_slots if self._ring is None else self._ring.n_all_slots
        self.pos = check_integer("pos of the replay buffer", state["pos"], 0, n_slots - 1)
        self.step = check_integer("step of the replay buffer", state["step"], 0, self.n_steps - 1)
        self.full = check_boolean("full of the replay buffer", state["full"])
        self.ended = np.array(state["ended"], bool)
        require(self.ended.shape == (self.n_envs,), "ended of the replay buffer", "one per environment", self.ended)
        self._require_usable()

    def _require_usable(self) -> None:
        """Read every finished slot once: a damaged one would stop training at any later time."""
        family = make_family(self.action_space)
        for slot in range(self.pos - self.n_rollouts, self.pos):
            batch = self._rollout(slot, device=th.device("cpu"))
            observations = *by_key(batch.observations).values(), *by_key(batch.final_observations).values()
            for rows in (*observations, batch.actions, batch.behaviour, batch.rewards, batch.states):
                is_finite = not rows.is_floating_point() or bool((rows.abs() <= LARGEST).all())
                if not is_finite:
                    raise ValueError(f"the replay buffer must hold finite numbers of at most {LARGEST:g}, got others")
            for each in (batch.observations, batch.final_observations):
                if not are_categories(each, self.observation_space):
                    raise ValueError(
                        f"the replay buffer must hold observations of {self.observation_space}, got others"
                    )
            if not family.can_sample(batch.actions):
                raise ValueError(f"the replay buffer must hold actions of {self.action_space}, got others")

    def write(self, file: io.BufferedIOBase) -> None:
        """
        Save the buffer, without a second copy of it in memory.

        :param file: to write to
        """
        write_state(file, self.state_dict())

    @classmethod
    def read(
        cls: type[SelfBuffer],
        file: io.BufferedIOBase,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        **kwargs: Any,
    ) -> SelfBuffer:
        """
        Load what :meth:`write` wrote. Nothing of the file is run.

        :param file: to read from
        :param observation_space: observation space
        :param action_space: action space
        :param device: device that batches are sent to
        :param kwargs: further arguments of the constructor
        :raises ValueError: if the file is another one, is damaged, or has other spaces
        """
        state = read_state(file, "the replay buffer")
        try:
            # A damaged n_envs would allocate too much memory; `ended` has one element for each environment.
            n_envs = state["sizes"]["n_envs"]
            require(len(state["ended"]) == n_envs, "n_envs", f"{len(state['ended'])}, as the rows have", n_envs)
            buffer = cls(
                observation_space=observation_space,
                action_space=action_space,
                device=device,
                **{**kwargs, **state["sizes"]},
            )
            buffer.load_state_dict(_Unshared(state))
        except (KeyError, TypeError, IndexError, RuntimeError, AttributeError, MemoryError, OverflowError) as error:
            raise ValueError(f"the replay buffer must be a whole file, got one that is damaged: {error}") from error
        return buffer

    def _describe_spaces(self) -> dict[str, Any]:
        """Shapes and types, as plain values."""
        parts = spaces_by_key(self.observation_space)
        observations = {key: [list(part.shape or ()), str(part.dtype)] for key, part in parts.items()}
        return {"observations": observations, "actions": [list(self.action_space.shape or ()), repr(self.action_space)]}

    def _make_stacks(self, frame_stack: int | dict[str, int]) -> dict[str, FrameStack]:
        of_spaces = spaces_by_key(self.observation_space)
        of_keys = frame_stack if isinstance(frame_stack, dict) else dict.fromkeys(of_spaces, frame_stack)
        fits = of_keys.keys() <= of_spaces.keys()
        require(fits, "frame_stack", f"a dict with keys of {self.observation_space}", frame_stack)
        stacks = {}
        for key, n_frames in of_keys.items():
            n_frames = check_integer("frame_stack", n_frames)
            stack = make_frame_stack(of_spaces[key], n_frames, strict=self.frame_stack is not None)
            if stack is not None:
                stacks[key] = stack
        return stacks

    def _make_ring(self, action: np.ndarray, behaviour: np.ndarray, states: np.ndarray, masked: bool) -> Ring:
        of_spaces, strict = spaces_by_key(self.observation_space), self.frame_stack is not None
        if masked:
            of_spaces[_INVALID] = _flags(behaviour)
        arguments = self.n_steps, of_spaces, self._stacks, strict, action, behaviour, states, self.storage_device
        smallest = Ring(1, *arguments)  # to measure what a slot takes
        needed = smallest.nbytes // smallest.n_all_slots * (self.n_slots + smallest.n_all_slots - 1)
        if self.storage_device.type == "cuda":
            available = th.cuda.mem_get_info(self.storage_device)[0]
        else:
            available = psutil.virtual_memory().available
        if needed > available:
            warn(
                f"the replay buffer will need {needed / 1e9:.2f} GB, and {available / 1e9:.2f} GB are "
                f"available: buffer_size={self.buffer_size} counts steps of the vectorised environment, each of "
                f"{self.n_envs} transitions"
            )
        return Ring(self.n_slots, *arguments)

    def _to_observations(
        self, columns: dict[str, th.Tensor], env: VecNormalize | None, device: th.device
    ) -> PyTorchObs:
        if env is not None and len(next(iter(columns.values()))):
            normalized = env.normalize_obs(self._from_keys({key: rows.cpu().numpy() for key, rows in columns.items()}))
            columns = {key: th.from_numpy(rows) for key, rows in by_key(normalized).items()}
        observations: PyTorchObs = self._from_keys({key: rows.to(device) for key, rows in columns.items()})
        return observations

    def _from_keys(self, columns: dict[str, Any]) -> Any:
        """The inverse of :func:`by_key`."""
        return columns if isinstance(self.observation_space, spaces.Dict) else columns[""]


def _indices(name: str, value: Any) -> np.ndarray:
    array = check_array(name, value)
    require(array.ndim == 1 and array.dtype.kind in "iu", name, "an array of integers, [B]", value)
    return array.astype(np.int64, copy=False)


def _flags(behaviour: np.ndarray) -> spaces.Space[Any]:
    """The space of a state's masks: one flag for each statistic, ``[P]``."""
    return spaces.MultiBinary(behaviour.shape[-1])
