"""The block types of GGUF files in NumPy: ``quantize``, ``dequantize``, and the parts of a block.

A block of a quantized kind holds unsigned codes of 32 or 256 weights and the factors that convert them to values::

    weight = (d * scale) * (code - offset) + minimum        minimum = m, or -(m * lower) where groups have their own scales

``d`` and ``m`` are float16 and one per block; ``scale`` and ``lower`` are small integers and one per group. IQ4 kinds have values of
:data:`CODEBOOK` in place of ``code - offset``. :func:`split_blocks` returns the :class:`Parts` of blocks; :func:`join_blocks` is its
inverse. The values are bit-equal to those of the ``gguf`` package, and so are the blocks of kinds that it can quantize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from netcl.core.dtype import decode, encode, lookup
from netcl.core.errors import DtypeError, ShapeError, message

#: The values that codes of IQ4_NL and IQ4_XS select.
CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_BETWEEN = (CODEBOOK[1:].astype(np.float32) + CODEBOOK[:-1]) / 2  # halfway from one value to the next
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 1 << 21  # weights that are converted at a time: temporaries stay small
_TRIALS = 15  # candidates for the scale of a group


class Kind(NamedTuple):
    """A block type: its number in GGUF, weights per block, bytes of each field, and the constants of the module's formula.

    ``low`` and ``high`` are (bits, run): a byte of the field holds 8 / bits codes, which lie ``run`` codes apart. ``nbytes``: bytes of a
    block. ``bits``: bits of a code. ``plain`` kinds hold floating-point numbers. ``planes``: the first bit, the bits and the run of the low
    and, if there are any, the high parts of codes.
    """

    name: str
    number: int
    block: int
    fields: dict[str, int]
    low: tuple[int, int] = (16, 1)
    high: tuple[int, int] | None = None
    offset: int = 0
    group: int = 32
    codebook: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.fields.values())

    @property
    def plain(self) -> bool:
        return self.block == 1

    @property
    def bits(self) -> int:
        return self.low[0] + (self.high[0] if self.high else 0)

    @property
    def planes(self) -> list[tuple[int, int, int]]:
        return [(0, *self.low)] + ([(self.low[0], *self.high)] if self.high else [])


#: The block types by name.
BLOCK_TYPES = {
    name: Kind(name, number, block, {part.split(":")[0]: int(part.split(":")[1]) for part in fields.split()}, **more)
    for name, number, block, fields, more in (
        ("F32", 0, 1, "low:4", dict(low=(32, 1))),
        ("F16", 1, 1, "low:2", {}),
        ("BF16", 30, 1, "low:2", {}),
        ("Q4_0", 2, 32, "d:2 low:16", dict(low=(4, 16), offset=8)),
        ("Q4_1", 3, 32, "d:2 m:2 low:16", dict(low=(4, 16))),
        ("Q5_0", 6, 32, "d:2 high:4 low:16", dict(low=(4, 16), high=(1, 1), offset=16)),
        ("Q5_1", 7, 32, "d:2 m:2 high:4 low:16", dict(low=(4, 16), high=(1, 1))),
        ("Q8_0", 8, 32, "d:2 low:32", dict(low=(8, 1), offset=128)),
        ("Q2_K", 10, 256, "scales:16 low:64 d:2 m:2", dict(low=(2, 32), group=16)),
        ("Q3_K", 11, 256, "high:32 low:64 scales:12 d:2", dict(low=(2, 32), high=(1, 32), offset=4, group=16)),
        ("Q4_K", 12, 256, "d:2 m:2 scales:12 low:128", dict(low=(4, 32))),
        ("Q5_K", 13, 256, "d:2 m:2 scales:12 high:32 low:128", dict(low=(4, 32), high=(1, 32))),
        ("Q6_K", 14, 256, "low:128 high:64 scales:16 d:2", dict(low=(4, 64), high=(2, 32), offset=32, group=16)),
        ("IQ4_NL", 20, 32, "d:2 low:16", dict(low=(4, 16), codebook=True)),
        ("IQ4_XS", 23, 256, "d:2 scales:6 low:128", dict(low=(4, 16), codebook=True)),
    )
}
#: Their names by the number that GGUF gives them.
TYPE_NAMES = {kind.number: kind.name for kind in BLOCK_TYPES.values()}


class Parts(NamedTuple):
    """Decoded blocks, one row per block: codes (uint8), ``d`` and ``m`` (float16), a scale and a lower bound of each group."""

    codes: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    lower: np.ndarray | None = None

    def factors(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return scale and minimum (or ``None``) of each group as float32: (blocks, groups), or (blocks, 1) if a block is one group."""
        d = self.d.astype(np.float32)
        scale = d if self.scales is None else d * self.scales.astype(np.float32)
        if self.m is None:
            return scale, None
        m = self.m.astype(np.float32)
        return scale, m if self.lower is None else -(m * self.lower.astype(np.float32))


