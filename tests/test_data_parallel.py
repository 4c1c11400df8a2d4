"""The ranks of a group train one agent: the same algorithm, with the environments of all."""

import os
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    ProgressBarCallback,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecNormalize

from sb3_acer import ACER, checkpoint
from sb3_acer.callbacks import all_callbacks
from sb3_acer.checkpoint import find_checkpoint
from sb3_acer.distributed import RankError
from sb3_acer.sequences import SequenceBatch
from sb3_acer.shared_memory import Board
from sb3_acer.update import Update
from tests.helpers import NormalisedFeatures, Recorder, Rows
from tests.ranks import Raised, on_ranks
from tests.test_resuming import KillAt, Killed, state_of
from tests.test_resuming import require_same as require_same_state

SMALL: dict[str, Any] = {"n_steps": 8, "buffer_size": 200, "replay_ratio": 1, "replay_start": 32, "seed": 3}
SMALL |= {"device": "cpu", "policy_kwargs": {"net_arch": [8]}}


def make_model(env: Any = "CartPole-v1", **arguments: Any) -> ACER:
    env = env if isinstance(env, VecEnv) else make_vec_env(env, 2)
    return ACER("MlpPolicy", env, **{**SMALL, **arguments})


def networks(model: ACER) -> list[np.ndarray]:
    """All numbers of policy, average policy and optimiser."""
    state = model.policy.optimizer.state_dict()["state"]
    tensors = [part for number in state for part in state[number].values() if isinstance(part, th.Tensor)]
    vectors = [*model.policy.flat.vectors, *model.average_policy.flat.vectors, *tensors]
    return [vector.detach().numpy().copy() for vector in vectors]


def require_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


