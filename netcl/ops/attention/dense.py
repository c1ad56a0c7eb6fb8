"""Attention with a stored score matrix: the NumPy backend (by blocks of queries), gradients of masks, and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.ops.attention.geometry import HeadSizes, Mask, attention_geometry, grouped, score_scale

QUERIES = 256  # rows of scores that the NumPy backend holds at a time


# ---- NumPy


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + QUERIES, n)) for start in range(0, n, QUERIES))


def _swapped(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _scores(q: np.ndarray, k: np.ndarray, mask: Any, kind: int, part: slice, causal: bool, scale: float) -> np.ndarray:
    scores = np.matmul(q[..., part, :], _swapped(k)) * q.dtype.type(scale)
    if mask is not None:
        here = mask[..., part, :] if mask.shape[-2] > 1 else mask
        scores = np.where(here, scores, -np.inf) if kind == 1 else scores + here
    if causal:
        keys = np.arange(k.shape[-2])
        scores = np.where(keys <= np.arange(part.start, part.stop)[:, None], scores, -np.inf)
    return scores


def attention_cpu(q: Any, k: Any, v: Any, mask: Any, sizes: HeadSizes, place: Mask, causal: bool, scale: float) -> tuple[np.ndarray, ...]:
    """Return the result and the log-sum-exp of each row of scores, computed a block of queries at a time."""
    out, logarithms = np.zeros((*q.shape[:-1], sizes.depth_v), q.dtype), np.empty(q.shape[:-1], q.dtype)
    q5, k5, v5, mask5 = _views(q, k, v, mask, sizes, place)
    out5, logs4 = out.reshape(grouped(sizes, sizes.n, sizes.depth_v, True)), logarithms.reshape(sizes.batch, *sizes.query_shape)
    for part in _blocks(sizes.n):
        scores = _scores(q5, k5, mask5, place.kind, part, causal, scale)
        most = scores.max(-1, keepdims=True, initial=-np.inf)
        e = np.exp(scores - np.where(np.isneginf(most), 0, most))
        total = e.sum(-1, keepdims=True)
        out5[..., part, :] = np.matmul(e, v5) / np.where(total == 0, 1, total)
        logs4[..., part] = (most + np.log(total))[..., 0]
    return out, logarithms


def _views(q: Any, k: Any, v: Any, mask: Any, sizes: HeadSizes, place: Mask) -> tuple[Any, ...]:
    batch, heads, *rest = place.shape
    masked_heads = (1, 1) if heads == 1 else (sizes.kv_heads, sizes.sharing)
    return (q.reshape(grouped(sizes, sizes.n, sizes.depth, True)), k.reshape(grouped(sizes, sizes.m, sizes.depth, False)),
            v.reshape(grouped(sizes, sizes.m, sizes.depth_v, False)),
            None if mask is None else mask.reshape(batch, *masked_heads, *rest))  # fmt: skip


def attention_grad_cpu(
    g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any, *, sizes: HeadSizes, place: Mask, causal: bool,
    scale: float, mask_grad: bool = False,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return the gradients of q, k, v and, with ``mask_grad``, of the scores, computed a block of queries at a time."""
    q5, k5, v5, mask5 = _views(q, k, v, mask, sizes, place)
    g5 = g.reshape(grouped(sizes, sizes.n, sizes.depth_v, True))
    logs = np.where(np.isneginf(logarithms), np.inf, logarithms).reshape(sizes.batch, *sizes.query_shape, 1)
    delta = ((g * out).sum(-1) - (0 if through is None else through)).reshape(logs.shape)
    d_q, d_k, d_v = np.empty_like(q5), np.zeros_like(k5), np.zeros_like(v5)
    d_scores = [np.empty((*q5.shape[:-1], sizes.m), q.dtype)] if mask_grad else []
    for part in _blocks(sizes.n):
        p = np.exp(_scores(q5, k5, mask5, place.kind, part, causal, scale) - logs[..., part, :])
        d_s = p * (np.matmul(g5[..., part, :], _swapped(v5)) - delta[..., part, :])
        for rows in d_scores:
            rows[..., part, :] = d_s
        d_s *= q.dtype.type(scale)
        d_q[..., part, :] = np.matmul(d_s, k5)
        d_k += np.matmul(_swapped(d_s), q5[..., part, :]).sum(2, keepdims=True)
        d_v += np.matmul(_swapped(p), g5[..., part, :]).sum(2, keepdims=True)
    return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape), *(x.reshape(*q.shape[:-1], sizes.m) for x in d_scores)


