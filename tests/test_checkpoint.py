"""Folders of checkpoints: one that can be found is whole, whatever happened while one was written."""

import json
import signal
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env

from sb3_acer import ACER, checkpoint
from sb3_acer.checkpoint import find_checkpoint, new_checkpoint
from tests.helpers import in_a_fork
from tests.mutations import attempt, memory_for, mutated, mutated_zip


def write(folder: Path, steps: int, keep: int | None = 2, run: str = "a") -> None:
    with new_checkpoint(folder, {"run": run, "num_timesteps": steps}, keep) as files:
        (files / "first").write_bytes(b"x" * steps)
        (files / "second").write_text(str(steps))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".checkpoint.lock")


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


def test_two_checkpoints_are_kept_unless_another_number_is_given(tmp_path: Path) -> None:
    for steps in (10, 20, 30):
        write(tmp_path, steps, keep=None)
    assert names(tmp_path) == ["checkpoint_2_20_steps", "checkpoint_3_30_steps"]


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
    write(tmp_path, 40, keep=1)
    assert names(tmp_path) == ["checkpoint_2_20_steps", "checkpoint_4_40_steps"]  # what is damaged is not deleted


@pytest.mark.parametrize(
    "damage", ["no manifest", "half a manifest", "a missing file", "half a file", "a file that cannot be read"]
)
def test_a_folder_of_damaged_checkpoints_is_not_taken_for_an_empty_one(damage: str, tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "checkpoint_1_10_steps"
    changed = path / ("manifest.json" if "manifest" in damage else "first")
    content = changed.read_bytes()
    changed.unlink()
    if damage == "a file that cannot be read":
        changed.mkdir()
    elif damage.startswith("half"):
        changed.write_bytes(content[: len(content) // 2])
    assert checkpoint.has_checkpoints(tmp_path)
    for folder in (tmp_path,) if damage == "no manifest" else (tmp_path, path):
        with pytest.raises(ValueError, match=f"{changed} could not be loaded: it has changed since it was written"):
            checkpoint.find_undamaged(folder)
    if "manifest" not in damage:
        with pytest.raises(ValueError, match="for one run alone"):
            write(tmp_path, 20, run="b")
    assert names(tmp_path) == [path.name]


def test_a_checkpoint_of_another_version_is_neither_passed_over_nor_deleted(tmp_path: Path) -> None:
    write(tmp_path, 10)
    manifest = tmp_path / "checkpoint_1_10_steps" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("checkpoint 1", "checkpoint 2"))
    with pytest.raises(ValueError, match="written by another version of sb3_acer, as 'sb3-acer checkpoint 2' and not"):
        checkpoint.find_undamaged(tmp_path)
    with pytest.raises(ValueError, match="for one run alone"):
        write(tmp_path, 20, run="b")
    assert names(tmp_path) == ["checkpoint_1_10_steps"]


def test_a_file_that_has_changed_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, 10)
    assert checkpoint.find_undamaged(tmp_path / "none") is None
    write(tmp_path, 20)
    newest_file = tmp_path / "checkpoint_2_20_steps" / "first"
    newest_file.write_bytes(b"x" * 19 + b"y")
    with pytest.warns(UserWarning, match=rf"checkpoint_1_10_steps is loaded, since .* are damaged: {newest_file}$"):
        found = checkpoint.find_undamaged(tmp_path)
    assert found is not None
    assert found.manifest["num_timesteps"] == 10
    (found.path / "second").write_text("11")
    with pytest.raises(ValueError, match=f"{newest_file} could not be loaded: it has changed since it was written"):
        checkpoint.find_undamaged(tmp_path)


def test_a_failure_while_writing_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 10, keep=1)

    def fail() -> None:
        with new_checkpoint(tmp_path, {"run": "a", "num_timesteps": 20}, 1) as files:
            (files / "first").write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fail()
    assert names(tmp_path) == ["checkpoint_1_10_steps"]
    assert newest(tmp_path) == 10


