"""Laws of the mathematics, in float64 unless said otherwise."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_acer.estimators import (
    correction_factors,
    correction_gain,
    critic_gradient,
    dueling,
    off_policy_returns,
    retrace_traces,
    truncated_factor,
    truncated_gain,
    trust_region,
    value_target,
)
from tests import reference
from tests.helpers import close, normal, uniform
from tests.reference import Step

laws = settings(deadline=None, derandomize=True, database=None, max_examples=200)
seeds = st.integers(0, 2**32 - 1)
truncation_constants = pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 10.0, 1e9])


class Batch(NamedTuple):
    """Sequences of equal length, for the oracle, and what the last step of each bootstraps with."""

    sequences: list[list[Step]]
    gamma: float
    bootstraps: list[float]

    def returns(self, dtype: th.dtype = th.float64) -> th.Tensor:
        def rows(quantity: Callable[[int, int], float]) -> th.Tensor:
            every = [[quantity(t, b) for b in range(len(self.sequences))] for t in range(len(self.sequences[0]))]
            return th.tensor(every, dtype=dtype)

        def next_value(t: int, b: int) -> float:
            sequence = self.sequences[b]
            if sequence[t].truncated:
                return sequence[t].final_value
            return self.bootstraps[b] if t + 1 == len(sequence) else sequence[t + 1].value

        return off_policy_returns(
            rows(lambda t, b: self.sequences[b][t].reward),
            rows(lambda t, b: 0.0 if self.sequences[b][t].terminated else self.gamma),
            rows(next_value),
            rows(lambda t, b: self.sequences[b][t].q_value),
            rows(lambda t, b: self.sequences[b][t].trace),
            rows(lambda t, b: not (self.sequences[b][t].terminated or self.sequences[b][t].truncated)),
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    n_steps, n_sequences = draw(st.integers(1, 40) | st.sampled_from([64, 65, 128, 150])), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(seeds))
    p_terminated, p_truncated = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.1, 0.5]))

    def step() -> Step:
        ends = rng.random(2) < (p_terminated, p_truncated)
        trace = float(rng.choice([0.0, 1.0, rng.random()]))
        reward, value, q_value, final_value = rng.normal(size=4).tolist()
        return Step(reward, bool(ends[0]), bool(ends[1]), value, q_value, trace, final_value)

    sequences = [[step() for _ in range(n_steps)] for _ in range(n_sequences)]
    gamma = draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    return Batch(sequences, gamma, rng.normal(size=n_sequences).tolist())


# Returns


@laws
@given(batches())
def test_the_recursion_equals_the_scalar_oracle(batch: Batch) -> None:
    each = zip(batch.sequences, batch.bootstraps, strict=True)
    expected = th.tensor(
        [reference.returns(sequence, batch.gamma, bootstrap) for sequence, bootstrap in each], dtype=th.float64
    )
    close(batch.returns(), expected.T)
    th.testing.assert_close(batch.returns(th.float32), expected.T.float(), rtol=1e-4, atol=1e-4)


@laws
@given(batches())
def test_each_return_is_the_sum_of_traced_errors_that_defines_retrace(batch: Batch) -> None:
    returns = batch.returns()
    for b, (sequence, bootstrap) in enumerate(zip(batch.sequences, batch.bootstraps, strict=True)):
        for t in range(len(sequence)):
            expected = reference.return_by_definition(sequence[t:], batch.gamma, bootstrap)
            assert returns[t, b].item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("n_steps", [1, 2, 3, 8, 21])
def test_zero_traces_give_one_step_targets(n_steps: int) -> None:
    rng = np.random.default_rng(n_steps)
    rewards, next_values, q_values = (normal(rng, n_steps, 3) for _ in range(3))
    discounts = 0.9 * (uniform(rng, n_steps, 3) < 0.8)
    returns = off_policy_returns(
        rewards, discounts, next_values, q_values, th.zeros_like(rewards), th.ones_like(rewards)
    )
    close(returns, rewards + discounts * next_values, 1e-12)


@pytest.mark.parametrize("n_steps", [1, 2, 7, 40])
def test_unit_traces_give_discounted_sums_of_rewards_where_q_equals_v(n_steps: int) -> None:
    rng = np.random.default_rng(n_steps)
    rewards, values = normal(rng, n_steps, 3), normal(rng, n_steps + 1, 3)
    ones, gamma = th.ones_like(rewards), 0.9
    returns = off_policy_returns(rewards, gamma * ones, values[1:], values[:-1], ones, ones)
    powers = gamma ** th.arange(n_steps + 1, dtype=th.float64)
    close(returns[0], (powers.unsqueeze(-1) * th.cat((rewards, values[-1:]))).sum(0))


@laws
@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=5), seeds)
def test_concatenated_episodes_equal_each_alone(episodes: list[tuple[int, bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    alone, joined = [], []
    for length, terminates in episodes:
        discounts, continues = th.full((length, 2), 0.95, dtype=th.float64), th.ones(length, 2)
        if terminates:
            discounts[-1] = 0
        rewards, next_values, q_values = (normal(rng, length, 2) for _ in range(3))
        terms = (rewards, discounts, next_values, q_values, uniform(rng, length, 2))
        alone.append(off_policy_returns(*terms, continues))
        boundary = continues.clone()
        boundary[-1] = 0
        joined.append((*terms, boundary))
    together = off_policy_returns(*(th.cat(quantity) for quantity in zip(*joined, strict=True)))
    close(together, th.cat(alone))


class Process(NamedTuple):
    """A Markov decision process with the values of a policy."""

    rewards: th.Tensor
    """[S, A]"""
    transitions: th.Tensor
    """[S, A, S]"""
    terminates: th.Tensor
    """whether the action ends the episode, [S, A]"""
    policy: th.Tensor
    """[S, A]"""
    v: th.Tensor
    """[S]"""
    q: th.Tensor
    """[S, A]"""


def random_process(
    rng: np.random.Generator, n_states: int, n_actions: int, deterministic: bool, gamma: float
) -> Process:
    rewards = normal(rng, n_states, n_actions)
    transitions = th.from_numpy(rng.dirichlet(np.ones(n_states), (n_states, n_actions)))
    if deterministic:
        transitions = th.nn.functional.one_hot(transitions.argmax(-1), n_states).double()
    terminates = uniform(rng, n_states, n_actions) < 0.2
    policy = th.from_numpy(rng.dirichlet(np.ones(n_actions), n_states))
    discounted = gamma * transitions * ~terminates.unsqueeze(-1)
    matrix = th.eye(n_states) - (policy.unsqueeze(-1) * discounted).sum(1)
    v = th.linalg.solve(matrix, (policy * rewards).sum(1))
    return Process(rewards, transitions, terminates, policy, v, rewards + discounted @ v)


@pytest.mark.parametrize("seed", range(10))
def test_the_true_q_and_v_are_a_fixed_point_for_any_traces(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_states, n_steps, n_sequences, gamma = 6, 30, 8, 0.97
    process = random_process(rng, n_states, 3, True, gamma)
    states, actions, truncated = [], [], uniform(rng, n_steps, n_sequences) < 0.1
    state = th.from_numpy(rng.integers(n_states, size=n_sequences))
    successors = []
    for t in range(n_steps):
        action = th.from_numpy(rng.integers(3, size=n_sequences))
        successor = process.transitions[state, action].argmax(-1)
        states.append(state)
        actions.append(action)
        successors.append(successor)
        ended = process.terminates[state, action] | truncated[t]
        state = th.where(ended, th.from_numpy(rng.integers(n_states, size=n_sequences)), successor)
    taken = th.stack(states), th.stack(actions)
    terminated, q_values = process.terminates[taken], process.q[taken]
    assert terminated.any()
    assert (truncated & ~terminated).any()
    continues = ~(terminated | truncated)
    terms = (process.rewards[taken], gamma * (~terminated).double(), process.v[th.stack(successors)], q_values)
    for traces in (uniform(rng, n_steps, n_sequences), th.ones_like(q_values), 3 * uniform(rng, n_steps, n_sequences)):
        close(off_policy_returns(*terms, traces, continues), q_values, 1e-9)


def expected_targets(process: Process, mu: th.Tensor, q: th.Tensor, traces: th.Tensor, gamma: float) -> th.Tensor:
    """E_mu[G_0 | x_0, a_0], [S, A], over all sequences of three steps; Q, the trace coefficients and mu are [S, A]."""
    n_states, n_actions = q.shape
    axes = [range(n_states), range(n_actions)] * 3 + [range(n_states)]
    every = th.tensor(list(itertools.product(*axes))).T  # x_0, a_0, x_1, a_1, x_2, a_2, x_3
    states, actions, successors = every[0:5:2], every[1:6:2], every[2::2]
    probability = process.transitions[states, actions, successors].prod(0) * mu[states[1:], actions[1:]].prod(0)
    terminated = process.terminates[states, actions]
    v = (process.policy * q).sum(-1)
    returns = off_policy_returns(
        process.rewards[states, actions],
        gamma * (~terminated).double(),
        v[successors],
        q[states, actions],
        traces[states, actions],
        ~terminated,
    )
    starts = states[0] * n_actions + actions[0]
    sums = th.zeros(n_states * n_actions, dtype=th.float64).index_add(0, starts, probability * returns[0])
    return sums.view(n_states, n_actions)


@pytest.mark.parametrize("seed", range(10))
def test_the_true_q_and_v_are_a_fixed_point_in_expectation_for_any_behaviour_policy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    process = random_process(rng, 3, 2, False, 0.9)
    mu = th.from_numpy(rng.dirichlet(np.ones(2), 3))
    close(expected_targets(process, mu, process.q, uniform(rng, 3, 2), 0.9), process.q)


@pytest.mark.parametrize("seed", range(10))
def test_retrace_is_a_contraction_by_the_discount_factor(seed: int) -> None:
    rng = np.random.default_rng(seed)
    process = random_process(rng, 3, 2, False, 0.9)
    mu = th.from_numpy(rng.dirichlet(np.full(2, 0.3), 3))
    q = process.q + 10 * normal(rng, 3, 2)
    targets = expected_targets(process, mu, q, retrace_traces(process.policy / mu), 0.9)
    assert (targets - process.q).abs().max() <= 0.9 * (q - process.q).abs().max()


@laws
@given(seeds, st.integers(1, 6))
def test_trace_coefficients_equal_the_scalar_oracle(seed: int, n_components: int) -> None:
    ratio = (3 * normal(np.random.default_rng(seed), 4, 3)).exp()
    ratio[0, 0], ratio[1, 1], ratio[2, 2] = 0, 1, 1e30
    expected = [[reference.trace(x, n_components) for x in row] for row in ratio.tolist()]
    close(retrace_traces(ratio, n_components), th.tensor(expected, dtype=th.float64), 1e-14)
    close(retrace_traces(ratio), ratio.clamp(max=1), 1e-14)
    each = np.random.default_rng(seed).integers(1, 7, (4, 3))  # a number of components for each state
    expected = [
        [reference.trace(x, d) for x, d in zip(*row, strict=True)] for row in zip(ratio.tolist(), each, strict=True)
    ]
    close(retrace_traces(ratio, th.from_numpy(each)), th.tensor(expected, dtype=th.float64), 1e-14)


@pytest.mark.parametrize("n_components", [1, 2, 5])
def test_traces_of_independent_components_are_their_geometric_mean(n_components: int) -> None:
    each = uniform(np.random.default_rng(0), 20, n_components)
    traces = retrace_traces(each.prod(-1), n_components)
    close(traces, each.log().mean(-1).exp(), 1e-14)
    assert (traces <= 1).all()
    assert (retrace_traces(1 / each.prod(-1), n_components) == 1).all()


# Critic


@laws
@given(seeds)
def test_the_value_target_equals_the_scalar_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratio, q_ret, q_values, values = (3 * normal(rng, 4, 3)).exp(), *(normal(rng, 4, 3) for _ in range(3))
    ratio[0, 0], ratio[1, 1] = 0, 1
    found = value_target(ratio, q_ret, q_values, values)
    for t, b in itertools.product(range(4), range(3)):
        state = (quantity[t, b].item() for quantity in (ratio, q_ret, q_values, values))
        assert found[t, b].item() == pytest.approx(reference.value_target(*state), rel=1e-12, abs=1e-12)


def test_the_value_target_is_v_on_average_on_policy_and_exactly_where_q_is_right() -> None:
    rng = np.random.default_rng(0)
    pi, q = th.from_numpy(rng.dirichlet(np.ones(4), 50)), normal(rng, 50, 4)
    v = (pi * q).sum(-1, keepdim=True)
    estimates, values = normal(rng, 50, 4), normal(rng, 50, 1)
    centred = estimates - (pi * estimates).sum(-1, keepdim=True) + values  # as a dueling network's: E_pi[Q~] = V
    targets = value_target(th.ones_like(pi), q, centred, values.expand_as(q))
    close((pi * targets).sum(-1, keepdim=True), v)
    ratio = (3 * normal(rng, 50, 4)).exp()
    close(value_target(ratio, q, q, v.expand_as(q)), v.expand_as(q))


def test_the_gradient_of_the_critic_is_that_of_half_the_squared_error() -> None:
    rng = np.random.default_rng(0)
    predictions, targets = normal(rng, 4, 3).requires_grad_(), normal(rng, 4, 3)
    (expected,) = th.autograd.grad((0.5 * (targets - predictions).square()).sum(), predictions)
    close(critic_gradient(predictions.detach(), targets), expected, 1e-14)


# Gains


@laws
@given(seeds, st.sampled_from([0.0, 0.5, 1.0, 10.0, 1e9]))
def test_gains_equal_the_scalar_oracle(seed: int, c: float) -> None:
    rng = np.random.default_rng(seed)
    log_probs, advantages = -uniform(rng, 3, 2, 5), normal(rng, 3, 2, 5)
    weights, ratios = uniform(rng, 3, 2, 5), (3 * normal(rng, 3, 2, 5)).exp()
    ratios[uniform(rng, 3, 2, 5) < 0.2] = 0 if c > 0 else 1  # at c = 0 the limit depends on how both vanish
    truncated = truncated_gain(log_probs[..., 0], ratios[..., 0], advantages[..., 0], c)
    correction = correction_gain(log_probs, weights, ratios, advantages, c)
    for t, b in itertools.product(range(3), range(2)):
        state = log_probs[t, b].tolist(), weights[t, b].tolist(), ratios[t, b].tolist(), advantages[t, b].tolist()
        expected = reference.truncated_gain(state[0][0], state[2][0], state[3][0], c)
        assert truncated[t, b].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert correction[t, b].item() == pytest.approx(reference.correction_gain(*state, c), rel=1e-12, abs=1e-12)


def test_the_correction_of_an_impossible_action_is_zero_without_truncation_too() -> None:
    """At c = 0 its factor max(0, (rho - c) / rho) has no value at rho = 0."""
    factors = correction_factors(th.tensor([0.0, 1.0]), th.tensor([0.0, 0.5]), th.ones(2), 0.0)
    assert factors.tolist() == [0, 1]


@truncation_constants
def test_gradients_of_gains_with_respect_to_log_probabilities_are_their_factors(c: float) -> None:
    rng = np.random.default_rng(0)
    log_probs = (-uniform(rng, 4, 3, 5)).requires_grad_()
    weights, ratios, advantages = uniform(rng, 4, 3, 5), (3 * normal(rng, 4, 3, 5)).exp(), normal(rng, 4, 3, 5)
    (gradient,) = th.autograd.grad(correction_gain(log_probs, weights, ratios, advantages, c).sum(), log_probs)
    close(gradient, correction_factors(weights, ratios, advantages, c))
    log_prob, ratio, advantage = log_probs[..., 0], ratios[..., 0], advantages[..., 0]
    (gradient,) = th.autograd.grad(truncated_gain(log_prob, ratio, advantage, c).sum(), log_prob)
    close(gradient, truncated_factor(ratio, advantage, c))


def expected_gradients(
    logits: th.Tensor, mu: th.Tensor, advantages: th.Tensor, c: float, candidates: Sequence[th.Tensor]
) -> th.Tensor:
    """
    E_{a ~ mu} of the gradient of truncation plus correction with respect to the logits, by enumeration.

    :param logits: of pi, ``[N, A]``
    :param mu: ``[N, A]``
    :param advantages: of each action, ``[N, A]``
    :param candidates: weights of all actions as candidates, ``[N, A]``, of which the mean over pi is taken, ``[A]``
    """
    log_pi = logits.log_softmax(-1)
    pi = log_pi.detach().exp()
    ratios = pi / mu
    total = th.zeros_like(logits)
    for a, weights in enumerate(candidates):
        truncated = truncated_gain(log_pi[:, a], ratios[:, a], advantages[:, a], c)
        correction = correction_gain(log_pi, weights, ratios, advantages, c)
        for probability, gain in ((mu[:, a], truncated), (pi[:, a], correction)):
            (gradient,) = th.autograd.grad(gain.sum(), logits, retain_graph=True)
            total += probability.unsqueeze(-1) * gradient
    return total


@truncation_constants
@pytest.mark.parametrize("candidates", ["all", "sampled"])
def test_truncation_plus_correction_is_the_policy_gradient(c: float, candidates: str) -> None:
    rng = np.random.default_rng(0)
    n_states, n_actions = 50, 4
    logits = (3 * normal(rng, n_states, n_actions)).requires_grad_()
    mu = (3 * normal(rng, n_states, n_actions)).softmax(-1)
    mu[:10, 0] = 0  # actions that mu never takes: their ratios are infinite, and their whole gradient is correction
    mu /= mu.sum(-1, keepdim=True)
    advantages = normal(rng, n_states, n_actions)
    log_pi = logits.log_softmax(-1)
    pi = log_pi.detach().exp()
    assert (pi / mu).min() < 0.01
    assert (pi / mu)[10:].max() > 100
    (expected,) = th.autograd.grad((pi * advantages * log_pi).sum(), logits, retain_graph=True)
    one_each = th.eye(n_actions, dtype=th.float64).unsqueeze(1).expand(-1, n_states, -1)
    weights = [pi] * n_actions if candidates == "all" else list(one_each)
    close(expected_gradients(logits, mu, advantages, c, weights), expected)


# Trust region


class Projection(NamedTuple):
    """The projection's arguments for some states, of P statistics each."""

    g: th.Tensor
    k: th.Tensor
    delta: float

    @property
    def rounding(self) -> th.Tensor:
        """An upper bound on the rounding error of k.g."""
        products: th.Tensor = self.k.double().norm(dim=-1) * self.g.double().norm(dim=-1)
        return 20 * th.finfo(self.g.dtype).eps * (products + self.delta)


