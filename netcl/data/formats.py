"""Readers for IDX, CIFAR and NPY files, which check headers, sizes and limits."""

from __future__ import annotations

import gzip
import io
import math
import os
import tokenize
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from netcl.data.errors import FormatError, message

# https://yann.lecun.com/exdb/mnist: two zero bytes, the type, the number of axes, then their lengths, all big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 8
_STEP = 1 << 20
_EXPANSION, _FREE_BYTES = 200, 1 << 26  # a compressed file may expand to this many times its size, and a small one to these bytes
_NO_HEADER = (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError)

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def regular(path: str | os.PathLike[str], op: str, refuse: Callable[..., Exception] | None = None) -> Path:
    """Return the path; raises for a pipe or a device, because opening those may block. ``refuse`` creates the error."""
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        what, remedy = "the file must not be a pipe or a device", "name a regular file"
        raise refuse(op, what, remedy, file=found) if refuse else refused(op, what, found, remedy)
    return found


def limit_for(size: int, max_bytes: int | None) -> int:
    """Return how many bytes a file's content may take in memory: ``max_bytes``, by default 200 times ``size`` and at least 64 MiB."""
    return max_bytes if max_bytes is not None else max(_FREE_BYTES, _EXPANSION * size)


def read_idx(path: str | os.PathLike[str], max_bytes: int | None = None) -> np.ndarray:
    """Read the array of an IDX file, gzipped or not.

    - **max_bytes**: an array with more bytes raises before its values are read; by default 200 times the size of the file and at
      least 64 MiB.
    """
    path = regular(path, "read_idx")
    with path.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
        size = os.fstat(plain.fileno()).st_size
        plain.seek(0)
        file: Any = gzip.GzipFile(fileobj=plain) if zipped else plain
        try:
            return _idx(file, path, None if zipped else size, limit_for(size, max_bytes))
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise refused("read_idx", "a gzipped file must be complete and valid", path, reason=error) from None


def _idx(file: IO[bytes], path: Path, size: int | None, max_bytes: int) -> np.ndarray:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not 0 < head[3] <= _MOST_AXES:
        raise refused("read_idx", "the file must be an IDX file", path, begins=head.hex(" "))
    dtype, axes = np.dtype(_IDX_TYPES[head[2]]), head[3]
    lengths = file.read(4 * axes)
    if len(lengths) < 4 * axes:
        raise refused("read_idx", "the file must not end in its header", path, axes=axes)
    shape = tuple(int(n) for n in np.frombuffer(lengths, ">u4"))
    nbytes, head_bytes = math.prod(shape) * dtype.itemsize, 4 + 4 * axes
    if size is not None and size != head_bytes + nbytes:
        what = "the file must be as long as its header says"
        raise refused("read_idx", what, path, shape=shape, expected=head_bytes + nbytes, bytes=size)
    if nbytes > max_bytes:
        remedy = "if you trust the file, pass max_bytes="
        raise refused("read_idx", "the array must not exceed max_bytes", path, remedy, shape=shape, bytes=nbytes, max_bytes=max_bytes)
    body = np.empty(nbytes, np.uint8)  # pages are allocated as they are filled: memory grows with the actual content
    read = 0
    while read < nbytes and (part := file.readinto(body[read : read + _STEP])):  # type: ignore[attr-defined]
        read += part
    if read < nbytes or file.read(1):
        what = "the file must be as long as its header says" if read < nbytes else "the file must end after its last value"
        raise refused("read_idx", what, path, shape=shape, expected=nbytes, missing=nbytes - read)
    return body.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_cifar10(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3, 32, 32) and labels (N,), both uint8, of one file of CIFAR-10's binary version."""
    return _cifar("read_cifar10", path, (10,))


def read_cifar100(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3, 32, 32) and fine labels (N,), both uint8, of one file of CIFAR-100's binary version."""
    return _cifar("read_cifar100", path, (20, 100))


def _cifar(op: str, given: str | os.PathLike[str], classes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels. A record has a label for each entry of ``classes`` and 3 x 32 x 32 pixels; the last label is returned."""
    path = regular(given, op)
    size, record = path.stat().st_size, len(classes) + 3 * 32 * 32
    if not size or size % record:
        what = "the file must have one or more whole records"
        raise refused(op, what, path, "take the binary version of the set", bytes=size, record=record)
    records = np.fromfile(path, np.uint8).reshape(-1, record)
    for column, count in enumerate(classes):
        labels = records[:, column]
        if labels.max() >= count:
            row = int(np.argmax(labels >= count))
            what = f"a label must be below {count}"
            raise refused(op, what, path, record=row, label=int(labels[row]))
    return records[:, len(classes) :].reshape(-1, 3, 32, 32), labels


def npy_array(data: np.ndarray, refuse: Callable[..., Exception]) -> np.ndarray:
    """Parse the bytes of an NPY file to an array; ``refuse`` creates the error. Arrays of objects raise, because they are pickled."""
    try:
        dtype, fortran, shape, start = _npy_header(data)
    except _NO_HEADER as fault:
        raise refuse("an entry must be an NPY array", reason=f"{type(fault).__name__}: {fault}") from fault
    if dtype.kind not in "biufcU" or dtype.hasobject:
        raise refuse(f"an entry must hold numbers or strings, got dtype {dtype}", "objects are pickled, and pickles are never opened")
    if math.prod(shape) * dtype.itemsize != data.size - start:
        raise refuse("an entry must have as many bytes as its shape says", shape=shape, dtype=dtype, bytes=data.size - start)
    values = data[start:].copy() if start % max(dtype.alignment, 1) else data[start:]
    try:  # nothing may have sizes that no memory has
        return np.ascontiguousarray(values.view(dtype).reshape(shape[::-1]).T) if fortran else values.view(dtype).reshape(shape)
    except ValueError as fault:
        raise refuse("an entry must have a shape and a dtype that NumPy supports", shape=shape, dtype=dtype, reason=fault) from fault


def _npy_header(data: np.ndarray) -> tuple[np.dtype, bool, tuple[int, ...], int]:
    """Return the dtype, the order, the shape and the offset of the values in an NPY entry. NumPy's reader runs no code."""
    file = io.BytesIO(data[: 1 << 16].tobytes())
    if (version := np.lib.format.read_magic(file)) not in ((1, 0), (2, 0)):
        raise ValueError(f"an NPY array must have version 1.0 or 2.0, got {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 64:
        raise ValueError(f"the shape must be at most 64 non-negative integers, got {shape}")
    return dtype, fortran, shape, file.tell()


def refused(op: str, what: str, path: Any, remedy: str = "", **values: object) -> FormatError:
    """Build a :class:`FormatError` that names the file."""
    return FormatError(message(op, what, remedy, **values, file=path))
