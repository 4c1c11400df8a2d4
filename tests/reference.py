"""
The oracle: what `sb3_acer` computes, written from the equations one sequence and one state at a time, with a branch for
termination, for truncation and for the end of a sequence. First the estimators in plain Python floats, then action
distributions, networks, and a whole update, whose states are small tensors so that autograd can differentiate them.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from torch import nn

from sb3_acer.distributions import EPSILON, MAX_LOG_RATIO
from sb3_acer.heads import DuelingQHead, QHead
from sb3_acer.policies import ACERPolicy
from sb3_acer.recurrent import GRU, LSTM, Gated, Identity, Recurrent
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Settings

Space = spaces.Space[Any]


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


def trace(ratio: float, n_components: int) -> float:
    """min(1, rho^(1/d))"""
    root: float = ratio ** (1 / n_components)
    return root if root < 1 else 1.0


def value_target(ratio: float, q_ret: float, q_value: float, value: float) -> float:
    """min(1, rho) (Q^ret - Q~) + V"""
    return (ratio if ratio < 1 else 1.0) * (q_ret - q_value) + value


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
        if middle in (low, high):  # no float is between them
            break
        if feasible(candidate(middle)):
            high = middle
        else:
            low = middle
    return candidate(high)


def dueling(value: float, advantage: float, sampled_advantages: Sequence[float]) -> float:
    """V + A(x, a) - mean_i A(x, u_i)"""
    return value + advantage - sum(sampled_advantages) / len(sampled_advantages)


# Action distributions of one state: statistics [P], an action [D]


def sizes(space: Space) -> list[int]:
    """Outcomes of each factor of a categorical space, from the space alone."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.flatten()]
    assert isinstance(space, spaces.MultiBinary)
    return [2] * space.shape[0]


def factors(space: Space, stats: th.Tensor) -> list[th.Tensor]:
    """Each factor's part of what is side by side, ``[..., n]``."""
    ends = list(itertools.accumulate(sizes(space)))
    return [stats[..., end - n : end] for n, end in zip(sizes(space), ends, strict=True)]


def statistics(space: Space, outputs: th.Tensor, log_std: th.Tensor | None) -> th.Tensor:
    """Probabilities of each factor, or mean and standard deviation."""
    if isinstance(space, spaces.Box):
        assert log_std is not None
        return th.cat((outputs, log_std.exp()))
    return th.cat([part.exp() / part.exp().sum() for part in factors(space, outputs)])


def probabilities(space: Space, stats: th.Tensor, action: th.Tensor) -> list[th.Tensor]:
    """Of each component of an action, or the density of each."""
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2)
        densities = (-0.5 * ((action - mean) / std) ** 2).exp() / (std * math.sqrt(2 * math.pi))
        return list(densities)
    return [part[outcome] for part, outcome in zip(factors(space, stats), action.tolist(), strict=True)]


