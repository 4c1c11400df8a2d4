"""ACER's arguments: their rules as a table, what other algorithms call them, and how runs are compared by them."""

import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial, wraps
from inspect import signature
from typing import Any, ParamSpec, cast

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm, maybe_make_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.checks import (
    check_boolean,
    check_choice,
    check_integer,
    check_kwargs,
    check_number,
    check_observation_space,
    check_seed,
    check_subclass,
    check_verbose,
    check_whole,
    constructor_arguments,
    require,
    warn,
)
from sb3_acer.policies import LEAST_IMAGE, ACERPolicy
from sb3_acer.schedules import SCHEDULES, number_or_function

Rule = Callable[[str, Any], Any]


def _or_none(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _check_path(name: str, value: Any) -> Any:
    require(isinstance(value, (str, os.PathLike)), name, "a path, or None", value)
    return value


def _check_buffer_class(name: str, value: Any) -> Any:
    return SequenceReplayBuffer if value is None else check_subclass(name, value, SequenceReplayBuffer)


_SHARE: Rule = partial(check_number, low=0, high=1)
_WEIGHT: Rule = partial(check_number, low=0, high=1e6)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("gamma", "alpha", "rprop_alpha"), _SHARE),
    **dict.fromkeys(("n_steps", "n_action_samples", "stats_window_size"), check_integer),
    "burn_in": partial(check_integer, least=0),
    "batch_size": _or_none(check_integer),
    **dict.fromkeys(("q_coef", "ent_coef", "replay_ratio"), _WEIGHT),
    "rprop_epsilon": partial(check_number, low=1e-30, high=1e6),
    **dict.fromkeys(("correction_term", "delta"), partial(check_number, high=1e30)),
    "buffer_size": partial(check_whole, least=1),
    "replay_start": check_whole,
    "max_grad_norm": _or_none(partial(check_number, low=1e-6, high=1e6)),
    **dict.fromkeys(("trust_region", "full_tensorboard_log"), check_boolean),
    **dict.fromkeys(("lr_schedule", "ent_schedule"), partial(check_choice, choices=SCHEDULES)),
    "seed": check_seed,
    "tensorboard_log": _or_none(_check_path),
    "replay_buffer_class": _check_buffer_class,
    "verbose": check_verbose,
}
"""
Each returns the value that is used. Weights beyond 1e6 would soon overflow float32, and bounds beyond 1e30 at once.
With a ``replay_ratio`` beyond 1e6 the replay after one rollout would never end. With an epsilon of 0 RMSProp could
divide 0 by 0.
"""

ATTRIBUTES = {"lr_schedule": "lr_schedule_name", "stats_window_size": "_stats_window_size"}
"""attributes of ACER that are not called like their arguments"""


