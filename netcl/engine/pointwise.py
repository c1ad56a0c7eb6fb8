"""Runs pointwise rows: a call looks up and runs a plan, returns a deferred value, or uses NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.commands import CommandList, device_queue
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, DType
from netcl.core.errors import DtypeError, message
from netcl.core.methods import Size
from netcl.core.tensor import Tensor
from netcl.core.writes import rewrote
from netcl.engine.lazy_graph import defer, onto_product, worth_deferring
from netcl.engine.map_kernel import INTEGRAL, as_compute, as_integer, from_compute, fusable, plan_map
from netcl.engine.modes import deferral, in_mode
from netcl.engine.opencl_text import Body, forward_body, numpy_function, vjp_body
from netcl.engine.operands import SCALARS, check_out, check_same_device, common_dtype, common_shape, operands
from netcl.engine.plan import MOST_PLANS, Plan, plan_cache, planned_before
from netcl.engine.registry import Choice, Pointwise


class DeferredCall(NamedTuple):
    """The cache entry for calls that are deferred instead of planned: shape, compute type and dtype of the result."""

    types: tuple[tuple[int, ...], str, DType]


# ---- running rows


@cache
def caller(row: Pointwise, dtype: str | None = None) -> Callable[..., Tensor]:
    """Return the forward function of a row, which takes inputs, parameters and ``out=``. ``dtype`` replaces the dtype of the result."""
    count = row.arity + len(row.params)

    def call(*args: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        if named or len(args) != count:
            args = _in_order(row, args, named)
        key: list[Any] = [row] if dtype is None and out is None else [row, dtype, out is None]
        tensors: Sequence[Tensor] = args
        numbers: Any = ()
        queue = None
        for x in args:
            if isinstance(x, Tensor):
                if x.queue is not queue:
                    if queue is not None:
                        check_same_device(row.name, next(y for y in args if isinstance(y, Tensor)), x)
                    queue = queue or x.queue
                key.append(x.dtype)
                key.append(x.shape)
            elif type(x) in SCALARS:
                key.append(type(x))
                numbers = [*numbers, x] if numbers else [x]
            else:
                queue = None
                break
        if queue is None:
            return call(*_operands_of(row, args), out=out)
        signature = tuple(key)
        if out is None and deferral.mode is not None:
            return deferred(row, queue, args, _fused_types(signature, row, args, dtype), dtype)
        try:
            found = queue.netcl.plans[signature]
        except (AttributeError, KeyError):  # a new queue or a new signature
            found = None
        if type(found) is not Plan:
            if isinstance(queue, CPUQueue):
                return _run_numpy(row, queue, args, out, dtype)
            if type(queue) is CommandList:
                return _planned_inside(row, queue, args, out, dtype, signature)
            found = found if type(found) is DeferredCall else _new_plan(row, queue, args, out, dtype, signature)
            if type(found) is DeferredCall:
                return deferred(row, queue, args, found.types, dtype)
        if recording.listening and out is None and (made := _onto_product(row, args, dtype, signature)) is not None:
            return made
        if numbers:
            tensors = [x for x in args if isinstance(x, Tensor)]
            numbers = tuple(map(found.cast, numbers))
        if out is None:
            return found.run(tensors, numbers)
        _, shape, name = found.results[0]
        found.run([*tensors, check_out(row.name, out, shape, name)], numbers)
        rewrote(out)
        return out

    return call


def run(row: Pointwise, args: Sequence[Any], out: Tensor | None = None, dtype: str | None = None) -> Tensor:
    """Return the result of a row; ``args`` are its inputs, then its parameters."""
    return caller(row, dtype)(*args, out=out)


@cache
def signature_of(row: Pointwise | Choice) -> Signature:
    """Return the signature of a row's public function: its inputs, its parameters with their defaults, and ``out=``."""
    inputs = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in row.inputs]
    params = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in row.params.items()]
    return Signature([*inputs, *params, Parameter("out", Parameter.KEYWORD_ONLY, default=None)])


