"""Strided input gradients, and so transposed convolutions, on CPUs: one product of dy and the weights, then a fold (``fold.cl``).

With dy as ``(images x windows, filters)`` and the weights as they are stored, ``(filters, channels x taps)``, the product holds what every
window adds to the pixels under its taps. The fold adds up the windows of each pixel and applies the epilogue. The alternative, a panel
(``cpu.cl``), is a convolution per remainder of a pixel's position modulo the stride: every one of them reads all weights, in short runs.
"""

from __future__ import annotations

import math
from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.engine import algorithms, launch
from netcl.engine.strided import take_block
from netcl.ops.conv import columns, direct, ending
from netcl.ops.conv.convolution import GROUPS_PER_UNIT, INPUT_GRAD, Convolution, ConvOperands, tier_config
from netcl.ops.matmul import gemm

LINE_BYTES = 16 * 1024  # of a line of pixels with its padding, in local memory
FOLD_TAPS = 256  # which are unrolled
EACH = 4  # channels of a work-group: neighbors in memory, so that a window's taps are read a few cache lines at a time
# In multiply-adds of a product, from transposed_products.txt: a multiply-add of a panel, whose tiles have rows of channels; a value that is
# written by either; copying dy, and two more launches. By lanes: what packing a weight adds. Few rows of wide vectors need no packing.
PANEL_COST, PANEL_ROWS, FOLDED_COST, FOLD_LAUNCHES, WEIGHT_COST = 1.3, 6, 16, 2e6, {4: 12}


def _can_fold(conv: Convolution, profile: DeviceProfile) -> bool:
    g = conv.g
    short = g.ow * g.stride[1] + max(g.kw, g.stride[1]) <= LINE_BYTES // direct.vectors(conv, profile)[0] and g.taps <= FOLD_TAPS
    return conv.kind == INPUT_GRAD and short and g.groups == 1 and g.dilation == (1, 1) and columns.has_room(conv, profile)


def _suits_fold(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether a configuration requests it, or it costs less than a panel. Only with a stride, or where dy is one pixel."""
    if not _can_fold(conv, profile) or is_named(config):
        return config.extra.get("form") == "fold" and _can_fold(conv, profile)
    g, windows = conv.g, conv.g.n * conv.g.oh * conv.g.ow
    summed = g.n * g.h * g.w * -(-g.c // PANEL_ROWS) * PANEL_ROWS * g.f * g.taps / conv.classes
    panel = PANEL_COST * summed + FOLDED_COST * math.prod(g.x_shape)
    fold = conv.products + FOLDED_COST * g.c * g.taps * windows + WEIGHT_COST.get(profile.lanes, 0) * math.prod(g.w_shape) + FOLD_LAUNCHES
    return (conv.classes > 1 or g.oh * g.ow == 1) and fold < panel


@ending.widened
def _run_fold(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    g, windows = conv.g, conv.g.oh * conv.g.ow
    p = gemm.Matmul(g.n * windows, g.c * g.taps, g.f, False, False, *(conv.dtype,) * 3, aligned=g.f % 4 == g.c * g.taps % 4 == 0)
    products = t.room(p.m, p.n, dtype=conv.dtype)
    last = take_block(t.source, (g.n, windows, g.f), 0, (g.f * windows, 1, windows))  # dy with its filters last
    columns.multiply_unaligned(queue, p, gemm.Operands(last, t.weight, products))
    blocks = -(-g.c // EACH)
    lines = -(-g.h // max(1, min(g.h, GROUPS_PER_UNIT * profile.max_compute_units // (g.n * blocks))))
    macros = {"KH": g.kh, "KW": g.kw, "STRIDE_H": g.stride[0], "STRIDE_W": g.stride[1], "FETCHES": int(launch.fetches(queue))}
    size, lanes, _ = direct.vectors(conv, profile)
    macros |= {"VW": min(lanes, max(4, 1 << (g.w.bit_length() - 1))), "ROOM": LINE_BYTES // size}
    kernel = ending.ending_kernel(queue, conv, "ends.cl lanes.cl fold.cl", "fold_taps", macros)
    kernel(queue, (-(-g.h // lines), blocks, g.n), None, products, *t.end, g.c, g.h, g.w, g.oh, g.ow, *g.pad, lines, EACH, t.scale)


_FOLD_CONFIG = tier_config(V.CONV2D_IM2COL, "cpu", form="fold")
algorithms.add(
    "conv2d", "fold", "fold.cl", "strided input gradients and transposed convolutions: one product, its taps added where they overlap",
    "transposed_products.txt: conv transpose 4x4/2 8x256x8x8 to 128", _run_fold, device="cpu",
    when=_suits_fold, cost=algorithms.first, samples=(_FOLD_CONFIG,),
    configurations=lambda problem: [_FOLD_CONFIG] if problem.op == INPUT_GRAD and problem.flags["groups"] == 1 else [],
)  # fmt: skip
