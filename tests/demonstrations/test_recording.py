"""Recordings hold what the expert did and what the environment returned."""

import re
import runpy
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from sb3_acer.demonstrations import cloning, dataset, recording
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj
from sb3_acer.vec_normalize import running_statistics
from tests.demonstrations.conftest import SPACES, an_agent, old_arrays, quiet, save
from tests.helpers import Constant, Integers, Recorder, Shows


class Watcher:
    """An expert that always takes action 0 and keeps the observations that it gets."""

    def __init__(self) -> None:
        self.shown: list[np.ndarray] = []

    def __call__(self, observation: np.ndarray) -> int:
        self.shown.append(observation)
        return 0


@pytest.mark.parametrize("action_space", SPACES, ids=str)
def test_what_was_recorded_is_what_the_file_holds(action_space: spaces.Space[Any], tmp_path: Path) -> None:
    model = an_agent(Recorder(action_space))
    arrays = generate_expert_traj(model, tmp_path / "new" / "expert", n_episodes=3)
    with np.load(tmp_path / "new" / "expert.npz") as file:
        assert set(file) == set(arrays)
        for key in arrays:
            np.testing.assert_array_equal(file[key], arrays[key])
            assert file[key].dtype == arrays[key].dtype
    assert arrays["actions"].shape == (21, *(action_space.shape or (1,)))
    dataset = ExpertDataset(tmp_path / "new" / "expert.npz", verbose=0)
    recorded = np.array(model.env.get_attr("actions")[0])  # type: ignore[union-attr]
    np.testing.assert_array_equal(dataset.actions.reshape(recorded.shape), recorded)
    np.testing.assert_array_equal(model.policy.family.to_env(dataset.actions_for(model)), recorded)


def test_observations_rewards_and_ends_are_the_environments_own_where_the_expert_is_shown_normalised_ones() -> None:
    env = VecNormalize(make_vec_env(lambda: Recorder(length=4), 1))
    arrays = generate_expert_traj(an_agent(env), n_episodes=2)
    np.testing.assert_array_equal(arrays["obs"], [(0, 0), (1, 1), (2, 2), (3, 3), (0, 4), (1, 5), (2, 6), (3, 7)])
    np.testing.assert_array_equal(arrays["rewards"], np.arange(1, 9))
    np.testing.assert_array_equal(arrays["episode_returns"], [10, 26])
    np.testing.assert_array_equal(np.flatnonzero(arrays["episode_starts"]), [0, 4])
    np.testing.assert_array_equal(arrays["final_obs"], [(4, 4), (4, 8)])


def test_recording_leaves_the_statistics_of_vec_normalize_as_they_are() -> None:
    env = VecNormalize(make_vec_env(lambda: Recorder(length=4), 1))
    agent = an_agent(env)
    before = [(each.mean, each.count) for each in running_statistics(env)]
    generate_expert_traj(agent, n_episodes=2)
    np.testing.assert_equal([(each.mean, each.count) for each in running_statistics(env)], before)
    assert env.training


def test_final_observations_are_recorded_as_they_were_before_vec_normalize_clipped_them() -> None:
    env = VecNormalize(make_vec_env(Integers, 1, seed=0), clip_obs=0.1)
    arrays = generate_expert_traj(an_agent(env), n_episodes=20)
    ends = np.roll(arrays["episode_starts"], -1)
    np.testing.assert_array_equal(arrays["final_obs"], arrays["obs"][ends] + 1)


def image_env() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(FakeImageEnv(screen_height=40, screen_width=40, n_channels=3), 4)


@pytest.mark.parametrize("kwargs", [{"norm_obs": False}, {}], ids=["rewards alone", "observations too"])
@pytest.mark.parametrize("images", [True, False])
def test_the_policys_observations_are_recorded_where_wrappers_around_vec_normalize_change_them(
    images: bool, kwargs: dict[str, Any]
) -> None:
    if images:
        env: VecEnv = VecNormalize(make_vec_env(image_env, 1), norm_obs=False, norm_reward=not kwargs)
    else:
        env = VecFrameStack(VecNormalize(make_vec_env(lambda: Recorder(length=4), 1), **kwargs), 2)
    model = an_agent(env, "CnnPolicy" if images else "MlpPolicy")
    arrays = generate_expert_traj(model, n_episodes=2)
    shape = model.observation_space.shape
    assert arrays["obs"].shape[1:] == arrays["final_obs"].shape[1:] == shape
    dataset = ExpertDataset(traj_data=arrays, verbose=0)
    np.testing.assert_array_equal(dataset.inputs_for(model, np.arange(4)), arrays["obs"][:4])
    behaviour_cloning(model, dataset, 1)
    dataset.to_replay_buffer(model)
    model.learn(8)


