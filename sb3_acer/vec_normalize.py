"""SB3's VecNormalize, as agents see it: whether it makes their observations, and what it was given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_acer.sequences import by_key


def normalize_of_policy(env: VecEnv | None) -> VecNormalize | None:
    """
    :param env: an agent's environment
    :return: its VecNormalize if the policy gets the observations that this one makes. None if there is none, and if
        wrappers around it change them, as VecTransposeImage and VecFrameStack do
    """
    normalize = None if env is None else unwrap_vec_normalize(env)
    if env is None or normalize is None or normalize.observation_space != env.observation_space:
        return None
    return normalize


@contextmanager
def recording(normalize: VecNormalize | None) -> Iterator[list[tuple[Any, Any]]]:
    """
    Record a step of VecNormalize: it replaces final observations by normalised ones, which are clipped and rounded.

    :param normalize: None if there is none
    :return: pairs of what it has made and of what it was given
    """
    pairs: list[tuple[Any, Any]] = []
    if normalize is None:
        yield pairs
        return
    attributes, normalize_obs = vars(normalize), normalize.normalize_obs
    assigned = attributes.get("normalize_obs")  # by a program

    def recorded(obs: Any) -> Any:
        made = normalize_obs(obs)
        pairs.append((made, obs))
        return made

    attributes["normalize_obs"] = recorded
    try:
        yield pairs
    finally:
        del attributes["normalize_obs"]
        if assigned is not None:
            attributes["normalize_obs"] = assigned


def final_observations(
    dones: np.ndarray, infos: Sequence[dict[str, Any]], normalize: VecNormalize | None, pairs: list[tuple[Any, Any]]
) -> dict[int, Any]:
    """
    :param dones: of a step, ``[n_envs]``
    :param infos: of this step
    :param normalize: see :func:`recording`
    :param pairs: see :func:`recording`
    :return: the final observations by environment, as they were before VecNormalize
    """
    finals = {env: infos[env].get("terminal_observation") for env in np.flatnonzero(dones).tolist()}
    for env, final in finals.items():
        given = [obs for made, obs in pairs if made is final]
        if given:
            finals[env] = given[0]
        elif normalize is not None and final is not None:  # a wrapper around VecNormalize has copied it
            finals[env] = normalize.unnormalize_obs(final)
    return {env: final for env, final in finals.items() if final is not None}


@contextmanager
def kept_if_refused(normalize: VecNormalize | None) -> Iterator[None]:
    """
    Restore VecNormalize's statistics and last observations if the block raises an error.

    :param normalize: None if there is none
    """
    parts = [] if normalize is None else [normalize, *running_statistics(normalize)]
    # A step gives the attributes new arrays, but writes into `returns` without training.
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
