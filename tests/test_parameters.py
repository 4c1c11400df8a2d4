"""One vector has the same steps, norms and averages as the parameters one by one."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from sb3_acer import ACER
from sb3_acer.parameters import ELEMENTWISE, FlatParameters
from sb3_acer.policies import ACERPolicy, MlpPolicy
from tests.helpers import Catch

ELEMENTWISE_BY_NAME = sorted(ELEMENTWISE, key=lambda each: str(each))
RMSPROP: list[dict[str, Any]] = [
    {"alpha": 0.5, "eps": 0.1},
    {"momentum": 0.9},
    {"centered": True},
    {"weight_decay": 0.1},
]
OPTIMIZERS = [*((each, {}) for each in ELEMENTWISE_BY_NAME), *((RMSpropTFLike, kwargs) for kwargs in RMSPROP)]


def a_network(dtype: th.dtype = th.float64) -> nn.Sequential:
    th.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    return network.to(memory_format=th.channels_last)  # type: ignore[call-overload, no-any-return]


def images(network: nn.Module) -> th.Tensor:
    return th.randn(4, 2, 3, 3, generator=th.Generator().manual_seed(1), dtype=next(network.parameters()).dtype)


def loss_of(network: nn.Module) -> th.Tensor:
    loss: th.Tensor = (network(images(network)) - 1).square().sum()
    return loss


def learn(network: nn.Module, optimizer: th.optim.Optimizer, n_steps: int) -> None:
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss_of(network).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class ToFloat(nn.Module):
    """The same numbers as float32."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return x.float()


def is_flat(flat: FlatParameters) -> bool:
    """Whether parameters and gradients are views of the vectors."""
    memory = [range(vector.data_ptr(), vector.data_ptr() + vector.nbytes) for vector in flat.vectors]
    if not all(any(parameter.data_ptr() in part for part in memory) for parameter in flat.parameters):
        return False
    flat.zero_grad()
    for vector in flat.vectors:
        if vector.grad is not None:
            vector.grad.fill_(1.0)
    learnt = [parameter for parameter in flat.parameters if parameter.requires_grad]
    return all(parameter.grad is not None and (parameter.grad == 1).all() for parameter in learnt)


def test_values_shapes_and_order_of_memory_stay() -> None:
    network, same = a_network(), a_network()
    flat = FlatParameters(network)
    assert len(flat.vectors) == 1
    for (name, ours), theirs in zip(network.named_parameters(), same.parameters(), strict=True):
        assert th.equal(ours, theirs), name
        assert ours.stride() == theirs.stride(), name
    first: Any = network[0]
    assert first.weight.is_contiguous(memory_format=th.channels_last)
    assert th.equal(network(images(network)), same(images(same)))
    assert is_flat(flat)


@pytest.mark.parametrize(("optimizer_class", "kwargs"), OPTIMIZERS, ids=str)
def test_steps_equal_those_of_single_parameters(
    optimizer_class: Callable[..., th.optim.Optimizer], kwargs: dict[str, Any]
) -> None:
    network, same = a_network(), a_network()
    flat = FlatParameters(network)
    ours = flat.make_optimizer(optimizer_class, 1e-2, kwargs)
    theirs = optimizer_class(same.parameters(), lr=1e-2, **kwargs)
    assert len(ours.param_groups[0]["params"]) == 1
    learn(network, ours, 20)
    learn(same, theirs, 20)
    for own, other, before in zip(network.parameters(), same.parameters(), a_network().parameters(), strict=True):
        th.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
        assert not th.equal(own, before)


@pytest.mark.parametrize("option", ["foreach", "capturable", "differentiable"])
def test_adam_is_not_fused_where_an_option_excludes_it(option: str) -> None:
    optimizer = FlatParameters(a_network()).make_optimizer(th.optim.Adam, 1e-2, {option: True})
    assert optimizer.defaults[option]
    assert not optimizer.defaults["fused"]


