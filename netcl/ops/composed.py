"""Ops with torch's names, composed of other ops and differentiated through them. ``unique`` is computed on the host.

An op waits for the device if the shape of its result depends on values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.map_kernel import factor_of
from netcl.engine.operands import common_dtype, common_shape
from netcl.engine.registry import S, Sample, composite, op
from netcl.ops.index import joined_index
from netcl.ops.movement import SizesArgument, along, sizes_of
from netcl.ops.sort import Ordered, ordered
from netcl.ops.views import contiguous


class Extremes(NamedTuple):
    """The result of ``aminmax``: the smallest and the largest values."""

    min: Tensor
    max: Tensor


def row(name: str, call: Callable[..., Any], ref: Callable[..., Any] | str, *samples: Sample, doc: str, **columns: Any) -> None:
    """Register a composite op. Its inputs are the parameters that follow ``F``, one per tensor of a sample."""
    inputs = tuple(inspect.signature(call).parameters)[1 : 1 + len(samples[0].shapes)]

    @wraps(call)
    def with_tensors(F: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[: len(inputs)]
        given = first if any(isinstance(x, list | tuple) for x in first) else launch.as_tensors(name, *first)
        return call(F, *given, *args[len(inputs) :], **kwargs)

    composite(ref=ref, name=name, inputs=inputs, samples=samples, doc=doc, **columns)(with_tensors)


def _checked_tensor(name: str, x: Any, least: int = 0, most: int = 64, label: str = "x") -> Tensor:
    (made,) = launch.as_tensors(name, x)
    if not least <= made.ndim <= most:
        count = f"{least}" if least == most else f"at least {least}" if most == 64 else f"{least} or {most}"
        what = f"{label} must have {count} dimension{'s' * (not count.endswith('1'))}, got {made.ndim}"
        raise ShapeError(message(name, what, **{f"{label}.shape": made.shape}))
    return made


_at = launch.check_axis


def _rows(axis: int, ndim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * _at("index", axis, ndim), index)


def as_like(x: Tensor, values: Any) -> Any:
    return values if isinstance(values, Tensor | int | float) else Tensor.from_host(x.queue, values, x.dtype)


# ---- diagonals and axes


@composite(
    ref=lambda x, offset=0, dim1=0, dim2=1: np.diagonal(x, offset, dim1, dim2),
    samples=[S((3, 5)), S((4, 2, 3), offset=-1, dim1=0, dim2=2), S((3, 3), offset=4)],
    errors=[(S((3, 5), dim1=0, dim2=-2), r"\[diagonal\] dim1 and dim2 must be different axes; dim1=0, dim2=-2")],
)
def diagonal(F: Any, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A view of the diagonal of ``dim1`` and ``dim2``, as the last axis."""
    x = _checked_tensor("diagonal", x, 2)
    a, b = _at("diagonal", dim1, x.ndim), _at("diagonal", dim2, x.ndim)
    if a == b:
        raise ShapeError(message("diagonal", "dim1 and dim2 must be different axes", dim1=dim1, dim2=dim2))
    starts = along(x.ndim, a, max(-offset, 0), along(x.ndim, b, max(offset, 0)))
    n = max(0, min(x.shape[a] - starts[a], x.shape[b] - starts[b]))
    kept = [axis for axis in range(x.ndim) if axis not in (a, b)]
    moves = (*(along(x.ndim, axis, 1) for axis in kept), along(x.ndim, a, 1, along(x.ndim, b, 1)))
    return F.strided_block(x, starts if n else (0,) * x.ndim, (*(x.shape[axis] for axis in kept), n), moves)


