"""
Print the tables of README.md, between its markers, and draw the figures, from the CSVs in `results/`.

    python -m benchmarks.report
    python -m benchmarks.report --check    # fails if the tables in README.md are not those of the CSVs
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.experiments import DEFINITIONS, Experiment, load_experiments
from benchmarks.tables import RESULTS, Row, growth_per_hour, interquartile_mean, interval, latest
from benchmarks.tables import read as read_anew

README = Path(__file__).with_name("README.md")
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
EXPERIMENTS = load_experiments()
SAMPLED = ", actions sampled"
ALGORITHMS = {"qrdqn": "QR-DQN", "ppo_lstm": "RecurrentPPO"}  # the others are called as rl-zoo calls them, in capitals


read = cache(read_anew)


@cache
def by_experiment(table: str) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in read(RESULTS / table):
        rows[row["experiment"]].append(row)
    return rows


def rows_of(table: str, experiment: str) -> list[Row]:
    return by_experiment(table).get(experiment, [])


def number(value: float) -> str:
    if value == round(value):
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 2 else f"{value:.1f}"


def short(steps: float) -> str:
    """1500000: 1.5M"""
    scale, unit = (1e6, "M") if steps >= 999_500 else (1e3, "k")
    return f"{steps / scale:.3g}{unit}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without those columns that are empty."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    lines = [f"| {' | '.join(line)} |" for line in zip(*columns, strict=True)]
    return "\n".join([lines[0], "|" + " --- |" * len(columns), *lines[1:]])


def label(experiment: Experiment) -> str:
    return experiment.label or experiment.environment + f", {algorithm(experiment)}" * (experiment.algorithm != "acer")


def algorithm(experiment: Experiment) -> str:
    return ALGORITHMS.get(experiment.algorithm, experiment.algorithm.upper())


def finals(experiment: Experiment) -> dict[str, list[Row]]:
    """Rows of the final agents, by the kind of actions that they took."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in rows_of("ablations.csv" if experiment.suite == "ablations" else "final.csv", experiment.name):
        rows[row["actions"]].append(row)
    return rows


def score(rows: list[Row]) -> str:
    """Interquartile mean over the seeds, with its interval where there is more than one."""
    means = np.array([float(row["mean"]) for row in rows])
    low, high = interval(means)
    return number(float(interquartile_mean(means))) + (f" [{number(low)}, {number(high)}]" if len(means) > 1 else "")


def first_good_evaluations(experiment: Experiment) -> list[Row]:
    """Of each seed, the first evaluation that reached the score; its step is infinite if none did."""
    if experiment.solved is None:
        return []
    first: dict[str, Row] = {}
    for row in rows_of("curves.csv", experiment.name):
        known = first.setdefault(row["seed"], {"step": "inf", "seconds": "inf"})
        if known["step"] == "inf" and float(row["mean"]) >= experiment.solved:
            first[row["seed"]] = row
    return list(first.values())


def steps_to_score(experiment: Experiment) -> list[float]:
    """Of each seed; infinite if no evaluation reached the score."""
    return [float(row["step"]) for row in first_good_evaluations(experiment)]


def first_solved(experiment: Experiment) -> str:
    """Medians of the steps and of the seconds to the score, and how many seeds reached it."""
    steps = steps_to_score(experiment)
    if not steps:
        return ""
    reached = f"{np.isfinite(steps).sum()} of {len(steps)} seeds"
    if not np.isfinite(np.median(steps)):
        return f"{number(experiment.solved or 0)}: {reached}"
    seconds = np.median([float(row["seconds"] or "nan") for row in first_good_evaluations(experiment)])
    time = f" ({seconds:.0f} s)" if np.isfinite(seconds) else ""
    return f"{number(experiment.solved or 0)}: {short(float(np.median(steps)))}{time}, {reached}"


def speed_by_variant() -> dict[str, float]:
    """Of experiments, environment steps per second of training."""
    return {row["variant"]: float(row["value"]) for row in read(RESULTS / "speed.csv")}


