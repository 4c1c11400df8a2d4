"""Odd arguments: each is accepted and works, or an error names the argument, its rule and the value."""

import inspect
import math
import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback

from sb3_acer import ACER, ExpertDataset, SequenceReplayBuffer, generate_expert_traj
from sb3_acer.policies import ACERPolicy

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL: dict[str, Any] = {"n_steps": 5, "buffer_size": 20, "replay_start": 5, "device": "cpu"}

ODD: list[Any] = [
    *(None, True, np.True_, 0, -1, 5, 2.5, 1000.0, -0.5, math.nan, math.inf, -math.inf, 10**30, 1e300, 1j),
    *("", "5", "linear", "relu", b"x", [], [0], [64], [True], ["a"], (), {}, {"a": 1}, {"pi": [0]}, {"pi": 5}),
    *(np.int64(5), np.float64(0.5), np.float32("nan"), np.array(3), np.array([1, 2]), np.array([math.nan] * 4)),
    *(th.tensor(3), th.tensor([1.0, 2.0]), object(), int, BaseCallback, spaces.Discrete(2)),
]
odd = (
    st.sampled_from(ODD)
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(-3, 3) | st.floats() | st.text(max_size=2), max_size=5)
    | st.dictionaries(st.sampled_from(["pi", "qf", "a", 1]), st.integers(-3, 3) | st.floats(), max_size=2)
)


@cache
def agent(policy: str = "MlpPolicy") -> ACER:
    return ACER(policy, "CartPole-v1", seed=0, **SMALL).learn(10)


@cache
def demonstrations() -> dict[str, np.ndarray]:
    return generate_expert_traj(agent(), n_episodes=2)


def is_large(value: Any) -> bool:
    """Whether it is a number that is accepted and only takes long, or much memory."""
    return isinstance(value, (int, float, np.number)) and bool(1000 < value < 2**63) and value == int(value)


def construct(**arguments: Any) -> None:
    if any(is_large(arguments.get(name)) for name in ("n_steps", "batch_size", "n_action_samples")):
        return
    n_threads = th.get_num_threads()
    try:
        ACER(**{"policy": "MlpPolicy", "env": "CartPole-v1", **SMALL, **arguments}).learn(10)
    finally:
        th.set_num_threads(n_threads)


def of_policy(policy: str, env: str) -> Callable[..., None]:
    return lambda **arguments: construct(policy=policy, env=env, policy_kwargs=arguments)


def learn(**arguments: Any) -> None:
    if not is_large(arguments.get("total_timesteps")):
        agent().learn(**{"total_timesteps": 10, **arguments})


def predict(policy: str) -> Callable[..., Any]:
    return lambda **arguments: agent(policy).predict(**{"observation": np.zeros(4), **arguments})


def probability(**arguments: Any) -> None:
    agent("MlpLstmPolicy").action_probability(**{"observation": np.zeros(4), **arguments})


def save(**arguments: Any) -> None:
    agent().save(**{"path": "agent", **arguments})


def load(**arguments: Any) -> None:
    agent().save("agent")
    ACER.load(**{"path": "agent", **arguments})


def save_buffer(**arguments: Any) -> None:
    agent().save_replay_buffer(**arguments)


def load_buffer(**arguments: Any) -> None:
    agent().save_replay_buffer("buffer")
    agent().load_replay_buffer(**{"path": "buffer", **arguments})


def set_env(**arguments: Any) -> None:
    agent().set_env(**{"env": agent().get_env(), **arguments})


def load_parameters(**arguments: Any) -> None:
    agent().load_parameters(**{"load_path_or_dict": agent().get_parameters(), **arguments})


def set_parameters(**arguments: Any) -> None:
    agent().set_parameters(**{"load_path_or_dict": agent().get_parameters(), **arguments})


def load_a_parameter(value: Any) -> None:
    agent().load_parameters({"pi_head.bias": value}, exact_match=False)


def seed(**arguments: Any) -> None:
    agent().set_random_seed(**arguments)


def make_buffer(**arguments: Any) -> None:
    space = spaces.Box(-1, 1, (4, 20, 20), np.float32)
    SequenceReplayBuffer(
        **{"buffer_size": 5, "observation_space": space, "action_space": spaces.Discrete(2), **arguments}
    )


def sample(**arguments: Any) -> None:
    if not is_large(arguments["batch_size"]):
        agent().replay_buffer.sample(**arguments)


