"""
The state of environments, to be set again in another process.

Environments and wrappers with the methods ``get_state()`` and ``set_state(state)`` are saved by these. Of all others
the attributes are pickled; of ale-py's emulator its own state is saved, with its random numbers, and MuJoCo's
``MjData`` is saved whole. Files, windows and functions are not saved, so an environment keeps its own when a state is
set. A method is saved together with its object, unless the object belongs to the process, as the global generators of
``random`` and NumPy do. Classes and functions of the program itself are saved by their names.
"""

import io
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize

_OF_THE_PROCESS = (
    io.IOBase,
    ResultsWriter,
    EnvSpec,
    FunctionType,
    ModuleType,
    type,
)
_GLOBAL_GENERATORS = (random._inst, np.random.mtrand._rand)
# Attributes of SB3's wrappers that are derived from the environment under them.
_OF_THE_WRAPPER = ("venv", "class_attributes")
_NORMALIZE = VecNormalize.__qualname__
_SETTINGS = ("norm_obs", "norm_obs_keys", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")
"""of VecNormalize"""


class EnvState(NamedTuple):
    """State of a vectorised environment."""

    wrappers: bytes
    """attributes of the wrappers around the vectorised environment, such as VecNormalize's"""
    n_envs: int
    envs: Any
    """state of the environments themselves; None if it is not available"""
    source: str
    """where the environments' state is from, or why it is not available"""


class Log(NamedTuple):
    """A file of Monitor with rows of episodes that ended after the state that was set."""

    path: str
    size: int
    """bytes that it had in that state"""
    found: int
    """bytes that it had when the state was set"""


class EnvStateError(Exception):
    """The state of an environment cannot be saved or restored."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles attributes of layers (an environment and its wrappers), in which the layers themselves are references."""

    def __init__(self, file: io.BytesIO, layers: Iterable[Any]) -> None:
        super().__init__(file)
        self._index = {id(layer): index for index, layer in enumerate(layers)}

    def persistent_id(self, value: Any) -> int | None:
        return self._index.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, EzPickle):
            raise EnvStateError(f"a pickled {type(value).__name__} has its arguments only")
        if isinstance(value, (type, FunctionType)) and _is_of_program(value):
            return _find_in_program, (value.__qualname__, cloudpickle.dumps(value))
        return super().reducer_override(value)


def _is_of_program(value: Any) -> bool:
    """
    Whether this is a class or function of the main program that can be found by its name. cloudpickle would copy it,
    and the members of a copied Enum, say, are not equal to those of the program's own.
    """
    try:
        found = attrgetter(value.__qualname__)(sys.modules["__main__"])
    except AttributeError:  # of a function's local variables
        return False
    return value.__module__ in ("__main__", "__mp_main__") and found is value


def _find_in_program(qualified_name: str, pickled: bytes) -> Any:
    """A class or function of the main program; where another program loads the state, a copy of that one's."""
    try:
        return attrgetter(qualified_name)(sys.modules["__main__"])
    except AttributeError:
        return pickle.loads(pickled)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, index: int) -> Any:
        return self._layers[index]


def get_env_state(env: VecEnv) -> EnvState:
    """
    :param env: a vectorised environment between two steps
    :return: its state; the environment does not change
    """
    *wrappers, base = _vec_layers(env)
    names = [type(layer).__qualname__ for layer in wrappers]
    attributes = [_attributes(layer, _OF_THE_WRAPPER) for layer in wrappers]
    layers = [*wrappers, base]
    try:
        return EnvState(_pickled([names, attributes], layers), env.num_envs, *_base_state(base))
    except Exception as error:
        statistics = [
            {**_settings(layer), **{name: v for name, v in values.items() if _is_statistic(v)}}
            for layer, values in zip(wrappers, attributes, strict=True)
        ]
        return EnvState(_pickled([names, statistics], layers), env.num_envs, None, _reason(error))


