"""What each ONNX operator is in netcl. Handlers take and give tensors; inputs that are sizes or axes reach them as arrays.

Models of every opset that onnx still reads are taken: where an operator changed its form (axes became inputs), both are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import DTYPES
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io.onnx.library import dtype_of, numbers


class Node:
    """One node: its kind, attributes, opset, and how many results are wanted."""

    def __init__(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any], opset: int):
        self.kind, self.inputs, self.outputs, self.attributes, self.opset = kind, list(inputs), list(outputs), attributes, opset

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def fault(self, what: str, **values: object) -> ValueError:
        return ValueError(message(self.kind, what, **values, node=self.outputs[0]))


Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
#: Positions of inputs that are sizes, axes or other plain numbers.
SIZES: dict[str, tuple[int, ...]] = {}


def handles(*kinds: str, sizes: tuple[int, ...] = ()) -> Callable[[Handler], Handler]:
    """Say what operators are."""

    def add(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(kinds, function))
        SIZES.update(dict.fromkeys(kinds, sizes))
        return function

    return add


def _ints(values: Any) -> list[int]:
    return [int(n) for n in np.asarray(values).reshape(-1)]


# ---- pointwise

_UNARY = {
    "Abs": "abs", "Neg": "neg", "Sqrt": "sqrt", "Exp": "exp", "Log": "log", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Tanh": "tanh",
    "Sinh": "sinh", "Cosh": "cosh", "Erf": "erf", "Sign": "sign", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Relu": "relu",
    "Sigmoid": "sigmoid", "Reciprocal": "reciprocal", "Softsign": "softsign", "Softplus": "softplus", "Not": "logical_not",
    "IsNaN": "isnan", "HardSwish": "hard_swish", "Mish": "mish",
}  # fmt: skip
_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Pow": "pow", "Equal": "eq", "Less": "lt", "LessOrEqual": "le", "Greater": "gt",
    "GreaterOrEqual": "ge", "And": "logical_and", "Or": "logical_or", "Xor": "ne",
}  # fmt: skip


@handles(*_UNARY)
def _unary(node: Node, x: Tensor) -> Tensor:
    return getattr(ag, _UNARY[node.kind])(x)


@handles(*_BINARY)
def _binary(node: Node, a: Tensor, b: Tensor) -> Tensor:
    out = getattr(ag, _BINARY[node.kind])(a, b)
    return ag.cast(out, a.dtype) if node.kind == "Pow" else out


@handles("Div")
def _div(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Quotients of integers are cut towards zero."""
    if a.dtype.startswith(("float", "bfloat")):
        return ag.div(a, b)
    return ag.floor_divide(ag.sub(a, ag.fmod(a, b)), b)


