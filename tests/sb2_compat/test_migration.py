"""Agents of stable-baselines act as before."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer import ACER
from sb3_acer.sb2_compat.migration import MigrationError, load_obs_rms, load_stable_baselines, main
from sb3_acer.sb2_compat.pickles import PickleReader
from tests.sb2_compat.old_agents import (
    AGENTS,
    IMAGE,
    N_ACTIONS,
    RUNNING_MEAN_STD,
    VEC_NORMALIZE,
    VECTOR,
    Graph,
    assert_same_policy,
    built,
    load,
    make,
    name_of,
    old_data,
    pickled,
    relu,
    write,
    write_pickle,
)

# --- the old zoo's agents ---


def score(env_id: str, n_episodes: int, seed: int = 0) -> float:
    obs_rms = AGENTS / env_id / "obs_rms.pkl"
    env = make_vec_env(env_id, n_envs=10, seed=seed)
    model = load(AGENTS / env_id, env, obs_rms=obs_rms if obs_rms.exists() else None, seed=seed, verbose=0)
    mean, _ = evaluate_policy(model, model.get_env(), n_episodes, deterministic=False)  # type: ignore[arg-type]
    return float(np.mean(mean))


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "least"), [("CartPole-v1", 490), ("Acrobot-v1", -100)])
def test_an_agent_of_the_old_zoo_scores_what_was_published(env_id: str, least: float) -> None:
    assert score(env_id, 100) >= least


@pytest.mark.parametrize(("env_id", "least"), [("CartPole-v1", 450), ("Acrobot-v1", -115)])
def test_an_agent_of_the_old_zoo_is_as_good_as_it_was(env_id: str, least: float) -> None:
    assert score(env_id, 20) >= least


def test_training_goes_on_without_collapse() -> None:
    env = make_vec_env("CartPole-v1", n_envs=8, seed=3)
    model = load(AGENTS / "CartPole-v1.pkl", env, seed=3, verbose=0, replay_start=200)
    model.learn(8_000)
    assert model._n_updates > 100
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", n_envs=8, seed=5), 16, deterministic=False)
    assert np.mean(mean) >= 450


# --- arguments ---


@pytest.mark.parametrize("kind", ["4", "zip"])
def test_arguments_are_those_that_were_saved(tmp_path: Path, kind: str) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    saved: dict[str, Any] = {
        "gamma": np.float64(0.9),
        "max_grad_norm": None,
        "buffer_size": 900,
        "delta": 2,
        "n_envs": 6,
    }
    model = load(write(tmp_path, kind, graph, VECTOR, {}, **saved), alpha=0.9)
    expected = {**saved, "n_steps": 16, "q_coef": 0.4, "ent_coef": 0.02, "learning_rate": 5e-4, "rprop_alpha": 0.98}
    expected |= {"rprop_epsilon": 2e-5, "replay_ratio": 3, "replay_start": 500, "seed": 7, "alpha": 0.9}
    assert {name: getattr(model, name) for name in expected} == expected
    assert model.lr_schedule_name == "constant"
    assert model.correction_term == 10


def test_a_function_for_a_number_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    schedule = name_of("train", "my_schedule")
    data = old_data("MlpPolicy", VECTOR, N_ACTIONS, learning_rate=schedule)
    path = write_pickle(tmp_path / "agent.pkl", data, graph.variables, schedule)
    with pytest.warns(UserWarning, match=r"agent.pkl: left out train.my_schedule, learning_rate \(Record\)"):
        model = load_stable_baselines(path)
    assert model.learning_rate == 7e-4


def test_what_no_argument_can_be_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    path = write(tmp_path, "4", graph, VECTOR, {}, gamma=math.nan, lr_schedule="linear" * 100)
    with pytest.warns(UserWarning, match=r"agent.pkl: left out gamma \(float\), lr_schedule \(str\)"):
        model = load_stable_baselines(path)
    assert (model.gamma, model.lr_schedule_name) == (0.99, "linear")


@pytest.mark.parametrize("n_envs", [0, -3, 2**20, "many", None])
def test_a_number_of_environments_that_cannot_have_been_is_one(n_envs: Any, tmp_path: Path) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    assert load(write(tmp_path, "4", graph, VECTOR, {}, n_envs=n_envs)).n_envs == 1


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.5), ("n_steps", 0), ("lr_schedule", "cosine")])
def test_an_argument_that_acer_refuses_is_an_error_of_the_file(tmp_path: Path, name: str, value: Any) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    with pytest.raises(MigrationError, match=r"agent.pkl cannot be migrated: .*" + re.escape(str(value))):
        load_stable_baselines(write(tmp_path, "4", graph, VECTOR, {}, **{name: value}))


def test_what_is_no_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path must be the path of a file, got 3"):
        load_stable_baselines(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="obs_rms must be the path of a file, got 3"):
        load_stable_baselines(tmp_path / "agent.pkl", obs_rms=3)  # type: ignore[arg-type]


def test_a_policy_of_ones_own_needs_words(tmp_path: Path) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS, [8, {"pi": [7]}], act_fun=relu), VECTOR)
    own = name_of("train", "MyPolicy")
    path = write_pickle(tmp_path / "agent.pkl", old_data(own, VECTOR, N_ACTIONS), graph.variables)
    with pytest.raises(MigrationError, match=r"policy must be one of stable-baselines' own, got train.MyPolicy"):
        load_stable_baselines(path)
    kwargs = {"net_arch": [8, {"pi": [7]}], "act_fun": "relu", "optimizer_class": th.optim.Adam}
    with pytest.warns(UserWarning, match=r"left out train.MyPolicy"):
        model = load_stable_baselines(path, policy="MlpPolicy", policy_kwargs=kwargs, device="cpu")
    assert_same_policy(model, graph, VECTOR)
    assert isinstance(model.policy.optimizer, th.optim.Adam)


@pytest.mark.parametrize(
    ("policy_kwargs", "message"),
    [
        ({"act_fun": name_of("train", "gelu")}, "act_fun must be one of elu, .*, got train.gelu"),
        ({"cnn_extractor": name_of("train", "my_cnn")}, "cnn_extractor must be nature_cnn, got train.my_cnn"),
        ({"net_arch": [7]}, "the file has 14 arrays, but its policy 8"),
        ({"net_arch": [64, 64, 64, 64]}, r"expected an array of shape \(64, 64\), found \(5, 64\)"),
    ],
)
def test_what_has_no_counterpart_is_refused(tmp_path: Path, policy_kwargs: dict[str, Any], message: str) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    classes = [value for value in policy_kwargs.values() if isinstance(value, type)]
    data = old_data("MlpPolicy", VECTOR, N_ACTIONS, policy_kwargs=policy_kwargs)
    with pytest.raises(MigrationError, match=message):
        load_stable_baselines(write_pickle(tmp_path / "agent.pkl", data, graph.variables, *classes))


# --- environments ---


def test_a_suffix_can_be_left_out_and_a_missing_file_is_no_migration_error(tmp_path: Path) -> None:
    assert load(AGENTS / "CartPole-v1").n_envs == 8
    with pytest.raises(FileNotFoundError):
        load_stable_baselines(tmp_path / "none")


def test_bounds_of_an_environment_may_have_changed() -> None:
    saved = load(AGENTS / "CartPole-v1", verbose=0)
    assert saved.observation_space == gym.make("CartPole-v1").observation_space  # in the file: largest float
    env = gym.wrappers.TransformObservation(
        gym.make("CartPole-v1"), lambda observation: observation, spaces.Box(-9, 9, (4,))
    )
    assert load(AGENTS / "CartPole-v1", env, verbose=0).observation_space == spaces.Box(-9, 9, (4,))


def test_an_environment_of_other_spaces_is_refused() -> None:
    with pytest.raises(
        MigrationError, match=r"CartPole-v1.pkl .*env must have the spaces Box.* and Discrete\(2\), got"
    ):
        load(AGENTS / "CartPole-v1", "Acrobot-v1", verbose=0)


def test_an_environment_of_other_actions_is_refused() -> None:
    env = gym.Env[Any, Any]()
    env.observation_space, env.action_space = gym.make("CartPole-v1").observation_space, spaces.Discrete(3)
    with pytest.raises(MigrationError, match=r"env must have the spaces Box.* and Discrete\(2\), got Box.*Discrete"):
        load(AGENTS / "CartPole-v1", env, verbose=0)


def test_images_are_transposed_as_stable_baselines3_does(tmp_path: Path) -> None:
    graph = built(Graph("CnnPolicy", N_ACTIONS), IMAGE)
    path = write(tmp_path, "4", graph, IMAGE, {})
    env = gym.Env[Any, Any]()
    env.observation_space, env.action_space = IMAGE, spaces.Discrete(N_ACTIONS)
    model = load(path, env)
    assert load(path).observation_space == model.observation_space == spaces.Box(0, 255, (3, 52, 44), np.uint8)
    assert_same_policy(model, graph, IMAGE)


def test_observations_are_normalized_as_they_were(tmp_path: Path) -> None:
    path = AGENTS / "Acrobot-v1" / "obs_rms.pkl"
    state = PickleReader().read(path.read_bytes()).state
    model = load(AGENTS / "Acrobot-v1", make_vec_env("Acrobot-v1", 2), obs_rms=path, verbose=0)
    normalize = model.get_vec_normalize_env()
    assert isinstance(normalize, VecNormalize)
    mean, var = (np.frombuffer(state[name].state[4]) for name in ("mean", "var"))
    observations = np.linspace(-30, 30, 6 * 8, dtype=np.float32).reshape(8, 6)
    expected = np.clip((observations - mean) / np.sqrt(var + 1e-8), -10, 10)
    np.testing.assert_allclose(np.asarray(normalize.normalize_obs(observations)), expected, rtol=1e-6)
    model.learn(100)
    np.testing.assert_array_equal(vars(normalize.obs_rms)["mean"], mean)
    np.testing.assert_array_equal(normalize.normalize_reward(np.array([-3.0])), [-3])
    alone = load(AGENTS / "Acrobot-v1", obs_rms=path, verbose=0).get_vec_normalize_env()
    assert alone is not None
    np.testing.assert_array_equal(alone.normalize_obs(observations), normalize.normalize_obs(observations))
    with pytest.raises(ValueError, match="obs_rms must be None for an env that is normalised already"):
        load_obs_rms(path, normalize)
    with pytest.raises(MigrationError, match=r"obs_rms.pkl .*statistics have the shapes \(6,\)"):
        load_obs_rms(path, make_vec_env("CartPole-v1"))


def test_a_whole_vec_normalize_brings_its_clip_and_epsilon(tmp_path: Path) -> None:
    rms = make(RUNNING_MEAN_STD, mean=np.ones(4), var=np.full(4, 3.0), count=9.0)
    path = tmp_path / "vecnormalize.pkl"
    path.write_bytes(pickled(make(VEC_NORMALIZE, obs_rms=rms, ret_rms=rms, clip_obs=0.5, epsilon=1.0)))
    normalize = load_obs_rms(path, make_vec_env("CartPole-v1"))
    assert vars(normalize.obs_rms)["count"] == 9  # new observations count as much as each of these
    for raw, expected in ((1.5, 0.25), (9.0, 0.5)):
        np.testing.assert_allclose(np.asarray(normalize.normalize_obs(np.full((1, 4), raw))), expected)


@pytest.mark.parametrize(
    ("statistics", "settings"),
    [
        ({"mean": np.full(4, np.nan)}, {}),
        ({"var": np.full(4, np.inf)}, {}),
        ({"var": -np.ones(4)}, {}),
        ({"count": 0.0}, {}),
        ({}, {"clip_obs": 0.0}),
        ({}, {"epsilon": -1.0}),
    ],
)
def test_statistics_that_cannot_have_been_are_refused(
    statistics: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    rms = make(RUNNING_MEAN_STD, **{"mean": np.ones(4), "var": np.ones(4), "count": 9.0, **statistics})
    path = tmp_path / "vecnormalize.pkl"
    path.write_bytes(pickled(make(VEC_NORMALIZE, obs_rms=rms, ret_rms=rms, **settings)))
    with pytest.raises(MigrationError, match="means and variances must be finite, variances at least 0, other"):
        load_obs_rms(path, make_vec_env("CartPole-v1"))


def test_a_vec_normalize_that_scaled_rewards_alone_leaves_observations_as_they_are(tmp_path: Path) -> None:
    rms = make(RUNNING_MEAN_STD, mean=np.zeros(4), var=np.ones(4), count=1e-4)
    path = tmp_path / "vecnormalize.pkl"
    path.write_bytes(pickled(make(VEC_NORMALIZE, obs_rms=rms, ret_rms=rms, clip_obs=10.0, norm_obs=False)))
    normalize = load_obs_rms(path, make_vec_env("CartPole-v1"))
    assert np.asarray(normalize.normalize_obs(np.full((1, 4), 50.0))).tolist() == [[50.0] * 4]


# --- the command line ---


def test_the_command_converts_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, obs_rms = tmp_path / "new.zip", AGENTS / "Acrobot-v1" / "obs_rms.pkl"
    main([str(AGENTS / "Acrobot-v1.pkl"), str(new), "--obs-rms", str(obs_rms)])
    said = capsys.readouterr().out
    assert said.startswith(f"MlpPolicy with 9606 parameters: {new}\n")  # and not with what the agent says
    assert f"ACER.load({str(new)!r})" in said
    venv = make_vec_env("Acrobot-v1", 2, seed=0)
    env = VecNormalize.load(str(tmp_path / "new" / "vecnormalize.pkl"), venv)
    model = ACER.load(new, env)
    mean, _ = evaluate_policy(model, env, 10, deterministic=False)
    assert np.mean(mean) > -120


def test_the_command_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS), VECTOR)
    old = write(tmp_path, "4", graph, VECTOR, {}, gamma="high")
    main([str(old), str(tmp_path / "new")])
    assert f"Note: {old}: left out gamma (str)\n" in capsys.readouterr().out


def test_the_command_takes_an_environments_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(AGENTS / "CartPole-v1.pkl"), str(tmp_path / "folder" / "new"), "--env", "CartPole-v1"])
    printed = capsys.readouterr().out
    assert "VecNormalize" not in printed
    assert "Note" not in printed
    ACER.load(tmp_path / "folder" / "new", gym.make("CartPole-v1"))


def test_the_command_does_not_write_over_the_old_agent(tmp_path: Path) -> None:
    old = Path(shutil.copy(AGENTS / "CartPole-v1.pkl", tmp_path / "agent.pkl"))
    with pytest.raises(SystemExit):
        main([str(old), str(tmp_path / ".." / tmp_path.name / "agent.pkl")])
    assert old.read_bytes() == (AGENTS / "CartPole-v1.pkl").read_bytes()
    old = old.rename(tmp_path / "agent.zip")  # stable-baselines' own suffix may be left out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "agent"), str(tmp_path / "agent")])
    with pytest.raises(SystemExit):
        main([str(tmp_path / "agent"), "."])
    assert old.read_bytes() == (AGENTS / "CartPole-v1.pkl").read_bytes()


@pytest.mark.parametrize("arguments", [["none.pkl", "new.zip"], [__file__, "new.zip"]])
def test_the_command_ends_with_one_line_where_there_is_no_agent(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert isinstance(exit_.value.code, str)
    assert re.fullmatch(r"sb3-acer migrate: .*(none.pkl|test_migration.py).*", exit_.value.code)
    assert not list(tmp_path.iterdir())
