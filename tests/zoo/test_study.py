"""Studies that several workers share."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sb3_acer.zoo import commands, study
from tests.zoo.conftest import (
    SEARCH,
    command_line,
    environment,
    finished_trials,
)


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
