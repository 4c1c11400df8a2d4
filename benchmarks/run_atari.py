"""
`sb3-acer run-atari`, and then what the other runs end with: the mean score of the newest agent over 100 games, with
sampled actions as rl-zoo has them for Atari. The arguments are those of run-atari, with --logdir.
"""

import argparse
import sys
from pathlib import Path

from stable_baselines3.common.evaluation import evaluate_policy

from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env
from sb3_acer.atari.run import main as train

GAMES = 100


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--env", required=True)
    parser.add_argument("--logdir", type=Path, required=True)
    options, _ = parser.parse_known_args(arguments)
    train(arguments)
    model = ACER.load(options.logdir / "agent.zip")
    env = make_atari_vec_env(options.env, seed=10_000, episodic_life=False, clip_reward=False)
    print(f"Evaluating over {GAMES} episodes (stochastic actions)", flush=True)
    mean, deviation = evaluate_policy(model, env, GAMES, deterministic=False)
    print(f"Mean reward: {mean:.2f} +/- {deviation:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
