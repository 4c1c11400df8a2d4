"""Laws of LSTMs and of policies that have them: one step at a time is the same as all steps at once."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn

from sb3_acer.policies import (
    ACERPolicy,
    CnnLnLstmPolicy,
    CnnLstmPolicy,
    Evaluation,
    MlpGruPolicy,
    MlpLnLstmPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
)
from sb3_acer.recurrent import GRU, LSTM, Gated, Identity, LayerNormLSTM, make_segments
from sb3_acer.sequences import SequenceBatch
from tests.helpers import WithDropout, close, normal
from tests.reference import recurrent_step
from tests.test_policies import (
    ACTIONS,
    OBSERVATIONS,
    VECTOR,
    Obs,
    Space,
    constant,
    evaluate,
    every_action,
    fold,
    gram,
    make,
    pick,
    rows_of,
    sequences_of,
    stats_of,
)

REPEATABLE = settings(deadline=None, derandomize=True, database=None)

NETWORKS: dict[str, Callable[[int, int, int], Gated]] = {
    "LSTM": LSTM,
    "LSTM without biases": partial(LSTM, bias=False),
    "LayerNormLSTM": LayerNormLSTM,
    "GRU": GRU,
    "GRU without biases": partial(GRU, bias=False),
}
CLASSES: dict[str, type[Gated]] = {"LSTM": LSTM, "LayerNormLSTM": LayerNormLSTM, "GRU": GRU}
CORES: dict[str, dict[str, Any]] = {
    "an LSTM each": {},
    "a shared LSTM": {"shared_lstm": True, "enable_critic_lstm": False},
    "a critic without": {"enable_critic_lstm": False},
}
every_network = pytest.mark.parametrize("network_class", NETWORKS.values(), ids=NETWORKS)
every_class = pytest.mark.parametrize("lstm_class", CLASSES.values(), ids=CLASSES)
every_depth = pytest.mark.parametrize("n_layers", [1, 2], ids=["one layer", "two layers"])
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)
# Every class with every way to use it; depths and action spaces, which matter to neither, in turn.
COMBINATIONS: dict[str, tuple[type[Gated], int, dict[str, Any], Space]] = {
    f"{class_}, {core}, {n_layers}, {action}": (CLASSES[class_], n_layers, CORES[core], ACTIONS[action])
    for (class_, core), n_layers, action in zip(
        itertools.product(CLASSES, CORES), itertools.cycle((1, 2)), itertools.cycle(ACTIONS), strict=False
    )
}
every_combination = pytest.mark.parametrize(
    ("lstm_class", "n_layers", "core", "action_space"), COMBINATIONS.values(), ids=COMBINATIONS
)

# What becomes of an episode at a step.
CONTINUES, ENDS, TRUNCATED = range(3)


@pytest.fixture(autouse=True)
def _seed() -> None:
    th.manual_seed(0)


class Endings(NamedTuple):
    """Where in some sequences episodes end, and where a final observation follows."""

    ends: th.Tensor  # bool, [T, B]
    final_steps: th.Tensor  # [F]

    @property
    def episodes(self) -> list[list[int]]:
        """The rows of each episode in their order, read off step by step; those of final observations come last."""
        n_steps, n_sequences = self.ends.shape
        finals = {step: (n_steps + 1) * n_sequences + f for f, step in enumerate(self.final_steps.tolist())}
        found = []
        for b in range(n_sequences):
            rows: list[int] = []
            for t in range(n_steps + 1):
                row = t * n_sequences + b
                rows.append(row)
                if t < n_steps and self.ends[t, b]:
                    found.append([*rows, *([finals[row]] if row in finals else [])])
                    rows = []
            found.append(rows)
        return found


def endings_of(fates: th.Tensor, shuffle: int = 0) -> Endings:
    final_steps = (fates == TRUNCATED).flatten().nonzero().squeeze(-1)
    order = np.random.default_rng(shuffle).permutation(len(final_steps))
    return Endings(fates != CONTINUES, final_steps[th.from_numpy(order)])


def some_endings(n_steps: int, n_sequences: int, seed: int = 0) -> Endings:
    """The last two steps of all are truncated, and one in the middle."""
    rng = np.random.default_rng(seed)
    fates = rng.choice(3, (n_steps, n_sequences), p=[0.6, 0.2, 0.2])
    fates[n_steps // 2, 0] = fates[-1, -2:] = TRUNCATED
    return endings_of(th.from_numpy(fates))


@st.composite
def endings(draw: st.DrawFn, least: int = 0) -> Endings:
    n_steps, n_sequences = draw(st.integers(least, 6)), draw(st.integers(1, 4))
    size = n_steps * n_sequences
    fates = draw(st.lists(st.sampled_from([CONTINUES, ENDS, TRUNCATED]), min_size=size, max_size=size))
    return endings_of(th.tensor(fates, dtype=th.int64).view(n_steps, n_sequences), draw(st.integers(0, 9)))


# Segments


@settings(REPEATABLE, max_examples=150)
@given(endings())
def test_segments_are_the_episodes_and_each_row_is_in_one_of_them(given: Endings) -> None:
    (n_steps, n_sequences), n_finals = given.ends.shape, len(given.final_steps)
    places, length, n_segments = make_segments(*given)
    n_rows = (n_steps + 1) * n_sequences + n_finals
    assert places.shape == (n_rows,)
    assert len(given.episodes) == n_segments
    assert max(map(len, given.episodes)) == length
    segments: list[list[tuple[int, int]]] = [[] for _ in range(n_segments)]
    for row, place in enumerate(places.tolist()):
        position, segment = divmod(place, n_segments)
        segments[segment].append((position, row))
    for segment in segments:
        assert [position for position, _ in sorted(segment)] == list(range(len(segment)))
    laid_out = [[row for _, row in sorted(segment)] for segment in segments]
    assert sorted(laid_out) == sorted(given.episodes)
    assert [rows[0] for rows in laid_out[:n_sequences]] == list(range(n_sequences))


# Networks


def network_of(network_class: Callable[[int, int, int], Gated], n_layers: int) -> Gated:
    """In float64, with gains and biases that are not as good as 1 and 0 to begin with."""
    network = network_class(3, 4, n_layers).double()
    with th.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    return network


def unrolled(network: Gated, features: th.Tensor, states: th.Tensor, given: Endings) -> th.Tensor:
    """What the network is to compute of all rows: a loop over steps, masked where episodes end."""
    n_steps, n_sequences = given.ends.shape
    rows = features[: (n_steps + 1) * n_sequences].view(n_steps + 1, n_sequences, -1)
    finals = features[(n_steps + 1) * n_sequences :]
    outputs, of_finals = [], [features] * len(finals)
    for t in range(n_steps + 1):
        x, states = recurrent_step(network, rows[t], states)
        outputs.append(x)
        for f, step in enumerate(given.final_steps.tolist()):
            if step // n_sequences == t:
                of_finals[f] = recurrent_step(network, finals[f], states[step % n_sequences])[0]
        if t < n_steps:
            states = states * ~given.ends[t].unsqueeze(-1)
    return th.cat((*outputs, *(x.unsqueeze(0) for x in of_finals)))


def inputs_of(network: Gated, given: Endings) -> tuple[th.Tensor, th.Tensor]:
    """Features of all rows, and the states in which the sequences begin."""
    n_steps, n_sequences = given.ends.shape
    rng = np.random.default_rng(0)
    n_rows = (n_steps + 1) * n_sequences + len(given.final_steps)
    features, states = normal(rng, n_rows, network.input_size), normal(rng, n_sequences, network.state_size)
    return features.requires_grad_(), states.requires_grad_()


@every_depth
@every_network
def test_a_sequence_equals_a_loop_over_its_steps_and_so_do_its_gradients(
    network_class: Callable[[int, int, int], Gated], n_layers: int
) -> None:
    network = network_of(network_class, n_layers)

    @settings(REPEATABLE, max_examples=15)
    @given(endings())
    def law(given: Endings) -> None:
        features, states = inputs_of(network, given)
        found = network.sequence(features, states, *given)
        expected = unrolled(network, features, states, given)
        close(found, expected)
        weights = normal(np.random.default_rng(1), *found.shape)
        sources = (features, states, *network.parameters())
        gradients = [th.autograd.grad(outputs, sources, weights) for outputs in (found, expected)]
        for ours, theirs in zip(*gradients, strict=True):
            close(ours, theirs)

    law()


@every_depth
@every_network
def test_one_step_is_a_sequence_of_one_row(network_class: Callable[[int, int, int], Gated], n_layers: int) -> None:
    network = network_of(network_class, n_layers)
    alone = Endings(th.zeros(0, 5, dtype=th.bool), th.zeros(0, dtype=th.int64))
    features, states = inputs_of(network, alone)
    whole, step = network.sequence(features, states, *alone), network.step(features, states)
    for ours, by_hand in zip(step, recurrent_step(network, features, states), strict=True):
        close(ours, by_hand)
    close(whole, step[0])
    sources = (features, states, *network.parameters())
    of_step, of_whole = (th.autograd.grad(outputs.square().sum(), sources) for outputs in (step[0], whole))
    for ours, theirs in zip(of_step, of_whole, strict=True):
        close(ours, theirs)


@every_depth
def test_an_lstm_with_resets_equals_that_of_sb3_contrib(n_layers: int) -> None:
    network = network_of(LSTM, n_layers)
    assert isinstance(network, LSTM)
    given = some_endings(9, 4)._replace(final_steps=th.zeros(0, dtype=th.int64))
    features, states = inputs_of(network, given)
    outputs = network.sequence(features, states, *given)
    hidden, cell = (part.view(4, n_layers, 4).swapaxes(0, 1).contiguous() for part in states.chunk(2, -1))
    starts = th.cat((th.zeros(1, 4), given.ends.float())).double()
    theirs, _ = RecurrentActorCriticPolicy._process_sequence(
        features.view(10, 4, 3).swapaxes(0, 1).reshape(40, 3), (hidden, cell), starts.T.flatten(), network.lstm
    )
    close(outputs, theirs.view(4, 10, 4).swapaxes(0, 1).reshape(40, 4))


@every_depth
def test_a_layer_normalised_lstm_equals_that_of_stable_baselines(n_layers: int) -> None:
    network = network_of(LayerNormLSTM, n_layers)
    given = Endings(th.zeros(6, 2, dtype=th.bool), th.zeros(0, dtype=th.int64))
    features, states = inputs_of(network, given)
    outputs = network.sequence(features, states, *given)
    values = {name: value.detach().numpy() for name, value in network.named_parameters()}

    def layer_norm(x: Any, name: str) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * values[f"{name}.weight"] + values[f"{name}.bias"]

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    rows, parts = features.detach().numpy().reshape(7, 2, 3), np.split(states.detach().numpy(), 2 * n_layers, -1)
    for t in range(7):
        x = rows[t]
        for layer in range(n_layers):
            name, h, c = f"layers.{layer}", parts[layer], parts[n_layers + layer]
            gates = layer_norm(x @ values[f"{name}.input.weight"].T, f"{name}.input_norm")
            gates = gates + layer_norm(h @ values[f"{name}.hidden.weight"].T, f"{name}.hidden_norm")
            i, f, g, o = np.split(gates, 4, -1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            x = sigmoid(o) * np.tanh(layer_norm(c, f"{name}.cell_norm"))
            parts[layer], parts[n_layers + layer] = x, c
        close(outputs[2 * t : 2 * t + 2], th.from_numpy(x))


@every_depth
@every_network
def test_no_gradient_crosses_the_end_of_an_episode(
    network_class: Callable[[int, int, int], Gated], n_layers: int
) -> None:
    network = network_of(network_class, n_layers)

    @settings(REPEATABLE, max_examples=6)
    @given(endings())
    def law(given: Endings) -> None:
        features, states = inputs_of(network, given)
        outputs = network.sequence(features, states, *given)
        for rows in given.episodes:
            for place, row in enumerate(rows):
                of_features, of_states = th.autograd.grad(outputs[row].sum(), (features, states), retain_graph=True)
                before = set(rows[: place + 1])
                assert set(of_features.abs().sum(-1).nonzero().flatten().tolist()) == before
                reached = set(of_states.abs().sum(-1).nonzero().flatten().tolist())
                assert reached == ({rows[0]} if rows[0] < len(states) else set())

    law()


@pytest.mark.parametrize(("own", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)], ids=["LSTM", "GRU"])
def test_the_defaults_are_torchs(own: Any, torchs: Any) -> None:
    def options(module: nn.Module) -> dict[str, Any]:
        return {name: getattr(module, name) for name in ("num_layers", "bias", "dropout", "hidden_size", "input_size")}

    (module,) = own(3, 5).children()
    assert type(module) is torchs
    assert options(module) == options(torchs(3, 5))
    assert LayerNormLSTM(3, 5).n_layers == 1


@pytest.mark.parametrize("bias", [True, False], ids=["with biases", "without biases"])
@pytest.mark.parametrize("network_class", [LSTM, GRU])
def test_dropout_acts_on_sequences_in_training_and_never_on_steps(network_class: type[LSTM | GRU], bias: bool) -> None:
    network = network_class(3, 40, 2, bias=bias, dropout=0.5)
    assert any("bias" in name for name, _ in network.named_parameters()) == bias
    given = some_endings(5, 3)
    features, states = (each.detach().float() for each in inputs_of(network, given))
    network.eval()
    outputs = network.sequence(features, states, *given)
    network.train()
    dropped = network.sequence(features, states, *given)
    assert (dropped - outputs).abs().mean() > 1e-3
    assert (dropped != 0).all()  # and nothing is above the last
    steps = [network.step(features[:3], states)[0] for _ in range(2)]
    close(steps[0], outputs[:3], 1e-6)
    assert th.equal(*steps)


@every_depth
@every_network
def test_an_orthogonal_network_has_orthogonal_weights_and_no_bias(
    network_class: Callable[[int, int, int], Gated], n_layers: int
) -> None:
    network = network_of(network_class, n_layers)
    network.orthogonal_()
    matrices = 0
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:
            layer = nn.Linear(*reversed(parameter.shape))  # type: ignore[arg-type]
            layer.weight = nn.Parameter(parameter.detach())
            products = gram(layer.weight)
            close(products, th.eye(len(products), dtype=th.float64), 1e-6)
            matrices += 1
        elif "bias" in name:
            assert (parameter == 0).all()
    assert matrices == 2 * n_layers


# Policies


def recurrent_policy(
    action_space: Space = ACTIONS["Discrete"],
    lstm_class: type[Gated] = LSTM,
    n_layers: int = 1,
    observation_space: Space = VECTOR,
    **arguments: Any,
) -> ACERPolicy:
    arguments = {"recurrent_class": lstm_class, "n_lstm_layers": n_layers, "net_arch": [8], **arguments}
    policy = make(observation_space, action_space, **{"lstm_hidden_size": 5, **arguments})
    with th.no_grad():
        for lstm in (policy.pi_recurrent, policy.q_recurrent):
            for parameter in lstm.parameters():
                parameter.add_(0.3 * th.randn_like(parameter))  # so that the recurrent state matters
    return policy


def a_slot(policy: ACERPolicy, given: Endings) -> SequenceBatch:
    """Sequences that begin in the midst of episodes."""
    (n_steps, n_sequences), n_finals = given.ends.shape, len(given.final_steps)
    n_rows = (n_steps + 1) * n_sequences
    every = rows_of(policy.observation_space, n_rows + n_finals)
    rng = np.random.default_rng(0)
    noise = th.from_numpy(policy.family.noise(rng, n_steps * n_sequences))
    with th.no_grad():
        actions = policy.family.sample(stats_of(policy, pick(every, slice(n_steps * n_sequences))), noise)
    return sequences_of(
        fold(pick(every, slice(n_rows)), n_steps + 1, n_sequences),
        actions.view(n_steps, n_sequences, -1),
        0.5 * normal(rng, n_sequences, policy.state_size).float(),
        given.ends,
        pick(every, slice(n_rows, None)),
        given.final_steps,
    )


class Walk(NamedTuple):
    """A policy's outputs and recurrent states where it takes one step after the other."""

    stats: th.Tensor  # [T, B, P]
    values: th.Tensor  # [T, B]
    next_values: th.Tensor  # [T, B]
    before: th.Tensor  # recurrent states before each step and after the last, [T + 1, B, W]


