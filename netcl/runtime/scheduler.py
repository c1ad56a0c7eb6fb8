"""Streams: several queues on one device, synchronized by events only where they share memory.

A buffer belongs to the memory pool of the queue on which it was allocated. The pool reuses a buffer as soon as Python has released it,
which is only safe on one in-order queue. Therefore another stream gets a tensor through :meth:`Stream.use`: the stream waits for all
earlier work of the tensor's queue. When the result of ``use`` is released, the tensor's queue waits for the stream. The host does not
wait in either case.
"""

from __future__ import annotations

import threading
from typing import Any

from netcl.core import platforms, recording
from netcl.core.device import CPUQueue, DeviceHandle, device, get_active_device, manager, require, synchronize
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.memory import BufferHandle
from netcl.core.tensor import Tensor
from netcl.core.waiting_runs import flush_waiting
from netcl.core.writes import writes_of
from netcl.engine.lazy_graph import flush


def sibling_queue(queue: Any, profiling: bool = False) -> Any:
    """Return a new in-order queue on the context and device of ``queue``; with ``profiling`` its events have timestamps."""
    cl = platforms.opencl()
    platforms.check_process()
    return cl.CommandQueue(queue.context, queue.device, properties=cl.command_queue_properties.PROFILING_ENABLE if profiling else 0)


class Stream:
    """A separate queue on a device, besides the device's default queue.

    ``Stream()`` is on the active device, ``Stream(on)`` on the device of a selector, handle or queue. Inside ``with stream:`` new
    tensors are made on the stream. Ops run on the stream of their tensors; pass tensors of other streams through :meth:`use`. Elementwise
    ops raise for tensors of two streams; products and other ops with their own kernels make each stream wait for the other.
    On the NumPy backend, where everything is done when a call returns, a stream is the default queue and waits for nothing.

    >>> import netcl
    >>> with netcl.device("cpu"):
    ...     stream = Stream()
    ...     with stream:
    ...         y = stream.use(Tensor.ones(3)) * 2
    ...     y.tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(self, on: Any = None):
        handle = get_active_device() if on is None else require(on, op="Stream")
        self.queue = handle.queue if isinstance(handle.queue, CPUQueue) else sibling_queue(handle.queue)
        self.handle: DeviceHandle = handle if self.queue is handle.queue else manager.handle_of(self.queue)
        self._entered = threading.local()

    @classmethod
    def of(cls, queue: Any) -> Stream:
        """Return the stream of an existing queue, for instance the default queue of a device: ``Stream.of(handle.queue)``."""
        stream = cls.__new__(cls)
        stream.queue = getattr(queue, "queue", queue)
        stream.handle = manager.handle_of(stream.queue)
        stream._entered = threading.local()
        return stream

    def record(self) -> Any:
        """Return an event that completes when everything enqueued so far is done; ``None`` on the NumPy backend."""
        if isinstance(self.queue, CPUQueue):
            return None
        flush()
        flush_waiting(self.queue)
        with program.driver_errors("Stream.record", "to enqueue an event"):
            event = platforms.opencl().enqueue_marker(self.queue)
        self.queue.flush()  # another queue may wait for it: an event that was never submitted would keep that one waiting
        return event

    def wait_for(self, other: Any) -> Stream:
        """Make later work of this stream wait for the current work of ``other``.

        ``other`` is a stream, a queue, an event of :meth:`record`, or a tensor or device handle, whose queue is used. The host waits only
        if ``other`` belongs to another OpenCL context.
        """
        event = _event_of(other)
        if event is None or isinstance(self.queue, CPUQueue):
            if event is not None:
                event.wait()
            return self
        if event.get_info(platforms.opencl().event_info.CONTEXT) != self.queue.context:
            event.wait()
        else:
            recording.host_work("a stream waits for another")
            flush_waiting(self.queue)
            with program.driver_errors("Stream.wait_for", "to enqueue a barrier"):
                platforms.opencl().enqueue_barrier(self.queue, wait_for=[event])
        return self

    def use(self, tensor: Any) -> Tensor:
        """Return a tensor over the same memory for ops on this stream. These ops start after all earlier work of the tensor's own queue.

        Order in-place changes yourself, by :meth:`wait_for` in both directions. The result is a leaf that requires no gradient; a tensor
        that is already on this stream, or in NumPy, is returned itself.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(message("Stream.use", "the argument must be a tensor", "pass ag.tensor(...)", given=type(tensor).__name__))
        if tensor.queue is self.queue or tensor.array is not None:
            return tensor
        if tensor.context != self.queue.context:
            remedy = "move it with tensor.to(device), which copies"
            raise DeviceError(message("Stream.use", "the tensor must be on the stream's device", remedy, tensor=tensor.device.device_name))
        buffer = tensor.realize()  # on its own queue, before that is waited for
        self.wait_for(tensor.queue)
        lease = _Borrowed(tensor, self) if tensor.pool_handle is not None else None
        view = Tensor(buffer, tensor.shape, tensor.dtype, tensor.context, self.queue, lease)
        view.host_ref, view.writes = tensor.host_ref, writes_of(tensor)
        return view if tensor.place is None else hooks.call("follow_view", tensor, view)

    def synchronize(self) -> None:
        """Wait on the host until everything enqueued so far is done."""
        synchronize(self.queue)

    finish = synchronize

    def __enter__(self) -> Stream:
        block = device(self.handle)
        block.__enter__()
        self._blocks().append(block)
        return self

    def __exit__(self, *exc: object) -> None:
        self._blocks().pop().__exit__(*exc)

    def _blocks(self) -> list[device]:
        return vars(self._entered).setdefault("blocks", [])  # of this thread

    def __repr__(self) -> str:
        return f"Stream(on {self.handle.device_name!r})"


_never_returned: list[BufferHandle] = []


class _Borrowed(BufferHandle):
    """A buffer used by a stream other than its owner's queue. When this handle is deleted, the owner's queue waits for the stream."""

    __slots__ = ("lease", "owner", "stream")

    def __init__(self, tensor: Tensor, stream: Stream):
        of = tensor.pool_handle
        assert of is not None
        super().__init__(of.shelf, of.buffer, of.nbytes)
        self.lease, self.owner, self.stream = of, tensor.queue, stream

    def release(self) -> None:
        """Do nothing: the owner's lease ends with its last reference."""

    def __del__(self) -> None:
        if self.buffer is not None and not platforms.forked_child:
            self.buffer = None
            try:
                with recording.paused(), program.driver_errors("Stream", "to enqueue an event"):  # also while recording
                    flush_waiting(self.stream.queue)
                    done = platforms.opencl().enqueue_marker(self.stream.queue)  # deferred ops need no flush: they hold their tensors
                    self.stream.queue.flush()
                    Stream.of(self.owner).wait_for(done)
            except (DeviceError, OutOfMemoryError, KernelBuildError):  # nothing may be raised here
                try:
                    self.stream.queue.finish()  # the host waits instead
                except DeviceError:  # of a thread that may not wait: the memory is not reused
                    _never_returned.append(self.lease)


def _event_of(other: Any) -> Any:
    if isinstance(other, (Tensor, DeviceHandle)):
        other = other.queue
    if isinstance(other, Stream):
        return other.record()
    if hasattr(other, "finish"):
        return Stream.of(other).record()
    if other is not None and not hasattr(other, "get_info"):
        what = "the argument must be a stream, a queue, a tensor or an event"
        raise DeviceError(message("Stream.wait_for", what, given=type(other).__name__))
    return other
