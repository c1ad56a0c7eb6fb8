"""Convolutions in NumPy: ``ref_*`` are plain float64 definitions for tests, the other functions serve the NumPy backend."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from netcl.ops.conv.geometry import Geometry, frozen, geometry, transposed_size

# ---- the NumPy backend


Two = tuple[int, int]


def _spans(kernel: Two, dilation: Two) -> tuple[int, ...]:
    """Return how many pixels a dilated window covers along each axis."""
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))


def _paddings(size: tuple[int, ...], outs: Two, kernel: Two, stride: Two, pad: Two, dilation: Two) -> list[Two]:
    """Return the padding before and after each axis for which the last window ends inside the image."""
    rows = zip(size, outs, _spans(kernel, dilation), stride, pad, strict=True)
    return [(p, max(0, (o - 1) * s + span - p - n)) for n, o, span, s, p in rows]


def windows(x: np.ndarray, outs: Two, kernel: Two, stride: Two, pad: Two, dilation: Two, fill: float = 0) -> np.ndarray:
    """A view ``(n, c, oh, ow, kh, kw)`` of the padded images: the window of every output pixel."""
    x = np.pad(x, ((0, 0), (0, 0), *_paddings(x.shape[2:], outs, kernel, stride, pad, dilation)), constant_values=fill)
    view = sliding_window_view(x, _spans(kernel, dilation), (2, 3))
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


# ---- definitions


def _ref_geometry(x: Any, w: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, pad: Any = None) -> Geometry:
    chosen = padding if pad is None else pad
    return geometry("ref", tuple(x), tuple(w), frozen(stride), frozen(chosen), frozen(dilation), groups)


def _patches(g: Geometry, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the padded image (``x`` or zeros) and a view of each output pixel's patch: ``(n, groups, c / groups, oh, ow, kh, kw)``."""
    edges = _paddings((g.h, g.w), (g.oh, g.ow), (g.kh, g.kw), g.stride, g.pad, g.dilation)
    padded = np.zeros((g.n, g.groups, g.c // g.groups, *(n + sum(edge) for n, edge in zip((g.h, g.w), edges, strict=True))))
    image = padded[..., g.pad[0] : g.pad[0] + g.h, g.pad[1] : g.pad[1] + g.w]
    if x is not None:
        image[:] = x.reshape(image.shape)
    view = sliding_window_view(padded, _spans((g.kh, g.kw), g.dilation), (3, 4), writeable=True)
    return image, view[..., :: g.stride[0], :: g.stride[1], :: g.dilation[0], :: g.dilation[1]][..., : g.oh, : g.ow, :, :]


def _grouped_filters(g: Geometry, w: np.ndarray) -> np.ndarray:
    return np.asarray(w, np.float64).reshape(g.groups, g.f // g.groups, g.c // g.groups, g.kh, g.kw)


def _grouped_outputs(g: Geometry, dy: np.ndarray) -> np.ndarray:
    return np.asarray(dy, np.float64).reshape(g.n, g.groups, g.f // g.groups, g.oh, g.ow)


def ref_conv2d(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Compute every output pixel as the sum of weights times the patch under them, plus the bias."""
    g = _ref_geometry(x.shape, w.shape, **options)
    y = np.einsum("gfcrs,ngcyzrs->ngfyz", _grouped_filters(g, w), _patches(g, x)[1]).reshape(g.y_shape)
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(1, -1, 1, 1)


def ref_conv2d_relu(*arrays: np.ndarray, **options: Any) -> np.ndarray:
    """Convolve and replace negative values by zero."""
    y = ref_conv2d(*arrays, **options)
    return np.where(y < 0, 0.0, y)


def ref_input_grad(dy: np.ndarray, w: np.ndarray, *, size: Any, **options: Any) -> np.ndarray:
    """Add every gradient pixel times the weights to the patch it came from."""
    g = _ref_geometry((dy.shape[0], w.shape[1] * options.get("groups", 1), *size), w.shape, **options)
    image, patches = _patches(g)
    shares, filters = _grouped_outputs(g, dy), _grouped_filters(g, w)
    for y, z in np.ndindex(g.oh, g.ow):  # patches overlap, so they are added one after the other
        patches[..., y, z, :, :] += np.einsum("gfcrs,ngf->ngcrs", filters, shares[..., y, z])
    return image.reshape(g.x_shape)


def ref_weight_grad(dy: np.ndarray, x: np.ndarray, *, kernel: Any, **options: Any) -> np.ndarray:
    """Sum every gradient pixel times the patch it came from."""
    g = _ref_geometry(x.shape, (dy.shape[1], x.shape[1] // options.get("groups", 1), *kernel), **options)
    return np.einsum("ngfyz,ngcyzrs->gfcrs", _grouped_outputs(g, dy), _patches(g, x)[1]).reshape(g.w_shape)


def ref_transpose(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> np.ndarray:  # fmt: skip
    """Compute the input gradient of the convolution with the same weights."""
    stride, padding, output_padding, dilation = map(frozen, (stride, padding, output_padding, dilation))
    size = transposed_size("ref", x.shape, w.shape, stride, padding, output_padding, dilation)
    y = ref_input_grad(x, w, size=size, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(1, -1, 1, 1)


def ref_im2col(x: np.ndarray, *, kernel: Any, **options: Any) -> np.ndarray:
    """Column ``p`` holds the patch of output pixel ``p``."""
    g = _ref_geometry(x.shape, (1, x.shape[1], *kernel), **options)
    return _patches(g, x)[1].transpose(0, 1, 2, 5, 6, 3, 4).reshape(g.n, g.c * g.taps, g.oh * g.ow)


def ref_col2im(cols: np.ndarray, *, size: Any, kernel: Any, **options: Any) -> np.ndarray:
    """Add every column to the patch it came from."""
    channels = cols.shape[1] // (kernel[0] * kernel[1])
    g = _ref_geometry((cols.shape[0], channels, *size), (1, channels, *kernel), **options)
    image, patches = _patches(g)
    shares = np.asarray(cols, np.float64).reshape(g.n, 1, g.c, g.kh, g.kw, g.oh, g.ow)
    for y, z in np.ndindex(g.oh, g.ow):
        patches[..., y, z, :, :] += shares[..., y, z]
    return image.reshape(g.x_shape)
