"""``sb3-acer run-atari``: ACER on an Atari game, with the arguments of stable-baselines' run_atari."""

import argparse
import json
import math
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.logger import Logger, make_output_format
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer import ACER
from sb3_acer.atari.vec_env import make_atari_vec_env
from sb3_acer.callbacks import StopOnSignal
from sb3_acer.checkpoint import has_checkpoints
from sb3_acer.checks import check_integer
from sb3_acer.storage import replacing

POLICIES = {"cnn": "CnnPolicy", "lstm": "CnnLstmPolicy", "lnlstm": "CnnLnLstmPolicy"}
SETTINGS = "run-atari.json"


class Run(StopOnSignal):
    """
    Writes settings, logs and the scores of finished games once training has begun, and ends training on a signal.

    :param folder: output folder
    :param t_start: time at which the environment was made, seconds since the epoch
    :param settings: the options, which ``--resume`` reads
    """

    def __init__(self, folder: Path, t_start: float, settings: dict[str, Any]) -> None:
        super().__init__()
        self.folder = folder
        self.t_start = t_start
        self.settings = settings

    def _on_training_start(self) -> None:
        super()._on_training_start()
        with replacing(self.folder / SETTINGS, "json") as file:
            file.write(json.dumps(self.settings).encode())
        # Files for each part of a resumed run, since the times in a file count from one start.
        formats = ["stdout", "csv", *(["tensorboard"] if find_spec("tensorboard") else [])]
        suffix = f"_{self.start}" if self.start else ""
        outputs = [make_output_format(name, str(self.folder), suffix) for name in formats]
        self.model.set_logger(Logger(str(self.folder), outputs))
        name = str(self.folder / f"{self.start}")
        self.scores = ResultsWriter(name, {"t_start": self.t_start}, extra_keys=("steps",))

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.scores.write_row({**info["episode"], "steps": self.num_timesteps})
        return super()._on_step()

    def _on_training_end(self) -> None:
        self.scores.close()


def make_parser() -> argparse.ArgumentParser:
    def whole(text: str) -> int:
        try:
            number = float(text)  # 1e7
        except ValueError:
            number = math.nan
        if not number.is_integer():
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
        return int(number)

    def interval(text: str) -> int | str:
        return text if text == "auto" else whole(text)

    parser = argparse.ArgumentParser(
        "sb3-acer run-atari",
        description="Train on an Atari game, like stable-baselines' run_atari. The output folder holds progress.csv, "
        "the scores of all games (*.monitor.csv), checkpoints and agent.zip. Ctrl-C saves a checkpoint and ends "
        "training; --resume continues from the newest checkpoint, with the same arguments unless others are given.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--env", default="BreakoutNoFrameskip-v4", help="id of the environment")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--num-timesteps", type=whole, default=10_000_000, help="steps of all games together")
    parser.add_argument("--policy", choices=POLICIES, default="cnn", help="network of the policy")
    parser.add_argument(
        "--lr_schedule",
        "--lr-schedule",
        choices=["constant", "linear"],
        default="constant",
        help="schedule of the learning rate (default: acer.yml's, linear; %(default)s with --stable-baselines)",
    )
    parser.add_argument(
        "--stable-baselines", action="store_true", help="settings of stable-baselines instead of acer.yml's"
    )
    parser.add_argument("--logdir", default="", help="output folder; logs/run-atari/ENV_SEED if it is empty")
    parser.add_argument("--resume", action="store_true", help="continue from the output folder's newest checkpoint")
    parser.add_argument("--checkpoint-freq", type=whole, default=500_000, help="environment steps between checkpoints")
    parser.add_argument(
        "--log-interval",
        type=interval,
        default="auto",
        help="rollouts between logs; auto: 100, in a short run a twentieth of it, and logs after 1 and 10",
    )
    parser.add_argument("--n-envs", type=whole, default=16, help="games played in parallel")
    parser.add_argument("--buffer-size", type=whole, default=5000, help="steps of each game that are stored")
    parser.add_argument(
        "--replay-ratio", type=float, default=4.0, help="mean number of replayed batches after each rollout"
    )
    parser.add_argument("--device", default="auto", help="device of the networks")
    return parser


