"""Laws of the families, in float64 unless said otherwise; of the categorical ones up to what EPSILON adds."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_acer.distributions import (
    EPSILON,
    MAX_LOG_RATIO,
    MIN_LOG_RATIO,
    Binary,
    Categorical,
    DiagonalGaussian,
    Enumerated,
    Family,
    make_family,
)
from sb3_acer.estimators import correction_factors, retrace_traces, truncated_factor, trust_region
from tests.helpers import close, normal, uniform
from tests.reference import factors, sizes

Space = spaces.Space[Any]
LARGEST = float(np.finfo(np.float32).max)

CATEGORICAL: dict[str, Space] = {
    "Discrete": spaces.Discrete(4),
    "Discrete from 3": spaces.Discrete(5, start=3),
    "Discrete from -2": spaces.Discrete(3, start=-2),
    "MultiDiscrete of equal sizes": spaces.MultiDiscrete([3, 3, 3]),
    "MultiDiscrete of unequal sizes": spaces.MultiDiscrete([2, 5, 3]),
    "MultiDiscrete of two dimensions": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
    "MultiDiscrete with starts": spaces.MultiDiscrete(np.array([3, 2]), start=np.array([10, -1])),
    "MultiBinary": spaces.MultiBinary(3),
}
GAUSSIAN: dict[str, Space] = {
    "Box ()": spaces.Box(-1, 1, ()),
    "Box (1,)": spaces.Box(-1, 1, (1,)),
    "Box (3,)": spaces.Box(-1, 2, (3,)),
    "Box (2, 3)": spaces.Box(-1, 1, (2, 3)),
    "Box of float64": spaces.Box(-0.1, 0.3, (2,), np.float64),
    "Box of int64": spaces.Box(-3, 5, (2,), np.int64),
    "Box of uint8": spaces.Box(0, 255, (2,), np.uint8),
    "Box without bounds": spaces.Box(-np.inf, np.inf, (2,)),
    "Box with half of its bounds": spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
}
SPACES = CATEGORICAL | GAUSSIAN
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
every_categorical = pytest.mark.parametrize("space", CATEGORICAL.values(), ids=CATEGORICAL)
every_gaussian = pytest.mark.parametrize("space", GAUSSIAN.values(), ids=GAUSSIAN)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random_stats(space: Space, rng: np.random.Generator, *shape: int, spread: float = 1.0) -> th.Tensor:
    if isinstance(space, spaces.Box):
        size = math.prod(space.shape)
        return th.cat((spread * normal(rng, *shape, size), (0.5 * spread * normal(rng, *shape, size)).exp()), -1)
    return th.cat([(spread * normal(rng, *shape, n)).softmax(-1) for n in sizes(space)], -1)


def components(space: Space, stats: th.Tensor) -> list[th.distributions.Distribution]:
    """torch's own distribution of each component of an action."""
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2, -1)
        return [th.distributions.Normal(*moments) for moments in zip(mean.unbind(-1), std.unbind(-1), strict=True)]
    return [th.distributions.Categorical(probs) for probs in factors(space, stats)]


def total(quantities: list[th.Tensor]) -> th.Tensor:
    return th.stack(quantities).sum(0)


def outcomes(space: Space, stats: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """
    Actions ``[M, N, D]`` and their weights ``[M, N]``, so that weighted sums are expectations: all actions with their
    probabilities, or all corners mean +- std, with which expectations of polynomials up to degree 3 are exact.
    """
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2, -1)
        corners = th.tensor(list(itertools.product([-1.0, 1.0], repeat=mean.shape[-1])), dtype=stats.dtype)
        return mean + std * corners.unsqueeze(1), th.full((len(corners), len(stats)), 1 / len(corners)).double()
    every = th.tensor(list(itertools.product(*map(range, sizes(space)))))
    each = zip(factors(space, stats), every.unbind(-1), strict=True)
    probability = th.stack([probs[:, outcome] for probs, outcome in each]).prod(0)
    return every.unsqueeze(1).expand(-1, len(stats), -1), probability.T


