"""Policies of this package compute the same as stable-baselines' networks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

from sb3_acer import ACER
from sb3_acer.sb2_compat import networks
from sb3_acer.sb2_compat.migration import MigrationError, load_stable_baselines
from tests.sb2_compat.old_agents import (
    IMAGE,
    N_ACTIONS,
    TF_RELU,
    VECTOR,
    Graph,
    assert_same_policy,
    built,
    load,
    old_data,
    relu,
    write,
    write_pickle,
)

NET_ARCHS: list[dict[str, Any]] = [
    {},
    {"layers": [8]},
    {"layers": [16, 8, 4]},
    {"net_arch": [{"pi": [8, 6], "vf": [7]}]},
    {"net_arch": [{"vf": [7, 5, 3]}]},
    {"net_arch": [{}]},
    {"net_arch": [9, 8]},
    {"net_arch": [9, {"pi": [8], "vf": [7, 6]}]},
    {"net_arch": []},
]


@pytest.mark.parametrize("kind", ["0", "2", "4", "5", "named", "zip"])
@pytest.mark.parametrize("policy_kwargs", NET_ARCHS, ids=str)
def test_an_mlp_policy_equals_the_old_graph(tmp_path: Path, policy_kwargs: dict[str, Any], kind: str) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS, **policy_kwargs), VECTOR)
    model = load(write(tmp_path, kind, graph, VECTOR, policy_kwargs))
    assert_same_policy(model, graph, VECTOR)


@pytest.mark.parametrize("kind", ["4", "zip"])
def test_an_activation_function_is_found_by_its_name(tmp_path: Path, kind: str) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS, act_fun=relu), VECTOR)
    assert_same_policy(load(write(tmp_path, kind, graph, VECTOR, {"act_fun": TF_RELU})), graph, VECTOR)


@pytest.mark.parametrize("kind", ["0", "4", "zip"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5),
        spaces.MultiDiscrete([2, 3, 4]),
        spaces.MultiBinary(6),
        spaces.Box(-1, 1, (2, 3)),
        spaces.Box(-1, 1, (3,), np.float64),
        spaces.Box(0, 255, (6, 5, 3), np.uint8),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy_kwargs", [{}, {"net_arch": [{}]}, {"net_arch": [7, {"vf": [4]}]}], ids=str)
def test_observations_of_every_kind_mean_what_they_meant(
    tmp_path: Path, space: spaces.Space[Any], policy_kwargs: dict[str, Any], kind: str
) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS, **policy_kwargs), space)
    assert_same_policy(load(write(tmp_path, kind, graph, space, policy_kwargs)), graph, space)


@pytest.mark.parametrize("kind", ["2", "4", "named", "zip"])
@pytest.mark.parametrize("policy", ["CnnPolicy", "CnnLstmPolicy", "CnnLnLstmPolicy"])
def test_a_cnn_policy_equals_the_old_graph(tmp_path: Path, policy: str, kind: str) -> None:
    graph = built(Graph(policy, N_ACTIONS), IMAGE)
    assert_same_policy(load(write(tmp_path, kind, graph, IMAGE, {"n_lstm": 8})), graph, IMAGE)


@pytest.mark.parametrize("kind", ["2", "4", "named", "zip"])
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpLnLstmPolicy"])
@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {},
        {"layers": [9]},
        {"layers": []},
        {"net_arch": ["lstm"]},
        {"net_arch": [9, "lstm", {"pi": [6, 5], "vf": [4]}]},
        {"net_arch": [9, 8, "lstm", 7, {"vf": [4]}]},
    ],
    ids=str,
)
def test_a_recurrent_policy_equals_the_old_graph(
    tmp_path: Path, policy: str, policy_kwargs: dict[str, Any], kind: str
) -> None:
    graph = built(Graph(policy, N_ACTIONS, **policy_kwargs), VECTOR)
    assert_same_policy(load(write(tmp_path, kind, graph, VECTOR, policy_kwargs)), graph, VECTOR)


def test_a_recurrent_policy_sees_images_without_layers_before_it(tmp_path: Path) -> None:
    space = spaces.Box(0, 255, (6, 5, 3), np.uint8)
    graph = built(Graph("MlpLstmPolicy", N_ACTIONS, layers=[]), space)
    assert_same_policy(load(write(tmp_path, "4", graph, space, {"layers": []})), graph, space)


@pytest.mark.parametrize(
    "net_arch", [[{"pi": [8], "vf": [8]}], [9, 7, {"vf": [6]}], [{"pi": [8, 3]}], [64, 32]], ids=str
)
def test_shapes_tell_what_a_pickle_without_policy_kwargs_does_not_say(tmp_path: Path, net_arch: list[Any]) -> None:
    graph = built(Graph("MlpPolicy", N_ACTIONS, net_arch), VECTOR)
    path = write_pickle(tmp_path / "agent.pkl", old_data("MlpPolicy", VECTOR, N_ACTIONS), graph.variables)
    assert_same_policy(load(path), graph, VECTOR)


def test_shapes_that_fit_several_networks_are_not_guessed_at(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (8,))
    graph = built(Graph("MlpPolicy", N_ACTIONS, [8, 8, 8]), space)
    path = write_pickle(tmp_path / "agent.pkl", old_data("MlpPolicy", space, N_ACTIONS), graph.variables)
    with pytest.raises(MigrationError, match="several networks fit the arrays"):
        load_stable_baselines(path)
    assert_same_policy(load(path, policy_kwargs={"net_arch": [8, 8, 8]}), graph, space)


@pytest.mark.parametrize(
    ("policy", "net_arch"), [("MlpPolicy", [9, {"pi": [8]}]), ("MlpLnLstmPolicy", [9, "lstm", {"vf": [4]}])]
)
def test_a_migrated_agent_is_saved_and_loaded_as_any_other(tmp_path: Path, policy: str, net_arch: list[Any]) -> None:
    graph = built(Graph(policy, N_ACTIONS, net_arch), VECTOR)
    load(write(tmp_path, "zip", graph, VECTOR, {"net_arch": net_arch})).save(tmp_path / "new.zip")
    model = ACER.load(tmp_path / "new.zip", device="cpu")
    assert_same_policy(model, graph, VECTOR)
    assert isinstance(model.policy.optimizer, RMSpropTFLike)  # also of an LSTM


def test_activation_functions_are_those_of_tensorflow() -> None:
    x = np.array([-7.0, -0.5, 0.0, 0.5, 7.0])
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    expected = {
        "elu": np.where(x > 0, x, np.expm1(x)),
        "relu": np.maximum(x, 0),
        "relu6": np.clip(x, 0, 6),
        "selu": scale * np.where(x > 0, x, alpha * np.expm1(x)),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "softplus": np.log1p(np.exp(x)),
        "softsign": x / (1 + np.abs(x)),
        "tanh": np.tanh(x),
    }
    assert networks.ACTIVATIONS.keys() == expected.keys()
    for name, activation_fn in networks.ACTIVATIONS.items():
        np.testing.assert_allclose(activation_fn()(th.from_numpy(x)), expected[name], rtol=1e-9, err_msg=name)


def test_a_file_of_many_arrays_is_not_fitted_to_every_network() -> None:
    design = networks.make_design("MlpPolicy", {})
    assert len(list(networks._candidates(design, 200))) == 1
