"""The methods of stable-baselines' agents do what they did there."""

import itertools
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from PIL import Image
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from sb3_acer import ACER, MlpPolicy
from tests.helpers import Recorder, Shows

ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(4, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": spaces.Box(-10, 10, (2,)),
}
every_action = pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS)
OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


def make(space: spaces.Space[Any], policy: str = "MlpPolicy", **kwargs: Any) -> ACER:
    """A policy whose actions depend on the observation."""
    policy_kwargs = {"ortho_init": False, **kwargs}
    return ACER(policy, Recorder(space), seed=0, policy_kwargs=policy_kwargs, device="cpu")


def test_the_example_of_the_documentation_runs() -> None:
    env = make_vec_env("CartPole-v1", n_envs=4, seed=0)

    # The documentation has 25,000 steps and the default settings; these learn faster.
    model = ACER("MlpPolicy", env, verbose=0, seed=0, learning_rate=4e-3, replay_start=50)
    model.learn(total_timesteps=6000)
    model.save("acer_cartpole")

    del model  # remove to demonstrate saving and loading

    model = ACER.load("acer_cartpole")

    obs = env.reset()
    lengths = [0]
    while len(lengths) < 21:
        action, _states = model.predict(obs)  # type: ignore[arg-type]
        obs, _rewards, dones, _info = env.step(action)
        lengths[-1] += 1
        if dones[0]:
            lengths.append(0)
    assert np.mean(lengths[:-1]) > 30  # a random policy's is 22


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def every_element(space: spaces.Space[Any]) -> np.ndarray:
    if isinstance(space, spaces.Discrete):
        return np.array([space.start + i for i in range(space.n)])
    sizes = space.nvec if isinstance(space, spaces.MultiDiscrete) else [2] * space.shape[0]  # type: ignore[index]
    elements: np.ndarray = np.stack(np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij"), -1).reshape(
        -1, len(sizes)
    )
    return elements


