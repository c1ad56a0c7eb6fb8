"""Evaluates expressions: one walk over the syntax tree serves OpenCL C, NumPy and differentiable ops.

An expression has two sorts of values, numbers and truth values. :func:`evaluate` walks the tree; an *algebra* gives
the value of each node: :class:`CText` writes OpenCL C, :class:`PythonText` writes Python over NumPy, :class:`ThroughOps`
calls differentiable ops, which is how gradients of gradients are made.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from netcl.engine.functions import FORMULA_FUNCTIONS, FormulaFunction
from netcl.engine.registry import REGISTRY, Pointwise, parse

_SYMBOLS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.Lt: "<", ast.Gt: ">", ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OPS = {"+": "add", "-": "sub", "*": "mul", "/": "div", "<": "lt", ">": "gt", "<=": "le", ">=": "ge", "==": "eq", "!=": "ne"}
_PYTHON = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "<": operator.lt, ">": operator.gt,
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def evaluate(node: ast.expr, algebra: CText | PythonText | ThroughOps, sort: str = "n") -> Any:
    """Evaluate a syntax tree in an algebra, as a number (``n``) or a truth value (``t``)."""
    value: Any
    made = "n"
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        value = algebra.literal(node.value)
    elif isinstance(node, ast.Name):
        value = algebra.name(node.id)
    elif isinstance(node, ast.UnaryOp):
        value = algebra.negate(evaluate(node.operand, algebra))
    elif isinstance(node, ast.BinOp):
        value = algebra.arithmetic(_SYMBOLS[type(node.op)], evaluate(node.left, algebra), evaluate(node.right, algebra))
    elif isinstance(node, ast.Compare):
        value = algebra.compare(_SYMBOLS[type(node.ops[0])], evaluate(node.left, algebra), evaluate(node.comparators[0], algebra))
        made = "t"
    else:
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        function = FORMULA_FUNCTIONS[node.func.id]
        args = [evaluate(arg, algebra, wanted) for arg, wanted in zip(node.args, function.takes, strict=True)]
        value, made = algebra.call(function, args), function.gives
    if made == sort:
        return value
    return algebra.number(value) if made == "t" else algebra.truth(value)


_PLAIN_NAMES = re.compile(r"g|out|[vsd]\d+")


def c_name(name: str) -> str:
    """Return the C name of a name in an expression: parameters get an underscore, because one may be called ``min`` or ``half``."""
    return name if _PLAIN_NAMES.fullmatch(name) else f"{name}_"


class _Literal(str):
    """C text made of numbers only: a scalar, to be widened where a vector is expected."""


class CText:
    """Writes OpenCL C over ``real`` and ``mask``; numbers are literals of the compute type, so ``1 / 2`` is one half in floats."""

    def __init__(self, compute: str):
        self.compute = compute
        self.suffix = {"float": "f", "double": "", "int": "", "long": "L", "ulong": "UL"}[compute]
        self.integral = compute in ("int", "long", "ulong")

    def statement(self, node: ast.expr) -> str:
        """Return a whole expression in C, as a ``real``."""
        text = self._real(evaluate(node, self))
        return text[1:-1] if text.startswith("(") and _closes_last(text) else text

    def literal(self, value: float) -> str:
        return _Literal(f"{int(value)}{self.suffix}" if self.integral else f"{float(value)!r}{self.suffix}")

    name = staticmethod(c_name)

    def negate(self, x: str) -> str:
        return type(x)(f"(-{x})")

    def arithmetic(self, symbol: str, a: str, b: str) -> str:
        kind = _Literal if isinstance(a, _Literal) and isinstance(b, _Literal) else str
        return kind(f"({a} {symbol} {b})")

    def compare(self, symbol: str, a: str, b: str) -> str:
        return f"({self._real(a)} {symbol} {b})"

    def call(self, function: FormulaFunction, args: list[str]) -> str:
        return f"{function.c_name(self.compute)}({', '.join(map(self._real, args))})"

    def truth(self, number: str) -> str:
        return f"({self._real(number)} != (real)(0))"

    def number(self, truth: str) -> str:
        return f"netcl_number({truth})"

    def _real(self, text: str) -> str:
        return f"(real)({text})" if isinstance(text, _Literal) else text


def _closes_last(text: str) -> bool:
    """Whether the parenthesis that opens a text is closed by its last character."""
    depth = 0
    for i, ch in enumerate(text):
        depth += (ch == "(") - (ch == ")")
        if depth == 0:
            return i == len(text) - 1
    return False


class PythonText:
    """Writes Python over NumPy; ``env`` collects typed constants, so that float32 stays float32."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        integral = dtype.kind in "iu"
        self.env: dict[str, Any] = {name: (f.np_int if integral else f.np) for name, f in FORMULA_FUNCTIONS.items()}
        self.env["TRUTH"] = lambda x: np.not_equal(x, 0)
        self.env["NUMBER"] = lambda t: np.asarray(t).astype(dtype)

    def literal(self, value: float) -> str:
        name = f"K{len(self.env)}"
        self.env[name] = self.dtype.type(value)
        return name

    def name(self, name: str) -> str:
        return name

    def negate(self, x: str) -> str:
        return f"(-{x})"

    def arithmetic(self, symbol: str, a: str, b: str) -> str:
        return f"({a} {symbol} {b})"

    compare = arithmetic

    def call(self, function: FormulaFunction, args: list[str]) -> str:
        return f"{function.name}({', '.join(args)})"

    def truth(self, number: str) -> str:
        return f"TRUTH({number})"

    def number(self, truth: str) -> str:
        return f"NUMBER({truth})"


