"""The folders of runs: which there are, which can be resumed, and the command lines that name them."""

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_sb3 import EnvironmentName

from sb3_acer.checkpoint import has_checkpoints

CHECKPOINTS, ARGUMENTS, LAUNCHERS = "checkpoints", "arguments.json", "launchers.json"  # in the folder of a run
LOG_FOLDER = "logs"  # where the zoo's train saves; the default of its other scripts is rl-trained-agents


quoted = subprocess.list2cmdline if os.name == "nt" else shlex.join
"""Joins the words of a command line, so that it can be pasted into a shell."""


def launcher() -> list[Any]:
    """Host and process number of what has started this process. With torchrun they stay the same for all restarts."""
    return [socket.gethostname(), os.getppid()]


def runs_of(algo: str, env_id: str, folder: str) -> list[tuple[int, Path]]:
    """Numbers and folders of an environment's runs, the newest first."""
    env_name = EnvironmentName(env_id)
    named = re.compile(rf"{re.escape(env_name)}_(\d+)(_[0-9a-f-]{{36}})?")  # the latter by --uuid
    runs = [(int(match[1]), path) for path in Path(folder, algo).glob("*") if (match := named.fullmatch(path.name))]
    return sorted(runs, key=lambda run: (run[0], run[1].stat().st_mtime), reverse=True)


def run_to_resume(algo: str, env_id: str, folder: str, number: str = "", restarted: bool = False) -> Path | None:
    """
    :param number: of the run, as its folder's name has it; empty for the newest
    :param restarted: whether to consider only runs that this process's launcher has started
    :return: folder of the newest such run that has a checkpoint, None if there is none
    """
    for _, path in runs_of(algo, env_id, folder):
        if number and path.name != f"{EnvironmentName(env_id)}_{number}":
            continue
        launchers = path / LAUNCHERS
        is_mine = launchers.exists() and launcher() in json.loads(launchers.read_text())
        if (is_mine or not restarted) and has_checkpoints(path / CHECKPOINTS) and (path / ARGUMENTS).exists():
            return path
    return None


def command(name: str, algo: str, env_id: str, folder: str, gym_packages: Sequence[str] = ()) -> str:
    """The command line that a user would type: without options that have their default value."""
    options = {"--algo": (algo, "acer"), "--env": (env_id, "CartPole-v1"), "-f": (folder, LOG_FOLDER)}
    given = [part for key, (value, usual) in options.items() if value != usual for part in (key, value)]
    packages = ["--gym-packages", *gym_packages] if gym_packages else []
    return quoted(["sb3-acer", name, *given, *packages])
