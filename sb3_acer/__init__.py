"""ACER (Actor-Critic with Experience Replay) for stable-baselines3."""

from sb3_acer.acer import ACER
from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj
from sb3_acer.export import export_onnx
from sb3_acer.policies import (
    CnnLnLstmPolicy,
    CnnLstmPolicy,
    CnnPolicy,
    MlpGruPolicy,
    MlpLnLstmPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)
from sb3_acer.sb2_compat.migration import MigrationError, load_stable_baselines

__version__ = "0.1.0"

__all__ = [
    "ACER",
    "CnnLnLstmPolicy",
    "CnnLstmPolicy",
    "CnnPolicy",
    "ExpertDataset",
    "MigrationError",
    "MlpGruPolicy",
    "MlpLnLstmPolicy",
    "MlpLstmPolicy",
    "MlpPolicy",
    "MultiInputLstmPolicy",
    "MultiInputPolicy",
    "SequenceReplayBuffer",
    "__version__",
    "export_onnx",
    "generate_expert_traj",
    "load_stable_baselines",
]
