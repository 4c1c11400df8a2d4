"""ACER: when to act, to store, to evaluate and to step. What is computed is in :mod:`sb3_acer.estimators`."""

import io
import pathlib
import warnings
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Image
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, Schedule, TrainFreq
from stable_baselines3.common.utils import check_for_correct_spaces, explained_variance, obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sb3_acer.buffer import NumpyObs, SequenceBatch, SequenceReplayBuffer
from sb3_acer.distributions import make_family
from sb3_acer.estimators import (
    correction_gain,
    correction_weights,
    off_policy_returns,
    truncated_gain,
    truncated_weight,
    trust_region,
)
from sb3_acer.frames import find_frame_stack
from sb3_acer.parameters import RMSpropTF
from sb3_acer.policies import (
    ACERPolicy,
    CnnLnLstmPolicy,
    CnnLstmPolicy,
    CnnPolicy,
    Evaluation,
    MlpLnLstmPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)
from sb3_acer.sb2_compat.interface import OldNames, StableBaselinesInterface
from sb3_acer.schedules import NamedSchedule, check_schedule, make_schedule

_ALL_BUT_TENSORBOARD = ("stdout", "log", "json", "csv")

SelfACER = TypeVar("SelfACER", bound="ACER")


class _Generators(NamedTuple):
    """Of training's random draws, so that nothing else disturbs them and they are saved with the model."""

    actions: np.random.Generator
    candidates: np.random.Generator
    replay: np.random.Generator
    schedule: np.random.Generator


class Update(NamedTuple):
    """What one update computed, before the optimiser's step."""

    batch: SequenceBatch
    evaluation: Evaluation
    average: th.Tensor
    """statistics of the average policy, ``[T, B, P]``"""
    ratio: th.Tensor
    """importance ratios rho of the actions taken, ``[T, B]``"""
    ratios: th.Tensor
    """those of the candidates, ``[T, B, K]``"""
    q_ret: th.Tensor
    """Retrace targets, ``[T, B]``"""
    advantage: th.Tensor
    """of the actions taken, ``[T, B]``"""
    advantages: th.Tensor
    """of the candidates, ``[T, B, K]``"""
    g: th.Tensor
    """gradient of each state's gain, entropy bonus included, with respect to its statistics, ``[T, B, P]``"""
    k: th.Tensor
    """gradient of KL(average || current) with respect to the same, ``[T, B, P]``"""
    z: th.Tensor
    """``g`` after the trust region, ``[T, B, P]``"""
    grad_norm: th.Tensor
    """norm of the gradients of all parameters together before clipping, scalar"""


