"""
A factored action space: LunarLanderContinuous-v3 with each of its two engines at five levels, MultiDiscrete([5, 5]).
ACER against stable-baselines3's A2C and PPO with rl-zoo's values for LunarLander-v3, over the same steps; the final
agents are evaluated over 100 episodes.

    python benchmarks/factored.py [--steps 200000] [--seeds 0 1 2] [--trace-root 1]
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_acer import ACER


class Levels(gym.ActionWrapper[Any, Any, Any]):
    """A Box action space as MultiDiscrete, each component at some evenly spaced levels."""

    def __init__(self, env: gym.Env[Any, Any], n_levels: int = 5) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Box)
        self.levels = np.linspace(env.action_space.low, env.action_space.high, n_levels, axis=-1).astype(np.float32)
        self.action_space = spaces.MultiDiscrete([n_levels] * env.action_space.shape[0])

    def action(self, action: Any) -> Any:
        return np.take_along_axis(self.levels, np.asarray(action)[:, np.newaxis], -1).squeeze(-1)


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "A2C": (
        A2C,
        {"n_envs": 8, "gamma": 0.995, "n_steps": 5, "learning_rate": LinearSchedule(8.3e-4, 0, 1), "ent_coef": 1e-5},
    ),
    "PPO": (
        PPO,
        {
            "n_envs": 16,
            "gamma": 0.999,
            "n_steps": 1024,
            "batch_size": 64,
            "gae_lambda": 0.98,
            "n_epochs": 4,
            "ent_coef": 0.01,
        },
    ),
    "ACER": (
        ACER,
        {
            "n_envs": 4,
            "normalize": True,
            "n_steps": 16,
            "replay_ratio": 4,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "buffer_size": 20_000,
            "ent_coef": 1e-3,
            "policy_kwargs": {"activation_fn": th.nn.ReLU, "optimizer_class": th.optim.Adam},
        },
    ),
}


def train(name: str, steps: int, seed: int, trace_root: int) -> dict[str, Any]:
    algorithm, settings = SETTINGS[name]
    arguments = dict(settings)
    n_envs, normalize = arguments.pop("n_envs"), arguments.pop("normalize", False)

    def make(n_envs: int, seed: int) -> VecEnv:
        return make_vec_env("LunarLanderContinuous-v3", n_envs=n_envs, seed=seed, wrapper_class=Levels)

    env = make(n_envs, seed)
    if normalize:
        env = VecNormalize(env, gamma=arguments.get("gamma", 0.99))
    model = algorithm("MlpPolicy", env, seed=seed, device="cpu", **arguments)
    if name == "ACER":
        model.policy.family.trace_root = trace_root
    start = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - start
    evaluated = make(5, seed + 1000)
    if normalize:
        statistics = env
        evaluated = VecNormalize(evaluated, training=False, norm_reward=False)
        evaluated.obs_rms = statistics.obs_rms
    rewards, _ = evaluate_policy(model, evaluated, 100, return_episode_rewards=True)
    row = {
        "algorithm": name,
        "trace_root": trace_root if name == "ACER" else "",
        "seed": seed,
        "steps": steps,
        "mean_reward": round(float(np.mean(rewards)), 1),
        "std_reward": round(float(np.std(rewards)), 1),
        "seconds": round(seconds),
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--trace-root", type=int, default=2, help="d in ACER's traces min(1, rho^(1/d))")
    parser.add_argument("--name", default="factored", help="of the CSV in benchmarks/results")
    options = parser.parse_args()
    th.set_num_threads(1)
    rows = [
        train(name, options.steps, seed, options.trace_root) for name in options.algorithms for seed in options.seeds
    ]
    path = Path(__file__).parent / "results" / f"{options.name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
