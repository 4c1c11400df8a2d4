"""
Files that are not trusted: pickles, arrays and zip archives, read without running anything that they say.

A pickle is a program for a stack machine, and unpickling runs it. Here the program is interpreted, and nothing that it
names is looked up: plain containers, strings and numbers are built, and whatever else it would make stays a
:class:`Record`. Arrays are read off records by :func:`to_array`. Whatever is not as it should be raises a ValueError,
or an error of the standard library's parsers.
"""

import io
import math
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from pickletools import anyobject, genops, opcodes
from typing import Any

import numpy as np

# An Atari agent has 7 MB, and 1 GiB of memory is enough for whatever stays within these bounds.
MAX_BYTES = 2**26
"""of a file, and of all that a zip archive holds"""
MAX_OPCODES = 100_000
MAX_NAME = 200
"""characters in the name of a class"""
MAX_BITS = 256
"""of an integer, for with more of them one multiplication can take minutes"""
MAX_MEMBERS = 1000
"""files in a zip archive"""

_LITERALS = {opcode.name for opcode in opcodes if opcode.arg and opcode.stack_after not in ([], [anyobject])}
_DTYPE = re.compile(r"[<>=|]?([iu][1248]|f[248]|u?int(8|16|32|64)|float(16|32|64))")


def read_file(path: Path) -> bytes:
    """
    :raises ValueError: if it is larger than ``MAX_BYTES``
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content


def shown(value: Any) -> str:
    """A value for a message: a container by its type alone, for those that hold one another may never end."""
    return value[:100] if isinstance(value, str) else f"a {type(value).__name__}"


def listed(values: Iterable[Any]) -> str:
    """Some values for a message."""
    parts = list(map(shown, values))
    return ", ".join(parts[:10]) + (f" and {len(parts) - 10} more" if len(parts) > 10 else "")


class Record:
    """
    What a pickle would make an object of.

    :param name: of the class or function, with its module
    :param args: its arguments; None for the class or function itself
    """

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


class PickleReader:
    """
    Interprets the pickles of one file, which share one bound.

    Values are moved and referred to, but never copied, compared or hashed, strings aside. So time and memory are linear
    in the file's size, however its values refer to one another.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """of all classes and functions that the pickles name"""
        self._n_opcodes = 0

    def read(self, content: bytes) -> Any:
        """
        :param content: a pickle
        :return: its value
        :raises ValueError: if it is none, or goes beyond the bounds
        """
        try:
            return self._run(content)
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(f"its pickle is not sound: {error}") from error

    def _run(self, content: bytes) -> Any:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        memo: dict[Any, Any] = {}
        for opcode, argument, _ in genops(content):
            self._n_opcodes += 1
            if self._n_opcodes > MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES} opcodes")
            if isinstance(argument, int) and argument.bit_length() > MAX_BITS:
                raise ValueError(f"it has an integer of more than {MAX_BITS} bits")
            match opcode.name:
                case name if name in _LITERALS:
                    self._stack.append(argument)
                case "GET" | "BINGET" | "LONG_BINGET":
                    self._stack.append(memo[argument])
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[argument] = self._stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = self._stack[-1]
                case "STOP":
                    return self._stack.pop()
                case name if not self._container(name):
                    self._object(name, argument)
        raise ValueError("it does not end")

    def _container(self, opcode: str) -> bool:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "LIST" | "FROZENSET":
                stack.append(self._pop_mark())
            case "TUPLE":
                stack.append(tuple(self._pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(opcode[-1]))))
            case "DICT":
                items = self._pop_mark()
                stack.append({})
                self._set_items(items)
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = self._pop(1) if opcode == "APPEND" else self._pop_mark()
                if isinstance(stack[-1], list):
                    stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                self._set_items(self._pop(2) if opcode == "SETITEM" else self._pop_mark())
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case _:
                return False
        return True

    def _object(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "GLOBAL":
                stack.append(self._named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(self._named(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                stack.append(_call(*self._pop(2)))
            case "NEWOBJ_EX":
                stack.append(_call(*self._pop(3)[:2]))
            case "INST":
                stack.append(_call(self._named(*argument.split(" ", 1)), tuple(self._pop_mark())))
            case "OBJ":
                made, *args = self._pop_mark()
                stack.append(_call(made, tuple(args)))
            case "BUILD":
                (state,) = self._pop(1)
                if isinstance(stack[-1], Record):
                    stack[-1].state = state
            case _:
                raise ValueError(f"it has an opcode {opcode}, which stable-baselines does not write")

    def _named(self, module: Any, name: Any) -> Record:
        if not (isinstance(module, str) and isinstance(name, str) and len(module) + len(name) < MAX_NAME):
            raise ValueError(f"it has a class whose name is no string of less than {MAX_NAME} characters")
        full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        self.names.add(full_name)
        return Record(full_name)

    def _pop(self, n: int) -> list[Any]:
        if len(self._stack) < n:
            raise ValueError("it takes more from its stack than there is")
        items = self._stack[-n:]
        del self._stack[-n:]
        return items

    def _pop_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if isinstance(key, str):
                    self._stack[-1][key] = value


def _call(made: Any, args: Any) -> Any:
    name = made.name if isinstance(made, Record) else type(made).__name__
    if name == "collections.OrderedDict" and args == ():
        return {}
    if name in ("copyreg._reconstructor", "copy_reg._reconstructor") and isinstance(args[0], Record):
        name = args[0].name  # of the class of which protocols 0 and 1 make an object
    return Record(name, args)


def to_array(value: Any) -> np.ndarray:
    """
    :param value: record of an array of numbers, or of one number of numpy's
    :raises ValueError: if it is none
    """
    name = value.name if isinstance(value, Record) else type(value).__name__
    match name:
        case "numpy.core.multiarray._reconstruct":
            _, shape, dtype, is_fortran, content = value.state
        case "numpy.core.multiarray.scalar":
            shape, is_fortran, (dtype, content) = (), False, value.args
        case "numpy.core.numeric._frombuffer":
            content, dtype, shape, order = value.args
            is_fortran = order == "F"
        case _:
            raise ValueError(f"it has a {name} where an array should be")
    if isinstance(content, Record) and content.name == "_codecs.encode":  # as protocols 0 to 2 write bytes
        content = content.args[0]
    content = content.encode("latin1") if isinstance(content, str) else content
    return _shaped(content, to_dtype(dtype), shape, bool(is_fortran))


def to_scalar(value: Any) -> Any:
    """A number of numpy's as one of Python's; other values as they are."""
    is_number = isinstance(value, Record) and value.name == "numpy.core.multiarray.scalar"
    return to_array(value).item() if is_number else value


def to_dtype(value: Any) -> np.dtype[Any]:
    """
    :param value: record of a dtype or of one of numpy's types, or a name
    :raises ValueError: if it is none of numbers
    """
    order: Any = "="
    if isinstance(value, Record) and value.name == "numpy.dtype":
        order = value.state[1] if value.state else order
        value = value.args[0]
    name = value.name.removeprefix("numpy.") if isinstance(value, Record) else value
    if not (isinstance(name, str) and _DTYPE.fullmatch(name) and order in ("<", ">", "=", "|")):
        raise ValueError("it has a type of numbers that is not known")
    return np.dtype(name).newbyteorder("=" if order == "|" else order)


def _shaped(content: bytes, dtype: np.dtype[Any], shape: Any, is_fortran: bool) -> np.ndarray:
    """The bytes are there, so the file's size bounds the array's."""
    if dtype.kind not in "iuf" or len(shape) > 8 or math.prod(shape) * dtype.itemsize != memoryview(content).nbytes:
        raise ValueError("it has an array that is none of numbers, or of another shape than its bytes")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def read_npy(content: bytes) -> np.ndarray:
    """
    :param content: an array in numpy's own format
    :raises ValueError: if it is none of numbers
    """
    stream = io.BytesIO(content)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, is_fortran, dtype = read_header[np.lib.format.read_magic(stream)](stream)
    return _shaped(content[stream.tell() :], dtype, shape, is_fortran)


def read_zip(content: bytes) -> zipfile.ZipFile:
    """
    :param content: a zip archive
    :return: the archive, whose members can be read without fear of their sizes
    :raises ValueError: if it goes beyond the bounds, or is packed in a way that numpy and stable-baselines do not use
    """
    if content.count(b"PK\x01\x02") > MAX_MEMBERS:
        raise ValueError(f"it has more than {MAX_MEMBERS} members")
    archive = zipfile.ZipFile(io.BytesIO(content))
    members = archive.infolist()
    if sum(member.file_size for member in members) > MAX_BYTES:
        raise ValueError(f"it holds more than {MAX_BYTES} bytes")
    if not {member.compress_type for member in members} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError("it is packed by another method than deflate")
    return archive
