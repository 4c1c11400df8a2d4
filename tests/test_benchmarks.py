"""The benchmarks' tables: what is in them is defined, and README.md shows what they hold."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import experiments, outcome, report, run, tables
from sb3_acer import ACER


def test_readme_shows_what_the_tables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    assert report.main() == 0, "run python -m benchmarks.report"


@pytest.mark.parametrize("table", ["final.csv", "ablations.csv"])
def test_every_agent_is_of_an_experiment(table: str) -> None:
    known = experiments.load_experiments()
    for row in tables.read(tables.RESULTS / table):
        experiment = known[row["experiment"]]
        assert (experiment.algorithm, experiment.environment) == (row["algorithm"], row["environment"])
        assert (experiment.suite == "ablations") == (table == "ablations.csv")


def test_list_of_algorithms_makes_an_experiment_of_each(tmp_path: Path) -> None:
    path = tmp_path / "experiments.yml"
    path.write_text("suites: {classic: {pole: {environment: CartPole-v1, algorithm: [ppo, a2c], seeds: 2}}}")
    known = experiments.load_experiments(path)
    assert {name: (each.algorithm, each.seeds) for name, each in known.items()} == {
        "pole_ppo": ("ppo", [0, 1]),
        "pole_a2c": ("a2c", [0, 1]),
    }
    assert "-conf" not in experiments.command(known["pole_ppo"], 1, tmp_path)


def test_run_has_the_entry_that_its_experiment_names(tmp_path: Path) -> None:
    experiment = experiments.load_experiments()["default_cartpole"]
    experiments.prepare(experiment, tmp_path / "run")
    line = experiments.command(experiment, 1, tmp_path / "run", steps=100)
    conf = Path(line[line.index("-conf") + 1])
    assert "CartPole-v1:" in conf.read_text()
    assert line[line.index("-n") + 1] == "100"


def test_an_atari_run_with_a_checkpoint_goes_on_and_others_begin_again(tmp_path: Path) -> None:
    known = experiments.load_experiments()
    ACER("MlpPolicy", "CartPole-v1", device="cpu").save_checkpoint(tmp_path)
    experiments.prepare(known["pong"], tmp_path)
    assert "--resume" in experiments.command(known["pong"], 0, tmp_path)
    experiments.prepare(known["cartpole"], tmp_path)
    assert not list(tmp_path.iterdir())
    assert "--resume" not in experiments.command(known["pong"], 0, tmp_path)


def test_a_run_that_is_made_again_does_not_go_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = run.Planned(experiments.load_experiments()["pong"], 0)
    ACER("MlpPolicy", "CartPole-v1", device="cpu").save_checkpoint(tmp_path / "pong" / "0")
    lines: list[list[str]] = []
    monkeypatch.setattr(run, "LOGS", tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda line, **_: lines.append(line))
    for again in (False, True):
        run.start(planned, argparse.Namespace(again=again, steps=0, device="cpu"))
    assert ["--resume" in line for line in lines] == [True, False]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 20])
def test_interquartile_mean_leaves_out_the_lowest_and_the_highest_quarter(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(3, n))
    middle = np.sort(values)[:, n // 4 : n - n // 4]
    np.testing.assert_allclose(tables.interquartile_mean(values), middle.mean(-1))


def test_interval_is_around_the_interquartile_mean_and_always_the_same() -> None:
    values = np.random.default_rng(0).normal(size=10)
    low, high = tables.interval(values)
    assert low < tables.interquartile_mean(values) < high
    assert tables.interval(values) == (low, high)
    assert tables.interval(np.full(5, 500.0)) == (500, 500)


def test_rows_replace_those_of_the_same_run_only(tmp_path: Path) -> None:
    def row(seed: int, step: int, mean: str) -> tables.Row:
        return {
            **dict.fromkeys(tables.CURVES, ""),
            "experiment": "a",
            "seed": f"{seed}",
            "step": f"{step}",
            "mean": mean,
        }

    path = tmp_path / "results" / "curves.csv"
    for rows in ([row(10, 5, "1"), row(2, 5, "2"), row(2, 10, "3")], [row(2, 5, "4")]):
        tables.replace(path, tables.CURVES, rows, ["experiment", "seed"])
    assert tables.read(path) == [row(2, 5, "4"), row(10, 5, "1")]
    assert [each.name for each in path.parent.iterdir()] == ["curves.csv"]


def test_report_may_be_on_both_kinds_of_actions() -> None:
    report = "Evaluating over 100 episodes ({} actions)\nsome warning\nMean reward: {} +/- 0.50\n"
    text = report.format("deterministic", "1.00") + report.format("stochastic", "-2.00")
    assert outcome.REPORT.findall(text) == [("deterministic", "1.00", "0.50"), ("stochastic", "-2.00", "0.50")]


def test_games_of_a_continued_run_follow_one_another(tmp_path: Path) -> None:
    header = '#{"t_start": 0}\nr,l,t,steps\n'
    (tmp_path / "0.monitor.csv").write_text(header + "1,9,10.0,20000\n2,9,20.0,60000\n")
    (tmp_path / "50000.monitor.csv").write_text(header + "3,9,5.0,70000\n")
    (tmp_path / "75000.monitor.csv").write_text(header)
    games = outcome.read_games(tmp_path)
    np.testing.assert_array_equal(games, [[1, 10, 20000], [3, 15, 70000]])
    assert outcome.curve_of_games(games)[-1] == outcome.Point(50_000, 1, 0, 10)
    (tmp_path / "50000.monitor.csv").write_text(header + "3,9,15.0,70000\n")  # its time goes on
    np.testing.assert_array_equal(outcome.read_games(tmp_path), games)
