"""The orders in which devices hold packed weights. Both are lossless: :func:`unpack` gives the blocks of GGUF back.

``strips`` serves every device. A strip is 16 rows; a record is one block of each of its rows (32 columns of plain kinds), field by field,
with the rows of a field side by side::

    half d[16], half m[16], uchar scales[groups][16], uchar lower[groups][16], uint words[block / 32][words of 32 codes][16]

A word holds the low or high bits of codes that lie four apart, so that four codes of a row come out of it with a shift and a mask
(codes.cl). Scales of 6 bits take a byte: Q4_K has 148 bytes per 256 weights instead of 144. Codes of Q8_0 are signed.

``tiles`` serves the matrix units of NVIDIA GPUs (mma.cl): tiles of 16 rows x 64 columns in the order of an mma fragment, then the scales of
all tiles, then those of their blocks of 256. With g = lane / 4 and t = lane % 4, a lane of 32 holds columns 8t to 8t + 7 of each 32, of rows
g and g + 8. F16 is row-major.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.ops.quantized.formats import Kind, Parts, join_blocks, kind_of, pack_bits, packed_shape, split_blocks, unpack_bits

STRIP = 16  # rows
LAYOUTS = ("strips", "tiles")
TILED = ("Q4_0", "Q8_0", "Q4_K", "F16")  # the kinds that have tiles
_PIECE_ROWS = 1 << 22  # weights that are re-ordered at a time, in whole strips
_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight codes in a word of a tile: mma.cl takes pairs out of it with one mask


def record(kind: Kind) -> tuple[int, int]:
    """Columns and bytes of a record of a strip."""
    return (32, 2 * 32 * STRIP) if kind.plain else (kind.block, sum(size for _, size, _ in _fields(kind)) * STRIP)


def _fields(kind: Kind) -> Iterator[tuple[str, int, int]]:
    """Name, bytes per row, and bytes that stay together of the fields of a record."""
    groups = kind.block // kind.group
    yield "d", 2, 2
    if "m" in kind.fields:
        yield "m", 2, 2
    if "scales" in kind.fields:
        yield "scales", groups, 1
        if "m" in kind.fields:
            yield "lower", groups, 1
    yield "words", kind.block * kind.bits // 8, 4


def check_layout(kind: Kind, layout: str, columns: int) -> None:
    """Raise ``ShapeError`` unless weights of so many columns can be held in a layout."""
    if layout not in LAYOUTS:
        raise ShapeError(message("quantized_linear", f"layout must be one of {', '.join(LAYOUTS)}", layout=repr(layout)))
    step = 64 if layout == "tiles" else record(kind)[0]
    if columns % step or kind.name == "F32" or (layout == "tiles" and kind.name not in TILED):
        what = f"{kind.name} is not held in {layout}" if columns % step == 0 else f"the columns of {kind.name} must be a multiple of {step}"
        raise ShapeError(message("quantized_linear", what, "keep the layer unpacked, or choose another kind", columns=columns))


def device_bytes(kind: Kind, shape: tuple[int, int], layout: str) -> int:
    """Bytes of weights of a shape on the device; rows are filled up to whole strips."""
    rows, (step, size) = -(-shape[0] // STRIP) * STRIP, record(kind)
    if layout == "strips":
        return rows // STRIP * (shape[1] // step) * size
    return rows * shape[1] // 256 * {"Q4_0": 144, "Q8_0": 272, "Q4_K": 148, "F16": 512}[kind.name]


def pack(blocks: Any, kind: str | Kind, shape: tuple[int, int], layout: str = "strips") -> np.ndarray:
    """The blocks of a matrix, (rows, bytes of a row), in the order of a layout: one line of bytes.

    >>> pack(np.zeros((3, 36), np.uint8), "Q4_0", (3, 64)).shape
    (576,)
    """
    row = kind_of(kind, "quantized_linear")
    check_layout(row, layout, shape[1])
    data = np.ascontiguousarray(blocks).view(np.uint8).reshape(packed_shape(shape, row, "quantized_linear"))
    if shape[0] % STRIP:
        data = np.concatenate([data, np.zeros((-shape[0] % STRIP, data.shape[1]), np.uint8)])
    if layout == "tiles":
        return _pack_tiles(data, row, shape[1])
    out = np.empty(device_bytes(row, shape, layout), np.uint8).reshape(len(data) // STRIP, -1)
    step = max(1, _PIECE_ROWS // (STRIP * shape[1]))
    for at in range(0, len(out), step):
        out[at : at + step] = _strips_of(data[at * STRIP : (at + step) * STRIP], row, shape[1])
    return out.reshape(-1)


def _strips_of(data: np.ndarray, kind: Kind, columns: int) -> np.ndarray:
    strips, records = len(data) // STRIP, columns // record(kind)[0]
    if kind.plain:
        return data.reshape(strips, STRIP, records, 32, 2).transpose(0, 2, 3, 1, 4).reshape(strips, -1)
    parts = split_blocks(data.reshape(-1, kind.nbytes), kind)
    found = {**parts._asdict(), "words": _words(parts.codes, kind)}
    made = []
    for name, size, unit in _fields(kind):
        lines = np.ascontiguousarray(found[name]).view(np.uint8).reshape(strips, STRIP, records, size // unit, unit)
        made.append(lines.transpose(0, 2, 3, 1, 4).reshape(strips, records, -1))
    return np.concatenate(made, axis=2).reshape(strips, -1)


def _planes(kind: Kind) -> list[tuple[int, int, int]]:
    """First bit, bits and distance of codes of the words of 32 codes."""
    low, high = kind.low[0], kind.high[0] if kind.high else 0
    return [(at, bits, 16 if bits == 4 else 4) for at, bits in ((0, low), (low, high)) if bits]


def _words(codes: np.ndarray, kind: Kind) -> np.ndarray:
    lines = codes.reshape(-1, 32)
    if kind.low[0] == 8:
        return lines ^ np.uint8(128)
    return np.concatenate([pack_bits(lines >> np.uint8(at), bits, run) for at, bits, run in _planes(kind)], axis=1)


def _codes(words: np.ndarray, kind: Kind) -> np.ndarray:
    """The inverse of :func:`_words`."""
    lines, codes, begin = words.reshape(-1, 4 * kind.bits), np.uint8(0), 0
    if kind.low[0] == 8:
        return (lines ^ np.uint8(128)).reshape(-1, kind.block)
    for at, bits, run in _planes(kind):
        codes = codes | (unpack_bits(np.ascontiguousarray(lines[:, begin : begin + 4 * bits]), bits, run) << np.uint8(at))
        begin += 4 * bits
    return np.asarray(codes).reshape(-1, kind.block)


def unpack(packed: Any, kind: str | Kind, shape: tuple[int, int], layout: str = "strips") -> np.ndarray:
    """The blocks of packed weights, (rows, bytes of a row): the inverse of :func:`pack`."""
    row, (rows, columns) = kind_of(kind, "quantized_linear"), shape
    data, strips = np.asarray(packed).reshape(-1), -(-rows // STRIP)
    if layout == "tiles":
        return _unpack_tiles(data, row, strips, columns)[:rows]
    step, size = record(row)
    records = columns // step
    lines = data.reshape(strips, records, size)
    if row.plain:
        return lines.reshape(strips, records, 32, STRIP, 2).transpose(0, 3, 1, 2, 4).reshape(strips * STRIP, -1)[:rows]
    found, at = {}, 0
    for name, each, unit in _fields(row):
        part = lines[:, :, at : at + each * STRIP].reshape(strips, records, each // unit, STRIP, unit)
        found[name], at = np.ascontiguousarray(part.transpose(0, 3, 1, 2, 4)).reshape(-1, each), at + each * STRIP
    return _joined(row, _codes(found.pop("words"), row), found)[: rows * records].reshape(rows, -1)


def _joined(kind: Kind, codes: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
    halves = {name: found[name].view(np.float16) for name in ("d", "m") if name in found}
    scales = found.get("scales")
    if scales is not None and "m" not in found:
        scales = scales.view(np.int8)
    return join_blocks(Parts(codes, halves["d"], halves.get("m"), scales, found.get("lower")), kind)


# ---- tiles: axes are (row tile, half of its rows, g, column tile, 32 of its 64 columns, t, column)


def _pack_tiles(data: np.ndarray, kind: Kind, columns: int) -> np.ndarray:
    if kind.plain:
        return data.reshape(-1)
    tiles, across = len(data) // STRIP, columns // 64
    parts = split_blocks(data.reshape(-1, kind.nbytes), kind)
    codes = parts.codes.reshape(tiles, 2, 8, across, 2, 4, 8)
    if kind.name == "Q8_0":
        quants = (codes ^ np.uint8(128)).transpose(0, 3, 4, 2, 5, 1, 6)
    else:
        quants = pack_bits(codes.transpose(0, 3, 2, 5, 4, 1, 6)[..., _NIBBLES].reshape(-1, 8), 4, 1)
    d = parts.d.view(np.uint8)
    if kind.name != "Q4_K":
        return _line(quants, d.reshape(tiles, 2, 8, across, 2, 2).transpose(0, 3, 2, 4, 1, 5))
    assert parts.m is not None and parts.scales is not None and parts.lower is not None
    both = np.stack([parts.scales, parts.lower], -1).reshape(tiles, 2, 8, across, 2, 2).transpose(0, 3, 2, 1, 4, 5)
    supers = np.concatenate([d, parts.m.view(np.uint8)], 1).reshape(tiles, 2, 8, across // 4, 4).transpose(0, 3, 2, 1, 4)
    return _line(quants, both, supers)


def _line(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(a).reshape(-1) for a in arrays])


def _unpack_tiles(data: np.ndarray, kind: Kind, tiles: int, columns: int) -> np.ndarray:
    if kind.plain:
        return data.reshape(tiles * STRIP, -1)
    across, bits = columns // 64, kind.bits
    count = tiles * across * 128 * bits
    if bits == 8:
        codes = data[:count].reshape(tiles, across, 2, 8, 4, 2, 8).transpose(0, 5, 3, 1, 2, 4, 6) ^ np.uint8(128)
    else:
        order = np.argsort(_NIBBLES)
        codes = unpack_bits(data[:count].reshape(-1, 4), 4, 1)[:, order].reshape(tiles, across, 8, 4, 2, 2, 8).transpose(0, 5, 2, 1, 4, 3, 6)
    codes, rest = np.ascontiguousarray(codes).reshape(-1, kind.block), data[count:]
    if kind.name != "Q4_K":
        d = np.ascontiguousarray(rest.reshape(tiles, across, 8, 2, 2, 2).transpose(0, 4, 2, 1, 3, 5)).reshape(-1, 2)
        return _joined(kind, codes, {"d": d}).reshape(tiles * STRIP, -1)
    both = rest[: tiles * across * 64].reshape(tiles, across, 8, 2, 2, 2).transpose(0, 3, 2, 1, 4, 5).reshape(-1, 8, 2)
    supers = rest[tiles * across * 64 :].reshape(tiles, across // 4, 8, 2, 4).transpose(0, 3, 2, 1, 4).reshape(-1, 4)
    parts = {"scales": both[..., 0], "lower": both[..., 1], "d": supers[:, :2], "m": supers[:, 2:]}
    return _joined(kind, codes, {name: np.ascontiguousarray(a) for name, a in parts.items()}).reshape(tiles * STRIP, -1)
