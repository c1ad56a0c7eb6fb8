"""Kernels over rows: pointwise formulas and folds over the innermost axes in one kernel.

A row is read in *passes*. Pass 0 computes the values that need no fold and the folds over them, and stores the results that are complete.
The next pass reads the row again and uses the folds. On a CPU, a work-item processes one or more rows, in vectors; on a GPU, a work-item
processes a short row, and a work-group a longer one.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from netcl.core.dtype import DTYPES, STORED
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import rows
from netcl.engine.launch import index_type
from netcl.engine.map_kernel import merged_axes, steps_of
from netcl.engine.opencl_text import (
    SEPARATE,
    Body,
    Layout,
    Port,
    c_function,
    c_neutral,
    folded_lanes,
    helper_functions,
    renamed,
    rounded,
    scalar_load,
    statements,
    value_functions,
)

#: Functions whose values a CPU stores for the next pass, because computing them again is slower.
_SLOW = {"EXP", "EXP_BELOW", "EXPM1", "LOG", "LOG1P", "LOG2",
         "SIN", "COS", "TAN", "ATAN2", "TANH", "SINH", "COSH", "ERF", "FMOD", "REMAINDER",
         "FLOORDIV", "POW"}  # fmt: skip


class RowFold(NamedTuple):
    """A fold: the expression that combines two values, and its neutral element."""

    combine: str
    neutral: str


class RowOp(NamedTuple):
    """One step of a region. ``refs`` are the names of the leaves (``v0``..) and steps (``s0``..) it reads; an empty name is a number."""

    kind: str
    name: str
    body: Any
    refs: tuple[str, ...]
    dtype: str
    rounds: str
    narrow: bool


def number_names(k: int, step: RowOp) -> list[str]:
    """Return the names of a step's numbers: first the inputs that are numbers, then its parameters."""
    scalars = step.body.scalars if isinstance(step.body, Body) else ()
    return [f"n{k}_{i}" for i, ref in enumerate(step.refs) if not ref] + [f"{name}_{k}" for name in scalars]


def step_lines(k: int, step: RowOp) -> list[tuple[str, ast.expr]]:
    """Return the assignments of a formula with names unique to step ``k``; the last one assigns ``s<k>``."""
    body: Body = step.body
    table = {name: ref or f"n{k}_{i}" for i, (name, ref) in enumerate(zip(body.inputs, step.refs, strict=True))}
    table |= {name: f"{name}_{k}" for name in (*body.scalars, *(name for name, _ in body.lines))}
    table[body.outputs[0]] = f"s{k}"
    return [(table[name], renamed(tree, table)) for name, tree in body.lines]


# ---- the text


