"""Tensor: a contiguous block of memory on a device, with shape, dtype and gradient.

Every tensor is contiguous: ``reshape`` mostly shares the buffer, and a slice or a transposition is a copy that :mod:`netcl.ops.views` keeps
equal to its base. Operators and other ops are called through :mod:`netcl.core.hooks`; they are defined in upper layers.

A tensor may be *deferred*: its shape and dtype are known, but its values are computed by ``source`` when :meth:`Tensor.realize` is
called. Plans realize their operands. Reading ``buffer``, ``array`` or ``pool_handle`` realizes the tensor too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import methods, recording
from netcl.core.arguments import Shape
from netcl.core.arguments import check_shape as _shape
from netcl.core.arguments import find_queue as _queue
from netcl.core.backend.cpu import CPUBackend, HostCopy, check_shared, storage_of
from netcl.core.backend.opencl import backend_of
from netcl.core.commands import CommandList
from netcl.core.device import CPUQueue, DeviceHandle, handle_of, require
from netcl.core.dtype import FLOAT32
from netcl.core.errors import AutogradError, DtypeError, OutOfMemoryError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.memory import BufferHandle
from netcl.core.methods import SIZES, Size, size_of
from netcl.core.waiting_runs import flush_waiting, waiting
from netcl.core.writes import Writes, extent, read_views, rewrote, writes_of, wrote

if TYPE_CHECKING:
    from netcl.core.tensor_methods import TensorMethods
else:
    TensorMethods = object

_CPU = CPUBackend()
PRINT_OPTIONS: dict[str, Any] = {"precision": 4, "threshold": 50, "edgeitems": 3}  # of repr, see netcl.set_printoptions


def _host_memory(shape: tuple[int, ...], row: dtypes.DType) -> np.ndarray:
    try:
        return np.empty(shape, row.storage)
    except (MemoryError, ValueError) as error:
        nbytes = math.prod(shape) * row.itemsize
        raise OutOfMemoryError(message("allocate", f"allocation failed: {error}", tensor=f"{shape} {row.name}", bytes=nbytes)) from None


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class RemovableHandle:
    """The handle of a registered hook: ``remove()``, a call, or leaving a ``with`` block removes the hook."""

    __slots__ = ("remove",)

    def __init__(self, remove: Callable[[], None]):
        self.remove = remove

    def __call__(self) -> None:
        self.remove()

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _OnClassOrInstance:
    """A method with two meanings: ``Tensor.f(...)`` creates a tensor, ``t.f(...)`` acts on one."""

    def __init__(self, of_class: Callable[..., Any], of_instance: Callable[..., Any]):
        self.of_class = of_class
        self.of_instance = of_instance
        self.__doc__ = of_class.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return self.of_class.__get__(owner) if instance is None else self.of_instance.__get__(instance)


def _make_from_host(
    cls: type[Tensor],
    queue_or_array: Any,
    array: Any = None,
    dtype: str | None = None,
    *,
    requires_grad: bool = False,
    persistent: bool = False,
    async_copy: bool | None = None,
    use_pinned: bool | None = None,
    share: bool = False,
) -> Tensor:
    """Copy host values to a device: ``Tensor.from_host(queue, array)``, or ``Tensor.from_host(array)`` on the active one.

    Without ``dtype``, float64 and Python floats become float32; integers, bool, float32, float16 and bfloat16 keep their dtype. The array
    may be changed as soon as the call returns, except with ``share=True``: devices that can use host memory then use the array.
    ``async_copy`` does not wait for the copy, ``use_pinned`` copies through page-locked memory; ``persistent`` as in :meth:`empty`.
    """
    if array is None or isinstance(array, str):
        queue_or_array, array, dtype = None, queue_or_array, array if array is not None else dtype
    queue = _queue(queue_or_array)
    stored, row = storage_of(array, dtype)
    if share:
        check_shared(array, stored)
    if isinstance(queue, CPUQueue):
        own = stored if share or not np.may_share_memory(stored, array) else stored.copy()
        result = wrap_array(own, row.name, queue)
    else:
        backend = backend_of(queue)
        sent = backend.send(array, stored, row, async_copy, use_pinned, share)
        result = cls(sent.buffer, stored.shape, row.name, backend.context, queue, sent.handle)
        result.pending_event, result.pending_release, result.host_ref = sent.event, sent.pending_release, sent.host_ref
    result._mark(requires_grad, persistent)
    return result


def _overwrite(self: Tensor, array: Any, async_copy: bool | None = None, use_pinned: bool | None = None) -> Tensor:
    """Overwrite the values in place; the array must have the tensor's shape. Returns the tensor."""
    stored, _ = storage_of(array, self.dtype, "from_host")
    if stored.shape != self.shape:
        raise ShapeError(message("from_host", "the array must have the shape of the tensor", array=stored.shape, tensor=self.shape))
    if self.place is not None and self.place.strides is not None:
        return hooks.call("store", self, Tensor.from_host(self.queue, array, self.dtype))
    self._changing()
    if self.array is not None:
        np.copyto(self.array, stored)
    else:
        sent = backend_of(self.queue).write(self, array, stored, async_copy, use_pinned)
        self.pending_event, self.pending_release, self.host_ref = sent.event, sent.pending_release, sent.host_ref
    rewrote(self)
    return self


