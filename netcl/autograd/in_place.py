"""Recorded in-place writes: ``x += y``, ``x.exp_()``, ``x[i] = value``, on tensors and on views of them.

A recorded write changes the memory of the tensor and sets its ``grad_fn`` to that of the result. A write to a view also sets ``grad_fn``
of the base, so that gradients flow to the old base and to the result, and ``grad_fn`` of the other views of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl import ops
from netcl.autograd.ops import keeps_first, needs_recording, record, scaled, twin
from netcl.autograd.tape import KeptGradient, grad_mode, keeps_gradient, modes, no_grad, retain_grad
from netcl.core import recording
from netcl.core.dtype import DTYPES
from netcl.core.errors import AutogradError, DtypeError, ShapeError, at_least, check_probability, message
from netcl.core.tensor import CountedSource, Tensor, duplicate, with_shape
from netcl.core.writes import clock, rewrote, writes_of
from netcl.engine import registry
from netcl.engine.launch import FLOATS
from netcl.engine.operands import common_shape
from netcl.engine.registry import Choice, Pointwise
from netcl.engine.strided import dense
from netcl.ops import views
from netcl.ops.getitem import block_of, result_shape, selection_of
from netcl.ops.random import EXACT_INTEGERS, check_integers, with_generator


def in_place(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply the op ``name`` to ``x`` and write the result into ``x``; returns ``x``."""
    _check_target(name, x, args, kwargs)
    if name in _SPECIAL:
        return _SPECIAL[name](x, *args, **kwargs)
    if name in ("add", "sub") and "alpha" in kwargs:
        alpha = kwargs.pop("alpha")
        args = tuple(scaled(x, other, alpha) for other in (*args, *kwargs.values()))
        kwargs = {}
    if not needs_recording((x, *args), kwargs):
        if _fits_in(name, x, args, kwargs):
            ops.function(name)(x, *args, out=x, **kwargs)
            return x
        return assign(x, twin(name)(x, *args, **kwargs), name)
    snapshot = _with_history(duplicate(x), x) if keeps_first(name) else x  # backward of the op reads the current values
    return assign(x, twin(name)(snapshot, *args, **kwargs), name)


