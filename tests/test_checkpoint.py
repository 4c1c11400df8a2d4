"""Folders of checkpoints: one that can be found is whole, whatever happened while one was written."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sb3_acer.checkpoint import find_checkpoint, new_checkpoint


def write(folder: Path, steps: int, keep: int = 2) -> None:
    with new_checkpoint(folder, {"num_timesteps": steps}, keep) as files:
        (files / "first").write_bytes(b"x" * steps)
        (files / "second").write_text(str(steps))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(folder: Path) -> int:
    found = find_checkpoint(folder)
    assert found is not None
    assert (found.path / "second").read_text() == str(found.manifest["num_timesteps"])
    return int(found.manifest["num_timesteps"])


def test_there_is_no_checkpoint_in_a_folder_without_one(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "none") is None
    (tmp_path / "checkpoint_of_another").mkdir()
    assert find_checkpoint(tmp_path) is None


def test_the_newest_checkpoint_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    for steps in (30, 5, 20):  # training may have begun anew
        write(tmp_path, steps)
        assert newest(tmp_path) == steps
    assert names(tmp_path) == ["checkpoint_2_5_steps", "checkpoint_3_20_steps"]
    for steps in range(20, 29):  # numbers, not names, are ordered
        write(tmp_path, steps, keep=1)
    assert names(tmp_path) == ["checkpoint_12_28_steps"]


@pytest.mark.parametrize(
    "damage", ["no manifest", "half a manifest", "another format", "a missing file", "half a file"]
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(damage: str, tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    path = tmp_path / "checkpoint_2_20_steps"
    manifest = path / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "half a manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "another format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "another"}))
    elif damage == "a missing file":
        (path / "first").unlink()
    else:
        (path / "first").write_bytes(b"x" * 10)
    assert newest(tmp_path) == 10
    write(tmp_path, 30)
    assert newest(tmp_path) == 30


def test_a_failure_while_writing_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 10, keep=1)

    def fail() -> None:
        with new_checkpoint(tmp_path, {"num_timesteps": 20}, 1) as files:
            (files / "first").write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fail()
    assert names(tmp_path) == ["checkpoint_1_10_steps"]
    assert newest(tmp_path) == 10


def test_what_a_killed_program_left_does_not_get_into_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "third").touch()
    write(tmp_path, 10)
    assert names(tmp_path / "checkpoint_1_10_steps") == ["first", "manifest.json", "second"]
    assert names(tmp_path) == ["checkpoint_1_10_steps"]


def killed_while_saving(folder: Path, n_kills: int, seed: int) -> None:
    """A program saves checkpoints one after another and is killed at random; the newest one loads each time."""
    code = f"""
import gymnasium as gym
from sb3_acer import ACER
from sb3_acer.checkpoint import find_checkpoint
folder = {str(folder)!r}
if find_checkpoint(folder):
    model = ACER.load_checkpoint(folder, gym.make("CartPole-v1"), device="cpu")
else:
    model = ACER("MlpPolicy", "CartPole-v1", n_steps=5, buffer_size=50, replay_start=10, device="cpu").learn(100)
model.save_checkpoint(folder)
print("saving", flush=True)
while True:
    model.num_timesteps += 1
    model.save_checkpoint(folder)
"""
    rng = np.random.default_rng(seed)
    last = 0
    for _ in range(n_kills):
        child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"saving\n"
        time.sleep(rng.uniform(0.0, 0.2))
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = find_checkpoint(folder)
        assert found is not None
        assert found.manifest["num_timesteps"] >= max(last, 100)
        last = found.manifest["num_timesteps"]


def test_a_program_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    killed_while_saving(tmp_path, 3, 0)


@pytest.mark.slow
def test_a_program_that_is_killed_200_times_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    killed_while_saving(tmp_path, 200, 1)
