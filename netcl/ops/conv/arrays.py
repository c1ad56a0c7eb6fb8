"""Convolutions in NumPy. ``ref_*`` are the plain definitions in float64 that tests compare with; the others serve the NumPy backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from netcl.ops.conv.geometry import Geometry, frozen, geometry, transposed_size

# ---- the NumPy backend


def _bottom_right(g: Geometry) -> tuple[int, ...]:
    """How far the last window reaches beyond the input."""
    return tuple(
        max(0, (o - 1) * s + d * (k - 1) + 1 - p - n)
        for n, o, k, s, d, p in zip((g.h, g.w), (g.oh, g.ow), (g.kh, g.kw), g.stride, g.dilation, g.pad, strict=True)
    )


def windows(x: np.ndarray, g: Geometry) -> np.ndarray:
    """A view ``(n, c, kh, kw, oh, ow)`` of the zero-padded input: what each tap sees of it."""
    bottom, right = _bottom_right(g)
    x = np.pad(x, ((0, 0), (0, 0), (g.pad[0], bottom), (g.pad[1], right)))
    n, c, y, z = x.strides
    steps = (n, c, y * g.dilation[0], z * g.dilation[1], y * g.stride[0], z * g.stride[1])
    return as_strided(x, (g.n, g.c, g.kh, g.kw, g.oh, g.ow), steps, writeable=False)


def columns(x: np.ndarray, g: Geometry) -> np.ndarray:
    """``(n, groups, c / groups * taps, pixels)``: every window unfolded into a column."""
    return windows(x, g).reshape(g.n, g.groups, g.c // g.groups * g.taps, g.oh * g.ow)


def fold(cols: np.ndarray, g: Geometry) -> np.ndarray:
    """The sum of columns where their windows overlap: the transpose of :func:`columns`."""
    cols = cols.reshape(g.n, g.c, g.kh, g.kw, g.oh, g.ow)
    bottom, right = _bottom_right(g)
    x = np.zeros((g.n, g.c, g.pad[0] + g.h + bottom, g.pad[1] + g.w + right), cols.dtype)
    for r in range(g.kh):
        for s in range(g.kw):
            top, left = r * g.dilation[0], s * g.dilation[1]
            y, z = slice(top, top + g.oh * g.stride[0], g.stride[0]), slice(left, left + g.ow * g.stride[1], g.stride[1])
            x[:, :, y, z] += cols[:, :, r, s]
    return x[:, :, g.pad[0] : g.pad[0] + g.h, g.pad[1] : g.pad[1] + g.w]


def forward(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, *, g: Geometry, relu: bool = False) -> np.ndarray:
    y = (w.reshape(g.groups, g.f // g.groups, -1) @ columns(x, g)).reshape(g.y_shape)
    if bias is not None:
        y = y + bias.reshape(1, -1, 1, 1)
    return np.maximum(y, 0) if relu else y


def input_grad(dy: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, *, g: Geometry) -> np.ndarray:
    back = w.reshape(g.groups, g.f // g.groups, -1).swapaxes(1, 2)
    x = fold(back @ dy.reshape(g.n, g.groups, g.f // g.groups, g.oh * g.ow), g)
    return x if bias is None else x + bias.reshape(1, -1, 1, 1)


def weight_grad(dy: np.ndarray, x: np.ndarray, *, g: Geometry) -> np.ndarray:
    dy = dy.reshape(g.n, g.groups, g.f // g.groups, g.oh * g.ow)
    return (dy @ columns(x, g).swapaxes(2, 3)).sum(axis=0).reshape(g.w_shape)


# ---- definitions


def _of(x: Any, w: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, pad: Any = None) -> Geometry:
    chosen = padding if pad is None else pad
    return geometry("ref", tuple(x), tuple(w), frozen(stride), frozen(chosen), frozen(dilation), groups)


def _patches(g: Geometry) -> Iterator[tuple[int, int, Any]]:
    """Every output pixel with the index of the patch of the padded input it sees."""
    for y in range(g.oh):
        for z in range(g.ow):
            top, left = y * g.stride[0], z * g.stride[1]
            rows, cols = top + g.dilation[0] * np.arange(g.kh), left + g.dilation[1] * np.arange(g.kw)
            yield y, z, np.ix_(np.arange(g.n), np.arange(g.c), rows, cols)


def _padded(g: Geometry, x: np.ndarray | None = None) -> np.ndarray:
    span = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip((g.oh, g.ow), g.stride, g.dilation, (g.kh, g.kw), strict=True)]
    xp = np.zeros((g.n, g.c, max(span[0], g.pad[0] + g.h), max(span[1], g.pad[1] + g.w)))
    if x is not None:
        xp[:, :, g.pad[0] : g.pad[0] + g.h, g.pad[1] : g.pad[1] + g.w] = x
    return xp


def _split(g: Geometry, w: np.ndarray) -> np.ndarray:
    return w.reshape(g.groups, g.f // g.groups, g.c // g.groups, g.kh, g.kw)


def ref_conv2d(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Every output pixel is the sum of weights times the patch under them, plus the bias."""
    g = _of(x.shape, w.shape, **options)
    xp, wg, out = _padded(g, x), _split(g, np.asarray(w, np.float64)), np.zeros(g.y_shape)
    for y, z, at in _patches(g):
        patch = xp[at].reshape(g.n, g.groups, -1, g.kh, g.kw)
        out[:, :, y, z] = np.einsum("gfcrs,ngcrs->ngf", wg, patch).reshape(g.n, g.f)
    return out if bias is None else out + np.asarray(bias, np.float64).reshape(1, -1, 1, 1)


