"""
What is NaN, infinite, far too large or no category of its space is refused at its step, with its environment, and
leaves no trace.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from sb3_acer import ACER
from sb3_acer.checks import LARGEST
from sb3_acer.finite import FiniteVecEnv
from tests.helpers import Shows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # those of numpy in VecNormalize
N_ENVS, LENGTH = 3, 7


class Spoiled(gym.Env[Any, Any]):
    """Episodes of seven steps. Once, at a given step, or in the first observation of a given episode, a bad value."""

    def __init__(self, as_dict: bool = False) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({"a": box, "b": box}) if as_dict else box
        self.action_space = spaces.Discrete(2)
        self.as_dict = as_dict
        self.n_steps = self.n_episodes = 0
        self.spoil: dict[str, Any] = {}  # what: reward, observation or first; at: step or episode; value

    def observe(self, value: float | None = None) -> Any:
        seen = np.array([self.n_steps % LENGTH, 1 if value is None else value], np.float32)
        return {"a": np.ones(2, np.float32), "b": seen} if self.as_dict else seen

    def bad(self, what: str, at: int) -> float | None:
        return self.spoil["value"] if (what, at) == (self.spoil.get("what"), self.spoil.get("at")) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.n_episodes += 1
        return self.observe(self.bad("first", self.n_episodes)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        reward = self.bad("reward", self.n_steps)
        observation = self.observe(self.bad("observation", self.n_steps))
        return observation, 1.0 if reward is None else reward, self.n_steps % LENGTH == 0, False, {}


WRAPPERS: dict[str, Callable[[VecEnv], VecEnv]] = {
    "none": lambda env: env,
    "VecMonitor": VecMonitor,
    "VecNormalize": VecNormalize,
    "VecNormalize of rewards": lambda env: VecNormalize(env, norm_obs=False),
    "VecFrameStack of VecNormalize": lambda env: VecFrameStack(VecNormalize(env), 2),
    "VecNormalize of VecFrameStack": lambda env: VecNormalize(VecFrameStack(env, 2)),
}


def make(wrapper: Callable[[VecEnv], VecEnv], as_dict: bool = False) -> tuple[ACER, list[Spoiled]]:
    games = [Spoiled(as_dict) for _ in range(N_ENVS)]
    env = wrapper(DummyVecEnv([lambda game=game: game for game in games]))  # type: ignore[misc]
    policy = "MultiInputPolicy" if as_dict else "MlpPolicy"
    return ACER(policy, env, n_steps=5, buffer_size=30, replay_ratio=1, replay_start=5, seed=0, device="cpu"), games


def statistics(model: ACER) -> list[Any]:
    normalize = model.get_vec_normalize_env()
    if normalize is None:
        return []
    found: Any = getattr(normalize, "obs_rms", {})
    parts = [*(found.values() if isinstance(found, dict) else [found]), normalize.ret_rms]
    return deepcopy([[part.mean, part.var, part.count] for part in parts])


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert all(np.array_equal(*parts) for parts in zip(ours, theirs, strict=True))


def assert_trains_on(model: ACER) -> None:
    """Until the buffer holds nothing of the failed run."""
    for _ in range(model.replay_buffer.n_slots):
        model.learn(15, reset_num_timesteps=False)
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())
    observations = model.replay_buffer.sample(100).observations
    for rows in observations.values() if isinstance(observations, dict) else [observations]:
        assert (rows.abs() <= LARGEST).all()
    assert all(np.isfinite(part).all() for each in statistics(model) for part in each)


# each wrapper, each kind of observation and each value with each place, in turns
CASES = [
    *((wrapper, False, value) for wrapper in WRAPPERS for value in (np.nan, 1e38)),
    *((wrapper, True, value) for wrapper in ("none", "VecNormalize") for value in (-np.inf, -2e15)),
]


@pytest.mark.parametrize(("what", "at"), [("observation", 9), ("reward", 8), ("first", 3), ("first", 1)])
@pytest.mark.parametrize(("wrapper", "as_dict", "value"), CASES)
def test_a_bad_value_is_named_with_its_environment_and_step_and_leaves_no_trace(
    wrapper: str, as_dict: bool, value: float, what: str, at: int
) -> None:
    model, games = make(WRAPPERS[wrapper], as_dict)
    games[1].spoil = {"what": what, "at": at, "value": value}
    seen: list[list[Any]] = [statistics(model)]

    def watch(*_: Any) -> bool:
        seen.append(statistics(model))
        return True

    n_steps = (at - 1) * LENGTH if what == "first" else at  # an episode begins with what follows the last step
    rule = "at most 1e[+]15 in absolute value" if np.isfinite(value) else "finite"
    name = "reward" if what == "reward" else "observation 'b'" if as_dict else "observation"
    with pytest.raises(ValueError, match=rf"^{name} must be {rule}.* from environment 1 at step {n_steps * N_ENVS}$"):
        model.learn(300, callback=watch)
    assert model.num_timesteps == max(n_steps - 1, 0) * N_ENVS
    assert_equal(statistics(model), seen[-1])
    games[1].spoil = {}
    assert_trains_on(model)


def test_the_returns_of_a_refused_step_are_restored_without_training_too() -> None:
    model, games = make(VecNormalize)
    model.learn(30)
    normalize = model.get_vec_normalize_env()
    assert normalize is not None
    normalize.training = False
    before = normalize.returns.copy()
    assert before.all()
    games[1].spoil = {"what": "observation", "at": 2 * LENGTH, "value": np.nan}
    with pytest.raises(ValueError, match="observation must be finite"):
        model.learn(30, reset_num_timesteps=False)
    np.testing.assert_array_equal(normalize.returns, before)


@pytest.mark.parametrize("wrapper", [VecNormalize, WRAPPERS["none"]], ids=["normalised", "as they are"])
def test_a_final_observation_is_checked_too(wrapper: Callable[[VecEnv], VecEnv]) -> None:
    model, games = make(wrapper)
    games[2].spoil = {"what": "observation", "at": 2 * LENGTH, "value": np.nan}
    with pytest.raises(ValueError, match=rf"observation must be finite, got \[.*nan\] from environment 2 at step {42}"):
        model.learn(300)
    assert_trains_on(model)


@pytest.mark.parametrize(
    ("dtype", "low", "value", "rule"),
    [
        (np.float16, -np.inf, np.inf, "finite"),
        (np.int64, -(2**62), -1e17, r"at most 1e.15 .*"),
        (np.uint64, 0, 1e19, r"at most 1e.15 .*"),
    ],
)
def test_observations_of_other_types_are_checked_too(dtype: Any, low: float, value: float, rule: str) -> None:
    class Other(VecEnvWrapper):
        def __init__(self, venv: VecEnv) -> None:
            high = np.inf if dtype is np.float16 else np.iinfo(dtype).max
            super().__init__(venv, spaces.Box(low, high, (2,), dtype))

        def reset(self) -> Any:
            return self.venv.reset().astype(dtype)  # type: ignore[union-attr]

        def step_wait(self) -> Any:
            observations, *others = self.venv.step_wait()
            return observations.astype(dtype), *others  # type: ignore[union-attr]

    model, games = make(Other)
    games[1].spoil = {"what": "observation", "at": 9, "value": value}
    with pytest.raises(ValueError, match=rf"observation must be {rule}, got .* from environment 1 at step 27"):
        model.learn(300)
    assert_trains_on(model)


@pytest.mark.parametrize("at", [0, 9, 2 * LENGTH])  # the first observation, one in mid-episode, and a final one
@pytest.mark.parametrize(
    ("space", "good", "bad", "said"),
    [
        (spaces.Discrete(4), 3, 4, "observation must be of Discrete(4), got 4"),
        (spaces.Discrete(4), 0, -1, "observation must be of Discrete(4), got -1"),
        (
            spaces.MultiDiscrete([4, 2]),
            np.array([3, 1]),
            np.array([3, 2]),
            "observation must be of MultiDiscrete([4 2]), got [3 2]",
        ),
        (
            spaces.Dict({"kind": spaces.Discrete(4)}),
            {"kind": 3},
            {"kind": 4},
            "observation 'kind' must be of Discrete(4), got 4",
        ),
    ],
    ids=["too large", "negative", "MultiDiscrete", "Dict"],
)
def test_a_category_that_the_space_does_not_have_is_named_and_not_stored(
    space: spaces.Space[Any], good: Any, bad: Any, said: str, at: int
) -> None:
    class Categories(Spoiled):
        def observe(self, value: float | None = None) -> Any:
            is_bad = self.spoil.get("at") == self.n_steps
            self.spoil = {} if is_bad else self.spoil
            return bad if is_bad else good

    games = [Categories() for _ in range(N_ENVS)]
    for game in games:
        game.observation_space = space
    games[1].spoil = {"at": at}
    env = DummyVecEnv([lambda game=game: game for game in games])  # type: ignore[misc]
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    model = ACER(policy, env, n_steps=5, buffer_size=30, replay_ratio=1, replay_start=5, seed=0, device="cpu")
    with pytest.raises(ValueError, match=f"^{re.escape(said)} from environment 1 at step {at * N_ENVS}$"):
        model.learn(300)
    assert_trains_on(model)


def test_the_largest_values_are_trained_on() -> None:
    for what in ("reward", "observation", "first"):
        model, games = make(WRAPPERS["none"])
        for at, game in enumerate(games, 2):
            game.spoil = {"what": what, "at": at, "value": -LARGEST}
        assert_trains_on(model.learn(60))


def test_rewards_that_are_no_floats_are_checked_too() -> None:
    class Integers(VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            observations, _, dones, infos = self.venv.step_wait()
            return observations, np.array([1, 10**17, 1]), dones, infos

    model, _ = make(Integers)
    with pytest.raises(ValueError, match=r"reward must be at most 1e.15 .*, got 1e.17 from environment 1 at step 3"):
        model.learn(60)


def test_a_callback_that_fails_makes_the_next_run_reset_the_environments() -> None:
    """The environments have made a step that is not stored."""

    def fail(local: dict[str, Any], _: Any) -> bool:
        if local["self"].num_timesteps == 12:
            raise RuntimeError("no more")
        return True

    model, games = make(WRAPPERS["none"])
    with pytest.raises(RuntimeError, match="no more"):
        model.learn(60, callback=fail)
    assert [game.n_episodes for game in games] == [1] * N_ENVS
    model.learn(6, reset_num_timesteps=False)
    assert [game.n_episodes for game in games] == [2] * N_ENVS


def test_programs_find_the_environment_as_the_user_made_it() -> None:
    for wrapper in WRAPPERS.values():
        model, _ = make(wrapper)
        env = model.get_env()
        other = make(wrapper)[0].get_env()
        assert env is not None
        assert other is not None
        evaluation = EvalCallback(other, n_eval_episodes=1, eval_freq=5, verbose=0, warn=False)  # copies statistics
        model.learn(60, callback=evaluation)
        assert model.get_env() is env
        assert evaluation.n_calls == 20
        assert not isinstance(env, FiniteVecEnv)


def small(env: VecEnv) -> ACER:
    return ACER("MlpPolicy", env, n_steps=5, device="cpu")


class Negates(VecEnvWrapper):
    def reset(self) -> Any:
        return -np.asarray(self.venv.reset())

    def step_wait(self) -> Any:
        observations, *others = self.venv.step_wait()
        return -np.asarray(observations), *others


@pytest.mark.parametrize("norm_obs", [True, False])
def test_observations_that_are_changed_after_vec_normalize_are_refused(norm_obs: bool) -> None:
    env = DummyVecEnv([Spoiled])
    agent = small(Negates(VecNormalize(env, norm_obs=norm_obs)))
    with pytest.raises(ValueError, match=r"env must be .* wrappers that change observations are inside VecNormalize"):
        agent.learn(10)
    assert agent.replay_buffer.size() == 0
    agent.set_env(VecNormalize(Negates(env), norm_obs=norm_obs))
    assert agent.learn(10).replay_buffer.size() == 10


@pytest.mark.parametrize("norm_reward", [False, True])
def test_rewards_that_are_changed_after_vec_normalize_are_refused(norm_reward: bool) -> None:
    class Shaped(VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            observations, rewards, dones, infos = self.venv.step_wait()
            return observations, rewards - (self.n_steps == 3), dones, infos

        def step_async(self, actions: np.ndarray) -> None:
            self.n_steps = getattr(self, "n_steps", 0) + 1
            self.venv.step_async(actions)

    inside = DummyVecEnv([Spoiled] * N_ENVS)
    model = small(Shaped(VecNormalize(inside, norm_reward=norm_reward)))
    with pytest.raises(ValueError, match=r"^env must be .* that change rewards are inside VecNormalize, got <"):
        model.learn(60)
    assert model.replay_buffer.size() + model.replay_buffer.step == 2
    small(VecNormalize(Shaped(inside), norm_reward=norm_reward)).learn(60)


@pytest.mark.parametrize("truncated", [False, True])
def test_a_truncated_episode_needs_its_final_observation(truncated: bool) -> None:
    class Without(VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            observations, rewards, dones, infos = self.venv.step_wait()
            for info in infos:
                if info.pop("terminal_observation", None) is not None:
                    info["TimeLimit.truncated"] = truncated
            return observations, rewards, dones, infos

    model = small(Without(DummyVecEnv([Spoiled] * N_ENVS)))
    if not truncated:  # the value of a terminal state is 0
        model.learn(60)
        return
    rule = r"^info must be one with terminal_observation where an episode is truncated, .* 0 at step 21, got {"
    with pytest.raises(ValueError, match=rule):
        model.learn(60)
    assert model.replay_buffer.size() + model.replay_buffer.step == LENGTH - 1


def test_a_step_that_a_program_has_replaced_stays_replaced() -> None:
    env, n_steps = DummyVecEnv([Spoiled]), []
    step_wait = env.step_wait

    def counted() -> Any:
        n_steps.append(1)
        return step_wait()

    env.step_wait = counted  # type: ignore[method-assign]
    ACER("MlpPolicy", VecNormalize(env), n_steps=5, device="cpu").learn(20)
    assert len(n_steps) == 20
    assert env.step_wait is counted


def test_one_part_of_an_observation_that_is_changed_after_vec_normalize_is_enough() -> None:
    class NegatesOne(VecEnvWrapper):
        def reset(self) -> Any:
            return self.changed(self.venv.reset())

        def step_wait(self) -> Any:
            observations, *others = self.venv.step_wait()
            return self.changed(observations), *others

        def changed(self, observations: Any) -> Any:
            return {**observations, "a": -observations["a"]}

    env = NegatesOne(VecNormalize(DummyVecEnv([lambda: Spoiled(as_dict=True)]), training=False))
    agent = ACER("MultiInputPolicy", env, n_steps=5, device="cpu")
    with pytest.raises(ValueError, match="wrappers that change observations are inside VecNormalize"):
        agent.learn(10)


def test_integers_that_are_normalised_inside_another_wrapper_are_refused_since_fractions_would_be_cut_off() -> None:
    space = spaces.Dict(image=spaces.Box(0, 255, (40, 40, 3), np.uint8), vector=spaces.Box(0, 100, (2,), np.int64))
    inside = DummyVecEnv([lambda: Shows(space)])
    model = ACER("MultiInputPolicy", VecNormalize(inside, norm_obs_keys=["vector"]), n_steps=5, device="cpu")
    with pytest.raises(ValueError, match=r"observation 'vector' must be int64, as in its space, .* got \["):
        model.learn(20)
    model.set_env(VecNormalize(VecTransposeImage(inside), norm_obs_keys=["vector"]))
    assert model.learn(20).replay_buffer.size() == 20


def test_of_several_environments_with_bad_values_the_first_is_named() -> None:
    env = DummyVecEnv([Spoiled] * 3)
    env.set_attr("spoil", {"what": "reward", "at": 2, "value": np.nan}, [1, 2])
    with pytest.raises(ValueError, match="reward must be finite, got nan from environment 1"):
        small(env).learn(30)
