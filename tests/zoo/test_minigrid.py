"""The bonus for exploring MiniGrid's rooms."""

from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401  # registers the environments
import numpy as np
import pytest
from minigrid.core.world_object import Door, Key
from minigrid.wrappers import ImgObsWrapper
from stable_baselines3.common.env_util import make_vec_env

from sb3_acer.env_state import get_env_state, set_env_state
from sb3_acer.zoo.minigrid import StateBonus

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)


class Corridor(gym.Wrapper):
    """A row of free cells, then a key, a free cell and a locked door; the agent looks along it."""

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        room: Any = self.unwrapped
        for x in range(1, 7):
            room.grid.set(x, 1, None)
        room.grid.set(4, 1, Key("red"))
        room.grid.set(6, 1, Door("red", is_locked=True))
        room.agent_pos, room.agent_dir = np.array((1, 1)), 0
        return result


def bonuses(env: StateBonus, actions: list[int]) -> list[float]:
    return [float(env.step(action)[1]) for action in actions]


def corridor() -> StateBonus:
    env = StateBonus(Corridor(gym.make("MiniGrid-Empty-8x8-v0")), scale=0.5)
    env.reset(seed=0)
    return env


def test_a_state_is_rewarded_once_an_episode_and_less_each_time() -> None:
    env = corridor()
    assert bonuses(env, [LEFT, RIGHT, FORWARD, LEFT, RIGHT, FORWARD]) == [0, 0, 0.5, 0, 0, 0.5]
    env.reset(seed=0)
    # Three steps have led to the second cell before, and one to the third.
    assert bonuses(env, [FORWARD, FORWARD]) == pytest.approx([0.5 / 4**0.5, 0.5 / 2**0.5])


def test_a_key_and_an_open_door_make_known_positions_new() -> None:
    env = corridor()
    bonuses(env, [FORWARD, FORWARD])
    assert bonuses(env, [PICKUP, PICKUP, LEFT, LEFT, FORWARD]) == [0.5, 0, 0, 0, 0.5]
    bonuses(env, [LEFT, LEFT, FORWARD, FORWARD])
    assert bonuses(env, [FORWARD, TOGGLE, TOGGLE, TOGGLE]) == [0.5, 0.5, 0, 0]  # closed again it is not locked
    assert bonuses(env, [FORWARD]) == [0.5]


def test_the_bonus_is_added_to_the_environments_own_rewards() -> None:
    plain, wrapped = gym.make("MiniGrid-Empty-5x5-v0"), StateBonus(gym.make("MiniGrid-Empty-5x5-v0"), scale=0.5)
    plain.reset(seed=1)
    wrapped.reset(seed=1)
    for action, bonus in ((FORWARD, 0.5), (FORWARD, 0.5), (RIGHT, 0), (FORWARD, 0.5), (FORWARD, 0.5)):
        expected, got = plain.step(action), wrapped.step(action)
        assert got[1:4] == (float(expected[1]) + bonus, *expected[2:4])
    assert float(expected[1]) > 0.9
    assert got[2]


def test_counts_are_part_of_a_checkpoint() -> None:
    def make() -> Any:
        return make_vec_env(
            "MiniGrid-LockedRoom-v0",
            2,
            seed=0,
            wrapper_class=lambda env: ImgObsWrapper(StateBonus(env)),  # type: ignore[no-untyped-call]
        )

    def rewards(env: Any) -> list[Any]:
        actions = np.random.default_rng(0).integers(3, size=(300, 2))
        return [env.step(each)[1].tolist() for each in actions]

    first, second = make(), make()
    first.reset()
    rewards(first)
    second.reset()
    set_env_state(second, get_env_state(first))
    expected = rewards(first)
    assert rewards(second) == expected
    assert any(map(any, expected))


@pytest.mark.parametrize("scale", [-0.1, np.nan, "0.1"])
def test_the_scale_is_a_number(scale: Any) -> None:
    with pytest.raises(ValueError, match=f"scale must be a finite number of at least 0, got {scale!r}"):
        StateBonus(gym.make("MiniGrid-Empty-5x5-v0"), scale)
