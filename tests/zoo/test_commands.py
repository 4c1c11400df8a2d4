"""The command line: rl-zoo's own scripts, with ACER in them."""

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import huggingface_hub
import numpy as np
import optuna
import pytest
import rl_zoo3.enjoy
import rl_zoo3.exp_manager
import rl_zoo3.hyperparams_opt
import rl_zoo3.train
import rl_zoo3.utils
import yaml
from matplotlib import pyplot as plt
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer import ACER
from sb3_acer.__main__ import REQUIRED, REQUIRED_BY
from sb3_acer.hyperparams import old_zoo
from sb3_acer.zoo import commands, display, experiment, registration, study
from sb3_acer.zoo.registration import convert_acer_params, nearest_trial, sample_acer_params

ROOT = Path(commands.__file__).parents[2]
HYPERPARAMS: dict[str, dict[str, Any]] = yaml.safe_load(commands.HYPERPARAMS.read_text())
# Of each entry that names no environment, one that the zoo takes for it.
STAND_INS = MappingProxyType({"default": "BipedalWalker-v3", "atari": "ALE/Pong-v5"})
SHORT_RUN = ("--env", "CartPole-v1", "-n", "600", "--seed", "1", "--num-threads", "1", "-params", "replay_start:100")
# Python's own way to make an import fail.
WITHOUT_EXTRAS = "import sys; " + "; ".join(
    f"sys.modules[{name!r}] = None" for name in (*REQUIRED, "optuna", "moviepy", "seaborn", "scipy", "ale_py", "cv2")
)


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sb3_acer", *arguments]