def walk(policy: ACERPolicy, given: SequenceBatch) -> Walk:
    n_steps, n_sequences = given.ends.shape
    stats, values, next_values, before = [], [], [], [given.states]
    for t in range(n_steps):
        row, following = (pick(given.observations, each) for each in (t, t + 1))
        of_row, after = policy.step(row, before[-1])
        stats.append(of_row)
        values.append(policy.predict_values(row, before[-1]).squeeze(-1))
        before.append(after * ~given.ends[t].unsqueeze(-1))
        of_next = policy.predict_values(following, before[-1]).squeeze(-1).clone()
        for f, step in enumerate(given.final_steps.tolist()):
            if step // n_sequences == t:
                b = slice(step % n_sequences, step % n_sequences + 1)
                final = pick(given.final_observations, slice(f, f + 1))
                of_next[b] = policy.predict_values(final, after[b]).squeeze(-1)
        next_values.append(of_next)
    return Walk(*map(th.stack, (stats, values, next_values, before)))


def assert_steps_equal_the_sequence(policy: ACERPolicy, given: SequenceBatch) -> None:
    with th.no_grad():
        found, expected = evaluate(policy, given), walk(policy, given)
    for name in ("stats", "values", "next_values"):
        close(getattr(found, name), getattr(expected, name), 1e-5)
    close(policy.statistics(given), expected.stats, 1e-5)
    for n in range(1, len(given.ends) + 1):
        close(policy.states_after(given, n), expected.before[n], 1e-5)


