"""``netcl.testing.assert_close`` accepts and refuses what torch's does, and says where values differ."""

from __future__ import annotations

import numpy as np
import pytest

import netcl
from netcl.testing import assert_close

ONES = netcl.ones(2)


@pytest.mark.parametrize(
    ("actual", "expected", "options"),
    [
        (ONES, netcl.tensor([1.0, 1.000001]), {}),
        ({"a": [ONES, 1]}, {"a": (ONES, 1)}, {}),
        (netcl.tensor([1.0, float("inf")]), netcl.tensor([1.0, float("inf")]), {}),
        (netcl.tensor([float("nan")]), netcl.tensor([float("nan")]), {"equal_nan": True}),
        (ONES, ONES.double(), {"check_dtype": False}),
        (ONES.half(), netcl.tensor([1.0, 1.0009]).half(), {}),
        (np.ones(2), np.ones(2), {}),
        (netcl.tensor([2**62 + 1]), netcl.tensor([2**62 + 1]), {}),
        (1.0, np.float64(1.0), {}),
        (None, None, {}),
        (ONES, ONES * 1.2, {"rtol": 0.2, "atol": 0.0}),
    ],
)
def test_close(actual, expected, options):
    assert_close(actual, expected, **options)


@pytest.mark.parametrize(
    ("actual", "expected", "options", "text"),
    [
        (
            ONES,
            netcl.tensor([1.0, 3.0]),
            {},
            r"not close!\n\nMismatched elements: 1 / 2 \(50.0%\)\nGreatest absolute difference: 2.0 at index \(1,\)",
        ),
        (ONES, ONES.int(), {}, r"attribute 'dtype' do not match: float32 != int32"),
        (ONES, netcl.ones(3), {}, r"attribute 'shape' do not match: \(2,\) != \(3,\)"),
        (netcl.tensor([2**62 + 1]), netcl.tensor([2**62]), {}, r"Tensor-likes are not equal!"),
        (netcl.tensor([float("nan")]), netcl.tensor([float("nan")]), {}, r"not close"),
        (1, 2, {}, r"Scalars are not equal!\n\nExpected 2.0 but got 1.0"),
        (1.0, 1, {}, r"attribute 'dtype' do not match"),
        ([1, [2.0]], [1, [3.0]], {}, r"The failure occurred for item \[1\]\[0\]"),
        ([1], [1, 2], {}, r"length of the sequences mismatch: 1 and 2"),
        ({"a": 1}, {"b": 1}, {}, r"keys of the mappings mismatch"),
        (None, 1, {}, r"None mismatch"),
        (1, 2, {"msg": lambda text: f"own: {text[:7]}"}, r"^own: Scalars$"),
        (1, 2, {"msg": "mine"}, r"^mine$"),
    ],
)
def test_not_close(actual, expected, options, text):
    with pytest.raises(AssertionError, match=text):
        assert_close(actual, expected, **options)


def test_devices_are_compared(cl_device):
    with pytest.raises(AssertionError, match="attribute 'device' do not match"):
        assert_close(netcl.ones(1, device="cpu"), netcl.ones(1, device=cl_device))
    assert_close(netcl.ones(1, device="cpu"), netcl.ones(1, device=cl_device), check_device=False)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"\[assert_close\] rtol and atol must be given together"):
        assert_close(1.0, 1.0, rtol=0.1)
    for pair in ((ONES, 1.0), ("a", "a"), (ONES, np.ones(2))):
        with pytest.raises(TypeError, match=r"\[assert_close\] values must be two tensors, two arrays, two numbers or None"):
            assert_close(*pair)
