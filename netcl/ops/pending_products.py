"""Pending matrix products and convolutions, and the ops that are fused into their kernels.

Where deferring pays, and in recordings, ``matmul``, ``affine`` and ``conv2d`` return a deferred tensor of a :class:`PendingProduct`. Its
kernel can also apply a scale factor, a bias, a residual, an activation and a cast, in this order. Each of these ops returns a deferred
tensor of a :class:`PendingChain`. When a value is read, one kernel computes the chain. If a tensor refers to an intermediate result, that
is computed first.

A recorded step has the results of the eager one: a product that is deferred only because it is recorded is joined by ops that give the same
bits in every kernel. These include gradients of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from netcl.core import recording
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, HALVES, DType, sum_dtype
from netcl.core.errors import ShapeError
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor, deferred_tensor, with_shape
from netcl.engine import lazy_graph
from netcl.engine.launch import FLOATS
from netcl.engine.modes import deferral, in_mode
from netcl.engine.plan import Deferral, planned
from netcl.engine.pointwise import run
from netcl.engine.registry import REGISTRY, Pointwise
from netcl.ops.conv import conv2d_with
from netcl.ops.conv.geometry import frozen, geometry
from netcl.ops.epilogue import Epilogue, activation_vjp_of
from netcl.ops.matmul import affine_with, in_shape, matmul_with, product_shapes
from netcl.ops.matmul.gemm import EPILOGUE_ACTIVATIONS, Extras
from netcl.ops.pointwise import add, cast, mul

# Ops that a kernel of a product can end in.
_FUSABLE = frozenset((*EPILOGUE_ACTIVATIONS.values(), "add", "cast", "hard_sigmoid", "hard_swish", "mul", "relu6"))
_GRADIENTS = frozenset(("relu_vjp", "sigmoid_vjp", "tanh_vjp"))
#: Ops that have the same bits in every kernel. Only small products end in gradients: in large ones, GELU's made ViT-S 7 % slower (H200).
_EXACT = frozenset(("add", "cast", "hard_sigmoid", "hard_swish", "mul", "relu", "relu6", *_GRADIENTS))


class _Pending(lazy_graph.Product):
    """Base of pending products: the source of tensors whose kernel has not been launched."""

    __slots__ = ("exact", "extras", "inputs", "made", "name", "queue", "shape")

    def __init__(self, name: str, inputs: tuple[Any, ...], extras: Extras, shape: tuple[int, ...], queue: Any, exact: bool):
        self.name, self.inputs, self.extras, self.shape, self.queue = name, inputs, extras, shape, queue
        self.exact = exact  # it must have the bits of separate ops
        self.made: Tensor | None = None
        self.tensors = []

    def skippable(self) -> bool:
        """Whether the values are neither computed nor referenced by a tensor, so that they need not be stored."""
        return self.made is None and not self.alive()

    def compute(self, wanted: Sequence[Any] = ()) -> Tensor:
        """Compute the values and return the tensor that owns them."""
        with lazy_graph.lock:
            if self.made is None:
                if deferral.mode is None:
                    made = self.run()
                else:
                    with in_mode(None):
                        made = self.run()
                if made.source is not None:
                    lazy_graph.compute([made])  # an unfused op may return a deferred formula
                if self.made is None:  # making room for the formula may have computed this value: all its tensors share one memory
                    self.made = made
                self.release()
        return self.made

    def run(self) -> Tensor:
        raise NotImplementedError

    def joined(self, name: str, values: Sequence[Any], place: int, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
        """Fuse an op on this value into its kernel; ``None`` if that is impossible."""
        fits = name in (_EXACT if self.exact else _FUSABLE)
        return append_op(name, values, place, shape, dtype) if fits else None

    def release(self) -> None:
        self.inputs = ()
        self.extras = Extras(self.extras.epilogue)


class PendingProduct(_Pending):
    """A pending product. ``call(x, w, extras)`` launches it with its epilogue. ``by_column``: a bias may be added along its last axis."""

    __slots__ = ("by_column", "call", "deferral")

    def __init__(
        self, name: str, inputs: tuple[Any, ...], extras: Extras, shape: tuple[int, ...], call: Callable[..., Tensor], by_column: bool,
        exact: bool,
    ):  # fmt: skip
        super().__init__(name, tuple(x for x in inputs if x is not None), extras, shape, inputs[0].queue, exact)
        self.call: Callable[..., Tensor] | None = call
        self.by_column = by_column
        self.deferral: Deferral | None = None

    def run(self) -> Tensor:
        assert self.call is not None
        if self.deferral is not None:
            self.deferral.alone += 1
        return self.call(*self.inputs[:2], self.extras)

    def ending_in(self, extras: Extras) -> Tensor:
        """Launch the product with the epilogue ``extras`` and return the result."""
        assert self.call is not None
        if self.deferral is not None:
            self.deferral.fused += 1
        return self.call(*self.inputs[:2], extras)

    def by_channel(self, scale: Tensor, shift: Tensor) -> Tensor | None:
        if self.exact or self.call is None or self.name == "matmul" or (self.name == "affine" and len(self.shape) != 2):
            return None
        x, w = self.inputs[:2]
        if recording.made(w, or_given=True):
            return None  # each replay would scale it again
        bias = shift if self.extras.bias is None else add(mul(self.extras.bias, scale), shift)
        filters = mul(w, with_shape(scale, (w.shape[0], *(1,) * (w.ndim - 1))))
        return _pending_product(self.name, (x, filters, bias), self.shape, self.call, self.by_column, self.extras.kept)

    def release(self) -> None:
        super().release()
        self.call = None


class PendingChain(_Pending):
    """A pending product followed by one more fusable op: ``extras`` describe the whole chain, ``alone`` runs only this op."""

    __slots__ = ("alone", "mode", "of")

    def __init__(
        self, name: str, of: _Pending, extras: Extras, shape: tuple[int, ...], queue: Any, operand: Any, alone: Callable[[Tensor], Tensor]
    ):
        super().__init__(name, (operand,) if isinstance(operand, Tensor) else (), extras, shape, queue, of.exact)
        self.of: _Pending | None = of
        self.mode = deferral.mode
        self.alone: Callable[[Tensor], Tensor] | None = alone

    def run(self) -> Tensor:
        first, of = self.product(), self.of
        if first is not None:
            made = first.ending_in(self.extras)
        else:
            assert of is not None and self.alone is not None
            with in_mode(self.mode):  # formulas that become one kernel
                made = self.alone(of.run() if of.skippable() else of.compute())
        self.of = None  # release: held values are computed before their inputs change. Not earlier, because an allocation may be retried
        return made

    def product(self) -> PendingProduct | None:
        """Return the product at the start of the chain; ``None`` if the product or an intermediate value is computed or referenced.

        A backward pass does not read a gradient again after it went through an activation, although callers still refer to it.
        """
        first: Any = self.of
        if self.name in _GRADIENTS and type(first) is PendingProduct and first.made is None:
            return first
        while type(first) is PendingChain and first.skippable():
            first = first.of
        return first if type(first) is PendingProduct and first.skippable() else None

    def settled(self, x: Tensor, values: Sequence[Any]) -> Tensor:
        """Return ``x``, or its formula if ``x`` is no longer pending or if ``values``, an op's operands, include the product itself."""
        first: Any = self.of
        while type(first) is PendingChain:
            first = first.of
        if self.made is None and all(getattr(v, "source", None) is not first for v in values):
            return x
        return in_shape(self.as_formula(), x.shape)

    def as_formula(self) -> Tensor:
        """Return the result as a deferred formula over the product, so that other ops can be fused with it."""
        if self.made is None:
            of = self.of
            assert of is not None and self.alone is not None
            again = type(of) is PendingChain and of.skippable()
            below = of.as_formula() if again else deferred_tensor(of, of.shape, of.extras.epilogue.stored, self.queue)  # type: ignore[attr-defined]
            self.made = self.alone(below)
            self.of = None
            self.release()
        return self.made

    def release(self) -> None:
        super().release()
        self.alone = None


