"""
Draw every `results/*_curve.csv`, one panel each: the mean over the seeds of the evaluations, and the seeds themselves;
in grey the same without replay. And print a table of the final agents from `results/*.csv`.

    python benchmarks/figures.py
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

RESULTS = Path(__file__).parent / "results"
TITLES = {
    "cartpole": "CartPole-v1",
    "cartpole_defaults": "CartPole-v1, constructor's defaults",
    "acrobot": "Acrobot-v1",
    "mountaincar": "MountainCar-v0",
    "lunarlander": "LunarLander-v3",
    "cartpole_novel": "CartPoleNoVel-v1",
    "pendulum": "Pendulum-v1",
    "pendulum_novel": "PendulumNoVel-v1",
    "lunarlander_continuous": "LunarLanderContinuous-v3",
    "mountaincar_continuous": "MountainCarContinuous-v0",
    "inverted_pendulum": "InvertedPendulum-v5",
    "pong": "PongNoFrameskip-v4",
    "breakout": "BreakoutNoFrameskip-v4",
}
VARIANTS = {"": ("tab:blue", "", 3), "_no_replay": ("tab:gray", ", no replay", 2)}


def read(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Points (step, mean reward) of each seed."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            curves[row["seed"]].append((float(row["step"]), float(row["mean_reward"])))
    return curves


def draw(axes: Any, path: Path, **style: Any) -> None:
    curves = [np.array(points) for points in read(path).values()]
    for curve in curves:
        axes.plot(*curve.T, alpha=0.3, linewidth=1, **style)
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    means = [np.mean([curve[curve[:, 0] == step, 1][0] for curve in curves]) for step in steps]
    axes.plot(steps, means, linewidth=2, **style)


def table_row(title: str, path: Path) -> str:
    """Mean, deviation and interquartile mean over the seeds."""
    with path.open() as file:
        rewards = np.sort([float(row["mean_reward"]) for row in csv.DictReader(file)])
    # The middle half of the seeds, those at its borders by their share.
    shares = np.clip(
        np.minimum(np.arange(1, len(rewards) + 1), np.arange(len(rewards), 0, -1)) - len(rewards) / 4, 0, 1
    )
    iqm = np.average(rewards, weights=shares)
    return f"| {title} | {len(rewards)} | {rewards.mean():.1f} | {rewards.std():.1f} | {iqm:.1f} |"


def main() -> None:
    names = [name for name in TITLES if (RESULTS / f"{name}_curve.csv").exists()]
    n_rows = -(-len(names) // 3)
    figure = Figure(figsize=(12, 3.2 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, 3, squeeze=False).flatten()
    print("| task | seeds | mean | deviation | interquartile mean |\n| --- | --- | --- | --- | --- |")
    for axes, name in zip(panels, names, strict=False):
        for suffix, (colour, remark, zorder) in VARIANTS.items():
            if (RESULTS / f"{name}{suffix}_curve.csv").exists():
                draw(axes, RESULTS / f"{name}{suffix}_curve.csv", color=colour, zorder=zorder)
                if not suffix:
                    bottom, top = axes.get_ylim()
                print(table_row(TITLES[name] + remark, RESULTS / f"{name}{suffix}.csv"))
        axes.set_title(TITLES[name], fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 3 * bottom - 2 * top))  # what collapses may leave it
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean reward of an evaluation", fontsize=10)
    figure.savefig(RESULTS / "learning_curves.png", dpi=110)


if __name__ == "__main__":
    main()
