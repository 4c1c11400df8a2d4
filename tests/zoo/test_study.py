"""Studies that several workers share."""

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from optuna.storages import BaseStorage

from sb3_acer.zoo import commands, study
from tests.zoo.conftest import SEARCH, environment, finished_trials, sb3_acer


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


def test_the_command_that_tune_prints_adds_a_worker(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    program = [sys.executable, "-m", "sb3_acer", "tune", *SEARCH]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, cwd=here, env=environment(), stdout=pipe, stderr=pipe, text=True) as first:
        assert first.stdout is not None
        start, _, arguments = first.stdout.readline().partition(": sb3-acer ")
        assert start == "To add a worker, here or on another machine"
        sb3_acer(*shlex.split(arguments), cwd=there)
        _, errors = first.communicate(timeout=300)
    assert first.returncode == 0, errors
    assert errors.count("] Trial ") == 2
    assert len(finished_trials(str(here / "logs/acer/CartPole-v1.log"))) == 4


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
