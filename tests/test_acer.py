"""The algorithm: what an update does, when it comes, what is kept, and what a user is told."""

import gc
import inspect
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import (
    FakeImageEnv,
    IdentityEnv,
    IdentityEnvBox,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, set_random_seed
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sb3_acer import ACER, SequenceReplayBuffer
from sb3_acer.arguments import OTHER_NAMES, UNUSED_METHODS
from sb3_acer.policies import ACERPolicy, MlpLstmPolicy, MlpPolicy
from sb3_acer.recurrent import LSTM
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Update, metrics
from tests.helpers import (
    Catch,
    Constant,
    Integers,
    NormalisedFeatures,
    Recall,
    Recorder,
    Shows,
    StopAt,
    TMaze,
    WithDropout,
    updates_of,
)

SMALL: dict[str, Any] = {
    "n_steps": 5,
    "replay_ratio": 1,
    "replay_start": 10,
    "seed": 0,
    "policy_kwargs": {"net_arch": [16]},
    "device": "cpu",
}


LSTM_KWARGS: dict[str, Any] = {"net_arch": [16], "lstm_hidden_size": 8}
RECURRENCES: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "LSTM": {"policy": "MlpLstmPolicy", "policy_kwargs": LSTM_KWARGS, "burn_in": 2},
}
with_and_without_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)


def small(env: Any = "CartPole-v1", policy: Any = "MlpPolicy", **changes: Any) -> ACER:
    return ACER(policy, env, **{**SMALL, **changes})


def flat(model: ACER) -> th.Tensor:
    return th.cat([parameter.detach().flatten().clone() for parameter in model.policy.parameters()])


def flat_average(model: ACER) -> th.Tensor:
    return th.cat([parameter.detach().flatten().clone() for parameter in model.average_policy.parameters()])


def trained(**changes: Any) -> ACER:
    """With a learning rate that has not come to 0, so that another update moves it."""
    return small(make_vec_env("CartPole-v1", n_envs=2, seed=0), **{"lr_schedule": "constant", **changes}).learn(80)


def a_batch(model: ACER) -> SequenceBatch:
    return model.replay_buffer.sample(3, None, np.random.default_rng(1))


# One update


def test_ratios_on_policy_are_one() -> None:
    model = small(make_vec_env("CartPole-v1", n_envs=2), replay_ratio=0, learning_rate=0.0, lr_schedule="constant")
    model.learn(40)
    ratio = model.update(model.replay_buffer.latest()).ratio
    np.testing.assert_allclose(ratio.numpy(), 1, atol=1e-5)


@with_and_without_recurrence
def test_a_batch_of_copies_gives_the_gradient_of_one(recurrence: dict[str, Any]) -> None:
    model = trained(learning_rate=0.0, alpha=1.0, max_grad_norm=None, **recurrence)  # both updates are of one policy
    batch = a_batch(model)
    copies = SequenceBatch(
        observations=th.cat([batch.observations] * 4, 1),  # type: ignore[list-item]
        actions=th.cat([batch.actions] * 4, 1),
        behaviour=th.cat([batch.behaviour] * 4, 1),
        rewards=th.cat([batch.rewards] * 4, 1),
        terminated=th.cat([batch.terminated] * 4, 1),
        truncated=th.cat([batch.truncated] * 4, 1),
        final_observations=batch.final_observations,
        final_steps=batch.final_steps,
        states=th.cat([batch.states] * 4),
        weights=th.cat([batch.weights] * 4, 1),
        slots=np.tile(batch.slots, 4),
        envs=np.tile(batch.envs, 4),
    )
    assert not len(batch.final_steps)
    of_batches = []
    for each in (batch, copies):
        model.update(each)
        of_batches.append([gradient.clone() for gradient in model.policy.flat.gradients()])
    for of_one, of_copies in zip(*of_batches, strict=True):
        assert of_one.any()
        th.testing.assert_close(of_copies, of_one, rtol=1e-4, atol=1e-6)


@with_and_without_recurrence
@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_the_average_policy_moves_by_one_minus_alpha(alpha: float, recurrence: dict[str, Any]) -> None:
    model = trained(alpha=0.99, replay_ratio=1, **recurrence)
    model.alpha = alpha
    before = flat_average(model)
    model.update(a_batch(model))
    np.testing.assert_allclose(
        flat_average(model).numpy(), (alpha * before + (1 - alpha) * flat(model)).numpy(), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("trust_region", [True, False])
def test_the_entropy_bonus_acts_with_and_without_the_trust_region(trust_region: bool) -> None:
    entropies = []
    for ent_coef in (0.0, 1.0):
        changes: dict[str, Any] = {"ent_coef": ent_coef, "learning_rate": 1e-2, "replay_ratio": 4}
        model = small(Constant(n_actions=4), trust_region=trust_region, **changes)
        with th.no_grad():
            model.policy.pi_head.bias.add_(th.tensor([2.0, 1.0, 0.0, -1.0]))
        model.learn(200)
        stats, _ = model.policy.step(th.ones(1, 1), th.zeros(1, 0))
        entropies.append(model.policy.family.entropy(stats).item())
    assert entropies[1] > entropies[0] + 0.1


def test_the_entropy_bonus_follows_its_schedule() -> None:
    batch = a_batch(trained())
    gradients = []
    for ent_coef, ent_schedule in ((0.25, "constant"), (1.0, "linear")):
        model = small(ent_coef=ent_coef, ent_schedule=ent_schedule)
        model._current_progress_remaining = 0.25
        gradients.append(model.update(batch).g)
    assert th.equal(*gradients)

    model = small(ent_coef=1.0, ent_schedule="linear").learn(203)  # the last rollout runs past the end
    assert model._current_progress_remaining == 0
    assert model.logger.name_to_value["train/ent_coef"] == 0


def test_the_trust_region_binds_when_delta_is_zero_and_not_when_it_is_wide() -> None:
    model = trained()
    batch = a_batch(model)
    batch.rewards.neg_()  # negative advantages lower probabilities: away from the average policy's
    for delta, binds in ((0.0, True), (1e9, False)):
        model.delta = delta
        update = model.update(batch)
        assert (metrics(model.policy.family, update, model.correction_term)["trust_region_active"] > 0) is binds
        assert (th.linalg.vecdot(update.z, update.k) <= delta + 1e-4 * update.g.abs().max()).all()


def test_a_standard_deviation_that_is_not_learnt_gives_the_trust_region_no_slack() -> None:
    model = small("Pendulum-v1", policy_kwargs={"net_arch": [16], "learn_log_std": False}, delta=0.0).learn(100)
    update = model.update(a_batch(model))
    mean, std = update.z.chunk(2, -1)
    assert (mean != 0).any()
    assert (std == 0).all()
    assert (th.linalg.vecdot(mean, update.k.chunk(2, -1)[0]) <= 1e-5 * update.g.abs().max()).all()


def test_gradients_are_clipped_to_the_norm_and_not_at_all_for_none() -> None:
    for max_grad_norm in (1e-3, None):
        model = trained(max_grad_norm=max_grad_norm)
        update = model.update(a_batch(model))
        gradients = [weight.grad for weight in model.policy.parameters() if weight.grad is not None]
        norm = th.nn.utils.get_total_norm(gradients)
        assert update.grad_norm > 1e-2
        assert norm.item() == pytest.approx(1e-3 if max_grad_norm else update.grad_norm, rel=1e-4)


@pytest.mark.parametrize("handled", [True, False])
def test_the_value_of_a_constant_reward_counts_a_time_limit_as_no_end_unless_told_so(handled: bool) -> None:
    """
    A reward of 1 for ever is worth 1 / (1 - gamma) = 10. With a terminal state after ten steps, which look alike, it is
    worth the mean of sum 0.9^t over 1 to 10 steps: 4.1.
    """
    arguments: dict[str, Any] = {"n_steps": 10, "gamma": 0.9, "learning_rate": 1e-2, "lr_schedule": "constant"}
    kwargs = {"handle_timeout_termination": handled}
    model = small(make_vec_env(Constant, n_envs=4), replay_ratio=4, replay_buffer_kwargs=kwargs, **arguments)
    model.learn(2000)
    reached = model.policy.predict_values(th.ones(1, 1), th.zeros(1, 0)).item()
    assert reached == pytest.approx(10.0 if handled else 4.1, abs=0.5)


@pytest.mark.parametrize("handled", [True, False])
def test_the_buffer_stores_a_time_limit_as_a_truncation_unless_told_otherwise(handled: bool) -> None:
    model = small(Constant(), n_steps=10, replay_buffer_kwargs={"handle_timeout_termination": handled}).learn(10)
    batch = model.replay_buffer.latest()
    last = [False] * 9 + [True]
    assert batch.truncated[:, 0].tolist() == (last if handled else [False] * 10)
    assert batch.terminated[:, 0].tolist() == ([False] * 10 if handled else last)
    assert len(batch.final_steps) == handled


@with_and_without_recurrence
def test_the_average_policy_begins_as_the_policy(recurrence: dict[str, Any]) -> None:
    model = small(**recurrence)
    assert th.equal(flat_average(model), flat(model))


# When


@pytest.mark.parametrize("replay_ratio", [0, 0.4, 3])
def test_replay_is_poisson_of_the_ratio_and_starts_with_replay_start(replay_ratio: float) -> None:
    counts: list[int] = []
    model = small(replay_ratio=replay_ratio, replay_start=50)
    model.update = lambda batch: counts.append(model.num_timesteps)  # type: ignore[assignment, method-assign, return-value]
    model._logs_now = lambda: False  # type: ignore[method-assign]  # an update that is none has nothing to log
    model.learn(1500)
    early = [step for step in counts if step < 50]
    assert early == [5, 10, 15, 20, 25, 30, 35, 40, 45]
    n_rollouts = (1500 - 45) // 5
    replayed = np.bincount(counts)[50::5] - 1
    assert len(replayed) == n_rollouts
    # Mean and variance are the ratio, within four deviations of either.
    assert abs(replayed.mean() - replay_ratio) <= 4 * np.sqrt(replay_ratio / n_rollouts)
    assert abs(replayed.var() - replay_ratio) <= 4 * np.sqrt((replay_ratio + 2 * replay_ratio**2) / n_rollouts)


def test_replay_starts_with_the_steps_in_the_buffer_not_with_those_of_training(tmp_path: Path) -> None:
    small(make_vec_env("CartPole-v1", 2)).learn(200).save(tmp_path / "agent")
    model = ACER.load(tmp_path / "agent", make_vec_env("CartPole-v1", 2), replay_ratio=9, replay_start=50)
    n_updates: list[int] = []
    update = model.update

    def watched(batch: SequenceBatch) -> Update:
        n_updates.append(model.replay_buffer.size())
        return update(batch)

    model.update = watched  # type: ignore[method-assign]
    model.learn(200, reset_num_timesteps=False)
    assert n_updates[:11] == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 50]


