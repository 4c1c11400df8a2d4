"""SB3's VecNormalize, as agents see it: whether it makes their observations, and what it was given."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize


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
def recording(normalize: VecNormalize | None) -> Iterator[list[Any]]:
    """
    Record the observations that VecNormalize is given in a step. Of the final ones it keeps nothing else than what it
    makes of them, clipped and rounded.

    :param normalize: None if there is none
    """
    given: list[Any] = []
    if normalize is None:
        yield given
        return

    def normalize_obs(obs: Any) -> Any:
        given.append(obs)
        return type(normalize).normalize_obs(normalize, obs)

    vars(normalize)["normalize_obs"] = normalize_obs
    try:
        yield given
    finally:
        del vars(normalize)["normalize_obs"]


def final_observations(dones: np.ndarray, infos: Sequence[dict[str, Any]], given: list[Any]) -> dict[int, Any]:
    """
    :param dones: of a step, ``[n_envs]``
    :param infos: of this step
    :param given: what VecNormalize was given in it; empty without VecNormalize
    :return: the final observations by environment, as they were before VecNormalize
    """
    ended = [env for env in np.flatnonzero(dones).tolist() if infos[env].get("terminal_observation") is not None]
    # VecNormalize normalises the new observations first.
    finals = given[1:] if given else [infos[env]["terminal_observation"] for env in ended]
    return dict(zip(ended, finals, strict=True))


def kept_if_refused(normalize: VecNormalize | None) -> AbstractContextManager[None]:
    """
    Restore VecNormalize's statistics and last observations if the block raises an error.

    :param normalize: None if there is none
    """
    return nullcontext() if normalize is None else _kept_if_refused(normalize)


@contextmanager
def _kept_if_refused(normalize: VecNormalize) -> Iterator[None]:
    # A step gives the attributes new arrays and does not write into the old ones.
    before = [(part, dict(vars(part))) for part in (normalize, *running_statistics(normalize))]
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
    of_observations: Any = getattr(normalize, "obs_rms", {})  # missing without norm_obs
    parts = of_observations.values() if isinstance(of_observations, dict) else [of_observations]
    return [*parts, normalize.ret_rms]
