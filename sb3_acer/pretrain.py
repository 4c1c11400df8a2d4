"""
Demonstrations: reading them, cloning them, and replaying them. Their arrays are listed in :mod:`sb3_acer.recording`.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.distributions import Categorical
from sb3_acer.policies import ACERPolicy
from sb3_acer.recording import END_KEYS, KEYS, generate_expert_traj, read_image, require_no_dict

__all__ = ["ExpertDataset", "behaviour_cloning", "generate_expert_traj"]

LEAST_STD = 0.1
"""Cloning makes no standard deviation less than this share of half the action's range."""


class Agent(Protocol):
    """What is needed of an ACER, which is above this module."""

    policy: ACERPolicy
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    verbose: int

    def get_vec_normalize_env(self) -> VecNormalize | None: ...


AgentType = TypeVar("AgentType", bound=Agent)


class ExpertDataset:
    """
    Demonstrations, the arrays that :mod:`sb3_acer.recording` lists.

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
        mu, states = _play_back(model, self)
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


def _inputs(model: Agent, dataset: ExpertDataset, steps: np.ndarray) -> th.Tensor:
    """Observations of some steps as the policy gets them."""
    observations: Any = dataset.observations_for(model, steps)
    normalize = model.get_vec_normalize_env()
    if normalize is not None:
        observations = normalize.normalize_obs(observations)
    return th.as_tensor(observations, device=model.policy.device)


def _play_back(model: Agent, dataset: ExpertDataset) -> tuple[np.ndarray, np.ndarray]:
    """The policy's statistics at each step, ``[N, P]``, and what it remembers before it, ``[N, W]``."""
    policy, steps, lasts = model.policy, dataset.starts, dataset.lasts
    all_stats = np.zeros((dataset.num_transition, policy.family.n_stats), np.float32)
    all_states = policy.initial_states(dataset.num_transition)
    states = th.from_numpy(policy.initial_states(len(steps))).to(policy.device)
    policy.set_training_mode(False)
    while len(steps):  # of all trajectories at once
        with th.no_grad():
            stats, after = policy(_inputs(model, dataset, steps), states)
        all_stats[steps], all_states[steps] = stats.cpu().numpy(), states.cpu().numpy()
        goes_on = steps < lasts
        steps, lasts, states = steps[goes_on] + 1, lasts[goes_on], after[th.from_numpy(goes_on).to(after.device)]
    return all_stats, all_states


def _around(policy: ACERPolicy, actions: np.ndarray, stats: np.ndarray, epsilon: float) -> np.ndarray:
    """Statistics of distributions around the actions taken, ``[N, P]``, from those of the policy."""
    family = policy.family
    if not isinstance(family, Categorical):
        return np.concatenate((actions, np.split(stats, 2, -1)[1]), -1)
    uniform = family.statistics(th.zeros(family.n_outputs), None)
    mixed: np.ndarray = ((1 - epsilon) * family.encode(th.from_numpy(actions)) + epsilon * uniform).numpy()
    return mixed


def behaviour_cloning(
    model: AgentType,
    dataset: ExpertDataset,
    n_epochs: int = 10,
    learning_rate: float = 1e-4,
    adam_epsilon: float = 1e-8,
    val_interval: int | None = None,
) -> AgentType:
    """
    Fit the policy to demonstrations by maximum likelihood, with Adam, and make the average policy equal to it. The
    critic's own weights and reinforcement learning's optimiser are left alone. A recurrent policy learns from sequences
    as long as those that it replays, from what it remembers where they begin.

    Where actions are continuous, no standard deviation gets below a tenth of half the action's range. A deterministic
    expert's is 0: there would be neither exploration nor importance ratios to go on with. A VecNormalize that has seen
    nothing yet takes its statistics of observations from the demonstrations.

    :param model: an ACER
    :param dataset: the demonstrations
    :param n_epochs: passes through the training part
    :param learning_rate: learning rate
    :param adam_epsilon: Adam's epsilon
    :param val_interval: epochs between reports of the losses, which are printed if the agent's ``verbose`` is above 0;
        by default a tenth of ``n_epochs``
    :return: the agent
    :raises ValueError: if observations or actions are not the agent's
    """
    policy, n_epochs = model.policy, int(n_epochs)
    val_interval = val_interval or max(n_epochs // 10, 1)
    n_steps = model.replay_buffer.n_steps if policy.state_size else 1
    optimizer = th.optim.Adam(policy.parameters(), lr=learning_rate, eps=adam_epsilon)
    actions = th.as_tensor(dataset.actions_for(model), device=policy.device)
    states = policy.initial_states(dataset.num_transition)
    least_log_std = _least_log_std(model)
    _acquaint(model, dataset)
    for epoch in range(1, n_epochs + 1):
        if policy.state_size:
            states = _play_back(model, dataset)[1]
        policy.set_training_mode(True)
        losses = []
        for steps in dataset.batches("train", n_steps):
            loss = _loss(model, dataset, actions, states, steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if policy.log_std is not None:
                policy.log_std.data.clamp_(min=least_log_std)
            losses.append(loss.item())
        policy.set_training_mode(False)
        if model.verbose > 0 and epoch % val_interval == 0:
            batches = dataset.batches("val", n_steps)
            with th.no_grad():
                validation = [_loss(model, dataset, actions, states, steps).item() for steps in batches]
            means = f"training loss {np.mean(losses):.6f}, validation loss {np.mean(validation or [np.nan]):.6f}"
            print(f"epoch {epoch} of {n_epochs}: {means}")
    optimizer.zero_grad()
    model.average_policy.load_state_dict(policy.state_dict())
    return model


def _loss(
    model: Agent, dataset: ExpertDataset, actions: th.Tensor, all_states: np.ndarray, sequences: np.ndarray
) -> th.Tensor:
    """Minus the mean log-likelihood of sequences of steps, ``[T, B]``."""
    policy, log_probs = model.policy, []
    states = th.as_tensor(all_states[sequences[0]], device=policy.device)
    for steps in sequences:
        stats, states = policy(_inputs(model, dataset, steps), states)
        log_probs.append(policy.family.log_prob(stats, actions[steps]))
        states = states * th.as_tensor(~dataset.ends[steps, np.newaxis], device=states.device)
    return -th.stack(log_probs).mean()


def _least_log_std(model: Agent) -> th.Tensor | None:
    space, log_std = model.action_space, model.policy.log_std
    if log_std is None or not isinstance(space, spaces.Box):
        return None
    half_range = (space.high.astype(np.float64) - space.low).reshape(-1) / 2
    least = np.log(LEAST_STD * np.where(np.isfinite(half_range) & (half_range > 0), half_range, 1))
    return th.minimum(log_std.detach(), th.as_tensor(least).to(log_std))


def _acquaint(model: Agent, dataset: ExpertDataset) -> None:
    """Otherwise the first rollouts would change what the cloned policy sees."""
    normalize = model.get_vec_normalize_env()
    if normalize is None or not normalize.norm_obs or not normalize.training:
        return
    seen = normalize.obs_rms
    if isinstance(seen, RunningMeanStd) and seen.count < 1:
        seen.update(dataset.observations_for(model, np.arange(dataset.num_transition)))
