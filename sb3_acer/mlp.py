"""The hidden layers of policy network and critic network."""

import torch as th
from stable_baselines3.common.torch_layers import create_mlp
from torch import nn


class MLP(nn.Sequential):
    """
    Hidden layers, run without the cost of calling each of them as a module, a third of a small network's time. Forward
    hooks of single layers do not run.

    :param input_dim: width of the input
    :param widths: widths of the layers
    :param activation_fn: activation function
    """

    def __init__(self, input_dim: int, widths: list[int], activation_fn: type[nn.Module]) -> None:
        super().__init__(*create_mlp(input_dim, -1, widths, activation_fn))

    def forward(self, input: th.Tensor) -> th.Tensor:
        for module in self._modules.values():
            input = module.forward(input)
        return input
