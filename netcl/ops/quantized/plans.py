"""Launches products with packed weights: which kernel, with which vectors and groups.

An algorithm is chosen by the kind, the number of tokens, the dtype of the activations and the device, and by a numeric check of kernels
with inline assembly: :func:`_kernels_trusted`. ``selector.register("quantized", condition, config)`` selects one by ``extra["tier"]``.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.device import profile_of
from netcl.core.dtype import DTYPES
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.kernels import primitives
from netcl.core.tensor import Tensor, new_result
from netcl.engine import algorithms, launch
from netcl.engine.opencl_text import loose_halves
from netcl.engine.strided import alignment, copy_block, take_block
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import nvidia
from netcl.ops.matmul.gemm import Extras, product
from netcl.ops.quantized.formats import Kind, dequantize, quantize
from netcl.ops.quantized.layout import STRIP_ROWS, pack_strips, record_size

_ANY_CONFIG = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED)
_SCRATCH = 64 << 20  # bytes of weights that CPUs unpack at a time; GPUs four times as many
_FRAGMENT_MOST = 64  # columns of activations that matrix units take at once
_TOKENS = 8  # that a kernel of strips does at once
_FEW_TOKENS = 4  # up to which tiles of 8 tokens do not pay
_TILED_TOKENS = 128  # of a work-item
_NEON_AHEAD = 512  # bytes
_WIDE_AHEAD = (8192, 3)  # bytes and level of cache, on CPUs with AVX
_PUTS = {  # how unpack.cl stores eight values, where vectors can; rows begin at multiples of 64 bytes
    "float32": "*(__global float4*)(p) = (a), *((__global float4*)(p) + 1) = (b)",
    "float16": "vstorea_half8_rte((float8)((a), (b)), 0, p)",
}
_PUT_EACH = ", ".join(f"Y_STORE((p), {i}, ({'ab'[i // 4]}).s{i % 4})" for i in range(8))
# Strips per compute unit at most, then WARPS, MT and DEEP of mma.cl; "many" are more than 8 columns of activations, whose sums take local
# memory. Of 4, 8 and 16 warps, 1 and 2 strips, 2, 4 and 8 runs.
_MMA_TABLE = {
    "plain": ((2, 16, 1, 2), (math.inf, 8, 1, 2)),
    "codes": ((2, 16, 1, 2), (16, 8, 1, 2), (math.inf, 4, 1, 2)),
    "staged codes": ((2, 16, 1, 2), (math.inf, 8, 1, 2)),
    "scaled": ((2, 16, 1, 8), (math.inf, 8, 1, 4)),
    "direct minimums": ((2, 16, 1, 8), (4, 8, 1, 8), (math.inf, 4, 1, 8)),
    "many": ((2, 8, 1, 4), (math.inf, 4, 2, 4)),
    "many bytes": ((2, 8, 1, 2), (math.inf, 4, 1, 2)),
}
_STAGED_SUMS = 65536  # bytes of local memory for 8 columns, where sums of groups save products of their own; sums of strips need some too
_MMA_RESIDENT = 1024  # work-items of a compute unit that keep the memory busy
_SEVERAL_FROM = 24  # strips per compute unit, and two for each token: above, sums of float16 in local memory pay (packed_products_h200.txt)
_FLAGS = {"x86_64": ("avx512_vnni", 1), "AMD64": ("avx512_vnni", 1), "aarch64": ("asimddp asimdhp", 2)}


class Packed(NamedTuple):
    """A product with packed weights: ``tokens`` rows of x in ``dtype``, times weights of ``rows`` x ``columns``."""

    kind: Kind
    rows: int
    columns: int
    tokens: int
    dtype: str
    activations: str = "auto"

    @property
    def coded(self) -> bool:
        """Whether weights are integers times scales, which integer dot products need."""
        return not self.kind.plain and not self.kind.codebook

    @property
    def fragment(self) -> int:
        """The number of columns of activations for matrix units: a token of float32 takes two."""
        return self.tokens * (2 if self.dtype == "float32" else 1)


class PackedOperands(NamedTuple):
    """The tensors of a product. ``end`` holds the last tensors of a kernel; the result stands in for a missing bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    parts: Any = None  # DecodeParts of netcl.ops.decode, for kernels that take them

    @property
    def end(self) -> tuple[Tensor, ...]:
        last = (self.out if self.bias is None else self.bias, self.out)
        if self.parts is None:
            return last
        return *self.parts.pointers(self.out), self.out if self.parts.residual is None else self.parts.residual, *last


