"""rl-zoo with ACER registered: its own scripts, its own arguments, this package's hyperparameters.

Imported by the command line only, so that ``import sb3_acer`` needs none of what rl-zoo needs.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from ctypes.util import find_library
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import rl_zoo3.enjoy
import rl_zoo3.train
import torch as th
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from optuna.trial import BaseTrial
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from rl_zoo3.utils import ALGOS, create_test_env, get_model_path
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.results_plotter import X_TIMESTEPS, ts2xy, window_func
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_acer import ACER, __version__

HYPERPARAMS = Path(__file__).with_name("hyperparams") / "acer.yml"
LOG_FOLDER = "logs"  # where the zoo's train saves; its enjoy would look in rl-trained-agents
EVAL_EPISODES = 100
FILM_STEPS = 1000  # frames are kept in memory until the video is written: 0.7 MB each for CartPole

# `sb3-acer train` alone: a progress bar instead of tables; networks this small are fastest on one CPU core.
FIRST_RUN = ["--progress", "--log-interval=-2", "--n-eval-envs=5", "--device=cpu", "--num-threads=1"]

NET_ARCHS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
ACTIVATIONS = {"tanh": th.nn.Tanh, "relu": th.nn.ReLU, "elu": th.nn.ELU}
OPTIMIZERS = {"rmsprop": RMSpropTFLike, "adam": th.optim.Adam}


def convert_acer_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """A trial's raw ``params``, as a study stores them, as arguments of ACER."""
    hyperparams = sampled_params.copy()
    for name in ("n_steps", "batch_size", "buffer_size", "replay_start"):
        hyperparams[name] = 2 ** hyperparams.pop(f"{name}_pow")
    for name in ("gamma", "alpha"):
        hyperparams[name] = 1 - hyperparams.pop(f"one_minus_{name}")
    layers = NET_ARCHS[hyperparams.pop("net_arch")]
    hyperparams["policy_kwargs"] = {
        "net_arch": {"pi": list(layers), "qf": list(layers)},
        "activation_fn": ACTIVATIONS[hyperparams.pop("activation_fn")],
        "optimizer_class": OPTIMIZERS[hyperparams.pop("optimizer")],
    }
    return hyperparams


