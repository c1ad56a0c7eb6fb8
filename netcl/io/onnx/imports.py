"""ONNX operators as calls of netcl's ops. Import functions handle operators that the table cannot express.

An import function takes a node and its inputs: tensors, or plain numbers and lists for inputs that :data:`HOST` names. If it returns
``NotImplemented``, the table's entry, a formula or ONNX's own definition is used. Some inputs in :data:`HOST` were attributes in older
opsets; import functions get these attributes as inputs too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.tensor import Tensor
from netcl.io.onnx.exports import ONNX_PAD_MODES
from netcl.io.onnx.library import numbers
from netcl.io.onnx.table import FORMULAS, STRUCTURED, OnnxNode, OperatorEntry, computed_by_formula, entries_by_operator, positive

Import = Callable[..., Any]
#: ONNX's names of inputs that are sizes, axes or limits: functions and entries get their values, not tensors.
HOST = {
    "shape", "axes", "axis", "k", "split", "repeats", "pads", "starts", "ends", "steps", "sizes", "scales", "roi", "min", "max", "ratio",
    "training_mode", "depth", "constant_value",
}  # fmt: skip
#: Operators whose inputs are tensors although one has such a name.
ON_DEVICE = {"Attention"}
_READ_SUM = STRUCTURED["sum"][0].read


class TensorSequence(list[Any]):
    """A value of ONNX's sequence type: a list of tensors."""


#: Operators with bodies, or that run others: functions of a node, a function that runs a body of it by name, and its inputs.
CONTROL: dict[str, Import] = {}


def operators() -> set[str]:
    """Return the names of the operators that can be imported without their ONNX definition."""
    return {*IMPORTS, *CONTROL, *FORMULAS, *entries_by_operator()}


def reader(node: OnnxNode, entries: list[OperatorEntry]) -> Import:
    """Return the function that computes a node from its inputs; ``entries`` are the table entries of its operator."""
    function = CONTROL.get(node.kind) or IMPORTS.get(node.kind)
    entry = next((entry for entry in entries if not entry.unread(node)), None)
    usual = entry.read if entry else computed_by_formula if node.kind in FORMULAS else None

    def read(node: OnnxNode, *given: Any) -> Any:
        made = function(node, *given) if function else NotImplemented
        if made is not NotImplemented:
            return made
        if usual is None and node.expand is not None:
            return NotImplemented
        if usual is None:
            raise node.fault("attributes must have supported values", **entries[0].unread(node))
        return usual(node, *given)

    return read


def _clip(node: OnnxNode, x: Tensor, *limits: Any) -> Tensor:
    bounds = [limit if limit is None else np.asarray(limit).item() for limit in limits]
    if bounds == [0, 6] and DTYPES[x.dtype].is_float:
        return ag.relu6(x)  # kernels of convolutions end in it
    return x if all(bound is None for bound in bounds) else ag.clamp(x, *bounds)


