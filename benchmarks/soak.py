"""
Memory of training over a long time: resident memory every ten seconds, of a feed-forward policy, an LSTM and images.

    python -m benchmarks.soak [KIND ...] [--minutes 30]

A growth per hour is the median slope between any two measurements of the second half: it is not misled by the moments
at which the kernel takes pages back.
"""

import argparse
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.tables import RESULTS, SOAK, growth_per_hour, replace
from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env


def feed_forward() -> ACER:
    return ACER("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), seed=0, device="cpu")


def lstm() -> ACER:
    kwargs = {"lstm_hidden_size": 64}
    return ACER("MlpLstmPolicy", make_vec_env("CartPole-v1", 4, seed=0), policy_kwargs=kwargs, seed=0, device="cpu")


def images() -> ACER:
    env = make_atari_vec_env("PongNoFrameskip-v4", 4, seed=0, num_threads=1)
    return ACER("CnnPolicy", env, buffer_size=300, replay_start=100, seed=0, device="cpu")


KINDS: dict[str, Callable[[], ACER]] = {"feed-forward": feed_forward, "LSTM": lstm, "images": images}


class Counter(BaseCallback):
    def __init__(self, n_steps: "Synchronized[int]") -> None:
        super().__init__()
        self.n_steps = n_steps

    def _on_step(self) -> bool:
        self.n_steps.value = self.num_timesteps
        return True


def train(kind: str, n_steps: "Synchronized[int]") -> None:
    th.set_num_threads(1)
    KINDS[kind]().learn(10**9, Counter(n_steps), log_interval=10)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"KIND must be among {', '.join(KINDS)}, got {', '.join(unknown)}")
    context = get_context("spawn")
    counts = {kind: context.Value("q", 0) for kind in options.kinds or KINDS}
    processes = {kind: context.Process(target=train, args=(kind, counts[kind]), daemon=True) for kind in counts}
    for process in processes.values():
        process.start()
    measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in counts}
    start = time.monotonic()
    while time.monotonic() - start < 60 * options.minutes:
        time.sleep(10)
        for kind, process in processes.items():
            assert process.is_alive(), f"{kind}: training has ended with exit code {process.exitcode}"
            assert process.pid is not None
            measured[kind].append((time.monotonic() - start, resident_mib(process.pid)))
    for kind, rows in measured.items():
        processes[kind].terminate()
        steps = str(counts[kind].value)
        table = [{"kind": kind, "second": f"{second:.0f}", "mib": f"{mib:.2f}", "steps": steps} for second, mib in rows]
        replace(RESULTS / "soak.csv", SOAK, table, ["kind"])
        print(f"{kind}: {growth_per_hour(rows):+.2f} MiB per hour, {counts[kind].value:,} steps")


if __name__ == "__main__":
    main()
