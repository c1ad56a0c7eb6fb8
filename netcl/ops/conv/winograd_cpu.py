"""The plan of ``winograd_cpu.cl``: when it pays, which tiles fit a CPU, how work-groups share the work and what room they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from netcl.core import env
from netcl.core.device import handle_of
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.ops import launch
from netcl.ops.conv.job import INPUT_GRAD, WEIGHT_GRAD, Job, Launch
from netcl.ops.conv.winograd import OUT, PARTS, TILE, constants

LEAST_CHANNELS = 48  # channels and filters from which products outweigh the transforms of pixels
LEAST_TILES = 32  # tiles of a batch from which they outweigh the transform of weights
WASTE = 2  # times as many pixels in tiles as in the result take away what is gained
GROUPS_PER_UNIT = 4  # work-groups that even out what cores lose to others
LEAST_PER_UNIT = 2  # as many where strips are few: every group of a strip transforms it for itself
APART = 16  # elements between the parts of transformed values, as in the kernel
CHANNELS = 16  # whose weights a work-group transforms, as in the kernel
LINES = 2 * TILE + OUT  # lines of a strip in local memory: patches, what comes after them, results


class Share(NamedTuple):
    """Macros, blocks of filters, work-groups, and the elements of transformed weights and of the groups' rooms."""

    tiles: dict[str, Any]
    blocks: int
    groups: int
    weights: int
    rooms: int


def suits(job: Job, variant: KernelVariant, config: KernelConfig, queue: Any) -> bool:
    """Whether it can be done and was asked for, or pays: to the policy every convolution of a CPU is a panel, which leaves how to us."""
    g = job.g
    if (g.kh, g.kw, *g.stride, *g.dilation, g.groups) != (3, 3, 1, 1, 1, 1, 1) or job.kind == WEIGHT_GRAD or job.compute == "double":
        return False
    least = config.extra.get("winograd_channels")
    if variant is not KernelVariant.CONV2D_WINOGRAD:
        free = variant is KernelVariant.CONV2D_IM2COL and "why" in config.extra and env.value("NETCL_CONV_WINOGRAD")
        wanted = free and pays(job)
    else:
        wanted = pays(job) if least is None else min(g.c, g.f) >= least
    profile = handle_of(queue).profile
    share = share_of(job, profile, config.extra)
    return wanted and 4 * max(share.weights, share.rooms) <= profile.max_alloc_size and local_size(share.tiles) <= profile.local_mem_size


def pays(job: Job) -> bool:
    """Whether 36 products instead of 144 are worth the transforms."""
    high, wide = tiles_of(job)
    filled = high * wide * OUT**2 <= WASTE * job.sizes[5] * job.sizes[6]
    return filled and job.g.n * high * wide >= LEAST_TILES and min(job.g.c, job.g.f) >= LEAST_CHANNELS


def tiles_of(job: Job) -> tuple[int, int]:
    """Rows and columns of tiles in a plane."""
    return -(-job.sizes[5] // OUT), -(-job.sizes[6] // OUT)


def share_of(job: Job, profile: ExtendedDeviceProfile, given: Mapping[str, Any]) -> Share:
    """MR filters times NV vectors of VW tiles in registers, NT of them side by side in a strip; ``given`` may name others."""
    high, wide = tiles_of(job)
    count, c, lanes = job.g.n * high * wide, job.sizes[1], min(16, max(4, profile.vector_width))
    # Vectors of 8 lanes mean AVX2 with 16 registers; NEON and AVX-512 have 32.
    tiles: dict[str, Any] = {"VW": lanes, "MR": 4 if lanes == 8 else 8, "NV": 2, "NT": max(1, 16 // lanes)}
    tiles |= {name: given[name] for name in tiles if name in given}
    for name in ("NT", "NV"):
        while tiles[name] > 1 and (_strip(tiles) // 2 >= count or local_size(tiles) > profile.local_mem_size):
            tiles[name] //= 2
    blocks, strips, units = -(-job.filters // tiles["MR"]), -(-count // _strip(tiles)), profile.max_compute_units
    groups = min(strips * blocks, max(LEAST_PER_UNIT * units, min(strips, GROUPS_PER_UNIT * units)))
    room = PARTS * (c * _strip(tiles) + APART * tiles["NT"])
    return Share(tiles, blocks, groups, blocks * PARTS * (c * tiles["MR"] + APART), groups * room)


def _strip(tiles: Mapping[str, int]) -> int:
    return tiles["VW"] * tiles["NV"] * tiles["NT"]


def local_size(tiles: Mapping[str, int]) -> int:
    """Bytes of local memory: the products of a strip and a block of filters, and lines of pixels, four of every tile."""
    return 4 * _strip(tiles) * (PARTS * tiles["MR"] + LINES * OUT)


def plan(job: Job, config: KernelConfig, queue: Any) -> Launch:
    """The transform of weights, then the convolution in one kernel."""
    share, (n, c, h, w, m, oh, ow) = share_of(job, handle_of(queue).profile, config.extra), job.sizes[:7]
    pad = tuple(2 - p for p in job.g.pad) if job.kind == INPUT_GRAD else job.g.pad
    numbers = (n, c, h, w, m, oh, ow, *tiles_of(job), *pad)
    transform = _kernel(queue, job, share, 1, "winograd_cpu_weights", INPUT_GRAD=job.kind == INPUT_GRAD)
    convolve = _kernel(queue, job, share, 2, "winograd_cpu", BIAS=job.bias, RELU_OUT=job.relu)

    def go(queue: Any, source: Tensor, weight: Tensor, bias: Tensor, result: Tensor) -> None:
        u, rooms = (Tensor.empty((size,), job.dtype, queue=queue) for size in (share.weights, share.rooms))
        transform(queue, (share.blocks, -(-c // CHANNELS)), None, weight, u, m, c)
        convolve(queue, (share.groups,), None, source, u, bias, result, rooms, *numbers)

    return go


def _kernel(queue: Any, job: Job, share: Share, part: int, name: str, **defines: int) -> program.Kernel:
    files = "lanes.cl transforms.cl winograd_cpu.cl"
    return launch.kernel(queue, __file__, files, name, {}, {"REAL": job.compute, "PART": part, **share.tiles, **constants(), **defines})
