"""Convolutions of few results on GPUs: work-groups divide the sum over channels and taps (split.cl).

With one sample, a convolution has fewer tiles of results than a large GPU has compute units. Its sum is then divided into parts, each
computed by work-groups of its own; a second launch adds the parts, in their order, and applies the epilogue.
"""

from __future__ import annotations

import math
from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, Problem, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.engine import algorithms, launch
from netcl.engine.strided import alignment
from netcl.ops.conv import ending
from netcl.ops.conv.job import FORWARD, GROUPS_PER_UNIT, THIN, WEIGHT_GRAD, ConvOperands, Job, tier_config

PART_STEP = 16  # terms that a work-group multiplies between two barriers
LEAST_PART = 4 * PART_STEP  # terms of a part
FEW_RESULT_TILES = 4  # tiles per compute unit up to which other kernels leave a GPU idle


def _split_tile(job: Job, config: KernelConfig) -> tuple[int, int]:
    """Return filters and pixels of a work-group."""
    filters, pixels = (32, 128) if job.filters <= 32 else (64, 64)
    return config.extra.get("BM", filters), config.extra.get("BN", pixels)


def _split_grid(job: Job, m: int, n: int) -> tuple[int, int, int]:
    return -(-job.pixels // n), -(-job.filters // m), job.g.groups * job.classes


def _sum_terms(job: Job) -> int:
    """Return the terms of a sum; for a strided input gradient, of its longest class."""
    g, steps = job.g, (1, 1) if job.kind == FORWARD else job.g.stride
    return job.sizes[1] * math.prod(-(-k // step) for k, step in zip((g.kh, g.kw), steps, strict=True))


def suits_split(job: Job, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether parts were requested, or a policy decides and there are too few tiles of results."""
    able = job.kind != WEIGHT_GRAD and job.dtype == "float32" and profile.max_work_group_size >= 256 and profile.local_mem_size >= 1 << 15
    form = config.extra.get("form")
    if form or is_named(config) or not able:
        return able and form == "split"
    few = math.prod(_split_grid(job, 64, 64)) <= FEW_RESULT_TILES * profile.max_compute_units
    return few and job.filters > THIN and profile.device_type == "gpu"


def run_split(queue: Any, job: Job, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Launch a convolution or an input gradient, in one part if its tiles are enough."""
    (m, n), terms, g = _split_tile(job, config), _sum_terms(job), job.g
    across, down, third = _split_grid(job, m, n)
    busy = min(GROUPS_PER_UNIT * profile.max_compute_units // (across * down * third), terms // LEAST_PART)
    splits = max(1, min(config.extra.get("splits", busy), -(-terms // PART_STEP)))
    bare = job if splits == 1 else job._replace(bias=False, relu=False, finish=None)
    point = job.kind == FORWARD and (g.taps, *g.pad) == (1, 0, 0)
    quads = job.kind == FORWARD and terms % 4 == 0 and alignment(t.weight) == 16
    macros = {"BM": m, "BN": n, "BK": config.extra.get("BK", PART_STEP), "TM": config.extra.get("TM", 4), "POINT": point, "W_QUADS": quads}
    kernel = ending.ending_kernel(queue, bare, "axes.cl ends.cl split.cl", "conv_split", macros)
    sums = t if splits == 1 else ConvOperands(t.source, t.weight, t.room(splits * t.result.size, dtype="float32"))
    items = m * n // (4 * macros["TM"])
    kernel(queue, (across * items, down, third * splits), (items, 1, 1), t.source, t.weight, *sums.end, *job.sizes, splits, sums.scale)
    if splits > 1:
        add = ending.ending_kernel(queue, job, "axes.cl ends.cl split.cl", "conv_add_parts", {"PART": 2})
        (filters, *plane), total = t.result.shape[1:], t.result.size
        add(queue, (total,), (launch.LOCAL_1D,), sums.result, *t.end, total, math.prod(plane), filters, splits, t.scale)


def _split_config(**extra: Any) -> KernelConfig:
    return tier_config(V.CONV2D_IMPLICIT_GEMM, "simt", form="split", **extra)


SPLIT_SAMPLES = (_split_config(), _split_config(BM=32, BN=32, splits=3))


def _split_space(problem: Problem) -> list[KernelConfig]:
    named = problem.dtype == "float32" and problem.op != WEIGHT_GRAD
    return [_split_config(BM=m, BN=n, splits=splits) for m, n in ((64, 64), (32, 128)) for splits in (1, 2, 4, 8, 16)] if named else []


algorithms.add(
    "conv2d", "split", "split.cl", "GPUs, float32: results too few to occupy the device, as of one sample; parts of a sum in parallel",
    "zoo_h200.json: ResNet-50, inference of one, compiled", run_split, device="gpu", when=suits_split, cost=algorithms.first,
    configurations=_split_space, samples=SPLIT_SAMPLES,
)  # fmt: skip
