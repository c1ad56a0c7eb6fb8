"""Softmax and log-softmax over any axis, with gradients that can be differentiated again."""

from __future__ import annotations

from functools import partial
from typing import Any

from netcl.core.dtype import sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch, rows
from netcl.engine.registry import S, op
from netcl.ops.fused_rows import along_axis, by_ops, log_softmax_grad_rows, log_softmax_rows, softmax_grad_rows, softmax_rows

_SOFTMAX_SAMPLES = [S((1, 1)), S((3, 5)), S((2, 257), low=-30.0, high=30.0), S((2, 3, 4), axis=1), S((4, 255), axis=0), S((0, 3)), S(()),
            S((2, 1, 33))]  # fmt: skip
_SOFTMAX_GRAD_SAMPLES = [S((3, 5), (3, 5)), S((2, 257), (2, 257)), S((2, 3, 17), (2, 3, 17), axis=1), S((0, 3), (0, 3))]
_BAD_AXIS = [(S((2, 3), axis=2), r"axis must be in range for 2 dimensions, got 2; it must be an integer in -2..1")]


def _run_softmax(op_name: str, kernel: str, axis: int, operands: dict[str, Tensor], log: bool, dtype: str) -> Tensor:
    """Launch a kernel over the rows or columns of the first operand and return the result, a tensor of ``dtype``."""
    first, *others = operands.values()
    axis = launch.check_axis(op_name, axis, first.ndim)
    for name, x in operands.items():
        launch.check_dtype(op_name, x, name=name.lower())
    if any(x.shape != first.shape for x in others):
        raise ShapeError(message(op_name, "upstream and y must have the same shape", upstream=first.shape, y=others[0].shape))
    out = Tensor.empty(first.shape, dtype, queue=first.queue)
    if not out.size:
        return out
    outer, n, inner = rows.around(first.shape, axis)
    dtypes = {name: x.dtype for name, x in operands.items()} | {"Y": out.dtype}
    dtypes.setdefault("P", out.dtype)
    keeps = not log and out.dtype in ("float32", "float64") and launch.on_cpu_device(out.queue)  # a GPU computes faster than it reads
    defines: dict[str, Any] = {"LOGARITHM": log, "KEEPS_EXP": keeps}
    where = (first.queue, __file__, "softmax.cl")
    if inner == 1:
        rows.run_rows(*where, f"{kernel}_rows", dtypes, outer, n, *operands.values(), out, **defines)
    else:
        rows.run_columns(*where, f"{kernel}_columns", dtypes, (outer, n, inner), *operands.values(), out, **defines)
    return out


# ---- ops


def _softmax_forward(op_name: str, x: Any, axis: int, log: bool, widen: bool) -> Tensor:
    (x,) = launch.as_tensors(op_name, x)
    dtype = sum_dtype(x.dtype) if widen else x.dtype
    if x.backend == "cpu":
        launch.check_dtype(op_name, x)
        formula = log_softmax_rows if log else softmax_rows
        return launch.run_cpu(partial(along_axis, formula), x, dtype=dtype, axis=launch.check_axis(op_name, axis, x.ndim))
    return _run_softmax(op_name, "softmax", axis, {"X": x}, log, dtype)


@op(vjp=lambda F, g, out, x_dtype, axis: F.softmax_grad(g, out, axis=axis, dtype=x_dtype), ref="numpy", amp="wide",
    samples=_SOFTMAX_SAMPLES, errors=_BAD_AXIS)  # fmt: skip
def softmax(x: Tensor, axis: int = -1, *, widen: bool = False) -> Tensor:
    """Normalize exponentials to a sum of one along an axis: ``exp(x) / sum(exp(x))``, computed without overflow.

    With ``widen``, the result for a 16-bit ``x`` is float32.

    >>> from netcl import ops
    >>> ops.softmax([[0.0, 0.0]]).tolist()
    [[0.5, 0.5]]
    """
    return _softmax_forward("softmax", x, axis, log=False, widen=widen)


@op(vjp=lambda F, g, out, x_dtype, axis: F.log_softmax_grad(g, out, axis=axis, dtype=x_dtype), ref="numpy", amp="wide",
    samples=_SOFTMAX_SAMPLES, errors=_BAD_AXIS)  # fmt: skip
def log_softmax(x: Tensor, axis: int = -1, *, widen: bool = False) -> Tensor:
    """The logarithm of :func:`softmax`: ``x - log(sum(exp(x)))``, accurate where the softmax itself is nearly 0.

    With ``widen``, the result for a 16-bit ``x`` is float32.

    >>> from netcl import ops
    >>> ops.log_softmax([[0.0, -1000.0]]).tolist()
    [[0.0, -1000.0]]
    """
    return _softmax_forward("log_softmax", x, axis, log=True, widen=widen)


def _grad(op_name: str, upstream: Any, y: Any, axis: int, log: bool, dtype: str | None) -> Tensor:
    upstream, y = launch.as_tensors(op_name, upstream, y)
    dtype = dtype or y.dtype
    if upstream.backend == "cpu":
        formula = partial(along_axis, log_softmax_grad_rows if log else softmax_grad_rows)
        return launch.run_cpu(formula, upstream, y, dtype=dtype, axis=launch.check_axis(op_name, axis, y.ndim))
    return _run_softmax(op_name, "softmax_grad", axis, {"X": upstream, "P": y}, log, dtype)


@op(vjp=None, formula=by_ops(softmax_grad_rows), ref="numpy", amp="float", samples=_SOFTMAX_GRAD_SAMPLES)
def softmax_grad(upstream: Tensor, y: Tensor, axis: int = -1, *, dtype: str | None = None) -> Tensor:
    """The gradient of :func:`softmax` from its result ``y``: ``y (upstream - sum(upstream y))``; ``dtype``: its dtype, by default y's."""
    return _grad("softmax_grad", upstream, y, axis, False, dtype)


@op(vjp=None, formula=by_ops(log_softmax_grad_rows), ref="numpy", amp="float", samples=_SOFTMAX_GRAD_SAMPLES)
def log_softmax_grad(upstream: Tensor, y: Tensor, axis: int = -1, *, dtype: str | None = None) -> Tensor:
    """The gradient of :func:`log_softmax` from its result ``y``: ``upstream - exp(y) sum(upstream)``; ``dtype``: as in softmax_grad."""
    return _grad("log_softmax_grad", upstream, y, axis, True, dtype)