@every_combination
def test_acting_step_by_step_equals_one_pass_over_the_sequences(
    lstm_class: type[Gated], n_layers: int, core: dict[str, Any], action_space: Space
) -> None:
    policy = recurrent_policy(action_space, lstm_class, n_layers, **core)
    given = a_slot(policy, some_endings(7, 4))
    assert_steps_equal_the_sequence(policy, given)
    going_on = endings_of(th.zeros(7, 4, dtype=th.int64))
    assert_steps_equal_the_sequence(policy, a_slot(policy, going_on))
    anew = evaluate(policy, given._replace(states=th.zeros_like(given.states)))
    continued = evaluate(policy, given)
    assert (anew.stats - continued.stats)[0].abs().max() > 1e-3
    matters = not isinstance(policy.q_recurrent, Identity) or policy.family.enumerable  # V = sum pi Q there
    assert ((anew.values - continued.values)[0].abs().max() > 1e-4) == matters


@settings(REPEATABLE, max_examples=40)
@given(endings(least=1), st.sampled_from(sorted(CLASSES)), st.sampled_from(sorted(CORES)), st.integers(1, 2))
def test_acting_step_by_step_equals_one_pass_wherever_episodes_end(
    given: Endings, lstm_class: str, core: str, n_layers: int
) -> None:
    policy = recurrent_policy(lstm_class=CLASSES[lstm_class], n_layers=n_layers, **CORES[core])
    assert_steps_equal_the_sequence(policy, a_slot(policy, given))


