"""CPU convolutions with few filters or channels, for which unfolding would cost too much: ``filters.cl`` and ``pixels.cl``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.engine import algorithms, launch
from netcl.ops.conv import ending
from netcl.ops.conv.convolution import GROUPS_PER_UNIT, INPUT_GRAD, THIN, WEIGHT_GRAD, Convolution, ConvOperands, tier_config
from netcl.ops.conv.ending import CPU_FILES, widened

BEFORE = "axes.cl ends.cl lanes.cl lines.cl"
FEW_FILTERS = (32, 64)  # filters per group up to which unfolding is too expensive: for short and for long sums
LONG_SUM = 256  # terms from which transposing the results of many filters is cheaper
FEW_CHANNELS = 64  # channels per group up to which the same holds for the weight gradient
FILLED = 0.75  # lanes that filters must fill; otherwise pixels are vectorized
FILLED_MORE = 0.8  # the same for the weight gradient, whose alternative vectorizes channels
LONG = 0.5  # lanes of a vector that a line of pixels must fill
LATENCY = 8  # multiplications in flight that keep a core's two units busy
LINE_ROOM = 64 * 1024  # maximum bytes of lines that a work-group copies, and of gradients it transposes
DEPTH_ROOM = 4096  # elements of the lines of a channel that a work-group copies: a quarter of the first cache, and its sums another
DEPTH_TAPS = 64  # most taps of such a convolution
BLOCK_WEIGHTS = 1 << 17  # weights of a block of filters: read once for every line of pixels, from the second cache
STAGED = (32, 128)  # results of a filter that are stored together, by what local memory allows: at least two tiles
COLLECTED = 16  # weights of a filter that are stored together
# Pixels of a tile, by how many the registers allow: three widths are compiled, so that a new image size needs no compilation.
LINE_WIDTHS = {28: (8, 14, 16), 13: (8, 10, 13), 6: (4, 5, 6), 12: (8, 10, 12), 5: (3, 4, 5)}


class LineShare(NamedTuple):
    """The division of a CPU kernel's work: macros, output lines per work-group (0: not even one fits) and the pixels of a tile."""

    tiles: dict[str, Any]
    lines: int
    pixels: int = 0

    @property
    def width(self) -> int:
        """The lanes of all vectors of a tile: its filters, or the pixels that it computes at once."""
        return self.tiles["VW"] * self.tiles["NV"]

    def tiles_for(self, *names: str) -> dict[str, int]:
        """Return the macros that a kernel beside the product reads, so that convolutions share its program."""
        return {name: self.tiles[name] for name in names}


def vectors(conv: Convolution, profile: DeviceProfile) -> tuple[int, int, int]:
    """Return the bytes per element, the lanes per vector and the number of vector registers."""
    size = 8 if conv.compute == "double" else 4
    return size, profile.lanes * 4 // size, profile.vector_registers


