"""Launches matrix products: which kernel, with which tiles, over which work-groups.

The selector gives a configuration; :func:`product_algorithm` finds the algorithm that runs it. A configuration may name a *tier* in
``extra["tier"]``: ``cpu`` (kernels for CPUs), ``simt`` (kernels for every GPU) or the name of an algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.dtype import DTYPES, FLOAT32, HALVES, sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.kernel_selector import KernelConfig, Problem, get_kernel_selector, is_named
from netcl.core.kernel_selector import KernelVariant as V
from netcl.core.kernels.primitives import cl_source
from netcl.core.tensor import Tensor, new_result
from netcl.engine import algorithms, launch
from netcl.engine.algorithms import Algorithm
from netcl.engine.opencl_text import loose_halves
from netcl.engine.strided import CopyAxis, alignment, broadcast_strides, broadcast_to, merge
from netcl.ops.epilogue import Epilogue
from netcl.ops.pointwise import cast

#: Activations by the names users give them, as rows.
EPILOGUE_ACTIVATIONS = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "gelu": "gelu_erf"}
_WIDEN_FROM = 64**3  # multiply-adds; below, two more launches cost more
SPLIT_DEPTH = 256  # least depth of a part of a product that is split along k


@dataclass(frozen=True)
class Matmul:
    """A product ``c[batch] = op(a) op(b)`` of m x k and k x n matrices. Both operands have a stride for each of two batch axes."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    a: str  # dtypes
    b: str
    c: str
    bias: str | None = None
    epilogue: Epilogue | None = None
    batch: tuple[int, int] = (1, 1)
    a_strides: tuple[int, int] = (0, 0)
    b_strides: tuple[int, int] = (0, 0)
    aligned: bool = False  # rows of both operands start at multiples of 16 bytes, if values have four bytes
    placed: bool = False  # both operands start at multiples of 16 bytes
    scaled: bool = False  # whether the product is multiplied by another number than one
    kept: bool = False  # b is a constant of a recording: what is computed from it alone is computed once
    batches: int = field(init=False, compare=False)
    real: str = field(init=False, compare=False)  # the C type of the sums
    index: str = field(init=False, compare=False)  # the C type of element indices
    ending: Epilogue = field(init=False, compare=False)  # the epilogue, perhaps empty

    def __post_init__(self) -> None:
        batches = self.batch[0] * self.batch[1]
        index = launch.index_type(max(self.m * self.k, self.k * self.n, batches * self.m * self.n))
        self.__dict__.update(batches=batches, real=DTYPES[self.c].c_compute, index=index, ending=self.epilogue or Epilogue(self.c))

    @property
    def lda(self) -> int:
        return self.m if self.trans_a else self.k

    @property
    def ldb(self) -> int:
        return self.k if self.trans_b else self.n

    def plain(self, dtype: str | None) -> int:
        """Return 1 if a dtype is stored in the type of the sums, else 0."""
        return int(dtype is None or DTYPES[dtype].c_storage == self.real)

    @property
    def a_steps(self) -> tuple[int, int]:
        """The strides of a from row to row, and along k."""
        return (1, self.m) if self.trans_a else (self.k, 1)

    @property
    def b_steps(self) -> tuple[int, int]:
        """The strides of b along k, and from column to column."""
        return (1, self.k) if self.trans_b else (self.n, 1)

    @property
    def has_bias(self) -> int:
        return int(self.bias is not None)

    def bare(self, **changes: Any) -> Matmul:
        """Return this product with ``changes``, without an epilogue and in the type of the sums."""
        return replace(self, c=sum_dtype(self.c), bias=None, epilogue=None, scaled=False, **changes)

    @property
    def itemsize(self) -> int:
        """The size in bytes of the type of the sums."""
        return 8 if self.real in ("double", "long", "ulong") else 4

    def sizes(self) -> tuple[int, ...]:
        return (self.m, self.n, self.k)

    def strides(self) -> tuple[int, ...]:
        """Return the arguments by which kernels locate a batch: the size of the inner axis, then the operands' strides."""
        return (self.batch[1], *self.a_strides, *self.b_strides)