def test_what_a_killed_program_left_does_not_get_into_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".unfinished_checkpoint").mkdir()
    (tmp_path / ".unfinished_checkpoint" / "third").touch()
    write(tmp_path, 10)
    assert names(tmp_path / "checkpoint_1_10_steps") == ["first", "manifest.json", "second"]
    assert names(tmp_path) == ["checkpoint_1_10_steps"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, while another program reads it."""

    def refuse(*paths: Path) -> None:
        raise PermissionError

    write(tmp_path, 10, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        write(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["checkpoint_1_10_steps", "checkpoint_2_20_steps"]
    write(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["checkpoint_3_30_steps"]


def test_a_damaged_checkpoint_is_kept_beside_as_many_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (10, 20):
        write(tmp_path, steps)
    (tmp_path / "checkpoint_2_20_steps" / "first").write_bytes(b"y" * 20)  # as long as before
    monkeypatch.setattr(checkpoint, "_undamaged", set())  # as another process finds it
    write(tmp_path, 30)
    assert names(tmp_path) == [f"checkpoint_{number}_{number}0_steps" for number in (1, 2, 3)]
    write(tmp_path, 40)
    assert names(tmp_path) == [f"checkpoint_{number}_{number}0_steps" for number in (2, 3, 4)]


def test_files_that_this_process_has_written_or_compared_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, checksum = [], checkpoint._checksum

    def recorded(path: Path) -> int:
        read.append(path.parent.name)
        return checksum(path)

    monkeypatch.setattr(checkpoint, "_checksum", recorded)
    for steps in (10, 20, 30):
        write(tmp_path, steps)
    assert read == [".unfinished_checkpoint"] * 6  # two files each
    read.clear()
    monkeypatch.setattr(checkpoint, "_undamaged", set())  # as another process finds them
    for steps in (40, 50):
        write(tmp_path, steps, keep=3)
    compared = ["checkpoint_2_20_steps", "checkpoint_3_30_steps"]
    assert sorted(read) == sorted([".unfinished_checkpoint"] * 4 + compared * 2)


def test_what_a_checkpoint_consists_of_is_on_the_disk_before_it_has_its_name_and_before_older_ones_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    write(tmp_path, 10, keep=1)
    monkeypatch.setattr(checkpoint, "_flush", lambda folder: flushed.append((folder, names(folder))))
    write(tmp_path, 20, keep=1)
    assert flushed == [
        (tmp_path / ".unfinished_checkpoint", ["first", "manifest.json", "second"]),
        (tmp_path, ["checkpoint_1_10_steps", "checkpoint_2_20_steps"]),
    ]


def test_folders_of_the_user_stay(tmp_path: Path) -> None:
    for name in ("unfinished", "checkpoint_1_1_steps", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").touch()
    for steps in range(10, 50, 10):
        write(tmp_path, steps)
    assert {"unfinished", "checkpoint_1_1_steps", "mine"} <= set(names(tmp_path))
    assert newest(tmp_path) == 40


def test_a_folder_has_the_checkpoints_of_one_run(tmp_path: Path) -> None:
    write(tmp_path, 10)
    with pytest.raises(ValueError, match=r"for one run alone, got .*, where checkpoint_1_10_steps is of another one"):
        write(tmp_path, 20, run="b")
    assert newest(tmp_path) == 10


def test_one_program_writes_to_a_folder_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.1)

    def write_too() -> None:
        with pytest.raises(ValueError, match="to which another program is writing"):
            write(tmp_path, 20)

    with checkpoint.locked(tmp_path):
        assert in_a_fork(write_too) == 0
        write(tmp_path, 10)  # the program itself may
    assert newest(tmp_path) == 10


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_folder_and_a_link_to_it_are_one_folder_to_the_program_that_writes_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.1)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    with checkpoint.locked(tmp_path / "link"):
        write(tmp_path / "run", 10)
    assert newest(tmp_path / "link") == 10


def small_agent() -> ACER:
    env = make_vec_env("CartPole-v1", 1, seed=0)
    return ACER("MlpPolicy", env, n_steps=5, buffer_size=50, replay_start=10, seed=0, device="cpu").learn(100)


@pytest.mark.parametrize("n_kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_program_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(n_kills: int, tmp_path: Path) -> None:
    rng, agent = np.random.default_rng(0), small_agent()
    env = agent.get_env()
    assert env is not None
    agent.save_checkpoint(tmp_path)
    unfinished = tmp_path / ".unfinished_checkpoint"

    def save_for_ever() -> None:
        while True:
            agent.num_timesteps += 1
            agent.save_checkpoint(tmp_path)

    kills = interrupted = 0
    while kills < n_kills or interrupted <= n_kills / 2:  # most kills must come while it is writing
        kills += 1
        assert kills <= 10 * n_kills
        left = unfinished.stat().st_ctime_ns if unfinished.exists() else None  # by the program before
        assert in_a_fork(save_for_ever, 0.05 + 0.1 * rng.random()) == -signal.SIGKILL
        interrupted += unfinished.exists() and unfinished.stat().st_ctime_ns != left
        loaded = ACER.load_checkpoint(tmp_path, env, device="cpu")
        assert loaded.num_timesteps >= agent.num_timesteps
        assert loaded.replay_buffer.size() == 50
        agent.num_timesteps = loaded.num_timesteps


def test_a_manifest_without_what_it_must_say_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    agent = small_agent()
    env = agent.get_env()
    assert env is not None
    path = agent.save_checkpoint(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    for key in ("ranks", "threads"):
        (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != key}))
        with pytest.raises(ValueError, match=f"{path.name} could not be loaded: '{key}'"):
            ACER.load_checkpoint(tmp_path, env, device="cpu")
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "started_at"}))
    with pytest.raises(ValueError, match=f"{path.name} could not be loaded: 'started_at'"):
        agent.learn(200, checkpoint=tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
@pytest.mark.filterwarnings("ignore:the environments begin new episodes")
@pytest.mark.parametrize("n", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_checkpoints_load_or_raise_one_error_that_names_them(n: int, tmp_path: Path) -> None:
    rng, agent = np.random.default_rng(0), small_agent()
    path = agent.save_checkpoint(tmp_path)
    files = {each.name: each.read_bytes() for each in path.iterdir()}
    assert sorted(files) == ["agent.zip", "manifest.json", "replay_buffer.npz", "training.npz"]
    n_loaded, wrong = 0, []
    env = make_vec_env("CartPole-v1", 1, seed=0)
    with memory_for(2**32) as used:
        for i in range(n):
            name = str(rng.choice(list(files)))
            mutate = mutated if name == "manifest.json" or rng.random() < 0.2 else mutated_zip
            content = mutate(files[name], list(files.values()), rng)
            (path / name).write_bytes(content)
            manifest = json.loads(files["manifest.json"])
            if name != "manifest.json":  # as whoever means harm would, else the checkpoint is not even found
                manifest["files"][name] = len(content), zlib.crc32(content)
                (path / "manifest.json").write_text(json.dumps(manifest))
            loaded, error = attempt(lambda: ACER.load_checkpoint(tmp_path, env, device="cpu"), str(tmp_path))
            n_loaded += loaded
            wrong += [f"{i}, {name}: {error}"] if error else []
            for each, whole in files.items():
                (path / each).write_bytes(whole)
        assert used() < 2**30
    assert not wrong
    assert 0 < n_loaded < n * 0.9


def test_a_change_at_the_beginning_of_a_large_file_is_found(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, {"run": "a", "num_timesteps": 10}, 2) as files:
        (files / "first").write_bytes(bytes(2**20 + 1))  # read in two parts
    path = tmp_path / "checkpoint_1_10_steps" / "first"
    path.write_bytes(b"x" + bytes(2**20))
    with pytest.raises(ValueError, match=f"{path} could not be loaded: it has changed since it was written"):
        checkpoint.find_undamaged(tmp_path)


def test_a_folder_is_of_one_run_though_its_newest_checkpoint_does_not_say_so(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / "checkpoint_2_20_steps" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="where checkpoint_1_10_steps is of another one"):
        write(tmp_path, 30, run="b")


def test_a_checkpoint_that_does_not_say_its_run_is_of_another_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "checkpoint_1_10_steps" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["run"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="where checkpoint_1_10_steps is of another one"):
        write(tmp_path, 20)
