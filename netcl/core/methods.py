"""Methods and operators of ``Tensor`` that call ops, also in place, and the small methods of torch's tensors.

The ops are called through :mod:`netcl.core.hooks`. :mod:`netcl.core.method_names` lists the ops that are methods.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import notebook
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.method_names import IN_PLACE, METHODS


class Size(int):
    """The number of elements of a tensor; callable as torch's ``x.size()``.

    >>> import netcl
    >>> x = netcl.zeros(2, 3)
    >>> x.size == 6, x.size(), x.size(0), x.size(-1)
    (True, (2, 3), 2, 3)
    """

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        if dim is None:
            return self.shape
        if not -len(self.shape) <= dim < len(self.shape):
            remedy = f"it must be in {-len(self.shape)}..{len(self.shape) - 1}" if self.shape else "a 0-d tensor has no dimensions"
            raise ShapeError(message("size", f"dim must be in range for {len(self.shape)} dimensions, got {dim}", remedy, shape=self.shape))
        return self.shape[dim]


SIZES: dict[tuple[int, ...], Size] = {}  # by shape: a look-up is as fast as the product
_MOST_SIZES = 4096


def size_of(shape: tuple[int, ...]) -> Size:
    """Return the size of a shape and add it to :data:`SIZES`."""
    if len(SIZES) >= _MOST_SIZES:
        SIZES.clear()
    size = Size(math.prod(shape))
    size.shape = shape
    SIZES[shape] = size
    return size


OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "pow": "pow", "mod": "remainder",
    "matmul": "matmul", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
IN_PLACE_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift")
REFLECTED = (*IN_PLACE_OPERATORS, "matmul")
FILLS = ("uniform", "normal", "copy", "random", "exponential", "log_normal")  # in-place methods that are not ops
MOVES = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64", "bool": "bool", "cpu": "cpu",
         "byte": "uint8", "char": "int8", "short": "int16", "bfloat16": "bfloat16"}  # fmt: skip


class OpSignature(inspect.Signature):
    """The signature of a method that calls an op, with torch's names. It is looked up when read, after the ops are imported."""

    __slots__ = ("op",)

    def __init__(self, op: str):
        super().__init__()
        self.op = op

    @property
    def parameters(self) -> Any:
        found = hooks.call("signature", self.op)[0].parameters
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        return MappingProxyType({p.name: p for p in (first, *list(found.values())[1:])})

    def replace(self, *, parameters: Any = None, return_annotation: Any = None) -> inspect.Signature:  # type: ignore[override]
        return inspect.Signature(self.parameters.values() if parameters is None else parameters)


