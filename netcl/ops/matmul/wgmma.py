"""Matrix products with wgmma (wgmma.cl), the matrix instructions of compute capability 9.0; see docs/internals/kernels.md.

As in the mma tier, an operand whose rows are not aligned to 16 bytes or that has another dtype is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from netcl.core.dtype import DTYPES, HALVES
from netcl.core.kernel_selector import KernelConfig, get_matmul_precision
from netcl.core.kernel_selector import KernelVariant as V
from netcl.engine import algorithms
from netcl.ops.matmul import gemm, mma, nvidia
from netcl.ops.matmul.gemm import Matmul, Operands

WGMMA_TIER = "wgmma"
CAPABILITY = (9, 0)
ROWS, ITEMS = 128, 384  # of a tile, of a work-group: as in wgmma.cl
_RING = 192 * 1024  # bytes of local memory for stages; static arrays may have 224 KB, whatever the driver reports
_INSTRUCTION = {"float32": "tf32", "float16": "f16", "bfloat16": "bf16"}


class WarpGroupTile(NamedTuple):
    """The tile that a work-group computes at a time: m x n results in steps of ``k`` terms. ``swapped``: n x m of the transposed result.

    The other fields are read by the cost model :func:`gemm.cost`. ``rate`` is relative to the fastest portable block.
    """

    m: int
    n: int
    k: int
    rate: float
    fill: int
    swapped: bool = False
    resident: int = 1
    splits: int = 1

    @property
    def columns(self) -> int:
        """The columns of the tile's sums, which always have 128 rows."""
        return self.m if self.swapped else self.n

    @property
    def stages(self) -> int:
        parts = 2 if self.k == 32 else 1  # those of the right operand, where float32 is split
        return _RING // ((ROWS + parts * self.columns) * 128)

    def config(self) -> KernelConfig:
        """Return the configuration that selects this tile."""
        return KernelConfig(V.MATMUL_REGISTER_TILED, self.m, self.n, self.k, extra={"tier": WGMMA_TIER, "swapped": int(self.swapped)})


#: By bytes of a value.
WGMMA_TILES = {
    2: (WarpGroupTile(128, 256, 64, 18.5, 600), WarpGroupTile(128, 128, 64, 15.3, 270), WarpGroupTile(128, 64, 64, 10.5, 350)),
    4: (
        WarpGroupTile(128, 128, 32, 2.85, 80),
        WarpGroupTile(128, 64, 32, 2.4, 80),
        WarpGroupTile(64, 128, 32, 2.3, 80, swapped=True),
        WarpGroupTile(128, 128, 32, 2.75, 100, swapped=True),
    ),
}
_BEGIN = 700_000  # multiply-adds of a unit in the time of filling the first stages
_TURNING = 0.82  # fraction of the rate if float32 operands are not contiguous along k and must be transposed


def takes(p: Matmul) -> bool:
    """Whether the kernels can compute a product. With precision "medium", float32 is faster in the mma tier."""
    dtype = mma.unit_dtype(p)
    medium = dtype == "float32" and get_matmul_precision() == "medium"
    return dtype is not None and not medium and p.batches * p.m * p.n < 2**31


def best_tile(p: Matmul, units: int, config: KernelConfig | None = None) -> tuple[WarpGroupTile, float]:
    """Return the fastest tile by the model and its estimated time; only tiles of the form that ``config`` names, if there are any."""
    dtype = mma.unit_dtype(p) or "float32"
    tiles: Sequence[WarpGroupTile] = WGMMA_TILES[DTYPES[dtype].itemsize]
    extra = config.extra if config else {}
    if config and extra.get("tier") == WGMMA_TIER:
        wanted = (config.tile_m, config.tile_n, bool(extra.get("swapped")))
        tiles = [tile for tile in tiles if (tile.m, tile.n, tile.swapped) == wanted] or tiles
    if dtype == "float32":  # the right operand of the units must be contiguous along k
        turned = {False: not p.trans_b, True: p.trans_a}  # by whether a tile is swapped
        tiles = [tile._replace(rate=_TURNING * tile.rate) if turned[tile.swapped] else tile for tile in tiles]
    tile, time = gemm.fastest(p, tiles, units, extra.get("splits"))
    return tile, time + _BEGIN + mma.copy_cost(p, units, dtype)


