"""
Agents that stable-baselines' ACER saved, as agents of this package: weights, arguments, observation statistics.

Their files are not trusted: :mod:`sb3_acer.sb2_compat.pickles` reads them, and nothing of theirs runs.
"""

import argparse
import base64
import io
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, VecTransposeImage, unwrap_vec_normalize
from torch import nn

from sb3_acer.acer import ACER
from sb3_acer.sb2_compat.networks import (
    ACTIVATIONS,
    Network,
    fit_network,
    is_transposed,
    make_design,
    make_network,
    make_policy_kwargs,
    set_weights,
)
from sb3_acer.sb2_compat.pickles import (
    PickleReader,
    Record,
    listed,
    read_file,
    read_npy,
    read_zip,
    to_array,
    to_dtype,
    to_scalar,
)

MAX_JSON_BYTES = 2**24
"""as objects, JSON takes up to twenty times its bytes"""

_NUMBER = (int, float)
ARGUMENTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("gamma", "q_coef", "ent_coef", "learning_rate", "rprop_alpha", "rprop_epsilon"), _NUMBER),
    **dict.fromkeys(("replay_ratio", "replay_start", "correction_term", "alpha", "delta"), _NUMBER),
    **dict.fromkeys(("n_steps", "buffer_size", "verbose"), (int,)),
    "lr_schedule": (str,),
    "trust_region": (bool,),
    "max_grad_norm": (*_NUMBER, type(None)),
    "seed": (int, type(None)),
}
"""of ACER, as a file may hold them"""

# What an agent's file has to name: it is read off its records, or of no use here.
_EXPECTED = re.compile(
    r"numpy\.(ndarray|dtype|core\.multiarray\.(_reconstruct|scalar)|core\.numeric\._frombuffer"
    r"|random\.\w+\.(RandomState|MT19937|__\w+_ctor)|u?int\d+|float\d+|bool_?)"
    r"|gym\.spaces\.\w+\.(Box|Discrete|MultiDiscrete|MultiBinary)|stable_baselines\.common\.policies\.\w+"
    rf"|tensorflow\.python\.ops\.\w+\.({'|'.join(ACTIVATIONS)})"
    r"|_codecs\.encode|collections\.OrderedDict|copy_?reg\._reconstructor|(__builtin__|builtins)\.object"
)


class MigrationError(ValueError):
    """A file of stable-baselines cannot be read or converted; the message names the file and the reason."""


