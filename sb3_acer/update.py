"""
One update of ACER as a pure function: from policy, average policy and a batch of sequences to the gradients that a step
follows. :mod:`sb3_acer.estimators` has the equations, :mod:`sb3_acer.acer` says when an update is made.
"""

import math
from typing import NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.utils import explained_variance

from sb3_acer.distributions import Family
from sb3_acer.estimators import (
    correction_factors,
    correction_gain,
    critic_gradient,
    off_policy_returns,
    retrace_traces,
    truncated_factor,
    truncated_gain,
    trust_region,
    value_target,
)
from sb3_acer.policies import ACERPolicy, Evaluation
from sb3_acer.sequences import SequenceBatch


class Settings(NamedTuple):
    """The arguments of :class:`~sb3_acer.acer.ACER` that an update uses, explained there."""

    gamma: float
    q_coef: float
    ent_coef: float
    correction_term: float
    delta: float | None
    """None for no trust region"""
    n_action_samples: int


class Update(NamedTuple):
    """What an update computes."""

    gradients: tuple[th.Tensor, ...]
    """
    of the mean of weight times loss over the T * B states: with respect to the statistics, ``[T, B, P]``; to Q of the
    actions taken, ``[T, B]``; and, where the critic has a V of its own, to V, ``[T, B]``
    """
    batch: SequenceBatch
    evaluation: Evaluation
    average_stats: th.Tensor
    """statistics of the average policy, ``[T, B, P]``"""
    ratio: th.Tensor
    """importance ratios rho of the actions taken, ``[T, B]``"""
    candidate_ratios: th.Tensor
    """importance ratios of the candidates, ``[T, B, K]``"""
    q_ret: th.Tensor
    """Retrace targets, ``[T, B]``"""
    advantage: th.Tensor
    """Q^ret - V, or Q^opc - V where actions are sampled, ``[T, B]``"""
    candidate_advantages: th.Tensor
    """Q - V of the candidates, ``[T, B, K]``"""
    g: th.Tensor
    """gradient of each state's gain, entropy bonus included, with respect to its statistics, ``[T, B, P]``"""
    k: th.Tensor
    """gradient of KL(average || current) with respect to the same, ``[T, B, P]``"""
    z: th.Tensor
    """``g`` after the trust region, ``[T, B, P]``"""
    grad_norm: float = math.nan
    """norm of the gradients of all parameters together before clipping; NaN before the backward pass"""


