"""
Converts agents saved by stable-baselines' ACER to agents of this package: parameters, arguments, observation
statistics.

The files are untrusted: :mod:`sb3_acer.sb2_compat.pickles` reads them without running code that they contain.
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
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, VecTransposeImage, unwrap_vec_normalize
from torch import nn

from sb3_acer.acer import ACER
from sb3_acer.checks import require, warn
from sb3_acer.sb2_compat.networks import (
    ACTIVATIONS,
    Network,
    fit_network,
    is_transposed,
    make_design,
    make_network,
    make_policy_kwargs,
    set_parameters,
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
"""parsed JSON takes up to twenty times as much memory"""

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
"""arguments of ACER that are taken from a file, and their types"""

# Names that the file of an agent usually contains. Others are reported.
_EXPECTED = re.compile(
    r"numpy\.(ndarray|dtype|core\.multiarray\.(_reconstruct|scalar)|core\.numeric\._frombuffer"
    r"|random\.\w+\.(RandomState|MT19937|__\w+_ctor)|u?int\d+|float\d+|bool_?)"
    r"|gym\.spaces\.\w+\.(Box|Discrete|MultiDiscrete|MultiBinary)|stable_baselines\.common\.policies\.\w+"
    rf"|tensorflow\.python\.ops\.\w+\.({'|'.join(ACTIVATIONS)})"
    r"|_codecs\.encode|collections\.OrderedDict|copy_?reg\._reconstructor|(__builtin__|builtins)\.object"
)


class MigrationError(ValueError):
    """A file of stable-baselines cannot be read or converted. The message has the file's name and the reason."""


class Saved(NamedTuple):
    """The content of a file."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Discrete
    n_envs: int
    arguments: dict[str, Any]
    """arguments of ACER"""
    activation_fn: type[nn.Module]
    network: Network
    left_out: list[str]
    """unusual content that is not used"""


def load_stable_baselines(
    path: str | Path, env: GymEnv | str | None = None, *, obs_rms: str | Path | None = None, **kwargs: Any
) -> ACER:
    """
    Load an agent that stable-baselines' ACER saved, in either of its formats, without running code of the file.

    stable-baselines saves neither the average policy nor the optimiser's state. The average policy becomes a copy of
    the policy, and the optimiser starts anew.

    :param path: the file; the suffix ``.zip`` or ``.pkl`` may be left out
    :param env: environment for further training, or the name of a registered one. The bounds of its observation space
        may differ from the saved ones.
    :param obs_rms: file with the running mean and variance of the observations, saved by
        ``VecNormalize.save_running_average`` or as a whole ``VecNormalize``. ``model.get_env()`` is then a VecNormalize
        around ``env`` that normalises observations without updating its statistics, see :func:`load_obs_rms`. Without
        ``env`` there is only ``model.get_vec_normalize_env()``, which can normalise observations and be saved.
    :param kwargs: arguments of :class:`ACER` that replace the saved ones. ``policy``, and ``net_arch``, ``layers`` and
        ``act_fun`` in ``policy_kwargs``, have their meaning in stable-baselines: for a custom policy class, they say
        which policy of stable-baselines has the same network.
    :return: the agent
    :raises MigrationError: if the file's content cannot be read or converted, or if ``env`` has other observations or
        actions
    :raises OSError: if the file cannot be opened
    """
    require(isinstance(path, (str, Path)), "path", "the path of a file", path)
    require(obs_rms is None or isinstance(obs_rms, (str, Path)), "obs_rms", "the path of a file", obs_rms)
    path = _find(Path(path))
    policy_kwargs = dict(kwargs.pop("policy_kwargs", None) or {})
    old_kwargs = {key: policy_kwargs.pop(key) for key in ("net_arch", "layers", "act_fun") if key in policy_kwargs}
    saved = read_stable_baselines(path, kwargs.pop("policy", None), old_kwargs)
    if saved.left_out:
        warn(f"{path}: left out {listed(saved.left_out)}")
    policy, fitting_kwargs = make_policy_kwargs(saved.network, saved.activation_fn)
    policy_kwargs = {"optimizer_class": RMSpropTFLike, **fitting_kwargs, **policy_kwargs}  # for LSTMs too
    arguments = {**saved.arguments, **kwargs, "policy_kwargs": policy_kwargs}
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
    set_parameters(model.policy, saved.network)
    model.average_policy.load_state_dict(model.policy.state_dict())
    return model


def load_obs_rms(path: str | Path, venv: VecEnv) -> VecNormalize:
    """
    Normalise observations by statistics that stable-baselines saved.

    :param path: file of ``VecNormalize.save_running_average`` (``obs_rms.pkl``), or of a whole ``VecNormalize``
    :param venv: the environment
    :return: a VecNormalize around it, which does not update its statistics (``training`` is False) and does not
        normalise rewards
    :raises ValueError: if ``venv`` is normalised already
    :raises MigrationError: if the file's content cannot be read, or if its statistics do not fit the observations
    :raises OSError: if the file cannot be opened
    """
    path = Path(path)
    if unwrap_vec_normalize(venv) is not None:
        raise ValueError(f"obs_rms must be None for an env that is normalised already, got {str(path)!r}")
    with _named(path):
        _, fields = _object(PickleReader().read(read_file(path)))
        settings: dict[str, float] = {
            name: float(to_scalar(fields[name])) for name in ("clip_obs", "epsilon") if name in fields
        }
        norm_obs = bool(fields.get("norm_obs", True))
        _, fields = _object(fields["obs_rms"]) if "obs_rms" in fields else ("", fields)
        mean, var = (to_array(fields[name]).astype(np.float64) for name in ("mean", "var"))
        count = float(to_scalar(fields["count"]))
        space = venv.observation_space
        if not (mean.shape == var.shape == space.shape):
            raise ValueError(f"statistics have the shapes {mean.shape} and {var.shape}, but observations are {space}")
        if not (
            np.isfinite((mean, var)).all() and (var >= 0).all() and all(x > 0 for x in (count, *settings.values()))
        ):
            raise ValueError("means and variances must be finite, variances at least 0, other statistics above 0")
        normalize = VecNormalize(venv, training=False, norm_obs=norm_obs, norm_reward=False)
    vars(normalize).update(settings)
    if norm_obs:
        vars(normalize.obs_rms).update(mean=mean, var=var, count=count)
    return normalize


def read_stable_baselines(path: Path, policy: str | None, policy_kwargs: dict[str, Any]) -> Saved:
    """
    :param path: file of an agent
    :param policy: name of a policy of stable-baselines; None: the saved one
    :param policy_kwargs: replace the saved ones
    :return: the content of the file
    :raises MigrationError: if the content cannot be read or converted
    :raises OSError: if the file cannot be opened
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
            [*unexpected, *(f"{name} ({type(arguments[name]).__name__})" for name in wrong)],
        )


