"""Convolutions as products over columns: right for every geometry and ending, refused where columns are too large, taken where it pays."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from netcl import ops as F
from netcl.core.device import handle_of
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.tensor import Tensor
from netcl.ops.conv import arrays, columns, plans
from netcl.ops.conv.geometry import geometry
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import nvidia

CONFIG = KernelConfig(KernelVariant.CONV2D_IM2COL, extra={"tier": "simt"})
KINDS = (plans.FORWARD, plans.INPUT_GRAD, plans.WEIGHT_GRAD)
GPU = {"device_type": "gpu", "max_compute_units": 132, "local_mem_size": 48 * 1024, "max_work_group_size": 1024, "max_alloc_size": 2**34}


def job_of(kind, x, w, stride=1, padding=0, dilation=1, groups=1):
    return plans.Convolution(kind, geometry(kind, x, w, stride, padding, dilation, groups), "float32")


def operands(conv, queue, rng, *more):
    """Random ones, with further shapes; as the op takes them."""
    g = conv.g
    shapes = {plans.FORWARD: (g.x_shape, g.w_shape), plans.INPUT_GRAD: (g.y_shape, g.w_shape), plans.WEIGHT_GRAD: (g.x_shape, g.y_shape)}
    return [Tensor.from_host(queue, rng.normal(size=shape).astype("f")) for shape in (*shapes[conv.kind], *more)]


def algorithm(conv, queue, config):
    return plans.convolution_algorithm(queue, conv, config, handle_of(queue).profile)[0].name


def exact(conv, first, second):
    a, b = (t.to_host().astype(np.float64) for t in (first, second))
    if conv.kind == plans.WEIGHT_GRAD:
        return arrays.weight_grad(b, a, g=conv.g)
    return (arrays.conv_forward if conv.kind == plans.FORWARD else arrays.input_grad)(a, b, None, g=conv.g)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        ((3, 5, 9, 7), (6, 5, 3, 3), 2, ((1, 2), (0, 1))),
        ((1, 8, 11, 13), (4, 4, 3, 3), (3, 1), (2, 4), (2, 3), 2),
        ((2, 6, 16, 31), (8, 3, 3, 3), 2, 1, 1, 2),
        ((3, 6, 8, 16), (8, 6, 1, 1)),
    ],
    ids=["stride-2", "groups", "apart", "no-columns"],
)
def test_every_geometry(cl_queue, unoptimized, rng, kind, case, monkeypatch):
    """With work-items that take several channels each."""
    monkeypatch.setattr(columns, "ENOUGH_ITEMS", 64)
    conv = job_of(kind, *case)
    first, second = operands(conv, cl_queue, rng)
    want = exact(conv, first, second)
    got = Tensor.empty(want.shape, queue=cl_queue)
    plans.run(conv, cl_queue, first, second, got, CONFIG)
    np.testing.assert_allclose(got.to_host(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(
    "case, bias", [(((2, 6, 7, 9), (6, 6, 3, 3), 2, 1), True), (((2, 6, 8, 16), (6, 6, 1, 1)), False)], ids=["bias", "by-product"]
)
def test_it_ends_in_what_follows(cl_queue, unoptimized, rng, kind, case, bias):
    """Bit for bit as the ops one by one."""
    epilogue = Epilogue("float32", "float32", "relu", "float16")
    conv = job_of(kind, *case)._replace(bias="float32" if bias else "")
    shape = conv.g.y_shape if kind == plans.FORWARD else conv.g.x_shape
    first, w, added, residual = operands(conv, cl_queue, rng, (6,), shape)
    plain, got = Tensor.empty(shape, queue=cl_queue), Tensor.empty(shape, "float16", queue=cl_queue)
    ends = {"bias": added if bias else None}
    plans.run(conv, cl_queue, first, w, plain, CONFIG, **ends)
    plans.run(conv._replace(epilogue=epilogue), cl_queue, first, w, got, CONFIG, **ends, residual=residual, scale=0.5)
    want = exact(conv, first, w) + (added.to_host().reshape(1, -1, 1, 1) if bias else 0)
    np.testing.assert_allclose(plain.to_host(), want, rtol=1e-5, atol=1e-4)
    if bias:  # which is not scaled
        plans.run(conv._replace(bias=""), cl_queue, first, w, plain, CONFIG)
        plain = Tensor.from_host(cl_queue, plain.to_host() * np.float32(0.5) + added.to_host().reshape(1, -1, 1, 1))
    alone = F.relu(F.add(plain if bias else F.mul(plain, 0.5), residual))
    np.testing.assert_array_equal(got.to_host(), F.cast(alone, "float16").to_host())


def test_columns_that_are_too_large_are_not_made(cl_queue, monkeypatch):
    conv = job_of(plans.FORWARD, (2, 4, 8, 8), (4, 4, 3, 3))
    assert columns.has_room(conv, handle_of(cl_queue).profile) and algorithm(conv, cl_queue, CONFIG) == "columns"
    monkeypatch.setattr(columns, "MOST_VALUES", 4 * 9 * 2 * 36 - 1)
    assert not columns.has_room(conv, handle_of(cl_queue).profile)
    assert algorithm(conv, cl_queue, CONFIG) != "columns"


@pytest.fixture
def chosen(cl_device, monkeypatch):
    """Whether a device of a compute capability takes it for a convolution."""
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")
    monkeypatch.setattr(nvidia, "trusted", lambda *asked: True)

    def takes(conv, capability):
        profile = dataclasses.replace(cl_device.profile, compute_capability=capability, **GPU)
        policy = KernelConfig(KernelVariant.CONV2D_IMPLICIT_GEMM, extra={"why": "a rule"})
        return columns.suits(conv, policy, profile) and columns.pays(cl_device.queue, conv, profile)

    return takes


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_taken_where_products_run_on_matrix_units(chosen, kind):
    strided = job_of(kind, (128, 128, 16, 16), (256, 128, 3, 3), 2, 1)
    assert chosen(strided, (9, 0)) and chosen(strided, (8, 0))
    assert not chosen(strided, (7, 5)) and not chosen(strided, None) and not chosen(strided._replace(dtype="float16"), (9, 0))
    assert not chosen(job_of(kind, (8, 64, 32, 32), (128, 64, 3, 3), 2, 1), (9, 0))  # little to do
    assert chosen(job_of(kind, (1, 64, 64, 64), (32, 64, 1, 1)), (9, 0)) is (kind == plans.FORWARD)  # no columns, few results
    assert chosen(job_of(kind, (1, 512, 16, 16), (256, 512, 3, 3), 1, 1), (9, 0)) is (kind != plans.WEIGHT_GRAD)  # long sums
    assert chosen(job_of(kind, (64, 256, 56, 56), (128, 256, 1, 1)), (9, 0))  # no columns


def test_few_channels_have_their_weight_gradient_by_it(chosen):
    """Other kernels would compute mostly what nobody asks for; forward the sums are too short for matrix units."""
    assert [chosen(job_of(kind, (128, 3, 32, 32), (64, 3, 3, 3), 1, 1), (9, 0)) for kind in KINDS[::2]] == [False, True]


@pytest.mark.parametrize("variant", [KernelVariant.CONV2D_IMPLICIT_GEMM, KernelVariant.CONV2D_WINOGRAD])
def test_only_policy_is_overruled(cl_queue, monkeypatch, variant):
    """What was measured or named is done as it is."""
    monkeypatch.setattr(columns, "pays", lambda *asked: True)
    monkeypatch.setattr(columns, "direct_cost", lambda conv: math.inf)
    monkeypatch.setattr(nvidia, "capable", lambda profile: True)
    monkeypatch.setattr("netcl.ops.conv.convolution.FEW_RESULTS", 0)
    conv = job_of(plans.FORWARD, (1, 4, 9, 8), (4, 4, 3, 3), 2)
    named = KernelConfig(variant, extra={"tier": "simt"})
    by_policy = KernelConfig(variant, extra={"tier": "simt", "why": "a rule"})
    assert algorithm(conv, cl_queue, named) != "columns" and algorithm(conv, cl_queue, by_policy) == "columns"
