"""Linear algebra of batches of matrices: functions of ``torch.linalg`` with the prefix ``linalg_``, and older names of torch.

Decompositions are computed on the host, by NumPy's LAPACK in float64, and rounded to the dtype of the input: they wait for the
device. Most gradients are composed of ops and can be differentiated again.
"""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import AutogradError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.operands import common_shape
from netcl.engine.registry import S, composite, op
from netcl.ops.composed import row as made_of

QR = namedtuple("QR", "Q R")
SVD = namedtuple("SVD", "U S Vh")
OldSVD = namedtuple("OldSVD", "U S V")
Eigen = namedtuple("Eigen", "eigenvalues eigenvectors")
Determinant = namedtuple("Determinant", "sign logabsdet")
LeastSquares = namedtuple("LeastSquares", "solution residuals rank singular_values")


def on_host(inputs: str, *, vjp: Callable[..., Any] | None, ref: Any, takes: str = "float", **columns: Any) -> Any:
    """Return a decorator that registers a function of arrays as an op on the host; ``inputs`` lists the names of its tensors.

    ``takes="float"``: inputs must be floats and are widened to float64. ``"matrix"`` and ``"square"`` also check the shape of the first
    input; ``"any"`` passes values unchanged. Float results get the dtype of the first input. Named tuples of results are kept.
    """
    names = tuple(inputs.split())

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        name, signature = columns.pop("name", function.__name__), inspect.signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            tensors = launch.as_tensors(name, *(bound.arguments[label] for label in names))
            _check_square(name, takes, tensors, names)
            if bound.arguments.get("rtol", 0) is None or ("rtol" in signature.parameters and "rtol" not in bound.arguments):
                exact = bound.arguments.get("atol") is not None
                bound.arguments["rtol"] = (
                    0.0 if exact else float(np.finfo(dtypes.DTYPES[tensors[0].dtype].host).eps) * max(tensors[0].shape[-2:])
                )
            for label, x in zip(names, tensors, strict=True):
                host = x.to_host()
                bound.arguments[label] = host.astype(np.float64) if takes != "any" and host.dtype.kind == "f" else host
            try:
                with np.errstate(all="ignore"):
                    made = function(*bound.args, **bound.kwargs)
            except np.linalg.LinAlgError as error:
                raise np.linalg.LinAlgError(message(name, str(error), **{f"{names[0]}.shape": tensors[0].shape})) from None
            if not isinstance(made, tuple):
                return _sent(made, tensors[0])
            parts = [_sent(part, tensors[0]) for part in made]
            return made._make(parts) if hasattr(made, "_make") else tuple(parts)

        op(vjp=vjp, ref=ref, name=name, inputs=names, at_once=True, **columns)(call)
        return call

    return add


def _sent(values: Any, like: Tensor) -> Tensor:
    array = np.asarray(values)
    return Tensor.from_host(like.queue, np.ascontiguousarray(array).reshape(array.shape), like.dtype if array.dtype.kind == "f" else None)


def _check_square(name: str, takes: str, tensors: Sequence[Tensor], labels: Sequence[str]) -> None:
    first, shape = tensors[0], {f"{labels[0]}.shape": tensors[0].shape}
    for x, label in zip(tensors, labels, strict=True):
        if takes != "any":
            launch.check_dtype(name, x, name=label)
    if takes in ("matrix", "square") and first.ndim < 2:
        raise ShapeError(message(name, f"{labels[0]} must be a matrix or a batch of matrices", **shape))
    if takes == "square" and first.shape[-2] != first.shape[-1]:
        raise ShapeError(message(name, f"{labels[0]} must be a square matrix or a batch of them", **shape))


def _swap(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -2, -1)


def _constant(x: Any, values: np.ndarray) -> Tensor:
    return Tensor.from_host(x.queue, values, x.dtype)


def _differences(F: Any, values: Any) -> Any:
    """Return the matrix of ``values[j] - values[i]``, with 1 on the diagonal."""
    n = values.shape[-1]
    return F.add(F.sub(F.unsqueeze(values, -2), F.unsqueeze(values, -1)), _constant(values, np.eye(n)))


