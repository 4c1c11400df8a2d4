"""Studies that several workers share."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from shutil import chown, which
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

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


def test_a_storage_that_is_neither_a_log_nor_a_url_is_one_line(shell: Path) -> None:
    with pytest.raises(SystemExit, match=r"--storage must end in \.log or be the URL of a database, got 'study\.db'$"):
        commands.main(["tune", "--storage", "study.db"])


@pytest.mark.parametrize(
    ("storage", "reason"),
    [("postgres://host/b", "Can't load plugin"), ("sqlite:////no/folder/b.db", "unable to open database file")],
)
def test_a_database_that_cannot_be_opened_is_one_line(storage: str, reason: str) -> None:
    with pytest.raises(
        SystemExit, match=rf"^sb3-acer: --storage must be a file NAME.log or a database .*{reason}"
    ) as end:
        study.open_storage(storage, attempts=1)
    assert len(str(end.value).splitlines()) == 1


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


def test_a_study_has_trials_that_can_be_compared(tmp_path: Path) -> None:
    storage = str(tmp_path / "logs/acer/CartPole-v1.log")
    tune = ("tune", *SEARCH, "--n-trials", "1", "-n", "64")
    sb3_acer(*tune, cwd=tmp_path)
    for more, begun in (
        (("-n", "128"), "-n 64, got 128"),
        (("--n-runs", "2"), "--n-runs 1, got 2"),
        (("--n-evaluations", "3"), r"--n-evaluations \d, got 3"),
        (("--eval-episodes", "7"), r"--eval-episodes \d, got 7"),
        (("--env-kwargs", "sutton_barto_reward:True"), r"--env-kwargs \{\}, got \{'sutton_barto_reward': True\}"),
        (("-params", "gamma:0.5"), r"-params \{\}, got \{'gamma': 0.5\}"),
        (
            ("--storage", storage, "--study-name", "acer-CartPole-v1", "--env", "Acrobot-v1"),
            "--env CartPole-v1, got Acrobot-v1",
        ),
    ):
        with pytest.raises(SystemExit, match=rf"the study acer-CartPole-v1 was begun with {begun}: give another"):
            sb3_acer(*tune, *more, cwd=tmp_path)
    sb3_acer(*tune, "-n", "128", "--study-name", "another", cwd=tmp_path)
    assert len(finished_trials(storage)) == 1


def test_a_study_that_goes_on_with_the_same_seed_has_new_trials(tmp_path: Path) -> None:
    for _ in range(3):
        sb3_acer("tune", *SEARCH, "--seed", "1", cwd=tmp_path)
    trials = finished_trials(str(tmp_path / "logs/acer/CartPole-v1.log"))
    assert len({trial.params["learning_rate"] for trial in trials}) == len(trials) == 6


def postgresql(name: str) -> str:
    """A program of PostgreSQL, which Debian keeps apart."""
    found = which(name) or next(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if found is None:
        pytest.skip(f"needs PostgreSQL's {name}: apt-get install postgresql")
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a new database: a file, or on a server that is reached by a file and not by a port."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/study.db"
        return
    pytest.importorskip("psycopg", reason="needs a driver of PostgreSQL: pip install psycopg[binary]")
    initdb, pg_ctl = postgresql("initdb"), postgresql("pg_ctl")
    as_user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    with TemporaryDirectory() as folder:
        if as_user:
            chown(folder, "postgres", "postgres")
        run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, cwd=folder, **as_user)
        run([initdb, "-D", f"{folder}/data", "-A", "trust", "-U", "us", "--no-sync"])
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run([pg_ctl, "-D", f"{folder}/data", "-o", options, "-l", f"{folder}/log", "-w", "start"])
        try:
            yield f"postgresql+psycopg://us@/postgres?host={folder}"
        finally:
            run([pg_ctl, "-D", f"{folder}/data", "-m", "immediate", "stop"])


def test_the_trial_of_a_worker_that_is_killed_is_run_again_by_another(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers in folders of their own; the first dies in the midst of its first trial."""
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setattr(study, "HEARTBEAT", 1)
    objective = ExperimentManager.objective
    tune = ("tune", *SEARCH, "--storage", server, "--study-name", "ours")

    def die(self: ExperimentManager, trial: optuna.Trial) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    def wait_and_run(self: ExperimentManager, trial: optuna.Trial) -> float:
        time.sleep(3)  # longer than two heartbeats: when the next trial starts, the first worker is known to be dead
        reward: float = objective(self, trial)
        return reward

    def work(folder: Path, behaviour: Any, n_trials: str) -> int | None:
        folder.mkdir()
        monkeypatch.setattr(ExperimentManager, "objective", behaviour)
        worker = get_context("fork").Process(
            target=sb3_acer, args=(*tune, "--n-trials", n_trials), kwargs={"cwd": folder}
        )
        worker.start()
        worker.join(200)
        return worker.exitcode

    assert work(here, die, "1") == -signal.SIGKILL
    assert work(there, wait_and_run, "2") == 0
    trials = optuna.load_study(storage=study.open_storage(server), study_name="ours").trials
    states = [trial.state.name for trial in trials]
    assert states == ["FAIL", "COMPLETE", "COMPLETE"]
    assert [trial.params for trial in trials[1:]].count(trials[0].params) == 1


def test_workers_that_begin_a_study_at_once_begin_one_with_one_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = study.open_storage("sqlite:///:memory:")
    monkeypatch.setattr(optuna, "get_all_study_names", lambda storage: [])  # as each of them finds it
    for _ in range(2):
        study.begin_study(storage, "ours", {"x": 1}, {"-n": 100})
    assert [trial.state.name for trial in optuna.load_study(storage=storage, study_name="ours").trials] == ["WAITING"]


def test_a_database_that_stays_closed_ends_the_program_after_some_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(SystemExit, match="unable to open database file"):
        study.open_storage("sqlite:////no/folder/b.db", attempts=3)
    assert len(waits) == 2