class Saved(NamedTuple):
    """What is taken from a file."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Discrete
    n_envs: int
    arguments: dict[str, Any]
    """of ACER"""
    activation_fn: type[nn.Module]
    network: Network
    left_out: list[str]
    """what the file holds besides, where that is unusual"""


def load_stable_baselines(
    path: str | Path, env: GymEnv | str | None = None, *, obs_rms: str | Path | None = None, **kwargs: Any
) -> ACER:
    """
    Load an agent that stable-baselines' ACER saved, in either of its formats, without running anything of the file's.

    The average policy and the optimiser's state, which stable-baselines does not save, begin anew: the former as a copy
    of the policy.

    :param path: the file; its suffix ``.zip`` or ``.pkl`` can be left out
    :param env: environment to go on in, or the name of a registered one. The bounds of its observations may be others
        than those that were saved.
    :param obs_rms: file of the observations' running mean and variance: of ``VecNormalize.save_running_average``, or a
        whole ``VecNormalize``. ``model.get_env()`` then normalises observations as the agent knows them, by a
        VecNormalize around ``env`` that learns no more (see :func:`load_obs_rms`). Without ``env``, only
        ``model.get_vec_normalize_env()`` is there, to normalise single observations or to be saved.
    :param kwargs: arguments of :class:`ACER`, which replace what was saved. ``policy`` and, of ``policy_kwargs``,
        ``net_arch``, ``layers`` and ``act_fun`` are understood as in stable-baselines: for a policy class of one's own,
        they say which of stable-baselines' it is like.
    :return: the agent
    :raises MigrationError: if the file cannot be read or converted, or if ``env`` has other observations or actions
    """
    path = _find(Path(path))
    policy_kwargs = dict(kwargs.pop("policy_kwargs", None) or {})
    old_kwargs = {key: policy_kwargs.pop(key) for key in ("net_arch", "layers", "act_fun") if key in policy_kwargs}
    saved = read_stable_baselines(path, kwargs.pop("policy", None), old_kwargs)
    if saved.left_out:
        warnings.warn(f"{path}: left out {listed(saved.left_out)}", stacklevel=2)
    policy, fitting_kwargs = make_policy_kwargs(saved.network, saved.activation_fn)
    arguments = {**saved.arguments, **kwargs, "policy_kwargs": {**fitting_kwargs, **policy_kwargs}}
    space = saved.observation_space
    space = VecTransposeImage.transpose_space(space) if is_transposed(space) else space  # type: ignore[arg-type]
    if env is not None:
        env = ACER._wrap_env(maybe_make_env(env, 0))
        _require_alike(path, env, space, saved.action_space)
        env = env if obs_rms is None else load_obs_rms(obs_rms, env)
    with _named(path, ValueError):
        model = ACER(policy, env, _init_setup_model=False, **arguments)
        if env is None:
            model.observation_space, model.action_space = space, saved.action_space
            model.n_envs = saved.n_envs
        model._setup_model()
    if env is None and obs_rms is not None:
        model._vec_normalize_env = load_obs_rms(obs_rms, _stand_in(space, saved.action_space))
    set_weights(model.policy, saved.network)
    model.average_policy.load_state_dict(model.policy.state_dict())
    return model


def load_obs_rms(path: str | Path, venv: VecEnv) -> VecNormalize:
    """
    Normalise observations by the statistics that stable-baselines saved, as an agent was evaluated there.

    :param path: file of ``VecNormalize.save_running_average`` (``obs_rms.pkl``), or of a whole ``VecNormalize``
    :param venv: the environment
    :return: a VecNormalize around it, which neither goes on to learn (``training`` is False) nor normalises rewards
    :raises ValueError: if ``venv`` is normalised already
    :raises MigrationError: if the file cannot be read, or its statistics are of other observations
    """
    path = Path(path)
    if unwrap_vec_normalize(venv) is not None:
        raise ValueError(f"obs_rms must be None for an env that is normalised already, got {str(path)!r}")
    with _named(path):
        _, fields = _object(PickleReader().read(read_file(path)))
        settings: dict[str, float] = {
            name: float(to_scalar(fields[name])) for name in ("clip_obs", "epsilon") if name in fields
        }
        _, fields = _object(fields["obs_rms"]) if "obs_rms" in fields else ("", fields)
        mean, var = (to_array(fields[name]).astype(np.float64) for name in ("mean", "var"))
        count = float(to_scalar(fields["count"]))
        space = venv.observation_space
        if not (mean.shape == var.shape == space.shape):
            raise ValueError(f"its statistics are of the shapes {mean.shape} and {var.shape}, observations {space}")
        if not (
            np.isfinite((mean, var)).all() and (var >= 0).all() and all(x > 0 for x in (count, *settings.values()))
        ):
            raise ValueError("a mean is not finite, or another statistic is not positive")
        normalize = VecNormalize(venv, training=False, norm_reward=False)
    vars(normalize).update(settings)
    vars(normalize.obs_rms).update(mean=mean, var=var, count=count)
    return normalize


def read_stable_baselines(path: Path, policy: str | None, policy_kwargs: dict[str, Any]) -> Saved:
    """
    :param path: file of an agent
    :param policy: replaces the name of the saved policy's class
    :param policy_kwargs: replace what was saved of them
    :raises MigrationError: if the file cannot be read or converted
    """
    with _named(path):
        content, reader = read_file(path), PickleReader()
        data, arrays = _read_zip(content, reader) if content.startswith(b"PK") else _read_pickle(content, reader)
        space, action_space = to_space(data["observation_space"]), to_space(data["action_space"])
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"actions must be Discrete, got {action_space}")
        design = make_design(policy or data["policy"], {**(data.get("policy_kwargs") or {}), **policy_kwargs})
        if isinstance(arrays, dict):
            network = make_network(arrays, space, int(action_space.n))
        else:
            network = fit_network(arrays, design, space, int(action_space.n))
        arguments = {name: to_scalar(data[name]) for name in ARGUMENTS if name in data}
        wrong = [name for name, value in arguments.items() if not _is_admitted(name, value)]
        unexpected = sorted(name for name in reader.names if not _EXPECTED.fullmatch(name))
        n_envs = data.get("n_envs")
        return Saved(
            space,
            action_space,
            n_envs if isinstance(n_envs, int) and 1 <= n_envs < 2**16 else 1,
            {name: value for name, value in arguments.items() if name not in wrong},
            design.activation_fn,
            network,
            [*unexpected, *(f"{name}, a {type(arguments[name]).__name__}" for name in wrong)],
        )


def _read_pickle(content: bytes, reader: PickleReader) -> tuple[dict[str, Any], Any]:
    match reader.read(content):
        case (dict() as data, list() | dict() as parameters):
            pass
        case _:
            raise ValueError("it must hold a dict and arrays")
    arrays, n_bytes = [], 0
    for value in parameters.values() if isinstance(parameters, dict) else parameters:
        arrays.append(to_array(value))
        n_bytes += arrays[-1].nbytes
        if n_bytes > len(content):
            raise ValueError("it has more arrays than bytes")
    if isinstance(parameters, dict):
        return data, dict(zip(map(_short_name, parameters), arrays, strict=True))
    return data, arrays


def _read_zip(content: bytes, reader: PickleReader) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with read_zip(content) as archive:
        missing = {"data", "parameters", "parameter_list"} - set(archive.namelist())
        if missing:
            raise ValueError(f"it is no zip archive of stable-baselines (2), for it lacks {listed(sorted(missing))}")
        for name in ("data", "parameter_list"):
            if archive.getinfo(name).file_size > MAX_JSON_BYTES:
                raise ValueError(f"its {name} has more than {MAX_JSON_BYTES} bytes")
        data, names = (json.loads(archive.read(name)) for name in ("data", "parameter_list"))
        if not (isinstance(data, dict) and isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("its JSON must be a dict and a list of names")
        with read_zip(archive.read("parameters")) as parameters:
            arrays = {_short_name(name): read_npy(parameters.read(f"{name}.npy")) for name in dict.fromkeys(names)}
    return {key: _deserialized(value, reader) for key, value in data.items()}, arrays


def _deserialized(value: Any, reader: PickleReader) -> Any:
    pickled = value.get(":serialized:") if isinstance(value, dict) else None
    return value if pickled is None else reader.read(base64.b64decode(pickled))


def _short_name(name: str) -> str:
    """A TensorFlow variable's without scope and index."""
    return name.removeprefix("model/").removesuffix(":0")


