"""ACER in rl-zoo: registration, the tuner's samples, and the entries of hyperparameters."""

import warnings
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import optuna
import pytest
import rl_zoo3.enjoy
import rl_zoo3.exp_manager
import rl_zoo3.hyperparams_opt
import rl_zoo3.train
import rl_zoo3.utils
import torch as th
import yaml
from optuna.trial import FixedTrial
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import SimpleLinearSchedule
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

from sb3_acer import ACER
from sb3_acer.hyperparams import ENTRIES_FILE, old_zoo
from sb3_acer.recurrent import LSTM
from sb3_acer.zoo import registration
from sb3_acer.zoo.experiment import Experiment, TrialRun
from sb3_acer.zoo.mistakes import SUITES
from sb3_acer.zoo.registration import convert_acer_params, entry_of, nearest_trial, sample_acer_params, setting_of
from tests.zoo.conftest import HYPERPARAMS

# Environments for the entries that are not named after one.
STAND_INS = MappingProxyType(
    {"default": "FrozenLake-v1", "default_continuous": "BipedalWalkerHardcore-v3", "atari": "ALE/Pong-v5"}
)

# What the text of policy_kwargs may name.
NAMES = MappingProxyType({"nn": th.nn, "th": th, "RMSpropTFLike": RMSpropTFLike})


