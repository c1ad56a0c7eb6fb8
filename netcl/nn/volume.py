"""Convolutions and pools of volumes ``(batch, channels, depth, height, width)``, and other pools and unpools, composed of ops."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor

Sizes = int | Sequence[int]


def several(value: Sizes, axes: int, name: str, op: str = "conv") -> tuple[int, ...]:
    """Return a tuple of one integer per axis; a single integer, alone or in a tuple, is repeated for all axes."""
    values = (value,) if isinstance(value, int) else tuple(value)
    values = values * axes if len(values) == 1 else values
    if len(values) != axes or any(not isinstance(n, int) for n in values):
        raise ShapeError(message(op, f"{name} must be an integer or {axes} integers, one per axis", given=repr(value)))
    return values


def _volume(op: str, x: Tensor, label: str = "input") -> tuple[int, ...]:
    if x.ndim != 5:
        what = f"{label} must have 5 dimensions (batch, channels, depth, height, width), got {x.ndim}"
        raise ShapeError(message(op, what, **{f"{label}.shape": x.shape}))
    return x.shape


def _takes_one_sample(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Let a function of volumes also take one sample without the batch dimension, as in torch."""

    @functools.wraps(function)
    def call(input: Tensor, *args: object, **kwargs: object) -> Any:
        if input.ndim != 4:
            return function(input, *args, **kwargs)
        made = function(ag.unsqueeze(input, 0), *args, **kwargs)
        return tuple(y[0] for y in made) if isinstance(made, tuple) else made[0]

    return call


# ---- convolutions


@_takes_one_sample
def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1,
           groups: int = 1) -> Tensor:  # fmt: skip
    """Convolve volumes, by one convolution of images: the depth of the kernel becomes part of the channels."""
    kernel = _volume("conv3d", weight, "weight")[2]
    batch, channels, *_ = _volume("conv3d", input)
    (step, *steps), (spread, *spreads) = several(stride, 3, "stride", "conv3d"), several(dilation, 3, "dilation", "conv3d")
    front, back = 0, 0
    plane: Any = padding
    if padding == "same":
        front, back = spread * (kernel - 1) // 2, -(-spread * (kernel - 1) // 2)
        if step != 1:
            raise ShapeError(message("conv3d", "padding='same' requires stride 1", stride=stride))
    elif not isinstance(padding, str):
        front, *plane = several(padding, 3, "padding", "conv3d")
        back = front
    x = ag.pad(input, (0, 0, 0, 0, front, back)) if front or back else input
    outs = (x.shape[2] - spread * (kernel - 1) - 1) // step + 1
    if outs < 1:
        raise ShapeError(message("conv3d", f"the kernel must fit the padded input, got depth {spread * (kernel - 1) + 1} > {x.shape[2]}"))
    taps = [x[:, :, k * spread : k * spread + (outs - 1) * step + 1 : step] for k in range(kernel)]
    windows = ag.permute(ag.stack(taps, axis=3), (0, 2, 1, 3, 4, 5))
    images = ag.reshape(windows, (batch * outs, channels * kernel, *x.shape[3:]))
    filters = ag.reshape(weight, (weight.shape[0], weight.shape[1] * kernel, *weight.shape[3:]))
    y = ag.conv2d(images, filters, bias, stride=tuple(steps), padding=plane, dilation=tuple(spreads), groups=groups)
    return ag.transpose(ag.reshape(y, (batch, outs, *y.shape[1:])), 1, 2)


@_takes_one_sample
def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
                     output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1) -> Tensor:  # fmt: skip
    """Compute the transpose of :func:`conv3d`: one transposed convolution of images, whose results are added up along the depth."""
    op = "conv_transpose3d"
    batch, channels, depth, *size = _volume(op, input)
    _, filters, kernel, *window = _volume(op, weight, "weight")
    given = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    options = {name: several(value, 3, name, op) for name, value in given.items()}
    step, pad, extra, spread = (value[0] for value in options.values())
    images = ag.reshape(ag.transpose(input, 1, 2), (batch * depth, channels, *size))
    planes: dict[str, Any] = {name: value[1:] for name, value in options.items()}
    y = ag.conv_transpose2d(images, ag.reshape(weight, (channels, filters * kernel, *window)), groups=groups, **planes)
    filters, (high, wide) = filters * groups, y.shape[2:]
    windows = ag.permute(ag.reshape(y, (batch, depth, filters, kernel, high * wide)), (0, 2, 4, 3, 1))
    outs = (depth - 1) * step - 2 * pad + spread * (kernel - 1) + extra + 1
    columns = ag.reshape(windows, (batch, filters * high * wide * kernel, depth))
    folded = ag.col2im(columns, size=(outs, 1), kernel=(kernel, 1), stride=(step, 1), padding=(pad, 0), dilation=(spread, 1))
    y = ag.reshape(ag.transpose(ag.reshape(folded, (batch, filters, high * wide, outs)), 2, 3), (batch, filters, outs, high, wide))
    return y if bias is None else ag.add(y, ag.reshape(bias, (-1, 1, 1, 1)))