@pytest.mark.parametrize("share", [True, False], ids=["one extractor", "two extractors"])
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_all_kinds_of_observations_pass_through_a_recurrent_module(kind: str, share: bool) -> None:
    policy = recurrent_policy(observation_space=OBSERVATIONS[kind], share_features_extractor=share)
    assert_steps_equal_the_sequence(policy, a_slot(policy, some_endings(4, 3)))


@every_combination
def test_each_step_is_evaluated_as_if_alone_from_its_recurrent_state(
    lstm_class: type[Gated], n_layers: int, core: dict[str, Any], action_space: Space
) -> None:
    policy = recurrent_policy(action_space, lstm_class, n_layers, **core)
    given = a_slot(policy, some_endings(5, 3))
    whole, before = evaluate(policy, given), walk(policy, given).before.detach()
    rng = np.random.default_rng(0)  # what is drawn row by row is what is drawn at once
    for t, b in itertools.product(range(5), range(3)):
        truncated = given.final_steps == t * 3 + b
        row = sequences_of(
            pick(given.observations, slice(t, t + 2), slice(b, b + 1)),
            given.actions[t : t + 1, b : b + 1],
            before[t, b : b + 1],
            given.ends[t : t + 1, b : b + 1],
            pick(given.final_observations, truncated),
            th.zeros(int(truncated.sum()), dtype=th.int64),
        )
        alone = policy.evaluate(row, 3, rng)
        for name, of_all, of_one in zip(Evaluation._fields[:-1], whole[:-1], alone[:-1], strict=True):
            assert of_all[t, b].shape == of_one[0, 0].shape, name
            close(of_all[t, b], of_one[0, 0], 1e-5)


def test_warming_up_equals_acting_and_has_no_dropout() -> None:
    policy = recurrent_policy(n_layers=2, lstm_kwargs={"dropout": 0.5}, features_extractor_class=WithDropout)
    policy.set_training_mode(False)
    given = a_slot(policy, some_endings(5, 3))
    expected = walk(policy, given).before.detach()
    policy.set_training_mode(True)
    after = policy.states_after(given, 3)
    close(after, expected[3], 1e-5)
    assert not after.requires_grad
    assert policy.training


