"""Runs reduction rows: determines the axes and launches the fold, or folds with NumPy.

The axes of a fold are merged to (rows, length, inner); where kept and folded axes alternate, the innermost ones are folded
first. Devices compute folds of 16-bit floats in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import CPUQueue, profile_of
from netcl.core.dtype import DTYPES, HALVES, STORED, DType
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.kernel_selector import KernelVariant, get_kernel_selector, is_named
from netcl.core.kernels import program
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import lazy_graph, opencl_text, rows
from netcl.engine.launch import check_double, index_type, without_other_kernels
from netcl.engine.map_kernel import CPU_WIDTH, as_compute, from_compute, fusable, merged_axes
from netcl.engine.modes import deferral, in_mode
from netcl.engine.operands import check_out, common_shape, operand
from netcl.engine.plan import planned
from netcl.engine.pointwise import run
from netcl.engine.registry import REGISTRY, Pointwise, Reduction, names_read_by, parse
from netcl.engine.row_kernel import RowFold

Axis = int | Sequence[int] | None
_SOURCE = (Path(__file__).parent / "reduction.cl").read_text()
TWICE = ("sum", "mean", "amax", "amin", "any", "all")  # folds that can be applied to partial results
LONG_ROW = 1 << 14  # elements; with few rows longer than this, a device is idle and splitting rows is faster
_LEAST_ABOVE = 16  # elements of a column that a GPU's work-item folds, where several share it
_UNIT_ITEMS = 512  # work-items of a GPU's compute unit that hide the time of their loads
_CPU_PIECES = 16  # pieces of a fold per core: with few, one extra piece on a core costs much time
_CPU_SPANS = (32, 8)  # vectors of a row that a CPU reads before it goes to the next row


# ---- axes


def axes_of(name: str, axis: Axis, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the folded axes as non-negative numbers, in ascending order; ``None`` folds all axes."""
    if axis is None:
        return tuple(range(len(shape)))
    if axis is True or axis is False:  # it would count as axis 0 or 1, and torch's ``std(False)`` means ``unbiased``
        remedy = f"name the argument: {name}(x, unbiased={axis})" if name in ("var", "std") else "name the argument: keepdims="
        raise ShapeError(message(name, "axis must be an integer, not a bool", remedy, axis=axis))
    given = (axis,) if isinstance(axis, int | np.integer) else tuple(axis)
    if not shape and given in ((0,), (-1,)):  # a 0-d tensor has an axis to fold, as in torch
        return ()
    for a in given:
        if not isinstance(a, int | np.integer) or not -len(shape) <= a < len(shape):
            remedy = f"it must be an integer in {-len(shape)}..{len(shape) - 1}" if shape else "a 0-d tensor has no dimensions"
            raise ShapeError(message(name, f"axis must be in range for {len(shape)} dimensions, got {a}", remedy, **{"x.shape": shape}))
    axes = sorted(int(a) % len(shape) for a in given)
    if len(set(axes)) < len(axes):
        raise ShapeError(message(name, "every axis must be named only once", "", axis=axis, **{"x.shape": shape}))
    return tuple(axes)


