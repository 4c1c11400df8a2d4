"""
What demonstrations are worth. Episodes of a simple expert go into the replay buffer, or the policy is cloned from them
first, or both; then ACER learns, with the settings below.

- MountainCarContinuous-v0, frame by frame (the entry repeats frames): noise seldom reaches the goal. The expert pushes
  with full force where the car is going, ten episodes.
- CartPole-v1: the expert pushes by a linear rule and never drops the pole, four episodes, as the time limit ends them.

Ends in two CSVs, one row a seed and one row an evaluation, and in their figure.

    python benchmarks/demonstrations.py [--seeds 0 1 2 3 4] [--behaviour expert] [--figure-only]
"""

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_acer import ACER
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj

RESULTS = Path(__file__).parent / "results"
VARIANTS = {
    "without": "tab:gray",
    "replayed": "tab:blue",
    "cloned": "tab:orange",
    "cloned and replayed": "tab:green",
}


class Task(NamedTuple):
    expert: Callable[[Any], Any]
    n_episodes: int
    steps: int
    n_envs: int
    normalize: bool
    settings: dict[str, Any]


TASKS = {
    "MountainCarContinuous-v0": Task(
        lambda observation: np.sign(observation[1:]),
        n_episodes=10,
        steps=15_000,
        n_envs=2,
        normalize=True,
        settings={
            "n_steps": 16,
            "replay_ratio": 4,
            "batch_size": 16,
            "buffer_size": 50_000,
            "learning_rate": 2e-3,
            "gamma": 0.99,
            "q_coef": 2.0,
            "ent_coef": 0.0,
            "correction_term": 5.0,
            "delta": 0.1,
            "alpha": 0.995,
            "policy_kwargs": {"log_std_init": 0.5, "activation_fn": th.nn.ReLU, "optimizer_class": th.optim.Adam},
        },
    ),
    "CartPole-v1": Task(
        lambda observation: int(observation @ [0.02, 0.05, 1.0, 0.3] > 0),
        n_episodes=4,
        steps=15_360,
        n_envs=1,
        normalize=False,
        settings={"n_steps": 32, "replay_ratio": 8, "batch_size": 16},
    ),
}


def evaluate(model: ACER, task: str, n_episodes: int) -> list[float]:
    env: VecEnv = make_vec_env(task, 5, seed=1000)
    normalize = model.get_vec_normalize_env()
    if normalize is not None:
        env = VecNormalize(env, training=False, norm_reward=False)
        env.obs_rms = normalize.obs_rms
    return list(evaluate_policy(model, env, n_episodes, return_episode_rewards=True)[0])


class Evaluations(BaseCallback):
    """Evaluate before the first step, and ten times on the way."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task
        self.points: list[tuple[int, float]] = []

    def _on_training_start(self) -> None:
        self._on_step()

    def _on_step(self) -> bool:
        if self.num_timesteps % (TASKS[self.task].steps // 10) == 0:
            mean = np.mean(evaluate(self.model, self.task, 10))  # type: ignore[arg-type]
            self.points.append((self.num_timesteps, round(float(mean), 2)))
        return True


def train(name: str, dataset: ExpertDataset, variant: str, seed: int, behaviour: Any) -> tuple[dict[str, Any], Any]:
    task, start = TASKS[name], time.perf_counter()
    env: VecEnv = make_vec_env(name, task.n_envs, seed=seed)
    if task.normalize:
        env = VecNormalize(env, gamma=task.settings["gamma"])
    model = ACER("MlpPolicy", env, seed=seed, device="cpu", **task.settings)
    if "cloned" in variant:
        behaviour_cloning(model, dataset, n_epochs=20, learning_rate=1e-3)
    if "replayed" in variant:
        dataset.to_replay_buffer(model, behaviour)
    evaluations = Evaluations(name)
    model.learn(task.steps, callback=evaluations)
    rewards = evaluate(model, name, 100)
    row = {"task": name, "demonstrations": variant, "seed": seed}
    result = {
        **row,
        "mean_reward": round(float(np.mean(rewards)), 2),
        "std_reward": round(float(np.std(rewards)), 2),
        "seconds": round(time.perf_counter() - start),
    }
    print(result, flush=True)
    return result, [{**row, "step": step, "mean_reward": reward} for step, reward in evaluations.points]


def demonstrate(name: str) -> ExpertDataset:
    env = gym.make(name)
    env.reset(seed=0)
    arrays = generate_expert_traj(TASKS[name].expert, env=env, n_episodes=TASKS[name].n_episodes)
    np.random.seed(0)  # of the part that is cloned
    return ExpertDataset(traj_data=arrays)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(name: str) -> None:
    with (RESULTS / f"{name}_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for variant, colour in VARIANTS.items():
            seeds: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if (row["task"], row["demonstrations"]) == (task, variant):
                    seeds.setdefault(row["seed"], []).append((float(row["step"]), float(row["mean_reward"])))
            curves = np.array(list(seeds.values()))
            for curve in curves:
                axes.plot(*curve.T, color=colour, alpha=0.25, linewidth=1)
            axes.plot(*curves.mean(0).T, color=colour, linewidth=2, label=variant)
        axes.set_title(f"{task} ({len(curves)} seeds)", fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(title="demonstrations", loc="lower right", fontsize=8, title_fontsize=8)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean reward of an evaluation", fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--behaviour", default="expert", choices=["expert", "policy"], help="of the demonstrations")
    parser.add_argument("--name", default="demonstrations", help="of the CSVs and the figure in benchmarks/results")
    parser.add_argument("--figure-only", action="store_true", help="draw what the CSVs hold")
    options = parser.parse_args()
    th.set_num_threads(1)
    if not options.figure_only:
        trained = [
            train(task, dataset, variant, seed, options.behaviour)
            for task, dataset in [(task, demonstrate(task)) for task in TASKS]
            for variant in VARIANTS
            for seed in options.seeds
        ]
        write(RESULTS / f"{options.name}.csv", [row for row, _ in trained])
        write(RESULTS / f"{options.name}_curve.csv", [point for _, points in trained for point in points])
    draw(options.name)


if __name__ == "__main__":
    main()
