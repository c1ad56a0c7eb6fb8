"""Recurrent layers step by step: the NumPy form and, over recorded ops, second derivatives and ONNX import.

``N`` is :data:`NUMPY` for arrays, ``netcl.ops`` or ``netcl.autograd`` for tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor

#: Gates of each kind of cell, and how many values per unit its backward keeps: gates, then the cell of an LSTM, the recurrent half of
#: the candidate of a GRU, or the result.
GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}
KEPT = {"tanh": 1, "relu": 1, "lstm": 5, "gru": 4}

NUMPY = SimpleNamespace(
    where=np.where, stack=np.stack, cat=np.concatenate, tanh=np.tanh, matmul=np.matmul, gt=np.greater, eq=np.equal,
    sigmoid=lambda x: np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))), relu=lambda x: np.where(x <= 0, 0, x),
    linear=lambda x, w, bias=None: x @ w.T + (0 if bias is None else bias), sum=lambda x, axis: np.sum(x, axis=axis),
    cast=lambda x, dtype: x,
)  # fmt: skip


def _zeros(like: Any, *shape: int) -> Any:
    return Tensor.zeros(shape, like.dtype, queue=like.queue) if isinstance(like, Tensor) else np.zeros(shape, like.dtype)


def _parts(x: Any, count: int) -> list[Any]:
    width = x.shape[-1] // count
    return [x[:, i * width : (i + 1) * width] for i in range(count)]


def _cell(N: Any, kind: str, x: Any, r: Any, h: Any, c: Any) -> tuple[Any, Any, list[Any]]:
    """Compute h, c and the values to keep, from the input and recurrent halves of the gates and the previous state."""
    if kind == "lstm":
        i, f, g, o = (N.tanh(part) if j == 2 else N.sigmoid(part) for j, part in enumerate(_parts(x + r, 4)))
        c = f * c + i * g
        return o * N.tanh(c), c, [i, f, g, o, c]
    if kind == "gru":
        (x_r, x_z, x_n), (h_r, h_z, q) = _parts(x, 3), _parts(r, 3)
        reset, z = N.sigmoid(x_r + h_r), N.sigmoid(x_z + h_z)
        n = N.tanh(x_n + reset * q)
        return n + z * (h - n), c, [reset, z, n, q]
    h = (N.tanh if kind == "tanh" else N.relu)(x + r)
    return h, c, [h]


def layer_forward(
    N: Any, gx: Any, weight: Any, bias: Any, h0: Any, c0: Any, projection: Any, lengths: Any, kind: str, reverse: bool
) -> tuple[Any, ...]:
    """Return y, the last h, an LSTM's last c, and the values for backward."""
    steps, rows, hidden = gx.shape[0], gx.shape[1], gx.shape[2] // GATES[kind]
    h = _zeros(gx, rows, weight.shape[1]) if h0 is None else h0
    c = (_zeros(gx, rows, hidden) if c0 is None else c0) if kind == "lstm" else None
    y, saved = [], []
    for t in range(steps)[:: -1 if reverse else 1]:
        new_h, new_c, keep = _cell(N, kind, gx[t], N.linear(h, weight, bias), h, c)
        if projection is not None:
            new_h = N.linear(new_h, projection)
        if lengths is not None:
            valid = N.gt(lengths, t).reshape(-1, 1)
            out, keep = N.where(valid, new_h, 0), [N.where(valid, part, 0) for part in keep]
            new_h, new_c = N.where(valid, new_h, h), None if c is None else N.where(valid, new_c, c)
        h, c = new_h, new_c
        y.append(h if lengths is None else out)
        saved.append(N.stack(keep, axis=1))
    y, saved = (N.stack(part[:: -1 if reverse else 1], axis=0) for part in (y, saved))
    return (y, h, c, saved) if kind == "lstm" else (y, h, saved)


