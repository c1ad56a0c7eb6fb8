"""Launches recurrent layers: which kernels, with which tiles, over which groups.

The kernels of a layer are the parts of cell.cl, each a product with its epilogue. An algorithm determines how many steps a launch runs
and how rows and units are divided among groups. ``selector.register("recurrent", condition, config)`` selects one by ``extra["tier"]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from netcl.core import recording
from netcl.core.device import profile_of
from netcl.core.dtype import DTYPES
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.waiting import late_flag, may_wait, watch
from netcl.ops.matmul import nvidia
from netcl.ops.recurrent import steps
from netcl.ops.recurrent.steps import GATES

CELL_KINDS = ("tanh", "relu", "lstm", "gru")  # as cell.cl numbers them
FORWARD_PART, PROJECT, BACKWARD, BACK_WIDTH, BACK_PROJECT = range(5)
INITIAL = 4
_DEFAULT = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED)
_CACHE = 1 << 20  # bytes of weights that stay in a core's second cache, forward; backward reads them in longer runs
_ROWS = {16: 2, 32: 6}  # of a register tile on CPUs, by registers
_BLOCKS = {FORWARD_PART: 8, PROJECT: 32, BACKWARD: 16, BACK_WIDTH: 16, BACK_PROJECT: 32}  # units per group on GPUs, for cells with gates
_REGISTERS = {256: 128, 512: 64}  # registers of an item for weights, by the items of a group
_LOCAL = 48 * 1024  # bytes of local memory that every supported GPU has
_VERDICT = ("recurrent", "persistent", "float32")  # key under which a context caches whether groups may wait for each other
_WAVES = 2  # groups per compute unit that launches of one step aim at


class Layer(NamedTuple):
    """One direction of one layer: ``steps`` time steps of ``rows`` sequences, ``hidden`` units, ``width`` values of h."""

    kind: str
    steps: int
    rows: int
    hidden: int
    width: int
    dtype: str  # of the kernels: float32 or float64
    flags: int = 0  # as cell.cl numbers them
    backward: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """The kernels of a step, in launch order."""
        if self.width == self.hidden:
            return (BACKWARD,) if self.backward else (FORWARD_PART,)
        return (BACK_WIDTH, BACK_PROJECT) if self.backward else (FORWARD_PART, PROJECT)

    def gates(self, part: int) -> int:
        """Return how many columns the matrix product of a kernel has per unit."""
        return GATES[self.kind] if part == FORWARD_PART else 1

    def units(self, part: int) -> int:
        return self.width if part in (PROJECT, BACK_WIDTH) else self.hidden

    def depth(self, part: int) -> int:
        """Return the inner dimension of a kernel's matrix product."""
        return {FORWARD_PART: self.width, PROJECT: self.hidden, BACK_PROJECT: self.width}.get(part, GATES[self.kind] * self.hidden)

    def launched(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield part, first step and end step of each launch of up to ``count`` steps. If h0 is given, backward has one more step."""
        last = self.steps + (self.backward and self.flags & INITIAL > 0)
        for start in range(0, last, count):
            for part in self.parts:
                end = min(start + count, last if part in (BACKWARD, BACK_WIDTH) else self.steps)
                if start < end:
                    yield part, start, end


class LayerOperands(NamedTuple):
    """The weights by part, and the other tensors that the kernels in entry.cl take, in order. The last one is :func:`late_flag`."""

    weights: Mapping[int, Tensor]
    rest: tuple[Tensor, ...]
    awaited: Tensor  # memory through which groups of one launch exchange values


def run(queue: Any, layer: Layer, operands: LayerOperands) -> None:
    """Launch a layer by the algorithm that suits it."""
    profile = profile_of(queue)
    config = get_kernel_selector().select("recurrent", ((layer.steps, layer.rows, layer.hidden),), profile) or _DEFAULT
    algorithm = algorithms.choose_algorithm("recurrent", queue, layer, config, profile)
    assert algorithm is not None, "the algorithms units and steps must accept every layer"
    algorithm.run(queue, layer, config, profile, operands)


def part_kernel(queue: Any, layer: Layer, part: int, file: str, macros: Mapping[str, Any], name: str = "") -> Any:
    """Return the kernel of a part, built from cell.cl, the product in ``file`` and entry.cl. ``name``: by default forward or backward."""
    lanes = macros.get("VW", 1)
    real = DTYPES[layer.dtype].c_compute
    exps, text = launch.exponential(queue, real, lanes)
    defines = {
        "REAL": real, "KIND": CELL_KINDS.index(layer.kind), "PART": part, "HIDDEN": layer.hidden, "WIDTH": layer.width,
        **({"WIDE": 1} if real == "double" else {}), **exps, **macros,
    }  # fmt: skip
    files = f"{'vectors.cl' if lanes > 1 else 'values.cl'} cell.cl {file} entry.cl"
    return launch.kernel(queue, __file__, files, name or ("backward" if layer.backward else "forward"), None, defines, text)


# ---- CPUs


class _RecurrentTile(NamedTuple):
    lanes: int
    cells: int
    rows: int
    blocks: int


def _tile(layer: Layer, part: int, rows: int, profile: Any) -> _RecurrentTile:
    lanes = profile.lanes // (2 if layer.dtype == "float64" else 1)
    gates = layer.gates(part)
    cells = 1 if gates > 1 else min(4, -(-layer.units(part) // lanes))
    most = min(rows, _ROWS[profile.vector_registers])
    height = min(range(1, most + 1), key=lambda n: (-(-rows // n) * (n + 1), -n))  # few tiles, and few surplus rows
    return _RecurrentTile(lanes, cells, height, -(-layer.units(part) // (lanes * cells)))


def _cpu(queue: Any, layer: Layer, profile: Any, t: LayerOperands, whole: bool) -> None:
    """Launch on CPUs. ``whole``: a launch runs all steps, and groups share the rows; else it runs one step, and groups share the units."""
    cores = profile.max_compute_units
    rows = -(-layer.rows // min(layer.rows, cores)) if whole else layer.rows
    kernels, panels = {}, {}
    for part in layer.parts:
        tile = _tile(layer, part, rows, profile)
        macros = {"VW": tile.lanes, "CELLS": tile.cells, "MR": tile.rows}
        units = tile.blocks if whole else max(1, -(-tile.blocks // (2 * cores)))
        kernels[part] = part_kernel(queue, layer, part, "cpu.cl", macros), units, -(-tile.blocks // units)
        size = (tile.blocks * tile.lanes * tile.cells * layer.gates(part) + 1) * layer.depth(part)
        panels[part] = Tensor.empty((size,), layer.dtype, queue=queue)
        part_kernel(queue, layer, part, "cpu.cl", macros, "pack")(queue, tile.blocks + 1, 1, t.weights[part], panels[part])
    for part, start, end in layer.launched(layer.steps + 1 if whole else 1):
        built, units, groups = kernels[part]
        numbers = (layer.steps, layer.rows, start, end, rows, units, layer.flags)
        built(queue, (-(-layer.rows // rows), groups), (1, 1), panels[part], *t.rest, *numbers)


def _suits_whole(layer: Layer, config: KernelConfig, profile: Any) -> bool:
    """Whether one launch runs all steps: the layer has no projection, and ``config`` names a tier or the weights are small enough."""
    if layer.width != layer.hidden:
        return False
    size = GATES[layer.kind] * layer.hidden * layer.width * DTYPES[layer.dtype].itemsize
    few = layer.rows < profile.max_compute_units and size > _CACHE // 2
    return "tier" in config.extra or (size <= _CACHE * (8 if layer.backward else 1) and not few)


# ---- GPUs


class _Block(NamedTuple):
    """The division of a launch. Per group: ``units``, ``items``, ``rows`` (``tall`` rows at a time). Per item: ``columns``, ``quads``."""

    units: int
    items: int
    columns: int
    tall: int
    quads: int
    held: int  # values of weights of an item
    rows: int
    groups: tuple[int, int]

    def macros(self, layer: Layer, part: int) -> dict[str, int]:
        width = next(n for n in (4, 2, 1) if layer.depth(part) % n == 0)
        return {"BLOCK": self.units, "ITEMS": self.items, "CT": self.columns, "RT": self.tall, "QUADS": self.quads, "VK": width}


def _block(layer: Layer, part: int, profile: Any, extra: Mapping[str, Any], cores: int, units: int = 0, items: int = 256) -> _Block:
    gates, depth = layer.gates(part), layer.depth(part)
    units = extra.get("BLOCK", units or (32 if part == FORWARD_PART and gates == 1 else _BLOCKS[part]))
    columns, tall = gates if gates > 1 else 4, extra.get("RT", 8)
    items = min(extra.get("ITEMS", items), profile.max_work_group_size)
    slices = items // (units * gates // columns)
    size = DTYPES[layer.dtype].itemsize
    while tall > 1 and (slices * tall * units * gates * size > _LOCAL or units * tall > items):
        tall //= 2
    most = max(1, _LOCAL // (2 * tall * 4 * slices * size))
    pieces = -(-depth // (4 * slices))
    quads = -(-pieces // -(-pieces // min(most, 4)))
    held = columns * 4 * quads * -(-pieces // quads)
    across = -(-layer.units(part) // units)
    wanted = max(1, cores // across)
    share = -(-layer.rows // wanted)
    rows = -(-share // tall) * tall
    return _Block(units, items, columns, tall, quads, held, rows, (-(-layer.rows // rows), across))


def _persistent_block(layer: Layer, config: KernelConfig, profile: Any) -> _Block | None:
    """Return a division into at most one group per compute unit; groups run concurrently and keep their weights. ``None`` if unsuitable."""
    if layer.width != layer.hidden or layer.dtype != "float32" or layer.steps < 2:
        return None
    (part,) = layer.parts
    asked = config.extra.get("tier") == "persistent"
    cores = profile.max_compute_units if profile.compute_capability else 1
    for size in (0, _BLOCKS[part] // 2):
        for items in _REGISTERS:
            block = _block(layer, part, profile, config.extra, cores, size, items)
            fits = block.groups[0] * block.groups[1] <= cores and block.held <= _REGISTERS.get(block.items, 128)
            if fits and block.items <= profile.max_work_group_size:
                return block if asked or (profile.compute_capability or (0, 0)) >= (7, 0) else None
    return None


def _persistent(queue: Any, layer: Layer, config: KernelConfig, profile: Any, t: LayerOperands) -> None:
    block = _persistent_block(layer, config, profile)
    assert block is not None
    (part,) = layer.parts
    recording.again(watch(queue))
    queue.netcl.backend.fill(t.awaited.buffer, t.awaited.nbytes, DTYPES["int32"], -1)
    _launch(queue, layer, part, block, t, 0, layer.steps + (layer.backward and layer.flags & INITIAL > 0), HOLDS=1, POLLS=1)


def _steps(queue: Any, layer: Layer, config: KernelConfig, profile: Any, t: LayerOperands) -> None:
    blocks = {part: _block(layer, part, profile, config.extra, _WAVES * profile.max_compute_units) for part in layer.parts}
    for part, start, end in layer.launched(1):
        _launch(queue, layer, part, blocks[part], t, start, end)


def _launch(queue: Any, layer: Layer, part: int, block: _Block, t: LayerOperands, start: int, end: int, **macros: int) -> None:
    rolled = {"UNROLL": ""} if launch.on_cpu_device(queue) else {}
    built = part_kernel(queue, layer, part, "simt.cl", {**block.macros(layer, part), **macros, **rolled})
    sizes = (block.groups[0] * block.items, block.groups[1])
    numbers = (layer.steps, layer.rows, start, end, block.rows, block.units, layer.flags)
    built(queue, sizes, (block.items, 1), t.weights[part], *t.rest, *numbers)


def _trusted(queue: Any, layer: Layer, config: KernelConfig) -> bool:
    """Whether groups that wait for each other run concurrently; checked once per context with a group per compute unit."""
    profile = profile_of(queue)
    if not may_wait(queue) or not profile.compute_capability:
        return may_wait(queue)  # without a capability there is one group
    return nvidia.verdict(queue, *_VERDICT, lambda queue: _waits_right(queue, profile), apart=False)


def _waits_right(queue: Any, profile: Any) -> bool:
    """Whether a small layer over all compute units agrees with NumPy's result, and no group timed out."""
    hidden, rows = 32, 8 * max(1, profile.max_compute_units // 4)
    layer, rng = Layer("lstm", 4, rows, hidden, hidden, "float32"), np.random.default_rng(0)
    gx, weight = (rng.standard_normal(shape, np.float32) for shape in ((4, rows, 4 * hidden), (4 * hidden, hidden)))
    x, w = (Tensor.from_host(queue, array) for array in (gx, weight))
    shapes = ((4, rows, hidden), (4, rows, 5, hidden), (rows, hidden), (rows, hidden))
    y, saved, h, c = (Tensor.empty(shape, queue=queue) for shape in shapes)
    flag = late_flag(queue).fill_(0)
    _persistent(queue, layer, _DEFAULT, profile, LayerOperands({FORWARD_PART: w}, (x, x, x, x, x, y, saved, h, c, y, flag), y))
    exact = steps.layer_forward(steps.NUMPY, gx, weight, None, None, None, None, None, "lstm", False)[0]
    return not flag.item() and bool(np.abs(y.to_host() - exact).max() < 1e-5)


_SMALL = {"ITEMS": 16, "BLOCK": 8, "RT": 2}  # groups that CPUs build and run in reasonable time
_PROBE_SIZES = {
    name: (KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": name, **sizes}),)
    for name, sizes in {"rows": {}, "units": {}, "persistent": _SMALL, "steps": _SMALL}.items()
}
algorithms.add(
    "recurrent", "rows", "cell.cl cpu.cl entry.cl", "CPUs: all steps in one launch, rows of the batch divided among the cores",
    "recurrent_forms_x86.txt: 64, 1",
    lambda queue, layer, config, profile, t: _cpu(queue, layer, profile, t, True),
    device="cpu", tiers=("rows",), when=_suits_whole, samples=_PROBE_SIZES["rows"],
)  # fmt: skip
algorithms.add(
    "recurrent", "units", "cell.cl cpu.cl entry.cl", "CPUs: one launch per step, units divided among the cores",
    "recurrent_forms_x86.txt: 650, 20",
    lambda queue, layer, config, profile, t: _cpu(queue, layer, profile, t, False),
    device="cpu", tiers=("units", "rows"), samples=_PROBE_SIZES["units"],
)  # fmt: skip
algorithms.add(
    "recurrent", "persistent", "cell.cl simt.cl entry.cl",
    "GPUs: all steps in one launch; groups hold their weights and wait for each other",
    "recurrent_h200.json: LSTM 256, batch 64, 35 steps, forward", _persistent,
    device="gpu", tiers=("persistent",), needs="NVIDIA, compute capability 7.0 or more",
    when=lambda layer, config, profile: _persistent_block(layer, config, profile) is not None, probe=_trusted,
    samples=_PROBE_SIZES["persistent"],
)  # fmt: skip
algorithms.add(
    "recurrent", "steps", "cell.cl simt.cl entry.cl", "GPUs: one launch per step: product, gates and cell",
    "recurrent_h200_steps.json: LSTM 650, batch 20, 35 steps, forward and backward", _steps,
    device="gpu", tiers=("steps", "persistent"), samples=_PROBE_SIZES["steps"],
)  # fmt: skip
