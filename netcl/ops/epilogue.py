"""Pending matrix products and convolutions, and the ops that are fused into their kernels.

``matmul``, ``affine`` and ``conv2d`` return a :class:`PendingProduct`. An op that their kernels can end in returns a :class:`Followed`:
a number as factor, a bias, a residual, an activation, a cast, in this order. When a value is read, the longest chain of such ops whose
intermediate results are not referenced becomes one launch. A referenced result is computed first; the next op has its own kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, HALVES, DType
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor, deferred_tensor, with_shape
from netcl.engine import lazy_graph
from netcl.engine.call import Deferral, planned
from netcl.engine.launch import FLOATS
from netcl.engine.modes import in_mode, modes
from netcl.engine.pointwise import run
from netcl.engine.registry import REGISTRY, Pointwise
from netcl.ops.conv import conv2d_with
from netcl.ops.conv.geometry import frozen, geometry
from netcl.ops.finish import Finish
from netcl.ops.matmul import affine_with, matmul_shape, matmul_with
from netcl.ops.matmul.gemm import EPILOGUE_ACTIVATIONS, Extras
from netcl.ops.pointwise import cast

# Ops that a kernel of a product can end in.
_FOLLOWS = frozenset((*EPILOGUE_ACTIVATIONS.values(), "add", "cast", "hard_sigmoid", "hard_swish", "mul", "relu6"))


class _Waiting(lazy_graph.Product):
    """What tensors rest on while it is not decided which kernel computes them."""

    __slots__ = ("__weakref__", "extras", "inputs", "made", "name", "queue", "shape", "tensors")

    def __init__(self, name: str, inputs: tuple[Any, ...], extras: Extras, shape: tuple[int, ...], queue: Any):
        self.name, self.inputs, self.extras, self.shape, self.queue = name, inputs, extras, shape, queue
        self.made: Tensor | None = None
        self.tensors: list[weakref.ref[Tensor]] = []

    def seen_by(self, tensor: Tensor) -> None:
        """A further tensor rests on this."""
        self.tensors.append(weakref.ref(tensor))

    def alive(self) -> bool:
        """Whether a tensor still rests on this."""
        return any(ref() is not None for ref in self.tensors)

    def skippable(self) -> bool:
        """Whether nobody needs these values by themselves."""
        return self.made is None and not self.alive()

    def compute(self, wanted: Sequence[Any] = ()) -> Tensor:
        """The tensor that owns the values."""
        with lazy_graph.lock:
            if self.made is None:
                if modes.mode is None:
                    made = self.run()
                else:
                    with in_mode(None):
                        made = self.run()
                if made.source is not None:
                    lazy_graph.compute([made])  # an op by itself may leave a formula
                if self.made is None:  # making room for the formula may have computed this value: all its tensors share one memory
                    self.made = made
                self.release()
        return self.made

    def run(self) -> Tensor:
        raise NotImplementedError

    def joined(self, name: str, values: Sequence[Any], place: int, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """An op on this value, to be computed with it; ``None`` where that cannot be."""
        return append_op(name, values, place, shape, dtype) if name in _FOLLOWS else None

    def release(self) -> None:
        """Let go of what the values were computed from."""
        self.inputs = ()
        self.extras = Extras(self.extras.finish)


class PendingProduct(_Waiting):
    """A product: ``call(extras)`` launches it with what follows; its last axis may get a bias if ``by_column``."""

    __slots__ = ("by_column", "call", "deferral")

    def __init__(
        self, name: str, inputs: tuple[Any, ...], extras: Extras, shape: tuple[int, ...], call: Callable[[Extras], Tensor], by_column: bool
    ):
        super().__init__(name, tuple(x for x in inputs if x is not None), extras, shape, inputs[0].queue)
        self.call: Callable[[Extras], Tensor] | None = call
        self.by_column = by_column
        self.deferral: Deferral | None = None

    def run(self) -> Tensor:
        assert self.call is not None
        if self.deferral is not None:
            self.deferral.alone += 1
        return self.call(self.extras)

    def ending_in(self, extras: Extras) -> Tensor:
        """The product with what followed it."""
        assert self.call is not None
        if self.deferral is not None:
            self.deferral.followed += 1
        return self.call(extras)

    def release(self) -> None:
        super().release()
        self.call = None


class Followed(_Waiting):
    """A product or another of these, and one op more: ``extras`` say all of it, ``alone`` applies the op to a tensor."""

    __slots__ = ("alone", "mode", "of")

    def __init__(
        self, name: str, of: _Waiting, extras: Extras, shape: tuple[int, ...], queue: Any, operand: Any, alone: Callable[[Tensor], Tensor]
    ):
        super().__init__(name, (operand,) if isinstance(operand, Tensor) else (), extras, shape, queue)
        self.of: _Waiting | None = of
        self.mode = modes.mode
        self.alone: Callable[[Tensor], Tensor] | None = alone

    def run(self) -> Tensor:
        first, of = self.product(), self.of
        if first is not None:
            made = first.ending_in(self.extras)
        else:
            assert of is not None and self.alone is not None
            with in_mode(self.mode):  # formulas, which become one kernel
                made = self.alone(of.run() if of.skippable() else of.compute())
        self.of = None  # let go of: what is held is computed before its inputs change. Not earlier: who found no memory may ask again
        return made

    def product(self) -> PendingProduct | None:
        """The product this is computed with; ``None`` if someone holds what lies between, or the product itself."""
        first: Any = self.of
        while type(first) is Followed and first.skippable():
            first = first.of
        return first if type(first) is PendingProduct and first.skippable() else None

    def settled(self, x: Tensor, values: Sequence[Any]) -> Tensor:
        """``x`` itself, or, if an op over ``values`` needs the product it rests on as well, the same as a formula."""
        first: Any = self.of
        while type(first) is Followed:
            first = first.of
        if self.made is None and all(getattr(v, "source", None) is not first for v in values):
            return x
        return _in_shape(self.as_formula(), x.shape)

    def as_formula(self) -> Tensor:
        """The op on what it is applied to as any op would be, so that others join it."""
        if self.made is None:
            of = self.of
            assert of is not None and self.alone is not None
            again = type(of) is Followed and of.skippable()
            below = of.as_formula() if again else deferred_tensor(of, of.shape, of.extras.finish.stored, self.queue)  # type: ignore[attr-defined]
            self.made = self.alone(below)
            self.of = None
            self.release()
        return self.made

    def release(self) -> None:
        super().release()
        self.alone = None


def _deferred(waiting: _Waiting, like: Tensor) -> Tensor:
    made = deferred_tensor(waiting, waiting.shape, waiting.extras.finish.stored, like.queue)
    lazy_graph.register(waiting)
    return made


# ---- what may follow


def _with_scale(extras: Extras, number: Any) -> Extras | None:
    """The product times a number: only before anything else, and of halves only by themselves, since they are rounded before."""
    finish, bias, _, scale = extras
    if scale != 1 or bias is not None or not finish.plain or finish.dtype in HALVES:
        return None
    return extras._replace(scale=float(number))


def _plus_tensor(extras: Extras, other: Tensor, of: _Waiting, seen: tuple[int, ...]) -> Extras | None:
    """The product plus a tensor: a residual, kept under the product's own shape, or a bias along the product's own last axis."""
    finish, bias = extras[:2]
    if not finish.plain or other.dtype not in FLOATS or DTYPES[other.dtype].c_compute != DTYPES[finish.dtype].c_compute:
        return None
    root: Any = of
    while type(root) is Followed:
        root = root.of
    if root is None:  # a value in between is computed already
        return None
    if other.shape == seen:
        return extras._replace(finish=finish._replace(residual=other.dtype), residual=with_shape(other, root.shape))
    columns = other.shape == seen[-1:] and seen == root.shape and root.by_column
    if bias is not None or not columns or other.dtype != finish.dtype or finish.dtype in HALVES:
        return None
    return extras._replace(bias=other.detach())


def _with_cast(extras: Extras, dtype: DType) -> Extras | None:
    finish = extras.finish
    if finish.result or dtype.name not in FLOATS or dtype.c_compute != DTYPES[finish.dtype].c_compute:
        return None
    return extras._replace(finish=finish._replace(result=dtype.name))


def _in_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor under the shape of a view: a pending value knows only the shape it is computed in."""
    return x if x.shape == shape else with_shape(x, shape)


