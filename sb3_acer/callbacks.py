"""SB3's callbacks: what a checkpoint keeps of them, and one that ends training when the program is told to end."""

import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from types import FrameType
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from sb3_acer.arguments import is_plain

_OF_THE_CALL = ("model", "parent", "locals", "globals", "stopped_by")
"""attributes of a callback that a call of learn sets"""


def all_callbacks(root: BaseCallback | None) -> list[BaseCallback]:
    """A callback and those that it calls."""
    found: list[BaseCallback] = []
    seen: set[int] = set()  # lists, which may contain themselves
    waiting: deque[Any] = deque([root])
    while waiting:
        value = waiting.popleft()
        if isinstance(value, (list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value)
        elif isinstance(value, BaseCallback) and value not in found:
            found.append(value)
            waiting.extend(part for name, part in vars(value).items() if name not in _OF_THE_CALL)
    return found


def plain_attributes(callback: BaseCallback) -> dict[str, bytes]:
    """A callback's attributes with plain values, pickled, as far as they can be."""
    found: dict[str, bytes] = {}
    for name, value in vars(callback).items():
        with suppress(Exception):  # a list that contains itself, a defaultdict's function, a class within a function
            if name not in _OF_THE_CALL and is_plain(value):
                found[name] = pickle.dumps(value)
    return found


def changed_attributes(callback: BaseCallback, hashes: dict[str, int]) -> dict[str, bytes]:
    """The plain attributes, pickled, that differ from those with the given hashes."""
    return {name: value for name, value in plain_attributes(callback).items() if hash(value) != hashes.get(name)}


def put_back(present: Any, saved: Any) -> Any:
    """
    :return: the saved value. A list, dict, set or deque stays the same object, with the saved content, since the
        program may refer to it
    """
    if type(present) is not type(saved) or not isinstance(present, (list, dict, set, deque)):
        return saved
    present.clear()
    (present.extend if isinstance(present, (list, deque)) else present.update)(saved)
    return present


class StopOnSignal(BaseCallback):
    """
    Ends training after the step under way when the program is told to end, by SIGTERM, Ctrl-C or a terminal that
    closes. A second signal ends it at once.

    :param at_start: called when training has begun, or goes on from a checkpoint
    """

    def __init__(self, at_start: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.at_start = at_start
        self.stopped_by = 0  # number of the signal
        self.start: int | None = None
        """step at which training has begun, or gone on"""

    def _on_training_start(self) -> None:
        self.start = self.num_timesteps
        self.at_start()

    def _on_step(self) -> bool:
        return not self.stopped_by

    def has_trained(self) -> bool:
        """Whether a step has been made since training began or went on."""
        return self.start is not None and self.model.num_timesteps > self.start

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.stopped_by and signum != getattr(signal, "SIGHUP", None):  # a shell that ends sends that one twice
            raise KeyboardInterrupt
        self.stopped_by = self.stopped_by or signum

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; afterwards they are handled as before."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # not on Windows
        if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:  # as nohup sets it
            numbers.append(hangup)
        handlers = {number: signal.signal(number, self.stop) for number in numbers}
        try:
            yield
        except OSError:
            try:
                print(end="", flush=True)
            except OSError:
                # Ctrl-C also ends `| tee`, and a terminal may have closed. What saves may still print, to nowhere.
                sys.stdout = StringIO()
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
