"""Runs pointwise rows: operands, dtypes, broadcasting, and the launch (or NumPy).

Everything that depends only on dtypes and shapes is decided once and kept as a :class:`Plan` in the state of the
context; a call is then a lookup, an allocation and an enqueue.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.backend import lifecycle
from netcl.core.capabilities import DeviceProfile, device_profile
from netcl.core.commands import CommandList, device_queue
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, DType
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector, is_named
from netcl.core.kernels import program
from netcl.core.memory import get_persistent_pool
from netcl.core.methods import Size
from netcl.core.tensor import Tensor
from netcl.core.writes import wrote_again
from netcl.engine.launch import ahead, check_double, index_type
from netcl.engine.opencl_text import COMPUTE, STREAM_BYTES, Body, Layout, Port, forward_body, kernel_source, numpy_function, vjp_body
from netcl.engine.registry import Pointwise

Operand = Tensor | bool | int | float
SCALARS = (bool, int, float)
INTEGRAL = {"int": ("int32", 2**31), "long": ("int64", 2**63)}  # compute types: their name, and what they end before
MOST_PLANS = 4096  # per context: programs with ever new shapes must not grow without bound
CPU_WIDTH = 16


class Mode(NamedTuple):
    """How ops are deferred inside ``ag.jit_compile``: folds too, and with which compiler."""

    rows: bool = True
    fast_math: bool = False


class _Fusing(threading.local):
    """Per thread: the mode of the compiled function that runs now, if one does; who listens to deferred ops and to kernels' texts; the
    op that is being said in formulas."""

    mode: Mode | None = None
    trace: list[Any] | None = None
    shown: list[str] | None = None
    whole: Any = None

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}  # nodes by their number, weakly
        self.held = 0  # bytes of their inputs, and of those that are gone since this was last counted
        lifecycle.computing.add(threading.current_thread())


fusing_modes = _Fusing()


class _Later:
    """Filled by the modules of fusion, which rest on this one."""

    defer: Callable[..., Tensor]  # a formula as a deferred tensor
    fold: Callable[..., Tensor | None]  # a reduction as one, or None
    finish: Callable[..., Tensor | None]  # an op in the kernel of the product before it, or None
    settle: Callable[..., Tensor]  # a tensor that waits for such an op, or a formula where that will not be
    follows: frozenset[str] = frozenset()  # the ops for which that may be
    worth: Callable[..., bool]  # whether plain eager code should
    run: Callable[..., None]  # compute nodes together


later = _Later()


class Plan(NamedTuple):
    """What a call with certain dtypes and shapes does."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    kernel: Any  # None: there is nothing to compute, or it is deferred
    global_size: int
    local_size: int
    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    cast: Callable[[Any], Any]
    sizes: tuple[int, ...]
    deferred: tuple[Any, ...] | None = None  # shape, dtype and compute type, where the op leaves a deferred tensor
    ready: Ready | None = None  # where all that a call adds is memory, and numbers of its own


class Ready:
    """A launch of a plan with one result, and the place its memory comes from."""

    __slots__ = ("context", "dtype", "launch", "nbytes", "queue", "shape", "shelf")

    def __init__(self, queue: Any, launch: program.Sized, shape: tuple[int, ...], dtype: str):
        self.queue, self.context, self.launch, self.shape, self.dtype = queue, queue.context, launch, shape, dtype
        self.nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self.shelf = get_persistent_pool(queue).shelf(self.nbytes)

    def result(self, memory: tuple[Any, ...], numbers: tuple[Any, ...] = ()) -> Tensor:
        """Launch it over places and buffers in turn, of which the last place is the result's, with the numbers of this call."""
        lease = self.shelf.lease(self.nbytes)
        buffer = lease.buffer
        self.launch(self.queue, (*memory, buffer), numbers)
        return Tensor(buffer, self.shape, self.dtype, self.context, self.queue, lease)


# ---- operands


def operands(op: str, values: Sequence[Any], names: Sequence[str] = ()) -> tuple[Operand, ...]:
    """Tensors and Python numbers as they are; arrays and lists become tensors on the device of the first tensor."""
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
    raise DeviceError(message(op, "the tensors live on different devices or queues", remedy, **where))


