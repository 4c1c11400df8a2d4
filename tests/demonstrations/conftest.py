"""Demonstrations, and agents and environments for them."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_acer import ACER
from sb3_acer.demonstrations.dataset import ExpertDataset

SPACES: tuple[spaces.Space[Any], ...] = (
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
    spaces.Box(-2, 2, (2,)),
    spaces.Box(0, 10, (2, 1), np.int32),
)


def an_agent(env: Any, policy: str = "MlpPolicy", **changes: Any) -> ACER:
    settings: dict[str, Any] = {"n_steps": 5, "seed": 0, "device": "cpu", "policy_kwargs": {"net_arch": [32]}}
    return ACER(policy, env, **{**settings, **changes})


def old_arrays(lengths: tuple[int, ...] = (4, 3, 5), seed: int = 0) -> dict[str, np.ndarray]:
    """Demonstrations as stable-baselines saved them, with observations and actions of `Recorder`."""
    n, rng = sum(lengths), np.random.default_rng(seed)
    starts = np.zeros(n, bool)
    starts[np.cumsum((0, *lengths[:-1]))] = True
    rewards = rng.normal(size=n)
    return {
        "actions": rng.integers(3, size=(n, 1)),
        "obs": np.stack((np.arange(n), rng.normal(size=n)), -1).astype(np.float32),
        "rewards": rewards,
        "episode_returns": np.add.reduceat(rewards, np.flatnonzero(starts)),
        "episode_starts": starts,
    }


def new_arrays(
    lengths: tuple[int, ...] = (4, 3, 5), truncated: tuple[bool, ...] = (False, True, False)
) -> dict[str, np.ndarray]:
    finals = np.stack((100 + np.arange(len(lengths)), np.zeros(len(lengths))), -1).astype(np.float32)
    return {**old_arrays(lengths), "truncated": np.array(truncated, bool), "final_obs": finals}


def expert_of(action_space: spaces.Space[Any], n: int = 400) -> dict[str, np.ndarray]:
    """A trajectory of an expert whose action depends on the signs of the observation."""
    rng = np.random.default_rng(0)
    obs = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    ones = (obs > 0).astype(np.int64)
    actions = {
        "Discrete": 5 + ones.sum(-1, keepdims=True),
        "MultiDiscrete": ones * [1, 2],
        "MultiBinary": ones.astype(np.int8),
        "Box": obs * 1.5 if action_space.dtype == np.float32 else np.round(5 + 4 * obs)[..., np.newaxis],
    }[type(action_space).__name__]
    starts = np.arange(n) == 0
    return {
        "actions": actions,
        "obs": obs,
        "rewards": np.ones(n),
        "episode_returns": np.array([float(n)]),
        "episode_starts": starts,
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def quiet(arrays: dict[str, np.ndarray], **changes: Any) -> ExpertDataset:
    return ExpertDataset(traj_data=arrays, verbose=0, **changes)
