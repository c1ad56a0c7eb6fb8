"""Pointwise ops as ONNX nodes: by the operator that their row names, else by their formula."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.engine.expression import ThroughOps, evaluate
from netcl.engine.registry import REGISTRY, Choice, Pointwise, called, parse
from netcl.io.onnx.graph import Name, OnnxGraph
from netcl.io.onnx.table import entries_of
from netcl.io.onnx.trace import Call, Unsupported

#: Functions of the expression language that ONNX lacks, in terms of others.
_FORMULAS = {
    "expm1": "EXP(v0) - 1",
    "exp2": "POW(2, v0)",
    "log1p": "LOG(v0 + 1)",
    "log2": "LOG(v0) / 0.6931471805599453",
    "log10": "LOG(v0) / 2.302585092994046",
    "rsqrt": "1 / SQRT(v0)",
    "trunc": "WHERE(v0 < 0, CEIL(v0), FLOOR(v0))",
    "isfinite": "NOT(OR(ISNAN(v0), ISINF(v0)))",
    "floor_divide": "(v0 - REMAINDER(v0, v1)) / v1",
}
_ANGLE = "ATAN(WHERE(AND(v0 == 0, v1 == 0), 0, WHERE(AND(ISINF(v0), ISINF(v1)), 1, ABS(v0 / v1))))"
_LARGE, _RATIO = "MAX(ABS(v0), ABS(v1))", "SQRT(1 + POW(MIN(ABS(v0), ABS(v1)) / MAX(ABS(v0), ABS(v1)), 2))"
#: ONNX's ``Mod`` with the sign of the divisor is for integers. A floored quotient would be wrong where it is rounded up: 1 // 0.1 is 9.
_FLOAT_FORMULAS = {
    "atan2": f"COPYSIGN(WHERE(COPYSIGN(1, v1) < 0, 3.141592653589793 - {_ANGLE}, {_ANGLE}), v0)",
    "copysign": "WHERE(OR(v1 < 0, 1 / v1 < 0), -1, 1) * ABS(v0)",
    "hypot": f"WHERE(OR(ISINF(v0), ISINF(v1)), WHERE(ISINF(v0), ABS(v0), ABS(v1)), WHERE({_LARGE} == 0, 0, {_LARGE} * {_RATIO}))",
    "remainder": "WHERE(FMOD(v0, v1) * v1 < 0, FMOD(v0, v1) + v1, FMOD(v0, v1))",
    "floor_divide": "WHERE(v1 == 0, v0 / v1, ROUND((v0 - FMOD(v0, v1)) / v1) - WHERE(FMOD(v0, v1) * v1 < 0, 1, 0))",
}


class Nodes:
    """The ops that a formula can call, as attributes. A call adds nodes to ``graph``; the nodes compute in ``dtype``."""

    def __init__(self, graph: OnnxGraph, dtype: str):
        self.graph, self.dtype = graph, dtype

    def __getattr__(self, op: str) -> Any:
        row = REGISTRY[op]
        assert isinstance(row, Pointwise)
        return partial(self.of_row, row, {})

    def of_row(self, row: Pointwise, params: dict[str, Any], *given: Any) -> Name:
        """Add the nodes of a pointwise op whose arguments are names and numbers; returns the name of the result."""
        text = _FLOAT_FORMULAS.get(row.name) if dtypes.DTYPES[self.dtype].is_float else None
        for entry in entries_of(row) if text is None else ():
            arguments = {**dict(zip(row.inputs, given, strict=True)), **params}
            if not entry.misfits(arguments, row.params):
                inputs, attributes = entry.written(arguments)
                return self.graph.node(entry.kind, inputs, self.dtype, **attributes)
        text = text or _FORMULAS.get(row.name, row.fwd)
        body = parse(text)
        if isinstance(body, ast.Call) and called(body).op == row.name:
            raise Unsupported(row.name)
        return self.of_formula(text, given, params, dict(row.let))

    def of_formula(self, text: str, given: Any, params: dict[str, Any], let: dict[str, str]) -> Name:
        """Add the nodes of an expression over values ``v0``.., parameters and subexpressions ``let``; returns the name of the result."""
        algebra = ThroughOps({**{f"v{i}": x for i, x in enumerate(given)}, **params}, self, let)
        algebra.dtype = self.dtype
        value = evaluate(parse(text), algebra)
        return value if isinstance(value, Name) else self.graph.value(value, self.dtype)

    def ne(self, a: Any, b: Any) -> Name:
        if isinstance(a, Name) and a.dtype == "bool" and not isinstance(b, Name) and b == 0:
            return a
        return self.graph.node("Not", [self.eq(a, b)], "bool")

    def cast(self, x: Name, dtype: str) -> Name:
        return self.graph.cast(x, dtype)


def _compute_dtype(values: list[Any], out: str) -> str:
    """Return the dtype in which a formula is computed: ``out`` or, if ``out`` is bool, a dtype that can hold all inputs."""
    if out != "bool":
        return out
    tensors = [dtypes.DTYPES[x.dtype] for x in values if isinstance(x, Tensor)]
    found = tensors[0]
    for other in tensors[1:]:
        found = dtypes.promote(found, other)
    if not found.is_float and any(isinstance(x, float) for x in values):
        return "float32"
    return "int32" if found.name in ("bool", "uint8") else found.name


def export_pointwise(graph: OnnxGraph, call: Call) -> Name:
    """Add the nodes of a pointwise op; returns the name of the result."""
    assert isinstance(call.row, Pointwise | Choice)
    row, params = call.row.resolve(call.params)
    bounds = [params.pop(name) for name in row.inputs if name in params]  # clamp by tensors
    values = [*call.inputs.values(), *bounds]
    twins = [*call.other.inputs.values(), *call.other.params.values()]
    numbers = [[x for x in side if isinstance(x, bool | int | float)] for side in ([*call.inputs.values(), *call.params.values()], twins)]
    if repr(numbers[0]) != repr(numbers[1]):  # by text: NaN equals NaN
        raise Unsupported(f"{call.name} with a number that depends on the batch (pass dynamic_batch=False)")
    dtype = _compute_dtype(values, call.out.dtype)
    given = [graph.value(x) if isinstance(x, Tensor) else x if isinstance(x, bool | int | float) else graph.value(x, dtype) for x in values]
    return graph.cast(Nodes(graph, dtype).of_row(row, params, *given), call.out.dtype)
