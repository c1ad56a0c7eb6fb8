"""Parameters: tensors that a module learns, and the place (device and dtype) of new parameters."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core.device import DeviceHandle, device, get_active_device, queue_of
from netcl.core.errors import DtypeError, OutOfMemoryError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.core.tensor import stand_on as stand_on

_PLACE_NAMES = ("queue", "device", "dtype")


class _Here(threading.local):
    """Per thread: the place in which a running constructor creates its parameters."""

    def __init__(self) -> None:
        self.queue: Any = None
        self.dtype = "float32"
        self.budget: list[int] | None = None  # bytes that may still be taken
        self.blank = False


_here = _Here()

#: Bytes that a parameter counts besides its values, so that many empty layers are limited too.
OBJECT_BYTES = 64


class placed:
    """Context manager: modules constructed inside create their parameters on ``queue`` and in ``dtype``.

    ``queue`` is a queue, a handle or anything :class:`netcl.device` takes; ``None`` changes nothing. ``max_bytes`` limits
    the memory of tensors made by :func:`empty` and :func:`full`, for model descriptions that come from a file. ``blank`` skips random
    initial values, for parameters that are loaded next.

    >>> from netcl import nn
    >>> with nn.parameter.placed("cpu", dtype="float16"):
    ...     layer = nn.Linear(3, 2)
    >>> layer.weight.dtype
    'float16'
    """

    def __init__(self, queue: Any = None, dtype: str | None = None, max_bytes: int | None = None, blank: bool = False):
        self.queue = None if queue is None else queue_of(queue)
        self.dtype = None if dtype is None else _float_dtype(dtype)
        self.max_bytes, self.blank = max_bytes, blank
        self._previous: list[tuple[Any, str, list[int] | None, bool]] = []

    def __enter__(self) -> placed:
        self._previous.append((_here.queue, _here.dtype, _here.budget, _here.blank))
        _here.queue = self.queue if self.queue is not None else _here.queue
        _here.dtype = self.dtype or _here.dtype
        _here.budget = _here.budget if self.max_bytes is None else [self.max_bytes]
        _here.blank = _here.blank or self.blank
        return self

    def __exit__(self, *exc: object) -> None:
        _here.queue, _here.dtype, _here.budget, _here.blank = self._previous.pop()


def is_place(value: Any) -> bool:
    """Whether a leading argument of a constructor is a place: a queue, a handle or a ``device(...)``."""
    return isinstance(value, DeviceHandle | device) or (hasattr(value, "finish") and hasattr(value, "flush"))


def queue_for(place: Any) -> Any:
    """Return the queue of a place; ``None`` gives the queue where a constructor would put its tensors."""
    return here() if place is None else queue_of(place)


def peel(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], placed]:
    """Separate the place (a leading queue or handle, ``queue=``, ``device=``, ``dtype=``) from a constructor's other arguments.

    As in torch, a device and a dtype may also follow the other positional arguments.
    """
    own, rest, place = signature.parameters, dict(kwargs), dict.fromkeys(_PLACE_NAMES)
    if args and is_place(args[0]) and next(iter(own), "") not in _PLACE_NAMES:
        place["queue"], args = args[0], args[1:]
    kinds = [parameter.kind for parameter in own.values()]
    most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) + kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    if most < len(args) <= most + 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        args, rest = args[:most], {**dict(zip(_PLACE_NAMES[1:], args[most:], strict=False)), **rest}
    for name in _PLACE_NAMES:
        if name in rest and name not in own:
            given = rest.pop(name)
            place[name] = given if given is not None else place[name]
    return args, rest, placed(place["queue"] if place["queue"] is not None else place["device"], place["dtype"])


def constructor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that returns a module, or ``__init__``, take a place as constructors do: ``resnet18(queue, num_classes=10)``."""
    signature = inspect.signature(function)

    @wraps(function)
    def construct(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, place = peel(signature, args, kwargs)
        with place:
            return function(*args, **kwargs)

    return construct


def here() -> Any:
    """Return the queue on which a running constructor creates tensors: the given queue, else that of the active device."""
    return _here.queue if _here.queue is not None else get_active_device().queue


def draws_values() -> bool:
    """Whether a running constructor draws random initial values: not inside ``placed(blank=True)``."""
    return not _here.blank


def _float_dtype(dtype: Any) -> str:
    row = dtypes.lookup(dtype, "parameter")
    if not row.is_float:
        raise DtypeError(message("parameter", "parameters must be floats", "use register_buffer for other tensors", dtype=row.name))
    return row.name


class _LooksLikeParameter(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return is_parameter(instance)


class Parameter(metaclass=_LooksLikeParameter):
    """A tensor that becomes a parameter of a module when it is assigned to an attribute. It keeps its memory.

    The result is a :class:`~netcl.core.tensor.Tensor` with a mark. Other tensors do not become parameters, whether or not they require a
    gradient.

    - **data**: a tensor, an array or numbers. A tensor shares its memory with the parameter; slices and similar views are copied.
    - **requires_grad**: ``False`` makes a parameter that is not learned.

    >>> from netcl import nn
    >>> p = nn.Parameter([1.0, 2.0])
    >>> p.requires_grad, p.persistent, isinstance(p, nn.Parameter)
    (True, True, True)
    """

    def __new__(cls, data: Any, requires_grad: bool = True) -> Tensor:  # type: ignore[misc]
        tensor = data.detach() if isinstance(data, Tensor) else Tensor.from_host(here(), data)
        if tensor.place is not None:
            tensor = duplicate(tensor)
        if requires_grad:
            _float_dtype(tensor.dtype)
        tensor._mark(requires_grad, persistent=True)
        tensor.is_param = True
        return tensor


class Buffer:
    """A tensor that becomes a buffer of the module it is assigned to: ``self.mean = nn.Buffer(zeros(3))``.

    >>> from netcl import nn
    >>> layer = nn.Identity()
    >>> layer.mean = nn.Buffer([1.0, 2.0])
    >>> list(layer.state_dict()), layer.mean.tolist()
    (['mean'], [1.0, 2.0])
    """

    def __init__(self, data: Any, *, persistent: bool = True):
        self.data, self.persistent = data, persistent


def is_parameter(value: Any) -> bool:
    """Whether a value was made by :class:`Parameter` or :func:`empty`, or is a deep copy of such a tensor."""
    return isinstance(value, Tensor) and hasattr(value, "is_param")


def _spend(shape: Sequence[int], dtype: str) -> None:
    if _here.budget is not None:
        _here.budget[0] -= math.prod(shape) * dtypes.lookup(dtype).itemsize + OBJECT_BYTES
        if _here.budget[0] < 0:
            what = "the model must not be larger than max_bytes"
            raise OutOfMemoryError(message("parameter", what, "pass a larger max_bytes", parameter=tuple(shape), excess=-_here.budget[0]))


def empty(shape: Sequence[int], requires_grad: bool = True) -> Tensor:
    """Create an uninitialized parameter with the device and dtype of the running constructor."""
    _spend(shape, _here.dtype)
    made = Tensor.empty(tuple(shape), _here.dtype, queue=here(), requires_grad=requires_grad, persistent=True)
    if requires_grad:
        made.is_param = True
    return made


def full(shape: Sequence[int], value: float, dtype: str | None = None) -> Tensor:
    """Create a tensor filled with ``value`` on the device of the running constructor; it requires no gradient."""
    _spend(shape, dtype or _here.dtype)
    return Tensor.full(tuple(shape), value, dtype or _here.dtype, queue=here(), persistent=True)
