from typing import Any

import pytest
import torch as th
from torch import nn

from sb3_acer.mlp import MLP, Chain, run_chains

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


@pytest.mark.parametrize("hidden", [[], [5], [5, 7, 3]], ids=str)
@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU])
def test_hidden_layers_compute_what_their_modules_do(hidden: list[int], activation_fn: type[nn.Module]) -> None:
    layers, inputs = MLP(4, hidden, activation_fn), th.randn(6, 4, requires_grad=True)
    plain = nn.Sequential(*layers)
    assert th.equal(layers(inputs), plain(inputs))
    ours, theirs = (th.autograd.grad(module(inputs).square().sum(), inputs)[0] for module in (layers, plain))
    assert th.equal(ours, theirs)
    assert [layer.out_features for layer in layers if isinstance(layer, nn.Linear)] == hidden
    assert layers.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("activations", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("change", ["none", "no bias", "frozen", "ends with an activation"])
@pytest.mark.parametrize("input_learns", [True, False])
def test_chains_have_the_outputs_and_gradients_of_their_modules(
    activations: tuple[type[nn.Module], ...], change: str, input_learns: bool
) -> None:
    th.manual_seed(0)
    modules = [network(activations, change == "ends with an activation", change != "no bias") for _ in range(2)]
    if change == "frozen":
        modules[0][0].weight.requires_grad_(False)
        modules[1].requires_grad_(False)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    inputs = th.randn(7, 4, dtype=th.float64, requires_grad=input_learns)  # one input for both
    found: list[list[Any]] = []
    chains = [Chain(module) for module in modules]
    for by_hand in (False, True):
        for tensor in (inputs, *parameters):
            tensor.grad = None
        outputs = run_chains(chains, (inputs, inputs)) if by_hand else [module(inputs) for module in modules]
        losses = [(index + 1) * output.square().sum() for index, output in enumerate(outputs)]
        th.autograd.backward([loss for loss in losses if loss.requires_grad])
        found.append([*outputs, *(tensor.grad for tensor in (inputs, *parameters))])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            close(ours, theirs)
    close(chains[0](inputs), found[0][0])


@pytest.mark.parametrize("activations", [MODULES[name] for name in ("tanh", "ReLU", "both", "none")], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_chains_of_arrays_have_the_outputs_of_their_modules(
    activations: tuple[type[nn.Module], ...], bias: bool
) -> None:
    modules, inputs = network(activations, True, bias), th.randn(6, 4, dtype=th.float64)
    chain, given = Chain(modules), inputs.numpy().copy()
    for _ in range(2):
        close(th.from_numpy(chain.of_array(given)), modules(inputs).detach())
        assert (given == inputs.numpy()).all()
        for parameter in modules.parameters():
            parameter.data = th.randn_like(parameter)  # other memory


def test_gradients_of_chains_are_added_to_what_is_there() -> None:
    module = network((nn.Tanh,), False)
    chain, inputs = Chain(module), th.randn(3, 4, dtype=th.float64)
    gradients = []
    for _ in range(2):
        (output,) = run_chains((chain,), (inputs,))
        th.autograd.backward(output.sum())
        gradients.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
    for once, twice in zip(*gradients, strict=True):
        close(twice, 2 * once)


def test_an_output_without_a_gradient_leaves_its_chain_alone() -> None:
    modules = [network((nn.Tanh,), False) for _ in range(2)]
    inputs = th.randn(3, 4, dtype=th.float64)
    outputs = run_chains([Chain(module) for module in modules], (inputs, inputs))
    th.autograd.backward(outputs[1].sum())
    assert all(parameter.grad is None for parameter in modules[0].parameters())
    assert all(parameter.grad is not None for parameter in modules[1].parameters())


def test_chains_have_no_gradients_where_none_are_recorded() -> None:
    chain, inputs = Chain(network((nn.Tanh,), False)), th.randn(3, 4, dtype=th.float64)
    with th.no_grad():
        assert not run_chains((chain,), (inputs,))[0].requires_grad
