"""Functions over many tensors at once: parameter updates and norms over all gradients, in few launches.

A :class:`Rule` is the formula of one element in the expression language, from which the kernel and the NumPy form are
generated. :func:`apply` runs a rule over lists of tensors. The buffers of a batch (up to 64 tensors, if the device
takes as many kernel arguments) go into one launch; a small table on the device maps work-groups to elements of tensors. Scalars are
kernel arguments, so a new learning rate needs no compilation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.commands import Given, constant, device_queue
from netcl.core.device import CPUQueue, profile_of
from netcl.core.errors import DeviceError, OutOfMemoryError, ShapeError, message
from netcl.core.kernels import primitives, program
from netcl.core.tensor import Tensor, wrap_array
from netcl.core.writes import wrote
from netcl.engine import launch, opencl_text
from netcl.engine.expression import c_name
from netcl.engine.map_kernel import CPU_WIDTH
from netcl.engine.plan import Plan, command_list, plan_cache
from netcl.engine.registry import names_read_by, parse
from netcl.ops import views

SLOTS = (4, 16, 64)  # tensors of a launch; few sizes, so that few kernels are compiled
RESERVED = 160  # bytes of kernel parameters kept for the table, the factor and the numbers
GPU_LOCAL, GPU_WIDTH, GPU_BLOCK = 256, 4, 4096
CPU_BLOCKS = (1024, 65536)  # elements of a work-item on a CPU: below, starting one costs more; above, cores wait for the last
PACK = 256  # elements of an average in 8 bits that share a scale
NUMPY_BLOCK = 16384  # elements: temporaries of a formula stay in the cache
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are evenly distributed between 0 and 1
_WORDS = re.compile(r"\b(BUFFERS|SCALARS|REAL|GIVEN|GUARD|BIND|NUMBERS|AHEAD|LOADS|LINES|STORES)\b")
_HEADER = re.compile(r"\A(//[^\n]*\n)+")


@dataclass(frozen=True, eq=False)
class Rule:
    """A formula by which an update changes each element of some tensors.

    ``lines`` are assignments, in order. They may use the names of ``tensors``, of ``scalars``, of earlier lines and of ``given``: numbers
    on the device (``factor``, for clipping, unless others are named). ``writes`` maps a tensor to the line whose value it gets. Lines of
    ``once`` use only numbers and are computed before the first element. ``unless`` names a number of ``given``; if that number is not 0,
    nothing changes. ``packed`` names tensors that ``update_packed.cl`` reads and writes as codes of 8 bits with their scales; only averages
    ``m`` and ``v`` can be packed.

    >>> halve = Rule("halve", ("x",), (), {"half": "x * 0.5"}, {"x": "half"})
    >>> t = Tensor.from_host([2.0, 4.0])
    >>> apply(halve, [[t]])
    >>> t.tolist()
    [1.0, 2.0]
    """

    name: str
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    lines: Mapping[str, str]
    writes: Mapping[str, str]
    given: tuple[str, ...] = ("factor",)
    once: Mapping[str, str] = field(default_factory=dict)
    unless: str = ""
    packed: tuple[str, ...] = ()

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of the tensors whose values the formula uses."""
        used = frozenset().union(*(names_read_by(text) for text in self.lines.values()))
        return tuple(name for name in self.tensors if name in used)

    @cached_property
    def body(self) -> opencl_text.Body:
        lines = tuple((name, parse(text, self.name)) for name, text in {**self.once, **self.lines}.items())
        return opencl_text.Body(self.reads, (*self.scalars, *self.given), lines, tuple(self.writes.values()) or tuple(self.lines))

    @cache  # noqa: B019, rules are constants of modules
    def with_copy(self, of: str, name: str) -> Rule:
        """Return a rule that also writes the new value of ``of`` to a tensor ``name``, such as the 16-bit copy of a float32 master."""
        return replace(self, name=f"{self.name}_{name}", tensors=(*self.tensors, name), writes={**self.writes, name: self.writes[of]})

    @cache  # noqa: B019
    def guarded(self) -> Rule:
        """Return a rule that changes nothing if the number ``skip`` on the device is not 0; the host need not wait for it."""
        return replace(self, name=f"{self.name}_unless", given=(*self.given, "skip"), unless="skip")


