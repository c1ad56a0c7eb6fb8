"""Large device memory: segments from the driver, cut into pieces of whatever size is asked for, which join again once they are free.

Free lists keep, of every size, what was ever in use of it at once. The sizes of a training step come and go in waves, so such lists held
1.7 times what a ResNet-18 used at the most. Pieces of segments serve all sizes: 1.1 times.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from netcl.core.errors import DeviceError, OutOfMemoryError

ROOM = 1 << 48  # addresses of a segment: the n-th begins at n times this, so that no two of them touch
MOST_PIECES = 4096  # sub-buffers that are remembered: those of a step come again, those of ever other sizes do not


def _references(things: Any, at: Any) -> int:
    return sys.getrefcount(things[at])


_ALONE = _references([object()], 0)  # of what is in one list or dict and nowhere else


class Segment(NamedTuple):
    """Memory from the driver."""

    buffer: Any
    nbytes: int


class Arena:
    """Segments and what is free in them. A request takes the smallest stretch that holds it.

    Where none does, the largest of the segments that are free as a whole go back to the driver and one as large as they were together takes
    their place: memory grows only by what is missing, and after the first steps of a program, nothing is. ``create`` and ``part_of``
    ask the driver for a buffer and a sub-buffer, ``resized`` is told how many bytes came from there or went back; no segment is larger than
    ``limit``.
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
        self._free: list[tuple[int, int]] = []  # bytes and address of every free stretch, sorted
        self._begins: dict[int, int] = {}  # where a free stretch begins: its bytes
        self._ends: dict[int, int] = {}  # where one ends: its beginning
        # Sub-buffers, by address and bytes, before the segments they are of, by where these begin: NVIDIA's driver does not survive it if a
        # sub-buffer goes after its buffer, and what an object has goes in this order.
        self._pieces: dict[tuple[int, int], Any] = {}
        self._leaving: list[tuple[list[Any], Segment]] = []  # segments that are not used any more, but somebody still knows a piece
        self._segments: dict[int, Segment] = {}
        self._taken: dict[int, tuple[int, int]] = {}  # address and bytes of every buffer that is out, by its id
        # Where buffers are put that come back; they are free from the next request on. Leases end wherever the interpreter collects
        # garbage, also in the middle of a change to what is above.
        self.returned: deque[Any] = deque()
        self._lock = threading.Lock()
        self._made = 0
        self.hits = self.misses = 0

    def take(self, nbytes: int, what: str = "") -> Any:
        """A buffer of ``nbytes``; ``what`` names the tensor in an out-of-memory message."""
        with self._lock:
            if self.returned:
                last = self.returned.pop()
                if self._taken[id(last)][1] == nbytes:  # fits as nothing else does, and is still in the caches
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
        made = self._create(room, what)  # which may empty all pools, this one too
        self._resized(room)
        with self._lock:
            self.misses += 1
            self._made += 1
            address = self._made * ROOM
            self._segments[address] = Segment(made, room)
            self._begins[address], self._ends[address + room] = room, address
            return self._cut(nbytes, room, address)

    def part(self, buffer: Any, offset: int, nbytes: int) -> Any:
        """A buffer over a part of one that is out."""
        with self._lock:
            address = self._taken[id(buffer)][0] + offset
            return self._pieces.get((address, nbytes)) or self._piece(address, nbytes)

    def gaps(self, least: int) -> list[Any]:
        """Buffers over all free stretches of ``least`` bytes and more in segments of which something is in use."""
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
        """Return segments that are free as a whole to the driver, the oldest first, until ``most`` bytes are free.

        The end of a lease must not ``wait`` for a thread that is at work here, since that may be the one that it interrupts.
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
        """How many free stretches there are of which bytes; of what just came back, as much as another thread here leaves to see."""
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        return Counter(list(self._begins.values()))

    def buffers(self) -> list[Any]:
        """Every object of the driver that is kept here."""
        return [*(segment.buffer for segment in list(self._segments.values())), *list(self._pieces.values())]

    # ---- under the lock

    def _cut(self, nbytes: int, length: int, address: int) -> Any:
        """The first ``nbytes`` of a stretch that was free and is out of the list of those already."""
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
        """A buffer over a stretch, which is remembered."""
        segment = self._segments[address - address % ROOM]
        if nbytes == segment.nbytes:
            return segment.buffer
        if len(self._pieces) >= MOST_PIECES:
            for key in [key for key in self._pieces if _references(self._pieces, key) == _ALONE]:
                del self._pieces[key]
        buffer = self._pieces[address, nbytes] = self._part_of(segment.buffer, address % ROOM, nbytes)
        return buffer

    def _settle(self) -> None:
        """Join what came back with what is free beside it."""
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
        """The segments that are free as a whole."""
        return [(address, segment) for address, segment in self._segments.items() if self._begins.get(address) == segment.nbytes]

    def _make_room(self, nbytes: int) -> int:
        """Return free segments that one of ``nbytes`` can replace; says how large that one is to be."""
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
        """Let go of segments of which nobody knows a piece any more, the pieces first."""
        for pieces, _ in self._leaving:
            for at in reversed(range(len(pieces))):
                if _references(pieces, at) == _ALONE:
                    del pieces[at]
        self._leaving = [pair for pair in self._leaving if pair[0]]