def log_probabilities(space: Space, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
    """Of each component of the actions, by torch, ``[..., D]``."""
    each = zip(components(space, stats), actions.unbind(-1), strict=True)
    return th.stack([component.log_prob(outcome) for component, outcome in each], -1)


def probabilities(space: Space, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
    """Of each component of the actions, ``[..., D]``; torch's own probabilities are never 0, these can be."""
    if isinstance(space, spaces.Box):
        return log_probabilities(space, stats, actions).exp()
    each = zip(factors(space, stats), actions.unbind(-1), strict=True)
    return th.stack(
        [probs.expand(*outcome.shape, -1).gather(-1, outcome.unsqueeze(-1)).squeeze(-1) for probs, outcome in each], -1
    )


# Statistics, and what follows from them


@every_space
def test_statistics_are_probabilities_or_mean_and_standard_deviation(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    outputs = 3 * normal(rng, 5, family.n_outputs)
    if isinstance(space, spaces.Box):
        log_std = normal(rng, family.n_log_std)
        mean, std = family.statistics(outputs, log_std).chunk(2, -1)
        close(mean, outputs)
        close(std, log_std.exp().expand_as(outputs))
    else:
        assert family.n_log_std == 0
        expected = [th.distributions.Categorical(logits=part).probs for part in factors(space, outputs)]
        close(family.statistics(outputs, None), th.cat(expected, -1))


@every_space
def test_entropy_is_minus_the_expected_log_probability(space: Space, rng: np.random.Generator) -> None:
    family, stats = make_family(space), random_stats(space, rng, 7)
    actions, weights = outcomes(space, stats)
    close(family.entropy(stats), -(weights * family.log_prob(stats, actions)).sum(0))
    expected = total([component.entropy() for component in components(space, stats)])
    tolerance = 1e-12 if isinstance(space, spaces.Box) else EPSILON * family.n_stats
    th.testing.assert_close(family.entropy(stats), expected, rtol=1e-12, atol=tolerance)


@every_space
def test_log_probabilities_are_those_of_torch_distributions(space: Space, rng: np.random.Generator) -> None:
    family, stats = make_family(space), random_stats(space, rng, 7)
    actions, _ = outcomes(space, stats)
    expected = log_probabilities(space, stats, actions).sum(-1)
    difference = family.log_prob(stats, actions) - expected
    if isinstance(space, spaces.Box):
        close(difference, th.zeros_like(difference))
    else:
        assert (difference >= 0).all()
        assert (difference <= EPSILON * (1 / probabilities(space, stats, actions)).sum(-1)).all()


@every_space
def test_kl_is_the_expected_difference_of_log_probabilities(space: Space, rng: np.random.Generator) -> None:
    family, stats, other = make_family(space), random_stats(space, rng, 7), random_stats(space, rng, 7)
    actions, weights = outcomes(space, stats)
    difference = family.log_prob(stats, actions) - family.log_prob(other, actions)
    close(family.kl(stats, other), (weights * difference).sum(0))
    close(family.kl(stats, stats), th.zeros(7, dtype=th.float64), 1e-14)
    pairs = zip(components(space, stats), components(space, other), strict=True)
    expected = total([th.distributions.kl_divergence(*pair) for pair in pairs])
    rounding = 1e-12 if isinstance(space, spaces.Box) else EPSILON * (1 + stats / other).sum(-1)
    assert ((family.kl(stats, other) - expected).abs() <= rounding).all()


@every_space
def test_kl_is_not_negative_and_grows_with_the_distance(space: Space, rng: np.random.Generator) -> None:
    family, stats, other = make_family(space), random_stats(space, rng, 50), random_stats(space, rng, 50)
    divergences = [family.kl(stats, stats + share * (other - stats)) for share in (0.0, 1e-3, 0.1, 0.5, 1.0)]
    for nearer, farther in itertools.pairwise(divergences):
        assert (farther > nearer).all()
    single = family.kl(stats.float(), stats.float() + 1e-4 * (other - stats).float())
    assert (single >= -1e-6).all()


@every_space
def test_ratios_are_exponentials_of_differences_of_log_probabilities(space: Space, rng: np.random.Generator) -> None:
    family, stats, behaviour = make_family(space), random_stats(space, rng, 7), random_stats(space, rng, 7)
    actions, _ = outcomes(space, behaviour)
    ratio, of_behaviour = family.ratio(stats, behaviour, actions), probabilities(space, behaviour, actions)
    expected = (probabilities(space, stats, actions) / of_behaviour).prod(-1)
    share = 1e-12 if isinstance(space, spaces.Box) else EPSILON * (1 / of_behaviour).sum(-1)
    assert ((ratio - expected).abs() <= share * expected).all()
    difference = family.log_prob(stats, actions) - family.log_prob(behaviour, actions)
    if isinstance(space, spaces.Box):
        close(ratio, difference.exp())
    else:
        share = share + EPSILON * (1 / probabilities(space, stats, actions)).sum(-1)
        assert ((ratio - difference.exp()).abs() <= share * ratio).all()


@every_categorical
def test_the_mean_ratio_under_the_behaviour_is_one(space: Space, rng: np.random.Generator) -> None:
    family, stats, behaviour = make_family(space), random_stats(space, rng, 7), random_stats(space, rng, 7)
    actions, weights = outcomes(space, behaviour)
    mean = (weights * family.ratio(stats, behaviour, actions)).sum(0)
    assert ((mean - 1).abs() <= EPSILON * (stats / behaviour).sum(-1)).all()


@pytest.mark.parametrize("dtype", [th.float32, th.float64])
@pytest.mark.parametrize(
    "space", [*CATEGORICAL.values(), spaces.MultiBinary(12), spaces.MultiDiscrete([3] * 9)], ids=str
)
def test_all_quantities_are_finite_for_categorical_policies_with_disjoint_supports(
    space: Space, dtype: th.dtype
) -> None:
    family = make_family(space)
    first = th.cat([th.eye(n, dtype=dtype)[0] for n in sizes(space)])
    last = th.cat([th.eye(n, dtype=dtype)[-1] for n in sizes(space)])
    mixed = th.cat([th.eye(n, dtype=dtype)[-(i % 2)] for i, n in enumerate(sizes(space))])
    choices = [sorted({0, n - 1}) for n in sizes(space)]
    actions = th.tensor(list(itertools.product(*choices)))
    for stats, behaviour in itertools.product((first, last, mixed), repeat=2):
        ratio = family.ratio(stats, behaviour, actions)
        assert ratio.isfinite().all()
        excluded = probabilities(space, stats, actions).prod(-1) == 0
        assert (ratio[excluded] == 0).all()
        assert (ratio[~excluded] > 0.999).all()
        assert family.log_prob(stats, actions).isfinite().all()
        assert family.kl(stats, behaviour).isfinite()
        assert family.entropy(stats).abs() < 1e-4
        weights = th.ones(len(actions), dtype=dtype)
        for gradient in (
            family.kl_gradient(stats, behaviour),
            family.entropy_gradient(stats),
            family.score(stats, actions, weights),
        ):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [th.float32, th.float64])
@every_gaussian
def test_all_quantities_are_finite_for_gaussian_policies_far_apart(space: Space, dtype: th.dtype) -> None:
    family = make_family(space)
    ones = th.ones(family.n_components, dtype=dtype)
    policies = [th.cat((mean * ones, std * ones)) for mean in (-1e6, 0.0, 1e6) for std in (1e-3, 1.0, 1e3)]
    for stats, behaviour in itertools.product(policies, repeat=2):
        actions = th.stack((stats.chunk(2)[0], behaviour.chunk(2)[0]))
        ratio = family.ratio(stats, behaviour, actions)
        assert ratio.isfinite().all()
        assert (ratio <= math.exp(MAX_LOG_RATIO) * (1 + 1e-5)).all()
        assert family.kl(stats, behaviour).isfinite()
        assert family.kl_gradient(stats, behaviour).isfinite().all()
        if not th.equal(stats, behaviour):
            assert family.kl(stats, behaviour) > 0
    nearby, far = policies[0], policies[-1]
    assert family.ratio(nearby, far, nearby.chunk(2)[0]) > 1
    assert family.ratio(far, nearby, far.chunk(2)[0]) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    assert family.ratio(far, nearby, nearby.chunk(2)[0]) == pytest.approx(math.exp(MIN_LOG_RATIO), rel=1e-5)


# Gradients


def gradient(value: th.Tensor, stats: th.Tensor) -> th.Tensor:
    (found,) = th.autograd.grad(value.sum(), stats)
    return found


@every_space
def test_gradients_through_the_statistics_are_those_of_autograd(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    outputs = normal(rng, 7, family.n_outputs).requires_grad_()
    log_std = normal(rng, family.n_log_std).requires_grad_() if family.n_log_std else None
    stats = family.statistics(outputs, log_std)
    of_stats = normal(rng, *stats.shape)
    expected = th.autograd.grad(stats, [outputs, *([] if log_std is None else [log_std])], of_stats)
    of_outputs, of_log_std = family.backward(stats.detach(), of_stats)
    close(of_outputs, expected[0])
    if of_log_std is None:
        assert log_std is None
    else:
        close(of_log_std, expected[1])


@every_space
def test_gradients_of_kl_and_entropy_are_those_of_autograd(space: Space, rng: np.random.Generator) -> None:
    family, average = make_family(space), random_stats(space, rng, 7, 2)
    stats = random_stats(space, rng, 7, 2).requires_grad_()
    close(family.kl_gradient(average, stats.detach()), gradient(family.kl(average, stats), stats))
    close(family.entropy_gradient(stats.detach()), gradient(family.entropy(stats), stats))


def actions_of(space: Space, rng: np.random.Generator, *shape: int) -> th.Tensor:
    if isinstance(space, spaces.Box):
        return 2 * normal(rng, *shape, math.prod(space.shape))
    return th.from_numpy(np.stack([rng.integers(n, size=shape) for n in sizes(space)], -1))


@every_space
def test_gradients_of_gains_are_those_of_autograd(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    stats = random_stats(space, rng, 7, 2).requires_grad_()
    action, weight = actions_of(space, rng, 7, 2), normal(rng, 7, 2)
    candidates, weights = actions_of(space, rng, 7, 2, 6), normal(rng, 7, 2, 6)
    if family.enumerable:
        candidates = th.arange(family.n_stats).unsqueeze(-1).expand(7, 2, -1, -1)
        weights = normal(rng, 7, 2, family.n_stats)
    of_candidates = (weights * family.log_prob(stats.unsqueeze(-2), candidates)).sum(-1)
    close(family.score(stats.detach(), candidates, weights), gradient(of_candidates, stats))
    gain = weight * family.log_prob(stats, action) + (weights * family.log_prob(stats.unsqueeze(-2), candidates)).sum(
        -1
    )
    found = family.gain_gradient(stats.detach(), action, weight, candidates, weights)
    close(found, gradient(gain, stats))


seeds = st.integers(0, 2**32 - 1)


class Arguments(NamedTuple):
    """What the methods of a family take, for random states."""

    family: Family
    stats: th.Tensor
    other: th.Tensor
    actions: th.Tensor
    weight: th.Tensor
    candidates: th.Tensor
    weights: th.Tensor


def random_arguments(space: Space, seed: int, spread: float, learn_log_std: bool = True) -> Arguments:
    rng, family = np.random.default_rng(seed), make_family(space, learn_log_std)
    stats, other = (random_stats(space, rng, 4, 2, spread=spread) for _ in range(2))
    candidates = actions_of(space, rng, 4, 2, 3)
    if family.enumerable:
        candidates = th.arange(family.n_stats).unsqueeze(-1).expand(4, 2, -1, -1)
    weights = normal(rng, 4, 2, candidates.shape[-2])
    return Arguments(family, stats, other, actions_of(space, rng, 4, 2), normal(rng, 4, 2), candidates, weights)


def by_closed_form_and_by_default(given: Arguments) -> dict[str, tuple[th.Tensor, th.Tensor]]:
    """Each quantity as the family's own method computes it, and as the base class does from its abstract methods."""
    family, stats, other, actions, weight, candidates, weights = given
    gain = stats, actions, weight, candidates, weights
    ratios = (family.ratios(*given[1:4], candidates), Family.ratios(family, *given[1:4], candidates))
    return {
        "ratio": (family.ratio(stats, other, actions), Family.ratio(family, stats, other, actions)),
        "ratios of the actions": (ratios[0][0], ratios[1][0]),
        "ratios of the candidates": (ratios[0][1], ratios[1][1]),
        "kl_gradient": (family.kl_gradient(other, stats), Family.kl_gradient(family, other, stats)),
        "entropy_gradient": (family.entropy_gradient(stats), Family.entropy_gradient(family, stats)),
        "score": (family.score(stats, candidates, weights), Family.score(family, stats, candidates, weights)),
        "gain_gradient": (family.gain_gradient(*gain), Family.gain_gradient(family, *gain)),
    }


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(st.sampled_from(sorted(SPACES)), seeds, st.sampled_from([0.1, 1.0, 3.0]))
def test_closed_forms_equal_the_defaults_of_the_base_class(name: str, seed: int, spread: float) -> None:
    quantities = by_closed_form_and_by_default(random_arguments(SPACES[name], seed, spread))
    for quantity, (ours, default) in quantities.items():
        assert ours.shape == default.shape, quantity
        np.testing.assert_allclose(ours, default, rtol=1e-9, atol=1e-9, err_msg=quantity)


@settings(deadline=None, derandomize=True, database=None, max_examples=30)
@given(st.sampled_from(sorted(GAUSSIAN)), seeds)
def test_a_fixed_standard_deviation_has_gradient_zero_and_leaves_all_else_as_it_is(name: str, seed: int) -> None:
    learnt, fixed = (random_arguments(GAUSSIAN[name], seed, 1.0, learn) for learn in (True, False))
    of_fixed = by_closed_form_and_by_default(fixed)
    for quantity, (ours, _) in by_closed_form_and_by_default(learnt).items():
        same = of_fixed[quantity][0]
        if "gradient" in quantity or quantity == "score":
            ours, same, std = (*ours.chunk(2, -1)[:1], *same.chunk(2, -1))
            assert (std == 0).all(), quantity
        assert th.equal(ours, same), quantity


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.sampled_from(sorted(SPACES)), seeds)
def test_defaults_differentiate_where_gradients_are_switched_off(name: str, seed: int) -> None:
    given = random_arguments(SPACES[name], seed, 1.0)
    with th.no_grad():
        quantities = by_closed_form_and_by_default(given)
    assert not any(each.requires_grad for pair in quantities.values() for each in pair)
    assert not given.stats.requires_grad
    close(quantities["kl_gradient"][1], given.family.kl_gradient(given.other, given.stats))


def test_multidiscrete_with_one_factor_equals_discrete(rng: np.random.Generator) -> None:
    space = spaces.Discrete(4)
    one, many = make_family(space), make_family(spaces.MultiDiscrete([4]))
    assert isinstance(one, Enumerated)
    assert type(many) is Categorical
    stats, other, actions = random_stats(space, rng, 7), random_stats(space, rng, 7), actions_of(space, rng, 7)
    candidates, weight, weights = actions_of(space, rng, 7, 4), normal(rng, 7), normal(rng, 7, 4)
    candidates[:] = th.arange(4).unsqueeze(-1)
    noise = uniform(rng, 7, 1)
    calls: list[Callable[[Family], Any]] = [
        lambda family: family.statistics(3 * stats, None),
        lambda family: family.backward(stats, other)[0],
        lambda family: family.log_prob(stats, actions),
        lambda family: family.ratio(stats, other, actions),
        lambda family: family.entropy(stats),
        lambda family: family.kl(stats, other),
        lambda family: family.kl_gradient(stats, other),
        lambda family: family.entropy_gradient(stats),
        lambda family: family.score(stats, candidates, weights),
        lambda family: family.sample(stats, noise),
        lambda family: th.from_numpy(family.act(stats.numpy(), noise.numpy())),
        lambda family: family.mode(stats),
        lambda family: family.encode(actions),
        lambda family: family.ratios(stats, other, actions, candidates)[0],
        lambda family: family.ratios(stats, other, actions, candidates)[1],
        lambda family: family.gain_gradient(stats, actions, weight, candidates, weights),
        lambda family: th.from_numpy(family.to_env(actions.numpy()).reshape(-1)),
    ]
    for call in calls:
        close(call(one), call(many), 1e-13)
    names = ("n_stats", "n_outputs", "n_log_std", "n_components", "n_features", "trace_root")
    assert [getattr(one, name) for name in names] == [getattr(many, name) for name in names]


@every_space
def test_leading_axes_broadcast(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    stats, behaviour = random_stats(space, rng, 3, 2), random_stats(space, rng, 3, 2)
    actions, noise = actions_of(space, rng, 3, 2, 4), th.from_numpy(family.noise(rng, 3, 2, 4))
    log_probs = family.log_prob(stats.unsqueeze(-2), actions)
    ratios = family.ratio(stats.unsqueeze(-2), behaviour.unsqueeze(-2), actions)
    samples = family.sample(stats.unsqueeze(-2), noise)
    first, others = family.ratios(stats, behaviour, actions[:, :, 0], actions)
    for t, b in itertools.product(range(3), range(2)):
        for i in range(4):
            close(log_probs[t, b, i], family.log_prob(stats[t, b], actions[t, b, i]))
            close(ratios[t, b, i], family.ratio(stats[t, b], behaviour[t, b], actions[t, b, i]))
            close(samples[t, b, i], family.sample(stats[t, b], noise[t, b, i]))
    close(first, ratios[:, :, 0])
    if not family.enumerable:
        close(others, ratios)


@every_space
def test_what_is_computed_of_a_state_is_the_same_whatever_the_leading_axes(
    space: Space, rng: np.random.Generator
) -> None:
    family = make_family(space)
    stats, other = random_stats(space, rng, 3, 2), random_stats(space, rng, 3, 2)
    outputs, actions = normal(rng, 3, 2, family.n_outputs), actions_of(space, rng, 3, 2)
    log_std = normal(rng, family.n_log_std) if family.n_log_std else None
    cases: list[tuple[Callable[..., th.Tensor], tuple[th.Tensor, ...]]] = [
        (lambda rows: family.statistics(rows, log_std), (outputs,)),
        (family.exact_log_prob, (stats, actions)),
        (family.entropy, (stats,)),
        (family.entropy_gradient, (stats,)),
        (family.kl, (stats, other)),
        (family.kl_gradient, (stats, other)),
        (family.mode, (stats,)),
        (family.encode, (actions,)),
    ]
    for function, arguments in cases:
        together = function(*arguments)
        for t, b in itertools.product(range(3), range(2)):
            close(together[t, b], function(*(argument[t, b] for argument in arguments)))


# Samples


@every_categorical
def test_each_outcome_is_drawn_on_an_interval_of_its_probability(space: Space, rng: np.random.Generator) -> None:
    family, stats, n = make_family(space), random_stats(space, rng), 1000
    grid = (th.arange(n).double() + 0.5) / n
    for component, probs in enumerate(factors(space, stats)):
        uniforms = uniform(rng, family.n_components).repeat(n, 1)
        uniforms[:, component] = grid
        actions = family.sample(stats, uniforms)
        assert (actions[1:, component] >= actions[:-1, component]).all()
        counts = actions[:, component].bincount(minlength=len(probs))
        assert ((counts - n * probs).abs() <= 1).all()
        others = [other for other in range(family.n_components) if other != component]
        assert (actions[:, others] == actions[0, others]).all()


@every_categorical
def test_samples_have_the_joint_distribution(space: Space, rng: np.random.Generator) -> None:
    family, stats, n = make_family(space), random_stats(space, rng, 1), 20_000
    actions, expected = outcomes(space, stats)
    strides = th.tensor([math.prod(sizes(space)[i + 1 :]) for i in range(family.n_components)])
    samples = family.sample(stats.expand(n, -1), uniform(rng, n, family.n_components))
    counts = (samples * strides).sum(-1).bincount(minlength=len(actions))
    chi_square = ((counts - n * expected[:, 0]).square() / (n * expected[:, 0])).sum()
    freedom = len(actions) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@every_gaussian
def test_a_sample_is_the_quantile_that_its_noise_is_of_the_standard_normal(
    space: Space, rng: np.random.Generator
) -> None:
    family, stats = make_family(space), random_stats(space, rng, 50)
    noise = normal(rng, 50, family.n_components)
    samples = family.sample(stats, noise)
    each = zip(components(space, stats), samples.unbind(-1), strict=True)
    close(th.stack([component.cdf(sample) for component, sample in each], -1), th.special.ndtr(noise), 1e-9)
    single = family.sample(stats.float(), noise)
    assert single.dtype == th.float32
    th.testing.assert_close(single, samples.float(), rtol=1e-5, atol=1e-5)


positive = st.floats(1e-40, 1.0) | st.floats(0.01, 1.0)
weights_of_outcomes = st.lists(st.just(0.0) | positive, min_size=1, max_size=7).filter(any)
uniform_numbers = st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True)


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(
    st.lists(st.tuples(weights_of_outcomes, uniform_numbers), min_size=1, max_size=3),
    st.sampled_from([np.float32, np.float64]),
)
def test_an_outcome_of_probability_zero_is_never_drawn(
    factors: list[tuple[list[float], float]], dtype: type[np.floating[Any]]
) -> None:
    weights, uniforms = zip(*factors, strict=True)
    parts = [(np.array(each) / sum(each)).astype(dtype) for each in weights]
    stats, drawn = np.concatenate(parts)[np.newaxis], np.array([uniforms])
    family = make_family(spaces.MultiDiscrete([len(part) for part in parts]))
    (outcome,) = family.act(stats, drawn)
    assert all(part[i] > 0 for part, i in zip(parts, outcome, strict=True))
    alone = make_family(spaces.Discrete(len(parts[0])))
    for action in (
        alone.act(parts[0][np.newaxis], drawn[:, :1]),
        alone.sample(th.from_numpy(parts[0]), th.from_numpy(drawn[0, :1])).numpy(),
    ):
        assert parts[0][action.item()] > 0


@every_space
def test_only_samples_can_be_sampled(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    actions = family.sample(random_stats(space, rng, 50), th.from_numpy(family.noise(rng, 50)))
    assert family.can_sample(actions)
    assert not family.can_sample(actions[:, 1:])
    assert not family.can_sample(actions.to(th.float32 if isinstance(family, Categorical) else th.int64))
    if isinstance(family, Categorical):
        for component, n in enumerate(sizes(space)):
            for outcome in (-1, n):
                wrong = actions.clone()
                wrong[7, component] = outcome
                assert not family.can_sample(wrong)


@every_space
def test_noise_has_the_distribution_that_samples_are_made_of(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    drawn = family.noise(rng, 20, 1000)
    assert drawn.shape == (20, 1000, family.n_components)
    drawn = drawn.reshape(20_000, -1)
    cumulated = th.special.ndtr(th.from_numpy(drawn)).numpy() if isinstance(family, DiagonalGaussian) else drawn
    expected = (np.arange(20_000) + 0.5) / 20_000
    for of_component in np.sort(cumulated, 0).T:
        assert np.abs(of_component - expected).max() < 2.0 / np.sqrt(20_000)  # Kolmogorov and Smirnov's distance


@every_space
@pytest.mark.parametrize("dtype", [th.float32, th.float64])
def test_act_equals_sample(space: Space, dtype: th.dtype, rng: np.random.Generator) -> None:
    family, stats = make_family(space), random_stats(space, rng, 200).to(dtype)
    noise = family.noise(rng, 200)
    noise[0], noise[1] = 0, 1 - 2**-53
    actions = family.act(stats.numpy(), noise)
    np.testing.assert_array_equal(actions, family.sample(stats, th.from_numpy(noise)).numpy())
    assert actions.shape == (200, family.n_components)


@every_space
def test_no_action_is_more_probable_than_the_mode(space: Space, rng: np.random.Generator) -> None:
    family, stats = make_family(space), random_stats(space, rng, 50)
    mode = family.mode(stats)
    actions, _ = outcomes(space, stats)
    if isinstance(space, spaces.Box):
        actions = mode + 0.1 * normal(rng, 100, *mode.shape)
    log_probs = family.log_prob(stats, actions)
    if isinstance(space, spaces.Box):
        assert (log_probs < family.log_prob(stats, mode)).all()
    else:
        assert th.equal(log_probs.max(0).values, family.log_prob(stats, mode))


@every_space
def test_sb3s_distribution_is_the_familys(space: Space, rng: np.random.Generator) -> None:
    family, stats = make_family(space), random_stats(space, rng, 7)
    distribution = family.distribution(stats)
    floor = 1e-12 if isinstance(space, spaces.Box) else 2 * EPSILON
    every, _ = outcomes(space, stats)
    for actions in every:
        given = (actions[:, 0] if family.enumerable else actions).to(distribution.sample().dtype)
        expected = family.log_prob(stats, actions)
        shares = floor * (1 / probabilities(space, stats, actions).clamp(max=1)).sum(-1)
        assert ((distribution.log_prob(given) - expected).abs() <= shares).all()
    entropy = distribution.entropy()
    assert entropy is not None
    assert ((entropy - family.entropy(stats)).abs() <= floor * family.n_stats).all()
    shape = (7,) if family.enumerable else (7, family.n_components)
    for mode in (distribution.mode(), distribution.get_actions(deterministic=True)):
        assert mode.shape == shape
        close(mode.reshape(7, -1).double(), family.mode(stats).double(), 1e-14)
    for sampled in (distribution.sample(), distribution.get_actions()):
        assert sampled.shape == shape
        elements(space, family.to_env(sampled.reshape(7, -1).to(family.mode(stats).dtype).numpy()))
        assert distribution.log_prob(sampled).isfinite().all()


@every_space
def test_samples_of_sb3s_distribution_have_the_familys_moments(space: Space, rng: np.random.Generator) -> None:
    family, stats, n = make_family(space), random_stats(space, rng, 1), 4000
    th.manual_seed(0)
    samples = family.distribution(stats.expand(n, -1)).sample().reshape(n, -1)
    if isinstance(space, spaces.Box):
        mean, std = stats[0].chunk(2)
        assert ((samples.std(0) - std).abs() <= 4 * std / (2 * n) ** 0.5).all()
    else:
        samples, mean = family.encode(samples.long()).double(), stats[0]
        std = (mean * (1 - mean)).sqrt()
    assert ((samples.mean(0) - mean).abs() <= 4 * std / n**0.5).all()


# Actions for networks and for environments


@every_categorical
def test_an_encoded_categorical_action_is_one_hot(space: Space) -> None:
    family = make_family(space)
    every = th.tensor(list(itertools.product(*map(range, sizes(space)))))
    encoded = family.encode(every)
    assert encoded.dtype == th.float32
    for part, outcome in zip(factors(space, encoded), every.unbind(-1), strict=True):
        assert th.equal(part.argmax(-1), outcome)
        assert th.equal(part.sum(-1), th.ones(len(every)))
        assert ((part == 0) | (part == 1)).all()
    assert family.n_features == encoded.shape[-1] == sum(sizes(space))


@every_gaussian
def test_an_encoded_vector_is_clipped_to_the_bounds_and_scaled(space: Space, rng: np.random.Generator) -> None:
    assert isinstance(space, spaces.Box)
    family = make_family(space)
    assert family.n_features == math.prod(space.shape)
    low, high = (th.as_tensor(bound.reshape(-1), dtype=th.float64) for bound in (space.low, space.high))
    actions = 1e3 * normal(rng, 50, family.n_components)
    close(family.encode(actions), family.encode(actions.clamp(low, high)))
    bounded = low.isfinite() & high.isfinite()
    close(family.encode(low)[bounded], -th.ones(int(bounded.sum())).double())
    close(family.encode(high)[bounded], th.ones(int(bounded.sum())).double())
    if np.issubdtype(space.dtype, np.floating):
        close(family.encode((low + high) / 2)[bounded], th.zeros(int(bounded.sum())).double())
    close(family.encode(actions)[:, ~bounded], actions.clamp(low, high)[:, ~bounded])


def test_ratios_of_many_components_do_not_underflow_where_pi_may_take_the_action() -> None:
    n, shift = 200, 1.2
    family = make_family(spaces.Box(-1, 1, (n,)))
    behaviour = th.cat((th.zeros(1, n), th.ones(1, n)), -1)
    stats = th.cat((th.full((1, n), shift), th.ones(1, n)), -1)
    ratio = family.ratio(stats, behaviour, th.zeros(1, n))  # e^-144
    assert 0 < ratio.item() < 1e-37
    assert 0.48 < retrace_traces(ratio, n).item() < 0.65
    bits = make_family(spaces.MultiBinary(n))
    ratio = bits.ratio(th.tensor([[0.95, 0.05] * n]), th.tensor([[0.5, 0.5] * n]), th.ones(1, n, dtype=th.int64))
    assert 0 < ratio.item() < 1e-37
    never = th.tensor([[0.5, 0.5] * (n - 1) + [1.0, 0.0]])
    assert bits.ratio(never, th.tensor([[0.5, 0.5] * n]), th.ones(1, n, dtype=th.int64)).item() == 0


@pytest.mark.parametrize("bounds", [(-LARGEST, LARGEST), (-1.0, LARGEST), (-1e5, 1e5), (-5_000.0, 5_001.0)])
def test_bounds_far_from_each_other_count_as_none(bounds: tuple[float, float]) -> None:
    actions = th.tensor([[-0.5], [0.0], [2.0]])
    close(make_family(spaces.Box(*bounds, (1,))).encode(actions), actions)


def test_bounds_ten_thousand_apart_are_still_scaled() -> None:
    encoded = make_family(spaces.Box(0, 10_000, (1,))).encode(th.tensor([[0.0], [5_000.0], [10_000.0]]))
    close(encoded, th.tensor([[-1.0], [0.0], [1.0]]))


@every_gaussian
def test_the_critic_judges_what_the_environment_gets(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    actions = (3 * normal(rng, 50, family.n_components)).float()
    close(family.encode(actions), family.encode(th.from_numpy(family.from_env(family.to_env(actions.numpy())))))


@pytest.mark.parametrize("more", [[1], [1] * 9])
def test_a_component_with_one_outcome_changes_nothing(more: list[int], rng: np.random.Generator) -> None:
    stats, average = (random_stats(spaces.MultiDiscrete([3, 2]), rng, 9) for _ in range(2))
    gain_gradient, steps = normal(rng, 9, 5), []
    for sizes_ in [3, 2], [3, 2, *more]:
        family, certain = make_family(spaces.MultiDiscrete(sizes_)), th.ones(9, len(sizes_) - 2, dtype=th.float64)
        now, before, g = (th.cat((part, certain), -1) for part in (stats, average, gain_gradient))
        steps.append(family.backward(now, trust_region(g, family.kl_gradient(before, now), 0.1))[0])
    close(steps[0], steps[1][:, :5])


def test_a_component_with_one_value_is_encoded_as_this_value() -> None:
    family = make_family(spaces.Box(np.array([-1.0, 2.0]), np.array([1.0, 2.0]), dtype=np.float32))
    assert family.encode(th.tensor([[0.5, 7.0], [-3.0, 2.0]])).tolist() == [[0.5, 2.0], [-1.0, 2.0]]


def elements(space: Space, actions: npt.NDArray[Any]) -> None:
    assert actions.dtype == space.dtype
    assert actions.shape[1:] == space.shape
    for action in actions:
        assert space.contains(action if isinstance(space, spaces.Discrete) else np.asarray(action))


@every_categorical
def test_an_environment_gets_the_outcomes_counted_from_their_start(space: Space) -> None:
    family = make_family(space)
    every = np.array(list(itertools.product(*map(range, sizes(space)))))
    actions = family.to_env(every)
    elements(space, actions)
    start = np.broadcast_to(getattr(space, "start", 0), space.shape or ()).reshape(-1)
    np.testing.assert_array_equal(actions.reshape(len(every), -1) - start, every)


@every_gaussian
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_environment_gets_vectors_clipped_to_its_bounds(
    space: spaces.Box, dtype: type[np.floating[Any]], rng: np.random.Generator
) -> None:
    family = make_family(space)
    vectors = np.concatenate([scale * rng.normal(size=(50, family.n_components)) for scale in (0.1, 1, 1e3)])
    given = vectors.astype(dtype)
    actions = family.to_env(given)
    elements(space, actions)
    np.testing.assert_array_equal(given, vectors.astype(dtype))  # the stored action stays as it was sampled
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    for vector, action in zip(given, actions.reshape(len(given), -1), strict=True):
        for i, x in enumerate(vector):
            clipped = min(max(float(x), float(low[i])), float(high[i]))
            if np.issubdtype(space.dtype, np.integer):
                assert abs(float(action[i]) - clipped) < 1
            else:
                assert float(action[i]) == pytest.approx(clipped, rel=1e-6)


def test_an_environment_with_integer_vectors_gets_the_nearest_integers() -> None:
    family = make_family(spaces.Box(-3, 5, (3,), np.int64))
    assert family.to_env(np.array([[0.6, -1.7, 5.4]], np.float32)).tolist() == [[1, -2, 5]]


# The choice of a family


@pytest.mark.parametrize(
    ("space", "family"),
    [
        (spaces.Discrete(3), Enumerated),
        (spaces.MultiDiscrete([3, 2]), Categorical),
        (spaces.MultiBinary(3), Binary),
        (spaces.Box(-1, 1, (2,)), DiagonalGaussian),
    ],
    ids=str,
)
def test_each_space_has_its_family(space: Space, family: type[Family]) -> None:
    made = make_family(space)
    assert type(made) is family
    assert made.enumerable == (family is Enumerated)
    assert made.trace_root == made.n_components


def test_a_component_of_one_choice_is_none_of_a_trace() -> None:
    assert make_family(spaces.MultiDiscrete([3, 1, 2])).trace_root == 2
    assert make_family(spaces.MultiDiscrete([1, 1])).trace_root == 1


def box_with_nan(bound: str) -> spaces.Box:
    space = spaces.Box(-1, 1, (2,))
    getattr(space, bound)[1] = np.nan  # gymnasium's constructor would refuse it
    return space


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
        spaces.Dict(a=spaces.Discrete(2)),
        spaces.Text(3),
        box_with_nan("low"),
        box_with_nan("high"),
    ],
    ids=str,
)
def test_an_unsupported_space_is_named_together_with_the_supported_ones(space: Space) -> None:
    with pytest.raises(
        ValueError, match="action_space must be Discrete, MultiDiscrete, MultiBinary, or a Box"
    ) as error:
        make_family(space)
    assert repr(space) in str(error.value)


@pytest.mark.parametrize("shape", [[2, 3], [3]])
def test_a_multi_binary_space_of_a_shape_is_an_error(shape: list[int]) -> None:
    space = spaces.MultiBinary(shape)
    with pytest.raises(ValueError, match="of a number of bits") as error:
        make_family(space)
    assert str(space) in str(error.value)


# Gains of sampled actions


def advantages_of(family: Family, actions: th.Tensor, linear: th.Tensor, squared: th.Tensor) -> th.Tensor:
    encoded = actions if isinstance(family, DiagonalGaussian) else family.encode(actions).double()
    return encoded @ linear + (encoded @ squared).square()


@pytest.mark.parametrize("c", [0.0, 0.5, 2.0, 10.0])
@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)], ids=str
)
def test_truncation_plus_correction_is_unbiased(space: Space, c: float, rng: np.random.Generator) -> None:
    family, n, n_candidates = make_family(space), 100_000, 2
    # Two policies that prefer opposite actions.
    stats, behaviour = (random_stats(space, np.random.default_rng(1), 1, spread=spread) for spread in (1.0, -0.7))
    stats.requires_grad_()
    linear, squared = normal(rng, family.n_features), normal(rng, family.n_features)
    if isinstance(space, spaces.Box):
        mean, std = stats.chunk(2, -1)
        expectation = mean @ linear + (mean @ squared).square() + std.square() @ squared.square()
    else:
        every, probability = outcomes(space, stats)
        expectation = (probability * advantages_of(family, every, linear, squared)).sum(0)
    expected = gradient(expectation, stats)[0]

    pi, mu = stats.detach().expand(n, -1), behaviour.expand(n, -1)
    actions = family.sample(mu, th.from_numpy(family.noise(rng, n)))
    candidates = family.sample(pi.unsqueeze(1), th.from_numpy(family.noise(rng, n, n_candidates)))
    ratio, ratios = family.ratios(pi, mu, actions, candidates)
    weight = truncated_factor(ratio, advantages_of(family, actions, linear, squared), c)
    shares = th.full((n, n_candidates), 1 / n_candidates, dtype=th.float64)
    weights = correction_factors(shares, ratios, advantages_of(family, candidates, linear, squared), c)

    def deviation(weight: th.Tensor, weights: th.Tensor) -> th.Tensor:
        """Of the mean gradient from the expected one, in standard errors."""
        gradients = family.gain_gradient(pi, actions, weight, candidates, weights)
        standard_error = gradients.std(0) / n**0.5
        assert (standard_error < 0.1).all()
        deviations: th.Tensor = (gradients.mean(0) - expected).abs() / standard_error
        return deviations

    assert (deviation(weight, weights) < 4).all()
    assert (ratio > 2).any()
    if c <= 0.5:  # without the correction the estimate is biased
        assert (deviation(weight, 0 * weights) > 8).any()


@every_space
def test_actions_go_to_the_environment_and_back(space: Space) -> None:
    family = make_family(space)
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(20)])
    np.testing.assert_allclose(family.to_env(family.from_env(actions)), actions, rtol=1e-6)  # float32 in between
    np.testing.assert_array_equal(family.from_env(actions[0]), family.from_env(actions)[:1])
    assert family.from_env(actions).dtype == (np.float32 if isinstance(space, spaces.Box) else np.int64)
    with pytest.raises(ValueError, match="actions must be of"):
        family.from_env(np.zeros((2, 2, 2, 2, 2)))