def instruction(name: str, columns: int, dtype: str, turned: tuple[int, int], first: bool = False) -> str:
    """Return a macro ``name(sums, x, y)`` that adds x y to 64 x ``columns`` sums; with ``first`` it overwrites them.

    y is a local address. x is in registers for float32, else a local address. ``turned``: whether x and y are transposed, if not float32.
    """
    kind, count = _INSTRUCTION[dtype], columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"{"=" if first else "+"}f"((d)[{i}])' for i in range(count))
    if dtype == "float32":
        x, ins = "{" + ", ".join(f"%{count + i}" for i in range(4)) + f"}}, %{count + 4}", ", ".join(f'"r"((x)[{i}])' for i in range(4))
        shape, tail = f"m64n{columns}k8", ""
    else:
        x, ins, shape, tail = f"%{count}, %{count + 1}", '"l"(x)', f"m64n{columns}k16", f", {turned[0]}, {turned[1]}"
    line = f"wgmma.mma_async.sync.aligned.{shape}.f32.{kind}.{kind} {{{sums}}}, {x}, {int(not first)}, 1, 1{tail};"
    return f'#define {name}(d, x, y) __asm__ volatile("//@sm_90a {line}" : {outs} : {ins}, "l"(y))\n'


def instructions(p: Matmul, tile: WarpGroupTile) -> str:
    """Return macros for the instructions of the kernel, and ``SETTLED``, after which its sums may be read."""
    # The unit expects rows of the left and columns of the right operand along k; it transposes other layouts.
    left, right = (int(p.trans_a), int(not p.trans_b))[:: -1 if tile.swapped else 1]
    macros = [instruction("MULTIPLY", tile.columns, p.a, (left, right))]
    if p.a == "float32":
        macros.append(instruction("MULTIPLY_FIRST", tile.columns, p.a, (0, 0), True))
    kept = ", ".join(f'"+f"((d)[{i}])' for i in range(tile.columns // 2))
    return "".join(macros) + f'#define SETTLED(d) __asm__ volatile("" : {kept})\n'


def run(queue: Any, p: Matmul, t: Operands, tile: WarpGroupTile | None = None, **named: Any) -> None:
    """Copy operands that are not aligned, launch at most one work-group per compute unit, and sum the parts if k is split."""
    units = int(queue.device.max_compute_units)
    tile, dtype = tile or best_tile(p, units)[0], mma.unit_dtype(p) or "float32"
    (a, b), (left, right), first = mma.written_out(queue, p, dtype, t)
    p = replace(p, a=dtype, b=dtype)
    inner = p if tile.splits == 1 else p.bare()
    width = 4 if inner.c in HALVES and p.n % 4 == 0 else 2 if inner.c == "float32" and p.n % 2 == 0 else 1  # results stored at once
    macros: dict[str, Any] = {
        "COLUMNS": tile.columns, "STAGES": tile.stages, "SIZE": DTYPES[dtype].itemsize, "TRANS_A": int(p.trans_a),
        "TRANS_B": int(p.trans_b), "SWAPPED": int(tile.swapped), "C_WIDTH": 1 if tile.swapped else width,
    }  # fmt: skip
    if inner.c in HALVES:
        macros["PAIR(low, high)"] = f"pair_{inner.c}(low, high)"
    kernel = gemm.compiled(queue, "reads.cl ptx.cl wgmma.cl", "gemm_wgmma", inner, text=instructions(p, tile), **macros | named)
    numbers = (*p.sizes(), a.width, b.width, inner.has_bias, p.batch[1], *a.strides, *b.strides, first, p.batches, tile.splits)
    groups = min(gemm.groups_of(p, tile.m, tile.n) * tile.splits, units)
    gemm.in_parts(queue, p, tile.splits, kernel, groups * ITEMS, ITEMS, left, right, numbers, t)


algorithms.add(
    "matmul", "wgmma", "wgmma.cl ptx.cl pad.cl", "products of floats that are large by the cost model",
    "cases_h200.json: matmul 4096", lambda queue, p, config, profile, t:
        run(queue, p, t, best_tile(p, profile.max_compute_units, config)[0], **config.extra.get("macros", {})),
    device="gpu", tiers=(WGMMA_TIER,), variants=gemm.VARIANTS, needs="NVIDIA, compute capability 9.0",
    when=lambda p, config, profile: nvidia.capable(profile, CAPABILITY, CAPABILITY) and takes(p),
    probe=lambda queue, p, config: nvidia.trusted(queue, WGMMA_TIER, p.a, run),
    cost=lambda p, profile: best_tile(p, profile.max_compute_units)[1],
    configurations=lambda problem: [tile.config() for tile in nvidia.tiles_for(problem, WGMMA_TILES, CAPABILITY, CAPABILITY)],
)  # fmt: skip
