"""The command line before it knows which command it is."""

import runpy
import sys
from importlib import import_module

import pytest

from sb3_acer import __version__
from sb3_acer.__main__ import OWN, SUMMARIES, main
from tests.helpers import EXTRAS, in_a_fork_without


def run(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sb3-acer", *arguments])
        return main()


def test_an_unknown_command_is_told_the_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trian") == 2
    assert f"must be one of {', '.join(SUMMARIES)}, got 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in SUMMARIES)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"sb3-acer {__version__}\n"


def test_ctrl_c_ends_a_command_with_the_status_that_shells_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sb3_acer.__main__.run", interrupted)
    assert run("train") == 130


@pytest.mark.parametrize("name", OWN)
def test_help_of_a_command_of_its_own_lists_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_module(OWN[name]).main.__doc__
    with pytest.raises(SystemExit) as exit_info:
        run(name, "--help")
    assert exit_info.value.code == 0
    assert "options:" in capsys.readouterr().out


def test_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def print_help() -> None:
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_module("sb3_acer", run_name="__main__")

    monkeypatch.setattr(sys, "argv", ["sb3-acer", "--help"])
    status, (printed, said) = in_a_fork_without(EXTRAS, print_help), capfd.readouterr()
    assert (status, said) == (0, "")
    assert "usage: sb3-acer COMMAND" in printed