def kind_of(name: str | Kind, op: str = "quantize") -> Kind:
    """Return the block type of a name, which may be in upper or lower case; raises ``DtypeError`` for an unknown name."""
    if isinstance(name, Kind):
        return name
    found = BLOCK_TYPES.get(str(name).upper())
    if found is None:
        raise DtypeError(message(op, f"kind must be one of {', '.join(BLOCK_TYPES)}", kind=repr(name)))
    return found


def packed_shape(shape: Sequence[int], kind: str | Kind, op: str = "quantize") -> tuple[int, ...]:
    """Return the shape of packed weights: the last axis counts bytes instead of weights."""
    row = kind_of(kind, op)
    if not shape or shape[-1] % row.block:
        what = f"the last axis must be a multiple of {row.block}, the weights in a block of {row.name}"
        raise ShapeError(message(op, what, "choose another kind, or keep this tensor in F16", shape=tuple(shape)))
    return (*map(int, shape[:-1]), int(shape[-1]) // row.block * row.nbytes)


def unpack_bits(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Extract codes of ``bits`` each from bytes: a byte's codes lie ``run`` codes apart, its lowest bits first."""
    if bits == 8:
        return data
    codes = data.reshape(len(data), -1, 1, run) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (codes & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def pack_bits(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Pack codes of ``bits`` each into bytes: the inverse of :func:`unpack_bits`."""
    if bits == 8:
        return codes
    parts = (codes & np.uint8((1 << bits) - 1)).reshape(len(codes), -1, 8 // bits, run)
    return np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=2).reshape(len(codes), -1)


def unpack_codes(parts: Sequence[np.ndarray], kind: Kind, run: int = 0) -> np.ndarray:
    """Return the codes whose planes are ``parts``, with the runs of the kind or with ``run``; codes of 8 bits are signed in bytes."""
    codes = np.uint8(128 if kind.bits == 8 else 0)
    for data, (at, bits, own) in zip(parts, kind.planes, strict=True):
        codes = codes ^ (unpack_bits(data, bits, run or own) << np.uint8(at))
    return np.asarray(codes)


def pack_codes(codes: np.ndarray, kind: Kind, run: int = 0) -> list[np.ndarray]:
    """Return the planes of codes: the inverse of :func:`unpack_codes`."""
    signed = codes ^ np.uint8(128) if kind.bits == 8 else codes
    return [pack_bits(signed >> np.uint8(at), bits, run or own) for at, bits, own in kind.planes]


def _get_scales(s: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray | None]:
    """Return scales and lower bounds of the groups of each block; the packing depends on the kind."""
    if kind.name == "Q6_K":
        return s.view(np.int8), None
    if kind.name == "Q2_K":
        return s & np.uint8(15), s >> np.uint8(4)
    if kind.name in ("Q3_K", "IQ4_XS"):
        low, high, runs = (s[:, :8], s[:, 8:], (8, 4)) if kind.name == "Q3_K" else (s[:, 2:], s[:, :2], (1, 1))
        codes = unpack_bits(low, 4, runs[0]) | (unpack_bits(high, 2, runs[1]) << np.uint8(4))
        return codes.astype(np.int8) - np.int8(32), None
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 0x30)], axis=1)
    return scales, np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 0x30)], axis=1)


def _put_scales(kind: Kind, scales: np.ndarray, lower: np.ndarray | None) -> np.ndarray:
    """Pack scales and lower bounds of groups: the inverse of :func:`_get_scales`."""
    if kind.name == "Q6_K":
        return scales.view(np.uint8)
    if lower is None:
        codes = (scales + np.int8(32)).view(np.uint8)
        if kind.name == "Q3_K":
            return np.concatenate([pack_bits(codes, 4, 8), pack_bits(codes >> 4, 2, 4)], axis=1)
        return np.concatenate([pack_bits(codes >> 4, 2, 1), pack_bits(codes, 4, 1)], axis=1)
    if kind.name == "Q2_K":
        return scales | (lower << np.uint8(4))
    sides = [(part[:, :4] & 63) | ((part[:, 4:] >> 4) << 6) for part in (scales, lower)]
    return np.concatenate([*sides, (scales[:, 4:] & 15) | ((lower[:, 4:] & 15) << 4)], axis=1)


def split_blocks(blocks: np.ndarray, kind: Kind) -> Parts:
    """Split blocks, (count, bytes of a block), into their parts. ``plain`` kinds have none."""
    found, at = {}, 0
    for name, size in kind.fields.items():
        found[name], at = np.ascontiguousarray(blocks[:, at : at + size]), at + size
    codes = unpack_codes([found[name] for name in ("low", "high") if name in found], kind)
    m = found["m"].view(np.float16) if "m" in found else None
    return Parts(codes, found["d"].view(np.float16), m, *(_get_scales(found["scales"], kind) if "scales" in found else ()))


def join_blocks(parts: Parts, kind: Kind) -> np.ndarray:
    """Join parts into blocks: the inverse of :func:`split_blocks`."""
    made = dict(zip(("low", "high"), pack_codes(parts.codes, kind), strict=False))
    if parts.scales is not None:
        made["scales"] = _put_scales(kind, parts.scales, parts.lower)
    made["d"] = np.ascontiguousarray(parts.d).view(np.uint8)
    if parts.m is not None:
        made["m"] = np.ascontiguousarray(parts.m).view(np.uint8)
    return np.concatenate([made[name] for name in kind.fields], axis=1)


def dequantize(blocks: Any, kind: str | Kind, shape: Sequence[int]) -> np.ndarray:
    """Return the float32 values of packed weights; ``shape`` is that of the values, and its last axis holds whole blocks.

    >>> dequantize(quantize(np.ones((2, 32), np.float32), "Q8_0"), "Q8_0", (2, 32)).shape
    (2, 32)
    """
    row = kind_of(kind, "dequantize")
    data = np.frombuffer(blocks, np.uint8) if isinstance(blocks, (bytes, bytearray, memoryview)) else np.ascontiguousarray(blocks)
    data, expected = data.reshape(-1).view(np.uint8), math.prod(packed_shape(shape, row, "dequantize"))
    if data.size != expected:
        what = f"blocks must have {expected} bytes for this shape"
        raise ShapeError(message("dequantize", what, kind=row.name, shape=tuple(shape), bytes=data.size))
    data = data.reshape(-1, row.nbytes)
    out = np.empty((len(data), row.block), np.float32)
    step = max(1, _PIECE // row.block)
    for at in range(0, len(data), step):
        out[at : at + step] = _values(data[at : at + step], row)
    return out.reshape(tuple(shape))


def _values(blocks: np.ndarray, kind: Kind) -> np.ndarray:
    if kind.plain:
        row = lookup(_PLAIN_DTYPES[kind.name])
        return decode(blocks.view(row.storage), row).astype(np.float32, copy=False)
    parts = split_blocks(blocks, kind)
    scale, minimum = parts.factors()
    units = _units(parts.codes, kind).reshape(len(blocks), scale.shape[1], -1)
    made = scale[:, :, None] * units
    return (made if minimum is None else made + minimum[:, :, None]).reshape(len(blocks), -1)


def _units(codes: np.ndarray, kind: Kind) -> np.ndarray:
    """Return the numbers that the scale multiplies: ``code - offset``, or values of the codebook."""
    return CODEBOOK[codes].astype(np.float32) if kind.codebook else codes.astype(np.float32) - np.float32(kind.offset)


def quantize(array: Any, kind: str | Kind) -> np.ndarray:
    """Return the blocks of an array as uint8, (..., bytes of a row). The last axis must hold whole blocks.

    F32, F16 and BF16 are casts; other kinds require finite values. Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 round as GGUF's reference does. The
    others try several scales for each group and use the one with the smallest weighted squared error.
    """
    row = kind_of(kind)
    x = np.asarray(array)
    if x.dtype.kind != "f":
        raise DtypeError(message("quantize", "the array must have a floating-point dtype", dtype=x.dtype))
    shape = packed_shape(x.shape, row)
    x = np.ascontiguousarray(x, np.float32).reshape(-1, row.block)
    out = np.empty((len(x), row.nbytes), np.uint8)
    step = max(1, _PIECE // row.block)
    for at in range(0, len(x), step):
        part = x[at : at + step]
        made = encode(part, lookup(_PLAIN_DTYPES[row.name])) if row.plain else join_blocks(_quantized(part, row), row)
        out[at : at + step] = made.view(np.uint8)
    return out.reshape(shape)


def _quantized(x: np.ndarray, kind: Kind) -> Parts:
    if not np.isfinite(x).all():
        raise ValueError(message("quantize", "values must be finite", "remove NaN and infinity first", kind=kind.name))
    rounded = kind.block == 32 and not kind.codebook
    parts = (_round_blocks if rounded else _fit_groups)(x, kind)
    if not (np.isfinite(parts.d).all() and (parts.m is None or np.isfinite(parts.m).all())):
        largest = f"{np.abs(x).max():g}"
        raise ValueError(message("quantize", "the scale of every block must fit float16", "scale the weights down", largest=largest))
    return parts


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _half(d: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # _quantized raises
        return d.astype(np.float16)


def _round_blocks(x: np.ndarray, kind: Kind) -> Parts:
    """Return the parts of blocks, rounded as GGUF's reference does: the extreme values of a block determine its scale."""
    levels, m = (1 << kind.bits) - 1, None
    if kind.name == "Q8_0":
        d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        q = x * _inverse(d)
        whole = np.floor(np.abs(q))  # halves are rounded away from zero
        codes = (np.sign(q) * (whole + np.floor(2 * (np.abs(q) - whole)))).astype(np.int8).view(np.uint8) ^ np.uint8(128)
        return Parts(codes, _half(d))
    if "m" in kind.fields:
        m = x.min(axis=1, keepdims=True)
        d = (x.max(axis=1, keepdims=True) - m) / np.float32(levels)
        q = (x - m) * _inverse(d) + np.float32(0.5)
    else:
        d = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) / np.float32(-kind.offset)
        q = x * _inverse(d) + np.float32(kind.offset + 0.5)
    return Parts(np.trunc(q).astype(np.uint8).clip(0, levels), _half(d), None if m is None else _half(m))


def _fit_groups(x: np.ndarray, kind: Kind) -> Parts:
    """Return the parts. Scales and minima minimize the weighted squared error and are then rounded to multiples of ``d`` and ``m``."""
    x = x.reshape(len(x), -1, kind.group)
    weight, ranged = x * x + np.mean(x * x, axis=2, keepdims=True), "m" in kind.fields
    lowest = np.minimum(x.min(axis=2, keepdims=True), 0)
    span, top = x.max(axis=2, keepdims=True) - lowest, np.take_along_axis(x, np.abs(x).argmax(axis=2, keepdims=True), axis=2)
    edge, by = (float(CODEBOOK[0]), 1.0) if kind.codebook else (-float(kind.offset), kind.offset / 80)
    scale, minimum, best = np.zeros_like(top), np.zeros_like(top), np.full_like(top, np.inf)
    for step in range(_TRIALS):
        shrunk = np.float32((1 - 0.025 * step) / ((1 << kind.bits) - 1))
        tried = span * shrunk if ranged else top / np.float32(edge + by * (step - _TRIALS // 2))
        low = lowest * np.float32(1 - 0.025 * step) if ranged else np.zeros_like(top)
        error = (weight * np.square(tried * _units(_nearest((x - low) * _inverse(tried), kind), kind) + low - x)).sum(axis=2, keepdims=True)
        scale, minimum, best = (np.where(error < best, a, b) for a, b in ((tried, scale), (low, minimum), (error, best)))
    scale, minimum = scale[..., 0], minimum[..., 0]
    limit = np.float32({"Q2_K": 15, "Q6_K": -128}.get(kind.name, 63 if ranged else -32))
    d, m, scales, lower = _half(scale), None, None, None
    if "scales" in kind.fields:
        d, scales = _shared_scale(scale, limit)
    if ranged:
        m, lower = _shared_scale(-minimum, limit)
    parts = Parts(np.empty(0, np.uint8), d, m, scales, lower)
    factor, low = parts.factors()
    codes = _nearest((x if low is None else x - low[..., None]) * _inverse(factor)[..., None], kind)
    return parts._replace(codes=codes.reshape(len(x), -1))


def _shared_scale(values: np.ndarray, limit: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return a float16 per block and an integer per group whose products approximate ``values``; ``limit`` is the extreme integer."""
    d = _half(np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1) / limit)
    low, high = (0, limit) if limit > 0 else (limit, -limit - 1)
    return d, np.clip(np.rint(values * _inverse(d.astype(np.float32))), low, high).astype(np.uint8 if limit > 0 else np.int8)


def _nearest(units: np.ndarray, kind: Kind) -> np.ndarray:
    """Return the codes whose values are nearest to ``units``."""
    if kind.codebook:
        return np.searchsorted(_BETWEEN, units).astype(np.uint8)
    return np.clip(np.rint(units) + kind.offset, 0, (1 << kind.bits) - 1).astype(np.uint8)
