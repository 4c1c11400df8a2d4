"""The learning curve, and what the commands that plot say where there is nothing to draw."""

import re
from pathlib import Path

import numpy as np
import pytest

from sb3_acer.zoo import commands, plots


def test_the_runs_of_an_environment_are_plotted_and_none_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "acer" / "MinAtar-Breakout-v1_1"
    run.mkdir(parents=True)
    (run.parent / "CartPole-v1_1").mkdir()
    (run / "0.monitor.csv").touch()
    arguments = ["-f", str(tmp_path), "-e", "MinAtar/Breakout-v1"]
    found, given = plots.runs_to_plot("plot-train", arguments, "*.monitor.csv")
    assert (found, given.env) == ([run], ["MinAtar-Breakout-v1"])
    for name, files, env_id in (
        ("plot-train", "*.monitor.csv", "CartPole-v1"),
        ("all-plots", "evaluations.npz", "MinAtar/Breakout-v1"),
    ):
        message = f"sb3-acer {name}: {tmp_path}/acer must have a run of {env_id} with {files}, got none"
        with pytest.raises(SystemExit, match=re.escape(message)):
            commands.main([name, "-f", str(tmp_path), "-e", env_id])
    with pytest.raises(SystemExit, match=r"/acer must have a run of CartPole-v1 with \*.monitor.csv, got none"):
        commands.main(["plot-train", "-f", str(tmp_path), "-e", "MinAtar/Breakout-v1", "CartPole-v1"])


def test_runs_are_found_in_each_of_several_folders_and_by_an_algorithm_in_capitals(tmp_path: Path) -> None:
    runs = [tmp_path / folder / "acer" / "CartPole-v1_1" for folder in ("one", "two")]
    for run in runs:
        run.mkdir(parents=True)
        (run / "0.monitor.csv").touch()
    arguments = ["-a", "ACER", "-f", str(tmp_path / "one"), str(tmp_path / "two")]
    assert plots.runs_to_plot("plot-train", arguments, "*.monitor.csv")[0] == runs


def test_a_success_rate_that_no_episode_has_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "acer" / "CartPole-v1_1"
    run.mkdir(parents=True)
    (run / "0.monitor.csv").write_text('#{"t_start": 0.0, "env_id": "CartPole-v1"}\nr,l,t\n9.0,9,0.1\n')
    message = f"sb3-acer plot-train: {run} must have episodes with is_success for -y success, got none"
    with pytest.raises(SystemExit, match=re.escape(message)):
        commands.main(["plot-train", "-f", str(tmp_path), "-y", "success"])


def test_a_run_without_a_finished_episode_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "acer" / "CartPole-v1_1"
    run.mkdir(parents=True)
    (run / "0.monitor.csv").write_text('#{"t_start": 0.0, "env_id": "CartPole-v1"}\nr,l,t\n')
    with pytest.raises(SystemExit, match=re.escape(f"sb3-acer plot-train: {run} must have a finished episode")):
        commands.main(["plot-train", "-f", str(tmp_path)])
    other = run.with_name("CartPole-v1_2")
    other.mkdir()
    (other / "0.monitor.csv").write_text('#{"t_start": 0.0, "env_id": "CartPole-v1"}\nr,l,t\n9.0,9,0.1\n')
    for window in ("0", "2"):
        rule = f"-w must be from 1 to 1, the episodes of the shortest run, got {window}"
        with pytest.raises(SystemExit, match=re.escape(rule)):
            commands.main(["plot-train", "-f", str(tmp_path), "-w", window])
    with pytest.raises(SystemExit, match="must have a finished episode in the first 8 steps, got none"):
        commands.main(["plot-train", "-f", str(tmp_path), "-max", "8"])


