"""Convolutions of few results on GPUs: work-groups divide the sum over channels and taps (split.cl).

With one sample, a convolution often has fewer tiles of results than a large GPU has compute units. Its sum is then divided into parts, each
computed by work-groups of its own; a second launch adds the parts, in their order, and applies the epilogue.
"""

from __future__ import annotations

import math
from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, Problem, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.engine import algorithms
from netcl.engine.strided import alignment
from netcl.ops.conv import columns, ending, winograd
from netcl.ops.conv.convolution import FORWARD, GROUPS_PER_UNIT, THIN, WEIGHT_GRAD, Convolution, ConvOperands, tier_config

LEAST_PART, LEAST_SUM = 64, 256  # terms of a part, and of a sum that is divided
LARGE_PRODUCTS = 80_000_000  # multiply-adds from which larger tiles are faster
NARROWEST = 16  # channels and filters of one of several groups


def suits_split(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether split sums are requested or, if the policy decides, results are few and neither Winograd nor a single product is faster."""
    able = conv.kind != WEIGHT_GRAD and conv.dtype == "float32" and profile.max_work_group_size >= 256 and profile.local_mem_size >= 1 << 15
    form = config.extra.get("form")
    if form or is_named(config) or not able:
        return able and form == "split"
    few = profile.device_type == "gpu" and conv.is_few(profile.max_compute_units) and conv.filters > THIN
    wide = conv.g.groups == 1 or min(conv.sizes[1], conv.filters) >= NARROWEST
    return few and wide and not winograd.suits(conv, config, profile) and not columns.fills(conv, profile)


def run_split(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Launch a convolution or an input gradient. Sums are split only if they are long and the tiles do not occupy the device."""
    g, large = conv.g, conv.filters > 32 and conv.products > LARGE_PRODUCTS
    tile = {"BM": 64, "BN": 32, "BK": 16, "TM": 4} if large else {"BM": 32, "BN": 32, "BK": 32, "TM": 4}
    macros = {name: config.extra.get(name, size) for name, size in tile.items()}
    items, steps = macros["BM"] * macros["BN"] // (4 * macros["TM"]), (1, 1) if conv.kind == FORWARD else g.stride
    terms = conv.sizes[1] * math.prod(-(-k // step) for k, step in zip((g.kh, g.kw), steps, strict=True))  # of the longest sums
    across, down, third = -(-conv.pixels // macros["BN"]), -(-conv.filters // macros["BM"]), g.groups * conv.classes
    tiles, units = across * down * third, profile.max_compute_units
    parts = min(GROUPS_PER_UNIT * units // tiles, terms // LEAST_PART) if tiles <= units and terms >= LEAST_SUM else 1
    splits = max(1, min(config.extra.get("splits", parts), -(-terms // macros["BK"])))
    bare = conv if splits == 1 else conv.bare
    point = conv.kind == FORWARD and (g.taps, *g.pad) == (1, 0, 0)
    quads = conv.kind == FORWARD and terms % 4 == 0 and alignment(t.weight) == 16
    kernel = ending.ending_kernel(queue, bare, "axes.cl ends.cl split.cl", "conv_split", {**macros, "POINT": point, "W_QUADS": quads})
    sums = t if splits == 1 else ConvOperands(t.source, t.weight, t.room(splits * t.result.size, dtype="float32"))
    size, local = (across * items, down, third * splits), (items, 1, 1)
    kernel(queue, size, local, t.source, t.weight, *sums.end, *conv.sizes, splits, sums.scale)
    if splits > 1:
        filters, *plane = t.result.shape[1:]
        columns.add_splits(queue, conv, sums.result, splits, t, filters, math.prod(plane))


def _split_config(**extra: Any) -> KernelConfig:
    return tier_config(V.CONV2D_IMPLICIT_GEMM, "simt", form="split", **extra)


SPLIT_SAMPLES = (_split_config(), _split_config(BM=32, BN=32, splits=3))


def _split_space(problem: Problem) -> list[KernelConfig]:
    if problem.dtype != "float32" or problem.op == WEIGHT_GRAD:
        return []
    return [_split_config(BM=m, BN=n, splits=splits) for m, n in ((64, 32), (64, 64), (32, 128)) for splits in (1, 2, 4, 8, 16)]


algorithms.add(
    "conv2d", "split", "split.cl", "GPUs, float32: results too few to occupy the device, as of one sample; parts of a sum in parallel",
    "zoo_h200.json: ResNet-50, inference of one, compiled", run_split, device="gpu", when=suits_split, cost=algorithms.first,
    configurations=_split_space, samples=SPLIT_SAMPLES,
)  # fmt: skip
