"""Videos and image files on machines without a screen."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
from matplotlib import pyplot as plt
from PIL import Image
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer.zoo import display
from tests.zoo.conftest import (
    sb3_acer,
)


class Silent(gym.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012


def test_an_environment_is_watched_only_if_it_can_be_made_with_a_render_mode() -> None:
    makers: dict[str, Any] = {"Silent-v0": Silent, "Loud-v0": lambda **kwargs: Silent()}
    for name, maker in makers.items():
        gym.register(name, maker)
    try:
        found = [display.takes_render_mode(name) for name in ("Silent-v0", "Loud-v0", "CartPole-v1", "Ant-v5")]
    finally:
        del gym.registry["Silent-v0"], gym.registry["Loud-v0"]
    assert found == [False, True, True, True]


@pytest.mark.parametrize(
    ("screen", "should_render", "filmed"), [("", True, True), ("", False, False), (":0", True, False)]
)
def test_only_a_screen_that_is_not_there_is_replaced(
    screen: str, should_render: bool, filmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def create_test_env(env_id: str, **kwargs: Any) -> DummyVecEnv:
        seen.update(kwargs)
        return DummyVecEnv([lambda: gym.make(env_id)])

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for name in ("SDL_VIDEODRIVER", "MUJOCO_GL"):  # set by the code: this restores them afterwards
        monkeypatch.setenv(name, "dummy")
    monkeypatch.setattr(display, "create_test_env", create_test_env)
    given: dict[str, Any] = {"stats_path": str(tmp_path / "CartPole-v1"), "env_kwargs": {"render_mode": None}}
    env = display.watchable_env("CartPole-v1", should_render=should_render, **given)
    assert isinstance(env, display.Film) == filmed
    if not filmed:
        assert seen == {**given, "should_render": should_render}
    if isinstance(env, display.Film):
        assert env.path == tmp_path / "CartPole-v1"  # within its run


@pytest.mark.parametrize(("screen", "expected"), [("", ["dummy", "egl"]), (":0", [None, None])])
def test_pygame_and_mujoco_draw_without_a_screen_where_there_is_none(
    screen: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(display, "find_library", lambda name: f"lib{name}.so")
    monkeypatch.setenv("DISPLAY", screen)
    names = ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    display.draw_offscreen()
    assert [os.environ.get(name) for name in names[1:]] == expected


def test_a_users_own_way_to_draw_without_a_screen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"SDL_VIDEODRIVER": "offscreen", "MUJOCO_GL": "osmesa"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(display, "has_screen", lambda: False)
    monkeypatch.setattr(display, "find_library", lambda name: f"lib{name}.so")
    display.draw_offscreen()
    assert {name: os.environ[name] for name in own} == own


def test_mujoco_is_left_alone_where_there_is_no_egl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SDL_VIDEODRIVER", "MUJOCO_GL"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(display, "has_screen", lambda: False)
    monkeypatch.setattr(display, "find_library", lambda name: None)
    display.draw_offscreen()
    assert "MUJOCO_GL" not in os.environ


def test_a_video_file_has_the_speed_that_was_given(tmp_path: Path) -> None:
    moviepy = pytest.importorskip("moviepy")
    frames = [np.full((64, 64, 3), 20 * step, dtype=np.uint8) for step in range(10)]
    path = display.write_film(frames, 50, tmp_path / "Env-v1")
    with moviepy.VideoFileClip(str(path)) as film:
        assert (path.suffix, film.fps) == (".mp4", 50)


def test_without_moviepy_the_video_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setitem(sys.modules, "moviepy", None)
    frames = [np.full((8, 8, 3), 20 * step, dtype=np.uint8) for step in range(5)]
    path = display.write_film(frames, 50, tmp_path / "videos" / "Env-v1")
    assert path == tmp_path / "videos" / "Env-v1.gif"
    with Image.open(path) as film:
        assert getattr(film, "n_frames", 1) == 5
        assert film.info["duration"] == 20  # ms


def test_a_video_that_fails_half_way_is_a_gif_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clip:
        def __init__(self, frames: Any, fps: float) -> None:
            pass

        def write_videofile(self, path: str, logger: Any) -> None:
            Path(path).write_bytes(b"half")
            raise OSError("no encoder")

    monkeypatch.setitem(sys.modules, "moviepy", SimpleNamespace(ImageSequenceClip=Clip))
    display.write_film([np.zeros((8, 8, 3), np.uint8)] * 2, 30, tmp_path / "Env-v1")
    assert [path.name for path in tmp_path.iterdir()] == ["Env-v1.gif"]


def test_an_environment_that_cannot_be_drawn_is_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(mode: str | None = None) -> None:
        raise OSError("no display")

    env = DummyVecEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")])
    monkeypatch.setattr(env, "render", broken)
    film = display.Film(env, tmp_path / "film")
    film.reset()
    for _ in range(3):
        film.step(np.array([0]))
        film.render("human")
    film.close()
    assert capsys.readouterr().out.count("No video") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Starting from gymnasium")
def test_an_environment_without_images_is_run_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film = display.Film(DummyVecEnv([lambda: gym.make("CartPole-v1")]), tmp_path / "film")
    film.reset()
    for _ in range(3):
        film.step(np.array([0]))
        film.render("human")
    film.close()
    assert capsys.readouterr().out.count("No video: the environment gave no image") == 1
    assert not list(tmp_path.iterdir())


def test_the_ffmpeg_of_the_system_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ffmpeg").write_text("")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with display.ffmpeg_on_path() as found:
        assert found
        assert os.environ["PATH"] == str(tmp_path)


def test_moviepys_ffmpeg_hides_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "ffmpeg-of-moviepy", tmp_path / "programs" / "own"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
    monkeypatch.setattr("moviepy.config.FFMPEG_BINARY", str(tmp_path / "ffmpeg-of-moviepy"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    with display.ffmpeg_on_path() as found:
        assert found
        assert shutil.which("ffmpeg") is not None
        assert shutil.which("own") == str(tmp_path / "programs" / "own")
    assert os.environ["PATH"] == str(tmp_path / "programs")


@pytest.fixture(scope="module")
def plotted(continued: tuple[Path, str]) -> tuple[Path, str]:
    """A folder with all plots, and what the commands printed."""
    folder = continued[0]
    printed = sb3_acer("plot-train", "-w", "2", cwd=folder)
    printed += sb3_acer("all-plots", "--no-million", "-o", "results", cwd=folder)
    printed += sb3_acer("plot-from-file", "-i", "results", "--no-million", "--boxplot", cwd=folder)
    return folder, printed


def test_without_a_screen_plots_are_pictures(plotted: tuple[Path, str]) -> None:
    folder, printed = plotted
    pictures = [line.removeprefix("Figure: ") for line in printed.splitlines() if line.startswith("Figure: ")]
    names = [f"acer_{name}" for name in ("CartPole-v1_Training_Episodic_Reward", "Results_CartPole-v1")]
    names += ["Results_CartPole-v1", "Sensitivity_plot", "Sensitivity_box_plot"]  # of a file of results
    assert set(pictures) == {f"logs/plots/{name}.png" for name in names}
    for picture in pictures:
        colours = plt.imread(folder / picture)
        assert colours.std() > 0.05
    assert not plt.get_fignums()


def test_a_figure_is_saved_when_it_is_shown_and_not_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with display.figures_saved(tmp_path, "acer_"):
        for name in ("One plot", "Another"):
            plt.figure(name)
            plt.show()
    names = [f"Figure: {tmp_path}/acer_{name}.png" for name in ("One_plot", "Another")]
    assert capsys.readouterr().out.splitlines() == names


def test_training_is_plotted_of_environments_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs/acer/Mine-Grid-v0_1").mkdir(parents=True)
    rows = "".join(f"1.0,5,{index}\n" for index in range(50))
    (tmp_path / "logs/acer/Mine-Grid-v0_1/0.monitor.csv").write_text(f'#{{"t_start": 0.0}}\nr,l,t\n{rows}')
    shown: list[list[str]] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gca().get_legend_handles_labels()[1]))
    monkeypatch.setattr(plt, "get_backend", lambda: "TkAgg")
    sb3_acer("plot-train", "-e", "Mine/Grid-v0", cwd=tmp_path)
    plt.close("all")
    assert shown == [["Mine-Grid-v0_1"]]


def test_plots_show_every_run(plotted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gca().get_legend_handles_labels()[1]))
    monkeypatch.setattr(plt, "get_backend", lambda: "TkAgg")  # as with a screen: no files
    sb3_acer("plot-train", "-w", "2", cwd=plotted[0])
    plt.close("all")
    assert [sorted(names) for names in shown] == [["CartPole-v1_1", "CartPole-v1_2"]]


def test_enjoy_writes_a_video_where_there_is_no_screen(trained: tuple[Path, str]) -> None:
    printed = sb3_acer("enjoy", "-n", "60", cwd=trained[0])
    assert sum("No screen" in line for line in printed.splitlines()) == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("Video of 60 steps: "))
    video = trained[0] / line.removeprefix("Video of 60 steps: ")
    assert video.name in ("CartPole-v1.mp4", "CartPole-v1.gif")
    assert video.stat().st_size > 0


def test_a_video_has_the_speed_of_its_environment_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr(display, "FILM_STEPS", 3)
    monkeypatch.setattr(display, "write_film", lambda frames, fps, path: written.append((len(frames), fps)))
    film = display.Film(DummyVecEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")]), tmp_path)
    film.reset()
    for _ in range(5):
        film.step(np.array([0]))
        film.render("human")
    film.close()
    assert written == [(3, 50)]


@pytest.mark.parametrize("name", ["DISPLAY", "WAYLAND_DISPLAY"])
def test_x11_and_wayland_are_screens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for each in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(each, raising=False)
    assert not display.has_screen()
    monkeypatch.setenv(name, "wayland-0")
    assert display.has_screen()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_than_linux_open_windows_without_such_variables(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert display.has_screen()


@pytest.mark.parametrize("metadata", [{}, {"render_fps": None}])
def test_a_video_of_an_environment_without_a_speed_has_30_frames_a_second(
    metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(display, "write_film", lambda frames, fps, path: written.append(fps))
    env = DummyVecEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")])
    monkeypatch.setattr(env, "get_attr", lambda *args, **kwargs: [metadata])
    film = display.Film(env, tmp_path)
    film.frames = [np.zeros((8, 8, 3), np.uint8)]
    film.close()
    assert written == [30]


def test_a_gif_begins_again(tmp_path: Path) -> None:
    frames = [np.full((8, 8, 3), 20 * step, dtype=np.uint8) for step in range(5)]
    with patch.dict(sys.modules, moviepy=None):
        path = display.write_film(frames, 50, tmp_path / "film")
    with Image.open(path) as film:
        assert film.info["loop"] == 0
