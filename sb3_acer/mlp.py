"""Fully connected networks, and how an update runs them in few operations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from torch import nn
from torch.nn import functional as F


class Activation(NamedTuple):
    """An activation function in the forms that a :class:`Chain` needs."""

    function: Callable[[th.Tensor], th.Tensor]
    overwriting: Callable[[th.Tensor], th.Tensor]
    """the same of a tensor that may be overwritten"""
    backward: Callable[[th.Tensor, th.Tensor], th.Tensor]
    """gradient with respect to the input, from the gradient with respect to the output and the output"""
    of_array: Callable[[np.ndarray], np.ndarray]
    """the same of an array, in place"""

    def __reduce__(self) -> Any:  # its functions cannot be pickled
        return _activation, (next(module for module, own in ACTIVATIONS.items() if own is self),)


def _activation(module: type[nn.Module]) -> Activation:
    return ACTIVATIONS[module]


def _tanh_overwriting(input: th.Tensor) -> th.Tensor:
    if input.is_cpu and input.dtype in (th.float32, th.float64) and not input.requires_grad:
        array = input.numpy()
        np.tanh(array, out=array)  # in a quarter of torch's time, or less
        return input
    return input.tanh_()


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(
        th.tanh,
        _tanh_overwriting,
        th.ops.aten.tanh_backward.default,
        lambda array: np.tanh(array, out=array),
    ),
    nn.ReLU: Activation(
        th.relu,
        th.relu_,
        lambda gradient, output: th.ops.aten.threshold_backward(gradient, output, 0),
        lambda array: np.maximum(array, 0, out=array),
    ),
}
"""activation functions that a :class:`Chain` differentiates itself"""


class Layer(NamedTuple):
    """``activation(x @ weight.T + bias)`` of inputs x, ``[N, I]``."""

    weight: th.Tensor
    """``[O, I]``"""
    bias: th.Tensor | None
    """``[O]``; None for 0"""
    activation: Activation | None
    """None for the identity"""


class Chain:
    """
    Modules one after another, as in ``nn.Sequential``. Linear layers with tanh or ReLU between them are run without
    calling modules, which saves a third of a small network's time, and are differentiated by hand, see
    :class:`ForwardPass`. Other modules are called, and so are all while one of them has a hook.

    :param modules: the modules; the parts of an ``nn.Sequential`` count as single modules
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        parts = [part for module in modules for part in module.modules()]
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        self._hooks: list[dict[int, Any]] = [getattr(part, kind) for part in parts for kind in kinds]
        self._layers = None if any(self._hooks) else _find_layers(list(_flatten(modules)))
        self._parameters = [part for layer in self._layers or [] for part in layer[:2] if part is not None]
        self._places: list[int] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray | None, Activation | None]] = []  # the layers' own memory

    @property
    def layers(self) -> list[Layer] | None:
        """None for a chain whose modules have to be called"""
        return None if any(self._hooks) else self._layers

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": [], "_arrays": []}

    def __call__(self, input: th.Tensor) -> th.Tensor:
        layers = self.layers
        if layers is None:
            for module in self._modules:
                input = module(input)
            return input
        for weight, bias, activation in layers:
            input = F.linear(input, weight, bias)
            if activation is not None:
                input = activation.function(input)
        return input

    def without_gradients(self, input: th.Tensor) -> th.Tensor:
        """
        :param input: ``[N, I]``
        :return: the output, ``[N, O]``
        """
        if self.layers is not None:
            return self.forward(input)[-1]
        with th.no_grad():
            return self(input)

    def of_array(self, input: np.ndarray) -> np.ndarray:
        """
        The output for a few rows on the CPU, by numpy: its calls cost less than torch's.

        :param input: ``[N, I]``
        :return: ``[N, O]``
        """
        assert self._layers is not None
        places = [parameter.data_ptr() for parameter in self._parameters]
        if self._places != places:  # the parameters have been moved
            self._places = places
            self._arrays = [
                (weight.data.numpy().T, None if bias is None else bias.data.numpy(), activation)
                for weight, bias, activation in self._layers
            ]
        for weight, bias, activation in self._arrays:
            input = input @ weight
            if bias is not None:
                input += bias
            if activation is not None:
                input = activation.of_array(input)
        return input

    def forward(self, input: th.Tensor) -> list[th.Tensor]:
        """
        :param input: ``[N, I]``
        :return: the input, and the outputs of all layers after it, without gradients
        """
        assert self._layers is not None
        outputs = [input.detach()]
        with th.no_grad():
            for weight, bias, activation in self._layers:
                output = F.linear(outputs[-1], weight, bias)
                outputs.append(output if activation is None else activation.overwriting(output))
        return outputs

    def backward(self, outputs: Sequence[th.Tensor], gradient: th.Tensor, input_too: bool) -> th.Tensor | None:
        """
        Add the parameters' gradients to their ``grad``.

        :param outputs: what :meth:`forward` returned
        :param gradient: with respect to the last output
        :param input_too: whether the gradient with respect to the input is needed
        :return: the gradient with respect to the input
        """
        assert self._layers is not None
        for index in range(len(self._layers) - 1, -1, -1):
            weight, bias, activation = self._layers[index]
            if activation is not None:
                gradient = activation.backward(gradient, outputs[index + 1])
            add_product(weight, gradient.t(), outputs[index])
            if bias is not None:
                add_gradient(bias, gradient.sum(0))
            if index or input_too:
                gradient = gradient.mm(weight)
        return gradient if input_too else None


