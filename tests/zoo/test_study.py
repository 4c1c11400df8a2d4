"""Studies that several workers share."""

import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from threading import Barrier

import optuna
import pytest
from optuna.storages import BaseStorage
from rl_zoo3.exp_manager import ExperimentManager

from sb3_acer.zoo import commands, study
from tests.zoo.conftest import SEARCH, finished_trials, sb3_acer


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


def test_the_command_that_tune_prints_adds_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker does all of its trials during the first trial of the first worker."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    objective, is_first = ExperimentManager.objective, iter([True])

    def objective_with_worker(self: ExperimentManager, trial: optuna.Trial) -> float:
        if next(is_first, False):
            assert isinstance(sys.stdout, StringIO)
            start, _, arguments = sys.stdout.getvalue().splitlines()[0].partition(": sb3-acer ")
            assert start == "To add a worker, here or on another machine"
            sb3_acer(*shlex.split(arguments), cwd=there)
        reward: float = objective(self, trial)
        return reward

    monkeypatch.setattr(ExperimentManager, "objective", objective_with_worker)
    sb3_acer("tune", *SEARCH, cwd=here)
    trials = finished_trials(str(here / "logs/acer/CartPole-v1.log"))
    assert sorted(range(4), key=lambda number: trials[number].datetime_complete or 0) == [1, 2, 0, 3]


def test_workers_that_start_at_once_share_a_new_database(tmp_path: Path) -> None:
    storage, n_workers = f"sqlite:///{tmp_path}/study.db", 3
    start = Barrier(n_workers)

    def begin(_: int) -> BaseStorage:
        start.wait()
        return study.open_storage(storage)

    with ThreadPoolExecutor(n_workers) as workers:
        assert len({*workers.map(begin, range(n_workers))}) == n_workers
    for _ in range(2):
        sb3_acer("tune", *SEARCH, "--n-trials", "1", "--storage", storage, "--study-name", "ours", cwd=tmp_path)
    assert len(finished_trials(storage, "ours")) == 2
