"""
Rules for arguments, each worded once: the ValueError names the argument, the rule and what was given. And warnings that
point at the user's line.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.utils import get_device

MOST = 2**63 - 1
"""bound on integers, the largest one of numpy and torch"""
LARGEST = 1e15
"""
Bound on the absolute values of rewards and observations. Training squares returns, and gradients that are proportional
to them, in float32, which ends at 3.4e38; squares of 1e15 leave a factor of 1e8 for sums over steps and parameters.
"""
_LIBRARIES = {"sb3_acer", "stable_baselines3", "sb3_contrib", "rl_zoo3", "torch", "contextlib"}
"""packages and modules whose lines a warning does not point at"""


def require(holds: bool, name: str, rule: str, value: Any) -> None:
    """
    :param holds: whether the value follows the rule
    :param name: of the argument
    :param rule: what follows "must be" in the message
    :param value: what was given
    :raises ValueError: if the rule does not hold
    """
    if not holds:
        got = repr(value)
        raise ValueError(f"{name} must be {rule}, got {got if len(got) < 1000 else f'{got[:1000]}...'}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program that called into this package, whatever libraries lie between."""
    frame, stacklevel = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel + 1)


def check_integer(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """
    :return: the value as Python's own integer
    :raises ValueError: if it is no integer in [``least``, ``most``], or a boolean
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    require(is_integer and value >= least, name, f"an integer of at least {least}", value)
    require(value <= most, name, f"an integer of at most {most}", value)
    return int(value)


def check_whole(name: str, value: Any, least: int = 0) -> int:
    """
    :return: the number of steps as an integer; SB3's users write ``1e6``, too
    :raises ValueError: if it is no whole number of at least ``least``
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_integer(name, value, least)


def check_verbose(name: str, value: Any) -> int:
    """
    :return: how much is printed, 0 for nothing; True is 1
    :raises ValueError: if it is no integer of at least 0
    """
    return check_integer(name, int(value) if isinstance(value, bool) else value, 0)


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """
    :return: the value, unchanged
    :raises ValueError: if it is no finite number in [``low``, ``high``], or a boolean
    """
    rule = f"a finite number of at least {low:g}" if high == math.inf else f"a number in [{low:g}, {high:g}]"
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    require(is_number and math.isfinite(value) and low <= value <= high, name, rule, value)
    return value  # type: ignore[no-any-return]


def check_observation_space(space: Any) -> None:
    """
    :param space: an observation space
    :raises ValueError: if SB3's preprocessing makes no vectors or images of the observations
    """
    parts = list(space.values()) if isinstance(space, spaces.Dict) else [space]
    from_0 = "Discrete or one-dimensional MultiDiscrete that begins at 0"
    rule = f"a Box of at least one dimension and one value, {from_0}, MultiBinary, or a Dict of these"
    require(bool(parts) and all(map(_is_vector_or_image, parts)), "observation_space", rule, space)


def _is_vector_or_image(space: Any) -> bool:
    if isinstance(space, spaces.Discrete):
        return bool(space.start == 0)
    if isinstance(space, spaces.MultiDiscrete):
        return len(space.shape) == 1 and not space.start.any()
    return isinstance(space, (spaces.Box, spaces.MultiBinary)) and len(space.shape) > 0 and 0 not in space.shape


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
    found = any(isinstance(value, type(choice)) and value == choice for choice in choices)
    listed = ", ".join(choice if isinstance(choice, str) else repr(choice) for choice in choices)
    require(found, name, f"one of {listed}", value)
    return value


def check_subclass(name: str, value: Any, parent: type) -> Any:
    """
    :raises ValueError: if the value is no subclass of ``parent``
    """
    require(isinstance(value, type) and issubclass(value, parent), name, f"a subclass of {parent.__name__}", value)
    return value


def check_kwargs(
    name: str,
    value: Any,
    of: Callable[..., Any] | None = None,
    given: Collection[str] = (),
    renamed: Collection[str] = (),
) -> dict[str, Any]:
    """
    :param of: what the keyword arguments are for
    :param given: its arguments that the caller gives itself
    :param renamed: old names that the caller explains itself; no similar name is suggested for them
    :return: the keyword arguments, none for None
    :raises ValueError: if the value is neither None nor a dict of strings, or if there is an argument that ``of`` does
        not have, or that is given
    """
    is_dict = value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value))
    require(is_dict, name, "a dict of keyword arguments, or None", value)
    if of is not None and value:
        parameters = inspect.signature(of).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            unknown = [key for key in value if key not in parameters]
            alike = such_as([key for key in unknown if key not in renamed], parameters)
            rule = f"arguments of {getattr(of, '__name__', of)}{alike}"
            require(not unknown, name, rule, ", ".join(unknown))
        twice = [key for key in value if key in given]
        require(not twice, name, f"without {', '.join(given)}, which are given by ACER itself", ", ".join(twice))
    return value or {}


