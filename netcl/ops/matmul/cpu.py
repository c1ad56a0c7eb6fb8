"""Products on CPUs (cpu.cl, dot.cl, pack.cl): a work-group is one work-item, tiles are kept in registers, vectors are explicit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from netcl.core.capabilities import DeviceProfile
from netcl.core.dtype import sum_dtype
from netcl.core.kernel_selector import KernelConfig, Problem
from netcl.core.kernel_selector import KernelVariant as V
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.opencl_text import loose_halves
from netcl.ops.matmul import gemm
from netcl.ops.matmul.gemm import Matmul, Operands

_PANEL = 256 * 1024  # bytes of B that a work-item packs: half of a common second cache, and what Intel's runtime allows
_DEPTH = {64: 1024}  # rows of a panel by bytes of a vector: A is read in place, so wide tiles want long runs of it; else 512
_PACK_A_FROM = 256 * 256  # elements of a transposed A: below, reading columns costs less than a second launch
_PACK_PANELS = 8  # panels that a work-item packs side by side from an A that is not transposed
_PACK_BYTES = 64 * 1024  # bytes of a transposed A that a work-item packs, in whole rows
_PACK_STREAMS = {64: 32}  # rows of it that are read side by side, by bytes of a vector; else 16
_COLUMNS = 64  # of a panel
_PACKING_ROWS = 1024  # rows of a group that repacks a panel of B for balance alone: packing takes a tenth of the work of 256 rows
_DOT_ROWS = 64
_DOT_DEPTH = 8  # vectors along k: below, adding up their lanes costs more than packing
_UNPACKED_ROWS = {4: 4}  # by lanes: a narrow tile reads half a cache line per row of B, so packing pays from five rows on
_UNPACKED_VALUES, _UNPACKED_MOST = 64 * 1024, 512  # bytes of B, and rows, up to which packing does not pay
#: Candidates of the tuner on CPUs: rows and vectors of a register tile by the number of registers, and rows of a panel.
REGISTER_TILES = {32: ((6, 4), (12, 2), (8, 3), (4, 4)), 16: ((6, 2), (4, 3), (12, 1))}
PANEL_DEPTHS = (256, 512, 1024)
#: Rows and vectors of the tiles that the policy chooses from, with their relative speed: the last tile of a row may be partly empty.
_TILE_SPEEDS = {32: {(6, 4): 1.0, (8, 3): 0.97, (12, 2): 0.9, (12, 1): 0.7}, 16: {(6, 2): 1.0, (6, 1): 0.7}}
_KEPT_ROWS = 8  # up to which dot products and unpacked products, which read B at the speed of memory, are as fast
_KEPT_PANELS = 32 << 20  # of a packed B that a recording keeps
_KEPT_SWEEPS = 256  # rows of A up to which a panel of a packed B is read too seldom to be cut into blocks that stay cached
_KEPT_DEPTH = 64  # rows of B that a work-item of pack_b packs


class _Tile(NamedTuple):
    """A register tile; ``strips`` of them lie side by side in a panel."""

    rows: int
    vectors: int
    lanes: int
    strips: int

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    def macros(self) -> dict[str, int]:
        return {"MR": self.rows, "NV": self.vectors, "VW": self.lanes, "STRIPS": self.strips}


def _register_lanes(p: Matmul, profile: DeviceProfile) -> int:
    return profile.lanes * 4 // p.itemsize


def _register_tile(p: Matmul, profile: DeviceProfile, extra: Mapping[str, Any]) -> _Tile:
    """Return the tile for the device's registers (32 of 4 or 16 lanes, or 16 of 8 lanes); ``extra`` may set its rows and vectors."""
    lanes, speeds = _register_lanes(p, profile), _TILE_SPEEDS[profile.vector_registers]
    rows, vectors = min(speeds, key=lambda tile: -(-p.n // (tile[1] * lanes)) * tile[1] / speeds[tile])
    rows, vectors = extra.get("MR", rows), extra.get("NV", vectors)
    return _Tile(rows, vectors, lanes, max(1, min(_COLUMNS // (vectors * lanes), -(-p.n // (vectors * lanes)))))


def _panel_depth(p: Matmul, tile: _Tile, config: KernelConfig, room: int) -> int:
    """Return the rows of a panel of B that has ``room`` bytes."""
    wanted = config.extra.get("KC", _DEPTH.get(tile.lanes * p.itemsize, 512))
    return min(wanted, max(8, room // (tile.columns * tile.strips * p.itemsize) // 8 * 8))


def _group_rows(p: Matmul, tile: _Tile, panels: int, profile: DeviceProfile) -> int:
    """Return the rows of a work-group, in whole tiles. There are four groups per core, or up to sixteen if repacking B costs little."""
    per_block, units = panels * p.batches, profile.max_compute_units
    few, many = (max(1, -(-groups * units // per_block)) for groups in (4, 16))
    blocks = max(few, min(many, p.m // _PACKING_ROWS))
    return max(1, -(-p.m // blocks // tile.rows)) * tile.rows


def _panels(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    """Multiply with B packed into local memory. A is packed first if it is large and transposed, or of another dtype and read often.

    If the result has fewer tiles than the device has cores, k is split. The parts are batches of one product, whose results are added.
    """
    tile = _register_tile(p, profile, config.extra)
    depth = _panel_depth(p, tile, config, min(_PANEL, profile.local_mem_size or _PANEL))
    panels = -(-p.n // (tile.columns * tile.strips))
    packed = (p.trans_a and p.m * p.k >= _PACK_A_FROM) or (not p.plain(p.a) and panels > 2)
    splits = 1 if packed else _cpu_splits(p, panels * -(-p.m // tile.rows), profile)
    if splits > 1:
        _split_panels(queue, p, tile, depth, splits, profile, t)
        return
    inner = replace(p, a=sum_dtype(p.c)) if packed else p
    rows = _group_rows(p, tile, panels, profile)
    size = -(-p.m // tile.rows) * tile.rows * p.k
    strides = (p.batch[1], p.batch[1] * size, size, *p.b_strides) if packed else p.strides()
    a = _pack(queue, p, tile, t.a, t.sums(p.batches * size)) if packed else t.a
    sums = t.out if p.plain(p.c) or p.k <= depth else t.sums(p.batches * p.m * p.n)
    kernel, groups = _panel_kernel(queue, inner, tile, KC=depth, PACKED_A=int(packed)), panels * -(-p.m // rows) * p.batches
    numbers = (*p.sizes(), *p.a_steps, p.ldb, int(p.trans_b), p.has_bias, rows, *strides)
    kernel(queue, groups, 1, a, t.b, *t.end, sums, *numbers, t.scale)


def _pack(queue: Any, p: Matmul, tile: _Tile, a: Tensor, packed: Tensor) -> Tensor:
    """Pack A into panels of a tile's rows, a few rows at a time if A is transposed, else panel after panel. Returns ``packed``."""
    panels = -(-p.m // tile.rows)
    if p.trans_a:
        step = _PACK_STREAMS.get(tile.lanes * p.itemsize, 16)
        depth, side = step * max(1, _PACK_BYTES // (step * p.m * p.itemsize)), panels
    else:
        depth, side, step = p.k, _PACK_PANELS, 64
    groups = -(-p.k // depth) * -(-panels // side) * p.batches
    kernel = gemm.compiled(queue, "pack.cl", "pack_a", p, MR=tile.rows)
    kernel(queue, groups, 1, a, packed, p.m, p.k, *p.a_steps, p.batch[1], *p.a_strides, depth, side, step)
    return packed


def vector_ends(p: Matmul, lanes: int) -> tuple[dict[str, str], dict[str, None]]:
    """Return macros that load biases and residuals and store results as vectors, and the functions they need."""
    macros: dict[str, str] = {}
    functions: dict[str, None] = {}
    for name, dtype in (("BIAS", p.bias), ("ADDED", p.ending.residual), ("C", p.c)):
        macro, text = gemm.lane_macro(name, dtype, p.real, lanes, name == "C") if dtype != "" else ({}, "")
        macros |= macro
        functions[text] = None
    return macros, functions


def _panel_kernel(queue: Any, p: Matmul, tile: _Tile, name: str = "gemm_panel", **macros: int) -> Any:
    """Return a kernel of cpu.cl with vector loads and stores for the operands' dtypes."""
    ends, functions = vector_ends(p, tile.lanes)
    read, text = gemm.lane_macro("B", p.b, p.real, tile.lanes)
    functions[text] = None
    if read:
        read["B_QUAD(p)"] = "QUAD_LOAD(p)" if p.plain(p.b) else f"load_{p.b}_4(p)"
        functions["" if p.plain(p.b) else loose_halves(p.b, 4)] = None
    macros |= {"FETCHES": int(launch.fetches(queue)), **tile.macros()}
    return gemm.compiled(queue, "vectors.cl line.cl cpu.cl", name, p, tile.lanes, "".join(functions), {}, **macros, **ends, **read)


def _cpu_splits(p: Matmul, tiles: int, profile: DeviceProfile) -> int:
    """Return into how many equal parts k is split so that, if possible, every core gets a register tile."""
    wanted = min(-(-profile.max_compute_units // max(1, tiles)), p.k // gemm.SPLIT_DEPTH)
    return 1 if p.batches > 1 else next((n for n in range(wanted, 1, -1) if p.k % n == 0), 1)


def _split_panels(queue: Any, p: Matmul, tile: _Tile, depth: int, splits: int, profile: DeviceProfile, t: Operands) -> None:
    part, panels = p.k // splits, -(-p.n // (tile.columns * tile.strips))
    inner = p.bare(batch=(1, splits))
    rows, steps = _group_rows(inner, tile, panels, profile), (0, part * p.a_steps[1], 0, part * p.b_steps[0])
    kernel, sums = _panel_kernel(queue, inner, tile, KC=depth), t.sums(splits * p.m * p.n)
    numbers = (p.m, p.n, part, *p.a_steps, p.ldb, int(p.trans_b), 0, rows, splits, *steps)
    kernel(queue, panels * -(-p.m // rows) * splits, 1, t.a, t.b, *t.end[:2], sums, sums, *numbers, 1)
    gemm.add_parts(queue, p, splits, sums, t)


def _dot_tile(rows: int, profile: DeviceProfile) -> tuple[int, int]:
    """Return rows and columns of a tile of dot products; few rows need a tile that they fill."""
    if profile.vector_registers == 16:
        return min(rows, 2), 4
    return (rows, 8) if rows <= 2 else (4, 4) if rows % 4 == 0 and rows <= 16 else (3, 8)


def _dot(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    """Compute dot products along k; both operands are read in place."""
    lanes = _register_lanes(p, profile)
    height, width = _dot_tile(p.m, profile)
    blocks = max(1, 4 * profile.max_compute_units // p.batches)
    columns = max(width, -(-p.n // blocks // width) * width)
    kernel = gemm.compiled(queue, "vectors.cl dot.cl", "gemm_dot", p, VW=lanes, TM=height, TN=width)
    numbers = (*p.sizes(), p.has_bias, columns, *p.strides())
    kernel(queue, -(-p.n // columns) * p.batches, 1, t.a, t.b, *t.end, *numbers, t.scale)


def _multiply_unpacked(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    """Multiply with B read in place, in register tiles of up to 12 rows."""
    lanes = _register_lanes(p, profile)
    height = next(rows for rows in (1, 4, 12) if rows >= min(p.m, 12))
    if p.m > 12 and -(-p.m // 8) * 8 < -(-p.m // 12) * 12:
        height = 8
    tile = _Tile(height, 4 if lanes == 4 and height < 12 else 2, lanes, 1)
    rows = _group_rows(p, tile, -(-p.n // tile.columns), profile)
    kernel = _panel_kernel(queue, p, tile, KC=1 << 30, PACKED_B=0)
    groups = -(-p.n // tile.columns) * -(-p.m // rows) * p.batches
    numbers = (*p.sizes(), *p.a_steps, p.ldb, 0, p.has_bias, rows, *p.strides())
    kernel(queue, groups, 1, t.a, t.b, *t.end, t.out, *numbers, t.scale)


def _multiply_kept(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    """Pack B by a launch of its own, which a recording runs only once, and multiply by the packed B."""
    tile = _register_tile(p, profile, config.extra)
    strips, panels = -(-p.n // tile.columns), -(-p.n // (tile.columns * tile.strips))
    packed = t.sums(strips * p.k * tile.columns)
    pack = _panel_kernel(queue, p, tile, "pack_b", KC=_KEPT_DEPTH)
    pack(queue, (-(-p.k // _KEPT_DEPTH), strips), None, t.b, packed, p.n, p.k, p.ldb, int(p.trans_b))
    depth = _panel_depth(p, tile, config, _PANEL) if p.m > _KEPT_SWEEPS else 1 << 30
    sums = t.out if p.plain(p.c) or p.k <= depth else t.sums(p.m * p.n)
    rows = _group_rows(p, tile, panels, profile)
    kernel = _panel_kernel(queue, replace(p, b=sum_dtype(p.c)), tile, KC=depth, PACKED_B=2)
    numbers = (*p.sizes(), *p.a_steps, p.ldb, 0, p.has_bias, rows, *p.strides())
    kernel(queue, panels * -(-p.m // rows), 1, t.a, packed, *t.end, sums, *numbers, t.scale)


def _suits_kept(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> bool:
    form, size = config.extra.get("form"), p.n * p.k * p.itemsize
    return p.batches == 1 and (form == "kept" or (p.kept and not form and p.m > _KEPT_ROWS and size <= _KEPT_PANELS))


def _suits_dot(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> bool:
    form, lanes = config.extra.get("form"), _register_lanes(p, profile)
    can = p.plain(p.a) and p.plain(p.b) and p.trans_b and not p.trans_a
    return bool(can) and (form == "dot" or (not form and p.m <= _DOT_ROWS and p.k >= _DOT_DEPTH * lanes))


def _suits_unpacked(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> bool:
    form, lanes = config.extra.get("form"), _register_lanes(p, profile)
    can = p.plain(p.b) and not p.trans_b and p.n >= (2 if lanes == 16 else 4) * lanes
    small = lanes == 16 and p.n % (2 * lanes) == 0 and p.k * p.n <= _UNPACKED_VALUES and p.m <= _UNPACKED_MOST
    return bool(can) and (form == "unpacked" or (not form and (small or p.m <= _UNPACKED_ROWS.get(lanes, 24))))


# ---- the table


def _panel_space(problem: Problem) -> Iterator[KernelConfig]:
    for rows, vectors in REGISTER_TILES[problem.profile.vector_registers]:
        for depth in (d for d in PANEL_DEPTHS if d < 2 * problem.shape[2] or d == PANEL_DEPTHS[0]):
            yield KernelConfig(V.MATMUL_REGISTER_TILED, extra={"tier": "cpu", "form": "panel", "MR": rows, "NV": vectors, "KC": depth})


_DOT, _UNPACKED, _KEPT = (KernelConfig(V.MATMUL_VECTORIZED, extra={"tier": "cpu", "form": form}) for form in ("dot", "unpacked", "kept"))
_ON_CPUS: dict[str, Any] = {"device": "cpu", "variants": gemm.VARIANTS[1:]}
algorithms.add(
    "matmul", "kept", "cpu.cl", "a matrix that a recording keeps packed",
    "zoo_pocl_x86.json: VAE, inference of a batch", _multiply_kept, **_ON_CPUS, when=_suits_kept, samples=(_KEPT,),
)  # fmt: skip
algorithms.add(
    "matmul", "dot", "dot.cl", "few rows times a transposed matrix: dot products, nothing packed",
    "cases_intel.json: linear 8x512x1000", _dot, **_ON_CPUS, when=_suits_dot,
    configurations=lambda problem: [_DOT] if problem.flags["trans_b"] and not problem.flags["trans_a"] else [], samples=(_DOT,),
)  # fmt: skip
algorithms.add(
    "matmul", "unpacked", "cpu.cl", "few rows, or a matrix that stays in the second cache: it is read in place",
    "cases_intel.json: attention values 64 x 64x32x64", _multiply_unpacked,
    **_ON_CPUS, when=_suits_unpacked, configurations=lambda problem: [] if problem.flags["trans_b"] else [_UNPACKED], samples=(_UNPACKED,),
)  # fmt: skip
algorithms.add(
    "matmul", "panel", "cpu.cl pack.cl", "CPUs: register tiles over packed panels",
    "cases_intel.json: matmul 1024", _panels, **_ON_CPUS, configurations=_panel_space,
    samples=(KernelConfig(V.MATMUL_REGISTER_TILED, extra={"tier": "cpu", "form": "panel"}),),
)  # fmt: skip
