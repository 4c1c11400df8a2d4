"""Laws of the policies: what they say of rows of observations, whatever the rows and the actions are made of."""

import inspect
import itertools
import math
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor, NatureCNN
from torch import nn
from torch.nn.utils import parametrize

from sb3_acer import ACER, policies
from sb3_acer.distributions import make_family
from sb3_acer.heads import CriticOutput, DuelingHead, QHead
from sb3_acer.mlp import ACTIVATIONS
from sb3_acer.policies import (
    ACERPolicy,
    CnnPolicy,
    Evaluation,
    MlpPolicy,
    MultiInputPolicy,
    split_net_arch,
)
from sb3_acer.recurrent import LSTM, LayerNormLSTM
from sb3_acer.sequences import SequenceBatch
from tests.helpers import WithDropout, normal, uniform

Space = spaces.Space[Any]
Obs = th.Tensor | dict[str, th.Tensor]

IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
OBSERVATIONS: dict[str, Space] = {
    "vector": spaces.Box(-1, 1, (3,)),
    "vector of float64": spaces.Box(-1, 1, (3,), np.float64),
    "vector of integers": spaces.Box(-5, 5, (3,), np.int32),
    "matrix": spaces.Box(-1, 1, (2, 3)),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiBinary": spaces.MultiBinary(4),
    "image": IMAGE,
    "Dict": spaces.Dict(vector=spaces.Box(-1, 1, (3,)), image=IMAGE, kind=spaces.Discrete(3)),
}
ACTIONS: dict[str, Space] = {
    "Discrete": spaces.Discrete(4, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": spaces.Box(-10, 10, (2,)),
}
RECURRENCES: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "LSTM": {"recurrent_class": LSTM, "lstm_hidden_size": 16},
    "LayerNormLSTM": {"recurrent_class": LayerNormLSTM, "lstm_hidden_size": 16},
}
VECTOR, DISCRETE = OBSERVATIONS["vector"], ACTIONS["Discrete"]
every_action = pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
sampled_actions = pytest.mark.parametrize("action_space", list(ACTIONS.values())[1:], ids=list(ACTIONS)[1:])
# Observations, actions and recurrent modules meet in few lines: every kind of each, but not every combination.
COMBINATIONS: dict[str, tuple[Space, Space, dict[str, Any]]] = {
    f"{observation}, {action}, {recurrence}": (OBSERVATIONS[observation], ACTIONS[action], RECURRENCES[recurrence])
    for observation, action, recurrence in [
        *zip(OBSERVATIONS, itertools.cycle(ACTIONS), itertools.cycle(RECURRENCES), strict=False),
        *zip(["vector"] * 12, 3 * list(ACTIONS), [name for name in RECURRENCES for _ in range(4)], strict=True),
    ]
}
every_combination = pytest.mark.parametrize(
    ("observation_space", "action_space", "recurrence"), COMBINATIONS.values(), ids=COMBINATIONS
)
every_observation_or_action = pytest.mark.parametrize(
    ("observation_space", "action_space"), [each[:2] for each in COMBINATIONS.values()][: len(OBSERVATIONS) + 4]
)
with_and_without_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)
shared_or_not = pytest.mark.parametrize("share", [True, False], ids=["one extractor", "two extractors"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    th.manual_seed(0)


def constant(progress_remaining: float) -> float:
    return 7e-4 * progress_remaining


def policy_class(observation_space: Space) -> type[ACERPolicy]:
    if isinstance(observation_space, spaces.Dict):
        return MultiInputPolicy
    return CnnPolicy if observation_space is IMAGE else MlpPolicy


def make(observation_space: Space = VECTOR, action_space: Space = DISCRETE, **arguments: Any) -> ACERPolicy:
    """A policy whose heads and standard deviation are not as good as 0 and 1 to begin with."""
    arguments = {"ortho_init": False, "log_std_init": -0.5, **arguments}
    return policy_class(observation_space)(observation_space, action_space, constant, **arguments)


def rows_of(space: Space, *shape: int) -> Obs:
    """Different observations, ``[*shape, ...]``."""
    if isinstance(space, spaces.Dict):
        return {key: part for key, space in space.items() if isinstance(part := rows_of(space, *shape), th.Tensor)}
    space.seed(0)
    samples = np.stack([np.asarray(space.sample()) for _ in range(math.prod(shape))])
    return th.from_numpy(samples).view(*shape, *samples.shape[1:])


def pick(rows: Obs, *index: Any) -> Obs:
    return {key: part[index] for key, part in rows.items()} if isinstance(rows, dict) else rows[index]


def fold(rows: Obs, *shape: int) -> Obs:
    """``[N, ...]`` as ``[*shape, ...]``."""
    if isinstance(rows, dict):
        return {key: part.view(*shape, *part.shape[1:]) for key, part in rows.items()}
    return rows.view(*shape, *rows.shape[1:])


def sequences_of(
    observations: Obs,
    actions: th.Tensor,
    states: th.Tensor,
    ends: th.Tensor,
    final_observations: Obs,
    final_steps: th.Tensor,
) -> SequenceBatch:
    """A batch with what :meth:`ACERPolicy.evaluate` reads of it."""
    zeros, envs = th.zeros(ends.shape), np.arange(ends.shape[1])
    mu = zeros.unsqueeze(-1)
    flags = ends & False, ends
    return SequenceBatch(
        observations, actions, mu, zeros, *flags, final_observations, final_steps, states, zeros + 1, envs, envs
    )


def sequences(policy: ACERPolicy, n_steps: int = 4, n_sequences: int = 3) -> SequenceBatch:
    """With two truncated steps, the last of a sequence among them."""
    n_rows = (n_steps + 1) * n_sequences
    every = rows_of(policy.observation_space, n_rows + 2)
    rng = np.random.default_rng(0)
    noise = th.from_numpy(policy.family.noise(rng, n_steps * n_sequences))
    with th.no_grad():
        actions = policy.family.sample(stats_of(policy, pick(every, slice(n_steps * n_sequences))), noise)
    ends = th.zeros(n_steps, n_sequences, dtype=th.bool)
    truncated = th.tensor([min(1, n_steps - 1), n_steps * n_sequences - 1])
    ends.view(-1)[truncated] = True
    return sequences_of(
        fold(pick(every, slice(n_rows)), n_steps + 1, n_sequences),
        actions.view(n_steps, n_sequences, -1),
        th.zeros(n_sequences, policy.state_size),
        ends,
        pick(every, slice(n_rows, None)),
        truncated,
    )


def stats_of(policy: ACERPolicy, rows: Obs) -> th.Tensor:
    """Statistics from the zero state."""
    stats: th.Tensor = policy.step(rows, zero_states(policy, rows))[0]
    return stats


def zero_states(policy: ACERPolicy, rows: Obs) -> th.Tensor:
    some = next(iter(rows.values())) if isinstance(rows, dict) else rows
    return th.zeros(len(some), policy.state_size)


def evaluate(policy: ACERPolicy, given: SequenceBatch, n_samples: int = 3, seed: int = 0) -> Evaluation:
    return policy.evaluate(given, n_samples, np.random.default_rng(seed))


def close(actual: th.Tensor, expected: th.Tensor, tolerance: float = 1e-5) -> None:
    th.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Evaluation


@every_observation_or_action
def test_one_pass_over_all_rows_equals_one_for_each_row(observation_space: Space, action_space: Space) -> None:
    policy = make(observation_space, action_space)
    given = sequences(policy)
    whole = evaluate(policy, given)
    rng = np.random.default_rng(0)  # what is drawn row by row is what is drawn at once
    n_sequences = given.actions.shape[1]
    for step, (t, b) in enumerate(itertools.product(*map(range, given.actions.shape[:2]))):
        truncated = given.final_steps == t * n_sequences + b
        row = sequences_of(
            pick(given.observations, slice(t, t + 2), slice(b, b + 1)),
            given.actions[t : t + 1, b : b + 1],
            given.states[b : b + 1],
            given.ends[t : t + 1, b : b + 1],
            pick(given.final_observations, truncated),
            th.zeros(int(truncated.sum()), dtype=th.int64),
        )
        alone = policy.evaluate(row, 3, rng)
        for name, of_all, of_one in zip(Evaluation._fields[:-1], whole[:-1], alone[:-1], strict=True):
            assert of_all[t, b].shape == of_one[0, 0].shape, name
            close(of_all[t, b], of_one[0, 0])
        assert step == t * n_sequences + b
    assert whole.values.std() > 1e-3  # else all of this would be true of any rows


@shared_or_not
@every_action
def test_next_values_are_those_of_the_true_successors(action_space: Space, share: bool) -> None:
    policy = make(VECTOR, action_space, share_features_extractor=share)
    given = sequences(policy)
    next_values = evaluate(policy, given).next_values
    assert isinstance(given.observations, th.Tensor)
    expected = th.stack([policy.predict_values(row, given.states).squeeze(-1) for row in given.observations[1:]])
    final_values = policy.predict_values(
        given.final_observations, zero_states(policy, given.final_observations)
    ).squeeze(-1)
    for step, value in zip(given.final_steps.tolist(), final_values, strict=True):
        assert (expected.view(-1)[step] - value).abs() > 1e-3
        expected.view(-1)[step] = value
    close(next_values, expected)


@with_and_without_recurrence
@every_action
def test_values_of_one_step_are_the_next_values_of_the_one_before(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    given = sequences(policy)._replace(final_observations=th.zeros(0, 3), final_steps=th.zeros(0, dtype=th.int64))
    found = evaluate(policy, given)
    assert th.equal(found.values[1:], found.next_values[:-1])


@shared_or_not
def test_the_value_of_a_state_is_the_mean_q_under_the_policy_for_discrete_actions(share: bool) -> None:
    policy = make(share_features_extractor=share)
    given = sequences(policy)
    found = evaluate(policy, given)
    assert isinstance(given.observations, th.Tensor)
    assert isinstance(policy.q_head, QHead)
    latent = nn.Sequential(*policy.q_net)(given.observations[:-1])
    q = policy.q_head.q(latent)
    pi = nn.Sequential(*policy.pi_net, policy.pi_head)(given.observations[:-1]).softmax(-1)
    close(found.stats, pi)
    close(found.weights, pi)
    close(found.candidate_values, q)
    close(found.values, (pi * q).sum(-1))
    close(found.q_values, q.gather(-1, given.actions).squeeze(-1))
    assert th.equal(found.candidates, th.arange(4).view(4, 1).expand(4, 3, 4, 1))


@pytest.mark.parametrize("dueling", [False, True])
def test_what_is_learnt_of_one_action_moves_q_of_the_others_where_the_critic_is_dueling(dueling: bool) -> None:
    policy = make(dueling=dueling, net_arch=[])
    given = sequences(policy)
    given = given._replace(actions=th.zeros_like(given.actions))
    assert isinstance(given.observations, th.Tensor)
    found = evaluate(policy, given)
    close(policy.predict_values(given.observations[:-1].flatten(0, 1)).view_as(found.values), found.values)
    policy.flat.zero_grad()
    found.backward(th.zeros_like(found.stats), -th.ones_like(found.q_values))
    th.optim.SGD(policy.q_head.parameters(), 0.1).step()
    moved = evaluate(policy, given).candidate_values - found.candidate_values
    assert (moved[..., 0] > 0).all()
    # The gradient with respect to n outputs A is 1 - 1/n and -1/n, and with respect to V it is 1.
    close(moved[..., 1:], moved[..., :1].expand(-1, -1, 3) * (0.75 / 1.75 if dueling else 0.0))


@pytest.mark.parametrize("n_samples", [1, 5])
@sampled_actions
def test_the_mean_q_of_sampled_actions_is_the_value_of_the_state(action_space: Space, n_samples: int) -> None:
    policy, n = make(VECTOR, action_space), 4000
    observations = rows_of(VECTOR, 2)
    assert isinstance(observations, th.Tensor)
    given = sequences_of(
        observations.unsqueeze(1).expand(-1, n, -1),
        th.from_numpy(policy.family.from_env(np.stack([action_space.sample()] * n))).unsqueeze(0),
        th.zeros(n, 0),
        th.zeros(1, n, dtype=th.bool),
        th.zeros(0, 3),
        th.zeros(0, dtype=th.int64),
    )
    with th.no_grad():
        found = evaluate(policy, given, n_samples)
    means = (found.weights * found.candidate_values).sum(-1)[0]
    standard_error = means.std() / n**0.5
    assert 1e-5 < standard_error < 0.02
    assert (means.mean() - found.values[0, 0]).abs() < 4 * standard_error
    close(found.values[0], policy.predict_values(observations[:1], zero_states(policy, observations[:1]))[0].expand(n))


@with_and_without_recurrence
@sampled_actions
def test_candidates_are_sampled_from_the_policy(action_space: Space, recurrence: dict[str, Any]) -> None:
    policy, n = make(VECTOR, action_space, **recurrence), 20_000
    given = sequences(policy, 1, 1)
    no_finals = pick(given.final_observations, slice(0))
    given = given._replace(final_observations=no_finals, final_steps=th.zeros(0, dtype=th.int64))
    with th.no_grad():
        found = evaluate(policy, given, n)
    assert found.candidates.shape == (1, 1, n, policy.family.n_components)
    close(found.weights, th.full((1, 1, n), 1 / n))
    within_sampling_error(policy, found.candidates[0, 0], found.stats[0, 0])


def within_sampling_error(policy: ACERPolicy, actions: th.Tensor, stats: th.Tensor) -> None:
    """That frequencies of actions ``[N, D]`` are probabilities, or that their moments are those of the Gaussian."""
    n = len(actions)
    if isinstance(policy.action_space, spaces.Box):
        mean, std = stats.double().chunk(2, -1)
        assert ((actions.double().mean(0) - mean).abs() < 4 * std / n**0.5).all()
        assert ((actions.double().std(0) - std).abs() < 4 * std / (2 * n) ** 0.5).all()
    else:
        encoded = policy.family.encode(actions).double()
        standard_error = (stats * (1 - stats) / n).sqrt()
        assert ((encoded.mean(0) - stats).abs() < 4 * standard_error).all()


@with_and_without_recurrence
@sampled_actions
def test_q_of_an_action_does_not_depend_on_whether_it_was_taken_or_sampled(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    given = sequences(policy)
    found = evaluate(policy, given)
    for k in range(3):
        again = evaluate(policy, given._replace(actions=found.candidates[:, :, k]))
        close(again.q_values, found.candidate_values[:, :, k])
        close(again.values, found.values)


@sampled_actions
def test_q_of_an_action_is_the_value_and_its_advantage_over_sampled_ones(action_space: Space) -> None:
    policy = make(VECTOR, action_space)
    given = sequences(policy)
    found = evaluate(policy, given)
    head = policy.q_head
    assert isinstance(head, DuelingHead)
    assert isinstance(given.observations, th.Tensor)
    latent = nn.Sequential(*policy.q_net)(given.observations[:-1])
    one_layer = nn.Linear(latent.shape[-1] + policy.family.n_features, head.action.out_features)
    with th.no_grad():
        one_layer.weight.copy_(th.cat((head.latent.weight[1:], head.action.weight), -1))
        one_layer.bias.copy_(head.latent.bias[1:])

    def advantage(actions: th.Tensor) -> th.Tensor:
        together = th.cat((latent, policy.family.encode(actions)), -1)
        outputs: th.Tensor = head.advantage(one_layer(together).relu())
        return outputs.squeeze(-1)

    values = head.latent(latent)[..., 0]
    close(found.values, values)
    others = [found.q_values - advantage(given.actions)]  # V minus the mean advantage, the same for every action
    others += [found.candidate_values[..., k] - advantage(found.candidates[:, :, k]) for k in range(3)]
    for other in others[1:]:
        close(other, others[0])
    noise = th.from_numpy(policy.family.noise(np.random.default_rng(0), 4, 3, 6))
    sampled = policy.family.sample(found.stats.unsqueeze(-2), noise)
    close(others[0], values - th.stack([advantage(sampled[:, :, k]) for k in range(3, 6)]).mean(0))


@with_and_without_recurrence
@every_action
def test_gradients_of_the_critic_do_not_reach_the_policy_and_back(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, **recurrence)

    def reached(of_stats: float, of_q_values: float, of_values: float) -> set[str]:
        policy.flat.zero_grad()
        found, scales = evaluate(policy, sequences(policy)), (of_stats, of_q_values, of_values)
        outputs = (found.stats, found.q_values, found.values)
        found.backward(*(scale * th.randn_like(output) for scale, output in zip(scales, outputs, strict=True)))
        return {name for name, each in policy.named_parameters() if each.grad is not None and each.grad.any()}

    of_policy = {name for name, _ in policy.named_parameters() if name.startswith(("pi_", "log_std"))}
    of_critic = {name for name, _ in policy.named_parameters() if name.startswith("q_")}
    assert of_policy | of_critic == {name for name, _ in policy.named_parameters()}
    assert not any(part.requires_grad for part in evaluate(policy, sequences(policy))[:-1])
    assert reached(1, 0, 0) == of_policy
    assert reached(0, 1, 0) == of_critic
    if policy.family.enumerable:
        assert not reached(0, 0, 1)
    else:
        assert {"q_head.latent.weight", "q_net.0.weight"} <= reached(0, 0, 1) < of_critic


@shared_or_not
def test_gradients_of_policy_and_critic_reach_the_features_extractor_of_each(share: bool) -> None:
    policy = make(IMAGE, share_features_extractor=share, use_bfloat16=False)
    of_critic = {"features_extractor" if share else "q_features_extractor"}
    for of_stats, of_q_values, expected in ((1, 0, {"features_extractor"}), (0, 1, of_critic)):
        policy.flat.zero_grad()
        found = evaluate(policy, sequences(policy))
        found.backward(of_stats * th.randn_like(found.stats), of_q_values * th.ones_like(found.q_values))
        extractors = {name: each.grad for name, each in policy.named_parameters() if "features_extractor" in name}
        reached = {name.split(".")[0] for name, grad in extractors.items() if grad is not None and grad.any()}
        assert reached == expected


@with_and_without_recurrence
@every_action
def test_hooks_of_parameters_get_their_gradients(action_space: Space, recurrence: dict[str, Any]) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    given, parameters = sequences(policy), list(policy.parameters())

    def gradients() -> list[th.Tensor]:
        policy.flat.zero_grad()
        found = evaluate(policy, given)
        found.backward(found.stats, found.q_values, found.values)
        return [th.as_tensor(parameter.grad).clone() for parameter in parameters]

    calls: list[th.Tensor] = []
    given_to_hooks: list[th.Tensor] = []

    def double(gradient: th.Tensor) -> th.Tensor:
        given_to_hooks.append(gradient)
        return 2 * gradient

    plain = gradients()
    for parameter in parameters:
        parameter.register_hook(double)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(calls.append)  # type: ignore[no-untyped-call]
    for actual, expected in zip(gradients(), plain, strict=True):
        close(actual, 2 * expected)
    assert sorted(map(id, calls)) == sorted(map(id, parameters))
    assert not any(gradient.is_inference() for gradient in given_to_hooks)  # else they could not be changed later


def test_a_backward_pass_releases_the_activations_and_cannot_be_repeated() -> None:
    policy = make(VECTOR, ACTIONS["Box"])
    found = evaluate(policy, sequences(policy))
    kept = weakref.ref(found.backward.args[0][0][0])  # type: ignore[attr-defined]
    gradients = (th.ones_like(found.stats), th.ones_like(found.q_values))
    found.backward(*gradients)
    assert kept() is None
    with pytest.raises(ValueError, match="backward must be called once for each evaluation, got another call"):
        found.backward(*gradients)


@pytest.mark.parametrize("activation_fn", list(ACTIVATIONS))
def test_gradients_of_the_dueling_head_are_the_slopes_of_its_q_values(activation_fn: type[nn.Module]) -> None:
    rng = np.random.default_rng(0)
    head = DuelingHead(make_family(ACTIONS["Box"]), 4, activation_fn).double()
    n_actions = head.family.n_components
    stats = th.cat((normal(rng, 6, n_actions), 0.5 + uniform(rng, 6, n_actions)), -1)
    actions, outputs, weights = normal(rng, 3, 2, n_actions), normal(rng, 6, 5), normal(rng, 3, 2)
    layers = head.action.weight, head.advantage.weight

    def output() -> CriticOutput:
        found: CriticOutput = head(outputs, stats, actions, 2, np.random.default_rng(1))
        return found

    for layer in layers:
        layer.grad = th.zeros_like(layer)
    with th.no_grad():
        gradients = [output().backward(weights, None), *(layer.grad for layer in layers)]
        for tensor, gradient in zip((outputs, *layers), gradients, strict=True):
            numbers = tensor.view(-1)
            for i, slope in enumerate(th.as_tensor(gradient).flatten().tolist()):
                sums = []
                for change in (1e-6, -2e-6, 1e-6):
                    numbers[i] += change
                    sums.append(float((output().q_values * weights).sum()))
                assert slope == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-5, abs=1e-7)


# Statistics and observations


@every_observation_or_action
def test_statistics_are_those_of_the_networks_without_shortcuts(observation_space: Space, action_space: Space) -> None:
    policy = make(observation_space, action_space, use_bfloat16=False)
    given = sequences(policy)
    stats = policy.statistics(given)
    assert not stats.requires_grad
    for t in range(4):
        rows = pick(given.observations, t)
        features = BasePolicy.extract_features(policy, rows, policy.features_extractor)
        close(policy.extract_features(rows), features)
        outputs = policy.pi_head(nn.Sequential(*policy.pi_net)(features))
        close(stats[t], policy.family.statistics(outputs, policy.log_std).detach())
        close(stats[t], stats_of(policy, rows).detach())
    close(stats, evaluate(policy, given).stats)
    assert stats[..., : policy.family.n_outputs].std() > 1e-3


@pytest.mark.parametrize(
    ("space", "vectors"),
    [
        (spaces.Discrete(3), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (spaces.MultiDiscrete([2, 2]), [[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]]),
        (spaces.MultiBinary(2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        (spaces.Box(0, 9, (2,), np.int64), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        (spaces.Box(0, 9, (2,), np.float64), [[0, 0], [0, 1], [1, 0], [1, 1]]),
    ],
    ids=str,
)
def test_observations_that_are_no_vectors_are_encoded_as_vectors(space: Space, vectors: list[list[int]]) -> None:
    policy, numbers = make(space), th.tensor(vectors, dtype=th.float32)
    of_vectors = make(spaces.Box(0, 9, (numbers.shape[-1],)))
    of_vectors.load_state_dict(policy.state_dict())
    if isinstance(space, spaces.Discrete):
        observations = th.arange(3)
    else:
        observations = th.tensor(list(itertools.product(range(2), repeat=2))).to(
            th.from_numpy(np.zeros(1, space.dtype)).dtype
        )
    close(stats_of(policy, observations), stats_of(of_vectors, numbers), 1e-6)
    assert stats_of(policy, observations).std(0).max() > 1e-3


def test_images_are_divided_by_255_unless_normalize_images_is_false() -> None:
    policy, images = make(IMAGE, use_bfloat16=False), rows_of(IMAGE, 4)
    assert isinstance(images, th.Tensor)
    features = policy.features_extractor(images.float() / 255)
    close(stats_of(policy, images), policy.pi_head(features).softmax(-1))
    raw = make(IMAGE, normalize_images=False, use_bfloat16=False)
    raw.load_state_dict(policy.state_dict())
    close(stats_of(raw, images), policy.pi_head(policy.features_extractor(images.float())).softmax(-1))


def test_images_that_are_normalised_already_are_not_divided_by_255() -> None:
    space = spaces.Box(0, 1, IMAGE.shape)
    kwargs = {"normalized_image": True}
    policy = make(space, features_extractor_class=NatureCNN, features_extractor_kwargs=kwargs)
    images = rows_of(space, 4)
    close(stats_of(policy, images), policy.pi_head(policy.features_extractor(images)).softmax(-1))


@pytest.mark.parametrize("in_dict", [True, False], ids=["Dict", "flattened"])
@pytest.mark.parametrize("normalize_images", [True, False])
def test_images_of_any_extractor_are_divided_by_255_unless_normalize_images_is_false(
    normalize_images: bool, in_dict: bool
) -> None:
    seen: list[Any] = []
    arguments = (spaces.Dict(image=IMAGE) if in_dict else IMAGE, DISCRETE, constant)
    policy = (MultiInputPolicy if in_dict else MlpPolicy)(*arguments, normalize_images=normalize_images)
    policy.features_extractor.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    rows = th.full((1, *IMAGE.shape), 204, dtype=th.uint8)
    policy.step({"image": rows} if in_dict else rows, th.zeros(1, 0))
    assert (seen[0]["image"] if in_dict else seen[0]).unique().tolist() == pytest.approx(
        [0.8 if normalize_images else 204]
    )


@pytest.mark.parametrize("use_bfloat16", [False, True])
def test_images_of_floats_are_not_changed_in_place(use_bfloat16: bool) -> None:
    policy, images = make(IMAGE, use_bfloat16=use_bfloat16), rows_of(IMAGE, 4)
    assert isinstance(images, th.Tensor)
    for numbers in (images.float(), images.bfloat16()):
        given = numbers.clone()
        assert th.equal(stats_of(policy, given), stats_of(policy, images))
        assert th.equal(given, numbers)


@pytest.mark.parametrize("is_fast", [False, True])
def test_images_are_computed_in_bfloat16_where_the_processor_has_it(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "_has_bfloat16", lambda device_type: is_fast)
    policy, images = make(IMAGE), rows_of(IMAGE, 4)
    stats = {}
    for use_bfloat16 in (False, True):
        told = make(IMAGE, use_bfloat16=use_bfloat16)
        told.load_state_dict(policy.state_dict())
        stats[use_bfloat16] = stats_of(told, images)
    assert th.equal(stats_of(policy, images), stats[is_fast])
    assert not th.equal(*stats.values())


def test_bfloat16_leaves_probabilities_and_values_within_a_hundredth() -> None:
    exact, fast = make(IMAGE, use_bfloat16=False), make(IMAGE, use_bfloat16=True)
    fast.load_state_dict(exact.state_dict())
    given = sequences(exact)
    of_exact, of_fast = evaluate(exact, given), evaluate(fast, given)
    for name in ("stats", "values", "q_values", "next_values"):
        close(getattr(of_fast, name), getattr(of_exact, name), 1e-2)
    assert not th.equal(of_fast.stats, of_exact.stats)
    for policy, found in ((exact, of_exact), (fast, of_fast)):
        of_stats = th.zeros_like(found.stats)
        of_stats[..., 0] = 1
        found.backward(of_stats, th.ones_like(found.q_values))
        assert all(weight.grad is not None and weight.grad.dtype == th.float32 for weight in list(policy.parameters()))
    of_first = [next(iter(policy.parameters())).grad for policy in (fast, exact)]
    assert of_first[0] is not None
    assert of_first[1] is not None
    assert th.cosine_similarity(of_first[0].flatten(), of_first[1].flatten(), 0) > 0.99


def test_another_value_of_use_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="use_bfloat16 must be one of True, False, auto, got 'always'"):
        make(IMAGE, use_bfloat16="always")


def test_dict_observations_are_their_parts_side_by_side() -> None:
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3), c=spaces.MultiBinary(2))
    policy, vectors = make(space), make(spaces.Box(-1, 1, (7,)))
    vectors.load_state_dict(policy.state_dict())
    rows = {"a": th.tensor([[0.3, -0.5], [0.1, 0.9]]), "b": th.tensor([2, 0]), "c": th.tensor([[0, 1], [1, 1]])}
    expected = stats_of(vectors, th.tensor([[0.3, -0.5, 0, 0, 1, 0, 1], [0.1, 0.9, 1, 0, 0, 1, 1]]))
    close(stats_of(policy, rows), expected, 1e-6)


@with_and_without_recurrence
@every_action
def test_the_probabilities_of_each_factor_sum_to_one(action_space: Space, recurrence: dict[str, Any]) -> None:
    policy = make(VECTOR, action_space, log_std_init=-0.7, **recurrence)
    given = sequences(policy)
    stats = policy.statistics(given)
    if isinstance(action_space, spaces.Box):
        close(stats[..., 2:], th.full_like(stats[..., 2:], math.exp(-0.7)))
        return
    ends = {"Discrete": [4], "MultiDiscrete": [3, 5], "MultiBinary": [2, 4, 6]}[type(action_space).__name__]
    for start, end in itertools.pairwise([0, *ends]):
        close(stats[..., start:end].sum(-1), th.ones(4, 3))
    assert (stats > 0).all()


# Predictions


@every_combination
def test_predictions_are_elements_of_the_action_space(
    observation_space: Space, action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(observation_space, action_space, log_std_init=3.0, **recurrence)
    rows = rows_of(observation_space, 20)
    observations = {key: part.numpy() for key, part in rows.items()} if isinstance(rows, dict) else rows.numpy()
    for deterministic in (True, False):
        actions, _ = policy.predict(observations, deterministic=deterministic)
        assert len(actions) == 20
        assert all(action_space.contains(action) for action in actions)
    mode = policy.family.to_env(policy.family.mode(stats_of(policy, rows)).detach().numpy())
    np.testing.assert_allclose(policy.predict(observations, deterministic=True)[0], mode, rtol=1e-5, atol=1e-6)
    one = {key: part[0] for key, part in observations.items()} if isinstance(observations, dict) else observations[0]
    action, _ = policy.predict(one, deterministic=True)
    np.testing.assert_allclose(action, mode[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "action_space",
    [spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1, 1)), spaces.MultiDiscrete([3]), spaces.MultiBinary(1)],
)
def test_the_action_of_one_environment_keeps_the_axes_of_its_space(action_space: Space) -> None:
    assert action_space.contains(make(VECTOR, action_space).predict(np.zeros(3, np.float32))[0])


@every_combination
def test_acting_on_arrays_is_a_step(observation_space: Space, action_space: Space, recurrence: dict[str, Any]) -> None:
    policy = make(observation_space, action_space, **recurrence)
    rows = rows_of(observation_space, 5)
    observations = {key: part.numpy() for key, part in rows.items()} if isinstance(rows, dict) else rows.numpy()
    for _ in range(2):
        states = th.randn(5, policy.state_size)
        acted = policy.act(observations, states.numpy())
        with th.no_grad():
            for actual, expected in zip(acted, policy.step(rows, states), strict=True):
                close(th.from_numpy(actual), expected)
        policy.double().float()  # gives the parameters other memory
        policy.pi_head.weight.data.add_(0.1 * th.randn_like(policy.pi_head.weight))


class Doubled(nn.Module):
    def forward(self, input: th.Tensor) -> th.Tensor:
        return 2 * input


class DoubledExtractor(FlattenExtractor):
    def forward(self, observations: th.Tensor) -> th.Tensor:
        return 2 * observations


def other_values(policy: ACERPolicy) -> dict[str, th.Tensor]:
    return {name: th.randn_like(value) for name, value in policy.state_dict().items()}


def replaced_linear(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(linear.in_features, linear.out_features)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "other parameters": lambda policy: policy.load_state_dict(other_values(policy), assign=True),
    "another head": lambda policy: setattr(policy, "pi_head", replaced_linear(policy.pi_head)),
    "another critic head": lambda policy: setattr(policy.q_head, "q", replaced_linear(policy.q_head.q)),
    "another layer": lambda policy: policy.pi_net.__setitem__(0, replaced_linear(policy.pi_net[0])),
    "one more layer": lambda policy: policy.pi_net.append(Doubled()),
    "another activation": lambda policy: policy.pi_net.__setitem__(1, nn.ReLU()),
    "a parametrization": lambda policy: parametrize.register_parametrization(policy.pi_net[0], "weight", Doubled()),
    "no bias": lambda policy: setattr(policy.pi_net[0], "bias", None),
    "another features extractor": lambda policy: setattr(policy, "features_extractor", DoubledExtractor(VECTOR)),
    "a hook": lambda policy: policy.features_extractor.register_forward_hook(lambda *args: 2 * args[-1]),
}


def test_a_layer_that_is_put_into_an_empty_network_is_seen() -> None:
    policy: Any = make(net_arch=[])
    observations, states = rows_of(VECTOR, 5), np.zeros((5, 0), np.float32)
    before = policy.act(np.asarray(observations), states)[0]
    policy.pi_net.append(Doubled())
    after = policy.act(np.asarray(observations), states)[0]
    close(th.from_numpy(after), policy.step(observations, th.from_numpy(states))[0])
    assert abs(after - before).max() > 1e-3


def test_another_kind_of_head_is_used() -> None:
    policy: Any = make()
    observations = rows_of(VECTOR, 5)
    before = policy.get_distribution(observations).distribution.probs
    policy.pi_head = nn.Sequential(policy.pi_head)
    close(policy.get_distribution(observations).distribution.probs, before)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_all_methods_see_what_was_replaced_in_a_policy(change: Callable[[Any], Any]) -> None:
    policy: Any = make()
    observations, states = rows_of(VECTOR, 5), th.zeros(5, 0)

    def outputs() -> list[th.Tensor]:
        stats, acted = policy.step(observations, states)[0], policy.act(np.asarray(observations), states.numpy())[0]
        return [stats, th.from_numpy(acted), policy.predict_values(observations)]

    before = outputs()  # what is found once must not be kept
    change(policy)
    features = policy.features_extractor(observations)
    expected = policy.pi_head(policy.pi_net(features)).softmax(-1)
    value = (expected * policy.q_head.q(policy.q_net(features))).sum(-1, keepdim=True)
    for actual, each in zip(outputs(), (expected, expected, value), strict=True):
        close(actual, each)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(before, outputs(), strict=True))


def test_a_functional_call_uses_its_parameters() -> None:
    policy, other, observations = make(), make(), rows_of(VECTOR, 5)
    values = other_values(policy)
    other.load_state_dict(values)
    expected = other(observations, deterministic=True)
    for _ in range(2):
        unchanged = policy(observations, deterministic=True)
        called = th.func.functional_call(policy, values, (observations,), {"deterministic": True})
        for actual, each in zip(called, expected, strict=True):
            close(actual.float(), each.float())
        assert not th.equal(unchanged[1], called[1])


@with_and_without_recurrence
@every_action
def test_a_policy_of_float64_computes_in_float64(action_space: Space, recurrence: dict[str, Any]) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    given, rows, states = sequences(policy), np.random.default_rng(0).random((5, 3)), policy.initial_states(5)

    def outputs() -> list[th.Tensor]:
        found, acted = evaluate(policy, given), map(th.as_tensor, policy.act(rows, states))
        return [found.stats, found.q_values, policy.statistics(given), policy.states_after(given, 3), *acted]

    single = outputs()
    policy.double()
    for actual, expected in zip(outputs(), single, strict=True):
        assert actual.dtype == th.float64 or not actual.numel()
        close(actual.float(), expected)
    acted, stepped = policy.act(rows, states), policy.step(th.from_numpy(rows), th.from_numpy(states))
    for array, tensor in zip(acted, stepped, strict=True):
        close(th.as_tensor(array), tensor.detach(), 1e-12)


def test_acting_uses_masks_and_a_step_of_ones_own() -> None:
    class Uniform(MlpPolicy):
        def step(self, observations: Any, states: th.Tensor, masks: Any = None) -> tuple[th.Tensor, th.Tensor]:
            return th.full((len(observations), 4), 0.25), states

    observations, states = np.ones((2, 3), np.float32), np.zeros((2, 0), np.float32)
    masks = np.array([[True, False, True, False], [False, False, False, True]])
    stats, _ = make().act(observations, states, masks)
    assert ((stats > 0) == masks).all()
    np.testing.assert_allclose(stats.sum(-1), 1, rtol=1e-6)
    uniform = Uniform(VECTOR, DISCRETE, constant, ortho_init=False)
    assert (uniform.act(observations, states)[0] == 0.25).all()


def test_acting_uses_an_extract_features_of_ones_own() -> None:
    class Tripled(MlpPolicy):
        def extract_features(self, obs: Any, features_extractor: Any = None) -> Any:
            return 3 * super().extract_features(obs, features_extractor)

    policy, observations = Tripled(VECTOR, DISCRETE, constant, ortho_init=False), np.ones((2, 3), np.float32)
    acted, _ = policy.act(observations, np.zeros((2, 0), np.float32))
    close(th.from_numpy(acted), stats_of(policy, th.from_numpy(observations)))
    plain = make()
    plain.load_state_dict(policy.state_dict())
    close(th.from_numpy(acted), stats_of(plain, 3 * th.from_numpy(observations)))


class Keeping(FlattenExtractor):
    """Adds a multiple of the first observations that it got."""

    kept: th.Tensor | None = None

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space)
        self.scale = nn.Parameter(th.ones(()))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.kept = observations.mean(0) if self.kept is None else self.kept
        return observations + self.scale * self.kept


def test_a_module_may_keep_what_it_was_given_in_acting_for_training() -> None:
    policy = make(features_extractor_class=Keeping)
    policy.act(np.ones((2, 3), np.float32), np.zeros((2, 0), np.float32))
    found = evaluate(policy, sequences(policy))
    found.backward(th.randn_like(found.stats), th.ones_like(found.q_values))
    scale: Any = policy.features_extractor.scale
    assert scale.grad.item() != 0


def test_predictions_are_made_in_evaluation_mode() -> None:
    policy = make(VECTOR, ACTIONS["Box"], features_extractor_class=WithDropout)
    policy.set_training_mode(True)
    first, second = (policy.predict(np.ones((9, 3), np.float32), deterministic=True)[0] for _ in range(2))
    assert np.array_equal(first, second)


def test_sb3s_own_predictions_are_elements_of_the_action_space() -> None:
    assert set(make(VECTOR, spaces.Discrete(2, start=5))._predict(th.randn(20, 3)).tolist()) == {5, 6}


@with_and_without_recurrence
@every_action
def test_stochastic_predictions_have_the_distribution_of_the_policy(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    observation = rows_of(VECTOR, 1)
    assert isinstance(observation, th.Tensor)
    predicted, _ = policy.predict(observation.expand(10_000, -1).numpy())
    actions = th.from_numpy(policy.family.from_env(predicted))
    within_sampling_error(policy, actions, stats_of(policy, observation)[0].detach())


@with_and_without_recurrence
def test_predictions_follow_torchs_seed(recurrence: dict[str, Any]) -> None:
    policy, observations = make(**recurrence), np.zeros((100, 3), np.float32)
    drawn = []
    for seed in (1, 1, 2):
        th.manual_seed(seed)
        drawn.append(policy.predict(observations)[0])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


# The methods of SB3's policies


@with_and_without_recurrence
@every_action
def test_the_methods_of_sb3s_policies_agree_with_an_evaluation(action_space: Space, recurrence: dict[str, Any]) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    rows, states = rows_of(VECTOR, 2, 6), th.randn(6, policy.state_size)
    assert isinstance(rows, th.Tensor)
    stats, after = policy.step(rows[0], states)
    actions = policy.family.sample(stats.detach(), th.rand(6, policy.family.n_components, dtype=th.float64))
    given = sequences_of(rows, actions.unsqueeze(0), states, th.zeros(1, 6) > 0, rows[:0, 0], th.zeros(0).long())
    found = evaluate(policy, given)
    close(found.stats[0], stats)
    log_prob, entropy = policy.family.log_prob(stats, actions), policy.family.entropy(stats)

    values = policy.predict_values(rows[0], states)
    assert values.shape == (6, 1)
    close(values.squeeze(-1), found.values[0])
    close(policy.predict_values(rows[1], after).squeeze(-1), found.next_values[0])
    assert th.equal(policy.predict_values(rows[0], states.numpy()), values)  # as predict returns them

    distribution = policy.get_distribution(rows[0], states)
    actions = actions.to(distribution.sample().dtype)
    taken = actions.squeeze(-1) if policy.family.enumerable else actions
    close(distribution.log_prob(taken), log_prob, 1e-4)
    of_distribution = distribution.entropy()
    assert of_distribution is not None
    close(of_distribution, entropy, 1e-4)

    for each in (taken, actions):
        evaluated = policy.evaluate_actions(rows[0], each, states)
        assert evaluated[2] is not None
        assert [part.shape for part in evaluated if part is not None] == [(6, 1), (6,), (6,)]
        close(evaluated[0], values)
        close(evaluated[1], log_prob, 1e-4)
        close(evaluated[2], entropy, 1e-4)
        assert evaluated[1].requires_grad


@with_and_without_recurrence
@every_action
def test_without_a_state_the_methods_of_sb3s_policies_are_those_where_episodes_begin(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, **recurrence)
    rows, zeros = rows_of(VECTOR, 6), th.zeros(6, policy.state_size)
    actions, values, log_prob = policy.forward(rows)
    assert th.equal(values, policy.predict_values(rows))
    assert th.equal(values, policy.predict_values(rows, zeros))
    for states in ((), (zeros,)):
        evaluated = policy.evaluate_actions(rows, actions, *states)
        assert th.equal(evaluated[0], values)
        close(evaluated[1], log_prob, 1e-6)
        mode = policy.get_distribution(rows, *states).mode()
        assert th.equal(mode, policy.forward(rows, deterministic=True)[0].to(mode.dtype))
    close(mode.reshape(6, -1).float(), policy.family.mode(stats_of(policy, rows)).float())
    drawn = th.stack([policy.forward(rows)[0].double().reshape(6, -1) for _ in range(8)])
    assert (drawn.std(0) > 0).any()


@pytest.mark.parametrize("name", ACER.policy_aliases)
def test_every_policy_shows_the_arguments_of_all(name: str) -> None:
    shown, every = (inspect.signature(policy).parameters for policy in (ACER.policy_aliases[name], ACERPolicy))
    assert list(shown) == list(every)
    assert {"net_arch", "share_features_extractor", "lstm_hidden_size", "optimizer_kwargs"} <= set(shown)
    assert not any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in shown.values())


def test_what_reset_returns_is_refused_with_sb3s_own_explanation() -> None:
    policy = make()
    with pytest.raises(ValueError, match="mixing Gym API"):
        policy.predict((np.zeros(3, np.float32), {}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="observation must be an array or a dict of arrays, got the tuple"):
        policy.predict((np.zeros(3, np.float32),))  # type: ignore[arg-type]


# Construction


@every_combination
def test_a_loaded_policy_is_the_one_that_was_saved(
    observation_space: Space, action_space: Space, tmp_path: Path, recurrence: dict[str, Any]
) -> None:
    policy = make(
        observation_space,
        action_space,
        net_arch={"pi": [8], "qf": [8, 4]},
        activation_fn=nn.ReLU,
        log_std_init=-1.0,
        share_features_extractor=False,
        optimizer_class=th.optim.Adam,
        optimizer_kwargs={"eps": 1e-3},
        **recurrence,
    )
    with th.no_grad():
        for weight in list(policy.parameters()):
            weight.add_(0.1 * th.randn_like(weight))
    policy.save(str(tmp_path / "policy.pt"))
    loaded = type(policy).load(str(tmp_path / "policy.pt"), device="cpu")
    given = sequences(policy)
    for name, ours, theirs in zip(
        Evaluation._fields[:-1], evaluate(policy, given)[:-1], evaluate(loaded, given)[:-1], strict=True
    ):
        assert th.equal(ours, theirs), name
    assert type(loaded) is policy_class(observation_space)
    assert isinstance(loaded.optimizer, th.optim.Adam)
    assert loaded.optimizer.param_groups[0]["eps"] == 1e-3


def widths(network: nn.Module) -> list[int]:
    return [module.out_features for module in network.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("net_arch", "pi", "qf"),
    [
        (None, [64, 64], [64, 64]),
        ([], [], []),
        ([32, 16], [32, 16], [32, 16]),
        ({"pi": [8], "qf": [16, 4]}, [8], [16, 4]),
        ({"pi": [8], "vf": [16, 4]}, [8], [16, 4]),
        ({"qf": [16]}, [], [16]),
        ({"pi": [8]}, [8], []),
        ({}, [], []),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("action_space", "recurrence"),
    [(DISCRETE, {}), (ACTIONS["Box"], {}), (DISCRETE, RECURRENCES["LSTM"])],
    ids=["Discrete", "Box", "LSTM"],
)
def test_net_arch_gives_the_layers_of_both_networks(
    net_arch: Any, pi: list[int], qf: list[int], action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, net_arch=net_arch, activation_fn=nn.ReLU, **recurrence)
    assert widths(policy.pi_net) == pi
    assert widths(policy.q_net) == qf
    activations = [type(module) for module in (*policy.pi_net, *policy.q_net) if not isinstance(module, nn.Linear)]
    assert activations == [nn.ReLU] * (len(pi) + len(qf))
    found = evaluate(policy, sequences(policy))
    assert all(quantity.isfinite().all() for quantity in found[:-1])


@pytest.mark.parametrize("action_space", [DISCRETE, ACTIONS["Box"]], ids=["Discrete", "Box"])
def test_without_hidden_layers_each_head_has_the_width_of_its_input(action_space: Space) -> None:
    policy = make(VECTOR, action_space, net_arch=[], enable_critic_lstm=False, **RECURRENCES["LSTM"])
    head: Any = policy.q_head
    assert (policy.pi_head.in_features, head.get_submodule(head.last_layer).in_features) == (16, 3)
    found = evaluate(policy, sequences(policy))
    assert all(quantity.isfinite().all() for quantity in found[:-1])


def test_an_activation_function_may_be_made_by_a_function() -> None:
    net = make(activation_fn=partial(nn.LeakyReLU, 0.3)).pi_net
    assert [module.negative_slope for module in net if isinstance(module, nn.LeakyReLU)] == [0.3, 0.3]


@pytest.mark.parametrize(("latent_dim", "width"), [(48, 48), (128, 64)])
def test_the_hidden_layer_of_the_dueling_head_has_at_most_64_units(latent_dim: int, width: int) -> None:
    head = make(VECTOR, ACTIONS["Box"], net_arch=[latent_dim]).q_head
    assert isinstance(head, DuelingHead)
    assert head.action.out_features == width


def test_there_are_no_hidden_layers_behind_a_nature_cnn_by_default() -> None:
    policy = make(IMAGE)
    assert isinstance(policy.features_extractor, NatureCNN)
    assert widths(policy.pi_net) == widths(policy.q_net) == []
    assert widths(make(IMAGE, net_arch=[16]).pi_net) == [16]
    assert widths(make(IMAGE, features_extractor_class=FlattenExtractor, net_arch=None).pi_net) == [64, 64]
    assert widths(make(OBSERVATIONS["Dict"]).q_net) == [64, 64]


def test_a_list_of_one_dict_is_taken_for_the_dict_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="net_arch should be a dict"):
        policy = make(net_arch=[{"pi": [8], "vf": [4]}])
    assert (widths(policy.pi_net), widths(policy.q_net)) == ([8], [4])


@pytest.mark.parametrize(
    "net_arch",
    [
        {"pi": [8], "qf": [8], "vf": [8]},
        {"qf": [8], "vf": [8]},
        {"pi": [8], "q": [8]},
        {"shared": [8]},
        ["64"],
        [[64, 64]],
        [64, {"pi": [8]}],
        64,
        [True],
        [2**20 + 1],
    ],
    ids=str,
)
def test_another_form_of_net_arch_is_an_error_that_names_the_keys(net_arch: Any) -> None:
    with pytest.raises(ValueError, match=r"net_arch must .*keys pi and qf") as error:
        make(net_arch=net_arch)
    assert repr(net_arch) in str(error.value)


def test_an_unsupported_action_space_is_an_error() -> None:
    with pytest.raises(ValueError, match="action_space must be Discrete"):
        make(VECTOR, spaces.Tuple((spaces.Discrete(2),)))


@every_action
def test_features_extractors_are_shared_or_separate(action_space: Space) -> None:
    for share in (True, False):
        policy = make(IMAGE, action_space, share_features_extractor=share)
        given = sequences(policy, 2, 2)
        before = evaluate(policy, given)
        with th.no_grad():
            for weight in policy.q_features_extractor.parameters():
                weight.mul_(1.5)
        after = evaluate(policy, given)
        assert th.equal(before.stats, after.stats) != share
        assert not th.allclose(before.next_values, after.next_values)
        close(policy.predict_values(pick(given.observations, 0), given.states).squeeze(-1), after.values[0])
        n_weights = sum(weight.numel() for weight in NatureCNN(IMAGE).parameters())
        extractors = policy.features_extractor, policy.q_features_extractor
        weights = {weight for extractor in extractors for weight in extractor.parameters()}
        assert sum(weight.numel() for weight in weights) == (1 if share else 2) * n_weights
        assert weights <= set(policy.flat.parameters)


def gram(weight: th.Tensor) -> th.Tensor:
    """Products of the rows of a layer's weights with each other, or of its columns where those are fewer."""
    rows = weight.detach().flatten(1).double()
    rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
    return rows @ rows.T


def hidden_weights(policy: ACERPolicy) -> list[th.Tensor]:
    networks = (policy.features_extractor, policy.q_features_extractor, policy.pi_net, policy.q_net)
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    head = policy.q_head
    in_head = [] if isinstance(head, QHead) else [head.latent.weight[1:], head.action.weight]
    return [layer.weight for layer in layers] + in_head


def critics_outputs(policy: ACERPolicy) -> list[th.Tensor]:
    head = policy.q_head
    return [head.q.weight] if isinstance(head, QHead) else [head.latent.weight[:1], head.advantage.weight]


@pytest.mark.parametrize("observation_space", [VECTOR, IMAGE], ids=["vector", "image"])
@every_action
def test_layers_are_initialised_orthogonally(observation_space: Space, action_space: Space) -> None:
    policy = make(observation_space, action_space, ortho_init=True, net_arch=[32, 48], share_features_extractor=False)
    hidden, outputs = hidden_weights(policy), critics_outputs(policy)
    for weights, gain in (
        (hidden, 2**0.5),
        ([policy.pi_head.weight], 0.01),
        (outputs, 1.0 if policy.family.enumerable else 0.01),
    ):
        assert weights
        for weight in weights:
            products = gram(weight)
            close(products / gain**2, th.eye(len(products), dtype=th.float64), 1e-4)
    biases = [bias for name, bias in policy.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(bias.any() for bias in biases)
    uniform = make(observation_space, action_space, ortho_init=False, net_arch=[32, 48])
    products = gram(uniform.pi_net[0].weight)  # type: ignore[arg-type]
    assert (products - products.diagonal().diag()).abs().max() > 1e-3


@with_and_without_recurrence
@every_action
def test_a_new_policy_is_nearly_uniform(action_space: Space, recurrence: dict[str, Any]) -> None:
    """Which is what the small gain of its head is for: the outputs are hardly different from 0 in any state."""
    policy = make(VECTOR, action_space, ortho_init=True, **recurrence)
    stats = stats_of(policy, th.from_numpy(np.random.default_rng(0).uniform(-1, 1, (50, 3))))
    indifferent = policy.family.statistics(th.zeros(50, policy.family.n_outputs), policy.log_std)
    assert (stats - indifferent).abs().max() < 0.02
    assert not th.equal(stats, indifferent)


@with_and_without_recurrence
@pytest.mark.parametrize("learn", [True, False])
def test_the_standard_deviation_is_learnt_unless_learn_log_std_is_false(
    learn: bool, tmp_path: Path, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, ACTIONS["Box"], log_std_init=-1.0, learn_log_std=learn, **recurrence)
    policy.save(str(tmp_path / "policy.pt"))
    for each in (policy, MlpPolicy.load(str(tmp_path / "policy.pt"), device="cpu")):
        rows = rows_of(VECTOR, 5)
        before = stats_of(each, rows).detach()
        th.autograd.backward(stats_of(each, rows).square().sum())
        each.optimizer.param_groups[0]["lr"] = 0.1
        each.optimizer.step()
        mean, std = (stats_of(each, rows).detach() - before).chunk(2, -1)
        assert (mean != 0).all()
        assert (std != 0).all() if learn else (std == 0).all()


@with_and_without_recurrence
@pytest.mark.parametrize("action_space", [DISCRETE, ACTIONS["Box"]], ids=["Discrete", "Box"])
def test_the_optimizer_has_every_parameter_once_at_the_first_learning_rate(
    action_space: Space, recurrence: dict[str, Any]
) -> None:
    policy = make(VECTOR, action_space, optimizer_class=RMSpropTFLike, optimizer_kwargs={"alpha": 0.5}, **recurrence)
    (group,) = policy.optimizer.param_groups
    assert isinstance(policy.optimizer, RMSpropTFLike)
    assert (group["lr"], group["alpha"]) == (7e-4, 0.5)
    (vector,) = group["params"]
    assert vector.numel() == sum(parameter.numel() for parameter in policy.parameters())


@with_and_without_recurrence
def test_a_copy_of_a_policy_has_parameters_of_its_own(recurrence: dict[str, Any]) -> None:
    policy = make(**recurrence)
    copied = deepcopy(policy)
    before = [parameter.detach().clone() for parameter in copied.parameters()]
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1)
    assert all(map(th.equal, copied.parameters(), before))


@pytest.mark.parametrize("name", ["features_extractor", "pi_net", "pi_net.0", "pi_head"])
def test_a_forward_method_of_a_modules_own_is_called(name: str) -> None:
    policy = make(VECTOR, spaces.Discrete(2))
    observations, states = rows_of(VECTOR, 50), np.zeros((50, 0), np.float32)
    assert isinstance(observations, th.Tensor)
    before, _ = policy.act(observations.numpy(), states)
    module = policy.get_submodule(name)
    usual = module.forward
    module.forward = lambda features: usual(features).flip(-1) + 1
    acted, _ = policy.act(observations.numpy(), states)
    stepped, _ = policy.step(observations, th.from_numpy(states))
    np.testing.assert_allclose(acted, stepped.detach(), rtol=1e-6)
    assert np.abs(acted - before).max() > 1e-4


@pytest.mark.parametrize("use_bfloat16", [False, True])
def test_a_policy_for_images_may_be_of_float64(use_bfloat16: bool) -> None:
    policy = make(IMAGE, use_bfloat16=use_bfloat16).double()
    evaluation = evaluate(policy, sequences(policy))
    assert evaluation.stats.dtype == evaluation.q_values.dtype == th.float64


class InOrder(BaseFeaturesExtractor):
    """Concatenates the parts of an observation in the order in which they come."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        super().__init__(observation_space, 4)

    def forward(self, observations: dict[str, th.Tensor]) -> th.Tensor:
        return th.cat(list(observations.values()), -1)


def test_the_parts_of_an_observation_may_be_given_in_any_order() -> None:
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,)), y=spaces.Box(-1, 1, (2,)))
    policy = make(space, features_extractor_class=InOrder)
    x, y = np.array([0.1, 0.2]), np.array([-0.9, 0.3])
    stats = [policy.predict_statistics(each)[0] for each in ({"x": x, "y": y}, {"y": y, "x": x}, {"x": y, "y": x})]
    assert th.equal(stats[0], stats[1])
    assert not th.equal(stats[0], stats[2])


@pytest.mark.parametrize(
    "name",
    [
        "ortho_init",
        "learn_log_std",
        "dueling",
        "share_features_extractor",
        "shared_lstm",
        "enable_critic_lstm",
        "normalize_images",
    ],
)
def test_what_python_merely_takes_for_true_is_refused(name: str) -> None:
    arguments: dict[str, Any] = {name: "no"}
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        make(**arguments)


def test_a_width_may_be_1_or_2_to_the_20() -> None:
    assert split_net_arch([1, 2**20]) == ([1, 2**20], [1, 2**20])


def broken() -> Any:
    raise RuntimeError


class Strict(th.optim.SGD):
    def __init__(self, params: Any, lr: float, gain: float = 1.0) -> None:
        assert gain > 0
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features_extractor_class": nn.Linear}, "features_extractor_class must be a subclass of .*Linear"),
        ({"recurrent_class": nn.Linear}, "recurrent_class must be a subclass of .*Linear"),
        ({"optimizer_class": nn.Linear}, "optimizer_class must be a subclass of .*Linear"),
        ({"features_extractor_kwargs": {"width": 3}}, "features_extractor_kwargs must be arguments of Fl.* 'width'"),
        ({"optimizer_kwargs": {"params": []}}, "optimizer_kwargs must be without params, lr, .* got 'params'"),
        ({"optimizer_class": Strict, "optimizer_kwargs": {"gain": -1}}, "must fit Strict, got {'gain': -1}"),
        ({"activation_fn": broken}, "activation_fn must be a class of torch modules"),
        ({"lstm_hidden_size": 2**16 + 1}, "lstm_hidden_size must be an integer of at most 65536, got 65537"),
        ({"n_lstm_layers": 2**10 + 1}, "n_lstm_layers must be an integer of at most 1024, got 1025"),
    ],
)
def test_other_impossible_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_complex_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="observation must be finite in float32, got"):
        make().predict(np.full(3, 1j))


@pytest.mark.parametrize("policy_class", [MlpPolicy, CnnPolicy])
def test_parameters_go_through_a_vector(policy_class: type[ACERPolicy]) -> None:
    space = IMAGE if policy_class is CnnPolicy else VECTOR
    one, other = (policy_class(space, DISCRETE, constant) for _ in range(2))
    vector = one.parameters_to_vector()
    other.load_from_vector(vector)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert th.equal(ours, theirs)
    np.testing.assert_array_equal(other.parameters_to_vector(), vector)


def test_the_cnn_gets_images_divided_by_255() -> None:
    seen: list[th.Tensor] = []
    policy = CnnPolicy(IMAGE, DISCRETE, constant, use_bfloat16=False)
    policy.features_extractor.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    policy.step(th.full((1, *IMAGE.shape), 204, dtype=th.uint8), th.zeros(1, 0))
    close(seen[0], th.full_like(seen[0], 0.8))
