"""
Folders of checkpoints. A checkpoint is a folder of files. It is written under another name, with a manifest of its
files last, and then renamed, so it was whole when it got its name. A folder has the checkpoints of one run, and one
program writes to it at a time.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from sb3_acer.checks import warn
from sb3_acer.storage import move, replacing

FORMAT = "sb3-acer checkpoint 1"
_UNFINISHED = ".unfinished_checkpoint"
"""folder of the files of a checkpoint until it is whole"""
_LOCK = ".checkpoint.lock"
_PATIENCE = 10
"""seconds that a program waits for one that is about to end"""
_MANIFEST = "manifest.json"
_undamaged: set[Path] = set()
"""checkpoints whose files this process has written, or compared with their checksums"""


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    path: Path
    """its folder"""
    manifest: dict[str, Any]
    """what is known of it without reading its files"""


def has_checkpoints(folder: Path) -> bool:
    """
    :param folder: folder of checkpoints
    :return: whether there is one, whole or not
    """
    return bool(_all_checkpoints(folder))


def find_checkpoint(folder: str | Path) -> Checkpoint | None:
    """
    :param folder: folder of checkpoints
    :return: the newest whole one, None if there is none
    """
    return next(filter(None, map(checkpoint_at, reversed(_all_checkpoints(Path(folder))))), None)


def is_checkpoint(path: Path) -> bool:
    """
    :return: whether this is the folder of one checkpoint with its manifest, whole or not
    """
    return (path / _MANIFEST).exists()


def find_undamaged(folder: str | Path) -> Checkpoint | None:
    """
    :param folder: folder of checkpoints, or of a single one
    :return: the newest one whose files are as they were written, None if there is none at all; a warning names newer
        files that are not
    :raises ValueError: if all are damaged, or if another version of this package wrote the newest one
    """
    damaged: list[str] = []
    single = [Path(folder)] if is_checkpoint(Path(folder)) else []
    for path in reversed([*single, *_all_checkpoints(Path(folder))]):
        manifest = _read_manifest(path)
        if manifest is None:
            damaged.append(str(path / _MANIFEST))
            continue
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"{path} could not be loaded: it was written by another version of sb3_acer, as {manifest['format']!r} "
                f"and not as {FORMAT!r}"
            )
        changed = _changed_files(path, manifest)
        if not changed:
            if damaged:
                warn(f"{path} is loaded, since newer files are damaged: {', '.join(damaged)}")
            return Checkpoint(path, manifest)
        damaged += changed
    if damaged:
        raise ValueError(f"{damaged[0]} could not be loaded: it has changed since it was written")
    return None


def checkpoint_at(path: Path) -> Checkpoint | None:
    """
    :param path: folder of one checkpoint
    :return: the checkpoint, None if it is not whole. Sizes are compared, contents are not
    """
    manifest = _read_manifest(path)
    try:
        if manifest is not None and manifest["format"] == FORMAT:
            files = manifest["files"].items()
            if all((path / name).stat().st_size == size for name, (size, _) in files):
                return Checkpoint(path, manifest)
    except OSError:
        pass
    return None


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of one checkpoint, which another version may have written; None if it is damaged."""
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
        sizes = {name: (int(size), int(checksum)) for name, (size, checksum) in manifest["files"].items()}
        keep = max(int(manifest.get("keep", 2)), 1)
        return {**manifest, "format": str(manifest["format"]), "keep": keep, "files": sizes}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _changed_files(path: Path, manifest: dict[str, Any]) -> list[str]:
    """The files of a checkpoint that are others than were written."""
    files = manifest["files"].items()
    changed = [str(path / name) for name, written in files if _differs(path / name, *written)]
    if not changed:
        _undamaged.add(path.resolve())
    return changed


def _is_undamaged(path: Path) -> bool:
    """Whether this is a whole checkpoint. What this process knows is not read again, but sizes are compared."""
    found = checkpoint_at(path)
    return found is not None and (path.resolve() in _undamaged or not _changed_files(path, found.manifest))


