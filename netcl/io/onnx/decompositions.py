"""Ops that are exported as other ops.

A decomposition takes the arguments of its op and calls other ops, which the trace records instead. A decomposition
returns ``NotImplemented`` for arguments that the operator table covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.engine.strided import dense
from netcl.io.onnx.table import positive
from netcl.io.onnx.trace import Unsupported
from netcl.ops.conv.geometry import frozen, geometry, pair
from netcl.ops.getitem import indexed
from netcl.ops.recurrent import steps


def _last_swapped(x: Tensor, swap: bool = True) -> Tensor:
    return ag.reorder(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]) if swap and x.ndim > 1 else x


def _nonzero(x: Tensor, dtype: str) -> Tensor:
    return ag.cast(ag.ne(x, 0), dtype)


def _flat_best(op: Callable[..., Tensor], x: Tensor, axis: Any, keepdims: bool) -> Any:
    """Return ``argmax`` or ``argmin`` over all dimensions; ``NotImplemented`` if an axis is given."""
    return NotImplemented if axis is not None else ag.reshape(op(ag.reshape(x, -1), 0), [1] * x.ndim if keepdims else [])


def _unbind(x: Tensor, axis: int, order: Any) -> Any:
    kept = [i for i in range(x.ndim) if i != axis % x.ndim]
    first = ag.reorder(x, [axis, *(kept[i] for i in (range(len(kept)) if order is None else order))])
    return tuple(ag.reshape(part, first.shape[1:]) for part in ag.split(first, 1))


def _stacked_states(xs: Any, axis: int, order: Any) -> Tensor:
    turned = [ag.reorder(x, np.argsort(order).tolist()) for x in xs]
    return ag.cat([ag.unsqueeze(x, axis % (x.ndim + 1)) for x in turned], axis)


def _by_tensors(x: Tensor, index: Any) -> Any:
    """Take the elements at tensors of indices by a flat index that ops compute; ``NotImplemented`` without such tensors."""
    given = index if isinstance(index, tuple) else (index,)
    return indexed(ag, x, index, _joined) if any(isinstance(part, Tensor) and part.dtype != "bool" for part in given) else NotImplemented


def _joined(name: str, parts: Sequence[tuple[Any, int]], like: Tensor) -> Tensor:
    sizes = tuple([size for _, size in parts])
    given = (ag.cast(x if isinstance(x, Tensor) else Tensor.from_host(like.queue, np.asarray(x)), "int64") for x, _ in parts)
    return reduce(ag.add, map(ag.mul, map(positive, given, sizes), dense(sizes)))


def _roll(x: Tensor, shifts: Any, axis: Any) -> Tensor:
    if axis is None:
        raise Unsupported("roll without an axis")
    for shift, at in zip(np.atleast_1d(shifts).tolist(), np.atleast_1d(axis).tolist(), strict=True):
        cut = -shift % max(x.shape[at], 1)
        x = ag.cat([ag.narrow(x, at, cut, x.shape[at] - cut), ag.narrow(x, at, 0, cut)], at)
    return x


def _circular_pad(x: Tensor, padding: Any, mode: str, value: float) -> Any:
    """Pad ``x`` with the values of its other side; ``NotImplemented`` for other modes."""
    if mode != "circular" or min(padding) < 0:
        return NotImplemented
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        at = x.ndim - 1 - i
        parts = [ag.narrow(x, at, x.shape[at] - before, before)] if before else []
        parts += [x, *([ag.narrow(x, at, 0, after)] if after else [])]
        x = ag.cat(parts, at) if parts[1:] else x
    return x


def _im2col(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Unfold windows by the places of their pixels in the padded image."""
    window = pair("im2col", "kernel", frozen(kernel), 1)
    g = geometry("im2col", x.shape, (1, x.shape[1], *window), frozen(stride), frozen(padding), frozen(dilation), 1)
    steps = zip(window, (g.oh, g.ow), g.stride, g.dilation, strict=True)
    rows, cols = (np.arange(k)[:, None] * d + np.arange(n) * s for k, n, s, d in steps)
    after = (max(int(at.max()) + 1 - n - p, 0) for at, n, p in zip((cols, rows), (g.w, g.h), g.pad[::-1], strict=True))
    image = ag.pad(x, [side for sides in zip(g.pad[::-1], after, strict=True) for side in sides])
    places = rows[:, None, :, None] * image.shape[3] + cols[None, :, None, :]
    picked = ag.index_select(ag.reshape(image, (*x.shape[:2], -1)), 2, Tensor.from_host(x.queue, places.reshape(-1)))
    return ag.reshape(picked, (x.shape[0], -1, g.oh * g.ow))


