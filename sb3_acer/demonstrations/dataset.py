"""Datasets of demonstrations; :mod:`~sb3_acer.demonstrations.recording` describes the arrays."""

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.checks import (
    LARGEST,
    check_boolean,
    check_choice,
    check_integer,
    check_number,
    check_verbose,
    require,
    warn,
)
from sb3_acer.demonstrations.recording import read_image, require_no_dict
from sb3_acer.distributions import Categorical
from sb3_acer.frames import find_frame_stack
from sb3_acer.policies import ACERPolicy
from sb3_acer.storage import named, opened
from sb3_acer.vec_normalize import normalize_of_policy

NEEDED = ("actions", "obs", "rewards", "episode_returns", "episode_starts")
"""arrays that demonstrations must have"""
OF_TRAJECTORIES = ("episode_returns", "truncated", "final_obs", "final_action_masks")
"""arrays with one row for each trajectory; the others have one for each step"""

SINGLE = ("rewards", "episode_returns", "episode_starts", "truncated")
"""arrays of one value in each row"""


class Agent(Protocol):
    """The part of ACER that ``sb3_acer.demonstrations`` uses: importing ACER would be circular."""

    policy: ACERPolicy
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    verbose: int

    def get_env(self) -> VecEnv | None: ...

    def get_vec_normalize_env(self) -> VecNormalize | None: ...


