"""LSTMs over sequences in which episodes end and begin, and one step at a time."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch as th
from torch import nn
from torch.nn.utils.rnn import PackedSequence


class Segments(NamedTuple):
    """
    How the rows of some sequences fall into stretches of one episode each.

    Packed, as an LSTM takes them: the first rows of all segments, longest segment first, then the second rows of those
    that have one, and so on. So one call runs all of them, wherever episodes begin, each from a state of its own.
    """

    order: th.Tensor
    """the rows as they are packed, ``[N]``"""
    places: th.Tensor
    """the inverse of ``order``: where each row is packed, ``[N]``"""
    sizes: th.Tensor
    """how many segments have a first row, a second row, and so on; on the CPU"""
    first: th.Tensor
    """the segment that each sequence begins with, ``[B]``"""
    last: th.Tensor
    """the segment that each sequence ends with, ``[B]``"""


def make_segments(ends: th.Tensor, final_steps: th.Tensor | None = None) -> Segments:
    """
    A final observation is the last row of the episode that it is from.

    :param ends: whether an episode ended between a row and the next, bool, ``[T, B]``: sequences of T + 1 rows
    :param final_steps: the rows, as t * B + b, whose episode ended with an observation of its own, ``[F]``: these
        observations follow as the rows (T + 1) * B and on
    :return: the segments of these (T + 1) * B + F rows
    """
    n_sequences = ends.shape[1]
    starts = np.zeros((len(ends) + 1, n_sequences), np.int64)
    starts[1:] = ends.cpu().numpy()
    times = np.arange(len(starts))[:, np.newaxis]
    positions = times - np.maximum.accumulate(times * starts)
    names = starts.cumsum(0) * n_sequences + np.arange(n_sequences)  # 0 to B - 1 are the first segments'
    cut = np.zeros(0, np.int64) if final_steps is None else final_steps.cpu().numpy()
    position = np.concatenate((positions.ravel(), positions.ravel()[cut] + 1))
    segment, lengths = np.unique(np.concatenate((names.ravel(), names.ravel()[cut])), False, True, True)[1:]
    ranks = np.argsort(np.argsort(-lengths, kind="stable"))
    order = np.argsort(position * len(lengths) + ranks[segment])
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    last = ranks[segment[names.size - n_sequences : names.size]]
    columns = (th.from_numpy(column).to(ends.device) for column in (order, places, ranks[:n_sequences], last))
    order_, places_, first_, last_ = columns
    return Segments(order_, places_, th.from_numpy(np.bincount(position)), first_, last_)


class Recurrent(nn.Module, ABC):
    """
    A recurrent network whose state is one vector an environment: the outputs h of all layers, then their cells c.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    """

    def __init__(self, input_size: int, hidden_size: int, n_layers: int = 1) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.n_layers = n_layers
        self.state_size = 2 * n_layers * hidden_size  # W

    def forward(
        self, features: th.Tensor, states: th.Tensor, segments: Segments | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        :param features: ``[N, I]``
        :param states: in which each of B sequences begins, ``[B, W]``; its other segments begin in the zero state
        :param segments: of the N rows; None if they are one step of N = B sequences
        :return: outputs in the order of the rows, ``[N, H]``, and the states in which each sequence ends, ``[B, W]``
        """
        if segments is None:
            return self._step(features, states)
        begin = states.new_zeros((int(segments.sizes[0]), self.state_size)).index_copy(0, segments.first, states)
        hidden, cell = begin.view(-1, 2, self.n_layers, self.hidden_size).permute(1, 2, 0, 3).contiguous()
        outputs, after = self._run(features.index_select(0, segments.order), segments.sizes, hidden, cell)
        end = th.stack(after).permute(2, 0, 1, 3).flatten(1)
        return outputs.index_select(0, segments.places), end.index_select(0, segments.last)

    def _step(self, features: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        hidden, cell = states.view(-1, 2, self.n_layers, self.hidden_size).unbind(1)
        hiddens, cells = [], []
        for layer in range(self.n_layers):
            features, after = self._cell(layer, features, hidden[:, layer], cell[:, layer])
            hiddens.append(features)
            cells.append(after)
        return features, th.cat(hiddens + cells, -1)

    @abstractmethod
    def orthogonal_(self) -> None:
        """Initialise the weights orthogonally, and the biases at 0."""

    @abstractmethod
    def _run(
        self, rows: th.Tensor, sizes: th.Tensor, hidden: th.Tensor, cell: th.Tensor
    ) -> tuple[th.Tensor, tuple[th.Tensor, th.Tensor]]:
        """Outputs of packed rows, and all segments' h and c after them, ``[layers, segments, H]`` as before them."""

    @abstractmethod
    def _cell(self, layer: int, features: th.Tensor, hidden: th.Tensor, cell: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """One step of one layer: h and c after it, from those before, ``[N, H]``."""


class LSTM(Recurrent):
    """
    PyTorch's LSTM.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    :param bias: whether there are biases
    :param dropout: share of the outputs of all layers but the last that an update drops, by torch's global generator
    """

    def __init__(
        self, input_size: int, hidden_size: int, n_layers: int = 1, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(input_size, hidden_size, n_layers)
        self.lstm = nn.LSTM(input_size, hidden_size, n_layers, bias=bias, dropout=dropout)

    def orthogonal_(self) -> None:
        for name, parameter in self.lstm.named_parameters():
            _ = nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def _run(
        self, rows: th.Tensor, sizes: th.Tensor, hidden: th.Tensor, cell: th.Tensor
    ) -> tuple[th.Tensor, tuple[th.Tensor, th.Tensor]]:
        outputs, after = self.lstm(PackedSequence(rows, sizes), (hidden, cell))
        return outputs.data, after

    def _cell(self, layer: int, features: th.Tensor, hidden: th.Tensor, cell: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        # A quarter of the time that the module takes for one step.
        return th.lstm_cell(features, (hidden, cell), *self.lstm.all_weights[layer])


class LayerNormLSTM(Recurrent):
    """
    stable-baselines' layer-normalised LSTM (Ba et al., arXiv 1607.06450): what comes from below, what comes from the
    step before, and the cell where it is put out are normalised, each with a gain and a bias of its own.

    :param input_size: width of the features (I)
    :param hidden_size: width of the output (H)
    :param n_layers: number of layers
    """

    def __init__(self, input_size: int, hidden_size: int, n_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, n_layers)
        sizes = [input_size] + [hidden_size] * (n_layers - 1)
        self.layers = nn.ModuleList(LayerNormLSTMCell(size, hidden_size) for size in sizes)

    def orthogonal_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)

    def _run(
        self, rows: th.Tensor, sizes: th.Tensor, hidden: th.Tensor, cell: th.Tensor
    ) -> tuple[th.Tensor, tuple[th.Tensor, th.Tensor]]:
        steps = sizes.tolist()
        hiddens, cells = [], []
        layer: Any
        for layer, h, c in zip(self.layers, hidden, cell, strict=True):
            outputs, ended = [], []
            for inputs in layer.input_gates(rows).split(steps):
                running = len(inputs)
                if running < len(h):  # the shortest segments come last
                    ended.append((h[running:], c[running:]))
                h, c = layer(inputs, h[:running], c[:running])
                outputs.append(h)
            rows = th.cat(outputs)
            h, c = (th.cat(parts) for parts in zip((h, c), *reversed(ended), strict=True))
            hiddens.append(h)
            cells.append(c)
        return rows, (th.stack(hiddens), th.stack(cells))

    def _cell(self, layer: int, features: th.Tensor, hidden: th.Tensor, cell: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        module: Any = self.layers[layer]
        after: tuple[th.Tensor, th.Tensor] = module(module.input_gates(features), hidden, cell)
        return after


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
        """LN(W x), ``[N, 4 H]``, from ``[N, I]``: this needs no step before."""
        gates: th.Tensor = self.input_norm(self.input(features))
        return gates

    def forward(self, input_gates: th.Tensor, hidden: th.Tensor, cell: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """h' and c', ``[N, H]``, from :meth:`input_gates`, h and c."""
        i, f, g, o = (input_gates + self.hidden_norm(self.hidden(hidden))).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * self.cell_norm(cell).tanh(), cell
