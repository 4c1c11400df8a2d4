"""A cloned policy acts as the expert does."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_acer.demonstrations.cloning import _least_log_std, behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj
from tests.demonstrations.conftest import SPACES, an_agent, expert_of, old_arrays, quiet
from tests.helpers import NormalisedFeatures, Recorder, Shows
from tests.test_policies import sequences_of


@pytest.mark.parametrize("action_space", SPACES, ids=str)
def test_a_clone_acts_as_the_expert_does(action_space: spaces.Space[Any]) -> None:
    arrays = expert_of(action_space)
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), action_space))
    assert behaviour_cloning(model, quiet(arrays), 40, 2e-2) is model
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
    probabilities = model.policy.step(th.ones(1, 2), th.zeros(1, 0))[0][0]
    np.testing.assert_allclose(probabilities.detach(), [0.6, 0.2, 0.2], atol=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_deviation_is_the_experts_but_does_not_collapse(noise: float) -> None:
    arrays = expert_of(SPACES[3])
    arrays["actions"] = arrays["actions"] + noise * np.random.default_rng(1).normal(size=(400, 2))
    model = an_agent(Shows(spaces.Box(-1, 1, (2,)), SPACES[3]))
    behaviour_cloning(model, quiet(arrays), 80, 2e-2)
    assert model.policy.log_std is not None
    expected = noise or 0.1 * 2  # half of the range is 2
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
    for average, current in zip(model.average_policy.parameters(), model.policy.parameters(), strict=True):
        assert average.equal(current)
        assert not average.requires_grad
        assert current.grad is None or not current.grad.any()
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
    model = an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs=kwargs)  # sequences are shorter than the episodes
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
        model.policy.pi_head.weight *= 300  # makes the policy depend on its input
    arrays = old_arrays((7, 8))
    arrays["obs"] = arrays["obs"] / 5
    obs = th.from_numpy(np.concatenate((arrays["obs"], arrays["obs"][:1])))[:, np.newaxis]
    ends = th.zeros(15, 1, dtype=th.bool)
    ends[6] = ends[14] = True
    no_finals = obs[:0, 0], th.zeros(0, dtype=th.int64)
    states, actions = th.zeros(1, model.policy.state_size), th.zeros(15, 1, 1)
    stats = model.policy.statistics(sequences_of(obs, actions, states, ends, *no_finals))
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


def test_statistics_that_are_not_trained_stay() -> None:
    env = VecNormalize(make_vec_env(Recorder, 1), training=False)
    before = vars(env.obs_rms)["mean"].copy()
    behaviour_cloning(an_agent(env), quiet(old_arrays()), 1)
    np.testing.assert_array_equal(vars(env.obs_rms)["mean"], before)


def test_the_least_deviation_of_a_component_without_a_range_is_a_tenth() -> None:
    low, high = np.array([-2, 1, -np.inf], np.float32), np.array([2, 1, np.inf], np.float32)
    least = _least_log_std(an_agent(Shows(spaces.Box(-1, 1, (2,)), spaces.Box(low, high))))
    assert least is not None
    np.testing.assert_allclose(least.exp(), [0.2, 0.1, 0.1], rtol=1e-6)


def test_each_epoch_begins_with_the_states_of_the_policy_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    play_back, played = ExpertDataset.play_back, []

    def spy(dataset: ExpertDataset, model: Any) -> Any:
        stats, states = play_back(dataset, model)
        played.append(states)
        return stats, states

    monkeypatch.setattr(ExpertDataset, "play_back", spy)
    kwargs = {"net_arch": [16], "lstm_hidden_size": 8}
    behaviour_cloning(an_agent(Recorder(), "MlpLstmPolicy", policy_kwargs=kwargs), quiet(old_arrays()), 3, 1e-2)
    assert len(played) == 3
    assert (played[0] != played[2]).any()


def test_adam_has_the_epsilon_that_is_given() -> None:
    moves = []
    for adam_epsilon in (1e-8, 1.0):
        model = an_agent(Recorder())
        before = model.policy.pi_head.bias.detach().clone()
        behaviour_cloning(model, quiet(old_arrays(), train_fraction=1.0), 1, 1e-3, adam_epsilon)
        moves.append((model.policy.pi_head.bias - before).abs().max().item())
    assert moves[0] == pytest.approx(1e-3, rel=1e-3)  # Adam's first step, unless epsilon counts
    assert moves[1] < 0.5e-3


def test_cloning_is_in_training_mode_and_validation_is_not() -> None:
    clones = []
    for verbose in (0, 1):  # with 1 the validation part is evaluated
        model = an_agent(Recorder(), policy_kwargs={"features_extractor_class": NormalisedFeatures})
        model.verbose = verbose
        behaviour_cloning(model, quiet(old_arrays()), 3)
        clones.append([buffer.clone() for buffer in model.policy.buffers()])
        assert clones[-1][-1] == 3  # batches that the running means are of: one in each epoch
    assert all(map(th.allclose, *clones))


def test_losses_are_reported_ten_times_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    model = an_agent(Recorder())
    model.verbose = 1
    behaviour_cloning(model, quiet(old_arrays()), 20)
    epochs = [line.split(" of ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert epochs == [f"epoch {epoch}" for epoch in range(2, 21, 2)]
