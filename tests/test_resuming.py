"""Training that is interrupted and continued ends, to the bit, as training that is not."""

import gc
import random
import re
import shutil
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback, EveryNTimesteps, ProgressBarCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule
from stable_baselines3.common.vec_env import VecCheckNan, VecEnv, VecNormalize

from sb3_acer import ACER
from sb3_acer.callbacks import put_back
from sb3_acer.checkpoint import find_checkpoint
from tests.helpers import Recall, Recorder
from tests.test_env_state import FORKED, Locked

pytestmark = pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type")
SMALL: dict[str, Any] = {"n_steps": 8, "buffer_size": 200, "replay_ratio": 1, "replay_start": 64}
SMALL |= {"device": "cpu", "seed": 3}
LSTM: dict[str, Any] = {"policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_hidden_size": 8}, "burn_in": 2}


APPENDING = {"override_existing": False}
"""Monitor's arguments"""


class Rows(KVWriter):
    """Keeps what is logged, without times."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        assert key_values.keys() == key_excluded.keys()  # SB3's own writers go through both side by side
        of_time = ("time/fps", "time/time_elapsed")
        self.rows[step] = {key: value for key, value in key_values.items() if key not in of_time}

    def close(self) -> None:
        pass


class Killed(BaseException):
    """Nothing catches it."""


class KillAt(BaseCallback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.step:
            raise Killed
        return True


class Recording(BaseCallback):
    """
    Logs the mean of all rewards since the log was last written, which the logger's counters hold, and draws from the
    generators that all of a process shares.
    """

    def _on_step(self) -> bool:
        self.logger.record_mean("rollout/reward", float(np.mean(self.locals["rewards"])))
        self.logger.record("rollout/draws", random.random() + np.random.random())
        return True


def flat(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays and plain values in nested containers, with names."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from flat(part, f"{name}.{index}")
    elif isinstance(value, np.random.Generator):
        yield from flat(value.bit_generator.state, name)
    else:
        yield name, value.numpy(force=True) if isinstance(value, th.Tensor) else np.asarray(value)


def state_of(model: ACER) -> dict[str, np.ndarray]:
    """All that training depends on, and the mean reward and length of the last episodes."""
    state: dict[str, Any] = {
        "parameters": model.get_parameters(),
        "buffer": model.replay_buffer.state_dict(),
        "generators": list(model._rngs),
        "others": [random.getstate(), np.random.get_state(), th.get_rng_state()],
        "observations": model._last_obs,
        "states": model._states,
        "episodes": [(episode["r"], episode["l"]) for episode in model.ep_info_buffer or []],
        "counters": [model.num_timesteps, model._total_timesteps, model._num_timesteps_at_start, model._episode_num],
        "updates": [model._n_updates, model._n_rollouts, model._current_progress_remaining],
    }
    normalize = model.get_vec_normalize_env()
    if normalize is not None:
        statistics = [vars(normalize.obs_rms), vars(normalize.ret_rms)]
        state["normalize"] = [statistics, normalize.returns, normalize.old_obs, normalize.old_reward]
    return dict(flat(state))


def require_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def learnt(
    make: Callable[[], VecEnv],
    arguments: dict[str, Any],
    rows: Rows,
    *callbacks: BaseCallback,
    n_steps: int = 240,
    folder: Path | None = None,
) -> dict[str, np.ndarray]:
    """One process: nothing but the folder and the log is left of it."""
    th.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    env, eval_env = make(), make()
    model = ACER(env=env, **{**SMALL, "policy": "MlpPolicy", **arguments})
    model.set_logger(Logger(None, [rows]))
    evaluation = EvalCallback(eval_env, eval_freq=25, n_eval_episodes=1, deterministic=False, verbose=0, warn=False)
    used = [EveryNTimesteps(60, Recording()), evaluation, *callbacks]
    try:
        model.learn(n_steps, used, log_interval=3, checkpoint=folder, checkpoint_freq=50)
        counters = [evaluation.n_calls, evaluation.best_mean_reward, evaluation.last_mean_reward]
        counters.append(used[0].last_time_trigger)  # type: ignore[attr-defined]
        return {**state_of(model), **dict(flat(counters, "callbacks"))}
    finally:
        env.close()
        eval_env.close()


def normalized(env_id: Any) -> Callable[[], VecEnv]:
    return lambda: VecNormalize(make_vec_env(env_id, 2, seed=5))


def plain(env_id: Any, n_envs: int = 2, **kwargs: Any) -> Callable[[], VecEnv]:
    return lambda: make_vec_env(env_id, n_envs, seed=5, **kwargs)


def multi_discrete() -> Recorder:
    from gymnasium import spaces

    return Recorder(spaces.MultiDiscrete([3, 2]))


@pytest.mark.parametrize("arguments", [{}, LSTM], ids=["feed-forward", "LSTM"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(plain("CartPole-v1"), id="Discrete"),
        pytest.param(normalized(partial(gym.make, "Pendulum-v1", max_episode_steps=50)), id="Box with VecNormalize"),
        pytest.param(normalized(multi_discrete), id="MultiDiscrete with VecNormalize"),
        pytest.param(plain(Recall, 3), id="Recall"),
    ],
)
def test_a_run_that_was_killed_twice_ends_as_one_that_was_not(
    make: Callable[[], VecEnv], arguments: dict[str, Any], tmp_path: Path
) -> None:
    whole, parts = Rows(), Rows()
    expected = learnt(make, arguments, whole)
    for step in (101, 193):
        with pytest.raises(Killed):
            learnt(make, arguments, parts, KillAt(step), folder=tmp_path)
    require_same(learnt(make, arguments, parts, folder=tmp_path), expected)
    require_same(learnt(make, arguments, parts, folder=tmp_path), expected)  # nothing is left to be done
    require_same(dict(flat(parts.rows)), dict(flat(whole.rows)))


def test_environments_in_processes_of_their_own_continue(tmp_path: Path) -> None:
    make, rows = plain("CartPole-v1", **FORKED), Rows()
    expected = learnt(make, {}, Rows())
    with pytest.raises(Killed):
        learnt(make, {}, rows, KillAt(137), folder=tmp_path)
    require_same(learnt(make, {}, rows, folder=tmp_path), expected)


@pytest.mark.skipif(find_spec("mujoco") is None, reason="needs mujoco")
def test_halfcheetah_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for MuJoCo's log of warnings
    make, rows = normalized(partial(gym.make, "HalfCheetah-v5", max_episode_steps=50)), Rows()
    expected = learnt(make, {}, Rows())
    with pytest.raises(Killed):
        learnt(make, {}, rows, KillAt(130), folder=tmp_path)
    require_same(learnt(make, {}, rows, folder=tmp_path), expected)


def make_model(folder: Path | None = None, env: Any = "CartPole-v1", **arguments: Any) -> ACER:
    if folder is None:
        return ACER(env=make_vec_env(env, 2, seed=5), **{**SMALL, "policy": "MlpPolicy", **arguments})
    return ACER.load_checkpoint(folder, make_vec_env(env, 2, seed=5), device="cpu", **arguments)


def test_a_loaded_checkpoint_continues_with_the_same_call(tmp_path: Path) -> None:
    expected = state_of(make_model().learn(300))
    model = make_model()
    with pytest.raises(Killed):
        model.learn(300, KillAt(201), checkpoint=tmp_path, checkpoint_freq=64)
    loaded = make_model(tmp_path)
    assert loaded.num_timesteps == 192
    require_same(state_of(loaded.learn(300)), expected)
    assert make_model(tmp_path).learn(300, reset_num_timesteps=False).num_timesteps == 304


def test_a_finished_run_is_not_trained_again_and_can_be_extended(tmp_path: Path) -> None:
    first = make_model().learn(300, checkpoint=tmp_path)
    path = find_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="nothing left to train: .* step 304, .* for 300 steps from step 0 on"):
        again = make_model().learn(300, checkpoint=tmp_path)
    assert find_checkpoint(tmp_path) == path
    require_same(dict(flat(again.get_parameters())), dict(flat(first.get_parameters())))
    assert make_model().learn(400, checkpoint=tmp_path).num_timesteps == 400


def test_later_checkpoints_than_the_one_that_was_loaded_are_not_lost(tmp_path: Path) -> None:
    make_model().learn(96, checkpoint=tmp_path, checkpoint_freq=48)
    early, late = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    models = [make_model(tmp_path / early), make_model(tmp_path)]
    make_model().learn(160, checkpoint=tmp_path, checkpoint_freq=32, checkpoint_keep=5)  # by another program
    kept = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    for model, step in zip(models, (48, 96), strict=True):
        rule = rf"checkpoint must be .* later checkpoints .* of step {step}: .*, got '{tmp_path}.*_160_steps'"
        with pytest.raises(ValueError, match=rule):
            model.learn(160, checkpoint=tmp_path, checkpoint_keep=1)
        assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == kept
    assert {early, late} < set(kept)
    models[0].learn(160, checkpoint=tmp_path / "another")
    assert sorted(path.name for path in tmp_path.glob("checkpoint_*")) == kept


@pytest.mark.parametrize("n_kills", [0, 1, 2])
def test_monitors_file_has_each_episode_once_and_loading_alone_does_not_change_it(n_kills: int, tmp_path: Path) -> None:
    def program(name: str, kill_at: int | None = None) -> None:
        folder = tmp_path / name
        env = make_vec_env(Recorder, 2, seed=1, monitor_dir=str(folder / "monitor"), monitor_kwargs=APPENDING)
        model = ACER("MlpPolicy", env, **SMALL)
        model.learn(160, checkpoint=folder / "first", checkpoint_freq=48)
        callback = None if kill_at is None else KillAt(kill_at)
        model.learn(160, callback, reset_num_timesteps=False, checkpoint=folder / "second", checkpoint_freq=48)

    def episodes(name: str) -> list[list[str]]:
        files = sorted((tmp_path / name / "monitor").iterdir())
        return [[line.rpartition(",")[0] for line in path.read_text().splitlines()[1:]] for path in files]

    program("whole")
    for kill_at in (170, 290)[:n_kills]:  # before and after the second call's first checkpoint
        with pytest.raises(Killed):
            program("parts", kill_at)
        before = episodes("parts")
        env = make_vec_env(Recorder, 2, monitor_dir=str(tmp_path / "parts" / "monitor"), monitor_kwargs=APPENDING)
        ACER.load_checkpoint(tmp_path / "parts" / "first", env, device="cpu")
        assert episodes("parts") == before
    program("parts")
    assert episodes("parts") == episodes("whole")


def test_a_checkpoint_of_a_checkpoint_is_the_same(tmp_path: Path) -> None:
    """Also before training has continued."""
    whole, parts = Rows(), Rows()
    expected = learnt(plain("CartPole-v1"), {}, whole)
    with pytest.raises(Killed):
        learnt(plain("CartPole-v1"), {}, parts, KillAt(193), folder=tmp_path / "first")
    make_model(tmp_path / "first").save_checkpoint(tmp_path / "second")
    require_same(learnt(plain("CartPole-v1"), {}, parts, folder=tmp_path / "second"), expected)


def test_a_callback_saves_a_checkpoint_between_two_rollouts_only(tmp_path: Path) -> None:
    class Saves(BaseCallback):
        model: ACER

        def __init__(self) -> None:
            super().__init__()
            self.refused: list[str] = []

        def refuse(self, name: str) -> None:
            rule = (
                rf"save_checkpoint must .*_on_rollout_start, got .* within a rollout, at step {self.num_timesteps}[.]"
            )
            with pytest.raises(ValueError, match=rule):
                self.model.save_checkpoint(tmp_path)
            self.refused.append(name)

        def _on_rollout_start(self) -> None:
            if self.num_timesteps == 160:
                self.model.save_checkpoint(tmp_path)

        def _on_step(self) -> bool:
            self.refuse("step")
            return True

        def _on_rollout_end(self) -> None:
            self.refuse("rollout")

    saves = Saves()
    expected = state_of(make_model().learn(240, saves))
    assert saves.refused == (["step"] * 8 + ["rollout"]) * 15
    assert [found.manifest["num_timesteps"] for found in [find_checkpoint(tmp_path)] if found] == [160]
    require_same(state_of(make_model(tmp_path).learn(240)), expected)


def test_a_checkpoint_can_be_saved_after_a_callback_has_failed(tmp_path: Path) -> None:
    model = make_model(env=Recorder)
    with pytest.raises(Killed):
        model.learn(160, KillAt(90))
    model.save_checkpoint(tmp_path)
    assert make_model(tmp_path, Recorder).learn(160).num_timesteps >= 160


def test_callbacks_may_hold_what_cannot_be_pickled_and_lists_that_contain_themselves(tmp_path: Path) -> None:
    class Holds(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.returns: dict[int, int] = defaultdict(lambda: 0)
            self.all: list[Any] = [1]
            self.all.append(self.all)
            self.rewards: list[float] = []

        def _on_step(self) -> bool:
            self.returns[self.num_timesteps] += 1
            self.rewards.append(self.locals["rewards"].sum())
            return True

    holds = Holds()
    make_model().learn(96, holds, checkpoint=tmp_path, checkpoint_freq=1e5)  # type: ignore[arg-type]
    assert len(holds.returns) == len(holds.rewards) == 48
    again = Holds()
    make_model(tmp_path).learn(192, again)
    assert again.rewards[:48] == holds.rewards
    assert len(again.rewards) == 96
    assert len(again.returns) == 48  # not saved


def test_layers_that_the_program_freezes_stay_frozen(tmp_path: Path) -> None:
    def frozen() -> ACER:
        model = make_model()
        model.policy.pi_net.requires_grad_(False)
        return model

    expected = state_of(frozen().learn(240))
    with pytest.raises(Killed):
        frozen().learn(240, KillAt(121), checkpoint=tmp_path, checkpoint_freq=64)
    resumed = frozen().learn(240, checkpoint=tmp_path)
    assert not any(parameter.requires_grad for parameter in resumed.policy.pi_net.parameters())
    require_same(state_of(resumed), expected)


@pytest.mark.parametrize("stop", [7, 8, 9])
def test_a_run_that_a_callback_stops_anywhere_in_a_rollout_continues(stop: int, tmp_path: Path) -> None:
    """Also at its last step: the update of a complete rollout is made."""

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 8 * 10 + stop

    expected = state_of(make_model().learn(300))
    make_model().learn(300, Stop(), checkpoint=tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.manifest["num_timesteps"] == 2 * (80 + stop)
    require_same(state_of(make_model().learn(300, checkpoint=tmp_path)), expected)


def test_without_a_state_of_the_environments_the_rest_continues_and_they_begin_anew(tmp_path: Path) -> None:
    model = make_model(env=Locked).learn(96)
    with pytest.warns(UserWarning, match="a continued run will begin new episodes, since .* cannot be saved: .*Locked"):
        model.save_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"begin new episodes, since their state is not known: .*Locked") as warned:
        loaded = make_model(tmp_path, Locked)
    with pytest.warns(UserWarning, match="there is nothing left to train") as also_warned:
        make_model(env=Locked).learn(96, checkpoint=tmp_path)
    found = [each for each in (*warned, *also_warned) if "begin new episodes" in str(each.message)]
    assert [each.filename for each in found] == [__file__] * 2
    for name in ("parameters", "generators", "counters", "updates", "episodes"):
        ours, theirs = ({k: v for k, v in state_of(each).items() if k.startswith(name)} for each in (loaded, model))
        require_same(ours, theirs)
    assert loaded.learn(144).num_timesteps == 144
    ends = loaded.replay_buffer.gather(np.array([5, 5]), np.array([0, 1])).truncated  # the slot before the new episodes
    assert ends[-1].all()


def test_the_environments_begin_new_episodes_if_the_program_says_so(tmp_path: Path) -> None:
    make_model(env=Recorder).learn(96, checkpoint=tmp_path)
    for force_reset, clock in ((False, 0), (True, 1)):  # after 56 or 8 steps, in episodes of seven
        model = make_model(tmp_path, Recorder, force_reset=force_reset).learn(112)
        assert np.asarray(model._last_obs)[0, 0] == clock


def test_nobody_is_warned_of_environments_that_the_program_leaves_out(tmp_path: Path) -> None:
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_checkpoint(tmp_path, with_env=False)


def test_settings_of_callbacks_are_those_of_the_new_run(tmp_path: Path) -> None:
    """Their counters are those of the old one."""

    class Periodic(BaseCallback):
        def __init__(self, freq: int) -> None:
            super().__init__()
            self.freq = freq
            self.fired: list[int] = []

        def _on_step(self) -> bool:
            if self.n_calls % self.freq == 0:
                self.fired.append(self.n_calls)
            return True

    make_model().learn(96, Periodic(20), checkpoint=tmp_path)
    callback = Periodic(25)
    make_model().learn(192, [callback], checkpoint=tmp_path)
    assert (callback.freq, callback.fired, callback.n_calls) == (25, [20, 40, 50, 75], 96)


def test_a_progress_bar_may_be_added(tmp_path: Path) -> None:
    make_model().learn(96, checkpoint=tmp_path)
    assert make_model().learn(192, ProgressBarCallback(), checkpoint=tmp_path).num_timesteps == 192


def test_what_cannot_be_continued_is_said_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"folder must have a checkpoint, got '{tmp_path}'"):
        make_model(tmp_path)
    model = make_model().learn(96, checkpoint=tmp_path)
    others: dict[str, Any] = {"gamma": 0.9, "n_steps": 4, "trust_region": False, "lr_schedule": "constant"}
    for argument, value in others.items():
        other = make_model(None, "CartPole-v1", **{argument: value})
        before = state_of(other)
        with pytest.raises(ValueError, match=f"{argument}.* must be .*, as in the checkpoint"):
            other.learn(200, checkpoint=tmp_path)
        require_same(state_of(other), before)
    with pytest.raises(ValueError, match=r"checkpoint must be a folder for this call of learn alone, .* step 96"):
        model.learn(96, reset_num_timesteps=False, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint must be the path of a folder, or None, got .*manifest.json"):
        model.learn(96, checkpoint=next(tmp_path.glob("*/manifest.json")))
    with pytest.raises(ValueError, match="env must be made and wrapped as that of the saved training, got None"):
        ACER.load_checkpoint(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_freq must be an integer of at least 1, got 0"):
        model.learn(96, checkpoint=tmp_path / "new", checkpoint_freq=0)
    with pytest.raises(ValueError, match="checkpoint_keep must be an integer of at least 1, got 0"):
        model.learn(96, checkpoint=tmp_path / "new", checkpoint_keep=0)
    with pytest.raises(ValueError, match="keep must be an integer of at least 1, got -1"):
        model.save_checkpoint(tmp_path, -1)
    with pytest.raises(ValueError, match="with_env must be True or False, got 'no'"):
        model.save_checkpoint(tmp_path, with_env="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="folder must be the path of a folder, got 3"):
        ACER.load_checkpoint(3, "CartPole-v1")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["agent.zip", "replay_buffer.npz", "training.npz"])
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    path = make_model().learn(96).save_checkpoint(tmp_path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 255
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{path / name} could not be loaded: it has changed since it was written"):
        make_model(tmp_path)


def test_learn_keeps_as_many_checkpoints_as_it_is_told(tmp_path: Path) -> None:
    def n_kept() -> int:
        return len([path for path in tmp_path.iterdir() if path.is_dir()])

    model = make_model().learn(96, checkpoint=tmp_path, checkpoint_freq=16, checkpoint_keep=4)
    assert n_kept() == 4
    make_model(tmp_path).learn(128, checkpoint=tmp_path)  # which does not say it again
    model.save_checkpoint(tmp_path)
    assert n_kept() == 4
    model.save_checkpoint(tmp_path, keep=1)
    assert n_kept() == 1


def test_there_is_a_checkpoint_for_each_multiple_of_checkpoint_freq(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model().learn(240, KillAt(140), checkpoint=tmp_path, checkpoint_freq=50, checkpoint_keep=9)
    make_model().learn(240, checkpoint=tmp_path, checkpoint_freq=50)
    steps = {int(path.name.split("_")[2]) for path in tmp_path.glob("checkpoint_*")}
    assert steps == {64, 112, 160, 208, 240}  # after 50, 100, 150 and 200 steps and at the end, in rollouts of 16


def test_there_is_a_checkpoint_every_100_000_steps_unless_the_program_says_otherwise(tmp_path: Path) -> None:
    frequencies = []

    class Looks(BaseCallback):
        def _on_step(self) -> bool:
            checkpoints = vars(self.model)["_checkpoints"]
            frequencies.append(checkpoints.freq)
            return False

    for freq in (None, 50):
        make_model().learn(16, Looks(), checkpoint=tmp_path / str(freq), checkpoint_freq=freq)
    assert frequencies == [100_000, 50]


def test_another_number_of_threads_is_warned_of(tmp_path: Path) -> None:
    before = th.get_num_threads()
    make_model().learn(64).save_checkpoint(tmp_path)
    try:
        th.set_num_threads(before + 1)
        rule = f"torch had {before} threads when the checkpoint was saved, and now has {before + 1}"
        with pytest.warns(UserWarning, match=rule) as loaded:
            make_model(tmp_path)
        with pytest.warns(UserWarning, match=rule) as resumed:
            make_model().learn(96, checkpoint=tmp_path)
        found = [each for each in (*loaded, *resumed) if str(each.message).startswith(rule)]
        assert [each.filename for each in found] == [__file__] * 2
    finally:
        th.set_num_threads(before)


def test_a_checkpoint_is_also_found_by_its_own_folder(tmp_path: Path) -> None:
    model = make_model().learn(96)
    older = model.save_checkpoint(tmp_path)
    model.learn(96, reset_num_timesteps=False).save_checkpoint(tmp_path)
    assert make_model(older).num_timesteps == 96
    assert make_model(tmp_path).num_timesteps == 192
    files = sorted(older.iterdir())
    rule = re.escape(f"checkpoint must be a folder of checkpoints, not one of them, got '{older}'")
    with pytest.raises(ValueError, match=rule):
        make_model().learn(96, checkpoint=older)
    assert sorted(older.iterdir()) == files


def test_a_copied_folder_continues(tmp_path: Path) -> None:
    make_model().learn(96, checkpoint=tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert make_model(tmp_path / "there").num_timesteps == 96


def test_a_loaded_checkpoint_of_a_whole_call_says_that_nothing_is_left(tmp_path: Path) -> None:
    ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(64).save_checkpoint(tmp_path)
    model = ACER.load_checkpoint(tmp_path, gym.make("CartPole-v1"))
    with pytest.warns(UserWarning, match="nothing left to train: .* at step 64, .* A longer run needs more steps"):
        model.learn(64)
    assert model.learn(64, reset_num_timesteps=False).num_timesteps == 128


def test_a_finished_call_that_a_further_one_prolongs_says_so(tmp_path: Path) -> None:
    ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(64, checkpoint=tmp_path)
    model = ACER.load_checkpoint(tmp_path, gym.make("CartPole-v1"))
    with pytest.warns(
        UserWarning, match="that began at step 0 goes on until it has 96 steps: 32 more. For 96 more steps"
    ):
        model.learn(96, checkpoint=tmp_path, reset_num_timesteps=False)
    assert model.num_timesteps == 96


def test_a_call_that_was_interrupted_goes_on_without_a_warning(tmp_path: Path) -> None:
    model = ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(64)
    model.learn(64, lambda *_: False, reset_num_timesteps=False, checkpoint=tmp_path)
    resumed = ACER.load_checkpoint(tmp_path, gym.make("CartPole-v1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.learn(64, checkpoint=tmp_path, reset_num_timesteps=False)
    assert resumed.num_timesteps == 128


@pytest.mark.parametrize("name", ["checkpoint_freq", "checkpoint_keep"])
def test_arguments_of_checkpoints_without_a_folder_for_them_are_a_warning(name: str) -> None:
    arguments: dict[str, Any] = {name: 32}
    with pytest.warns(UserWarning, match=f"{name} has no effect without checkpoint, the folder to save to") as warned:
        ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(64, **arguments)
    assert warned[0].filename == __file__


def test_the_call_after_a_whole_one_is_as_if_training_had_not_been_interrupted(tmp_path: Path) -> None:
    def logged(model: ACER) -> Rows:
        rows = Rows()
        model.set_logger(Logger(None, [rows]))
        return rows

    whole = make_model().learn(96)
    whole.save_checkpoint(tmp_path)
    of_whole = logged(whole)
    whole.learn(96, log_interval=2, reset_num_timesteps=False)
    resumed = make_model(tmp_path)
    of_resumed = logged(resumed)
    resumed.learn(96, log_interval=2, reset_num_timesteps=False, checkpoint=tmp_path / "next")
    require_same(state_of(resumed), state_of(whole))
    assert of_resumed.rows == of_whole.rows
    assert resumed.num_timesteps == 192


def test_settings_that_name_a_class_are_compared(tmp_path: Path) -> None:
    def model(width: int) -> ACER:
        return ACER(
            "MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"net_arch": [width], "optimizer_class": th.optim.Adam}
        )

    model(8).learn(64, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"policy_kwargs must be .*8.*, as in the checkpoint .*, got .*16"):
        model(16).learn(128, checkpoint=tmp_path)
    assert model(8).learn(128, checkpoint=tmp_path).num_timesteps == 128


def test_arguments_that_a_subclass_hands_on_are_compared(tmp_path: Path) -> None:
    class Named(ACER):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    Named("MlpPolicy", "CartPole-v1", **SMALL).learn(64, checkpoint=tmp_path)
    with pytest.raises(
        ValueError, match=r"gamma must be 0.99, as in the checkpoint that learn continues in .*, got 0.5"
    ):
        Named("MlpPolicy", "CartPole-v1", gamma=0.5, **SMALL).learn(128, checkpoint=tmp_path)


def test_a_class_of_the_main_program_is_the_same_after_an_interruption(tmp_path: Path) -> None:
    def model() -> ACER:
        class Features(FlattenExtractor):
            """Pickled by value: loading it makes another class."""

        return ACER("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"features_extractor_class": Features})

    model().learn(64, checkpoint=tmp_path)
    gc.collect()  # as long as the class lives, it is found again
    assert model().learn(128, checkpoint=tmp_path).num_timesteps == 128


def test_a_checkpoint_before_the_first_call_has_taken_no_time(tmp_path: Path) -> None:
    ACER("MlpPolicy", "CartPole-v1", **SMALL).save_checkpoint(tmp_path)
    model = ACER.load_checkpoint(tmp_path, gym.make("CartPole-v1")).learn(64)
    assert time.time_ns() - model.start_time < 600e9


def test_the_time_of_training_goes_on(tmp_path: Path) -> None:
    model = make_model().learn(64)
    model.start_time -= int(3600e9)
    model.save_checkpoint(tmp_path)
    resumed = make_model(tmp_path).learn(128)
    assert 3600e9 <= time.time_ns() - resumed.start_time < 4200e9


def test_a_checkpoint_is_of_one_seed(tmp_path: Path) -> None:
    ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(64, checkpoint=tmp_path)
    other = ACER("MlpPolicy", "CartPole-v1", **{**SMALL, "seed": 4})
    with pytest.raises(ValueError, match=r"seed must be 3, as in the checkpoint that learn continues in .*, got 4"):
        other.learn(128, checkpoint=tmp_path)
    ACER("MlpPolicy", "CartPole-v1", **{**SMALL, "seed": None}).learn(128, checkpoint=tmp_path)


@pytest.mark.parametrize("normalized_first", [True, False])
def test_training_continues_with_vec_normalize_or_without_it_as_it_began(
    normalized_first: bool, tmp_path: Path
) -> None:
    def env(is_normalized: bool) -> VecEnv:
        plain = make_vec_env("CartPole-v1", 1)
        return VecNormalize(plain) if is_normalized else plain

    ACER("MlpPolicy", env(normalized_first), **SMALL).learn(64, checkpoint=tmp_path)
    rule = "must be wrapped in" if normalized_first else "must not be wrapped in"
    with pytest.raises(ValueError, match=f"env {rule} VecNormalize: the environment had the wrappers"):
        ACER("MlpPolicy", env(not normalized_first), **SMALL).learn(128, checkpoint=tmp_path)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])  # the state of the latter cannot be had
def test_training_continues_with_vec_normalize_as_it_was(env_id: str, tmp_path: Path) -> None:
    def model(**kwargs: Any) -> ACER:
        return ACER("MlpPolicy", VecNormalize(make_vec_env(env_id, 1), clip_obs=5, **kwargs), **SMALL)

    model(norm_reward=False).learn(64, checkpoint=tmp_path)
    with pytest.raises(
        ValueError, match="env must be wrapped in VecNormalize with norm_reward=False, as it was, got True"
    ):
        model().learn(128, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"with gamma=0.99, as it was, got 0.5"):
        model(norm_reward=False, gamma=0.5).learn(128, checkpoint=tmp_path)


def test_statistics_are_kept_where_the_wrappers_around_them_are_others(tmp_path: Path) -> None:
    ACER("MlpPolicy", VecNormalize(make_vec_env("CartPole-v1", 1)), **SMALL).learn(64, checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="the environments begin new episodes"):
        model = ACER.load_checkpoint(tmp_path, VecCheckNan(VecNormalize(make_vec_env("CartPole-v1", 1))))
    statistics: Any = getattr(model.get_vec_normalize_env(), "obs_rms", None)
    assert statistics.count > 64


def test_settings_that_hold_tuples_are_those_that_a_checkpoint_has_as_lists(tmp_path: Path) -> None:
    options = {"net_arch": {"pi": (8,), "qf": (4, 4)}, "optimizer_kwargs": {"alpha": 0.9}}

    def model(**kwargs: Any) -> ACER:
        return ACER("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={**options, **kwargs})

    model().learn(64, checkpoint=tmp_path)
    assert model().learn(128, checkpoint=tmp_path).num_timesteps == 128
    with pytest.raises(ValueError, match="policy_kwargs must be"):
        model(net_arch=(8,)).learn(192, checkpoint=tmp_path)


def test_settings_that_hold_an_array_are_compared(tmp_path: Path) -> None:
    class Scaled(FlattenExtractor):
        def __init__(self, observation_space: Any, scale: Any) -> None:
            super().__init__(observation_space)

    def options(scale: float) -> dict[str, Any]:
        return {"features_extractor_class": Scaled, "features_extractor_kwargs": {"scale": np.full(2, scale)}}

    def model(scale: float) -> ACER:
        return ACER("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs=options(scale))

    model(1).learn(64, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="policy_kwargs must be"):
        model(2).learn(128, checkpoint=tmp_path)
    assert model(1).learn(128, checkpoint=tmp_path).num_timesteps == 128
    model(1).save(tmp_path / "agent")
    ACER.load(tmp_path / "agent", policy_kwargs=options(1))
    with pytest.raises(ValueError, match="policy_kwargs must be those of the saved agent"):
        ACER.load(tmp_path / "agent", policy_kwargs=options(2))


def test_settings_that_hold_a_generator_do_not_stop_a_run_from_going_on(tmp_path: Path) -> None:
    class Noisy(FlattenExtractor):
        def __init__(self, observation_space: Any, generator: np.random.Generator) -> None:
            super().__init__(observation_space)

    def model() -> ACER:
        options = {"features_extractor_kwargs": {"generator": np.random.default_rng(1)}}
        return make_model(policy_kwargs={"features_extractor_class": Noisy, **options})

    model().learn(64, checkpoint=tmp_path)
    assert model().learn(128, checkpoint=tmp_path).num_timesteps == 128


def test_a_schedule_that_a_program_assigns_is_used_after_an_interruption_too(tmp_path: Path) -> None:
    def program(folder: Path, *callbacks: BaseCallback) -> ACER:
        model = make_model()
        model.lr_schedule = lambda remaining: 5e-5
        return model.learn(300, [*callbacks], checkpoint=folder, checkpoint_freq=64)

    with pytest.raises(Killed):
        program(tmp_path / "parts", KillAt(201))
    require_same(state_of(program(tmp_path / "parts")), state_of(program(tmp_path / "whole")))


def test_settings_beside_a_function_are_compared(tmp_path: Path) -> None:
    def model(width: int) -> ACER:
        settings = {"net_arch": [width], "activation_fn": partial(th.nn.LeakyReLU, 0.2)}
        return ACER("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs=settings)

    model(8).learn(64, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="policy_kwargs must be"):
        model(16).learn(128, checkpoint=tmp_path)
    assert model(8).learn(128, checkpoint=tmp_path).num_timesteps == 128


def test_learning_rates_are_compared_by_their_values(tmp_path: Path) -> None:
    def model(learning_rate: Any) -> ACER:
        return ACER("MlpPolicy", "CartPole-v1", **{**SMALL, "learning_rate": learning_rate})

    model(lambda remaining: 1e-3 * remaining).learn(64, checkpoint=tmp_path)
    for other in (1e-3, lambda remaining: 1e-3):
        with pytest.raises(
            ValueError, match=r"learning_rate must be \[0.001, 0.0005, 0.0\], as in the checkpoint that learn continues"
        ):
            model(other).learn(128, checkpoint=tmp_path)
    assert model(lambda remaining: remaining * 1e-3).learn(128, checkpoint=tmp_path).num_timesteps == 128


def test_a_run_goes_on_with_the_same_learning_rate_as_a_number_or_as_constant_schedule(tmp_path: Path) -> None:
    for number, learning_rate in enumerate((1e-3, ConstantSchedule(1e-3), FloatSchedule(1e-3))):
        model = ACER("MlpPolicy", "CartPole-v1", **{**SMALL, "learning_rate": learning_rate})
        assert model.learn(64 * (number + 1), checkpoint=tmp_path).num_timesteps == 64 * (number + 1)


class LowersEntropy(BaseCallback):
    """A schedule of the user's own."""

    def _on_step(self) -> bool:
        assert isinstance(self.model, ACER)
        self.model.ent_coef = 0.01 * (1 - self.num_timesteps / 200)
        return True


