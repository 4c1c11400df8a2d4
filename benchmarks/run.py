"""
Run experiments of `experiments.yml`, several at a time, and write their results to the tables in `results/`.

    python -m benchmarks.run cartpole acrobot --jobs 2
    python -m benchmarks.run --suite memory --seeds 4 5
    python -m benchmarks.run --list

A run is one seed of one experiment, in a process of its own; its log is in logs/benchmarks/EXPERIMENT/SEED, or, with
--results FOLDER, in FOLDER/logs/EXPERIMENT/SEED. Its rows are written when it ends. The same command without --again
leaves out runs that have rows. A run that was stopped begins anew, and one of Atari goes on.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from filelock import FileLock, Timeout
from tqdm import tqdm

from benchmarks.experiments import ROOT, Experiment, command, load_experiments, prepare
from benchmarks.outcome import LOG, Outcome, read_outcome
from benchmarks.tables import CURVES, FINAL, RESULTS, Row, read, replace

LOGS = ROOT / "logs" / "benchmarks"


class Planned(NamedTuple):
    experiment: Experiment
    seed: int

    def __str__(self) -> str:
        return f"{self.experiment.name}, seed {self.seed}"


class Running(NamedTuple):
    planned: Planned
    folder: Path
    process: "subprocess.Popen[bytes]"
    start: float
    lock: FileLock
    """held as long as the run is made"""

    def stop(self) -> None:
        """By a signal on which run-atari saves a checkpoint."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def final_table(experiment: Experiment, results: Path) -> Path:
    return results / ("ablations.csv" if experiment.suite == "ablations" else "final.csv")


def finished_seeds(experiment: Experiment, results: Path) -> set[int]:
    rows = read(final_table(experiment, results))
    return {int(row["seed"]) for row in rows if row["experiment"] == experiment.name}


def record(planned: Planned, outcome: Outcome, seconds: float, results: Path) -> None:
    experiment, seed = planned
    run: Row = {"experiment": experiment.name, "seed": str(seed)}
    agent = {"algorithm": experiment.algorithm, "environment": experiment.environment, "steps": str(outcome.steps)}
    scores = [{**run, **agent, "seconds": f"{seconds:.0f}", **score._asdict()} for score in outcome.scores]
    curve = [
        {
            **run,
            "step": str(point.step),
            "mean": f"{point.mean:.2f}",
            "deviation": f"{point.deviation:.2f}",
            "seconds": "" if point.seconds != point.seconds else f"{point.seconds:.0f}",
        }
        for point in outcome.curve
    ]
    replace(results / "curves.csv", CURVES, curve, ["experiment", "seed"])
    replace(
        final_table(experiment, results), FINAL, scores, ["experiment", "seed"]
    )  # last: it marks the run as finished


def start(planned: Planned, options: argparse.Namespace) -> Running:
    """
    :raises RuntimeError: if another program is making this run
    """
    experiment, seed = planned
    logs = LOGS if options.results.resolve() == RESULTS else options.results / "logs"
    folder = logs.absolute() / experiment.name / str(seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RuntimeError(f"{planned}: another program is making this run, in {folder}") from None
    if options.again:  # else run-atari would go on from the checkpoint of the finished run
        shutil.rmtree(folder, ignore_errors=True)
    prepare(experiment, folder)
    line = command(experiment, seed, folder, options.steps, options.device)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / LOG).open("wb") as log:
        # A session of its own: on Ctrl-C the zoo would evaluate and report an agent that is not trained.
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Running(planned, folder, process, time.perf_counter(), lock)


def finish(run: Running, results: Path, late: bool) -> str:
    """
    Record a run that has ended, or stop one that is late.

    :return: what to tell the user
    :raises RuntimeError: if the run has failed
    """
    seconds = time.perf_counter() - run.start
    if late:
        run.stop()
        reason = f"stopped after {seconds / 3600:.2f} hours"
    elif run.process.returncode:
        reason = f"exit status {run.process.returncode}"
    else:
        try:
            outcome = read_outcome(run.folder)
            seconds = outcome.seconds or seconds
            record(run.planned, outcome, seconds, results)
        except (ValueError, OSError) as error:
            reason = str(error)
        else:
            said = ", ".join(f"{score.mean} +/- {score.deviation} ({score.actions})" for score in outcome.scores)
            return f"{run.planned}: {said} in {seconds:.0f} s"
    last = "\n".join((run.folder / LOG).read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"{run.planned}: {reason}. The end of {run.folder / LOG}:\n{last}")


