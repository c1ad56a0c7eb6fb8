"""Convolutions beyond the samples of their rows: every kernel on every device, PyTorch's numbers, gradients of gradients."""

from __future__ import annotations

import dataclasses
import importlib.util
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
import netcl.ops as F
from netcl.core import dtype as dtypes
from netcl.core.device import handle_of, manager
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import registry
from netcl.engine.algorithms import ALGORITHMS
from netcl.ops.conv import conv2d_with, plans, split
from netcl.ops.conv.geometry import geometry
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import nvidia
from netcl.ops.matmul.gemm import Extras

_spec = importlib.util.spec_from_file_location("image_cases", Path(__file__).parents[1] / "golden" / "image_cases.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

OPS = ("conv2d", "conv2d_input_grad", "conv2d_weight_grad")
V = KernelVariant
KERNELS = {
    f"{config.extra['tier']}-{algorithm.name}-{i}": config
    for algorithm in ALGORITHMS["conv2d"]
    for i, config in enumerate(algorithm.samples)
}


@contextmanager
def forced(config: KernelConfig):
    """Every convolution by one kernel."""
    selector = get_kernel_selector()
    before = dict(selector._registered)
    for op in OPS:
        selector.register(op, lambda shapes, profile: True, config)
    try:
        yield
    finally:
        selector._registered.clear()
        selector._registered.update(before)
        selector.clear_cache()


def call(name, queue, arrays, kwargs, dtype=None):
    """The op's result on the host."""
    tensors = [None if a is None else Tensor.from_host(queue, a, dtype) for a in arrays]
    return getattr(F, name)(*tensors, **kwargs).to_host()


def _kernels_of_ops():
    """Every kernel in every op. The second and later tilings of an algorithm run without --full either forward or for the gradient of
    the input, in turn: the kernel is the same, and the first tiling runs in both.
    """
    for i, kernel in enumerate(KERNELS):
        for name in OPS:
            left_out = not kernel.endswith("-0") and name == OPS[i % 2]
            yield pytest.param(name, kernel, id=f"{name}-{kernel}", marks=[pytest.mark.matrix] * left_out)


@pytest.mark.parametrize(("name", "kernel"), list(_kernels_of_ops()))
def test_every_kernel_meets_the_samples(request, cl_device, name, kernel, in_turn):
    if KERNELS[kernel].extra["tier"] == "simt":
        request.getfixturevalue("unoptimized")
    row, cl_queue = registry.lookup_op(name), cl_device.queue
    turn = list(KERNELS).index(kernel) + OPS.index(name)
    with forced(KERNELS[kernel]):
        for sample in in_turn(row.samples, KERNELS[kernel].extra["tier"], cl_device, turn):
            arrays = sample.arrays()
            got = call(name, cl_queue, arrays, sample.kwargs)
            want = row.ref(*(None if a is None else a.astype(np.float64) for a in arrays), **sample.kwargs)
            # Every result of a Winograd tile has errors of the largest.
            atol = 1e-5 * (max(1, np.abs(want).max() / 4) if "winograd" in kernel else 1)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol, err_msg=f"{kernel} {sample}")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "kernel", ["cpu-panel-0", "cpu-filters-0", "cpu-fold-0", "cpu-pixels-0", "simt-gemm-0", "simt-columns-0", "simt-winograd-0"]
)
def test_kernels_take_every_dtype(cl_queue, kernel, dtype, tol):
    if dtype == "float64" and not handle_of(cl_queue).profile.has_fp64:
        pytest.skip("the device has no float64")
    with forced(KERNELS[kernel]):
        for name in OPS:
            row = registry.lookup_op(name)
            arrays = [None if a is None else rounded(a, dtype) for a in row.samples[1].arrays(dtype=dtype)]
            got = call(name, cl_queue, arrays, row.samples[1].kwargs, dtype)
            want = row.ref(*(None if a is None else a.astype(np.float64) for a in arrays), **row.samples[1].kwargs)
            scale = np.abs(want).max()
            np.testing.assert_allclose(got / scale, want / scale, **tol[dtype], err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_matrix_units_meet_the_samples(cl_device, name, dtype, tol, monkeypatch):
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")
    if not nvidia.capable(cl_device.profile):
        pytest.skip("the device has no matrix units that are known")
    row = registry.lookup_op(name)
    with forced(KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra={"tier": "simt", "form": "mma"})):
        for sample in row.samples:
            arrays = [None if a is None else rounded(a, dtype) for a in sample.arrays(dtype=dtype)]
            got = call(name, cl_device.queue, arrays, sample.kwargs, dtype)
            want = row.ref(*(None if a is None else a.astype(np.float64) for a in arrays), **sample.kwargs)
            scale = np.abs(want).max()
            np.testing.assert_allclose(got / scale, want / scale, **tol[dtype], err_msg=str(sample))
    assert program.state(cl_device.queue)[("conv2d", "mma", dtype)], "the kernels failed their own check: portable ones were seen"


