"""rl-zoo's own commands, with the folder on their path."""

import json
import sys
from pathlib import Path

import pytest
import rl_zoo3.train
import rl_zoo3.utils

from sb3_acer import ACER
from sb3_acer.zoo import commands
from tests.zoo.conftest import HYPERPARAMS, SHORT_RUN, python

SCRIPTS = ("enjoy", "record_video", "record_training", "push_to_hub", "load_from_hub")
TRAIN = ("--algo", "acer", "-conf", "sb3_acer.hyperparams", *SHORT_RUN)
MODULES: dict[str, tuple[str, ...]] = {"sb3_acer": ("zoo-path",), "rl_zoo3.train": TRAIN}
MODULES |= {f"rl_zoo3.{script}": ("--algo", "acer", "--help") for script in SCRIPTS}
# Runs each module in a fork of a process that has imported what the modules need except rl_zoo3, which saves time.
FORKS = """
import json, multiprocessing, runpy, sys
import huggingface_sb3, matplotlib.pyplot, optuna, pandas, sb3_acer

def run(module, arguments):
    sys.argv[1:] = arguments
    sys.stdout, sys.stderr = open(f"{module}.out", "w"), open(f"{module}.err", "w")
    runpy.run_module(module, run_name="__main__", alter_sys=True)

assert "rl_zoo3" not in sys.modules
context = multiprocessing.get_context("fork")
for module, arguments in json.loads(sys.argv[1]).items():
    process = context.Process(target=run, args=(module, arguments))
    process.start()
    process.join()
    print(module, process.exitcode)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all modules have run with success, with the folder of sitecustomize on their path."""
    path = tmp_path_factory.mktemp("forked")
    result = python("-c", FORKS, json.dumps(MODULES), cwd=path, path=(commands.ZOO_PATH,))
    errors = "\n".join((path / f"{module}.err").read_text() for module in MODULES)
    assert result.stdout.splitlines() == [f"{module} 0" for module in MODULES], result.stderr + errors
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_zoos_own_commands_know_acer_where_the_folder_is_on_their_path(script: str, folder: Path) -> None:
    assert (folder / f"rl_zoo3.{script}.err").read_text() == ""
    assert "--algo" in (folder / f"rl_zoo3.{script}.out").read_text()


def test_the_zoos_own_train_runs_acer_with_our_hyperparameters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (folder / "sb3_acer.out").read_text() == f"{commands.ZOO_PATH}\n"
    monkeypatch.delitem(rl_zoo3.utils.ALGOS, "acer", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *TRAIN])
    with pytest.raises(SystemExit):
        rl_zoo3.train.train()
    assert "invalid choice: 'acer'" in capsys.readouterr().err
    model = ACER.load(folder / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.batch_size == HYPERPARAMS["CartPole-v1"]["batch_size"]


def test_the_folder_hides_no_other_sitecustomize_and_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    for path in ((commands.ZOO_PATH, tmp_path), (commands.ZOO_PATH, tmp_path, commands.ZOO_PATH)):
        result = python("-c", "import sys; print('rl_zoo3' in sys.modules)", cwd=tmp_path, path=path)
        assert (result.stdout, result.stderr) == ("the other\nFalse\n", "")


def test_where_rl_zoo_is_not_installed_its_import_fails_as_without_the_folder(tmp_path: Path) -> None:
    result = python("-c", "import sys; sys.path.clear(); import rl_zoo3", cwd=tmp_path, path=(commands.ZOO_PATH,))
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'rl_zoo3'\n")
