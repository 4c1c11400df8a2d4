"""run-atari: like stable-baselines' run_atari, and runs can be stopped and continued."""

import json
import os
import signal
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch as th
from stable_baselines3.common.monitor import load_results

from sb3_acer import ACER, checkpoint
from sb3_acer.__main__ import main as command_line
from sb3_acer.atari import AtariVecEnv, make_atari_vec_env
from sb3_acer.atari import run as run_module
from sb3_acer.atari.run import main, make_parser
from sb3_acer.extras import how_to_install
from sb3_acer.hyperparams import hyperparams
from tests.helpers import in_a_fork

pytestmark = pytest.mark.filterwarnings("ignore:replay will never start")
SHORT: tuple[str, ...] = ("--env=PongNoFrameskip-v4", "--num-timesteps=160", "--n-envs=2", "--buffer-size=60")
SHORT += ("--checkpoint-freq=80", "--log-interval=1", "--device=cpu")


@cache
def short_games(env_id: str, n_envs: int) -> AtariVecEnv:
    """Made once and not seeded: a game takes 0.2 s to load its ROM, and loads it again for each seed."""
    return make_atari_vec_env(env_id, n_envs, max_frames=100, screen_size=36)


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gives all runs games of 100 frames; returns the seeds that are set."""
    given: list[int] = []

    def games(env_id: str, n_envs: int, seed: int) -> AtariVecEnv:
        given.append(seed)
        return short_games(env_id, n_envs)

    monkeypatch.setattr(run_module, "make_atari_vec_env", games)
    monkeypatch.setattr(AtariVecEnv, "seed", lambda self, seed: given.append(seed))
    monkeypatch.setattr(AtariVecEnv, "close", lambda self: None)
    return given


def run(folder: Path, *arguments: str) -> None:
    main([*SHORT, "--logdir", str(folder), *arguments])


def resume(folder: Path, *arguments: str) -> None:
    main(["--resume", "--logdir", str(folder), *arguments])


def checkpoints(folder: Path) -> set[int]:
    return {int(path.name.split("_")[2]) for path in folder.glob("checkpoint_*_steps")}


def test_stable_baselines_own_settings_are_its_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = make_parser().parse_args([])
    assert (options.env, options.seed, options.num_timesteps) == ("BreakoutNoFrameskip-v4", 0, 10**7)
    assert (options.policy, options.lr_schedule, options.n_envs, options.buffer_size) == ("cnn", "constant", 16, 5000)
    models: list[ACER] = []

    def learn(model: ACER, *args: Any, **kwargs: Any) -> ACER:
        models.append(model)
        return model

    monkeypatch.setattr(ACER, "learn", learn)
    run(tmp_path, "--stable-baselines", "--n-envs", "1", "--buffer-size", "5000")
    model, plain = models[0], ACER("MlpPolicy", "CartPole-v1", lr_schedule="constant", seed=0)
    assert isinstance(model.get_env(), AtariVecEnv)
    for name in ("gamma", "n_steps", "q_coef", "ent_coef", "max_grad_norm", "learning_rate", "lr_schedule_name"):
        assert getattr(model, name) == getattr(plain, name)
    for name in ("buffer_size", "replay_ratio", "replay_start", "correction_term", "alpha", "delta", "seed"):
        assert getattr(model, name) == getattr(plain, name)


def test_the_settings_are_those_of_the_zoos_entry(tmp_path: Path) -> None:
    run(tmp_path, "--buffer-size", "50", "--replay-ratio", "0.5")
    agent = ACER.load(tmp_path / "agent.zip")
    entry = hyperparams["atari"]
    for name in ("n_steps", "learning_rate", "q_coef", "ent_coef"):
        assert getattr(agent, name) == entry[name]
    assert agent.lr_schedule_name == entry["lr_schedule"]
    assert isinstance(agent.policy.optimizer, th.optim.Adam)
    assert (agent.buffer_size, agent.replay_ratio) == (50, 0.5)  # given arguments replace the entry's
    resume(tmp_path, "--num-timesteps", "320")
    assert ACER.load(tmp_path / "agent.zip").n_steps == entry["n_steps"]


def test_a_run_without_a_folder_of_its_own_is_in_that_of_its_game_and_seed() -> None:
    _, folder = run_module.parse(["--env", "ALE/Pong-v5", "--seed", "3"])
    assert folder == Path("logs/run-atari/ALE-Pong-v5_3")


@pytest.mark.parametrize(
    ("policy", "name"), [("cnn", "CnnPolicy"), ("lstm", "CnnLstmPolicy"), ("lnlstm", "CnnLnLstmPolicy")]
)
def test_a_run_leaves_logs_scores_checkpoints_and_an_agent(
    policy: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--policy", policy, "--lr_schedule", "linear", "--seed", "3")
    agent = ACER.load(tmp_path / "agent.zip", device="cpu")
    assert type(agent.policy).__name__ == name
    assert (agent.num_timesteps, agent.n_envs, agent.lr_schedule_name, agent.seed) == (160, 2, "linear", 3)
    assert checkpoints(tmp_path) == {80, 160}  # the last one at the end
    scores = load_results(str(tmp_path))
    assert list(scores["steps"]) == [50, 50, 100, 100, 150, 150]  # 100 frames: 25 steps of two games
    assert set(scores["l"]) <= set(range(101, 131))
    progress = (tmp_path / "progress.csv").read_text().splitlines()
    assert "rollout/ep_rew_mean" in progress[0]
    assert "time/fps" in progress[0]
    printed = capsys.readouterr().out
    assert "160 steps, " in printed
    assert "mean score of the last 6 games" in printed


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path: Path, seeds: list[int]) -> None:
    run(tmp_path, "--seed", "3", "--policy", "lstm")
    resume(tmp_path, "--num-timesteps", "3.2e2")
    assert set(seeds) == {3, 163}
    assert seeds[-1] == 163  # not the same games as at the start
    agent = ACER.load(tmp_path / "agent.zip", device="cpu")
    assert (agent.num_timesteps, agent.seed) == (320, 3)
    assert checkpoints(tmp_path) == {240, 320}  # the newest two
    scores = load_results(str(tmp_path))
    assert len(scores) == 12
    assert scores["steps"].is_monotonic_increasing
    assert (tmp_path / "progress_160.csv").read_text().splitlines()[0]
    assert json.loads((tmp_path / "run-atari.json").read_text())["num_timesteps"] == 320


def test_a_run_with_stable_baselines_settings_goes_on_with_them(tmp_path: Path) -> None:
    run(tmp_path, "--stable-baselines")
    resume(tmp_path, "--num-timesteps=240")
    agent = ACER.load(tmp_path / "agent.zip", device="cpu")
    assert (agent.num_timesteps, agent.learning_rate) == (240, 7e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_can_be_continued(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_step = run_module.Run._on_step

    def interrupted(callback: run_module.Run) -> bool:
        if callback.num_timesteps == 130:  # within a rollout
            os.kill(os.getpid(), number)
        return on_step(callback)

    handler = signal.getsignal(number)
    monkeypatch.setattr(run_module.Run, "_on_step", interrupted)
    with pytest.raises(SystemExit) as exited:
        run(tmp_path)
    assert exited.value.code == 128 + number
    assert signal.getsignal(number) is handler
    assert max(checkpoints(tmp_path)) == 130
    resume(tmp_path)
    assert ACER.load(tmp_path / "agent.zip", device="cpu").num_timesteps == 160  # the rollout is completed


def test_a_run_that_fails_leaves_an_agent_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_step = run_module.Run._on_step

    def fails(callback: run_module.Run) -> bool:
        if callback.num_timesteps == 130:
            raise RuntimeError("the disk is full")
        return on_step(callback)

    monkeypatch.setattr(run_module.Run, "_on_step", fails)
    with pytest.raises(RuntimeError, match="the disk is full"):
        run(tmp_path)
    assert max(checkpoints(tmp_path)) == 130
    assert ACER.load(tmp_path / "agent.zip", device="cpu").num_timesteps == 130
    monkeypatch.setattr(run_module.Run, "_on_step", on_step)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoint*/*")}
    with monkeypatch.context() as patch:
        patch.setattr(ACER, "_require_same_env", lambda agent: agent.no_memory)  # before the first step
        with pytest.raises(AttributeError, match="no_memory"):
            resume(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoint*/*")} == before  # no step was made
    resume(tmp_path)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def games(env_id: str, n_envs: int, seed: int) -> AtariVecEnv:
        return make_atari_vec_env(env_id, n_envs, seed, max_frames=100, screen_size=36, num_threads=1)

    on_step = run_module.Run._on_step

    def interrupted(callback: run_module.Run) -> bool:
        if callback.num_timesteps == 110:
            os.kill(os.getpid(), signal.SIGTERM)
        return on_step(callback)

    monkeypatch.undo()  # real seeds
    monkeypatch.setattr(run_module, "make_atari_vec_env", games)
    run(tmp_path / "whole", "--policy", "lstm")
    monkeypatch.setattr(run_module.Run, "_on_step", interrupted)
    with pytest.raises(SystemExit):
        run(tmp_path / "parts", "--policy", "lstm")
    monkeypatch.setattr(run_module.Run, "_on_step", on_step)
    resume(tmp_path / "parts")
    whole, parts = (ACER.load(tmp_path / name / "agent.zip", device="cpu") for name in ("whole", "parts"))
    assert parts.num_timesteps == whole.num_timesteps == 160
    for name, value in whole.average_policy.state_dict().items():
        th.testing.assert_close(parts.average_policy.state_dict()[name], value, rtol=0, atol=0)


def test_a_run_prints_progress_from_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    games = ("--env=PongNoFrameskip-v4", "--n-envs=2", "--buffer-size=60", "--device=cpu")
    main([*games, "--num-timesteps=32", "--logdir", str(tmp_path)])  # two rollouts, shorter than any game
    printed = capsys.readouterr().out
    assert printed.count("total_timesteps") == 2
    assert "32 steps, " in printed
    assert "no game has ended yet" in printed
    assert "nan" not in printed


def test_a_run_needs_no_package_for_a_progress_bar_and_none_for_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    monkeypatch.setattr("stable_baselines3.common.callbacks.tqdm", None)
    monkeypatch.setattr("stable_baselines3.common.logger.SummaryWriter", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run(tmp_path)
    assert (tmp_path / "progress.csv").exists()


def test_what_cannot_be_run_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="has no checkpoint to resume from"):
        resume(tmp_path)
    with pytest.raises(SystemExit, match="run-atari: env_id must be the id of an Atari game"):
        run(tmp_path, "--env", "CartPole-v1")
    with pytest.raises(SystemExit, match="run-atari: --num-timesteps must be an integer of at least 1, got -4"):
        run(tmp_path, "--num-timesteps=-4")
    with pytest.raises(SystemExit, match="run-atari: seed must be an integer of at least 0, got -4"):
        run(tmp_path, "--seed=-4")
    assert not list(tmp_path.iterdir())
    for argument in (
        "--num-timesteps=2.5",
        "--num-timesteps=abc",
        "--num-timesteps=inf",
        "--n-envs=1.5",
        "--log-interval=often",
    ):
        with pytest.raises(SystemExit, match="2"):
            run(tmp_path, argument)
        name, value = argument.split("=")
        assert f"argument {name}: must be a whole number, got {value!r}" in capsys.readouterr().err
    run(tmp_path)
    (tmp_path / "run-atari.json").rename(tmp_path / "others.json")
    with pytest.raises(SystemExit, match="--logdir must be the folder of a run of run-atari, got"):
        resume(tmp_path)
    with pytest.raises(SystemExit, match="continue it with --resume, or use another --logdir"):
        run(tmp_path)


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run(tmp_path)
    resume(tmp_path, "--num-timesteps=240")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(SystemExit, match=r"run-atari: buffer_size must be 60, as in the checkpoint .*, got 100"):
        resume(tmp_path, "--buffer-size=100")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    resume(tmp_path, "--num-timesteps=320")


def test_a_second_program_changes_nothing_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.1)
    (tmp_path / "progress.csv").write_text("mine")

    def run_too() -> None:
        with pytest.raises(SystemExit, match="to which another program is writing"):
            run(tmp_path)

    with checkpoint.locked(tmp_path):
        assert in_a_fork(run_too) == 0
    assert (tmp_path / "progress.csv").read_text() == "mine"
    assert not (tmp_path / "run-atari.json").exists()


def test_a_run_that_ended_before_its_first_checkpoint_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "run-atari.json").write_text("{}")
    with pytest.raises(SystemExit, match="can be started again without --resume"):
        resume(tmp_path)
    run(tmp_path)
    assert (tmp_path / "agent.zip").exists()


def test_without_ale_py_a_run_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    for name in [name for name in sys.modules if name.startswith("sb3_acer.atari")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["sb3-acer", "run-atari"])
    assert command_line() == 2
    message = f"sb3-acer run-atari: Atari games need ale-py 0.12.1 or later: {how_to_install('atari')}"
    assert capsys.readouterr().err.splitlines() == [message]


def test_the_rate_of_a_resumed_run_is_that_of_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Agent(SimpleNamespace):
        def learn(self, n: int, callback: Any, *args: Any, **kwargs: Any) -> None:
            callback.start, self.num_timesteps = 160, n

    env = SimpleNamespace(t_start=0.0, close=lambda: None)
    monkeypatch.setattr(run_module, "make_atari_vec_env", lambda *args: env)
    monkeypatch.setattr(run_module, "make_agent", lambda *args: Agent(save=lambda path: None, ep_info_buffer=[]))
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=iter([0.0, 10.0]).__next__))
    run_module.main(["--num-timesteps", "320", "--logdir", str(tmp_path)])
    assert "320 steps, 16 a second" in capsys.readouterr().out