def test_warming_up_leaves_the_mode_as_it_was() -> None:
    policy = recurrent_policy()
    given = a_slot(policy, some_endings(5, 3))
    for training in (False, True):
        policy.set_training_mode(training)
        policy.states_after(given, 3)
        assert policy.training is training


def gradients_of(
    policy: ACERPolicy, states: th.Tensor, found: Iterable[tuple[Evaluation, Sequence[th.Tensor]]]
) -> list[th.Tensor]:
    """
    :param found: evaluations, and gradients with respect to their outputs
    """
    policy.flat.zero_grad()
    states.grad = None
    for evaluation, gradients in found:
        evaluation.backward(*gradients)
    return [tensor.grad.clone() for tensor in (states, *policy.parameters()) if tensor.grad is not None]


@every_combination
def test_gradients_through_time_equal_those_of_single_steps(
    lstm_class: type[Gated],
    n_layers: int,
    core: dict[str, Any],
    action_space: Space,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(th.autograd, "backward", partial(th.autograd.backward, retain_graph=True))  # steps share it
    policy = recurrent_policy(action_space, lstm_class, n_layers, **core)
    given = a_slot(policy, some_endings(5, 3))
    given.states.requires_grad_()
    rng, states, steps = np.random.default_rng(0), given.states, []
    for t in range(5):
        now = slice(t, t + 1)
        rows = pick(given.observations, slice(t, t + 2)), given.actions[now], states, given.ends[now]
        batch = sequences_of(*rows, th.zeros(0, 3), th.zeros(0, dtype=th.int64))
        steps.append(policy.evaluate(batch, 3, rng))
        states = policy.step(pick(given.observations, t), states)[1] * ~given.ends[t].unsqueeze(-1)
    at_once = evaluate(policy, given)
    outputs = at_once.stats, at_once.q_values, at_once.values
    gradients = [normal(rng, *output.shape).float() for output in outputs]
    of_steps = [[gradient[t : t + 1] for gradient in gradients] for t in range(5)]
    for ours, theirs in zip(
        gradients_of(policy, given.states, [(at_once, gradients)]),
        gradients_of(policy, given.states, zip(steps, of_steps, strict=True)),
        strict=True,
    ):
        close(ours, theirs, 1e-4)


@every_action
@every_core
def test_gradients_of_policy_and_critic_reach_the_recurrent_module_of_each(
    core: dict[str, Any], action_space: Space
) -> None:
    policy = recurrent_policy(action_space, share_features_extractor="shared_lstm" in core, **core)

    def reached(of_stats: float, of_q_values: float, of_values: float) -> set[str]:
        policy.flat.zero_grad()
        found, scales = evaluate(policy, a_slot(policy, some_endings(5, 3))), (of_stats, of_q_values, of_values)
        outputs = (found.stats, found.q_values, found.values)
        found.backward(*(scale * th.randn_like(output) for scale, output in zip(scales, outputs, strict=True)))
        learnt = {name for name, each in policy.named_parameters() if each.grad is not None and each.grad.any()}
        return {name.split(".")[0] for name in learnt} & {"pi_recurrent", "q_recurrent"}

    of_critic = {"an LSTM each": {"q_recurrent"}, "a shared LSTM": {"pi_recurrent"}, "a critic without": set()}
    assert reached(1, 0, 0) == {"pi_recurrent"}
    assert reached(0, 1, 0) == next(of_critic[name] for name in CORES if CORES[name] is core)
    if not policy.family.enumerable:
        assert reached(0, 0, 1) == reached(0, 1, 0)


@every_class
def test_policy_and_critic_do_not_read_each_others_recurrent_state(lstm_class: type[Gated]) -> None:
    policy = recurrent_policy(ACTIONS["Box"], lstm_class)
    given = a_slot(policy, some_endings(5, 3))
    before = evaluate(policy, given)
    of_policy, of_critic = given.states.chunk(2, -1)
    for states, same, other in (
        (th.cat((of_policy, th.zeros_like(of_critic)), -1), "stats", "values"),
        (th.cat((th.zeros_like(of_policy), of_critic), -1), "values", "stats"),
    ):
        after = evaluate(policy, given._replace(states=states))
        assert th.equal(getattr(before, same), getattr(after, same))
        assert not th.equal(getattr(before, other), getattr(after, other))


def test_a_critic_without_an_lstm_sees_the_features_alone() -> None:
    policy = recurrent_policy(ACTIONS["Box"], enable_critic_lstm=False)
    feed_forward = make(VECTOR, ACTIONS["Box"], net_arch=[8])
    feed_forward.q_net.load_state_dict(policy.q_net.state_dict())
    feed_forward.q_head.load_state_dict(policy.q_head.state_dict())
    rows = rows_of(VECTOR, 6)
    states = th.randn(6, policy.state_size)
    assert th.equal(policy.predict_values(rows, states), feed_forward.predict_values(rows, states[:, :0]))


@every_action
def test_a_feed_forward_policy_has_no_recurrent_state(action_space: Space) -> None:
    policy = make(VECTOR, action_space)
    states = policy.initial_states(4)
    assert (policy.state_size, states.shape) == (0, (4, 0))
    given = a_slot(policy, some_endings(5, 3))
    assert_steps_equal_the_sequence(policy, given)
    reversed_ = evaluate(policy, given._replace(observations=pick(given.observations, th.arange(5, -1, -1))))
    close(reversed_.stats[0], policy.step(pick(given.observations, 5), given.states)[0], 1e-6)


# Predictions


def as_numpy(rows: Obs) -> Any:
    return {key: part.numpy() for key, part in rows.items()} if isinstance(rows, dict) else rows.numpy()


@pytest.mark.parametrize(
    ("lstm_class", "core", "kind"),
    [
        (CLASSES[class_], CORES[core], kind)
        for (class_, core), kind in zip(
            itertools.product(CLASSES, CORES), itertools.cycle(["vector", "image", "vector", "Dict"]), strict=False
        )
    ],
    ids=str,
)
def test_predicting_with_the_returned_state_equals_acting(
    lstm_class: type[Gated], core: dict[str, Any], kind: str
) -> None:
    policy = recurrent_policy(ACTIONS["Box"], lstm_class, 2, OBSERVATIONS[kind], **core)
    given = a_slot(policy, some_endings(6, 3))._replace(states=th.zeros(3, policy.state_size))
    with th.no_grad():
        expected = walk(policy, given)
    state, starts = None, np.ones(3, bool)
    for t in range(6):
        observation = as_numpy(pick(given.observations, t))
        actions, state = policy.predict(observation, state, starts, deterministic=True)
        starts = given.ends[t].numpy()
        np.testing.assert_allclose(actions, policy.family.to_env(policy.family.mode(expected.stats[t]).numpy()), 1e-4)
        np.testing.assert_allclose(state[~starts], expected.before[t + 1][~starts], rtol=1e-4, atol=1e-6)


def test_predictions_are_sampled_from_the_distribution_of_the_given_state() -> None:
    policy, n = recurrent_policy(ACTIONS["Box"]), 4000
    observation, state = np.zeros((1, 3), np.float32), np.random.default_rng(0).normal(size=(1, policy.state_size))
    mean, std = policy.step(th.zeros(1, 3), th.from_numpy(state).float())[0].detach().numpy().reshape(2, 2)
    actions, _ = policy.predict(observation.repeat(n, 0), state.repeat(n, 0))
    np.testing.assert_array_less(np.abs(actions.mean(0) - mean), 4 * std / n**0.5)
    np.testing.assert_array_less(np.abs(actions.std(0) - std), 4 * std / (2 * n) ** 0.5)


@every_class
def test_the_recurrent_state_is_zero_where_an_episode_starts_and_kept_elsewhere(lstm_class: type[Gated]) -> None:
    policy = recurrent_policy(ACTIONS["Box"], lstm_class)
    observation = as_numpy(rows_of(VECTOR, 4))
    state = np.random.default_rng(0).normal(size=(4, policy.state_size)).astype(np.float32)
    given, starts = state.copy(), np.array([True, False, False, True])
    nothing = policy.predict(observation, None, deterministic=True)
    continued = policy.predict(observation, given, deterministic=True)
    some = policy.predict(observation, given, starts, deterministic=True)
    for none, everything, mixed in zip(nothing, continued, some, strict=True):
        np.testing.assert_array_equal(mixed, np.where(starts[:, np.newaxis], none, everything))
        assert (none != everything).all()
    np.testing.assert_array_equal(given, state)  # which is the caller's
    for same_as_none in (np.zeros_like(state), policy.initial_states(4)):
        for ours, none in zip(policy.predict(observation, same_as_none, deterministic=True), nothing, strict=True):
            np.testing.assert_array_equal(ours, none)
    all_start = policy.predict(observation, given, np.ones(4), deterministic=True)
    np.testing.assert_array_equal(all_start[1], nothing[1])


@pytest.mark.parametrize("kind", ["vector", "Dict"])
def test_one_observation_is_treated_as_one_environment(kind: str) -> None:
    policy = recurrent_policy(ACTIONS["Box"], observation_space=OBSERVATIONS[kind])
    rows = as_numpy(rows_of(OBSERVATIONS[kind], 1))
    one = {key: part[0] for key, part in rows.items()} if isinstance(rows, dict) else rows[0]
    state = np.random.default_rng(0).normal(size=(1, policy.state_size)).astype(np.float32)
    for start in (None, False, True):
        starts = None if start is None else np.array([start])
        actions, after = policy.predict(rows, state, starts, deterministic=True)
        for scalar_or_not in (start, starts):
            action, after_one = policy.predict(one, state, scalar_or_not, deterministic=True)  # type: ignore[arg-type]
            np.testing.assert_array_equal(action, actions[0])
            np.testing.assert_array_equal(after_one, after)


def test_a_feed_forward_policy_returns_the_state_that_it_was_given() -> None:
    policy, observation = make(), as_numpy(rows_of(VECTOR, 2))
    for state in (None, (np.ones(3), "anything"), np.ones((2, 7))):
        assert policy.predict(observation, state, np.zeros(2, bool))[1] is state


@pytest.mark.parametrize("shape", [(3, 20), (2, 19), (20,), (1, 2, 20), (2,), ()], ids=str)
def test_a_state_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    policy = recurrent_policy()
    assert policy.state_size == 20
    with pytest.raises(ValueError, match=r"state must be of shape \(2, 20\), got ") as error:
        policy.predict(as_numpy(rows_of(VECTOR, 2)), np.zeros(shape, np.float32))
    assert str(error.value).endswith(str(shape))


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), ()], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"recurrent_class": LSTM}], ids=["feed-forward", "LSTM"])
def test_episode_starts_of_another_shape_are_refused(arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"episode_start must be of shape \(2,\), got "):
        make(**arguments).predict(as_numpy(rows_of(VECTOR, 2)), None, np.zeros(shape, bool))


