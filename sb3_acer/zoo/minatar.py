"""
MinAtar (https://arxiv.org/abs/1903.03176): small Atari games on a grid of 10 x 10. The option ``--gym-packages
sb3_acer.zoo.minatar`` registers ``MinAtar/Breakout-v1`` and the others, with their minimal sets of actions.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from sb3_acer.extras import require_packages
from sb3_acer.policies import ACERPolicy

require_packages("MinAtar", "minatar", "minatar")
from minatar.gym import BaseEnv, register_envs  # noqa: E402

MAX_EPISODE_STEPS = 5000
"""MinAtar has no limit, and an agent that never loses would be evaluated for ever."""


FIELD_SIZE = 20
"""pixels of a field of the grid in videos"""


class MinAtarEnv(BaseEnv):  # type: ignore[misc]
    """MinAtar's environment, whose ``rgb_array`` is a picture that videos can be made of."""

    def render(self) -> Any:
        image = super().render()
        if self.render_mode != "rgb_array":
            return image
        return np.rint(255 * image).astype(np.uint8).repeat(FIELD_SIZE, 0).repeat(FIELD_SIZE, 1)


class MinAtarCnn(BaseFeaturesExtractor):
    """
    The network of MinAtar's paper: 16 filters of 3 x 3 and a layer of 128 units.

    :param observation_space: images ``[height, width, channels]``, whose channels say what is where
    """

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, 128)
        height, width, n_channels = observation_space.shape
        self.network = nn.Sequential(
            nn.Conv2d(n_channels, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), 128),
            nn.ReLU(),
        )

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: ``[N, height, width, channels]``
        :return: features, ``[N, 128]``
        """
        features: th.Tensor = self.network(observations.permute(0, 3, 1, 2))
        return features


class MinAtarPolicy(ACERPolicy):
    """One :class:`MinAtarCnn` for policy and critic."""

    default_features_extractor = MinAtarCnn


register_envs()
for spec in gym.registry.values():
    if spec.namespace == "MinAtar":
        spec.entry_point, spec.max_episode_steps = MinAtarEnv, MAX_EPISODE_STEPS
