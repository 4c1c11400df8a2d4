"""One training run by arguments of ``sb3-acer train``, for tests/test_learning.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

from .outcome import LOG, read_outcome


def run(seed: int, arguments: list[str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The final agent's mean reward over 100 episodes with its deviation, and the evaluations on the way."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "sb3_acer", "train", "--seed", str(seed), "-f", folder, "--verbose", "0"]
        with Path(folder, LOG).open("wb") as log:
            subprocess.run([*line, "--num-threads", "1", "--device", "cpu", *arguments], stdout=log, check=True)
        outcome = read_outcome(Path(folder))
    score = outcome.scores[0]
    points = [{"step": str(point.step), "mean_reward": f"{point.mean:.2f}"} for point in outcome.curve]
    return {"mean_reward": score.mean, "std_reward": score.deviation}, points
