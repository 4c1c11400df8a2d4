"""
An update against the loss written out state by state (`tests.reference.update`), in float64; what weights of states do;
and the metrics against loops over the states.
"""

import math
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer import ACER, SequenceReplayBuffer
from sb3_acer.distributions import DiagonalGaussian, Family
from sb3_acer.policies import ACERPolicy, MlpPolicy
from sb3_acer.recurrent import GRU, LSTM, Recurrent
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Settings, Update, compute_update, metrics
from tests import reference
from tests.helpers import NormalisedFeatures, Rows, close, normal, updates_of

Space = spaces.Space[Any]

ACTIONS: dict[str, Space] = {
    "Discrete": spaces.Discrete(4, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": spaces.Box(np.array([-1, -2, -1], np.float32), np.array([3, np.inf, 0.5], np.float32)),
}
RECURRENT: dict[str, type[Recurrent] | None] = {"feed-forward": None, "LSTM": LSTM}
TOLERANCE = 1e-9

# gamma is a number that float32 has
TRUST_REGION = Settings(0.875, 0.7, 0.3, 0.5, 0.05, 3)
SETTINGS: dict[str, Settings] = {
    "a small trust region": TRUST_REGION,
    "a larger trust region": Settings(0.96875, 0.5, 0.05, 1.0, 0.5, 4),
    "a trust region that never binds": Settings(0.96875, 0.5, 0.05, 1.0, 1e9, 2),
    "no trust region": Settings(1.0, 1.5, 0.0, 2.0, None, 1),
}
every_action = pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
every_recurrence = pytest.mark.parametrize("recurrent_class", RECURRENT.values(), ids=RECURRENT)
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


class Problem(NamedTuple):
    """The arguments of an update."""

    policy: ACERPolicy
    average_policy: ACERPolicy
    batch: SequenceBatch
    settings: Settings
    seed: int = 0

    def update(self, **changes: Any) -> Update:
        """With some fields of the batch replaced."""
        batch = self.batch._replace(**changes)
        rng = np.random.default_rng([self.seed, 1])
        return compute_update(self.policy, self.average_policy, batch, self.settings, rng)

    def written_out(self) -> reference.WrittenOut:
        family = self.policy.family
        shape = (*self.batch.rewards.shape, 2 * self.settings.n_action_samples)
        noise = family.noise(np.random.default_rng([self.seed, 1]), *shape)
        learn_std = not isinstance(family, DiagonalGaussian) or family.learn_log_std
        return reference.update(self.policy, self.average_policy, self.batch, self.settings, noise, learn_std)


def random_policy(action_space: Space, recurrent_class: type[Recurrent] | None = None, **arguments: Any) -> ACERPolicy:
    """Small, in float64, and far from uniform."""
    if recurrent_class is not None:
        arguments = {"recurrent_class": recurrent_class, "lstm_hidden_size": 3, **arguments}
    observations = spaces.Box(-np.inf, np.inf, (3,))
    policy = MlpPolicy(observations, action_space, lambda _: 1e-3, **{"net_arch": [5], **arguments}).double()
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.4 * th.randn_like(parameter))
    return policy


def perturbed(policy: ACERPolicy) -> ACERPolicy:
    """For an average policy: near the policy, but another."""
    average = deepcopy(policy)
    with th.no_grad():
        for parameter in average.parameters():
            parameter.add_(0.2 * th.randn_like(parameter))
    return average


def random_stats(space: Space, rng: np.random.Generator, *shape: int) -> th.Tensor:
    if isinstance(space, spaces.Box):
        size = math.prod(space.shape)
        return th.cat((0.7 * normal(rng, *shape, size), (0.4 + 0.3 * normal(rng, *shape, size)).exp()), -1)
    return th.cat([(1.5 * normal(rng, *shape, n)).softmax(-1) for n in reference.sizes(space)], -1)