@pytest.mark.parametrize("learning_rate", [1e-3, lambda p: 1e-3 * p], ids=["number", "schedule"])
def test_the_learning_rate_falls_to_zero_and_never_below(learning_rate: Any) -> None:
    rates: list[float] = []

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:
            rates.append(self.model.policy.optimizer.param_groups[0]["lr"])

        def _on_step(self) -> bool:
            return True

    model = small(make_vec_env("CartPole-v1", n_envs=4), n_steps=7, learning_rate=learning_rate)
    model.learn(201, Watch())  # the last rollout runs past the end
    rates.append(model.policy.optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0


@pytest.mark.parametrize(
    ("learning_rate", "middle"), [(1e-3, 5e-4), (ConstantSchedule(1e-3), 5e-4), (lambda p: 0.1, 0.1)]
)
def test_lr_schedule_is_for_numbers_and_not_for_schedules(learning_rate: Any, middle: float) -> None:
    assert small(learning_rate=learning_rate).lr_schedule(0.5) == pytest.approx(middle)


class Memory(KVWriter):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        self.rows.append({key: value for key, value in key_values.items() if "memory" not in (key_excluded[key] or ())})

    def close(self) -> None:
        pass


def logged(n_timesteps: int, callback: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
    """What a run of rollouts of 5 steps logs."""
    model, memory = small(replay_ratio=0), Memory()
    model.set_logger(Logger(None, [memory]))
    model.learn(n_timesteps, callback, **kwargs)
    return memory.rows


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["time/total_timesteps"] for row in rows]


def test_without_an_interval_short_runs_are_logged_twenty_times_and_early() -> None:
    assert steps_of(logged(5 * 60)) == sorted({5, 50, *range(15, 301, 15)})  # early: the first and the tenth rollout
    rows = logged(5 * 9)
    assert steps_of(rows) == list(range(5, 46, 5))
    assert all("train/q_loss" in row for row in rows)


@pytest.mark.parametrize(("n_rollouts", "interval"), [(10, 1), (1000, 50), (1999, 99), (2000, 100), (10**6, 100)])
def test_an_automatic_log_interval_is_at_most_that_of_stable_baselines(n_rollouts: int, interval: int) -> None:
    model = small(make_vec_env("CartPole-v1", 2))
    model._set_log_interval("auto", n_rollouts * 10)
    assert model._log_interval == interval


def test_a_run_is_logged_when_it_ends() -> None:
    assert steps_of(logged(5 * 12, log_interval=100)) == [60]
    assert steps_of(logged(5 * 12, lambda found, _: found["self"].num_timesteps < 32, log_interval=4)) == [20, 32]
    assert steps_of(logged(5 * 12, log_interval=None)) == []


@pytest.mark.parametrize(
    "train_freq", [TrainFreq(10, TrainFrequencyUnit.STEP), TrainFreq(1, TrainFrequencyUnit.EPISODE)]
)
def test_another_train_freq_is_refused(train_freq: TrainFreq) -> None:
    model = small(n_steps=5)
    model.train_freq = train_freq  # type: ignore[assignment]
    with pytest.raises(ValueError, match="train_freq must be left alone, since rollouts have n_steps=5 steps, got"):
        model.learn(10)


def test_log_interval_counts_rollouts() -> None:
    written = logged(5 * 12, log_interval=4)
    assert steps_of(written) == [20, 40, 60]
    names = [
        "policy_loss",
        "q_loss",
        "correction_loss",
        "entropy",
        "kl",
        "ratio_mean",
        "ratio_truncated",
        "trust_region_active",
        "trust_region_scale",
        "grad_norm",
        "explained_variance",
        "learning_rate",
        "n_updates",
    ]
    assert all(np.isfinite(row[f"train/{name}"]) for row in written for name in names)
    assert written[0]["train/ratio_mean"] == pytest.approx(1, abs=0.2)


def test_callbacks_read_the_latest_values_of_training() -> None:
    seen = []

    def read(found: dict[str, Any], _: Any) -> bool:
        seen.append(dict(found["self"].logger.name_to_value))
        return True

    model = small(n_steps=5)
    model.learn(5 * 12, read, log_interval=2)
    of_training = {"train/policy_loss", "train/entropy", "train/n_updates", "train/learning_rate"}
    assert all(of_training <= now.keys() for now in seen[10:])
    assert len({now["train/policy_loss"] for now in seen[10:]}) == 5
    assert model.logger.name_to_value["train/n_updates"] == model._n_updates
    assert not any(name.startswith("rollout/") for name in model.logger.name_to_value)


def test_an_evaluation_does_not_write_the_values_of_training_again() -> None:
    def evaluate(found: dict[str, Any], _: Any) -> bool:
        model = found["self"]
        if model.num_timesteps == 33:
            model.logger.record("eval/mean_reward", 1.0)
            model.logger.dump(33)
        return True

    rows = logged(5 * 12, evaluate, log_interval=4)
    (row,) = [row for row in rows if "eval/mean_reward" in row]
    assert "train/q_loss" not in row
    assert all("train/q_loss" in each for each in rows if each is not row)


def test_means_of_the_log_leave_out_what_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = iter([{"explained_variance": np.nan}, {"explained_variance": 0.5}, {"explained_variance": 0.25}])
    model = trained()
    monkeypatch.setattr("sb3_acer.acer.metrics", lambda *_: next(rows))
    monkeypatch.setattr(model, "_logs_now", lambda: True)
    monkeypatch.setattr(model, "_batches", lambda *_: [a_batch(model)] * 3)
    model.train(1)
    assert model.logger.name_to_value["train/explained_variance"] == 0.375


def test_full_tensorboard_log_writes_histograms(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    small(full_tensorboard_log=True, tensorboard_log=str(tmp_path)).learn(60, log_interval=4, tb_log_name="run")
    events = event_accumulator.EventAccumulator(str(tmp_path / "run_1"), size_guidance={"histograms": 0})
    events.Reload()
    names = ("rewards", "advantages", "action_probabilities", "learning_rate", "observations")
    assert set(events.Tags()["histograms"]) == {f"histograms/{name}" for name in names}
    assert events.Histograms("histograms/learning_rate")[0].histogram_value.max == pytest.approx(7e-4 * 40 / 60)
    rewards = events.Histograms("histograms/rewards")
    assert [event.step for event in rewards] == [20, 40, 60]
    assert rewards[0].histogram_value.num == 5
    assert rewards[0].histogram_value.min == rewards[0].histogram_value.max == 1


def test_a_callback_that_stops_in_mid_rollout_loses_no_step() -> None:
    env = Recorder()
    model = small(env, replay_ratio=0)
    model.learn(1000, StopAt(8))
    assert model.num_timesteps == len(env.actions) == 8
    assert (model.replay_buffer.size(), model.replay_buffer.step) == (5, 3)
    model.learn(2, reset_num_timesteps=False)
    assert model.num_timesteps == len(env.actions) == 10
    rewards = model.replay_buffer.latest().rewards
    np.testing.assert_array_equal(rewards[:, 0].numpy(), [6, 7, 8, 9, 10])
    np.testing.assert_array_equal(model.replay_buffer.latest().terminated[:, 0].numpy(), [0, 1, 0, 0, 0])


def test_an_episode_that_ends_at_the_step_where_a_callback_stops_is_counted() -> None:
    model = small(Recorder(), replay_ratio=0)
    model.learn(1000, StopAt(7))
    assert model._episode_num == 1
    assert model.ep_info_buffer is not None
    assert [episode["l"] for episode in model.ep_info_buffer] == [7]


@pytest.mark.parametrize(("answer", "n_steps"), [(None, 20), (True, 20), (False, 1), (np.False_, 1)])
def test_a_function_as_callback_ends_training_by_false_alone(answer: Any, n_steps: int) -> None:
    assert small().learn(20, lambda local_names, global_names: answer).num_timesteps == n_steps


def test_a_reset_from_outside_truncates_the_episode_under_way() -> None:
    model = small(Recorder(), replay_ratio=0)
    model.learn(1000, StopAt(8))
    model.learn(2)  # resets the environment
    batch = model.replay_buffer.latest()
    np.testing.assert_array_equal(batch.truncated[:, 0].numpy(), [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(batch.final_steps.numpy(), [2])
    assert isinstance(batch.final_observations, th.Tensor)
    np.testing.assert_array_equal(batch.final_observations.numpy(), [[1, 8]])
    assert isinstance(batch.observations, th.Tensor)
    np.testing.assert_array_equal(batch.observations[3, 0].numpy(), [0, 8])


def test_an_interruption_right_after_a_reset_leaves_the_reset_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: SequenceReplayBuffer) -> None:
        raise KeyboardInterrupt

    model = small(Recorder(), replay_ratio=0)
    model.learn(1000, StopAt(8))
    with monkeypatch.context() as patch:
        patch.setattr(SequenceReplayBuffer, "end_episodes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.learn(2)
    model.learn(2, reset_num_timesteps=False)
    np.testing.assert_array_equal(model.replay_buffer.latest().truncated[:, 0].numpy(), [0, 0, 1, 0, 0])


def test_a_rollout_that_ends_where_a_callback_stops_is_one_for_callbacks_too() -> None:
    class Counts(StopAt):
        n_rollouts = 0

        def _on_rollout_end(self) -> None:
            self.n_rollouts += 1

    for step in (10, 12):  # at the end of the second rollout, and after it
        callback = Counts(step)
        small(n_steps=5, replay_ratio=0).learn(100, callback)
        assert callback.n_rollouts == 2


def test_the_action_of_the_step_where_a_callback_stops_is_stored_as_sampled() -> None:
    space = spaces.Box(-0.01, 0.01, (2,))
    model = small(Recorder(space), replay_ratio=0).learn(1000, StopAt(5))
    actions = model.replay_buffer.latest().actions
    assert model.replay_buffer.size() == 5
    assert (actions.abs() > 0.01).any(-1).all()  # the environment got them clipped


def test_rewards_are_stored_raw_where_wrappers_change_what_vec_normalize_made() -> None:
    model = small(VecFrameStack(VecNormalize(make_vec_env(Recorder, n_envs=2)), 3)).learn(100)
    np.testing.assert_array_equal(model.replay_buffer.latest().rewards[:, 0].numpy(), [46, 47, 48, 49, 50])


def test_the_row_after_a_rollout_is_each_environments_own_where_another_ones_episode_ends() -> None:
    env = DummyVecEnv([lambda: Recorder(length=3), lambda: Recorder(length=5)])
    model = small(env, n_steps=5).learn(10)  # ends with the second one's episode, after the first one's has ended
    observations = th.as_tensor(model.replay_buffer.latest().observations)
    assert observations[-1, 0].tolist() == [2, 5]


def test_all_episodes_that_end_at_the_step_where_a_callback_stops_are_counted() -> None:
    model = small(make_vec_env(Recorder, 2), replay_ratio=0).learn(1000, StopAt(7))
    assert model._episode_num == 2


def test_a_call_that_a_callback_stops_logs_its_end_where_an_earlier_one_did_too() -> None:
    model = small()
    model.learn(10, log_interval=1)
    written: list[int] = []
    model.dump_logs = lambda: written.append(model.num_timesteps)  # type: ignore[method-assign]
    model.learn(1000, StopAt(10), log_interval=100)
    assert written == [10]


# What is kept


@with_and_without_recurrence
def test_one_seed_gives_one_agent_whatever_else_draws_random_numbers(recurrence: dict[str, Any]) -> None:
    class Draw(BaseCallback):
        def _on_step(self) -> bool:
            np.random.rand()
            th.rand(1)
            return True

    runs = ((3, None), (3, Draw()), (4, None))
    agents = [flat(trained(seed=seed, replay_ratio=2, **recurrence).learn(40, callback)) for seed, callback in runs]
    assert th.equal(agents[0], agents[1])
    assert not th.equal(agents[0], agents[2])


def test_environments_in_processes_of_their_own_give_the_same_agent() -> None:
    agents = [
        flat(small(make_vec_env("CartPole-v1", 2, 0, vec_env_cls=vec_env_cls, vec_env_kwargs=kwargs)).learn(100))
        for vec_env_cls, kwargs in ((DummyVecEnv, {}), (SubprocVecEnv, {"start_method": "fork"}))
    ]
    assert th.equal(*agents)


def set_data(policy: nn.Module) -> None:
    for parameter in policy.parameters():
        parameter.data = parameter.data + 0.01


def set_vector(policy: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(policy.parameters()).detach() + 0.01, policy.parameters())


@pytest.mark.parametrize("give", [set_data, set_vector])
def test_parameters_that_were_given_other_memory_are_learnt(give: Callable[[nn.Module], None]) -> None:
    model = small().learn(40)
    give(model.policy)
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(40)
    assert all(not th.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))


def test_parameters_that_were_replaced_are_refused() -> None:
    model = small().learn(40)
    model.policy.pi_head = nn.Linear(64, 2)
    with pytest.raises(ValueError, match="policy must keep the parameters that it was built with"):
        model.learn(40)


def test_an_optimiser_that_was_replaced_is_refused() -> None:
    model = small().learn(20)
    model.policy.optimizer = th.optim.Adam(model.policy.parameters())
    with pytest.raises(ValueError, match=r"policy\.optimizer must be the one .* got Adam of other parameters"):
        model.learn(20)


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(cloudpickle.dumps(model))])
def test_a_copy_of_an_agent_learns_on_as_it_does(copied: Callable[[ACER], ACER]) -> None:
    model = small(make_vec_env("CartPole-v1", n_envs=2, seed=0)).learn(80)
    model.set_env(make_vec_env("CartPole-v1", n_envs=2, seed=1))
    other = copied(model)
    for each in (model, other):
        each.learn(200)
    assert th.equal(flat(model), flat(other))
    assert th.equal(flat_average(model), flat_average(other))


@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU, nn.ELU])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_policy_is_pickled(env_id: str, activation_fn: type[nn.Module]) -> None:
    policy = small(env_id, policy_kwargs={"activation_fn": activation_fn}).policy
    other = pickle.loads(pickle.dumps(policy))
    observations = np.stack([policy.observation_space.sample() for _ in range(5)])
    ours, theirs = (each.predict(observations, deterministic=True)[0] for each in (policy, other))
    np.testing.assert_array_equal(ours, theirs)


def test_parameters_that_are_frozen_in_a_copy_stay() -> None:
    model = small(policy_kwargs={"optimizer_class": th.optim.AdamW}).learn(40)
    other = deepcopy(model)
    other.policy.pi_head.requires_grad_(False)
    before = other.policy.pi_head.weight.clone()
    other.learn(80)
    assert th.equal(other.policy.pi_head.weight, before)


@with_and_without_recurrence
def test_save_and_load_restore_all_that_training_uses(recurrence: dict[str, Any], tmp_path: Path) -> None:
    arguments = {
        "gamma": 0.95,
        "q_coef": 0.3,
        "ent_coef": 0.02,
        "max_grad_norm": 3.0,
        "learning_rate": 1e-3,
        "lr_schedule": "double_linear_con",
        "rprop_alpha": 0.9,
        "rprop_epsilon": 1e-4,
        "buffer_size": 300,
        "replay_ratio": 2,
        "replay_start": 20,
        "correction_term": 5.0,
        "trust_region": False,
        "alpha": 0.8,
        "delta": 0.5,
        "batch_size": 4,
        "ent_schedule": "middle_drop",
    }
    model = trained(**arguments, **recurrence)
    model.save(tmp_path / "agent")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = ACER.load(tmp_path / "agent", env=make_vec_env("CartPole-v1", n_envs=2), device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    for name, value in arguments.items():
        if name != "lr_schedule":
            assert getattr(loaded, name) == value
    assert loaded.lr_schedule(0.75) == model.lr_schedule(0.75) == pytest.approx(5e-4)
    assert (loaded.num_timesteps, loaded._n_updates) == (model.num_timesteps, model._n_updates)
    assert loaded.burn_in == recurrence.get("burn_in", 0)
    assert th.equal(flat(loaded), flat(model))
    assert th.equal(flat_average(loaded), flat_average(model))
    assert not th.equal(flat(model), flat_average(model))
    for agent in (model, loaded):  # optimiser's slots, generators and buffer: what follows is the same as well
        agent._update_learning_rate = lambda optimizers: None  # type: ignore[method-assign]
        for _ in range(3):
            agent.update(agent._after_burn_in(agent.replay_buffer.sample(4, None, agent._rngs.replay)))
    assert th.equal(flat(loaded), flat(model))
    assert th.equal(flat_average(loaded), flat_average(model))


def test_a_shared_features_extractor_is_saved_once(tmp_path: Path) -> None:
    model = ACER("CnnPolicy", FakeImageEnv(), buffer_size=64, device="cpu")
    model.save(tmp_path / "agent")
    size = sum(4 * parameter.numel() for parameter in model.policy.parameters())
    with ZipFile(tmp_path / "agent.zip") as archive:
        assert archive.getinfo("policy.pth").file_size < 1.1 * size
    loaded = ACER.load(tmp_path / "agent", device="cpu")
    for name, values in model.policy.state_dict().items():
        assert th.equal(loaded.policy.state_dict()[name], values)


def test_arguments_of_load_replace_the_saved_ones(tmp_path: Path) -> None:
    trained().save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", env=gym.make("CartPole-v1"), lr_schedule="constant", n_steps=3, gamma=0.5)
    assert loaded.lr_schedule(0.1) == loaded.lr_schedule(1)
    assert loaded.learn(30).replay_buffer.n_steps == 3
    with pytest.raises(ValueError, match=r"gamma must be a number in \[0, 1\], got 2"):
        ACER.load(tmp_path / "agent", gamma=2)


def test_arguments_of_load_reach_the_optimiser_and_torch(tmp_path: Path) -> None:
    trained().save(tmp_path / "agent")
    with pytest.warns(DeprecationWarning, match="num_procs") as warned:
        loaded = ACER.load(tmp_path / "agent", rprop_alpha=0.5, rprop_epsilon=0.1, num_procs=2)
    assert warned[0].filename == __file__
    assert th.get_num_threads() == 2
    (group,) = loaded.policy.optimizer.param_groups
    assert (group["alpha"], group["eps"]) == (0.5, 0.1)


def test_optimizer_kwargs_come_before_arguments_of_the_same_meaning_also_in_load(tmp_path: Path) -> None:
    model = small(policy_kwargs={"optimizer_kwargs": {"alpha": 0.5}}, rprop_alpha=0.9)
    model.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", rprop_alpha=0.9, rprop_epsilon=0.1)
    groups = [agent.policy.optimizer.param_groups[0] for agent in (model, loaded)]
    assert [group["alpha"] for group in groups] == [0.5, 0.5]
    assert groups[1]["eps"] == 0.1


class WithNovelty(ACER):
    """With a network and an optimiser of its own."""

    def _setup_model(self) -> None:
        super()._setup_model()
        self.novelty = th.nn.Linear(4, 2)
        self.novelty_optimiser = th.optim.Adam(self.novelty.parameters())

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "novelty", "novelty_optimiser"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        parts, tensors = super()._get_torch_save_params()
        return [*parts, "novelty", "novelty_optimiser"], tensors


def test_a_subclass_saves_and_loads_optimisers_of_its_own(tmp_path: Path) -> None:
    model = WithNovelty("MlpPolicy", "CartPole-v1", **SMALL)
    model.novelty(th.ones(4)).sum().backward()
    model.novelty_optimiser.step()
    model.save(tmp_path / "agent")
    loaded = WithNovelty.load(tmp_path / "agent")
    assert th.equal(loaded.novelty.weight, model.novelty.weight)
    ours, theirs = (agent.novelty_optimiser.state_dict()["state"][0]["exp_avg"] for agent in (model, loaded))
    assert th.equal(theirs, ours)
    with pytest.raises(ValueError, match="'novelty'"):
        loaded.set_parameters({"novelty": {"weight": th.ones(3), "bias": th.ones(2)}}, exact_match=False)


def test_arguments_that_load_cannot_replace_are_refused(tmp_path: Path) -> None:
    trained().save(tmp_path / "agent")
    for name, value in (("policy", "MlpPolicy"), ("_init_setup_model", True), ("gama", 0.9)):
        arguments: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"keyword arguments of load must be arguments .*, got '{name}'"):
            ACER.load(tmp_path / "agent", **arguments)
    with pytest.raises(ValueError, match="lr_schedule must be one of"):
        ACER.load(tmp_path / "agent", lr_schedule=lambda progress: 1e-3)
    with pytest.raises(ValueError, match="verbose must be an integer of at least 0, got 'x'"):
        ACER.load(tmp_path / "agent", verbose="x")
    small(buffer_size=40).save(tmp_path / "with buffer", include=["replay_buffer"])
    assert ACER.load(tmp_path / "with buffer", buffer_size=40).replay_buffer.buffer_size == 40
    (tmp_path / "old.pkl").write_bytes(b"old")
    with pytest.raises(ValueError, match=r"old.pkl could not be loaded: .* \(load_stable_baselines loads agents of"):
        ACER.load(tmp_path / "old.pkl")
    with pytest.raises(ValueError, match="buffer_size must be 40, as in the saved replay buffer, got 400"):
        ACER.load(tmp_path / "with buffer", buffer_size=400)


def test_a_replay_buffer_saved_with_an_agent_moves_to_the_agents_device(tmp_path: Path) -> None:
    model = small().learn(20)
    model.replay_buffer.device = th.device("meta")  # a device of the machine that saved it
    model.save(tmp_path / "agent", include=["replay_buffer"])
    loaded = ACER.load(tmp_path / "agent", model.env, device="cpu")
    assert loaded.replay_buffer.device == loaded.device
    loaded.learn(20)


def test_parameters_and_the_optimisers_state_are_copies_without_the_rest_of_their_vector() -> None:
    model = small(policy_kwargs={"net_arch": [64, 64]})
    parameters: Any = model.get_parameters()
    n_bytes = sum(value.nbytes for part in ("policy", "average_policy") for value in parameters[part].values())
    assert len(pickle.dumps(parameters)) < 1.5 * n_bytes
    parameters = model.learn(20).get_parameters()
    expected = deepcopy(parameters)
    perturbed = {name: value + 0.01 for name, value in model.policy.named_parameters()}
    model.set_parameters({"policy": perturbed}, exact_match=False)  # with a gradient history
    for _ in range(2):
        model.learn(20)
        model.set_parameters(parameters)
        for now in (parameters, model.get_parameters()):
            for part in ("policy", "average_policy"):
                th.testing.assert_close(now[part], expected[part], rtol=0, atol=0)
            states = [each["policy.optimizer"]["state"] for each in (now, expected)]
            th.testing.assert_close(*states, rtol=0, atol=0)


def test_what_acer_gives_itself_is_not_given_again() -> None:
    for name, twice in (("replay_buffer_kwargs", "n_steps"), ("policy_kwargs", "lr_schedule")):
        arguments: dict[str, Any] = {name: {twice: 5}}
        with pytest.raises(ValueError, match=f"{name} must be without .*{twice}.*, which are given by ACER itself"):
            small(**arguments)
    with pytest.raises(ValueError, match=r"optimizer_kwargs must be without .*lr, which are given by ACER itself, got"):
        small(policy_kwargs={"optimizer_kwargs": {"lr": 1e-3}})


