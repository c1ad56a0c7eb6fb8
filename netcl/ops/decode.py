"""Linear layers of a decoder's step: a product with the norm before it and the gate or residual after it, if possible in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core.device import CPUQueue, profile_of
from netcl.core.errors import ShapeError, message
from netcl.core.kernels import primitives
from netcl.core.tensor import Tensor, new_result, with_shape
from netcl.core.writes import wrote
from netcl.engine import launch
from netcl.engine.pointwise import run
from netcl.engine.registry import REGISTRY, S, Sample, op
from netcl.engine.strided import alignment
from netcl.ops.attention import cached_attention
from netcl.ops.attention.cached import cached_arrays
from netcl.ops.attention.geometry import score_scale
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import affine, gemm
from netcl.ops.norm import row_norm
from netcl.ops.pointwise import cast
from netcl.ops.quantized import chain, packed_problem, packed_weight, plans, quantized_linear, weight_values
from netcl.ops.quantized.formats import kind_of
from netcl.ops.quantized.layout import STRIP_ROWS

DECODED_ROWS = 8  # most rows of x that one launch takes
#: Rows of activations by the names of :func:`decode_linear`.
DECODE_ACTIVATIONS = {"": "", "relu": "relu", "silu": "silu", "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh"}


class DecodeParts(NamedTuple):
    """The norm, gate, residual and epilogue that a kernel computes together with a product (decode.cl)."""

    epilogue: Epilogue
    norm: str
    eps: float
    gate: Tensor | None
    gate_bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None

    def text(self, row: str, weight: str, items: int, quads: dict[str, str]) -> tuple[dict[str, str], dict[str, Any], str]:
        """Return dtypes, macros and source of decode.cl. ``row``: macro prefix of x; ``weight``: C type of w; ``quads``: loads by dtype."""
        named = {"NORM": self.norm_weight, "GATE_BIAS": self.gate_bias, "ADDED": self.residual}
        operands = {name: "float32" if t is None else t.dtype for name, t in named.items()}
        return operands, {
            "NORM": ("", "rms", "layer").index(self.norm), "NORM_SHIFTED": int(self.norm_bias is not None), "EPS": float(self.eps),
            "GATED": int(self.gate is not None), "GATE_BIASED": int(self.gate_bias is not None), "GROUP_ITEMS": items,
            "ADDED": int(self.residual is not None), "ROW_T": f"{row}_T", "ROW_QUAD(p)": f"{row}_QUAD(p)", "WEIGHT_T": weight,
            "NORM_QUAD(p)": {**launch.QUADS, **quads}[operands["NORM"]],
        }, primitives.cl_source(__file__, "decode.cl")  # fmt: skip

    def pointers(self, out: Tensor) -> list[Tensor]:
        """Return the arguments of EXTRA_POINTERS; ``out`` stands in for a missing tensor."""
        return [out if t is None else t for t in (self.gate, self.gate_bias, self.norm_weight, self.norm_bias)]


def decodes_together(x: Tensor) -> bool:
    """Whether :func:`decode_linear` may run products with ``x`` as one launch: at most eight rows, on a GPU."""
    queue = x.queue
    return x.ndim > 0 and x.size <= DECODED_ROWS * x.shape[-1] and not isinstance(queue, CPUQueue) and not launch.on_cpu_device(queue)


def multiplies_halves(weight: Tensor) -> bool:
    """Whether the device of a matrix is a CPU that multiplies F16 weights faster than float32: one with NEON, or with AVX and clang."""
    rows, columns = weight.shape
    row = plans.Packed(kind_of("F16", "decode_block"), rows, columns, 1, "float32")
    return not isinstance(weight.queue, CPUQueue) and plans.chains_rows(weight, row)


def decodes_in_blocks(x: Tensor, kind: str, activations: str) -> bool:
    """Whether :func:`decode_block` saves launches for ``x``: on GPUs if :func:`decodes_together`, on CPUs for one row."""
    if isinstance(x.queue, CPUQueue) or not launch.on_cpu_device(x.queue):
        return decodes_together(x)
    row = plans.Packed(kind_of(kind, "decode_block"), STRIP_ROWS, x.shape[-1], 1, x.dtype, activations)
    return x.dtype == "float32" and x.size == x.shape[-1] and plans.chains_rows(x, row)


_Q4 = partial(packed_weight, 20, 64, "Q4_0")
_OF_Q4: dict[str, Any] = {"kind": "Q4_0", "rows": 20, "activations": "float"}


@op(
    vjp=None, ref="numpy", tol=4,
    samples=[
        S((2, 64), (66, 64), (66,), None, None, (2, 66), (64,), (64,), norm="layer"),
        S((1, 1, 64), (70, 64), None, (70, 64), None, None, (64,), norm="rms", activation="silu"),
        S((3, 64), _Q4, (20,), _Q4, (20,), None, (64,), norm="rms", activation="gelu_tanh", **_OF_Q4),
        S((1, 64), _Q4, None, None, None, (1, 20), **_OF_Q4), S((9, 8), (3, 8), (3,), activation="gelu"),
    ],
    errors=[
        (S((2, 8), (3, 8), norm="rms"), r"\[decode_linear\] norm must be empty, or rms or layer with norm_weight; given='rms'"),
        (S((2, 64), partial(packed_weight, 20, 64, "Q8_0"), **_OF_Q4), r"\[decode_linear\] weight must be 1152 bytes .*, size=2176"),
        (S((2, 8), (3, 8), None, (4, 8)), r"\[decode_linear\] gate must have the shape and dtype of weight; given=\(4, 8\)"),
    ],
)  # fmt: skip
def decode_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gate: Tensor | None = None, gate_bias: Tensor | None = None,
    residual: Tensor | None = None, norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, *, kind: str = "", rows: int = 0,
    activations: str = "auto", norm: str = "", eps: float = 1e-5, activation: str = "",
) -> Tensor:  # fmt: skip
    """``activation(y) + residual`` for ``y = norm(x) w' + bias``; with a gate ``activation(norm(x) gate' + gate_bias) * y + residual``.

    Up to eight rows of x on a GPU are one launch if a kernel supports all parts; otherwise the ops run one by one. There is no gradient.

    - **weight**, **gate**: matrices (out, in); with ``kind``, packed bytes of ``rows`` rows, as in :func:`quantized_linear`.
    - **norm**: ``rms`` or ``layer`` over the last axis of x, with **norm_weight**, **norm_bias** and **eps**.
    - **activation**: ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``.
    """
    x, weight, bias, gate, gate_bias, residual, norm_weight, norm_bias = launch.as_tensors(
        "decode_linear", x, weight, bias, gate, gate_bias, residual, norm_weight, norm_bias
    )
    launch.check_dtype("decode_linear", x)
    shape = (*x.shape[:-1], rows if kind else weight.shape[0])
    for fits, what, given in (
        (not norm or (norm in ("rms", "layer") and norm_weight is not None), "norm must be empty, or rms or layer with norm_weight", norm),
        (activation in DECODE_ACTIVATIONS, f"activation must be empty or {', '.join(filter(None, DECODE_ACTIVATIONS))}", activation),
        (gate is None or (gate.shape, gate.dtype) == (weight.shape, weight.dtype), "gate must have the shape and dtype of weight", gate),
        (residual is None or residual.shape == shape, "residual must have the shape of the result", residual),
    ):  # fmt: skip
        if not fits:
            extra = {"dtype": given.dtype, "weight": (weight.shape, weight.dtype), "result": shape} if isinstance(given, Tensor) else {}
            raise ShapeError(message("decode_linear", what, given=repr(getattr(given, "shape", given)), **extra))
    if kind:
        packed_problem("decode_linear", x, weight, kind, (rows, x.shape[-1] if x.shape else 1), activations)
    row: Any = DECODE_ACTIVATIONS[activation]
    epilogue = Epilogue(x.dtype, "" if residual is None else residual.dtype, row)
    parts = DecodeParts(epilogue, norm, eps, gate, gate_bias, residual, norm_weight, norm_bias)
    if (out := _in_one_launch(parts, x, weight, bias, kind, rows, activations)) is not None:
        return out
    x = row_norm(x, norm_weight, norm_bias, centered=norm == "layer", eps=eps)[0] if norm else x
    of, rows_of = (quantized_linear, {"kind": kind, "rows": rows, "activations": activations}) if kind else (affine, {})
    y, table = of(x, weight, bias, **rows_of), dict[str, Any](REGISTRY)
    acted = of(x, gate, gate_bias, **rows_of) if gate is not None else y
    acted = run(table[row], (acted,)) if row else acted
    y = acted if gate is None else run(table["mul"], (acted, y))
    return y if residual is None else run(table["add"], (y, residual))


def _in_one_launch(parts: DecodeParts, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, rows: int,
                   activations: str) -> Tensor | None:  # fmt: skip
    """Compute all parts by one kernel, a wide product after an RMS norm as a chain (chain.py); ``None`` if no kernel computes them."""
    tokens, columns = math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 0
    if x.array is not None or not 0 < tokens <= DECODED_ROWS or not columns:
        return None
    row = kind_of(kind, "decode_linear") if kind else None
    alone = parts.norm == "rms" and not parts.epilogue.activation and all(t is None for t in (parts.gate, parts.residual, parts.norm_bias))
    # Narrow products, and those of fewer bits, are as fast without a chain (benchmarks/results/decode_block_h200.txt).
    if row is not None and alone and rows * columns >= chain.WIDE_PRODUCT and row.bits >= 6:
        layer = chain.DecoderLayer(parts.norm_weight, weight, bias)
        if (single := chain.launch_of(chain.Chain(row, x, (layer,), parts, 0, rows, parts.eps, activations))) is not None:
            return single()[0]
    given = [t for t in (x, None if kind else weight, bias, *parts[4:]) if t is not None]
    alike = {t.dtype for t in given} == {x.dtype} and x.dtype != "float64" and alignment(*given, weight) == 16
    ends_once = parts.residual is None or not (parts.epilogue.activation or parts.gate is not None)
    sized = parts.norm_weight is None or parts.norm_weight.size == columns
    if not (alike and ends_once and sized and (kind or weight.ndim == 2)):
        return None
    queue, profile, flat = x.queue, profile_of(x.queue), with_shape(x, (tokens, columns))
    if row is not None:
        packed = plans.Packed(row, rows, columns, tokens, x.dtype, activations)
        if (choice := plans.surrounded(queue, packed)) is None:
            return None
        out = new_result((*x.shape[:-1], rows), x.dtype, queue)
        choice[0].run(queue, packed, choice[1], profile, plans.PackedOperands(flat, weight, bias, out, parts))
        return out
    p = gemm.matmul_of(flat, weight, False, True, bias, parts.epilogue, False)
    algorithm, config = (None, None) if p is None else gemm.chosen(queue, p)
    if algorithm is None or algorithm.name != "gemv":
        return None
    out = new_result((*x.shape[:-1], weight.shape[0]), x.dtype, queue)
    algorithm.run(queue, p, config, profile, gemm.Operands(flat, weight, out, bias, parts.residual, 1, parts))
    return out


def _block_shapes(attended: int, width: int, inner: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the weights of a block: out, gate, up, down and the projection to ``rows``."""
    return (width, attended), (inner, width), (inner, width), (width, inner), (rows, width)


