"""rl-zoo's own commands, with this folder on their path."""

from pathlib import Path

import pytest

from sb3_acer import ACER
from sb3_acer.zoo import commands
from tests.zoo.conftest import HYPERPARAMS, SHORT_RUN, python, sb3_acer_here


@pytest.mark.parametrize("script", ["enjoy", "record_video", "record_training", "push_to_hub", "load_from_hub"])
def test_the_zoos_own_commands_know_acer_where_the_folder_is_on_their_path(script: str, tmp_path: Path) -> None:
    result = python("-m", f"rl_zoo3.{script}", "--algo", "acer", "--help", cwd=tmp_path, path=(commands.ZOO_PATH,))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_the_zoos_own_train_runs_acer_with_our_hyperparameters(tmp_path: Path) -> None:
    assert sb3_acer_here("zoo-path", cwd=tmp_path) == f"{commands.ZOO_PATH}\n"
    train = ("-m", "rl_zoo3.train", "--algo", "acer", "-conf", "sb3_acer.hyperparams", *SHORT_RUN)
    unknown = python(*train, cwd=tmp_path)
    assert "invalid choice: 'acer'" in unknown.stderr
    result = python(*train, cwd=tmp_path, path=(commands.ZOO_PATH,))
    assert result.returncode == 0, result.stderr
    model = ACER.load(tmp_path / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.batch_size == HYPERPARAMS["CartPole-v1"]["batch_size"]


def test_the_folder_hides_no_other_sitecustomize_and_no_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other')")
    for path in ((commands.ZOO_PATH, tmp_path), (commands.ZOO_PATH, tmp_path, commands.ZOO_PATH)):
        result = python("-c", "import sys; print('rl_zoo3' in sys.modules)", cwd=tmp_path, path=path)
        assert (result.stdout, result.stderr) == ("the other\nFalse\n", "")