def with_envs(**arguments: Any) -> None:
    if not is_large(arguments["n_envs"]):
        agent().replay_buffer.with_envs(**arguments)


def pretrain(**arguments: Any) -> None:
    if not is_large(arguments.get("n_epochs")):
        agent().pretrain(**{"dataset": make_dataset(), "n_epochs": 1, **arguments})


def make_dataset(**arguments: Any) -> ExpertDataset:
    others = {} if "expert_path" in arguments else {"traj_data": demonstrations()}
    return ExpertDataset(**{"verbose": 0, **others, **arguments})


def replay(**arguments: Any) -> None:
    make_dataset().to_replay_buffer(**{"model": agent(), **arguments})


def generate(**arguments: Any) -> None:
    if not any(is_large(arguments.get(name)) for name in ("n_episodes", "n_timesteps")):
        generate_expert_traj(**{"model": agent(), "n_episodes": 1, **arguments})


def names(function: Callable[..., Any], *others: str) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", *others)]


SPACES = ("observation_space", "action_space", "lr_schedule")
SURFACE: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "ACER": (construct, names(ACER.__init__, "_init_setup_model")),
    "a policy": (of_policy("MlpPolicy", "Pendulum-v1"), names(ACERPolicy.__init__, *SPACES)),
    "a recurrent policy": (of_policy("MlpLstmPolicy", "CartPole-v1"), names(ACERPolicy.__init__, *SPACES)),
    "learn": (learn, names(ACER.learn)),
    "predict": (predict("MlpPolicy"), names(ACER.predict)),
    "predict of a recurrent policy": (predict("MlpLstmPolicy"), names(ACER.predict)),
    "action_probability": (probability, names(ACER.action_probability)),
    "save": (save, names(ACER.save)),
    "load": (
        load,
        [*names(ACER.load, "kwargs"), "seed", "n_steps", "verbose", "learning_rate", "lr_schedule"],
    ),
    "save_replay_buffer": (save_buffer, names(ACER.save_replay_buffer)),
    "load_replay_buffer": (load_buffer, names(ACER.load_replay_buffer)),
    "set_env": (set_env, names(ACER.set_env)),
    "set_parameters": (set_parameters, names(ACER.set_parameters)),
    "load_parameters": (load_parameters, names(ACER.load_parameters)),
    "set_random_seed": (seed, names(ACER.set_random_seed)),
    "SequenceReplayBuffer": (make_buffer, names(SequenceReplayBuffer.__init__)),
    "sample": (sample, ["batch_size"]),
    "with_envs": (with_envs, ["n_envs"]),
    "pretrain": (pretrain, names(ACER.pretrain)),
    "ExpertDataset": (make_dataset, names(ExpertDataset.__init__)),
    "to_replay_buffer": (replay, names(ExpertDataset.to_replay_buffer, "model")),
    "generate_expert_traj": (generate, names(generate_expert_traj)),
}
ALL = [(function, name) for function, (_, arguments) in SURFACE.items() for name in arguments]
# A path may also lead nowhere, and a callable may be one that cannot be used so.
ALSO_CALLED = {"mask": "episode_start", "traj_data": "demonstrations"}
PATHS = ("path", "expert_path", "load_path_or_dict", "tensorboard_log", "save_path", "image_folder", "checkpoint")


def is_odd_function(name: str, value: Any) -> bool:
    return name in ("learning_rate", "callback", "model") and callable(value)


def check(function: str, name: str, value: Any) -> None:
    """The argument is accepted, or refused with an error that names it."""
    is_named = True
    try:
        SURFACE[function][0](**{name: value})
    except (ValueError, TypeError) as error:
        called = rf"\b({name}|{ALSO_CALLED.get(name, name)})\b"
        is_named = re.search(called, str(error)) is not None or is_odd_function(name, value)
    except OSError:
        is_named = name in PATHS
    assert is_named, f"{function}({name}={value!r})"
    for made in (agent(), agent("MlpLstmPolicy")):
        assert all(parameter.isfinite().all() for parameter in made.policy.parameters())


@pytest.fixture(autouse=True, scope="module")
def in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("odd"))
        yield


relaxed = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(relaxed, max_examples=120)
@given(st.sampled_from(ALL), odd)
def test_an_odd_argument_works_or_is_named(case: tuple[str, str], value: Any) -> None:
    check(*case, value)


