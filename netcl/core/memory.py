"""Device memory: the pools of buffers, and checks of how a device shares memory with the host.

A new buffer costs several times as much as a reused one (page faults on CPUs, first use on GPUs), so buffers are recycled:
small ones by size, large ones as sub-buffers of segments (:mod:`netcl.core.arena`). A lease ends when its
:class:`BufferHandle` is released or dropped; tensors that share a buffer share the handle.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from netcl.core import env, host_memory, platforms, recording
from netcl.core.arena import Arena
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, ShapeError, message
from netcl.core.kernels import program
from netcl.core.queue_state import free_memory, pools, queue_state

SMALLEST_BUCKET = 1 << 10
LARGEST_BUCKET = 256 << 20
LARGE = 256 << 10  # bytes from which a tensor is a piece of a segment: finding one takes 3 us, an op of this size more than ten times that
GRAIN = 1 << 10  # bytes; pieces are multiples of it. The alignment of sub-buffers on every known device divides it
PINNED_CAP = 1 << 30  # bytes of free page-locked memory that a pool keeps at most: the operating system cannot use them
_MOST_SHELVES = 8192  # cached sizes: a program whose sizes keep changing must not grow without bound


@dataclass
class PoolStats:
    """Counters of a pool: leases from the free lists and from the driver, bytes allocated, bytes free."""

    hits: int = 0
    misses: int = 0
    bytes_allocated: int = 0
    bytes_cached: int = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Shelf:
    """The free list of one buffer size. ``append`` and ``pop`` are atomic, so it needs no lock.

    If ``plain``, a released buffer is appended to the list. Otherwise the pool decides whether to keep it.
    """

    __slots__ = ("bucket", "free", "hits", "made", "plain", "pool")

    def __init__(self, pool: Any, bucket: int, plain: bool = True):
        self.pool = pool
        self.bucket = bucket
        self.free: Any = []
        self.hits = 0
        self.made = 0
        self.plain = plain

    def lease(self, nbytes: int, what: str = "") -> BufferHandle:
        """Lease a free buffer, or a new one; ``what`` names the tensor in an out-of-memory message."""
        try:
            buffer = self.free.pop()
        except IndexError:
            return self.pool._fresh(self, nbytes, what)
        self.hits += 1
        return BufferHandle(self, buffer, nbytes)

    def take_back(self, buffer: Any) -> None:
        """Receive the buffer of a lease that ended."""
        if self.plain:
            self.free.append(buffer)
        else:
            self.pool._take_back(self, buffer)

    def part(self, buffer: Any, offset: int, nbytes: int) -> Any:
        """Return a sub-buffer of a leased buffer; the buffer itself if the range is all of it."""
        return buffer if (offset, nbytes) == (0, self.bucket) else _sub_buffer(buffer, offset, nbytes)


class BufferHandle:
    """A lease of a buffer. It ends with ``release`` or when the last reference is dropped; the buffer then returns to its shelf."""

    __slots__ = ("__weakref__", "buffer", "nbytes", "persistent", "shelf")

    def __init__(self, shelf: Shelf, buffer: Any, nbytes: int):
        self.shelf = shelf
        self.buffer = buffer
        self.nbytes = nbytes
        self.persistent = False
        if recording.listening:
            recording.allocated(self)

    @property
    def pool(self) -> Any:
        """The pool that owns the buffer."""
        return self.shelf.pool

    @property
    def bucket(self) -> int:
        """The size of the buffer, in bytes."""
        return self.shelf.bucket

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a sub-buffer, which must not outlive the lease; the whole buffer if the pool does not use sub-buffers."""
        return self.shelf.part(self.buffer, offset, nbytes) if self.pool.cuts else self.buffer

    def release(self) -> None:
        """Return the buffer to its pool; does nothing if it was returned before or the lease is persistent."""
        if self.buffer is not None and not self.persistent:
            buffer, self.buffer = self.buffer, None
            self.shelf.take_back(buffer)

    def __del__(self) -> None:
        try:
            buffer = self.buffer
        except AttributeError:  # a daemon thread that ended inside __init__, at exit
            return
        if buffer is not None:
            self.buffer = None
            shelf = self.shelf
            if shelf.plain:
                shelf.free.append(buffer)
            else:
                shelf.take_back(buffer)


