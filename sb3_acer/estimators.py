"""
The mathematics of ACER (Wang et al., *Sample Efficient Actor-Critic with Experience Replay*, arXiv 1611.01224):
pure functions of tensors, time-major, that know numbers and no policies.

T is the number of steps of a sequence, B the number of sequences, K the number of candidate actions of a state and P
the number of statistics of its distribution. Leading axes other than ``[T, B]`` work wherever nothing is said of time.
"""

import torch as th


def off_policy_returns(
    rewards: th.Tensor,
    discounts: th.Tensor,
    next_values: th.Tensor,
    q_values: th.Tensor,
    traces: th.Tensor,
    continues: th.Tensor,
) -> th.Tensor:
    r"""
    Off-policy corrected returns, by one backward recursion:

    .. math:: G_t = r_t + \gamma_t \left( V(x'_t) + n_t c_{t+1} \left( G_{t+1} - Q(x_{t+1}, a_{t+1}) \right) \right)

    Traces :math:`c = \min(1, \rho^{1/d})` make it Retrace, :math:`Q^{ret}` (equation 5); :math:`c = 1` makes it
    :math:`Q^{opc}` (appendix 3); :math:`c = 0` makes it the one-step target. Nothing follows the last step but its
    ``next_values``, so terminations, time limits and the end of a sequence need no case of their own.

    :param rewards: rewards r, ``[T, B]``
    :param discounts: gamma, or 0 where the step terminated its episode, ``[T, B]``
    :param next_values: V of the step's true successor (of the final observation where a time limit cut), ``[T, B]``
    :param q_values: Q of the actions taken, ``[T, B]``; row 0 is not used
    :param traces: trace coefficients c in [0, 1], ``[T, B]``; row 0 is not used
    :param continues: n, 0 where an episode ended at the step for whatever reason, else 1, ``[T, B]``
    :return: the returns G, ``[T, B]``
    """
    # The recursion is G_t = offset_t + weight_t G_{t+1}. A pass of stride s leaves in row t the sum of 2s of its terms
    # and the product of 2s of its weights: log2(T) operations on all rows instead of T on single ones.
    weights = discounts[:-1] * continues[:-1] * traces[1:]
    returns = rewards + discounts * next_values
    returns[:-1].sub_(weights * q_values[1:])
    stride = 1
    while stride < len(returns):
        returns[:-stride].add_(weights * returns[stride:])
        weights = weights[:-stride] * weights[stride:]
        stride *= 2
    return returns


def truncated_weight(ratio: th.Tensor, advantage: th.Tensor, c: float) -> th.Tensor:
    r"""
    What multiplies log pi(a_t | x_t) in :func:`truncated_gain`: :math:`\min(c, \rho_t) A_t`.

    :param ratio: importance ratios rho = pi / mu of the actions taken, ``[T, B]``
    :param advantage: Q^ret - V, or Q^opc - V, ``[T, B]``
    :param c: truncation constant, >= 0
    :return: ``[T, B]``
    """
    return ratio.clamp(max=c) * advantage


def correction_weights(weights: th.Tensor, ratios: th.Tensor, advantages: th.Tensor, c: float) -> th.Tensor:
    r"""
    What multiplies the candidates' log pi(a | x_t) in :func:`correction_gain`:
    :math:`w_a \left[ 1 - c / \rho(a) \right]_+ A(a)`.

    :param weights: w >= 0, ``[T, B, K]``
    :param ratios: importance ratios rho = pi / mu of the candidates, ``[T, B, K]``
    :param advantages: Q - V of the candidates, ``[T, B, K]``
    :param c: truncation constant, >= 0
    :return: ``[T, B, K]``
    """
    excess = (1 - c / ratios.clamp(min=th.finfo(ratios.dtype).tiny)).clamp(min=0)
    return weights * excess * advantages


def truncated_gain(log_prob: th.Tensor, ratio: th.Tensor, advantage: th.Tensor, c: float) -> th.Tensor:
    r"""
    The truncated importance-sampled policy gain of equation 9's first term:
    :math:`\min(c, \rho_t) A_t \log \pi(a_t | x_t)`.

    :param log_prob: log pi of the actions taken, ``[T, B]``: what a gradient goes through
    :param ratio: see :func:`truncated_weight`
    :param advantage: see there
    :param c: see there
    :return: ``[T, B]``
    """
    return truncated_weight(ratio, advantage, c) * log_prob


def correction_gain(
    log_probs: th.Tensor, weights: th.Tensor, ratios: th.Tensor, advantages: th.Tensor, c: float
) -> th.Tensor:
    r"""
    The bias correction of equation 9's second term, as a weighted sum over candidate actions:
    :math:`\sum_a w_a \left[ 1 - c / \rho(a) \right]_+ A(a) \log \pi(a | x)`.

    With every action a candidate and w = pi it is the expectation itself; with K actions sampled from pi and w = 1/K
    its unbiased estimate.

    :param log_probs: log pi of the candidates, ``[T, B, K]``: what a gradient goes through
    :param weights: see :func:`correction_weights`
    :param ratios: see there
    :param advantages: see there
    :param c: see there
    :return: ``[T, B]``
    """
    return (correction_weights(weights, ratios, advantages, c) * log_probs).sum(-1)


def trust_region(g: th.Tensor, k: th.Tensor, delta: float) -> th.Tensor:
    r"""
    The gradient nearest to g whose product with k is at most delta (equation 12, solved in closed form):

    .. math:: z = g - \max\left( 0, \frac{k^\top g - \delta}{\|k\|^2} \right) k

    :param g: gradient of each state's gain with respect to its statistics, ``[T, B, P]``
    :param k: gradient of KL(average || current) with respect to the same statistics, ``[T, B, P]``
    :param delta: bound on the linearised change of the divergence, >= 0
    :return: z, ``[T, B, P]``; g itself where it is feasible
    """
    excess = (th.linalg.vecdot(k, g) - delta).clamp(min=0)
    squared_norm = th.linalg.vecdot(k, k).clamp(min=th.finfo(k.dtype).tiny)  # k = 0 has no excess: 0 / tiny
    scale: th.Tensor = excess / squared_norm
    return g - scale.unsqueeze(-1) * k


def dueling(values: th.Tensor, advantage: th.Tensor, sampled_advantages: th.Tensor) -> th.Tensor:
    r"""
    Stochastic dueling networks (equation 14):
    :math:`\tilde Q(x, a) = V(x) + A(x, a) - \frac{1}{n} \sum_i A(x, u_i)` with :math:`u_i \sim \pi(\cdot | x)`,
    so that :math:`E_{a \sim \pi} E_u [\tilde Q(x, a)] = V(x)`.

    :param values: V, ``[T, B]``
    :param advantage: A(x, a), ``[T, B]``, or ``[T, B, K]`` for K actions a state
    :param sampled_advantages: A(x, u_i) of n sampled actions, ``[T, B, n]``
    :return: Q~, of the shape of ``advantage``
    """
    baseline = values - sampled_advantages.mean(-1)
    return advantage + (baseline if advantage.dim() == baseline.dim() else baseline.unsqueeze(-1))