SCALE = Rule("scale", ("x",), ("by",), {"scaled": "x * (factor * by)"}, {"x": "scaled"})
ZERO = Rule("zero", ("x",), (), {"zero": "0"}, {"x": "zero"})
COPY = Rule("copy", ("x", "y"), (), {"value": "y"}, {"x": "value"})
CLAMP = Rule("clamp", ("x",), ("most",), {"clamped": "MIN(MAX(x, -most), most)"}, {"x": "clamped"})


# ---- batches: the distribution over work-groups


class Batch(NamedTuple):
    """One launch: ``pick`` selects its tensors, ``blocks`` lists their parts, ``groups`` is the number of work-groups."""

    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    blocks: Tensor
    groups: int


class BatchedKernel(NamedTuple):
    """A kernel and its launches for tensors of given dtypes and shapes."""

    kernel: program.Kernel
    local: int
    batches: tuple[Batch, ...]


class BlockSpread(NamedTuple):
    """The distribution of elements on a device: work-items per group, vector width, elements per block."""

    local: int
    width: int
    block: int


def _device_spread(queue: Any, total: int) -> BlockSpread:
    if launch.on_cpu_device(queue):
        least, most = CPU_BLOCKS
        share = total // (4 * profile_of(queue).max_compute_units)
        return BlockSpread(1, CPU_WIDTH, min(max(share, least), most) // CPU_WIDTH * CPU_WIDTH)
    limit = min(GPU_LOCAL, program.state(queue).max_work_group)
    return BlockSpread(1 << (limit.bit_length() - 1), GPU_WIDTH, GPU_BLOCK)


def slots_for(queue: Any, roles: int, count: int) -> int:
    """Return how many tensors a launch takes: the first of :data:`SLOTS` that holds ``count``, else the last. The device may limit it."""
    device = program.state(queue).device
    most = max(1, (int(device.max_parameter_size) - RESERVED) // (8 * roles))
    return min(next((size for size in SLOTS if size >= count), SLOTS[-1]), most)


def _batches(queue: Any, sizes: Sequence[int], slots: int, block: int) -> tuple[Batch, ...]:
    full = [i for i, size in enumerate(sizes) if size]
    made = []
    for at in range(0, len(full), slots):
        members = full[at : at + slots]
        rows = [(slot, begin, min(begin + block, sizes[i])) for slot, i in enumerate(members) for begin in range(0, sizes[i], block)]
        rows.sort(key=lambda row: row[1] - row[2])
        # Multiples of the golden ratio spread work evenly: PoCL gives half of all groups to the first core that requests work.
        rows = [rows[i] for i in sorted(range(len(rows)), key=lambda i: i * GOLDEN % 1)]
        padded = (*members, *[members[0]] * (slots - len(members)))
        pick = itemgetter(*padded) if slots > 1 else lambda values, only=members[0]: (values[only],)
        made.append(Batch(pick, constant(Tensor.from_host(queue, np.array(rows, np.int64), persistent=True)), len(rows)))
    return tuple(made)


def _batched(
    queue: Any, rule: Rule, kinds: tuple[str, ...], given: tuple[str, ...], roles: Sequence[Sequence[Tensor]], **defines: int
) -> BatchedKernel:
    """Return the kernel and its batches for the tensors of ``roles``, of dtypes ``kinds``, and device numbers of dtypes ``given``."""
    key = ("batches", rule, kinds, given, tuple([t.shape for t in roles[0]]))
    try:
        return queue.netcl.plans[key]
    except (AttributeError, KeyError):  # a new context, new tensors
        sizes = [t.size for t in roles[0]]
    launch.check_double(rule.name, queue, (*kinds, *given))
    spread = _device_spread(queue, sum(sizes))
    if rule.packed:
        spread = BlockSpread(spread.local, 1, -(-spread.block // PACK) * PACK)
    slots = slots_for(queue, len(roles), sum(size > 0 for size in sizes))
    layout = opencl_text.Layout(width=spread.width, half_bits=launch.on_cpu_device(queue), ahead=launch.ahead(queue))
    source = _rule_source(rule, kinds, given, layout, slots, {**defines, "LOCAL": spread.local})
    with recording.paused():  # the tables of the batches never change: uploading them is no part of a step
        kernel = program.get_later(queue, source, "fold" if defines["FOLD"] else "update")
        made = BatchedKernel(kernel, spread.local, _batches(queue, sizes, slots, spread.block))
    plan_cache(queue)[key] = made
    return made


# ---- kernels


def _rule_source(
    rule: Rule, kinds: Sequence[str], given: Sequence[str], layout: opencl_text.Layout, slots: int, defines: Mapping[str, Any]
) -> str:
    """Return the OpenCL source of a rule for tensors and device numbers of these dtypes; a launch takes ``slots`` tensors of each name."""
    of = {name: dtypes.DTYPES[kind] for name, kind in zip(rule.tensors, kinds, strict=True)}
    compute, width = "double" if "float64" in (*kinds, *given) else "float", layout.width
    values = opencl_text.value_functions([of[name] for name in rule.reads], [of[name] for name in rule.writes], compute, layout)
    lines = opencl_text.statements(rule.body, compute)
    words = _word_macros(rule, of, [dtypes.DTYPES[kind] for kind in given], compute, slots, lines)
    words["AHEAD"] = " ".join(opencl_text.prefetches((f"t_{name} + i" for name in rule.reads), layout))
    text = _HEADER.sub("", primitives.cl_source(__file__, "update_packed.cl" if rule.packed else "update.cl"))
    lanes = {"LANES": f"(mask)({', '.join(map(str, range(width)))})", "PUT_LANES(v, p)": f"vstore{width}(v, 0, p)"}
    head = "".join(f"#define {name} {value}\n" for name, value in {"WIDTH": width, **(lanes if width > 1 else {}), **defines}.items())
    return f"{values}\n{opencl_text.helper_functions(chr(10).join(lines))}\n{head}{_WORDS.sub(lambda word: words[word[0]], text)}"


def _word_macros(
    rule: Rule, of: Mapping[str, dtypes.DType], given: Sequence[dtypes.DType], compute: str, slots: int, lines: Sequence[str]
) -> dict[str, str]:
    """Return the texts that replace the macro words of the kernel file, except ``AHEAD``."""
    kinds = {name: f"__global {'' if name in rule.writes else 'const '}{of[name].c_storage}*" for name in rule.tensors}
    cases = [f"case {slot}: {' '.join(f't_{name} = {name}_{slot};' for name in kinds)} break;" for slot in range(slots)]
    cases[-1] = cases[-1].replace(f"case {slots - 1}:", "default:")
    bind = [f"{kind} t_{name};" for name, kind in kinds.items()] + ["switch (slot) {", *(f"  {case}" for case in cases), "}"]
    bind += [f"t_{name} += first;" for name in kinds]
    numbers = [f"const real {c_name(name)} = (real)(a_{name});" for name in rule.scalars]
    of_given = dict(zip(rule.given, given, strict=False))
    for name, kind in of_given.items():
        load = kind.load.replace("p[i]", f"d_{name}[0]").replace("(i, p)", f"(0, d_{name})")
        numbers.append(f"const real {c_name(name)} = (real)(({compute})({load}));")
    once, reads = len(rule.once), [name for name in rule.reads if name not in rule.packed]
    writes = {name: line for name, line in rule.writes.items() if name not in rule.packed}
    return {
        "BUFFERS": ", ".join(f"{kind} {name}_{slot}" for name, kind in kinds.items() for slot in range(slots)),
        "SCALARS": "".join(f", const {compute} a_{name}" for name in rule.scalars),
        "REAL": compute,
        "GIVEN": "".join(f", __global const {kind.c_storage}* d_{name}" for name, kind in of_given.items()),
        "GUARD": f"if (d_{rule.unless}[0] != 0) return;" if rule.unless else "",
        "BIND": "\n  ".join(bind),
        "NUMBERS": "\n  ".join([*numbers, *lines[:once]]),
        "LOADS": "\n    ".join(f"const real {c_name(name)} = load_{of[name].name}(t_{name}, i, left);" for name in reads),
        "LINES": "\n    ".join(lines[once:]),
        "STORES": "\n    ".join(f"store_{of[t].name}(t_{t}, i, left, {c_name(line)});" for t, line in writes.items()),
    }


# ---- updates


def apply(
    rule: Rule, roles: Sequence[Sequence[Tensor]], scalars: Sequence[float] = (), factor: Tensor | float = 1.0, **given: Tensor
) -> None:
    """Change tensors in place by a rule: one list of tensors per name of ``rule.tensors``, all lists of one length.

    ``scalars`` are the values of ``rule.scalars``. ``factor`` is a number, or a tensor with one element; the other numbers of
    ``rule.given`` are such tensors. These tensors are on the device of the updated tensors, and nothing waits for their values. Tensors of
    different devices or dtypes are launched separately.
    """
    written = [t for name in rule.writes for t in roles[rule.tensors.index(name)]]
    try:
        for queue, kinds, part, alike in _by_place(roles):
            if isinstance(queue, CPUQueue):
                _apply_numpy(rule, part, scalars, {"factor": factor, **given})
            else:
                _apply_opencl(rule, queue, kinds, part, tuple(scalars), {"factor": factor, **given}, alike)
    finally:  # an error or an interrupt may come after some tensors are written
        if any([t.place is not None and t.place.strides is not None for t in written]):
            for t in written:
                views.publish(t)
        else:
            wrote(written)


def _by_place(roles: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Any, tuple[str, ...], Sequence[Sequence[Tensor]], bool]]:
    """Yield queue, dtypes and tensors for each device and combination of dtypes, and whether all tensors are known to be on the queue."""
    if not roles[0]:
        return
    queue, kinds = roles[0][0].queue, tuple([role[0].dtype for role in roles])
    if not [t for role, kind in zip(roles, kinds, strict=True) for t in role if t.dtype is not kind or t.queue is not queue]:
        yield queue, kinds, roles, True
        return
    found: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    for row in zip(*roles, strict=True):
        found.setdefault((row[0].queue, tuple(t.dtype for t in row)), []).append(row)
    for (place, names_of), rows in found.items():
        yield place, names_of, list(zip(*rows, strict=True)), False


def _apply_opencl(
    rule: Rule, queue: Any, kinds: tuple[str, ...], roles: Sequence[Sequence[Tensor]], scalars: Sequence[float],
    numbers: Mapping[str, Tensor | float], alike: bool,
) -> None:  # fmt: skip
    values, device = map(numbers.__getitem__, rule.given), device_queue(queue)
    given = [x if isinstance(x, Tensor) else _device_number(device, x) for x in values]
    key = ("update", rule, kinds, tuple([x.dtype for x in given]), tuple([t.shape for t in roles[0]]))
    try:
        plans = device.netcl.plans[key]
    except (AttributeError, KeyError):  # a new queue, new tensors
        plans = plan_cache(device)[key] = _update_plans(rule, device, kinds, roles, given)
    for done, (pick, plan) in enumerate(plans):
        operands = [t for role in roles for t in pick(role)]
        operands += given
        try:
            if device is not queue:
                plan.append_to(queue, operands, scalars)
            elif [t for t in (given if alike else operands) if t.queue is not queue]:
                plan.run_on(queue, operands, scalars)
            else:
                plan.run(operands, scalars)
        except (DeviceError, OutOfMemoryError) as error:
            raise partly(error) if done else error from None


def _update_plans(
    rule: Rule, queue: Any, kinds: tuple[str, ...], roles: Sequence[Sequence[Tensor]], given: Sequence[Tensor]
) -> list[tuple[Callable[[Sequence[Any]], tuple[Any, ...]], Plan]]:
    """Return the plan of each batch, whose operands are the tensors that ``pick`` selects from each list and then ``given``."""
    kernel, local, batches = _batched(queue, rule, kinds, tuple([x.dtype for x in given]), roles, FOLD=0)
    plans = []
    for batch in batches:
        commands = command_list(queue, [*chain.from_iterable(map(batch.pick, roles)), *given])
        count = len(commands.given) - len(given)
        numbers = map(Given, range(len(rule.scalars)))
        kernel(commands, batch.groups * local, local, *commands.given[:count], batch.blocks, *commands.given[count:], *numbers)
        plans.append((batch.pick, Plan(rule.name, commands, ())))
    return plans


def partly(error: DeviceError | OutOfMemoryError) -> DeviceError | OutOfMemoryError:
    """Return ``error`` with a message that says that only some tensors of an update were changed."""
    return type(error)(f"{error}; some tensors are updated and others are not: load the last checkpoint")


def _device_number(queue: Any, value: float) -> Tensor:
    """Return a number as a tensor on the device; 1.0, the default factor, is cached."""
    if value != 1.0:
        return Tensor.from_host(queue, np.float32(value))
    state = program.state(queue)
    if ("update", "one") not in state:
        state[("update", "one")] = constant(Tensor.from_host(queue, np.float32(1), persistent=True))
    return state[("update", "one")]


def _apply_numpy(rule: Rule, roles: Sequence[Sequence[Tensor]], scalars: Sequence[float], given: Mapping[str, Tensor | float]) -> None:
    if rule.unless and float(given[rule.unless]):
        return
    wide = any(role[0].dtype == "float64" for role in roles)
    function = opencl_text.numpy_function(rule.body, "double" if wide else "float")
    kind = np.dtype(np.float64 if wide else np.float32)
    numbers = [kind.type(value) for value in (*scalars, *(float(given[name]) for name in rule.given))]
    rows = {name: dtypes.DTYPES[role[0].dtype] for name, role in zip(rule.tensors, roles, strict=True)}
    if rule.packed:
        with np.errstate(all="ignore"):
            for row in zip(*roles, strict=True):
                _apply_packed(rule, dict(zip(rule.tensors, row, strict=True)), function, numbers, kind)
        return
    flat = {name: [t.array.reshape(-1) for t in role] for name, role in zip(rule.tensors, roles, strict=True)}  # type: ignore[union-attr]
    with np.errstate(all="ignore"):
        for run in _runs([t.size for t in roles[0]]):
            results = function(*(_joined_run(flat[name], run, rows[name], kind) for name in rule.reads), *numbers)
            for name, result in zip(rule.writes, results, strict=True):
                stored = dtypes.encode(np.asarray(result), rows[name])
                for i, part, at in run:
                    flat[name][i][part] = stored[at] if stored.ndim else stored


def _apply_packed(rule: Rule, of: Mapping[str, Tensor], function: Any, numbers: Sequence[Any], kind: np.dtype) -> None:
    """Update one parameter whose averages are packed, as ``update_packed.cl`` does, with NumPy."""
    flat = {name: t.array.reshape(-1) for name, t in of.items()}  # type: ignore[union-attr]
    p, g = (dtypes.decode(flat[name], dtypes.DTYPES[of[name].dtype]).astype(kind, copy=False) for name in "pg")
    m, v = (unpack_average(flat[name], flat[f"{name}_scale"], name == "m").astype(kind, copy=False) for name in "mv")
    results = dict(zip(rule.writes, function(p, g, m, v, *numbers), strict=True))
    new, gradient = (np.asarray(x, np.float32).view(np.uint32) for x in (results["p"], g))
    drawn = _drawn_bits(new + _drawn_bits(gradient + np.arange(p.size, dtype=np.uint32) * np.uint32(0x9E3779B9)))
    for name, bits_of in (("m", drawn), ("v", _drawn_bits(drawn))):
        flat[name][:], flat[f"{name}_scale"][:] = _pack_average(results[name], name == "m", bits_of)
    for name in rule.writes:
        if name not in rule.packed:
            flat[name][:] = dtypes.encode(np.asarray(results[name]), dtypes.DTYPES[of[name].dtype])


def _drawn_bits(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


@cache
def _level_values(signed: bool) -> np.ndarray:
    """Return the values of the codes of one sign, from 0 to 1, spaced exponentially for similar relative precision."""
    octaves, levels = (16, 127) if signed else (32, 255)
    return ((np.exp2(np.arange(levels + 1) * (octaves / levels)) - 1) / (2.0**octaves - 1)).astype(np.float32)


def unpack_average(codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    """Decode the codes of an average as ``update_packed.cl`` does; there is one scale per :data:`PACK` codes."""
    spread = np.repeat(scales, PACK)[: codes.size]
    if not signed:
        return _level_values(False)[codes] * spread
    return np.where(codes > 127, np.float32(-1), np.float32(1)) * _level_values(True)[codes & 127] * spread


def _pack_average(values: np.ndarray, signed: bool, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table, sizes = _level_values(signed), np.abs(values)
    scales = np.fmax.reduceat(sizes, np.arange(0, values.size, PACK)).astype(np.float32)
    spread = np.repeat(scales, PACK)[: values.size]
    x = np.where(spread > 0, np.fmin(sizes / spread, 1), 0)
    low = np.clip(np.searchsorted(table, x, "right") - 1, 0, len(table) - 2)
    drawn = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    codes = low + (drawn * (table[low + 1] - table[low]) < x - table[low])
    return np.where(values < 0, codes + 128, codes) if signed else np.maximum(codes, x > 0), scales


GatheredRun = list[tuple[int, slice, slice]]


def _runs(sizes: Sequence[int]) -> Iterator[GatheredRun]:
    """Yield lists of (tensor number, part, position) to compute together: a part of a large tensor, or several small tensors."""
    run: GatheredRun = []
    filled = 0
    for i, size in enumerate(sizes):
        for start in range(0, size, NUMPY_BLOCK):
            count = min(size - start, NUMPY_BLOCK)
            if filled + count > NUMPY_BLOCK:
                yield run
                run, filled = [], 0
            run.append((i, slice(start, start + count), slice(filled, filled + count)))
            filled += count
    if run:
        yield run


def _joined_run(arrays: Sequence[np.ndarray], run: GatheredRun, row: dtypes.DType, kind: np.dtype) -> np.ndarray:
    parts = [arrays[i][part] for i, part, _ in run]
    stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return dtypes.decode(stored, row).astype(kind, copy=False)


def scale(tensors: Sequence[Tensor], by: Tensor | float) -> None:
    """Multiply tensors in place by a number, or by a tensor with one element that stays on the device.

    >>> t = Tensor.from_host([1.0, 2.0])
    >>> scale([t], 3.0)
    >>> t.tolist()
    [3.0, 6.0]
    """
    if isinstance(by, Tensor):
        apply(SCALE, [tensors], (1.0,), by)
    else:
        apply(SCALE, [tensors], (float(by),))


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrite each target with its source, converting dtypes."""
    apply(COPY, [targets, sources])


# ---- norms


#: The rules that are folded, and the macro ORDER of update.cl: how the fold ends. With 0, the largest value is kept, else values are added.
_FOLDS: dict[str, tuple[Rule, int]] = {
    name: (Rule(name, ("g",), ("order",), {"value": text}, {}, given=()), end)
    for name, text, end in (
        ("norm_2", "g * g", 2),
        ("norm_1", "ABS(g)", 1),
        ("norm_inf", "ABS(g)", 0),
        ("norm_p", "POW(ABS(g), order)", 3),
        ("nonfinite", "WHERE(ISFINITE(g), 0, 1)", 4),
    )
}


def by_context(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by context, because :func:`norm_of_all` and similar functions take tensors of one context."""
    found: dict[Any, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.context, []).append(t)
    return found


def norm_of_all(tensors: Sequence[Tensor], order: float = 2.0, max_norm: float = math.inf) -> tuple[Tensor, Tensor]:
    """Return the norm of all elements of tensors of one device, and ``min(1, max_norm / (norm + 1e-6))``, as 0-d tensors there.

    Nothing waits for the values. NaN propagates to both; an infinite norm gives a factor of 0, or NaN if ``max_norm`` is infinite too.

    >>> total, factor = norm_of_all([Tensor.from_host([3.0]), Tensor.from_host([[4.0]])], max_norm=10.0)
    >>> total.item(), factor.item()
    (5.0, 1.0)
    """
    order = float(order)
    if not order > 0:
        raise ShapeError(message("norm", "order must be a positive number or infinity", order=order))
    known = {1.0: "norm_1", 2.0: "norm_2", math.inf: "norm_inf"}
    return _folded_norm(known.get(order, "norm_p"), tensors, order if math.isfinite(order) else 1.0, max_norm)


def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if any element is NaN or infinite, else 0.0, as a 0-d tensor on the device of the tensors.

    >>> nonfinite([Tensor.from_host([1.0, float("inf")])]).item()
    1.0
    """
    return _folded_norm("nonfinite", tensors, 1.0, math.inf)[0]


def _folded_norm(name: str, tensors: Sequence[Tensor], order: float, max_norm: float) -> tuple[Tensor, Tensor]:
    if not tensors:
        raise ShapeError(message(name, "at least one tensor must be given"))
    first = tensors[0]
    for t in tensors:
        launch.check_dtype(name, t, name="a tensor")
        if t.queue is not first.queue and (first.context is None or t.context != first.context):
            where = {"first": first.device.device_name, "other": t.device.device_name}
            raise DeviceError(message(name, "all tensors must be on the same device", "call it once per device", **where))
    wide = any(t.dtype == "float64" for t in tensors)
    fold = _norm_numpy if first.backend == "cpu" else _fold_opencl
    return fold(name, tensors, "float64" if wide else "float32", order, max_norm)


def _fold_opencl(name: str, tensors: Sequence[Tensor], kind: str, order: float, max_norm: float) -> tuple[Tensor, Tensor]:
    queue, (rule, end) = tensors[0].queue, _FOLDS[name]
    folds = []
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        same = [t for t in tensors if t.dtype == dtype]
        folds.append((_batched(queue, rule, (dtype,), (kind,), [same], FOLD=1, ORDER=end), same))
    count = sum(batch.groups for fold, _ in folds for batch in fold.batches)
    partial, total, factor = (Tensor.empty(shape, kind, queue=queue) for shape in ((max(count, 1),), (), ()))
    start = 0
    for (kernel, local, batches), same in folds:
        for batch in batches:
            kernel(queue, batch.groups * local, local, *batch.pick(same), batch.blocks, partial, start, order)
            start += batch.groups
    kernel, local, _ = folds[0][0]
    kernel.program.kernel("finish")(queue, local, local, partial, total, factor, count, order, max_norm)
    return total, factor


def _norm_numpy(name: str, tensors: Sequence[Tensor], kind: str, order: float, max_norm: float) -> tuple[Tensor, Tensor]:
    total, (rule, end) = np.float64(0), _FOLDS[name]
    values_of = opencl_text.numpy_function(rule.body, "double")  # NumPy would sum float32 in float32
    with np.errstate(all="ignore"):
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            flat = [t.array.reshape(-1) for t in tensors if t.dtype == dtype]  # type: ignore[union-attr]
            for run in _runs([array.size for array in flat]):
                (values,) = values_of(_joined_run(flat, run, dtypes.DTYPES[dtype], np.dtype(np.float64)), order)
                total = total + values.sum() if end else np.maximum(total, values.max())
        root = {2: np.sqrt(total), 3: total ** (1 / order), 4: np.float64(total > 0)}.get(end, total)
        factor = np.minimum(max_norm / (root + 1e-6), 1.0)
    queue, real = tensors[0].queue, dtypes.DTYPES[kind].storage
    return wrap_array(np.asarray(root, real), kind, queue), wrap_array(np.asarray(factor, real), kind, queue)
