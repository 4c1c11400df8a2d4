"""Critic heads: Q of all actions where they can be enumerated, else the stochastic dueling head (section 5.1)."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_acer.distributions import Family
from sb3_acer.estimators import dueling
from sb3_acer.mlp import ACTIVATIONS, Activation


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

    Q is the output of ``layers``, with which the critic's network ends.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    """

    def __init__(self, family: Family, latent_dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(latent_dim, family.n_stats)
        self.layers = (self.q,)

    def orthogonal_(self) -> None:
        """Initialise the matrix orthogonally. CartPole-v1 is learnt more slowly with the gain 0.01."""
        nn.init.orthogonal_(self.q.weight)
        nn.init.zeros_(self.q.bias)

    def values(self, q: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param q: Q of every action, ``[N, P]``
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :return: V, ``[N]``
        """
        return (stats * q).sum(-1)

    def forward(
        self, q: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param q: Q of every action, ``[N, P]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: unused: nothing is sampled
        :param rng: unused
        """
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

    A has one hidden layer of W units, in which the latent features of the state meet the action. A has no bias, which
    would cancel in Q~.

    :param family: the family of the actions
    :param latent_dim: width of the latent features (L)
    :param activation_fn: activation of A's hidden layer, one of :data:`~sb3_acer.mlp.ACTIVATIONS`. This layer has more
        rows than all others together, and tanh takes forty times as long as ReLU on a CPU.
    """

    def __init__(self, family: Family, latent_dim: int, activation_fn: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.family = family
        self.activation = ACTIVATIONS[activation_fn]
        # A layer of [latent, action] as the sum of two layers, so that the latent features of a state are multiplied
        # once for all its actions. The first output of the first one is V.
        width = min(latent_dim, 64)
        self.latent = nn.Linear(latent_dim, 1 + width)
        self.action = nn.Linear(family.n_features, width, bias=False)
        self.advantage = nn.Linear(width, 1, bias=False)
        self.layers = (self.latent,)

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
        :param outputs: V and the latent features' part of A's hidden layer, ``[N, 1 + W]``
        :param stats: unused
        :return: V, ``[N]``
        """
        return outputs[:, 0]

    def forward(
        self, outputs: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param outputs: V and the latent features' part of A's hidden layer, ``[N, 1 + W]``, the first T * B rows those
            of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: number of candidates to sample from pi in each state (K), and of other samples for the mean
            advantage
        :param rng: the source of the samples
        """
        shape = actions.shape[:2]
        actions = actions.flatten(0, 1)
        uniforms = th.from_numpy(rng.random((len(actions), 2 * n_samples, actions.shape[-1]))).to(stats.device)
        sampled = self.family.sample(stats[: len(actions)].detach(), uniforms.transpose(0, 1))
        candidates, others = sampled[:n_samples], sampled[n_samples:]
        every = self.family.encode(th.cat((actions.unsqueeze(0), others, candidates))).to(outputs.dtype)
        arguments = outputs, every, self.activation, self.action.weight, self.advantage.weight
        values, q_values, candidate_values = _Dueling.apply(*arguments)  # type: ignore[no-untyped-call]
        candidate_values = candidate_values.t().view(*shape, -1)
        return Judgement(
            values,
            q_values.view(shape),
            candidates.transpose(0, 1).view(*shape, n_samples, -1),
            th.full_like(candidate_values, 1 / n_samples),
            candidate_values,
        )


class _Dueling(th.autograd.Function):
    """
    V, and Q~ of 1 + 2 K actions in each state: of the action taken, then of K samples whose mean advantage is
    subtracted, then of K candidates, whose Q~ the correction takes as constants.

    By hand, since these rows are half of a small network's update, and autograd would keep those of the candidates too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: th.Tensor,
        actions: th.Tensor,
        activation: Activation,
        action_weight: th.Tensor,
        advantage_weight: th.Tensor,
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        n_learnt, n_steps = 1 + len(actions) // 2, actions.shape[1]
        hidden = activation.function(F.linear(actions, action_weight).add_(outputs[:n_steps, 1:]))
        advantages = hidden @ advantage_weight[0]
        values = outputs[:, 0].clone()
        samples = advantages[1:n_learnt].t()
        q_values = dueling(values[:n_steps], advantages[0], samples)
        candidate_values = dueling(values[:n_steps], advantages[n_learnt:].t(), samples).t()
        ctx.save_for_backward(hidden[:n_learnt], actions[:n_learnt], advantage_weight)
        ctx.n_rows, ctx.activation = len(outputs), activation
        ctx.mark_non_differentiable(candidate_values)
        return values, q_values, candidate_values

    @staticmethod
    def backward(ctx: Any, of_values: th.Tensor, of_q: th.Tensor, _: Any) -> tuple[th.Tensor | None, ...]:
        hidden, actions, advantage_weight = ctx.saved_tensors
        n_samples, n_steps = len(hidden) - 1, hidden.shape[1]
        of_advantages = th.cat((of_q.unsqueeze(0), (of_q / -n_samples).expand(n_samples, -1)))
        of_hidden = ctx.activation.backward(of_advantages.unsqueeze(-1) * advantage_weight, hidden)
        of_outputs = hidden.new_zeros(ctx.n_rows, 1 + hidden.shape[-1])
        of_outputs[:, 0] = of_values
        of_outputs[:n_steps, 0] += of_q
        th.sum(of_hidden, 0, out=of_outputs[:n_steps, 1:])
        of_action_weight = of_hidden.flatten(0, 1).t() @ actions.flatten(0, 1)
        of_advantage_weight = of_advantages.flatten().unsqueeze(0) @ hidden.flatten(0, 1)
        return of_outputs, None, None, of_action_weight, of_advantage_weight
