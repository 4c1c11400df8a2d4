"""ACER (Actor-Critic with Experience Replay) for stable-baselines3."""

from sb3_acer.acer import ACER
from sb3_acer.buffer import SequenceReplayBuffer
from sb3_acer.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

__version__ = "0.1.0"

__all__ = ["ACER", "CnnPolicy", "MlpPolicy", "MultiInputPolicy", "SequenceReplayBuffer", "__version__"]