def test_a_callback_may_change_arguments(tmp_path: Path) -> None:
    expected = state_of(make_model().learn(200, LowersEntropy()))
    with pytest.raises(Killed):
        make_model().learn(200, [LowersEntropy(), KillAt(150)], checkpoint=tmp_path, checkpoint_freq=50)
    with pytest.raises(ValueError, match=r"ent_coef must be 0.01, as in the checkpoint .*, got 0.02"):
        make_model(ent_coef=0.02).learn(200, LowersEntropy(), checkpoint=tmp_path)
    require_same(state_of(make_model().learn(200, LowersEntropy(), checkpoint=tmp_path)), expected)


class Collect(BaseCallback):
    """Collects in a list and a dict that the program holds too."""

    def __init__(self, seen: list[int], last: dict[str, int]) -> None:
        super().__init__()
        self.seen, self.last = seen, last

    def _on_step(self) -> bool:
        self.seen.append(self.num_timesteps)
        self.last["step"] = self.num_timesteps
        return True


def test_what_a_callback_has_collected_stays_where_the_program_sees_it(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model().learn(300, [Collect([], {}), KillAt(201)], checkpoint=tmp_path, checkpoint_freq=64)
    seen = [0]  # replaced by what was seen before the interruption
    last: dict[str, int] = {}
    make_model().learn(300, Collect(seen, last), checkpoint=tmp_path)
    assert seen == list(range(2, 306, 2))
    assert last == {"step": 304}


class Draws(BaseCallback):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = (np.random.default_rng(1), np.random.RandomState(1))
        self.own = random.Random(1)
        self.drawn: list[float] = []

    def _on_step(self) -> bool:
        self.drawn += [generator.random() for generator in (*self.generators, self.own)]
        return True


def test_generators_of_callbacks_go_on(tmp_path: Path) -> None:
    whole, rest = Draws(), Draws()
    make_model().learn(300, whole)
    with pytest.raises(Killed):
        make_model().learn(300, [Draws(), KillAt(201)], checkpoint=tmp_path, checkpoint_freq=64)
    make_model().learn(300, rest, checkpoint=tmp_path)
    assert rest.drawn == whole.drawn


class FailsAtFirst(BaseCallback):
    """Fails once, when learn begins."""

    fails = True

    def _init_callback(self) -> None:
        fails, self.fails = self.fails, False
        if fails:
            raise OSError("no folder for logs")

    def _on_step(self) -> bool:
        return True


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_call_that_is_refused_writes_no_checkpoints_later(tmp_path: Path) -> None:
    model = make_model().learn(96, checkpoint=tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="for this call of learn alone"):
        model.learn(96, checkpoint=tmp_path, reset_num_timesteps=False)
    model.learn(96, reset_num_timesteps=False)
    assert files_of(tmp_path) == before


def test_a_refused_checkpoint_leaves_environments_and_statistics_as_they_were(tmp_path: Path) -> None:
    make = normalized("Pendulum-v1")
    ACER("MlpPolicy", make(), **SMALL).learn(96, checkpoint=tmp_path)
    clipped = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=5), clip_obs=3.0)
    for env, gamma, message in (
        (make(), 0.5, r"gamma must be 0\.99, as in the checkpoint"),
        (clipped, 0.99, "clip_obs"),
    ):
        other = ACER("MlpPolicy", env, gamma, **SMALL)
        env.reset()
        env.step(np.zeros((2, 1)))  # changes the statistics
        before = state_of(other)
        with pytest.raises(ValueError, match=message):
            other.learn(96, checkpoint=tmp_path)
        require_same(state_of(other), before)


