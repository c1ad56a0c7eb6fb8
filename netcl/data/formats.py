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
EXPANSION, FREE_BYTES = 200, 1 << 26  # a gzipped file may grow to this many times its size, and a small one to these bytes

CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue planes
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def regular(path: str | os.PathLike[str], op: str) -> Path:
    """The path, unless a pipe or a device has it: opening those may never return."""
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise _refused(op, "a pipe or a device has this name", found, "name a regular file")
    return found


def read_idx(path: str | os.PathLike[str], max_bytes: int | None = None) -> np.ndarray:
    """The array of an IDX file, gzipped or not.

    - **max_bytes**: a header that promises more is refused before anything is unpacked; by default 200 times the size of a gzipped file,
      which images never reach.
    """
    path = regular(path, "read_idx")
    with path.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
        size = os.fstat(plain.fileno()).st_size
        plain.seek(0)
        file: Any = gzip.GzipFile(fileobj=plain) if zipped else plain
        try:
            return _idx(file, path, None if zipped else size, max(FREE_BYTES, EXPANSION * size) if max_bytes is None else max_bytes)
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
    if size is not None and size != head_bytes + nbytes:
        raise _refused(
            "read_idx", "the file is not as long as its header says", path, shape=shape, expected=head_bytes + nbytes, bytes=size
        )
    if nbytes > max_bytes:
        remedy = "if you trust the file, pass max_bytes="
        raise _refused("read_idx", "the header promises more than is allowed", path, remedy, shape=shape, bytes=nbytes, max_bytes=max_bytes)
    body = np.empty(nbytes, np.uint8)  # pages are taken as they are filled: memory grows with what is there, not with the promise
    read = 0
    while read < nbytes and (part := file.readinto(body[read : read + _STEP])):  # type: ignore[attr-defined]
        read += part
    if read < nbytes or file.read(1):
        what = "the file is shorter than its header says" if read < nbytes else "the file goes on after its last value"
        raise _refused("read_idx", what, path, shape=shape, expected=nbytes, missing=nbytes - read)
    return body.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_cifar10(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels (N,), both uint8, of one file of CIFAR-10's binary version."""
    return _cifar("read_cifar10", path, (10,))


def read_cifar100(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and fine labels (N,), both uint8, of one file of CIFAR-100's binary version."""
    return _cifar("read_cifar100", path, (20, 100))


def _cifar(op: str, given: str | os.PathLike[str], classes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A file of records: a label for each of ``classes``, then red, green and blue planes of 32 x 32."""
    path = regular(given, op)
    size, record = path.stat().st_size, len(classes) + 3 * 32 * 32
    if not size or size % record:
        what = "the size is not a multiple of a record"
        raise _refused(op, what, path, "take the binary version of the set", bytes=size, record=record)
    records = np.fromfile(path, np.uint8).reshape(-1, record)
    for column, count in enumerate(classes):
        labels = records[:, column]
        if labels.max() >= count:
            row = int(np.argmax(labels >= count))
            what = f"a label is not one of {'ten' if count == 10 else count}"
            raise _refused(op, what, path, record=row, label=int(labels[row]))
    return records[:, len(classes) :].reshape(-1, 3, 32, 32), labels


def _refused(op: str, what: str, path: Path, remedy: str = "", **values: object) -> FormatError:
    return FormatError(message(op, what, remedy, **values, file=path))
