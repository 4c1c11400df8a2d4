"""
Draw what the state that replay starts from is worth, from the CSVs of `learning.py`: stored or zero.

    python benchmarks/memory.py
"""

from collections import defaultdict

import numpy as np
from figures import RESULTS, read
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

PANELS = {
    "cartpole_novel_short": "CartPoleNoVel-v1, sequences of 5 steps",
    "cartpole_novel": "CartPoleNoVel-v1, sequences of 20 steps",
    "pendulum_novel": "PendulumNoVel-v1, sequences of 16 steps",
}
STARTS = {"": ("stored state", "tab:blue"), "_zero": ("zero state", "tab:orange")}


def main() -> None:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, 3), PANELS.items(), strict=True):
        for suffix, (label, colour) in STARTS.items():
            rewards = defaultdict(list)
            for curve in read(RESULTS / f"{name}{suffix}_curve.csv").values():
                axes.plot(*np.transpose(curve), color=colour, alpha=0.3, linewidth=1)
                for step, reward in curve:
                    rewards[step].append(reward)
            axes.plot(
                list(rewards), [np.mean(each) for each in rewards.values()], color=colour, linewidth=2, label=label
            )
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="replay starts from")
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean reward of an evaluation", fontsize=10)
    figure.savefig(RESULTS / "memory.png", dpi=110)


if __name__ == "__main__":
    main()
