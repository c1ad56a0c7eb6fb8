"""Reductions as calls of the engine: a fold of deferred values joins their kernel, any other has kernels of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, STORED
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import lazy_graph, rows
from netcl.engine.call import planned
from netcl.engine.map_kernel import fusable
from netcl.engine.modes import in_mode, modes
from netcl.engine.opencl_text import Body
from netcl.engine.operands import common_shape
from netcl.engine.reduction import Axis, axes_of, fold_now, folded_shape, refuse_bool, types_of
from netcl.engine.registry import REGISTRY, Reduction, names_read_by, parse
from netcl.engine.row_kernel import Fold

TWICE = ("sum", "mean", "amax", "amin", "any", "all")  # folds whose folds are the fold of the whole
LONG_ROW = 1 << 14  # elements; few rows longer than this leave a device idle, and a reduction that cuts rows is faster


@lru_cache(maxsize=256)
def _formula(text: str, inputs: tuple[str, ...], scalars: tuple[str, ...] = ()) -> Body:
    used = names_read_by(text)
    kept = tuple(name for name in inputs if name in used)
    return Body(kept, tuple(name for name in scalars if name in used), (("out", parse(text)),), ("out",))


SAME = _formula("v0", ("v0",))


def formula(
    name: str, text: str, bound: dict[str, Any], numbers: dict[str, Any], dtype: str, real: str, shape: tuple[int, ...] | None = None
) -> Tensor:
    """An expression over tensors (``bound``) and numbers as a deferred tensor of ``dtype``; ``shape``, where it is known, saves time."""
    body = _formula(text, tuple(bound), tuple(numbers))
    values = [bound[name] for name in body.inputs]
    whole = common_shape(name, [x.shape for x in values], body.inputs) if shape is None else shape
    return lazy_graph.defer(name, body, values, [numbers[n] for n in body.scalars], whole, DTYPES[dtype], real, values[0].queue)


def busy(queue: Any, count: int, inner: int) -> bool:
    """Whether a kernel over rows keeps a device busy."""
    return isinstance(queue, CPUQueue) or inner <= LONG_ROW or count >= 2 * rows.device_of(queue)[2]


def defer_fold(
    row: Reduction, x: Any, axis: Axis = None, keepdims: bool = False, params: Sequence[float] = (), out: Tensor | None = None,
    dtype: str | None = None,
) -> Tensor | None:  # fmt: skip
    """A reduction as deferred values: over innermost axes, over all axes in two steps, or a sum over all others."""
    if out is not None or modes.mode is None or not modes.mode.rows or not isinstance(x, Tensor) or not x.size or not x.ndim:
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
            return lazy_graph.as_formulas(form, partial(fold, row, x, axis, keepdims, params, None, dtype), (x,))
    if axes == tuple(range(len(axes))) and row.name == "sum" and real in ("float", "double"):
        shape = folded_shape(x.shape, axes, keepdims)
        return lazy_graph.defer_columns("columns", SAME, x, x.ndim - len(axes), shape, DTYPES[target], real)
    return None


def fold_innermost(row: Reduction, x: Tensor, axes: int, keepdims: bool, params: Sequence[float], target: str, real: str) -> Tensor:
    numbers = dict(zip(row.params, params, strict=True))
    bound: dict[str, Any] = {}
    if row.given:
        first = REGISTRY[row.given]
        assert isinstance(first, Reduction)
        bound["v1"] = fold_innermost(first, x, axes, True, tuple(first.params.values()), STORED[real], real)
    mapped = x if row.map == "v0" else formula(f"{row.name}_map", row.map, {"v0": x, **bound}, numbers, STORED[real], real)
    plain = row.finish == "v0"
    fold = Fold(row.combine, row.neutral)
    folded = lazy_graph.defer_fold(row.name, fold, mapped, axes, keepdims, DTYPES[target if plain else STORED[real]], real)  # type: ignore[arg-type]
    if plain:
        return folded
    if bound and not keepdims:
        bound["v1"] = with_shape(bound["v1"], folded.shape)
    count = math.prod(x.shape[x.ndim - axes :])
    return formula(f"{row.name}_finish", row.finish, {"v0": folded, **bound}, {"n": count, **numbers}, target, real)


def _over_all_axes(row: Reduction, x: Tensor, keepdims: bool, params: Sequence[float], target: str, real: str) -> Tensor | None:
    """All axes: the innermost in the kernel of what is waiting, the others of what that leaves."""
    count = x.size // x.shape[-1]
    if not busy(x.queue, count, x.shape[-1]) or row.params:
        return None
    wide = "bool" if row.result == "bool" else STORED[real]
    part = fold_innermost(row, x, 1, False, params, wide, real)
    with in_mode(None):
        made = fold(row, part, None, False, params, None, target)
    return with_shape(made, (1,) * x.ndim) if keepdims else made


fold = planned("fold", fold_now, defer_fold)


@cache
def function(row: Reduction) -> Callable[..., Tensor]:
    """The public function of a row: ``f(x, axis=None, keepdims=False, *, <parameters>, out=None)``.

    Behind the axis of ``var`` and ``std`` torch takes ``unbiased`` by position, so there ``keepdims`` must be named.
    """
    params = "".join(f", {name}=default_{name}" for name in row.params)
    scalars = f"({', '.join(row.params)},)" if row.params else "()"
    keywords = f"*, keepdims=False{params}" if row.params else "keepdims=False, *"
    text = f"""def {row.name}(x, axis=None, {keywords}, out=None):
    if axis is True or axis is False:
        refuse_bool(row.name, axis)
    return fold(row, x, axis, keepdims, {scalars}, out)"""
    scope: dict[str, Any] = {"row": row, "fold": fold, "refuse_bool": refuse_bool}
    scope.update({f"default_{name}": value for name, value in row.params.items()})
    exec(compile(text, f"<op {row.name}>", "exec"), scope)
    made = scope[row.name]
    made.__doc__ = row.doc
    made.__module__ = "netcl.ops"
    return made
