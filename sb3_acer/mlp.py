"""
The layers of policy network and critic network: one after the other, or both at once where they are alike.
"""

from collections.abc import Sequence
from typing import Any

import torch as th
from stable_baselines3.common.torch_layers import create_mlp
from torch import nn
from torch.autograd.function import once_differentiable

from sb3_acer.parameters import FlatParameters


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
        return run(tuple(self._modules.values()), input)


def run(layers: Sequence[nn.Module], x: th.Tensor) -> th.Tensor:
    """
    :param layers: modules of one input and one output
    :param x: ``[N, I]``
    :return: the output of the last layer
    """
    for layer in layers:
        x = layer.forward(x)
    return x


class Twin:
    """
    Two networks of N rows each. The numbers are those of the networks one after the other.

    The leading layers that are alike (linear layers of the same sizes, tanh, ReLU) take one batched product per layer
    for both networks, and are one node of autograd's graph. The other layers run one after the other.

    :param first: layers of one network
    :param second: layers of the other
    :param flat: parameters of both
    """

    def __init__(self, first: Sequence[nn.Module], second: Sequence[nn.Module], flat: FlatParameters) -> None:
        self.first, self.second, self.flat = tuple(first), tuple(second), flat
        self.n_alike = 0
        for one, other in zip(self.first, self.second, strict=False):
            if not (_are_alike(one, other) and all(map(flat.can_stack, one.parameters(), other.parameters()))):
                break
            self.n_alike += 1
        self.pairs: list[tuple[nn.Linear, nn.Linear]] = []
        self.activations: list[type[nn.Module] | None] = []  # after each pair of linear layers
        for one, other in zip(self.first[: self.n_alike], self.second, strict=False):
            if isinstance(one, nn.Linear) and isinstance(other, nn.Linear):
                self.pairs.append((one, other))
                self.activations.append(None)
            elif self.pairs:
                self.activations[-1] = type(one)
        self.parameters = [p for pair in self.pairs for name in _NAMES for p in _named(pair, name)]
        self._version = -1

    def __call__(self, x: th.Tensor, y: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param x: input of the first network, ``[N, I]``
        :param y: input of the second, which may be the same tensor, ``[N, I]``
        :return: the outputs of both
        """
        if not self.pairs:
            return run(self.first, x), run(self.second, y)
        both = x.expand(2, *x.shape) if x is y else th.stack((x, y))
        one, other = _TwinFunction.apply(both, self, *self.parameters)  # type: ignore[no-untyped-call]
        return run(self.first[self.n_alike :], one), run(self.second[self.n_alike :], other)

    def forward(self, both: th.Tensor) -> list[th.Tensor]:
        """Inputs ``[2, N, I]`` and the outputs of all layers."""
        if self._version != self.flat.version:
            self._stacks = [tuple(self.flat.stack(*_named(pair, name)) for name in _NAMES) for pair in self.pairs]
            self._version = self.flat.version
        outputs = [both]
        for (weight, bias), activation in zip(self._stacks, self.activations, strict=True):
            output = th.baddbmm(bias.unsqueeze(1), outputs[-1], weight.transpose(1, 2))
            outputs.append(output if activation is None else _ACTIVATIONS[activation][0](output))
        return outputs

    def backward(
        self, gradient: th.Tensor, outputs: list[th.Tensor], of_input: bool
    ) -> tuple[th.Tensor | None, list[th.Tensor]]:
        """Gradients of the input, ``[2, N, I]``, if it is asked for, and of ``parameters``."""
        found: list[th.Tensor] = []
        for layer in range(len(self.pairs) - 1, -1, -1):
            activation = self.activations[layer]
            if activation is not None:
                gradient = _ACTIVATIONS[activation][1](gradient, outputs[layer + 1])
            of_weight = gradient.transpose(1, 2).bmm(outputs[layer])
            found = [*of_weight.unbind(), *gradient.sum(1).unbind(), *found]
            if layer or of_input:
                gradient = gradient.bmm(self._stacks[layer][0])
        return (gradient if of_input else None), found


class _TwinFunction(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: th.Tensor, twin: Twin, *parameters: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        outputs = twin.forward(both)
        ctx.twin, ctx.outputs = twin, outputs
        return outputs[-1][0], outputs[-1][1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: th.Tensor, other: th.Tensor) -> tuple[th.Tensor | None, ...]:
        of_input, found = ctx.twin.backward(th.stack((one, other)), ctx.outputs, ctx.needs_input_grad[0])
        return of_input, None, *found


def _named(pair: tuple[nn.Linear, nn.Linear], name: str) -> tuple[nn.Parameter, nn.Parameter]:
    return getattr(pair[0], name), getattr(pair[1], name)


def _relu_backward(gradient: th.Tensor, output: th.Tensor) -> th.Tensor:
    return th.ops.aten.threshold_backward(gradient, output, 0)  # type: ignore[no-any-return]


_NAMES = ("weight", "bias")
_ACTIVATIONS: dict[type[nn.Module], tuple[Any, Any]] = {
    nn.Tanh: (th.tanh_, th.ops.aten.tanh_backward),
    nn.ReLU: (th.relu_, _relu_backward),
}
"""Activations by their modules: the function, in place, and its gradient from that of the output and the output."""


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    if type(one) is nn.Linear and type(other) is nn.Linear:  # subclasses may do more
        return one.weight.shape == other.weight.shape and one.bias is not None and other.bias is not None
    return type(one) is type(other) and type(one) in _ACTIVATIONS