@pytest.mark.parametrize("optimizer_class", [th.optim.LBFGS, th.optim.SparseAdam])
def test_optimizers_that_an_update_cannot_use_are_refused(optimizer_class: type[th.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"optimizer_class must be one whose step needs neither sparse .*, got"):
        small(policy_kwargs={"optimizer_class": optimizer_class})


@pytest.mark.parametrize("force_reset", [True, False])
@pytest.mark.parametrize("hook", ["_on_rollout_start", "_on_step", "_on_rollout_end"])
def test_another_environment_within_a_call_of_learn_is_refused(hook: str, force_reset: bool) -> None:
    model, other = small(make_vec_env(Recorder, 2)), make_vec_env(Recorder, 2)

    class Curriculum(BaseCallback):
        def _on_step(self) -> bool:
            return True

    def set_env(callback: BaseCallback) -> bool:
        if callback.num_timesteps >= 20:
            callback.model.set_env(other, force_reset)
        return True

    setattr(Curriculum, hook, set_env)
    with pytest.raises(ValueError, match="env must be left alone within learn, but a callback has reset it"):
        model.learn(100, Curriculum())
    model.learn(40, reset_num_timesteps=False)
    assert other.get_attr("clock")[0][1] >= 20  # steps


def test_load_and_set_env_take_the_id_of_an_environment_too(tmp_path: Path) -> None:
    small().learn(40).save(tmp_path / "agent")
    model = ACER.load(tmp_path / "agent", "CartPole-v1").learn(20, reset_num_timesteps=False)
    model.set_env("CartPole-v0")
    model.learn(20, reset_num_timesteps=False)
    assert model.num_timesteps == 80
    assert model.env is not None
    assert model.env.get_attr("spec")[0].id == "CartPole-v0"
    unknown = r"^env must be an environment, or the id of a registered one.*Nowhere-v0"
    with pytest.raises(ValueError, match=unknown):
        model.set_env("Nowhere-v0")
    with pytest.raises(ValueError, match=r"env must be an environment of the agent's spaces, Box.*, got \(Box"):
        model.set_env("Acrobot-v1")
    with pytest.raises(ValueError, match=unknown):
        ACER.load(tmp_path / "agent", "Nowhere-v0")


def test_that_an_environment_is_made_of_its_id_is_printed_if_verbose_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small("CartPole-v1", verbose=1)
    assert "Creating environment from the given name 'CartPole-v1'" in capsys.readouterr().out
    small("CartPole-v1").save(tmp_path / "agent")
    ACER.load(tmp_path / "agent", "CartPole-v1")
    assert capsys.readouterr().out == ""


def test_load_prints_the_system_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small().save(tmp_path / "agent")
    for is_asked in (False, True):
        ACER.load(tmp_path / "agent", print_system_info=is_asked)
        assert ("CURRENT SYSTEM INFO" in capsys.readouterr().out) == is_asked


def test_a_missing_dependency_of_an_environment_is_gymnasiums_own_error() -> None:
    def needy(**kwargs: Any) -> gym.Env[Any, Any]:
        raise gym.error.DependencyNotInstalled("Box2D is not installed")

    gym.register("Needy-v0", needy)
    try:
        with pytest.raises(gym.error.DependencyNotInstalled, match="Box2D is not installed"):
            small("Needy-v0")
    finally:
        del gym.registry["Needy-v0"]


def test_an_agent_is_built_for_an_environment() -> None:
    with pytest.raises(
        ValueError, match=r"env must be an environment; None is for _init_setup_model=False, .*, got None"
    ):
        small(None)
    assert small(None, _init_setup_model=False).env is None
    unbuilt = small(_init_setup_model=False)
    with pytest.raises(ValueError, match="_init_setup_model must be True, or setup_model"):
        unbuilt.learn(10)
    unbuilt.setup_model()
    unbuilt.learn(10)


def test_an_error_names_the_update_that_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    n_updates, update = model._n_updates, model.update

    def fail_third(batch: Any) -> Any:
        if model._n_updates == n_updates + 2:
            batch = batch._replace(rewards=batch.rewards + np.nan)
        return update(batch)

    monkeypatch.setattr(model, "update", fail_third)
    monkeypatch.setattr(model, "replay_ratio", 1000.0)
    with pytest.raises(ValueError, match=f"in update {n_updates + 2} at step"):
        model.learn(40, reset_num_timesteps=False)
    assert model._n_updates == n_updates + 2


def test_each_call_of_learn_logs_its_first_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    model, at = small(), []
    monkeypatch.setattr(model, "dump_logs", lambda: at.append(model.num_timesteps))
    for _ in range(2):
        model.learn(41 * model.n_steps)
    half = len(at) // 2
    assert at[:half] == at[half:]
    assert at[0] == model.n_steps


def test_an_agent_that_only_acts_allocates_no_replay_memory(tmp_path: Path) -> None:
    small(buffer_size=10**12).save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", env=gym.make("CartPole-v1"))
    env = loaded.get_env()
    assert env is not None
    evaluate_policy(loaded, env, 1)
    assert loaded.replay_buffer._ring is None


@with_and_without_recurrence
@pytest.mark.parametrize("n_envs", [1, 3, 8])
def test_another_number_of_environments_keeps_the_replay_buffer(
    n_envs: int, recurrence: dict[str, Any], tmp_path: Path
) -> None:
    def held(buffer: SequenceReplayBuffer) -> set[tuple[float, ...]]:
        """Rewards of sequences, by which they can be told apart, and the recurrent states before them."""
        batch = buffer.sample(2000, None, np.random.default_rng(0))
        return {tuple(column) for column in th.cat((batch.rewards.T, batch.states), -1).tolist()}

    model = small(
        DummyVecEnv([lambda i=i: Recorder(length=7 + i) for i in range(4)]),  # type: ignore[misc]
        replay_ratio=0,
        **recurrence,
    )
    model.learn(60)
    kept = held(model.replay_buffer)
    model.save_replay_buffer(tmp_path / "buffer")
    model.set_env(make_vec_env(Recorder, n_envs=n_envs))
    assert held(model.replay_buffer) == kept
    model.learn(40, reset_num_timesteps=False)
    other = small(make_vec_env(Recorder, n_envs=n_envs), **recurrence)
    other.load_replay_buffer(tmp_path / "buffer")
    assert held(other.replay_buffer) == kept
    other.learn(40)


def test_environments_are_reset_although_there_are_as_many_again_as_in_the_last_training() -> None:
    model = small(make_vec_env(Recorder, 2), lr_schedule="constant").learn(60)
    for n_envs in (3, 2):
        model.set_env(make_vec_env(Recorder, n_envs), force_reset=False)
    model.learn(10, reset_num_timesteps=False)  # one rollout
    observations = model.replay_buffer.latest().observations
    assert isinstance(observations, th.Tensor)
    assert observations[0].tolist() == [[0, 0], [0, 0]]


def test_a_buffer_of_another_sequence_length_is_refused_and_the_own_one_kept(tmp_path: Path) -> None:
    trained(n_steps=4).save_replay_buffer(tmp_path / "buffer")
    model = trained()
    mine = model.replay_buffer
    with pytest.raises(ValueError, match="n_steps of the replay buffer must be 5, got 4"):
        model.load_replay_buffer(tmp_path / "buffer")
    assert model.replay_buffer is mine


@pytest.mark.parametrize(("own", "other"), [({}, RECURRENCES["LSTM"]), (RECURRENCES["LSTM"], {})])
def test_a_buffer_of_other_recurrent_states_is_refused_and_the_own_one_kept(
    own: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    trained(**other).save_replay_buffer(tmp_path / "buffer")
    model = trained(**own)
    mine = model.replay_buffer
    with pytest.raises(ValueError, match="recurrent states must be of the policy's width"):
        model.load_replay_buffer(tmp_path / "buffer")
    assert model.replay_buffer is mine
    model.learn(40)


class Labelled(SequenceReplayBuffer):
    """With an argument of its own."""

    def __init__(self, *args: Any, label: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = label


class Counting(SequenceReplayBuffer):
    """With an array of its own: how often each sequence was sampled."""

    def reset(self) -> None:
        super().reset()
        self.counts = np.zeros((self.n_slots + 2, self.n_envs), int)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().sample(*args, **kwargs)
        np.add.at(self.counts, (batch.slots, batch.envs), 1)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.counts = np.array(state["counts"])


def test_arrays_that_a_subclass_of_the_buffer_adds_are_in_files_and_checkpoints(tmp_path: Path) -> None:
    model = small(replay_buffer_class=Counting, replay_ratio=2).learn(200, checkpoint=tmp_path / "checkpoints")
    model.save_replay_buffer(tmp_path / "buffer")
    resumed = ACER.load_checkpoint(tmp_path / "checkpoints", gym.make("CartPole-v1"))
    other = small(replay_buffer_class=Counting)
    other.load_replay_buffer(tmp_path / "buffer")
    for agent in (resumed, other):
        assert isinstance(agent.replay_buffer, Counting)
        np.testing.assert_array_equal(agent.replay_buffer.counts, model.replay_buffer.counts)  # type: ignore[attr-defined]
    assert model.replay_buffer.counts.sum() > 50  # type: ignore[attr-defined]


def test_a_buffer_for_another_number_of_environments_keeps_the_arguments_of_its_class(tmp_path: Path) -> None:
    kwargs = {"label": "mine", "optimize_memory_usage": True}
    model = trained(replay_buffer_class=Labelled, replay_buffer_kwargs=kwargs)
    model.save_replay_buffer(tmp_path / "buffer")
    for change in (model.set_env, lambda env: model.load_replay_buffer(tmp_path / "buffer")):
        change(make_vec_env("CartPole-v1", n_envs=3))
        assert isinstance(model.replay_buffer, Labelled)
        assert (model.replay_buffer.label, model.replay_buffer.optimize_memory_usage) == ("mine", True)
        assert (model.replay_buffer.n_envs, model.replay_buffer.size()) == (3, 30)


def test_an_agent_that_was_saved_with_its_buffer_learns_on_with_another_number_of_environments(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "agent", include=["replay_buffer"])
    three = make_vec_env("CartPole-v1", n_envs=3)
    loaded = ACER.load(tmp_path / "agent", env=three, force_reset=False)
    assert (loaded.replay_buffer.n_envs, loaded.replay_buffer.size()) == (3, 30)
    loaded.learn(60, reset_num_timesteps=False)
    with pytest.raises(ValueError, match="n_steps must be 5, as in the saved replay buffer, got 7"):
        ACER.load(tmp_path / "agent", n_steps=7)


class Named(ACER):
    """A user's, which hands on what it does not know itself."""

    def __init__(self, *args: Any, label: str = "none", **kwargs: Any) -> None:
        self.label = label
        super().__init__(*args, **kwargs)


def test_subclasses_take_the_arguments_of_their_parents_when_they_are_loaded(tmp_path: Path) -> None:
    model = Named("MlpPolicy", "CartPole-v1", label="mine", **SMALL)
    model.save(tmp_path / "agent")
    loaded = Named.load(tmp_path / "agent", gamma=0.5, label="other")
    assert (loaded.gamma, loaded.label) == (0.5, "other")
    with pytest.raises(ValueError, match=r"keyword arguments of load must be arguments .*, got 'gama'"):
        Named.load(tmp_path / "agent", gama=0.5)


class Shared(BaseFeaturesExtractor):
    """Features of a network that its user has made."""

    def __init__(self, observation_space: spaces.Box, network: nn.Module) -> None:
        super().__init__(observation_space, 4)
        self.network = network

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.network(observations)
        return features


def test_a_module_in_policy_kwargs_is_the_users_own() -> None:
    network = nn.Linear(4, 4)
    model = small(policy_kwargs={"features_extractor_class": Shared, "features_extractor_kwargs": {"network": network}})
    before = network.weight.detach().clone()
    model.learn(40)
    assert not th.equal(network.weight, before)


def test_saving_leaves_an_agent_its_own_policy_kwargs(tmp_path: Path) -> None:
    model = small(policy_kwargs={"net_arch": [8]})
    own = model.policy_kwargs
    model.save(tmp_path / "agent")
    assert model.policy_kwargs is own


def test_parameters_that_were_frozen_before_the_policy_was_built_are_not_learnt_later_in_silence() -> None:
    network = nn.Linear(4, 4).requires_grad_(False)
    shared: dict[str, Any] = {"features_extractor_class": Shared, "features_extractor_kwargs": {"network": network}}
    model = small(policy_kwargs=shared).learn(20)
    network.requires_grad_(True)
    with pytest.raises(ValueError, match=r"features_extractor.network.weight must be frozen as it was when the policy"):
        model.learn(20)
    network.requires_grad_(True)
    thawed = small(policy_kwargs=shared)
    thawed.policy.features_extractor.requires_grad_(False)
    before = network.weight.detach().clone()
    thawed.learn(20)
    assert th.equal(network.weight, before)
    network.requires_grad_(True)
    thawed.learn(20)
    assert not th.equal(network.weight, before)


@with_and_without_recurrence
def test_policy_kwargs_may_be_given_again_to_load_but_not_others(recurrence: dict[str, Any], tmp_path: Path) -> None:
    model = small(**recurrence)
    given = {**SMALL, **recurrence}["policy_kwargs"]
    model.save(tmp_path / "agent")
    assert ACER.load(tmp_path / "agent", policy_kwargs=given).policy_kwargs == model.policy_kwargs
    with pytest.raises(ValueError, match=r"must be those of the saved agent, .* got \{.net_arch.: \[9\]\}"):
        ACER.load(tmp_path / "agent", policy_kwargs={"net_arch": [9]})


@pytest.mark.parametrize("wrapper", [lambda env: env, VecMonitor], ids=["VecNormalize", "VecMonitor of VecNormalize"])
def test_final_observations_are_stored_as_they_were_before_vec_normalize_clipped_them(
    wrapper: Callable[[VecEnv], VecEnv],
) -> None:
    normalize = VecNormalize(make_vec_env(Integers, n_envs=2, seed=0), clip_obs=0.1)
    model = small(wrapper(normalize)).learn(600)
    assert "normalize_obs" not in vars(normalize)
    found = [model.replay_buffer.gather(np.full(2, slot), np.arange(2)) for slot in range(model.replay_buffer.pos)]
    ends: list[Any] = [
        (th.as_tensor(batch.observations).flatten(0, 1)[batch.final_steps], batch.final_observations) for batch in found
    ]
    assert sum(len(last) for last, _ in ends) > 50
    for last, final in ends:
        assert (final == last + 1).all()


class NormalizesAgain(VecNormalize):
    def step_wait(self) -> Any:
        observations, *others = super().step_wait()
        self.normalize_obs(self.get_original_obs())
        return observations, *others


class CopiesInfos(VecEnvWrapper):
    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        *others, infos = self.venv.step_wait()
        return *others, deepcopy(infos)


@pytest.mark.parametrize(
    "make",
    [partial(NormalizesAgain, clip_obs=0.1), lambda env: CopiesInfos(VecNormalize(env, clip_obs=0.1))],
    ids=["a subclass", "a wrapper"],
)
def test_final_observations_are_stored_as_they_were_whatever_else_is_normalised_or_copied(make: Any) -> None:
    model = small(make(make_vec_env(lambda: gym.wrappers.TimeLimit(Recorder(length=99), 7), 2)), n_steps=7).learn(28)
    for slot, env in itertools.product(range(2), range(2)):
        batch = model.replay_buffer.gather(np.array([slot]), np.array([env]))
        assert th.as_tensor(batch.final_observations)[0].tolist() == [7, 7 * (slot + 1)]


def test_a_normalisation_that_a_program_has_assigned_is_used_and_stays() -> None:
    normalize: Any = VecNormalize(make_vec_env(Recorder, 1))
    assigned = normalize.normalize_obs = np.zeros_like
    model = small(normalize).learn(20)
    assert normalize.normalize_obs is assigned
    assert not np.asarray(model._last_obs).any()


@pytest.mark.parametrize("callback", [None, lambda *_: False], ids=["", "a callback stops"])
def test_observations_are_stored_where_the_environment_fills_the_same_array_at_each_step(callback: Any) -> None:
    class Filling(VecEnvWrapper):
        def filled(self, observations: Any) -> Any:
            self.kept = getattr(self, "kept", np.empty_like(observations))
            self.kept[:] = observations
            return self.kept

        def reset(self) -> Any:
            return self.filled(self.venv.reset())

        def step_wait(self) -> Any:
            observations, *others = self.venv.step_wait()
            return self.filled(observations), *others

    model = small(Filling(make_vec_env(Recorder, 1)), n_steps=10)
    while model.num_timesteps < 10:
        model.learn(10, callback, reset_num_timesteps=False)
    observations: Any = model.replay_buffer.latest().observations
    assert observations[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert observations[:, 0, 1].tolist() == list(range(11))


def test_the_callers_arguments_are_not_changed() -> None:
    policy_kwargs = {"net_arch": {"pi": [8], "qf": [8]}, "optimizer_kwargs": {"momentum": 0.1}}
    buffer_kwargs: dict[str, Any] = {}
    small(policy_kwargs=policy_kwargs, replay_buffer_kwargs=buffer_kwargs).learn(20)
    assert policy_kwargs == {"net_arch": {"pi": [8], "qf": [8]}, "optimizer_kwargs": {"momentum": 0.1}}
    assert buffer_kwargs == {}


@pytest.mark.parametrize(("buffer_size", "n_steps", "replay_start"), [(1, 1, 1), (1, 5, 1), (3, 2, 0), (7, 5, 5)])
def test_the_smallest_buffers_train(buffer_size: int, n_steps: int, replay_start: int) -> None:
    model = small(buffer_size=buffer_size, n_steps=n_steps, replay_start=replay_start).learn(30)
    assert model._n_updates > 30 // n_steps


def test_actions_of_a_discrete_space_with_a_start_reach_the_environment_with_it() -> None:
    env = Recorder(spaces.Discrete(3, start=5))
    model = small(env).learn(100)
    assert set(env.actions) == {5, 6, 7}
    assert model.predict(np.zeros(2))[0] in (5, 6, 7)


def test_continuous_actions_are_stored_as_sampled_and_clipped_for_the_environment() -> None:
    env = Recorder(spaces.Box(-0.5, 0.5, (2,)))
    model = small(env, replay_ratio=0).learn(100)
    stored = model.replay_buffer.sample(500, None, np.random.default_rng(0)).actions
    given = np.stack(env.actions)
    assert stored.abs().max() > 1
    assert np.abs(given).max() == 0.5
    latest = model.replay_buffer.latest().actions[:, 0].numpy()
    np.testing.assert_allclose(given[-5:], latest.clip(-0.5, 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(np.array([-1.0, 0.0]), np.array([np.inf, 5.0])),
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Box(-1, 1, ()),
        spaces.Box(0, 10, (1,), np.int32),
        spaces.MultiDiscrete([2, 4], start=[3, -1]),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
        spaces.MultiBinary(5),
    ],
    ids=str,
)
def test_every_action_reaches_the_environment_as_an_element_of_its_space(action_space: spaces.Space[Any]) -> None:
    env = Recorder(action_space)
    model = small(env, replay_ratio=1).learn(40)
    assert all(action_space.contains(action) for action in env.actions)
    assert action_space.contains(model.predict(np.zeros(2))[0])
    assert flat(model).isfinite().all()


def test_a_seed_that_is_given_to_load_begins_the_draws_anew(tmp_path: Path) -> None:
    small(seed=0).learn(20).save(tmp_path / "agent")

    def draws(agent: ACER) -> list[float]:
        return [rng.random() for rng in agent._rngs]

    each: list[dict[str, Any]] = [{}, {"seed": 5}, {"seed": 6}]
    loaded = [draws(ACER.load(tmp_path / "agent", device="cpu", **given)) for given in each]
    assert loaded[1] == draws(small(seed=5))
    assert not {*loaded[0]} & {*loaded[1]}
    assert not {*loaded[1]} & {*loaded[2]}


# What a user is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": 0}, "n_steps must be an integer of at least 1, got 0"),
        ({"n_steps": 2.5}, "n_steps must be an integer of at least 1, got 2.5"),
        ({"buffer_size": 0}, "buffer_size must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"gamma": 1.1}, r"gamma must be a number in \[0, 1\], got 1.1"),
        ({"gamma": float("nan")}, r"gamma must be a number in \[0, 1\], got nan"),
        ({"alpha": -0.1}, r"alpha must be a number in \[0, 1\], got -0.1"),
        ({"rprop_epsilon": 0}, r"rprop_epsilon must be a number in \[1e-30, 1e\+06\], got 0"),
        ({"seed": 2**32}, "seed must be an integer of at most 4294967295, got 4294967296"),
        ({"rprop_alpha": 2}, r"rprop_alpha must be a number in \[0, 1\], got 2"),
        ({"replay_ratio": -1}, r"replay_ratio must be a number in \[0, 1e\+06\], got -1"),
        ({"replay_start": -1}, "replay_start must be an integer of at least 0, got -1"),
        ({"q_coef": -0.5}, r"q_coef must be a number in \[0, 1e\+06\], got -0.5"),
        ({"ent_coef": -0.5}, r"ent_coef must be a number in \[0, 1e\+06\], got -0.5"),
        ({"delta": -1}, "delta must be a number in .0, 1e.30., got -1"),
        ({"max_grad_norm": -1}, r"max_grad_norm must be a number in \[1e-06, 1e\+06\], got -1"),
        ({"max_grad_norm": 0}, r"max_grad_norm must be a number in \[1e-06, 1e\+06\], got 0"),
        ({"correction_term": -1}, "correction_term must be a number in .0, 1e.30., got -1"),
        (
            {"lr_schedule": "cubic"},
            "lr_schedule must be one of linear, constant, double_linear_con, middle_drop, double_m",
        ),
        ({"ent_schedule": "cubic"}, "ent_schedule must be one of linear, constant, double_linear_con, .* got 'cubic'"),
        (
            {"env": Recorder(spaces.Dict({"a": spaces.Discrete(2)}))},
            r"or a Box of at least one value .*, got Dict\('a'",
        ),
        ({"env": Recorder(spaces.Box(-1, 1, (0,)))}, r"or a Box of at least one value .*, got Box\(\[\], \[\]"),
        (
            {"env": Recorder(spaces.MultiBinary([2, 3]))},
            r"Multi-dimensional MultiBinary\(.*\) action space is not supp",
        ),
        ({"env": Recorder(spaces.MultiBinary([3]))}, r"MultiBinary of a number of bits, or Box"),
        *(
            (
                {"policy": "MultiInputPolicy", "env": Shows(spaces.Dict({key: spaces.Box(-1, 1, (3,))}))},
                rf"observation_space must have keys that SB3's CombinedExtractor .*, got Dict\('{key}'.*: .*{reason}",
            )
            for key, reason in (("arm.pose", "can't contain"), ("values", "already exists"))
        ),
        (
            {"replay_buffer_class": ReplayBuffer},
            "replay_buffer_class must be a subclass of SequenceReplayBuffer, got <cl",
        ),
        ({"n_action_samples": 0}, "n_action_samples must be an integer of at least 1, got 0"),
        (
            {
                "policy": "CnnPolicy",
                "env": FakeImageEnv(),
                "policy_kwargs": {"features_extractor_kwargs": {"features_dim": 0}},
            },
            "features_extractor_kwargs must be ones that the features extractor takes for .*, got {'features_dim': 0}",
        ),
        (
            {"learning_rate": lambda progress: None},
            "learning_rate must be a number, or a function that maps .*, got <fun",
        ),
        ({"learning_rate": lambda progress: "fast"}, "learning_rate must be a number, or a function .*, got <fun"),
        ({"learning_rate": lambda progress, step: 1e-3}, "learning_rate must be a number, or a function .*, got <fun"),
        (
            {"learning_rate": lambda progress: 1 / (1 - progress)},
            "learning_rate must be a number.*: .*division by zero",
        ),
        (
            {"policy_kwargs": {"optimizer_kwargs": {"alpha": "x"}}},
            "optimizer_kwargs must fit RMSpropTFLike, got {'alpha': 'x'",
        ),
        (
            {"policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_kwargs": {"dropout": 2}}},
            "lstm_kwargs must be arguments of LSTM, got {'dropout': 2}: dropout should be a number",
        ),
        ({"burn_in": 5}, "burn_in must be less than n_steps=5, got 5"),
        ({"burn_in": 7}, "burn_in must be less than n_steps=5, got 7"),
        ({"burn_in": -1}, "burn_in must be an integer of at least 0, got -1"),
        ({"burn_in": 2.5}, "burn_in must be an integer of at least 0, got 2.5"),
        ({"burn_in": 2}, "burn_in must be 0 for a feed-forward policy, got 2"),
        (
            {"env": Recorder(spaces.Tuple([spaces.Discrete(2)]))},
            "action_space must be Discrete, MultiDiscrete, MultiBin",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule_and_value(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_an_update_after_predict_is_one_in_training_mode() -> None:
    model = small(short_episodes(), policy_kwargs={"features_extractor_class": NormalisedFeatures}).learn(60)
    model.predict(model.observation_space.sample())
    before = [buffer.clone() for buffer in model.policy.buffers()]
    model.update(model.replay_buffer.latest())
    assert not any(map(th.equal, model.policy.buffers(), before))  # running means move in training mode alone


@pytest.mark.parametrize(("device", "units", "warns"), [("cuda", 64, True), ("cuda", 512, False), ("cpu", 64, False)])
def test_small_networks_on_a_gpu_are_warned_of(device: str, units: int, warns: bool) -> None:
    model = small(short_episodes(), policy_kwargs={"net_arch": [units, units]})
    model.device = th.device(device)  # no number is computed on it
    found = [hint for hint in model._hints(60, True) if "faster on the CPU" in hint]
    assert len(found) == warns
    assert all(
        re.match(r"networks of [\d,]+ parameters are trained faster on the CPU: device='cpu'", each) for each in found
    )


def test_a_call_of_one_rollout_warns_that_its_learning_rate_is_0() -> None:
    env = short_episodes()
    for changes, n_steps, warns in (
        ({}, 5 * env.num_envs, True),
        ({}, 5 * env.num_envs + 1, False),
        ({"lr_schedule": "constant"}, 5 * env.num_envs, False),
        ({"learning_rate": lambda progress: 1e-3 * (1 + progress)}, 5 * env.num_envs, False),
        ({"learning_rate": 0.0}, 5 * env.num_envs, False),
        ({"learning_rate": ConstantSchedule(1e-3)}, 5 * env.num_envs, True),  # counts as the number
    ):
        model = small(env, **changes)
        before = flat(model).clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.learn(n_steps)
        found = [str(each.message) for each in caught if "learns nothing" in str(each.message)]
        assert len(found) == warns, (changes, n_steps)
        assert th.equal(flat(model), before) == (warns or changes.get("learning_rate") == 0.0)
    model = small(env, n_steps=20).learn(1000, callback=lambda found, _: found["self"].num_timesteps < 30)
    with warnings.catch_warnings():  # half a rollout is under way
        warnings.simplefilter("error")
        model.learn(20 * env.num_envs, reset_num_timesteps=False)


@pytest.mark.parametrize("switched_off", [th.no_grad, th.inference_mode])
def test_all_parts_learn_also_where_gradients_are_switched_off(switched_off: Callable[[], Any], tmp_path: Path) -> None:
    expected = small(short_episodes(), "MlpLstmPolicy", policy_kwargs=LSTM_KWARGS, seed=0).learn(60)
    with switched_off():
        model = small(short_episodes(), "MlpLstmPolicy", policy_kwargs=LSTM_KWARGS, seed=0).learn(60)
        model.save(tmp_path / "agent")
        model.policy.double().float()
        loaded = ACER.load(tmp_path / "agent", short_episodes())
    assert th.equal(flat(model), flat(expected))
    for each in (model, loaded):
        each.learn(60)


@pytest.mark.parametrize("switched_off", [th.no_grad, th.inference_mode])
def test_training_on_stored_images_trains_their_extractor_also_where_gradients_are_switched_off(
    switched_off: Callable[[], Any],
) -> None:
    expected, model = (catching(use_bfloat16=False).learn(100) for _ in range(2))
    expected.train(2)
    with switched_off():
        model.train(2)
    assert th.equal(flat(model), flat(expected))


def test_a_callback_may_switch_gradients_off() -> None:
    def switch_off(_: Any, __: Any) -> None:
        th.set_grad_enabled(False)

    expected = catching(use_bfloat16=False).learn(100)
    assert th.equal(flat(catching(use_bfloat16=False).learn(100, switch_off)), flat(expected))


def test_a_call_of_learn_within_a_rollout_is_refused_before_it_stores_anything() -> None:
    model = small(short_episodes())

    def learn(_: Any, __: Any) -> None:
        if model.num_timesteps >= 8:
            stored = model.replay_buffer.n_rollouts, model.replay_buffer.step
            with pytest.raises(ValueError, match="learn must be called between two rollouts of the agent, got"):
                model.learn(5, reset_num_timesteps=False)
            assert stored == (model.replay_buffer.n_rollouts, model.replay_buffer.step)

    model.learn(30, learn)
    model.learn(5, reset_num_timesteps=False)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,)),
        spaces.Box(-1, 1, (2, 3)),
        spaces.Discrete(4),
        spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.MultiBinary(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("both", [True, False])
def test_a_policy_may_compute_in_float64(space: spaces.Space[Any], both: bool) -> None:
    env = gym.make("CartPole-v1")
    env = gym.wrappers.TransformObservation(env, lambda _: space.sample(), space)
    model = small(env, "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy")
    model.policy.double()
    if both:
        model.average_policy.double()
    before = flat(model)
    model.learn(30)
    assert flat(model).dtype == th.float64
    assert not th.equal(flat(model), before)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.Box(-3, 3, (1,), np.int64)], ids=str)
def test_actions_that_are_not_finite_are_refused(space: spaces.Space[Any]) -> None:
    model = small(Recorder(space))
    actions = np.full((1, *(space.shape or ())), np.nan)
    with pytest.raises(ValueError, match=r"actions must be .*, got \[\[nan"):
        model.action_probability(np.zeros((1, 2), np.float32), actions=actions)


def test_train_makes_as_many_updates_as_it_is_told(tmp_path: Path) -> None:
    model = trained(replay_ratio=0, lr_schedule="constant")
    before = model._n_updates
    model.train(7, 4)
    assert model._n_updates == before + 7
    model.replay_ratio = 3.0
    model.train(50, 6)
    n_replayed = model._n_updates - before - 7 - 50
    assert abs(n_replayed - 150) < 5 * math.sqrt(150)
    model.save_replay_buffer(tmp_path / "buffer")
    other = small(model.env, seed=1)
    other.load_replay_buffer(tmp_path / "buffer")
    before_training = flat(other)
    other.train(5, 4)
    assert not th.equal(flat(other), before_training)
    for steps in (0, 1.5):
        with pytest.raises(ValueError, match=f"gradient_steps must be an integer of at least 1, got {steps}"):
            model.train(steps, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        model.train(50, 0)


def test_a_new_agent_trains_on_normalised_observations_of_a_loaded_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = VecNormalize(short_episodes())
    small(env).learn(40).save_replay_buffer(tmp_path / "buffer")
    other, seen = small(env), []
    other.load_replay_buffer(tmp_path / "buffer")
    sample = other.replay_buffer.latest
    monkeypatch.setattr(other.replay_buffer, "latest", lambda norm: seen.append(sample(norm)) or seen[-1])  # type: ignore[func-returns-value]
    other.train(1)
    expected = other.replay_buffer.gather(seen[0].slots, seen[0].envs, env)
    assert th.equal(seen[0].observations, expected.observations)  # type: ignore[arg-type]


def test_a_batch_has_a_sequence_for_each_environment_unless_told_otherwise() -> None:
    first, second = (trained(replay_ratio=3, lr_schedule="constant", seed=0) for _ in range(2))
    first.train(5)
    second.train(5, first.n_envs)
    assert th.equal(flat(first), flat(second))


def test_a_learning_rate_assigned_between_two_calls_counts() -> None:
    model = trained(lr_schedule="constant", learning_rate=1e-3)
    rate = model.policy.optimizer.param_groups[0]
    assert rate["lr"] == 1e-3
    model.learning_rate = 1e-5
    assert model.learn(20).policy.optimizer.param_groups[0]["lr"] == 1e-5
    schedules: list[Any] = [lambda remaining: 2e-4, FloatSchedule(2e-4)]  # as with SB3's algorithms
    for schedule in schedules:
        model.lr_schedule = schedule
        assert model.learn(20).policy.optimizer.param_groups[0]["lr"] == 2e-4
        model.lr_schedule = "constant"  # type: ignore[assignment]
        model.train(1)
        assert model.policy.optimizer.param_groups[0]["lr"] == 1e-5
    model.lr_schedule = "linear"  # type: ignore[assignment]
    assert model.learn(40).policy.optimizer.param_groups[0]["lr"] == 0
    model.lr_schedule = 1e-3  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"lr_schedule must be one of linear, .*, or a function .*, got 0.001"):
        model.learn(20)
    model.lr_schedule = "falling"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"lr_schedule must be one of linear, .*, got 'falling'"):
        model.learn(20)


def test_torchs_default_type_may_change_between_two_calls() -> None:
    models = [trained(), recurrent_agent("Pendulum-v1").learn(40)]
    th.set_default_dtype(th.float64)
    try:
        for model in models:
            model.learn(40)
            assert {parameter.dtype for parameter in model.policy.parameters()} == {th.float32}
    finally:
        th.set_default_dtype(th.float32)


def itself(model: ACER, folder: Path) -> ACER:
    return model


def copied_whole(model: ACER, folder: Path) -> ACER:
    return deepcopy(model)


def through_a_checkpoint(model: ACER, folder: Path) -> ACER:
    model.save_checkpoint(folder)
    return ACER.load_checkpoint(folder, Recorder(length=9))


def through_files(model: ACER, folder: Path) -> ACER:
    model.save(folder / "agent")
    model.save_replay_buffer(folder / "buffer")
    loaded = ACER.load(folder / "agent", model.get_env(), force_reset=False)
    loaded.load_replay_buffer(folder / "buffer", truncate_last_traj=False)
    return loaded


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (itself, itself),
        (itself, copied_whole),
        (itself, through_a_checkpoint),
        (itself, through_files),
        (copied_whole, itself),
        (through_a_checkpoint, itself),
        (through_files, itself),
    ],
)
def test_after_an_evaluation_on_its_environment_an_agent_resets_it(
    before: Callable[[ACER, Path], ACER], after: Callable[[ACER, Path], ACER], tmp_path: Path
) -> None:
    model = small(Recorder(length=9), n_steps=5).learn(7, Watch(7))
    assert model.replay_buffer.step == 2
    model = before(model, tmp_path)
    evaluate_policy(model, model.get_env(), 2)  # type: ignore[arg-type]
    model = after(model, tmp_path)
    model.learn(3, reset_num_timesteps=False)
    batch = model.replay_buffer.latest()
    assert batch.observations[:, 0, 0].tolist() == [5, 6, 0, 1, 2, 3]  # type: ignore[index]
    assert batch.truncated[:, 0].tolist() == [False, True, False, False, False]
    model.learn(5, reset_num_timesteps=False)  # nothing else has moved it on
    assert model.replay_buffer.latest().observations[0, 0, 0] == 3  # type: ignore[index]