def random_batch(policy: ACERPolicy, n_steps: int, n_sequences: int, seed: int, ends: bool = True) -> SequenceBatch:
    """Sequences with terminated and truncated steps, the first and the last of a sequence among them."""
    rng, space = np.random.default_rng(seed), policy.action_space
    shape = (n_steps, n_sequences)
    if isinstance(space, spaces.Box):
        actions = normal(rng, *shape, math.prod(space.shape))
    else:
        actions = th.from_numpy(np.stack([rng.integers(n, size=shape) for n in reference.sizes(space)], -1))
    fates = th.from_numpy(rng.choice(3, shape, p=[0.6, 0.2, 0.2])) if ends else th.zeros(shape)
    if ends and n_steps > 3 and n_sequences > 2:
        fates[0, :2], fates[-1] = th.tensor([1, 2]), th.tensor([0, 1, 2])
    final_steps = (fates == 2).flatten().nonzero().squeeze(-1)
    final_steps = final_steps[th.from_numpy(rng.permutation(len(final_steps)))]
    return SequenceBatch(
        normal(rng, n_steps + 1, n_sequences, 3),
        actions,
        random_stats(space, rng, *shape),
        2 * normal(rng, *shape),
        fates == 1,
        fates == 2,
        normal(rng, len(final_steps), 3),
        final_steps,
        normal(rng, n_sequences, policy.state_size),
        th.from_numpy(rng.choice([0.0, 0.5, 1.0, 2.0], shape)),
        np.arange(n_sequences),
        np.zeros(n_sequences, int),
    )


def random_problem(
    action_space: Space,
    recurrent_class: type[Recurrent] | None = None,
    settings: Settings = TRUST_REGION,
    n_steps: int = 7,
    n_sequences: int = 3,
    seed: int = 0,
    **arguments: Any,
) -> Problem:
    th.manual_seed(seed)
    policy = random_policy(action_space, recurrent_class, **arguments)
    average, batch = perturbed(policy), random_batch(policy, n_steps, n_sequences, seed)
    return Problem(policy, average, batch, settings, seed)


def parameter_gradients(policy: ACERPolicy, update: Update) -> list[th.Tensor]:
    policy.flat.zero_grad()
    update.evaluation.backward(*update.gradients)
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def assert_is_the_written_out_update(problem: Problem) -> tuple[Update, reference.WrittenOut]:
    policy, batch = problem.policy, problem.batch
    update, expected = problem.update(), problem.written_out()
    for name in ("stats", "candidates", "weights", "candidate_values"):
        close(getattr(update.evaluation, name), expected.of_states(name), TOLERANCE)
    close(update.evaluation.values, expected.of_states("value"), TOLERANCE)
    close(update.evaluation.q_values, expected.of_states("q_value"), TOLERANCE)
    goes_on = ~batch.terminated
    close(update.evaluation.next_values[goes_on], expected.of_states("next_value")[goes_on], TOLERANCE)
    for name in ("average_stats", "ratio", "candidate_ratios"):
        close(getattr(update, name), expected.of_states(name), TOLERANCE)
    for name in ("q_ret", "advantage", "candidate_advantages", "g", "k", "z"):
        close(getattr(update, name), getattr(expected, name), TOLERANCE)
    assert all(ours is theirs for ours, theirs in zip(update.batch, batch, strict=True))
    assert math.isnan(update.grad_norm)
    outputs = (update.evaluation.stats, update.evaluation.q_values, update.evaluation.values)
    n_outputs = 2 if policy.family.enumerable else 3
    assert [each.shape for each in update.gradients] == [output.shape for output in outputs[:n_outputs]]
    constants = [*update.gradients, update.average_stats, update.ratio, update.candidate_ratios, update.q_ret]
    constants += [update.advantage, update.candidate_advantages, update.g, update.k, update.z]
    assert not any(constant.requires_grad for constant in constants)
    learnt = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    gradients = th.autograd.grad(expected.loss, list(learnt.values()), materialize_grads=True)
    for name, ours, theirs in zip(learnt, parameter_gradients(policy, update), gradients, strict=True):
        close(ours, theirs, TOLERANCE)
        assert theirs.abs().max() > 1e-6, f"{name} has no gradient: the test would show nothing of it"
    return update, expected


