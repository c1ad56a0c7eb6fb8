"""The sizes of an attention call: heads, groups of heads that share keys and values, strides of the mask and of blocks in memory."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from netcl.core.dtype import DTYPES
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.ops import views
from netcl.ops.movement import expand

DEPTHS = (32, 64, 128, 256)  # kernels are built for these head sizes and serve every smaller one
LARGEST = DEPTHS[-1]
#: Where ``(batch, heads, rows, depth)`` lies in memory: offset, and strides by batch, head and row, in elements. Rows are contiguous.
HeadBlock = tuple[int, int, int, int]


class HeadSizes(NamedTuple):
    """The sizes of a call. ``sharing`` query heads of ``n`` rows share one key head and one value head of ``m`` rows each."""

    batch: int
    heads: int
    sharing: int
    n: int
    m: int
    depth: int
    depth_v: int

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads per batch element."""
        return self.heads // self.sharing

    @property
    def bucket(self) -> int:
        """The head size that kernels are built for: the smallest of :data:`DEPTHS` that both head sizes fit."""
        return next(size for size in DEPTHS if size >= max(self.depth, self.depth_v))

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """The shape of the queries after the batch axis: key heads, query heads per key head, rows."""
        return (self.kv_heads, self.sharing, self.n)


def attention_geometry(op: str, q: Tensor, k: Tensor, v: Tensor) -> HeadSizes:
    """Return the sizes of a call; raises ``ShapeError`` or ``DtypeError`` if the operands do not fit together."""
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    for name, t in (("q", q), ("k", k), ("v", v)):
        launch.check_dtype(op, t, name=name)
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(message(op, "q, k and v must have the same dtype", q=q.dtype, k=k.dtype, v=v.dtype))
    if min(q.ndim, k.ndim, v.ndim) < 2 or k.shape[:-1] != v.shape[:-1] or q.ndim != k.ndim:
        raise ShapeError(message(op, "q, k and v must be (..., N, D), (..., M, D) and (..., M, Dv)", **shapes))
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(message(op, f"q and k must have the same head size, got {q.shape[-1]} and {k.shape[-1]}", **shapes))
    if max(q.shape[-1], v.shape[-1]) > LARGEST:
        raise ShapeError(message(op, f"head sizes must be at most {LARGEST}", **shapes))
    heads, kv_heads = (t.shape[-3] if t.ndim > 2 else 1 for t in (q, k))
    if q.shape[:-3] != k.shape[:-3] or (heads != kv_heads and (not kv_heads or heads % kv_heads)):
        raise ShapeError(message(op, "k and v must have the batch axes of q, and their number of heads must divide that of q", **shapes))
    sharing = heads // kv_heads if kv_heads else 1
    return HeadSizes(math.prod(q.shape[:-3]), heads, sharing, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])


class Mask(NamedTuple):
    """A mask and its strides by batch, head, query and key. ``kind``: 0 for no mask, 1 for bool (true: attend), 2 for floats to add."""

    tensor: Tensor | None
    kind: int
    steps: tuple[int, int, int, int]
    shape: tuple[int, int, int, int]  # with 1 where it is broadcast


NO_MASK = Mask(None, 0, (0, 0, 0, 0), (1, 1, 1, 1))


def mask_of(op: str, mask: Tensor | None, q_shape: tuple[int, ...], sizes: HeadSizes) -> Mask:
    """Return ``mask`` with its strides; raises if ``mask`` does not broadcast to the scores or is neither bool nor floats."""
    if mask is None:
        return NO_MASK
    launch.check_dtype(op, mask, ("bool", *launch.FLOATS), "mask")
    scores = (*q_shape[:-2], sizes.n, sizes.m)
    padded = (*(1,) * (len(scores) - mask.ndim), *mask.shape)
    if len(padded) != len(scores) or any(a not in (1, b) for a, b in zip(padded, scores, strict=True)):
        raise ShapeError(message(op, "mask must broadcast to the scores", mask=mask.shape, scores=scores))
    lead = padded[:-3]
    if math.prod(lead) not in (1, sizes.batch):  # some batch axes broadcast and some do not: a single stride cannot express that
        padded = (*scores[:-3], *padded[-3:])
        mask = expand(mask, padded)
    four = (math.prod(padded[:-3]), padded[-3] if len(padded) > 2 else 1, *padded[-2:])
    strides = (four[1] * four[2] * four[3], four[2] * four[3], four[3], 1)
    steps = tuple(0 if size == 1 else stride for size, stride in zip(four, strides, strict=True))
    return Mask(mask, 1 if mask.dtype == "bool" else 2, steps, four)  # type: ignore[arg-type]