def such_as(unknown: Iterable[str], known: Iterable[str]) -> str:
    """
    :return: the rest of a rule: known names that are like unknown ones
    """
    alike = [name for each in unknown for name in get_close_matches(each, list(known), n=1)]
    return f", such as {', '.join(alike)}" if alike else ""


def constructor_arguments(cls: type) -> set[str]:
    """
    :param cls: a class
    :return: the names of its constructor's arguments, with those of its parents' that it takes as ``**kwargs``
    """
    names: set[str] = set()
    for parent in cls.__mro__:
        if "__init__" in vars(parent):
            parameters = list(inspect.signature(vars(parent)["__init__"]).parameters.values())[1:]
            names.update(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return names


def check_device(name: str, value: Any) -> th.device:
    """
    :return: the device; the CPU where torch finds no GPU and one is asked for, as in SB3
    :raises ValueError: for any other device that this machine does not have, and for Apple's mps
    """
    rule = "a device of this machine"
    require(isinstance(value, (str, int, th.device)) and not isinstance(value, bool), name, rule, value)
    require(not str(value).startswith("mps"), name, "cpu or cuda, since mps has no float64", value)
    try:
        return th.empty(0, device=get_device(value)).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"{name} must be {rule}, got {value!r}") from error


def check_seed(name: str, value: Any) -> int | None:
    """
    :raises ValueError: if the value is neither None nor an integer that numpy takes for a seed
    """
    return None if value is None else check_integer(name, value, 0, 2**32 - 1)


def check_array(name: str, value: Any) -> np.ndarray:
    """
    :return: the value as an array
    :raises ValueError: if it is no array of real numbers or booleans
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {value!r}") from error
    require(array.dtype.kind in "fiub", name, "an array of numbers", value)
    return array


def check_parameters(name: str, given: Any, own: dict[str, th.Tensor], exact_match: bool) -> dict[str, th.Tensor]:
    """
    :param given: arrays or tensors by names
    :param own: a network's parameters
    :param exact_match: whether all of them must be given
    :return: what was given, as tensors
    :raises ValueError: for unknown or missing names, other shapes, and values that are not finite in the parameter's
        own type, unless they equal its present values (a mask of -inf)
    """
    require(isinstance(given, dict), name, "a dict of parameters", given)
    unknown = sorted(str(key) for key in given if key not in own)
    missing = sorted(own.keys() - given.keys()) if exact_match else []
    if unknown or missing:
        raise ValueError(f"{name} must have the names of policy.state_dict(): unknown {unknown}, missing {missing}")
    tensors = {}
    for key, value in given.items():
        part = f"{key} in {name}"
        try:
            tensor = tensors[key] = th.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{part} must be an array of numbers, got {value!r}") from error
        require(tensor.shape == own[key].shape, part, f"of shape {tuple(own[key].shape)}", tuple(tensor.shape))
        fits = own[key].is_complex() or not tensor.is_complex()
        cast = tensor.to(own[key].device, own[key].dtype) if fits else tensor
        is_finite = fits and bool((cast.isfinite() | (cast == own[key])).all())  # a buffer may be a mask of -inf
        require(is_finite, part, f"finite numbers of {own[key].dtype}", value)
    return tensors
