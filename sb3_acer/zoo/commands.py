"""
The commands of ``sb3-acer``: rl-zoo's scripts with their arguments. ACER is registered, and the hyperparameters of this
package are the default.

Only the command line imports this module, so ``import sb3_acer`` does not need rl-zoo.
"""

import argparse
import inspect
import json
import os
import re
import runpy
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import optuna
import rl_zoo3.enjoy
import rl_zoo3.train
import rl_zoo3.utils
from huggingface_sb3 import EnvironmentName
from rl_zoo3.utils import ALGOS, create_test_env, get_model_path, get_trained_models
from stable_baselines3.common import callbacks

from sb3_acer.__main__ import SUMMARIES
from sb3_acer.checks import require
from sb3_acer.distributed import RankError, from_first, rank, torchrun_group, world_size
from sb3_acer.hyperparams import ENTRIES_FILE
from sb3_acer.zoo.display import draw_offscreen, ffmpeg_on_path, font_for_ffmpeg, watchable_env
from sb3_acer.zoo.experiment import Experiment
from sb3_acer.zoo.masking import Algorithms, evaluate_policy
from sb3_acer.zoo.mistakes import check_counts, in_one_line, unknown_environment
from sb3_acer.zoo.plots import all_plots, plot_from_file, plot_train
from sb3_acer.zoo.registration import register
from sb3_acer.zoo.runs import ARGUMENTS, LOG_FOLDER, command, quoted, run_to_resume
from sb3_acer.zoo.scripts import asks_for_help, run_zoo, value_of
from sb3_acer.zoo.study import open_storage, whole_path

ZOO_PATH = Path(__file__).with_name("path")
# For `sb3-acer train` without arguments. Small networks are fastest on one CPU core.
FIRST_RUN = ["--progress", "--log-interval=-2", "--n-eval-envs=5", "--device=cpu", "--num-threads=1"]

# The value of a run is the mean of the second half of its evaluations: three of five, so each has many episodes. By
# default the zoo evaluates every 100,000 steps, too rarely for the pruner to stop a short trial. One thread leaves the
# other cores to other workers.
SEARCH = ["--optimize-hyperparameters", "--n-trials=100", "--n-startup-trials=20", "--n-evaluations=5"]
SEARCH += ["--eval-episodes=20", "--n-eval-envs=5", "--num-threads=1"]

SAVED_AGENT = ["--algo", "acer", "-f", LOG_FOLDER]
CHECKPOINT_FILES = "rl_model_*_steps.zip"  # of train --save-freq


def runs_with(files: str, folder: Path, env_name: str) -> list[int]:
    """
    :param files: pattern of files in a run's folder
    :param folder: of the algorithm
    :return: the numbers of the environment's runs that have such a file, the newest first
    """
    endings = {path.parent.name.removeprefix(f"{env_name}_") for path in folder.glob(f"{env_name}_*/{files}")}
    return sorted((int(ending) for ending in endings if ending.isdigit()), reverse=True)


def newest_agent(folder: str, env_name: str) -> int:
    """The zoo's ``get_latest_run_id``, but of the runs that have an agent; 0 if there is none."""
    return [*runs_with(f"{env_name}.zip", Path(folder), env_name), 0][0]


def saved_agents(folder: str) -> dict[Any, tuple[str, str]]:
    """
    The zoo's ``get_trained_models``: for each name the newest run that has an agent. Environments are named as in the
    names of folders. Each key ends with the run's number, since the zoo does not evaluate a name twice.
    """
    runs = {name: (algo, EnvironmentName(env_id)) for name, (algo, env_id) in get_trained_models(folder).items()}
    numbers = {name: newest_agent(f"{folder}/{algo}", env_name) for name, (algo, env_name) in runs.items()}
    found = {f"{name}_{numbers[name]}": run for name, run in runs.items() if numbers[name]}
    require(bool(found), "--log-dir", "a folder with a saved agent", folder)
    return found