def test_environments_of_others_under_a_wrapper_are_trained() -> None:
    class Pool:
        """As envpool and PettingZoo's SB3 examples have them: no VecEnv."""

        num_envs, render_mode = 2, None
        observation_space, action_space = Recorder().observation_space, Recorder().action_space

        @property
        def unwrapped(self) -> Any:
            return self

        def seed(self, seed: int | None) -> None:
            pass

        def get_attr(self, *args: Any) -> Any:
            raise AttributeError

        env_method = env_is_wrapped = get_attr

    class Adapter(VecEnvWrapper):
        def reset(self) -> Any:
            return np.zeros((2, 2), np.float32)

        def step_async(self, actions: np.ndarray) -> None:
            pass

        def step_wait(self) -> Any:
            return np.ones((2, 2), np.float32), np.ones(2, np.float32), np.zeros(2, bool), [{}, {}]

    pool: Any = Pool()
    model = small(Adapter(pool, Pool.observation_space, Pool.action_space))
    assert model.learn(40).learn(40, reset_num_timesteps=False).num_timesteps == 80


ONE_INFO: dict[str, Any] = {}


class OneInfo(Recorder):
    """Returns the same dict at every reset."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**kwargs)[0], ONE_INFO


@pytest.mark.parametrize("env", [Recorder, OneInfo])
@pytest.mark.parametrize("hook", ["_on_step", "_on_rollout_end", "_on_rollout_start"])
def test_a_callback_that_evaluates_on_the_training_environment_is_an_error(hook: str, env: type[Recorder]) -> None:
    def evaluates(callback: BaseCallback) -> bool:
        if callback.num_timesteps > 7 or hook == "_on_rollout_start":
            evaluate_policy(callback.model, callback.training_env, 1)
        return True

    callback = type("Evaluates", (Watch,), {hook: evaluates})()
    model = small(env(), n_steps=5)
    with pytest.raises(ValueError, match="a callback has reset it"):
        model.learn(20, callback)
    model.learn(20, reset_num_timesteps=False)


@pytest.mark.parametrize("loads", [True, False])
def test_a_callback_may_empty_the_replay_buffer_or_load_another_in_the_midst_of_a_rollout(
    loads: bool, tmp_path: Path
) -> None:
    small(n_steps=5, replay_start=0).learn(20).save_replay_buffer(tmp_path / "buffer")

    class Replaces(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 12:
                buffer = self.model.load_replay_buffer if loads else self.model.replay_buffer.reset  # type: ignore
                buffer(*[tmp_path / "buffer"][:loads])
            return True

    model = small(n_steps=5, replay_ratio=0)
    steps: list[tuple[int, int]] = []
    update = model.update

    def updated(batch: SequenceBatch) -> Update:
        steps.append((model.num_timesteps, model.replay_buffer.step))
        return update(batch)

    model.update = updated  # type: ignore[method-assign]
    model.learn(40, Replaces())
    assert steps[:2] == [(5, 0), (10, 0)]
    assert [step for _, step in steps] == [0] * len(steps)  # each update is of a whole rollout
    assert np.diff([at for at, _ in steps[2:]]).tolist() == [5] * (len(steps) - 3)


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)], ids=str)
def test_the_gradient_of_a_saturated_policys_log_probability_is_finite(space: Any) -> None:
    policy = small(Recorder(space)).policy
    with th.no_grad():
        policy.pi_head.bias[0] = 200
    actions = th.ones((3, policy.family.n_components), dtype=th.int64)
    _, log_prob, entropy = policy.evaluate_actions(th.zeros(3, 2), actions)
    assert entropy is not None
    (log_prob.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert bool(log_prob.isfinite().all())
    for parameter in policy.parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all())


def test_weights_of_another_type_and_of_whole_sequences_weigh_alike() -> None:
    model = trained(learning_rate=0.0)  # so that all updates are of one policy
    batch = model.replay_buffer.sample(4)
    weights = th.rand(batch.weights.shape[1])
    alike = [weights.expand(batch.weights.shape), weights.expand(batch.weights.shape).double(), weights]
    first, *others = (model.update(batch._replace(weights=each)).gradients[0] for each in alike)
    assert first.any()
    for other in others:
        th.testing.assert_close(first, other)


def test_layers_of_the_dueling_head_that_cannot_be_learnt_are_refused() -> None:
    class Reparametrized(ACERPolicy):
        def _build(self) -> None:
            super()._build()
            th.nn.utils.parametrizations.weight_norm(self.q_head.action)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="q_head must be one of plain layers, without parametrizations, got 'Tensor'"):
        ACER(Reparametrized, "Pendulum-v1", **SMALL).learn(20)


def test_an_integer_parameter_of_an_extractor_stays() -> None:
    class Extractor(FlattenExtractor):
        def __init__(self, observation_space: Any) -> None:
            super().__init__(observation_space)
            self.index = th.nn.Parameter(th.arange(3), requires_grad=False)

    model = small(policy_kwargs={"features_extractor_class": Extractor}).learn(20)
    extractor: Any = model.policy.features_extractor
    assert extractor.index.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), -1),
        (spaces.MultiDiscrete([3, 2]), [[0, 1], [0, 2]]),
        (spaces.Dict({"kind": spaces.Discrete(3)}), {"kind": 3}),
    ],
)
def test_an_observation_whose_category_the_space_does_not_have_is_refused(
    space: spaces.Space[Any], observation: Any
) -> None:
    env = Recorder()
    env.observation_space = space
    model = ACER("MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy", env)
    with pytest.raises(ValueError, match=f"observation must be of {re.escape(str(space))}, got"):
        model.predict(observation)


def test_numbers_beyond_float32_are_refused_where_the_network_is_of_float32() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    env = Recorder()
    env.observation_space = space
    model = small(env)
    with pytest.raises(ValueError, match="observation must be finite in float32"):
        model.predict(np.array([1e300, 0.0]))
    parameters = model.get_parameters()
    parameters["policy"]["pi_head.bias"] = np.full(3, 1e300)
    with pytest.raises(ValueError, match=r"pi_head.bias in .* must be finite numbers of torch.float32"):
        model.set_parameters(parameters)


def test_as_many_actions_are_evaluated_as_there_are_observations() -> None:
    policy, observations = small().policy, th.zeros(6, 4)
    assert policy.evaluate_actions(observations, th.zeros(6))[1].shape == (6,)
    for actions in (th.zeros(5), th.zeros(12), th.zeros(6, 2)):
        with pytest.raises(ValueError, match=r"actions must be of shape \(6, 1\), got"):
            policy.evaluate_actions(observations, actions)


def test_without_a_seed_training_follows_the_global_one() -> None:
    agents = []
    for seed in (0, 0, 1):
        set_random_seed(seed)
        agents.append(flat(small(make_vec_env("CartPole-v1", 2, seed=0), seed=None, replay_ratio=2).learn(60)))
    assert th.equal(agents[0], agents[1])
    assert not th.equal(agents[0], agents[2])


def test_arguments_that_were_changed_are_checked_by_learn() -> None:
    for policy, burn_in, rule in (
        ("MlpPolicy", 2, "0 for a feed-forward policy"),
        ("MlpLstmPolicy", 5, "less than n_steps=5"),
    ):
        model = small(policy=policy)
        model.burn_in = burn_in
        with pytest.raises(ValueError, match=f"burn_in must be {rule}, got {burn_in}"):
            model.learn(20)


@pytest.mark.parametrize(
    ("policy", "fitting"),
    [
        ("MlpPolicy", "MultiInputPolicy"),
        ("CnnPolicy", "MultiInputPolicy"),
        ("MlpLstmPolicy", "MultiInputLstmPolicy"),
        ("CnnLstmPolicy", "MultiInputLstmPolicy"),
        ("MlpLnLstmPolicy", "MultiInputLstmPolicy"),
    ],
)
def test_dict_observations_need_a_multi_input_policy(policy: str, fitting: str) -> None:
    for given in (policy, ACER.policy_aliases[policy]):
        with pytest.raises(ValueError, match=f"policy must be '{fitting}' for Dict observations, got '{policy}'"):
            small(in_a_dict(), given)


@pytest.mark.parametrize(
    ("policy", "fitting"), [("MultiInputPolicy", "MlpPolicy"), ("MultiInputLstmPolicy", "MlpLstmPolicy")]
)
def test_observations_that_are_no_dict_need_another_policy(policy: str, fitting: str) -> None:
    with pytest.raises(ValueError, match=rf"policy must be '{fitting}' for Box\(.*, got '{policy}'"):
        small("CartPole-v1", policy)
    with pytest.raises(ValueError, match=f"policy must be '{fitting.replace('Mlp', 'Cnn')}' for Box"):
        small(FakeImageEnv(), policy)
    with pytest.raises(ValueError, match="policy must fit the observations, got CnnPolicy: You should use NatureCNN"):
        small("CartPole-v1", "CnnPolicy")


class PartX(BaseFeaturesExtractor):
    """Of Dict observations the part x, and vectors as they are."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 4)

    def forward(self, observations: Any) -> th.Tensor:
        features: th.Tensor = observations["x"] if isinstance(observations, dict) else observations
        return features


