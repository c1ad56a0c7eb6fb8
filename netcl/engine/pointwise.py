"""Calls of pointwise rows: operands, dtypes, broadcasting, plan; on NumPy the generated function.

What depends only on dtypes and shapes is decided once and cached as a plan of the context. A call is a look-up and a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.capabilities import DeviceProfile, device_profile
from netcl.core.commands import CommandList, Given
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, DType
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector, is_named
from netcl.core.kernels import program
from netcl.core.methods import Size
from netcl.core.tensor import Tensor
from netcl.core.writes import wrote_again
from netcl.engine.launch import ahead, check_double, index_type
from netcl.engine.modes import in_mode, later, modes
from netcl.engine.opencl_text import COMPUTE, STREAM_BYTES, Body, Layout, Port, forward_body, kernel_source, numpy_function, vjp_body
from netcl.engine.plan import MOST_PLANS, Plan, command_list, plan_cache
from netcl.engine.registry import Choice, Pointwise

Operand = Tensor | bool | int | float
SCALARS = (bool, int, float)
INTEGRAL = {"int": ("int32", 2**31), "long": ("int64", 2**63)}  # compute types: their dtype, and the smallest number above their range
CPU_WIDTH = 16


class Waiting(NamedTuple):
    """In place of a plan: calls with this key return a deferred value of this shape, compute type and dtype."""

    types: tuple[tuple[int, ...], str, DType]


# ---- operands


def operands(op: str, values: Sequence[Any], names: Sequence[str] = ()) -> tuple[Operand, ...]:
    """Convert arrays and lists to tensors on the device of the first tensor; tensors and Python numbers stay as they are."""
    first = next((x for x in values if isinstance(x, Tensor)), None)
    queue = first.queue if first is not None else None
    made = [_operand(x, queue) for x in values]
    if first is None and not any(isinstance(x, Tensor) for x in made):
        made[0] = Tensor.from_host(made[0])
    tensors = [x for x in made if isinstance(x, Tensor)]
    for x in tensors[1:]:
        if x.queue is not tensors[0].queue:
            check_same_device(op, tensors[0], x)
    return tuple(made)


def tensor(op: str, x: Any) -> Tensor:
    """One input as a tensor; a number or an array goes to the active device."""
    if isinstance(x, Tensor):
        return x
    (made,) = operands(op, (x,))
    assert isinstance(made, Tensor)
    return made


def tensors(op: str, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """Several inputs as tensors on one device, numbers too."""
    made = operands(op, values)
    queue = next(x.queue for x in made if isinstance(x, Tensor))
    return tuple(x if isinstance(x, Tensor) else Tensor.from_host(queue, x) for x in made)


def _operand(x: Any, queue: Any) -> Operand:
    if isinstance(x, Tensor) or type(x) in SCALARS:
        return x
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, int):  # x.size
        return int(x)
    return Tensor.from_host(queue, x) if queue is not None else Tensor.from_host(x)


def check_same_device(op: str, a: Tensor, b: Tensor) -> None:
    """Raise unless two tensors live on one queue (all NumPy queues are one)."""
    if a.queue is b.queue or (isinstance(a.queue, CPUQueue) and isinstance(b.queue, CPUQueue)) or a.queue == b.queue:
        return
    where = {"a": a.device.device_name, "b": b.device.device_name}
    one = a.context is not None and a.context == b.context
    remedy = "take one into the other's stream: stream.use(tensor)" if one else "move one with tensor.to(device)"
    raise DeviceError(message(op, "the tensors must be on one device and queue", remedy, **where))


def common_shape(op: str, shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> tuple[int, ...]:
    """The shape that NumPy's broadcasting gives."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        values: dict[str, Any] = {f"{name}.shape": shape for name, shape in zip(names, shapes, strict=True)}
        raise ShapeError(message(op, "shapes do not broadcast", **values)) from None


# ---- dtypes