@composite(ref="numpy", samples=[S((3,)), S((2, 3), offset=-1), S((2, 3), offset=2, dim1=0, dim2=2)])
def diag_embed(F: Any, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices with the last axis of ``x`` on a diagonal and zeros elsewhere."""
    x = _checked_tensor("diag_embed", x, 1)
    *lead, n = x.shape
    size = n + abs(offset)
    first = max(offset, 0) - min(offset, 0) * size
    flat = F.strided_unslice(x, (*lead, size * size), (*[0] * len(lead), first if n else 0), (*[1] * len(lead), size + 1))
    return F.moveaxis(F.reshape(flat, (*lead, size, size)), (-2, -1), (dim1, dim2))


@composite(ref=lambda x, source, destination: np.moveaxis(x, source, destination),
           samples=[S((2, 3, 4), source=0, destination=-1), S((2, 3, 4), source=(0, 1), destination=(-1, 0))],
           errors=[(S((2, 3), source=(0, 1), destination=0), r"\[moveaxis\] source and destination must have the same")])  # fmt: skip
def moveaxis(F: Any, x: Tensor, source: SizesArgument, destination: SizesArgument) -> Tensor:
    """Return a view with the axes ``source`` moved to the positions ``destination``; the other axes keep their order."""
    x = _checked_tensor("moveaxis", x)
    pairs = [[_at("moveaxis", axis, x.ndim) for axis in sizes_of(axes)] for axes in (source, destination)]
    if len({*pairs[0]}) != len(pairs[0]) or len({*pairs[1]}) != len(pairs[0]) or len(pairs[1]) != len(pairs[0]):
        what = "source and destination must have the same number of axes, none of them twice"
        raise ShapeError(message("moveaxis", what, source=source, destination=destination))
    order = [axis for axis in range(x.ndim) if axis not in pairs[0]]
    for to, axis in sorted(zip(pairs[1], pairs[0], strict=True)):
        order.insert(to, axis)
    return F.reorder(x, order)


def _rot90(F: Any, x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    if len(dims) != 2 or len({_at("rot90", axis, x.ndim) for axis in dims}) != 2:
        raise ShapeError(message("rot90", "dims must be two different axes", dims=dims, **{"x.shape": x.shape}))
    a, b = dims
    turned = F.clone(x) if k % 4 == 0 else x if k % 2 == 0 else F.transpose(F.flip(x, b) if k % 4 == 1 else x, a, b)
    return F.flip(turned, (a, b)) if k % 4 == 2 else F.flip(turned, b) if k % 4 == 3 else turned


def _unflatten(F: Any, x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    at, known = _at("unflatten", axis, x.ndim), -math.prod(sizes)
    return F.reshape(x, (*x.shape[:at], *(x.shape[at] // known if n == -1 and known else n for n in sizes), *x.shape[at + 1 :]))


def _diag(F: Any, x: Tensor, diagonal: int = 0) -> Tensor:
    return F.clone(F.diagonal(x, diagonal)) if _checked_tensor("diag", x, 1, 2).ndim == 2 else F.diag_embed(x, diagonal)


row("diag", _diag, lambda x, diagonal=0: np.diag(x, diagonal), S((3,)), S((3, 5), diagonal=1),
     doc="The diagonal of a matrix, or a matrix with a vector on its diagonal.",
     errors=[(S((2, 2, 2)), r"\[diag\] x must have 1 or 2 dimensions, got 3")])  # fmt: skip
row("trace", lambda F, x: F.sum(F.diagonal(_checked_tensor("trace", x, 2, 2))), np.trace, S((3, 5)),
     doc="The sum of the diagonal of a matrix.")  # fmt: skip
row("rot90", _rot90, lambda x, k=1, dims=(0, 1): np.rot90(x, k, dims), S((2, 3)), S((2, 3, 4), k=-1, dims=(1, 2)), S((2, 3), k=2),
     doc="x rotated k times by 90 degrees in the plane of two axes, from the first axis towards the second.")  # fmt: skip
row("fliplr", lambda F, x: F.flip(x, 1), np.fliplr, S((2, 3)), doc="The second axis reversed.")
row("flipud", lambda F, x: F.flip(x, 0), np.flipud, S((3, 2)), doc="The first axis reversed.")
row(
    "ravel",
    lambda F, x: F.reshape(contiguous(x), (-1,)),
    np.ravel,
    S((2, 3)),
    doc="All elements along one axis; a view if x is contiguous.",
)
row("unflatten", _unflatten, lambda x, axis, sizes: x.reshape(2, *sizes, 3), S((2, 6, 3), axis=1, sizes=(2, -1)),
     doc="One axis divided into several; shares memory. One size may be -1.")  # fmt: skip
row("select", lambda F, x, axis, index: F.getitem(x, _rows(axis, x.ndim, index)), lambda x, axis, index: np.take(x, index, axis),
     S((2, 3, 4), axis=1, index=-1), doc="One slice along an axis; a view.")  # fmt: skip


def _at_least(x: Any, ndim: int) -> tuple[int, ...]:
    """Return the shape of ``x`` with axes of size 1 where NumPy's ``atleast_1d``, ``atleast_2d`` and ``atleast_3d`` add them."""
    shape = tuple(x.shape)
    if len(shape) >= ndim:
        return shape
    return (*(1,) * (ndim - len(shape)), *shape) if ndim < 3 or not shape else (1, *shape, 1) if len(shape) == 1 else (*shape, 1)


def _several_at_least(ndim: int) -> Callable[..., Any]:
    def call(F: Any, x: Any, *more: Any) -> Any:
        several = isinstance(x, list | tuple)
        made = tuple(F.reshape(t, _at_least(t, ndim)) for t in launch.as_tensors("atleast", *(x if several else (x,)), *more))
        return made if more or several else made[0]

    return call


def _stacked(axis: int, ndim: int, columns: int = 0) -> Callable[..., Any]:
    def call(F: Any, xs: Sequence[Tensor]) -> Tensor:
        shaped = ((t, (-1, 1) if columns and t.ndim < 2 else _at_least(t, ndim)) for t in launch.as_tensors("stack", *xs))
        made = [F.reshape(t, shape) for t, shape in shaped]
        return F.cat(made, min(axis, made[0].ndim - 1))

    return call


for _ndim in (1, 2, 3):
    row(f"atleast_{_ndim}d", _several_at_least(_ndim), getattr(np, f"atleast_{_ndim}d"), S(()), S((3,)), S((2, 3)),
         doc=f"x with {_ndim} or more axes; several tensors give a tuple.")  # fmt: skip
for _name, *_how in (("hstack", 1, 1), ("vstack", 0, 2), ("dstack", 2, 3), ("column_stack", 1, 2, 1)):
    row(_name, _stacked(*_how), getattr(np, _name), S([(2, 3), (2, 3)]), S([(3,), (3,)]), doc=f"Tensors joined as numpy.{_name} does.")


def _repeat_interleave(F: Any, x: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    if axis is None:
        return F.repeat_interleave(F.reshape(x, (-1,)), repeats, 0)
    at = _at("repeat_interleave", axis, x.ndim)
    if not isinstance(repeats, int):
        return F.index_select(x, at, Tensor.from_host(x.queue, np.repeat(np.arange(x.shape[at]), np.asarray(repeats))))
    wide = F.repeat(F.unsqueeze(x, at + 1), [repeats if i == at + 1 else 1 for i in range(x.ndim + 1)])
    return F.reshape(wide, (*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


row("repeat_interleave", _repeat_interleave, lambda x, repeats, axis=None: np.repeat(x, repeats, axis), S((2, 3), repeats=2),
     S((2, 3), repeats=(0, 2), axis=0), doc="Every element (or slice along an axis) repeated, by one number or one for each.")  # fmt: skip


# ---- products


def _plus_product(name: str, product: Callable[..., Any]) -> Callable[..., Any]:
    def call(F: Any, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        made = product(F, a, b)
        made = made if alpha == 1 else F.mul(made, factor_of(name, alpha, made))
        return made if beta == 0 else F.add(x if beta == 1 else F.mul(x, factor_of(name, beta, x, made)), made)

    return call


def _sum_of_products(F: Any, a: Tensor, b: Tensor) -> Tensor:
    products = F.matmul(a, b)
    return F.cast(F.sum(products, 0), products.dtype)


_SUMS: dict[str, tuple[Any, ...]] = {
    "addmm": (lambda F, a, b: F.matmul(a, b), np.matmul, (2, 4), (2, 3), (3, 4), "a @ b"),
    "addmv": (lambda F, a, b: F.matmul(a, b), np.matmul, (2,), (2, 3), (3,), "a @ b"),
    "baddbmm": (lambda F, a, b: F.matmul(a, b), np.matmul, (2, 2, 4), (2, 2, 3), (2, 3, 4), "a @ b"),
    "addbmm": (_sum_of_products, lambda a, b: (a @ b).sum(0), (2, 4), (3, 2, 3), (3, 3, 4), "sum(a @ b, 0)"),
    "addr": (lambda F, a, b: F.outer(a, b), np.outer, (2, 3), (2,), (3,), "outer(a, b)"),
}  # fmt: skip
for _name, (_product, _ref, *_shapes, _text) in _SUMS.items():
    row(_name, _plus_product(_name, _product), lambda x, a, b, beta=1, alpha=1, ref=_ref: beta * x + alpha * ref(a, b),
         S(*_shapes, beta=0.5, alpha=2.0), amp="half", doc=f"beta * x + alpha * ({_text}).")  # fmt: skip


def _cdist(F: Any, a: Tensor, b: Tensor, p: float = 2.0) -> Tensor:
    launch.check_dtype("cdist", a, name="a")
    return F.norm(F.sub(F.unsqueeze(a, -2), F.unsqueeze(b, -3)), p, -1)


row("mv", lambda F, a, b: F.matmul(_checked_tensor("mv", a, 2, 2, "a"), _checked_tensor("mv", b, 1, 1, "b")), np.matmul, S((2, 3), (3,)),
     amp="half", doc="A matrix times a vector.", errors=[(S((3,), (3,)), r"\[mv\] a must have 2 dimensions, got 1")])  # fmt: skip
row("dot", lambda F, a, b: F.matmul(_checked_tensor("dot", a, 1, 1, "a"), _checked_tensor("dot", b, 1, 1, "b")), np.dot, S((5,), (5,)),
     amp="half", doc="The inner product of two vectors.", errors=[(S((2, 3), (3,)), r"\[dot\] a must have 1 dimension, got")])  # fmt: skip
row("inner", lambda F, a, b: F.tensordot(a, b, ([-1], [-1])) if a.ndim and b.ndim else F.mul(a, b), np.inner, S((2, 3), (4, 3)),
     amp="half", doc="Sum of products over the last axes of both.")  # fmt: skip
row("cdist", _cdist,
     lambda a, b, p=2.0: np.linalg.norm(a[..., :, None, :] - b[..., None, :, :], p, -1), S((4, 3), (5, 3)), amp="float", tol=2,
     doc="The p-norm of the difference of every row of a and every row of b.")  # fmt: skip


@composite(ref=lambda a, b, dims=2: np.tensordot(a, b, dims),
           samples=[S((2, 3, 4), (3, 4, 5)), S((2, 3), (4, 3), dims=([1], [1])), S((2,), (3,), dims=0)], amp="half",
           errors=[(S((2, 3), (3, 2)), r"\[tensordot\] contracted sizes must match")])  # fmt: skip
def tensordot(F: Any, a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Sum of products over the last ``dims`` axes of a and the first ``dims`` of b, or over two lists of axes."""
    a, b = launch.as_tensors("tensordot", a, b)
    pair = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left, right = ([_at("tensordot", i, t.ndim) for i in axes] for t, axes in zip((a, b), pair, strict=True))
    if [a.shape[i] for i in left] != [b.shape[i] for i in right]:
        raise ShapeError(message("tensordot", "contracted sizes must match", dims=dims, **{"a.shape": a.shape, "b.shape": b.shape}))
    rest = [i for i in range(a.ndim) if i not in left], [i for i in range(b.ndim) if i not in right]
    depth = math.prod(a.shape[i] for i in left)
    rows = F.reshape(F.reorder(a, [*rest[0], *left]), (math.prod(a.shape[i] for i in rest[0]), depth))
    columns = F.reshape(F.reorder(b, [*right, *rest[1]]), (depth, math.prod(b.shape[i] for i in rest[1])))
    return F.reshape(F.matmul(rows, columns), (*(a.shape[i] for i in rest[0]), *(b.shape[i] for i in rest[1])))


@composite(ref=np.kron, samples=[S((2, 3), (3, 2)), S((2,), (2, 3))])
def kron(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product."""
    a, b = launch.as_tensors("kron", a, b)
    ndim = max(a.ndim, b.ndim)
    left, right = ((1,) * (ndim - t.ndim) + t.shape for t in (a, b))
    wide = F.mul(F.reshape(a, [n for size in left for n in (size, 1)]), F.reshape(b, [n for size in right for n in (1, size)]))
    return F.reshape(wide, tuple(m * n for m, n in zip(left, right, strict=True)))


# ---- arithmetic and scans


def _logit(F: Any, x: Tensor, eps: float | None = None) -> Tensor:
    return F.logit_values(x if eps is None else F.clamp(x, float(eps), 1.0 - eps))


def _in_float_of(F: Any, x: Tensor | float, values: Tensor | float) -> Tensor | float:
    """Return a tensor of integers in the floating-point dtype of ``x``, which they do not promote."""
    whole = isinstance(values, Tensor) and not dtypes.DTYPES[values.dtype].is_float
    return F.cast(values, x.dtype) if whole and isinstance(x, Tensor) and dtypes.DTYPES[x.dtype].is_float else values


def _ldexp(F: Any, a: Tensor, b: Tensor) -> Tensor:
    powers: Any = _in_float_of(F, a, b)
    kind = powers.dtype if dtypes.DTYPES[powers.dtype].is_float else "float32"
    most = {"float16": 15.0, "float64": 1023.0}.get(kind, 126.0)
    for _ in range(3):  # 2**b may be 0 or infinite where a * 2**b is not; NumPy rounds 2**127 up
        part = F.clamp(powers, 1.0 - most, most)
        a, powers = F.mul(a, F.exp2(part)), F.sub(powers, part)
    return a


def _rsub(F: Any, a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    if alpha == 1:
        return F.sub(b, a)
    kind = common_dtype([x for x in (a, b) if isinstance(x, Tensor | int | float)])  # of the result: alpha * a may not fit in that of a
    return F.sub(b, F.mul(F.cast(a, kind.name), factor_of("rsub", alpha, a, b)))


def largest(dtype: str) -> float:
    """Return the largest finite number of a floating-point dtype."""
    return 3.3895313892515355e38 if dtype == "bfloat16" else float(np.finfo(dtypes.DTYPES[dtype].host).max)


def _nan_to_num(F: Any, x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    if not dtypes.DTYPES[_checked_tensor("nan_to_num", x).dtype].is_float:
        return F.clone(x)
    most = largest(x.dtype)
    return F.nan_to_num_values(x, float(nan), most if posinf is None else float(posinf), -most if neginf is None else float(neginf))


def _isclose(F: Any, a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    off = F.sub(F.mul(F.maximum(a, b), 1), F.minimum(a, b))  # of bools an integer; below 0 if it does not fit in the dtype
    near = F.logical_and(F.ge(off, 0), F.le(off, F.add(F.abs(F.mul(b, float(rtol))), atol)))
    close = F.logical_or(F.eq(a, b), F.logical_and(F.isfinite(off), near))
    return F.logical_or(close, F.logical_and(F.isnan(a), F.isnan(b))) if equal_nan else close


row("deg2rad", lambda F, x: F.mul(x, math.pi / 180), np.deg2rad, S((5,)), doc="Degrees to radians.")
row("rad2deg", lambda F, x: F.mul(x, 180 / math.pi), np.rad2deg, S((5,)), doc="Radians to degrees.")
row("frac", lambda F, x: F.sub(x, F.trunc(x)), lambda x: x - np.trunc(x), S((5,), low=2.1, high=2.9), doc="x - trunc(x).")
row("ldexp", _ldexp, lambda a, b: a * np.exp2(b), S((5,), (5,)), doc="a * 2**b.")
row("rsub", _rsub, lambda a, b, alpha=1: b - alpha * a, S((3,), (3,)), S((3,), (3,), alpha=2), doc="b - alpha * a.")  # fmt: skip
row("logit", _logit, lambda x, eps=None: np.log(x / (1 - x)), S((7,), low=0.1, high=0.9), amp="float",
     doc="log(x / (1 - x)); with eps, of x clamped between eps and 1 - eps.")  # fmt: skip
row("nan_to_num", _nan_to_num, lambda x, nan=0.0, posinf=None, neginf=None: np.nan_to_num(x, True, nan, posinf, neginf),
     S(np.array([1.0, np.nan, np.inf, -np.inf], np.float32), nan=2.0, posinf=5.0, neginf=-5.0),
     doc="x with NaN and infinities replaced by numbers: by default 0, and the largest and least finite number.")  # fmt: skip
_CLOSE = np.array([1.0, 2.0, np.nan, np.inf], np.float32)
row("isclose", _isclose, np.isclose, S(_CLOSE, _CLOSE + np.array([0, 0.5, 0, 0], np.float32), equal_nan=True),
     doc="Whether |a - b| <= atol + rtol * |b|. Equal infinities are close; NaN is close to NaN only with ``equal_nan``.")  # fmt: skip


def _scan(F: Any, name: str, x: Tensor, axis: int, combine: Callable[..., Any], neutral: float) -> Tensor:
    """Return running results of ``combine`` along an axis, in log n calls. ``neutral`` is the neutral element of ``combine``."""
    x = _checked_tensor(name, x)
    at, step = _at(name, axis, x.ndim), 1
    while x.shape and step < x.shape[at]:
        first = Tensor.full((*x.shape[:at], step, *x.shape[at + 1 :]), neutral, x.dtype, queue=x.queue)
        x = combine(x, F.cat([first, F.narrow(x, at, 0, x.shape[at] - step)], at))
        step *= 2
    return F.clone(x) if step == 1 else x


def _cumprod(F: Any, x: Tensor, axis: int) -> Tensor:
    whole = not dtypes.DTYPES[_checked_tensor("cumprod", x).dtype].is_float
    return _scan(F, "cumprod", F.cast(x, "int64") if whole else x, axis, F.mul, 1)


row("cumprod", _cumprod, lambda x, axis: np.cumprod(x, axis), S((2, 5, 3), axis=1), amp="float", tol=2,
     doc="The product of every element and all before it along an axis; integers give int64.")  # fmt: skip
row("logcumsumexp", lambda F, x, axis: _scan(F, "logcumsumexp", x, axis, F.logaddexp, -math.inf),
     lambda x, axis: np.logaddexp.accumulate(x, axis), S((2, 5), axis=-1), amp="float", tol=2,
     doc="log of the sum of exp of every element and all before it along an axis.")  # fmt: skip


@composite(ref=lambda x, n=1, axis=-1: np.diff(x, n, axis), samples=[S((2, 5)), S((5, 2), n=2, axis=0)])
def diff(F: Any, x: Tensor, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighboring elements along an axis, taken ``n`` times. ``prepend`` and ``append`` are joined to x first."""
    x = _checked_tensor("diff", x, 1)
    if n < 0:
        raise ValueError(message("diff", "n must not be negative", n=n))
    at = _at("diff", axis, x.ndim)
    if n and (prepend is not None or append is not None):
        x = F.cat([part for part in (prepend, x, append) if part is not None], at)
    x = x if n else F.clone(x)
    for _ in range(n):
        left = max(x.shape[at] - 1, 0)
        later, earlier = F.narrow(x, at, x.shape[at] - left, left), F.narrow(x, at, 0, left)
        x = F.ne(later, earlier) if x.dtype == "bool" else F.sub(later, earlier)
    return x


# ---- order and counts


def _with_mean(name: str) -> Callable[..., Any]:
    def call(F: Any, x: Tensor, axis: Any = None, *, keepdims: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
        return getattr(F, name)(x, axis, keepdims=keepdims, correction=correction), F.mean(x, axis, keepdims=keepdims)

    return call


_GAPS = S(np.array([[1.0, np.nan, 3.0], [4.0, 5.0, np.nan]], np.float32), axis=0)
for _name, _ref in (("std", np.std), ("var", np.var)):
    row(f"{_name}_mean", _with_mean(_name), lambda x, axis, ref=_ref: (ref(x, axis, ddof=1), np.mean(x, axis)),
        S((4, 3), axis=0), amp="float", doc=f"{_name} and mean over axes.")  # fmt: skip
row("aminmax", lambda F, x, *, axis=None, keepdims=False: Extremes(F.amin(x, axis, keepdims=keepdims), F.amax(x, axis, keepdims=keepdims)),
     lambda x, axis=None: (np.min(x, axis), np.max(x, axis)), S((4, 3), axis=1), doc="Least and largest value, (min, max).")  # fmt: skip
row("nansum", lambda F, x, axis=None, keepdims=False: F.sum(F.masked_fill(x, F.isnan(x), 0), axis, keepdims=keepdims), np.nansum, _GAPS,
     amp="float", doc="The sum over axes of the elements that are not NaN.")  # fmt: skip
row("nanmean", lambda F, x, axis=None, keepdims=False:
    F.div(F.nansum(x, axis, keepdims), F.sum(F.logical_not(F.isnan(x)), axis, keepdims=keepdims)), np.nanmean, _GAPS, amp="float",
    doc="The mean over axes of the elements that are not NaN.")  # fmt: skip
row("msort", lambda F, x: F.sort(x, 0).values, lambda x: np.sort(x, 0), S((4, 3)), doc="The values in order along the first axis.")


@composite(ref="numpy", samples=[S((4, 3), k=2), S((4, 3), k=4, axis=0, keepdims=True)],
           errors=[(S((4, 3), k=4), r"\[kthvalue\] k must be from 1 to 3, the size of the axis; k=4")])  # fmt: skip
def kthvalue(F: Any, x: Tensor, k: int, axis: int = -1, keepdims: bool = False) -> Ordered:
    """The k-th smallest value along an axis, counted from 1, and its index; NaN counts as the largest."""
    x = _checked_tensor("kthvalue", x)
    at = _at("kthvalue", axis, x.ndim)
    n = x.shape[at] if x.shape else 1
    if not 1 <= k <= n:
        raise ShapeError(message("kthvalue", f"k must be from 1 to {n}, the size of the axis", k=k, axis=axis, **{"x.shape": x.shape}))
    order = F.narrow(F.argsort(x, at), at, k - 1, 1) if x.shape else Tensor.zeros((), "int64", queue=x.queue)
    return ordered(F, x, at, order, keepdims)


@composite(ref="numpy", samples=[S((4, 3)), S((4, 3), axis=0), S((2, 5), axis=-1, keepdims=True)],
           errors=[(S((0,)), r"\[median\] x must not be empty")])  # fmt: skip
def median(F: Any, x: Tensor, axis: int | None = None, keepdims: bool = False) -> Any:
    """Return the median (the lower one of an even number of values); with an axis also its index, as in torch. Any NaN gives NaN."""
    x = _checked_tensor("median", x)
    is_float = dtypes.DTYPES[x.dtype].is_float
    if axis is None:
        middle = F.median(F.reshape(x, (-1,)), 0).values
        if not is_float:
            return middle
        return F.amax(F.where(F.logical_or(F.lt(x, middle), F.gt(x, middle)), -math.inf, x))  # shares the gradient of ties
    at = _at("median", axis, x.ndim)
    if not x.size:
        raise ShapeError(message("median", "x must not be empty", axis=axis, **{"x.shape": x.shape}))
    index = F.kthvalue(x, ((x.shape[at] if x.shape else 1) + 1) // 2, at, True).indices
    if is_float:
        missing = F.isnan(x)
        index = F.where(F.any(missing, at, keepdims=True), F.argmax(F.cast(missing, "int32"), at, True), index)
    return ordered(F, x, at, index, keepdims)


@composite(ref=lambda x, q, axis=None, interpolation="linear", **keep: np.quantile(x, q, axis, method=interpolation, **keep),
           samples=[S((4, 3), q=0.3), S((4, 3), q=(0.0, 0.6, 1.0), axis=0), S((5,), q=0.4, interpolation="lower", axis=0, keepdims=True)],
           amp="float", errors=[(S((3,), q=1.5), r"\[quantile\] q must be between 0 and 1; q=1\.5"),
                                (S((3,), q=0.5, interpolation="cubic"), r"\[quantile\] interpolation must be one of")])  # fmt: skip
def quantile(F: Any, x: Tensor, q: Any, axis: int | None = None, keepdims: bool = False, *, interpolation: str = "linear") -> Tensor:
    """The quantiles ``q`` along an axis, or of all values. ``q`` is a number or a list; a list becomes the first axis of the result."""
    x = _checked_tensor("quantile", x)
    if isinstance(q, Tensor) and q.requires_grad:
        raise TypeError(message("quantile", "q must not require a gradient: its values are read on the host", "detach() it"))
    wanted = np.asarray(q, np.float64)
    if ((wanted < 0) | (wanted > 1)).any():
        raise ShapeError(message("quantile", "q must be between 0 and 1", q=q))
    whole = x.shape
    at = 0 if axis is None else _at("quantile", axis, max(x.ndim, 1))
    x = F.reshape(x, (-1,)) if axis is None or not x.ndim else x
    places = np.atleast_1d(wanted) * (x.shape[at] - 1)
    low, high = np.floor(places), np.ceil(places)
    forms = {"linear": places, "lower": low, "higher": high, "midpoint": (low + high) / 2, "nearest": np.rint(places)}
    if interpolation not in forms:
        raise ValueError(message("quantile", f"interpolation must be one of {', '.join(forms)}", interpolation=repr(interpolation)))
    ordered, side = F.sort(x, at).values, (-1, *(1,) * (x.ndim - 1 - at))
    low, high, part = np.floor(forms[interpolation]), np.ceil(forms[interpolation]), np.modf(forms[interpolation])[0]
    left, right = (F.index_select(ordered, at, Tensor.from_host(x.queue, ends.astype(np.int64))) for ends in (low, high))
    weight = F.reshape(Tensor.from_host(x.queue, part, x.dtype), side)
    made = F.where(F.eq(weight, 0), left, F.lerp(left, right, weight))  # an infinite value is not interpolated with itself
    last = F.narrow(ordered, at, x.shape[at] - 1, 1)  # NaN if there is any
    made = F.moveaxis(F.where(F.isnan(last), last, made), at, 0)
    if keepdims:
        kept = (1,) * len(whole) if axis is None or not whole else (*whole[:at], 1, *whole[at + 1 :])
        made = F.reshape(made, (len(places), *kept))
    return made if wanted.ndim else F.squeeze(made, 0)


@composite(ref=lambda x, weights=None, minlength=0: np.bincount(x, weights, minlength), inputs=("x",),
           samples=[S((9,), dtypes="int64", low=0, high=5), S((4,), dtypes="int32", low=0, high=2, minlength=6)],
           errors=[(S((3,)), r"\[bincount\] x must be a vector of integers")])  # fmt: skip
def bincount(F: Any, x: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    """Count how often each of 0, 1, ... occurs in a vector of integers, or sum the ``weights`` of its occurrences. Waits for the device.

    Sums are float64, those of float32 weights float32.
    """
    x, weights = launch.as_tensors("bincount", x, weights)
    if x.ndim != 1 or dtypes.DTYPES[x.dtype].is_float or minlength < 0:
        what, seen = "x must be a vector of integers, and minlength at least 0", {"x.shape": x.shape, "minlength": minlength}
        raise ShapeError(message("bincount", what, dtype=x.dtype, **seen))
    length = max(minlength, int(F.amax(x)) + 1 if x.size else 0)
    if weights is None:
        weights = Tensor.ones(x.shape, "int64", queue=x.queue)
    elif weights.dtype != "float32":
        weights = F.cast(weights, "float64")
    return F.index_add(Tensor.zeros((length,), weights.dtype, queue=x.queue), 0, x, weights)


@op(vjp=None, ref=lambda x, **how: np.unique(x), samples=[S((9,), dtypes="int64", low=0, high=5), S((2, 3))], at_once=True)
def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, axis: int | None = None) -> Any:
    """Return the distinct values and, if requested, the position of every element among them and the counts.

    Computed on the host. With ``axis``, slices along it are compared. Values are always in order; ``sorted`` is ignored. Every NaN is
    distinct, as in torch.
    """
    x = _checked_tensor("unique", x)
    axis = None if axis is None else _at("unique", axis, x.ndim)
    values, inverse, counts = np.unique(x.to_host(), return_inverse=True, return_counts=True, axis=axis, equal_nan=False)
    inverse = np.reshape(inverse, x.shape if axis is None else -1)
    wanted = [inverse] * return_inverse + [counts] * return_counts
    found = Tensor.from_host(x.queue, values, x.dtype)
    return (found, *(Tensor.from_host(x.queue, part) for part in wanted)) if wanted else found


@op(vjp=None, ref=lambda x, **how: x[np.concatenate([[True], np.diff(x) != 0])],
    samples=[S((9,), dtypes="int64", low=0, high=2)], at_once=True)  # fmt: skip
def unique_consecutive(x: Tensor, return_inverse: bool = False, return_counts: bool = False, axis: int | None = None) -> Any:
    """Return x without repetitions of the element before and, if requested, the place of every element and the counts.

    Computed on the host. With ``axis``, slices along it are compared, else the elements of the flattened x.
    """
    x = _checked_tensor("unique_consecutive", x)
    values = x.to_host()
    along = values.reshape(-1) if axis is None else np.moveaxis(values, _at("unique_consecutive", axis, x.ndim), 0)
    differs = (along[1:] != along[:-1]).reshape(max(len(along) - 1, 0), math.prod(along.shape[1:])).any(1)
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(along), 1), bool), differs]))
    inverse = np.searchsorted(starts, np.arange(len(along)), side="right") - 1
    found = along[starts] if axis is None else np.moveaxis(along[starts], 0, axis)
    wanted = [inverse.reshape(x.shape if axis is None else -1)] * return_inverse + [np.diff(starts, append=len(along))] * return_counts
    first = Tensor.from_host(x.queue, np.ascontiguousarray(found), x.dtype)
    return (first, *(Tensor.from_host(x.queue, part) for part in wanted)) if wanted else first


# ---- reads and writes at indices


def _written_copy(x: np.ndarray, index: Any, value: Any) -> np.ndarray:
    out = x.copy()
    out[index] = value
    return out


def _masked_select(F: Any, x: Tensor, mask: Tensor) -> Tensor:
    shape = common_shape("masked_select", (x.shape, mask.shape), ("x", "mask"))
    return F.getitem(F.expand(x, shape), F.expand(mask, shape))


def _take_along_dim(F: Any, x: Tensor, indices: Tensor, axis: int | None = None) -> Tensor:
    if axis is None:
        return F.take(x, F.reshape(indices, (-1,)))
    at = _at("take_along_dim", axis, x.ndim)
    if indices.ndim != x.ndim:
        what = "x and indices must have the same number of dimensions"
        raise ShapeError(message("take_along_dim", what, **{"x.shape": x.shape, "indices.shape": indices.shape}))
    around = [(*t.shape[:at], 1, *t.shape[at + 1 :]) for t in (x, indices)]
    shape = common_shape("take_along_dim", around, ("x without the axis", "indices without the axis"))
    x, indices = (F.expand(t, (*shape[:at], t.shape[at], *shape[at + 1 :])) for t in (x, indices))
    return F.gather(x, at, indices)


def _index_fill(F: Any, x: Tensor, axis: int, index: Any, value: Any) -> Tensor:
    """Fill by a mask: the gradient of ``value`` counts a repeated index once."""
    at = _at("index_fill", axis, x.ndim)
    chosen = F.setitem(Tensor.zeros(x.shape[at : at + 1], "bool", queue=x.queue), index, True)
    return F.masked_fill(x, F.reshape(chosen, (-1, *(1,) * (x.ndim - 1 - at))), value)


def grid_of(axis: int, index: Any) -> tuple[Any, ...]:
    """Return the index tuple of ``scatter``: ``index`` along ``axis``, and each element's own position along the other axes."""
    ndim = len(index.shape)
    return tuple(index if i == axis % ndim else np.arange(n).reshape((-1, *(1,) * (ndim - 1 - i))) for i, n in enumerate(index.shape))


def _scatter(F: Any, x: Tensor, axis: int, index: Any, src: Any, *, reduce: str | None = None) -> Tensor:
    index, src = launch.as_tensors("scatter", x, index)[1], as_like(x, src)
    _at("scatter", axis, x.ndim)
    if reduce is not None:
        if reduce not in ("add", "multiply"):
            raise ValueError(message("scatter", 'reduce must be "add" or "multiply"', reduce=repr(reduce)))
        src = src if np.ndim(src) else Tensor.full(index.shape, float(src), x.dtype, queue=x.queue)
        return F.scatter_reduce(x, axis, index, src, "sum" if reduce == "add" else "prod")
    return F.setitem(F.clone(x), grid_of(axis, index), F.getitem(src, tuple(slice(0, n) for n in index.shape)) if np.ndim(src) else src)


def _index_put(F: Any, x: Tensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    if not accumulate:
        return F.setitem(F.clone(x), tuple(indices), values)
    parts: list[Any] = []
    for index in indices:
        truth = index.dtype == "bool" if isinstance(index, Tensor) else np.asarray(index).dtype == bool
        parts += F.unbind(F.nonzero(index), 1) if truth else [index]
    lead, rest = x.shape[: len(parts)], x.shape[len(parts) :]
    flat = joined_index("index_put", list(zip(parts, lead, strict=True)), x)
    spread = F.expand(values if isinstance(values, Tensor) else Tensor.from_host(x.queue, values, x.dtype), (*flat.shape, *rest))
    rows = F.reshape(x, (math.prod(lead), *rest))
    return F.reshape(F.index_add(rows, 0, F.reshape(flat, (flat.size,)), F.reshape(spread, (flat.size, *rest))), x.shape)


_INDEX_SAMPLE: dict[str, Any] = {"dtypes": ("float32", "int64"), "low": 0, "high": 3}
row("masked_select", _masked_select, lambda x, mask: x[mask], S((3, 4), (3, 4), dtypes=("float32", "bool")),
     doc="The elements where the mask is true, as a vector. Waits for the device: their number determines the shape.")  # fmt: skip
row("take_along_dim", _take_along_dim, lambda x, indices, axis: np.take_along_axis(x, indices, axis),
     S((3, 4), (1, 4), **_INDEX_SAMPLE, axis=0), S((3, 4), (3, 2), **_INDEX_SAMPLE, axis=1),
     doc="The elements at ``indices`` along an axis, or of the flattened x without one; other axes broadcast.")  # fmt: skip
row("index_fill", _index_fill,
     lambda x, axis, index, value: _written_copy(x, index, value), S((4, 3), axis=0, index=np.array([2, 0]), value=5.0),
     doc="A copy of x with ``value`` in the slices at ``index`` along an axis.")  # fmt: skip
row("index_copy", lambda F, x, axis, index, src: F.setitem(F.clone(x), _rows(axis, x.ndim, index), as_like(x, src)),
     lambda x, axis, index, src: _written_copy(x, index, src), S((4, 3), axis=0, index=np.array([2, 0]), src=np.ones((2, 3), np.float32)),
     doc="A copy of x with the slices of ``src`` at ``index`` along an axis.")  # fmt: skip
row("index_put", _index_put, "numpy", S((4, 3), indices=(np.array([2, 0]), np.array([1, 1])), values=7.0),
     S((4, 3), indices=(np.array([2, 0, 2]),), values=np.ones(3, np.float32), accumulate=True),
     doc="A copy of x with ``values`` at ``x[indices]``; ``accumulate`` adds them instead, once per repeated index.")  # fmt: skip
row("scatter", _scatter, lambda x, axis, index, src: _written_copy(x, grid_of(axis, index), src),
     S((3, 4), axis=1, index=np.array([[0, 2], [3, 1]]), src=np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)),
     S((3, 4), axis=0, index=np.array([[2, 0, 1]]), src=9.0),
     errors=[(S((3, 4), axis=0, index=np.array([[2]]), src=9.0, reduce="max"), r"\[scatter\] reduce must be \"add\" or \"multiply\"")],
     doc="A copy of x with ``src`` (a tensor or a number) at ``index`` along an axis; for a repeated index the last value stays. "
         "``reduce`` adds or multiplies instead, by scatter_reduce.")  # fmt: skip