class _Row:
    """The values of a kernel while its source is generated: in which pass each value is known, and whether it varies along the row.

    ``keeps`` are expensive values. On CPUs, one pass stores them in memory of the work-item, and later passes read them.
    """

    def __init__(self, steps: Sequence[RowOp], ports: Sequence[Port], kept: Sequence[tuple[int, Port]], real: str, keeps: bool):
        self.steps, self.kept, self.real = steps, kept, real
        self.ports = {port.name: port for port in ports}
        self.level = dict.fromkeys(self.ports, 0)
        self.wide = {port.name: port.moves for port in ports}
        for k, step in enumerate(steps):
            below = [ref for ref in step.refs if ref]
            self.level[f"s{k}"] = max((self.level[ref] for ref in below), default=0) + (step.kind == "fold")
            self.wide[f"s{k}"] = step.kind == "map" and any(self.wide[ref] for ref in below)
        self.combines = list(dict.fromkeys(step.body for step in steps if step.kind == "fold"))
        self.keeps: dict[str, int] = {}
        if keeps:
            used = [self.needed(self.targets(level), level)[2] for level in range(self.passes)]
            for k, step in enumerate(steps):
                levels = [level for level, formulas in enumerate(used) if k in formulas]
                if len(levels) > 1 and _is_slow(step):
                    self.keeps[f"s{k}"] = levels[0]

    @property
    def passes(self) -> int:
        return max(self.level.values()) + 1

    def formula(self, k: int) -> list[str]:
        step = self.steps[k]
        rounds = {f"s{k}": step.rounds} if step.rounds else {}
        return statements(Body((), (), tuple(step_lines(k, step)), (), rounds), self.real)

    def needed(self, targets: Sequence[str], level: int) -> tuple[list[str], list[str], list[int]]:
        """Return the leaves that a pass loads for ``targets``, the values that an earlier pass kept, and the steps to compute."""
        names, found, earlier = list(targets), set(), set()
        while names:
            name = names.pop()
            if name in found or not self.wide[name]:
                continue
            found.add(name)
            if self.keeps.get(name, level) < level:
                earlier.add(name)
            elif name not in self.ports:
                names += [ref for ref in self.steps[int(name[1:])].refs if ref]
        formulas = [k for k in range(len(self.steps)) if f"s{k}" in found - earlier]
        return [name for name in self.ports if name in found], [name for name in self.keeps if name in earlier], formulas

    def folds(self, level: int) -> list[int]:
        return [k for k, step in enumerate(self.steps) if step.kind == "fold" and self.level[step.refs[0]] == level]

    def written(self, level: int, kind: str) -> list[tuple[int, Port]]:
        """Return ``(step, port)`` of what a pass writes: results along the row if ``kind`` is ``map``, sums over columns if ``columns``."""
        return [(k, p) for k, p in self.kept if self.steps[k].kind == kind and p.moves and self.level[f"s{k}"] == level]

    def targets(self, level: int) -> list[str]:
        """Return the values along the row that a pass must compute."""
        read = [*self.folds(level), *(k for k, _ in self.written(level, "columns"))]
        return [*(self.steps[k].refs[0] for k in read), *(f"s{k}" for k, _ in self.written(level, "map"))]

    def along(self, level: int) -> list[str]:
        """Return the source of one pass over the row: its folds, results along the row and column sums."""
        targets, folds, stored = self.targets(level), self.folds(level), STORED[self.real]
        if not targets:
            return []
        loads, earlier, formulas = self.needed(targets, level)
        body = [f"const real {x} = load_{self.ports[x].dtype.name}(r_{x}, i, left);" for x in loads]
        body += [f"const real {x} = load_{stored}(u_{x}, i, left);" for x in earlier]
        for k in formulas:
            body += self.formula(k)
            if f"s{k}" in self.keeps:
                body.append(f"store_{stored}(u_s{k}, i, left, s{k});")
        for k in folds:
            fold, x = self.steps[k].body, self.steps[k].refs[0]
            body.append(f"t{k} = combine{self.combines.index(fold)}(t{k}, IN_RANGE({x}, {c_neutral(fold.neutral, self.real)}));")
        body += [f"store_{p.dtype.name}(q_{p.name} + row * inner, i, left, {p.name});" for _, p in self.written(level, "map")]
        for k, port in self.written(level, "columns"):
            x, kind, place = self.steps[k].refs[0], port.dtype.name, f"q_s{k} + item * inner, i, left"
            body.append(f"store_{kind}({place}, row == first ? {x} : {x} + load_{kind}({place}));")
        text = [f"real t{k} = {c_neutral(self.steps[k].body.neutral, self.real)};" for k in folds]
        text += ["for (INT i = lane * WIDTH; i < inner; i += GROUP * WIDTH) {", "  const INT left = LEFT;"]
        text += [*(f"  {line}" for line in body), "}"]
        for k in folds:
            value = f"across{self.combines.index(self.steps[k].body)}(t{k}, parts, lane)"
            text.append(f"const real s{k} = {rounded(self.steps[k].rounds or None, value)};")
        return text

    def whole(self) -> list[str]:
        """Return the body of the loop over rows: passes, and between them the formulas on folded values."""
        text = [f"const real {p.name} = (real)({scalar_load(p, self.real, f'r_{p.name}')});" for p in self.ports.values() if not p.moves]
        for level in range(self.passes):
            for k, step in enumerate(self.steps):
                if step.kind == "map" and not self.wide[f"s{k}"] and self.level[f"s{k}"] == level:
                    text += self.formula(k)
            text += self.along(level)
        for _, port in self.kept:
            if not port.moves:
                text.append(f"if (lane == 0) store_{port.dtype.name}(q_{port.name} + row, 0, 1, {port.name});")
        return text


def _is_slow(step: RowOp) -> bool:
    if step.kind != "map":
        return False
    called = (node.func.id for _, tree in step.body.lines for node in ast.walk(tree) if isinstance(node, ast.Call))  # type: ignore[attr-defined]
    return any(name in _SLOW for name in called)


