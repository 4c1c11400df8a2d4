"""Storage of the tuner's studies, which several workers can share."""

import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

HEARTBEAT = 60
"""
Seconds between two signs of life that a worker gives in a database. A trial without one for twice as long has lost its
worker: the next trial that any worker starts finds it, marks it as failed, and puts it in the queue again.
"""


def open_storage(storage: str, attempts: int = 8) -> BaseStorage:
    """
    Open a storage of studies. If several workers open a new database at the same time, all of them try to create its
    tables and only the first succeeds. The others wait and try again.

    :param storage: path of a journal file, which ends in .log, or URL of a database
    :param attempts: number of attempts, after which the program exits
    """
    if storage.endswith(".log"):
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        # Optuna's default lock is a symbolic link, which Windows lets only administrators make.
        return JournalStorage(JournalFileBackend(storage, JournalFileOpenLock(storage)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # Optuna's heartbeat, and its callback
            retry = RetryHeartbeatStaleTrialCallback(max_retry=1)
            return RDBStorage(storage, heartbeat_interval=HEARTBEAT, heartbeat_stale_trial_callback=retry)
    except SQLAlchemyError as error:
        if attempts == 1 or isinstance(error, ArgumentError):
            reason = str(error).splitlines()[0]
            sys.exit(f"sb3-acer: --storage must be a file NAME.log or a database that can be opened: {reason}")
    time.sleep(random.uniform(0.1, 0.5))
    return open_storage(storage, attempts - 1)


def begin_study(storage: BaseStorage, name: str, params: dict[str, Any], options: dict[str, Any]) -> None:
    """
    Create a study whose first trial has these params, unless there is a study of that name.

    :param options: of the command line, which all trials of a study must have in common to be compared
    """
    if name not in optuna.get_all_study_names(storage):
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        study.enqueue_trial(params, skip_if_exists=True)  # several workers may get here at once
        for option, value in options.items():
            study.set_user_attr(option, value)
    begun = optuna.load_study(storage=storage, study_name=name).user_attrs
    for option, value in options.items():
        if begun.get(option, value) != value:  # another worker may be about to set it
            sys.exit(
                f"sb3-acer tune: the study {name} was begun with {option} {begun[option]}, got {value}: "
                "give another --study-name to begin another"
            )


def whole_path(storage: str) -> str:
    """The name of a storage for a worker in another folder: relative paths become absolute."""
    path = storage.removeprefix("sqlite:///")
    if path == storage and not storage.endswith(".log"):
        if "://" not in storage:
            sys.exit(f"sb3-acer tune: --storage must end in .log or be the URL of a database, got {storage!r}")
        return storage
    return storage.removesuffix(path) + str(Path(path).absolute())