def _read_pickle(content: bytes, reader: PickleReader) -> tuple[dict[str, Any], Any]:
    match reader.read(content):
        case (dict() as data, list() | dict() as parameters):
            pass
        case _:
            raise ValueError("the pickle must contain a dict and arrays")
    arrays, n_bytes = [], 0
    for value in parameters.values() if isinstance(parameters, dict) else parameters:
        arrays.append(to_array(value))
        n_bytes += arrays[-1].nbytes
        if n_bytes > len(content):
            raise ValueError("the arrays have more bytes than the file")
    if isinstance(parameters, dict):
        return data, dict(zip(map(_short_name, parameters), arrays, strict=True))
    return data, arrays


def _read_zip(content: bytes, reader: PickleReader) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with read_zip(content) as archive:
        missing = {"data", "parameters", "parameter_list"} - set(archive.namelist())
        if missing:
            raise ValueError(f"the zip archive is not from stable-baselines (2): it lacks {listed(sorted(missing))}")
        for name in ("data", "parameter_list"):
            if archive.getinfo(name).file_size > MAX_JSON_BYTES:
                raise ValueError(f"{name} has more than {MAX_JSON_BYTES} bytes")
        data, names = (json.loads(archive.read(name)) for name in ("data", "parameter_list"))
        if not (isinstance(data, dict) and isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("data must be a JSON object, and parameter_list a list of names")
        with read_zip(archive.read("parameters")) as parameters:
            arrays = {_short_name(name): read_npy(parameters.read(f"{name}.npy")) for name in dict.fromkeys(names)}
    return {key: _deserialized(value, reader) for key, value in data.items()}, arrays


def _deserialized(value: Any, reader: PickleReader) -> Any:
    pickled = value.get(":serialized:") if isinstance(value, dict) else None
    return value if pickled is None else reader.read(base64.b64decode(pickled))


def _short_name(name: str) -> str:
    """The name of a TensorFlow variable without scope and index."""
    return name.removeprefix("model/").removesuffix(":0")


def _is_admitted(name: str, value: Any) -> bool:
    fits = isinstance(value, ARGUMENTS[name])
    return fits and (math.isfinite(value) if isinstance(value, _NUMBER) else value is None or len(value) < 100)


def to_space(value: Any) -> spaces.Space[Any]:
    """
    :param value: record of a space of gym
    :return: the same space of gymnasium
    :raises ValueError: for other values, and for spaces that stable-baselines' policies do not support
    """
    name, fields = _object(value)
    match name.rpartition(".")[2]:
        case "Box":
            low, high = to_array(fields["low"]), to_array(fields["high"])
            dtype = to_dtype(fields.get("dtype", "float32"))
            if dtype.kind == "f":  # gym uses the largest float where gymnasium uses infinity
                huge = np.finfo(np.float32).max
                low, high = np.where(low <= -huge, -np.inf, low), np.where(high >= huge, np.inf, high)
            return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
        case "Discrete":
            return spaces.Discrete(to_scalar(fields["n"]))
        case "MultiDiscrete":
            return spaces.MultiDiscrete(to_array(fields["nvec"]).astype(np.int64))
        case "MultiBinary":
            return spaces.MultiBinary(to_scalar(fields["n"]))
    raise ValueError(f"expected a space of gym, found {name}")


def _object(value: Any) -> tuple[str, dict[str, Any]]:
    """The name of the object's class, and the object's attributes."""
    if isinstance(value, Record) and isinstance(value.state, dict):
        return value.name, value.state
    raise ValueError(f"expected an object with attributes, found {type(value).__name__}")


def _find(path: Path) -> Path:
    """The path of an existing file, with a suffix if needed, like stable-baselines."""
    return next((each for each in (path, Path(f"{path}.zip"), Path(f"{path}.pkl")) if each.is_file()), path)


@contextmanager
def _named(path: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors into a MigrationError with the file's name. An OSError, if the file cannot be opened, stays."""
    try:
        yield
    except (MigrationError, OSError):
        raise
    except errors as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise MigrationError(f"{path} cannot be migrated: {reason}") from error


def _require_alike(path: Path, env: VecEnv, space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Check the spaces of an environment. Bounds may differ, since those of gymnasium's and gym's environments do."""
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
    """An environment that only has spaces."""
    env: gym.Env[Any, Any] = gym.Env()
    env.observation_space, env.action_space = observation_space, action_space
    return DummyVecEnv([lambda: env])


def main(arguments: list[str]) -> None:
    """
    :param arguments: of the command line
    """
    parser = argparse.ArgumentParser(
        "sb3-acer migrate", description="Convert an agent saved by stable-baselines' ACER."
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="the saved agent, a pickle or a zip archive")
    parser.add_argument("new", metavar="NEW", type=Path, help="the file to write, for ACER.load")
    parser.add_argument("--obs-rms", type=Path, help="file with statistics of the observations (obs_rms.pkl)")
    parser.add_argument("--env", help="environment with the saved spaces; bounds of observations are taken from it")
    options = parser.parse_args(arguments)
    if not options.new.name:
        parser.error(f"NEW must be the path of a file, got {options.new}")
    new = options.new if options.new.suffix else options.new.with_suffix(".zip")
    statistics = new.with_suffix("") / "vecnormalize.pkl"
    # An agent that was saved with verbose=1 prints when it is made.
    with warnings.catch_warnings(record=True) as said, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            if new.resolve() == _find(options.old).resolve():
                parser.error(f"NEW must be another file than OLD, got {new} for both")
            model = load_stable_baselines(options.old, options.env, obs_rms=options.obs_rms)
            normalize = model.get_vec_normalize_env()
            if normalize is not None:
                statistics.parent.mkdir(parents=True, exist_ok=True)
                normalize.save(str(statistics))
            new.parent.mkdir(parents=True, exist_ok=True)
            model.save(new)
        except (ValueError, OSError, gym.error.Error) as error:
            sys.exit(f"sb3-acer migrate: {error}")
    n_parameters = sum(parameter.numel() for parameter in model.policy.parameters())
    print(f"{type(model.policy).__name__} with {n_parameters} parameters: {new}")
    for warning in said:
        print(f"Note: {warning.message}")
    snippet = ["from sb3_acer import ACER", f"model = ACER.load({str(new)!r})"]
    if normalize is not None:
        print(f"Statistics of the observations: {statistics}")
        snippet.insert(0, "from stable_baselines3.common.vec_env import VecNormalize")
        snippet.append(f"env = VecNormalize.load({str(statistics)!r}, env)  # env: the vectorised environment")
    print("To use it:", *snippet, sep="\n    ")
