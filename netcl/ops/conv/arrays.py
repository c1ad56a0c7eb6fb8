"""Convolutions in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from netcl.ops.conv.geometry import Geometry, window_spans

Two = tuple[int, int]


def _paddings(size: tuple[int, ...], outs: Two, kernel: Two, stride: Two, pad: Two, dilation: Two) -> list[Two]:
    """Return the padding of each axis: ``pad`` before it, and after it as much as the last window needs."""
    rows = zip(size, outs, window_spans(kernel, dilation), stride, pad, strict=True)
    return [(p, max(0, (o - 1) * s + span - p - n)) for n, o, span, s, p in rows]


def windows(x: np.ndarray, outs: Two, kernel: Two, stride: Two, pad: Two, dilation: Two, fill: float = 0) -> np.ndarray:
    """Return a view ``(n, c, oh, ow, kh, kw)`` of the padded images: the window of every output pixel."""
    x = np.pad(x, ((0, 0), (0, 0), *_paddings(x.shape[2:], outs, kernel, stride, pad, dilation)), constant_values=fill)
    view = sliding_window_view(x, window_spans(kernel, dilation), (2, 3))
    return view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]][:, :, : outs[0], : outs[1]]


def columns(x: np.ndarray, g: Geometry) -> np.ndarray:
    """Unfold every window to a column: ``(n, groups, c / groups * taps, pixels)``."""
    seen = windows(x, (g.oh, g.ow), (g.kh, g.kw), g.stride, g.pad, g.dilation).transpose(0, 1, 4, 5, 2, 3)
    return seen.reshape(g.n, g.groups, g.c // g.groups * g.taps, g.oh * g.ow)


def fold_windows(cols: np.ndarray, g: Geometry) -> np.ndarray:
    """Add up columns where their windows overlap: the transpose of :func:`columns`."""
    cols = cols.reshape(g.n, g.c, g.kh, g.kw, g.oh, g.ow)
    (top, bottom), (left, right) = _paddings((g.h, g.w), (g.oh, g.ow), (g.kh, g.kw), g.stride, g.pad, g.dilation)
    x = np.zeros((g.n, g.c, top + g.h + bottom, left + g.w + right), cols.dtype)
    for r in range(g.kh):
        for s in range(g.kw):
            y, z = r * g.dilation[0], s * g.dilation[1]
            x[:, :, y : y + g.oh * g.stride[0] : g.stride[0], z : z + g.ow * g.stride[1] : g.stride[1]] += cols[:, :, r, s]
    return x[:, :, top : top + g.h, left : left + g.w]


def conv_forward(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, *, g: Geometry, relu: bool = False) -> np.ndarray:
    y = (w.reshape(g.groups, g.f // g.groups, -1) @ columns(x, g)).reshape(g.y_shape)
    if bias is not None:
        y = y + bias.reshape(1, -1, 1, 1)
    return np.maximum(y, 0) if relu else y


def input_grad(dy: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, *, g: Geometry) -> np.ndarray:
    back = w.reshape(g.groups, g.f // g.groups, -1).swapaxes(1, 2)
    x = fold_windows(back @ dy.reshape(g.n, g.groups, g.f // g.groups, g.oh * g.ow), g)
    return x if bias is None else x + bias.reshape(1, -1, 1, 1)


def weight_grad(dy: np.ndarray, x: np.ndarray, *, g: Geometry) -> np.ndarray:
    dy = dy.reshape(g.n, g.groups, g.f // g.groups, g.oh * g.ow)
    return (dy @ columns(x, g).swapaxes(2, 3)).sum(axis=0).reshape(g.w_shape)