def set_env_state(env: VecEnv, state: EnvState) -> list[Log]:
    """
    :param env: a vectorised environment, made as the other one was
    :param state: what :func:`get_env_state` returned
    :return: for :func:`cut_logs`, until which Monitor's files stay as they are
    :raises EnvStateError: if the environments' state cannot be set. They must be reset then. The wrappers' statistics
        are set even so.
    :raises ValueError: if one of the two is normalised by VecNormalize and the other is not, or in another way
    """
    *wrappers, base = _vec_layers(env)
    names, attributes = _unpickled(state.wrappers, [*wrappers, base])
    own_names = [type(layer).__qualname__ for layer in wrappers]
    if (_NORMALIZE in names) != (_NORMALIZE in own_names):
        rule = "be wrapped" if _NORMALIZE in names else "not be wrapped"
        raise ValueError(f"env must {rule} in {_NORMALIZE}: the environment had the wrappers {names}")
    is_same = names == own_names
    by_name = dict(zip(names, attributes, strict=True))
    found = attributes if is_same else [by_name.get(name, {}) for name in own_names]
    for layer, saved in zip(wrappers, found, strict=True):
        for name, value in _settings(layer).items():
            if saved.get(name, value) != value:
                rule = f"be wrapped in {_NORMALIZE} with {name}={saved[name]!r}, as it was"
                raise ValueError(f"env must {rule}, got {value!r}")
    is_same_number = state.n_envs == env.num_envs
    keeps_all = is_same and is_same_number
    for layer, saved in zip(wrappers, found, strict=True):
        vars(layer).update({name: v for name, v in saved.items() if keeps_all or _is_statistic(v)})
    if not is_same:
        raise EnvStateError(f"the environment had the wrappers {names}")
    if not is_same_number:
        raise EnvStateError(f"there were {state.n_envs} environments, and now there are {env.num_envs}")
    if state.envs is None:
        raise EnvStateError(state.source)
    try:
        return _set_base_state(base, state.envs)
    except Exception as error:
        raise EnvStateError(_reason(error)) from error


def cut_logs(env: VecEnv, logs: Sequence[Log]) -> None:
    """
    Before the first step from a state that was set: cut off Monitor's rows of later episodes, which are played again.
    A file that has changed since the state was set stays as it is.

    :param env: the environment
    :param logs: what :func:`set_env_state` returned, of this environment and of others
    """
    base = _vec_layers(env)[-1]
    if logs and isinstance(base, (DummyVecEnv, SubprocVecEnv)):
        call_in_envs(base, _cut_logs, logs)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, EnvStateError) else f"{type(error).__name__}: {error}"


@contextmanager
def dead_workers_named(env: VecEnv) -> Iterator[None]:
    """
    If an environment's process has ended, end the other processes, so that the vectorised environment can be closed,
    and raise an error that names the environment. A process that raises an exception prints its traceback itself.

    :raises RuntimeError: in place of an EOFError or ConnectionError, which would not say what has ended; and if the
        processes had ended before
    """
    base = _vec_layers(env)[-1]
    if hasattr(base, "processes") and base.closed:
        raise RuntimeError("the environments' processes have ended: give the agent other environments by set_env")
    try:
        yield
    except (EOFError, ConnectionError) as error:
        sentinels = [process.sentinel for process in getattr(base, "processes", [])]
        ended = connection.wait(sentinels, timeout=60) if sentinels else []
        if not ended:
            raise
        reasons = [_end_of(base.processes[index], index) for index, each in enumerate(sentinels) if each in ended]
        for process in base.processes:
            process.kill()
        for process, remote in zip(base.processes, base.remotes, strict=True):
            process.join()
            remote.close()
        base.closed = True  # close would wait for answers
        raise RuntimeError("; ".join(reasons)) from error


def forked_workers(env: VecEnv) -> list[tuple[Any, Any]]:
    """
    :param env: a vectorised environment
    :return: pipe and process of each environment, where the processes were forked
    """
    base = _vec_layers(env)[-1]
    processes = getattr(base, "processes", [])
    is_forked = any(type(process).__name__ == "ForkProcess" for process in processes)
    return list(zip(base.remotes, processes, strict=True)) if is_forked else []


