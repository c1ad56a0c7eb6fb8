"""Pointwise ops as ONNX nodes: the basic ones by name, every other one by its own formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.engine.expression import ThroughOps, fold
from netcl.engine.registry import Choice, Pointwise, parse
from netcl.io.onnx.graph import Graph, Name, Unsupported
from netcl.io.onnx.trace import Call

_NUMBERS = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "neg": "Neg", "abs": "Abs", "sign": "Sign", "sqrt": "Sqrt",
    "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos", "tan": "Tan", "tanh": "Tanh", "sinh": "Sinh", "cosh": "Cosh", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "maximum": "Max", "minimum": "Min", "relu": "Relu", "sigmoid": "Sigmoid",
    "reciprocal": "Reciprocal", "softsign": "Softsign",
}  # fmt: skip
_COMPARISONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_TRUTHS = {"logical_and": "And", "logical_or": "Or", "logical_not": "Not"}
_QUESTIONS = {"isnan": "IsNaN", "isinf": "IsInf"}


class Nodes:
    """A namespace of ops, as formulas call them, that adds nodes to a graph; numbers are computed with in ``dtype``."""

    def __init__(self, graph: Graph, dtype: str):
        self.graph, self.dtype = graph, dtype

    def __getattr__(self, op: str) -> Callable[..., Name]:
        if op in _NUMBERS:
            return partial(self._arithmetic, _NUMBERS[op])
        if op in _COMPARISONS:
            return partial(self._compare, _COMPARISONS[op])
        if op in _TRUTHS:
            return lambda *args: self.graph.node(_TRUTHS[op], [self.truth(x) for x in args], "bool")
        if op in _QUESTIONS:
            return lambda x: self.graph.node(_QUESTIONS[op], [self.number(x)], "bool")
        raise Unsupported(op)

    def knows(self, op: str) -> bool:
        """Whether an op has nodes of its own."""
        return op in _NUMBERS or op in _COMPARISONS or op in _TRUTHS or op in _QUESTIONS or op in Nodes.__dict__

    def number(self, x: Any) -> Name:
        return self.graph.cast(x, self.dtype) if isinstance(x, Name) else self.graph.value(x, self.dtype)

    def truth(self, x: Any) -> Name:
        if not isinstance(x, Name):
            return self.graph.constant(np.asarray(bool(x)))
        return x if x.dtype == "bool" else self._compare("Equal", x, 0, negated=True)

    def _arithmetic(self, kind: str, *args: Any) -> Name:
        return self.graph.node(kind, [self.number(x) for x in args], self.dtype)

    def _compare(self, kind: str, a: Any, b: Any, negated: bool = False) -> Name:
        found = self.graph.node(kind, [self.number(a), self.number(b)], "bool")
        return self.graph.node("Not", [found], "bool") if negated else found

    def ne(self, a: Any, b: Any) -> Name:
        if isinstance(a, Name) and a.dtype == "bool" and not isinstance(b, Name) and b == 0:
            return a
        return self._compare("Equal", a, b, negated=True)

    def where(self, condition: Any, a: Any, b: Any) -> Name:
        return self.graph.node("Where", [self.truth(condition), self.number(a), self.number(b)], self.dtype)

    def cast(self, x: Name, dtype: str) -> Name:
        return self.graph.cast(x, dtype)

    def isfinite(self, x: Any) -> Name:
        return self.logical_not(self.logical_or(self.isnan(x), self.isinf(x)))

    def square(self, x: Any) -> Name:
        return self.mul(x, x)

    def expm1(self, x: Any) -> Name:
        return self.sub(self.exp(x), 1)

    def log1p(self, x: Any) -> Name:
        return self.log(self.add(x, 1))

    def log2(self, x: Any) -> Name:
        return self.div(self.log(x), math.log(2))

    def rsqrt(self, x: Any) -> Name:
        return self.reciprocal(self.sqrt(x))

    def trunc(self, x: Any) -> Name:
        return self.where(self.lt(x, 0), self.ceil(x), self.floor(x))

    def fmod(self, a: Any, b: Any) -> Name:
        return self.graph.node("Mod", [self.number(a), self.number(b)], self.dtype, fmod=1)

    def floor_divide(self, a: Any, b: Any) -> Name:
        return self.floor(self.div(a, b)) if dtypes.DTYPES[self.dtype].is_float else self.div(self.sub(a, self.remainder(a, b)), b)

    def remainder(self, a: Any, b: Any) -> Name:
        if not dtypes.DTYPES[self.dtype].is_float:
            return self.graph.node("Mod", [self.number(a), self.number(b)], self.dtype)
        return self.sub(a, self.mul(self.floor(self.div(a, b)), b))


def compute_dtype(values: list[Any], out: str) -> str:
    """The dtype a formula is computed in: the result's, or, where that is a truth value, that of the inputs."""
    if out != "bool":
        return out
    tensors = [dtypes.DTYPES[x.dtype] for x in values if isinstance(x, Tensor)]
    found = tensors[0]
    for other in tensors[1:]:
        found = dtypes.promote(found, other)
    if not found.is_float and any(isinstance(x, float) for x in values):
        return "float32"
    return "int32" if found.name in ("bool", "uint8") else found.name


def pointwise(graph: Graph, call: Call) -> Name:
    """The nodes of a pointwise op."""
    assert isinstance(call.row, Pointwise | Choice)
    row, params = call.row.resolve(call.params)
    values = list(call.inputs.values())
    dtype = compute_dtype(values, call.out.dtype)
    given = [graph.value(x) if isinstance(x, Tensor) else x if isinstance(x, bool | int | float) else graph.value(x, dtype) for x in values]
    return by_row(graph, row, params, given, dtype, call.out.dtype)


def by_row(graph: Graph, row: Pointwise, params: dict[str, Any], given: list[Any], dtype: str, out: str) -> Name:
    """The nodes of a row over values: its own where ONNX has them, else those of its formula."""
    nodes = Nodes(graph, dtype)
    if nodes.knows(row.name) and not params:
        return graph.cast(getattr(nodes, row.name)(*given), out)
    return formula_nodes(graph, row.fwd, given, params, dict(row.let), dtype, out)


def formula_nodes(graph: Graph, text: str, given: list[Any], params: dict[str, Any], let: dict[str, str], dtype: str, out: str) -> Name:
    """The nodes of an expression over values ``v0``, ``v1``.. and parameters."""
    names = {f"v{i}": x for i, x in enumerate(given)}
    algebra = ThroughOps({**names, **params}, Nodes(graph, dtype), let)
    algebra.dtype = dtype
    value = fold(parse(text), algebra)
    return graph.cast(value if isinstance(value, Name) else graph.value(value, dtype), out)