def rounded(array, dtype):
    """Values as a tensor of ``dtype`` holds them."""
    row = dtypes.lookup(dtype)
    return dtypes.decode(dtypes.encode(array, row), row)


def _golden_cases():
    """Every second on OpenCL devices, the others with --full: the samples above hold the same options to the reference."""
    return [pytest.param(k, marks=[pytest.mark.matrix] * (k % 2), id=case.key) for k, case in enumerate(golden.CONV)]


@pytest.mark.parametrize("k", _golden_cases())
def test_numbers_are_torchs(queue, k):
    golden.check("conv", k, queue)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}], ids=str)
def test_gradients_have_gradients(options):
    """In float64 on NumPy: every second derivative is a composition of the three convolutions, which other tests hold everywhere."""
    rng = np.random.default_rng(3)
    groups = options.get("groups", 1)
    x, w, b = (
        Tensor.from_host(numpy_queue(), rng.normal(size=s), "float64", requires_grad=True)
        for s in ((2, 4, 6, 5), (4, 4 // groups, 2, 2), (4,))
    )
    assert ag.gradgradcheck(lambda x, w, b: ag.square(ag.conv2d(x, w, b, **options)), [x, w, b], rtol=1e-4, atol=1e-6)
    assert ag.gradgradcheck(lambda x, w: ag.square(ag.conv_transpose2d(x, w, **options)), [x, w], rtol=1e-4, atol=1e-6)


def numpy_queue():
    return manager.default("cpu").queue


def test_the_three_are_transposes_of_each_other(queue, rng):
    """<conv(x, w), g> = <x, input_grad(g, w)> = <w, weight_grad(g, x)>, at a size that needs several panels, tiles and splits."""
    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    x, w = rng.normal(size=(3, 70, 17, 19)).astype("f"), rng.normal(size=(33, 70, 3, 4)).astype("f")
    tx, tw = Tensor.from_host(queue, x), Tensor.from_host(queue, w)
    y = F.conv2d(tx, tw, **options)
    g = rng.normal(size=y.shape).astype("f")
    tg = Tensor.from_host(queue, g)
    dx, dw = F.conv2d_input_grad(tg, tw, size=(17, 19), **options), F.conv2d_weight_grad(tg, tx, kernel=(3, 4), **options)
    inner = (y.to_host().astype(np.float64) * g).sum()
    scale = np.linalg.norm(y.to_host()) * np.linalg.norm(g)
    for a, b in ((dx, x), (dw, w)):
        assert abs((a.to_host().astype(np.float64) * b).sum() - inner) < 1e-6 * scale


@pytest.mark.parametrize("stride", [1, 2])
def test_input_gradients_over_several_panels(cl_queue, rng, stride):
    """Groups included, by the kernels of CPUs."""
    dy, w = rng.normal(size=(2, 66, 4, 5)).astype("f"), rng.normal(size=(66, 60, 3, 3)).astype("f")
    options = {"size": (4 * stride, 5 * stride), "stride": stride, "padding": 1, "groups": 2}
    want = registry.lookup_op("conv2d_input_grad").ref(dy.astype(np.float64), w.astype(np.float64), **options)
    with forced(KernelConfig(V.CONV2D_IM2COL, extra={"tier": "cpu", "KC": 64, "ROWS": 12, "NT": 2})):
        got = call("conv2d_input_grad", cl_queue, [dy, w], options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_pad_is_another_name_of_padding(queue, rng):
    x, w = (
        Tensor.from_host(queue, rng.normal(size=(1, 2, 5, 5)).astype("f")),
        Tensor.from_host(queue, rng.normal(size=(3, 2, 3, 3)).astype("f")),
    )
    np.testing.assert_array_equal(F.conv2d(x, w, pad=1).to_host(), F.conv2d(x, w, padding=[1, 1]).to_host())
    x.requires_grad = w.requires_grad = True
    ag.sum(ag.conv2d(x, w, pad=(1, 0), stride=2)).backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


def test_an_empty_batch_has_a_result_and_no_weight_gradient(queue):
    x, w = Tensor.zeros((0, 3, 5, 5), queue=queue), Tensor.ones((4, 3, 3, 3), queue=queue)
    y = F.conv2d(x, w)
    assert y.shape == (0, 4, 3, 3)
    assert F.conv2d_input_grad(y, w, size=(5, 5)).shape == x.shape
    np.testing.assert_array_equal(F.conv2d_weight_grad(y, x, kernel=(3, 3)).to_host(), np.zeros((4, 3, 3, 3)))


def test_two_runs_agree_bit_for_bit(queue, rng):
    x = Tensor.from_host(queue, rng.normal(size=(4, 3, 24, 24)).astype("f"))
    g = Tensor.from_host(queue, rng.normal(size=(4, 8, 24, 24)).astype("f"))
    first, second = (F.conv2d_weight_grad(g, x, kernel=(3, 3), padding=1).to_host() for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_new_size_does_not_recompile(cl_queue, rng):
    def step(n, size):
        x, w = Tensor.zeros((n, 8, size, size), queue=cl_queue), Tensor.zeros((12, 8, 3, 3), queue=cl_queue)
        y = F.conv2d(x, w, padding=1)
        F.conv2d_input_grad(y, w, size=(size, size), padding=1)
        F.conv2d_weight_grad(y, x, kernel=(3, 3), padding=1)

    step(8, 16)
    before = program.build_count()
    for n, size in ((9, 16), (8, 15), (7, 33)):
        step(n, size)
    assert program.build_count() == before


def test_a_variant_that_does_not_fit_is_replaced_and_said(cl_queue, unoptimized, caplog):
    program.state(cl_queue).pop(("conv2d", "logged"), None)
    x, w = Tensor.zeros((1, 3, 40, 40), queue=cl_queue), Tensor.ones((3, 3, 33, 33), queue=cl_queue)
    with caplog.at_level("INFO", "netcl"), forced(KernelConfig(V.CONV2D_WINOGRAD, extra={"tier": "simt", "mark": 1})):
        F.conv2d(x, w)
        F.conv2d(x, w)
    assert [r.message for r in caplog.records if "does not suit" in r.message] == [
        "[conv2d] winograd does not suit this convolution: gemm instead; x.shape=(1, 3, 40, 40), w.shape=(3, 3, 33, 33)"
    ]


def test_nan_and_infinity_stay_where_they_are_seen(queue):
    x = np.ones((1, 1, 5, 5), np.float32)
    x[0, 0, 0, 0], x[0, 0, 4, 4] = np.nan, np.inf
    tx, w = Tensor.from_host(queue, x), Tensor.ones((8, 1, 3, 3), queue=queue)
    y = F.conv2d_relu(tx, w).to_host()
    assert np.isnan(y[0, :, 0, 0]).all() and np.isposinf(y[0, :, 2, 2]).all() and (y[0, :, 0, 2] == 9).all()


def test_sums_are_divided_where_results_are_few(cl_device):
    """By the policy on GPUs; a registered configuration that does not name the kernel is run as it is."""
    like = {"max_compute_units": 132, "local_mem_size": 48 * 1024, "max_work_group_size": 1024}
    gpu, cpu = (dataclasses.replace(cl_device.profile, device_type=kind, **like) for kind in ("gpu", "cpu"))
    policy, named = (KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra=extra) for extra in ({"why": "a rule"}, {}))

    def divided(batch, kind="conv2d", dtype="float32", config=policy, profile=gpu):
        g = geometry("conv2d", (batch, 256, 14, 14), (256, 256, 3, 3), 1, 1, 1, 1)
        return split.suits_split(plans.Convolution(kind, g, dtype), config, profile)

    assert divided(1) and divided(1, "conv2d_input_grad") and not divided(128)
    assert not divided(1, "conv2d_weight_grad") and not divided(1, dtype="float16")
    assert not divided(1, profile=cpu) and not divided(1, config=named) and divided(128, config=split.SPLIT_SAMPLES[0])


def test_parts_of_a_sum_end_in_the_whole_epilogue(cl_queue, unoptimized, rng):
    """Bias, residual and activation are applied once, after the parts were added; twice the same bits."""
    x, w, b, r = (rng.standard_normal(s).astype(np.float32) for s in ((2, 20, 6, 7), (9, 20, 3, 3), (9,), (2, 9, 6, 7)))
    g = geometry("conv2d", x.shape, w.shape, 1, 1, 1, 1)
    extras = Extras(Epilogue("float32", residual="float32", activation="relu"), *(Tensor.from_host(cl_queue, a) for a in (b, r)), 0.5)
    with forced(split.SPLIT_SAMPLES[1]):
        one, two = (conv2d_with(*(Tensor.from_host(cl_queue, a) for a in (x, w)), extras, g).to_host() for _ in range(2))
    want = registry.lookup_op("conv2d").ref(x.astype(np.float64), w.astype(np.float64), None, padding=1)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(one, np.maximum(0.5 * want + b[:, None, None] + r, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("act", ["", "relu6"])
def test_depthwise_lines(request, cl_device, rng, lanes, act):
    """Lines shorter and longer than vectors, in one and several pieces, with every option and epilogue."""
    if lanes != cl_device.profile.lanes:
        request.getfixturevalue("unoptimized")  # kernels for other CPUs
    for size, kernel, filters, options in (
        ((7, 7), 5, 1, {"padding": 2}),
        ((2, 96), 5, 1, {"padding": 2, "stride": (2, 1)}),
        ((130, 61), 3, 1, {"padding": ((0, 1), (2, 0)), "stride": 2}),
        ((19, 33), 3, 2, {"padding": 3, "dilation": (2, 3), "stride": (1, 3)}),
    ):
        x, w = rng.standard_normal((2, 6, *size), np.float32), rng.standard_normal((6 * filters, 1, kernel, kernel), np.float32)
        bias = rng.standard_normal(6 * filters, np.float32)
        options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 6, **options}
        want = F.conv2d(*map(Tensor.from_host, [None] * 3, (x, w, bias)), **options).to_host()
        residual = rng.standard_normal(want.shape, np.float32)
        g = geometry("conv2d", x.shape, w.shape, *options.values())
        config = KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra={"tier": "cpu", "form": "depth", "VW": lanes})
        for added in (None, residual):
            epilogue = Epilogue("float32", activation=act, residual="" if added is None else "float32")
            tensors = [None if a is None else Tensor.from_host(cl_device.queue, a) for a in (x, w, bias, added)]
            with forced(config):
                y = conv2d_with(*tensors[:2], Extras(epilogue, *tensors[2:], 1), g).to_host()
            total = want if added is None else want + added
            assert np.abs(y - (np.clip(total, 0, 6) if act else total)).max() < 1e-4


@pytest.mark.parametrize(
    ("size", "shape", "options"),
    [
        ((7, 7), (20, 12, 1, 1), {}),
        ((40, 1), (13, 8, 5, 1), {"padding": (2, 0), "stride": (2, 1)}),
        ((9, 11), (14, 6, 3, 3), {"padding": 1, "groups": 2, "stride": 2}),
        ((14, 14), (40, 36, 3, 3), {"padding": 1}),
    ],
)
def test_weights_kept_by_a_recording_are_packed(cl_queue, rng, size, shape, options):
    options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    x, w = rng.standard_normal((2, shape[1] * options["groups"], *size), np.float32), rng.standard_normal(shape, np.float32)
    g = geometry("conv2d", x.shape, w.shape, *options.values())
    got = conv2d_with(*(Tensor.from_host(cl_queue, a) for a in (x, w)), Extras(Epilogue("float32"), kept=True), g).to_host()
    want = F.conv2d(*map(Tensor.from_host, [None] * 2, (x, w)), **options).to_host()
    assert np.abs(got - want).max() < 1e-3
