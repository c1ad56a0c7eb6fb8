"""Attention in tiles: kernels compute and discard scores block by block instead of storing the full score matrix.

Forward stores the log-sum-exp of each row of scores; backward recomputes the scores from it. The kernels are in ``cpu.cl`` (a vector lane
computes a query), ``simt.cl`` (a work-group computes a block of queries) and ``mma.cl`` (matrix units of NVIDIA GPUs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core.capabilities import DeviceProfile
from netcl.core.device import profile_of
from netcl.core.dtype import DTYPES, HALVES, sum_dtype
from netcl.core.errors import DeviceError, ShapeError, check_probability, message
from netcl.core.kernel_selector import get_kernel_selector, get_matmul_precision
from netcl.core.kernels import primitives
from netcl.core.tensor import Tensor, with_shape
from netcl.engine import algorithms, launch
from netcl.engine.plan import planned
from netcl.engine.registry import S, composite, op
from netcl.engine.strided import alignment, take_block
from netcl.ops import views
from netcl.ops.attention.cached import cached_attention
from netcl.ops.attention.dense import attention_cpu, attention_grad_cpu, gradients_by_ops, mask_gradient, masked
from netcl.ops.attention.geometry import (
    NO_MASK,
    HeadBlock,
    HeadLayout,
    HeadSizes,
    Mask,
    attention_geometry,
    layout_of,
    mask_of,
    new_block,
    numbers_of,
    numbers_read,
    score_scale,
)
from netcl.ops.attention.rope import rope
from netcl.ops.matmul import nvidia
from netcl.ops.matmul.mma import UNITS
from netcl.ops.pointwise import cast

__all__ = ["Config", "attention", "attention_grad", "cached_attention", "choose_kernel", "rope", "scaled_dot_product_attention"]


PARTS = {"attention": 1, "attention_query_grad": 2, "attention_key_grad": 3}  # the kernels of a file
#: Work-items across and down, scores of each across and down, and elements of a head at a time; of ``simt.cl``, the largest first.
ATTENTION_TILES = ((16, 8, 4, 8, 64), (16, 8, 4, 4, 64), (8, 8, 4, 4, 32), (8, 8, 4, 2, 32))

#: Warps and keys of a block, forward and backward, by the bytes of a value and the head size; of ``mma.cl``, at most 48 KB of local memory.
UNIT_TILES = {
    (4, 32): ((4, 64), (4, 32)), (4, 64): ((4, 32), (4, 32)), (4, 128): ((2, 32), (2, 16)),
    (2, 32): ((4, 64), (4, 32)), (2, 64): ((4, 64), (4, 32)), (2, 128): ((4, 64), (2, 32)),
}  # fmt: skip
UNIT_ROWS = 16  # queries and keys from which the matrix units are used

HELD = 64  # registers of a work-item for one result; the gradient of keys and values has two


class Config(NamedTuple):
    """Kernel files, their macros, the work-group size, and how many rows a work-group computes."""

    file: str
    defines: Mapping[str, int | str]
    local: tuple[int, int]
    rows: int

    @property
    def by_head(self) -> bool:
        """Whether one kernel computes all gradients, a work-group those of a head of keys and values."""
        return bool(self.defines.get("BY_HEAD"))


class AttentionProblem(NamedTuple):
    """The properties of a call that determine its kernel.

    ``grad``: compute gradients; ``aligned``: tensors are aligned to 16 bytes; ``strided``: operands are strided blocks.
    """

    sizes: HeadSizes
    dtype: str
    grad: bool = False
    aligned: bool = True
    strided: bool = False

    @property
    def wide(self) -> bool:
        """Whether values are float64."""
        return self.dtype == "float64"


def cpu_config(width: int, wide: bool, depth: int, by_head: bool = False) -> Config:
    """Return the configuration for CPUs with vectors of ``width`` floats. ``wide``: the dtype is float64; ``depth``: the head size.

    ``by_head``: one kernel computes all gradients.
    """
    lanes = 8 if wide else 16
    tile = 16 if width >= 16 else 6  # 16: head sizes and causal row ends are whole tiles
    block = -(-(64 if depth <= 32 else 32) // tile) * tile  # rows of short heads leave room in the first cache
    defines = {"LANES": lanes, "TILE": tile, "BLOCK": block, "DEPTH": depth, "BY_HEAD": int(by_head)}
    return Config("cpu.cl", defines, (1, 1), 1 << 31 if by_head else lanes)


def simt_config(memory: int, most: int, wide: bool, depth: int, queries: int = 64) -> Config:
    """Return the configuration for GPUs: the largest tiles that fit the device and have fewer than ``2 * queries`` rows.

    If no tiles do, the smallest are used. ``memory``: local memory in bytes; ``most``: work-group limit; ``wide``: float64; ``depth``: head
    size.
    """
    for tx, ty, rx, ry, chunk in ATTENTION_TILES:
        rows, columns, chunks = ry * ty, rx * tx, -(-depth // chunk)
        size = (8 if wide else 4) * (chunk * (rows + columns) + rows * columns)
        held = (2 if wide else 1) * ry * chunks * chunk // tx
        if size <= memory and tx * ty <= most and held <= HELD and chunk <= depth and 2 * queries > rows:
            break
    defines = {"TX": tx, "TY": ty, "RX": rx, "RY": ry, "CHUNK": chunk, "CHUNKS": chunks, "WIDE": int(wide)}
    return Config("scores.cl simt.cl", defines, (tx * ty, 1), rows)


def unit_config(p: AttentionProblem) -> Config:
    """Return the configuration for the matrix units of NVIDIA GPUs: a warp per 16 queries."""
    itemsize = DTYPES[p.dtype].itemsize
    warps, columns = UNIT_TILES[itemsize, p.sizes.bucket][p.grad]
    terms = 2 if itemsize == 4 and get_matmul_precision() != "medium" else 1
    defines: dict[str, int | str] = {"WARPS": warps, "COLUMNS": columns, "BUCKET": p.sizes.bucket, "SIZE": itemsize, "TERMS": terms}
    defines |= {"MMA": UNITS[p.dtype]} | ({"PAIR": f"pair_{p.dtype}"} if itemsize == 2 else {})
    return Config("scores.cl mma.cl", defines, (warps * 32, 1), warps * 16)


def _suits_units(p: AttentionProblem, config: object, profile: DeviceProfile) -> bool:
    if p.dtype not in UNITS or (DTYPES[p.dtype].itemsize, p.sizes.bucket) not in UNIT_TILES or not p.aligned:
        return False
    rows = [size * DTYPES[p.dtype].itemsize for size in (p.sizes.depth, p.sizes.depth_v)]
    return min(rows) > 0 and not any(row % 16 for row in rows) and min(p.sizes.n, p.sizes.m) >= UNIT_ROWS and nvidia.capable(profile)


def _units_right(p: AttentionProblem, queue: Any) -> bool:
    """Whether the kernels of ``mma.cl`` agree with NumPy on a small problem of the same head sizes."""
    sizes, rng = HeadSizes(1, 2, 1, 77, 70, p.sizes.depth, p.sizes.depth_v), np.random.default_rng(0)
    shapes = ((77, sizes.depth), (70, sizes.depth), (70, sizes.depth_v), (77, sizes.depth_v))
    order = (0, 2, 1, 3) if p.strided else (0, 1, 2, 3)  # of axes in memory
    rounded = [Tensor.from_host(queue, rng.standard_normal((1, 2, *shape), np.float32), p.dtype).to_host() for shape in shapes]
    q64, k64, v64, g64 = (x.astype(np.float64) for x in rounded)
    out, logarithms = attention_cpu(q64, k64, v64, None, sizes, NO_MASK, True, 0.1)
    q, k, v, g, result = (Tensor.from_host(queue, x.transpose(order), p.dtype) for x in (*rounded, out))
    sums, places = Tensor.from_host(queue, logarithms, sum_dtype(p.dtype)), [new_block(2, *shape, p.strided) for shape in shapes]
    call = _AttentionCall(q, unit_config(p), sizes, NO_MASK, _kernel_numbers(sizes, NO_MASK, True, 0.1), p.strided)
    if p.grad:
        wanted = attention_grad_cpu(g64, q64, k64, v64, None, out, logarithms, None, sizes=sizes, place=NO_MASK, causal=True, scale=0.1)
        found = [Tensor.empty(t.shape, p.dtype, queue=queue) for t in (q, k, v)]
        _run_grad(call, (q, k, v, g, result), sums, None, found, (*places, places[3]), places[:3])
    else:
        wanted, found = (out,), [result.fill_(0)]
        call.run("attention", sizes.n, sizes.heads, (q, k, v, q, result, sums.fill_(0)), places[3:], places[:3])
        if np.abs(sums.to_host() - logarithms).max() > 2**-6:
            return False
    bound = {"float32": 2**-18, "float16": 2**-9, "bfloat16": 2**-6}["float16" if get_matmul_precision() == "medium" else p.dtype]
    pairs = zip((t.to_host().transpose(order) for t in found), wanted, strict=True)
    return all(np.abs(a - b).max() <= bound * np.abs(b).max() for a, b in pairs)


def choose_kernel(queue: Any, shapes: tuple[tuple[int, ...], ...], p: AttentionProblem) -> Config:
    """Return the configuration of a call: the one registered with the selector for ``attention``, else the best that the device can run.

    ``shapes``: of queries and keys.
    """
    profile = profile_of(queue)
    chosen = get_kernel_selector().select("attention", shapes, profile)
    if chosen is not None:
        return chosen
    usable = (a for a in algorithms.answering("attention", None, profile) if a.when(p, None, profile))
    return next(a for a in usable if a.probe(queue, p, None)).run(p, profile)


def _suits_heads(p: AttentionProblem, config: object, profile: DeviceProfile) -> bool:
    """Whether heads keep all cores busy, and vectors divide them. Two kernels compute 7 products where one computes 5."""
    heads, lanes = p.sizes.batch * p.sizes.kv_heads, 8 if p.wide else 16
    rounds = -(-heads // profile.max_compute_units)
    return p.grad and not (p.sizes.depth % lanes or p.sizes.depth_v % lanes) and 4 * heads >= 3 * rounds * profile.max_compute_units


algorithms.add(
    "attention", "heads", "cpu.cl", "gradients on CPUs: a work-group per head", "zoo_pocl_x86.json: Swin-T, step",
    lambda p, profile: cpu_config(profile.vector_width, p.wide, p.sizes.bucket, True), device="cpu", when=_suits_heads,
)  # fmt: skip
algorithms.add(
    "attention", "lanes", "cpu.cl", "CPUs: a vector lane per query", "cases_intel.json: GPT step, batch 4",
    lambda p, profile: cpu_config(profile.vector_width, p.wide, p.sizes.bucket), device="cpu",
)  # fmt: skip
algorithms.add(
    "attention", "units", "scores.cl mma.cl", "head sizes of at most 128, 16 queries or more", "attention_h200.txt: whisper",
    lambda p, profile: unit_config(p), device="gpu", needs="NVIDIA, compute capability 8.0 or more", when=_suits_units,
    probe=lambda queue, p, config: nvidia.verdict(queue, "attention", f"units {p.sizes.bucket} {p[2:]}", p.dtype, partial(_units_right, p)),
)  # fmt: skip
algorithms.add(
    "attention", "blocks", "scores.cl simt.cl", "GPUs: a work-group per block of queries", "cases_h200.json: GPT step, batch 64",
    lambda p, profile: simt_config(profile.local_mem_size, profile.max_work_group_size, p.wide, p.sizes.bucket, p.sizes.n),
    device="gpu",
)  # fmt: skip


class _AttentionCall(NamedTuple):
    """One attention call: the values that all of its kernels share."""

    like: Tensor
    config: Config
    sizes: HeadSizes
    mask: Mask
    numbers: tuple[float, ...]
    strided: bool = False

    def kernel(self, name: str) -> Any:
        dtype = self.like.dtype
        operands = {"X": dtype, "M": (self.like if self.mask.tensor is None else self.mask.tensor).dtype, "S": sum_dtype(dtype)}
        defines: dict[str, Any] = {"REAL": DTYPES[dtype].c_compute, "MASK": self.mask.kind, "PART": PARTS[name], **self.config.defines}
        exp, text = launch.exponential(self.like.queue, defines["REAL"], defines.get("LANES", 1))
        if self.config.file == "cpu.cl":
            defines["WHOLE"] = int(self.sizes.depth == self.sizes.depth_v == defines.get("DEPTH"))
        else:
            defines |= {"DEPTH": self.sizes.depth, "DEPTH_V": self.sizes.depth_v, "STRIDED": int(self.strided)}
            if "MMA" in defines:
                text = primitives.cl_source(nvidia.__file__, "ptx.cl")
            elif self.sizes.depth % 4 == self.sizes.depth_v % 4 == 0:
                defines |= quad_macros(dtype)
        return launch.kernel(self.like.queue, __file__, f"heads.cl {self.config.file}", name, operands, defines | exp, text)

    def gathered(self, tensors: Sequence[Tensor], blocks: Sequence[HeadBlock]) -> tuple[Tensor, ...]:
        """Return q, k, v and, if given, the gradient of the result as the kernels read them: those of ``cpu.cl`` read contiguous heads."""
        if self.config.file != "cpu.cl" or not self.strided:
            return tuple(tensors)
        return tuple(
            t if block == new_block(*part) else take_block(t, (self.sizes.batch, *part), block[0], (*block[1:], 1))
            for t, block, part in zip(tensors, blocks, self.sizes.parts, strict=False)
        )

    def run(self, name: str, rows: int, heads: int, args: Sequence[Any], made: Sequence[HeadBlock], read: Sequence[HeadBlock]) -> None:
        """Launch one of the tile kernels over ``rows`` rows (queries, or keys) of ``heads`` heads.

        ``made`` and ``read`` are the blocks of results and of operands: g, q, k, v (contiguous for CPUs) and the forward result.
        """
        tx, ty = self.config.local
        groups = -(-rows // self.config.rows)
        places = [n for block in (*made, *(read[4:] if self.config.file == "cpu.cl" else read)) for n in block]
        self.kernel(name)(self.like.queue, (groups * tx, heads * ty), self.config.local, *args, *self.numbers, *places)


def quad_macros(dtype: str) -> dict[str, str]:
    """Return the macros by which ``simt.cl`` loads and, except for 16-bit dtypes, stores four elements at once."""
    read = {"X_QUAD(p)": launch.QUADS.get(dtype, "(*(__global const real4*)(p))")}
    return read if dtype in HALVES else {**read, "X_QUAD_STORE(p, v)": "(*(__global real4*)(p) = (v))"}


def _call_of(
    tensors: Sequence[Tensor], shapes: tuple[tuple[int, ...], ...], sizes: HeadSizes, mask: Mask, causal: bool, scale: float, strided: bool,
    grad: bool,
) -> _AttentionCall:  # fmt: skip
    """Choose the kernels for ``tensors``: q, k, v and others. ``shapes``: of q and k."""
    problem = AttentionProblem(sizes, tensors[0].dtype, grad, alignment(*tensors) == 16, strided)
    config = choose_kernel(tensors[0].queue, shapes, problem)
    return _AttentionCall(tensors[0], config, sizes, mask, _kernel_numbers(sizes, mask, causal, scale), strided)


def _kernel_numbers(sizes: HeadSizes, mask: Mask, causal: bool, scale: float) -> tuple[float, ...]:
    return (scale, int(causal), sizes.n, sizes.m, sizes.depth, sizes.depth_v, sizes.heads, sizes.sharing, *mask.steps)


def _laid_out(sizes: HeadSizes, xs: Sequence[Tensor]) -> tuple[list[Tensor], HeadLayout]:
    """Return the tensors that kernels read for ``xs``: q, k, v and others, or the bases of pending views; and the layout of the call."""
    bases, owners, operands = [], [], []
    for x in xs:
        owner: Any
        base, offset, strides = views.strided(x)
        if base is x:
            owner, offset, strides = views.base_layout(x)
        else:
            owner = base
        bases.append(base)
        owners.append(owner)
        operands.append((x.shape, base is not x and base.size < 1 << 31, offset, strides))
    shared = int(owners[0].size) if owners[0] is owners[1] is owners[2] else 0
    layout = layout_of(sizes, tuple(operands), shared, DTYPES[xs[0].dtype].itemsize, launch.on_cpu_device(xs[0].queue))
    return [base if from_base else x for x, base, from_base in zip(xs, bases, layout.from_base, strict=True)], layout


def _viewed(memory: Tensor, shape: tuple[int, ...], view: tuple[int, tuple[int, ...]] | None) -> Tensor:
    """Return a block of ``memory``, which no other tensor uses, as a tensor of ``shape``."""
    return with_shape(memory, shape) if view is None else views.unshared_block(memory, view[0], shape, view[1])


_ATTENTION_SAMPLES = [
    S((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), None),
    S((2, 33, 16), (2, 33, 16), (2, 33, 5), None, causal=True),
    S((1, 1), (1, 1), (1, 1), None),
    S((2, 4, 19, 40), (2, 2, 70, 40), (2, 2, 70, 40), None, scale=0.3),
    S((2, 2, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), (5, 9), dtypes=(None, None, None, "bool")),
    S((2, 2, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 1, 1, 9)),
    S((3, 2, 2, 5, 8), (3, 2, 2, 9, 8), (3, 2, 2, 9, 8), (3, 1, 1, 5, 1)),
    S((2, 3, 130), (2, 35, 130), (2, 35, 130), None, causal=True),
    S((0, 2, 5, 8), (0, 2, 5, 8), (0, 2, 5, 8), None),
    S((2, 0, 8), (2, 3, 8), (2, 3, 8), None),
    S((2, 3, 8), (2, 0, 8), (2, 0, 8), None),
]
_ATTENTION_GRAD_SAMPLES = [
    S((2, 5, 6), (2, 5, 8), (2, 9, 8), (2, 9, 6), None, (2, 5, 6), (2, 5), None),
    S((2, 4, 33, 8), (2, 4, 33, 8), (2, 2, 40, 8), (2, 2, 40, 8), None, (2, 4, 33, 8), (2, 4, 33), None, causal=True),
    S((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), (5, 9), (2, 2, 5, 8), (2, 2, 5), (2, 2, 5), scale=0.5),
    S((1, 20, 32), (1, 20, 32), (1, 20, 32), (1, 20, 32), None, (1, 20, 32), (1, 20), None, causal=True),
    S((0, 5, 8), (0, 5, 8), (0, 9, 8), (0, 9, 8), None, (0, 5, 8), (0, 5), None),
]
_ATTENTION_ERRORS = [
    (S((2, 3, 4), (2, 5, 6), (2, 5, 6)), r"q and k must have the same head size, got 4 and 6"),
    (S((3, 3, 4), (2, 5, 4), (2, 5, 4)), r"k and v must have the batch axes of q, and their number of heads must divide that of q"),
    (S((2, 3, 300), (2, 5, 300), (2, 5, 300)), r"head sizes must be at most 256"),
    (S((2, 3, 4), (2, 5, 4), (2, 5, 4), (4, 5)), r"mask must broadcast to the scores; mask=\(4, 5\), scores=\(2, 3, 5\)"),
]


def _attention_vjp(F, g, out, q, k, v, mask, causal, scale, needs):
    upstream, through = g
    result, logarithms = out
    upstream = F.mul(result, 0) if upstream is None else upstream
    known = (q, k, v, mask, result, logarithms, through)
    wants_mask, wants_others = needs[3] and mask is not None and mask.dtype != "bool", any(needs[:3])
    if wants_mask and wants_others and _kernels_give_mask_grad(q, k, v):
        return F.attention_grad(upstream, *known, causal=causal, scale=scale, mask_grad=True)
    gradients = F.attention_grad(upstream, *known, causal=causal, scale=scale) if wants_others else (None,) * 3
    return *gradients, mask_gradient(F, upstream, *known, causal, scale) if wants_mask else None


def _kernels_give_mask_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether :func:`attention_grad` can compute the gradient of a mask: with ``cpu.cl`` and on the NumPy backend."""
    if q.backend == "cpu" or not launch.on_cpu_device(q.queue):
        return q.backend == "cpu"
    problem = AttentionProblem(attention_geometry("attention", q, k, v), q.dtype, True)
    return choose_kernel(q.queue, (q.shape, k.shape), problem).file == "cpu.cl"


