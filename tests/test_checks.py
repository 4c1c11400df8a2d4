"""Rules for arguments: what follows them comes back, anything else is named with its rule."""

import math
import re
from typing import Any

import numpy as np
import pytest

from sb3_acer.checks import check_boolean, check_choice, check_integer, check_number, require, warn


def message(rule: str, value: Any) -> str:
    return f"^{re.escape(f'size must be {rule}, got {value!r}')}$"


def test_a_rule_that_holds_is_silent_and_a_broken_one_names_argument_rule_and_value() -> None:
    require(True, "size", "even", 4)
    with pytest.raises(ValueError, match=message("even", "three")):
        require(False, "size", "even", "three")


def test_a_long_value_is_cut_off() -> None:
    with pytest.raises(ValueError, match=r"^size must be even, got \[0, 1, .*\.\.\.$") as caught:
        require(False, "size", "even", [*range(10**5)])
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize("name", ["stable_baselines3", "sb3_contrib.ppo_mask", "rl_zoo3.train", "torch", "contextlib"])
def test_a_warning_points_at_the_line_of_the_program_behind_whatever_libraries(name: str) -> None:
    library = {"__name__": name, "warn": warn}
    exec("def learn(): train()\ndef train(): warn('too long', DeprecationWarning)", library)
    with pytest.warns(DeprecationWarning, match="^too long$") as warned:
        library["learn"]()  # type: ignore[operator]
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.parametrize(("value", "least"), [(1, 1), (7, 1), (0, 0), (-2, -3), (np.int64(5), 5), (np.uint8(3), 1)])
def test_integers_come_back_as_pythons_own(value: Any, least: int) -> None:
    checked = check_integer("size", value, least)
    assert type(checked) is int
    assert checked == value


def test_the_least_integer_is_one_by_default() -> None:
    assert check_integer("size", 1) == 1
    with pytest.raises(ValueError, match=message("an integer of at least 1", 0)):
        check_integer("size", 0)


@pytest.mark.parametrize(
    "value", [4, 0, -1, 7.0, 7.5, "7", None, True, False, np.bool_(True), math.nan, [7], np.ones(2)]
)
def test_smaller_integers_and_what_is_no_integer_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=message("an integer of at least 5", value)):
        check_integer("size", value, 5)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 1, np.float32(0.25), np.int64(1)])
def test_numbers_in_an_interval_come_back_unchanged(value: Any) -> None:
    assert check_number("size", value, 0, 1) is value


@pytest.mark.parametrize(
    "value", [-0.01, 1.01, math.nan, math.inf, -math.inf, "0.5", None, True, np.bool_(False), [0.5]]
)
def test_numbers_outside_an_interval_and_what_is_no_number_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=message("a number in [0, 1]", value)):
        check_number("size", value, 0, 1)


def test_a_number_without_an_upper_bound_is_at_least_zero_and_finite() -> None:
    assert check_number("size", 1e300) == 1e300
    assert check_number("size", 0) == 0
    for value in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match=message("a finite number of at least 0", value)):
            check_number("size", value)
    with pytest.raises(ValueError, match=message("a finite number of at least 2.5", 2)):
        check_number("size", 2, 2.5)


@pytest.mark.parametrize("value", [True, False, np.bool_(True), np.bool_(False)])
def test_booleans_come_back_as_pythons_own(value: Any) -> None:
    assert check_boolean("size", value) is bool(value)


@pytest.mark.parametrize("value", [0, 1, None, "True", 1.0, np.array([True])])
def test_what_python_merely_takes_for_true_or_false_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=message("True or False", value)):
        check_boolean("size", value)


def test_a_choice_comes_back_and_others_are_refused_with_the_list_of_choices() -> None:
    choices = (True, "auto", "slow")
    assert check_choice("size", True, choices) is True
    assert check_choice("size", "slow", choices) == "slow"
    for value in ("fast", None, False, 1):
        with pytest.raises(ValueError, match=message("one of True, auto, slow", value)):
            check_choice("size", value, choices)
    assert check_choice("size", "b", {"a": 1, "b": 2}) == "b"
