"""Runs of plans that wait for builder processes to compile their programs, in the order of the calls.

Whatever enqueues commands calls :func:`flush_waiting` first, which enqueues the waiting runs of its queue. The methods ``finish`` and
``flush`` of a queue do so by themselves while runs wait for it. If a program does not build, the flush raises its error; tensors whose
values depend on that run raise it again whenever they are used. Other tensors are not affected.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from netcl.core import platforms, recording
from netcl.core.errors import DeviceError, message

BUILDER_THREAD = "netcl-builder"  # the name of threads that feed builder processes
_MOST_WAITING = 1 << 12  # runs: a program that reads nothing must start its device, too


@dataclass(eq=False, slots=True)
class WaitingRun:
    """A command that uses the buffers ``memory`` and writes those in ``written``. ``prepare`` waits for its programs, before ``enqueue``.

    ``leases`` are kept until it is enqueued: those of other queues, whose memory is not reused in the order of this queue.
    """

    queue: Any
    enqueue: Callable[[], object]
    memory: Sequence[Any]
    written: Sequence[Any]
    prepare: Callable[[], None] | None = None
    leases: Sequence[Any] = ()


@dataclass
class Failed:
    """The source of a tensor whose values cannot be computed."""

    error: Exception

    def compute(self) -> Any:
        """Raise the error."""
        raise self.error.with_traceback(None)

    def seen_by(self, tensor: Any) -> None:
        """Do nothing for another tensor with this source."""


class _Flushing(threading.local):
    """The queues whose runs the current thread is enqueuing."""

    def __init__(self) -> None:
        self.queues: list[Any] = []


#: The waiting runs of all queues, oldest first. The list is never replaced, so a caller may keep it to check whether it is empty.
waiting: list[WaitingRun] = []
_flushing = _Flushing()


def _among(queue: Any, queues: Iterable[Any]) -> bool:
    return any(queue is other for other in queues)


def _own_runs(queue: Any) -> list[WaitingRun]:
    return [run for run in tuple(waiting) if run.queue is queue]  # a copy: threads with another context change the list meanwhile


def run_later(run: WaitingRun) -> None:
    """Append a run. It is enqueued now if it need not wait, or if it is a step of a run that is being enqueued."""
    queue = run.queue
    with queue.netcl.lock:
        behind = bool(_own_runs(queue))
        if _among(queue, _flushing.queues) or (run.prepare is None and not behind):
            if run.prepare is not None:
                run.prepare()
            run.enqueue()
            return
        waiting.append(run)
        for name in () if behind else ("finish", "flush"):
            setattr(queue, name, partial(_flush_and_call, queue, name))
        if len(waiting) > _MOST_WAITING:
            flush_waiting(queue)


def _flush_and_call(queue: Any, name: str) -> Any:
    flush_waiting(queue)
    return getattr(type(queue), name)(queue)


def flush_waiting(queue: Any = None) -> None:
    """Enqueue the waiting runs of a queue, or of all queues. Runs of different queues do not depend on each other."""
    if queue is None:
        for run in tuple(waiting):
            flush_waiting(run.queue)
    elif _own_runs(queue) and not _among(queue, _flushing.queues):
        platforms.check_process()
        if threading.current_thread().name == BUILDER_THREAD:  # garbage collection there calls destructors that wait for a queue
            raise DeviceError(message("launch", "a thread that compiles programs cannot wait for runs that need them"))
        with queue.netcl.lock, recording.paused():  # the runs are not part of a recorded step or of a plan
            kept = [run.leases for run in _own_runs(queue)]  # until all are enqueued: a copy that follows a run holds no lease
            try:
                call_at_once(queue, partial(_enqueue_all, queue))
            finally:
                if not _own_runs(queue):
                    _restore_methods(queue)
        del kept


def call_at_once(queue: Any, enqueue: Callable[[], object]) -> None:
    """Call ``enqueue``; its commands do not wait behind the runs that other threads append to the queue meanwhile."""
    _flushing.queues.append(queue)
    try:
        enqueue()
    finally:
        _flushing.queues.pop()


def _enqueue_all(queue: Any) -> None:
    while own := _own_runs(queue):
        _enqueue(own[0])


def _restore_methods(queue: Any) -> None:
    for name in ("finish", "flush"):
        vars(queue).pop(name, None)


def _stopped() -> DeviceError:
    return DeviceError(message("launch", "Ctrl-C ended the launch that computes these values", "compute them again"))


def _enqueued_before() -> None:
    raise _stopped()


def _enqueue(run: WaitingRun) -> None:
    done = False
    try:
        if run.prepare is not None:
            run.prepare()
        enqueue, run.enqueue = run.enqueue, _enqueued_before  # never twice, also if Ctrl-C comes before the run is removed
        enqueue()
        waiting.remove(run)
        done = True
    finally:
        error = sys.exc_info()[1]
        if not done and (isinstance(error, Exception) or run.enqueue is _enqueued_before):  # else Ctrl-C came while it waited for a program
            _spoil(run, error if isinstance(error, Exception) else _stopped())


def _spoil(first: WaitingRun, error: Exception) -> None:
    """Remove a run that failed and the runs that use what it would have written; their tensors raise ``error`` from then on."""
    spoiled: set[int] = set()
    for run in tuple(waiting):
        if run is first or not spoiled.isdisjoint(map(id, run.memory)):
            spoiled.update(map(id, run.written))
            waiting.remove(run)
    for found in gc.get_objects():
        if isinstance(getattr(type(found), "pool_handle", None), property) and id(found.memory) in spoiled:  # a tensor
            found.source, found.memory, found.host_ref = Failed(error), None, None


def drop() -> None:
    """Forget all waiting runs: after an interrupt, the process exits without them."""
    for queue in [run.queue for run in waiting]:
        _restore_methods(queue)
    waiting.clear()