@every_action
@every_setting
@every_recurrence
def test_an_update_follows_the_gradient_of_the_written_out_loss(
    action_space: Space, recurrent_class: type[Recurrent] | None, settings: Settings
) -> None:
    problem = random_problem(action_space, recurrent_class, settings)
    update, _ = assert_is_the_written_out_update(problem)
    c, batch = settings.correction_term, problem.batch
    # The case is one in which every term matters.
    assert (update.ratio > c).any()
    assert (update.ratio < min(c, 1)).any()
    assert (update.candidate_ratios > c).any()
    assert (update.candidate_ratios < c).any()
    for ends in (batch.terminated, batch.truncated):
        assert ends[0].any()
        assert ends[-1].any()
        assert ends[1:-1].any()
    binds = (update.z != update.g).any(-1)
    assert binds.any() == (settings.delta is not None and settings.delta < 1e9)
    assert not binds.all()


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "networks of other widths": {"net_arch": {"pi": [4], "qf": [6]}},
    "networks of other depths": {"net_arch": {"pi": [4, 3], "qf": [4]}},
    "no hidden layers": {"net_arch": []},
    "another activation": {"net_arch": [4, 4], "activation_fn": th.nn.ReLU},
    "an activation that autograd differentiates": {"net_arch": [4, 4], "activation_fn": th.nn.ELU},
    "an LSTM before it": {"net_arch": [4], "activation_fn": th.nn.ELU, "recurrent_class": LSTM},
    "a shared LSTM": {"recurrent_class": LSTM, "shared_lstm": True, "enable_critic_lstm": False},
    "an LSTM for the policy alone": {"recurrent_class": LSTM, "enable_critic_lstm": False},
    "a dueling critic": {"dueling": True},
    "a dueling critic without hidden layers": {"net_arch": [], "dueling": True},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("action", ["Discrete", "Box"])
def test_an_update_of_any_architecture_follows_the_gradient_of_the_written_out_loss(
    action: str, architecture: dict[str, Any]
) -> None:
    architecture = {"lstm_hidden_size": 3, **architecture} if "recurrent_class" in architecture else architecture
    assert_is_the_written_out_update(random_problem(ACTIONS[action], n_steps=4, **architecture))


@every_action
def test_an_update_through_gated_recurrent_units_follows_the_gradient_of_the_written_out_loss(
    action_space: Space,
) -> None:
    assert_is_the_written_out_update(random_problem(action_space, GRU))


@every_recurrence
def test_a_fixed_standard_deviation_has_no_gradient_and_no_part_in_the_trust_region(
    recurrent_class: type[Recurrent] | None,
) -> None:
    problem = random_problem(ACTIONS["Box"], recurrent_class, learn_log_std=False)
    update, _ = assert_is_the_written_out_update(problem)
    for gradient in (update.g, update.k, update.z):
        mean, std = gradient.chunk(2, -1)
        assert (mean != 0).any()
        assert (std == 0).all()


@hypothesis_settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(
    st.sampled_from(sorted(ACTIONS)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.5, 10.0]),
)
def test_an_update_of_any_size_is_the_written_out_update(
    action: str, n_steps: int, n_sequences: int, seed: int, c: float
) -> None:
    settings = Settings(0.5, 1.0, 0.01, c, 0.1, 2)
    problem = random_problem(ACTIONS[action], None, settings, n_steps, n_sequences, seed)
    problem.batch.weights[0, 0] = 1  # else there may be no gradient at all
    update, expected = problem.update(), problem.written_out()
    for name in ("q_ret", "advantage", "g", "z"):
        close(getattr(update, name), getattr(expected, name), TOLERANCE)
    gradients = th.autograd.grad(expected.loss, list(problem.policy.parameters()))
    for ours, theirs in zip(parameter_gradients(problem.policy, update), gradients, strict=True):
        close(ours, theirs, TOLERANCE)


@every_action
def test_a_family_without_gradients_of_its_own_has_the_same_update(
    action_space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(action_space)
    expected = problem.update()
    for name in ("kl_gradient", "entropy_gradient", "score", "gain_gradient"):
        monkeypatch.setattr(problem.policy.family, name, getattr(Family, name).__get__(problem.policy.family))
    update = problem.update()
    for name in ("g", "k", "z"):
        close(getattr(update, name), getattr(expected, name), TOLERANCE)


@every_action
def test_computing_an_update_changes_no_parameter_and_gives_the_average_no_gradient(
    action_space: Space,
) -> None:
    problem = random_problem(action_space)
    before = [parameter.detach().clone() for policy in problem[:2] for parameter in policy.parameters()]
    update = problem.update()
    update.evaluation.backward(*update.gradients)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in problem.average_policy.parameters())
    for parameter, value in zip([p for policy in problem[:2] for p in policy.parameters()], before, strict=True):
        assert th.equal(parameter, value)