class Columns:
    """A generator that draws for the sequences of all ranks, and returns those of one."""

    def __init__(self, columns: slice, n_sequences: int) -> None:
        self.columns, self.n_sequences = columns, n_sequences
        self.rng = np.random.default_rng(5)

    def standard_normal(self, shape: tuple[int, ...]) -> np.ndarray:
        own = len(range(self.n_sequences)[self.columns])
        drawn = self.rng.standard_normal((shape[0] // own, self.n_sequences, *shape[1:]))
        return drawn[:, self.columns].reshape(shape)


def part(batch: SequenceBatch, columns: slice) -> SequenceBatch:
    """Some of a batch's sequences, none of which is truncated."""
    assert len(batch.final_steps) == 0
    values = {name: getattr(batch, name)[:, columns] for name in (*batch._fields[:6], "weights")}
    values |= {name: getattr(batch, name)[columns] for name in ("states", "slots", "envs")}
    return batch._replace(**values)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_update_of_two_ranks_is_that_of_one_process_on_the_sequences_of_both(env_id: str) -> None:
    # Steps of plain gradient descent: RMSProp enlarges gradients that are hardly more than rounding.
    arguments: dict[str, Any] = {"learning_rate": 0.05, "lr_schedule": "constant", "max_grad_norm": 0.5}
    arguments["policy_kwargs"] = {"net_arch": [8], "optimizer_class": th.optim.SGD}
    model = make_model(env_id, **arguments).learn(64)
    batches = [model.replay_buffer.sample(6, rng=np.random.default_rng(index)) for index in range(3)]
    start = model.get_parameters()

    def updated(rank: int, columns: slice) -> tuple[list[np.ndarray], list[float]]:
        learner = make_model(env_id, **arguments)
        learner.set_parameters(start, device="cpu")
        rng: Any = Columns(columns, 6)
        learner._rngs = learner._rngs._replace(candidates=rng)
        norms = [learner.update(part(batch, columns)).grad_norm for batch in batches]
        return networks(learner), norms

    expected, expected_norms = updated(0, slice(0, 6))
    before = networks(model)
    (ours, norms), (theirs, _) = on_ranks(lambda rank: updated(rank, slice(3 * rank, 3 * rank + 3)))
    require_same(ours, theirs)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    for old, mine, other in zip(before, ours, expected, strict=True):
        assert np.abs(mine - old).max() > 1e-3
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


class Seen(VecEnvWrapper):
    """Keeps all observations that the environments make."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self.observations: list[Any] = []

    def reset(self) -> Any:
        self.observations.append(self.venv.reset())
        return self.observations[-1]

    def step_wait(self) -> Any:
        step = self.venv.step_wait()
        self.observations.append(step[0])
        return step


def learnt(rank: int) -> dict[str, Any]:
    seen = Seen(make_vec_env("CartPole-v1", 2))
    model = make_model(VecNormalize(seen), seed=None, replay_ratio=1)  # seeds of its own on each rank
    rows = Rows()
    episodes: list[float] = []
    model.set_logger(Logger(None, [rows]))

    def remember(step: dict[str, Any], _: dict[str, Any]) -> bool:
        episodes.extend(info["episode"]["r"] for info in step["infos"] if "episode" in info)
        return True

    ratios: dict[int, list[float]] = {}
    update = model.update

    def watched(batch: SequenceBatch) -> Update:
        found = update(batch)
        ratios.setdefault(model._n_rollouts, []).append(found.ratio.mean().item())
        return found

    model.update = watched  # type: ignore[method-assign]
    model.learn(640, remember, log_interval=5)
    normalize = model.get_vec_normalize_env()
    assert normalize is not None
    statistics = [normalize.obs_rms, normalize.ret_rms]
    return {
        "networks": networks(model),
        "moments": [np.array(part) for each in statistics for part in vars(each).values() if part is not None],
        "seen": np.array(seen.observations),
        "counts": [model.num_timesteps, model._n_updates, model._n_rollouts, model._episode_num],
        "rate": model.policy.optimizer.param_groups[0]["lr"],
        "steps": model.replay_buffer.size() * model.n_envs,
        "episodes": episodes,
        "kept": [episode["r"] for episode in model.ep_info_buffer or []],
        "rows": rows.rows,
        "ratios": ratios[20],
        "draws": [rng.random() for rng in model._rngs],
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """Two ranks that have learnt, with normalisation."""
    results = on_ranks(learnt)
    assert all(isinstance(each, dict) for each in results), results
    return results


def test_networks_are_equal_on_all_ranks_to_the_bit(trained: list[dict[str, Any]]) -> None:
    require_same(trained[0]["networks"], trained[1]["networks"])


def test_steps_of_all_ranks_are_counted(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["counts"] == trained[1]["counts"]
    assert trained[0]["counts"][::2] == [640, 20]  # rollouts of 2 ranks x 2 environments x 8 steps
    assert trained[0]["steps"] + trained[1]["steps"] == 640
    assert trained[0]["rate"] == pytest.approx(0, abs=1e-9)  # the schedule has come to its end


def test_experience_and_draws_differ_by_rank_but_for_the_number_of_replays(trained: list[dict[str, Any]]) -> None:
    first, second = (each["seen"][0] for each in trained)
    assert len({tuple(row) for row in (*first, *second)}) == 4
    *ours, schedule = trained[0]["draws"]
    *theirs, shared = trained[1]["draws"]
    assert schedule == shared
    assert len({*ours, *theirs}) == 6


def test_statistics_are_those_of_the_observations_of_all_ranks(trained: list[dict[str, Any]]) -> None:
    require_same(trained[0]["moments"], trained[1]["moments"])
    whole = RunningMeanStd(shape=(4,))
    for each in trained:
        whole.update(each["seen"].reshape(-1, 4))
    np.testing.assert_allclose(trained[0]["moments"][0], whole.mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(trained[0]["moments"][1], whole.var, rtol=1e-5)
    assert trained[0]["moments"][2] == pytest.approx(whole.count)


def test_rank_0_alone_logs_with_the_episodes_of_all(trained: list[dict[str, Any]]) -> None:
    assert trained[1]["rows"] == []
    assert [row["time/total_timesteps"] for row in trained[0]["rows"]] == [160, 320, 480, 640]
    of_all = [*trained[0]["episodes"], *trained[1]["episodes"]]
    assert trained[0]["kept"] == trained[1]["kept"]
    assert sorted(trained[0]["kept"]) == sorted(of_all)
    last = trained[0]["rows"][-1]
    assert last["time/episodes"] == len(of_all) == trained[0]["counts"][-1]
    assert last["rollout/ep_rew_mean"] == pytest.approx(np.mean(of_all))
    assert last["train/ratio_mean"] == pytest.approx(np.mean([each["ratios"] for each in trained]))
    assert trained[0]["ratios"] != trained[1]["ratios"]


def test_environments_have_the_seeds_that_they_would_have_in_one_process() -> None:
    def first_observations(n_envs: int) -> Any:
        model = make_model(make_vec_env("CartPole-v1", n_envs))
        model._setup_learn(100)
        return model._last_obs

    np.testing.assert_array_equal(np.concatenate(on_ranks(lambda rank: first_observations(2))), first_observations(4))


def test_without_a_group_a_seed_gives_what_rank_0_draws() -> None:
    def draws(rank: int) -> list[float]:
        return [rng.random() for rng in make_model()._rngs]

    ours, theirs = on_ranks(draws)
    assert draws(0) == ours
    assert not {*ours} & {*theirs}


class StopAt(BaseCallback):
    """Wants to stop after some calls."""

    def __init__(self, n_calls: int | None) -> None:
        super().__init__()
        self.at = n_calls
        self.seen: list[int] = []

    def _on_step(self) -> bool:
        self.seen.append(self.num_timesteps)
        return self.n_calls != self.at


def test_a_callback_that_stops_training_on_one_rank_stops_all_at_the_end_of_the_rollout() -> None:
    def act(rank: int) -> Any:
        model, callback = make_model(), StopAt(11 if rank == 1 else None)
        model.learn(640, callback)
        stopped = (model.num_timesteps, model._n_rollouts, model.replay_buffer.step, callback.seen)
        model.learn(64, reset_num_timesteps=False)
        return stopped, model.num_timesteps, networks(model)

    (ours, total, mine), (theirs, _, others) = on_ranks(act)
    assert ours == theirs == (64, 2, 0, list(range(4, 68, 4)))
    assert total == 128
    require_same(mine, others)


def test_evaluations_are_of_rank_0_and_stop_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("evaluations")

    class StopAfterTwo(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 2

    def act(rank: int) -> Any:
        env = make_vec_env("CartPole-v1", 1)
        path = str(folder / str(rank))
        evaluation = EvalCallback(
            env, callback_after_eval=StopAfterTwo(), eval_freq=12, n_eval_episodes=1, log_path=path, verbose=0
        )
        nested = CallbackList([EveryNTimesteps(4, evaluation)])
        model = make_model().learn(640, [nested] if rank else evaluation)
        return model.num_timesteps, len(evaluation.evaluations_timesteps), os.path.exists(path)

    assert on_ranks(act) == [(96, 2, True), (96, 0, False)]


def test_an_error_on_one_rank_stops_all() -> None:
    def act(rank: int) -> Any:
        model = make_model(make_vec_env(lambda: Recorder(length=50), 2))
        model.learn(64)
        before = networks(model)
        if rank == 1:
            model.env.envs[1].unwrapped.spoil = (20, "reward", np.nan)  # type: ignore[union-attr]
        kind = ValueError if rank == 1 else RuntimeError
        with pytest.raises(kind) as raised:
            model.learn(640, reset_num_timesteps=False)
        require_same(networks(model), before)
        return str(raised.value)

    ours, theirs = on_ranks(act)
    assert theirs.startswith("reward must be finite, got nan from environment 1")
    assert ours == f"training stops: rank 1 has failed: ValueError: {theirs}"


def test_nan_in_a_sequence_of_one_rank_stops_all_before_the_update() -> None:
    def act(rank: int) -> Any:
        model = make_model().learn(96)
        before = networks(model)
        batch = model.replay_buffer.sample(4, rng=np.random.default_rng(0))
        if rank == 1:
            batch.rewards[2, 3] = np.nan
        with pytest.raises(ValueError, match="must be finite") as raised:
            model.update(batch)
        require_same(networks(model), before)
        return str(raised.value)

    ours, theirs = on_ranks(act)
    assert ours == theirs
    assert ours.startswith("on rank 1 q_ret must be finite, got nan in update ")
    assert ours.endswith(": the update was not made")


def test_a_rank_that_is_killed_in_training_is_named() -> None:
    class Die(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            return True

    results = on_ranks(lambda rank: make_model().learn(6400, Die() if rank == 1 else None).num_timesteps, 3)
    assert results[1] is None
    for result in (results[0], results[2]):
        assert isinstance(result, Raised)
        assert str(result).startswith("RankError: training stops: rank 1 (process ")


@pytest.mark.parametrize("is_nested", [False, True])
def test_checkpoint_callbacks_are_of_rank_0(is_nested: bool, tmp_path: Path) -> None:
    def act(rank: int) -> bool:
        folder = tmp_path / str(rank)
        callback = CheckpointCallback(8, str(folder))
        make_model().learn(64, [CallbackList([callback]) if is_nested else callback])
        return folder.exists()

    assert on_ranks(act) == [True, False]


def test_successes_are_of_all_ranks() -> None:
    class Succeeds(Recorder):
        def __init__(self, succeeds: bool) -> None:
            super().__init__()
            self.succeeds = succeeds

        def step(self, action: Any) -> Any:
            *step, info = super().step(action)
            return *step, {**info, "is_success": self.succeeds}

    def act(rank: int) -> list[bool]:
        return [*(make_model(make_vec_env(lambda: Succeeds(rank == 1), 2)).learn(64).ep_success_buffer or [])]

    ours, theirs = on_ranks(act)
    assert ours == theirs
    assert sorted(ours) == [False] * 4 + [True] * 4


def test_ranks_that_cannot_train_together_say_why() -> None:
    def act(rank: int) -> None:
        make_model(make_vec_env("CartPole-v1", rank + 1)).learn(64)

    for result in on_ranks(act):
        assert str(result) == "ValueError: n_envs must be equal on all ranks, got [1, 2]"


@pytest.mark.parametrize(("name", "values"), [("learning_rate", (1e-3, 2e-3)), ("gamma", (0.9, 0.5)), ("seed", (1, 2))])
def test_ranks_learn_with_the_same_arguments(name: str, values: tuple[float, float]) -> None:
    for result in on_ranks(lambda rank: make_model(**{name: values[rank]}).learn(64)):
        assert str(result) == f"ValueError: {name} must be equal on all ranks, got {[*values]}"


def test_learning_rates_of_ranks_are_compared_by_their_values() -> None:
    rates = (1e-3, lambda remaining: remaining)
    for result in on_ranks(lambda rank: make_model(learning_rate=rates[rank]).learn(64)):
        assert str(result) == "ValueError: learning_rate must be equal on all ranks, got [0.001, [1.0, 0.5, 0.0]]"


@pytest.mark.parametrize(
    ("name", "values"), [("n_slots", (25, 12)), ("step", (0, 4)), ("pos", (0, 1)), ("full", (False, True))]
)
def test_ranks_begin_with_equally_filled_replay_buffers(name: str, values: tuple[int, int]) -> None:
    def act(rank: int) -> None:
        model = make_model()
        setattr(model.replay_buffer, name, values[rank])  # as a buffer that this rank has loaded would have it
        model.learn(64)

    for result in on_ranks(act):
        assert str(result) == f"ValueError: replay_buffer.{name} must be equal on all ranks, got {[*values]}"


def test_training_begins_with_the_statistics_of_rank_0() -> None:
    def act(rank: int) -> Any:
        env = VecNormalize(make_vec_env("CartPole-v1", 2))
        statistics: Any = env.obs_rms
        statistics.mean, statistics.count = np.full(4, 100.0 * rank), 100.0
        make_model(env, replay_ratio=0).learn(32)
        return [statistics.mean, statistics.var, np.array(statistics.count)]

    ours, theirs = on_ranks(act)
    require_same(ours, theirs)
    assert np.abs(ours[0]).max() < 5  # rank 1 had a mean of 100


def test_ranks_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        model = make_model()
        if rank:  # as on another machine, whose files rank 0 does not see
            model._write_files = lambda folder, training: None  # type: ignore[method-assign]
        return model.learn(64, checkpoint=tmp_path, checkpoint_freq=32)

    for result in on_ranks(act):
        assert "folder must be on a disk that all ranks share; rank 0 lacks the files of [1]" in str(result)
    assert find_checkpoint(tmp_path) is None


def test_a_progress_bar_counts_the_steps_of_all_ranks() -> None:
    pytest.importorskip("tqdm")

    def act(rank: int) -> Any:
        bar = ProgressBarCallback()
        make_model().learn(64, [bar])
        return None if rank else (bar.pbar.n, bar.pbar.total)

    assert on_ranks(act) == [(64, 64), None]


class OwnBar(BaseCallback):
    """A progress bar that is none of SB3's, and is not shown."""

    pbar = None

    def _on_step(self) -> bool:
        return True


def test_a_callback_may_have_an_attribute_that_is_named_like_a_progress_bar() -> None:
    assert on_ranks(lambda rank: make_model().learn(64, [OwnBar()]).num_timesteps) == [64, 64]


def test_ranks_save_checkpoints_at_the_same_time(tmp_path: Path) -> None:
    for result in on_ranks(lambda rank: make_model().learn(64, checkpoint=tmp_path, checkpoint_freq=10 + rank)):
        assert str(result) == "ValueError: checkpoint_freq must be equal on all ranks, got [10, 11]"


def test_training_begins_with_what_rank_0_has_learnt() -> None:
    def act(rank: int) -> Any:
        model = make_model(policy_kwargs={"net_arch": [8], "optimizer_class": th.optim.Adam}, replay_ratio=0)
        with th.no_grad():
            for vector in model.policy.flat.vectors:
                vector.add_(rank)
        start = networks(model)
        return start, networks(model.learn(32))

    (first, ours), (second, theirs) = on_ranks(act)
    assert not np.array_equal(first[0], second[0])
    require_same(ours, theirs)
    assert np.abs(ours[0] - first[0]).max() < 0.1


def checkpointed(folder: Path, n_steps: int, stop_at: int | None = None, **arguments: Any) -> ACER:
    """A program that is started again after it was killed."""
    model = make_model(VecNormalize(make_vec_env("CartPole-v1", 2)), replay_ratio=1, **arguments)
    model.learn(n_steps, None if stop_at is None else KillAt(stop_at), checkpoint=folder, checkpoint_freq=100)
    return model


@pytest.mark.parametrize("extractor", [FlattenExtractor, NormalisedFeatures])
def test_training_that_was_killed_continues_to_the_bit_on_as_many_ranks(extractor: Any, tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        policy_kwargs: dict[str, Any] = {"policy_kwargs": {"net_arch": [8], "features_extractor_class": extractor}}
        whole = state_of(checkpointed(tmp_path / "whole", 320, **policy_kwargs))
        with pytest.raises(Killed):
            checkpointed(tmp_path / "parts", 320, 250, **policy_kwargs)
        return whole, state_of(checkpointed(tmp_path / "parts", 320, **policy_kwargs))

    results = on_ranks(act)
    for result in results:
        assert isinstance(result, tuple), result
        require_same_state(*result)
    assert not np.array_equal(results[0][0][".observations"], results[1][0][".observations"])
    for name in [name for name in results[0][0] if "running" in name]:  # of the normalised features
        np.testing.assert_array_equal(results[0][0][name], results[1][0][name])
    found = find_checkpoint(tmp_path / "parts")
    assert found is not None
    assert found.manifest["ranks"] == 2
    assert found.manifest["num_timesteps"] == 320


def sequences(model: ACER) -> set[bytes]:
    """What identifies the sequences in the replay buffer."""
    buffer = model.replay_buffer
    n_rollouts = buffer.size() // buffer.n_steps
    behaviour = [buffer.gather(np.full(2, slot), np.arange(2)).behaviour for slot in range(n_rollouts)]
    return {each[:, env].numpy().tobytes() for each in behaviour for env in range(2)}


@pytest.mark.parametrize("n_ranks", [1, 3, 4])
def test_training_continues_on_another_number_of_ranks(n_ranks: int, tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        return sequences(checkpointed(tmp_path, 320))

    def resume(rank: int) -> Any:
        with pytest.warns(UserWarning, match=f"there were 2 ranks, and now there are {n_ranks}"):
            model = ACER.load_checkpoint(tmp_path, VecNormalize(make_vec_env("CartPole-v1", 2)), device="cpu")
        assert model.env is not None
        first = deepcopy(model.env.unwrapped).reset()
        kept, draws = sequences(model), [rng.random() for rng in deepcopy(model._rngs)]
        model.learn(640)
        normalize = model.get_vec_normalize_env()
        assert normalize is not None
        statistics: Any = normalize.obs_rms
        return kept, draws, model.num_timesteps, networks(model), statistics.count, first

    before = set.union(*on_ranks(save))
    assert len(before) == 2 * 2 * 10
    results = on_ranks(resume, n_ranks)
    kept = [each[0] for each in results]
    assert {len(each) for each in kept} == {2 * (20 // n_ranks)}
    assert len(set.union(*kept)) == sum(map(len, kept))  # each went to one rank
    assert set.union(*kept) <= before
    *draws, schedules = zip(*(each[1] for each in results), strict=True)
    assert len(set(schedules)) == 1
    assert len({draw for each in draws for draw in each}) == 3 * n_ranks
    for each in results:
        assert each[2] == (656 if n_ranks == 3 else 640)  # whole rollouts
        require_same(each[3], results[0][3])
        assert each[4] == results[0][4]
    assert len(np.unique(np.concatenate([each[5] for each in results]), axis=0)) == 2 * n_ranks  # episodes of their own


def test_more_ranks_with_fewer_environments_keep_all_that_one_rank_had(tmp_path: Path) -> None:
    make_model(make_vec_env("CartPole-v1", 4), buffer_size=100).learn(480, checkpoint=tmp_path)

    def resume(rank: int) -> Any:
        with pytest.warns(UserWarning, match="the environments begin new episodes"):
            model = ACER.load_checkpoint(tmp_path, make_vec_env("CartPole-v1", 2), device="cpu")
        return model.replay_buffer.size(), sequences(model)

    (size, first), (other_size, second) = on_ranks(resume)
    assert size == other_size == make_model(buffer_size=100).replay_buffer.n_slots * SMALL["n_steps"]
    assert len(first) == len(second) == len(first | second) / 2 == 2 * size // SMALL["n_steps"]


def test_all_ranks_are_of_one_run(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        model = checkpointed(tmp_path, 96)
        model.learn(192, checkpoint=tmp_path)  # the program goes on itself
        env = VecNormalize(make_vec_env("CartPole-v1", 2))
        loaded = ACER.load_checkpoint(tmp_path, env, device="cpu").learn(288, checkpoint=tmp_path)
        return model.num_timesteps, loaded.num_timesteps, loaded._run

    ours, theirs = on_ranks(act)
    assert ours == theirs
    assert ours[:2] == (192, 288)


class SavesAt200(BaseCallback):
    """Saves a checkpoint between two rollouts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= 200:
            self.model.save_checkpoint(self.folder)  # type: ignore[attr-defined]

    def _on_step(self) -> bool:
        return True


def test_a_checkpoint_that_a_rank_cannot_write_stops_all_and_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(rank: int) -> Any:
        model = checkpointed(tmp_path, 96)
        if rank == 1:
            monkeypatch.setattr(ACER, "save_replay_buffer", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises((OSError, RuntimeError)) as raised:
            model.learn(640, SavesAt200(tmp_path), reset_num_timesteps=False)
        return str(raised.value), model.num_timesteps, sorted(path.name for path in tmp_path.iterdir() if path.is_dir())

    ours, theirs = on_ranks(act)
    assert ours[0] == "training stops: rank 1 has failed: OSError: disk full"
    assert theirs[0] == "disk full"
    assert ours[1] == theirs[1] == 224
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.manifest["num_timesteps"] == 96
    assert ours[2] == [found.path.name]


def test_a_checkpoint_that_rank_0_cannot_finish_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(rank: int) -> Any:
        model = checkpointed(tmp_path, 96)
        if rank == 0:
            monkeypatch.setattr(checkpoint, "_flush", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises((OSError, RuntimeError)) as raised:
            model.save_checkpoint(tmp_path)
        return str(raised.value)

    assert on_ranks(act) == ["disk full", "training stops: rank 0 has failed: OSError: disk full"]
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [found.path.name]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_after_an_interrupted_exchange_training_does_not_go_on(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(rank: int) -> Any:
        model = make_model().learn(64)
        if rank == interrupted:
            monkeypatch.setattr(Board, "_wait", lambda board: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.learn(64)
            monkeypatch.undo()
        with pytest.raises(RankError, match=f"rank {interrupted} has left its group"):
            model.learn(64)
        return True

    assert on_ranks(act) == [True, True]


def test_rollouts_that_ranks_share_stay_in_their_order(tmp_path: Path) -> None:
    """So that the oldest are replaced first. The rewards are numbers of the steps."""
    make_model(make_vec_env(Recorder, 2)).learn(160).save_checkpoint(tmp_path)

    def resume(rank: int) -> Any:
        with pytest.warns(UserWarning, match="the environments begin new episodes"):
            buffer = ACER.load_checkpoint(tmp_path, make_vec_env(Recorder, 2), device="cpu").replay_buffer
        slots = np.arange(buffer.pos - buffer.size() // buffer.n_steps, buffer.pos)
        return buffer.gather(slots, np.zeros(len(slots), int)).rewards[0].tolist()

    ours, theirs = on_ranks(resume)
    assert sorted(ours + theirs) == [1 + 8 * n for n in range(10)]
    assert (ours, theirs) == (sorted(ours), sorted(theirs))


class Draws(BaseCallback):
    """Draws once from the generators that a process shares."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def _on_step(self) -> bool:
        if not self.drawn:
            self.drawn = [np.random.random(), th.rand(()).item()]
        return True


def test_ranks_that_share_what_one_had_draw_different_random_numbers(tmp_path: Path) -> None:
    make_model().learn(32).save_checkpoint(tmp_path)

    def resume(rank: int) -> Any:
        with pytest.warns(UserWarning, match="the environments begin new episodes"):
            model = ACER.load_checkpoint(tmp_path, make_vec_env("CartPole-v1", 2), device="cpu")
        draws = Draws()
        model.learn(64, draws)
        return draws.drawn

    ours, theirs = on_ranks(resume)
    assert len({*ours, *theirs}) == 4


@pytest.mark.parametrize("seed", [None, 0])
def test_ranks_that_load_one_agent_draw_different_random_numbers(seed: int | None, tmp_path: Path) -> None:
    make_model(seed=seed).learn(32).save(tmp_path / "agent")

    def train(rank: int) -> Any:
        model = ACER.load(tmp_path / "agent", make_vec_env("CartPole-v1", 2, seed=0), device="cpu").learn(64)
        latest = model.replay_buffer.latest()
        return th.as_tensor(latest.observations), [rng.random() for rng in model._rngs]

    (ours, draws), (theirs, others) = on_ranks(train)
    assert not th.equal(ours, theirs)
    assert [a == b for a, b in zip(draws, others, strict=True)] == [False] * (len(draws) - 1) + [True]


@pytest.mark.parametrize("name", ["total_timesteps", "num_timesteps", "_log_interval"])
def test_ranks_make_the_same_call_of_learn(name: str) -> None:
    values = {"total_timesteps": (64, 128), "num_timesteps": (0, 32), "_log_interval": (1, 2)}[name]

    def act(rank: int) -> None:
        model = make_model()
        model.num_timesteps = values[rank] if name == "num_timesteps" else 0
        total = values[rank] if name == "total_timesteps" else 64
        model.learn(total, None, values[rank] if name == "_log_interval" else 5, reset_num_timesteps=False)

    for result in on_ranks(act):
        assert str(result) == f"ValueError: {name} must be equal on all ranks, got {[*values]}"


def test_episodes_and_successes_are_counted_without_monitor_too() -> None:
    class Succeeds(Recorder):
        def step(self, action: Any) -> Any:
            *step, info = super().step(action)
            return *step, {**info, "is_success": True}

    def act(rank: int) -> Any:
        model = make_model(DummyVecEnv([Succeeds] * 2)).learn(64)
        return model._episode_num, [*(model.ep_success_buffer or [])]

    assert on_ranks(act) == [(8, [True] * 8)] * 2  # two of 7 steps in each of four environments


def test_rank_0_alone_shows_progress_bars() -> None:
    def act(rank: int) -> Any:
        callback = make_model()._setup_learn(64, [ProgressBarCallback()], progress_bar=True)[1]
        return sum(isinstance(each, ProgressBarCallback) for each in all_callbacks(callback))

    assert on_ranks(act) == [2, 0]