def find_agent(
    exp_id: int, folder: str, algo: str, env_name: Any, *which: Any, gym_packages: Sequence[str] = ()
) -> tuple[str, str, str]:
    """
    The zoo's ``get_model_path``, but the newest run is the newest that has the agent asked for. If there is none, exit
    with a message of one line.

    :param exp_id: number of the run; 0 for the newest
    :param env_name: an EnvironmentName of huggingface_sb3
    :param gym_packages: of the command, for the advice
    """
    errors: list[Exception] = []
    runs = runs_with("*.zip", Path(folder, algo), env_name)
    for run_id in [exp_id] if exp_id else runs or [0]:
        try:
            with redirect_stdout(StringIO()) as said:
                found = get_model_path(run_id, folder, algo, env_name, *which)
        except (AssertionError, ValueError) as error:
            errors.append(error)
        else:
            print(said.getvalue(), end="")
            return found
    if "rl-trained-agents" in folder:  # the zoo then downloads the agent
        raise errors[0]
    env_id = env_name.gym_id
    if env_id.split(":")[-1] not in gym.registry:
        advice = unknown_environment(env_id)
    elif not runs:
        advice = f"To train one: {command('train', algo, env_id, folder, gym_packages)}"
    else:
        saved = sorted(Path(folder, algo).glob(f"{env_name}_{exp_id if exp_id in runs else '*'}/*.zip"))
        advice = f"There are {', '.join(map(str, saved[:8]))}{' and more' if len(saved) > 8 else ''}"
        if any(which[1:]) and not any(path.match(CHECKPOINT_FILES) for path in saved):  # a checkpoint is asked for
            advice += ". Agents on the way are saved by train --save-freq; those of --checkpoint-freq are for --resume"
    sys.exit(f"No saved agent: {errors[0]}. {advice}")


def check_play(name: str, arguments: list[str]) -> None:
    """Exit with one line if the number of steps, environments or threads that an agent is played with is wrong."""
    parser = argparse.ArgumentParser(f"sb3-acer {name}", argparse.SUPPRESS, add_help=False)
    parser.add_argument("-name")  # of push-to-hub: else it would be read as -n ame
    parser.add_argument("-n", "--n-timesteps", type=int)
    parser.add_argument("--n-envs", type=int)
    parser.add_argument("--num-threads", type=int)
    with in_one_line(name):
        options = parser.parse_known_args(arguments)[0]
        check_counts(options, ("n_timesteps", "n_envs"), num_threads="torch's default")


def run_module(name: str, defaults: list[str], arguments: list[str]) -> None:
    """Run a script of the zoo that is a module without a main function. They all take ``--gym-packages`` here."""
    gym_packages, arguments = split_packages(arguments)
    check_play(name, arguments)
    with in_one_line(name):
        for package in gym_packages:
            import_module(package)
    draw_offscreen()
    script = partial(runpy.run_module, f"rl_zoo3.{name.replace('-', '_')}", run_name="__main__")
    changes: dict[str, Any] = {
        "get_model_path": partial(find_agent, gym_packages=gym_packages),
        "get_latest_run_id": newest_agent,
        "get_trained_models": saved_agents,
    }
    if name == "record-video":
        algorithms = Algorithms(ALGOS, create_test_env)
        changes.update(ALGOS=algorithms, create_test_env=algorithms.create_env)
    with (
        patch.multiple(rl_zoo3.utils, **changes),
        patch.object(subprocess, "call", partial(call, gym_packages=gym_packages)),
    ):
        run_zoo(name, script, defaults, arguments)


