"""Matrix products: ``matmul``, ``linear`` and related ops. The kernels are chosen in :mod:`netcl.ops.matmul.gemm`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.device import CPUQueue
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.kernels.primitives import BuiltKernel, KernelSpec, cl_source, storage_macros
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch
from netcl.engine.pointwise import run
from netcl.engine.registry import S, composite, op
from netcl.ops.epilogue import Epilogue, activation_row, activation_vjp
from netcl.ops.matmul import amx, cpu, mma, wgmma  # noqa: F401, add their algorithms
from netcl.ops.matmul.einsum import einsum
from netcl.ops.matmul.gemm import EPILOGUE_ACTIVATIONS, Extras, product
from netcl.ops.movement import sum_to

__all__ = ["affine", "affine_activated", "bmm", "build_matmul_kernel", "einsum", "linear", "matmul", "outer"]


# ---- matmul


class _Shapes(NamedTuple):
    """Shapes of a product: ``left``, ``right`` and the result (``whole``) as batches of matrices, and ``result`` as the caller gets it."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    whole: tuple[int, ...]
    result: tuple[int, ...]


@lru_cache(maxsize=4096)
def product_shapes(a: tuple[int, ...], b: tuple[int, ...], trans_a: bool, trans_b: bool) -> _Shapes:
    """Return the shapes of a product; a vector is a row on the left and a column on the right."""
    if not a or not b:
        raise ShapeError(message("matmul", "operands must have at least one dimension", "use mul", **{"a.shape": a, "b.shape": b}))
    left = ((a[0], 1) if trans_a else (1, a[0])) if len(a) == 1 else a
    right = b if len(b) > 1 else ((1, b[0]) if trans_b else (b[0], 1))
    m, k = left[-2:][::-1] if trans_a else left[-2:]
    rows, n = right[-2:][::-1] if trans_b else right[-2:]
    if k != rows:
        transposed = {"transpose_a": True} if trans_a else {}
        transposed |= {"transpose_b": True} if trans_b else {}
        what = f"a must have as many columns as b has rows, got {k} and {rows}"
        remedy = "transpose b: a @ b.mT" if k == n else "transpose or reshape one operand"
        raise ShapeError(message("matmul", what, remedy, **{"a.shape": a, "b.shape": b}, **transposed))
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError:
        raise ShapeError(message("matmul", "the batch axes must broadcast together", **{"a.shape": a, "b.shape": b})) from None
    sizes = (*batch, *(() if len(a) == 1 else (m,)), *(() if len(b) == 1 else (n,)))
    return _Shapes(left, right, (*batch, m, n), sizes)


def _result_dtype(name: str, *operands: Tensor) -> str:
    result = dtypes.DTYPES[operands[0].dtype]
    for x in operands:
        if x.dtype not in launch.NUMBERS:
            raise DtypeError(message(name, "operands must be numeric", 'cast first: x.to("float32")', dtype=x.dtype, shape=x.shape))
        if x.dtype is not result.name:
            result = dtypes.promote(result, dtypes.DTYPES[x.dtype])
    return result.name


def _matmul_numpy(a: np.ndarray, b: np.ndarray, trans_a: bool, trans_b: bool, kind: str) -> np.ndarray:
    left = np.swapaxes(a, -1, -2) if trans_a and a.ndim > 1 else a
    right = np.swapaxes(b, -1, -2) if trans_b and b.ndim > 1 else b
    return np.matmul(left.astype(kind, copy=False), right.astype(kind, copy=False))


def _vjp(F, g, a, b, transpose_a, transpose_b, needs):
    left, right, shape, _ = product_shapes(a.shape, b.shape, transpose_a, transpose_b)
    x, y = F.reshape(a, left), F.reshape(b, right)
    g = F.reshape(g, shape)
    if len(right) == 2 and len(left) > 2 and not transpose_a:  # one tall product instead of many that are then summed
        rows = math.prod(left[:-1])
        x, g = F.reshape(x, (rows, left[-1])), F.reshape(g, (rows, shape[-1]))
    grad_a = grad_b = None
    if needs[0]:
        made = F.matmul(y, g, transpose_a=transpose_b, transpose_b=True) if transpose_a else F.matmul(g, y, transpose_b=not transpose_b)
        grad_a = F.reshape(made if made.size == a.size else sum_to(F, made, left), a.shape)
    if needs[1]:
        made = F.matmul(g, x, transpose_a=True, transpose_b=transpose_a) if transpose_b else F.matmul(x, g, transpose_a=not transpose_a)
        grad_b = F.reshape(sum_to(F, made, right), b.shape)
    return grad_a, grad_b


