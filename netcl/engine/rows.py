"""Distributes the rows of softmax, normalization and loss kernels over a device, and launches these kernels.

A tensor is seen as ``(outer, n, inner)`` around the axis that is folded. ``inner == 1`` gives rows of contiguous elements,
anything else gives columns. The shared OpenCL text is ``rows.cl``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from netcl.core import dtype as dtypes
from netcl.core.device import profile_of
from netcl.core.kernels import program
from netcl.engine import launch, opencl_text
from netcl.engine.strided import alignment

RowSizes = tuple[int, int, int]
SHORT_ROW = 32  # elements; on a GPU, one work-item processes a row this short
MEDIUM_ROW = 1024  # up to this length a wave processes a row, above it a large work-group
QUAD_ROW = 128  # elements; a GPU reads rows of at least this length four elements at a time
MOST_HELD_REGISTERS = 64  # 32-bit registers of a work-item for the row it keeps
ITEM_WORK = 4096  # elements; a CPU's work-item processes this many, because starting one costs about a microsecond
MOST_WORK = 16384  # and at most this many, if there are enough rows for every core
PART_ITEMS = 512  # work-items per compute unit if every work-group leaves a partial result
MOST_FOLDING = 512  # work-items of a GPU that fold a channel; with more, each has too few registers for loads in flight
COLUMN_LOCAL = 64  # work-items of a group in column kernels on a GPU


class Spread(NamedTuple):
    """How rows are distributed: work-items per group, work-items that share a row, vector width, rows per work-item."""

    local: int
    group: int
    vec: int
    each: int
    held: int = 0  # vectors of a row that a work-item keeps in registers; 0: it rereads the row
    streams: bool = False  # results bypass a CPU's caches


def row_spread(cpu: bool, most: int, n: int, wide: bool, quads: bool = False) -> Spread:
    """Distribute rows. A CPU work-item processes one or more rows in vectors. A GPU uses a work-item for a short row, else a work-group.

    ``most`` is the largest work-group, ``n`` the length of a row; ``wide``: the elements have 8 bytes. ``quads``: each contiguous part
    of a row begins at a multiple of four elements. A GPU then loads four elements of a long row at a time and may keep them in registers.
    """
    if cpu:
        return Spread(1, 1, 8 if wide else 16, max(1, ITEM_WORK // max(n, 1)))
    if n <= SHORT_ROW:
        return Spread(min(64, most), 1, 1, 1)
    if quads and n % 4 == 0 and n >= QUAD_ROW:
        vectors = n // 4
        group = min(max(32, 1 << (-(-vectors // 4) - 1).bit_length()), 512, 1 << (most.bit_length() - 1))
        held = -(-vectors // group)
        return Spread(group, group, 4, 1, held if held * (8 if wide else 4) <= MOST_HELD_REGISTERS else 0)
    group = min(64 if n <= MEDIUM_ROW else 256, most)
    group = 1 << (group.bit_length() - 1)
    return Spread(group, group, 1, 1)


def part_spread(queue: Any, rows: int, n: int, operands: Mapping[str, str], args: Sequence[Any]) -> Spread:
    """Distribute rows over few groups. Each group processes many consecutive rows and stores a partial result."""
    cpu, most, units = device_of(queue)
    spread = row_spread(cpu, most, n, "float64" in operands.values(), n % 4 == 0 and aligned(args))
    if spread.group == 1 and not cpu:  # a wave shares even a short row: one partial result per work-item would be too many
        spread = Spread(min(32, most), min(32, most), 1, 1)
    groups = 8 * units if cpu else units * max(1, PART_ITEMS // spread.group)
    return spread._replace(each=-(-rows // groups), streams=streams(cpu, rows * n, operands))


def streams(cpu: bool, n: int, operands: Mapping[str, str]) -> bool:
    """Whether ``n`` elements of the result, operand ``Y``, should bypass a CPU's caches."""
    return cpu and "Y" in operands and n * dtypes.DTYPES[operands["Y"]].itemsize >= opencl_text.STREAM_BYTES


def device_of(queue: Any) -> tuple[bool, int, int]:
    """Return whether a queue's device is a CPU, its largest work-group and its compute units."""
    profile = profile_of(queue)
    return profile.device_type == "cpu", profile.max_work_group_size, profile.max_compute_units


def column_spread(queue: Any, wide: bool) -> Spread:
    """Distribute columns: a work-item processes a vector of columns on a CPU, a single column on a GPU. ``wide``: elements have 8 bytes."""
    cpu, most, _ = device_of(queue)
    return Spread(1, 1, 8 if wide else 16, 1) if cpu else Spread(min(COLUMN_LOCAL, most), 1, 1, 1)