def split_packages(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The modules of ``--gym-packages``, and the other arguments."""
    parser = argparse.ArgumentParser("sb3-acer", argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("--gym-packages", nargs="+", default=[])
    options, others = parser.parse_known_args(arguments)
    return options.gym_packages, others


def call(program: Sequence[str], gym_packages: Sequence[str] = (), **kwargs: Any) -> int:
    """
    ``subprocess.call`` for scripts of the zoo that start others. Those run as ``python -m sb3_acer``, so they use this
    Python and know ACER, and they get ``--gym-packages``.
    """
    packages = ["--gym-packages", *gym_packages] if gym_packages else []
    program = [getattr(part, "gym_id", part) for part in program]  # of an EnvironmentName
    for script, name in (("enjoy.py", "enjoy"), ("rl_zoo3.record_video", "record-video")):
        if script in program[:3]:
            sys.stdout.flush()
            program = [sys.executable, "-m", "sb3_acer", name, *program[program.index(script) + 1 :], *packages]
    return subprocess.run(program, check=False, **kwargs).returncode


def train(arguments: list[str]) -> None:
    """
    Besides the arguments of rl-zoo there are two for ACER. --checkpoint-freq N saves all of training every N steps and
    when it ends, in the folder of the run. --resume continues the newest run of the environment that has such a
    checkpoint, and --resume 3 that in ENV_3, to the bit as if it had not been interrupted, with that run's arguments.
    Some may be changed by giving them after --resume: -n, -params n_envs:N, and those of evaluations, logs, saving and
    the machine.

    Several processes train one agent together: torchrun --nproc-per-node N -m sb3_acer train ... Each has environments
    and a replay buffer of its own; --n-timesteps counts the steps of all. What torchrun restarts (--max-restarts)
    continues from the newest checkpoint.
    """
    try:
        with torchrun_group(), redirect_stdout(sys.stdout if rank() == 0 else StringIO()):
            train_on_rank(arguments)
    except RankError as error:
        sys.exit(f"sb3-acer train: {error}")


def train_on_rank(arguments: list[str]) -> None:
    hidden = argparse.SUPPRESS  # the usage, which would have these arguments alone
    parser = argparse.ArgumentParser("sb3-acer train", hidden, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint-freq", type=int)
    parser.add_argument("--resume", nargs="?", const="")
    own, rest = parser.parse_known_args(arguments or FIRST_RUN)
    resumed = find_resumed(own, rest)
    if resumed is not None:
        saved = json.loads((resumed / ARGUMENTS).read_text())
        own, rest = parser.parse_known_args([*saved, *arguments])
        settings = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        settings.add_argument("-params", "--hyperparams", nargs="+", default=[])  # of two the last counts
        before, now = (settings.parse_known_args(each)[0].hyperparams for each in (saved, arguments))
        rest = settings.parse_known_args(rest)[1]
        rest = [*rest, *(["-params", *before, *now] if before or now else [])]
    if world_size() > 1:
        seed = value_of(rest, "--seed", type=int, default=-1)
        rest = [*rest, f"--seed={from_first(seed if seed >= 0 else secrets.randbelow(2**32 - 1))}"]
    if own.checkpoint_freq is not None and own.checkpoint_freq < 1:
        parser.error(f"--checkpoint-freq must be at least 1, got {own.checkpoint_freq}")
    if own.checkpoint_freq is not None and (algo := experiment_of(rest)[0]) != "acer":
        parser.error(f"--checkpoint-freq must be left out for --algo {algo}: only acer has checkpoints")
    with patch.multiple(Experiment, checkpoint_freq=own.checkpoint_freq, arguments=rest, resumed=resumed):
        run_training("train", rest)


def find_resumed(own: argparse.Namespace, rest: list[str]) -> Path | None:
    """
    :param own: arguments of train that the zoo does not have
    :param rest: the other ones
    :return: folder of the run that ``--resume`` or a restart by torchrun continues; None for a new run
    """
    resumes = own.resume is not None
    if resumes and value_of(rest, "-i", "--trained-agent") is not None:
        sys.exit("sb3-acer train: -i must be left out with --resume, which goes on from a checkpoint")
    may_be_restart = own.checkpoint_freq is not None and "TORCHELASTIC_RESTART_COUNT" in os.environ  # of torchrun
    if not (resumes or may_be_restart):
        return None
    algo, env_id, folder = experiment_of(rest)
    found = from_first(run_to_resume(algo, env_id, folder, own.resume or "", restarted=not resumes))
    if found is None and resumes:
        which = f"no run {own.resume}" if own.resume else "no run"
        sys.exit(f"sb3-acer train: {folder}/{algo} has {which} of {env_id} with a checkpoint to resume from")
    return found


def experiment_parser() -> argparse.ArgumentParser:
    """
    :return: a parser of the zoo's arguments for algorithm, environment and log folder
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algo", default="acer")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("-f", "--log-folder", "--folder", default=LOG_FOLDER)
    return parser


def experiment_of(arguments: list[str]) -> tuple[str, str, str]:
    """
    :return: algorithm, environment and log folder that are among the arguments of the zoo's train
    """
    options = experiment_parser().parse_known_args(arguments)[0]
    return options.algo, options.env, options.log_folder


def run_training(name: str, arguments: list[str], n_runs: int = 1) -> None:
    eval_freq = value_of(arguments, "--eval-freq")
    algo = experiment_of(arguments)[0]
    defaults = ["--algo", "acer", "-conf", str(ENTRIES_FILE)] if algo == "acer" else []
    if name == "train" and sys.stdout.isatty():
        defaults.append("--progress")
    with (
        patch.multiple(Experiment, n_runs=n_runs, evaluates_often=eval_freq is None),
        patch.object(rl_zoo3.train, "ExperimentManager", Experiment),
        patch.object(callbacks, "evaluate_policy", evaluate_policy),
    ):
        run_zoo(name, rl_zoo3.train.train, defaults, arguments)


def tune(arguments: list[str]) -> None:
    """
    The arguments are those of train, and --n-runs. Some have other defaults than the list below says: --n-trials 100,
    --n-startup-trials 20, --n-evaluations 5, --eval-episodes 20, --n-eval-envs 5, --num-threads 1.

    The study is stored in --storage under the name --study-name. All processes that are started with the same two
    work on the same study: --n-trials is the number of trials of each process; --max-total-trials, in its place,
    that of all together. The first trial has the settings of the environment's entry, or the nearest ones in the
    ranges of the search. The value of a run is the mean of the second half of its evaluations, so give it enough
    steps (-n) to lose again what it has learnt. With --n-runs N, a trial has N training runs, since a single one may
    be lucky, and its value is half their mean and half the worst of them. Settings given with -params are not
    searched: all trials have them. An existing study is continued with the environment, --env-kwargs, -n,
    --n-evaluations, --eval-episodes, --n-runs and -params that it was begun with; others need another --study-name.

    --storage is one of

      FOLDER/NAME.log                                   a journal file in a shared folder (default: logs/ALGO/ENV.log)
      sqlite:///FOLDER/NAME.db                          a database file, for a few workers on one machine
      postgresql+psycopg://USER:PASSWORD@HOST/DATABASE  a server: pip install "psycopg[binary]"
      mysql+pymysql://USER:PASSWORD@HOST/DATABASE       a server: pip install pymysql
    """
    hidden = argparse.SUPPRESS  # the usage, which would have this argument alone
    runs_parser = argparse.ArgumentParser("sb3-acer tune", hidden, add_help=False, allow_abbrev=False)
    runs_parser.add_argument("--n-runs", type=int, default=1)
    runs, arguments = runs_parser.parse_known_args(arguments)  # the only argument that is not the zoo's
    if runs.n_runs < 1:
        runs_parser.error(f"--n-runs must be at least 1, got {runs.n_runs}")
    if value_of(arguments, "-i", "--trained-agent") is not None:
        sys.exit("sb3-acer tune: -i must be left out: trials begin with new agents")
    parser = experiment_parser()
    parser.add_argument("--storage")
    parser.add_argument("--study-name")
    parser.add_argument("--seed")  # not repeated: a worker with the same seed would draw the same trials
    options, others = parser.parse_known_args(arguments)
    for_training = without_search(others)
    env_name = options.env.replace("/", "-")
    storage = whole_path(options.storage or f"{options.log_folder}/{options.algo}/{env_name}.log")
    study_name = options.study_name or f"{options.algo}-{env_name}"
    study = ["--storage", storage, "--study-name", study_name]

    def command_line(name: str, given: list[str], *more: str) -> str:
        start = command(name, options.algo, options.env, options.log_folder)
        return f"{start} {quoted([*given, *study, *more])}"

    if not asks_for_help(arguments):
        repeated = ["--n-runs", str(runs.n_runs)] if runs.n_runs > 1 else []
        print(f"To add a worker, here or on another machine: {command_line('tune', others, *repeated)}", flush=True)
    run_training("tune", [*SEARCH, *arguments, *study], runs.n_runs)
    best = optuna.load_study(storage=open_storage(storage), study_name=study_name).best_trial.number
    print(f"To train with the best trial: {command_line('train', for_training, '--trial-id', str(best))}")


def without_search(arguments: list[str]) -> list[str]:
    """
    :param arguments: of tune
    :return: those that ``train --trial-id`` takes too; not ``-n``, since a trial is shorter than training
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--n-timesteps")
    parser.add_argument("-optimize", "--optimize-hyperparameters", "--no-optim-plots", action="store_true")
    for name in ("trials", "startup-trials", "evaluations", "jobs"):
        parser.add_argument(f"--n-{name}")
    for name in ("--max-total-trials", "--sampler", "--pruner", "--eval-episodes"):
        parser.add_argument(name)
    return parser.parse_known_args(arguments)[1]


def enjoy(arguments: list[str]) -> None:
    check_play("enjoy", arguments)
    algorithms = Algorithms(ALGOS, watchable_env)
    find = partial(find_agent, gym_packages=split_packages(arguments)[0])
    with patch.multiple(rl_zoo3.enjoy, get_model_path=find, ALGOS=algorithms, create_test_env=algorithms.create_env):
        run_zoo("enjoy", rl_zoo3.enjoy.enjoy, SAVED_AGENT, arguments)


def record_video(arguments: list[str]) -> None:
    run_module("record-video", SAVED_AGENT, arguments)


def run_to_record(arguments: list[str]) -> list[str]:
    """
    The run asked for, or the newest one that has checkpoints, or the newest one with an agent.

    :param arguments: of record-training, which exits if there is no such run
    :return: the options that name the run and the folder for its videos
    """
    parser = experiment_parser()
    parser.add_argument("--exp-id", type=int, default=0)
    parser.add_argument("-o", "--output-folder")
    options = parser.parse_known_args(arguments)[0]
    folder, env_name = Path(options.log_folder, options.algo), EnvironmentName(options.env)
    with_checkpoints, with_agents = (runs_with(files, folder, env_name) for files in (CHECKPOINT_FILES, "*.zip"))
    number: int = options.exp_id or [*with_checkpoints, *with_agents, 0][0]
    run = folder / f"{env_name}_{number}" if number > 0 else folder  # as in the zoo, whose -1 is a folder without runs
    if not any(run.glob("*.zip")) and not asks_for_help(arguments):
        packages = split_packages(arguments)[0]
        advice = f"{command('train', options.algo, options.env, options.log_folder, packages)} --save-freq N"
        sys.exit(f"sb3-acer record-training: {run} must have agents of {options.env}, got none. To save some: {advice}")
    videos = Path(options.output_folder or run / "videos").absolute()
    if options.output_folder and any(videos.glob("*")):
        sys.exit(
            f"sb3-acer record-training: -o must be a new or an empty folder, since rl-zoo empties it, got {videos}"
        )
    if not re.fullmatch(r"[\w@%+=:,./-]+", str(videos)):  # rl-zoo's command lines do not quote it
        of_run = "" if options.output_folder else ". That is the run's folder: give another one by -o"
        rule = "-o must be a path that a shell takes without quotes"
        sys.exit(f"sb3-acer record-training: {rule}, got {str(videos)!r}{of_run}")
    return ["--exp-id", str(number), "-o", str(videos)]


def record_training(arguments: list[str]) -> None:
    with ffmpeg_on_path() as found, font_for_ffmpeg():
        if not found:
            sys.exit("sb3-acer record-training: ffmpeg is needed to join the videos: install ffmpeg")
        run_module("record-training", SAVED_AGENT, [*arguments, *run_to_record(arguments)])


def benchmark(arguments: list[str]) -> None:
    folder = value_of(arguments, "--log-dir", default=LOG_FOLDER)
    defaults = ["--no-hub", "--log-dir", folder, "--benchmark-dir", f"{folder}/benchmark"]
    run_module("benchmark", defaults, arguments)


def push_to_hub(arguments: list[str]) -> None:
    with ffmpeg_on_path():
        run_module("push-to-hub", SAVED_AGENT, arguments)


def zoo_path(arguments: list[str]) -> None:
    print(ZOO_PATH)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "enjoy": enjoy,
    "tune": tune,
    "plot-train": plot_train,
    "all-plots": all_plots,
    "plot-from-file": plot_from_file,
    "record-video": record_video,
    "record-training": record_training,
    "benchmark": benchmark,
    "push-to-hub": push_to_hub,
    "zoo-path": zoo_path,
}


def main(arguments: list[str]) -> None:
    """
    :param arguments: of the command line: a command and its arguments
    """
    name, *rest = arguments
    if asks_for_help(rest):
        details = inspect.getdoc(COMMANDS[name])
        print(SUMMARIES[name], *([details] if details else []), sep="\n\n", end="\n\n")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for --gym-packages, as python -m has it
    register()
    COMMANDS[name](rest)
