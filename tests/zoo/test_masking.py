"""rl-zoo's commands with an environment in which an invalid action is an error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer import ACER
from sb3_acer.policies import MlpLstmPolicy
from sb3_acer.zoo.masking import MaskedEvalCallback, evaluate_policy, with_masks
from tests.helpers import Constant
from tests.test_masks import Doors
from tests.zoo.conftest import SEARCH, sb3_acer

ENV = ("--env", "Doors-v0", "--num-threads", "1", "--seed", "1")
AGENT = ("-params", "replay_start:50", "n_steps:8")


@pytest.fixture(autouse=True)
def doors() -> Iterator[None]:
    gym.register("Doors-v0", lambda **kwargs: Doors(spaces.Discrete(5)))  # MaskablePPO knows no start
    yield
    gym.registry.pop("Doors-v0")


def test_train_evaluates_with_masks_and_enjoy_acts_with_them(tmp_path: Path) -> None:
    evaluated = ("--eval-freq", "50", "--eval-episodes", "2", "--n-eval-envs", "2")
    printed = sb3_acer("train", *ENV, "-n", "150", *evaluated, *AGENT, cwd=tmp_path)
    assert "Mean reward: " in printed
    results = np.load(next(tmp_path.rglob("evaluations.npz")))["results"]
    assert results.shape[1] == 2
    printed = sb3_acer("enjoy", "--env", "Doors-v0", "--no-render", "-n", "60", cwd=tmp_path)
    assert "Mean reward: " in printed


def test_maskable_ppo_is_one_of_the_algorithms(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yml"
    conf.write_text("Doors-v0: {n_timesteps: 100, policy: MlpPolicy, n_steps: 32, batch_size: 32}")
    run = ("train", "--algo", "ppo_mask", "-conf", str(conf), *ENV, "-n", "64", "--n-eval-envs", "2")
    assert "Mean reward: " in sb3_acer(*run, cwd=tmp_path)


def test_tune_evaluates_its_trials_with_masks(tmp_path: Path) -> None:
    printed = sb3_acer("tune", *ENV, *SEARCH, cwd=tmp_path)
    assert "To train with the best trial" in printed


def test_evaluation_keeps_the_state_of_a_recurrent_policy() -> None:
    env: Any = DummyVecEnv([Doors])
    agent = ACER("MlpLstmPolicy", env, policy_kwargs={"lstm_hidden_size": 4})
    states: list[Any] = []
    predict = agent.policy.predict

    def spied(observation: Any, state: Any, *args: Any) -> Any:
        states.append(state)
        return predict(observation, state, *args)

    agent.policy.predict = spied  # type: ignore[method-assign, assignment]
    evaluate_policy(agent, env, 2, warn=False)
    assert states[0] is None
    assert all(np.abs(state).sum() > 0 for state in states[1:])


def test_the_callback_evaluates_with_masks_and_keeps_the_state() -> None:
    starts: list[bool] = []

    class Spied(MlpLstmPolicy):
        def predict(self, observation: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
            starts.append(state is None)
            return super().predict(observation, state, *args, **kwargs)

    env: Any = DummyVecEnv([Doors])
    agent = ACER(Spied, env, n_steps=8, policy_kwargs={"lstm_hidden_size": 4})
    callback = MaskedEvalCallback(DummyVecEnv([Doors]), eval_freq=20, n_eval_episodes=2, verbose=0, warn=False)
    agent.learn(40, callback)  # Doors raises an error for an invalid action
    assert callback.n_calls == 40
    assert np.isfinite(callback.last_mean_reward)
    assert sum(starts) == 2 < len(starts)


def test_agents_and_environments_without_masks_are_left_alone() -> None:
    acer, ppo = ACER("MlpPolicy", Constant()), PPO("MlpPolicy", Constant())
    assert with_masks(acer, DummyVecEnv([Constant])) is acer
    assert with_masks(ppo, DummyVecEnv([Doors])) is ppo
    assert with_masks(acer, DummyVecEnv([Doors])) is not acer
