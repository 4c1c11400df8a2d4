"""What a user has mistyped or not installed, said in one line in place of the traceback of a library."""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import optuna
import rl_zoo3
import stable_baselines3
import torch

import sb3_acer
from sb3_acer.checks import require
from sb3_acer.extras import how_to_install

MISTAKES = (
    ValueError,
    TypeError,
    KeyError,
    AssertionError,
    AttributeError,
    NameError,
    SyntaxError,
    ImportError,
    OSError,
    gym.error.Error,
)
LIBRARIES = tuple(
    f"{Path(str(module.__file__)).parent}{os.sep}"
    for module in (gym, np, optuna, rl_zoo3, stable_baselines3, torch, sb3_acer)
)
COMPILED = ("numpy/", "numpy\\", "_mt19937.pyx", "<frozen ")  # how the frames of compiled modules begin
STANDARD = f"{Path(os.__file__).parent}{os.sep}"
TEXT_OF_AN_ARGUMENT = "<string>"
# By gymnasium's names, and by those of modules.
EXTRAS = {"box2d": "box2d", "mujoco": "mujoco", "classic_control": "zoo", "classic-control": "zoo", "atari": "atari"}
EXTRAS |= {"minigrid": "minigrid", "popgym": "popgym", "ale_py": "atari"}
# By the beginning of their ids: the module that registers them, and the extra that it needs.
SUITES = {
    "MiniGrid-": ("minigrid", "minigrid"),
    "popgym-": ("popgym", "popgym"),
    "MinAtar/": ("sb3_acer.zoo.minatar", "minatar"),
}
# What rl-zoo's settings have beside the algorithm's arguments.
SETTINGS = ("n_envs", "n_timesteps", "normalize", "env_wrapper", "vec_env_wrapper", "frame_stack", "callback", "policy")


@contextmanager
def in_one_line(command: str) -> Iterator[None]:
    """
    Exit with one line where a library refuses what the user gave. Errors in the user's own code and errors in training
    keep their traceback.

    :param command: of sb3-acer
    """
    try:
        yield
    except MISTAKES as error:
        frames = traceback.extract_tb(error.__traceback__)
        below = [*frames[2:], frames[-1]]  # the first two are those of the `with` statement
        if not all(map(_is_of_library, below)) or any(frame.name in ("learn", "objective") for frame in frames):
            raise
        sys.exit(f"sb3-acer {command}: {explained(error)}")


def _is_of_library(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    is_standard = name.startswith(STANDARD) and "site-packages" not in name
    return is_standard or name.startswith((*LIBRARIES, *COMPILED, TEXT_OF_AN_ARGUMENT))


def check_counts(options: argparse.Namespace, counts: Collection[str], **or_default: str) -> None:
    """
    :param options: of the command line; what they lack, or have as None, was not given
    :param counts: those that must be at least 1
    :param or_default: those that may also be -1, and what that stands for
    :raises ValueError: for another number
    """
    for name in (*counts, *or_default):
        number = getattr(options, name, None)
        default = f", or -1 for {or_default[name]}" if name in or_default else ""
        follows = number is None or number >= 1 or (number == -1 and default != "")
        require(follows, f"--{name.replace('_', '-')}", f"at least 1{default}", number)


def explained(error: Exception) -> str:
    """
    :param error: of a library, that was raised
    :return: what was wrong, and what to type
    """
    text = str(error) or type(error).__name__
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    # The text of an argument is evaluated by the zoo; the filename is that of a SyntaxError.
    if TEXT_OF_AN_ARGUMENT in (files[-1].name, getattr(error, "filename", None)):
        rule = "hyperparameters and the like must be KEY:VALUE with values of Python, strings in quotes"
        return f"{rule}: {text}. In a shell: -params \"policy:'MlpLstmPolicy'\""
    if isinstance(error, gym.error.DependencyNotInstalled):
        named = re.search(r"gymnasium\[([\w-]+)\]", text)
        extra = EXTRAS.get(named[1]) if named else None
        return text if extra is None else f"{text.split(',')[0].rstrip('.')}: {how_to_install(extra)}"
    unknown = re.match(r"(\S+) not found in gym registry", text)
    if unknown:
        return unknown_environment(unknown[1])
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{text}: {how_to_install(EXTRAS[error.name])}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}. --gym-packages, env_wrapper and the like must name modules in this folder, or installed ones"
    if isinstance(error, FileNotFoundError) and str(error.filename).endswith(".yml"):
        return f"{text}. -conf must name a file of hyperparameters with an entry for the environment"
    of_plots = any(file.parts[-3:-1] == ("rl_zoo3", "plots") for file in files)
    if of_plots and text.startswith("min()"):
        return "the file must have at least two runs of each agent"
    if of_plots and "inhomogeneous" in text:
        return "the runs of one agent must have been evaluated with the same --eval-episodes"
    other = re.match(r"ACER has no argument '(\w+)'; it has ", text)
    near = get_close_matches(other[1], SETTINGS, n=1, cutoff=0.8) if other else []
    if other and near:
        return f"the settings must not have {other[1]!r}: rl-zoo's is {near[0]!r}"
    if text.startswith("policy must be 'MultiInputPolicy'"):
        return f"{text}: add -params \"policy:'MultiInputPolicy'\""
    if "norm_obs_keys" in text:
        return f"{text} In a shell: -params \"normalize:dict(norm_obs_keys=['KEY'])\""
    key = re.match(r"'(\S+) is not a file in the archive", text)
    if key:
        return f"-k must be results, ep_lengths, or successes if the environment tells them, got {key[1]!r}"
    if isinstance(error, KeyError):
        if re.search(r"-v\d+$", str(error.args[0])):
            return unknown_environment(str(error.args[0]))
        name = files[-1].name
        return f"the settings must have {text}" if "rl_zoo3" in files[-1].parts else f"{name} does not know {text}"
    if "render_mode" in text:
        return f"An environment that cannot draw itself is played with enjoy --no-render: {text}"
    return text


def unknown_environment(env_id: str) -> str:
    """
    :param env_id: an id that no environment is registered under
    :return: what is wrong with it, and what to type
    """
    if re.search(r"NoFrameskip-|Deterministic-|^ALE/", env_id) and find_spec("ale_py") is None:
        return f"{env_id} needs ale-py: {how_to_install('atari')}"
    for beginning, (module, extra) in SUITES.items():
        if env_id.startswith(beginning) and module not in sys.modules:
            return f"{env_id} needs the option --gym-packages {module} and its extra: {how_to_install(extra)}"
    near = get_close_matches(env_id, gym.envs.registry.keys(), n=1, cutoff=0.75)
    return (
        f"--env must be the id of a registered environment, got {env_id!r}"
        f"{f', near to {near[0]!r}' if near else ''}. One of your own is registered by a module that --gym-packages "
        f"names: --env {env_id} --gym-packages MODULE"
    )