def _in_order(row: Pointwise | Choice, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return the inputs and parameters of a call in order, with defaults."""
    extra = len(args) - len(row.inputs)
    if extra == 0 and named.keys() <= row.params.keys():
        return (*args, *{**row.params, **named}.values())
    if extra == len(row.params) and not named:
        return args
    try:
        values = signature_of(row).bind(*args, **named)
    except TypeError as error:
        raise TypeError(message(row.name, str(error), f"the call is {row.name}{signature_of(row)}")) from None
    values.apply_defaults()
    return values.args


@cache
def pointwise_function(row: Pointwise | Choice) -> Callable[..., Tensor]:
    """Return the public function of a row."""

    def choose(*args: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        args = _in_order(row, args, named)
        chosen, rest = row.resolve(dict(zip(row.params, args[inputs:], strict=True)))
        return caller(chosen)(*args[:inputs], *rest.values(), out=out)

    inputs = len(row.inputs)
    made: Any = choose if isinstance(row, Choice) else caller(row)
    made.__name__ = made.__qualname__ = row.name
    made.__doc__, made.__module__, made.__signature__ = row.doc, "netcl.ops", signature_of(row)
    return made


def _operands_of(row: Pointwise, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with arrays converted to tensors and NumPy's numbers to Python's; raises if a parameter is not a number."""
    params = [x.item() if isinstance(x, np.generic) else x for x in args[row.arity :]]
    for name, value in zip(row.params, params, strict=True):
        if not isinstance(value, SCALARS):
            raise TypeError(message(row.name, f"{name} must be a number", **{name: repr(value)}))
    return (*operands(row.name, args[: row.arity], row.inputs), *(int(x) if type(x) is Size else x for x in params))


def _new_plan(
    row: Pointwise, queue: Any, args: Sequence[Any], out: Tensor | None, dtype: str | None, key: tuple[Any, ...]
) -> Plan | DeferredCall:
    """Plan a call with a new key and cache the plan; a :class:`DeferredCall` takes its place if the call is deferred."""
    plans = plan_cache(queue)
    types = _forward_types(row, args, dtype)
    if out is None and worth_deferring(queue, types[0]) and fusable(queue, *types, args):
        plans[key] = deferred_call = DeferredCall(types)
        return deferred_call
    plans[key] = plan = _own_plan(row, queue, args, out, types)
    return plan


def _own_plan(row: Pointwise, queue: Any, args: Sequence[Any], out: Tensor | None, types: tuple[tuple[int, ...], str, DType]) -> Plan:
    shape, compute, result = types
    if out is not None and (out.shape, out.dtype) != (shape, result.name):
        check_out(row.name, out, shape, result.name)  # raises
    values, params = args[: row.arity], len(args) - row.arity
    plan = plan_map(row.name, queue, forward_body(row), values, (result,), compute, params, shape, out=out)
    if compute in INTEGRAL:
        plan.cast = partial(as_integer, row.name, _number_type(row, compute, result, args))
    return plan


def _planned_inside(
    row: Pointwise, commands: CommandList, args: Sequence[Any], out: Tensor | None, dtype: str | None, key: tuple[Any, ...]
) -> Tensor:
    """Append the launch of a row to the commands of the op that is being planned; returns the result."""
    plan = planned_before(commands, key) or _own_plan(row, commands.queue, args, out, _forward_types(row, args, dtype))
    tensors = [x for x in args if isinstance(x, Tensor)]
    if out is not None:
        _, shape, name = plan.results[0]
        tensors.append(check_out(row.name, out, shape, name))
    return plan.append_to(commands, tensors, [plan.cast(x) for x in args if not isinstance(x, Tensor)])


def _forward_types(row: Pointwise, args: Sequence[Any], dtype: str | None) -> tuple[tuple[int, ...], str, DType]:
    """Return the shape of a call's result, the compute type, and the dtype of the result.

    The dtype that inputs and parameters are promoted to determines the compute type. It is also the result's dtype, unless that is bool.
    """
    values, params = args[: row.arity], args[row.arity :]
    for name, x in zip(row.params, params, strict=True):
        if isinstance(x, Tensor):
            raise TypeError(message(row.name, f"{name} must be a number, got a tensor", "pass x.item()", shape=x.shape))
    tensors = [x for x in args if isinstance(x, Tensor)]
    shape, kind = tensors[0].shape, tensors[0].dtype
    if any([x.shape != shape for x in tensors]):
        names = [name for name, x in zip(row.inputs, values, strict=True) if isinstance(x, Tensor)]
        shape = common_shape(row.name, [x.shape for x in tensors], names)
    same = len(tensors) == len(args) and all([x.dtype is kind for x in tensors])
    working = DTYPES[kind] if same else common_dtype((*map(values.__getitem__, row.promoting), *(params if row.result != "inputs" else ())))
    if (row.accepts == "float" and not working.is_float) or (row.accepts == "number" and not working.rank):
        wanted = "a floating-point dtype" if row.accepts == "float" else "a numeric dtype, not bool"
        raise DtypeError(message(row.name, f"inputs must have {wanted}", 'cast first: x.to("float32")', dtype=working.name))
    if row.result == "float" and not working.is_float:
        working = DTYPES["float32"]
    if row.result == "number" and not working.rank:
        working = DTYPES["int64"]
    result = DTYPES["bool"] if row.result == "bool" else working
    if working.c_compute in INTEGRAL:
        _check_scalars(row, _number_type(row, working.c_compute, result, args), args)
    return shape, working.c_compute, dtypes.lookup(dtype, row.name) if dtype else result


def _number_type(row: Pointwise, compute: str, result: DType, args: Sequence[Any]) -> str:
    """Return the type that a row's numbers must fit: that of the result, unless sums and products wrap numbers around as elements.

    An exponent must not be negative, as in torch: the reciprocal of an integer would be 0.
    """
    if row.fwd.startswith("POW(") and isinstance(args[0], Tensor):
        return "ulong"
    selects = row.fwd.startswith(("WHERE(", "MIN(", "MAX(", "FLOORDIV(", "REMAINDER("))
    return result.name if result.narrow and selects else compute


def _check_scalars(row: Pointwise, compute: str, args: Sequence[Any]) -> None:
    for x in args:
        if not isinstance(x, Tensor):
            as_integer(row.name, compute, x)


_types: dict[tuple[Any, ...], tuple[tuple[int, ...], str, DType] | None] = {}


def _fused_types(key: tuple[Any, ...], row: Pointwise, args: Sequence[Any], dtype: str | None) -> Any:
    """Return shape, compute type and dtype of a deferred value; ``None`` if it cannot be deferred."""
    if key not in _types:
        if len(_types) >= MOST_PLANS:
            _types.clear()
        types = _forward_types(row, args, dtype)
        queue = next(x.queue for x in args if isinstance(x, Tensor))
        _types[key] = types if fusable(queue, *types, args) else None
    return _types[key]


def deferred(row: Pointwise, queue: Any, args: Sequence[Any], types: Any, dtype: str | None) -> Tensor:
    """Return the deferred result of a row; runs the row now if ``types`` is ``None``."""
    if types is None:
        with in_mode(None):
            return run(row, args, None, dtype)
    shape, compute, result_dtype = types
    if compute in INTEGRAL:
        _check_scalars(row, _number_type(row, compute, result_dtype, args), args)  # the key holds the types of numbers, not their values
    values, params = args[: row.arity], args[row.arity :]
    return defer(row.name, forward_body(row), values, params, shape, result_dtype, compute, queue)


def _onto_product(row: Pointwise, args: Sequence[Any], dtype: str | None, key: tuple[Any, ...]) -> Tensor | None:
    """Return the deferred result of a row in the kernel of a pending product, in a recording; ``None`` if it must run by itself."""
    if row.params or not recording.replays():
        return None
    types = _fused_types(key, row, args, dtype)
    return None if types is None else onto_product(row.name, args, types[0], types[2])


def _run_numpy(row: Pointwise, queue: Any, args: Sequence[Any], out: Tensor | None, dtype: str | None) -> Tensor:
    shape, compute, result = _forward_types(row, args, dtype)
    function = numpy_function(forward_body(row), compute)
    with np.errstate(all="ignore"):
        (value,) = function(*(as_compute(x, compute) for x in args))
    made = from_compute(value, shape, result, queue, args)
    if out is None:
        return made
    target = check_out(row.name, out, shape, result.name)
    assert target.array is not None and made.array is not None
    np.copyto(target.array, made.array)
    return out


# ---- gradients


@cache
def _vjp_operands(row: Pointwise, wanted: tuple[bool, ...]) -> tuple[Body, tuple[int, ...]]:
    """Return the body of the wanted gradients, and the indices of its inputs in ``(g, out, *inputs)``."""
    body = vjp_body(row, wanted)
    names = ("g", "out", *(f"v{i}" for i in range(row.arity)))
    return body, tuple(names.index(name) for name in body.inputs)


def run_vjp(
    row: Pointwise, g: Tensor, out: Tensor | None, values: Sequence[Any], params: Mapping[str, Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Compute gradients of the wanted float inputs, each with the shape of ``g`` and its input's dtype; others are ``None``.

    For tensors that no wanted gradient reads, any object with ``dtype`` will do. A gradient may be ``g``
    itself, so gradients must not be changed in place.
    """
    grads: list[Tensor | None] = [None] * row.arity
    rest: list[bool] = []
    for i, (asked, text, x) in enumerate(zip(wanted, row.vjp, values, strict=True)):
        dtype = getattr(x, "dtype", None)
        needed = bool(asked and text) and dtype in DTYPES and DTYPES[dtype].is_float
        if needed and text == "g" and dtype is g.dtype:
            grads[i] = g
        rest.append(needed and grads[i] is None)
    if True in rest:
        made = iter(_vjp_kernel(row, g, out, values, params, tuple(rest)))
        grads = [next(made) if r else grad for r, grad in zip(rest, grads, strict=True)]
    return grads


def _vjp_kernel(
    row: Pointwise, g: Tensor, out: Tensor | None, values: Sequence[Any], params: Mapping[str, Any], wanted: tuple[bool, ...]
) -> list[Tensor]:
    body, read = _vjp_operands(row, wanted)
    given = (g, out, *values)
    inputs = [given[i] for i in read]
    scalars = [float(params[name]) for name in body.scalars]
    queue = g.queue
    commands = queue if type(queue) is CommandList else None
    queue = device_queue(queue)
    types = [(x.dtype, x.shape) if isinstance(x, Tensor) else type(x) for x in inputs]
    key = ("vjp", row, wanted, *types, *[x.dtype for x, w in zip(values, wanted, strict=True) if w])
    try:
        plan = queue.netcl.plans[key]
    except (AttributeError, KeyError):  # a new queue or a new signature
        plan = None
    if len(body.inputs) == 2 and g.memory is None and commands is None and not scalars:
        joined = onto_product(f"{row.name}_vjp", inputs, g.shape, DTYPES[values[wanted.index(True)].dtype])
        if joined is not None:
            return [joined]
    if plan is None or deferral.mode is not None:
        targets = [DTYPES[x.dtype] for x, w in zip(values, wanted, strict=True) if w]
        wide = any(x.dtype == "float64" for x in inputs if isinstance(x, Tensor)) or DTYPES["float64"] in targets
        compute = "double" if wide else "float"
        wait = deferral.mode is not None or (commands is None and worth_deferring(queue, g.shape))
        if wait and all(fusable(queue, g.shape, compute, target, inputs) for target in targets):
            return [_deferred_vjp(row, i, given, params, compute) for i, w in enumerate(wanted) if w]
        if isinstance(queue, CPUQueue):
            with np.errstate(all="ignore"):
                values_of = numpy_function(body, compute)(*(as_compute(x, compute) for x in (*inputs, *scalars)))
            return [from_compute(v, g.shape, dtype, queue, inputs) for v, dtype in zip(values_of, targets, strict=True)]
        plan = plan_map(f"{row.name}_vjp", queue, body, inputs, targets, compute, len(scalars), g.shape)
        plan_cache(queue)[key] = plan
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    numbers = (*[plan.cast(x) for x in inputs if not isinstance(x, Tensor)], *scalars)
    made = plan.run(tensors, numbers) if commands is None else plan.append_to(commands, tensors, numbers)
    return made if isinstance(made, list) else [made]


def _deferred_vjp(row: Pointwise, i: int, given: Sequence[Any], params: Mapping[str, Any], compute: str) -> Tensor:
    """Return the gradient of input ``i`` as a deferred tensor; ``given`` are ``g``, ``out`` and the inputs."""
    body, read = _vjp_operands(row, tuple(k == i for k in range(row.arity)))
    numbers = [float(params[name]) for name in body.scalars]
    g, dtype = given[0], DTYPES[given[2 + i].dtype]
    return defer(f"{row.name}_vjp", body, [given[k] for k in read], numbers, g.shape, dtype, compute, g.queue)
