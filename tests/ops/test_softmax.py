"""Softmax: torch's numbers, and what happens at the edges of the number range."""

from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

GOLDEN = np.load(Path(__file__).parent.parent / "golden/rows.npz")


@pytest.mark.parametrize(
    "name, op, axis", [("softmax", "softmax", -1), ("softmax_channels", "softmax", 1), ("log_softmax", "log_softmax", 1)]
)
def test_torchs_numbers(name, op, axis, device):
    x = Tensor.from_host(device.queue, GOLDEN["x"], requires_grad=True)
    out = getattr(ag, op)(x, axis=axis)
    out.backward(Tensor.from_host(device.queue, GOLDEN[f"{name}.g"]))
    np.testing.assert_allclose(out.to_host(), GOLDEN[f"{name}.out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x.grad.to_host(), GOLDEN[f"{name}.d_x"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape, axis", [((3, 37), -1), ((37, 3), 0)])
def test_large_logits_do_not_overflow(device, shape, axis):
    x = np.full(shape, 1e4, np.float32)
    x[tuple(0 for _ in shape)] = -1e4
    y = ops.softmax(Tensor.from_host(device.queue, x), axis=axis).to_host()
    np.testing.assert_allclose(y.sum(axis), 1, rtol=1e-6)
    assert np.isfinite(ops.log_softmax(Tensor.from_host(device.queue, x), axis=axis).to_host()).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_stays_in_its_row_and_minus_infinity_gives_zero(device, axis):
    x = np.zeros((4, 33), np.float32)
    x[1, 5], x[2, 7], x[3] = np.nan, -np.inf, -np.inf
    y = ops.softmax(Tensor.from_host(device.queue, x if axis else x.T), axis=axis).to_host()
    y = y if axis else y.T
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and np.isnan(y[3]).all()
    assert y[2, 7] == 0 and y[2].sum() == pytest.approx(1)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_second_derivatives(op):
    x = Tensor.from_host(np.random.default_rng(0).standard_normal((3, 7)), dtype="float64").to("cpu")
    assert ag.gradgradcheck(lambda t: getattr(ag, op)(t, axis=0), [x.requires_grad_()])


def test_a_new_size_compiles_nothing(cl_device):
    for n in (70, 496):  # GPUs read long rows of whole vectors otherwise than short ones and those with a rest
        ops.softmax(Tensor.from_host(cl_device.queue, np.ones((3, n), np.float32))).to_host()
    before = program.build_count()
    for n in (65, 71, 500):
        ops.softmax(Tensor.from_host(cl_device.queue, np.ones((5, n), np.float32))).to_host()
    assert program.build_count() == before


def test_every_way_to_spread_rows(cl_device, monkeypatch):
    """The kernels of the other kind of device: a work-group per row on a CPU, vectors on a GPU."""
    from netcl.engine import rows

    x = np.random.default_rng(0).standard_normal((7, 300)).astype(np.float32)
    want = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    for spread in (rows.Spread(1, 1, 16, 3), rows.Spread(8, 1, 1, 1), rows.Spread(16, 16, 1, 1)):
        monkeypatch.setattr(rows, "row_spread", lambda *facts, chosen=spread: chosen)
        got = ops.softmax(Tensor.from_host(cl_device.queue, x))
        np.testing.assert_allclose(got.to_host(), want, rtol=1e-5)
        back = ops.softmax_grad(Tensor.from_host(cl_device.queue, x), got).to_host()
        np.testing.assert_allclose(back, want * (x - (x * want).sum(-1, keepdims=True)), rtol=1e-4, atol=1e-6)
