"""Reading demonstrations and replaying them."""

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_acer import ACER
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from tests.demonstrations.conftest import SPACES, an_agent, expert_of, new_arrays, old_arrays, quiet, save
from tests.helpers import Recorder, Shows, WithDropout
from tests.mutations import attempt


def test_files_of_stable_baselines_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = old_arrays()
    arrays["rewards"] = arrays["rewards"][:, np.newaxis]  # as saved if the environment was a VecEnv
    dataset = ExpertDataset(str(save(tmp_path / "old.npz", arrays)), sequential_preprocessing=True)
    assert (dataset.num_traj, dataset.num_transition, dataset.truncated) == (3, 12, None)
    assert dataset.avg_ret == pytest.approx(arrays["episode_returns"].mean())
    np.testing.assert_array_equal(dataset.observations, arrays["obs"])
    np.testing.assert_array_equal(dataset.actions, arrays["actions"])
    np.testing.assert_array_equal(dataset.rewards, arrays["rewards"][:, 0])
    assert "3 trajectories, 12 transitions" in capsys.readouterr().out


def test_discrete_observations_are_read() -> None:
    arrays = {**old_arrays(), "obs": np.arange(12)[:, np.newaxis]}
    model = an_agent(Shows(spaces.Discrete(12)))
    np.testing.assert_array_equal(quiet(arrays).observations_for(model, np.arange(12)), np.arange(12))
    behaviour_cloning(model, quiet(arrays), 1)


def test_pickled_objects_are_refused_unless_they_are_loaded_by_hand(tmp_path: Path) -> None:
    arrays = old_arrays()
    starts = arrays["episode_starts"].astype(object)
    starts[1:] = [np.array([start]) for start in starts[1:]]
    path = save(tmp_path / "old.npz", {**arrays, "episode_starts": starts})
    with pytest.raises(ValueError, match=r"got pickled objects.*traj_data=np.load\(expert_path, allow_pickle=True\)"):
        ExpertDataset(path)
    with np.load(path, allow_pickle=True) as file:
        np.testing.assert_array_equal(quiet(file).starts, [0, 4, 7])


@pytest.mark.parametrize("name", ["text.npz", "array.npy"])
def test_a_file_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("no arrays")
    if path.suffix == ".npy":
        np.save(path, np.zeros(3))
    with pytest.raises(ValueError, match=f"expert_path must be an npz file, got .*{name}"):
        ExpertDataset(path)
    with pytest.raises(FileNotFoundError):
        ExpertDataset(tmp_path / "missing.npz")


def test_a_file_of_more_than_two_gigabytes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)  # archives above it have another record at their end
    path = save(tmp_path / "large.npz", old_arrays())
    np.testing.assert_array_equal(ExpertDataset(path, verbose=0).starts, [0, 4, 7])


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = save(tmp_path / "expert.npz", old_arrays())
    content, n_loaded = path.read_bytes(), 0
    places = range(0, len(content), 7)
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 255
        path.write_bytes(damaged)
        loaded, wrong = attempt(lambda: ExpertDataset(path, verbose=0), path.name)
        assert not wrong, place
        n_loaded += loaded
    assert n_loaded < len(places) / 2