_MAY_DIFFER = {"env", "device", "verbose", "tensorboard_log"}
"""arguments that ranks need not share, and that may change when a run is continued"""
_PLAIN = (bool, int, float, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

OTHER_NAMES = {
    "learning_starts": "replay_start",
    "train_freq": "n_steps",
    "gradient_steps": "replay_ratio",
    "n_epochs": "replay_ratio",
    "tau": "alpha, which is 1 - tau",
    "polyak": "alpha",
    "target_update_interval": "alpha: the average policy moves at every update",
    "vf_coef": "q_coef",
    "clip_range": "delta",
    "target_kl": "delta",
    "clip_range_vf": "none: the critic's targets are not clipped",
    "policy_delay": "none: policy and critic are updated together",
    "target_entropy": "ent_coef and ent_schedule: the weight of the entropy bonus is not learnt",
    "gae_lambda": "none: the traces of Retrace follow from the importance ratios",
    "normalize_advantage": "q_coef and ent_coef, which weigh the parts of the gradient",
    "rms_prop_eps": "rprop_epsilon",
    "use_rms_prop": "policy_kwargs=dict(optimizer_class=...): the default is RMSProp, and Adam for recurrent policies",
    "optimize_memory_usage": "none: frames of stacked images are stored once in any case",
    "action_noise": "ent_coef and policy_kwargs=dict(log_std_init=...): the policy is stochastic",
    "n_envs": "env: make_vec_env(id, n_envs) makes several environments",
    "exploration_initial_eps": "ent_coef and ent_schedule: the policy is stochastic",
    "exploration_fraction": "ent_coef and ent_schedule: the policy is stochastic",
    "exploration_final_eps": "ent_coef and ent_schedule: the policy is stochastic",
    **dict.fromkeys(
        ("use_sde", "sde_sample_freq", "use_sde_at_warmup"), "none: state-dependent exploration is not supported"
    ),
}
"""arguments of other algorithms that users may try, and what ACER has in their place"""

OLD_POLICY_NAMES = {
    "layers": "net_arch",
    "act_fun": "activation_fn",
    "n_lstm": "lstm_hidden_size",
    "layer_norm": "the policy MlpLnLstmPolicy",
    "cnn_extractor": "features_extractor_class",
    "feature_extraction": "the policies MlpPolicy and CnnPolicy",
}
"""arguments of stable-baselines' policies, and what is in their place"""

UNUSED_METHODS = ("_build_mlp_extractor", "make_actor", "make_critic", "make_q_net")
"""methods with which SB3's other policies make their networks"""

_BAD_MODULE_NAME = re.compile("module name can't|attribute '.*' already exists")
"""torch's errors of a name that is empty, has a dot or is that of a method"""

P = ParamSpec("P")


def explain_other_names(init: Callable[P, None]) -> Callable[P, None]:
    """
    Decorate the constructor: an argument of another algorithm of SB3 raises a TypeError that names ACER's own, and a
    third positional argument that looks like a learning rate gives a warning.
    """
    own = signature(init).parameters

    @wraps(init)
    def explained(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in [name for name in kwargs if name not in own]:
            if name in OTHER_NAMES:
                instead = f"instead it has {OTHER_NAMES[name]}".removeprefix("instead it has none: ")
                raise TypeError(f"ACER has no argument {name!r}; {instead}")
            if near := get_close_matches(name, own, n=1, cutoff=0.7):
                raise TypeError(f"ACER has no argument {name!r}; it has {near[0]!r}")
        third = args[3] if len(args) > 3 else None
        if isinstance(third, float) and 0 < third < 0.1:
            warn(
                f"the third argument is gamma, as in stable-baselines, got {third}: if that is the learning rate, "
                f"write learning_rate={third}"
            )
        init(*args, **kwargs)

    return explained


def warn_of_unused_methods(policy_class: type) -> None:
    """
    Warn of methods that a policy's author expects to be called, as those of SB3's other policies are.

    :param policy_class: the policy's class
    """
    if unused := [name for name in UNUSED_METHODS if hasattr(policy_class, name)]:
        warn(
            f"policy {policy_class.__name__} has {', '.join(unused)}, which ACER does not call: policy_kwargs with "
            "net_arch, activation_fn and features_extractor_class, or the method _build, make the networks"
        )


def check_policy_kwargs(policy_kwargs: Any, policy_class: type) -> None:
    """
    :param policy_kwargs: keyword arguments of a policy
    :param policy_class: its class
    :raises ValueError: if the class has no such arguments, or if ACER gives them itself
    """
    try:
        of_acer = ("observation_space", "action_space", "lr_schedule")
        check_kwargs("policy_kwargs", policy_kwargs, policy_class, of_acer, OLD_POLICY_NAMES)
    except ValueError as error:
        raise _with_new_names(str(error), policy_kwargs) from error


@contextmanager
def policy_errors(policy_class: type, policy_kwargs: dict[str, Any], observation_space: Any) -> Iterator[None]:
    """
    While a policy is built: an error of SB3, torch or a subclass that an argument caused names the argument.

    :param policy_class: the policy's class
    :param policy_kwargs: its keyword arguments
    :param observation_space: the observation space
    :raises ValueError: for arguments that the class or its features extractor does not take
    """
    try:
        yield
    except TypeError as error:  # of a class that takes any argument
        others = policy_kwargs.keys() - signature(ACERPolicy).parameters.keys()
        unknown = [name for name in others if f"unexpected keyword argument '{name}'" in str(error)]
        if not unknown:
            raise
        rule = f"policy_kwargs must be arguments of {policy_class.__name__}, got {unknown[0]!r}: {error}"
        raise _with_new_names(rule, policy_kwargs) from error
    except AssertionError as error:  # SB3's features extractors assert that observations and arguments fit
        options = policy_kwargs.get("features_extractor_kwargs")
        if options and not str(error):
            rule = "ones that the features extractor takes for these observations"
            raise ValueError(f"features_extractor_kwargs must be {rule}, got {options!r}") from error
        raise ValueError(f"policy must fit the observations, got {policy_class.__name__}: {error}") from error
    except (RuntimeError, KeyError) as error:
        message = " ".join(map(str, error.args))  # a KeyError's own text has it in quotes
        if "Kernel size" in message:
            least = f"{LEAST_IMAGE} x {LEAST_IMAGE} at least with SB3's NatureCNN"
            rule = f"images with channels first that convolutions fit into, {least}"
        elif isinstance(observation_space, spaces.Dict) and _BAD_MODULE_NAME.search(message):
            rule = "keys that SB3's CombinedExtractor can name its modules after"
        else:
            raise
        raise ValueError(
            f"observation_space must have {rule}, or policy_kwargs another features_extractor_class, got "
            f"{observation_space}: {message}"
        ) from error


def _with_new_names(message: str, policy_kwargs: Any) -> ValueError:
    """The error that also says what is in place of arguments of stable-baselines' policies."""
    old = [name for name in OLD_POLICY_NAMES if name in (policy_kwargs or {})]
    now = ", ".join(f"stable-baselines' {name} is now {OLD_POLICY_NAMES[name]}" for name in old)
    return ValueError(f"{message}; {now}" if now else message)


def comparable_arguments(model: BaseAlgorithm) -> dict[str, Any]:
    """
    :param model: an agent
    :return: the arguments that make its run what it is, by their names, as :func:`comparable` values; a
        ``learning_rate`` that is a function counts by its values at the start, in the middle and at the end
    """
    names = {"policy": "policy_class", **ATTRIBUTES}
    arguments = constructor_arguments(type(model)) - _MAY_DIFFER
    values = {name: vars(model).get(names.get(name, name)) for name in arguments}
    rate = number_or_function(model.learning_rate)
    values["learning_rate"] = [rate(remaining) for remaining in (1.0, 0.5, 0.0)] if callable(rate) else rate
    return {name: comparable(value) for name, value in values.items()}


def comparable(value: Any) -> Any:
    """
    :param value: an argument of the constructor
    :return: the same in a form that ``==`` compares. Arrays become lists, since ``==`` of two arrays gives an array;
        tuples too, since SB3's files hold them so. Classes become their names, since a class of the main program is
        another object once it has been unpickled. For the same reason functions become one text, so that all are equal,
        and other objects the name of their class.
    """
    if isinstance(value, type):
        return f"{value.__module__}.{value.__name__}"  # loading shortens the qualified names of local ones
    if isinstance(value, dict):
        return {key: comparable(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) in (list, tuple):
        return list(map(comparable, value))
    if isinstance(value, (*_PLAIN, set, deque)):
        return value
    return "a function" if callable(value) else f"a {type(value).__name__}"


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, strings, arrays and random generators."""
    if isinstance(value, dict):
        return all(is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(is_plain, value))
    return isinstance(value, (np.ndarray, *_PLAIN, *_GENERATORS))


def check_callback(name: str, value: Any) -> None:
    """
    :raises ValueError: if the value is nothing that SB3 takes for a callback
    """
    parts = value if isinstance(value, list) else [value]
    is_function = callable(value) and not isinstance(value, type)
    is_callback = all(isinstance(part, BaseCallback) for part in parts) or value is None or is_function
    require(is_callback, name, "a callback of SB3, a list of them, a function, or None", value)


def make_env(env: Any, verbose: int) -> gym.Env[Any, Any] | VecEnv:
    """
    :param env: environment, or the id of a registered one
    :param verbose: whether to print that it is made
    :return: the environment
    :raises ValueError: if it is neither
    """
    if not isinstance(env, str):
        is_env = hasattr(env, "reset") and hasattr(env, "step") and not isinstance(env, type)
        rule = "an environment, or a VecEnv of stable-baselines3 (make_vec_env)"
        require(is_env and not isinstance(env, gym.vector.VectorEnv), "env", rule, env)
        check_observation_space(getattr(env, "observation_space", None))
        return cast(VecEnv, env)
    try:
        return maybe_make_env(env, verbose)
    except gym.error.DependencyNotInstalled:
        raise
    except gym.error.Error as error:
        rule = "an environment, or the id of a registered one (by a package that has been imported)"
        raise ValueError(f"env must be {rule}, got {env!r}: {error}") from error


def set_num_threads(num_procs: Any, n_cpu_tf_sess: Any) -> None:
    """
    Set torch's number of threads, if an old script gives one.

    :param num_procs: stable-baselines' argument of that name
    :param n_cpu_tf_sess: stable-baselines' argument of that name
    """
    for name, n_threads in (("num_procs", num_procs), ("n_cpu_tf_sess", n_cpu_tf_sess)):
        if n_threads is not None:
            n_threads = check_integer(name, n_threads, 1, 4096)
            message = f"{name} is deprecated: torch.set_num_threads({n_threads}) is called"
            warn(message, DeprecationWarning)
            th.set_num_threads(n_threads)
