"""Strided input gradients as a product and a fold: right for every window, edge and ending, taken where it pays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from netcl import ops as F
from netcl.core.kernel_selector import KernelConfig, KernelVariant, decide
from netcl.core.tensor import Tensor
from netcl.ops.conv import arrays, fold, plans
from netcl.ops.conv.geometry import geometry
from netcl.ops.epilogue import Epilogue

CONFIG = KernelConfig(KernelVariant.CONV2D_IM2COL, extra={"tier": "cpu", "form": "fold"})


def job_of(x, w, stride=2, padding=0, dilation=1, groups=1, **more):
    return plans.Convolution(plans.INPUT_GRAD, geometry("conv2d_input_grad", x, w, stride, padding, dilation, groups), "float32", **more)


def algorithm(conv, handle, config=None, **profile):
    profile = dataclasses.replace(handle.profile, **profile) if profile else handle.profile
    return plans.convolution_algorithm(handle.queue, conv, config or decide(plans.conv_problem(conv, profile)), profile)[0].name


@pytest.mark.parametrize(
    ("x", "w", "stride", "padding"),
    [
        ((2, 5, 8, 8), (3, 5, 4, 4), 2, 1),
        ((1, 7, 9, 21), (4, 7, 7, 6), 2, ((3, 1), (2, 4))),  # four lines of windows over a pixel, and pixels after the last window
        ((2, 2, 11, 10), (3, 2, 2, 1), (3, 4), (1, 0)),  # pixels between windows
        ((1, 3, 1, 70), (4, 3, 1, 16), (1, 8), (0, 4)),
        ((1, 9, 32, 16), (2, 9, 16, 16), 16, 0),
        ((2, 4, 6, 7), (5, 4, 3, 3), 1, 1),
    ],
)
def test_every_window(cl_device, rng, x, w, stride, padding):
    conv = job_of(x, w, stride, padding)
    assert algorithm(conv, cl_device, CONFIG) == "fold"
    dy, weight = (rng.normal(size=shape).astype("f") for shape in (conv.g.y_shape, conv.g.w_shape))
    dx = Tensor.from_host(cl_device.queue, np.full(x, np.nan, "f"))
    plans.run(conv, cl_device.queue, *(Tensor.from_host(cl_device.queue, a) for a in (dy, weight)), dx, CONFIG)
    want = arrays.input_grad(dy.astype(float), weight.astype(float), None, g=conv.g)
    np.testing.assert_allclose(dx.to_host(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_bias_residual_activation_and_scale(cl_device, rng, stored):
    epilogue = Epilogue("float32", "float32", "relu", stored)
    conv = job_of((2, 6, 10, 12), (8, 6, 4, 4), padding=1, bias="float32", epilogue=epilogue)
    dy, w, bias, added = (rng.normal(size=s).astype("f") for s in (conv.g.y_shape, conv.g.w_shape, (6,), conv.g.x_shape))
    given = [Tensor.from_host(cl_device.queue, a) for a in (dy, w, bias, added)]
    dx = Tensor.empty(conv.g.x_shape, stored, queue=cl_device.queue)
    plans.run(conv, cl_device.queue, *given[:2], dx, CONFIG, bias=given[2], residual=given[3], scale=0.5)
    sums = 0.5 * arrays.input_grad(dy.astype(float), w.astype(float), None, g=conv.g)
    want = np.maximum(sums + bias[:, None, None] + added, 0)
    np.testing.assert_allclose(dx.to_host(), want, rtol=1e-5 if stored == "float32" else 2e-3, atol=1e-5 if stored == "float32" else 2e-3)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_it_is_taken_where_it_pays(cl_device, lanes):
    if cl_device.profile.device_type != "cpu":
        pytest.skip("other devices have other kernels")
    chosen = lambda *sizes, **more: algorithm(job_of(*sizes, **more), cl_device, vector_width=lanes)  # noqa: E731
    generator = [((8, 256, 8, 8), (512, 256, 4, 4)), ((8, 64, 32, 32), (128, 64, 4, 4)), ((8, 3, 64, 64), (64, 3, 4, 4))]
    assert {chosen(*sizes, padding=1) for sizes in generator} == {"fold"}
    assert chosen((1, 64, 64, 64), (128, 64, 2, 2)) == chosen((8, 64, 4, 4), (256, 64, 4, 4), 1, bias="float32") == "fold"
    assert chosen((1, 256, 8, 8), (512, 256, 4, 4), padding=1) == ("panel" if lanes == 4 else "fold")  # few windows: weights count
    assert chosen((1, 64, 16, 16), (64, 64, 3, 3), padding=1) == "panel"  # too small for more launches
    assert chosen((8, 256, 32, 32), (16, 256, 4, 4), padding=1) == "panel"  # sums so short that writing them costs more
    assert chosen((8, 64, 32, 32), (128, 32, 4, 4), padding=1, groups=2) == "panel"
    assert chosen((8, 64, 32, 32), (128, 64, 3, 3), dilation=2) == "panel"


def test_lines_and_windows_that_do_not_fit_are_left_to_other_kernels(cl_device):
    long = job_of((1, 4, 1, 5000), (4, 4, 1, 4), (1, 2))
    large = job_of((1, 4, 40, 40), (4, 4, 20, 20))
    assert "fold" not in {algorithm(conv, cl_device, CONFIG) for conv in (long, large)}
    assert long.g.ow * 4 > fold.LINE_BYTES // 4


def test_a_transposed_convolution_by_default(cl_device, rng):
    """Of the size at which the fold is taken on CPUs, with a bias."""
    x, w, b = (rng.normal(size=s).astype("f") for s in ((8, 64, 32, 32), (64, 3, 4, 4), (3,)))
    got = F.conv_transpose2d(*(Tensor.from_host(cl_device.queue, a) for a in (x, w, b)), stride=2, padding=1).to_host()
    g = geometry("conv_transpose2d", (8, 3, 64, 64), w.shape, 2, 1, 1, 1)
    np.testing.assert_allclose(got, arrays.input_grad(x.astype(float), w.astype(float), b.astype(float), g=g), rtol=1e-4, atol=1e-4)
