import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch as th
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from sb3_acer.mlp import ACTIVATIONS, Chain, ForwardPass

MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "tanh": (nn.Tanh,),
    "ReLU": (nn.ReLU,),
    "both": (nn.Tanh, nn.ReLU, nn.Tanh),
    "none": (),
    "an activation that autograd differentiates": (nn.Tanh, nn.ELU),
}


def close(actual: th.Tensor, expected: th.Tensor) -> None:
    th.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def network(activations: tuple[type[nn.Module], ...], ends_with_activation: bool, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, activation in enumerate((*activations, None)):
        layers.append(nn.Linear(4 + index, 5 + index, bias=bias))
        if activation is not None:
            layers.append(activation())
    return nn.Sequential(*layers, *([nn.ReLU()] if ends_with_activation else [])).double()


def test_two_activations_in_a_row_are_both_applied() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.ReLU()), nn.Linear(4, 2)).double()
    inputs = th.randn(5, 3, dtype=th.float64)
    close(ForwardPass(Chain(nn.Sequential(module), "0"), inputs).output, module(inputs).detach())


HOOKS: dict[str, Any] = {
    "of a layer's input": lambda module, hook: module[0].register_forward_pre_hook(hook),
    "of a layer's output": lambda module, hook: module[1].register_forward_hook(hook),
    "of all": lambda module, hook: module.register_forward_hook(hook),
    "of a layer's gradient": lambda module, hook: module[2].register_full_backward_hook(hook),
    "before a layer's gradient": lambda module, hook: module[2].register_full_backward_pre_hook(hook),
    "of a parameter's gradient": lambda module, hook: module[0].weight.register_hook(hook),
    "of all modules": lambda module, hook: register_module_forward_hook(
        lambda each, *others: hook(each, *others) if each is module else None
    ),
    "of an added gradient": lambda module, hook: module[0].weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_run_while_there_are_any(register: Any) -> None:
    module, inputs = network((nn.Tanh,), False), th.randn(3, 4, dtype=th.float64)
    chain, calls = Chain(nn.Sequential(module), "0"), []

    def learn() -> list[th.Tensor]:
        module.zero_grad()
        found = ForwardPass(chain, inputs)
        rest = found.backward(th.ones_like(found.output))
        if rest is not None:
            th.autograd.backward(*rest)
        return [found.output, *(th.as_tensor(parameter.grad).clone() for parameter in module.parameters())]

    plain = learn()
    registered = register(module, lambda *args: calls.append(args))
    hooked = learn()
    assert len(calls) == 1
    registered.remove()
    for values in (hooked, learn()):
        for value, expected in zip(values, plain, strict=True):
            close(value, expected)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("normalize", [th.nn.utils.weight_norm, th.nn.utils.parametrizations.weight_norm])
def test_weights_that_are_computed_from_others_learn(normalize: Any) -> None:
    module, inputs = network((nn.Tanh,), False), th.randn(3, 4, dtype=th.float64)
    normalize(module[0])
    expected = th.autograd.grad(module(inputs).sum(), list(module.parameters()))
    found = ForwardPass(Chain(nn.Sequential(module), "0"), inputs)
    rest = found.backward(th.ones_like(found.output))
    assert rest is not None
    th.autograd.backward(*rest)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        close(th.as_tensor(parameter.grad), gradient)


class Shifted(nn.Linear):
    def forward(self, input: th.Tensor) -> th.Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize("layer", [Shifted(4, 4), nn.LayerNorm(4)], ids=lambda layer: type(layer).__name__)
def test_only_torchs_own_linear_layers_are_taken_for_such(layer: nn.Module) -> None:
    module, inputs = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)).double(), th.randn(3, 4, dtype=th.float64)
    chain = Chain(nn.Sequential(module), "0")
    expected = module(inputs)
    for output in (chain(inputs), ForwardPass(chain, inputs).output):
        close(output, expected)
    assert chain.of_array(inputs.numpy()) is None


@pytest.mark.parametrize("activations", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("change", ["none", "no bias", "frozen", "all frozen", "ends with an activation"])
@pytest.mark.parametrize("input_learns", [True, False])
def test_passes_have_the_outputs_and_gradients_of_their_modules(
    activations: tuple[type[nn.Module], ...], change: str, input_learns: bool
) -> None:
    th.manual_seed(0)
    module = network(activations, change == "ends with an activation", change != "no bias")
    if change == "frozen":
        module[0].weight.requires_grad_(False)
    if change == "all frozen":
        module.requires_grad_(False)
    tensors = [th.randn(7, 4, dtype=th.float64, requires_grad=input_learns), *module.parameters()]
    chain, gradient = Chain(nn.Sequential(module), "0"), th.randn(7, 4 + len(activations) + 1, dtype=th.float64)
    expected = module(tensors[0])
    if expected.requires_grad:
        expected.backward(gradient)
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    ours = ForwardPass(chain, tensors[0])
    assert not ours.output.requires_grad
    for output in (ours.output, chain(tensors[0])):
        close(output, expected)
    rest = ours.backward(gradient)
    if rest is not None:
        th.autograd.backward(*rest)
    for tensor, theirs in zip(tensors, gradients, strict=True):
        assert (tensor.grad is None) == (theirs is None)
        if theirs is not None:
            close(th.as_tensor(tensor.grad), theirs)


@pytest.mark.parametrize("activations", [MODULES[name] for name in ("tanh", "ReLU", "both", "none")], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_chains_of_arrays_have_the_outputs_of_their_modules(
    activations: tuple[type[nn.Module], ...], bias: bool
) -> None:
    modules, inputs = network(activations, True, bias), th.randn(6, 4, dtype=th.float64)
    chain, given = Chain(nn.Sequential(modules), "0"), inputs.numpy().copy()
    for _ in range(2):
        close(th.from_numpy(chain.of_array(given)), modules(inputs).detach())
        assert (given == inputs.numpy()).all()
        for parameter in modules.parameters():
            parameter.data = th.randn_like(parameter)  # other memory


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.__name__)
def test_activations_that_overwrite_can_be_used_where_gradients_are_recorded(activation: type[nn.Module]) -> None:
    given = th.randn(6, 4, dtype=th.float64, requires_grad=True)
    output = ACTIVATIONS[activation].overwriting(1 * given)
    expected = activation()(given)
    close(output, expected)
    close(*(th.autograd.grad(each.sum(), given)[0] for each in (output, expected)))


def test_threads_may_begin_together() -> None:
    module, given = network((nn.Tanh,), False), np.ones((2, 4))
    expected = module(th.from_numpy(given)).detach()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            for _ in range(300):
                chain = Chain(nn.Sequential(module), "0")
                for output in pool.map(chain.of_array, [given] * 3):
                    close(th.as_tensor(output), expected)
    finally:
        sys.setswitchinterval(before)


def test_gradients_are_added_to_what_is_there() -> None:
    module = network((nn.Tanh,), False)
    chain, inputs = Chain(nn.Sequential(module), "0"), th.randn(3, 4, dtype=th.float64)
    gradients = []
    for _ in range(2):
        found = ForwardPass(chain, inputs)
        assert found.backward(th.ones_like(found.output)) is None
        gradients.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    for once, twice in zip(*gradients, strict=True):
        close(twice, 2 * once)
