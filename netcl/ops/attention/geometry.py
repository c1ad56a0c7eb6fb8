"""The sizes of an attention call: heads, groups of heads that share keys and values, strides of the mask and of blocks in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.strided import dense
from netcl.ops.movement import expand
from netcl.ops.views import restrided

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

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Heads, rows and head size of q, k, v and the result."""
        ours, theirs = (self.heads, self.n), (self.kv_heads, self.m)
        return (*ours, self.depth), (*theirs, self.depth), (*theirs, self.depth_v), (*ours, self.depth_v)

    @property
    def contiguous(self) -> tuple[HeadBlock, ...]:
        """The blocks of q, k, v and the result, if these are contiguous."""
        return tuple(new_block(*part) for part in self.parts)

    def shapes(self, queries: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of q, k and v for queries of a shape."""
        rows = (*queries[:-3], *(self.kv_heads,)[: len(queries) - 2], self.m)
        return queries, (*rows, self.depth), (*rows, self.depth_v)


def attention_geometry(op: str, q: Tensor, k: Tensor, v: Tensor) -> HeadSizes:
    """Return the sizes of a call; raises ``ShapeError`` or ``DtypeError`` if the operands do not fit together."""
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(message(op, "q, k and v must have the same dtype", q=q.dtype, k=k.dtype, v=v.dtype))
    launch.check_dtype(op, q, name="q")
    return _head_sizes(op, q.shape, k.shape, v.shape)


@lru_cache(1024)
def _head_sizes(op: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> HeadSizes:
    shapes = {"q": q, "k": k, "v": v}
    if min(map(len, (q, k, v))) < 2 or k[:-1] != v[:-1] or len(q) != len(k):
        raise ShapeError(message(op, "q, k and v must be (..., N, D), (..., M, D) and (..., M, Dv)", **shapes))
    if q[-1] != k[-1]:
        raise ShapeError(message(op, f"q and k must have the same head size, got {q[-1]} and {k[-1]}", **shapes))
    if max(q[-1], v[-1]) > LARGEST:
        raise ShapeError(message(op, f"head sizes must be at most {LARGEST}", **shapes))
    heads, kv_heads = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k))
    if q[:-3] != k[:-3] or (heads != kv_heads and (not kv_heads or heads % kv_heads)):
        raise ShapeError(message(op, "k and v must have the batch axes of q, and their number of heads must divide that of q", **shapes))
    return HeadSizes(math.prod(q[:-3]), heads, heads // kv_heads if kv_heads else 1, q[-2], k[-2], q[-1], v[-1])


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


def numbers_of(sizes: HeadSizes, blocks: Sequence[HeadBlock]) -> tuple[int, ...]:
    """Return sizes and blocks as one tuple of integers, which makes a short key of a plan. :func:`numbers_read` is the inverse."""
    return (*sizes, *[n for block in blocks for n in block])


def numbers_read(numbers: tuple[int, ...]) -> tuple[HeadSizes, tuple[HeadBlock, ...]]:
    """Return the sizes and the blocks in ``numbers``."""
    blocks = [numbers[i : i + 4] for i in range(7, len(numbers), 4)]
    return HeadSizes(*numbers[:7]), tuple(blocks)  # type: ignore[arg-type]


class HeadLayout(NamedTuple):
    """Where the tensors of a call lie in memory.

    ``from_base``: per operand, whether it is read from its base. ``numbers``: :func:`numbers_of` the blocks of operands and results.
    ``views``: offset and strides of each result in its memory; ``None`` if it is contiguous. ``joint``: the size of the memory that all
    results share; 0 if they share none.
    """

    from_base: tuple[bool, ...]
    numbers: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...]] | None, ...]
    joint: int


#: An operand: its shape; whether it is a pending view, so that its base can be read; offset and strides in the base.
HeadOperand = tuple[tuple[int, ...], bool, int, tuple[int, ...]]


@lru_cache(1024)
def layout_of(sizes: HeadSizes, operands: tuple[HeadOperand, ...], shared: int, itemsize: int, cpu: bool) -> HeadLayout:
    """Return the layout of a call over views of q, k, v and, for gradients, of the gradient of the result and of the result.

    GPUs read views in their base; CPUs only the result, because rows that are read again for every few queries must be close together.
    If heads of a row lie side by side in an operand, they do in the result, so that joining them is no copy. Gradients have the order of
    their operands. If q, k and v are the parts of one tensor of ``shared`` elements, their gradients are the same parts of another one.
    """
    heads, shapes = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads, sizes.heads), [shape for shape, *_ in operands]
    found = [_head_block(shape, n, at, strides, itemsize) for n, (shape, _, at, strides) in zip(heads, operands, strict=False)]
    plain = [new_block(n, shape[-2], shape[-1]) for n, shape in zip(heads, shapes, strict=False)]
    from_base = [block is not None and operands[i][1] and (i == 4 or not cpu) for i, block in enumerate(found)]
    blocks = [b if a is None else a for a, b in zip(found, plain, strict=True)]
    read = [a if base else b for a, b, base in zip(blocks, plain, from_base, strict=True)]
    by_row, joint = [block[3] > block[2] for block in blocks], 0
    if len(operands) == 3:
        shapes, made = [(*shapes[0][:-1], sizes.depth_v)], [new_block(sizes.heads, sizes.n, sizes.depth_v, any(by_row))]
    elif _covers(shared, sizes, blocks[:3]):
        joint, made = shared, blocks[:3]
    else:
        made = [new_block(n, shape[-2], shape[-1], b) for n, shape, b in zip(heads[:3], shapes, by_row, strict=False)]
    return HeadLayout(tuple(from_base), numbers_of(sizes, (*read, *made)), tuple(map(_view_of, shapes, made)), joint)


def _view_of(shape: tuple[int, ...], block: HeadBlock) -> tuple[int, tuple[int, ...]] | None:
    """Return offset and strides of the tensor of ``shape`` in a block; ``None`` if it is contiguous."""
    offset, batch, *steps = block
    strides = (*(batch * n for n in dense(shape[:-3])), *steps, 1)[-len(shape) :]
    return None if strides == dense(shape) else (offset, strides)


def _head_block(shape: tuple[int, ...], heads: int, offset: int, strides: tuple[int, ...], itemsize: int) -> HeadBlock | None:
    """Return the block of a view; ``None`` unless rows are contiguous, and offset and strides are multiples of 16 bytes."""
    *lead, rows, depth = shape
    four = restrided(shape, strides, (math.prod(lead) // heads, heads, rows, depth))
    if four is None or four[3] != 1 or any(n < 0 or n * itemsize % 16 for n in (offset, *four[:3])):
        return None
    return offset, four[0], four[1], four[2]


def _covers(size: int, sizes: HeadSizes, blocks: Sequence[HeadBlock]) -> bool:
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
