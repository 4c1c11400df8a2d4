"""
Reading untrusted files: pickles, arrays and zip archives, without running any code that they contain.

A pickle is a program for a stack machine, and unpickling runs it. Here the program is interpreted without importing
anything: containers, strings and numbers are built, and every other object becomes a :class:`Record` of its class and
arguments. :func:`to_array` converts the records of arrays. Invalid files raise a ValueError, or an error of the
standard library's parsers.
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

from sb3_acer.storage import read_array_header

# An Atari agent has 7 MB. Files within these bounds can be read with 1 GiB of memory.
MAX_BYTES = 2**26
"""size of a file, and uncompressed size of a zip archive"""
MAX_OPCODES = 100_000
MAX_NAME = 200
"""characters in the name of a class or function"""
MAX_BITS = 256
"""bits of an integer; with many more, a single multiplication can take minutes"""
MAX_MEMBERS = 1000
"""files in a zip archive"""

_LITERALS = {opcode.name for opcode in opcodes if opcode.arg and opcode.stack_after not in ([], [anyobject])}
_DTYPE = re.compile(r"[<>=|]?([iu][1248]|f[248]|u?int(8|16|32|64)|float(16|32|64))")


def read_file(path: Path) -> bytes:
    """
    :param path: path of a file
    :return: its content
    :raises ValueError: if it has more than ``MAX_BYTES`` bytes
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"the file has more than {MAX_BYTES} bytes")
    return content


def shown(value: Any) -> str:
    """Text for a message: strings as they are, other values by their type, since containers can be very large."""
    return value[:100] if isinstance(value, str) else f"a {type(value).__name__}"


def listed(values: Iterable[Any]) -> str:
    """Text for a message: the first ten values, and how many more there are."""
    parts = list(map(shown, values))
    return ", ".join(parts[:10]) + (f" and {len(parts) - 10} more" if len(parts) > 10 else "")


class Record:
    """
    An object of a pickle that is not built: the call that would make it.

    :param name: name of the class or function, with its module
    :param args: arguments of the call; None: the class or function itself
    """

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


class PickleReader:
    """
    Interprets the pickles of one file; ``MAX_OPCODES`` bounds their sum.

    Values except strings are never copied, compared or hashed. So time and memory are linear in the size of the file,
    even if its values refer to one another.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """names of all classes and functions in the pickles"""
        self._n_opcodes = 0

    def read(self, content: bytes) -> Any:
        """
        :param content: a pickle
        :return: its value
        :raises ValueError: if it is invalid, or exceeds the bounds
        """
        try:
            return self._run(content)
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(f"the pickle is invalid: {error}") from error

    def _run(self, content: bytes) -> Any:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        memo: dict[Any, Any] = {}
        for opcode, argument, _ in genops(content):
            self._n_opcodes += 1
            if self._n_opcodes > MAX_OPCODES:
                raise ValueError(f"more than {MAX_OPCODES} opcodes")
            if isinstance(argument, int) and argument.bit_length() > MAX_BITS:
                raise ValueError(f"an integer has more than {MAX_BITS} bits")
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
        raise ValueError("it has no end")

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
                raise ValueError(f"opcode {opcode}, which stable-baselines does not write")

    def _named(self, module: Any, name: Any) -> Record:
        if not (isinstance(module, str) and isinstance(name, str) and len(module) + len(name) < MAX_NAME):
            raise ValueError(f"the name of a class is not a string of less than {MAX_NAME} characters")
        full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        self.names.add(full_name)
        return Record(full_name)

    def _pop(self, n: int) -> list[Any]:
        if len(self._stack) < n:
            raise ValueError("the stack has too few values")
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
        name = args[0].name  # the class of the object that protocols 0 and 1 make
    return Record(name, args)


def to_array(value: Any) -> np.ndarray:
    """
    :param value: record of an array of numbers, or of a NumPy scalar
    :return: the array
    :raises ValueError: for other values
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
            raise ValueError(f"expected an array, found {name}")
    if isinstance(content, Record) and content.name == "_codecs.encode":  # as protocols 0 to 2 write bytes
        content = content.args[0]
    content = content.encode("latin1") if isinstance(content, str) else content
    return _shaped(content, to_dtype(dtype), shape, bool(is_fortran))


def to_scalar(value: Any) -> Any:
    """Convert the record of a NumPy scalar to a Python number; other values are returned unchanged."""
    is_number = isinstance(value, Record) and value.name == "numpy.core.multiarray.scalar"
    return to_array(value).item() if is_number else value


def to_dtype(value: Any) -> np.dtype[Any]:
    """
    :param value: record of a dtype or of one of NumPy's types, or a type's name
    :return: the dtype
    :raises ValueError: if it is not a type of numbers
    """
    order: Any = "="
    if isinstance(value, Record) and value.name == "numpy.dtype":
        order = value.state[1] if value.state else order
        value = value.args[0]
    name = value.name.removeprefix("numpy.") if isinstance(value, Record) else value
    if not (isinstance(name, str) and _DTYPE.fullmatch(name) and order in ("<", ">", "=", "|")):
        raise ValueError("the type of an array is unknown")
    return np.dtype(name).newbyteorder("=" if order == "|" else order)


def _shaped(content: bytes, dtype: np.dtype[Any], shape: Any, is_fortran: bool) -> np.ndarray:
    """Make an array of these bytes. No more memory is used than the file has bytes."""
    if dtype.kind not in "iuf" or len(shape) > 8 or math.prod(shape) * dtype.itemsize != memoryview(content).nbytes:
        raise ValueError("an array must consist of numbers and have a shape that fits its bytes")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def read_npy(content: bytes) -> np.ndarray:
    """
    :param content: an array in NumPy's npy format
    :return: the array
    :raises ValueError: if it does not consist of numbers
    """
    stream = io.BytesIO(content)
    shape, is_fortran, dtype = read_array_header(stream)
    return _shaped(content[stream.tell() :], dtype, shape, is_fortran)


def read_zip(content: bytes) -> zipfile.ZipFile:
    """
    :param content: a zip archive
    :return: the archive, whose members have at most ``MAX_BYTES`` bytes in all
    :raises ValueError: if it exceeds the bounds, or has a compression that neither NumPy nor stable-baselines uses
    """
    if content.count(b"PK\x01\x02") > MAX_MEMBERS:
        raise ValueError(f"the zip archive has more than {MAX_MEMBERS} members")
    archive = zipfile.ZipFile(io.BytesIO(content))
    members = archive.infolist()
    if sum(member.file_size for member in members) > MAX_BYTES:
        raise ValueError(f"the zip archive holds more than {MAX_BYTES} bytes")
    if not {member.compress_type for member in members} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError("the zip archive is compressed by another method than deflate")
    return archive
