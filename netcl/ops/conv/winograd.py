"""Winograd's convolution F(4 x 4, 3 x 3): its matrices in exact fractions, when it pays, and its launches.

Along one axis, six products make four outputs of a kernel with three taps: ``y = A' ((G w) * (B' x))``. The matrices come from
interpolation of polynomials (Cook and Toom) at five points and infinity; docs/internals/kernels.md has the reason for the points. The input
gradient is a convolution with mirrored weights, the weight gradient is ``G' ((A dy) * (B' x))``, summed over the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from netcl.core import env
from netcl.core.capabilities import DeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.engine import algorithms, launch
from netcl.engine.strided import alignment
from netcl.ops.conv import ending
from netcl.ops.conv.convolution import INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.matmul import gemm

OUT, TAPS = 4, 3  # outputs of a tile along an axis, and of the kernel
TILE = OUT + TAPS - 1
TILE_PRODUCTS = TILE**2  # products of a tile
POINTS = (Fraction(11, 16), Fraction(11, 8))  # each with its negative, beside 0 and infinity; 1 and 2 would lose a digit
TILE_POINTS = [Fraction(0), *(sign * p for p in POINTS for sign in (1, -1))]  # the finite points of a tile, in the order of its rows
# In multiply-adds of a large product on a GPU: moving a value to or from memory, a term of a direct convolution, and two more launches.
VALUE_COST, DIRECT_COST, LAUNCHES_COST = 28, 1.25, 2e8
LEAST_TERMS = 32  # channels, or tiles of a weight gradient: with fewer, a plain sum is more exact than the transforms
# Of few results: the tiles and the most pairs of channel and filter with which transforms are faster than direct sums.
LEAST_TILES, MOST_PAIRS = 48, 1 << 16
# Of a weight gradient: rows and columns of a work-group, minimum tiles that it sums, and the tiles whose time its startup and stores take.
BLOCK, LEAST_DEPTH, BLOCK_COST = 64, 128, 100
WINOGRAD_FILES = "ends.cl transforms.cl winograd.cl"
Matrix = list[list[Fraction]]


def matrices(points: Sequence[Fraction], out: int = OUT, taps: int = TAPS) -> tuple[Matrix, Matrix, Matrix]:
    """Return ``A'``, ``G`` and ``B'`` of ``out`` outputs and ``taps`` taps, for ``out + taps - 2`` finite points; infinity is the last row.

    >>> from fractions import Fraction
    >>> outputs, weights, inputs = matrices([Fraction(0), Fraction(1), Fraction(-1)], out=2)
    >>> [[int(v) for v in row] for row in inputs]
    [[-1, 0, 1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]]
    """
    others = [[q for q in points if q != p] for p in points]
    outputs = [[p**i for p in points] + [Fraction(i == out - 1)] for i in range(out)]
    weights = [[p**j / math.prod(p - q for q in rest) for j in range(taps)] for p, rest in zip(points, others, strict=True)]
    inputs = [[*_polynomial(rest), Fraction(0)] for rest in others]
    return outputs, [*weights, [Fraction(j == taps - 1) for j in range(taps)]], [*inputs, _polynomial(points)]


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """Return the coefficients, lowest first, of the product of ``x - root``."""
    found = [Fraction(1)]
    for root in roots:
        found = [low - root * high for low, high in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def constants() -> dict[str, str]:
    """Return the macros of ``transforms.cl``: powers of the interpolation points, and ``SCALES``, TILE x TILE weight factors."""
    p, q = POINTS
    weights = matrices(TILE_POINTS)[1]
    scales = [*(row[0] for row in weights[:-1]), Fraction(1)]
    named = {f"{letter}{n}": point**n for letter, point in (("P", p), ("Q", q)) for n in (1, 2, 3)}
    named |= {"PQ_SUM": p**2 + q**2, "PQ_PRODUCT": p**2 * q**2}
    rows = ("{" + ", ".join(literal(a * b) for b in scales) + "}" for a in scales)
    return {name: literal(value) for name, value in named.items()} | {"SCALES": "{" + ", ".join(rows) + "}"}


def literal(value: Fraction) -> str:
    """Return a float32 literal of OpenCL C, in parentheses if it has a sign."""
    text = f"{float(value)!r}f"
    return f"({text})" if value < 0 else text


# ---- when


def winograd_space(problem: Problem) -> list[KernelConfig]:
    """List the tuner's candidates for a convolution; empty if Winograd does not apply or is off."""
    flags = problem.flags
    plain = problem.shape[5:] == (3, 3) and flags["groups"] == 1 and flags["stride"] == flags["dilation"] == (1, 1)
    allowed = plain and env.value("NETCL_CONV_WINOGRAD")
    return [KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"winograd_channels": 1})] if allowed else []


