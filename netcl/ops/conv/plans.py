"""Plans convolutions: which kernel, with which tiles, over how many work-groups.

The table of algorithms (:mod:`netcl.engine.algorithms`), filled by the modules of this folder, determines which kernel runs.
``KernelConfig.extra`` may hold ``tier`` ("cpu" or "simt"), ``form`` (the algorithm), ``winograd_channels`` (the number of
channels from which Winograd is used) and macros of the kernel file. A registered configuration without ``use_local_memory`` selects kernels
without local memory; one without ``use_vectorization`` selects kernels with scalar loads.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.kernel_selector import KernelConfig, Problem, get_kernel_selector, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.algorithms import Algorithm
from netcl.ops.conv import arrays, columns, direct, ending, fold, mma, narrow, split, winograd_cpu, winograd_grads  # noqa: F401, add their algorithms
from netcl.ops.conv.convolution import FORWARD, GROUPS_PER_UNIT, INPUT_GRAD, THIN, WEIGHT_GRAD, Convolution, ConvOperands, tier_config
from netcl.ops.conv.ending import CPU_FILES, widened
from netcl.ops.conv.geometry import Geometry, geometry
from netcl.ops.matmul import cpu
from netcl.ops.matmul.mma import round_up

__all__ = ["FORWARD", "INPUT_GRAD", "WEIGHT_GRAD", "Convolution", "conv_problem", "cpu_tiles", "run", "simt_tiles"]

log = logging.getLogger("netcl")

TAPS_CHANNELS = 32  # channels and filters of a group from which the tiles of taps.cl are full enough
TAPS_DEPTH = 16  # terms per step of taps.cl
TAPS_TILES = ((64, 64), (64, 128), (128, 64), (128, 128))  # candidates of the tuner: filters and pixels
SIMT_TILES = ((32, 32, 16, 2), (64, 64, 16, 4), (64, 64, 16, 8), (128, 64, 16, 8), (128, 128, 8, 8), (128, 128, 16, 8))
LONGEST_SUM = 4096  # pixels that a GPU sums at a time: rounding errors grow with the length of a sum
SPLIT_ROOM, MOST_SPLITS = 1 << 24, 1024  # maximum elements of partial weight gradients, and parts for a busy device
VECTOR_BYTES = 32  # bytes of a vector
ROWS_KEPT = (96, 192, 384)
PACKING_TILES = 8  # register tiles of rows from which packing a panel costs little
CPU_LOCAL = 256 * 1024  # most local memory worth using on CPUs: a panel should stay in the second-level cache
SIMT_FILES, TAPS_FILES = "axes.cl ends.cl simt.cl", "axes.cl ends.cl taps.cl"


def run(
    conv: Convolution, queue: Any, source: Tensor, weight: Tensor, result: Tensor, config: KernelConfig | None = None, **ending: Any
) -> None:
    """Launch the algorithm that the selector, or a given configuration, chooses.

    The tensors: forward ``x, w, y``; input gradient ``dy, w, dx``; weight gradient ``x, dy, dw``. ``ending`` may hold ``bias``,
    ``residual`` and ``scale``, except for a weight gradient.
    """
    profile = profile_of(queue)
    shapes = (conv.g.x_shape, conv.g.w_shape, conv.g.stride, conv.g.pad, conv.g.dilation)
    config = config or get_kernel_selector().choose(conv_problem(conv, profile), shapes)
    algorithm, config = convolution_algorithm(queue, conv, config, profile)
    meant = _MEANT.get(conv.variant(config), "")
    if not algorithm.name.startswith((meant, "mma")) and (algorithm.device == "gpu" or meant == "winograd"):
        _say_once(queue, conv, f"{meant} does not suit this convolution: {algorithm.name} instead")
    algorithm.run(queue, conv, config, profile, ConvOperands(source, weight, result, **ending))


def conv_problem(conv: Convolution, profile: ExtendedDeviceProfile) -> Problem:
    """Return the problem that describes a convolution to the selector and the tuner."""
    g = conv.g
    flags = {"stride": g.stride, "pad": g.pad, "dilation": g.dilation, "groups": g.groups}
    return Problem(conv.kind, (g.n, g.c, g.h, g.w, g.f, g.kh, g.kw), conv.dtype, flags, profile)


def _plainer_convolution(config: KernelConfig, profile: DeviceProfile) -> KernelConfig:
    """Return ``config``, or a plainer one if ``config`` was registered or measured with local memory or vectors off."""
    if not is_named(config) or (config.use_local_memory and config.use_vectorization):
        return config
    tier = config.extra.get("tier") or ("cpu" if profile.device_type == "cpu" else "simt")
    if config.use_local_memory and tier != "cpu" and config.variant is not V.CONV2D_NAIVE:
        return replace(config, variant=V.CONV2D_IMPLICIT_GEMM, extra={**config.extra, "form": "tiles"})
    kept = tier if config.use_vectorization and tier == "cpu" else "simt"
    return replace(config, variant=V.CONV2D_NAIVE, extra={**config.extra, "tier": kept})


def convolution_algorithm(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> tuple[Algorithm, KernelConfig]:
    """Return the algorithm of a convolution and the configuration it runs with."""
    config = _plainer_convolution(config, profile)
    if conv.variant(config) is V.CONV2D_TILED_LOCAL:
        config = replace(config, extra={"form": "gemm", **config.extra, "tier": "simt"})
    found = algorithms.choose_algorithm("conv2d", queue, conv, config, profile)
    assert found is not None, "the algorithms panel and gemm must accept every convolution"
    return found, config


def _say_once(queue: Any, conv: Convolution, what: str) -> None:
    logged = program.state(queue).setdefault(("conv2d", "logged"), set())
    if (conv.kind, what) not in logged:
        logged.add((conv.kind, what))
        log.info("[%s] %s; x.shape=%s, w.shape=%s", conv.kind, what, conv.g.x_shape, conv.g.w_shape)


def _busy_groups(profile: DeviceProfile) -> int:
    return GROUPS_PER_UNIT * profile.max_compute_units


# ---- CPU devices


def cpu_tiles(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> dict[str, Any]:
    """Return the macros of ``cpu.cl`` for a device: vectors as wide as its own, panels that fit its local memory."""
    size, lanes, registers = direct.vectors(conv, profile)
    vectors = registers // 8
    known = {"rows": _tap_span(conv.g)[1], "panel": conv.g.c // conv.g.groups * conv.g.taps}
    columns = known.get(_form(conv, config, lanes * size), conv.pixels)
    while vectors > 1 and vectors // 2 * lanes >= columns:
        vectors //= 2
    tall = 13 * vectors + 1 <= registers and conv.filters > 6
    tiles: dict[str, Any] = {"VW": lanes, "NV": vectors, "MR": 12 if tall else 6}
    if conv.kept and vectors == 4:
        tiles |= {"NV": 3, "MR": 8}  # packed weights need one pointer for all rows; most models have multiples of 8 filters
    tiles |= {name: config.extra[name] for name in ("VW", "NV", "MR", "KB") if name in config.extra}
    width = tiles["VW"] * tiles["NV"]
    side = max(1, min(256 // size // width, -(-columns // width)))
    if conv.kind == WEIGHT_GRAD and _form(conv, config, lanes * size) == "rows":  # tiles of a kernel row overlap and share their loads
        side = next(n for n in (4, 3, 2, 1) if -(-columns // width) % n == 0)
    tiles["NT"] = config.extra.get("NT", side)
    strip, room = tiles["NT"] * width, min(CPU_LOCAL, profile.local_mem_size) - 2048
    # A tile of the panel should stay in the first-level cache, or, where vectors make it too wide for that, in the second.
    depth = config.extra.get("KC", 512 if tiles["NT"] > 1 else 1024)
    tiles["ROWS"] = config.extra.get("ROWS") or _rows_kept(conv, tiles["MR"], room // (strip * size), depth)
    room -= strip * size * (tiles["ROWS"] + (strip if conv.kind == WEIGHT_GRAD else 0))
    tiles["KC"] = min(depth, max(8, room // (strip * size + 4) // 8 * 8))
    return tiles


def _rows_kept(conv: Convolution, step: int, room: int, depth: int) -> int:
    """Return how many rows keep their sums in local memory between panels; only ``step`` if one panel holds the whole depth."""
    if conv.kind != WEIGHT_GRAD and conv.sizes[1] * conv.g.taps <= min(depth, (room - step) // 8 * 8):
        return step
    wanted = 96 if conv.kind == WEIGHT_GRAD else next((n for n in ROWS_KEPT if n >= conv.filters), ROWS_KEPT[-1])
    return max(1, min(wanted, room // (4 if conv.kind == WEIGHT_GRAD else 2)) // step) * step


def _tap_span(g: Geometry) -> tuple[int, int]:
    """Return the number of contiguous segments of a channels-last kernel row (several if dilated) and the values per segment."""
    channels = g.c // g.groups
    return (1, g.kw * channels) if g.dilation[1] == 1 or g.kw == 1 else (g.kw, channels)


def _form(conv: Convolution, config: KernelConfig, width: int) -> str:
    """Return how a weight gradient is computed: ``rows`` (weights.cl) or ``panel``, by configuration or vector size. Other passes: empty.

    Narrow vectors touch one cache line per pixel. Lines that are a power of two apart evict each other, so a packed panel is faster.
    """
    if conv.kind != WEIGHT_GRAD:
        return ""
    return config.extra.get("form") or ("rows" if width >= VECTOR_BYTES and 2 * 4 * _tap_span(conv.g)[1] >= width else "panel")


def _suits_rows(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether to use the row kernel: it was requested, there are too few filters for tiles, or the taps do not fit a panel."""
    if config.variant is V.CONV2D_NAIVE or conv.filters <= THIN:
        return True
    return conv.kind != WEIGHT_GRAD and conv.g.taps > cpu_tiles(conv, config, profile)["KC"]