def log_prob(space: Space, stats: th.Tensor, action: th.Tensor) -> th.Tensor:
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2)
        return (-0.5 * ((action - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum()
    return th.stack([(p + EPSILON).log() for p in probabilities(space, stats, action)]).sum()


def ratio(space: Space, stats: th.Tensor, behaviour: th.Tensor, action: th.Tensor) -> float:
    """pi(a|x) / mu(a|x), with the floor of probabilities and the bound of ratios that the package documents."""
    floor = 0.0 if isinstance(space, spaces.Box) else EPSILON
    each = zip(probabilities(space, stats, action), probabilities(space, behaviour, action), strict=True)
    return min(math.prod(p.item() / (q.item() + floor) for p, q in each), math.exp(MAX_LOG_RATIO))


def entropy(space: Space, stats: th.Tensor) -> th.Tensor:
    if isinstance(space, spaces.Box):
        return (stats.chunk(2)[1].log() + 0.5 * math.log(2 * math.pi * math.e)).sum()
    return -(stats * (stats + EPSILON).log()).sum()


def kl(space: Space, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
    """KL(stats || other)"""
    if isinstance(space, spaces.Box):
        (mean, std), (other_mean, other_std) = stats.chunk(2), other.chunk(2)
        squares = (std / other_std) ** 2 + ((mean - other_mean) / other_std) ** 2
        return (0.5 * squares - 0.5 - (std / other_std).log()).sum()
    return (stats * ((stats + EPSILON) / (other + EPSILON)).log()).sum()


def sample(space: Space, stats: th.Tensor, noise: th.Tensor) -> th.Tensor:
    """From standard normal numbers, or by inversion of the distribution function of each factor."""
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2)
        return mean + std * noise
    action = []
    for part, uniform in zip(factors(space, stats), noise.tolist(), strict=True):
        outcome, cumulated = 0, part[0].item()
        while cumulated <= uniform:
            outcome += 1
            cumulated += part[outcome].item()
        action.append(outcome)
    return th.tensor(action)


def encoded(space: Space, action: th.Tensor) -> th.Tensor:
    """A one for each outcome; or what the environment gets, scaled to [-1, 1] where both bounds are finite."""
    numbers: list[float] = []
    if not isinstance(space, spaces.Box):
        for size, outcome in zip(sizes(space), action.tolist(), strict=True):
            numbers += [float(i == outcome) for i in range(size)]
    else:
        for x, low, high in zip(action.tolist(), space.low.flat, space.high.flat, strict=True):
            clipped = min(max(x, float(low)), float(high))
            clipped = float(round(clipped)) if np.issubdtype(space.dtype, np.integer) else clipped
            finite = math.isfinite(low) and math.isfinite(high)
            numbers.append(2 * (clipped - float(low)) / (float(high) - float(low)) - 1 if finite else clipped)
    return th.tensor(numbers, dtype=th.float64)


# Networks


def normalised(norm: Any, x: th.Tensor) -> th.Tensor:
    moments = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    normal: th.Tensor = (x - moments[0]) / (moments[1] + 1e-5).sqrt() * norm.weight + norm.bias
    return normal


def gru_cell(network: GRU, layer: int, x: th.Tensor, h: th.Tensor) -> th.Tensor:
    """Reset, update and new gate: h' = (1 - z) n + z h with n = tanh(W x + b + r (U h + b'))."""
    inputs, hiddens, *biases = network.gru.all_weights[layer]
    of_input, of_hidden = biases or (th.zeros(len(inputs)).double(),) * 2
    r_x, z_x, n_x = (x @ inputs.T + of_input).chunk(3, -1)
    r_h, z_h, n_h = (h @ hiddens.T + of_hidden).chunk(3, -1)
    z = th.sigmoid(z_x + z_h)
    return (1 - z) * th.tanh(n_x + th.sigmoid(r_x + r_h) * n_h) + z * h


def cell(network: Gated, layer: int, x: th.Tensor, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
    if isinstance(network, GRU):
        return (gru_cell(network, layer, x, *parts),)
    h, c = parts
    if isinstance(network, LSTM):
        inputs, hiddens, *biases = network.lstm.all_weights[layer]
        gates = x @ inputs.T + h @ hiddens.T + sum(biases)
    else:
        of_layer: Any = network.layers[layer]  # type: ignore[index]
        gates = normalised(of_layer.input_norm, x @ of_layer.input.weight.T)
        gates = gates + normalised(of_layer.hidden_norm, h @ of_layer.hidden.weight.T)
    i, f, g, o = gates.chunk(4, -1)
    c = th.sigmoid(f) * c + th.sigmoid(i) * th.tanh(g)
    shown = c if isinstance(network, LSTM) else normalised(of_layer.cell_norm, c)
    return th.sigmoid(o) * th.tanh(shown), c


def recurrent_step(network: Recurrent, x: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """Output and recurrent state after one step."""
    if isinstance(network, Identity):
        return x, states
    assert isinstance(network, Gated)
    parts = states.chunk(network.n_parts * network.n_layers, -1)
    after = []
    for layer in range(network.n_layers):
        after.append(cell(network, layer, x, *parts[layer :: network.n_layers]))
        x = after[-1][0]
    return x, th.cat([part for of_layers in zip(*after, strict=True) for part in of_layers], -1)


def dense(layers: nn.Module, x: th.Tensor) -> th.Tensor:
    """Linear layers and their activations, Tanh, ReLU or ELU."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            x = module.weight @ x if module.bias is None else module.weight @ x + module.bias
        elif isinstance(module, nn.Tanh):
            x = x.tanh()
        elif isinstance(module, nn.ReLU):
            x = x.clamp(min=0)
        elif isinstance(module, nn.ELU):
            x = th.where(x > 0, x, x.expm1())
    return x


class Moment(NamedTuple):
    """What a policy's networks make of one observation."""

    stats: th.Tensor
    latent: th.Tensor
    """input of the critic's head"""
    value: th.Tensor
    after: th.Tensor
    """recurrent state after the step, [W]"""


def moment(policy: ACERPolicy, observation: th.Tensor, state: th.Tensor) -> Moment:
    """Of a policy for vectors."""
    pi_state, q_state = state[: policy.pi_recurrent.state_size], state[policy.pi_recurrent.state_size :]
    x, pi_state = recurrent_step(policy.pi_recurrent, observation, pi_state)
    if policy.q_recurrent is policy.pi_recurrent:
        y = x
    else:
        y, q_state = recurrent_step(policy.q_recurrent, observation, q_state)
    outputs = dense(policy.pi_head, dense(policy.pi_net, x))
    stats = statistics(policy.action_space, outputs, policy.log_std)
    latent = dense(policy.q_net, y)
    if isinstance(policy.q_head, QHead):
        value = (stats * q_of_every_action(policy.q_head, latent)).sum().detach()
    else:
        value = dense(policy.q_head.latent, latent)[0]
    return Moment(stats, latent, value, th.cat((pi_state, q_state)))


def q_of_every_action(head: QHead, latent: th.Tensor) -> th.Tensor:
    outputs = dense(head.q, latent)
    if isinstance(head, DuelingQHead):
        value, *advantages = outputs
        mean = sum(advantages) / len(advantages)
        return th.stack([value + advantage - mean for advantage in advantages])
    return outputs


def raw_advantage(policy: ACERPolicy, latent: th.Tensor, action: th.Tensor) -> th.Tensor:
    """A(x, a) of a dueling head."""
    head = policy.q_head
    assert not isinstance(head, QHead)
    hidden = dense(head.latent, latent)[1:] + dense(head.action, encoded(policy.action_space, action))
    return dense(head.advantage, hidden.clamp(min=0))[0]


# One update


class State(NamedTuple):
    """One step of one sequence, and all that an update makes of it."""

    stats: th.Tensor
    value: th.Tensor
    next_value: float
    """V of the true successor; NaN where the step terminated its episode"""
    q_value: th.Tensor
    candidates: list[th.Tensor]
    weights: list[float]
    candidate_values: list[float]
    average_stats: th.Tensor
    ratio: float
    candidate_ratios: list[float]


class WrittenOut(NamedTuple):
    """An update, with the names of :class:`sb3_acer.update.Update`."""

    loss: th.Tensor
    states: list[list[State]]
    """[T][B]"""
    q_ret: th.Tensor
    advantage: th.Tensor
    candidate_advantages: th.Tensor
    g: th.Tensor
    k: th.Tensor
    z: th.Tensor

    def of_states(self, name: str) -> th.Tensor:
        """A quantity of all states, ``[T, B, ...]``."""
        return th.stack([th.stack([_tensor(getattr(state, name)) for state in row]) for row in self.states]).detach()


def _tensor(x: th.Tensor | list[th.Tensor] | list[float] | float) -> th.Tensor:
    if isinstance(x, th.Tensor):
        return x
    if isinstance(x, list) and isinstance(x[0], th.Tensor):
        return th.stack([each for each in x if isinstance(each, th.Tensor)])
    return th.tensor(x, dtype=th.float64)


def evaluate_action(
    policy: ACERPolicy, now: Moment, action: th.Tensor, noise: np.ndarray
) -> tuple[th.Tensor, list[th.Tensor], list[float], list[float]]:
    """Q of the action taken; candidates, their weights and their Q. The first half of the noise is theirs."""
    space, stats = policy.action_space, now.stats.detach()
    if isinstance(policy.q_head, QHead):
        q = q_of_every_action(policy.q_head, now.latent)
        every = [th.tensor([a]) for a in range(len(q))]
        return q[int(action)], every, stats.tolist(), q.tolist()
    sampled = [sample(space, stats, th.from_numpy(each)) for each in noise]
    n_samples = len(sampled) // 2
    candidates, others = sampled[:n_samples], sampled[n_samples:]
    mean = th.stack([raw_advantage(policy, now.latent, other) for other in others]).mean()

    def q_of(a: th.Tensor) -> th.Tensor:
        return now.value + raw_advantage(policy, now.latent, a) - mean

    weights = [1 / n_samples] * n_samples
    return q_of(action), candidates, weights, [q_of(candidate).item() for candidate in candidates]


def sequence_of_states(
    policy: ACERPolicy, average_policy: ACERPolicy, batch: SequenceBatch, b: int, noise: np.ndarray
) -> list[State]:
    """The networks' part of an update, for one sequence, one step after the other."""
    space, found = policy.action_space, []
    state = average_state = batch.states[b]
    n_steps, n_sequences = batch.rewards.shape
    observations, finals = batch.observations, batch.final_observations
    assert isinstance(observations, th.Tensor)
    assert isinstance(finals, th.Tensor)
    for t in range(n_steps):
        now = moment(policy, observations[t, b], state)
        average = moment(average_policy, observations[t, b], average_state)
        action, behaviour = batch.actions[t, b], batch.behaviour[t, b]
        q_value, candidates, weights, candidate_values = evaluate_action(policy, now, action, noise[t, b])
        next_value = math.nan
        if batch.truncated[t, b]:
            (place,) = (batch.final_steps == t * n_sequences + b).nonzero().flatten().tolist()
            next_value = moment(policy, finals[place], now.after).value.item()
        elif not batch.terminated[t, b]:
            next_value = moment(policy, observations[t + 1, b], now.after).value.item()
        stats = now.stats.detach()
        found.append(
            State(
                now.stats,
                now.value,
                next_value,
                q_value,
                candidates,
                weights,
                candidate_values,
                average.stats.detach(),
                ratio(space, stats, behaviour, action),
                [ratio(space, stats, behaviour, candidate) for candidate in candidates],
            )
        )
        ended = bool(batch.terminated[t, b] or batch.truncated[t, b])
        state, average_state = (th.zeros_like(x) if ended else x for x in (now.after, average.after))
    return found


def gain(
    space: Space, stats: th.Tensor, state: State, action: th.Tensor, advantage: float, settings: Settings
) -> th.Tensor:
    """Truncated gain, bias correction and entropy bonus of one state, as a function of its statistics."""
    c = settings.correction_term
    total = min(c, state.ratio) * advantage * log_prob(space, stats, action)
    candidates = zip(state.candidates, state.weights, state.candidate_ratios, state.candidate_values, strict=True)
    for candidate, weight, of_candidate, q_value in candidates:
        if of_candidate > c:
            factor = weight * (1 - c / of_candidate) * (q_value - state.value.item())
            total = total + factor * log_prob(space, stats, candidate)
    return total + settings.ent_coef * entropy(space, stats)


def update(
    policy: ACERPolicy,
    average_policy: ACERPolicy,
    batch: SequenceBatch,
    settings: Settings,
    noise: np.ndarray,
    learn_std: bool = True,
) -> WrittenOut:
    """
    The loss whose gradient an update follows, with all that it consists of.

    :param noise: the random numbers that actions are sampled with, ``[T, B, 2 K, D]``
    :param learn_std: whether standard deviations of continuous actions are learnt
    """
    space, enumerable = policy.action_space, isinstance(policy.action_space, spaces.Discrete)
    n_steps, n_sequences = batch.rewards.shape
    n_components = 1 if enumerable else batch.actions.shape[-1]
    loss = th.zeros((), dtype=th.float64)
    columns: list[list[tuple[State, float, float, list[float], th.Tensor, th.Tensor, th.Tensor]]] = []
    for b in range(n_sequences):
        column = []
        states = sequence_of_states(policy, average_policy, batch, b, noise)

        def targets(traced: bool, states: list[State] = states, b: int = b) -> list[float]:
            steps = [
                Step(
                    batch.rewards[t, b].item(),
                    bool(batch.terminated[t, b]),
                    bool(batch.truncated[t, b]),
                    state.value.item(),
                    state.q_value.item(),
                    trace(state.ratio, n_components) if traced else 1.0,
                    state.next_value,
                )
                for t, state in enumerate(states)
            ]
            return returns(steps, settings.gamma, states[-1].next_value)

        q_rets, q_opcs = targets(True), targets(False)
        for t, state in enumerate(states):
            q_ret, value = q_rets[t], state.value.item()
            advantage = (q_ret if enumerable else q_opcs[t]) - value
            stats = state.stats.detach().requires_grad_()
            (g,) = th.autograd.grad(gain(space, stats, state, batch.actions[t, b], advantage, settings), stats)
            (k,) = th.autograd.grad(kl(space, state.average_stats, stats), stats)
            if not learn_std:
                for gradient in (g, k):
                    gradient.chunk(2)[1].zero_()
            z = g
            if settings.delta is not None:
                z = th.tensor(nearest_feasible(g.tolist(), k.tolist(), settings.delta), dtype=th.float64)
            of_state = -(z * state.stats).sum() + settings.q_coef * 0.5 * (q_ret - state.q_value) ** 2
            if not enumerable:
                target = value_target(state.ratio, q_ret, state.q_value.item(), value)
                of_state = of_state + settings.q_coef * 0.5 * (target - state.value) ** 2
            loss = loss + batch.weights[t, b] * of_state / (n_steps * n_sequences)
            candidate_advantages = [q_value - value for q_value in state.candidate_values]
            column.append((state, q_ret, advantage, candidate_advantages, g, k, z))
        columns.append(column)

    def quantity(i: int) -> th.Tensor:
        rows = [[th.as_tensor(columns[b][t][i], dtype=th.float64) for b in range(n_sequences)] for t in range(n_steps)]
        return th.stack([th.stack(row) for row in rows])

    by_time = [[columns[b][t][0] for b in range(n_sequences)] for t in range(n_steps)]
    return WrittenOut(loss, by_time, *map(quantity, range(1, 7)))
