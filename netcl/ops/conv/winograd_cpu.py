"""Winograd convolutions on CPUs (``winograd_cpu.cl``): when they pay, tiles, distribution over work-groups, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from netcl.core import env
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.engine import algorithms, launch
from netcl.ops.conv import ending, winograd
from netcl.ops.conv.convolution import GROUPS_PER_UNIT, INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.conv.ending import widened
from netcl.ops.conv.winograd import LEAST_TERMS, OUT, TILE, TILE_PRODUCTS, constants, tiles_of

# Costs relative to the 36 products of a channel, a filter and a tile with full lanes: the same with the transforms of pixels, a plain
# sum, and the transform of the weights.
WITH_TRANSFORMS, PLAIN, TRANSFORM = 1.3, 5.0, 10.0
STRIP, LONGEST_STRIP = 32, 128  # tiles of a strip if weights are transformed once; the maximum if every strip transforms them
FRESH_STRIPS = (16, 64, LONGEST_STRIP)  # in that case: few values, so that sizes share programs, and the largest that fits
INPUT_ROOM = 5 << 18  # bytes of transformed inputs that stay in the second cache
CACHED_WEIGHTS = 1 << 20  # bytes of transformed weights that stay there beside a strip: more are recomputed per strip, which is faster
KEPT_WEIGHTS = 16 << 20  # bytes of transformed weights that a recording keeps
LEAST_PER_UNIT = 2  # work-groups per compute unit if strips are few: every group transforms its strip itself
APART = 16  # elements between the parts of transformed values, as in the kernel
CHANNELS, DEPTH = 16, 64  # filters whose weights a work-group transforms, and those that a group of the convolution transforms at a time
WINOGRAD_CPU_FILES = "ends.cl lanes.cl transforms.cl winograd_cpu.cl"
TUNED_TILES = {32: ({"MR": 8, "NV": 3}, {"MR": 16, "NV": 1}), 16: ({"MR": 4, "NV": 3}, {"MR": 8, "NV": 1})}  # by vector registers
LINES = 2 * TILE + OUT  # lines of a strip in local memory: patches, intermediate values, results


class Share(NamedTuple):
    """The division of the work: macros, blocks of filters, work-groups, and the elements of transformed weights and of scratch memory."""

    tiles: dict[str, Any]
    blocks: int
    groups: int
    weights: int
    rooms: int


def wanted(conv: Convolution, config: KernelConfig, pays: Callable[[], bool]) -> bool:
    """Whether Winograd applies and either pays or is allowed by ``winograd_channels``. It may replace the policy's CONV2D_IM2COL."""
    variant = conv.variant(config)
    if not conv.g.is_plain_3x3 or conv.compute == "double":
        return False
    if variant is not KernelVariant.CONV2D_WINOGRAD:
        free = variant is KernelVariant.CONV2D_IM2COL and "why" in config.extra and env.value("NETCL_CONV_WINOGRAD")
        return free and pays()
    least = config.extra.get("winograd_channels")
    return pays() if least is None else min(conv.g.c, conv.g.f) >= least


def winograd_cpu_space(problem: Problem) -> list[KernelConfig]:
    """List the tuner's candidates: the default tiles, and others that fill the registers."""
    found = winograd.winograd_space(problem) if problem.op != WEIGHT_GRAD else []
    named = [{"tier": "cpu", "winograd_channels": 1, **tiles} for tiles in TUNED_TILES[problem.profile.vector_registers]] if found else []
    return found + [KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra=extra) for extra in named]


def suits(conv: Convolution, config: KernelConfig, profile: ExtendedDeviceProfile) -> bool:
    """Whether a convolution or an input gradient should use Winograd and fits in memory."""
    if conv.kind == WEIGHT_GRAD or not wanted(conv, config, lambda: pays(conv, profile)):
        return False
    share = share_of(conv, profile, config.extra)
    return 4 * max(share.weights, share.rooms) <= profile.max_alloc_size and local_size(share.tiles) <= profile.local_mem_size


def pays(conv: Convolution, profile: ExtendedDeviceProfile) -> bool:
    """Whether Winograd is exact enough and faster: 36 products replace 144, but pixels and weights must be transformed."""
    tiles = share_of(conv, profile, {}).tiles
    ours = _strip_cost(_tile_count(conv), _strip(tiles), tiles["VW"] * tiles["NV"], tiles["FRESH"])
    faster = ours < PLAIN * conv.g.n * conv.sizes[5] * conv.sizes[6] / OUT**2
    return faster and min(conv.g.c, conv.g.f) >= LEAST_TERMS and _transformed_bytes(conv.sizes[1], profile.lanes) <= 2 * INPUT_ROOM


def _tile_count(conv: Convolution) -> int:
    return conv.g.n * math.prod(tiles_of(conv))


