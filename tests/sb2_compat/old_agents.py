"""stable-baselines' networks in NumPy, and files of agents in its formats, without stable-baselines."""

import base64
import io
import json
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.lib.stride_tricks import sliding_window_view
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecTransposeImage

from sb3_acer import ACER
from sb3_acer.sb2_compat.migration import load_stable_baselines


def relu(x: Any) -> Any:
    return np.maximum(x, 0)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Graph:
    """The network of a policy. As in TensorFlow, a variable is created when it is first used."""

    def __init__(
        self,
        policy: str,
        n_actions: int,
        net_arch: list[Any] | None = None,
        layers: list[int] | None = None,
        act_fun: Callable[[Any], Any] = np.tanh,
        n_lstm: int = 8,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.n_actions = n_actions
        self.net_arch = net_arch
        self.layers = [64, 64] if layers is None else layers
        self.act_fun = act_fun
        self.n_lstm = n_lstm
        self.rng = np.random.default_rng(seed)
        self.variables: dict[str, np.ndarray] = {}

    def variable(self, name: str, *shape: int) -> Any:
        name = f"model/{name}:0"
        if name not in self.variables:
            scale = 1 / np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 and shape[0] > 1 else 0.3
            self.variables[name] = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return self.variables[name].astype(np.float64)

    def linear(self, x: Any, scope: str, width: int) -> Any:
        return x @ self.variable(f"{scope}/w", x.shape[-1], width) + self.variable(f"{scope}/b", width)

    def dense(self, x: Any, scope: str, width: int) -> Any:
        return self.act_fun(self.linear(x, scope, width))

    def conv(self, x: Any, scope: str, filters: int, size: int, stride: int) -> Any:
        weight = self.variable(f"{scope}/w", size, size, x.shape[-1], filters)
        windows = sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]  # [N, H, W, C, size, size]
        return np.einsum("nhwcij,ijcf->nhwf", windows, weight) + self.variable(f"{scope}/b", 1, filters, 1, 1).ravel()

    def nature_cnn(self, x: Any) -> Any:
        x = relu(self.conv(x, "c1", 32, 8, 4))
        x = relu(self.conv(x, "c2", 64, 4, 2))
        x = relu(self.conv(x, "c3", 64, 3, 1))
        return relu(self.linear(x.reshape(len(x), -1), "fc1", 512))

    def layer_norm(self, x: Any, kind: str) -> Any:
        normalized = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return normalized * self.variable(f"lstm1/g{kind}", x.shape[-1]) + self.variable(f"lstm1/b{kind}", x.shape[-1])

    def lstm(self, x: Any, state: Any) -> tuple[Any, Any]:
        n, norms = self.n_lstm, "Ln" in self.policy
        weight_x = self.variable("lstm1/wx", x.shape[-1], 4 * n)
        weight_h = self.variable("lstm1/wh", n, 4 * n)
        bias = self.variable("lstm1/b", 4 * n)
        cell, hidden = np.split(state, 2, -1)
        from_x, from_h = x @ weight_x, hidden @ weight_h
        if norms:
            from_x, from_h = self.layer_norm(from_x, "x"), self.layer_norm(from_h, "h")
        i, f, o, u = np.split(from_x + from_h + bias, 4, -1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(u)
        hidden = sigmoid(o) * np.tanh(self.layer_norm(cell, "c") if norms else cell)
        return hidden, np.concatenate((cell, hidden), -1)

    def split(self, x: Any, last: dict[str, list[int]]) -> tuple[Any, Any]:
        pi = vf = x
        pi_arch, vf_arch = last.get("pi", []), last.get("vf", [])
        if "Lstm" in self.policy:
            for i, width in enumerate(pi_arch):
                pi = self.dense(pi, f"pi_fc{i}", width)
            for i, width in enumerate(vf_arch):
                vf = self.dense(vf, f"vf_fc{i}", width)
            return pi, vf
        for i in range(max(len(pi_arch), len(vf_arch))):
            if i < len(pi_arch):
                pi = self.dense(pi, f"pi_fc{i}", pi_arch[i])
            if i < len(vf_arch):
                vf = self.dense(vf, f"vf_fc{i}", vf_arch[i])
        return pi, vf

    def latents(self, x: Any, state: Any) -> tuple[Any, Any, Any]:
        is_recurrent = "Lstm" in self.policy
        if "Cnn" in self.policy:
            x = self.nature_cnn(x)
        else:
            x = x.reshape(len(x), -1)
            if self.net_arch is not None:
                for i, layer in enumerate(self.net_arch):
                    if isinstance(layer, dict):
                        return *self.split(x, layer), state
                    if layer == "lstm":
                        x, state = self.lstm(x, state)
                    else:
                        x = self.dense(x, f"shared_fc{i}", layer)
                return x, x, state
            if not is_recurrent:
                return *self.split(x, {"pi": self.layers, "vf": self.layers}), state
            for i, width in enumerate(self.layers):
                x = self.dense(x, f"pi_fc{i}", width)
        if is_recurrent:
            x, state = self.lstm(x, state)
        return x, x, state

    def __call__(self, x: Any, state: Any | None = None) -> tuple[Any, Any, Any]:
        """
        :param x: preprocessed observations
        :param state: cell and hidden state
        :return: probabilities, Q values, and the next state
        """
        state = np.zeros((len(x), 2 * self.n_lstm)) if state is None else state
        pi, vf, state = self.latents(x, state)
        self.linear(vf, "vf", 1)
        logits = self.linear(pi, "pi", self.n_actions)
        q = self.linear(vf, "q", self.n_actions)
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        return exps / exps.sum(-1, keepdims=True), q, state


def preprocess(observations: Any, space: spaces.Space[Any], policy: str) -> Any:
    """Observations as stable-baselines gives them to a network."""
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n))[observations]
    if isinstance(space, spaces.MultiDiscrete):
        return np.concatenate(
            [np.eye(int(n))[column] for n, column in zip(space.nvec, observations.T, strict=True)], -1
        )
    return observations / 255 if "Cnn" in policy else observations.astype(np.float64)