def common_shape(op: str, shapes: Sequence[tuple[int, ...]], names: Sequence[str]) -> tuple[int, ...]:
    """The common shape, as NumPy has it."""
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
    """Promotion, as torch has it: tensors by rank; those without axes, and then Python numbers, count only where they are of a higher
    category (bool, int, float) than what stands above them.
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    tiers = [[DTYPES[x.dtype] for x in tensors if x.shape], [DTYPES[x.dtype] for x in tensors if not x.shape]]
    numbers = [1 if type(x) is Size else SCALARS.index(type(x)) for x in operands if not isinstance(x, Tensor)]
    kinds = [*(reduce(dtypes.promote, tier) for tier in tiers if tier), *([_of_number(max(numbers))] if numbers else [])]
    return reduce(lambda above, below: below if _category(below) > _category(above) else above, kinds)


def _working_dtype(row: Pointwise, values: Sequence[Operand], params: Sequence[Any]) -> DType:
    """The dtype whose compute type the kernel works in; also the result's, unless that is bool."""
    deciding = [values[i] for i in row.promoting]
    working = common_dtype((*deciding, *params))
    least = {"any": -1, "number": 1, "float": 2}[row.accepts]
    if _category(working) < least:
        wanted = "float tensors" if least == 2 else "numbers, not bool"
        raise DtypeError(message(row.name, f"takes {wanted}", 'cast first: x.to("float32")', dtype=working.name))
    return DTYPES["float32"] if row.result == "float" and not working.is_float else working


# ---- shapes


class Walk(NamedTuple):
    """Collapsed axes: sizes of the outer ones, the inner size, and per operand its outer steps and whether it moves inside."""

    outer: tuple[int, ...]
    inner: int
    steps: tuple[tuple[int, ...], ...]
    moves: tuple[bool, ...]