@pytest.mark.parametrize("space", list(ACTIONS.values())[:3], ids=list(ACTIONS)[:3])
def test_the_masses_of_all_actions_are_those_of_the_distribution_and_sum_to_one(space: spaces.Space[Any]) -> None:
    model, total = make(space), 0.0
    found = model.action_probability(OBSERVATIONS)
    for action in every_element(space):
        mass = model.action_probability(OBSERVATIONS, actions=np.stack([action] * 6))
        if isinstance(space, spaces.Discrete):
            expected = found[:, action - space.start]
        elif isinstance(space, spaces.MultiDiscrete):
            expected = np.prod([factor[:, outcome] for factor, outcome in zip(found, action, strict=True)], axis=0)
        else:
            expected = np.where(action, found, 1 - found).prod(1)
        np.testing.assert_allclose(mass, expected[:, np.newaxis], rtol=1e-5)
        logarithm = model.action_probability(OBSERVATIONS, actions=np.stack([action] * 6), logp=True)
        np.testing.assert_allclose(logarithm, np.log(mass), rtol=1e-5)
        total = total + mass
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_the_density_of_continuous_actions_is_that_of_mean_and_deviation() -> None:
    model = make(ACTIONS["Box"], log_std_init=0.3)
    mean, std = model.action_probability(OBSERVATIONS)
    actions = np.random.default_rng(1).normal(0, 9, (6, 2)).astype(np.float32)
    densities = np.exp(-0.5 * ((actions - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    found = model.action_probability(OBSERVATIONS, actions=actions)
    np.testing.assert_allclose(found, densities.prod(1, keepdims=True), rtol=1e-4)
    np.testing.assert_allclose(std, np.exp(0.3), rtol=1e-5)


@every_action
def test_probabilities_are_those_that_predictions_are_drawn_with(space: spaces.Space[Any]) -> None:
    model = make(space)
    many = np.repeat(OBSERVATIONS[:1], 20_000, 0)
    actions, _ = model.predict(many)
    found = model.action_probability(OBSERVATIONS[0])
    if isinstance(space, spaces.Box):
        mean, std = found
        np.testing.assert_allclose(actions.mean(0), mean, atol=4 * std.max() / 20_000**0.5)
        return
    if isinstance(space, spaces.MultiBinary):
        np.testing.assert_allclose(actions.mean(0), found, atol=0.015)
        return
    factors = found if isinstance(found, list) else [found]
    start = space.start if isinstance(space, spaces.Discrete) else 0
    for outcomes, probabilities in zip(actions.reshape(20_000, -1).T - start, factors, strict=True):
        np.testing.assert_allclose(
            np.bincount(outcomes, minlength=len(probabilities)) / 20_000, probabilities, atol=0.015
        )


@every_action
def test_one_observation_gives_what_it_gives_among_others(space: spaces.Space[Any]) -> None:
    model = make(space)
    many, one = model.action_probability(OBSERVATIONS), model.action_probability(OBSERVATIONS[3])
    parts = zip(many, one, strict=True) if isinstance(many, (list, tuple)) else [(many, one)]
    for of_many, of_one in parts:
        np.testing.assert_allclose(of_many[3], of_one, rtol=1e-5)
    action = space.sample()
    among = model.action_probability(OBSERVATIONS, actions=np.stack([action] * 6))
    alone = model.action_probability(OBSERVATIONS[3], actions=action)
    assert alone.shape == (1,)
    np.testing.assert_allclose(among[3], alone, rtol=1e-5)


def test_probabilities_depend_on_what_is_remembered_and_masks_forget_it() -> None:
    model = make(ACTIONS["Discrete"], "MlpLstmPolicy", lstm_hidden_size=8)
    fresh = model.action_probability(OBSERVATIONS)
    _, state = model.predict(OBSERVATIONS[::-1].copy())
    remembering = model.action_probability(OBSERVATIONS, state)
    mask = np.arange(6) < 3
    masked = model.action_probability(OBSERVATIONS, state, mask)
    assert np.abs(remembering - fresh).max() > 1e-4
    np.testing.assert_allclose(masked[:3], fresh[:3], rtol=1e-5)
    np.testing.assert_allclose(masked[3:], remembering[3:], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("Discrete", np.zeros(6, int)),
        ("Discrete", np.full(6, 2.5)),
        ("Discrete", np.full((6, 2), 2)),
        ("MultiDiscrete", np.full((6, 2), 2)),
        ("MultiBinary", np.full((6, 3), -1)),
        ("Box", np.zeros((6, 3))),
        ("Box", np.zeros((5, 2))),
    ],
)
def test_actions_of_another_space_or_number_are_an_error(name: str, actions: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"^actions must be .*, got "):
        make(ACTIONS[name]).action_probability(OBSERVATIONS, actions=actions)


@every_action
def test_axes_of_length_1_do_not_matter_and_one_action_stands_for_all(space: spaces.Space[Any]) -> None:
    model = make(space)
    actions, _ = model.predict(OBSERVATIONS)
    found = model.action_probability(OBSERVATIONS, actions=actions, logp=True)
    column = model.action_probability(OBSERVATIONS, actions=np.asarray(actions).reshape(6, -1, 1), logp=True)
    np.testing.assert_array_equal(column, found)
    one = model.action_probability(OBSERVATIONS, actions=actions[2], logp=True)
    of_all = model.action_probability(OBSERVATIONS, actions=np.stack([actions[2]] * 6), logp=True)
    np.testing.assert_array_equal(one, of_all)


def test_a_list_of_parameters_is_loaded_in_the_order_of_the_list_of_parameters() -> None:
    model, other = make(ACTIONS["Box"]), make(ACTIONS["Box"], log_std_init=-3.0)
    arrays = [parameter.detach().numpy().copy() for parameter in model.get_parameter_list()]
    other.load_parameters(arrays)
    for policy in (other.policy, other.average_policy):
        for parameter, array in zip(policy.parameters(), arrays, strict=True):
            np.testing.assert_array_equal(parameter.detach(), array)
    with pytest.raises(ValueError, match=r"must be \d+ arrays, as get_parameter_list returns, got \d+"):
        other.load_parameters(arrays[1:])


def test_parameters_are_loaded_from_a_file_a_dict_of_dicts_and_a_dict_of_arrays() -> None:
    model = make(ACTIONS["Box"])
    model.save("saved")
    arrays = {name: value.numpy().copy() for name, value in model.policy.state_dict().items()}
    for given in ("saved", model.get_parameters(), arrays):
        other = make(ACTIONS["Box"], log_std_init=-3.0)
        other.load_parameters(given)
        for policy in (other.policy, other.average_policy):
            for name, value in policy.state_dict().items():
                np.testing.assert_array_equal(value.numpy(), arrays[name])


def test_without_an_exact_match_the_other_parameters_stay() -> None:
    model = make(ACTIONS["Discrete"])
    with th.no_grad():
        model.average_policy.pi_head.weight.add_(1)
    policies = (model.policy, model.average_policy)
    before = [{name: value.clone() for name, value in policy.state_dict().items()} for policy in policies]
    bias = np.arange(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"missing \['pi_head.weight"):
        model.load_parameters({"pi_head.bias": bias, "nothing": bias})
    model.load_parameters({"pi_head.bias": bias}, exact_match=False)
    for policy, values in zip(policies, before, strict=True):
        for name, value in policy.state_dict().items():
            np.testing.assert_array_equal(value, bias if name == "pi_head.bias" else values[name])
    with pytest.raises(ValueError, match=r"pi_head.bias in load_path_or_dict must be of shape \(4,\), got \(5,\)"):
        model.load_parameters({"pi_head.bias": np.zeros(5)}, exact_match=False)


def test_the_parameter_list_is_what_the_optimiser_learns() -> None:
    model = make(ACTIONS["Discrete"])
    named = dict(model.policy.named_parameters())
    assert [id(each) for each in model.get_parameter_list()] == [id(each) for each in named.values()]
    model.learn(40)
    before = [each.detach().clone() for each in model.get_parameter_list()]
    model.learn(40)
    assert all((each != old).any() for each, old in zip(model.get_parameter_list(), before, strict=True))
    fixed = make(ACTIONS["Box"], learn_log_std=False)
    assert all(each is not fixed.policy.log_std for each in fixed.get_parameter_list())


def test_a_model_can_be_set_up_later() -> None:
    model = ACER("MlpPolicy", "CartPole-v1", _init_setup_model=False, n_steps=5)
    assert not hasattr(model, "average_policy")
    model.setup_model()
    model.learn(20)
    assert model.num_timesteps == 20


@pytest.mark.parametrize(("n_channels", "n_stack"), [(1, 1), (1, 4), (3, 1), (3, 2), (4, 1)])
def test_full_tensorboard_log_shows_the_newest_image(n_channels: int, n_stack: int) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    env: VecEnv = DummyVecEnv([lambda: FakeImageEnv(screen_height=40, screen_width=36, n_channels=n_channels)])
    env = VecFrameStack(env, n_stack) if n_stack > 1 else env
    model = ACER("CnnPolicy", env, n_steps=5, replay_ratio=0, full_tensorboard_log=True, tensorboard_log="log", seed=0)
    model.learn(10, log_interval=1, tb_log_name="run")
    events = event_accumulator.EventAccumulator("log/run_1").Reload()
    images = events.Images("images/observations")
    assert [image.step for image in images] == [5, 10]
    assert (images[0].height, images[0].width) == (40, 36)
    shown = np.asarray(Image.open(BytesIO(images[1].encoded_image_string)).convert("RGB"))
    stacked = model.replay_buffer.latest().observations
    assert isinstance(stacked, th.Tensor)
    newest = stacked[0, 0, -n_channels:].numpy()
    expected = np.moveaxis(newest if n_channels == 3 else newest[-1:].repeat(3, 0), 0, -1)
    np.testing.assert_array_equal(shown, expected)
    assert "histograms/observations" not in events.Tags()["histograms"]


class Listen(BaseCallback):
    """Keeps the local variables that stable-baselines' callbacks find."""

    NAMES = ("self", "obs", "actions", "rewards", "dones", "mus", "states", "masks", "steps", "samples_number")

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.heard.append({name: deepcopy(self.locals[name]) for name in self.NAMES if name != "self"})
        assert self.locals["self"] is self.model
        assert self.locals["env"] is self.training_env
        assert self.locals["callback"] is self
        return len(self.heard) < 33


def test_callbacks_find_the_names_of_stable_baselines() -> None:
    env = DummyVecEnv([lambda: Recorder(ACTIONS["Discrete"])] * 2)
    model, listen = ACER("MlpLstmPolicy", env, n_steps=5, replay_start=10, seed=0), Listen()
    model.learn(100, callback=listen)
    batch = model.replay_buffer.latest()
    rollout = listen.heard[25:30]
    for name, stored in (("mus", batch.behaviour), ("rewards", batch.rewards), ("obs", batch.observations[1:])):  # type: ignore[index]
        heard = np.stack([step[name] for step in rollout])
        mask = np.stack([~step["dones"] for step in rollout]) if name == "obs" else np.ones((5, 2), bool)
        np.testing.assert_allclose(heard[mask], stored.numpy()[mask], rtol=1e-6)
    np.testing.assert_array_equal(np.stack([step["actions"] for step in rollout]) - 2, batch.actions[..., 0])
    for before, after in itertools.pairwise(listen.heard):
        np.testing.assert_array_equal(after["masks"], before["dones"])
    assert listen.heard[0]["masks"].all()
    assert [step["steps"] for step in listen.heard] == [10 * (i // 5) for i in range(33)]
    assert {step["samples_number"] for step in listen.heard[:10]} == {0}
    assert sum(step["samples_number"] for step in listen.heard[10::5]) == model._n_updates - 6
    assert not listen.heard[24]["dones"].any()
    assert listen.heard[24]["states"].any()
    np.testing.assert_array_equal(listen.heard[24]["states"], batch.states)  # before the rollout's first step


def test_a_list_of_parameters_leaves_frozen_ones_as_they_are() -> None:
    one, other = (
        ACER("MlpPolicy", "Pendulum-v1", device="cpu", policy_kwargs={"learn_log_std": False, "log_std_init": initial})
        for initial in (0, -3)
    )
    arrays = [parameter.detach().numpy().copy() for parameter in one.get_parameter_list()]
    other.load_parameters(arrays)
    assert other.policy.log_std is not None
    assert other.policy.log_std.item() == -3
    np.testing.assert_array_equal(other.get_parameter_list()[0].detach(), arrays[0])


@pytest.mark.parametrize("resets", [True, False])
def test_a_second_call_of_learn_begins_new_episodes_unless_steps_count_on_and_keeps_the_buffer(resets: bool) -> None:
    env: IdentityEnv[int] = IdentityEnv(2, ep_length=1000)
    model = ACER("MlpPolicy", DummyVecEnv([lambda: env]), n_steps=10, lr_schedule="constant").learn(20)
    model.learn(20, reset_num_timesteps=resets)
    assert env.num_resets == 1 + resets
    assert model.replay_buffer.size() == 40


class OtherPolicy(MlpPolicy):
    """Another class than the saved one."""


def test_custom_objects_have_the_names_of_attributes(tmp_path: Path) -> None:
    ACER("MlpPolicy", "CartPole-v1", device="cpu").save(tmp_path / "agent")
    custom_objects = {"policy_class": OtherPolicy, "lr_schedule_name": "constant"}
    model = ACER.load(tmp_path / "agent", custom_objects=custom_objects)
    assert isinstance(model.policy, OtherPolicy)
    assert model.lr_schedule(0.5) == model.lr_schedule(1.0)
    old_names = {"policy": OtherPolicy, "lr_schedule": "constant"}
    assert not isinstance(ACER.load(tmp_path / "agent", custom_objects=old_names).policy, OtherPolicy)


def test_each_part_of_a_dict_of_observations_has_a_histogram() -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    space = spaces.Dict(
        a=spaces.Box(-1, 1, (2,)), b=spaces.Box(0, 255, (40, 36, 1), np.uint8), c=spaces.Box(3, 4, (1,))
    )
    env = DummyVecEnv([lambda: Shows(space)])
    model = ACER("MultiInputPolicy", env, n_steps=5, full_tensorboard_log=True, tensorboard_log="log", device="cpu")
    tags = event_accumulator.EventAccumulator("log/run_1")
    model.learn(10, log_interval=1, tb_log_name="run")
    found = tags.Reload().Tags()
    assert {"histograms/observations/a", "histograms/observations/c"} <= set(found["histograms"])
    assert found["images"] == ["images/observations/b"]


def test_some_of_the_parts_of_an_agent_are_loaded_if_they_need_not_be_all() -> None:
    model, other = make(ACTIONS["Discrete"]), make(ACTIONS["Discrete"])
    with th.no_grad():
        model.policy.pi_head.bias.add_(1)
    before = other.average_policy.pi_head.bias.clone()
    given = {"policy": model.policy.state_dict()}
    with pytest.raises(ValueError, match="average_policy"):
        other.load_parameters(given)
    other.load_parameters(given, exact_match=False)
    assert other.policy.pi_head.bias.equal(model.policy.pi_head.bias)
    assert other.average_policy.pi_head.bias.equal(before)


def test_where_a_call_of_learn_begins_new_episodes_callbacks_are_told_so() -> None:
    model, listen = ACER("MlpPolicy", DummyVecEnv([Recorder] * 2), n_steps=5, device="cpu"), Listen()
    model.learn(6, callback=lambda found, _: found["self"].num_timesteps < 6)
    model.learn(10, callback=listen)
    assert listen.heard[0]["masks"].all()
    assert not listen.heard[1]["masks"].any()
