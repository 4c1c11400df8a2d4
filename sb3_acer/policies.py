"""
ACER's policy: features -> [recurrent core] -> policy head, and Q head or stochastic dueling head.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_acer.distributions import Family, make_family
from sb3_acer.estimators import dueling
from sb3_acer.parameters import RMSpropTF
from sb3_acer.recurrent import LSTM, LayerNormLSTM, Recurrent, Segments, make_segments


class Judgement(NamedTuple):
    """What a critic says of N rows, the first T * B of them those of T steps of B sequences."""

    values: th.Tensor
    """V of every row, ``[N]``"""
    q_values: th.Tensor
    """Q of the actions taken, ``[T, B]``"""
    candidates: th.Tensor
    """actions that stand for the whole policy in the bias correction: all, or K sampled ones, ``[T, B, K, D]``"""
    weights: th.Tensor
    """of the candidates: pi(a), or 1 / K, ``[T, B, K]``"""
    candidate_values: th.Tensor
    """Q of the candidates, ``[T, B, K]``"""


class Evaluation(NamedTuple):
    """What a policy makes of B sequences of T steps."""

    stats: th.Tensor
    """statistics of pi(.|x_t), ``[T, B, P]``"""
    values: th.Tensor
    """V(x_t), ``[T, B]``; without gradients where it follows from pi and Q"""
    next_values: th.Tensor
    """V of each step's true successor, without gradients, ``[T, B]``"""
    q_values: th.Tensor
    """Q(x_t, a_t), ``[T, B]``"""
    candidates: th.Tensor
    """see :class:`Judgement`, ``[T, B, K, D]``"""
    weights: th.Tensor
    """of the candidates, ``[T, B, K]``"""
    candidate_values: th.Tensor
    """Q(x_t, .) of the candidates, ``[T, B, K]``"""


