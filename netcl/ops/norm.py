"""Layer, RMS, group and instance norm, and functions that batch norm (:mod:`netcl.ops.batch_norm`) shares with them.

These norms are one op, ``row_norm``: every row of contiguous elements has its own statistics. It returns the statistics besides the
result; the gradient ops take them and can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core.dtype import sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch, rows
from netcl.engine.registry import S, composite, op
from netcl.ops.fused_rows import ArrayRows, OpRows, norm_grad_rows, norm_rows, norm_weight_terms

JOINED_COLUMNS = 16  # columns that a work-group of a GPU joins; must match the kernel
CHANNEL_STRIP = 16  # vectors of channels per work-item of a CPU if the span is 1; must match the kernels
COLUMN_ITEMS = 1024  # work-items of a GPU's compute unit where the span is 1, and each folds a column
PART_ELEMENTS = 1024  # of a channel: smaller parts are not worth a launch that joins them

_ROW_SAMPLES = [
    S((3, 5), (5,), (5,)), S((2, 3, 257), (3, 257), (3, 257), axes=2), S((4, 255), None, None), S((2, 33), (33,), None, centered=False),
    S((2, 6, 7, 5), (6,), (6,), groups=3), S((2, 4, 3), None, None, groups=4), S((3, 4), (4,), (4,), groups=2), S((0, 5), (5,), (5,)),
]  # fmt: skip
_ROW_GRAD_SAMPLES = [
    S((3, 5), (3, 5), (5,), (3,), (3,), high=2.0), S((70, 17), (70, 17), (17,), (70,), (70,)), S((4, 255), (4, 255), None, (4,), (4,)),
    S((2, 3, 57), (2, 3, 57), (3, 57), (2,), (2,), axes=2), S((9, 132), (9, 132), None, (9,), (9,), centered=False),
    S((2, 6, 7, 5), (2, 6, 7, 5), (6,), (2, 3), (2, 3), groups=3), S((0, 5), (0, 5), (5,), (0,), (0,)),
]  # fmt: skip
_WEIGHT_GRAD_SAMPLES = [
    S((3, 5), (3, 5), (3,), (3,)), S((300, 17), (300, 17), (300,), (300,)), S((2, 3, 57), (2, 3, 57), (2,), (2,), axes=2),
    S((2, 6, 7, 5), (2, 6, 7, 5), (2, 3), (2, 3), groups=3), S((3, 4), (3, 4), (3, 4), (3, 4), groups=4), S((0, 5), (0, 5), (0,), (0,)),
]  # fmt: skip


class View(NamedTuple):
    """A tensor's shape for a norm, the shapes of statistics and weights that broadcast to it, and the axes along which each is shared."""

    shape: tuple[int, ...]
    stats: tuple[int, ...]
    affine: tuple[int, ...]
    stat_axes: tuple[int, ...]
    affine_axes: tuple[int, ...]
    weights: tuple[int, ...]  # the shape of weight and bias

    @property
    def shared(self) -> int:
        """The number of elements that share a statistic."""
        return math.prod(self.shape[axis] for axis in self.stat_axes)


