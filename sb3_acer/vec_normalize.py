"""SB3's VecNormalize, as agents see it: whether it makes their observations, and what it was given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from sb3_acer.sequences import by_key


def normalize_of_policy(env: VecEnv | None) -> VecNormalize | None:
    """
    :param env: an agent's environment
    :return: its VecNormalize if the policy gets the observations that this one makes. None if there is none, and if
        wrappers around it change the observations' space, as VecTransposeImage and VecFrameStack do
    """
    normalize = None if env is None else unwrap_vec_normalize(env)
    if env is None or normalize is None or normalize.observation_space != env.observation_space:
        return None
    return normalize


@contextmanager
def recording_finals(env: VecEnv) -> Iterator[dict[int, Any]]:
    """
    Record final observations as ``env`` returns them. A VecNormalize around it replaces them by normalised ones, which
    are clipped and rounded.

    :param env: whose ``step_wait`` is called once in the block
    :return: the final observations by environment, once the step has been made
    """
    finals: dict[int, Any] = {}
    attributes, step_wait = vars(env), env.step_wait
    assigned = attributes.get("step_wait")  # by a program

    def recorded() -> VecEnvStepReturn:
        observations, rewards, dones, infos = step_wait()
        found = {index: infos[index].get("terminal_observation") for index in np.flatnonzero(dones).tolist()}
        finals.update({index: final for index, final in found.items() if final is not None})
        return observations, rewards, dones, infos

    attributes["step_wait"] = recorded
    try:
        yield finals
    finally:
        del attributes["step_wait"]
        if assigned is not None:
            attributes["step_wait"] = assigned


@contextmanager
def kept_if_refused(normalize: VecNormalize | None) -> Iterator[None]:
    """
    Restore VecNormalize's statistics and last observations if the block raises an error.

    :param normalize: None if there is none
    """
    parts = [] if normalize is None else [normalize, *running_statistics(normalize)]
    # A step gives the attributes new arrays. Only `returns` is changed in place, if training is False.
    before = [(part, dict(vars(part))) for part in parts]
    if normalize is not None:
        before[0][1]["returns"] = normalize.returns.copy()
    try:
        yield
    except BaseException:
        for part, values in before:
            vars(part).update(values)
        raise


def running_statistics(normalize: VecNormalize) -> list[RunningMeanStd]:
    """
    :param normalize: a VecNormalize
    :return: its statistics of observations and of returns
    """
    of_observations = by_key(getattr(normalize, "obs_rms", {}))  # missing without norm_obs
    return [*of_observations.values(), normalize.ret_rms]
