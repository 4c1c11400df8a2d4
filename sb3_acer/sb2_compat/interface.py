"""What stable-baselines' agents could do and those of stable-baselines3 cannot, under its names."""

import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.policies import ACERPolicy

SelfInterface = TypeVar("SelfInterface", bound="StableBaselinesInterface")


class OldNames:
    """
    A callback that also gets to know the local variables that stable-baselines' callbacks did.

    :param callback: the callback
    :param old_locals: from SB3's local variables to stable-baselines'
    """

    def __init__(self, callback: BaseCallback, old_locals: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._callback = callback
        self._old_locals = old_locals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self._callback.update_locals({**locals_, **self._old_locals(locals_)})


class StableBaselinesInterface(BaseAlgorithm):
    """Methods of stable-baselines' agents, for an agent that has an average policy."""

    policy: ACERPolicy
    average_policy: ACERPolicy
    replay_buffer: SequenceReplayBuffer

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        *,
        mask: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Any]:
        """
        Actions for observations, see :meth:`ACERPolicy.predict`.

        :param mask: stable-baselines' name of ``episode_start``
        :raises ValueError: also if both are given
        """
        if mask is not None and episode_start is not None:
            raise ValueError("mask is another name of episode_start: one of them must be None, got both")
        return self.policy.predict(observation, state, episode_start if mask is None else mask, deterministic)

    def action_probability(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        mask: np.ndarray | None = None,
        actions: np.ndarray | None = None,
        logp: bool = False,
    ) -> Any:
        """
        The policy's distribution, or the probability of given actions, as in stable-baselines.

        :param observation: of one environment, or of N; results for one have no axis of length N
        :param state: what :meth:`predict` returned last; None for nothing
        :param mask: where an episode begins and nothing is remembered, bool, ``[N]``
        :param actions: elements of the action space, one an observation
        :param logp: return the logarithm of the given actions' probability
        :return: without ``actions``: Discrete: probabilities, ``[N, n]``; MultiDiscrete: a list of such, one a factor;
            MultiBinary: probabilities of 1, ``[N, D]``; Box: mean and standard deviation, ``[N, ...]`` each. With
            them: their mass, or their density where they are continuous, ``[N, 1]``
        :raises ValueError: for actions that are no elements of the space or not as many as observations
        """
        policy, family = self.policy, self.policy.family
        stats, _, vectorized = policy.predict_statistics(observation, state, mask)
        if actions is None:
            found = family.action_probability(stats.cpu().numpy())
            if vectorized:
                return found
            return type(found)(part[0] for part in found) if isinstance(found, (list, tuple)) else found[0]
        taken = th.from_numpy(family.from_env(actions)).to(self.device)
        if len(taken) != len(stats):
            raise ValueError(f"actions must be as many as observations, {len(stats)}, got {len(taken)}")
        log_likelihood = family.log_likelihood(stats, taken).unsqueeze(-1)
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
        """Clone the policy that demonstrated, see :func:`~sb3_acer.demonstrations.cloning.behaviour_cloning`."""
        return behaviour_cloning(self, dataset, n_epochs, learning_rate, adam_epsilon, val_interval)

    def setup_model(self) -> None:
        """Build the networks, where ``_init_setup_model`` was False."""
        self._setup_model()

    def get_parameter_list(self) -> list[th.nn.Parameter]:
        """
        :return: what is learnt
        """
        return self.policy.weights

    def load_parameters(self, load_path_or_dict: str | pathlib.Path | dict[str, Any], exact_match: bool = True) -> None:
        """
        Take over parameters, and nothing else, from a saved agent or a dict.

        :param load_path_or_dict: what :meth:`save` wrote, what :meth:`get_parameters` returned, or a dict from the
            names of the policy's parameters (those of ``policy.state_dict()``) to arrays; the average policy is then a
            copy
        :param exact_match: whether all parameters have to be there; otherwise those that are not keep their values
        :raises ValueError: for unknown or missing names, and for arrays of another shape
        """
        if not isinstance(load_path_or_dict, dict) or any(isinstance(x, dict) for x in load_path_or_dict.values()):
            self.set_parameters(cast(str, load_path_or_dict), exact_match, self.device)
            return
        own = self.policy.state_dict()
        given = {name: th.as_tensor(value) for name, value in load_path_or_dict.items()}
        missing = own.keys() - given.keys() if exact_match else set()
        if given.keys() - own.keys() or missing:
            raise ValueError(
                f"load_path_or_dict must have the names of policy.state_dict(): unknown "
                f"{sorted(given.keys() - own.keys())}, missing {sorted(missing)}"
            )
        for name, value in given.items():
            if value.shape != own[name].shape:
                raise ValueError(f"{name} must be of shape {tuple(own[name].shape)}, got {tuple(value.shape)}")
        for policy in (self.policy, self.average_policy):
            policy.load_state_dict({**own, **given})