def _is_admitted(name: str, value: Any) -> bool:
    fits = isinstance(value, ARGUMENTS[name])
    return fits and (math.isfinite(value) if isinstance(value, _NUMBER) else value is None or len(value) < 100)


def to_space(value: Any) -> spaces.Space[Any]:
    """
    :param value: record of one of gym's spaces
    :return: the same of gymnasium's
    :raises ValueError: if it is none, or one of another kind than stable-baselines' policies took
    """
    name, fields = _object(value)
    match name.removeprefix("gym.spaces.").rpartition(".")[2]:
        case "Box":
            low, high = to_array(fields["low"]), to_array(fields["high"])
            dtype = to_dtype(fields.get("dtype", "float32"))
            if dtype.kind == "f":  # gym's environments had the largest float where gymnasium's have infinity
                huge = np.finfo(np.float32).max
                low, high = np.where(low <= -huge, -np.inf, low), np.where(high >= huge, np.inf, high)
            return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
        case "Discrete":
            return spaces.Discrete(to_scalar(fields["n"]))
        case "MultiDiscrete":
            return spaces.MultiDiscrete(to_array(fields["nvec"]).astype(np.int64))
        case "MultiBinary":
            return spaces.MultiBinary(to_scalar(fields["n"]))
    raise ValueError(f"it has a {name} where one of gym's spaces should be")