def race() -> str:
    """Steps and time to a score, of all experiments that have one to reach and whose speed is measured."""
    speeds = speed_by_variant()
    found: dict[str, list[tuple[float, list[str]]]] = defaultdict(list)
    for each in EXPERIMENTS.values():
        steps = steps_to_score(each)
        if steps and each.name in speeds:
            median, speed = float(np.median(steps)), speeds[each.name]
            seconds = median / speed
            shown = f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"
            times = [short(median), shown] if np.isfinite(median) else ["not reached", ""]
            reached = f"{np.isfinite(steps).sum()} of {len(steps)}"
            task = f"{each.environment}, {number(each.solved or 0)}"
            name = algorithm(each) + f", `{each.name}`" * bool(each.params)
            found[task].append((median / speed, [name, reached, *times, f"{speed:,.0f}"]))
    rows = [[task, *row] for task, each in found.items() for _, row in sorted(each)]
    return markdown(["task and score", "algorithm", "seeds that reached it", "steps", "seconds", "steps/s"], rows)


def learning(suite: str) -> str:
    """The final agents of a suite."""
    header = ["task", "steps", "seeds", "IQM [95 %]", "mean", "deviation", "first reached", "published", "seconds"]
    rows = []
    for experiment in EXPERIMENTS.values():
        found = finals(experiment) if experiment.suite == suite else {}
        for kind, (actions, agents) in enumerate(found.items()):
            means = np.array([float(row["mean"]) for row in agents])
            seconds = [float(row["seconds"]) for row in agents if row["seconds"]]
            rows.append(
                [
                    label(experiment) + SAMPLED * (actions == "sampled"),
                    short(float(agents[0]["steps"])),
                    str(len(agents)),
                    score(agents),
                    number(means.mean()),
                    number(means.std(ddof=1)) if len(means) > 1 else "",
                    first_solved(experiment) if kind == 0 else "",  # evaluations on the way were of one kind
                    experiment.published,
                    f"{np.median(seconds):.0f}" if seconds else "",
                ]
            )
    return markdown(header, rows)


def ablations() -> str:
    """What was tried, beside what was kept."""
    rows = []
    for each in EXPERIMENTS.values():
        if each.suite == "ablations":
            reference = finals(EXPERIMENTS[each.reference])
            for actions, agents in finals(each).items():
                label_of_row = each.label + SAMPLED * (actions == "sampled")
                tried = [each.environment, label_of_row, str(len(agents)), score(agents)]
                kept = score(reference[actions]) if reference[actions] else ""
                rows.append([*tried, kept, each.lesson, f"`{each.name}`"])
    return markdown(["task", "tried", "seeds", "IQM [95 %]", "reference", "learnt", "experiment"], rows)


def studies() -> str:
    """The searches for settings. The first trial of each had the former entry's settings."""
    trials: dict[str, list[Row]] = defaultdict(list)
    for row in read(RESULTS / "studies.csv"):
        trials[row["study"]].append(row)
    rows = []
    for name, all_trials in trials.items():
        complete = [row for row in all_trials if row["state"] == "complete"]
        best = max(complete, key=lambda row: float(row["value"]))
        rows.append(
            [
                EXPERIMENTS[name].environment,
                str(len(all_trials)),
                str(len(complete)),
                number(float(all_trials[0]["value"])),
                number(float(best["value"])),
                best["trial"],
                f"{sum(float(row['seconds'] or 0) for row in all_trials) / 60:.0f}",
            ]
        )
    return markdown(["task", "trials", "complete", "the first", "the best", "its number", "minutes"], rows)


def study_commands() -> str:
    commands = yaml.safe_load(DEFINITIONS.read_text())["studies"].values()
    return "\n".join(["```", *commands, "```"])