@op(
    vjp=_vjp,
    ref="numpy",
    amp="half",
    samples=[
        S((1, 1), (1, 1)),
        S((3, 5), (5, 2)),
        S((17, 33), (33, 15)),
        S((70, 35), (35, 68)),
        S((35, 21), (35, 40), transpose_a=True),
        S((9, 37), (26, 37), transpose_b=True),
        S((19, 8), (21, 19), transpose_a=True, transpose_b=True),
        S((4,), (4,)),
        S((4,), (4, 3)),
        S((2, 3, 4), (4,)),
        S((2, 3, 4), (4, 5)),
        S((2, 1, 3, 4), (3, 4, 2)),
        S((2, 1, 3, 4), (1, 5, 4, 2)),
        S((2, 1, 2, 3, 4), (1, 3, 1, 5, 4), transpose_b=True),
        S((0, 4), (4, 3)),
        S((3, 0), (0, 2)),
        S((3, 4), (4, 5), dtypes="int32", low=-9, high=9),
        S((20, 18), (18, 33), dtypes="int64", low=-(2**33), high=2**20),
    ],
    errors=[
        (S((3, 5), (4, 2)), r"\[matmul\] a must have as many columns as b has rows, got 5 and 4"),
        (S((2, 3, 5), (3, 5, 2)), r"\[matmul\] the batch axes must broadcast together; a\.shape=\(2, 3, 5\)"),
        (S((), (4, 2)), r"\[matmul\] operands must have at least one dimension"),
        (S((3, 5), (5, 2), dtypes="bool"), r"\[matmul\] operands must be numeric; dtype=bool"),
    ],
)
def matmul(a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """The matrix product of the last two axes; batch axes broadcast, vectors are rows on the left and columns on the right.

    ``transpose_a`` and ``transpose_b`` multiply by the transposed operand. float16 and bfloat16 are summed in float32, integers
    exactly (modulo their width).

    >>> matmul(Tensor.ones((2, 3)), Tensor.ones((3, 4))).shape
    (2, 4)
    """
    a, b = launch.as_tensors("matmul", a, b)
    dtype = _result_dtype("matmul", a, b)
    if a.array is not None:
        product_shapes(a.shape, b.shape, transpose_a, transpose_b)
        return launch.run_cpu(_matmul_numpy, a, b, trans_a=transpose_a, trans_b=transpose_b, kind=dtypes.sum_dtype(dtype), dtype=dtype)
    return matmul_with(a, b, Extras(Epilogue(dtype)), transpose_a, transpose_b)


def matmul_with(a: Tensor, b: Tensor, extras: Extras, transpose_a: bool, transpose_b: bool) -> Tensor:
    """Return the result of :func:`matmul` with the ops of ``extras`` as its epilogue; OpenCL devices only."""
    left, right, shape, result = product_shapes(a.shape, b.shape, transpose_a, transpose_b)
    if 0 in shape:
        return Tensor.empty(result, extras.epilogue.stored, queue=a.queue)
    if len(left) > 2 and len(right) == 2 and not transpose_a:
        left, shape = (math.prod(left[:-1]), left[-1]), (math.prod(shape[:-1]), shape[-1])
    return in_shape(product(in_shape(a, left), in_shape(b, right), shape, extras, transpose_a, transpose_b), result)


def in_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` in ``shape``; ``x`` itself if it has that shape."""
    return x if x.shape == shape else with_shape(x, shape)


@composite(
    ref=np.matmul,
    samples=[S((2, 3, 4), (2, 4, 5))],
    errors=[(S((3, 4), (4, 5)), r"\[bmm\] a and b must have 3 dimensions and equal batch sizes; a\.shape=\(3, 4\), b\.shape=\(4, 5\)")],
)
def bmm(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """Multiply two batches of matrices pairwise."""
    a, b = launch.as_tensors("bmm", a, b)
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]:
        raise ShapeError(message("bmm", "a and b must have 3 dimensions and equal batch sizes", **{"a.shape": a.shape, "b.shape": b.shape}))
    return F.matmul(a, b)


@composite(
    ref=np.outer,
    samples=[S((3,), (4,))],
    errors=[(S((3, 1), (4,)), r"\[outer\] a and b must be vectors; a\.shape=\(3, 1\), b\.shape=\(4,\)")],
)
def outer(F: Any, a: Tensor, b: Tensor) -> Tensor:
    """Multiply every element of ``a`` by every element of ``b``: the outer product of two vectors."""
    a, b = launch.as_tensors("outer", a, b)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(message("outer", "a and b must be vectors", **{"a.shape": a.shape, "b.shape": b.shape}))
    return F.mul(F.reshape(a, (-1, 1)), F.reshape(b, (1, -1)))


# ---- linear


def _check_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    shapes = {"x.shape": x.shape, "w.shape": w.shape}
    if len(w.shape) != 2 or not x.shape or x.shape[-1] != w.shape[1]:
        what = f"x must have {w.shape[1]} features, got {x.shape[-1] if x.shape else 'none'}" if w.ndim == 2 else "w must be a matrix"
        flat = w.ndim == 2 and x.ndim > 2 and math.prod(x.shape[1:]) == w.shape[1]
        remedy = "flatten the input first: nn.Flatten(), or x.flatten(1)" if flat else "x must have in_features along its last axis"
        raise ShapeError(message("linear", what, remedy if w.ndim == 2 else "w is (out_features, in_features)", **shapes))
    if bias is not None and bias.shape != (w.shape[0],):
        raise ShapeError(message("linear", f"bias must have {w.shape[0]} values", **shapes, **{"bias.shape": bias.shape}))


def _launch_affine(x: Any, w: Any, bias: Any, activation: str | None) -> Tensor:
    x, w, bias = launch.as_tensors("linear", x, w, bias)
    dtype = _result_dtype("linear", x, w)
    if bias is not None and bias.dtype is not dtype and (dtype not in dtypes.HALVES or bias.dtype is not dtypes.FLOAT32):
        dtype = _result_dtype("linear", x, w, bias)
    _check_linear(x, w, bias)
    ending = EPILOGUE_ACTIVATIONS[activation] if activation else ""
    if isinstance(x.queue, CPUQueue):
        y = launch.run_cpu(_affine_numpy, x, w, bias, dtype=dtype)
        return run(activation_row(ending), (y,)) if ending else y
    return affine_with(x, w, Extras(Epilogue(dtype, activation=ending), bias))


def affine_with(x: Tensor, w: Tensor, extras: Extras) -> Tensor:
    """Return ``x w'`` with the ops of ``extras`` as its epilogue; OpenCL devices only."""
    shape, rows = (*x.shape[:-1], w.shape[0]), math.prod(x.shape[:-1])
    if 0 in shape:
        return Tensor.empty(shape, extras.epilogue.stored, queue=x.queue)
    y = product(x if len(shape) == 2 else with_shape(x, (rows, x.shape[-1])), w, (rows, w.shape[0]), extras, False, True)
    return y if len(shape) == 2 else with_shape(y, shape)


def _affine_numpy(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    out = np.matmul(x, w.T)
    return out if bias is None else out + bias


def _affine_vjp(F, g, x, w, bias_dtype, needs):
    flat, count = len(x.shape) == 2, math.prod(x.shape[:-1])
    g, rows = (g, x) if flat else (F.reshape(g, (count, w.shape[0])), F.reshape(x, (count, w.shape[1])))
    grad_x = F.matmul(g, w) if needs[0] else None
    grad_x = grad_x if flat or grad_x is None else F.reshape(grad_x, x.shape)
    grad_w = F.matmul(g, rows, transpose_a=True) if needs[1] else None
    return grad_x, grad_w, F.sum(g, axis=0, widen=bias_dtype != g.dtype) if bias_dtype and needs[2] else None


_LINEAR_ERRORS = [
    (S((3, 5), (2, 4), (2,)), r"\[linear\] x must have 4 features, got 5"),
    (S((3, 5), (2, 5), (3,)), r"\[linear\] bias must have 2 values"),
]


@op(
    vjp=_affine_vjp,
    ref="numpy",
    amp="half",
    bias_stays=True,
    samples=[
        S((3, 5), (2, 5)),
        S((3, 5), (2, 5), (2,)),
        S((2, 3, 33), (70, 33), (70,)),
        S((66, 20), (17, 20), (17,)),
        S((5,), (2, 5), (2,)),
    ],
    errors=_LINEAR_ERRORS,
)
def affine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x w' + bias``: ``linear`` without an activation. A float32 ``bias`` leaves the dtype of 16-bit ``x`` and ``w``."""
    return _launch_affine(x, w, bias, None)


def _activated_vjp(F, g, x, w, bias, bias_dtype, out, activation, needs, recorded):
    g = activation_vjp(F, EPILOGUE_ACTIVATIONS[activation], g, out, recorded, lambda: F.affine(x, w, bias))
    return _affine_vjp(F, g, x, w, bias_dtype, needs)


@op(
    vjp=_activated_vjp,
    ref="numpy",
    amp="half",
    bias_stays=True,
    samples=[S((3, 5), (20, 5), (20,), activation=name) for name in EPILOGUE_ACTIVATIONS] + [S((70, 40), (19, 40), activation="relu")],
)
def affine_activated(x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """``linear`` with an activation, as one op; the result is kept for backward."""
    return _launch_affine(x, w, bias, activation)


@composite(
    ref="numpy",
    samples=[S((3, 5), (2, 5), (2,)), S((2, 3, 5), (4, 5), (4,), activation="relu"), S((0, 5), (2, 5), (2,))],
    errors=[
        *_LINEAR_ERRORS,
        (
            S((3, 5), (2, 5), activation="elu"),
            r"\[linear\] activation must be None or one of relu, tanh, sigmoid, silu, gelu; activation='elu'",
        ),
    ],
)
def linear(F: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``activation(x w' + bias)`` over the last axis of ``x``; ``w`` is ``(out_features, in_features)``, as in torch.

    ``activation`` is ``None`` or one of ``relu``, ``tanh``, ``sigmoid``, ``silu`` and ``gelu``.
    """
    if activation is None:
        return F.affine(x, w, bias)
    if activation not in EPILOGUE_ACTIVATIONS:
        what = f"activation must be None or one of {', '.join(EPILOGUE_ACTIVATIONS)}"
        raise ShapeError(message("linear", what, activation=repr(activation)))
    return F.affine_activated(x, w, bias, activation=activation)


# ---- a kernel to launch oneself


def build_matmul_kernel(context: Any, tile: int = 16, dtype: str = "float") -> BuiltKernel:
    """Build a kernel ``matmul(A, B, C, M, N, K)`` for row-major matrices, in tiles of ``tile`` x ``tile``.

    Launch it over ``(N, M)``: ``kernel(queue, (N, M), None, a, b, c, M, N, K)``; ``context`` may be a queue or a device handle.
    """
    limit = getattr(getattr(context, "context", context), "devices", None)
    if not 1 <= tile <= 64 or (limit and tile * tile > limit[0].max_work_group_size):
        what = "tile must be from 1 to 64, and the device must allow work-groups of tile x tile items"
        most = limit[0].max_work_group_size if limit else "unknown"
        raise ShapeError(message("build_matmul_kernel", what, tile=tile, max_work_group_size=most))
    text = f"{storage_macros(X=dtypes.lookup(dtype, 'build_matmul_kernel').name)}#define TILE {tile}\n{cl_source(__file__, 'tiled.cl')}"
    return KernelSpec("matmul", src=text, guarded=True).build(context)