class ExpertDataset:
    """
    Demonstrations: the arrays that :mod:`sb3_acer.demonstrations.recording` describes.

    :param expert_path: npz file; paths of images are relative to its folder or to the working directory
    :param traj_data: the arrays themselves, instead of a file
    :param train_fraction: share of the steps for training, in (0, 1]; the rest is for validation
    :param batch_size: number of steps of a batch
    :param traj_limitation: number of trajectories to use, from the first on; -1: all
    :param randomize: whether each epoch has a new random order
    :param verbose: whether to print the number of trajectories and their returns
    :param sequential_preprocessing: not used: batches are made in this process, when they are needed
    :raises ValueError: for an argument outside its range, for arrays that are missing or do not fit together, and for a
        file of pickled objects
    """

    def __init__(
        self,
        expert_path: str | Path | None = None,
        traj_data: Mapping[str, np.ndarray] | None = None,
        train_fraction: float = 0.7,
        batch_size: int = 64,
        traj_limitation: int = -1,
        randomize: bool = True,
        verbose: int = 1,
        sequential_preprocessing: bool = False,
    ) -> None:
        require(check_number("train_fraction", train_fraction, 0, 1) > 0, "train_fraction", "in (0, 1]", train_fraction)
        batch_size = check_integer("batch_size", batch_size)
        check_boolean("randomize", randomize)
        check_integer("traj_limitation", traj_limitation, -1)
        check_verbose("verbose", verbose)
        arrays = _read(expert_path, traj_data)
        with nullcontext() if expert_path is None else named(expert_path):
            starts = _check(arrays)
        is_valid = traj_limitation == -1 or 1 <= traj_limitation <= len(starts)
        require(is_valid, "traj_limitation", f"-1 or in [1, {len(starts)}]", traj_limitation)
        self.folder = Path() if expert_path is None else Path(expert_path).parent
        self.train_fraction, self.batch_size, self.randomize = train_fraction, batch_size, randomize
        # From numpy's global generator, which SB3's `set_random_seed` seeds.
        self._seed = np.random.randint(2**31)
        self._rng = np.random.default_rng(self._seed)

        self.num_traj = m = len(starts) if traj_limitation == -1 else traj_limitation
        self.num_transition = n = int([*starts, len(arrays["obs"])][m])
        self.starts, self.lasts = starts[:m], np.append(starts[1:m], n) - 1
        self.ends = np.isin(np.arange(n), self.lasts)
        self.actions, self.rewards = arrays["actions"][:n], arrays["rewards"][:n].reshape(-1)
        self.returns = arrays["episode_returns"][:m].reshape(-1)
        self.avg_ret, self.std_ret = float(self.returns.mean()), float(self.returns.std())
        self.observations = arrays["obs"][:n]
        if "final_obs" in arrays:
            self.observations = np.concatenate((self.observations, arrays["final_obs"][:m]))
        self.truncated = arrays["truncated"][:m].astype(bool).reshape(-1) if "truncated" in arrays else None
        self.masks = None
        if "action_masks" in arrays:
            finals = np.ones((m, *arrays["action_masks"].shape[1:]))
            self.masks = np.concatenate((arrays["action_masks"][:n], arrays.get("final_action_masks", finals)[:m]))
        if verbose > 0:
            self.log_info()

    def log_info(self) -> None:
        """Print the number of trajectories and steps, and mean and standard deviation of the returns."""
        print(f"{self.num_traj} trajectories, {self.num_transition} transitions")
        print(f"return {self.avg_ret:.2f} +/- {self.std_ret:.2f}")

    def plot(self) -> None:
        """Show a histogram of the returns."""
        import matplotlib.pyplot as plt

        plt.hist(self.returns)
        plt.show()

    def batches(self, split: Literal["train", "val"], n_steps: int = 1) -> Iterator[np.ndarray]:
        """
        One epoch of batches.

        :param split: training or validation part; each has the same steps in every epoch
        :param n_steps: steps of a sequence (T); if the last sequence is incomplete, the dataset's first steps fill it
            up
        :return: indices of the steps of each batch, ``[T, B]``, with T x B about ``batch_size``
        """
        sequences = np.resize(np.arange(self.num_transition), (-(-self.num_transition // n_steps), n_steps))
        order = np.random.default_rng(self._seed).permutation(len(sequences))
        n_train = max(int(self.train_fraction * len(order)), 1)
        part = order[:n_train] if split == "train" else order[n_train:]
        if self.randomize:
            part = self._rng.permutation(part)
        size = max(self.batch_size // n_steps, 1)
        for first in range(0, len(part), size):
            yield sequences[part[first : first + size]].T

    def observations_for(self, model: Agent, rows: np.ndarray) -> np.ndarray:
        """
        :param model: an ACER
        :param rows: indices of steps, ``[B]``; indices from ``num_transition`` on are those of ``final_obs``
        :return: observations in the shape of the agent's observation space, not normalised, ``[B, ...]``; images are
            read from their files
        :raises ValueError: if they do not fit the observation space, or if that is a Dict. Images with values in
            [0, 1] do not fit a space of integers.
        """
        space = model.observation_space
        require_no_dict(space)
        observations = self.observations[rows]
        if observations.dtype.kind == "U":
            observations = np.stack([read_image(self._find(name)) for name in observations.tolist()])
        shape, got = space.shape or (), observations.shape[1:]
        if len(got) == 3 and got != shape == (got[2], *got[:2]):
            observations = np.moveaxis(observations, -1, 1)  # channels are last in stable-baselines, first in SB3
            got = shape
        if got != shape and (len(got) > 1 or math.prod(got) != math.prod(shape)):
            raise ValueError(f"obs must fit the observation space {space!r}, got observations of shape {got}")
        observations = observations.reshape(-1, *shape)
        fitting: np.ndarray = observations.astype(space.dtype, copy=False)
        changed = [] if fitting.dtype.kind == "f" else observations[fitting != observations][:5].tolist()
        if not isinstance(space, spaces.Box):
            changed += [row.tolist() for row in np.unique(fitting, axis=0) if not space.contains(row)][:5]
        require(not changed, "obs", f"values of the observation space {space!r}", changed)
        return fitting

    def _find(self, name: str) -> Path:
        path = Path(name.replace("\\", "/"))  # of a file that was recorded on Windows
        for candidate in (self.folder / path, self.folder / path.parent.name / path.name, path):
            if candidate.exists():
                return candidate
        raise ValueError(f"obs must be paths relative to the file or to the working directory, got {name!r}")

    def inputs_for(self, model: Agent, rows: np.ndarray) -> th.Tensor:
        """
        :param model: an ACER
        :param rows: see :meth:`observations_for`
        :return: the observations as the agent's policy gets them, normalised if the agent has a VecNormalize, ``[B,
            ...]``
        """
        observations: Any = self.observations_for(model, rows)
        env = model.get_env()
        normalize = model.get_vec_normalize_env() if env is None else normalize_of_policy(env)
        if normalize is not None:
            observations = normalize.normalize_obs(observations)
        return th.as_tensor(observations, device=model.policy.device)

    def masks_for(self, model: Agent, rows: np.ndarray) -> th.Tensor | None:
        """
        :param model: an ACER
        :param rows: see :meth:`observations_for`
        :return: whether actions were valid, bool, ``[B, P]``; None if no masks were recorded
        :raises ValueError: if they do not fit the action space, or leave no valid action
        """
        if self.masks is None:
            return None
        return th.from_numpy(model.policy.family.check_masks(self.masks[rows], len(rows))).to(model.policy.device)

    def play_back(self, model: Agent) -> tuple[np.ndarray, np.ndarray]:
        """
        Run the agent's policy along the trajectories.

        :param model: an ACER
        :return: statistics of the policy at each step, ``[N, P]``, and the recurrent state before each step, ``[N, W]``
        """
        policy, steps, lasts = model.policy, self.starts, self.lasts
        all_stats = np.zeros((self.num_transition, policy.family.n_stats), np.float32)
        all_states = policy.initial_states(self.num_transition)
        states = th.from_numpy(policy.initial_states(len(steps))).to(policy.device)
        policy.set_training_mode(False)
        while len(steps):  # the next step of every trajectory that has one
            with th.no_grad():
                stats, after = policy.step(self.inputs_for(model, steps), states, self.masks_for(model, steps))
            all_stats[steps], all_states[steps] = stats.cpu().numpy(), states.cpu().numpy()
            goes_on = steps < lasts
            steps, lasts, states = steps[goes_on] + 1, lasts[goes_on], after[th.from_numpy(goes_on).to(after.device)]
        return all_stats, all_states

    def actions_for(self, model: Agent) -> np.ndarray:
        """
        :param model: an ACER
        :return: the actions in the form in which its policy samples them, ``[N, D]``
        :raises ValueError: if they are not elements of its action space
        """
        actions, shape = self.actions, model.action_space.shape or ()
        if math.prod(actions.shape[1:]) == math.prod(shape):
            actions = actions.reshape(-1, *shape)
        family, masks = model.policy.family, self.masks_for(model, np.arange(self.num_transition))
        components = family.from_env(actions)
        if masks is not None:
            taken = family.encode(th.from_numpy(components)).bool()
            invalid = (taken & ~masks.cpu()).any(-1).nonzero().flatten().tolist()
            require(not invalid, "actions", "valid by action_masks", [actions[step].tolist() for step in invalid[:1]])
        return components

    def to_replay_buffer(
        self,
        model: Agent,
        behaviour: Literal["expert", "policy"] = "expert",
        epsilon: float = 0.1,
        time_limit: int | None = None,
    ) -> None:
        """
        Store the demonstrations in the agent's replay buffer, for off-policy learning. They stay there until the
        agent's own rollouts have filled the buffer and overwrite them.

        :param model: an ACER
        :param behaviour: the behaviour distribution mu to store. ``expert``: each component is the one taken with
            probability 1 - ``epsilon``, and else uniform over its valid outcomes; for Box, a Gaussian around the action
            with the policy's standard deviation. ``policy``: the agent's policy as it is now; after cloning, it
            estimates the distribution of a stochastic expert.
        :param epsilon: probability that ``expert`` spreads uniformly over all valid outcomes, in (0, 1]
        :param time_limit: for demonstrations without the array ``truncated``: trajectories of exactly this many steps
            are truncated, all others end in a terminal state. None: all end in a terminal state. Without the array
            ``final_obs`` the last step of a truncated trajectory is left out, since the observation after it is
            unknown.
        :raises ValueError: for an argument outside its range, and if observations or actions do not fit the agent's
            spaces
        """
        require(isinstance(getattr(model, "replay_buffer", None), SequenceReplayBuffer), "model", "an ACER", model)
        check_choice("behaviour", behaviour, ("expert", "policy"))
        require(check_number("epsilon", epsilon, 0, 1) > 0, "epsilon", "in (0, 1]", epsilon)
        if time_limit is not None:
            check_integer("time_limit", time_limit, 2)
        actions, buffer = self.actions_for(model), model.replay_buffer
        mu, states = self.play_back(model)
        if behaviour == "expert":
            mu = _around(model.policy, actions, mu, epsilon, self.masks_for(model, np.arange(self.num_transition)))
        steps, following, done, truncated = self._transitions(time_limit)
        n_slots = -(-len(steps) // (buffer.n_envs * buffer.n_steps))
        if n_slots > buffer.n_slots:
            n_kept = buffer.n_slots * buffer.n_steps * buffer.n_envs
            warn(f"the replay buffer keeps {n_kept} of {len(steps)} demonstrated steps")

        if (env := model.get_env()) is not None:
            buffer.expect_frame_stack(find_frame_stack(env))
        buffer.end_episodes()
        # Each environment gets a contiguous sequence of steps; the first steps again fill the last rollout up.
        for step in np.resize(steps, (buffer.n_envs, n_slots * buffer.n_steps)).T:
            masks = {"masks": self.masks_for(model, step), "next_masks": self.masks_for(model, following[step])}
            buffer.add(
                self.observations_for(model, step),
                self.observations_for(model, following[step]),
                actions[step],
                self.rewards[step],
                done[step],
                [{"TimeLimit.truncated": each} for each in truncated[step].tolist()],
                behaviour=mu[step],
                states=states[step],
                **{name: None if each is None else each.cpu().numpy() for name, each in masks.items()},
            )
        buffer.end_episodes()

    def _transitions(self, time_limit: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """
        :return: indices of the steps to replay; and for every step: index of the observation that follows it, whether
            it ends its trajectory, and whether its trajectory is truncated there
        """
        n, lasts, is_truncated = self.num_transition, self.lasts, self.truncated
        replayed, done, truncated = np.ones(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        following = np.minimum(np.arange(n) + 1, n - 1)  # not used after a terminal state
        if is_truncated is None:
            is_truncated = lasts - self.starts + 1 == time_limit
        if len(self.observations) > n:
            following[lasts] = n + np.arange(self.num_traj)
        else:
            replayed[lasts[is_truncated]] = False
            is_left = ~is_truncated | (lasts > self.starts)
            lasts, is_truncated = (lasts - is_truncated)[is_left], is_truncated[is_left]
        done[lasts] = True
        truncated[lasts] = is_truncated
        return np.flatnonzero(replayed), following, done, truncated


def _read(path: str | Path | None, arrays: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    if (path is None) == (arrays is None):
        raise ValueError(f"one of expert_path and traj_data must be given, got {'neither' if path is None else 'both'}")
    if path is None:
        require(isinstance(arrays, Mapping), "traj_data", "a dict of arrays", arrays)
        return _known(arrays)
    require(isinstance(path, (str, Path)), "expert_path", "a path", path)
    with opened(path, "npz", "expert_path") as file:
        require(zipfile.is_zipfile(file), "expert_path", "an npz file", str(path))
        file.seek(0)  # is_zipfile leaves it near the end
        with named(path):
            try:
                return _known(np.load(file, allow_pickle=False))
            except ValueError as error:
                if "allow_pickle" not in str(error):
                    raise
                raise ValueError(
                    "it must hold arrays of numbers or text, got pickled objects: if you trust the file, pass "
                    "traj_data=np.load(expert_path, allow_pickle=True)"
                ) from error


def _known(arrays: Any) -> dict[str, np.ndarray]:
    known = {*NEEDED, *OF_TRAJECTORIES, "action_masks"}
    return {key: np.atleast_1d(arrays[key]) for key in sorted(known) if key in arrays}


def _check(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """
    :return: indices of the trajectories' first steps, ``[M]``
    :raises ValueError: if an array is missing, or if the arrays do not fit together
    """
    for key in NEEDED:
        if key not in arrays:
            raise ValueError(f"demonstrations must have the arrays {', '.join(NEEDED)}, got none named {key}")
    is_start = arrays["episode_starts"].astype(bool).reshape(-1)
    require(len(is_start) > 0 and bool(is_start[0]), "episode_starts", "True at the first step", is_start[:5])
    starts = np.flatnonzero(is_start)
    for key, array in arrays.items():
        expected = len(starts) if key in OF_TRAJECTORIES else len(is_start)
        if len(array) != expected:
            raise ValueError(f"{key} must have {expected} rows, as episode_starts says, got {len(array)}")
        if key in SINGLE and array.size != expected:
            raise ValueError(f"{key} must have one value in each row, got an array of shape {array.shape}")
        if array.dtype.kind == "f" and not (is_usable := np.abs(array) <= LARGEST).all():
            raise ValueError(f"{key} must be finite, and at most {LARGEST:g}, got {array[~is_usable][0]}")
    return starts


def _around(
    policy: ACERPolicy, actions: np.ndarray, stats: np.ndarray, epsilon: float, masks: th.Tensor | None
) -> np.ndarray:
    """
    :param stats: statistics of the policy, ``[N, P]``
    :param masks: whether actions were valid, ``[N, P]``; None if all were
    :return: statistics of the distributions of ``behaviour="expert"``, ``[N, P]``
    """
    family = policy.family
    if not isinstance(family, Categorical):
        return np.concatenate((actions, np.split(stats, 2, -1)[1]), -1)
    uniform = family.statistics(th.zeros(len(actions), family.n_outputs), None, None if masks is None else masks.cpu())
    mixed: np.ndarray = ((1 - epsilon) * family.encode(th.from_numpy(actions)) + epsilon * uniform).numpy()
    return mixed