def _differs(path: Path, size: int, checksum: int) -> bool:
    """Whether a file is another than the one that was written, or cannot be read."""
    try:
        return path.stat().st_size != size or _checksum(path) != checksum
    except OSError:
        return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """
    Keep other programs from writing checkpoints to a folder, which is made if there is none.

    :param folder: folder of checkpoints
    :raises ValueError: if another program writes there
    :raises OSError: if nothing can be written there
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, is_singleton=True)
    try:
        lock.acquire(_PATIENCE)
    except Timeout as error:
        raise ValueError(
            f"checkpoint must be a folder that one program writes to at a time, got {str(folder)!r}, to which another "
            "program is writing"
        ) from error
    try:
        yield
    finally:
        lock.release()


def require_same_run(folder: Path, run: str) -> None:
    """
    :param folder: folder of checkpoints
    :param run: id of the run that is to be saved there
    :raises ValueError: if the folder has checkpoints of another run
    """
    for path in reversed(_all_checkpoints(folder)):
        manifest = _read_manifest(path)
        if manifest is not None and manifest.get("run") != run:
            raise ValueError(
                f"a folder of checkpoints must be for one run alone, got {str(folder)!r}, where {path.name} is of "
                "another one"
            )


@contextmanager
def new_checkpoint(folder: str | Path, manifest: dict[str, Any], keep: int | None) -> Iterator[Path]:
    """
    A new checkpoint. Older ones than the newest ``keep`` are deleted once it is whole and on the disk. Damaged ones
    stay, and are not counted.

    :param folder: folder of checkpoints
    :param manifest: what is to be known without reading the files: ``run``, the id of the run, and ``num_timesteps``,
        which is part of the name
    :param keep: how many checkpoints are kept; None: the number that the newest one was written with, 2 for the first
    :return: the folder to write files to, each flushed to the disk
    :raises ValueError: if the folder has checkpoints of another run, or another program writes there
    :raises OSError: if it cannot be written; the older ones are kept then
    """
    folder = Path(folder)
    unfinished = folder / _UNFINISHED
    with locked(folder):
        require_same_run(folder, manifest["run"])
        if keep is None:
            manifests = map(_read_manifest, reversed(_all_checkpoints(folder)))
            keep = next(filter(None, manifests), {"keep": 2})["keep"]
        shutil.rmtree(unfinished, ignore_errors=True)  # of a program that was killed
        unfinished.mkdir()
        try:
            yield unfinished
            files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(unfinished.iterdir())}
            with replacing(unfinished / _MANIFEST, "json") as file:
                file.write(json.dumps({"format": FORMAT, **manifest, "keep": keep, "files": files}, indent=1).encode())
            _flush(unfinished)
            number = 1 + max(map(_number, _all_checkpoints(folder)), default=0)
            new = folder / f"checkpoint_{number}_{manifest['num_timesteps']}_steps"
            move(unfinished, new)
            _undamaged.add(new.resolve())
            _flush(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        whole = [path for path in _all_checkpoints(folder) if _is_undamaged(path)]
        with suppress(OSError):  # Windows keeps what another program reads; the next checkpoint deletes it
            for old in whole[:-keep]:
                old.rename(unfinished)  # in one step: what is left of it if the program is killed is no checkpoint
                shutil.rmtree(unfinished, ignore_errors=True)


def _all_checkpoints(folder: Path) -> list[Path]:
    """Whole or not, the oldest first. A folder gets such a name once it has a manifest, so one without has lost it."""
    folders = filter(Path.is_dir, folder.glob("checkpoint_*"))
    return sorted((path for path in folders if re.fullmatch(r"checkpoint_\d+_\d+_steps", path.name)), key=_number)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _number(path: Path) -> int:
    return int(path.name.split("_")[1])


def _flush(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network drives cannot do it for a folder
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
