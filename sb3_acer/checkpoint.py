"""
Folders of checkpoints. A checkpoint is a folder of files that is written under another name, with a manifest of its
files last, and then renamed: each that can be found is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sb3_acer.storage import replacing

FORMAT = "sb3-acer checkpoint 1"
_UNFINISHED = "unfinished"
"""folder of the files of a checkpoint until it is whole"""
_MANIFEST = "manifest.json"


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    path: Path
    """its folder"""
    manifest: dict[str, Any]
    """what is known of it without reading its files"""


def find_checkpoint(folder: str | Path) -> Checkpoint | None:
    """
    :param folder: folder of checkpoints
    :return: the newest whole one, None if there is none
    """
    found = map(checkpoint_at, reversed(_all_checkpoints(Path(folder))))
    return next((checkpoint for checkpoint in found if checkpoint is not None), None)


def checkpoint_at(path: Path) -> Checkpoint | None:
    """
    :param path: folder of one checkpoint
    :return: the checkpoint, None if it is not whole
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        sizes = manifest["files"].items()
        if manifest["format"] == FORMAT and all((path / name).stat().st_size == size for name, size in sizes):
            return Checkpoint(path, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


@contextmanager
def new_checkpoint(folder: str | Path, manifest: dict[str, Any], keep: int) -> Iterator[Path]:
    """
    A new checkpoint. Older ones than the newest ``keep`` are deleted once it is whole and on the disk.

    :param folder: folder of checkpoints, which one program writes to at a time
    :param manifest: what is to be known without reading the files, with ``num_timesteps``, which is part of the name
    :param keep: number of checkpoints that are kept
    :return: the folder to write files to, each flushed to the disk
    :raises OSError: if it cannot be written; the older ones are kept then
    """
    folder = Path(folder)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)  # of a program that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        with replacing(unfinished / _MANIFEST, "json") as file:
            file.write(json.dumps({"format": FORMAT, **manifest, "files": sizes}, indent=1).encode())
        _flush(unfinished)
        number = 1 + max(map(_number, _all_checkpoints(folder)), default=0)
        unfinished.rename(folder / f"checkpoint_{number}_{manifest['num_timesteps']}_steps")
        _flush(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for old in _all_checkpoints(folder)[:-keep]:
        (old / _MANIFEST).unlink(missing_ok=True)  # first: it is not whole any more
        shutil.rmtree(old, ignore_errors=True)


def _all_checkpoints(folder: Path) -> list[Path]:
    """Whole or not, the oldest first."""
    paths = folder.glob("checkpoint_*")
    return sorted((path for path in paths if re.fullmatch(r"checkpoint_\d+_\d+_steps", path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("_")[1])


def _flush(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