def _category(dtype: DType) -> int:
    return 2 if dtype.is_float else int(dtype.name != "bool")


def _of_number(category: int) -> DType:
    return DTYPES[("bool", "int64", "float32")[category]]


def common_dtype(operands: Sequence[Any]) -> DType:
    """torch's type promotion. Tensors with dimensions decide first; 0-d tensors, and after them Python numbers, count only if their
    category (bool, int, float) is higher.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    tiers = [[DTYPES[x.dtype] for x in tensors if x.shape], [DTYPES[x.dtype] for x in tensors if not x.shape]]
    numbers = [1 if type(x) is Size else SCALARS.index(type(x)) for x in operands if not isinstance(x, Tensor)]
    kinds = [*(reduce(dtypes.promote, tier) for tier in tiers if tier), *([_of_number(max(numbers))] if numbers else [])]
    return reduce(lambda above, below: below if _category(below) > _category(above) else above, kinds)


def _working_dtype(row: Pointwise, values: Sequence[Operand], params: Sequence[Any]) -> DType:
    """The dtype that determines the compute type; also the result's dtype, unless that is bool."""
    deciding = [values[i] for i in row.promoting]
    working = common_dtype((*deciding, *params))
    least = {"any": -1, "number": 1, "float": 2}[row.accepts]
    if _category(working) < least:
        wanted = "float tensors" if least == 2 else "numbers, not bool"
        raise DtypeError(message(row.name, f"takes {wanted}", 'cast first: x.to("float32")', dtype=working.name))
    return DTYPES["float32"] if row.result == "float" and not working.is_float else working


# ---- shapes


class Walk(NamedTuple):
    """Merged axes: sizes of the outer ones, size of the inner one; per operand its outer strides and whether it has the inner axis."""

    outer: tuple[int, ...]
    inner: int
    steps: tuple[tuple[int, ...], ...]
    moves: tuple[bool, ...]


