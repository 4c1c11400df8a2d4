"""
What small networks cost, on one thread, in seconds of processor time; all but `training` in one process and by
interleaved runs:

- programs: environment steps per second of ACER over those of SB3's A2C, or of sb3-contrib's RecurrentPPO for an LSTM,
  and where ACER's time goes
- updates: an update over its floor, which is the same networks by plain functional calls: forward and backward, and the
  forward pass of the average policy
- predictions: calls of `predict` with one observation per second, over the same peers
- operations: operations of torch that an update dispatches; some only hand memory to numpy
- growth: steps per second with larger buffers, wider networks and more environments
- training: steps per second of experiments, by the runner's commands without evaluations

    python -m benchmarks.speed [programs] [updates] [predictions] [operations] [growth] [training] [--runs 7]
                               [--steps 4000] [--experiments ...]
"""

import argparse
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch as th
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.experiments import ROOT, command, load_experiments, prepare
from benchmarks.tables import Measurement, record_speed
from benchmarks.variants import Levels
from sb3_acer import ACER
from sb3_acer.heads import QHead
from sb3_acer.mlp import Chain
from sb3_acer.policies import ACERPolicy
from sb3_acer.recurrent import LSTM
from sb3_acer.sequences import SequenceBatch

EXPERIMENTS = load_experiments()
TIMED = [each.name for each in EXPERIMENTS.values() if each.suite.startswith("classic") and each.solved is not None]
LSTM_64 = {"policy_kwargs": {"lstm_hidden_size": 64}}

