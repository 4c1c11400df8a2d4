"""Critic heads: Q of all actions where they can be enumerated, else the stochastic dueling head (section 5.1)."""

from typing import NamedTuple

import numpy as np
import torch as th
from torch import nn

from sb3_acer.distributions import Family
from sb3_acer.estimators import dueling


class Judgement(NamedTuple):
    """A critic's output for N rows. The first T * B rows are T steps of B sequences."""

    values: th.Tensor
    """V of every row, ``[N]``"""
    q_values: th.Tensor
    """Q of the actions taken, ``[T, B]``"""
    candidates: th.Tensor
    """candidate actions of the bias correction: all actions, or K sampled from pi, ``[T, B, K, D]``"""
    weights: th.Tensor
    """weights of the candidates: pi(a), or 1 / K, ``[T, B, K]``"""
    candidate_values: th.Tensor
    """Q of the candidates, ``[T, B, K]``"""


class QHead(nn.Module):
    """
    Q of every action at once, V = sum_a pi(a) Q(a): for actions that can be enumerated.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    """

    def __init__(self, family: Family, latent_dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(latent_dim, family.n_stats)
        self.outputs = (self.q,)
        self.output_gain = 1.0  # CartPole-v1 is learnt more slowly with 0.01

    def values(self, latent: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param latent: ``[N, L]``
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :return: V, ``[N]``
        """
        q: th.Tensor = self.q(latent)
        return (stats * q).sum(-1)

    def forward(
        self, latent: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param latent: ``[N, L]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: unused: nothing is sampled
        :param rng: unused
        """
        q: th.Tensor = self.q(latent)
        probabilities = stats.detach()
        shape = actions.shape[:2]
        q_steps, weights = (rows[: shape.numel()].view(*shape, -1) for rows in (q, probabilities))
        return Judgement(
            (probabilities * q.detach()).sum(-1),
            q_steps.gather(-1, actions).squeeze(-1),
            th.arange(q.shape[-1], device=q.device).unsqueeze(-1).expand(*q_steps.shape, 1),
            weights,
            q_steps,
        )


class DuelingHead(nn.Module):
    """
    Stochastic dueling network: V(x), A(x, a), and Q~ by :func:`~sb3_acer.estimators.dueling`.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    :param activation_fn: activation of A's hidden layer, in which the latent features meet the actions. This layer has
        more rows than all others together, and tanh takes forty times as long as ReLU on a CPU.
    """

    def __init__(self, family: Family, latent_dim: int, activation_fn: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.family = family
        self.value = nn.Linear(latent_dim, 1)
        # A layer of [latent, action] as the sum of two layers, so that the latent features of a state are multiplied
        # once for all its actions.
        width = min(latent_dim, 64)
        self.advantage_latent = nn.Linear(latent_dim, width)
        self.advantage_action = nn.Linear(family.n_features, width, bias=False)
        advantage = nn.Linear(width, 1)
        self.advantage = nn.Sequential(activation_fn(), advantage)
        self.outputs = (self.value, advantage)
        self.output_gain = 0.01

    def values(self, latent: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param latent: ``[N, L]``
        :param stats: unused
        :return: V, ``[N]``
        """
        values: th.Tensor = self.value(latent)
        return values.squeeze(-1)

    def forward(
        self, latent: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param latent: ``[N, L]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: number of candidates to sample from pi in each state, and of other samples for the mean
            advantage
        :param rng: the source of the samples
        """
        n_steps, n_sequences = actions.shape[:2]
        n_rows = n_steps * n_sequences
        values = self.values(latent, stats)
        policy = stats[:n_rows].detach().view(n_steps, n_sequences, 1, -1)
        uniforms = th.from_numpy(rng.random((n_steps, n_sequences, 2 * n_samples, self.family.n_components)))
        sampled = self.family.sample(policy, uniforms.to(policy.device))
        candidates, others = sampled.tensor_split((n_samples,), -2)
        hidden = self.advantage_latent(latent[:n_rows]).view(n_steps, n_sequences, 1, -1)
        step_values = values[:n_rows].view(n_steps, n_sequences)
        advantages = self._advantages(hidden, th.cat((actions.unsqueeze(-2), others), -2))
        q_values = dueling(step_values, advantages[..., 0], advantages[..., 1:])
        with th.no_grad():  # the correction takes the candidates' values as constants
            candidate_values = dueling(step_values, self._advantages(hidden, candidates), advantages[..., 1:])
        return Judgement(values, q_values, candidates, th.full_like(candidate_values, 1 / n_samples), candidate_values)

    def _advantages(self, hidden: th.Tensor, actions: th.Tensor) -> th.Tensor:
        inputs = self.family.encode(actions).to(hidden.dtype)
        advantages: th.Tensor = self.advantage(hidden + self.advantage_action(inputs))
        return advantages.squeeze(-1)
