"""
The `default` entry of acer.yml for tasks that have one of their own.

    python benchmarks/learning.py default_cartpole -- --env CartPole-v1 -conf benchmarks/default_entry.py
"""

from pathlib import Path

import yaml

import sb3_acer

_entries = yaml.safe_load((Path(sb3_acer.__file__).parent / "hyperparams/acer.yml").read_text())
hyperparams = dict.fromkeys(("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3"), _entries["default"])