def test_a_damaged_file_of_a_run_is_one_line_that_names_it(tmp_path: Path) -> None:
    run = tmp_path / "acer" / "CartPole-v1_1"
    run.mkdir(parents=True)
    (run / "0.monitor.csv").touch()
    evaluations = run / "evaluations.npz"
    evaluations.write_bytes(b"PK")
    with pytest.raises(SystemExit, match=re.escape(f"sb3-acer plot-train: {run} must be whole, got ")):
        commands.main(["plot-train", "-f", str(tmp_path)])
    np.savez(evaluations, timesteps=np.arange(10))
    content = bytearray(evaluations.read_bytes())
    content[len(content) // 2] ^= 1  # in the array
    for damaged in (b"", b"PK", content):
        evaluations.write_bytes(damaged)
        with pytest.raises(SystemExit, match=re.escape(f"sb3-acer all-plots: {evaluations} must be whole, got ")):
            commands.main(["all-plots", "-f", str(tmp_path)])


def test_evaluations_that_cannot_be_plotted_together_are_one_line(tmp_path: Path) -> None:
    for number, n_episodes in ((1, 2), (2, 3)):
        run = tmp_path / "acer" / f"CartPole-v1_{number}"
        run.mkdir(parents=True)
        results = np.ones((4, n_episodes))
        np.savez(run / "evaluations.npz", timesteps=np.arange(10, 50, 10), results=results, ep_lengths=results)
    given = ["all-plots", "-f", str(tmp_path), "-e", "CartPole-v1"]
    with pytest.raises(SystemExit, match="evaluated with the same --eval-episodes"):
        commands.main(given)
    with pytest.raises(SystemExit, match="--max-timesteps must be at least 10, the first evaluation, got 9"):
        commands.main([*given, "--max", "9"])
    for option in ([], ["-iqm"]):
        with pytest.raises(SystemExit, match="-i must name a file that all-plots has saved"):
            commands.main(["plot-from-file", *option])


def test_latex_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for option in ("-latex", "--latex"):
        with pytest.raises(SystemExit, match=r"^sb3-acer plot-from-file: -latex needs LaTeX, which is not installed$"):
            commands.main(["plot-from-file", "-i", "results.pkl", option])


def test_a_running_mean_is_over_a_tenth_of_the_shortest_run() -> None:
    assert [plots.fitting_window(n_episodes) for n_episodes in (200, 20, 5000, 3)] == [20, 5, 100, 3]


def test_the_curve_is_a_running_mean_over_the_steps_taken() -> None:
    steps, rewards = np.arange(20, 2020, 20), np.arange(100.0)
    (axes,) = plots.learning_curve(steps, rewards, "ACER on X").axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "ACER on X",
        "environment steps",
        "episode reward",
    )
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), np.stack((steps, rewards), axis=1))
    (line,) = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_xydata(), float), np.stack((steps[9:], rewards[9:] - 4.5), axis=1))


@pytest.mark.parametrize("n", [1, 2, 11])
def test_few_episodes_are_a_curve_too(n: int) -> None:
    (axes,) = plots.learning_curve(np.arange(1, n + 1), np.ones(n), "").axes
    assert len(np.asarray(axes.lines[0].get_xydata())) == max(1, n - 4)


def test_what_ends_with_the_last_step_that_is_shown_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(plots, "plot", lambda name, *args: shown.append(name))
    for number, first in ((1, 10), (2, 20)):
        run = tmp_path / "acer" / f"CartPole-v1_{number}"
        run.mkdir(parents=True)
        (run / "0.monitor.csv").write_text('#{"t_start": 0.0, "env_id": "CartPole-v1"}\nr,l,t\n9.0,9,0.1\n')
        np.savez(run / "evaluations.npz", timesteps=np.array([first, 50]))
    plots.plot_train(["-f", str(tmp_path), "-max", "9"])
    plots.all_plots(["-f", str(tmp_path), "-max", "20"])
    assert shown == ["plot-train", "all-plots"]
    with pytest.raises(SystemExit, match="--max-timesteps must be at least 20, the first evaluation, got 19"):
        plots.all_plots(["-f", str(tmp_path), "-max", "19"])
