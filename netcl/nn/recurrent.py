"""Recurrent networks, with torch's weights: ``weight_ih_l0``, ``weight_hh_l0``, ``bias_ih_l0``, ``bias_hh_l0``, ``..._reverse``.

Layers project their input for all time steps at once; the op ``recurrent`` then runs the steps of one direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import empty
from netcl.nn.utils.rnn import PackedSequence, reordered

State = tuple[Tensor, ...]


def _run_cells(
    owner: Module, kind: str, suffix: str, x: Tensor, state: State, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, State]:
    """Run the steps of ``x`` (time, batch, features) with the weights of ``owner`` named ``...suffix``; return y and the last state."""
    names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
    weights: list[Any] = [getattr(owner, name + suffix, None) for name in names]
    weight_ih, bias, weight_hh, inner, projection = weights
    if kind != "gru" and inner is not None:  # a GRU's candidate needs its recurrent half separately
        bias, inner = ag.add(bias, inner), None
    h, c = (*state, None, None)[:2]
    y, *ends, _ = ag.recurrent(ag.linear(x, weight_ih, bias), weight_hh, inner, h, c, projection, lengths, kind=kind, reverse=reverse)
    return y, tuple(ends)


class _Recurrent(Module):
    """Base class of recurrent networks: layers, directions and layouts; a subclass sets the kind of cell."""

    kind = "tanh"
    gates = 1
    states: tuple[str, ...] = ("h_0",)
    proj_size = 0

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
                 dropout: float = 0.0, bidirectional: bool = False):  # fmt: skip
        super().__init__()
        if hidden_size < 1 or num_layers < 1:
            what = "hidden_size and num_layers must be at least 1"
            raise ShapeError(message(type(self).__name__, what, hidden_size=hidden_size, num_layers=num_layers))
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        self._has_bias = bias
        for layer in range(num_layers):
            for suffix in self._directions():
                width = input_size if layer == 0 else self._state_sizes()[0] * len(self._directions())
                self._add(f"_l{layer}{suffix}", width)
        self.reset_parameters()

    def _directions(self) -> Sequence[str]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _state_sizes(self) -> tuple[int, ...]:
        """Return the width of each part of the state; the first is the output."""
        return (self.proj_size or self.hidden_size, self.hidden_size)[: len(self.states)]

    def _add(self, suffix: str, width: int) -> None:
        rows = self.gates * self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, self._state_sizes()[0])}
        if self._has_bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if self.proj_size:
            shapes |= {"weight_hr": (self.proj_size, self.hidden_size)}
        for name, shape in shapes.items():
            self.register_parameter(name + suffix, empty(shape))

    def reset_parameters(self) -> None:
        """Reinitialize the parameters uniformly in ``[-b, b]``, ``b = 1 / sqrt(hidden_size)``."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Do nothing: torch calls this for cuDNN, which needs the weights in one block."""

    def _layer(self, x: Tensor, layer: int, states: Sequence[State], lengths: Tensor | None) -> tuple[Tensor, list[State]]:
        """Return the output of one layer over ``x`` (time, batch, features), and the final state of each direction."""
        outputs, finals = [], []
        for direction, name in enumerate(self._directions()):
            y, ends = _run_cells(self, self.kind, f"_l{layer}{name}", x, states[direction], lengths, bool(name))
            outputs.append(y)
            finals.append(ends)
        return (outputs[0] if len(outputs) == 1 else ag.cat(outputs, axis=-1)), finals

    def forward(self, x: Tensor | PackedSequence, state: Any = None) -> tuple[Any, Any]:
        if isinstance(x, PackedSequence):
            padded, lengths = x.padded()
            y, hidden = self._run(self._check_input(padded, "(time, batch, features)"), reordered(state, x.sorted_indices), lengths)
            return x.with_data(y), reordered(hidden, x.unsorted_indices)
        layout = "(batch, time, features)" if self.batch_first else "(time, batch, features)"
        self._check_input(x, f"{layout} or (time, features)", 2)
        if x.ndim == 2:
            if state is not None:
                parts = state if isinstance(state, tuple | list) else (state,)
                self._check_state(parts)
                state = tuple(ag.unsqueeze(part, 1) for part in parts)
            y, hidden = self._run(ag.unsqueeze(x, 1), state, None)
            ends = tuple(ag.squeeze(h, 1) for h in (hidden if isinstance(hidden, tuple) else (hidden,)))
            return ag.squeeze(y, 1), ends if len(ends) > 1 else ends[0]
        y, hidden = self._run(ag.transpose(x, 0, 1) if self.batch_first else x, state, None)
        return (ag.transpose(y, 0, 1) if self.batch_first else y), hidden

    def _run(self, x: Tensor, state: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
        """Run all layers over ``x`` (time, batch, features); returns the output and the final state."""
        given = self._initial(state, x)
        finals: list[State] = []
        count = len(self._directions())
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = ag.dropout(x, self.dropout, self.training)
            x, ends = self._layer(x, layer, given[layer * count : (layer + 1) * count], lengths)
            finals += ends
        parts = list(zip(*finals, strict=True))
        hidden = tuple(ag.unsqueeze(part[0], 0) if len(part) == 1 else ag.stack(part, axis=0) for part in parts)
        return x, hidden if len(hidden) > 1 else hidden[0]

    def _check_input(self, x: Tensor, layout: str, least: int = 3) -> Tensor:
        if not least <= x.ndim <= 3 or x.shape[-1] != self.input_size:
            raise ShapeError(message(type(self).__name__, f"the input must be {layout}, with {self.input_size} features", shape=x.shape))
        if x.shape[1 if self.batch_first and x.ndim == 3 and least == 2 else 0] == 0:
            raise ShapeError(message(type(self).__name__, "the input must have at least 1 time step", shape=x.shape))
        return x

    def _check_state(self, parts: Sequence[Tensor], *batch: int) -> None:
        expected = [(self.num_layers * len(self._directions()), *batch, size) for size in self._state_sizes()]
        if [part.shape for part in parts] != expected:
            shapes, wanted = [part.shape for part in parts], ", ".join(map(str, expected))
            raise ShapeError(message(type(self).__name__, f"the state must be {', '.join(self.states)} of shape {wanted}", shapes=shapes))

    def _initial(self, state: Any, x: Tensor) -> list[State]:
        """Return the initial state of every direction of every layer. Without a given state, empty tuples stand for zeros."""
        if state is None:
            return [()] * (self.num_layers * len(self._directions()))
        parts = state if isinstance(state, tuple | list) else (state,)
        self._check_state(parts, x.shape[1])
        split = [[ag.reshape(row, row.shape[1:]) for row in ag.split(part, 1, axis=0)] for part in parts]
        return list(zip(*split, strict=True))

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        steps = args[0].size // self.input_size
        return sum(2 * p.size * steps for _, p in self.named_parameters() if p.ndim == 2)


class RNN(_Recurrent):
    """A plain recurrent network: ``h_t = tanh(W_ih x_t + b_ih + W_hh h_(t-1) + b_hh)``.

    - **input_size**, **hidden_size**, **num_layers**, **nonlinearity** (``tanh`` or ``relu``), **bias**, **batch_first**, **dropout**
      (between layers), **bidirectional**: as in torch.

    Shapes: ``x`` ``(time, batch, input_size)``, or ``(batch, time, input_size)`` with ``batch_first``, or without a batch. Returns
    ``output``, like ``x`` with width ``directions * hidden_size``, and ``h_n`` ``(num_layers * directions, batch, hidden_size)``.

    >>> from netcl import nn, zeros
    >>> output, h = nn.RNN(3, 5, num_layers=2)(zeros((7, 2, 3)))
    >>> output.shape, h.shape
    ((7, 2, 5), (2, 2, 5))
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False):  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(message("RNN", "nonlinearity must be tanh or relu", nonlinearity=repr(nonlinearity)))
        self.kind = self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)


class LSTM(_Recurrent):
    """Long short-term memory with gates ``i, f, o`` and a candidate ``g``, all parts of ``W_ih x_t + b_ih + W_hh h_(t-1) + b_hh``.

    ``c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)`` and ``h_t = sigmoid(o) tanh(c_t)``.

    - **input_size**, **hidden_size**, **num_layers**, **bias**, **batch_first**, **dropout** (between layers), **bidirectional**: as in
      torch. The rows of the weights are in the order ``i, f, g, o``.
    - **proj_size**: if positive, ``h_t`` is projected to this width by ``weight_hr_l0``, ..., as in torch.

    Shapes: as in :class:`RNN`. The state, given and returned, is the pair ``(h, c)``. With ``proj_size``, ``h`` and the output have
    this width.

    >>> from netcl import nn, zeros
    >>> output, (h, c) = nn.LSTM(3, 5, batch_first=True, bidirectional=True)(zeros((2, 7, 3)))
    >>> output.shape, h.shape, c.shape
    ((2, 7, 10), (2, 2, 5), (2, 2, 5))
    """

    kind = "lstm"
    gates = 4
    states = ("h_0", "c_0")

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
                 dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0):  # fmt: skip
        if not 0 <= proj_size < hidden_size:
            raise ShapeError(message("LSTM", "proj_size must be from 0 to hidden_size - 1", proj_size=proj_size, hidden_size=hidden_size))
        self.proj_size = proj_size
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)


class GRU(_Recurrent):
    """Gated recurrent units: ``h_t = (1 - z) n + z h_(t-1)``.

    ``r = sigmoid(x_r + h_r)``, ``z = sigmoid(x_z + h_z)``, ``n = tanh(x_n + r h_n)``, with the parts ``x_*`` of
    ``W_ih x_t + b_ih`` and ``h_*`` of ``W_hh h_(t-1) + b_hh``.

    - **input_size**, **hidden_size**, **num_layers**, **bias**, **batch_first**, **dropout** (between layers), **bidirectional**: as in
      torch. The rows of the weights are in the order ``r, z, n``.

    Shapes: as in :class:`RNN`.

    >>> from netcl import nn, zeros
    >>> output, h = nn.GRU(3, 5)(zeros((7, 2, 3)))
    >>> output.shape, h.shape
    ((7, 2, 5), (1, 2, 5))
    """

    kind = "gru"
    gates = 3


class _Cell(Module):
    """One step of a recurrent layer, with torch's weights."""

    of: type[_Recurrent]

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True):
        super().__init__()
        self.kind = self.of.kind
        self.input_size, self.hidden_size, rows = input_size, hidden_size, self.of.gates * hidden_size
        self.weight_ih, self.weight_hh = empty((rows, input_size)), empty((rows, hidden_size))
        self.bias_ih = empty((rows,)) if bias else None
        self.bias_hh = empty((rows,)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters uniformly in ``[-b, b]``, ``b = 1 / sqrt(hidden_size)``."""
        _Recurrent.reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if input.shape[-1:] != (self.input_size,):
            what = f"the last axis of the input must have {self.input_size} elements"
            raise ShapeError(message(type(self).__name__, what, **{"input.shape": input.shape}))
        shape = (*input.shape[:-1], self.hidden_size)
        state = () if hx is None else tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        if hx is not None and [part.shape for part in state] != [shape] * len(self.of.states):
            shapes = [part.shape for part in state]
            raise ShapeError(message(type(self).__name__, f"state must be {len(self.of.states)} tensor(s) of shape {shape}", shapes=shapes))
        rows = tuple(ag.reshape(part, (-1, self.hidden_size)) for part in state)
        _, ends = _run_cells(self, self.kind, "", ag.reshape(input, (1, -1, self.input_size)), rows)
        ends = tuple(ag.reshape(part, shape) for part in ends)
        return ends if len(ends) > 1 else ends[0]


class RNNCell(_Cell):
    """One step of :class:`RNN`: ``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``, or ``relu``.

    >>> from netcl import nn
    >>> nn.RNNCell(3, 5)([[1.0, 2.0, 3.0]]).shape
    (1, 5)
    """

    of = RNN

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh"):
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(message("RNNCell", "nonlinearity must be tanh or relu", nonlinearity=repr(nonlinearity)))
        super().__init__(input_size, hidden_size, bias)
        self.kind = self.nonlinearity = nonlinearity


class LSTMCell(_Cell):
    """One step of :class:`LSTM`: takes ``x`` and ``(h, c)``, returns ``(h', c')``.

    >>> from netcl import nn
    >>> h, c = nn.LSTMCell(3, 5)([[1.0, 2.0, 3.0]])
    >>> h.shape, c.shape
    ((1, 5), (1, 5))
    """

    of = LSTM


class GRUCell(_Cell):
    """One step of :class:`GRU`.

    >>> from netcl import nn
    >>> nn.GRUCell(3, 5)([[1.0, 2.0, 3.0]]).shape
    (1, 5)
    """

    of = GRU
