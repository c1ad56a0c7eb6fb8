"""Handles fork, interrupts and process exit for OpenCL.

Interrupts: Python runs a signal handler only between bytecodes, so a main thread that waits inside a driver does not run the
handler. Python's C-level handler, however, writes to the wake-up file at once, and a watcher thread reads that file. The watcher ends the
process with status 130 at a second Ctrl-C, or if the main thread has not returned to Python within the grace time. Code that must finish
its work first uses :func:`finishing_first`, which turns the first interrupt into an event.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from netcl.core import memory, platforms, waiting_runs
from netcl.core.errors import DeviceError, message
from netcl.core.kernels import builders, program
from netcl.core.queue_state import queues
from netcl.core.tracebacks import PACKAGE

GRACE_SECONDS = 3.0
INTERRUPTED = 130
_POLL_SECONDS = 0.01
_LEAST_WAIT = 0.5  # an idle queue finishes well within this time

computing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have called an op
_interrupted_at: float | None = None
_installed = False
_install_lock = threading.Lock()
_parents_objects: list[Any] = []


class _Finishing:
    """The state of a :func:`finishing_first` block: how many interrupts its signal handler and the watcher thread have each seen."""

    def __init__(self) -> None:
        self.open = True
        self.handled = self.watched = 0


_finishing: _Finishing | None = None  # the last block, also after it has ended


def install_handlers() -> None:
    """Install the handlers for exit, fork and, in the main thread, interrupts; only the first call in a process has an effect."""
    global _installed
    with _install_lock:
        if _installed:
            return
        _installed = True
    atexit.register(_finish_all)
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    if threading.current_thread() is threading.main_thread():
        _install_interrupt_handler()


def interruptible_finish(queue: Any, timeout: float = 30.0) -> bool:
    """Wait at most ``timeout`` seconds for a queue and return whether it has finished; raises if its work failed.

    An event is polled at least every 10 ms, so that Ctrl-C is handled.
    """
    waiting_runs.flush_waiting(queue)
    cl = platforms.opencl()
    with program.driver_errors("finish", "to finish the queue"):
        marker = cl.enqueue_marker(queue)
        queue.flush()
    deadline, pause = time.monotonic() + timeout, 1e-4
    while (status := marker.command_execution_status) > 0 and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS)
    if status < 0:
        raise DeviceError(message("finish", f"the queue cannot finish: {cl.status_code.to_string(status, 'status %d')}"))
    return bool(status == 0)


class Stop(threading.Event):
    """An event that is set by the first signal that asks the process to end; ``status`` is the exit status for that signal."""

    status = INTERRUPTED


@contextmanager
def finishing_first() -> Iterator[Stop]:
    """Yield a :class:`Stop`. The first Ctrl-C or SIGTERM in the block only sets this event, so that work can end; the second exits at once.

    The exit status is 130, or 143 for SIGTERM. A SIGTERM handler that the program has set is kept. Outside the main thread, where
    Python delivers no signals, the event is never set.
    """
    global _finishing
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    block, outer = _Finishing(), _finishing

    def handler(signum: int, frame: Any) -> None:
        block.handled += signum == signal.SIGINT
        if stop.is_set():
            os._exit(128 + signum)
        stop.status = 128 + signum
        stop.set()

    previous = signal.signal(signal.SIGINT, handler)
    terminates = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if terminates:
        signal.signal(signal.SIGTERM, handler)
    _finishing = block
    try:
        yield stop
    finally:
        block.open = False
        if outer is not None and outer.open:
            _finishing = outer
        signal.signal(signal.SIGINT, previous if previous is not None else signal.default_int_handler)
        if terminates:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _finish_all() -> None:
    """At exit, wait for queued work; after a Ctrl-C, exit with 130 if a queue does not finish in the rest of the grace time."""
    if platforms.forked_child:
        return
    _stop_daemons()
    if _interrupted_at is not None:
        waiting_runs.drop()
    try:
        waiting_runs.flush_waiting()
    finally:
        builders.close()
    for queue in queues():
        if _interrupted_at is None:
            queue.finish()
        elif not interruptible_finish(queue, max(_LEAST_WAIT, _interrupted_at + GRACE_SECONDS - time.monotonic())):
            os._exit(INTERRUPTED)


def _stop_daemons() -> None:
    """End daemon threads that compute: they would keep filling their queue, and a driver aborts when it is unloaded while in use.

    ``SystemExit`` is raised in each thread at its next bytecode. The process waits only for threads that are inside netcl at that moment.
    """
    deadline, others = time.monotonic() + GRACE_SECONDS, sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is SystemExit else others(raised)  # in a __del__; it is raised again below
    left = [t for t in list(computing) if t.daemon and t.is_alive() and t is not threading.current_thread()]
    while left and time.monotonic() < deadline:
        for thread in left:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        left[0].join(_POLL_SECONDS)
        stacks = sys._current_frames()
        left = [thread for thread in left if thread.is_alive() and _is_inside(stacks.get(thread.ident or 0))]


def _is_inside(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _install_interrupt_handler() -> None:
    previous = signal.getsignal(signal.SIGINT)
    if previous not in (signal.default_int_handler, signal.SIG_DFL):
        return  # the program has a handler of its own, and keeps it
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    if signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False) != -1:
        return  # an event loop owns the wake-up file, and it returns to Python by itself
    back = threading.Event()
    threading.Thread(target=_watch_interrupts, args=(reader, writer, back), name="netcl-interrupt", daemon=True).start()

    def handler(signum: int, frame: Any) -> None:
        global _interrupted_at
        _interrupted_at = time.monotonic()
        back.set()
        signal.default_int_handler(signum, frame)

    signal.signal(signal.SIGINT, handler)


def _watch_interrupts(reader: socket.socket, writer: socket.socket, back: threading.Event) -> None:
    """Wait for Ctrl-C; exit with 130 on a second one, or if the main thread stays in the driver too long without setting ``back``."""
    del writer  # referenced so that the wake-up file stays open
    while True:
        if reader.recv(1) != bytes([signal.SIGINT]):
            continue
        if _is_deferred(_finishing):
            continue
        reader.settimeout(0.05)
        deadline = time.monotonic() + GRACE_SECONDS
        while not back.is_set():
            if time.monotonic() > deadline or _another(reader):
                os._exit(INTERRUPTED)
        back.clear()
        reader.settimeout(None)


def _is_deferred(block: _Finishing | None) -> bool:
    """Count an interrupt in ``block`` and return whether the block defers it; the second interrupt in an open block exits the process."""
    if block is None or not (block.open or block.handled > block.watched):
        return False
    block.watched += 1
    if block.open and block.watched > 1:
        os._exit(INTERRUPTED)
    return True


def _another(reader: socket.socket) -> bool:
    try:
        return reader.recv(1) == bytes([signal.SIGINT])
    except TimeoutError:
        return False


def _before_fork() -> None:
    """Keep a reference to every live buffer, waiting run and queue: their destructors must not run in the child."""
    _parents_objects[:] = [*memory.live_buffers(), *waiting_runs.waiting, *queues()]


def _after_fork_in_child() -> None:
    """Keep the parent's driver objects alive in the child, and make OpenCL raise there."""
    for item in _parents_objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    platforms.mark_forked_child()