def _object(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and attributes."""
    if isinstance(value, Record) and isinstance(value.state, dict):
        return value.name, value.state
    raise ValueError(f"it has a {type(value).__name__} where an object with attributes should be")


def _find(path: Path) -> Path:
    """As stable-baselines did, which adds a suffix where there is none."""
    return next((each for each in (path, Path(f"{path}.zip"), Path(f"{path}.pkl")) if each.is_file()), path)


@contextmanager
def _named(path: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """Whatever goes wrong is a MigrationError that names the file; a file that cannot be opened stays an OSError."""
    try:
        yield
    except (MigrationError, OSError):
        raise
    except errors as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise MigrationError(f"{path} cannot be migrated: {reason}") from error


def _require_alike(path: Path, env: VecEnv, space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Bounds may differ: gymnasium's environments have others than gym's."""
    alike = (
        isinstance(env.observation_space, spaces.Box)
        and env.observation_space.shape == space.shape
        and is_image_space(env.observation_space) == is_image_space(space)
        if isinstance(space, spaces.Box)
        else env.observation_space == space
    )
    if not (alike and env.action_space == action_space):
        raise MigrationError(
            f"{path} cannot be migrated: env must have the spaces {space} and {action_space}, got "
            f"{env.observation_space} and {env.action_space}"
        )


def _stand_in(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> VecEnv:
    """An environment that has spaces and no more."""
    env: gym.Env[Any, Any] = gym.Env()
    env.observation_space, env.action_space = observation_space, action_space
    return DummyVecEnv([lambda: env])


def main(arguments: list[str]) -> None:
    """convert an agent saved by stable-baselines"""
    parser = argparse.ArgumentParser(
        "sb3-acer migrate", description="Convert an agent saved by stable-baselines' ACER."
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="the file, a pickle or a zip archive")
    parser.add_argument("new", metavar="NEW", type=Path, help="the file to write, for ACER.load")
    parser.add_argument("--obs-rms", type=Path, help="running mean and variance of the observations (obs_rms.pkl)")
    parser.add_argument("--env", help="name of the environment, to take its spaces instead of the saved ones")
    options = parser.parse_args(arguments)
    new = options.new if options.new.suffix else options.new.with_suffix(".zip")
    # An agent that was saved as verbose prints while it is made.
    with warnings.catch_warnings(record=True) as said, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            model = load_stable_baselines(options.old, options.env, obs_rms=options.obs_rms)
            model.save(new)
        except (ValueError, OSError, gym.error.Error) as error:
            sys.exit(f"sb3-acer migrate: {error}")
    n_weights = sum(weight.numel() for weight in model.policy.parameters())
    print(f"{type(model.policy).__name__} with {n_weights} weights: {new}")
    for warning in said:
        print(f"Note: {warning.message}")
    snippet = ["from sb3_acer import ACER", f"model = ACER.load({str(new)!r})"]
    normalize = model.get_vec_normalize_env()
    if normalize is not None:
        statistics = new.with_name("vecnormalize.pkl")
        normalize.save(str(statistics))
        print(f"Statistics of the observations: {statistics}")
        snippet.insert(0, "from stable_baselines3.common.vec_env import VecNormalize")
        snippet.append(f"env = VecNormalize.load({str(statistics)!r}, env)  # env: the vectorised environment")
    print("To use it:", *snippet, sep="\n    ")
