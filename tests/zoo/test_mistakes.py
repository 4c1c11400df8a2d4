"""A user's mistake at the command line is one line that says what to type."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_acer import ACER
from sb3_acer.extras import how_to_install
from sb3_acer.zoo import mistakes
from sb3_acer.zoo.mistakes import SUITES, explained, in_one_line, unknown_environment
from tests.zoo.conftest import sb3_acer

KNOBS = """
import gymnasium as gym

class Knobs(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), self.np_random.random() < 0.2, False, {}

class Broken(Knobs):
    def reset(self, *, seed=None, options=None):
        raise ValueError("a bug of mine")

gym.register("Knobs-v0", Knobs)
gym.register("Broken-v0", Broken)
"""


@pytest.fixture
def knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module that registers environments."""
    (tmp_path / "knobs.py").write_text(KNOBS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "knobs", raising=False)
    yield tmp_path
    for env_id in ("Knobs-v0", "Broken-v0"):
        gym.envs.registry.pop(env_id, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--env", "CartPol-v1"],
            "--env must be the id of a registered environment, got 'CartPol-v1', near to 'CartPole-v1'",
        ),
        (["--env", "Mine-v9"], "--gym-packages names: --env Mine-v9 --gym-packages MODULE"),
        (
            ["--env", "Mine-v9", "--gym-packages", "nowhere"],
            "No module named 'nowhere'. --gym-packages, env_wrapper and the like must name modules in",
        ),
        (
            ["-params", "n_steps:abc"],
            "must be KEY:VALUE with values of Python, strings in quotes: name 'abc' is not def",
        ),
        (["-params", "learning_rate=1e-3"], "must be KEY:VALUE with values of Python"),
        (["-params", "n_steps:"], "must be KEY:VALUE with values of Python, strings in quotes: invalid syntax"),
        (["-params", "n_envs:0"], "n_envs must be an integer of at least 1, got 0"),
        (["-params", "n_steps:-1"], "n_steps must be an integer of at least 1, got -1"),
        (["-params", "learning_starts:5"], "ACER has no argument 'learning_starts'; instead it has replay_start"),
        (["-params", "n_env:2"], "the settings must not have 'n_env': rl-zoo's is 'n_envs'"),
        (["-params", "callback:1"], "callback must be MODULE.CLASS, or a list of such names, got 1"),
        (["-params", "callback:'nope'"], "callback must be MODULE.CLASS, or a list of such names, got 'nope'"),
        (["-params", "policy:5"], "policy must be a name, or MODULE.CLASS, got 5"),
        (["-params", "frame_stack:0"], "frame_stack must be an integer of at least 1, got 0"),
        (
            ["-params", "vec_env_wrapper:'stable_baselines3.common.vec_env.VecNormalize'"],
            "vec_env_wrapper must be without VecNormalize, whose statistics normalize:True keeps, got ",
        ),
        (["-f", "l[1]"], "--log-folder must be a path without *, ? and [, which rl-zoo takes for patterns, got 'l[1]'"),
        (["-params", "env_kwargs:5"], "env_kwargs must be a dict, got 5"),
        (["-params", "seed:3"], "seed must be given as --seed, got 3"),
        (["-params", "learning_rate:'often'"], "learning_rate and clip_range must be numbers, or 'lin_NUMBER' for one"),
        (["-conf", "none.yml"], "No such file or directory: 'none.yml'"),
        (["--algo", "ppo_mask"], "ppo_mask.yml'. -conf must name a file of hyperparameters with an entry"),
        (["--seed", "4294967296"], "Seed must be between 0 and 2**32 - 1"),
        (["-f", f"{__file__}/logs"], "Not a directory"),
        (["--trial-id", "3"], "--trial-id must be given with --storage and --study-name, got 3"),
        (["--resume", "-i", "agent.zip"], "-i must be left out with --resume, which goes on from a checkpoint"),
        (["--trained-agent", "none.zip"], "The trained_agent must be a valid path to a .zip file"),
    ],
)
def test_a_mistake_ends_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        sb3_acer("train", *arguments, cwd=tmp_path)
    (line,) = str(exit_info.value.code).splitlines()
    assert line.startswith("sb3-acer train: ")
    assert message in line


