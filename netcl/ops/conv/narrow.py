"""Depthwise and other convolutions with few channels and filters per group on GPUs, computed in registers (``narrow.cl``)."""

from __future__ import annotations

from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig
from netcl.core.kernel_selector import KernelVariant as V
from netcl.engine import algorithms, launch
from netcl.engine.strided import alignment
from netcl.ops.conv import columns, ending
from netcl.ops.conv.convolution import INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands, tier_config

NARROW_TAPS = 7  # maximum side of a kernel, whose weights and sums are kept in registers
NARROW_WEIGHTS = 72  # of one filter
NARROW_FILTERS = 8  # filters of a group: each rereads the group's input
STRIP_COLUMNS = 4  # elements of the result per work-item
STRIP_ROWS_MOST = 14
NARROW_ITEMS = 128
BUSY_ITEMS = 512  # work-items per compute unit below which strips are made shorter
GRADIENT_GROUPS = 12  # work-groups of a weight gradient per compute unit
_QUAD_STORES = {
    "float32": "*(__global float4*)(p) = v",
    "float16": "vstore_half4(v, 0, p)",
    "bfloat16": "*(__global ushort4*)(p) = (ushort4)(netcl_to_bfloat16((v).x), netcl_to_bfloat16((v).y), netcl_to_bfloat16((v).z),"
    " netcl_to_bfloat16((v).w))",
}


def suits_narrow(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether the groups are narrow and the kernel is small and dense enough for registers."""
    g, channels = conv.g, conv.sizes[1]
    if config.extra.get("form", "narrow") != "narrow" or config.variant is V.CONV2D_NAIVE or conv.compute != "float":
        return False
    small = max(g.kh, g.kw) <= NARROW_TAPS and max(channels, conv.filters) <= NARROW_FILTERS and channels * g.taps <= NARROW_WEIGHTS
    inside = all(pad < k for pad, k in zip(g.pad, (g.kh, g.kw), strict=True))
    return g.groups > 1 and small and inside and g.dilation == (1, 1) and g.stride[0] <= 4 and g.stride[1] in (1, 2, 4)


def _strip_rows(high: int, units: int, profile: DeviceProfile) -> int:
    """Return the rows per work-item: the most that occupy the device, preferably a divisor of ``high``. ``units``: work-items per row."""
    fitting = [n for n in range(1, STRIP_ROWS_MOST + 1) if high % n == 0 or high > STRIP_ROWS_MOST * n] or [1]
    return next((n for n in sorted(fitting, key=lambda n: (high % n == 0, n), reverse=True)
                 if units * -(-high // n) >= BUSY_ITEMS * profile.max_compute_units), min(2, high))  # fmt: skip


def run_narrow(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Launch the kernel; a weight gradient is summed in parts if the channels are too few to keep the device busy."""
    g, back = conv.g, conv.kind == INPUT_GRAD
    spread = back and g.stride != (1, 1)
    turned = back and not spread
    top, left = (g.kh - 1 - g.pad[0], g.kw - 1 - g.pad[1]) if turned else g.pad
    high, wide = conv.sizes[5:7]
    step = g.stride[0] if spread else 1
    across = -(-wide // STRIP_COLUMNS)
    quads = conv.dtype in launch.QUADS and conv.ending.stored in _QUAD_STORES  # all rows are loaded and stored four elements at a time
    quads = quads and g.w % STRIP_COLUMNS == g.ow % STRIP_COLUMNS == 0 and alignment(t.source, t.weight, t.result) == 16
    tiles: dict[str, Any] = {
        "TAPS_H": g.kh, "TAPS_W": g.kw, "STEP_H": g.stride[0], "STEP_W": g.stride[1], "TOP": top, "LEFT": left,
        "CHANNELS": conv.sizes[1], "QUADS": int(quads), "X_QUAD(p)": launch.QUADS.get(conv.dtype, "0"),
    }  # fmt: skip
    if conv.kind == WEIGHT_GRAD:
        return _narrow_weight_grad(queue, conv, tiles, profile, t)
    planes = g.n * g.groups * conv.filters
    rows = _strip_rows(-(-high // step), planes * across, profile)
    tiles |= {"ROWS": rows, "Y_QUAD(p, v)": _QUAD_STORES.get(conv.ending.stored, "0"), "PART": 2 if spread else 1}
    if spread:
        tiles |= {"ROW_LOW": (top - (g.kh - 1)) // step, "ROW_HIGH": (step - 1 + top) // step,
                  "LOW": (left - (g.kw - 1)) // g.stride[1], "HIGH": (STRIP_COLUMNS - 1 + left) // g.stride[1]}  # fmt: skip
    items, name = planes * across * -(-high // (rows * step)), "narrow_input_grad" if spread else "conv_narrow"
    size = (-(-items // NARROW_ITEMS) * NARROW_ITEMS,)
    ending.launch_ending(queue, conv, t, "ends.cl narrow.cl", name, tiles, size, (NARROW_ITEMS,))


def _narrow_weight_grad(queue: Any, conv: Convolution, tiles: dict[str, Any], profile: DeviceProfile, t: ConvOperands) -> None:
    g, pairs = conv.g, conv.g.f * conv.sizes[1]
    splits = max(1, min(g.n, -(-GRADIENT_GROUPS * profile.max_compute_units // pairs)))
    splits = -(-g.n // -(-g.n // splits))  # none without images
    tiles |= {"ROWS": _strip_rows(g.oh, 1 << 30, profile), "PART": 3, "ITEMS": NARROW_ITEMS, "W_QUAD(p)": launch.QUADS.get(conv.dtype, "0")}
    size = (pairs * splits * NARROW_ITEMS,)
    columns.split_weight_grad(queue, conv, t, splits, "ends.cl narrow.cl", "narrow_weight_grad", tiles, size, (NARROW_ITEMS,))


NARROW_CONFIG = tier_config(V.CONV2D_IMPLICIT_GEMM, "simt", form="narrow")
algorithms.add(
    "conv2d", "narrow", "narrow.cl", "GPUs, depthwise and groups of up to eight channels: registers only",
    "zoo_h200.json: MobileNetV2, step, compiled", run_narrow, device="gpu", when=suits_narrow, cost=algorithms.first,
    configurations=lambda problem: [NARROW_CONFIG] if problem.flags["groups"] > 1 else [], samples=(NARROW_CONFIG,),
)  # fmt: skip
