"""``RNN``, ``LSTM`` and ``GRU``, computed by the op ``recurrent`` if it has the cell of the node, else step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS
from netcl.io.onnx.table import OnnxNode

#: Order of ONNX's gates in that of the op, and the functions of the cells.
_ORDERS = {"RNN": [0], "LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2]}
_CELL_FUNCTIONS = {"RNN": ["Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
#: Functions of cells with the defaults of ``alpha`` and ``beta``.
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "relu": (ag.relu, ()),
    "tanh": (ag.tanh, ()),
    "sigmoid": (ag.sigmoid, ()),
    "softsign": (ag.softsign, ()),
    "softplus": (ag.softplus, ()),
    "affine": (lambda x, a, b: ag.add(ag.mul(x, a), b), (1.0, 0.0)),
    "leakyrelu": (lambda x, a: ag.leaky_relu(x, a), (0.01,)),
    "thresholdedrelu": (lambda x, a: ag.where(ag.gt(x, a), x, 0.0), (1.0,)),
    "scaledtanh": (lambda x, a, b: ag.mul(ag.tanh(ag.mul(x, b)), a), (1.0, 1.0)),
    "hardsigmoid": (lambda x, a, b: ag.clamp(ag.add(ag.mul(x, a), b), 0.0, 1.0), (0.2, 0.5)),
    "elu": (lambda x, a: ag.elu(x, a), (1.0,)),
}


def _read_recurrent(
    node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, b: Any = None, lengths: Any = None, h0: Any = None, c0: Any = None, p: Any = None
) -> tuple[Tensor, ...]:
    """Run ``RNN``, ``GRU`` or ``LSTM`` on ONNX's inputs (W, R, B, P); outputs are stacked over directions. ``layout=1`` is batch first."""
    directions, batch_first = w.shape[0], bool(node["layout"])
    names = list(node["activations"] or _CELL_FUNCTIONS[node.kind] * directions)
    x, h0, c0 = (t if t is None or not batch_first else ag.transpose(t, 0, 1) for t in (x, h0, c0))
    lengths = None if lengths is None else ag.cast(lengths, "int32")
    each, parameters, made = len(names) // directions, [iter(node[f"activation_{name}"] or ()) for name in ("alpha", "beta")], []
    for d in range(directions):
        states: list[Any] = [None if t is None else ag.select(t, 0, d) for t in (b, h0, c0, p)]
        functions = list(_functions(node, names[d * each : (d + 1) * each], parameters))
        made.append(_direction(node, x, ag.select(w, 0, d), ag.select(r, 0, d), states, lengths, functions, d))
    y, *last = (ag.stack(list(part), 1 if i == 0 else 0) for i, part in enumerate(zip(*made, strict=True)))
    if batch_first:
        return ag.permute(y, (2, 0, 1, 3)), *(ag.transpose(t, 0, 1) for t in last)
    return y, *last


def _functions(node: OnnxNode, names: list[str], parameters: list[Iterator[float]]) -> Iterator[Any]:
    """Yield the name and the function of each activation. ``parameters`` iterate over the node's alpha and beta values, in order."""
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise node.fault(f"an activation must be one of {', '.join(_ACTIVATIONS)}", activation=name)
        function, usual = _ACTIVATIONS[name.lower()]
        values = [next(numbers, value) for numbers, value in zip(parameters, usual, strict=False)]
        yield name.lower(), lambda x, function=function, values=values: function(x, *values)


def _direction(
    node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, states: list[Any], lengths: Any, functions: list[Any], d: int
) -> tuple[Tensor, ...]:
    b, h0, c0, p = states
    kind, gates, reverse = node.kind, len(_ORDERS[node.kind]), d == 1 or node["direction"] == "reverse"
    names, hidden = [name for name, _ in functions], r.shape[1]
    own = [name.lower() for name in _CELL_FUNCTIONS[kind]]
    plain = names == own or (kind == "RNN" and names == ["relu"])
    plain = plain and p is None and not node["clip"] and not node["input_forget"] and (kind != "GRU" or bool(node["linear_before_reset"]))
    if not plain:
        return _by_steps(node, x, w, r, b, h0, c0, p, lengths, [function for _, function in functions], reverse)

    def ordered(t: Any) -> Any:
        if t is None or gates == 1:
            return t
        parts = ag.split(t, hidden)
        return ag.cat([parts[i] for i in _ORDERS[kind]])

    wb, rb = map(ordered, (None, None) if b is None else ag.split(b, gates * hidden))
    first = wb if kind == "GRU" or b is None else ag.add(wb, rb)
    if kind == "LSTM" and (h0 is None) != (c0 is None):
        zeros = Tensor.zeros((x.shape[1], hidden), x.dtype, queue=x.queue)
        h0, c0 = zeros if h0 is None else h0, zeros if c0 is None else c0
    gx = ag.linear(x, ordered(w), first)
    cell = names[0] if kind == "RNN" else kind.lower()
    made = ag.recurrent(gx, ordered(r), rb if kind == "GRU" else None, h0, c0, None, lengths, kind=cell, reverse=reverse)
    return tuple(made[: 3 if kind == "LSTM" else 2])


