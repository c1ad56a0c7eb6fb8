"""autocast: a block in which ops run in half precision if the ``amp`` column of their row allows it.

``half`` rows (products, convolutions, attention) get float16 or bfloat16 inputs, ``float`` rows (exponentials, most losses) get
float32. ``wide`` rows (cross-entropy, softmax, sums) read half inputs themselves and, with ``widen=True``, return float32. ``keep`` rows
keep the dtype of their inputs. float64 is never cast. Parameters keep their dtype. The tape records each cast, so a gradient has the dtype
of its parameter, and optimizers are not affected.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.device import get_active_device, manager
from netcl.core.errors import DtypeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.core.tracebacks import user_line
from netcl.core.writes import writes_of


class _Cast(NamedTuple):
    """A parameter, its recorded half copy, the parameter's version at the cast, and the recording that made the copy, if any."""

    parameter: Tensor
    half: Tensor
    version: int
    recorder: Any

    def good(self, wanted: str) -> bool:
        same = self.version == writes_of(self.parameter).last and self.recorder is recording.active.recorder
        return same and self.half.dtype == wanted and self.half.grad_fn.rule is not None


class _AutocastBlock(NamedTuple):
    """An ``autocast`` block: its dtype (``None``: off), the block around it, and the casts that nested blocks share.

    ``ahead``: casts that no op has used yet.
    """

    dtype: str | None
    outer: Any
    casts: dict[int, _Cast]
    ahead: dict[int, _Cast]


#: The innermost ``autocast`` block of the current thread or asyncio task.
autocast_block: ContextVar[_AutocastBlock | None] = ContextVar("autocast_block", default=None)
_warned = False
#: The parameters that the last block with the same first parameter has cast, by the id of the first one.
_together: dict[int, list[weakref.ref[Tensor]]] = {}
_MOST_BLOCKS = 256  # entries of _together


class autocast(ContextDecorator):
    """Runs matmul, convolution and attention in half precision, and ops that need a large range in float32: ``with autocast(): ...``.

    A context manager and a decorator. Blocks nest: ``autocast(enabled=False)`` switches casts off inside. Threads and asyncio tasks have
    separate blocks. Use it for the forward pass only: backward uses the recorded dtypes. ``float16`` needs a
    :class:`~netcl.amp.grad_scaler.GradScaler`; ``bfloat16`` has the range of float32 and does not.

    Every device stores half values. A device without half arithmetic computes in float32; for float16, a warning reports this once
    per process.

    >>> from netcl import autograd as ag
    >>> a = Tensor.ones((2, 3), requires_grad=True)
    >>> with autocast(dtype="bfloat16"):
    ...     out = ag.matmul(a, Tensor.ones((3, 2)))
    >>> out.dtype
    'bfloat16'
    >>> out.sum().backward()
    >>> a.grad.dtype
    'float32'
    """

    def __init__(self, enabled: bool = True, dtype: str = "float16"):
        row = dtypes.lookup(dtype, "autocast")
        if row.name not in dtypes.HALVES:
            raise DtypeError(message("autocast", "dtype must be float16 or bfloat16", dtype=row.name))
        self.dtype = row.name if enabled else None

    def __enter__(self) -> autocast:
        outer, entered = autocast_block.get(), False
        try:
            autocast_block.set(_AutocastBlock(self.dtype, outer, *(({}, {}) if outer is None else (outer.casts, outer.ahead))))
            entered = True
        finally:
            if not entered:  # an interrupt: __exit__ will not be called
                autocast_block.set(outer)
        return self

    def __exit__(self, *exc: object) -> None:
        block: _AutocastBlock | None = None
        try:
            block = autocast_block.get()
        finally:  # also if an interrupt comes here
            block = block or autocast_block.get()
            autocast_block.set(None if block is None else block.outer)
        if block is not None and block.outer is None and len(block.casts) > 1:
            if len(_together) >= _MOST_BLOCKS:
                _together.clear()
            _together[next(iter(block.casts))] = [weakref.ref(cast.parameter) for cast in block.casts.values()]


def is_autocast_enabled() -> bool:
    """Whether the current thread or asyncio task is inside an enabled ``autocast`` block.

    >>> with autocast():
    ...     is_autocast_enabled()
    True
    """
    return get_autocast_dtype() is not None


def get_autocast_dtype() -> str | None:
    """Return the dtype of the innermost ``autocast`` block of this thread or asyncio task; ``None`` without a block or if it is off."""
    block = autocast_block.get()
    return None if block is None else block.dtype


hooks.modes.append(get_autocast_dtype)


def supports_fp16(device: Any = None) -> bool:
    """Whether a device (a selector, handle or queue; default: the active one) computes in half precision, according to a probe.

    >>> supports_fp16("cpu")
    False
    """
    handle = get_active_device() if device is None else manager.default(device)
    return handle is not None and handle.profile.half_arithmetic