def test_an_agent_that_has_learnt_is_not_replaced_by_another_run(tmp_path: Path) -> None:
    make_model().learn(96, checkpoint=tmp_path)
    other = make_model().learn(96)
    before, files = state_of(other), files_of(tmp_path)
    with pytest.raises(ValueError, match=r"for this agent alone, which has made \d+ updates"):
        other.learn(200, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="a folder of checkpoints must be for one run alone"):
        other.save_checkpoint(tmp_path)
    require_same(state_of(other), before)
    other.save_checkpoint(tmp_path / "other")
    with pytest.raises(ValueError, match="a folder of checkpoints must be for one run alone"):
        make_model(tmp_path / "other").learn(200, checkpoint=tmp_path)
    assert [name for name in files_of(tmp_path) if not name.startswith("other")] == files


def test_going_back_to_a_checkpoint_is_warned_of(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(Killed):
        model.learn(300, KillAt(221), checkpoint=tmp_path, checkpoint_freq=64)
    evaluate_policy(model, model.get_env(), 2)  # type: ignore[arg-type]
    message = "the agent goes back to its checkpoint at step 192 and loses 2 updates"
    with pytest.warns(UserWarning, match=message) as warned:
        model.learn(300, checkpoint=tmp_path)
    assert warned[0].filename == __file__
    require_same(state_of(model), state_of(make_model().learn(300)))
    model.learn(100, reset_num_timesteps=False)
    with pytest.warns(UserWarning, match="the agent goes back to its checkpoint at step 304 and loses 10 updates"):
        model.learn(400, checkpoint=tmp_path)


@pytest.mark.filterwarnings("error:the agent goes back")
def test_a_program_of_two_calls_goes_through_both_again(tmp_path: Path) -> None:
    def program(*callbacks: BaseCallback) -> ACER:
        model = make_model(lr_schedule="constant").learn(96, checkpoint=tmp_path / "a")
        return model.learn(80, [*callbacks], checkpoint=tmp_path / "b", checkpoint_freq=32)

    with pytest.raises(Killed):
        program(KillAt(50))
    with pytest.warns(UserWarning, match="nothing left to train: .* asked for 96 steps from step 0 on"):
        assert program().num_timesteps == 80


def test_the_log_of_a_program_that_goes_back_has_each_episode_once(tmp_path: Path) -> None:
    def scores(folder: Path, interrupted: bool) -> list[float]:
        env = make_vec_env("CartPole-v1", 1, seed=5, monitor_dir=str(folder))
        model = ACER("MlpPolicy", env, **SMALL)
        if interrupted:
            with pytest.raises(Killed):
                model.learn(600, KillAt(380), checkpoint=folder, checkpoint_freq=200)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.learn(600, checkpoint=folder, checkpoint_freq=200)
        env.close()
        found: list[float] = load_results(str(folder)).r.tolist()
        return found

    assert scores(tmp_path / "a", True) == scores(tmp_path / "b", False)


def test_a_callbacks_reference_to_the_training_environment_does_not_set_it_back(tmp_path: Path) -> None:
    class Holds(BaseCallback):
        def __init__(self, env: VecEnv) -> None:
            super().__init__()
            self.env = env

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            state: Any = self.env.get_attr("unwrapped")[0]
            np.testing.assert_allclose(state.state, self.model._last_obs[0], rtol=1e-6)  # type: ignore[index]

    env = make_vec_env("CartPole-v1", 2, seed=5)
    ACER("MlpPolicy", env, **SMALL).learn(100, Holds(env)).save_checkpoint(tmp_path, with_env=False)
    with pytest.warns(UserWarning, match="the environments begin new episodes"):
        model = ACER.load_checkpoint(tmp_path, env)
    model.learn(200, Holds(env))


def test_a_loaded_agent_that_is_evaluated_on_its_environment_begins_new_episodes(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model(env=Recorder).learn(300, KillAt(201), checkpoint=tmp_path, checkpoint_freq=64)
    model = make_model(tmp_path, Recorder)
    evaluate_policy(model, model.get_env(), 2)  # type: ignore[arg-type]
    model.learn(300)
    buffer = model.replay_buffer
    batch = buffer.gather(np.full(2, 192 // 16), np.arange(2))  # the first rollout after the checkpoint
    assert batch.observations[0, :, 0].tolist() == [0, 0]  # type: ignore[index]


def test_an_agent_that_cannot_be_trained_has_no_checkpoint(tmp_path: Path) -> None:
    make_model().save(tmp_path / "agent")
    with pytest.raises(ValueError, match="env must be given before save_checkpoint"):
        ACER.load(tmp_path / "agent").save_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"_init_setup_model must be True, or setup_model\(\) called"):
        make_model(_init_setup_model=False).save_checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_has_the_size_of_its_replay_buffer(tmp_path: Path) -> None:
    make_model().learn(100, checkpoint=tmp_path)
    make_model(tmp_path, buffer_size=SMALL["buffer_size"])
    with pytest.raises(ValueError, match="buffer_size must be 200, as in the checkpoint, got 300"):
        make_model(tmp_path, buffer_size=300)


def test_an_error_when_learn_begins_does_not_change_how_far_it_goes(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model().learn(300, KillAt(201), checkpoint=tmp_path, checkpoint_freq=64)
    model, callback = make_model(), FailsAtFirst()
    with pytest.raises(OSError, match="no folder for logs"):
        model.learn(300, callback, checkpoint=tmp_path)
    model.learn(300, callback, checkpoint=tmp_path)
    assert model.num_timesteps == 304
    assert make_model().learn(400, checkpoint=tmp_path).num_timesteps == 400


def test_a_folder_that_cannot_be_written_to_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = make_model()
    with pytest.raises(OSError, match="file"):
        model.learn(96, checkpoint=tmp_path / "file" / "folder")
    assert model.num_timesteps == 0
    with pytest.raises(ValueError, match="checkpoint must be the path of a folder, or None, got ''"):
        model.learn(96, checkpoint="")
    with pytest.raises(ValueError, match="folder must be the path of a folder, got None"):
        model.save_checkpoint(None)  # type: ignore[arg-type]


def test_training_within_a_callback_does_not_end_the_checkpoints_of_the_outer_one(tmp_path: Path) -> None:
    class Nested(BaseCallback):
        def _on_training_start(self) -> None:
            self.model.learn(8)

        def _on_step(self) -> bool:
            return True

    make_model().learn(96, Nested(), checkpoint=tmp_path)
    assert find_checkpoint(tmp_path) is not None


def test_a_run_goes_on_in_its_own_folder_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logs = tmp_path / "logs"
    for name in ("first", "second"):
        with pytest.raises(Killed):
            make_model(tensorboard_log=logs).learn(96, KillAt(80), checkpoint=tmp_path / name, checkpoint_freq=32)
    assert files_of(tmp_path / "first")
    for name, number in (("first", 1), ("second", 2)):
        model = make_model(tensorboard_log=logs).learn(96, checkpoint=tmp_path / name)
        assert Path(model.logger.get_dir() or "") == logs / f"ACER_{number}"
    assert sorted(path.name for path in logs.iterdir()) == ["ACER_1", "ACER_2"]


def test_each_step_is_once_in_the_log_of_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments: dict[str, Any] = {"checkpoint": tmp_path / "run", "checkpoint_freq": 32, "log_interval": 1}
    with pytest.raises(Killed):
        make_model(tensorboard_log=tmp_path / "logs").learn(160, KillAt(124), **arguments)
    time.sleep(1)  # TensorBoard orders the files by the second
    make_model(tensorboard_log=tmp_path / "logs").learn(160, **arguments)
    make_model(tensorboard_log=tmp_path / "logs").learn(160, log_interval=1)
    resumed, whole = (
        [scalar.step for scalar in event_accumulator.EventAccumulator(str(folder)).Reload().Scalars("train/kl")]
        for folder in (tmp_path / "logs" / "ACER_1", tmp_path / "logs" / "ACER_2")
    )
    assert resumed == whole == sorted(set(whole))
    assert whole[-1] == 160


def test_a_run_whose_log_has_a_name_of_several_folders_goes_on_there(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    names: dict[str, Any] = {"checkpoint": tmp_path / "run", "tb_log_name": "mine/first"}
    with pytest.raises(Killed):
        make_model(tensorboard_log=tmp_path / "logs").learn(96, KillAt(80), checkpoint_freq=32, **names)
    make_model(tensorboard_log=tmp_path / "logs").learn(64, tb_log_name="mine/first")
    model = make_model(tensorboard_log=tmp_path / "logs").learn(96, **names)
    assert Path(model.logger.get_dir() or "") == tmp_path / "logs/mine/first_1"


@pytest.mark.parametrize("before", [None, "others"])
def test_a_run_goes_on_in_another_folder_of_tensorboard_if_it_is_given(before: str | None, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = None if before is None else tmp_path / before
    with pytest.raises(Killed):
        make_model(tensorboard_log=first).learn(96, KillAt(80), checkpoint=tmp_path / "run", checkpoint_freq=32)
    model = make_model(tensorboard_log=tmp_path / "logs").learn(96, checkpoint=tmp_path / "run")
    assert Path(model.logger.get_dir() or "").parent == tmp_path / "logs"


def test_any_global_generator_of_numpy_is_resumed(tmp_path: Path) -> None:
    of_numpy: Any = np.random
    usual = of_numpy.get_bit_generator()
    try:
        of_numpy.set_bit_generator(np.random.PCG64(3))
        ACER("MlpPolicy", "CartPole-v1", **SMALL).learn(100, checkpoint=tmp_path)
        expected = np.random.random()
        ACER.load_checkpoint(tmp_path, gym.make("CartPole-v1")).learn(100, checkpoint=tmp_path)
        assert np.random.random() == expected
    finally:
        of_numpy.set_bit_generator(usual)


def test_the_second_of_two_normal_numbers_that_python_draws_at_once_is_resumed(tmp_path: Path) -> None:
    model = make_model().learn(64)
    random.gauss(0, 1)
    model.save_checkpoint(tmp_path)
    expected = random.gauss(0, 1)
    make_model(tmp_path).learn(80)
    assert random.gauss(0, 1) == expected


def test_a_run_that_goes_on_is_printed_if_the_program_says_so_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    arguments: dict[str, Any] = {"checkpoint": tmp_path / "run", "checkpoint_freq": 32, "log_interval": 1}
    with pytest.raises(Killed):
        make_model(tensorboard_log=tmp_path / "logs").learn(96, KillAt(80), **arguments)
    assert "policy_loss" not in capsys.readouterr().out
    make_model(tensorboard_log=tmp_path / "logs", verbose=1).learn(96, **arguments)
    assert "policy_loss" in capsys.readouterr().out


@pytest.mark.parametrize("before", [None, "auto"])
def test_a_run_goes_on_with_the_log_interval_of_the_present_call(before: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model().learn(208, KillAt(100), log_interval=before, checkpoint=tmp_path, checkpoint_freq=32)
    rows, model = Rows(), make_model()
    model.set_logger(Logger(None, [rows]))
    model.learn(208, log_interval=4, checkpoint=tmp_path)
    assert list(rows.rows) == [128, 192, 208]


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moves(BaseCallback):
        def _on_step(self) -> bool:
            monkeypatch.chdir(tmp_path / "elsewhere")
            return True

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    make_model().learn(96, Moves(), checkpoint="run", checkpoint_freq=32)
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.manifest["num_timesteps"] == 96
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_call_after_one_that_went_on_has_a_folder_of_tensorboard_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(Killed):
        make_model(tensorboard_log=tmp_path / "logs").learn(96, KillAt(80), checkpoint=tmp_path, checkpoint_freq=32)
    model = make_model(tensorboard_log=tmp_path / "logs").learn(96, checkpoint=tmp_path)
    model.learn(32, tb_log_name="next")
    assert Path(model.logger.get_dir() or "") == tmp_path / "logs/next_1"


def test_a_logger_that_the_program_has_set_is_kept_whatever_tensorboard_log_says(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make_model(tensorboard_log=tmp_path / "logs").learn(64, checkpoint=tmp_path / "run")
    model, rows = make_model(tensorboard_log=tmp_path / "logs"), Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(128, checkpoint=tmp_path / "run")
    assert 128 in rows.rows


class Sums(BaseCallback):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.total = number, 0

    def _on_step(self) -> bool:
        self.total += self.number
        return True


def test_each_of_several_callbacks_of_one_class_has_its_own_counters_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        make_model().learn(300, [Sums(1), Sums(100), KillAt(201)], checkpoint=tmp_path, checkpoint_freq=64)
    callbacks = [Sums(1), Sums(100)]
    make_model().learn(300, [*callbacks], checkpoint=tmp_path)
    assert [each.total for each in callbacks] == [152, 15200]


def test_callbacks_of_a_second_call_of_learn_have_their_counters_again(tmp_path: Path) -> None:
    model = make_model(lr_schedule="constant").learn(96)
    with pytest.raises(Killed):
        model.learn(300, [Sums(1), KillAt(201)], checkpoint=tmp_path, checkpoint_freq=64)
    sums = Sums(1)
    make_model(tmp_path).learn(300, sums)
    assert sums.total == 152


@pytest.mark.parametrize("seed", [0, 7])
def test_environments_that_begin_anew_have_other_episodes_than_at_the_start_for_any_seed(
    seed: int, tmp_path: Path
) -> None:
    def seeded(n_envs: int) -> VecEnv:
        return make_vec_env("CartPole-v1", n_envs)

    def agent() -> ACER:
        return ACER("MlpPolicy", seeded(2), n_steps=8, seed=seed, device="cpu")

    agent().learn(32).save_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="there were 2 environments, and now there are 3"):
        loaded = ACER.load_checkpoint(tmp_path, seeded(3), device="cpu")
    first: Any
    resumed: Any
    first, resumed = (each.reset() for each in (agent().get_env(), loaded.get_env()) if each is not None)
    assert not (first[:, np.newaxis] == resumed).all(-1).any()
    assert loaded.learn(50).num_timesteps == 56  # rollouts of 24 steps, after 32


def test_the_environments_of_several_callbacks_continue(tmp_path: Path) -> None:
    def second() -> EvalCallback:
        env = plain("CartPole-v1")()
        env.seed(11)
        return EvalCallback(env, eval_freq=10, n_eval_episodes=2, deterministic=False, verbose=0, warn=False)

    whole, part, rest = second(), second(), second()
    learnt(plain("CartPole-v1"), {}, Rows(), whole)
    with pytest.raises(Killed):
        learnt(plain("CartPole-v1"), {}, Rows(), part, KillAt(193), folder=tmp_path)
    learnt(plain("CartPole-v1"), {}, Rows(), rest, folder=tmp_path)
    assert rest.n_calls == whole.n_calls == 120
    assert (rest.last_mean_reward, rest.best_mean_reward) == (whole.last_mean_reward, whole.best_mean_reward)


def test_an_environment_of_a_callback_with_other_wrappers_begins_anew_with_a_warning(tmp_path: Path) -> None:
    def evaluation(wrap: Callable[[VecEnv], VecEnv]) -> EvalCallback:
        return EvalCallback(wrap(make_vec_env("CartPole-v1", 1)), eval_freq=10**6, verbose=0)

    make_model().learn(64, evaluation(lambda env: env), checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="a callback's environment begins new episodes: env must not be wrapped in"):
        model = make_model().learn(128, evaluation(VecNormalize), checkpoint=tmp_path)
    assert model.num_timesteps == 128


@pytest.mark.parametrize("kind", [list, dict.fromkeys, set, deque])
def test_containers_of_callbacks_stay_the_same_objects(kind: Any) -> None:
    present, saved = kind([1, 2]), kind([3])
    assert put_back(present, saved) is present
    assert present == saved


def test_an_agent_whose_loaded_checkpoint_is_saved_again_goes_on(tmp_path: Path) -> None:
    make_model().learn(200, checkpoint=tmp_path / "first")
    saved_again = make_model(tmp_path / "first")
    saved_again.save_checkpoint(tmp_path / "second")
    ours, theirs = (state_of(agent.learn(400)) for agent in (saved_again, make_model(tmp_path / "first")))
    require_same(ours, theirs)


def test_a_mean_in_the_log_is_over_the_steps_before_the_interruption_too(tmp_path: Path) -> None:
    class Means(BaseCallback):
        def _on_step(self) -> bool:
            self.logger.record_mean("rollout/own", float(self.num_timesteps))
            return True

    whole, parts = Rows(), Rows()
    learnt(plain("CartPole-v1"), {}, whole, Means())
    with pytest.raises(Killed):
        learnt(plain("CartPole-v1"), {}, parts, Means(), KillAt(193), folder=tmp_path)
    learnt(plain("CartPole-v1"), {}, parts, Means(), folder=tmp_path)
    means = [
        {step: row["rollout/own"] for step, row in each.rows.items() if "rollout/own" in row} for each in (parts, whole)
    ]
    assert means[0] == pytest.approx(means[1])