def test_a_parameter_whose_gradient_was_removed_stays() -> None:
    network = a_network()
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(th.optim.SGD, 0.1, {})
    loss_of(network).backward()  # type: ignore[no-untyped-call]
    removed, kept, *_ = network.parameters()
    removed.grad = None
    before = removed.detach().clone(), kept.detach().clone()
    optimizer.step()
    assert th.equal(removed, before[0])
    assert not th.equal(kept, before[1])


class ByShape(th.optim.SGD):
    """A user's optimiser, which treats matrices in its own way."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.div_(parameter.grad.norm() + 1)
        return super().step(closure)


class OwnAdam(th.optim.Adam):
    """A user's optimiser with moments, which move a parameter whose gradient is 0."""


def test_another_optimizer_gets_the_single_parameters() -> None:
    network, same = a_network(), a_network()
    flat = FlatParameters(network)
    ours, theirs = flat.make_optimizer(ByShape, 0.1, {}), ByShape(same.parameters(), lr=0.1)
    assert ours.param_groups[0]["params"] == list(network.parameters())
    learn(network, ours, 5)
    learn(same, theirs, 5)
    for own, other in zip(network.parameters(), same.parameters(), strict=True):
        th.testing.assert_close(own, other)


@pytest.mark.parametrize("bound", [0.1, 0.9, 1.1, None], ids=lambda bound: f"{bound} of the norm")
def test_the_norm_is_of_all_gradients_together(bound: float | None) -> None:
    network, same = a_network(), a_network()
    flat = FlatParameters(network)
    flat.zero_grad()
    loss_of(network).backward()  # type: ignore[no-untyped-call]
    loss_of(same).backward()  # type: ignore[no-untyped-call]
    max_norm = None if bound is None else bound * flat.clip_grad_norm(None)
    norm = flat.clip_grad_norm(max_norm)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(same.parameters(), max_norm or math.inf).item(), rel=1e-9)
    for own, other in zip(network.parameters(), same.parameters(), strict=True):
        th.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-12)


def test_gradients_do_not_add_up_even_if_somebody_has_removed_or_replaced_them() -> None:
    network, same = a_network(), a_network()
    for each in (network, same):
        each[-1].float()
        each.insert(len(each) - 1, ToFloat())
    flat = FlatParameters(network)
    assert len(flat.vectors) == 2
    loss_of(same).backward()  # type: ignore[no-untyped-call]
    for change in ("none", "removed", "replaced", "none"):
        if change == "removed":
            network.zero_grad(set_to_none=True)
        if change == "replaced":
            for own in network.parameters():
                own.grad = th.ones_like(own)
        flat.zero_grad()
        loss_of(network).backward()  # type: ignore[no-untyped-call]
        for own, other in zip(network.parameters(), same.parameters(), strict=True):
            assert own.grad is not None
            th.testing.assert_close(own.grad, other.grad)
    assert is_flat(flat)


@pytest.mark.parametrize("optimizer_class", [RMSpropTFLike, th.optim.Adam])
def test_hooks_run_before_and_after_a_step(optimizer_class: Callable[..., th.optim.Optimizer]) -> None:
    network, seen = a_network(), []
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(optimizer_class, 0.1, {})
    weight: Any = network[0].weight
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().clone()))
    before = weight.detach().clone()
    flat.zero_grad()
    loss_of(network).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert len(seen) == 2
    assert th.equal(seen[0], before)
    assert th.equal(seen[1], weight)
    assert not th.equal(*seen)


def test_a_parameter_that_an_update_does_not_reach_stays() -> None:
    network = a_network()
    network.register_parameter("unused", nn.Parameter(th.ones(3, dtype=th.float64)))
    flat = FlatParameters(network)
    for optimizer_class in (RMSpropTFLike, th.optim.Adam):
        optimizer = flat.make_optimizer(optimizer_class, 0.1, {})
        for _ in range(3):
            flat.zero_grad()
            loss_of(network).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert (network.unused == 1).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer_class", [RMSpropTFLike, th.optim.Adam, ByShape, OwnAdam, th.optim.ASGD])
