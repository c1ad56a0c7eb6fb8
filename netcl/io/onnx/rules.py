"""What each structured op becomes in ONNX. A rule adds nodes to a graph and returns the name of the result (or of all results)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.engine import registry
from netcl.io.onnx.graph import Graph, Name, Unsupported
from netcl.io.onnx.pointwise import Nodes, by_row, formula_nodes, pointwise
from netcl.io.onnx.trace import Call
from netcl.ops.conv.geometry import frozen, paddings
from netcl.ops.pointwise import _user_row as user_row

Rule = Callable[[Graph, Call], Name | list[Name]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Say what ops become."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def emit(graph: Graph, call: Call) -> None:
    """Add the nodes of a call and name its results."""
    made = RULES[call.name](graph, call) if call.name in RULES else pointwise(graph, call)
    names = made if isinstance(made, list) else [made]
    for tensor, name in zip(call.outputs, names, strict=False):
        graph.bind(tensor, name)


def _filled(graph: Graph, shape: Sequence[int], value: float, dtype: str) -> Name:
    return graph.value(np.full(tuple(shape), value, np.float32), dtype)


# ---- shape


@rule("reshape", "flatten", "squeeze", "unsqueeze")
def _export_reshape(graph: Graph, call: Call) -> Name:
    mine, other = call.out.shape, call.other.out.shape
    free = [axis for axis in range(len(mine)) if mine[axis] != other[axis]]
    inferred = len(free) == 1 and 0 not in mine
    sizes = graph.integers([-1 if axis in free else n for axis, n in enumerate(mine)]) if inferred or not free else graph.sizes(call)
    return graph.node("Reshape", [graph.value(call["x"]), sizes], call.out.dtype, allowzero=1 if 0 in mine else None)


@rule("reorder")
def _export_reorder(graph: Graph, call: Call) -> Name:
    axes = [axis % call.out.ndim for axis in call["order"]]
    if not axes:
        return graph.node("Identity", [graph.value(call["x"])], call.out.dtype)
    return graph.node("Transpose", [graph.value(call["x"])], call.out.dtype, perm=axes)


@rule("expand")
def _export_expand(graph: Graph, call: Call) -> Name:
    shape = (1,) * (call.out.ndim - call["x"].ndim) + call["x"].shape
    twin = (1,) * (call.out.ndim - call["x"].ndim) + call.other["x"].shape
    kept = [n == out for n, out in zip(shape, call.out.shape, strict=True)]
    kept = [same and n == out for same, n, out in zip(kept, twin, call.other.out.shape, strict=True)]
    return graph.node("Expand", [graph.value(call["x"]), graph.sizes(call, lambda axis: kept[axis])], call.out.dtype)


@rule("joined", "cat")
def _export_joined(graph: Graph, call: Call) -> Name:
    return graph.node("Concat", [graph.value(x, call.out.dtype) for x in call["xs"]], call.out.dtype, axis=call["axis"] % call.out.ndim)


@rule("split")
def _export_split(graph: Graph, call: Call) -> list[Name]:
    axis = call["axis"] % call.out.ndim
    lengths = [[out.shape[axis] for out in run.outputs] for run in (call, call.other)]
    if lengths[0] != lengths[1]:
        raise Unsupported("split along the batch (dynamic_batch=False)")
    if len(lengths[0]) == 1:
        return [graph.node("Identity", [graph.value(call["x"])], call.out.dtype)]
    return graph.several("Split", [graph.value(call["x"]), graph.integers(lengths[0])], len(lengths[0]), call.out.dtype, axis=axis)


@rule("unbind")
def _export_unbind(graph: Graph, call: Call) -> list[Name]:
    axis, dtype, count = call["axis"] % call["x"].ndim, call.out.dtype, len(call.outputs)
    if count != len(call.other.outputs):
        raise Unsupported("slices along the batch (dynamic_batch=False)")
    kept = [i for i in range(call["x"].ndim) if i != axis]
    order = range(len(kept)) if call["order"] is None else call["order"]
    first = graph.node("Transpose", [graph.value(call["x"])], dtype, perm=[axis, *(kept[i] for i in order)])
    parts = graph.several("Split", [first, graph.integers([1] * count)], count, dtype, axis=0) if count > 1 else [first]
    return [graph.node("Squeeze", [part, graph.integers([0])], dtype) for part in parts]


@rule("bound")
def _export_bound(graph: Graph, call: Call) -> Name:
    axis, dtype, back = call["axis"] % call.out.ndim, call.out.dtype, np.argsort(call["order"]).tolist()
    turned = [graph.node("Transpose", [graph.value(x)], dtype, perm=back) for x in call["xs"]]
    parts = [graph.node("Unsqueeze", [x, graph.integers([axis])], dtype) for x in turned]
    return graph.node("Concat", parts, dtype, axis=axis)


@rule("strided_slice")
def _export_strided_slice(graph: Graph, call: Call) -> Name:
    x, rows = call["x"], []
    for axis, (start, size, step) in enumerate(zip(call["starts"], call["sizes"], call["steps"], strict=True)):
        whole = start == 0 and step == 1 and size == x.shape[axis] and call.other["sizes"][axis] == call.other["x"].shape[axis]
        if whole:
            continue
        if size != call.other["sizes"][axis] or start != call.other["starts"][axis]:
            raise Unsupported("slice of the batch (dynamic_batch=False)")
        end = start + size * step
        rows.append((start, end if end >= 0 else np.iinfo(np.int64).min, axis, step))
    if not rows:
        return graph.node("Identity", [graph.value(x)], call.out.dtype)
    return graph.node("Slice", [graph.value(x), *[graph.integers(list(column)) for column in zip(*rows, strict=True)]], call.out.dtype)


@rule("pad")
def _export_pad(graph: Graph, call: Call) -> Name:
    x, given = call["x"], list(call["padding"])
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if call["mode"] not in modes or call["mode"] == "circular":
        raise Unsupported(f"pad(mode={call['mode']!r})")
    before, after = [0] * x.ndim, [0] * x.ndim
    for i in range(len(given) // 2):
        before[x.ndim - 1 - i], after[x.ndim - 1 - i] = given[2 * i], given[2 * i + 1]
    value = graph.value(call["value"], x.dtype) if call["mode"] == "constant" else None
    return graph.node("Pad", [graph.value(x), graph.integers(before + after), value], call.out.dtype, mode=modes[call["mode"]])


@rule("repeat")
def _export_repeat(graph: Graph, call: Call) -> Name:
    x = call["x"]
    shape = (1,) * (call.out.ndim - x.ndim) + x.shape
    name = graph.value(x) if len(shape) == x.ndim else graph.node("Reshape", [graph.value(x), graph.integers(shape)], x.dtype)
    times = [n // size if size else 1 for n, size in zip(call.out.shape, shape, strict=True)]
    return graph.node("Tile", [name, graph.integers(times)], call.out.dtype)


@rule("roll")
def _export_roll(graph: Graph, call: Call) -> Name:
    x, name = call["x"], graph.value(call["x"])
    if call["axis"] is None:
        raise Unsupported("roll without an axis")
    shifts, axes = (list(v) if isinstance(v, list | tuple) else [v] for v in (call["shifts"], call["axis"]))
    for shift, axis in zip(shifts, axes, strict=True):
        length, at = x.shape[axis], [graph.integers([axis % x.ndim])]
        if length != call.other["x"].shape[axis]:
            raise Unsupported("roll along the batch (dynamic_batch=False)")
        cut = -shift % max(length, 1)
        parts = [graph.node("Slice", [name, graph.integers([a]), graph.integers([b]), *at], x.dtype) for a, b in ((cut, length), (0, cut))]
        name = graph.node("Concat", parts, x.dtype, axis=axis % x.ndim)
    return name


@rule("tril", "triu")
def _export_triangle(graph: Graph, call: Call) -> Name:
    return graph.node(
        "Trilu", [graph.value(call["x"]), graph.constant(np.int64(call["diagonal"]))], call.out.dtype, upper=int(call.name == "triu")
    )


@rule("cast")
def _export_cast(graph: Graph, call: Call) -> Name:
    return graph.cast(graph.value(call["x"]), call.out.dtype)


@rule("clone")
def _export_clone(graph: Graph, call: Call) -> Name:
    return graph.node("Identity", [graph.value(call["x"])], call.out.dtype)


# ---- reductions

_REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd",
               "logsumexp": "ReduceLogSumExp"}  # fmt: skip


def _axes(call: Call) -> list[int]:
    axis, ndim = call["axis"], call["x"].ndim
    return list(range(ndim)) if axis is None else [a % ndim for a in ([axis] if isinstance(axis, int) else axis)] if ndim else []


def _reduced(graph: Graph, kind: str, x: Name, axes: Sequence[int], keepdims: bool) -> Name:
    return graph.node(kind, [x, graph.integers(axes)], x.dtype, keepdims=int(keepdims))


@rule(*_REDUCTIONS)
def _export_reduction(graph: Graph, call: Call) -> Name:
    return _reduced(graph, _REDUCTIONS[call.name], graph.value(call["x"], call.out.dtype), _axes(call), call["keepdims"])


@rule("any", "all")
def _export_questions(graph: Graph, call: Call) -> Name:
    truth = Nodes(graph, call["x"].dtype).truth(graph.value(call["x"]))
    kind = "ReduceMax" if call.name == "any" else "ReduceMin"
    return graph.cast(_reduced(graph, kind, graph.cast(truth, "int32"), _axes(call), call["keepdims"]), "bool")


@rule("var", "std")
def _export_variance(graph: Graph, call: Call) -> Name:
    x, nodes, axes = graph.value(call["x"], call.out.dtype), Nodes(graph, call.out.dtype), _axes(call)
    count = math.prod(call["x"].shape[axis] for axis in axes)
    if count != math.prod(call.other["x"].shape[axis] for axis in axes):
        raise Unsupported(f"{call.name} over the batch (dynamic_batch=False)")
    centered = nodes.sub(x, _reduced(graph, "ReduceMean", x, axes, True))
    total = _reduced(graph, "ReduceSum", nodes.mul(centered, centered), axes, call["keepdims"])
    var = nodes.div(total, float(count - call["correction"]))
    return var if call.name == "var" else nodes.sqrt(var)


@rule("norm")
def _export_norm(graph: Graph, call: Call) -> Name:
    if call["p"] not in (1, 2):
        raise Unsupported(f"norm(p={call['p']})")
    kind = "ReduceL1" if call["p"] == 1 else "ReduceL2"
    return _reduced(graph, kind, graph.value(call["x"], call.out.dtype), _axes(call), call["keepdims"])


@rule("argmax", "argmin")
def _export_best(graph: Graph, call: Call) -> Name:
    kind, x, axis = ("ArgMax" if call.name == "argmax" else "ArgMin"), graph.value(call["x"]), call["axis"]
    if axis is None:
        x = graph.node("Reshape", [x, graph.integers([-1])], x.dtype)
    found = graph.node(kind, [x], "int64", axis=axis or 0, keepdims=int(axis is not None and call["keepdims"]))
    return found if axis is not None else graph.node("Reshape", [found, graph.integers(call.out.shape)], "int64")


@rule("cumsum")
def _export_cumsum(graph: Graph, call: Call) -> Name:
    x, axis = graph.value(call["x"], call.out.dtype), call["axis"]
    if axis is None:
        x, axis = graph.node("Reshape", [x, graph.integers([-1])], x.dtype), 0
    return graph.node("CumSum", [x, graph.constant(np.int64(axis))], call.out.dtype, reverse=int(call["reverse"]))


@rule("softmax", "log_softmax")
def _export_softmax(graph: Graph, call: Call) -> Name:
    kind = "Softmax" if call.name == "softmax" else "LogSoftmax"
    if not call["x"].ndim:
        raise Unsupported(f"{call.name} of a number")
    return graph.node(kind, [graph.value(call["x"])], call.out.dtype, axis=call["axis"])


# ---- products


def _transposed(graph: Graph, x: Name, ndim: int) -> Name:
    return graph.node("Transpose", [x], x.dtype, perm=[*range(ndim - 2), ndim - 1, ndim - 2])


@rule("matmul")
def _export_matmul(graph: Graph, call: Call) -> Name:
    names = []
    for side in "ab":
        x = graph.value(call[side], call.out.dtype)
        names.append(_transposed(graph, x, call[side].ndim) if call[f"transpose_{side}"] and call[side].ndim > 1 else x)
    return graph.node("MatMul", names, call.out.dtype)


@rule("linear", "affine", "affine_activated")
def _export_linear(graph: Graph, call: Call) -> Name:
    x, w, dtype = graph.value(call["x"], call.out.dtype), graph.value(call["w"], call.out.dtype), call.out.dtype
    bias = None if call["bias"] is None else graph.value(call["bias"], dtype)
    if call["x"].ndim == 2:
        made = graph.node("Gemm", [x, w] if bias is None else [x, w, bias], dtype, transB=1)
    else:
        made = graph.node("MatMul", [x, _transposed(graph, w, 2)], dtype)
        made = made if bias is None else graph.node("Add", [made, bias], dtype)
    return _activated(graph, made, call.params.get("activation"))


def _activated(graph: Graph, x: Name, activation: Any) -> Name:
    if activation is None:
        return x
    row, params = registry.lookup(activation).resolve({})  # type: ignore[union-attr]
    return by_row(graph, row, params, [x], x.dtype, x.dtype)


@rule("einsum")
def _export_einsum(graph: Graph, call: Call) -> Name:
    text = next(value for value in call.params.values() if isinstance(value, str))
    tensors = [x for value in call.inputs.values() for x in (value if isinstance(value, list | tuple) else [value])]
    return graph.node("Einsum", [graph.value(x, call.out.dtype) for x in tensors], call.out.dtype, equation=text.replace(" ", ""))


@rule("bias_add")
def _export_bias_add(graph: Graph, call: Call) -> Name:
    x, axis = call["x"], 1 if call["axis"] is None else call["axis"]
    if x.ndim == 2:
        axis = 1
    shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
    bias = graph.node("Reshape", [graph.value(call["bias"], call.out.dtype), graph.integers(shape)], call.out.dtype)
    return graph.node("Add", [graph.value(x, call.out.dtype), bias], call.out.dtype)


# ---- convolutions and pooling


def _per_axis(value: Any, axes: int) -> list[int]:
    return [int(value)] * axes if isinstance(value, int | np.integer) else [int(n) for n in value]


def _window(call: Call, kernel: Sequence[int], padding: Any) -> dict[str, list[int]]:
    """Kernel, strides, dilations and ``[begins, ends]`` of the padding, as ONNX names them."""
    axes = len(kernel)
    strides, dilations = (_per_axis(call.params.get(name, 1), axes) for name in ("stride", "dilation"))
    if axes == 1:
        pads = paddings(call.name, frozen(padding if isinstance(padding, str) else (int(*_per_axis(padding, 1)), 0)), (kernel[0], 1),
                        (strides[0], 1), (dilations[0], 1))[:1]  # fmt: skip
    else:
        pads = paddings(call.name, frozen(padding), tuple(kernel), tuple(strides), tuple(dilations))  # type: ignore[arg-type]
    ends = [pad[0] for pad in pads] + [pad[1] for pad in pads]
    return {"kernel_shape": list(kernel), "strides": strides, "dilations": dilations, "pads": ends}


@rule("conv2d", "conv1d", "conv2d_relu")
def _export_conv(graph: Graph, call: Call) -> Name:
    padding = call.params["pad"] if call.params.get("pad") is not None else call["padding"]
    made = _convolved(graph, call, "Conv", **_window(call, call["w"].shape[2:], padding))
    return graph.node("Relu", [made], made.dtype) if call.name == "conv2d_relu" else made


@rule("conv_transpose2d", "conv_transpose1d")
def _export_conv_transpose(graph: Graph, call: Call) -> Name:
    kernel = call["w"].shape[2:]
    more = _per_axis(call["output_padding"], len(kernel))
    return _convolved(graph, call, "ConvTranspose", **_window(call, kernel, call["padding"]), output_padding=more)


def _convolved(graph: Graph, call: Call, kind: str, **attributes: Any) -> Name:
    names = [graph.value(call[name], call.out.dtype) for name in ("x", "w", "bias") if call[name] is not None]
    return graph.node(kind, names, call.out.dtype, group=call["groups"], **attributes)


def _pool_window(call: Call, kernel: Sequence[int]) -> dict[str, list[int]]:
    """The windows of a pooling; those that ``ceil_mode`` adds become padding at the end, which every runtime understands alike."""
    if call.params.get("stride") is None:
        call.params["stride"] = list(kernel)
    found = _window(call, kernel, call["padding"])
    axes = len(kernel)
    if call["ceil_mode"]:
        for i in range(axes):
            reach = (call.out.shape[2 + i] - 1) * found["strides"][i] + found["dilations"][i] * (kernel[i] - 1) + 1
            found["pads"][axes + i] = max(found["pads"][axes + i], reach - call["x"].shape[2 + i] - found["pads"][i])
    return found


@rule("max_pool2d", "max_pool1d")
def _export_max_pool(graph: Graph, call: Call) -> Name | list[Name]:
    if call.params.get("return_indices"):
        raise Unsupported(f"{call.name}(return_indices=True)")
    kernel = _per_axis(call["kernel_size"], call["x"].ndim - 2)
    return graph.node("MaxPool", [graph.value(call["x"])], call.out.dtype, **_pool_window(call, kernel))


@rule("avg_pool2d", "avg_pool1d")
def _export_avg_pool(graph: Graph, call: Call) -> Name:
    kernel, include = _per_axis(call["kernel_size"], call["x"].ndim - 2), call["count_include_pad"]
    before = _window(call, kernel, call["padding"])["pads"] if call.params.get("stride") is not None else None
    window = _pool_window(call, kernel)
    if call["ceil_mode"] and include and before is not None and any(window["pads"]) and window["pads"] != before:
        raise Unsupported(f"{call.name}(ceil_mode=True, count_include_pad=True)")
    del window["dilations"]
    return graph.node("AveragePool", [graph.value(call["x"])], call.out.dtype, count_include_pad=int(include), **window)


@rule("adaptive_avg_pool2d", "adaptive_avg_pool1d", "adaptive_max_pool2d", "adaptive_max_pool1d")
def _export_adaptive(graph: Graph, call: Call) -> Name:
    sizes, outs = call["x"].shape[2:], call.out.shape[2:]
    kind = "AveragePool" if "avg" in call.name else "MaxPool"
    if call.params.get("return_indices"):
        raise Unsupported(f"{call.name}(return_indices=True)")
    if all(n == 1 for n in outs):
        return graph.node(f"Global{kind}", [graph.value(call["x"])], call.out.dtype)
    if any(n % out for n, out in zip(sizes, outs, strict=True)):
        raise Unsupported(f"{call.name} to sizes that do not divide the image")
    kernel = [n // out for n, out in zip(sizes, outs, strict=True)]
    return graph.node(kind, [graph.value(call["x"])], call.out.dtype, kernel_shape=kernel, strides=kernel)


@rule("interpolate")
def _export_interpolate(graph: Graph, call: Call) -> Name:
    """By the factor where one was given: the grid of points then follows the factor, not the ratio of the sizes."""
    mode, factor, axes = call["mode"], call["scale_factor"], call["x"].ndim - 2
    options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if mode != "nearest":
        options = {"mode": "linear", "coordinate_transformation_mode": "align_corners" if call["align_corners"] else "half_pixel"}
    if factor is None or call["align_corners"]:
        return graph.node("Resize", [graph.value(call["x"]), None, None, graph.sizes(call)], call.out.dtype, **options)
    scales = [1.0, 1.0, *([factor] * axes if isinstance(factor, int | float) else factor)]
    return graph.node("Resize", [graph.value(call["x"]), None, graph.constant(np.array(scales, np.float32))], call.out.dtype, **options)


# ---- norms


@rule("batch_norm_inference")
def _export_batch_norm(graph: Graph, call: Call) -> Name:
    channels, dtype = call["mean"].shape, call.out.dtype
    given = [_filled(graph, channels, 1.0 - i, dtype) if call[name] is None else graph.value(call[name], dtype)
             for i, name in enumerate(("weight", "bias"))]  # fmt: skip
    rest = [graph.value(call[name], dtype) for name in ("mean", "var")]
    y = graph.node("BatchNormalization", [graph.value(call["x"], dtype), *given, *rest], dtype, epsilon=float(call["eps"]))
    return graph.node("Relu", [y], dtype) if call["fuse_relu"] else y


@rule("layer_norm")
def _export_layer_norm(graph: Graph, call: Call) -> Name:
    shape = _normalized(call)
    weight = graph.value(call["weight"], call.out.dtype) if call["weight"] is not None else _filled(graph, shape, 1.0, call.out.dtype)
    bias = [] if call["bias"] is None else [graph.value(call["bias"], call.out.dtype)]
    return graph.node(
        "LayerNormalization", [graph.value(call["x"]), weight, *bias], call.out.dtype, axis=-len(shape), epsilon=float(call["eps"])
    )


def _normalized(call: Call) -> list[int]:
    return _per_axis(call["normalized_shape"], 1)


@rule("rms_norm")
def _export_rms_norm(graph: Graph, call: Call) -> Name:
    x, nodes = graph.value(call["x"]), Nodes(graph, call.out.dtype)
    axes = list(range(call["x"].ndim - len(_normalized(call)), call["x"].ndim))
    mean = _reduced(graph, "ReduceMean", nodes.mul(x, x), axes, True)
    scaled = nodes.div(x, nodes.sqrt(nodes.add(mean, float(call["eps"]))))
    return scaled if call["weight"] is None else nodes.mul(scaled, graph.value(call["weight"], call.out.dtype))


@rule("group_norm", "instance_norm")
def _export_group_norm(graph: Graph, call: Call) -> Name:
    """Groups as the channels of an instance norm; weights are per channel, so they come after."""
    x, nodes, dtype = call["x"], Nodes(graph, call.out.dtype), call.out.dtype
    groups = call["num_groups"] if call.name == "group_norm" else x.shape[1]
    flat = graph.node("Reshape", [graph.value(x), graph.integers([0, groups, -1])], dtype)
    units = [_filled(graph, (groups,), value, dtype) for value in (1.0, 0.0)]
    made = graph.node("InstanceNormalization", [flat, *units], dtype, epsilon=float(call["eps"]))
    made = graph.node("Reshape", [made, graph.integers([0, *x.shape[1:]])], dtype)
    column = graph.integers([-1, *[1] * (x.ndim - 2)])
    for name, apply in (("weight", nodes.mul), ("bias", nodes.add)):
        if call[name] is not None:
            made = apply(made, graph.node("Reshape", [graph.value(call[name], dtype), column], dtype))
    return made


@rule("prelu")
def _export_prelu(graph: Graph, call: Call) -> Name:
    x, weight = call["x"], graph.value(call["weight"], call.out.dtype)
    if call["weight"].size > 1:
        weight = graph.node("Reshape", [weight, graph.integers([-1, *[1] * (x.ndim - 2)])], call.out.dtype)
    return graph.node("PRelu", [graph.value(x), weight], call.out.dtype)


# ---- elements


@rule("embedding")
def _export_embedding(graph: Graph, call: Call) -> Name:
    return graph.node("Gather", [graph.value(call["weight"]), graph.value(call["index"], "int64")], call.out.dtype, axis=0)


@rule("index_select")
def _export_index_select(graph: Graph, call: Call) -> Name:
    return graph.node("Gather", [graph.value(call["x"]), graph.value(call["index"], "int64")], call.out.dtype, axis=call["axis"])


@rule("gather")
def _export_gather(graph: Graph, call: Call) -> Name:
    return graph.node("GatherElements", [graph.value(call["x"]), graph.value(call["index"], "int64")], call.out.dtype, axis=call["axis"])


@rule("scatter_add")
def _export_scatter_add(graph: Graph, call: Call) -> Name:
    names = [graph.value(call["x"]), graph.value(call["index"], "int64"), graph.value(call["src"], call.out.dtype)]
    if call["index"].shape != call["src"].shape:
        raise Unsupported("scatter_add of a part of src")
    return graph.node("ScatterElements", names, call.out.dtype, axis=call["axis"], reduction="add")


@rule("masked_fill")
def _export_masked_fill(graph: Graph, call: Call) -> Name:
    nodes = Nodes(graph, call.out.dtype)
    return nodes.where(nodes.truth(graph.value(call["mask"])), call["value"], graph.value(call["x"]))


@rule("one_hot")
def _export_one_hot(graph: Graph, call: Call) -> Name:
    classes = graph.constant(np.int64(call.out.shape[-1]))
    values = graph.constant(np.array([0, 1], np.int64))
    return graph.cast(graph.node("OneHot", [graph.value(call["index"], "int64"), classes, values], "int64", axis=-1), call.out.dtype)


@rule("topk", "sort", "argsort")
def _export_sorted(graph: Graph, call: Call) -> Name | list[Name]:
    axis = call["axis"] % call["x"].ndim
    count = call["k"] if call.name == "topk" else call["x"].shape[axis]
    largest = int(call["largest"] if call.name == "topk" else call["descending"])
    values, places = graph.several(
        "TopK", [graph.value(call["x"]), graph.integers([count])], 2, call["x"].dtype, axis=axis, largest=largest
    )
    places.dtype = "int64"
    return places if call.name == "argsort" else [values, places]


@rule("count_nonzero")
def _export_count_nonzero(graph: Graph, call: Call) -> Name:
    truth = Nodes(graph, call["x"].dtype).truth(graph.value(call["x"]))
    return _reduced(graph, "ReduceSum", graph.cast(truth, "int64"), _axes(call), call["keepdims"])


# ---- attention


@rule("scaled_dot_product_attention")
def _export_attention(graph: Graph, call: Call) -> Name:
    nodes, mask = Nodes(graph, call.out.dtype), call["mask"] if call["mask"] is not None else call["attn_mask"]
    if call["dropout_p"]:
        raise Unsupported("scaled_dot_product_attention(dropout_p=...)")
    q, k, v = graph.value(call["q"], call.out.dtype), _all_heads(graph, call, "k"), _all_heads(graph, call, "v")
    scale = 1 / math.sqrt(call["q"].shape[-1]) if call["scale"] is None else float(call["scale"])
    scores = graph.node("MatMul", [nodes.mul(q, scale), _transposed(graph, k, call["k"].ndim)], q.dtype)
    if call["causal"] or call["is_causal"]:
        allowed = np.tril(np.ones((call["q"].shape[-2], call["k"].shape[-2]), bool))
        scores = nodes.where(graph.constant(allowed), scores, -math.inf)
    if mask is None:
        return graph.node("MatMul", [graph.node("Softmax", [scores], q.dtype, axis=-1), v], call.out.dtype)
    name = graph.value(mask) if isinstance(mask, Tensor) else graph.constant(np.asarray(mask))
    scores = nodes.where(name, scores, -math.inf) if name.dtype == "bool" else nodes.add(scores, name)
    shares = graph.node("Softmax", [scores], q.dtype, axis=-1)
    return graph.node("MatMul", [nodes.where(nodes.isnan(shares), 0.0, shares), v], call.out.dtype)  # a row that sees no key gives 0


def _all_heads(graph: Graph, call: Call, which: str) -> Name:
    """Keys or values, each head as often as queries share it."""
    x, name = call[which], graph.value(call[which], call.out.dtype)
    if x.ndim < 3 or x.shape[-3] == call["q"].shape[-3]:
        return name
    if x.ndim != 4:
        raise Unsupported("attention with shared heads and several batch axes")
    times, (heads, n, depth) = call["q"].shape[-3] // x.shape[-3], x.shape[-3:]
    apart = graph.node("Reshape", [name, graph.integers([0, heads, 1, n, depth])], name.dtype)
    spread = graph.node("Expand", [apart, graph.integers([1, 1, times, 1, 1])], name.dtype)
    return graph.node("Reshape", [spread, graph.integers([0, heads * times, n, depth])], name.dtype)


@rule("rope")
def _export_rope(graph: Graph, call: Call) -> Name:
    x, nodes, name = call["x"], Nodes(graph, call.out.dtype), graph.value(call["x"])
    if call["positions"] is not None:
        raise Unsupported("rope with positions")
    n, depth = x.shape[-2:]
    angles = np.arange(call["offset"], call["offset"] + n)[:, None] * float(call["base"]) ** (-2 * np.arange(depth // 2) / depth)
    cos, sin = (
        graph.value(table.astype(np.float32), x.dtype) for table in (np.cos(angles), np.sin(-angles if call["inverse"] else angles))
    )
    starts, ends, step = ((0, 1), (depth, depth), 2) if call["interleaved"] else ((0, depth // 2), (depth // 2, depth), 1)
    a, b = (graph.node("Slice", [name, *map(graph.integers, ([start], [end], [x.ndim - 1], [step]))], x.dtype)
            for start, end in zip(starts, ends, strict=True))  # fmt: skip
    turned = [nodes.sub(nodes.mul(a, cos), nodes.mul(b, sin)), nodes.add(nodes.mul(a, sin), nodes.mul(b, cos))]
    if not call["interleaved"]:
        return graph.node("Concat", turned, x.dtype, axis=x.ndim - 1)
    pairs = [graph.node("Unsqueeze", [half, graph.integers([-1])], x.dtype) for half in turned]
    return graph.node("Reshape", [graph.node("Concat", pairs, x.dtype, axis=-1), graph.sizes(call)], x.dtype)


# ---- expressions of users


@rule("elementwise_unary", "elementwise_binary")
def _export_expression(graph: Graph, call: Call) -> Name:
    row = user_row(call.name, call["expr"], tuple(call.inputs))
    given = [graph.value(x, call.out.dtype) for x in call.inputs.values()]
    return formula_nodes(graph, row.fwd, given, {}, {}, call.out.dtype, call.out.dtype)