# Construction


NAMES: list[tuple[type[ACERPolicy], type[Gated], type[nn.Module], str]] = [
    (MlpLstmPolicy, LSTM, FlattenExtractor, "vector"),
    (MlpLnLstmPolicy, LayerNormLSTM, FlattenExtractor, "vector"),
    (CnnLstmPolicy, LSTM, NatureCNN, "image"),
    (CnnLnLstmPolicy, LayerNormLSTM, NatureCNN, "image"),
    (MultiInputLstmPolicy, LSTM, CombinedExtractor, "Dict"),
    (MlpGruPolicy, GRU, FlattenExtractor, "vector"),
]


@pytest.mark.parametrize(("policy_class", "lstm_class", "extractor", "kind"), NAMES, ids=lambda x: str(x))
def test_named_policies_only_set_defaults(
    policy_class: type[ACERPolicy], lstm_class: type[Gated], extractor: type[nn.Module], kind: str, tmp_path: Path
) -> None:
    policy = policy_class(OBSERVATIONS[kind], ACTIONS["Discrete"], constant)
    assert isinstance(policy.features_extractor, extractor)
    for lstm in (policy.pi_recurrent, policy.q_recurrent):
        assert isinstance(lstm, lstm_class)
        assert (lstm.hidden_size, lstm.n_layers) == (256, 1)
    assert policy.pi_recurrent is not policy.q_recurrent
    assert policy.state_size == 2 * lstm_class.n_parts * 256
    policy.save(str(tmp_path / "policy.pt"))
    given = a_slot(policy, some_endings(3, 2))
    for loaded in (policy_class.load(str(tmp_path / "policy.pt")), ACERPolicy.load(str(tmp_path / "policy.pt"))):
        for ours, theirs in zip(evaluate(policy, given)[:-1], evaluate(loaded, given)[:-1], strict=True):
            assert th.equal(ours, theirs)