def maybe_cast_tensor(tensor: Tensor, dtype: str | None = None) -> Tensor:
    """Convert a tensor to ``dtype``, by default to the dtype of the ``autocast`` block, if any. float64 and integers are unchanged.

    >>> x = Tensor.ones(3)
    >>> with autocast():
    ...     maybe_cast_tensor(x).dtype, maybe_cast_tensor(x.to("int32")).dtype
    ('float16', 'int32')
    """
    wanted = get_autocast_dtype() if dtype is None else dtypes.lookup(dtype, "maybe_cast_tensor").name
    return tensor if wanted is None else cast_recorded(tensor, wanted)


def master_param(parameter: Tensor) -> Tensor:
    """Return the tensor that an optimizer should change: a float32 copy of a half parameter, else the parameter itself.

    >>> w = Tensor.ones(2, requires_grad=True)
    >>> master_param(w) is w, master_param(w.to("float16")).dtype
    (True, 'float32')
    """
    if parameter.dtype not in dtypes.HALVES:
        return parameter
    master = parameter.detach().to("float32")
    master.requires_grad, master.persistent = parameter.requires_grad, True
    return master


# ---- what autograd calls


def cast_arguments(
    policy: Literal["half", "float", "wide"], args: tuple[Any, ...], kwargs: Any, bias: int = -1
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an op's arguments, cast by :func:`cast_recorded` to the dtype of the block (policy ``half``) or to float32 (``float``).

    Policy ``wide`` casts nothing and adds ``widen=True``. ``bias``: the position of a bias that stays float32; -1: there is none.
    """
    half = get_autocast_dtype()
    if half is None:  # a block that is off
        return args, kwargs
    if policy == "wide":
        return args, {**kwargs, "widen": True}
    wanted = half if policy == "half" else "float32"
    named = {name: x if name == "out" else _fitted_dtype(x, wanted, name == "bias" and bias >= 0) for name, x in kwargs.items()}
    return tuple([_fitted_dtype(x, wanted, i == bias) for i, x in enumerate(args)]), named


def _fitted_dtype(value: Any, wanted: str, stays: bool = False) -> Any:
    if isinstance(value, Tensor):
        return value if stays and value.dtype == "float32" else cast_recorded(value, wanted)
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return [_fitted_dtype(part, wanted) for part in value]
    return value


def cast_recorded(tensor: Tensor, wanted: str) -> Tensor:
    """Convert a half or float32 tensor to another float dtype by a recorded op; float64 and integers are returned unchanged."""
    if tensor.dtype == wanted or tensor.dtype == "float64" or not dtypes.DTYPES[tensor.dtype].is_float:
        return tensor
    if wanted == "float16" and not _warned:
        _warn_once(tensor)
    return _cast_parameter(tensor, wanted) if _is_parameter(tensor) else tensor.to(wanted)


def _is_parameter(tensor: Tensor) -> bool:
    return tensor.grad_fn is None and tensor.requires_grad and tensor.dtype == "float32"


def _cast_parameter(parameter: Tensor, wanted: str) -> Tensor:
    """Cast a parameter. The cast is cached until the parameter is written or backward uses the cast.

    The first cast of a block also casts the parameters that followed this one in the last block, all in one launch. A replay repeats the
    casts of its own recording and no others.
    """
    block, key = autocast_block.get(), id(parameter)
    if block is None:
        return parameter.to(wanted)
    recording.at_end(block.casts.clear, block.ahead.clear)
    first, known = not block.casts, block.casts.get(key) or block.ahead.pop(key, None)
    if known is None or not known.good(wanted):
        known = _cast_of(parameter, parameter.to(wanted))
        if known.half.grad_fn is None:
            return known.half
    block.casts[key] = known
    others = [t for ref in _together.get(key, ()) if (t := ref()) is not None and t.queue is parameter.queue] if first else []
    if others and others[0] is parameter:
        others = [t for t in others[1:] if _is_parameter(t)]
        halves = hooks.upper(".autograd.ops").cast_together(others, wanted)
        block.ahead.update({id(t): _cast_of(t, half) for t, half in zip(others, halves, strict=False)})
    return known.half


def _cast_of(parameter: Tensor, half: Tensor) -> _Cast:
    return _Cast(parameter, half, writes_of(parameter).last, recording.active.recorder)


def _warn_once(tensor: Tensor) -> None:
    global _warned
    if not tensor.device.profile.half_arithmetic:
        _warned = True
        what = "the device has no half arithmetic: values are stored as float16 and computed in float32"
        text = message("autocast", what, 'dtype="bfloat16" needs no loss scaling', device=tensor.device.device_name)
        line = user_line()
        warnings.warn_explicit(text, RuntimeWarning, line.filename, line.lineno or 0)
