"""Fully connected networks, and how an update runs them in few operations."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn
from torch.nn import functional as F

from sb3_acer.checks import require


class Activation(NamedTuple):
    """An activation function in the forms that a :class:`Chain` needs."""

    function: Callable[[th.Tensor], th.Tensor]
    overwriting: Callable[[th.Tensor], th.Tensor]
    """the same of a tensor that may be overwritten"""
    backward: Callable[[th.Tensor, th.Tensor], th.Tensor]
    """gradient with respect to the input, from the gradient with respect to the output and the output"""
    of_array: Callable[[np.ndarray], np.ndarray]
    """``function`` of an array, in place"""


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

_IDENTITIES = (nn.Identity, FlattenExtractor)
"""modules that a :class:`Chain` leaves out: they change nothing of inputs ``[N, I]``"""


class Layer(NamedTuple):
    """``activation(x @ weight.T + bias)`` of inputs x, ``[N, I]``."""

    weight: th.Tensor
    """``[O, I]``"""
    bias: th.Tensor | None
    """``[O]``; None for 0"""
    activation: Activation | None
    """None for the identity"""


_Arrays = list[tuple[np.ndarray, np.ndarray | None, Activation | None]]
"""layers by their arrays, with transposed weights"""


class _Parts(NamedTuple):
    """What a :class:`Chain` has found in its modules, and what it needs to notice that they were changed."""

    modules: list[nn.Module]
    layers: list[Layer] | None
    hooks: list[dict[int, Any]]
    attributes: list[dict[str, Any]]
    """of all modules: one may be given a ``forward`` of its own"""
    members: list[dict[str, Any]]
    """the modules' own dicts of their parts and parameters, which a program may change"""
    held: list[Any]
    """what was in ``members``"""

    def are_current(self) -> bool:
        """Whether ``members`` still hold the same objects. This takes a tenth of the time of finding layers."""
        present = [member for each in self.members for member in each.values()]
        return len(present) == len(self.held) and all(map(operator.is_, present, self.held))


class Chain:
    """
    Modules one after another, as in ``nn.Sequential``. Linear layers with tanh or ReLU between them are run without
    calling modules, which saves a third of a small network's time, and are differentiated by hand, see
    :class:`ForwardPass`. Other modules are called, and so are all while one of them has a hook.

    :param owner: the module that has the modules; they, their parts and their parameters may be replaced at any time
    :param names: the names of the modules, as in ``owner.named_modules()``
    """

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self._owner, self._names = owner, names
        self._parts: _Parts | None = None
        self._memory: tuple[list[Layer] | None, list[int], _Arrays | None] = None, [], None

    def __reduce__(self) -> Any:
        return type(self), (self._owner, *self._names)

    @property
    def layers(self) -> list[Layer] | None:
        """None for a chain whose modules have to be called"""
        parts = self._find_parts()
        replaced = any(parts.hooks) or any("forward" in attributes for attributes in parts.attributes)
        return None if replaced else parts.layers

    def _find_parts(self) -> _Parts:
        parts = self._parts
        if parts is None or not parts.are_current():
            parts = self._parts = self._examine()  # in one assignment: other threads may act with the same policy
        return parts

    def _examine(self) -> _Parts:
        chained = [self._owner.get_submodule(name) for name in self._names]
        parents = [self._owner.get_submodule(name.rpartition(".")[0]) for name in self._names]
        modules = [module for each in chained for module in each.modules()]
        owners = dict.fromkeys([*parents, *modules])
        members: list[dict[str, Any]] = [each._parameters for each in owners if each._parameters]
        members += [each._modules for each in owners if each._modules or isinstance(each, nn.Sequential)]
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        return _Parts(
            modules=chained,
            layers=_find_layers(_flatten(chained)),
            hooks=[
                *(getattr(module, kind) for module in modules for kind in kinds),
                *(getattr(nn.modules.module, f"_global{kind}") for kind in kinds),
            ],
            attributes=[vars(module) for module in modules],
            members=members,
            held=[member for each in members for member in each.values()],
        )

    def __call__(self, input: th.Tensor) -> th.Tensor:
        layers = self.layers
        if layers is None:
            for module in self._find_parts().modules:
                input = module(input)
            return input
        for weight, bias, activation in layers:
            input = F.linear(input, weight, bias)
            if activation is not None:
                input = activation.function(input)
        return input

    def of_array(self, input: np.ndarray) -> np.ndarray | None:
        """
        The output for a few rows by numpy, whose calls cost less than torch's.

        :param input: ``[N, I]``, of any type
        :return: ``[N, O]``, in the parameters' type; None if modules have to be called, or if the weights are not on
            the CPU in float32 or float64
        """
        layers = self.layers
        if not layers:
            return None
        places = [part.data_ptr() for weight, bias, _ in layers for part in (weight, bias) if part is not None]
        known, known_places, arrays = self._memory
        if known is not layers or known_places != places:  # others have been found, or they have been moved
            arrays = _arrays_of(layers)
            self._memory = layers, places, arrays
        if arrays is None:
            return None
        input = input.astype(arrays[0][0].dtype, copy=False)
        for weight, bias, activation in arrays:
            input = input @ weight
            if bias is not None:
                input += bias
            if activation is not None:
                input = activation.of_array(input)
        return input


