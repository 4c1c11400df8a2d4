"""
Train by the command line, once a seed, and write one row a seed to a CSV: the mean reward of the final agent over 100
episodes. The evaluations on the way go to another CSV beside it, for curves.

    python benchmarks/learning.py NAME [--seeds 0 1 2 3 4] [--jobs 1] -- --env CartPole-v1 ...

What follows `--` are arguments of `sb3-acer train`.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def run(seed: int, arguments: list[str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sb3_acer", "train", "--seed", str(seed), "-f", folder, "--verbose", "0"]
        start = time.perf_counter()
        finished = subprocess.run(
            [*command, "--num-threads", "1", "--device", "cpu", *arguments], capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - start
        if finished.returncode:
            raise RuntimeError(f"{finished.args} failed:\n{finished.stderr}")
        match = re.search(r"Mean reward: (\S+) \+/- (\S+)", finished.stdout)
        assert match, finished.stdout
        (evaluations,) = Path(folder).rglob("evaluations.npz")
        with np.load(evaluations) as arrays:
            curve = [
                {"seed": str(seed), "step": str(step), "mean_reward": f"{np.mean(rewards):.2f}"}
                for step, rewards in zip(arrays["timesteps"], arrays["results"], strict=True)
            ]
    print(f"seed {seed}: {match[1]} +/- {match[2]} in {seconds:.0f} s", flush=True)
    row = {"seed": str(seed), "mean_reward": match[1], "std_reward": match[2], "seconds": f"{seconds:.0f}"}
    return row, curve


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the CSVs in benchmarks/results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    arguments = sys.argv[len(own) + 2 :]
    with ThreadPoolExecutor(options.jobs) as pool:
        finished = list(pool.map(lambda seed: run(seed, arguments), options.seeds))
    write(RESULTS / f"{options.name}.csv", [row for row, _ in finished])
    write(RESULTS / f"{options.name}_curve.csv", [point for _, curve in finished for point in curve])
    means = [float(row["mean_reward"]) for row, _ in finished]
    print(f"{options.name}: mean {np.mean(means):.1f}, deviation {np.std(means):.1f} over {len(means)} seeds")


if __name__ == "__main__":
    main()
