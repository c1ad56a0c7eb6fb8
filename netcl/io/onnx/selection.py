"""Operators that select, insert and count elements, and operators on sequences. Shapes that depend on values are found on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.onnx.imports import IMPORTS, TensorSequence
from netcl.io.onnx.table import OnnxNode, positive

#: ONNX's reductions of scattered values, and their names here.
_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _placed(x: Tensor, axis: int, index: Tensor, values: Tensor, reduction: str | None) -> Tensor:
    if reduction in (None, "none"):
        return ag.scatter(x, axis, index, values)
    return ag.scatter_reduce(x, axis, index, values, _REDUCTIONS[str(reduction)])


def _scatter_elements(node: OnnxNode, x: Tensor, index: Tensor, values: Tensor) -> Any:
    if node.kind == "ScatterElements" and node["reduction"] in (None, "none", "add"):
        return NotImplemented
    return _placed(x, node["axis"], positive(index, x.shape[node["axis"]]), values, node["reduction"])


def _flat_places(sizes: tuple[int, ...], index: Tensor, rows: int = 1) -> Tensor:
    """Return ``index`` with its last axis, a multi-index, replaced by one flat index into ``sizes``.

    A multi-index that is out of range on any axis becomes one beyond ``rows`` times ``sizes``, which raises where it is used.
    """
    total: Any = Tensor.zeros(index.shape[:-1], "int64", queue=index.queue)
    for i, n in enumerate(sizes):
        place = positive(ag.select(index, index.ndim - 1, i), n)
        if len(sizes) > 1 or rows > 1:  # a flat index alone is checked by the op
            place = ag.where(ag.logical_and(ag.ge(place, 0), ag.lt(place, n)), place, rows * math.prod(sizes))
        total = ag.add(ag.mul(total, n), place)
    return ag.cast(total, "int64")


def _scatter_nd(node: OnnxNode, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    depth = index.shape[-1]
    places, rest = ag.reshape(_flat_places(x.shape[:depth], index), (-1, 1)), math.prod(x.shape[depth:])
    spread = ag.expand(places, (places.shape[0], rest))
    flat = ag.reshape(x, (math.prod(x.shape[:depth]), rest))
    return ag.reshape(_placed(flat, 0, spread, ag.reshape(values, (places.shape[0], rest)), node["reduction"]), x.shape)


def _gather_nd(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    batch, depth = node["batch_dims"] or 0, index.shape[-1]
    rows, sizes, rest = x.shape[:batch], x.shape[batch : batch + depth], x.shape[batch + depth :]
    places = _flat_places(sizes, index, math.prod(rows))
    first = np.arange(math.prod(rows)).reshape([*rows, *[1] * (places.ndim - batch)]) * math.prod(sizes)
    flat = ag.reshape(ag.add(places, Tensor.from_host(x.queue, first)), (-1,))
    return ag.reshape(ag.index_select(ag.reshape(x, (math.prod(rows) * math.prod(sizes), *rest)), 0, flat), (*places.shape, *rest))


def _tensor_scatter(node: OnnxNode, cache: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
    """Write updates into a cache, from ``start`` on in each row; ``mode="circular"`` wraps around at the end of the cache."""
    axis, size = node["axis"] % cache.ndim, cache.shape[node["axis"]]
    first = np.zeros(cache.shape[0], np.int64) if start is None else start.to_host()
    places = first[:, None] + np.arange(update.shape[axis])
    places = places % size if node["mode"] == "circular" else places
    if places.size and (places.min() < 0 or places.max() >= size):
        what = "write_indices must be at least 0 and leave room for update in the cache"
        raise node.fault(what, write_indices=first.tolist(), cache=cache.shape, update=update.shape)
    shape = [1] * cache.ndim
    shape[0], shape[axis] = places.shape
    return ag.scatter(cache, axis, Tensor.from_host(cache.queue, np.broadcast_to(places.reshape(shape), update.shape).copy()), update)


def _reverse_sequence(node: OnnxNode, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = node["time_axis"], node["batch_axis"]
    t, counts = np.arange(x.shape[time])[:, None], lengths.to_host()[None, :]
    places = np.where(t < counts, counts - 1 - t, t)
    places = (places if time < batch else places.T).reshape([n if axis in (time, batch) else 1 for axis, n in enumerate(x.shape)])
    return ag.gather(x, time, Tensor.from_host(x.queue, np.broadcast_to(places, x.shape).astype(np.int64)))


def _compress(node: OnnxNode, x: Tensor, condition: Tensor) -> Tensor:
    flat, axis = (ag.reshape(x, -1), 0) if node["axis"] is None else (x, node["axis"])
    return ag.index_select(flat, axis, Tensor.from_host(x.queue, np.flatnonzero(condition.to_host())))


def _unique(node: OnnxNode, x: Tensor) -> tuple[Any, ...]:
    axis, values = node["axis"], ag.reshape(x, -1) if node["axis"] is None else x
    _, first, inverse, counts = np.unique(values.to_host(), True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not node["sorted"]:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    picked = ag.index_select(values, axis or 0, Tensor.from_host(x.queue, first))
    return picked, *(part.astype(np.int64) for part in (first, inverse, counts))


def _non_max_suppression(
    node: OnnxNode, boxes: Tensor, scores: Tensor, limit: Any = None, overlap: Any = None, least: Any = None
) -> np.ndarray:
    """Return rows ``(batch, class, box)``: per class up to ``limit`` boxes that no better kept box overlaps by more than ``overlap``."""
    count, most = (0 if limit is None else int(limit.to_host().item())), 0.0 if overlap is None else overlap.to_host().item()
    corners, found = boxes.to_host().astype(np.float64), []
    if node["center_point_box"]:
        corners = np.concatenate([corners[..., :2] - corners[..., 2:] / 2, corners[..., :2] + corners[..., 2:] / 2], -1)
    low, high = (pick(corners[..., :2], corners[..., 2:]) for pick in (np.minimum, np.maximum))
    area = np.prod(high - low, -1)
    least, every = -np.inf if least is None else least.to_host().item(), scores.to_host()
    for row, kind in np.ndindex(every.shape[:2]):
        values, kept = every[row, kind], list[int]()
        order = np.argsort(-values, kind="stable")
        for box in order[values[order] > least]:
            if len(kept) >= count:
                break
            sides = np.maximum(np.minimum(high[row, box], high[row, kept]) - np.maximum(low[row, box], low[row, kept]), 0)
            shared = np.prod(sides, -1)
            if not np.any(shared > most * np.maximum(area[row, box] + area[row, kept] - shared, 1e-300)):
                kept.append(int(box))
        found += [(row, kind, box) for box in kept]
    return np.array(found, np.int64).reshape(-1, 3)


def _tf_idf(node: OnnxNode, x: Tensor) -> np.ndarray:
    """Return the TF, IDF or TF-IDF of each n-gram of the pool; up to ``max_skip_count`` elements are skipped between its items."""
    if node["pool_int64s"] is None:
        raise node.fault("the pool of n-grams must be pool_int64s, not pool_strings")
    pool, starts, columns = node["pool_int64s"], [*node["ngram_counts"]], node["ngram_indexes"]
    grams, at = dict[tuple[int, ...], int](), 0
    for n, (begin, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for first in range(begin, end, n):
            grams[tuple(pool[first : first + n])] = at
            at += 1
    rows = x.to_host()
    flat, width = np.atleast_2d(rows), max(columns) + 1
    counts = np.zeros((len(flat), width), np.float32)
    for row, line in zip(counts, flat.tolist(), strict=True):
        for n in range(node["min_gram_length"], node["max_gram_length"] + 1):
            for gap in range(1, (node["max_skip_count"] if n > 1 else 0) + 2):
                for first in range(len(line) - (n - 1) * gap):
                    place = grams.get(tuple(line[first : first + (n - 1) * gap + 1 : gap]))
                    if place is not None:
                        row[columns[place]] += 1
    weights = np.ones(width, np.float32)
    if node["weights"]:
        weights[columns] = node["weights"]
    made = {"TF": counts, "IDF": (counts > 0) * weights, "TFIDF": counts * weights}[node["mode"]]
    return made.reshape(*rows.shape[:-1], width).astype(np.float32)


def _split_to_sequence(node: OnnxNode, x: Tensor, sizes: Any = None) -> TensorSequence:
    axis = node["axis"] % x.ndim
    lengths = 1 if sizes is None else sizes
    each = [lengths] * -(-x.shape[axis] // lengths) if isinstance(lengths, int) else lengths
    starts = np.cumsum([0, *each]).tolist()
    parts = [ag.narrow(x, axis, start, min(n, x.shape[axis] - start)) for n, start in zip(each, starts, strict=False)]
    dropped = sizes is None and not node["keepdims"]
    return TensorSequence(ag.squeeze(part, axis) if dropped else part for part in parts)


def _position(node: OnnxNode, place: Tensor, length: int, last: int) -> int:
    """Return a position in a sequence, counted from its start; raises unless it is at most ``last``."""
    at = int(place.to_host().item())
    if not -length <= at <= last:
        raise node.fault(f"position must be from {-length} to {last}", position=at, length=length)
    return at if at >= 0 else at + length


def _inserted(node: OnnxNode, parts: TensorSequence, x: Tensor, place: Tensor | None = None) -> TensorSequence:
    at = len(parts) if place is None else _position(node, place, len(parts), len(parts))
    return TensorSequence([*parts[:at], x, *parts[at:]])


def _erased(node: OnnxNode, parts: TensorSequence, place: Tensor | None = None) -> TensorSequence:
    at = len(parts) - 1 if place is None else _position(node, place, len(parts), len(parts) - 1)
    return TensorSequence([*parts[:at], *parts[at + 1 :]])


IMPORTS |= {
    "SplitToSequence": _split_to_sequence,
    "SequenceConstruct": lambda node, *xs: TensorSequence(xs),
    "SequenceEmpty": lambda node: TensorSequence(),
    "SequenceInsert": _inserted,
    "SequenceErase": _erased,
    "SequenceAt": lambda node, parts, place: parts[_position(node, place, len(parts), len(parts) - 1)],
    "SequenceLength": lambda node, parts: np.array(len(parts), np.int64),
    "ConcatFromSequence": lambda node, parts: (ag.stack if node["new_axis"] else ag.cat)(list(parts), node["axis"]),
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "ScatterND": _scatter_nd,
    "GatherND": _gather_nd,
    "TensorScatter": _tensor_scatter,
    "ReverseSequence": _reverse_sequence,
    "Compress": _compress,
    "NonZero": lambda node, x: np.stack(np.nonzero(np.atleast_1d(x.to_host()))).astype(np.int64)[: max(x.ndim, 0)],
    "Unique": _unique,
    "NonMaxSuppression": _non_max_suppression,
    "TfIdfVectorizer": _tf_idf,
    "Optional": lambda node, x=None: x,
    "OptionalGetElement": lambda node, x: x,
    "OptionalHasElement": lambda node, x=None: np.array(x is not None),
}