# ---- over F: what has no kernel of its own


def masked(F: Any, scores: Any, mask: Any, causal: bool) -> Any:
    """Return the scores with a mask applied: numbers are added; keys that a bool mask or ``causal`` excludes get minus infinity."""
    if mask is not None:
        scores = F.where(mask, scores, -math.inf) if mask.dtype == "bool" else F.add(scores, mask)
    if causal:
        below = np.tri(*scores.shape[-2:], dtype=np.bool_)
        scores = F.where(Tensor.from_host(scores.queue, below), scores, -math.inf)
    return scores


def _dense(
    F: Any, g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any, causal: bool, scale: float
) -> tuple[Any, ...]:
    """Return g, q and k by groups of heads, and as whole matrices the probabilities and the gradient of the scores."""
    sizes = attention_geometry("attention", q, k, v)
    g, out = (F.reshape(t, grouped(sizes, sizes.n, sizes.depth_v, True)) for t in (g, out))
    q = F.reshape(q, grouped(sizes, sizes.n, sizes.depth, True))
    scores, rows = (*q.shape[:-1], sizes.m), (*q.shape[:-1], 1)
    mask = None if mask is None else F.reshape(F.expand(mask, (*logarithms.shape, sizes.m)), scores)
    k = F.reshape(k, grouped(sizes, sizes.m, sizes.depth, False))
    v = F.reshape(v, grouped(sizes, sizes.m, sizes.depth_v, False))
    logs = F.reshape(logarithms, rows)
    p = masked(F, F.mul(F.matmul(q, k, transpose_b=True), scale), mask, causal)
    p = F.exp(F.sub(p, F.where(F.eq(logs, -math.inf), math.inf, logs)))
    delta = F.sum(F.mul(g, out), axis=-1, keepdims=True)
    delta = delta if through is None else F.sub(delta, F.reshape(through, rows))
    return g, q, k, p, F.mul(p, F.sub(F.matmul(g, v, transpose_b=True), delta))


def mask_gradient(
    F: Any, g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any, causal: bool, scale: float | None
) -> Any:
    """Compute the gradient of an additive mask, which equals the gradient of the scores."""
    *_, d_s = _dense(F, g, q, k, v, mask, out, logarithms, through, causal, score_scale(scale, q.shape[-1]))
    return F.reshape(d_s, (*q.shape[:-1], k.shape[-2]))


def gradients_by_ops(
    F: Any, upstream: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any = None, *, causal: bool = False,
    scale: float | None = None, mask_grad: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute :func:`attention_grad` by other ops; the whole score matrix is stored."""
    scale = score_scale(scale, q.shape[-1])
    heads, queries, keys, p, d_s = _dense(F, upstream, q, k, v, mask, out, logarithms, through, causal, scale)
    scaled = F.mul(d_s, scale)
    d_k, d_v = (F.sum(F.matmul(a, b, transpose_a=True), axis=2) for a, b in ((scaled, queries), (p, heads)))
    found = (F.reshape(F.matmul(scaled, keys), q.shape), F.reshape(d_k, k.shape), F.reshape(d_v, v.shape))
    return (*found, F.reshape(d_s, (*q.shape[:-1], k.shape[-2]))) if mask_grad else found