class ThroughOps:
    """Calls the ops of a namespace ``F``; numbers stay Python numbers until they are combined with a tensor."""

    def __init__(self, env: Mapping[str, Any], F: Any, let: Mapping[str, str] | None = None):
        self.env = dict(env)
        self.F = F
        self.let = let or {}
        self.dtype = env["g"].dtype if "g" in env else None

    def literal(self, value: float) -> float:
        return value

    def name(self, name: str) -> Any:
        if name not in self.env:
            self.env[name] = evaluate(parse(self.let[name]), self)
        return self.env[name]

    def negate(self, x: Any) -> Any:
        return -x if _is_plain_number(x) else self._op("neg", x)

    def arithmetic(self, symbol: str, a: Any, b: Any) -> Any:
        return self._apply(_PYTHON[symbol], _OPS[symbol], a, b)

    compare = arithmetic

    def call(self, function: FormulaFunction, args: list[Any]) -> Any:
        if function.name == "WHERE":
            return self._where(*args)
        return self._apply(lambda *xs: function.np(*xs).item(), function.op, *args)

    def truth(self, number: Any) -> Any:
        return bool(number) if _is_plain_number(number) else self.F.ne(number, 0)

    def number(self, truth: Any) -> Any:
        return float(truth) if _is_plain_number(truth) else self.F.cast(truth, self.dtype or "float32")

    def _apply(self, plain: Callable[..., Any], op: str, *args: Any) -> Any:
        return plain(*args) if all(map(_is_plain_number, args)) else self._op(op, *args)

    def _where(self, condition: Any, a: Any, b: Any) -> Any:
        if _is_plain_number(condition):
            return a if condition else b
        if _is_plain_number(a) and _is_plain_number(b):  # two numbers alone would give a float32 tensor even among float64
            return self.F.add(self.F.mul(self.number(condition), a - b), b)
        return self._op("where", condition, a, b)

    def _op(self, op: str, *args: Any) -> Any:
        return getattr(self.F, op)(*args)


def _is_plain_number(x: Any) -> bool:
    return isinstance(x, bool | int | float)


def compose(text: str, env: Mapping[str, Any], F: Any, let: Mapping[str, str] | None = None) -> Any:
    """Evaluate an expression by the ops of ``F``: with ``F = netcl.autograd`` its result can be differentiated again.

    ``env`` binds ``g``, ``out``, ``v0``.. to tensors and parameters to numbers; ``let`` are a row's shared expressions.
    """
    value = evaluate(parse(text), ThroughOps(env, F, let))
    g = env["g"]
    return type(g).full(g.shape, value, g.dtype, queue=g.queue) if _is_plain_number(value) else value


class _Record(ThroughOps):
    """Calls ops as :class:`ThroughOps` does and records the op, arguments and result of every call."""

    def __init__(self, env: Mapping[str, Any], F: Any):
        super().__init__(env, F)
        self.steps: list[tuple[str, tuple[Any, ...], Any]] = []

    def _op(self, op: str, *args: Any) -> Any:
        out = super()._op(op, *args)
        self.steps.append((op, args, out))
        return out


def differentiate(text: str, env: Mapping[str, Any], g: Any, F: Any) -> dict[str, Any]:
    """Compute gradients of an expression with respect to the tensors of ``env``, by the gradient formulas of the ops it calls.

    A gradient has the shape of ``g`` or of its tensor; it is ``None`` if the expression does not depend on that tensor.
    """
    record = _Record(env, F)
    record.dtype = g.dtype
    out = evaluate(parse(text), record)
    grads: dict[int, Any] = {id(out): g}
    for op, args, made in reversed(record.steps):
        if id(made) not in grads:
            continue
        row = REGISTRY[op]
        assert isinstance(row, Pointwise)
        bound = {"g": grads[id(made)], "out": made, **{f"v{i}": x for i, x in enumerate(args)}}
        for x, vjp in zip(args, row.vjp, strict=True):
            if vjp and not _is_plain_number(x):
                term = compose(vjp, bound, F, row.let)
                grads[id(x)] = F.add(grads[id(x)], term) if id(x) in grads else term
    return {name: grads.get(id(x)) for name, x in env.items()}
