"""
Why an agent loses what it has learnt: CartPole-v1's entry by the tuner with replay buffers of two sizes, for many more
steps than it takes to learn. Episodes of training have sampled actions. Remedies, one at a time, with the smaller
buffer.

    python -m benchmarks.forgetting [--seeds 2001 2002 2003 2004] [--steps 80000] [--remedies gated mixed ...]

Its rows in results/forgetting.csv are means over 4,000 steps: the share of episodes that end before 475 steps, how many
failures the buffer holds, by how much the critic prefers the action that catches a falling pole, and how much less than
the centre it values the edge of the track.
"""

import argparse
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from benchmarks import variants
from benchmarks.experiments import load_experiments
from benchmarks.tables import FORGETTING, RESULTS, Row, replace
from sb3_acer import ACER
from sb3_acer.hyperparams import hyperparams

SIZES = (2048, 50_000)
INTERVAL = 4000
REMEDIES: dict[str, type[variants.Variant]] = {
    "gated": variants.Gated,
    "mixed": variants.Mixed,
    "bounded step": variants.BoundedStep,
    "clipped by moment": variants.ClippedByMoment,
    "reservoir": variants.Reservoir,
    "average acts": variants.AverageActs,
    "average bootstraps": variants.AverageBootstraps,
}

# Position, velocity, angle, angular velocity.
SIDES = (-1, 1)
FALLING = [[0, 0, side * angle, side * speed] for side in SIDES for angle in (0.1, 0.15, 0.19) for speed in (0.2, 0.8)]
AT_THE_EDGE = [
    [side * 2.3, side * v, side * angle, side * 0.1] for side in SIDES for v in (0.3, 1) for angle in (0, 0.1)
]
CENTRE = [[0, 0, 0, 0]]


class Observer(BaseCallback):
    """Rows of one run."""

    def __init__(self, buffer_size: int, remedy: str, seed: int) -> None:
        super().__init__()
        self.buffer_size, self.remedy, self.seed = buffer_size, remedy, seed
        self.variant = REMEDIES[remedy]() if remedy else None
        self.rows: list[Row] = []
        self.lengths: list[float] = []
        self.failures: list[int] = []
        """calls at which an episode ended otherwise than by its time limit"""
        self.measured: list[tuple[float, float, float]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.lengths.append(info["episode"]["l"])
                self.failures += [] if info["TimeLimit.truncated"] else [self.n_calls]
        return True

    def _on_rollout_end(self) -> None:
        in_buffer = sum(map(self._holds, self.failures))
        self.measured.append((in_buffer, *critics_gaps(self.model)))
        if self.num_timesteps // INTERVAL > len(self.rows):
            step = self.num_timesteps // INTERVAL * INTERVAL
            lost = np.mean(np.array(self.lengths) < 475).item() if self.lengths else 0.0
            numbers = (self.seed, step, len(self.lengths), lost, *np.mean(self.measured, 0).tolist())
            row = (str(self.buffer_size), self.remedy, *(f"{value:.6g}" for value in numbers))
            self.rows.append(dict(zip(FORGETTING, row, strict=True)))
            self.lengths.clear()
            self.measured.clear()

    def _holds(self, call: int) -> bool:
        if isinstance(self.variant, variants.Reservoir):
            return self.variant.holds(call)
        return call > self.n_calls - self.buffer_size


def critics_gaps(model: Any) -> tuple[float, float]:
    """By how much the critic prefers the action that catches a falling pole, and the centre to the edge."""
    with th.no_grad():
        states = th.tensor(FALLING + AT_THE_EDGE + CENTRE, dtype=th.float32)
        values = model.policy.predict_values(states)[:, 0]
        q_values = model.policy._q_chain(states[: len(FALLING)])
    preference = (q_values[:, 1] - q_values[:, 0]) * states[: len(FALLING), 2].sign()
    return preference.mean().item(), (values[-1] - values[len(FALLING) : -1].mean()).item()


def entry(environment: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Number of environments and arguments of ACER, as the entry of acer.yml has them, but for the changes."""
    settings = {**hyperparams[environment], **changes}
    n_envs = settings.pop("n_envs")
    assert settings.pop("normalize") == "dict(norm_obs=False)"
    for name in ("n_timesteps", "env_wrapper"):
        settings.pop(name, None)
    settings["policy_kwargs"] = eval(settings["policy_kwargs"], {"nn": nn, "th": th, "dict": dict})
    return n_envs, settings


def observe(buffer_size: int, remedy: str, seed: int, steps: int) -> list[Row]:
    former = load_experiments()["cartpole_tuned"].params
    n_envs, settings = entry("default", **{**former, "buffer_size": buffer_size})
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs, seed=seed), norm_obs=False, gamma=settings["gamma"])
    observer = Observer(buffer_size, remedy, seed)
    callbacks = [observer, *([observer.variant] if observer.variant else [])]
    ACER(env=env, seed=seed, device="cpu", **settings).learn(steps, callbacks, log_interval=None)
    return observer.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2001, 2002, 2003])
    parser.add_argument("--steps", type=int, default=80_000)
    parser.add_argument("--remedies", nargs="*", choices=REMEDIES, default=[], help="these instead of two buffer sizes")
    options = parser.parse_args()
    th.set_num_threads(1)
    tried = [(SIZES[0], name) for name in options.remedies] or [(size, "") for size in SIZES]
    for seed in options.seeds:
        for buffer_size, remedy in tried:
            rows = observe(buffer_size, remedy, seed, options.steps)
            replace(RESULTS / "forgetting.csv", FORGETTING, rows, ["buffer_size", "remedy", "seed"])
            late = rows[len(rows) // 2 :]
            lost = sum(float(row["lost"]) * float(row["episodes"]) for row in late)
            print(f"buffer_size {buffer_size} {remedy}, seed {seed}: {lost:.0f} episodes of the second half below 475")


if __name__ == "__main__":
    main()