class ForwardPass:
    """
    A forward pass through a chain, and the backward pass. Linear layers with tanh or ReLU are differentiated by hand:
    autograd's record of each operation is a third of a small network's time. The backward pass adds to ``grad`` of the
    parameters, as autograd's does.

    :param chain: the chain
    :param input: ``[N, I]``
    """

    def __init__(self, chain: Chain, input: th.Tensor) -> None:
        self._input = input
        self._layers = chain.layers
        if self._layers is None:
            with th.inference_mode(False), th.enable_grad():
                self._outputs = [chain(input)]
        else:
            self._outputs = _outputs(self._layers, input)
        self.output = self._outputs[-1].detach()
        """``[N, O]``, without gradients"""

    def backward(self, gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor] | None:
        """
        :param gradient: with respect to the output, ``[N, O]``
        :return: a tensor from which autograd has to go on, and the gradient with respect to it; None if there is none
        """
        if self._layers is None:
            output = self._outputs[-1]
            return (output, gradient) if output.requires_grad else None
        for index in range(len(self._layers) - 1, -1, -1):
            weight, bias, activation = self._layers[index]
            if activation is not None:
                gradient = activation.backward(gradient, self._outputs[index + 1])
            add_product(weight, gradient.t(), self._outputs[index])
            if bias is not None:
                add_gradient(bias, gradient.sum(0))
            if index or self._input.requires_grad:
                gradient = gradient.mm(weight)
        return (self._input, gradient) if self._input.requires_grad else None


def _outputs(layers: Sequence[Layer], input: th.Tensor) -> list[th.Tensor]:
    """The input, ``[N, I]``, and the outputs of all layers after it, without gradients."""
    outputs = [input.detach()]
    with th.no_grad():
        for weight, bias, activation in layers:
            output = F.linear(outputs[-1], weight, bias)
            outputs.append(output if activation is None else activation.overwriting(output))
    return outputs


def _arrays_of(layers: Sequence[Layer]) -> _Arrays | None:
    """The layers' own memory, weights transposed; None unless that is on the CPU in float32 or float64."""
    weights = [layer.weight for layer in layers]
    if not all(weight.is_cpu and weight.dtype in (th.float32, th.float64) for weight in weights):
        return None
    return [
        (weight.data.numpy().T, None if bias is None else bias.data.numpy(), activation)
        for weight, bias, activation in layers
    ]


def _flatten(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules and the parts of each ``nn.Sequential``, without modules that return what they are given."""
    for module in modules:
        if type(module) is nn.Sequential:
            yield from _flatten(module)
        elif type(module) not in _IDENTITIES:
            yield module


def _find_layers(modules: Iterable[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for module in modules:
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and weight is not None:
            layers.append(Layer(weight, module._parameters.get("bias"), None))
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
    else:  # frozen, or no parameter: what a parametrization makes of one would never be learnt
        rule = "one of plain layers, without parametrizations"
        require(isinstance(parameter, nn.Parameter), "q_head", rule, type(parameter).__name__)


def _has_hooks(parameter: th.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _gradient_of(parameter: th.Tensor) -> th.Tensor:
    if parameter.grad is None:
        parameter.grad = th.zeros_like(parameter)
    return parameter.grad
