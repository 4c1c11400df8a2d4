"""ACER's policy: features -> recurrent module -> policy head and critic head."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn
from torch.nn import functional as F

from sb3_acer.checks import (
    check_boolean,
    check_choice,
    check_integer,
    check_kwargs,
    check_number,
    check_observation_space,
    check_subclass,
    require,
    warn,
)
from sb3_acer.distributions import make_family
from sb3_acer.heads import DuelingHead, DuelingQHead, QHead
from sb3_acer.mlp import Chain, ForwardPass, add_gradient
from sb3_acer.parameters import FlatParameters
from sb3_acer.prediction import PredictionInterface
from sb3_acer.recurrent import GRU, LSTM, Identity, LayerNormLSTM, Recurrent
from sb3_acer.sequences import SequenceBatch, map_observations


class Evaluation(NamedTuple):
    """Policy and critic on B sequences of T steps: tensors without gradients, and the backward pass."""

    stats: th.Tensor
    """statistics of pi(.|x_t), ``[T, B, P]``"""
    values: th.Tensor
    """V(x_t), ``[T, B]``"""
    next_values: th.Tensor
    """V of each step's true successor, ``[T, B]``"""
    q_values: th.Tensor
    """Q(x_t, a_t), ``[T, B]``"""
    candidates: th.Tensor
    """see :class:`~sb3_acer.heads.CriticOutput`, ``[T, B, K, D]``"""
    weights: th.Tensor
    """weights of the candidates, ``[T, B, K]``"""
    candidate_values: th.Tensor
    """Q(x_t, .) of the candidates, ``[T, B, K]``"""
    backward: Callable[..., None]
    """
    ``backward(stats_gradient, q_gradient, value_gradient=None)`` adds gradients to ``grad`` of the parameters, from
    those with respect to ``stats``, ``q_values``, and ``values`` where the critic has a V of its own. It can be called
    once.
    """


LEAST_IMAGE = 36
"""height and width of the smallest images that fit into the convolutions of SB3's NatureCNN"""


def default_net_arch(features_extractor_class: type[BaseFeaturesExtractor]) -> list[int]:
    """
    :return: widths of the hidden layers behind a features extractor
    """
    return [] if issubclass(features_extractor_class, NatureCNN) else [64, 64]


def default_optimizer(recurrent_class: type[Recurrent]) -> type[th.optim.Optimizer]:
    """
    :return: stable-baselines' RMSProp for feed-forward policies; recurrent ones hardly learn with it: Adam for these
    """
    return RMSpropTFLike if recurrent_class is Identity else th.optim.Adam


def split_net_arch(net_arch: list[int] | Mapping[str, list[int]]) -> tuple[list[int], list[int]]:
    """Widths of the policy network and of the Q network. The key of the latter may also be ``vf``, as in SB3."""
    if isinstance(net_arch, list) and len(net_arch) == 1 and isinstance(net_arch[0], dict):
        warn("net_arch should be a dict instead of a list with one dict: net_arch=dict(pi=..., qf=...)")
        net_arch = net_arch[0]
    if isinstance(net_arch, Mapping):
        unknown = set(net_arch) - {"pi", "qf", "vf"}
        if unknown or {"qf", "vf"} <= set(net_arch):
            raise ValueError(f"net_arch must have the keys pi and qf (or vf, its other name), got {dict(net_arch)!r}")
        return _widths(net_arch.get("pi", [])), _widths(net_arch.get("qf", net_arch.get("vf", [])))
    return _widths(net_arch), _widths(net_arch)


def _widths(given: Any) -> list[int]:
    rule = "a list of widths or a dict of the keys pi and qf (or vf, its other name)"
    require(isinstance(given, (list, tuple)), "net_arch", rule, given)
    if any(isinstance(part, dict) for part in given):
        rule += ": shared layers are a features extractor here"
    if "lstm" in given:
        rule += ": 'lstm' is the policy MlpLstmPolicy here"
    is_width = [isinstance(width, (int, np.integer)) and not isinstance(width, bool) for width in given]
    require(all(is_width) and all(0 < width <= 2**20 for width in given), "net_arch", rule, given)
    return [int(width) for width in given]


