"""The commands: rl-zoo's scripts with ACER registered."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import huggingface_hub
import optuna
import pytest
import yaml
from huggingface_sb3 import EnvironmentName

from sb3_acer import ACER
from sb3_acer.__main__ import REQUIRED, REQUIRED_BY, SUMMARIES
from sb3_acer.__main__ import main as command_line
from sb3_acer.extras import how_to_install
from sb3_acer.hyperparams import ENTRIES_FILE, hyperparams
from sb3_acer.zoo import commands, experiment
from tests.helpers import EXTRAS
from tests.zoo.conftest import (
    ROOT,
    SEARCH,
    SHORT_RUN,
    arguments_of_train,
    python,
    sb3_acer,
)

NEEDS = [("train", name) for name in REQUIRED]
NEEDS += [(command, name) for command, names in REQUIRED_BY.items() for name in names]


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """Imports the package and runs a command where no extra is installed."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in EXTRAS)  # makes the import fail
    package = "import sb3_acer; print(sb3_acer.ACER.__name__)"
    command = "sys.argv[1:] = ['train']; runpy.run_module('sb3_acer', run_name='__main__')"
    return python("-c", f"import runpy, sys; {hide}; {package}; {command}", cwd=tmp_path_factory.mktemp("bare"))


def test_the_package_itself_needs_no_extra(without_extras: "subprocess.CompletedProcess[str]") -> None:
    assert without_extras.stdout == "ACER\n", without_extras.stderr


@pytest.mark.parametrize("name", sorted({name for _, name in NEEDS}))
def test_what_the_command_line_requires_is_in_the_extra_that_it_names(name: str) -> None:
    extra = (ROOT / "pyproject.toml").read_text().split("\nzoo = [")[1].split("\n]")[0]
    assert f'"{name}' in extra


@pytest.mark.parametrize(("command", "name"), NEEDS)
def test_a_missing_extra_is_one_line_that_names_it(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sb3-acer", command])
    monkeypatch.setitem(sys.modules, name, None)
    assert command_line() == 2
    assert capsys.readouterr().err == f"sb3-acer {command}: rl-zoo needs {name}: {how_to_install('zoo')}\n"


def test_without_any_extra_the_command_line_ends_with_one_line(
    without_extras: "subprocess.CompletedProcess[str]",
) -> None:
    assert without_extras.returncode == 2
    assert len(without_extras.stderr.splitlines()) == 1
    assert how_to_install("zoo") in without_extras.stderr


def test_there_is_a_command_for_every_script_of_the_zoo() -> None:
    scripts = "train enjoy tune plot-train plot-from-file all-plots record-video record-training benchmark push-to-hub"
    assert set(scripts.split()) <= commands.COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(commands.COMMANDS.keys() - {"zoo-path"}))
