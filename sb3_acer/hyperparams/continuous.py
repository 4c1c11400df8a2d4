"""The default of tasks with continuous actions: ``-conf sb3_acer.hyperparams.continuous``."""

from typing import Any

from sb3_acer.hyperparams import hyperparams as entries

hyperparams: dict[str, dict[str, Any]] = {"default": dict(entries["default_continuous"])}
