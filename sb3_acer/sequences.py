"""Sequences of steps as an update takes them, and observations with and without keys."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs


class SequenceBatch(NamedTuple):
    """B sequences of T steps, time-major. On-policy and replayed sequences have the same form."""

    observations: PyTorchObs
    """``[T + 1, B, ...]``; the last row follows the last step"""
    actions: th.Tensor
    """actions as the policy sampled them, ``[T, B, D]``"""
    behaviour: th.Tensor
    """statistics of the distribution mu that the actions were sampled from, ``[T, B, P]``"""
    rewards: th.Tensor
    """``[T, B]``"""
    terminated: th.Tensor
    """whether the step ended its episode in a terminal state, bool, ``[T, B]``"""
    truncated: th.Tensor
    """whether the episode was truncated at the step, by a time limit or a reset from outside, bool, ``[T, B]``"""
    final_observations: PyTorchObs
    """observations that followed the truncated steps, ``[F, ...]``"""
    final_steps: th.Tensor
    """these steps, as t * B + b, ``[F]``"""
    states: th.Tensor
    """recurrent states at the first step: the behaviour policy's as stored, after burn-in the policy's, ``[B, W]``"""
    weights: th.Tensor
    """factors of the states' contributions to the gradient, 1 unless a buffer says otherwise, ``[T, B]``"""
    slots: np.ndarray
    """the slot of the buffer that each sequence is from, ``[B]``"""
    envs: np.ndarray
    """the environment that each sequence is from, ``[B]``"""
    masks: th.Tensor | None = None
    """whether actions are valid, bool, ``[T + 1, B, P]``; None: no masks are stored, every action is valid"""
    final_masks: th.Tensor | None = None
    """the same for the final observations, ``[F, P]``"""

    @property
    def ends(self) -> th.Tensor:
        """whether the episode ended at the step, terminated or truncated, bool, ``[T, B]``"""
        return self.terminated | self.truncated

    def after(self, n_steps: int, states: th.Tensor) -> "SequenceBatch":
        """
        The same sequences without their first steps.

        :param n_steps: number of steps to leave out
        :param states: recurrent states after these steps, ``[B, W]``
        """
        first_row = n_steps * len(self.envs)
        kept = self.final_steps >= first_row
        return self._replace(
            observations=map_observations(lambda rows: rows[n_steps:], self.observations),
            final_observations=map_observations(lambda rows: rows[kept], self.final_observations),
            final_steps=self.final_steps[kept] - first_row,
            states=states,
            masks=None if self.masks is None else self.masks[n_steps:],
            final_masks=None if self.final_masks is None else self.final_masks[kept],
            **{
                name: getattr(self, name)[n_steps:]
                for name in ("actions", "behaviour", "rewards", "terminated", "truncated", "weights")
            },
        )


def map_observations(function: Callable[..., th.Tensor], *observations: PyTorchObs) -> PyTorchObs:
    """
    :param function: of tensors
    :param observations: one for each of its arguments
    :return: its value, key by key for observations of a Dict space
    """
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(cast(dict[str, th.Tensor], each)[key] for each in observations)) for key in first}
    return function(*observations)


def by_key(observations: Any) -> dict[str, Any]:
    """
    :param observations: of any space
    :return: those of a Dict space as they are, others under the key ""
    """
    return observations if isinstance(observations, dict) else {"": observations}


def spaces_by_key(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    """
    :param space: an observation space
    :return: the parts of a Dict space, another space under the key ""
    """
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}


def n_categories(space: spaces.Space[Any]) -> dict[str, Any]:
    """
    :param space: an observation space
    :return: by key, the numbers of categories of its parts that become one-hot vectors: ``n`` of Discrete, ``nvec`` of
        MultiDiscrete
    """
    parts = spaces_by_key(space)
    discrete = {key: part.n for key, part in parts.items() if isinstance(part, spaces.Discrete)}
    return discrete | {key: part.nvec for key, part in parts.items() if isinstance(part, spaces.MultiDiscrete)}


def are_categories(observations: Any, space: spaces.Space[Any]) -> bool:
    """
    :param observations: tensors of the space, ``[..., *shape]`` each
    :param space: an observation space
    :return: whether those of Discrete and MultiDiscrete are categories that the space has
    """
    parts = by_key(observations)
    most = {key: th.as_tensor(n, device=parts[key].device) for key, n in n_categories(space).items()}
    return all(bool(((parts[key] >= 0) & (parts[key] < n)).all()) for key, n in most.items())