class Stub(gym.Env[Any, Any]):
    """Spaces to build networks for; never stepped."""

    def __init__(self, action_space: Space) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = action_space


def acer(problem: Problem, **arguments: Any) -> ACER:
    """An agent with the policies and settings of a problem, whose steps are those of gradient descent."""
    settings, options = problem.settings, problem.policy.recurrent_options
    agent = ACER(
        MlpPolicy,
        Stub(problem.policy.action_space),
        gamma=settings.gamma,
        q_coef=settings.q_coef,
        ent_coef=settings.ent_coef,
        correction_term=settings.correction_term,
        trust_region=settings.delta is not None,
        delta=1.0 if settings.delta is None else settings.delta,
        n_action_samples=settings.n_action_samples,
        learning_rate=0.5,
        lr_schedule="constant",
        policy_kwargs={
            "net_arch": [5],
            "optimizer_class": th.optim.SGD,
            "recurrent_class": problem.policy.recurrent_class,
            **options,
        },
        **{"max_grad_norm": None, "alpha": 0.75, "seed": problem.seed, "device": "cpu", **arguments},
    )
    agent.policy.double().load_state_dict(problem.policy.state_dict())
    agent.average_policy.double().load_state_dict(problem.average_policy.state_dict())
    agent._rngs = agent._rngs._replace(candidates=np.random.default_rng([problem.seed, 1]))
    return agent


@pytest.mark.parametrize("max_grad_norm", [None, 0.1], ids=["no clipping", "clipping"])
@every_action
@every_recurrence
def test_an_agent_steps_down_the_gradient_of_the_written_out_loss_and_then_moves_its_average(
    action_space: Space, recurrent_class: type[Recurrent] | None, max_grad_norm: float | None
) -> None:
    problem = random_problem(action_space, recurrent_class, n_steps=5)
    agent = acer(problem, max_grad_norm=max_grad_norm)
    before, average = list(problem.policy.parameters()), list(problem.average_policy.parameters())
    gradients = th.autograd.grad(problem.written_out().loss, before)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    update = agent.update(problem.batch)
    assert update.grad_norm == pytest.approx(norm, rel=TOLERANCE)
    scale = 1.0 if max_grad_norm is None else max_grad_norm / norm
    assert scale <= 1
    after = [old.detach() - 0.5 * scale * gradient for old, gradient in zip(before, gradients, strict=True)]
    for ours, theirs in zip(agent.policy.parameters(), after, strict=True):
        close(ours.detach(), theirs, TOLERANCE)
    for ours, old, new in zip(agent.average_policy.parameters(), average, after, strict=True):
        close(ours, 0.75 * old.detach() + 0.25 * new, TOLERANCE)


@pytest.mark.parametrize("action_space", [ACTIONS["Discrete"], ACTIONS["Box"]], ids=["Discrete", "Box"])
def test_the_average_policy_takes_over_running_means_and_averages_parameters(action_space: Space) -> None:
    kwargs = {"net_arch": [5], "features_extractor_class": NormalisedFeatures}
    agent = ACER(MlpPolicy, Stub(action_space), alpha=0.75, policy_kwargs=kwargs, learning_rate=0.1, seed=0)
    policy, average = agent.policy, agent.average_policy
    policy.set_training_mode(True)
    batch = random_batch(policy, 6, 3, 0)
    fields = batch._asdict().items()
    doubles: dict[str, Any] = {name: x for name, x in fields if isinstance(x, th.Tensor) and x.dtype == th.float64}
    batch = batch._replace(**{name: x.float() for name, x in doubles.items()})
    assert isinstance(batch.observations, th.Tensor)
    assert isinstance(batch.final_observations, th.Tensor)
    rows = th.cat((batch.observations.flatten(0, 1), batch.final_observations))
    mean, variance, seen = th.zeros(3), th.ones(3), 0
    for _ in range(3):
        old = [parameter.detach().clone() for parameter in average.parameters()]
        agent.update(batch)
        for ours, before, new in zip(average.parameters(), old, policy.parameters(), strict=True):
            close(ours, 0.75 * before + 0.25 * new.detach(), 1e-5)
        mean, variance, seen = 0.9 * mean + 0.1 * rows.mean(0), 0.9 * variance + 0.1 * rows.var(0), seen + 1
        for each in (policy, average):
            buffers = dict(each.named_buffers())
            close(buffers["features_extractor.norm.running_mean"], mean, 1e-5)
            close(buffers["features_extractor.norm.running_var"], variance, 1e-5)
            assert buffers["features_extractor.norm.num_batches_tracked"] == seen
    norm = average.features_extractor.norm
    assert isinstance(norm, th.nn.BatchNorm1d)
    assert norm.weight.std() > 0
    assert not average.training


