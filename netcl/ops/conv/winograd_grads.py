"""The weight gradient of 3x3 kernels on CPUs by Winograd's transforms (``winograd_grads.cl``)."""

from __future__ import annotations

from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig
from netcl.engine import algorithms, launch
from netcl.ops.conv.convolution import GROUPS_PER_UNIT, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.conv.ending import widened
from netcl.ops.conv.winograd import LEAST_TERMS, OUT, TILE_PRODUCTS, constants, tiles_of, winograd_space
from netcl.ops.conv.winograd_cpu import APART, WINOGRAD_CPU_CONFIG, wanted

WASTE = 2  # ratio of pixels in tiles to pixels of the gradient from which Winograd no longer pays
TILES_AT_ONCE = 32  # tiles transformed at a time
FILTER_BLOCKS = (32, 64)  # filters of a work-group


def suits(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether a weight gradient should use Winograd and its sums fit in memory."""
    if conv.kind != WEIGHT_GRAD or not wanted(conv, config, lambda: pays(conv)):
        return False
    return 4 * TILE_PRODUCTS * (conv.g.f + FILTER_BLOCKS[-1]) * (conv.g.c + 32) * GROUPS_PER_UNIT <= profile.max_alloc_size


def pays(conv: Convolution) -> bool:
    """Whether few pixels of tiles lie outside the gradient, and tiles, channels and filters are at least :data:`LEAST_TERMS` each."""
    g, (high, wide) = conv.g, tiles_of(conv)
    filled = high * wide * OUT**2 <= WASTE * g.oh * g.ow
    return filled and min(g.n * high * wide, g.c, g.f) >= LEAST_TERMS


@widened
def run(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Compute a weight gradient: put channels last in x and dy, sum by blocks of filters and shares of the tiles, transform back."""
    g, (high, wide) = conv.g, tiles_of(conv)
    lanes = config.extra.get("VW", profile.lanes)
    block = FILTER_BLOCKS[g.f > FILTER_BLOCKS[0]]
    tiles = {"VW": lanes, "MR": 4 if lanes == 8 else 8, "NV": 2, "NT": 1, "TILES": TILES_AT_ONCE}
    across, blocks = -(-g.c // (2 * lanes)) * 2 * lanes, -(-g.f // block)
    count = g.n * high * wide
    shares = max(1, min(-(-GROUPS_PER_UNIT * profile.max_compute_units // blocks), count // TILES_AT_ONCE))
    seen = ((OUT * high + 2, OUT * wide + 2), (OUT * high, OUT * wide))  # lines and columns of x and of dy, to whole tiles
    sizes = (
        g.n * seen[0][0] * seen[0][1] * g.c + 2 * lanes, g.n * seen[1][0] * seen[1][1] * g.f + block,
        shares * blocks * TILE_PRODUCTS * (block * across + APART),
        shares * blocks * TILE_PRODUCTS * (TILES_AT_ONCE * (across + block) + 2 * APART),
    )  # fmt: skip
    defines: dict[str, Any] = {"REAL": conv.compute, **tiles}
    turn = launch.kernel(queue, __file__, "ends.cl lanes.cl weights.cl", "channels_last", {}, defines)
    multiply, collect = (
        launch.kernel(queue, __file__, "ends.cl lanes.cl transforms.cl winograd_grads.cl", name, {}, {**defines, **constants(), **more})
        for name, more in (("winograd_grads", {"BLOCK": block}), ("winograd_weight_grads", {}))
    )
    tx, ty, sums, rooms = (t.room(size, dtype=conv.dtype) for size in sizes)
    turn(queue, (seen[0][0], g.n), None, t.source, tx, g.n, g.c, g.h, g.w, *seen[0], *g.pad, 1, 1, 1, 2 * lanes)
    turn(queue, (seen[1][0], g.n), None, t.weight, ty, g.n, g.f, g.oh, g.ow, *seen[1], 0, 0, 1, 1, 1, block)
    multiply(queue, (blocks, shares), None, tx, ty, sums, rooms, g.n, g.c, g.f, high, wide, across)
    collect(queue, (g.f,), None, sums, t.result, g.c, g.f, across, shares, block)


algorithms.add(
    "conv2d", "winograd_grads", "winograd_grads.cl transforms.cl", "weight gradients of the same, from 32 tiles on",
    "cases_intel.json: conv 3x3 8x64x56x56 to 64 weight gradient", run,
    device="cpu", when=suits, cost=algorithms.first, samples=(WINOGRAD_CPU_CONFIG,),
    configurations=lambda problem: winograd_space(problem) if problem.op == WEIGHT_GRAD else [],
)  # fmt: skip