def test_help_says_what_a_command_does_and_the_zoos_own_arguments(
    name: str, shell: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        commands.main([name, "--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{SUMMARIES[name]}\n\n{inspect.getdoc(commands.COMMANDS[name]) or 'usage: '}")
    assert "options:" in printed
    assert f"usage: sb3-acer {name} " in printed
    assert not list(shell.iterdir())


def test_the_help_of_tune_has_its_own_defaults() -> None:
    defaults = [default.replace("=", " ") for default in commands.SEARCH if "=" in default]
    assert len(defaults) == 6
    assert all(default in inspect.getdoc(commands.tune) for default in defaults)  # type: ignore[operator]


def test_arguments_reach_the_zoo_unchanged_after_the_defaults() -> None:
    given = ["--env", "Acrobot-v1", "-n", "5", "-conf", "mine.yml"]
    assert arguments_of_train(*given) == ["--algo", "acer", "-conf", str(ENTRIES_FILE), *given]


@pytest.mark.parametrize("given", [["--algo", "ppo"], ["--algo=ppo"], ["--env", "Acrobot-v1", "--alg", "ppo"]])
def test_another_algorithm_keeps_the_zoos_own_hyperparameters(given: list[str]) -> None:
    assert arguments_of_train(*given) == given


def test_train_alone_shows_a_progress_bar() -> None:
    assert arguments_of_train()[4:] == commands.FIRST_RUN
    assert "--progress" in commands.FIRST_RUN


def test_train_shows_a_progress_bar_where_the_output_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda shown=is_terminal: shown)
        assert ("--progress" in arguments_of_train("--env", "Acrobot-v1")) is is_terminal


def test_a_search_shows_no_progress_bars_of_its_trials(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "--progress" not in arguments_of_tune()


def test_the_runs_of_an_environment_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for run in ("Maze_2", "Maze_9", "Maze_Big_7", "Maze_10"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "agent.zip").touch()
    assert commands.runs_with("*.zip", tmp_path, "Maze") == [10, 9, 2]
    assert commands.runs_with("*.zip", tmp_path, "Maze_Big") == [7]


@pytest.mark.parametrize("name", ["enjoy", "record-video", "record-training"])
def test_the_advice_to_train_names_the_modules_of_the_environment(name: str, tmp_path: Path) -> None:
    arguments = [name, "--env", "CartPole-v1", "-f", str(tmp_path), "--gym-packages", "gymnasium"]
    with pytest.raises(SystemExit, match=f"sb3-acer train -f {tmp_path} --gym-packages gymnasium"):
        commands.main(arguments)


def arguments_of_tune(*arguments: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "open_storage", lambda storage: None)
        patch.setattr(optuna, "load_study", lambda **_: optuna.create_study())
        patch.setattr(optuna.Study, "best_trial", Namespace(number=5))
        return arguments_of_train(*arguments, command="tune")


def test_tune_is_train_with_a_search_and_a_place_for_it(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["-n", "500", "--n-trials", "3", "--no-optim-plots"]
    given = ["--env", "Pendulum-v1", "-f", "here", "--seed", "1", *search, "-params", "normalize:True"]
    study = ["--storage", f"{shell}/here/acer/Pendulum-v1.log", "--study-name", "acer-Pendulum-v1"]
    assert arguments_of_tune(*given) == [
        "--algo",
        "acer",
        "-conf",
        str(ENTRIES_FILE),
        *commands.SEARCH,
        *given,
        *study,
    ]
    # A worker with the same seed would draw the same trials.
    more = f"-params normalize:True {shlex.join(study)}"
    printed, where = capsys.readouterr().out.splitlines(), "--env Pendulum-v1 -f here"
    assert printed == [
        f"To add a worker, here or on another machine: sb3-acer tune {where} {shlex.join(search)} {more}",
        f"To train with the best trial: sb3-acer train {where} {more} --trial-id 5",
    ]


def test_training_with_the_best_trial_does_not_search_again() -> None:
    search = ["-n", "500", "--n-trials", "3", "--n-startup-trials", "2", "--n-evaluations", "2", "--n-jobs", "2"]
    search += ["--max-total-trials", "9", "--sampler", "random", "--pruner", "none", "--eval-episodes", "2"]
    for option in ("-optimize", "--optimize-hyperparameters"):
        assert commands.without_search([option, *search, "--verbose", "0"]) == ["--verbose", "0"]


def test_a_trial_has_one_run_at_least(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["tune", "--n-runs", "0"])
    assert "--n-runs must be at least 1, got 0" in capsys.readouterr().err


def test_enjoy_runs_the_agent_that_train_has_saved(trained: tuple[Path, str]) -> None:
    printed = sb3_acer("enjoy", "--no-render", "-n", "500", "--stochastic", cwd=trained[0])
    assert "Loading logs/acer/CartPole-v1_1/CartPole-v1.zip" in printed
    assert "Mean reward: " in printed
    assert "Video" not in printed


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (("--load-best",), "best_model"),
        (("--load-checkpoint", "200"), "rl_model_200_steps"),
        (("--load-last-checkpoint",), "rl_model_400_steps"),
    ],
)
def test_enjoy_finds_the_best_agent_and_the_checkpoints(
    which: tuple[str, ...], name: str, continued: tuple[Path, str]
) -> None:
    printed = sb3_acer("enjoy", "--no-render", "--exp-id", "1", "-n", "200", *which, cwd=continued[0])
    assert f"Loading logs/acer/CartPole-v1_1/{name}.zip" in printed
    assert "Loading running average" in printed
    assert "Mean reward: " in printed


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "sb3-acer train"),
        (["--env", "Acrobot-v1", "-f", "here"], "sb3-acer train --env Acrobot-v1 -f here"),
        (["--algo", "ppo"], "sb3-acer train --algo ppo"),
    ],
)
def test_no_saved_agent_is_one_line_that_names_the_command_that_makes_one(
    arguments: list[str], remedy: str, shell: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        commands.main(["enjoy", *arguments])
    assert str(exit_info.value).startswith("No saved agent")
    assert str(exit_info.value).endswith(f"To train one: {remedy}")
    assert len(str(exit_info.value).splitlines()) == 1
    assert capsys.readouterr().out == ""


def test_no_agent_of_a_mistyped_environment_is_said_to_be_mistyped(shell: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"No saved agent: .* must be the id of a registered .*, near to 'CartPole-v1'"
    ):
        commands.main(["enjoy", "--env", "CartPol-v1"])


def test_the_newest_run_is_the_newest_that_has_the_agent_asked_for(tmp_path: Path) -> None:
    runs = [tmp_path / "acer" / f"CartPole-v1_{number}" for number in (1, 2, 3, 4)]
    for run in runs:
        run.mkdir(parents=True)
    for run in runs[:2]:
        (run / "CartPole-v1.zip").touch()  # the third has failed at once
    (runs[3] / "best_model.zip").touch()  # the fourth has not ended
    for is_best, run in ((False, runs[1]), (True, runs[3])):
        found = commands.find_agent(0, str(tmp_path), "acer", EnvironmentName("CartPole-v1"), is_best)
        assert Path(found[1]).parent == run


def test_agents_that_are_there_are_named_if_the_one_asked_for_is_not(tmp_path: Path) -> None:
    run = tmp_path / "acer" / "CartPole-v1_1"
    run.mkdir(parents=True)
    (run / "rl_model_1000_steps.zip").touch()
    for number, checkpoint in ((0, "1234"), (1, "1234"), (77, None)):
        with pytest.raises(SystemExit, match=r"No saved agent: .*\. There are .*_1/rl_model_1000_steps.zip$"):
            commands.find_agent(number, str(tmp_path), "acer", EnvironmentName("CartPole-v1"), False, checkpoint)
    (run / "rl_model_1000_steps.zip").rename(run / "CartPole-v1.zip")
    with pytest.raises(SystemExit, match="Agents on the way are saved by train --save-freq"):
        commands.find_agent(0, str(tmp_path), "acer", EnvironmentName("CartPole-v1"), False, None, True)


def test_an_agent_of_the_zoos_own_folder_is_left_to_the_zoo_which_downloads_it(shell: Path) -> None:
    with pytest.raises(AssertionError, match="rl-trained-agents/acer folder was not found"):
        commands.find_agent(0, "rl-trained-agents", "acer", EnvironmentName("CartPole-v1"), False)


def is_mp4(path: Path) -> bool:
    return path.read_bytes()[4:8] == b"ftyp"


def test_record_video_films_the_saved_agent(continued: tuple[Path, str]) -> None:
    sb3_acer("record-video", "-n", "20", "--load-best", "--exp-id", "1", cwd=continued[0])
    (video,) = (continued[0] / "logs/acer/CartPole-v1_1/videos").glob("best-model-*.mp4")
    assert is_mp4(video)


OWN_MODULE = """
import gymnasium as gym

gym.register("OwnPendulum-v0", "gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=20)
"""


def test_an_own_environment_is_trained_with_the_default_of_its_actions_and_filmed(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (shell / "own_environments.py").write_text(OWN_MODULE)
    own = ("--env", "OwnPendulum-v0", "--gym-packages", "own_environments")
    sb3_acer("train", *own, "-n", "100", "--num-threads", "1", cwd=shell)
    run = shell / "logs/acer/OwnPendulum-v0_1"
    settings = dict(yaml.unsafe_load((run / "OwnPendulum-v0/config.yml").read_text()))
    assert settings == {**hyperparams["default_continuous"], "n_timesteps": settings["n_timesteps"]}
    sb3_acer("record-video", *own, "-n", "20", cwd=shell)
    (video,) = (run / "videos").glob("*.mp4")
    assert is_mp4(video)
    with pytest.raises(SystemExit, match=r"No module named 'no_module'. --gym-packages, env_wrapper and the like must"):
        sb3_acer("record-video", "--env", "OwnPendulum-v0", "--gym-packages", "no_module", cwd=shell)
    del gym.registry["OwnPendulum-v0"]


def test_record_training_joins_a_video_of_each_checkpoint(
    continued: tuple[Path, str], tmp_path: Path, children: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fonts = tmp_path / "fonts.conf"
    fonts.write_text("<fontconfig></fontconfig>")
    monkeypatch.setenv("FONTCONFIG_FILE", str(fonts))  # a system without fonts
    run = tmp_path / "logs/acer/CartPole-v1_1"
    shutil.copytree(continued[0] / "logs/acer/CartPole-v1_1", run)
    for name in ("best_model", "CartPole-v1"):
        (run / f"{name}.zip").unlink()
    newer = run.with_name("CartPole-v1_2")
    newer.mkdir()
    (newer / "CartPole-v1.zip").touch()  # an agent, but no checkpoints
    sb3_acer("record-training", "-n", "20", cwd=tmp_path)
    assert [run[0] for run in children] == ["record-video"] * 2
    videos = {path.name.split("-acer")[0]: path for path in (run / "videos").iterdir()}
    assert videos.keys() == {"checkpoint-200", "checkpoint-400", "training.mp4"}
    assert all(map(is_mp4, videos.values()))
    sizes = [videos[name].stat().st_size for name in ("checkpoint-200", "training.mp4")]
    assert sizes[1] > 1.5 * sizes[0]


def test_videos_are_recorded_to_an_empty_folder_whose_path_needs_no_quotes(shell: Path) -> None:
    run = shell / "logs/acer/CartPole-v1_1"
    run.mkdir(parents=True)
    (run / "CartPole-v1.zip").touch()
    (shell / "thesis").mkdir()
    (shell / "thesis" / "thesis.tex").touch()
    for folder, message in (("thesis", "a new or an empty folder, since rl-zoo empties it"), ("a b", "without quotes")):
        with pytest.raises(SystemExit, match=f"record-training: -o must be .*{message}, got "):
            sb3_acer("record-training", "-o", folder, cwd=shell)
    assert (shell / "thesis" / "thesis.tex").exists()
    shutil.copytree(shell / "logs", shell / "my logs")
    with pytest.raises(SystemExit, match=r"without quotes, got .*That is the run's folder: give another one by -o"):
        sb3_acer("record-training", "-f", "my logs", cwd=shell)
    for folder in ("new", "new_é"):
        expected = ["-o", str(shell / folder)]
        assert commands.run_to_record(["--algo", "acer", "-f", "logs", "-o", folder])[2:] == expected


@pytest.mark.parametrize(
    ("given", "run"),
    [((), "logs/acer"), (("--exp-id", "1"), "logs/acer/CartPole-v1_1"), (("--exp-id", "-1"), "logs/acer")],
)
def test_a_progress_that_was_not_saved_is_one_line(given: tuple[str, ...], run: str, shell: Path) -> None:
    (shell / "logs/acer/CartPole-v1_1").mkdir(parents=True)
    expected = f"{run} must have agents of CartPole-v1, got none. To save some: sb3-acer train --save-freq N"
    with pytest.raises(SystemExit, match=f"^sb3-acer record-training: {re.escape(expected)}$"):
        sb3_acer("record-training", *given, cwd=shell)


def test_without_ffmpeg_record_training_says_so_at_once(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "moviepy.config", None)
    with pytest.raises(SystemExit, match=r"ffmpeg is needed to join the videos: install ffmpeg$"):
        commands.main(["record-training"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("record-training", "logs/acer must have agents of CartPole-v1, got none"),
        ("benchmark", "No such file or directory: 'logs'"),
        ("plot-train", "logs/acer must have a run of CartPole-v1 with *.monitor.csv, got none"),
    ],
)
def test_nothing_saved_is_one_line(command: str, message: str, shell: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        commands.main([command])
    assert str(exit_info.value).startswith(f"sb3-acer {command}: ")
    assert message in str(exit_info.value)


def test_a_call_that_is_no_script_of_the_zoo_is_left_alone() -> None:
    assert commands.call([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.DEVNULL) == 3


def test_the_table_of_a_benchmark_is_in_the_folder_of_its_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(commands, "run_module", lambda name, defaults, arguments: given.extend(defaults))
    commands.benchmark(["--log-dir", "mine"])
    assert given == ["--no-hub", "--log-dir", "mine", "--benchmark-dir", "mine/benchmark"]


def test_scripts_of_the_zoo_run_after_drawing_without_a_screen_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(commands, "draw_offscreen", lambda: order.append("prepared"))
    monkeypatch.setattr(commands, "run_zoo", lambda *_: order.append("run"))
    commands.run_module("record-video", [], [])
    assert order == ["prepared", "run"]


def test_benchmark_evaluates_agents_of_environments_with_a_slash_in_their_ids(
    shell: Path, children: list[tuple[str, ...]]
) -> None:
    gym.register("Mine/Cart-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
    try:
        sb3_acer("train", "--env", "Mine/Cart-v0", "-n", "300", "--eval-freq", "-1", "--num-threads", "1", cwd=shell)
        sb3_acer("benchmark", "-n", "300", "--num-threads", "1", "--gym-packages", "gymnasium", cwd=shell)
    finally:
        gym.registry.pop("Mine/Cart-v0")
    assert "|acer|Mine-Cart-v0|" in (shell / "logs/benchmark/benchmark.md").read_text().replace(" ", "")


def test_benchmark_evaluates_every_saved_agent_and_leaves_out_folders_without_one(
    continued: tuple[Path, str], tmp_path: Path, children: list[tuple[str, ...]]
) -> None:
    sb3_acer("tune", *SEARCH, "--n-trials", "1", cwd=tmp_path)
    with pytest.raises(
        SystemExit, match="sb3-acer benchmark: --log-dir must be a folder with a saved agent, got 'logs'"
    ):
        sb3_acer("benchmark", cwd=tmp_path)
    (tmp_path / "logs/acer/CartPole-v1_1").rename(tmp_path / "logs/acer/CartPole-v1_3")  # newer than the agents
    shutil.copytree(continued[0] / "logs", tmp_path / "logs", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "logs/acer/CartPole-v1_1/CartPole-v1", tmp_path / "logs/acer/Acrobot-v1_1/Acrobot-v1")
    arguments = tmp_path / "logs/acer/Acrobot-v1_1/Acrobot-v1/args.yml"  # of a run that has not ended
    arguments.write_text(arguments.read_text().replace("CartPole-v1", "Acrobot-v1"))
    printed = sb3_acer("benchmark", "-n", "300", "--num-threads", "1", cwd=tmp_path)
    assert "Evaluating acer on CartPole-v1..." in printed
    assert [run[0] for run in children] == ["enjoy"]
    table = (tmp_path / "logs/benchmark/benchmark.md").read_text()
    (row,) = (line for line in table.splitlines() if line.startswith("|acer|CartPole-v1|"))
    assert 1 <= float(row.split("|")[3]) <= 500
    newer = tmp_path / "logs/acer/CartPole-v1_4"
    shutil.copytree(tmp_path / "logs/acer/CartPole-v1_1", newer)
    assert commands.saved_agents(str(tmp_path / "logs")).keys() == {"acer-CartPole-v1_4"}  # evaluated in its turn


class Hub:
    """The part of the Hugging Face hub that an upload needs, in memory."""

    uploads: list[tuple[str, Path]]

    def create_repo(self, repo_id: str, **kwargs: Any) -> str:
        return f"https://hub.test/{repo_id}"

    def snapshot_download(self, repo_id: str, local_dir: Path) -> None:
        Path(local_dir).mkdir(parents=True)

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.uploads.append((repo_id, folder_path))


def test_the_name_of_a_repository_is_not_read_as_a_number_of_steps() -> None:
    named = ["-name", "mine", "-n"]
    commands.check_play("push-to-hub", [*named, "20"])
    with pytest.raises(SystemExit, match="--n-timesteps must be at least 1, got 0"):
        commands.check_play("push-to-hub", [*named, "0"])


def test_push_to_hub_uploads_an_agent_with_its_card_and_video(
    continued: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "uploads", [], raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    logs = str(continued[0] / "logs")
    sb3_acer("push-to-hub", "--env", "CartPole-v1", "-orga", "us", "-f", logs, "-n", "20", cwd=tmp_path)
    ((repository, folder),) = Hub.uploads
    assert repository == "us/acer-CartPole-v1"
    assert {"README.md", "replay.mp4", "acer-CartPole-v1.zip", "vec_normalize.pkl", "results.json"} <= {
        path.name for path in (tmp_path / folder).iterdir()
    }
    card = (tmp_path / folder / "README.md").read_text()
    (metadata, *_) = yaml.safe_load_all(card.split("\n# ")[0])
    result = metadata["model-index"][0]["results"][0]
    assert (metadata["model-index"][0]["name"], result["dataset"]["name"]) == ("ACER", "CartPole-v1")
    assert result["metrics"][0]["type"] == "mean_reward"
    assert "python -m rl_zoo3.enjoy --algo acer" in card
    assert isinstance(ACER.load(tmp_path / folder / "acer-CartPole-v1.zip"), ACER)


def test_torchrun_trains_one_agent_in_several_processes(tmp_path: Path) -> None:
    """They are restarted once, after one of them was killed: training continues from the last checkpoint."""
    killed = tmp_path / "killed"
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "from sb3_acer import ACER, distributed\n"
        "from sb3_acer.__main__ import main\n"
        "from sb3_acer.zoo import experiment\n"
        "experiment.EVAL_EPISODES = 2\n"
        "train = ACER.train\n"
        "def train_and_die(self, *args, **kwargs):\n"
        f"    if distributed.rank() == 1 and self.num_timesteps > 300 and not os.path.exists({str(killed)!r}):\n"
        f"        open({str(killed)!r}, 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    train(self, *args, **kwargs)\n"
        "ACER.train = train_and_die\n"
        "sys.exit(main())\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    without_seed = [*SHORT_RUN[: SHORT_RUN.index("--seed")], *SHORT_RUN[SHORT_RUN.index("--seed") + 2 :]]
    run = ("train", *without_seed, "n_envs:2", "--checkpoint-freq", "100", "--eval-freq", "-1", "--verbose", "0")
    finished = python(*torchrun, str(program), *run, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert killed.exists()
    folder = tmp_path / "logs" / "acer" / "CartPole-v1_1"
    assert not folder.with_name("CartPole-v1_2").exists()
    assert sorted(path.name for path in folder.glob("*.monitor.csv")) == [f"{n}.monitor.csv" for n in range(4)]
    assert ACER.load(folder / "CartPole-v1.zip").num_timesteps == 640  # five rollouts of 2 x 2 x 32 steps
    assert 1 <= finished.stdout.count("Seed: ") <= 2  # rank 0 alone prints, once before the restart
    # torchrun may end the other rank before that can say so, and says it itself.
    assert any(said in finished.stderr for said in ("training stops: rank 1 (process", "local_rank: 1"))


def test_a_restart_continues_only_a_run_of_its_own_launcher(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("train", *SHORT_RUN, "--eval-freq", "-1", "--checkpoint-freq", "100")
    sb3_acer(*arguments, cwd=shell)
    older = shell / "logs/acer/CartPole-v1_1"
    before = {path.name: path.read_bytes() for path in older.iterdir() if path.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for n_steps in ("600", "900"):  # a new run, which is then restarted
        sb3_acer(*arguments, "-n", n_steps, cwd=shell)
        assert {path.name: path.read_bytes() for path in older.iterdir() if path.is_file()} == before
    runs = {path.name: ACER.load(path / "CartPole-v1.zip").num_timesteps for path in older.parent.iterdir()}
    assert sorted(runs) == ["CartPole-v1_1", "CartPole-v1_2"]
    assert runs["CartPole-v1_2"] >= 900


def test_torchrun_is_for_training_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["sb3-acer", "tune"])
    assert command_line() == 2
    assert capsys.readouterr().err == "sb3-acer: torchrun must start train, got 'tune'\n"


def test_programs_that_a_script_starts_get_the_modules_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []

    def run(program: Sequence[str], **kwargs: Any) -> Namespace:
        started.append(program)
        return Namespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(commands, "draw_offscreen", lambda: None)
    monkeypatch.setattr(commands, "run_zoo", lambda *_: subprocess.call(["python", "enjoy.py", "--env", "Own-v0"]))
    commands.run_module("benchmark", [], ["--gym-packages", "gymnasium"])
    own = [sys.executable, "-m", "sb3_acer", "enjoy"]
    assert started == [[*own, "--env", "Own-v0", "--gym-packages", "gymnasium"]]
