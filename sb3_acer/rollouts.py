"""Acting and storing: SB3's off-policy loop, with the distributions and the recurrent states that acted."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer.arguments import make_env
from sb3_acer.checks import check_boolean, require
from sb3_acer.env_state import dead_workers_named
from sb3_acer.finite import FiniteVecEnv
from sb3_acer.frames import find_frame_stack
from sb3_acer.masks import current_masks, enable_masks, following_masks
from sb3_acer.saving import SavingAlgorithm
from sb3_acer.sequences import by_key
from sb3_acer.storage import FilePath
from sb3_acer.vec_normalize import kept_if_refused


class Generators(NamedTuple):
    """The sources of training's random draws. Libraries do not draw from them, and they are saved with the model."""

    actions: np.random.Generator
    """noise of the actions in rollouts"""
    candidates: np.random.Generator
    """candidates of the bias correction, and samples of the mean advantage"""
    replay: np.random.Generator
    """which sequences are replayed"""
    n_replays: np.random.Generator
    """numbers of replayed batches, the same on all ranks"""


class FunctionCallback(ConvertCallback):
    """A function as callback. As in stable-baselines, training goes on if it returns nothing."""

    def _on_step(self) -> bool:
        goes_on: bool | None = super()._on_step()
        return goes_on is None or goes_on