def forgetting() -> str:
    """The second halves of long runs, by the size of the replay buffer and the remedy."""
    runs: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read(RESULTS / "forgetting.csv"):
        runs[row["buffer_size"], row["remedy"], row["seed"]].append(row)
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for (buffer_size, remedy, _), rows in runs.items():
        late = rows[len(rows) // 2 :]
        n_episodes = [float(row["episodes"]) for row in late]
        n_lost = sum(float(row["lost"]) * n for row, n in zip(late, n_episodes, strict=True))
        means = [float(np.mean([float(row[name]) for row in late])) for name in ("failures", "action_gap", "edge_gap")]
        found[buffer_size, remedy].append([sum(n_episodes), n_lost, *means])
    lines = []
    for tried, each in found.items():
        means = np.mean(each, 0)[2:]
        lost = ", ".join(f"{n_lost:.0f} of {n:.0f}" for n, n_lost, *_ in each)
        lines.append([*tried, lost, *(f"{mean:.2g}" for mean in means)])
    measured = [
        "episodes below 475, by seed",
        "failures in the buffer",
        "Q(catch) - Q(other), falling",
        "V(centre) - V(edge)",
    ]
    return markdown(["buffer_size", "remedy", *measured], lines)


def runs_from_checkpoints() -> dict[tuple[str, str], list[Row]]:
    """How agents went on from a checkpoint before a fall, by the remedy and the seed."""
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read(RESULTS / "falls.csv"):
        runs[row["remedy"], row["seed"]].append(row)
    return runs


def falls() -> str:
    lines = []
    for (remedy, seed), rows in runs_from_checkpoints().items():
        rewards, medians, kls, changes, probabilities = (
            np.array([float(row[name]) for row in rows])
            for name in ("reward", "median_kl", "largest_kl", "largest_change", "rewarded_action")
        )
        numbers = [rewards.mean(), rewards.min(), probabilities[-1]]
        lines.append(
            [
                remedy or "none",
                seed,
                *(f"{value:.2f}" for value in numbers),
                *(f"{value:.2g}" for value in (np.median(medians), kls.max(), changes.max())),
            ]
        )
    rewarded = ["mean reward", "the worst 1,000 steps", "pi of rewarded actions, at the end"]
    moved = ["KL of an update, median", "the largest", "largest change of parameters"]
    return markdown(["remedy", "seed", *rewarded, *moved], lines)


def measured_memory() -> dict[str, list[tuple[float, float]]]:
    """Resident memory in MiB at some seconds, by the kind of policy."""
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in read(RESULTS / "soak.csv"):
        measured[row["kind"]].append((float(row["second"]), float(row["mib"])))
    return measured


def soak() -> str:
    steps = {row["kind"]: row["steps"] for row in read(RESULTS / "soak.csv")}
    rows = [
        [
            kind,
            f"{each[-1][0] / 60:.0f}",
            f"{int(steps[kind]):,}",
            f"{each[-1][1]:.0f}",
            f"{round(growth_per_hour(each), 2) + 0.0:+.2f}",  # never -0.00: versions of numpy differ in the sign
        ]
        for kind, each in measured_memory().items()
    ]
    return markdown(["policy", "minutes", "steps", "MiB at the end", "growth, MiB an hour"], rows)


def snippets() -> str:
    """Scores of the documentation's snippets."""
    scores: dict[str, list[Row]] = defaultdict(list)
    for row in read(RESULTS / "snippets.csv"):
        scores[row["snippet"]].append(row)
    rows = [[name, ", ".join(number(float(row["mean"])) for row in each)] for name, each in scores.items()]
    return markdown(["snippet", "scores by seed"], rows)


def speed(prefix: str) -> str:
    """
    Medians of the benchmarks whose names begin so: a column for each unit, and the median of the ratios to the first
    variant's runs, which are interleaved with the others.
    """
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in read(RESULTS / "speed.csv"):
        if row["benchmark"].startswith(prefix):
            variants = values.setdefault(row["benchmark"], {})
            variants.setdefault(row["variant"], {}).setdefault(row["unit"], []).append(float(row["value"]))
    rows, units = [], list(dict.fromkeys(unit for each in values.values() for one in each.values() for unit in one))
    for benchmark, variants in values.items():
        first = next(iter(variants.values()))[units[0]]
        for name, one in variants.items():
            medians = [float(np.median(one[unit])) for unit in units]
            cells = [f"{median:,.0f}" if median >= 100 else f"{median:.3g}" for median in medians]
            has_ratio = units[0].endswith("/s") or "floor" in variants
            ratio = f"{np.median(np.divide(one[units[0]], first)):.2f}" if has_ratio else ""
            rows.append([benchmark.removeprefix(prefix).lstrip(", "), name, *cells, ratio])
    return markdown(["benchmark", "variant", *units, "ratio"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "learning": learning,
    "ablations": ablations,
    "studies": studies,
    "study_commands": study_commands,
    "forgetting": forgetting,
    "falls": falls,
    "soak": soak,
    "snippets": snippets,
    "speed": speed,
    "race": race,
}


def fill(text: str) -> str:
    """The text with the tables as the CSVs give them. A marker names a table and what it is of."""

    def table(match: "re.Match[str]") -> str:
        name, *arguments = match[2].split(maxsplit=1)
        return f"{match[1]}{TABLES[name](*arguments)}\n{match[3]}"

    return TABLE.sub(table, text)


def curves_of(experiment: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and mean rewards of the evaluations of each seed."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in rows_of("curves.csv", experiment):
        rows[row["seed"]].append(row)
    columns = {seed: [(float(row["step"]), float(row["mean"])) for row in each] for seed, each in rows.items()}
    return {seed: (np.array(each)[:, 0], np.array(each)[:, 1]) for seed, each in columns.items()}


def over_a_suite(
    experiments: Sequence[str], scores: Sequence[Sequence[float]], scales: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """
    Mean over tasks of the interquartile mean over seeds, of normalised scores.

    :param experiments: one of each task
    :param scores: of each task those that count as 0, also before the first evaluation, and as 1
    :param scales: of each task what a step counts for on the axis
    :return: places on the axis, and the scores there
    """
    curves = [list(curves_of(name).values()) for name in experiments]
    ends = [
        (steps[0] * scale, steps[-1] * scale) for each, scale in zip(curves, scales, strict=True) for steps, _ in each
    ]
    at = np.geomspace(min(first for first, _ in ends), max(last for _, last in ends), 400)
    found = []
    for seeds, (low, high), scale in zip(curves, scores, scales, strict=True):
        values = np.stack([latest(steps * scale, means, at, low) for steps, means in seeds], -1)
        found.append((interquartile_mean(values) - low) / (high - low))
    return at, np.mean(found, 0)


def draw_suites(suites: dict[str, dict[str, Any]]) -> None:
    """Algorithms over whole suites, against steps and against seconds of training."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    speeds = speed_by_variant()
    figure = Figure(figsize=(4 * len(suites), 6), layout="constrained")
    grid = figure.subplots(2, len(suites), squeeze=False, sharey="col")
    colours = {
        name: f"C{i}" for i, name in enumerate(dict.fromkeys(n for each in suites.values() for n in each["lines"]))
    }
    for (above, below), (title, suite) in zip(grid.T, suites.items(), strict=True):
        for algorithm, experiments in suite["lines"].items():
            seconds = [1 / speeds[name] for name in experiments]
            for axes, scales in ((above, [1.0] * len(experiments)), (below, seconds)):
                line = over_a_suite(experiments, suite["scores"], scales)
                axes.semilogx(*line, color=colours[algorithm], linewidth=2)
                axes.xaxis.set_minor_formatter(NullFormatter())
        finish_panel(above, title)
        finish_panel(below, "")
        above.set_xlabel("environment steps")
        below.set_xlabel("seconds of one core")
        below.xaxis.set_major_formatter("{x:g}")
    handles = [grid[0, 0].plot([], [], color=colour, linewidth=2)[0] for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside upper center", ncols=len(colours), frameon=False)
    figure.supylabel("normalised score", fontsize=10)
    figure.savefig(RESULTS / "suites.png", dpi=110)


def draw(name: str, panels: dict[str, dict[str, str]]) -> None:
    """Learning curves, a panel for each title: the interquartile mean over the seeds and its interval."""
    from matplotlib.figure import Figure  # not needed for --check

    n_columns = 3 if len(panels) % 3 == 0 else 2
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(4 * n_columns, 3 * n_rows + 0.6), layout="constrained")
    legends = dict.fromkeys(legend for lines in panels.values() for legend in lines)
    colours = {legend: f"C{i}" for i, legend in enumerate(legends)}
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for legend, experiment in lines.items():
            draw_curve(axes, experiment, colours[legend])
        finish_panel(axes, title)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    handles = [figure.axes[0].plot([], [], color=colour, linewidth=2)[0] for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside upper center", ncols=len(colours), frameon=False)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean reward of an evaluation", fontsize=10)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def draw_curve(axes: Any, experiment: str, colour: str) -> None:
    curve: dict[int, list[float]] = defaultdict(list)
    for row in rows_of("curves.csv", experiment):
        curve[int(row["step"])].append(float(row["mean"]))
    steps = sorted(curve)
    seeds = [np.array(curve[step]) for step in steps]
    low, high = zip(*(interval(each, 1000) for each in seeds), strict=True)
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(steps, [interquartile_mean(each) for each in seeds], color=colour, linewidth=2)


def finish_panel(axes: Any, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, fontsize=10)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0 if axes.get_xscale() == "linear" else None)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def draw_falls() -> None:
    """Rewards, and how far the updates moved the policy."""
    from matplotlib.figure import Figure

    runs = runs_from_checkpoints()
    remedies = list(dict.fromkeys(remedy for remedy, _ in runs))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    rewards, divergences = figure.subplots(1, 2)
    for number_of_remedy, remedy in enumerate(remedies):
        style = {"color": f"C{number_of_remedy - 1}"} if remedy else {"color": "black", "linewidth": 2.5, "zorder": 3}
        for rows in (rows for (its_remedy, _), rows in runs.items() if its_remedy == remedy):
            for axes, name in ((rewards, "reward"), (divergences, "largest_kl")):
                axes.plot([int(row["step"]) for row in rows], [float(row[name]) for row in rows], **style)
        rewards.plot([], [], label=remedy or "no remedy", **style)
    finish_panel(rewards, "mean reward of the episodes")
    finish_panel(divergences, "largest KL(before || after) of an update")
    divergences.set_yscale("log")
    steps = [int(row["step"]) for rows in runs.values() for row in rows]
    for axes in (rewards, divergences):
        axes.set_xlim(min(steps), max(steps))
        axes.set_xlabel("environment steps")
    figure.legend(*rewards.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(RESULTS / "falls.png", dpi=110)


def draw_memory() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    for kind, measured in measured_memory().items():
        seconds, mib = np.array(measured).T
        axes.plot(seconds / 60, mib, linewidth=2, label=kind)
    finish_panel(axes, "")
    axes.set(xlabel="minutes", ylabel="resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "memory_of_training.png", dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    options = parser.parse_args()
    text = README.read_text()
    filled = fill(text)
    if options.check:
        if filled != text:
            print("benchmarks/README.md is not what the CSVs give: run python -m benchmarks.report", file=sys.stderr)
        return int(filled != text)
    README.write_text(filled)
    definitions = yaml.safe_load(DEFINITIONS.read_text())
    for name, panels in definitions["figures"].items():
        draw(name, panels)
    draw_suites(definitions["suite_figure"])
    draw_falls()
    draw_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())