def score_scale(scale: float | None, depth: int) -> float:
    """Return the factor of the scores: ``scale``, or ``1 / sqrt(depth)`` for ``None``."""
    return 1 / math.sqrt(max(depth, 1)) if scale is None else float(scale)


def grouped(sizes: HeadSizes, rows: int, depth: int, queries: bool) -> tuple[int, ...]:
    """Return the shape ``(batch, kv_heads, sharing, rows, depth)``; 1 replaces ``sharing`` for keys and values (``queries=False``)."""
    return (sizes.batch, sizes.kv_heads, sizes.sharing if queries else 1, rows, depth)


# ---- blocks of memory


def new_block(heads: int, rows: int, depth: int, by_row: bool = False) -> HeadBlock:
    """Return the block of contiguous heads; ``by_row``: in the memory order ``(batch, rows, heads, depth)``."""
    return (0, heads * rows * depth, depth, heads * depth) if by_row else (0, heads * rows * depth, rows * depth, depth)


def is_by_row(block: HeadBlock) -> bool:
    """Whether the heads of a row lie closer together than the rows of a head, as in the result of a projection."""
    return block[3] > block[2]


def located(x: Tensor, heads: int, read_once: bool = False) -> tuple[Tensor, HeadBlock]:
    """Return the tensor that kernels read ``x`` from, and the block of ``x`` in its memory: the base of a pending view, else ``x`` itself.

    A view is copied first if :func:`_head_block` cannot express it. On CPUs, it is also copied unless kernels read it only once: rows that
    are read again for every few queries must be close together in memory.
    """
    base, offset, strides = views.strided(x)
    copied = base is x or base.size >= 1 << 31 or (launch.on_cpu_device(x.queue) and not read_once)
    block = None if copied else _head_block(x.shape, heads, offset, strides, DTYPES[x.dtype].itemsize)
    return (x, new_block(heads, x.shape[-2], x.shape[-1])) if block is None else (base, block)


def origin(x: Tensor, heads: int) -> tuple[object, int, HeadBlock]:
    """Return an object that all views of one base share, the size of that base, and the block of ``x`` in it: for the order of results."""
    of, size, offset, strides = views.base_layout(x)
    block = None if of is x else _head_block(x.shape, heads, offset, strides, DTYPES[x.dtype].itemsize)
    return (x, x.size, new_block(heads, x.shape[-2], x.shape[-1])) if block is None else (of, size, block)


@lru_cache(1024)
def _head_block(shape: tuple[int, ...], heads: int, offset: int, strides: tuple[int, ...], itemsize: int) -> HeadBlock | None:
    """Return the block of a view; ``None`` unless rows are contiguous, and offset and strides are multiples of 16 bytes."""
    *lead, rows, depth = shape
    four = views.restrided(shape, strides, (math.prod(lead) // heads, heads, rows, depth)) if 0 not in shape else None
    if four is None or four[3] != 1 or any(n < 0 or n * itemsize % 16 for n in (offset, *four[:3])):
        return None
    return offset, four[0], four[1], four[2]


@lru_cache(1024)
def cover(size: int, sizes: HeadSizes, blocks: tuple[HeadBlock, HeadBlock, HeadBlock]) -> bool:
    """Whether the blocks of q, k and v contain each of ``size`` elements once: they are the three parts of one projection."""
    width, rows = blocks[0][3], sizes.n
    if sizes.m != rows or size != sizes.batch * rows * width:
        return False
    if any(row != width or (sizes.batch > 1 and batch != rows * width) for _, batch, _, row in blocks):
        return False
    counts, lengths = (sizes.heads, sizes.kv_heads, sizes.kv_heads), (sizes.depth, sizes.depth, sizes.depth_v)
    parts = sorted((at + i * head, n) for (at, _, head, _), count, n in zip(blocks, counts, lengths, strict=True) for i in range(count))
    ends = [0, *(start + n for start, n in parts)]
    return [start for start, _ in parts] == ends[:-1] and ends[-1] == width
