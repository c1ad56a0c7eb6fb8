"""Large device memory: segments from the driver, cut into pieces of whatever size is asked for, which join again once they are free.

Free lists keep, of every size, what was ever in use of it at once. The sizes of a training step come and go in waves, so such lists held
1.7 times what a ResNet-18 used at the most. Pieces of segments serve all sizes: 1.1 times.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

MOST_PIECES = 1024  # sub-buffers that a segment remembers: those of a step come again, those of ever other sizes do not


class Segment:
    """Memory from the driver: its free stretches, by where they begin and by where they end, and the sub-buffers made of it."""

    __slots__ = ("begins", "buffer", "ends", "made", "nbytes", "serial", "used")

    def __init__(self, buffer: Any, nbytes: int, serial: int):
        self.buffer = buffer
        self.nbytes = nbytes
        self.serial = serial
        self.used = serial
        self.begins: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.made: dict[tuple[int, int], Any] = {}

    @property
    def is_free(self) -> bool:
        return self.begins.get(0) == self.nbytes

    def piece(self, offset: int, nbytes: int) -> Any:
        """The buffer over a stretch; the same object as the last time, as long as it is remembered."""
        if nbytes == self.nbytes:
            return self.buffer
        found = self.made.get((offset, nbytes))
        if found is None:
            if len(self.made) >= MOST_PIECES:
                self.made.clear()
            found = self.made[offset, nbytes] = self.buffer.get_sub_region(offset, nbytes)
        return found


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
        self._segments: dict[int, Segment] = {}
        self._free: list[tuple[int, int, int]] = []  # bytes, serial of the segment, offset; sorted
        self._taken: dict[int, tuple[Segment, int, int]] = {}  # by the number of its buffer, every piece that is out
        # Pieces that came back. Leases end wherever the interpreter collects garbage, also in the middle of a change to what is above.
        self._returned: deque[Any] = deque()
        self._lock = threading.Lock()
        self._serial = self._clock = self._loose = 0
        self.hits = self.misses = 0

    def take(self, nbytes: int, what: str = "") -> Any:
        """A buffer of ``nbytes``; ``what`` names the tensor in an out-of-memory message."""
        with self._lock:
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
            self._serial += 1
            segment = self._segments[self._serial] = Segment(made, room, self._serial)
            self._loosen(segment, 0, room)
            return self._cut(nbytes)

    def give(self, buffer: Any) -> None:
        """A piece comes back. It is free from the next request on."""
        self._returned.append(buffer)

    def trim(self, most: int = 0, wait: bool = True) -> None:
        """Return segments that are free as a whole to the driver, the least recently used first, until ``most`` bytes are free.

        The end of a lease must not ``wait`` for a thread that is at work here, since that may be the one that it interrupts.
        """
        if self._lock.acquire(blocking=wait):
            try:
                self._settle()
                for segment in sorted(self._segments.values(), key=lambda segment: segment.used):
                    if self._loose > most and segment.is_free:
                        self._drop(segment)
            finally:
                self._lock.release()

    @property
    def free_bytes(self) -> int:
        """The bytes of all free stretches; of those that came back, as many as are settled if somebody is at work here."""
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        return self._loose

    def stretches(self) -> Counter[int]:
        """How many free stretches there are of which length."""
        with self._lock:
            self._settle()
            return Counter(length for length, _, _ in self._free)

    def buffers(self) -> list[Any]:
        """Every object of the driver that is kept here."""
        return [buffer for segment in list(self._segments.values()) for buffer in (segment.buffer, *list(segment.made.values()))]

    # ---- under the lock

    def _cut(self, nbytes: int) -> Any:
        at = bisect_left(self._free, (nbytes,))
        if at == len(self._free):
            return None
        length, serial, offset = self._free[at]
        segment = self._segments[serial]
        self._bind(segment, offset, length)
        if length > nbytes:
            self._loosen(segment, offset + nbytes, length - nbytes)
        self._clock += 1
        segment.used = self._clock
        buffer = segment.piece(offset, nbytes)
        self._taken[id(buffer)] = segment, offset, nbytes
        return buffer

    def _loosen(self, segment: Segment, offset: int, length: int) -> None:
        segment.begins[offset] = length
        segment.ends[offset + length] = offset
        insort(self._free, (length, segment.serial, offset))
        self._loose += length

    def _bind(self, segment: Segment, offset: int, length: int) -> None:
        del segment.begins[offset], segment.ends[offset + length]
        del self._free[bisect_left(self._free, (length, segment.serial, offset))]
        self._loose -= length

    def _settle(self) -> None:
        """Join what came back with what is free beside it."""
        while self._returned:
            segment, offset, length = self._taken.pop(id(self._returned.popleft()))
            before, after = segment.ends.get(offset), segment.begins.get(offset + length)
            if after is not None:
                self._bind(segment, offset + length, after)
                length += after
            if before is not None:
                self._bind(segment, before, offset - before)
                offset, length = before, length + offset - before
            self._loosen(segment, offset, length)

    def _make_room(self, nbytes: int) -> int:
        """Return free segments that one of ``nbytes`` can replace; says how large that one is to be."""
        gone = 0
        for segment in sorted(self._segments.values(), key=lambda segment: -segment.nbytes):
            if gone < nbytes and segment.is_free and gone + segment.nbytes <= self._limit:
                gone += segment.nbytes
                self._drop(segment)
        return max(gone, nbytes)

    def _drop(self, segment: Segment) -> None:
        self._bind(segment, 0, segment.nbytes)
        del self._segments[segment.serial]
        self._resized(-segment.nbytes)