def test_what_does_not_fit_is_refused() -> None:
    arrays = old_arrays()
    with pytest.raises(ValueError, match="one of expert_path and traj_data must be given, got neither"):
        ExpertDataset()
    with pytest.raises(ValueError, match="got both"):
        ExpertDataset("expert.npz", arrays)
    with pytest.raises(ValueError, match="got none named rewards"):
        quiet({key: array for key, array in arrays.items() if key != "rewards"})
    with pytest.raises(ValueError, match="actions must have 12 rows, as episode_starts says, got 11"):
        quiet({**arrays, "actions": arrays["actions"][1:]})
    with pytest.raises(ValueError, match="episode_returns must have 3 rows, as episode_starts says, got 2"):
        quiet({**arrays, "episode_returns": arrays["episode_returns"][1:]})
    for value in (np.nan, 1e39):
        with pytest.raises(ValueError, match=f"rewards must be finite, and at most 1e.15, got {re.escape(str(value))}"):
            quiet({**arrays, "rewards": np.full(12, value)})
    with pytest.raises(ValueError, match=r"rewards must have one value in each row, got an array of shape \(12, 2\)"):
        quiet({**arrays, "rewards": np.zeros((12, 2))})
    with pytest.raises(ValueError, match="episode_starts must be True at the first step"):
        quiet({**arrays, "episode_starts": np.roll(arrays["episode_starts"], 1)})
    for changes, message in (
        ({"train_fraction": 0}, r"train_fraction must be in \(0, 1\], got 0"),
        ({"train_fraction": 1.1}, r"train_fraction must be a number in .0, 1., got 1.1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"traj_limitation": 4}, r"traj_limitation must be -1 or in \[1, 3\], got 4"),
        ({"traj_limitation": 0}, r"traj_limitation must be -1 or in \[1, 3\], got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(arrays, **changes)


def test_a_limited_dataset_has_whole_trajectories() -> None:
    arrays = new_arrays()
    dataset = quiet(arrays, traj_limitation=2)
    assert (dataset.num_traj, dataset.num_transition) == (2, 7)
    np.testing.assert_array_equal(dataset.lasts, [3, 6])
    np.testing.assert_array_equal(dataset.returns, arrays["episode_returns"][:2])
    np.testing.assert_array_equal(dataset.observations, np.concatenate((arrays["obs"][:7], arrays["final_obs"][:2])))
    np.testing.assert_array_equal(dataset.truncated, [False, True])


@pytest.mark.parametrize(("n_steps", "n_train"), [(1, 70), (10, 7)])
def test_each_step_is_for_training_or_for_validation(n_steps: int, n_train: int) -> None:
    dataset = quiet(old_arrays((60, 40)), batch_size=20)
    for _ in range(2):
        train, val = (np.concatenate(list(dataset.batches(split, n_steps)), 1) for split in ("train", "val"))
        assert train.shape == (n_steps, n_train)
        np.testing.assert_array_equal(np.sort(np.concatenate((train, val), 1), None), np.arange(100))
        np.testing.assert_array_equal(train - train[0], np.tile(np.arange(n_steps), (n_train, 1)).T)
    assert {batch.size for batch in dataset.batches("train", n_steps)} <= {20, 10}


def test_epochs_have_an_order_of_their_own_if_wanted() -> None:
    for randomize in (True, False):
        dataset = quiet(old_arrays((60, 40)), randomize=randomize)
        one, other = (np.concatenate(list(dataset.batches("train")), 1) for _ in range(2))
        assert (one != other).any() == randomize


def replayed(model: ACER) -> dict[int, tuple[Any, ...]]:
    """By step: action, reward, terminated, truncated, next observation."""
    rows: dict[int, tuple[Any, ...]] = {}
    for _ in range(50):
        batch = model.replay_buffer.sample(4)
        assert isinstance(batch.observations, th.Tensor)
        assert isinstance(batch.final_observations, th.Tensor)
        following = batch.observations[1:].clone()
        following.flatten(0, 1)[batch.final_steps] = batch.final_observations
        columns = (batch.actions, batch.rewards, batch.terminated, batch.truncated, following[..., 0])
        for t, b in np.ndindex(*batch.rewards.shape):
            row = tuple(column[t, b].item() for column in columns)
            step = int(batch.observations[t, b, 0])
            assert rows.setdefault(step, row)[:4] == row[:4]
    return rows


def test_what_is_replayed_is_what_was_demonstrated() -> None:
    arrays = new_arrays(truncated=(False, True, False))
    model = an_agent(make_vec_env(Recorder, 2), n_steps=3)
    quiet(arrays).to_replay_buffer(model)
    assert model.replay_buffer.size() == 6
    rows = replayed(model)
    assert set(rows) == set(range(12))
    for step, (action, reward, terminated, truncated, following) in rows.items():
        assert action == arrays["actions"][step, 0]
        assert reward == pytest.approx(arrays["rewards"][step])
        assert terminated == (step in (3, 11))
        assert truncated == (step in (5, 6))  # the first environment's last step, and a truncated trajectory
        assert terminated or following == (101 if step == 6 else step + 1)


def test_stacked_frames_are_stored_once_too() -> None:
    image = {"screen_height": 36, "screen_width": 36, "n_channels": 1, "discrete": True}
    stacked = VecFrameStack(make_vec_env(FakeImageEnv, 1, env_kwargs=image), 4)
    arrays = {"actions": np.zeros((9, 1), int), "obs": np.zeros((9, 36, 36, 4), np.uint8), "rewards": np.zeros(9)}
    arrays |= {"episode_returns": np.zeros(1), "episode_starts": np.arange(9) == 0}
    model = an_agent(stacked, "CnnPolicy", n_steps=3)
    quiet(arrays).to_replay_buffer(model)
    assert list(model.replay_buffer.state_dict()["stacks"]) == [""]


def test_an_old_file_s_last_steps_are_terminal_or_left_out_at_the_time_limit() -> None:
    model = an_agent(Recorder(), n_steps=3)
    quiet(old_arrays()).to_replay_buffer(model)
    rows = replayed(model)
    assert set(rows) == set(range(12))
    assert {step for step, row in rows.items() if row[2]} == {3, 6, 11}
    model = an_agent(Recorder(), n_steps=9)
    quiet(old_arrays((4, 3, 4))).to_replay_buffer(model, time_limit=4)
    rows = replayed(model)
    assert set(rows) == set(range(11)) - {3, 10}
    assert [step for step, row in rows.items() if row[2]] == [6]
    assert {step: row[4] for step, row in rows.items() if row[3]} == {2: 3, 9: 10}


def test_without_final_observations_the_last_steps_of_truncated_trajectories_are_left_out() -> None:
    arrays = new_arrays((4, 1, 3, 4), (False, True, True, False))
    del arrays["final_obs"]
    model = an_agent(Recorder(), n_steps=5)
    quiet(arrays).to_replay_buffer(model)
    rows = replayed(model)
    assert set(rows) == set(range(12)) - {4, 7}
    assert {step: row[2:4] for step, row in rows.items() if row[2] or row[3]} == {
        3: (True, False),
        6: (False, True),
        11: (True, False),
    }


def test_observations_that_the_space_would_round_are_refused() -> None:
    image = {"screen_height": 36, "screen_width": 36, "n_channels": 1, "discrete": True}
    model = an_agent(make_vec_env(FakeImageEnv, 1, env_kwargs=image), "CnnPolicy", n_steps=3)
    arrays = {"actions": np.zeros((6, 1), int), "obs": np.full((6, 36, 36, 1), 0.5), "rewards": np.zeros(6)}
    arrays |= {"episode_returns": np.zeros(1), "episode_starts": np.arange(6) == 0}
    with pytest.raises(ValueError, match="obs must be values of the observation space Box"):
        quiet(arrays).to_replay_buffer(model)


@pytest.mark.parametrize(
    ("space", "value"),
    [(spaces.Discrete(4), 7), (spaces.MultiBinary(2), 5), (spaces.MultiDiscrete([2, 3]), 2)],
    ids=str,
)
def test_observations_outside_the_space_are_refused(space: spaces.Space[Any], value: int) -> None:
    arrays = {**old_arrays(), "obs": np.full((12, *(space.shape or (1,))), value)}
    with pytest.raises(ValueError, match=rf"obs must be values of the observation space .*, got \[.*{value}"):
        quiet(arrays).to_replay_buffer(an_agent(Shows(space)))


def test_images_of_another_shape_are_named_with_their_own() -> None:
    env = make_vec_env(FakeImageEnv, 1, env_kwargs={"screen_height": 36, "screen_width": 36, "n_channels": 1})
    arrays = {**old_arrays(), "obs": np.zeros((12, 40, 50, 3), np.uint8), "actions": np.zeros((12, 1), int)}
    with pytest.raises(ValueError, match=r"got observations of shape \(40, 50, 3\)"):
        quiet(arrays).to_replay_buffer(an_agent(env, "CnnPolicy", n_steps=3))


@pytest.mark.parametrize("action_space", SPACES, ids=str)
def test_the_behaviour_is_about_the_action_taken_or_the_policys(action_space: spaces.Space[Any]) -> None:
    arrays = expert_of(action_space, 40)
    family = (model := an_agent(Shows(spaces.Box(-1, 1, (2,)), action_space))).policy.family
    dataset = quiet(arrays)
    dataset.to_replay_buffer(model, "policy")
    batch = model.replay_buffer.latest()
    assert isinstance(batch.observations, th.Tensor)
    stats, _ = model.policy.step(batch.observations[:-1].flatten(0, 1), th.zeros(5, 0))
    np.testing.assert_allclose(batch.behaviour.flatten(0, 1), stats.detach(), rtol=1e-5)

    dataset.to_replay_buffer(model, epsilon=0.1)
    batch = model.replay_buffer.latest()
    assert family.mode(batch.behaviour).equal(batch.actions)
    if isinstance(action_space, spaces.Box):
        assert batch.behaviour.chunk(2, -1)[1].flatten(0, 1).allclose(stats.chunk(2, -1)[1])
    else:
        sizes = {"Discrete": [3], "MultiDiscrete": [2, 3], "MultiBinary": [2, 2]}[type(action_space).__name__]
        expected = np.prod([0.9 + 0.1 / size for size in sizes])
        np.testing.assert_allclose(family.log_prob(batch.behaviour, batch.actions).exp(), expected, rtol=1e-4)
        assert (family.ratio(stats.view(5, 1, -1), batch.behaviour, batch.actions) < 1).all()


def test_demonstrations_and_rollouts_are_episodes_apart() -> None:
    model = an_agent(Recorder(length=100), n_steps=6, replay_start=0).learn(12)
    quiet(new_arrays()).to_replay_buffer(model)
    assert model.replay_buffer.size() == 24
    for ages in (-1, -3):  # the last demonstrated step, and the last step before the demonstrations
        slot = model.replay_buffer.pos + ages
        batch = model.replay_buffer.gather(np.array([slot]), np.array([0]), None, th.device("cpu"))
        assert (batch.terminated | batch.truncated)[-1].all()
    model.learn(30, reset_num_timesteps=False)
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())


def test_a_rollout_under_way_is_finished_by_demonstrations() -> None:
    model = an_agent(Recorder(length=100), n_steps=8)
    model.learn(100, callback=lambda local, _: local["self"].num_timesteps < 11)
    assert model.replay_buffer.step == 3
    quiet(new_arrays()).to_replay_buffer(model)
    assert model.replay_buffer.step == 3
    model.learn(16)
    slots = model.replay_buffer.gather(np.arange(5), np.zeros(5, int), None, th.device("cpu"))
    shown = new_arrays()["rewards"]
    rewards = np.concatenate((np.arange(1, 12), shown, shown[:4], np.arange(12, 25)))
    np.testing.assert_allclose(slots.rewards.T.flatten(), rewards, rtol=1e-6)
    assert slots.ends.T.flatten().nonzero().flatten().tolist() == [10, 14, 17, 22, 26]


def test_the_agent_is_shown_its_own_space_and_the_buffer_what_was_recorded() -> None:
    env = VecNormalize(make_vec_env(Recorder, 1))
    model = an_agent(env)
    behaviour_cloning(model, quiet(new_arrays()), 1)
    quiet(new_arrays()).to_replay_buffer(model, "policy")
    batch, normalised = model.replay_buffer.latest(), model.replay_buffer.latest(env)
    assert set(batch.observations[:, 0, 0].int().tolist()) <= {*range(12)}  # type: ignore[index]
    stats, _ = model.policy.step(normalised.observations[:-1].flatten(0, 1), th.zeros(5, 0))  # type: ignore[index]
    np.testing.assert_allclose(batch.behaviour.flatten(0, 1), stats.detach(), rtol=1e-4)


def test_an_agent_without_an_environment_is_shown_what_its_statistics_make() -> None:
    model = an_agent(VecNormalize(make_vec_env(Recorder, 1)))
    model.learn(40)
    expected = quiet(new_arrays()).inputs_for(model, np.arange(3))
    model.env = None
    assert th.equal(quiet(new_arrays()).inputs_for(model, np.arange(3)), expected)


def test_a_recurrent_agents_memory_at_each_sequence_is_replayed() -> None:
    kwargs = {"net_arch": [16], "lstm_hidden_size": 8}
    model = an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs=kwargs, n_steps=4)
    arrays = new_arrays((10, 6), (False, True))
    quiet(arrays).to_replay_buffer(model, "policy")
    state = None
    for step in range(16):
        start = np.array([step in (0, 10)])
        before = model.policy._states_before(state, start, 1)
        if step % 4 == 0:
            slot = model.replay_buffer.pos - 4 + step // 4
            batch = model.replay_buffer.gather(np.array([slot]), np.array([0]), None, th.device("cpu"))
            np.testing.assert_allclose(batch.states, before, atol=1e-6)
        _, state = model.predict(arrays["obs"][step : step + 1], state, start)
    batch = model.replay_buffer.latest()
    stats = model.policy.statistics(batch)
    np.testing.assert_allclose(batch.behaviour, stats, rtol=1e-4)


def test_more_demonstrations_than_the_buffer_holds_are_warned_of() -> None:
    model = an_agent(Recorder(), buffer_size=10)
    with pytest.warns(UserWarning, match="keeps 10 of 12 demonstrated steps"):
        quiet(new_arrays()).to_replay_buffer(model)
    assert model.replay_buffer.size() == 10


def test_arguments_of_a_replay_are_checked() -> None:
    model, dataset = an_agent(Recorder()), quiet(new_arrays())
    for arguments, message in (
        ({"behaviour": "uniform"}, "behaviour must be one of expert, policy, got 'uniform'"),
        ({"epsilon": 0}, r"epsilon must be in \(0, 1\], got 0"),
        ({"time_limit": 1}, "time_limit must be an integer of at least 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.to_replay_buffer(model, **arguments)
    others: list[Any] = ["agent", PPO("MlpPolicy", Recorder(), device="cpu")]
    for other in others:
        with pytest.raises(ValueError, match="model must be an ACER, got "):
            dataset.to_replay_buffer(other)
    assert model.replay_buffer.size() == 0


def test_demonstrations_are_played_back_without_dropout() -> None:
    model = an_agent(Recorder(), policy_kwargs={"features_extractor_class": WithDropout})
    played = []
    for _ in range(2):
        model.policy.set_training_mode(True)
        played.append(quiet(old_arrays()).play_back(model)[0])
    np.testing.assert_array_equal(played[0], played[1])


def test_the_masks_of_a_limited_dataset_are_those_of_its_trajectories() -> None:
    arrays: dict[str, Any] = {**old_arrays(), "action_masks": np.ones((12, 3), bool)}
    arrays["action_masks"][:, 2] = False
    masks = quiet(arrays, traj_limitation=2).masks
    assert masks is not None
    np.testing.assert_array_equal(masks, [[1, 1, 0]] * 7 + [[1, 1, 1]] * 2)
    finals = np.eye(3, dtype=bool)
    masks = quiet({**arrays, "final_action_masks": finals}, traj_limitation=2).masks
    assert masks is not None
    np.testing.assert_array_equal(masks[7:], finals[:2])


def test_the_global_seed_settles_parts_and_orders() -> None:
    epochs = []
    for _ in range(2):
        np.random.seed(3)
        dataset = quiet(old_arrays((60, 40)))
        epochs.append([np.concatenate(list(dataset.batches("train")), 1) for _ in range(2)])
    np.testing.assert_array_equal(epochs[0], epochs[1])


def test_a_trajectory_longer_than_the_time_limit_ends_in_a_terminal_state() -> None:
    model = an_agent(Recorder(), n_steps=9)
    quiet(old_arrays((5, 2, 3))).to_replay_buffer(model, time_limit=3)
    rows = replayed(model)
    assert {step for step, row in rows.items() if row[2]} == {4, 6}
    assert set(rows) == set(range(9))
