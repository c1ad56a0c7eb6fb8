"""The op table: one row per op.

Five kinds of rows: :class:`Pointwise` (one expression per element), :class:`Choice` (one of several pointwise rows), :class:`Reduction`
(map, combine, finish), :class:`Op` (its own Python function) and :class:`Composite` (a function of other ops). Eager kernels, the NumPy
backend, the JIT, gradients, autocast, tests, the self-test and the documentation all read the same row.

Expressions consist of ``+ - * /``, unary minus, one comparison at a time, numbers, names,
and the upper-case functions of :data:`netcl.engine.functions.FORMULA_FUNCTIONS`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps
from typing import Any, Literal

import numpy as np

from netcl.core import methods, queue_state
from netcl.core.errors import message
from netcl.engine import launch
from netcl.engine.functions import FORMULA_FUNCTIONS, FormulaFunction

Amp = Literal["half", "float", "wide", "keep"]
ResultRule = Literal["same", "bool", "float", "sum", "number", "inputs"]

_SYNTAX = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub, ast.Compare, ast.Lt, ast.Gt,
           ast.LtE, ast.GtE, ast.Eq, ast.NotEq, ast.Call, ast.Name, ast.Load, ast.Constant)  # fmt: skip
_OP_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Numbers that depend on the compute type: the neutral elements of ``MAX`` and ``MIN``.
LIMITS = ("LOWEST", "HIGHEST")
_PARSED: dict[str, tuple[ast.expr, frozenset[str]]] = {}  # trees and names by expression; every row reads its own several times


def parse(text: str, op: str = "expression") -> ast.expr:
    """Parse an expression to a syntax tree; raises a ``ValueError`` that names ``op`` if it is not in the language."""
    return _parsed_with_names(text, op)[0]


def _parsed_with_names(text: str, op: str = "expression") -> tuple[ast.expr, frozenset[str]]:
    """Return the syntax tree of an expression and the names in it."""
    if text not in _PARSED:
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError as fault:
            raise ValueError(message(op, f"{text!r} is not an expression", error=fault.msg)) from None
        nodes = list(ast.walk(tree))
        for node in nodes:
            _check_node(node, text, op)
        _PARSED[text] = tree.body, frozenset({node.id for node in nodes if isinstance(node, ast.Name)} - FORMULA_FUNCTIONS.keys())
    return _PARSED[text]


def _check_node(node: ast.AST, text: str, op: str) -> None:
    if not isinstance(node, _SYNTAX) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
        remedy = "the language has + - * /, unary minus, single comparisons, numbers, names and upper-case functions"
        raise ValueError(message(op, f"{text!r}: {type(node).__name__} is not in the expression language", remedy))
    if isinstance(node, ast.Constant) and (isinstance(node.value, bool) or not isinstance(node.value, int | float)):
        raise ValueError(message(op, f"{text!r}: a constant must be a number, got {node.value!r}"))
    if isinstance(node, ast.Call):
        _check_call(node, text, op)


def _check_call(node: ast.Call, text: str, op: str) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in FORMULA_FUNCTIONS:
        raise ValueError(message(op, f"{text!r}: unknown function {name!r}", f"known are {', '.join(FORMULA_FUNCTIONS)}"))
    expected = len(FORMULA_FUNCTIONS[name].takes)
    if node.keywords or len(node.args) != expected:
        raise ValueError(message(op, f"{text!r}: {name} must have {expected} positional arguments", given=ast.unparse(node)))


def names_read_by(text: str, let: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return every name that an expression reads, directly or through its shared sub-expressions."""
    found, shared = _parsed_with_names(text)[1], let or {}
    return found.union(*(names_read_by(shared[name], shared) for name in found & shared.keys()))


def called(node: ast.Call) -> FormulaFunction:
    """Return the table entry of the function that a call names; the call has been checked."""
    assert isinstance(node.func, ast.Name)
    return FORMULA_FUNCTIONS[node.func.id]


def is_truth(node: ast.AST) -> bool:
    """Whether an expression is a truth value: a comparison, or a function that returns one."""
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and called(node).gives == "t")