# --- files ---


def name_of(module: str, name: str, /, **attributes: Any) -> Any:
    """A class that is pickled under the name of a package that need not be installed."""
    return type(name, (), {"__module__": module, **attributes})


BOX, DISCRETE, MULTI_DISCRETE, MULTI_BINARY = (
    name_of(f"gym.spaces.{module}", name)
    for module, name in (
        ("box", "Box"),
        ("discrete", "Discrete"),
        ("multi_discrete", "MultiDiscrete"),
        ("multi_binary", "MultiBinary"),
    )
)
RUNNING_MEAN_STD = name_of("stable_baselines.common.running_mean_std", "RunningMeanStd")
VEC_NORMALIZE = name_of("stable_baselines.common.vec_env.vec_normalize", "VecNormalize")


def policy_class(name: str) -> Any:
    return name_of("stable_baselines.common.policies", name)


def make(cls: Any, **state: Any) -> Any:
    made = cls()
    made.__dict__.update(state)
    return made


def old_space(space: spaces.Space[Any]) -> Any:
    state = {"shape": space.shape, "dtype": space.dtype, "np_random": np.random.RandomState(0)}
    if isinstance(space, spaces.Box):
        return make(BOX, low=space.low, high=space.high, **state)
    if isinstance(space, spaces.Discrete):
        return make(DISCRETE, n=int(space.n), **state)
    if isinstance(space, spaces.MultiDiscrete):
        return make(MULTI_DISCRETE, nvec=space.nvec, **state)
    assert isinstance(space, spaces.MultiBinary)
    return make(MULTI_BINARY, n=space.n, **state)


@contextmanager
def importable(*classes: Any) -> Iterator[None]:
    """Make classes importable under their names, which pickling checks."""
    added: list[str] = []
    try:
        for cls in classes:
            parts = cls.__module__.split(".")
            for i in range(len(parts)):
                name = ".".join(parts[: i + 1])
                if name not in sys.modules:
                    sys.modules[name] = ModuleType(name)
                    added.append(name)
            setattr(sys.modules[cls.__module__], cls.__qualname__, cls)
        yield
    finally:
        for name in added:
            del sys.modules[name]


def pickled(value: Any, *classes: Any, protocol: int = 4) -> bytes:
    spaces_ = (BOX, DISCRETE, MULTI_DISCRETE, MULTI_BINARY)
    with importable(*spaces_, RUNNING_MEAN_STD, VEC_NORMALIZE, *classes):
        return pickle.dumps(value, protocol)


