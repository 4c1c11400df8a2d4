"""Demonstrations: reading and replaying them. :mod:`~sb3_acer.demonstrations.recording` lists their arrays."""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.demonstrations.recording import END_KEYS, KEYS, read_image, require_no_dict
from sb3_acer.distributions import Categorical
from sb3_acer.policies import ACERPolicy


class Agent(Protocol):
    """What is needed of an ACER, which is above this module."""

    policy: ACERPolicy
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    verbose: int

    def get_vec_normalize_env(self) -> VecNormalize | None: ...


class ExpertDataset:
    """
    Demonstrations, the arrays that :mod:`sb3_acer.demonstrations.recording` lists.

    :param expert_path: npz file. Images are looked for beside it, then from the working directory.
    :param traj_data: the arrays themselves, instead of a file
    :param train_fraction: share of the steps to clone, in (0, 1]; the rest is for validation
    :param batch_size: steps of a batch
    :param traj_limitation: number of trajectories to use, the first ones; -1 for all
    :param randomize: whether each epoch has an order of its own
    :param verbose: whether to print what was read
    :param sequential_preprocessing: not read: batches are made when they are asked for, and never by another process
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
        if not 0 < train_fraction <= 1:
            raise ValueError(f"train_fraction must be in (0, 1], got {train_fraction!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
        arrays = _read(expert_path, traj_data)
        starts = _check(arrays)
        if traj_limitation != -1 and not 1 <= traj_limitation <= len(starts):
            raise ValueError(f"traj_limitation must be -1 or in [1, {len(starts)}], got {traj_limitation!r}")
        self.folder = Path() if expert_path is None else Path(expert_path).parent
        self.train_fraction, self.batch_size, self.randomize = train_fraction, batch_size, randomize
        # By numpy's global generator, which SB3's `set_random_seed` seeds.
        self._seed = np.random.randint(2**31)
        self._rng = np.random.default_rng(self._seed)

        self.num_traj = m = len(starts) if traj_limitation == -1 else traj_limitation
        self.num_transition = n = int([*starts, len(arrays["obs"])][m])
        self.starts, self.lasts = starts[:m], np.append(starts[1:m], n) - 1
        self.ends = np.isin(np.arange(n), self.lasts)
        self.actions, self.rewards = arrays["actions"][:n], arrays["rewards"][:n].reshape(-1)
        self.returns = arrays["episode_returns"][:m].reshape(-1)
        self.avg_ret, self.std_ret = float(self.returns.mean()), float(self.returns.std())
        self.observations, self.truncated = arrays["obs"][:n], None
        if set(END_KEYS) <= set(arrays):
            self.observations = np.concatenate((self.observations, arrays["final_obs"][:m]))
            self.truncated = arrays["truncated"][:m].astype(bool)
        if verbose > 0:
            self.log_info()

    def log_info(self) -> None:
        """Print how many demonstrations there are, and how good."""
        print(f"{self.num_traj} trajectories, {self.num_transition} transitions")
        print(f"return {self.avg_ret:.2f} +/- {self.std_ret:.2f}")

    def plot(self) -> None:
        """Show a histogram of the returns."""
        import matplotlib.pyplot as plt

        plt.hist(self.returns)
        plt.show()

    def batches(self, split: Literal["train", "val"], n_steps: int = 1) -> Iterator[np.ndarray]:
        """
        :param split: the part to go through once: it has the same steps each time
        :param n_steps: steps of a sequence (T); the very last one goes on with the first steps of all
        :return: indices of each batch's steps, ``[T, B]``, of about ``batch_size`` steps
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
        :param model: an ACER to be shown them
        :param rows: which ones: indices of steps; from ``num_transition`` on, of trajectories' final observations
        :return: observations in the shape of its space, images read, nothing normalised, ``[B, ...]``
        :raises ValueError: if the space is another one, or a Dict
        """
        space = model.observation_space
        require_no_dict(space)
        observations = self.observations[rows]
        if observations.dtype.kind == "U":
            observations = np.stack([read_image(self._find(name)) for name in observations.tolist()])
        shape = space.shape or ()
        if observations.ndim == 4 and observations.shape[1:] != shape:
            observations = np.moveaxis(observations, -1, 1)  # stable-baselines has the channels last, and SB3 first
        got = observations.shape[1:]
        if got != shape and (len(got) > 1 or math.prod(got) != math.prod(shape)):
            raise ValueError(f"obs must fit the observation space {space!r}, got observations of shape {got}")
        fitting: np.ndarray = observations.reshape(-1, *shape).astype(space.dtype, copy=False)
        return fitting

    def _find(self, name: str) -> Path:
        path = Path(name)
        for candidate in (self.folder / path, self.folder / path.parent.name / path.name, path):
            if candidate.exists():
                return candidate
        raise ValueError(f"obs must hold paths of images beside the file or from the working directory, got {name!r}")

    def inputs_for(self, model: Agent, rows: np.ndarray) -> th.Tensor:
        """
        :param model: an ACER
        :param rows: see :meth:`observations_for`
        :return: the observations as the agent's policy gets them, normalised where it is used to that, ``[B, ...]``
        """
        observations: Any = self.observations_for(model, rows)
        normalize = model.get_vec_normalize_env()
        if normalize is not None:
            observations = normalize.normalize_obs(observations)
        return th.as_tensor(observations, device=model.policy.device)

    def play_back(self, model: Agent) -> tuple[np.ndarray, np.ndarray]:
        """
        :param model: an ACER
        :return: statistics of its policy at each step, ``[N, P]``, and its recurrent state before the step, ``[N, W]``
        """
        policy, steps, lasts = model.policy, self.starts, self.lasts
        all_stats = np.zeros((self.num_transition, policy.family.n_stats), np.float32)
        all_states = policy.initial_states(self.num_transition)
        states = th.from_numpy(policy.initial_states(len(steps))).to(policy.device)
        policy.set_training_mode(False)
        while len(steps):  # one step of every trajectory that goes on
            with th.no_grad():
                stats, after = policy.step(self.inputs_for(model, steps), states)
            all_stats[steps], all_states[steps] = stats.cpu().numpy(), states.cpu().numpy()
            goes_on = steps < lasts
            steps, lasts, states = steps[goes_on] + 1, lasts[goes_on], after[th.from_numpy(goes_on).to(after.device)]
        return all_stats, all_states

    def actions_for(self, model: Agent) -> np.ndarray:
        """
        :param model: an ACER that is to act so
        :return: the actions as its policy samples them, ``[N, D]``
        :raises ValueError: if they are not of its action space
        """
        actions, shape = self.actions, model.action_space.shape or ()
        if math.prod(actions.shape[1:]) == math.prod(shape):
            actions = actions.reshape(-1, *shape)
        return model.policy.family.from_env(actions)

    def to_replay_buffer(
        self,
        model: Agent,
        behaviour: Literal["expert", "policy"] = "expert",
        epsilon: float = 0.1,
        time_limit: int | None = None,
    ) -> None:
        """
        Put the demonstrations into an agent's replay buffer, from which it goes on learning off-policy. They stay until
        its own rollouts have gone round the buffer.

        :param model: an ACER
        :param behaviour: the distribution mu that is taken to have acted. ``expert``: all but ``epsilon`` on the action
            taken, or a Gaussian around it with the policy's deviations. ``policy``: the policy's own as it is now,
            which after cloning is an estimate of an expert's who does not always act alike.
        :param epsilon: what ``expert`` leaves for all actions alike, in (0, 1]
        :param time_limit: for files that do not tell time limits from terminal states: a trajectory of that many steps
            was cut. Its last step is left out, since what followed it is not known; other trajectories' ends, or all if
            it is None, are taken for terminal states.
        :raises ValueError: for an argument outside its range, and if observations or actions are not the agent's
        """
        if behaviour not in ("expert", "policy"):
            raise ValueError(f"behaviour must be 'expert' or 'policy', got {behaviour!r}")
        if not 0 < epsilon <= 1:
            raise ValueError(f"epsilon must be in (0, 1], got {epsilon!r}")
        if time_limit is not None and time_limit < 2:
            raise ValueError(f"time_limit must be None or at least 2, got {time_limit!r}")
        actions, buffer = self.actions_for(model), model.replay_buffer
        mu, states = self.play_back(model)
        if behaviour == "expert":
            mu = _around(model.policy, actions, mu, epsilon)
        steps, following, ended, cut = self._transitions(time_limit)
        n_slots = -(-len(steps) // (buffer.n_envs * buffer.n_steps))
        if n_slots > buffer.n_slots:
            n_kept = buffer.n_slots * buffer.n_steps * buffer.n_envs
            warnings.warn(f"the replay buffer keeps {n_kept} of {len(steps)} demonstrated steps", stacklevel=2)

        buffer.end_episodes()
        # One contiguous run of steps an environment; the first steps again where the last rollout lacks some.
        for step in np.resize(steps, (buffer.n_envs, n_slots * buffer.n_steps)).T:
            buffer.add(
                self.observations_for(model, step),
                self.observations_for(model, following[step]),
                actions[step],
                self.rewards[step],
                ended[step],
                [{"TimeLimit.truncated": each} for each in cut[step].tolist()],
                behaviour=mu[step],
                states=states[step],
            )
        buffer.end_episodes()

    def _transitions(self, time_limit: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """
        The steps to replay; and of every step, which observation follows it, whether a trajectory ends with it, and
        whether one is cut there.
        """
        n, lasts, truncated = self.num_transition, self.lasts, self.truncated
        replayed, ended, cut = np.ones(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        following = np.minimum(np.arange(n) + 1, n - 1)  # after a terminal state it is not read
        if truncated is None:
            truncated = lasts - self.starts + 1 == time_limit
            replayed[lasts[truncated]] = False
            lasts = lasts - truncated
        else:
            following[lasts] = n + np.arange(self.num_traj)
        ended[lasts] = True
        cut[lasts] = truncated
        return np.flatnonzero(replayed), following, ended, cut


def _read(path: str | Path | None, arrays: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    if (path is None) == (arrays is None):
        raise ValueError(f"one of expert_path and traj_data must be given, got {'neither' if path is None else 'both'}")
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            try:
                arrays = {key: file[key] for key in (*KEYS, *END_KEYS) if key in file}
            except ValueError as error:
                raise ValueError(
                    f"expert_path must hold arrays of numbers or text, got pickled objects in {str(path)!r}: if you "
                    "trust the file, pass traj_data=np.load(expert_path, allow_pickle=True)"
                ) from error
    assert arrays is not None
    return {key: np.atleast_1d(arrays[key]) for key in (*KEYS, *END_KEYS) if key in arrays}


def _check(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where the trajectories begin, if the arrays are there and fit together."""
    for key in KEYS:
        if key not in arrays:
            raise ValueError(f"demonstrations must have the arrays {', '.join(KEYS)}, got none called {key}")
    is_start = arrays["episode_starts"].astype(bool).reshape(-1)
    if not len(is_start) or not is_start[0]:
        raise ValueError(f"episode_starts must begin with the first step of a trajectory, got {is_start[:5]}")
    starts = np.flatnonzero(is_start)
    for key, array in arrays.items():
        expected = len(starts) if key in ("episode_returns", *END_KEYS) else len(is_start)
        if len(array) != expected:
            raise ValueError(f"{key} must have {expected} rows by episode_starts, got {len(array)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{key} must be finite, got {array[~np.isfinite(array)][0]}")
    return starts


def _around(policy: ACERPolicy, actions: np.ndarray, stats: np.ndarray, epsilon: float) -> np.ndarray:
    """Statistics of distributions around the actions taken, ``[N, P]``, from those of the policy."""
    family = policy.family
    if not isinstance(family, Categorical):
        return np.concatenate((actions, np.split(stats, 2, -1)[1]), -1)
    uniform = family.statistics(th.zeros(family.n_outputs), None)
    mixed: np.ndarray = ((1 - epsilon) * family.encode(th.from_numpy(actions)) + epsilon * uniform).numpy()
    return mixed
