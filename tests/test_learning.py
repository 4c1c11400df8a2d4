"""What the tuned entries of `hyperparams/acer.yml` reach: minutes to an hour each, `pytest -m slow`."""

import numpy as np
import pytest

from benchmarks.learning import run

pytestmark = pytest.mark.slow


def means(env_id: str, seeds: range) -> list[float]:
    """Mean reward of the final agent over 100 episodes, a seed."""
    arguments = ["--env", env_id, "--n-eval-envs", "5", "--eval-freq", "25000"]
    return [float(run(seed, arguments)[0]["mean_reward"]) for seed in seeds]


def test_cartpole_is_solved_within_30_000_steps_on_every_seed() -> None:
    assert min(means("CartPole-v1", range(5))) >= 475


@pytest.mark.parametrize(
    ("env_id", "at_least"),
    [
        ("Acrobot-v1", -78),
        ("MountainCar-v0", -102),
        ("LunarLander-v3", 240),
        ("Pendulum-v1", -165),
        ("LunarLanderContinuous-v3", 200),
        ("MountainCarContinuous-v0", 95),
        ("InvertedPendulum-v5", 950),
    ],
)
def test_tasks_are_learnt_by_the_mean_of_three_seeds(env_id: str, at_least: float) -> None:
    assert np.mean(means(env_id, range(3))) >= at_least