def _attention_of_views(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor] | None:
    """Compute :func:`attention` if q, k or v is a pending view; else return ``None``."""
    if not views.any_pending((q, k, v)):
        return None
    q, k, v, mask = launch.as_tensors("attention", q, k, v, mask)
    sizes = attention_geometry("attention", q, k, v)
    if not (q.size and k.size and v.size):
        return None
    tensors, layout = _laid_out(sizes, (q, k, v))
    out, logarithms = _planned_attention(*tensors, mask, q.shape, layout.numbers, causal, score_scale(scale, sizes.depth))
    return _viewed(out, out.shape, layout.views[0]), logarithms


@op(
    vjp=_attention_vjp, ref="numpy", amp="half", samples=_ATTENTION_SAMPLES, errors=_ATTENTION_ERRORS, tol=4,
    deferred=_attention_of_views, defer_if=lambda *xs: views.any_pending(xs[:3]),
)  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``softmax(q k' scale + mask) v`` and the log-sum-exp of each row of scores, in tiles."""
    q, k, v, mask = launch.as_tensors("attention", q, k, v, mask)
    sizes = attention_geometry("attention", q, k, v)
    scale = score_scale(scale, sizes.depth)
    if q.backend == "cpu":
        place, dtypes = mask_of("attention", mask, q.shape, sizes), (q.dtype, sum_dtype(q.dtype))
        return launch.run_cpu(attention_cpu, q, k, v, place.tensor, dtype=dtypes, sizes=sizes, place=place, causal=causal, scale=scale)
    return _attend(q, k, v, mask, q.shape, numbers_of(sizes, sizes.contiguous), causal, scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: tuple[int, ...], numbers: tuple[int, ...], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the kernel of :func:`attention` for queries of ``shape``. ``numbers``: sizes and the blocks of q, k, v and the result."""
    sizes, places = numbers_read(numbers)
    place = mask_of("attention", mask, shape, sizes)
    out = Tensor.empty((*shape[:-1], sizes.depth_v), q.dtype, queue=q.queue)
    logarithms = Tensor.empty(shape[:-1], sum_dtype(q.dtype), queue=q.queue)
    if not logarithms.size:
        return out, logarithms
    if not sizes.m:
        return out.fill_(0), logarithms.fill_(-math.inf)
    dtype, (q, k, v) = q.dtype, _widened_halves(q, k, v)
    out = out if out.dtype == q.dtype else Tensor.empty(out.shape, q.dtype, queue=q.queue)
    call = _call_of((q, k, v), sizes.shapes(shape)[:2], sizes, place, causal, scale, places[:3] != sizes.contiguous[:3], False)
    given = (*call.gathered((q, k, v), places[:3]), q if place.tensor is None else place.tensor, out, logarithms)
    call.run("attention", sizes.n, sizes.batch * sizes.heads, given, places[3:], places[:3])
    return cast(out, dtype), logarithms


_planned_attention = planned("attention_of_views", _attend)


def _widened_halves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast float16 and bfloat16 tensors to float32 on CPU devices. The kernel reads every element often and would convert it each time."""
    halves = tensors[0].dtype in HALVES and launch.on_cpu_device(tensors[0].queue)
    return tuple(cast(t, "float32") for t in tensors) if halves else tensors


def _grad_of_views(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, result: Tensor, logarithms: Tensor,
    through: Tensor | None = None, *, causal: bool = False, scale: float | None = None, mask_grad: bool = False,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Compute :func:`attention_grad` if an operand is a pending view; else return ``None``."""
    if not views.any_pending((upstream, q, k, v, result)):
        return None
    name = "attention_grad"
    upstream, q, k, v, mask, result, logarithms, through = launch.as_tensors(name, upstream, q, k, v, mask, result, logarithms, through)
    sizes, made = attention_geometry(name, q, k, v), (*q.shape[:-1], v.shape[-1])
    fits = upstream.shape == result.shape == made and upstream.dtype == result.dtype == q.dtype
    if not fits or not (q.size and k.size and v.size):
        return None
    tensors, layout = _laid_out(sizes, (q, k, v, upstream, result))
    how = (q.shape, layout.numbers, causal, score_scale(scale, sizes.depth), layout.joint, mask_grad)
    found = _planned_grad(*tensors, mask, logarithms, through, *how)
    parts = found[:1] * 3 if layout.joint else found[:3]
    return *map(_viewed, parts, (q.shape, k.shape, v.shape), layout.views), *(found[-1:] if mask_grad else ())


@op(
    vjp=None, formula=gradients_by_ops, ref="numpy", samples=_ATTENTION_GRAD_SAMPLES, tol=8,
    deferred=_grad_of_views, defer_if=lambda *xs: views.any_pending((*xs[:4], *xs[5:6])),
)  # fmt: skip
def attention_grad(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, result: Tensor, logarithms: Tensor,
    through: Tensor | None = None, *, causal: bool = False, scale: float | None = None, mask_grad: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of q, k and v. ``logarithms`` is the log-sum-exp of :func:`attention`, ``through`` the gradient of that.

    ``mask_grad``: also return the gradient of the scores, which is that of an added mask. Only CPU kernels and NumPy compute it.
    """
    name = "attention_grad"
    upstream, q, k, v, mask, result, logarithms, through = launch.as_tensors(name, upstream, q, k, v, mask, result, logarithms, through)
    sizes = attention_geometry(name, q, k, v)
    scale, shape = score_scale(scale, sizes.depth), (*q.shape[:-1], sizes.depth_v)
    if upstream.shape != shape or result.shape != shape:
        raise ShapeError(message(name, f"upstream and result must have shape {shape}", upstream=upstream.shape, result=result.shape))
    if q.backend == "cpu":
        place = mask_of(name, mask, q.shape, sizes)
        given = (upstream, q, k, v, place.tensor, result, logarithms, through)
        how = {"sizes": sizes, "place": place, "causal": causal, "scale": scale}
        dtypes = (q.dtype,) * 3 + (_mask_grad_dtype(q.dtype, mask),) * mask_grad
        return launch.run_cpu(attention_grad_cpu, *given, dtype=dtypes, mask_grad=mask_grad, **how)
    blocks = sizes.contiguous
    numbers = numbers_of(sizes, (*blocks, blocks[3], *blocks[:3]))
    return _attend_grad(q, k, v, upstream, result, mask, logarithms, through, q.shape, numbers, causal, scale, 0, mask_grad)


def _attend_grad(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, result: Tensor, mask: Tensor | None, logarithms: Tensor, through: Tensor | None,
    shape: tuple[int, ...], numbers: tuple[int, ...], causal: bool, scale: float, joint: int, mask_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the kernels of :func:`attention_grad` for queries of ``shape``.

    ``numbers``: sizes, the blocks of the first five tensors and those of the gradients. With ``joint``, the gradients lie in one tensor of
    that many elements, which is returned in their place. With ``mask_grad``, the gradient of the scores comes last.
    """
    sizes, blocks = numbers_read(numbers)
    read, made = blocks[:5], blocks[5:]
    place, shapes = mask_of("attention_grad", mask, shape, sizes), sizes.shapes(shape)
    dtype, (q, k, v) = q.dtype, _widened_halves(q, k, v)
    made_shapes = (*(((joint,),) if joint else shapes), *(((*shape[:-1], sizes.m),) if mask_grad else ()))
    results = tuple(Tensor.empty(shape, q.dtype, queue=q.queue) for shape in made_shapes)
    dtypes = [_mask_grad_dtype(dtype, mask) if mask_grad and t is results[-1] else dtype for t in results]
    if not sum(t.size for t in results) or not sizes.n or not sizes.m:
        return tuple(cast(t.fill_(0), dtype) for t, dtype in zip(results, dtypes, strict=True))
    strided = read != (*sizes.contiguous, sizes.contiguous[3])
    call = _call_of((q, k, v, upstream), shapes[:2], sizes, place, causal, scale, strided, True)
    sums = sum_dtype(q.dtype)
    through = None if through is None else cast(through, sums)
    tensors = (*call.gathered((q, k, v, cast(upstream, q.dtype)), read[:4]), cast(result, q.dtype))
    parts = results[:1] * 3 if joint else results[:3]
    _run_grad(call, tensors, cast(logarithms, sums), through, parts, read, made, results[-1] if mask_grad else None)
    return tuple(cast(t, dtype) for t, dtype in zip(results, dtypes, strict=True))


def _mask_grad_dtype(dtype: str, mask: Tensor | None) -> str:
    return dtype if mask is None or mask.dtype == "bool" else mask.dtype


def _run_grad(
    call: _AttentionCall, tensors: Sequence[Tensor], logarithms: Tensor, through: Tensor | None, results: Sequence[Tensor],
    read: Sequence[HeadBlock], made: Sequence[HeadBlock], scores: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernels of gradients. ``tensors`` are q, k, v, the gradient of the result, and the result; ``read`` are their blocks.

    ``scores`` receives the gradient of the scores.
    """
    (q, k, v, g, out), sizes = tensors, call.sizes
    delta = Tensor.empty(logarithms.shape, logarithms.dtype, queue=q.queue)
    given = (g, q, k, v, q if call.mask.tensor is None else call.mask.tensor, logarithms, delta)
    also = (out, delta if through is None else through, results[0], int(through is not None))
    blocks, key_heads = (read[3], *read[:3]), sizes.batch * sizes.kv_heads
    if not call.config.by_head:
        call.run("attention_query_grad", sizes.n, sizes.batch * sizes.heads, (*given, *also), made[:1], (*blocks, read[4]))
    if call.config.file == "cpu.cl":
        if scores is not None and call.numbers[1]:
            scores.fill_(0)  # causal: kernels skip blocks above the diagonal
        args = (*given, *also, *results[1:], delta if scores is None else scores, int(scores is not None))
        call.run("attention_key_grad", sizes.m, key_heads, args, made, (*blocks, read[4]))
    elif scores is None:
        call.run("attention_key_grad", sizes.m, key_heads, (*given, *results[1:]), made[1:], blocks)
    else:
        raise DeviceError(message("attention_grad", "mask_grad=True needs the kernels of CPUs", "omit it", kernels=call.config.file))


_planned_grad = planned("attention_grad_of_views", _attend_grad)


# ---- public ops


@composite(
    ref="numpy",
    tol=4,
    samples=[S((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), S((2, 9, 8), (2, 9, 8), (2, 9, 8), is_causal=True)],
    errors=[
        (S((2, 3, 4), (2, 3, 4), (2, 3, 4), dropout_p=1.5), r"\[scaled_dot_product_attention\] dropout_p must be a number from 0 to 1")
    ],
)
def scaled_dot_product_attention(
    F: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, attn_mask: Any = None, causal: bool = False,
    is_causal: bool = False, scale: float | None = None, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """``softmax(q k' scale + mask) v`` over the last two axes of ``(..., N, D)`` queries and ``(..., M, D)`` keys and values.

    ``mask`` (torch's ``attn_mask``) broadcasts to ``(..., N, M)``. A bool mask is true where a query attends to a key; a float mask is
    added to the scores. ``scale`` is ``1 / sqrt(D)`` by default. ``causal`` (torch's ``is_causal``) lets query i attend to keys up to i. k
    and v may have fewer heads than q (grouped queries). A query with all keys masked gives 0. With ``dropout_p``, and for gradients of
    ``mask``, the matrix of probabilities is stored.

    >>> from netcl import ops
    >>> ops.scaled_dot_product_attention([[1.0]], [[1.0]], [[7.0]]).tolist()
    [[7.0]]
    """
    if mask is not None and attn_mask is not None:
        raise ValueError(message("scaled_dot_product_attention", "mask and attn_mask must not both be given", "combine them"))
    causal, mask = causal or is_causal, attn_mask if mask is None else mask
    check_probability("scaled_dot_product_attention", "dropout_p", dropout_p)
    if not dropout_p:
        return F.attention(q, k, v, mask, causal=causal, scale=scale)[0]
    q, k, v, mask = launch.as_tensors("scaled_dot_product_attention", q, k, v, mask)
    return _with_dropout(F, q, k, v, mask, causal, scale, dropout_p)


def _with_dropout(F: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, p: float) -> Tensor:
    sizes = attention_geometry("scaled_dot_product_attention", q, k, v)
    if sizes.sharing > 1:
        k, v = (_repeated_heads(F, t, sizes.sharing) for t in (k, v))
    scores = F.mul(F.matmul(q, k, transpose_b=True), score_scale(scale, sizes.depth))
    scores = masked(F, scores, mask, causal)
    if mask is None or not sizes.m:  # without keys, the scores are empty and the result is 0
        return F.matmul(F.dropout(F.softmax(scores, axis=-1), p), v)
    blind = F.eq(F.amax(scores, axis=-1, keepdims=True), -math.inf)  # rows that see no key, whose softmax is NaN
    shares = F.where(blind, 0.0, F.softmax(F.where(blind, 0.0, scores), axis=-1))
    return F.matmul(F.dropout(shares, p), v)


def _repeated_heads(F: Any, x: Tensor, times: int) -> Any:
    *lead, heads, rows, depth = x.shape
    wide = F.expand(F.reshape(x, (*lead, heads, 1, rows, depth)), (*lead, heads, times, rows, depth))
    return F.reshape(wide, (*lead, heads * times, rows, depth))