@handles("Mod")
def _mod(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return ag.fmod(a, b) if node.get("fmod", 0) else ag.remainder(a, b)


@handles("IsInf")
def _isinf(node: Node, x: Tensor) -> Tensor:
    if not node.get("detect_negative", 1) or not node.get("detect_positive", 1):
        return ag.eq(x, math.inf if node.get("detect_positive", 1) else -math.inf)
    return ag.isinf(x)


@handles("Sum", "Max", "Min", "Mean")
def _variadic(node: Node, *xs: Tensor) -> Tensor:
    op = {"Sum": ag.add, "Mean": ag.add, "Max": ag.maximum, "Min": ag.minimum}[node.kind]
    total = xs[0]
    for x in xs[1:]:
        total = op(total, x)
    return ag.div(total, float(len(xs))) if node.kind == "Mean" else total


@handles("Where")
def _where(node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ag.where(condition, a, b)


@handles("LeakyRelu")
def _leaky_relu(node: Node, x: Tensor) -> Tensor:
    return ag.leaky_relu(x, negative_slope=node.get("alpha", 0.01))


@handles("Elu")
def _elu(node: Node, x: Tensor) -> Tensor:
    return ag.elu(x, alpha=node.get("alpha", 1.0))


@handles("Selu")
def _selu(node: Node, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return ag.mul(ag.elu(x, alpha=alpha), gamma)


@handles("HardSigmoid")
def _hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return ag.clamp(ag.add(ag.mul(x, node.get("alpha", 0.2)), node.get("beta", 0.5)), 0.0, 1.0)


@handles("Gelu")
def _gelu(node: Node, x: Tensor) -> Tensor:
    return ag.gelu(x, approximate=node.get("approximate", "none"))


@handles("PRelu")
def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    return ag.where(ag.lt(x, 0), ag.mul(x, slope), x)


@handles("Clip", sizes=(1, 2))
def _clip(node: Node, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    limits = [node.get(name) if given is None else np.asarray(given).item() for name, given in (("min", low), ("max", high))]
    return x if limits == [None, None] else ag.clamp(x, *limits)


@handles("Cast")
def _cast(node: Node, x: Tensor) -> Tensor:
    return ag.cast(x, dtype_of(node.get("to")))


@handles("CastLike")
def _cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return ag.cast(x, like.dtype)


@handles("Identity")
def _identity(node: Node, x: Tensor) -> Tensor:
    return x


@handles("Dropout", sizes=(1, 2))
def _dropout(node: Node, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    if training is not None and np.asarray(training).item():
        raise node.fault("dropout in training mode is not supported")
    return x if len(node.outputs) == 1 else (x, Tensor.ones(x.shape, "bool", queue=x.queue))


# ---- shape


@handles("Reshape", sizes=(1,))
def _reshape(node: Node, x: Tensor, sizes: Any = None) -> Tensor:
    given = _ints(node.get("shape") if sizes is None else sizes)
    return ag.reshape(x, [x.shape[i] if n == 0 and not node.get("allowzero", 0) else n for i, n in enumerate(given)])


@handles("Flatten")
def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return ag.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@handles("Transpose")
def _transpose(node: Node, x: Tensor) -> Tensor:
    return ag.permute(x, node.get("perm", list(range(x.ndim))[::-1])) if x.ndim else x


@handles("Squeeze", sizes=(1,))
def _squeeze(node: Node, x: Tensor, axes: Any = None) -> Tensor:
    given = node.get("axes") if axes is None else _ints(axes)
    drop = [i for i, n in enumerate(x.shape) if n == 1] if given is None else [axis % x.ndim for axis in given]
    return ag.reshape(x, [n for i, n in enumerate(x.shape) if i not in drop])


@handles("Unsqueeze", sizes=(1,))
def _unsqueeze(node: Node, x: Tensor, axes: Any = None) -> Tensor:
    given = node.get("axes") if axes is None else _ints(axes)
    ndim, rest = x.ndim + len(given), iter(x.shape)
    new = {axis % ndim for axis in given}
    return ag.reshape(x, [1 if i in new else next(rest) for i in range(ndim)])


@handles("Expand", sizes=(1,))
def _expand(node: Node, x: Tensor, sizes: Any) -> Tensor:
    return ag.expand(x, np.broadcast_shapes(x.shape, tuple(_ints(sizes))))


@handles("Concat")
def _concat(node: Node, *xs: Tensor) -> Tensor:
    return ag.cat(list(xs), axis=node.get("axis"))


@handles("Split", sizes=(1,))
def _split_along(node: Node, x: Tensor, lengths: Any = None) -> Any:
    axis, given = node.get("axis", 0), node.get("split") if lengths is None else _ints(lengths)
    if given is None:
        each = -(-x.shape[axis] // node.get("num_outputs", len(node.outputs)))
        given = [min(each, x.shape[axis] - start) for start in range(0, x.shape[axis], each)]
    return tuple(ag.split(x, given, axis=axis))


@handles("Slice", sizes=(1, 2, 3, 4))
def _slice(node: Node, x: Tensor, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Tensor:
    starts, ends = (_ints(node.get(name) if given is None else given) for name, given in (("starts", starts), ("ends", ends)))
    named = node.get("axes") if axes is None else _ints(axes)
    by = [1] * len(starts) if steps is None else _ints(steps)
    for axis, start, end, step in zip(named or range(len(starts)), starts, ends, by, strict=True):
        bounds = slice(start, None if step < 0 and end < -x.shape[axis] else end, step).indices(x.shape[axis])
        x = _taken(x, axis % x.ndim, range(*bounds))
    return x


def _taken(x: Tensor, axis: int, places: range) -> Tensor:
    if places == range(x.shape[axis]):
        return x
    first = [0] * x.ndim
    sizes, steps = list(x.shape), [1] * x.ndim
    first[axis], sizes[axis], steps[axis] = places.start if len(places) else 0, len(places), places.step if len(places) else 1
    return ag.strided_slice(x, first, sizes, steps)


@handles("Pad", sizes=(1, 2, 3))
def _pad(node: Node, x: Tensor, pads: Any = None, value: Any = None, axes: Any = None) -> Tensor:
    given = _ints(node.get("pads") if pads is None else pads)
    named = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in _ints(axes)]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[node.get("mode", "constant")]
    fill = node.get("value", 0.0) if value is None else np.asarray(value).item()
    sides = {axis: (given[i], given[len(named) + i]) for i, axis in enumerate(named)}
    flat = [side for axis in range(x.ndim - 1, min(sides) - 1, -1) for side in sides.get(axis, (0, 0))]
    while len(flat) > 2 and mode != "constant" and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return ag.pad(x, flat, mode=mode, value=fill) if mode == "constant" else ag.pad(x, flat, mode=mode)


@handles("Tile", sizes=(1,))
def _tile(node: Node, x: Tensor, times: Any) -> Tensor:
    return ag.repeat(x, _ints(times))


@handles("Trilu", sizes=(1,))
def _trilu(node: Node, x: Tensor, diagonal: Any = 0) -> Tensor:
    return (ag.triu if node.get("upper", 1) else ag.tril)(x, int(np.asarray(diagonal)))


@handles("Shape")
def _shape(node: Node, x: Tensor) -> np.ndarray:
    return np.array(x.shape[node.get("start", 0) : node.get("end")], np.int64)


@handles("Size")
def _element_count(node: Node, x: Tensor) -> np.ndarray:
    return np.array(x.size, np.int64)


@handles("Constant")
def _constant(node: Node) -> np.ndarray:
    for name, dtype in (
        ("value", None),
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if name in node.attributes:
            return numbers(np.asarray(node.attributes[name], dtype))
    raise node.fault("a constant that is not made of numbers", attributes=list(node.attributes))


@handles("ConstantOfShape", sizes=(0,))
def _constant_of_shape(node: Node, sizes: Any) -> np.ndarray:
    value = numbers(np.asarray(node.get("value", np.zeros(1, np.float32))))
    return np.full(_ints(sizes), value.reshape(-1)[0], value.dtype)


@handles("Range", sizes=(0, 1, 2))
def _range(node: Node, start: Any, limit: Any, step: Any) -> np.ndarray:
    return np.arange(np.asarray(start).item(), np.asarray(limit).item(), np.asarray(step).item(), dtype=np.asarray(start).dtype)


# ---- elements


def _positive(index: Tensor, length: int) -> Tensor:
    return ag.where(ag.lt(index, 0), ag.add(index, length), index)


@handles("Gather")
def _gather(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    flat = ag.reshape(_positive(index, x.shape[axis]), (-1,))
    return ag.reshape(ag.index_select(x, axis, flat), (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@handles("GatherElements")
def _gather_elements(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = node.get("axis", 0) % x.ndim
    return ag.gather(x, axis, _positive(index, x.shape[axis]))


@handles("TopK", sizes=(1,))
def _topk(node: Node, x: Tensor, k: Any = None) -> Any:
    count = node.get("k") if k is None else int(np.asarray(k).reshape(-1)[0])
    return ag.topk(x, count, node.get("axis", -1), bool(node.get("largest", 1)))


@handles("OneHot", sizes=(1, 2))
def _one_hot(node: Node, index: Tensor, classes: Any, values: Any) -> Tensor:
    count, (low, high) = int(np.asarray(classes).reshape(-1)[0]), np.asarray(values).tolist()
    axis, index = node.get("axis", -1), ag.cast(index, "int64")
    places = Tensor.from_host(index.queue, np.arange(count))
    hit = ag.eq(ag.unsqueeze(_positive(index, count), -1), places)
    made = ag.cast(ag.where(hit, high, low), numbers(np.asarray(values)).dtype.name)
    last = index.ndim
    axis = axis % (last + 1)
    return made if axis == last else ag.permute(made, [*range(axis), last, *range(axis, last)])


@handles("ScatterElements")
def _scatter_elements(node: Node, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    if node.get("reduction", "none") != "add":
        raise node.fault("only reduction='add' is supported", reduction=node.get("reduction", "none"))
    axis = node.get("axis", 0) % x.ndim
    return ag.scatter_add(x, axis, _positive(index, x.shape[axis]), updates)


# ---- products


@handles("MatMul")
def _matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return ag.matmul(a, b)


@handles("Gemm")
def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    out = ag.matmul(a, b, transpose_a=bool(node.get("transA", 0)), transpose_b=bool(node.get("transB", 0)))
    out = out if alpha == 1.0 else ag.mul(out, alpha)
    return out if c is None or beta == 0.0 else ag.add(out, c if beta == 1.0 else ag.mul(c, beta))


@handles("Einsum")
def _einsum(node: Node, *xs: Tensor) -> Tensor:
    return ag.einsum(node.get("equation"), *xs)


# ---- reductions

_REDUCTIONS = {
    "ReduceSum": ag.sum,
    "ReduceMean": lambda x, **o: ag.mean(x if DTYPES[x.dtype].is_float else ag.cast(x, "float32"), **o),
    "ReduceMax": ag.amax,
    "ReduceMin": ag.amin,
    "ReduceProd": ag.prod,
    "ReduceLogSumExp": ag.logsumexp,
    "ReduceL1": lambda x, **o: ag.sum(ag.abs(x), **o),
    "ReduceL2": lambda x, **o: ag.sqrt(ag.sum(ag.square(x), **o)),
    "ReduceSumSquare": lambda x, **o: ag.sum(ag.square(x), **o),
    "ReduceLogSum": lambda x, **o: ag.log(ag.sum(x, **o)),
}


@handles(*_REDUCTIONS, sizes=(1,))
def _reduce(node: Node, x: Tensor, axes: Any = None) -> Tensor:
    given = node.get("axes") if axes is None else _ints(axes)
    if not given and node.get("noop_with_empty_axes", 0):
        return x
    axis = tuple(a % x.ndim for a in given) if given and x.ndim else None
    out = _REDUCTIONS[node.kind](x, axis=axis, keepdims=bool(node.get("keepdims", 1)))
    return out if out.dtype == x.dtype else ag.cast(out, x.dtype)


@handles("ArgMax", "ArgMin")
def _best(node: Node, x: Tensor) -> Tensor:
    axis, last = node.get("axis", 0), node.get("select_last_index", 0)
    op = ag.argmax if node.kind == "ArgMax" else ag.argmin
    found = op(ag.flip(x, axis) if last else x, axis=axis, keepdims=bool(node.get("keepdims", 1)))
    return ag.sub(x.shape[axis] - 1, found) if last else found


@handles("CumSum", sizes=(1,))
def _cumsum(node: Node, x: Tensor, axis: Any) -> Tensor:
    out = ag.cumsum(x, int(np.asarray(axis).reshape(-1)[0]), reverse=bool(node.get("reverse", 0)))
    return ag.cast(ag.sub(out, x) if node.get("exclusive", 0) else out, x.dtype)


@handles("Softmax", "LogSoftmax")
def _softmax(node: Node, x: Tensor) -> Tensor:
    op = ag.softmax if node.kind == "Softmax" else ag.log_softmax
    if node.opset >= 13:
        return op(x, axis=node.get("axis", -1))
    axis = node.get("axis", 1) % x.ndim  # until opset 13, over all axes from this one on
    return ag.reshape(op(ag.reshape(x, (math.prod(x.shape[:axis]), -1)), axis=-1), x.shape)