@every_categorical
def test_what_is_between_two_actions_is_no_action(space: Space) -> None:
    space.seed(0)
    between = np.asarray(space.sample(), np.float64)
    between.flat[0] += 0.5  # and the other components are right
    with pytest.raises(ValueError, match="actions must be of"):
        make_family(space).from_env(between)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@every_gaussian
def test_vectors_that_are_not_finite_are_no_actions(space: Space, value: float) -> None:
    vector = np.zeros(space.shape or ())
    vector.flat[0] = value
    with pytest.raises(ValueError, match="actions must be finite, got"):
        make_family(space).from_env(vector)


@every_space
def test_action_probabilities_have_the_form_of_stable_baselines(space: Space, rng: np.random.Generator) -> None:
    stats = random_stats(space, rng, 6)
    found = make_family(space).action_probability(stats.numpy())
    if isinstance(space, spaces.Box):
        assert all(part.shape == (6, *space.shape) for part in found)
        found = np.concatenate([part.reshape(6, -1) for part in found], -1)
        np.testing.assert_array_equal(found, stats)
    elif isinstance(space, spaces.MultiDiscrete):
        for ours, factor in zip(found, factors(space, stats), strict=True):
            np.testing.assert_array_equal(ours, factor)
    else:
        np.testing.assert_array_equal(found, stats[:, 1::2] if isinstance(space, spaces.MultiBinary) else stats)


@every_space
def test_scores_are_those_of_single_states_whatever_the_leading_axes(space: Space, rng: np.random.Generator) -> None:
    stats = random_stats(space, rng, 6)
    family = make_family(space)
    actions = family.sample(stats.unsqueeze(1), th.from_numpy(rng.random((6, 4, family.n_components))))
    weights = normal(rng, 6, 4)
    for score in (family.score, lambda *arguments: Family.score(family, *arguments)):
        together = score(stats, actions, weights)
        for row in range(6):
            close(together[row], score(stats[row], actions[row], weights[row]))


@every_space
def test_statistics_of_arrays_are_those_of_tensors(space: Space, rng: np.random.Generator) -> None:
    family = make_family(space)
    outputs = normal(rng, 5, family.n_outputs)
    log_std = normal(rng, family.n_log_std) if family.n_log_std else None
    found = family.statistics_of_arrays(outputs.numpy(), None if log_std is None else log_std.numpy())
    close(th.from_numpy(found), family.statistics(outputs, log_std))
