"""
The algorithm: when to act, to store, to update. :mod:`sb3_acer.update` says what an update computes.

ACER's base classes, each derived from the one before, are in :mod:`sb3_acer.saving` (files),
:mod:`sb3_acer.rollouts` (acting and storing), :mod:`sb3_acer.data_parallel` (several processes),
:mod:`sb3_acer.resuming` (checkpoints) and :mod:`sb3_acer.sb2_compat.interface` (stable-baselines' methods).
"""

import math
import secrets
from collections.abc import Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule, TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_acer import distributed
from sb3_acer.arguments import (
    ATTRIBUTES,
    RULES,
    check_callback,
    check_policy_kwargs,
    explain_other_names,
    make_env,
    policy_errors,
    set_num_threads,
    warn_of_unused_methods,
)
from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.checks import (
    check_boolean,
    check_device,
    check_integer,
    check_kwargs,
    check_number,
    check_seed,
    check_verbose,
    check_whole,
    require,
    warn,
)
from sb3_acer.data_parallel import generators_of_rank
from sb3_acer.distributions import make_family
from sb3_acer.policies import (
    ACERPolicy,
    CnnLnLstmPolicy,
    CnnLstmPolicy,
    CnnPolicy,
    MlpGruPolicy,
    MlpLnLstmPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)
from sb3_acer.rollouts import Generators
from sb3_acer.sb2_compat.interface import StableBaselinesInterface
from sb3_acer.schedules import SCHEDULES, NamedSchedule, make_schedule, number_or_function
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Settings, Update, compute_update, metrics
from sb3_acer.vec_normalize import normalize_of_policy

SelfACER = TypeVar("SelfACER", bound="ACER")

_SMALL = 100_000
"""parameters; smaller networks are updated faster on a CPU than on a GPU"""


class _EveryWriter(tuple[str, ...]):
    """All output formats of a logger, those of a program's own too."""

    def __contains__(self, name: object) -> bool:
        return True


_WRITERS = _EveryWriter(("stdout", "log", "json", "csv", "tensorboard"))
"""A value that is excluded from all of them is kept for callbacks and never written."""


