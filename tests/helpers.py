"""What several tests use: environments to learn from, random numbers, and what counts as equal."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from torch import nn

from sb3_acer import ACER
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Update


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


class Integers(gym.Env[Any, Any]):
    """Counts from a random number; episodes of five steps, ended by a time limit."""

    observation_space = spaces.Box(0, 100, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps, self.count = 0, int(self.np_random.integers(30))
        return np.array([self.count]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps, self.count = self.n_steps + 1, self.count + 1
        return np.array([self.count]), 1.0, False, self.n_steps == 5, {}


class Recall(gym.Env[Any, Any]):
    """
    A cue in the first observation, nothing to see for `length` steps, then the question: a reward of 1 for the cue, of
    -1 for any other action. Without memory the best mean reward is 0.
    """

    def __init__(self, length: int = 3) -> None:
        self.observation_space = spaces.Box(0, 1, (3,))  # the two cues, the question
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.cue = 0
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.n_steps = int(self.np_random.integers(2)), 0
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        asked = self.n_steps == self.length + 1
        observation = np.zeros(3, np.float32)
        observation[2] = asked
        over = self.n_steps == self.length + 2
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        return observation, reward, over, False, {}


class TMaze(gym.Env[Any, Any]):
    """
    Bakker's T-maze (2001): a sign at the start says which way to turn at the end of a corridor of `length` fields, all
    of them alike. A reward of 4 for the right way, of -0.1 for walking into a wall and for the other way, which also
    ends the episode; so does a time limit.
    """

    def __init__(self, length: int = 10) -> None:
        self.observation_space = spaces.Box(0, 1, (4,))  # the two signs, corridor, junction
        self.action_space = spaces.Discrete(3)  # turn one way, turn the other way, walk on
        self.length = length
        self.sign = 0
        self.place = 0
        self.n_steps = 0

    def _look(self) -> Any:
        seen = self.sign if self.place == 0 else 3 if self.place == self.length else 2
        return np.eye(4, dtype=np.float32)[seen]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign, self.place, self.n_steps = int(self.np_random.integers(2)), 0, 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        too_long = self.n_steps == 5 * self.length
        if self.place == self.length and action != 2:
            return self._look(), 4.0 if action == self.sign else -0.1, True, False, {}
        walks = action == 2 and self.place < self.length
        self.place += walks
        return self._look(), 0.0 if walks else -0.1, False, too_long, {}


class Catch(gym.Env[Any, Any]):
    """
    A ball falls through the five rows of a picture; the racket on the floor can stay or go left or right. A reward of 1
    for the ball caught, of -1 for the ball missed.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (40, 40, 1), np.uint8)  # fields of 8 x 8 pixels
        self.action_space = spaces.Discrete(3)
        self.row = 0
        self.ball = 0
        self.racket = 0

    def _look(self) -> Any:
        fields = np.zeros((5, 5), np.uint8)
        fields[4, self.racket] = 128
        fields[self.row, self.ball] = 255
        return np.kron(fields, np.ones((8, 8), np.uint8))[..., np.newaxis]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.row = 0
        self.ball, self.racket = self.np_random.integers(5, size=2).tolist()
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.racket = min(max(self.racket + (0, -1, 1)[int(action)], 0), 4)
        self.row += 1
        over = self.row == 4
        reward = 1.0 if self.ball == self.racket else -1.0
        return self._look(), reward if over else 0.0, over, False, {}


def close(actual: th.Tensor, expected: th.Tensor, tolerance: float = 1e-10) -> None:
    th.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def normal(rng: np.random.Generator, *shape: int) -> th.Tensor:
    return th.from_numpy(rng.standard_normal(shape))


def uniform(rng: np.random.Generator, *shape: int) -> th.Tensor:
    return th.from_numpy(rng.random(shape))


def in_a_fork(run: Callable[[], None], seconds: float | None = None) -> int:
    """Status of a process that runs the function, and is killed after some time."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


EXTRAS = (
    *("ale_py", "cv2", "yaml"),
    *("rl_zoo3", "optuna", "tqdm", "rich", "tensorboard", "moviepy", "requests", "seaborn", "scipy"),
    *("Box2D", "mujoco", "minigrid", "popgym", "minatar"),
    *("onnx", "onnxscript", "onnxruntime"),
)
"""What the extras install, by the names that a program imports."""


def in_a_fork_without(packages: Iterable[str], run: Callable[[], None]) -> int:
    """
    Status of a process that runs the function where these packages cannot be imported, and where nothing of this
    package is imported yet. What else is imported stays, since importing it again would take seconds.
    """

    def run_without() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("sb3_acer", *packages)]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # makes the import fail
        run()

    return in_a_fork(run_without)


class NormalisedFeatures(BaseFeaturesExtractor):
    """Batch normalisation of the observations, whose running means are buffers of the network."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, observation_space.shape[0])
        self.norm = th.nn.BatchNorm1d(observation_space.shape[0])

    def forward(self, observations: th.Tensor) -> th.Tensor:
        normalised: th.Tensor = self.norm(observations)
        return normalised


class Shows(gym.Env[Any, Any]):
    """Observations sampled from the observation space; episodes of five steps."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(3)
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self.observation_space.sample(), 1.0, self.n_steps == 5, False, {}


class WithDropout(FlattenExtractor):
    """Drops half of its features in training."""

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return nn.functional.dropout(super().forward(observations), 0.5, self.training)


class StopAt(BaseCallback):
    """Stops training after some of its calls."""

    def __init__(self, n_calls: int) -> None:
        super().__init__()
        self.last = n_calls

    def _on_step(self) -> bool:
        return self.n_calls < self.last


class Rows(KVWriter):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self.rows.append(dict(key_values))

    def close(self) -> None:
        """Nothing is open."""


def updates_of(model: ACER) -> list[Update]:
    """A list to which each update of the agent is added from now on."""
    updates: list[Update] = []
    update = model.update

    def watched(batch: SequenceBatch) -> Update:
        updates.append(update(batch))
        return updates[-1]

    model.update = watched  # type: ignore[method-assign]
    return updates
