"""Demonstrations: what is recorded is read, what is read is cloned, and what is replayed is what was read."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_acer import ACER
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj
from tests.helpers import Constant, Recorder

SPACES: tuple[spaces.Space[Any], ...] = (
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
    spaces.Box(-2, 2, (2,)),
    spaces.Box(0, 10, (2, 1), np.int32),
)


class Shows(gym.Env[Any, Any]):
    """Shows what its observation space draws, for episodes of five steps."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(3)
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self.observation_space.sample(), 1.0, self.n_steps == 5, False, {}


class Watcher:
    """An expert who always does the same, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[np.ndarray] = []

    def __call__(self, observation: np.ndarray) -> int:
        self.shown.append(observation)
        return 0


def an_agent(env: Any, policy: str = "MlpPolicy", **changes: Any) -> ACER:
    settings: dict[str, Any] = {"n_steps": 5, "seed": 0, "device": "cpu", "policy_kwargs": {"net_arch": [32]}}
    return ACER(policy, env, **{**settings, **changes})


def old_arrays(lengths: tuple[int, ...] = (4, 3, 5), seed: int = 0) -> dict[str, np.ndarray]:
    """As stable-baselines saved them, for the observations and actions of `Recorder`."""
    n, rng = sum(lengths), np.random.default_rng(seed)
    starts = np.zeros(n, bool)
    starts[np.cumsum((0, *lengths[:-1]))] = True
    rewards = rng.normal(size=n)
    return {
        "actions": rng.integers(3, size=(n, 1)),
        "obs": np.stack((np.arange(n), rng.normal(size=n)), -1).astype(np.float32),
        "rewards": rewards,
        "episode_returns": np.add.reduceat(rewards, np.flatnonzero(starts)),
        "episode_starts": starts,
    }


def new_arrays(
    lengths: tuple[int, ...] = (4, 3, 5), truncated: tuple[bool, ...] = (False, True, False)
) -> dict[str, np.ndarray]:
    finals = np.stack((100 + np.arange(len(lengths)), np.zeros(len(lengths))), -1).astype(np.float32)
    return {**old_arrays(lengths), "truncated": np.array(truncated, bool), "final_obs": finals}


def expert_of(action_space: spaces.Space[Any], n: int = 400) -> dict[str, np.ndarray]:
    """One trajectory of an expert whose action depends on the signs of an observation."""
    rng = np.random.default_rng(0)
    obs = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    ones = (obs > 0).astype(np.int64)
    actions = {
        "Discrete": 5 + ones.sum(-1, keepdims=True),
        "MultiDiscrete": ones * [1, 2],
        "MultiBinary": ones.astype(np.int8),
        "Box": obs * 1.5 if action_space.dtype == np.float32 else np.round(5 + 4 * obs)[..., np.newaxis],
    }[type(action_space).__name__]
    starts = np.arange(n) == 0
    return {
        "actions": actions,
        "obs": obs,
        "rewards": np.ones(n),
        "episode_returns": np.array([float(n)]),
        "episode_starts": starts,
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def quiet(arrays: dict[str, np.ndarray], **changes: Any) -> ExpertDataset:
    return ExpertDataset(traj_data=arrays, verbose=0, **changes)


# Recording


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
    np.testing.assert_allclose(arrays["final_obs"], [(4, 4), (4, 8)], rtol=1e-5)


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


def test_an_agent_learns_first_and_goes_on_after() -> None:
    model = an_agent(Recorder(), n_steps=20)
    generate_expert_traj(model, n_timesteps=20, n_episodes=1)
    assert model.num_timesteps == 20
    model.learn(20, reset_num_timesteps=False)
    assert model.num_timesteps == 40
    assert model.replay_buffer.latest().observations[0, 0, 0] == 0  # type: ignore[index]


def test_of_several_environments_the_first_is_recorded() -> None:
    model = an_agent(make_vec_env(Recorder, 3))
    with pytest.warns(UserWarning, match="first of 3"):
        arrays = generate_expert_traj(model, n_episodes=2)
    assert arrays["episode_starts"].sum() == 2
    assert len(arrays["obs"]) == 14


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


def test_an_image_is_written_as_stable_baselines_wrote_it(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    for n_channels in (3, 4):
        expert, env = Watcher(), Shows(spaces.Box(0, 255, (40, 36, n_channels), np.uint8))
        path = tmp_path / str(n_channels) / "expert"
        generate_expert_traj(expert, path, env, n_episodes=1)
        image = cv2.imread(str(path.parent / "recorded_images" / "0.png"), cv2.IMREAD_UNCHANGED)
        np.testing.assert_array_equal(image, expert.shown[0][..., ::-1] if n_channels == 3 else expert.shown[0])


def test_images_named_by_a_path_from_elsewhere_are_found_beside_the_file(tmp_path: Path) -> None:
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    arrays = generate_expert_traj(lambda image: 0, tmp_path / "expert", env, n_episodes=1)
    old = {key: arrays[key] for key in old_arrays()}
    old["obs"] = np.array([f"some/folder/{name}" for name in arrays["obs"]])
    model = an_agent(DummyVecEnv([lambda: env]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(save(tmp_path / "old.npz", old), verbose=0)
    assert dataset.observations_for(model, np.arange(5)).shape == (5, 1, 40, 36)
    with pytest.raises(ValueError, match=r"obs must hold paths.*got 'some/folder/recorded_images/0.png'"):
        quiet(old).observations_for(model, np.arange(5))


def test_images_without_opencv_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    with pytest.raises(ImportError, match=r"pip install sb3-acer\[atari\]"):
        generate_expert_traj(lambda image: 0, tmp_path / "expert", env, n_episodes=1)
    arrays = generate_expert_traj(lambda image: 0, None, env, n_episodes=1)
    assert arrays["obs"].shape == (5, 40, 36, 1)


def test_a_recording_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="env must be given"):
        generate_expert_traj(lambda observation: 0)
    with pytest.raises(ValueError, match="n_episodes must be at least 1, got 0"):
        generate_expert_traj(lambda observation: 0, env=Recorder(), n_episodes=0)
    with pytest.raises(ValueError, match="observation_space must not be a Dict"):
        generate_expert_traj(lambda observation: 0, env=Shows(spaces.Dict({"a": spaces.Discrete(2)})))


# Reading


def test_files_of_stable_baselines_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = old_arrays()
    arrays["rewards"] = arrays["rewards"][:, np.newaxis]  # so it was where the environment was a VecEnv
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


def test_what_does_not_fit_is_refused() -> None:
    arrays = old_arrays()
    with pytest.raises(ValueError, match="one of expert_path and traj_data must be given, got neither"):
        ExpertDataset()
    with pytest.raises(ValueError, match="got both"):
        ExpertDataset("expert.npz", arrays)
    with pytest.raises(ValueError, match="got none called rewards"):
        quiet({key: array for key, array in arrays.items() if key != "rewards"})
    with pytest.raises(ValueError, match="actions must have 12 rows by episode_starts, got 11"):
        quiet({**arrays, "actions": arrays["actions"][1:]})
    with pytest.raises(ValueError, match="episode_returns must have 3 rows by episode_starts, got 2"):
        quiet({**arrays, "episode_returns": arrays["episode_returns"][1:]})
    with pytest.raises(ValueError, match="rewards must be finite, got nan"):
        quiet({**arrays, "rewards": np.full(12, np.nan)})
    with pytest.raises(ValueError, match="episode_starts must begin with the first step"):
        quiet({**arrays, "episode_starts": np.roll(arrays["episode_starts"], 1)})
    for changes, message in (
        ({"train_fraction": 0}, r"train_fraction must be in \(0, 1\], got 0"),
        ({"train_fraction": 1.1}, r"train_fraction must be in \(0, 1\], got 1.1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
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


# Cloning


@pytest.mark.parametrize("action_space", SPACES, ids=str)
def test_a_clone_acts_as_the_expert_does(action_space: spaces.Space[Any]) -> None:
    arrays = expert_of(action_space)
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), action_space))
    assert behaviour_cloning(model, quiet(arrays), 80, 1e-2) is model
    acted, _ = model.predict(arrays["obs"], deterministic=True)
    assert acted.dtype == action_space.dtype
    expected = arrays["actions"].reshape(acted.shape)
    tolerance = {np.dtype(np.float32): 0.2, np.dtype(np.int32): 1}.get(np.dtype(action_space.dtype), 0)
    near = np.abs(acted.astype(float) - expected) <= tolerance
    assert near.reshape(len(acted), -1).all(-1).mean() > 0.95


def test_a_clone_is_as_undecided_as_the_expert() -> None:
    arrays = old_arrays((100, 100))
    arrays["obs"] = np.ones((200, 2), np.float32)
    arrays["actions"] = np.resize([0, 0, 0, 1, 2], (200, 1))
    model = behaviour_cloning(an_agent(Recorder()), quiet(arrays, train_fraction=1.0), 100, 3e-3)
    probabilities = model.policy(th.ones(1, 2), th.zeros(1, 0))[0][0]
    np.testing.assert_allclose(probabilities.detach(), [0.6, 0.2, 0.2], atol=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_deviation_is_the_experts_but_does_not_collapse(noise: float) -> None:
    arrays = expert_of(SPACES[3])
    arrays["actions"] = arrays["actions"] + noise * np.random.default_rng(1).normal(size=(400, 2))
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), SPACES[3]))
    behaviour_cloning(model, quiet(arrays), 80, 2e-2)
    assert model.policy.log_std is not None
    expected = noise or 0.1 * 2  # half the range is 2
    np.testing.assert_allclose(model.policy.log_std.exp().detach(), expected, rtol=0.2)


def test_a_deviation_that_is_not_learnt_stays() -> None:
    kwargs = {"net_arch": [32], "learn_log_std": False, "log_std_init": -4}
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), SPACES[3]), policy_kwargs=kwargs)
    behaviour_cloning(model, quiet(expert_of(SPACES[3])), 2)
    assert model.policy.log_std is not None
    assert (model.policy.log_std == -4).all()


def test_losses_fall_and_are_reported_as_often_as_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), SPACES[1]), verbose=1)
    capsys.readouterr()
    behaviour_cloning(model, quiet(expert_of(SPACES[1])), 20, 1e-2, val_interval=5)
    reports = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in reports] == [f"epoch {epoch} of 20" for epoch in (5, 10, 15, 20)]
    for word in ("training", "validation"):
        losses = [float(line.split(f"{word} loss ")[1].split(",")[0]) for line in reports]
        assert losses[-1] < losses[0] < np.log(6)


def test_cloning_leaves_the_critic_and_the_optimiser_alone_and_the_average_policy_equal() -> None:
    model = an_agent(Recorder()).learn(40)
    optimizer = deepcopy(model.policy.optimizer.state_dict()["state"])
    critic = [parameter.clone() for parameter in (*model.policy.q_net.parameters(), *model.policy.q_head.parameters())]
    actor = [parameter.clone() for parameter in model.policy.pi_net.parameters()]
    behaviour_cloning(model, quiet(old_arrays()), 2)
    for after, before in zip(
        (*model.policy.q_net.parameters(), *model.policy.q_head.parameters()), critic, strict=True
    ):
        assert after.equal(before)
    assert not any(after.equal(before) for after, before in zip(model.policy.pi_net.parameters(), actor, strict=True))
    th.testing.assert_close(model.policy.optimizer.state_dict()["state"], optimizer, rtol=0, atol=0)
    for average, current in zip(model.average_policy.weights, model.policy.weights, strict=True):
        assert average.equal(current)
        assert not average.requires_grad
        assert current.grad is None
    model.learn(20)


def test_the_clone_is_shown_normalised_observations() -> None:
    arrays = expert_of(spaces.MultiDiscrete([2, 3]))
    arrays["obs"] = 1000 + 10 * arrays["obs"]
    env = VecNormalize(make_vec_env(lambda: Shows(spaces.Box(-np.inf, np.inf, (2,)), SPACES[1]), 1))
    model = behaviour_cloning(an_agent(env), quiet(arrays), 40, 1e-2)
    seen = env.obs_rms
    assert isinstance(seen, RunningMeanStd)
    np.testing.assert_allclose(seen.mean, arrays["obs"].mean(0), rtol=1e-3)
    acted, _ = model.predict(env.normalize_obs(arrays["obs"]), deterministic=True)
    assert (acted == arrays["actions"]).all(-1).mean() > 0.95
    behaviour_cloning(model, quiet({**arrays, "obs": 0 * arrays["obs"]}), 1)
    np.testing.assert_allclose(seen.mean, arrays["obs"].mean(0), rtol=1e-3)


def test_images_are_cloned(tmp_path: Path) -> None:
    env = Shows(spaces.Box(0, 255, (40, 36, 1), np.uint8))
    generate_expert_traj(lambda image: 2, tmp_path / "expert", env, n_episodes=4)
    model = an_agent(DummyVecEnv([lambda: env]), "CnnPolicy", policy_kwargs={})
    dataset = ExpertDataset(tmp_path / "expert.npz", verbose=0)
    behaviour_cloning(model, dataset, 10, 1e-3)
    acted, _ = model.predict(dataset.observations_for(model, np.arange(20)), deterministic=True)
    assert (acted == 2).all()


def test_a_recurrent_clone_does_what_was_shown_at_the_beginning() -> None:
    lengths = (8,) * 60
    arrays, shown = old_arrays(lengths), np.random.default_rng(1).integers(2, size=60)
    arrays["obs"] = np.zeros((480, 2), np.float32)
    arrays["obs"][::8, 0] = 2 * shown - 1
    arrays["actions"] = np.repeat(shown, 8)[:, np.newaxis]
    kwargs = {"net_arch": [16], "lstm_hidden_size": 16}
    model = an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs=kwargs)  # its sequences are shorter than the episodes
    behaviour_cloning(model, quiet(arrays), 15, 1e-2)
    state, acted = None, []
    for step in range(8):
        action, state = model.predict(arrays["obs"][step::8], state, np.full(60, step == 0), deterministic=True)
        acted.append(action)
    assert (np.stack(acted) == shown).mean() > 0.95


def test_a_recurrent_clones_loss_is_that_of_whole_trajectories(capsys: pytest.CaptureFixture[str]) -> None:
    model = an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs={"net_arch": [16], "lstm_hidden_size": 16})
    model.verbose = 1
    with th.no_grad():
        model.policy.pi_head.weight *= 300  # at first it makes little of what it gets
    arrays = old_arrays((7, 8))
    arrays["obs"] = arrays["obs"] / 5
    obs = th.from_numpy(np.concatenate((arrays["obs"], arrays["obs"][:1])))[:, np.newaxis]
    ends = th.zeros(15, 1, dtype=th.bool)
    ends[6] = ends[14] = True
    stats = model.policy.statistics(obs, th.zeros(1, model.policy.state_size), ends)
    expected = -model.policy.family.log_prob(stats[:, 0], th.from_numpy(arrays["actions"])).mean()
    behaviour_cloning(model, quiet(arrays, train_fraction=1.0), 1, 0.0)
    loss = capsys.readouterr().out.split("training loss ")[1].split(",")[0]
    assert float(loss) == pytest.approx(float(expected), abs=2e-6)


def test_demonstrations_for_another_agent_are_refused() -> None:
    dataset = quiet(old_arrays())
    with pytest.raises(ValueError, match=r"actions must be of Discrete\(3\), got 0.5"):
        behaviour_cloning(an_agent(Recorder()), quiet({**old_arrays(), "actions": np.full((12, 1), 0.5)}))
    for model, message in (
        (an_agent(Recorder(spaces.Discrete(2))), r"actions must be of Discrete\(2\), got 2"),
        (an_agent(Recorder(spaces.MultiDiscrete([3, 3]))), r"actions must be of MultiDiscrete.*of shape \(12, 1\)"),
        (an_agent(Shows(spaces.Box(-1, 1, (3,)))), r"obs must fit the observation space.*of shape \(2,\)"),
        (
            an_agent(Shows(spaces.Dict({"a": spaces.Box(-1, 1, (2,))})), "MultiInputPolicy"),
            "observation_space must not be a Dict",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            behaviour_cloning(model, dataset)
        with pytest.raises(ValueError, match=message):
            dataset.to_replay_buffer(model)


# Replaying


def replayed(model: ACER) -> dict[int, tuple[Any, ...]]:
    """By step: action, reward, terminated, truncated, what followed."""
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
        assert truncated == (step in (5, 6))  # the first environment's last step, and a trajectory that was cut
        assert terminated or following == (101 if step == 6 else step + 1)


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


@pytest.mark.parametrize("action_space", SPACES, ids=str)
def test_the_behaviour_is_about_the_action_taken_or_the_policys(action_space: spaces.Space[Any]) -> None:
    arrays = expert_of(action_space, 40)
    family = (model := an_agent(Shows(spaces.Box(-1, 1, (2,)), action_space))).policy.family
    dataset = quiet(arrays)
    dataset.to_replay_buffer(model, "policy")
    batch = model.replay_buffer.latest()
    assert isinstance(batch.observations, th.Tensor)
    stats, _ = model.policy(batch.observations[:-1].flatten(0, 1), th.zeros(5, 0))
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
    for ages in (-1, -3):  # the last demonstration, and the last step before them
        slot = model.replay_buffer.pos + ages
        batch = model.replay_buffer._gather(np.array([slot]), np.array([0]), None, th.device("cpu"))
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
    slots = model.replay_buffer._gather(np.arange(5), np.zeros(5, int), None, th.device("cpu"))
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
    stats, _ = model.policy(normalised.observations[:-1].flatten(0, 1), th.zeros(5, 0))  # type: ignore[index]
    np.testing.assert_allclose(batch.behaviour.flatten(0, 1), stats.detach(), rtol=1e-4)


def test_a_recurrent_agents_memory_at_each_sequence_is_replayed() -> None:
    kwargs = {"net_arch": [16], "lstm_hidden_size": 8}
    model = an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs=kwargs, n_steps=4)
    arrays = new_arrays((10, 6), (False, True))
    quiet(arrays).to_replay_buffer(model, "policy")
    state = None
    for step in range(16):
        start = np.array([step in (0, 10)])
        before = model.policy._before(state, start, 1)
        if step % 4 == 0:
            slot = model.replay_buffer.pos - 4 + step // 4
            batch = model.replay_buffer._gather(np.array([slot]), np.array([0]), None, th.device("cpu"))
            np.testing.assert_allclose(batch.states, before, atol=1e-6)
        _, state = model.predict(arrays["obs"][step : step + 1], state, start)
    batch = model.replay_buffer.latest()
    stats = model.policy.statistics(batch.observations, batch.states, batch.ends)
    np.testing.assert_allclose(batch.behaviour, stats, rtol=1e-4)


def test_more_demonstrations_than_the_buffer_holds_are_warned_of() -> None:
    model = an_agent(Recorder(), buffer_size=10)
    with pytest.warns(UserWarning, match="keeps 10 of 12 demonstrated steps"):
        quiet(new_arrays()).to_replay_buffer(model)
    assert model.replay_buffer.size() == 10


def test_arguments_of_a_replay_are_checked() -> None:
    model, dataset = an_agent(Recorder()), quiet(new_arrays())
    for arguments, message in (
        ({"behaviour": "uniform"}, "behaviour must be 'expert' or 'policy', got 'uniform'"),
        ({"epsilon": 0}, r"epsilon must be in \(0, 1\], got 0"),
        ({"time_limit": 1}, "time_limit must be None or at least 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.to_replay_buffer(model, **arguments)
    assert model.replay_buffer.size() == 0


def test_opencv_is_not_needed_for_numbers() -> None:
    code = "import sys; sys.modules['cv2'] = sys.modules['matplotlib'] = None; import sb3_acer.demonstrations.cloning"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