class RolloutAlgorithm(SavingAlgorithm):
    """
    Fills a :class:`~sb3_acer.buffer.SequenceReplayBuffer` with rollouts of ``n_steps`` steps.

    Its state between two steps consists of SB3's, the recurrent states, and the rollout under way in the buffer.
    """

    _rngs: Generators
    _states: np.ndarray
    """recurrent states of the environments, ``[n_envs, W]``"""
    _behaviour: np.ndarray
    """statistics of the behaviour policy, ``[n_envs, P]``, at the step under way"""
    _states_after: np.ndarray
    """recurrent states after that step, ``[n_envs, W]``"""
    _finite_env: FiniteVecEnv
    """the environment that rollouts are made with"""
    _masks: np.ndarray | None = None
    """whether actions are valid in the environments' present states, ``[n_envs, P]``; None if all always are"""
    _use_masking = True
    """whether masks are used where the environment has them"""
    _continues = False
    """whether the present call of learn continues one that was interrupted"""

    def set_env(self, env: GymEnv | str, force_reset: bool = True) -> None:
        """
        :param env: the environment to learn from, or its id; for another number of environments the replay buffer is
            rearranged
        :param force_reset: whether to reset the environment before training
        :raises ValueError: if it is no environment, or has other spaces
        """
        check_boolean("force_reset", force_reset)
        env = self._wrap_env(make_env(env, self.verbose), self.verbose)
        spaces = env.observation_space, env.action_space
        own = self.observation_space, self.action_space
        require(spaces == own, "env", f"an environment of the agent's spaces, {own[0]} and {own[1]}", spaces)
        if env.num_envs != self.n_envs:
            if self.replay_buffer is not None:
                self.replay_buffer = self.replay_buffer.with_envs(env.num_envs)
            self.n_envs = env.num_envs
            force_reset = True
        super().set_env(env, force_reset)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_finite_env"]

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        assert self.env is not None
        self.policy.flat.require_unchanged(self.policy.optimizer)
        self.replay_buffer.expect_frame_stack(find_frame_stack(self.env))
        self._notice_other_resets()
        if len(self._states) != self.n_envs:  # loaded with another number of environments
            self._last_obs = None
        resets = reset_num_timesteps or self._last_obs is None
        with dead_workers_named(self.env), self._reset_next_after_an_error(), kept_if_refused(self._vec_normalize_env):
            self._finite_env = FiniteVecEnv(self.env, lambda: self.num_timesteps)
            prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
            self._finite_env.mark_resets()
            if resets:
                self._finite_env.check(self._last_obs, self.num_timesteps)
                self._finite_env.require_unchanged(self._last_obs)
                self._last_obs = deepcopy(self._last_obs)
                self.replay_buffer.end_episodes()
                self._states = self.policy.initial_states(self.n_envs)
                self._episode_starts = np.ones(self.n_envs, bool)
            elif self.replay_buffer.step:
                # Where end_episodes has truncated the episode, updates go on from the zero state, and so must acting.
                self._states[self.replay_buffer.ended] = 0
            if not (self._use_masking and enable_masks(self.env)):
                self._masks = None
            elif resets or self._masks is None or not self._continues:  # else asked before the interruption
                self._masks = current_masks(self.env, self.policy.family, self.num_timesteps)
        return prepared

    def save(self, path: FilePath, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        See :meth:`~sb3_acer.saving.SavingAlgorithm.save`. If something else has reset the environments, the first
        ``learn`` of the loaded agent resets them too.
        """
        self._notice_other_resets()
        super().save(path, exclude, include)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._vec_normalize_env is None:  # a copy of VecNormalize has no environment
            self._watch_for_other_resets()

    def _watch_for_other_resets(self) -> None:
        """If the agent goes on with episodes of its environments, notice from now on if something else resets these."""
        if self.env is not None and self._last_obs is not None:
            self._finite_env = FiniteVecEnv(self.env, lambda: self.num_timesteps)
            self._finite_env.mark_resets()

    def _notice_other_resets(self) -> None:
        """If something else has reset the environments, an evaluation say, the next `learn` resets them too."""
        last = getattr(self, "_finite_env", None)
        if last is not None and last.venv is self.env and last.was_reset_elsewhere():
            self._last_obs = None

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """The last rollout may go beyond the end of training, where a user's linear function would be negative."""
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if callback is not None and not isinstance(callback, (list, BaseCallback)):
            callback = FunctionCallback(callback)
        return super()._init_callback(callback, progress_bar)

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
        """Collect the rest of the rollout under way: a callback may have stopped the last call in its midst."""
        lacking = TrainFreq(train_freq.frequency - self.replay_buffer.step, train_freq.unit)
        with self._reset_next_after_an_error(), dead_workers_named(env):
            rollout = super().collect_rollouts(
                self._finite_env, callback, lacking, replay_buffer, action_noise, learning_starts
            )
            if not rollout.continue_training:
                # The base class does not store the step at which the callback stopped, though the environment made it.
                made = callback.locals
                self._update_info_buffer(made["infos"], made["dones"])
                observed = made["new_obs"], made["rewards"], made["dones"], made["infos"]
                self._store_transition(replay_buffer, made["buffer_actions"], *observed)
                self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
                self._episode_num += int(np.sum(made["dones"]))
        if not rollout.continue_training and self.replay_buffer.step == 0:  # the next call of learn begins another one
            callback.on_rollout_end()
            self.train(self.gradient_steps, self.batch_size)
        if rollout.continue_training and self.replay_buffer.step:  # a callback has emptied the buffer or loaded another
            rest = train_freq, self.replay_buffer, action_noise, learning_starts
            # Not self.collect_rollouts: subclasses extend it, and their part is already running for this rollout.
            return RolloutAlgorithm.collect_rollouts(self, env, callback, *rest)
        return rollout

    @contextmanager
    def _reset_next_after_an_error(self) -> Iterator[None]:
        """The environments may have made a step that is not stored. So the next `learn` resets them."""
        try:
            yield
        except BaseException:
            self._last_obs = None
            raise

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        :return: actions for the environments, and the same as the policy sampled them
        """
        self._require_same_env()
        family = self.policy.family
        assert self._last_obs is not None
        self._behaviour, self._states_after = self.policy.act(self._last_obs, self._states, self._masks)
        actions = family.act(self._behaviour, family.noise(self._rngs.actions, n_envs))
        return family.to_env(actions), actions

    def _require_same_env(self) -> None:
        """
        :raises ValueError: if a callback has set another environment, or has reset this one
        """
        if self.env is not self._finite_env.venv or self._last_obs is None or self._finite_env.was_reset_elsewhere():
            raise ValueError(
                "env must be left alone within learn, but a callback has reset it or set another one. Callbacks "
                "evaluate and record in an environment of their own. To change it, let the callback return False, call "
                "set_env, then learn with reset_num_timesteps=False"
            )

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store the step, with observations and rewards as they were before VecNormalize, and take the new observations,
        masks and recurrent states as the present ones.
        """
        self._require_same_env()
        normalize = self._vec_normalize_env
        obs, next_obs = self._last_obs, new_obs
        if normalize is not None:
            reward = normalize.get_original_reward()
            if self._finite_env.normalize_of_policy is not None:
                obs, next_obs = self._last_original_obs, normalize.get_original_obs()
        self._last_original_obs = next_obs
        if dones.any():
            next_obs = deepcopy(next_obs)
            for env, final in self._finite_env.finals.items():
                for key, rows in by_key(next_obs).items():
                    rows[env] = by_key(final)[key]
        assert obs is not None
        acted: dict[str, Any] = {"behaviour": self._behaviour, "states": self._states}
        masks_after = None
        if self._masks is not None:
            assert self.env is not None
            family, step = self.policy.family, self.num_timesteps
            masks_after = current_masks(self.env, family, step)
            acted.update(masks=self._masks, next_masks=following_masks(masks_after, dones, infos, family, step))
        self.replay_buffer.add(obs, next_obs, buffer_action, reward, dones, infos, **acted)
        self._last_obs = deepcopy(new_obs)  # environments may fill the same array again
        self._masks = masks_after
        if self.policy.state_size:
            # A new array: a view of the policy's output would keep the memory of all earlier steps alive.
            self._states = np.where(dones[:, None], np.float32(0), self._states_after)
        self._episode_starts = dones
