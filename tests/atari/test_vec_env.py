"""Atari games: the same as with the ALE and SB3's wrappers, and usable by SB3 as any environment."""

import pickle
import runpy
import sys
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ale_py
import ale_py.roms
import cv2
import gymnasium as gym
import numpy as np
import pytest
from ale_py import ALEInterface
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer.atari import AtariId, AtariVecEnv, make_atari_vec_env, parse_atari_id, vec_env
from sb3_acer.extras import how_to_install
from tests.atari.conftest import (
    channels_first,
    n_actions,
    of_sb3,
    random_steps,
    require_same_info,
    require_similar,
    step,
    without_starts,
)


@pytest.fixture(scope="module")
def pong() -> AtariVecEnv:
    """Two games, shared by tests; each test resets them."""
    return make_atari_vec_env("PongNoFrameskip-v4", 2)


@pytest.mark.parametrize(
    ("game", "max_frames", "n_envs", "n_steps"),
    [("Asterix", 108_000, 2, 400), ("MsPacman", 400, 1, 210), ("MsPacman", 403, 1, 210)],
)
def test_whole_games_are_those_of_sb3(game: str, max_frames: int, n_envs: int, n_steps: int) -> None:
    ours = without_starts(f"{game}NoFrameskip-v4", n_envs, max_frames=max_frames, episodic_life=False)
    theirs = of_sb3(f"{game}NoFrameskip-v4", n_envs, max_frames, terminal_on_life_loss=False)
    observations, expected = ours.reset(), theirs.reset()
    rng = np.random.default_rng(0)
    games = 0
    for _ in range(n_steps):
        require_similar(observations, channels_first(expected))
        actions = rng.integers(n_actions(ours), size=n_envs)
        observations, rewards, dones, infos = step(ours, *actions)
        expected, their_rewards, their_dones, their_infos = step(theirs, *actions)
        np.testing.assert_array_equal(rewards, their_rewards)
        np.testing.assert_array_equal(dones, their_dones)
        assert (rewards.dtype, dones.dtype) == (their_rewards.dtype, their_dones.dtype)
        for info, their_info in zip(infos, their_infos, strict=True):
            require_same_info(info, their_info)
            games += "episode" in info
            assert info["TimeLimit.truncated"] == ("episode" in info and max_frames < 500)
            if "episode" in info:
                # The newest frame of a game is incomplete, in SB3 too.
                final = channels_first(their_info["terminal_observation"])
                require_similar(info["terminal_observation"][:-1], final[:-1])
    assert games >= 2


@pytest.mark.parametrize(("game", "n_steps"), [("Breakout", 260), ("MsPacman", 440), ("Qbert", 540)])
def test_lives_are_those_of_sb3_once_its_unseen_actions_are_played(game: str, n_steps: int) -> None:
    ours, theirs = without_starts(f"{game}NoFrameskip-v4", 1), of_sb3(f"{game}NoFrameskip-v4", 1)
    fire = [1, 2] if "FIRE" in ours.env_method("get_action_meanings")[0] else []

    def play(actions: list[int], observations: np.ndarray) -> np.ndarray:
        for action in actions:
            observations = step(ours, action)[0]
        return observations

    observations, expected = play(fire, ours.reset()), theirs.reset()
    rng = np.random.default_rng(1)
    age = lives = games = 0
    for _ in range(n_steps):
        frames = min(age + 1, 4)  # the frames of SB3's unseen actions are not part of its episode
        require_similar(observations[0, -frames:], channels_first(expected)[0, -frames:])
        action = int(rng.integers(n_actions(ours)))
        observations, reward, done, infos = step(ours, action)
        expected, their_reward, their_done, their_infos = step(theirs, action)
        assert (reward, done) == (their_reward, their_done)
        require_same_info(infos[0], their_infos[0])
        age += 1
        if done:
            frames = min(age + 1, 4)
            final, over = infos[0]["terminal_observation"], "episode" in infos[0]
            their_final = channels_first(their_infos[0]["terminal_observation"])
            require_similar(final[-frames : 3 + (not over)], their_final[-frames : 3 + (not over)])
            assert not observations[0, :-1].any()
            if not over:
                np.testing.assert_array_equal(observations[0, -1], final[-1])
            observations = play(fire if over else [0, *fire], observations)
            age, lives, games = 0, lives + (not over), games + over
    assert lives >= 2
    assert games >= 1


