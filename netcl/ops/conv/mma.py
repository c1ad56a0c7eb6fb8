"""Convolutions of 16-bit tensors on NVIDIA's matrix units (``mma.cl``): when to use them, tiles, and splits of the sum.

A first launch puts the channels of every pixel side by side and packs the weights, if the pass reads weights. The convolution is a
product whose right operand is gathered while it is copied to local memory. A weight gradient is summed in parts, which a last launch
adds and rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.dtype import HALVES
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.core.kernels import primitives, program
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.strided import alignment
from netcl.ops.conv import arrays, ending
from netcl.ops.conv.convolution import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.conv.geometry import geometry
from netcl.ops.matmul import gemm, nvidia

CHUNK = 8  # values of 16 bytes
RUN = 4  # chunks of one tap that follow each other in the columns of a weight gradient
MOST_TAPS = 16  # taps along an axis: the bits of a pixel mark which of them lie inside
TURN_ITEMS, TURN_PIXELS, TURN_CHUNKS = 256, 128, 4  # of a work-group that puts channels last
LEAST_WORK = 1 << 22  # multiply-adds; below, launches dominate the time
MOST_EMPTY_VALUES = 24  # values that a tile may compute per wanted value: portable kernels are slower by more
MOST_INT = 2**31 - 2**20
FILL = 128  # the time that startup and end of a work-group take, in terms of a sum
PART_COST = 300  # multiply-adds of a compute unit in the time that writing and adding a partial sum takes


class ConvTile(NamedTuple):
    """A tile: rows (filters) and columns per work-group and per warp. ``resident``: groups per compute unit; ``rate``: relative speed."""

    m: int
    n: int
    warp_m: int
    warp_n: int
    stages: int
    resident: int
    rate: float
    step: int = 4  # chunks along k at a time

    @property
    def items(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * 32

    def macros(self, dtype: str) -> dict[str, Any]:
        sizes = {"BM": self.m, "BN": self.n, "WM": self.warp_m, "WN": self.warp_n, "STAGES": self.stages, "STEP": self.step}
        return sizes | {"MMA": f"MMA_{dtype.upper()}"}

    def time(self, rows: int, columns: int, depth: int, planes: int, units: int) -> float:
        """Estimate the time of ``planes`` products of rows x columns x depth, in multiply-adds of a compute unit."""
        groups = planes * -(-rows // self.m) * -(-columns // self.n)
        return self.m * self.n * (depth + FILL) * gemm.group_times(groups, units, self.resident) / self.rate


CONV_MMA_TILES = (
    ConvTile(128, 128, 64, 64, stages=3, resident=2, rate=1.0),
    ConvTile(64, 256, 64, 64, stages=2, resident=2, rate=1.0),
    ConvTile(64, 128, 64, 32, stages=4, resident=3, rate=0.8),
    ConvTile(64, 64, 32, 32, stages=4, resident=4, rate=0.6),
)


def chunks(conv: Convolution) -> int:
    """Return the number of chunks of 8 channels per pixel of the gathered input."""
    return -(-conv.sizes[1] // CHUNK)


def chunk_run(whole: int, step: int) -> int:
    """Return how many successive chunks belong to one tap: ``step`` if it divides ``whole``, else ``whole``. ``whole``: chunks per tap."""
    return step if whole % step == 0 else whole


def suits(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether matrix units can compute this convolution, and ``config`` names them or the policy expects a gain."""
    wanted = config.extra.get("form") == "mma" or ("why" in config.extra and pays(conv))
    return conv.dtype in HALVES and wanted and nvidia.capable(profile) and fits(conv)