def channel_spread(queue: Any, n: int, wide: bool, quads: bool = False) -> Spread:
    """Distribute folds of ``n`` elements: a work-item computes a fold on a CPU, a work-group on a GPU. Flags: see :func:`row_spread`."""
    cpu, most, _ = device_of(queue)
    if cpu:
        return Spread(1, 1, 8 if wide else 16, 1)
    vec = 4 if quads else 1
    group = min(max(32, 1 << max(0, -(-n // (4 * vec)) - 1).bit_length()), MOST_FOLDING, 1 << (most.bit_length() - 1))
    return Spread(group, group, vec, 1)


def vector_macros(operands: Mapping[str, str], real: str, vec: int, streams: bool = False) -> dict[str, str]:
    """Return the macros ``X_VLOAD(p, i)``, ``X_VSTORE(p, i, v)`` and ``X_VSTREAM(p, i, v)`` of each operand: vectors of ``vec`` ``real``.

    ``X_VSTREAM`` may bypass the caches if ``streams``; use ``X_VSTORE`` for values that are read again soon.
    """
    macros = {}
    for name, dtype in operands.items():
        row = dtypes.DTYPES[dtype]
        macros[f"{name}_VLOAD(p, i)"] = _vector_load(row, real, vec, name)
        macros[f"{name}_VSTORE(p, i, v)"] = plain = _vector_store(row, real, vec, name)
        lines = streams and row.c_storage == real and row.itemsize * vec == opencl_text.LINE
        macros[f"{name}_VSTREAM(p, i, v)"] = _STREAMED if lines else plain
    return macros


#: Stores a cache line past the caches if it is aligned. The other store is volatile, so that no compiler merges both into one
#: ordinary store.
_STREAMED = (
    f"if (((size_t)((p) + (i)) & {opencl_text.LINE - 1}) == 0) __builtin_nontemporal_store(v, (__global vec*)((p) + (i)));"
    " else ((__global volatile loose*)((p) + (i)))->lanes = (v)"
)


def _vector_load(row: dtypes.DType, real: str, vec: int, name: str) -> str:
    if vec == 1:
        return f"((REAL){name}_LOAD(p, i))"
    if row.name in dtypes.HALVES:
        text = f"load_{row.name}_{vec}((p) + (i))"
        return text if real == "float" else f"convert_{real}{vec}({text})"
    if row.c_storage == real:
        return "(((__global const loose*)((p) + (i)))->lanes)"
    return f"convert_{real}{vec}(vload{vec}(0, (p) + (i)))"


def _vector_store(row: dtypes.DType, real: str, vec: int, name: str) -> str:
    if vec == 1:
        return f"{name}_STORE(p, i, v)"
    if row.name in dtypes.HALVES:
        return f"store_{row.name}_{vec}({'v' if real == 'float' else f'convert_float{vec}(v)'}, (p) + (i))"
    if row.c_storage == real:
        return "((__global loose*)((p) + (i)))->lanes = (v)"
    return f"vstore{vec}(convert_{row.c_storage}{vec}(v), 0, (p) + (i))"


def row_kernel(
    queue: Any, module_file: str, cl_file: str, name: str, operands: Mapping[str, str], spread: Spread, defines: Mapping[str, Any]
) -> program.Kernel:
    """Return the kernel ``name`` of ``rows.cl`` and ``cl_file`` joined, for operands, a spread and further macros."""
    real = "double" if "float64" in operands.values() else "float"
    macros = vector_macros(operands, real, spread.vec, spread.streams)
    base: dict[str, int | str] = {"REAL": real, "LOCAL": spread.local, "GROUP": spread.group, "VEC": spread.vec, "HELD": spread.held,
                                  "FETCHES": int(launch.fetches(queue))}  # fmt: skip
    exp, text = launch.exponential(queue, real, spread.vec)
    if spread.vec > 1:  # a GPU, whose vectors have four elements, would load what is packed byte by byte
        halves = dict.fromkeys(dtype for dtype in operands.values() if dtype in dtypes.HALVES)
        text += "".join(opencl_text.loose_halves(dtype, spread.vec, packed=spread.vec > 4) for dtype in halves)
    return launch.kernel(queue, module_file, f"rows.cl {cl_file}", name, operands, {**base, **macros, **exp, **defines}, text)


def aligned(args: Sequence[Any]) -> bool:
    """Whether all tensors among a kernel's arguments are aligned to 16 bytes. Pool memory always is; a caller's array may not be."""
    return alignment(*(arg for arg in args if getattr(arg, "host_ref", None) is not None)) == 16


def run_rows(
    queue: Any, module_file: str, cl_file: str, name: str, operands: Mapping[str, str], rows: int, n: int, *args: Any, run: int = 0,
    **defines: Any,
) -> None:  # fmt: skip
    """Launch a kernel on rows of ``n`` elements, ``run`` of them contiguous (0: all). Last arguments: ``rows``, ``n``, rows per item."""
    cpu, most, units = device_of(queue)
    quads = (run or n) % 4 == 0 and aligned(args)
    spread = row_spread(cpu, most, n, "float64" in operands.values(), quads)
    if cpu:  # fewer and larger pieces, as long as every core gets several
        each = max(1, min(MOST_WORK // max(n, 1), -(-rows // (8 * units))))
        spread = spread._replace(each=each, streams=streams(cpu, rows * n, operands))
    if run not in (0, n):
        spread = spread._replace(held=0)
    kernel = row_kernel(queue, module_file, cl_file, name, operands, spread, defines)
    kernel(queue, -(-rows // spread.each) * spread.group, spread.local, *args, rows, n, spread.each)


def run_columns(
    queue: Any, module_file: str, cl_file: str, name: str, operands: Mapping[str, str], sizes: RowSizes, *args: Any, **defines: Any
) -> None:
    """Launch a kernel over the columns of ``(outer, n, inner)``; its last arguments are ``outer, n, inner``."""
    outer, n, inner = sizes
    spread = column_spread(queue, "float64" in operands.values())
    kernel = row_kernel(queue, module_file, cl_file, name, operands, spread, defines)
    kernel(queue, outer * -(-inner // spread.vec), spread.local, *args, outer, n, inner)


def around(shape: tuple[int, ...], axis: int) -> RowSizes:
    """Return ``(outer, n, inner)`` of a shape around an axis; a 0-d tensor is one row of one element.

    >>> around((2, 3, 4, 5), 1)
    (2, 3, 20)
    """
    shape = shape or (1,)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