class Source:
    """Computes the values of deferred tensors; tensors with the same source share memory."""

    __slots__ = ()

    def compute(self) -> Tensor:
        """Return the tensor that owns the values; computes it if necessary."""
        raise NotImplementedError

    def seen_by(self, tensor: Tensor) -> None:
        """Register another tensor with this source; does nothing for a source that does not count its tensors."""


class CountedSource(Source):
    """A source that knows which of its tensors still exist."""

    __slots__ = ("__weakref__", "tensors")
    tensors: list[weakref.ref[Tensor]]

    def seen_by(self, tensor: Tensor) -> None:
        self.tensors.append(weakref.ref(tensor))

    def alive(self) -> bool:
        """Whether a tensor of this source still exists, so that its values may be read."""
        return any(ref() is not None for ref in self.tensors)


@dataclass(init=False, repr=False, eq=False)
class Tensor(TensorMethods):
    """An n-dimensional array on a device.

    >>> from netcl.core.tensor import Tensor
    >>> t = Tensor.from_host([[1, 2], [3, 4]], dtype="float32")
    >>> t.shape, t.dtype
    ((2, 2), 'float32')
    >>> t.to_host().tolist()
    [[1.0, 2.0], [3.0, 4.0]]

    Internal attributes: ``memory`` (an OpenCL buffer or an array; ``None`` while deferred), ``lease``, ``place`` (where a view lies in its
    base), ``source`` (computes deferred values) and ``writes`` (the time of the last write).
    """

    buffer: Any
    shape: tuple[int, ...]
    dtype: str
    context: Any
    queue: Any
    pool_handle: BufferHandle | None
    persistent: bool
    requires_grad: bool
    grad: Tensor | None
    grad_fn: Any
    host_ref: np.ndarray | None
    array: np.ndarray | None
    pending_event: Any
    pending_release: Callable[[], None] | None

    __slots__ = (
        "__weakref__", "_hooks", "is_param", "_requires_grad", "_persistent", "context", "dtype", "grad", "grad_fn", "host_ref", "lease",
        "memory", "output_nr", "pending_event", "pending_release", "place", "queue", "requires_grad", "shape", "source", "writes",
    )  # fmt: skip
    if TYPE_CHECKING:
        is_param: bool  # set on parameters only
    __array_ufunc__ = None  # NumPy must leave `array + tensor` to the tensor

    def __init__(
        self, buffer: Any = None, shape: tuple[int, ...] = (), dtype: str = FLOAT32, context: Any = None, queue: Any = None,
        pool_handle: BufferHandle | None = None, persistent: bool = False, requires_grad: bool = False, grad: Tensor | None = None,
        grad_fn: Any = None, host_ref: np.ndarray | None = None, array: np.ndarray | None = None, pending_event: Any = None,
        pending_release: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.memory = buffer if array is None else array
        self.shape = shape
        self.dtype = dtype if type(dtype) is dtypes.dtype else dtypes.NAMES.get(dtype) or dtypes.lookup(dtype, "Tensor").name
        self.context = context
        self.queue = queue
        self.lease = pool_handle
        self._persistent = persistent
        if persistent and pool_handle is not None:
            pool_handle.persistent = True
        self._requires_grad = False
        if requires_grad:
            self.requires_grad = True
        self.grad = grad
        self.grad_fn = grad_fn
        self.host_ref = host_ref
        self.pending_event = pending_event
        self.pending_release = pending_release
        self._hooks: list[Callable[[Tensor], Tensor | None]] | None = None
        self.output_nr = 0  # which output of grad_fn this is
        self.writes: Writes | None = None
        self.place: Any = None  # of a view in the memory of its base (ops.views.Place)
        self.source: Source | None = None

    # ---- memory

    def realize(self) -> Any:
        """Compute the values if they are deferred; returns the memory, an OpenCL buffer or an array."""
        if self.memory is None and self.source is not None:
            made = self.source.compute()
            memory = made.realize()
            self.lease, self.memory = made.lease, memory.reshape(self.shape) if isinstance(memory, np.ndarray) else memory
            if self.writes is None:
                self.writes = writes_of(made)
            else:
                made.writes = self.writes
        return self.memory

    # ---- creating tensors

    from_host = _OnClassOrInstance(_make_from_host, _overwrite)

    @classmethod
    def empty(
        cls, shape: Shape, dtype: str = FLOAT32, *, queue: Any = None, context: Any = None, device: Any = None,
        requires_grad: bool = False, persistent: bool = False,
    ) -> Tensor:  # fmt: skip
        """Create an uninitialized tensor; with ``persistent``, its lease ends only with the last reference, not by ``release``."""
        sizes = _shape(shape, "empty")
        if queue is None or context is not None or device is not None or type(queue) is DeviceHandle:
            queue = _queue(queue, context, device)
        row = dtypes.DTYPES.get(dtype) or dtypes.lookup(dtype, "empty")
        if isinstance(queue, CPUQueue):
            result = wrap_array(_host_memory(sizes, row), row.name, queue)
        else:
            backend = backend_of(queue)
            handle = backend.empty(sizes, row)
            result = cls(handle.buffer, sizes, row.name, backend.context, queue, handle)
        if requires_grad or persistent:
            result._mark(requires_grad, persistent)
        return result

    @classmethod
    def full(cls, shape: Shape, value: float, dtype: str | None = None, **where: Any) -> Tensor:
        """Create a tensor filled with ``value``; the default dtype is bool, int64 or float32, by the type of ``value``."""
        return cls.empty(_shape(shape, "full"), dtype or dtypes.of_value(value).name, **where)._fill(value)

    @classmethod
    def from_shape(cls, queue: Any, shape: Shape, dtype: str = FLOAT32, fill: float = 0, **where: Any) -> Tensor:
        """Create a tensor filled with ``fill``, by default zeros: ``Tensor.from_shape(queue, shape)``."""
        return cls.full(_shape(shape, "from_shape"), fill, dtype, queue=queue, **where)

    @classmethod
    def zeros(cls, *shape: Any, dtype: str | None = None, **where: Any) -> Tensor:
        """Create a tensor of zeros: ``zeros(2, 3)`` or ``zeros((2, 3))``; a dtype may follow a tuple.

        ``context=``, ``queue=`` or ``device=`` select the device; the default is the active one.
        """
        return cls._constant("zeros", 0, shape, dtype, where)

    @classmethod
    def ones(cls, *shape: Any, dtype: str | None = None, **where: Any) -> Tensor:
        """Create a tensor of ones; arguments as those of :meth:`zeros`."""
        return cls._constant("ones", 1, shape, dtype, where)

    @classmethod
    def _constant(cls, op: str, value: float, shape: tuple[Any, ...], dtype: str | None, where: dict[str, Any]) -> Tensor:
        sizes: Any = shape[0] if len(shape) == 1 else shape
        if len(shape) == 2 and not isinstance(shape[1], int | np.integer):
            sizes, dtype = shape
        return cls.empty(_shape(sizes, op), dtype or FLOAT32, **where)._fill(value)

    @classmethod
    def arange(cls, start: float, stop: float | None = None, step: float = 1, dtype: str | None = None, *, queue: Any = None,
               device: Any = None) -> Tensor:  # fmt: skip
        """Create ``start, start + step, ...`` below ``stop``; integers give int64, floats float32; integer dtypes truncate as in torch."""
        start, stop = (0, start) if stop is None else (start, stop)
        row = dtypes.lookup(FLOAT32 if dtype is None else dtype, "arange")
        if (step if row.is_float else int(step)) == 0 or (stop - start) / step < 0:
            raise ShapeError(message("arange", "step must lead from start to stop", start=start, stop=stop, step=step, dtype=dtype))
        if not row.is_float:  # torch counts before it truncates, except for int64
            steps = -((start - stop) // step)
            start, stop, step = int(start), int(stop), int(step)
            stop = stop if row.name == "int64" else start + int(steps) * step
        return cls.from_host(_queue(queue, None, device), np.arange(start, stop, step), dtype)

    @classmethod
    def randn(cls, *shape: Any, dtype: str = "float32", queue: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        """Draw standard normal values from the device's counter-based generator (``netcl.manual_seed``)."""
        return cls._random("randn", shape, dtype, queue, device, requires_grad)

    @classmethod
    def rand(cls, *shape: Any, dtype: str = "float32", queue: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        """Draw uniformly distributed values in [0, 1) from the same generator as :meth:`randn`."""
        return cls._random("rand", shape, dtype, queue, device, requires_grad)

    @classmethod
    def _random(cls, kind: str, shape: tuple[Any, ...], dtype: str, queue: Any, device: Any, requires_grad: bool) -> Tensor:
        sizes = _shape(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, kind)
        return hooks.call(kind, sizes, dtype=dtype, queue=_queue(queue, None, device)).requires_grad_(requires_grad)

    def _mark(self, requires_grad: bool, persistent: bool) -> None:
        self._requires_grad = False
        if requires_grad:
            self.requires_grad = True
        self._persistent = persistent
        if self.pool_handle is not None:
            self.pool_handle.persistent = persistent

    def _changing(self) -> None:
        """Prepare an in-place write. For a write by a launch, :func:`wrote` is enough: a launch computes the pending readers itself."""
        if self.grad_fn is not None:
            hooks.call("changing_history", self)
        self._compute_readers()
        wrote((self,))

    def _compute_readers(self) -> None:
        """Compute the deferred values that read this memory."""
        if hooks.readers:
            hooks.readers.compute(self.pool_handle if self.array is None else memory_of(self.array))

    # ---- properties

    @property
    def _version(self) -> int:
        """The time (of :class:`clock`) of the last in-place write to this memory; 0 if there was none."""
        return 0 if self.writes is None else self.writes.last

    @property
    def size(self) -> Size:
        """The number of elements; ``x.size()`` is the shape and ``x.size(0)`` the length of an axis, as in torch."""
        try:
            return SIZES[self.shape]
        except KeyError:
            return size_of(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.size * dtypes.DTYPES[self.dtype].itemsize

    @property
    def backend(self) -> str:
        """``"cl"`` or ``"cpu"`` (NumPy)."""
        return "cpu" if isinstance(self.queue, CPUQueue) else "cl"

    @property
    def device(self) -> DeviceHandle:
        """The handle of the device that holds the tensor."""
        return handle_of(self.queue)

    @property
    def T(self) -> Tensor:
        """The tensor with its dimensions reversed."""
        return hooks.call("permute", self, tuple(range(self.ndim))[::-1])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(message("len", "a 0-d tensor has no length"))
        return self.shape[0]

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        values = np.array2string(self.to_host(), separator=", ", prefix="Tensor(", **PRINT_OPTIONS)
        return f"Tensor({values}, shape={self.shape}, dtype={self.dtype}, device={self.device.device_name!r}{grad})"

    # ---- values

    def to_host(self) -> np.ndarray:
        """Copy the values to a NumPy array; bfloat16 is widened to float32."""
        if self.array is not None:
            values = _CPU.to_host(self.array, self.shape, self.dtype)
            return values.copy() if values is self.array or values.base is not None else values
        return backend_of(self.queue).to_host(self.buffer, self.shape, self.dtype)

    numpy = to_host

    def to_host_async(self) -> HostCopy:
        """Start copying to the host: ``.wait()`` returns the array; unpacks to ``(array, event)``."""
        if self.array is not None:
            return HostCopy(self.to_host())
        return backend_of(self.queue).to_host_async(self.buffer, self.shape, self.dtype)

    def wait(self) -> Tensor:
        """Wait for a pending copy to the device and release its staging memory; returns the tensor."""
        event, release = self.pending_event, self.pending_release
        self.pending_event = self.pending_release = None
        if event is not None:
            event.wait()
        if release is not None:
            release()
        return self

    def write(self, values: Any) -> Tensor:
        """Overwrite in place from a tensor, an array or numbers of the same shape; returns the tensor."""
        return self.from_host(values.to_host() if isinstance(values, Tensor) else np.asarray(values))

    def fill_(self, value: Any) -> Tensor:
        """Overwrite every element with ``value``, in place; returns the tensor."""
        if self.requires_grad or isinstance(value, Tensor) or not (self.place is None or self.place.is_plain()):
            return hooks.call("in_place", "fill", self, value)
        self._changing()
        self._fill(value)
        rewrote(self)
        return self

    def zero_(self) -> Tensor:
        """Overwrite every element with 0, in place; returns the tensor."""
        return self.fill_(0)

    def _fill(self, value: float) -> Tensor:
        row = dtypes.DTYPES[self.dtype]
        self.host_ref = None
        try:
            if self.array is not None:
                math.copysign(1.0, value)  # raises TypeError unless it is a number: np.asarray takes None for NaN
                self.array[...] = dtypes.encode(np.asarray(value, row.host), row)
            else:
                backend_of(self.queue).fill(self.realize(), self.nbytes, row, value)
        except OverflowError:
            raise DtypeError(message("fill", f"value must be representable in {self.dtype}, got {value}", shape=self.shape)) from None
        except TypeError:
            raise TypeError(message("fill", "value must be a number", given=type(value).__name__)) from None
        return self

    def item(self) -> float | int | bool:
        """Return the value of a tensor with one element."""
        if self.size != 1:
            raise ShapeError(message("item", "the tensor must have exactly one element", shape=self.shape))
        return self.to_host().reshape(-1)[0].item()

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.to_host().tolist()

    def clone(self, memory_format: Any = None) -> Tensor:
        """Return a copy with its own memory; gradients flow through it."""
        return hooks.call("clone", self)

    def detach(self) -> Tensor:
        """Return a tensor over the same memory without a gradient history."""
        return with_shape(self, self.shape)

    def to(self, target: Any = None, *more: Any, **options: Any) -> Tensor:
        """Convert to another dtype (``t.to("float16")``, ``t.to(np.float16)``) or device (``t.to("gpu")``, a handle, a queue).

        As in torch, ``t.to(device, dtype)``, ``t.to(other_tensor)`` and ``copy=True`` are possible. ``non_blocking=`` and
        ``memory_format=`` are ignored.
        """
        if more or options or target is None or isinstance(target, Tensor):
            return methods.to(self, target, *more, **options)
        row = dtypes.named(target)
        if row is not None:
            return self if row.name == self.dtype else hooks.call("cast", self, row.name)
        queue = target if hasattr(target, "finish") else require(target).queue
        if queue is self.queue:
            return self
        if self._requires_grad:
            return hooks.call("move", self, queue)
        return Tensor.from_host(queue, self.to_host(), self.dtype, persistent=self.persistent)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(message("array", "a tensor cannot be converted to an array without a copy", "drop copy=False"))
        values = self.to_host()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = duplicate(self)
        copy._mark(self.requires_grad and self.grad_fn is None, self.persistent)
        copy.grad = None if self.grad is None or hasattr(self, "is_param") else self.grad.__deepcopy__(memo)  # as in torch
        if hasattr(self, "is_param"):
            copy.is_param = True
        return copy

    def __reduce__(self) -> Any:
        raise TypeError(message("pickle", "a tensor cannot be pickled", "save it with netcl.io, or send to_host()", shape=self.shape))

    def __dlpack__(self, **options: Any) -> Any:
        self._check_dlpack()
        values = self.array if self.array is not None and self.dtype != "bfloat16" else self.to_host()
        return values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        self._check_dlpack()
        return (1, 0)

    def _check_dlpack(self) -> None:
        if self.array is None and self.device.device_type != "cpu":
            raise BufferError(message("dlpack", "only memory of a CPU can be exported", "use to_host()", device=self.device.device_name))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        if dtypes.DTYPES[self.dtype].is_float or self.size != 1:
            raise TypeError(message("index", "an index must be an integer tensor with one element", shape=self.shape, dtype=self.dtype))
        return int(self.item())

    # ---- gradients

    def backward(
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Accumulate the gradients of this tensor in ``.grad`` of the leaves, or of ``inputs`` alone."""
        hooks.call("backward", self, gradient, retain_graph, create_graph, inputs)

    def zero_grad(self) -> None:
        """Set ``grad`` to ``None``."""
        self.grad = None
        recording.leaf(self)

    def _require_grad(self, flag: bool) -> None:
        if flag and not dtypes.DTYPES[self.dtype].is_float:
            what = "only tensors of a floating-point dtype can require gradients"
            raise DtypeError(message("requires_grad", what, 'convert first: x.to("float32")', dtype=self.dtype, shape=self.shape))
        if not flag and self.grad_fn is not None:
            what = "only leaf tensors can stop requiring gradients"
            raise AutogradError(message("requires_grad", what, "use x.detach()", computed_by=self.grad_fn.name, shape=self.shape))
        self._requires_grad = bool(flag)

    def requires_grad_(self, flag: bool = True) -> Tensor:
        """Set ``requires_grad``; returns the tensor."""
        self.requires_grad = flag
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook(gradient)`` when this tensor's gradient is known; a tensor that it returns replaces the gradient.

        ``remove()`` of the result removes the hook.
        """
        if not callable(hook):
            raise TypeError(message("register_hook", "hook must be callable", given=type(hook).__name__))
        if not self._requires_grad:
            raise AutogradError(message("register_hook", "the tensor must require grad", "call requires_grad_() first", shape=self.shape))
        if self.grad_fn is not None:
            return self.grad_fn.add_hook(self.output_nr, hook)
        self._hooks = [*(self._hooks or ()), hook]

        def remove() -> None:
            self._hooks = [h for h in self._hooks or () if h is not hook] or None

        return RemovableHandle(remove)

    # ---- items

    def __getitem__(self, index: Any) -> Tensor:
        return hooks.call("getitem", self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        hooks.call("setitem", self, index, value)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(hooks.call("unbind", self) if len(self) else ())


# ---- tensors as ops make them: nothing is checked or recorded


def wrap_array(stored: np.ndarray, dtype: str, queue: Any) -> Tensor:
    """Return a tensor over stored bytes on the NumPy backend; a contiguous array is not copied."""
    return Tensor(None, stored.shape, dtype, None, queue, array=np.ascontiguousarray(stored).reshape(stored.shape))


def new_result(shape: tuple[int, ...], dtype: str, queue: Any) -> Tensor:
    """Create an uninitialized tensor for the result of a kernel on an OpenCL queue; the caller has checked shape and dtype."""
    if type(queue) is CommandList:
        place: Any = queue.empty(shape, dtypes.DTYPES[dtype])
        return Tensor(place, shape, dtype, queue.context, queue, place)
    handle = backend_of(queue).empty(shape, dtypes.DTYPES[dtype])
    return over_memory(handle.buffer, shape, dtypes.NAMES[dtype], queue.context, queue, handle)


def over_memory(memory: Any, shape: tuple[int, ...], dtype: str, context: Any, queue: Any, lease: Any) -> Tensor:
    """Return a tensor over leased memory: ``Tensor(...)`` for a dtype of this module, without its options, in two thirds of the time."""
    made = object.__new__(Tensor)
    made.memory, made.shape, made.dtype, made.context, made.queue, made.lease = memory, shape, dtype, context, queue, lease
    made._persistent = made._requires_grad = False
    made.grad = made.grad_fn = made.host_ref = made.pending_event = made.pending_release = made._hooks = None
    made.writes = made.place = made.source = None
    made.output_nr = 0
    return made


def deferred_tensor(source: Source, shape: tuple[int, ...], dtype: str, queue: Any) -> Tensor:
    """Create a tensor without memory; ``source`` computes its values when they are needed."""
    made = over_memory(None, shape, dtypes.NAMES[dtype], queue.context, queue, None)
    made.source = source
    source.seen_by(made)
    return made


def with_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor over the same memory with another shape; the lease is shared."""
    memory, writes = x.memory, x.writes
    if writes is None:
        writes = x.writes = Writes()
    if memory is None and x.source is not None:
        view = deferred_tensor(x.source, shape, x.dtype, x.queue)
        view.writes = writes
        return view if x.place is None else hooks.call("follow_view", x, view)
    if isinstance(memory, np.ndarray):
        memory = memory.reshape(shape)
    view = over_memory(memory, shape, x.dtype, x.context, x.queue, x.lease)
    view.source, view.writes = x.source, writes
    view.host_ref, view.pending_event, view.pending_release = x.host_ref, x.pending_event, x.pending_release
    return view if x.place is None else hooks.call("follow_view", x, view)


def duplicate(x: Tensor) -> Tensor:
    """Return a copy of a tensor with memory of its own and without a history."""
    if x.array is not None:
        return wrap_array(x.array.copy(), x.dtype, x.queue)
    handle = backend_of(x.queue).clone(x.realize(), x.shape, dtypes.DTYPES[x.dtype])
    return over_memory(handle.buffer, x.shape, x.dtype, x.context, x.queue, handle)


def stand_on(tensor: Any, other: Any) -> None:
    """Give ``tensor`` the shape, dtype, device and memory of ``other``; if ``other`` is a slice or transposition, a copy of the memory."""
    if extent(other)[1] is not None:
        other = duplicate(other)  # a part of a base: memory of its own
    other.realize()
    read_views(tensor)
    tensor._compute_readers()  # pending values refer to the tensor, not to its memory
    for slot in ("memory", "shape", "dtype", "context", "queue", "lease", "host_ref", "pending_event", "pending_release"):
        setattr(tensor, slot, getattr(other, slot))
    tensor.writes, tensor.source, tensor.place = writes_of(other), other.source, None
    wrote((tensor,))
    tensor._mark(tensor.requires_grad, tensor.persistent)


def _set_data(self: Any, other: Any) -> None:
    if not hasattr(other, "writes"):
        raise TypeError(message("data", "data must be a tensor", "write values with x.data[...] = values", given=type(other).__name__))
    if other.writes is None or other.writes is not self.writes or extent(other) != extent(self):
        stand_on(self, other)


def _buffer(self: Any) -> Any:
    memory = self.realize()
    if waiting:
        flush_waiting(self.queue)
    return None if isinstance(memory, np.ndarray) else memory


# The fields that expose the memory compute deferred values.
Tensor.buffer = property(_buffer)
Tensor.array = property(lambda self: self.memory if isinstance(self.realize(), np.ndarray) else None)  # type: ignore
Tensor.pool_handle = property(lambda self: (self.realize(), self.lease)[1])  # type: ignore
Tensor.persistent = property(lambda self: self._persistent, lambda self, flag: self._mark(self.requires_grad, flag))  # type: ignore
# Every op reads the slot _requires_grad; only assignments from outside go through the check.
Tensor.requires_grad = property(attrgetter("_requires_grad"), Tensor._require_grad, doc="Whether autograd tracks this tensor.")  # type: ignore
methods.install_methods(Tensor)
Tensor.data = property(Tensor.detach, _set_data, doc="``detach()``; an assigned tensor shares its memory with this one.")  # type: ignore
Tensor.__hash__ = object.__hash__  # type: ignore[method-assign]