def test_an_environment_of_ones_own_is_registered_by_a_module_of_the_folder(knobs: Path) -> None:
    packages = ("--gym-packages", "knobs")
    printed = sb3_acer("train", "--env", "Knobs-v0", *packages, "-n", "64", "--eval-freq", "-1", cwd=knobs)
    assert "To watch the agent: sb3-acer enjoy --env Knobs-v0 --gym-packages knobs --no-render" in printed
    with pytest.raises(ValueError, match="a bug of mine"):  # with its traceback
        sb3_acer("train", "--env", "Broken-v0", *packages, "-n", "64", cwd=knobs)


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [("LunarLander-v3", "Box2D", "box2d"), ("HalfCheetah-v5", "mujoco", "mujoco")],
)
def test_a_missing_dependency_of_an_environment_is_named_with_its_extra(
    env_id: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module or "gymnasium.envs." + extra in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(gym.error.DependencyNotInstalled) as raised:
        gym.make(env_id)
    message = explained(raised.value)
    assert message.lower() == f"{module} is not installed: {how_to_install(extra)}".lower()


def test_the_settings_that_dict_observations_need_are_named() -> None:
    env: gym.Env[Any, Any] = gym.Env()
    env.observation_space = spaces.Dict(vector=spaces.Box(-1, 1, (3,)), kind=spaces.Discrete(3))
    env.action_space = spaces.Discrete(2)
    venv = DummyVecEnv([lambda: env])
    for make, message, option in (
        (lambda: ACER("MlpPolicy", venv), "policy must be", "policy:'MultiInputPolicy'"),
        (lambda: VecNormalize(venv), "norm_obs_keys", "normalize:dict(norm_obs_keys=['KEY'])"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            make()
        assert explained(raised.value).endswith(f'-params "{option}"')


def test_a_game_without_ale_py_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "find_spec", lambda name: None)
    for env_id in ("PongNoFrameskip-v4", "PongDeterministic-v4", "ALE/Pong-v5"):
        assert unknown_environment(env_id) == f"{env_id} needs ale-py: {how_to_install('atari')}"


def test_a_mistyped_game_is_one_where_ale_py_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "find_spec", lambda name: sys)
    assert unknown_environment("PngNoFrameskip-v4").startswith("--env must be the id of a registered environment, got")


@pytest.mark.parametrize(("module", "extra"), [("minigrid", "minigrid"), ("popgym", "popgym"), ("ale_py", "atari")])
def test_a_suite_that_is_not_installed_is_named_with_its_extra(
    module: str, extra: str, shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    with pytest.raises(SystemExit) as end:
        sb3_acer("train", "--env", "MiniGrid-DoorKey-5x5-v0", "--gym-packages", module, cwd=shell)
    message = str(end.value)
    assert message.startswith("sb3-acer train: ")
    assert module in message
    assert message.endswith(how_to_install(extra))


@pytest.mark.parametrize("env_id", ["MiniGrid-Empty-5x5-v0", "popgym-AutoencodeEasy-v0", "MinAtar/Seaquest-v1"])
def test_a_suite_is_registered_by_an_option(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra = next(of_suite for beginning, of_suite in SUITES.items() if env_id.startswith(beginning))
    monkeypatch.delitem(sys.modules, module, raising=False)
    expected = f"{env_id} needs the option --gym-packages {module} and its extra: {how_to_install(extra)}"
    assert unknown_environment(env_id) == expected
    monkeypatch.setitem(sys.modules, module, sys)
    assert "must be the id of a registered environment" in unknown_environment(env_id)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("-n", "0"), "--n-timesteps must be at least 1, or -1 for the entry's, got 0"),
        (("--log-interval", "0"), "--log-interval must be at least 1, .*, got 0"),
        (("-params", "policy_kwargs:dict(activation_fn=nn.Foo)"), "has no attribute 'Foo'"),
        (("-params", "env_wrapper:'nope.Wrapper'"), "No module named 'nope'. .*env_wrapper"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line_and_leave_no_run(
    given: tuple[str, ...], message: str, shell: Path
) -> None:
    with pytest.raises(SystemExit, match=f"^sb3-acer train: .*{message}"):
        sb3_acer("train", *given, cwd=shell)
    assert not list(shell.glob("logs/acer/*"))


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("train", ("--n-eval-envs", "0"), "--n-eval-envs must be at least 1, got 0"),
        ("train", ("--n-eval-envs", "-1"), "--n-eval-envs must be at least 1, got -1"),
        ("train", ("--eval-episodes", "-2"), "--eval-episodes must be at least 1, got -2"),
        ("train", ("--num-threads", "0"), "--num-threads must be at least 1, or -1 for torch's default, got 0"),
        ("tune", ("--n-evaluations", "0"), "--n-evaluations must be at least 1, got 0"),
        ("tune", ("--eval-episodes", "0"), "--eval-episodes must be at least 1, got 0"),
        ("tune", ("--n-trials", "0"), "--n-trials must be at least 1, got 0"),
        ("tune", ("--max-total-trials", "0"), "--max-total-trials must be at least 1, got 0"),
        ("tune", ("--n-jobs", "0"), "--n-jobs must be at least 1, or -1 for one per core, got 0"),
        ("enjoy", ("-n", "-3"), "--n-timesteps must be at least 1, got -3"),
        ("enjoy", ("--n-envs", "0"), "--n-envs must be at least 1, got 0"),
        ("record-video", ("--num-threads", "-2"), "--num-threads must be at least 1, or -1 for .*, got -2"),
        ("benchmark", ("-n", "-1"), "--n-timesteps must be at least 1, got -1"),
    ],
)
def test_a_number_that_counts_something_is_at_least_1(
    command: str, given: tuple[str, ...], message: str, shell: Path
) -> None:
    with pytest.raises(SystemExit, match=f"^sb3-acer {command}: {message}$"):
        sb3_acer(command, *given, cwd=shell)
    assert not list(shell.iterdir())


def test_an_environment_that_is_not_registered_or_cannot_draw_itself_is_explained() -> None:
    def said(error: Exception) -> str:
        with pytest.raises(type(error)) as raised:
            raise error
        return explained(raised.value)

    assert said(KeyError("Mine-v3")).endswith("--env Mine-v3 --gym-packages MODULE")
    assert said(KeyError("gain is not a file in the archive")).endswith("tells them, got 'gain'")
    error = TypeError("Knobs() got an unexpected keyword argument 'render_mode'")
    assert said(error).startswith("An environment that cannot draw itself is played with enjoy --no-render: ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-conf", "mine.yml"], "the settings must have 'n_timesteps'"),
        (["--env", "FrozenLake-v1", "--env-kwargs", "map_name:'9x9'"], "frozen_lake.py does not know '9x9'"),
        (["--env", "FrozenLake-v1", "--env-kwargs", "desc:['SF','FFG']"], "inhomogeneous shape"),
    ],
)
def test_what_is_unknown_to_the_zoo_or_to_the_environment_is_said(given: list[str], message: str, shell: Path) -> None:
    (shell / "mine.yml").write_text("CartPole-v1:\n  policy: 'MlpPolicy'\n")
    with pytest.raises(SystemExit, match=re.escape(message)):
        sb3_acer("train", *given, cwd=shell)


