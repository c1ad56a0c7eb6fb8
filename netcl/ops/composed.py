"""Ops made of other ops under torch's names: diagonals, rearrangements, products, arithmetic, scans.

Each is one row; its gradient is that of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import launch
from netcl.ops.movement import Sizes, sizes_of
from netcl.ops.registry import S, composite

Axis = int | None
_LN2 = math.log(2)


def _tensor(name: str, x: Any, least: int = 0, most: int = 64) -> Tensor:
    (made,) = launch.as_tensors(name, x)
    if not least <= made.ndim <= most:
        count = f"{least}" if least == most else f"at least {least}" if most == 64 else f"{least} or {most}"
        raise ShapeError(message(name, f"x must have {count} axes, got {made.ndim}", **{"x.shape": made.shape}))
    return made


def _at(name: str, axis: Any, ndim: int) -> int:
    return launch.check_axis(name, axis, ndim)


def _part(F: Any, x: Tensor, axis: int, start: int | None, stop: int | None = None) -> Tensor:
    return F.getitem(x, (*[slice(None)] * axis, slice(start, stop)))


# ---- diagonals


@composite(
    ref=lambda x, offset=0, dim1=0, dim2=1: np.diagonal(x, offset, dim1, dim2),
    samples=[S((3, 5)), S((4, 2, 3), offset=-1, dim1=0, dim2=2), S((3, 3), offset=4)],
    errors=[(S((3, 5), dim1=0, dim2=-2), r"\[diagonal\] dim1 and dim2 must be different axes; dim1=0, dim2=-2")],
)
def diagonal(F: Any, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal of two axes as a last axis; a view."""
    x = _tensor("diagonal", x, 2)
    a, b = _at("diagonal", dim1, x.ndim), _at("diagonal", dim2, x.ndim)
    if a == b:
        raise ShapeError(message("diagonal", "dim1 and dim2 must be different axes", dim1=dim1, dim2=dim2))
    moved = F.moveaxis(x, (a, b), (-2, -1))
    *lead, rows, columns = moved.shape
    n = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    first = max(offset, 0) - min(offset, 0) * columns if n else 0
    flat = F.reshape(moved, (*lead, rows * columns))
    return F.strided_slice(flat, (*[0] * len(lead), first), (*lead, n), (*[1] * len(lead), columns + 1))


def _embed_ref(x, offset=0, dim1=-2, dim2=-1):
    n = x.shape[-1] + abs(offset)
    out = np.zeros((*x.shape[:-1], n, n), x.dtype)
    i = np.arange(x.shape[-1])
    out[..., i - min(offset, 0), i + max(offset, 0)] = x
    return np.moveaxis(out, (-2, -1), (dim1, dim2))


