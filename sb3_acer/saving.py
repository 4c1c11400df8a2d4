"""Saving and loading: agents, their parameters and replay buffers, in files that are never half written."""

import zipfile
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_zip_file, recursive_getattr
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import GymEnv

from sb3_acer.arguments import ATTRIBUTES, comparable, make_env, set_num_threads
from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.checks import (
    check_boolean,
    check_device,
    check_parameters,
    constructor_arguments,
    require,
    such_as,
)
from sb3_acer.policies import ACERPolicy
from sb3_acer.storage import FilePath, named, opened, replacing

SelfSaving = TypeVar("SelfSaving", bound="SavingAlgorithm")

_FIXED_BY_THE_FILE = ("policy", "_init_setup_model")
"""arguments of the constructor that `load` cannot replace"""


class SavingAlgorithm(OffPolicyAlgorithm):
    """SB3's methods that write and read files, with the checks of what is read."""

    policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer
    replay_buffer_class: type[SequenceReplayBuffer]
    n_steps: int

    def save(self, path: FilePath, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save the agent, see :meth:`BaseAlgorithm.save`. An older file is kept until the new one is whole.

        :param path: the file; ``.zip`` may be left out
        :param exclude: names of attributes that are not saved
        :param include: names of attributes that are saved, though they usually are not
        :raises OSError: if the file cannot be written
        :raises ValueError: if ``exclude`` or ``include`` are no names, or ``path`` is no path
        """
        for name, names in (("exclude", exclude), ("include", include)):
            no_names = (str, bytes, dict, np.ndarray, th.Tensor)
            is_names = names is None or (isinstance(names, Iterable) and not isinstance(names, no_names))
            require(is_names, name, "names of attributes, or None", names)
        own = self.policy_kwargs
        try:
            # A copy: parameters of a module in it are views of one vector, which pickle would write once for each.
            with suppress(Exception):  # what cannot be copied may still be pickled
                self.policy_kwargs = deepcopy(own)
            with replacing(path, "zip") as file:
                super().save(file, exclude, include)
        finally:
            self.policy_kwargs = own

    @classmethod
    @th.inference_mode(False)
    def load(
        cls: type[SelfSaving],
        path: FilePath,
        env: GymEnv | str | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfSaving:
        """
        Load an agent, see :meth:`BaseAlgorithm.load`; ``env`` may be the id of an environment too. Keyword arguments of
        the constructor replace the saved ones, except ``policy`` and ``_init_setup_model``, which are refused, and
        ``policy_kwargs``, which must equal those of the saved agent.

        As in all agents of SB3, parts of the file are pickles: loading it can run code that its author put there. Load
        only files whose author you trust.

        :return: the agent
        :raises FileNotFoundError: if there is no such file
        :raises ValueError: if the file is damaged or no agent, if it does not fit ``env``, and for an argument outside
            its range; the message names the file where its content is the reason
        """
        check_boolean("print_system_info", print_system_info)
        check_boolean("force_reset", force_reset)
        known = constructor_arguments(cls) - set(_FIXED_BY_THE_FILE)
        unknown = [name for name in kwargs if name not in known]
        other = f"other than {' and '.join(_FIXED_BY_THE_FILE)}"
        rule = f"arguments of the constructor {other}{such_as(unknown, known)}"
        require(not unknown, "keyword arguments of load", rule, ", ".join(unknown))
        set_num_threads(kwargs.pop("num_procs", None), kwargs.pop("n_cpu_tf_sess", None))
        env = env if env is None else make_env(env, verbose=0)
        device = check_device("device", device)
        for name, attribute in ATTRIBUTES.items():
            if name in kwargs:
                kwargs[attribute] = kwargs.pop(name)
        given = kwargs.pop("policy_kwargs", None)
        with opened(path, "zip") as file, named(path):
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no zip file (load_stable_baselines loads agents of stable-baselines)")
            model = super().load(file, env, device, custom_objects, print_system_info, force_reset, **kwargs)
            if given is not None:
                rule = f"those of the saved agent, {model.policy_kwargs}"
                require(comparable(given) == comparable(model.policy_kwargs), "policy_kwargs", rule, given)
            if "buffer_size" in kwargs:
                size, asked = model.replay_buffer.buffer_size, model.buffer_size
                require(size == asked, "buffer_size", f"{size}, as in the saved replay buffer", asked)
        # Loading has given the optimiser the options that it was saved with, in place of these.
        options = [option for name, option in (("rprop_alpha", "alpha"), ("rprop_epsilon", "eps")) if name in kwargs]
        if issubclass(model.policy.optimizer_class, RMSpropTFLike):
            for group in model.policy.optimizer.param_groups:
                group.update({option: model.policy.optimizer_kwargs[option] for option in options})
        if "seed" in kwargs:
            model.set_random_seed(kwargs["seed"])
        return model

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer", "average_policy"], []

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """
        :return: copies of the parameters of policy and average policy, and the optimiser's state, by name
        """
        # Copies, since the parameters are views of one vector, which pickle would write once for each of them.
        return {part: _copies(values) for part, values in super().get_parameters().items()}

    def set_parameters(
        self, load_path_or_dict: Any, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters, see :meth:`BaseAlgorithm.set_parameters`.

        :param load_path_or_dict: a file that :meth:`save` wrote, or what :meth:`get_parameters` returned
        :param exact_match: whether all parameters must be given; otherwise missing ones keep their values
        :param device: device to load a file to
        :raises FileNotFoundError: if there is no such file
        :raises ValueError: for unknown or missing names, and for parameters of another shape or with values that are
            not finite; nothing has changed then
        """
        check_boolean("exact_match", exact_match)
        name = "load_path_or_dict"
        if not isinstance(load_path_or_dict, dict):
            with opened(load_path_or_dict, "zip", name) as file, named(load_path_or_dict):
                _, load_path_or_dict, _ = load_from_zip_file(
                    file, load_data=False, device=check_device("device", device)
                )
        own: Any = self.get_parameters()
        unknown = [part for part in load_path_or_dict if part not in own]
        require(not unknown, name, f"parameters of {', '.join(own)}", unknown)
        for part, given in load_path_or_dict.items():
            if not isinstance(recursive_getattr(self, part), th.optim.Optimizer):
                check_parameters(f"{name}[{part!r}]", given, own[part], exact_match)
        optimizer = self.policy.optimizer
        options = optimizer.param_groups[0].keys()
        try:
            parts = dict(load_path_or_dict)
            if "policy.optimizer" in parts:  # loading copies parameters, but not the optimiser's state
                parts["policy.optimizer"] = deepcopy(parts["policy.optimizer"])
            super().set_parameters(parts, exact_match)
            if lacking := options - optimizer.param_groups[0].keys():
                raise ValueError(f"the state of an optimizer without {', '.join(sorted(lacking))}")
        except Exception as error:
            super().set_parameters(own)
            raise ValueError(f"{name} must fit the agent, got other parameters: {error}") from error

    def save_replay_buffer(self, path: FilePath) -> None:
        """
        Save the replay buffer, without a second copy of it in memory. An older file is kept until the new one is whole.

        :param path: the file; ``.pkl`` may be left out
        :raises OSError: if the file cannot be written
        """
        with replacing(path, "pkl", self.verbose) as file:
            self.replay_buffer.write(file)

    def load_replay_buffer(self, path: FilePath, truncate_last_traj: bool = True) -> None:
        """
        Load a replay buffer, also of another number of environments. Nothing of the file is run.

        :param path: the file
        :param truncate_last_traj: whether to truncate the episodes that were under way. False continues them if the
            number of environments is the same.
        :raises FileNotFoundError: if there is no such file
        :raises ValueError: if the file is another one, or holds sequences of another length, of other spaces or of
            recurrent states of another width
        """
        check_boolean("truncate_last_traj", truncate_last_traj)
        loaded = self._read_replay_buffer(path)
        is_same = loaded.n_envs == self.n_envs
        self.replay_buffer = loaded if is_same else loaded.with_envs(self.n_envs)
        if truncate_last_traj or not is_same:  # other environments do not continue the episodes
            self.replay_buffer.end_episodes()

    def _read_replay_buffer(self, path: FilePath) -> SequenceReplayBuffer:
        """The buffer of a file as it was saved, which may be one of another number of environments."""
        with opened(path, "pkl") as file, named(path):
            loaded = self.replay_buffer_class.read(
                file, self.observation_space, self.action_space, self.device, **self.replay_buffer_kwargs
            )
            require(loaded.n_steps == self.n_steps, "n_steps of the replay buffer", f"{self.n_steps}", loaded.n_steps)
            fits = loaded.state_size in (None, self.policy.state_size)
            require(fits, "recurrent states", f"of the policy's width {self.policy.state_size}", loaded.state_size)
        return loaded


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of a state's values. A tensor of several names has one copy: one of a shared features extractor, say."""
    copies: dict[Any, th.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, th.Tensor):
            return deepcopy(value)
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if memory not in copies:
            copies[memory] = value.clone()
        return copies[memory]

    return {name: copied(value) for name, value in values.items()}