def needs_float(text: str) -> bool:
    """Whether an expression has no meaning in integers: it divides, has a fraction, or calls a function of reals."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Div) or (isinstance(node, ast.Constant) and isinstance(node.value, float)):
            return True
        if isinstance(node, ast.Call) and not called(node).integral:
            return True
    return False


def _number_names(node: ast.AST, wanted: str = "n") -> set[str]:
    """Return the names an expression uses as numbers, not only as conditions."""
    if isinstance(node, ast.Name):
        return {node.id} if wanted == "n" else set()
    if isinstance(node, ast.Call):
        pairs = zip(node.args, called(node).takes, strict=True)
        return set().union(*[_number_names(arg, sort) for arg, sort in pairs])
    return set().union(*[_number_names(child) for child in ast.iter_child_nodes(node)])


def _check_names(op: str, text: str, known: Iterable[str], let: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the names that an expression reads; raises if one is unknown."""
    read = names_read_by(text, let)
    unknown = sorted(read.difference(known))
    if unknown:
        raise ValueError(message(op, f"{text!r}: unknown name {unknown[0]!r}", f"known are {', '.join(sorted(known))}"))
    return read


def _check_identity(op: str, inputs: Sequence[str], let: Iterable[str], params: Iterable[str]) -> None:
    if not _OP_NAME.fullmatch(op):
        raise ValueError(message(op, "the name of an op must consist of lower-case letters, digits and underscores", name=repr(op)))
    taken = {"g", "out", "n", *(f"v{i}" for i in range(len(inputs)))}
    for name in [*let, *params]:
        if not _OP_NAME.fullmatch(name) or name in taken:
            what = f"shared expressions and parameters must have lower-case names that are not taken, got {name!r}"
            raise ValueError(message(op, what, f"taken: {', '.join(sorted(taken))}"))
        taken.add(name)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """An op that is one expression per element of its broadcast inputs.

    ``fwd`` is an expression in ``v0``, ``v1``.., the parameters and the names of ``let``. Each expression of ``vjp`` may also read
    ``g`` and ``out``; ``None`` means that the input has no gradient. ``result``: the rule for the dtype of the result, derived from
    the formula if empty; ``number`` is ``same``, but int64 for bool; ``inputs`` is ``same``, but parameters do not promote.
    ``accepts``: ``any``, ``number`` (no bool) or ``float``.
    ``method``: the op is also a method of ``Tensor``, with an in-place form; ops that are methods in torch do not need it.
    ``onnx``: the ONNX operator as a call whose attributes are parameters of the op, ``LeakyRelu(alpha=negative_slope)``; a row
    without one is exported by its formula.
    """

    name: str
    fwd: str
    vjp: tuple[str | None, ...]
    ref: Callable[..., Any]
    let: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, float] = field(default_factory=dict)
    amp: Amp = "keep"
    domain: tuple[Any, ...] = (-3.0, 3.0)
    kinks: tuple[float, ...] = ()
    tol: float = 1.0
    errors: Sequence[tuple[Sample, str]] = ()
    result: ResultRule | Literal[""] = ""
    accepts: Literal["any", "number", "float"] = "any"
    inputs: tuple[str, ...] = ()
    onnx: str = ""
    doc: str = ""
    method: bool = False
    _kept: tuple[frozenset[str], ...] = field(init=False, repr=False)  # by input, the tensors that its gradient reads

    def __post_init__(self) -> None:
        inputs = self.inputs or (("x",) if len(self.vjp) == 1 else tuple("abcdef"[: len(self.vjp)]))
        object.__setattr__(self, "inputs", inputs)
        self._check()
        object.__setattr__(self, "result", self.result or self._result())

    @cached_property
    def arity(self) -> int:
        return len(self.vjp)

    @property
    def differentiable(self) -> bool:
        return any(self.vjp)

    def saved(self) -> frozenset[str]:
        """Return the names of the tensors that the gradient formulas read (``out``, ``v0``..), which backward keeps."""
        return frozenset().union(*self._kept)

    @cached_property
    def promoting(self) -> tuple[int, ...]:
        """The inputs whose dtype decides the dtype of the result: inputs used as numbers, not only as conditions; all if there are none."""
        used = set().union(*[_number_names(parse(text)) for text in (self.fwd, *self.let.values())])
        return tuple([i for i in range(self.arity) if f"v{i}" in used]) or tuple(range(self.arity))

    def resolve(self, params: Mapping[str, Any]) -> tuple[Pointwise, dict[str, Any]]:
        """Return the row and the parameters that a call runs with."""
        return self, {**self.params, **params}

    def _result(self) -> ResultRule:
        if is_truth(parse(self.fwd)):
            return "bool"
        return "float" if any(needs_float(text) for text in (self.fwd, *self.let.values())) else "same"

    def _check(self) -> None:
        _check_identity(self.name, self.inputs, self.let, self.params)
        known = {*self.params, *(f"v{i}" for i in range(self.arity))}
        for name, text in self.let.items():
            parse(text, self.name)
            _check_names(self.name, text, known)
            known.add(name)
        parse(self.fwd, self.name)
        if "out" in names_read_by(self.fwd, self.let):
            raise ValueError(message(self.name, "fwd must not read 'out'", fwd=repr(self.fwd)))
        _check_names(self.name, self.fwd, known)
        tensors, kept = {"out", *[f"v{i}" for i in range(self.arity)]}, []
        for formula in self.vjp:
            if formula:
                parse(formula, self.name)
            kept.append(_check_names(self.name, formula, known | {"g", "out"}, self.let) & tensors if formula else frozenset())
        object.__setattr__(self, "_kept", tuple(kept))
        if len(self.inputs) != self.arity:
            raise ValueError(message(self.name, "inputs must have one name per vjp", inputs=self.inputs, vjp=self.vjp))


