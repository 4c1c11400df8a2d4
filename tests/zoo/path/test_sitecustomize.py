"""rl-zoo's own commands, with the folder on their path."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import rl_zoo3.train
import rl_zoo3.utils

from sb3_acer import ACER
from sb3_acer.zoo import commands
from tests.zoo.conftest import HYPERPARAMS, SHORT_RUN, python, sb3_acer

SCRIPTS = ("enjoy", "record_video", "record_training", "push_to_hub", "load_from_hub")
TRAIN = ("--algo", "acer", "-conf", "sb3_acer.hyperparams", *SHORT_RUN)
# Runs each script in a fork of a process that has imported what the scripts need except rl_zoo3, which saves time.
FORKS = """
import multiprocessing, runpy, sys
import huggingface_sb3, matplotlib.pyplot, optuna, pandas, sb3_acer

def run(script, arguments):
    sys.argv[1:] = arguments
    sys.stdout, sys.stderr = open(f"{script}.out", "w"), open(f"{script}.err", "w")
    runpy.run_module(f"rl_zoo3.{script}", run_name="__main__")

assert "rl_zoo3" not in sys.modules
train, *scripts = sys.argv[1:]
context = multiprocessing.get_context("fork")
for script, arguments in [("train", train.split()), *((script, ["--algo", "acer", "--help"]) for script in scripts)]:
    process = context.Process(target=run, args=(script, arguments))
    process.start()
    process.join()
    print(script, process.exitcode)
"""


class Forked(NamedTuple):
    folder: Path
    exit_codes: dict[str, str]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Runs of the scripts with the folder on their path."""
    folder = tmp_path_factory.mktemp("forked")
    result = python("-c", FORKS, " ".join(TRAIN), *SCRIPTS, cwd=folder, path=(commands.ZOO_PATH,))
    assert result.returncode == 0, result.stderr
    return Forked(folder, dict(line.split() for line in result.stdout.splitlines()))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_zoos_own_commands_know_acer_where_the_folder_is_on_their_path(script: str, forked: Forked) -> None:
    assert (forked.folder / f"{script}.err").read_text() == ""
    assert forked.exit_codes[script] == "0"
    assert "--algo" in (forked.folder / f"{script}.out").read_text()


def test_the_zoos_own_train_runs_acer_with_our_hyperparameters(
    forked: Forked, shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sb3_acer("zoo-path", cwd=shell) == f"{commands.ZOO_PATH}\n"
    monkeypatch.delitem(rl_zoo3.utils.ALGOS, "acer")
    monkeypatch.setattr(sys, "argv", ["train", *TRAIN])
    with pytest.raises(SystemExit):
        rl_zoo3.train.train()
    assert "invalid choice: 'acer'" in capsys.readouterr().err
    assert forked.exit_codes["train"] == "0", (forked.folder / "train.err").read_text()
    model = ACER.load(forked.folder / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.batch_size == HYPERPARAMS["CartPole-v1"]["batch_size"]


def test_the_folder_hides_no_other_sitecustomize_and_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    for path in ((commands.ZOO_PATH, tmp_path), (commands.ZOO_PATH, tmp_path, commands.ZOO_PATH)):
        result = python("-c", "import sys; print('rl_zoo3' in sys.modules)", cwd=tmp_path, path=path)
        assert (result.stdout, result.stderr) == ("the other\nFalse\n", "")
