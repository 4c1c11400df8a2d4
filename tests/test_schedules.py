"""The named learning-rate schedules, and which learning rates they apply to."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_acer.schedules import SCHEDULES, NamedSchedule, make_schedule

names = pytest.mark.parametrize("name", SCHEDULES)

# By the progress of training: 0, and what is exactly representable around the places where the factors change.
PROGRESS = (0.0, 0.125, 0.25, 0.28125, 0.4375, 0.5, 0.75, 0.78125, 1.0)
FACTORS = {
    "linear": (1.0, 0.875, 0.75, 0.71875, 0.5625, 0.5, 0.25, 0.21875, 0.0),
    "constant": (1.0,) * 9,
    "double_linear_con": (1.0, 0.75, 0.5, 0.4375, 0.125, 0.125, 0.125, 0.125, 0.125),
    "middle_drop": (1.0, 0.875, 0.75, 0.075, 0.075, 0.075, 0.075, 0.075, 0.075),
    "double_middle_drop": (1.0, 0.875, 0.75, 0.075, 0.075, 0.075, 0.075, 0.125, 0.125),
}


def test_the_schedules_are_the_five_of_stable_baselines() -> None:
    assert set(SCHEDULES) == set(FACTORS)


@names
@pytest.mark.parametrize("learning_rate", [1.0, 7e-4])
def test_a_schedule_has_the_values_of_its_table(name: str, learning_rate: float) -> None:
    schedule = make_schedule(learning_rate, name)
    values = [schedule(1 - progress) for progress in PROGRESS]
    assert values == pytest.approx([learning_rate * factor for factor in FACTORS[name]], rel=1e-14)


@names
@settings(deadline=None, derandomize=True, database=None)
@given(st.floats(-10, 1))
def test_a_learning_rate_is_never_negative_and_never_above_its_start(name: str, progress_remaining: float) -> None:
    assert 0 <= make_schedule(7e-4, name)(progress_remaining) <= 7e-4


@pytest.mark.parametrize("learning_rate", [-0.001, 10.001, math.nan])
def test_a_learning_rate_out_of_range_has_no_schedule(learning_rate: float) -> None:
    with pytest.raises(ValueError, match=r"learning_rate must be a number in \[0, 10\], got "):
        make_schedule(learning_rate, "linear")


@names
def test_beyond_the_end_of_training_the_last_value_stays(name: str) -> None:
    schedule = make_schedule(7e-4, name)
    assert schedule(-0.001) == schedule(-0.5) == schedule(-100) == schedule(0)


@names
@pytest.mark.parametrize(
    "learning_rate",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        ConstantSchedule(0.5),
        FloatSchedule(0.5),
        FloatSchedule(ConstantSchedule(0.5)),
        FloatSchedule(FloatSchedule(0.5)),
    ],
    ids=repr,
)
def test_numbers_and_constant_schedules_follow_the_named_one(name: str, learning_rate: Any) -> None:
    schedule = make_schedule(learning_rate, name)
    for progress, factor in zip(PROGRESS, FACTORS[name], strict=True):
        assert schedule(1 - progress) == pytest.approx(0.5 * factor, rel=1e-14)


def test_an_integer_is_a_number() -> None:
    assert make_schedule(1, "linear")(0.25) == 0.25


@names
def test_other_callables_are_used_as_they_are(name: str) -> None:
    def parabola(progress_remaining: float) -> float:
        return 3 * progress_remaining**2

    others: tuple[Any, ...] = (parabola, FloatSchedule(parabola), LinearSchedule(1.0, 0.1, 0.5))
    for learning_rate in others:
        schedule = make_schedule(learning_rate, name)
        for progress in PROGRESS:
            assert schedule(1 - progress) == learning_rate(1 - progress)


@names
def test_a_made_schedule_is_used_as_it_is(name: str) -> None:
    """Loading a model makes a schedule of the one it was saved with."""
    made = make_schedule(0.5, "double_linear_con")
    again = make_schedule(made, name)
    assert [again(1 - progress) for progress in PROGRESS] == [made(1 - progress) for progress in PROGRESS]


@pytest.mark.parametrize("name", ["cosine", "", "Linear", "lin"])
@pytest.mark.parametrize("learning_rate", [7e-4, LinearSchedule(1.0, 0.1, 0.5)], ids=["number", "callable"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str, learning_rate: Any) -> None:
    with pytest.raises(ValueError, match="lr_schedule must be one of") as error:
        make_schedule(learning_rate, name)
    for known in FACTORS:
        assert known in str(error.value)
    assert repr(name) in str(error.value)


@names
def test_schedules_survive_pickling(name: str) -> None:
    schedule = make_schedule(7e-4, name)
    again = pickle.loads(pickle.dumps(schedule))
    assert [again(1 - progress) for progress in PROGRESS] == [schedule(1 - progress) for progress in PROGRESS]
    assert isinstance(again(0.5), float)


@names
def test_a_schedule_tells_what_it_is(name: str) -> None:
    assert eval(repr(NamedSchedule(7e-4, name)), {"NamedSchedule": NamedSchedule})(0.5) == make_schedule(7e-4, name)(
        0.5
    )