@dataclass(frozen=True, eq=False)
class Choice:
    """A public op that selects one of several pointwise rows by its arguments: ``gelu(approximate=)``, ``clamp(min, max)``."""

    name: str
    rows: tuple[Pointwise, ...]
    params: Mapping[str, Any]
    choose: Callable[..., tuple[str, Mapping[str, float]]]
    doc: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.rows[0].inputs

    @property
    def amp(self) -> Amp:
        return self.rows[0].amp

    @property
    def differentiable(self) -> bool:
        return self.rows[0].differentiable

    def resolve(self, params: Mapping[str, Any]) -> tuple[Pointwise, dict[str, Any]]:
        """Return the row and the parameters that a call runs with."""
        name, rest = self.choose(**{**self.params, **params})
        return self.by_name[name], dict(rest)

    @cached_property
    def by_name(self) -> dict[str, Pointwise]:
        return {row.name: row for row in self.rows}


#: Parameters of a vjp that keep one of several outputs.
OUTPUTS = ("out0", "out1", "out2")


class _WithFunction:
    """Base of rows whose gradient is a function ``vjp``; the names of its parameters select its arguments."""

    vjp: Callable[..., Any] | None
    formula: Callable[..., Any] | None = None
    inputs: tuple[str, ...]

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """The parameters of ``vjp`` after ``F``; cached, because ``inspect`` costs more than most ops."""
        return tuple(inspect.signature(self.vjp).parameters)[1:] if self.vjp else ()

    def saved(self) -> frozenset[str]:
        """Return the names of the tensors that backward keeps: inputs and outputs that ``vjp`` names, or all inputs for ``formula``."""
        return frozenset(self.asked) & {"out", *OUTPUTS, *self.inputs} | frozenset(self.inputs if self.formula else ())