def test_a_parameter_that_is_frozen_before_or_later_stays(optimizer_class: Callable[..., th.optim.Optimizer]) -> None:
    network = a_network()
    network[0].weight.requires_grad_(False)
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(optimizer_class, 0.1, {})
    assert len(flat.vectors) == 2

    def step() -> dict[str, th.Tensor]:
        before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        flat.zero_grad()
        loss_of(network).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return {name: parameter - before[name] for name, parameter in network.named_parameters()}

    first = step()
    assert [name for name, change in first.items() if not change.any()] == ["0.weight"]
    network[2].requires_grad_(False)
    second = step()
    assert [name for name, change in second.items() if not change.any()] == ["0.weight", "2.weight", "2.bias"]
    network[2].requires_grad_(True)
    assert step()["2.weight"].any()


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        *(each for each in OPTIMIZERS if each[0] is not th.optim.SGD),  # which has none
        (th.optim.SGD, {"momentum": 0.9}),
        *((each, {"weight_decay": 0.1}) for each in (th.optim.AdamW, th.optim.Adam)),
        (OwnAdam, {}),
    ],
    ids=str,
)
def test_the_optimizers_state_of_a_parameter_that_is_frozen_for_a_while_waits(
    optimizer_class: Callable[..., th.optim.Optimizer], kwargs: dict[str, Any]
) -> None:
    network, same = a_network(), a_network()
    flat = FlatParameters(network)
    ours = flat.make_optimizer(optimizer_class, 1e-2, kwargs)
    theirs = optimizer_class(same.parameters(), lr=1e-2, **kwargs)
    for n_steps, learns in ((3, True), (20, False), (1, True)):
        for each, optimizer in ((network, ours), (same, theirs)):
            each[2].requires_grad_(learns)
            learn(each, optimizer, n_steps)
    states: list[dict[str, th.Tensor]] = [ours.state.get(parameter, {}) for parameter in network.parameters()]
    for name, slot in ours.state.get(flat.vectors[0], {}).items():
        if th.is_tensor(slot) and slot.dim() == 1:
            for state, part in zip(states, flat._split(slot, flat.parameters), strict=True):
                state[name] = part
    n_slots = 0
    for state, other in zip(states, same.parameters(), strict=True):
        for name, expected in theirs.state[other].items():
            if th.is_tensor(expected) and expected.shape == other.shape:
                n_slots += 1
                th.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-12)
    assert n_slots


def test_the_average_moves_by_one_minus_alpha_and_has_no_gradients() -> None:
    network = a_network()
    network[2].weight.requires_grad_(False)
    holder = nn.ModuleDict({"network": network})
    holder.flat = FlatParameters(network)  # type: ignore[assignment]
    average = copy.deepcopy(holder)
    own, theirs = holder.flat, average.flat
    assert isinstance(own, FlatParameters)
    assert isinstance(theirs, FlatParameters)
    theirs.without_gradients()
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in average.parameters())
    before = [parameter.clone() for parameter in average.parameters()]
    with th.no_grad():
        for parameter in holder.parameters():
            parameter.add_(1)
    theirs.polyak_update(own, 0.75)
    for was, now in zip(before, average.parameters(), strict=True):
        th.testing.assert_close(now, was + 0.25)