def tuned() -> dict[str, Any]:
    """
    :return: the ``atari`` entry of acer.yml: arguments of ACER, and the number of games
    """
    from sb3_acer.hyperparams import hyperparams  # needs PyYAML, which the atari extra installs

    others = ("env_wrapper", "frame_stack", "policy", "n_timesteps")
    entry = {name: value for name, value in hyperparams["atari"].items() if name not in others}
    return {**entry, "policy_kwargs": eval(entry["policy_kwargs"], {"th": th})}  # as rl-zoo does


def parse(arguments: list[str]) -> tuple[argparse.Namespace, Path]:
    """
    :param arguments: of the command line
    :return: the options and the output folder; with ``--resume``, options that are not given are those of the run that
        is continued
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.stable_baselines:
        parser.set_defaults(**{name: value for name, value in tuned().items() if hasattr(options, name)})
        options = parser.parse_args(arguments)
    folder = Path(options.logdir or f"logs/run-atari/{options.env.replace('/', '-')}_{options.seed}")
    has_checkpoint = has_checkpoints(folder)
    if not options.resume:
        if has_checkpoint:
            sys.exit(f"sb3-acer run-atari: {folder} has a run: continue it with --resume, or use another --logdir")
        return options, folder
    if not has_checkpoint:
        sys.exit(
            f"sb3-acer run-atari: {folder} has no checkpoint to resume from: --env and --logdir name another run, or "
            "this one ended before its first checkpoint and can be started again without --resume"
        )
    if not (folder / SETTINGS).exists():
        sys.exit(f"sb3-acer run-atari: --logdir must be the folder of a run of run-atari, got {folder}")
    parser.set_defaults(**json.loads((folder / SETTINGS).read_text()))
    return parser.parse_args(arguments), folder


def make_agent(options: argparse.Namespace, env: VecEnv) -> ACER:
    """
    :return: a new agent. ``learn`` turns it into that of a checkpoint
    """
    settings = {} if options.stable_baselines else tuned()
    return ACER(
        POLICIES[options.policy],
        env,
        lr_schedule=options.lr_schedule,
        buffer_size=options.buffer_size,
        replay_ratio=options.replay_ratio,
        seed=options.seed,
        device=options.device,
        verbose=1,
        **{name: value for name, value in settings.items() if not hasattr(options, name)},
    )


def main(arguments: list[str]) -> None:
    """
    :param arguments: of the command line
    """
    options, folder = parse(arguments)
    try:
        check_integer("--checkpoint-freq", options.checkpoint_freq)
        check_integer("--num-timesteps", options.num_timesteps)
        env = make_atari_vec_env(options.env, options.n_envs, options.seed)
        model = make_agent(options, env)
    except ValueError as error:
        sys.exit(f"sb3-acer run-atari: {error}")
    start = time.perf_counter()
    settings = {name: value for name, value in vars(options).items() if name not in ("resume", "logdir")}
    run = Run(folder, env.t_start, settings)
    try:
        with run.listening():
            model.learn(
                options.num_timesteps,
                run,
                options.log_interval,
                progress_bar=sys.stdout.isatty() and all(find_spec(name) for name in ("tqdm", "rich")),
                checkpoint=folder,
                checkpoint_freq=options.checkpoint_freq,
            )
    except Exception as error:
        if isinstance(error, ValueError) and run.start is None:  # the checkpoint was refused: nothing has changed
            sys.exit(f"sb3-acer run-atari: {error}")
        if run.has_trained():
            model.save_checkpoint(folder, with_env=False)
            model.save(folder / "agent.zip")
        if not run.stopped_by:
            raise
    rate = (model.num_timesteps - (run.start or 0)) / (time.perf_counter() - start)
    model.save(folder / "agent.zip")
    env.close()
    scores = [episode["r"] for episode in model.ep_info_buffer or []]
    score = f"mean score of the last {len(scores)} games: {np.mean(scores):.2f}" if scores else "no game has ended yet"
    print(f"{model.num_timesteps} steps, {rate:.0f} a second; {score}\nAgent: {folder / 'agent.zip'}")
    if run.stopped_by:
        sys.exit(128 + run.stopped_by)
