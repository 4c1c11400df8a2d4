"""Methods of stable-baselines' agents that stable-baselines3's agents do not have, under their old names."""

import math
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Image
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import RolloutReturn
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer.checks import check_array, check_boolean, check_parameters, require
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.distributed import world_size
from sb3_acer.frames import find_frame_stack
from sb3_acer.policies import ACERPolicy
from sb3_acer.resuming import ResumableAlgorithm
from sb3_acer.sequences import by_key, spaces_by_key
from sb3_acer.update import Update

_ALL_BUT_TENSORBOARD = ("stdout", "log", "json", "csv")

SelfInterface = TypeVar("SelfInterface", bound="StableBaselinesInterface")


class OldNames:
    """
    Wraps a callback and adds the local variables of stable-baselines to its ``locals``. ``locals["callback"]`` is the
    user's callback, not this wrapper.

    :param callback: the callback
    :param old_locals: returns further local variables, given those of the rollout
    """

    def __init__(self, callback: BaseCallback, old_locals: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._callback = callback
        self._old_locals = old_locals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def update_locals(self, locals_: dict[str, Any]) -> None:
        locals_.update(self._old_locals(locals_), callback=self._callback)
        self._callback.update_locals(locals_)


class StableBaselinesInterface(ResumableAlgorithm):
    """Base class that adds methods of stable-baselines' agents to an agent with an average policy."""

    average_policy: ACERPolicy
    _n_replays: int
    """batches replayed after the last rollout"""

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, *args: Any, **kwargs: Any) -> RolloutReturn:
        named = cast(BaseCallback, OldNames(callback, self._old_locals))
        return super().collect_rollouts(env, named, *args, **kwargs)

    def _old_locals(self, step: dict[str, Any]) -> dict[str, Any]:
        return {
            "env": self.env,  # without the check of what it returns
            "obs": step["new_obs"],
            "mus": self._behaviour,
            "states": self._states_after,
            "masks": self._episode_starts,
            "steps": self.num_timesteps - world_size() * self.n_envs * (self.replay_buffer.step + 1),
            "samples_number": self._n_replays,
        }

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Any = None,
        *,
        mask: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """
        Choose actions, see :meth:`ACERPolicy.predict`.

        :param mask: stable-baselines' name for ``episode_start``, not for ``action_masks``
        :raises ValueError: also if both are given
        """
        if mask is not None and episode_start is not None:
            raise ValueError("mask is another name for episode_start: one of them must be None, got both")
        if mask is not None:
            episode_start = check_array("mask", mask)
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def action_probability(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        mask: np.ndarray | None = None,
        actions: np.ndarray | None = None,
        logp: bool = False,
        action_masks: Any = None,
    ) -> Any:
        """
        Parameters of the policy's distribution, or probabilities of given actions, as in stable-baselines.

        :param observation: of one environment, or of N environments; for one, the results have no axis of length N
        :param state: recurrent state that :meth:`predict` returned last; None: initial state
        :param mask: whether an episode begins, so that the recurrent state is reset, bool, ``[N]``
        :param actions: elements of the action space, one per observation or one for all; axes of length 1 do not matter
        :param logp: whether to return logarithms of the given actions' probabilities
        :param action_masks: whether actions are valid, see :meth:`ACERPolicy.predict`; the others have probability 0
        :return: without ``actions``, the parameters: for Discrete the probabilities, ``[N, n]``; for MultiDiscrete a
            list of them, one per factor; for MultiBinary the probabilities of 1, ``[N, D]``; for Box mean and standard
            deviation, ``[N, ...]`` each. With ``actions``, their probabilities, or probability densities for Box,
            ``[N, 1]``
        :raises ValueError: if actions are not elements of the action space, or not as many as observations
        """
        check_boolean("logp", logp)
        mask = None if mask is None else check_array("mask", mask)
        actions = None if actions is None else check_array("actions", actions)
        policy, family = self.policy, self.policy.family
        stats, _, vectorized = policy.predict_statistics(observation, state, mask, action_masks)
        if actions is None:
            found = family.action_probability(stats.cpu().numpy())
            if vectorized:
                return found
            return type(found)(part[0] for part in found) if isinstance(found, (list, tuple)) else found[0]
        shape = self.action_space.shape or ()
        n_given = len(actions) if actions.size > math.prod(shape) else 1
        if actions.size == n_given * math.prod(shape):
            actions = actions.reshape(n_given, *shape)
        taken = th.from_numpy(family.from_env(actions)).to(self.device)
        if len(taken) not in (1, len(stats)):
            raise ValueError(f"actions must be one, or one for each of {len(stats)} observations, got {len(taken)}")
        log_likelihood = family.exact_log_prob(stats, taken).unsqueeze(-1)
        probability = (log_likelihood if logp else log_likelihood.exp()).cpu().numpy()
        return probability if vectorized else probability[0]

    def pretrain(
        self: SelfInterface,
        dataset: ExpertDataset,
        n_epochs: int = 10,
        learning_rate: float = 1e-4,
        adam_epsilon: float = 1e-8,
        val_interval: int | None = None,
    ) -> SelfInterface:
        """Clone an expert's policy, see :func:`~sb3_acer.demonstrations.cloning.behaviour_cloning`."""
        return behaviour_cloning(self, dataset, n_epochs, learning_rate, adam_epsilon, val_interval)

    def record_distributions(self, update: Update) -> None:
        """Log histograms and images, as stable-baselines does with ``full_tensorboard_log=True``."""
        distributions: dict[str, Any] = {
            "rewards": update.batch.rewards,
            "advantages": update.advantage,
            "action_probabilities": update.evaluation.stats,
            "learning_rate": th.tensor(self.policy.optimizer.param_groups[0]["lr"]),
        }
        of_keys = spaces_by_key(self.observation_space)
        n_frames = 1 if self.env is None else find_frame_stack(self.env)
        for key, rows in by_key(update.batch.observations).items():
            name = f"observations/{key}" if key else "observations"
            if is_image_space(of_keys[key]):
                n_channels = rows.shape[2] // n_frames
                newest = rows[0, 0, -n_channels if n_channels in (1, 3) else -1 :]  # the newest frame, or a part of it
                self.logger.record(f"images/{name}", Image(newest.cpu(), "CHW"), exclude=_ALL_BUT_TENSORBOARD)
            else:
                distributions[name] = rows.float()
        for name, values in distributions.items():
            self.logger.record(f"histograms/{name}", values.flatten().cpu(), exclude=_ALL_BUT_TENSORBOARD)

    def setup_model(self) -> None:
        """Build the networks, if ``_init_setup_model`` was False."""
        self._setup_model()

    def get_parameter_list(self) -> list[th.nn.Parameter]:
        """
        :return: the policy's trainable parameters
        """
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def load_parameters(
        self, load_path_or_dict: str | pathlib.Path | dict[str, Any] | list[Any], exact_match: bool = True
    ) -> None:
        """
        Load the parameters and the optimiser's state of a saved agent, or those of a dict. Settings stay as they are.

        :param load_path_or_dict: path of a file that :meth:`save` wrote, the result of :meth:`get_parameters`, or a
            dict with the names of ``policy.state_dict()`` as keys and arrays as values, or a list of arrays in the
            order of :meth:`get_parameter_list`, all of them; such a dict or list sets the average policy too
        :param exact_match: whether all parameters must be given; otherwise missing ones keep their values
        :raises ValueError: for unknown or missing names, and for arrays of another shape or with values that are not
            finite; nothing has changed then
        """
        check_boolean("exact_match", exact_match)
        if isinstance(load_path_or_dict, list):
            names = [name for name, parameter in self.policy.named_parameters() if parameter.requires_grad]
            rule = f"{len(names)} arrays, as get_parameter_list returns"
            require(len(load_path_or_dict) == len(names), "load_path_or_dict", rule, len(load_path_or_dict))
            load_path_or_dict, exact_match = dict(zip(names, load_path_or_dict, strict=True)), False
        if not isinstance(load_path_or_dict, dict) or any(isinstance(x, dict) for x in load_path_or_dict.values()):
            self.set_parameters(cast(str, load_path_or_dict), exact_match, self.device)
            return
        own = self.policy.state_dict()
        given = check_parameters("load_path_or_dict", load_path_or_dict, own, exact_match)
        for policy in (self.policy, self.average_policy):
            policy.load_state_dict({**policy.state_dict(), **given})