def test_types_of_numbers_may_differ_and_parameters_may_be_shared() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3).double())
    network[1].weight = network[0].weight
    flat = FlatParameters(network)
    assert [vector.dtype for vector in flat.vectors] == [th.float32, th.float64]
    assert sum(vector.numel() for vector in flat.vectors) == 9 + 3 + 3 + 12
    optimizer = flat.make_optimizer(th.optim.SGD, 1.0, {})
    flat.zero_grad()
    network[2](network[1](network[0](th.ones(1, 3))).double()).sum().backward()
    norm = th.nn.utils.get_total_norm(
        [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    )
    assert flat.clip_grad_norm(None) == pytest.approx(norm.item())
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer.step()
    for was, now in zip(before, network.parameters(), strict=True):
        assert now.grad is not None
        th.testing.assert_close(now.detach(), was - now.grad)


# In a policy


def a_policy(**kwargs: Any) -> ACERPolicy:
    space = spaces.Box(-1, 1, (3,))
    return MlpPolicy(space, spaces.Discrete(2), lambda _: 1e-3, net_arch=[4], **kwargs)


@pytest.mark.parametrize("change", [lambda policy: policy.double(), lambda policy: policy.to("cpu"), copy.deepcopy])
def test_a_policy_stays_flat_when_it_is_moved_or_copied(change: Callable[[ACERPolicy], ACERPolicy]) -> None:
    policy = a_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    changed = change(policy)
    assert is_flat(changed.flat)
    assert changed.flat.vectors[0].dtype == next(changed.parameters()).dtype
    for name, value in changed.state_dict().items():
        th.testing.assert_close(value, before[name].to(value.dtype))
    (vector,) = changed.flat.vectors
    assert changed.optimizer.param_groups[0]["params"][0] is vector
    vector.data.zero_()
    assert not any(parameter.any() for parameter in changed.parameters())


def test_the_memory_of_a_policy_can_be_shared_with_other_processes() -> None:
    model = ACER("MlpPolicy", "CartPole-v1", n_steps=4, lr_schedule="constant")
    before = [parameter.clone() for parameter in model.policy.parameters()]
    places = [parameter.data_ptr() for parameter in model.policy.share_memory().parameters()]
    assert all(map(th.equal, model.policy.parameters(), before))
    model.learn(8)
    assert all(parameter.untyped_storage().is_shared() for parameter in model.policy.parameters())
    assert [parameter.data_ptr() for parameter in model.policy.parameters()] == places
    assert not all(map(th.equal, model.policy.parameters(), before))
    assert is_flat(model.policy.flat)


def test_a_pickled_policy_is_flat_and_acts_alike() -> None:
    policy = a_policy()
    other = pickle.loads(pickle.dumps(policy))
    assert is_flat(other.flat)
    for own, theirs in zip(policy.parameters(), other.parameters(), strict=True):
        assert th.equal(own, theirs)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_the_optimizer_of_a_copied_policy_makes_the_same_steps(
    duplicate: Callable[[ACERPolicy], ACERPolicy],
) -> None:
    policy = a_policy(optimizer_class=th.optim.Adam)
    initial = [parameter.detach().clone() for parameter in policy.parameters()]
    policies = (policy, duplicate(policy))
    for each in policies:
        for learns in (True, True, False):
            each.pi_net.requires_grad_(learns)  # frozen later, though its moments would move it
            each.optimizer.zero_grad()
            each.predict_values(th.ones(2, 3)).sum().backward()  # type: ignore[no-untyped-call]
            each.optimizer.step()
    ours, theirs = (list(each.parameters()) for each in policies)
    assert all(map(th.equal, ours, theirs))
    assert not any(map(th.equal, ours, initial))


def test_loading_parameters_keeps_a_policy_flat() -> None:
    policy, other = a_policy(), a_policy()
    file = io.BytesIO()
    th.save(other.state_dict(), file)
    file.seek(0)
    policy.load_state_dict(th.load(file))
    assert is_flat(policy.flat)
    assert th.equal(policy.flat.vectors[0], other.flat.vectors[0])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(th.ones(()))

    def forward(self, x: th.Tensor) -> th.Tensor:
        return x * self.temperature


class OwnModule(MlpPolicy):
    """A policy with a module of its own."""

    def _build(self) -> None:
        super()._build()
        self.pi_net = nn.Sequential(Scale(), *self.pi_net)


class Adam2(th.optim.Adam):
    """No class of torch's itself."""


@pytest.mark.parametrize("optimizer_class", [RMSpropTFLike, th.optim.Adam, Adam2])
def test_a_saved_agent_goes_on_with_the_same_steps(optimizer_class: type[th.optim.Optimizer], tmp_path: Any) -> None:
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    policy_kwargs = {"net_arch": [8], "optimizer_class": optimizer_class}
    arguments: dict[str, Any] = {"n_steps": 5, "replay_start": 10, "lr_schedule": "constant", "seed": 0}
    model = ACER(OwnModule, env, policy_kwargs=policy_kwargs, device="cpu", **arguments)
    model.learn(40)
    assert model.policy.state_dict()["pi_net.0.temperature"].item() != 1
    model.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", env)
    batch = model.replay_buffer.latest()
    for each in (model, loaded):
        for _ in range(3):
            each.update(batch)
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, loaded.policy.state_dict()[name]), name
    assert th.equal(model.average_policy.flat.vectors[0], loaded.average_policy.flat.vectors[0])