def new_study(seed: int, policy: str = "MlpPolicy") -> optuna.Study:
    """A study as the zoo creates it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study.set_user_attr("policy", policy)
    return study


def test_registering_changes_the_dicts_that_every_module_of_the_zoo_reads() -> None:
    registration.register()
    for module in (rl_zoo3.utils, rl_zoo3.train, rl_zoo3.enjoy, rl_zoo3.exp_manager):
        assert module.__dict__["ALGOS"]["acer"] is ACER
    for module in (rl_zoo3.hyperparams_opt, rl_zoo3.exp_manager):
        assert module.__dict__["HYPERPARAMS_SAMPLER"]["acer"] is sample_acer_params
        assert module.__dict__["HYPERPARAMS_CONVERTER"]["acer"] is convert_acer_params


POLICIES = ("MlpPolicy", "MlpLstmPolicy")


SPACES = MappingProxyType({"CartPole-v1": 0, "Pendulum-v1": 1})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_actions", SPACES.values())
def test_converting_a_trials_params_gives_what_the_sampler_gave(policy: str, n_actions: int) -> None:
    study = new_study(0, policy)
    for _ in range(40):
        asked = study.ask()
        sampled = sample_acer_params(asked, n_actions, 1, {})
        assert convert_acer_params(asked.params) == sampled
        study.enqueue_trial(asked.params)
        assert sample_acer_params(study.ask(), n_actions, 1, {}) == sampled


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fixed_setting_is_not_drawn_and_the_others_are(policy: str) -> None:
    asked = new_study(0, policy).ask()
    settings = sample_acer_params(asked, 1, 1, {}).keys()
    assert settings == {setting_of(name) for name in asked.params}
    for name in settings:
        asked, fixed = new_study(0, policy).ask(), {name: 20}
        drawn = sample_acer_params(cast(optuna.Trial, TrialRun(asked, True, fixed, {})), 1, 1, {})
        assert drawn == convert_acer_params(asked.params)
        assert drawn.keys() | fixed.keys() == settings
        assert drawn.get(name, 20) == 20  # n_steps is noted where burn_in is a share of it
        assert (
            name == "burn_in"
            or policy == "MlpPolicy"
            or drawn["burn_in"] in {int(share * (drawn | fixed)["n_steps"]) for share in (0, 0.25, 0.5)}
        )


def test_a_fixed_trial_is_sampled_as_it_is() -> None:
    asked = new_study(0).ask()
    sampled = sample_acer_params(asked, 0, 1, {})
    assert sample_acer_params(FixedTrial(asked.params), 0, 1, {}) == sampled


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("env_id", SPACES)
def test_every_draw_is_an_acer_that_replays(policy: str, env_id: str) -> None:
    study = new_study(1, policy)
    for _ in range(5):
        sampled = sample_acer_params(study.ask(), SPACES[env_id], 1, {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # ACER warns if replay can never start
            model = ACER(policy, env_id, **sampled)
        for name in sampled.keys() - {"lr_schedule", "policy_kwargs"}:
            assert getattr(model, name) == sampled[name]
        assert model.policy_kwargs == sampled["policy_kwargs"]
        assert isinstance(model.policy.optimizer, sampled["policy_kwargs"]["optimizer_class"])


def test_what_learns_fast_is_drawn_often() -> None:
    study = new_study(2)
    draws = [sample_acer_params(study.ask(), 0, 1, {}) for _ in range(300)]
    assert np.mean([4 <= draw["replay_ratio"] <= 16 for draw in draws]) > 0.4
    for name, middle in (("batch_size", 11), ("n_steps", 22)):  # half of the draws are below the geometric mean
        assert np.mean([draw[name] <= middle for draw in draws]) == pytest.approx(0.5, abs=0.1)
    rates = np.log10([draw["learning_rate"] for draw in draws])
    np.testing.assert_allclose(np.histogram(rates, 2, (-4, np.log10(2e-2)))[0] / 300, 0.5, atol=0.1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_actions", SPACES.values())
def test_the_trial_nearest_to_what_a_trial_drew_is_that_trial(policy: str, n_actions: int) -> None:
    study = new_study(3, policy)
    for _ in range(40):
        asked = study.ask()
        drawn = sample_acer_params(asked, n_actions, 1, {})
        params = nearest_trial(drawn, n_envs=4)
        assert params["n_envs_pow"] == 2
        assert {name: params[name] for name in asked.params} == pytest.approx(asked.params)


def test_the_trial_nearest_to_the_defaults_is_within_the_ranges_and_leaves_out_what_they_do_not_have() -> None:
    assert nearest_trial({"replay_start": 0, "buffer_size": 1, "n_steps": 1, "batch_size": 1}, n_envs=1)
    params = nearest_trial({}, n_envs=4)
    assert (params["n_steps"], params["batch_size"], params["buffer_size_pow"]) == (20, 4, 12)  # 5000 is near 2^12
    assert (params["net_arch"], params["activation_fn"], params["optimizer"]) == ("small", "tanh", "rmsprop")
    for recurrent in ({"policy": "MlpLstmPolicy"}, {"policy_kwargs": {"recurrent_class": LSTM}}):
        assert nearest_trial(recurrent, n_envs=4)["optimizer"] == "adam"
    assert nearest_trial({"ent_coef": 0.0, "replay_ratio": 100}, 1) == params | {
        "ent_coef": 1e-5,
        "replay_ratio": 32,
        "n_envs_pow": 0,
        "batch_size": 4,
    }
    falling = {"learning_rate": SimpleLinearSchedule(2e-3), "lr_schedule": "constant"}
    assert nearest_trial(falling, 4) == params | {"learning_rate": 2e-3, "lr_schedule": "linear"}
    others = {"learning_rate": lambda progress: 1e-3 * progress, "ent_schedule": "middle_drop"}
    assert params.keys() - nearest_trial(others, 4).keys() == {"learning_rate", "ent_schedule"}


@pytest.mark.parametrize(
    ("layers", "nearest"),
    [
        ([], "small"),
        ([32, 32], "small"),
        ([128, 128], "small"),
        ([400], "medium"),
        ({"pi": [64, 64], "qf": [400, 300]}, "medium"),
        ({"pi": [256, 256], "vf": [256, 256]}, "medium"),
    ],
)
def test_the_first_trial_has_the_networks_with_the_nearest_number_of_units(layers: Any, nearest: str) -> None:
    assert nearest_trial({"policy_kwargs": {"net_arch": layers}}, n_envs=4)["net_arch"] == nearest


def rounded(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        key: pytest.approx(value, 1e-3, 1e-4) if isinstance(value, float) else value for key, value in settings.items()
    }


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_an_entry_has_the_settings_of_its_trial(policy: str) -> None:
    for seed in range(5):
        asked = new_study(seed, policy).ask()
        drawn = sample_acer_params(asked, 2, 4, {})
        before = {"policy": policy, "n_timesteps": 1e5, "normalize": True, "gamma": 0.5, "n_envs": 4}
        entry = yaml.safe_load(entry_of("Mine-v0", before, asked.params, {}))["Mine-v0"]
        networks = eval(entry.pop("policy_kwargs"), dict(NAMES))
        assert networks == rounded(drawn.pop("policy_kwargs"))
        assert entry == before | rounded(drawn)


def test_a_trial_has_the_options_of_the_entrys_policy_that_are_not_drawn() -> None:
    for seed in range(5):
        asked = new_study(seed, "MlpPolicy").ask()
        networks = sample_acer_params(asked, 2, 4, {})["policy_kwargs"]
        kept = {"dueling": True, "ortho_init": False}
        for optimizer_class in (networks["optimizer_class"], th.optim.SGD):
            given = {**kept, "net_arch": [8], "optimizer_class": optimizer_class, "optimizer_kwargs": {"eps": 0.5}}
            is_same = optimizer_class is networks["optimizer_class"]
            expected = {**kept, **networks, **({"optimizer_kwargs": {"eps": 0.5}} if is_same else {})}
            trial = cast(optuna.Trial, TrialRun(cast(optuna.Trial, FixedTrial(asked.params)), True, {}, given))
            assert sample_acer_params(trial, 2, 4, {})["policy_kwargs"] == expected
            entry = yaml.safe_load(entry_of("Mine-v0", {}, asked.params, given))["Mine-v0"]
            assert eval(entry["policy_kwargs"], dict(NAMES)) == rounded(expected)


def test_memory_and_noise_are_drawn_where_there_is_any() -> None:
    memory = {"lstm_hidden_size_pow", "critic_lstm", "burn_in_share"}
    noise = {"log_std_init", "n_action_samples"}
    for policy, is_recurrent in (("MlpPolicy", False), ("CnnLnLstmPolicy", True), ("MlpGruPolicy", True)):
        for n_actions in (0, 2):
            asked = new_study(0, policy).ask()
            sample_acer_params(asked, n_actions, 1, {})
            expected = (memory if is_recurrent else set()) | (noise if n_actions else set())
            assert asked.params.keys() & (memory | noise) == expected


@pytest.mark.parametrize(
    ("learning_rate", "lr_schedule", "at_start", "half_way"),
    [("lin_6e-4", "constant", 6e-4, 3e-4), (6e-4, "linear", 6e-4, 3e-4), (6e-4, "constant", 6e-4, 6e-4)],
)
def test_a_learning_rate_is_scheduled_as_an_entry_says(
    learning_rate: Any, lr_schedule: str, at_start: float, half_way: float, shell: Path
) -> None:
    registration.register()
    hyperparams = {"learning_rate": learning_rate, "lr_schedule": lr_schedule}
    options: dict[str, Any] = {"eval_freq": -1, "hyperparams": hyperparams, "verbose": 0}
    prepared = ExperimentManager(
        Namespace(), "acer", "CartPole-v1", "logs", config=str(ENTRIES_FILE), **options
    ).setup_experiment()
    assert prepared is not None
    schedule = prepared[0].lr_schedule
    assert (schedule(1), schedule(0.5)) == pytest.approx((at_start, half_way))


def test_every_entry_has_what_the_zoo_needs() -> None:
    assert {"default", "atari"} <= HYPERPARAMS.keys()
    assert all(entry["n_timesteps"] >= 1 for entry in HYPERPARAMS.values())


# Copies, since the zoo removes keys from the dict of a module.
ENTRIES = [
    pytest.param(config, name, dict(settings), id=f"{config_name}-{name}")
    for config_name, config, entries in (
        ("acer.yml", str(ENTRIES_FILE), HYPERPARAMS),
        ("old_zoo", old_zoo.__name__, old_zoo.hyperparams),
    )
    for name, settings in entries.items()
]


@pytest.mark.parametrize(("config", "entry", "expected"), ENTRIES)
def test_every_entry_makes_an_acer_of_its_settings(
    config: str, entry: str, expected: dict[str, Any], shell: Path
) -> None:
    registration.register()
    for beginning, (module, _) in SUITES.items():
        if entry.startswith(beginning):
            import_module(module)  # as --gym-packages does
    env_id = STAND_INS.get(entry, entry)
    experiment = Experiment(
        Namespace(),
        "acer",
        env_id,
        "logs",
        eval_freq=-1,
        hyperparams={"n_envs": 2},
        verbose=0,
        config=config,
    )
    prepared = experiment.setup_experiment()
    assert prepared is not None
    model, settings = prepared
    assert isinstance(model, ACER)
    assert settings == {**expected, "n_envs": 2}
    for name in settings.keys() & {"n_steps", "replay_ratio", "buffer_size", "ent_coef", "batch_size", "gamma"}:
        assert getattr(model, name) == settings[name]
    assert model.env is not None
    model.env.close()


def test_the_batch_of_the_first_trial_is_one_sequence_of_each_environment() -> None:
    assert nearest_trial({}, n_envs=8)["batch_size"] == 8
