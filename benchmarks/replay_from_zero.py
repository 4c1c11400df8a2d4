"""
The entries of acer.yml with what other implementations do: replayed sequences start from the zero state.

    python benchmarks/learning.py cartpole_novel_zero -- --env CartPoleNoVel-v1 -conf benchmarks/replay_from_zero.py
"""

from pathlib import Path
from typing import Any

import torch as th
import yaml

import sb3_acer
from sb3_acer.buffer import SequenceBatch, SequenceReplayBuffer


class ZeroStates(SequenceReplayBuffer):
    def sample(self, *args: Any, **kwargs: Any) -> SequenceBatch:  # type: ignore[override]
        batch = super().sample(*args, **kwargs)
        return batch._replace(states=th.zeros_like(batch.states))


with Path(sb3_acer.__file__).with_name("hyperparams").joinpath("acer.yml").open() as file:
    hyperparams = {
        name: {**entry, "replay_buffer_class": ZeroStates} if "Lstm" in entry["policy"] else entry
        for name, entry in yaml.safe_load(file).items()
    }
