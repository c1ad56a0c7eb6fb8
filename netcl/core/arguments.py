"""Arguments of tensor factories: the shape, and the queue of the new tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core.device import DeviceHandle, get_active_device, require
from netcl.core.errors import DeviceError, ShapeError, message

Shape = int | Sequence[int]


def check_shape(shape: Shape, op: str) -> tuple[int, ...]:
    """Convert a shape to a tuple of Python integers; raises an error that names ``op`` if a size is negative or not an integer."""
    if type(shape) is tuple:
        for n in shape:
            if type(n) is not int or n < 0:
                break
        else:
            return shape
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(not isinstance(n, (int, np.integer)) or isinstance(n, bool) for n in sizes):
        raise ShapeError(message(op, "every size of shape must be an integer", shape=shape))
    if any(n < 0 for n in sizes):
        raise ShapeError(message(op, "sizes must not be negative", shape=sizes))
    return tuple(int(n) for n in sizes)


def find_queue(queue: Any, context: Any = None, device: Any = None) -> Any:
    """Return the queue for a queue, a handle, a selector or a context; the default is the queue of the active device."""
    if device is not None:
        queue = require(device)
    if queue is None and context is not None:
        handle = get_active_device()
        queue = handle if handle.context == context else None
        if queue is None:
            seen = {"active": handle.device_name, "context": context}
            raise DeviceError(message("tensor", "context must be that of the active device", "pass queue=", **seen))
    if queue is None:
        queue = get_active_device()
    queue = queue.queue if isinstance(queue, DeviceHandle) else queue
    if not hasattr(queue, "finish"):
        what = "queue must be a command queue or a device handle"
        raise DeviceError(message("tensor", what, "pass handle.queue, or device= with a selector", queue=repr(queue)))
    if context is not None and queue.context is not None and queue.context != context:
        remedy = "pass the queue's own context or none"
        raise DeviceError(message("tensor", "queue must belong to the given context", remedy, queue=queue.context, context=context))
    return queue