def _deferred(pending: _Pending, like: Tensor) -> Tensor:
    made = deferred_tensor(pending, pending.shape, pending.extras.epilogue.stored, like.queue)
    lazy_graph.add_pending(pending)
    return made


# ---- epilogue ops


def _with_scale(extras: Extras, number: Any) -> Extras | None:
    """Return the epilogue with a scale factor; ``None`` if ``extras`` has other ops already or the product is rounded to 16 bits."""
    epilogue, bias, _, scale, _ = extras
    if scale != 1 or bias is not None or not epilogue.plain or epilogue.dtype in HALVES:
        return None
    return extras._replace(scale=float(number))


def _plus_tensor(extras: Extras, other: Tensor, of: _Pending, seen: tuple[int, ...]) -> Extras | None:
    """Return the epilogue with a tensor added: a residual of the product's shape, or a bias along its last axis; ``None`` if impossible."""
    epilogue, bias = extras[:2]
    if not epilogue.plain or other.dtype not in FLOATS or DTYPES[other.dtype].c_compute != DTYPES[epilogue.dtype].c_compute:
        return None
    root: Any = of
    while type(root) is PendingChain:
        root = root.of
    if root is None:  # an intermediate value is already computed
        return None
    if other.shape == seen:
        return extras._replace(epilogue=epilogue._replace(residual=other.dtype), residual=with_shape(other, root.shape))
    columns = other.shape == seen[-1:] and seen == root.shape and root.by_column
    if bias is not None or not columns or other.dtype != epilogue.dtype or epilogue.dtype in HALVES:
        return None
    return extras._replace(bias=other.detach())


