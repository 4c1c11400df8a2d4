"""
The `default` entry of acer.yml for tasks that have one of their own.

    python benchmarks/learning.py default_cartpole -- --env CartPole-v1 -conf benchmarks/default_entry.py
"""

from sb3_acer.hyperparams import hyperparams as entries

hyperparams = dict.fromkeys(
    ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3", "MountainCar-v0"), entries["default"]
)
