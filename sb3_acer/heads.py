"""Critic heads: Q of all actions where they can be enumerated, else the stochastic dueling head (section 5.1)."""

import math
from collections.abc import Callable
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_acer.distributions import Family
from sb3_acer.estimators import dueling
from sb3_acer.mlp import ACTIVATIONS, add_product

_WIDTH = 64
"""largest width of the dueling head's hidden layer, which is computed for 2 K + 1 actions of each state"""


class CriticOutput(NamedTuple):
    """A critic's output for N rows, without gradients. The first T * B rows are T steps of B sequences."""

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
    backward: Callable[[th.Tensor, th.Tensor | None], th.Tensor]
    """
    Maps the gradients with respect to ``q_values`` and to the steps' ``values``, ``[T, B]`` (None for 0), to the
    gradient with respect to the outputs of the critic's network, ``[N, O]``, and adds those of the head's own
    parameters to their ``grad``.
    """


class QHead(nn.Module):
    """
    Q of every action at once, V = sum_a pi(a) Q(a): for actions that can be enumerated.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    """

    last_layer: ClassVar[str] = "q"
    """the layer with which the critic's network ends"""

    def __init__(self, family: Family, latent_dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(latent_dim, family.n_stats)

    def orthogonal_(self) -> None:
        """Initialise the matrix orthogonally. CartPole-v1 is learnt more slowly with the gain 0.01."""
        nn.init.orthogonal_(self.q.weight)
        nn.init.zeros_(self.q.bias)

    def _q(self, outputs: th.Tensor) -> th.Tensor:
        """Q of every action, ``[N, P]``, from the network's outputs, ``[N, O]``."""
        return outputs

    def _outputs_gradient(self, q_gradient: th.Tensor) -> th.Tensor:
        """The backward pass of :meth:`_q`."""
        return q_gradient

    def values(self, outputs: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param outputs: outputs of the critic's network, ``[N, O]``
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :return: V, ``[N]``
        """
        return (stats * self._q(outputs)).sum(-1)

    def forward(
        self, outputs: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> CriticOutput:
        """
        :param outputs: outputs of the critic's network, ``[N, O]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: unused: nothing is sampled
        :param rng: unused
        """
        shape, q = actions.shape[:2], self._q(outputs)
        q_steps, weights = (rows[: shape.numel()].view(*shape, -1) for rows in (q, stats))

        def backward(q_gradient: th.Tensor, value_gradient: th.Tensor | None) -> th.Tensor:
            taken = actions.flatten(0, 1)
            return self._outputs_gradient(th.zeros_like(q).scatter_(1, taken, q_gradient.reshape(-1, 1)))

        return CriticOutput(
            values=(stats * q).sum(-1),
            q_values=q_steps.gather(-1, actions).squeeze(-1),
            candidates=_every_action(q.shape[-1], q.device).expand(*q_steps.shape, 1),
            weights=weights,
            candidate_values=q_steps,
            backward=backward,
        )


class DuelingQHead(QHead):
    """
    :class:`QHead` with the outputs V and A (Wang et al., *Dueling Network Architectures for Deep Reinforcement
    Learning*, ICML 2016, equation 9): Q(x, a) = V(x) + A(x, a) - mean_b A(x, b).

    Learning about the action taken also changes Q of the others. Otherwise Q of actions that are rarely taken may stay
    too low while returns grow, and the policy may never take them again.
    """

    def __init__(self, family: Family, latent_dim: int) -> None:
        super().__init__(family, latent_dim)
        self.q = nn.Linear(latent_dim, 1 + family.n_stats)

    def _q(self, outputs: th.Tensor) -> th.Tensor:
        advantages = outputs[:, 1:]
        return dueling(outputs[:, 0], advantages, advantages)

    def _outputs_gradient(self, q_gradient: th.Tensor) -> th.Tensor:
        total = q_gradient.sum(-1, keepdim=True)
        return th.cat((total, q_gradient - total / q_gradient.shape[-1]), -1)


@cache
def _every_action(n_actions: int, device: th.device) -> th.Tensor:
    return th.arange(n_actions, device=device).unsqueeze(-1)


class DuelingHead(nn.Module):
    """
    Stochastic dueling network: V(x), A(x, a), and Q~ by :func:`~sb3_acer.estimators.dueling`.

    A has one hidden layer of H units, in which the latent features of the state meet the action. A's output has no
    bias, since it would cancel in Q~. The layers ``action`` and ``advantage`` are not called as modules, so forward
    hooks on them do not run.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    :param activation_fn: activation of A's hidden layer, one of :data:`~sb3_acer.mlp.ACTIVATIONS`. This layer has more
        rows than all others together, and tanh takes several times as long as ReLU on a CPU.
    """

    last_layer: ClassVar[str] = "latent"
    """the layer with which the critic's network ends"""

    def __init__(self, family: Family, latent_dim: int, activation_fn: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.family = family
        self.activation_fn = activation_fn
        # A layer of [latent, action] as the sum of two layers, so that the latent features of a state are multiplied
        # once for all its actions. The first output of the first one is V.
        width = min(latent_dim, _WIDTH)
        self.latent = nn.Linear(latent_dim, 1 + width)
        self.action = nn.Linear(family.n_features, width, bias=False)
        self.advantage = nn.Linear(width, 1, bias=False)

    def orthogonal_(self) -> None:
        """Initialise the matrices orthogonally, with a gain of 0.01 those of V and A."""
        for weight, gain in (
            (self.latent.weight[:1], 0.01),
            (self.latent.weight[1:], math.sqrt(2)),
            (self.action.weight, math.sqrt(2)),
            (self.advantage.weight, 0.01),
        ):
            nn.init.orthogonal_(weight, gain)
        nn.init.zeros_(self.latent.bias)

    def values(self, outputs: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param outputs: V and the latent features' part of A's hidden layer, ``[N, 1 + H]``
        :param stats: unused
        :return: V, ``[N]``
        """
        return outputs[:, 0]

    def forward(
        self, outputs: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> CriticOutput:
        """
        :param outputs: V and the latent features' part of A's hidden layer, ``[N, 1 + H]``, the first T * B rows those
            of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: number of candidates to sample from pi in each state (K), and of other samples for the mean
            advantage
        :param rng: the source of the samples
        """
        shape, activation = actions.shape[:2], ACTIVATIONS[self.activation_fn]
        actions = actions.flatten(0, 1)
        n_rows = len(actions)
        noise = th.from_numpy(self.family.noise(rng, n_rows, 2 * n_samples)).to(stats.device)
        sampled = self.family.sample(stats[:n_rows], noise.transpose(0, 1))
        candidates, others = sampled[:n_samples], sampled[n_samples:]
        # In this order: the samples of the mean, the action taken, and the candidates, whose Q~ are constants.
        encoded = self.family.encode(th.cat((others, actions.unsqueeze(0), candidates))).to(outputs.dtype)
        hidden = activation.overwriting(F.linear(encoded, self.action.weight).add_(outputs[:n_rows, 1:]))
        advantages = (hidden @ self.advantage.weight[0]).t()
        values = self.values(outputs, stats)
        q_values = dueling(values[:n_rows], advantages[:, n_samples:], advantages[:, :n_samples])

        def backward(q_gradient: th.Tensor, value_gradient: th.Tensor | None) -> th.Tensor:
            q_gradient, n_learnt = q_gradient.flatten(), n_samples + 1
            advantage_gradient = th.cat(((q_gradient / -n_samples).expand(n_samples, -1), q_gradient.unsqueeze(0)))
            rows = advantage_gradient.unsqueeze(-1) * self.advantage.weight
            hidden_gradient = activation.backward(rows, hidden[:n_learnt])
            output_gradient = th.zeros_like(outputs)
            output_gradient[:n_rows, 0] = q_gradient
            if value_gradient is not None:
                output_gradient[:n_rows, 0] += value_gradient.flatten()
            output_gradient[:n_rows, 1:] = hidden_gradient.sum(0)
            add_product(self.action.weight, hidden_gradient.flatten(0, 1).t(), encoded[:n_learnt].flatten(0, 1))
            add_product(self.advantage.weight, advantage_gradient.view(1, -1), hidden[:n_learnt].flatten(0, 1))
            return output_gradient

        candidate_values = q_values[:, 1:].view(*shape, -1)
        return CriticOutput(
            values=values,
            q_values=q_values[:, 0].view(shape),
            candidates=candidates.transpose(0, 1).view(*shape, n_samples, -1),
            weights=th.full_like(candidate_values, 1 / n_samples),
            candidate_values=candidate_values,
            backward=backward,
        )
