"""The optimiser is SB3's, in fewer operations."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch as th
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from torch import nn

from sb3_acer.parameters import RMSpropTF

SHAPES = ((16, 4), (16,), (3, 2, 4, 4), (1,), ())
DEFAULTS: dict[str, Any] = {"lr": 7e-4, "alpha": 0.99, "eps": 1e-5}


class Pair:
    """The same parameters twice, for SB3's optimiser and for ours, with the same gradients."""

    def __init__(self, dtype: th.dtype = th.float32, **arguments: Any) -> None:
        self.generator = th.Generator().manual_seed(0)
        self.sb3 = [nn.Parameter(th.randn(shape, generator=self.generator, dtype=dtype)) for shape in SHAPES]
        self.acer = copy.deepcopy(self.sb3)
        self.of_sb3 = RMSpropTFLike(self.sb3, **{**DEFAULTS, **arguments})
        self.of_acer = RMSpropTF(self.acer, **{**DEFAULTS, **arguments})

    def parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.sb3, self.acer, strict=True)

    def draw_gradients(self, skip: tuple[int, ...] = ()) -> None:
        for i, (theirs, ours) in enumerate(self.parameters()):
            scale = 10.0 ** th.randint(-4, 3, (1,), generator=self.generator).item()
            gradient = scale * th.randn(theirs.shape, generator=self.generator, dtype=theirs.dtype)
            theirs.grad, ours.grad = (None, None) if i in skip else (gradient, gradient.clone())

    def step(self, skip: tuple[int, ...] = ()) -> None:
        self.draw_gradients(skip)
        self.of_sb3.step()
        self.of_acer.step()

    def require_equality(self) -> None:
        for theirs, ours in self.parameters():
            assert th.equal(theirs, ours)
            their_state, our_state = self.of_sb3.state.get(theirs, {}), self.of_acer.state.get(ours, {})
            assert their_state.keys() == our_state.keys()
            for name, value in their_state.items():
                assert th.equal(value, our_state[name]) if isinstance(value, th.Tensor) else value == our_state[name]


@pytest.mark.parametrize("dtype", [th.float32, th.float64])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"alpha": 0.5, "eps": 1e-3, "lr": 0.1},
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"eps": 0.0},
        {"momentum": 0.9},
        {"centered": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_many_steps_equal_those_of_sb3(arguments: dict[str, Any], dtype: th.dtype) -> None:
    pair = Pair(dtype, **arguments)
    before = copy.deepcopy(pair.acer)
    for _ in range(100):
        pair.step()
        pair.require_equality()
    assert all(not th.equal(old, new) for old, new in zip(before, pair.acer, strict=True))


def test_a_first_step_divides_by_the_root_of_a_slot_that_started_at_one() -> None:
    parameter = nn.Parameter(th.tensor([1.0, -2.0], dtype=th.float64))
    parameter.grad = th.tensor([3.0, 0.01], dtype=th.float64)
    RMSpropTF([parameter], lr=0.1, alpha=0.9, eps=0.04).step()
    expected = [1 - 0.1 * 3 / (0.9 + 0.1 * 9 + 0.04) ** 0.5, -2 - 0.1 * 0.01 / (0.9 + 0.1 * 1e-4 + 0.04) ** 0.5]
    assert parameter.tolist() == pytest.approx(expected, rel=1e-14)


def test_parameters_without_gradients_stay_and_have_no_state() -> None:
    pair = Pair()
    for skip in ((0,), (0, 2), (0, 1, 4), (0,)):
        pair.step(skip)
        pair.require_equality()
    assert pair.acer[0] not in pair.of_acer.state
    assert [pair.of_acer.state[parameter]["step"] for parameter in pair.acer[1:]] == [3, 3, 4, 3]


def test_a_step_without_any_gradient_does_nothing() -> None:
    pair = Pair()
    pair.step(skip=tuple(range(len(SHAPES))))
    pair.require_equality()
    assert not pair.of_acer.state


def test_groups_have_their_own_settings_and_a_learning_rate_can_change() -> None:
    pair = Pair()
    for optimizer, parameters in ((pair.of_sb3, pair.sb3), (pair.of_acer, pair.acer)):
        optimizer.param_groups[0]["params"] = parameters[:2]
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.5, "alpha": 0.1, "eps": 1.0})
    for progress in (1.0, 0.5, 0.0):
        for optimizer in (pair.of_sb3, pair.of_acer):
            optimizer.param_groups[0]["lr"] = 7e-4 * progress
        before = copy.deepcopy(pair.acer)
        pair.step()
        pair.require_equality()
    assert all(th.equal(old, new) for old, new in zip(before[:2], pair.acer[:2], strict=True))
    assert all(not th.equal(old, new) for old, new in zip(before[2:], pair.acer[2:], strict=True))


def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned() -> None:
    pair = Pair()
    pair.draw_gradients()
    losses = []
    for parameters, optimizer in ((pair.sb3, pair.of_sb3), (pair.acer, pair.of_acer)):
        calls: list[int] = []

        def closure(parameters: list[nn.Parameter] = parameters, calls: list[int] = calls) -> float:
            calls.append(1)
            loss = th.stack([parameter.square().sum() for parameter in parameters]).sum()
            for parameter, gradient in zip(parameters, th.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            return loss.item()

        losses.append(optimizer.step(closure))
        assert len(calls) == 1
    assert losses[0] is not None
    assert losses[0] == losses[1]
    pair.require_equality()


@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.9, "centered": True}], ids=str)
def test_state_dicts_are_interchangeable(arguments: dict[str, Any]) -> None:
    """Each goes on from what the other has saved."""
    pair = Pair(**arguments)
    for _ in range(10):
        pair.step(skip=(1,))
    of_sb3, of_acer = io.BytesIO(), io.BytesIO()
    th.save(pair.of_sb3.state_dict(), of_sb3)
    th.save(pair.of_acer.state_dict(), of_acer)
    pair.of_sb3.load_state_dict(th.load(io.BytesIO(of_acer.getvalue())))
    pair.of_acer.load_state_dict(th.load(io.BytesIO(of_sb3.getvalue())))
    pair.require_equality()
    untouched = Pair(**arguments)
    for _ in range(10):
        untouched.step(skip=(1,))
    for _ in range(10):
        pair.step()
        untouched.step()
        pair.require_equality()
    assert all(th.equal(ours, same) for ours, same in zip(pair.acer, untouched.acer, strict=True))