@st.composite
def projections(draw: st.DrawFn) -> Projection:
    rng = np.random.default_rng(draw(seeds))
    n_stats = draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([th.float32, th.float64]))
    scales = st.sampled_from([1e-3, 1.0, 1e3])
    g, k = draw(scales) * normal(rng, 12, n_stats), draw(scales) * normal(rng, 12, n_stats)
    k[0] = 0
    g[1] = 0
    g[2] = -k[2]
    g[3] = k[3]
    return Projection(g.to(dtype), k.to(dtype), draw(st.sampled_from([0.0, 1e-3, 1.0, 100.0])))


def dot(a: th.Tensor, b: th.Tensor) -> th.Tensor:
    products = a.double() * b.double()
    return products.sum(-1)


@laws
@given(projections())
def test_the_projection_is_feasible(case: Projection) -> None:
    z = trust_region(*case)
    assert (dot(case.k, z) <= case.delta + case.rounding).all()


@laws
@given(projections())
def test_the_projection_is_the_identity_where_feasible(case: Projection) -> None:
    z = trust_region(*case)
    feasible = dot(case.k, case.g) <= case.delta - case.rounding
    feasible[0] = True  # k = 0
    assert th.equal(z[feasible], case.g[feasible])
    moved = dot(case.k, case.g) > case.delta + case.rounding
    assert (dot(case.k, z) - case.delta)[moved].abs().le(case.rounding[moved]).all()


