"""
Kills training with SIGKILL at random moments, starts the same program again, and compares how it ends with a run that
was never interrupted: parameters, average policy, optimiser, replay buffer, all generators, statistics, counters and
logged values, to the bit::

    python -m benchmarks.kill_and_resume --runs 100

The processes are forked from one that has imported the libraries and done nothing else.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize

from sb3_acer import ACER
from sb3_acer.atari import make_atari_vec_env
from tests.helpers import Recall, Recorder

LSTM: dict[str, Any] = {"policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_hidden_size": 16}, "burn_in": 2}


def normalized(env_id: Any, **kwargs: Any) -> Callable[[], VecEnv]:
    return lambda: VecNormalize(make_vec_env(env_id, 2, seed=5, **kwargs))


def plain(env_id: Any, n_envs: int = 2, **kwargs: Any) -> Callable[[], VecEnv]:
    return lambda: make_vec_env(env_id, n_envs, seed=5, **kwargs)


def multi_discrete() -> Recorder:
    return Recorder(spaces.MultiDiscrete([3, 2]))


def pong() -> VecEnv:
    return make_atari_vec_env("PongNoFrameskip-v4", 2, seed=5, max_frames=200, screen_size=36, num_threads=1)


FORKED: dict[str, Any] = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
SHORT: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 50}}
# Environment, arguments of ACER, steps.
CASES: dict[str, tuple[Callable[[], VecEnv], dict[str, Any], int]] = {
    "CartPole-v1": (plain("CartPole-v1"), {}, 900),
    "CartPole-v1, processes": (plain("CartPole-v1", **FORKED), {}, 700),
    "CartPole-v1, LSTM": (plain("CartPole-v1"), LSTM, 400),
    "Pendulum-v1, VecNormalize": (normalized("Pendulum-v1"), {}, 600),
    "Pendulum-v1, VecNormalize, LSTM": (normalized("Pendulum-v1"), LSTM, 400),
    "HalfCheetah-v5": (plain("HalfCheetah-v5", **SHORT), {}, 400),
    "HalfCheetah-v5, VecNormalize": (normalized("HalfCheetah-v5", **SHORT), {}, 400),
    "MultiDiscrete": (plain(multi_discrete), {}, 700),
    "MultiDiscrete, VecNormalize, LSTM": (normalized(multi_discrete), LSTM, 400),
    "Recall, LSTM": (plain(Recall, 3), LSTM, 500),
    "AtariVecEnv Pong": (pong, {"policy": "CnnPolicy", "policy_kwargs": {"use_bfloat16": False}}, 240),
}


class Rows(KVWriter):
    """Writes what is logged to a file, without times, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        values = {key: repr(value) for key, value in key_values.items() if key not in ("time/fps", "time/time_elapsed")}
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        pass


