"""Recurrent layers. ``recurrent`` runs one direction of one layer over all steps; its input is already multiplied by ``weight_ih``.

Forward keeps the values that the cells computed; ``recurrent_grad`` reads them. :mod:`netcl.ops.recurrent.steps` has the formulas,
:mod:`netcl.ops.recurrent.plans` the launches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from netcl.core.dtype import DTYPES, sum_dtype
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import launch, reduction
from netcl.engine.registry import S, lookup_op, op
from netcl.engine.waiting import late_flag
from netcl.ops import reduce  # noqa: F401, adds the row of sum
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul.gemm import Extras, product
from netcl.ops.pointwise import cast
from netcl.ops.recurrent import plans, steps
from netcl.ops.recurrent.steps import GATES, KEPT

__all__ = ["recurrent", "recurrent_grad"]

_sum_over = reduction.reduction_function(lookup_op("sum"))


def _check_layer(
    gx: Tensor, weight: Tensor, bias: Any, h0: Any, c0: Any, projection: Any, lengths: Any, kind: str
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return steps, rows, hidden units and the width of h; raises if the operands do not fit together."""
    if kind not in GATES:
        raise ValueError(message("recurrent", f"kind must be one of {', '.join(GATES)}", kind=repr(kind)))
    for name, x in {"gx": gx, "weight": weight, "bias": bias, "h0": h0, "c0": c0, "projection": projection}.items():
        if x is not None:
            launch.check_dtype("recurrent", x, name=name)
    gates = GATES[kind]
    if gx.ndim != 3 or weight.ndim != 2 or gx.shape[2] != weight.shape[0] or gx.shape[2] % gates or not gx.shape[0]:
        what = f"gx must be (steps, batch, {gates} * hidden) with at least 1 step, and weight ({gates} * hidden, width)"
        raise ShapeError(message("recurrent", what, gx=gx.shape, weight=weight.shape))
    (count, rows, columns), width = gx.shape, weight.shape[1]
    hidden = columns // gates
    wanted = {"bias": (columns,), "h0": (rows, width), "c0": (rows, hidden), "projection": (width, hidden), "lengths": (rows,)}
    given = {"bias": bias, "h0": h0, "c0": c0, "projection": projection, "lengths": lengths}
    for name, x in given.items():
        if x is not None and x.shape != wanted[name]:
            what = f"{name} must have shape {wanted[name]}, got {x.shape}"
            raise ShapeError(message("recurrent", what, gx=gx.shape, weight=weight.shape))
    if (projection is None) != (width == hidden) or (projection is not None and kind != "lstm"):
        what = "weight must have one column per hidden unit, or another number if an LSTM has a projection"
        raise ShapeError(message("recurrent", what, hidden=hidden, weight=weight.shape, kind=kind, projection=projection is not None))
    if (
        (bias is not None and kind != "gru")
        or (c0 is not None and (kind != "lstm" or h0 is None))
        or (kind == "lstm" and h0 is not None and c0 is None)
    ):
        what = "bias requires kind gru (else add it to gx), c0 requires kind lstm, and lstm takes both h0 and c0 or neither"
        raise ShapeError(message("recurrent", what, kind=kind, bias=bias is not None, h0=h0 is not None, c0=c0 is not None))
    if lengths is not None and lengths.dtype != "int32":
        raise DtypeError(message("recurrent", "lengths must be int32", dtype=lengths.dtype))
    return count, rows, hidden, width


def _wide(dtype: str, *tensors: Any) -> list[Any]:
    """Return the tensors in the dtype of the kernels; ``None`` stays ``None``."""
    return [None if x is None else cast(x, dtype) for x in tensors]


def _flags(reverse: bool, *given: Any) -> int:
    """Return the argument ``flags`` of cell.cl: the direction, and which of lengths, h0, bias and gradients of y, h and c are given."""
    return int(reverse) + sum(2 << i for i, x in enumerate(given) if x is not None)


