"""The device layout of packed weights: strips of 16 rows. The layout is lossless; :func:`unpack_strips` restores the blocks of GGUF.

A record holds one block of each row of a strip (F16 and BF16: 32 values of each row). Its fields follow each other, rows side by side::

    half d[16], half m[16], uchar scales[groups][16], uchar lower[groups][16], uint words[block / 32][words of 32 codes][16]

A word holds the low or high bits of codes that lie four apart, so that a shift and a mask extract four codes of a row (codes.cl). The
middle two of four 4-bit codes are exchanged. CPUs load 4 to 16 rows as a vector, portable GPU kernels 4 rows; matrix units load two rows
and a quarter of the columns per lane. Scales of 6 bits take a byte: Q4_K has 148 bytes per 256 weights, not 144. Codes of Q8_0 are signed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.ops.quantized.formats import Kind, Parts, join_blocks, kind_of, pack_codes, packed_shape, split_blocks, unpack_codes

STRIP_ROWS = 16
_PIECE_WEIGHTS = 1 << 22  # weights that are reordered at a time, in whole strips


def _record_fields(kind: Kind) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the bytes per row and the bytes per value of each field of a record."""
    if kind.plain:
        yield "low", 64, 2
        return
    groups = kind.block // kind.group
    sizes = {"d": (2, 2), "m": (2, 2), "scales": (groups, 1), "lower": (groups, 1)}
    there = {*kind.fields, "lower"} if {"m", "scales"} <= kind.fields.keys() else kind.fields
    yield from ((name, *size) for name, size in sizes.items() if name in there)
    yield "words", kind.block * kind.bits // 8, 4


def record_size(kind: Kind) -> tuple[int, int]:
    """Return the columns and bytes of a record."""
    return max(32, kind.block), sum(size for _, size, _ in _record_fields(kind)) * STRIP_ROWS


def device_bytes(kind: Kind, shape: tuple[int, int], op: str = "quantized_linear") -> int:
    """Return the bytes of packed weights, with rows padded to whole strips. Raises ``ShapeError`` for F32 and partial records."""
    step, size = record_size(kind)
    if shape[1] % step or kind.name == "F32":
        what = f"the columns of {kind.name} must be a multiple of {step}" if shape[1] % step else "packed weights must not be F32"
        raise ShapeError(message(op, what, "keep the layer unpacked, or choose another kind", columns=shape[1]))
    return -(-shape[0] // STRIP_ROWS) * (shape[1] // step) * size


def pack_strips(blocks: Any, kind: str | Kind, shape: tuple[int, int]) -> np.ndarray:
    """Pack the blocks of a matrix of ``shape`` into strips; returns a vector of bytes."""
    row = kind_of(kind, "quantized_linear")
    out = np.empty(device_bytes(row, shape), np.uint8).reshape(-(-shape[0] // STRIP_ROWS), -1)
    data: Any = np.ascontiguousarray(blocks).view(np.uint8).reshape(packed_shape(shape, row, "quantized_linear"))
    if shape[0] % STRIP_ROWS:
        data = np.concatenate([data, np.zeros((-shape[0] % STRIP_ROWS, data.shape[1]), np.uint8)])
    step = max(1, _PIECE_WEIGHTS // (STRIP_ROWS * shape[1]))
    for at in range(0, len(out), step):
        out[at : at + step] = _strips_of(data[at * STRIP_ROWS : (at + step) * STRIP_ROWS], row, shape[1])
    return out.reshape(-1)


def _strips_of(data: np.ndarray, kind: Kind, columns: int) -> np.ndarray:
    strips, records, made = len(data) // STRIP_ROWS, columns // record_size(kind)[0], []
    found: dict[str, Any] = {"low": data}
    if not kind.plain:
        parts = split_blocks(data.reshape(-1, kind.nbytes), kind)
        found = {**parts._asdict(), "words": np.concatenate(pack_codes(_in_fours(parts.codes.reshape(-1, 32), kind), kind, 4), axis=1)}
    for name, size, unit in _record_fields(kind):
        lines = np.ascontiguousarray(found[name]).view(np.uint8).reshape(strips, STRIP_ROWS, records, size // unit, unit)
        made.append(lines.transpose(0, 2, 3, 1, 4).reshape(strips, records, -1))
    return np.concatenate(made, axis=2).reshape(strips, -1)


def _in_fours(codes: np.ndarray, kind: Kind) -> np.ndarray:
    """Exchange the middle two of every four 4-bit codes, because matrix units pair bytes 0 and 2. A second call undoes the first."""
    return codes.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(codes.shape) if kind.bits == 4 else codes


def unpack_strips(packed: Any, kind: str | Kind, shape: tuple[int, int]) -> np.ndarray:
    """Return the blocks of packed weights, (rows, bytes of a row): the inverse of :func:`pack_strips`."""
    row, (rows, columns) = kind_of(kind, "quantized_linear"), shape
    strips, (step, size), at = -(-rows // STRIP_ROWS), record_size(row), 0
    lines, found = np.asarray(packed).reshape(strips, columns // step, size), {}
    for name, each, unit in _record_fields(row):
        part = lines[:, :, at : at + each * STRIP_ROWS].reshape(strips, columns // step, each // unit, STRIP_ROWS, unit)
        found[name], at = np.ascontiguousarray(part.transpose(0, 3, 1, 2, 4)).reshape(-1, each), at + each * STRIP_ROWS
    if row.plain:
        return found["low"].reshape(strips * STRIP_ROWS, -1)[:rows]
    d, m = (found[name].view(np.float16) if name in found else None for name in ("d", "m"))
    words, scales = found["words"].reshape(-1, 4 * row.bits), found.get("scales")
    planes = [words[:, 4 * at : 4 * (at + bits)] for at, bits, _ in row.planes]
    codes = _in_fours(unpack_codes(planes, row, 4).reshape(-1, row.block), row)
    if scales is not None and m is None:
        scales = scales.view(np.int8)
    assert d is not None
    return join_blocks(Parts(codes, d, m, scales, found.get("lower")), row).reshape(strips * STRIP_ROWS, -1)[:rows]
