"""The functions by which netcl reports to a recorder while a step is recorded.

A recorder observes launches, transfers and allocations. The functions here report other work. :func:`again` reports numbers and work that
every replay must repeat. :func:`requires` reports facts that recorded launches depend on. :func:`check_each_run` reports values that the
host validates. ``netcl.replay`` implements a recorder; without an active recorder these calls cost almost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Number(float):
    """A number that every replay recomputes: item ``index`` of the numbers that function ``source`` returns."""

    __slots__ = ("index", "source")
    source: int
    index: int

    @classmethod
    def of(cls, value: float, source: int, index: int) -> Number:
        number = cls(value)
        number.source, number.index = source, index
        return number


class RecorderProtocol(Protocol):
    """What is called and set while a step is recorded."""

    trains: bool  # a product of the step has a weight that gets a gradient
    replays: bool  # the step is recorded for replays, not to plan an op
    ends: dict[Callable[[], None], None]  # called when the recording ends

    def allocated(self, handle: Any) -> None: ...
    def upload(self, buffer: Any, stored: Any) -> None: ...
    def fill(self, buffer: Any, pattern: Any, offset: int, nbytes: int) -> None: ...
    def copy(self, target: Any, source: Any, nbytes: int) -> None: ...
    def changed(self, tensors: Iterable[Any]) -> None: ...
    def read(self, what: str) -> None: ...
    def host_work(self, what: str) -> None: ...
    def again(self, function: Callable[[], Any], undo: Callable[[], None] | None = None) -> Any: ...
    def depends(self, owner: Any, modes: Sequence[str], parts: Sequence[str], sizes: Sequence[Any]) -> None: ...
    def leaf(self, tensor: Any) -> None: ...
    def made(self, tensor: Any, or_given: bool = False) -> bool: ...
    def requires(self, fact: Callable[[], Any]) -> None: ...
    def check(self, tensor: Any, function: Callable[[Any], None]) -> None: ...


class _ActiveRecorder(threading.local):
    recorder: RecorderProtocol | None = None
    op = ""  # the op whose plan is running


active = _ActiveRecorder()
#: The number of active recorders of all threads, and of watches. Every allocation reads it, because a thread-local costs ten times as much.
listening = 0

lease_watch: Callable[[], None] | None = None  # called after every allocation


def start(recorder: RecorderProtocol) -> None:
    """Make ``recorder`` the active recorder of this thread."""
    global listening
    active.recorder = recorder
    listening += 1


def stop() -> None:
    """Deactivate the recorder of this thread."""
    global listening
    active.recorder = None
    listening -= 1


def allocated(handle: Any) -> None:
    """Report a new lease."""
    if active.recorder is not None:
        active.recorder.allocated(handle)
    if lease_watch is not None:
        lease_watch()


def watch_leases(function: Callable[[], None] | None) -> None:
    """Call ``function`` after every allocation from now on, instead of the earlier one; ``None`` ends that."""
    global listening, lease_watch
    listening += (function is not None) - (lease_watch is not None)
    lease_watch = function


def changed(tensors: Iterable[Any]) -> None:
    """Report that tensors are changed in place."""
    if active.recorder is not None:
        active.recorder.changed(tensors)


def again(function: Callable[[], Any], undo: Callable[[], None] | None = None) -> Any:
    """Call ``function`` now and, if a step is being recorded, in every replay. Use it for counters, schedules and numbers.

    The number that ``function`` returns, or each number of a list, may be a kernel argument; a replay passes the number of its own call.
    ``undo`` reverts the effect of ``function`` if the next launch of a replay fails.

    >>> again(lambda: 0.5)
    0.5
    """
    recorder = active.recorder
    return function() if recorder is None else recorder.again(function, undo)


def requires(fact: Callable[[], Any]) -> None:
    """Make replays of a compiled function depend on a fact: if ``fact()`` changes later, the function is recorded again."""
    if active.recorder is not None:
        active.recorder.requires(fact)


def at_end(*functions: Callable[[], None]) -> None:
    """Call functions when the recording of a step ends: they clear results of the step, which a replay does not put there."""
    if active.recorder is not None and active.recorder.replays:
        active.recorder.ends |= dict.fromkeys(functions)


def leaf(tensor: Any) -> None:
    """Report that the step changes ``.grad`` of a tensor; a replay ends with the ``.grad`` that the recorded run ended with."""
    if active.recorder is not None:
        active.recorder.leaf(tensor)


def made(tensor: Any, or_given: bool = False) -> bool:
    """Whether the step that is being recorded made this tensor or, with ``or_given``, takes it as an argument."""
    return active.recorder is not None and active.recorder.made(tensor, or_given)


def replays() -> bool:
    """Whether a step is being recorded for replays."""
    return active.recorder is not None and active.recorder.replays


def host_work(what: str) -> None:
    """Report Python code of the user that a replay would skip; such a step is not replayed."""
    if active.recorder is not None:
        active.recorder.host_work(what)


def check_each_run(tensor: Any, function: Callable[[Any], None]) -> None:
    """Call ``function(tensor)`` now and before replays of the step being recorded; it validates the values and raises on failure."""
    if active.recorder is None:
        function(tensor)
    else:
        active.recorder.check(tensor, function)


class paused:
    """A context manager that suspends recording in this thread."""

    def __enter__(self) -> None:
        self.recorder, active.recorder = active.recorder, None

    def __exit__(self, *exc: object) -> None:
        active.recorder = self.recorder


@contextmanager
def replaced_by(recorder: RecorderProtocol) -> Iterator[None]:
    """Replace the active recorder of this thread inside the block."""
    global listening
    before, active.recorder = active.recorder, recorder
    listening += 1
    try:
        yield
    finally:
        active.recorder = before
        listening -= 1
