"""
What Atari costs, on two threads and in one run: an update over the floor of its forward and backward passes, and
environment steps per second of the whole program over those of stable-baselines3's A2C with its own wrappers.

    python -m benchmarks.speed_atari [--env PongNoFrameskip-v4] [--runs 3] [--steps 6400]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks.tables import record_speed
from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env, parse_atari_id
from sb3_acer.heads import QHead


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def update_costs(model: ACER, n_runs: int) -> dict[str, float]:
    """Milliseconds of an update's parts, medians of interleaved runs."""
    buffer, rng = model.replay_buffer, np.random.default_rng(0)
    batch = buffer.sample(model.n_envs, None, rng)
    assert isinstance(batch.observations, th.Tensor)
    rows, steps = batch.observations.flatten(0, 1), batch.observations[:-1].flatten(0, 1)
    policy, average = model.policy, model.average_policy
    critic = policy.q_head
    assert isinstance(critic, QHead)

    def forward_and_backward() -> None:
        policy.zero_grad()
        features = policy.extract_features(rows, policy.features_extractor)
        (policy.pi_head(features).sum() + critic.q(features).sum()).backward()

    def forward_of_average() -> None:
        with th.no_grad():
            average.pi_head(average.extract_features(steps, average.features_extractor))

    parts: dict[str, Callable[[], Any]] = {
        "forward and backward, (T + 1) B frames": forward_and_backward,
        "forward of the average policy, T B frames": forward_of_average,
        "update": lambda: model.update(batch),
        "sampling a batch": lambda: buffer.sample(model.n_envs, None, rng),
        "optimiser's step": policy.optimizer.step,
        "average policy's step": lambda: average.flat.polyak_update(policy.flat, model.alpha),
        "gradient norm": lambda: policy.flat.clip_grad_norm(model.max_grad_norm),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for run in range(n_runs + 1):
        for name, part in parts.items():
            taken = milliseconds(part)
            if run:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6400)
    options = parser.parse_args()
    th.set_num_threads(2)
    kwargs: dict[str, Any] = {"n_steps": 20, "seed": 0, "device": "cpu"}

    def acer(**arguments: Any) -> ACER:
        return ACER("CnnPolicy", make_atari_vec_env(options.env, 16, seed=0), replay_start=20, **kwargs, **arguments)

    models: dict[str, Any] = {
        "A2C": A2C("CnnPolicy", VecFrameStack(make_atari_env(options.env, 16, seed=0), 4), **kwargs),
        "ACER, replay_ratio 4": acer(),
        "ACER, replay_ratio 0": acer(replay_ratio=0),
        "ACER, replay_ratio 4, float32": acer(policy_kwargs={"use_bfloat16": False}),
    }
    for model in models.values():
        model.learn(1280)
    rates: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.runs):
        for name, model in models.items():
            first = model.num_timesteps
            seconds = milliseconds(partial(model.learn, options.steps, reset_num_timesteps=False)) / 1000
            rates[name].append((model.num_timesteps - first) / seconds)  # A2C ends with a whole rollout
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, median in medians.items():
        print(f"{name:<32}{median:8.0f} steps/s, ratio {median / medians['A2C']:.2f}")

    game = parse_atari_id(options.env).game.capitalize()
    rows = [
        (f"Atari program, {game}", name, run, rate, "steps/s")
        for name, each in rates.items()
        for run, rate in enumerate(each)
    ]
    for name in ("ACER, replay_ratio 4", "ACER, replay_ratio 4, float32"):
        costs = update_costs(models[name], 5 * options.runs)
        forward, average = list(costs.values())[:2]
        print(f"\n{name}: an update over its floor: {costs['update'] / (forward + average):.2f}")
        for part, cost in costs.items():
            print(f"  {part:<44}{cost:8.2f} ms")
            rows.append((f"Atari update, {name}", part, 0, cost, "ms"))
    record_speed(rows)


if __name__ == "__main__":
    main()
