"""
What `sb3-acer run-atari` has learnt: the mean score of its newest agent over 100 games, with sampled actions as rl-zoo
has them for Atari, and the course of the training.

    sb3-acer run-atari --tuned --env PongNoFrameskip-v4 --seed 0 --num-timesteps 3e6 --logdir logs/pong
    python benchmarks/atari_learning.py pong logs/pong
"""

import argparse
import json
from pathlib import Path

import numpy as np
from learning import RESULTS, write
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import load_results

from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env
from sb3_acer.atari.run import SETTINGS, find_checkpoint

INTERVAL = 25_000
GAMES = 100


def course(folder: Path, seed: int, steps: int) -> list[dict[str, str]]:
    """The mean score of the last 100 games, every 25,000 steps until ``steps``."""
    games = load_results(str(folder))
    rows = []
    for step in range(INTERVAL, steps + 1, INTERVAL):
        scores = games["r"][games["steps"] <= step][-GAMES:]
        rows.append({"seed": str(seed), "step": str(step), "mean_reward": f"{scores.mean():.2f}"})
    return rows


def steps_per_second(folder: Path) -> float:
    """Over all parts of the run; each has a file of scores that is named by the step at which it began."""
    parts = {path: np.genfromtxt(path, delimiter=",", skip_header=2) for path in folder.glob("*.monitor.csv")}
    steps = sum(rows[-1, 3] - int(path.name.split(".")[0]) for path, rows in parts.items())
    return float(steps / sum(rows[-1, 2] for rows in parts.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the CSVs in benchmarks/results")
    parser.add_argument("folder", type=Path, help="the run's")
    options = parser.parse_args()
    settings = json.loads((options.folder / SETTINGS).read_text())
    checkpoint = find_checkpoint(options.folder)
    assert checkpoint, f"no checkpoint in {options.folder}"
    model = ACER.load(checkpoint[1])
    env = make_atari_vec_env(settings["env"], seed=10_000, episodic_life=False, clip_reward=False)
    mean, deviation = evaluate_policy(model, env, GAMES, deterministic=False)
    row = {"seed": str(settings["seed"]), "mean_reward": f"{mean:.2f}", "std_reward": f"{deviation:.2f}"}
    row |= {"steps": str(model.num_timesteps), "steps_per_second": f"{steps_per_second(options.folder):.0f}"}
    write(RESULTS / f"{options.name}.csv", [row])
    write(RESULTS / f"{options.name}_curve.csv", course(options.folder, settings["seed"], model.num_timesteps))
    print(row)


if __name__ == "__main__":
    main()
