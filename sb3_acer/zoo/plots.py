"""
The learning curve of a run, and the commands that plot saved runs: rl-zoo's scripts, with one line where they would
draw nothing or end in a traceback.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zipfile import BadZipFile

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.results_plotter import window_func

from sb3_acer.zoo.display import figures_saved
from sb3_acer.zoo.runs import LOG_FOLDER
from sb3_acer.zoo.scripts import asks_for_help, run_zoo, value_of

SAVED_LOGS = ["-a", "acer", "-e", "CartPole-v1", "-f", LOG_FOLDER]


def plot_train(arguments: list[str]) -> None:
    from rl_zoo3.plots import plot_train

    runs, given = runs_to_plot("plot-train", arguments, "*.monitor.csv")
    shown = given.max_timesteps
    read = [read_of("plot-train", run, load_results) for run in runs]
    episodes = [each[each.l.cumsum() <= shown] for each in read]
    successes = value_of(arguments, "-y", "--y-axis") == "success"
    if runs and successes and not any("is_success" in each for each in episodes):  # the zoo would draw no line
        sys.exit(f"sb3-acer plot-train: {runs[0]} must have episodes with is_success for -y success, got none")
    shortest = min((len(each) for each in episodes if len(each)), default=0)  # the zoo leaves out the others
    window = value_of(arguments, "-w", "--episode-window", type=int, default=fitting_window(shortest))
    if runs and not shortest:
        within = "" if shown == sys.maxsize else f" in the first {shown} steps"
        sys.exit(f"sb3-acer plot-train: {runs[0]} must have a finished episode{within}, got none")
    if runs and not 1 <= window <= shortest:  # the zoo would draw no line
        rule = f"from 1 to {shortest}, the episodes of the shortest run"
        sys.exit(f"sb3-acer plot-train: -w must be {rule}, got {window}")
    of_zoo = [*SAVED_LOGS, "-w", str(window)], [*arguments, "-e", *given.env]
    plot("plot-train", plot_train, *of_zoo, given.exp_folder[0], *given.algo, *given.env)


def runs_to_plot(name: str, arguments: list[str], files: str) -> tuple[list[Path], argparse.Namespace]:
    """
    :param name: of the command, which exits if there are no runs
    :param arguments: of the command
    :param files: pattern of the files in a run's folder that are plotted
    :return: the folders of the runs, and the arguments, with the environments as they are named there
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-a", "--algo", "--algos", nargs="+")
    parser.add_argument("-e", "--env", nargs="+")
    parser.add_argument("-f", "--exp-folder", "--exp-folders", nargs="+")
    parser.add_argument("-max", "--max-timesteps", type=int, default=sys.maxsize)
    options = parser.parse_known_args([*SAVED_LOGS, *arguments])[0]
    names = [env_id.replace("/", "-") for env_id in options.env]
    found: list[Path] = []
    for algo, (env_id, env_name) in product(options.algo, zip(options.env, names, strict=True)):
        folders = [Path(folder, algo.lower()) for folder in options.exp_folder]
        runs = [run for folder in folders for run in folder.glob("*") if env_name in run.name and any(run.glob(files))]
        if not runs and not asks_for_help(arguments):  # the zoo would draw it, with a score of 0
            place = " or ".join(map(str, folders))
            sys.exit(f"sb3-acer {name}: {place} must have a run of {env_id} with {files}, got none")
        found += runs
    options.env = names
    return found, options


def read_of(name: str, path: Path, read: Callable[[str], Any]) -> Any:
    """What ``read`` returns for the path; the command exits if it cannot be read."""
    try:
        return read(str(path))
    except (ValueError, IndexError, EOFError, BadZipFile) as error:
        sys.exit(f"sb3-acer {name}: {path} must be whole, got {error!r}")


def all_plots(arguments: list[str]) -> None:
    from rl_zoo3.plots import all_plots

    runs, given = runs_to_plot("all-plots", arguments, "evaluations.npz")
    shown = given.max_timesteps
    read = [read_of("all-plots", run / "evaluations.npz", lambda path: dict(np.load(path))) for run in runs]
    first = max((int(each["timesteps"][0]) for each in read), default=0)
    if shown < first:
        sys.exit(f"sb3-acer all-plots: --max-timesteps must be at least {first}, the first evaluation, got {shown}")
    plot("all-plots", all_plots, SAVED_LOGS, [*arguments, "-e", *given.env], given.exp_folder[0], *given.algo)


def plot_from_file(arguments: list[str]) -> None:
    from rl_zoo3.plots import plot_from_file

    others = [argument for argument in arguments if argument != "-iqm"]  # which would be read as -i qm
    if value_of(others, "-i", "--input") is None and not asks_for_help(arguments):
        sys.exit("sb3-acer plot-from-file: -i must name a file that all-plots has saved with --output")
    if {"-latex", "--latex"} & {*others} and which("latex") is None:
        sys.exit("sb3-acer plot-from-file: -latex needs LaTeX, which is not installed")
    plot("plot-from-file", plot_from_file, [], arguments, LOG_FOLDER)


def plot(
    name: str, script: Callable[[], None], defaults: list[str], arguments: list[str], folder: str, *shown: str
) -> None:
    """
    :param folder: the folder of the logs, in whose ``plots`` the figures are saved
    :param shown: algorithms and environments, with which the figures' file names begin: figures of others are kept
    """
    # The zoo gives its parsers a description in place of the program's name.
    parsers = SimpleNamespace(ArgumentParser=lambda description: argparse.ArgumentParser(description=description))
    figures = figures_saved(Path(folder, "plots"), "".join(f"{each}_" for each in shown))
    with figures, patch.dict(script.__globals__, argparse=parsers):
        run_zoo(name, script, defaults, arguments)


def learning_curve(steps: np.ndarray, rewards: np.ndarray, title: str) -> Figure:
    """
    Plot the episodes' rewards and their running mean.

    :param steps: environment steps taken until the end of each episode, ``[N]``
    :param rewards: sum of the rewards of each episode, ``[N]``
    :param title: title of the figure
    """
    figure = Figure(figsize=(8, 4.5))
    figure.subplots_adjust(left=0.12, right=0.98, bottom=0.12, top=0.92)
    axes = figure.add_subplot()
    axes.scatter(steps, rewards, s=9, color="tab:blue", alpha=0.3, linewidths=0)
    axes.scatter([], [], s=9, color="tab:blue", label="episode")  # for the legend, where a faint point cannot be seen
    window = fitting_window(len(rewards))
    mean_steps, means = window_func(steps, rewards, window, np.mean)
    axes.plot(mean_steps, means, color="tab:blue", linewidth=2, label=f"mean of the last {window} episodes")
    axes.set(title=title, xlabel="environment steps", ylabel="episode reward")
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="best")
    return figure


def fitting_window(n_episodes: int) -> int:
    """Number of episodes for a running mean that shows its course: a tenth, from 5 to 100, if there are as many."""
    return min(n_episodes, max(n_episodes // 10, 5), 100)