def _by_steps(
    node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, b: Any, h0: Any, c0: Any, p: Any, lengths: Any, functions: Any, reverse: bool
) -> Any:
    """Run one direction step by step, with clipping, peepholes, coupled gates and any activation."""
    kind, hidden, rows = node.kind, r.shape[1], x.shape[1]
    gates = len(_ORDERS[kind])
    zeros = Tensor.zeros((rows, hidden), x.dtype, queue=x.queue)
    h, c = zeros if h0 is None else h0, zeros if c0 is None else c0
    wb, rb = (None, None) if b is None else ag.split(b, gates * hidden)
    wx, out = ag.linear(x, w, wb), [zeros] * x.shape[0]
    peepholes = [None] * 3 if p is None else ag.split(p, hidden)  # of the input, output and forget gates
    counts = None if lengths is None else lengths.to_host()
    for t in range(x.shape[0])[:: -1 if reverse else 1]:
        step = _lstm_cell if kind == "LSTM" else _gru_cell if kind == "GRU" else _rnn_cell
        new_h, new_c = step(node, ag.select(wx, 0, t), r, rb, h, c, peepholes, functions)
        if counts is not None:
            valid = Tensor.from_host(x.queue, (counts > t).reshape(-1, 1))
            out[t], new_h, new_c = ag.where(valid, new_h, 0.0), ag.where(valid, new_h, h), ag.where(valid, new_c, c)
        else:
            out[t] = new_h
        h, c = new_h, new_c
    return (ag.stack(out), h, c) if kind == "LSTM" else (ag.stack(out), h)


def _clipped(node: OnnxNode, x: Tensor) -> Tensor:
    return ag.clamp(x, -node["clip"], node["clip"]) if node["clip"] else x


def _rnn_cell(node: OnnxNode, x: Tensor, r: Tensor, rb: Any, h: Tensor, c: Tensor, p: Any, functions: Any) -> tuple[Tensor, Tensor]:
    return functions[0](_clipped(node, ag.add(x, ag.linear(h, r, rb)))), c


def _gru_cell(node: OnnxNode, x: Tensor, r: Tensor, rb: Any, h: Tensor, c: Tensor, p: Any, functions: Any) -> tuple[Tensor, Tensor]:
    (f, g), size = functions, h.shape[1]
    xz, xr, xh = ag.split(x, size, axis=1)
    rz, rr, rh = ag.split(r, size)
    bz, br, bh = (None, None, None) if rb is None else ag.split(rb, size)
    z = f(_clipped(node, ag.add(xz, ag.linear(h, rz, bz))))
    reset = f(_clipped(node, ag.add(xr, ag.linear(h, rr, br))))
    inner = ag.mul(reset, ag.linear(h, rh, bh)) if node["linear_before_reset"] else ag.linear(ag.mul(reset, h), rh, bh)
    new = g(_clipped(node, ag.add(xh, inner)))
    return ag.add(new, ag.mul(z, ag.sub(h, new))), c


def _lstm_cell(node: OnnxNode, x: Tensor, r: Tensor, rb: Any, h: Tensor, c: Tensor, p: Any, functions: Any) -> tuple[Tensor, Tensor]:
    f, g, last = functions
    i, o, forget, new = ag.split(ag.add(x, ag.linear(h, r, rb)), h.shape[1], axis=1)

    def gate(values: Tensor, peephole: Any, cell: Tensor) -> Any:
        return f(_clipped(node, values if peephole is None else ag.add(values, ag.mul(peephole, cell))))

    i = gate(i, p[0], c)
    forget = ag.sub(1.0, i) if node["input_forget"] else gate(forget, p[2], c)
    c = ag.add(ag.mul(forget, c), ag.mul(i, g(_clipped(node, new))))
    return ag.mul(gate(o, p[1], c), last(c)), c


IMPORTS |= dict.fromkeys(_ORDERS, _read_recurrent)