class _Step(NamedTuple):
    """An op on a value that waits, at one of its operands."""

    name: str
    values: Sequence[Any]
    place: int
    dtype: DType

    def onto(self, of: _Waiting) -> Extras | None:
        """What a product ends in with this op too; ``None`` where its kernel cannot."""
        seen = self.values[self.place]
        if self.name == "cast":
            return _with_cast(of.extras, self.dtype)
        row = REGISTRY[self.name]
        assert isinstance(row, Pointwise)
        if seen.requires_grad and f"v{self.place}" in row.saved():
            return None  # backward reads the operand, which is then stored anyway
        if len(self.values) == 1:
            finish = of.extras.finish
            return None if finish.activation or finish.result else of.extras._replace(finish=finish._replace(activation=self.name))
        other = self.values[1 - self.place]
        if self.name == "mul":
            return None if isinstance(other, Tensor) else _with_scale(of.extras, other)
        return _plus_tensor(of.extras, other, of, seen.shape) if isinstance(other, Tensor) else None

    def alone(self) -> Callable[[Tensor], Tensor]:
        """The op by itself, applied to the pending value under the shape the op was called with; holds the other operand only."""
        shape = self.values[self.place].shape
        if self.name == "cast":
            name = self.dtype.name
            return lambda t: cast(_in_shape(t, shape), name)
        before, after = tuple(self.values[: self.place]), tuple(self.values[self.place + 1 :])
        row: Any = REGISTRY[self.name]
        return lambda t: run(row, (*before, _in_shape(t, shape), *after))


