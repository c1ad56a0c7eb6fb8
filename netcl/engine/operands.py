"""Converts the operands of ops to tensors on one device and determines their common shape and dtype; checks ``out=``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.commands import check_planning
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, DType
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.methods import Size
from netcl.core.tensor import Tensor

Operand = Tensor | bool | int | float
SCALARS = (bool, int, float)


class Like(NamedTuple):
    """The shape and dtype of an operand whose values are not kept."""

    shape: tuple[int, ...]
    dtype: str


def from_values(op: str, values: object, queue: Any, dtype: str | None = None) -> Tensor:
    """Copy an array, a number or a list to a device; raises for a list with a tensor that requires a gradient, which would be lost."""
    if isinstance(values, list | tuple) and _holds_learning(values):
        what = "a list must not hold tensors that require a gradient, because its values are copied"
        raise TypeError(message(op, what, "join the tensors with stack(), or detach() them"))
    return Tensor.from_host(values, dtype) if queue is None else Tensor.from_host(queue, values, dtype)


def _holds_learning(values: Sequence[object]) -> bool:
    return any(x.requires_grad if isinstance(x, Tensor) else isinstance(x, list | tuple) and _holds_learning(x) for x in values)


def operands(op: str, values: Sequence[Any], names: Sequence[str] = ()) -> tuple[Operand, ...]:
    """Convert arrays and lists to tensors on the first tensor's device. Numbers stay; if all values are numbers, convert the first."""
    first = next((x for x in values if isinstance(x, Tensor)), None)
    queue = first.queue if first is not None else None
    made = [_operand(op, x, queue, values) for x in values]
    if first is None and not any(isinstance(x, Tensor) for x in made):
        made[0] = Tensor.from_host(made[0])
    tensors = [x for x in made if isinstance(x, Tensor)]
    for x in tensors[1:]:
        if x.queue is not tensors[0].queue:
            check_same_device(op, tensors[0], x)
    return tuple(made)


def operand(op: str, x: Any) -> Tensor:
    """Convert one input to a tensor; a number or an array is copied to the active device."""
    if isinstance(x, Tensor):
        return x
    (made,) = operands(op, (x,))
    assert isinstance(made, Tensor)
    return made


def tensors(op: str, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Convert several inputs, numbers included, to tensors on one device."""
    made = operands(op, values)
    queue = next(x.queue for x in made if isinstance(x, Tensor))
    return tuple(x if isinstance(x, Tensor) else Tensor.from_host(queue, x) for x in made)


def _operand(op: str, x: Any, queue: Any, values: Sequence[Any]) -> Operand:
    if isinstance(x, Tensor) or type(x) in SCALARS:
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, int):  # x.size
        return int(x)
    doubles = any([isinstance(y, Tensor) and y.dtype == "float64" for y in values]) and np.asarray(x).dtype == np.float64
    return from_values(op, x, queue, "float64" if doubles else None)


def check_same_device(op: str, a: Tensor, b: Tensor) -> None:
    """Raise unless two tensors are on the same queue (all NumPy queues count as one)."""
    if a.queue is b.queue or (isinstance(a.queue, CPUQueue) and isinstance(b.queue, CPUQueue)) or a.queue == b.queue:
        return
    check_planning(a.queue, b.queue)
    where = {"a": a.device.device_name, "b": b.device.device_name}
    one = a.context is not None and a.context == b.context
    remedy = "use one in the other's stream: stream.use(tensor)" if one else "move one with tensor.to(device)"
    raise DeviceError(message(op, "all tensors must be on the same device and queue", remedy, **where))


def common_shape(op: str, shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> tuple[int, ...]:
    """Return the broadcast shape, by NumPy's rules; an error shows the shapes under the operands' ``names``."""
    first = shapes[0]
    if shapes.count(first) == len(shapes):
        return first
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        values: dict[str, Any] = {f"{name}.shape": shape for name, shape in zip(names, shapes, strict=True)}
        raise ShapeError(message(op, "shapes must broadcast together", **values)) from None


def check_out(op: str, out: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return ``out``, prepared for a write; raises unless it has the shape and dtype of the result."""
    if out.shape != shape:
        raise ShapeError(message(op, "out must have the shape of the result", out=out.shape, result=shape))
    if out.dtype != dtype:
        raise DtypeError(message(op, "out must have the dtype of the result", out=out.dtype, result=dtype))
    out._changing()
    return out


# ---- dtypes


def category(dtype: DType) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats."""
    return 2 if dtype.is_float else int(dtype.name != "bool")


def common_dtype(operands: Sequence[Any]) -> DType:
    """Return the promoted dtype by torch's rules: 0-d tensors, then numbers, count only if their category (bool, int, float) is higher."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    tiers = [[DTYPES[x.dtype] for x in tensors if x.shape], [DTYPES[x.dtype] for x in tensors if not x.shape]]
    numbers = [1 if type(x) is Size else SCALARS.index(type(x)) for x in operands if not isinstance(x, Tensor)]
    number = [DTYPES[("bool", "int64", "float32")[max(numbers)]]] if numbers else []
    kinds = [*[reduce(dtypes.promote, tier) for tier in tiers if tier], *number]
    return reduce(lambda above, below: below if category(below) > category(above) else above, kinds)
