"""
Data-parallel training measured: what the all-reduce of gradients costs beside an update, environment steps a second of
one rank, of two, and of two processes that share nothing but the machine, all in the same run, and whether runs of four
ranks end.

    python -m benchmarks.distributed [--rounds 3] [--endings 20] [--tasks HalfCheetah ...]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch as th
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.tables import Measurement, record_speed
from sb3_acer import ACER, distributed
from sb3_acer.atari import make_atari_vec_env

SIZES = {"10 kB": 2_500, "7 MB": 1_750_000, "50 MB": 12_500_000}  # numbers of 4 bytes


def on_ranks(
    function: Callable[..., Any], n_ranks: int, *args: Any, timeout: float = 300, apart: bool = False
) -> list[Any]:
    """What a function returns on each rank, or in each of as many processes apart; None where it has not returned in
    time."""
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        results = [context.SimpleQueue() for _ in range(n_ranks)]
        processes = [
            context.Process(
                target=_run,
                args=(function, rank, 1 if apart else n_ranks, f"file://{folder}/store", results[rank], args),
            )
            for rank in range(n_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
        return [None if result.empty() else result.get() for result in results]


def _run(function: Any, rank: int, n_ranks: int, store: str, result: Any, args: tuple[Any, ...]) -> None:
    th.set_num_threads(1)
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_ranks)
    result.put(function(*args))


def milliseconds_of_all_reduce(n_numbers: int, repeats: int) -> float:
    vector = th.zeros(n_numbers)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        distributed.all_reduce_mean([vector])
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def small(name: str) -> ACER:
    return ACER("MlpPolicy", make_vec_env(name, 4), replay_start=200, seed=0, device="cpu")


def pong() -> ACER:
    env = make_atari_vec_env("PongNoFrameskip-v4", 16, seed=0, num_threads=1)
    return ACER("CnnPolicy", env, buffer_size=200, replay_start=20, seed=0, device="cpu")


# How the agent of a rank is made, and the steps of one rank that are measured.
TASKS: dict[str, tuple[Callable[[], ACER], int]] = {
    "CartPole-v1, 4 environments a rank": (partial(small, "CartPole-v1"), 8000),
    "HalfCheetah-v5, 4 environments a rank": (partial(small, "HalfCheetah-v5"), 4000),
    "Pong, 16 games a rank": (pong, 2560),
}


# The number of processes, and whether they train apart.
VARIANTS = {"1": (1, False), "2": (2, False), "2 processes apart": (2, True)}


def steps_per_second(task: str) -> tuple[float, float]:
    """
    :return: environment steps a second, of all ranks together, and milliseconds of wall time for each update
    """
    make, steps = TASKS[task]
    model, n_ranks = make(), distributed.world_size()
    model.learn(steps // 4 * n_ranks)  # past replay_start
    start, before, n_updates = time.perf_counter(), model.num_timesteps, model._n_updates
    model.learn(steps * n_ranks, reset_num_timesteps=False)
    seconds = time.perf_counter() - start
    return (model.num_timesteps - before) / seconds, 1000 * seconds / (model._n_updates - n_updates)


class StopAt(BaseCallback):
    def __init__(self, n_calls: int) -> None:
        super().__init__()
        self.at = n_calls

    def _on_step(self) -> bool:
        return self.n_calls < self.at


def short_run(number: int) -> int:
    """A run of CartPole that evaluates on rank 0; in every second one a callback stops training on one rank."""
    evaluation = EvalCallback(make_vec_env("CartPole-v1", 1), eval_freq=15, n_eval_episodes=1, verbose=0)
    stops = StopAt(37 if number % 2 and distributed.rank() == number % 4 else 10**9)
    model = ACER("MlpPolicy", make_vec_env("CartPole-v1", 4), n_steps=10, replay_start=20, seed=number, device="cpu")
    model.learn(960, [evaluation, stops])
    return model.num_timesteps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endings", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=[""], metavar="PREFIX", help="beginnings of their names")
    options = parser.parse_args()
    tasks = [each for each in TASKS if each.startswith(tuple(options.tasks))]
    if not tasks:
        parser.error(f"--tasks must be beginnings of {', '.join(TASKS)}, got {', '.join(options.tasks)}")
    rows: list[Measurement] = []
    for name, n_numbers in SIZES.items():
        repeats = 200 if n_numbers < 10**5 else 15
        milliseconds = on_ranks(milliseconds_of_all_reduce, 2, n_numbers, repeats)[0]
        rows.append(("all-reduce between two ranks", name, 0, milliseconds, "ms"))
        print(f"all-reduce of {name} between two ranks: {milliseconds:.2f} ms", flush=True)
    for task in tasks:
        rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(options.rounds):
            for variant, (n_processes, apart) in VARIANTS.items():
                results = on_ranks(steps_per_second, n_processes, task, apart=apart)
                rate = sum(each for each, _ in results) if apart else results[0][0]
                rates[variant].append(rate)
                rows.append((f"ranks, {task}", variant, number, rate, "steps/s"))
                print(f"{variant}: {rate:.0f} steps/s, {results[0][1]:.2f} ms of wall time for each update", flush=True)
        for variant in list(VARIANTS)[1:]:
            ratios = [two / one for one, two in zip(rates["1"], rates[variant], strict=True)]
            print(f"{task}: {variant} over 1: {statistics.median(ratios):.2f}", flush=True)
    record_speed(rows)
    ended = 0
    for number in range(options.endings):
        counts = on_ranks(short_run, 4, number)
        expected = 640 if number % 2 else 960
        ended += counts == [expected] * 4
        print(f"run {number}: {counts}", flush=True)
    print(f"4 ranks x 4 environments: {ended} of {options.endings} runs to the end")


if __name__ == "__main__":
    main()