def collapse(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Walk:
    """Merge neighbouring axes that every operand either has or broadcasts: few axes, long inner loops.

    >>> collapse((8, 3, 5, 5), [(8, 3, 5, 5), (3, 1, 1)]).outer
    (8, 3)
    """
    groups = merged_axes(shape, shapes) or [(1, (True,) * len(shapes))]
    steps = tuple(steps_of(groups, k)[:-1] for k in range(len(shapes)))
    return Walk(tuple(size for size, _ in groups[:-1]), groups[-1][0], steps, groups[-1][1])


Groups = list[tuple[int, tuple[bool, ...]]]


def merged_axes(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Groups:
    """Runs of axes that every operand either has or broadcasts: their size, and who has them. Axes of size 1 are left out."""
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
    """How far operand ``k`` moves per step along each run."""
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
    """Elements per work-item, work-items, local size. A CPU gets a few long chunks per core, a GPU one vector per item."""
    rows = n // inner if inner else 0
    if profile.device_type != "cpu":
        return width, rows * -(-inner // width), config.local_size_1d
    most = max(16384, inner // 1024)  # few enough that each can be a group
    chunk = min(max(inner // (4 * profile.max_compute_units), 1024), most) // CPU_WIDTH * CPU_WIDTH
    items = rows * -(-inner // chunk)
    return chunk, items, 1 if items <= 1024 and not is_named(config) else config.local_size_1d


def plan_body(
    op: str, queue: Any, body: Body, values: Sequence[Any], outputs: Sequence[DType], compute: str, scalars: int,
    shape: tuple[int, ...], options: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """Decide everything about a body over operands of certain dtypes and shapes; builds the kernel if it is new."""
    given = {i: x for i, x in enumerate(values) if isinstance(x, Tensor)}
    tensors = tuple(given)
    numbers = (*(i for i in range(len(values)) if i not in given), *range(len(values), len(values) + scalars))
    n = math.prod(shape)
    cast = partial(_integer, op, compute) if compute in INTEGRAL else float
    names = tuple(dtype.name for dtype in outputs)
    if n == 0:
        return Plan(shape, names, None, 0, 0, tensors, numbers, cast, ())
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
    plan = Plan(shape, names, kernel, items, local, tensors, numbers, cast, sizes)
    return plan if len(names) > 1 else plan._replace(ready=_ready(plan, queue))


def _ready(plan: Plan, queue: Any) -> Ready | None:
    launch = plan.kernel.sized(plan.global_size, plan.local_size, plan.sizes)
    return None if launch is None else Ready(device_queue(queue), launch, plan.shape, plan.dtypes[0])


def _kernel(
    op: str, queue: Any, body: Body, inputs: list[Port], outputs: list[Port], compute: str, layout: Layout, options: tuple[str, ...]
) -> Any:
    state = program.state(queue)
    key = (op, "kernel", body, *inputs, *outputs, compute, layout, options)
    if key not in state:
        source = kernel_source(op, body, inputs, outputs, compute, layout)
        state[key] = program.get(queue, source, f"op_{op}", options)
    return state[key]


def launch(plan: Plan, queue: Any, values: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Enqueue a plan over operands (tensors, numbers, parameters) into results."""
    if plan.kernel is None:
        return
    if plan.scalars:
        cast = plan.cast
        args = [*(values[i] for i in plan.tensors), *results, *(cast(values[i]) for i in plan.scalars), *plan.sizes]
    else:
        args = [*values, *results, *plan.sizes]
    plan.kernel(queue, plan.global_size, plan.local_size, *args)


def cached_plan(state: dict[Any, Any], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Make a plan and keep it; when there are too many, all are forgotten (kernels stay)."""
    plans = state.setdefault("plans", {})
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan = make()
    return plan


# ---- running rows


def run(row: Pointwise, values: Sequence[Any], params: Sequence[Any] = (), out: Tensor | None = None, dtype: str | None = None) -> Tensor:
    """The row's forward over its operands; ``dtype`` replaces the dtype of the result."""
    key: list[Any] = [row, dtype]
    queue = None
    for x in values:
        if isinstance(x, Tensor):
            if queue is None:
                queue = x.queue
            elif x.queue is not queue:
                check_same_device(row.name, next(v for v in values if isinstance(v, Tensor)), x)
            key.append(x.dtype)
            key.append(x.shape)
        elif type(x) in SCALARS:
            key.append(type(x))
        else:
            return run(row, operands(row.name, values, row.inputs), params, out, dtype)
    if queue is None:
        return run(row, operands(row.name, values, row.inputs), params, out, dtype)
    if params:
        key.extend(map(type, params))
    if out is None and fusing_modes.mode is not None:
        return deferred(row, queue, values, params, _fused_types(tuple(key), row, values, params, dtype), dtype)
    signature = tuple(key)
    try:
        plan = queue._netcl_state["plans"][signature]
    except (AttributeError, KeyError):  # a NumPy queue, a new context, a new call
        if isinstance(queue, CPUQueue):
            return _run_numpy(row, queue, values, params, out, dtype)
        plan = cached_plan(program.state(queue), signature, lambda: _forward_plan(row, queue, values, params, dtype))
    if plan.deferred is not None:
        if out is None:
            return deferred(row, queue, values, params, plan.deferred, dtype)
        plan = _launched_plan(row, queue, values, params, dtype)
    everything = (*values, *params) if params else values
    if out is None:
        return computed(plan, queue, everything)
    launch(plan, queue, everything, (check_out(row.name, out, plan.shape, plan.dtypes[0]),))
    wrote_again(out)
    return out


def computed(plan: Plan, queue: Any, values: Sequence[Any]) -> Tensor:
    """The one result of a plan over operands (tensors, numbers, parameters)."""
    ready = plan.ready
    if ready is not None and ready.queue is queue and not program.launch_observers and plan.kernel.launched:
        memory = [x for place, i in enumerate(plan.tensors) for x in (place, values[i].buffer)]
        return ready.result((*memory, len(plan.tensors)), tuple([plan.cast(values[i]) for i in plan.scalars]))
    result = Tensor._result(plan.shape, plan.dtypes[0], queue)
    launch(plan, queue, values, (result,))
    return result


def with_number(row: Pointwise, a: Operand, b: Operand) -> Tensor:
    """A row of two inputs, one of them a number, outside of functions that are compiled."""
    on_left = type(a) in SCALARS
    x, number = (b, a) if on_left else (a, b)
    try:
        queue = x.queue  # type: ignore[union-attr]
        key = (row, None, type(a), x.dtype, x.shape) if on_left else (row, None, x.dtype, x.shape, type(b))  # type: ignore[union-attr]
        plan = queue._netcl_state["plans"][key]
    except (AttributeError, KeyError):
        return run(row, (a, b))
    ready = plan.ready
    if ready is None or ready.queue is not queue or program.launch_observers:
        return run(row, (a, b))
    return ready.result((0, x.buffer, 1), (plan.cast(number),))  # type: ignore[union-attr]


def check_out(op: str, out: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """``out`` itself, about to be written, if a result of this shape and dtype fits into it."""
    if out.shape != shape:
        raise ShapeError(message(op, "out has another shape than the result", out=out.shape, result=shape))
    if out.dtype != dtype:
        raise DtypeError(message(op, "out has another dtype than the result", out=out.dtype, result=dtype))
    out._changing()
    return out


def _forward_types(
    row: Pointwise, values: Sequence[Operand], params: Sequence[Any], dtype: str | None
) -> tuple[tuple[int, ...], str, DType]:
    """Shape, compute type and dtype of the result."""
    _check_params(row, params)
    tensors = [(name, x.shape) for name, x in zip(row.inputs, values, strict=True) if isinstance(x, Tensor)]
    shape = common_shape(row.name, [s for _, s in tensors], [name for name, _ in tensors])
    working = _working_dtype(row, values, params)
    result = DTYPES["bool"] if row.result == "bool" else working
    _check_integers(row, working.c_compute, values, params)
    return shape, working.c_compute, dtypes.lookup(dtype, row.name) if dtype else result


def _integer(op: str, compute: str, value: Any) -> int:
    """A number as an integer of a compute type."""
    name, most = INTEGRAL[compute]
    if not -most <= value < most:
        remedy = 'cast first: x.to("int64")' if compute == "int" else "use a float"
        raise DtypeError(message(op, f"{value} does not fit into {name}", remedy))
    return int(value)


def _check_integers(row: Pointwise, compute: str, values: Sequence[Operand], params: Sequence[Any]) -> None:
    if compute in INTEGRAL:
        for x in (*values, *params):
            if not isinstance(x, Tensor):
                _integer(row.name, compute, x)


def _check_params(row: Pointwise, params: Sequence[Any]) -> None:
    for name, value in zip(row.params, params, strict=True):
        if type(value) not in SCALARS and type(value) is not Size:
            raise TypeError(message(row.name, f"{name} must be a number", **{name: repr(value)}))


def _forward_plan(row: Pointwise, queue: Any, values: Sequence[Operand], params: Sequence[Any], dtype: str | None) -> Plan:
    types = _forward_types(row, values, params, dtype)
    if fusable(queue, *types, values) and later.worth(queue, types[0]):
        return Plan(types[0], (types[2].name,), None, 0, 0, (), (), float, (), types)
    return _launched_plan(row, queue, values, params, dtype)


def _launched_plan(row: Pointwise, queue: Any, values: Sequence[Operand], params: Sequence[Any], dtype: str | None) -> Plan:
    shape, compute, result = _forward_types(row, values, params, dtype)
    return plan_body(row.name, queue, forward_body(row), values, (result,), compute, len(params), shape)


def fusable(queue: Any, shape: tuple[int, ...], compute: str, result: DType, values: Sequence[Any]) -> bool:
    """Whether an op's value can wait: it has elements, its dtype can be told without storing it, and the device knows its types."""
    if not math.prod(shape) or result.name == "uint8":
        return False
    double = compute == "double" or result.name == "float64" or any(getattr(x, "dtype", None) == "float64" for x in values)
    return not double or isinstance(queue, CPUQueue) or profile_of(queue).has_fp64


_types: dict[tuple[Any, ...], tuple[tuple[int, ...], str, DType] | None] = {}


def _fused_types(key: tuple[Any, ...], row: Pointwise, values: Sequence[Operand], params: Sequence[Any], dtype: str | None) -> Any:
    """Shape, compute type and dtype of a value that can wait; ``None`` for one that cannot."""
    if key not in _types:
        if len(_types) >= MOST_PLANS:
            _types.clear()
        types = _forward_types(row, values, params, dtype)
        queue = next(x.queue for x in values if isinstance(x, Tensor))
        _types[key] = types if fusable(queue, *types, values) else None
    return _types[key]


def deferred(row: Pointwise, queue: Any, values: Sequence[Any], params: Sequence[Any], types: Any, dtype: str | None) -> Tensor:
    """A row over its operands as a deferred tensor, or at once where ``types`` says that it cannot wait."""
    if types is None or type(queue) is CommandList:
        if isinstance(queue, CPUQueue):
            return _run_numpy(row, queue, values, params, None, dtype)
        plan = _launched_plan(row, queue, values, params, dtype)
        result = Tensor.empty(plan.shape, plan.dtypes[0], queue=queue)
        launch(plan, queue, (*values, *params), (result,))
        return result
    shape, compute, result_dtype = types
    _check_integers(row, compute, values, params)  # types are known by those of numbers, not by the numbers
    return later.defer(row.name, forward_body(row), values, params, shape, result_dtype, compute, queue)


def as_compute(x: Operand, compute: str) -> np.ndarray:
    """An operand on the NumPy backend as an array of the compute type."""
    if not isinstance(x, Tensor):
        return COMPUTE[compute].type(x)
    assert x.array is not None
    return dtypes.decode(x.array, DTYPES[x.dtype]).astype(COMPUTE[compute], copy=False)


def from_compute(values: Any, shape: tuple[int, ...], dtype: DType, queue: Any, sources: Sequence[Any] = ()) -> Tensor:
    """Values of a compute type as a tensor on the NumPy backend, in memory that none of ``sources`` has."""
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


def _run_numpy(
    row: Pointwise, queue: Any, values: Sequence[Operand], params: Sequence[Any], out: Tensor | None, dtype: str | None
) -> Tensor:
    shape, compute, result = _forward_types(row, values, params, dtype)
    function = numpy_function(forward_body(row), compute)
    with np.errstate(all="ignore"):
        (value,) = function(*(as_compute(x, compute) for x in (*values, *params)))
    made = from_compute(value, shape, result, queue, values)
    if out is None:
        return made
    target = check_out(row.name, out, shape, result.name)
    assert target.array is not None and made.array is not None
    np.copyto(target.array, made.array)
    return out


# ---- gradients


@cache
def _vjp_operands(row: Pointwise, wanted: tuple[bool, ...]) -> tuple[Body, tuple[int, ...]]:
    """The body of the wanted gradients, and which of ``g``, ``out`` and the inputs it reads."""
    body = vjp_body(row, wanted)
    names = ("g", "out", *(f"v{i}" for i in range(row.arity)))
    return body, tuple(names.index(name) for name in body.inputs)


def run_vjp(
    row: Pointwise, g: Tensor, out: Tensor | None, values: Sequence[Any], params: Mapping[str, Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients for the wanted inputs in one kernel, each of ``g``'s shape and of its input's dtype.

    Tensors that the row does not keep (``row.saved_for(i)``) may be given as anything with ``dtype``. A gradient that is ``g``
    itself comes back as the same tensor: never change a gradient in place.
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
    """Whether an operand has a floating dtype, so that it can have a gradient."""
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
    if plan is None or fusing_modes.mode is not None:
        targets = [DTYPES[x.dtype] for x, w in zip(values, wanted, strict=True) if w]
        if fusing_modes.mode is not None or later.worth(queue, g.shape):
            compute = _float_compute(inputs, targets)
            if all(fusable(queue, g.shape, compute, target, inputs) for target in targets):
                return [_deferred_vjp(row, i, given, params, compute) for i, w in enumerate(wanted) if w]
        if isinstance(queue, CPUQueue):
            return _vjp_numpy(body, queue, inputs, scalars, targets, g.shape)
        make = lambda: plan_body(f"{row.name}_vjp", queue, body, inputs, targets, _float_compute(inputs, targets), len(scalars), g.shape)  # noqa: E731
        plan = cached_plan(program.state(queue), key, make)
    if len(plan.dtypes) == 1:
        return [computed(plan, queue, (*inputs, *scalars))]
    results = [Tensor._result(g.shape, name, queue) for name in plan.dtypes]
    launch(plan, queue, (*inputs, *scalars), results)
    return results


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
