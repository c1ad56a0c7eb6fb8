"""Winograd's convolution F(4 x 4, 3 x 3): its matrices in exact fractions, and the constants they give to ``transforms.cl``.

Along one axis, six products make four outputs of a kernel with three taps: ``y = A' ((G w) * (B' x))``. The matrices come from
interpolation of polynomials (Cook and Toom) at five points and infinity. Which points decides how much the differences in ``B'`` and
``A'`` cancel: 0, +-1, +-2, as usually taken, lose a digit; 0, +-11/16, +-11/8 are within a small multiple of a plain float32 sum, and
their powers are exact in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

OUT, TAPS = 4, 3  # outputs of a tile along an axis, and of the kernel
TILE = OUT + TAPS - 1
PARTS = TILE**2  # products of a tile
POINTS = (Fraction(11, 16), Fraction(11, 8))  # each with its negative, beside 0 and infinity
Matrix = list[list[Fraction]]


def matrices(points: Sequence[Fraction], out: int = OUT, taps: int = TAPS) -> tuple[Matrix, Matrix, Matrix]:
    """``A'``, ``G`` and ``B'`` of ``out`` outputs and ``taps`` taps, for ``out + taps - 2`` finite points; infinity is the last row.

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
    """Coefficients, lowest first, of the product of ``x - root``."""
    found = [Fraction(1)]
    for root in roots:
        found = [low - root * high for low, high in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


def tile_points(points: Sequence[Fraction] = POINTS) -> list[Fraction]:
    """The finite points of a tile, in the order of its rows."""
    return [Fraction(0), *itertools.chain.from_iterable((p, -p) for p in points)]


def constants() -> dict[str, str]:
    """What ``transforms.cl`` expects: powers of both points, and ``SCALES``, an initialiser of TILE x TILE factors of the weights."""
    p, q = POINTS
    weights = matrices(tile_points())[1]
    scales = [*(row[0] for row in weights[:-1]), Fraction(1)]
    named = {f"{letter}{n}": point**n for letter, point in (("P", p), ("Q", q)) for n in (1, 2, 3)}
    named |= {"PQ_SUM": p**2 + q**2, "PQ_PRODUCT": p**2 * q**2}
    rows = ("{" + ", ".join(literal(a * b) for b in scales) + "}" for a in scales)
    return {name: literal(value) for name, value in named.items()} | {"SCALES": "{" + ", ".join(rows) + "}"}


def literal(value: Fraction) -> str:
    """A float32 literal of OpenCL C, in brackets where it has a sign."""
    text = f"{float(value)!r}f"
    return f"({text})" if value < 0 else text
