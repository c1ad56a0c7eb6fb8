"""Kernels that compute formulas per element: broadcasting, layout, launch sizes, and the plan of one such kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.capabilities import DeviceProfile
from netcl.core.commands import Given
from netcl.core.device import CPUQueue, profile_of
from netcl.core.dtype import DTYPES, STORED, DType
from netcl.core.errors import DtypeError, message
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem, get_kernel_selector, is_named
from netcl.core.kernels import program
from netcl.core.tensor import Tensor, new_result, wrap_array
from netcl.engine.launch import ahead, check_double, index_type
from netcl.engine.opencl_text import COMPUTE, STREAM_BYTES, Body, Layout, Port, kernel_source
from netcl.engine.operands import Operand, common_dtype
from netcl.engine.plan import Plan, command_list

#: Integral compute types and narrow dtypes: their name, and their exclusive upper bound.
INTEGRAL = {"int": ("int32", 2**31), "long": ("int64", 2**63), "ulong": ("uint64", 2**64), "int8": ("int8", 2**7),
            "int16": ("int16", 2**15), "uint8": ("uint8", 2**8), "uint16": ("uint16", 2**16), "uint32": ("uint32", 2**32)}  # fmt: skip
CPU_WIDTH = 16


# ---- shapes


class Walk(NamedTuple):
    """Collapsed axes: the outer sizes, the inner size and, per operand, its outer strides and whether it has the inner axis."""

    outer: tuple[int, ...]
    inner: int
    steps: tuple[tuple[int, ...], ...]
    moves: tuple[bool, ...]


def collapse(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Walk:
    """Merge neighboring axes where every operand has all of them or broadcasts all of them, so that inner loops are long.

    >>> collapse((8, 3, 5, 5), [(8, 3, 5, 5), (3, 1, 1)]).outer
    (8, 3)
    """
    if shapes.count(shape) == len(shapes):
        return Walk((), math.prod(shape), ((),) * len(shapes), (True,) * len(shapes))
    groups = merged_axes(shape, shapes) or [(1, (True,) * len(shapes))]
    steps = tuple([steps_of(groups, k)[:-1] for k in range(len(shapes))])
    return Walk(tuple([size for size, _ in groups[:-1]]), groups[-1][0], steps, groups[-1][1])


Groups = list[tuple[int, tuple[bool, ...]]]


def merged_axes(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Groups:
    """Merge axes as :func:`collapse` does. Return the size of each merged axis and, for each operand, whether it has that axis."""
    padded = [(1,) * (len(shape) - len(s)) + tuple(s) for s in shapes]
    groups: Groups = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        present = tuple([s[axis] != 1 for s in padded])
        if groups and groups[-1][1] == present:
            groups[-1] = (groups[-1][0] * size, present)
        else:
            groups.append((size, present))
    return groups


def steps_of(groups: Groups, k: int) -> tuple[int, ...]:
    """Return the stride of operand ``k`` along each run of merged axes."""
    steps, below = [], 1
    for size, present in reversed(groups):
        steps.append(below if present[k] else 0)
        below *= size if present[k] else 1
    return tuple(reversed(steps))


# ---- plans


def _layout(queue: Any, walk: Walk, n: int, nbytes: int, profile: DeviceProfile, config: KernelConfig) -> Layout:
    width, cpu = 1, profile.device_type == "cpu"
    if config.variant is KernelVariant.ELEMENTWISE_VECTORIZED and config.use_vectorization:
        width = CPU_WIDTH if cpu else config.vector_width
    if walk.inner < width:
        width = 1
    whole, streams = walk.inner % width == 0, cpu and nbytes >= STREAM_BYTES
    asked = ahead(queue) if streams else None
    return Layout(len(walk.outer), width, not walk.outer or whole, index_type(n), cpu, not cpu and whole, streams, asked)


def launch_sizes(n: int, inner: int, width: int, profile: DeviceProfile, config: KernelConfig) -> tuple[int, int, int]:
    """Return elements per work-item, work-items and local size. A CPU work-item processes a long chunk, a GPU work-item one vector."""
    rows = n // inner if inner else 0
    if profile.device_type != "cpu":
        return width, rows * -(-inner // width), config.local_size_1d
    most = max(16384, inner // 1024)  # few enough that each can be a work-group
    chunk = min(max(inner // (4 * profile.max_compute_units), 1024), most) // CPU_WIDTH * CPU_WIDTH
    items = rows * -(-inner // chunk)
    return chunk, items, 1 if items <= 1024 and not is_named(config) else config.local_size_1d


class Map(NamedTuple):
    """A kernel for operands of certain dtypes and shapes, its launch sizes, and ``sizes``: the last arguments of the kernel."""

    kernel: Any
    items: int
    local: int
    sizes: tuple[int, ...]


def map_kernel(
    op: str, queue: Any, body: Body, values: Sequence[Any], outputs: Sequence[DType], compute: str, shape: tuple[int, ...],
    options: tuple[str, ...] = (),
) -> Map:  # fmt: skip
    """Return the kernel that computes ``body`` over ``values``, built if new. Its arguments are tensors, results, numbers and sizes."""
    n, profile = math.prod(shape), profile_of(queue)
    given = [(name, x) for name, x in zip(body.inputs, values, strict=True) if isinstance(x, Tensor)]
    check_double(op, queue, [*[dtype.name for dtype in outputs], *[x.dtype for _, x in given], STORED[compute]])
    walk = collapse(shape, [x.shape for _, x in given])
    config = get_kernel_selector().choose(Problem("elementwise", (n,), outputs[0].name, {}, profile), ((n,),))
    layout = _layout(queue, walk, n, n * outputs[0].itemsize, profile, config)
    inputs = [Port(name, DTYPES[x.dtype], moves) for (name, x), moves in zip(given, walk.moves, strict=True)]
    results, state = list(map(Port, body.outputs, outputs)), program.state(queue)
    key = (op, "kernel", body, *inputs, *results, compute, layout, options)
    if key not in state:
        source = kernel_source(op, body, inputs, results, compute, layout)
        state[key] = program.get_later(queue, source, f"op_{op}", options)
    chunk, items, local = launch_sizes(n, walk.inner, layout.width, profile, config)
    sizes: tuple[int, ...] = (walk.inner, chunk)
    if walk.outer:
        sizes += (n // walk.inner, *walk.outer[1:], *(step for steps in walk.steps for step in steps))
    return Map(state[key], items, local, sizes)


def plan_map(
    op: str, queue: Any, body: Body, values: Sequence[Any], outputs: Sequence[DType], compute: str, numbers: int,
    shape: tuple[int, ...], options: tuple[str, ...] = (), out: Tensor | None = None,
) -> Plan:  # fmt: skip
    """Return the plan that computes ``body``. Its operands are the tensors among ``values``, then ``out`` if it is given.

    A run of the plan takes the numbers among ``values``, followed by ``numbers`` more.
    """
    tensors = [x for x in values if isinstance(x, Tensor)]
    commands = command_list(queue, tensors if out is None else [*tensors, out])
    made = [new_result(shape, dtype.name, commands) for dtype in outputs] if out is None else [commands.given[-1]]
    if math.prod(shape):
        kernel, items, local, sizes = map_kernel(op, queue, body, values, outputs, compute, shape, options)
        given = map(Given, range(numbers + len(values) - len(tensors)))
        kernel(commands, items, local, *commands.given[: len(tensors)], *made, *given, *sizes)
    plan = Plan(op, commands, made[0] if len(made) == 1 else made)
    plan.cast = partial(as_integer, op, compute) if compute in INTEGRAL else float
    return plan


def as_integer(op: str, compute: str, value: Any) -> int:
    """Convert a number to an integer of a compute type or a narrow dtype; raises ``DtypeError`` unless it is one, and in range."""
    name, most = INTEGRAL[compute]
    if not (0 if compute[0] == "u" else -most) <= value < most or value != int(value):
        remedy = 'cast first: x.to("int64")' if most < 2**63 and value % 1 == 0 else 'use floats: x.to("float32")'
        what = "not be negative" if name == "uint64" and value < 0 else f"be representable in {name}"
        raise DtypeError(message(op, f"a number must {what}, got {value}", remedy))
    return int(value)


def factor_of(op: str, value: Any, *operands: Any) -> Any:
    """Return a number that multiplies operands: as a bool or an integer if they are. Raises ``DtypeError`` if it has a fraction then."""
    kind = common_dtype([x for x in operands if isinstance(x, Tensor | int | float)])
    value = as_integer(op, "long", value) if isinstance(value, float) and not kind.is_float else value
    return value if kind.rank else bool(value)


def fusable(queue: Any, shape: tuple[int, ...], compute: str, result: DType, values: Sequence[Any]) -> bool:
    """Whether an op can be deferred: its result has elements and is not a narrow integer, and the device supports its dtypes."""
    if not math.prod(shape) or result.narrow:
        return False
    double = compute == "double" or result.name == "float64" or any(getattr(x, "dtype", None) == "float64" for x in values)
    return not double or isinstance(queue, CPUQueue) or profile_of(queue).has_fp64


# ---- values on the NumPy backend


def as_compute(x: Operand, compute: str) -> np.ndarray:
    """Return an operand on the NumPy backend as an array of the compute type."""
    if not isinstance(x, Tensor):
        return COMPUTE[compute].type(x)
    assert x.array is not None
    return dtypes.decode(x.array, DTYPES[x.dtype]).astype(COMPUTE[compute], copy=False)


def from_compute(values: Any, shape: tuple[int, ...], dtype: DType, queue: Any, sources: Sequence[Any] = ()) -> Tensor:
    """Return values of a compute type as a tensor on the NumPy backend that shares no memory with ``sources``."""
    full = np.asarray(values)
    with np.errstate(all="ignore"):
        if dtype.name == "bool":
            full = full != 0
        elif dtype.narrow and full.dtype.kind == "f":
            full = full.astype(COMPUTE[dtype.c_compute])
        stored = dtypes.encode(full, dtype)
    if stored.shape != shape:
        stored = np.broadcast_to(stored, shape).copy()
    elif not stored.flags.writeable or any(isinstance(x, Tensor) and np.may_share_memory(stored, x.array) for x in sources):
        stored = stored.copy()
    return wrap_array(stored, dtype.name, queue)
