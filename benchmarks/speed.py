"""
Environment steps per second of ACER over those of stable-baselines3's A2C, with an LSTM over those of sb3-contrib's
RecurrentPPO, side by side in one run: the median of some interleaved runs, one thread, and where ACER's time goes.

    python benchmarks/speed.py [--env CartPole-v1] [--policy MlpPolicy] [--runs 5] [--steps 20000]
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch as th
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from tables import record_speed

from sb3_acer import ACER

# What each policy is compared with. The LSTMs have 64 units here, with everything else as the constructors have it.
PEERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "MlpPolicy": (A2C, {}),
    "MlpLstmPolicy": (RecurrentPPO, {"lstm_hidden_size": 64}),
}


def steps_per_second(model: Any, steps: int) -> float:
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return steps / (time.perf_counter() - start)


def time_shares(model: ACER, steps: int) -> dict[str, float]:
    """Shares of the wall time of `steps` steps; the rest is SB3's loop, callbacks and logs."""
    parts: dict[str, list[tuple[Any, str]]] = {
        "environment": [(model.env, "step")],
        "acting": [(model, "_sample_action")],
        "buffer": [(model, "_store_transition"), (model.replay_buffer, "latest"), (model.replay_buffer, "sample")],
        "update": [(model, "update")],
    }
    seconds: dict[str, float] = defaultdict(float)
    patched = [(part, owner, name, getattr(owner, name)) for part, methods in parts.items() for owner, name in methods]

    def timed(part: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    for part, owner, name, method in patched:
        setattr(owner, name, timed(part, method))
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    total = time.perf_counter() - start
    for _, owner, name, _ in patched:
        delattr(owner, name)
    shares = {part: seconds[part] / total for part in parts}
    return {**shares, "the rest": 1 - sum(shares.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", default="MlpPolicy", choices=PEERS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    th.set_num_threads(1)
    peer, policy_kwargs = PEERS[options.policy]
    models: dict[str, Any] = {
        algorithm.__name__: algorithm(
            options.policy,
            make_vec_env(options.env, n_envs=4, seed=0),
            policy_kwargs=dict(policy_kwargs),
            seed=0,
            device="cpu",
        )
        for algorithm in (peer, ACER)
    }
    for model in models.values():
        model.learn(6000)  # past ACER's replay_start
    rates: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.runs):
        for name, model in models.items():
            rates[name].append(steps_per_second(model, options.steps))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["ACER"] / medians[peer.__name__]
    print(", ".join(f"{name} {median:.0f} steps/s" for name, median in medians.items()), f"ratio {ratio:.2f}", sep=", ")
    shares = time_shares(models["ACER"], options.steps)
    for part, share in shares.items():
        print(f"  {part:<12}{share:6.1%}")
    task = options.env + ", LSTM" * (peer is RecurrentPPO)
    speeds = [(name, run, rate) for name, each in rates.items() for run, rate in enumerate(each)]
    rows = [(f"algorithms, {task}", name, run, rate, "steps/s") for name, run, rate in speeds]
    record_speed([*rows, *((f"time, {task}", part, 0, 100 * share, "%") for part, share in shares.items())])


if __name__ == "__main__":
    main()
