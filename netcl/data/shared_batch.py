"""Batches in memory shared by processes: a ring buffer of slots, filled by workers, read by the process that owns it.

The memory has no name in any file system: a worker gets it as an open file. The system releases the memory when the last process
that holds it ends, even if killed. If the system has ``posix_fallocate``, pages are reserved at creation: a lack of memory then raises
an error at creation, not a signal during a write.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from netcl.data.errors import message
from netcl.data.fetch import Field, check_batch

_LINE = 64  # bytes: what is written by one process and read by another starts on its own cache line


def _reserve(nbytes: int) -> int:
    """Create an unnamed file of ``nbytes``, with reserved pages where the system supports it; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("netcl-batches")  # not limited by /dev/shm, which is small in containers
    else:
        with tempfile.TemporaryFile() as named_no_more:
            file = os.dup(named_no_more.fileno())
    try:
        getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))(file, 0, nbytes)
    except (OSError, OverflowError) as error:
        os.close(file)
        what = "the memory for shared batches cannot be allocated"
        remedy = "use fewer workers, a smaller batch_size or prefetch, or use_shared_mem=False"
        raise MemoryError(message("SharedBatchRingBuffer", what, remedy, bytes=nbytes, reason=error)) from None
    return file


class SharedBatchRingBuffer:
    """Slots for batches of the same shapes and dtypes, in memory shared with workers.

    - **fields**: shape and dtype of the arrays of a batch, per sample.
    - **batch_size**: samples that fit into a slot.
    - **slots**: how many batches there may be at once.
    - **workers**: how many processes count their samples in ``beats``.

    >>> ring = SharedBatchRingBuffer([Field((2,), "float32"), Field((), "int64")], batch_size=4, slots=2)
    >>> slot = ring.acquire()
    >>> ring.put(slot, (np.ones((3, 2), np.float32), np.arange(3)))
    >>> x, y = ring.view(slot, 3)
    >>> x.shape, y.tolist(), ring.free
    ((3, 2), [0, 1, 2], 1)
    >>> ring.release(slot)
    >>> ring.close()
    """

    def __init__(self, fields: Sequence[Field], batch_size: int, slots: int, workers: int = 1, *, file: int | None = None):
        self.fields, self.batch_size, self.slots, self.workers = [Field(*field) for field in fields], batch_size, slots, workers
        nbytes = [batch_size * np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object)) for shape, dtype in self.fields]
        sizes = [-(-count // _LINE) * _LINE for count in nbytes]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._head, self._slot_bytes = workers * _LINE, sum(sizes)
        self.nbytes = self._head + slots * self._slot_bytes
        self._file = _reserve(self.nbytes) if file is None else file
        self._memory = mmap.mmap(self._file, self.nbytes)
        self.beats = np.frombuffer(self._memory, np.int64, workers * _LINE // 8)[:: _LINE // 8]
        self._free = deque(range(slots))

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def acquire(self) -> int:
        """Take a free slot for a batch; returns its number."""
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Release a slot whose batch has been read; views of it will change."""
        self._free.append(slot)

    def view(self, slot: int, count: int) -> tuple[np.ndarray, ...]:
        """Return the first ``count`` samples of a slot, not copied."""
        start = self._head + slot * self._slot_bytes
        return tuple(
            np.frombuffer(self._memory, field.dtype, count * int(np.prod(field.shape)), start + offset).reshape(count, *field.shape)
            for field, offset in zip(self.fields, self._offsets, strict=True)
        )

    def put(self, slot: int, arrays: tuple[np.ndarray, ...]) -> None:
        """Copy a batch to a slot; raises unless its samples have the shapes and dtypes of ``fields``."""
        count = len(arrays[0])
        check_batch(arrays, self.fields, min(count, self.batch_size))
        for place, array in zip(self.view(slot, count), arrays, strict=True):
            np.copyto(place, array)

    def send(self, connection: Any, pid: int) -> None:
        """Send the memory to the process at the other end of a pipe, which calls :meth:`receive`."""
        connection.send((self.fields, self.batch_size, self.slots, self.workers))
        reduction.send_handle(connection, self._file, pid)

    @classmethod
    def receive(cls, connection: Any) -> SharedBatchRingBuffer:
        """Return the ring buffer that the other process sent."""
        form = connection.recv()
        return cls(*form, file=reduction.recv_handle(connection))

    def close(self) -> None:
        """Release the memory; it is freed with its last view in the last process that holds it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            del self.beats, self._memory
