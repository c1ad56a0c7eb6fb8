"""ONNX operators and the netcl ops they correspond to, in one table that export and import read.

An entry writes the ONNX node of an op as a call. Positional arguments are the node's inputs, keywords are its attributes, and the
values are names of the op's arguments. ``"softmax": "Softmax(x, axis=axis)"`` is enough for both directions. Further forms:

- ``upper=0``: the attribute has this value; a node with another value belongs to another entry;
- ``norm(p=1)``: the op's argument must have this value; ``...`` allows any value;
- ``*xs``: a list of tensors, one input each;
- ``weight or 1``: ONNX requires a tensor that is optional here; ``None`` is written as a tensor of ones;
- ``axes(axis)``: a function of :data:`CONVERSIONS` converts the value in both directions.

Arguments and attributes that an entry does not name must have their defaults, except those in :data:`IGNORED`. Rows of pointwise ops
hold their own entry, in the column ``onnx``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl.core import dtype as dtypes
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.engine.expression import ThroughOps, evaluate
from netcl.engine.registry import REGISTRY, Pointwise, Row, parse
from netcl.io.onnx.library import Schema, library, schema

#: Where several ops become one operator, a node is read as the first that fits.
PAIRS = {
    "clone": "Identity(x)",
    "reorder": "Transpose(x, perm=permutation(order))",
    "cat": "Concat(*xs, axis=axis)",
    "joined(lengths=...)": "Concat(*xs, axis=axis)",
    "squeeze": "Squeeze(x, axes(axis))",
    "repeat": "Tile(x, repeats)",
    "tril": "Trilu(x, number(diagonal), upper=0)",
    "triu": "Trilu(x, number(diagonal), upper=1)",
    "sum": "ReduceSum(x, axes(axis), keepdims=keepdims)",
    "mean": "ReduceMean(x, axes(axis), keepdims=keepdims)",
    "amax": "ReduceMax(x, axes(axis), keepdims=keepdims)",
    "amin": "ReduceMin(x, axes(axis), keepdims=keepdims)",
    "prod": "ReduceProd(x, axes(axis), keepdims=keepdims)",
    "logsumexp": "ReduceLogSumExp(x, axes(axis), keepdims=keepdims)",
    "norm(p=1)": "ReduceL1(x, axes(axis), keepdims=keepdims)",
    "norm(p=2)": "ReduceL2(x, axes(axis), keepdims=keepdims)",
    "argmax": "ArgMax(x, axis=axis, keepdims=keepdims)",
    "argmin": "ArgMin(x, axis=axis, keepdims=keepdims)",
    "cumsum": "CumSum(x, number(axis), reverse=reverse)",
    "topk": "TopK(x, vector(k), axis=axis, largest=largest)",
    "softmax": "Softmax(x, axis=axis)",
    "log_softmax": "LogSoftmax(x, axis=axis)",
    "bitwise_and": "BitwiseAnd(a, b)",
    "bitwise_or": "BitwiseOr(a, b)",
    "bitwise_xor": "BitwiseXor(a, b)",
    "bitwise_not": "BitwiseNot(x)",
    "matmul": "MatMul(a, b)",
    "affine": "Gemm(x, w, bias, transB=1)",
    "einsum": "Einsum(*operands, equation=equation)",
    "index_select": "Gather(x, index, axis=axis)",
    "embedding(padding_idx=...)": "Gather(weight, index, axis=0)",
    "gather": "GatherElements(x, place(index), axis=axis)",
    "scatter_add": "ScatterElements(x, place(index), src, axis=axis, reduction='add')",
    "scatter": "ScatterElements(x, place(index), src, axis=axis, reduction='none')",
    "pixel_shuffle": "DepthToSpace(x, blocksize=factor, mode='CRD')",
    "adaptive_avg_pool2d(output_size=1)": "GlobalAveragePool(x)",
    "adaptive_avg_pool1d(output_size=1)": "GlobalAveragePool(x)",
    "adaptive_max_pool2d(output_size=1)": "GlobalMaxPool(x)",
    "batch_norm_inference": "BatchNormalization(x, weight or 1, bias or 0, mean, var, epsilon=eps)",
    "instance_norm": "InstanceNormalization(x, weight or 1, bias or 0, epsilon=eps)",
    "layer_norm": "LayerNormalization(x, weight or 1, bias, axis=trailing(normalized_shape), epsilon=eps)",
}
#: Operators of later opsets than exported models use: read, never written.
NEWER = {
    "gelu": "Gelu(x, approximate=approximate)",
    "silu": "Swish(x)",
    "rms_norm": "RMSNormalization(x, weight, axis=trailing(normalized_shape), epsilon=eps)",
}
#: Operators that are a formula here, over inputs and attributes: read, never written.
FORMULAS = {
    "Celu": "MAX(v0, 0) + MIN(alpha * EXPM1(MIN(v0, 0) / alpha), 0)",
    "HardSigmoid": "MIN(MAX(alpha * v0 + beta, 0), 1)",
    "Selu": "gamma * WHERE(v0 > 0, v0, alpha * EXPM1(MIN(v0, 0)))",
    "Shrink": "WHERE(v0 < -lambd, v0 + bias, WHERE(v0 > lambd, v0 - bias, 0))",
    "ThresholdedRelu": "WHERE(v0 > alpha, v0, 0)",
}
#: Attributes that change nothing, or that are handled where the entry is used.
IGNORED = {"consumed_inputs", "momentum", "noop_with_empty_axes", "sorted", "spatial", "stash_type"}


class Conversion(NamedTuple):
    """Converts an op's argument to a node's value, ``write(value, call arguments)``, and back, ``read(value, first input, node)``."""

    write: Callable[[Any, Mapping[str, Any]], Any]
    read: Callable[[Any, Tensor, OnnxNode], Any]


def positive(index: Tensor, length: int) -> Tensor:
    """Return indices counted from the start; ONNX counts negative ones from the end."""
    return ag.where(ag.lt(index, 0), ag.add(index, length), index)


CONVERSIONS = {
    "axes": Conversion(
        lambda axis, call: axis if axis is None else np.atleast_1d(axis).tolist() if call["x"].ndim else None,
        lambda axes, x, node: tuple(axes or ()) if x.ndim and (axes or node["noop_with_empty_axes"]) else None,
    ),
    "permutation": Conversion(
        lambda order, call: [axis % len(order) for axis in order] or None,
        lambda order, x, node: list(range(x.ndim))[::-1] if order is None else order,
    ),
    "number": Conversion(lambda value, call: int(value), lambda value, x, node: int(np.asarray(value).item())),
    "vector": Conversion(lambda value, call: [value], lambda values, x, node: int(np.reshape(values, -1)[0])),
    "place": Conversion(lambda index, call: index, lambda index, x, node: positive(index, x.shape[node["axis"]])),
    "trailing": Conversion(lambda shape, call: -np.size(shape), lambda axis, x, node: x.shape[axis % x.ndim :]),
}


class OnnxNode:
    """A node of a file: its operator, attributes (with ONNX's defaults), opset, and the names of its inputs and outputs.

    ``formals`` are ONNX's names of the inputs in the latest opset. ``codes`` are the element types of the inputs (0 if unknown). ``read``
    computes the results. If ``read`` returns ``NotImplemented``, the body that ``expand`` returns is run instead.
    """

    read: Callable[..., Any]
    expand: Any = None
    codes: Sequence[int] = ()

    def __init__(self, kind: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, Any], opset: int):
        self.kind, self.inputs, self.outputs, self.given, self.opset = kind, inputs, outputs, attributes, opset
        domain, _, name = kind.rpartition("::")
        known = library().defs.has(name, domain)
        # The default of an attribute that an earlier opset lacks is what operators did before.
        later = schema(kind, opset + 99) if known else Schema([], [], {})
        self.attributes = {**later.defaults, **(schema(kind, opset).defaults if known else {}), **attributes}
        self.formals = [entry.name for entry in later.inputs]

    def captured(self) -> set[str]:
        """Return the names that the bodies of the node read from the enclosing graph."""
        return {name for value in self.attributes.values() for name in getattr(value, "captured", ())}

    def __getitem__(self, name: str) -> Any:
        return self.attributes.get(name)

    def fault(self, what: str, **values: object) -> ValueError:
        return ValueError(message(self.kind, what, **values, node=self.outputs[0]))


@dataclass(frozen=True)
class Slot:
    """An input or attribute of a node: the op's argument ``name``, or ``value`` if the argument is ``None`` or ``name`` is empty."""

    name: str = ""
    convert: str = ""
    value: Any = None

    def written(self, call: Mapping[str, Any]) -> list[Any]:
        """Return the values of this input or attribute for a call with these arguments, as a list."""
        if not self.name:
            return [self.value]
        value = call[self.name]
        if self.convert == "*":
            return list(value)
        if self.convert:
            return [CONVERSIONS[self.convert].write(value, call)]
        if value is None and self.value is not None:
            value = np.full(call.get("normalized_shape", call["x"].shape[1:2]), self.value, np.float32)
        return [value]

    def read(self, value: Any, x: Tensor, node: OnnxNode) -> Any:
        """Convert a node's value to the op's argument."""
        return CONVERSIONS[self.convert].read(value, x, node) if self.convert in CONVERSIONS else value


@dataclass(frozen=True)
class OperatorEntry:
    """An entry of the table: an op, and its ONNX operator with inputs and attributes. ``fixed`` holds arguments with a required value."""

    op: str
    kind: str
    inputs: tuple[Slot, ...]
    attributes: Mapping[str, Slot]
    fixed: Mapping[str, Any]

    def misfits(self, arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call that the node cannot express; ``usual`` are the defaults of the op's arguments."""
        named = {slot.name for slot in (*self.inputs, *self.attributes.values())}
        rest = {name: value for name, value in arguments.items() if name not in named and self.fixed.get(name) is not ...}
        wanted = {**usual, **self.fixed}
        other = {name: value for name, value in rest.items() if value != wanted[name]}
        return {name: value for name, value in other.items() if not (isinstance(value, tuple | list) and {*value} == {wanted[name]})}

    def written(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the inputs and attributes of the ONNX node for a call."""
        inputs = [value for slot in self.inputs for value in slot.written(arguments)]
        return inputs, {name: slot.written(arguments)[0] for name, slot in self.attributes.items()}

    def unread(self, node: OnnxNode) -> dict[str, Any]:
        """Return the attributes of a node that this entry does not name or for which it requires another value."""
        fixed = {name: slot.value for name, slot in self.attributes.items() if not slot.name}
        usual = schema(node.kind, node.opset).defaults
        found = {name: node[name] for name, value in fixed.items() if node[name] != value}
        known = {*self.attributes, *IGNORED, *node.formals}  # attributes of older opsets are inputs in later ones
        return found | {name: value for name, value in node.given.items() if name not in known and value != usual.get(name)}

    def read(self, node: OnnxNode, *given: Any) -> Any:
        """Run the op on the inputs of a node."""
        row, function, x = REGISTRY[self.op], getattr(ag, self.op), given[0]
        if getattr(row, "accepts", "") == "float" and not dtypes.DTYPES[x.dtype].is_float:
            x = ag.cast(x, "float32")
        pairs = [*zip(self.inputs, (x, *given[1:]), strict=False), *((slot, node[name]) for name, slot in self.attributes.items())]
        pairs += [(slot, None) for slot in self.inputs[len(given) :] if slot.convert == "axes"]  # all axes, or none: the node says which
        options = {slot.name: slot.read(value, x, node) for slot, value in pairs if slot.name}
        options |= {name: value for name, value in self.fixed.items() if value is not ...}
        if self.inputs[0].convert == "*":
            out = function(options["equation"], *given) if self.op == "einsum" else function(list(given), axis=options["axis"])
        elif isinstance(row, Pointwise) and len(given) != row.arity:  # Max and Min take any number of inputs
            out = reduce(function, given)
        else:
            out = function(**options)
        # ONNX gives the result the dtype of the first input whose type its definition shares with the result
        form = schema(node.kind, node.opset)
        like = next((x for x, formal in zip(given, form.inputs, strict=False) if formal.variable == form.outputs[0].variable), out)
        return out if isinstance(out, tuple) or out.dtype == like.dtype else ag.cast(out, like.dtype)


def computed_by_formula(node: OnnxNode, *given: Tensor) -> Tensor:
    """Compute a node whose operator is in :data:`FORMULAS`."""
    inputs = {f"v{i}": x for i, x in enumerate(given)}
    out: Tensor = evaluate(parse(FORMULAS[node.kind]), ThroughOps({**node.attributes, **inputs}, ag))
    return out


@cache
def _table_entry(op: str, text: str, inputs: tuple[str, ...]) -> OperatorEntry:
    """Parse an entry from the strings for its op and its operator; an operator without arguments takes ``inputs``."""
    left, right = (ast.parse(side, mode="eval").body for side in (op, text))
    fixed = {word.arg: word.value.value for word in left.keywords} if isinstance(left, ast.Call) else {}  # type: ignore[attr-defined]
    kind, name = (ast.unparse(side.func if isinstance(side, ast.Call) else side) for side in (right, left))
    slots = tuple(map(_slot, right.args)) if isinstance(right, ast.Call) else ()
    words = {str(word.arg): _slot(word.value) for word in right.keywords} if isinstance(right, ast.Call) else {}
    return OperatorEntry(name, kind, slots or tuple(map(Slot, inputs)), words, {str(key): value for key, value in fixed.items()})


def _slot(node: ast.expr) -> Slot:
    if isinstance(node, ast.Constant):
        return Slot(value=node.value)
    if isinstance(node, ast.Starred):
        return Slot(ast.unparse(node.value), "*")
    if isinstance(node, ast.Call):
        return Slot(ast.unparse(node.args[0]), ast.unparse(node.func))
    if isinstance(node, ast.BoolOp):
        return Slot(ast.unparse(node.values[0]), value=ast.literal_eval(node.values[1]))
    return Slot(ast.unparse(node))


#: The entries of :data:`PAIRS` by op.
STRUCTURED: dict[str, list[OperatorEntry]] = {}
for _op, _text in PAIRS.items():
    STRUCTURED.setdefault(_op.split("(")[0], []).append(_table_entry(_op, _text, ()))


def entries_of(row: Row) -> list[OperatorEntry]:
    """Return the entries that can export an op; an empty list if there are none."""
    if isinstance(row, Pointwise):
        return [_table_entry(row.name, row.onnx, row.inputs)] if row.onnx else []
    return STRUCTURED.get(row.name, [])


def entries_by_operator() -> dict[str, list[OperatorEntry]]:
    """Return the entries that can import nodes: a list for each operator."""
    rows = [entry for row in REGISTRY.values() if isinstance(row, Pointwise) for entry in entries_of(row)]
    found: dict[str, list[OperatorEntry]] = {}
    for entry in [*rows, *(_table_entry(op, text, ()) for op, text in {**PAIRS, **NEWER}.items())]:
        found.setdefault(entry.kind, []).append(entry)
    return found
