"""The benchmarks' tables: what is in them is defined, and README.md shows what they hold."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock

from benchmarks import experiments, outcome, report, run, tables
from sb3_acer import ACER
from sb3_acer.atari.run import make_parser


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


def test_experiments_have_the_seeds_of_their_results() -> None:
    rows = [row for name in ("final.csv", "ablations.csv") for row in tables.read(tables.RESULTS / name)]
    for experiment in experiments.load_experiments().values():
        finished = {int(row["seed"]) for row in rows if row["experiment"] == experiment.name}
        assert finished == set(experiment.seeds), experiment.name


def test_results_have_the_steps_of_their_experiments() -> None:
    known, entries = experiments.load_experiments(), yaml.safe_load(experiments.ENTRIES.read_text())
    for row in [row for name in ("final.csv", "ablations.csv") for row in tables.read(tables.RESULTS / name)]:
        each = known[row["experiment"]]
        if not each.conf and (each.algorithm == "acer" or each.settings):  # others have rl-zoo's entries
            settings = each.settings or entries.get(each.entry or each.environment)
            steps = each.steps or settings["n_timesteps"]
            assert steps <= int(row["steps"]) < 1.03 * steps, each.name


def test_an_ablation_of_atari_has_the_settings_of_stable_baselines(tmp_path: Path) -> None:
    line = experiments.command(experiments.load_experiments()["pong_defaults"], 0, tmp_path)
    assert make_parser().parse_args(line[2:]).stable_baselines


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
        options = argparse.Namespace(again=again, steps=0, device="cpu", results=tables.RESULTS)
        run.start(planned, options).lock.release()
    assert ["--resume" in line for line in lines] == [True, False]


def test_two_programs_do_not_make_one_run_and_other_results_have_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = run.Planned(experiments.load_experiments()["pong"], 0)
    monkeypatch.setattr(run, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    options = argparse.Namespace(again=False, steps=0, device="cpu", results=tables.RESULTS)
    first = run.start(planned, options)
    with pytest.raises(RuntimeError, match=r"^pong, seed 0: another program is making this run, in .*logs/pong/0$"):
        run.start(planned, options)
    trial = run.start(planned, argparse.Namespace(**{**vars(options), "results": tmp_path / "trial"}))
    assert trial.folder == tmp_path / "trial" / "logs" / "pong" / "0"
    first.lock.release()
    run.start(planned, options).lock.release()


def test_a_finished_run_whose_rows_cannot_be_written_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = run.Planned(experiments.load_experiments()["pong"], 0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / outcome.LOG).write_text("the log\n")
    found = outcome.Outcome([outcome.Score("sampled", "1", "0")], 100, [], 5.0)
    monkeypatch.setattr(run, "read_outcome", lambda folder: found)
    (tmp_path / "results").write_text("a file in the place of the folder")
    started = run.Running(planned, tmp_path, process, 0.0, FileLock(tmp_path / "lock"))
    with pytest.raises(RuntimeError, match=r"pong, seed 0: .*results"):
        run.finish(started, tmp_path / "results", late=False)


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
    low, high = tables.interval(np.random.default_rng(0).normal(size=400))
    # The interquartile mean of n normal numbers has a variance of 1.19 / n.
    assert high - low == pytest.approx(2 * 1.96 * (1.19 / 400) ** 0.5, rel=0.15)


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


def test_seconds_of_evaluations_are_those_of_the_steps_of_all_environments(tmp_path: Path) -> None:
    """One of two environments ends episodes after 10 and 20 of its steps, the other after 30."""
    for name, start, lines in (("0", 10, "1,10,1.0\n1,10,2.0\n"), ("1", 10.5, "1,30,2.5\n")):
        (tmp_path / f"{name}.monitor.csv").write_text(f'#{{"t_start": {start}}}\nr,l,t\n{lines}')
    np.savez(tmp_path / "evaluations.npz", timesteps=[20, 30, 50, 60], results=np.zeros((4, 5)))
    seconds = [point.seconds for point in outcome.curve_of_evaluations(tmp_path / "evaluations.npz")]
    np.testing.assert_allclose(seconds, [1, 1.5, 2.5, 3])
    np.savez(tmp_path / "evaluations.npz", timesteps=[15], results=np.zeros((1, 5)))  # each step is four frames
    assert np.isnan(outcome.curve_of_evaluations(tmp_path / "evaluations.npz")[0].seconds)


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