def _var(x: Tensor, axis: Any, keepdims: bool, correction: float) -> Tensor:
    total = ag.sum(ag.square(ag.sub(x, ag.mean(x, axis, keepdims=True))), axis, keepdims)
    return ag.div(total, float(max(x.size // max(total.size, 1) - correction, 0)))


def _scattered(op: Callable[..., Tensor], x: Tensor, axis: int, index: Any, src: Any, reduce: str | None = None) -> Any:
    """Call ``scatter_reduce`` if ``reduce`` is given. Else crop ``src`` to ``index`` and scatter; ``NotImplemented`` if ``src`` fits."""
    if reduce is not None:
        return ag.scatter_reduce(x, axis, index, src, "sum" if reduce == "add" else "prod")
    shape, part = np.shape(index), src
    if not isinstance(src, Tensor):
        part = Tensor.from_host(x.queue, np.broadcast_to(np.asarray(src), shape).astype(x.dtype), x.dtype)
    for at, n in enumerate(shape):
        part = part if part.shape[at] == n else ag.narrow(part, at, 0, n)
    return NotImplemented if part is src else op(x, axis, index, part)


def _affine_nodes(x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
    if x.ndim == 2:
        return NotImplemented
    product = ag.matmul(x, w, transpose_b=True)
    return product if bias is None else ag.add(product, bias)


def _activated(x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    made = ag.affine(x, w, bias)
    return made if activation is None else getattr(ag, activation)(made)


def _bias_add(x: Tensor, bias: Tensor, axis: int | None) -> Tensor:
    at = 1 if axis is None or x.ndim == 2 else axis % x.ndim
    return ag.add(x, ag.reshape(bias, [-1 if i == at else 1 for i in range(x.ndim)]))


def _channel_shaped(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``weight``, one value per channel, reshaped to broadcast with ``x``."""
    return ag.reshape(weight, [-1, *[1] * (x.ndim - 2)])


def _adaptive_pool(pool: str, x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """Pool over windows of equal size; ``NotImplemented`` for a single window over the whole image, which has its own operator."""
    sizes, axes = x.shape[2:], x.ndim - 2
    given = output_size if isinstance(output_size, list | tuple) else [output_size] * axes
    outs = [n if out is None else out for n, out in zip(sizes, given, strict=True)]
    if return_indices or any(n % out for n, out in zip(sizes, outs, strict=True)):
        what = "(return_indices=True)" if return_indices else " to sizes that do not divide the image"
        raise Unsupported(f"adaptive_{pool}{axes}d{what}")
    kernel = [n // out for n, out in zip(sizes, outs, strict=True)]
    return NotImplemented if all(out == 1 for out in given) else getattr(ag, f"{pool}{axes}d")(x, kernel if axes > 1 else kernel[0])


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float) -> Tensor:
    mean = ag.mean(ag.square(x), tuple(range(-np.size(normalized_shape), 0)), keepdims=True)
    scaled = ag.div(x, ag.sqrt(ag.add(mean, eps)))
    return scaled if weight is None else ag.mul(scaled, weight)


def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute a group norm as an instance norm of the groups, then apply the weight and bias per channel."""
    made = ag.reshape(ag.instance_norm(ag.reshape(x, (x.shape[0], num_groups, -1)), eps=eps), x.shape)
    made = made if weight is None else ag.mul(made, _channel_shaped(x, weight))
    return made if bias is None else ag.add(made, _channel_shaped(x, bias))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, attn_mask: Any, causal: bool, is_causal: bool, scale: float | None, dropout_p: float
) -> Tensor:
    if dropout_p:
        raise Unsupported("scaled_dot_product_attention(dropout_p=...)")
    k, v, mask = all_heads(q, k), all_heads(q, v), attn_mask if mask is None else mask
    scores = ag.matmul(ag.mul(q, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)), _last_swapped(k))
    if causal or is_causal:
        allowed = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
        scores = ag.where(Tensor.from_host(q.queue, allowed), scores, -math.inf)
    if mask is None:
        return ag.matmul(ag.softmax(scores), v)
    mask = mask if isinstance(mask, Tensor) else Tensor.from_host(q.queue, np.asarray(mask))
    shares = ag.softmax(ag.where(mask, scores, -math.inf) if mask.dtype == "bool" else ag.add(scores, mask))
    return ag.matmul(ag.where(ag.isnan(shares), 0.0, shares), v)  # a query that may attend to no key gives 0


def all_heads(q: Tensor, x: Tensor) -> Tensor:
    """Return keys or values with each head repeated for the query heads that share it."""
    if x.ndim < 3 or x.shape[-3] == q.shape[-3]:
        return x
    *batch, heads, n, depth = x.shape
    spread = ag.expand(ag.unsqueeze(x, -3), (*batch, heads, q.shape[-3] // heads, n, depth))
    return ag.reshape(spread, (*batch, q.shape[-3], n, depth))


def _rope(x: Tensor, positions: Any, frequencies: Any, base: float, offset: int, interleaved: bool, inverse: bool,
          heads: int | None = None) -> Tensor:  # fmt: skip
    if positions is not None:
        raise Unsupported("rope with positions")
    n, depth = x.shape[-2:]
    rates = float(base) ** (-2 * np.arange(depth // 2) / depth) if frequencies is None else frequencies.to_host()
    angles = np.arange(offset, offset + n)[:, None] * rates
    tables = (np.cos(angles), np.sin(-angles if inverse else angles))
    cos, sin = (ag.cast(Tensor.from_host(x.queue, table.astype(np.float32)), x.dtype) for table in tables)
    pairs = ag.reshape(x, (*x.shape[:-1], depth // 2, 2) if interleaved else (*x.shape[:-1], 2, depth // 2))
    a, b = ag.unbind(pairs, -1 if interleaved else -2)
    turned = [ag.sub(ag.mul(a, cos), ag.mul(b, sin)), ag.add(ag.mul(a, sin), ag.mul(b, cos))]
    return ag.reshape(ag.stack(turned, -1), x.shape) if interleaved else ag.cat(turned, -1)


def _of_truths(op: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a decomposition that calls the logical ``op`` if all inputs are bool and returns ``NotImplemented`` otherwise."""
    return lambda **call: op(**call) if all(getattr(x, "dtype", type(x).__name__) == "bool" for x in call.values()) else NotImplemented


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "bitwise_and": _of_truths(ag.logical_and),
    "bitwise_or": _of_truths(ag.logical_or),
    "bitwise_xor": _of_truths(ag.logical_xor),
    "bitwise_not": _of_truths(ag.logical_not),
    "unbind": _unbind,
    "bound": _stacked_states,
    "getitem": _by_tensors,
    "roll": _roll,
    "pad": _circular_pad,
    "im2col": _im2col,
    "argmax": lambda **call: _flat_best(ag.argmax, **call),
    "argmin": lambda **call: _flat_best(ag.argmin, **call),
    "cumsum": lambda x, axis, reverse: NotImplemented if axis is not None else ag.cumsum(ag.reshape(x, -1), 0, reverse),
    "any": lambda x, axis, keepdims: ag.amax(_nonzero(x, "int32"), axis, keepdims),
    "all": lambda x, axis, keepdims: ag.amin(_nonzero(x, "int32"), axis, keepdims),
    "count_nonzero": lambda x, axis, keepdims: ag.sum(_nonzero(x, "int64"), axis, keepdims),
    "var": _var,
    "std": lambda **call: ag.sqrt(_var(**call)),
    "sort": lambda x, axis, descending: tuple(ag.topk(x, x.shape[axis], axis, descending)),
    "argsort": lambda x, axis, descending: ag.topk(x, x.shape[axis], axis, descending)[1],
    "scatter": lambda **call: _scattered(ag.scatter, **call),
    "scatter_add": lambda **call: _scattered(ag.scatter_add, **call),
    "matmul": lambda a, b, transpose_a, transpose_b: (
        ag.matmul(_last_swapped(a, transpose_a), _last_swapped(b, transpose_b)) if transpose_a or transpose_b else NotImplemented
    ),
    "affine": _affine_nodes,
    "linear": _activated,
    "affine_activated": _activated,
    "conv2d_relu": lambda **call: ag.relu(ag.conv2d(**call)),
    "bias_add": _bias_add,
    "prelu": lambda x, weight: ag.prelu_broadcast(x, _channel_shaped(x, weight) if weight.size > 1 else weight),
    "masked_fill": lambda x, mask, value: ag.where(mask, value, x),
    "adaptive_avg_pool1d": lambda **call: _adaptive_pool("avg_pool", **call),
    "adaptive_avg_pool2d": lambda **call: _adaptive_pool("avg_pool", **call),
    "adaptive_max_pool2d": lambda **call: _adaptive_pool("max_pool", **call),
    "batch_norm_inference": lambda fuse_relu, **call: ag.relu(ag.batch_norm_inference(**call)) if fuse_relu else NotImplemented,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "recurrent": lambda **call: steps.layer_forward(ag, **call),
    "rope": _rope,
}
