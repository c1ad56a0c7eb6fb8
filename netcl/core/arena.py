"""An allocator for large device buffers: it splits driver segments into sub-buffers of any size and merges released neighbors.

A free list per size grows to the peak demand for that size, and the demands of a training step peak at different times. Segments serve
all sizes, so together they grow only to about the peak demand of the whole step.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from netcl.core.errors import DeviceError, OutOfMemoryError

SEGMENT_ROOM = 1 << 48  # address space of a segment: the n-th begins at n times this, so that no two are adjacent
MOST_PIECES = 4096  # cached sub-buffers: a training step requests the same ones every time


def _references(things: Any, at: Any) -> int:
    return sys.getrefcount(things[at])


_SOLE_REFERENCE = _references([object()], 0)  # the reference count of an object that only one container holds


class Segment(NamedTuple):
    """A buffer allocated by the driver, which the arena splits into sub-buffers."""

    buffer: Any
    nbytes: int


class Arena:
    """A best-fit allocator over segments. A request takes the last released buffer if sizes are equal, else the smallest sufficient range.

    If no range is large enough, the arena releases entirely free segments, the largest first, and allocates one segment in their place.
    The new segment has at most ``limit`` bytes, unless the request is larger. ``create`` allocates a buffer from the driver, ``part_of`` a
    sub-buffer. ``resized`` receives the number of bytes allocated, or the negative number of bytes released.
    """

    def __init__(
        self,
        create: Callable[[int, str], Any],
        resized: Callable[[int], None],
        limit: int,
        part_of: Callable[[Any, int, int], Any] = lambda buffer, offset, nbytes: buffer.get_sub_region(offset, nbytes),
    ):
        self._create, self._part_of = create, part_of
        self._resized = resized
        self._limit = limit
        self._free: list[tuple[int, int]] = []  # size and address of every free range, sorted
        self._begins: dict[int, int] = {}  # size of the free range that begins at an address
        self._ends: dict[int, int] = {}  # begin of the free range that ends at an address
        # Sub-buffers by address and size, declared before the segments they belong to, because attributes are released in this order:
        # NVIDIA's driver crashes if a sub-buffer is released after its buffer.
        self._pieces: dict[tuple[int, int], Any] = {}
        self._leaving: list[tuple[list[Any], Segment]] = []  # dropped segments with sub-buffers that are still referenced
        self._segments: dict[int, Segment] = {}
        self._taken: dict[int, tuple[int, int]] = {}  # address and size of every allocated buffer, by its id
        # Released buffers; the next request merges them. A lease may end wherever the interpreter collects garbage, even while the fields
        # above are being changed.
        self.returned: deque[Any] = deque()
        self._lock = threading.Lock()
        self._made = 0
        self.hits = self.misses = 0

    def take(self, nbytes: int, what: str = "") -> Any:
        """Return a buffer of ``nbytes``, from a free range or a new segment; ``what`` names the tensor in an out-of-memory message."""
        with self._lock:
            if self.returned:
                last = self.returned.pop()
                if self._taken[id(last)][1] == nbytes:  # the exact size, and still in the caches
                    self.hits += 1
                    return last
                self.returned.append(last)
                self._settle()
            free = self._free
            at = bisect_left(free, (nbytes, 0))
            if at < len(free):
                self.hits += 1
                length, address = free.pop(at)
                return self._cut(nbytes, length, address)
            room = self._make_room(nbytes)
        made = self._create(room, what)  # may empty all pools, this one included
        self._resized(room)
        with self._lock:
            self.misses += 1
            self._made += 1
            address = self._made * SEGMENT_ROOM
            self._segments[address] = Segment(made, room)
            self._begins[address], self._ends[address + room] = room, address
            return self._cut(nbytes, room, address)

    def part(self, buffer: Any, offset: int, nbytes: int) -> Any:
        """Return the sub-buffer of ``nbytes`` that begins at ``offset`` of an allocated buffer."""
        with self._lock:
            address = self._taken[id(buffer)][0] + offset
            return self._pieces.get((address, nbytes)) or self._piece(address, nbytes)

    def gaps(self, least: int) -> list[Any]:
        """Allocate and return every free range of at least ``least`` bytes that lies in a partly used segment."""
        with self._lock:
            self._settle()
            whole = {address for address, _ in self._whole()}
            found = [pair for pair in self._free if pair[0] >= least and pair[1] not in whole]
            cut: list[Any] = []
            try:
                for nbytes, address in found:
                    self._free.remove((nbytes, address))
                    cut.append(self._cut(nbytes, nbytes, address))
            except (DeviceError, OutOfMemoryError):
                self.returned.extend(cut)
                raise
            return cut

    def trim(self, most: int = 0, wait: bool = True) -> None:
        """Release entirely free segments, the oldest first, until at most ``most`` bytes are free.

        With ``wait=False``, do nothing if the lock is held: a lease may end in the thread that holds the lock, and waiting would deadlock.
        """
        if self._lock.acquire(blocking=wait):
            try:
                self._settle()
                free = sum(self._begins.values())
                for address, segment in self._whole() if free > most else ():
                    if free > most:
                        free -= segment.nbytes
                        self._drop(address)
            finally:
                self._lock.release()

    def stretches(self) -> Counter[int]:
        """Return the number of free ranges by size; ranges released while another thread holds the lock are not counted."""
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        return Counter(list(self._begins.values()))

    def buffers(self) -> list[Any]:
        """Return the buffers of all segments and all cached sub-buffers."""
        return [*(segment.buffer for segment in list(self._segments.values())), *list(self._pieces.values())]

    # ---- under the lock

    def _cut(self, nbytes: int, length: int, address: int) -> Any:
        """Return the first ``nbytes`` of a free range as a buffer; the caller has removed the range from the free list."""
        buffer = self._pieces.get((address, nbytes))
        if buffer is None:
            try:
                buffer = self._piece(address, nbytes)
            except (DeviceError, OutOfMemoryError):
                insort(self._free, (length, address))
                raise
        del self._begins[address]
        if length == nbytes:
            del self._ends[address + length]
        else:
            rest = address + nbytes
            self._begins[rest] = length = length - nbytes
            self._ends[rest + length] = rest
            insort(self._free, (length, rest))
        self._taken[id(buffer)] = address, nbytes
        return buffer

    def _piece(self, address: int, nbytes: int) -> Any:
        """Create and cache the sub-buffer of a range; for a whole segment, return the segment's own buffer."""
        segment = self._segments[address - address % SEGMENT_ROOM]
        if nbytes == segment.nbytes:
            return segment.buffer
        if len(self._pieces) >= MOST_PIECES:
            for key in [key for key in self._pieces if _references(self._pieces, key) == _SOLE_REFERENCE]:
                del self._pieces[key]
        buffer = self._pieces[address, nbytes] = self._part_of(segment.buffer, address % SEGMENT_ROOM, nbytes)
        return buffer

    def _settle(self) -> None:
        """Merge released buffers with the free ranges beside them."""
        returned, taken, begins, ends, free = self.returned, self._taken, self._begins, self._ends, self._free
        while returned:
            address, nbytes = taken.pop(id(returned.popleft()))
            end = address + nbytes
            after, before = begins.pop(end, None), ends.pop(address, None)
            if after is not None:
                del free[bisect_left(free, (after, end))]
                end += after
            if before is not None:
                del free[bisect_left(free, (address - before, before))]
                address = before
            begins[address] = nbytes = end - address
            ends[end] = address
            insort(free, (nbytes, address))

    def _whole(self) -> list[tuple[int, Segment]]:
        """Return ``(address, segment)`` of every entirely free segment."""
        return [(address, segment) for address, segment in self._segments.items() if self._begins.get(address) == segment.nbytes]

    def _make_room(self, nbytes: int) -> int:
        """Release entirely free segments that one new segment can replace; return the size of the new segment, at least ``nbytes``."""
        gone = 0
        for address, segment in sorted(self._whole(), key=lambda pair: -pair[1].nbytes):
            if gone < nbytes and gone + segment.nbytes <= self._limit:
                gone += segment.nbytes
                self._drop(address)
        return max(gone, nbytes)

    def _drop(self, address: int) -> None:
        segment = self._segments.pop(address)
        del self._begins[address], self._ends[address + segment.nbytes], self._free[bisect_left(self._free, (segment.nbytes, address))]
        keys = [key for key in self._pieces if address <= key[0] < address + segment.nbytes]
        self._leaving.append(([self._pieces.pop(key) for key in keys], segment))
        self._resized(-segment.nbytes)
        self._leave()

    def _leave(self) -> None:
        """Release the unreferenced sub-buffers of dropped segments, then the segments that have none left."""
        for pieces, _ in self._leaving:
            for at in reversed(range(len(pieces))):
                if _references(pieces, at) == _SOLE_REFERENCE:
                    del pieces[at]
        self._leaving = [pair for pair in self._leaving if pair[0]]