# Metrics


def metrics_by_loops(problem: Problem, update: Update) -> dict[str, float]:
    """Means over all states of what is logged, one state after the other."""
    space, c, batch = problem.policy.action_space, problem.settings.correction_term, problem.batch
    sums: dict[str, float] = dict.fromkeys(
        (
            "policy_loss",
            "q_loss",
            "correction_loss",
            "entropy",
            "kl",
            "ratio_mean",
            "ratio_truncated",
            "trust_region_active",
            "trust_region_scale",
        ),
        0.0,
    )
    written_out = problem.written_out()
    n_steps, n_sequences = batch.rewards.shape
    for t in range(n_steps):
        for b in range(n_sequences):
            state, stats = written_out.states[t][b], written_out.states[t][b].stats.detach()
            advantage, action = written_out.advantage[t, b].item(), batch.actions[t, b]
            truncated = min(c, state.ratio) * advantage * reference.log_prob(space, stats, action).item()
            correction = reference.correction_gain(
                [reference.log_prob(space, stats, candidate).item() for candidate in state.candidates],
                state.weights,
                state.candidate_ratios,
                [q_value - state.value.item() for q_value in state.candidate_values],
                c,
            )
            g, k, z = (getattr(written_out, name)[t, b] for name in ("g", "k", "z"))
            sums["policy_loss"] -= truncated + correction
            sums["q_loss"] += (written_out.q_ret[t, b].item() - state.q_value.item()) ** 2 / 2
            sums["correction_loss"] -= correction
            sums["entropy"] += reference.entropy(space, stats).item()
            sums["kl"] += reference.kl(space, state.average_stats, stats).item()
            sums["ratio_mean"] += state.ratio
            sums["ratio_truncated"] += float(state.ratio > c)
            sums["trust_region_active"] += float(not th.equal(g, z))
            sums["trust_region_scale"] += ((g - z).norm() / k.norm()).item()
    n_states = n_steps * n_sequences
    q_ret, q_values = written_out.q_ret, written_out.of_states("q_value")
    return {
        **{name: total / n_states for name, total in sums.items()},
        "grad_norm": update.grad_norm,
        "explained_variance": 1 - (q_ret - q_values).var().item() / q_ret.var().item(),
    }


@every_action
@every_setting
def test_metrics_are_means_over_all_states(action_space: Space, settings: Settings) -> None:
    problem = random_problem(action_space, None, settings)
    update = problem.update()._replace(grad_norm=1.25)
    found = metrics(problem.policy.family, update, settings.correction_term)
    expected = metrics_by_loops(problem, update)
    assert found.keys() == expected.keys()
    assert all(type(value) is float for value in found.values())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name  # means are taken in single precision
    assert found["correction_loss"] != 0
    assert 0 < found["ratio_truncated"] < 1


@pytest.mark.parametrize("step", [-1.0, 1.0])
def test_the_trust_region_is_active_where_any_component_changes_in_any_direction(step: float) -> None:
    problem = random_problem(ACTIONS["Box"], None, SETTINGS["no trust region"])
    update = problem.update()
    z = update.g.clone()
    z[0, 0] += step
    z[3, 1, 2] += step
    found = metrics(problem.policy.family, update._replace(z=z), problem.settings.correction_term)
    assert found["trust_region_active"] == pytest.approx(2 / 21)
    lengths = math.sqrt(6) / update.k[0, 0].norm() + 1 / update.k[3, 1].norm()
    assert found["trust_region_scale"] == pytest.approx(lengths.item() / 21)