class PolicyOfPartX(ACERPolicy):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "features_extractor_class": PartX})


@pytest.mark.parametrize("policy", ["MlpPolicy", PolicyOfPartX, "MultiInputPolicy"])
@pytest.mark.parametrize("is_dict", [True, False])
def test_with_an_own_features_extractor_every_policy_is_built_loaded_and_resumed(
    policy: Any, is_dict: bool, tmp_path: Path
) -> None:
    kwargs = {} if policy is PolicyOfPartX else {"features_extractor_class": PartX}

    def env() -> gym.Env[Any, Any]:
        return in_a_dict() if is_dict else gym.make("CartPole-v1")

    def stop(values: dict[str, Any], _: Any) -> bool:
        return bool(values["self"].num_timesteps < 30)

    model = small(env(), policy, policy_kwargs=kwargs).learn(60)
    model.save(tmp_path / "agent")
    assert th.equal(flat(ACER.load(tmp_path / "agent", env())), flat(model))
    small(env(), policy, policy_kwargs=kwargs).learn(60, stop, checkpoint=tmp_path / "run")
    resumed = small(env(), policy, policy_kwargs=kwargs).learn(60, checkpoint=tmp_path / "run")
    assert th.equal(flat(resumed), flat(model))


def test_a_features_extractor_of_other_observations_is_refused() -> None:
    rule = "features_extractor_class must be one that takes "
    with pytest.raises(ValueError, match=rf"{rule}Box\(.*, got <class '.*CombinedExtractor'>"):
        small("CartPole-v1", policy_kwargs={"features_extractor_class": CombinedExtractor})
    with pytest.raises(ValueError, match=rf"{rule}Dict\(.*, got <class '.*FlattenExtractor'>"):
        small(in_a_dict(), "MultiInputPolicy", policy_kwargs={"features_extractor_class": FlattenExtractor})


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=1),
        spaces.MultiDiscrete([2, 3], start=[0, 1]),
        spaces.MultiDiscrete(np.array([[2, 3]])),
        spaces.Box(0, 1, ()),
        spaces.Dict(part=spaces.Discrete(4, start=1)),
    ],
    ids=str,
)
def test_observations_that_cannot_be_made_vectors_are_refused(space: spaces.Space[Any]) -> None:
    env = IdentityEnv(2)
    env.observation_space = space
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    with pytest.raises(
        ValueError, match=r"observation_space must be .* one-dimensional MultiDiscrete that begins at 0"
    ):
        small(env, policy)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict(part=spaces.Dict(part=spaces.Discrete(2))),
        spaces.Dict(),
        spaces.Text(3),
        spaces.Box(0, 1, (0,)),
        None,
    ],
    ids=str,
)
def test_observations_that_are_no_numbers_are_refused(space: Any) -> None:
    env = IdentityEnv(2)
    env.observation_space = space
    for policy in ("MlpPolicy", "MultiInputPolicy"):
        with pytest.raises(
            ValueError, match=r"observation_space must be a Box of at least one .* or a Dict of these, got"
        ):
            small(env, policy)


def test_a_dict_that_lacks_a_part_of_the_observation_is_refused() -> None:
    model = small(in_a_dict(), "MultiInputPolicy")
    with pytest.raises(ValueError, match="observation must be of Dict"):
        model.predict(np.zeros(5))
    names = list(model.observation_space)  # type: ignore[call-overload]
    others: list[dict[str, Any]] = [{}, {**model.observation_space.sample(), "y": 1}]
    for other in others:
        rule = rf"^observation must be of the keys {', '.join(names)}, got '{', '.join(other)}'$"
        with pytest.raises(ValueError, match=rule):
            model.predict(other)


def test_parts_of_an_observation_have_the_same_number_of_rows() -> None:
    space = spaces.Dict(x=spaces.Box(-np.inf, np.inf, (4,)), y=spaces.Box(-np.inf, np.inf, (4,)))
    env = gym.wrappers.TransformObservation(gym.make("CartPole-v1"), lambda x: {"x": x, "y": x}, space)
    with pytest.raises(ValueError, match="observation must be of equally many environments"):
        small(env, "MultiInputPolicy").predict({"x": np.zeros(4), "y": np.zeros((2, 4))})


def test_images_in_place_of_vectors_warn() -> None:
    with pytest.warns(UserWarning, match="MlpPolicy takes images for vectors: CnnPolicy has a network") as warned:
        small(FakeImageEnv())
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="MlpPolicy takes images for vectors"):
        small(FakeImageEnv(screen_height=36, screen_width=36))


def test_images_that_convolutions_do_not_fit_into_may_be_taken_for_vectors(recwarn: pytest.WarningsRecorder) -> None:
    small(FakeImageEnv(screen_height=36, screen_width=35))
    small(FakeImageEnv(), "CnnPolicy")
    assert not recwarn


def test_a_warning_of_net_arch_points_to_the_line_that_gave_it() -> None:
    with pytest.warns(UserWarning, match="net_arch should be a dict") as warned:
        small(policy_kwargs={"net_arch": [{"pi": [8]}]})
    assert warned[0].filename == __file__


def test_a_loop_that_forgets_the_recurrent_state_warns_and_others_do_not(recwarn: pytest.WarningsRecorder) -> None:
    model, observation = small("CartPole-v1", "MlpLstmPolicy"), np.zeros(4)
    state = None
    for step in range(3):
        _, state = model.predict(observation, state)
        model.predict(observation, episode_start=np.array([step == 0]))
    feed_forward = small("CartPole-v1")
    for _ in range(2):
        feed_forward.predict(observation)
    evaluate_policy(model, model.get_env(), 2, warn=False)  # type: ignore[arg-type]
    for _ in range(2):
        model.predict(observation, None, np.array([True]))
    assert not [warning for warning in recwarn if "predict" in str(warning.message)]
    for _ in range(2):  # as sb3-contrib evaluates with masks
        model.predict(observation, None, np.array([False]))
    assert [warning for warning in recwarn.list if "predict was called twice without a state" in str(warning.message)]
    model.predict(observation, None, np.array([True]))
    model.predict(observation)
    model.action_probability(observation)
    with pytest.warns(UserWarning, match="predict was called twice without a state") as warned:
        model.predict(observation)
    assert warned[0].filename == __file__


