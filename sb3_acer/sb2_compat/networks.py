"""
Networks of stable-baselines' policies, and how to copy their parameters to a policy of this package.

A file contains arrays, either with the names of their layers or in the order in which stable-baselines makes them.
"""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import (
    get_flattened_obs_dim,
    is_image_space,
    is_image_space_channels_first,
)
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor, create_mlp
from torch import nn

from sb3_acer.policies import ACERPolicy
from sb3_acer.sb2_compat.pickles import Record, listed, shown

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
}
"""activation functions by their names in TensorFlow"""

CNN = ("c1", "c2", "c3", "fc1")
"""layers of stable-baselines' nature_cnn"""
LSTM = ("wx", "wh", "b")
"""arrays of an LSTM"""
LAYER_NORM = ("gx", "bx", "gh", "bh", "gc", "bc")
"""additional arrays of a layer-normalised LSTM"""

_LAYER = re.compile(r"c[123]|fc1|(shared|pi|vf)_fc\d+|lstm1|pi|vf|q")
# The name of a custom class often ends in that of its base class.
_POLICY = re.compile(r"(Mlp|Cnn)(Ln)?(Lstm)?Policy$")


class SharedLayers(BaseFeaturesExtractor):
    """
    Fully connected layers that the policy and the critic share.

    :param observation_space: observation space
    :param net_arch: widths of the layers
    :param activation_fn: activation function
    """

    def __init__(
        self, observation_space: spaces.Space[Any], net_arch: list[int], activation_fn: type[nn.Module]
    ) -> None:
        super().__init__(observation_space, net_arch[-1])
        inputs = get_flattened_obs_dim(observation_space)
        self.layers = nn.Sequential(*create_mlp(inputs, -1, net_arch, activation_fn))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.layers(observations.flatten(1))
        return features


class Layer(NamedTuple):
    """A fully connected or convolutional layer, with stable-baselines' order of axes."""

    weight: np.ndarray
    """``[in, out]``, or ``[height, width, in, out]``"""
    bias: np.ndarray
    """``[out]``"""


class Network(NamedTuple):
    """stable-baselines' graph: convolutions -> shared layers -> [LSTM] -> layers of the policy and of Q."""

    convolutions: list[Layer]
    shared: list[Layer]
    lstm: dict[str, np.ndarray]
    """empty, if there is no LSTM"""
    pi: list[Layer]
    """the head last"""
    q: list[Layer]
    """the head last"""


class Design(NamedTuple):
    """What the policy's class and its ``policy_kwargs`` say about the network."""

    is_cnn: bool
    lstm: tuple[str, ...]
    """names of the LSTM's arrays; empty, if there is no LSTM"""
    net_arch: list[Any] | None
    """in stable-baselines' notation; None, if it is not given"""
    activation_fn: type[nn.Module]


def make_design(policy: Any, policy_kwargs: dict[str, Any]) -> Design:
    """
    :param policy: record of the policy's class, or the class's name
    :param policy_kwargs: arguments of the policy, as in stable-baselines
    :return: what they say about the network
    :raises ValueError: if the class or an argument is not stable-baselines' own
    """
    name, activation, extractor = (
        each.name if isinstance(each, Record) else each
        for each in (policy, policy_kwargs.get("act_fun", "tanh"), policy_kwargs.get("cnn_extractor", "nature_cnn"))
    )
    match = _POLICY.search(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            f"policy must be one of stable-baselines' own, got {shown(name)}: name one that has the same network, by "
            "policy='MlpPolicy' and policy_kwargs=dict(net_arch=..., act_fun='tanh'), as in stable-baselines"
        )
    activation_fn = ACTIVATIONS.get(activation.rpartition(".")[2]) if isinstance(activation, str) else None
    if activation_fn is None:
        raise ValueError(f"act_fun must be one of {', '.join(ACTIVATIONS)}, got {shown(activation)}")
    if not (isinstance(extractor, str) and extractor.endswith("nature_cnn")):
        raise ValueError(f"cnn_extractor must be nature_cnn, got {shown(extractor)}")
    net_arch, layers = policy_kwargs.get("net_arch"), policy_kwargs.get("layers")
    lstm = () if match[3] is None else LSTM if match[2] is None else LSTM + LAYER_NORM
    if net_arch is None and layers is not None:
        net_arch = [*layers, "lstm"] if lstm else [{"pi": layers, "vf": layers}]
    return Design(match[1] == "Cnn", lstm, net_arch, activation_fn)


