"""Atari games, stepped by ale-py's threads. Needs the extra ``atari``."""

from sb3_acer.atari.vec_env import AtariId, AtariVecEnv, make_atari_vec_env, parse_atari_id

__all__ = ["AtariId", "AtariVecEnv", "make_atari_vec_env", "parse_atari_id"]