def _row_view(shape: tuple[int, ...], axes: int, groups: int) -> View:
    if groups:
        images, channels = shape[:2]
        seen = (images, groups, channels // groups, math.prod(shape[2:]))
        return View(seen, (images, groups, 1, 1), (1, groups, channels // groups, 1), (2, 3), (0, 3), (channels,))
    lead = len(shape) - axes
    affine = (*(1,) * lead, *shape[lead:])
    return View(shape, (*shape[:lead], *(1,) * axes), affine, tuple(range(lead, len(shape))), tuple(range(lead)), shape[lead:])


def batch_view(shape: tuple[int, ...]) -> View:
    images, channels = shape[:2]
    return View((images, channels, math.prod(shape[2:])), (1, channels, 1), (1, channels, 1), (0, 2), (0, 2), (channels,))


# ---- checks


def check_affine(name: str, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    for title, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            launch.check_dtype(name, t, name=title)
            if t.shape != shape:
                raise ShapeError(message(name, f"{title} must have shape {shape}", **{title: t.shape}))


def _check_row_norm(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int, groups: int) -> None:
    launch.check_dtype(name, x)
    if groups and (x.ndim < 2 or groups < 0 or x.shape[1] % groups):
        raise ShapeError(message(name, "x must be (N, C, ...), and groups must be at least 1 and divide C", groups=groups, x=x.shape))
    if not groups and not 1 <= axes <= x.ndim:
        raise ShapeError(message(name, f"axes must be from 1 to the {x.ndim} dimensions of x, got {axes}", x=x.shape))
    check_affine(name, x.shape[1:2] if groups else x.shape[x.ndim - axes :], weight, bias)


# ---- NumPy


def norm_arrays(x: Any, weight: Any, bias: Any, view: View, eps: float, centered: bool = True) -> tuple[np.ndarray, ...]:
    """Return the result, the means and one over the standard deviations; both statistics have the shape ``view.stats``."""
    weight, bias = (None if t is None else t.reshape(view.affine) for t in (weight, bias))
    y, mean, rstd = norm_rows(ArrayRows(x, view.stat_axes), x.reshape(view.shape), weight, bias, centered, eps)
    return y.reshape(x.shape), np.zeros_like(rstd) if mean is None else mean, rstd


def _input_gradient(g: Any, x: Any, weight: Any, mean: Any, rstd: Any, view: View, centered: bool = True, rows: Any = ArrayRows) -> Any:
    """Return the gradient of x. ``rows`` evaluates formulas: over arrays, or over tensors for second derivatives."""
    given = g.reshape(view.shape), x.reshape(view.shape), None if weight is None else weight.reshape(view.affine)
    stats = mean.reshape(view.stats), rstd.reshape(view.stats)
    return norm_grad_rows(rows(x, view.stat_axes), *given, *stats, centered).reshape(x.shape)


def _weight_gradients(g: Any, x: Any, mean: Any, rstd: Any, view: View, rows: Any = ArrayRows) -> tuple[Any, ...]:
    given = g.reshape(view.shape), x.reshape(view.shape), mean.reshape(view.stats), rstd.reshape(view.stats)
    return tuple(t.sum(view.affine_axes).reshape(view.weights) for t in norm_weight_terms(rows(x, ()), *given))


def all_gradients(
    g: Any, x: Any, weight: Any, mean: Any, rstd: Any, view: View, centered: bool = True, rows: Any = ArrayRows
) -> tuple[Any, ...]:
    return _input_gradient(g, x, weight, mean, rstd, view, centered, rows), *_weight_gradients(g, x, mean, rstd, view, rows)


# ---- OpenCL

_FILES = "norm.cl norm_rows.cl norm_sums.cl batch_norm.cl"  # a launch compiles one kernel of these files


def operands_of(x: Tensor, z: Tensor, y: Tensor, weight: Any, bias: Any, stats: Tensor, running: Any = None) -> dict[str, str]:
    names = {"X": x, "Z": z, "W": weight, "B": bias, "M": stats, "R": running, "Y": y}
    return {name: (stats if t is None else t).dtype for name, t in names.items()}


_MACROS = {"centered": 1, "sums": 0, "masked": 0, "columns": 0, "variance": 0, "applies": 1, "relu": 0}  # with their defaults


def defines_of(weight: Any, bias: Any, per_element: bool, **more: bool) -> dict[str, int]:
    """Return the macros of norm.cl."""
    given = {"has_weight": weight is not None, "has_bias": bias is not None, "per_element": per_element}
    return {name.upper(): int(value) for name, value in {**_MACROS, **given, **more}.items()}


def _row_sizes(shape: tuple[int, ...], axes: int, groups: int) -> tuple[int, int, int, int]:
    """Return the number of groups, channels per row, rows, and elements per row."""
    if groups:
        channels = shape[1] // groups
        return groups, channels, shape[0] * groups, channels * math.prod(shape[2:])
    return 1, 1, math.prod(shape[: len(shape) - axes]), math.prod(shape[len(shape) - axes :])


def run_norm_rows(
    kernel: str, operands: dict[str, str], defines: dict[str, int], like: Tensor, n_rows: int, n: int, *args: Any, run: int = 0
) -> None:
    rows.run_rows(like.queue, __file__, _FILES, kernel, operands, n_rows, n, *args, run=run, **defines)


class Channels(NamedTuple):
    """The sizes of a tensor (images, channels, span). Each channel is reduced in ``parts`` parts of at most ``chunk`` images."""

    images: int
    channels: int
    span: int
    chunk: int
    parts: int


def parts_of(queue: Any, images: int, channels: int, span: int) -> Channels:
    """Return the sizes and parts of a reduction: enough parts to keep the device busy, or one if adding partial sums would cost more."""
    cpu, _, units = rows.device_of(queue)
    if span == 1:
        wanted = -(-2 * units // -(-channels // (16 * CHANNEL_STRIP))) if cpu else -(-COLUMN_ITEMS * units // max(channels, 1))
    elif cpu:
        wanted = -(-2 * units // max(channels, 1))
    else:  # a third of a GPU's compute units, with many loads in flight, saturate its memory
        wanted = 1 if 3 * channels >= units else min(-(-2 * units // max(channels, 1)), images * span // PART_ELEMENTS)
    chunk = -(-images // max(1, min(wanted, images)))
    return Channels(images, channels, span, chunk, -(-images // max(chunk, 1)))


def run_channels(
    kernel: str, operands: dict[str, str], defines: dict[str, int], queue: Any, sizes: Channels, folds: int, *args: Any
) -> None:
    """Launch a kernel with ``folds`` reductions, each over one part of a channel or, with ``COLUMNS``, of a vector of channels."""
    columns = bool(defines.get("COLUMNS"))
    wide = "float64" in operands.values()
    if columns:
        spread = rows.column_spread(queue, wide)
    else:
        quads = sizes.span % 4 == 0 and rows.aligned(args)
        spread = rows.channel_spread(queue, sizes.images * sizes.channels // folds * sizes.span, wide, quads)
    found = rows.row_kernel(queue, __file__, _FILES, kernel, operands, spread, defines)
    strip = spread.vec * (CHANNEL_STRIP if spread.vec > 1 else 1)
    items = folds // sizes.channels * -(-sizes.channels // strip) if columns else folds * spread.group
    found(queue, items, spread.local, *args, sizes.images, sizes.channels, sizes.span)


def join_sums(operands: dict[str, str], like: Tensor, firsts: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
    """Add the partial sums in two matrices (parts, channels); returns a vector of one sum per channel for each matrix."""
    queue, (parts, channels) = like.queue, firsts.shape
    if parts == 1:
        return with_shape(firsts, (channels,)), with_shape(seconds, (channels,))
    cpu, most, _ = rows.device_of(queue)
    local = 1 if cpu else 1 << (min(512, most).bit_length() - 1)
    spread = rows.Spread(local, local, (8 if "float64" in operands.values() else 16) if cpu else 1, 1)
    found = rows.row_kernel(queue, __file__, _FILES, "join_sums", operands, spread, {})
    joined = empty_pair((channels,), like, firsts.dtype)
    tile = spread.vec * (JOINED_COLUMNS if local > JOINED_COLUMNS else 1)
    found(queue, 2 * local * -(-channels // tile), local, firsts, seconds, *joined, parts, channels)
    return joined


def join_moments(operands: dict[str, str], defines: dict[str, int], queue: Any, channels: int, *args: Any) -> None:
    found = rows.row_kernel(queue, __file__, _FILES, "join_moments", operands, rows.Spread(launch.LOCAL_1D, 1, 1, 1), defines)
    found(queue, channels, launch.LOCAL_1D, *args)


def empty_pair(shape: tuple[int, ...], like: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    return Tensor.empty(shape, dtype, queue=like.queue), Tensor.empty(shape, dtype, queue=like.queue)


def sums(
    operands: dict[str, str], g: Tensor, kept: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, sizes: Channels, by_image: int, by: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of g * normalized x and of g over each channel: the gradients of weight and bias.

    ``g`` is the gradient of the norm's result or, if given, of ``kept``, the result of a ReLU after the norm. ``by_image`` is the number of
    statistics per image, 0 if they are per channel; ``by`` is the number of channels per group.
    """
    defines = defines_of(None, None, False, columns=sizes.span == 1 and by == 1 and by_image <= 1, masked=kept is not None)
    firsts, seconds = empty_pair((sizes.parts, sizes.channels), x, mean.dtype)
    args = (g, g if kept is None else kept, x, mean, rstd, firsts, seconds, sizes.chunk, sizes.parts, by_image, by)
    run_channels("sum_parts", operands, defines, x.queue, sizes, sizes.parts * sizes.channels, *args)
    bias_grad, weight_grad = join_sums(operands, x, firsts, seconds)
    return weight_grad, bias_grad


# ---- gradients


def through_statistics(F: Any, d_x: Any, g_mean: Any, g_rstd: Any, x: Any, mean: Any, rstd: Any, view: View, centered: bool) -> Any:
    """Return ``d_x`` plus the part that flows through the statistics; ``g_mean`` and ``g_rstd`` may be ``None``."""
    if g_mean is None and g_rstd is None:
        return d_x
    scale, found = 1 / max(view.shared, 1), F.reshape(d_x, view.shape)
    if g_mean is not None and centered:
        found = F.add(found, F.mul(F.reshape(g_mean, view.stats), scale))
    if g_rstd is not None:
        seen, cube = F.sub(F.reshape(x, view.shape), F.reshape(mean, view.stats)), F.mul(rstd, F.mul(rstd, rstd))
        found = F.add(found, F.mul(seen, F.mul(F.reshape(F.mul(g_rstd, cube), view.stats), -scale)))
    return F.reshape(found, x.shape)


def _row_norm_vjp(F, g, out1, out2, x, weight, axes, groups, centered, needs):
    gy, g_mean, g_rstd = g
    mean, rstd = out1, out2
    where = {"axes": axes, "groups": groups}
    gy = F.mul(x, 0) if gy is None else gy
    d_x = d_weight = d_bias = None
    if needs[0] and (needs[1] or needs[2]):
        d_x, d_weight, d_bias = F.row_norm_grads(gy, x, weight, mean, rstd, centered=centered, **where)
    elif needs[0]:
        d_x = F.row_norm_grad(gy, x, weight, mean, rstd, centered=centered, **where)
    else:
        d_weight, d_bias = F.row_norm_weight_grad(gy, x, mean, rstd, **where)
    if needs[0]:
        d_x = through_statistics(F, d_x, g_mean, g_rstd, x, mean, rstd, _row_view(x.shape, axes, groups), centered)
    return d_x, d_weight, d_bias


def _of_rows(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for arrays, which gives gradients of row norms, as the ``formula`` of an op."""

    def formula(F: Any, upstream: Any, x: Any, *others: Any, axes: int = 1, groups: int = 0, **options: Any) -> Any:
        return gradients(upstream, x, *others, view=_row_view(x.shape, axes, groups), rows=partial(OpRows, F), **options)

    return formula


# ---- ops


@op(vjp=_row_norm_vjp, ref="numpy", samples=_ROW_SAMPLES, tol=4)
def row_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, axes: int = 1, groups: int = 0, centered: bool = True,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize rows: the last ``axes`` axes, or with ``groups`` the groups of channels of ``(N, C, ...)``.

    Returns the result, the means and one over the standard deviations; ``centered=False`` takes the means to be 0.
    """
    x, weight, bias = launch.as_tensors("row_norm", x, weight, bias)
    _check_row_norm("row_norm", x, weight, bias, axes, groups)
    dtype, stats = sum_dtype(x.dtype), ((x.shape[0], groups) if groups else x.shape[: len(x.shape) - axes])
    if x.backend == "cpu":
        view = _row_view(x.shape, axes, groups)
        y, *found = launch.run_cpu(norm_arrays, x, weight, bias, dtype=(x.dtype, dtype, dtype), view=view, eps=eps, centered=centered)
        return y, *(with_shape(t, stats) for t in found)
    y = Tensor.empty(x.shape, x.dtype, queue=x.queue)
    mean, rstd = empty_pair(stats, x, dtype)
    if x.size:
        n_groups, channels, n_rows, n = _row_sizes(x.shape, axes, groups)
        defines = defines_of(weight, bias, not groups, centered=centered)
        args = (x, x if weight is None else weight, x if bias is None else bias, y, mean, rstd, n_groups, channels, eps)
        run_norm_rows("norm_rows", operands_of(x, x, y, weight, bias, mean), defines, x, n_rows, n, *args, run=n // channels)
    return y, mean, rstd


@op(vjp=None, formula=_of_rows(_input_gradient), ref="numpy", samples=_ROW_GRAD_SAMPLES, tol=4)
def row_norm_grad(
    upstream: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *, axes: int = 1, groups: int = 0,
    centered: bool = True,
) -> Tensor:  # fmt: skip
    """The gradient of :func:`row_norm`'s input."""
    upstream, x, weight, mean, rstd = launch.as_tensors("row_norm_grad", upstream, x, weight, mean, rstd)
    _check_row_norm("row_norm_grad", x, weight, None, axes, groups)
    if x.backend == "cpu":
        view = _row_view(x.shape, axes, groups)
        return launch.run_cpu(_input_gradient, upstream, x, weight, mean, rstd, dtype=x.dtype, view=view, centered=centered)
    y = Tensor.empty(x.shape, x.dtype, queue=x.queue)
    if x.size:
        n_groups, channels, n_rows, n = _row_sizes(x.shape, axes, groups)
        defines = defines_of(weight, weight, not groups, centered=centered)
        args = (upstream, x, x if weight is None else weight, mean, rstd, y, y, y, n_groups, channels)
        run_norm_rows("norm_grad_rows", operands_of(upstream, x, y, weight, weight, mean), defines, x, n_rows, n, *args, run=n // channels)
    return y


@op(vjp=None, formula=_of_rows(all_gradients), ref="numpy", samples=_ROW_GRAD_SAMPLES, tol=8)
def row_norm_grads(
    upstream: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *, axes: int = 1, groups: int = 0,
    centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute all gradients of :func:`row_norm`: input, weight, bias."""
    upstream, x, weight, mean, rstd = launch.as_tensors("row_norm_grads", upstream, x, weight, mean, rstd)
    _check_row_norm("row_norm_grads", x, weight, None, axes, groups)
    shape = x.shape[1:2] if groups else x.shape[x.ndim - axes :]
    if x.backend == "cpu":
        kinds, view = (x.dtype, mean.dtype, mean.dtype), _row_view(x.shape, axes, groups)
        return launch.run_cpu(all_gradients, upstream, x, weight, mean, rstd, dtype=kinds, view=view, centered=centered)
    if groups or not x.size:
        d_x = row_norm_grad(upstream, x, weight, mean, rstd, axes=axes, groups=groups, centered=centered)
        return d_x, *row_norm_weight_grad(upstream, x, mean, rstd, axes=axes, groups=groups)
    y, n_rows, n = Tensor.empty(x.shape, x.dtype, queue=x.queue), math.prod(x.shape[: x.ndim - axes]), math.prod(shape)
    operands = operands_of(upstream, x, y, weight, weight, mean)
    args = (upstream, x, x if weight is None else weight, mean, rstd, y)
    spread = rows.part_spread(x.queue, n_rows, n, operands, args)
    parts = empty_pair((-(-n_rows // spread.each), n), x, mean.dtype)
    defines = defines_of(weight, weight, True, centered=centered, sums=True)
    found = rows.row_kernel(x.queue, __file__, _FILES, "norm_grad_rows", operands, spread, defines)
    found(x.queue, parts[0].shape[0] * spread.group, spread.local, *args, *parts, 1, 1, n_rows, n, spread.each)
    bias_grad, weight_grad = join_sums(operands, x, *parts)
    return y, with_shape(weight_grad, shape), with_shape(bias_grad, shape)


@op(vjp=None, formula=_of_rows(_weight_gradients), ref="numpy", samples=_WEIGHT_GRAD_SAMPLES, tol=8)
def row_norm_weight_grad(
    upstream: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *, axes: int = 1, groups: int = 0
) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`row_norm`'s weight and bias."""
    upstream, x, mean, rstd = launch.as_tensors("row_norm_weight_grad", upstream, x, mean, rstd)
    _check_row_norm("row_norm_weight_grad", x, None, None, axes, groups)
    shape = x.shape[1:2] if groups else x.shape[x.ndim - axes :]
    if x.backend == "cpu":
        view = _row_view(x.shape, axes, groups)
        return launch.run_cpu(_weight_gradients, upstream, x, mean, rstd, dtype=mean.dtype, view=view)
    if not x.size:
        return Tensor.zeros(shape, mean.dtype, queue=x.queue), Tensor.zeros(shape, mean.dtype, queue=x.queue)
    operands = operands_of(upstream, x, x, None, None, mean)
    if groups:
        sizes = parts_of(x.queue, *batch_view(x.shape).shape)
        return sums(operands, upstream, None, x, mean, rstd, sizes, groups, x.shape[1] // groups)
    n_rows = math.prod(x.shape[: x.ndim - axes])
    sizes = parts_of(x.queue, n_rows, math.prod(shape), 1)
    weight_grad, bias_grad = sums(operands, upstream, None, x, mean, rstd, sizes, 1, 1)
    return with_shape(weight_grad, shape), with_shape(bias_grad, shape)


# ---- public ops


def _shape_of(x: Any) -> tuple[int, ...]:
    return x.shape if isinstance(x, Tensor) else np.shape(x)


def _trailing(name: str, x: Any, normalized_shape: int | Sequence[int]) -> int:
    """Return the number of axes of ``normalized_shape``; raises unless the shape of ``x`` ends in it."""
    wanted = (normalized_shape,) if isinstance(normalized_shape, (int, np.integer)) else tuple(normalized_shape)
    shape = _shape_of(x)
    if not wanted or shape[-len(wanted) :] != wanted:
        raise ShapeError(message(name, "normalized_shape must not be empty, and x.shape must end in it", normalized_shape=wanted, x=shape))
    return len(wanted)


def _channels_of(name: str, x: Any) -> int:
    shape = _shape_of(x)
    if len(shape) < 2:
        raise ShapeError(message(name, "x must be (N, C, ...)", x=shape))
    return shape[1]


@composite(
    ref="numpy", inputs=("x", "weight", "bias"), tol=4,
    samples=[S((3, 5), 5, (5,), (5,)), S((2, 3, 257), 257), S((2, 5, 7), normalized_shape=(5, 7))],
    errors=[(S((3, 5), 4), r"\[layer_norm\] normalized_shape must not be empty, and x.shape must end in it; normalized_shape=\(4,\)"),
            (S((3, 5), 5, (4,)), r"\[row_norm\] weight must have shape \(5,\); weight=\(4,\)")],
)  # fmt: skip
def layer_norm(
    F: Any, x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the trailing axes: ``(x - mean) / sqrt(var + eps) * weight + bias``, statistics per row.

    >>> from netcl import ops
    >>> ops.layer_norm([[1.0, 3.0]], 2, eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    return F.row_norm(x, weight, bias, axes=_trailing("layer_norm", x, normalized_shape), eps=eps)[0]


@composite(
    ref="numpy", inputs=("x", "weight"), tol=4,
    samples=[S((3, 5), 5, (5,)), S((2, 3, 257), 257)],
    errors=[(S((3, 5), 4), r"\[rms_norm\] normalized_shape must not be empty, and x.shape must end in it; normalized_shape=\(4,\)")],
)  # fmt: skip
def rms_norm(F: Any, x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMS norm over the trailing axes: ``x / sqrt(mean(x^2) + eps) * weight``.

    >>> from netcl import ops
    >>> ops.rms_norm([[2.0, 2.0]], 2, eps=0.0).tolist()
    [[1.0, 1.0]]
    """
    return F.row_norm(x, weight, None, axes=_trailing("rms_norm", x, normalized_shape), centered=False, eps=eps)[0]


@composite(
    ref="numpy", inputs=("x", "weight", "bias"), tol=4,
    samples=[S((2, 6, 5), 3, (6,), (6,)), S((2, 4, 3, 3), 1), S((3, 4), 2)],
    errors=[(S((2, 6, 5), 4), r"\[row_norm\] x must be \(N, C, ...\), and groups must be at least 1 and divide C; groups=4"),
            (S((2, 6, 5), 0), r"\[group_norm\] num_groups must be at least 1; num_groups=0")],
)  # fmt: skip
def group_norm(F: Any, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Group norm of ``(N, C, ...)``: statistics per image and group of channels, weight and bias per channel."""
    _channels_of("group_norm", x)
    if num_groups < 1:
        raise ShapeError(message("group_norm", "num_groups must be at least 1", num_groups=num_groups))
    return F.row_norm(x, weight, bias, groups=num_groups, eps=eps)[0]


@composite(
    ref="numpy", tol=4,
    samples=[S((2, 3, 4, 5), (3,), (3,)), S((2, 3, 33))],
    errors=[(S((3,)), r"\[instance_norm\] x must be \(N, C, ...\); x=\(3,\)")],
)  # fmt: skip
def instance_norm(F: Any, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Instance norm of ``(N, C, ...)``: statistics per image and channel."""
    channels = _channels_of("instance_norm", x)
    if math.prod(x.shape[2:]) == 1:
        raise ShapeError(message("instance_norm", "x must have more than one value per image and channel", **{"x.shape": x.shape}))
    return F.row_norm(x, weight, bias, groups=channels, eps=eps)[0] if channels else x
