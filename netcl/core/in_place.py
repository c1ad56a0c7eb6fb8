"""The in-place methods and operators of ``Tensor``: ``x.add_(y)``, ``x += y``. They call ops through :mod:`netcl.core.hooks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core.hooks import hooks
from netcl.core.method_names import IN_PLACE
from netcl.core.op_signature import OpSignature

FILLS = ("uniform", "normal", "copy", "random", "exponential", "log_normal")  # in-place methods that are not ops
IN_PLACE_OPERATORS = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
             "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
             "rshift": "bitwise_right_shift"}  # fmt: skip


def in_place_method(op: str) -> Callable[..., Any]:
    """Return the method that writes the result of an op into the tensor: ``x.abs_()``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hooks.call("in_place", op, self, *args, **kwargs)

    method.__name__ = f"{op}_"
    if op in IN_PLACE:
        method.__signature__ = OpSignature(op)  # type: ignore[attr-defined]
    method.__doc__ = f"``netcl.ops.{op}`` of this tensor, written into its own memory; returns the tensor."
    return method


def install_in_place(tensor: Any) -> None:
    """Give the class of tensors its in-place methods and operators."""
    for name in (*IN_PLACE, *FILLS):
        setattr(tensor, f"{name}_", in_place_method(name))
    for name, op in IN_PLACE_OPERATORS.items():
        setattr(tensor, f"__i{name}__", in_place_method(op))
