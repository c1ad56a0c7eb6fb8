"""Compiles a region, a set of pending nodes, to a kernel. If the region has sums over columns, a second launch adds the partial sums.

The key of a region describes its steps. Sizes and numbers are arguments of the kernel and not part of the key. If a region is exactly one
op that has its own kernels, these kernels run instead.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from netcl.core import env
from netcl.core.commands import Given, Launch
from netcl.core.device import CPUQueue
from netcl.core.dtype import DTYPES, STORED
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import row_kernel
from netcl.engine.expression import PythonText
from netcl.engine.map_kernel import as_compute, from_compute, plan_map
from netcl.engine.modes import deferral
from netcl.engine.opencl_text import COMPUTE, UFUNCS, Body, as_held, numpy_function, numpy_source
from netcl.engine.plan import Plan, command_list, plan_cache
from netcl.engine.registry import is_truth
from netcl.engine.row_kernel import RowOp
from netcl.engine.schedule import PendingNode, Space, nodes_below, storage_key, stored

log = logging.getLogger("netcl")
TELLS = env.value("NETCL_DEBUG") >= 3
FAST_MATH = ("-cl-fast-relaxed-math",)


class Region(NamedTuple):
    """Nodes that one kernel computes: their key, the tensors and numbers they read, and the nodes whose values are stored."""

    order: list[PendingNode]
    key: tuple[tuple[Any, ...], ...]
    leaves: list[Tensor]
    numbers: list[Any]
    kept: list[PendingNode]
    space: Space | None
    shape: tuple[int, ...]

    @property
    def steps(self) -> tuple[RowOp, ...]:
        """The key as named tuples; needed only to build a kernel."""
        return tuple(RowOp(*parts) for parts in self.key)

    @property
    def name(self) -> str:
        return "_".join(step.name for step in self.steps)[:60].rstrip("_")

    @property
    def slots(self) -> tuple[int, ...]:
        """The indices of the steps whose values are stored."""
        return tuple(self.order.index(node) for node in self.kept)


def describe(roots: Sequence[PendingNode]) -> Region:
    """Return the region that computes ``roots`` and all pending nodes that they depend on."""
    order = nodes_below(*roots)
    space = next((node.space for node in order if node.space is not None), None)
    shape = space.shape if space is not None else roots[0].shape
    slots: dict[Any, str] = {}
    leaves: list[Tensor] = []
    numbers: list[Any] = []
    steps = []
    for k, node in enumerate(order):
        refs = []
        for x in node.inputs:
            if isinstance(x, PendingNode) and x.made is not None:
                x = with_shape(x.made, space.kept) if x.narrow and space is not None else x.made
            if isinstance(x, Tensor):
                key = storage_key(x)
                if key not in slots:
                    slots[key] = f"v{len(leaves)}"
                    leaves.append(x)
                refs.append(slots[key])
            elif isinstance(x, PendingNode):
                refs.append(slots[x])
            else:
                refs.append("")
                numbers.append(x)
        numbers.extend(node.numbers)
        slots[node] = f"s{k}"
        steps.append((node.kind, node.name, node.body, tuple(refs), node.dtype, _rounds(node), node.narrow))
    kept = [node for node in stored(order, roots) if node.shape == shape or node.narrow or node.kind == "columns"]
    return Region(order, tuple(steps), leaves, numbers, kept, space, shape)


def _rounds(node: PendingNode) -> str:
    """Return the dtype to which a value must be rounded before other steps read it; an empty string if it needs no rounding."""
    if node.dtype == "float32":
        return ""
    if node.dtype in ("float16", "bfloat16"):
        return node.dtype
    if node.dtype != "bool" or (isinstance(node.body, Body) and is_truth(node.body.lines[-1][1])):
        return ""
    return "bool"


def run(roots: Sequence[PendingNode]) -> None:
    """Compute the region of some roots and store the results in its nodes."""
    if len(roots) == 1 and _by_itself(roots[0]):
        roots[0].finish(_single(roots[0]))
        return
    region = describe(roots)
    first = region.order[0]
    if first.whole is not None and _alone(region):
        first.whole.run()
        return
    numpy = isinstance(first.queue, CPUQueue)
    if TELLS and len(region.order) > 1:
        log.warning("[fusion] one kernel: %s; %d inputs, %d results", region.name, len(region.leaves), len(region.kept))
    if region.space is None:
        made = _chain_numpy(region) if numpy else _chain_cl(region)
    else:
        made = _rows_numpy(region) if numpy else _rows_cl(region)
    for node, tensor in zip(region.kept, made, strict=True):
        node.finish(tensor)


def _by_itself(node: PendingNode) -> bool:
    """Whether a node is a formula with computed inputs, on an OpenCL queue and outside of ``ag.jit_compile``."""
    if node.kind != "map" or node.mode is not None or node.whole is not None or isinstance(node.queue, CPUQueue):
        return False
    return all([not isinstance(x, PendingNode) or x.made is not None for x in node.inputs])


def _alone(region: Region) -> bool:
    """Whether a region is exactly one op that has its own kernels."""
    whole, mode = region.order[0].whole, region.order[0].mode
    if whole.call is None or deferral.shown is not None or (mode is not None and mode.fast_math):
        return False
    if any(node.whole is not whole for node in region.order):
        return False
    results = {None if ref is None else ref() for ref in whole.results}
    return all(node in results for node in region.kept)


# ---- chains of formulas


@lru_cache(maxsize=4096)
def chain_body(key: tuple[tuple[Any, ...], ...], leaves: int, kept: tuple[int, ...]) -> Body:
    """Return one body for a chain: inputs ``v0``.., a line per formula, the values of the stored steps as outputs."""
    lines: list[tuple[str, ast.expr]] = []
    scalars: list[str] = []
    rounds = {}
    for k, step in enumerate(RowOp(*parts) for parts in key):
        lines += row_kernel.step_lines(k, step)
        scalars += row_kernel.number_names(k, step)
        if step.rounds:
            rounds[f"s{k}"] = step.rounds
    return Body(tuple(f"v{j}" for j in range(leaves)), tuple(scalars), tuple(lines), tuple(f"s{k}" for k in kept), rounds)


def _build_options(region: Region) -> tuple[str, ...]:
    mode = region.order[0].mode
    return FAST_MATH if mode is not None and mode.fast_math else ()


def _chain_cl(region: Region) -> list[Tensor]:
    queue, real, shape = region.order[0].queue, region.order[0].real, region.shape
    outputs = tuple(DTYPES[node.dtype] for node in region.kept)
    options = _build_options(region)
    if len(region.order) == 1 and not options:
        return [_single(region.order[0])]
    key = (region.key, region.slots, shape, options, *((x.dtype, x.shape) for x in region.leaves))
    plan = plan_cache(queue).get(key)
    if plan is None:
        body = chain_body(region.key, len(region.leaves), region.slots)
        plan = plan_map(region.name, queue, body, region.leaves, outputs, real, len(body.scalars), shape, options)
        plan_cache(queue)[key] = plan
    made = _run_plan(plan, region.leaves, region.numbers)
    return made if isinstance(made, list) else [made]


def _run_plan(plan: Plan, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
    if deferral.shown is not None:
        deferral.shown += [command.kernel.program.source for command in plan.commands if isinstance(command, Launch)]
    return plan.run(tensors, tuple([plan.cast(n) for n in numbers]))


def _single(node: PendingNode) -> Tensor:
    """Return the value of a formula that was not fused, computed by the kernel of its op."""
    values: list[Any] = [x.made if isinstance(x, PendingNode) else x for x in node.inputs]
    key = ("single", node.body, node.shape, node.dtype, *((x.dtype, x.shape) if isinstance(x, Tensor) else type(x) for x in values))
    plan = plan_cache(node.queue).get(key)
    if plan is None:
        plan = plan_map(node.name, node.queue, node.body, values, (DTYPES[node.dtype],), node.real, len(node.numbers), node.shape)
        plan_cache(node.queue)[key] = plan
    numbers = [x for x in values if not isinstance(x, Tensor)]
    return _run_plan(plan, [x for x in values if isinstance(x, Tensor)], [*numbers, *node.numbers])


def _chain_numpy(region: Region) -> list[Tensor]:
    real, queue = region.order[0].real, region.order[0].queue
    body = chain_body(region.key, len(region.leaves), region.slots)
    with np.errstate(all="ignore"):
        values = numpy_function(body, real)(*(as_compute(x, real) for x in (*region.leaves, *region.numbers)))
    if deferral.shown is not None:
        deferral.shown.append(numpy_source(body, PythonText(COMPUTE[real])))
    made: list[Tensor] = []
    for value, node in zip(values, region.kept, strict=True):  # an identity returns its input array
        made.append(from_compute(value, region.shape, DTYPES[node.dtype], queue, (*region.leaves, *made)))
    return made


# ---- rows


def _rows_cl(region: Region) -> list[Tensor]:
    queue, options = region.order[0].queue, _build_options(region)
    seen: list[Any] = [*region.kept, *region.leaves]
    key = ("rows", region.key, region.slots, region.space, region.order[0].real, options, *((x.dtype, x.shape) for x in seen))
    plan = plan_cache(queue).get(key)
    if plan is None:
        plan = plan_cache(queue)[key] = _plan_rows(region, options)
    return _run_plan(plan, region.leaves, region.numbers)


def _plan_rows(region: Region, options: tuple[str, ...]) -> Plan:
    """Return the plan of a region over rows; its operands are the leaves. A second launch adds the partial sums over columns."""
    assert region.space is not None
    real, commands = region.order[0].real, command_list(region.order[0].queue, region.leaves)
    rows = row_kernel.row_launch(region.steps, region.slots, real, region.space, region.leaves, commands.queue, options, region.name)
    partial = rows.groups, rows.inner  # the shape of partial sums over columns: one per group of rows
    shapes = [partial if node.kind == "columns" else node.shape for node in region.kept]
    results = [Tensor.empty(shape, dtype, queue=commands) for shape, dtype in zip(shapes, rows.stored, strict=True)]
    room = [Tensor.empty((rows.groups * rows.room, rows.inner), STORED[real], queue=commands)] if rows.room else []
    numbers = map(Given, range(len(region.numbers)))
    rows.kernel(commands, rows.items, rows.local, *commands.given, *results, *room, *numbers, *rows.sizes)
    parts = [i for i, node in enumerate(region.kept) if node.kind == "columns"]
    if parts:
        sums = [Tensor.empty(region.kept[i].shape, region.kept[i].dtype, queue=commands) for i in parts]
        kernel, items = row_kernel.join(commands.queue, results[parts[0]].dtype, tuple(s.dtype for s in sums), rows.inner)
        kernel(commands, items, rows.join_local, *(results[i] for i in parts), *sums, rows.groups, rows.inner)
        for i, total in zip(parts, sums, strict=True):
            results[i] = total
    plan = Plan(region.name, commands, results)
    plan.cast = int if real in ("int", "long", "ulong") else float
    return plan


def _rows_numpy(region: Region) -> list[Tensor]:
    space, real, queue = region.space, region.order[0].real, region.order[0].queue
    assert space is not None
    values: dict[str, Any] = {f"v{j}": as_compute(x, real) for j, x in enumerate(region.leaves)}
    numbers = iter(region.numbers)
    folded = tuple(range(len(space.lead), len(space.shape)))
    with np.errstate(all="ignore"):
        for k, step in enumerate(region.steps):
            x = [values[ref] if ref else as_compute(next(numbers), real) for ref in step.refs]
            if step.kind == "map":
                (value,) = numpy_function(step.body, real)(*x, *(as_compute(next(numbers), real) for _ in step.body.scalars))
            elif step.kind == "fold":
                value = UFUNCS[step.body.combine].reduce(
                    np.broadcast_to(x[0], space.shape), axis=folded, keepdims=True, dtype=COMPUTE[real]
                )
            else:
                value = np.broadcast_to(x[0], space.shape).sum(tuple(range(len(space.lead))), dtype=COMPUTE[real])
            values[f"s{k}"] = as_held(DTYPES[step.rounds], COMPUTE[real], value) if step.rounds else value
    if deferral.shown is not None:
        lines = (f"s{k} = {step.name}({', '.join(ref or 'number' for ref in step.refs)})" for k, step in enumerate(region.steps))
        deferral.shown.append("\n".join(lines))
    made: list[Tensor] = []
    for slot, node in zip(region.slots, region.kept, strict=True):
        value = np.asarray(values[f"s{slot}"])
        seen = node.shape if node.kind == "columns" else space.kept if node.narrow else space.shape
        if value.shape != seen:
            value = np.broadcast_to(value, seen)
        made.append(from_compute(value.reshape(node.shape), node.shape, DTYPES[node.dtype], queue, (*region.leaves, *made)))
    return made