def _method(op: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hooks.call(op, self, *args, **kwargs)

    method.__name__ = op
    method.__signature__ = OpSignature(op)  # type: ignore[attr-defined]
    method.__doc__ = f"``netcl.ops.{op}`` of this tensor."
    return method


def _in_place_method(op: str) -> Callable[..., Any]:
    """Return the method that writes the result of an op into the tensor: ``x.abs_()``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hooks.call("in_place", op, self, *args, **kwargs)

    method.__name__ = f"{op}_"
    if op in IN_PLACE:
        method.__signature__ = OpSignature(op)  # type: ignore[attr-defined]
    method.__doc__ = f"``netcl.ops.{op}`` of this tensor, written into its own memory; returns the tensor."
    return method


def _operator(op: str) -> Callable[..., Any]:
    find, known = hooks.find, hooks.found

    def method(self: Any, other: Any) -> Any:
        return (known.get(op) or find(op))(self, other)

    method.__name__ = op
    method.__doc__ = f"``netcl.ops.{op}`` of this tensor and another value."
    return method


def _comparison(op: str) -> Callable[..., Any]:
    compare = _operator(op)
    return lambda self, other: NotImplemented if other is None else compare(self, other)


def _reflected(op: str) -> Callable[..., Any]:
    find, known = hooks.find, hooks.found
    return lambda self, other: (known.get(op) or find(op))(other, self)


def _to(target: str) -> Callable[[Any], Any]:
    return lambda self, *_, **__: self.to(target)


# ---- torch's methods that are not ops


def to(x: Any, *given: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False, copy: bool = False,
       memory_format: Any = None) -> Any:  # fmt: skip
    """Implement torch's ``Tensor.to(device, dtype)``, ``to(tensor)`` and ``to`` with keywords; flags may be positional."""
    flags = [flag for flag in given if isinstance(flag, bool)]
    made = x
    for target in (*given, device, dtype):
        if hasattr(target, "writes"):  # a tensor
            made = made.to(target.queue).to(target.dtype)
        elif target is not None and not isinstance(target, bool):
            made = made.to(target)
    return made.clone() if made is x and (copy or flags[1:] == [True]) else made


def _format(self: Any, spec: str) -> str:
    if not spec and self.ndim:
        return str(self)
    if self.size != 1:
        what = "a format spec requires a tensor with one element"
        raise TypeError(message("format", what, "format each element by itself", spec=spec, shape=self.shape))
    return format(self.item(), spec)


def _type(self: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Return the type name in torch's form (``netcl.FloatTensor``); with a dtype, the tensor converted to it."""
    return f"netcl.{_TYPES[self.dtype]}Tensor" if dtype is None else self.to(dtype)


_TYPES = {"bool": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
          "int32": "Int", "int64": "Long", "float16": "Half", "bfloat16": "BFloat16", "float32": "Float",
          "float64": "Double"}  # fmt: skip


def _numel(self: Any) -> Any:
    """Return the number of elements."""
    return self.size


def _t(self: Any) -> Any:
    """Transpose a matrix; a vector or scalar is returned unchanged."""
    if self.ndim > 2:
        raise ShapeError(message("t", "x must have at most 2 dimensions", "use x.mT or x.transpose(0, 1)", **{"x.shape": self.shape}))
    return self if self.ndim < 2 else hooks.call("transpose", self, 0, 1)


def _stride(self: Any, dim: int | None = None) -> Any:
    """Return the strides in elements, or the stride of ``dim``; every tensor is contiguous."""
    strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(self.ndim))
    return strides if dim is None else strides[dim]


def _equal(self: Any, other: Any) -> bool:
    """Whether both tensors have the same shape and equal values."""
    return self.shape == other.shape and bool(hooks.call("all", hooks.call("eq", self, other)))


def _allclose(self: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether ``|x - other| <= atol + rtol * |other|`` everywhere."""
    return bool(hooks.call("all", hooks.call("isclose", self, other, rtol, atol, equal_nan)))


def _new(tensor: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> Any:
        where = {"queue": self.queue} if device is None else {"device": device}
        shape = (args,) if name == "empty" and args and not isinstance(args[0], tuple | list) else args
        return getattr(tensor, name)(*shape, dtype=dtype or self.dtype, requires_grad=requires_grad, **where)

    method.__doc__ = f"``Tensor.{name}`` with the dtype and on the device of this tensor."
    return method


def _new_tensor(tensor: Any) -> Callable[..., Any]:
    def method(self: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        """Create a tensor from host values, with the dtype and on the device of this tensor."""
        made = tensor.from_host(self.queue, data, dtype or self.dtype)
        return (made if device is None else made.to(device)).requires_grad_(requires_grad)

    return method


def _detached(self: Any) -> Any:
    """Remove the gradient history in place; returns the tensor."""
    if self.place is not None:
        raise ShapeError(message("detach_", "cannot detach a view, or a tensor with views, in place", "use x.detach()", shape=self.shape))
    self.grad_fn, self._requires_grad = None, False
    return self


def _shallow_copy(self: Any) -> Any:
    made = self.detach()
    made.requires_grad, made.persistent = self.requires_grad and self.grad_fn is None, self.persistent
    if hasattr(self, "is_param"):
        made.is_param = True
    return made


def _fill_diagonal(self: Any, fill_value: float, wrap: bool = False) -> Any:
    """Write a number to the diagonal in place; a tensor with more than 2 dimensions has equal ones."""
    if self.ndim < 2 or (self.ndim > 2 and len(set(self.shape)) > 1) or (wrap and self.shape[0] > self.shape[1] + 1):
        what = "x must have 2 dimensions, or more that are equal, and wrap is not supported for tall matrices"
        raise ShapeError(message("fill_diagonal_", what, wrap=wrap, **{"x.shape": self.shape}))
    if self.ndim == 2:
        self.diagonal().fill_(fill_value)
    else:
        self[(list(range(self.shape[0])),) * self.ndim] = fill_value
    return self


def _shapes_itself(op: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.requires_grad or self.place is not None:
            what = "cannot change the shape in place of a tensor that requires grad, is a view or has views"
            raise ShapeError(message(f"{op}_", what, f"write x = x.{op}(...)", shape=self.shape))
        self.data = getattr(self.clone(), op)(*args, **kwargs).clone()
        return self

    method.__doc__ = f"Give the tensor the shape and values of ``{op}`` in place; returns the tensor."
    return method


def _is_float(self: Any) -> bool:
    """Whether the dtype is a floating-point type."""
    return dtypes.DTYPES[self.dtype].is_float


_SHORT_METHODS: dict[str, Callable[..., Any]] = {
    "__format__": _format, "_repr_html_": notebook.tensor_html,
    "type": _type, "t": _t, "stride": _stride, "equal": _equal, "allclose": _allclose, "detach_": _detached,
    "is_floating_point": _is_float, "fill_diagonal_": _fill_diagonal,
    **{f"{op}_": _shapes_itself(op) for op in ("squeeze", "unsqueeze", "t", "transpose")},
    "where": lambda self, condition, other: hooks.call("where", condition, self, other),
    "contiguous": lambda self, memory_format=None: self if self.place is None else hooks.call("contiguous", self),
    "cuda": lambda self, device=None, non_blocking=False: self.to("gpu" if device is None else device),
    "dim": lambda self: self.ndim, "ndimension": lambda self: self.ndim, **dict.fromkeys(("numel", "nelement"), _numel),
    "element_size": lambda self: dtypes.DTYPES[self.dtype].itemsize, "storage_offset": lambda self: 0,
    "is_contiguous": lambda self, memory_format=None: True, "is_nonzero": lambda self: bool(self),
    "is_signed": lambda self: dtypes.DTYPES[self.dtype].host.kind in "if",
    "is_same_size": lambda self, other: self.shape == other.shape,
    "is_pinned": lambda self: False, "pin_memory": lambda self: self, "get_device": lambda self: -1 if self.backend == "cpu" else 0,
    **dict.fromkeys(("is_complex", "is_conj", "is_neg", "is_inference", "is_distributed"), lambda self: False),
    "view_as": lambda self, other: hooks.call("reshape", self, other.shape),
    "reshape_as": lambda self, other: hooks.call("reshape", self, other.shape),
    "expand_as": lambda self, other: hooks.call("expand", self, other.shape),
    "type_as": lambda self, other: self.to(other.dtype),
    "retain_grad": lambda self: hooks.call("retain_grad", self),
    "register_post_accumulate_grad_hook": lambda self, hook: hooks.call("register_post_accumulate_grad_hook", self, hook),
    "__copy__": _shallow_copy, "__contains__": lambda self, value: bool(hooks.call("any", hooks.call("eq", self, value))),
    "positive": lambda self: self, "__pos__": lambda self: self,
    "adjoint": lambda self: hooks.call("transpose", self, -2, -1),
}  # fmt: skip
_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "is_leaf": lambda self: self.grad_fn is None, "itemsize": lambda self: dtypes.DTYPES[self.dtype].itemsize,
    "mT": lambda self: hooks.call("transpose", self, -2, -1), "mH": lambda self: hooks.call("transpose", self, -2, -1),
    "H": _t, "real": lambda self: self, "is_cuda": lambda self: self.backend == "cl" and self.device.device_type == "gpu",
    "is_cpu": lambda self: self.backend == "cpu", "layout": lambda self: "strided", "name": lambda self: None,
    **dict.fromkeys([f"is_{kind}" for kind in "sparse sparse_csr quantized xpu mps meta mkldnn nested ipu maia mtia vulkan xla".split()],
                    lambda self: False),
}  # fmt: skip


_tensor_class: list[Any] = []  # the class of tensors
_added: set[str] = set()


def add_method(op: str) -> None:
    """Add an op to ``Tensor`` as a method and an in-place method; does nothing for ops in :data:`METHODS`."""
    if op in METHODS:
        return
    made = {op: _method(op), f"{op}_": _in_place_method(op)}
    if taken := [name for name in made if hasattr(_tensor_class[0], name)]:
        raise ValueError(message(op, f"Tensor must not have an attribute {taken[0]!r} already", "choose another name, or method=False"))
    for name, method in made.items():
        setattr(_tensor_class[0], name, method)
    _added.update(made)


def remove_method(op: str) -> None:
    """Remove the methods that :func:`add_method` added for an op."""
    hooks.found.pop(op, None)
    for name in _added & {op, f"{op}_"}:
        _added.remove(name)
        delattr(_tensor_class[0], name)


def install_methods(tensor: Any) -> None:
    """Add the methods and operators to the class of tensors."""
    _tensor_class.append(tensor)
    for name in METHODS:
        if name not in tensor.__dict__:
            setattr(tensor, name, _method(name))
    for name, op in OPERATORS.items():
        setattr(tensor, f"__{name}__", (_comparison if op in ("eq", "ne") else _operator)(op))
    for name in REFLECTED:
        setattr(tensor, f"__r{name}__", _reflected(OPERATORS[name]))
    for name in (*IN_PLACE, *FILLS):
        setattr(tensor, f"{name}_", _in_place_method(name))
    for name in IN_PLACE_OPERATORS:
        setattr(tensor, f"__i{name}__", _in_place_method(OPERATORS[name]))
    for name, op in {"__neg__": "neg", "__abs__": "abs", "__invert__": "bitwise_not", "view": "reshape"}.items():
        setattr(tensor, name, _method(op))
    for name, target in MOVES.items():
        setattr(tensor, name, _to(target))
    for name in ("zeros", "ones", "full", "empty"):
        setattr(tensor, f"new_{name}", _new(tensor, name))
    tensor.new_tensor = _new_tensor(tensor)
    for name, function in _SHORT_METHODS.items():
        setattr(tensor, name, function)
    for name, get in _PROPERTIES.items():
        setattr(tensor, name, property(get))