def _check_weights(op: str, x: Tensor, weights: Sequence[Tensor | None], shapes: Sequence[tuple[int, int]], packs: dict[str, str]) -> None:
    for weight, shape in zip(weights, shapes, strict=True):
        if weight is not None:
            packed_problem(op, x, weight, packs["kind"], shape, packs["activations"])


def _decode_block_sample(tokens: int, next_rows: int = 0, kind: str = "Q4_0") -> Sample:
    width, attended, inner = (256, 256, 256) if kind.endswith("K") else (64, 96, 128)
    out, gate, up, down, following = (partial(packed_weight, *shape, kind) for shape in _block_shapes(attended, width, inner, next_rows))
    after = ((width,), following, (next_rows,)) if next_rows else (None, None, None)
    given = ((tokens, attended), (tokens, width), out, (width,), gate, up, down, *after)
    return S(*given, kind=kind, inner=inner, next_rows=next_rows, activations="float")


def _decode_block_ref(inside, x, out_weight, norm_weight, gate, up, down, next_norm=None, next_weight=None, next_bias=0.0, *, kind, inner,
                      next_rows=0, activations="auto"):  # fmt: skip
    """Compute :func:`decode_block` with its default norms and activation, for the samples."""
    shapes = _block_shapes(inside.shape[-1], x.shape[-1], inner, next_rows)
    packed = zip((out_weight, gate, up, down, next_weight), shapes, strict=True)
    out, gate, up, down, *following = (weight_values(w, kind, shape).astype(x.dtype) for w, shape in packed if w is not None)
    h = x + inside @ out.T
    normed, gated = _rms_normed(h, norm_weight), _rms_normed(h, norm_weight) @ gate.T
    y = h + (gated / (1 + np.exp(-gated)) * (normed @ up.T)) @ down.T
    return (y, *(_rms_normed(y, next_norm) @ w.T + next_bias for w in following))