def _combine_functions(row: _Row, width: int, group: int) -> str:
    """Return, per kind of fold, functions that combine two values, all lanes of a vector, and all work-items of a group."""
    parts = []
    for j, fold in enumerate(row.combines):
        parts.append(c_function(f"combine{j}", fold.combine, ("v0", "v1"), row.real))
        lanes = folded_lanes(f"combine{j}", width)
        share = f"""
  barrier(CLK_LOCAL_MEM_FENCE);
  parts[lane] = x;
  for (int step = {group} / 2; step > 0; step /= 2) {{
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < step) parts[lane] = combine{j}(parts[lane], parts[lane + step]);
  }}
  barrier(CLK_LOCAL_MEM_FENCE);
  return parts[0];"""
        parts.append(f"real across{j}(real x, __local real* parts, const int lane) {{{lanes}{share if group > 1 else ' return x;'}\n}}")
    return "\n".join(parts)


def _in_range(width: int) -> str:
    if width == 1:
        return "#define IN_RANGE(x, neutral) (x)"
    numbers = ", ".join(map(str, range(width)))
    return f"#define IN_RANGE(x, neutral) (left >= {width} ? (x) : PICK(neutral, x, (mask)((mask)({numbers}) < (mask)(left))))"


def _offsets(ports: Sequence[Port], rank: int) -> list[str]:
    text = []
    for d in range(rank):
        below = " * ".join(f"size{e}" for e in range(d + 1, rank))
        at = f"row / ({below})" if below else "row"
        text.append(f"const INT at{d} = {at}{f' % size{d}' if d else ''};")
    for p in ports:
        move = "".join(f" + at{d} * step_{p.name}_{d}" for d in range(rank))
        text.append(f"__global const {p.dtype.c_storage}* r_{p.name} = p_{p.name}{move};")
    return text


def _row_parameters(ports: Sequence[Port], row: _Row, numbers: Sequence[str], layout: Layout) -> str:
    real = row.real
    text = [f"__global const {p.dtype.c_storage}* p_{p.name}" for p in ports]
    text += [f"__global {p.dtype.c_storage}* q_{p.name}" for _, p in row.kept]
    text += [f"__global {real}* room"] if row.keeps else []
    text += [f"const {real} a_{name}" for name in numbers]
    text += [f"const {layout.integer} {name}" for name in ("inner", "rows", "each")]
    text += [f"const {layout.integer} size{d}" for d in range(1, layout.rank)]
    text += [f"const {layout.integer} step_{p.name}_{d}" for p in ports for d in range(layout.rank)]
    return ",\n    ".join(text)


def source(
    name: str, steps: tuple[RowOp, ...], ports: Sequence[Port], kept: Sequence[tuple[int, Port]], real: str, layout: Layout, group: int
) -> tuple[str, int]:
    """Return the source of the kernel ``rows_<name>``, and how many scratch rows a work-item (if ``group > 1``, a work-group) needs.

    The kernel takes leaves, results, scratch memory (if values are kept), numbers, ``inner`` (elements of a row), ``rows``, ``each``
    (rows per work-item or work-group), the sizes of the outer axes but the first, and each leaf's strides along all outer axes.
    """
    row = _Row(steps, ports, kept, real, layout.half_bits)
    numbers = [n for k, step in enumerate(steps) for n in number_names(k, step)]
    own = [DTYPES[STORED[real]]] if row.keeps else []
    loads = [p.dtype for p in ports if p.moves] + [p.dtype for k, p in kept if steps[k].kind == "columns"] + own
    rounds = [step.rounds for step in steps if step.rounds]
    loop = [*_offsets(ports, layout.rank), *row.whole()]
    combines = _combine_functions(row, layout.width, group)
    values = value_functions(loads, [p.dtype for _, p in kept] + own, real, layout, rounds)
    shared = f"  __local real parts[{group}];\n" if group > 1 else "  __local real* parts = 0;\n"
    where = ("get_group_id(0)", "get_local_id(0)") if group > 1 else ("get_global_id(0)", "0")
    required = f" __attribute__((reqd_work_group_size({group}, 1, 1)))" if group > 1 else ""
    text = "\n    ".join(loop)
    constants = "".join(f"  const real {n}_ = (real)(a_{n});\n" for n in numbers)
    count = len(row.keeps)
    constants += "".join(f"  __global {real}* u_{x} = room + (item * {count} + {j}) * inner;\n" for j, x in enumerate(row.keeps))
    left = "WIDTH" if layout.aligned else "(inner - i)"
    program_text = f"""{values}
#define INT {layout.integer}
#define WIDTH {layout.width}
#define GROUP {group}
#define LEFT {left}
{_in_range(layout.width)}
{helper_functions(text + combines)}
{combines}
{SEPARATE}
__kernel{required} void rows_{name}(
    {_row_parameters(ports, row, numbers, layout)}) {{
{shared}  const INT item = {where[0]};
  const int lane = {where[1]};
  const INT first = item * each, last = min(first + each, rows);
{constants}  for (INT row = first; row < last; ++row) {{
    {text}
  }}
}}
"""
    return program_text, count


