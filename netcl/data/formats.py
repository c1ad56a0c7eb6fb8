"""Files of the well-known image sets. Headers and sizes are checked against each other before memory is taken."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from netcl.data.errors import FormatError, message

# https://yann.lecun.com/exdb/mnist: two zero bytes, the type, the number of axes, then their lengths, all big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 8
_STEP = 1 << 20

CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue planes
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_idx(path: str | os.PathLike[str], max_bytes: int = 1 << 32) -> np.ndarray:
    """The array of an IDX file, gzipped or not.

    - **max_bytes**: a header that promises more is refused before anything is read.
    """
    path = Path(path)
    with path.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
        size = os.fstat(plain.fileno()).st_size
    try:
        with path.open("rb") as plain:
            file: Any = gzip.GzipFile(fileobj=plain) if zipped else plain
            return _idx(file, path, None if zipped else size, max_bytes)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _refused("read_idx", "the file is damaged", path, reason=error) from None


def _idx(file: IO[bytes], path: Path, size: int | None, max_bytes: int) -> np.ndarray:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not 0 < head[3] <= _MOST_AXES:
        raise _refused("read_idx", "this is not an IDX file", path, begins=head.hex(" "))
    dtype, axes = np.dtype(_IDX_TYPES[head[2]]), head[3]
    lengths = file.read(4 * axes)
    if len(lengths) < 4 * axes:
        raise _refused("read_idx", "the file ends in its header", path, axes=axes)
    shape = tuple(int(n) for n in np.frombuffer(lengths, ">u4"))
    nbytes, head_bytes = math.prod(shape) * dtype.itemsize, 4 + 4 * axes
    if nbytes > max_bytes:
        raise _refused("read_idx", "the header promises more than is allowed", path, shape=shape, bytes=nbytes, max_bytes=max_bytes)
    if size is not None and size != head_bytes + nbytes:
        raise _refused(
            "read_idx", "the file is not as long as its header says", path, shape=shape, expected=head_bytes + nbytes, bytes=size
        )
    body = _exactly(file, nbytes, path, shape)
    return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _exactly(file: IO[bytes], nbytes: int, path: Path, shape: tuple[int, ...]) -> bytes:
    """The rest of a file, in steps: memory grows with what is really there, not with what a header promises."""
    parts, left = [], nbytes
    while left and (part := file.read(min(_STEP, left))):
        parts.append(part)
        left -= len(part)
    if left or file.read(1):
        what = "the file is shorter than its header says" if left else "the file goes on after its last value"
        raise _refused("read_idx", what, path, shape=shape, expected=nbytes, missing=left)
    return b"".join(parts)


def read_cifar10(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels (N,), both uint8, of one file of CIFAR-10's binary version."""
    path = Path(path)
    size = path.stat().st_size
    if not size or size % CIFAR10_RECORD:
        what = "the size is not a multiple of a record"
        raise _refused("read_cifar10", what, path, "take the binary version of the set", bytes=size, record=CIFAR10_RECORD)
    records = np.fromfile(path, np.uint8).reshape(-1, CIFAR10_RECORD)
    labels = records[:, 0]
    if labels.max() >= len(CIFAR10_CLASSES):
        row = int(np.argmax(labels >= len(CIFAR10_CLASSES)))
        raise _refused("read_cifar10", "a label is not one of ten", path, record=row, label=int(labels[row]))
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _refused(op: str, what: str, path: Path, remedy: str = "", **values: object) -> FormatError:
    return FormatError(message(op, what, remedy, **values, file=path))
