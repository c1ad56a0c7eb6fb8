"""Winograd's convolution on CPUs: tiles, lines and filters that do not fill vectors, how exact it is, when it is taken."""

import numpy as np
import pytest

from netcl.core.device import handle_of
from netcl.core.kernel_selector import KernelConfig, KernelVariant, decide
from netcl.core.tensor import Tensor
from netcl.engine import registry
from netcl.engine.launch import on_cpu_device
from netcl.ops.conv import arrays, plans, winograd_cpu, winograd_grads
from netcl.ops.conv.convolution import THIN
from netcl.ops.conv.geometry import geometry

# The device's own and others; 16 lanes are tried by test_oclgrind.py, too.
TILES = [
    {"MR": 8, "NV": 1, "NT": 2, "FRESH": 1},
    {"VW": 4, "MR": 8, "NV": 2, "NT": 2, "FRESH": 0},
    {"VW": 8, "MR": 4, "NV": 1, "NT": 1, "FRESH": 1},
]
SHAPES = [
    (1, 3, 1, 1, 1, 1),  # a tile that is mostly padding
    (2, 5, 13, 9, 7, (0, 2)),
    (3, 6, 7, 30, 17, ((0, 1), (3, 1))),  # more padding than a window is wide
    (5, 2, 8, 8, 9, 1),  # a strip of several images
    (1, 4, 6, 71, 20, 1),  # lines longer than a strip
    (1, 70, 3, 3, 5, 1),  # channels of which weights are transformed in two turns
]  # fmt: skip


def job_of(kind, n, c, h, w, f, padding, **options):
    return plans.Convolution(kind, geometry(kind, (n, c, h, w), (f, c, 3, 3), 1, padding, 1, 1), "float32", **options)


def run(conv, queue, *arrays, **extra):
    config = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "cpu", "winograd_channels": 1, **extra})
    assert conv.filters <= THIN or winograd_cpu.suits(conv, config, handle_of(queue).profile)
    first, second, *bias = (Tensor.from_host(queue, array) for array in arrays)
    result = Tensor.empty(conv.g.x_shape if conv.kind == plans.INPUT_GRAD else conv.g.y_shape, queue=queue)
    plans.run(conv, queue, first, second, result, config, bias=bias[0] if bias else None)
    return result.to_host()


def exact(conv, first, second, bias=None):
    after = (conv.g.oh + 2, conv.g.ow + 2)
    padding = [(before, size - n - before) for before, size, n in zip(conv.g.pad, after, conv.g.x_shape[2:], strict=True)]
    row = registry.lookup_op(conv.kind)
    if conv.kind == plans.INPUT_GRAD:
        return row.ref(first.astype(np.float64), second.astype(np.float64), size=conv.g.x_shape[2:], padding=tuple(padding))
    return row.ref(*(None if a is None else a.astype(np.float64) for a in (first, second, bias)), padding=tuple(padding))


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_shape_in_every_tile(cl_queue, rng, tiles, full):
    """With --full; else every tile takes half of the shapes, by turns."""
    chosen = [*enumerate(SHAPES)]
    for k, sizes in chosen if full else chosen[TILES.index(tiles) % 2 :: 2]:
        for kind in (plans.FORWARD, plans.INPUT_GRAD):
            biased = "VW" not in tiles and kind == plans.FORWARD and k % 2 == 1
            conv = job_of(kind, *sizes, bias=biased, relu=biased)
            source = conv.g.x_shape if kind == plans.FORWARD else conv.g.y_shape
            arrays = [rng.normal(size=s).astype("f") for s in (source, conv.g.w_shape, *([conv.g.f] if biased else []))]
            want = exact(conv, *arrays)
            want = np.maximum(want, 0) if biased else want
            atol = 1e-5 * max(1, np.abs(want).max() / 4)
            np.testing.assert_allclose(run(conv, cl_queue, *arrays, **tiles), want, rtol=1e-5, atol=atol, err_msg=f"{kind} {sizes}")