def test_nothing_of_equal_targets_can_be_explained() -> None:
    problem = random_problem(ACTIONS["Discrete"])
    update = problem.update()._replace(grad_norm=0.0)
    for target in (-0.3, 0.1, -1.0, 1 / 3):
        equal = th.full(update.q_ret.shape, target, dtype=th.float32)
        assert math.isnan(metrics(problem.policy.family, update._replace(q_ret=equal), 1.0)["explained_variance"])


def test_a_ratio_that_equals_the_truncation_constant_is_not_truncated() -> None:
    problem = random_problem(ACTIONS["Discrete"])
    update = problem.update()
    ratio = th.full_like(update.ratio, 0.5)
    ratio[0, 0], ratio[1, 1] = 0.75, 0.25
    assert metrics(problem.policy.family, update._replace(ratio=ratio), 0.5)["ratio_truncated"] == pytest.approx(1 / 21)


def test_metrics_are_finite_where_the_average_policy_is_the_policy() -> None:
    problem = random_problem(ACTIONS["Box"])
    problem = problem._replace(average_policy=deepcopy(problem.policy))
    update = problem.update()
    assert (update.k == 0).all()
    found = metrics(problem.policy.family, update._replace(grad_norm=0.0), 1.0)
    assert all(math.isfinite(value) for value in found.values())
    assert found["trust_region_scale"] == found["trust_region_active"] == 0


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_agent_logs_the_means_over_the_updates_after_a_rollout(env_id: str) -> None:
    kwargs = {"net_arch": [5]}
    agent = ACER("MlpPolicy", env_id, n_steps=4, replay_start=8, policy_kwargs=kwargs, seed=0, ent_schedule="linear")
    written, updates, rates = Rows(), [], []
    agent.set_logger(Logger(None, [written]))
    update = agent.update

    def watched(batch: SequenceBatch) -> Update:
        updates.append(update(batch))
        rates.append((agent.policy.optimizer.param_groups[0]["lr"], agent._current_progress_remaining))
        return updates[-1]

    agent.update = watched  # type: ignore[method-assign]
    agent.learn(40, log_interval=5)
    assert [row["time/total_timesteps"] for row in written.rows] == [20, 40]
    row, n_last = written.rows[-1], 1 + agent._n_replays
    assert 1 < n_last < len(updates) == row["train/n_updates"]
    each = [metrics(agent.policy.family, of_last, agent.correction_term) for of_last in updates[-n_last:]]
    for name in each[0]:
        assert row[f"train/{name}"] == pytest.approx(sum(of_one[name] for of_one in each) / n_last, rel=1e-9), name
        assert math.isfinite(row[f"train/{name}"]), name
    rate, progress = rates[-1]
    assert row["train/learning_rate"] == rate == pytest.approx(7e-4 * progress)
    assert row["train/ent_coef"] == pytest.approx(0.01 * progress)
    assert all(name.startswith(("train/", "time/", "rollout/")) for name in row)
    names = {name.removeprefix("train/") for name in row if name.startswith("train/")}
    assert names == {*each[0], "learning_rate", "ent_coef", "n_updates"}


# Weights of states


@every_action
@every_recurrence
def test_weights_multiply_each_states_gradient_and_nothing_else(
    action_space: Space, recurrent_class: type[Recurrent] | None
) -> None:
    problem = random_problem(action_space, recurrent_class)
    weights = problem.batch.weights
    weighted, plain = problem.update(), problem.update(weights=th.ones_like(weights))
    assert {0.0, 0.5, 1.0, 2.0} == set(weights.flatten().tolist())
    for ours, theirs in zip(weighted.gradients, plain.gradients, strict=True):
        assert th.equal(ours, theirs * weights.view(*weights.shape, *(1,) * (ours.dim() - 2)))
        assert (ours[weights == 0] == 0).all()
        assert (theirs != 0).any()
    for name in ("ratio", "candidate_ratios", "q_ret", "advantage", "candidate_advantages", "g", "k", "z"):
        assert th.equal(getattr(weighted, name), getattr(plain, name)), name