# ---- pools: of every plane, then along the depth


def _pooled(x: Tensor, plane: Callable[[Tensor], Any], depth: Callable[[Tensor], Any], places: bool = False) -> Any:
    """Pool by ``plane``, then along the depth by ``depth``; with ``places`` also return the flat indices of the maxima in the volume."""
    batch, channels, deep, *size = x.shape
    y = plane(ag.reshape(x, (batch, channels * deep, *size)))
    y, inside = y if places else (y, None)
    high, wide = y.shape[2:]
    y = depth(ag.reshape(y, (batch, channels, deep, high * wide)))
    y, at = y if places else (y, None)
    shape = (batch, channels, y.shape[2], high, wide)
    if inside is None or at is None:
        return ag.reshape(y, shape)
    at = ag.reshape(at, (batch, channels, -1))
    inside = ag.gather(ag.reshape(inside, (batch, channels, -1)), 2, at)
    found = ag.add(ag.mul(ag.floor_divide(at, high * wide), math.prod(size)), inside)
    return ag.reshape(y, shape), ag.reshape(found, shape)


def _pool3d(op: str, pool: Callable[..., Any], x: Tensor, settings: Sequence[Any], *rest: Any, places: bool = False) -> Any:
    """Pool volumes by ``pool`` for images. ``settings``: kernel, stride (``None``: the kernel size), padding and, for maxima, dilation."""
    _volume(op, x)
    sizes = [several(settings[0] if value is None else value, 3, "every setting", op) for value in settings]
    plane, depth = [size[1:] for size in sizes], [(size[0], unit) for size, unit in zip(sizes, (1, 1, 0, 1), strict=False)]
    return _pooled(x, lambda y: pool(y, *plane, *rest), lambda y: pool(y, *depth, *rest), places)


@_takes_one_sample
def max_pool3d(input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
               ceil_mode: bool = False, return_indices: bool = False) -> Any:  # fmt: skip
    """Return the largest value of each window of volumes; ``return_indices`` also gives its flat index in the volume."""
    settings = kernel_size, stride, padding, dilation
    return _pool3d("max_pool3d", ag.max_pool2d, input, settings, ceil_mode, return_indices, places=return_indices)


