"""The products between two attentions of a decoder in one launch, with weights that stay packed (chain.cl)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core import recording
from netcl.core.device import profile_of
from netcl.core.kernels import primitives
from netcl.core.tensor import Tensor, new_result
from netcl.engine import launch
from netcl.engine.strided import alignment
from netcl.engine.waiting import counters, late_flag, may_wait, turns, watch
from netcl.ops.matmul import nvidia
from netcl.ops.quantized import plans
from netcl.ops.quantized.formats import Kind, dequantize, quantize
from netcl.ops.quantized.layout import STRIP_ROWS, pack_strips, record_size

_WARPS, _TEAMS = 8, 2
_RUNS_AT_ONCE = (8, 4)  # of a warp, for kinds whose records are one run of 32 columns
_MOST_STAGES = 8
# Bytes of local memory of a work-group, from a compute capability on; 12.0 has as much as 8.6.
_LOCAL_MEMORY = {(9, 0): 224 << 10, (8, 8): 96 << 10, (8, 7): 160 << 10, (8, 6): 96 << 10, (8, 0): 160 << 10}


class Chain(NamedTuple):
    """The operands of :func:`netcl.ops.decode_block`. ``parts``, DecodeParts of netcl.ops.decode, has the first norm and the gate."""

    kind: Kind
    inside: Tensor
    x: Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor | None]  # out, up, down, next
    parts: Any
    next_norm: Tensor | None
    next_bias: Tensor | None
    inner: int
    next: int  # rows of the next product, 0 for none
    next_eps: float
    activations: str

    @property
    def tokens(self) -> int:
        return self.x.size // self.x.shape[-1]

    @property
    def columns(self) -> tuple[int, int, int]:
        """The columns of the products: of ``inside``, of x and of the gate's result."""
        return self.inside.shape[-1], self.x.shape[-1], self.inner


