"""Runs rl-zoo's scripts, and reads their arguments beforehand."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from sb3_acer.zoo.mistakes import in_one_line


def run_zoo(name: str, script: Callable[[], object], defaults: list[str], arguments: list[str]) -> None:
    """Run a script of the zoo. ``defaults`` come first, since argparse keeps the last value of an option."""
    sys.argv = [f"sb3-acer {name}", *defaults, *arguments]
    with in_one_line(name):
        script()


def value_of(arguments: list[str], *option: str, **kwargs: Any) -> Any:
    """
    :param arguments: of a script of the zoo
    :param option: names of one of its options
    :param kwargs: further arguments of ``add_argument``
    :return: the option's value
    """
    parser = argparse.ArgumentParser(add_help=False)
    name = parser.add_argument(*option, **kwargs).dest
    return getattr(parser.parse_known_args(arguments)[0], name)


def asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)