@_takes_one_sample
def avg_pool3d(input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:  # fmt: skip
    """Return the mean of each window of volumes, or its sum divided by ``divisor_override``."""
    if divisor_override is not None:
        return _divided(avg_pool3d, input, 3, kernel_size, stride, padding, ceil_mode, divisor_override)
    return _pool3d("avg_pool3d", ag.avg_pool2d, input, (kernel_size, stride, padding), ceil_mode, count_include_pad)


def avg_pool2d(input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:  # fmt: skip
    """Return the mean of each window of images, or its sum divided by ``divisor_override``."""
    if divisor_override is None:
        return ag.avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
    return _divided(ag.avg_pool2d, input, 2, kernel_size, stride, padding, ceil_mode, divisor_override)


def _divided(pool: Callable[..., Tensor], x: Tensor, axes: int, kernel: Sizes, stride: Sizes | None, padding: Sizes, ceil_mode: bool,
             divisor: int) -> Tensor:  # fmt: skip
    """Divide sums of windows by ``divisor``. Zeros are added until every window is whole, so that all means divide by the same number."""
    if not divisor:
        raise ValueError(message(f"avg_pool{axes}d", "divisor_override must not be 0", divisor_override=divisor))
    kernels, pads = several(kernel, axes, "kernel_size"), several(padding, axes, "padding")
    strides = kernels if stride is None else several(stride, axes, "stride")
    sides: list[int] = []
    for size, k, s, p in zip(x.shape[-axes:], kernels, strides, pads, strict=True):
        reach = size + 2 * p - k
        outs = (-(-reach // s) if ceil_mode else reach // s) + 1
        outs -= ceil_mode and (outs - 1) * s >= size + p
        sides[:0] = [p, max((outs - 1) * s + k - size - p, 0)]
    return ag.mul(pool(ag.pad(x, sides), kernels, strides), math.prod(kernels) / divisor)


def _adaptive(op: str, pool: Callable[..., Any], x: Tensor, output_size: Any, *places: bool) -> Any:
    _volume(op, x)
    sizes = (output_size,) * 3 if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(sizes) != 3:
        raise ShapeError(message(op, "output_size must be one integer or three (depth, height, width)", output_size=repr(output_size)))
    depth = x.shape[2] if sizes[0] is None else sizes[0]
    return _pooled(x, lambda y: pool(y, sizes[1:], *places), lambda y: pool(y, (depth, None), *places), any(places))


@_takes_one_sample
def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> Tensor:
    """Pool volumes to ``output_size`` by the mean of each window."""
    return _adaptive("adaptive_avg_pool3d", ag.adaptive_avg_pool2d, input, output_size)


@_takes_one_sample
def adaptive_max_pool3d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Pool volumes to ``output_size`` by the maximum of each window; ``return_indices`` also gives its flat index in the volume."""
    return _adaptive("adaptive_max_pool3d", ag.adaptive_max_pool2d, input, output_size, return_indices)


def adaptive_max_pool1d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Pool signals to ``output_size`` by the maximum of each window; ``return_indices`` also gives its index."""
    (size,) = several(output_size, 1, "output_size", "adaptive_max_pool1d")
    both = ag.adaptive_max_pool2d(ag.unsqueeze(input, -2), (1, size), True)
    y, places = (ag.squeeze(part, -2) for part in both)
    return (y, places) if return_indices else y


def _lp(axes: int, of: str, mean: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def pool(input: Tensor, norm_type: float, kernel_size: Sizes, stride: Sizes | None = None, ceil_mode: bool = False) -> Tensor:
        count = math.prod(several(kernel_size, axes, "kernel_size", "lp_pool"))
        total = ag.mul(mean(ag.pow(input, norm_type), kernel_size, stride, ceil_mode=ceil_mode), float(count))
        return ag.pow(ag.where(ag.eq(total, 0.0), 0.0, total), 1.0 / norm_type)  # where: a finite gradient at 0

    pool.__name__, pool.__doc__ = f"lp_pool{axes}d", f"Return ``max(0, sum(x^p))^(1/p)`` of each window of {of}; ``p`` is ``norm_type``."
    return pool


lp_pool1d, lp_pool2d = _lp(1, "a signal", ag.avg_pool1d), _lp(2, "an image", ag.avg_pool2d)
lp_pool3d = _lp(3, "a volume", avg_pool3d)


# ---- unpooling


def _unpooled(axes: int) -> Callable[..., Tensor]:
    def unpool(input: Tensor, indices: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0,
               output_size: Sequence[int] | None = None) -> Tensor:  # fmt: skip
        op = f"max_unpool{axes}d"
        kernel, pads = several(kernel_size, axes, "kernel_size", op), several(padding, axes, "padding", op)
        strides = kernel if stride is None else several(stride, axes, "stride", op)
        if input.ndim not in (axes + 1, axes + 2) or input.shape != indices.shape:
            what = f"input and indices must have {axes + 2} dimensions, or {axes + 1} without the batch, and the same shape"
            raise ShapeError(message(op, what, **{"input.shape": input.shape, "indices.shape": indices.shape}))
        lead = input.shape[:-axes]
        rows = zip(input.shape[-axes:], kernel, strides, pads, strict=True)
        size = tuple((n - 1) * s - 2 * p + k for n, k, s, p in rows) if output_size is None else tuple(map(int, output_size))[-axes:]
        empty = Tensor.zeros((*lead, math.prod(size)), input.dtype, queue=input.queue)
        filled = ag.scatter(empty, -1, ag.reshape(indices, (*lead, -1)), ag.reshape(input, (*lead, -1)))
        return ag.reshape(filled, (*lead, *size))

    unpool.__name__ = f"max_unpool{axes}d"
    unpool.__doc__ = "Put values at the indices that a max pool returned with ``return_indices``; other elements are 0."
    return unpool


max_unpool1d, max_unpool2d, max_unpool3d = (_unpooled(axes) for axes in (1, 2, 3))


FUNCTIONS = [name for name, made in globals().items() if inspect.isfunction(made) and name[0] != "_" and name != "several"]