def wait_for_workers(workers: Sequence[tuple[Any, Any]]) -> None:
    """
    Wait until all environments have answered. Reading from the pipe of a forked process that has ended would wait for
    ever, since the other processes have copies of the pipe. This helps in steps alone: SubprocVecEnv's reset sends and
    reads in one call.

    :param workers: what :func:`forked_workers` returned
    :raises EOFError: if a process has ended without an answer
    """
    waiting = dict(workers)
    while waiting:
        ready = connection.wait([*waiting, *(process.sentinel for process in waiting.values())])
        for remote, process in list(waiting.items()):
            if remote in ready:
                del waiting[remote]
            elif process.sentinel in ready and not remote.poll():
                raise EOFError


def _end_of(process: Any, index: int) -> str:
    process.join()
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    above = ", see its traceback above" if code == 1 else ""  # the code of exceptions
    return f"the process of environment {index} {how}{above}"


def _vec_layers(env: VecEnv) -> list[Any]:
    layers: list[Any] = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    return layers


def _is_statistic(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(part, RunningMeanStd) for part in parts)


def _settings(layer: Any) -> dict[str, Any]:
    """VecNormalize's arguments."""
    return {name: getattr(layer, name) for name in _SETTINGS} if isinstance(layer, VecNormalize) else {}


def _base_state(base: Any) -> tuple[Any, str]:
    if _has_own_state(base):
        return base.get_state(), "get_state"
    if not isinstance(base, (DummyVecEnv, SubprocVecEnv)):
        raise EnvStateError(f"{type(base).__name__} has no get_state and set_state")
    # In one process environments may share objects, a random generator say; pickled together they still do.
    found = [_get_layers(*base.envs)] if isinstance(base, DummyVecEnv) else call_in_envs(base, _get_layers)
    for state, source in found:
        if state is None:
            raise EnvStateError(source)
    sources = sorted({source for _, source in found})
    states = [state for state, _ in found]
    return {"envs": states, "seeds": list(base._seeds), "options": list(base._options)}, " and ".join(sources)


def _set_base_state(base: Any, state: Any) -> list[Log]:
    if _has_own_state(base):
        base.set_state(state)
        return []
    if len(state["envs"]) == base.num_envs:
        found = [
            call_in_envs(base, _set_layers, of_env, indices=index)[0] for index, of_env in enumerate(state["envs"])
        ]
    elif isinstance(base, DummyVecEnv):
        found = [_set_layers(base.envs[0], state["envs"][0], *base.envs[1:])]
    else:
        raise EnvStateError("the environments were in one process, and now each has its own")
    for reason, _ in found:
        if reason:
            raise EnvStateError(reason)
    base._seeds, base._options = list(state["seeds"]), list(state["options"])
    return [log for _, logs in found for log in logs]


def _has_own_state(layer: Any) -> bool:
    return all(callable(getattr(type(layer), name, None)) for name in ("get_state", "set_state"))


class _Method(str):
    """
    The name of a module's function. Where the name is unpickled, the function becomes a method of all environments.

    ``SubprocVecEnv`` calls methods of its environments by their names. A name of this class is unpickled by calling
    :func:`_add_method` in the process of the environment, before the method is called there.

    :param function: the function
    """

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> "_Method":
        name = super().__new__(cls, _add_method(function))
        name.function = function
        return name

    def __reduce__(self) -> Any:
        return _add_method, (self.function,)


def _add_method(function: Callable[..., Any]) -> str:
    setattr(gym.Env, function.__name__, function)
    return function.__name__


