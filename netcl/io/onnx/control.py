"""Control flow: operators that run the graphs in their attributes. Conditions and counts are read on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.io.onnx.decompositions import all_heads
from netcl.io.onnx.imports import CONTROL, TensorSequence
from netcl.io.onnx.table import OnnxNode


def _truth(x: Tensor | None) -> bool:
    return x is None or bool(x.to_host().item())


def _loop(node: OnnxNode, call: Any, limit: Tensor | None = None, going: Tensor | None = None, *state: Any) -> list[Any]:
    """Run ``Loop`` while ``going`` is true, at most ``limit`` steps; returns the final states, then the stacked scan outputs."""
    values, rows, more = list(state), list[list[Any]](), _truth(going)
    while more and (limit is None or len(rows) < limit.to_host().item()):
        done, *made = call("body", np.array(len(rows)), np.array(more), *values)
        more = _truth(done)
        values, added = made[: len(state)], made[len(state) :]
        rows.append(added)
    return values + _stacked_steps(rows, node["body"].forms[1 + len(state) :], [])


def _stacked_steps(rows: list[list[Any]], forms: Any, axes: list[int]) -> list[Any]:
    """Return the scan outputs of all steps, stacked; without steps, empty arrays of the declared dtype and shape."""
    if not rows:
        shapes = [[size if isinstance(size, int) else 0 for size in shape or ()] for _, shape in forms]
        return [np.zeros((0, *shape), dtype or "float32") for (dtype, _), shape in zip(forms, shapes, strict=True)]
    return [ag.stack(list(column), axes[i] if axes else 0) for i, column in enumerate(zip(*rows, strict=True))]


def _scan_node(node: OnnxNode, call: Any, *given: Any) -> list[Any]:
    """Run ``Scan``, one body call per element of the scanned axis. Before opset 9, each row of the batch is scanned separately."""
    count = node["num_scan_inputs"]
    if node.opset >= 9:
        return _scan_row(node, call, list(given[:-count]), list(given[-count:]))
    lengths, *rest = given
    rows = range(rest[0].shape[0])
    sizes = [x.shape[1] for x in rest[-1:]] * len(rows) if lengths is None else lengths.to_host().tolist()
    made = []
    for i in rows:
        state, scanned = ([ag.select(x, 0, i) for x in part] for part in (rest[:-count], rest[-count:]))
        made.append(_scan_row(node, call, state, [ag.narrow(x, 0, 0, sizes[i]) for x in scanned]))
    return [ag.stack(list(column)) for column in zip(*made, strict=True)]


def _scan_row(node: OnnxNode, call: Any, state: list[Any], scanned: list[Any]) -> list[Any]:
    outs = len(node.outputs) - len(state)
    axes, out_axes = node["scan_input_axes"] or [0] * len(scanned), node["scan_output_axes"] or [0] * outs
    back = node["scan_input_directions"] or node["directions"] or [0] * len(scanned)
    out_back, rows = node["scan_output_directions"] or [0] * outs, list[list[Any]]()
    for i in range(scanned[0].shape[axes[0]]):
        parts = [ag.select(x, axis, x.shape[axis] - 1 - i if b else i) for x, axis, b in zip(scanned, axes, back, strict=True)]
        made = call("body", *state, *parts)
        state, added = made[: len(state)], made[len(state) :]
        rows.append(added)
    columns = _stacked_steps(rows, node["body"].forms[len(state) :], out_axes)
    return state + [ag.flip(x, axis) if b and rows else x for x, axis, b in zip(columns, out_axes, out_back, strict=True)]


def _sequence_map(node: OnnxNode, call: Any, *given: Any) -> tuple[Any, ...]:
    made = [call("body", *(x[i] if isinstance(x, TensorSequence) else x for x in given)) for i in range(len(given[0]))]
    return tuple(TensorSequence(row[i] for row in made) for i in range(len(node.outputs)))


def _flex_attention(node: OnnxNode, call: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1]) if node["scale"] is None else node["scale"]
    precise = "float64" if q.dtype == "float64" else "float32"
    q, k, v, like = (*(ag.cast(x, precise) for x in (q, k, v)), q.dtype)
    scores = ag.mul(ag.matmul(q, all_heads(q, k), transpose_b=True), scale)
    scores = call("score_mod", scores)[0] if node["score_mod"] else scores
    shares = ag.softmax(scores)
    shares = call("prob_mod", shares)[0] if node["prob_mod"] else shares
    return ag.cast(ag.matmul(shares, all_heads(q, v)), like)


CONTROL |= {
    "If": lambda node, call, condition: call("then_branch" if _truth(condition) else "else_branch"),
    "Loop": _loop,
    "Scan": _scan_node,
    "SequenceMap": _sequence_map,
    "ai.onnx.preview::FlexAttention": _flex_attention,
}
