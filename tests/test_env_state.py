"""The state of environments: set in another one, that one goes on as the first does."""

import codecs
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils import EzPickle
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_acer import ACER
from sb3_acer.env_state import EnvStateError, cut_logs, get_env_state, set_env_state
from tests.helpers import Recall, Recorder

FORKED: dict[str, Any] = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
CLASSIC = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"]


def played(env: VecEnv, n_steps: int, seed: int) -> list[Any]:
    env.action_space.seed(seed)
    steps = []
    for _ in range(n_steps):
        observations, rewards, dones, infos = env.step(
            np.array([env.action_space.sample() for _ in range(env.num_envs)])
        )
        episodes = [{key: info.get("episode", {}).get(key) for key in "rl"} for info in infos]
        steps.append((np.array(observations), rewards, dones, episodes))
    return steps


def require_same(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine[:3], other[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert mine[3] == other[3]


def require_that_another_goes_on(make: Callable[[], VecEnv], n_steps: int = 130) -> str:
    first, second = make(), make()
    first.seed(1)
    first.reset()
    played(first, 37, 2)
    state = get_env_state(first)
    second.seed(7)
    second.reset()
    played(second, 5, 3)
    set_env_state(second, state)
    require_same(played(second, n_steps, 4), played(first, n_steps, 4))
    first.close()
    second.close()
    return state.source


@pytest.mark.parametrize("env_id", CLASSIC)
def test_classic_control_goes_on(env_id: str) -> None:
    assert require_that_another_goes_on(lambda: make_vec_env(env_id, 2)) == "attributes"


@pytest.mark.skipif(find_spec("mujoco") is None, reason="needs mujoco")
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_mujoco_goes_on(env_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Humanoid's rewards are of positions that are not derived anew from qpos, so the whole MjData is needed."""
    monkeypatch.chdir(tmp_path)  # for MuJoCo's log of warnings
    assert require_that_another_goes_on(lambda: make_vec_env(env_id, 2), 60) == "attributes"


@pytest.mark.skipif(find_spec("ale_py") is None, reason="needs ale-py")
def test_ale_goes_on_under_the_usual_wrappers_with_sticky_actions() -> None:
    import ale_py

    gym.register_envs(ale_py)

    def make() -> VecEnv:
        return VecFrameStack(make_atari_env("PongNoFrameskip-v4", 2, env_kwargs={"repeat_action_probability": 0.3}), 4)

    assert require_that_another_goes_on(make) == "attributes"


def test_environments_in_processes_of_their_own_go_on() -> None:
    assert require_that_another_goes_on(lambda: make_vec_env("CartPole-v1", 2, **FORKED)) == "attributes"


def test_statistics_returns_and_stacks_of_the_wrappers_go_on() -> None:
    def make() -> VecEnv:
        return VecFrameStack(VecNormalize(VecMonitor(make_vec_env(Recall, 3))), 4)

    require_that_another_goes_on(make)


class Locked(Recorder):
    """An environment that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Candid(Locked):
    """The same, which says its state."""

    def get_state(self) -> Any:
        return self.clock.copy()

    def set_state(self, state: Any) -> None:
        self.clock = state


class Simulator(EzPickle):
    """Pickles itself by its arguments."""

    def __init__(self) -> None:
        super().__init__()


class Forgetful(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.simulator = Simulator()


def test_an_environment_with_get_state_and_set_state_says_its_state_itself() -> None:
    assert require_that_another_goes_on(lambda: make_vec_env(Candid, 2)) == "get_state"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Locked, r"cannot pickle '_thread.lock' object \(environment Locked\)"),
        (Forgetful, r"a pickled Simulator has its arguments only \(environment Forgetful\)"),
    ],
)
@pytest.mark.parametrize("kwargs", [{}, FORKED], ids=["DummyVecEnv", "SubprocVecEnv"])
def test_without_a_state_the_reason_is_said_and_the_statistics_are_set(
    make: Callable[[], gym.Env[Any, Any]], reason: str, kwargs: dict[str, Any]
) -> None:
    first, second = (VecNormalize(make_vec_env(make, 2, **kwargs)) for _ in range(2))
    first.reset()
    played(first, 20, 0)
    state = get_env_state(first)
    with pytest.raises(EnvStateError, match=reason):
        set_env_state(second, state)
    np.testing.assert_array_equal(second.ret_rms.mean, first.ret_rms.mean)
    second.reset()  # all of the processes are alive
    first.close()
    second.close()


def test_another_number_of_environments_gets_the_statistics_only() -> None:
    first, second = VecNormalize(make_vec_env(Recall, 3)), VecNormalize(make_vec_env(Recall, 2))
    first.reset()
    played(first, 20, 0)
    with pytest.raises(EnvStateError, match="there were 3 environments, and now there are 2"):
        set_env_state(second, get_env_state(first))
    np.testing.assert_array_equal(second.ret_rms.var, first.ret_rms.var)
    second.reset()
    played(second, 5, 0)


def test_environments_with_other_wrappers_get_no_state() -> None:
    first = VecNormalize(make_vec_env("CartPole-v1", 1))
    first.reset()
    with pytest.raises(ValueError, match=r"the environment had the wrappers \['VecNormalize'\]"):
        set_env_state(make_vec_env("CartPole-v1", 1), get_env_state(first))
    with pytest.raises(EnvStateError, match=r"the environment was Monitor of .* of CartPoleEnv, and now it is another"):
        set_env_state(VecNormalize(make_vec_env("Pendulum-v1", 1)), get_env_state(first))


def test_a_state_is_a_copy_and_nothing_changes_by_reading_it() -> None:
    env, other = make_vec_env("CartPole-v1", 2, seed=1), make_vec_env("CartPole-v1", 2, seed=1)
    env.reset()
    other.reset()
    state = get_env_state(env)
    first = played(env, 50, 2)
    require_same(first, played(other, 50, 2))
    set_env_state(env, state)
    require_same(played(env, 50, 2), first)


def test_a_monitors_file_is_cut_only_where_it_is_the_same_and_has_more_than_the_state_knows(tmp_path: Path) -> None:
    def monitored(name: str) -> VecEnv:
        return make_vec_env(Recorder, 1, monitor_dir=str(tmp_path / name))

    def contents(name: str) -> bytes:
        return (tmp_path / name / "0.monitor.csv").read_bytes()

    first, other = monitored("first"), monitored("other")
    for env in (first, other):
        env.reset()
        played(env, 30, 0)
    state, known = get_env_state(first), contents("first")
    played(first, 60, 0)
    played(other, 30, 0)
    of_first, of_other = contents("first"), contents("other")
    cut_logs(other, set_env_state(other, state))
    assert contents("other") == of_other
    logs = set_env_state(first, state)
    assert contents("first") == of_first  # until training goes on from there
    cut_logs(other, logs)
    assert (contents("first"), contents("other")) == (of_first, of_other)
    cut_logs(first, logs)
    assert contents("first") == known
    replayed = played(first, 60, 0)
    assert contents("first").count(b"\n") == of_first.count(b"\n")
    logs = set_env_state(first, state)
    require_same(played(first, 60, 0), replayed)  # by an evaluation, say
    longer = contents("first")
    cut_logs(first, logs)
    assert contents("first") == longer
    first.close()
    again = monitored("first")  # which begins the file anew
    begun = contents("first")
    cut_logs(again, set_env_state(again, state))
    assert contents("first") == begun


PROGRAM = """
import enum, pickle, sys
from dataclasses import dataclass
from stable_baselines3.common.vec_env import DummyVecEnv
from sb3_acer.env_state import get_env_state, set_env_state
from tests.helpers import Recorder

class Phase(enum.Enum):
    FIRST = 1

@dataclass
class Card:
    number: int

def double(number):
    return 2 * number

env = DummyVecEnv([Recorder])
game = env.envs[0]
if sys.argv[2] == "save":
    local = lambda number: 3 * number
    game.phase, game.hand, game.functions = Phase.FIRST, [Card(1)], [double, local]
    with open(sys.argv[1], "wb") as file:
        pickle.dump(get_env_state(env), file)
else:
    with open(sys.argv[1], "rb") as file:
        set_env_state(env, pickle.load(file))
    assert game.phase is Phase.FIRST
    assert Card(1) in game.hand
    assert game.functions[0] is double
    assert game.functions[1](2) == 6
"""


def test_classes_and_functions_of_the_program_are_the_same_ones_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[1])
    for task in ("save", "load"):
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "state"), task]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": root})
    env = DummyVecEnv([Recorder])  # of another program
    with (tmp_path / "state").open("rb") as file:
        set_env_state(env, pickle.load(file))
    assert env.get_attr("phase")[0].name == "FIRST"
    assert env.get_attr("functions")[0][0](2) == 4


def test_logs_of_other_environments_are_cut_beside_one_that_has_none(tmp_path: Path) -> None:
    env = make_vec_env(Recorder, 1, monitor_dir=str(tmp_path))
    env.reset()
    state = get_env_state(env)
    played(env, 30, 0)
    logs = set_env_state(env, state)
    of_another_library: Any = object()
    for each in (of_another_library, env):
        cut_logs(each, logs)
    assert (tmp_path / "0.monitor.csv").read_text().count("\n") == 2


def test_an_environment_with_slots_begins_new_episodes() -> None:
    class Slots(Recorder):
        __slots__ = ("place",)

    assert get_env_state(DummyVecEnv([Slots])).source == "Slots has attributes in __slots__ (environment Slots)"


class Mortal(Recorder):
    """Ends its process after some steps, or raises an exception."""

    def __init__(self, signum: int | None, n_steps: int) -> None:
        super().__init__()
        self.signum = signum
        self.rest = n_steps

    def step(self, action: Any) -> Any:
        self.rest -= 1
        if self.rest == 0:
            if self.signum is None:
                raise LookupError("the simulator is gone")
            if self.signum == 0:
                os._exit(3)
            os.kill(os.getpid(), self.signum)
        return super().step(action)


@pytest.mark.parametrize(
    ("start_method", "signum", "message"),
    [
        ("fork", signal.SIGKILL, "^the process of environment 1 was killed by SIGKILL$"),
        ("fork", 0, "^the process of environment 1 ended with exit code 3$"),
        ("fork", None, "^the process of environment 1 ended with exit code 1, see its traceback above$"),
        ("spawn", None, "^the process of environment 0 ended with exit code 1, see its traceback above$"),
    ],
)
def test_a_process_that_ended_is_named_and_the_environment_can_be_closed(
    start_method: str, signum: int | None, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    n_steps = (1000, 30) if start_method == "fork" else (30,)  # a new process imports everything again
    env = SubprocVecEnv([partial(Mortal, signum, each) for each in n_steps], start_method=start_method)
    model = ACER("MlpPolicy", env, n_steps=8, buffer_size=100, device="cpu")
    with pytest.raises(RuntimeError, match=message):
        model.learn(1000)
    assert all(not process.is_alive() for process in env.processes)
    env.close()
    assert model.replay_buffer.step == 29 - 24  # the steps until then are there, and can be saved
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the environments' processes have ended: .* by set_env$"):
            model.learn(1000)
    model.save(tmp_path / "agent")
    model.save_checkpoint(tmp_path / "checkpoints", with_env=False)
    assert ("LookupError: the simulator is gone" in capfd.readouterr().err) == (signum is None)


class Unstartable(Recorder):
    def reset(self, **kwargs: Any) -> Any:
        raise LookupError("the simulator is gone")


def test_a_process_that_ended_in_its_first_reset_is_named_too() -> None:
    env = SubprocVecEnv([Unstartable], start_method="fork")  # of several forks SB3 would wait for its answer
    message = "^the process of environment 0 ended with exit code 1, see its traceback above$"
    with pytest.raises(RuntimeError, match=message):
        ACER("MlpPolicy", env, device="cpu").learn(10)
    env.close()


@pytest.mark.parametrize("reset_num_timesteps", [False, True])
def test_a_process_that_ended_between_two_calls_is_named_too(reset_num_timesteps: bool) -> None:
    env = SubprocVecEnv([Recorder, Recorder], start_method="fork")
    model = ACER("MlpPolicy", env, n_steps=8, replay_start=8, buffer_size=100, device="cpu").learn(32)
    for process in env.processes:  # Ctrl-C in a terminal ends them too
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    with pytest.raises(RuntimeError, match=r"^the process of environment [01] was killed by SIGKILL"):
        model.learn(32, reset_num_timesteps=reset_num_timesteps)
    env.close()
    model.set_env(make_vec_env(Recorder, 2))
    assert model.learn(32, reset_num_timesteps=False).num_timesteps == 64


def test_an_error_of_an_environment_in_this_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(action: Any) -> Any:
        raise ConnectionRefusedError("no simulator")

    env = make_vec_env(Recorder, 1)
    env.set_attr("step", refuse)
    monkeypatch.setattr("multiprocessing.connection.wait", lambda *_, **__: pytest.fail("there is no process"))
    with pytest.raises(ConnectionRefusedError, match=r"^no simulator$"):
        ACER("MlpPolicy", env, device="cpu").learn(10)


class Drawing(gym.Env[Any, Any]):
    """Observes a number of a generator, which may be that of other environments too."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.generator.random(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.generator.random(1, np.float32), 0.0, False, False, {}


class Phases(Drawing):
    """Holds methods of its generators, and the method for its next step, which changes from time to time."""

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(5))
        self.draw, self.act = self.generator.random, self.observe
        self.choose = random.Random(5).random  # a built-in method, as those of generators are in NumPy 1

    def observe(self) -> Any:
        number = (self.draw(1, np.float32) + np.float32(self.choose())) / 2
        self.act = self.rest if number < 0.5 else self.observe
        return number

    def rest(self) -> Any:
        number = self.generator.random(1, np.float32)
        self.act = self.observe if number < 0.5 else self.rest
        return 1 - number

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.act(), 0.0, False, False, {}


def test_methods_that_an_environment_holds_go_on() -> None:
    assert require_that_another_goes_on(lambda: DummyVecEnv([Phases])) == "attributes"


class Global(Drawing):
    """Holds functions of the process: of the global generators, and of a module."""

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(5))
        self.first, self.second, self.third = random.random, np.random.rand, math.floor
        self.fourth = codecs.strict_errors  # of no module's object


def test_functions_of_the_global_generators_stay_those_of_the_process() -> None:
    first, second = DummyVecEnv([lambda: Global()]), DummyVecEnv([lambda: Global()])
    first.reset()
    second.reset()
    second.set_attr("fourth", codecs.ignore_errors)
    set_env_state(second, get_env_state(first))
    env = second.envs[0]
    assert isinstance(env, Global)
    assert env.fourth is codecs.ignore_errors
    assert (env.first, env.second, env.third) == (random.random, np.random.rand, math.floor)


def test_what_environments_of_one_process_share_they_go_on_sharing() -> None:
    def make() -> VecEnv:
        generator = np.random.default_rng(5)
        return DummyVecEnv([lambda: Drawing(generator)] * 3)

    assert require_that_another_goes_on(make) == "attributes"


def test_the_state_of_environments_of_one_process_and_of_several() -> None:
    several = make_vec_env("CartPole-v1", 2, seed=3, **FORKED)
    one, other = make_vec_env("CartPole-v1", 2), make_vec_env("CartPole-v1", 2, seed=4)
    several.reset()
    set_env_state(one, get_env_state(several))
    require_same(played(one, 130, 4), played(several, 130, 4))
    other.reset()
    with pytest.raises(EnvStateError, match="the environments were in one process, and now each has its own"):
        set_env_state(several, get_env_state(other))
    several.close()


@pytest.mark.parametrize(
    "given",
    [
        {"norm_obs": False},
        {"norm_obs_keys": ["vec"]},
        {"norm_reward": False},
        {"clip_obs": 5.0},
        {"clip_reward": 5.0},
        {"gamma": 0.5},
        {"epsilon": 1e-4},
    ],
)
def test_every_setting_of_vec_normalize_is_compared(given: dict[str, Any]) -> None:
    def make(**kwargs: Any) -> VecNormalize:
        env: Any = SimpleMultiObsEnv if "norm_obs_keys" in given else Recall
        return VecNormalize(make_vec_env(env, 1), **kwargs)

    state = get_env_state(make())
    set_env_state(make(), state)
    with pytest.raises(ValueError, match=f"env must be wrapped in VecNormalize with {next(iter(given))}="):
        set_env_state(make(**given), state)


def test_another_number_of_environments_gets_the_statistics_of_dict_observations_too() -> None:
    first, second = (VecNormalize(make_vec_env(SimpleMultiObsEnv, n), norm_obs_keys=["vec"]) for n in (3, 2))
    first.reset()
    played(first, 20, 0)
    with pytest.raises(EnvStateError, match="there were 3 environments, and now there are 2"):
        set_env_state(second, get_env_state(first))
    for key, statistics in first.obs_rms.items():
        np.testing.assert_array_equal(second.obs_rms[key].mean, statistics.mean)


def test_an_environment_that_has_been_drawn_goes_on() -> None:
    pytest.importorskip("pygame")
    first, second = (make_vec_env("CartPole-v1", 1, env_kwargs={"render_mode": "rgb_array"}) for _ in range(2))
    for env in (first, second):
        env.reset()
        env.render()
    played(first, 5, 0)
    set_env_state(second, get_env_state(first))
    require_same(played(second, 30, 1), played(first, 30, 1))
    np.testing.assert_array_equal(second.render(), first.render())


def test_options_of_the_next_reset_are_part_of_the_state() -> None:
    first, second = make_vec_env("CartPole-v1", 2), make_vec_env("CartPole-v1", 2)
    first.reset()
    second.reset()
    first.set_options({"low": -0.01, "high": 0.01})
    set_env_state(second, get_env_state(first))
    assert second._options == [{"low": -0.01, "high": 0.01}] * 2


def test_the_seed_of_the_next_reset_is_part_of_the_state() -> None:
    first, second = make_vec_env("CartPole-v1", 2), make_vec_env("CartPole-v1", 2)
    first.reset()
    second.reset()
    first.seed(7)
    set_env_state(second, get_env_state(first))
    np.testing.assert_array_equal(second.reset(), first.reset())
