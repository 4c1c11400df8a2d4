"""Runs of the command line, and the folders that they leave."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import optuna
import pytest
import rl_zoo3.enjoy
import rl_zoo3.exp_manager
import rl_zoo3.hyperparams_opt
import rl_zoo3.train
import rl_zoo3.utils
import yaml

from sb3_acer.__main__ import main as command_line
from sb3_acer.hyperparams import ENTRIES_FILE
from sb3_acer.zoo import commands, experiment, study

ROOT = Path(commands.__file__).parents[2]
HYPERPARAMS: dict[str, dict[str, Any]] = yaml.safe_load(ENTRIES_FILE.read_text())
TASK = ("--env", "CartPole-v1", "-n", "600", "--eval-episodes", "1", "--seed", "1", "--num-threads", "1")
PARAMS = ("-params", "replay_start:100", "n_envs:2", "n_steps:16", "replay_ratio:1")
SHORT_RUN = (*TASK, "--eval-freq", "200", *PARAMS)
SEARCH = ("-n", "100", "--n-trials", "2", "--n-evaluations", "1", "--eval-episodes", "2", "--no-optim-plots")


def environment(*path: Path) -> dict[str, str]:
    """Environment variables of a machine without a screen, whose Python finds this package."""
    env = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    paths = [*map(str, path), str(ROOT), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def python(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run this Python as a user's shell would."""
    program = [sys.executable, *arguments]
    return subprocess.run(program, cwd=cwd, env=environment(*path), capture_output=True, text=True, timeout=300)


def sb3_acer(*arguments: str, cwd: Path) -> str:
    """Run a command in this process, since a new one would import everything again; returns what the command prints."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(experiment, "EVAL_EPISODES", 2)
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            patch.delenv(name, raising=False)
        patch.setenv("SDL_VIDEODRIVER", "dummy")  # set by the code: this restores it afterwards
        commands.main([*arguments])
    return printed.getvalue()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a short training run, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, sb3_acer("train", *TASK, *PARAMS, "--n-eval-envs", "5", cwd=folder)


@pytest.fixture(scope="session")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run that saves everything and a second run that continues it; what the second one printed."""
    folder = tmp_path_factory.mktemp("continued")
    saved = ("-tb", "tensorboard", "--log-interval", "1", "--save-freq", "200", "--save-replay-buffer")
    evaluated = ("--eval-freq", "100", "--eval-episodes", "3", "--n-eval-envs", "2")
    run = (*saved, *SHORT_RUN, "normalize:True", *evaluated, "-n", "448")  # seven rollouts of 32 steps
    sb3_acer("train", *run, cwd=folder)
    return folder, sb3_acer("train", "-i", "logs/acer/CartPole-v1_1/CartPole-v1.zip", *run, cwd=folder)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Makes ``python -m sb3_acer`` run in this process instead of a new one; returns the arguments of each run."""
    runs: list[tuple[str, ...]] = []
    run = subprocess.run

    def run_here(program: Sequence[str], **kwargs: Any) -> "subprocess.CompletedProcess[Any]":
        if [*program[:3]] != [sys.executable, "-m", "sb3_acer"]:
            return run(program, **kwargs)
        runs.append((*program[3:],))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["sb3-acer", *program[3:]])
            return subprocess.CompletedProcess(program, command_line())

    monkeypatch.setattr(subprocess, "run", run_here)
    return runs


def finished_trials(storage: str, study_name: str = "acer-CartPole-v1") -> list[optuna.trial.FrozenTrial]:
    trials = optuna.load_study(storage=study.open_storage(storage), study_name=study_name).trials
    assert all(trial.state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED) for trial in trials)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    return trials


def arguments_of_train(*arguments: str, command: str = "train") -> list[str]:
    """The arguments that the zoo's train finds in ``sys.argv``."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(rl_zoo3.train, "train", lambda: seen.extend(sys.argv[1:]))
        commands.main([command, *arguments])
    return seen
