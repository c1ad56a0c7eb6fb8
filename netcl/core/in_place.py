"""The in-place methods and operators of ``Tensor``: ``x.add_(y)``, ``x += y``. They call ops through ``dispatch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core import dispatch
from netcl.core.errors import message
from netcl.core.method_names import IN_PLACE
from netcl.core.writes import wrote

FILLS = ("uniform", "normal", "copy", "random", "exponential", "log_normal")  # in-place methods that are not ops
OPERATORS = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pow": "pow"}
LOGICAL = ("and", "or", "xor")


def in_place_method(op: str) -> Callable[..., Any]:
    """The method that writes the result of an op into the tensor: ``x.abs_()``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch.call("in_place", op, self, *args, **kwargs)

    method.__name__ = f"{op}_"
    method.__doc__ = f"``netcl.ops.{op}`` of this tensor, written into its own memory; returns the tensor."
    return method


def _in_place_logical(operator: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return dispatch.call("assign", self, getattr(self, operator)(other))

    return method


def stand_on(tensor: Any, other: Any) -> None:
    """Give ``tensor`` the memory, shape, dtype and device of ``other``; references to ``tensor`` stay valid."""
    if other._place is not None and other._place.strides is not None:
        other = other._copy()  # a strided view needs its own memory
    for slot in ("buffer", "array", "shape", "dtype", "context", "queue", "pool_handle", "host_ref", "pending_event", "pending_release"):
        setattr(tensor, slot, getattr(other, slot))
    tensor._written, tensor._source, tensor._place = other._writes(), other._source, None
    wrote((tensor,))
    tensor._mark(tensor.requires_grad, tensor.persistent)


def _set_data(self: Any, other: Any) -> None:
    if not hasattr(other, "_written"):
        raise TypeError(message("data", "data must be a tensor", "write values with x.data[...] = values", given=type(other).__name__))
    if other._written is None or other._written is not self._written:
        stand_on(self, other)


def install(tensor: Any) -> None:
    """Add the in-place methods and operators, and ``data``, to the class of tensors."""
    tensor.data = property(tensor.detach, _set_data, doc="``detach()``; assigning a tensor gives this one the memory of that.")
    for name in (*IN_PLACE, *FILLS):
        setattr(tensor, f"{name}_", in_place_method(name))
    for name, op in OPERATORS.items():
        setattr(tensor, f"__i{name}__", in_place_method(op))
    for name in LOGICAL:
        setattr(tensor, f"__i{name}__", _in_place_logical(f"__{name}__"))
