"""GGUF files, versions 2 and 3: metadata and memory-mapped tensors, read as untrusted input, and written.

The layout is that of ggml's specification: a header, key-value pairs, descriptions of tensors, padding, data. Every count, length and
offset is checked against the file's size before memory is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.io.archive import FileError, refusal, regular_file, replacing
from netcl.models.config import MOST_ELEMENTS
from netcl.ops.quantized.formats import BLOCK_TYPES, TYPE_NAMES, Kind, dequantize, kind_of, packed_shape, quantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Metadata types by number: how ``struct`` reads them.
METADATA_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _MOST_NESTED = 8, 9, 4
_NUMBER_OF = {np.dtype(code): number for number, code in METADATA_CODES.items()}
#: Tensor types that are no weights; ggml's numbers.
_NUMBER_TYPES = {24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64"}


class TensorPlace(NamedTuple):
    """A tensor of a file: its shape (NumPy's order), type, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


class _Cursor:
    """Reads a buffer from front to back and never beyond its end."""

    def __init__(self, buffer: Any, path: Any):
        self.buffer, self.path, self.at, self.size = buffer, path, 0, len(buffer)

    def refusal(self, what: str, **values: object) -> FileError:
        return refusal("gguf", what, "the file is damaged, or is not a GGUF file", file=self.path, at=self.at, **values)

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self.refusal("the file must not be truncated", needed=count, left=self.size - self.at)
        self.at += count
        return self.buffer[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read a count of items of at least ``least_bytes`` each; raises if the file is too short for that many."""
        found = self.number("Q")
        if found > (self.size - self.at) // least_bytes:
            raise self.refusal(f"the file must be long enough for its number of {what}", given=found, left=self.size - self.at)
        return found

    def text(self, strict: bool = True) -> str:
        raw = self.take(self.count("bytes in a string", 1))
        try:
            return raw.decode("utf-8", "strict" if strict else "surrogateescape")
        except UnicodeDecodeError:
            raise self.refusal("keys and names of tensors must be valid UTF-8", given=raw[:40]) from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(strict=False)
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in METADATA_CODES:
            raise self.refusal("unknown type of metadata", type=kind)
        return self._numbers(kind, 1)[0].item()

    def _array(self, depth: int) -> Any:
        kind = self.number("I")
        if depth >= _MOST_NESTED:
            raise self.refusal(f"arrays of metadata must be nested at most {_MOST_NESTED} deep")
        if kind in METADATA_CODES:
            return self._numbers(kind, self.count("array elements", np.dtype(METADATA_CODES[kind]).itemsize))
        count = self.count("array elements", 8 if kind == _STRING else 12)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(METADATA_CODES[kind])
        raw = np.frombuffer(self.take(count * dtype.itemsize), np.uint8 if kind == 7 else dtype.newbyteorder("<"))
        if kind == 7 and count and raw.max() > 1:
            raise self.refusal("a bool must be 0 or 1", given=int(raw.max()))
        return raw.astype(dtype)


class GGUFFile:
    """An opened GGUF file: ``version``, ``metadata`` by key, and tensors by name, which stay on the disk until they are read.

    ``shapes`` (in NumPy's order of axes) and ``kinds`` (GGUF types) have the names of all tensors.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with open(regular_file(path, "gguf"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        cursor = _Cursor(self._map, self.path)
        if (begin := cursor.take(4)) != MAGIC:
            raise cursor.refusal("the file must begin with GGUF", given=begin)
        self.version = cursor.number("I")
        if self.version not in VERSIONS:
            raise refusal("gguf", "the file must have version 2 or 3, little-endian", "convert the file", file=path, version=self.version)
        tensors = cursor.count("tensors", 32)
        pairs = cursor.count("metadata pairs", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            if key in self.metadata:
                raise cursor.refusal("keys of the metadata must be unique", key=repr(key))
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.alignment = found = self.metadata.get("general.alignment", 32)
        if not isinstance(found, int) or isinstance(found, bool) or not 8 <= found <= 1 << 20 or found & (found - 1):
            raise cursor.refusal("general.alignment must be a power of two from 8 to 2**20", given=found)
        rows = [self._description(cursor) for _ in range(tensors)]
        self.tensors = self._places(cursor, rows)
        self.shapes = {name: place.shape for name, place in self.tensors.items()}
        self.kinds = {name: place.kind for name, place in self.tensors.items()}

    def _description(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = cursor.text(), cursor.number("I")
        if not name or rank > 4:
            raise cursor.refusal("a tensor must have a name and at most 4 axes", name=repr(name), axes=rank)
        sizes = [cursor.number("Q") for _ in range(rank)]
        if any(not 0 < n < MOST_ELEMENTS for n in sizes):
            raise cursor.refusal("the sizes of a tensor must be from 1 to 2**31 - 1", name=repr(name), sizes=sizes)
        return name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")

    def _places(self, cursor: _Cursor, rows: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, TensorPlace]:
        begin = -(-cursor.at // self.alignment) * self.alignment
        if begin <= cursor.size and any(cursor.take(begin - cursor.at)):  # bytes were lost or added: all tensors would be shifted
            raise cursor.refusal("the padding before the tensors must be zeros")
        found: dict[str, TensorPlace] = {}
        for name, shape, number, offset in rows:
            if name in found:
                raise cursor.refusal("names of tensors must be unique", name=repr(name))
            kind, nbytes = _bytes_of(shape, number, name, self.path)
            if offset % self.alignment or begin + offset + nbytes > cursor.size:
                what = f"a tensor must be inside the file, with an offset divisible by {self.alignment}"
                raise cursor.refusal(what, name=repr(name), offset=offset, bytes=nbytes, room=cursor.size - begin)
            found[name] = TensorPlace(shape, kind, begin + offset, nbytes)
        end = 0
        for name, place in sorted(found.items(), key=lambda item: item[1].start):
            if place.start < end:
                raise cursor.refusal("tensors must not overlap", name=repr(name), start=place.start, free_from=end)
            end = place.start + place.nbytes
        return found

    def packed(self, name: str) -> np.ndarray:
        """Return a tensor's bytes as stored in the file, read-only."""
        place = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, place.nbytes, place.start)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor's values: F32, F16, float64 and integers as views of the file, other types as float32."""
        place = self.tensors[name]
        plain = {"F32": "<f4", "F16": "<f2"}.get(place.kind, place.kind if place.kind in _NUMBER_TYPES.values() else None)
        if plain is not None:
            return self.packed(name).view(np.dtype(plain).newbyteorder("<")).reshape(place.shape)
        return dequantize(self.packed(name), place.kind, place.shape)


def _bytes_of(shape: tuple[int, ...], number: int, name: str, path: Any) -> tuple[str, int]:
    if number in _NUMBER_TYPES:
        return _NUMBER_TYPES[number], math.prod(shape) * np.dtype(_NUMBER_TYPES[number]).itemsize
    if number not in TYPE_NAMES:
        remedy = f"known are {', '.join(BLOCK_TYPES)}; quantize the model again to one of them"
        raise refusal("gguf", "unknown type of a tensor", remedy, file=path, name=repr(name), type=number)
    kind = BLOCK_TYPES[TYPE_NAMES[number]]
    if (shape[-1] if shape else 1) % kind.block:
        raise refusal("gguf", f"rows of {kind.name} must hold whole blocks of {kind.block}", file=path, name=repr(name), shape=shape)
    return kind.name, math.prod(shape) // kind.block * kind.nbytes


# ---- writing


class NewTensor(NamedTuple):
    """A tensor to write: its shape, the type it gets, and a function that returns its values or, as uint8, its blocks of that type."""

    shape: tuple[int, ...]
    kind: Kind
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return math.prod(packed_shape(self.shape, self.kind, "gguf")) if self.shape else self.kind.nbytes

    def packed(self) -> np.ndarray:
        """Return the values as the bytes of the file."""
        made = np.asarray(self.make())
        if made.dtype == np.uint8:
            return made
        return quantize(made.astype(np.float32, copy=False).reshape(self.shape or (1,)), self.kind)


def _encoded_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _encoded_value(value: Any, key: str) -> bytes:
    """Return the bytes of a metadata value with its type; ints become uint32 (int32 below 0, 64 bits if needed), floats float32."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _encoded_text(value)
    if type(value) in (bool, float):
        value = np.bool_(value) if type(value) is bool else np.float32(value)
    elif isinstance(value, int):
        sizes = (("I", 0, 2**32), ("i", -(2**31), 0), ("q", -(2**63), 2**63), ("Q", 0, 2**64))
        value = next(np.dtype(code).type(value) for code, low, high in sizes if low <= value < high)
    if isinstance(value, np.generic | np.ndarray):
        number = _NUMBER_OF.get(value.dtype)
        if number is None or value.ndim > 1:
            raise refusal("gguf", "metadata arrays must be vectors of numbers", key=repr(key), shape=value.shape, dtype=value.dtype)
        head = struct.pack("<IIQ", _ARRAY, number, value.size) if value.ndim else struct.pack("<I", number)
        return head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, list | tuple):
        parts = [_encoded_value(part, key) for part in value]
        kinds = {part[:4] for part in parts} or {struct.pack("<I", _STRING)}
        if len(kinds) > 1:
            raise refusal("gguf", "the values of a metadata list must have one GGUF type", key=repr(key), given=f"{value!r:.80}")
        return struct.pack("<I", _ARRAY) + kinds.pop() + struct.pack("<Q", len(parts)) + b"".join(part[4:] for part in parts)
    raise refusal("gguf", "metadata must be numbers, bools, strings, or lists or arrays of them", key=repr(key), given=type(value).__name__)


def write_gguf(path: str | os.PathLike[str], metadata: Mapping[str, Any], tensors: Mapping[str, NewTensor], version: int = 3) -> None:
    """Write a GGUF file, atomically; values are made one tensor at a time."""
    alignment = int(metadata.get("general.alignment", 32))
    with replacing(path) as file:
        file.write(MAGIC + struct.pack("<IQQ", version, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_encoded_text(key) + _encoded_value(value, key))
        offset = 0
        for name, tensor in tensors.items():
            sizes = tuple(reversed(tensor.shape))
            file.write(_encoded_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind.number, offset))
            offset += -(-tensor.nbytes // alignment) * alignment
        file.write(b"\0" * (-file.tell() % alignment))
        for tensor in tensors.values():
            file.write(tensor.packed().tobytes())
            file.write(b"\0" * (-file.tell() % alignment))


def storage_kind(name: str, shape: tuple[int, ...], kind: str) -> Kind:
    """Return a tensor's type in a file of ``kind``: F32 for vectors, norms, routers and positions, F16 for rows with partial blocks."""
    if len(shape) < 2 or "norm" in name or "ffn_gate_inp" in name or "position_embd" in name:
        return kind_of("F32")
    wanted = kind_of(kind, "gguf")
    return wanted if shape[-1] % wanted.block == 0 else kind_of("F16")