@pytest.mark.parametrize("terminates", [True, False])
def test_a_time_limit_is_no_terminal_state(terminates: bool) -> None:
    arrays = generate_expert_traj(lambda observation: 0, env=Constant(terminates), n_episodes=2)
    assert arrays["truncated"].tolist() == [not terminates] * 2


def test_a_function_gets_what_its_environment_shows() -> None:
    single = generate_expert_traj(lambda observation: int(observation[0]) % 3, env=Recorder(), n_episodes=1)
    venv = DummyVecEnv([Recorder])
    several = generate_expert_traj(lambda observations: observations[:, 0].astype(int) % 3, env=venv, n_episodes=1)
    for arrays in (single, several):
        np.testing.assert_array_equal(arrays["actions"][:, 0], np.arange(7) % 3)


class Refilling(VecEnvWrapper):
    """Returns the same array at each step, with other numbers in it."""

    def reset(self) -> Any:
        self.shown: Any = self.venv.reset()
        return self.shown

    def step_wait(self) -> Any:
        self.shown[:], *rest = self.venv.step_wait()
        return self.shown, *rest


def test_the_environment_and_the_expert_may_fill_the_same_arrays_at_each_step() -> None:
    space, chosen = spaces.Box(-9, 9, (1,)), np.zeros((1, 1), np.float32)

    def expert(observations: np.ndarray) -> np.ndarray:
        chosen[0] = observations[0, 0]
        return chosen

    env = Refilling(DummyVecEnv([partial(Recorder, space)]))
    arrays = generate_expert_traj(expert, env=env, n_episodes=1)
    for key in ("obs", "actions"):
        assert arrays[key][:, 0].tolist() == list(range(7))