class ACER(StableBaselinesInterface):
    """
    Actor-Critic with Experience Replay (https://arxiv.org/abs/1611.01224): Retrace targets, truncated importance
    sampling with bias correction, and a trust region around an average policy.

    The arguments up to ``n_cpu_tf_sess`` are those of stable-baselines' ACER, in its order and with its defaults,
    except that ``n_cpu_tf_sess`` was 1.

    :param policy: policy class, or one of the names ``MlpPolicy``, ``CnnPolicy``, ``MultiInputPolicy``; with an LSTM
        ``MlpLstmPolicy``, ``CnnLstmPolicy``, ``MultiInputLstmPolicy``; with a layer-normalised LSTM
        ``MlpLnLstmPolicy``, ``CnnLnLstmPolicy``; with a GRU ``MlpGruPolicy``
    :param env: environment, or the id of a registered one; None only with ``_init_setup_model=False``
    :param gamma: discount factor, in [0, 1]
    :param n_steps: steps of a rollout of each environment, and of a replayed sequence; at least 1
    :param num_procs: deprecated: number of threads of torch
    :param q_coef: weight of the critic's loss, at least 0
    :param ent_coef: weight of the entropy bonus, at least 0
    :param max_grad_norm: bound on the norm of all gradients together, above 0; None for no bound
    :param learning_rate: initial learning rate, at least 0, or a schedule as a function of the remaining progress (from
        1 to 0); SB3's ``ConstantSchedule``, which rl-zoo makes of a number, counts as the number
    :param lr_schedule: schedule of a learning rate that is a number: ``linear``, ``constant``, ``double_linear_con``,
        ``middle_drop`` or ``double_middle_drop``
    :param rprop_alpha: decay of RMSProp, the default optimiser of feed-forward policies, in [0, 1]. Like
        ``rprop_epsilon`` it is given to the optimiser when that is made: assigning it later changes nothing.
    :param rprop_epsilon: epsilon of RMSProp, inside the root; above 0
    :param buffer_size: steps of the vectorised environment to keep, at least 1: that is ``buffer_size * n_envs``
        transitions
    :param replay_ratio: mean number of replayed batches after each rollout (Poisson distributed), at least 0
    :param replay_start: steps of the vectorised environment in the buffer before replay starts, at least 0
    :param correction_term: truncation constant c of the importance ratios, at least 0; the paper has 5 for continuous
        actions
    :param trust_region: whether gradients are projected onto the trust region
    :param alpha: decay of the average policy, in [0, 1]
    :param delta: bound on the linearised change of the divergence from the average policy, at least 0
    :param verbose: 0 for no output, 1 for info messages, 2 for debug messages
    :param tensorboard_log: folder for tensorboard; None for no logging
    :param _init_setup_model: whether to build the networks on creation
    :param policy_kwargs: keyword arguments of the policy
    :param full_tensorboard_log: log to tensorboard histograms of rewards, advantages, action probabilities (of
        continuous actions means and standard deviations), learning rate and observations; images as such
    :param seed: seed of all random draws; None for one that numpy's global generator draws
    :param n_cpu_tf_sess: deprecated: number of threads of torch
    :param batch_size: sequences of a replayed batch, at least 1; None: one per environment
    :param n_action_samples: K, at least 1, where actions cannot be enumerated: K sampled candidates for the bias
        correction in each state, and K more samples for the mean advantage of the dueling network
    :param ent_schedule: schedule of ``ent_coef``, with the names of ``lr_schedule``
    :param burn_in: first steps of a replayed sequence that only update the recurrent state, less than ``n_steps``; 0
        for feed-forward policies
    :param replay_buffer_class: a subclass of :class:`~sb3_acer.buffer.SequenceReplayBuffer`
    :param replay_buffer_kwargs: its keyword arguments
    :param stats_window_size: number of episodes that the logged means are taken over
    :param device: device of the networks and of batches; "auto": a GPU if there is one. Without one "cuda" means the
        CPU, as in SB3.
    :raises ValueError: for an argument outside its range, and for an observation or action space that is not supported
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        policy.__name__: policy
        for policy in (
            MlpPolicy,
            CnnPolicy,
            MultiInputPolicy,
            MlpLstmPolicy,
            CnnLstmPolicy,
            MultiInputLstmPolicy,
            MlpLnLstmPolicy,
            CnnLnLstmPolicy,
            MlpGruPolicy,
        )
    }
    policy: ACERPolicy
    policy_class: type[ACERPolicy]
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer

    @explain_other_names
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
        # First what the base class uses.
        policy_class = self._check_policy(policy)
        device = check_device("device", device)
        policy_kwargs = _copied(check_kwargs("policy_kwargs", policy_kwargs))
        verbose = check_verbose("verbose", verbose)
        super().__init__(
            policy_class,
            cast(GymEnv, None),  # set below: the base class asserts what raises a ValueError here
            learning_rate,
            buffer_size=buffer_size,
            learning_starts=0,
            batch_size=cast(int, batch_size),
            gamma=gamma,
            train_freq=(n_steps, "step"),
            replay_buffer_class=cast(type[ReplayBuffer], replay_buffer_class),
            replay_buffer_kwargs=check_kwargs("replay_buffer_kwargs", replay_buffer_kwargs),
            policy_kwargs=policy_kwargs,
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
        self._states = np.zeros((0, 0), np.float32)  # recurrent states of the environments, [n_envs, W]
        self._rngs = cast(Generators, None)  # set by set_random_seed
        self._n_replays = 0  # replayed batches after the last rollout
        self._run = secrets.token_hex(8)
        self._log_interval: int | None = None
        self._early_logs: tuple[int, ...] = ()
        self._check_arguments()
        set_num_threads(num_procs, n_cpu_tf_sess)
        has_env = env is not None or not _init_setup_model
        require(has_env, "env", "an environment; None is for _init_setup_model=False, as load builds an agent", env)
        if env is not None:
            self._take_env(self._wrap_env(make_env(env, verbose), verbose))
        if _init_setup_model:
            self._setup_model()

    def _check_policy(self, policy: Any) -> type[ACERPolicy]:
        if isinstance(policy, str) and policy in self.policy_aliases:
            return cast(type[ACERPolicy], self.policy_aliases[policy])
        is_policy = isinstance(policy, type) and issubclass(policy, ACERPolicy)
        names = ", ".join(self.policy_aliases)
        rule = f"one of {names}, or a subclass of ACERPolicy (policies of other algorithms do not work)"
        require(is_policy, "policy", rule, policy)
        warn_of_unused_methods(policy)
        return cast(type[ACERPolicy], policy)

    def _check_arguments(self) -> None:
        for name, check in RULES.items():
            attribute = ATTRIBUTES.get(name, name)
            setattr(self, attribute, check(name, getattr(self, attribute)))
        make_schedule(self.learning_rate, self.lr_schedule_name)
        check_policy_kwargs(self.policy_kwargs, self.policy_class)
        of_buffer = ("buffer_size", "observation_space", "action_space", "device", "n_envs", "n_steps")
        kwargs = check_kwargs("replay_buffer_kwargs", self.replay_buffer_kwargs, self.replay_buffer_class, of_buffer)
        self.replay_buffer_kwargs = kwargs

    def _check_burn_in(self) -> None:
        require(self.burn_in < self.n_steps, "burn_in", f"less than n_steps={self.n_steps}", self.burn_in)
        require(not self.burn_in or self.policy.state_size > 0, "burn_in", "0 for a feed-forward policy", self.burn_in)

    def _take_env(self, env: VecEnv) -> None:
        make_family(env.action_space)  # raises a ValueError for spaces that are not supported
        self.env = env
        self.n_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._vec_normalize_env = unwrap_vec_normalize(env)

    @th.inference_mode(False)
    def _setup_model(self) -> None:
        self._check_arguments()  # again: `load` has replaced some
        self.lr_schedule = self._own_schedule = make_schedule(self.learning_rate, self.lr_schedule_name)
        self._check_learning_rate(1.0)
        loaded_rngs = self._rngs
        self.set_random_seed(self.seed)
        self._rngs = loaded_rngs or self._rngs
        self._watch_for_other_resets()  # if it is loaded without force_reset
        self.policy = self._make_policy().to(self.device)
        self._check_burn_in()
        try:
            self.average_policy = deepcopy(self.policy)
        except RuntimeError as error:  # of torch.nn.utils.weight_norm, say
            rule = "made of modules that deepcopy copies, such as torch.nn.utils.parametrizations of linear layers"
            raise ValueError(f"policy must be {rule}, got {type(self.policy).__name__}: {error}") from error
        self.average_policy.flat.without_gradients()
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
        else:  # saved with the agent
            of_buffer = self.replay_buffer.n_steps
            require(of_buffer == self.n_steps, "n_steps", f"{of_buffer}, as in the saved replay buffer", self.n_steps)
            self.replay_buffer.device = self.device
            if self.replay_buffer.n_envs != self.n_envs:
                self.replay_buffer = self.replay_buffer.with_envs(self.n_envs)

    def _take_lr_schedule(self) -> None:
        """
        Use what a program has assigned to ``lr_schedule``: a name like the argument of that name, a function as it is.
        If nothing was assigned, make the schedule anew, since ``learning_rate`` may have changed.
        """
        if isinstance(self.lr_schedule, str):
            self.lr_schedule_name, self.lr_schedule = self.lr_schedule, self._own_schedule
        if self.lr_schedule is self._own_schedule:
            self.lr_schedule = self._own_schedule = make_schedule(self.learning_rate, self.lr_schedule_name)
        rule = f"one of {', '.join(SCHEDULES)}, or a function of the remaining progress"
        require(callable(self.lr_schedule), "lr_schedule", rule, self.lr_schedule)

    def _check_learning_rate(self, progress_remaining: float) -> None:
        try:
            value = self.lr_schedule(progress_remaining)
        except Exception as error:  # whatever the function raises
            rule = "a number, or a function that maps the remaining progress to one"
            raise ValueError(f"learning_rate must be {rule}, got {self.learning_rate!r}: {error}") from error
        check_number(f"learning_rate at a remaining progress of {progress_remaining:g}", value, 0, 10)

    def _make_policy(self) -> ACERPolicy:
        policy_kwargs = _copied(self.policy_kwargs)
        with policy_errors(self.policy_class, policy_kwargs, self.observation_space):
            policy = self.policy_class(self.observation_space, self.action_space, self.lr_schedule, **policy_kwargs)
        if isinstance(policy.optimizer, RMSpropTFLike):  # not before: the policy's class may choose another one
            options = {"alpha": self.rprop_alpha, "eps": self.rprop_epsilon, **policy.optimizer_kwargs}
            policy.optimizer_kwargs = options
            for group in policy.optimizer.param_groups:
                group.update(options)
        return policy

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed all random draws: those of the libraries and the environments, as SB3 does, and those of training. Each
        rank of a group has seeds of its own, derived from the one that all are given; environments have those that
        they would have in one process.

        :param seed: None for a seed of training that numpy's global generator draws; nothing else is seeded then
        :raises ValueError: if it is no integer in [0, 2^32 - 1]
        """
        seed = check_seed("seed", seed)
        super().set_random_seed(None if seed is None else (seed + distributed.rank() * self.n_envs) % 2**32)
        self._rngs = generators_of_rank(seed)

    def learn(
        self: SelfACER,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | str | None = "auto",
        tb_log_name: str = "ACER",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        use_masking: bool = True,
        checkpoint: str | Path | None = None,
        checkpoint_freq: int | None = None,
        checkpoint_keep: int | None = None,
    ) -> SelfACER:
        """
        Train.

        With ``checkpoint``, all of training is saved from time to time and at the end, see :meth:`save_checkpoint`. If
        the folder has a checkpoint already, this call continues it: a program that was interrupted is started again as
        it was, and ends as if it had never been interrupted. The same call after :meth:`load_checkpoint` does the same.

        Times and rates in the log leave out the interruption. Two things do not continue: a progress bar starts at the
        present step, and Monitor's files begin again unless ``override_existing`` is False. Continuing replaces
        ``policy``, ``average_policy`` and ``replay_buffer``: take them from the agent after this call.

        :param total_timesteps: number of steps of single environments
        :param callback: called after each step of the vectorised environment; one that returns False ends training
        :param log_interval: rollouts (on-policy updates) between two logs; there is another one at the end. ``"auto"``:
            a twentieth of the run's rollouts, but at most 100 as in stable-baselines, with further logs after the first
            and the tenth rollout. None: no log is written, but its values are recorded after each rollout for callbacks
            that write one. Computing them takes up to a third of the training time of small networks.
        :param tb_log_name: name of the run in tensorboard's log
        :param reset_num_timesteps: False to continue the count of steps and the episodes under way
        :param progress_bar: show a progress bar
        :param use_masking: whether to use masks of invalid actions if the environment has sb3-contrib's method
            ``action_masks()``, see :mod:`sb3_acer.masks`. Other environments are trained without masks in either case.
        :param checkpoint: folder of checkpoints; each call of ``learn`` needs a folder of its own
        :param checkpoint_freq: steps of single environments between two checkpoints, 100,000 unless it is given
        :param checkpoint_keep: how many of the newest checkpoints are kept; None: the number that the last one was
            written with, 2 for the first one
        :raises ValueError: for an argument outside its range; if a callback calls it within a rollout of the same
            agent; if a wrapper around VecNormalize changes the observations of a reset but not their space; if masks
            leave no valid action in a state, or are for Box actions; if an observation or a reward is NaN, infinite or
            beyond 1e15; if a Discrete or MultiDiscrete observation is outside its space; and if a gradient is NaN or
            infinite. If an observation or a reward is refused, agent, replay buffer and VecNormalize are as before that
            step; if a gradient is refused, the parameters are as before that update. The agent can be saved in both
            cases.
        :return: the agent
        """
        self._require_ready("learn")
        self._require_no_rollout()
        self._take_lr_schedule()
        self._check_arguments()  # again: attributes may have changed
        self._check_burn_in()
        n_steps = self.replay_buffer.n_steps
        require(self.n_steps == n_steps, "n_steps", f"{n_steps}, as when the agent was made", self.n_steps)
        train_freq = cast(Any, self.train_freq)
        rule = f"left alone, since rollouts have n_steps={n_steps} steps"
        require(train_freq == TrainFreq(n_steps, TrainFrequencyUnit.STEP), "train_freq", rule, train_freq)
        total_timesteps = check_whole("total_timesteps", total_timesteps)
        check_callback("callback", callback)
        self._set_log_interval(log_interval, total_timesteps)
        require(isinstance(tb_log_name, str), "tb_log_name", "a string", tb_log_name)
        check_boolean("reset_num_timesteps", reset_num_timesteps)
        check_boolean("progress_bar", progress_bar)
        for name, value in (("checkpoint_freq", checkpoint_freq), ("checkpoint_keep", checkpoint_keep)):
            if checkpoint is None and value is not None:
                warn(f"{name} has no effect without checkpoint, the folder to save to")
        checkpoint_freq = check_whole("checkpoint_freq", 100_000 if checkpoint_freq is None else checkpoint_freq, 1)
        checkpoint_keep = None if checkpoint_keep is None else check_integer("checkpoint_keep", checkpoint_keep)
        for hint in self._hints(total_timesteps, reset_num_timesteps):
            warn(hint)
        self._use_masking = check_boolean("use_masking", use_masking)
        checkpointed = self._checkpointed(
            total_timesteps, reset_num_timesteps, checkpoint, checkpoint_freq, checkpoint_keep
        )
        # The caller may have switched gradients off.
        with th.inference_mode(False), th.enable_grad(), checkpointed:
            super().learn(
                total_timesteps,
                callback,
                self._log_interval,  # type: ignore[arg-type]
                tb_log_name,
                reset_num_timesteps,
                progress_bar,
            )
        if self._log_interval is not None and self._logged_at != self.num_timesteps:  # a callback has stopped training
            self.dump_logs()
        return self

    def _hints(self, total_timesteps: int, reset_num_timesteps: bool) -> Iterator[str]:
        """Warnings of what is probably not meant in a call of :meth:`learn`."""
        capacity = self.replay_buffer.n_slots * self.n_steps
        if self.replay_ratio > 0 and self.replay_start > capacity:
            yield (
                f"replay will never start: replay_start={self.replay_start} is more than the {capacity} steps that a "
                f"buffer of buffer_size={self.replay_buffer.buffer_size} holds in rollouts of n_steps={self.n_steps}"
            )
        name, is_own = self.lr_schedule_name, self.lr_schedule is self._own_schedule
        is_scheduled = is_own and name != "constant" and not callable(number_or_function(self.learning_rate))
        before = 0 if reset_num_timesteps or self._resumed is not None else self.num_timesteps
        rollout_steps = (self.n_steps - self.replay_buffer.step) * self.n_envs * distributed.world_size()
        is_one_rollout = self._resumed is None and 0 < total_timesteps <= rollout_steps
        if is_scheduled and is_one_rollout and self.lr_schedule(1) and not self.lr_schedule(0):
            yield (
                f"this call learns nothing: {total_timesteps} steps are not more than one rollout of {rollout_steps}, "
                f"at whose end lr_schedule={name!r} is 0. Use lr_schedule='constant' for such calls"
            )
        elif is_scheduled and 0 < 2 * total_timesteps <= before:  # at least two thirds of the schedule are used up
            rate = self.lr_schedule(total_timesteps / (before + total_timesteps))
            yield (
                f"the learning rate begins at {rate:.2g}: lr_schedule={name!r} counts the steps of all calls of learn. "
                "Use lr_schedule='constant' for many calls, reset_num_timesteps=True to begin anew"
            )
        n_parameters = sum(vector.numel() for vector in self.policy.flat.vectors)
        if self.device.type == "cuda" and n_parameters < _SMALL:
            yield (
                f"networks of {n_parameters:,} parameters are trained faster on the CPU: device='cpu'. A GPU pays "
                "for networks for images, and for layers of about 1,000 units"
            )
        if distributed.is_outside_group():
            yield (
                "torchrun has started several processes, and each trains an agent of its own. To train one together, "
                "make and train it within sb3_acer.distributed.torchrun_group()"
            )

    def _set_log_interval(self, log_interval: Any, total_timesteps: int) -> None:
        self._logged_at, self._early_logs = -1, ()
        if isinstance(log_interval, str) and log_interval == "auto":
            n_rollouts = total_timesteps // (self.n_steps * self.n_envs * distributed.world_size())
            log_interval, self._early_logs = min(max(n_rollouts // 20, 1), 100), (1, 10)
        require(not isinstance(log_interval, str), "log_interval", "an integer, 'auto', or None", log_interval)
        self._log_interval = None if log_interval is None else check_integer("log_interval", log_interval)

    def dump_logs(self) -> None:
        """Write the log. The values of ``train/`` stay for callbacks to read, as those of SB3's algorithms do."""
        self._logged_at = self.num_timesteps
        recorded = dict(self.logger.name_to_value)
        super().dump_logs()
        for name, value in recorded.items():
            if name.startswith("train/"):
                self.logger.record(name, value, _WRITERS)  # an evaluation must not write it a second time

    def _logs_now(self) -> bool:
        """
        Whether to record this rollout's metrics. If ``log_interval`` is None, after every rollout, since callbacks may
        write the log.
        """
        if self._log_interval is None or self.num_timesteps >= self._total_timesteps:
            return True
        return self._n_rollouts % self._log_interval == 0 or self._n_rollouts in self._early_logs

    @th.inference_mode(False)
    @th.enable_grad()  # a callback, or the caller, may have switched gradients off
    def train(self, gradient_steps: int, batch_size: int | None = None) -> None:
        """
        One update on the latest rollout, then, once replay has started, Poisson(``replay_ratio``) updates on replayed
        ones, ``gradient_steps`` times.

        :param gradient_steps: 1 in ``learn``; more to train on stored data, such as a buffer that was loaded. The
            learning rate is that with which the last call of ``learn`` ended: with a linear schedule it is 0.
        :param batch_size: sequences of a replayed batch; None: one per environment
        :raises ValueError: if an argument is no integer of at least 1, if the buffer is empty, and for gradients that
            are not finite
        """
        gradient_steps = check_integer("gradient_steps", gradient_steps)
        if not hasattr(self, "_logger"):  # before the first call of learn, which makes another one
            self._logger = configure(None, [""])
        self.policy.flat.require_frozen()
        self.policy.set_training_mode(True)
        self._take_lr_schedule()
        self._check_learning_rate(self._current_progress_remaining)
        self._update_learning_rate(self.policy.optimizer)
        self.logger.record("train/ent_coef", self._entropy_weight())
        normalize = self._vec_normalize_env
        if normalize is not None and normalize_of_policy(self.env) is None:
            normalize = copy(normalize)  # with the same statistics
            normalize.norm_obs = False  # wrappers around it changed the observations, which are stored normalised
        self._n_rollouts += 1
        logs_now = self._logs_now()
        logged: list[dict[str, float]] = []
        batch_size = self.n_envs if batch_size is None else batch_size
        for batch in self._batches(gradient_steps, batch_size, normalize):
            update = self.update(batch)
            self._n_updates += 1
            if logs_now:
                if self.full_tensorboard_log and not logged:
                    self.record_distributions(update)
                logged.append(metrics(self.policy.family, update, self.correction_term))
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if logs_now:
            logged = [row for rows in distributed.gather(logged) for row in rows]
            for name in logged[0]:
                values = [each[name] for each in logged if not math.isnan(each[name])]
                self.logger.record(f"train/{name}", np.mean(values) if values else math.nan)
            if self._log_interval is not None:
                self.dump_logs()

    def _batches(self, gradient_steps: int, batch_size: int, normalize: VecNormalize | None) -> Iterator[SequenceBatch]:
        """The batches of a call of :meth:`train`. Each is made after the update before it."""
        buffer = self.replay_buffer
        for _ in range(gradient_steps):
            yield buffer.latest(normalize)
            self._n_replays = 0
            if buffer.size() >= self.replay_start:
                self._n_replays = int(self._rngs.n_replays.poisson(self.replay_ratio))
            for _ in range(self._n_replays):
                yield self._after_burn_in(buffer.sample(batch_size, normalize, self._rngs.replay))

    def _after_burn_in(self, batch: SequenceBatch) -> SequenceBatch:
        if not self.burn_in:
            return batch
        return batch.after(self.burn_in, self.policy.states_after(batch, self.burn_in))

    @th.enable_grad()
    def update(self, batch: SequenceBatch) -> Update:
        """
        One step of policy, critic and average policy.

        :param batch: B sequences of T steps, on-policy or replayed; in a group, this rank's part of the whole batch
        :return: what was computed on the way
        :raises ValueError: if a gradient is NaN or infinite; no parameter has changed then, but running means of batch
            normalisation and the generator of the candidates have
        """
        policy = self.policy
        if not policy.training:  # after predict
            policy.set_training_mode(True)
        update = compute_update(policy, self.average_policy, batch, self.settings(), self._rngs.candidates)
        policy.flat.zero_grad()
        update.evaluation.backward(*update.gradients)
        distributed.all_reduce_mean(policy.flat.gradients())
        update = update._replace(grad_norm=policy.flat.clip_grad_norm(self.max_grad_norm))
        self._require_finite_update(update)
        policy.optimizer.step()
        distributed.all_reduce_mean([buffer for buffer in policy.flat.buffers() if buffer.is_floating_point()])
        self.average_policy.flat.polyak_update(policy.flat, self.alpha)
        return update

    def settings(self) -> Settings:
        """
        :return: the settings of an update at the present progress of training
        """
        delta = self.delta if self.trust_region else None
        ent_coef = self._entropy_weight()
        return Settings(self.gamma, self.q_coef, ent_coef, self.correction_term, delta, self.n_action_samples)

    def _entropy_weight(self) -> float:
        return NamedSchedule(self.ent_coef, self.ent_schedule)(self._current_progress_remaining)

    def _require_finite_update(self, update: Update) -> None:
        if math.isfinite(update.grad_norm):
            return
        found = distributed.gather(self._find_not_finite(update))
        if not any(found):
            raise ValueError(
                f"the gradient must be finite, got a norm of {update.grad_norm} in update {self._n_updates} on "
                f"sequences from the environments {np.unique(update.batch.envs).tolist()}: the update was not made"
            )
        of_ranks = [f"on rank {rank} " * (len(found) > 1) + text for rank, text in enumerate(found) if text]
        raise ValueError(f"{'; '.join(of_ranks)}: the update was not made")

    def _find_not_finite(self, update: Update) -> str:
        """What is NaN or infinite in this rank's sequences, and where first; empty if nothing is."""
        for name in ("ratio", "q_ret", "g", "z"):
            value = getattr(update, name)
            if not value.isfinite().all():
                step, sequence = (~value.isfinite()).nonzero()[0, :2].tolist()
                return (
                    f"{name} must be finite, got {value[step, sequence].tolist()} in update {self._n_updates} at step "
                    f"{step} of a sequence from environment {update.batch.envs[sequence]}"
                )
        return ""


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy with its dicts and lists copied, and the same modules in them."""
    return {key: copy(value) if isinstance(value, (dict, list)) else value for key, value in kwargs.items()}
