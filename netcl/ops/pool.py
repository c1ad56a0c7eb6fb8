"""Pooling: maximum or mean of the windows of images and signals. Windows, including adaptive ones, are the same as in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.pointwise import run
from netcl.engine.reduction import run_fold
from netcl.engine.registry import REGISTRY, S, composite, op
from netcl.engine.strided import broadcast_to
from netcl.ops.conv.arrays import windows
from netcl.ops.conv.geometry import Pair, frozen, pair
from netcl.ops.images import for_image, from_signal, image, run_lines, to_signal
from netcl.ops.pointwise import DIV


class Windows(NamedTuple):
    """Sizes of a pooling: of the image, the result and the window; an adaptive pooling has no fixed window."""

    size: tuple[int, int]
    outs: tuple[int, int]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    adaptive: bool = False

    def edges(self, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, per result along an axis, the first and the end pixel of its window, and how many it spans, padding included."""
        size, k, s, p, d = (sizes[axis] for sizes in (self.size, self.kernel, self.stride, self.pad, self.dilation))
        out = np.arange(self.outs[axis])
        if self.adaptive:
            first, end = out * size // self.outs[axis], -(-(out + 1) * size // self.outs[axis])
            return first, end, end - first
        start, stop = out * s - p, out * s - p + (k - 1) * d + 1
        return np.where(start < 0, start % d, start), np.minimum(stop, size), np.minimum(stop, size + p) - start

    def slices(self, axis: int) -> list[slice]:
        """Return the pixels of each window along an axis."""
        return [slice(first, end, self.dilation[axis]) for first, end, _ in zip(*(edge.tolist() for edge in self.edges(axis)), strict=True)]