def test_plots_over_the_runs_of_one_agent_need_two_of_them(shell: Path) -> None:
    run = shell / "logs/acer/CartPole-v1_1"
    run.mkdir(parents=True)
    np.savez(run / "evaluations.npz", timesteps=[10, 20], results=np.ones((2, 3)), ep_lengths=np.ones((2, 3)))
    sb3_acer("all-plots", "-o", "saved", "--no-million", cwd=shell)
    with pytest.raises(SystemExit, match="plot-from-file: the file must have at least two runs of each agent"):
        sb3_acer("plot-from-file", "-i", "saved.pkl", "--rliable", cwd=shell)


def test_errors_of_training_and_of_ones_own_code_keep_their_traceback() -> None:
    def learn() -> None:
        gym.make("Nowhere-v0")

    with pytest.raises(gym.error.Error), in_one_line("train"):
        learn()
    with pytest.raises(ValueError, match="mine"), in_one_line("train"):
        raise ValueError("mine")
    neighbour = compile("raise KeyError('mine')", f"{Path(np.__file__).parent}_envs/door.py", "exec")
    with pytest.raises(KeyError, match="mine"), in_one_line("train"):
        exec(neighbour)
    with pytest.raises(SystemExit, match="sb3-acer train: Environment `Nowhere` doesn't exist"), in_one_line("train"):
        gym.make("Nowhere-v0")


def of_numpy(code: str) -> Any:
    """Code that seems to be a library's."""
    return compile(code, f"{Path(np.__file__).parent}/door.py", "exec")


@pytest.mark.parametrize("name", ["learn", "objective"])
def test_errors_of_libraries_in_training_keep_their_traceback(name: str) -> None:
    library: dict[str, Any] = {}
    exec(of_numpy(f"def {name}(): raise KeyError('theirs')"), library)
    with pytest.raises(KeyError, match="theirs"), in_one_line("train"):
        library[name]()


def test_errors_of_packages_that_are_installed_within_the_standard_library_keep_their_traceback() -> None:
    package = compile("raise KeyError('mine')", f"{Path(os.__file__).parent}/site-packages/mine/door.py", "exec")
    with pytest.raises(KeyError, match="mine"), in_one_line("train"):
        exec(package)


def test_an_error_without_a_text_is_said_by_its_name() -> None:
    with pytest.raises(SystemExit, match=r"^sb3-acer train: AssertionError$"), in_one_line("train"):
        exec(of_numpy("raise AssertionError"))
