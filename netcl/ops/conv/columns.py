"""Unfolds images to columns (one per window) and folds columns to images: ``im2col``, ``col2im``, and convolutions as products.

With a matrix ``cols`` of shape ``(channels x taps, images x windows)``, the three passes are

    y = w cols,    dw = dy cols',    dx = fold(w' dy),

where ``y`` and ``dy`` have filters as the first axis, so a copy permutes their axes. Large images, and gradients of few weights, use one
product per image instead; a 1 x 1 kernel without stride and padding then needs no columns. Columns repeat a pixel for every window that
contains it. By default, columns are used for float32 on NVIDIA's matrix units if a cost model predicts a gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.kernel_selector import KernelConfig, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.strided import alignment, dense, take_block
from netcl.ops.conv import ending, winograd
from netcl.ops.conv.convolution import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.conv.geometry import Geometry
from netcl.ops.matmul import gemm, nvidia

MOST_VALUES = 1 << 27  # values of columns, a bound on the memory that a convolution uses besides its operands
ENOUGH_ITEMS, MOST_LOADS = 1 << 18, 18  # work-items that keep any device busy, and loads that each should have in flight
# In multiply-adds of a large product on a GPU, as in winograd.py: a term by other kernels, and a launch.
COLUMNS_DIRECT_COST, LAUNCH_COST = {FORWARD: 1.3, INPUT_GRAD: 1.3, WEIGHT_GRAD: 1.5}, 2e8
LEAST_TILE = (16, 64)  # minimum rows and columns of those kernels
SPLIT_PRODUCTS = 160_000_000  # multiply-adds up to which few results are computed by split.cl
PRODUCT_TILE, MOST_EMPTY = 128, 1.15  # pixels of a product's tile, and the largest ratio of computed to existing pixels


# ---- unfolding and folding


def write_columns(x: Tensor, cols: Tensor, g: Geometry, together: bool = False) -> None:
    """Unfold images to columns: one matrix per image or, with ``together``, one matrix for all images."""
    each, size, local = _columns_grid(g.n * g.oh * g.ow, g.c, g.taps)
    _columns_kernel(x, cols, "im2col", {"EACH": each, **_window_macros(g)})(x.queue, size, local, x, cols, *_window_numbers(g, together))


def add_columns(cols: Tensor, x: Tensor, g: Geometry) -> None:
    """Fold the columns of each image back, adding values where windows overlap."""
    each, size, local = _columns_grid(g.n * g.h * g.w, g.c, _reach(g))
    kernel = _columns_kernel(cols, x, "col2im", {"EACH": each, **_window_macros(g)})
    kernel(x.queue, size, local, cols, x, *_window_numbers(g, together=False))


def _columns_kernel(source: Tensor, result: Tensor, name: str, defines: dict[str, Any]) -> Any:
    real = dtypes.DTYPES[result.dtype].c_compute
    return launch.kernel(source.queue, __file__, "columns.cl", name, {"X": source.dtype, "Y": result.dtype}, {"REAL": real, **defines})


def _window_macros(g: Geometry) -> dict[str, int]:
    """Return the macros of a window. ``PERIOD_H`` and ``PERIOD_W`` are the distances in taps between taps that can reach the same pixel."""
    high, wide = _periods(g)
    sizes = {"KH": g.kh, "KW": g.kw, "STRIDE_H": g.stride[0], "STRIDE_W": g.stride[1]}
    return sizes | {"PERIOD_H": high, "PERIOD_W": wide}


def _periods(g: Geometry) -> tuple[int, int]:
    high, wide = (step // math.gcd(step, apart) for step, apart in zip(g.stride, g.dilation, strict=True))
    return high, wide


def _reach(g: Geometry) -> int:
    """Return the maximum number of windows that contain the same pixel."""
    return math.prod(-(-taps // period) for taps, period in zip((g.kh, g.kw), _periods(g), strict=True))


def _columns_grid(places: int, channels: int, loads: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Return the channels per work-item, the global size and the local size for ``places`` work-items with ``loads`` loads per channel."""
    several = (n for n in (8, 4, 2) if channels % n == 0 and n * loads <= MOST_LOADS and places * channels >= n * ENOUGH_ITEMS)
    each = next(several, 1)
    return each, (places, channels // each), (launch.LOCAL_1D, 1)


def _window_numbers(g: Geometry, together: bool) -> tuple[int, ...]:
    windows = g.oh * g.ow
    steps = (g.n * windows, windows) if together else (windows, g.c * g.taps * windows)
    return g.n, g.c, g.h, g.w, g.oh, g.ow, *g.pad, *g.dilation, *steps


# ---- convolutions: when


def suits(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether the columns fit in memory and either the configuration requests them or the default policy expects a gain."""
    variant = conv.variant(config)
    policy = not is_named(config) and variant in (V.CONV2D_IMPLICIT_GEMM, V.CONV2D_WINOGRAD)
    units = policy and conv.dtype == "float32" and nvidia.capable(profile)
    may_pay = units and (fills(conv, profile) or columns_cost(conv, 0, profile.max_compute_units) < direct_cost(conv))
    return (variant is V.CONV2D_IM2COL or may_pay) and has_room(conv, profile)


def fills(conv: Convolution, profile: DeviceProfile) -> bool:
    """Whether a product with split sums is faster, because results are few. A small convolution qualifies only if nothing is unfolded."""
    plain = conv.kind == FORWARD and _apart(conv) and _is_image(conv.g)
    few = conv.is_few(profile.max_compute_units) and (plain or conv.products > SPLIT_PRODUCTS)
    return few and conv.dtype == "float32" and nvidia.capable(profile) and has_room(conv, profile)


def has_room(conv: Convolution, profile: DeviceProfile) -> bool:
    """Whether the columns, if the pass needs any, fit in device memory and in the bound on temporary memory."""
    if _apart(conv) and _is_image(conv.g):
        return True
    values = conv.g.c * conv.g.taps * _pixel_count(conv.g)
    return values <= MOST_VALUES and dtypes.DTYPES[conv.accumulator].itemsize * values <= profile.max_alloc_size // 4


def pays(queue: Any, conv: Convolution, profile: DeviceProfile) -> bool:
    """Whether :func:`fills` holds, or the product runs on matrix units and, unfolding included, is faster than a direct convolution."""
    if fills(conv, profile):
        return True
    p = columns_product(conv)
    product, _ = gemm.product_algorithm(queue, p, gemm.PORTABLE, profile)
    return product is not gemm.TILED_PRODUCT and columns_cost(conv, product.cost(p, profile), profile.max_compute_units) < direct_cost(conv)


def columns_cost(conv: Convolution, multiplied: float, units: int) -> float:
    """Estimate the time of a convolution with columns, in multiply-adds. ``multiplied``: the time of its product per compute unit."""
    g, apart = conv.g, _apart(conv)
    x, w, y = map(math.prod, (g.x_shape, g.w_shape, g.y_shape))
    unfolded = 0 if apart and _is_image(g) else x + g.c * g.taps * _pixel_count(g)
    turned = (w if conv.kind == INPUT_GRAD else g.n * w if apart and conv.kind == WEIGHT_GRAD else 0) + (0 if apart else y)
    launches = 1 + (unfolded > 0) + (not apart) + (conv.kind == INPUT_GRAD or (apart and conv.kind == WEIGHT_GRAD))
    return winograd.VALUE_COST * (unfolded + 2 * turned) + units * multiplied + launches * LAUNCH_COST


def direct_cost(conv: Convolution) -> float:
    """Estimate the time of a direct convolution, in the unit of :func:`columns_cost`; x is read ``conv.classes`` times."""
    g, (rows, columns) = conv.g, (conv.filters, conv.g.c // conv.g.groups * conv.g.taps if conv.kind == WEIGHT_GRAD else conv.pixels)
    computed = math.prod(-(-size // tile) * tile / size for size, tile in zip((rows, columns), LEAST_TILE, strict=True))
    moved = conv.classes * math.prod(g.x_shape) + math.prod(g.y_shape)
    products = COLUMNS_DIRECT_COST[conv.kind] * computed * math.prod(g.w_shape) * _pixel_count(g)
    return products + winograd.VALUE_COST * moved + 2 * LAUNCH_COST


def columns_product(conv: Convolution) -> gemm.Matmul:
    """Return the product that computes a pass, with a batch for each group, and for each image if images are separate."""
    g, apart = conv.g, _apart(conv)
    m, rows, span = g.f // g.groups, g.c // g.groups * g.taps, g.oh * g.ow if apart else _pixel_count(g)
    sizes = {FORWARD: (m, span, rows), INPUT_GRAD: (rows, span, m), WEIGHT_GRAD: (m, rows, span)}[conv.kind]
    p = gemm.Matmul(*sizes, False, conv.kind == WEIGHT_GRAD, *(conv.dtype,) * 3, batch=(g.n if apart else 1, g.groups), placed=True)
    a, b = ((g.groups * size * apart, size) for size in (p.m * p.k, p.n * p.k))
    a = a if conv.kind == WEIGHT_GRAD else (0, a[1])  # every image has the same weights
    return replace(p, a_strides=a, b_strides=b, aligned=not any(value % 4 for value in (p.lda, p.ldb, *a, *b)))


def _apart(conv: Convolution) -> bool:
    """Whether every image is a separate product, so that no axes are permuted.

    In a forward pass without a bias and in an input gradient: if the pixels of an image fill the tiles of a product. In a weight gradient:
    if the weight gradients of all images have fewer elements than ``dy``, which would be copied otherwise.
    """
    g, pixels = conv.g, conv.g.oh * conv.g.ow
    if conv.kind == WEIGHT_GRAD:
        return g.n * math.prod(g.w_shape) < math.prod(g.y_shape)
    return pixels % 4 == 0 and -(-pixels // PRODUCT_TILE) * PRODUCT_TILE <= MOST_EMPTY * pixels and not (conv.bias and conv.kind == FORWARD)


def _is_image(g: Geometry) -> bool:
    """Whether the columns of an image equal the image."""
    return (g.taps, *g.stride, *g.pad) == (1, 1, 1, 0, 0) and (g.oh, g.ow) == (g.h, g.w)


def _pixel_count(g: Geometry) -> int:
    return g.n * g.oh * g.ow


# ---- convolutions: launches


@ending.widened
def run(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Launch a convolution or one of its gradients as a product over unfolded columns."""
    if _apart(conv) and conv.kind == FORWARD:
        _by_product(conv, queue, t, t.weight, _columns(t.source, conv.g, together=False))
    elif _apart(conv) and conv.kind == INPUT_GRAD and _is_image(conv.g) and not conv.bias:
        _by_product(conv, queue, t, _turned(t.weight, conv.g), t.source)
    else:
        {FORWARD: _forward_columns, INPUT_GRAD: _input_grad, WEIGHT_GRAD: _columns_weight_grad}[conv.kind](conv, queue, t)


_SAMPLE = KernelConfig(V.CONV2D_IM2COL, extra={"tier": "simt"})
algorithms.add(
    "conv2d", "columns", "columns.cl", "strided float32 convolutions, where products run on matrix units: one over unfolded windows",
    "cases_h200.json: conv 3x3/2 128x128x16x16 to 256 weight gradient", run, device="gpu",
    when=suits, configurations=lambda problem: [_SAMPLE], samples=(_SAMPLE,),
    probe=lambda queue, conv, config: conv.variant(config) is V.CONV2D_IM2COL or pays(queue, conv, profile_of(queue)),
)  # fmt: skip


def _is_product(conv: Convolution, config: KernelConfig) -> bool:
    """Whether the kernel covers the whole image, so that the pass is one product of tensors as they are. A bias is per column there."""
    g = conv.g
    whole = (g.kh, g.kw, *g.pad, g.groups) == (g.h, g.w, 0, 0, 1) and g.n > 0
    return whole and not is_named(config) and not (conv.bias and conv.kind == INPUT_GRAD and g.taps > 1)


def _whole_image(conv: Convolution, t: ConvOperands) -> None:
    g, rows = conv.g, conv.g.c * conv.g.taps
    if conv.kind == WEIGHT_GRAD:  # the product of dy, transposed, and x
        p, a, b = gemm.Matmul(g.f, rows, g.n, True, False, *(conv.dtype,) * 3), t.weight, t.source
    else:
        n, k = (g.f, rows) if conv.kind == FORWARD else (rows, g.f)
        p = gemm.Matmul(g.n, n, k, False, conv.kind == FORWARD, conv.dtype, conv.dtype, conv.ending.stored, conv.bias or None, conv.ending)
        p, a, b = replace(p, scaled=conv.epilogue is not None), t.source, t.weight
    aligned = p.lda % 4 == p.ldb % 4 == 0
    multiply_unaligned(t.result.queue, replace(p, aligned=aligned), gemm.Operands(a, b, *t[2:]))


algorithms.add(
    "conv2d", "whole", "", "kernels as large as the image, such as a head of 4 x 4 on 4 x 4: one product, nothing is unfolded",
    "zoo_h200.json: DCGAN, step, compiled", lambda queue, conv, config, profile, t: _whole_image(conv, t),
    when=lambda conv, config, profile: _is_product(conv, config), cost=algorithms.first,
)  # fmt: skip


def _by_product(conv: Convolution, queue: Any, t: ConvOperands, a: Tensor, b: Tensor) -> None:
    p = replace(columns_product(conv), c=conv.ending.stored, epilogue=conv.ending, scaled=conv.epilogue is not None)
    multiply_unaligned(queue, p, gemm.Operands(a, b, t.result, None, t.residual, t.scale))


def _forward_columns(conv: Convolution, queue: Any, t: ConvOperands) -> None:
    g, pixels = conv.g, conv.g.oh * conv.g.ow
    cols, y = _columns(t.source, g), t.room(g.f, _pixel_count(g), dtype=conv.dtype)
    multiply_unaligned(queue, columns_product(conv), gemm.Operands(t.weight, cols, y))
    quads = int(pixels % 4 == 0 and conv.dtype == conv.ending.stored == "float32")
    each, size, local = _columns_grid(_pixel_count(g) // (4 if quads else 1), g.f, 4 if quads else 1)
    outputs = ending.ending_kernel(queue, conv, "ends.cl columns.cl", "unfolded_outputs", {"QUADS": quads, "EACH": each})
    outputs(queue, size, local, y, *t.end, g.n, g.f, pixels, t.scale)


def _input_grad(conv: Convolution, queue: Any, t: ConvOperands) -> None:
    g, apart = conv.g, _apart(conv)
    source, cols = t.source if apart else _filters_first(t.source, g), t.room(g.c * g.taps, _pixel_count(g), dtype=conv.dtype)
    multiply_unaligned(queue, columns_product(conv), gemm.Operands(_turned(t.weight, g), source, cols))
    each, size, local = _columns_grid(g.n * g.h * g.w, g.c, _reach(g))
    outputs = ending.ending_kernel(queue, conv, "ends.cl columns.cl", "folded_outputs", {"EACH": each, **_window_macros(g)})
    outputs(queue, size, local, cols, *t.end, *_window_numbers(g, together=not apart), t.scale)


def _columns_weight_grad(conv: Convolution, queue: Any, t: ConvOperands) -> None:
    g, apart = conv.g, _apart(conv)
    source, cols = t.weight if apart else _filters_first(t.weight, g), _columns(t.source, g, together=not apart)
    parts = t.room(g.n, t.result.size, dtype=conv.dtype) if apart else t.result
    multiply_unaligned(queue, columns_product(conv), gemm.Operands(source, cols, parts))
    if apart:
        add_splits(queue, conv.bare, parts, g.n, t)


def multiply_unaligned(queue: Any, p: gemm.Matmul, t: gemm.Operands) -> None:
    """Launch a product whose operands may be a caller's tensors, which need not be aligned to 16 bytes."""
    placed = alignment(t.a, t.b) == 16
    gemm.multiply(queue, replace(p, placed=placed, aligned=p.aligned and placed), t)


def _columns(x: Tensor, g: Geometry, together: bool = True) -> Tensor:
    if not together and _is_image(g):
        return x
    cols = Tensor.empty((g.c * g.taps, _pixel_count(g)), x.dtype, queue=x.queue)
    write_columns(x, cols, g, together)
    return cols


def add_splits(queue: Any, conv: Convolution, parts: Tensor, splits: int, t: ConvOperands, filters: int = 1, plane: int = 1) -> None:
    """Sum ``splits`` parts in order, and apply the epilogue of ``conv``, whose bias has a value for each ``plane`` of ``filters``."""
    kernel = ending.ending_kernel(queue, conv, "ends.cl columns.cl", "sum_splits", {})
    kernel(queue, (t.result.size,), (launch.LOCAL_1D,), parts, *t.end, t.result.size, plane, filters, splits, t.scale)


def split_weight_grad(
    queue: Any, conv: Convolution, t: ConvOperands, splits: int, files: str, name: str,
    defines: dict[str, Any], size: Any, local: Any, *numbers: int,
) -> None:  # fmt: skip
    """Compute a weight gradient in ``splits`` parts and add the parts. Several parts keep the device busy if weights are few."""
    operands = {"X": conv.dtype, "W": conv.dtype, "Y": conv.dtype if splits == 1 else conv.accumulator}
    kernel = launch.kernel(queue, __file__, files, name, operands, {"REAL": conv.compute, "PART": 2, **defines})
    parts = t.result if splits == 1 else t.room(splits, t.result.size, dtype=conv.accumulator)
    kernel(queue, size, local, t.source, t.weight, parts, *conv.sizes, *numbers, splits)
    if splits > 1:
        add_splits(queue, conv.bare.wide, parts, splits, t)


def _filters_first(y: Tensor, g: Geometry) -> Tensor:
    return _reordered_columns(y, (g.n, g.f, g.oh * g.ow), (1, 0, 2))


def _turned(w: Tensor, g: Geometry) -> Tensor:
    return _reordered_columns(w, (g.groups, g.f // g.groups, g.c // g.groups * g.taps), (0, 2, 1))


def _reordered_columns(x: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    strides = dense(shape)
    return take_block(x, [shape[i] for i in order], 0, [strides[i] for i in order])
