"""Environments that the tests learn from."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Constant(gym.Env[Any, Any]):
    """One state, reward 1 at every step, for ten steps; then a time limit, or a terminal state."""

    def __init__(self, terminates: bool = False, n_actions: int = 2) -> None:
        self.observation_space = spaces.Box(0, 1, (1,))
        self.action_space = spaces.Discrete(n_actions)
        self.terminates = terminates
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        over = self.n_steps == 10
        return np.ones(1, np.float32), 1.0, over and self.terminates, over and not self.terminates, {}


class Recorder(gym.Env[Any, Any]):
    """Counts its steps in the observation, and keeps the actions that it got; episodes of `length` steps."""

    def __init__(self, action_space: spaces.Space[Any] | None = None, length: int = 7) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = action_space or spaces.Discrete(3)
        self.length = length
        self.actions: list[Any] = []
        self.clock = np.zeros(2, np.float32)  # steps of the episode, steps of all
        self.spoil: tuple[int, str, float] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.clock[0] = 0
        return self.clock.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.clock += 1
        observation, reward = self.clock.copy(), float(self.clock[1])
        over = bool(self.clock[0] == self.length)
        if self.spoil is not None and self.clock[1] == self.spoil[0]:
            _, what, value = self.spoil
            reward = value if what == "reward" else reward
            observation[0] = value if what == "observation" else observation[0]
        return observation, reward, over, False, {}