def test_networks_for_images_are_flat_too() -> None:
    model = ACER("CnnPolicy", DummyVecEnv([Catch]), n_steps=5, device="cpu", policy_kwargs={"use_bfloat16": False})
    model.learn(10)
    assert is_flat(model.policy.flat)
    weight = model.policy.features_extractor.cnn[2].weight  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=th.channels_last)
    assert not weight.is_contiguous()
    assert np.isfinite(model.policy.flat.vectors[0].detach().numpy()).all()


def test_a_buffer_that_a_module_assigns_anew_is_copied_to_the_average() -> None:
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    average, current = FlatParameters(ours), FlatParameters(theirs)
    for value in (2.0, 5.0):
        theirs.running_mean = th.full((3,), value)
        average.polyak_update(current, 0.5)
        assert ours.running_mean is not None
        assert ours.running_mean.tolist() == [value] * 3


def test_an_optimizer_of_copies_and_parameters_in_another_order_are_refused() -> None:
    network = a_network()
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(th.optim.SGD, 0.1, {})
    flat.require_unchanged(optimizer)
    with pytest.raises(ValueError, match=r"policy.optimizer must be the one .*, got SGD of other parameters"):
        flat.require_unchanged(copy.deepcopy(optimizer))
    network.append(network.pop(0))
    with pytest.raises(ValueError, match="policy must keep the parameters that it was built with, in their order"):
        flat.require_unchanged(optimizer)


def test_gradients_of_several_types_are_clipped_together() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    flat = FlatParameters(network)
    flat.zero_grad()
    network[1](network[0](th.ones(1, 3)).double()).sum().backward()
    before = [th.as_tensor(parameter.grad).clone() for parameter in network.parameters()]
    flat.clip_grad_norm(0.5 * flat.clip_grad_norm(None))
    for parameter, gradient in zip(network.parameters(), before, strict=True):
        th.testing.assert_close(parameter.grad, 0.5 * gradient)


def test_a_gradient_that_was_replaced_is_the_one_that_is_followed() -> None:
    network = nn.Linear(3, 2)
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(th.optim.SGD, 0.1, {})
    flat.zero_grad()
    network(th.ones(1, 3)).sum().backward()
    before, replaced = network.weight.detach().clone(), 3 * th.as_tensor(network.weight.grad)
    network.weight.grad = replaced.clone()
    optimizer.step()
    th.testing.assert_close(network.weight.detach(), before - 0.1 * replaced)


def test_a_gradient_that_was_replaced_counts_in_the_norm_and_is_clipped() -> None:
    network = nn.Linear(3, 2)
    flat = FlatParameters(network)
    for parameter in network.parameters():
        parameter.grad = th.full_like(parameter, 2.0)
    assert flat.clip_grad_norm(1.0) == pytest.approx(2 * 8**0.5)
    for parameter in network.parameters():
        th.testing.assert_close(parameter.grad, th.full_like(parameter, 8**-0.5))