def run_all(planned: Sequence[Planned], options: argparse.Namespace) -> list[Planned]:
    """Make the runs, and return those that have failed."""
    waiting = list(planned)
    running: list[Running] = []
    failed: list[Planned] = []
    with tqdm(total=len(planned), unit="run") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < options.jobs:
                    try:
                        running.append(start(waiting[0], options))
                    except RuntimeError as error:
                        failed.append(waiting[0])
                        bar.write(str(error))
                        bar.update()
                    del waiting[0]
                time.sleep(0.2)
                for run in running.copy():
                    late = options.timeout is not None and time.perf_counter() - run.start > 3600 * options.timeout
                    if run.process.poll() is None and not late:
                        continue
                    running.remove(run)
                    try:
                        bar.write(finish(run, options.results, late))
                    except RuntimeError as error:
                        failed.append(run.planned)
                        bar.write(str(error))
                    run.lock.release()
                    bar.update()
        finally:
            for run in running:
                run.stop()
    return failed


def plan(options: argparse.Namespace, experiments: dict[str, Experiment]) -> list[Planned]:
    """The runs that are asked for and not finished."""
    chosen = [experiments[name] for name in options.names]
    chosen += [each for each in experiments.values() if each.suite == options.suite and each.settings_kept]
    planned = []
    for each in {experiment.name: experiment for experiment in chosen}.values():
        finished = set() if options.again else finished_seeds(each, options.results)
        planned += [Planned(each, seed) for seed in dict.fromkeys(options.seeds or each.seeds) if seed not in finished]
    return planned


def listing(experiments: dict[str, Experiment], results: Path) -> str:
    lines = []
    for each in experiments.values():
        seeds = f"{len(finished_seeds(each, results).intersection(each.seeds))} of {len(each.seeds)} seeds"
        lines.append(f"{each.suite:<15}{each.name:<48}{each.algorithm:<9}{each.environment:<36}{seeds}")
    return "\n".join(lines)


def parse(experiments: dict[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an experiment")
    parser.add_argument("--suite", choices=sorted({each.suite for each in experiments.values()}), help="all of a suite")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the experiments' own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--timeout", type=float, metavar="HOURS", help="stop a run that takes longer")
    parser.add_argument("--again", action="store_true", help="also runs that are finished; their rows are replaced")
    parser.add_argument("--device", default="cpu", help="of the networks")
    parser.add_argument("--steps", type=int, default=0, help="instead of the experiments' own; needs --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--list", action="store_true", help="print all experiments and how many seeds are finished")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(experiments))
    if unknown:
        parser.error(f"NAME must be an experiment of experiments.yml (see --list), got {', '.join(unknown)}")
    lost = [name for name in options.names if not experiments[name].settings_kept]
    if lost:
        parser.error(f"the settings of {', '.join(lost)} were not kept")
    if not (options.names or options.suite or options.list):
        parser.error("give a NAME, --suite or --list")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.steps and options.results.resolve() == RESULTS:
        parser.error("--steps makes other experiments than those of the tables: give a folder for theirs by --results")
    return options


def can_import(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def main() -> int:
    experiments = load_experiments()
    options = parse(experiments)
    if options.list:
        print(listing(experiments, options.results))
        return 0
    planned = plan(options, experiments)
    missing = sorted({name for each, _ in planned for name in each.packages if not can_import(name)})
    if missing:
        print(f"not installed: {', '.join(missing)} (extras of pyproject.toml)", file=sys.stderr)
        return 2
    if not planned:
        print("Nothing to do: all these runs are finished (--again makes them again).")
    else:
        try:
            options.results.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=options.results).close()
        except OSError as error:  # noticed before the first run and not after it
            print(f"--results must be a folder that can be written to: {error}", file=sys.stderr)
            return 2
    failed = run_all(planned, options) if planned else []
    if failed:
        print("Failed:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))  # which stops the runs too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