def suits(conv: Convolution, config: KernelConfig, profile: DeviceProfile) -> bool:
    """Whether Winograd is selected, applies, fits in memory and is likely faster; ``winograd_channels`` replaces the last test."""
    if conv.variant(config) is not KernelVariant.CONV2D_WINOGRAD:
        return False
    g, least = conv.g, config.extra.get("winograd_channels")
    plain = g.is_plain_3x3 and conv.compute == "float"
    most = TILE_PRODUCTS * max(g.c * g.f, max(g.c, g.f) * tiles(conv)[-1])  # values between the transforms
    fits = most < 2**30 and 4 * most <= profile.max_alloc_size // 4
    if least is not None:
        return plain and fits and min(g.c, g.f) >= least
    idle = conv.is_few(profile.max_compute_units) and tiles(conv)[-1] >= LEAST_TILES and g.c * g.f <= MOST_PAIRS
    return plain and fits and (pays(conv) or (idle and min(g.c, g.f) >= LEAST_TERMS))


def pays(conv: Convolution) -> bool:
    """Whether Winograd is exact enough and faster. Memory limits the transforms; memory or arithmetic limits the product."""
    g, (n, c, *_, m, oh, ow), count = conv.g, conv.sizes[:7], tiles(conv)[-1]
    moved = count * (c + m) * (OUT**2 + TILE_PRODUCTS) + c * m * (g.taps + TILE_PRODUCTS)
    products = TILE_PRODUCTS * max(count * c * m, VALUE_COST * (count * (c + m) + c * m))
    faster = VALUE_COST * moved + products + LAUNCHES_COST < DIRECT_COST * g.taps * c * m * n * oh * ow
    return faster and (count if conv.kind == WEIGHT_GRAD else c) >= LEAST_TERMS


