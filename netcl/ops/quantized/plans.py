"""Launches of products with packed weights: which kernel, with which vectors and groups.

The layout of the weights is chosen once, when they are packed (:func:`layout_for`); an algorithm then by the number of tokens, the dtype of
the activations and the device. ``selector.register("quantized", condition, config)`` names one by ``extra["tier"]``.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.device import handle_of
from netcl.core.dtype import DTYPES
from netcl.core.errors import message
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor, new_result
from netcl.engine import algorithms, launch
from netcl.engine.opencl_text import loose_halves
from netcl.engine.strided import alignment, copy_block, take_block
from netcl.ops.finish import Finish
from netcl.ops.matmul import nvidia
from netcl.ops.matmul.gemm import Extras, product
from netcl.ops.quantized.formats import Kind, dequantize, kind_of, quantize
from netcl.ops.quantized.layout import STRIP, TILED, pack, record

_DEFAULT = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED)
_SCRATCH = 64 << 20  # bytes of weights that are unpacked at a time
_FEW = {"cpu": 16, "gpu": 8}  # tokens up to which weights are read packed by kernels of floats
_FUSED_MOST = 256  # tokens up to which mma.cl is faster than unpacking and a product, by the prototype's straight lines
_TOKENS = 8  # that a kernel of strips does at once
_FLAGS = {"x86_64": ("avx512_vnni", 1), "AMD64": ("avx512_vnni", 1), "aarch64": ("asimddp", 2)}


class Packed(NamedTuple):
    """A product with packed weights: ``tokens`` rows of x of a dtype, with weights of rows x columns."""

    kind: Kind
    layout: str
    rows: int
    columns: int
    tokens: int
    dtype: str
    activations: str = "auto"

    @property
    def coded(self) -> bool:
        """Whether weights are integers times scales, which integer dot products need."""
        return not self.kind.plain and not self.kind.codebook


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor

    @property
    def end(self) -> tuple[Tensor, Tensor]:
        return self.out if self.bias is None else self.bias, self.out


def run(queue: Any, p: Packed, t: Operands, config: KernelConfig | None = None) -> None:
    """Launch a product by the algorithm that suits it."""
    profile = handle_of(queue).profile
    config = config or get_kernel_selector().select("quantized", ((p.tokens, p.columns), (p.rows, p.columns)), profile) or _DEFAULT
    algorithm = algorithms.choose_algorithm("quantized", queue, p, config, profile)
    assert algorithm is not None, "unpacked weights serve every product"
    algorithm.run(queue, p, config, profile, t)


def layout_for(queue: Any, kind: Kind, columns: int) -> str:
    """The layout for weights on a device: tiles for trusted matrix units of NVIDIA, else strips."""
    if launch.is_numpy(queue) or kind.name not in TILED or columns % 64 or not nvidia.capable(handle_of(queue).profile):
        return "strips"
    if nvidia.verdict(queue, "quantized", "mma", kind.name, lambda queue: _tiles_are_right(queue, kind)):
        return "tiles"
    what = f"the matrix units gave a wrong result for {kind.name}, or the driver does not build their kernels"
    warnings.warn(message("quantized_linear", what, "portable kernels are used", device=handle_of(queue).device_name), stacklevel=2)
    return "strips"


# ---- kernels of strips


def _macros(kind: Kind, lanes: int, **more: Any) -> dict[str, Any]:
    signs = {"Q6_K": 2, "Q3_K": 2, "IQ4_XS": 2}.get(kind.name, 1) if "scales" in kind.fields else 0
    return {
        "PLAIN": ("F16", "BF16").index(kind.name) + 1 if kind.plain else 0, "BLOCK": record(kind)[0], "GROUP": kind.group,
        "LOW": kind.low[0], "HIGH": kind.high[0] if kind.high else 0, "OFFSET": kind.offset, "SCALES": signs,
        "MIN": int("m" in kind.fields), "CODEBOOK": int(kind.codebook), "V": lanes, **more,
    }  # fmt: skip


def _compiled(queue: Any, p: Packed, name: str, file: str, t: Operands, lanes: int, assembly: int, **more: Any) -> Any:
    clang = int(launch.fetches(queue))
    text = loose_halves("float16", lanes) if clang and lanes > 1 else ""
    quad = {"float32": "vload4(0, p)", "bfloat16": "as_float4(convert_uint4(vload4(0, p)) << 16)"}
    macros: dict[str, Any] = {"PICK(no, yes, mask)": "((mask) ? (yes) : (no))", **_macros(p.kind, lanes, CLANG=clang, ASM=assembly, **more)}
    macros["X_QUAD(p)"] = launch.QUADS[p.dtype] if alignment(t.x) == 16 else quad.get(p.dtype, launch.QUADS[p.dtype])
    operands = {"X": p.dtype, "Y": t.out.dtype, "BIAS": t.end[0].dtype}
    return launch.kernel(queue, __file__, f"codes.cl {file}", name, operands, macros, text)


@cache
def _instructions() -> int:
    """ASM of codes.cl: what processor and operating system of this machine have."""
    flag, found = _FLAGS.get(platform.machine(), ("", 0))
    listed = Path("/proc/cpuinfo")
    there = listed.exists() and flag in listed.read_text(encoding="utf-8", errors="replace").split()
    return found if platform.system() == "Linux" and there else 0


def _float(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: Operands) -> None:
    tokens, strips = min(p.tokens, _TOKENS), -(-p.rows // STRIP)
    numbers = (p.rows, p.columns, p.tokens, int(t.bias is not None))
    if launch.on_cpu_device(queue) and "SLICES" not in config.extra:
        assembly = _instructions() if _dot_trusted(queue, p.kind) else 0
        lanes = 16 if tokens == 1 or assembly == 1 else profile.lanes
        kernel = _compiled(queue, p, "strips_float", "float.cl", t, lanes, assembly, NB=tokens, SLICES=1)
        kernel(queue, strips * (STRIP // lanes), 1, t.weight, t.x, *t.end, *numbers)
        return
    wanted = max(1, profile.max_compute_units * 1024 // (4 * strips))  # enough work-items for latency of memory to hide
    slices = config.extra.get("SLICES") or next((n for n in (64, 32, 16) if n <= min(wanted, p.columns // 32)), 8)
    kernel = _compiled(queue, p, "strips_float", "float.cl", t, 4, 0, NB=tokens, SLICES=slices)
    kernel(queue, strips * 4 * slices, 4 * slices, t.weight, t.x, *t.end, *numbers)


def _dot(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: Operands, trusted: bool = False) -> None:
    assembly = _instructions() if trusted or _dot_trusted(queue, p.kind) else 0
    tokens, runs = min(p.tokens, _TOKENS), p.tokens * p.columns // 32
    lanes = 16 if tokens == 1 or assembly == 1 else 4
    codes, scales, sums = (
        Tensor.empty((n,), dtype, queue=queue) for n, dtype in ((32 * runs, "int8"), (runs, "float32"), (2 * runs, "int32"))
    )
    rounding = _compiled(queue, p, "round_activations", "dot.cl", t, lanes, 0)
    rounding(queue, p.tokens * -(-p.columns // 256), 1, t.x, codes, scales, sums, p.columns)
    distance, level = launch.ahead(queue) or (0, 3)
    kernel = _compiled(queue, p, "strips_dot", "dot.cl", t, lanes, assembly, NB=tokens, AHEAD=distance, LEVEL=level)
    numbers = (p.rows, p.columns, p.tokens, int(t.bias is not None))
    kernel(queue, -(-p.rows // STRIP) * (STRIP // lanes), 1, t.weight, codes, scales, sums, *t.end, *numbers)


def round_activations(x: np.ndarray) -> np.ndarray:
    """Activations as integer dot products see them: int8 times one scale per 32 columns."""
    runs = x.reshape(-1, 32).astype(np.float32)
    largest = np.abs(runs).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(runs * inverse).astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def _dot_trusted(queue: Any, kind: Kind) -> bool:
    """Whether kernels with instructions as assembly are right: PoCL drops those that its target lacks, without an error."""
    if not launch.fetches(queue) or not _instructions():
        return False
    return nvidia.verdict(queue, "quantized", "dot", kind.name, lambda queue: _checked(queue, kind, "strips", (1, _TOKENS)))


def _checked(queue: Any, kind: Kind, layout: str, counts: tuple[int, ...]) -> bool:
    """Whether a layout's own kernels give what NumPy does for a small product of each of these numbers of tokens."""
    rng, (rows, columns) = np.random.default_rng(0), (37, 512)
    blocks = quantize(rng.standard_normal((rows, columns), np.float32), kind)
    values = dequantize(blocks, kind, (rows, columns)).astype(np.float64)
    weight, profile = Tensor.from_host(queue, pack(blocks, kind, (rows, columns), layout)), handle_of(queue).profile
    for tokens in counts:
        x = rng.standard_normal((tokens, columns), np.float32)
        for dtype in ("float32",) if layout == "strips" else ("float32", "float16"):
            p = Packed(kind, layout, rows, columns, tokens, dtype)
            given = Tensor.from_host(queue, x, dtype)
            t = Operands(given, weight, None, Tensor.empty((tokens, rows), queue=queue))
            rounds = layout == "strips" and p.coded
            if layout == "tiles":
                _mma(queue, p, _DEFAULT, profile, t)
            elif p.coded:
                _dot(queue, p, _DEFAULT, profile, t, trusted=True)
            else:
                lanes = 16 if tokens == 1 else profile.lanes
                kernel = _compiled(queue, p, "strips_float", "float.cl", t, lanes, _instructions(), NB=tokens, SLICES=1)
                kernel(queue, 3 * (STRIP // lanes), 1, weight, given, *t.end, rows, columns, tokens, 0)
            exact = (round_activations(x) if rounds else given.to_host().astype(np.float64)) @ values.T
            bound = 2**-10 if layout == "tiles" and tokens > _FEW["gpu"] else 2**-18
            if not np.abs(t.out.to_host() - exact).max() <= bound * np.abs(exact).max():
                return False
    return True


def _tiles_are_right(queue: Any, kind: Kind) -> bool:
    return _checked(queue, kind, "tiles", (1, 3, 8, 33))


def _mma(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: Operands) -> None:
    raise NotImplementedError


# ---- unpacked weights


def unpack_rows(queue: Any, p: Packed, weight: Tensor, dtype: str, begin: int, count: int, listed: Tensor | None = None) -> Tensor:
    """Rows of the weights as values: those from ``begin`` on, or those of a list."""
    out = new_result((count, p.columns), dtype, queue)
    macros = _macros(p.kind, 1, CLANG=0, ASM=0, LISTED=int(listed is not None), TILES=int(p.layout == "tiles"))
    operands = {"Y": dtype, "INDEX": "int32" if listed is None else listed.dtype}
    kernel = launch.kernel(queue, __file__, "codes.cl unpack.cl", "unpack_rows", operands, macros)
    size = -(-count // STRIP) * STRIP * (p.columns // 32)
    kernel(queue, size, launch.LOCAL_1D, weight, out if listed is None else listed, out, p.rows, p.columns, begin, count)
    return out


def _pieces(p: Packed) -> Iterator[tuple[int, int]]:
    """First row and number of rows of the pieces that are unpacked at a time."""
    step = max(STRIP, _SCRATCH // (p.columns * DTYPES[p.dtype].itemsize) // STRIP * STRIP)
    return ((begin, min(step, p.rows - begin)) for begin in range(0, p.rows, step))


def _unpacked(queue: Any, p: Packed, config: KernelConfig, profile: Any, t: Operands) -> None:
    for begin, count in _pieces(p):
        bias = t.bias if t.bias is None or count == p.rows else take_block(t.bias, (count,), begin, (1,))
        piece = unpack_rows(queue, p, t.weight, p.dtype, begin, count)
        made = product(t.x, piece, (p.tokens, count), Extras(Finish(t.out.dtype), bias), False, True)
        copy_block((p.tokens, count), made, 0, (count, 1), t.out, begin, (p.rows, 1))


def gradient(queue: Any, p: Packed, g: Tensor, weight: Tensor) -> Tensor:
    """``g w`` for weights w and the gradient g of the results."""
    total: Tensor | None = None
    for begin, count in _pieces(p):
        part = g if count == p.rows else take_block(g, (p.tokens, count), begin, (p.rows, 1))
        finish = Finish(p.dtype, residual="" if total is None else p.dtype)
        total = product(part, unpack_rows(queue, p, weight, p.dtype, begin, count), (p.tokens, p.columns), Extras(finish, None, total))
    assert total is not None
    return total


# ---- the table


def _suits(p: Packed, profile: Any) -> bool:
    return p.layout == "strips" and p.dtype != "float64" and p.tokens <= _FEW["cpu" if profile.device_type == "cpu" else "gpu"]


def _tier(name: str, **extra: int) -> tuple[KernelConfig, ...]:
    return (KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": name, **extra}),)


algorithms.add(
    "quantized", "dot", "codes.cl dot.cl", "CPUs: integer dot products of int8 activations, lanes are rows", "", _dot,
    device="cpu", tiers=("dot",), needs="AVX-512 VNNI or NEON dot products, unless int8 activations are asked for",
    when=lambda p, config, profile: p.layout == "strips" and p.coded and p.activations != "float" and p.dtype != "float64",
    probe=lambda queue, p, config: p.activations == "int8" or _dot_trusted(queue, p.kind), samples=_tier("dot"),
)  # fmt: skip
algorithms.add(
    "quantized", "strips", "codes.cl float.cl", "a few tokens with floating-point activations, any kind", "", _float,
    tiers=("strips",), when=lambda p, config, profile: _suits(p, profile), samples=(*_tier("strips"), *_tier("strips", SLICES=4)),
)  # fmt: skip
algorithms.add(
    "quantized", "unpacked", "codes.cl unpack.cl", "many tokens: rows are unpacked in pieces, then multiplied", "", _unpacked,
    tiers=("unpacked", "strips", "dot", "mma"), samples=_tier("unpacked"),
)  # fmt: skip