def _cell_back(N: Any, kind: str, keep: Any, h: Any, c: Any, dh: Any, dc: Any, extra: Any) -> tuple[list[Any], list[Any], Any, Any]:
    """Return gradients of the input half, the recurrent half, the previous h (except through the gates) and the previous c.

    ``extra`` holds the gradients of the kept values.
    """
    if kind == "lstm":
        (i, f, g, o, new), (e_i, e_f, e_g, e_o, e_c) = keep, extra
        t = N.tanh(new)
        dc = dc + dh * o * (1 - t * t) + e_c
        d_i, d_f, d_g, d_o = dc * g + e_i, dc * c + e_f, dc * i + e_g, dh * t + e_o
        gates = [d_i * i * (1 - i), d_f * f * (1 - f), d_g * (1 - g * g), d_o * o * (1 - o)]
        return gates, gates, 0, dc * f
    if kind == "gru":
        (r, z, n, q), (e_r, e_z, e_n, e_q) = keep, extra
        d_n = (dh * (1 - z) + e_n) * (1 - n * n)
        gates = [(d_n * q + e_r) * r * (1 - r), (dh * (h - n) + e_z) * z * (1 - z)]
        return [*gates, d_n], [*gates, d_n * r + e_q], dh * z, dc
    (new,), d = keep, dh + extra[0]
    gates = [d * (1 - new * new) if kind == "tanh" else N.where(N.gt(new, 0), d, 0)]
    return gates, gates, 0, dc


def layer_backward(
    N: Any, g_y: Any, g_h: Any, g_c: Any, g_saved: Any, weight: Any, h0: Any, c0: Any, projection: Any, lengths: Any, y: Any, saved: Any,
    kind: str, reverse: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return gradients of gx, the weight, the bias, h0, c0 (``None`` except for an LSTM) and the projection (``None`` if there is none)."""
    (steps, rows, width), hidden = y.shape, saved.shape[-1]
    start = _zeros(saved, rows, width) if h0 is None else h0
    begin = (_zeros(saved, rows, hidden) if c0 is None else c0) if kind == "lstm" else None
    dh = _zeros(saved, rows, width) if g_h is None else g_h
    dc = (_zeros(saved, rows, hidden) if g_c is None else g_c) if kind == "lstm" else None
    order = list(range(steps)[:: -1 if reverse else 1])
    d_gx: list[Any] = [None] * steps
    d_weight: Any = 0
    d_bias: Any = 0
    d_projection: Any = 0
    for at, t in reversed(list(enumerate(order))):
        h, c = (y[order[at - 1]], saved[order[at - 1]][:, 4] if kind == "lstm" else None) if at else (start, begin)
        valid = None if lengths is None else N.gt(lengths, t).reshape(-1, 1)
        if valid is not None and reverse and at:
            first = N.eq(lengths, t + 1).reshape(-1, 1)
            h, c = N.where(first, start, h), None if c is None else N.where(first, begin, c)
        keep = [saved[t][:, i] for i in range(KEPT[kind])]
        extra = [0 if g_saved is None else g_saved[t][:, i] for i in range(KEPT[kind])]
        up = dh if g_y is None else dh + g_y[t]
        if projection is not None:
            full = keep[3] * N.tanh(keep[4])
            down = up if valid is None else N.where(valid, up, 0)
            d_projection = d_projection + N.matmul(down.T, full)
        of_cell = up if projection is None else N.matmul(up, projection)
        inner, outer, direct, before = _cell_back(N, kind, keep, h, c, of_cell, dc, extra)
        d_x, d_r = N.cat(inner, axis=1), N.cat(outer, axis=1)
        if valid is not None:
            d_x, d_r = N.where(valid, d_x, 0), N.where(valid, d_r, 0)
        new = N.matmul(d_r, weight) + direct
        dh = new if valid is None else N.where(valid, new, dh)
        dc = before if valid is None or dc is None else N.where(valid, before, dc)
        d_gx[t] = d_x
        d_weight, d_bias = d_weight + N.matmul(d_r.T, h), d_bias + N.sum(d_r, axis=0)
    return N.stack(d_gx, axis=0), d_weight, d_bias, dh, dc, None if projection is None else d_projection