def sample_acer_params(
    trial: BaseTrial, n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of ACER drawn for a trial: the zoo's signature, of which ACER needs the trial only."""
    trial.suggest_int("n_steps_pow", 3, 7)
    trial.suggest_int("batch_size_pow", 0, 5)
    # Steps of the vectorised environment. The largest replay_start is the smallest buffer: every draw can replay.
    trial.suggest_int("buffer_size_pow", 10, 16)
    trial.suggest_int("replay_start_pow", 6, 10)
    trial.suggest_int("replay_ratio", 1, 16, log=True)
    trial.suggest_float("learning_rate", 1e-5, 5e-3, log=True)
    trial.suggest_categorical("lr_schedule", ["constant", "linear"])
    trial.suggest_float("ent_coef", 1e-6, 0.1, log=True)
    trial.suggest_float("q_coef", 0.1, 2.0, log=True)
    trial.suggest_float("correction_term", 1.0, 20.0, log=True)
    trial.suggest_float("delta", 0.05, 5.0, log=True)
    trial.suggest_float("one_minus_alpha", 1e-3, 0.1, log=True)
    trial.suggest_float("one_minus_gamma", 1e-4, 0.03, log=True)
    trial.suggest_categorical("net_arch", list(NET_ARCHS))
    trial.suggest_categorical("activation_fn", list(ACTIVATIONS))
    trial.suggest_categorical("optimizer", list(OPTIMIZERS))
    hyperparams = convert_acer_params(trial.params)
    for name in ("n_steps", "batch_size", "buffer_size", "replay_start", "gamma", "alpha"):
        trial.set_user_attr(name, hyperparams[name])  # the zoo prints these beside the raw params
    return hyperparams


def register() -> None:
    """Make ACER an algorithm of rl-zoo in this process.

    Every module of the zoo shares these dicts: they are changed, never replaced.
    """
    ALGOS["acer"] = ACER
    HYPERPARAMS_SAMPLER["acer"] = sample_acer_params
    HYPERPARAMS_CONVERTER["acer"] = convert_acer_params


class Experiment(ExperimentManager):
    """The zoo's experiment, which ends with a report on what it has saved."""

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        super().save_trained_model(model)
        agent = f"{self.save_path}/{self.env_name}.zip"
        print(f"Agent: {agent}")
        self.draw_learning_curve()
        if self.eval_freq > 0:  # else the user has asked for no evaluation, maybe because there is only one environment
            self.evaluate(model, agent)
        print(f"To watch the agent: {command('enjoy', self.algo, self.env_name.gym_id, self.log_folder)}")

    def evaluate(self, model: BaseAlgorithm, agent: str) -> None:
        kind = "deterministic" if self.deterministic_eval else "stochastic"
        print(f"Evaluating over {EVAL_EPISODES} episodes ({kind} actions)", flush=True)
        self.verbose = 0
        self.trained_agent = agent  # the zoo then loads this run's VecNormalize statistics instead of starting new ones
        self.eval_env_kwargs = self.eval_env_kwargs or self.env_kwargs
        env = self.create_envs(self.n_eval_envs, eval_env=True)
        mean, std = evaluate_policy(model, env, EVAL_EPISODES, deterministic=self.deterministic_eval)
        env.close()
        print(f"Mean reward: {mean:.2f} +/- {std:.2f}")

    def draw_learning_curve(self) -> None:
        episodes = load_results(self.save_path)
        if len(episodes) == 0:
            print("Learning curve: none, as no episode ended")
            return
        steps, rewards = ts2xy(episodes, X_TIMESTEPS)
        figure = learning_curve(steps, rewards, f"{self.algo.upper()} on {self.env_name.gym_id}")
        path = f"{self.save_path}/learning_curve.png"
        figure.savefig(path, dpi=150)
        print(f"Learning curve: {path}")


def learning_curve(steps: np.ndarray, rewards: np.ndarray, title: str) -> Figure:
    """Every episode's reward and their running mean, over the environment steps taken."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(steps, rewards, s=9, color="tab:blue", alpha=0.3, linewidths=0, label="episode")
    window = min(100, len(rewards), max(5, len(rewards) // 10))
    mean_steps, means = window_func(steps, rewards, window, np.mean)
    axes.plot(mean_steps, means, color="tab:blue", linewidth=2, label=f"mean of the last {window} episodes")
    axes.set(title=title, xlabel="environment steps", ylabel="episode reward")
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="best")
    return figure


class Film(VecEnvWrapper):
    """Keeps a frame wherever the zoo draws on the screen, and writes them as a video when it closes.

    :param path: where to write, without the suffix
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
        except Exception as error:  # without a screen each renderer fails in its own way, and the run can do without
            print(f"No video: the environment cannot be drawn here ({error!r})")
            self.filming = False
            return
        if frame is not None:
            self.frames.append(frame)
        self.filming = len(self.frames) < FILM_STEPS

    def close(self) -> None:
        fps = self.venv.get_attr("metadata")[0].get("render_fps") or 30
        super().close()
        if self.frames:
            print(f"Video of {len(self.frames)} steps: {write_film(self.frames, fps, self.path)}")
            self.frames = []


def write_film(frames: list[np.ndarray], fps: float, path: Path) -> Path:
    """Write an MP4, or a GIF where moviepy or its ffmpeg is missing; returns the file's path."""
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


def has_screen() -> bool:
    """Whether a window can open, as far as it can be told: on Linux by the variables of X11 and Wayland."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def watchable_env(env_id: str, *, should_render: bool, **kwargs: Any) -> VecEnv:
    """The zoo's ``create_test_env``, filmed where there is no screen to draw on."""
    if not should_render or has_screen():
        return create_test_env(env_id, should_render=should_render, **kwargs)
    print("No screen here (DISPLAY and WAYLAND_DISPLAY are not set): writing a video instead")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame looks for a screen, and says what it did not find
    if find_library("EGL"):  # MuJoCo would try to open a window; its import fails if told of an EGL that is not there
        os.environ.setdefault("MUJOCO_GL", "egl")
    kwargs["env_kwargs"] = {**kwargs["env_kwargs"], "render_mode": "rgb_array"}
    statistics = Path(kwargs["stats_path"] or env_id.replace("/", "-"))  # RUN/ENV where the zoo has trained the agent
    return Film(create_test_env(env_id, **kwargs), statistics.parent / "videos" / statistics.name)


def find_agent(exp_id: int, folder: str, algo: str, env_name: Any, *which: Any) -> tuple[str, str, str]:
    """The zoo's ``get_model_path``, which ends with one line where there is no agent.

    :param env_name: huggingface_sb3's EnvironmentName
    """
    try:
        with redirect_stdout(StringIO()) as said:
            found = get_model_path(exp_id, folder, algo, env_name, *which)
    except (AssertionError, ValueError) as error:
        if "rl-trained-agents" in folder:  # the zoo then tries to download it
            raise
        sys.exit(f"No saved agent: {error}. To make one: {command('train', algo, env_name.gym_id, folder)}")
    print(said.getvalue(), end="")
    return found


def command(name: str, algo: str, env_id: str, folder: str) -> str:
    """The command line that a user would type: without what is filled in anyway."""
    options = {"--algo": (algo, "acer"), "--env": (env_id, "CartPole-v1"), "-f": (folder, LOG_FOLDER)}
    return f"sb3-acer {name}" + "".join(f" {key} {value}" for key, (value, usual) in options.items() if value != usual)


def run_zoo(name: str, script: Callable[[], None], defaults: list[str], arguments: list[str]) -> None:
    """Run a script of the zoo; ``defaults`` come first, since argparse keeps the last of what is given twice."""
    sys.argv = [f"sb3-acer {name}", *defaults, *arguments]
    script()


def train(arguments: list[str]) -> None:
    """train an agent, evaluate it and draw its learning curve (no arguments: CartPole-v1)"""
    algo_parser = argparse.ArgumentParser(add_help=False)
    algo_parser.add_argument("--algo", default="acer")
    algo = algo_parser.parse_known_args(arguments)[0].algo
    defaults = ["--algo", "acer", "-conf", str(HYPERPARAMS)] if algo == "acer" else []
    with patch.object(rl_zoo3.train, "ExperimentManager", Experiment):
        run_zoo("train", rl_zoo3.train.train, defaults, arguments or FIRST_RUN)


def enjoy(arguments: list[str]) -> None:
    """watch a saved agent, or write a video of it where there is no screen"""
    with patch.multiple(rl_zoo3.enjoy, get_model_path=find_agent, create_test_env=watchable_env):
        run_zoo("enjoy", rl_zoo3.enjoy.enjoy, ["--algo", "acer", "-f", LOG_FOLDER], arguments)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "enjoy": enjoy,
}


def usage() -> str:
    commands = "\n".join(f"  {name:<8}{run.__doc__}" for name, run in COMMANDS.items())
    return (
        f"sb3-acer {__version__}: rl-zoo's commands, with ACER\n\nusage: sb3-acer COMMAND [ARGUMENTS]\n\n{commands}\n\n"
        "The arguments are those of rl-zoo: sb3-acer COMMAND --help lists them."
    )


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"sb3-acer: command must be one of {', '.join(COMMANDS)}, got {name!r}", file=sys.stderr)
        return 2
    register()
    try:
        COMMANDS[name](rest)
    except KeyboardInterrupt:  # training saves its agent first: only what follows is cut short
        return 130
    return 0
