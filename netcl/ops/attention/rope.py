"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from netcl.core import recording
from netcl.core.commands import constant
from netcl.core.dtype import DTYPES, sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, op
from netcl.ops.pointwise import cast


def pair_frequencies(depth: int, base: float) -> np.ndarray:
    """Return the radians per position of each pair: ``base ** (-2 i / depth)``."""
    return float(base) ** (-np.arange(0, depth, 2, dtype=np.float64) / depth)


def _frequencies_on(x: Tensor, base: float, given: Tensor | None) -> Tensor:
    """Return ``given``, or the frequencies of ``base`` on the device, cached because every layer of a model uses the same ones."""
    dtype = sum_dtype(x.dtype)
    if given is not None:
        return cast(given, dtype)
    key = ("rope", x.shape[-1], float(base), dtype)
    state = program.state(x.queue)
    if key not in state:
        with recording.paused():
            state[key] = constant(Tensor.from_host(x.queue.netcl.queue, pair_frequencies(x.shape[-1], base), dtype))
    return state[key]


def _rope_sizes(x: Tensor, positions: Tensor | None) -> tuple[int, int, int]:
    """Return the leading axes of ``x`` as ``(outer, heads, n)``; positions may differ along ``outer``."""
    n = x.shape[-2]
    if positions is None or positions.shape == (n,):
        return 1, math.prod(x.shape[:-2]), n
    if x.ndim > 2 and positions.shape == (x.shape[0], n):
        return x.shape[0], math.prod(x.shape[1:-2]), n
    raise ShapeError(message("rope", "positions must be (N,) or (B, N) for x of (B, ..., N, D)", positions=positions.shape, x=x.shape))


def rope_arrays(x: Any, positions: Any, frequencies: Any, base: float, offset: int, interleaved: bool, inverse: bool,
                heads: int | None = None) -> np.ndarray:  # fmt: skip
    """Rotate pairs of elements by the angles of their positions: :func:`rope` in NumPy."""
    if heads is not None:
        part = rope_arrays(x[..., :heads, :, :], positions, frequencies, base, offset, interleaved, inverse)
        return np.concatenate([part, x[..., heads:, :, :]], -3)
    n, depth = x.shape[-2:]
    where = np.arange(offset, offset + n) if positions is None else positions
    where = where.reshape(where.shape[0], *(1,) * (x.ndim - 3), n) if where.ndim == 2 else where
    angle = where[..., None] * (pair_frequencies(depth, base) if frequencies is None else frequencies.astype(np.float64))
    c, s = np.cos(angle).astype(x.dtype), np.sin(-angle if inverse else angle).astype(x.dtype)
    one, other = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., : depth // 2], np.s_[..., depth // 2 :])
    y = np.empty_like(x)
    y[one] = x[one] * c - x[other] * s
    y[other] = x[one] * s + x[other] * c
    return y


def _rope_vjp(F, g, positions, frequencies, base, offset, interleaved, inverse, heads):
    back = F.rope(g, positions, frequencies, base=base, offset=offset, interleaved=interleaved, inverse=not inverse, heads=heads)
    return back, None, None


@op(
    vjp=_rope_vjp, ref="numpy", tol=4,
    samples=[S((5, 8)), S((2, 3, 7, 6), offset=3, interleaved=True), S((2, 3, 5, 4), (5,), dtypes=(None, "int64"), high=(1.0, 30)),
             S((2, 3, 5, 4), (2, 5), dtypes=(None, "int32"), high=(1.0, 30), inverse=True), S((2, 0, 4)),
             S((2, 5, 6), None, (3,), dtypes=(None, None, "int32"), low=(-1.0, 0, 0), high=(1.0, 0, 3), offset=2),
             S((6, 5, 1, 4), (6, 1), dtypes=(None, "int32"), high=(1.0, 30), heads=3)],
    errors=[(S((5, 7)), r"\[rope\] x must be \(..., N, D\) with an even D; x=\(5, 7\)"),
            (S((2, 5, 4), (4,), dtypes=(None, "int64")), r"\[rope\] positions must be \(N,\) or \(B, N\) for x of \(B, ..., N, D\)"),
            (S((5, 8), None, (3,)), r"\[rope\] frequencies must have shape \(4,\); frequencies=\(3,\), x=\(5, 8\)"),
            (S((2, 5, 4), heads=1), r"\[rope\] heads requires x of shape \(B, H, N, D\) .*; heads=1")],
)  # fmt: skip
def rope(
    x: Tensor, positions: Tensor | None = None, frequencies: Tensor | None = None, *, base: float = 10000.0, offset: int = 0,
    interleaved: bool = False, inverse: bool = False, heads: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotary position embedding of ``(..., N, D)``: pair i of the row at position p is rotated by ``p * base ** (-2 i / D)``.

    Pair i holds elements i and i + D / 2 or, if ``interleaved``, the neighbors 2 i and 2 i + 1. Rows are at positions
    ``offset, offset + 1, ..`` unless ``positions`` gives them: ``(N,)``, or ``(B, N)`` for x of ``(B, ..., N, D)``.
    ``frequencies`` of shape ``(D / 2,)``, in radians per position, replace the frequencies of ``base`` and have no gradient.
    ``inverse`` rotates back, as the gradient does. ``heads`` limits the rotation to that many leading heads; x must be ``(B, H, N, D)``
    and positions ``(B, N)``.

    >>> from netcl import ops
    >>> ops.rope([[1.0, 0.0]]).tolist()
    [[1.0, 0.0]]
    """
    x, positions, frequencies = launch.as_tensors("rope", x, positions, frequencies)
    launch.check_dtype("rope", x)
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ShapeError(message("rope", "x must be (..., N, D) with an even D", x=x.shape))
    if frequencies is not None and frequencies.shape != (x.shape[-1] // 2,):
        raise ShapeError(message("rope", f"frequencies must have shape ({x.shape[-1] // 2},)", frequencies=frequencies.shape, x=x.shape))
    outer, rows, n = _rope_sizes(x, positions)
    if heads is not None and (x.ndim != 4 or positions is None or positions.ndim != 2 or not 0 <= heads <= rows):
        what = "heads requires x of shape (B, H, N, D) and positions of shape (B, N), and must be from 0 to H"
        raise ShapeError(message("rope", what, heads=heads, x=x.shape, positions=None if positions is None else positions.shape))
    if x.backend == "cpu":
        return launch.run_cpu(rope_arrays, x, positions, frequencies, base=base, offset=offset, interleaved=interleaved, inverse=inverse,
                              heads=heads)  # fmt: skip
    y = Tensor.empty(x.shape, x.dtype, queue=x.queue)
    if x.size:
        operands = {"X": x.dtype, "P": "int32" if positions is None else positions.dtype}
        defines: dict[str, Any] = {"REAL": DTYPES[x.dtype].c_compute, "INTERLEAVED": interleaved, "POSITIONS": positions is not None}
        kernel = launch.kernel(x.queue, __file__, "rope.cl", "rope", operands, defines)
        sizes = (outer, rows, n, x.shape[-1], n if outer > 1 else 0, offset, -1 if inverse else 1, rows if heads is None else heads)
        tables = (x if positions is None else positions, _frequencies_on(x, base, frequencies))
        kernel(x.queue, outer * n * x.shape[-1] // 2, launch.LOCAL_1D, x, *tables, y, *sizes)
    return y
