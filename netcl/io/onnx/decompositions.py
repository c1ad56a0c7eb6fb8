"""Ops that are exported as other ops.

A decomposition has the arguments of its op and calls the ops it is made of, which the trace records instead; what it returns for
arguments that it does not cover is ``NotImplemented``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.onnx.trace import Unsupported

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}


def decomposes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a decomposition."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS.update(dict.fromkeys(names, function))
        return function

    return add


def _swapped(x: Tensor) -> Tensor:
    return ag.reorder(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


# ---- shape


@decomposes("unbind")
def _unbind(x: Tensor, axis: int, order: Any) -> Any:
    axis %= x.ndim
    kept = [i for i in range(x.ndim) if i != axis]
    first = ag.reorder(x, [axis, *(kept[i] for i in (range(len(kept)) if order is None else order))])
    return tuple(ag.reshape(part, first.shape[1:]) for part in ag.split(first, 1))


@decomposes("bound")
def _bound(xs: Any, axis: int, order: Any) -> Tensor:
    turned = [ag.reorder(x, np.argsort(order).tolist()) for x in xs]
    return ag.cat([ag.unsqueeze(x, axis % (x.ndim + 1)) for x in turned], axis)


@decomposes("roll")
def _roll(x: Tensor, shifts: Any, axis: Any) -> Tensor:
    if axis is None:
        raise Unsupported("roll without an axis")
    for shift, at in zip(np.atleast_1d(shifts).tolist(), np.atleast_1d(axis).tolist(), strict=True):
        cut = -shift % max(x.shape[at], 1)
        x = ag.cat([ag.narrow(x, at, cut, x.shape[at] - cut), ag.narrow(x, at, 0, cut)], at)
    return x


# ---- reductions and sorting


@decomposes("argmax")
def _argmax(x: Tensor, axis: Any, keepdims: bool) -> Any:
    return NotImplemented if axis is not None else ag.reshape(ag.argmax(ag.reshape(x, -1), 0), [1] * x.ndim if keepdims else [])


@decomposes("argmin")
def _argmin(x: Tensor, axis: Any, keepdims: bool) -> Any:
    return NotImplemented if axis is not None else ag.reshape(ag.argmin(ag.reshape(x, -1), 0), [1] * x.ndim if keepdims else [])


@decomposes("cumsum")
def _cumsum(x: Tensor, axis: Any, reverse: bool) -> Any:
    return NotImplemented if axis is not None else ag.cumsum(ag.reshape(x, -1), 0, reverse)


@decomposes("any")
def _any(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return ag.amax(ag.cast(ag.ne(x, 0), "int32"), axis, keepdims)


@decomposes("all")
def _all(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return ag.amin(ag.cast(ag.ne(x, 0), "int32"), axis, keepdims)


@decomposes("count_nonzero")
def _count_nonzero(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return ag.sum(ag.cast(ag.ne(x, 0), "int64"), axis, keepdims)


@decomposes("var")
def _var(x: Tensor, axis: Any, keepdims: bool, correction: float) -> Tensor:
    total = ag.sum(ag.square(ag.sub(x, ag.mean(x, axis, keepdims=True))), axis, keepdims)
    return ag.div(total, float(x.size // max(total.size, 1) - correction))


@decomposes("std")
def _std(x: Tensor, axis: Any, keepdims: bool, correction: float) -> Tensor:
    return ag.sqrt(ag.var(x, axis, keepdims=keepdims, correction=correction))


@decomposes("sort")
def _sort(x: Tensor, axis: int, descending: bool) -> Any:
    return tuple(ag.topk(x, x.shape[axis], axis, descending))


@decomposes("argsort")
def _argsort(x: Tensor, axis: int, descending: bool) -> Tensor:
    return ag.topk(x, x.shape[axis], axis, descending)[1]


@decomposes("scatter")
def _scatter(x: Tensor, axis: int, index: Any, src: Any) -> Any:
    part = _used_part(x, index, src)
    return NotImplemented if part is src else ag.scatter(x, axis, index, part)


@decomposes("scatter_add")
def _scatter_add(x: Tensor, axis: int, index: Tensor, src: Tensor) -> Any:
    part = _used_part(x, index, src)
    return NotImplemented if part is src else ag.scatter_add(x, axis, index, part)


def _used_part(x: Tensor, index: Any, src: Any) -> Any:
    """The part of ``src`` that has the shape of the index, which ONNX requires."""
    shape = np.shape(index)
    if not isinstance(src, Tensor):
        src = Tensor.from_host(x.queue, np.broadcast_to(np.asarray(src), shape).astype(x.dtype), x.dtype)
    for axis, n in enumerate(shape):
        src = src if src.shape[axis] == n else ag.narrow(src, axis, 0, n)
    return src


# ---- products and activations


@decomposes("matmul")
def _matmul(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Any:
    if not transpose_a and not transpose_b:
        return NotImplemented
    return ag.matmul(*(_swapped(x) if turn and x.ndim > 1 else x for x, turn in ((a, transpose_a), (b, transpose_b))))


@decomposes("affine")
def _affine(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
    if x.ndim == 2:
        return NotImplemented
    product = ag.matmul(x, w, transpose_b=True)
    return product if bias is None else ag.add(product, bias)


@decomposes("linear", "affine_activated")
def _activated(x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    made = ag.affine(x, w, bias)
    return made if activation is None else getattr(ag, activation)(made)


@decomposes("conv2d_relu")
def _conv2d_relu(x: Tensor, w: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return ag.relu(ag.conv2d(x, w, bias, **options))


@decomposes("bias_add")
def _bias_add(x: Tensor, bias: Tensor, axis: int | None) -> Tensor:
    at = 1 if axis is None or x.ndim == 2 else axis % x.ndim
    return ag.add(x, ag.reshape(bias, [-1 if i == at else 1 for i in range(x.ndim)]))


@decomposes("prelu")
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    return ag.prelu_broadcast(x, ag.reshape(weight, [-1, *[1] * (x.ndim - 2)]) if weight.size > 1 else weight)


@decomposes("masked_fill")
def _masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return ag.where(mask, value, x)


@decomposes("adaptive_avg_pool2d", "adaptive_avg_pool1d")
def _adaptive_average(x: Tensor, output_size: Any) -> Any:
    kernel = _whole_windows("adaptive_avg_pool", x, output_size)
    return NotImplemented if kernel is None else ag.avg_pool1d(x, *kernel) if x.ndim == 3 else ag.avg_pool2d(x, kernel)


@decomposes("adaptive_max_pool2d")
def _adaptive_max(x: Tensor, output_size: Any, return_indices: bool) -> Any:
    if return_indices:
        raise Unsupported("adaptive_max_pool2d(return_indices=True)")
    kernel = _whole_windows("adaptive_max_pool", x, output_size)
    return NotImplemented if kernel is None else ag.max_pool2d(x, kernel)


def _whole_windows(op: str, x: Tensor, output_size: Any) -> tuple[int, ...] | None:
    """The windows that divide an image into ``output_size``; ``None`` for one window, which has an operator of its own."""
    sizes = x.shape[2:]
    given = output_size if isinstance(output_size, list | tuple) else [output_size] * len(sizes)
    outs = [n if out is None else out for n, out in zip(sizes, given, strict=True)]
    if all(out == 1 for out in given):
        return None
    if any(n % out for n, out in zip(sizes, outs, strict=True)):
        raise Unsupported(f"{op}{len(sizes)}d to sizes that do not divide the image")
    return tuple(n // out for n, out in zip(sizes, outs, strict=True))


# ---- norms and attention


@decomposes("batch_norm_inference")
def _batch_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float, fuse_relu: bool) -> Any:
    return ag.relu(ag.batch_norm_inference(x, mean, var, weight, bias, eps=eps)) if fuse_relu else NotImplemented


@decomposes("rms_norm")
def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float) -> Tensor:
    mean = ag.mean(ag.square(x), tuple(range(-np.size(normalized_shape), 0)), keepdims=True)
    scaled = ag.div(x, ag.sqrt(ag.add(mean, eps)))
    return scaled if weight is None else ag.mul(scaled, weight)


@decomposes("group_norm")
def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """An instance norm of the groups, then the weights, which are per channel."""
    made = ag.reshape(ag.instance_norm(ag.reshape(x, (x.shape[0], num_groups, -1)), eps=eps), x.shape)
    column = [-1, *[1] * (x.ndim - 2)]
    made = made if weight is None else ag.mul(made, ag.reshape(weight, column))
    return made if bias is None else ag.add(made, ag.reshape(bias, column))


@decomposes("scaled_dot_product_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, attn_mask: Any, causal: bool, is_causal: bool, scale: float | None, dropout_p: float
) -> Tensor:
    if dropout_p:
        raise Unsupported("scaled_dot_product_attention(dropout_p=...)")
    k, v, mask = _all_heads(q, k), _all_heads(q, v), attn_mask if mask is None else mask
    scores = ag.matmul(ag.mul(q, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)), _swapped(k))
    if causal or is_causal:
        allowed = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
        scores = ag.where(Tensor.from_host(q.queue, allowed), scores, -math.inf)
    if mask is None:
        return ag.matmul(ag.softmax(scores), v)
    mask = mask if isinstance(mask, Tensor) else Tensor.from_host(q.queue, np.asarray(mask))
    shares = ag.softmax(ag.where(mask, scores, -math.inf) if mask.dtype == "bool" else ag.add(scores, mask))
    return ag.matmul(ag.where(ag.isnan(shares), 0.0, shares), v)  # a query that may attend to no key gives 0


def _all_heads(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values, with each head repeated for the queries that share it."""
    if x.ndim < 3 or x.shape[-3] == q.shape[-3]:
        return x
    *batch, heads, n, depth = x.shape
    spread = ag.expand(ag.unsqueeze(x, -3), (*batch, heads, q.shape[-3] // heads, n, depth))
    return ag.reshape(spread, (*batch, q.shape[-3], n, depth))


@decomposes("rope")
def _rope(x: Tensor, positions: Any, base: float, offset: int, interleaved: bool, inverse: bool) -> Tensor:
    if positions is not None:
        raise Unsupported("rope with positions")
    n, depth = x.shape[-2:]
    angles = np.arange(offset, offset + n)[:, None] * float(base) ** (-2 * np.arange(depth // 2) / depth)
    tables = (np.cos(angles), np.sin(-angles if inverse else angles))
    cos, sin = (ag.cast(Tensor.from_host(x.queue, table.astype(np.float32)), x.dtype) for table in tables)
    pairs = ag.reshape(x, (*x.shape[:-1], depth // 2, 2) if interleaved else (*x.shape[:-1], 2, depth // 2))
    a, b = ag.unbind(pairs, -1 if interleaved else -2)
    turned = [ag.sub(ag.mul(a, cos), ag.mul(b, sin)), ag.add(ag.mul(a, sin), ag.mul(b, cos))]
    return ag.reshape(ag.stack(turned, -1), x.shape) if interleaved else ag.cat(turned, -1)