def append_op(name: str, values: Sequence[Any], place: int, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    """An op on a product that waits, to be computed with it; ``None`` where that cannot be."""
    seen, of = values[place], values[place].source
    if shape != seen.shape or sum(ref() is not None for ref in of.tensors) > 1:
        return None
    step = _Step(name, values, place, dtype)
    extras = step.onto(of)
    if extras is None or extras.finish.stored != dtype.name:
        return None
    operand = extras.residual if extras.residual is not of.extras.residual else extras.bias if extras.bias is not of.extras.bias else None
    return _deferred(Followed(name, of, extras, shape, seen.queue, operand, step.alone()), seen)


# ---- products

_matmul, _affine, _conv2d = (planned(call.__name__, call) for call in (matmul_with, affine_with, conv2d_with))


def _fusable_operands(*tensors: Any) -> bool:
    """Whether the operands are tensors of one float dtype on one OpenCL queue; everything else is the op's own business."""
    first = tensors[0]
    return isinstance(first, Tensor) and first.dtype in FLOATS and not isinstance(first.queue, CPUQueue) and all(
        t is None or (isinstance(t, Tensor) and t.dtype == first.dtype and t.queue is first.queue and t.size) for t in tensors
    )  # fmt: skip


def _waits(name: str, inputs: tuple[Any, ...], shape: tuple[int, ...], call: Callable[..., Tensor], by_column: bool) -> Tensor | None:
    """A product of a shape that waits, if that is worth it; ``call`` takes the inputs without their histories, and the extras."""
    first = inputs[0]
    if 0 in shape or (modes.mode is None and not lazy_graph.worth_deferring(first.queue, shape, lazy_graph.MULTIPLIED)):
        return None
    x, w, bias = (None if t is None else t.detach() for t in inputs)
    extras = Extras(Finish(first.dtype), bias)
    return _deferred(PendingProduct(name, (x, w, bias), extras, shape, lambda ending: call(x, w, ending), by_column), first)


def pending_matmul(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor | None:
    """A matrix product that waits for what follows."""
    if not _fusable_operands(a, b):
        return None
    try:
        shape = matmul_shape(a, b, transpose_a, transpose_b)
    except ShapeError:  # the op says it in its own words
        return None
    return _waits("matmul", (a, b, None), shape, lambda x, y, e: _matmul(x, y, e, transpose_a, transpose_b), b.ndim > 1)


def pending_affine(x: Any, w: Any, bias: Any = None) -> Tensor | None:
    """``x w' + bias`` that waits for what follows."""
    if not _fusable_operands(x, w, bias) or not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        return None
    if bias is not None and bias.shape != w.shape[:1]:
        return None
    return _waits("affine", (x, w, bias), (*x.shape[:-1], w.shape[0]), _affine, True)


def pending_conv2d(
    x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, pad: Any = None
) -> Tensor | None:
    """A convolution that waits for what follows."""
    if not _fusable_operands(x, w, bias) or (bias is not None and bias.shape != w.shape[:1]):
        return None
    try:
        g = geometry("conv2d", x.shape, w.shape, *map(frozen, (stride, padding if pad is None else pad, dilation, groups)))
    except (ShapeError, TypeError, ValueError):  # the op says it in its own words
        return None
    return _waits("conv2d", (x, w, bias), g.y_shape, lambda x, w, e: _conv2d(x, w, e, g), False)


PRODUCTS: dict[str, Callable[..., Tensor | None]] = {"matmul": pending_matmul, "affine": pending_affine, "conv2d": pending_conv2d}