@pytest.mark.slow
@settings(relaxed, max_examples=2000)
@given(st.sampled_from(ALL), odd)
def test_two_thousand_odd_arguments_work_or_are_named(case: tuple[str, str], value: Any) -> None:
    check(*case, value)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("ACER", {"policy": None}, "policy must be one of MlpPolicy, .* or a subclass of ACERPolicy .*, got None"),
        (
            "ACER",
            {"env": "Nowhere-v0"},
            r"the id of a registered one \(by a package that has been imported\), got 'Nowhere-v0'",
        ),
        ("ACER", {"env": gym.make_vec("CartPole-v1", 1)}, r"env must be an environment, .* \(make_vec_env\), got"),
        ("ACER", {"n_steps": True}, "n_steps must be an integer of at least 1, got True"),
        ("ACER", {"n_steps": 10**30}, "n_steps must be an integer of at most 9223372036854775807, got 10"),
        ("ACER", {"trust_region": "no"}, "trust_region must be True or False, got 'no'"),
        ("ACER", {"learning_rate": -1}, r"learning_rate must be a number in \[0, 10\], got -1"),
        ("ACER", {"learning_rate": lambda progress: math.nan}, r"nan"),
        ("ACER", {"q_coef": math.inf}, r"q_coef must be a number in \[0, 1e\+06\], got inf"),
        ("ACER", {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ("ACER", {"verbose": "loud"}, "verbose must be an integer of at least 0, got 'loud'"),
        ("ACER", {"device": "abacus"}, "device must be a device of this machine, got 'abacus'"),
        ("ACER", {"device": "mps"}, "device must be cpu or cuda, since mps has no float64, got 'mps'"),
        ("ACER", {"device": 2**70}, f"device must be a device of this machine, got {2**70}"),
        ("ACER", {"policy_kwargs": {"widths": [3]}}, "policy_kwargs must be arguments of MlpPolicy, got 'widths'"),
        (
            "ACER",
            {"policy_kwargs": {"net_ach": [3]}},
            "policy_kwargs must be arguments .*, such as net_arch, got 'net_",
        ),
        (
            "ACER",
            {"policy_kwargs": {"ortho_int": 0, "net_ach": [3], "log_std_int": 0, "optimizr_class": 0}},
            "such as ortho_init, net_arch, log_std_init, optimizer_class, got",
        ),
        ("ACER", {"policy_kwargs": {"act_fun": 3}}, "got 'act_fun'; stable-baselines' act_fun is now activation_fn"),
        ("ACER", {"policy_kwargs": {"n_lstm": 3}}, "arguments of MlpPolicy, got 'n_lstm'; .* is now lstm_hidden_size"),
        ("ACER", {"replay_buffer_kwargs": {"size": 3}}, "replay_buffer_kwargs must be arguments of Sequ.*, got 'size'"),
        ("ACER", {"stats_window_size": 0}, "stats_window_size must be an integer of at least 1, got 0"),
        ("ACER", {"num_procs": 0}, "num_procs must be an integer of at least 1, got 0"),
        ("a policy", {"net_arch": [0]}, r"net_arch must be a list of widths .*, its other name\), got \[0\]"),
        ("a policy", {"net_arch": [8, "lstm"]}, r"its other name\): 'lstm' is the policy .* here, got \[8, 'lstm'\]"),
        ("a policy", {"net_arch": ["8"]}, r"net_arch must be a list of widths .*, its other name\), got \['8'\]"),
        ("a policy", {"net_arch": [8, {"pi": [4]}]}, r"shared layers are a features extractor here.*, got \[8, {'pi'"),
        ("a policy", {"activation_fn": "relu"}, "activation_fn must be a class of torch modules .*, got 'relu'"),
        ("a policy", {"activation_fn": th.nn.Linear}, "activation_fn must be a class of torch modules .*Linear"),
        (
            "a policy",
            {"optimizer_kwargs": {"eps": -1}},
            r"optimizer_kwargs must fit RMSpropTFLike, got {.*'eps': -1}: Invalid epsilon",
        ),
        ("a policy", {"log_std_init": math.inf}, r"log_std_init must be a number in \[-20, 20\], got inf"),
        ("learn", {"total_timesteps": -5}, "total_timesteps must be an integer of at least 0, got -5"),
        ("learn", {"total_timesteps": math.nan}, "total_timesteps must be an integer of at least 0, got nan"),
        ("learn", {"log_interval": 0}, "log_interval must be an integer of at least 1, got 0"),
        ("learn", {"log_interval": "often"}, "log_interval must be an integer, 'auto', or None, got 'often'"),
        ("learn", {"callback": BaseCallback}, "callback must be a callback of SB3, .*, got <class"),
        ("predict", {"observation": np.array([0, math.nan, 0, 0])}, "observation must be finite in float32, got"),
        ("predict", {"deterministic": "yes"}, "deterministic must be True or False, got 'yes'"),
        ("load", {"gama": 0.9}, "keyword arguments of load must be arguments of .*, such as gamma, got 'gama'"),
        ("load", {"n_steps": 2.5}, "agent could not be loaded: n_steps must be an integer of at least 1, got 2.5"),
        ("set_env", {"env": None}, r"env must be an environment, .*, got None"),
        (
            "set_parameters",
            {"load_path_or_dict": {"nose": {}}},
            "load_path_or_dict must be parameters of pol",
        ),
        ("sample", {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
    ],
)
def test_what_is_refused_is_named_with_its_rule_and_value(
    function: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SURFACE[function][0](**arguments)


def test_numpys_numbers_and_whole_floats_of_steps_are_accepted(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"net_arch": [np.int64(8)], "ortho_init": np.True_, "log_std_init": np.float32(-1)}
    model = ACER(
        "MlpPolicy",
        "Pendulum-v1",
        n_steps=np.int64(5),  # type: ignore[arg-type]
        buffer_size=np.int32(20),  # type: ignore[arg-type]
        gamma=np.float32(0.5),  # type: ignore[arg-type]
        trust_region=np.bool_(True),  # type: ignore[arg-type]
        verbose=False,
        policy_kwargs=kwargs,
        device="cpu",
    )
    assert model.learn(1e1).num_timesteps == 10  # type: ignore[arg-type]
    model.save_replay_buffer(tmp_path / "buffer")
    model.load_replay_buffer(tmp_path / "buffer")
    assert (type(model.n_steps), model.replay_buffer.n_steps) == (int, 5)


@pytest.mark.parametrize("value", [np.array([math.nan, 1]), np.array([1j, 1]), "weights", np.zeros(3)], ids=str)
def test_parameters_that_do_not_fit_change_nothing(value: Any) -> None:
    model = agent()
    before = deepcopy(model.get_parameters())
    with pytest.raises(ValueError, match=r"pi_head.bias in load_path_or_dict must be (finite|an array|of shape)"):
        load_a_parameter(value)
    changed = model.get_parameters()
    changed["policy"] = {**changed["policy"], "pi_head.bias": value}
    with pytest.raises(ValueError, match=r"pi_head.bias in load_path_or_dict\['policy'\] must be"):
        model.set_parameters(changed)
    for part in ("policy", "average_policy"):
        assert all(th.equal(own, before[part][key]) for key, own in model.get_parameters()[part].items())


def test_the_state_of_another_optimiser_changes_nothing() -> None:
    adam = ACER("MlpPolicy", "CartPole-v1", policy_kwargs={"optimizer_class": th.optim.Adam}, **SMALL)
    for model, other, lacking in ((agent(), adam, "alpha"), (adam, agent(), "betas")):
        before = deepcopy(model.get_parameters())
        with pytest.raises(ValueError, match=f"got other parameters: the state of an optimizer without {lacking}"):
            model.set_parameters(other.learn(20).get_parameters())
        assert all(th.equal(own, before["policy"][key]) for key, own in model.get_parameters()["policy"].items())
        model.learn(20)


def test_a_schedule_that_is_bad_at_once_is_refused() -> None:
    message = r"learning_rate at a remaining progress of 1 must be a number in \[0, 10\], got nan"
    with pytest.raises(ValueError, match=message):
        ACER("MlpPolicy", "CartPole-v1", learning_rate=lambda left: math.nan, **SMALL)


def test_a_schedule_that_turns_bad_stops_before_the_update() -> None:
    model = ACER("MlpPolicy", "CartPole-v1", learning_rate=lambda left: 1e-3 if left > 0.5 else math.nan, **SMALL)
    message = r"learning_rate at a remaining progress of 0\.\d+ must be a number in \[0, 10\], got nan"
    with pytest.raises(ValueError, match=message):
        model.learn(100)
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())
