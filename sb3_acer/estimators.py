"""
The equations of ACER (Wang et al., *Sample Efficient Actor-Critic with Experience Replay*, ICLR 2017, arXiv 1611.01224)
as pure functions of tensors. Equation numbers are those of the paper.

Shapes are time-major: T steps, B sequences, K candidate actions per state, P statistics of a state's action
distribution. Functions that do not mention time also accept other leading axes in place of ``[T, B]``.

The importance ratio rho (equation 4) depends on the action space: see :meth:`sb3_acer.distributions.Family.ratios`.
"""

import torch as th

_BLOCK = 64
"""Steps of a recursion that are solved at once; memory grows with the square."""


def retrace_traces(ratio: th.Tensor, d: int | th.Tensor = 1) -> th.Tensor:
    r"""
    Trace coefficients of Retrace: :math:`c_t = \min(1, \rho_t^{1/d})` (equation 5; section 5.1 for d > 1).

    :param ratio: importance ratios rho of the actions taken, ``[T, B]``
    :param d: number of components with more than one valid outcome, see
        :attr:`~sb3_acer.distributions.Family.trace_root`; ``[T, B]`` where masks make states differ in it
    :return: coefficients in [0, 1], ``[T, B]``
    """
    if isinstance(d, th.Tensor):
        return ratio.pow(1 / d.to(ratio.dtype)).clamp(max=1)
    return (ratio if d == 1 else ratio.pow(1 / d)).clamp(max=1)


def off_policy_returns(
    rewards: th.Tensor,
    discounts: th.Tensor,
    next_values: th.Tensor,
    q_values: th.Tensor,
    traces: th.Tensor,
    continues: th.Tensor,
) -> th.Tensor:
    r"""
    Off-policy corrected returns, by a backward recursion:

    .. math:: G_t = r_t + \gamma_t \left( V(x'_t) + n_t c_{t+1} \left( G_{t+1} - Q(x_{t+1}, a_{t+1}) \right) \right)

    With the traces of :func:`retrace_traces` these are the Retrace targets :math:`Q^{ret}` (equation 5), with traces of
    1 the :math:`Q^{opc}` (equation 21, appendix B), with traces of 0 the one-step targets. At a sequence's last
    step G is r + gamma V(x'). Terminal states, time limits and the end of a sequence need no case of their own.

    :param rewards: rewards r, ``[T, B]``
    :param discounts: the discount factor gamma, or 0 where the step terminated its episode, ``[T, B]``
    :param next_values: V of the step's true successor x', which is the final observation where the step was truncated,
        ``[T, B]``
    :param q_values: Q of the actions taken, ``[T, B]``; row 0 is not used
    :param traces: trace coefficients c in [0, 1], ``[T, B]``; row 0 is not used
    :param continues: n: 0 where the episode ended at the step, terminated or truncated, else 1, ``[T, B]``
    :return: the returns G, ``[T, B]``
    """
    # The recursion G_t = offset_t + weight_t G_{t+1} is a triangular system of equations: one operation for a block of
    # steps instead of some for each step.
    weights = (discounts * continues)[:-1] * traces[1:]
    offsets = th.addcmul(rewards, discounts, next_values)
    offsets[:-1].addcmul_(weights, q_values[1:], value=-1)
    if len(offsets) <= _BLOCK:
        return _solve(weights, offsets)
    blocks: list[th.Tensor] = []
    for end in range(len(offsets), 0, -_BLOCK):
        start = max(end - _BLOCK, 0)
        if blocks:
            offsets[end - 1].add_(weights[end - 1] * blocks[-1][0])
        blocks.append(_solve(weights[start : end - 1], offsets[start:end]))
    return th.cat(blocks[::-1])


def _solve(weights: th.Tensor, offsets: th.Tensor) -> th.Tensor:
    """G of G_t = offset_t + weight_t G_{t+1}, with G = offset at the last step, ``[T, B]``."""
    system = th.diag_embed(-weights.t(), offset=1)
    solution: th.Tensor = th.linalg.solve_triangular(system, offsets.t().unsqueeze(-1), upper=True, unitriangular=True)
    return solution.squeeze(-1).t()


def truncated_factor(ratio: th.Tensor, advantage: th.Tensor, c: float) -> th.Tensor:
    r"""
    The factor of log pi(a_t | x_t) in :func:`truncated_gain`: :math:`\min(c, \rho_t) A_t`.

    :param ratio: importance ratios rho = pi / mu of the actions taken, ``[T, B]``
    :param advantage: A: Q^ret - V, or Q^opc - V, ``[T, B]``
    :param c: truncation constant, >= 0
    :return: ``[T, B]``
    """
    return ratio.clamp(max=c) * advantage


def correction_factors(weights: th.Tensor, ratios: th.Tensor, advantages: th.Tensor, c: float) -> th.Tensor:
    r"""
    The factors of the candidates' log pi(a | x_t) in :func:`correction_gain`:
    :math:`w_a \left[ 1 - c / \rho(a) \right]_+ A(a)`.

    :param weights: w >= 0, ``[T, B, K]``
    :param ratios: importance ratios rho = pi / mu of the candidates, ``[T, B, K]``
    :param advantages: A = Q - V of the candidates, ``[T, B, K]``
    :param c: truncation constant, >= 0
    :return: ``[T, B, K]``
    """
    excess = (1 - c / ratios.clamp(min=th.finfo(ratios.dtype).tiny)).clamp(min=0)
    return weights * excess * advantages