def test_predict_leaves_the_state_that_it_is_given_as_it_is() -> None:
    model = small(policy="MlpLstmPolicy")
    state = np.ones((1, model.policy.state_size), np.float32)
    model.predict(np.zeros((1, 4)), state, np.array([True]))
    assert (state == 1).all()


def test_processes_of_torchrun_that_train_alone_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for n_ranks in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", n_ranks)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            small().learn(10)
        said = [str(each.message) for each in found if "torchrun has started several processes" in str(each.message)]
        assert len(said) == (n_ranks == "2")


def test_an_agent_without_an_environment_says_how_to_give_it_one(tmp_path: Path) -> None:
    small().save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"env must be given before learn, by ACER.load\(path, env\) or set_env"):
        ACER.load(tmp_path / "agent").learn(10)


def test_policies_and_agents_of_another_algorithm_are_refused(tmp_path: Path) -> None:
    ppo = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    message = r"policy must be one of MlpPolicy, .* or a subclass of ACERPolicy \(policies of other .*\), got <class"
    with pytest.raises(ValueError, match=message):
        small(policy=ppo.policy_class)
    ppo.save(tmp_path / "ppo")
    with pytest.raises(ValueError, match=f"ppo could not be loaded: {message}"):
        ACER.load(tmp_path / "ppo")


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_algorithm_says_what_is_here_instead(name: str) -> None:
    other: dict[str, Any] = {name: 1}
    reason = OTHER_NAMES[name]
    instead = reason.removeprefix("none: ") if reason.startswith("none: ") else f"instead it has {reason}"
    with pytest.raises(TypeError, match=re.escape(f"ACER has no argument {name!r}; {instead}") + "$"):
        small(**other)
    named = re.findall(r"[a-z]+_[a-z_]+", OTHER_NAMES[name].split(":")[0].split("(")[0])
    assert set(named) <= inspect.signature(ACER).parameters.keys()


def test_a_name_that_is_mistyped_says_what_is_near() -> None:
    mistyped: dict[str, Any] = {"learning_rat": 1e-3}
    with pytest.raises(TypeError, match="ACER has no argument 'learning_rat'; it has 'learning_rate'"):
        small(**mistyped)
    of_trpo: dict[str, Any] = {"cg_max_steps": 15}  # n_steps is not near
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'cg_max_steps'"):
        small(**of_trpo)


def test_a_learning_rate_in_the_place_of_gamma_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"third argument is gamma, .* got 0.0003: .* learning_rate=0.0003") as caught:
        ACER("MlpPolicy", "CartPole-v1", 3e-4)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ACER("MlpPolicy", "CartPole-v1", 0.9)
        ACER("MlpPolicy", "CartPole-v1", gamma=0.0)


def in_a_dict() -> gym.Env[Any, Any]:
    return gym.wrappers.TransformObservation(
        gym.make("CartPole-v1"), lambda x: {"x": x}, spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (4,))})
    )


@pytest.mark.parametrize("argument", ["num_procs", "n_cpu_tf_sess"])
def test_the_old_names_of_the_number_of_threads_warn_and_act(argument: str) -> None:
    changes: dict[str, Any] = {argument: 2}
    with pytest.warns(DeprecationWarning, match=argument):
        small(**changes)
    assert th.get_num_threads() == 2


def test_replay_that_can_never_start_gives_a_warning() -> None:
    model = small(buffer_size=4)
    with pytest.warns(
        UserWarning, match=r"replay will never start: replay_start=10 is more than the 5 steps"
    ) as warned:
        model.learn(10)
    assert len(warned) == 1


def test_replay_that_starts_when_the_buffer_is_full_gives_no_warning() -> None:
    model = small(buffer_size=10, replay_start=10, replay_ratio=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(10)
    assert model._n_updates > 2


def test_a_loop_of_calls_whose_learning_rate_vanishes_gives_a_warning() -> None:
    scheduled, constant = small(learning_rate=0.01), small(learning_rate=0.01, lr_schedule="constant")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            scheduled.learn(100, reset_num_timesteps=False)
        for _ in range(5):
            constant.learn(100, reset_num_timesteps=False)
        scheduled.learn(0, reset_num_timesteps=False)
        small().learn(0)
    with pytest.warns(UserWarning, match="learning rate begins at 0.0033: lr_schedule='linear' counts the steps"):
        scheduled.learn(100, reset_num_timesteps=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled.learn(100)


def test_replay_that_a_loaded_buffer_is_too_small_for_gives_a_warning(tmp_path: Path) -> None:
    small(buffer_size=20).learn(40).save_replay_buffer(tmp_path / "buffer")
    model = small(buffer_size=500, replay_start=30)
    model.load_replay_buffer(tmp_path / "buffer")
    with pytest.warns(UserWarning, match="replay_start=30 is more than the 20 steps that a buffer of buffer_size=20"):
        model.learn(10)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("what", ["reward", "observation"])
@pytest.mark.parametrize("at", [12, 14])  # in mid-episode, and where one ends
def test_nan_and_infinite_values_stop_training_before_they_are_stored(
    what: str, value: float, at: int, tmp_path: Path
) -> None:
    env = make_vec_env(Recorder, n_envs=3)
    env.envs[1].unwrapped.spoil = (at, what, value)  # type: ignore[attr-defined]
    model = small(env, learning_rate=1e-3, replay_ratio=1)
    with pytest.raises(
        ValueError, match=rf"{what} must be finite, got .*{value}.* from environment 1 at step {at * 3}"
    ):
        model.learn(300)
    assert flat(model).isfinite().all()
    model.save(tmp_path / "agent")
    model.save_replay_buffer(tmp_path / "buffer")
    env.envs[1].unwrapped.spoil = None  # type: ignore[attr-defined]
    model.learn(90, reset_num_timesteps=False)
    assert model.replay_buffer.size() >= 30
    batch = model.replay_buffer.sample(100)
    assert isinstance(batch.observations, th.Tensor)
    assert batch.observations.isfinite().all()
    assert batch.rewards.isfinite().all()


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = trained()
    batch = a_batch(model)
    batch.rewards[2, 1] = th.inf
    before, average = flat(model), flat_average(model)
    with pytest.raises(
        ValueError, match=rf"q_ret must be finite, got .* at step 0 of a sequence from environment {batch.envs[1]}"
    ):
        model.update(batch)
    assert th.equal(flat(model), before)
    assert th.equal(flat_average(model), average)


# Recurrent policies


FROZEN: dict[str, Any] = {"learning_rate": 0.0, "lr_schedule": "constant", "replay_ratio": 0}
CORES: dict[str, dict[str, Any]] = {
    "an LSTM each": {},
    "two extractors": {"share_features_extractor": False},
    "a shared LSTM": {"shared_lstm": True, "enable_critic_lstm": False},
    "a critic without": {"enable_critic_lstm": False},
    "two layers": {"n_lstm_layers": 2},
}
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)
# How policy and critic use recurrent modules does not depend on the kind of module, nor either on the action space:
# each kind and each way once, in turns with discrete and continuous actions.
RECURRENT_AGENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an LSTM each": ("MlpLstmPolicy", CORES["an LSTM each"], "CartPole-v1"),
    "two extractors": ("MlpLstmPolicy", CORES["two extractors"], "Pendulum-v1"),
    "a shared LSTM": ("MlpLstmPolicy", CORES["a shared LSTM"], "CartPole-v1"),
    "a critic without": ("MlpLstmPolicy", CORES["a critic without"], "Pendulum-v1"),
    "two layers": ("MlpLstmPolicy", CORES["two layers"], "CartPole-v1"),
    "layer-normalised": ("MlpLnLstmPolicy", CORES["two layers"], "Pendulum-v1"),
    "GRU": ("MlpGruPolicy", CORES["an LSTM each"], "Pendulum-v1"),
}
every_recurrent_agent = pytest.mark.parametrize(
    ("policy", "core", "env_id"), RECURRENT_AGENTS.values(), ids=RECURRENT_AGENTS
)


def short_episodes(n_envs: int = 3, env_id: str = "CartPole-v1") -> VecEnv:
    """Some end in a terminal state, the others in a time limit of each environment's own."""
    return DummyVecEnv([lambda i=i: gym.make(env_id, max_episode_steps=7 + 4 * i) for i in range(n_envs)])  # type: ignore[misc]


def recurrent_agent(env: Any = None, policy: str = "MlpLstmPolicy", **changes: Any) -> ACER:
    """With a policy that depends much on its recurrent state."""
    changes["policy_kwargs"] = {**LSTM_KWARGS, **changes.get("policy_kwargs", {})}
    model = small(short_episodes() if env is None else env, policy, **changes)
    with th.no_grad():
        for weight in model.policy.parameters():
            weight.add_(0.5 * th.randn_like(weight))
    return model


def behaviour_of(model: ACER, batch: SequenceBatch) -> th.Tensor:
    return model.policy.statistics(batch)


def assert_replay_reproduces_the_behaviour(model: ACER) -> SequenceBatch:
    batch = model.replay_buffer.sample(300, None, np.random.default_rng(0))
    np.testing.assert_allclose(behaviour_of(model, batch), batch.behaviour, rtol=1e-5, atol=1e-5)
    return batch


def ratios_on_policy(env: VecEnv, policy: str, policy_kwargs: dict[str, Any]) -> th.Tensor:
    """Of all updates of a short training without replay, ``[updates, T, B]``."""
    changes = {"policy_kwargs": {**policy_kwargs, "ortho_init": False}, "learning_rate": 3e-3}
    model = small(env, policy, replay_ratio=0, lr_schedule="constant", **changes)
    updates = updates_of(model)
    model.learn(10 * model.n_steps * model.n_envs)
    ratios = [update.ratio for update in updates]
    assert len(ratios) == 10
    return th.stack(ratios)


@every_recurrent_agent
def test_ratios_on_policy_are_one_while_an_lstm_is_learning(policy: str, core: dict[str, Any], env_id: str) -> None:
    ratios = ratios_on_policy(short_episodes(env_id=env_id), policy, {**LSTM_KWARGS, **core})
    np.testing.assert_allclose(ratios, 1, atol=1e-5)


@pytest.mark.parametrize("policy", ["CnnLstmPolicy", "CnnLnLstmPolicy", "MultiInputLstmPolicy"])
def test_ratios_on_policy_are_one_for_images_and_dict_observations(policy: str) -> None:
    def image() -> gym.Env[Any, Any]:
        return FakeImageEnv(screen_height=40, screen_width=40, n_channels=3)

    env = DummyVecEnv([in_a_dict if policy.startswith("Multi") else image] * 2)
    # In bfloat16 what is rounded depends on the number of rows.
    ratios = ratios_on_policy(env, policy, {"lstm_hidden_size": 8, "use_bfloat16": False})
    np.testing.assert_allclose(ratios, 1, atol=3e-5)  # the epsilon of ratios counts where there are many actions


@every_recurrent_agent
def test_replay_reproduces_the_behaviour_from_the_stored_recurrent_state_and_not_from_zero(
    policy: str, core: dict[str, Any], env_id: str
) -> None:
    model = recurrent_agent(short_episodes(env_id=env_id), policy, policy_kwargs=core, **FROZEN).learn(150)
    batch = assert_replay_reproduces_the_behaviour(model)
    assert batch.ends[:-1].any()
    from_zero = batch._replace(states=th.zeros_like(batch.states))
    differs = (behaviour_of(model, from_zero) - batch.behaviour).abs().amax(-1) > 1e-5
    in_an_episode = (batch.states != 0).any(-1)
    assert in_an_episode.float().mean() > 0.5
    assert (differs[0] == in_an_episode).all()
    ended = batch.ends.cumsum(0) > 0
    assert not differs[1:][ended[:-1]].any()  # the recurrent state ends with the episode
    ratio = model.update(from_zero).ratio
    assert ((ratio - 1).abs()[0] > 1e-2).float().mean() > 0.25
    np.testing.assert_allclose(model.update(batch).ratio, 1, atol=1e-4)


def test_the_average_policy_starts_from_the_recurrent_state_of_the_behaviour_policy() -> None:
    """Its own is not known: it has never acted."""
    model = recurrent_agent(lr_schedule="constant", learning_rate=1e-2).learn(90)
    batch = a_batch(model)
    average, states, expected = model.average_policy, batch.states, []
    assert isinstance(batch.observations, th.Tensor)
    for row, ends in zip(batch.observations, batch.ends, strict=False):
        stats, states = average.step(row, states)
        states = states * ~ends.unsqueeze(-1)
        expected.append(stats.detach())
    assert (th.stack(expected) - behaviour_of(model, batch)).abs().max() > 1e-3
    np.testing.assert_allclose(model.update(batch).average_stats, th.stack(expected), rtol=1e-5, atol=1e-6)


@every_recurrent_agent
def test_burn_in_computes_the_recurrent_state_that_the_rest_of_a_sequence_starts_from(
    policy: str, core: dict[str, Any], env_id: str
) -> None:
    model = recurrent_agent(short_episodes(env_id=env_id), policy, policy_kwargs=core, burn_in=3, **FROZEN).learn(150)
    batch = model.replay_buffer.sample(100, None, np.random.default_rng(0))
    assert batch.ends[:3].any()
    assert isinstance(batch.observations, th.Tensor)
    states = batch.states
    for t in range(3):
        states = model.policy.step(batch.observations[t], states)[1].detach() * ~batch.ends[t].unsqueeze(-1)
    warm = model._after_burn_in(batch)
    np.testing.assert_allclose(warm.states, states, rtol=1e-4, atol=1e-5)
    assert not warm.states.requires_grad
    assert (warm.states - batch.states).abs().max() > 1e-2
    expected = batch.after(3, warm.states)
    for name in ("observations", "actions", "behaviour", "rewards", "ends", "final_observations", "final_steps"):
        assert th.equal(getattr(warm, name), getattr(expected, name)), name


def test_burn_in_is_for_replayed_sequences_only() -> None:
    model = recurrent_agent(burn_in=2, replay_ratio=3)
    updates = updates_of(model)
    model.learn(90)
    lengths = [len(update.batch.rewards) for update in updates]
    assert set(lengths) == {5, 3}
    assert lengths.count(5) == 6  # one for each rollout


def test_an_update_after_burn_in_is_of_the_steps_that_remain() -> None:
    model = recurrent_agent(burn_in=2, lr_schedule="constant").learn(90)
    batch = model.replay_buffer.sample(20, None, np.random.default_rng(0))
    policy, optimizer = (deepcopy(each.state_dict()) for each in (model.policy, model.policy.optimizer))
    average, rngs = deepcopy(model.average_policy.state_dict()), deepcopy(model._rngs)

    def updated(**changes: Any) -> th.Tensor:
        model.policy.load_state_dict(policy)
        model.policy.optimizer.load_state_dict(deepcopy(optimizer))
        model.average_policy.load_state_dict(average)
        model._rngs = deepcopy(rngs)
        model.update(model._after_burn_in(batch._replace(**changes)))
        return flat(model)

    def changed(column: th.Tensor, t: int) -> th.Tensor:
        column = column.clone()
        column[t] = 1 - column[t]
        return column

    expected = updated()
    for t in range(5):
        assert th.equal(updated(rewards=changed(batch.rewards, t)), expected) == (t < 2)
        assert th.equal(updated(actions=changed(batch.actions, t)), expected) == (t < 2)
        assert th.equal(updated(behaviour=changed(batch.behaviour, t)), expected) == (t < 2)
        assert isinstance(batch.observations, th.Tensor)
        assert not th.equal(
            updated(observations=changed(batch.observations, t)), expected
        )  # through the recurrent state
    assert not th.equal(updated(states=th.zeros_like(batch.states)), expected)


class Watch(BaseCallback):
    """Observations and recurrent states before each step, and which episodes it ends."""

    def __init__(self, last: float = np.inf) -> None:
        super().__init__()
        self.last = last
        self.steps: list[tuple[Any, Any, Any]] = []

    def _on_step(self) -> bool:
        model = self.model
        assert isinstance(model, ACER)
        self.steps.append((deepcopy(model._last_obs), model._states.copy(), self.locals["dones"].copy()))
        return self.n_calls < self.last


@every_recurrent_agent
def test_predicting_with_the_returned_state_acts_as_training_does(
    policy: str, core: dict[str, Any], env_id: str
) -> None:
    model = recurrent_agent(short_episodes(env_id=env_id), policy, policy_kwargs=core, **FROZEN)
    watch = Watch()
    model.learn(120, watch)
    state, starts = None, np.ones(3, bool)
    assert sum(dones.any() and not dones.all() for *_, dones in watch.steps) > 3
    for observation, states, dones in watch.steps:
        if state is not None:
            np.testing.assert_allclose(np.where(starts[:, np.newaxis], 0, state), states, rtol=1e-5, atol=1e-6)
            assert (states[starts] == 0).all()
            assert (states[~starts] != 0).all()
        _, state = model.predict(observation, state, starts)
        starts = dones