def flat(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from flat(part, f"{name}.{index}")
    elif isinstance(value, np.random.Generator):
        yield from flat(value.bit_generator.state, name)
    else:
        yield name, value.detach().numpy() if isinstance(value, th.Tensor) else np.asarray(value)


def digests(model: ACER, evaluation: EvalCallback) -> dict[str, str]:
    """Of each part of training's state."""
    normalize = model.get_vec_normalize_env()
    parts: dict[str, Any] = {
        **model.get_parameters(),
        "buffer": model.replay_buffer.state_dict(),
        "generators": list(model._rngs),
        "random": [random.getstate(), np.random.get_state(), th.get_rng_state()],
        "observations": [model._last_obs, model._states],
        "episodes": [(episode["r"], episode["l"]) for episode in model.ep_info_buffer or []],
        "counters": [model.num_timesteps, model._total_timesteps, model._episode_num, model._n_updates],
        "callback": [evaluation.n_calls, evaluation.best_mean_reward, evaluation.evaluations_results],
    }
    if normalize is not None:
        statistics = [vars(normalize.obs_rms), vars(normalize.ret_rms)]
        parts["normalize"] = [statistics, normalize.returns, normalize.old_obs, normalize.old_reward]
    found = {}
    for name, part in parts.items():
        digest = hashlib.sha256()
        for key, array in flat(part):
            digest.update(f"{key} {array.dtype} {array.shape}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).data)
        found[name] = digest.hexdigest()
    return found


def train(case: str, folder: Path, checkpoints: bool) -> None:
    """The program that is killed and started again; it leaves ``end.json``."""
    make, arguments, n_steps = CASES[case]
    env, eval_env = make(), make()
    settings = {
        "policy": "MlpPolicy",
        "n_steps": 8,
        "buffer_size": 400,
        "replay_start": 100,
        "device": "cpu",
        "seed": 3,
    }
    model = ACER(env=env, **{**settings, **arguments})
    model.set_logger(Logger(None, [Rows(folder / "log.jsonl")]))
    evaluation = EvalCallback(eval_env, eval_freq=200, n_eval_episodes=1, deterministic=False, verbose=0, warn=False)
    where = folder / "checkpoints" if checkpoints else None
    (folder / "learning").touch()
    model.learn(n_steps, evaluation, log_interval=5, checkpoint=where, checkpoint_freq=n_steps // 8)
    (folder / "end.tmp").write_text(json.dumps(digests(model, evaluation)))
    (folder / "end.tmp").rename(folder / "end.json")
    env.close()
    eval_env.close()


def start(case: str, folder: Path, checkpoints: bool = True) -> int:
    """:return: the id of the process"""
    child = os.fork()
    if child == 0:
        os.setsid()  # with the processes of its environments
        status = 1
        try:
            warnings.simplefilter("ignore")
            th.set_num_threads(1)
            for seed in (th.manual_seed, np.random.seed, random.seed):
                seed(0)
            train(case, folder, checkpoints)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return child


def end_of(folder: Path) -> tuple[dict[str, str], dict[int, Any]]:
    """Digests, and the logged values by steps; those after the last checkpoint of a killed run are logged again."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    return json.loads((folder / "end.json").read_text()), {row["step"]: row for row in rows}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.kill_and_resume")
    parser.add_argument("--runs", type=int, default=100, help="runs, each killed once")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--seconds", type=float, default=np.inf, help="begin no run after so many seconds")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    begun = time.time()
    expected, durations = {}, {}
    n_equal: dict[str, list[bool]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as temporary:
        for run in range(options.runs):
            if time.time() - begun > options.seconds:
                break
            case = list(CASES)[run % len(CASES)]
            if case not in expected:
                folder = Path(temporary, f"whole_{run}")
                folder.mkdir()
                os.waitpid(start(case, folder, checkpoints=False), 0)
                durations[case] = (folder / "end.json").stat().st_mtime - (folder / "learning").stat().st_mtime
                expected[case] = end_of(folder)
            folder = Path(temporary, f"killed_{run}")
            folder.mkdir()
            child = start(case, folder)
            while not (folder / "learning").exists():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, durations[case]))
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            was_finished = (folder / "end.json").exists()
            saved = sorted(path.name for path in folder.glob("checkpoints/*"))
            os.waitpid(start(case, folder), 0)
            is_equal = (folder / "end.json").exists() and end_of(folder) == expected[case]
            n_equal[case].append(is_equal)
            state = "not killed in time" if was_finished else f"killed with {', '.join(saved) or 'no checkpoint'}"
            print(f"{run + 1:4} {case}: {state}: {'equal' if is_equal else 'DIFFERENT'}", flush=True)
            if not is_equal and (folder / "end.json").exists():
                ours, theirs = end_of(folder), expected[case]
                print(
                    "    ", [name for name in theirs[0] if ours[0].get(name) != theirs[0][name]], ours[1] == theirs[1]
                )
    for case, results in n_equal.items():
        print(f"{case:36} {sum(results)} of {len(results)}")
    every = [result for results in n_equal.values() for result in results]
    print(f"{'all':36} {sum(every)} of {len(every)} in {time.time() - begun:.0f} s")
    return 0 if all(every) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
