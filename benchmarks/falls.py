"""
Why an agent on MiniGrid's GoToDoor lost what it had learnt: the settings of `minigrid_gotodoor_former` until just
before the fall, then from that checkpoint on as they are and with one remedy at a time.

    python -m benchmarks.falls [--seed 1] [--until 75000] [--steps 20000] [--remedies ...]

A row of results/falls.csv is of 1,000 steps: the mean reward of the episodes that ended; of the updates, the median and
the largest KL(before || after), a mean over 64 stored sequences, and the largest change of the parameters, by its norm;
and, after the last update, the probability of the actions that had been rewarded in these sequences.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import minigrid  # noqa: F401, registers the environments
import numpy as np
import torch as th
from minigrid.wrappers import FlatObsWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks import variants
from benchmarks.forgetting import entry
from benchmarks.tables import FALLS, RESULTS, Row, replace
from sb3_acer import ACER
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Update

ENVIRONMENT = "MiniGrid-GoToDoor-5x5-v0"
N_STEPS = 500_000
N_ENVS, FORMER = entry(ENVIRONMENT, buffer_size=125_000, max_grad_norm=10.0)
INTERVAL = 1000


class SmallGradients(variants.Variant):
    """The gradient's norm is at most 1 instead of 10."""

    def _on_training_start(self) -> None:
        self.model.max_grad_norm = 1.0


class HalfTheLearningRate(variants.Variant):
    def _on_training_start(self) -> None:
        schedule = self.model.lr_schedule
        self.model.lr_schedule = lambda left: schedule(left) / 2


REMEDIES: dict[str, type[variants.Variant]] = {
    "max_grad_norm 1": SmallGradients,
    "half the learning rate": HalfTheLearningRate,
    "bounded step": variants.BoundedStep,
    "clipped by moment": variants.ClippedByMoment,
    "gated": variants.Gated,
    "mixed": variants.Mixed,
    "average bootstraps": variants.AverageBootstraps,
}


class Until(BaseCallback):
    """Ends training at a step."""

    model: ACER

    def __init__(self, step: int) -> None:
        super().__init__()
        self.last_step = step

    def _on_step(self) -> bool:
        return self.num_timesteps < self.last_step


class Observer(Until):
    """Rows of one run."""

    def __init__(self, remedy: str, seed: int, last_step: int) -> None:
        super().__init__(last_step)
        self.remedy, self.seed = remedy, seed
        self.rows: list[Row] = []
        self.rewards: list[float] = []
        self.changes: list[tuple[float, float]] = []
        """KL and norm of each update"""
        self.recorded = 0

    def _on_training_start(self) -> None:
        self.recorded = self.num_timesteps // INTERVAL * INTERVAL
        policy, update = self.model.policy, self.model.update
        stored = self.model.replay_buffer.sample(64, self.model.get_vec_normalize_env(), np.random.default_rng(0))
        self.rewarded = stored.rewards > 0
        self.actions = stored.actions

        def statistics() -> th.Tensor:
            return policy.statistics(stored)

        def observed(batch: SequenceBatch) -> Update:
            before, vectors = statistics(), th.cat([vector.detach() for vector in policy.flat.vectors])
            made = update(batch)
            self.after = statistics()
            change = th.cat([vector.detach() for vector in policy.flat.vectors]) - vectors
            self.changes.append((policy.family.kl(before, self.after).mean().item(), change.norm().item()))
            return made

        self.model.update = observed  # type: ignore[method-assign]

    def _on_step(self) -> bool:
        self.rewards += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return super()._on_step()

    def _on_rollout_end(self) -> None:
        self._record()

    def _on_training_end(self) -> None:
        self._record()

    def _record(self) -> None:
        step = self.num_timesteps // INTERVAL * INTERVAL
        if self.changes and self.recorded < step:
            self.recorded = step
            probabilities = self.model.policy.family.exact_log_prob(self.after, self.actions).exp()
            kls, norms = np.array(self.changes).T
            reward = np.mean(self.rewards) if self.rewards else np.nan
            numbers = (reward, np.median(kls), kls.max(), norms.max(), probabilities[self.rewarded].mean().item())
            row = (self.remedy, str(self.seed), str(step), *(f"{value:.4g}" for value in numbers))
            self.rows.append(dict(zip(FALLS, row, strict=True)))
            self.rewards.clear()
            self.changes.clear()


def make_env(seed: int) -> VecNormalize:
    envs = make_vec_env(ENVIRONMENT, N_ENVS, seed=seed, wrapper_class=FlatObsWrapper)
    return VecNormalize(envs, norm_obs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--until", type=int, default=75_000, help="step of the checkpoint")
    parser.add_argument("--steps", type=int, default=20_000, help="steps from there")
    parser.add_argument("--remedies", nargs="*", choices=REMEDIES, default=list(REMEDIES), help="besides none")
    parser.add_argument("--checkpoint", type=Path, help="a folder to keep the checkpoint in")
    options = parser.parse_args()
    th.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        folder = options.checkpoint or Path(temporary)
        if not (folder.is_dir() and any(folder.iterdir())):
            model = ACER(env=make_env(options.seed), seed=options.seed, device="cpu", **FORMER)
            until = Until(options.until)
            model.learn(N_STEPS, until, log_interval=None, checkpoint=folder, checkpoint_freq=N_STEPS)
        for remedy in ["", *options.remedies]:
            model = ACER.load_checkpoint(folder, make_env(options.seed), device="cpu")
            observer = Observer(remedy, options.seed, options.until + options.steps)
            model.learn(N_STEPS, [*([REMEDIES[remedy]()] if remedy else []), observer], log_interval=None)
            replace(RESULTS / "falls.csv", FALLS, observer.rows, ["remedy", "seed"])
            rewards = [row["reward"] for row in observer.rows]
            print(f"{remedy or 'as they are'}, seed {options.seed}: {' '.join(rewards)}", flush=True)


if __name__ == "__main__":
    main()
