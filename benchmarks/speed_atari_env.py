"""
Environment steps per second with random actions, frame skip 4 and stacks of 4 frames: ale-py's own vector environment,
AtariVecEnv over it, and SB3's make_atari_env with VecFrameStack, side by side in one run on two cores. Medians of some
interleaved runs. Steps per second of processor time, of all processes together, hardly depend on what else is running.

    python -m benchmarks.speed_atari_env [--env PongNoFrameskip-v4] [--runs 5] [--steps 6400]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from ale_py.vector_env import AtariVectorEnv
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

from benchmarks.tables import Measurement, record_speed
from sb3_acer.atari import AtariVecEnv, parse_atari_id

N_ENVS = (4, 16, 64)
UNITS = ("steps/s", "steps/s of processor time", "load average")


def of_ale(env_id: str, n_envs: int) -> AtariVectorEnv:
    return AtariVectorEnv(parse_atari_id(env_id).game, n_envs)


def of_sb3(vec_env_cls: type[DummyVecEnv] | type[SubprocVecEnv]) -> Callable[[str, int], Any]:
    def make(env_id: str, n_envs: int) -> Any:
        return VecFrameStack(make_atari_env(env_id, n_envs, vec_env_cls=vec_env_cls), 4)

    return make


MAKERS: dict[str, Callable[[str, int], Any]] = {
    "ALE's own": of_ale,
    "AtariVecEnv": AtariVecEnv,
    "DummyVecEnv": of_sb3(DummyVecEnv),
    "SubprocVecEnv": of_sb3(SubprocVecEnv),
}


def processor_time() -> float:
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def rates(env: Any, actions: np.ndarray) -> tuple[float, float]:
    """Steps per second, and per second of processor time."""
    used, start = processor_time(), time.perf_counter()
    for each in actions:
        env.step(each)
    seconds = time.perf_counter() - start
    return actions.size / seconds, actions.size / (processor_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6400, help="of all environments together, in each run")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    rng = np.random.default_rng(0)
    rows: list[Measurement] = []
    for n_envs in N_ENVS:
        makers = {name: make for name, make in MAKERS.items() if n_envs <= 16 or make is not MAKERS["SubprocVecEnv"]}
        envs = {name: make(options.env, n_envs) for name, make in makers.items()}
        n_actions = envs["AtariVecEnv"].action_space.n
        for env in envs.values():
            env.reset()
            rates(env, rng.integers(n_actions, size=(50, n_envs)))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in envs}
        for run in range(options.runs):
            for name, env in envs.items():
                actions = rng.integers(n_actions, size=(options.steps // n_envs, n_envs))
                found[name].append(rates(env, actions))
                for value, unit in zip((*found[name][-1], os.getloadavg()[0]), UNITS, strict=True):
                    rows.append((f"Atari environments, {n_envs} games", name, run, value, unit))
        for env in envs.values():
            env.close()
        medians = {
            name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in found.items()
        }
        for name, (rate, per_cpu) in medians.items():
            ratio, cpu_ratio = (ours / ales for ours, ales in zip(medians[name], medians["ALE's own"], strict=True))
            print(f"{n_envs:3} environments  {name:<14}{rate:7.0f} steps/s ({ratio:.2f} of ALE's own)", end="")
            print(f"{per_cpu:7.0f} per processor second ({cpu_ratio:.2f})", flush=True)
    print("load average", *(f"{load:.1f}" for load in os.getloadavg()), "on", os.cpu_count(), "processors")
    record_speed(rows)


if __name__ == "__main__":
    main()