def _chain_sizes(chain: Chain, profile: Any) -> dict[str, Any] | None:
    """Return the macros of chain.cl, or ``None`` if the activations and a ring of weights do not fit into local memory."""
    scaled, split = "scales" in chain.kind.fields, chain.x.dtype == "float32"
    kinds = 1 << (chain.tokens * (1 + split) - 1).bit_length()
    runs, size = max(chain.columns) // 32, record_size(chain.kind)[1]
    capability = profile.compute_capability if profile.compute_capability < (12, 0) else (8, 6)
    room = next(size for least, size in _LOCAL_MEMORY.items() if capability >= least)
    room -= runs * kinds * (64 + 4) + (4 * kinds * 16 + 1) * 4 * _WARPS * _TEAMS + 256
    most = min(room // (4 * _TEAMS * size), min(chain.columns) // 64)  # runs: four pieces fit, and every product has two
    chunk = _WARPS * (1 if scaled else next((n for n in _RUNS_AT_ONCE if n * _WARPS <= most), _RUNS_AT_ONCE[-1]))
    stages = min(_MOST_STAGES, room // (_TEAMS * chunk * size))
    if kinds > 8 or stages < 3:
        return None
    return {
        "WARPS": _WARPS, "TEAMS": _TEAMS, "MT": 1, "DEEP": 1, "SETS": 1, "SPLIT": int(split), "KINDS": kinds, "WHOLE": 1, "X_HALVES": 0,
        "CHUNKED": 0, "STAGED": 1, "IN_LOCAL": 1, "CHUNK": chunk, "STAGES": stages, "MOST_RUNS": runs, "PHASES": 4 if chain.next else 3,
        "HELD": -(-chain.columns[1] // (4 * 32 * _WARPS * _TEAMS)), "NEXT_EPS": float(chain.next_eps),
    }  # fmt: skip


def launch_of(chain: Chain) -> Callable[[], tuple[Tensor, ...]] | None:
    """Return a function that launches a chain and returns its results; ``None`` if the products need launches of their own."""
    queue, profile, dtype = chain.x.queue, profile_of(chain.x.queue), chain.x.dtype
    given = [t for t in (chain.inside, chain.x, chain.parts.norm_weight, chain.next_norm, chain.next_bias) if t is not None]
    if chain.x.array is None and _in_rows(chain, given):
        return partial(_launch_rows, chain)
    if chain.x.array is not None or not nvidia.capable(profile) or chain.kind.plain or chain.kind.codebook or not may_wait(queue):
        return None
    if {t.dtype for t in given} != {dtype} or dtype == "float64" or any(n % STRIP_ROWS for n in (*chain.columns[1:], chain.next)):
        return None
    if alignment(*given, chain.parts.gate, *(w for w in chain.weights if w is not None)) < 16 or _chain_sizes(chain, profile) is None:
        return None
    right = nvidia.verdict(queue, "decode_block", "chain", chain.kind.name, lambda own: _chain_right(own, chain), apart=False)
    return partial(_launch_chain, queue, chain, profile) if right else None


def _launch_chain(queue: Any, chain: Chain, profile: Any) -> tuple[Tensor, ...]:
    x, sizes, items = chain.x, _chain_sizes(chain, profile), 32 * _WARPS * _TEAMS
    assert sizes is not None
    quads = {"float16": "quad_float16(p)"}
    dtypes, around, code = chain.parts.text("X", "uchar", items, quads)
    macros = {"X_QUAD(p)": {**launch.QUADS, **quads}[x.dtype], **plans.kind_macros(chain.kind, 2, CLANG=0, ASM=0), **around, **sizes}
    text = primitives.cl_source(nvidia.__file__, "ptx.cl") + chain.parts.finish.source("float", 1, False) + code
    operands = {**dtypes, "X": x.dtype, "Y": x.dtype, "BIAS": x.dtype}
    kernel = launch.kernel(queue, __file__, "codes.cl mma.cl chain.cl", "strips_chain", operands, macros, text)
    tokens, (attended, width, inner) = chain.tokens, chain.columns
    h, f, y = (new_result(shape, x.dtype, queue) for shape in ((tokens, width), (tokens, inner), x.shape))
    z = new_result((*x.shape[:-1], chain.next), x.dtype, queue) if chain.next else None
    out, up, down, following = chain.weights
    norm, optional = chain.parts.norm_weight, (following, chain.next_norm, chain.next_bias, z)
    following, next_norm, bias, last = (y if t is None else t for t in optional)  # y stands in for what is missing
    recording.again(watch(queue))
    pointers = (out, chain.parts.gate, up, down, following, chain.inside, x, norm, next_norm, bias, h, f, y, last)
    numbers = (attended, width, inner, chain.next, tokens, int(chain.next_bias is not None))
    kernel(queue, profile.max_compute_units * items, items, *pointers, counters(queue), late_flag(queue), *numbers)
    return (y,) if z is None else (y, z)


def _in_rows(chain: Chain, given: Sequence[Tensor]) -> bool:
    whole = chain.tokens == 1 and not any(n % 32 for n in chain.columns) and {t.dtype for t in given} == {"float32"}
    return whole and alignment(*given) == 16 and plans.chains_rows(chain.x, _packed_row(chain, *chain.columns[:2]))


def _packed_row(chain: Chain, columns: int, rows: int) -> plans.Packed:
    return plans.Packed(chain.kind, rows, columns, 1, "float32", chain.activations)


def _launch_rows(chain: Chain) -> tuple[Tensor, ...]:
    """Compute a chain of one token with row_chain.cl, in one launch."""
    x, queue, (attended, width, inner) = chain.x, chain.x.queue, chain.columns
    out, up, down, following = chain.weights
    h, y = (new_result(x.shape, x.dtype, queue) for _ in range(2))
    z = new_result((*x.shape[:-1], chain.next), x.dtype, queue) if chain.next else None
    optional = (y if t is None else t for t in (following, chain.next_norm, chain.next_bias, z))  # y stands in for what is missing
    following, next_norm, bias, last = optional
    operands = plans.PackedOperands(x, out, bias, y)
    finish, p = chain.parts.finish.source("float", 4, False), _packed_row(chain, attended, width)
    kernel, record = plans.row_chain(p, operands, finish, z is not None)
    scratch = Tensor.empty(((attended + 2 * width + inner) // 32 * record + 2 * 4 * width // 32,), "int8", queue=queue)
    pointers = (out, chain.parts.gate, up, down, following, chain.inside, x, chain.parts.norm_weight, next_norm, bias, h, y, last, scratch)
    numbers = (attended, width, inner, chain.next, int(chain.next_bias is not None), float(chain.parts.eps), float(chain.next_eps))
    kernel(queue, profile_of(queue).max_compute_units, 1, *pointers, turns(queue), *numbers)
    return (y,) if z is None else (y, z)


def chain_arrays(
    inside: np.ndarray, x: np.ndarray, weights: Sequence[np.ndarray], norms: Sequence[np.ndarray | None], eps: Sequence[float],
    activation: Callable[[np.ndarray], np.ndarray], bias: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Compute a chain with NumPy. ``weights``: unpacked, of out, gate, up, down and, if there is one, next. ``norms``, ``eps``: of both."""

    def normed(a: np.ndarray, which: int) -> np.ndarray:
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + eps[which]) * norms[which]

    out, gate, up, down, *following = weights
    h = x + inside @ out.T
    y = h + (activation(normed(h, 0) @ gate.T) * (normed(h, 0) @ up.T)) @ down.T
    return (y, *(normed(y, 1) @ w.T + bias for w in following))


def _chain_right(queue: Any, chain: Chain) -> bool:
    """Whether a small chain of the same kind agrees with NumPy's result."""
    rng, (attended, width, inner, rows), tokens = np.random.default_rng(0), (512, 256, 768, 320), 2
    shapes = ((width, attended), (inner, width), (inner, width), (width, inner), (rows, width))
    blocks = [quantize(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32), chain.kind) for shape in shapes]
    values = [dequantize(block, chain.kind, shape).astype(np.float64) for block, shape in zip(blocks, shapes, strict=True)]
    inside, x, norm = (rng.standard_normal(shape, np.float32) for shape in ((tokens, attended), (tokens, width), (width,)))
    packed = (pack_strips(block, chain.kind, shape) for block, shape in zip(blocks, shapes, strict=True))
    out, gate, up, down, following, weight, own, residual = (Tensor.from_host(queue, a) for a in (*packed, norm, inside, x))
    finish = chain.parts.finish._replace(dtype="float32", activation="relu")
    parts = chain.parts._replace(finish=finish, gate=gate, norm_weight=weight)
    late_flag(queue).fill_(0)
    small = Chain(chain.kind, own, residual, (out, up, down, following), parts, weight, None, inner, rows, parts.eps, "float")
    found = _launch_chain(queue, small, profile_of(queue))
    exact = chain_arrays(inside, x, values, (norm, norm), (parts.eps, parts.eps), lambda a: np.maximum(a, 0))
    near = [np.abs(a.to_host() - b).max() <= 2**-16 * np.abs(b).max() for a, b in zip(found, exact, strict=True)]
    return not late_flag(queue).item() and all(near)
