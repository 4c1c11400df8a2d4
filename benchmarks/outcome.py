"""What a finished run leaves in its folder: the report in its log, and its evaluations or games on the way."""

import json
import re
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import pandas as pd
from stable_baselines3.common.monitor import get_monitor_files

LOG = "log.txt"
# sb3-acer's final report; with both kinds of actions, one after the other.
REPORT = re.compile(r"\((deterministic|stochastic) actions\)[\s\S]*?Mean reward: (\S+) \+/- (\S+)")
ACTIONS = {"deterministic": "deterministic", "stochastic": "sampled"}
GAMES, INTERVAL = 100, 25_000


class Score(NamedTuple):
    """Of the final agent, over 100 episodes."""

    actions: str
    mean: str
    deviation: str


class Point(NamedTuple):
    """Of a learning curve; the seconds count from the start of training."""

    step: int
    mean: float
    deviation: float
    seconds: float


class Outcome(NamedTuple):
    scores: list[Score]
    steps: int
    curve: list[Point]
    seconds: float | None
    """of training, where the parts of a run that was continued are known"""


def read_outcome(folder: Path) -> Outcome:
    """
    Read the results of a run.

    :raises ValueError: if there is no report
    """
    log = (folder / LOG).read_text(errors="replace")
    scores = [Score(ACTIONS[kind], mean, deviation) for kind, mean, deviation in REPORT.findall(log)]
    agent = re.search(r"^Agent: (.+)$", log, re.MULTILINE)
    if not scores or agent is None:
        raise ValueError(f"{folder / LOG} must end with a report on the agent")
    steps = json.loads(ZipFile(agent[1]).read("data"))["num_timesteps"]
    evaluations = next(folder.rglob("evaluations.npz"), None)
    if evaluations:
        return Outcome(scores, steps, curve_of_evaluations(evaluations), None)
    games = read_games(folder)
    return Outcome(scores, steps, curve_of_games(games), float(games[-1, 1]) if len(games) else None)


def curve_of_evaluations(path: Path) -> list[Point]:
    """
    rl-zoo's evaluations. When they were made is known from the ends of the training episodes: after n steps of one of N
    environments training has made n * N. It is unknown where Monitor counted repeated frames.
    """
    with np.load(path) as arrays:
        steps, rewards = arrays["timesteps"], arrays["results"]
    known = np.array(sorted(ends_of_episodes(path.parent))).reshape(-1, 2)
    is_known = len(known) > 0 and known[-1, 0] < 1.5 * steps[-1]
    seconds = np.interp(steps, *known.T) if is_known else np.full(len(steps), np.nan)
    return [
        Point(int(step), float(each.mean()), float(each.std()), float(time))
        for step, each, time in zip(steps, rewards, seconds, strict=True)
    ]


def ends_of_episodes(folder: Path) -> list[tuple[float, float]]:
    """Steps of training and seconds since its start, where an episode of one of the environments ended."""
    files = get_monitor_files(str(folder))
    starts, tables = [], []
    for name in files:
        with open(name) as file:
            starts.append(float(json.loads(file.readline()[1:])["t_start"]))
            tables.append(pd.read_csv(file))
    return [
        (float(steps), start - min(starts) + float(seconds))
        for start, table in zip(starts, tables, strict=True)
        for steps, seconds in zip(table["l"].cumsum() * len(files), table["t"], strict=True)
    ]


def read_games(folder: Path) -> np.ndarray:
    """Score, seconds of training and step of each training game of ``run-atari``, over all parts of the run."""
    games = np.empty((0, 3))
    for part in sorted(folder.glob("*.monitor.csv"), key=first_step):
        lines = [line.split(",") for line in part.read_text().splitlines()[2:]]
        columns = np.array(lines, float).reshape(-1, 4)[:, [0, 2, 3]]  # of r, l, t, steps
        games = games[games[:, 2] <= first_step(part)]  # what came after the checkpoint was played again
        if len(games) and len(columns) and columns[0, 1] < games[-1, 1]:  # else the checkpoint had the time as well
            columns[:, 1] += games[-1, 1]
        games = np.append(games, columns, 0)
    return games


def first_step(part: Path) -> int:
    return int(part.name.split(".")[0])


def curve_of_games(games: np.ndarray) -> list[Point]:
    """The last 100 games, every 25,000 steps."""
    curve = []
    for step in range(INTERVAL, int(games[-1, 2]) + 1 if len(games) else 0, INTERVAL):
        played = games[games[:, 2] <= step]
        if len(played):
            scores = played[-GAMES:, 0]
            curve.append(Point(step, float(scores.mean()), float(scores.std()), float(played[-1, 1])))
    return curve