class ForwardPass:
    """
    A forward pass through a chain, and the backward pass. Linear layers with tanh or ReLU are differentiated by hand:
    autograd's record of each operation is a third of a small network's time. The backward pass adds to ``grad`` of the
    parameters, as autograd's does.

    :param chain: the chain
    :param input: ``[N, I]``
    """

    def __init__(self, chain: Chain, input: th.Tensor) -> None:
        self._chain, self._input = chain, input
        self._by_hand = chain.layers is not None
        if not self._by_hand:
            with th.inference_mode(False), th.enable_grad():
                self._outputs = [chain(input)]
        else:
            self._outputs = chain.forward(input)
        self.output = self._outputs[-1].detach()
        """``[N, O]``, without gradients"""

    def backward(self, gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor] | None:
        """
        :param gradient: with respect to the output, ``[N, O]``
        :return: a tensor from which autograd has to go on, and the gradient with respect to it; None if there is none
        """
        if not self._by_hand:
            output = self._outputs[-1]
            return (output, gradient) if output.requires_grad else None
        input_gradient = self._chain.backward(self._outputs, gradient, self._input.requires_grad)
        return None if input_gradient is None else (self._input, input_gradient)


def _flatten(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if type(module) is nn.Sequential:
            yield from _flatten(list(module.children()))
        else:
            yield module


def _find_layers(modules: Sequence[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for module in modules:
        if type(module) is nn.Linear:
            layers.append(Layer(module.weight, module.bias, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
        else:
            return None
    return layers


def add_gradient(parameter: th.Tensor, gradient: th.Tensor) -> None:
    """Add to a parameter's ``grad``, unless it is frozen, and run its hooks, as a backward pass of autograd does."""
    if not parameter.requires_grad:
        return
    if _has_hooks(parameter):
        with th.inference_mode(False):
            th.autograd.backward([parameter], [gradient.clone()])
    else:
        _gradient_of(parameter).add_(gradient)


def add_product(parameter: th.Tensor, left: th.Tensor, right: th.Tensor) -> None:
    """:func:`add_gradient` of the product of two matrices."""
    if _has_hooks(parameter):
        add_gradient(parameter, left @ right)
    elif parameter.requires_grad:
        _gradient_of(parameter).addmm_(left, right)


def _has_hooks(parameter: th.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _gradient_of(parameter: th.Tensor) -> th.Tensor:
    if parameter.grad is None:
        parameter.grad = th.zeros_like(parameter)
    return parameter.grad
