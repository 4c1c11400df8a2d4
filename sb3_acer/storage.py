"""
Files of nested dicts of arrays and plain values, in numpy's npz format with a JSON header: reading them runs none of
their content. And how a file takes the place of an older one.
"""

import io
import json
import math
import os
import pathlib
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch as th
from stable_baselines3.common.save_util import open_path

from sb3_acer.checks import require, warn

FilePath = str | pathlib.Path | io.BufferedIOBase
"""a path, or an open binary file, as SB3's methods that save and load take it"""

FORMAT = "sb3-acer 1"
_HEADER, _ARRAY = "header", "array"


def write_state(file: io.BufferedIOBase, state: dict[str, Any]) -> None:
    """
    Write without a second copy of the arrays in memory.

    :param file: to write to
    :param state: dicts with string keys, lists, arrays, tensors, strings, numbers, booleans and None
    :raises ValueError: if an array holds objects, which are not read again
    """
    arrays: list[np.ndarray] = []

    def packed(value: Any) -> Any:
        if isinstance(value, th.Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {_ARRAY: len(arrays) - 1}
        if isinstance(value, dict):
            return {"dict": {key: packed(part) for key, part in value.items()}}
        return [packed(part) for part in value] if isinstance(value, (list, tuple)) else value

    header = json.dumps({"format": FORMAT, "state": packed(state)}).encode()
    members = {_HEADER: np.frombuffer(header, np.uint8)} | {str(index): array for index, array in enumerate(arrays)}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_state(file: io.BufferedIOBase, name: str) -> dict[str, Any]:
    """
    Nothing of the file is run, and each of its arrays is read once at most, so that a small file takes little memory.

    :param file: to read from
    :param name: of what is read, for messages
    :return: what :func:`write_state` wrote; tensors are arrays
    :raises ValueError: if the file is another one, or is damaged
    """
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
            is_plain = all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
            if not is_plain or len(sizes) < len(archive.infolist()) or sum(sizes.values()) > file.seek(0, os.SEEK_END):
                raise ValueError("its members must be uncompressed, of different names and no larger than the file")
            return _unpacked(archive, sizes)
    except Exception as error:  # whatever numpy's and Python's parsers raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{name} must be a whole file of the format {FORMAT!r}, got another: {reason}") from error


def _unpacked(archive: zipfile.ZipFile, sizes: dict[str, int]) -> dict[str, Any]:
    def array(name: Any) -> np.ndarray:
        with archive.open(f"{name}.npy") as member:
            shape, _, dtype = read_array_header(member)
            size = sizes.pop(f"{name}.npy") - member.tell()  # each array is read once
            if math.prod(shape) * dtype.itemsize != size or min(shape, default=0) < 0:
                raise ValueError("an array's shape does not fit its size")
            member.seek(0)
            return np.lib.format.read_array(member, allow_pickle=False)

    def unpacked(value: Any) -> Any:
        if isinstance(value, dict) and _ARRAY in value:
            return array(value[_ARRAY])
        if isinstance(value, dict):
            return {key: unpacked(part) for key, part in value["dict"].items()}
        return [unpacked(part) for part in value] if isinstance(value, list) else value

    header = json.loads(array(_HEADER).tobytes())
    if header["format"] != FORMAT:
        raise ValueError(f"of the format {header['format']!r}")
    state = unpacked(header["state"])
    if not isinstance(state, dict):
        raise ValueError(f"a {type(state).__name__} in place of a dict")
    return state


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """
    :param file: an array in numpy's npy format; it is left where the array's bytes begin
    :return: the array's shape, whether its order is Fortran's, and its dtype
    """
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    return read[np.lib.format.read_magic(file)](file)


@contextmanager
def opened(path: FilePath, suffix: str, name: str = "path") -> Iterator[io.BufferedIOBase]:
    """
    :param path: the file; ``suffix`` may be left out of a path
    :param suffix: without the dot
    :param name: of the argument
    :return: the file, open to be read; one that was open already stays open
    :raises ValueError: if ``path`` is a folder without such a file beside it
    :raises OSError: if the file cannot be read
    """
    _require_path(path, name)
    if not isinstance(path, (str, pathlib.Path)):
        yield open_path(path, "r")
        return
    found = pathlib.Path(path)
    # A folder may be beside the file, as in rl-zoo's runs.
    if found.is_dir() or (not found.exists() and found.suffix != f".{suffix}"):
        found = pathlib.Path(f"{found}.{suffix}")
    is_file = found.exists() or not pathlib.Path(path).is_dir()
    require(is_file, name, "the path of a file; load_checkpoint takes folders of checkpoints", str(path))
    with found.open("rb") as file:
        yield file


@contextmanager
def replacing(path: FilePath, suffix: str, verbose: int = 0) -> Iterator[io.BufferedIOBase]:
    """
    A file to write, which takes the place of the one at ``path`` in one step, once it is whole and on the disk. Until
    then, and if writing fails or the program is killed, the older file stays as it is.

    :param path: as SB3 takes it: a missing suffix is added, a missing folder is made, and the name of a folder is
        extended by ``_2``. An open file is written to directly.
    :param suffix: without the dot
    :param verbose: 2 to warn if there is a file already
    :raises OSError: if the file cannot be written
    """
    _require_path(path)
    if not isinstance(path, (str, pathlib.Path)):
        yield open_path(path, "w")
        return
    unfinished = None
    try:
        destination = _destination(pathlib.Path(path), suffix, verbose)
        # Shortened, since file systems allow names of 255 bytes.
        unfinished = destination.with_name(f"{destination.name[:50]}.{secrets.token_hex(4)}.unfinished")
        with open_path(unfinished, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if destination.exists():
            shutil.copymode(destination, unfinished)
        move(unfinished, destination)
    except BaseException as error:
        if unfinished is not None and unfinished.is_file():
            unfinished.unlink()  # a full disk gets its space back
        if isinstance(error, OSError):
            reason = f"could not be saved; an older file, if there is one, is kept: {error.strerror or error}"
            raise OSError(error.errno, reason, str(path)) from error
        raise


def move(source: pathlib.Path, destination: pathlib.Path) -> None:
    """
    ``os.replace``, tried again for three seconds: Windows refuses it while another program, such as a virus scanner,
    reads the file.

    :param source: a file or a folder
    :param destination: its new path
    :raises OSError: if it still cannot be moved
    """
    for seconds in (0.1, 0.4, 0.5, 1.0, 1.0):
        try:
            os.replace(source, destination)
            return
        except PermissionError:
            time.sleep(seconds)
    os.replace(source, destination)


@contextmanager
def named(path: FilePath) -> Iterator[None]:
    """
    Whatever a parser raises because of a damaged file becomes a ValueError that names the file.

    :param path: the file
    """
    try:
        yield
    except Exception as error:
        name = path if isinstance(path, (str, pathlib.Path)) else getattr(path, "name", "the open file")
        raise ValueError(f"{name} could not be loaded: {str(error) or type(error).__name__}") from error


def _destination(path: pathlib.Path, suffix: str, verbose: int) -> pathlib.Path:
    """The path that SB3's ``open_path`` would open, with links followed."""
    path = pathlib.Path(os.path.realpath(path if path.suffix else f"{path}.{suffix}"))
    if path.is_dir():
        warn(f"Path '{path}' is a folder. Will save instead to {path}_2")
        path = pathlib.Path(f"{path}_2")
    if verbose >= 2 and path.is_file():
        warn(f"Path '{path}' exists, will overwrite it.")
    return path


def _require_path(path: Any, name: str = "path") -> None:
    is_path = isinstance(path, (str, pathlib.Path, io.BufferedIOBase))
    require(is_path, name, "a path or an open binary file", path)
