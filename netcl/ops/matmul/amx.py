"""Products on AMX, the tile registers of some x86 CPUs: a separate tier, enabled by ``NETCL_AMX=1`` or a configuration.

The kernels contain inline assembly, which a driver may reject. A device uses this tier only if the processor lists ``amx_bf16``, the
operating system grants the tile registers, the driver builds the kernels, and a product of odd sizes is correct. float32 operands are
split into ``terms`` bfloat16 values (:func:`terms_for`); all products of parts but low x low are summed.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache, partial
from pathlib import Path
from typing import Any

from netcl.core import env
from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.kernel_selector import KernelConfig, get_matmul_precision
from netcl.engine import algorithms
from netcl.ops.matmul import cpu, gemm, nvidia
from netcl.ops.matmul.gemm import Matmul, Operands

AMX_SPLIT_DEPTH = 1024
AMX_LEAST_WORK = 128**3  # multiply-adds: below, packing costs more than it saves
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_AMX_LANES = 16  # lanes of the epilogue's vectors
_PACKED_TILE = 512  # values of a packed tile: 16 x 32


@cache
def granted() -> bool:
    """Request the tile registers for this process; return whether processor and operating system grant them."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "amx_bf16" not in flags.read_text(encoding="utf-8", errors="replace").split():
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def terms_for(p: Matmul) -> int:
    """Return how many bfloat16 values an operand is split into; 0 if AMX does not suit the dtypes or is not exact enough."""
    if p.real != "float":
        return 0
    if p.a == p.b == "bfloat16":
        return 1
    if {p.a, p.b} - {"float32", "bfloat16"}:
        return 0
    precision = get_matmul_precision()
    return 1 if precision == "medium" else 2 if precision == "high" or p.k >= AMX_SPLIT_DEPTH else 0


def wants(p: Matmul, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether to use AMX: the configuration names it, or ``NETCL_AMX`` is set and AMX is exact enough and pays for this product."""
    if config.extra.get("tier") == "amx":
        return True
    return bool(p.batches * p.m * p.n * p.k >= AMX_LEAST_WORK and env.value("NETCL_AMX") and terms_for(p))


def _driver_works(queue: Any) -> bool:
    """Whether the driver builds the kernels and they are correct; checked once per context."""
    if profile_of(queue).has_quirk("no_amx"):
        return False

    def right(queue: object) -> bool:
        checks = ((partial(run, terms=terms, units=2), bound) for terms, bound in ((1, 2**-6), (2, 2**-14)))
        return all(nvidia.multiplies_right(queue, "float32", multiply, bound) for multiply, bound in checks)

    return nvidia.verdict(queue, "matmul", "amx", "float32", right, warns=False, apart=False)


def run(queue: Any, p: Matmul, t: Operands, terms: int, units: int) -> None:
    """Pack both operands and multiply; if they are split, recompute results that involve infinities or NaN."""
    rows, columns, depth = 2 * -(-p.m // 32), 2 * -(-p.n // 32), -(-p.k // 32)
    a_plane, b_plane = p.batches * rows * depth * _PACKED_TILE, p.batches * columns * depth * _PACKED_TILE
    first, flags = terms * a_plane, p.batches * rows
    direct = int(p.plain(p.c) and not p.has_bias and p.ending.plain and not p.scaled)
    macros: dict[str, Any] = {"TERMS": terms, "DIRECT": direct, "A_PLAIN": p.plain(p.a), "B_PLAIN": p.plain(p.b)}
    pack_a, pack_b, repair = (gemm.compiled(queue, "amx.cl", f"amx_{name}", p, **macros) for name in ("pack_a", "pack_b", "repair"))
    ends, functions = cpu.vector_ends(p, _AMX_LANES)
    multiply = gemm.compiled(
        queue, "vectors.cl line.cl amx.cl", "amx_multiply", p, _AMX_LANES, "".join(functions), {}, VW=_AMX_LANES, **macros, **ends
    )
    batch = p.batch[1]
    share = max(1, -(-4 * units // (columns // 2 * p.batches)))
    block = 2 * max(1, rows // 2 // share)
    packed, odd = t.sums(terms * (a_plane + b_plane) // 2), t.sums(p.batches * (rows + columns))
    pack_a(queue, (rows, p.batches), 1, t.a, packed, odd, p.m, p.k, *p.a_steps, batch, *p.a_strides, rows, depth, a_plane)
    where = (batch, *p.b_strides, columns, depth, b_plane, first, flags)
    pack_b(queue, (columns, p.batches), 1, t.b, packed, odd, p.n, p.k, *p.b_steps, *where)
    multiply(queue, (columns // 2, -(-rows // block), p.batches), 1, packed, *t.end,
             p.m, p.n, p.has_bias, rows, columns, depth, a_plane, b_plane, first, block, t.scale)  # fmt: skip
    if terms > 1:
        numbers = (*p.sizes(), *p.a_steps, *p.b_steps, p.has_bias, *p.strides(), rows, columns, flags)
        repair(queue, (columns, rows, p.batches), 1, t.a, t.b, *t.end, odd, *numbers, t.scale)


algorithms.add(
    "matmul", "amx", "amx.cl", "products of 128^3 multiply-adds and more, where NETCL_AMX=1 asks for it", "amx_intel.txt: matmul 1024",
    lambda queue, p, config, profile, t: run(queue, p, t, config.extra.get("terms") or terms_for(p) or 2, profile.max_compute_units),
    device="cpu", tiers=("amx",), variants=gemm.VARIANTS, needs="the tile registers of amx_bf16", when=wants,
    probe=lambda queue, p, config: granted() and _driver_works(queue), cost=algorithms.first,
)  # fmt: skip