def folded_shape(shape: tuple[int, ...], axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    """Return the shape that a fold results in; with ``keepdims``, folded axes have size 1."""
    if keepdims:
        return tuple(1 if a in axes else n for a, n in enumerate(shape))
    return tuple(n for a, n in enumerate(shape) if a not in axes)


def runs(shape: tuple[int, ...], axes: Sequence[int]) -> list[tuple[bool, int]]:
    """Merge neighboring axes if all are folded or all are kept. Return ``(folded, size)`` per merged axis; drop axes of size 1."""
    return [(not kept, size) for size, (kept,) in merged_axes(shape, [folded_shape(shape, axes, True)])]


# ---- kernels


class Shape3(NamedTuple):
    """A tensor seen as (rows, length, inner); the axis of ``length`` is folded."""

    rows: int
    length: int
    inner: int


class Stage(NamedTuple):
    """One launch of a fold: whether it applies ``map`` and ``finish`` of the row, and its compute type."""

    row: Reduction
    compute: str
    maps: bool
    finishes: bool


def _fold_functions(stage: Stage, width: int) -> str:
    row, compute = stage.row, stage.compute
    params = [f"{name}_" for name in row.params] + ["unused0", "unused1"][: 2 - len(row.params)]
    parts = [
        opencl_text.c_function("fold_combine", row.combine, ("v0", "v1"), compute),
        opencl_text.c_function("fold_map", row.map if stage.maps else "v0", ("v0", "v1", *params), compute),
        opencl_text.c_function("fold_finish", row.finish if stage.finishes else "v0", ("v0", "v1", "n_", *params), compute),
    ]
    parts.append(f"real fold_lanes(real x) {{{opencl_text.folded_lanes('fold_combine', width)} return x; }}")
    text = "\n".join(parts)
    neutral, numbers = opencl_text.c_neutral(row.neutral, compute), ", ".join(map(str, range(width)))
    return f"{opencl_text.helper_functions(text)}\n{text}\n#define NEUTRAL {neutral}\n#define LANES ((mask)({numbers}))\n"


def _source(stage: Stage, source: DType, given: DType, target: DType, layout: opencl_text.Layout, chosen: FoldLayout) -> str:
    values = opencl_text.value_functions([source, given], [target], stage.compute, layout)
    defines = {"SRC": source.c_storage, "GIVEN": given.c_storage, "DST": target.c_storage, "LOAD": f"load_{source.name}",
               "LOAD_GIVEN": f"load_{given.name}", "STORE": f"store_{target.name}", "WIDTH": layout.width, "LOCAL": chosen.local,
               "SPAN": chosen.span, "TILE": chosen.tile}  # fmt: skip
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    body = without_other_kernels(_SOURCE, chosen.kernel).replace("INDEX_T", layout.integer).replace("PARAM_T", stage.compute)
    return f"{values}\n{_fold_functions(stage, layout.width)}{macros}{body}"


class FoldLayout(NamedTuple):
    """The kernel of a fold: vector width, local size, slices of the folded axis, vectors of columns per work-item and per work-group."""

    kernel: str
    width: int
    local: int
    slices: int
    span: int = 1
    tile: int = 1


def fold_layout(shape: Shape3, dtype: str, profile: DeviceProfile) -> FoldLayout:
    """Choose the kernel of a fold by its sizes, and the number of slices of the folded axis; several slices need a second stage."""
    config = get_kernel_selector().select("reduction", ((shape.length,),), profile, dtype)
    cpu = profile.device_type == "cpu"
    wide = (CPU_WIDTH if cpu else 4) if config.use_vectorization else 1
    most = config.local_size_1d if shape.inner == 1 or is_named(config) else 256  # the policy answers for rows
    local = 1 << (max(1, min(most, profile.max_work_group_size)).bit_length() - 1)
    if shape.inner > 1:
        width = wide if shape.inner >= wide else 1
        if is_named(config) and not config.use_local_memory:
            return FoldLayout("reduce_columns", width, local, 1)
        if not cpu:
            return _gpu_columns(shape, width, profile, local)
        span = next((n for n in _CPU_SPANS if shape.inner >= 2 * n * width), 1)
        outputs = shape.rows * -(-shape.inner // (width * span))
        slices = _fold_slices(shape.length, outputs, _CPU_PIECES * profile.max_compute_units, 256)
        return FoldLayout("reduce_columns", width, 1, slices, span)
    width = wide if shape.length >= 4 * wide else 1
    if cpu and not is_named(config):
        return FoldLayout("reduce_rows", width, 1, _fold_slices(shape.length, shape.rows, _CPU_PIECES * profile.max_compute_units, 16384))
    if config.variant is KernelVariant.REDUCTION_SEQUENTIAL or not config.use_local_memory or local == 1:
        return FoldLayout("reduce_rows", width, local, 1)
    slices = 1
    if config.variant is KernelVariant.REDUCTION_WORKGROUP:
        slices = _fold_slices(shape.length, shape.rows, 8 * profile.max_compute_units, 16384)
    return FoldLayout("reduce_group", width, local, slices)


def _gpu_columns(shape: Shape3, width: int, profile: DeviceProfile, local: int) -> FoldLayout:
    """Return a layout with one work-item per vector of columns if that keeps a GPU busy, else with one work-group per tile and slice."""
    across, units = -(-shape.inner // width), profile.max_compute_units
    if shape.length < _LEAST_ABOVE or shape.rows * across >= _UNIT_ITEMS * units:
        return FoldLayout("reduce_columns", width, 64, 1)
    tile = min(16, local, 1 << (across - 1).bit_length())
    groups = shape.rows * -(-across // tile)
    return FoldLayout("reduce_tile", width, local, _fold_slices(shape.length, groups, 8 * units, _LEAST_ABOVE * local // tile), 1, tile)


def _fold_slices(count: int, outputs: int, wanted: int, least: int) -> int:
    """Return how many slices to make of ``count`` elements: each has at least ``least``; all ``outputs`` folds have about ``wanted``."""
    return max(1, min(-(-wanted // max(outputs, 1)), count // least))


def _launch_stage(
    stage: Stage, x: Tensor, given: Tensor | None, target: Tensor, shape: Shape3, chosen: FoldLayout, length: int, args: tuple[Any, ...]
) -> None:
    """Launch one stage, which writes a partial result per ``length`` elements of every row."""
    queue, slices = x.queue, -(-shape.length // length)
    columns = chosen.kernel in ("reduce_columns", "reduce_tile")
    aligned = (shape.inner if columns else shape.length) % chosen.width == 0
    integer, cpu = index_type(math.prod(shape)), profile_of(queue).device_type == "cpu"
    layout = opencl_text.Layout(0, chosen.width, aligned, integer, cpu, whole=columns and aligned)
    tensors = (x, x if given is None else given, target)
    types = tuple(DTYPES[t.dtype] for t in tensors)
    key = (stage.row.name, "reduce", stage, types, layout, chosen._replace(slices=1))
    state = program.state(queue)
    if key not in state:
        text = _source(stage, types[0], types[1], types[2], layout, chosen)
        state[key] = program.get_later(queue, text, chosen.kernel)
    items = shape.rows * slices * (-(-shape.inner // (chosen.width * chosen.span * chosen.tile)) if columns else 1)
    if chosen.kernel in ("reduce_group", "reduce_tile"):
        items *= chosen.local
    local = 64 if chosen.local == 1 and items > 1024 else chosen.local  # a work-group costs a CPU more than a work-item
    state[key](queue, items, local, *tensors, *args, *shape, length, slices)


def _fold_cl(stage: Stage, x: Tensor, given: Tensor | None, target: Tensor, shape: Shape3, args: tuple[Any, ...]) -> None:
    profile = profile_of(x.queue)
    chosen = fold_layout(shape, x.dtype, profile)
    if chosen.slices == 1:
        _launch_stage(stage, x, given, target, shape, chosen, shape.length, args)
        return
    length = -(-shape.length // chosen.slices)
    length = -(-length // CPU_WIDTH) * CPU_WIDTH  # slices begin at multiples of the vector width
    rest = Shape3(shape.rows, -(-shape.length // length), shape.inner)
    partial = Tensor.empty(tuple(rest), STORED[stage.compute], queue=x.queue)
    _launch_stage(stage._replace(finishes=False), x, given, partial, shape, chosen, length, args)
    second = fold_layout(rest, STORED[stage.compute], profile)
    _launch_stage(stage._replace(maps=False), partial, given, target, rest, second, rest.length, args)


def sums_of_slices(x: Tensor, shape: Shape3, compute: str, length: int) -> Tensor:
    """Return the sum of every ``length`` elements (a multiple of the vector width) along the folded axis."""
    partial = Tensor.empty((shape.rows, -(-shape.length // length), shape.inner), STORED[compute], queue=x.queue)
    chosen = fold_layout(shape, x.dtype, profile_of(x.queue))
    _launch_stage(Stage(_row_named("sum"), compute, True, False), x, None, partial, shape, chosen, length, (0, 0, 0))
    return partial


# ---- running rows


def types_of(row: Reduction, x: Tensor) -> tuple[str, DType]:
    """Return the compute type of a reduction and the dtype of its result."""
    source = DTYPES[x.dtype]
    if row.accepts == "float" and not source.is_float:
        remedy = f"convert first: x.float().{row.name}()"
        raise DtypeError(message(row.name, "x must have a floating-point dtype", remedy, dtype=x.dtype, **{"x.shape": x.shape}))
    if row.result == "bool":
        return source.c_compute, DTYPES["uint8" if source.name == "uint8" else "bool"]  # as in torch
    if row.result == "sum" and not source.is_float:
        return "long", DTYPES["int64"]
    if row.result == "float" and not source.is_float:
        return "float", DTYPES["float32"]
    return source.c_compute, source


def _fold(
    row: Reduction, x: Tensor, axis: Axis = None, keepdims: bool = False, params: Sequence[float] = (), out: Tensor | None = None,
    dtype: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the result of a reduction row over ``axis``; ``dtype`` replaces the dtype of the result."""
    x = operand(row.name, x)
    axes = axes_of(row.name, axis, x.shape)
    shape = folded_shape(x.shape, axes, keepdims)
    compute, result = types_of(row, x)
    result = DTYPES[dtype] if dtype else result
    count = math.prod(x.shape[a] for a in axes)
    size = math.prod(shape)
    if count == 0 and not row.empty and size:
        raise ShapeError(message(row.name, "x must have elements along the reduced axes", "", axis=axis, **{"x.shape": x.shape}))
    if isinstance(x.queue, CPUQueue) or count * size == 0:
        made = _reduce_numpy(row, x, axes, shape, compute, result, count, params)
        return made if out is None else check_out(row.name, out, shape, result.name).write(made)
    check_double(row.name, x.queue, (x.dtype, result.name))
    target = Tensor.empty(shape, result.name, queue=x.queue) if out is None else check_out(row.name, out, shape, result.name)
    _fold_axes(row, x, axes, target, compute, count, params)
    return target


def _row_named(name: str) -> Reduction:
    row = REGISTRY[name]
    assert isinstance(row, Reduction)
    return row


def _fold_axes(row: Reduction, x: Tensor, axes: tuple[int, ...], target: Tensor, compute: str, count: int, params: Sequence[float]) -> None:
    """Fold neighboring axes together, the innermost first. Only the first fold applies ``map``; only the last fold applies ``finish``."""
    given = None
    if row.given:  # the row's second input, per result, in the compute type and with the axes kept
        given, first = Tensor.empty(folded_shape(x.shape, axes, True), STORED[compute], queue=x.queue), _row_named(row.given)
        _fold_axes(first, x, axes, given, compute, count, tuple(first.params.values()))
    pattern = runs(x.shape, axes)
    folded = sum(1 for is_folded, _ in pattern if is_folded)
    cast = int if compute in ("int", "long", "ulong") else float
    numbers = [cast(value) for value in params]
    args = (*numbers, *(0,) * (2 - len(numbers)), cast(count))
    mapped = False
    if folded > 1 and given is not None:  # v1 exists per final result, which a first pass cannot index
        x, mapped = run(_map_row(row), (x, given, *numbers), dtype=STORED[compute]), True
    while folded > 1:
        at = max(i for i, (is_folded, _) in enumerate(pattern) if is_folded)
        shape = _fold_shape(pattern, at)
        part = Tensor.empty((shape.rows, shape.inner), STORED[compute], queue=x.queue)
        _fold_cl(Stage(row, compute, not mapped, False), x, None, part, shape, args)
        x, mapped, folded = part, True, folded - 1
        del pattern[at]
        if 0 < at < len(pattern):  # kept axes that become neighbors are merged
            pattern[at - 1 : at + 1] = [(pattern[at][0], pattern[at - 1][1] * pattern[at][1])]
    last = [i for i, (is_folded, _) in enumerate(pattern) if is_folded]
    shape = _fold_shape(pattern, last[0]) if last else Shape3(math.prod(size for _, size in pattern), 1, 1)
    _fold_cl(Stage(row, compute, not mapped, True), x, given, target, shape, args)


def _fold_shape(pattern: list[tuple[bool, int]], at: int) -> Shape3:
    sizes = [size for _, size in pattern]
    return Shape3(math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :]))


@cache
def _map_row(row: Reduction) -> Pointwise:
    """Return the map of a reduction as a pointwise row, for folds whose axes are not adjacent."""
    return Pointwise(f"{row.name}_map", row.map, (None, None), row.ref, params=row.params, inputs=("x", "given"))


def _reduce_numpy(
    row: Reduction, x: Tensor, axes: tuple[int, ...], shape: tuple[int, ...], compute: str, result: DType, count: int,
    params: Sequence[float],
) -> Tensor:  # fmt: skip
    kept = folded_shape(x.shape, axes, True)
    numbers = dict(zip(row.params, params, strict=True))
    v1 = as_compute(0, compute)
    if count == 0 or not math.prod(kept):
        folded = np.full(kept, _neutral(row, compute), v1.dtype)
        v1 = folded * np.nan if row.given else v1
        with np.errstate(all="ignore"):
            value = formula_of_arrays(row.finish, {"v0": folded, "v1": v1}, {"n": count, **numbers}, compute)
        host = np.broadcast_to(np.asarray(value).reshape(shape) if np.size(value) == math.prod(shape) else value, shape)
        return Tensor.from_host(x.queue, np.ascontiguousarray(host).reshape(shape), result.name)
    if row.given:
        first = _row_named(row.given)
        v1 = as_compute(_fold(first, x, axes, True, tuple(first.params.values()), dtype=STORED[compute]), compute)
    with np.errstate(all="ignore"):
        mapped = formula_of_arrays(row.map, {"v0": as_compute(x, compute), "v1": v1}, numbers, compute)
        folded = _combine_numpy(row, np.broadcast_to(mapped, x.shape), axes, compute)
        value = formula_of_arrays(row.finish, {"v0": folded, "v1": v1}, {"n": count, **numbers}, compute)
    return from_compute(np.asarray(value).reshape(shape), shape, result, x.queue, (x,))


def _neutral(row: Reduction, compute: str) -> float:
    if row.neutral not in ("LOWEST", "HIGHEST"):
        return float(row.neutral)
    kind = as_compute(0, compute).dtype
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    low, high = (limits.min, limits.max) if limits else (-math.inf, math.inf)
    return low if row.neutral == "LOWEST" else high


def _combine_numpy(row: Reduction, x: np.ndarray, axes: tuple[int, ...], compute: str) -> np.ndarray:
    """Fold with NumPy and keep the axes: with a ufunc if ``combine`` is one (float32 sums in float64), else by combining halves."""
    ufunc = opencl_text.UFUNCS.get(row.combine)
    if ufunc is not None:
        wide = np.float64 if compute == "float" and ufunc in (np.add, np.multiply) else None
        return ufunc.reduce(x, axis=axes, keepdims=True, dtype=wide).astype(as_compute(0, compute).dtype, copy=False) if axes else x
    kept = folded_shape(x.shape, axes, True)
    x = np.moveaxis(x, axes, range(len(axes))).reshape(-1, *(n for a, n in enumerate(x.shape) if a not in axes))
    while len(x) > 1:
        half = len(x) // 2
        pairs = formula_of_arrays(row.combine, {"v0": x[:half], "v1": x[half : 2 * half]}, {}, compute)
        x = np.concatenate([pairs, x[2 * half :]])
    return x[0].reshape(kept)


# ---- calls: a fold of deferred values joins their kernel


@lru_cache(maxsize=256)
def _formula(text: str, inputs: tuple[str, ...], scalars: tuple[str, ...] = ()) -> opencl_text.Body:
    used = names_read_by(text)
    kept = tuple(name for name in inputs if name in used)
    return opencl_text.Body(kept, tuple(name for name in scalars if name in used), (("out", parse(text)),), ("out",))


SAME = _formula("v0", ("v0",))


def formula(
    name: str, text: str, bound: dict[str, Any], numbers: dict[str, Any], dtype: str, real: str, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Defer an expression over tensors (``bound``) and numbers; returns a tensor of ``dtype``. Passing a known ``shape`` saves time."""
    body = _formula(text, tuple(bound), tuple(numbers))
    values = [bound[name] for name in body.inputs]
    whole = common_shape(name, [x.shape for x in values], body.inputs) if shape is None else shape
    return lazy_graph.defer(name, body, values, [numbers[n] for n in body.scalars], whole, DTYPES[dtype], real, values[0].queue)


def formula_of_arrays(text: str, bound: dict[str, Any], numbers: dict[str, Any], real: str) -> np.ndarray:
    """Compute an expression over arrays and numbers."""
    body = _formula(text, tuple(bound), tuple(numbers))
    scalars = (as_compute(numbers[name], real) for name in body.scalars)
    return opencl_text.numpy_function(body, real)(*(bound[name] for name in body.inputs), *scalars)[0]


def busy(queue: Any, count: int, inner: int) -> bool:
    """Whether a kernel over ``count`` rows of ``inner`` elements keeps a device busy."""
    return isinstance(queue, CPUQueue) or inner <= LONG_ROW or count >= 2 * rows.device_of(queue)[2]


def defer_reduction(
    row: Reduction, x: Any, axis: Axis = None, keepdims: bool = False, params: Sequence[float] = (), out: Tensor | None = None,
    dtype: str | None = None,
) -> Tensor | None:  # fmt: skip
    """Defer a reduction: over innermost axes, over all axes in two steps, or a sum over outermost axes; ``None`` if that is impossible."""
    if out is not None or deferral.mode is None or not deferral.mode.rows or not isinstance(x, Tensor) or not x.size or not x.ndim:
        return None
    axes = axes_of(row.name, axis, x.shape)
    real, result = types_of(row, x)
    if not axes or not fusable(x.queue, x.shape, real, result, (x,)):
        return None
    target = dtype or result.name
    if len(axes) == x.ndim > 1 and row.name in TWICE and lazy_graph.waiting_node(x) is not None:
        return _over_all_axes(row, x, keepdims, params, target, real)
    if axes == tuple(range(x.ndim - len(axes), x.ndim)):
        count = math.prod(x.shape[: x.ndim - len(axes)])
        if busy(x.queue, count, x.size // count):
            form = partial(fold_innermost, row, x, len(axes), keepdims, params, target, real)
            return lazy_graph.as_formulas(form, partial(run_fold, row, x, axis, keepdims, params, None, dtype), (x,))
    if axes == tuple(range(len(axes))) and row.name == "sum" and real in ("float", "double"):
        shape = folded_shape(x.shape, axes, keepdims)
        return lazy_graph.defer_columns("columns", SAME, x, x.ndim - len(axes), shape, DTYPES[target], real)
    return None


def fold_innermost(row: Reduction, x: Tensor, axes: int, keepdims: bool, params: Sequence[float], target: str, real: str) -> Tensor:
    numbers = dict(zip(row.params, params, strict=True))
    bound: dict[str, Any] = {}
    if row.given:
        first = _row_named(row.given)
        bound["v1"] = fold_innermost(first, x, axes, True, tuple(first.params.values()), STORED[real], real)
    mapped = x if row.map == "v0" else formula(f"{row.name}_map", row.map, {"v0": x, **bound}, numbers, STORED[real], real)
    plain = row.finish == "v0"
    fold = RowFold(row.combine, row.neutral)
    folded = lazy_graph.defer_fold(row.name, fold, mapped, axes, keepdims, DTYPES[target if plain else STORED[real]], real)  # type: ignore[arg-type]
    if plain:
        return folded
    if bound and not keepdims:
        bound["v1"] = with_shape(bound["v1"], folded.shape)
    count = math.prod(x.shape[x.ndim - axes :])
    return formula(f"{row.name}_finish", row.finish, {"v0": folded, **bound}, {"n": count, **numbers}, target, real)


def _over_all_axes(row: Reduction, x: Tensor, keepdims: bool, params: Sequence[float], target: str, real: str) -> Tensor | None:
    """Reduce the innermost axis in the kernel of the pending values, then the others in a second step; ``None`` if that is not faster."""
    count = x.size // x.shape[-1]
    if not busy(x.queue, count, x.shape[-1]) or row.params:
        return None
    wide = "bool" if row.result == "bool" else STORED[real]
    part = fold_innermost(row, x, 1, False, params, wide, real)
    with in_mode(None):
        made = run_fold(row, part, None, False, params, None, target)
    return with_shape(made, (1,) * x.ndim) if keepdims else made


run_fold = planned("fold", _fold, defer_reduction)


@cache
def reduction_function(row: Reduction) -> Callable[..., Tensor]:
    """Return the public function of a row: ``f(x, axis=None, keepdims=False, *, <parameters>, out=None)``.

    If the row has parameters, ``keepdims`` must be named: torch's ``var`` and ``std`` take ``unbiased`` in its position. A ``wide`` row
    has ``widen``: 16-bit floats give float32.
    """

    def plain(x: Any, axis: Axis = None, keepdims: bool = False, *, widen: bool = False, out: Tensor | None = None) -> Tensor:
        if widen:
            x = operand(row.name, x)
            if x.dtype in HALVES:
                return run_fold(row, x, axis, keepdims, (), out, "float32")
        return run_fold(row, x, axis, keepdims, (), out)

    def with_parameters(x: Any, axis: Axis = None, *, keepdims: bool = False, out: Tensor | None = None, **given: Any) -> Tensor:
        if None in given.values():
            given = {name: value for name, value in given.items() if value is not None}
        params = {**row.params, **given}
        if len(params) > len(row.params):
            raise TypeError(f"{row.name}() got an unexpected keyword argument {list(params)[-1]!r}")
        return run_fold(row, x, axis, keepdims, tuple(params.values()), out)

    made: Any = with_parameters if row.params else plain
    made.__name__ = made.__qualname__ = row.name
    made.__doc__, made.__module__ = row.doc, "netcl.ops"
    either, by_name = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    first = [Parameter("x", either), Parameter("axis", either, default=None)]
    first.append(Parameter("keepdims", by_name if row.params else either, default=False))
    wide = {"widen": False} if row.amp == "wide" else {}
    rest = [Parameter(name, by_name, default=value) for name, value in {**row.params, **wide, "out": None}.items()]
    made.__signature__ = Signature(first + rest)
    return made