def _suits_weights(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    size, lanes, _ = direct.vectors(conv, profile)
    return _form(conv, config, config.extra.get("VW", lanes) * size) == "rows"


@widened
def _cpu_panel(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    if conv.kind == WEIGHT_GRAD:
        return _cpu_panel_weights(queue, conv, cpu_tiles(conv, config, profile), profile, t)
    conv = conv._replace(g=conv.g.lying)
    tiles = cpu_tiles(conv, config, profile)
    strips, third = -(-conv.pixels // (tiles["NT"] * tiles["NV"] * tiles["VW"])), conv.g.groups * conv.classes
    # The sums of unfinished rows stay in local memory, which bounds the rows, unless one panel holds the whole depth.
    bound = 1 if conv.sizes[1] * conv.g.taps <= tiles["KC"] else -(-conv.filters // tiles["ROWS"])
    units = profile.max_compute_units
    enough = units * max(1, conv.filters // (PACKING_TILES * tiles["MR"] * units))  # every block packs the panel again
    blocks = max(bound, min(-(-conv.filters // tiles["MR"]), -(-_busy_groups(profile) // max(1, strips * third)), enough))
    rows = round_up(-(-conv.filters // blocks), tiles["MR"])
    tiles["FETCHES"] = int(launch.fetches(queue))
    size = (strips, -(-conv.filters // rows), third)
    if conv.kept:
        tiles["PACKED_W"], blocks, terms = 1, -(-conv.filters // tiles["MR"]), conv.sizes[1] * conv.g.taps
        packed = t.room(third * blocks * tiles["MR"] * terms, dtype=conv.dtype)
        pack = ending.ending_kernel(queue, conv.bare, CPU_FILES, "pack_weights", tiles)
        pack(queue, (blocks, third), None, t.weight, packed, conv.filters, terms)
        t = t._replace(weight=packed)
    ending.launch_ending(queue, conv, t, CPU_FILES, "conv_panel", tiles, size, None, rows)


@widened
def _cpu_weights(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Compute a weight gradient: put the channels of a pixel side by side, then multiply per kernel row; see weights.cl."""
    tiles, g, channels, m = cpu_tiles(conv, config, profile), conv.g, conv.g.c // conv.g.groups, conv.filters
    apart, span = _tap_span(g)
    skip = tuple(step if k == 1 else 1 for step, k in zip(g.stride, (g.kh, g.kw), strict=True))  # pixels that no tap reads
    stride = tuple(step // by for step, by in zip(g.stride, skip, strict=True))
    high, wide = ((o - 1) * step + d * (k - 1) + 1 for o, step, d, k in zip((g.oh, g.ow), stride, g.dilation, (g.kh, g.kw), strict=True))
    strip, taps = tiles["NT"] * tiles["NV"] * tiles["VW"], g.kh * apart
    strips = -(-span // strip)
    # Pixels are divided before filters, because every block of filters rereads all pixels.
    alike, wanted = strips * taps * g.groups, 2 * _busy_groups(profile)
    splits = max(1, min(-(-wanted // alike), conv.pixels // 1024))
    rows = round_up(-(-m // max(1, min(m // (2 * tiles["MR"]), -(-wanted // (alike * splits))))), tiles["MR"])
    blocks = -(-m // rows)
    turned, padded = g.groups * g.n * high * wide * channels, round_up(m, tiles["MR"])
    turn, multiply, collect = (
        launch.kernel(queue, __file__, "ends.cl lanes.cl weights.cl", name, {"Y": conv.dtype}, {"REAL": conv.compute, **tiles})
        for name in ("channels_last", "conv_weights", "collect_weights")
    )
    last = t.room(turned + strip, dtype=conv.accumulator)
    parts = t.room(splits * g.groups * taps * padded * strips * strip, dtype=conv.accumulator)
    turn(queue, (high, g.n * g.groups), None, t.source, last, g.n, channels, g.h, g.w, high, wide, *g.pad, *skip, g.groups, strip)
    multiply(queue, (strips, taps * blocks, g.groups * splits), None, last, t.weight, parts, g.n, channels, m, g.oh, g.ow, high, wide,
             g.kh, apart, *stride, *g.dilation, g.groups, rows, splits)  # fmt: skip
    collect(queue, (g.f,), None, parts, t.result, channels, m, g.kh, g.kw, apart, g.groups, strips * strip, splits)


def _cpu_panel_weights(queue: Any, conv: Convolution, tiles: dict[str, Any], profile: DeviceProfile, t: ConvOperands) -> None:
    g, strip = conv.g, tiles["NT"] * tiles["NV"] * tiles["VW"]
    blocks = -(-conv.filters // tiles["ROWS"])
    rows = round_up(-(-conv.filters // blocks), tiles["MR"])
    size = (-(-g.c // g.groups * g.taps // strip), -(-conv.filters // rows), g.groups)
    splits = max(1, min(-(-_busy_groups(profile) // math.prod(size)), conv.pixels // 256))
    columns.split_weight_grad(queue, conv, t, splits, CPU_FILES, "conv_panel_weights", tiles, (*size[:2], g.groups * splits), None, rows)


@widened
def _cpu_rows(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    tiles, g = cpu_tiles(conv, config, profile), conv.g
    lines = math.prod(g.w_shape) if conv.kind == WEIGHT_GRAD else g.n * g.groups * conv.filters * conv.class_size[0]
    rows = max(1, lines // (4 * _busy_groups(profile)))
    size = (-(-lines // rows), 1, conv.classes)
    if conv.kind == WEIGHT_GRAD:
        columns.split_weight_grad(queue, conv, t, 1, CPU_FILES, "conv_direct_weights", tiles, size, None, rows)
    else:
        ending.launch_ending(queue, conv, t, CPU_FILES, "conv_direct", tiles, size, None, rows)


# ---- other devices


def simt_tiles(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> dict[str, int]:
    """Return the macros of ``simt.cl`` from a configuration, adjusted to each other, the problem and the device."""
    per_item = config.work_per_thread
    tiles = {"BM": config.tile_m, "BN": config.tile_n, "BK": config.tile_k, "TM": per_item, "TN": per_item}
    tiles |= {name: config.extra[name] for name in tiles if name in config.extra}
    while tiles["BM"] >= 2 * conv.filters and tiles["BM"] > 16:
        tiles["BM"] //= 2
    while tiles["BM"] % (tiles["TM"] * tiles["TN"]):
        tiles["TM" if tiles["TM"] >= tiles["TN"] else "TN"] //= 2
    limit = profile.max_work_group_size
    while _work_items(tiles) > limit and tiles["BM"] > tiles["TM"] * tiles["TN"]:
        tiles["BM"] //= 2
    while _work_items(tiles) % tiles["BK"]:
        tiles["BK"] //= 2
    if tiles["BK"] % (tiles["BM"] // (tiles["TM"] * tiles["TN"])):  # every work-item fetches the same number of elements
        tiles["BM"] = tiles["TM"] * tiles["TN"]
    return tiles


def _work_items(tiles: dict[str, int]) -> int:
    return tiles["BN"] // tiles["TN"] * (tiles["BM"] // tiles["TM"])


def _simt_gemm(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    tiles, g = simt_tiles(conv, config, profile), conv.g
    items, rows = _work_items(tiles), -(-conv.filters // tiles["BM"])
    if conv.kind == WEIGHT_GRAD:
        across = -(-g.c // g.groups * g.taps // tiles["BN"])
        splits = _pixel_splits(conv, profile, across * rows * g.groups, tiles["BK"])
        size = (across * items, rows, g.groups * splits)
        return columns.split_weight_grad(queue, conv, t, splits, SIMT_FILES, "conv_gemm_weights", tiles, size, (items, 1, 1))
    size = (-(-conv.pixels // tiles["BN"]) * items, rows, g.groups * conv.classes)
    ending.launch_ending(queue, conv, t, SIMT_FILES, "conv_gemm", tiles, size, (items, 1, 1))


def _pixel_splits(conv: Convolution, profile: DeviceProfile, groups: int, depth: int) -> int:
    """Return the number of partial sums over the pixels: enough to occupy the GPU, more if a sum would exceed :data:`LONGEST_SUM`."""
    busy = min(-(-_busy_groups(profile) // groups), conv.pixels // (16 * depth), MOST_SPLITS)
    return max(1, busy, min(conv.pixels // LONGEST_SUM, SPLIT_ROOM // math.prod(conv.g.w_shape)))


def _suits_taps(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether channels and filters fill the tiles of ``taps.cl``, and local memory and work-groups are large enough for them.

    Never on a CPU, even if GPU kernels are requested: PoCL 3.0 and 3.1 crash in this kernel; Oclgrind and other drivers find no error.
    """
    if profile.device_type == "cpu":
        return False
    roomy = profile.local_mem_size >= 2 * 4 * TAPS_DEPTH * 2 * (128 + 4) and profile.max_work_group_size >= 256
    filled = min(conv.sizes[1], conv.filters) >= TAPS_CHANNELS
    return config.extra.get("form", "taps") == "taps" and filled and roomy and conv.compute == "float"


def _taps_tiles(conv: Convolution, config: KernelConfig, profile: DeviceProfile, columns: int) -> dict[str, Any]:
    """Return the macros of ``taps.cl``: large tiles, unless they are too few to keep the device busy."""
    tiles: dict[str, Any] = {"BM": 128 if conv.filters > 64 else 64, "BN": 128, "BK": TAPS_DEPTH, "TM": 8, "TN": 8}
    if -(-conv.filters // tiles["BM"]) * columns // 128 * conv.g.groups * conv.classes < profile.max_compute_units:
        tiles |= {"BM": 64, "BN": 64}
    return tiles | {name: config.extra[name] for name in tiles if name in config.extra} | {"REAL4": f"{conv.compute}4"}


def _taps(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    if conv.kind == WEIGHT_GRAD:
        return _taps_weights(queue, conv, config, profile, t)
    tiles, c, m = _taps_tiles(conv, config, profile, conv.pixels), conv.sizes[1], conv.filters
    deep, wide, items = round_up(c, tiles["BK"]), round_up(m, tiles["BM"]), _work_items(tiles)
    n = conv.g.groups * conv.g.taps * deep * wide
    macros: dict[str, Any] = {"REAL": conv.compute, "PART": 1, "INPUT_GRAD": conv.kind == INPUT_GRAD}
    pack = launch.kernel(queue, __file__, TAPS_FILES, "pack_taps", {"X": conv.dtype, "Y": conv.accumulator}, macros)
    size = (-(-conv.pixels // tiles["BN"]) * items, wide // tiles["BM"], conv.g.groups * conv.classes)
    packed = t.room(n, dtype=conv.accumulator)
    pack(queue, (n,), (launch.LOCAL_1D,), t.weight, packed, c, m, conv.g.taps, deep, wide, n)
    t = t._replace(weight=packed)
    ending.launch_ending(queue, conv, t, TAPS_FILES, "conv_taps", tiles | {"PART": 2}, size, (items, 1, 1), deep, wide)


def _taps_weights(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    tiles: dict[str, Any] = {"BM": 64, "BN": 64, "BK": TAPS_DEPTH, "TM": 8, "TN": 4}
    tiles |= {name: config.extra[name] for name in tiles if name in config.extra} | {"REAL4": f"{conv.compute}4", "PART": 3}
    items, g = _work_items(tiles), conv.g
    across, rows = g.taps * -(-g.c // g.groups // tiles["BN"]), -(-conv.filters // tiles["BM"])
    splits = _pixel_splits(conv, profile, across * rows * g.groups, tiles["BK"])
    size = (across * items, rows, g.groups * splits)
    columns.split_weight_grad(queue, conv, t, splits, TAPS_FILES, "conv_taps_weights", tiles, size, (items, 1, 1))


def _simt_naive(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    if conv.kind == WEIGHT_GRAD:
        most = min(config.local_size_1d, profile.max_work_group_size) if config.use_local_memory else 1
        lanes = 1 << (max(1, most).bit_length() - 1)
        weights = math.prod(conv.g.w_shape)
        splits = 1 if lanes == 1 else _pixel_splits(conv, profile, weights, lanes)
        size = (weights * lanes, splits)
        return columns.split_weight_grad(queue, conv, t, splits, SIMT_FILES, "conv_naive_weights", {"LANES": lanes}, size, (lanes, 1))
    results = conv.g.x_shape if conv.kind == INPUT_GRAD else conv.g.y_shape
    ending.launch_ending(queue, conv, t, SIMT_FILES, "conv_naive", {}, (math.prod(results),), (config.local_size_1d,))


# ---- the table


def _conv_panel_space(problem: Problem, form: str) -> Iterator[KernelConfig]:
    for (rows, vectors), depth in itertools.product(cpu.REGISTER_TILES[problem.profile.vector_registers], cpu.PANEL_DEPTHS[1:]):
        block = {"KB": depth // 4} if problem.op == WEIGHT_GRAD else {}
        yield KernelConfig(V.CONV2D_IM2COL, extra={"tier": "cpu", "form": form, "MR": rows, "NV": vectors, "KC": depth, **block})


_MEANT = {V.CONV2D_WINOGRAD: "winograd", V.CONV2D_IM2COL: "columns"}  # where they apply
algorithms.add(
    "conv2d", "rows", "cpu.cl", "groups of one or two filters, and kernels of more taps than a panel has rows", "", _cpu_rows, device="cpu",
    when=_suits_rows, samples=(tier_config(V.CONV2D_NAIVE, "cpu"),),
)  # fmt: skip
algorithms.add(
    "conv2d", "weights", "weights.cl", "weight gradients with vectors of 32 bytes and more: channels last, nothing packed",
    "cases_intel.json: conv 3x3/2 8x256x8x8 to 512 weight gradient", _cpu_weights, device="cpu", when=_suits_weights,
    configurations=lambda problem: _conv_panel_space(problem, "rows") if problem.op == WEIGHT_GRAD else (),
    samples=(tier_config(V.CONV2D_IM2COL, "cpu", form="rows", VW=8, NV=2, KB=32),),
)  # fmt: skip
algorithms.add(
    "conv2d", "panel", "cpu.cl", "CPUs: an implicit product over unfolded panels",
    "cases_intel.json: conv 1x1/2 8x64x32x32 to 128 forward", _cpu_panel, device="cpu",
    configurations=lambda problem: _conv_panel_space(problem, "panel"),
    samples=(
        tier_config(V.CONV2D_IMPLICIT_GEMM, "cpu", form="panel"),
        tier_config(V.CONV2D_IM2COL, "cpu", form="panel", KC=64, ROWS=12, NT=2),
        tier_config(V.CONV2D_IM2COL, "cpu", form="panel", VW=16, NV=2, MR=4),
    ),
)  # fmt: skip
algorithms.add(
    "conv2d", "naive", "simt.cl", "groups of one or two filters: a work-item per result", "", _simt_naive, device="gpu",
    when=lambda conv, config, profile: conv.variant(config) is V.CONV2D_NAIVE, samples=(tier_config(V.CONV2D_NAIVE, "simt"),),
)  # fmt: skip
algorithms.add(
    "conv2d", "taps", "taps.cl", "GPUs, 32 channels and filters and more: a product per tap",
    "cases_h200.json: conv 1x1/2 128x64x32x32 to 128 weight gradient", _taps, device="gpu", when=_suits_taps,
    configurations=lambda problem: [tier_config(V.CONV2D_IMPLICIT_GEMM, "simt", form="taps", BM=m, BN=n) for m, n in TAPS_TILES],
)  # fmt: skip
algorithms.add(
    "conv2d", "gemm", "simt.cl", "GPUs: an implicit product, gathered tile by tile",
    "cases_h200.json: conv 3x3 128x3x32x32 to 64 forward", _simt_gemm, device="gpu",
    configurations=lambda problem: [KernelConfig(V.CONV2D_IMPLICIT_GEMM, *t, extra={"tier": "simt", "form": "gemm"}) for t in SIMT_TILES],
    samples=(
        *(KernelConfig(V.CONV2D_IMPLICIT_GEMM, *sizes, extra={"tier": "simt"}) for sizes in ((32, 32, 16, 4), (64, 64, 8, 8))),
        tier_config(V.CONV2D_TILED_LOCAL, "simt"),
    ),
)  # fmt: skip


def _tuned_convolution(problem: Problem) -> algorithms.Case:
    (n, c, h, w, f, *kernel), flags, back = problem.shape, problem.flags, problem.op == WEIGHT_GRAD
    weights = (f, c // flags["groups"], *kernel)
    g = geometry(problem.op, (n, c, h, w), weights, *(flags[name] for name in ("stride", "pad", "dilation", "groups")))
    first, second, shape, depth, exact = {
        FORWARD: (g.x_shape, g.w_shape, g.y_shape, g.c // g.groups * g.taps, partial(arrays.conv_forward, bias=None, g=g)),
        INPUT_GRAD: (g.y_shape, g.w_shape, g.x_shape, g.f // g.groups * g.taps, partial(arrays.input_grad, bias=None, g=g)),
        WEIGHT_GRAD: (g.y_shape, g.x_shape, g.w_shape, g.n * g.oh * g.ow, partial(arrays.weight_grad, g=g)),
    }[problem.op]

    def measured(config: KernelConfig, one: Tensor, other: Tensor) -> Tensor:
        result = Tensor.empty(shape, problem.dtype, queue=one.queue)
        given = (other, one) if back else (one, other)
        run(Convolution(problem.op, g, problem.dtype), one.queue, *given, result, config)
        return result

    return algorithms.Case((first, second), depth, measured, exact)


_CONV_DEFAULTS = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "groups": 1}
algorithms.FAMILIES.update(
    {op: algorithms.Family(op, "conv2d", _CONV_DEFAULTS, 7, 5, _tuned_convolution) for op in (FORWARD, INPUT_GRAD, WEIGHT_GRAD)}
)
