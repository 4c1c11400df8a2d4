"""The tables in `results/`: how they are read and written, and the statistics of a column of seeds."""

import csv
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import scipy  # whose parts are imported where they are first used

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, str]
Measurement = tuple[str, str, int, float, str]
"""of speed: benchmark, variant, run, value, unit"""

# The columns of each table, then those that say which row it is. `deviation` is over episodes of one agent.
FINAL = ("experiment", "algorithm", "environment", "actions", "seed", "steps", "mean", "deviation", "seconds")
CURVES = ("experiment", "seed", "step", "mean", "deviation", "seconds")
FORGETTING = ("buffer_size", "remedy", "seed", "step", "episodes", "lost", "failures", "action_gap", "edge_gap")
FALLS = ("remedy", "seed", "step", "reward", "median_kl", "largest_kl", "largest_change", "rewarded_action")
SOAK = ("kind", "second", "mib", "steps")
SNIPPETS = ("snippet", "seed", "mean")
SPEED = ("benchmark", "variant", "run", "value", "unit")

NUMBERS = ("buffer_size", "seed", "step", "second")

# What the rows are sorted by; those of SPEED stay in the order in which they were measured.
ORDERS: dict[tuple[str, ...], tuple[str, ...]] = {
    FINAL: ("experiment", "seed", "actions"),
    CURVES: ("experiment", "seed", "step"),
    FORGETTING: ("buffer_size", "remedy", "seed", "step"),
    FALLS: ("remedy", "seed", "step"),
    SOAK: ("kind", "second"),
    SNIPPETS: ("snippet", "seed"),
    SPEED: (),
}


def read(path: Path) -> list[Row]:
    """The rows of a table; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def replace(path: Path, columns: tuple[str, ...], rows: Sequence[Row], keys: Sequence[str]) -> None:
    """
    Put rows into a table in place of those that agree with one of them in ``keys``. The file is replaced as a whole,
    one process at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        new = {tuple(row[key] for key in keys) for row in rows}
        kept = [row for row in read(path) if tuple(row[key] for key in keys) not in new]
        write(path, columns, [*kept, *rows])


def write(path: Path, columns: tuple[str, ...], rows: Sequence[Row]) -> None:
    def order(row: Mapping[str, str]) -> list[tuple[float, str]]:
        return [(float(row[key]), "") if key in NUMBERS else (0.0, row[key]) for key in ORDERS[columns]]

    beside = path.with_suffix(".unfinished")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=order))
    os.replace(beside, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process writes to the folder's tables."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def record_speed(rows: Sequence[Measurement], keys: Sequence[str] = ("benchmark",)) -> None:
    """Write measurements in place of the former ones that agree in ``keys``."""
    texts = [[benchmark, variant, str(run), f"{value:.6g}", unit] for benchmark, variant, run, value, unit in rows]
    table = [dict(zip(SPEED, text, strict=True)) for text in texts]
    replace(RESULTS / "speed.csv", SPEED, table, keys)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without its lowest and its highest quarter: of five seeds the middle three."""
    return np.asarray(scipy.stats.trim_mean(values, 0.25, axis=-1))


def interval(values: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the interquartile mean over seeds; the same for the same values."""
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values)))
    low, high = np.percentile(interquartile_mean(drawn), [2.5, 97.5])
    return float(low), float(high)


def latest(known: np.ndarray, values: np.ndarray, at: np.ndarray, before: float) -> np.ndarray:
    """The last of ``values``, which are known from the ascending places ``known`` on, at each place of ``at``."""
    return np.concatenate(([before], values))[np.searchsorted(known, at, "right")]


def growth_per_hour(measured: Sequence[tuple[float, float]]) -> float:
    """Median slope between any two of the second half of measurements at some seconds (Theil and Sen)."""
    seconds, values = np.array(measured[len(measured) // 2 :]).T
    return float(scipy.stats.theilslopes(values, seconds).slope * 3600)