# ---- launches


class RowLaunch(NamedTuple):
    """The launch of a region over rows: its kernel, sizes and last arguments, and the dtypes of its results."""

    kernel: Any
    items: int
    local: int
    groups: int
    inner: int
    join_local: int
    stored: tuple[str, ...]
    sizes: tuple[int, ...]
    room: int  # rows of scratch memory per group


def spread_of(queue: Any, count: int, inner: int, real: str, columns: bool) -> rows.Spread:
    """Return how ``count`` rows are distributed. With ``columns``, there are few groups, because each group stores a partial sum."""
    cpu, most, units = rows.device_of(queue)
    spread = rows.row_spread(cpu, most, inner, real in ("double", "long", "ulong"))
    if columns:
        spread = spread._replace(each=max(spread.each, -(-count // (4 * units))))
    return spread._replace(vec=spread.vec if inner >= spread.vec else 1)


def row_launch(
    steps: tuple[RowOp, ...], slots: tuple[int, ...], real: str, space: Any, leaves: Sequence[Tensor], queue: Any, options: tuple[str, ...],
    name: str,
) -> RowLaunch:  # fmt: skip
    """Return the launch of a region over rows for these shapes; builds the kernel if it is new."""
    count, inner = math.prod(space.lead), math.prod(space.shape[len(space.lead) :])
    spread = spread_of(queue, count, inner, real, any(steps[k].kind == "columns" for k in slots))
    shapes = [(1,) * (len(space.shape) - x.ndim) + x.shape for x in leaves]
    moves = [any(n != 1 for n in shape[len(space.lead) :]) for shape in shapes]
    groups = merged_axes(space.lead, [shape[: len(space.lead)] for shape in shapes])
    layout = Layout(len(groups), spread.vec, inner % spread.vec == 0, index_type(count * inner), rows.device_of(queue)[0])
    ports = tuple(Port(f"v{j}", DTYPES[x.dtype], moved) for j, (x, moved) in enumerate(zip(leaves, moves, strict=True)))
    stored = tuple(STORED[real] if steps[k].kind == "columns" else steps[k].dtype for k in slots)
    kept = tuple((k, Port(f"s{k}", DTYPES[dtype], not steps[k].narrow)) for k, dtype in zip(slots, stored, strict=True))
    text, room = source(name, steps, ports, kept, real, layout, spread.group)
    kernel = program.get_later(queue, text, f"rows_{name}", options)
    sizes = [inner, count, spread.each, *(size for size, _ in groups[1:])]
    for j, moved in enumerate(moves):
        sizes += [step * (inner if moved else 1) for step in steps_of(groups, j)]
    n = -(-count // spread.each)
    return RowLaunch(kernel, n * spread.group, spread.local, n, inner, 1 if layout.half_bits else 64, stored, tuple(sizes), room)


def join(queue: Any, part: str, results: tuple[str, ...], inner: int) -> tuple[Any, int]:
    """Return the kernel that adds up the partial sums over columns, and its number of work-items, one per vector of columns."""
    cpu = rows.device_of(queue)[0]
    width = 16 if cpu and inner >= 16 else 1
    source = _join_source(part, results, Layout(0, width, inner % width == 0, "int", cpu))
    return program.get_later(queue, source, "join_columns"), -(-inner // width)


def _join_source(part: str, results: tuple[str, ...], layout: Layout) -> str:
    row, real = DTYPES[part], DTYPES[part].c_compute
    values = value_functions([row], [DTYPES[name] for name in results], real, layout)
    parameters = [f"__global const {row.c_storage}* p{j}" for j in range(len(results))]
    parameters += [f"__global {DTYPES[name].c_storage}* q{j}" for j, name in enumerate(results)]
    text = ",\n    ".join([*parameters, "const int parts", "const int inner"])
    body = ""
    for j, name in enumerate(results):
        body += f"""
  real s{j} = load_{part}(p{j}, i, left);
#pragma unroll 8
  for (int part = 1; part < parts; ++part) s{j} += load_{part}(p{j} + (long)part * inner, i, left);
  store_{name}(q{j}, i, left, s{j});"""
    return f"""{values}
__kernel void join_columns(
    {text}) {{
  const int i = get_global_id(0) * {layout.width};
  if (i >= inner) return;
  const int left = inner - i;{body}
}}
"""
