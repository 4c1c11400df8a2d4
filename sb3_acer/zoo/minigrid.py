"""A bonus for exploring MiniGrid's rooms, where nothing is rewarded before the goal."""

import math
from collections import Counter
from typing import Any

import gymnasium as gym

from sb3_acer.checks import check_number


class StateBonus(gym.Wrapper):
    """
    Adds ``scale / sqrt(n)`` to the reward of a step to a state in which the episode has not been before; n is the
    number of steps so far, over all episodes, that have led to the state. A state is the agent's position, what the
    agent carries, and how many of the doors are locked. MiniGrid's ``PositionBonus`` adds to every reward and counts
    positions alone, so that it does not encourage an agent to carry a key through rooms that it knows.

    Counts are those of https://arxiv.org/abs/1606.01868, once an episode as in https://arxiv.org/abs/2012.08621.

    :param env: an environment of MiniGrid
    :param scale: of the bonus
    :raises ValueError: if ``scale`` is not a finite number of at least 0
    """

    def __init__(self, env: gym.Env[Any, Any], scale: float = 0.005) -> None:
        super().__init__(env)
        self.scale = check_number("scale", scale)
        self.counts: Counter[Any] = Counter()
        self._visited: set[Any] = set()
        self._doors: list[Any] = []  # those that were locked when the episode began

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        room: Any = self.unwrapped
        self._doors = [cell for cell in room.grid.grid if cell is not None and cell.type == "door" and cell.is_locked]
        self._visited = {self._state()}
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        state = self._state()
        self.counts[state] += 1
        bonus = 0.0 if state in self._visited else self.scale / math.sqrt(self.counts[state])
        self._visited.add(state)
        return obs, float(reward) + bonus, terminated, truncated, info

    def _state(self) -> tuple[Any, ...]:
        room: Any = self.unwrapped
        carried = room.carrying.type if room.carrying else None
        return (*map(int, room.agent_pos), carried, sum(door.is_locked for door in self._doors))