def compute_update(
    policy: ACERPolicy,
    average_policy: ACERPolicy,
    batch: SequenceBatch,
    settings: Settings,
    rng: np.random.Generator,
) -> Update:
    """
    The gradients of ACER's loss for one batch: of the policy's gain within the trust region (equations 9 to 12; 15 and
    16 where actions are sampled), and of the critic's errors (equations 6 and 14). No parameter changes.

    :param policy: the policy to improve
    :param average_policy: the centre of the trust region
    :param batch: B sequences of T steps, on-policy or replayed
    :param settings: see :class:`Settings`
    :param rng: the source of the sampled candidates
    :return: the update; ``update.evaluation.backward(*update.gradients)`` carries it to the parameters
    """
    # One forward pass of policy and critic over all rows, one of the average policy.
    evaluation = policy.evaluate(batch, settings.n_action_samples, rng)
    average_stats = average_policy.statistics(batch)
    with th.inference_mode():  # no backward pass goes through the rest; recording one takes a tenth of an update
        family, c = policy.family, settings.correction_term
        stats, values, q_values = evaluation.stats, evaluation.values, evaluation.q_values
        ratio, candidate_ratios = family.ratios(stats, batch.behaviour, batch.actions, evaluation.candidates)

        # Targets: Q^ret for the critic, and for the policy where actions are enumerated; else Q^opc.
        discounts, continues = (~batch.terminated).to(batch.rewards.dtype).mul_(settings.gamma), ~batch.ends
        steps = (batch.rewards, discounts, evaluation.next_values, q_values)
        root = family.trace_root if batch.masks is None else family.trace_roots(batch.masks[:-1])
        traces = retrace_traces(ratio, root)
        q_ret = off_policy_returns(*steps, traces, continues)
        returns = q_ret if family.enumerable else off_policy_returns(*steps, th.ones_like(traces), continues)

        # Policy: the gradient of each state's gain with respect to its statistics, within the trust region.
        advantage = returns - values
        candidate_advantages = evaluation.candidate_values - values.unsqueeze(-1)
        factor = truncated_factor(ratio, advantage, c)
        candidate_factors = correction_factors(evaluation.weights, candidate_ratios, candidate_advantages, c)
        g = family.gain_gradient(stats, batch.actions, factor, evaluation.candidates, candidate_factors)
        g = g.add(family.entropy_gradient(stats), alpha=settings.ent_coef)
        k = family.kl_gradient(average_stats, stats)
        z = g if settings.delta is None else trust_region(g, k, settings.delta)

        # Critic: Q towards Q^ret, and V towards V^target where the critic has a V of its own.
        share = batch.weights.to(stats.dtype) / ratio.numel()
        q_share = settings.q_coef * share
        gradients = [z * -share.unsqueeze(-1), q_share * critic_gradient(q_values, q_ret)]
        if not family.enumerable:
            target = value_target(ratio, q_ret, q_values, values)
            gradients.append(q_share * critic_gradient(values, target))
        return Update(
            gradients=tuple(gradients),
            batch=batch,
            evaluation=evaluation,
            average_stats=average_stats,
            ratio=ratio,
            candidate_ratios=candidate_ratios,
            q_ret=q_ret,
            advantage=advantage,
            candidate_advantages=candidate_advantages,
            g=g,
            k=k,
            z=z,
        )


def metrics(family: Family, update: Update, c: float) -> dict[str, float]:
    """
    :param family: the family of the actions
    :param update: what :func:`compute_update` returned, with its ``grad_norm``
    :param c: truncation constant
    :return: what ACER logs of it: means over the T * B states, and shares of them. ``policy_loss`` is minus the gain
        whose gradient is equation 9 (16 where actions are sampled), without trust region and entropy bonus, and
        ``correction_loss`` its second term alone; ``trust_region_scale`` is the multiple of k that equation 12
        subtracts from g
    """
    evaluation = update.evaluation
    stats, q_values = evaluation.stats, evaluation.q_values
    log_prob = family.log_prob(stats, update.batch.actions)
    log_probs = family.log_prob(stats.unsqueeze(-2), evaluation.candidates)
    ratios, advantages = update.candidate_ratios, update.candidate_advantages
    correction = correction_gain(log_probs, evaluation.weights, ratios, advantages, c)
    gain = truncated_gain(log_prob, update.ratio, update.advantage, c) + correction
    scale = (update.g - update.z).norm(dim=-1) / update.k.norm(dim=-1).clamp(min=th.finfo(stats.dtype).tiny)
    quantities = {
        "policy_loss": -gain,
        "q_loss": 0.5 * critic_gradient(q_values, update.q_ret).square(),
        "correction_loss": -correction,
        "entropy": family.entropy(stats),
        "kl": family.kl(update.average_stats, stats),
        "ratio_mean": update.ratio,
        "ratio_truncated": update.ratio > c,
        "trust_region_active": (update.z != update.g).any(-1),
        "trust_region_scale": scale,
    }
    # In float64 the variance of equal numbers in float32 is 0.
    predictions, targets = (each.flatten().double().cpu().numpy() for each in (q_values, update.q_ret))
    numbers = th.stack([quantity.float().mean() for quantity in quantities.values()]).tolist()
    means = dict(zip(quantities, numbers, strict=True))
    return {
        **means,
        "grad_norm": update.grad_norm,
        "explained_variance": float(explained_variance(predictions, targets)),
    }