def run_packed(queue: Any, p: Packed, t: PackedOperands, config: KernelConfig | None = None) -> None:
    """Launch a product by the algorithm that suits it."""
    algorithm, config = _choice(queue, p, config)
    algorithm.run(queue, p, config, profile_of(queue), t)


def _choice(queue: Any, p: Packed, config: KernelConfig | None = None) -> tuple[algorithms.Algorithm, KernelConfig]:
    profile = profile_of(queue)
    config = config or get_kernel_selector().select("quantized", ((p.tokens, p.columns), (p.rows, p.columns)), profile) or _ANY_CONFIG
    algorithm = algorithms.choose_algorithm("quantized", queue, p, config, profile)
    assert algorithm is not None, "the algorithm unpacked must accept every product"
    return algorithm, config


def surrounded(queue: Any, p: Packed) -> tuple[algorithms.Algorithm, KernelConfig] | None:
    """Return algorithm and configuration of a product if its kernel takes :class:`~netcl.ops.decode.DecodeParts`, else ``None``."""
    algorithm, config = _choice(queue, p)
    groups = algorithm.run is _mma or (algorithm.run is _strips and (not launch.on_cpu_device(queue) or "SLICES" in config.extra))
    return (algorithm, config) if groups else None


def kind_macros(kind: Kind, lanes: int, **more: Any) -> dict[str, Any]:
    signs = {"Q6_K": 2, "Q3_K": 2, "IQ4_XS": 2}.get(kind.name, 1) if "scales" in kind.fields else 0
    return {
        "PLAIN": ("F16", "BF16").index(kind.name) + 1 if kind.plain else 0, "BLOCK": record_size(kind)[0], "GROUP": kind.group,
        "LOW": kind.low[0], "HIGH": kind.high[0] if kind.high else 0, "OFFSET": kind.offset, "SCALES": signs,
        "MIN": int("m" in kind.fields), "CODEBOOK": int(kind.codebook), "V": lanes, **more,
    }  # fmt: skip


def _compiled(
    queue: Any, p: Packed, name: str, file: str, t: PackedOperands, lanes: int, assembly: int, text: str = "", items: int = 1, **more: Any
) -> Any:
    clang = (2 if profile_of(queue).brand == "pocl" else 1) if launch.fetches(queue) else 0
    text += loose_halves("float16", lanes) if clang == 2 and lanes > 2 else ""
    quad = {"float32": "vload4(0, p)", "bfloat16": "as_float4(convert_uint4(vload4(0, p)) << 16)"}
    macros = {"PICK(no, yes, mask)": "((mask) ? (yes) : (no))", **kind_macros(p.kind, lanes, CLANG=clang, ASM=assembly, **more)}
    macros["X_QUAD(p)"] = launch.QUADS[p.dtype] if alignment(t.x) == 16 else quad.get(p.dtype, launch.QUADS[p.dtype])
    operands = {"X": t.x.dtype, "Y": t.out.dtype, "BIAS": t.end[-2].dtype}
    if t.parts is not None:
        quads = {"float16": "quad_float16(p)"} if file == "mma.cl" else {}
        dtypes, around, code = t.parts.text("X", "uchar", items, quads)
        operands, macros = operands | dtypes, macros | around | {"X_QUAD(p)": quads.get(p.dtype, macros["X_QUAD(p)"])}
        text += t.parts.epilogue.source("float", 1, False) + code
    return launch.kernel(queue, __file__, f"codes.cl {'round.cl ' * (file != 'mma.cl')}{file}", name, operands, macros, text)


