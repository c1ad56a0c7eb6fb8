"""Images unfolded into columns, one per window, and back: the ops ``im2col`` and ``col2im``, and convolutions as products over them.

With the windows of all images side by side, ``cols`` of ``(channels x taps, images x windows)``, the three passes are

    y = w cols,    dw = dy cols',    dx = fold(w' dy),

where ``y`` and ``dy`` have their filters outermost: a copy changes the order of the axes. Columns hold every pixel as often as there are
windows that see it. Writing and reading them pays where products run on matrix units and other kernels for convolutions do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core.device import handle_of
from netcl.core.tensor import Tensor
from netcl.ops import launch
from netcl.ops.conv import ending, winograd
from netcl.ops.conv.geometry import Geometry
from netcl.ops.conv.job import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Job, Launch
from netcl.ops.matmul import gemm, mma, nvidia, wgmma
from netcl.ops.strided import alignment, dense, take_block

MOST_VALUES = 1 << 27  # of columns: what a convolution may take beside its operands
ITEMS = 1 << 19  # work-items that are enough for any device; with more channels than that gives, each takes several
DIRECT_COST = {FORWARD: 1.4, INPUT_GRAD: 1.8, WEIGHT_GRAD: 1.8}  # of a term by taps.cl, in multiply-adds of a large product
LAUNCHES_COST = 3e8  # in the same measure: as winograd.py, with one launch more


# ---- unfolding and folding


def unfold(x: Tensor, cols: Tensor, g: Geometry, together: bool = False) -> None:
    """Columns of an image follow each other in a matrix of its own, or ``together`` with those of all images in one."""
    _kernel(x, cols, g, "im2col")(x.queue, *_grid(g.n * g.oh * g.ow, g.c), x, cols, *_numbers(g, together))


def fold(cols: Tensor, x: Tensor, g: Geometry) -> None:
    """Columns of each image, added up where windows overlap."""
    _kernel(cols, x, g, "col2im")(x.queue, *_grid(g.n * g.h * g.w, g.c), cols, x, *_numbers(g, together=False))


def _kernel(source: Tensor, result: Tensor, g: Geometry, name: str) -> Any:
    defines: dict[str, Any] = {"REAL": dtypes.DTYPES[source.dtype].c_compute, "KH": g.kh, "KW": g.kw}
    defines |= _periods(g) if name == "col2im" else {}
    return launch.kernel(source.queue, __file__, "columns.cl", name, {"X": source.dtype, "Y": result.dtype}, defines)


def _periods(g: Geometry) -> dict[str, int]:
    """Along each axis, every how many taps one may reach a given pixel."""
    high, wide = (step // math.gcd(step, apart) for step, apart in zip(g.stride, g.dilation, strict=True))
    return {"PERIOD_H": high, "PERIOD_W": wide}


def _grid(places: int, channels: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (places, min(channels, -(-ITEMS // max(1, places)))), (launch.LOCAL_1D, 1)


def _numbers(g: Geometry, together: bool) -> tuple[int, ...]:
    windows = g.oh * g.ow
    steps = (g.n * windows, windows) if together else (windows, g.c * g.taps * windows)
    return g.n, g.c, g.h, g.w, g.oh, g.ow, *g.stride, *g.pad, *g.dilation, *steps


# ---- convolutions: when


def fits(job: Job, queue: Any) -> bool:
    """Whether the device, and the bound on what a convolution may take, have room for the columns."""
    values = job.g.c * job.g.taps * _span(job.g)
    return values <= MOST_VALUES and dtypes.DTYPES[job.accumulator].itemsize * values <= handle_of(queue).profile.max_alloc_size // 4


def pays(job: Job, queue: Any) -> bool:
    """Whether products of float32 run on matrix units, and with what else is to do take less time than a direct sum."""
    profile = handle_of(queue).profile
    if job.dtype != "float32" or not nvidia.capable(profile) or not fits(job, queue):
        return False
    p, best = product(job), {wgmma.TIER: wgmma.best, mma.TIER: mma.best}
    tier = gemm.vendor_of(queue, p, profile) if cost(job, 0, profile.max_compute_units) < direct_cost(job) else None
    return tier in best and cost(job, best[tier](p, profile.max_compute_units)[1], profile.max_compute_units) < direct_cost(job)


def cost(job: Job, multiplied: float, units: int) -> float:
    """How long it takes, as multiply-adds of all compute units, if each of them does so many in the time of the product."""
    g = job.g
    moved = math.prod(g.x_shape) + g.c * g.taps * _span(g) + 2 * math.prod(g.y_shape)
    moved += 2 * math.prod(g.w_shape) if job.kind == INPUT_GRAD else 0
    return winograd.VALUE_COST * moved + units * multiplied + LAUNCHES_COST


def direct_cost(job: Job) -> float:
    """The same of the kernels that unfold nothing."""
    return DIRECT_COST[job.kind] * math.prod(job.g.w_shape) * _span(job.g)


def product(job: Job, placed: bool = True) -> gemm.Product:
    """The product of a pass, a batch for each group; ``placed``: the weights begin at a multiple of 16 bytes."""
    g = job.g
    m, rows, span = job.g.f // g.groups, g.c // g.groups * g.taps, _span(g)
    sizes = {FORWARD: (m, span, rows), INPUT_GRAD: (rows, span, m), WEIGHT_GRAD: (m, rows, span)}[job.kind]
    p = gemm.Product(*sizes, False, job.kind == WEIGHT_GRAD, *(job.dtype,) * 3, batch=(1, g.groups))
    strides = p.m * p.k, p.n * p.k
    aligned = placed and not any(value % 4 for value in (p.lda, p.ldb, *strides))
    return replace(p, a_strides=(0, strides[0]), b_strides=(0, strides[1]), aligned=aligned, placed=placed)


def _span(g: Geometry) -> int:
    return g.n * g.oh * g.ow


# ---- convolutions: plans


def plan(job: Job, queue: Any) -> Launch:
    """The launches of a convolution or a gradient."""
    return {FORWARD: _forward, INPUT_GRAD: _input_grad, WEIGHT_GRAD: _weight_grad}[job.kind](job, queue)


def _forward(job: Job, queue: Any) -> Launch:
    g, pixels = job.g, job.g.oh * job.g.ow
    multiply = functools.cache(lambda placed: gemm.plan_for(queue, product(job, placed)))
    quads = int(pixels % 4 == 0 and job.dtype == job.ending.stored == "float32")
    outputs = ending.kernel(queue, job, "ends.cl columns.cl", "unfolded_outputs", {"QUADS": quads})

    def sums(queue: Any, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        cols, y = (Tensor.empty((rows, _span(g)), job.dtype, queue=queue) for rows in (g.c * g.taps, g.f))
        unfold(x, cols, g, together=True)
        return (gemm.run(multiply(alignment(w) == 16), queue, w, cols, None, y),)

    return ending.Ending(outputs, *_grid(_span(g) // (4 if quads else 1), g.f), (g.n, g.f, pixels), sums)


def _input_grad(job: Job, queue: Any) -> Launch:
    g, m, rows = job.g, job.g.f // job.g.groups, job.g.c // job.g.groups * job.g.taps
    multiply = gemm.plan_for(queue, product(job))
    outputs = ending.kernel(queue, job, "ends.cl columns.cl", "folded_outputs", {"KH": g.kh, "KW": g.kw, **_periods(g)})

    def columns(queue: Any, dy: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        turned = _reordered(w, (g.groups, m, rows), (0, 2, 1))
        cols = Tensor.empty((g.c * g.taps, _span(g)), job.dtype, queue=queue)
        return (gemm.run(multiply, queue, turned, _filters_first(dy, g), None, cols),)

    return ending.Ending(outputs, *_grid(g.n * g.h * g.w, g.c), _numbers(g, together=True), columns)


def _weight_grad(job: Job, queue: Any) -> Launch:
    g, multiply = job.g, gemm.plan_for(queue, product(job))

    def go(queue: Any, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        cols = Tensor.empty((g.c * g.taps, _span(g)), job.dtype, queue=queue)
        unfold(x, cols, g, together=True)
        gemm.run(multiply, queue, _filters_first(dy, g), cols, None, dw)

    return go


def _filters_first(y: Tensor, g: Geometry) -> Tensor:
    return _reordered(y, (g.n, g.f, g.oh * g.ow), (1, 0, 2))


def _reordered(x: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    strides = dense(shape)
    return take_block(x, [shape[i] for i in order], 0, [strides[i] for i in order])
