"""
Masks of invalid actions from environments that have sb3-contrib's method ``action_masks()``.

The mask of an episode's final observation is needed to bootstrap where the episode is truncated, but vectorised
environments reset an environment within the step that ends its episode. So the environment itself is made to add it to
the ``info`` of a step that truncates, as ``info["action_masks"]``. Other vectorised environments than SB3's may do the
same. Where it is missing, all actions of that observation count as valid.
"""

from types import MethodType
from typing import Any

import gymnasium as gym
import numpy as np
from sb3_contrib.common.maskable.utils import EXPECTED_METHOD_NAME, is_masking_supported
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_acer.checks import require
from sb3_acer.distributions import Family
from sb3_acer.env_state import call_in_envs

FINAL_MASK = "action_masks"
"""key of the ``info`` of a step that truncates an episode: the mask of the final observation"""


def enable_masks(env: VecEnv) -> bool:
    """
    Let an environment add the masks of final observations to ``info`` from now on, if it has masks.

    :param env: a vectorised environment
    :return: whether it has masks
    :raises ValueError: if its attribute ``action_masks`` is no method
    """
    is_own = isinstance(env.unwrapped, (DummyVecEnv, SubprocVecEnv))
    # Each library has its own exception for attributes that it does not know, or None for all of them.
    unknown = (NotImplementedError, AttributeError, TypeError) if is_own else Exception
    try:
        supported = is_masking_supported(env) if is_own else all(map(callable, env.get_attr(EXPECTED_METHOD_NAME)))
    except unknown:
        return False
    if supported and is_own:
        rule = "a method of the environment, or left alone by learn(use_masking=False)"
        require(all(call_in_envs(env, _keep_final_masks)), EXPECTED_METHOD_NAME, rule, "an attribute")
    return supported


def current_masks(env: VecEnv, family: Family, step: int) -> np.ndarray:
    """
    :param env: a vectorised environment with masks
    :param family: the family of its actions
    :param step: number of the present step, for messages
    :return: the masks of its present states, bool, ``[n_envs, P]``
    :raises ValueError: if masks do not fit, if a state has no valid action, and for Box
    """
    return _check(family, env.env_method(EXPECTED_METHOD_NAME), "environment", step)


def following_masks(
    masks: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], family: Family, step: int
) -> np.ndarray:
    """
    :param masks: :func:`current_masks` after a step, ``[n_envs, P]``
    :param dones: whether the step ended an episode, ``[n_envs]``
    :param infos: of the step
    :param family: the family of the actions
    :param step: number of the present step, for messages
    :return: the masks of the observations that followed the step, which are final ones where it truncated an episode
    :raises ValueError: see :func:`current_masks`
    """
    truncated = [env for env in np.flatnonzero(dones) if infos[env].get("TimeLimit.truncated", False)]
    if not truncated:
        return masks
    rows = list(masks)
    for env in truncated:
        rows[env] = np.ravel(infos[env].get(FINAL_MASK, np.ones_like(masks[env])))
    return _check(family, rows, "the final observation of environment", step)


def _check(family: Family, masks: list[Any], row_name: str, step: int) -> np.ndarray:
    """
    :param masks: one for each environment
    """
    try:
        stacked = np.stack(masks)
    except ValueError as error:
        rule = "one array for each environment, the components of its action side by side"
        raise ValueError(f"action_masks must be {rule}, got {masks} at step {step}") from error
    try:
        return family.check_masks(stacked, len(masks), row_name)
    except ValueError as error:
        raise ValueError(f"{error} at step {step}") from error


def _keep_final_masks(env: gym.Env[Any, Any]) -> bool:
    """Make an environment add the masks of final observations to ``info``. False if it has no method for them."""
    if not callable(env.get_wrapper_attr(EXPECTED_METHOD_NAME)):
        return False
    if getattr(env.step, "__func__", None) is type(env).step:  # unless a program has replaced it
        vars(env)["step"] = MethodType(step, env)
    return True


def step(env: gym.Env[Any, Any], action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """An environment's own step, with the mask of a final observation. Named so since pickle finds it by name."""
    observation, reward, terminated, truncated, info = type(env).step(env, action)
    if truncated and not terminated:
        # A copy, since the environment may fill the same array again when it is reset.
        info[FINAL_MASK] = np.array(env.get_wrapper_attr(EXPECTED_METHOD_NAME)())
    return observation, reward, terminated, truncated, info
