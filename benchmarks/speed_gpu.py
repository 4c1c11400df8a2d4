"""
What a GPU gains, in one run: environment steps per second on the CPU and on the GPU, of ACER and of SB3's A2C, and the
milliseconds of an update on either. On the CPU torch has two threads.

    python -m benchmarks.speed_gpu [programs] [updates] [--runs 3] [--seconds 4]
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from benchmarks.tables import Measurement, record_speed
from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env

DEVICES = ("cpu", "cuda")
PONG = "PongNoFrameskip-v4"
WIDTHS = (64, 256, 1024)


def atari(algorithm: Any) -> VecEnv:
    if algorithm is ACER:
        return make_atari_vec_env(PONG, 16, seed=0)
    return VecFrameStack(make_atari_env(PONG, 16, seed=0), 4)


def classic(env_id: str, n_envs: int) -> Callable[[Any], VecEnv]:
    return lambda algorithm: make_vec_env(env_id, n_envs, seed=0)


# Environments, policy, and what both algorithms get.
TASKS: dict[str, tuple[Callable[[Any], VecEnv], str, dict[str, Any]]] = {
    "Pong, 16 games": (atari, "CnnPolicy", {"n_steps": 20}),
    "CartPole-v1, 4 environments": (classic("CartPole-v1", 4), "MlpPolicy", {"n_steps": 20}),
    "Pendulum-v1, 4 environments": (classic("Pendulum-v1", 4), "MlpPolicy", {"n_steps": 20}),
    **{
        f"CartPole-v1, 16 environments, {width} units": (
            classic("CartPole-v1", 16),
            "MlpPolicy",
            {"n_steps": 20, "policy_kwargs": {"net_arch": [width, width]}},
        )
        for width in WIDTHS
    },
    "CartPole-v1, 16 environments, LSTM of 256": (classic("CartPole-v1", 16), "MlpLstmPolicy", {"n_steps": 20}),
}


def make(algorithm: Any, task: str, device: str) -> Any:
    make_env, policy, kwargs = TASKS[task]
    own = {"replay_start": 20, "lr_schedule": "constant"} if algorithm is ACER else {}
    return algorithm(policy, make_env(algorithm), seed=0, device=device, **kwargs, **own).learn(1280)


def programs(n_runs: int, seconds: float) -> list[Measurement]:
    rows: list[Measurement] = []
    for task, (_, policy, _) in TASKS.items():
        algorithms = [ACER] if "Lstm" in policy else [ACER, A2C]
        rates: dict[str, list[float]] = defaultdict(list)
        models = {f"{each.__name__}, {device}": make(each, task, device) for each in algorithms for device in DEVICES}
        for _ in range(n_runs):
            for name, model in models.items():
                before, start = model.num_timesteps, time.perf_counter()
                while time.perf_counter() - start < seconds:
                    model.learn(640, log_interval=100, reset_num_timesteps=False)
                th.cuda.synchronize()
                rates[name].append((model.num_timesteps - before) / (time.perf_counter() - start))
        medians = {name: statistics.median(each) for name, each in rates.items()}
        print(task, *(f"{name} {median:,.0f}" for name, median in medians.items()), "steps/s", sep="; ", flush=True)
        for name, each in rates.items():
            rows += [(f"GPU programs, {task}", name, run, rate, "steps/s") for run, rate in enumerate(each)]
    return rows


def updates(n_runs: int, seconds: float) -> list[Measurement]:
    rows: list[Measurement] = []
    for task in TASKS:
        models = {device: make(ACER, task, device) for device in DEVICES}
        rng = np.random.default_rng(0)
        batches = {device: model.replay_buffer.sample(model.n_envs, None, rng) for device, model in models.items()}
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(5 * n_runs):
            for device in DEVICES:
                start = time.perf_counter()
                for _ in range(10):
                    models[device].update(batches[device])
                th.cuda.synchronize()
                found[device].append(100 * (time.perf_counter() - start))
        medians = {device: statistics.median(each) for device, each in found.items()}
        texts = (f"{name} {median:.2f}" for name, median in medians.items())
        print(f"update, {task}", *texts, "ms", sep="; ", flush=True)
        rows += [(f"GPU updates, {task}", device, 0, median, "ms") for device, median in medians.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = {"programs": programs, "updates": updates}
    parser.add_argument("benchmarks", nargs="*", help=f"{', '.join(benchmarks)}; all of them by default")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of a run")
    options = parser.parse_args()
    if unknown := set(options.benchmarks) - set(benchmarks):
        parser.error(f"benchmarks must be among {', '.join(benchmarks)}, got {', '.join(unknown)}")
    th.set_num_threads(2)
    print(th.cuda.get_device_name(), th.__version__)
    for name in options.benchmarks or benchmarks:
        record_speed(benchmarks[name](options.runs, options.seconds))


if __name__ == "__main__":
    main()