def power_of_two(nbytes: int) -> int:
    """Round up to the bucket size of :class:`BufferPool`: a power of two, at least the smallest bucket."""
    return max(SMALLEST_BUCKET, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else SMALLEST_BUCKET


@lru_cache(maxsize=8192)
def eighth_steps(nbytes: int) -> int:
    """Round up to a bucket size: powers of two up to 64 KB, four sizes per doubling up to 256 MB, then multiples of 32 MB."""
    if nbytes <= 1 << 16:
        return power_of_two(nbytes)
    step = min(1 << (nbytes - 1).bit_length(), LARGEST_BUCKET) >> 3
    return -(-nbytes // step) * step


class BufferPool:
    """Free lists of device buffers keyed by power-of-two sizes; it grows as needed and shrinks by :meth:`clear`.

    Reuse is safe for work on one in-order queue: give every queue a pool of its own.

    >>> from netcl.core.device import manager
    >>> context = manager.default("cl").context  # doctest: +SKIP
    >>> handle = BufferPool(context).allocate(4096)  # doctest: +SKIP
    """

    cuts = False  # whether large buffers are sub-buffers of segments

    def __init__(self, context: Any):
        cl = platforms.opencl()
        if not isinstance(context, cl.Context):
            what, remedy = "context must be an OpenCL context", "pass handle.context of an OpenCL device"
            raise DeviceError(message("BufferPool", what, remedy, context=context))
        self.context = context
        self._shelves: dict[int, Shelf] = {}
        self._by_size: dict[int, Shelf] = {}
        self._misses = self._held = 0
        self._lock = threading.RLock()
        self.limit = int(context.devices[0].max_mem_alloc_size)
        self._on_host = bool(context.devices[0].type & cl.device_type.CPU)
        self._create = cl.Buffer
        self._flags = cl.mem_flags.READ_WRITE
        pools.add(self)

    @property
    def stats(self) -> PoolStats:
        """The current counters."""
        shelves = list(self._shelves.values())
        cached = sum(len(shelf.free) * shelf.bucket for shelf in shelves)
        return PoolStats(sum(shelf.hits for shelf in shelves), self._misses, self._held, cached)

    def shelf(self, nbytes: int) -> Shelf:
        """Return the shelf of the bucket that a request of ``nbytes`` belongs to."""
        if nbytes < 0:
            raise ShapeError(message("allocate", "nbytes must not be negative", nbytes=nbytes))
        with self._lock:
            if len(self._by_size) >= _MOST_SHELVES:
                self._by_size.clear()
            shelf = self._by_size[nbytes] = self._shelf_of(nbytes)
            return shelf

    def bucket_of(self, nbytes: int) -> int:
        """Return the bucket size of a request of ``nbytes``."""
        return power_of_two(nbytes)

    def _shelf_of(self, nbytes: int) -> Shelf:
        bucket = self.bucket_of(nbytes)
        if bucket not in self._shelves:
            self._shelves[bucket] = Shelf(self, bucket)
        return self._shelves[bucket]

    def allocate(self, nbytes: int, flags: Any = None, what: str = "") -> BufferHandle:
        """Lease at least ``nbytes``. A buffer with other ``flags`` than the pool's is not pooled. ``what`` names the tensor in an error."""
        if flags is not None and flags != self._flags:
            return self._adopt(self._new(nbytes, flags, what), nbytes)
        try:
            shelf = self._by_size[nbytes]
        except KeyError:
            shelf = self.shelf(nbytes)
        return shelf.lease(nbytes, what)

    def _fresh(self, shelf: Shelf, nbytes: int, what: str) -> BufferHandle:
        bucket = shelf.bucket
        buffer = self._new(bucket if bucket <= self.limit else nbytes, self._flags, what)
        with self._lock:
            self._misses += 1
            self._count(shelf, 1)
        return BufferHandle(shelf, buffer, nbytes)

    def _count(self, shelf: Shelf, change: int) -> None:
        """Count buffers of a shelf that were allocated or, if ``change`` is negative, returned to the driver."""
        shelf.made += change
        self._hold(change * shelf.bucket)

    def _hold(self, change: int) -> None:
        self._held += change
        _peaks["allocated"] = max(_peaks["allocated"], sum(pool._held for pool in _device_pools()))

    def reuse(self, nbytes: int) -> BufferHandle | None:
        """Lease the smallest free buffer of at least ``nbytes``, from any bucket; ``None`` if there is none."""
        with self._lock:
            fitting = [shelf for shelf in self._shelves.values() if shelf.free and shelf.bucket >= nbytes]
        for shelf in sorted(fitting, key=lambda shelf: shelf.bucket):
            if shelf.free:
                return shelf.lease(nbytes)
        return None

    def release(self, handle: BufferHandle) -> None:
        """End a lease; the same as ``handle.release()``."""
        handle.release()

    def clear(self) -> None:
        """Return every free buffer to the driver; leased buffers stay allocated."""
        with self._lock:
            for shelf in list(self._shelves.values()):
                self._evict(shelf, len(shelf.free))

    def _evict(self, shelf: Shelf, count: int) -> None:
        """Return the ``count`` buffers of a shelf that have been free the longest to the driver."""
        gone = shelf.free[:count]
        del shelf.free[:count]
        self._count(shelf, -len(gone))

    def _new(self, nbytes: int, flags: Any, what: str, values: np.ndarray | None = None) -> Any:
        if platforms.forked_child:
            platforms.check_process()
        if nbytes > self.limit:
            raise OutOfMemoryError(self._no_room(nbytes, what, "one allocation cannot be larger than the device allows"))
        if self._on_host and not host_memory.reserve(nbytes):
            empty_cache()
            if not host_memory.reserve(nbytes):
                raise OutOfMemoryError(self._no_room(nbytes, what, "the process has no memory left (RLIMIT_AS, control group or machine)"))
        arguments = (self.context, flags, max(nbytes, 4)) if values is None else (self.context, flags, 0, values)
        try:
            return self._create(*arguments)
        except platforms.opencl().Error as error:
            if not program.lacks_memory(error):
                raise program.failure("allocate", f"to allocate {what or 'a buffer'}", error) from None
            empty_cache()
        try:
            return self._create(*arguments)
        except platforms.opencl().Error as error:
            raise OutOfMemoryError(self._no_room(nbytes, what, f"the device has no memory left ({error})")) from None

    def _no_room(self, nbytes: int, what: str, reason: str) -> str:
        stats, device = self.stats, self.context.devices[0]
        held = f"{_size(stats.bytes_allocated)} of which {_size(stats.bytes_cached)} free"
        tensors = [o for o in gc.get_objects() if type(o).__name__ == "Tensor" and getattr(o, "lease", None) is not None]
        mine = sorted((t for t in tensors if t.lease.pool is self), key=lambda t: -t.nbytes)
        largest = ", ".join(f"{t.shape} {t.dtype} {_size(t.lease.nbytes)}" for t in mine[:3])
        return message("allocate", reason, f"largest live tensors: {largest or 'none'}; {program.MAKE_ROOM}",
                       tensor=what or "buffer", bytes=nbytes, limit=self.limit, device=device.name, pool=held)  # fmt: skip

    def adopt_array(self, array: np.ndarray) -> BufferHandle:
        """Lease a new buffer with a copy of ``array``; the driver copies it without waiting for a queue.

        The buffer is not pooled: its size fits no bucket, and the C library reuses such memory well.
        """
        cl = platforms.opencl()
        buffer = self._new(array.nbytes, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, f"{array.shape} {array.dtype}", array)
        return self._adopt(buffer, array.nbytes)

    def alias_array(self, queue: Any, array: np.ndarray) -> BufferHandle:
        """Lease a buffer over the caller's memory; the end of the lease waits for ``queue``, so that no kernel outlives the array."""
        return self._adopt(create_zero_copy_buffer(queue, array), array.nbytes, queue)

    def _adopt(self, buffer: Any, nbytes: int, queue: Any = None) -> BufferHandle:
        self._hold(nbytes)
        return BufferHandle(_Adopted(self, nbytes, queue), buffer, nbytes)

    def buffers(self) -> list[Any]:
        """List the free buffers, which a forked child keeps alive."""
        return [buffer for shelf in list(self._shelves.values()) for buffer in shelf.free]


class _Adopted(Shelf):
    """The shelf of a buffer that fits no bucket. The buffer is released to the driver, after ``queue`` has finished if that is given."""

    __slots__ = ("queue",)
    unfinished: ClassVar[list[Any]] = []

    def __init__(self, pool: BufferPool, nbytes: int, queue: Any):
        super().__init__(pool, nbytes, False)
        self.queue = queue

    def take_back(self, buffer: Any) -> None:
        if platforms.forked_child:
            return
        self.pool._held -= self.bucket
        if self.queue is not None:
            try:
                self.queue.finish()
            except (platforms.opencl().Error, DeviceError, KernelBuildError, OutOfMemoryError) as error:
                # In a destructor, where an exception could not be caught.
                self.unfinished.append(buffer)
                program.log.warning("[share] an array is kept for good, as kernels that use it did not finish: %s", error)


def shares_host(lease: BufferHandle | None) -> bool:
    """Whether a lease is over the caller's array (``share=True``), which may be less aligned than other memory."""
    return lease is not None and isinstance(lease.shelf, _Adopted) and lease.shelf.queue is not None


class _Cut(Shelf):
    """The shelf of sub-buffers of one size, which the arena cuts from segments."""

    __slots__ = ()

    def __init__(self, pool: PersistentBufferPool, bucket: int):
        super().__init__(pool, bucket, not pool.capped)
        self.free = pool.arena.returned

    def lease(self, nbytes: int, what: str = "") -> BufferHandle:
        return BufferHandle(self, self.pool.arena.take(self.bucket, what), nbytes)

    def part(self, buffer: Any, offset: int, nbytes: int) -> Any:
        return self.pool.arena.part(buffer, offset, nbytes)

    def take_back(self, buffer: Any) -> None:
        self.free.append(buffer)
        if self.pool.capped and not platforms.forked_child:
            self.pool.arena.trim(max(0, self.pool.max_cached_bytes - self.pool._cached), wait=False)


class PersistentBufferPool(BufferPool):
    """The pool of tensor memory: buckets from 1 KB and, on CPUs, sub-buffers of segments from 256 KB.

    If free bytes exceed a cap, entirely free segments and buffers of the least recently used bucket are returned to the driver. The default
    cap is ``NETCL_MAX_CACHED_GB``. If that is not set, the cap of a GPU is at least a quarter of its memory: otherwise the activations of
    a large model would be allocated in every step. A bucket keeps at most ``max_per_bucket`` free buffers.
    """

    def __init__(self, context: Any, max_cached_bytes: int | None = None, max_per_bucket: int = 4096):
        super().__init__(context)
        device = context.devices[0]
        cap = env.value("NETCL_MAX_CACHED_GB") * (1 << 30) if max_cached_bytes is None else max_cached_bytes
        if max_cached_bytes is None and env.raw("NETCL_MAX_CACHED_GB") is None and device.type & platforms.opencl().device_type.GPU:
            cap = max(cap, device.global_mem_size // 4)
        self.max_cached_bytes = int(cap)
        self.max_per_bucket = max_per_bucket
        self.arena = Arena(lambda nbytes, what: self._new(nbytes, self._flags, what), self._resized, self.limit, _sub_buffer)
        self.cuts = bool(device.type & platforms.opencl().device_type.CPU)
        self._cuts: dict[int, _Cut] = {}
        self._pooled = 0  # bytes of all shelves and segments, leased or free: below the cap, free bytes need not be counted
        self.capped = False  # whether these bytes exceed the cap; only then can the free ones
        self._cached = 0  # an upper bound on the free bytes of shelves, while they are counted

    @property
    def stats(self) -> PoolStats:
        """The current counters."""
        s, free = super().stats, sum(n * count for n, count in self.arena.stretches().items())
        return PoolStats(s.hits + self.arena.hits, s.misses + self.arena.misses, s.bytes_allocated, s.bytes_cached + free)

    def bucket_of(self, nbytes: int) -> int:
        return -(-nbytes // GRAIN) * GRAIN if self.cuts and nbytes >= LARGE else eighth_steps(nbytes)

    def gaps(self) -> list[BufferHandle]:
        """Lease every free range of at least ``LARGE`` bytes in segments that are partly in use."""
        return [BufferHandle(_Cut(self, buffer.size), buffer, buffer.size) for buffer in self.arena.gaps(LARGE)]

    def _shelf_of(self, nbytes: int) -> Shelf:
        if not self.cuts or nbytes < LARGE:
            return super()._shelf_of(nbytes)
        # Rounding up must not exceed the device's limit; a request that exceeds it itself raises when it is allocated.
        bucket = max(nbytes, min(self.bucket_of(nbytes), self.limit))
        if len(self._cuts) >= _MOST_SHELVES:
            self._cuts.clear()
        if bucket not in self._cuts:
            self._cuts[bucket] = _Cut(self, bucket)
        return self._cuts[bucket]

    def _count(self, shelf: Shelf, change: int) -> None:
        super()._count(shelf, change)
        self._grown(change * shelf.bucket)
        shelf.plain = not self.capped and shelf.made <= self.max_per_bucket

    def _resized(self, change: int) -> None:
        """Count bytes of segments that were allocated or, if negative, returned to the driver."""
        with self._lock:
            self._hold(change)
            self._grown(change)

    def _grown(self, change: int) -> None:
        self._pooled += change
        if self.capped != (self._pooled > self.max_cached_bytes):
            self.capped = not self.capped
            for shelf in (*self._shelves.values(), *self._cuts.values()):
                shelf.plain = not self.capped and shelf.made <= self.max_per_bucket
            self._cached = super().stats.bytes_cached

    def _take_back(self, shelf: Shelf, buffer: Any) -> None:
        if platforms.forked_child:
            return  # the driver's state belongs to the parent; the lock may be held by a thread that does not exist here
        with self._lock:
            self._shelves[shelf.bucket] = self._shelves.pop(shelf.bucket)  # last in the order: used most recently
            shelf.free.append(buffer)
            if len(shelf.free) > self.max_per_bucket:
                self._evict(shelf, 1)
            self._cached += shelf.bucket
            if self._cached > self.max_cached_bytes:
                self._cached = super().stats.bytes_cached
                for other in list(self._shelves.values()):
                    while other.free and self._cached > self.max_cached_bytes:
                        self._evict(other, 1)
                        self._cached -= other.bucket

    def clear(self) -> None:
        super().clear()
        self.arena.trim()

    def buffers(self) -> list[Any]:
        return super().buffers() + self.arena.buffers()

    def get_stats(self) -> dict[str, Any]:
        """Return the counters; ``buckets`` has the number of free buffers, or of free ranges of segments, by size."""
        s = self.stats
        shelves = {bucket: len(shelf.free) for bucket, shelf in sorted(self._shelves.items()) if shelf.free}
        buckets = shelves | dict(sorted(self.arena.stretches().items()))
        return {"hits": s.hits, "misses": s.misses, "hit_rate": s.hit_rate, "bytes_allocated": s.bytes_allocated,
                "bytes_cached": s.bytes_cached, "buckets": buckets}  # fmt: skip


class PinnedBufferPool:
    """Page-locked host memory for transfers: ALLOC_HOST_PTR buffers that stay mapped as NumPy byte arrays.

    A lease may be released with the event of the copy that still reads it; the memory is reused only after that event. At most
    ``max_cached_bytes`` stay free (1 GB, or ``NETCL_MAX_CACHED_GB`` if less); beyond that, the least recently used size is freed first.
    """

    def __init__(self, queue: Any, max_cached_bytes: int | None = None):
        self.queue = queue
        self.stats = PoolStats()
        cap = min(PINNED_CAP, env.value("NETCL_MAX_CACHED_GB") * (1 << 30)) if max_cached_bytes is None else max_cached_bytes
        self.max_cached_bytes = int(cap)
        self._shelves: dict[int, Shelf] = {}
        self._copying: deque[tuple[BufferHandle, Any]] = deque()  # leases that end with their event, oldest first
        self._lock = threading.RLock()
        pools.add(self)

    def allocate(self, nbytes: int, flags: Any = None) -> BufferHandle:
        """Lease page-locked memory; ``handle.buffer`` is a NumPy array of bytes."""
        del flags
        bucket = power_of_two(nbytes)
        with self._lock:
            self._collect()
            shelf = self._shelves.get(bucket)
            if shelf is None:
                shelf = self._shelves[bucket] = Shelf(self, bucket, False)
                shelf.free = deque()  # pairs of memory and the event of its last copy, oldest first
            if shelf.free and _complete(shelf.free[0][1]):
                self.stats.hits += 1
                self.stats.bytes_cached -= bucket
                return BufferHandle(shelf, shelf.free.popleft()[0], nbytes)
        mapped = _map_pinned(self.queue, bucket)
        with self._lock:
            self.stats.misses += 1
            self.stats.bytes_allocated += bucket
        return BufferHandle(shelf, mapped, nbytes)

    def release(self, handle: BufferHandle, event: Any = None) -> None:
        """End a lease. The pool does not reuse the memory before ``event``, the event of the copy that reads it, is complete."""
        if handle.buffer is not None:
            buffer, handle.buffer = handle.buffer, None
            self._take_back(handle.shelf, buffer, event)

    def release_after(self, handle: BufferHandle, event: Any) -> Callable[[], None]:
        """End a lease once ``event`` is complete; the pool checks when it next allocates. Call the result to end the lease now."""
        self._copying.append((handle, event))
        return partial(self.release, handle, event)

    def clear(self) -> None:
        """Unmap and free all memory that is not leased."""
        with self._lock:
            self._collect()
            self._evict(0)

    def buffers(self) -> list[Any]:
        """List the free memory, which a forked child keeps alive."""
        return [buffer for shelf in list(self._shelves.values()) for buffer, _ in shelf.free]

    def _collect(self) -> None:
        while self._copying and not platforms.forked_child and _complete(self._copying[0][1]):
            self.release(self._copying.popleft()[0])

    def _take_back(self, shelf: Shelf, buffer: Any, event: Any = None) -> None:
        if platforms.forked_child:
            return
        with self._lock:
            self._shelves[shelf.bucket] = self._shelves.pop(shelf.bucket)  # last in the order: used most recently
            shelf.free.append((buffer, event))
            self.stats.bytes_cached += shelf.bucket
            if self.stats.bytes_cached > self.max_cached_bytes:
                self._evict(self.max_cached_bytes)

    def _evict(self, most: int) -> None:
        """Return free memory to the driver until at most ``most`` bytes are free. The queue unmaps it after the copies enqueued before."""
        for shelf in list(self._shelves.values()):
            while shelf.free and self.stats.bytes_cached > most:
                shelf.free.popleft()
                self.stats.bytes_cached -= shelf.bucket
                self.stats.bytes_allocated -= shelf.bucket


def _complete(event: Any) -> bool:
    return event is None or event.command_execution_status == 0


def _map_pinned(queue: Any, nbytes: int) -> np.ndarray:
    cl = platforms.opencl()
    flags = cl.map_flags.READ | cl.map_flags.WRITE
    with program.driver_errors("allocate", "to allocate page-locked memory"):
        mapped, _ = cl.enqueue_map_buffer(queue, create_pinned_buffer(queue, nbytes), flags, 0, (nbytes,), np.uint8, is_blocking=True)
    return mapped


def _device_pools() -> list[BufferPool]:
    return [pool for pool in list(pools) if isinstance(pool, BufferPool)]


def get_persistent_pool(queue: Any) -> PersistentBufferPool:
    """Return the pool of a queue's tensors."""
    try:
        return queue.netcl.pool
    except AttributeError:
        return queue_state(queue).part("pool", lambda real: PersistentBufferPool(real.context))


def get_pinned_pool(queue: Any) -> PinnedBufferPool:
    """Return the pool of page-locked memory for a queue's transfers."""
    return queue_state(queue).part("pinned", PinnedBufferPool)


def is_integrated_gpu(queue: Any) -> bool:
    """Whether host and device share memory: integrated GPUs, and every OpenCL CPU device."""
    cpu = platforms.opencl().device_type.CPU
    return queue_state(queue).part("integrated", lambda real: bool(real.device.type & cpu or real.device.host_unified_memory))


def has_svm_support(queue: Any) -> bool:
    """Whether the device supports shared virtual memory of any granularity."""
    cl = platforms.opencl()
    try:
        return bool(queue.device.get_info(cl.device_info.SVM_CAPABILITIES))
    except cl.Error:
        return False  # OpenCL 1.x drivers do not know this property


def create_pinned_buffer(queue: Any, nbytes: int) -> Any:
    """Allocate a buffer in page-locked host memory (ALLOC_HOST_PTR)."""
    cl = platforms.opencl()
    platforms.check_process()
    with program.driver_errors("create_pinned_buffer", f"to allocate {nbytes} bytes"):
        return cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, max(int(nbytes), 4))


def _sub_buffer(buffer: Any, offset: int, nbytes: int) -> Any:
    with program.driver_errors("allocate", f"to create a sub-buffer of {nbytes} bytes"):
        return buffer.get_sub_region(offset, nbytes)


def create_zero_copy_buffer(queue: Any, array: np.ndarray) -> Any:
    """Return a buffer over the memory of ``array`` (USE_HOST_PTR). While the buffer is used, keep the array alive and unchanged."""
    cl = platforms.opencl()
    platforms.check_process()
    if not array.flags.writeable:
        raise ShapeError(message("create_zero_copy_buffer", "the array must be writable", "pass a copy", shape=array.shape))
    if not array.flags.c_contiguous:
        raise ShapeError(message("create_zero_copy_buffer", "the array must be contiguous", "pass numpy.ascontiguousarray(array)",
                                 shape=array.shape, strides=array.strides))  # fmt: skip
    with program.driver_errors("create_zero_copy_buffer", f"to create a buffer over {array.shape} {array.dtype}"):
        return cl.Buffer(queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=array)


def empty_cache() -> None:
    """Return free buffers of all pools to their drivers, page-locked ones included, and free memory of the C library to the system."""
    free_memory()


def memory_stats() -> dict[str, int | float]:
    """Return the summed counters of all pools of device memory, and their peaks (see :func:`reset_peak_memory_stats`)."""
    counted = [pool.stats for pool in _device_pools()]
    total = PoolStats(*(sum(getattr(stats, f) for stats in counted) for f in ("hits", "misses", "bytes_allocated", "bytes_cached")))
    in_use = "allocated" if recording.lease_watch is None else "in_use"
    peaks = {"peak_bytes_allocated": _peaks["allocated"], "peak_bytes_in_use": _peaks[in_use]}
    return {"hits": total.hits, "misses": total.misses, "hit_rate": total.hit_rate, "bytes_allocated": total.bytes_allocated,
            "bytes_cached": total.bytes_cached, "bytes_in_use": total.bytes_allocated - total.bytes_cached, **peaks}  # fmt: skip


_peaks = {"allocated": 0, "in_use": 0}


def _note_use() -> None:
    _peaks["in_use"] = max(_peaks["in_use"], int(memory_stats()["bytes_in_use"]))


def reset_peak_memory_stats() -> None:
    """Restart the peaks of :func:`memory_stats`. From then on every allocation takes longer, because the bytes in use are counted.

    Before the first call, ``peak_bytes_in_use`` is ``peak_bytes_allocated``: some of these bytes may always have been free.
    """
    _peaks.update(allocated=sum(pool._held for pool in _device_pools()), in_use=0)
    recording.watch_leases(_note_use)
    _note_use()


def memory_summary() -> str:
    """Return a table of all pools of device memory, as text."""
    rows = [f"{'device':30} {'in use':>10} {'free':>10} {'hits':>10} {'misses':>8} {'rate':>6}"]
    for pool in sorted(_device_pools(), key=lambda p: -p.stats.bytes_allocated):
        s, name = pool.stats, pool.context.devices[0].name[:30]
        used = s.bytes_allocated - s.bytes_cached
        rows.append(f"{name:30} {_size(used):>10} {_size(s.bytes_cached):>10} {s.hits:10d} {s.misses:8d} {s.hit_rate:6.1%}")
    return "\n".join(rows)


def live_buffers() -> list[Any]:
    """List every buffer of pools and leases; a forked child keeps them so that they are not destroyed twice."""
    leased = [o.buffer for o in gc.get_objects() if type(o) is BufferHandle and o.buffer is not None]
    return leased + [buffer for pool in list(pools) for buffer in pool.buffers()]


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GB"
