"""Conversion of traced calls to ONNX nodes, by export functions, by the formulas of pointwise ops, or by the operator table."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.engine.registry import Choice, Pointwise
from netcl.engine.strided import dense
from netcl.io.onnx.graph import Name, OnnxGraph
from netcl.io.onnx.pointwise import Nodes, export_pointwise
from netcl.io.onnx.table import entries_of
from netcl.io.onnx.trace import Call, Unsupported
from netcl.ops.pointwise import user_row
from netcl.ops.views import block_layout

Export = Callable[[OnnxGraph, Call], Name | list[Name]]
#: Modes of ``pad``, and ONNX's names for them.
ONNX_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def emit(graph: OnnxGraph, call: Call) -> None:
    """Add the nodes of a call to the graph and bind its results to their names."""
    structured = export_pointwise if isinstance(call.row, Pointwise | Choice) else _by_table
    made = EXPORTS.get(call.name, structured)(graph, call)
    for tensor, name in zip(call.outputs, made if isinstance(made, list) else [made], strict=False):
        graph.bind(tensor, name)


def _by_table(graph: OnnxGraph, call: Call) -> list[Name]:
    arguments = {**call.inputs, **call.params}
    usual = {name: entry.default for name, entry in inspect.signature(getattr(ag, call.name)).parameters.items()}
    misfits: dict[str, Any] = {}
    for entry in entries_of(call.row):
        misfits = entry.misfits(arguments, usual)
        if not misfits:
            inputs, attributes = entry.written(arguments)
            twins, other = entry.written({**call.other.inputs, **call.other.params})
            if attributes != other or any(x != y for x, y in zip(inputs, twins, strict=True) if isinstance(x, int | list)):
                raise Unsupported(f"{call.name} with a number that depends on the batch (pass dynamic_batch=False)")
            if "axis" in attributes and not getattr(inputs[0], "ndim", 1):
                raise Unsupported(f"{call.name} of a tensor without dimensions")
            dtype = inputs[0].dtype if call.name.startswith("arg") else call.out.dtype
            return graph.several(entry.kind, inputs, len(call.outputs), dtype, **attributes)
    raise Unsupported(f"{call.name}({', '.join(f'{name}={value!r}' for name, value in misfits.items())})")


def _export_reshape(graph: OnnxGraph, call: Call) -> Name:
    mine, other = call.out.shape, call.other.out.shape
    free = [axis for axis in range(len(mine)) if mine[axis] != other[axis]]
    inferred = not free or (len(free) == 1 and 0 not in mine)
    sizes = np.array([-1 if axis in free else n for axis, n in enumerate(mine)], np.int64) if inferred else graph.sizes(call)
    return graph.node("Reshape", [call["x"], sizes], call.out.dtype, allowzero=1 if 0 in mine else None)


def _export_expand(graph: OnnxGraph, call: Call) -> Name:
    def kept(axis: int) -> bool:
        """Return whether ``x`` already has the size of the result along ``axis``, in both runs."""
        at = axis - call.out.ndim
        return all(at >= -run["x"].ndim and run["x"].shape[at] == run.out.shape[at] for run in (call, call.other))

    return graph.node("Expand", [call["x"], graph.sizes(call, kept)], call.out.dtype)


def _export_split(graph: OnnxGraph, call: Call) -> list[Name]:
    axis = call["axis"] % call.out.ndim
    lengths, others = ([out.shape[axis] for out in run.outputs] for run in (call, call.other))
    if lengths != others:
        raise Unsupported("split along the batch (pass dynamic_batch=False)")
    if len(lengths) == 1:
        return [graph.node("Identity", [call["x"]], call.out.dtype)]
    return graph.several("Split", [call["x"], lengths], len(lengths), call.out.dtype, axis=axis)


def _export_strided_slice(graph: OnnxGraph, call: Call) -> Name:
    x, parts = call["x"], []
    for axis, (start, size, step) in enumerate(zip(call["starts"], call["sizes"], call["steps"], strict=True)):
        if start == 0 and step == 1 and size == x.shape[axis] and call.other["sizes"][axis] == call.other["x"].shape[axis]:
            continue
        if size != call.other["sizes"][axis] or start != call.other["starts"][axis]:
            raise Unsupported("slice of the batch (pass dynamic_batch=False)")
        end = start + size * step
        parts.append((start, end if end >= 0 else np.iinfo(np.int64).min, axis, step))
    columns = map(list, zip(*parts, strict=True))
    return graph.node("Slice" if parts else "Identity", [x, *columns], call.out.dtype)


def _export_strided_block(graph: OnnxGraph, call: Call) -> Name:
    x, starts, sizes, moves = call["x"], call["starts"], call["sizes"], call["moves"]
    whole = 0  # leading axes that are kept as they are
    while whole < min(x.ndim, len(sizes)) and sizes[whole] == x.shape[whole] and not starts[whole] and all(
        move[whole] == (i == whole) and (i != whole or sum(map(abs, move)) == 1) for i, move in enumerate(moves)
    ):  # fmt: skip
        whole += 1
    if tuple(call.other["sizes"][whole:]) != tuple(sizes[whole:]) or call.other["x"].shape[whole:] != x.shape[whole:]:
        raise Unsupported("strided_block of the batch (pass dynamic_batch=False)")
    places = np.arange(math.prod(x.shape[whole:]), dtype=np.int64)
    ((first, _),), strides = block_layout(x.shape, dense(x.shape), starts, sizes, moves)
    index = np.lib.stride_tricks.as_strided(places[first:], sizes[whole:], [places.itemsize * step for step in strides[whole:]])
    return graph.node("Gather", [graph.node("Reshape", [x, [0] * whole + [-1]], call.out.dtype), index.copy()], call.out.dtype, axis=whole)


def _export_pad(graph: OnnxGraph, call: Call) -> Name:
    x, mode, given = call["x"], call["mode"], list(call["padding"])
    if mode not in ONNX_PAD_MODES or mode == "circular":  # "wrap" is of a later opset
        raise Unsupported(f"pad(mode={mode!r})")
    missing = [0] * (x.ndim - len(given) // 2)
    sides = [*missing, *given[-2::-2], *missing, *given[-1::-2]]  # netcl starts with the last dimension
    return graph.node("Pad", [x, sides, call["value"] if mode == "constant" else None], call.out.dtype, mode=ONNX_PAD_MODES[mode])


def _export_repeat(graph: OnnxGraph, call: Call) -> Name:
    x, dtype = call["x"], call.out.dtype
    added = call.out.ndim - x.ndim
    shape = (1,) * added + x.shape
    name = graph.node("Unsqueeze", [x, [*range(added)]], dtype) if added else graph.value(x)
    return graph.node("Tile", [name, [n // size if size else 1 for n, size in zip(call.out.shape, shape, strict=True)]], dtype)


def _export_expression(graph: OnnxGraph, call: Call) -> Name:
    row, dtype = user_row(call.name, call["expr"], tuple(call.inputs)), call.out.dtype
    return graph.cast(Nodes(graph, dtype).of_formula(row.fwd, [graph.value(x, dtype) for x in call.inputs.values()], {}, {}), dtype)


#: Functions that add the nodes of a call to a graph; they return the name of the result, or a list of names.
EXPORTS: dict[str, Export] = {
    **dict.fromkeys(("reshape", "flatten", "squeeze", "unsqueeze"), _export_reshape),
    "expand": _export_expand,
    "split": _export_split,
    "strided_slice": _export_strided_slice,
    "strided_block": _export_strided_block,
    "pad": _export_pad,
    "repeat": _export_repeat,
    "cast": lambda graph, call: graph.value(call["x"], call.out.dtype),
    "one_hot": lambda graph, call: graph.cast(
        graph.node("OneHot", [graph.value(call["index"], "int64"), np.int64(call.out.shape[-1]), [0, 1]], "int64", axis=-1), call.out.dtype
    ),
    "elementwise_unary": _export_expression,
    "elementwise_binary": _export_expression,
}
