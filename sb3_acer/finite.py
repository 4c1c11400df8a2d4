"""
Observations and rewards are checked before callbacks and training see them. VecNormalize sees them first; its
statistics are restored if they are refused.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_acer.checks import LARGEST, require
from sb3_acer.env_state import forked_workers, wait_for_workers
from sb3_acer.sequences import by_key, n_categories, spaces_by_key
from sb3_acer.vec_normalize import kept_if_refused, normalize_of_policy, recording_finals

_WIDENED = frozenset(np.dtype(name) for name in ("float16", "int64", "uint64"))
"""checked as float64: float16, in which ``LARGEST`` is infinite, and the integers that can exceed it"""


class FiniteVecEnv(VecEnvWrapper):
    """
    The environment as rollouts see it: the user's, VecNormalize included. A step is refused if it has values that are
    NaN, infinite or far too large, categories that the observation space does not have, rewards that a wrapper around
    VecNormalize has changed, or truncated episodes without their final observation. VecNormalize's statistics are then
    restored. Final observations are kept as they were before VecNormalize. Resets by something else are noticed.

    :param venv: the environment
    :param count_steps: returns the number of steps taken before, of all environments together
    """

    def __init__(self, venv: VecEnv, count_steps: Callable[[], int]) -> None:
        super().__init__(venv)
        self._count_steps = count_steps
        self._normalize = unwrap_vec_normalize(venv)
        self.normalize_of_policy = normalize_of_policy(venv)
        self._n_categories = n_categories(venv.observation_space)
        # What is not stored raw has to fit the space's dtype.
        parts = {} if self.normalize_of_policy else spaces_by_key(venv.observation_space)
        self._integers = {key: part.dtype for key, part in parts.items() if np.issubdtype(part.dtype, np.integer)}
        self._raw = venv if self.normalize_of_policy is None else self.normalize_of_policy.venv
        self.finals: dict[int, Any] = {}  # of the last step, by environment, before VecNormalize
        self._forked = forked_workers(venv)
        self._resets: list[Any] = []  # what the environments said at their last reset

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        with kept_if_refused(self._normalize):
            wait_for_workers(self._forked)
            with recording_finals(self._raw) as self.finals:
                observations, rewards, dones, infos = self.venv.step_wait()
            self.mark_resets()
            step = self._count_steps() + self.num_envs
            self.check(observations, step)
            # First what VecNormalize got: its own rewards are NaN for all environments if one of them is.
            for values in (*([] if self._normalize is None else [self._normalize.old_reward]), rewards):
                _require_finite("reward", np.asarray(values, np.float64), step)
            self._require_raw_rewards(rewards)
            for env, final in self.finals.items():
                _require_finite("observation", final, step, env)
                self._require_categories(final, step, env)
            for env in np.flatnonzero(dones).tolist():
                has_final = env in self.finals or not infos[env].get("TimeLimit.truncated", False)
                where = f"where an episode is truncated, as of environment {env} at step {step}"
                require(has_final, "info", f"one with terminal_observation {where}", infos[env])
        return observations, rewards, dones, infos

    def mark_resets(self) -> None:
        """
        Replace the infos of the last reset by copies of our own, since an environment may return the same dict at each
        reset. If a copy is no longer in its place, something else has reset the environment.
        """
        found = self._reset_infos()
        if found and (not self._resets or any(map(operator.is_not, self._resets, found))):
            self._resets = [dict(info) if isinstance(info, dict) else info for info in found]
            self.venv.unwrapped.reset_infos = list(self._resets)

    def was_reset_elsewhere(self) -> bool:
        """
        Whether something else has reset the vectorised environment since the last step. Resets of an environment in it
        through another wrapper are not seen.
        """
        return any(map(operator.is_not, self._resets, self._reset_infos()))

    def _reset_infos(self) -> Sequence[Any]:
        return getattr(self.venv.unwrapped, "reset_infos", [])  # environments of other libraries have none

    def check(self, observations: Any, step: int) -> None:
        """
        :param observations: what the environment returned last
        :param step: the step it is of, for the message
        :raises ValueError: if they, or those that VecNormalize got, are not finite or too large, if they have a
            category that the observation space does not have, or fractions where it has integers
        """
        if self._normalize is not None:
            _require_finite("observation", self._normalize.old_obs, step)
        _require_finite("observation", observations, step)
        self._require_categories(observations, step)
        for key, dtype in self._integers.items():
            part = np.asarray(by_key(observations)[key])
            if part.dtype.kind == "f" and (wrong := part != part.astype(dtype)).any():
                rule = f"{dtype}, as in its space, to be stored (wrappers that change it belong inside VecNormalize)"
                _refuse("observation", key, rule, part, wrong, step)

    def _require_categories(self, observations: Any, step: int, env: int | None = None) -> None:
        for key, most in self._n_categories.items():
            part = np.asarray(by_key(observations)[key])
            wrong = ~((part >= 0) & (part < most))
            if wrong.any():
                rule = f"of {spaces_by_key(self.observation_space)[key]}"
                _refuse("observation", key, rule, part, wrong, step, env)

    def _require_raw_rewards(self, rewards: np.ndarray) -> None:
        """
        :param rewards: what a step returned
        :raises ValueError: if a wrapper around VecNormalize has changed them, since what VecNormalize got is stored
        """
        normalize = self._normalize
        if normalize is not None and normalize is not self.venv:
            same = np.allclose(rewards, normalize.normalize_reward(normalize.old_reward))
            require(same, "env", "an environment whose wrappers that change rewards are inside VecNormalize", self.venv)

    def require_unchanged(self, observations: Any) -> None:
        """
        :param observations: what a reset returned
        :raises ValueError: if a wrapper around VecNormalize has changed them, since updates normalise what VecNormalize
            received
        """
        normalize = self.normalize_of_policy
        if normalize is not None:
            made = by_key(normalize.normalize_obs(normalize.get_original_obs()))
            same = all(np.allclose(part, made[key]) for key, part in by_key(observations).items())
            rule = "an environment whose wrappers that change observations are inside VecNormalize"
            require(same, "env", rule, self.venv)


def _require_finite(name: str, values: Any, step: int, env: int | None = None) -> None:
    """
    :param values: ``[n_envs, ...]``, or the values of environment ``env`` alone; or a dict of such by keys
    """
    for key, part in by_key(values).items():
        part = np.asarray(part)
        if part.dtype in _WIDENED:
            part = part.astype(np.float64)
        # A small sum of squares means that every value is small: a fifth of the time of abs().max(). NaN is never <=.
        if part.dtype.kind != "f" or np.vdot(part, part) <= LARGEST or np.abs(part).max() <= LARGEST:
            continue
        if not (is_finite := np.isfinite(part)).all():
            _refuse(name, key, "finite", part, ~is_finite, step, env)
        rule = f"at most {LARGEST:g} in absolute value, since training squares it in float32"
        _refuse(name, key, rule, part, np.abs(part) > LARGEST, step, env)


def _refuse(
    name: str, key: str, rule: str, part: np.ndarray, wrong: np.ndarray, step: int, env: int | None = None
) -> NoReturn:
    """
    :param part: ``[n_envs, ...]``, or the values of environment ``env`` alone
    :param wrong: which of them break the rule
    :raises ValueError: always, about the first environment of which values break it
    """
    if env is None:
        env = int(np.argwhere(wrong)[0, 0])
        part = part[env]
    kind = f"{name} {key!r}" if key else name
    raise ValueError(f"{kind} must be {rule}, got {part} from environment {env} at step {step}")
