"""
The ACER settings of stable-baselines' rl-baselines-zoo: ``-conf sb3_acer.hyperparams.old_zoo``.

LunarLander-v2 is now v3. The wrappers that the old zoo used for all Atari games are listed here.
"""

from typing import Any

hyperparams: dict[str, dict[str, Any]] = {
    "atari": {
        "env_wrapper": ["stable_baselines3.common.atari_wrappers.AtariWrapper"],
        "frame_stack": 4,
        "policy": "CnnPolicy",
        "n_envs": 16,
        "n_timesteps": 1e7,
        "lr_schedule": "constant",
        "buffer_size": 5000,
        "ent_coef": 0.01,
    },
    "CartPole-v1": {"n_envs": 8, "n_timesteps": 5e5, "policy": "MlpPolicy", "ent_coef": 0.0},
    "LunarLander-v3": {"n_envs": 16, "n_timesteps": 1e6, "policy": "MlpPolicy", "gamma": 0.999},
    "MountainCar-v0": {"normalize": True, "n_envs": 16, "n_timesteps": 1e6, "policy": "MlpPolicy", "ent_coef": 0.0},
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_timesteps": 5e5, "policy": "MlpPolicy", "ent_coef": 0.0},
}
