"""MinAtar's games and network."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from torch import nn
from torch.nn.functional import conv2d
from torch.nn.utils import parameters_to_vector

from sb3_acer import ACER
from sb3_acer.zoo.minatar import FIELD_SIZE, MinAtarCnn, MinAtarPolicy

GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


@pytest.mark.parametrize("game", GAMES)
def test_every_game_is_registered_with_a_time_limit(game: str) -> None:
    spec = gym.spec(f"MinAtar/{game}-v1")
    assert spec.max_episode_steps == 5000
    assert spec.kwargs["use_minimal_action_set"]


def test_videos_show_the_grid() -> None:
    env = gym.make("MinAtar/Breakout-v1", render_mode="rgb_array")
    env.reset(seed=0)
    frame: Any = env.render()
    assert (frame.shape, frame.dtype) == ((10 * FIELD_SIZE, 10 * FIELD_SIZE, 3), np.uint8)
    state = env.unwrapped.game.state()  # type: ignore[attr-defined]
    assert ((frame > 0).any(-1) == state.any(-1).repeat(FIELD_SIZE, 0).repeat(FIELD_SIZE, 1)).all()
    assert frame.max() > 100


def test_the_array_of_a_game_is_its_state() -> None:
    env = gym.make("MinAtar/Breakout-v1", render_mode="array")
    env.reset(seed=0)
    shown: Any = env.render()
    np.testing.assert_array_equal(shown, env.unwrapped.game.state())  # type: ignore[attr-defined]


def test_the_filters_slide_over_the_grid_and_see_all_channels_of_a_place() -> None:
    space = gym.make("MinAtar/Seaquest-v1").observation_space
    assert isinstance(space, gym.spaces.Box)
    network = MinAtarCnn(space)
    grids = th.as_tensor(np.stack([space.sample() for _ in range(4)])).float()
    conv, dense = network.network[0], network.network[3]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(dense, nn.Linear)
    maps = conv2d(th.einsum("nhwc->nchw", grids), conv.weight, conv.bias).relu()
    expected = (maps.reshape(4, -1) @ dense.weight.T + dense.bias).relu()
    th.testing.assert_close(network(grids), expected)


def test_an_agent_trains_on_the_grids_as_they_are() -> None:
    model = ACER(MinAtarPolicy, "MinAtar/Breakout-v1", replay_start=20, policy_kwargs={"net_arch": []}, seed=0)
    before = parameters_to_vector(model.policy.parameters()).clone()
    model.learn(100)
    observations = model.replay_buffer.latest().observations
    assert isinstance(observations, th.Tensor)
    assert observations.shape[-3:] == (10, 10, 4)
    assert set(observations.flatten().tolist()) == {0, 1}
    assert not before.equal(parameters_to_vector(model.policy.parameters()))
