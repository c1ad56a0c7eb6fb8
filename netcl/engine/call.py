"""Calls of ops that are Python functions: operands -> key -> plan -> run.

The key holds the op, the shapes and dtypes of its tensors and its other arguments. A new key gets a plan: the op's function runs on a
command list. Later calls look the plan up and run it. The function runs without a plan on the NumPy backend, for arguments
that give no key (such as arrays), and if it does something that a plan cannot repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from math import copysign
from typing import Any, NamedTuple

from netcl.core import dtype as dtypes
from netcl.core import memory, recording
from netcl.core.commands import CommandList, Notes, NotPlannable, check_planning
from netcl.core.device import CPUQueue
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine.modes import deferral, in_mode
from netcl.engine.plan import Plan, command_list, plan_cache
from netcl.engine.registry import Reduction

log = logging.getLogger("netcl")
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None), dtypes.dtype, Reduction})
_AT_ONCE = "run at once: the op does what a plan cannot repeat"
_UNFUSED_CALLS = 8  # calls of one key whose deferral fused nothing, after which calls of this key run eagerly
_AGAIN = 64  # calls after which an eager key retries deferral


class Deferral:
    """Counts, for the calls of one key, the deferred values that were fused (``followed``) and the unfused ones (``alone``).

    Deferring costs as much host time as a small product takes on the device, so a key whose values are never fused runs eagerly.
    """

    __slots__ = ("_calls", "alone", "followed", "plan")

    def __init__(self) -> None:
        self.alone = self.followed = self._calls = 0
        self.plan: Any = None  # of the eager calls

    def waits(self) -> bool:
        """Count a call of this key and return whether to defer it; always ``True`` in a recording, because two recordings must be equal."""
        if recording.active.recorder is not None:
            return True
        self._calls += 1
        return self.followed > 0 or self.alone < _UNFUSED_CALLS or self._calls % _AGAIN == 0

    def follow(self, made: Any) -> Any:
        """Return the result ``made``; if it is a pending product, this object will count whether it gets fused."""
        if type(made) is Tensor and made.memory is None and hasattr(made.source, "deferral"):
            made.source.deferral = self  # type: ignore[union-attr]
        return made


def _key_operands(values: Sequence[Any], key: list[Any]) -> list[Tensor] | None:
    """Append dtypes, shapes and plain values of the arguments to ``key``; returns their tensors, or ``None`` if they give no key."""
    tensors: list[Tensor] = []
    for x in values:
        kind = type(x)
        if kind is Tensor:
            if x.host_ref is not None and memory.shares_host(x.lease):
                return None  # the caller's memory may not be aligned as the pool's is
            key.append(x.dtype)
            key.append(x.shape)
            tensors.append(x)
        elif kind in _PLAIN_TYPES:
            key.append(kind)
            key.append(x if kind is not float or x else copysign(1.0, x))
        elif kind is tuple and all([type(part) is int for part in x]):
            key.append(x)
        elif kind is tuple or kind is list or hasattr(kind, "_fields"):
            key.append((kind, len(x)))
            inside = _key_operands(x, key)
            if inside is None:
                return None
            tensors += inside
        else:
            return None
    return tensors


def _rewritten(value: Any, operands: Iterator[Tensor]) -> Any:
    """Return an argument with its tensors replaced by ``operands``, in the order of :func:`_key_operands`."""
    kind = type(value)
    if kind is Tensor:
        return next(operands)
    if isinstance(value, tuple | list):
        parts = [_rewritten(part, operands) for part in value]
        return value._make(parts) if hasattr(value, "_make") else kind(parts)
    return value


def make_plan(name: str, queue: Any, tensors: Sequence[Tensor], function: Callable[..., Any], args: Any, kwargs: Any) -> Plan | str:
    """Return the plan of a call, or ``_AT_ONCE`` if the op cannot be planned."""
    commands = command_list(queue, tensors)
    operands = iter(commands.given)
    args = [_rewritten(arg, operands) for arg in args]
    kwargs = {key: _rewritten(arg, operands) for key, arg in kwargs.items()}
    try:
        with in_mode(None), recording.replaced_by(Notes(commands)):
            result = function(*args, **kwargs)
        return Plan(name, commands, result)
    except NotPlannable as reason:
        log.info("[%s] is not planned: %s", name, reason)
        return _AT_ONCE
    finally:
        commands.given = []


def planned(
    name: Any, function: Callable[..., Any], deferred: Callable[..., Any] | None = None, waits: Callable[..., bool] | None = None
) -> Any:
    """Wrap the function of an op so that calls with the same key share a cached plan. ``name`` is the op's row or its name.

    ``deferred`` takes the same arguments and returns the result as deferred values, or ``None``. It is called
    inside ``ag.jit_compile``, if ``waits(*args)`` is true, and for the first calls of a key. For later calls, a :class:`Deferral` decides.
    """
    selector = get_kernel_selector()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        key = [name, selector.revision, *kwargs]
        tensors = _key_operands((*args, *kwargs.values()) if kwargs else args, key)
        if deferred is not None and (deferral.mode is not None or not tensors or (waits is not None and waits(*args))):
            made = deferred(*args, **kwargs)
            if made is not None:
                return made
        if not tensors:
            return function(*args, **kwargs)
        queue, signature = tensors[0].queue, tuple(key)
        for x in tensors:
            if x.queue is not queue:
                check_planning(queue, x.queue)
                return function(*args, **kwargs)
        try:
            found = queue.netcl.plans[signature]
        except (AttributeError, KeyError):  # a new queue or a new signature
            found = None
        if type(found) is Plan:
            return found.run(tensors)
        if type(queue) is CommandList or isinstance(queue, CPUQueue):
            return function(*args, **kwargs)
        return _UnplannedCall(name, function, deferred, args, kwargs, tensors).made(signature, found)

    return call


class _UnplannedCall(NamedTuple):
    """A call without a valid plan in the cache."""

    name: Any
    function: Callable[..., Any]
    deferred: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]

    def made(self, signature: tuple[Any, ...], found: Any) -> Any:
        """Return the result of the call; cache its plan or a :class:`Deferral`. ``found`` is the entry cached for ``signature``."""
        plans = plan_cache(self.tensors[0].queue)
        if found is None and self.deferred is not None and deferral.mode is None:
            made = self.deferred(*self.args, **self.kwargs)
            if made is not None:
                plans[signature] = begun = Deferral()
                return begun.follow(made)
        if type(found) is Deferral and found.waits():
            made = self.deferred(*self.args, **self.kwargs)  # type: ignore[misc]
            if made is not None:
                return found.follow(made)
        plan = found.plan if type(found) is Deferral else found
        if plan is None:
            name = getattr(self.name, "name", self.name)
            plan = make_plan(name, self.tensors[0].queue, self.tensors, self.function, self.args, self.kwargs)
        if type(found) is Deferral:
            found.plan = plan
        else:
            plans[signature] = plan
        return plan.run(self.tensors) if type(plan) is Plan else self.function(*self.args, **self.kwargs)
