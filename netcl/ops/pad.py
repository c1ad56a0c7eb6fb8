"""Padding: elements added at the ends of axes, or removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.engine import launch
from netcl.engine.registry import S, op
from netcl.engine.strided import copy_block, dense
from netcl.ops.movement import along

PAD_MODES = ("constant", "reflect", "replicate", "circular")


def _padding_by_axis(x_shape: tuple[int, ...], padding: Sequence[int]) -> list[tuple[int, int]]:
    """Return (before, after) for every axis; ``padding`` names the last axis first, as in torch."""
    if any(not isinstance(n, int | np.integer) for n in padding):
        given: Sequence[Any] = padding
        pair_per_axis = all(isinstance(part, list | tuple) and len(part) == 2 for part in given)
        flat = tuple(n for pair in given[::-1] for n in pair) if pair_per_axis else ()
        remedy = f"pairs per axis, as in np.pad, are written flat: padding={flat}" if flat else ""
        raise ShapeError(message("pad", "padding must be integers, two per axis, the last axis first", remedy, padding=tuple(padding)))
    if len(padding) % 2 or len(padding) > 2 * len(x_shape):
        what = f"padding must have two numbers per axis, the last axis first, and at most {2 * len(x_shape)}"
        raise ShapeError(message("pad", what, padding=tuple(padding), **{"x.shape": x_shape}))
    pairs = [(int(padding[i]), int(padding[i + 1])) for i in range(0, len(padding), 2)]
    return [(0, 0)] * (len(x_shape) - len(pairs)) + pairs[::-1]


def _constant_pad(x: Tensor, sides: Sequence[tuple[int, int]], value: float) -> Tensor:
    shape = tuple(n + before + after for n, (before, after) in zip(x.shape, sides, strict=True))
    if min(shape, default=0) < 0:
        raise ShapeError(message("pad", "negative padding must not exceed the size of an axis", **{"x.shape": x.shape, "result": shape}))
    out = Tensor.full(shape, value, x.dtype, queue=x.queue)
    s_strides, d_strides = dense(x.shape), dense(shape)
    sizes = [n + min(before, 0) + min(after, 0) for n, (before, after) in zip(x.shape, sides, strict=True)]
    source = sum(max(-before, 0) * stride for (before, _), stride in zip(sides, s_strides, strict=True))
    target = sum(max(before, 0) * stride for (before, _), stride in zip(sides, d_strides, strict=True))
    if min(sizes, default=1) > 0:
        copy_block(sizes, x, source, s_strides, out, target, d_strides)
    return out


def _border_fills(mode: str, n: int, before: int, after: int) -> list[tuple[int, int, int, int]]:
    """Return the copies that fill the border of an axis: (length, first source element, step, first target element)."""
    if mode == "reflect":
        return [(before, before, -1, 0), (after, n - 2, -1, before + n)]
    if mode == "replicate":
        return [(before, 0, 0, 0), (after, n - 1, 0, before + n)]
    return [(before, n - before, 1, 0), (after, 0, 1, before + n)]


def _pad_axis(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    n = x.shape[axis]
    most = {"reflect": max(n - 1, 0), "replicate": math.inf if n else 0, "circular": n}[mode]
    if min(before, after) < 0 or max(before, after) > most:
        what = f"{mode} padding of an axis of {n} must be at least 0" + (f" and at most {most}" if most < math.inf else "")
        raise ShapeError(message("pad", what, padding=(before, after), axis=axis, **{"x.shape": x.shape}))
    out = Tensor.empty(along(x.ndim, axis, n + before + after, x.shape), x.dtype, queue=x.queue)
    s_strides, d_strides = dense(x.shape), dense(out.shape)
    for length, first, step, at in [(n, 0, 1, before), *_border_fills(mode, n, before, after)]:
        walk = along(x.ndim, axis, step * s_strides[axis], s_strides)
        copy_block(along(x.ndim, axis, length, x.shape), x, first * s_strides[axis], walk, out, at * d_strides[axis], d_strides)
    return out


def _unpad_axis(F, g, axis, before, after, mode):
    """Return the gradient of :func:`_pad_axis`: every border element is added to the element it was copied from."""
    n = g.shape[axis] - before - after
    total = F.narrow(g, axis, before, n)
    for length, first, step, at in _border_fills(mode, n, before, after):
        if length:
            part = F.narrow(g, axis, at, length)
            part = F.sum(part, axis=axis, keepdims=True) if step == 0 else part
            ndim = len(g.shape)
            total = F.add(total, F.strided_unslice(part, total.shape, along(ndim, axis, first), along(ndim, axis, step or 1, 1)))
    return total


def _pad_vjp(F, g, x_shape, padding, mode):
    if mode == "constant":
        return F.pad(g, tuple(-n for n in padding))
    for axis, (before, after) in reversed(list(enumerate(_padding_by_axis(x_shape, padding)))):
        if before or after:
            g = _unpad_axis(F, g, axis, before, after, mode)
    return g


@op(
    vjp=_pad_vjp,
    ref="numpy",
    samples=[
        S((2, 3), padding=(1, 2)),
        S((2, 3, 4), padding=(1, 0, 2, 1), value=2.5),
        S((4, 5), padding=(-1, 1, 0, -2)),
        S((2, 3, 5), padding=(2, 1, 1, 2), mode="reflect"),
        S((2, 3, 4), padding=(2, 1, 0, 3), mode="replicate"),
        S((2, 4, 4), padding=(3, 1, 0, 2), mode="circular"),
    ],
    errors=[
        (S((2, 3), padding=((1, 2), (0, 3))), r"\[pad\] padding must be integers, .*; .* written flat: padding=\(0, 3, 1, 2\)"),
        (S((2, 3), padding=(1,)), r"\[pad\] padding must have two numbers per axis, the last axis first, and at most 4; padding=\(1,\)"),
        (S((2, 3), padding=(3, 0), mode="reflect"), r"\[pad\] reflect padding of an axis of 3 must be at least 0 and at most 2"),
        (S((2, 3), padding=(1, 1), mode="mirror"), r"\[pad\] mode must be one of constant, reflect, .*; mode='mirror'"),
        (S((2, 3), padding=(-2, -2)), r"\[pad\] negative padding must not exceed the size of an axis"),
    ],
)
def pad(x: Tensor, padding: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Add elements at the ends of axes or, with negative numbers in ``constant`` mode, remove them.

    ``padding`` is ``(before, after)`` of the last axis, then of the axis before it, and so on, as in torch. ``mode`` is
    ``constant``, ``reflect``, ``replicate`` or ``circular``.
    """
    x = launch.as_tensors("pad", x)[0]
    if mode not in PAD_MODES:
        raise ShapeError(message("pad", f"mode must be one of {', '.join(PAD_MODES)}", mode=repr(mode)))
    if value and mode != "constant":
        raise ValueError(message("pad", "value must be 0 unless mode is constant", mode=repr(mode), value=value))
    sides = _padding_by_axis(x.shape, padding)
    if mode == "constant":
        return _constant_pad(x, sides, value)
    padded = x
    for axis, (before, after) in enumerate(sides):
        if before or after:
            padded = _pad_axis(padded, axis, before, after, mode)
    return padded if padded is not x else duplicate(x)
