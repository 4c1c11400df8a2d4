"""Where a study of the tuner is kept, so that several workers can share it."""

import random
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError


def open_storage(storage: str, attempts: int = 8) -> BaseStorage:
    """
    A study's storage: a journal file, whose name ends in .log, or a database by its URL.

    Workers that start at once on a new database all make its tables: who comes second fails, and finds them later.
    """
    if storage.endswith(".log"):
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(storage))
    try:
        return RDBStorage(storage)
    except SQLAlchemyError:
        if attempts == 1:
            raise
    time.sleep(random.uniform(0.1, 0.5))
    return open_storage(storage, attempts - 1)


def begin_study(storage: BaseStorage, name: str, params: dict[str, Any]) -> None:
    """Make a study, if there is none of that name, whose first trial will have these params."""
    if name not in optuna.get_all_study_names(storage):
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        study.enqueue_trial(params, skip_if_exists=True)  # workers that start at once are several here


def whole_path(storage: str) -> str:
    """A study's storage as a worker in another folder has to name it."""
    path = storage.removeprefix("sqlite:///")
    if path == storage and not storage.endswith(".log"):
        if "://" not in storage:
            sys.exit(f"sb3-acer tune: --storage must end in .log or be the URL of a database, got {storage!r}")
        return storage
    return storage.removesuffix(path) + str(Path(path).absolute())