def form_of(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> str:
    """Return the kernel that ``config`` requests or that suits a convolution: ``"filters"`` or ``"pixels"``; empty for neither."""
    form, weights, lanes = config.extra.get("form"), conv.kind == WEIGHT_GRAD, _lanes(conv, config, profile)
    if config.variant is KernelVariant.CONV2D_NAIVE or conv.classes > 1 or form not in (None, "filters", "pixels"):
        return ""
    if form is None and conv.g.taps == 1:
        return ""
    if form == "pixels" or (form is None and conv.filters < FILLED * lanes and not weights):
        share = pixel_share(conv, lanes, profile) if not weights and conv.g.stride == (1, 1) else None
        suits = share and share.lines and (form or conv.class_size[1] >= LONG * lanes)
        return "pixels" if suits else ""
    share = filter_share(conv, lanes, profile)
    c, blocks = conv.sizes[1], -(-conv.filters // share.width)
    terms = c * conv.g.taps
    few = c <= FEW_CHANNELS if weights else conv.filters <= FEW_FILTERS[terms >= LONG_SUM] and terms * share.width <= BLOCK_WEIGHTS
    filled = (FILLED_MORE if weights else FILLED) * blocks * share.width <= conv.filters
    return "filters" if share.lines and (form or (few and filled)) else ""


def _lanes(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> int:
    return config.extra.get("VW") or vectors(conv, profile)[1]


def _fitting(conv: Convolution, profile: DeviceProfile, room: int, held: Callable[[int], int]) -> int:
    """Return the most output lines per work-group for which all cores have work and ``held(lines) <= room``; 0 if there are none."""
    wanted = GROUPS_PER_UNIT * profile.max_compute_units
    most = max(1, conv.class_size[0] // -(-wanted // (conv.g.n * conv.g.groups)))
    return next((lines for lines in range(most, 0, -1) if held(lines) <= room), 0)


def _local_bytes(conv: Convolution, profile: DeviceProfile) -> int:
    return min(LINE_ROOM, profile.local_mem_size // 2 - 512) // vectors(conv, profile)[0]


# ---- pixels in the lanes


def pixel_share(conv: Convolution, lanes: int, profile: DeviceProfile) -> LineShare:
    """Return the division for ``pixels.cl``: tiles of up to 8 filters times as many vectors of pixels as the registers allow."""
    g, wide, registers, room = conv.g, conv.class_size[1], vectors(conv, profile)[2], _local_bytes(conv, profile)
    few = -(-conv.filters // -(-conv.filters // 8))
    across = max(wide, lanes) + (g.kw - 1) * g.dilation[1]
    lines = _fitting(conv, profile, room, lambda n: conv.sizes[1] * (n + (g.kh - 1) * g.dilation[0]) * across)
    return LineShare({"VW": lanes, "NV": max(1, min(8, (registers - 3) // (few + 1))), "FEW": few, "ROOM": room}, lines)


@widened
def _pixels(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    share = pixel_share(conv, _lanes(conv, config, profile), profile)
    size = (conv.g.n * -(-conv.class_size[0] // share.lines), conv.g.groups)
    ending.launch_ending(queue, conv, t, f"{BEFORE} pixels.cl", "conv_pixels", share.tiles, size, None, share.lines)


# ---- groups of one channel


def depth_share(conv: Convolution, lanes: int, profile: DeviceProfile) -> LineShare:
    """Return the division for ``conv_depth``: as many lines as fit in local memory."""
    vectors, (down, across) = 8 if lanes == 4 else 4, (1, 1) if conv.kind == INPUT_GRAD else conv.g.stride
    rim, pitch = (conv.g.kh - 1) * conv.g.dilation[0] // down, conv.class_size[1] + (conv.g.kw - 1) * conv.g.dilation[1] // across
    room = min(DEPTH_ROOM, _local_bytes(conv, profile))
    lines = max(0, min(conv.class_size[0], (room - vectors * lanes - pitch) // (down * across * pitch) - rim))
    return LineShare({"VW": lanes, "NV": vectors, "NT": 1, "ROOM": room, "TAPS": DEPTH_TAPS}, lines)


def _suits_depth(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    named = config.variant is KernelVariant.CONV2D_NAIVE or config.extra.get("form", "depth") != "depth"
    thin = conv.kind != WEIGHT_GRAD and conv.classes == 1 and conv.sizes[1] == 1 and conv.filters <= THIN and conv.g.taps <= DEPTH_TAPS
    return thin and not named and depth_share(conv, _lanes(conv, config, profile), profile).lines > 0


@widened
def _depth(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    share, end = depth_share(conv, _lanes(conv, config, profile), profile), conv.ending
    n, _, _, _, m, oh, _, kh, kw, _, _, pad_h, pad_w, down, across, groups = conv.sizes
    if conv.kind == INPUT_GRAD:
        pad_h, pad_w = (kh - 1) * down - pad_h, (kw - 1) * across - pad_w
    pieces = n * groups * m * -(-oh // share.lines)
    each = max(1, pieces // (4 * GROUPS_PER_UNIT * profile.max_compute_units))
    macros = {**share.tiles, "EARLY": int(not end.residual and end.stored == conv.accumulator)}
    kernel = ending.ending_kernel(queue, conv, CPU_FILES, "conv_depth", macros)
    numbers = (*conv.sizes[:11], pad_h, pad_w, *conv.sizes[13:], share.lines, each)
    kernel(queue, (-(-pieces // each),), None, t.source, t.weight, *t.end, *numbers, t.scale)


# ---- filters in the lanes


def filter_tile(conv: Convolution, lanes: int, registers: int) -> tuple[int, int, tuple[int, ...]]:
    """Return a tile's number of filter vectors, its number of pixels, and the candidates for the number of pixels.

    In weight gradients, kernel rows replace pixels. The number of vectors does not depend on the image width, which saves compilations.
    """
    weights, unit = conv.kind == WEIGHT_GRAD, conv.g.kw if conv.kind == WEIGHT_GRAD else 1
    most = {v: ((registers - 3) // v - 1) // unit for v in (1, 2, 4)}
    numbers = {v: tuple(range(1, min(conv.g.kh, n) + 1)) if weights else LINE_WIDTHS.get(n, ()) for v, n in most.items()}

    def cost(v: int, n: int) -> float:
        return max(v * n * unit, LATENCY) / 2 + (v + n * unit) / 4  # two products at a time, loads half hidden behind them

    def per_item(v: int) -> float:
        return -(-conv.filters // (v * lanes)) * min(cost(v, n) / n for n in numbers[v])

    v = min((v for v in numbers if numbers[v]), key=per_item, default=0)
    if not v:
        return 1, 1, ()
    total = conv.g.kh if weights else conv.class_size[1]
    return v, min(numbers[v], key=lambda n: (-(-total // n) * cost(v, n), n)), numbers[v]


def filter_share(conv: Convolution, lanes: int, profile: DeviceProfile) -> LineShare:
    """Return how ``filters.cl`` divides its work. A tile is a few filter vectors by a few pixels (in weight gradients: kernel rows)."""
    g, wide, weights, room = conv.g, conv.class_size[1], conv.kind == WEIGHT_GRAD, _local_bytes(conv, profile)
    size, _, registers = vectors(conv, profile)
    v, n, widths = filter_tile(conv, lanes, registers)
    down, across = (1, 1) if conv.kind == INPUT_GRAD else g.stride
    tiles: dict[str, Any] = {"VW": lanes, "NV": v, "ROOM": room}
    if weights:
        tiles |= {"TALL": n, "ACROSS": g.kw, "TAP_STEP": g.dilation[1], "TURNED": room, "STAGED": COLLECTED}
    else:
        tiles |= {"IN_STEP": across, "STAGED": STAGED[4 * size * STAGED[1] * v * lanes <= profile.local_mem_size]}
        tiles |= {f"PX{i}": width for i, width in enumerate(widths)}
    long = (wide if weights else max(wide, n)) * across + (g.kw - 1) * g.dilation[1]

    def held(lines: int) -> int:
        seen = conv.sizes[1] * ((lines - 1) * down + (g.kh - 1) * g.dilation[0] + 1) * long
        return max(seen, lines * wide * v * lanes) if weights else seen

    return LineShare(tiles, _fitting(conv, profile, room, held), n)


@widened
def _filters(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    share = filter_share(conv, _lanes(conv, config, profile), profile)
    blocks = -(-conv.filters // share.width)
    if conv.kind == WEIGHT_GRAD:
        return _filter_gradients(queue, conv, share, blocks, profile, t)
    g, c, m = conv.g, conv.sizes[1], conv.filters
    n, size = g.groups * blocks * c, (g.n * -(-conv.class_size[0] // share.lines), g.groups)
    pack = ending.ending_kernel(queue, conv.bare, f"{BEFORE} filters.cl", "pack_filters", share.tiles_for("VW", "NV"))
    packed = t.room(n * g.taps * share.width, dtype=conv.accumulator)
    pack(queue, (n,), None, t.weight, packed, c, m, g.taps, blocks)
    t = t._replace(weight=packed)
    ending.launch_ending(queue, conv, t, f"{BEFORE} filters.cl", "conv_filters", share.tiles, size, None, share.lines, share.pixels)


def _filter_gradients(queue: Any, conv: Convolution, share: LineShare, blocks: int, profile: DeviceProfile, t: ConvOperands) -> None:
    g, m, weights = conv.g, conv.filters, conv.sizes[1] * conv.g.taps
    splits = min(g.n * -(-g.oh // share.lines), 2 * GROUPS_PER_UNIT * profile.max_compute_units)
    multiply, collect = (
        launch.kernel(queue, __file__, f"{BEFORE} filters.cl", name, {}, {"REAL": conv.compute, "PART": 2, **tiles})
        for name, tiles in (("filter_gradients", share.tiles), ("collect_filters", share.tiles_for("VW", "NV", "STAGED")))
    )
    parts = t.room(splits * g.groups * blocks * weights * share.width, dtype=conv.accumulator)
    multiply(queue, (splits, blocks, g.groups), None, t.source, t.weight, parts, *conv.sizes, share.lines)
    collect(queue, (-(-weights // COLLECTED), g.groups * blocks), None, parts, t.result, m, blocks, weights, splits)


_config = partial(tier_config, KernelVariant.CONV2D_IMPLICIT_GEMM, "cpu")
algorithms.add(
    "conv2d", "depth", "cpu.cl", "groups of one channel, by lines in local memory",
    "onnx_sessions_pocl_aarch64.json: mobilenet_v2 3x224x224, batch 1", _depth, device="cpu", when=_suits_depth,
    samples=(_config(form="depth"), _config(form="depth", VW=8)),
)  # fmt: skip
algorithms.add(
    "conv2d", "filters", "filters.cl", "few filters, or channels of a weight gradient: filters in the lanes, nothing unfolded",
    "cases_intel.json: conv 3x3/2 8x64x32x32 to 128 weight gradient", _filters, device="cpu",
    when=lambda conv, config, profile: form_of(conv, config, profile) == "filters",
    configurations=lambda problem: [_config(form="filters")], samples=(_config(form="filters"), _config(form="filters", VW=8)),
)  # fmt: skip
algorithms.add(
    "conv2d", "pixels", "pixels.cl", "filters too few to fill a vector: pixels in the lanes",
    "cases_intel.json: conv 3x3 8x3x32x32 to 64 input gradient", _pixels, device="cpu",
    when=lambda conv, config, profile: form_of(conv, config, profile) == "pixels",
    configurations=lambda problem: [] if problem.op == WEIGHT_GRAD else [_config(form="pixels")],
    samples=(_config(form="pixels"), _config(form="pixels", VW=8)),
)  # fmt: skip
