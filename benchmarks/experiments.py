"""The experiments of `experiments.yml`, and the command that makes one run of one of them."""

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sb3_acer.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[1]
DEFINITIONS = Path(__file__).with_name("experiments.yml")
ENTRIES = ROOT / "sb3_acer" / "hyperparams" / "acer.yml"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """
    One algorithm with one set of settings on one environment. The settings are the algorithm's own entry for the
    environment: of acer.yml for ACER, of rl-zoo's files for the others. The fields below say what differs.

    :param suite: the group it belongs to
    :param algorithm: rl-zoo's name of it
    :param seeds: those that the results have; a number N in the file means 0 to N - 1
    :param label: its name in tables, if not the environment
    :param command: of sb3-acer: train or run-atari
    :param ranks: number of processes that share the run under torchrun
    :param conf: where to take the entry from, as rl-zoo's -conf
    :param entry: another entry of acer.yml
    :param settings: the whole entry, written out
    :param params: values that replace those of the entry
    :param steps: number of steps, if not the entry's
    :param eval_freq: steps between two evaluations on the way
    :param eval_episodes: episodes of each of them
    :param packages: modules that register the environment
    :param arguments: further arguments of the command
    :param solved: a mean reward; the tables then say when an evaluation first reached it
    :param published: what others have published
    :param reference: an ablation's experiment to compare with
    :param lesson: what was learnt from it
    :param note: what else should be known
    :param settings_kept: False if nobody can run it again
    """

    name: str
    suite: str
    environment: str
    algorithm: str = "acer"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    label: str = ""
    command: str = "train"
    ranks: int = 1
    conf: str = ""
    entry: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    eval_freq: int = 10_000
    eval_episodes: int = 10
    packages: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    solved: float | None = None
    published: str = ""
    reference: str = ""
    lesson: str = ""
    note: str = ""
    settings_kept: bool = True


def load_experiments(path: Path = DEFINITIONS) -> dict[str, Experiment]:
    """
    All experiments by name. A list of algorithms makes one experiment of each, named NAME_ALGORITHM.

    :raises ValueError: if a name occurs twice
    """
    experiments: dict[str, Experiment] = {}
    for suite, entries in yaml.safe_load(path.read_text())["suites"].items():
        for name, entry in entries.items():
            algorithm = entry.get("algorithm", "acer")
            names = {f"{name}_{each}": each for each in algorithm} if isinstance(algorithm, list) else {name: algorithm}
            seeds = entry.get("seeds", 5)
            seeds = list(range(seeds)) if isinstance(seeds, int) else seeds
            for full_name, each in names.items():
                if full_name in experiments:
                    raise ValueError(f"names must differ, got {full_name!r} twice")
                fields = {**entry, "algorithm": each, "seeds": seeds}
                experiments[full_name] = Experiment(name=full_name, suite=suite, **fields)
    return experiments


def prepare(experiment: Experiment, folder: Path) -> None:
    """Make the folder of a run, with the entry in it where that is not a file's. A former run's folder is emptied,
    unless ``run-atari`` can go on from a checkpoint in it."""
    if not resumable(experiment, folder):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings = experiment.settings
    if experiment.entry:
        settings = yaml.safe_load(ENTRIES.read_text())[experiment.entry]
    if settings:
        (folder / "conf.yml").write_text(yaml.safe_dump({experiment.environment: settings}, sort_keys=False))


def resumable(experiment: Experiment, folder: Path) -> bool:
    return experiment.command == "run-atari" and find_checkpoint(folder) is not None


def command(experiment: Experiment, seed: int, folder: Path, steps: int = 0, device: str = "cpu") -> list[str]:
    """The command line of a run whose folder is prepared; ``steps`` instead of the experiment's, if given."""
    steps = steps or experiment.steps
    if experiment.command == "run-atari":
        line = [sys.executable, str(Path(__file__).with_name("run_atari.py")), "--env", experiment.environment]
        line += ["--seed", str(seed), "--logdir", str(folder), "--device", device, *experiment.arguments]
        line += ["--num-timesteps", str(steps)] if steps else []
        return line + ["--resume"] * resumable(experiment, folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(experiment.ranks)]
    line = [sys.executable, *(launcher if experiment.ranks > 1 else []), "-m", "sb3_acer", "train"]
    line += ["--algo", experiment.algorithm, "--env", experiment.environment]
    line += ["--seed", str(seed), "-f", str(folder), "--verbose", "0", "--num-threads", "1", "--device", device]
    line += ["--n-eval-envs", "5", "--eval-freq", str(experiment.eval_freq)]
    line += ["--eval-episodes", str(experiment.eval_episodes)]
    conf = str(folder / "conf.yml") if experiment.entry or experiment.settings else experiment.conf
    line += ["-conf", conf] if conf else []
    line += ["-n", str(steps)] if steps else []
    line += ["--gym-packages", *experiment.packages] if experiment.packages else []
    line += ["-params", *(f"{key}:{value!r}" for key, value in experiment.params.items())] if experiment.params else []
    return line + experiment.arguments