def call_in_envs(env: VecEnv, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """
    :param env: a DummyVecEnv or SubprocVecEnv, or wrappers of one
    :param function: a function of a module, of an environment
    :param args: its further arguments
    :param kwargs: ``indices`` of the environments; all by default
    :return: ``function(env, *args)`` for each environment, run in its own process
    :raises AttributeError, NotImplementedError: by vectorised environments that call no methods
    """
    return list(env.env_method(_Method(function), *args, **kwargs))


def _get_layers(*envs: Any) -> tuple[bytes | None, str]:
    """
    :return: the state of environments of one process with their wrappers, and its source; or None and why it cannot be
        had. An exception would end the process of the environment.
    """
    try:
        layers = [layer for env in envs for layer in _layers(env)]
        own = [_has_own_state(layer) for layer in layers]
        states = [layer.get_state() if has else _attributes(layer) for layer, has in zip(layers, own, strict=True)]
        names = [type(layer).__qualname__ for layer in layers]
        files = [_log_file(layer) for layer in layers]
        return _pickled([names, states, files], layers), "get_state" if own[-1] else "attributes"
    except Exception as error:
        return None, f"{_reason(error)} (environment {type(envs[0].unwrapped).__name__})"


def _set_layers(env: Any, state: bytes, *others: Any) -> tuple[str, list[Log]]:
    """
    :param env: the first environment of those whose state it is
    :param state: what :func:`_get_layers` returned
    :param others: the other ones
    :return: why the state cannot be set, empty if it is set; and what :func:`cut_logs` has to cut
    """
    try:
        layers = [layer for each in (env, *others) for layer in _layers(each)]
        names, states, files = _unpickled(state, layers)
        if names != [type(layer).__qualname__ for layer in layers]:
            return f"the environment was {' of '.join(names)}, and now it is another", []
        for layer, saved in zip(layers, states, strict=True):
            if _has_own_state(layer):
                layer.set_state(saved)
            else:
                _set_attributes(layer, saved)
        present = [_log_file(layer) for layer in layers]
        pairs = zip(files, present, strict=True)
        return "", [Log(path, size, found) for (path, size), (own, found) in pairs if path == own and size < found]
    except Exception as error:
        return _reason(error), []


def _cut_logs(env: Any, logs: Sequence[Log]) -> None:
    for layer in _layers(env):
        for log in logs:
            if (log.path, log.found) == _log_file(layer):
                handler = layer.results_writer.file_handler
                handler.truncate(log.size)
                handler.seek(0, os.SEEK_END)  # unless it was opened to append, it keeps its position


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _log_file(layer: Any) -> tuple[str, int]:
    """Path and size of Monitor's file."""
    writer = getattr(layer, "results_writer", None) if isinstance(layer, Monitor) else None
    return (writer.file_handler.name, os.path.getsize(writer.file_handler.name)) if writer else ("", 0)


def _attributes(layer: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    if any(vars(each).get("__slots__") for each in type(layer).__mro__):
        raise EnvStateError(f"{type(layer).__name__} has attributes in __slots__")
    return {
        name: value.cloneState(include_rng=True) if _is_emulator(value) else value
        for name, value in vars(layer).items()
        if name not in without and not _stays(value)
    }


def _set_attributes(layer: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        live = vars(layer).get(name)
        if _is_emulator(live):
            live.restoreState(value)
        elif type(live).__name__ == "MjData":  # a renderer refers to it
            import mujoco

            mujoco.mj_copyData(live, layer.model, value)
        else:
            vars(layer)[name] = value


def _stays(value: Any) -> bool:
    """Whether an attribute's value belongs to the process and is no part of the state."""
    if isinstance(value, (BuiltinFunctionType, MethodType)):
        value = value.__self__  # the module of a built-in function, if it has one
        if value is None or any(value is generator for generator in _GLOBAL_GENERATORS):
            return True
    kind = type(value)
    is_of_rendering = kind.__module__.startswith("pygame") or "rendering" in kind.__module__
    return isinstance(value, _OF_THE_PROCESS) or is_of_rendering or kind.__name__ == "MjModel"


def _is_emulator(value: Any) -> bool:
    return hasattr(value, "cloneState") and hasattr(value, "restoreState")


def _pickled(value: Any, layers: list[Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, layers).dump(value)
    return file.getvalue()


def _unpickled(pickled: bytes, layers: list[Any]) -> Any:
    return _Unpickler(io.BytesIO(pickled), layers).load()