def share_of(conv: Convolution, profile: ExtendedDeviceProfile, given: Mapping[str, Any]) -> Share:
    """Return how the work is divided; ``given`` may set macros."""
    count, c, m, units = _tile_count(conv), conv.sizes[1], conv.filters, profile.max_compute_units
    kept = conv.kept and 4 * TILE_PRODUCTS * c * m <= KEPT_WEIGHTS
    tiles = _tile_macros(count, c, m, profile, {"FRESH": 0, **given} if kept else given)
    blocks, strips = -(-m // tiles["MR"]), -(-count // _strip(tiles))
    groups = min(strips * blocks, max(LEAST_PER_UNIT * units, min(strips, GROUPS_PER_UNIT * units)))
    room = TILE_PRODUCTS * (c * _strip(tiles) + APART * tiles["NT"])
    if tiles["FRESH"]:
        room += TILE_PRODUCTS * (tiles["DEPTH"] * tiles["MR"] + APART)
    return Share(tiles, blocks, groups, 0 if tiles["FRESH"] else blocks * TILE_PRODUCTS * (c * tiles["MR"] + APART), groups * room)


def _tile_macros(count: int, c: int, m: int, profile: ExtendedDeviceProfile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return macros; ``given`` overrides some. Registers hold MR filters times NV vectors of VW tiles; a strip is NT * NV vectors."""
    lanes = given.get("VW", profile.lanes)
    longest = max(lanes, min(LONGEST_STRIP, INPUT_ROOM // _transformed_bytes(c, 1)))
    fresh = given.get("FRESH", int(count <= longest or 4 * TILE_PRODUCTS * c * m > CACHED_WEIGHTS))
    sizes = [size for size in (lanes << k for k in range(8)) if size <= (longest if fresh else STRIP)]
    strips = [size for size in sizes if size in (lanes, *FRESH_STRIPS, sizes[-1])]
    strip = lanes if count <= lanes else sizes[-1]
    if fresh:
        strip = min(strips, key=lambda size: _strip_cost(count, size, lanes << (size > lanes), 1))
    # Vectors of 8 lanes mean AVX2 with 16 registers; NEON and AVX-512 have 32.
    filters, vectors = (4, 2) if lanes == 8 else (8, 2)
    if strip == lanes:
        filters, vectors = 2 * filters, 1
    tiles: dict[str, Any] = {"VW": lanes, "MR": filters, "NV": vectors}
    tiles |= {name: given[name] for name in tiles if name in given}
    tiles |= {"NT": given.get("NT", max(1, strip // (lanes * tiles["NV"]))), "FRESH": fresh, "DEPTH": given.get("DEPTH", DEPTH)}
    while tiles["NT"] > 1 and local_size(tiles) > profile.local_mem_size:
        tiles["NT"] //= 2
    return tiles


def _strip_cost(count: int, strip: int, unit: int, fresh: int) -> float:
    """Estimate the time of ``count`` tiles in strips, the rest rounded up to ``unit``. ``fresh``: every strip transforms the weights."""
    computed = count // strip * strip + -(-(count % strip) // unit) * unit
    return WITH_TRANSFORMS * computed + TRANSFORM * (-(-count // strip) if fresh else 1)


def _strip(tiles: Mapping[str, int]) -> int:
    return tiles["VW"] * tiles["NV"] * tiles["NT"]


def _transformed_bytes(channels: int, tiles: int) -> int:
    return 4 * TILE_PRODUCTS * channels * tiles


def local_size(tiles: Mapping[str, int]) -> int:
    """Return the bytes of local memory: the products of a strip and a block of filters, and :data:`LINES` lines of the strip's pixels."""
    return 4 * _strip(tiles) * (TILE_PRODUCTS * tiles["MR"] + LINES * OUT)


@widened
def run(queue: Any, conv: Convolution, config: KernelConfig, profile: ExtendedDeviceProfile, t: ConvOperands) -> None:
    """Transform the weights, unless every strip does so itself (FRESH), then run the convolution in one kernel."""
    share, (n, c, h, w, m, oh, ow) = share_of(conv, profile, config.extra), conv.sizes[:7]
    back = int(conv.kind == INPUT_GRAD)
    pad = tuple(2 - p for p in conv.g.pad) if back else conv.g.pad
    numbers = (n, c, h, w, m, oh, ow, *tiles_of(conv), *pad, back)
    macros: dict[str, Any] = {"REAL": conv.compute, **share.tiles, **constants()}
    convolve = ending.ending_kernel(queue, conv, WINOGRAD_CPU_FILES, "winograd_cpu", {**macros, "PART": 2, "INPUT_GRAD": 0})
    u, rooms = t.weight, t.room(share.rooms, dtype=conv.dtype)
    if not share.tiles["FRESH"]:
        u = t.room(share.weights, dtype=conv.dtype)
        transform = launch.kernel(queue, __file__, WINOGRAD_CPU_FILES, "winograd_cpu_weights", {}, {**macros, "PART": 1})
        transform(queue, (share.blocks, -(-c // CHANNELS)), None, t.weight, u, m, c, back)
    convolve(queue, (share.groups,), None, t.source, u, rooms, *t.end, *numbers, t.scale)


WINOGRAD_CPU_CONFIG = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "cpu", "winograd_channels": 1})
algorithms.add(
    "conv2d", "winograd_cpu", "winograd_cpu.cl transforms.cl", "3 x 3 kernels with stride 1 and 32 channels and filters or more",
    "cases_intel.json: conv 3x3 8x64x32x32 to 64 input gradient", run, device="cpu",
    when=suits, cost=algorithms.first, configurations=winograd_cpu_space, samples=(WINOGRAD_CPU_CONFIG,),
)  # fmt: skip