def _layer_vjp(F, g, out, weight, bias_shape, h0, c0, projection, lengths, recorded, kind, reverse):
    (g_y, g_h), (g_c, g_saved), y, saved = g[:2], (None, g[2]) if kind != "lstm" else g[2:], out[0], out[-1]
    known = (weight, h0, c0, projection, lengths, y, saved)
    there = _grads_of(kind, h0, projection, bias_shape is not None)
    if g_saved is not None or recorded:  # second derivatives use the formulas
        found = steps.layer_backward(F, g_y, g_h, g_c, g_saved, *known, kind, reverse)
        found = tuple(x if here else None for x, here in zip(found, there, strict=True))
    else:
        made = iter(F.recurrent_grad(g_y, g_h, g_c, *known, kind=kind, reverse=reverse, biased=bias_shape is not None))
        found = tuple(next(made) if here else None for here in there)
    return *found, None


_LENGTHS = np.array([2, 4, 1], np.int32)
_SAMPLES = [
    S((4, 3, 24), (24, 6), None, None, None, None, None, kind="lstm"),
    S((4, 3, 24), (24, 6), None, (3, 6), (3, 6), None, _LENGTHS, kind="lstm", reverse=True),
    S((2, 3, 76), (76, 19), None, (3, 19), (3, 19), None, None, kind="lstm"),
    S((4, 3, 24), (24, 3), None, (3, 3), (3, 6), (3, 6), _LENGTHS, kind="lstm", reverse=True),
    S((4, 3, 18), (18, 6), (18,), (3, 6), None, None, _LENGTHS, kind="gru"),
    S((2, 3, 18), (18, 6), None, None, None, None, None, kind="gru", reverse=True),
    S((4, 3, 6), (6, 6), None, (3, 6), None, None, _LENGTHS, kind="tanh", reverse=True),
    S((1, 3, 6), (6, 6), None, None, None, None, None, kind="relu", low=0.1),
]
_ERRORS = [
    (S((3, 2, 20), (16, 5), kind="lstm"), r"\[recurrent\] gx must be \(steps, batch, 4 \* hidden\) with at least 1 step"),
    (S((3, 2, 20), (20, 5), None, (2, 4), (2, 5), kind="lstm"), r"\[recurrent\] h0 must have shape \(2, 5\), got \(2, 4\)"),
    (S((3, 2, 20), (20, 5), None, (2, 5), kind="lstm"), r"lstm takes both h0 and c0 or neither"),
    (S((3, 2, 5), (5, 4), kind="tanh"), r"weight must have one column per hidden unit, or another number if an LSTM has a projection"),
    (S((3, 2, 5), (5, 5), kind="elman"), r"\[recurrent\] kind must be one of tanh, relu, lstm, gru; kind='elman'"),
]  # fmt: skip