def pays(conv: Convolution) -> bool:
    """Whether there is enough work, and tiles compute at most :data:`MOST_EMPTY_VALUES` times as many values as the result has."""
    g, rows, whole = conv.g, min(tile.m for tile in CONV_MMA_TILES), chunks(conv)
    work = g.n * g.oh * g.ow * g.f * g.c // g.groups * g.taps
    computed = -(-conv.filters // rows) * rows * whole * CHUNK
    return work >= LEAST_WORK and computed <= MOST_EMPTY_VALUES * conv.filters * conv.sizes[1]


def fits(conv: Convolution) -> bool:
    """Whether there is something to compute, 32-bit integers can index all values, and there are at most 16 taps along an axis."""
    g = conv.g
    wide = chunks(conv) * CHUNK * g.groups
    values = (g.n * wide * max(g.h * g.w, g.oh * g.ow), g.n * g.f * (g.oh * g.ow + CHUNK), g.f * wide * g.taps)
    return min(values) > 0 and max(values) < MOST_INT and max(g.kh, g.kw) <= MOST_TAPS


def run(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Launch a convolution or one of its gradients on matrix units."""
    tile, splits = tile_of(conv, config, profile.max_compute_units)
    if conv.kind == WEIGHT_GRAD:
        _mma_weight_grad(queue, conv, tile, splits, t)
    else:
        _mma_convolution(queue, conv, tile, t)


def tile_of(conv: Convolution, config: KernelConfig, units: int) -> tuple[ConvTile, int]:
    """Return the tile of a convolution and the number of parts of its sum: configured, or with the least estimated time."""
    named = [tile for tile in CONV_MMA_TILES if (tile.m, tile.n) == (config.extra.get("BM"), config.extra.get("BN"))]
    splits, depth = config.extra.get("splits"), chunks(conv) * CHUNK * conv.g.taps // conv.classes
    if conv.kind != WEIGHT_GRAD:
        planes = conv.g.groups * conv.classes
        return min(
            ((tile, 1) for tile in named or CONV_MMA_TILES), key=lambda way: way[0].time(conv.filters, conv.pixels, depth, planes, units)
        )
    ways = [
        (tile, parts) for tile in named or CONV_MMA_TILES for parts in ([splits] if splits else _useful_splits(conv, tile, depth, units))
    ]
    sums = conv.g.f * depth

    def time(way: tuple[ConvTile, int]) -> float:
        tile, parts = way
        return tile.time(conv.filters, depth, -(-conv.pixels // parts), conv.g.groups * parts, units) + PART_COST * sums * parts / units

    return min(ways, key=time)


def _useful_splits(conv: Convolution, tile: ConvTile, columns: int, units: int) -> list[int]:
    """List numbers of parts with which tiles fill the device once, twice, ..., bounded so that each part has enough terms."""
    tiles = conv.g.groups * -(-conv.filters // tile.m) * -(-columns // tile.n)
    most = max(1, conv.pixels // (4 * FILL))
    return sorted({1, *(max(1, min(most, times * units // tiles)) for times in range(1, 2 * tile.resident + 1))})


# ---- launches


def _mma_kernel(queue: Any, conv: Convolution, part: int, name: str, defines: dict[str, Any]) -> program.Kernel:
    operands = {"X": conv.dtype, "Y": conv.dtype}
    fixed = {"PART": part, "INPUT_GRAD": conv.kind == INPUT_GRAD}
    return launch.kernel(queue, __file__, "axes.cl ends.cl mma.cl", name, operands, fixed | defines, _instructions())


def _instructions() -> str:
    return primitives.cl_source(nvidia.__file__, "ptx.cl")


def _channels_last(queue: Any, conv: Convolution, t: ConvOperands, packs: bool) -> tuple[Tensor, Tensor]:
    """Return a copy of the source with the channels of a pixel side by side and, if ``packs``, the packed weights."""
    (n, c, high, wide, m), groups, taps, c8 = conv.sizes[:5], conv.g.groups, conv.g.taps, chunks(conv)
    plane, weights = high * wide, groups * m * taps * c8 if packs else 0
    tiles = -(-n * plane // TURN_PIXELS) * -(-c8 // TURN_CHUNKS) * groups
    size = ((tiles - (-weights // TURN_ITEMS)) * TURN_ITEMS,)
    weight = t.weight if packs else t.source
    last = t.room(groups * n * plane * c8 * CHUNK, dtype=conv.dtype)
    packed = t.room(weights * CHUNK, dtype=conv.dtype) if packs else weight
    whole = plane % CHUNK == 0 and alignment(t.source) == 16
    kernel = _mma_kernel(queue, conv, 1, "mma_prepare", {})
    kernel(queue, size, (TURN_ITEMS,), t.source, weight, last, packed, n, c, plane, m, taps, groups, c8, tiles, int(whole))
    return last, packed


def _mma_convolution(queue: Any, conv: Convolution, tile: ConvTile, t: ConvOperands) -> None:
    stored, whole = conv.ending.stored, chunks(conv)
    run = chunk_run(whole, tile.step)
    macros = tile.macros(conv.dtype) | {"PART": 2, "EVEN": run == tile.step, "Y_EIGHT": stored in HALVES}
    macros |= {"Y_PAIR(low, high)": f"pair_{stored}(low, high)"} if stored in HALVES else {}
    kernel = ending.ending_kernel(queue, conv, "axes.cl ends.cl mma.cl", "conv_mma", macros, text=_instructions())
    size = (-(-conv.filters // tile.m) * -(-conv.pixels // tile.n) * tile.items, conv.g.groups * conv.classes)
    read = _channels_last(queue, conv, t, packs=True)
    kernel(queue, size, (tile.items, 1), *read, *t.end, *conv.sizes, whole, run, t.scale)


def _mma_weight_grad(queue: Any, conv: Convolution, tile: ConvTile, splits: int, t: ConvOperands) -> None:
    g, c8, dy = conv.g, chunks(conv), t.weight
    width, plane = g.taps * c8 * CHUNK, g.oh * g.ow
    padded, planes = -(-plane // CHUNK) * CHUNK, g.n * g.f
    last, _ = _channels_last(queue, conv, t, packs=False)
    if padded != plane or alignment(dy) != 16:
        dy = t.room(planes * padded, dtype=conv.dtype)
        pad = _mma_kernel(queue, conv, 1, "mma_pad", {})
        pad(queue, (dy.size,), (launch.LOCAL_1D,), t.weight, dy, planes, plane, padded)
    parts = t.room(splits * g.f * width, dtype="float32")
    size = (-(-conv.filters // tile.m) * -(-width // tile.n) * splits * tile.items, g.groups)
    multiply = _mma_kernel(queue, conv, 3, "conv_mma_weights", tile.macros(conv.dtype))
    multiply(queue, size, (tile.items, 1), last, dy, parts, *conv.sizes, c8, chunk_run(c8, RUN), splits)
    collect, dw = _mma_kernel(queue, conv, 4, "mma_collect", {}), t.result
    collect(queue, (dw.size,), (launch.LOCAL_1D,), parts, dw, g.f, g.c // g.groups, g.taps, c8, chunk_run(c8, RUN), splits)


# ---- numeric check


def _convolves_right(queue: Any, dtype: str) -> bool:
    """Whether a strided convolution and its gradients agree with exact ones, for whole and partial steps and partial tiles."""
    g = geometry("conv2d", (3, 32, 9, 8), (37, 32, 3, 3), (2, 1), 1, 1, 1)
    rng = np.random.default_rng(0)
    x, w, dy = (Tensor.from_host(queue, rng.standard_normal(shape, np.float32), dtype) for shape in (g.x_shape, g.w_shape, g.y_shape))
    exact_x, exact_w, exact_dy = (t.to_host().astype(np.float64) for t in (x, w, dy))
    cases = ((FORWARD, (x, w), g.y_shape, arrays.conv_forward(exact_x, exact_w, None, g=g)),
             (INPUT_GRAD, (dy, w), g.x_shape, arrays.input_grad(exact_dy, exact_w, None, g=g)),
             (WEIGHT_GRAD, (x, dy), g.w_shape, arrays.weight_grad(exact_dy, exact_x, g=g)))  # fmt: skip
    return all(_is_close(queue, Convolution(kind, g, dtype), given, shape, exact) for kind, given, shape, exact in cases)


def _is_close(queue: Any, conv: Convolution, given: tuple[Tensor, Tensor], shape: tuple[int, ...], exact: np.ndarray) -> bool:
    result = Tensor.empty(shape, conv.dtype, queue=queue)
    run(queue, conv, KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM), profile_of(queue), ConvOperands(*given, result))
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[conv.dtype]
    return bool(np.abs(result.to_host() - exact).max() <= unit * np.abs(exact).max())


def _space(problem: Problem) -> list[KernelConfig]:
    tiles = CONV_MMA_TILES if problem.dtype in HALVES and nvidia.capable(problem.profile) else ()
    named = ({"tier": "simt", "form": "mma", "BM": tile.m, "BN": tile.n} for tile in tiles)
    return [KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM, extra=extra) for extra in named]


algorithms.add(
    "conv2d", "mma", "mma.cl", "convolutions of float16 and bfloat16 from 4 million multiply-adds on",
    "cases_h200.json: conv 3x3 128x3x32x32 to 64 weight gradient bfloat16", run, device="gpu",
    needs="NVIDIA, compute capability 8.0 or more", when=suits, cost=algorithms.first, configurations=_space,
    probe=lambda queue, conv, config: nvidia.verdict(queue, "conv2d", "mma", conv.dtype, lambda queue: _convolves_right(queue, conv.dtype)),
)  # fmt: skip
