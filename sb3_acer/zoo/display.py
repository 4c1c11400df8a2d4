"""Videos and image files instead of windows, for machines without a screen."""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from shutil import copy, which
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import matplotlib
import numpy as np
from gymnasium.envs.registration import load_env_creator
from matplotlib import pyplot as plt
from rl_zoo3.utils import create_test_env
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

FILM_STEPS = 1000  # frames stay in memory until the video is written: 0.7 MB each for CartPole


def has_screen() -> bool:
    """Whether a window can be opened. On Linux, the environment variables of X11 and Wayland tell."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def draw_offscreen() -> None:
    """If there is no screen, make pygame and MuJoCo render without one."""
    if has_screen():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # otherwise pygame looks for a screen and prints errors
    if find_library("EGL"):  # otherwise MuJoCo opens a window; without libEGL this setting makes its import fail
        os.environ.setdefault("MUJOCO_GL", "egl")


class Film(VecEnvWrapper):
    """
    Keeps a frame whenever the zoo renders the environment, and writes the frames as a video when it is closed.

    :param venv: the environment
    :param path: the video's path, without suffix
    """

    def __init__(self, venv: VecEnv, path: Path) -> None:
        super().__init__(venv)
        self.path = path
        self.frames: list[np.ndarray] = []
        self.filming = True

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        return self.venv.step_wait()

    def render(self, mode: str | None = None) -> None:
        if not self.filming:
            return
        try:
            frame = self.venv.render("rgb_array")
        except Exception as error:  # renderers raise different errors; the run does not need a video
            print(f"No video: the environment cannot be rendered here ({error!r})")
            self.filming = False
            return
        if frame is None:
            print("No video: the environment gave no image: its attribute render_mode must be 'rgb_array'")
            self.filming = False
            return
        self.frames.append(frame)
        self.filming = len(self.frames) < FILM_STEPS

    def close(self) -> None:
        fps = self.venv.get_attr("metadata")[0].get("render_fps") or 30
        super().close()
        if self.frames:
            print(f"Video of {len(self.frames)} steps: {write_film(self.frames, fps, self.path)}")
            self.frames = []


def write_film(frames: list[np.ndarray], fps: float, path: Path) -> Path:
    """
    Write an MP4 file, or a GIF file if moviepy or its ffmpeg is missing.

    :param frames: RGB images, ``[height, width, 3]`` each
    :param fps: frames per second
    :param path: the file's path, without suffix
    :return: the file's path
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    video = path.with_name(f"{path.name}.mp4")
    try:
        from moviepy import ImageSequenceClip

        ImageSequenceClip(frames, fps=fps).write_videofile(str(video), logger=None)
    except (ImportError, OSError, RuntimeError):
        from PIL import Image

        video.unlink(missing_ok=True)
        video = path.with_name(f"{path.name}.gif")
        first, *rest = (Image.fromarray(frame) for frame in frames)
        first.save(video, save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    return video


def takes_render_mode(env_id: str) -> bool:
    """Whether ``gymnasium.make`` can hand on the ``render_mode`` with which an environment is watched."""
    entry_point: Any = gym.spec(env_id).entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    parameters = inspect.signature(creator).parameters.values()
    return any(each.name == "render_mode" or each.kind is each.VAR_KEYWORD for each in parameters)


def watchable_env(env_id: str, *, should_render: bool, **kwargs: Any) -> VecEnv:
    """The zoo's ``create_test_env``. To render without a screen, it records a video."""
    if not should_render or has_screen():
        return create_test_env(env_id, should_render=should_render, **kwargs)
    print("No screen (DISPLAY and WAYLAND_DISPLAY are not set): writing a video instead")
    draw_offscreen()
    kwargs["env_kwargs"] = {**kwargs["env_kwargs"], "render_mode": "rgb_array"}
    statistics = Path(kwargs["stats_path"] or env_id.replace("/", "-"))  # RUN/ENV for an agent that the zoo has trained
    return Film(create_test_env(env_id, **kwargs), statistics)  # not in videos/, which record-training empties


@contextmanager
def figures_saved(folder: Path, prefix: str) -> Iterator[None]:
    """
    If matplotlib cannot open windows, its ``show`` saves all open figures as PNG files and prints their paths.

    :param folder: where
    :param prefix: how the files' names begin
    """
    if plt.get_backend().lower() != "agg":
        yield
        return

    def save_figures(*args: Any, **kwargs: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number in plt.get_fignums():
            figure = plt.figure(number)
            label = str(figure.get_label()).replace(" ", "_").replace("/", "-")
            path = folder / f"{prefix}{label}.png"
            figure.savefig(path, dpi=150)
            print(f"Figure: {path}")
        plt.close("all")  # as a user closes windows

    with patch.object(plt, "show", save_figures):
        try:
            yield
        finally:
            plt.close("all")  # also those of a command that failed


@contextmanager
def ffmpeg_on_path() -> Iterator[bool]:
    """If the system has no ffmpeg, put moviepy's on the PATH. Yields whether there is one."""
    if which("ffmpeg"):
        yield True
        return
    try:
        from moviepy.config import FFMPEG_BINARY
    except (ImportError, RuntimeError):
        yield False
        return
    with TemporaryDirectory() as folder:
        copy(FFMPEG_BINARY, Path(folder, "ffmpeg.exe" if os.name == "nt" else "ffmpeg"))  # Windows refuses links
        with patch.dict(os.environ, PATH=os.pathsep.join([folder, os.environ.get("PATH", "")])):
            yield True


@contextmanager
def font_for_ffmpeg() -> Iterator[None]:
    """Give ffmpeg matplotlib's font to write with: a system may have none."""
    with TemporaryDirectory() as folder:
        copy(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), folder)
        settings = Path(folder, "fonts.conf")
        settings.write_text(f"<fontconfig><dir>{folder}</dir><cachedir>{folder}</cachedir></fontconfig>")
        with patch.dict(os.environ, FONTCONFIG_FILE=str(settings)):
            yield