class Bounded(nn.Linear):
    """A layer whose weights have a bounded norm."""

    def forward(self, input: th.Tensor) -> th.Tensor:
        self.weight.data = th.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(input)


class Attending(BaseFeaturesExtractor):
    """Buffers that grow, are made by the first pass or hold infinities, and numbers that are complex."""

    mask: th.Tensor
    grown: th.Tensor

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__(space, 4)
        self.layer = Bounded(4, 4)
        self.phases = nn.Parameter(th.ones(4, dtype=th.complex64))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))
        self.register_buffer("grown", th.zeros(1), persistent=False)
        self.register_buffer("first", None, persistent=False)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        if len(self.grown) < len(observations):
            self.grown = th.zeros(len(observations))
        self.first = th.zeros(1)
        features: th.Tensor = self.layer(observations) @ self.mask.softmax(-1) + (self.phases * observations).imag
        return features


def test_modules_of_many_kinds_are_learnt_averaged_and_loaded(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"n_steps": 5, "replay_start": 10, "buffer_size": 200, "seed": 0, "alpha": 0.5}
    kwargs = {"features_extractor_class": Attending, "net_arch": [8], "optimizer_class": th.optim.Adam}
    model = ACER("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, **arguments)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(200)
    model.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent")
    for name in ("features_extractor.layer.weight", "features_extractor.phases"):
        for policy in (model.policy, model.average_policy):
            assert (policy.state_dict()[name] != before[name]).any()
        for of_model, of_loaded in ((model.policy, loaded.policy), (model.average_policy, loaded.average_policy)):
            assert th.equal(of_model.state_dict()[name], of_loaded.state_dict()[name])
    assert th.equal(loaded.policy.state_dict()["features_extractor.mask"], before["features_extractor.mask"])
    assert (model.average_policy.state_dict()["features_extractor.layer.weight"].norm(dim=1) < 1.1).all()


class Replacing(th.optim.SGD):
    """Gives parameters other memory."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


class Grouped(th.optim.SGD):
    """Without decay of vectors."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        matrices, vectors = ([each for each in params if (each.ndim > 1) == flag] for flag in (True, False))
        super().__init__([{"params": vectors}, {"params": matrices}], lr=lr)


@pytest.mark.parametrize("optimizer_class", [Replacing, Grouped])
def test_optimizers_may_replace_memory_and_sort_parameters(optimizer_class: Any) -> None:
    ends = []
    for each in (th.optim.SGD, optimizer_class):
        kwargs = {"net_arch": [8], "optimizer_class": each}
        model = ACER("MlpPolicy", "CartPole-v1", n_steps=5, replay_start=10, seed=0, policy_kwargs=kwargs).learn(200)
        policies = (model.policy, model.average_policy)
        ends.append([th.cat([each.detach().flatten() for each in policy.parameters()]) for policy in policies])
    for plain, other in zip(*ends, strict=True):
        th.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


def test_a_step_changes_parameters_whose_memory_was_replaced_before_it() -> None:
    network = nn.Linear(2, 2)
    flat = FlatParameters(network)
    optimizer = flat.make_optimizer(th.optim.SGD, 0.1, {})
    flat.zero_grad()
    network.weight.data = th.ones(2, 2)
    network(th.ones(1, 2)).sum().backward()
    optimizer.step()
    th.testing.assert_close(network.weight.detach(), th.full((2, 2), 0.9))


def test_an_average_whose_memory_was_replaced_moves() -> None:
    network = nn.Linear(2, 2)
    average = copy.deepcopy(network)
    flat, of_average = FlatParameters(network), FlatParameters(average)
    of_average.without_gradients()
    average.weight.data = th.zeros(2, 2)
    of_average.polyak_update(flat, 0.5)
    th.testing.assert_close(average.weight, 0.5 * network.weight.detach())


def test_an_average_may_be_of_another_precision() -> None:
    average, network = nn.Linear(2, 2), nn.Linear(2, 2).double()
    before = average.weight.detach().clone()
    FlatParameters(average).polyak_update(FlatParameters(network), 0.75)
    th.testing.assert_close(average.weight.detach(), 0.75 * before + 0.25 * network.weight.detach().float())


def test_a_buffer_that_is_none_is_left_out() -> None:
    assert FlatParameters(nn.BatchNorm1d(3, track_running_stats=False)).buffers() == []
    assert len(FlatParameters(nn.BatchNorm1d(3)).buffers()) == 3


def test_an_average_follows_a_buffer_that_is_taken_away_and_made_again() -> None:
    average, network = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    of_average, flat = FlatParameters(average), FlatParameters(network)
    for mean in (th.ones(3), None, 2 * th.ones(3)):
        network.running_mean = mean
        of_average.polyak_update(flat, 0.5)
        kept = average.running_mean
        assert kept is None if mean is None else kept is not None and th.equal(kept, mean)


def test_a_module_in_the_arguments_of_the_policy_is_saved_once(tmp_path: Path) -> None:
    class Pretrained(BaseFeaturesExtractor):
        def __init__(self, space: gym.Space[Any], net: nn.Module) -> None:
            super().__init__(space, 64)
            self.net = net

        def forward(self, observations: th.Tensor) -> th.Tensor:
            features: th.Tensor = self.net(observations)
            return features

    net = nn.Sequential(nn.Linear(4, 64), *(nn.Linear(64, 64) for _ in range(20)))
    kwargs = {"features_extractor_class": Pretrained, "features_extractor_kwargs": {"net": net}}
    model = ACER("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs)
    model.save(tmp_path / "agent")
    size = sum(parameter.numel() * 4 for parameter in net.parameters())
    assert (tmp_path / "agent.zip").stat().st_size < 8 * size
    assert model.policy_kwargs["features_extractor_kwargs"]["net"] is net


def test_one_parameter_whose_memory_was_replaced_is_attached_again() -> None:
    network = nn.Linear(2, 2)
    flat = FlatParameters(network)
    network.weight.data = th.ones(2, 2)
    flat.polyak_update(FlatParameters(nn.Linear(2, 2)), 1.0)
    assert (network.weight == 1).all()
    flat.vectors[0].data.zero_()
    assert not network.weight.any()


def test_a_buffer_of_another_shape_is_copied_and_not_shared() -> None:
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    theirs.running_mean = th.zeros(4)
    FlatParameters(ours).polyak_update(FlatParameters(theirs), 0.5)
    theirs.running_mean.add_(1)
    assert ours.running_mean is not None
    assert ours.running_mean.tolist() == [0.0] * 4


@pytest.mark.parametrize("fused", [True, False])
def test_adam_is_fused_as_it_is_told(fused: bool) -> None:
    optimizer = FlatParameters(a_network()).make_optimizer(th.optim.Adam, 1e-2, {"fused": fused})
    assert optimizer.defaults["fused"] == fused


def test_a_step_takes_a_closure_and_counts_as_sb3s_does() -> None:
    losses, states = [], []
    for is_flat in (True, False):
        network = a_network()
        optimizer: Any
        if is_flat:
            optimizer = FlatParameters(network).make_optimizer(RMSpropTFLike, 1e-2, {})
        else:
            optimizer = RMSpropTFLike(network.parameters(), lr=1e-2)

        def closure(network: Any = network, optimizer: Any = optimizer) -> th.Tensor:
            optimizer.zero_grad()
            loss = loss_of(network)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
        states.append({(tuple(state), state["step"]) for state in optimizer.state.values()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][0] != losses[0][1]
    assert states[0] == states[1]
