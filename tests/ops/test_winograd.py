"""Winograd's convolution: its matrices, and how exact it is."""

from fractions import Fraction

import numpy as np
import pytest

from netcl.ops.conv import winograd


@pytest.mark.parametrize("points", [winograd.tile_points(), [Fraction(n) for n in (0, 1, -1, 2, 3)]])
def test_matrices_make_a_convolution_exactly(points):
    outputs, weights, inputs = winograd.matrices(points)
    for out in range(winograd.OUT):
        for tap in range(winograd.TAPS):
            row = [sum(outputs[out][e] * weights[e][tap] * inputs[e][i] for e in range(winograd.TILE)) for i in range(winograd.TILE)]
            assert row == [i == out + tap for i in range(winograd.TILE)]


def test_powers_of_the_points_are_exact_in_float32():
    p, q = winograd.POINTS
    for value in (*(point**n for point in (p, q) for n in (1, 2, 3)), p**2 + q**2, p**2 * q**2):
        assert Fraction(float(np.float32(float(value)))) == value
