"""Two networks at once give the numbers of the networks one after the other, and so do their gradients."""

import copy
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from torch import nn

from sb3_acer.mlp import MLP, Twin, run
from sb3_acer.parameters import FlatParameters
from sb3_acer.policies import ACERPolicy, MlpPolicy

WIDTHS: dict[str, tuple[list[int], list[int], int]] = {
    # widths of both networks, and how many leading layers are alike
    "alike": ([5, 4], [5, 4], 5),
    "another second layer": ([5, 4], [5, 3], 2),
    "another first layer": ([5, 4], [6, 4], 0),
    "one layer more": ([5], [5, 4], 2),
    "none": ([], [], 1),
}
ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.ELU]


class Networks(nn.Module):
    """Two networks that end with a linear layer each."""

    def __init__(self, widths: tuple[list[int], list[int]], activation_fn: type[nn.Module]) -> None:
        super().__init__()
        th.manual_seed(0)
        self.first, self.second = (MLP(3, each, activation_fn) for each in widths)
        self.heads = nn.ModuleList(nn.Linear((each or [3])[-1], 2) for each in widths)
        self.double()
        self.flat = FlatParameters(self)
        self.layers = (*self.first, self.heads[0]), (*self.second, self.heads[1])
        self.twin = Twin(*self.layers, self.flat)


def gradients(networks: Networks, outputs: tuple[th.Tensor, th.Tensor], *inputs: th.Tensor) -> list[th.Tensor]:
    weights = [th.randn(output.shape, generator=th.Generator().manual_seed(1)).double() for output in outputs]
    return list(th.autograd.grad(outputs, (*inputs, *networks.parameters()), weights, materialize_grads=True))


@pytest.mark.parametrize("activation_fn", ACTIVATIONS)
@pytest.mark.parametrize(("first", "second", "n_alike"), WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("same_input", [True, False], ids=["one input", "two inputs"])
def test_outputs_and_gradients_are_those_of_the_networks_one_by_one(
    same_input: bool, first: list[int], second: list[int], n_alike: int, activation_fn: type[nn.Module]
) -> None:
    networks = Networks((first, second), activation_fn)
    assert networks.twin.n_alike == (n_alike if activation_fn is not nn.ELU else min(n_alike, 1))
    x = th.randn(7, 3, dtype=th.float64, requires_grad=True)
    y = x if same_input else th.randn(7, 3, dtype=th.float64, requires_grad=True)
    found = networks.twin(x, y)
    expected = run(networks.layers[0], x), run(networks.layers[1], y)
    inputs = (x,) if same_input else (x, y)
    pairs = zip(
        (*found, *gradients(networks, found, *inputs)),
        (*expected, *gradients(networks, expected, *inputs)),
        strict=True,
    )
    for ours, theirs in pairs:
        th.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU])
def test_an_output_that_is_not_used_has_no_gradients(activation_fn: type[nn.Module]) -> None:
    networks = Networks(([5, 4], [5, 4]), activation_fn)
    one, _ = networks.twin(*[th.randn(20, 3, generator=th.Generator().manual_seed(3)).double()] * 2)
    (one - 1).square().sum().backward()  # type: ignore[no-untyped-call]
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in networks.first.parameters())
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in networks.second.parameters())


def test_changed_moved_and_copied_parameters_are_those_that_count() -> None:
    networks = Networks(([5, 4], [5, 4]), nn.Tanh)
    x = th.randn(4, 3, dtype=th.float64)

    def check(networks: Networks) -> None:
        with th.no_grad():
            for network, output in zip(networks.layers, networks.twin(x, x), strict=True):
                th.testing.assert_close(output, run(network, x), rtol=1e-12, atol=1e-12)

    check(networks)
    with th.no_grad():
        for parameter in networks.parameters():
            parameter.mul_(1.5)
    check(networks)
    copied = copy.deepcopy(networks)
    with th.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    check(copied)
    check(networks)
    networks.float()
    networks.flat.attach()
    networks.double()
    networks.flat.attach()
    check(networks)


class Linear(nn.Linear):
    """A linear layer of a user's, which does more."""

    def forward(self, input: th.Tensor) -> th.Tensor:
        return super().forward(input) + 1


def test_a_layer_of_another_class_runs_as_it_is() -> None:
    one, other, x = Linear(3, 2), Linear(3, 2), th.randn(4, 3)
    twin = Twin([one], [other], FlatParameters(nn.ModuleList([one, other])))
    for layer, output in zip((one, other), twin(x, x), strict=True):
        assert th.equal(output, layer(x))


@pytest.mark.parametrize("action_space", [spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)], ids=str)
@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU])
def test_a_policy_evaluates_as_if_its_networks_were_not_alike(
    action_space: spaces.Space[Any], activation_fn: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.Box(-1, 1, (3,))
    policy: ACERPolicy = MlpPolicy(space, action_space, lambda _: 1e-3, activation_fn=activation_fn).double()
    generator = th.Generator().manual_seed(2)
    observations = th.randn(6, 2, 3, generator=generator).double()
    actions = th.as_tensor(np.stack([policy.family.from_env(action_space.sample()) for _ in range(10)]))
    actions = actions.view(5, 2, -1).to(th.float64 if isinstance(action_space, spaces.Box) else th.int64)
    ends, states = th.zeros(5, 2, dtype=th.bool), th.zeros(2, 0)

    def evaluated() -> list[th.Tensor]:
        rng, none = np.random.default_rng(0), th.zeros(0, dtype=th.int64)
        found = policy.evaluate(observations, actions, states, ends, th.zeros(0, 3), none, 3, rng)
        policy.flat.zero_grad()
        (found.stats.square().sum() + found.q_values.square().sum() + found.values.sum()).backward()  # type: ignore[no-untyped-call]
        return [*found, *(parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None)]

    at_once = evaluated()
    assert policy.twin.pairs
    monkeypatch.setattr(policy.twin, "pairs", [])
    for ours, theirs in zip(at_once, evaluated(), strict=True):
        th.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
