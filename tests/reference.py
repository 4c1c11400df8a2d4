"""
The scalar oracle: what `sb3_acer.estimators` computes, in plain Python floats, one sequence and one state at a time.
Written from the equations, with a branch for each case that the tensors have none for.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a sequence, and the state that it was taken in."""

    reward: float
    terminated: bool
    truncated: bool
    value: float
    """V of the state"""
    q_value: float
    """Q of the action taken in it"""
    trace: float
    """trace coefficient of that action"""
    final_value: float
    """V of the observation that followed, of no consequence unless the step was truncated"""


def returns(steps: Sequence[Step], gamma: float, bootstrap: float) -> list[float]:
    """
    The off-policy corrected return of each step, backwards.

    :param steps: a sequence, of one episode or more
    :param gamma: discount factor
    :param bootstrap: V of what followed the last step
    """
    found: list[float] = []
    for t in reversed(range(len(steps))):
        step = steps[t]
        if step.terminated:
            target = step.reward
        elif step.truncated:
            target = step.reward + gamma * step.final_value
        elif t + 1 == len(steps):
            target = step.reward + gamma * bootstrap
        else:
            after = steps[t + 1]
            target = step.reward + gamma * (after.value + after.trace * (found[0] - after.q_value))
        found.insert(0, target)
    return found


def return_by_definition(steps: Sequence[Step], gamma: float, bootstrap: float) -> float:
    """
    The first step's return as Retrace defines it (Munos et al., equation 4), forwards and in no recursion, over the
    steps of one episode: Q(x_0, a_0) + sum_t gamma^t (prod_{0 < i <= t} c_i) (r_t + gamma V(x_{t+1}) - Q(x_t, a_t)).
    """
    total, weight = steps[0].q_value, 1.0
    for t, step in enumerate(steps):
        if t > 0:
            weight *= gamma * step.trace
        if step.terminated:
            return total + weight * (step.reward - step.q_value)
        if step.truncated:
            return total + weight * (step.reward + gamma * step.final_value - step.q_value)
        next_value = steps[t + 1].value if t + 1 < len(steps) else bootstrap
        total += weight * (step.reward + gamma * next_value - step.q_value)
    return total


def truncated_gain(log_prob: float, ratio: float, advantage: float, c: float) -> float:
    """min(c, rho) A log pi"""
    return (ratio if ratio < c else c) * advantage * log_prob


def correction_gain(
    log_probs: Sequence[float],
    weights: Sequence[float],
    ratios: Sequence[float],
    advantages: Sequence[float],
    c: float,
) -> float:
    """sum_a w_a [1 - c / rho_a]_+ A_a log pi_a"""
    total = 0.0
    for log_prob, weight, ratio, advantage in zip(log_probs, weights, ratios, advantages, strict=True):
        if ratio > c:
            total += weight * (ratio - c) / ratio * advantage * log_prob
    return total


def nearest_feasible(g: Sequence[float], k: Sequence[float], delta: float) -> list[float]:
    """
    The z nearest to g with k.z <= delta. The minimum of |g - z|^2 / 2 + multiplier (k.z - delta) over z is at
    z = g - multiplier k, so what is left is the smallest multiplier that makes it feasible: by bisection.
    """

    def candidate(multiplier: float) -> list[float]:
        return [g_i - multiplier * k_i for g_i, k_i in zip(g, k, strict=True)]

    def feasible(z: Sequence[float]) -> bool:
        return sum(k_i * z_i for k_i, z_i in zip(k, z, strict=True)) <= delta

    if feasible(g):
        return list(g)
    low, high = 0.0, 1.0
    while not feasible(candidate(high)):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if feasible(candidate(middle)):
            high = middle
        else:
            low = middle
    return candidate(high)


def dueling(value: float, advantage: float, sampled_advantages: Sequence[float]) -> float:
    """V + A(x, a) - mean_i A(x, u_i)"""
    return value + advantage - sum(sampled_advantages) / len(sampled_advantages)