def truncated_gain(log_prob: th.Tensor, ratio: th.Tensor, advantage: th.Tensor, c: float) -> th.Tensor:
    r"""
    The policy gain with a truncated importance ratio, first term of equations 7 to 9 and 15:
    :math:`\min(c, \rho_t) A_t \log \pi(a_t | x_t)`.

    :param log_prob: log pi of the actions taken, ``[T, B]``; gradients flow through it
    :param ratio: see :func:`truncated_factor`
    :param advantage: see :func:`truncated_factor`
    :param c: truncation constant, >= 0
    :return: ``[T, B]``
    """
    return truncated_factor(ratio, advantage, c) * log_prob


def correction_gain(
    log_probs: th.Tensor, weights: th.Tensor, ratios: th.Tensor, advantages: th.Tensor, c: float
) -> th.Tensor:
    r"""
    The bias correction of the truncation, second term of equations 7 to 9 and 15, as a weighted sum over candidate
    actions: :math:`\sum_a w_a \left[ 1 - c / \rho(a) \right]_+ A(a) \log \pi(a | x)`.

    It is exact if every action is a candidate and w = pi. With K candidates sampled from pi and w = 1/K it is an
    unbiased estimate.

    :param log_probs: log pi of the candidates, ``[T, B, K]``; gradients flow through them
    :param weights: see :func:`correction_factors`
    :param ratios: see :func:`correction_factors`
    :param advantages: see :func:`correction_factors`
    :param c: truncation constant, >= 0
    :return: ``[T, B]``
    """
    return (correction_factors(weights, ratios, advantages, c) * log_probs).sum(-1)


def trust_region(g: th.Tensor, k: th.Tensor, delta: float) -> th.Tensor:
    r"""
    The vector z nearest to g with :math:`k^\top z \le \delta` (the problem of equation 11), in closed form
    (equation 12):

    .. math:: z = g - \max\left( 0, \frac{k^\top g - \delta}{\|k\|^2} \right) k

    :param g: gradient of each state's gain with respect to its statistics (equation 10; 16 where actions are sampled),
        ``[T, B, P]``
    :param k: gradient of KL(average || current) with respect to the same statistics, ``[T, B, P]``
    :param delta: bound on the linearised change of the divergence, >= 0
    :return: z, ``[T, B, P]``; equal to g where g satisfies the constraint
    """
    excess = ((k * g).sum(-1) - delta).clamp(min=0)
    squared_norm = (k * k).sum(-1).clamp(min=th.finfo(k.dtype).tiny)  # k = 0 has no excess: 0 / tiny
    scale: th.Tensor = excess / squared_norm
    return th.addcmul(g, scale.unsqueeze(-1), k, value=-1)


def dueling(values: th.Tensor, advantage: th.Tensor, sampled_advantages: th.Tensor) -> th.Tensor:
    r"""
    Q of a stochastic dueling network (equation 13):
    :math:`\tilde Q(x, a) = V(x) + A(x, a) - \frac{1}{n} \sum_i A(x, u_i)` with :math:`u_i \sim \pi(\cdot | x)`,
    so that :math:`E_{a \sim \pi} E_u [\tilde Q(x, a)] = V(x)`.

    :param values: V, ``[T, B]``
    :param advantage: A(x, a), ``[T, B]``, or ``[T, B, K]`` for K actions per state
    :param sampled_advantages: A(x, u_i) of n sampled actions, ``[T, B, n]``
    :return: Q~, of the shape of ``advantage``
    """
    baseline = values - sampled_advantages.mean(-1)
    return advantage + (baseline if advantage.dim() == baseline.dim() else baseline.unsqueeze(-1))


def value_target(ratio: th.Tensor, q_ret: th.Tensor, q_values: th.Tensor, values: th.Tensor) -> th.Tensor:
    r"""
    Target of the V of a stochastic dueling network (equation 14):
    :math:`V^{target} = \min(1, \rho_t) \left( Q^{ret} - \tilde Q(x_t, a_t) \right) + V(x_t)`.

    :param ratio: importance ratios rho of the actions taken, ``[T, B]``
    :param q_ret: Retrace targets, ``[T, B]``
    :param q_values: Q~ of the actions taken, ``[T, B]``
    :param values: V, ``[T, B]``
    :return: ``[T, B]``
    """
    return ratio.clamp(max=1) * (q_ret - q_values) + values


def critic_gradient(predictions: th.Tensor, targets: th.Tensor) -> th.Tensor:
    r"""
    Gradient of :math:`\frac{1}{2} (target - prediction)^2` with respect to the prediction. Its negative
    is the factor of :math:`\nabla_\theta Q_\theta` in equation 6.

    :param predictions: Q of the actions taken, or V, ``[T, B]``
    :param targets: the Retrace targets, or V^target, ``[T, B]``
    :return: ``[T, B]``
    """
    return predictions - targets