class ACERPolicy(PredictionInterface):
    """
    Policy and critic of ACER: two networks behind a shared or a separate features extractor.

    :param observation_space: observation space
    :param action_space: action space
    :param lr_schedule: learning rate as a function of the remaining progress (from 1 to 0)
    :param net_arch: widths of the hidden layers, ``dict(pi=[...], qf=[...])`` or a list for both; a network without a
        key has none, and ``vf`` is another name of ``qf``; None: 64 and 64, or none behind a NatureCNN
    :param activation_fn: class of the activation function, or a function that makes one
    :param ortho_init: whether to initialise orthogonally: gain sqrt(2); 1 for recurrent modules and for the critic's
        outputs of Discrete actions; 0.01 for those of other actions and for the policy's outputs
    :param log_std_init: initial logarithm of the standard deviation of continuous actions, which does not depend on the
        state
    :param learn_log_std: whether it is learnt; the paper fixes it
    :param dueling: whether Q of Discrete actions is made of V and advantages, see
        :class:`~sb3_acer.heads.DuelingQHead`; for other action spaces it always is, as in the paper
    :param features_extractor_class: features extractor; None: the class attribute ``default_features_extractor``
    :param features_extractor_kwargs: its keyword arguments
    :param share_features_extractor: whether policy and critic use one features extractor
    :param recurrent_class: recurrent module between features and hidden layers; None: the class attribute
        ``default_recurrent``, which is :class:`~sb3_acer.recurrent.Identity` for a feed-forward policy
    :param lstm_hidden_size: width of the recurrent module's output
    :param n_lstm_layers: number of its layers
    :param shared_lstm: whether the critic uses the policy's recurrent module, which both then train; needs
        ``enable_critic_lstm=False`` and ``share_features_extractor=True``
    :param enable_critic_lstm: whether the critic has a recurrent module of its own; if it is neither shared nor
        enabled, the critic sees the features alone
    :param lstm_kwargs: further arguments of ``recurrent_class``: ``bias``, ``dropout`` and ``chrono_init`` of
        :class:`~sb3_acer.recurrent.LSTM`
    :param normalize_images: whether to divide images by 255
    :param use_bfloat16: whether NatureCNN computes features of images in bfloat16 (automatic mixed precision);
        ``"auto"``: where the processor has instructions for it
    :param optimizer_class: optimiser; None: see :func:`default_optimizer`
    :param optimizer_kwargs: its keyword arguments, without the learning rate
    :raises ValueError: for a ``net_arch`` of another form, for contradicting options of the recurrent module, and for
        an action space that is not supported
    """

    default_features_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    default_recurrent: ClassVar[type[Recurrent]] = Identity

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: Callable[[], nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        learn_log_std: bool = True,
        dueling: bool = False,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        share_features_extractor: bool = True,
        recurrent_class: type[Recurrent] | None = None,
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        shared_lstm: bool = False,
        enable_critic_lstm: bool = True,
        lstm_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        use_bfloat16: bool | Literal["auto"] = "auto",
        optimizer_class: type[th.optim.Optimizer] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        for name, value in {
            "ortho_init": ortho_init,
            "learn_log_std": learn_log_std,
            "dueling": dueling,
            "share_features_extractor": share_features_extractor,
            "shared_lstm": shared_lstm,
            "enable_critic_lstm": enable_critic_lstm,
            "normalize_images": normalize_images,
        }.items():
            check_boolean(name, value)
        self._check_observations(observation_space, features_extractor_class)
        if features_extractor_class is None:
            features_extractor_class = self.default_features_extractor
        recurrent_class = self.default_recurrent if recurrent_class is None else recurrent_class
        optimizer_class = default_optimizer(recurrent_class) if optimizer_class is None else optimizer_class
        check_subclass("features_extractor_class", features_extractor_class, BaseFeaturesExtractor)
        check_subclass("recurrent_class", recurrent_class, Recurrent)
        check_subclass("optimizer_class", optimizer_class, th.optim.Optimizer)
        _check_activation(activation_fn)
        check_kwargs("features_extractor_kwargs", features_extractor_kwargs, features_extractor_class)
        check_kwargs("lstm_kwargs", lstm_kwargs)
        without_closure = not issubclass(optimizer_class, (th.optim.LBFGS, th.optim.SparseAdam))
        rule = "one whose step needs neither sparse gradients nor a closure"
        require(without_closure, "optimizer_class", rule, optimizer_class)
        check_kwargs("optimizer_kwargs", optimizer_kwargs, optimizer_class, ("params", "lr"))
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )
        if net_arch is None:
            net_arch = default_net_arch(self.features_extractor_class)
        self.net_arch = net_arch
        self.activation_fn: Any = activation_fn  # SB3's create_mlp asks for a class, and only calls it
        self.ortho_init = ortho_init
        self.log_std_init = check_number("log_std_init", log_std_init, -20, 20)
        self.learn_log_std = bool(learn_log_std)
        self.dueling = dueling
        self.share_features_extractor = share_features_extractor
        self.recurrent_class = recurrent_class
        self.recurrent_options: dict[str, Any] = {
            "lstm_hidden_size": check_integer("lstm_hidden_size", lstm_hidden_size, 1, 2**16),
            "n_lstm_layers": check_integer("n_lstm_layers", n_lstm_layers, 1, 2**10),
            "shared_lstm": shared_lstm,
            "enable_critic_lstm": enable_critic_lstm,
            "lstm_kwargs": lstm_kwargs,
        }
        self._check_recurrent_options()
        self.use_bfloat16 = check_choice("use_bfloat16", use_bfloat16, (True, False, "auto"))
        self.family = make_family(action_space, self.learn_log_std)
        self._is_vector = isinstance(observation_space, spaces.Box) and len(observation_space.shape) == 1
        is_nature_cnn = issubclass(self.features_extractor_class, NatureCNN)
        self._uses_nature_cnn = is_nature_cnn and is_image_space(observation_space)
        self._build()
        self._pi_chain = Chain(self, "pi_net", "pi_head")
        self._q_chain = Chain(self, "q_net", f"q_head.{self.q_head.last_layer}")
        self._acting_chain = Chain(self, "features_extractor", "pi_net", "pi_head")
        own = type(self)
        is_plain = own.step is ACERPolicy.step and own.extract_features is ACERPolicy.extract_features
        self._acts_on_arrays = is_plain and self._is_vector and not self.state_size
        self.flat = FlatParameters(self)
        try:
            self.optimizer = self.flat.make_optimizer(self.optimizer_class, lr_schedule(1), self.optimizer_kwargs)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # of torch
            name = self.optimizer_class.__name__
            raise ValueError(f"optimizer_kwargs must fit {name}, got {self.optimizer_kwargs}: {error}") from error

    def _check_observations(self, space: spaces.Space[Any], extractor: type | None) -> None:
        """
        :param space: the observation space
        :param extractor: the features extractor that was given, None for the policy's own
        :raises ValueError: for an observation space that is not supported, or that the extractor is not made for
        """
        check_observation_space(space)
        is_dict, is_image = isinstance(space, spaces.Dict), is_image_space(space)
        own = self.default_features_extractor
        misfits = (FlattenExtractor, NatureCNN) if is_dict else (CombinedExtractor,)
        require(extractor not in misfits, "features_extractor_class", f"one that takes {space}", extractor)
        if extractor is None:
            name = type(self).__name__
            suffix = "Policy" if self.default_recurrent is Identity else "LstmPolicy"
            fitting = f"{'MultiInput' if is_dict else 'Cnn' if is_image else 'Mlp'}{suffix}"
            rule = f"{fitting!r} for {'Dict observations' if is_dict else space}"
            require(own not in misfits, "policy", rule, name)
            fits_cnn = isinstance(space, spaces.Box) and is_image and min(space.shape[-2:]) >= LEAST_IMAGE
            if own is FlattenExtractor and fits_cnn:
                warn(f"{name} takes images for vectors: {fitting} has a network for images")

    def _build(self) -> None:
        """Make the networks and initialise them."""
        self.features_extractor = self.make_features_extractor()
        self.q_features_extractor = (
            self.features_extractor if self.share_features_extractor else self.make_features_extractor()
        )
        # Some features extractors compute the dimension with numpy.
        self.pi_recurrent = self._make_recurrent(int(self.features_extractor.features_dim))
        self.q_recurrent = self.pi_recurrent
        if not self.recurrent_options["shared_lstm"]:
            q_features_dim = int(self.q_features_extractor.features_dim)
            make = self._make_recurrent if self.recurrent_options["enable_critic_lstm"] else Identity
            self.q_recurrent = make(q_features_dim)
        self._shares_state = self.q_recurrent is self.pi_recurrent
        self.state_size = self.pi_recurrent.state_size + (0 if self._shares_state else self.q_recurrent.state_size)
        pi_dim, q_dim = self.pi_recurrent.output_size, self.q_recurrent.output_size
        pi_arch, q_arch = split_net_arch(self.net_arch)
        self.pi_net = nn.Sequential(*create_mlp(pi_dim, -1, pi_arch, self.activation_fn))
        self.q_net = nn.Sequential(*create_mlp(q_dim, -1, q_arch, self.activation_fn))
        self.pi_head = nn.Linear((pi_arch or [pi_dim])[-1], self.family.n_outputs)
        self.log_std = None
        if self.family.n_log_std:
            initial = th.full((self.family.n_log_std,), float(self.log_std_init))
            self.log_std = nn.Parameter(initial, requires_grad=self.learn_log_std)
        head_class = DuelingHead if not self.family.enumerable else DuelingQHead if self.dueling else QHead
        self.q_head: QHead | DuelingHead = head_class(self.family, (q_arch or [q_dim])[-1])
        if self.ortho_init:
            for module in (self.features_extractor, self.q_features_extractor, self.pi_net, self.q_net):
                module.apply(partial(self.init_weights, gain=np.sqrt(2)))
            self.init_weights(self.pi_head, gain=0.01)
            for part in dict.fromkeys((self.pi_recurrent, self.q_recurrent, self.q_head)):
                part.orthogonal_()
        if self._uses_nature_cnn:
            self.to(memory_format=th.channels_last)  # type: ignore[call-overload]

    def parameters_to_vector(self) -> np.ndarray:
        """
        :return: all parameters, one after another; also those that lie in memory with their channels last
        """
        return th.cat([parameter.detach().reshape(-1) for parameter in self.parameters()]).numpy(force=True)

    def _check_recurrent_options(self) -> None:
        options = self.recurrent_options
        defaults = inspect.signature(ACERPolicy).parameters
        given = {name: value for name, value in options.items() if value != defaults[name].default}
        if self.recurrent_class is Identity and given:
            raise ValueError(
                f"recurrent_class must be set for the options of an LSTM, got {given!r} for {type(self).__name__}; "
                "policies such as MlpLstmPolicy set it"
            )
        if options["shared_lstm"]:
            require(not options["enable_critic_lstm"], "enable_critic_lstm", "False where shared_lstm is True", True)
            name = "share_features_extractor"
            require(self.share_features_extractor, name, "True where shared_lstm is True", False)

    def _make_recurrent(self, input_size: int) -> Recurrent:
        recurrent_class: Any = self.recurrent_class
        if recurrent_class is Identity:
            return Identity(input_size)
        options, kwargs = self.recurrent_options, self.recurrent_options["lstm_kwargs"]
        sizes = (input_size, options["lstm_hidden_size"], options["n_lstm_layers"])
        try:
            recurrent: Recurrent = recurrent_class(*sizes, **(kwargs or {}))
        except (TypeError, ValueError) as error:
            rule = f"arguments of {recurrent_class.__name__}"
            raise ValueError(f"lstm_kwargs must be {rule}, got {kwargs!r}: {error}") from error
        require(recurrent.state_size > 0, "recurrent_class", "a class of modules with a state", recurrent_class)
        return recurrent

    @property
    def _dtype(self) -> th.dtype:
        weight = getattr(self.pi_head, "weight", None)  # another head may have been put there
        return weight.dtype if isinstance(weight, th.Tensor) else th.float32

    @th.inference_mode(False)
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ACERPolicy":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if "flat" in self.__dict__:  # not while the policy is built
            self.flat.attach()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "optimizer" in state:  # an average policy has none
            self.flat.connect(self.optimizer)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        values = {**vars(self), **self.recurrent_options, "lr_schedule": self._dummy_schedule}  # not needed to act
        return {name: values[name] for name in inspect.signature(ACERPolicy).parameters}

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> th.Tensor:
        features_extractor = self.features_extractor if features_extractor is None else features_extractor
        if self._uses_nature_cnn and isinstance(obs, th.Tensor):
            return self._image_features(obs, features_extractor)
        if not self._is_vector:  # of a vector it would change the type alone
            obs = preprocess_obs(obs, self.observation_space, normalize_images=self.normalize_images)
        features: th.Tensor = features_extractor(map_observations(lambda part: part.to(self._dtype), obs))
        return features

    def _image_features(self, images: th.Tensor, cnn: BaseFeaturesExtractor) -> th.Tensor:
        fast = _has_bfloat16(images.device.type) if self.use_bfloat16 == "auto" else self.use_bfloat16
        fast = fast and self._dtype is th.float32
        images = images.to(th.bfloat16 if fast else self._dtype).contiguous(memory_format=th.channels_last)
        if self.normalize_images:
            images = images / 255  # not in place: the caller may own the images
        # Without torch's cache of weights in bfloat16: within another autocast, or beside other threads, it is stale.
        with th.autocast(images.device.type, th.bfloat16, enabled=fast, cache_enabled=False):
            features: th.Tensor = cnn(images)
        return features.to(self._dtype)

    def _features(self, observations: PyTorchObs) -> tuple[th.Tensor, th.Tensor]:
        """Features of the policy and of the critic."""
        features = self.extract_features(observations, self.features_extractor)
        if self.share_features_extractor:
            return features, features
        return features, self.extract_features(observations, self.q_features_extractor)

    def _split(self, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """The recurrent states of the policy and those of the critic, in the type of the parameters."""
        pi_states, q_states = states.to(self._dtype).tensor_split((self.pi_recurrent.state_size,), -1)
        return pi_states, q_states

    def _step(
        self, features: th.Tensor, q_features: th.Tensor, states: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        One step of the recurrent modules of policy and critic.

        :param features: of the policy, ``[N, I]``
        :param q_features: of the critic, ``[N, I]``
        :param states: ``[N, W]``
        :return: outputs for the policy and for the critic, and the states after the step
        """
        pi_states, q_states = self._split(states)
        latent, pi_states = self.pi_recurrent.step(features, pi_states)
        if self._shares_state:
            return latent, latent, pi_states
        q_latent, q_states = self.q_recurrent.step(q_features, q_states)
        return latent, q_latent, th.cat((pi_states, q_states), -1)

    def _sequence(
        self, features: th.Tensor, q_features: th.Tensor, states: th.Tensor, ends: th.Tensor, final_steps: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        """Outputs of the recurrent modules of policy and critic, see :meth:`~sb3_acer.recurrent.Recurrent.sequence`."""
        pi_states, q_states = self._split(states)
        latent = self.pi_recurrent.sequence(features, pi_states, ends, final_steps)
        if self._shares_state:
            return latent, latent
        return latent, self.q_recurrent.sequence(q_features, q_states, ends, final_steps)

    def _statistics(self, latent: th.Tensor, masks: th.Tensor | None) -> th.Tensor:
        return self.family.statistics(self._pi_chain(latent), self.log_std, masks)

    def step(
        self, observations: PyTorchObs, states: th.Tensor, masks: th.Tensor | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        if not self.state_size:  # the critic has no state to update
            return self._statistics(self.extract_features(observations, self.features_extractor), masks), states
        latent, _, states = self._step(*self._features(observations), states)
        return self._statistics(latent, masks), states

    def act(
        self, observations: np.ndarray | dict[str, np.ndarray], states: np.ndarray, masks: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        :meth:`step` on arrays, for rollouts. Feed-forward policies of vectors are computed by numpy, in less time.

        :param observations: ``[N, ...]``, a dict of such for a Dict space
        :param states: ``[N, W]``
        :param masks: ``[N, P]``
        :return: statistics of pi(.|x), ``[N, P]``, and the recurrent states after the step, ``[N, W]``
        """
        outputs = None
        if self._acts_on_arrays and isinstance(observations, np.ndarray):
            outputs = self._acting_chain.of_array(observations)
        if outputs is not None:
            log_std = None if self.log_std is None else self.log_std.detach().numpy()
            return self.family.statistics_of_arrays(outputs, log_std, masks), states
        with th.no_grad():  # not inference_mode: a module may keep these tensors for training
            valid = None if masks is None else th.from_numpy(masks).to(self.device)
            tensors = obs_as_tensor(observations, self.device), th.from_numpy(states).to(self.device), valid
            stats, after = self.step(*tensors)
        return stats.cpu().numpy(), after.cpu().numpy()

    def stats_and_values(
        self, observations: PyTorchObs, states: th.Tensor, masks: th.Tensor | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        latent, q_latent, _ = self._step(*self._features(observations), states)
        stats = self._statistics(latent, masks)
        return stats, self.q_head.values(self._q_chain(q_latent), stats).unsqueeze(-1)

    def statistics(self, batch: SequenceBatch) -> th.Tensor:
        """
        :param batch: B sequences of T steps
        :return: statistics of pi(.|x_t), without gradients, ``[T, B, P]``
        """
        ends, masks = batch.ends, batch.masks
        with th.no_grad():
            rows = map_observations(lambda rows: rows[:-1].flatten(0, 1), batch.observations)
            latent = self.extract_features(rows, self.features_extractor)
            no_steps = th.zeros(0, dtype=th.int64, device=ends.device)
            latent = self.pi_recurrent.sequence(latent, self._split(batch.states)[0], ends[:-1], no_steps)
            outputs = ForwardPass(self._pi_chain, latent).output
            stats = self.family.statistics(outputs, self.log_std, None if masks is None else masks[:-1].flatten(0, 1))
        return stats.view(*ends.shape, self.family.n_stats)

    def states_after(self, batch: SequenceBatch, n_steps: int) -> th.Tensor:
        """
        :param batch: B sequences
        :param n_steps: number of their first steps
        :return: this policy's recurrent states after these steps, without gradients, ``[B, W]``
        """
        states, ends, training = batch.states, batch.ends[:n_steps], self.training
        self.set_training_mode(False)  # as in acting: no dropout and no batch statistics in the features extractor
        with th.no_grad():
            rows = map_observations(lambda rows: rows[:n_steps].flatten(0, 1), batch.observations)
            features, q_features = (each.view(*ends.shape, -1) for each in self._features(rows))
            for step, ended in enumerate(ends):
                states = self._step(features[step], q_features[step], states)[2] * ~ended.unsqueeze(-1)
        self.set_training_mode(training)
        return states

    def evaluate(self, batch: SequenceBatch, n_samples: int, rng: np.random.Generator) -> Evaluation:
        """
        Policy and critic on sequences, in one forward pass of all their rows.

        :param batch: B sequences of T steps
        :param n_samples: number of candidates to sample in each state where actions cannot be enumerated (K); as many
            others are drawn for the mean advantage
        :param rng: the source of the samples
        :return: what an update needs of policy and critic, and the backward pass
        """
        (n_steps, n_sequences), final_steps = batch.actions.shape[:2], batch.final_steps
        latent, q_latent = self._features(map_observations(_stack_rows, batch.observations, batch.final_observations))
        latent, q_latent = self._sequence(latent, q_latent, batch.states, batch.ends, final_steps)
        masks, final_masks = batch.masks, batch.final_masks
        valid = None if masks is None or final_masks is None else _stack_rows(masks, final_masks)
        with th.inference_mode():
            passes = ForwardPass(self._pi_chain, latent), ForwardPass(self._q_chain, q_latent)
            stats = self.family.statistics(passes[0].output, self.log_std, valid)
            critic = self.q_head.forward(passes[1].output, stats, batch.actions, n_samples, rng)

            n_rows = n_steps * n_sequences
            next_values = critic.values[n_sequences : n_rows + n_sequences]
            if len(final_steps):
                next_values = next_values.index_copy(0, final_steps, critic.values[n_rows + n_sequences :])
            return Evaluation(
                stats=stats[:n_rows].view(n_steps, n_sequences, -1),
                values=critic.values[:n_rows].view(n_steps, n_sequences),
                next_values=next_values.view(n_steps, n_sequences),
                q_values=critic.q_values,
                candidates=critic.candidates,
                weights=critic.weights,
                candidate_values=critic.candidate_values,
                backward=partial(self._backward, [passes, stats, critic]),
            )

    def _backward(
        self,
        kept: list[Any],
        stats_gradient: th.Tensor,
        q_gradient: th.Tensor,
        value_gradient: th.Tensor | None = None,
    ) -> None:
        """``backward`` of an :class:`Evaluation`, given what :meth:`evaluate` kept for it, which is released."""
        if not kept:
            raise ValueError("backward must be called once for each evaluation, got another call")
        passes, stats, critic = kept
        kept.clear()
        with th.inference_mode():
            step_gradient = stats_gradient.flatten(0, 1)
            n_steps = len(step_gradient)  # the other rows are only bootstrapped from
            output_gradient, log_std_gradient = self.family.backward(stats[:n_steps], step_gradient)
            if self.log_std is not None and log_std_gradient is not None:
                add_gradient(self.log_std, log_std_gradient)
            pi_gradient = F.pad(output_gradient, (0, 0, 0, len(stats) - n_steps))
            gradients = pi_gradient, critic.backward(q_gradient, value_gradient)
            inputs = [each.backward(gradient) for each, gradient in zip(passes, gradients, strict=True)]
        rest = [pair for pair in inputs if pair is not None]  # tensors from which autograd goes on, and their gradients
        if rest:
            th.autograd.backward([tensor for tensor, _ in rest], [gradient for _, gradient in rest])


def _check_activation(activation_fn: Any) -> None:
    try:
        is_module = isinstance(activation_fn(), nn.Module)
    except Exception:  # whatever the function raises
        is_module = False
    rule = "a class of torch modules that needs no arguments, or a function that makes one"
    require(is_module, "activation_fn", rule, activation_fn)


@cache
def _has_bfloat16(device_type: str) -> bool:
    """Whether bfloat16 is faster there than float32 and not merely emulated."""
    if device_type == "cuda":
        return bool(th.cuda.is_bf16_supported(including_emulation=False))
    return device_type == "cpu" and bool(th.cpu._is_avx512_bf16_supported() or th.cpu._is_amx_tile_supported())


def _stack_rows(rows: th.Tensor, finals: th.Tensor) -> th.Tensor:
    """``[T + 1, B, ...]`` and ``[F, ...]`` as ``[(T + 1) * B + F, ...]``."""
    rows = rows.flatten(0, 1)
    return th.cat((rows, finals)) if len(finals) else rows


class MlpPolicy(ACERPolicy):
    """Vectors: two separate networks of 64 and 64 tanh units."""


class CnnPolicy(ACERPolicy):
    """Images: one NatureCNN for policy and critic."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(ACERPolicy):
    """Dict observations: one features extractor per key, whose features are concatenated."""

    default_features_extractor = CombinedExtractor


class MlpLstmPolicy(MlpPolicy):
    """:class:`MlpPolicy` with one LSTM each for policy and critic, before the networks."""

    default_recurrent = LSTM


class CnnLstmPolicy(CnnPolicy):
    """:class:`CnnPolicy` with one LSTM each for policy and critic, behind the NatureCNN."""

    default_recurrent = LSTM


class MultiInputLstmPolicy(MultiInputPolicy):
    """:class:`MultiInputPolicy` with one LSTM each for policy and critic."""

    default_recurrent = LSTM


class MlpLnLstmPolicy(MlpPolicy):
    """:class:`MlpLstmPolicy` with layer-normalised LSTMs."""

    default_recurrent = LayerNormLSTM


class CnnLnLstmPolicy(CnnPolicy):
    """:class:`CnnLstmPolicy` with layer-normalised LSTMs."""

    default_recurrent = LayerNormLSTM


class MlpGruPolicy(MlpPolicy):
    """:class:`MlpLstmPolicy` with GRUs in place of LSTMs."""

    default_recurrent = GRU
