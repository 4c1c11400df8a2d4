"""
Recurrent modules, between the features and the heads of a policy. Their state is one vector per environment, 0 where an
episode begins.

To add one, subclass :class:`Recurrent`, or :class:`Gated` for cells that run over padded sequences.
"""

import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch as th
from torch import nn

from sb3_acer.checks import check_integer, require

# The weights are parts of one vector (parameters.py), which cuDNN puts together again for each call.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)


class Recurrent(nn.Module, ABC):
    """
    What :class:`~sb3_acer.policies.ACERPolicy` needs of a recurrent module. The policy constructs one with the width of
    the features, its ``lstm_hidden_size`` and ``n_lstm_layers`` in this order, and its ``lstm_kwargs`` by name.

    :param input_size: width of the features (I)
    :param output_size: width of the output (H)
    :param state_size: width of the state (W)
    """

    def __init__(self, input_size: int, output_size: int, state_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.state_size = state_size

    @abstractmethod
    def step(self, features: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        One step of N environments.

        :param features: ``[N, I]``
        :param states: ``[N, W]``
        :return: outputs, ``[N, H]``, and the states after the step, ``[N, W]``
        """

    @abstractmethod
    def sequence(self, features: th.Tensor, states: th.Tensor, ends: th.Tensor, final_steps: th.Tensor) -> th.Tensor:
        """
        B sequences of T + 1 rows, in which episodes end and begin. A new episode begins in the zero state.

        :param features: ``[(T + 1) * B + F, I]``: the rows, time-major, then F final observations of truncated episodes
        :param states: states at the first row of each sequence, ``[B, W]``
        :param ends: whether an episode ended between a row and the next, bool, ``[T, B]``
        :param final_steps: the row, as t * B + b, that each final observation follows in its episode, ``[F]``
        :return: outputs in the order of the features, ``[(T + 1) * B + F, H]``
        """

    @abstractmethod
    def orthogonal_(self) -> None:
        """Initialise the matrices orthogonally and the biases at 0."""


class Identity(Recurrent):
    """
    No recurrence: the output is the input, and the state has width 0.

    :param input_size: width of the features (I)
    """

    def __init__(self, input_size: int) -> None:
        super().__init__(input_size, input_size, 0)

    def step(self, features: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        return features, states

    def sequence(self, features: th.Tensor, states: th.Tensor, ends: th.Tensor, final_steps: th.Tensor) -> th.Tensor:
        return features

    def orthogonal_(self) -> None:
        """There is nothing to initialise."""


def make_segments(ends: th.Tensor, final_steps: th.Tensor) -> tuple[th.Tensor, int, int]:
    """
    Divide the rows of B sequences into segments that lie within one episode each. The first B segments begin the
    sequences. A final observation is the last row of its episode's segment.

    Side by side, padded to the length of the longest, the segments are one batch for PyTorch's recurrent modules. On a
    CPU this takes a sixth of the time of packed sequences, for which PyTorch has no single operation.

    :param ends: see :meth:`Recurrent.sequence`
    :param final_steps: see :meth:`Recurrent.sequence`
    :return: where each of the (T + 1) * B + F rows is, as position * n_segments + segment; the length of the longest
        segment; n_segments
    """
    n_sequences = ends.shape[1]
    starts = np.zeros((len(ends) + 1, n_sequences), np.int64)
    starts[1:] = ends.cpu().numpy()
    times = np.arange(len(starts))[:, np.newaxis]
    positions = times - np.maximum.accumulate(times * starts)
    n_segments = n_sequences + int(starts.sum())
    # Segments after the first B, numbered sequence by sequence.
    later = starts.T.cumsum().reshape(n_sequences, -1).T + n_sequences - 1
    segments = np.where(positions == times, np.arange(n_sequences), later)
    before = final_steps.cpu().numpy()
    position = np.concatenate((positions.ravel(), positions.ravel()[before] + 1))
    segment = np.concatenate((segments.ravel(), segments.ravel()[before]))
    places = th.from_numpy(position * n_segments + segment).to(ends.device)
    return places, int(position.max()) + 1, n_segments


class Gated(Recurrent):
    """
    A recurrent network of layers of gated cells.

    The state consists of ``n_parts`` parts, each with H numbers of every layer: the outputs h, and for an LSTM the
    cells c after them.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers (L)
    """

    n_parts: ClassVar[int] = 1

    def __init__(self, input_size: int, hidden_size: int, n_layers: int) -> None:
        super().__init__(input_size, hidden_size, self.n_parts * n_layers * hidden_size)
        self.hidden_size = hidden_size
        self.n_layers = n_layers

    def step(self, features: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        parts = states.view(-1, self.n_parts, self.n_layers, self.hidden_size)
        after = []
        for layer in range(self.n_layers):
            cell = self._cell(layer, features, *parts[:, :, layer].unbind(1))
            features = cell[0]
            after.append(th.stack(cell, 1))
        return features, th.stack(after, 2).flatten(1)

    def sequence(self, features: th.Tensor, states: th.Tensor, ends: th.Tensor, final_steps: th.Tensor) -> th.Tensor:
        places, length, n_segments = make_segments(ends, final_steps)
        begin = th.cat((states, states.new_zeros(n_segments - len(states), self.state_size)))
        parts = begin.view(-1, self.n_parts, self.n_layers, self.hidden_size).permute(1, 2, 0, 3).contiguous()
        padded = features.new_zeros(length * n_segments, self.input_size).index_copy(0, places, features)
        outputs = self._run(padded.view(length, n_segments, -1), *parts)
        return outputs.flatten(0, 1).index_select(0, places)

    @abstractmethod
    def _cell(self, layer: int, features: th.Tensor, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
        """One step of one layer: the parts of its state after the step, from those before it, ``[N, H]`` each."""

    @abstractmethod
    def _run(self, rows: th.Tensor, *parts: th.Tensor) -> th.Tensor:
        """
        All steps of S segments.

        :param rows: ``[steps, S, I]``
        :param parts: parts of the state before the first row of each segment, ``[L, S, H]`` each
        :return: outputs, ``[steps, S, H]``
        """


class LSTM(Gated):
    """
    PyTorch's LSTM.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    :param bias: whether there are biases
    :param dropout: share of the outputs of all layers but the last that an update drops, drawn from torch's global
        generator
    :param chrono_init: the most steps over which something has to be remembered (T_max), for the chrono
        initialisation of the gates' biases (Tallec and Ollivier, arXiv 1804.11188): before training cells remember for
        2 to T_max steps. None: these biases are initialised as the others, and cells remember for about 2 steps
    :raises ValueError: if ``chrono_init`` is no integer of at least 3, or given without ``bias``
    """

    n_parts = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        n_layers: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        chrono_init: int | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, n_layers)
        if chrono_init is not None:
            check_integer("chrono_init", chrono_init, 3)
            require(bias, "chrono_init", "None where bias is False", chrono_init)
        self.lstm = nn.LSTM(input_size, hidden_size, n_layers, bias=bias, dropout=dropout)
        self.chrono_init = chrono_init
        self._chrono()

    def orthogonal_(self) -> None:
        _orthogonal(self.lstm)
        self._chrono()

    @th.no_grad()
    def _chrono(self) -> None:
        if self.chrono_init is None:
            return
        for _, _, input_bias, hidden_bias in self.lstm.all_weights:
            forget = th.empty(self.hidden_size).uniform_(1, self.chrono_init - 1).log_()
            input_bias[: 2 * self.hidden_size] = th.cat((-forget, forget))  # of the input gates and of the forget gates
            hidden_bias[: 2 * self.hidden_size] = 0

    def _cell(self, layer: int, features: th.Tensor, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
        # The functional form takes a quarter of the module's time for one step.
        return th.lstm_cell(features, parts, *self.lstm.all_weights[layer])

    def _run(self, rows: th.Tensor, *parts: th.Tensor) -> th.Tensor:
        outputs: th.Tensor = self.lstm(rows, parts)[0]
        return outputs


class GRU(Gated):
    """
    PyTorch's GRU (Cho et al., arXiv 1406.1078).

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    :param bias: whether there are biases
    :param dropout: see :class:`LSTM`
    """

    def __init__(
        self, input_size: int, hidden_size: int, n_layers: int = 1, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(input_size, hidden_size, n_layers)
        self.gru = nn.GRU(input_size, hidden_size, n_layers, bias=bias, dropout=dropout)

    def orthogonal_(self) -> None:
        _orthogonal(self.gru)

    def _cell(self, layer: int, features: th.Tensor, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
        return (th.gru_cell(features, *parts, *self.gru.all_weights[layer]),)

    def _run(self, rows: th.Tensor, *parts: th.Tensor) -> th.Tensor:
        outputs: th.Tensor = self.gru(rows, *parts)[0]
        return outputs


def _orthogonal(module: nn.RNNBase) -> None:
    for name, parameter in module.named_parameters():
        (nn.init.zeros_ if "bias" in name else nn.init.orthogonal_)(parameter)


class LayerNormLSTM(Gated):
    """
    stable-baselines' layer-normalised LSTM (Ba et al., arXiv 1607.06450). The input's contribution to the gates, the
    contribution of the previous output, and the cell before its output are normalised, each with a gain and a bias.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    """

    n_parts = 2

    def __init__(self, input_size: int, hidden_size: int, n_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, n_layers)
        sizes = [input_size] + [hidden_size] * (n_layers - 1)
        self.layers = nn.ModuleList(LayerNormLSTMCell(size, hidden_size) for size in sizes)

    def orthogonal_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def _cell(self, layer: int, features: th.Tensor, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
        module: Any = self.layers[layer]
        after: tuple[th.Tensor, ...] = module(module.input_gates(features), *parts)
        return after

    def _run(self, rows: th.Tensor, *parts: th.Tensor) -> th.Tensor:
        layer: Any
        for layer, h, c in zip(self.layers, *parts, strict=True):
            outputs = []
            for inputs in layer.input_gates(rows):
                h, c = layer(inputs, h, c)
                outputs.append(h)
            rows = th.stack(outputs)
        return rows


class LayerNormLSTMCell(nn.Module):
    r"""
    One layer: :math:`(i, f, g, o) = LN(W x) + LN(U h)`,
    :math:`c' = \sigma(f) c + \sigma(i) \tanh(g)`, :math:`h' = \sigma(o) \tanh(LN(c'))`.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.hidden = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.input_norm = nn.LayerNorm(4 * hidden_size)
        self.hidden_norm = nn.LayerNorm(4 * hidden_size)
        self.cell_norm = nn.LayerNorm(hidden_size)

    def input_gates(self, features: th.Tensor) -> th.Tensor:
        """LN(W x), ``[N, 4 H]``, from ``[N, I]``, which does not depend on the previous step."""
        gates: th.Tensor = self.input_norm(self.input(features))
        return gates

    def forward(self, input_gates: th.Tensor, hidden: th.Tensor, cell: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """h' and c', ``[N, H]`` each, from :meth:`input_gates`, h and c."""
        i, f, g, o = (input_gates + self.hidden_norm(self.hidden(hidden))).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * self.cell_norm(cell).tanh(), cell