def ref_conv2d_relu(*arrays: np.ndarray, **options: Any) -> np.ndarray:
    """The convolution, negative values replaced by zero."""
    y = ref_conv2d(*arrays, **options)
    return np.where(y < 0, 0.0, y)


def ref_input_grad(dy: np.ndarray, w: np.ndarray, *, size: Any, **options: Any) -> np.ndarray:
    """Every gradient pixel, times the weights, added to the patch it came from."""
    g = _of((dy.shape[0], w.shape[1] * options.get("groups", 1), *size), w.shape, **options)
    xp, wg = _padded(g), _split(g, np.asarray(w, np.float64))
    for y, z, at in _patches(g):
        share = np.asarray(dy[:, :, y, z], np.float64).reshape(g.n, g.groups, -1)
        xp[at] += np.einsum("gfcrs,ngf->ngcrs", wg, share).reshape(g.n, g.c, g.kh, g.kw)
    return xp[:, :, g.pad[0] : g.pad[0] + g.h, g.pad[1] : g.pad[1] + g.w]


def ref_weight_grad(dy: np.ndarray, x: np.ndarray, *, kernel: Any, **options: Any) -> np.ndarray:
    """Every gradient pixel times the patch it came from, summed."""
    g = _of(x.shape, (dy.shape[1], x.shape[1] // options.get("groups", 1), *kernel), **options)
    xp, out = _padded(g, x), np.zeros((g.groups, g.f // g.groups, g.c // g.groups, g.kh, g.kw))
    for y, z, at in _patches(g):
        share = np.asarray(dy[:, :, y, z], np.float64).reshape(g.n, g.groups, -1)
        out += np.einsum("ngf,ngcrs->gfcrs", share, xp[at].reshape(g.n, g.groups, -1, g.kh, g.kw))
    return out.reshape(g.w_shape)


def ref_transpose(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> np.ndarray:  # fmt: skip
    """The input gradient of the convolution that has the same weights."""
    stride, padding, output_padding, dilation = map(frozen, (stride, padding, output_padding, dilation))
    size = transposed_size("ref", x.shape, w.shape, stride, padding, output_padding, dilation)
    y = ref_input_grad(x, w, size=size, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(1, -1, 1, 1)


def ref_im2col(x: np.ndarray, *, kernel: Any, **options: Any) -> np.ndarray:
    """Column ``p`` holds the patch of output pixel ``p``."""
    g = _of(x.shape, (1, x.shape[1], *kernel), **options)
    xp, out = _padded(g, x), np.zeros((g.n, g.c * g.taps, g.oh, g.ow))
    for y, z, at in _patches(g):
        out[:, :, y, z] = xp[at].reshape(g.n, -1)
    return out.reshape(g.n, g.c * g.taps, -1)


def ref_col2im(cols: np.ndarray, *, size: Any, kernel: Any, **options: Any) -> np.ndarray:
    """Every column added to the patch it came from."""
    channels = cols.shape[1] // (kernel[0] * kernel[1])
    g = _of((cols.shape[0], channels, *size), (1, channels, *kernel), **options)
    xp, cols = _padded(g), np.asarray(cols, np.float64).reshape(g.n, -1, g.oh, g.ow)
    for y, z, at in _patches(g):
        xp[at] += cols[:, :, y, z].reshape(g.n, g.c, g.kh, g.kw)
    return xp[:, :, g.pad[0] : g.pad[0] + g.h, g.pad[1] : g.pad[1] + g.w]
