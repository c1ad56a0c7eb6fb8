"""Large device memory: segments from the driver, cut into pieces of whatever size is asked for, which join again once they are free.

Free lists keep, of every size, what was ever in use of it at once. The sizes of a training step come and go in waves, so such lists held
1.7 times what a ResNet-18 used at the most. Pieces of segments serve all sizes: 1.1 times.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

ROOM = 1 << 48  # addresses of a segment: the n-th begins at n times this, so that no two of them touch
MOST_PIECES = 4096  # sub-buffers that are remembered: those of a step come again, those of ever other sizes do not


class Segment(NamedTuple):
    """Memory from the driver."""

    buffer: Any
    nbytes: int


class Arena:
    """Segments and what is free in them. A request takes the smallest stretch that holds it.

    Where none does, the largest of the segments that are free as a whole go back to the driver and one as large as they were together takes
    their place: memory grows only by what is missing, and after the first steps of a program, nothing is. ``create`` asks the driver,
    ``resized`` is told how many bytes came from there or went back; no segment is larger than ``limit``.
    """

    def __init__(self, create: Callable[[int, str], Any], resized: Callable[[int], None], limit: int):
        self._create = create
        self._resized = resized
        self._limit = limit
        self._segments: dict[int, Segment] = {}  # by the address they begin at
        self._free: list[tuple[int, int]] = []  # bytes and address of every free stretch, sorted
        self._begins: dict[int, int] = {}  # where a free stretch begins: its bytes
        self._ends: dict[int, int] = {}  # where one ends: its beginning
        self._pieces: dict[tuple[int, int], Any] = {}  # sub-buffers by address and bytes
        self._taken: dict[int, tuple[int, int]] = {}  # the same of every buffer that is out, by its id
        # What came back. Leases end wherever the interpreter collects garbage, also in the middle of a change to what is above.
        self._returned: deque[Any] = deque()
        self._lock = threading.Lock()
        self._made = 0
        self.hits = self.misses = 0

    def take(self, nbytes: int, what: str = "") -> Any:
        """A buffer of ``nbytes``; ``what`` names the tensor in an out-of-memory message."""
        with self._lock:
            if self._returned:
                self._settle()
            buffer = self._cut(nbytes)
            if buffer is not None:
                self.hits += 1
                return buffer
            room = self._make_room(nbytes)
        made = self._create(room, what)  # which may empty all pools, this one too
        self._resized(room)
        with self._lock:
            self.misses += 1
            self._made += 1
            self._segments[self._made * ROOM] = Segment(made, room)
            self._loosen(self._made * ROOM, room)
            return self._cut(nbytes)

    def give(self, buffer: Any) -> None:
        """A piece comes back. It is free from the next request on."""
        self._returned.append(buffer)

    def trim(self, most: int = 0, wait: bool = True) -> None:
        """Return segments that are free as a whole to the driver, the oldest first, until ``most`` bytes are free.

        The end of a lease must not ``wait`` for a thread that is at work here, since that may be the one that it interrupts.
        """
        if self._lock.acquire(blocking=wait):
            try:
                self._settle()
                free = sum(self._begins.values())
                for address, segment in self._whole():
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

    def _cut(self, nbytes: int) -> Any:
        at = bisect_left(self._free, (nbytes, 0))
        if at == len(self._free):
            return None
        length, address = self._free.pop(at)
        del self._begins[address]
        if length > nbytes:
            self._loosen(address + nbytes, length - nbytes)
        else:
            del self._ends[address + length]
        buffer = self._pieces.get((address, nbytes))
        if buffer is None:
            buffer = self._piece(address, nbytes)
        self._taken[id(buffer)] = address, nbytes
        return buffer

    def _piece(self, address: int, nbytes: int) -> Any:
        """A buffer over a stretch, which is remembered."""
        segment = self._segments[address - address % ROOM]
        if nbytes == segment.nbytes:
            return segment.buffer
        if len(self._pieces) >= MOST_PIECES:
            self._pieces.clear()
        buffer = self._pieces[address, nbytes] = segment.buffer.get_sub_region(address % ROOM, nbytes)
        return buffer

    def _loosen(self, address: int, nbytes: int) -> None:
        self._begins[address] = nbytes
        self._ends[address + nbytes] = address
        insort(self._free, (nbytes, address))

    def _settle(self) -> None:
        """Join what came back with what is free beside it."""
        begins, ends, free = self._begins, self._ends, self._free
        while self._returned:
            address, nbytes = self._taken.pop(id(self._returned.popleft()))
            after = begins.pop(address + nbytes, None)
            if after is not None:
                del free[bisect_left(free, (after, address + nbytes))]
                nbytes += after
            before = ends.pop(address, None)
            if before is not None:
                del free[bisect_left(free, (address - before, before))]
                address, nbytes = before, nbytes + address - before
            self._loosen(address, nbytes)

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
        nbytes = self._segments.pop(address).nbytes
        del self._begins[address], self._ends[address + nbytes], self._free[bisect_left(self._free, (nbytes, address))]
        for key in [key for key in self._pieces if address <= key[0] < address + nbytes]:
            del self._pieces[key]
        self._resized(-nbytes)