def tiles_of(conv: Convolution) -> tuple[int, int]:
    """Return rows and columns of tiles in a plane of outputs, or of the input gradient."""
    return -(-conv.sizes[5] // OUT), -(-conv.sizes[6] // OUT)


def tiles(conv: Convolution) -> tuple[int, int, int]:
    """Return :func:`tiles_of`, and the number of all tiles, rounded up to a multiple of four for aligned rows."""
    high, wide = tiles_of(conv)
    return high, wide, -(-conv.g.n * high * wide // 4) * 4


# ---- launches on GPUs


def run(queue: Any, conv: Convolution, config: KernelConfig, profile: DeviceProfile, t: ConvOperands) -> None:
    """Run a convolution: transform inputs and weights, compute a matrix product for each element of a tile, and transform the products."""
    if conv.kind == WEIGHT_GRAD:
        return _winograd_weight_grad(queue, conv, profile, t)
    (n, c, h, w, m, oh, ow), places = conv.sizes[:7], tiles(conv)
    span, back, pairs = places[-1], conv.kind == INPUT_GRAD, m * c
    pad = tuple(2 - p for p in conv.g.pad) if back else conv.g.pad
    u, v, sums = (t.room(TILE_PRODUCTS, *shape, dtype="float32") for shape in ((m, c), (c, span), (m, span)))
    sources = _transform(queue, conv, 1, "sources", alignment(t.source), INPUT_QUADS=w % OUT == 0 and pad[1] == 1)
    size, sizes = (span, c - (-pairs // span)), (n, c, h, w, *places, *pad, pairs)
    sources(queue, size, (launch.LOCAL_1D, 1), t.source, t.weight, v, u, *sizes)
    _tile_products(queue, gemm.Operands(u, v, sums), TILE_PRODUCTS, m, span, c, trans_a=back)
    macros = constants() | {"PART": 2, "INPUT_GRAD": 0, "QUADS": int(ow % OUT == 0 and conv.ending.stored == "float32")}
    outputs = ending.ending_kernel(queue, conv, WINOGRAD_FILES, "winograd_outputs", macros)
    outputs(queue, (span, m), (launch.LOCAL_1D, 1), sums, *t.end, n, m, oh, ow, *places, t.scale)


def _winograd_weight_grad(queue: Any, conv: Convolution, profile: DeviceProfile, t: ConvOperands) -> None:
    """Compute a weight gradient by products summed over tiles. Sums may be split into parts, which the last transform adds."""
    (n, c, h, w, m, oh, ow), (high, wide, span) = conv.sizes[:7], tiles(conv)
    depth = -(-span // _useful_parts(m, c, span, profile.max_compute_units) // 16) * 16
    parts, pairs = -(-span // depth), m * c
    v, d, du = (t.room(TILE_PRODUCTS * parts, *shape, dtype="float32") for shape in ((c, depth), (m, depth), (m, c)))
    quads = {"INPUT_QUADS": w % OUT == 0 and conv.g.pad[1] == 1, "QUADS": ow % OUT == 0}
    sources = _transform(queue, conv, 3, "grad_sources", alignment(t.source, t.weight), **quads)
    sizes = (n, c, h, w, m, oh, ow, high, wide, parts, depth, *conv.g.pad)
    sources(queue, (parts * depth, c + m), (launch.LOCAL_1D, 1), t.source, t.weight, v, d, *sizes)
    _tile_products(queue, gemm.Operands(d, v, du), TILE_PRODUCTS * parts, m, c, depth, trans_b=True)
    _transform(queue, conv, 4, "weight_grads")(queue, (pairs,), (launch.LOCAL_1D,), du, t.result, pairs, parts)


def _useful_parts(m: int, c: int, span: int, units: int) -> int:
    """Return the number of parts of a sum that keeps all compute units busy to the end."""
    blocks = TILE_PRODUCTS * -(-m // BLOCK) * -(-c // BLOCK)
    return min(range(1, max(1, span // LEAST_DEPTH) + 1), key=lambda parts: -(-blocks * parts // units) * (-(-span // parts) + BLOCK_COST))


def _transform(queue: Any, conv: Convolution, part: int, name: str, alignment: int = 1, **quads: bool) -> Any:
    """Return a kernel of ``winograd.cl``. ``quads``: macros that enable vector loads; 0 unless values are float32 aligned to 16 bytes."""
    vectors = alignment == 16 and conv.dtype == "float32"
    defines = constants() | {"PART": part, "ITEMS": launch.LOCAL_1D, "INPUT_GRAD": conv.kind == INPUT_GRAD}
    defines |= {macro: vectors and wide for macro, wide in quads.items()}
    return launch.kernel(queue, __file__, WINOGRAD_FILES, f"winograd_{name}", dict.fromkeys("XWY", conv.dtype), defines)


def _tile_products(
    queue: Any, t: gemm.Operands, batches: int, m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False
) -> None:
    """Compute the matrix products, one for each element of a tile, in one launch."""
    aligned = not any(size % 4 for size in (m if trans_a else k, k if trans_b else n, m * k, n * k))
    p = gemm.Matmul(m, n, k, trans_a, trans_b, *("float32",) * 3, batch=(1, batches), a_strides=(0, m * k), b_strides=(0, n * k),
                     aligned=aligned, placed=True)  # fmt: skip
    extra = {"why": "one for every element of a tile"}
    config = None if launch.on_cpu_device(queue) else KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, 64, 64, 16, 8, extra=extra)
    gemm.multiply(queue, p, t, config)


algorithms.add(
    "conv2d", "winograd", "winograd.cl transforms.cl", "3 x 3 kernels with stride 1, where the model says that it pays",
    "cases_h200.json: conv 3x3 64x64x56x56 to 64 forward", run,
    device="gpu", when=suits, configurations=winograd_space,
    samples=(KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "simt", "winograd_channels": 1}),),
)  # fmt: skip
