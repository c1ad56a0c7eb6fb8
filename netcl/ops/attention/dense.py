"""Attention with a stored score matrix: the NumPy backend (by blocks of queries), gradients of masks, and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.ops.attention.geometry import HeadSizes, Mask, attention_geometry, grouped, mask_of, score_scale

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


def _mask_shape(place: Mask, sizes: HeadSizes) -> tuple[int, ...]:
    batch, heads, n, m = place.shape
    return (batch, *((1, 1) if heads == 1 else (sizes.kv_heads, sizes.sharing)), n, m)


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
    return (q.reshape(grouped(sizes, sizes.n, sizes.depth, True)), k.reshape(grouped(sizes, sizes.m, sizes.depth, False)),
            v.reshape(grouped(sizes, sizes.m, sizes.depth_v, False)),
            None if mask is None else mask.reshape(_mask_shape(place, sizes)))  # fmt: skip


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


class Dense:
    """The probabilities and the gradient of the scores of one call as whole matrices, computed with the ops ``F``."""

    def __init__(
        self, F: Any, g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any, causal: bool, scale: Any
    ):
        sizes = attention_geometry("attention", q, k, v)
        self.scale = score_scale(scale, sizes.depth)
        self.g, self.out = (F.reshape(t, grouped(sizes, sizes.n, sizes.depth_v, True)) for t in (g, out))
        self.q = F.reshape(q, grouped(sizes, sizes.n, sizes.depth, True))
        self.k = F.reshape(k, grouped(sizes, sizes.m, sizes.depth, False))
        self.v = F.reshape(v, grouped(sizes, sizes.m, sizes.depth_v, False))
        rows = (sizes.batch, *sizes.query_shape, 1)
        logs = F.reshape(logarithms, rows)
        place = mask_of("attention", mask, q.shape, sizes)
        here = None if place.tensor is None else F.reshape(place.tensor, _mask_shape(place, sizes))
        scores = masked(F, F.mul(F.matmul(self.q, self.k, transpose_b=True), self.scale), here, causal)
        self.p = F.exp(F.sub(scores, F.where(F.eq(logs, -math.inf), math.inf, logs)))
        delta = F.sum(F.mul(self.g, self.out), axis=-1, keepdims=True)
        delta = delta if through is None else F.sub(delta, F.reshape(through, rows))
        self.rest = F.sub(F.matmul(self.g, self.v, transpose_b=True), delta)
        self.d_s = F.mul(self.p, self.rest)


def mask_gradient(
    F: Any, g: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, logarithms: Any, through: Any, causal: bool, scale: Any
) -> Any:
    """Compute the gradient of an additive mask, which equals the gradient of the scores."""
    dense = Dense(F, g, q, k, v, mask, out, logarithms, through, causal, scale)
    return F.reshape(dense.d_s, (*q.shape[:-1], k.shape[-2]))


def attention_grad_vjp(F, g, upstream, q, k, v, mask, result, logarithms, through, causal, scale):
    """Compute the gradients of :func:`attention_grad`; the whole score matrix is stored."""
    d = Dense(F, upstream, q, k, v, mask, result, logarithms, through, causal, scale)
    u_q, u_k, u_v = (F.mul(like, 0) if u is None else F.reshape(u, like.shape) for u, like in zip(g[:3], (d.q, d.k, d.v), strict=True))
    w = F.mul(F.add(F.matmul(u_q, d.k, transpose_b=True), F.matmul(d.q, u_k, transpose_b=True)), d.scale)
    for u in g[3:]:  # with mask_grad, of the gradient of the scores
        w = w if u is None else F.add(w, F.reshape(u, d.d_s.shape))
    w_p = F.mul(w, d.p)
    row = F.sum(w_p, axis=-1, keepdims=True)
    c_s = F.mul(d.p, F.add(F.matmul(d.g, u_v, transpose_b=True), F.mul(w, d.rest)))
    c_g = F.sub(F.add(F.matmul(d.p, u_v), F.matmul(w_p, d.v)), F.mul(row, d.out))
    c_q = F.mul(F.add(F.matmul(d.d_s, u_k), F.matmul(c_s, d.k)), d.scale)
    c_k = F.mul(F.add(F.matmul(d.d_s, u_q, transpose_a=True), F.matmul(c_s, d.q, transpose_a=True)), d.scale)
    c_v = F.matmul(w_p, d.g, transpose_a=True)
    c_k, c_v = (F.sum(t, axis=2) for t in (c_k, c_v))
    c_logs = F.neg(F.sum(c_s, axis=-1))
    c_mask = None if mask is None or mask.dtype == "bool" else c_s
    found = (c_g, c_q, c_k, c_v, c_mask, F.neg(F.mul(row, d.g)), c_logs, None if through is None else row)
    shapes = (upstream.shape, q.shape, k.shape, v.shape, (*q.shape[:-1], k.shape[-2]), result.shape, logarithms.shape, logarithms.shape)
    return tuple(None if t is None else F.reshape(t, shape) for t, shape in zip(found, shapes, strict=True))
