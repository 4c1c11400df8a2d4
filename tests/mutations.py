"""Files with random damage, and bounds on the memory that reading them may take."""

import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return content.getvalue()


def mutated(content: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """Some bytes changed, removed, inserted, repeated or copied from another file, often near the beginning."""
    result = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        end = len(result) if rng.random() < 0.5 else min(len(result), 1200)
        place, length = int(rng.integers(max(end, 1))), int(rng.integers(1, 40))
        match rng.integers(6):
            case 0:
                for _ in range(rng.integers(1, 5)):
                    result[int(rng.integers(max(end, 1))) % max(len(result), 1)] = int(rng.integers(256))
            case 1:
                del result[place:]
            case 2:
                result[place:place] = rng.bytes(length)
            case 3:
                del result[place : place + length]
            case 4:
                result[place:place] = result[place : place + length * 10]
            case 5:
                other = others[rng.integers(len(others))]
                start = int(rng.integers(len(other)))
                result[place : place + length] = other[start : start + length * int(rng.integers(1, 20))]
        if not result:
            return b""
    return bytes(result)


def mutated_zip(content: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """An archive with one member mutated and correct checksums."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = str(rng.choice(list(members)))
    if name == "parameters" and rng.random() < 0.7:
        return zipped({**members, name: mutated_zip(members[name], others, rng)}, zipfile.ZIP_STORED)
    return zipped({**members, name: mutated(members[name], others, rng)}, zipfile.ZIP_STORED)


def attempt(load: Callable[[], object], name: str) -> tuple[bool, str]:
    """
    Load a damaged file.

    :param load: loads it
    :param name: what the error must name
    :return: whether it loaded, and what was wrong: another error than a ValueError that names it, or more than 5 s
    """
    start, loaded, wrong = time.process_time(), False, ""
    try:
        load()
        loaded = True
    except ValueError as error:
        wrong = "" if name in str(error) else str(error)
    except Exception as error:
        wrong = f"{type(error).__name__} {error}"
    return loaded, wrong or ("took long" if time.process_time() - start > 5 else "")


@contextmanager
def memory_for(n_bytes: int) -> Iterator[Callable[[], int]]:
    """Bounds this process's additional memory; yields a function that returns the peak of what was used of it."""
    import resource

    def status(field: str) -> int:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) * 1024

    limits = resource.getrlimit(resource.RLIMIT_AS)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + n_bytes, limits[1]))
    try:
        yield lambda: status("VmHWM") - before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