def collapse(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Walk:
    """Merge adjacent axes that every operand either has or broadcasts: few axes, long inner loops.

    >>> collapse((8, 3, 5, 5), [(8, 3, 5, 5), (3, 1, 1)]).outer
    (8, 3)
    """
    groups = merged_axes(shape, shapes) or [(1, (True,) * len(shapes))]
    steps = tuple(steps_of(groups, k)[:-1] for k in range(len(shapes)))
    return Walk(tuple(size for size, _ in groups[:-1]), groups[-1][0], steps, groups[-1][1])


Groups = list[tuple[int, tuple[bool, ...]]]


def merged_axes(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Groups:
    """Runs of axes that each operand either has or broadcasts: size, and per operand whether it has them. Axes of size 1 are skipped."""
    padded = [(1,) * (len(shape) - len(s)) + tuple(s) for s in shapes]
    groups: Groups = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        present = tuple(s[axis] != 1 for s in padded)
        if groups and groups[-1][1] == present:
            groups[-1] = (groups[-1][0] * size, present)
        else:
            groups.append((size, present))
    return groups


def steps_of(groups: Groups, k: int) -> tuple[int, ...]:
    """The stride of operand ``k`` along each run."""
    steps, below = [], 1
    for size, present in reversed(groups):
        steps.append(below if present[k] else 0)
        below *= size if present[k] else 1
    return tuple(reversed(steps))


# ---- plans


def profile_of(queue: Any) -> DeviceProfile:
    """The profile of a queue's device, kept in the state of its context."""
    state = program.state(queue)
    if "profile" not in state:
        state["profile"] = device_profile(queue.device)
    return state["profile"]


def _layout(walk: Walk, n: int, dtype: str, profile: DeviceProfile, config: KernelConfig, asked: tuple[int, int] | None) -> Layout:
    width = 1
    if config.variant is KernelVariant.ELEMENTWISE_VECTORIZED and config.use_vectorization:
        width = CPU_WIDTH if profile.device_type == "cpu" else config.vector_width
    if walk.inner < width:
        width = 1
    aligned = not walk.outer or walk.inner % width == 0
    cpu = profile.device_type == "cpu"
    integer, streams = index_type(n), cpu and n * DTYPES[dtype].itemsize >= STREAM_BYTES
    return Layout(len(walk.outer), width, aligned, integer, cpu, not cpu and walk.inner % width == 0, streams, asked)


def launch_sizes(n: int, inner: int, width: int, profile: DeviceProfile, config: KernelConfig) -> tuple[int, int, int]:
    """Elements per work-item, work-items, local size. On a CPU a few long chunks per core, on a GPU one vector per work-item."""
    rows = n // inner if inner else 0
    if profile.device_type != "cpu":
        return width, rows * -(-inner // width), config.local_size_1d
    most = max(16384, inner // 1024)  # few enough that each can be a group
    chunk = min(max(inner // (4 * profile.max_compute_units), 1024), most) // CPU_WIDTH * CPU_WIDTH
    items = rows * -(-inner // chunk)
    return chunk, items, 1 if items <= 1024 and not is_named(config) else config.local_size_1d


class Map(NamedTuple):
    """A kernel that computes a body, its launch sizes, and its last arguments, which describe the shapes."""

    kernel: Any
    items: int
    local: int
    sizes: tuple[int, ...]


def map_kernel(
    op: str, queue: Any, body: Body, values: Sequence[Any], outputs: Sequence[DType], compute: str, shape: tuple[int, ...],
    options: tuple[str, ...] = (),
) -> Map:  # fmt: skip
    """The kernel of a body for these operands, built if it is new. Its arguments are tensors, results, numbers and sizes."""
    given = {i: x for i, x in enumerate(values) if isinstance(x, Tensor)}
    n, names = math.prod(shape), [dtype.name for dtype in outputs]
    check_double(op, queue, [*names, *(x.dtype for x in given.values()), "float64" if compute == "double" else ""])
    profile = profile_of(queue)
    walk = collapse(shape, [x.shape for x in given.values()])
    config = get_kernel_selector().select("elementwise", ((n,),), profile, names[0])
    layout = _layout(walk, n, names[0], profile, config, ahead(queue))
    inputs = [Port(body.inputs[i], DTYPES[x.dtype], moves) for (i, x), moves in zip(given.items(), walk.moves, strict=True)]
    kernel = _kernel(op, queue, body, inputs, [Port(*p) for p in zip(body.outputs, outputs, strict=True)], compute, layout, options)
    chunk, items, local = launch_sizes(n, walk.inner, layout.width, profile, config)
    sizes: tuple[int, ...] = (walk.inner, chunk)
    if walk.outer:
        sizes += (n // walk.inner, *walk.outer[1:], *(step for steps in walk.steps for step in steps))
    return Map(kernel, items, local, sizes)


def plan_map(
    op: str, queue: Any, body: Body, values: Sequence[Any], outputs: Sequence[DType], compute: str, numbers: int,
    shape: tuple[int, ...], options: tuple[str, ...] = (), out: Tensor | None = None,
) -> Plan:  # fmt: skip
    """The plan of a body. Its operands are the tensors of ``values``, then ``out`` if given; a run also takes the numbers."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    commands = command_list(queue, tensors if out is None else [*tensors, out])
    made = [Tensor.empty(shape, dtype.name, queue=commands) for dtype in outputs] if out is None else [commands.given[-1]]
    if math.prod(shape):
        kernel, items, local, sizes = map_kernel(op, queue, body, values, outputs, compute, shape, options)
        given = (Given(i) for i in range(numbers + len(values) - len(tensors)))
        kernel(commands, items, local, *commands.given[: len(tensors)], *made, *given, *sizes)
    plan = Plan(op, commands, made[0] if len(made) == 1 else made)
    plan.cast = partial(_integer, op, compute) if compute in INTEGRAL else float
    return plan


def _kernel(
    op: str, queue: Any, body: Body, inputs: list[Port], outputs: list[Port], compute: str, layout: Layout, options: tuple[str, ...]
) -> Any:
    state = program.state(queue)
    key = (op, "kernel", body, *inputs, *outputs, compute, layout, options)
    if key not in state:
        source = kernel_source(op, body, inputs, outputs, compute, layout)
        state[key] = program.get(queue, source, f"op_{op}", options)
    return state[key]


# ---- running rows


@cache
def caller(row: Pointwise, dtype: str | None = None) -> Callable[..., Tensor]:
    """The forward function of a row: inputs, parameters, ``out=``. ``dtype`` replaces the dtype of the result."""
    count = row.arity + len(row.params)

    def call(*args: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        if named or len(args) != count:
            args = _bound(row, args, named)
        key: list[Any] = [row] if dtype is None and out is None else [row, dtype, out is None]
        tensors: list[Tensor] = []
        numbers: list[Any] = []
        queue = None
        for x in args:
            kind = type(x)
            if kind in SCALARS:
                key.append(kind)
                numbers.append(x)
            elif isinstance(x, Tensor):
                if queue is None:
                    queue = x.queue
                elif x.queue is not queue:
                    check_same_device(row.name, tensors[0], x)
                key.append(x.dtype)
                key.append(x.shape)
                tensors.append(x)
            else:
                queue = None
                break
        if queue is None:
            return call(*_operands_of(row, args), out=out)
        signature = tuple(key)
        if out is None and modes.mode is not None:
            return deferred(row, queue, args, _fused_types(signature, row, args, dtype), dtype)
        try:
            found = queue._netcl_state["plans"][signature]
        except (AttributeError, KeyError):  # a NumPy queue, a new context, a new call
            found = None
        if type(found) is not Plan or found.queue is not queue:
            if isinstance(queue, CPUQueue):
                return _run_numpy(row, queue, args, out, dtype)
            if type(queue) is CommandList:
                return _write_down(row, queue, args, out, dtype)
            found = found if type(found) is Waiting else _new_plan(row, queue, args, out, dtype, signature)
            if type(found) is Waiting:
                return deferred(row, queue, args, found.types, dtype)
        given = tuple(map(found.cast, numbers)) if numbers else ()
        if out is None:
            return found.run(tensors, given)
        _, shape, name = found.results[0]
        found.run([*tensors, check_out(row.name, out, shape, name)], given)
        wrote_again(out)
        return out

    return call


def run(row: Pointwise, args: Sequence[Any], out: Tensor | None = None, dtype: str | None = None) -> Tensor:
    """Run the forward of a row; ``args`` are its inputs, then its parameters."""
    return caller(row, dtype)(*args, out=out)


@cache
def signature_of(row: Pointwise | Choice) -> Signature:
    """The signature of a row's public function: its inputs, its parameters with their defaults, and ``out=``."""
    inputs = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in row.inputs]
    params = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in row.params.items()]
    return Signature([*inputs, *params, Parameter("out", Parameter.KEYWORD_ONLY, default=None)])


def _bound(row: Pointwise | Choice, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs and parameters of a call, in order, with defaults."""
    try:
        values = signature_of(row).bind(*args, **named)
    except TypeError as error:
        raise TypeError(message(row.name, str(error), f"the call is {row.name}{signature_of(row)}")) from None
    values.apply_defaults()
    return values.args


@cache
def function(row: Pointwise | Choice) -> Callable[..., Tensor]:
    """The public function of a row."""

    def choose(*args: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        args = _bound(row, args, named)
        values, params = args[: len(row.inputs)], dict(zip(row.params, args[len(row.inputs) :], strict=True))
        chosen, rest = row.resolve(params)
        return caller(chosen)(*values, *rest.values(), out=out)

    made: Any = choose if isinstance(row, Choice) else caller(row)
    made.__name__ = made.__qualname__ = row.name
    made.__doc__, made.__module__, made.__signature__ = row.doc, "netcl.ops", signature_of(row)
    return made


def _operands_of(row: Pointwise, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with arrays converted to tensors; raises if a parameter is not a number."""
    params = args[row.arity :]
    for name, value in zip(row.params, params, strict=True):
        if not isinstance(value, SCALARS):
            raise TypeError(message(row.name, f"{name} must be a number", **{name: repr(value)}))
    return (*operands(row.name, args[: row.arity], row.inputs), *(int(x) if type(x) is Size else x for x in params))


def _new_plan(
    row: Pointwise, queue: Any, args: Sequence[Any], out: Tensor | None, dtype: str | None, key: tuple[Any, ...]
) -> Plan | Waiting:
    """Make the plan of a key that is new, or new on this queue of the context, or decide to defer."""
    plans = plan_cache(queue)
    first = plans.get(key)
    if first is not None:
        key = (*key, queue)
        if key in plans:
            return plans[key]
    types = shape, compute, result = _forward_types(row, args, dtype)
    if out is None and fusable(queue, *types, args) and later.worth(queue, shape):
        plans[key] = waiting = Waiting(types)
        return waiting
    if out is not None and (out.shape, out.dtype) != (shape, result.name):
        check_out(row.name, out, shape, result.name)  # raises
    values, params = args[: row.arity], len(args) - row.arity
    plans[key] = plan = plan_map(row.name, queue, forward_body(row), values, (result,), compute, params, shape, out=out)
    return plan


def _write_down(row: Pointwise, queue: Any, args: Sequence[Any], out: Tensor | None, dtype: str | None) -> Tensor:
    """Append the launch of a row to the command list of an op that is being planned."""
    shape, compute, result = _forward_types(row, args, dtype)
    target = Tensor.empty(shape, result.name, queue=queue) if out is None else check_out(row.name, out, shape, result.name)
    if target.size:
        cast = partial(_integer, row.name, compute) if compute in INTEGRAL else float
        kernel, items, local, sizes = map_kernel(row.name, queue, forward_body(row), args[: row.arity], (result,), compute, shape)
        tensors, numbers = [x for x in args if isinstance(x, Tensor)], [cast(x) for x in args if not isinstance(x, Tensor)]
        kernel(queue, items, local, *tensors, target, *numbers, *sizes)
    return target


def check_out(op: str, out: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Prepare ``out`` for writing and return it; raises unless it has the shape and dtype of the result."""
    if out.shape != shape:
        raise ShapeError(message(op, "out must have the shape of the result", out=out.shape, result=shape))
    if out.dtype != dtype:
        raise DtypeError(message(op, "out must have the dtype of the result", out=out.dtype, result=dtype))
    out._changing()
    return out


def _forward_types(row: Pointwise, args: Sequence[Any], dtype: str | None) -> tuple[tuple[int, ...], str, DType]:
    """Shape, compute type and dtype of the result."""
    values, params = args[: row.arity], args[row.arity :]
    tensors = [(name, x.shape) for name, x in zip(row.inputs, values, strict=True) if isinstance(x, Tensor)]
    shape = common_shape(row.name, [s for _, s in tensors], [name for name, _ in tensors])
    working = _working_dtype(row, values, params)
    result = DTYPES["bool"] if row.result == "bool" else working
    _check_integers(row, working.c_compute, args)
    return shape, working.c_compute, dtypes.lookup(dtype, row.name) if dtype else result


def _integer(op: str, compute: str, value: Any) -> int:
    """Convert a number to an integer; raises if the compute type cannot hold it."""
    name, most = INTEGRAL[compute]
    if not -most <= value < most:
        remedy = 'cast first: x.to("int64")' if compute == "int" else "use a float"
        raise DtypeError(message(op, f"{value} does not fit into {name}", remedy))
    return int(value)


def _check_integers(row: Pointwise, compute: str, args: Sequence[Any]) -> None:
    if compute in INTEGRAL:
        for x in args:
            if not isinstance(x, Tensor):
                _integer(row.name, compute, x)


def fusable(queue: Any, shape: tuple[int, ...], compute: str, result: DType, values: Sequence[Any]) -> bool:
    """Whether a value can be deferred: it has elements, is exact without being stored, and the device supports its types."""
    if not math.prod(shape) or result.name == "uint8":
        return False
    double = compute == "double" or result.name == "float64" or any(getattr(x, "dtype", None) == "float64" for x in values)
    return not double or isinstance(queue, CPUQueue) or profile_of(queue).has_fp64


_types: dict[tuple[Any, ...], tuple[tuple[int, ...], str, DType] | None] = {}


def _fused_types(key: tuple[Any, ...], row: Pointwise, args: Sequence[Any], dtype: str | None) -> Any:
    """Shape, compute type and dtype of a deferred value; ``None`` if it cannot be deferred."""
    if key not in _types:
        if len(_types) >= MOST_PLANS:
            _types.clear()
        types = _forward_types(row, args, dtype)
        queue = next(x.queue for x in args if isinstance(x, Tensor))
        _types[key] = types if fusable(queue, *types, args) else None
    return _types[key]


def deferred(row: Pointwise, queue: Any, args: Sequence[Any], types: Any, dtype: str | None) -> Tensor:
    """Defer a row; runs it now if ``types`` is ``None``."""
    if types is None:
        with in_mode(None):
            return run(row, args, None, dtype)
    shape, compute, result_dtype = types
    _check_integers(row, compute, args)  # the key holds the types of numbers, not their values
    values, params = args[: row.arity], args[row.arity :]
    return later.defer(row.name, forward_body(row), values, params, shape, result_dtype, compute, queue)


def as_compute(x: Operand, compute: str) -> np.ndarray:
    """An operand as a NumPy array of the compute type."""
    if not isinstance(x, Tensor):
        return COMPUTE[compute].type(x)
    assert x.array is not None
    return dtypes.decode(x.array, DTYPES[x.dtype]).astype(COMPUTE[compute], copy=False)


def from_compute(values: Any, shape: tuple[int, ...], dtype: DType, queue: Any, sources: Sequence[Any] = ()) -> Tensor:
    """A NumPy tensor of computed values; its memory is not shared with ``sources``."""
    full = np.asarray(values)
    with np.errstate(all="ignore"):
        if dtype.name == "bool":
            full = full != 0
        elif dtype.name == "uint8" and full.dtype.kind == "f":
            full = full.astype(np.int32)
        stored = dtypes.encode(full, dtype)
    if stored.shape != shape:
        stored = np.broadcast_to(stored, shape).copy()
    elif not stored.flags.writeable or any(isinstance(x, Tensor) and np.may_share_memory(stored, x.array) for x in sources):
        stored = stored.copy()
    return Tensor._of_array(stored, dtype.name, queue)


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
    """The body of the wanted gradients, and the indices of what it reads among ``g``, ``out`` and the inputs."""
    body = vjp_body(row, wanted)
    names = ("g", "out", *(f"v{i}" for i in range(row.arity)))
    return body, tuple(names.index(name) for name in body.inputs)


def run_vjp(
    row: Pointwise, g: Tensor, out: Tensor | None, values: Sequence[Any], params: Mapping[str, Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the wanted inputs in one kernel, each with the shape of ``g`` and the dtype of its input.

    For tensors that the row does not keep (``row.saved_for(i)``), any object with ``dtype`` will do. A gradient equal to ``g`` is the
    same tensor, so gradients must not be changed in place.
    """
    grads: list[Tensor | None] = [None] * row.arity
    rest: list[bool] = []
    for i, (asked, text, x) in enumerate(zip(wanted, row.vjp, values, strict=True)):
        needed = bool(asked and text) and isinstance_float(x)
        if needed and text == "g" and x.dtype is g.dtype:
            grads[i] = g
        rest.append(needed and grads[i] is None)
    if True in rest:
        made = iter(_vjp_kernel(row, g, out, values, params, tuple(rest)))
        grads = [next(made) if r else grad for r, grad in zip(rest, grads, strict=True)]
    return grads


def isinstance_float(x: Any) -> bool:
    """Whether an operand has a floating-point dtype and so can have a gradient."""
    name = getattr(x, "dtype", None)
    return name in DTYPES and DTYPES[name].is_float


def _vjp_kernel(
    row: Pointwise, g: Tensor, out: Tensor | None, values: Sequence[Any], params: Mapping[str, Any], wanted: tuple[bool, ...]
) -> list[Tensor]:
    body, read = _vjp_operands(row, wanted)
    given = (g, out, *values)
    inputs = [given[i] for i in read]
    scalars = [float(params[name]) for name in body.scalars]
    queue = g.queue
    key = (
        "vjp",
        row,
        wanted,
        *[(x.dtype, x.shape) if isinstance(x, Tensor) else type(x) for x in inputs],
        *[x.dtype for x, w in zip(values, wanted, strict=True) if w],
    )
    try:
        plan = queue._netcl_state["plans"][key]
    except (AttributeError, KeyError):  # a NumPy queue, a new context, a new call
        plan = None
    if plan is None or plan.queue is not queue or modes.mode is not None:
        targets = [DTYPES[x.dtype] for x, w in zip(values, wanted, strict=True) if w]
        compute = _float_compute(inputs, targets)
        wait = modes.mode is not None or later.worth(queue, g.shape)
        if wait and all(fusable(queue, g.shape, compute, target, inputs) for target in targets):
            return [_deferred_vjp(row, i, given, params, compute) for i, w in enumerate(wanted) if w]
        if isinstance(queue, CPUQueue):
            return _vjp_numpy(body, queue, inputs, scalars, targets, g.shape)
        plan = plan_map(f"{row.name}_vjp", queue, body, inputs, targets, compute, len(scalars), g.shape)
        plan_cache(queue)[key] = plan
    numbers = [plan.cast(x) for x in inputs if not isinstance(x, Tensor)]
    made = plan.run([x for x in inputs if isinstance(x, Tensor)], (*numbers, *scalars))
    return made if isinstance(made, list) else [made]


def _deferred_vjp(row: Pointwise, i: int, given: Sequence[Any], params: Mapping[str, Any], compute: str) -> Tensor:
    """The gradient of input ``i`` as a deferred tensor; ``given`` are ``g``, ``out`` and the inputs."""
    body, read = _vjp_operands(row, tuple(k == i for k in range(row.arity)))
    numbers = [float(params[name]) for name in body.scalars]
    g, dtype = given[0], DTYPES[given[2 + i].dtype]
    return later.defer(f"{row.name}_vjp", body, [given[k] for k in read], numbers, g.shape, dtype, compute, g.queue)


def _float_compute(inputs: Sequence[Any], targets: Sequence[DType]) -> str:
    return "double" if any(x.dtype == "float64" for x in inputs if isinstance(x, Tensor)) or DTYPES["float64"] in targets else "float"


def _vjp_numpy(
    body: Body, queue: Any, inputs: Sequence[Operand], scalars: Sequence[float], targets: Sequence[DType], shape: tuple[int, ...]
) -> list[Tensor]:
    compute = _float_compute(inputs, targets)
    with np.errstate(all="ignore"):
        values = numpy_function(body, compute)(*(as_compute(x, compute) for x in (*inputs, *scalars)))
    return [from_compute(v, shape, dtype, queue, inputs) for v, dtype in zip(values, targets, strict=True)]