@pytest.mark.parametrize("loads", [True, False])
def test_a_recurrent_agent_acts_as_updates_see_it_where_a_rollout_was_truncated_in_its_midst(
    loads: bool, tmp_path: Path
) -> None:
    model = recurrent_agent(short_episodes(), "MlpLstmPolicy", **FROZEN)
    model.learn(120, Watch(8))
    assert 0 < model.replay_buffer.step < model.n_steps
    if loads:
        model.save_replay_buffer(tmp_path / "buffer")
        model.load_replay_buffer(tmp_path / "buffer")
    else:
        model.replay_buffer.end_episodes()
    model.learn(60, reset_num_timesteps=False)
    assert_replay_reproduces_the_behaviour(model)


def test_mask_is_another_name_for_episode_start() -> None:
    model = recurrent_agent("Pendulum-v1")
    observation, state = np.ones((2, 3), np.float32), np.ones((2, 32), np.float32)
    starts = np.array([True, False])
    ours = model.predict(observation, state, mask=starts, deterministic=True)
    theirs = model.predict(observation, state, episode_start=starts, deterministic=True)
    without = model.predict(observation, state, deterministic=True)
    for our, their, other in zip(ours, theirs, without, strict=True):
        np.testing.assert_array_equal(our, their)
        assert (our[0] != other[0]).any()
        np.testing.assert_array_equal(our[1], other[1])
    with pytest.raises(ValueError, match=r"mask is another name (for|of) episode_start: one of them must be None, got"):
        model.predict(observation, state, starts, mask=starts)


def test_a_mask_of_another_shape_is_refused_as_the_episode_starts_that_it_stands_for() -> None:
    with pytest.raises(ValueError, match=r"episode_start must be of shape \(2,\), got \(2, 1\)"):
        recurrent_agent().predict(np.zeros((2, 4), np.float32), mask=np.zeros((2, 1)))


@pytest.mark.parametrize("n_envs", [1, 3])
def test_evaluation_passes_the_recurrent_state_on(n_envs: int) -> None:
    model = recurrent_agent(short_episodes(env_id="Pendulum-v1"), policy_kwargs={"n_lstm_layers": 2})

    def played(forget: bool) -> list[float]:
        """Rewards of episodes in which actions are predicted one after the other, three in each environment."""
        env = short_episodes(n_envs, "Pendulum-v1")
        env.seed(0)
        rewards: list[list[float]] = [[0.0] for _ in range(n_envs)]
        observation, state, starts = env.reset(), None, np.ones(n_envs, bool)
        while min(map(len, rewards)) < 4:
            action, after = model.predict(observation, state, starts, deterministic=True)  # type: ignore[arg-type]
            state = None if forget else after
            observation, gained, starts, _ = env.step(action)
            for of_env, reward, done in zip(rewards, gained, starts, strict=True):
                of_env[-1] += float(reward)
                of_env += [0.0] if done else []
        return sorted(reward for of_env in rewards for reward in of_env[:3])

    env = short_episodes(n_envs, "Pendulum-v1")
    env.seed(0)
    rewards, _ = evaluate_policy(model, env, 3 * n_envs, return_episode_rewards=True, warn=False)
    assert isinstance(rewards, list)
    np.testing.assert_allclose(sorted(rewards), played(forget=False), rtol=1e-5)
    assert np.abs(np.subtract(sorted(rewards), played(forget=True))).max() > 1e-2


@with_and_without_recurrence
@pytest.mark.parametrize("parts", [[10, 10], [8, 12], [1, 18, 1], [3, 4, 13], [5, 6, 9]], ids=str)
def test_learning_in_parts_equals_learning_at_once(parts: list[int], recurrence: dict[str, Any]) -> None:
    """Also where a callback ends a part in the midst of a rollout."""
    arguments = {"lr_schedule": "constant", "replay_ratio": 2, **recurrence}
    whole, in_parts = (small(short_episodes(), **arguments) for _ in range(2))
    whole.learn(60)
    for n_steps in parts[:-1]:
        mid_rollout = (in_parts.num_timesteps // 3 + n_steps) % 5 > 0
        in_parts.learn(1000 if mid_rollout else 3 * n_steps, StopAt(n_steps) if mid_rollout else None, None, "", False)
    in_parts.learn(3 * parts[-1], reset_num_timesteps=False)
    assert in_parts.num_timesteps == whole.num_timesteps
    assert (in_parts._states != 0).any() or not recurrence
    np.testing.assert_array_equal(in_parts._states, whole._states)
    assert th.equal(flat(in_parts), flat(whole))
    assert th.equal(flat_average(in_parts), flat_average(whole))
    for ours, theirs in zip(a_batch(in_parts), a_batch(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_reset_sets_the_recurrent_state_to_zero() -> None:
    model, watch = recurrent_agent(**FROZEN), Watch()
    model.learn(60, StopAt(17))
    assert (model._states != 0).any()
    model.learn(60, watch)
    assert (watch.steps[0][1] == 0).all()
    assert (watch.steps[1][1] != 0).all()
    batch = assert_replay_reproduces_the_behaviour(model)
    assert batch.truncated[1].any()


def test_the_recurrent_state_continues_in_the_next_call_of_learn() -> None:
    model, watch = recurrent_agent(**FROZEN), Watch(last=7)
    model.learn(1000, watch)
    states = model._states.copy()
    assert (states != 0).any()
    again = Watch()
    model.learn(30, again, reset_num_timesteps=False)
    np.testing.assert_array_equal(again.steps[0][1], states)
    assert_replay_reproduces_the_behaviour(model)


@pytest.mark.parametrize("truncate_last_traj", [True, False])
def test_a_buffer_of_another_number_of_environments_is_not_continued(truncate_last_traj: bool, tmp_path: Path) -> None:
    small(make_vec_env("CartPole-v1", n_envs=2, seed=0)).learn(84).save_replay_buffer(tmp_path / "buffer")
    model = small(make_vec_env("CartPole-v1", n_envs=1, seed=0)).learn(23)
    model.load_replay_buffer(tmp_path / "buffer", truncate_last_traj)
    slot = np.array([model.replay_buffer.pos - 1])
    before = deepcopy(model.replay_buffer.gather(slot, np.zeros(1, int)))
    assert before.ends[-1].all()
    model.learn(10, reset_num_timesteps=False)
    after = model.replay_buffer.gather(slot, np.zeros(1, int))
    for name in ("final_observations", "final_steps", "truncated", "terminated", "rewards"):
        assert th.equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize("truncate_last_traj", [True, False])
def test_a_loaded_buffer_starts_its_sequences_from_the_stored_recurrent_states(
    truncate_last_traj: bool, tmp_path: Path
) -> None:
    model = recurrent_agent(**FROZEN)
    model.learn(300, StopAt(58))  # in the midst of a rollout
    model.save(tmp_path / "agent")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = ACER.load(tmp_path / "agent", env=short_episodes(), device="cpu", force_reset=truncate_last_traj)
    loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj)
    before = assert_replay_reproduces_the_behaviour(loaded)
    if not truncate_last_traj:
        np.testing.assert_array_equal(loaded._states, model._states)
        assert loaded.env is not None
        loaded.env.reset()
    loaded.learn(120, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() > model.replay_buffer.size()
    batch = assert_replay_reproduces_the_behaviour(loaded)
    for each in (before, batch):
        assert (each.states != 0).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("n_envs", [1, 2, 5])
def test_with_another_number_of_environments_replay_reproduces_the_behaviour(n_envs: int) -> None:
    model = recurrent_agent(**FROZEN).learn(150, StopAt(33))
    model.set_env(short_episodes(n_envs))
    watch = Watch()
    model.learn(10 * n_envs, watch, reset_num_timesteps=False)
    assert (watch.steps[0][1] == 0).all()
    assert watch.steps[0][1].shape == (n_envs, 32)
    batch = assert_replay_reproduces_the_behaviour(model)
    assert (batch.states != 0).any(-1).float().mean() > 0.5


@with_and_without_recurrence
def test_training_does_not_leak_tensors(recurrence: dict[str, Any]) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, th.Tensor) for thing in gc.get_objects())

    model = trained(replay_ratio=2, **recurrence)
    before = tensors()
    model.learn(80, reset_num_timesteps=False)
    assert tensors() <= before + 5  # 40 steps of the environments


def test_a_feed_forward_policy_stores_states_without_width() -> None:
    model = trained()
    assert (model.policy.state_size, model._states.shape) == (0, (2, 0))
    assert model.replay_buffer.latest().states.shape == (2, 0)
    assert a_batch(model).states.shape == (3, 0)


def assert_every_parameter_is_trained(model: ACER, n_steps: int = 60) -> None:
    """Every parameter changes, and stays finite."""
    before = {name: weight.detach().clone() for name, weight in model.policy.named_parameters()}
    model.learn(n_steps)
    assert model._n_updates > n_steps / model.n_steps / model.n_envs
    for name, weight in model.policy.named_parameters():
        assert weight.isfinite().all(), name
        assert not th.equal(weight, before[name]), name
    env = model.get_env()
    assert env is not None
    assert_actions_are_legal(model, env)


def assert_actions_are_legal(model: ACER, env: VecEnv) -> None:
    observation, state, starts = env.reset(), None, np.ones(env.num_envs, bool)
    for _ in range(5):
        actions, state = model.predict(observation, state, starts)  # type: ignore[arg-type]
        assert all(env.action_space.contains(action) for action in actions)
        observation, _, starts, _ = env.step(actions)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@every_core
def test_every_parameter_of_an_lstm_policy_is_trained(core: dict[str, Any], env_id: str) -> None:
    model = small(short_episodes(2, env_id), "MlpLstmPolicy", policy_kwargs={**LSTM_KWARGS, **core}, burn_in=1)
    assert_every_parameter_is_trained(model, 40)


@every_core
def test_every_parameter_of_an_lstm_policy_is_trained_with_dropout(core: dict[str, Any]) -> None:
    dropout = {"n_lstm_layers": 2, "lstm_kwargs": {"dropout": 0.5}}
    policy_kwargs = {**LSTM_KWARGS, **core, **dropout}
    model = small(short_episodes(2), "MlpLstmPolicy", policy_kwargs=policy_kwargs, replay_ratio=2)
    assert_every_parameter_is_trained(model, 40)


@pytest.mark.parametrize("policy", ["MlpLnLstmPolicy", "MlpGruPolicy"])
def test_every_parameter_of_the_other_recurrent_policies_is_trained(policy: str) -> None:
    kwargs = {**LSTM_KWARGS, "n_lstm_layers": 2}
    assert_every_parameter_is_trained(small(short_episodes(2), policy, policy_kwargs=kwargs), 40)


@pytest.mark.parametrize(
    ("policy", "core"),
    [
        ("CnnLstmPolicy", CORES["an LSTM each"]),
        ("CnnLstmPolicy", CORES["two extractors"]),
        ("CnnLnLstmPolicy", CORES["a shared LSTM"]),
    ],
    ids=str,
)
def test_every_parameter_of_a_recurrent_policy_for_images_is_trained(policy: str, core: dict[str, Any]) -> None:
    env = DummyVecEnv([lambda: FakeImageEnv(screen_height=40, screen_width=40, n_channels=3)])
    env.envs[0].observation_space.seed(0)  # which is what it shows
    # RMSprop's first steps on gradients this small can be lost in the rounding of the parameters.
    policy_kwargs = {"lstm_hidden_size": 8, "features_extractor_kwargs": {"features_dim": 16}, **core}
    policy_kwargs["optimizer_class"] = th.optim.Adam
    assert_every_parameter_is_trained(small(env, policy, policy_kwargs=policy_kwargs, replay_ratio=1), 30)


@pytest.mark.parametrize("core", [CORES["an LSTM each"], CORES["two extractors"]], ids=str)
def test_every_parameter_of_a_recurrent_policy_for_dict_observations_is_trained(core: dict[str, Any]) -> None:
    env = DummyVecEnv([in_a_dict, in_a_dict])
    model = small(env, "MultiInputLstmPolicy", policy_kwargs={**LSTM_KWARGS, **core})
    assert_every_parameter_is_trained(model, 40)


@pytest.mark.parametrize(
    "action_space", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), spaces.Box(-1, 1, (2, 2))], ids=str
)
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpLnLstmPolicy", "MlpGruPolicy"])
def test_recurrent_policies_act_in_every_action_space(policy: str, action_space: spaces.Space[Any]) -> None:
    env = Recorder(action_space)
    model = small(env, policy, policy_kwargs=LSTM_KWARGS, replay_ratio=1).learn(30)
    assert all(action_space.contains(action) for action in env.actions)
    assert flat(model).isfinite().all()


def test_an_agent_keeps_its_recurrent_state_where_a_finished_rollout_was_truncated() -> None:
    """The next rollout begins with the recurrent state, so that episodes go on as the environments do."""
    model = recurrent_agent(short_episodes(), "MlpLstmPolicy", **FROZEN)
    model.learn(1000, StopAt(2 * model.n_steps))
    assert model.replay_buffer.step == 0
    states = model._states.copy()
    assert (states != 0).any()
    model.replay_buffer.end_episodes()  # as load_replay_buffer does
    watch = Watch()
    model.learn(30, watch, reset_num_timesteps=False)
    np.testing.assert_array_equal(watch.steps[0][1], states)


# It learns


@pytest.mark.parametrize("env_class", [IdentityEnv, IdentityEnvMultiDiscrete, IdentityEnvMultiBinary, IdentityEnvBox])
def test_the_identity_is_learnt_for_every_action_space(env_class: type[gym.Env[Any, Any]]) -> None:
    """100 steps with a reward of 1 for an action that equals the observation."""
    box = env_class is IdentityEnvBox
    env = DummyVecEnv([lambda: env_class(eps=0.5) if box else env_class(4)] * 16)  # type: ignore[call-arg]
    policy_kwargs = {"net_arch": [16], "optimizer_class": th.optim.Adam, **({"log_std_init": -0.5} if box else {})}
    model = small(env, gamma=0.4, learning_rate=1e-2, ent_coef=0.0, replay_ratio=2, policy_kwargs=policy_kwargs)
    model.learn(4000)
    rewards, _ = evaluate_policy(model, env, 16, return_episode_rewards=True, warn=False)
    assert np.mean(rewards) > 90


def test_cartpole_is_learnt_in_seconds() -> None:
    model = ACER(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=1),
        replay_ratio=6,
        batch_size=16,
        buffer_size=2000,
        learning_rate=2e-3,
        ent_coef=0.001,
        max_grad_norm=1.0,
        policy_kwargs={"optimizer_class": th.optim.Adam},
        seed=1,
        device="cpu",
    )
    model.learn(20_000)
    rewards, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 8, seed=9), 16, return_episode_rewards=True)
    assert np.mean(rewards) >= 80  # a random policy has 22; of sixteen seeds the worst had 104


def catching(use_bfloat16: bool, seed: int = 0) -> ACER:
    """With stacks of frames that are stored once."""
    return ACER(
        "CnnPolicy",
        VecFrameStack(make_vec_env(Catch, 8, seed=seed), 2),
        gamma=0.9,
        learning_rate=1e-3,
        lr_schedule="constant",
        ent_coef=0.003,
        replay_start=100,
        n_steps=8,
        policy_kwargs={"use_bfloat16": use_bfloat16, "optimizer_class": th.optim.Adam},
        seed=seed,
        device="cpu",
    )


@pytest.mark.parametrize(
    "use_bfloat16",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # processors without bfloat16 take a minute
    ids=["float32", "bfloat16"],
)
def test_catching_a_ball_is_learnt_from_pixels(use_bfloat16: bool) -> None:
    model = catching(use_bfloat16).learn(4000)
    env = model.get_env()
    assert env is not None
    reward, _ = evaluate_policy(model, env, 100, warn=False)
    assert isinstance(reward, float)
    assert reward > 0.6  # a random policy has -0.6


def test_bfloat16_within_another_autocast_computes_with_the_present_weights() -> None:
    expected = catching(use_bfloat16=True).learn(100)
    model = catching(use_bfloat16=True)
    with th.autocast("cpu", enabled=False):
        model.learn(100)
    assert th.equal(flat(model), flat(expected))


def test_an_update_in_bfloat16_is_nearly_the_one_in_float32() -> None:
    exact, fast = catching(False).learn(200), catching(True)
    for model in (exact, fast):
        model.policy.load_state_dict(exact.policy.state_dict())
        model.average_policy.load_state_dict(exact.average_policy.state_dict())
        model.policy.optimizer = model.policy.flat.make_optimizer(th.optim.SGD, 1.0, {})
    batch, before = exact.replay_buffer.latest(), flat(exact)
    for model in (exact, fast):
        model.update(batch)
    changes = [flat(model) - before for model in (exact, fast)]
    assert changes[0].norm() > 1e-3
    assert th.cosine_similarity(changes[0], changes[1], 0) > 0.99
    assert not th.equal(*changes)


