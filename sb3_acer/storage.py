"""
Nested dicts of arrays and plain values as one file: numpy's npz with a JSON header. Reading one runs nothing of it.
"""

import io
import json
import zipfile
from typing import Any

import numpy as np
import torch as th

FORMAT = "sb3-acer 1"
_HEADER, _ARRAY = "header", "array"
_DAMAGES = (ValueError, KeyError, TypeError, EOFError, AttributeError, NotImplementedError)


def write_state(file: io.BufferedIOBase, state: dict[str, Any]) -> None:
    """
    Write without a second copy of the arrays in memory.

    :param file: to write to
    :param state: dicts with string keys, lists, arrays, tensors, strings, numbers, booleans and None
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
    members = {str(index): array for index, array in enumerate(arrays)}
    np.savez(file, allow_pickle=False, **{_HEADER: np.frombuffer(header, np.uint8), **members})


def read_state(file: io.BufferedIOBase, name: str) -> dict[str, Any]:
    """
    :param file: to read from
    :param name: of what is read, for messages
    :return: what :func:`write_state` wrote; tensors are arrays
    :raises ValueError: if the file is another one, or is damaged
    """
    try:
        with np.load(file, allow_pickle=False) as members:
            header = json.loads(members[_HEADER].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"of the format {header['format']!r}")

            def unpacked(value: Any) -> Any:
                if isinstance(value, dict) and _ARRAY in value:
                    return members[str(value[_ARRAY])]
                if isinstance(value, dict):
                    return {key: unpacked(part) for key, part in value["dict"].items()}
                return [unpacked(part) for part in value] if isinstance(value, list) else value

            state: dict[str, Any] = unpacked(header["state"])
            return state
    except (*_DAMAGES, zipfile.BadZipFile) as error:
        raise ValueError(f"{name} must be a whole file of the format {FORMAT!r}, got another: {error}") from error