@laws
@given(projections())
def test_the_projection_equals_the_scalar_oracle(case: Projection) -> None:
    z = trust_region(*case)
    expected = [
        reference.nearest_feasible(*state, case.delta) for state in zip(case.g.tolist(), case.k.tolist(), strict=True)
    ]
    distance = (z.double() - th.tensor(expected, dtype=th.float64)).norm(dim=-1)
    assert (distance <= 20 * th.finfo(case.g.dtype).eps * case.g.double().norm(dim=-1)).all()


@laws
@given(projections(), seeds)
def test_no_feasible_point_is_nearer_than_the_projection(case: Projection, seed: int) -> None:
    g, k = case.g.double(), case.k.double()
    z = trust_region(g, k, case.delta)
    rng = np.random.default_rng(seed)
    scales = th.from_numpy(10.0 ** rng.uniform(-6, 1, (500, 1, 1))) * g.norm(dim=-1, keepdim=True)
    around = th.from_numpy(rng.standard_normal((500, *g.shape)))
    steps = scales * around / around.norm(dim=-1, keepdim=True)
    points = z + steps * -th.where(dot(k, steps) > 0, 1, -1).unsqueeze(-1)  # away from the bound: all feasible
    points = th.cat((points, z + steps))
    others = (points - g).norm(dim=-1).where(dot(k, points) <= case.delta, th.inf)
    nearest = others.min(0).values
    assert nearest.isfinite().all()
    assert ((z - g).norm(dim=-1) <= nearest * (1 + 1e-12) + 1e-300).all()


