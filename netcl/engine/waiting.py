"""Launches whose work-groups wait for each other: the flag they set on a timeout, and the watch that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core import recording
from netcl.core.backend.cpu import HostCopy
from netcl.core.commands import constant
from netcl.core.device import handle_of
from netcl.core.errors import DeviceError, message
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.kernels import program
from netcl.core.queue_state import queue_state
from netcl.core.tensor import Tensor

_TURNS = 11 * 16  # eleven numbers, apart by a line of the cache
WATCHED = 64  # launches between two checks for timeouts
_NOT_CONCURRENT = ("waiting", "failed")  # key of a context in which groups of one launch did not run concurrently


def late_flag(queue: Any) -> Tensor:
    """Return the flag that kernels set on a timeout; one per context."""
    return _of_context(queue, "late", lambda own: constant(Tensor.zeros((1,), "int32", queue=own)))


def turns(queue: Any) -> Tensor:
    """Return the numbers by which the work-items of one launch divide its work, 0 before and after it. One set per queue."""
    return queue_state(queue).part("turns", lambda own: constant(Tensor.zeros((_TURNS,), "int32", queue=own)))


def may_wait(queue: Any) -> bool:
    """Whether groups of one launch may wait for each other: on the device's own queue, unless it failed before.

    Kernels of two queues could each occupy half of the compute units and wait for the other half.
    """
    return handle_of(queue).queue is queue_state(queue).queue and not program.state(queue).get(_NOT_CONCURRENT, False)


class Watch:
    """A callable that raises if a kernel timed out. Every few calls, it checks its last copy of :func:`late_flag` and makes a new copy."""

    def __init__(self, queue: Any):
        self.queue, self.calls = queue, 0
        self.copy: HostCopy | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % WATCHED:
            return
        copy, flag = self.copy, late_flag(self.queue)
        with recording.paused():
            if copy is not None and copy.wait()[0]:
                self.copy = None
                flag.fill_(0)
                program.state(self.queue)[_NOT_CONCURRENT] = True
                get_kernel_selector().clear_cache()
                what = f"work-groups of one launch must run concurrently but did not; results of the last {2 * WATCHED} launches may be NaN"
                raise DeviceError(message("launch", what, "repeat the step: later launches do not require it"))
            self.copy = flag.to_host_async()


def watch(queue: Any) -> Watch:
    """Return the watch of a context, created at first use."""
    return _of_context(queue, "watch", Watch)


def _of_context(queue: Any, name: str, make: Callable[[Any], Any]) -> Any:
    state = program.state(queue)
    if ("waiting", name) not in state:
        state["waiting", name] = make(queue_state(queue).queue)
    return state["waiting", name]
