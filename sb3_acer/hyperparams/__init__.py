"""The settings of acer.yml as a module, which rl-zoo reads with ``-conf sb3_acer.hyperparams``."""

from pathlib import Path
from typing import Any

import yaml

ENTRIES_FILE = Path(__file__).with_name("acer.yml")
hyperparams: dict[str, dict[str, Any]] = yaml.safe_load(ENTRIES_FILE.read_text())
