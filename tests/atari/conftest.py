"""Games of this package and of SB3, and how to play and compare them."""

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_acer.atari import AtariVecEnv


def step(env: VecEnv, *actions: int) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
    observations, rewards, dones, infos = env.step(np.array(actions))
    return observations, rewards, dones, infos


def n_actions(env: VecEnv) -> int:
    assert isinstance(env.action_space, gym.spaces.Discrete)
    return int(env.action_space.n)


def random_steps(env: VecEnv, n_steps: int, seed: int = 1) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        yield step(env, *rng.integers(n_actions(env), size=env.num_envs))


def without_starts(env_id: str, n_envs: int, **kwargs: Any) -> AtariVecEnv:
    """Games without extra actions at the start. They are deterministic without a seed, which would cost time."""
    return AtariVecEnv(env_id, n_envs, noop_max=0, fire_reset=False, **kwargs)


def of_sb3(env_id: str, n_envs: int, max_frames: int = 108_000, **kwargs: Any) -> VecEnv:
    env_kwargs = {"max_num_frames_per_episode": max_frames}
    env = make_atari_env(env_id, n_envs, wrapper_kwargs={"noop_max": 0, **kwargs}, env_kwargs=env_kwargs)
    return VecFrameStack(env, 4)


def channels_first(observations: Any) -> Any:
    return np.moveaxis(observations, -1, -3)


def require_same_info(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in ("lives", "frame_number", "episode_frame_number", "TimeLimit.truncated"):
        assert ours[key] == theirs[key]
    assert ours.keys() <= theirs.keys()
    assert ("episode" in ours) == ("episode" in theirs)
    if "episode" in ours:
        assert [ours["episode"][key] for key in "rl"] == [theirs["episode"][key] for key in "rl"]


def require_similar(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The same except for few pixels, which depend on when frames become grey; zero frames in the same places."""
    assert (ours != theirs).mean() < 0.02
    np.testing.assert_array_equal(ours.any((-2, -1)), theirs.any((-2, -1)))
