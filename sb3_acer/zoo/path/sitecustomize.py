"""
Registers ACER in rl-zoo's own commands, if this folder is on ``PYTHONPATH``::

    export PYTHONPATH=$(sb3-acer zoo-path)
    python -m rl_zoo3.train --algo acer -conf sb3_acer.hyperparams --env CartPole-v1

Python imports a module of this name when it starts. rl-zoo's own hook, a module ``custom_envs``, does not suffice:
record_training and load_from_hub make their parsers without it, and a user may have a module of that name.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class Registration:
    """Import hook that finds rl_zoo3 as Python would, and registers ACER as soon as the package is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "rl_zoo3":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                from sb3_acer.zoo.registration import register

                register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def run_the_other() -> None:
    """Run the ``sitecustomize`` that Python would find without this folder, for example the system's or an editor's."""
    here = Path(__file__).parent
    spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).absolute() != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, Registration())
run_the_other()