@op(vjp=_layer_vjp, ref="numpy", samples=_SAMPLES, errors=_ERRORS, tol=4)
def recurrent(
    gx: Tensor, weight: Tensor, bias: Tensor | None = None, h0: Tensor | None = None, c0: Tensor | None = None,
    projection: Tensor | None = None, lengths: Tensor | None = None, *, kind: str, reverse: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run one direction of a recurrent layer; returns y ``(steps, batch, width)``, the last h, an LSTM's last c, and values for backward.

    ``gx`` ``(steps, batch, gates * hidden)`` is the input times ``weight_ih`` plus the biases, ``weight`` is ``weight_hh``, ``bias`` the
    bias of a GRU's recurrent half, ``projection`` an LSTM's ``weight_hr``. ``kind`` is ``tanh``, ``relu``, ``lstm`` or ``gru``. Row b has
    ``lengths[b]`` steps (int32, from 1 to all); y is 0 after them.
    """
    gx, weight, bias, h0, c0, projection, lengths = launch.as_tensors("recurrent", gx, weight, bias, h0, c0, projection, lengths)
    count, rows, hidden, width = _check_layer(gx, weight, bias, h0, c0, projection, lengths, kind)
    dtype, wide = gx.dtype, sum_dtype(gx.dtype)
    if gx.backend == "cpu":
        kinds, every = (*(dtype,) * (3 if kind == "lstm" else 2), wide), (gx, weight, bias, h0, c0, projection, lengths)
        return launch.run_cpu(partial(steps.layer_forward, steps.NUMPY), *every, dtype=kinds, kind=kind, reverse=reverse)
    gx, weight, bias, h0, c0, projection = _wide(wide, gx, weight, bias, h0, c0, projection)
    layer = plans.Layer(kind, count, rows, hidden, width, wide, _flags(reverse, lengths, h0, bias))
    shapes = ((count, rows, width), (count, rows, KEPT[kind], hidden), (rows, width), (rows, hidden))
    y, saved, h_n, c_n = (Tensor.empty(shape, wide, queue=gx.queue) for shape in shapes)
    if y.size:
        full = y if projection is None else Tensor.empty((count, rows, hidden), wide, queue=gx.queue)
        given = [gx if x is None else x for x in (bias, h0, c0, lengths)]
        rest = (gx, *given, y, saved, h_n, c_n, full, late_flag(gx.queue))
        plans.run(gx.queue, layer, plans.LayerOperands({plans.FORWARD_PART: weight, plans.PROJECT: projection}, rest, y))
    results = (y, h_n, c_n) if kind == "lstm" else (y, h_n)
    return *(cast(x, dtype) for x in results), saved


def _grads_of(kind: str, h0: Any, projection: Any, biased: bool) -> tuple[bool, ...]:
    """Return which gradients exist: of gx, weight, bias, h0, c0 and projection."""
    return True, True, biased, h0 is not None, h0 is not None and kind == "lstm", projection is not None


def _layer_grad_cpu(g_y, g_h, g_c, weight, h0, c0, projection, lengths, y, saved, kind, reverse, biased):
    known = (weight, h0, c0, projection, lengths, y, saved)
    found = steps.layer_backward(steps.NUMPY, g_y, g_h, g_c, None, *known, kind, reverse)
    return tuple(x for x, there in zip(found, _grads_of(kind, h0, projection, biased), strict=True) if there)


_GRAD_SAMPLES = [
    S((4, 3, 6), None, None, (24, 6), None, None, None, None, (4, 3, 6), (4, 3, 5, 6), kind="lstm"),
    S((4, 3, 6), (3, 6), (3, 6), (24, 6), (3, 6), (3, 6), None, _LENGTHS, (4, 3, 6), (4, 3, 5, 6), kind="lstm", reverse=True),
    S((2, 3, 19), (3, 19), (3, 19), (76, 19), (3, 19), (3, 19), None, None, (2, 3, 19), (2, 3, 5, 19), kind="lstm"),
    S((4, 3, 3), (3, 3), (3, 6), (24, 3), (3, 3), (3, 6), (3, 6), _LENGTHS, (4, 3, 3), (4, 3, 5, 6), kind="lstm"),
    S(None, (3, 6), None, (18, 6), (3, 6), None, None, _LENGTHS, (4, 3, 6), (4, 3, 4, 6), kind="gru", biased=True),
    S((2, 3, 6), (3, 6), None, (18, 6), None, None, None, None, (2, 3, 6), (2, 3, 4, 6), kind="gru", reverse=True),
    S((4, 3, 6), (3, 6), None, (6, 6), (3, 6), None, None, _LENGTHS, (4, 3, 6), (4, 3, 1, 6), kind="tanh", reverse=True),
    S((5, 3, 6), None, None, (6, 6), (3, 6), None, None, None, (5, 3, 6), (5, 3, 1, 6), kind="relu"),
]


@op(vjp=None, ref="numpy", samples=_GRAD_SAMPLES, tol=8)
def recurrent_grad(
    g_y: Tensor | None, g_h: Tensor | None, g_c: Tensor | None, weight: Tensor, h0: Tensor | None, c0: Tensor | None,
    projection: Tensor | None, lengths: Tensor | None, y: Tensor, saved: Tensor, *, kind: str, reverse: bool = False, biased: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of :func:`recurrent` with respect to gx, weight, bias, h0, c0 and projection, where given."""
    order = (weight, g_y, g_h, g_c, h0, c0, projection, lengths, y, saved)
    weight, g_y, g_h, g_c, h0, c0, projection, lengths, y, saved = launch.as_tensors("recurrent_grad", *order)
    (count, rows, width), hidden, dtype, wide = y.shape, saved.shape[-1], y.dtype, sum_dtype(saved.dtype)
    there = _grads_of(kind, h0, projection, biased)
    types = (dtype, weight.dtype, *(weight.dtype if x is None else x.dtype for x in (None, h0, c0, projection)))
    if y.backend == "cpu":
        kinds = [name for name, here in zip(types, there, strict=True) if here]
        given = (g_y, g_h, g_c, weight, h0, c0, projection, lengths, y, saved)
        return launch.run_cpu(_layer_grad_cpu, *given, dtype=kinds, kind=kind, reverse=reverse, biased=biased)
    weight, g_y, g_h, g_c, h0, c0, projection, y, saved = _wide(wide, weight, g_y, g_h, g_c, h0, c0, projection, y, saved)
    layer = plans.Layer(kind, count, rows, hidden, width, wide, _flags(reverse, lengths, h0, None, g_y, g_h, g_c), True)
    found = _run_layer_grad(layer, g_y, g_h, g_c, weight, h0, c0, projection, lengths, y, saved, biased)
    return tuple(cast(x, name) for x, name, here in zip(found, types, there, strict=True) if here)


def _run_layer_grad(
    layer: plans.Layer, g_y: Any, g_h: Any, g_c: Any, weight: Tensor, h0: Any, c0: Any, projection: Any, lengths: Any, y: Tensor,
    saved: Tensor, biased: bool,
) -> list[Any]:  # fmt: skip
    """Return the gradients of gx, weight, bias, h0, c0 and projection; gradients of weights are products over all steps at once."""
    queue, (count, rows, width), hidden, gates = y.queue, y.shape, layer.hidden, GATES[layer.kind]

    def empty(*shape: int) -> Tensor:
        return Tensor.empty(shape, layer.dtype, queue=queue)

    dg, d_h0, carry = empty(count, rows, gates * hidden), empty(rows, width), empty(rows, hidden)
    carry = d_h0 if layer.kind == "gru" else carry
    dx = empty(count, rows, gates * hidden) if layer.kind == "gru" else dg
    dhp, full = (dg, dg) if projection is None else (empty(count, rows, width), empty(count, rows, hidden))
    if not dg.size:
        return [x.fill_(0) for x in (dx, empty(*weight.shape), empty(gates * hidden), d_h0, carry, empty(width, hidden))]
    h0, c0, g_y, g_h, g_c, ends = (y if x is None else x for x in (h0, c0, g_y, g_h, g_c, lengths))
    weights = {plans.BACKWARD: weight, plans.BACK_WIDTH: weight, plans.BACK_PROJECT: projection}
    rest = (g_y, g_h, g_c, h0, c0, ends, y, saved, dg, dx, dhp, d_h0, carry, full, late_flag(queue))
    plans.run(queue, layer, plans.LayerOperands(weights, rest, dg))
    before, total = empty(count, rows, width), count * rows
    shift = launch.kernel(queue, __file__, "previous.cl", "previous", None, {"REAL": DTYPES[layer.dtype].c_compute, "WIDTH": width})
    shift(queue, before.size, launch.LOCAL_1D, y, h0, ends, before, count, rows, layer.flags)

    def summed(a: Tensor, b: Tensor) -> Tensor:
        a, b = (with_shape(x, (total, x.size // total)) for x in (a, b))
        return product(a, b, (a.shape[1], b.shape[1]), Extras(Epilogue(layer.dtype)), trans_a=True)

    d_bias = _sum_over(with_shape(dg, (total, gates * hidden)), axis=0) if biased else None
    return [dx, summed(dg, before), d_bias, d_h0, carry, None if projection is None else summed(dhp, full)]