def environment(*path: Path) -> dict[str, str]:
    """A machine without a screen, whose Python finds this package."""
    env = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    paths = [*map(str, path), str(ROOT), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def python(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run this Python as a user's shell would."""
    program = [sys.executable, *arguments]
    return subprocess.run(program, cwd=cwd, env=environment(*path), capture_output=True, text=True, timeout=300)


def sb3_acer(*arguments: str, cwd: Path) -> str:
    """Run the command line and return what it prints."""
    result = python("-m", "sb3_acer", *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def sb3_acer_here(*arguments: str, cwd: Path) -> str:
    """The same in this process, which is quicker."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(experiment, "EVAL_EPISODES", 2)
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            patch.delenv(name, raising=False)
        patch.setenv("SDL_VIDEODRIVER", "dummy")  # which the code sets, and which is to be put back
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        assert commands.main([*arguments]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a short training has run, and what it has printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, sb3_acer("train", *SHORT_RUN, "--n-eval-envs", "5", cwd=folder)


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a training with all that is saved on the way has run, then another that goes on from there."""
    folder = tmp_path_factory.mktemp("continued")
    saved = ("-tb", "tensorboard", "--log-interval", "1", "--save-freq", "200", "--save-replay-buffer")
    evaluated = ("--eval-freq", "100", "--eval-episodes", "3", "--n-eval-envs", "2")
    run = (*saved, *evaluated, *SHORT_RUN, "normalize:True", "n_envs:2", "-n", "448")  # seven rollouts of 32 steps
    sb3_acer_here("train", *run, cwd=folder)
    return folder, sb3_acer_here("train", "-i", "logs/acer/CartPole-v1_1/CartPole-v1.zip", *run, cwd=folder)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder for a command that runs in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


def new_study(seed: int, policy: str = "MlpPolicy") -> optuna.Study:
    """As the zoo begins one."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study.set_user_attr("policy", policy)
    return study


# --- registration ---


def test_registering_changes_the_dicts_that_every_module_of_the_zoo_reads() -> None:
    registration.register()
    for module in (rl_zoo3.utils, rl_zoo3.train, rl_zoo3.enjoy, rl_zoo3.exp_manager):
        assert module.__dict__["ALGOS"]["acer"] is ACER
    for module in (rl_zoo3.hyperparams_opt, rl_zoo3.exp_manager):
        assert module.__dict__["HYPERPARAMS_SAMPLER"]["acer"] is sample_acer_params
        assert module.__dict__["HYPERPARAMS_CONVERTER"]["acer"] is convert_acer_params


def test_the_package_itself_needs_no_extra(tmp_path: Path) -> None:
    result = python("-c", f"{WITHOUT_EXTRAS}; import sb3_acer; print(sb3_acer.ACER.__name__)", cwd=tmp_path)
    assert result.stdout == "ACER\n", result.stderr


NEEDS = [("train", name) for name in REQUIRED]
NEEDS += [(command, name) for command, names in REQUIRED_BY.items() for name in names]


@pytest.mark.parametrize("name", sorted({name for _, name in NEEDS}))
def test_what_the_command_line_requires_is_in_the_extra_that_it_names(name: str) -> None:
    extra = (ROOT / "pyproject.toml").read_text().split("\nzoo = [")[1].split("]\ntest")[0]
    assert f'"{name}' in extra


@pytest.mark.parametrize(("command", "name"), NEEDS)
def test_a_missing_extra_is_one_line_that_names_it(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sb3_acer.__main__ import main

    monkeypatch.setattr(sys, "argv", ["sb3-acer", command])
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
    assert commands.main(["trian"]) == 2
    assert f"must be one of {', '.join(commands.COMMANDS)}, got 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in commands.COMMANDS)


def test_there_is_a_command_for_every_script_of_the_zoo() -> None:
    scripts = "train enjoy tune plot-train plot-from-file all-plots record-video record-training benchmark push-to-hub"
    assert set(scripts.split()) <= commands.COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(commands.COMMANDS.keys() - {"zoo-path"}))
def test_help_says_what_a_command_does_and_the_zoos_own_arguments(
    name: str, shell: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        commands.main([name, "--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\n".join(commands.description(name)))
    assert "options:" in printed
    assert not list(shell.iterdir())


@pytest.mark.parametrize("script", ["enjoy", "record_video", "record_training", "push_to_hub", "load_from_hub"])
def test_the_zoos_own_commands_know_acer_where_the_folder_is_on_their_path(script: str, tmp_path: Path) -> None:
    result = python("-m", f"rl_zoo3.{script}", "--algo", "acer", "--help", cwd=tmp_path, path=(commands.ZOO_PATH,))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_the_zoos_own_train_runs_acer_with_our_hyperparameters(tmp_path: Path) -> None:
    assert sb3_acer_here("zoo-path", cwd=tmp_path) == f"{commands.ZOO_PATH}\n"
    train = ("-m", "rl_zoo3.train", "--algo", "acer", "-conf", "sb3_acer.hyperparams", *SHORT_RUN)
    unknown = python(*train, cwd=tmp_path)
    assert "invalid choice: 'acer'" in unknown.stderr
    result = python(*train, cwd=tmp_path, path=(commands.ZOO_PATH,))
    assert result.returncode == 0, result.stderr
    model = ACER.load(tmp_path / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.batch_size == HYPERPARAMS["CartPole-v1"]["batch_size"]


def test_the_folder_hides_no_other_sitecustomize_and_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    for path in ((commands.ZOO_PATH, tmp_path), (commands.ZOO_PATH, tmp_path, commands.ZOO_PATH)):
        result = python("-c", "import sys; print('rl_zoo3' in sys.modules)", cwd=tmp_path, path=path)
        assert (result.stdout, result.stderr) == ("the other\nFalse\n", "")


# --- hyperparameters ---


POLICIES = ("MlpPolicy", "MlpLstmPolicy")
SPACES = MappingProxyType({"CartPole-v1": 0, "Pendulum-v1": 1})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_actions", SPACES.values())
def test_converting_a_trials_params_gives_what_the_sampler_gave(policy: str, n_actions: int) -> None:
    study = new_study(0, policy)
    for _ in range(100):
        asked = study.ask()
        sampled = sample_acer_params(asked, n_actions, 1, {})
        assert convert_acer_params(asked.params) == sampled
        study.enqueue_trial(asked.params)
        assert sample_acer_params(study.ask(), n_actions, 1, {}) == sampled


def test_a_fixed_trial_is_sampled_as_it_is() -> None:
    asked = new_study(0).ask()
    sampled = sample_acer_params(asked, 0, 1, {})
    assert sample_acer_params(optuna.trial.FixedTrial(asked.params), 0, 1, {}) == sampled


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("env_id", SPACES)
def test_every_draw_is_an_acer_that_replays(policy: str, env_id: str) -> None:
    study = new_study(1, policy)
    for _ in range(5):
        sampled = sample_acer_params(study.ask(), SPACES[env_id], 1, {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # ACER warns where replay can never start
            model = ACER(policy, env_id, **sampled)
        for name in sampled.keys() - {"lr_schedule", "policy_kwargs"}:
            assert getattr(model, name) == sampled[name]
        assert model.policy_kwargs == sampled["policy_kwargs"]
        assert isinstance(model.policy.optimizer, sampled["policy_kwargs"]["optimizer_class"])


def test_what_learns_fast_is_drawn_often() -> None:
    study = new_study(2)
    draws = [sample_acer_params(study.ask(), 0, 1, {}) for _ in range(300)]
    assert np.mean([4 <= draw["replay_ratio"] <= 16 for draw in draws]) > 0.4
    assert np.mean([8 <= draw["batch_size"] <= 16 for draw in draws]) > 0.4
    assert np.mean([16 <= draw["n_steps"] <= 32 for draw in draws]) > 0.4
    rates = np.log10([draw["learning_rate"] for draw in draws])
    np.testing.assert_allclose(np.histogram(rates, 2, (-4, np.log10(5e-3)))[0] / 300, 0.5, atol=0.1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_actions", SPACES.values())
def test_the_trial_nearest_to_what_a_trial_drew_is_that_trial(policy: str, n_actions: int) -> None:
    study = new_study(3, policy)
    for _ in range(100):
        asked = study.ask()
        drawn = sample_acer_params(asked, n_actions, 1, {})
        params = nearest_trial(drawn, n_envs=4)
        assert params["n_envs_pow"] == 2
        assert {name: params[name] for name in asked.params} == pytest.approx(asked.params)


def test_the_trial_nearest_to_the_defaults_is_within_the_ranges_and_leaves_out_what_they_do_not_have() -> None:
    params = nearest_trial({}, n_envs=4)
    assert (params["n_steps_pow"], params["batch_size_pow"], params["buffer_size_pow"]) == (4, 2, 12)  # of 20, 4, 5000
    assert (params["net_arch"], params["activation_fn"], params["optimizer"]) == ("small", "tanh", "rmsprop")
    assert nearest_trial({"ent_coef": 0.0, "replay_ratio": 100}, 1) == params | {
        "ent_coef": 1e-5,
        "replay_ratio": 32,
        "n_envs_pow": 0,
        "batch_size_pow": 2,
    }
    others = {"learning_rate": lambda progress: 1e-3 * progress, "ent_schedule": "middle_drop"}
    assert params.keys() - nearest_trial(others | {"policy_kwargs": {"net_arch": [400]}}, 4).keys() == {
        "learning_rate",
        "ent_schedule",
        "net_arch",
    }


def test_memory_and_noise_are_drawn_where_there_is_any() -> None:
    memory = {"lstm_hidden_size_pow", "critic_lstm", "burn_in_share"}
    noise = {"log_std_init", "n_action_samples"}
    for policy, is_recurrent in (("MlpPolicy", False), ("CnnLnLstmPolicy", True)):
        for n_actions in (0, 2):
            asked = new_study(0, policy).ask()
            sample_acer_params(asked, n_actions, 1, {})
            expected = (memory if is_recurrent else set()) | (noise if n_actions else set())
            assert asked.params.keys() & (memory | noise) == expected


@pytest.mark.parametrize(
    ("learning_rate", "lr_schedule", "at_start", "half_way"),
    [("lin_6e-4", "constant", 6e-4, 3e-4), (6e-4, "linear", 6e-4, 3e-4), (6e-4, "constant", 6e-4, 6e-4)],
)
def test_a_learning_rate_is_scheduled_as_an_entry_says(
    learning_rate: Any, lr_schedule: str, at_start: float, half_way: float, shell: Path
) -> None:
    registration.register()
    hyperparams = {"learning_rate": learning_rate, "lr_schedule": lr_schedule}
    options: dict[str, Any] = {"eval_freq": -1, "hyperparams": hyperparams, "verbose": 0}
    prepared = ExperimentManager(
        Namespace(), "acer", "CartPole-v1", "logs", config=str(commands.HYPERPARAMS), **options
    ).setup_experiment()
    assert prepared is not None
    schedule = prepared[0].lr_schedule
    assert (schedule(1), schedule(0.5)) == pytest.approx((at_start, half_way))


def test_every_entry_has_what_the_zoo_needs() -> None:
    assert {"default", "atari"} <= HYPERPARAMS.keys()
    assert all(entry["n_timesteps"] >= 1 for entry in HYPERPARAMS.values())


# Copies: the zoo takes things out of what a module holds.
ENTRIES = [
    pytest.param(config, name, dict(settings), id=f"{config_name}-{name}")
    for config_name, config, entries in (
        ("acer.yml", str(commands.HYPERPARAMS), HYPERPARAMS),
        ("old_zoo", old_zoo.__name__, old_zoo.hyperparams),
    )
    for name, settings in entries.items()
]


@pytest.mark.parametrize(("config", "entry", "expected"), ENTRIES)
def test_every_entry_makes_an_acer_of_its_settings(
    config: str, entry: str, expected: dict[str, Any], shell: Path
) -> None:
    registration.register()
    env_id = STAND_INS.get(entry, entry)
    experiment = ExperimentManager(
        Namespace(),
        "acer",
        env_id,
        "logs",
        eval_freq=-1,
        hyperparams={"n_envs": 2},
        verbose=0,
        config=config,
    )
    prepared = experiment.setup_experiment()
    assert prepared is not None
    model, settings = prepared
    assert isinstance(model, ACER)
    assert settings == {**expected, "n_envs": 2}
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
        "CartPole-v1/vecnormalize.pkl",
        "0.monitor.csv",
        "1.monitor.csv",
        "learning_curve.png",
    }
    arguments = yaml.unsafe_load((run / "CartPole-v1/args.yml").read_text())
    arguments = dict(arguments)
    assert (arguments["algo"], arguments["n_timesteps"], arguments["seed"]) == ("acer", 600, 1)
    assert arguments["conf_file"] == str(commands.HYPERPARAMS)


def arguments_of_train(*arguments: str, command: str = "train") -> list[str]:
    """What the zoo's train finds in ``sys.argv``."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(rl_zoo3.train, "train", lambda: seen.extend(sys.argv[1:]))
        assert commands.main([command, *arguments]) == 0
    return seen


def test_arguments_reach_the_zoo_unchanged_after_the_defaults() -> None:
    given = ["--env", "Acrobot-v1", "-n", "5", "-conf", "mine.yml"]
    assert arguments_of_train(*given) == ["--algo", "acer", "-conf", str(commands.HYPERPARAMS), *given]


@pytest.mark.parametrize("given", [["--algo", "ppo"], ["--algo=ppo"], ["--env", "Acrobot-v1", "--alg", "ppo"]])
def test_another_algorithm_keeps_the_zoos_own_hyperparameters(given: list[str]) -> None:
    assert arguments_of_train(*given) == given


def test_train_alone_shows_a_progress_bar() -> None:
    assert arguments_of_train()[4:] == commands.FIRST_RUN
    assert "--progress" in commands.FIRST_RUN


def test_the_final_evaluation_sees_observations_normalised_as_in_training(
    shell: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "EVAL_EPISODES", 2)
    assert commands.main(["train", *SHORT_RUN, "normalize:True"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Evaluating over 2 episodes") < printed.index("Loading saved VecNormalize stats")


def test_who_asks_for_no_evaluation_gets_none(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train", "--eval-freq", "-1", *SHORT_RUN]) == 0
    printed = capsys.readouterr().out
    assert "Agent: logs" in printed
    assert "Evaluating" not in printed


def test_training_saves_all_that_it_is_asked_to(continued: tuple[Path, str]) -> None:
    run = continued[0] / "logs/acer/CartPole-v1_1"
    agents = {"CartPole-v1.zip", "best_model.zip", "rl_model_200_steps.zip", "rl_model_400_steps.zip"}
    records = {"replay_buffer.pkl", "0.monitor.csv", "1.monitor.csv", "evaluations.npz", "learning_curve.png"}
    assert {path.name for path in run.iterdir() if path.is_file()} == agents | records
    assert (run / "CartPole-v1/vecnormalize.pkl").exists()
    evaluations = np.load(run / "evaluations.npz")
    np.testing.assert_array_equal(evaluations["timesteps"], [100, 200, 300, 400])
    assert evaluations["results"].shape == (4, 3)


def test_tensorboard_gets_what_acer_logs(continued: tuple[Path, str]) -> None:
    (run,) = (continued[0] / "tensorboard/CartPole-v1").glob("ACER_1")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/trust_region_active", "train/q_loss", "eval/mean_reward", "rollout/ep_rew_mean"} <= tags
    assert events.Scalars("train/q_loss")[-1].step == 448


def test_training_goes_on_with_the_agent_and_its_replay_buffer(continued: tuple[Path, str]) -> None:
    folder, printed = continued
    assert "Loading pretrained agent" in printed
    assert "Loading replay buffer" in printed
    models = []
    for run in (1, 2):
        path = folder / f"logs/acer/CartPole-v1_{run}"
        models.append(ACER.load(path / "CartPole-v1.zip"))
        models[-1].load_replay_buffer(path / "replay_buffer.pkl")
    first, second = (model.replay_buffer.size() for model in models)
    assert (first, second) == (224, 448)
    assert models[1]._n_updates > models[0]._n_updates


@pytest.mark.parametrize("frame_stack", [2, 3])
def test_frames_are_stacked_over_normalised_observations(frame_stack: int, shell: Path) -> None:
    """Every off-policy class of SB3 crashes there: https://github.com/DLR-RM/stable-baselines3/issues/693"""
    entry = {**HYPERPARAMS["CartPole-v1"], "normalize": True, "frame_stack": frame_stack, "n_envs": 2}
    (shell / "both.yml").write_text(yaml.safe_dump({"CartPole-v1": entry}))
    sb3_acer_here("train", "-conf", "both.yml", *SHORT_RUN, cwd=shell)
    model = ACER.load(shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.observation_space.shape == (4 * frame_stack,)
    assert model._n_updates > 600 // 64
    assert "Mean reward: " in sb3_acer_here("enjoy", "--no-render", "-n", "300", cwd=shell)


def test_the_curve_is_a_running_mean_over_the_steps_taken() -> None:
    steps, rewards = np.arange(20, 2020, 20), np.arange(100.0)
    (axes,) = experiment.learning_curve(steps, rewards, "ACER on X").axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "ACER on X",
        "environment steps",
        "episode reward",
    )
    (line,) = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_xydata(), float), np.stack((steps[9:], rewards[9:] - 4.5), axis=1))


@pytest.mark.parametrize("n", [1, 2, 11])
def test_few_episodes_are_a_curve_too(n: int) -> None:
    (axes,) = experiment.learning_curve(np.arange(1, n + 1), np.ones(n), "").axes
    assert len(np.asarray(axes.lines[0].get_xydata())) == max(1, n - 4)


# --- tune ---

SEARCH = ("-n", "100", "--n-trials", "2", "--n-evaluations", "1", "--eval-episodes", "2", "--no-optim-plots")


def finished_trials(storage: str, study_name: str = "acer-CartPole-v1") -> list[optuna.trial.FrozenTrial]:
    trials = optuna.load_study(storage=study.open_storage(storage), study_name=study_name).trials
    assert all(trial.state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED) for trial in trials)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    return trials


def test_a_search_begins_with_the_entry_and_once(shell: Path) -> None:
    for n_trials in (1, 2):
        sb3_acer_here("tune", *SEARCH, "--n-trials", "1", "-params", "gamma:0.97", cwd=shell)
        first, *others = [convert_acer_params(trial.params) for trial in finished_trials("logs/acer/CartPole-v1.log")]
        assert len(others) == n_trials - 1
    entry = HYPERPARAMS["CartPole-v1"]
    for name in (
        "n_envs",
        "n_steps",
        "batch_size",
        "replay_ratio",
        "learning_rate",
        "ent_coef",
        "ent_schedule",
        "delta",
    ):
        assert first[name] == entry[name]
    assert first["gamma"] == pytest.approx(0.97)
    assert first not in others


def test_an_agent_can_be_trained_with_any_trial_of_a_search(shell: Path) -> None:
    printed = sb3_acer_here("tune", *SEARCH, "--n-trials", "3", cwd=shell)
    trials = finished_trials("logs/acer/CartPole-v1.log")
    assert len(trials) == 3
    assert len(list(shell.glob("logs/acer/report_*.csv"))) == 1
    assert "Agent:" not in printed
    *_, last = printed.splitlines()
    best = max(trials, key=lambda trial: trial.value or 0).number
    assert last.startswith("To train with the best trial: sb3-acer train ")
    assert last.endswith(f" --trial-id {best}")
    words = shlex.split(last.removeprefix("To train with the best trial: sb3-acer "))
    for trial in trials:  # trial 0, which the zoo would take for none, among them
        sb3_acer_here(*words[:-1], str(trial.number), "-n", "100", cwd=shell)
        run = shell / f"logs/acer/CartPole-v1_{trial.number + 2}"  # the search has made the first
        config = dict(yaml.unsafe_load((run / "CartPole-v1/config.yml").read_text()))
        assert config == HYPERPARAMS["CartPole-v1"] | convert_acer_params(trial.params)
        assert len(list(run.glob("*.monitor.csv"))) == config["n_envs"] == 2 ** trial.params["n_envs_pow"]
        assert ACER.load(run / "CartPole-v1.zip").gamma == 1 - trial.params["one_minus_gamma"]


def worker(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    cwd.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    return subprocess.Popen(command_line(*arguments), cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True)


def assert_each_made_two_trials(workers: Iterator["subprocess.Popen[str]"]) -> None:
    for each in workers:
        _, errors = each.communicate(timeout=300)
        assert each.returncode == 0, errors
        assert errors.count("] Trial ") == 2


def test_the_command_that_tune_prints_adds_a_worker(tmp_path: Path) -> None:
    first = worker("tune", *SEARCH, cwd=tmp_path / "here")
    assert first.stdout is not None
    start = "To add a worker, here or on another machine: sb3-acer "
    line = first.stdout.readline()
    assert line.startswith(start)
    second = worker(*shlex.split(line.removeprefix(start)), cwd=tmp_path / "there")
    assert_each_made_two_trials(iter((first, second)))
    assert len(finished_trials(str(tmp_path / "here/logs/acer/CartPole-v1.log"))) == 4


def test_workers_that_start_at_once_share_a_new_database(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    study = ("--storage", storage, "--study-name", "ours")
    assert_each_made_two_trials(iter([worker("tune", *SEARCH, *study, cwd=tmp_path) for _ in range(2)]))
    assert len(finished_trials(storage, "ours")) == 4


def arguments_of_tune(*arguments: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "open_storage", lambda storage: None)
        patch.setattr(optuna, "load_study", lambda **_: optuna.create_study())
        patch.setattr(optuna.Study, "best_trial", Namespace(number=5))
        return arguments_of_train(*arguments, command="tune")


def test_tune_is_train_with_a_search_and_a_place_for_it(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--env", "Pendulum-v1", "-f", "here", "--seed", "1", "-params", "normalize:True"]
    study = ["--storage", f"{shell}/here/acer/Pendulum-v1.log", "--study-name", "acer-Pendulum-v1"]
    assert arguments_of_tune(*given) == [
        "--algo",
        "acer",
        "-conf",
        str(commands.HYPERPARAMS),
        *commands.SEARCH,
        *given,
        *study,
    ]
    # Another worker with the same seed would draw the same trials.
    more = f"--env Pendulum-v1 -f here -params normalize:True {shlex.join(study)}"
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"To add a worker, here or on another machine: sb3-acer tune {more}",
        f"To train with the best trial: sb3-acer train {more} --trial-id 5",
    ]


@pytest.mark.parametrize(
    ("storage", "whole"),
    [
        ("a/b.log", "{here}/a/b.log"),
        ("/a/b.log", "/a/b.log"),
        ("sqlite:///b.db", "sqlite:///{here}/b.db"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("postgresql://me:secret@host/b", "postgresql://me:secret@host/b"),
        ("mysql+pymysql://me@host:3306/b", "mysql+pymysql://me@host:3306/b"),
    ],
)
def test_a_storage_is_named_as_every_folder_can(storage: str, whole: str, shell: Path) -> None:
    assert study.whole_path(storage) == whole.format(here=shell)


def test_a_storage_that_is_none_is_one_line(shell: Path) -> None:
    with pytest.raises(SystemExit, match=r"--storage must end in \.log or be the URL of a database, got 'study\.db'$"):
        commands.main(["tune", "--storage", "study.db"])


def test_a_trial_normalises_and_acts_as_the_training_with_it_will(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Spy(ACER):
        def _setup_model(self) -> None:
            super()._setup_model()
            seen.append(self)

    monkeypatch.setattr(registration, "ACER", Spy)
    more = ("normalize:True", 'policy:"MlpLstmPolicy"')
    sb3_acer_here("tune", *SEARCH, "--env", "Pendulum-v1", "-params", *more, cwd=shell)
    for model, trial in zip(seen, finished_trials("logs/acer/Pendulum-v1.log", "acer-Pendulum-v1"), strict=True):
        drawn = convert_acer_params(trial.params)
        normalize = model.get_vec_normalize_env()
        assert normalize is not None
        assert (normalize.gamma, model.gamma, model.n_envs) == (drawn["gamma"], drawn["gamma"], drawn["n_envs"])
        assert {"lstm_hidden_size", "log_std_init"} <= drawn["policy_kwargs"].keys() <= model.policy_kwargs.keys()
        assert model.burn_in == drawn["burn_in"]


def test_a_trial_of_several_runs_is_worth_their_mean(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_run, runs = ExperimentManager.objective, []

    def spy(self: ExperimentManager, trial: optuna.Trial) -> float:
        reward: float = one_run(self, trial)
        runs.append((reward, dict(trial.params)))
        return reward

    monkeypatch.setattr(ExperimentManager, "objective", spy)
    more = ("--env", "Pendulum-v1", "-params", 'policy:"MlpLstmPolicy"', "n_envs:2")
    printed = sb3_acer_here("tune", *SEARCH, "--n-trials", "1", "--n-runs", "3", *more, cwd=shell)
    assert "--n-runs 3" in printed.splitlines()[0]
    assert "--n-runs" not in printed.splitlines()[-1]
    (trial,) = finished_trials("logs/acer/Pendulum-v1.log", "acer-Pendulum-v1")
    rewards = [reward for reward, _ in runs]
    assert len(set(rewards)) == 3
    assert [params for _, params in runs] == [trial.params] * 3
    assert trial.value == pytest.approx(np.mean(rewards))
    assert trial.intermediate_values == pytest.approx({1: rewards[0], 2: np.mean(rewards[:2]), 3: np.mean(rewards)})


def test_a_trial_whose_second_run_disappoints_is_pruned(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = iter([3.0, 3.0, 3.0, 3.0, 0.0])
    monkeypatch.setattr(ExperimentManager, "objective", lambda self, trial: next(rewards))
    sb3_acer_here("tune", *SEARCH, "--n-startup-trials", "1", "--n-runs", "3", cwd=shell)
    first, second = finished_trials("logs/acer/CartPole-v1.log")
    assert (first.value, second.intermediate_values) == (3.0, {2: 1.5})
    assert second.state is optuna.trial.TrialState.PRUNED


def test_a_trial_has_one_run_at_least(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["tune", "--n-runs", "0"])
    assert "--n-runs must be at least 1, got 0" in capsys.readouterr().err


def test_the_number_of_environments_is_not_drawn_where_it_is_given(shell: Path) -> None:
    sb3_acer_here("tune", *SEARCH, "--n-trials", "1", "-params", "n_envs:3", cwd=shell)
    assert "n_envs_pow" not in finished_trials("logs/acer/CartPole-v1.log")[0].params


class Broken(gym.Wrapper[Any, Any, Any, Any]):
    """Of the environments made, those of the first trial's training give rewards that are not numbers."""

    n_made = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        Broken.n_made += 1
        self.is_broken = Broken.n_made == 2  # the first tells the zoo the action space

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return (observation, np.nan if self.is_broken else reward, *rest)


@pytest.mark.filterwarnings("ignore:.*The reward is a NaN value")
def test_a_trial_that_meets_a_nan_is_pruned_and_the_search_goes_on(shell: Path) -> None:
    gym.register("Broken-v0", lambda **_: Broken())
    search = ("tune", *SEARCH, "--n-eval-envs", "1", "--n-trials", "1", "--env", "Broken-v0", "-params", "n_envs:1")
    with pytest.raises(SystemExit, match="No best trial: No trials are completed yet"):
        sb3_acer_here(*search, cwd=shell)
    sb3_acer_here(*search, cwd=shell)
    states = [trial.state.name for trial in finished_trials("logs/acer/Broken-v0.log", "acer-Broken-v0")]
    assert states == ["PRUNED", "COMPLETE"]


# --- enjoy ---


def test_enjoy_runs_the_agent_that_train_has_saved(trained: tuple[Path, str]) -> None:
    printed = sb3_acer_here("enjoy", "--no-render", "-n", "500", "--stochastic", cwd=trained[0])
    assert "Loading logs/acer/CartPole-v1_1/CartPole-v1.zip" in printed
    assert "Mean reward: " in printed
    assert "Video" not in printed


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (("--load-best",), "best_model"),
        (("--load-checkpoint", "200"), "rl_model_200_steps"),
        (("--load-last-checkpoint",), "rl_model_400_steps"),
    ],
)
def test_enjoy_finds_the_best_agent_and_the_checkpoints(
    which: tuple[str, ...], name: str, continued: tuple[Path, str]
) -> None:
    printed = sb3_acer_here("enjoy", "--no-render", "--exp-id", "1", "-n", "200", *which, cwd=continued[0])
    assert f"Loading logs/acer/CartPole-v1_1/{name}.zip" in printed
    assert "Loading running average" in printed
    assert "Mean reward: " in printed


def test_enjoy_writes_a_video_where_there_is_no_screen(trained: tuple[Path, str]) -> None:
    printed = sb3_acer_here("enjoy", "-n", "60", cwd=trained[0])
    assert sum("No screen" in line for line in printed.splitlines()) == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("Video of 60 steps: "))
    video = trained[0] / line.removeprefix("Video of 60 steps: ")
    assert video.name in ("CartPole-v1.mp4", "CartPole-v1.gif")
    assert video.stat().st_size > 0


@pytest.mark.parametrize(
    ("screen", "should_render", "filmed"), [("", True, True), ("", False, False), (":0", True, False)]
)
def test_only_a_screen_that_is_not_there_is_replaced(
    screen: str, should_render: bool, filmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def create_test_env(env_id: str, **kwargs: Any) -> DummyVecEnv:
        seen.update(kwargs)
        return DummyVecEnv([lambda: gym.make(env_id)])

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for name in ("SDL_VIDEODRIVER", "MUJOCO_GL"):  # which the code sets, and which are to be put back
        monkeypatch.setenv(name, "dummy")
    monkeypatch.setattr(display, "create_test_env", create_test_env)
    given: dict[str, Any] = {"stats_path": str(tmp_path / "CartPole-v1"), "env_kwargs": {"render_mode": None}}
    env = display.watchable_env("CartPole-v1", should_render=should_render, **given)
    assert isinstance(env, display.Film) == filmed
    if not filmed:
        assert seen == {**given, "should_render": should_render}


def test_without_moviepy_the_video_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setitem(sys.modules, "moviepy", None)
    frames = [np.full((8, 8, 3), 20 * step, dtype=np.uint8) for step in range(5)]
    path = display.write_film(frames, 50, tmp_path / "videos" / "Env-v1")
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
    film = display.Film(env, tmp_path / "film")
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
        commands.main(["enjoy", *arguments])
    assert str(exit_info.value).startswith("No saved agent")
    assert str(exit_info.value).endswith(f"To make one: {remedy}")
    assert len(str(exit_info.value).splitlines()) == 1
    assert capsys.readouterr().out == ""


# --- videos, plots, benchmark, hub ---


def is_mp4(path: Path) -> bool:
    return path.read_bytes()[4:8] == b"ftyp"


def test_record_video_films_the_saved_agent(continued: tuple[Path, str]) -> None:
    sb3_acer_here("record-video", "-n", "20", "--load-best", "--exp-id", "1", cwd=continued[0])
    (video,) = (continued[0] / "logs/acer/CartPole-v1_1/videos").glob("best-model-*.mp4")
    assert is_mp4(video)


def test_record_training_joins_a_video_of_each_checkpoint(continued: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "logs/acer/CartPole-v1_1"
    shutil.copytree(continued[0] / "logs/acer/CartPole-v1_1", run)
    for name in ("best_model", "CartPole-v1"):
        (run / f"{name}.zip").unlink()
    sb3_acer_here("record-training", "-n", "20", cwd=tmp_path)
    videos = {path.name.split("-acer")[0]: path for path in (run / "videos").iterdir()}
    assert videos.keys() == {"checkpoint-200", "checkpoint-400", "training.mp4"}
    assert all(map(is_mp4, videos.values()))
    sizes = [videos[name].stat().st_size for name in ("checkpoint-200", "training.mp4")]
    assert sizes[1] > 1.5 * sizes[0]


def test_without_ffmpeg_record_training_says_so_at_once(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "moviepy.config", None)
    with pytest.raises(SystemExit, match=r"ffmpeg, which joins the videos, is not there: install ffmpeg$"):
        commands.main(["record-training"])


def test_the_ffmpeg_of_the_system_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ffmpeg").write_text("")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with display.ffmpeg_on_path() as found:
        assert found
        assert os.environ["PATH"] == str(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("record-training", "The logs/acer folder was not found"),
        ("benchmark", "No such file or directory: 'logs'"),
        ("plot-train", "No such file or directory: 'logs/acer'"),
    ],
)
def test_nothing_saved_is_one_line(command: str, message: str, shell: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        commands.main([command])
    assert str(exit_info.value).startswith(f"sb3-acer {command}: ")
    assert message in str(exit_info.value)


def test_a_call_that_is_no_script_of_the_zoo_is_left_alone() -> None:
    assert commands.call([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.DEVNULL) == 3


def test_benchmark_evaluates_every_saved_agent(continued: tuple[Path, str]) -> None:
    printed = sb3_acer_here("benchmark", "-n", "300", "--num-threads", "1", cwd=continued[0])
    assert "Evaluating acer on CartPole-v1..." in printed
    table = (continued[0] / "logs/benchmark/benchmark.md").read_text()
    (row,) = (line for line in table.splitlines() if line.startswith("|acer|CartPole-v1|"))
    assert 1 <= float(row.split("|")[3]) <= 500


@pytest.fixture(scope="module")
def plotted(continued: tuple[Path, str]) -> tuple[Path, str]:
    """A folder in which every plot has been drawn, and what was printed."""
    folder = continued[0]
    printed = sb3_acer_here("plot-train", "-w", "3", cwd=folder)
    printed += sb3_acer_here("all-plots", "--no-million", "-o", "results", cwd=folder)
    printed += sb3_acer_here("plot-from-file", "-i", "results", "--no-million", "--boxplot", cwd=folder)
    return folder, printed


def test_without_a_screen_plots_are_pictures(plotted: tuple[Path, str]) -> None:
    folder, printed = plotted
    pictures = [line.removeprefix("Figure: ") for line in printed.splitlines() if line.startswith("Figure: ")]
    names = ("Training_Episodic_Reward", "Results_CartPole-v1", "Sensitivity_plot", "Sensitivity_box_plot")
    assert set(pictures) == {f"logs/plots/{name}.png" for name in names}
    for picture in pictures:
        colours = plt.imread(folder / picture)
        assert colours.std() > 0.05
    assert not plt.get_fignums()


def test_plots_show_every_run(plotted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gca().get_legend_handles_labels()[1]))
    monkeypatch.setattr(plt, "get_backend", lambda: "TkAgg")  # a screen: figures stay with matplotlib
    sb3_acer_here("plot-train", "-w", "3", cwd=plotted[0])
    plt.close("all")
    assert [sorted(names) for names in shown] == [["CartPole-v1_1", "CartPole-v1_2"]]


class Hub:
    """As much of the Hugging Face hub as an upload needs, in memory."""

    uploads: list[tuple[str, Path]]

    def create_repo(self, repo_id: str, **kwargs: Any) -> str:
        return f"https://hub.test/{repo_id}"

    def snapshot_download(self, repo_id: str, local_dir: Path) -> None:
        Path(local_dir).mkdir(parents=True)

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.uploads.append((repo_id, folder_path))


def test_push_to_hub_uploads_an_agent_with_its_card_and_video(
    continued: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "uploads", [], raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    logs = str(continued[0] / "logs")
    sb3_acer_here("push-to-hub", "--env", "CartPole-v1", "-orga", "us", "-f", logs, "-n", "20", cwd=tmp_path)
    ((repository, folder),) = Hub.uploads
    assert repository == "us/acer-CartPole-v1"
    assert {"README.md", "replay.mp4", "acer-CartPole-v1.zip", "vec_normalize.pkl", "results.json"} <= {
        path.name for path in (tmp_path / folder).iterdir()
    }
    card = (tmp_path / folder / "README.md").read_text()
    (metadata, *_) = yaml.safe_load_all(card.split("\n# ")[0])
    result = metadata["model-index"][0]["results"][0]
    assert (metadata["model-index"][0]["name"], result["dataset"]["name"]) == ("ACER", "CartPole-v1")
    assert result["metrics"][0]["type"] == "mean_reward"
    assert "python -m rl_zoo3.enjoy --algo acer" in card
    assert isinstance(ACER.load(tmp_path / folder / "acer-CartPole-v1.zip"), ACER)
