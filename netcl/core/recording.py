"""A step that is being recorded: where the host tells the recorder what it does beside launching kernels.

Everything a program does on a device goes through three doors (launches, transfers, allocations), and a recorder listens there.
What the host does is told here: numbers that change from step to step and work that a replay must repeat (:func:`again`), facts
the recorded launches rest on (:func:`requires`), values the host looks at before anything is computed (:func:`check`).
``netcl.replay`` brings the recorder; without one, these calls cost next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Number(float):
    """A number of the host that is asked for anew at every replay: ``source`` gives it, at ``index`` of what it returns."""

    __slots__ = ("index", "source")
    source: int
    index: int

    @classmethod
    def of(cls, value: float, source: int, index: int) -> Number:
        number = cls(value)
        number.source, number.index = source, index
        return number


class Recorder(Protocol):
    """What listens while a step is recorded."""

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
    def made(self, tensor: Any) -> bool: ...
    def requires(self, fact: Callable[[], Any]) -> None: ...
    def check(self, tensor: Any, function: Callable[[Any], None]) -> None: ...


class _ActiveRecorder(threading.local):
    recorder: Recorder | None = None
    op = ""  # whose plan is running


active = _ActiveRecorder()
listening = 0  # how many recorders are at work in whatever thread; every allocation asks, and asking a thread's own costs ten times as much


def start(recorder: Recorder) -> None:
    """Let ``recorder`` listen to this thread."""
    global listening
    active.recorder = recorder
    listening += 1


def stop() -> None:
    """The recorder of this thread has heard enough."""
    global listening
    active.recorder = None
    listening -= 1


def allocated(handle: Any) -> None:
    """A lease was made."""
    if active.recorder is not None:
        active.recorder.allocated(handle)


def changed(tensors: Iterable[Any]) -> None:
    """The values of tensors change in place."""
    if active.recorder is not None:
        active.recorder.changed(tensors)


def again(function: Callable[[], Any], undo: Callable[[], None] | None = None) -> Any:
    """Call ``function`` now and, if a step is being recorded, at every replay of it: counters, schedules, numbers.

    A number it returns (or numbers, in a list) may be a kernel argument; a replay then passes what the function says that time. ``undo``
    takes back what the function did, where the next launch of a replay fails.

    >>> again(lambda: 0.5)
    0.5
    """
    recorder = active.recorder
    return function() if recorder is None else recorder.again(function, undo)


def requires(fact: Callable[[], Any]) -> None:
    """What ``fact`` returns must be the same at every replay, or the step is recorded anew."""
    if active.recorder is not None:
        active.recorder.requires(fact)


def leaf(tensor: Any) -> None:
    """The gradient of a tensor is forgotten here: a replay leaves behind what this run does."""
    if active.recorder is not None:
        active.recorder.leaf(tensor)


def made(tensor: Any) -> bool:
    """Whether a step that is being recorded has made this tensor, or it was there before."""
    return active.recorder is not None and active.recorder.made(tensor)


def host_work(what: str) -> None:
    """Python of the user's runs here that a replay would leave out: a step that does this is not replayed."""
    if active.recorder is not None:
        active.recorder.host_work(what)


def check(tensor: Any, function: Callable[[Any], None]) -> None:
    """Let the host look at a tensor, now and before every replay; ``function`` raises if it does not like what it sees."""
    if active.recorder is None:
        function(tensor)
    else:
        active.recorder.check(tensor, function)


class paused:
    """Nothing is recorded inside the block."""

    def __enter__(self) -> None:
        self.recorder, active.recorder = active.recorder, None

    def __exit__(self, *exc: object) -> None:
        active.recorder = self.recorder


@contextmanager
def replaced_by(recorder: Recorder) -> Iterator[None]:
    """Inside the block, ``recorder`` listens to this thread instead of whoever does."""
    global listening
    before, active.recorder = active.recorder, recorder
    listening += 1
    try:
        yield
    finally:
        active.recorder = before
        listening -= 1