def _depth_and_space(node: OnnxNode, x: Tensor) -> Any:
    if node["mode"] == "CRD":
        return NotImplemented
    (n, c, h, w), b = x.shape, node["blocksize"]
    if node.kind == "SpaceToDepth":
        return ag.reshape(ag.permute(ag.reshape(x, (n, c, h // b, b, w // b, b)), (0, 3, 5, 1, 2, 4)), (n, c * b**2, h // b, w // b))
    return ag.reshape(ag.permute(ag.reshape(x, (n, b, b, c // b**2, h, w)), (0, 3, 4, 1, 5, 2)), (n, c // b**2, h * b, w * b))


def _last_best(node: OnnxNode, x: Tensor) -> Any:
    if not node["select_last_index"]:
        return NotImplemented
    op, axis = ag.argmax if node.kind == "ArgMax" else ag.argmin, node["axis"]
    return ag.sub(x.shape[axis] - 1, op(ag.flip(x, axis), axis=axis, keepdims=bool(node["keepdims"])))


def _read_split(node: OnnxNode, x: Tensor, lengths: list[int] | None = None) -> Any:
    axis = node["axis"]
    if lengths is None:
        each = -(-x.shape[axis] // (node["num_outputs"] or len(node.outputs)))
        lengths = [min(each, x.shape[axis] - start) for start in range(0, x.shape[axis], each)]
    return tuple(ag.split(x, lengths, axis=axis))


def _slice(node: OnnxNode, x: Tensor, starts: list[int], ends: list[int], axes: Any = None, steps: Any = None) -> Tensor:
    first, sizes, by = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        start = max(start, -x.shape[axis])  # Python leaves a start beyond the first element out of a range that runs backwards
        bounds = slice(start, None if step < 0 and end < -x.shape[axis] else end, step).indices(x.shape[axis])
        if places := range(*bounds):
            first[axis], sizes[axis], by[axis] = places.start, len(places), step
        else:
            sizes[axis] = 0
    return x if tuple(sizes) == x.shape and by == [1] * x.ndim else ag.strided_slice(x, first, sizes, by)


def _pad(node: OnnxNode, x: Tensor, pads: list[int], value: Any = None, axes: Any = None) -> Tensor:
    named = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    mode = next(mine for mine, name in ONNX_PAD_MODES.items() if name == node["mode"])
    sides = {axis: (pads[i], pads[len(named) + i]) for i, axis in enumerate(named)}
    flat = [side for axis in range(x.ndim - 1, min(sides, default=x.ndim) - 1, -1) for side in sides.get(axis, (0, 0))]
    while len(flat) > 2 and mode != "constant" and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    fill = {"value": (node["value"] or 0.0) if value is None else np.asarray(value).item()}
    return ag.pad(x, flat, mode=mode, **(fill if mode == "constant" else {}))


def _constant_value(node: OnnxNode) -> np.ndarray:
    kinds = {"value": None, "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    for name in kinds.keys() & node.given.keys():
        return numbers(np.asarray(node[name], kinds[name]))
    raise node.fault("a constant must be a number or a tensor of numbers", attributes=list(node.given))


def _gather(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    axis = node["axis"] % x.ndim
    flat = ag.reshape(positive(index, x.shape[axis]), (-1,))
    return ag.reshape(ag.index_select(x, axis, flat), (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _one_hot(node: OnnxNode, index: Tensor, depth: Any, values: Tensor) -> Tensor:
    count, (low, high) = int(np.asarray(depth).item()), values.to_host().tolist()
    index, last = ag.cast(index, "int64"), index.ndim
    hit = ag.eq(ag.unsqueeze(positive(index, count), -1), Tensor.from_host(index.queue, np.arange(count)))
    made = ag.cast(ag.where(hit, high, low), values.dtype)
    axis = node["axis"] % (last + 1)
    return made if axis == last else ag.permute(made, [*range(axis), last, *range(axis, last)])


def _gemm(node: OnnxNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    out = ag.matmul(a, b, transpose_a=bool(node["transA"]), transpose_b=bool(node["transB"]))
    out = out if node["alpha"] == 1.0 else ag.mul(out, node["alpha"])
    return out if c is None or node["beta"] == 0.0 else ag.add(out, c if node["beta"] == 1.0 else ag.mul(c, node["beta"]))


def _flat_softmax(node: OnnxNode, x: Tensor) -> Any:
    """Return the softmax over the node's axis and all later axes, as before opset 13; ``NotImplemented`` for later opsets."""
    if node.opset >= 13:
        return NotImplemented
    op, axis = ag.softmax if node.kind == "Softmax" else ag.log_softmax, node["axis"] % x.ndim
    return ag.reshape(op(ag.reshape(x, [math.prod(part) for part in (x.shape[:axis], x.shape[axis:])]), axis=-1), x.shape)


def _read_group_norm(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = node["num_groups"]
    if node.opset < 21:  # weights are per group until then
        each = (groups, x.shape[1] // groups)
        weight, bias = (ag.reshape(ag.expand(ag.reshape(t, (groups, 1)), each), (-1,)) for t in (weight, bias))
    return ag.group_norm(x, groups, weight, bias, eps=node["epsilon"])


def _divide_integers(node: OnnxNode, a: Tensor, b: Any) -> Any:
    """Return the truncated quotient of integers; ``NotImplemented`` for floats."""
    return NotImplemented if DTYPES[a.dtype].is_float else ag.floor_divide(ag.sub(a, ag.fmod(a, b)), b)


def _reduce_integers(node: OnnxNode, x: Tensor, axes: Any = None) -> Any:
    """Return the mean or norm of integers from their exact sum; ``NotImplemented`` for floats."""
    if DTYPES[x.dtype].is_float:
        return NotImplemented
    if node.kind == "ReduceL2":
        return ag.cast(ag.sqrt(_READ_SUM(node, ag.square(ag.cast(x, "float64")), axes)), x.dtype)
    wide = ag.cast(x, "int64")
    total = _READ_SUM(node, ag.abs(wide) if node.kind == "ReduceL1" else wide, axes)
    return ag.cast(total if node.kind == "ReduceL1" else _divide_integers(node, total, max(x.size // max(total.size, 1), 1)), x.dtype)


IMPORTS: dict[str, Import] = {
    "Div": _divide_integers,
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceMean"), _reduce_integers),
    "IsInf": lambda node, x: (
        NotImplemented
        if node["detect_negative"] and node["detect_positive"]
        else ag.eq(x, math.inf if node["detect_positive"] else -math.inf)
    ),
    "Sum": lambda node, *xs: reduce(ag.add, xs),
    "Mean": lambda node, *xs: ag.div(reduce(ag.add, xs), float(len(xs))),
    "Clip": _clip,
    "HardSigmoid": lambda node, x: ag.hard_sigmoid(x) if np.allclose((node["alpha"], node["beta"]), (1 / 6, 0.5)) else NotImplemented,
    "Identity": lambda node, x: x,
    "Reshape": lambda node, x, shape: ag.reshape(x, [n or (0 if node["allowzero"] else x.shape[i]) for i, n in enumerate(shape)]),
    "Flatten": lambda node, x: ag.reshape(x, [math.prod(part) for part in (x.shape[: node["axis"]], x.shape[node["axis"] :])]),
    "Unsqueeze": lambda node, x, axes: reduce(ag.unsqueeze, sorted(axis % (x.ndim + len(axes)) for axis in axes), x),
    "Expand": lambda node, x, shape: ag.expand(x, np.broadcast_shapes(x.shape, tuple(shape))),
    "Split": _read_split,
    "Slice": _slice,
    "Pad": _pad,
    "DepthToSpace": _depth_and_space,
    "SpaceToDepth": _depth_and_space,
    "Shape": lambda node, x: np.array(x.shape[node["start"] or 0 : node["end"]], np.int64),
    "Size": lambda node, x: np.array(x.size, np.int64),
    "Constant": _constant_value,
    "ConstantOfShape": lambda node, sizes: np.full(
        sizes.to_host().tolist(), *numbers(np.zeros(1, np.float32) if node["value"] is None else node["value"].reshape(-1))
    ),
    "Range": lambda node, *limits: np.arange(*(x.to_host().item() for x in limits), dtype=limits[0].to_host().dtype),
    "Gather": _gather,
    "OneHot": _one_hot,
    "Gemm": _gemm,
    "ReduceSumSquare": lambda node, x, axes=None: _READ_SUM(node, ag.square(x), axes),
    "ReduceLogSum": lambda node, x, axes=None: ag.log(_READ_SUM(node, x, axes)),
    "ArgMax": _last_best,
    "ArgMin": _last_best,
    "Softmax": _flat_softmax,
    "LogSoftmax": _flat_softmax,
    "GroupNormalization": _read_group_norm,
}