def old_data(
    policy: str | Any,
    space: spaces.Space[Any],
    n_actions: int,
    *,
    policy_kwargs: dict[str, Any] | None = None,
    **data: Any,
) -> dict[str, Any]:
    saved = {
        "gamma": 0.98,
        "n_steps": 16,
        "q_coef": 0.4,
        "ent_coef": 0.02,
        "max_grad_norm": 9,
        "learning_rate": 5e-4,
        "lr_schedule": "constant",
        "rprop_alpha": 0.98,
        "rprop_epsilon": 2e-5,
        "replay_ratio": 3,
        "replay_start": 500,
        "verbose": 0,
        "policy": policy_class(policy) if isinstance(policy, str) else policy,
        "observation_space": old_space(space),
        "action_space": old_space(spaces.Discrete(n_actions)),
        "n_envs": 3,
        "n_cpu_tf_sess": 1,
        "seed": 7,
        "_vectorize_action": False,
        **data,
    }
    return saved if policy_kwargs is None else {**saved, "policy_kwargs": policy_kwargs}


def write_pickle(
    path: Path,
    data: dict[str, Any],
    variables: dict[str, np.ndarray],
    *classes: Any,
    named: bool = False,
    protocol: int = 4,
) -> Path:
    parameters = OrderedDict(variables) if named else list(variables.values())
    policies = [data["policy"]] if isinstance(data["policy"], type) else []
    path.write_bytes(pickled((data, parameters), *policies, *classes, protocol=protocol))
    return path


def write_zip(path: Path, data: dict[str, Any], variables: dict[str, np.ndarray], *classes: Any) -> Path:
    entries: dict[str, Any] = {}
    for key, value in data.items():
        try:
            json.dumps(value)
            entries[key] = value
        except TypeError:
            policies = [value] if isinstance(value, type) else []
            content = base64.b64encode(pickled(value, *policies, *classes)).decode()
            entries[key] = {":type:": str(type(value)), ":serialized:": content, "shown": str(value)}
    parameters = io.BytesIO()
    np.savez(parameters, **dict(reversed(variables.items())))  # type: ignore[arg-type]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(entries, indent=4))
        archive.writestr("parameters", parameters.getvalue())
        archive.writestr("parameter_list", json.dumps(list(variables), indent=4))
    return path


# --- for the tests ---

AGENTS = Path(__file__).with_name("agents")
VECTOR = spaces.Box(-np.inf, np.inf, (5,))
IMAGE = spaces.Box(0, 255, (52, 44, 3), np.uint8)
N_ACTIONS = 4
TF_RELU = name_of("tensorflow.python.ops.gen_nn_ops", "relu")


def load(path: Path, *args: Any, **kwargs: Any) -> ACER:
    """Load a file, which must not cause a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_stable_baselines(path, *args, device="cpu", **kwargs)


def built(graph: Graph, space: spaces.Space[Any]) -> Graph:
    """Create all variables of the network."""
    graph(preprocess(np.stack([space.sample()]), space, graph.policy))
    return graph


def assert_same_policy(model: ACER, graph: Graph, space: spaces.Space[Any]) -> None:
    """Compare both networks' parameters, and probabilities and Q values over four steps of six environments."""
    average, policy = model.average_policy.state_dict(), model.policy
    for name, value in policy.state_dict().items():
        assert average[name].equal(value)
    states = th.from_numpy(policy.initial_states(6))
    old_states = None
    for seed in range(4):
        space.seed(seed)
        observations = np.stack([space.sample() for _ in range(6)])
        expected, expected_q, old_states = graph(preprocess(observations, space, graph.policy), old_states)
        if is_image_space(space):
            observations = VecTransposeImage.transpose_image(observations)
        with th.no_grad():
            rows = th.as_tensor(observations)
            stats, after = policy.step(rows, states)
            _, latent, _ = policy._step(*policy._features(rows), states)
            q = policy.q_head.q(policy.q_net(latent))  # type: ignore[operator]
        np.testing.assert_allclose(stats.numpy(), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(q.numpy(), expected_q, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected_q).max()))
        states = after


def write(
    folder: Path, kind: str, graph: Graph, space: spaces.Space[Any], policy_kwargs: dict[str, Any], **data: Any
) -> Path:
    """Write a file in one of stable-baselines' formats."""
    values = (old_data(graph.policy, space, N_ACTIONS, policy_kwargs=policy_kwargs, **data), graph.variables, TF_RELU)
    if kind == "zip":
        return write_zip(folder / "agent.zip", *values)
    return write_pickle(
        folder / "agent.pkl", *values, named=kind == "named", protocol=int(kind) if len(kind) == 1 else 4
    )
