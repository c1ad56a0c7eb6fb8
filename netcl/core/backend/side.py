"""Copies to a device beside its kernels: a second queue, kept in step with the first."""

from __future__ import annotations

from typing import Any

from netcl.core import platforms
from netcl.core.backend.opencl import backend_of


class SideQueue:
    """A second queue of a device, for copies that run beside the kernels of the first.

    ``with side as queue:`` is the block in which copies are queued; :meth:`join` makes kernels wait for them. A buffer of this queue's
    pool comes back when its tensor is dropped, while kernels of the first queue may still read it: so copies wait for the kernels
    that were queued before the block, and run beside those queued after it.
    """

    def __init__(self, queue: Any):
        self._cl = platforms.opencl()
        self.queue, self.side = queue, self._cl.CommandQueue(queue.context, queue.device)

    def __enter__(self) -> Any:
        before = self._cl.enqueue_marker(self.queue)
        self.queue.flush()
        self._cl.enqueue_barrier(self.side, wait_for=[before])
        return self.side

    def __exit__(self, *_: object) -> None:
        self.side.flush()

    def join(self, events: list[Any]) -> None:
        """Kernels queued from now on wait for these copies."""
        if events:
            self._cl.enqueue_barrier(self.queue, wait_for=events)


def beside(queue: Any) -> SideQueue | None:
    """A queue for copies beside the kernels of ``queue``; ``None`` where copies are not queued: memory shared with the host."""
    if getattr(queue, "context", None) is None or backend_of(queue).integrated:
        return None
    return SideQueue(queue)