def _rms_normed(a: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * weight


@op(
    vjp=None, ref=_decode_block_ref, tol=24,
    samples=[
        _decode_block_sample(1), _decode_block_sample(2, 48), _decode_block_sample(1, 32, "Q8_0"), _decode_block_sample(1, 16, "Q4_K"),
        _decode_block_sample(9, 16),
    ],
    errors=[(S((1, 64), (2, 64), (64,), (64,), (64,), (64,), (64,), kind="Q4_0", inner=64),
             r"\[decode_block\] inside and x must have the same rows; inside=\(1, 64\), x=\(2, 64\)"),
            (S((1, 64), (1, 64), *(np.zeros(n, np.uint8) for n in (2304, 64, 2304, 2304, 4352)), kind="Q4_0", inner=64),
             r"\[decode_block\] weight must be 2304 bytes .* for 64 rows and 64 columns.*; kind=Q4_0, size=4352")],
)  # fmt: skip
def decode_block(
    inside: Tensor, x: Tensor, out_weight: Tensor, norm_weight: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    next_norm: Tensor | None = None, next_weight: Tensor | None = None, next_bias: Tensor | None = None, *, kind: str, inner: int,
    next_rows: int = 0, eps: float = 1e-5, next_eps: float = 1e-5, activation: str = "silu", activations: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the layers between two attentions of a decoder: ``(y, z)``, or ``(y,)`` without ``next_weight``. There is no gradient.

    With ``h = x + inside out_weight'`` and its RMS norm n, ``y = h + (activation(n gate') * (n up')) down'``. With the RMS norm m of y,
    ``z = m next_weight' + next_bias``. On NVIDIA GPUs, a few rows take one launch, whose work-groups wait for each other; there ``inside``
    and what ``down`` multiplies must be within 65504, or results are NaN. One row takes one launch on ARM CPUs with dot products and on x86
    CPUs with AVX. On other devices every product is a launch of its own.

    - **inside**: the result of the first attention, before its output projection **out_weight**.
    - **gate**, **up**: ``inner`` rows. **next_weight**: ``next_rows`` rows. All weights are packed as in :func:`quantized_linear`, with one
      ``kind``.
    - **norm_weight**, **eps**, **next_norm**, **next_eps**: weights and epsilons of the two RMS norms.
    """
    inside, x, out_weight, norm_weight, gate, up, down, next_norm, next_weight, next_bias = launch.as_tensors(
        "decode_block", inside, x, out_weight, norm_weight, gate, up, down, next_norm, next_weight, next_bias
    )
    if inside.shape[:-1] != x.shape[:-1]:
        raise ShapeError(message("decode_block", "inside and x must have the same rows", inside=inside.shape, x=x.shape))
    if (next_weight is None) is not (next_rows == 0) or (next_weight is None) is not (next_norm is None):
        what = "next_weight, next_norm and next_rows must be given together"
        raise ShapeError(message("decode_block", what, next_rows=next_rows, next_weight=None if next_weight is None else next_weight.shape))
    packs: dict[str, Any] = {"kind": kind, "activations": activations}
    shapes = _block_shapes(inside.shape[-1], x.shape[-1], inner, next_rows)
    _check_weights("decode_block", x, (out_weight, gate, up, down, next_weight), shapes, packs)
    if 0 < x.size <= DECODED_ROWS * x.shape[-1]:
        parts = DecodeParts(Epilogue(x.dtype, "", DECODE_ACTIVATIONS[activation]), "rms", eps, gate, None, None, norm_weight, None)
        own = chain.DecoderLayer(None, None, None, out_weight, norm_weight, gate, up, down)
        layers = (own, chain.DecoderLayer(next_norm, next_weight, next_bias))
        whole = chain.Chain(kind_of(kind, "decode_block"), x, layers, parts, inner, next_rows, next_eps, activations, inside)
        if (found := chain.launch_of(whole)) is not None:
            return found()
    h = decode_linear(inside, out_weight, residual=x, rows=x.shape[-1], **packs)
    f = decode_linear(h, up, None, gate, norm_weight=norm_weight, norm="rms", eps=eps, activation=activation, rows=inner, **packs)
    y = decode_linear(f, down, residual=h, rows=x.shape[-1], **packs)
    if next_weight is None:
        return (y,)
    return y, decode_linear(y, next_weight, next_bias, norm_weight=next_norm, norm="rms", eps=next_eps, rows=next_rows, **packs)


def _decode_layers_sample(tokens: int, kind: str, biased: bool = False, normed: bool = False, window: int = 0) -> Sample:
    width, inner, heads, groups, depth = 64, 128, 4, 2, 32
    rows, layers = (heads + 2 * groups) * depth, []
    for _ in range(2):
        cache = (tokens, groups, 70, depth)
        weights = (partial(packed_weight, *shape, kind) for shape in _block_shapes(heads * depth, width, inner, rows))
        out, gate, up, down, projection = weights
        layers += [(width,), projection, *([(rows,)] if biased else []), out, (width,), gate, up, down]
        layers += [cache, cache, *([(depth,), (depth,)] if normed else [])]
    lengths = np.arange(tokens, dtype=np.int32) * 60 + 4
    return S((tokens, 1, width), lengths, (depth // 2,), layers, kind=kind, inner=inner, heads=heads, count=2, window=window,
             activations="float")  # fmt: skip


def _decode_layers_ref(x, lengths, frequencies, layers, *, kind, inner, heads, count, window=0, activations="auto"):
    """Compute :func:`decode_layers` with its default norms and activation, for the samples."""
    each = len(layers) // count
    for i in range(0, len(layers), each):
        norm, projection, *own = layers[i : i + each]
        bias = own.pop(0) if each % 2 == 0 else 0.0
        out, mlp_norm, gate, up, down, keys, values, *norms = own
        first = weight_values(projection, kind, ((heads + 2 * keys.shape[1]) * keys.shape[3], x.shape[-1])).astype(x.dtype)
        query_norm, key_norm = norms or (None, None)
        z = _rms_normed(x, norm) @ first.T + bias
        inside = cached_arrays(z, None, None, keys, values, lengths, None, None, frequencies, query_norm, key_norm, window=window)
        (x,) = _decode_block_ref(inside, x, out, mlp_norm, gate, up, down, None, None, kind=kind, inner=inner)
    return x


@op(
    vjp=None, ref=_decode_layers_ref, tol=48, inputs=("x", "lengths", "frequencies", "layers"),
    samples=[_decode_layers_sample(2, "Q8_0"), _decode_layers_sample(1, "Q4_0", True, True, window=3)],
    errors=[(S((1, 1, 64), np.zeros(1, np.int32), (16,), [(64,)] * 16, kind="Q4_0", inner=64, heads=4, count=2),
             r"\[decode_layers\] x must be \(batch, 1, width\), and layers must have 9 to 12 tensors for each layer; given=8")],
)  # fmt: skip
def decode_layers(
    x: Tensor, lengths: Tensor, frequencies: Tensor | None, layers: Sequence[Tensor], *, kind: str, inner: int, heads: int, count: int,
    scale: float | None = None, window: int = 0, eps: float = 1e-5, head_eps: float = 1e-6, activation: str = "silu",
    activations: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute layers of a decoder for one new token of each sequence, ``(batch, 1, width)``. There is no gradient.

    A layer is ``x + attention(norm(x) projection' + bias) out'`` and then what :func:`decode_block` computes. On NVIDIA GPUs the layers of
    one or a few tokens take one launch, whose work-groups wait for each other. On other devices each layer is a
    :func:`cached_attention` and a :func:`decode_block`.

    - **layers**: for each of ``count`` layers its norm, projection, bias (or not), out, second norm, gate, up, down, keys,
      values, and norms of queries and keys (or not). Weights are packed as in :func:`quantized_linear`, with one ``kind``.
    - **lengths**, **frequencies**, **scale**, **window**: as in :func:`cached_attention`, which also describes keys and values.
      **head_eps**: epsilon of the norms of queries and keys.
    - **heads**: of queries. **inner**, **activation**, **eps**: as in :func:`decode_block`; all norms have one epsilon.
    """
    x, lengths, frequencies, *given = launch.as_tensors("decode_layers", x, lengths, frequencies, *layers)
    each, rest = divmod(len(given), max(1, count))
    if rest or not 9 <= each <= 12 or x.ndim != 3:
        what = "x must be (batch, 1, width), and layers must have 9 to 12 tensors for each layer"
        raise ShapeError(message("decode_layers", what, given=each, x=x.shape))
    biased = each % 2 == 0
    stack = []
    for i in range(0, len(given), each):
        norm, projection, *own = given[i : i + each]
        stack.append(chain.DecoderLayer(norm, projection, own.pop(0) if biased else None, *own))
    keys = stack[0].keys
    assert keys is not None
    rows = (heads + 2 * keys.shape[1]) * keys.shape[3]
    packs: dict[str, Any] = {"kind": kind, "activations": activations}
    epilogue = Epilogue(x.dtype, "", DECODE_ACTIVATIONS[activation])
    parts = DecodeParts(epilogue, "rms", eps, stack[0].gate, None, None, stack[0].mlp_norm, None)
    turned = None if frequencies is None else cast(frequencies, "float32")
    attention = chain.Attention(lengths, turned, score_scale(scale, keys.shape[3]), window, head_eps)
    few = chain.MOST_POINTERS // each  # layers of a launch
    whole = chain.Chain(kind_of(kind, "decode_layers"), x, tuple(stack[:few]), parts, inner, rows, eps, activations, None, attention)
    if x.shape[1] == 1 and 0 < x.size <= DECODED_ROWS * x.shape[-1] and (found := chain.launch_of(whole)) is not None:
        for layer in stack:
            weights = (layer.out, layer.gate, layer.up, layer.down, layer.projection)
            _check_weights("decode_layers", x, weights, _block_shapes(heads * keys.shape[3], x.shape[-1], inner, rows), packs)
        wrote(tuple(t for layer in stack for t in (layer.keys, layer.values)))
        (y,) = found()
        for i in range(few, count, few):
            (y,) = chain.launch_chain(whole._replace(x=y, layers=tuple(stack[i : i + few])))
        return y
    z = decode_linear(x, stack[0].projection, stack[0].bias, norm_weight=stack[0].norm, norm="rms", eps=eps, rows=rows, **packs)
    for layer, after in zip(stack, [*stack[1:], chain.DecoderLayer()], strict=True):
        norms = (layer.query_norm, layer.key_norm)
        inside = cached_attention(
            z, None, None, layer.keys, layer.values, lengths, None, None, frequencies, *norms, scale=scale, window=window, eps=head_eps
        )
        x, *projected = decode_block(
            inside, x, layer.out, layer.mlp_norm, layer.gate, layer.up, layer.down, *after[:3], inner=inner, eps=eps, next_eps=eps,
            next_rows=0 if after.norm is None else rows, activation=activation, **packs,
        )  # fmt: skip
        z = projected[0] if projected else z
    return x