class ACER(StableBaselinesInterface, OffPolicyAlgorithm):
    """
    Actor-Critic with Experience Replay (https://arxiv.org/abs/1611.01224): Retrace targets, truncated importance
    sampling with bias correction, and a trust region around an average policy.

    The arguments up to ``n_cpu_tf_sess`` are those of stable-baselines' ACER, in its order and with its defaults.

    :param policy: policy class, or one of the names ``MlpPolicy``, ``CnnPolicy``, ``MultiInputPolicy``, with an LSTM
        ``MlpLstmPolicy``, ``CnnLstmPolicy``, ``MultiInputLstmPolicy``, layer-normalised ``MlpLnLstmPolicy``,
        ``CnnLnLstmPolicy``
    :param env: environment, or the name of a registered one (can be None for loading trained models)
    :param gamma: discount factor, in [0, 1]
    :param n_steps: steps of a rollout of each environment, and of a replayed sequence
    :param num_procs: deprecated: number of threads for torch
    :param q_coef: weight of the critic's loss
    :param ent_coef: weight of the entropy bonus
    :param max_grad_norm: bound on the norm of all gradients together; None for no bound
    :param learning_rate: initial learning rate, or a schedule of it by the remaining progress (from 1 to 0)
    :param lr_schedule: course of a learning rate that is a number: ``linear``, ``constant``, ``double_linear_con``,
        ``middle_drop`` or ``double_middle_drop``
    :param rprop_alpha: decay of RMSProp, the default optimiser, in [0, 1]
    :param rprop_epsilon: epsilon of RMSProp, inside the root
    :param buffer_size: steps of the vectorised environment to keep: transitions are that many times the number of
        environments
    :param replay_ratio: mean number of replayed batches after each rollout (Poisson distributed)
    :param replay_start: steps of the vectorised environment in the buffer before replay starts
    :param correction_term: truncation constant c of the importance ratios; 5 is the paper's for continuous actions
    :param trust_region: whether gradients are projected to the trust region
    :param alpha: decay of the average policy, in [0, 1]
    :param delta: bound on the linearised divergence from the average policy
    :param verbose: 0 for no output, 1 for info messages, 2 for debug messages
    :param tensorboard_log: folder for tensorboard; None for no logging
    :param _init_setup_model: whether to build the networks on creation
    :param policy_kwargs: keyword arguments of the policy
    :param full_tensorboard_log: log to tensorboard histograms of rewards, advantages, action probabilities (means and
        deviations of continuous ones), learning rate and observations, images as such
    :param seed: seed of every random draw; None for a fresh one
    :param n_cpu_tf_sess: deprecated: number of threads for torch
    :param batch_size: sequences of a replayed batch; None for one an environment
    :param n_action_samples: actions sampled in a state, where they cannot be enumerated: for the bias correction, and
        again for the dueling network's mean advantage
    :param ent_schedule: course of ``ent_coef``, as those of ``lr_schedule``
    :param burn_in: first steps of a replayed sequence that only bring a recurrent policy's memory up to date
    :param replay_buffer_class: a subclass of :class:`~sb3_acer.buffer.SequenceReplayBuffer`
    :param replay_buffer_kwargs: its keyword arguments
    :param stats_window_size: episodes that the logged means are taken over
    :param device: device of the networks
    :raises ValueError: for an argument outside its range, and for an action space that is not supported
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
        "MlpLstmPolicy": MlpLstmPolicy,
        "CnnLstmPolicy": CnnLstmPolicy,
        "MultiInputLstmPolicy": MultiInputLstmPolicy,
        "MlpLnLstmPolicy": MlpLnLstmPolicy,
        "CnnLnLstmPolicy": CnnLnLstmPolicy,
    }
    policy: ACERPolicy
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer

    def __init__(
        self,
        policy: str | type[ACERPolicy],
        env: GymEnv | str | None,
        gamma: float = 0.99,
        n_steps: int = 20,
        num_procs: int | None = None,
        q_coef: float = 0.5,
        ent_coef: float = 0.01,
        max_grad_norm: float | None = 10,
        learning_rate: float | Schedule = 7e-4,
        lr_schedule: str = "linear",
        rprop_alpha: float = 0.99,
        rprop_epsilon: float = 1e-5,
        buffer_size: int = 5000,
        replay_ratio: float = 4,
        replay_start: int = 1000,
        correction_term: float = 10.0,
        trust_region: bool = True,
        alpha: float = 0.99,
        delta: float = 1,
        verbose: int = 0,
        tensorboard_log: str | None = None,
        _init_setup_model: bool = True,
        policy_kwargs: dict[str, Any] | None = None,
        full_tensorboard_log: bool = False,
        seed: int | None = None,
        n_cpu_tf_sess: int | None = None,
        *,
        batch_size: int | None = None,
        n_action_samples: int = 5,
        ent_schedule: str = "constant",
        burn_in: int = 0,
        replay_buffer_class: type[SequenceReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        device: th.device | str = "auto",
    ) -> None:
        super().__init__(
            policy,
            cast(GymEnv, None),  # set below: the base class asserts what is a ValueError or is allowed here
            learning_rate,
            buffer_size=buffer_size,
            learning_starts=0,
            batch_size=cast(int, batch_size),
            gamma=gamma,
            train_freq=(n_steps, "step"),
            replay_buffer_class=cast(type[ReplayBuffer], replay_buffer_class or SequenceReplayBuffer),
            replay_buffer_kwargs=replay_buffer_kwargs,
            policy_kwargs=deepcopy(policy_kwargs),
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
            sde_support=False,
        )
        self.n_steps = n_steps  # to the base class it means n-step returns
        self.q_coef = q_coef
        self.ent_coef = ent_coef
        self.max_grad_norm = max_grad_norm
        self.lr_schedule_name = lr_schedule
        self.rprop_alpha = rprop_alpha
        self.rprop_epsilon = rprop_epsilon
        self.replay_ratio = replay_ratio
        self.replay_start = replay_start
        self.correction_term = correction_term
        self.trust_region = trust_region
        self.alpha = alpha
        self.delta = delta
        self.full_tensorboard_log = full_tensorboard_log
        self.n_action_samples = n_action_samples
        self.ent_schedule = ent_schedule
        self.burn_in = burn_in
        self._states = np.zeros((0, 0), np.float32)  # what the policy remembers of each environment, [n_envs, W]
        self._rngs = cast(_Generators, None)  # set by set_random_seed
        self._observes_normalized = False  # whether the policy sees what VecNormalize made, not a stack of it, say
        self._n_rollouts = 0
        self._n_replays = 0  # after the last rollout
        self._log_interval: int | None = None
        self._check_arguments()
        for name, n_threads in (("num_procs", num_procs), ("n_cpu_tf_sess", n_cpu_tf_sess)):
            if n_threads is not None:
                warnings.warn(
                    f"{name} is deprecated: torch.set_num_threads({n_threads}) is called",
                    DeprecationWarning,
                    stacklevel=2,
                )
                th.set_num_threads(n_threads)
        if env is not None:
            self._take_env(self._wrap_env(maybe_make_env(env, verbose), verbose), policy)
        if _init_setup_model:
            self._setup_model()

    def _check_arguments(self) -> None:
        rules: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
            ("an integer of at least 1", _is_count, ("n_steps", "buffer_size", "n_action_samples")),
            ("None or an integer of at least 1", lambda x: x is None or _is_count(x), ("batch_size",)),
            ("in [0, 1]", lambda x: 0 <= x <= 1, ("gamma", "alpha", "rprop_alpha")),
            ("at least 0", lambda x: x >= 0, ("replay_ratio", "replay_start", "q_coef", "ent_coef", "delta")),
            ("at least 0", lambda x: x >= 0, ("correction_term", "rprop_epsilon")),
            (
                f"an integer in [0, n_steps={self.n_steps})",
                lambda x: x == 0 or (_is_count(x) and x < self.n_steps),
                ("burn_in",),
            ),
            ("None or at least 0", lambda x: x is None or x >= 0, ("max_grad_norm",)),
        )
        for rule, holds, names in rules:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        if not issubclass(cast(type, self.replay_buffer_class), SequenceReplayBuffer):
            raise ValueError(
                f"replay_buffer_class must be a subclass of SequenceReplayBuffer, got {self.replay_buffer_class!r}"
            )
        make_schedule(self.learning_rate, self.lr_schedule_name)
        check_schedule("ent_schedule", self.ent_schedule)
        if self.buffer_size < self.n_steps:
            self._warn_of_no_replay()

    def _warn_of_no_replay(self) -> None:
        capacity = max(self.buffer_size // self.n_steps, 1) * self.n_steps
        if self.replay_ratio > 0 and self.replay_start > capacity:
            warnings.warn(
                f"replay will never start: replay_start={self.replay_start} is more than the {capacity} steps that a "
                f"buffer of buffer_size={self.buffer_size} holds in rollouts of n_steps={self.n_steps}",
                stacklevel=3,
            )

    def _take_env(self, env: VecEnv, policy: str | type[ACERPolicy]) -> None:
        make_family(env.action_space)  # raises for what is not supported
        if isinstance(env.observation_space, spaces.Dict) and str(policy).startswith(("Mlp", "Cnn")):
            fitting = "MultiInputLstmPolicy" if "Lstm" in str(policy) else "MultiInputPolicy"
            raise ValueError(f"policy must be {fitting!r} for Dict observations, got {policy!r}")
        self.env = env
        self.n_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._vec_normalize_env = unwrap_vec_normalize(env)

    def _setup_model(self) -> None:
        self.lr_schedule = make_schedule(self.learning_rate, self.lr_schedule_name)
        loaded_rngs = self._rngs
        self.set_random_seed(self.seed)
        self._rngs = loaded_rngs or self._rngs
        policy_kwargs: dict[str, Any] = {
            key: dict(value) if isinstance(value, dict) else value for key, value in self.policy_kwargs.items()
        }
        if issubclass(policy_kwargs.get("optimizer_class", RMSpropTF), RMSpropTFLike):
            rmsprop = {"alpha": self.rprop_alpha, "eps": self.rprop_epsilon}
            policy_kwargs["optimizer_kwargs"] = {**rmsprop, **(policy_kwargs.get("optimizer_kwargs") or {})}
        self.policy = self.policy_class(
            self.observation_space, self.action_space, self.lr_schedule, **policy_kwargs
        ).to(self.device)  # type: ignore[assignment]
        if self.burn_in and not self.policy.state_size:
            raise ValueError(f"burn_in must be 0 for a policy without memory, got {self.burn_in!r}")
        self.average_policy = deepcopy(self.policy).requires_grad_(False)
        self.average_policy.set_training_mode(False)
        del self.average_policy.optimizer
        self.train_freq = (self.n_steps, "step")
        self._convert_train_freq()
        if self.replay_buffer is None:
            self.replay_buffer = self.replay_buffer_class(
                self.buffer_size,
                self.observation_space,
                self.action_space,
                device=self.device,
                n_envs=self.n_envs,
                n_steps=self.n_steps,
                **self.replay_buffer_kwargs,
            )

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed every source of random draws: the libraries' own and the environments', as SB3 does, and the generators
        that training draws from.

        :param seed: None leaves the former alone
        """
        super().set_random_seed(seed)
        self._rngs = _Generators(*(np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)))

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """
        :param env: the environment to learn from; it may be one of another number of environments, and the replay
            buffer is rearranged for it
        :param force_reset: whether to reset the environment before training
        """
        env = self._wrap_env(env, self.verbose)
        check_for_correct_spaces(env, self.observation_space, self.action_space)
        if env.num_envs != self.n_envs:
            self.n_envs = env.num_envs
            force_reset = True
            if self.replay_buffer is not None:
                self.replay_buffer = self.replay_buffer.with_envs(self.n_envs)
        super().set_env(env, force_reset)

    def save_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase) -> None:
        """
        Save the replay buffer, without a second copy of it in memory.

        :param path: the file
        """
        file = open_path(path, "w", self.verbose, "pkl")
        self.replay_buffer.write(file)
        if file is not path:
            file.close()

    def load_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """
        Load a replay buffer, also one that was filled by another number of environments.

        :param path: the file
        :param truncate_last_traj: whether the buffer's last episodes end where it does; False if training goes on in
            them
        :raises ValueError: if the file holds another kind of buffer, or sequences of another length
        """
        file = open_path(path, "r", self.verbose, "pkl")
        loaded = SequenceReplayBuffer.read(file)
        if file is not path:
            file.close()
        if not isinstance(loaded, SequenceReplayBuffer):
            raise ValueError(f"replay buffer must be a SequenceReplayBuffer, got {type(loaded).__name__}")
        if loaded.n_steps != self.n_steps:
            raise ValueError(f"replay buffer must hold sequences of n_steps={self.n_steps}, got {loaded.n_steps}")
        loaded.device = self.device
        if truncate_last_traj:
            loaded.end_episodes()
        self.replay_buffer = loaded if loaded.n_envs == self.n_envs else loaded.with_envs(self.n_envs)

    @classmethod
    def load(cls: type[SelfACER], path: Any, *args: Any, **kwargs: Any) -> SelfACER:
        """
        Load an agent; arguments and errors as :meth:`BaseAlgorithm.load`. Keyword arguments of the constructor replace
        what was saved.
        """
        if isinstance(kwargs.get("lr_schedule"), str):
            kwargs["lr_schedule_name"] = kwargs.pop("lr_schedule")
        model = super().load(path, *args, **kwargs)
        model._check_arguments()
        if "seed" in kwargs:
            model.set_random_seed(kwargs["seed"])
        return model

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer", "average_policy"], []

    def learn(
        self: SelfACER,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 100,
        tb_log_name: str = "ACER",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfACER:
        """
        Train.

        :param total_timesteps: number of steps of single environments
        :param callback: called after each step of the vectorised environment
        :param log_interval: rollouts (on-policy updates) between two logs; None for no logs
        :param tb_log_name: name of the run in tensorboard's log
        :param reset_num_timesteps: False to continue counting, and the episodes under way
        :param progress_bar: show a progress bar
        :raises ValueError: if an observation, a reward or a gradient is NaN or infinite. Neither the agent nor its
            replay buffer has taken it in: both can be saved.
        """
        return super().learn(
            total_timesteps, callback, cast(int, log_interval), tb_log_name, reset_num_timesteps, progress_bar
        )

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        assert self.env is not None
        self.replay_buffer.expect_frame_stack(find_frame_stack(self.env))
        normalize = self._vec_normalize_env
        self._observes_normalized = normalize is not None and normalize.observation_space == self.observation_space
        resets = reset_num_timesteps or self._last_obs is None
        prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        if resets:
            self.replay_buffer.end_episodes()
            self._states = self.policy.initial_states(self.n_envs)
            self._episode_starts = np.ones(self.n_envs, bool)
            self._require_finite("observation", self._last_obs)
        self._warn_of_no_replay()
        return prepared

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: ActionNoise | None = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        """Collect what the rollout under way lacks, all of it unless a callback stopped the last one in its midst."""
        self._log_interval = log_interval
        callback = cast(BaseCallback, OldNames(callback, self._old_locals))
        lacking = TrainFreq(train_freq.frequency - self.replay_buffer.step, train_freq.unit)
        rollout = super().collect_rollouts(env, callback, lacking, replay_buffer, action_noise, learning_starts)
        if not rollout.continue_training:
            # The base class forgets the step at which the callback stopped, though the environment has made it.
            step = callback.locals
            self._update_info_buffer(step["infos"], step["dones"])
            self._store_transition(
                replay_buffer, step["buffer_actions"], step["new_obs"], step["rewards"], step["dones"], step["infos"]
            )
        return rollout

    def _old_locals(self, step: dict[str, Any]) -> dict[str, Any]:
        return {
            "obs": step["new_obs"],
            "mus": self._behaviour,
            "states": self._states_after,
            "masks": self._episode_starts,
            "steps": self.num_timesteps - self.n_envs * (self.replay_buffer.step + 1),
            "samples_number": self._n_replays,
        }

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        :return: actions for the environments, and the same as the policy sampled them
        """
        family = self.policy.family
        observations = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
        with th.inference_mode():
            stats, states = self.policy(observations, th.from_numpy(self._states).to(self.device))
        self._behaviour, self._states_after = stats.cpu().numpy(), states.cpu().numpy()
        actions = family.act(self._behaviour, self._rngs.actions.random((n_envs, family.n_components)))
        return family.to_env(actions), actions

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store what the environment said itself, not what VecNormalize made of it."""
        normalize = self._vec_normalize_env
        obs, next_obs = self._last_obs, new_obs
        if normalize is not None:
            reward = normalize.get_original_reward()
        observed = normalize if self._observes_normalized else None
        if observed is not None:
            obs, next_obs = self._last_original_obs, observed.get_original_obs()
        self._last_original_obs = next_obs
        if dones.any():
            next_obs = deepcopy(next_obs)
            for env in np.flatnonzero(dones):
                final = infos[env].get("terminal_observation")
                if final is not None:
                    final = final if observed is None else observed.unnormalize_obs(final)
                    _set_row(next_obs, int(env), final)
        self._require_finite("reward", reward)
        self._require_finite("observation", next_obs)
        assert obs is not None
        self.replay_buffer.add(
            obs, next_obs, buffer_action, reward, dones, infos, behaviour=self._behaviour, states=self._states
        )
        self._last_obs = new_obs
        # A new array: one that shared the policy's memory would keep every earlier step's alive.
        self._states = np.where(dones[:, None], np.float32(0), self._states_after)
        self._episode_starts = dones

    def _require_finite(self, name: str, values: NumpyObs | None) -> None:
        """Nothing that is not finite gets into the buffer or a network; the next `learn` resets the environments."""
        for part in values.values() if isinstance(values, dict) else (values,):
            if part is not None and part.dtype.kind == "f" and not np.isfinite(part).all():
                self._last_obs = None
                env = int(np.argwhere(~np.isfinite(part))[0, 0])
                raise ValueError(
                    f"{name} must be finite, got {part[env]} from environment {env} at step {self.num_timesteps}"
                )

    def train(self, gradient_steps: int, batch_size: int) -> None:
        """
        One update on the latest rollout, then, once replay has started, Poisson(``replay_ratio``) updates on replayed
        ones.

        :param gradient_steps: not read
        :param batch_size: sequences of a replayed batch; None for one an environment
        """
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self.logger.record("train/ent_coef", self._entropy_weight())
        buffer, normalize = self.replay_buffer, self._vec_normalize_env
        if normalize is not None and not self._observes_normalized:
            normalize = copy(normalize)  # shares its statistics
            normalize.norm_obs = False
        updates = [self.update(buffer.latest(normalize))]
        self._n_replays = 0
        if buffer.size() >= self.replay_start:
            self._n_replays = int(self._rngs.schedule.poisson(self.replay_ratio))
            for _ in range(self._n_replays):
                batch = buffer.sample(batch_size or self.n_envs, normalize, self._rngs.replay)
                updates.append(self.update(self._warm_up(batch)))
        self._n_updates += len(updates)
        self._n_rollouts += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        # Without an interval, callbacks may write the log at any time.
        if self._log_interval is None or self._n_rollouts % self._log_interval == 0:
            metrics = [self.metrics(update) for update in updates]
            for name in metrics[0]:
                self.logger.record(f"train/{name}", np.mean([each[name] for each in metrics]))
            if self.full_tensorboard_log:
                self._record_distributions(updates[0])
            if self._log_interval is not None:
                self.dump_logs()

    def _warm_up(self, batch: SequenceBatch) -> SequenceBatch:
        if not self.burn_in:
            return batch
        states = self.policy.warm_up(batch.observations, batch.states, batch.ends[: self.burn_in])
        return batch.after(self.burn_in, states)

    def _record_distributions(self, update: Update) -> None:
        distributions: dict[str, Any] = {
            "rewards": update.batch.rewards,
            "advantages": update.advantage,
            "action_probabilities": update.evaluation.stats.detach(),
            "learning_rate": th.tensor(self.policy.optimizer.param_groups[0]["lr"]),
        }
        observations, space = update.batch.observations, self.observation_space
        parts: dict[str, tuple[Any, Any]] = {"observations": (observations, space)}
        if isinstance(observations, dict) and isinstance(space, spaces.Dict):
            parts = {f"observations/{key}": (rows, space[key]) for key, rows in observations.items()}
        for name, (rows, part) in parts.items():
            if is_image_space(part):
                newest = rows[0, 0] if rows.shape[2] in (1, 3) else rows[0, 0, -1:]  # of a stack
                self.logger.record(f"images/{name}", Image(newest, "CHW"), exclude=_ALL_BUT_TENSORBOARD)
            else:
                distributions[name] = rows.float()
        for name, values in distributions.items():
            self.logger.record(f"histograms/{name}", values.flatten(), exclude=_ALL_BUT_TENSORBOARD)

    def update(self, batch: SequenceBatch) -> Update:
        """
        One step of policy, critic and average policy on a batch of sequences, whoever collected it.

        :param batch: B sequences of T steps
        :return: what was computed on the way
        :raises ValueError: if a gradient is NaN or infinite; nothing has changed then
        """
        policy, family, c = self.policy, self.policy.family, self.correction_term
        ends = batch.ends

        # Evaluate: one pass of policy and critic over all rows, one of the average policy.
        evaluation = policy.evaluate(
            batch.observations,
            batch.actions,
            batch.states,
            ends,
            batch.final_observations,
            batch.final_steps,
            self.n_action_samples,
            self._rngs.candidates,
        )
        average = self.average_policy.statistics(batch.observations, batch.states, ends)

        stats, values, q_values = (
            tensor.detach() for tensor in (evaluation.stats, evaluation.values, evaluation.q_values)
        )
        actions, candidates = batch.actions, evaluation.candidates
        ratio, ratios = family.ratios(stats, batch.behaviour, actions, candidates)

        # Targets: Retrace for the critic; Q^opc for the policy where its actions are sampled.
        discounts = self.gamma * ~batch.terminated
        continues = ~ends
        traces = ratio.pow(1 / family.trace_root).clamp(max=1)
        steps = (batch.rewards, discounts, evaluation.next_values, q_values)
        q_ret = off_policy_returns(*steps, traces, continues)
        returns = q_ret if family.enumerable else off_policy_returns(*steps, th.ones_like(traces), continues)

        # Policy: the gradient of each state's gain with respect to its statistics, held to the trust region.
        advantage = returns - values
        advantages = evaluation.candidate_values.detach() - values.unsqueeze(-1)
        weight = truncated_weight(ratio, advantage, c)
        weights = correction_weights(evaluation.weights, ratios, advantages, c)
        g = family.gain_gradient(stats, actions, weight, candidates, weights)
        g = g + self._entropy_weight() * family.entropy_gradient(stats)
        k = family.kl_gradient(average, stats)
        z = trust_region(g, k, self.delta) if self.trust_region else g

        # Critic: half the squared distance of Q to Q^ret, and of a V of its own to min(1, rho) (Q^ret - Q) + V.
        q_error = self.q_coef * (q_values - q_ret)
        outputs, gradients = [evaluation.stats, evaluation.q_values], [-z, q_error]
        if not family.enumerable:
            outputs.append(evaluation.values)
            gradients.append(ratio.clamp(max=1) * q_error)

        # Step: one backward pass of the mean over the states; the average policy moves last.
        for parameter in policy.weights:
            parameter.grad = None
        th.autograd.backward(outputs, [gradient / ratio.numel() for gradient in gradients])
        update = Update(
            batch, evaluation, average, ratio, ratios, q_ret, advantage, advantages, g, k, z, self._clip_gradients()
        )
        self._require_finite_update(update)
        policy.optimizer.step()
        self._average()
        return update

    def _entropy_weight(self) -> float:
        return NamedSchedule(self.ent_coef, self.ent_schedule)(self._current_progress_remaining)

    def _clip_gradients(self) -> th.Tensor:
        """Scale all gradients together to a norm of at most ``max_grad_norm``; return their norm before."""
        gradients = [weight.grad for weight in self.policy.weights if weight.grad is not None]
        norm = th.nn.utils.get_total_norm(gradients).cpu()  # once for all that asks for it
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(self.max_grad_norm / norm)
        return norm

    def _require_finite_update(self, update: Update) -> None:
        if np.isfinite(update.grad_norm.item()):
            return
        envs = update.batch.envs
        for name in ("ratio", "q_ret", "g", "z"):
            value = getattr(update, name)
            if not value.isfinite().all():
                step, sequence = (~value.isfinite()).nonzero()[0, :2].tolist()
                raise ValueError(
                    f"{name} must be finite, got {value[step, sequence].tolist()} in update {self._n_updates} at step "
                    f"{step} of a sequence from environment {envs[sequence]}: the update was not made"
                )
        raise ValueError(
            f"the gradient must be finite, got a norm of {update.grad_norm.item()} in update {self._n_updates} on "
            f"sequences from the environments {np.unique(envs).tolist()}: the update was not made"
        )

    def _average(self) -> None:
        """theta_a <- alpha theta_a + (1 - alpha) theta; running statistics (of batch normalisation, say) are copied."""
        get_ema_multi_avg_fn(self.alpha)(  # type: ignore[no-untyped-call]
            self.average_policy.weights, self.policy.weights, None
        )
        for average, current in zip(self.average_policy.running_means, self.policy.running_means, strict=True):
            average.copy_(current)

    def metrics(self, update: Update) -> dict[str, float]:
        """
        :param update: what :meth:`update` returned
        :return: what is logged of it under ``train/``: means over its states, and shares of them
        """
        family, evaluation = self.policy.family, update.evaluation
        stats, q_values = evaluation.stats.detach(), evaluation.q_values.detach()
        log_prob = family.log_prob(stats, update.batch.actions)
        log_probs = family.log_prob(stats.unsqueeze(-2), evaluation.candidates)
        c = self.correction_term
        correction = correction_gain(log_probs, evaluation.weights, update.ratios, update.advantages, c)
        gain = truncated_gain(log_prob, update.ratio, update.advantage, c) + correction
        scale = (update.g - update.z).norm(dim=-1) / update.k.norm(dim=-1).clamp(min=th.finfo(stats.dtype).tiny)
        quantities = {
            "policy_loss": -gain,
            "q_loss": 0.5 * (update.q_ret - q_values).square(),
            "correction_loss": -correction,
            "entropy": family.entropy(stats),
            "kl": family.kl(update.average, stats),
            "ratio_mean": update.ratio,
            "ratio_truncated": update.ratio > c,
            "trust_region_active": (update.z != update.g).any(-1),
            "trust_region_scale": scale,
            "grad_norm": update.grad_norm,
        }
        explained = explained_variance(q_values.flatten().cpu().numpy(), update.q_ret.flatten().cpu().numpy())
        means = {name: quantity.float().mean().item() for name, quantity in quantities.items()}
        return {**means, "explained_variance": float(explained)}


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value >= 1)


def _set_row(observations: Any, env: int, row: Any) -> None:
    if isinstance(observations, dict):
        for key, part in observations.items():
            part[env] = row[key]
    else:
        observations[env] = row