class Hiding(VecEnvWrapper):
    """Does not tell final observations."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        *step, _ = self.venv.step_wait()
        return *step, [{}]


def test_an_environment_that_does_not_tell_final_observations_is_refused() -> None:
    with pytest.raises(ValueError, match="env must be one whose infos have terminal_observation where an episode ends"):
        generate_expert_traj(lambda observations: [0], env=Hiding(DummyVecEnv([Recorder])), n_episodes=1)


def test_an_agent_learns_first_and_goes_on_after() -> None:
    model = an_agent(Recorder(), n_steps=20)
    generate_expert_traj(model, n_timesteps=20, n_episodes=1)
    assert model.num_timesteps == 20
    model.learn(20, reset_num_timesteps=False)
    assert model.num_timesteps == 40
    assert model.replay_buffer.latest().observations[0, 0, 0] == 0  # type: ignore[index]


@pytest.mark.parametrize("is_own", [True, False])
def test_an_agent_resets_the_environment_that_it_was_made_with_and_no_other(is_own: bool) -> None:
    env = Recorder()
    model = an_agent(env, n_steps=10).learn(10)
    generate_expert_traj(model, env=env if is_own else Recorder(), n_episodes=1)
    assert (model._last_obs is None) == is_own


def test_an_agent_resets_its_environment_after_a_recording_that_was_interrupted() -> None:
    model = an_agent(Recorder(), n_steps=20).learn(20)
    predict, calls = model.predict, count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return predict(*args, **kwargs)

    model.predict = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        generate_expert_traj(model, n_episodes=1)
    model.learn(20, reset_num_timesteps=False)
    assert model.replay_buffer.latest().observations[0, 0, 0] == 0  # type: ignore[index]


def test_an_image_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    monkeypatch.setattr(cv2, "imwrite", lambda *args: False)
    with pytest.raises(OSError, match=r"images.0\.png could not be written"):
        generate_expert_traj(
            lambda observation: 0, tmp_path / "expert", image_env(), n_episodes=1, image_folder="images"
        )


def test_of_several_environments_the_first_is_recorded() -> None:
    envs = [Recorder(length=length) for length in (4, 7, 9)]
    model = an_agent(DummyVecEnv([lambda env=env: env for env in envs]))  # type: ignore[misc]
    with pytest.warns(UserWarning, match="first of 3"):
        arrays = generate_expert_traj(model, n_episodes=2)
    assert arrays["obs"][:, 0].tolist() == [0, 1, 2, 3] * 2
    assert arrays["final_obs"][:, 0].tolist() == [4, 4]
    first, *others = (env.actions for env in envs)
    assert arrays["actions"][:, 0].tolist() == first
    assert first not in others


def test_a_recurrent_agent_remembers_as_long_as_an_episode_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = an_agent(Recorder(length=3), "MlpLstmPolicy")
    given: list[tuple[Any, Any]] = []
    predict = model.predict

    def spy(observation: Any, state: Any, episode_start: Any) -> Any:
        given.append((state, bool(episode_start[0])))
        return predict(observation, state, episode_start)

    monkeypatch.setattr(model, "predict", spy)
    generate_expert_traj(model, n_episodes=2)
    assert [start for _, start in given] == [True, False, False] * 2
    assert all(state is not None for state, _ in given[1:])


@pytest.mark.parametrize("n_channels", [1, 3, 4])
def test_images_are_read_as_they_were_recorded(n_channels: int, tmp_path: Path) -> None:
    space = spaces.Box(0, 255, (40, 36, n_channels), np.uint8)
    expert = Watcher()
    arrays = generate_expert_traj(
        expert, tmp_path / "here" / "expert", Shows(space), n_episodes=1, image_folder="images"
    )
    assert arrays["obs"].tolist() == [f"images/{step}.png" for step in range(5)]
    model = an_agent(DummyVecEnv([lambda: Shows(space)]), "CnnPolicy", policy_kwargs={})
    moved = (tmp_path / "here").rename(tmp_path / "there")
    dataset = ExpertDataset(moved / "expert.npz", verbose=0)
    first_channels = np.moveaxis(np.stack(expert.shown), -1, 1)
    np.testing.assert_array_equal(dataset.observations_for(model, np.arange(5)), first_channels)
    assert dataset.observations_for(model, np.array([5])).shape == (1, n_channels, 40, 36)


def test_images_with_their_channels_first_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    space, expert = spaces.Box(0, 255, (3, 40, 36), np.uint8), Watcher()
    generate_expert_traj(expert, tmp_path / "expert", Shows(space), n_episodes=1)
    model = an_agent(DummyVecEnv([lambda: Shows(space)]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(tmp_path / "expert.npz", verbose=0)
    np.testing.assert_array_equal(dataset.observations_for(model, np.arange(5)), np.stack(expert.shown))


def test_the_suffix_of_a_recording_may_be_left_out(tmp_path: Path) -> None:
    arrays = generate_expert_traj(Watcher(), tmp_path / "one", Recorder(), n_episodes=1)
    dataset = ExpertDataset(tmp_path / "one", verbose=0)
    np.testing.assert_array_equal(dataset.rewards, arrays["rewards"])


def test_the_images_of_an_earlier_recording_stay(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    space = spaces.Box(0, 255, (40, 36, 1), np.uint8)
    first, second = (
        generate_expert_traj(Watcher(), tmp_path / name, Shows(space), n_episodes=1)["obs"] for name in ("one", "two")
    )
    assert not set(first) & set(second)


def test_an_image_is_written_as_stable_baselines_wrote_it(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    for n_channels in (3, 4):
        expert, env = Watcher(), Shows(spaces.Box(0, 255, (40, 36, n_channels), np.uint8))
        path = tmp_path / str(n_channels) / "expert"
        generate_expert_traj(expert, path, env, n_episodes=1)
        image = cv2.imread(str(path.parent / "recorded_images" / "0.png"), cv2.IMREAD_UNCHANGED)
        np.testing.assert_array_equal(image, expert.shown[0][..., ::-1] if n_channels == 3 else expert.shown[0])


@pytest.mark.parametrize("folder", ["some/folder/recorded_images/", "recorded_images\\"], ids=["elsewhere", "Windows"])
def test_images_named_by_a_path_from_elsewhere_are_found_beside_the_file(folder: str, tmp_path: Path) -> None:
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    arrays = generate_expert_traj(lambda image: 0, tmp_path / "expert", env, n_episodes=1)
    old = {key: arrays[key] for key in old_arrays()}
    old["obs"] = np.array([f"{folder}{Path(name).name}" for name in arrays["obs"]])
    model = an_agent(DummyVecEnv([lambda: env]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(save(tmp_path / "old.npz", old), verbose=0)
    assert dataset.observations_for(model, np.arange(5)).shape == (5, 1, 40, 36)
    with pytest.raises(ValueError, match=rf"obs must be paths.*got {re.escape(repr(f'{folder}0.png'))}"):
        quiet(old).observations_for(model, np.arange(5))


def test_images_without_opencv_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    with pytest.raises(ImportError, match=r'need OpenCV: in the folder .* pip install .*"\.\[atari\]"'):
        generate_expert_traj(lambda image: 0, tmp_path / "expert", env, n_episodes=1)
    arrays = generate_expert_traj(lambda image: 0, None, env, n_episodes=1)
    assert arrays["obs"].shape == (5, 40, 36, 1)


def test_a_recording_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="env must be given"):
        generate_expert_traj(lambda observation: 0)
    with pytest.raises(ValueError, match="n_episodes must be an integer of at least 1, got 0"):
        generate_expert_traj(lambda observation: 0, env=Recorder(), n_episodes=0)
    with pytest.raises(ValueError, match="observation_space must not be a Dict"):
        generate_expert_traj(lambda observation: 0, env=Shows(spaces.Dict({"a": spaces.Discrete(2)})))
    venv = DummyVecEnv([Recorder] * 2)
    with pytest.raises(
        ValueError, match=r"model must be a function that returns actions of .*, here of shape \(2,\), got array\(0"
    ):
        generate_expert_traj(lambda observations: 0, env=venv)
    for wrong in (None, (np.array(0), None), (np.zeros(1), None)):
        with pytest.raises(ValueError, match="the actions of model must be an array of numbers, got"):
            generate_expert_traj(partial(lambda action, observation: action, wrong), env=Recorder())
    rule = r"model must be a function that returns an action of .*, here of shape \(\), got"
    with pytest.raises(ValueError, match=rule):
        generate_expert_traj(lambda observation: np.array([0]), env=Recorder())


def test_opencv_is_not_needed_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cv2", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in (recording, dataset, cloning):
        assert module.__file__
        runpy.run_path(module.__file__)  # as its import would run it


def test_an_older_file_is_kept_if_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    generate_expert_traj(lambda observation: 0, tmp_path / "expert", Constant(True), n_episodes=1)
    before = (tmp_path / "expert.npz").read_bytes()
    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="an older file, if there is one, is kept: No space left"):
        generate_expert_traj(lambda observation: 0, tmp_path / "expert", Constant(True), n_episodes=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"expert.npz": before}


def test_recording_does_not_begin_to_train_vec_normalize() -> None:
    env = VecNormalize(make_vec_env(lambda: Recorder(length=4), 1), training=False)
    generate_expert_traj(an_agent(env), n_episodes=1)
    assert not env.training


def test_images_that_are_named_by_a_path_from_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    arrays = generate_expert_traj(
        lambda image: 0, tmp_path / "here" / "expert", env, n_episodes=1, image_folder="images"
    )
    (tmp_path / "there").mkdir()
    old = {key: arrays[key] for key in old_arrays()}
    old["obs"] = np.array([f"here/{name}" for name in arrays["obs"]])
    monkeypatch.chdir(tmp_path)
    model = an_agent(DummyVecEnv([lambda: env]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(save(tmp_path / "there" / "old.npz", old), verbose=0)
    assert dataset.observations_for(model, np.arange(5)).shape == (5, 1, 40, 36)


def test_rewards_and_observations_are_recorded_as_they_were_whatever_the_statistics() -> None:
    env = VecNormalize(make_vec_env(lambda: Recorder(length=4), 1))
    of_observations, of_returns = running_statistics(env)
    of_returns.var, of_observations.mean, of_observations.var = np.array(25.0), np.full(2, 3.0), np.full(2, 4.0)
    arrays = generate_expert_traj(an_agent(env), n_episodes=2)
    np.testing.assert_array_equal(arrays["rewards"], np.arange(1, 9))
    np.testing.assert_array_equal(arrays["obs"][:, 1], np.arange(8))
    np.testing.assert_array_equal(arrays["final_obs"], [(4, 4), (4, 8)])


def test_an_image_beside_the_file_comes_before_one_of_that_name_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    for name in ("mine", "other"):
        generate_expert_traj(lambda image: 0, tmp_path / name / "expert", env, n_episodes=1)
    model = an_agent(DummyVecEnv([lambda: env]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(tmp_path / "mine" / "expert.npz", verbose=0)
    expected = dataset.observations_for(model, np.arange(5))
    monkeypatch.chdir(tmp_path / "other")
    np.testing.assert_array_equal(dataset.observations_for(model, np.arange(5)), expected)