class PlainGame:
    """A game of the ALE itself, with the preprocessing in Python."""

    def __init__(self, game: str, frame_skip: int, sticky: float, seed: int) -> None:
        self.ale = ALEInterface()
        self.sticky = sticky
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.setInt("random_seed", seed)
        rom = ale_py.roms.get_rom_path(game)
        assert rom is not None
        self.ale.loadROM(rom)
        self.ale.reset_game()
        self.frame_skip = frame_skip

    def step(self, action: int) -> tuple[np.ndarray, float]:
        points, frames = 0, []
        for _ in range(self.frame_skip):
            points += self.ale.act(self.ale.getMinimalActionSet()[action])
            frames.append(self.ale.getScreenGrayscale())
        frame = cv2.resize(np.maximum(*frames[-2:]), (84, 84), interpolation=cv2.INTER_AREA)
        return frame, points


@pytest.mark.parametrize(
    ("env_id", "atari_id"),
    [
        ("PongNoFrameskip-v4", ("pong", 4, 0.0)),
        ("BreakoutDeterministic-v4", ("breakout", 4, 0.0)),
        ("SpaceInvadersDeterministic-v4", ("space_invaders", 3, 0.0)),
        ("SpaceInvadersNoFrameskip-v4", ("space_invaders", 4, 0.0)),
        ("BreakoutNoFrameskip-v0", ("breakout", 4, 0.25)),
        ("ALE/MsPacman-v5", ("ms_pacman", 4, 0.25)),
        ("qbert", ("qbert", 4, 0.0)),
    ],
)
def test_ids_stand_for_what_they_always_stood_for(env_id: str, atari_id: tuple[str, int, float]) -> None:
    """Every frame is exactly equal."""
    assert parse_atari_id(env_id) == AtariId(*atari_id)
    game = PlainGame(*atari_id, seed=7)
    env = without_starts(env_id, 1, clip_reward=False, episodic_life=False, seed=7 if game.sticky else None)
    env.reset()
    for action in np.random.default_rng(0).integers(n_actions(env), size=60):
        frame, points = game.step(action)
        observations, rewards, dones, _ = step(env, action)
        if dones[0]:
            break
        np.testing.assert_array_equal(observations[0, -1], frame)
        assert rewards[0] == points
    assert game.ale.getEpisodeFrameNumber() > 150


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("PongNoFrameskp-v4", "such as PongNoFrameskip-v4"),
        ("CartPole-v1", "env_id must be the id of an Atari game, such as ALE/"),
        ("Pong-ramNoFrameskip-v4", "env_id must be the id of an Atari game"),
        ("ALE/Combat-v5", "env_id must be the id of an Atari game"),
        ("combat", "env_id must be the id of an Atari game"),
        ("", "env_id must be the id of an Atari game"),
        ("Pong-v4", "env_id must have a fixed frame skip, such as PongNoFrameskip-v4"),
        ("Pong-v0", "env_id must have a fixed frame skip, such as PongNoFrameskip-v0"),
    ],
)
def test_what_is_no_game_is_refused(env_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtariVecEnv(env_id)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_envs": 0}, "n_envs must be an integer of at least 1, got 0"),
        ({"n_envs": 1.5}, "n_envs must be an integer of at least 1, got 1.5"),
        ({"frame_stack": 0}, "frame_stack must be an integer of at least 1, got 0"),
        ({"frame_skip": 0}, "frame_skip must be an integer of at least 1, got 0"),
        ({"screen_size": 0}, "screen_size must be an integer of at least 1, got 0"),
        ({"max_frames": 0}, "max_frames must be an integer of at least 1, got 0"),
        ({"noop_max": -1}, "noop_max must be an integer of at least 0, got -1"),
        ({"num_threads": -1}, "num_threads must be an integer of at least 0, got -1"),
        ({"sticky": 1.5}, r"sticky must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_what_cannot_be_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtariVecEnv("pong", **kwargs)


def test_a_missing_rom_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("ALE_ROMS_DIR", str(folder))
        with pytest.raises(ValueError, match="env_id must be the id of a game whose ROM is installed, got 'pong'"):
            AtariVecEnv("PongNoFrameskip-v4", 1)


@pytest.mark.parametrize("action", [-1, 6])
def test_an_action_outside_the_space_is_refused(action: int, pong: AtariVecEnv) -> None:
    """ale-py would wait forever."""
    pong.reset()
    with pytest.raises(ValueError, match=r"actions must be elements of Discrete\(6\)"):
        step(pong, 0, action)
    step(pong, 0, 5)


def history(env: AtariVecEnv) -> tuple[np.ndarray, np.ndarray]:
    """Observations and rewards if all games get the same actions."""
    observations, rewards = [env.reset()], []
    for action in np.random.default_rng(0).integers(n_actions(env), size=40):
        observation, reward, _, _ = step(env, *[action] * env.num_envs)
        observations.append(observation)
        rewards.append(reward)
    return np.stack(observations), np.stack(rewards)


def test_a_seed_settles_everything() -> None:
    """Including sticky actions, for any number of threads."""
    env = AtariVecEnv("ALE/Breakout-v5", 2, seed=5)
    observations, rewards = history(env)
    again = AtariVecEnv("ALE/Breakout-v5", 2, num_threads=1)
    for seed in (5, 5 + 2**31):
        again.seed(seed)
        for expected, found in zip((observations, rewards), history(again), strict=True):
            np.testing.assert_array_equal(expected, found)
    assert (history(env)[0] != observations).any()  # the first reset used the seed up
    env.seed(6)
    np.testing.assert_array_equal(observations[:, 1:], history(env)[0][:, :-1])  # one seed per game


def test_games_begin_after_a_random_number_of_frames() -> None:
    env = AtariVecEnv("breakout", 2, noop_max=30, seed=0)
    starts: list[int] = []
    for _ in range(16):
        env.reset()
        starts += [info["episode_frame_number"] for info in env.reset_infos]
    assert len(set(starts)) > 8
    assert min(starts) >= 1
    assert 20 < max(starts) <= 29


def test_what_was_returned_stays_as_it_was() -> None:
    env = AtariVecEnv("MsPacmanNoFrameskip-v4", 2, max_frames=200)
    arrays: list[np.ndarray] = [env.reset()]
    for observations, rewards, dones, infos in random_steps(env, 60):
        arrays += [observations, rewards, dones]
        arrays += [info["terminal_observation"] for info in infos if "terminal_observation" in info]
    assert len(arrays) >= 183
    copies = [array.copy() for array in arrays]
    for _ in random_steps(env, 30, seed=2):
        pass
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    for earlier, later in pairwise(arrays):
        assert not np.shares_memory(earlier, later)


@pytest.mark.parametrize("frame_stack", [1, 2, 4])
def test_an_episodes_frames_are_its_own_and_follow_one_another(frame_stack: int) -> None:
    """So a buffer can store each frame once."""
    env = AtariVecEnv("BreakoutNoFrameskip-v4", 2, frame_stack=frame_stack, max_frames=300)
    assert env.observation_space.shape == (frame_stack, 84, 84)
    before = env.reset()
    ends = 0
    for observations, _, dones, infos in random_steps(env, 170):
        for game, done in enumerate(dones):
            last = infos[game]["terminal_observation"] if done else observations[game]
            np.testing.assert_array_equal(last[:-1], before[game, 1:])
            if done:
                assert not observations[game, :-1].any()
                assert observations[game, -1].any()
        before = observations
        ends += int(dones.sum())
    assert ends >= 4


def test_the_first_action_after_a_lost_life_is_fire() -> None:
    """Whatever action is given; not without episodic life."""

    def frames(env: AtariVecEnv, first: int) -> np.ndarray:
        env.reset()
        while step(env, 0)[3][0]["lives"] == 5:
            pass
        return np.stack([step(env, action)[0] for action in (first, *[0] * 20)])

    episodic, plain = (AtariVecEnv("breakout", 1, noop_max=0, episodic_life=each) for each in (True, False))
    expected = frames(episodic, 0)
    assert env_fires(expected)
    np.testing.assert_array_equal(frames(episodic, 3), expected)
    np.testing.assert_array_equal(frames(episodic, 1), expected)
    assert not env_fires(frames(plain, 0))


def env_fires(frames: np.ndarray) -> bool:
    """Whether anything moves without an action."""
    return bool((frames[-1] != frames[-2]).any())


def test_points_are_clipped_and_scores_are_not() -> None:
    clipped, plain = (
        AtariVecEnv("MsPacmanNoFrameskip-v4", 1, noop_max=0, clip_reward=clip, max_frames=900) for clip in (True, False)
    )
    clipped.reset()
    plain.reset()
    points, scores = 0.0, []
    for ours, theirs in zip(random_steps(clipped, 455), random_steps(plain, 455), strict=True):
        np.testing.assert_array_equal(ours[1], np.sign(theirs[1]))
        points += theirs[1][0]
        if "episode" in ours[3][0]:
            scores.append(ours[3][0]["episode"]["r"])
            assert scores[-1] == points
            assert ours[3][0]["episode"].keys() == {"r", "l", "t"}
            points = 0
    assert len(scores) >= 2
    assert max(scores) > 50


def until_a_life_is_lost(env: AtariVecEnv) -> tuple[Any, dict[str, Any]]:
    """Play NOOP until then; returns the last observations and the first game's info."""
    env.reset()
    while True:
        observations, _, dones, infos = step(env, *[0] * env.num_envs)
        if dones[0]:
            return observations, infos[0]


@cache
def limited_game(game: str) -> AtariVecEnv:
    return AtariVecEnv(f"{game}NoFrameskip-v4", 1, max_frames=480)


@cache
def beginning(game: str) -> tuple[np.ndarray, list[Any]]:
    """The first observation of such a game, and random steps from there."""
    env = limited_game(game)
    env.seed(0)
    return env.reset(), list(random_steps(env, 120, seed=4))


@pytest.mark.parametrize("game", ["Breakout", "MsPacman"])
@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_reset_begins_new_games(game: str, in_a_step: bool) -> None:
    """Nothing of the old games is left: no points, no FIRE that is due, no step that was started."""
    env, (first, steps) = limited_game(game), beginning(game)
    env.seed(0)
    env.reset()
    for _, _, dones, _ in random_steps(env, 110, seed=2):
        if dones[0]:
            break
    assert dones[0] == (game == "Breakout")
    if in_a_step:
        env.step_async(np.zeros(1, int))
    env.seed(0)
    np.testing.assert_array_equal(env.reset(), first)
    scores = []
    for ours, theirs in zip(random_steps(env, 120, seed=4), steps, strict=True):
        for found, other in zip(ours[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(found, other)
        scores += [[info["episode"]["r"] for info in infos if "episode" in info] for infos in (ours[3], theirs[3])]
    assert any(scores)
    assert scores[::2] == scores[1::2]


def test_a_life_lost_at_the_limit_is_a_terminal_and_the_game_is_over() -> None:
    """As in SB3, which checks lives before the time limit."""

    def limited(max_frames: int) -> AtariVecEnv:
        return AtariVecEnv("BreakoutNoFrameskip-v4", 1, noop_max=0, max_frames=max_frames)

    _, info = until_a_life_is_lost(limited(108_000))
    assert "episode" not in info
    max_frames = info["episode_frame_number"] - 1  # the first frame is FIRE
    env, other = limited(max_frames), limited(max_frames)
    for each in (env, other):
        observations, last = until_a_life_is_lost(each)
        assert last["lives"] == 4
        assert last["episode"]["l"] == max_frames + 1
        assert not last["TimeLimit.truncated"]
        assert each.get_attr("lives") == [5]
        assert each.reset_infos[0]["episode_frame_number"] == 1
        assert each.reset_infos[0]["frame_number"] > max_frames  # it is not reset
        assert not observations[0, :-1].any()
    assert (step(env, 2)[0] != step(other, 3)[0]).any()  # no FIRE in place of these actions


def test_it_answers_what_sb3_asks_an_environment(pong: AtariVecEnv) -> None:
    assert isinstance(pong, VecEnv)
    assert pong.get_attr("render_mode") == ["rgb_array"] * 2
    assert pong.get_attr("action_space", 1) == [pong.action_space]
    assert pong.get_attr("spec")[0].id == "PongNoFrameskip-v4"
    assert not pong.has_attr("nothing")
    pong.set_attr("name", "mine", indices=[1])
    assert pong.get_attr("name", [1]) == ["mine"]
    assert not pong.has_attr("name")
    assert pong.env_method("get_action_meanings", indices=0) == [
        ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]
    ]
    assert pong.env_is_wrapped(Monitor) == [True] * 2
    assert pong.env_is_wrapped(gym.wrappers.TimeLimit, 0) == [False]
    assert AtariVecEnv("pong", 1, full_action_space=True).action_space == gym.spaces.Discrete(18)


def test_it_shows_the_newest_frames(pong: AtariVecEnv) -> None:
    observations = pong.reset()
    image = pong.render()
    assert image is not None
    assert image.shape == (168, 84, 3)
    for game, shown in enumerate(pong.get_images()):
        assert shown is not None
        np.testing.assert_array_equal(shown, np.stack([observations[game, -1]] * 3, -1))


def test_closing_twice_is_no_harm() -> None:
    env = AtariVecEnv("pong", 1)
    env.reset()
    env.step_async(np.zeros(1, int))
    env.close()
    env.close()


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        (PPO, {"n_steps": 32, "batch_size": 32, "n_epochs": 1}),
        (DQN, {"buffer_size": 100, "learning_starts": 20, "batch_size": 8}),
    ],
)
def test_the_algorithms_of_sb3_learn_on_it(algorithm: type[BaseAlgorithm], kwargs: dict[str, Any]) -> None:
    env = make_atari_vec_env("BreakoutNoFrameskip-v4", 1, max_frames=60, screen_size=36)
    model = algorithm("CnnPolicy", env, seed=0, device="cpu", **kwargs)
    assert model.get_env() is env  # no VecTransposeImage: images have channels first
    model.learn(64)
    assert model.num_timesteps >= 64
    assert len(model.ep_info_buffer or []) >= 2


def test_evaluation_is_by_the_scores_of_whole_games() -> None:
    env = AtariVecEnv("MsPacmanNoFrameskip-v4", 2, noop_max=0, screen_size=36)
    model = PPO("CnnPolicy", env, n_steps=4, batch_size=8, device="cpu", seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores, frames = evaluate_policy(model, env, 2, return_episode_rewards=True)
    assert isinstance(scores, list)
    assert isinstance(frames, list)
    assert len(scores) == 2
    assert all(score % 10 == 0 and score >= 60 for score in scores)
    assert min(frames) > 1000  # three lives


@pytest.mark.parametrize(("version", "end"), [(None, ""), ("0.12.0", " (here: 0.12.0)")])
def test_without_a_fitting_ale_py_the_extra_is_named(
    version: str | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "ale_py", None)
    else:
        monkeypatch.setattr(ale_py, "__version__", version)
    with pytest.raises(ImportError) as raised:
        runpy.run_path(vec_env.__file__)  # as its import would run it
    assert str(raised.value) == f"Atari games need ale-py 0.12.1 or later: {how_to_install('atari')}{end}"


def test_games_continue_in_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of different lengths, of new seeds, after lost lives and at the first step of a game."""
    monkeypatch.setattr(vec_env, "GAMES_OF_A_SEED", 3)
    kwargs: dict[str, Any] = {"max_frames": 110, "screen_size": 36, "noop_max": 9}
    first, second = AtariVecEnv("breakout", 2, seed=5, **kwargs), AtariVecEnv("breakout", 2, **kwargs)
    first.reset()
    lives = []
    for n_steps in (0, 5, 45, 50, 1):
        list(random_steps(first, n_steps))
        lives.append(first.lives.tolist())
        state = pickle.loads(pickle.dumps(first.get_state()))
        second.set_state(state)
        for ours, theirs in zip(random_steps(second, 30, 2), random_steps(first, 30, 2), strict=True):
            for a, b in zip(ours[:3], theirs[:3], strict=True):
                np.testing.assert_array_equal(a, b)
            for mine, other in zip(ours[3], theirs[3], strict=True):
                assert mine["episode_frame_number"] == other["episode_frame_number"]
                assert mine.get("episode", {}).get("r") == other.get("episode", {}).get("r")
    assert np.min(lives) < 5  # some were lost
    assert (first._n_games <= 3).all()


def test_a_state_is_a_copy_and_of_one_number_of_games() -> None:
    env = AtariVecEnv("pong", 2, seed=3, max_frames=40, screen_size=36, noop_max=9)
    env.reset()
    state = env.get_state()
    before = pickle.dumps(state)
    list(random_steps(env, 30))
    assert pickle.dumps(state) == before
    env.set_state(state)
    list(random_steps(env, 30))
    assert pickle.dumps(state) == before
    with pytest.raises(ValueError, match="games of the state must be 3, got 2"):
        AtariVecEnv("pong", 3, screen_size=36).set_state(state)


def test_a_state_is_known_only_of_games_with_seeds_and_without_sticky_actions() -> None:
    env = AtariVecEnv("pong", 1)
    env.reset()
    with pytest.raises(ValueError, match="only if they have seeds and no sticky actions"):
        env.get_state()
    sticky = AtariVecEnv("pong", 1, sticky=0.25, seed=3)
    sticky.reset()
    with pytest.raises(ValueError, match="only if they have seeds and no sticky actions"):
        sticky.get_state()
    seeded, other = AtariVecEnv("pong", 1, seed=3), AtariVecEnv("breakout", 1, seed=3)
    seeded.reset()
    with pytest.raises(ValueError, match="did not get to where they were: the environment has other arguments"):
        other.set_state(seeded.get_state())


def test_games_of_one_seed_are_followed_by_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vec_env, "GAMES_OF_A_SEED", 2)
    env = vec_env.AtariVecEnv("breakout", 1, seed=5, max_frames=20, screen_size=36)
    env.reset()
    seeds = []
    for _ in range(60):
        env.step(np.zeros(1, int))
        seeds.append(int(env._game_seeds[0]))
    assert len(set(seeds)) > 3


def test_the_seconds_of_a_game_count_from_the_start() -> None:
    env = AtariVecEnv("breakout", 1, max_frames=20, screen_size=36)
    env.t_start -= 100
    env.reset()
    infos = [env.step(np.zeros(1, int))[3][0] for _ in range(20)]
    seconds = next(info["episode"]["t"] for info in infos if "episode" in info)
    assert 100 <= seconds < 1e8  # and not the time of day, which counts from 1970


def test_frame_skip_and_sticky_actions_are_as_given() -> None:
    env = without_starts("pong", 1, frame_skip=2)
    env.reset()
    assert [step(env, 0)[3][0]["episode_frame_number"] for _ in range(3)] == [2, 4, 6]

    def played(sticky: float, action: int) -> np.ndarray:
        env = without_starts("pong", 1, sticky=sticky, seed=3)
        env.reset()
        return np.stack([step(env, action)[0] for _ in range(30)])

    np.testing.assert_array_equal(played(1.0, 2), played(1.0, 0))  # NOOP is repeated for ever
    assert (played(0.0, 2) != played(0.0, 0)).any()


def test_a_state_has_the_start_of_time_the_infos_of_resets_and_the_seeds_that_are_to_come() -> None:
    kwargs: dict[str, Any] = {"screen_size": 36, "noop_max": 9}
    first, second = AtariVecEnv("breakout", 2, seed=5, **kwargs), AtariVecEnv("breakout", 2, seed=8, **kwargs)
    for env in (first, second):
        env.reset()
    first.t_start -= 100
    first.reset_infos[0]["mine"] = 1
    first.seed(7)
    second.set_state(first.get_state())
    assert (second.t_start, second.reset_infos) == (first.t_start, first.reset_infos)
    np.testing.assert_array_equal(second.reset(), first.reset())
    np.testing.assert_array_equal(second._game_seeds, first._game_seeds)


def test_games_are_made_with_the_given_seed() -> None:
    env = make_atari_vec_env("pong", 2, seed=3)
    env.reset()
    assert env._game_seeds.tolist() == [3, 4]


def test_lost_points_are_rewards_of_minus_one() -> None:
    env = make_atari_vec_env("PongNoFrameskip-v4", 2)
    env.reset()
    rewards = np.concatenate([step[1] for step in random_steps(env, 150)])
    assert set(rewards.tolist()) >= {-1.0, 0.0}


def test_games_without_seeds_stay_without() -> None:
    env = AtariVecEnv("MsPacmanNoFrameskip-v4", 2, max_frames=40)
    env.reset()
    with patch.object(vec_env, "GAMES_OF_A_SEED", 2):
        for _ in random_steps(env, 60):
            pass
    assert (env._n_games > 2).all()
    assert (env._game_seeds == -1).all()


def test_the_lives_of_a_new_game_are_seen_at_once() -> None:
    env = AtariVecEnv("MsPacmanNoFrameskip-v4", 1, max_frames=40, noop_max=0)
    env.reset()
    assert env.get_attr("lives") == [3] == [env.reset_infos[0]["lives"]]
    assert any("episode" in infos[0] and env.get_attr("lives") == [3] for *_, infos in random_steps(env, 20))