def lane_macro(name: str, dtype: str | None, real: str, count: int, stores: bool = False) -> tuple[dict[str, str], str]:
    """Return the macro that loads or stores ``count`` values of an operand, and the source it needs; empty if that is done one by one.

    ``real`` is the C type of the sums, which values become. Without a ``dtype``, that is the type of the operand.
    """
    macro = f"{name}_LANES(x, p)" if stores else f"{name}_LANES(p)"
    if dtype is None or DTYPES[dtype].c_storage == real:
        return {macro: "G_STORE(x, p)" if stores else "G_LOAD((__global const REAL*)(p))"}, ""
    if dtype in HALVES and real == "float":
        return {macro: f"store_{dtype}_{count}(x, p)" if stores else f"load_{dtype}_{count}(p)"}, loose_halves(dtype, count)
    return {}, ""


class Operands(NamedTuple):
    """The tensors of a product, and the factor by which its result is scaled."""

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale: float = 1
    parts: Any = None  # DecodeParts of netcl.ops.decode, which only gemv.cl takes

    @property
    def end(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors of an epilogue: bias, residual and result. The result stands in for a missing tensor."""
        return self.out if self.bias is None else self.bias, self.out if self.residual is None else self.residual, self.out

    def sums(self, count: int) -> Tensor:
        """Allocate a tensor for ``count`` sums, in the dtype in which the product is summed."""
        return new_result((count,), sum_dtype(self.out.dtype), self.out.queue)


def compiled(
    queue: Any, file: str, name: str, p: Matmul, lanes: int = 1, text: str = "", more: dict[str, str] | None = None, **defines: Any
) -> Any:
    """Return the kernel ``name`` of .cl files in this folder for the dtypes of ``p``; its epilogue processes ``lanes`` values at once."""
    end = p.ending
    operands = {"A": p.a, "B": p.b, "C": p.c, "BIAS": p.bias or FLOAT32, "ADDED": end.residual or FLOAT32, **(more or {})}
    common: dict[str, Any] = {"REAL": p.real, "INDEX": p.index, "ADDED": int(bool(end.residual))}
    text = end.source(p.real, lanes, p.scaled) + text
    return launch.kernel(queue, __file__, f"epilogue.cl {file}", name, operands, common | defines, text)


# ---- any device: simt.cl


def _naive(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    total = p.batches * p.m * p.n
    numbers = (*p.sizes(), *p.a_steps, *p.b_steps, p.has_bias, *p.strides(), total)
    compiled(queue, "naive.cl", "gemm_naive", p)(queue, total, config.local_size_1d, t.a, t.b, *t.end, *numbers, t.scale)


class Block(NamedTuple):
    """The work of a work-group: m x n results in steps of ``k`` terms (0: operands are read in place), rows x columns per work-item.

    ``slices`` work-items share the terms of a step; ``splits`` work-groups share the terms of a result. ``resident``: groups that a compute
    unit runs at once. ``rate``: their relative speed. ``fill``: the cost of starting and ending a group, as a number of terms.
    """

    m: int
    n: int
    k: int
    rows: int
    columns: int
    slices: int = 1
    splits: int = 1
    resident: int = 1
    rate: float = 1
    fill: int = 32

    @property
    def items(self) -> int:
        return self.m // self.rows * (self.n // self.columns) * self.slices

    def local_bytes(self, p: Matmul) -> int:
        return (2 * self.k * (self.m + self.n) if self.k else 17 * self.items) * p.itemsize

    def fits(self, p: Matmul, profile: DeviceProfile) -> bool:
        """Whether local memory holds two steps along k of both operands, and the device allows the work-group."""
        return self.items <= profile.max_work_group_size and self.local_bytes(p) <= profile.local_mem_size

    def for_loads(self, aligned: bool) -> Block:
        """Return a block half as deep if values are loaded one by one, because each load in flight takes a register."""
        return self if aligned or self.k <= 8 else self._replace(k=self.k // 2)

    def config(self) -> KernelConfig:
        """Return the configuration that selects this block."""
        extra = {"tier": "simt", "rows_per_item": self.rows, "slices": self.slices} | ({} if self.k else {"form": "slices"})
        return KernelConfig(V.MATMUL_REGISTER_TILED, self.m, self.n, self.k, self.columns, extra=extra)

    def macros(self) -> dict[str, int]:
        return {"BM": self.m, "BN": self.n, "BK": self.k, "TM": self.rows, "TN": self.columns, "SLICES": self.slices}


#: Lets the model choose among all blocks.
PORTABLE = KernelConfig(V.MATMUL_REGISTER_TILED, 64, 64, 16, 4, extra={"why": "the fastest by the model"})
#: Measured on an H200, where three groups of four waves with 8 x 8 tiles beat one of eight with 16 x 8; rates are relative to the fastest.
BLOCKS = (
    Block(128, 64, 16, 8, 8, resident=3, rate=1.0),
    Block(64, 128, 16, 8, 8, resident=3, rate=0.98),
    Block(128, 128, 8, 16, 8, resident=2, rate=0.93),
    Block(128, 64, 32, 8, 8, 2, rate=0.83),
    Block(64, 64, 16, 8, 8, 2, resident=3, rate=0.88),
    Block(64, 64, 32, 8, 8, 4, rate=0.75),
    Block(32, 32, 32, 4, 4, 4, resident=2, rate=0.4),
    Block(8, 4, 0, 4, 4, 128, resident=2, rate=0.1),
)
FEW_GROUPS_SPEED = 1.4  # efficiency of fewer work-groups than can be resident, relative to their share
ADDING, PER_PART = 1_400_000, 18  # multiply-adds of a unit in the time that a second launch takes; of all of them, that an addition does


def _read_macros(p: Matmul, quads: bool) -> dict[str, Any]:
    macros: dict[str, Any] = {"WIDTH": 4 if quads else 1, "TRANS_A": int(p.trans_a), "TRANS_B": int(p.trans_b)}
    return macros | ({"A_QUAD(p)": launch.QUADS[p.a], "B_QUAD(p)": launch.QUADS[p.b]} if quads else {})


def _depth_slices(queue: Any, p: Matmul, block: Block, quads: bool, t: Operands) -> None:
    """Launch blocks whose depth is shared by work-items, without local memory for operands."""
    macros = {"BM": block.m, "BN": block.n, "SLICES": block.slices} | _read_macros(p, quads)
    kernel = compiled(queue, "reads.cl slices.cl", "gemm_slices", p, **macros)
    numbers = (*p.sizes(), p.lda, p.ldb, p.has_bias, *p.strides())
    kernel(queue, groups_of(p, block.m, block.n) * block.items, block.items, t.a, t.b, *t.end, *numbers, t.scale)


def _few_rows(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    """Compute a product of at most eight rows: every work-item sums a part of the depth for a few columns."""
    rows = 1 << (p.m - 1).bit_length()
    parts = t.parts
    if p.trans_b:
        columns, items = 2 if (parts and parts.gate is not None) or (rows > 2 and p.n > 8192) else 1, 128
        lanes = items if p.n < 16 * profile.max_compute_units else 32 if p.k <= 1024 else 64
    else:
        columns, items, lanes = 4, 256 if rows < 8 else 128, 128 if p.n < 128 * profile.max_compute_units else 16
    macros = {"ROWS": rows, "COLUMNS": columns, "LANES": lanes, "ITEMS": items, **config.extra.get("macros", {})}
    loads = -(-p.k // (4 * macros["LANES"]))
    macros["DEPTH"] = -(-loads // -(-loads // 8))  # in batches of at most eight, all of a size
    reads, ptx = _read_macros(p, True), ""
    if profile.compute_capability and "float16" in (p.a, p.b):
        reads |= {f"{name}_QUAD(p)": "quad_float16(p)" for name, dtype in (("A", p.a), ("B", p.b)) if dtype == "float16"}
        ptx = cl_source(__file__, "ptx.cl")
    operands, more, text = parts.text("A", "B_T", macros["ITEMS"], {p.a: reads["A_QUAD(p)"]}) if parts else ({}, {}, "")
    kernel = compiled(queue, "reads.cl gemv.cl", "gemv", p, 1, ptx + text, operands, **macros, **reads, **more)
    spread = 1 if parts and parts.gate is not None else macros["COLUMNS"]
    groups, extra = -(-p.n // (spread * macros["ITEMS"] // macros["LANES"])), parts.pointers(t.out) if parts else ()
    kernel(queue, groups * macros["ITEMS"], macros["ITEMS"], t.a, t.b, *extra, *t.end, *p.sizes(), p.has_bias, t.scale)


def _suits_few_rows(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> bool:
    known = p.real == "float" and {p.a, p.b} <= launch.QUADS.keys() and p.aligned and not p.trans_a and p.batches == 1
    sized = 0 < p.m <= (8 if p.b == "float32" else 4) and min(p.n, p.k) >= 64 and p.k % 4 == 0 and (p.trans_b or p.n % 4 == 0)
    return known and sized and profile.max_work_group_size >= 256


def _tiles(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile, t: Operands) -> None:
    block, _ = _best_block(p, config, profile)
    quads = config.use_vectorization and p.aligned and p.a in launch.QUADS and p.b in launch.QUADS
    if block.k == 0:
        _depth_slices(queue, p, block, quads, t)
        return
    buffers = 2 if block.local_bytes(p) <= profile.local_mem_size else 1
    macros: dict[str, Any] = block.macros() | {"BUFFERS": buffers} | _read_macros(p, quads and not any(size % 4 for size in block[:3]))
    groups = groups_of(p, block.m, block.n)
    depth = -(-p.k // block.splits // block.k) * block.k if block.splits > 1 else p.k
    splits = -(-p.k // depth)
    inner = p if splits == 1 else p.bare()
    macros["C_QUADS"] = int(config.use_vectorization and p.n % 4 == 0 and block.columns % 4 == 0 and inner.plain(inner.c))
    kernel = compiled(queue, "reads.cl simt.cl", "gemm_tiles", inner, **macros, **config.extra.get("macros", {}))
    numbers = (*p.sizes(), p.lda, p.ldb, inner.has_bias, *p.strides(), splits, depth)
    in_parts(queue, p, splits, kernel, groups * splits * block.items, block.items, t.a, t.b, numbers, t)


def groups_of(p: Matmul, bm: int, bn: int) -> int:
    return p.batches * -(-p.m // bm) * -(-p.n // bn)


def in_parts(
    queue: Any, p: Matmul, splits: int, kernel: Any, size: int, local: int, a: Tensor, b: Tensor, numbers: Sequence[int], t: Operands
) -> None:
    """Launch a kernel over a product, or over its parts along k, which are then summed."""
    if splits == 1:
        kernel(queue, size, local, a, b, *t.end, *numbers, t.scale)
        return
    sums = t.sums(splits * p.batches * p.m * p.n)
    kernel(queue, size, local, a, b, *t.end[:2], sums, *numbers, 1)
    add_parts(queue, p, splits, sums, t)


def add_parts(queue: Any, p: Matmul, splits: int, sums: Tensor, t: Operands) -> None:
    """Sum the parts of a product that was split along k, and apply the epilogue."""
    total, width = p.batches * p.m * p.n, 4 if p.n % 4 == 0 and p.plain(p.c) else 1
    kernel = compiled(queue, "naive.cl", "add_parts", p, SUMS=width)
    kernel(queue, total // width, launch.LOCAL_1D, sums, *t.end, p.n, p.has_bias, p.m * p.n, splits, total, t.scale)


def _best_block(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> tuple[Block, float]:
    """Return the fastest block and its estimated time: of all blocks if the policy decides, else of the configuration's block."""
    policy = not is_named(config) and profile.device_type == "gpu" and p.itemsize == 4
    fitting = [block.for_loads(p.aligned) for block in BLOCKS if block.fits(p, profile)] if policy else []
    return fastest(p, fitting or [_working_block(p, config, profile)], profile.max_compute_units, config.extra.get("splits"))


def fastest(p: Matmul, tiles: Sequence[Any], units: int, splits: int | None = None) -> tuple[Any, float]:
    """Return the tile with the least estimated time, for ``splits`` of k or for those worth considering, and that time."""
    found = [tile._replace(splits=parts) for tile in tiles for parts in ([splits] if splits else useful_splits(p, tile, units))]
    costs = [cost(p, tile, units) for tile in found]
    return found[costs.index(min(costs))], min(costs)


def useful_splits(p: Matmul, block: Any, units: int) -> list[int]:
    """List the numbers of splits of k to consider: 1, and numbers that give every compute unit one to four work-groups."""
    most, groups = p.k // SPLIT_DEPTH if block.k else 1, max(1, groups_of(p, block.m, block.n))
    return sorted({1, *(max(1, min(times * units // groups, most)) for times in range(1, 5))})


def group_times(groups: int, units: int, resident: int) -> float:
    """Estimate the time of ``groups`` work-groups, in multiples of the time that a fully occupied compute unit takes per group."""
    waves, left = divmod(max(1, groups), units * resident)
    last = -(-left // units)
    return waves * resident + last / (min(1.0, FEW_GROUPS_SPEED * last / resident) or 1.0)


def cost(p: Matmul, block: Any, units: int) -> float:
    """Estimate the time of a product, including the sum of its splits, in multiply-adds of a compute unit."""
    taken = group_times(groups_of(p, block.m, block.n) * block.splits, units, block.resident)
    added = ADDING + PER_PART * p.batches * p.m * p.n * (block.splits + 1) / units if block.splits > 1 else 0.0
    return block.m * block.n * (-(-p.k // block.splits) + block.fill) * taken / block.rate + added


def portable_cost(p: Matmul, profile: DeviceProfile) -> float:
    """Estimate the time of the portable GPU kernels, in the unit of :func:`cost`."""
    return _best_block(p, PORTABLE, profile)[1]


def _working_block(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> Block:
    """Return the configuration's block, changed as far as possible to respect the device's limits on work-groups and local memory."""
    bm, bn, bk, per_item = config.tile_m, config.tile_n, config.tile_k, config.work_per_thread
    rows, slices = config.extra.get("rows_per_item") or per_item, config.extra.get("slices") or 1
    if config.extra.get("form") == "slices":
        return Block(-(-bm // 4) * 4, -(-bn // 4) * 4, 0, 4, 4, -(-slices // 16) * 16)
    if min(bm, bn, bk, per_item) < 1 or bm % rows or bn % per_item:
        what = "tile sizes must be at least 1, tile_m a multiple of rows_per_item, and tile_n a multiple of work_per_thread"
        raise ShapeError(message("matmul", what, tile_m=bm, tile_n=bn, tile_k=bk, rows_per_item=rows, work_per_thread=per_item))
    while bm // rows * (bn // per_item) * slices > profile.max_work_group_size and bm % (2 * rows) == bn % (2 * per_item) == 0:
        rows, per_item, slices = (rows, per_item, slices // 2) if slices > 1 else (2 * rows, 2 * per_item, 1)
    while bk > 4 * slices and bk * (bm + bn) * p.itemsize > profile.local_mem_size:
        bk //= 2
    bk = -(-bk // (2 * slices)) * 2 * slices  # a slice advances two steps at a time
    return Block(bm, bn, bk, rows, per_item, slices)


# ---- the table


VARIANTS = (V.MATMUL_NAIVE, V.MATMUL_TILED, V.MATMUL_REGISTER_TILED, V.MATMUL_VECTORIZED)
NAIVE = algorithms.add(
    "matmul", "naive", "naive.cl", "tiny products, and configurations without local memory: a work-item per result",
    "sweep_h200.json: sweep matmul 16", _naive, variants=(V.MATMUL_NAIVE,), cost=portable_cost, samples=(KernelConfig(V.MATMUL_NAIVE),),
)  # fmt: skip
algorithms.add(
    "matmul", "gemv", "gemv.cl", "GPUs: at most eight rows, at the speed of memory", "decode_h200.json: decode, 64 tokens", _few_rows,
    device="gpu", tiers=("gemv",), variants=VARIANTS[1:3], when=_suits_few_rows, cost=algorithms.first,
)  # fmt: skip
TILED_PRODUCT = algorithms.add(
    "matmul", "tiles", "simt.cl slices.cl", "GPUs: register tiles fed from local memory, or slices of k where those are too few",
    "cases_h200.json: linear 64x784x128", _tiles, device="gpu", variants=VARIANTS[1:3], cost=portable_cost,
    configurations=lambda problem: [block.config() for block in BLOCKS],
    samples=(
        KernelConfig(V.MATMUL_TILED, 32, 32, 16, 2, extra={"tier": "simt"}),
        KernelConfig(V.MATMUL_REGISTER_TILED, 64, 64, 16, 4, extra={"tier": "simt", "slices": 2}),
        KernelConfig(V.MATMUL_REGISTER_TILED, 8, 8, extra={"tier": "simt", "form": "slices"}),
        KernelConfig(V.MATMUL_REGISTER_TILED, 128, 128, 16, 8, extra={"tier": "simt"}),
    ),
)  # fmt: skip


def _tuned_product(problem: Problem) -> algorithms.Case:
    (m, n, k), (trans_a, trans_b, batches) = problem.shape, (problem.flags[name] for name in ("trans_a", "trans_b", "batches"))
    batch = () if batches == 1 else (batches,)
    return algorithms.Case(
        ((*batch, *((k, m) if trans_a else (m, k))), (*batch, *((n, k) if trans_b else (k, n)))), k,
        lambda config, a, b: product(a, b, (*batch, m, n), Extras(Epilogue(problem.dtype)), trans_a, trans_b, config),
        lambda a, b: np.matmul(np.swapaxes(a, -1, -2) if trans_a else a, np.swapaxes(b, -1, -2) if trans_b else b),
    )  # fmt: skip


_PRODUCT_DEFAULTS = {"trans_a": False, "trans_b": False, "batches": 1}
algorithms.FAMILIES["matmul"] = algorithms.Family("matmul", "matmul", _PRODUCT_DEFAULTS, 3, 3, _tuned_product)


# ---- running products


def problem_of(p: Matmul, profile: ExtendedDeviceProfile) -> Problem:
    """Return the problem that describes a product to the selector and the tuner."""
    flags = {"trans_a": p.trans_a, "trans_b": p.trans_b, "batches": p.batches}
    return Problem("matmul", (p.m, p.n, p.k), p.ending.dtype, flags, profile)


def _plainer_product(config: KernelConfig, profile: DeviceProfile) -> KernelConfig:
    """Return a registered or measured ``config``, or one for the naive kernel if it turns off features that its kernel needs."""
    simt = config.extra.get("tier", "cpu" if profile.device_type == "cpu" else "simt") == "simt"
    plain = simt and config.variant is V.MATMUL_VECTORIZED
    tiled = simt and config.variant in TILED_PRODUCT.variants
    if not plain and config.use_local_memory and (config.use_vectorization or tiled):
        return config
    return replace(config, variant=V.MATMUL_NAIVE, extra={**config.extra, "tier": "simt"})


def product_algorithm(queue: Any, p: Matmul, config: KernelConfig, profile: DeviceProfile) -> tuple[Algorithm, KernelConfig]:
    """Return the algorithm of a product and the configuration it runs with.

    If a configuration names a vendor's algorithm that cannot run (it was measured on another driver), a portable one is used.
    """
    config = _plainer_product(config, profile) if is_named(config) else config
    found = algorithms.choose_algorithm("matmul", queue, p, config, profile)
    if not p.k:
        return NAIVE, config
    return (found, config) if found else (algorithms.choose_algorithm("matmul", queue, p, PORTABLE, profile) or TILED_PRODUCT, PORTABLE)


def chosen(queue: Any, p: Matmul, config: KernelConfig | None = None) -> tuple[Algorithm, KernelConfig]:
    """Return algorithm and configuration of a product, by the selector's choice or by a given configuration."""
    profile = profile_of(queue)
    config = config or get_kernel_selector().choose(problem_of(p, profile), ((p.m, p.k), (p.k, p.n)))
    return product_algorithm(queue, p, config, profile)


def multiply(queue: Any, p: Matmul, t: Operands, config: KernelConfig | None = None) -> Tensor:
    """Launch a product; returns its result."""
    algorithm, config = chosen(queue, p, config)
    algorithm.run(queue, p, config, profile_of(queue), t)
    return t.out


def matmul_of(
    a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, bias: Tensor | None, epilogue: Epilogue, scaled: bool, kept: bool = False
) -> Matmul | None:
    """Describe the product of two batches of matrices; ``None`` if their batch axes need more than two strides."""
    (m, k), n = (a.shape[-2:][::-1] if trans_a else a.shape[-2:]), b.shape[-2 if trans_b else -1]
    axes: tuple[CopyAxis, ...] = ()
    if len(a.shape) > 2 or len(b.shape) > 2:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        strides = zip(batch, broadcast_strides(a.shape[:-2], batch), broadcast_strides(b.shape[:-2], batch), strict=True)
        axes = merge([CopyAxis(*axis) for axis in strides])
    if len(axes) > 2:
        return None
    outer, inner = (CopyAxis(1, 0, 0),) * (2 - len(axes)) + axes
    a_strides, b_strides = (outer.source * m * k, inner.source * m * k), (outer.target * k * n, inner.target * k * n)
    placed = (a.host_ref is None and b.host_ref is None) or alignment(a, b) == 16
    aligned = placed and math.gcd(a.shape[-1], b.shape[-1], *a_strides, *b_strides) % 4 == 0
    return Matmul(m, n, k, trans_a, trans_b, a.dtype, b.dtype, epilogue.stored, bias.dtype if bias is not None else None, epilogue,
                   (outer.size, inner.size), a_strides, b_strides, aligned, placed, scaled, kept)  # fmt: skip


class Extras(NamedTuple):
    """The optional inputs of a product; ``epilogue`` describes its epilogue."""

    epilogue: Epilogue
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale: float = 1
    kept: bool = False  # the weight is a constant of a recording


def product(
    a: Tensor, b: Tensor, out_shape: tuple[int, ...], extras: Extras, trans_a: bool = False, trans_b: bool = False,
    config: KernelConfig | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute op(a) op(b) with an epilogue, for batches of matrices whose batch axes broadcast; OpenCL devices only.

    ``config`` replaces the selector's choice. ``out`` receives the result instead of new memory.
    """
    queue, (epilogue, bias, residual, scale, kept) = a.queue, extras
    p = matmul_of(a, b, trans_a, trans_b, bias, epilogue, scale != 1, kept)
    if p is None:
        a, b = (broadcast_to(x, (*out_shape[:-2], *x.shape[-2:])) for x in (a, b))
        return product(a, b, out_shape, extras, trans_a, trans_b, config, out)
    profile = profile_of(queue)
    algorithm, found = chosen(queue, p, config)
    # CPU kernels would load 16-bit values of the left operand one by one. A configuration that was measured or named is run unchanged.
    widens = DTYPES[p.a].itemsize == 2 and profile.device_type == "cpu" and p.batches * p.m * p.n * p.k >= _WIDEN_FROM
    if widens and "cpu" in algorithm.names and not is_named(found):
        return product(cast(a, sum_dtype(epilogue.dtype)), b, out_shape, extras, trans_a, trans_b, config, out)
    out = new_result(out_shape, p.c, queue) if out is None else out
    algorithm.run(queue, p, found, profile, Operands(a, b, out, bias, residual, scale))
    return out