def _outs(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    outs = (-(-reach // stride) if ceil_mode else reach // stride) + 1
    # A window that would start in the padding beyond the image contains no pixel of it.
    return outs - 1 if ceil_mode and (outs - 1) * stride >= size + pad else outs


@lru_cache(maxsize=1024)
def _pool_windows(name: str, size: tuple[int, int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Windows:
    kernels, dilations = pair(name, "kernel_size", kernel, 1), pair(name, "dilation", dilation, 1)
    strides, pads = kernels if stride is None else pair(name, "stride", stride, 1), pair(name, "padding", padding, 0)
    if any(2 * p > d * (k - 1) + 1 for p, k, d in zip(pads, kernels, dilations, strict=True)):
        what = "padding must be at most half the kernel, dilation included"
        raise ShapeError(message(name, what, kernel_size=kernel, padding=padding, dilation=dilation))
    rows = list(zip(size, kernels, strides, pads, dilations, strict=True))
    outs = tuple(_outs(*row, ceil_mode) for row in rows)
    w = Windows(size, outs, kernels, strides, pads, dilations)  # type: ignore[arg-type]
    edges = [w.edges(axis) for axis in (0, 1)]
    if min(outs) < 1 or min(size) < 1 or any((first >= end).any() for first, end, _ in edges):  # dilated windows may miss the image
        what = f"a window must fit the padded image and contain a pixel of it, got an image of {size[0]} x {size[1]} pixels"
        raise ShapeError(message(name, what, kernel_size=kernel, padding=padding, dilation=dilation))
    return w


def _adaptive_windows(name: str, size: Any, output_size: Any) -> Windows:
    wanted = output_size if isinstance(output_size, tuple) else (output_size, output_size)
    if len(wanted) != 2:
        raise ShapeError(message(name, "output_size must be one integer or two (height, width)", output_size=repr(output_size)))
    wanted = tuple(n if want is None else want for n, want in zip(size, wanted, strict=True))
    outs = pair(name, "output_size", wanted, 1)
    if min(size) < 1:
        raise ShapeError(message(name, "the image must not be empty", size=size))
    return Windows(size, outs, adaptive=True)


def _check_gradient(name: str, dy: Tensor, w: Windows) -> None:
    if dy.shape[2:] != w.outs:
        what = f"dy must be the gradient of an output of {w.outs[0]} x {w.outs[1]} pixels"
        raise ShapeError(message(name, what, **{"dy.shape": dy.shape, "size": w.size}))


def _run_pool(kernel: str, w: Windows, result: Tensor, *tensors: Tensor, count_pad: bool = True) -> None:
    numbers = (*w.size, *w.outs, *w.kernel, *w.stride, *w.pad, *w.dilation, w.adaptive + 2 * count_pad)
    run_lines("pool.cl", kernel, {}, result, *tensors, math.prod(result.shape[:2]), *numbers)


# ---- in NumPy


def cpu_max(x: np.ndarray, *, w: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum of each window and its flat index in the image."""
    values, places = x, np.arange(math.prod(w.size)).reshape(1, 1, *w.size)
    if w.outs == (1, 1):
        (rows,), (columns,) = map(w.slices, (0, 1))
        at = places[:, :, rows, columns].reshape(-1)
        seen = x[:, :, rows, columns].reshape(*x.shape[:2], 1, 1, at.size)
        best = seen.argmax(-1, keepdims=True)
        return np.take_along_axis(seen, best, -1)[..., 0], at[best[..., 0]]
    for axis in (1, 0):
        values, places = _best_along(values, places, w, axis)
    return values, np.broadcast_to(places, values.shape)


def _best_along(values: np.ndarray, places: np.ndarray, w: Windows, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum of each window along an axis (the first of equals; NaN is larger than all), and its place."""
    (first, end, _), step = w.edges(axis), w.dilation[axis]
    best, where, last = values.take(first, axis + 2), places.take(first, axis + 2), end - 1 - (end - 1 - first) % step
    for ahead in range(step, max(end - first), step):
        at = np.minimum(first + ahead, last)  # a pixel that is seen again changes nothing
        seen = values.take(at, axis + 2)
        better = (seen > best) | ((seen != seen) & (best == best))
        best, where = np.where(better, seen, best), np.where(better, places.take(at, axis + 2), where)
    return best, where


def cpu_max_grad(dy: np.ndarray, places: np.ndarray, *, w: Windows) -> np.ndarray:
    planes, pixels = math.prod(dy.shape[:2]), w.size[0] * w.size[1]
    flat = (places.reshape(planes, math.prod(w.outs)) + np.arange(planes)[:, None] * pixels).reshape(-1)
    dx = np.zeros(planes * pixels, dy.dtype)
    np.add.at(dx, flat, dy.reshape(-1))
    return dx.reshape(*dy.shape[:2], *w.size)


def _window_counts(w: Windows, count_pad: bool, dtype: Any) -> np.ndarray:
    """Return how many pixels each average divides by."""
    rows, columns = (span if count_pad else end - first for first, end, span in map(w.edges, (0, 1)))
    return np.outer(rows, columns).astype(dtype)


def cpu_average(x: np.ndarray, *, w: Windows, count_pad: bool = True) -> np.ndarray:
    if not w.adaptive:
        seen = windows(x, w.outs, w.kernel, w.stride, w.pad, w.dilation)
        return seen.sum(axis=(4, 5)) / _window_counts(w, count_pad, x.dtype)
    sums = np.stack([x[:, :, pixels].sum(axis=2) for pixels in w.slices(0)], axis=2)
    return np.stack([sums[..., pixels].sum(axis=3) for pixels in w.slices(1)], axis=3) / _window_counts(w, count_pad, x.dtype)


def cpu_average_grad(dy: np.ndarray, *, w: Windows, count_pad: bool = True) -> np.ndarray:
    dy = dy / _window_counts(w, count_pad, dy.dtype)
    rows = np.zeros((*dy.shape[:2], w.size[0], w.outs[1]), dy.dtype)
    for o, pixels in enumerate(w.slices(0)):
        rows[:, :, pixels] += dy[:, :, o : o + 1]
    dx = np.zeros((*dy.shape[:2], *w.size), dy.dtype)
    for o, pixels in enumerate(w.slices(1)):
        dx[..., pixels] += rows[..., o : o + 1]
    return dx


# ---- over windows


@op(vjp=lambda F, g, out, windows: None if g[0] is None else F.pool_max_grad(g[0], out[1], windows=windows), ref=None)
def pool_max(x: Tensor, *, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return the maximum of each window and, as int32, the position of the maximum in its plane, counted row by row."""
    x = image("pool_max", x, launch.NUMBERS)
    if x.backend == "cpu":
        return launch.run_cpu(cpu_max, x, dtype=(x.dtype, "int32"), w=windows)
    y = Tensor.empty((*x.shape[:2], *windows.outs), x.dtype, queue=x.queue)
    places = Tensor.empty(y.shape, "int32", queue=x.queue)
    planes = math.prod(y.shape[:2])
    if _in_vectors(windows) and x.dtype == "float32" and planes >= _fair_share(x.queue):
        macros = {"KH": windows.kernel[0], "KW": windows.kernel[1], "STRIDE": windows.stride[1]}
        vectors = launch.kernel(x.queue, __file__, "pool_planes.cl", "pool_max_planes", None, macros)
        vectors(x.queue, (planes,), (1,), x, y, places, *windows.size, *windows.outs, windows.stride[0], *windows.pad)
    else:
        _run_pool("pool_max", windows, y, x, y, places)
    return y, places


def _in_vectors(w: Windows) -> bool:
    """Whether vectors of neighbouring windows can be loaded; see ``pool_planes.cl``."""
    return not w.adaptive and w.dilation == (1, 1) and (w.stride[1] == 1 or (w.stride[1] == 2 and w.kernel[1] > 1))


def _fair_share(queue: Any) -> float:
    """Return how many planes keep all cores of a CPU busy; infinite on other devices."""
    return 4 * program.state(queue).device.max_compute_units if launch.on_cpu_device(queue) else math.inf


def _max_grad_vjp(F, g, places):
    n, c = g.shape[:2]
    flat = F.reshape(g, (n, c, g.shape[2] * g.shape[3]))
    return F.reshape(F.gather(flat, 2, F.reshape(places, (n, c, places.shape[2] * places.shape[3]))), places.shape), None


_OTHER_GRADIENT = r"\[{}\] dy must be the gradient of an output of 2 x 2 pixels; dy.shape=\(1, 1, 3, 2\), "


@op(vjp=_max_grad_vjp, ref="numpy",
    samples=[
        S((1, 2, 2, 2), np.array([[[[0, 2], [8, 10]], [[5, 7], [13, 15]]]], "int32"), windows=Windows((4, 4), (2, 2), (2, 2), (2, 2))),
        S((1, 1, 2, 2), np.array([[[[4, 4], [4, 8]]]], "int32"), windows=Windows((3, 3), (2, 2), (2, 2))),
        S((1, 1, 2, 2), np.array([[[[1, 2], [3, 8]]]], "int32"), windows=Windows((3, 3), (2, 2), adaptive=True)),
    ],
    errors=[(S((1, 1, 3, 2), np.zeros((1, 1, 3, 2), "int32"), windows=Windows((4, 4), (2, 2), (2, 2), (2, 2))),
             _OTHER_GRADIENT.format("pool_max_grad"))])  # fmt: skip
def pool_max_grad(dy: Tensor, places: Tensor, *, windows: Windows) -> Tensor:
    """Compute the gradient of :func:`pool_max` from the positions of the maxima."""
    dy, places = launch.as_tensors("pool_max_grad", dy, places)
    launch.check_dtype("pool_max_grad", dy, name="dy")
    launch.check_dtype("pool_max_grad", places, ("int32",), "places")
    _check_gradient("pool_max_grad", dy, windows)
    if dy.backend == "cpu":
        return launch.run_cpu(cpu_max_grad, dy, places, w=windows)
    dx = Tensor.empty((*dy.shape[:2], *windows.size), dy.dtype, queue=dy.queue)
    planes = math.prod(dx.shape[:2])
    if dx.size and dx.dtype in ("float32", "float64") and planes >= _fair_share(dx.queue):
        scatter = launch.kernel(dx.queue, __file__, "pool_planes.cl", "pool_max_scatter", {"X": dx.dtype})
        scatter(dx.queue, (planes,), (1,), dy, places, dx, math.prod(windows.size), math.prod(windows.outs))
    else:
        _run_pool("pool_max_grad", windows, dx, dy, places, dx)
    return dx


@op(vjp=lambda F, g, windows, count_pad: F.pool_average_grad(g, windows=windows, count_pad=count_pad), ref=None)
def pool_average(x: Tensor, *, windows: Windows, count_pad: bool = True) -> Tensor:
    """Return the mean of each window; ``count_pad``: whether padded pixels count in the divisor."""
    x = image("pool_average", x)
    if x.backend == "cpu":
        return launch.run_cpu(cpu_average, x, w=windows, count_pad=count_pad)
    if windows.adaptive and windows.outs == (1, 1) and not launch.on_cpu_device(x.queue):  # one work-item per plane would be too few
        return run_fold(REGISTRY["mean"], x, (2, 3), True)
    y = Tensor.empty((*x.shape[:2], *windows.outs), x.dtype, queue=x.queue)
    _run_pool("pool_average", windows, y, x, y, count_pad=count_pad)
    return y


_STRIDED = Windows((8, 9), (5, 5), (3, 2), (2, 2), (1, 1))


@op(vjp=lambda F, g, windows, count_pad: F.pool_average(g, windows=windows, count_pad=count_pad), ref="numpy",
    samples=[S((2, 3, 3, 4), windows=Windows((7, 9), (3, 4), (2, 2), (2, 2))), S((1, 2, 5, 5), windows=_STRIDED, count_pad=False),
             *(S((1, 2, *outs), windows=Windows(size, outs, adaptive=True))
               for size, outs in (((7, 9), (1, 1)), ((7, 10), (3, 4)), ((3, 4), (5, 4))))],
    errors=[(S((1, 1, 3, 2), windows=Windows((4, 4), (2, 2), (2, 2), (2, 2))), _OTHER_GRADIENT.format("pool_average_grad"))])  # fmt: skip
def pool_average_grad(dy: Tensor, *, windows: Windows, count_pad: bool = True) -> Tensor:
    """The gradient of :func:`pool_average`."""
    dy = image("pool_average_grad", dy)
    _check_gradient("pool_average_grad", dy, windows)
    if dy.backend == "cpu":
        return launch.run_cpu(cpu_average_grad, dy, w=windows, count_pad=count_pad)
    if windows.adaptive and windows.outs == (1, 1):  # every pixel gets the same gradient
        return broadcast_to(run(DIV, (dy, float(math.prod(windows.size)))), (*dy.shape[:2], *windows.size))
    dx = Tensor.empty((*dy.shape[:2], *windows.size), dy.dtype, queue=dy.queue)
    _run_pool("pool_average_grad", windows, dx, dy, dx, count_pad=count_pad)
    return dx


# ---- images


def _with_batch_axis(ndim: int) -> Callable[[Any], Any]:
    """Return a decorator that also lets an op over ``ndim`` dimensions take one sample without the batch dimension, as in torch."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(F: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if len(x.shape) != ndim - 1:
                return function(F, x, *args, **kwargs)
            made = function(F, F.unsqueeze(x, 0), *args, **kwargs)
            return tuple(F.squeeze(y, 0) for y in made) if isinstance(made, tuple) else F.squeeze(made, 0)

        return call

    return decorate


def _maxima(F: Any, x: Tensor, windows: Windows, return_indices: bool) -> Any:
    y, places = F.pool_max(x, windows=windows)
    return (y, F.cast(places, "int64")) if return_indices else y


@composite(ref="numpy",
    samples=[
        S((1, 1, 1, 1), kernel_size=1),
        S((2, 3, 7, 9), kernel_size=2),
        S((3, 7, 9), kernel_size=2),
        S((2, 3, 8, 7), kernel_size=3, stride=2, padding=1),
        S((1, 2, 9, 10), kernel_size=(2, 3), stride=(2, 1), padding=(0, 1), dilation=2),
        S((1, 2, 8, 9), kernel_size=3, stride=2, ceil_mode=True),
        S((2, 2, 5, 6), kernel_size=2, dtypes="int32", low=-99, high=99),
        S((1, 2, 6, 7), kernel_size=3, stride=1, padding=1),
    ],
    errors=[
        (S((3, 7), kernel_size=2), r"\[max_pool2d\] x must have four dimensions: batch, channels, height, width; x.shape=\(3, 7\)"),
        (S((1, 1, 4, 4), kernel_size=2, padding=2), r"\[max_pool2d\] padding must be at most half the kernel, .*kernel_size=2, padding=2"),
        (S((1, 1, 2, 2), kernel_size=3), r"\[max_pool2d\] a window must fit the padded image .*, got an image of 2 x 2 pixels"),
        (S((1, 1, 4, 4), kernel_size=2, stride=0), r"\[max_pool2d\] stride must be at least 1; stride=0"),
    ])  # fmt: skip
@_with_batch_axis(4)
def max_pool2d(
    F: Any, x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """Maximum of each window of images ``(batch, channels, height, width)``; padding is ignored.

    ``stride`` is the kernel size if not given. ``return_indices=True`` also returns each maximum's position in its plane.

    >>> import netcl.ops as F
    >>> from netcl.core.tensor import Tensor
    >>> F.max_pool2d(Tensor.ones((1, 3, 8, 8)), 2).shape
    (1, 3, 4, 4)
    """
    x = image("max_pool2d", x, launch.NUMBERS)
    w = _pool_windows("max_pool2d", x.shape[2:], frozen(kernel_size), frozen(stride), frozen(padding), frozen(dilation), ceil_mode)
    return _maxima(F, x, w, return_indices)


@composite(ref="numpy",
    samples=[
        S((1, 1, 1, 1), kernel_size=1),
        S((2, 3, 7, 9), kernel_size=2),
        S((2, 3, 8, 7), kernel_size=3, stride=2, padding=1),
        S((1, 2, 8, 9), kernel_size=(3, 2), stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        S((1, 2, 8, 10), kernel_size=3, stride=(2, 3), padding=1, ceil_mode=True),
    ],
    errors=[
        (S((3, 7), kernel_size=2), r"\[avg_pool2d\] x must have four dimensions: batch, channels, height, width; x.shape=\(3, 7\)"),
        (S((1, 1, 4, 4), kernel_size=2, dtypes="int32", low=0, high=9), r"\[avg_pool2d\] x must have a dtype that this op accepts"),
        (S((1, 1, 4, 4), kernel_size=2, padding=2), r"\[avg_pool2d\] padding must be at most half the kernel, "),
    ])  # fmt: skip
@_with_batch_axis(4)
def avg_pool2d(
    F: Any, x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """Mean of each window of images ``(batch, channels, height, width)``.

    ``count_include_pad=False`` divides only by the pixels that lie in the image.
    """
    x = image("avg_pool2d", x)
    w = _pool_windows("avg_pool2d", x.shape[2:], frozen(kernel_size), frozen(stride), frozen(padding), 1, ceil_mode)
    return F.pool_average(x, windows=w, count_pad=count_include_pad)


@composite(ref="numpy",
    samples=[
        S((2, 3, 7, 9), output_size=1),
        S((1, 2, 7, 10), output_size=(3, 4)),
        S((1, 2, 3, 4), output_size=(5, 4)),
        S((1, 2, 6, 8), output_size=(None, 4)),
    ],
    errors=[
        (S((3, 7), output_size=1), r"\[adaptive_avg_pool2d\] x must have four dimensions: batch, channels, height, width; "),
        (S((2, 3, 7, 7), output_size=0), r"\[adaptive_avg_pool2d\] output_size must be at least 1; output_size=\(0, 0\)"),
        (S((2, 3, 7, 7), output_size=(1, 2, 3)), r"\[adaptive_avg_pool2d\] output_size must be one integer or two .*=\(1, 2, 3\)"),
    ])  # fmt: skip
@_with_batch_axis(4)
def adaptive_avg_pool2d(F: Any, x: Tensor, output_size: Any) -> Tensor:
    """Means over windows chosen so that the result has ``output_size`` pixels (a number, or height and width; ``None`` keeps an axis)."""
    x = image("adaptive_avg_pool2d", x)
    return F.pool_average(x, windows=_adaptive_windows("adaptive_avg_pool2d", x.shape[2:], frozen(output_size)))


@composite(ref="numpy",
    samples=[S((2, 3, 7, 9), output_size=1), S((1, 2, 7, 10), output_size=(3, 4)), S((1, 2, 3, 4), output_size=(5, 4))],
    errors=[
        (S((3, 7), output_size=1), r"\[adaptive_max_pool2d\] x must have four dimensions: "),
        (S((2, 3, 7, 7), output_size=(1,)), r"\[adaptive_max_pool2d\] output_size must be one integer or two .*=\(1,\)"),
    ])  # fmt: skip
@_with_batch_axis(4)
def adaptive_max_pool2d(F: Any, x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima over windows chosen so that the result has ``output_size`` pixels (a number, or height and width; ``None`` keeps an axis)."""
    x = image("adaptive_max_pool2d", x, launch.NUMBERS)
    return _maxima(F, x, _adaptive_windows("adaptive_max_pool2d", x.shape[2:], frozen(output_size)), return_indices)


# ---- signals, and whole planes


def _signal(F: Any, name: str, x: Any) -> Any:
    """Return signals ``(batch, channels, length)`` as images of height 1."""
    if len(x.shape) != 3:
        raise ShapeError(message(name, "x must have three dimensions: batch, channels, length", **{"x.shape": x.shape}))
    return from_signal(F, x)


@composite(ref="numpy",
    samples=[S((2, 3, 9), kernel_size=2), S((1, 2, 10), kernel_size=3, stride=2, padding=1, ceil_mode=True)],
    errors=[(S((2, 3, 7, 7), kernel_size=2), r"\[max_pool1d\] x must have three dimensions: batch, channels, length")])  # fmt: skip
@_with_batch_axis(3)
def max_pool1d(
    F: Any, x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, dilation: int = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """The largest value of each window of signals ``(batch, channels, length)``."""
    images = _signal(F, "max_pool1d", x)
    sizes = for_image(kernel_size, 1), for_image(stride, 1), for_image(padding, 0), for_image(dilation, 1)
    y, places = F.max_pool2d(images, *sizes, ceil_mode, return_indices=True)
    return (to_signal(F, y), to_signal(F, places)) if return_indices else to_signal(F, y)


@composite(ref="numpy",
    samples=[S((2, 3, 9), kernel_size=2), S((1, 2, 10), kernel_size=3, stride=2, padding=1, count_include_pad=False)],
    errors=[(S((2, 3, 7, 7), kernel_size=2), r"\[avg_pool1d\] x must have three dimensions: batch, channels, length")])  # fmt: skip
@_with_batch_axis(3)
def avg_pool1d(
    F: Any, x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """The mean of each window of signals ``(batch, channels, length)``."""
    images = _signal(F, "avg_pool1d", x)
    pooled = F.avg_pool2d(images, for_image(kernel_size, 1), for_image(stride, 1), for_image(padding, 0), ceil_mode, count_include_pad)
    return to_signal(F, pooled)


@composite(ref="numpy",
    samples=[S((2, 3, 9), output_size=4), S((1, 2, 5), output_size=1)],
    errors=[(S((3,), output_size=1), r"\[adaptive_avg_pool1d\] x must have three dimensions: batch, channels, length")])  # fmt: skip
@_with_batch_axis(3)
def adaptive_avg_pool1d(F: Any, x: Tensor, output_size: int) -> Tensor:
    """Means over windows chosen so that each signal of the result has ``output_size`` values."""
    return to_signal(F, F.adaptive_avg_pool2d(_signal(F, "adaptive_avg_pool1d", x), for_image(output_size, 1)))


def _plane_axes(name: str, x: Any) -> tuple[int, ...]:
    if len(x.shape) < 3:
        raise ShapeError(message(name, "x must have batch, channels and at least one dimension to pool", **{"x.shape": x.shape}))
    return tuple(range(2, len(x.shape)))


def _global_pool(name: str, fold: str, what: str) -> None:
    composite(ref=lambda x: getattr(np, fold)(x, axis=tuple(range(2, x.ndim)), keepdims=True), name=name, inputs=("x",),
              samples=[S((2, 3, 5, 7)), S((1, 2, 9)), S((3, 1, 1, 1))],
              errors=[(S((2, 3)), rf"\[{name}\] x must have batch, channels and at least one dimension to pool")],
              doc=f"The {what} of each channel; axes stay with size 1.")(
        lambda F, x: getattr(F, fold)(x, axis=_plane_axes(name, x), keepdims=True))  # fmt: skip


_global_pool("global_avg_pool", "mean", "mean")
_global_pool("global_max_pool", "amax", "largest value")