@every_depth
@every_core
@every_class
def test_a_loaded_policy_with_an_lstm_is_the_one_that_was_saved(
    lstm_class: type[Gated], core: dict[str, Any], n_layers: int, tmp_path: Path
) -> None:
    policy = recurrent_policy(ACTIONS["MultiDiscrete"], lstm_class, n_layers, lstm_hidden_size=7, **core)
    policy.save(str(tmp_path / "policy.pt"))
    loaded = MlpPolicy.load(str(tmp_path / "policy.pt"), device="cpu")
    assert loaded.recurrent_options == policy.recurrent_options
    assert (loaded.q_recurrent is loaded.pi_recurrent) == ("shared_lstm" in core)
    given = a_slot(policy, some_endings(4, 3))
    for ours, theirs in zip(evaluate(policy, given)[:-1], evaluate(loaded, given)[:-1], strict=True):
        assert th.equal(ours, theirs)


def test_the_arguments_of_an_lstm_are_saved_with_the_policy(tmp_path: Path) -> None:
    arguments = {"bias": False, "dropout": 0.25}
    policy = MlpLstmPolicy(VECTOR, ACTIONS["Box"], constant, lstm_hidden_size=4, n_lstm_layers=2, lstm_kwargs=arguments)
    policy.save(str(tmp_path / "policy.pt"))
    for each in (policy, MlpLstmPolicy.load(str(tmp_path / "policy.pt"))):
        for lstm in (each.pi_recurrent, each.q_recurrent):
            assert isinstance(lstm, LSTM)
            assert (lstm.lstm.bias, lstm.lstm.dropout) == (False, 0.25)
    assert arguments == {"bias": False, "dropout": 0.25}


@pytest.mark.parametrize("ortho_init", [True, False])
def test_cells_with_chrono_initialisation_remember_for_up_to_the_given_number_of_steps(ortho_init: bool) -> None:
    options: dict[str, Any] = {"n_lstm_layers": 2, "lstm_hidden_size": 200, "lstm_kwargs": {"chrono_init": 40}}
    policy = MlpLstmPolicy(VECTOR, ACTIONS["Discrete"], constant, ortho_init=ortho_init, **options)
    assert isinstance(policy.pi_recurrent, LSTM)
    module = policy.pi_recurrent.lstm
    for layer in range(2):
        biases = getattr(module, f"bias_ih_l{layer}") + getattr(module, f"bias_hh_l{layer}")
        i, f, _, _ = biases.sigmoid().chunk(4)
        th.testing.assert_close(i + f, th.ones(200))
        remembered = 1 / (1 - f)  # the steps after which about 1 / e of a cell is left
        assert 2 - 1e-3 <= remembered.min() < 5
        assert 35 < remembered.max() <= 40 + 1e-3
        assert abs(remembered.mean() - 21) < 3  # they are spread evenly


@every_core
@every_class
def test_a_copy_of_a_policy_has_an_lstm_of_its_own(lstm_class: type[Gated], core: dict[str, Any]) -> None:
    policy = recurrent_policy(recurrent_class=lstm_class, **core)
    copied, given = deepcopy(policy), a_slot(policy, some_endings(4, 3))
    assert not set(copied.parameters()) & set(policy.parameters())
    assert (copied.q_recurrent is copied.pi_recurrent) == ("shared_lstm" in core)
    before = evaluate(copied, given)
    with th.no_grad():
        for weight in list(policy.parameters()):
            weight.add_(1)
    for ours, theirs in zip(before[:-1], evaluate(copied, given)[:-1], strict=True):
        assert th.equal(ours, theirs)


