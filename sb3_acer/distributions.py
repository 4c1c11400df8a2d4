"""
One family of action distributions per action space. A family turns a network's outputs into statistics, and statistics
into log-probabilities, importance ratios, entropies, divergences and samples.

Statistics are plain tensors ``[..., P]``. The trust region acts on them and the buffer stores them. Actions are
``[..., D]`` with D components, as the policy samples them: indices that start at 0, or a vector before clipping.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from torch.nn import functional as F

Array = TypeVar("Array", np.ndarray, th.Tensor)

EPSILON = 1e-6
"""Added to a probability inside a logarithm or a denominator, as in stable-baselines' ACER."""

MAX_LOG_RATIO = 60.0
"""Importance ratios are at most e^60, far beyond any truncation constant in use. Sums of them fit into float32."""
MIN_LOG_RATIO = -87.0
"""
Where actions are sampled, ratios of actions that pi may take are at least e^-87, just above the smallest normal number
of float32. So traces, their d-th roots, are at least e^(-87/d): 0.01 for 20 components, but 0.4 for 100.
"""
WIDEST_BOX = 1e4
"""Actions of a Box are not scaled by bounds farther apart than this: all would look alike to the critic."""


class Family(ABC):
    """
    A parametric family of action distributions.

    A new family defines the abstract methods and gets a line in :func:`make_family`. The gradients :meth:`kl_gradient`,
    :meth:`entropy_gradient` and :meth:`score` have defaults by autograd, which a family overrides with closed forms for
    speed. A subclass that overrides :meth:`statistics` also overrides :meth:`backward`, and
    :meth:`statistics_of_arrays` if its parent class does.

    :param action_space: the action space
    """

    n_stats: int
    """P, the number of statistics of a state's distribution."""
    n_outputs: int
    """The number of outputs of the policy network."""
    n_log_std: int = 0
    """The number of logarithms of standard deviations that do not depend on the state."""
    n_components: int
    """D, the number of components of an action."""
    n_features: int
    """The width of an action as input of a network, see :meth:`encode`."""
    normal_noise: bool = False
    """Whether samples are made of standard normal numbers; otherwise of numbers uniform on [0, 1)."""
    enumerable: bool = False
    """Whether the critic evaluates all actions of a state at once."""
    trace_root: int = 1
    """d of the trace coefficients min(1, rho^(1/d)): the number of components with more than one outcome."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space

    @abstractmethod
    def statistics(self, outputs: th.Tensor, log_std: th.Tensor | None, masks: th.Tensor | None = None) -> th.Tensor:
        """
        :param outputs: outputs of a policy network, ``[..., n_outputs]``
        :param log_std: logarithms of standard deviations, ``[n_log_std]``; None if ``n_log_std`` is 0
        :param masks: what :meth:`check_masks` returned, ``[..., P]``; None if all actions are valid
        :return: statistics of the distributions, ``[..., P]``
        """

    def statistics_of_arrays(
        self, outputs: np.ndarray, log_std: np.ndarray | None, masks: np.ndarray | None = None
    ) -> np.ndarray:
        """
        :meth:`statistics` of a few rows, on arrays.

        :param outputs: ``[N, n_outputs]``
        :param log_std: ``[n_log_std]``; None if ``n_log_std`` is 0
        :param masks: ``[N, P]``; None if all actions are valid
        :return: ``[N, P]``
        """
        given = (None if each is None else th.from_numpy(each) for each in (log_std, masks))
        return self.statistics(th.from_numpy(outputs), *given).numpy()

    @abstractmethod
    def backward(self, stats: th.Tensor, stats_gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        """
        From gradients with respect to the statistics to those with respect to what :meth:`statistics` made them of.

        :param stats: what :meth:`statistics` returned, ``[N, P]``
        :param stats_gradient: gradient with respect to them, ``[N, P]``
        :return: gradients with respect to ``outputs``, ``[N, n_outputs]``, and ``log_std``, ``[n_log_std]``; None for
            the latter if ``n_log_std`` is 0
        """

    def check_masks(self, masks: Any, n_rows: int, row_name: str = "row") -> np.ndarray:
        """
        Masks of invalid actions, in the form of sb3-contrib's MaskablePPO: whether an outcome is valid, for the
        outcomes of all factors side by side. MultiBinary has two outcomes per bit, first that of 0.

        :param masks: of N states, ``[N, P]``; if N is 1 also ``[P]``
        :param n_rows: N
        :param row_name: what messages call a state
        :return: the masks, bool, ``[N, P]``
        :raises ValueError: if they are of another shape, if a factor has no valid outcome, and for Box
        """
        raise ValueError(
            f"action_masks must be None for the action space {self.action_space!r}, got masks "
            "(learn(use_masking=False) ignores those of an environment)"
        )

    def trace_roots(self, masks: th.Tensor) -> int | th.Tensor:
        """
        :param masks: see :meth:`statistics`, ``[..., P]``
        :return: :attr:`trace_root` of the actions that are valid in each state, ``[...]``
        """
        return self.trace_root

    @abstractmethod
    def log_prob(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param stats: ``[..., P]``
        :param actions: ``[..., D]``; leading axes broadcast against those of ``stats``
        :return: logarithm of the actions' probability, which is finite, or of their density, ``[...]``
        """

    def exact_log_prob(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """:meth:`log_prob` without :data:`EPSILON`: minus infinity where the probability is 0."""
        return self.log_prob(stats, actions)

    @abstractmethod
    def entropy(self, stats: th.Tensor) -> th.Tensor:
        """
        :param stats: ``[..., P]``
        :return: entropy in nats, of continuous actions the differential entropy, ``[...]``
        """

    @abstractmethod
    def kl(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        """
        Kullback-Leibler divergence KL(stats || other), in nats.

        :param stats: ``[..., P]``
        :param other: ``[..., P]``
        :return: ``[...]``
        """

    def ratio(self, stats: th.Tensor, behaviour: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        Importance ratios rho = pi(a|x) / mu(a|x) (equation 4 of the paper). They are always finite: probabilities mu of
        discrete outcomes are raised by ``EPSILON``, and logarithms of ratios are clamped, where pi is not 0.

        :param stats: statistics of pi, ``[..., P]``
        :param behaviour: statistics of mu, ``[..., P]``
        :param actions: ``[..., D]``
        :return: ``[...]``
        """
        # A difference of logarithms: the product of many factors' ratios can overflow float32 on the way.
        log_ratio = self.exact_log_prob(stats, actions) - self.log_prob(behaviour, actions)
        ratio = log_ratio.clamp(MIN_LOG_RATIO, MAX_LOG_RATIO).exp()
        return ratio * (log_ratio > -math.inf)  # 0 where pi never takes the action

    def ratios(
        self, stats: th.Tensor, behaviour: th.Tensor, actions: th.Tensor, candidates: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        Importance ratios of the actions taken and of the candidates, see :meth:`ratio`.

        :param stats: statistics of pi, ``[..., P]``
        :param behaviour: statistics of mu, ``[..., P]``
        :param actions: the actions taken, ``[..., D]``
        :param candidates: ``[..., K, D]``
        :return: ``[...]`` and ``[..., K]``
        """
        every = th.cat((actions.unsqueeze(-2), candidates), -2)
        ratios = self.ratio(stats.unsqueeze(-2), behaviour.unsqueeze(-2), every)
        return ratios[..., 0], ratios[..., 1:]

    def kl_gradient(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        """
        Gradient of KL(stats || other) with respect to ``other``.

        :param stats: ``[..., P]``
        :param other: ``[..., P]``
        :return: ``[..., P]``
        """
        return _gradient(lambda x, constant: self.kl(constant, x), other, stats)

    def entropy_gradient(self, stats: th.Tensor) -> th.Tensor:
        """
        Gradient of :meth:`entropy` with respect to the statistics.

        :param stats: ``[..., P]``
        :return: ``[..., P]``
        """
        return _gradient(self.entropy, stats)

    def score(self, stats: th.Tensor, actions: th.Tensor, weights: th.Tensor) -> th.Tensor:
        """
        Gradient of sum_k weights_k log pi(actions_k | x) with respect to the statistics.

        :param stats: ``[..., P]``
        :param actions: ``[..., K, D]``
        :param weights: ``[..., K]``
        :return: ``[..., P]``
        """

        def gain(x: th.Tensor, actions: th.Tensor, weights: th.Tensor) -> th.Tensor:
            return (weights * self.log_prob(x.unsqueeze(-2), actions)).sum(-1)

        return _gradient(gain, stats, actions, weights)

    def gain_gradient(
        self,
        stats: th.Tensor,
        actions: th.Tensor,
        factor: th.Tensor,
        candidates: th.Tensor,
        candidate_factors: th.Tensor,
    ) -> th.Tensor:
        """
        Gradient of factor log pi(actions | x) + sum_k candidate_factors_k log pi(candidates_k | x), see :meth:`score`.

        :param stats: ``[..., P]``
        :param actions: the actions taken, ``[..., D]``
        :param factor: ``[...]``
        :param candidates: ``[..., K, D]``
        :param candidate_factors: ``[..., K]``
        :return: ``[..., P]``
        """
        every = th.cat((actions.unsqueeze(-2), candidates), -2)
        return self.score(stats, every, th.cat((factor.unsqueeze(-1), candidate_factors), -1))

    def noise(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """
        :param rng: the source of the random draws
        :param shape: the leading axes
        :return: independent numbers that :meth:`sample` makes actions of, see :attr:`normal_noise`, float64,
            ``[*shape, D]``
        """
        shape = (*shape, self.n_components)
        return rng.standard_normal(shape) if self.normal_noise else rng.random(shape)

    @abstractmethod
    def sample(self, stats: th.Tensor, noise: th.Tensor) -> th.Tensor:
        """
        :param stats: ``[..., P]``
        :param noise: see :meth:`noise`, ``[..., D]``
        :return: actions, ``[..., D]``
        """

    def act(self, stats: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """
        :meth:`sample` for N environments, on arrays.

        :param stats: ``[N, P]``
        :param noise: ``[N, D]``
        :return: ``[N, D]``
        """
        return self.sample(th.from_numpy(stats), th.from_numpy(noise)).numpy()

    @abstractmethod
    def can_sample(self, actions: th.Tensor) -> bool:
        """
        :param actions: ``[...]``
        :return: whether they have the form and type of samples, ``[..., D]``, and only outcomes that exist
        """

    @abstractmethod
    def mode(self, stats: th.Tensor) -> th.Tensor:
        """
        :param stats: ``[..., P]``
        :return: the most probable actions, ``[..., D]``
        """

    @abstractmethod
    def encode(self, actions: th.Tensor) -> th.Tensor:
        """
        :param actions: ``[..., D]``
        :return: the actions as input of a network, ``[..., n_features]``: one-hot or multi-hot, or a vector as
            the environment gets it, scaled to [-1, 1] where two bounds are at most :data:`WIDEST_BOX` apart
        """

    @abstractmethod
    def to_env(self, actions: Array) -> Array:
        """
        :param actions: ``[N, D]``
        :return: N elements of the action space, in its shape and dtype
        """

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """
        The inverse of :meth:`to_env`. Continuous actions may lie outside the bounds of the space.

        :param actions: one element of the action space, or N of them
        :return: ``[N, D]``
        :raises ValueError: if they are not elements of the space
        """
        shape, given = self.action_space.shape or (), np.asarray(actions)
        if given.shape not in (shape, (len(given) if given.ndim else 1, *shape)):
            raise ValueError(f"actions must be of {self.action_space!r}, got an array of shape {given.shape}")
        return self._components(given.reshape(-1, *shape)).reshape(-1, self.n_components)

    @abstractmethod
    def _components(self, actions: np.ndarray) -> np.ndarray:
        """Elements of the space, ``[N, ...]``, as numbers of the type that tensors of actions have."""

    @abstractmethod
    def action_probability(self, stats: np.ndarray) -> Any:
        """
        The distribution in the form that stable-baselines documents.

        :param stats: ``[N, P]``
        :return: Discrete: probabilities of the actions, ``[N, n]``; MultiDiscrete: a list of such, one per factor;
            MultiBinary: probabilities of 1, ``[N, D]``; Box: mean and standard deviation, ``[N, ...]`` each
        """

    @abstractmethod
    def distribution(self, stats: th.Tensor) -> Distribution:
        """
        :param stats: ``[N, P]``
        :return: SB3's own distribution with these statistics
        """


def _gradient(function: Callable[..., th.Tensor], at: th.Tensor, *constants: th.Tensor) -> th.Tensor:
    """Gradient of the function's values ``[...]`` with respect to the row of ``[..., P]`` that each depends on."""
    with th.inference_mode(False), th.enable_grad():
        x = at.detach().clone().requires_grad_()  # clones, since tensors of inference mode have no gradients
        values = function(x, *(constant.clone() for constant in constants))
        return th.autograd.grad(values.sum(), x)[0]


class Categorical(Family):
    """
    Independent categorical factors. The statistics are the probabilities of all factors' outcomes, side by side.

    Discrete has one factor, MultiDiscrete one per component, MultiBinary one per bit with two outcomes.

    :param action_space: the action space
    :param sizes: number of outcomes of each factor
    """

    def __init__(self, action_space: spaces.Space[Any], sizes: list[int]) -> None:
        super().__init__(action_space)
        self.n_stats = self.n_outputs = self.n_features = sum(sizes)
        self.n_components, self.sizes = len(sizes), sizes
        self.trace_root = max(sum(size > 1 for size in sizes), 1)
        self.width = max(sizes)
        self.shape, self.dtype = action_space.shape or (), np.dtype(action_space.dtype)
        self.start = getattr(action_space, "start", 0)
        self._firsts = np.cumsum([0, *sizes[:-1]])  # of the outcomes of each factor
        # Factors of unequal sizes are padded to one width, so that one operation serves all factors.
        present = th.arange(self.width) < th.tensor(sizes).unsqueeze(-1)
        self._present = None if present.all() else present.flatten().nonzero().squeeze(-1)

    def _factors(self, stats: th.Tensor, absent: float = 0.0) -> th.Tensor:
        """``[..., P]`` to ``[..., D, width]``. Outcomes that a factor does not have get the value ``absent``."""
        shape = (*stats.shape[:-1], self.n_components, self.width)
        if self._present is None:
            return stats.view(shape)
        padded = stats.new_full((*stats.shape[:-1], self.n_components * self.width), absent)
        return padded.index_copy(-1, self._present.to(stats.device), stats).view(shape)

    def _joined(self, factors: th.Tensor) -> th.Tensor:
        """``[..., D, width]`` to ``[..., P]``."""
        flat = factors.flatten(-2)
        return flat if self._present is None else flat.index_select(-1, self._present.to(flat.device))

    def _pick(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """Probability of each factor's outcome, ``[..., D]``."""
        broadcast: Any = th.broadcast_tensors(self._factors(stats), actions.unsqueeze(-1))  # type: ignore[no-untyped-call]
        picked: th.Tensor = broadcast[0].gather(-1, broadcast[1][..., :1])
        return picked.squeeze(-1)

    def statistics(self, outputs: th.Tensor, log_std: th.Tensor | None, masks: th.Tensor | None = None) -> th.Tensor:
        # The probability of a masked outcome is exactly 0, and so is the gradient of its output.
        outputs = outputs if masks is None else outputs.where(masks, -th.inf)
        return self._joined(self._factors(outputs, absent=-th.inf).softmax(-1))

    def backward(self, stats: th.Tensor, stats_gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        return self._joined(_softmax_backward(self._factors(stats), self._factors(stats_gradient))), None

    def check_masks(self, masks: Any, n_rows: int, row_name: str = "row") -> np.ndarray:
        given = np.asarray(masks)
        if given.dtype.kind == "f" and np.isnan(given).any():
            raise ValueError(f"action_masks must not be NaN, got {given}")
        given = given.astype(bool)
        has_rows = n_rows == 1 or given.shape[:1] == (n_rows,)
        if not has_rows or given.size != n_rows * self.n_stats:
            raise ValueError(f"action_masks must be of shape {(n_rows, self.n_stats)}, got {given.shape}")
        given = given.reshape(n_rows, self.n_stats)
        n_valid = np.add.reduceat(given, self._firsts, axis=-1, dtype=np.int64)
        if not n_valid.all():
            row, factor = np.argwhere(n_valid == 0)[0].tolist()
            what = f"an outcome of component {factor}" if self.n_components > 1 else "an action"
            raise ValueError(f"action_masks must leave {what} valid, got none for {row_name} {row}")
        return given

    def trace_roots(self, masks: th.Tensor) -> int | th.Tensor:
        n_valid = self._factors(masks.float()).sum(-1)
        return (n_valid > 1).sum(-1).clamp(min=1)

    def log_prob(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return (self._pick(stats, actions) + EPSILON).log().sum(-1)

    def exact_log_prob(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return self._pick(stats, actions).log().sum(-1)

    def entropy(self, stats: th.Tensor) -> th.Tensor:
        return -(stats * (stats + EPSILON).log()).sum(-1)

    def kl(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        return (stats * ((stats + EPSILON).log() - (other + EPSILON).log())).sum(-1)

    def kl_gradient(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        # 0 where an outcome has probability 1: the softmax has no gradient there, but k would tighten the trust region
        # of the other factors.
        return -stats / (other + EPSILON) * (other < 1)

    def entropy_gradient(self, stats: th.Tensor) -> th.Tensor:
        floored = stats + EPSILON
        return -(floored.log() + stats / floored)

    def score(self, stats: th.Tensor, actions: th.Tensor, weights: th.Tensor) -> th.Tensor:
        factors = self._factors(stats)
        if stats.is_cuda:  # scatter_add would add in another order each time
            summed = (F.one_hot(actions, self.width) * weights[..., np.newaxis, np.newaxis]).sum(-3)
        else:
            outcomes = actions.transpose(-1, -2)
            summed = th.zeros_like(factors).scatter_add(-1, outcomes, weights.unsqueeze(-2).expand_as(outcomes))
        return self._joined(summed) / (stats + EPSILON)

    def sample(self, stats: th.Tensor, noise: th.Tensor) -> th.Tensor:
        return _invert(self._factors(stats), noise.unsqueeze(-1))

    def can_sample(self, actions: th.Tensor) -> bool:
        sizes = th.tensor(self.sizes, device=actions.device)
        fits = actions.shape[-1:] == sizes.shape and actions.dtype == th.int64
        return fits and bool(((actions >= 0) & (actions < sizes)).all())

    def mode(self, stats: th.Tensor) -> th.Tensor:
        return self._factors(stats).argmax(-1)

    def encode(self, actions: th.Tensor) -> th.Tensor:
        return self._joined(F.one_hot(actions, self.width)).float()

    def to_env(self, actions: Array) -> Array:
        return _cast(actions.reshape(-1, *self.shape) + _like(actions, self.start), self.dtype)

    def _components(self, actions: np.ndarray) -> np.ndarray:
        for action in actions:
            if not self.action_space.contains(action.astype(self.dtype)) or (action != action.astype(self.dtype)).any():
                raise ValueError(f"actions must be of {self.action_space!r}, got {action.tolist()!r}")
        components: np.ndarray = actions.astype(np.int64) - self.start
        return components

    def action_probability(self, stats: np.ndarray) -> Any:
        return np.split(stats, self._firsts[1:], axis=-1)

    def distribution(self, stats: th.Tensor) -> Distribution:
        return MultiCategoricalDistribution(self.sizes).proba_distribution(_logits(stats))


class Binary(Categorical):
    """
    One factor of two outcomes per bit.

    :param action_space: the MultiBinary action space
    """

    def __init__(self, action_space: spaces.MultiBinary) -> None:
        super().__init__(action_space, [2] * int(action_space.shape[0]))

    def action_probability(self, stats: np.ndarray) -> Any:
        return stats[..., 1::2]

    def distribution(self, stats: th.Tensor) -> Distribution:
        logits = _logits(stats)
        return BernoulliDistribution(self.n_components).proba_distribution(logits[..., 1::2] - logits[..., ::2])


class Enumerated(Categorical):
    """
    One categorical factor. Its outcomes are few enough to enumerate: every action is a candidate.

    :param action_space: the Discrete action space
    """

    enumerable = True

    def __init__(self, action_space: spaces.Discrete) -> None:
        super().__init__(action_space, [int(action_space.n)])

    def action_probability(self, stats: np.ndarray) -> Any:
        return stats

    def distribution(self, stats: th.Tensor) -> Distribution:
        return CategoricalDistribution(self.n_stats).proba_distribution(_logits(stats))

    def statistics(self, outputs: th.Tensor, log_std: th.Tensor | None, masks: th.Tensor | None = None) -> th.Tensor:
        return (outputs if masks is None else outputs.where(masks, -th.inf)).softmax(-1)

    def backward(self, stats: th.Tensor, stats_gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        return _softmax_backward(stats, stats_gradient), None

    def act(self, stats: np.ndarray, noise: np.ndarray) -> np.ndarray:
        # numpy takes a third of torch's time for so few numbers.
        outcomes = _invert(stats, noise)[:, np.newaxis]
        return outcomes.astype(np.int64, copy=False)  # on Windows numpy 1 counts with 32 bits

    def kl_gradient(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        return -stats / (other + EPSILON)  # there is one factor

    # The candidates are all actions in order, so the statistics themselves are the table of their probabilities.

    def ratios(
        self, stats: th.Tensor, behaviour: th.Tensor, actions: th.Tensor, candidates: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        ratios = stats / (behaviour + EPSILON)
        return ratios.gather(-1, actions).squeeze(-1), ratios

    def gain_gradient(
        self,
        stats: th.Tensor,
        actions: th.Tensor,
        factor: th.Tensor,
        candidates: th.Tensor,
        candidate_factors: th.Tensor,
    ) -> th.Tensor:
        return candidate_factors.scatter_add(-1, actions, factor.unsqueeze(-1)) / (stats + EPSILON)


def _softmax_backward(probabilities: th.Tensor, gradient: th.Tensor) -> th.Tensor:
    result: th.Tensor = th.ops.aten._softmax_backward_data.default(gradient, probabilities, -1, probabilities.dtype)
    return result


def _logits(probabilities: th.Tensor) -> th.Tensor:
    # -1e8 gives a probability of exactly 0 again; the bound of 1e-30 keeps the gradients of tiny ones finite.
    return probabilities.clamp(min=1e-30).log().where(probabilities > 0, -1e8)


def _invert(probabilities: Array, uniforms: Array) -> Array:
    """
    The outcome at which the cumulated probabilities ``[..., n]`` exceed the uniform numbers ``[..., 1]`` times their
    sum. The product is float64 and less than the sum, so an outcome of probability 0 is never drawn.
    """
    cumulated = probabilities.cumsum(-1)
    outcomes: Array = (cumulated <= uniforms * cumulated[..., -1:]).sum(-1)
    return outcomes


class DiagonalGaussian(Family):
    """
    Gaussian with a diagonal covariance. The statistics are the means, followed by the standard deviations.

    Actions are stored as sampled, and log-probabilities and ratios are of these. The environment gets them clipped to
    the bounds of its space, and so does the critic, see :meth:`encode`.

    :param action_space: the Box action space; bounds may be infinite
    :param learn_log_std: whether standard deviations are learnt. If not, all gradients with respect to them are 0, and
        the trust region acts on the means alone, as in the paper.
    """

    normal_noise = True

    def __init__(self, action_space: spaces.Box, learn_log_std: bool = True) -> None:
        super().__init__(action_space)
        self.learn_log_std = learn_log_std
        self.low, self.high, self.dtype = action_space.low, action_space.high, np.dtype(action_space.dtype)
        self.integer = self.dtype.kind in "iu"
        size = int(np.prod(action_space.shape))
        precision = th.float64 if action_space.dtype == np.float64 else th.float32
        low, high = (th.as_tensor(bound.reshape(size), dtype=precision) for bound in (self.low, self.high))
        bounded = (high - low <= WIDEST_BOX) & (low < high)
        centre = th.where(bounded, (low + high) / 2, 0.0)
        self._bounds = (low, high, centre, th.where(bounded, (high - low) / 2, 1.0))
        self.n_components = self.n_features = self.n_outputs = self.n_log_std = self.trace_root = size
        self.n_stats = 2 * size

    def statistics(self, outputs: th.Tensor, log_std: th.Tensor | None, masks: th.Tensor | None = None) -> th.Tensor:
        assert log_std is not None  # and no masks, which check_masks rejects
        return th.cat((outputs, log_std.exp().expand_as(outputs)), -1)

    def statistics_of_arrays(
        self, outputs: np.ndarray, log_std: np.ndarray | None, masks: np.ndarray | None = None
    ) -> np.ndarray:
        assert log_std is not None
        stats = np.empty((len(outputs), self.n_stats), outputs.dtype)
        stats[:, : self.n_components], stats[:, self.n_components :] = outputs, np.exp(log_std)
        return stats

    def backward(self, stats: th.Tensor, stats_gradient: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        mean_gradient, std_gradient = stats_gradient.chunk(2, -1)
        std = stats[0, self.n_components :]  # all rows have the same
        return mean_gradient, std_gradient.sum(0).mul_(std)

    def log_prob(self, stats: th.Tensor, actions: th.Tensor) -> th.Tensor:
        mean, std = stats.chunk(2, -1)
        log_densities: th.Tensor = -(0.5 * ((actions - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi))
        return log_densities.sum(-1)

    def ratio(self, stats: th.Tensor, behaviour: th.Tensor, actions: th.Tensor) -> th.Tensor:
        (mean, std), (mu_mean, mu_std) = stats.chunk(2, -1), behaviour.chunk(2, -1)
        distances, mu_distances = (actions - mean) / std, (actions - mu_mean) / mu_std
        log_ratios = th.addcmul((mu_std / std).log(), mu_distances, mu_distances, value=0.5)
        log_ratios = log_ratios.addcmul_(distances, distances, value=-0.5)
        return log_ratios.sum(-1).clamp(MIN_LOG_RATIO, MAX_LOG_RATIO).exp()

    def entropy(self, stats: th.Tensor) -> th.Tensor:
        std = stats.chunk(2, -1)[1]
        return (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        (mean, std), (other_mean, other_std) = stats.chunk(2, -1), other.chunk(2, -1)
        variance, other_variance = std.square(), other_std.square()
        moments = (variance + (mean - other_mean).square()) / other_variance
        return 0.5 * (moments - 1 + (other_variance / variance).log()).sum(-1)

    def kl_gradient(self, stats: th.Tensor, other: th.Tensor) -> th.Tensor:
        (mean, std), (other_mean, other_std) = stats.chunk(2, -1), other.chunk(2, -1)
        distance = (other_mean - mean) / other_std
        return self._gradient(distance / other_std, (1 - (std / other_std).square() - distance.square()) / other_std)

    def entropy_gradient(self, stats: th.Tensor) -> th.Tensor:
        std = stats.chunk(2, -1)[1]
        return self._gradient(th.zeros_like(std), 1 / std)

    def score(self, stats: th.Tensor, actions: th.Tensor, weights: th.Tensor) -> th.Tensor:
        mean, std = stats.unsqueeze(-2).chunk(2, -1)
        distances = (actions - mean) / std
        scores = self._gradient(distances / std, (distances.square() - 1) / std)
        return (weights.unsqueeze(-1) * scores).sum(-2)

    def _gradient(self, mean_gradient: th.Tensor, std_gradient: th.Tensor) -> th.Tensor:
        return th.cat((mean_gradient, std_gradient if self.learn_log_std else th.zeros_like(std_gradient)), -1)

    def sample(self, stats: th.Tensor, noise: th.Tensor) -> th.Tensor:
        mean, std = stats.chunk(2, -1)
        actions: th.Tensor = mean + std * noise.to(mean.dtype)
        return actions

    def act(self, stats: np.ndarray, noise: np.ndarray) -> np.ndarray:
        # numpy takes a third of torch's time for so few numbers.
        mean, std = stats[:, : self.n_components], stats[:, self.n_components :]
        actions: np.ndarray = mean + std * noise.astype(mean.dtype)
        return actions

    def can_sample(self, actions: th.Tensor) -> bool:
        return actions.shape[-1:] == (self.n_components,) and actions.is_floating_point()

    def mode(self, stats: th.Tensor) -> th.Tensor:
        return stats.chunk(2, -1)[0]

    def encode(self, actions: th.Tensor) -> th.Tensor:
        low, high, centre, scale = (bound.to(actions.device) for bound in self._bounds)
        clipped = actions.clamp(low, high)
        return (((clipped.round() if self.integer else clipped) - centre) / scale).to(actions.dtype)

    def to_env(self, actions: Array) -> Array:
        clipped = actions.reshape(-1, *self.low.shape).clip(_like(actions, self.low), _like(actions, self.high))
        return _cast(clipped.round() if self.integer else clipped, self.dtype)

    def _components(self, actions: np.ndarray) -> np.ndarray:
        components = actions.astype(np.float32)
        if not np.isfinite(components).all():
            raise ValueError(f"actions must be finite, got {actions.tolist()!r}")
        return components

    def action_probability(self, stats: np.ndarray) -> Any:
        parts = stats.reshape(len(stats), 2, *self.low.shape)
        return parts[:, 0], parts[:, 1]

    def distribution(self, stats: th.Tensor) -> Distribution:
        mean, std = stats.chunk(2, -1)
        return DiagGaussianDistribution(self.n_components).proba_distribution(mean, std.log())


def _like(array: Array, other: Any) -> Array:
    """An array of numpy as what ``array`` is: an array, or a tensor on its device."""
    return th.as_tensor(other, device=array.device) if isinstance(array, th.Tensor) else np.asarray(other)


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    if isinstance(array, th.Tensor):
        return array.to(getattr(th, dtype.name))
    return array.astype(dtype, copy=False)


def make_family(action_space: spaces.Space[Any], learn_log_std: bool = True) -> Family:
    """
    The family of an action space: Discrete, MultiDiscrete and MultiBinary are categorical, Box is Gaussian.

    :param action_space: the action space
    :param learn_log_std: see :class:`DiagonalGaussian`
    :raises ValueError: for any other space, for MultiBinary of a shape, for an empty Box, and for NaN in its bounds
    """
    if isinstance(action_space, spaces.Discrete):
        return Enumerated(action_space)
    if isinstance(action_space, spaces.MultiDiscrete):
        return Categorical(action_space, action_space.nvec.flatten().tolist())
    if isinstance(action_space, spaces.MultiBinary):
        if not isinstance(action_space.n, int):  # SB3 asserts this, with the same words
            raise ValueError(
                f"Multi-dimensional {action_space} action space is not supported: action_space must be Discrete, "
                "MultiDiscrete, MultiBinary of a number of bits, or Box"
            )
        return Binary(action_space)
    if isinstance(action_space, spaces.Box):
        bounds = np.stack([action_space.low, action_space.high])
        if bounds.size > 0 and not np.isnan(bounds).any():
            return DiagonalGaussian(action_space, learn_log_std)
    raise ValueError(
        "action_space must be Discrete, MultiDiscrete, MultiBinary, or a Box of at least one value without NaN in its "
        f"bounds, got {action_space!r}"
    )