@every_action
@every_recurrence
def test_gradients_are_the_weighted_mean_of_those_of_single_states(
    action_space: Space, recurrent_class: type[Recurrent] | None
) -> None:
    problem = random_problem(action_space, recurrent_class, n_steps=3, n_sequences=2)
    of_states = []
    for state in range(6):
        alone = th.zeros(6, dtype=th.float64)
        alone[state] = 6
        of_states.append(parameter_gradients(problem.policy, problem.update(weights=alone.view(3, 2))))

    def assert_mean(weights: th.Tensor) -> None:
        found = parameter_gradients(problem.policy, problem.update(weights=weights))
        for i, ours in enumerate(found):
            each = zip(weights.flatten(), of_states, strict=True)
            close(ours, th.stack([weight * gradients[i] for weight, gradients in each]).mean(0), TOLERANCE)

    assert_mean(th.ones(3, 2, dtype=th.float64))
    assert_mean(th.tensor([[1.0, 2.0], [0.0, 1.0], [0.5, 0.0]], dtype=th.float64))
    assert_mean(th.tensor([[1.0, 0.0, 0.5], [2.0, 1.0, 0.0]], dtype=th.float64).t())  # not contiguous


class Weighted(SequenceReplayBuffer):
    """Replays as it does, but with weights of its own, drawn apart from the sequences."""

    weight: float | None = None
    """None for random ones"""

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None, rng: np.random.Generator | None = None
    ) -> SequenceBatch:
        batch = super().sample(batch_size, env, rng)
        shape = tuple(batch.weights.shape)
        weights = np.random.default_rng(0).random(shape) if self.weight is None else np.full(shape, self.weight)
        return batch._replace(weights=th.from_numpy(weights).float())


class Unweighted(Weighted):
    weight = 1.0


class Unreplayed(Weighted):
    weight = 0.0


def replayed(
    buffer_class: type[SequenceReplayBuffer] | None, env_id: str, **arguments: Any
) -> tuple[list[th.Tensor], list[Update], ACER]:
    """Parameters and updates of a short training by gradient descent."""
    agent = ACER(
        "MlpPolicy",
        env_id,
        n_steps=5,
        replay_start=5,
        batch_size=3,
        replay_buffer_class=buffer_class,
        policy_kwargs={"net_arch": [5], "optimizer_class": th.optim.SGD},
        **{"seed": 0, "alpha": 1.0, "learning_rate": 1e-2, **arguments},
    )
    updates = updates_of(agent)
    agent.learn(60)
    return [parameter.detach() for parameter in agent.policy.parameters()], updates, agent


def test_training_with_weights_of_one_is_training_without() -> None:
    ours, theirs = (replayed(buffer_class, "CartPole-v1")[0] for buffer_class in (Unweighted, None))
    assert all(th.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_replay_with_weights_of_zero_is_no_replay() -> None:
    ours, updates, _ = replayed(Unreplayed, "CartPole-v1")
    theirs, others, _ = replayed(None, "CartPole-v1", replay_ratio=0)
    assert len(updates) > 2 * len(others)
    assert all(th.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    with_replay, _, _ = replayed(None, "CartPole-v1")
    assert not th.equal(ours[0], with_replay[0])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_agent_honours_the_weights_of_its_buffer_and_says_where_sequences_came_from(env_id: str) -> None:
    _, updates, agent = replayed(Weighted, env_id)
    replays = [update for update in updates if update.batch.rewards.shape[1] == 3]
    assert len(replays) > 10
    for update in replays:
        batch, weights = update.batch, update.batch.weights
        assert weights.std() > 0.1
        th.testing.assert_close(update.gradients[0], -update.z * weights.unsqueeze(-1) / 15)
        stored = agent.replay_buffer.gather(batch.slots, batch.envs)
        # The row after the last step may have changed since: the next rollout begins there, after a reset perhaps.
        assert th.equal(stored.observations[:-1], batch.observations[:-1])  # type: ignore[index]
        for name in ("actions", "behaviour", "rewards"):
            assert th.equal(getattr(stored, name), getattr(batch, name)), name
    assert len({slot for update in replays for slot in update.batch.slots.tolist()}) > 3