@dataclass(frozen=True, eq=False)
class Reduction(_WithFunction):
    """An op that reduces axes: ``finish(combine over r of map(x[r]))``.

    ``map`` is an expression in ``v0`` (the element), the parameters and, if ``given`` names another reduction, ``v1`` (the
    result of that reduction over the same axes). ``combine`` is associative, in ``v0`` and ``v1``; ``neutral`` is a number,
    ``LOWEST`` or ``HIGHEST``; ``finish`` is in ``v0`` (the fold), ``v1``, ``n`` (the number of folded elements) and the parameters.
    ``result``: ``same``, ``sum`` (integers become int64), ``float`` or ``bool``. ``accepts``: ``any`` or
    ``float``. ``empty``: whether a fold of no elements has a value. ``vjp(F, g, ...)`` gets arguments by name, as in :class:`Op`.
    """

    name: str
    combine: str
    neutral: str
    ref: Callable[..., Any]
    vjp: Callable[..., Any] | None
    map: str = "v0"
    finish: str = "v0"
    given: str = ""
    params: Mapping[str, float] = field(default_factory=dict)
    amp: Amp = "float"
    result: ResultRule = "same"
    accepts: Literal["any", "float"] = "any"
    empty: bool = True
    domain: tuple[float, float] = (-1.0, 1.0)
    tol: float = 1.0
    errors: Sequence[tuple[Sample, str]] = ()
    doc: str = ""
    inputs: tuple[str, ...] = ("x",)

    def __post_init__(self) -> None:
        _check_identity(self.name, self.inputs, (), self.params)
        given = {"v1"} if self.given else set()
        rules = ((self.map, {"v0", *given, *self.params}), (self.combine, {"v0", "v1"}), (self.neutral, set(LIMITS)),
                 (self.finish, {"v0", "n", *given, *self.params}))  # fmt: skip
        for text, known in rules:
            parse(text, self.name)
            _check_names(self.name, text, known)

    @property
    def differentiable(self) -> bool:
        return self.vjp is not None

    def bind(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tensor inputs and the keyword arguments of a call, including defaults."""
        names_ = ("x", "axis", "keepdims", *self.params)
        known: dict[str, Any] = {"axis": None, "keepdims": False, **self.params}
        known.update(zip(names_, args, strict=False))
        known.update(kwargs)
        known.pop("out", None)
        return (known.pop("x"),), known


@dataclass(frozen=True)
class Sample:
    """Inputs of a call as data: shapes, dtypes, ranges and keyword arguments. Made by :func:`S`."""

    shapes: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtypes: Any = None
    low: Any = -1.0
    high: Any = 1.0

    def arrays(self, seed: int = 0, dtype: str | None = None) -> list[Any]:
        """Return the arrays of the sample; ``dtype`` replaces float32. A list of shapes gives a list, ``None`` stays ``None``."""
        rng = np.random.default_rng(seed)
        return [self._array(rng, i, shape, dtype) for i, shape in enumerate(self.shapes)]

    def _array(self, rng: np.random.Generator, i: int, shape: Any, dtype: str | None) -> Any:
        if shape is None or callable(shape) or isinstance(shape, np.ndarray | int | float):
            return shape() if callable(shape) else shape
        if isinstance(shape, list):
            return [self._array(rng, i, part, dtype) for part in shape]
        low, high, kind = (value[i] if isinstance(value, tuple | list) else value for value in (self.low, self.high, self.dtypes))
        if kind in (None, "float32"):
            kind = dtype or "float32"
        if kind == "bool":
            return rng.random(shape) < 0.5
        if kind.startswith(("int", "uint")):
            return rng.integers(int(low), int(high), shape).astype(kind)
        return rng.uniform(low, high, shape).astype("float32" if kind == "bfloat16" else kind)


def S(*shapes: Any, dtypes: Any = None, low: Any = -1.0, high: Any = 1.0, **kwargs: Any) -> Sample:
    """Return a sample of a call: shapes of the tensor arguments (or arrays, or functions that return them), and its keyword arguments.

    ``dtypes``, ``low`` and ``high`` are one value for all inputs or a tuple with one per input; integer inputs are
    drawn from ``low`` up to but not including ``high``.

    >>> S((2, 3), (3,), dtypes=("float32", "int64"), high=5).arrays()[1].dtype
    dtype('int64')
    """
    return Sample(shapes, kwargs, dtypes, low, high)


@dataclass(frozen=True, eq=False)
class _Called:
    """Base of rows that are computed by a Python function ``call``.

    ``bias_stays``: the input ``bias`` may be float32 beside 16-bit inputs, so autocast does not cast it.
    """

    name: str
    call: Callable[..., Any]
    ref: Callable[..., Any] | None
    inputs: tuple[str, ...]
    amp: Amp = "keep"
    samples: Sequence[Sample] = ()
    errors: Sequence[tuple[Sample, str]] = ()
    differentiable: bool = True
    tol: float = 1.0
    doc: str = ""
    bias_stays: bool = False

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.call)

    def bind(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tensor inputs and the keyword arguments of a call, including defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = dict(bound.arguments)
        rest.pop("out", None)
        return tuple(rest.pop(name) for name in self.inputs), rest


@dataclass(frozen=True, eq=False)
class Op(_WithFunction, _Called):
    """An op that is computed by its own function ``call``. Made by :func:`op`.

    ``vjp(F, ...)`` is forward-only code over ``F`` (``netcl.ops``, or ``netcl.autograd`` when the gradient itself is to
    be differentiated). Its further parameters name the arguments it needs: ``g``, ``out`` (all outputs; ``out0``,
    ``out1``.. are single ones), an input's name, ``<input>_shape`` or ``<input>_dtype`` (which keep no tensor), keyword arguments of the
    call, and ``needs``: per input, whether its gradient is wanted. It returns one gradient or ``None`` per tensor
    input; gradients of broadcast inputs are summed to the input's shape by the tape.

    ``formula(F, ...)`` takes the arguments of ``call`` and computes the same by other ops. The tape differentiates it where there is no
    ``vjp``, or where that returns ``NotImplemented`` for each input: second derivatives need no code of their own.

    ``deferred`` and ``defer_if`` are those of :func:`netcl.engine.plan.planned`. An op that is ``at_once`` has no plan: it returns a
    view, calls other ops, or its work depends on values.
    """

    vjp: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    deferred: Callable[..., Any] | None = None
    defer_if: Callable[..., bool] | None = None
    at_once: bool = False


@cache
def _sources(row: Op | Reduction) -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, int, str]], list[str]]:
    """Return the arguments of a ``vjp`` by what they are.

    These are inputs and outputs with their indices, names of an input's shape or dtype with the index and the attribute, and other names.
    """
    known = {f"{name}_{what}": (i, what) for i, name in enumerate(row.inputs) for what in ("shape", "dtype")}
    sides = (("output", OUTPUTS), ("input", row.inputs))
    known = {name: (i, side) for side, names in sides for i, name in enumerate(names)} | known
    found = [(name, *known.get(name, (-1, ""))) for name in row.asked]
    inputs, outputs = ([(name, i) for name, i, what in found if what == role] for role in ("input", "output"))
    types = [one for one in found if one[2] in ("shape", "dtype")]
    return inputs, outputs, types, [name for name, _, what in found if not what]


def call_vjp(row: Op | Reduction, F: Any, g: Any, out: Any, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Call a row's ``vjp`` with the arguments that its parameters name; returns one gradient or ``None`` per tensor input.

    ``inputs`` may hold, in place of a tensor that is not kept, any object with ``shape`` and ``dtype``.
    """
    given: dict[str, Any] = {}
    of_inputs, of_outputs, of_types, others = _sources(row)
    for name, i in of_inputs:
        given[name] = inputs[i]
    for name, i in of_outputs:
        given[name] = out[i]
    for name, i, what in of_types:
        given[name] = getattr(inputs[i], what, None)
    for name in others:
        if name == "g":
            given[name] = g
        elif name == "out":
            given[name] = out
        else:
            given[name] = keywords[name]
    assert row.vjp is not None
    grads = row.vjp(F, **given)
    return grads if isinstance(grads, tuple) else (grads,)


@dataclass(frozen=True, eq=False)
class Composite(_Called):
    """An op made of other ops: ``call(F, ...)`` over ``F``, which is ``netcl.ops`` or ``netcl.autograd``. Made by :func:`composite`.

    It has no kernel and no gradient of its own; autocast applies to the ops it calls, unless ``amp`` is ``"float"``.
    """

    def over(self, F: Any) -> Callable[..., Any]:
        """Return the public function: ``call`` with ``F`` bound."""

        @wraps(self.call)
        def function(*args: Any, **kwargs: Any) -> Any:
            return self.call(F, *args, **kwargs)

        signature = inspect.signature(self.call)
        function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return function

    def bind(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the tensor inputs and the keyword arguments of a call, including defaults."""
        inputs, rest = super().bind(None, *args, **kwargs)
        del rest["F"]
        return inputs, rest


Row = Pointwise | Choice | Reduction | Op | Composite
REGISTRY: dict[str, Row] = {}
#: Aliases of ops: ``swish`` is ``silu``.
ALIASES: dict[str, str] = {}


def register(row: Row) -> Row:
    """Add a row to the table and return it; from then on ``netcl.ops`` and ``netcl.autograd`` have the op.

    >>> from netcl.engine.registry import Pointwise, register, unregister
    >>> row = register(Pointwise("cube", "v0 * v0 * v0", ("3 * g * v0 * v0",), lambda x: x**3))
    >>> unregister("cube")
    """
    if row.name in REGISTRY or row.name in ALIASES:
        raise ValueError(message(row.name, "an op of this name must not exist yet", "choose another name, or unregister the first"))
    if isinstance(row, Pointwise) and row.method:
        methods.add_method(row.name)
    REGISTRY[row.name] = row
    return row


def unregister(name: str) -> None:
    """Remove a row from the table, and all plans: they may have launches of the op inside another one, or inside a backward pass."""
    del REGISTRY[name]
    methods.remove_method(name)
    queue_state.forget("plans")


def alias(name: str, of: str) -> None:
    """Add ``name`` as an alias of the op ``of``."""
    if name in REGISTRY or name in ALIASES:
        raise ValueError(message(name, "an op of this name must not exist yet", "choose another name"))
    ALIASES[name] = REGISTRY[of].name


def lookup_op(name: str) -> Row:
    """Return the row of an op by its name or alias."""
    return REGISTRY[ALIASES.get(name, name)]


def _tensor_inputs(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters annotated as tensors; without annotations, the positional ones without a default."""
    parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "out"]
    marked = tuple(p.name for p in parameters if "Tensor" in str(p.annotation))
    return marked or tuple(p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty)


def op(
    *, vjp: Callable[..., Any] | None, ref: Callable[..., Any] | str | None, name: str = "", inputs: Sequence[str] = (), **columns: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as an op. ``vjp=None`` without a ``formula`` declares that it has no gradient.

    Tensor inputs are the parameters annotated with ``Tensor`` (without any, those without a default), unless ``inputs`` names them.
    ``ref="numpy"``: the op on the NumPy backend in float64 is the reference, which is itself tested against golden data.
    """

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        title = name or call.__name__
        tensors = tuple(inputs) or _tensor_inputs(call)
        _check_vjp(title, call, vjp, tensors)
        doc = columns.pop("doc", inspect.getdoc(call) or "")
        differentiable = columns.pop("differentiable", vjp is not None or "formula" in columns)
        register(Op(title, call, _oracle(title, ref), tensors, vjp=vjp, differentiable=differentiable, doc=doc, **columns))
        return call

    return add


def _oracle(title: str, ref: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    return partial(launch.numpy_reference, title) if isinstance(ref, str) else ref


def _check_vjp(title: str, call: Callable[..., Any], vjp: Callable[..., Any] | None, inputs: tuple[str, ...]) -> None:
    if vjp is None:
        return
    first, *wanted = inspect.signature(vjp).parameters
    known = {"g", "out", *OUTPUTS, "needs", "recorded", *inspect.signature(call).parameters}
    known |= {f"{name}_{what}" for name in inputs for what in ("shape", "dtype")}
    unknown = [name for name in wanted if name not in known]
    if first != "F" or unknown:
        fault = f"its vjp has the unknown parameter {unknown[0]!r}" if unknown else f"the first parameter of its vjp must be F, got {first}"
        raise ValueError(message(title, fault, f"known are F, {', '.join(sorted(known))}"))


def composite(
    *, ref: Callable[..., Any] | str | None, name: str = "", inputs: Sequence[str] = (), **columns: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function ``f(F, x, ...)`` over other ops as an op.

    Tensor inputs are the parameters annotated with ``Tensor`` (without any, those without a default), unless ``inputs`` names them.

    >>> from netcl.engine.registry import composite, unregister
    >>> @composite(ref=lambda x: x - x.mean())
    ... def centered(F, x):
    ...     return F.sub(x, F.mean(x))
    >>> unregister("centered")
    """

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        title = name or call.__name__
        if (first := next(iter(inspect.signature(call).parameters), "")) != "F":
            raise ValueError(message(title, f"the first parameter of a composite op must be F, got {first!r}"))
        tensors = tuple(inputs) or tuple(parameter for parameter in _tensor_inputs(call) if parameter != "F")
        doc = columns.pop("doc", inspect.getdoc(call) or "")
        register(Composite(title, call, _oracle(title, ref), tensors, doc=doc, **columns))
        return call

    return add
