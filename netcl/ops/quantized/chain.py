"""Several products of a decoder in one launch, with weights that stay packed (chain.cl, row_chain.cl)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core import recording
from netcl.core.device import profile_of
from netcl.core.kernels import primitives
from netcl.core.tensor import Tensor, new_result
from netcl.engine import launch
from netcl.engine.strided import alignment
from netcl.engine.waiting import late_flag, may_wait, turns, watch
from netcl.ops.matmul import nvidia
from netcl.ops.quantized import plans
from netcl.ops.quantized.formats import Kind, quantize
from netcl.ops.quantized.layout import STRIP_ROWS, pack_strips, record_size

_WARPS = 8
_GOOD_STAGES, _MOST_STAGES = 4, 8
_PIECES = (256, 128)  # columns that a warp copies at a time
_BULK_WIDTH = 4096  # of x, from which one instruction copies a piece of an 8-bit kind
WIDE_PRODUCT = 1 << 26  # weights of a product that is a chain of its own
MOST_POINTERS = 500  # of a launch: arguments have 4352 bytes
_SHORT_CACHE = 1024  # positions
# Bytes of local memory of a work-group, from a compute capability on; 12.0 has as much as 8.6.
_LOCAL_MEMORY = {(9, 0): 224 << 10, (8, 8): 96 << 10, (8, 7): 160 << 10, (8, 6): 96 << 10, (8, 0): 160 << 10}


class DecoderLayer(NamedTuple):
    """The tensors of a layer of a decoder, in the order in which chain.cl has their pointers: projection, products, attention."""

    norm: Tensor | None = None
    projection: Tensor | None = None
    bias: Tensor | None = None
    out: Tensor | None = None
    mlp_norm: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    @property
    def packed(self) -> list[Tensor]:
        """The packed weights that the layer has."""
        return [w for w in (self.projection, self.out, self.gate, self.up, self.down) if w is not None]

    @property
    def plain(self) -> list[Tensor]:
        """The other tensors that the layer has."""
        return [t for i, t in enumerate(self) if t is not None and i not in (1, 3, 5, 6, 7)]


class Attention(NamedTuple):
    """What the attention of :func:`netcl.ops.decode_layers` has besides its layers."""

    lengths: Tensor
    frequencies: Tensor | None
    scale: float
    window: int
    eps: float


class Chain(NamedTuple):
    """The operands of :func:`netcl.ops.decode_layers`; of :func:`netcl.ops.decode_block`, with ``inside``; or of one product after a norm.

    A block has two layers: its own, and the norm, the projection and the bias of the next one. A product has only the second of these.
    ``parts``, DecodeParts of netcl.ops.decode, has the norm of the first layer and the activation.
    """

    kind: Kind
    x: Tensor
    layers: tuple[DecoderLayer, ...]
    parts: Any
    inner: int
    next: int  # rows of a projection, 0 for none
    next_eps: float
    activations: str
    inside: Tensor | None = None
    attention: Attention | None = None
    bulk: bool = False  # whether one instruction copies a piece also of narrow rows

    @property
    def tokens(self) -> int:
        return self.x.size // self.x.shape[-1]

    @property
    def columns(self) -> tuple[int, int, int]:
        """The columns of the products: of the attention's result, of x and of the gate's result."""
        width = self.x.shape[-1]
        if self.attention is not None:
            return self.next - 2 * self.key_heads * self.depth, width, self.inner
        return (width, width, width) if self.inside is None else (self.inside.shape[-1], width, self.inner)

    @property
    def computed(self) -> int:
        """The layers that are computed: without the one that only has a projection."""
        return len(self.layers) - (self.attention is None)

    @property
    def key_heads(self) -> int:
        return self.layers[0].keys.shape[1]  # type: ignore[union-attr]

    @property
    def depth(self) -> int:
        return self.layers[0].keys.shape[3]  # type: ignore[union-attr]

    @property
    def sharing(self) -> int:
        """Heads of queries for each head of keys."""
        return self.columns[0] // (self.key_heads * self.depth)

    @property
    def rows(self) -> int:
        """Queries that a work-group takes: few for short caches, to use many groups, and more for long ones, to share what is read."""
        short = self.layers[0].keys.shape[2] <= _SHORT_CACHE  # type: ignore[union-attr]
        return 1 if short else next(n for n in (4, 3, 2, 1) if self.sharing % n == 0)


def _chain_sizes(chain: Chain, profile: Any) -> dict[str, Any] | None:
    """Return the macros of chain.cl, or ``None`` if the activations and a ring of weights do not fit into local memory."""
    split = chain.x.dtype == "float32"
    kinds = 1 << (chain.tokens * (1 + split) - 1).bit_length()
    columns, size = record_size(chain.kind)
    capability = profile.compute_capability if profile.compute_capability < (12, 0) else (8, 6)
    room = next(size for least, size in _LOCAL_MEMORY.items() if capability >= least) - (4 * kinds * 16 + 1) * 4 * _WARPS - 1024
    least, more = 0, 0
    if chain.attention is not None:
        least = (chain.rows + 2) * chain.depth + _WARPS * chain.rows * (chain.depth + 3) + 4 * chain.rows
        more = 8 * (len(chain.layers) + 1) * len(DecoderLayer._fields) + 8 * chain.tokens * (chain.depth // 2 + 1)
    for piece in (max(n, columns) for n in _PIECES):
        widths = [-(-n // (piece * _WARPS)) * piece * _WARPS for n in chain.columns]  # of whole pieces for all warps
        runs = max(widths) // 32
        staged = max(runs * kinds * 16, least)
        stages = min(_MOST_STAGES, (room - 4 * staged - 4 * runs * kinds - more) // (_WARPS * piece // columns * size))
        if stages >= _GOOD_STAGES and widths == [*chain.columns]:
            break
    if kinds > 8 or stages < 2:
        return None
    bulk = chain.bulk or (chain.kind.bits == 8 and chain.columns[1] >= _BULK_WIDTH)
    bulk = bulk and widths == [*chain.columns] and profile.compute_capability >= (9, 0)
    return {
        "WARPS": _WARPS, "MT": 1, "DEEP": 1, "SETS": 1, "SPLIT": int(split), "KINDS": kinds, "WHOLE": 1, "X_HALVES": 0,
        "CHUNKED": 0, "STAGED": 1, "IN_LOCAL": 1, "STAGES": stages, "EACH": piece // 32, "MOST_RUNS": runs, "STAGED_WORDS": staged,
        "BULK": int(bulk), "HELD": -(-widths[1] // (4 * 32 * _WARPS)), "NEXT_EPS": float(chain.next_eps),
    }  # fmt: skip


def launch_of(chain: Chain) -> Callable[[], tuple[Tensor, ...]] | None:
    """Return a function that launches a chain and returns its results; ``None`` if the products need launches of their own."""
    x, queue, profile = chain.x, chain.x.queue, profile_of(chain.x.queue)
    if x.array is not None or not (chain.attention is None or nvidia.capable(profile)) or not _shapes_match(chain):
        return None
    plain = [t for t in (x, chain.inside, *(t for layer in chain.layers for t in layer.plain)) if t is not None]
    rows = chain.inside is not None and chain.tokens == 1 and not any(n % 32 for n in chain.columns)
    if rows and {t.dtype for t in plain} == {"float32"} and alignment(*plain) == 16 and plans.chains_rows(x, _packed_row(chain)):
        return partial(_launch_rows, chain)
    if not nvidia.capable(profile) or chain.kind.plain or chain.kind.codebook or (chain.computed and not may_wait(queue)):
        return None
    if {t.dtype for t in plain} != {x.dtype} or x.dtype == "float64" or any(n % STRIP_ROWS for n in chain.columns[1:]):
        return None
    if chain.attention is not None and chain.depth not in (32, 64, 128, 256):
        return None
    if alignment(*plain, *(w for layer in chain.layers for w in layer.packed)) < 16 or (sizes := _chain_sizes(chain, profile)) is None:
        return None
    tier = "layers" if chain.attention is not None else "chain" if chain.computed else "product"
    tier, bulk = tier + " in bulk" * sizes["BULK"], bool(sizes["BULK"])
    right = nvidia.verdict(queue, "decode_block", tier, chain.kind.name, lambda own: _chain_right(own, chain, bulk), apart=False)
    return partial(launch_chain, chain) if right else None


def _shapes_match(chain: Chain) -> bool:
    """Whether all tensors but packed weights have the shapes that kernels expect. Ops for single products say what is wrong otherwise."""
    width, attention, cache = (chain.x.shape[-1],), chain.attention, None if chain.attention is None else chain.layers[0].keys
    shapes: dict[str, tuple[int, ...]] = {"norm": width, "mlp_norm": width, "bias": (chain.next,)}
    if attention is not None and cache is not None:
        turned, lengths = attention.frequencies, attention.lengths
        if chain.columns[0] // chain.depth % chain.key_heads or (turned is not None and 2 * turned.size > chain.depth):
            return False
        if cache.shape[0] != chain.tokens or lengths.shape != (chain.tokens,) or lengths.dtype not in ("int32", "int64"):
            return False
        shapes |= {"keys": cache.shape, "values": cache.shape, "query_norm": (chain.depth,), "key_norm": (chain.depth,)}
    there = ((name, t) for layer in chain.layers for name, t in zip(DecoderLayer._fields, layer, strict=True) if t is not None)
    return all(t.shape == shapes[name] for name, t in there if name in shapes)


_POINTED_TYPES = {"norm": "const NORM_T", "bias": "const BIAS_T", "mlp_norm": "const NORM_T", "keys": "X_T", "values": "X_T",
               "query_norm": "const NORM_T", "key_norm": "const NORM_T"}  # fmt: skip
_ATTENTION_POINTERS = "__global const P_T* lengths, __global const float* frequencies, "
_ATTENTION_NUMBERS = ", const int positions, const int window, const float scale"


def _pointer_macros(chain: Chain) -> dict[str, str]:
    """Return the macros of chain.cl for the pointers of all layers: parameters, and statements that put them into a table."""
    attends = chain.attention is not None
    width = len(DecoderLayer._fields) if attends else DecoderLayer._fields.index("keys")
    there = [(name, i, at) for i, layer in enumerate(chain.layers) for at, name in enumerate(DecoderLayer._fields) if layer[at] is not None]
    return {
        "LAYER_POINTERS": "".join(f"__global {_POINTED_TYPES.get(name, 'const uchar')}* {name}_{i}, " for name, i, _ in there),
        "KEEP_POINTERS": " ".join(f"table[{i * width + at}] = (ulong){name}_{i};" for name, i, at in there),
        "ATTENTION_POINTERS": _ATTENTION_POINTERS if attends else "__global const X_T* inside, __global X_T* z, ",
        "ATTENTION_NUMBERS": _ATTENTION_NUMBERS if attends else "",
    }


def launch_chain(chain: Chain) -> tuple[Tensor, ...]:
    """Launch a chain for which :func:`launch_of` returned this function, or further layers of it."""
    x, queue, profile, items, attention = chain.x, chain.x.queue, profile_of(chain.x.queue), 32 * _WARPS, chain.attention
    sizes = _chain_sizes(chain, profile)
    assert sizes is not None
    quads = {"float16": "quad_float16(p)"}
    dtypes, around, code = chain.parts.text("X", "uchar", items, quads)
    macros = {"X_QUAD(p)": {**launch.QUADS, **quads}[x.dtype], **plans.kind_macros(chain.kind, 2, CLANG=0, ASM=0), **around, **sizes}
    macros |= {"ATTEND": int(attention is not None), "LAYERS": chain.computed, **_pointer_macros(chain)}
    text = primitives.cl_source(nvidia.__file__, "ptx.cl") + chain.parts.epilogue.source("float", 1, False) + code
    operands = {**dtypes, "X": x.dtype, "Y": x.dtype, "BIAS": x.dtype}
    tokens, (attended, width, inner) = chain.tokens, chain.columns
    found = [new_result(x.shape, x.dtype, queue)] if chain.computed else []
    if chain.next and attention is None:
        found.append(new_result((*x.shape[:-1], chain.next), x.dtype, queue))
    made, more = tokens * (attended + 2 * width + inner + chain.next), tuple[float, ...]()
    own: tuple[Tensor, ...] = (x if chain.inside is None else chain.inside, found[-1])
    if attention is not None:
        macros |= {
            "MOST_TOKENS": tokens, "KEY_HEADS": chain.key_heads, "SHARING": chain.sharing, "DEPTH": chain.depth, "ROWS": chain.rows,
            "ROTARY": 0 if attention.frequencies is None else 2 * attention.frequencies.size,
            "HEAD_NORM": int(chain.layers[0].query_norm is not None), "HEAD_EPS": float(attention.eps),
        }  # fmt: skip
        operands["P"] = attention.lengths.dtype
        blocks = tokens * chain.key_heads * chain.sharing // chain.rows
        made += blocks * max(1, profile.max_compute_units // blocks) * chain.rows * (chain.depth + 4)
        own = (attention.lengths, x if attention.frequencies is None else attention.frequencies)
        more = (chain.layers[0].keys.shape[2], attention.window, float(attention.scale))  # type: ignore[union-attr]
    files = f"codes.cl mma.cl results.cl {'attend.cl ' if attention else ''}chain.cl"
    kernel = launch.kernel(queue, __file__, files, "strips_chain", operands, macros, text)
    results = x
    if chain.computed:  # groups wait for each other
        results = Tensor.full((chain.computed * made,), -1, "int32", queue=queue)  # MISSING
        recording.again(watch(queue))
    pointers = (*(t for layer in chain.layers for t in layer if t is not None), *own, x, found[0], results, late_flag(queue))
    numbers = (attended, width, inner, chain.next, tokens, int(chain.layers[-1].bias is not None))
    kernel(queue, profile.max_compute_units * items, items, *pointers, *numbers, *more)
    return tuple(found)


def _packed_row(chain: Chain) -> plans.Packed:
    """Return the first product of a chain of one token."""
    columns, rows, _ = chain.columns
    return plans.Packed(chain.kind, rows, columns, 1, "float32", chain.activations)


def _launch_rows(chain: Chain) -> tuple[Tensor, ...]:
    """Compute a chain of one token with row_chain.cl, in one launch."""
    x, queue, (attended, width, inner), (own, after) = chain.x, chain.x.queue, chain.columns, chain.layers
    h, y = (new_result(x.shape, x.dtype, queue) for _ in range(2))
    z = new_result((*x.shape[:-1], chain.next), x.dtype, queue) if chain.next else None
    optional = (y if t is None else t for t in (after.projection, after.norm, after.bias, z))  # y stands in for what is missing
    following, next_norm, bias, last = optional
    operands = plans.PackedOperands(x, own.packed[0], bias, y)
    epilogue, p = chain.parts.epilogue.source("float", 4, False), _packed_row(chain)
    kernel, record = plans.row_chain(p, operands, epilogue, z is not None)
    scratch = Tensor.empty(((attended + 2 * width + inner) // 32 * record + 2 * 4 * width // 32,), "int8", queue=queue)
    pointers = (own.out, own.gate, own.up, own.down, following, chain.inside, x, own.mlp_norm, next_norm, bias, h, y, last, scratch)
    numbers = (attended, width, inner, chain.next, int(after.bias is not None), float(chain.parts.eps), float(chain.next_eps))
    kernel(queue, profile_of(queue).max_compute_units, 1, *pointers, turns(queue), *numbers)
    return (y,) if z is None else (y, z)


def _chain_right(queue: Any, chain: Chain, bulk: bool) -> bool:
    """Whether a small chain of the same kind agrees with the ops on the NumPy backend. In bulk, its rows are whole pieces."""
    rng, (attended, width, inner, rows), tokens = np.random.default_rng(0), (1024, 1024, 1024, 1536) if bulk else (512, 256, 768, 1024), 2
    shapes = ((width, attended), (inner, width), (inner, width), (width, inner), (rows, width))
    matrices = (rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32) for shape in shapes)
    out, gate, up, down, following = (pack_strips(quantize(a, chain.kind), chain.kind, a.shape) for a in matrices)
    drawn: list[tuple[int, ...]] = [(tokens, 1, width), (tokens, 1, attended), (width,), (tokens, 4, 600, 64), (tokens, 4, 600, 64)]
    x, inside, norm, keys, values = (rng.standard_normal(shape, np.float32) for shape in drawn)
    put, own, lengths = partial(Tensor.from_host, queue), [norm, following, out, norm, gate, up, down], np.array([0, 550], np.int32)
    first, after, *products = map(put, own)
    mlp = DecoderLayer(None, None, None, *products)
    layer = mlp._replace(norm=first, projection=after, keys=put(keys), values=put(values))
    epilogue = chain.parts.epilogue._replace(dtype="float32", activation="relu")
    parts = chain.parts._replace(epilogue=epilogue, gate=layer.gate, norm_weight=first)
    small = Chain(chain.kind, put(x), (layer, layer._replace(keys=layer.values, values=layer.keys)), parts, inner, rows, parts.eps, "float",
                  attention=Attention(put(lengths), None, 0.125, 0, 0.0), bulk=bulk)  # fmt: skip
    options = {"kind": chain.kind.name, "activations": "float", "eps": parts.eps}
    more = {**options, "inner": inner, "activation": "relu"}
    if not chain.computed:
        small = small._replace(layers=(DecoderLayer(first, after),), attention=None)
        exact = launch.numpy_reference("decode_linear", x, following, *[None] * 4, norm, norm="rms", rows=rows, **options)
    elif chain.attention is None:
        small = small._replace(layers=(mlp, DecoderLayer(first, after)), attention=None, inside=put(inside))
        given = (inside, x, *own[2:], norm, following)
        exact = launch.numpy_reference("decode_block", *given, next_rows=rows, next_eps=parts.eps, **more)
    else:
        layers = [*own, keys, values, *own, values, keys]
        exact = launch.numpy_reference("decode_layers", x, lengths, None, layers, heads=attended // 64, count=2, **more)
    late_flag(queue).fill_(0)
    pairs = zip(launch_chain(small), exact if isinstance(exact, tuple) else (exact,), strict=True)
    near = [np.abs(a.to_host() - b).max() <= 2**-16 * np.abs(b).max() for a, b in pairs]
    return not late_flag(queue).item() and all(near)