def fit_network(arrays: list[np.ndarray], design: Design, space: spaces.Space[Any], n_actions: int) -> Network:
    """
    Like :func:`make_network`, for arrays without names. If ``design`` does not determine the layers, stable-baselines'
    default is tried first, then every other network.

    :param arrays: in the order in which stable-baselines makes them
    :param design: what is known about the network
    :param space: observation space of the saved agent
    :param n_actions: number of actions
    :return: the network
    :raises ValueError: if no network fits the arrays, or if several other than the default do
    """
    networks, reasons = [], []
    for layers in _candidates(design, (len(arrays) - len(design.lstm)) // 2 - 3):
        parts = {"lstm1": design.lstm}
        names = [f"{layer}/{part}" for layer in (*layers, "vf", "pi", "q") for part in parts.get(layer, ("w", "b"))]
        try:
            if len(names) != len(arrays):
                raise ValueError(f"the file has {len(arrays)} arrays, but its policy {len(names)}")
            networks.append(make_network(dict(zip(names, arrays, strict=True)), space, n_actions))
        except ValueError as reason:
            reasons.append(reason)
        if len(networks) == 1 and not reasons:
            break
    if not networks:
        raise reasons[0]
    if len(networks) > 1:
        raise ValueError("several networks fit the arrays: choose one by policy_kwargs=dict(net_arch=...)")
    return networks[0]


def _candidates(design: Design, n_layers: int) -> Iterator[list[str]]:
    """Possible networks: names of the layers below the heads, in the order in which stable-baselines makes them."""
    is_recurrent = bool(design.lstm)
    if design.is_cnn:
        yield [*CNN, *["lstm1"] * is_recurrent]
    elif design.net_arch is not None:
        yield _layer_names(design.net_arch, is_recurrent)
    elif is_recurrent:
        yield _layer_names([*[0] * n_layers, "lstm"], is_recurrent)
    else:
        half = [0] * (n_layers // 2)
        yield _layer_names([{"pi": half, "vf": half}], is_recurrent)
        for n_shared in range(n_layers + 1 if n_layers < 20 else 0):
            for n_pi in range(n_layers - n_shared + 1):
                apart = {"pi": [0] * n_pi, "vf": [0] * (n_layers - n_shared - n_pi)}
                yield _layer_names([*[0] * n_shared, apart], is_recurrent)


def _layer_names(net_arch: list[Any], is_recurrent: bool) -> list[str]:
    names: list[str] = []
    for place, layer in enumerate(net_arch):
        if isinstance(layer, dict):
            pi, vf = ([f"{key}_fc{i}" for i in range(len(layer.get(key, ())))] for key in ("pi", "vf"))
            return names + (pi + vf if is_recurrent else [name for name in chain(*zip_longest(pi, vf)) if name])
        names.append("lstm1" if layer == "lstm" else f"shared_fc{place}")
    return names


def make_network(arrays: dict[str, np.ndarray], space: spaces.Space[Any], n_actions: int) -> Network:
    """
    :param arrays: arrays by name (``LAYER/KIND``), in the order in which stable-baselines makes them
    :param space: observation space of the saved agent
    :param n_actions: number of actions
    :return: the network; its first fully connected layer expects images with channels first, as SB3 gives them
    :raises ValueError: if the arrays do not make a network for these observations and actions
    """
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition("/")
        layers.setdefault(layer, {})[part] = array.astype(np.float32, copy=False)
        if not np.isfinite(layers[layer][part]).all():
            raise ValueError(f"{shown(name)} must be finite")
    names = list(layers)
    if not all(map(_LAYER.fullmatch, names)) or not {"pi", "q"} <= set(names):
        raise ValueError(
            f"layers must be those of stable-baselines' policies, pi and q among them, got {listed(names)}"
        )
    is_cnn, is_recurrent = "c1" in names, "lstm1" in names
    lstm = names.index("lstm1") if is_recurrent else 0
    # In stable-baselines' older recurrent policies, the layers before the LSTM are named pi_fc.
    before = names[:lstm] if is_recurrent else [name for name in names if "shared" in name]
    both = [name for name in names[lstm:] if "shared" in name] if is_recurrent else []

    def take(names: Iterable[str]) -> list[Layer]:
        return [Layer(layers[name]["w"], layers[name]["b"].reshape(-1)) for name in names]

    network = Network(
        take(CNN[:3] if is_cnn else ()),
        take(CNN[3:] if is_cnn else before),
        layers.get("lstm1", {}),
        take([*both, *(name for name in names[lstm:] if "pi_fc" in name), "pi"]),
        take([*both, *(name for name in names[lstm:] if "vf_fc" in name), "q"]),
    )
    shape = _convolved_shape(network.convolutions, space) if is_cnn else space.shape or ()
    _check_shapes(network, math.prod(shape) if is_cnn else get_flattened_obs_dim(space), n_actions)
    return _channels_first(network, shape) if is_transposed(space) else network


def is_transposed(space: spaces.Space[Any]) -> bool:
    """Whether SB3 transposes these observations, so that a policy gets them with channels first."""
    return is_image_space(space) and not is_image_space_channels_first(space)  # type: ignore[arg-type]


def _convolved_shape(convolutions: list[Layer], space: spaces.Space[Any]) -> tuple[int, ...]:
    if not is_transposed(space):
        raise ValueError(f"a CnnPolicy must observe images (uint8 from 0 to 255, channels last), got {space}")
    *size, channels = space.shape or ()
    for layer, (width, stride, filters) in zip(convolutions, ((8, 4, 32), (4, 2, 64), (3, 1, 64)), strict=True):
        _require_shape(layer.weight, width, width, channels, filters)
        _require_shape(layer.bias, filters)
        size, channels = [(length - width) // stride + 1 for length in size], filters
    return *size, channels


def _check_shapes(network: Network, width: int, n_actions: int) -> None:
    """Check that the layers fit together. This also bounds the network's size by the file's."""
    width = _run(network.shared, width)
    if network.lstm:
        if set(network.lstm) not in (set(LSTM), set(LSTM + LAYER_NORM)):
            raise ValueError(f"an LSTM's arrays must be {LSTM} or {LSTM + LAYER_NORM}, got {listed(network.lstm)}")
        n_hidden = len(network.lstm["wh"])
        rows = {"wx": (width,), "wh": (n_hidden,)}
        for name, array in network.lstm.items():
            _require_shape(array, *rows.get(name, ()), n_hidden if name in ("gc", "bc") else 4 * n_hidden)
        width = n_hidden
    for layers in (network.pi, network.q):
        n_outputs = _run(layers, width)
        if n_outputs != n_actions:
            raise ValueError(f"the network has {n_outputs} outputs for {n_actions} actions")


def _run(layers: list[Layer], width: int) -> int:
    for layer in layers:
        _require_shape(layer.weight, width, layer.bias.size)
        width = layer.bias.size
    return width


def _require_shape(array: np.ndarray, *shape: int) -> None:
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, found {array.shape}")


def _channels_first(network: Network, shape: tuple[int, ...]) -> Network:
    """Permute the input of the layers that take flattened images, from channels last to channels first."""
    rows = np.arange(math.prod(shape)).reshape(shape).transpose(2, 0, 1).ravel()
    if network.lstm and not network.shared:
        network.lstm["wx"] = network.lstm["wx"][rows]
        return network
    for layers in (network.shared,) if network.shared else (network.pi, network.q):
        layers[0] = Layer(layers[0].weight[rows], layers[0].bias)
    return network


def make_policy_kwargs(network: Network, activation_fn: type[nn.Module]) -> tuple[str, dict[str, Any]]:
    """
    :param network: the network
    :param activation_fn: its activation function
    :return: name and arguments of a policy with the same network
    """
    is_layer_normalized = "gx" in network.lstm
    name = f"{'Cnn' if network.convolutions else 'Mlp'}{'Ln' * is_layer_normalized}{'Lstm' * bool(network.lstm)}Policy"
    kwargs: dict[str, Any] = {
        "net_arch": {"pi": _widths(network.pi)[:-1], "qf": _widths(network.q)[:-1]},
        "activation_fn": activation_fn,
    }
    if network.convolutions:
        kwargs["features_extractor_kwargs"] = {"features_dim": network.shared[0].bias.size}
        kwargs["use_bfloat16"] = False  # for the same probabilities as before
    else:
        kwargs["normalize_images"] = False
        kwargs["features_extractor_class"] = SharedLayers if network.shared else FlattenExtractor  # of images, too
    if network.shared and not network.convolutions:
        kwargs["features_extractor_kwargs"] = {"net_arch": _widths(network.shared), "activation_fn": activation_fn}
    if network.lstm:
        kwargs.update(lstm_hidden_size=len(network.lstm["wh"]), shared_lstm=True, enable_critic_lstm=False)
    return name, kwargs


def _widths(layers: list[Layer]) -> list[int]:
    return [layer.bias.size for layer in layers]


def set_parameters(policy: ACERPolicy, network: Network) -> None:
    """
    :param policy: policy with the arguments of :func:`make_policy_kwargs`
    :param network: parameters to copy to it
    """
    old = [*network.convolutions, *network.shared, *network.pi, *network.q]
    modules = [
        module
        for part in (policy.features_extractor, policy.pi_net, policy.pi_head, policy.q_net, policy.q_head)
        for module in part.modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    ]
    for module, layer in zip(modules, old, strict=True):
        _load(module, {"weight": np.moveaxis(layer.weight, (-1, -2), (0, 1)), "bias": layer.bias})
    if network.lstm:
        _load(policy.pi_recurrent, dict(_lstm_state(network.lstm)))


def _load(module: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    module.load_state_dict({name: th.from_numpy(array.copy()) for name, array in arrays.items()})


def _lstm_state(lstm: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    def gates(array: np.ndarray) -> np.ndarray:
        """Reorder the gates from stable-baselines' i, f, o, g to PyTorch's i, f, g, o."""
        i, f, o, g = np.split(array, 4, -1)
        return np.concatenate((i, f, g, o), -1).T

    if "gx" in lstm:
        yield "layers.0.input.weight", gates(lstm["wx"])
        yield "layers.0.hidden.weight", gates(lstm["wh"])
        yield "layers.0.input_norm.weight", gates(lstm["gx"])
        yield "layers.0.input_norm.bias", gates(lstm["bx"] + lstm["b"])
        yield "layers.0.hidden_norm.weight", gates(lstm["gh"])
        yield "layers.0.hidden_norm.bias", gates(lstm["bh"])
        yield "layers.0.cell_norm.weight", lstm["gc"]
        yield "layers.0.cell_norm.bias", lstm["bc"]
    else:
        yield "lstm.weight_ih_l0", gates(lstm["wx"])
        yield "lstm.weight_hh_l0", gates(lstm["wh"])
        yield "lstm.bias_ih_l0", gates(lstm["b"])
        yield "lstm.bias_hh_l0", np.zeros_like(lstm["b"])