def overwrite(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run ``x = function(x, ...)`` in place and return ``x``: torch's ``inplace=True``.

    If ``x`` shares its memory with no other tensor, it takes the memory of the result instead, and pending ops fuse as without ``inplace``.
    """
    observer, name = modes.observer, function.__name__
    if observer is None:
        _check_target(name, x, args, kwargs)
        alone = x.writes is None and x.place is None and (x.source is not None or x.grad_fn is not None)
        if not alone or keeps_gradient(x) or (recording.listening and not recording.made(x)):
            if name in registry.REGISTRY:
                return in_place(name, x, *args, **kwargs)
            return assign(x, function(twin("clone")(x), *args, **kwargs), name)
    now, old = clock.tick(), _with_history(with_shape(x, x.shape), x)
    if isinstance(x.source, CountedSource):
        x.source.tensors[:] = [ref for ref in x.source.tensors if ref() is not x]
    if observer is not None:
        observer(None, x, old)
    try:
        result = function(old, *args, **kwargs)
        if result is old:
            x.writes = None
        elif result.place is not None or result.dtype != x.dtype or result.shape != x.shape:
            return assign(x, result, name)
        else:
            for slot in ("memory", "lease", "host_ref", "pending_event", "pending_release", "source"):
                setattr(x, slot, getattr(result, slot))
            x.writes = writes_of(result)
            x.writes.last = clock.last = max(clock.last, now)  # backward of earlier ops must not read x
            _with_history(x, result)
    finally:
        if x.source is not None:
            x.source.seen_by(x)
    if observer is not None:
        observer(None, result, x)
    return x


def _check_target(name: str, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise while a model is traced. As in torch, also raise outside of ``no_grad()`` for a leaf that requires grad or a view of it."""
    if modes.observer is not None:
        raise AutogradError(message(f"{name}_", "cannot write in place while a model is traced", "compute a new tensor", shape=x.shape))
    if not grad_mode.get():
        return
    history = None if x.place is None else x.place.history
    of_leaf = history is not None and history.leaf and needs_recording((x, *args), kwargs)
    if of_leaf or (x.requires_grad and x.grad_fn is None):
        what = f"cannot write in place to {'a view of a leaf' if of_leaf and x.grad_fn is not None else 'a leaf'} that requires grad"
        raise AutogradError(message(f"{name}_", what, "do it inside no_grad(), or write to its data or to a clone()", shape=x.shape))


def _fits_in(name: str, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the op can write its result directly into the memory of ``x``."""
    row = registry.lookup_op(name)
    if not isinstance(row, Pointwise | Choice) or not x.size or x.dtype not in FLOATS or views.is_copy(x):
        return False
    if (row.rows[0] if isinstance(row, Choice) else row).result == "bool" or (x.place is not None and x.place.source is not None):
        return False
    for y in (*args, *kwargs.values()):
        if isinstance(y, Tensor):
            shared = y is not x and y.writes is not None and y.writes is x.writes
            if shared or y.dtype != x.dtype or y.queue is not x.queue or common_shape(name, (x.shape, y.shape), ("x", "other")) != x.shape:
                return False
        elif y is not None and type(y) not in (bool, int, float):
            return False
    return True


# ---- the values


def assign(x: Tensor, result: Tensor, name: str = "assign") -> Tensor:
    """Write a result into ``x``, give ``x`` the history of the result, and return ``x``."""
    if result is x:
        return x
    if result.shape != x.shape:
        what = "the result must have the shape of the tensor it is written to"
        raise ShapeError(message(f"{name}_", what, f"use the result of {name} instead", tensor=x.shape, result=result.shape))
    if result.dtype != x.dtype:
        kinds = [0 if dtype == "bool" else 1 + DTYPES[dtype].is_float for dtype in (result.dtype, x.dtype)]
        if kinds[0] > kinds[1]:
            what = f"a result of {result.dtype} cannot be written to a tensor of {x.dtype}"
            raise DtypeError(message(f"{name}_", what, f"use the result of {name} instead, or cast one of them", shape=x.shape))
        result = twin("cast")(result, x.dtype)
    old = _history_of(x)
    views.write_into(x, result)
    _rebase(x, old, result)
    return x


# ---- the history


def _stand_in(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor without memory, to which a history can be attached."""
    return Tensor(None, shape, like.dtype, like.context, like.queue)


def _with_history(x: Tensor, of: Tensor) -> Tensor:
    """Give ``x`` the history of another tensor, and return ``x``."""
    x.requires_grad, x.grad_fn, x.output_nr = of.requires_grad, of.grad_fn, of.output_nr
    return x


def _history_of(x: Tensor) -> Tensor:
    """Return a tensor without memory that has the history of ``x`` before the write."""
    return _with_history(_stand_in(x.shape, x), x)


def _rebase(x: Tensor, old: Tensor, result: Tensor) -> None:
    """Set ``grad_fn`` of ``x`` and of all tensors over its memory after a write of ``result``. ``old`` is ``x`` before the write."""
    place = x.place
    history = None if place is None else place.history
    base_requires_grad = history is not None and history.edge is not None
    if not grad_mode.get() or not (result.requires_grad or old.requires_grad or base_requires_grad):
        return
    if not result.requires_grad:  # a constant: no gradient to the old x, but x stays part of the graph, as in torch
        constant = _stand_in(x.shape, x)
        record("as_strided_scatter", constant, old, result, x.shape, dense(x.shape))
        result = constant if constant.requires_grad else result
    kept = [t for t in ((x,) if history is None else {x, *history.members()}) if keeps_gradient(t)]
    for t in kept:
        t.grad_fn.hooks = tuple(each for each in t.grad_fn.hooks if not (isinstance(each[1], KeptGradient) and each[1].there() is t))
    if history is None or (place.strides is None and len(history.members()) == 1):
        _with_history(x, result)
        if history is not None:
            history.comes_from(x)
    else:
        _rebase_family(x, place, history, result)
    for t in kept:
        retain_grad(t)


def _rebase_family(x: Tensor, place: views.Place, history: views.SharedHistory, result: Tensor) -> None:
    """After a write to a shared base, record the write for the flattened base, and record every tensor over it as a new view."""
    whole = (history.size,)
    new = _stand_in(whole, x)
    if place.strides is None:
        record("reshape", new, result, whole)
    else:
        old = base = _stand_in(history.shape, x)
        if history.edge is not None:
            base.requires_grad, (base.grad_fn, base.output_nr) = True, history.edge
        if history.shape != whole:
            old = _stand_in(whole, x)
            record("reshape", old, base, whole)
        record("as_strided_scatter", new, old, result, x.shape, place.strides, place.offset)
    history.comes_from(new)
    for member in history.members():
        if member.place.strides is None:
            record("reshape", member, new, member.shape)
        else:
            moves = tuple((step,) for step in member.place.strides)
            record("strided_block", member, new, (member.place.offset,), member.shape, moves)


# ---- items


def recorded_setitem(x: Tensor, index: Any, value: Any) -> Tensor:
    """Run ``x[index] = value`` and return ``x``. If recorded, gradients flow to ``value`` and, for unwritten elements, to the old ``x``."""
    _check_target("setitem", x, (value,), {})
    if isinstance(value, Tensor) and views.is_copy(value) and value.writes is x.writes and _is_item(x, index, value):
        return x  # x[index] += y: the write to the view has already changed x
    recorded = needs_recording((x, value), {})
    old = _history_of(x)
    if views.is_copy(x):
        views.write_into(x, ops.function("setitem")(duplicate(x), index, value))
    else:
        with no_grad():
            ops.function("setitem")(x, index, value)
        rewrote(x)
    if recorded:
        index = _kept_index(index)
        result = _stand_in(x.shape, x)
        record("setitem", result, old, index, value)
        _rebase(x, old, result)
    return x


def _is_item(x: Tensor, index: Any, value: Tensor) -> bool:
    """Whether ``value``, a view of the memory of ``x``, is exactly ``x[index]``."""
    selected = selection_of(x, index)
    if selected.arrays or result_shape(selected) != value.shape:
        return False
    offset, strides = (x.place.offset, x.place.strides) if views.is_copy(x) else (0, dense(x.shape))
    start, steps = block_of(selected, strides)
    same = [n == 1 or a == b for n, a, b in zip(value.shape, steps, value.place.strides, strict=True)]
    return offset + start == value.place.offset and all(same)


def _kept_index(index: Any) -> Any:
    """Return a copy of an index, so that later writes to its tensors and arrays do not change it."""
    if isinstance(index, tuple):
        return tuple(_kept_index(item) for item in index)
    return duplicate(index) if isinstance(index, Tensor) else index.copy() if isinstance(index, np.ndarray) else index


# ---- methods that are not ops of the table


def _fill(x: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.size != 1:
            raise ShapeError(message("fill_", "the value must have one element", value=value.shape))
        return _copy(x, twin("reshape")(value, ()))
    old = _history_of(x)
    if views.is_copy(x):
        views.write_into(x, Tensor.full((), value, x.dtype, queue=x.queue), (0,) * x.ndim)
    else:
        with no_grad():
            x._changing()
        x._fill(value)
        rewrote(x)
    if grad_mode.get():
        _rebase(x, old, _stand_in(x.shape, x))
    return x


def _copy(x: Tensor, source: Any) -> Tensor:
    if not isinstance(source, Tensor):
        source = Tensor.from_host(x.queue, source, x.dtype)
    if source.queue is not x.queue:
        if needs_recording((source,), {}):
            what, seen = "cannot record a copy between devices", {"tensor": x.device.device_name, "source": source.device.device_name}
            raise AutogradError(message("copy_", what, "copy source.detach(), or move it first", **seen))
        source = source.to(x.queue)
    if source.dtype != x.dtype:
        source = twin("cast")(source, x.dtype)
    if source.shape != x.shape or needs_recording((source,), {}):  # a node of its own: x is no leaf, its hooks see its gradient alone
        source = twin("expand")(source, x.shape)
    return assign(x, source, "copy")


def _bernoulli(x: Tensor, p: Any = 0.5) -> Tensor:
    if not isinstance(p, Tensor):
        check_probability("bernoulli_", "p", p)
    chance = p if isinstance(p, Tensor) else Tensor.full((), p, "float32", queue=x.queue)
    return assign(x, twin("cast")(twin("bernoulli")(twin("expand")(chance, x.shape)), x.dtype), "bernoulli")


def _random_integers(x: Tensor, low: int = 0, high: int | None = None) -> Tensor:
    if high is None:  # as torch: up to the largest integer that the dtype holds exactly
        largest = EXACT_INTEGERS.get(x.dtype) or min(2**63 - 1, int(np.iinfo(DTYPES[x.dtype].host).max))
        low, high = 0, low or largest + 1
    check_integers("random_", low, high, x.dtype)
    return assign(x, twin("cast")(twin("randint")(low, high, x.shape, queue=x.queue), x.dtype), "random")


def _exponential(x: Tensor, lambd: float = 1.0) -> Tensor:
    if not lambd > 0:
        raise ValueError(message("exponential_", "lambd must be above 0", lambd=lambd))
    return assign(x, twin("log1p")(-_drawn(x, "rand")) / -lambd, "exponential")


def _drawn(x: Tensor, kind: str) -> Tensor:
    return twin(kind)(x.shape, dtype=x.dtype, queue=x.queue)


_DRAWN: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda x, low=0.0, high=1.0: assign(x, _drawn(x, "rand") * (at_least("uniform_", "high", high, low) - low) + low, "uniform"),
    "normal": lambda x, mean=0.0, std=1.0: assign(x, _drawn(x, "randn") * at_least("normal_", "std", std) + mean, "normal"),
    "bernoulli": _bernoulli, "random": _random_integers, "exponential": _exponential,
    "log_normal": lambda x, mean=1.0, std=2.0: assign(
        x, twin("exp")(_drawn(x, "randn") * at_least("log_normal_", "std", std) + mean), "log_normal"
    ),
}  # fmt: skip
_SPECIAL = {"fill": _fill, "copy": _copy, **{name: with_generator(fill) for name, fill in _DRAWN.items()}}