@composite(ref=_embed_ref, samples=[S((3,)), S((2, 3), offset=-1), S((2, 3), offset=2, dim1=0, dim2=2)])
def diag_embed(F: Any, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices with the last axis of ``x`` on a diagonal and zeros elsewhere."""
    x = _tensor("diag_embed", x, 1)
    *lead, n = x.shape
    size = n + abs(offset)
    first = max(offset, 0) - min(offset, 0) * size
    flat = F.strided_unslice(x, (*lead, size * size), (*[0] * len(lead), first if n else 0), (*[1] * len(lead), size + 1))
    return F.moveaxis(F.reshape(flat, (*lead, size, size)), (-2, -1), (dim1, dim2))


@composite(ref=lambda x, diagonal=0: np.diag(x, diagonal), samples=[S((3,)), S((3, 5), diagonal=1)],
           errors=[(S((2, 2, 2)), r"\[diag\] x must have 1 or 2 axes, got 3")])  # fmt: skip
def diag(F: Any, x: Tensor, diagonal: int = 0) -> Tensor:
    """The diagonal of a matrix, or a matrix with a vector on its diagonal."""
    x = _tensor("diag", x, 1, 2)
    return F.diagonal(x, diagonal) if x.ndim == 2 else F.diag_embed(x, diagonal)


@composite(ref=lambda x, offset=0: np.diagflat(x, offset), samples=[S((2, 2), offset=1)])
def diagflat(F: Any, x: Tensor, offset: int = 0) -> Tensor:
    """A matrix with all elements of ``x`` on a diagonal."""
    return F.diag_embed(F.reshape(_tensor("diagflat", x), (-1,)), offset)


@composite(ref=np.trace, samples=[S((3, 5))], errors=[(S((2, 2, 2)), r"\[trace\] x must have 2 axes, got 3")])
def trace(F: Any, x: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix."""
    return F.sum(F.diagonal(_tensor("trace", x, 2, 2)))


# ---- rearrangements


@composite(ref=lambda x, source, destination: np.moveaxis(x, source, destination),
           samples=[S((2, 3, 4), source=0, destination=-1), S((2, 3, 4), source=(0, 1), destination=(-1, 0))],
           errors=[(S((2, 3), source=(0, 1), destination=0), r"\[moveaxis\] source and destination must name as many axes")])  # fmt: skip
def moveaxis(F: Any, x: Tensor, source: Sizes, destination: Sizes) -> Tensor:
    """Axes moved to other places; the others keep their order. A view."""
    x = _tensor("moveaxis", x)
    pairs = [[_at("moveaxis", axis, x.ndim) for axis in sizes_of(axes)] for axes in (source, destination)]
    if len({*pairs[0]}) != len(pairs[0]) or len({*pairs[1]}) != len(pairs[0]) or len(pairs[1]) != len(pairs[0]):
        what = "source and destination must name as many axes, each once"
        raise ShapeError(message("moveaxis", what, source=source, destination=destination))
    order = [axis for axis in range(x.ndim) if axis not in pairs[0]]
    for to, axis in sorted(zip(pairs[1], pairs[0], strict=True)):
        order.insert(to, axis)
    return F.reorder(x, order)


@composite(ref=lambda x, k=1, dims=(0, 1): np.rot90(x, k, dims), samples=[S((2, 3)), S((2, 3, 4), k=-1, dims=(1, 2)), S((2, 3), k=2)])
def rot90(F: Any, x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """The plane of two axes turned ``k`` times by 90 degrees, from the first axis towards the second."""
    x, (a, b) = _tensor("rot90", x, 2), dims
    turned = {0: F.clone, 1: lambda t: F.transpose(F.flip(t, b), a, b), 2: lambda t: F.flip(t, (a, b)),
              3: lambda t: F.flip(F.transpose(t, a, b), b)}  # fmt: skip
    return turned[k % 4](x)


@composite(ref=np.fliplr, samples=[S((2, 3))])
def fliplr(F: Any, x: Tensor) -> Tensor:
    """The second axis reversed."""
    return F.flip(_tensor("fliplr", x, 2), 1)


@composite(ref=np.flipud, samples=[S((3, 2))])
def flipud(F: Any, x: Tensor) -> Tensor:
    """The first axis reversed."""
    return F.flip(_tensor("flipud", x, 1), 0)


@composite(ref=np.ravel, samples=[S((2, 3))])
def ravel(F: Any, x: Tensor) -> Tensor:
    """All elements along one axis; shares memory."""
    return F.reshape(x, (-1,))


@composite(
    ref=lambda x, axis, sizes: x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]), samples=[S((2, 6, 3), axis=1, sizes=(2, -1))]
)
def unflatten(F: Any, x: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """One axis divided into several; shares memory. One size may be -1."""
    x = _tensor("unflatten", x, 1)
    at = _at("unflatten", axis, x.ndim)
    known = -math.prod(sizes)
    whole = tuple(x.shape[at] // known if n == -1 and known else n for n in sizes)
    return F.reshape(x, (*x.shape[:at], *whole, *x.shape[at + 1 :]))


@composite(ref=lambda x, axis, index: np.take(x, index, axis), samples=[S((2, 3, 4), axis=1, index=-1)])
def select(F: Any, x: Tensor, axis: int, index: int) -> Tensor:
    """One slice along an axis; a view."""
    x = _tensor("select", x, 1)
    return F.getitem(x, (*[slice(None)] * _at("select", axis, x.ndim), index))


def _windows_ref(x, dimension, size, step):
    starts = np.arange(0, x.shape[dimension] - size + 1, step)
    return np.take(np.lib.stride_tricks.sliding_window_view(x, size, dimension), starts, dimension)


@composite(ref=_windows_ref, samples=[S((7,), dimension=0, size=3, step=2), S((2, 6, 3), dimension=1, size=2, step=1)])
def unfold(F: Any, x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of ``size`` elements along an axis, ``step`` apart, as a last axis (``torch.Tensor.unfold``)."""
    x = _tensor("unfold", x, 1)
    at = _at("unfold", dimension, x.ndim)
    if not 0 < size <= x.shape[at] or step < 1:
        raise ShapeError(
            message("unfold", "size must fit into the axis and step be positive", size=size, step=step, **{"x.shape": x.shape})
        )
    starts = np.arange(0, x.shape[at] - size + 1, step)
    places = Tensor.from_host(x.queue, (starts[:, None] + np.arange(size)).reshape(-1))
    windows = F.reshape(F.index_select(x, at, places), (*x.shape[:at], len(starts), size, *x.shape[at + 1 :]))
    return F.moveaxis(windows, at + 1, -1)


def _split_ref(x, indices_or_sections, axis=0):
    return tuple(np.array_split(x, indices_or_sections, axis))


@composite(ref=_split_ref, samples=[S((7, 2), indices_or_sections=3), S((2, 7), indices_or_sections=(2, 5), axis=1)])
def tensor_split(F: Any, x: Tensor, indices_or_sections: Sizes, axis: int = 0) -> tuple[Tensor, ...]:
    """Parts along an axis, of nearly equal sizes or ending at the given indices, as ``numpy.array_split``."""
    x = _tensor("tensor_split", x, 1)
    at = _at("tensor_split", axis, x.ndim)
    ends = [len(part) for part in np.array_split(np.empty(x.shape[at], np.uint8), indices_or_sections)]
    return F.split(x, ends, at)


def _register_splits(name: str, axis: int) -> None:
    def call(F: Any, x: Tensor, indices_or_sections: Sizes) -> tuple[Tensor, ...]:
        x = _tensor(name, x, 1 if name == "hsplit" else axis + 1)
        return F.tensor_split(x, indices_or_sections, 0 if x.ndim == 1 else axis)

    composite(ref=lambda x, indices_or_sections: _split_ref(x, indices_or_sections, axis), name=name, inputs=("x",),
              samples=[S((4, 4, 4), indices_or_sections=2)], doc=f"Parts along axis {axis}; see tensor_split.")(call)  # fmt: skip


for _name, _axis in {"vsplit": 0, "hsplit": 1, "dsplit": 2}.items():
    _register_splits(_name, _axis)


def _at_least(x: Any, ndim: int) -> tuple[int, ...]:
    """The shape with new axes as NumPy places them: a vector becomes a row, a matrix the first two of three axes."""
    shape = tuple(x.shape)
    if len(shape) >= ndim:
        return shape
    return (*(1,) * (ndim - len(shape)), *shape) if ndim < 3 or not shape else (1, *shape, 1) if len(shape) == 1 else (*shape, 1)


def _register_at_least(ndim: int) -> None:
    name = f"atleast_{ndim}d"

    def call(F: Any, x: Any, *more: Any) -> Any:
        several = [*x, *more] if isinstance(x, list | tuple) else [x, *more]
        made = tuple(F.reshape(t, _at_least(t, ndim)) for t in launch.as_tensors(name, *several))
        return made if more or isinstance(x, list | tuple) else made[0]

    composite(ref=getattr(np, name), name=name, inputs=("x",), samples=[S(()), S((3,)), S((2, 3))],
              doc=f"x with at least {ndim} axes; of several tensors, each.")(call)  # fmt: skip


for _ndim in (1, 2, 3):
    _register_at_least(_ndim)


def _register_stack(name: str, axis: int, ndim: int, ref: Callable[..., Any]) -> None:
    def call(F: Any, xs: Sequence[Tensor]) -> Tensor:
        parts = launch.as_tensors(name, *xs)
        if name == "column_stack":
            return F.cat([F.reshape(t, (-1, 1)) if t.ndim < 2 else t for t in parts], axis)
        made = [F.reshape(t, _at_least(t, ndim)) for t in parts]
        return F.cat(made, 0 if name == "hstack" and made[0].ndim == 1 else axis)

    composite(ref=ref, name=name, inputs=("xs",), samples=[S([(2, 3), (2, 3)]), S([(3,), (3,)])],
              doc=f"Tensors joined as numpy.{name} does.")(call)  # fmt: skip


for _name, _axis, _ndim in (("hstack", 1, 1), ("vstack", 0, 2), ("dstack", 2, 3), ("column_stack", 1, 2)):
    _register_stack(_name, _axis, _ndim, getattr(np, _name))


def _interleave_ref(x, repeats, axis=None):
    return np.repeat(x, repeats, axis)


@composite(ref=_interleave_ref, samples=[S((2, 3), repeats=2), S((2, 3), repeats=3, axis=1), S((2, 3), repeats=(0, 2), axis=0)])
def repeat_interleave(F: Any, x: Tensor, repeats: Any, axis: Axis = None) -> Tensor:
    """Every element (or slice along an axis) repeated, by one number or by one number each."""
    x = _tensor("repeat_interleave", x)
    if axis is None:
        return F.repeat_interleave(F.reshape(x, (-1,)), repeats, 0)
    at = _at("repeat_interleave", axis, x.ndim)
    if not isinstance(repeats, int):
        return F.index_select(x, at, Tensor.from_host(x.queue, np.repeat(np.arange(x.shape[at]), np.asarray(repeats))))
    wide = F.expand(F.unsqueeze(x, at + 1), (*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return F.reshape(wide, (*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


# ---- products


def _register_sum_of_products(name: str, product: Callable[..., Any], ref: Callable[..., Any], *shapes: Any, doc: str) -> None:
    def call(F: Any, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        made = product(F, a, b)
        made = made if alpha == 1 else F.mul(made, alpha)
        return made if beta == 0 else F.add(x if beta == 1 else F.mul(x, beta), made)

    def reference(x, a, b, beta=1, alpha=1):
        return beta * x + alpha * ref(a, b)

    composite(ref=reference, name=name, samples=[S(*shapes), S(*shapes, beta=0.5, alpha=2.0)], amp="half", doc=doc)(call)


_register_sum_of_products("addmm", lambda F, a, b: F.matmul(a, b), np.matmul, (2, 4), (2, 3), (3, 4), doc="beta * x + alpha * (a @ b).")
_register_sum_of_products("addmv", lambda F, a, b: F.matmul(a, b), np.matmul, (2,), (2, 3), (3,), doc="beta * x + alpha * (a @ b).")
_register_sum_of_products("baddbmm", lambda F, a, b: F.matmul(a, b), np.matmul, (2, 2, 4), (2, 2, 3), (2, 3, 4),
                          doc="beta * x + alpha * (a @ b) for batches of matrices.")  # fmt: skip
_register_sum_of_products("addbmm", lambda F, a, b: F.sum(F.matmul(a, b), 0), lambda a, b: (a @ b).sum(0), (2, 4), (3, 2, 3), (3, 3, 4),
                          doc="beta * x + alpha * the sum of the products of two batches of matrices.")  # fmt: skip
_register_sum_of_products("addr", lambda F, a, b: F.outer(a, b), np.outer, (2, 3), (2,), (3,), doc="beta * x + alpha * outer(a, b).")


@composite(ref=np.matmul, samples=[S((2, 3), (3,))], amp="half", errors=[(S((3,), (3,)), r"\[mv\] x must have 2 axes, got 1")])
def mv(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """A matrix times a vector."""
    return F.matmul(_tensor("mv", a, 2, 2), _tensor("mv", b, 1, 1))


@composite(ref=np.dot, samples=[S((5,), (5,))], amp="half", errors=[(S((2, 3), (3,)), r"\[dot\] x must have 1 axes, got 2")])
def dot(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """The inner product of two vectors."""
    return F.matmul(_tensor("dot", a, 1, 1), _tensor("dot", b, 1, 1))


@composite(ref=lambda a, b, dims=2: np.tensordot(a, b, dims),
           samples=[S((2, 3, 4), (3, 4, 5)), S((2, 3), (4, 3), dims=([1], [1])), S((2,), (3,), dims=0)], amp="half",
           errors=[(S((2, 3), (3, 2)), r"\[tensordot\] shapes do not match")])  # fmt: skip
def tensordot(F: Any, a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Sum of products over the last ``dims`` axes of a and the first of b, or over two lists of axes."""
    a, b = launch.as_tensors("tensordot", a, b)
    pair = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left, right = ([_at("tensordot", i, t.ndim) for i in axes] for t, axes in zip((a, b), pair, strict=True))
    if [a.shape[i] for i in left] != [b.shape[i] for i in right]:
        raise ShapeError(message("tensordot", "shapes do not match", dims=dims, **{"a.shape": a.shape, "b.shape": b.shape}))
    rest = [i for i in range(a.ndim) if i not in left], [i for i in range(b.ndim) if i not in right]
    depth = math.prod(a.shape[i] for i in left)
    rows = F.reshape(F.reorder(a, [*rest[0], *left]), (math.prod(a.shape[i] for i in rest[0]), depth))
    columns = F.reshape(F.reorder(b, [*right, *rest[1]]), (depth, math.prod(b.shape[i] for i in rest[1])))
    return F.reshape(F.matmul(rows, columns), (*(a.shape[i] for i in rest[0]), *(b.shape[i] for i in rest[1])))


@composite(ref=np.inner, samples=[S((2, 3), (4, 3)), S((), (2,))], amp="half")
def inner(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over the last axes of both."""
    a, b = launch.as_tensors("inner", a, b)
    return F.tensordot(a, b, ([-1], [-1])) if a.ndim and b.ndim else F.mul(a, b)


@composite(ref=np.kron, samples=[S((2, 3), (3, 2)), S((2,), (2, 3))])
def kron(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product."""
    a, b = launch.as_tensors("kron", a, b)
    ndim = max(a.ndim, b.ndim)
    left, right = ((1,) * (ndim - t.ndim) + t.shape for t in (a, b))
    wide = F.mul(F.reshape(a, [n for size in left for n in (size, 1)]), F.reshape(b, [n for size in right for n in (1, size)]))
    return F.reshape(wide, tuple(m * n for m, n in zip(left, right, strict=True)))


@composite(ref=lambda a, b, axis=-1: np.cross(a, b, axis=axis), samples=[S((4, 3), (4, 3)), S((3, 2), (3, 2), axis=0)],
           errors=[(S((4, 2), (4, 2)), r"\[cross\] the axis must have 3 elements")])  # fmt: skip
def cross(F: Any, a: Tensor, b: Tensor, axis: int = -1) -> Tensor:
    """The vector product along an axis of three elements."""
    a, b = launch.as_tensors("cross", a, b)
    if a.shape[_at("cross", axis, a.ndim)] != 3:
        raise ShapeError(message("cross", "the axis must have 3 elements", axis=axis, **{"a.shape": a.shape}))
    return F.sub(F.mul(F.roll(a, -1, axis), F.roll(b, -2, axis)), F.mul(F.roll(a, -2, axis), F.roll(b, -1, axis)))


@composite(ref=lambda a, b, p=2.0: np.linalg.norm((a[..., :, None, :] - b[..., None, :, :]), p, -1),
           samples=[S((4, 3), (5, 3)), S((2, 4, 3), (2, 2, 3), p=1.0)], amp="float", tol=2)  # fmt: skip
def cdist(F: Any, a: Tensor, b: Tensor, p: float = 2.0) -> Tensor:
    """The p-norm of the difference of every row of a and every row of b."""
    return F.norm(F.sub(F.unsqueeze(a, -2), F.unsqueeze(b, -3)), p, -1)


@composite(ref=lambda a, b, p=2: np.linalg.norm(np.ravel(a - b), p), samples=[S((2, 3), (2, 3)), S((3,), (3,), p=1)], amp="float")
def dist(F: Any, a: Tensor, b: Tensor, p: float = 2) -> Tensor:
    """The p-norm of a - b."""
    return F.norm(F.sub(a, b), p)


# ---- arithmetic


def _register_simple(name: str, call: Callable[..., Any], ref: Callable[..., Any], *samples: Any, doc: str, **columns: Any) -> None:
    composite(ref=ref, name=name, inputs=("x",) if len(samples[0].shapes) == 1 else ("a", "b"), samples=samples, doc=doc, **columns)(call)


_register_simple("deg2rad", lambda F, x: F.mul(x, math.pi / 180), np.deg2rad, S((5,)), doc="Degrees to radians.")
_register_simple("rad2deg", lambda F, x: F.mul(x, 180 / math.pi), np.rad2deg, S((5,)), doc="Radians to degrees.")
_register_simple("frac", lambda F, x: F.sub(x, F.trunc(x)), lambda x: x - np.trunc(x), S((5,), low=2.1, high=2.9),
                 doc="The fraction of x, with its sign.")  # fmt: skip
_register_simple("ldexp", lambda F, a, b: F.mul(a, F.exp2(b)), lambda a, b: a * np.exp2(b), S((5,), (5,)), doc="a * 2**b.")
_register_simple("logaddexp2", lambda F, a, b: F.div(F.logaddexp(F.mul(a, _LN2), F.mul(b, _LN2)), _LN2), np.logaddexp2, S((5,), (5,)),
                 doc="log2(2**a + 2**b) without overflow.")  # fmt: skip
_register_simple("rsub", lambda F, a, b: F.sub(b, a), lambda a, b: b - a, S((3,), (3,)), doc="b - a.")


@composite(
    ref=lambda x, eps=None: np.log(x / (1 - x)), samples=[S((7,), low=0.1, high=0.9), S((7,), low=0.1, high=0.9, eps=0.01)], amp="float"
)
def logit(F: Any, x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)); with ``eps``, of x held between eps and 1 - eps."""
    x = x if eps is None else F.clamp(x, float(eps), 1.0 - eps)
    return F.log(F.div(x, F.rsub(x, 1.0)))


@composite(ref=lambda x, nan=0.0, posinf=None, neginf=None: np.nan_to_num(x, True, nan, posinf, neginf),
           samples=[S(np.array([1.0, np.nan, np.inf, -np.inf], np.float32), nan=2.0, posinf=5.0, neginf=-5.0), S((3,))])  # fmt: skip
def nan_to_num(F: Any, x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """x with numbers in place of NaN and infinities, which by default become the largest and least of the dtype."""
    x = _tensor("nan_to_num", x)
    if not dtypes.DTYPES[x.dtype].is_float:
        return F.clone(x)
    most = largest(x.dtype)
    return F.nan_to_num_values(x, float(nan), most if posinf is None else float(posinf), -most if neginf is None else float(neginf))


def largest(dtype: str) -> float:
    """The largest finite number of a dtype of floats."""
    return 3.3895313892515355e38 if dtype == "bfloat16" else float(np.finfo(dtypes.DTYPES[dtype].host).max)


@composite(ref=lambda a, b, rtol=1e-05, atol=1e-08, equal_nan=False: np.isclose(a, b, rtol, atol, equal_nan),
           samples=[S(np.array([1.0, 2.0, np.nan, np.inf]), np.array([1.0, 2.5, np.nan, np.inf]), equal_nan=True),
                    S((3,), (3,), atol=0.5)])  # fmt: skip
def isclose(F: Any, a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Whether ``|a - b| <= atol + rtol * |b|``; equal infinities are close."""
    off = F.abs(F.sub(a, b))
    close = F.logical_or(F.eq(a, b), F.logical_and(F.isfinite(off), F.le(off, F.add(F.mul(F.abs(b), rtol), atol))))
    return F.logical_or(close, F.logical_and(F.isnan(a), F.isnan(b))) if equal_nan else close


# ---- scans


def _scan(F: Any, name: str, x: Tensor, axis: int, combine: Callable[..., Any], neutral: float) -> Tensor:
    """Every element combined with all before it, by steps that double: n log n work, and the gradient of ``combine`` throughout."""
    x = _tensor(name, x)
    at, step = _at(name, axis, x.ndim), 1
    while x.shape and step < x.shape[at]:
        first = Tensor.full((*x.shape[:at], step, *x.shape[at + 1 :]), neutral, x.dtype, queue=x.queue)
        x = combine(x, F.cat([first, _part(F, x, at, 0, x.shape[at] - step)], at))
        step *= 2
    return x


@composite(ref=lambda x, axis: np.cumprod(x, axis), samples=[S((7,), axis=0), S((2, 5, 3), axis=1)], amp="float", tol=2)
def cumprod(F: Any, x: Tensor, axis: int) -> Tensor:
    """The product of every element and all before it along an axis; integers give int64."""
    x = _tensor("cumprod", x)
    x = x if dtypes.DTYPES[x.dtype].is_float else F.cast(x, "int64")
    return _scan(F, "cumprod", x, axis, F.mul, 1)


@composite(ref=lambda x, axis: np.logaddexp.accumulate(x, axis), samples=[S((7,), axis=0), S((2, 5), axis=-1)], amp="float", tol=2)
def logcumsumexp(F: Any, x: Tensor, axis: int) -> Tensor:
    """log of the sum of exp of every element and all before it along an axis."""
    return _scan(F, "logcumsumexp", x, axis, F.logaddexp, -math.inf)


@composite(ref=lambda x, n=1, axis=-1: np.diff(x, n, axis), samples=[S((2, 5)), S((5, 2), n=2, axis=0)])
def diff(F: Any, x: Tensor, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """The difference of every element and the one before it along an axis, ``n`` times."""
    x = _tensor("diff", x, 1)
    at = _at("diff", axis, x.ndim)
    if prepend is not None or append is not None:
        x = F.cat([part for part in (prepend, x, append) if part is not None], at)
    for _ in range(n):
        later, earlier = _part(F, x, at, 1), _part(F, x, at, 0, max(x.shape[at] - 1, 0))
        x = F.ne(later, earlier) if x.dtype == "bool" else F.sub(later, earlier)
    return x
