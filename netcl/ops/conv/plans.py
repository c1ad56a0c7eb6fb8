"""From a convolution's sizes to launches: which kernel, with which tiles, over how many work-groups.

A plan is made once per (sizes, dtype, configuration) and kept with the context. What the selector's variants mean:

===============  ==========================================  ==================================================
variant          CPU devices (``cpu.cl``)                    others (``simt.cl``)
===============  ==========================================  ==================================================
NAIVE            one output row at a time                    one work-item per result
IM2COL           unfolded a panel at a time in local memory  unfolded in global memory, around a product
IMPLICIT_GEMM    the same                                    gathered into local memory tile by tile
TILED_LOCAL      as others                                   image patches with their rim in local memory
WINOGRAD         transforms and products in one kernel       transforms around a batched product
===============  ==========================================  ==================================================

With few filters or channels CPUs unfold nothing (``few.py``). Other groups of one or two filters (depthwise) take the NAIVE kernels: a
tile would be mostly empty. Winograd needs a 3x3 kernel, stride 1
and channels and tiles enough to pay for its transforms; else it is IMPLICIT_GEMM. ``KernelConfig.extra`` may hold ``tier`` ("cpu" or
"simt"), ``winograd_channels`` (how many are enough, whatever it costs) and macros of the kernel file. A registered configuration without
``use_local_memory`` takes the NAIVE kernels, one without ``use_vectorization`` those that load value by value. On CPUs
the policy's IM2COL is Winograd where that pays (``winograd_cpu.py``, ``winograd_grads.py``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.device import handle_of
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.kernel_selector import SWITCHES, KernelConfig, KernelVariant, Problem, get_kernel_selector, is_named
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.ops.conv import columns, ending, few, mma, winograd, winograd_cpu, winograd_grads
from netcl.ops.conv.ending import Ending
from netcl.ops.conv.geometry import Geometry
from netcl.ops.conv.job import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Job, Launch
from netcl.ops.pointwise import cast

__all__ = ["FORWARD", "INPUT_GRAD", "VARIANTS", "WEIGHT_GRAD", "Job", "conv_problem", "cpu_tiles", "run", "simt_tiles"]

log = logging.getLogger("netcl")

V = KernelVariant
VARIANTS = (V.CONV2D_NAIVE, V.CONV2D_IM2COL, V.CONV2D_IMPLICIT_GEMM, V.CONV2D_TILED_LOCAL, V.CONV2D_WINOGRAD)
THIN = 2  # filters of a group up to which tiles are mostly empty
TAPS_CHANNELS = 32  # channels and filters of a group from which the tiles of taps.cl are full enough
TAPS_DEPTH = 16  # terms of a step there
GROUPS_PER_UNIT = 4  # work-groups per compute unit that keep a device busy
LONGEST_SUM = 4096  # pixels that a GPU adds up in one go: rounding errors of long sums grow with their length
SPLIT_ROOM = 1 << 24  # elements of partial weight gradients that this may cost
WIDE = 32  # bytes of a vector
ROWS_KEPT = (96, 192, 384)
CPU_LOCAL = 256 * 1024  # most local memory worth using on CPUs: a panel should stay in the second-level cache
MACROS = ("VW", "NV", "MR", "NT", "KC", "KB", "ROWS", "BM", "BN", "BK", "TM", "TN", "TILE_W", "TILE_H", "FILTERS", "LANES")
_BEFORE = {
    "cpu.cl": "axes.cl ends.cl lanes.cl",
    "weights.cl": "ends.cl lanes.cl",
    "simt.cl": "axes.cl ends.cl",
    "taps.cl": "axes.cl ends.cl",
}  # what a file builds on


def run(job: Job, queue: Any, *tensors: Tensor, config: KernelConfig | None = None) -> None:
    """Launch what the selector chooses, or a given configuration.

    ``tensors``: forward ``x, w, bias, y``; input gradient ``dy, w, bias, dx`` (``w`` again where there is no bias); weight gradient
    ``x, dy, dw``.
    """
    plan(job, queue, config)(queue, *tensors)


def plan(job: Job, queue: Any, config: KernelConfig | None = None) -> Launch:
    """The launch of a job, made once; an :class:`Ending` if its kernel ends in what follows."""
    switches, selector = SWITCHES[job.kind], get_kernel_selector()
    recording.requires(switches)
    state, stamp = program.state(queue), (selector.revision, *switches())
    slot = job if config is None else (job, repr(config))
    known = state.get(slot)
    if known is None or known[0] != stamp:
        known = state[slot] = (stamp, _launch_of(job, config or _chosen_config(job, queue), queue))
    return known[1]


def conv_problem(job: Job, profile: ExtendedDeviceProfile) -> Problem:
    """A convolution as the selector and the tuner name it."""
    g = job.g
    flags = {"stride": g.stride, "pad": g.pad, "dilation": g.dilation, "groups": g.groups}
    return Problem(job.kind, (g.n, g.c, g.h, g.w, g.f, g.kh, g.kw), job.dtype, flags, profile)


def _chosen_config(job: Job, queue: Any) -> KernelConfig:
    g = job.g
    shapes = (g.x_shape, g.w_shape, g.stride, g.pad, g.dilation)
    return get_kernel_selector().choose(conv_problem(job, handle_of(queue).profile), shapes)


def _plain_launch(job: Job, config: KernelConfig, queue: Any, tier: str) -> Launch:
    """The launch of a configuration without local memory or without vectors."""
    if config.use_local_memory and tier != "cpu" and config.variant is not V.CONV2D_NAIVE:
        return _simt_gemm(job, replace(config, extra={**config.extra, "form": "tiles"}), queue)
    if config.use_vectorization and tier == "cpu":
        return _widened_launch(job, _cpu_rows(_wide_job(job), config, queue))
    return _simt_naive(job, config, queue)


def _launch_of(job: Job, config: KernelConfig, queue: Any) -> Launch:
    tier = config.extra.get("tier") or ("cpu" if launch.on_cpu_device(queue) else "simt")
    if is_named(config) and not (config.use_local_memory and config.use_vectorization):
        return _plain_launch(job, config, queue, tier)
    if tier != "cpu" and mma.suits(job, config, queue):
        return mma.plan(job, config, queue)
    variant = V.CONV2D_NAIVE if job.filters <= THIN else config.variant
    if tier == "cpu" and winograd_cpu.suits(job, variant, config, queue):
        return _widened_launch(job, winograd_cpu.plan(_wide_job(job), config, queue))
    if tier == "cpu" and winograd_grads.suits(job, variant, config, queue):
        return _widened_launch(job, winograd_grads.plan(_wide_job(job), config, queue))
    if variant is V.CONV2D_WINOGRAD:
        if tier != "cpu" and winograd.suits(job, config, queue):
            return winograd.plan(job, queue)
        _say_once(queue, job, "Winograd does not suit this convolution: implicit GEMM instead")
    if tier != "cpu" and not is_named(config) and variant in _GATHERING and columns.pays(job, queue):
        variant = V.CONV2D_IM2COL
    if tier == "cpu" and variant is not V.CONV2D_TILED_LOCAL:
        make = _cpu_rows if config.variant is V.CONV2D_NAIVE else _cpu_gemm
        return _widened_launch(job, make(_wide_job(job), config, queue))
    return _SIMT.get(variant, _simt_gemm)(job, config, queue)


def _wide_job(job: Job) -> Job:
    """A job with inputs of the type sums are kept in, that ends as it did."""
    return job if job.dtype == job.accumulator else job._replace(dtype=job.accumulator, finish=job.ending)


def _widened_launch(job: Job, go: Launch) -> Launch:
    """Half and bfloat16 are storage only: on CPUs a pass widens them, and the kernels know one type. Results are rounded as they are
    stored, or in one pass more where the kernel cannot."""
    if job.dtype == job.accumulator:
        return go
    if isinstance(go, Ending):
        return replace(go, widen=job.accumulator)

    def wide(queue: Any, *tensors: Tensor) -> None:
        *inputs, result = tensors
        known = {id(t): cast(t, job.accumulator) for t in inputs}
        exact = Tensor.empty(result.shape, job.accumulator, queue=queue)
        go(queue, *(known[id(t)] for t in inputs), exact)
        cast(exact, job.dtype, out=result)

    return wide


def _say_once(queue: Any, job: Job, what: str) -> None:
    told = program.state(queue).setdefault(("conv2d", "told"), set())
    if (job.kind, what) not in told:
        told.add((job.kind, what))
        log.info("[%s] %s; x.shape=%s, w.shape=%s", job.kind, what, job.g.x_shape, job.g.w_shape)


def _conv_kernel(queue: Any, job: Job, file: str, name: str, defines: dict[str, Any], result: str = "") -> program.Kernel:
    operands = {"X": job.dtype, "W": job.dtype, "B": job.dtype, "Y": result or job.dtype}
    fixed: dict[str, Any] = {"REAL": job.compute, "PART": 2 if job.kind == WEIGHT_GRAD else 1}
    if job.kind != WEIGHT_GRAD:
        fixed |= {"INPUT_GRAD": job.kind == INPUT_GRAD}
    return launch.kernel(queue, __file__, f"{_BEFORE[file]} {file}", name, operands, {**fixed, **defines})


def _ending(queue: Any, job: Job, file: str, name: str, defines: dict[str, Any], size: Any, local: Any, *numbers: int) -> Ending:
    return Ending(ending.kernel(queue, job, f"{_BEFORE[file]} {file}", name, defines), size, local, numbers)


def _busy_groups(queue: Any) -> int:
    return GROUPS_PER_UNIT * handle_of(queue).profile.max_compute_units


def _direct(kernel: program.Kernel, size: Any, local: Any, *numbers: int) -> Launch:
    def go(queue: Any, *tensors: Tensor) -> None:
        kernel(queue, size, local, *tensors, *numbers)

    return go


# ---- CPU devices


def cpu_tiles(job: Job, config: KernelConfig, queue: Any) -> dict[str, Any]:
    """Macros of ``cpu.cl`` for a device: vectors as wide as its own, panels that fit its local memory."""
    profile, (size, lanes, registers) = handle_of(queue).profile, few.vectors(job, queue)
    vectors = registers // 8
    columns = {"rows": _tap_span(job.g)[1], "panel": job.g.c // job.g.groups * job.g.taps}.get(_form(job, config, lanes * size), job.pixels)
    while vectors > 1 and vectors // 2 * lanes >= columns:
        vectors //= 2
    tall = 13 * vectors + 1 <= registers and job.filters > 6
    tiles: dict[str, Any] = {"VW": lanes, "NV": vectors, "MR": 12 if tall else 6}
    tiles |= {name: config.extra[name] for name in ("VW", "NV", "MR", "KB") if name in config.extra}
    width = tiles["VW"] * tiles["NV"]
    side = max(1, min(256 // size // width, -(-columns // width)))
    if job.kind == WEIGHT_GRAD and _form(job, config, lanes * size) == "rows":  # tiles of a kernel row overlap: they share what they read
        side = next(n for n in (4, 3, 2, 1) if -(-columns // width) % n == 0)
    tiles["NT"] = config.extra.get("NT", side)
    strip, room = tiles["NT"] * width, min(CPU_LOCAL, profile.local_mem_size) - 2048
    # A tile of the panel should stay in the first-level cache, or, where vectors make it too wide for that, in the second.
    depth = config.extra.get("KC", 512 if tiles["NT"] > 1 else 1024)
    tiles["ROWS"] = config.extra.get("ROWS") or _rows_kept(job, tiles["MR"], room // (strip * size), depth)
    room -= strip * size * (tiles["ROWS"] + (strip if job.kind == WEIGHT_GRAD else 0))
    tiles["KC"] = min(depth, max(8, room // (strip * size + 4) // 8 * 8))
    return tiles


def _rows_kept(job: Job, step: int, room: int, depth: int) -> int:
    """Rows whose sums wait in local memory between panels: none where one panel holds the whole depth, else as many as there are filters,
    in a few sizes and up to half of the room; for further rows everything is packed again."""
    if job.kind != WEIGHT_GRAD and job.sizes[1] * job.g.taps <= min(depth, (room - step) // 8 * 8):
        return step
    wanted = 96 if job.kind == WEIGHT_GRAD else next((n for n in ROWS_KEPT if n >= job.filters), ROWS_KEPT[-1])
    return max(1, min(wanted, room // (4 if job.kind == WEIGHT_GRAD else 2)) // step) * step


def _tap_span(g: Geometry) -> tuple[int, int]:
    """Of a kernel row with the channels of a pixel side by side: in how many pieces its taps lie, and the values of one."""
    channels = g.c // g.groups
    return (1, g.kw * channels) if g.dilation[1] == 1 or g.kw == 1 else (g.kw, channels)


def _form(job: Job, config: KernelConfig, width: int) -> str:
    """How a weight gradient is computed, ``rows`` (weights.cl) or ``panel``, by what the configuration names or the bytes of a vector.

    Narrow vectors touch one cache line per pixel, a power of two apart: those lines evict each other, and a packed panel is faster.
    """
    if job.kind != WEIGHT_GRAD:
        return ""
    return config.extra.get("form") or ("rows" if width >= WIDE and 2 * 4 * _tap_span(job.g)[1] >= width else "panel")


def _cpu_gemm(job: Job, config: KernelConfig, queue: Any) -> Launch:
    return few.plan(job, config, queue) or (_cpu_rows if job.filters <= THIN else _cpu_panel)(job, config, queue)


def _cpu_panel(job: Job, config: KernelConfig, queue: Any) -> Launch:
    tiles = cpu_tiles(job, config, queue)
    if job.kind == WEIGHT_GRAD:
        form = _form(job, config, tiles["VW"] * dtypes.DTYPES[job.accumulator].itemsize)
        return (_cpu_weights if form == "rows" else _cpu_panel_weights)(job, tiles, queue)
    if job.g.taps > tiles["KC"]:
        _say_once(queue, job, "the kernel has more taps than a panel has rows: one output row at a time instead")
        return _cpu_rows(job, config, queue)
    strips, third = -(-job.pixels // (tiles["NT"] * tiles["NV"] * tiles["VW"])), job.g.groups * job.classes
    # The sums of unfinished rows wait in local memory, which bounds the rows, unless one panel holds the whole depth.
    bound = 1 if job.sizes[1] * job.g.taps <= tiles["KC"] else -(-job.filters // tiles["ROWS"])
    blocks = max(bound, min(-(-job.filters // tiles["MR"]), -(-_busy_groups(queue) // max(1, strips * third))))
    rows = _ceil_to(-(-job.filters // blocks), tiles["MR"])
    tiles["FETCHES"] = int(launch.fetches(queue))
    size = (strips, -(-job.filters // rows), third)
    return _ending(queue, job, "cpu.cl", "conv_panel", tiles, size, None, *job.sizes, rows)


def _cpu_weights(job: Job, tiles: dict[str, Any], queue: Any) -> Launch:
    """Channels of a pixel side by side, then a product per row of the kernel; see weights.cl."""
    g, channels, m = job.g, job.g.c // job.g.groups, job.filters
    apart, span = _tap_span(g)
    skip = tuple(step if k == 1 else 1 for step, k in zip(g.stride, (g.kh, g.kw), strict=True))  # pixels no tap ever sees
    stride = tuple(step // by for step, by in zip(g.stride, skip, strict=True))
    high, wide = ((o - 1) * step + d * (k - 1) + 1 for o, step, d, k in zip((g.oh, g.ow), stride, g.dilation, (g.kh, g.kw), strict=True))
    strip, taps = tiles["NT"] * tiles["NV"] * tiles["VW"], g.kh * apart
    strips = -(-span // strip)
    # Pixels are divided before filters: every block of filters reads all pixels again.
    alike, wanted = strips * taps * g.groups, 2 * _busy_groups(queue)
    splits = max(1, min(-(-wanted // alike), job.pixels // 1024))
    rows = _ceil_to(-(-m // max(1, min(m // (2 * tiles["MR"]), -(-wanted // (alike * splits))))), tiles["MR"])
    blocks = -(-m // rows)
    turned, padded = g.groups * g.n * high * wide * channels, _ceil_to(m, tiles["MR"])
    turn, multiply, collect = (
        _conv_kernel(queue, job, "weights.cl", name, tiles) for name in ("channels_last", "conv_weights", "collect_weights")
    )

    def go(queue: Any, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        t = Tensor.empty((turned + strip,), job.accumulator, queue=queue)
        parts = Tensor.empty((splits * g.groups * taps * padded * strips * strip,), job.accumulator, queue=queue)
        turn(queue, (high, g.n * g.groups), None, x, t, g.n, channels, g.h, g.w, high, wide, *g.pad, *skip, g.groups, strip)
        multiply(queue, (strips, taps * blocks, g.groups * splits), None, t, dy, parts, g.n, channels, m, g.oh, g.ow, high, wide, g.kh,
                 apart, *stride, *g.dilation, g.groups, rows, splits)  # fmt: skip
        collect(queue, (g.f,), None, parts, dw, channels, m, g.kh, g.kw, apart, g.groups, strips * strip, splits)

    return go


def _cpu_panel_weights(job: Job, tiles: dict[str, Any], queue: Any) -> Launch:
    g, strip = job.g, tiles["NT"] * tiles["NV"] * tiles["VW"]
    blocks = -(-job.filters // tiles["ROWS"])
    rows = _ceil_to(-(-job.filters // blocks), tiles["MR"])
    size = (-(-g.c // g.groups * g.taps // strip), -(-job.filters // rows), g.groups)
    splits = max(1, min(-(-_busy_groups(queue) // math.prod(size)), job.pixels // 256))
    return _split(job, queue, splits, "cpu.cl", "conv_panel_weights", tiles, (*size[:2], g.groups * splits), None, rows)


def _cpu_rows(job: Job, config: KernelConfig, queue: Any) -> Launch:
    tiles, g = cpu_tiles(job, config, queue), job.g
    lines = math.prod(g.w_shape) if job.kind == WEIGHT_GRAD else g.n * g.groups * job.filters * job.class_size[0]
    rows = max(1, lines // (4 * _busy_groups(queue)))
    size = (-(-lines // rows), 1, job.classes)
    if job.kind == WEIGHT_GRAD:
        return _direct(_conv_kernel(queue, job, "cpu.cl", "conv_direct_weights", tiles), size, None, *job.sizes, rows, 1)
    return _ending(queue, job, "cpu.cl", "conv_direct", tiles, size, None, *job.sizes, rows)


# ---- other devices


def simt_tiles(job: Job, config: KernelConfig, queue: Any) -> dict[str, int]:
    """Macros of ``simt.cl`` from a configuration, made to fit each other, the problem and the device."""
    per_item = config.work_per_thread
    tiles = {"BM": config.tile_m, "BN": config.tile_n, "BK": config.tile_k, "TM": per_item, "TN": per_item}
    tiles |= {name: config.extra[name] for name in MACROS if name in config.extra}
    while tiles["BM"] >= 2 * job.filters and tiles["BM"] > 16:
        tiles["BM"] //= 2
    while tiles["BM"] % (tiles["TM"] * tiles["TN"]):
        tiles["TM" if tiles["TM"] >= tiles["TN"] else "TN"] //= 2
    limit = handle_of(queue).profile.max_work_group_size
    while _work_items(tiles) > limit and tiles["BM"] > tiles["TM"] * tiles["TN"]:
        tiles["BM"] //= 2
    while _work_items(tiles) % tiles["BK"]:
        tiles["BK"] //= 2
    if tiles["BK"] % (tiles["BM"] // (tiles["TM"] * tiles["TN"])):  # every work-item fetches the same number of elements
        tiles["BM"] = tiles["TM"] * tiles["TN"]
    return tiles


def _work_items(tiles: dict[str, int]) -> int:
    return tiles["BN"] // tiles["TN"] * (tiles["BM"] // tiles["TM"])


def _simt_gemm(job: Job, config: KernelConfig, queue: Any) -> Launch:
    if _suits_taps(job, config, queue):
        return (_taps_weights if job.kind == WEIGHT_GRAD else _taps)(job, config, queue)
    tiles, g = simt_tiles(job, config, queue), job.g
    items, rows = _work_items(tiles), -(-job.filters // tiles["BM"])
    if job.kind == WEIGHT_GRAD:
        columns = -(-g.c // g.groups * g.taps // tiles["BN"])
        splits = _pixel_splits(job, queue, columns * rows * g.groups, tiles["BK"])
        return _split(job, queue, splits, "simt.cl", "conv_gemm_weights", tiles, (columns * items, rows, g.groups * splits), (items, 1, 1))
    size = (-(-job.pixels // tiles["BN"]) * items, rows, g.groups * job.classes)
    return _ending(queue, job, "simt.cl", "conv_gemm", tiles, size, (items, 1, 1), *job.sizes)


def _pixel_splits(job: Job, queue: Any, groups: int, depth: int) -> int:
    """In how many parts a GPU sums over the pixels: as many as occupy it, and more where one part would be too long a sum."""
    busy = min(-(-_busy_groups(queue) // groups), job.pixels // (16 * depth), 256)
    return max(1, busy, min(job.pixels // LONGEST_SUM, SPLIT_ROOM // math.prod(job.g.w_shape)))


def _suits_taps(job: Job, config: KernelConfig, queue: Any) -> bool:
    """Whether channels and filters fill the tiles of ``taps.cl``, and the device has room for them.

    Never on a CPU, not even for who asks for its GPU kernels: PoCL 3.0 and 3.1 crash in it, where Oclgrind and others find nothing wrong.
    """
    if launch.on_cpu_device(queue):
        return False
    profile = handle_of(queue).profile
    roomy = profile.local_mem_size >= 2 * 4 * TAPS_DEPTH * 2 * (128 + 4) and profile.max_work_group_size >= 256
    filled = min(job.sizes[1], job.filters) >= TAPS_CHANNELS
    return config.extra.get("form", "taps") == "taps" and filled and roomy and job.compute == "float"


def _taps_tiles(job: Job, config: KernelConfig, queue: Any, columns: int) -> dict[str, Any]:
    """Macros of ``taps.cl``: large tiles, unless they are too few to keep the device busy."""
    tiles: dict[str, Any] = {"BM": 128 if job.filters > 64 else 64, "BN": 128, "BK": TAPS_DEPTH, "TM": 8, "TN": 8}
    if -(-job.filters // tiles["BM"]) * columns // 128 * job.g.groups * job.classes < handle_of(queue).profile.max_compute_units:
        tiles |= {"BM": 64, "BN": 64}
    return tiles | {name: config.extra[name] for name in tiles if name in config.extra} | {"REAL4": f"{job.compute}4"}


def _taps(job: Job, config: KernelConfig, queue: Any) -> Launch:
    tiles, c, m = _taps_tiles(job, config, queue, job.pixels), job.sizes[1], job.filters
    deep, wide, items = _ceil_to(c, tiles["BK"]), _ceil_to(m, tiles["BM"]), _work_items(tiles)
    n = job.g.groups * job.g.taps * deep * wide
    pack = _conv_kernel(queue, job, "taps.cl", "pack_taps", {"PART": 1, "REAL4": tiles["REAL4"]}, job.accumulator)
    size = (-(-job.pixels // tiles["BN"]) * items, wide // tiles["BM"], job.g.groups * job.classes)

    def packed(queue: Any, source: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        made = Tensor.empty((n,), job.accumulator, queue=queue)
        pack(queue, (n,), (launch.LOCAL_1D,), weight, made, c, m, job.g.taps, deep, wide, n)
        return source, made

    made = _ending(queue, job, "taps.cl", "conv_taps", tiles | {"PART": 2}, size, (items, 1, 1), *job.sizes, deep, wide)
    return replace(made, prepare=packed)


def _taps_weights(job: Job, config: KernelConfig, queue: Any) -> Launch:
    tiles: dict[str, Any] = {"BM": 64, "BN": 64, "BK": TAPS_DEPTH, "TM": 8, "TN": 4}
    tiles |= {name: config.extra[name] for name in tiles if name in config.extra} | {"REAL4": f"{job.compute}4", "PART": 3}
    items, g = _work_items(tiles), job.g
    columns, rows = g.taps * -(-g.c // g.groups // tiles["BN"]), -(-job.filters // tiles["BM"])
    splits = _pixel_splits(job, queue, columns * rows * g.groups, tiles["BK"])
    return _split(job, queue, splits, "taps.cl", "conv_taps_weights", tiles, (columns * items, rows, g.groups * splits), (items, 1, 1))


def _simt_naive(job: Job, config: KernelConfig, queue: Any) -> Launch:
    if job.kind == WEIGHT_GRAD:
        most = min(config.local_size_1d, handle_of(queue).profile.max_work_group_size) if config.use_local_memory else 1
        lanes = 1 << (max(1, most).bit_length() - 1)
        kernel = _conv_kernel(queue, job, "simt.cl", "conv_naive_weights", {"LANES": lanes})
        return _direct(kernel, (math.prod(job.g.w_shape) * lanes,), (lanes,), *job.sizes, 1)
    results = job.g.x_shape if job.kind == INPUT_GRAD else job.g.y_shape
    return _ending(queue, job, "simt.cl", "conv_naive", {}, (math.prod(results),), (config.local_size_1d,), *job.sizes)


def _simt_tiled(job: Job, config: KernelConfig, queue: Any) -> Launch:
    if job.kind == WEIGHT_GRAD:
        return _simt_gemm(job, config, queue)
    g, (wide, high) = job.g, config.local_size_2d
    tiles = {"TILE_W": wide, "TILE_H": high, "FILTERS": config.work_per_thread, "RIM_MAX": 2048}
    steps = g.stride if job.kind == FORWARD else (1, 1)
    rim = math.prod((n - 1) * step + (k - 1) * d + 1 for n, step, k, d in zip((high, wide), steps, (g.kh, g.kw), g.dilation, strict=True))
    if rim > tiles["RIM_MAX"] or wide * high > handle_of(queue).profile.max_work_group_size:
        _say_once(queue, job, "a tile with its rim does not fit: implicit GEMM instead")
        return _simt_gemm(job, config, queue)
    down, across = -(-job.class_size[0] // high), -(-job.class_size[1] // wide)
    size = (down * across * wide, -(-job.filters // tiles["FILTERS"]) * high, g.n * g.groups * job.classes)
    return _ending(queue, job, "simt.cl", "conv_tiled", tiles, size, (wide, high, 1), *job.sizes, across)


def _simt_im2col(job: Job, config: KernelConfig, queue: Any) -> Launch:
    if columns.has_room(job, queue):
        return _widened_launch(job, columns.plan(_wide_job(job), queue))
    _say_once(queue, job, "columns would take too much memory: implicit GEMM instead")
    return _simt_gemm(job, config, queue)


# ---- shared


def _split(job: Job, queue: Any, splits: int, file: str, name: str, tiles: dict[str, Any], size: Any, local: Any, *numbers: int) -> Launch:
    """A weight gradient summed in several parts, so that few weights still keep the device busy; then the parts' sum."""
    kernel = _conv_kernel(queue, job, file, name, tiles, "" if splits == 1 else job.accumulator)
    if splits == 1:
        return _direct(kernel, size, local, *job.sizes, *numbers, 1)

    def go(queue: Any, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        parts = Tensor.empty((splits, dw.size), job.accumulator, queue=queue)
        kernel(queue, size, local, x, dy, parts, *job.sizes, *numbers, splits)
        columns.add_splits(parts, dw)

    return go


def _ceil_to(n: int, step: int) -> int:
    return -(-n // step) * step


_GATHERING = (V.CONV2D_IMPLICIT_GEMM, V.CONV2D_WINOGRAD)  # variants that end in _simt_gemm
_SIMT = {V.CONV2D_NAIVE: _simt_naive, V.CONV2D_IM2COL: _simt_im2col, V.CONV2D_TILED_LOCAL: _simt_tiled}
