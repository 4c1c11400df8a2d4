"""Rules for arguments, each worded once. The ValueError names the argument, the rule and what was given."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np


def require(holds: bool, name: str, rule: str, value: Any) -> None:
    """
    :param holds: whether the value follows the rule
    :param name: of the argument
    :param rule: what follows "must be" in the message
    :param value: what was given
    :raises ValueError: if the rule does not hold
    """
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """
    :return: the value as Python's own integer; True and False are none
    :raises ValueError: if it is no integer of at least ``least``
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    require(is_integer and value >= least, name, f"an integer of at least {least}", value)
    return int(value)


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """
    :return: the value, unchanged
    :raises ValueError: if it is no finite number in [``low``, ``high``]; True and False are none
    """
    rule = f"a number of at least {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    require(is_number and math.isfinite(value) and low <= value <= high, name, rule, value)
    return value  # type: ignore[no-any-return]


def check_boolean(name: str, value: Any) -> bool:
    """
    :raises ValueError: if the value is neither True nor False
    """
    require(isinstance(value, (bool, np.bool_)), name, "True or False", value)
    return bool(value)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """
    :raises ValueError: if the value is none of the choices
    """
    require(any(value is choice or value == choice for choice in choices), name, f"one of {_listed(choices)}", value)
    return value


def _listed(choices: Collection[Any]) -> str:
    return ", ".join(choice if isinstance(choice, str) else repr(choice) for choice in choices)