@pytest.mark.parametrize("kind", [plans.FORWARD, plans.INPUT_GRAD])
def test_the_error_is_within_four_times_that_of_a_plain_sum(cl_queue, rng, kind):
    """What the policy takes on a CPU, with values as after batch norm and ReLU."""
    conv = job_of(kind, 2, 64, 16, 16, 64, 1)
    x, w = np.maximum(rng.normal(size=conv.g.x_shape), 0).astype("f"), rng.normal(size=conv.g.w_shape).astype("f")
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
    weights = w if kind == plans.FORWARD else w[:, :, ::-1, ::-1].swapaxes(0, 1)
    plain, want = np.zeros(x.shape, np.float32), np.zeros(x.shape)
    for c in range(64):
        for tap in range(9):
            patch, factor = seen[:, c, :, :, tap // 3, tap % 3], weights[:, c, tap // 3, tap % 3]
            plain += factor[None, :, None, None] * patch[:, None]
            want += factor[None, :, None, None].astype(np.float64) * patch[:, None]
    assert np.abs(run(conv, cl_queue, x, w) - want).max() <= 4 * np.abs(plain - want).max()


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((8, 64, 56, 56, 64), True), ((8, 256, 8, 8, 256), True), ((8, 512, 4, 4, 512), True), ((8, 3, 32, 32, 64), False),
        ((32, 64, 2, 2, 64), False), ((1, 64, 4, 4, 64), False),
    ],
)  # fmt: skip
def test_it_is_taken_where_it_pays(cl_device, sizes, expected):
    assert {winograd_cpu.pays(job_of(kind, *sizes, 1), cl_device.profile) for kind in (plans.FORWARD, plans.INPUT_GRAD)} == {expected}


def test_the_policy_leaves_it_to_the_plan_and_a_switch_forbids_it(cl_queue, monkeypatch):
    if not on_cpu_device(cl_queue):
        pytest.skip("another device has other kernels")
    profile = handle_of(cl_queue).profile
    for switch in ("1", "0"):
        monkeypatch.setenv("NETCL_CONV_WINOGRAD", switch)
        for kind in (plans.FORWARD, plans.INPUT_GRAD):
            conv = job_of(kind, 2, 64, 16, 16, 64, 1)
            chosen, _ = plans.convolution_algorithm(cl_queue, conv, decide(plans.conv_problem(conv, profile)), profile)
            assert (chosen.name == "winograd_cpu") == (switch == "1")


# ---- weight gradients

GRADS = [
    (2, 3, 7, 6, 5, 1),
    (3, 37, 13, 9, 70, (0, 2)),  # two blocks of filters, both with lanes to spare
    (9, 40, 8, 8, 33, 1),  # tiles for more than one turn
]  # fmt: skip


def weight_grad(conv, queue, x, dy, **extra):
    config = KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"tier": "cpu", "winograd_channels": 1, **extra})
    assert winograd_grads.suits(conv, config, handle_of(queue).profile)
    result = Tensor.empty(conv.g.w_shape, queue=queue)
    plans.run(conv, queue, Tensor.from_host(queue, x), Tensor.from_host(queue, dy), result, config)
    return result.to_host()


@pytest.mark.parametrize("tiles", [{}, {"VW": 8}], ids=str)
def test_weight_gradients_of_every_shape(cl_queue, rng, tiles):
    for sizes in GRADS:
        conv = job_of(plans.WEIGHT_GRAD, *sizes)
        x, dy = (rng.normal(size=shape).astype("f") for shape in (conv.g.x_shape, conv.g.y_shape))
        want = arrays.weight_grad(dy.astype(np.float64), x.astype(np.float64), g=conv.g)
        got = weight_grad(conv, cl_queue, x, dy, **tiles)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6 * np.abs(want).max(), err_msg=str(sizes))


def test_the_error_of_weight_gradients_is_within_four_times_that_of_a_plain_sum(cl_queue, rng):
    conv = job_of(plans.WEIGHT_GRAD, 2, 32, 16, 16, 32, 1)
    x, dy = np.maximum(rng.normal(size=conv.g.x_shape), 0).astype("f"), rng.normal(size=conv.g.y_shape).astype("f")
    rows = dy.transpose(1, 0, 2, 3).reshape(32, -1)
    columns = arrays.columns(x, conv.g)[:, 0].swapaxes(0, 1).reshape(32 * 9, -1)
    plain = np.zeros((32, 32 * 9), np.float32)
    for k in range(rows.shape[1]):
        plain += rows[:, k : k + 1] * columns[:, k]
    want = rows.astype(np.float64) @ columns.astype(np.float64).T
    assert np.abs(weight_grad(conv, cl_queue, x, dy).reshape(want.shape) - want).max() <= 4 * np.abs(plain - want).max()


@pytest.mark.parametrize(
    "sizes, expected", [((8, 64, 56, 56, 64), True), ((8, 256, 8, 8, 256), True), ((8, 512, 4, 4, 512), False), ((8, 3, 32, 32, 64), False)]
)
def test_weight_gradients_are_taken_where_they_pay(sizes, expected):
    assert winograd_grads.pays(job_of(plans.WEIGHT_GRAD, *sizes, 1)) is expected