def test_a_compiled_features_extractor_learns_the_same(tmp_path: Path) -> None:
    graphs = []

    def backend(graph: th.fx.GraphModule, inputs: list[th.Tensor]) -> Any:  # the default one needs a C++ compiler
        graphs.append(graph)
        return graph.forward

    def learn(compiled: bool) -> ACER:
        env = VecFrameStack(make_vec_env(Catch, 2, seed=0), 2)
        model = small(env, "CnnPolicy", n_steps=8, replay_start=16, replay_ratio=1)
        for policy in (model.policy, model.average_policy) if compiled else ():
            policy.features_extractor.compile(backend=backend)
        return model.learn(64)

    model = learn(compiled=True)
    assert graphs
    assert th.equal(flat(model), flat(learn(compiled=False)))
    model.save(tmp_path / "compiled")
    assert th.equal(flat(ACER.load(tmp_path / "compiled")), flat(model))


@pytest.mark.parametrize(
    ("policy", "policy_kwargs", "optimizer"),
    [
        ("MlpPolicy", {}, RMSpropTFLike),
        ("MlpLstmPolicy", {}, th.optim.Adam),
        ("MlpGruPolicy", {}, th.optim.Adam),
        ("MlpPolicy", {"recurrent_class": LSTM}, th.optim.Adam),
        ("MlpLstmPolicy", {"optimizer_class": RMSpropTFLike}, RMSpropTFLike),
    ],
    ids=str,
)
def test_recurrent_policies_have_adam_unless_another_optimizer_is_named(
    policy: str, policy_kwargs: dict[str, Any], optimizer: type[th.optim.Optimizer], tmp_path: Path
) -> None:
    model = small(short_episodes(), policy, policy_kwargs=policy_kwargs)
    assert isinstance(model.policy.optimizer, optimizer)
    model.save(tmp_path / "agent")
    assert isinstance(ACER.load(tmp_path / "agent").policy.optimizer, optimizer)


class WithSGD(MlpLstmPolicy):
    def __init__(self, *args: Any, optimizer_class: Any = th.optim.SGD, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"optimizer_class": optimizer_class})


class WithAdam(MlpPolicy):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("optimizer_class", th.optim.Adam)
        super().__init__(*args, **kwargs)


class Narrow(MlpPolicy):
    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any) -> None:
        super().__init__(observation_space, action_space, lr_schedule, net_arch=[4])


class NarrowLSTM(MlpLstmPolicy):
    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any) -> None:
        super().__init__(observation_space, action_space, lr_schedule, lstm_hidden_size=4)


class Remembering(MlpPolicy):
    def __init__(self, *args: Any, recurrent_class: Any = LSTM, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"recurrent_class": recurrent_class, "lstm_hidden_size": 4})


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        (WithSGD, th.optim.SGD),
        (WithAdam, th.optim.Adam),
        (Narrow, RMSpropTFLike),
        (NarrowLSTM, th.optim.Adam),
        (Remembering, th.optim.Adam),
        ("MlpPolicy", RMSpropTFLike),
        ("MlpGruPolicy", th.optim.Adam),
    ],
)
def test_the_class_of_the_policy_chooses_the_optimizer(policy: Any, optimizer: type, tmp_path: Path) -> None:
    model = small(short_episodes(), policy, rprop_alpha=0.9, policy_kwargs=None).learn(20)
    assert not model.policy_kwargs
    assert isinstance(model.policy.optimizer, optimizer)
    if optimizer is RMSpropTFLike:
        assert model.policy.optimizer.param_groups[0]["alpha"] == 0.9
    model.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", env=short_episodes())
    assert isinstance(loaded.policy.optimizer, optimizer)
    loaded.learn(20)


def test_an_argument_that_no_class_of_a_policy_knows_is_named() -> None:
    message = r"policy_kwargs must be arguments of WithAdam, got 'layers': .*; stable-baselines' layers is now net_arch"
    with pytest.raises(ValueError, match=message):
        small(policy=WithAdam, policy_kwargs={"layers": [8]})


@pytest.mark.parametrize("name", UNUSED_METHODS)
def test_a_method_of_other_policies_that_is_not_called_gives_a_warning(name: str) -> None:
    policy = type("Custom", (MlpPolicy,), {name: lambda self: None})
    with pytest.warns(UserWarning, match=f"policy Custom has {name}, which ACER does not call: policy_kwargs with"):
        small(policy=policy)


class WithOwnNetworks(MlpPolicy):
    def _build(self) -> None:
        super()._build()
        self.pi_net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8))
        self.pi_head = nn.Linear(8, 2)


def test_a_policy_may_make_its_own_networks(tmp_path: Path) -> None:
    model = small(short_episodes(), policy=WithOwnNetworks)
    before = {name: value.clone() for name, value in model.policy.pi_net.state_dict().items()}
    model.learn(40)
    after = model.policy.pi_net.state_dict()
    assert {"2.weight", "2.bias"} < before.keys()  # the normalisation's
    assert not any(th.equal(after[name], before[name]) for name in before)
    model.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", env=short_episodes())
    assert th.equal(flat(loaded), flat(model))
    loaded.learn(20)


def reached(policy: str, env_class: type[gym.Env[Any, Any]], length: int, n_timesteps: int, **changes: Any) -> float:
    """Mean reward of 100 episodes after training."""
    width = {} if policy == "MlpPolicy" else {"lstm_hidden_size": changes.pop("lstm_hidden_size", 16)}
    policy_kwargs = {"net_arch": [16], "optimizer_class": th.optim.Adam, **width}
    kwargs = {"length": length}
    env = make_vec_env(env_class, changes.pop("n_envs", 4), env_kwargs=kwargs)
    arguments: dict[str, Any] = {"n_steps": 10, "batch_size": 8, "replay_ratio": 4, "replay_start": 50}
    arguments |= {"gamma": 0.95, "learning_rate": 1e-2, **changes}
    model = small(env, policy, **arguments, policy_kwargs=policy_kwargs).learn(n_timesteps)
    rewards, _ = evaluate_policy(model, make_vec_env(env_class, 4, seed=100, env_kwargs=kwargs), 100, warn=False)
    assert isinstance(rewards, float)
    return rewards


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpLnLstmPolicy", "MlpGruPolicy"])
def test_a_recurrent_policy_learns_to_recall_what_it_observed_three_steps_ago(policy: str) -> None:
    assert reached(policy, Recall, 3, 3000, n_envs=16, batch_size=16) > 0.9


def test_a_feed_forward_policy_cannot_learn_to_recall() -> None:
    assert abs(reached("MlpPolicy", Recall, 3, 3000, n_envs=16, batch_size=16)) < 0.4  # four standard errors


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpLnLstmPolicy"])
@pytest.mark.parametrize("seed", range(3))
def test_a_recurrent_policy_learns_to_recall_what_it_observed_ten_steps_ago(policy: str, seed: int) -> None:
    assert reached(policy, Recall, 10, 20_000, n_steps=20, learning_rate=3e-3, seed=seed) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_lstm_learns_the_t_maze(seed: int) -> None:
    """Worth 4; without a recurrent state 1.95, the mean of the right turn and the wrong one."""
    settings = {"n_steps": 20, "batch_size": 16, "gamma": 0.98, "seed": seed}
    assert reached("MlpLstmPolicy", TMaze, 10, 60_000, lstm_hidden_size=32, **settings) > 3.8
    assert reached("MlpPolicy", TMaze, 10, 20_000, **settings) < 2.5


class Scaled(BaseFeaturesExtractor):
    """Makes a tensor when it is called first, as positions of a transformer are often made."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, observation_space.shape[0])
        self.layer = th.nn.Linear(self.features_dim, self.features_dim)
        self.scale: th.Tensor | None = None

    def forward(self, observations: th.Tensor) -> th.Tensor:
        if self.scale is None:
            self.scale = th.ones(self.features_dim)
        scaled: th.Tensor = self.layer(observations) * self.scale
        return scaled


def test_a_module_may_keep_tensors_that_it_made_while_acting() -> None:
    kwargs = {"features_extractor_class": Scaled, "net_arch": [8]}
    model = ACER("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, n_steps=8, replay_start=16, seed=0).learn(64)
    assert model._n_updates >= 8


def test_images_that_are_too_small_for_the_convolutions_are_refused() -> None:
    env = FakeImageEnv(screen_height=16, screen_width=16, n_channels=1)
    with pytest.raises(ValueError, match=r"observation_space must have images .*, 36 x 36 at least .*, got Box"):
        ACER("CnnPolicy", env)


def test_hooks_of_layers_run_in_training_and_in_acting() -> None:
    model = ACER("MlpPolicy", "CartPole-v1", n_steps=8, replay_ratio=0, device="cpu")
    rows: list[int] = []
    model.policy.pi_net[0].register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    model.predict(np.zeros((3, 4), np.float32))
    assert rows == [3]
    model.learn(8)
    assert rows == [3, *[1] * 8, 9]


@pytest.mark.parametrize("stacked", [False, True])
def test_every_update_is_on_rewards_and_observations_as_vec_normalize_makes_them(stacked: bool) -> None:
    normalize = VecNormalize(make_vec_env(Recorder, n_envs=2))
    model = small(VecFrameStack(normalize, 2) if stacked else normalize, replay_ratio=3)
    update, n_sequences = model.update, []

    def watched(batch: SequenceBatch) -> Update:
        raw = model.replay_buffer.gather(batch.slots, batch.envs)
        observations: Any = raw.observations
        if not stacked:
            assert th.equal(observations[:-1, :, 1] + 1, raw.rewards)  # Recorder's clock: they are stored raw
        expected = observations if stacked else th.as_tensor(normalize.normalize_obs(observations.numpy()))
        assert th.equal(th.as_tensor(batch.observations), expected)
        assert th.equal(batch.rewards, th.as_tensor(normalize.normalize_reward(raw.rewards.numpy())))
        assert not th.equal(batch.rewards, raw.rewards)
        n_sequences.append(len(batch.envs))
        return update(batch)

    model.update = watched  # type: ignore[method-assign]
    model.learn(100)
    assert len(n_sequences) > 20
    assert normalize.norm_obs


def test_updates_are_made_in_training_mode_and_actions_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    modes: set[Any] = set()
    update, act = model.update, model.policy.act

    def watched_update(batch: SequenceBatch) -> Update:
        modes.add((model.policy.training, model.average_policy.training))
        return update(batch)

    def watched_act(*args: Any) -> Any:
        modes.add(model.policy.training)
        return act(*args)

    monkeypatch.setattr(model, "update", watched_update)
    monkeypatch.setattr(model.policy, "act", watched_act)
    model.learn(40)
    assert modes == {(True, False), False}


def test_a_rollout_that_ends_where_a_callback_stops_has_the_schedules_of_its_last_step() -> None:
    model = small(learning_rate=1e-3, ent_schedule="linear", ent_coef=1.0, replay_ratio=0).learn(100, StopAt(5))
    assert model._n_updates == 1
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.95)
    assert model.settings().ent_coef == pytest.approx(0.95)


def test_a_gradient_that_a_hook_replaces_is_clipped_and_followed() -> None:
    kwargs: dict[str, Any] = {"net_arch": [4], "optimizer_class": th.optim.SGD}
    model = small(max_grad_norm=1e-3, learning_rate=1.0, lr_schedule="constant", policy_kwargs=kwargs).learn(5)

    def double(parameter: th.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = 2 * parameter.grad

    for parameter in model.policy.parameters():
        parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.update(model.replay_buffer.latest())
    moved = [(new - old).flatten() for new, old in zip(model.policy.parameters(), before, strict=True)]
    assert th.cat(moved).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_group_counts_the_rollouts_and_steps_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(make_vec_env("CartPole-v1", 2))
    monkeypatch.setattr("sb3_acer.distributed.world_size", lambda: 3)
    model._set_log_interval("auto", 5 * 2 * 3 * 1000)
    assert model._log_interval == 50
    assert any("this call learns nothing: 30 steps" in hint for hint in model._hints(30, True))
    assert not any("this call learns nothing" in hint for hint in model._hints(31, True))


def test_histograms_are_of_the_rollout_and_not_of_what_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(make_vec_env("CartPole-v1", 2), full_tensorboard_log=True, replay_ratio=5)
    recorded: list[tuple[int, bool]] = []

    def record(update: Update) -> None:
        recorded.append((model.num_timesteps, bool((update.batch.slots == model.replay_buffer.pos - 1).all())))

    monkeypatch.setattr(model, "record_distributions", record)
    model.learn(100, log_interval=1)
    assert recorded == [(step, True) for step in range(10, 101, 10)]


def test_the_largest_seed_is_a_seed_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sb3_acer.distributed.rank", lambda: 1)
    small(make_vec_env("CartPole-v1", 2), seed=2**32 - 1).set_random_seed(2**32 - 1)


@pytest.mark.parametrize("name", ["ratio", "q_ret", "g", "z"])
def test_what_is_not_finite_is_named(name: str) -> None:
    model = trained()
    update = model.update(a_batch(model))
    value = getattr(update, name).clone()
    value[2, 1] = math.nan
    found = model._find_not_finite(update._replace(**{name: value}))
    assert re.match(rf"{name} must be finite, got .* at step 2 of a sequence from environment", found)


def test_a_progress_bar_is_shown_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    class Bar(BaseCallback):
        def _on_step(self) -> bool:
            shown.append(self.num_timesteps)
            return True

    monkeypatch.setattr("stable_baselines3.common.base_class.ProgressBarCallback", Bar)
    small().learn(10)
    assert not shown
    small().learn(10, progress_bar=True)
    assert shown == list(range(1, 11))


def test_predictions_have_no_dropout_where_a_part_of_the_policy_alone_is_in_training_mode() -> None:
    model = small(Recorder(), policy_kwargs={"features_extractor_class": WithDropout})
    with th.no_grad():
        model.policy.pi_head.weight.mul_(300)
    model.policy.set_training_mode(False)
    model.policy.features_extractor.train()
    one, *others = (model.action_probability(np.ones(2, np.float32)) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_an_agent_with_vec_normalize_is_copied() -> None:
    agent = small(VecNormalize(make_vec_env("CartPole-v1", 1))).learn(10)
    rows = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    ours, theirs = (each.predict(rows, deterministic=True)[0] for each in (agent, deepcopy(agent)))
    np.testing.assert_array_equal(ours, theirs)


def test_the_metrics_of_the_last_rollout_are_logged_though_it_is_none_of_the_interval() -> None:
    rows = logged(5 * 12, log_interval=5)
    assert steps_of(rows) == [25, 50, 60]
    assert all("train/q_loss" in row for row in rows)


def test_the_final_observation_of_an_earlier_episode_is_none_of_a_step_within_one() -> None:
    class SameInfo(Recorder):
        """Returns the same dict at each step: DummyVecEnv's terminal_observation stays in it."""

        def step(self, action: Any) -> Any:
            self.told: dict[str, Any] = getattr(self, "told", {})
            *rest, info = super().step(action)
            self.told.update(info)
            return *rest, self.told

    env = DummyVecEnv([lambda: SameInfo(length=3), lambda: SameInfo(length=4)])
    observations = th.as_tensor(small(env, n_steps=4).learn(8).replay_buffer.latest().observations)
    assert observations[-1, 0].tolist() == [1, 4]


def test_steps_from_outside_that_end_an_episode_of_one_environment_are_followed_by_a_reset() -> None:
    env = DummyVecEnv([lambda: Recorder(length=3), lambda: Recorder(length=50)])
    agent = small(env, n_steps=2).learn(4)
    for _ in range(2):
        env.step(np.zeros(2, int))
    agent.learn(4, reset_num_timesteps=False)
    assert (np.asarray(agent._last_obs)[:, 0] == 2).all()


def test_a_seed_of_0_that_is_given_to_load_begins_the_draws_anew(tmp_path: Path) -> None:
    small(seed=5).learn(20).save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", device="cpu", seed=0)
    assert [rng.random() for rng in loaded._rngs] == [rng.random() for rng in small(seed=0)._rngs]


def test_parameters_that_are_refused_halfway_change_nothing() -> None:
    agent = small(seed=0)
    before = agent.get_parameters()
    given = {**small(seed=1).get_parameters(), "policy.optimizer": {"state": {}, "param_groups": []}}
    with pytest.raises(ValueError, match="load_path_or_dict must fit the agent"):
        agent.set_parameters(given)
    for part in ("policy", "average_policy"):
        for name, value in agent.get_parameters()[part].items():
            assert th.equal(value, before[part][name]), name


def test_the_number_of_replays_does_not_depend_on_what_is_replayed() -> None:
    def numbers(batch_size: int) -> list[int]:
        found: list[int] = []
        agent = small(batch_size=batch_size, replay_start=5, seed=0)
        agent.learn(100, lambda *_: found.append(agent._n_replays))
        return found

    assert numbers(1) == numbers(3)
