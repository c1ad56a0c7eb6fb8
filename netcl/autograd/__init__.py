"""Gradients: functions that run and record the ops of ``netcl.ops``, the backward pass, and user-defined functions.

``import netcl.autograd as ag``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as _partial
from typing import TYPE_CHECKING, Any

from netcl import ops as _forward
from netcl.autograd import in_place as _in_place
from netcl.autograd import ops as _twins
from netcl.autograd.backward_pass import backward, grad
from netcl.autograd.compiler import CompiledFunction, CompiledGraph, TracingContext, TrainingGraphCompiler, jit_compile
from netcl.autograd.function import Function, checkpoint, move, once_differentiable
from netcl.autograd.gradcheck import GradientError, gradcheck, gradgradcheck
from netcl.autograd.kernel import Kernel, kernel
from netcl.autograd.ops import apply_op
from netcl.autograd.tape import LASTING as LASTING
from netcl.autograd.tape import (
    Node,
    Tape,
    changing_history,
    debug_tape,
    detect_anomaly,
    enable_grad,
    get_current_tape,
    is_grad_enabled,
    no_grad,
    register_post_accumulate_grad_hook,
    retain_grad,
    set_current_tape,
    set_detect_anomaly,
    set_grad_enabled,
)
from netcl.core.hooks import AnyFunction as _Function
from netcl.core.tensor import Tensor
from netcl.engine.lazy_graph import TraceNode
from netcl.engine.registry import Pointwise, register
from netcl.ops import views as _views

__all__ = [
    "AutogradPrimitive", "CompiledFunction", "CompiledGraph", "Function", "GradientError", "Kernel", "Node", "Tape", "TraceNode",
    "TracingContext", "TrainingGraphCompiler", "apply_op", "backward", "checkpoint", "debug_tape", "detect_anomaly", "enable_grad",
    "get_current_tape", "grad", "gradcheck", "gradgradcheck", "is_grad_enabled", "jit_compile", "kernel", "no_grad",
    "once_differentiable", "register_primitive", "retain_grad", "set_current_tape", "set_detect_anomaly", "set_grad_enabled", "tensor",
]  # fmt: skip


def tensor(data: Any, dtype: str | None = None, *, requires_grad: bool = False, device: Any = None, queue: Any = None) -> Tensor:
    """Copy values, or those of a tensor, to a new tensor on the given device or queue; the default is the active device."""
    if isinstance(data, Tensor):
        data = data.to_host()
    if queue is None and device is None:
        return Tensor.from_host(data, dtype=dtype, requires_grad=requires_grad)
    where = queue if queue is not None else Tensor.empty((0,), device=device).queue
    return Tensor.from_host(where, data, dtype, requires_grad=requires_grad)


#: A pointwise op as data: formula, gradient, reference (``netcl.engine.registry.Pointwise``).
AutogradPrimitive = Pointwise


def register_primitive(primitive: AutogradPrimitive) -> Callable[..., Tensor]:
    """Add a pointwise op to the table and return its differentiable function; the formulas in ``primitive`` define kernel and gradient.

    >>> import netcl.autograd as ag
    >>> from netcl.ops import unregister
    >>> bent = ag.register_primitive(ag.AutogradPrimitive("bent", "v0 + v0 * v0", ("g + 2 * g * v0",), lambda x: x + x * x))
    >>> x = ag.tensor([3.0], requires_grad=True)
    >>> bent(x).backward()
    >>> x.grad.tolist()
    [7.0]
    >>> unregister("bent")
    """
    register(primitive)
    return _twins.twin(primitive.name)


_twins.put("setitem", _in_place.recorded_setitem)

#: Functions other than ops that core calls by name.
_CALLED_BY_CORE: dict[str, _Function] = {
    "assign": _in_place.assign, "backward": backward, "changing_history": changing_history, "check_write": _views.check_write,
    "contiguous": _views.contiguous, "follow_view": _views.follow, "in_place": _in_place.in_place, "is_grad_enabled": is_grad_enabled,
    "move": move, "no_grad": no_grad, "refresh_copies": _views.refresh_copies, "retain_grad": retain_grad,
    "register_post_accumulate_grad_hook": register_post_accumulate_grad_hook, "signature": _twins.signature,
    "store": _views.write_into,
}  # fmt: skip


def find(name: str) -> _Function | None:
    """Return the function that core calls by this name: an op, or another function of autograd or views; ``None`` if unknown."""
    return _CALLED_BY_CORE.get(name) or _twins.find_twin(name)


if TYPE_CHECKING:
    from netcl.autograd.op_functions import *  # noqa: F403
    from netcl.autograd.random_functions import *  # noqa: F403
else:
    __getattr__ = _partial(_twins.module_attribute, globals())


def __dir__() -> list[str]:
    return [*__all__, *_forward.names()]