class _Step(NamedTuple):
    """A call of an op with a pending value as operand number ``place``."""

    name: str
    values: Sequence[Any]
    place: int
    dtype: DType

    def onto(self, of: _Pending) -> Extras | None:
        """Return the epilogue of a product extended by this op; ``None`` if the product's kernel cannot apply the op."""
        seen, epilogue = self.values[self.place], of.extras.epilogue
        if self.name == "cast":
            fits = not epilogue.result and self.dtype.name in FLOATS and self.dtype.c_compute == DTYPES[epilogue.dtype].c_compute
            return of.extras._replace(epilogue=epilogue._replace(result=self.dtype.name)) if fits else None
        if self.name in _GRADIENTS:
            with_read = None if self.place else _plus_tensor(of.extras, self.values[1], of, seen.shape)
            if with_read is None or not with_read.epilogue.residual:
                return None
            return with_read._replace(epilogue=with_read.epilogue._replace(activation=self.name))
        row = REGISTRY[self.name]
        assert isinstance(row, Pointwise)
        if seen.requires_grad and f"v{self.place}" in row.saved():
            return None  # backward reads the operand, which is then stored anyway
        if len(self.values) == 1:
            return None if epilogue.activation or epilogue.result else of.extras._replace(epilogue=epilogue._replace(activation=self.name))
        other = self.values[1 - self.place]
        if self.name == "mul":
            return None if isinstance(other, Tensor) else _with_scale(of.extras, other)
        return _plus_tensor(of.extras, other, of, seen.shape) if isinstance(other, Tensor) else None

    def alone(self) -> Callable[[Tensor], Tensor]:
        """Return a function that runs only this op, in the shape of the call: an op may read a pending value through a reshaped view.

        The function keeps only the other operands alive.
        """
        shape = self.values[self.place].shape
        if self.name == "cast":
            name = self.dtype.name
            return lambda t: cast(in_shape(t, shape), name)
        if self.name in _GRADIENTS:
            gradient, read = self.name, self.values[1]
            return lambda t: activation_vjp_of(gradient, in_shape(t, shape), read)
        before, after = tuple(self.values[: self.place]), tuple(self.values[self.place + 1 :])
        row: Any = REGISTRY[self.name]
        return lambda t: run(row, (*before, in_shape(t, shape), *after))