@every_core
@every_class
def test_the_optimizer_has_every_parameter_of_the_lstms_once(lstm_class: type[Gated], core: dict[str, Any]) -> None:
    policy = recurrent_policy(recurrent_class=lstm_class, **core)
    (vector,) = policy.optimizer.param_groups[0]["params"]
    assert vector.numel() == sum(parameter.numel() for parameter in policy.parameters())
    modules = {module for module in (policy.pi_recurrent, policy.q_recurrent) if not isinstance(module, Identity)}
    assert len(modules) == (1 if core else 2)


@every_core
@every_class
def test_lstms_are_initialised_orthogonally_unless_they_are_not_to_be(
    lstm_class: type[Gated], core: dict[str, Any]
) -> None:
    for ortho_init in (True, False):
        policy = MlpPolicy(VECTOR, ACTIONS["Box"], constant, recurrent_class=lstm_class, ortho_init=ortho_init, **core)
        for lstm in (policy.pi_recurrent, policy.q_recurrent):
            for name, parameter in lstm.named_parameters():
                if parameter.dim() == 2:
                    products = parameter.T @ parameter
                    close(products / products[0, 0], th.eye(len(products)), 1e-4) if ortho_init else None
                    assert ((products - products.diagonal().diag()).abs().max() < 1e-4) == ortho_init, name


class Stateless(LSTM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state_size = 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared_lstm": True}, "enable_critic_lstm must be False where shared_lstm is True, got True"),
        (
            {"shared_lstm": True, "enable_critic_lstm": False, "share_features_extractor": False},
            "share_features_extractor must be True where shared_lstm is True, got False",
        ),
        ({"lstm_hidden_size": 0}, "lstm_hidden_size must be .*at least 1, got 0"),
        ({"lstm_hidden_size": -3}, "lstm_hidden_size must be .*at least 1, got -3"),
        ({"lstm_hidden_size": 2.5}, "lstm_hidden_size must be .*at least 1, got 2.5"),
        ({"n_lstm_layers": 0}, "n_lstm_layers must be .*at least 1, got 0"),
        ({"n_lstm_layers": 1.5}, "n_lstm_layers must be .*at least 1, got 1.5"),
        ({"lstm_kwargs": []}, r"lstm_kwargs must be a dict of keyword arguments, or None, got \[\]"),
        ({"lstm_kwargs": {"drop_out": 0.5}}, r"lstm_kwargs must be arguments of LSTM, got \{'drop_out': 0.5\}"),
        ({"lstm_kwargs": {"hidden_size": 5}}, r"lstm_kwargs must be arguments of LSTM, got \{'hidden_size': 5\}"),
        ({"lstm_kwargs": {"batch_first": True}}, "lstm_kwargs must be arguments of LSTM, got"),
        ({"lstm_kwargs": {"chrono_init": 2}}, "chrono_init must be an integer of at least 3, got 2"),
        ({"lstm_kwargs": {"chrono_init": 9, "bias": False}}, "chrono_init must be None where bias is False, got 9"),
        (
            {"recurrent_class": LayerNormLSTM, "lstm_kwargs": {"dropout": 0.5}},
            r"lstm_kwargs must be arguments of LayerNormLSTM, got \{'dropout': 0.5\}",
        ),
        ({"recurrent_class": Stateless}, "recurrent_class must be a class of modules with a state, got .*Stateless"),
    ],
    ids=str,
)
def test_impossible_options_of_a_recurrent_module_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlpLstmPolicy(VECTOR, ACTIONS["Discrete"], constant, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lstm_hidden_size": 64},
        {"n_lstm_layers": 2},
        {"shared_lstm": True},
        {"enable_critic_lstm": False},
        {"shared_lstm": True, "enable_critic_lstm": False},
        {"lstm_kwargs": {"dropout": 0.5}},
    ],
    ids=str,
)
def test_a_feed_forward_policy_refuses_options_of_recurrent_modules(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recurrent_class must be set for the options of an LSTM, got ") as error:
        MlpPolicy(VECTOR, ACTIONS["Discrete"], constant, **arguments)
    assert all(f"{name!r}: {value!r}" in str(error.value) for name, value in arguments.items())
    assert "MlpPolicy" in str(error.value)


def test_recurrent_class_makes_any_policy_recurrent() -> None:
    named = MlpLstmPolicy(VECTOR, ACTIONS["Discrete"], constant, lstm_hidden_size=6, ortho_init=False)
    other = MlpPolicy(VECTOR, ACTIONS["Discrete"], constant, lstm_hidden_size=6, recurrent_class=LSTM)
    other.load_state_dict(named.state_dict())
    slot = a_slot(named, some_endings(4, 3))
    for ours, theirs in zip(evaluate(named, slot)[:-1], evaluate(other, slot)[:-1], strict=True):
        assert th.equal(ours, theirs)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_state_that_is_not_finite_is_refused(value: float) -> None:
    policy = MlpLstmPolicy(VECTOR, ACTIONS["Discrete"], constant, lstm_hidden_size=4)
    state = np.zeros((1, policy.state_size))
    state[0, 0] = value
    with pytest.raises(ValueError, match="state must be finite, got"):
        policy.predict(np.zeros(3), state)
