"""Runs of plans that wait for builder processes to compile their programs, in the order in which they were called.

Whatever enqueues commands or waits for a queue must enqueue the waiting runs first. Functions that call the driver's ``enqueue_*`` call
:func:`flush`. The methods ``finish`` and ``flush`` of a queue are replaced while a run waits for that queue, so every caller is covered.

If a program does not build, the flush raises. Every tensor that would depend on that run then raises the same error when it is used.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from netcl.core import platforms
from netcl.core.errors import DeviceError, message


class WaitingRun(NamedTuple):
    """A call of a plan: ``prepare`` waits for its programs, ``enqueue`` launches it. ``memory`` are the buffers it uses."""

    queue: Any
    prepare: Callable[[], None]
    enqueue: Callable[[], None]
    memory: Sequence[Any]
    written: Sequence[Any]


class Failed:
    """The source of a tensor whose values cannot be computed, because a program did not build."""

    __slots__ = ("error",)

    def __init__(self, error: Exception):
        self.error = error

    def compute(self) -> Any:
        """Raise the error."""
        raise self.error.with_traceback(None)

    def seen_by(self, tensor: Any) -> None:
        """Do nothing for another tensor with this source."""


#: The waiting runs of all queues, oldest first. The list is never replaced, so that callers can keep it to check whether it is empty.
waiting: list[WaitingRun] = []
_replaced: list[Any] = []  # queues with replaced methods
_order_lock = threading.RLock()
_flusher = 0  # the thread that enqueues waiting runs at this moment


def run_later(run: WaitingRun) -> None:
    """Append a run; it is enqueued at once if it is part of a run that is being enqueued."""
    with _order_lock:
        if _flusher:
            run.prepare()
            run.enqueue()
            return
        waiting.append(run)
        if all(queue is not run.queue for queue in _replaced):
            _replaced.append(run.queue)
            for name in ("finish", "flush"):
                setattr(run.queue, name, partial(_flush_and_call, run.queue, name))


def _flush_and_call(queue: Any, name: str) -> Any:
    flush(queue)
    return getattr(type(queue), name)(queue)


def flush(queue: Any = None) -> None:
    """Enqueue the waiting runs of a queue, or of all queues.

    Runs of different queues do not depend on each other: a launch with a tensor of another queue flushes that queue and does not wait.
    """
    global _flusher
    if not any(queue is None or run.queue is queue for run in tuple(waiting)):
        return
    platforms.check_process()
    with _order_lock:
        if _flusher:  # a step of a waiting run: it is in its place already
            return
        _flusher = threading.get_ident()
        try:
            for run in [run for run in waiting if queue is None or run.queue is queue]:
                if any(run is other for other in waiting):  # not removed because an earlier one failed
                    _enqueue(run)
        finally:
            _flusher = 0
            _restore_methods()


def _restore_methods() -> None:
    for queue in [queue for queue in _replaced if all(run.queue is not queue for run in waiting)]:
        del queue.finish, queue.flush
        _replaced.remove(queue)


def _enqueue(run: WaitingRun) -> None:
    prepared = done = False
    try:
        run.prepare()
        prepared = True
        run.enqueue()
        done = True
    finally:
        error = sys.exc_info()[1]
        if done:
            waiting[:] = [other for other in waiting if other is not run]
        elif prepared or isinstance(error, Exception):  # Ctrl-C in ``prepare`` leaves the run in the list
            _spoil(run, error)


def _spoil(first: WaitingRun, error: BaseException | None) -> None:
    """Remove a run that failed and all runs that use what it would have written; their tensors raise ``error`` from then on."""
    if not isinstance(error, Exception):
        error = DeviceError(message("launch", "an interrupt ended the launch of these values", "compute them again"))
    spoiled: set[int] = set()
    gone = []
    for run in tuple(waiting):
        if run is first or not spoiled.isdisjoint(map(id, run.memory)):
            spoiled.update(map(id, run.written))
            gone.append(run)
    waiting[:] = [run for run in waiting if all(run is not other for other in gone)]
    for found in gc.get_objects():
        if isinstance(getattr(type(found), "pool_handle", None), property) and id(found.memory) in spoiled:  # a Tensor
            found.source, found.memory, found.host_ref = Failed(error), None, None


def drop() -> None:
    """Forget all waiting runs: after an interrupt, the process exits without them."""
    with _order_lock:
        waiting.clear()
        _restore_methods()