def test_the_projection_with_zero_k_and_zero_delta_in_single_precision() -> None:
    g = th.tensor([[1.0, -2.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    k = th.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, 0.0], [-1.0, 5.0]])
    expected = th.tensor([[1.0, -2.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert th.equal(trust_region(g, k, 0), expected)


# Stochastic dueling networks


@pytest.mark.parametrize("n_samples", [1, 2, 3])
def test_the_dueling_estimate_has_the_mean_v_under_the_policy(n_samples: int) -> None:
    rng = np.random.default_rng(0)
    n_actions = 3
    pi, table, v = rng.dirichlet(np.ones(n_actions)), 10 * normal(rng, n_actions), 2.5
    every = th.tensor(list(itertools.product(range(n_actions), repeat=1 + n_samples)))
    probability = th.from_numpy(pi)[every].prod(-1)
    q = dueling(th.full((len(every),), v, dtype=th.float64), table[every[:, 0]], table[every[:, 1:]])
    close((probability * q).sum(), th.tensor(v, dtype=th.float64))
    for a in range(n_actions):  # and of one action, V + A minus the policy's mean of A
        taken = every[:, 0] == a
        mean = (probability * q)[taken].sum() / probability[taken].sum()
        close(mean, v + table[a] - (th.from_numpy(pi) * table).sum())


def test_the_dueling_estimate_has_the_mean_v_for_continuous_actions() -> None:
    rng = np.random.default_rng(0)
    n, v = 200_000, 2.5
    actions = normal(rng, n, 6)
    advantages = 3 * actions.sin() + actions.square()
    q = dueling(th.full((n,), v, dtype=th.float64), advantages[:, 0], advantages[:, 1:])
    standard_error = q.std() / n**0.5
    assert standard_error < 0.02
    assert (q.mean() - v).abs() < 4 * standard_error


def test_the_dueling_estimate_equals_the_scalar_oracle_for_one_action_and_for_many() -> None:
    rng = np.random.default_rng(0)
    values, advantages, sampled = normal(rng, 4, 3), normal(rng, 4, 3, 5), normal(rng, 4, 3, 2)
    many = dueling(values, advantages, sampled)
    one = dueling(values, advantages[..., 0], sampled)
    for t, b, action in itertools.product(range(4), range(3), range(5)):
        state = values[t, b].item(), advantages[t, b, action].item(), sampled[t, b].tolist()
        assert many[t, b, action].item() == pytest.approx(reference.dueling(*state), abs=1e-12)
    close(one, many[..., 0])


# Batches

# With the trailing axes of each function's arguments, [T, B] before them.
FUNCTIONS: dict[str, tuple[Callable[..., th.Tensor], list[list[int]]]] = {
    "off_policy_returns": (off_policy_returns, [[]] * 6),
    "truncated_factor": (partial(truncated_factor, c=1.0), [[]] * 2),
    "correction_factors": (partial(correction_factors, c=1.0), [[4]] * 3),
    "truncated_gain": (partial(truncated_gain, c=1.0), [[]] * 3),
    "correction_gain": (partial(correction_gain, c=1.0), [[4]] * 4),
    "trust_region": (partial(trust_region, delta=0.1), [[4]] * 2),
    "retrace_traces": (partial(retrace_traces, d=3), [[]]),
    "value_target": (value_target, [[]] * 4),
    "critic_gradient": (critic_gradient, [[]] * 2),
    "dueling": (dueling, [[], [], [4]]),
    "dueling of many": (dueling, [[], [3], [4]]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [2, 7, 64])
def test_a_batch_of_n_copies_equals_n_times_one(name: str, n: int) -> None:
    function, axes = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    arguments = [2 * uniform(rng, 6, 1, *trailing) for trailing in axes]
    one = function(*arguments)
    copies = function(*(argument.expand(6, n, *argument.shape[2:]).contiguous() for argument in arguments))
    close(copies, one.expand_as(copies), 1e-13)
    close(copies.sum(1), n * one.sum(1), 1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(name: str) -> None:
    function, axes = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    arguments = [2 * uniform(rng, 6, 5, *trailing) for trailing in axes]
    together = function(*arguments)
    for b in range(5):
        close(together[:, b : b + 1], function(*(argument[:, b : b + 1] for argument in arguments)), 1e-13)
