"""Products on the matrix units of NVIDIA GPUs from compute capability 8.0, by ``mma.sync`` (mma.cl); see docs/internals/kernels.md.

Kernels copy 16 bytes at a time. An operand is copied first (pad.cl) if its rows are not aligned to 16 bytes or if the units take another
dtype. The cost model includes this copy, so small products of that kind use the portable kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from netcl.core.dtype import DTYPES, HALVES
from netcl.core.kernel_selector import KernelConfig, get_matmul_precision
from netcl.core.kernel_selector import KernelVariant as V
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.ops.matmul import gemm, nvidia
from netcl.ops.matmul.gemm import Matmul, Operands

MMA_TIER = "mma"
_MMA_FLOATS = {"float32", *HALVES}
UNITS = {"float32": "MMA_TF32", "float16": "MMA_FLOAT16", "bfloat16": "MMA_BFLOAT16"}


class Tile(NamedTuple):
    """The work of a work-group: m x n results in steps of ``k`` terms, warp_m x warp_n per warp. Local memory holds ``stages`` steps.

    The other fields are read by the cost model :func:`gemm.cost`. ``rate`` is relative to the fastest portable block.
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int
    rate: float
    resident: int = 1
    fill: int = 32
    splits: int = 1

    @property
    def items(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * 32

    def config(self) -> KernelConfig:
        """Return the configuration that selects this tile."""
        return KernelConfig(V.MATMUL_REGISTER_TILED, self.m, self.n, self.k, extra={"tier": MMA_TIER})

    def macros(self) -> dict[str, Any]:
        return {"BM": self.m, "BN": self.n, "BK": self.k, "WM": self.warp_m, "WN": self.warp_n, "STAGES": self.stages}


#: By bytes of a value. Blocks take 48 KB of local memory and less, which all of these GPUs provide; rates were measured on an H200.
MMA_TILES = {
    2: (
        Tile(128, 128, 32, 64, 64, 3, 10.9, 2, 490),
        Tile(128, 64, 32, 64, 32, 4, 8.4, 3, 280),
        Tile(64, 128, 32, 32, 64, 4, 8.3, 3, 280),
        Tile(64, 64, 64, 32, 32, 3, 7.2, 4, 210),
    ),
    4: (Tile(64, 128, 32, 64, 32, 2, 1.54, 2, 40), Tile(64, 64, 32, 32, 32, 3, 1.37, 3, 30)),
}
MMA_SPLIT_DEPTH = 64  # terms from which the largest error of split float32 is well within four times that of a plain sum


class _Side(NamedTuple):
    """The memory layout of an operand: matrices of ``lines`` lines of ``width`` values, and the strides of the two batch axes."""

    dtype: str
    lines: int
    width: int
    strides: tuple[int, int]

    def ready(self, p: Matmul, dtype: str) -> bool:
        """Whether the operand has the wanted dtype and its lines start at multiples of 16 bytes."""
        each = 16 // DTYPES[dtype].itemsize
        return self.dtype == dtype and (p.placed or p.aligned) and not any(value % each for value in (self.width, *self.strides))

    def padded(self, p: Matmul, dtype: str) -> tuple[_Side, int, int]:
        """Return the padded layout, the number of matrices along the inner batch axis (1 if broadcast), and the number of elements."""
        wide = round_up(self.width, 16 // DTYPES[dtype].itemsize)
        size = self.lines * wide
        outer, inner = (count if step else 1 for count, step in zip(p.batch, self.strides, strict=True))
        strides = (inner * size if self.strides[0] else 0, size if self.strides[1] else 0)
        return _Side(dtype, self.lines, wide, strides), inner, outer * inner * size


def round_up(value: int, each: int) -> int:
    """Return the least multiple of ``each`` that is not below ``value``."""
    return -(-value // each) * each


def operand_sides(p: Matmul) -> tuple[_Side, _Side]:
    a = _Side(p.a, *((p.k, p.m) if p.trans_a else (p.m, p.k)), p.a_strides)
    return a, _Side(p.b, *((p.n, p.k) if p.trans_b else (p.k, p.n)), p.b_strides)


def unit_dtype(p: Matmul) -> str | None:
    """Return the dtype in which the matrix units receive both operands; ``None`` for products they cannot compute accurately."""
    if p.real != "float" or {p.a, p.b} - _MMA_FLOATS or not p.k:
        return None
    if p.a == p.b and p.a in HALVES:
        return p.a
    return "float32" if p.k >= MMA_SPLIT_DEPTH or get_matmul_precision() == "medium" else None


def copy_cost(p: Matmul, units: int, dtype: str) -> float:
    """Estimate the time to copy operands that are not aligned or have another dtype, in the unit of :func:`gemm.cost`."""
    copied = [side for side in operand_sides(p) if not side.ready(p, dtype)]
    return sum(gemm.ADDING + gemm.PER_PART * p.batches * side.lines * side.width / units for side in copied)


def best(p: Matmul, units: int, config: KernelConfig | None = None) -> tuple[Tile, float]:
    """Return the fastest tile by the model and its estimated time; only tiles of the size that ``config`` names, if there are any."""
    dtype = unit_dtype(p) or "float32"
    tiles: Sequence[Tile] = MMA_TILES[DTYPES[dtype].itemsize]
    if config and config.extra.get("tier") == MMA_TIER:
        tiles = [tile for tile in tiles if tile[:3] == (config.tile_m, config.tile_n, config.tile_k)] or tiles
    tile, time = gemm.fastest(p, tiles, units)
    return tile, time + copy_cost(p, units, dtype)


def run(queue: Any, p: Matmul, t: Operands, tile: Tile | None = None) -> None:
    """Run a product on the matrix units: copy operands that are not aligned, multiply, and sum the parts if there are several."""
    tile = tile or best(p, int(queue.device.max_compute_units))[0]
    dtype = unit_dtype(p) or "float32"
    (a, b), (left, right), first = written_out(queue, p, dtype, t)
    depth = round_up(-(-p.k // tile.splits), tile.k)
    splits = -(-p.k // depth)
    ended = replace(p, a=dtype, b=dtype) if splits == 1 else p.bare(a=dtype, b=dtype)
    kernel = gemm.compiled(queue, "reads.cl ptx.cl mma.cl", "gemm_mma", ended, **_mma_macros(ended, tile))
    numbers = (*p.sizes(), a.width, b.width, ended.has_bias, p.batch[1], *a.strides, *b.strides, first, splits, depth)
    items = gemm.groups_of(p, tile.m, tile.n) * splits * tile.items
    gemm.in_parts(queue, p, splits, kernel, items, tile.items, left, right, numbers, t)


def written_out(queue: Any, p: Matmul, dtype: str, t: Operands) -> tuple[list[_Side], list[Tensor], int]:
    """Return layouts and tensors of both operands, copied if not aligned or of another dtype, and the offset of the second operand."""
    sides, tensors = list(operand_sides(p)), [t.a, t.b]
    padded = {i: side.padded(p, dtype) for i, side in enumerate(sides) if not side.ready(p, dtype)}
    total = sum(count for *_, count in padded.values())
    packed, at, first = t.sums(-(-total * DTYPES[dtype].itemsize // 4)) if padded else t.out, 0, 0
    for i, (wide, inner, count) in padded.items():
        kernel = launch.kernel(queue, __file__, "pad.cl", "pad_lines", {"X": sides[i].dtype, "Y": dtype})
        quads, lines = -(-wide.width // 4), count // wide.width
        across = min(64, 1 << (quads - 1).bit_length())
        numbers = (sides[i].width, wide.width, wide.lines, inner, *sides[i].strides, at, lines)
        size = (round_up(quads, across), round_up(lines, 256 // across))
        kernel(queue, size, (across, 256 // across), tensors[i], packed, *numbers)
        sides[i], tensors[i], first, at = wide, packed, at if i else 0, at + count
    return sides, tensors, first


def _mma_macros(p: Matmul, tile: Tile) -> dict[str, Any]:
    terms = 2 if p.a == "float32" and get_matmul_precision() != "medium" else 1
    macros = {"MMA": UNITS[p.a], "SIZE": DTYPES[p.a].itemsize, "TERMS": terms, "TRANS_A": int(p.trans_a), "TRANS_B": int(p.trans_b)}
    stores = {"C_WIDTH": 1 if p.n % 4 else 4, "C_SIZE": DTYPES[p.c].itemsize} | ({"PAIR": f"pair_{p.c}"} if p.c in HALVES else {})
    return tile.macros() | macros | stores


algorithms.add(
    "matmul", "mma", "mma.cl ptx.cl pad.cl", "products of floats that are large by the cost model",
    "internals/kernels.md: Matrix units of NVIDIA GPUs",
    lambda queue, p, config, profile, t: run(queue, p, t, best(p, profile.max_compute_units, config)[0]),
    device="gpu", tiers=(MMA_TIER, "wgmma"), variants=gemm.VARIANTS, needs="NVIDIA, compute capability 8.0 or more",
    when=lambda p, config, profile: nvidia.capable(profile) and unit_dtype(p) is not None,
    probe=lambda queue, p, config: nvidia.trusted(queue, MMA_TIER, unit_dtype(p) or "float32", run),
    cost=lambda p, profile: best(p, profile.max_compute_units)[1],
    configurations=lambda problem: [tile.config() for tile in nvidia.tiles_for(problem, MMA_TILES)],
    samples=tuple(tile.config() for tile in MMA_TILES[4]),
)  # fmt: skip
