"""ONNX operators as calls of netcl's ops. Functions import what the table cannot express.

An import function takes a node and its inputs: tensors, or plain numbers and lists for inputs that :data:`HOST` names. Where it returns
``NotImplemented``, the table's entry is used. Operators of every opset that onnx reads are supported: an input that was an attribute in
an older opset is passed as an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.exports import PAD_MODES
from netcl.io.onnx.library import dtype_of, numbers
from netcl.io.onnx.table import FORMULAS, Node, all_entries, formula, positive

Import = Callable[..., Any]
IMPORTS: dict[str, Import] = {}
#: ONNX's names of inputs that are sizes, axes or limits: functions and entries get their values, not tensors.
HOST = {
    "shape", "axes", "axis", "k", "split", "repeats", "pads", "starts", "ends", "steps", "sizes", "scales", "roi", "min", "max", "ratio",
    "training_mode", "depth", "constant_value",
}  # fmt: skip


def imports(*kinds: str) -> Callable[[Import], Import]:
    """Add the import of operators."""

    def add(function: Import) -> Import:
        IMPORTS.update(dict.fromkeys(kinds, function))
        return function

    return add


def operators() -> set[str]:
    """Every operator that can be imported."""
    return {*IMPORTS, *FORMULAS, *(entry.kind for entry in all_entries())}


def reader(node: Node) -> Import:
    """The function that computes a node from its inputs."""
    function = IMPORTS.get(node.kind)
    entries = [entry for entry in all_entries() if entry.kind == node.kind]
    entry = next((entry for entry in entries if not entry.unread(node)), None)
    usual = entry.read if entry else formula if node.kind in FORMULAS else None

    def read(node: Node, *given: Any) -> Any:
        made = function(node, *given) if function else NotImplemented
        if made is not NotImplemented:
            return made
        if usual is None:
            raise node.fault("attributes are not supported with these values", **entries[0].unread(node))
        return usual(node, *given)

    return read


# ---- pointwise


@imports("Div")
def _div(node: Node, a: Tensor, b: Tensor) -> Any:
    """ONNX truncates quotients of integers."""
    return NotImplemented if DTYPES[a.dtype].is_float else ag.floor_divide(ag.sub(a, ag.fmod(a, b)), b)


@imports("IsInf")
def _isinf(node: Node, x: Tensor) -> Tensor:
    both = node["detect_negative"] and node["detect_positive"]
    return ag.isinf(x) if both else ag.eq(x, math.inf if node["detect_positive"] else -math.inf)


@imports("Sum", "Mean")
def _sum(node: Node, *xs: Tensor) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = ag.add(total, x)
    return ag.div(total, float(len(xs))) if node.kind == "Mean" else total


@imports("Clip")
def _clip(node: Node, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    limits = [None if limit is None else np.asarray(limit).item() for limit in (low, high)]
    return x if limits == [None, None] else ag.clamp(x, *limits)


@imports("Cast")
def _cast(node: Node, x: Tensor) -> Tensor:
    return ag.cast(x, dtype_of(node["to"]))


@imports("CastLike")
def _cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return ag.cast(x, like.dtype)


@imports("Identity")
def _identity(node: Node, x: Tensor) -> Tensor:
    return x


@imports("Dropout")
def _dropout(node: Node, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    if training:
        raise node.fault("dropout must be in evaluation mode, got training_mode=True")
    return x if len(node.outputs) == 1 else (x, Tensor.ones(x.shape, "bool", queue=x.queue))


# ---- shape


@imports("Reshape")
def _reshape(node: Node, x: Tensor, sizes: list[int]) -> Tensor:
    return ag.reshape(x, [x.shape[i] if n == 0 and not node["allowzero"] else n for i, n in enumerate(sizes)])


@imports("Flatten")
def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node["axis"] + x.ndim if node["axis"] < 0 else node["axis"]
    return ag.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@imports("Squeeze")
def _squeeze(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    drop = [i for i, n in enumerate(x.shape) if n == 1] if axes is None else [axis % x.ndim for axis in axes]
    return ag.reshape(x, [n for i, n in enumerate(x.shape) if i not in drop])


@imports("Unsqueeze")
def _unsqueeze(node: Node, x: Tensor, axes: list[int]) -> Tensor:
    ndim, rest = x.ndim + len(axes), iter(x.shape)
    new = {axis % ndim for axis in axes}
    return ag.reshape(x, [1 if i in new else next(rest) for i in range(ndim)])


@imports("Expand")
def _expand(node: Node, x: Tensor, sizes: list[int]) -> Tensor:
    return ag.expand(x, np.broadcast_shapes(x.shape, tuple(sizes)))


@imports("Split")
def _split(node: Node, x: Tensor, lengths: list[int] | None = None) -> Any:
    axis = node["axis"]
    if lengths is None:
        each = -(-x.shape[axis] // (node["num_outputs"] or len(node.outputs)))
        lengths = [min(each, x.shape[axis] - start) for start in range(0, x.shape[axis], each)]
    return tuple(ag.split(x, lengths, axis=axis))


@imports("Slice")
def _slice(node: Node, x: Tensor, starts: list[int], ends: list[int], axes: Any = None, steps: Any = None) -> Tensor:
    first, sizes, by = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        bounds = slice(start, None if step < 0 and end < -x.shape[axis] else end, step).indices(x.shape[axis])
        if places := range(*bounds):
            first[axis], sizes[axis], by[axis] = places.start, len(places), step
        else:
            sizes[axis] = 0
    return x if tuple(sizes) == x.shape and by == [1] * x.ndim else ag.strided_slice(x, first, sizes, by)


@imports("Pad")
def _pad(node: Node, x: Tensor, pads: list[int], value: Any = None, axes: Any = None) -> Tensor:
    named = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    mode = next(mine for mine, name in PAD_MODES.items() if name == node["mode"])
    sides = {axis: (pads[i], pads[len(named) + i]) for i, axis in enumerate(named)}
    flat = [side for axis in range(x.ndim - 1, min(sides) - 1, -1) for side in sides.get(axis, (0, 0))]
    while len(flat) > 2 and mode != "constant" and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    fill = {"value": (node["value"] or 0.0) if value is None else np.asarray(value).item()}
    return ag.pad(x, flat, mode=mode, **(fill if mode == "constant" else {}))


@imports("Tile")
def _tile(node: Node, x: Tensor, repeats: list[int]) -> Tensor:
    return ag.repeat(x, repeats)


@imports("DepthToSpace")
def _depth_to_space(node: Node, x: Tensor) -> Any:
    if node["mode"] == "CRD":
        return NotImplemented
    (n, c, h, w), b = x.shape, node["blocksize"]
    parts = ag.permute(ag.reshape(x, (n, b, b, c // b**2, h, w)), (0, 3, 4, 1, 5, 2))
    return ag.reshape(parts, (n, c // b**2, h * b, w * b))


@imports("Shape")
def _shape(node: Node, x: Tensor) -> np.ndarray:
    return np.array(x.shape[node["start"] or 0 : node["end"]], np.int64)


@imports("Size")
def _size(node: Node, x: Tensor) -> np.ndarray:
    return np.array(x.size, np.int64)


@imports("Constant")
def _constant(node: Node) -> np.ndarray:
    kinds = {"value": None, "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name in kinds.keys() & node.given.keys():
        return numbers(np.asarray(node[name], kinds[name]))
    raise node.fault("a constant must be made of numbers", attributes=list(node.given))


@imports("ConstantOfShape")
def _constant_of_shape(node: Node, sizes: Tensor) -> np.ndarray:
    value = numbers(np.zeros(1, np.float32) if node["value"] is None else np.asarray(node["value"]))
    return np.full(sizes.to_host().tolist(), value.reshape(-1)[0], value.dtype)


@imports("Range")
def _range(node: Node, *limits: Tensor) -> np.ndarray:
    start, limit, step = (x.to_host() for x in limits)
    return np.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


# ---- elements


@imports("Gather")
def _gather(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = node["axis"] % x.ndim
    flat = ag.reshape(positive(index, x.shape[axis]), (-1,))
    return ag.reshape(ag.index_select(x, axis, flat), (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@imports("OneHot")
def _one_hot(node: Node, index: Tensor, depth: Any, values: Tensor) -> Tensor:
    count, (low, high) = int(np.asarray(depth).item()), values.to_host().tolist()
    index, last = ag.cast(index, "int64"), index.ndim
    hit = ag.eq(ag.unsqueeze(positive(index, count), -1), Tensor.from_host(index.queue, np.arange(count)))
    made = ag.cast(ag.where(hit, high, low), values.dtype)
    axis = node["axis"] % (last + 1)
    return made if axis == last else ag.permute(made, [*range(axis), last, *range(axis, last)])


# ---- products and reductions


@imports("Gemm")
def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    out = ag.matmul(a, b, transpose_a=bool(node["transA"]), transpose_b=bool(node["transB"]))
    out = out if node["alpha"] == 1.0 else ag.mul(out, node["alpha"])
    return out if c is None or node["beta"] == 0.0 else ag.add(out, c if node["beta"] == 1.0 else ag.mul(c, node["beta"]))


@imports("ReduceSumSquare", "ReduceLogSum")
def _reduce(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    if not axes and node["noop_with_empty_axes"]:
        return x
    options = {"axis": tuple(axes) if axes and x.ndim else None, "keepdims": bool(node["keepdims"])}
    return ag.cast(ag.sum(ag.square(x), **options) if node.kind == "ReduceSumSquare" else ag.log(ag.sum(x, **options)), x.dtype)


@imports("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp", "ReduceL1", "ReduceL2")
def _unreduced(node: Node, x: Tensor, axes: list[int] | None = None) -> Any:
    return x if not axes and node["noop_with_empty_axes"] else NotImplemented


@imports("ArgMax", "ArgMin")
def _last_best(node: Node, x: Tensor) -> Any:
    if not node["select_last_index"]:
        return NotImplemented
    op, axis = ag.argmax if node.kind == "ArgMax" else ag.argmin, node["axis"]
    return ag.sub(x.shape[axis] - 1, op(ag.flip(x, axis), axis=axis, keepdims=bool(node["keepdims"])))


@imports("CumSum")
def _exclusive_sum(node: Node, x: Tensor, axis: Any) -> Any:
    if not node["exclusive"]:
        return NotImplemented
    return ag.cast(ag.sub(ag.cumsum(x, int(np.asarray(axis).item()), reverse=bool(node["reverse"])), x), x.dtype)


@imports("Softmax", "LogSoftmax")
def _flat_softmax(node: Node, x: Tensor) -> Any:
    """Before opset 13, a softmax over all axes from the given one on."""
    if node.opset >= 13:
        return NotImplemented
    op, axis = ag.softmax if node.kind == "Softmax" else ag.log_softmax, node["axis"] % x.ndim
    return ag.reshape(op(ag.reshape(x, (math.prod(x.shape[:axis]), -1)), axis=-1), x.shape)


# ---- norms


@imports("BatchNormalization")
def _batch_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if node["training_mode"]:
        raise node.fault("a batch norm must be in evaluation mode, got training_mode=1")
    return ag.batch_norm(x, mean, var, weight, bias, eps=node["epsilon"])


@imports("GroupNormalization")
def _group_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = node["num_groups"]
    if node.opset < 21:  # weights are per group until then
        each = (groups, x.shape[1] // groups)
        weight, bias = (ag.reshape(ag.expand(ag.reshape(t, (groups, 1)), each), (-1,)) for t in (weight, bias))
    return ag.group_norm(x, groups, weight, bias, eps=node["epsilon"])


@imports("LayerNormalization")
def _layer_norm(node: Node, *given: Tensor) -> Any:
    if any(node.outputs[1:]):
        raise node.fault("mean and deviation are not supported as results", outputs=node.outputs)
    return NotImplemented