def append_op(name: str, values: Sequence[Any], place: int, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    """Return the result of an op fused into a pending product, as a deferred tensor; ``None`` if that is impossible."""
    seen, of = values[place], values[place].source
    if shape != seen.shape or sum(ref() is not None for ref in of.tensors) > 1:
        return None
    step = _Step(name, values, place, dtype)
    extras = step.onto(of)
    if extras is None or extras.epilogue.stored != dtype.name:
        return None
    operand = extras.residual if extras.residual is not of.extras.residual else extras.bias if extras.bias is not of.extras.bias else None
    return _deferred(PendingChain(name, of, extras, shape, seen.queue, operand, step.alone()), seen)


# ---- products

_matmul, _affine, _conv2d = (planned(call.__name__, call) for call in (matmul_with, affine_with, conv2d_with))


def _fusable_operands(x: object, w: object, bias: object = None) -> bool:
    """Whether the operands are non-empty tensors of one float dtype (a bias: of that or of the sums) on one OpenCL queue."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or isinstance(x.queue, CPUQueue):
        return False
    for t in (w,) if bias is None else (w, bias):
        if not isinstance(t, Tensor) or t.queue is not x.queue or 0 in t.shape:
            return False
        if t.dtype is not x.dtype and (t is w or t.dtype is not sum_dtype(x.dtype)):
            return False
    return 0 not in x.shape


def _is_constant(w: Tensor) -> bool:
    """Whether this call is recorded and ``w`` is from outside the step and gets no gradient, so that the step does not change it either."""
    recorder = recording.active.recorder
    if recorder is None or w.memory is None or recorder.made(w, or_given=True):
        return False
    recorder.trains |= w.requires_grad and hooks.call("is_grad_enabled")
    return not (w.requires_grad and recorder.trains)  # gradients are disabled in backward, too


def _pending_product(
    name: str, inputs: tuple[Any, ...], shape: tuple[int, ...], call: Callable[..., Tensor], by_column: bool, kept: bool
) -> Tensor | None:
    """Return a pending product, or ``None`` if deferring does not pay; ``call`` takes the detached inputs and the extras."""
    first = inputs[0]
    exact = deferral.mode is None and not lazy_graph.worth_deferring(first.queue, shape, lazy_graph.MULTIPLIED)
    if 0 in shape or (exact and not recording.replays()):
        return None
    x, w, bias = (None if t is None else t.detach() for t in inputs)
    extras = Extras(Epilogue(first.dtype), bias, kept=kept)
    return _deferred(PendingProduct(name, (x, w, bias), extras, shape, call, by_column, exact), first)


def pending_matmul(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor | None:
    """Return a pending matrix product; ``None`` if the op itself must run."""
    if not _fusable_operands(a, b):
        return None
    try:
        shape = product_shapes(a.shape, b.shape, transpose_a, transpose_b).result
    except ShapeError:  # the op raises its own error
        return None
    return _pending_product(
        "matmul", (a, b, None), shape, lambda x, y, e: _matmul(x, y, e, transpose_a, transpose_b), b.ndim > 1, _is_constant(b)
    )


def pending_affine(x: Any, w: Any, bias: Any = None) -> Tensor | None:
    """Return ``x w' + bias`` as a pending product; ``None`` if the op itself must run."""
    if not _fusable_operands(x, w, bias) or not x.shape or len(w.shape) != 2 or x.shape[-1] != w.shape[1]:
        return None
    if bias is not None and bias.shape != w.shape[:1]:
        return None
    return _pending_product("affine", (x, w, bias), (*x.shape[:-1], w.shape[0]), _affine, True, _is_constant(w))


def pending_conv2d(
    x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, pad: Any = None
) -> Tensor | None:
    """Return a pending convolution; ``None`` if the op itself must run."""
    if not _fusable_operands(x, w, bias) or (bias is not None and bias.shape != w.shape[:1]):
        return None
    try:
        g = geometry("conv2d", x.shape, w.shape, *map(frozen, (stride, padding if pad is None else pad, dilation, groups)))
    except (ShapeError, TypeError, ValueError):  # the op raises its own error
        return None
    return _pending_product("conv2d", (x, w, bias), g.y_shape, lambda x, w, e: _conv2d(x, w, e, g), False, _is_constant(w))


PRODUCTS: dict[str, Callable[..., Tensor | None]] = {"matmul": pending_matmul, "affine": pending_affine, "conv2d": pending_conv2d}