def _assembly(x: Tensor, p: Packed, dots: bool) -> int:
    return _cpu_instructions() if (dots or p.kind.plain) and has_dots(x.queue, p.kind) else 0


def _fetching(x: Tensor) -> dict[str, int]:
    queue = x.queue
    wide = launch.fetches(queue) and profile_of(queue).vector_width >= 8
    distance, level = _WIDE_AHEAD if wide else launch.ahead(queue) or (0, 3)
    return {"AHEAD": distance, "LEVEL": level}


@cache
def _cpu_instructions() -> int:
    """Return the value of the macro ASM of codes.cl: the instructions that this machine supports, 0 if none."""
    flags, found = _FLAGS.get(platform.machine(), ("", 0))
    listed = Path("/proc/cpuinfo")
    there = listed.exists() and {*flags.split()} <= {*listed.read_text(encoding="utf-8", errors="replace").split()}
    return found if platform.system() == "Linux" and there else 0


def _strips(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: PackedOperands, assembly: int | None = None) -> None:
    """Launch a product of strips, with activations rounded to int8 if ``p.activations`` is int8."""
    tokens = min(1 << (p.tokens - 1).bit_length(), _TOKENS)  # few variants of the kernel; tokens beyond the last repeat it
    strips, dots = -(-p.rows // STRIP_ROWS), p.activations == "int8"
    cpu = launch.on_cpu_device(queue) and "SLICES" not in config.extra
    if assembly is None:
        assembly = _assembly(t.x, p, dots) if cpu else 0
    if assembly == 2 and _in_tiles(p) and (dots or p.kind.plain):
        return _registers(p, t)
    x, scales, sums = t.x, t.out, t.out
    if dots:  # x as int8, a scale for every 32 columns and the sum of every 16 columns
        runs = p.tokens * p.columns // 32
        made = [Tensor.empty((n,), dtype, queue=queue) for n, dtype in ((32 * runs, "int8"), (runs, "float32"), (2 * runs, "int32"))]
        kernel = _compiled(queue, p, "round_activations", "runs.cl strips.cl", t, 4, 0)
        kernel(queue, p.tokens * -(-p.columns // 256), 1, t.x, *made, p.columns)
        x, scales, sums = made
    wanted = max(1, profile.max_compute_units * 1024 // (4 * strips))  # enough work-items to hide memory latency
    slices = config.extra.get("SLICES") or next((n for n in (64, 32, 16) if n <= min(wanted, p.columns // 32)), 8)
    lanes, slices = (16 if tokens == 1 or assembly == 1 else profile.lanes, 1) if cpu else (4, slices)
    macros: dict[str, Any] = {"NB": tokens, "SLICES": slices, "DOTS": int(dots), **(_fetching(t.x) if cpu else {"AHEAD": 0, "LEVEL": 3})}
    items = 4 * slices if slices > 1 else 1
    kernel = _compiled(queue, p, "strips_product", "runs.cl strips.cl", t._replace(x=x), lanes, assembly, items=items, **macros)
    numbers = (p.rows, p.columns, p.tokens, int(t.bias is not None))
    kernel(queue, strips * (items if slices > 1 else STRIP_ROWS // lanes), items, t.weight, x, scales, sums, *t.end, *numbers)


def _neon_kernel(p: Packed, name: str, t: PackedOperands, tokens: int, file: str = "neon.cl", text: str = "", **more: int) -> Any:
    """Return a kernel of neon.cl for tiles of ``tokens`` tokens, 1 or 8; ``more``: further macros."""
    quads = int(t.out.dtype == "float32")
    macros = {"TOKENS": tokens, "SHARE": _TILED_TOKENS, "AHEAD": _NEON_AHEAD, "PUT_QUADS": quads, **more}
    return _compiled(t.x.queue, p, name, file, t, 4, 2, text, **macros)


def row_chain(p: Packed, t: PackedOperands, text: str, followed: bool) -> tuple[Callable[..., None], int]:
    """Return the kernel of row_chain.cl and the bytes of its records of 32 activations, if :func:`chains_rows`."""
    more, queue = {"FOLLOWED": int(followed)}, t.x.queue
    if uses_tiles(t.x, p):
        return _neon_kernel(p, "strips_chain", t, 1, "neon.cl row_chain.cl", text, **more), _record_bytes(p.kind)
    dots = _choice(queue, p)[0].name == "dot"
    more |= {"NB": 1, "DOTS": int(dots), **_fetching(t.x)}
    kernel = _compiled(queue, p, "strips_chain", "runs.cl row_chain.cl", t, 16, _assembly(t.x, p, dots), text, **more)
    return kernel, 64 if dots else 128


def _record_bytes(kind: Kind, tokens: int = 1) -> int:
    """Return the bytes of a record of activations in neon.cl."""
    return 80 if kind.plain else 64 if tokens == 1 else 416


def _in_tiles(p: Packed) -> bool:
    if p.kind.name == "F16":
        return p.tokens == 1 and p.activations != "float"
    return p.kind.name in ("Q4_0", "Q8_0") and (p.tokens == 1 or p.tokens > _FEW_TOKENS)


def uses_tiles(x: Tensor, p: Packed) -> bool:
    """Whether the kernels of neon.cl compute a product on the device of ``x``."""
    queue = x.queue
    if not (launch.on_cpu_device(queue) and _in_tiles(p) and _cpu_instructions() == 2 and has_dots(queue, p.kind)):
        return False
    algorithm, config = _choice(queue, p)
    return algorithm.name == ("strips" if p.kind.plain else "dot") and "SLICES" not in config.extra


def chains_rows(x: Tensor, p: Packed) -> bool:
    """Whether :func:`row_chain` has a kernel for products of one token on the device of ``x``: a CPU with NEON, or with AVX and clang."""
    queue = x.queue
    if uses_tiles(x, p):
        return True
    if p.tokens > 1 or not launch.on_cpu_device(queue) or not launch.fetches(queue) or profile_of(queue).vector_width < 8:
        return False
    algorithm, config = _choice(queue, p)
    return algorithm.name in ("dot", "strips") and "SLICES" not in config.extra


def _registers(p: Packed, t: PackedOperands) -> None:
    """Launch a product in tiles of registers of NEON, after its activations were converted to records of 32 columns."""
    tokens, numbers, biased = 1 if p.tokens == 1 else 8, (p.rows, p.columns), int(t.bias is not None)
    count, items = -(-p.tokens // tokens) * (p.columns // 32), -(-p.rows // 32)
    records = Tensor.empty((count * _record_bytes(p.kind, tokens),), "int8", queue=t.x.queue)
    _neon_kernel(p, "make_records", t, tokens)(t.x.queue, count, 1, t.x, records, p.columns, p.tokens)
    if tokens == 1:
        return _neon_kernel(p, "strips_rows", t, 1)(t.x.queue, items, 1, t.weight, records, *t.end, *numbers, biased)
    size, kernel = (-(-p.tokens // _TILED_TOKENS), items), _neon_kernel(p, "strips_tiles", t, 8)
    return kernel(t.x.queue, size, (1, 1), t.weight, records, *t.end, *numbers, p.tokens, biased)


def round_activations(x: np.ndarray) -> np.ndarray:
    """Return activations rounded as for integer dot products: int8 times one scale per 32 columns."""
    runs = x.reshape(-1, 32).astype(np.float32)
    largest = np.abs(runs).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(runs * inverse).astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def _mma_sizes(p: Packed, strips_per_unit: float, gated: bool, direct: bool) -> dict[str, int]:
    """Return the macros of mma.cl for a product, from a table of the fastest ones on an H200.

    ``direct``: the activations are float16 and need no conversion. Up to 8 columns of other activations are converted in local memory if
    they fit, except in gated 8-bit products. For weights with minimums, sums of activations are computed there too. Direct activations are
    copied there for these sums only, in gated products and in large ones of Q4_K.
    """
    scaled, kinds, runs = "scales" in p.kind.fields, 1 << (p.fragment - 1).bit_length(), p.columns // 32
    minimums, large = scaled and "m" in p.kind.fields, p.kind.bits == 4 and strips_per_unit > _SEVERAL_FROM + 2 * p.tokens
    staged = p.fragment <= 8 and (minimums and (gated or large) if direct else not (gated and p.kind.bits == 8))
    kind = "plain" if p.kind.plain else "scaled" if scaled else "staged codes" if staged else "codes"
    if direct and minimums and not staged:
        kind = "direct minimums"
    if p.fragment > 8:
        kind = "many bytes" if p.kind.bits == 8 else "many"
    wide = strips_per_unit * (4 if gated else 1)
    warps, tall, deep = next(sizes for most, *sizes in _MMA_TABLE[kind] if wide <= most)
    if scaled and p.columns // record_size(p.kind)[0] < warps:
        warps = max(4, warps // 2)
    tall, step = 2 if gated else tall, warps * (8 if scaled else deep)
    room = (_STAGED_SUMS if kinds == 8 and scaled and direct else 32768 if warps * tall <= 16 else 16384) // (64 * kinds)  # runs
    staged = staged and step <= room and (runs <= room or kinds <= 2)
    return {
        "WARPS": warps, "MT": tall, "DEEP": deep, "SETS": -(-p.fragment // 8), "SPLIT": int(p.dtype == "float32"), "KINDS": kinds,
        "WHOLE": int(runs % deep == 0), "X_HALVES": int(direct and not staged), "CHUNKED": int(staged and runs > room),
        "STAGED": min(room, max(step, 1 << (runs - 1).bit_length())) if staged else 0,
    }  # fmt: skip


def _mma(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: PackedOperands) -> None:
    strips, units = -(-p.rows // STRIP_ROWS), profile.max_compute_units
    gated, normed = (False, "") if t.parts is None else (t.parts.gate is not None, t.parts.norm)
    direct = p.dtype == "float16" and alignment(t.x) == 16 and not normed
    sizes = _mma_sizes(p, strips / units, gated, direct)
    sizes["RANGED"] = int(p.dtype != "float16" and not normed)
    items = 32 * sizes["WARPS"]
    parts = strips if gated else -(-strips // sizes["MT"])
    resident = _MMA_RESIDENT if sizes["STAGED"] * sizes["KINDS"] * 64 < _STAGED_SUMS else 768  # of a compute unit, by its local memory
    rounds = -(-parts * items // (units * resident)) if sizes["STAGED"] else 1  # as many for every work-group
    sizes["SEVERAL"] = int(direct and not gated and sizes["STAGED"] > 0 and not sizes["CHUNKED"])
    if sizes["SEVERAL"]:
        sizes["DEEP"] = 2
    kernel = _compiled(queue, p, "strips_mma", "mma.cl", t, 2, 0, primitives.cl_source(nvidia.__file__, "ptx.cl"), items, **sizes)
    kernel(queue, -(-parts // rounds) * items, items, t.weight, t.x, *t.end, p.rows, p.columns, p.tokens, int(t.bias is not None))


def has_dots(queue: Any, kind: Kind) -> bool:
    """Whether a device is a CPU with instructions for dot products of int8, and its driver uses them correctly.

    The instructions are inline assembly. They are not used with PoCL before 3.1, where an unsupported instruction would crash the process.
    """
    profile = profile_of(queue)
    version = tuple(map(int, re.findall(r"\d+", profile.driver_version)[:2]))
    known = profile.brand != "pocl" or version >= (3, 1)
    return known and launch.fetches(queue) and _cpu_instructions() > 0 and _kernels_trusted(queue, "dot", kind)


def _kernels_trusted(queue: Any, tier: str, kind: Kind) -> bool:
    """Whether a tier's kernels are correct; checked once per context and kind. PoCL silently drops instructions that its target lacks."""
    return nvidia.verdict(queue, "quantized", tier, kind.name, lambda queue: _packed_product_right(queue, tier, kind), tier == "mma")


def _packed_product_right(queue: Any, tier: str, kind: Kind) -> bool:
    rng, (rows, columns), profile = np.random.default_rng(0), (37, 512), profile_of(queue)

    def drawn(*shape: int) -> np.ndarray:
        return np.rint(4 * rng.standard_normal(shape, np.float32))  # integers, whose sums of halves are exact

    blocks = quantize(drawn(rows, columns), kind)
    weight = Tensor.from_host(queue, pack_strips(blocks, kind, (rows, columns)))
    values = dequantize(blocks, kind, (rows, columns)).astype(np.float64)
    cases = [(1, "float32"), (_TOKENS, "float32"), (11, "float32"), *([(1, "float16"), (11, "float16")] if tier == "mma" else [])]
    for tokens, dtype in cases:
        x = Tensor.from_host(queue, drawn(tokens, columns), dtype)
        p, exact = Packed(kind, rows, columns, tokens, dtype), x.to_host().astype(np.float64)
        t = PackedOperands(x, weight, None, Tensor.empty((tokens, rows), queue=queue))
        if tier == "mma":
            _mma(queue, p, _ANY_CONFIG, profile, t)
        else:
            _strips(queue, p._replace(activations="int8" if p.coded else "auto"), _ANY_CONFIG, profile, t, _cpu_instructions())
            exact = round_activations(exact) if p.coded else exact
        exact = exact @ values.T
        if not np.abs(t.out.to_host() - exact).max() <= 2**-18 * np.abs(exact).max():
            return False
    return True


def unpack_rows(queue: Any, p: Packed, weight: Tensor, dtype: str, begin: int, count: int, listed: Tensor | None = None) -> Tensor:
    """Unpack ``count`` rows of the weights: the rows from ``begin`` on, or the rows whose indices are in ``listed``."""
    out = new_result((count, p.columns), dtype, queue)
    if listed is None and dtype == "float32" and p.kind.name == "F16" and not begin % STRIP_ROWS and launch.fetches(queue):
        t = PackedOperands(out, weight, None, out)
        kernel = _compiled(queue, p._replace(dtype=dtype), "unpack_halves", "unpack.cl", t, 4, _assembly(out, p, False))
        kernel(queue, -(-count // STRIP_ROWS) * (p.columns // 32), 8, weight, out, p.columns, begin // STRIP_ROWS, count)
        return out
    each = 32 if launch.on_cpu_device(queue) else 8  # columns of a work-item: neighbors on GPUs write neighboring columns
    units = profile_of(queue).compute_capability is not None and dtype == "float16"
    puts = _PUTS if not units else {"float16": "PUT_HALVES(p, a, b)"}
    listing, put = int(listed is not None), {"PUT_8(p, a, b)": puts.get(dtype, _PUT_EACH)}
    together = 2 if units and listed is None else 1  # rows of a work-item
    macros = kind_macros(p.kind, together, CLANG=0, ASM=0, EACH=each, LISTED=listing, **put)
    operands = {"Y": dtype, "INDEX": "int32" if listed is None else listed.dtype}
    text = primitives.cl_source(nvidia.__file__, "ptx.cl") if units else ""
    kernel = launch.kernel(queue, __file__, "codes.cl unpack.cl", "unpack_rows", operands, macros, text)
    size = (STRIP_ROWS // together * (p.columns // each), -(-count // STRIP_ROWS))
    args = (weight, out if listed is None else listed, out, p.rows, p.columns, begin, count)
    kernel(queue, size, (4 * launch.LOCAL_1D if each == 8 else launch.LOCAL_1D, 1), *args)
    return out


def _pieces(queue: Any, p: Packed) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each piece that is unpacked at a time."""
    most = _SCRATCH if launch.on_cpu_device(queue) else 4 * _SCRATCH
    step = max(STRIP_ROWS, most // (p.columns * DTYPES[p.dtype].itemsize) // STRIP_ROWS * STRIP_ROWS)
    return ((begin, min(step, p.rows - begin)) for begin in range(0, p.rows, step))


def _unpacked_product(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: PackedOperands) -> None:
    for begin, count in _pieces(queue, p):
        bias = t.bias if t.bias is None or count == p.rows else take_block(t.bias, (count,), begin, (1,))
        piece = unpack_rows(queue, p, t.weight, p.dtype, begin, count)
        whole = t.out if count == p.rows else None
        made = product(t.x, piece, (p.tokens, count), Extras(Epilogue(t.out.dtype), bias), False, True, out=whole)
        if whole is None:
            copy_block((p.tokens, count), made, 0, (count, 1), t.out, begin, (p.rows, 1))


def gradient(queue: Any, p: Packed, g: Tensor, weight: Tensor) -> Tensor:
    """Compute ``g w`` for weights w and the gradient g of the results."""
    total: Tensor | None = None
    for begin, count in _pieces(queue, p):
        part = g if count == p.rows else take_block(g, (p.tokens, count), begin, (p.rows, 1))
        epilogue = Epilogue(p.dtype, residual="" if total is None else p.dtype)
        total = product(part, unpack_rows(queue, p, weight, p.dtype, begin, count), (p.tokens, p.columns), Extras(epilogue, None, total))
    assert total is not None
    return total


def _tier(name: str, **extra: int) -> tuple[KernelConfig, ...]:
    return (KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": name, **extra}),)


algorithms.add(
    "quantized", "dot", "codes.cl runs.cl strips.cl", "CPUs: integer dot products of int8 activations, lanes are rows",
    "llama_cpp_pocl_x86.json: Q4_0 prefill, 512 tokens",
    lambda queue, p, config, profile, t: _strips(queue, p._replace(activations="int8"), config, profile, t),
    device="cpu", tiers=("dot",), needs="AVX-512 VNNI or NEON dot products",
    when=lambda p, config, profile: p.coded and p.activations != "float" and p.dtype != "float64",
    probe=lambda queue, p, config: has_dots(queue, p.kind), samples=_tier("dot"),
)  # fmt: skip
algorithms.add(
    "quantized", "mma", "codes.cl mma.cl", "GPUs: up to 64 tokens of float16, 32 of float32",
    "quantized_h200.json: Q4_0 14336x4096, 1 tokens", _mma,
    device="gpu", tiers=("mma",), needs="NVIDIA, compute capability 8.0 or more",
    when=lambda p, config, profile: nvidia.capable(profile) and not p.kind.codebook and p.kind.name != "BF16"
    and p.dtype != "float64" and p.fragment <= _FRAGMENT_MOST,
    probe=lambda queue, p, config: _kernels_trusted(queue, "mma", p.kind),
)  # fmt: skip
algorithms.add(
    "quantized", "strips", "codes.cl runs.cl strips.cl", "a few tokens with floating-point activations, any kind", "", _strips,
    tiers=("strips",), when=lambda p, config, profile: p.dtype != "float64" and p.tokens <= (16 if profile.device_type == "cpu" else 8),
    samples=(*_tier("strips"), *_tier("strips", SLICES=4)),
)  # fmt: skip
algorithms.add(
    "quantized", "unpacked", "codes.cl unpack.cl", "many tokens: rows are unpacked in pieces, then multiplied",
    "llama_cpp_pocl_x86.json: F16 prefill, 512 tokens", _unpacked_product,
    tiers=("unpacked", "strips", "dot", "mma"), samples=_tier("unpacked"),
)  # fmt: skip
