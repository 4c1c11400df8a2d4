"""The command line: rl-zoo's own train and enjoy, with ACER in them."""

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import optuna
import pytest
import rl_zoo3.enjoy
import rl_zoo3.exp_manager
import rl_zoo3.hyperparams_opt
import rl_zoo3.train
import rl_zoo3.utils
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer import ACER, zoo
from sb3_acer.__main__ import REQUIRED

ROOT = Path(zoo.__file__).parents[1]
HYPERPARAMS: dict[str, dict[str, Any]] = yaml.safe_load(zoo.HYPERPARAMS.read_text())
# Of each entry that names no environment, one that the zoo takes for it.
STAND_INS = MappingProxyType({"default": "BipedalWalker-v3", "atari": "ALE/Pong-v5"})
SHORT_RUN = ("--env", "CartPole-v1", "-n", "600", "--seed", "1", "--num-threads", "1", "-params", "replay_start:100")
# Python's own way to make an import fail.
WITHOUT_EXTRAS = "import sys; " + "; ".join(
    f"sys.modules[{name!r}] = None" for name in (*REQUIRED, "optuna", "moviepy", "seaborn", "scipy", "ale_py", "cv2")
)


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run this Python on a machine without a screen, as a user's shell would."""
    env = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def sb3_acer(*arguments: str, cwd: Path) -> str:
    """Run the command line and return what it prints."""
    result = python("-m", "sb3_acer", *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a short training has run, and what it has printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, sb3_acer("train", *SHORT_RUN, "--n-eval-envs", "5", cwd=folder)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder for a command that runs in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


def trial(seed: int) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()


# --- registration ---


def test_registering_changes_the_dicts_that_every_module_of_the_zoo_reads() -> None:
    zoo.register()
    for module in (rl_zoo3.utils, rl_zoo3.train, rl_zoo3.enjoy, rl_zoo3.exp_manager):
        assert module.__dict__["ALGOS"]["acer"] is ACER
    for module in (rl_zoo3.hyperparams_opt, rl_zoo3.exp_manager):
        assert module.__dict__["HYPERPARAMS_SAMPLER"]["acer"] is zoo.sample_acer_params
        assert module.__dict__["HYPERPARAMS_CONVERTER"]["acer"] is zoo.convert_acer_params


def test_the_package_itself_needs_no_extra(tmp_path: Path) -> None:
    result = python("-c", f"{WITHOUT_EXTRAS}; import sb3_acer; print(sb3_acer.ACER.__name__)", cwd=tmp_path)
    assert result.stdout == "ACER\n", result.stderr


@pytest.mark.parametrize("name", REQUIRED)
def test_what_the_command_line_requires_is_in_the_extra_that_it_names(name: str) -> None:
    extra = (ROOT / "pyproject.toml").read_text().split("\nzoo = [")[1].split("]\ntest")[0]
    assert f'"{name}' in extra


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_extra_is_one_line_that_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sb3_acer.__main__ import main

    monkeypatch.setitem(sys.modules, name, None)
    assert main() == 2
    assert capsys.readouterr().err == f'sb3-acer: {name} not installed: pip install "sb3-acer[zoo]"\n'


def test_without_any_extra_the_command_line_ends_with_one_line(tmp_path: Path) -> None:
    command = "sys.argv[1:] = ['train']; import runpy; runpy.run_module('sb3_acer', run_name='__main__')"
    result = python("-c", f"{WITHOUT_EXTRAS}; {command}", cwd=tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert 'pip install "sb3-acer[zoo]"' in result.stderr


def test_an_unknown_command_is_told_the_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["trian"]) == 2
    assert "must be one of train, enjoy, got 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in zoo.COMMANDS)


# --- hyperparameters ---


@pytest.mark.parametrize("seed", range(20))
def test_converting_a_trials_params_gives_what_the_sampler_gave(seed: int) -> None:
    asked = trial(seed)
    sampled = zoo.sample_acer_params(asked, 0, 1, {})
    assert zoo.convert_acer_params(asked.params) == sampled
    again = zoo.sample_acer_params(optuna.trial.FixedTrial(asked.params), 0, 1, {})
    assert again == sampled


@pytest.mark.parametrize("seed", range(10))
def test_every_draw_is_an_acer_that_replays(seed: int) -> None:
    sampled = zoo.sample_acer_params(trial(seed), 0, 1, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ACER warns where replay can never start
        model = ACER("MlpPolicy", "CartPole-v1", **sampled)
    for name in ("n_steps", "replay_ratio", "buffer_size", "batch_size", "gamma", "alpha", "delta", "correction_term"):
        assert getattr(model, name) == sampled[name]
    assert isinstance(model.policy.optimizer, sampled["policy_kwargs"]["optimizer_class"])


def test_every_entry_has_what_the_zoo_needs() -> None:
    assert {"default", "atari"} <= HYPERPARAMS.keys()
    assert all(entry["n_timesteps"] >= 1 for entry in HYPERPARAMS.values())


@pytest.mark.parametrize("entry", HYPERPARAMS)
def test_every_entry_makes_an_acer_of_its_settings(entry: str, shell: Path) -> None:
    zoo.register()
    env_id = STAND_INS.get(entry, entry)
    experiment = ExperimentManager(
        Namespace(),
        "acer",
        env_id,
        "logs",
        eval_freq=-1,
        hyperparams={"n_envs": 2},
        verbose=0,
        config=str(zoo.HYPERPARAMS),
    )
    prepared = experiment.setup_experiment()
    assert prepared is not None
    model, settings = prepared
    assert isinstance(model, ACER)
    assert settings == {**HYPERPARAMS[entry], "n_envs": 2}
    for name in settings.keys() & {"n_steps", "replay_ratio", "buffer_size", "ent_coef", "batch_size", "gamma"}:
        assert getattr(model, name) == settings[name]
    assert model.env is not None
    model.env.close()


# --- train ---


def test_train_says_where_the_agent_is_and_how_good_it_is(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    lines = printed.splitlines()
    assert "Agent: logs/acer/CartPole-v1_1/CartPole-v1.zip" in lines
    assert "Learning curve: logs/acer/CartPole-v1_1/learning_curve.png" in lines
    (mean,) = (line for line in lines if line.startswith("Mean reward: "))
    reward, deviation = map(float, mean.removeprefix("Mean reward: ").split(" +/- "))
    assert 1 <= reward <= 500
    assert deviation >= 0
    assert "To watch the agent: sb3-acer enjoy" in lines
    assert isinstance(ACER.load(folder / "logs/acer/CartPole-v1_1/CartPole-v1.zip"), ACER)
    assert (folder / "logs/acer/CartPole-v1_1/learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_train_leaves_what_the_zoos_own_script_leaves_and_the_picture(trained: tuple[Path, str]) -> None:
    run = trained[0] / "logs/acer/CartPole-v1_1"
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and "videos" not in path.parts} == {
        "CartPole-v1.zip",
        "CartPole-v1/args.yml",
        "CartPole-v1/command.txt",
        "CartPole-v1/config.yml",
        "0.monitor.csv",
        "learning_curve.png",
    }
    arguments = yaml.unsafe_load((run / "CartPole-v1/args.yml").read_text())
    arguments = dict(arguments)
    assert (arguments["algo"], arguments["n_timesteps"], arguments["seed"]) == ("acer", 600, 1)
    assert arguments["conf_file"] == str(zoo.HYPERPARAMS)


def arguments_of_train(*arguments: str) -> list[str]:
    """What the zoo's train finds in ``sys.argv``."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(rl_zoo3.train, "train", lambda: seen.extend(sys.argv[1:]))
        assert zoo.main(["train", *arguments]) == 0
    return seen


def test_arguments_reach_the_zoo_unchanged_after_the_defaults() -> None:
    given = ["--env", "Acrobot-v1", "-n", "5", "-conf", "mine.yml"]
    assert arguments_of_train(*given) == ["--algo", "acer", "-conf", str(zoo.HYPERPARAMS), *given]


@pytest.mark.parametrize("given", [["--algo", "ppo"], ["--algo=ppo"], ["--env", "Acrobot-v1", "--alg", "ppo"]])
def test_another_algorithm_keeps_the_zoos_own_hyperparameters(given: list[str]) -> None:
    assert arguments_of_train(*given) == given


def test_train_alone_shows_a_progress_bar() -> None:
    assert arguments_of_train()[4:] == zoo.FIRST_RUN
    assert "--progress" in zoo.FIRST_RUN


def test_the_final_evaluation_sees_observations_normalised_as_in_training(
    shell: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "EVAL_EPISODES", 2)
    assert zoo.main(["train", *SHORT_RUN, "normalize:True"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Evaluating over 2 episodes") < printed.index("Loading saved VecNormalize stats")


def test_who_asks_for_no_evaluation_gets_none(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["train", "--eval-freq", "-1", *SHORT_RUN]) == 0
    printed = capsys.readouterr().out
    assert "Agent: logs" in printed
    assert "Evaluating" not in printed


def test_optimising_saves_no_agent_and_reports_on_none(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["-optimize", "--n-trials", "2", "--n-evaluations", "1", "--eval-episodes", "1", "--no-optim-plots"]
    assert zoo.main(["train", *search, *SHORT_RUN]) == 0
    printed = capsys.readouterr().out
    assert "Best trial:" in printed
    assert "Agent:" not in printed
    assert len(list(shell.glob("logs/acer/report_*.csv"))) == 1


def test_the_curve_is_a_running_mean_over_the_steps_taken() -> None:
    steps, rewards = np.arange(20, 2020, 20), np.arange(100.0)
    (axes,) = zoo.learning_curve(steps, rewards, "ACER on X").axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "ACER on X",
        "environment steps",
        "episode reward",
    )
    (line,) = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_xydata(), float), np.stack((steps[9:], rewards[9:] - 4.5), axis=1))


@pytest.mark.parametrize("n", [1, 2, 11])
def test_few_episodes_are_a_curve_too(n: int) -> None:
    (axes,) = zoo.learning_curve(np.arange(1, n + 1), np.ones(n), "").axes
    assert len(np.asarray(axes.lines[0].get_xydata())) == max(1, n - 4)


# --- enjoy ---


def test_enjoy_runs_the_agent_that_train_has_saved(trained: tuple[Path, str]) -> None:
    printed = sb3_acer("enjoy", "--no-render", "-n", "500", "--stochastic", cwd=trained[0])
    assert "Loading logs/acer/CartPole-v1_1/CartPole-v1.zip" in printed
    assert "Mean reward: " in printed
    assert "Video" not in printed


def test_enjoy_writes_a_video_where_there_is_no_screen(trained: tuple[Path, str]) -> None:
    printed = sb3_acer("enjoy", "-n", "60", cwd=trained[0])
    assert sum("No screen" in line for line in printed.splitlines()) == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("Video of 60 steps: "))
    video = trained[0] / line.removeprefix("Video of 60 steps: ")
    assert video.name in ("CartPole-v1.mp4", "CartPole-v1.gif")
    assert video.stat().st_size > 0


@pytest.mark.parametrize(
    ("display", "should_render", "filmed"), [("", True, True), ("", False, False), (":0", True, False)]
)
def test_only_a_screen_that_is_not_there_is_replaced(
    display: str, should_render: bool, filmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def create_test_env(env_id: str, **kwargs: Any) -> DummyVecEnv:
        seen.update(kwargs)
        return DummyVecEnv([lambda: gym.make(env_id)])

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for name in ("SDL_VIDEODRIVER", "MUJOCO_GL"):  # which the code sets, and which are to be put back
        monkeypatch.setenv(name, "dummy")
    monkeypatch.setattr(zoo, "create_test_env", create_test_env)
    given: dict[str, Any] = {"stats_path": str(tmp_path / "CartPole-v1"), "env_kwargs": {"render_mode": None}}
    env = zoo.watchable_env("CartPole-v1", should_render=should_render, **given)
    assert isinstance(env, zoo.Film) == filmed
    if not filmed:
        assert seen == {**given, "should_render": should_render}


def test_without_moviepy_the_video_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setitem(sys.modules, "moviepy", None)
    frames = [np.full((8, 8, 3), 20 * step, dtype=np.uint8) for step in range(5)]
    path = zoo.write_film(frames, 50, tmp_path / "videos" / "Env-v1")
    assert path == tmp_path / "videos" / "Env-v1.gif"
    with Image.open(path) as film:
        assert getattr(film, "n_frames", 1) == 5


def test_an_environment_that_cannot_be_drawn_is_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(mode: str | None = None) -> None:
        raise OSError("no display")

    env = DummyVecEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")])
    monkeypatch.setattr(env, "render", broken)
    film = zoo.Film(env, tmp_path / "film")
    film.reset()
    for _ in range(3):
        film.step(np.array([0]))
        film.render("human")
    film.close()
    assert capsys.readouterr().out.count("No video") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "sb3-acer train"),
        (["--env", "Acrobot-v1", "-f", "here"], "sb3-acer train --env Acrobot-v1 -f here"),
        (["--algo", "ppo"], "sb3-acer train --algo ppo"),
    ],
)
def test_no_saved_agent_is_one_line_that_names_the_command_that_makes_one(
    arguments: list[str], remedy: str, shell: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        zoo.main(["enjoy", *arguments])
    assert str(exit_info.value).startswith("No saved agent")
    assert str(exit_info.value).endswith(f"To make one: {remedy}")
    assert len(str(exit_info.value).splitlines()) == 1
    assert capsys.readouterr().out == ""
