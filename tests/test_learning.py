"""What the tuned entries of `hyperparams/acer.yml` reach: minutes to an hour each, `pytest -m slow`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.outcome import LOG, read_outcome
from sb3_acer.zoo.mistakes import SUITES

pytestmark = pytest.mark.slow


def mean_reward(env_id: str, seed: int, folder: Path) -> float:
    """Of the final agent, over 100 episodes."""
    folder.mkdir()
    line = f"-m sb3_acer train --env {env_id} --seed {seed} --n-eval-envs 5 --eval-freq 25000 --num-threads 1"
    for beginning, (module, _) in SUITES.items():
        line += f" --gym-packages {module}" * env_id.startswith(beginning)
    with (folder / LOG).open("wb") as log:
        subprocess.run([sys.executable, *line.split(), "--device", "cpu", "-f", folder], stdout=log, check=True)
    return float(read_outcome(folder).scores[0].mean)


def test_cartpole_is_solved_within_50_000_steps_on_every_seed(tmp_path: Path) -> None:
    assert min(mean_reward("CartPole-v1", seed, tmp_path / str(seed)) for seed in range(5)) >= 475


@pytest.mark.parametrize(
    ("env_id", "at_least"),
    [
        ("Acrobot-v1", -74),
        ("MountainCar-v0", -102),
        ("LunarLander-v3", 240),
        ("Pendulum-v1", -150),
        ("LunarLanderContinuous-v3", 245),
        ("MountainCarContinuous-v0", 95),
        ("InvertedPendulum-v5", 950),
        ("HalfCheetah-v5", 5800),
        ("Hopper-v5", 3300),
        ("Walker2d-v5", 4000),
        ("Swimmer-v5", 300),
        ("Ant-v5", 5000),
        ("BipedalWalker-v3", 250),
        ("MiniGrid-DoorKey-5x5-v0", 0.95),
        ("MiniGrid-KeyCorridorS3R1-v0", 0.92),
        ("MiniGrid-RedBlueDoors-6x6-v0", 0.95),
        ("MiniGrid-GoToDoor-5x5-v0", 0.85),
        ("MiniGrid-PutNear-6x6-N2-v0", 0.7),
        ("MiniGrid-MultiRoom-N4-S5-v0", 0.68),
        ("MiniGrid-LockedRoom-v0", 0.4),
        ("MiniGrid-MemoryS7-v0", 0.9),
        ("popgym-PositionOnlyCartPoleEasy-v0", 0.95),
        ("popgym-PositionOnlyCartPoleMedium-v0", 0.95),
        ("popgym-RepeatPreviousEasy-v0", 0.95),
        ("popgym-RepeatPreviousMedium-v0", -0.3),
        ("popgym-CountRecallEasy-v0", -0.3),
        ("MinAtar/Breakout-v1", 16),
        ("MinAtar/SpaceInvaders-v1", 100),
        ("MinAtar/Asterix-v1", 11),
        ("MinAtar/Freeway-v1", 50),
        ("MinAtar/Seaquest-v1", 4),
    ],
)
def test_tasks_are_learnt_by_the_mean_of_three_seeds(env_id: str, at_least: float, tmp_path: Path) -> None:
    assert np.mean([mean_reward(env_id, seed, tmp_path / str(seed)) for seed in range(3)]) >= at_least