# Environment, number of environments, its wrapper, policy, what both algorithms get, the peer, and what it gets alone.
PROGRAMS: dict[str, tuple[str, int, Any, str, dict[str, Any], Any, dict[str, Any]]] = {
    "CartPole-v1": ("CartPole-v1", 4, None, "MlpPolicy", {}, A2C, {}),
    "CartPole-v1, 8 environments, A2C with 20 steps": ("CartPole-v1", 8, None, "MlpPolicy", {}, A2C, {"n_steps": 20}),
    "Pendulum-v1": ("Pendulum-v1", 4, None, "MlpPolicy", {}, A2C, {}),
    "LunarLander-v3, MultiDiscrete([5, 5])": ("LunarLanderContinuous-v3", 4, Levels, "MlpPolicy", {}, A2C, {}),
    "CartPole-v1, LSTM": ("CartPole-v1", 4, None, "MlpLstmPolicy", LSTM_64, RecurrentPPO, {}),
}
UPDATES = ("CartPole-v1", "Pendulum-v1", "LunarLander-v3, MultiDiscrete([5, 5])", "CartPole-v1, LSTM")
WARM_UP = 6000  # steps, past ACER's replay_start


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def make(algorithm: Any, name: str, n_envs: int, wrapper: Any = None, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    env = make_vec_env(name, n_envs=n_envs, seed=0, wrapper_class=wrapper)
    model = algorithm(policy, env, seed=0, device="cpu", **deepcopy(kwargs))
    model.learn(WARM_UP)
    return model


def interleaved(calls: Mapping[str, Callable[[], Any]], n_runs: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n_runs):
        for name, call in calls.items():
            found[name].append(seconds(call))
    return found


def training_speeds(models: Mapping[str, Any], n_runs: int, steps: int) -> dict[str, list[float]]:
    """Steps per second of each model's training, in turns. A run is of whole rollouts, and so may have more steps."""

    def train(model: Any) -> float:
        before = model.num_timesteps
        took = seconds(lambda: model.learn(steps, log_interval=100, reset_num_timesteps=False))
        return float(model.num_timesteps - before) / took

    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(n_runs):
        for name, model in models.items():
            found[name].append(train(model))
    return found


def rivals(title: str) -> dict[str, Any]:
    name, n_envs, wrapper, policy, shared, peer, settings = PROGRAMS[title]
    return {
        peer.__name__: make(peer, name, n_envs, wrapper, policy, **shared, **settings),
        "ACER": make(ACER, name, n_envs, wrapper, policy, **shared),
    }


def programs(n_runs: int, steps: int) -> list[Measurement]:
    rows: list[Measurement] = []
    for title in PROGRAMS:
        models = rivals(title)
        found = training_speeds(models, n_runs, steps)
        for algorithm, each in found.items():
            rows += [(f"algorithms, {title}", algorithm, run, speed, "steps/s") for run, speed in enumerate(each)]
        ratio = statistics.median(ours / theirs for theirs, ours in zip(*found.values(), strict=True))
        print(f"{title}: {ratio:.2f} times the steps per second of {next(iter(models))}")
        shares = time_shares(models["ACER"], steps)
        print("  ", ", ".join(f"{part} {share:.1%}" for part, share in shares.items()))
        rows += [(f"time, {title}", part, 0, 100 * share, "%") for part, share in shares.items()]
    return rows


def time_shares(model: ACER, steps: int) -> dict[str, float]:
    """Shares of the processor time of `steps` steps; the rest is SB3's loop, callbacks and logs."""
    parts: dict[str, list[tuple[Any, str]]] = {
        "environment": [(model.env, "step_async"), (model.env, "step_wait")],
        "acting": [(model, "_sample_action")],
        "storing": [(model, "_store_transition")],
        "sampling": [(model.replay_buffer, "latest"), (model.replay_buffer, "sample")],
        "evaluation": [(model.policy, "evaluate")],
        "average policy": [(model.average_policy, "statistics")],
        "backward": [(model.policy, "_backward")],
        "optimiser": [(model.policy.optimizer, "step")],
        "gradient norm": [(model.policy.flat, "clip_grad_norm")],
        "the average's move": [(model.average_policy.flat, "polyak_update")],
    }
    spent: dict[str, float] = defaultdict(float)

    def timed(part: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = method(*args, **kwargs)
            spent[part] += time.process_time() - start
            return result

        return call

    updates = {**parts, "update": [(model, "update")]}
    patched = [(owner, name, owner.__dict__.get(name)) for methods in updates.values() for owner, name in methods]
    for part, methods in updates.items():
        for owner, name in methods:
            object.__setattr__(owner, name, timed(part, getattr(owner, name)))
    total = seconds(lambda: model.learn(steps, log_interval=100, reset_num_timesteps=False))
    for owner, name, own in patched:
        object.__delattr__(owner, name) if own is None else object.__setattr__(owner, name, own)
    of_update = ("evaluation", "average policy", "backward", "optimiser", "gradient norm", "the average's move")
    shares = {part: spent[part] / total for part in parts}
    shares["mathematics"] = spent["update"] / total - sum(shares[part] for part in of_update)
    return {**shares, "the rest": 1 - sum(shares.values())}


def floor_of(model: ACER, batch: Any) -> Callable[[], None]:
    """The networks of an update by plain functional calls: what no implementation in PyTorch's operations can avoid."""
    policy, average = deepcopy(model.policy), deepcopy(model.average_policy)
    n_steps, n_sequences = batch.rewards.shape
    n_rows, rows = n_steps * n_sequences, batch.observations.flatten(0, 1)
    head, n_samples = policy.q_head, model.n_action_samples
    shape = (1 + n_samples, n_rows, policy.family.n_features)
    taken, candidates = th.randn(shape), th.randn(shape)[1:]

    def chain(layers: Chain, x: th.Tensor) -> th.Tensor:
        assert layers.layers is not None
        for weight, bias, activation in layers.layers:
            x = F.linear(x, weight, bias)
            x = x if activation is None else th.tanh(x)
        return x

    def features(network: ACERPolicy, recurrent: Any, x: th.Tensor) -> th.Tensor:
        if not isinstance(recurrent, LSTM):
            return x
        outputs: th.Tensor = recurrent.lstm(x.view(-1, n_sequences, x.shape[-1]))[0]
        return outputs.flatten(0, 1)

    def advantages(hidden: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return F.linear(th.relu(F.linear(actions, head.action.weight) + hidden), head.advantage.weight)  # type: ignore[arg-type, union-attr]

    def run() -> None:
        outputs = [
            chain(policy._pi_chain, features(policy, policy.pi_recurrent, rows)),
            chain(policy._q_chain, features(policy, policy.q_recurrent, rows)),
        ]
        if not isinstance(head, QHead):
            hidden = outputs[1][:n_rows, 1:]
            outputs.append(advantages(hidden, taken))
            with th.no_grad():
                advantages(hidden, candidates)
        th.autograd.backward(outputs, [th.ones_like(output) for output in outputs])
        with th.no_grad():
            chain(average._pi_chain, features(average, average.pi_recurrent, rows[:n_rows]))

    return run


def model_and_batch(title: str) -> tuple[ACER, SequenceBatch]:
    name, n_envs, wrapper, policy, shared, *_ = PROGRAMS[title]
    model = make(ACER, name, n_envs, wrapper, policy, **shared)
    return model, model.replay_buffer.sample(n_envs, None, np.random.default_rng(0))


def updates(n_runs: int, steps: int) -> list[Measurement]:
    rows: list[Measurement] = []
    for title in UPDATES:
        model, batch = model_and_batch(title)
        run_floor, n_calls = floor_of(model, batch), 200

        def repeated(call: Callable[[], Any], n_calls: int = n_calls) -> Callable[[], Any]:
            return lambda: [call() for _ in range(n_calls)]

        parts = {"floor": repeated(run_floor), "update": repeated(partial(model.update, batch))}
        found = interleaved(parts, n_runs + 1)
        found = {part: each[1:] for part, each in found.items()}  # the first runs warm up
        for part, each in found.items():
            rows += [(f"update, {title}", part, run, 1000 * took / n_calls, "ms") for run, took in enumerate(each)]
        ratio = statistics.median(update / floor for floor, update in zip(*found.values(), strict=True))
        print(f"{title}: an update takes {ratio:.2f} times its floor")
    return rows


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations while it is active."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def predictions(n_runs: int, steps: int) -> list[Measurement]:
    def act(model: Any) -> None:
        observation, state, starts = model.get_env().reset()[:1], None, np.zeros(1, bool)
        for _ in range(steps):
            _, state = model.predict(observation, state, starts)

    rows: list[Measurement] = []
    for title in UPDATES:
        models = rivals(title)
        found = interleaved({algorithm: partial(act, model) for algorithm, model in models.items()}, n_runs)
        for name, each in found.items():
            rows += [(f"predictions, {title}", name, run, steps / took, "calls/s") for run, took in enumerate(each)]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(*found.values(), strict=True))
        print(f"{title}: {ratio:.2f} times the predictions per second of {next(iter(models))}")
    return rows


def operations(n_runs: int, steps: int) -> list[Measurement]:
    rows: list[Measurement] = []
    for title in UPDATES:
        model, batch = model_and_batch(title)
        with Counter() as counter:  # type: ignore[no-untyped-call]
            model.update(batch)
        rows.append((f"operations, {title}", "update", 0, counter.count, "operations"))
        print(f"{title}: an update dispatches {counter.count} operations")
    return rows


def growth(n_runs: int, steps: int) -> list[Measurement]:
    families: dict[str, dict[str, dict[str, Any]]] = {
        "buffer": {f"{size:,} steps": {"buffer_size": size // 4} for size in (5_000, 50_000, 200_000, 1_000_000)},
        "networks": {
            f"{width} units": {"policy_kwargs": {"net_arch": [width, width]}} for width in (64, 128, 256, 512, 1024)
        },
        "environments": {f"{n_envs}": {"n_envs": n_envs} for n_envs in (1, 4, 16, 64)},
    }
    rows: list[Measurement] = []
    for family, variants in families.items():
        models = {
            title: make(ACER, "CartPole-v1", kwargs.pop("n_envs", 4), **kwargs) for title, kwargs in variants.items()
        }
        if family == "buffer":  # full ones: what is sampled is spread over all of the memory
            for model in models.values():
                fill(model)
        for title, each in training_speeds(models, n_runs, steps).items():
            rows += [(f"growth, {family}", title, run, speed, "steps/s") for run, speed in enumerate(each)]
            print(f"{family}, {title}: {statistics.median(each):,.0f} steps per second")
    return rows


def fill(model: ACER) -> None:
    """Repeat the finished slots until the buffer is full."""
    buffer = model.replay_buffer
    ring, n_steps = buffer._ring, buffer.n_steps
    assert ring is not None
    n_rows = buffer.pos * n_steps
    for column in (*ring.steps.values(), *ring.observations.values()):
        rows: th.Tensor = column.ring  # type: ignore[union-attr]
        for first in range(n_rows, len(rows), n_rows):
            rows[first : first + n_rows] = rows[: min(n_rows, len(rows) - first)]
    ring.steps["final_place"].ring[n_rows:] = -1
    ring.steps["truncated"].ring[n_rows:] = False
    buffer.full = True


def training(names: list[str], steps: int) -> list[Measurement]:
    """A run of each experiment, of a few times the steps: DQN fills its buffer first, and PPO's rollouts are long."""
    rows: list[Measurement] = []
    for each in map(EXPERIMENTS.__getitem__, names):
        with TemporaryDirectory() as folder:
            prepare(each, Path(folder))
            timed = replace(each, eval_freq=-1, params={**each.params, "callback": "benchmarks.variants.Clock"})
            line = command(timed, 0, Path(folder), 12 * steps)
            printed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        found = re.search(r"Trained for (\d+) steps in (\S+) s", printed)
        assert found is not None, printed
        speed = int(found[1]) / float(found[2])
        print(f"{each.name}: {speed:,.0f} steps per second")
        rows.append((f"training, {each.environment}", each.name, 0, speed, "steps/s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = {
        "programs": programs,
        "updates": updates,
        "predictions": predictions,
        "operations": operations,
        "growth": growth,
    }
    names = [*benchmarks, "training"]
    parser.add_argument("benchmarks", nargs="*", help=f"{', '.join(names)}; all of them by default")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=4000, help="environment steps of a run; training makes 12 times as many"
    )
    parser.add_argument("--experiments", nargs="+", metavar="NAME", default=TIMED, choices=EXPERIMENTS, help="to train")
    options = parser.parse_args()
    if unknown := set(options.benchmarks) - set(names):
        parser.error(f"benchmarks must be among {', '.join(names)}, got {', '.join(unknown)}")
    th.set_num_threads(1)
    for name in options.benchmarks or names:
        if name == "training":
            record_speed(training(options.experiments, options.steps), ["benchmark", "variant"])
        else:
            record_speed(benchmarks[name](options.runs, options.steps))


if __name__ == "__main__":
    main()