_WELL = np.array([[2.0, 0.5, -0.3], [0.1, 1.5, 0.4], [-0.2, 0.3, 1.2]], np.float32)  # well-conditioned
_FLAT = (S((3,)), r"\[{}\] A must be a matrix or a batch of matrices; A\.shape=\(3,\)")
_OBLONG = (S((2, 3)), r"\[{}\] A must be a square matrix or a batch of them; A\.shape=\(2, 3\)")


def _errors(name: str, *which: Any) -> list[Any]:
    return [(sample, pattern.replace("{}", name)) for sample, pattern in which]


_SQUARE: dict[str, Any] = {"takes": "square", "amp": "float", "samples": [S(_WELL), S(np.stack([_WELL, _WELL.T @ _WELL]))], "tol": 2}
_SYMMETRIC = np.array([[2.0, 0.5, -0.3], [0.5, 1.0, 0.4], [-0.3, 0.4, 3.1]], np.float32)
_DEFINITE: dict[str, Any] = {**_SQUARE, "samples": [S(_SYMMETRIC), S(np.stack([_SYMMETRIC, 2 * _SYMMETRIC]))]}


def _symmetric(ref: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reference so that it uses A's symmetric part: ops read one triangle, and their gradients are those of symmetric matrices."""
    return lambda A, **how: ref((A + _swap(A)) / 2, **how)


# ---- inverses and solutions


def _inv_vjp(F, g, out):
    turned = F.transpose(out)
    return F.neg(F.matmul(F.matmul(turned, g), turned))


@on_host("A", vjp=_inv_vjp, ref=np.linalg.inv, errors=[*_errors("linalg_inv", _FLAT, _OBLONG),
         (S(np.ones((2, 2), np.float32)), r"\[linalg_inv\] Singular matrix; A\.shape=\(2, 2\)")], **_SQUARE)  # fmt: skip
def linalg_inv(A):
    """The inverse of square matrices. Computed on the host."""
    return np.linalg.inv(A)


def _as_columns(A: Any, B: Any) -> bool:
    """Whether ``B`` holds vectors instead of matrices, by torch's rule."""
    return len(B.shape) == 1 or tuple(B.shape) == tuple(A.shape[:-1])


def _solve_vjp(F, g, out, A, B, left, needs):
    if _as_columns(A, B):
        g, out = F.unsqueeze(g, -1), F.unsqueeze(out, -1)
    d_b = F.linalg_solve(F.transpose(A), g, left=left)
    d_a = F.neg(F.matmul(d_b, F.transpose(out)) if left else F.matmul(F.transpose(out), d_b)) if needs[0] else None
    return d_a, F.squeeze(d_b, -1) if _as_columns(A, B) else d_b


def _solve(A, B, left=True):
    vectors = _as_columns(A, B)
    columns = B[..., None] if vectors else B
    found = np.linalg.solve(A, columns) if left else _swap(np.linalg.solve(_swap(A), _swap(columns)))
    return found[..., 0] if vectors else found


@on_host("A B", vjp=_solve_vjp, ref=_solve, takes="square", amp="float", tol=2,
         samples=[S(_WELL, (3, 2)), S(_WELL, (3,)), S(_WELL, (2, 3), left=False), S(np.stack([_WELL, _WELL.T]), (2, 3, 2))],
         errors=_errors("linalg_solve", (S((2, 3), (2,)), _OBLONG[1])))  # fmt: skip
def linalg_solve(A, B, *, left=True):
    """X with ``A X = B``, or ``X A = B`` if not ``left``; B may hold vectors. Computed on the host."""
    return _solve(A, B, left)


def _triangle(A, upper, unitriangular):
    part = np.triu(A, int(unitriangular)) if upper else np.tril(A, -int(unitriangular))
    return part + np.eye(A.shape[-1]) if unitriangular else part


def _solve_triangular_vjp(F, g, out, A, upper, left, unitriangular):
    d_b = F.linalg_solve_triangular(F.transpose(A), g, upper=not upper, left=left, unitriangular=unitriangular)
    d_a = F.neg(F.matmul(d_b, F.transpose(out)) if left else F.matmul(F.transpose(out), d_b))
    return F.triu(d_a, int(unitriangular)) if upper else F.tril(d_a, -int(unitriangular)), d_b


@on_host("A B", vjp=_solve_triangular_vjp, takes="square", amp="float", tol=2,
         ref=lambda A, B, upper, left=True, unitriangular=False: _solve(_triangle(A, upper, unitriangular), B, left),
         samples=[S(_WELL, (3, 2), upper=True), S(_WELL, (3, 3), upper=False, unitriangular=True),
                  S(_WELL, (2, 3), upper=False, left=False)])  # fmt: skip
def linalg_solve_triangular(A, B, *, upper, left=True, unitriangular=False):
    """X with ``A X = B``, or ``X A = B`` if not ``left``, for a triangular A, whose other triangle is ignored. Computed on the host."""
    return _solve(_triangle(A, upper, unitriangular), B, left)


def _pinv_vjp(F, g, out, A):
    rows, columns = A.shape[-2:]
    p, turned, g_t = out, F.transpose(out), F.transpose(g)
    left = F.sub(_constant(A, np.eye(rows)), F.matmul(A, p))
    right = F.sub(_constant(A, np.eye(columns)), F.matmul(p, A))
    first = F.matmul(F.matmul(F.matmul(left, g_t), p), turned)
    second = F.matmul(F.matmul(turned, p), F.matmul(g_t, right))
    return F.sub(F.add(first, second), F.matmul(F.matmul(turned, g), turned))


@on_host("A", vjp=_pinv_vjp, ref=lambda A, **how: np.linalg.pinv(A), takes="matrix", amp="float", tol=4,
         samples=[S((4, 3)), S((2, 3, 5)), S(_WELL)], errors=_errors("linalg_pinv", _FLAT))  # fmt: skip
def linalg_pinv(A, *, atol=None, rtol=None, hermitian=False):
    """The pseudo-inverse; singular values up to ``max(atol, rtol * largest)`` count as 0. Computed on the host."""
    return np.linalg.pinv(A, _tolerance(A, atol, rtol, hermitian), hermitian)


def _singular(A, hermitian):
    return np.abs(np.linalg.eigvalsh(A)) if hermitian else np.linalg.svd(A, compute_uv=False)


def _tolerance(A, atol, rtol, hermitian):
    """Return the fraction of the largest singular value up to which other singular values count as 0."""
    if atol is None or not A.size:
        return rtol
    largest = _singular(A, hermitian).max(-1)
    return np.maximum(rtol, np.divide(atol, largest, out=np.zeros_like(largest), where=largest > 0))


@on_host("A", vjp=None, ref=lambda A, **how: np.linalg.matrix_rank(A), takes="matrix",
         samples=[S((4, 3)), S(np.ones((2, 3, 3), np.float32))], errors=_errors("linalg_matrix_rank", _FLAT))  # fmt: skip
def linalg_matrix_rank(A, *, atol=None, rtol=None, hermitian=False):
    """How many singular values are above ``max(atol, rtol * largest)``. Computed on the host."""
    values = _singular(A, hermitian)
    limit = np.asarray(_tolerance(A, atol, rtol, hermitian)) * values.max(-1, initial=0)
    return (values > limit[..., None]).sum(-1)


@composite(ref=lambda A, B: (np.linalg.lstsq(A, B)[0],), samples=[S((5, 3), (5, 2)), S((4, 2), (4,))], amp="float", tol=8)
def linalg_lstsq(F: Any, A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> LeastSquares:
    """Return the X that minimizes ``|A X - B|^2`` (the shortest if several do), residuals, rank and singular values; some may be empty."""
    A, B = launch.as_tensors("linalg_lstsq", A, B)
    columns = F.unsqueeze(B, -1) if _as_columns(A, B) else B
    found, rank = F.matmul(F.linalg_pinv(A, rtol=rcond), columns), F.linalg_matrix_rank(A, rtol=rcond)
    rest = Tensor.zeros((0,), A.dtype, queue=A.queue)
    if A.shape[-2] > A.shape[-1] and (rank.to_host() == A.shape[-1]).all():
        rest = F.sum(F.square(F.sub(F.matmul(A, found), columns)), -2)
    values = F.linalg_svdvals(A.detach()) if driver in ("gelsd", "gelss") else Tensor.zeros((0,), A.dtype, queue=A.queue)
    return LeastSquares(F.squeeze(found, -1) if columns is not B else found, rest, rank, values)


# ---- determinants


def _det_vjp(F, g, out, A):
    if (out.to_host() == 0).any():  # the inverse does not exist, but the cofactors do
        return F.mul(F.reshape(g, (*g.shape, 1, 1)), F.linalg_cofactors(A))
    return F.mul(F.reshape(F.mul(g, out), (*g.shape, 1, 1)), F.transpose(F.linalg_inv(A)))


@on_host("A", vjp=_det_vjp, ref=np.linalg.det, errors=_errors("linalg_det", _FLAT, _OBLONG), **_SQUARE)
def linalg_det(A):
    """The determinant of square matrices. Computed on the host."""
    return np.linalg.det(A)


@on_host("A", vjp=None, ref=lambda A: np.linalg.det(A)[..., None, None] * _swap(np.linalg.inv(A)), **_SQUARE)
def linalg_cofactors(A):
    """Return the derivative of the determinant with respect to each element, also for singular matrices. No gradient. On the host."""
    u, s, vh = np.linalg.svd(A)
    others = np.stack([np.prod(np.delete(s, i, -1), -1) for i in range(s.shape[-1])], -1) if s.shape[-1] else s
    return (np.linalg.det(u) * np.linalg.det(vh))[..., None, None] * ((u * others[..., None, :]) @ vh)


@on_host("A", vjp=lambda F, g, A: F.mul(A, 0) if g[1] is None else
         F.mul(F.reshape(g[1], (*g[1].shape, 1, 1)), F.transpose(F.linalg_inv(A))),
         ref=lambda A: tuple(np.linalg.slogdet(A)), errors=_errors("linalg_slogdet", _FLAT, _OBLONG), **_SQUARE)  # fmt: skip
def linalg_slogdet(A):
    """The sign of the determinant and the logarithm of its absolute value. Computed on the host."""
    return Determinant(*np.linalg.slogdet(A))


made_of("logdet", lambda F, A: F.log(F.linalg_det(A)), lambda A: np.log(np.linalg.det(A)), S(_WELL), amp="float", tol=2,
        doc="The logarithm of the determinant; NaN where that is negative.")  # fmt: skip


# ---- decompositions


def _cholesky_vjp(F, g, out, upper):
    lower, g = (F.transpose(out), F.transpose(g)) if upper else (out, g)
    n, turned = lower.shape[-1], F.transpose(lower)
    half = F.mul(F.matmul(turned, g), _constant(out, np.tril(np.ones((n, n))) - np.eye(n) / 2))
    once = F.linalg_solve_triangular(turned, half, upper=True)
    whole = F.linalg_solve_triangular(turned, F.transpose(once), upper=True)
    return F.mul(F.add(whole, F.transpose(whole)), 0.5)


def _cholesky(A, upper=False):
    lower = np.linalg.cholesky(A)
    return _swap(lower) if upper else lower


@on_host("A", vjp=_cholesky_vjp, ref=_symmetric(_cholesky), errors=[*_errors("linalg_cholesky", _FLAT, _OBLONG),
         (S(-_SYMMETRIC), r"\[linalg_cholesky\] Matrix is not positive definite; A\.shape=\(3, 3\)")],
         **{**_DEFINITE, "samples": [*_DEFINITE["samples"], S(_SYMMETRIC, upper=True)]})  # fmt: skip
def linalg_cholesky(A, *, upper=False):
    """Return L with ``L L^T = A`` for symmetric positive definite A (its lower triangle is read); ``upper`` gives ``L^T``. On the host."""
    return _cholesky(A, upper)


def _qr_vjp(F, g, out0, out1, mode):
    d_q, d_r = g
    q, r, k = out0, out1, out1.shape[-2]
    if mode != "reduced" and (mode == "r" or q.shape[-1] > r.shape[-1]):
        raise AutogradError(message("linalg_qr", "the gradient requires reduced mode", 'pass mode="reduced"', mode=repr(mode)))
    d_q = F.mul(q, 0) if d_q is None else d_q
    d_r = F.mul(r, 0) if d_r is None else d_r
    u, d_u, rest = r, d_r, None
    if r.shape[-1] > k:  # a wide matrix: the columns after the square part are q times those of r
        (u, v), (d_u, d_v) = (F.split(x, [k, r.shape[-1] - k], -1) for x in (r, d_r))
        rest = F.matmul(q, d_v)
        d_q = F.add(d_q, F.matmul(F.matmul(q, v), F.transpose(d_v)))
    m = F.sub(F.matmul(u, F.transpose(d_u)), F.matmul(F.transpose(d_q), q))
    m = F.add(F.tril(m), F.transpose(F.tril(m, -1)))
    square = F.linalg_solve_triangular(F.transpose(u), F.add(d_q, F.matmul(q, m)), upper=False, left=False)
    return square if rest is None else F.cat([square, rest], -1)


@on_host("A", vjp=_qr_vjp, ref=lambda A, mode="reduced": tuple(np.linalg.qr(A, mode)), takes="matrix", amp="float", tol=4,
         samples=[S((4, 3)), S((2, 3, 4)), S((2, 3), mode="complete")], errors=_errors("linalg_qr", _FLAT))  # fmt: skip
def linalg_qr(A, mode="reduced"):
    """Q with orthonormal columns and upper triangular R with ``Q R = A``; ``mode`` is reduced, complete or r. Computed on the host."""
    return QR(np.zeros(0), np.linalg.qr(A, "r")) if mode == "r" else QR(*np.linalg.qr(A, mode))


def _skew(F, a, b):
    product = F.matmul(F.transpose(a), b)
    return F.sub(product, F.transpose(product))


def _svd_vjp(F, g, out0, out1, out2, A_shape):
    d_u, d_s, d_vh = g
    u, s, vh, k = out0, out1, out2, min(A_shape[-2:])
    if max(u.shape[-1], vh.shape[-2]) > k:
        if d_u is not None or d_vh is not None:
            raise AutogradError(message("linalg_svd", "the gradient of U and Vh requires reduced matrices", "pass full_matrices=False"))
        u, vh = F.narrow(u, -1, 0, k), F.narrow(vh, -2, 0, k)
    scale, gaps = F.unsqueeze(s, -2), _differences(F, F.square(s))  # vectors as rows scale the columns of matrices
    total = F.matmul(F.mul(u, 0 if d_s is None else F.unsqueeze(d_s, -2)), vh)
    if d_u is not None:
        total = F.add(total, F.matmul(F.matmul(u, F.mul(F.div(_skew(F, u, d_u), gaps), scale)), vh))
        outside = F.sub(d_u, F.matmul(u, F.matmul(F.transpose(u), d_u)))
        total = F.add(total, F.matmul(F.div(outside, scale), vh)) if A_shape[-2] > k else total
    if d_vh is not None:
        turned = F.div(_skew(F, F.transpose(vh), F.transpose(d_vh)), gaps)
        total = F.add(total, F.matmul(F.matmul(F.mul(u, scale), turned), vh))
        outside = F.sub(d_vh, F.matmul(F.matmul(d_vh, F.transpose(vh)), vh))
        total = F.add(total, F.matmul(F.div(u, scale), outside)) if A_shape[-1] > k else total
    return total


@on_host("A", vjp=_svd_vjp, ref=lambda A, full_matrices=True: tuple(np.linalg.svd(A, full_matrices)), takes="matrix", amp="float", tol=8,
         samples=[S((4, 3), full_matrices=False), S((2, 3, 4), full_matrices=False), S(_WELL)],
         errors=_errors("linalg_svd", _FLAT))  # fmt: skip
def linalg_svd(A, full_matrices=True):
    """U, S and Vh with ``U diag(S) Vh = A``; the singular values S are in descending order. Computed on the host."""
    return SVD(*np.linalg.svd(A, full_matrices))


def _eigh_vjp(F, g, out0, out1):
    d_values, d_vectors = g
    values, vectors = out0, out1
    inner = F.mul(vectors, 0) if d_vectors is None else F.div(F.matmul(F.transpose(vectors), d_vectors), _differences(F, values))
    inner = inner if d_vectors is None else F.mul(inner, _constant(values, 1 - np.eye(values.shape[-1])))
    inner = inner if d_values is None else F.add(inner, F.diag_embed(d_values))
    whole = F.matmul(F.matmul(vectors, inner), F.transpose(vectors))
    return F.mul(F.add(whole, F.transpose(whole)), 0.5)


@on_host("A", vjp=_eigh_vjp, ref=_symmetric(lambda A: tuple(np.linalg.eigh(A))), errors=_errors("linalg_eigh", _FLAT, _OBLONG), **_DEFINITE)
def linalg_eigh(A, UPLO="L"):
    """Eigenvalues in ascending order and eigenvectors of symmetric matrices; only the triangle ``UPLO`` is read. Computed on the host."""
    return Eigen(*np.linalg.eigh(A, UPLO))


made_of("linalg_svdvals", lambda F, A: F.linalg_svd(A, False).S, lambda A: np.linalg.svd(A, compute_uv=False), S((4, 3)),
        amp="float", tol=4,
        doc="The singular values, in descending order. Computed on the host.")  # fmt: skip
made_of("linalg_eigvalsh", lambda F, A, UPLO="L": F.linalg_eigh(A, UPLO).eigenvalues, _symmetric(np.linalg.eigvalsh), S(_SYMMETRIC),
        amp="float", tol=2, doc="The eigenvalues of symmetric matrices, in ascending order. Computed on the host.")  # fmt: skip


# ---- norms


def _matrix_norm(F: Any, A: Tensor, ord: Any = "fro", axis: Sequence[int] = (-2, -1), keepdims: bool = False) -> Tensor:
    rows, columns = (launch.check_axis("linalg_matrix_norm", a, A.ndim) for a in axis)
    if ord == "fro":
        return F.norm(A, 2, (rows, columns), keepdims)
    if ord in (1, -1, math.inf, -math.inf):
        first, second = (rows, columns) if abs(ord) == 1 else (columns, rows)
        made = (F.amax if ord > 0 else F.amin)(F.sum(F.abs(A), first, keepdims=True), (first, second), keepdims=True)
    elif ord in (2, -2, "nuc"):
        values = F.linalg_svdvals(F.moveaxis(A, (rows, columns), (-2, -1)))
        made = F.sum(values, -1) if ord == "nuc" else (F.amax if ord > 0 else F.amin)(values, -1)
        made = F.unsqueeze(F.unsqueeze(made, min(rows, columns)), max(rows, columns))
    else:
        raise ValueError(message("linalg_matrix_norm", "ord must be fro, nuc, inf, -inf, 1, -1, 2 or -2", ord=repr(ord)))
    return made if keepdims else F.squeeze(made, (rows, columns))


def _norm(F: Any, A: Tensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    matrix = (isinstance(axis, tuple | list) and len(axis) == 2 and ord is not None) or (axis is None and ord is not None and A.ndim == 2)
    if isinstance(ord, str) and not matrix:
        raise ShapeError(message("linalg_norm", f"ord={ord!r} requires matrices", "pass two axes", dim=axis, **{"A.shape": A.shape}))
    if matrix:
        return _matrix_norm(F, A, ord, (0, 1) if axis is None else axis, keepdims)
    if axis is None and ord is not None and A.ndim != 1:
        raise ShapeError(message("linalg_norm", "with ord and without dim, A must have 1 or 2 dimensions", **{"A.shape": A.shape}))
    return F.norm(A, 2 if ord is None else ord, axis, keepdims)


_NORM_OPTIONS: dict[str, Any] = {"amp": "float", "tol": 4}
made_of("linalg_vector_norm", lambda F, x, ord=2, axis=None, keepdims=False: F.norm(x, ord, axis, keepdims),
        lambda x, ord=2, axis=None: np.linalg.norm(x.ravel() if axis is None else x, ord, axis), S((3, 4)), S((3, 4), ord=3.0, axis=1),
        **_NORM_OPTIONS, doc="``sum(|x|**ord) ** (1/ord)`` over axes; ord may be infinite, 0 counts nonzero elements.")  # fmt: skip
made_of("linalg_matrix_norm", _matrix_norm, lambda A, ord="fro", axis=(-2, -1), keepdims=False: np.linalg.norm(A, ord, axis, keepdims),
        S((3, 4)), S((2, 3, 4), ord="nuc"), S((3, 2, 4), ord=1,
        axis=(0, 2), keepdims=True),
        S((2, 3, 4), ord=-math.inf), S((3, 4), ord=2), **_NORM_OPTIONS, errors=[(S((3, 4), ord=3),
        r"\[linalg_matrix_norm\] ord must be fro, nuc, inf")],
        doc="A norm of matrices: fro, nuc, inf, -inf, 1, -1, 2 or -2. nuc, 2 and -2 are computed on the host.")  # fmt: skip
made_of("linalg_norm", _norm, lambda A, ord=None, axis=None: np.linalg.norm(A, ord, axis), S((3, 4)), S((3, 4), ord=math.inf),
        S((2, 3), ord=1, axis=1), **_NORM_OPTIONS, errors=[(S((3,), ord="fro"), r"\[linalg_norm\] ord='fro' requires matrices")],
        doc="A norm of vectors, by default the 2-norm; of matrices if ``ord`` is given and two axes are named or A has two.")  # fmt: skip


# ---- powers and products


def _matrix_power(F: Any, A: Tensor, n: int) -> Tensor:
    if n < 0:
        return _matrix_power(F, F.linalg_inv(A), -n)
    if n == 0:
        return F.add(F.mul(A, 0), _constant(A, np.eye(A.shape[-1])))
    half = _matrix_power(F, F.matmul(A, A), n // 2) if n > 1 else None
    return A if half is None else F.matmul(half, A) if n % 2 else half


def _matrix_exp(F: Any, A: Tensor) -> Tensor:
    """Compute the exponential: scale to a norm of at most 1/2, sum 12 terms of the series, square back."""
    norms = np.abs(A.to_host()).sum(-1).max(initial=0.0)
    squarings = max(0, math.ceil(math.log2(norms)) + 1) if 0 < norms < math.inf else 0
    small, total = F.mul(A, 0.5**squarings), F.add(F.mul(A, 0), _constant(A, np.eye(A.shape[-1])))
    one = total
    for k in range(12, 0, -1):
        total = F.add(one, F.div(F.matmul(small, total), k))
    return _matrix_power(F, total, 2**squarings)


def _copied_power(F: Any, A: Tensor, n: int) -> Tensor:
    return F.clone(A) if n == 1 else _matrix_power(F, A, n)


made_of("matrix_power", _copied_power, np.linalg.matrix_power, S(_WELL, n=3), S(_WELL, n=-2), S(_WELL, n=0), amp="float", tol=8,
        doc="A square matrix to an integer power; for a negative power the matrix is inverted on the host.")  # fmt: skip
made_of("matrix_exp", _matrix_exp, "numpy", S(_WELL), S((2, 3, 3)), amp="float", tol=8, doc="The exponential of square matrices.")


# ---- torch's older names


def _old_svd(F: Any, A: Tensor, some: bool = True, compute_uv: bool = True) -> OldSVD:
    u, s, vh = F.linalg_svd(A, not some)
    return OldSVD(u, s, F.transpose(vh)) if compute_uv else OldSVD(F.mul(u, 0), s, F.mul(F.transpose(vh), 0))


def _old_svd_ref(A):
    u, s, vh = np.linalg.svd(A, False)
    return u, s, vh.T


def _cholesky_solve(F: Any, B: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    lower = F.transpose(L) if upper else L
    return F.linalg_solve_triangular(F.transpose(lower), F.linalg_solve_triangular(lower, B, upper=False), upper=True)


_LOWER = np.linalg.cholesky(_SYMMETRIC).astype(np.float32)
made_of("cholesky", lambda F, A, upper=False: F.linalg_cholesky(A, upper=upper), _symmetric(_cholesky), S(_SYMMETRIC), amp="float", tol=2,
        doc="L with ``L L^T = A``; ``linalg.cholesky``.")  # fmt: skip
made_of("cholesky_solve", _cholesky_solve, lambda B, L, upper=False: np.linalg.solve(np.tril(L) @ np.tril(L).T, B),
        S((3, 2), _LOWER), amp="float", tol=8,
        doc="X with ``L L^T X = B``, from the Cholesky factor.")  # fmt: skip
made_of("qr", lambda F, A, some=True: F.linalg_qr(A, "reduced" if some else "complete"), lambda A, some=True: tuple(np.linalg.qr(A)),
        S((4, 3)), amp="float", tol=4, doc="``linalg.qr``; complete unless ``some``.")  # fmt: skip
made_of("svd", _old_svd, _old_svd_ref, S((4, 3)), amp="float", tol=8,
        doc="U, S and V (``linalg.svd`` returns V transposed); reduced if ``some``.")  # fmt: skip


def _cross(F: Any, a: Tensor, b: Tensor, axis: int = -1) -> Tensor:
    a, b = launch.as_tensors("linalg_cross", a, b)
    at = launch.check_axis("linalg_cross", axis, a.ndim)
    if a.ndim != b.ndim or a.shape[at : at + 1] != (3,) or b.shape[at] != 3:
        what = "a and b must have the same number of dimensions and 3 elements along the axis"
        raise ShapeError(message("linalg_cross", what, axis=axis, **{"a.shape": a.shape, "b.shape": b.shape}))
    return F.sub(F.mul(F.roll(a, -1, at), F.roll(b, 1, at)), F.mul(F.roll(a, 1, at), F.roll(b, -1, at)))


def _first_cross(F: Any, a: Tensor, b: Tensor, axis: int | None = None) -> Tensor:
    a, b = launch.as_tensors("cross", a, b)
    both = common_shape("cross", (a.shape, b.shape), "ab") if axis is None else ()
    return F.linalg_cross(a, b, both.index(3) if 3 in both else -1 if axis is None else axis)


made_of("linalg_cross", _cross, lambda a, b, axis=-1: np.cross(a, b, axis=axis), S((4, 3), (4, 3)), S((3, 2), (3, 2), axis=0),
        errors=[(S((3, 4), (3, 4)), r"\[linalg_cross\] a and b must have .* 3 elements along the axis; axis=-1, a\.shape=\(3, 4\)")],
        doc="The cross product along an axis of 3, by default the last.")  # fmt: skip
made_of(
    "cross",
    _first_cross,
    lambda a, b, axis=0: np.cross(a, b, axis=axis),
    S((3, 3), (3, 3)),
    S((4, 3), (4, 3), axis=1),
    errors=[
        (S((2, 4), (2, 4)), r"\[linalg_cross\] a and b must have .* 3 elements along the axis"),
        (S((2, 3), (4, 3)), r"\[cross\] shapes must broadcast together; a.shape=\(2, 3\), b.shape=\(4, 3\)"),
    ],
    doc="The cross product along an axis of 3, by default the first axis of that size; ``linalg.cross`` takes the last axis.",
)
made_of("linalg_diagonal", lambda F, A, *, offset=0, dim1=-2, dim2=-1: F.diagonal(A, offset, dim1, dim2),
        lambda A, offset=0, dim1=-2, dim2=-1: np.diagonal(A, offset, dim1, dim2), S((2, 3, 4)), S((2, 3, 4), offset=1, dim1=0),
        doc="The diagonals of the last two axes, or of ``dim1`` and ``dim2``, as the last axis.")  # fmt: skip
made_of("linalg_vecdot", lambda F, a, b, axis=-1: F.sum(F.mul(a, b), axis), lambda a, b, axis=-1: (a * b).sum(axis), S((4, 3), (4, 3)),
        doc="The inner products of vectors along an axis.")  # fmt: skip