class QHead(nn.Module):
    """
    Q of every action at once, V = sum_a pi(a) Q(a): for actions that can be enumerated.

    :param family: the actions' family
    :param latent_dim: width of the latent features
    """

    def __init__(self, family: Family, latent_dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(latent_dim, family.n_stats)
        self.outputs = (self.q,)
        self.output_gain = 1.0  # with 0.01 CartPole-v1 is learnt more slowly

    def values(self, latent: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param latent: ``[N, L]``
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :return: V, ``[N]``
        """
        q: th.Tensor = self.q(latent)
        return (stats * q).sum(-1)

    def forward(
        self, latent: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param latent: ``[N, L]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: not read: nothing is sampled
        :param rng: not read
        """
        q: th.Tensor = self.q(latent)
        probabilities = stats.detach()
        shape = actions.shape[:2]
        q_steps, weights = (rows[: shape.numel()].view(*shape, -1) for rows in (q, probabilities))
        return Judgement(
            (probabilities * q.detach()).sum(-1),
            q_steps.gather(-1, actions).squeeze(-1),
            th.arange(q.shape[-1], device=q.device).unsqueeze(-1).expand(*q_steps.shape, 1),
            weights,
            q_steps,
        )


class DuelingHead(nn.Module):
    """
    Stochastic dueling networks (section 3.2 of the paper): V(x) and A(x, a), and Q~ by
    :func:`~sb3_acer.estimators.dueling`.

    :param family: the actions' family
    :param latent_dim: width of the latent features
    :param activation_fn: activation of A's one hidden layer, where the latent features meet the actions. That layer has
        more rows than all others together, and on a CPU tanh takes forty times as long as ReLU.
    """

    def __init__(self, family: Family, latent_dim: int, activation_fn: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.family = family
        self.value = nn.Linear(latent_dim, 1)
        # A layer of [latent, action] as a sum of two: the latent features are multiplied once for all actions of a
        # state.
        width = min(latent_dim, 64)
        self.advantage_latent = nn.Linear(latent_dim, width)
        self.advantage_action = nn.Linear(family.n_features, width, bias=False)
        advantage = nn.Linear(width, 1)
        self.advantage = nn.Sequential(activation_fn(), advantage)
        self.outputs = (self.value, advantage)
        self.output_gain = 0.01

    def values(self, latent: th.Tensor, stats: th.Tensor) -> th.Tensor:
        """
        :param latent: ``[N, L]``
        :param stats: not read
        :return: V, ``[N]``
        """
        values: th.Tensor = self.value(latent)
        return values.squeeze(-1)

    def forward(
        self, latent: th.Tensor, stats: th.Tensor, actions: th.Tensor, n_samples: int, rng: np.random.Generator
    ) -> Judgement:
        """
        :param latent: ``[N, L]``, the first T * B rows those of the steps
        :param stats: statistics of pi in the same rows, ``[N, P]``
        :param actions: the actions taken, ``[T, B, D]``
        :param n_samples: actions to sample from pi in each state, as candidates, and as many again for the mean
            advantage
        :param rng: the source of those samples
        """
        n_steps, n_sequences = actions.shape[:2]
        n_rows = n_steps * n_sequences
        values = self.values(latent, stats)
        policy = stats[:n_rows].detach().view(n_steps, n_sequences, 1, -1)
        uniforms = th.from_numpy(rng.random((n_steps, n_sequences, 2 * n_samples, self.family.n_components)))
        sampled = self.family.sample(policy, uniforms.to(policy.device))
        candidates, others = sampled.tensor_split((n_samples,), -2)
        hidden = self.advantage_latent(latent[:n_rows]).view(n_steps, n_sequences, 1, -1)
        step_values = values[:n_rows].view(n_steps, n_sequences)
        advantages = self._advantages(hidden, th.cat((actions.unsqueeze(-2), others), -2))
        q_values = dueling(step_values, advantages[..., 0], advantages[..., 1:])
        with th.no_grad():  # the correction takes the candidates' values as they are
            candidate_values = dueling(step_values, self._advantages(hidden, candidates), advantages[..., 1:])
        return Judgement(values, q_values, candidates, th.full_like(candidate_values, 1 / n_samples), candidate_values)

    def _advantages(self, hidden: th.Tensor, actions: th.Tensor) -> th.Tensor:
        advantages: th.Tensor = self.advantage(hidden + self.advantage_action(self.family.encode(actions)))
        return advantages.squeeze(-1)


class MLP(nn.Sequential):
    """
    Hidden layers, run without what a call of each of them as a module would take: a third of a small network's time.

    :param input_dim: width of the input
    :param widths: widths of the layers
    :param activation_fn: activation function
    """

    def __init__(self, input_dim: int, widths: list[int], activation_fn: type[nn.Module]) -> None:
        super().__init__(*create_mlp(input_dim, -1, widths, activation_fn))

    def forward(self, input: th.Tensor) -> th.Tensor:
        for module in self._modules.values():
            input = module.forward(input)
        return input


def _split_net_arch(net_arch: list[int] | Mapping[str, list[int]]) -> tuple[list[int], list[int]]:
    """Layers of the policy network and of the Q network; ``vf`` is what other SB3 policies call the latter."""
    if isinstance(net_arch, list) and len(net_arch) == 1 and isinstance(net_arch[0], dict):
        warnings.warn("net_arch should be a dict, no list of one: net_arch=dict(pi=..., qf=...)", stacklevel=4)
        net_arch = net_arch[0]
    if isinstance(net_arch, Mapping):
        unknown = set(net_arch) - {"pi", "qf", "vf"}
        if unknown or {"qf", "vf"} <= set(net_arch):
            raise ValueError(f"net_arch must have the keys pi and qf, got {dict(net_arch)!r}")
        return list(net_arch.get("pi", [])), list(net_arch.get("qf", net_arch.get("vf", [])))
    if not all(isinstance(width, int) for width in net_arch):
        raise ValueError(f"net_arch must be a list of widths or a dict of the keys pi and qf, got {net_arch!r}")
    return list(net_arch), list(net_arch)


class ACERPolicy(BasePolicy):
    """
    Policy and critic of ACER: two networks behind a shared or a separate features extractor.

    :param observation_space: observation space
    :param action_space: action space
    :param lr_schedule: learning rate as a function of the remaining progress (from 1 to 0)
    :param net_arch: widths of the hidden layers, ``dict(pi=[...], qf=[...])`` or a list for both; by default 64 and
        64, none behind a NatureCNN
    :param activation_fn: activation function
    :param ortho_init: whether to initialise orthogonally: gain sqrt(2), 0.01 for the policy's outputs
        and the dueling critic's, 1 for those of Q
    :param log_std_init: initial logarithm of the standard deviation of continuous actions, which does not depend on the
        state
    :param learn_log_std: whether it is learnt; the paper fixes it
    :param features_extractor_class: features extractor
    :param features_extractor_kwargs: its keyword arguments
    :param share_features_extractor: whether the policy and the critic use one features extractor
    :param lstm_class: what remembers, between features and hidden layers; None for a feed-forward policy
    :param lstm_hidden_size: width of an LSTM's output
    :param n_lstm_layers: number of its layers
    :param shared_lstm: whether the critic uses the policy's LSTM, which both then train
    :param enable_critic_lstm: whether the critic has an LSTM of its own; with neither it sees the features alone
    :param lstm_kwargs: further arguments of ``lstm_class``: ``bias`` and ``dropout`` of :class:`LSTM`
    :param normalize_images: whether to divide images by 255
    :param use_bfloat16: whether NatureCNN computes features of images in bfloat16 (automatic mixed precision);
        ``"auto"``: where the processor has instructions for it
    :param optimizer_class: optimiser
    :param optimizer_kwargs: its keyword arguments, without the learning rate
    :raises ValueError: for a ``net_arch`` of another form, for options of an LSTM that contradict each other, and for
        an action space that is not supported
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        learn_log_std: bool = True,
        features_extractor_class: type[BaseFeaturesExtractor] = FlattenExtractor,
        features_extractor_kwargs: dict[str, Any] | None = None,
        share_features_extractor: bool = True,
        lstm_class: type[Recurrent] | None = None,
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        shared_lstm: bool = False,
        enable_critic_lstm: bool = True,
        lstm_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        use_bfloat16: bool | Literal["auto"] = "auto",
        optimizer_class: type[th.optim.Optimizer] = RMSpropTF,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
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
            net_arch = [] if issubclass(features_extractor_class, NatureCNN) else [64, 64]
        self.net_arch = net_arch
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.log_std_init = log_std_init
        self.learn_log_std = learn_log_std
        self.share_features_extractor = share_features_extractor
        self.lstm_class = lstm_class
        self.lstm_options: dict[str, Any] = {
            "lstm_hidden_size": lstm_hidden_size,
            "n_lstm_layers": n_lstm_layers,
            "shared_lstm": shared_lstm,
            "enable_critic_lstm": enable_critic_lstm,
            "lstm_kwargs": lstm_kwargs,
        }
        self._check_lstm_options()
        if use_bfloat16 not in (True, False, "auto"):
            raise ValueError(f"use_bfloat16 must be True, False or 'auto', got {use_bfloat16!r}")
        self.use_bfloat16 = use_bfloat16
        self.family = make_family(action_space, learn_log_std)

        self._is_vector = (
            features_extractor_class is FlattenExtractor
            and isinstance(observation_space, spaces.Box)
            and len(observation_space.shape) == 1
        )
        self._is_image = issubclass(features_extractor_class, NatureCNN) and is_image_space(observation_space)
        self.features_extractor = self.make_features_extractor()
        self.q_features_extractor = (
            self.features_extractor if share_features_extractor else self.make_features_extractor()
        )
        pi_dim = q_dim = self.features_extractor.features_dim
        self.pi_lstm: Recurrent | None = None
        self.q_lstm: Recurrent | None = None
        if lstm_class is not None:
            self.pi_lstm = self._make_lstm(int(pi_dim))  # some extractors compute it by numpy
            self.q_lstm = self.pi_lstm if shared_lstm else self._make_lstm(int(q_dim)) if enable_critic_lstm else None
            pi_dim = lstm_hidden_size
            q_dim = q_dim if self.q_lstm is None else lstm_hidden_size
        lstms = dict.fromkeys(lstm for lstm in (self.pi_lstm, self.q_lstm) if lstm is not None)
        self.state_size = sum(lstm.state_size for lstm in lstms)
        pi_arch, q_arch = _split_net_arch(net_arch)
        self.pi_net = MLP(pi_dim, pi_arch, activation_fn)
        self.q_net = MLP(q_dim, q_arch, activation_fn)
        self.pi_head = nn.Linear((pi_arch or [pi_dim])[-1], self.family.n_outputs)
        self.log_std = None
        if self.family.n_log_std:
            self.log_std = nn.Parameter(th.full((self.family.n_log_std,), log_std_init), requires_grad=learn_log_std)
        latent_dim = (q_arch or [q_dim])[-1]
        self.q_head: QHead | DuelingHead = (
            QHead(self.family, latent_dim) if self.family.enumerable else DuelingHead(self.family, latent_dim)
        )
        if ortho_init:
            for module, gain in (
                (self.features_extractor, np.sqrt(2)),
                (self.q_features_extractor, np.sqrt(2)),
                (self.pi_net, np.sqrt(2)),
                (self.q_net, np.sqrt(2)),
                (self.pi_head, 0.01),
                (self.q_head, np.sqrt(2)),
                *((output, self.q_head.output_gain) for output in self.q_head.outputs),
            ):
                module.apply(partial(self.init_weights, gain=gain))
            for lstm in lstms:
                lstm.orthogonal_()
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),
            **self.optimizer_kwargs,  # type: ignore[call-arg]
        )
        if self._is_image:
            self.to(memory_format=th.channels_last)  # type: ignore[call-overload]
        # Walking the modules for them takes as long as a layer does.
        self.weights = list(self.parameters())
        self.running_means = list(self.buffers())

    def _check_lstm_options(self) -> None:
        options = self.lstm_options
        if self.lstm_class is None and list(options.values()) != [256, 1, False, True, None]:
            raise ValueError(f"{type(self).__name__} has no LSTM: lstm_class must be set, got None with {options!r}")
        for name in ("lstm_hidden_size", "n_lstm_layers"):
            if not isinstance(options[name], (int, np.integer)) or options[name] < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {options[name]!r}")
        if options["shared_lstm"] and options["enable_critic_lstm"]:
            raise ValueError("enable_critic_lstm must be False where shared_lstm is True, got True for both")
        if options["shared_lstm"] and not self.share_features_extractor:
            raise ValueError("share_features_extractor must be True where shared_lstm is True, got False")

    def _make_lstm(self, input_size: int) -> Recurrent:
        assert self.lstm_class is not None
        sizes = (input_size, self.lstm_options["lstm_hidden_size"], self.lstm_options["n_lstm_layers"])
        try:
            return self.lstm_class(*sizes, **(self.lstm_options["lstm_kwargs"] or {}))
        except TypeError as error:
            kwargs = self.lstm_options["lstm_kwargs"]
            raise ValueError(f"lstm_kwargs must be arguments of {self.lstm_class.__name__}, got {kwargs!r}") from error

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            **super()._get_constructor_parameters(),
            "lr_schedule": self._dummy_schedule,  # not needed to act
            "net_arch": self.net_arch,
            "activation_fn": self.activation_fn,
            "ortho_init": self.ortho_init,
            "log_std_init": self.log_std_init,
            "learn_log_std": self.learn_log_std,
            "features_extractor_class": self.features_extractor_class,
            "features_extractor_kwargs": self.features_extractor_kwargs,
            "share_features_extractor": self.share_features_extractor,
            "lstm_class": self.lstm_class,
            **self.lstm_options,
            "use_bfloat16": self.use_bfloat16,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor) -> th.Tensor:
        # What SB3's preprocessing and flattening come to for vectors, in a tenth of the time.
        if self._is_vector and isinstance(obs, th.Tensor):
            return obs.float()
        if not self._is_image or not isinstance(obs, th.Tensor):
            return super().extract_features(obs, features_extractor)
        fast = _has_bfloat16(obs.device.type) if self.use_bfloat16 == "auto" else self.use_bfloat16
        images = obs.to(th.bfloat16 if fast else th.float32).contiguous(memory_format=th.channels_last)
        if self.normalize_images:
            images = images / 255  # not in place: these may be the caller's own
        with th.autocast(obs.device.type, th.bfloat16, enabled=fast):
            features: th.Tensor = features_extractor(images)
        return features.float()

    def forward(self, observations: PyTorchObs, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        One step.

        :param observations: ``[N, ...]``, a dict of such for a Dict space
        :param states: what the policy remembers, 0 where an episode begins, ``[N, W]`` with W = ``state_size``
        :return: statistics of pi(.|x), ``[N, P]``, and the states after, ``[N, W]``
        """
        if self.pi_lstm is None:
            return self._statistics(self.extract_features(observations, self.features_extractor)), states
        latent, _, states = self._remember(*self._features(observations), states)
        return self._statistics(latent), states

    def _features(self, observations: PyTorchObs) -> tuple[th.Tensor, th.Tensor]:
        """Those of the policy and those of the critic."""
        features = self.extract_features(observations, self.features_extractor)
        if self.share_features_extractor:
            return features, features
        return features, self.extract_features(observations, self.q_features_extractor)

    def _remember(
        self, features: th.Tensor, q_features: th.Tensor, states: th.Tensor, segments: Segments | None = None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Features of policy and critic with what they remember, and the states after; see :class:`Recurrent`."""
        if self.pi_lstm is None:
            return features, q_features, states
        pi_states, q_states = states.tensor_split((self.pi_lstm.state_size,), -1)
        features, pi_states = self.pi_lstm(features, pi_states, segments)
        if self.q_lstm is self.pi_lstm:
            q_features = features
        elif self.q_lstm is not None:
            q_features, q_states = self.q_lstm(q_features, q_states, segments)
        return features, q_features, th.cat((pi_states, q_states), -1)

    def _statistics(self, latent: th.Tensor) -> th.Tensor:
        return self.family.statistics(self.pi_head(self.pi_net(latent)), self.log_std)

    def _segments(self, ends: th.Tensor, final_steps: th.Tensor | None = None) -> Segments | None:
        return None if self.pi_lstm is None else make_segments(ends, final_steps)

    def statistics(self, observations: PyTorchObs, states: th.Tensor, ends: th.Tensor) -> th.Tensor:
        """
        :param observations: ``[T + 1, B, ...]``
        :param states: what was remembered before each sequence, ``[B, W]``
        :param ends: whether an episode ended at the step, bool, ``[T, B]``
        :return: statistics of pi(.|x_t), without gradients, ``[T, B, P]``
        """
        with th.no_grad():
            rows = _map(lambda rows: rows[:-1].flatten(0, 1), observations)
            latent, _, _ = self._remember(*self._features(rows), states, self._segments(ends[:-1]))
            stats = self._statistics(latent)
        return stats.view(*ends.shape, self.family.n_stats)

    def warm_up(self, observations: PyTorchObs, states: th.Tensor, ends: th.Tensor) -> th.Tensor:
        """
        :param observations: ``[T, B, ...]`` or more rows, of which the first T are read
        :param states: what was remembered before each sequence, ``[B, W]``
        :param ends: whether an episode ended at the step, bool, ``[T, B]``
        :return: what this policy remembers after T steps, without gradients, ``[B, W]``
        """
        training = self.training
        self.set_training_mode(False)  # what acted dropped nothing
        with th.no_grad():
            rows = _map(lambda rows: rows[: len(ends)].flatten(0, 1), observations)
            _, _, states = self._remember(*self._features(rows), states, self._segments(ends[:-1]))
        self.set_training_mode(training)
        return states * ~ends[-1:].T

    def evaluate(
        self,
        observations: PyTorchObs,
        actions: th.Tensor,
        states: th.Tensor,
        ends: th.Tensor,
        final_observations: PyTorchObs,
        final_steps: th.Tensor,
        n_samples: int,
        rng: np.random.Generator,
    ) -> Evaluation:
        """
        Policy and critic on sequences, in one forward pass of all their rows.

        :param observations: ``[T + 1, B, ...]``
        :param actions: the actions taken, ``[T, B, D]``
        :param states: what was remembered before each sequence, ``[B, W]``
        :param ends: whether an episode ended at the step, bool, ``[T, B]``
        :param final_observations: what followed the steps that a time limit cut, ``[F, ...]``
        :param final_steps: which steps those are, as t * B + b, ``[F]``
        :param n_samples: actions to sample in each state where they cannot be enumerated (K)
        :param rng: the source of those samples
        """
        n_steps, n_sequences = actions.shape[:2]
        rows = _map(_stack_rows, observations, final_observations)
        latent, q_latent, _ = self._remember(*self._features(rows), states, self._segments(ends, final_steps))
        stats = self._statistics(latent)
        judgement: Judgement = self.q_head(self.q_net(q_latent), stats, actions, n_samples, rng)

        n_rows = n_steps * n_sequences
        values = judgement.values.detach()
        next_values = values[n_sequences : n_rows + n_sequences]
        if len(final_steps):
            next_values = next_values.index_copy(0, final_steps, values[n_rows + n_sequences :])
        return Evaluation(
            stats[:n_rows].view(n_steps, n_sequences, -1),
            judgement.values[:n_rows].view(n_steps, n_sequences),
            next_values.view(n_steps, n_sequences),
            *judgement[1:],
        )

    def predict_values(self, obs: PyTorchObs, states: th.Tensor) -> th.Tensor:
        """
        :param obs: ``[N, ...]``
        :param states: what the policy remembers, ``[N, W]``
        :return: V(x), ``[N, 1]``
        """
        latent, q_latent, _ = self._remember(*self._features(obs), states)
        return self.q_head.values(self.q_net(q_latent), self._statistics(latent)).unsqueeze(-1)

    def initial_states(self, n_envs: int) -> np.ndarray:
        """
        :param n_envs: number of environments
        :return: what is remembered where episodes begin: nothing, ``[n_envs, W]``
        """
        return np.zeros((n_envs, self.state_size), np.float32)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Any]:
        """
        Actions for observations.

        :param observation: of one environment, or of N
        :param state: what the last call returned; None at first
        :param episode_start: where an episode begins and nothing is remembered, bool, ``[N]``
        :param deterministic: the most likely actions (of each factor) instead of sampled ones
        :return: actions, and what is remembered after, ``[N, W]``; a feed-forward policy returns the state it was given
        :raises ValueError: for a state or an ``episode_start`` of another shape
        """
        stats, after, vectorized = self.predict_statistics(observation, state, episode_start)
        env_actions = self.family.to_env(self._choose(stats, deterministic).cpu().numpy())
        if self.state_size:
            state = after.cpu().numpy()
        return env_actions if vectorized else env_actions.squeeze(axis=0), state

    def predict_statistics(
        self, observation: np.ndarray | dict[str, np.ndarray], state: Any = None, episode_start: Any = None
    ) -> tuple[th.Tensor, th.Tensor, bool]:
        """
        What :meth:`predict` draws from; arguments and errors as there.

        :return: statistics of pi(.|x), ``[N, P]``, what is remembered after, ``[N, W]``, and whether the observation
            was one of N environments
        """
        self.set_training_mode(False)
        if isinstance(observation, tuple):
            raise ValueError(f"observation must be an array or a dict of arrays, got the tuple {observation!r}")
        observations, vectorized = self.obs_to_tensor(observation)
        some_rows = next(iter(observations.values())) if isinstance(observations, dict) else observations
        states = self._before(state, episode_start, len(some_rows))
        with th.no_grad():
            return *self(observations, states), vectorized

    def _before(self, state: Any, episode_start: Any, n_envs: int) -> th.Tensor:
        """What :meth:`predict` remembers before it acts, ``[N, W]``."""
        states = self.initial_states(n_envs)
        if self.state_size and state is not None:
            if np.shape(state) != states.shape:
                raise ValueError(f"state must be of shape {states.shape}, got {np.shape(state)}")
            states[:] = state
        if episode_start is not None:
            starts = np.atleast_1d(np.asarray(episode_start, bool))
            if starts.shape != (n_envs,):
                raise ValueError(f"episode_start must be of shape {(n_envs,)}, got {starts.shape}")
            states[starts] = 0
        return th.from_numpy(states).to(self.device)

    def _choose(self, stats: th.Tensor, deterministic: bool) -> th.Tensor:
        if deterministic:
            return self.family.mode(stats)
        # From torch's global generator, as every policy of SB3 predicts; training has generators of its own.
        uniforms = th.rand((len(stats), self.family.n_components), dtype=th.float64, device=stats.device)
        return self.family.sample(stats, uniforms)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # SB3's place for what one step takes has none for a state: nothing is remembered.
        some_rows = next(iter(observation.values())) if isinstance(observation, dict) else observation
        stats, _ = self(observation, th.zeros((len(some_rows), self.state_size), device=some_rows.device))
        return th.as_tensor(self.family.to_env(self._choose(stats, deterministic).cpu().numpy()))


@cache
def _has_bfloat16(device_type: str) -> bool:
    """Whether bfloat16 is faster there than float32, not merely emulated."""
    if device_type == "cuda":
        return bool(th.cuda.is_bf16_supported(including_emulation=False))
    return device_type == "cpu" and bool(th.cpu._is_avx512_bf16_supported() or th.cpu._is_amx_tile_supported())


def _map(function: Callable[..., th.Tensor], *observations: PyTorchObs) -> PyTorchObs:
    """``function`` of observations, key by key where they are dicts."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(cast(dict[str, th.Tensor], each)[key] for each in observations)) for key in first}
    return function(*observations)


def _stack_rows(rows: th.Tensor, finals: th.Tensor) -> th.Tensor:
    """``[T + 1, B, ...]`` and ``[F, ...]`` as ``[(T + 1) * B + F, ...]``."""
    rows = rows.flatten(0, 1)
    return th.cat((rows, finals)) if len(finals) else rows


class MlpPolicy(ACERPolicy):
    """Vectors: two separate networks of 64 and 64 tanh units."""


class CnnPolicy(ACERPolicy):
    """Images: one NatureCNN for the policy and the critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"features_extractor_class": NatureCNN, **kwargs})


class MultiInputPolicy(ACERPolicy):
    """Dict observations: each key has an extractor of its own, and their features are put side by side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"features_extractor_class": CombinedExtractor, **kwargs})


class MlpLstmPolicy(ACERPolicy):
    """Vectors: an LSTM each for the policy and the critic, then two networks of 64 and 64 tanh units."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"lstm_class": LSTM, **kwargs})


class CnnLstmPolicy(CnnPolicy):
    """Images: one NatureCNN, then an LSTM each for the policy and the critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"lstm_class": LSTM, **kwargs})


class MultiInputLstmPolicy(MultiInputPolicy):
    """Dict observations: :class:`MultiInputPolicy` with an LSTM each for the policy and the critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"lstm_class": LSTM, **kwargs})


class MlpLnLstmPolicy(ACERPolicy):
    """:class:`MlpLstmPolicy`, layer-normalised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"lstm_class": LayerNormLSTM, **kwargs})


class CnnLnLstmPolicy(CnnPolicy):
    """:class:`CnnLstmPolicy`, layer-normalised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"lstm_class": LayerNormLSTM, **kwargs})
