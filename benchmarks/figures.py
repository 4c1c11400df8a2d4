"""
Draw every `results/*_curve.csv`, one panel each: the mean over the seeds of the evaluations, and the seeds themselves.

    python benchmarks/figures.py
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

RESULTS = Path(__file__).parent / "results"
TITLES = {
    "cartpole": "CartPole-v1",
    "cartpole_defaults": "CartPole-v1, constructor's defaults",
    "cartpole_novel": "CartPoleNoVel-v1",
    "pendulum": "Pendulum-v1",
    "pendulum_novel": "PendulumNoVel-v1",
    "lunarlander_continuous": "LunarLanderContinuous-v3",
    "mountaincar_continuous": "MountainCarContinuous-v0",
    "inverted_pendulum": "InvertedPendulum-v5",
}


def read(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Points (step, mean reward) of each seed."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            curves[row["seed"]].append((float(row["step"]), float(row["mean_reward"])))
    return curves


def main() -> None:
    names = [name for name in TITLES if (RESULTS / f"{name}_curve.csv").exists()]
    n_rows = -(-len(names) // 3)
    figure = Figure(figsize=(12, 3.2 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, 3, squeeze=False).flatten()
    for axes, name in zip(panels, names, strict=False):
        curves = [np.array(points) for points in read(RESULTS / f"{name}_curve.csv").values()]
        for curve in curves:
            axes.plot(*curve.T, color="tab:blue", alpha=0.3, linewidth=1)
        steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
        means = [np.mean([curve[curve[:, 0] == step, 1][0] for curve in curves]) for step in steps]
        axes.plot(steps, means, color="tab:blue", linewidth=2)
        axes.set_title(f"{TITLES[name]} ({len(curves)} seeds)", fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean reward of an evaluation", fontsize=10)
    figure.savefig(RESULTS / "learning_curves.png", dpi=110)


if __name__ == "__main__":
    main()
