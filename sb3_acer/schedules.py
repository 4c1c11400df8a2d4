"""The named schedules of stable-baselines' learning rate, as factors of any initial value."""

from collections.abc import Callable

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule

from sb3_acer.checks import check_choice, check_number

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "constant": lambda p: 1.0,
    "double_linear_con": lambda p: max(1 - 2 * p, 0.125),
    "middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075,
    "double_middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075 if 1 - p >= 0.25 else 0.125,
}
"""Factors as functions of the progress p of training, from 0 to 1."""


class NamedSchedule:
    """
    A value that follows one of :data:`SCHEDULES`. It is never negative, even if training runs past its end.

    :param initial_value: the value at the start
    :param name: a key of :data:`SCHEDULES`
    """

    def __init__(self, initial_value: float, name: str) -> None:
        self.initial_value = initial_value
        self.name = name

    def __call__(self, progress_remaining: float) -> float:
        """Value at the remaining progress, from 1 to 0."""
        return self.initial_value * max(SCHEDULES[self.name](1 - progress_remaining), 0.0)

    def __repr__(self) -> str:
        return f"NamedSchedule({self.initial_value}, {self.name!r})"


def make_schedule(learning_rate: float | Schedule, name: str) -> FloatSchedule:
    """
    The learning rate's schedule.

    :param learning_rate: a number, or the constant schedule that rl-zoo makes of one; any other callable is used as it
        is
    :param name: a key of :data:`SCHEDULES`, for a number
    :raises ValueError: if ``name`` is not one of them, or the learning rate no number in [0, 10]
    """
    check_choice("lr_schedule", name, SCHEDULES)
    learning_rate = number_or_function(learning_rate)
    if callable(learning_rate):
        return FloatSchedule(learning_rate)
    return FloatSchedule(NamedSchedule(float(check_number("learning_rate", learning_rate, 0, 10)), name))


def number_or_function(learning_rate: float | Schedule) -> float | Schedule:
    """The number of SB3's constant schedule, the function in a ``FloatSchedule``, any other learning rate itself."""
    if isinstance(learning_rate, FloatSchedule):  # never one of another: SB3 unwraps those
        learning_rate = learning_rate.value_schedule
    return learning_rate.val if isinstance(learning_rate, ConstantSchedule) else learning_rate
