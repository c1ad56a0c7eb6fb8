"""Normalisation: torch's numbers, running statistics, and every way a channel is folded."""

import sys
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.engine import rows
from netcl.engine.registry import REGISTRY
from tests.conftest import eager_fusion

GOLDEN = np.load(Path(__file__).parent.parent / "golden/rows.npz")
CASES = {
    "layer_norm": ("x lw lb", lambda x, w, b: ag.layer_norm(x, (7, 5), w, b)),
    "rms_norm": ("x lw", lambda x, w: ag.rms_norm(x, (7, 5), w)),
    "group_norm": ("x w b", lambda x, w, b: ag.group_norm(x, 3, w, b)),
    "instance_norm": ("x w b", lambda x, w, b: ag.instance_norm(x, w, b)),
    "batch_norm": ("x w b", lambda x, w, b: ag.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm_rows": ("rows w b", lambda x, w, b: ag.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm_eval": ("x w b", lambda x, w, b: ag.batch_norm(x, GOLDEN["mean"], GOLDEN["var"], w, b)),
}


@pytest.mark.parametrize("name", CASES)
def test_torchs_numbers(name, device):
    names, call = CASES[name]
    leaves = [Tensor.from_host(device.queue, GOLDEN[leaf], requires_grad=True) for leaf in names.split()]
    out = call(*leaves)
    out.backward(Tensor.from_host(device.queue, GOLDEN[f"{name}.g"]))
    np.testing.assert_allclose(out.to_host(), GOLDEN[f"{name}.out"], rtol=1e-5, atol=1e-4 if "rows" in name else 2e-6)
    for leaf, t in zip(names.replace("rows", "x").split(), leaves, strict=True):
        want = GOLDEN[f"{name}.d_{leaf}"]
        np.testing.assert_allclose(t.grad.to_host(), want, rtol=1e-5, atol=1e-4 if "rows" in name else 1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name, x", [("batch_norm", "x"), ("batch_norm_rows", "rows")])
def test_running_statistics_are_torchs(name, x, device):
    mean, var = (Tensor.from_host(device.queue, GOLDEN[key]) for key in ("mean", "var"))
    ops.batch_norm(Tensor.from_host(device.queue, GOLDEN[x]), mean, var, training=True, momentum=0.3)
    np.testing.assert_allclose(mean.to_host(), GOLDEN[f"{name}.running_mean"], rtol=1e-5)
    np.testing.assert_allclose(var.to_host(), GOLDEN[f"{name}.running_var"], rtol=1e-4)


def test_evaluation_leaves_running_statistics_alone(device):
    mean, var = (Tensor.from_host(device.queue, GOLDEN[key]) for key in ("mean", "var"))
    ops.batch_norm(Tensor.from_host(device.queue, GOLDEN["x"]), mean, var)
    assert np.array_equal(mean.to_host(), GOLDEN["mean"]) and np.array_equal(var.to_host(), GOLDEN["var"])


def test_a_large_mean_does_not_swamp_the_variance(device):
    x = (1e4 + np.random.default_rng(0).standard_normal((8, 3, 300))).astype(np.float32)
    want = (x - x.mean((0, 2), keepdims=True, dtype=np.float64)) / x.std((0, 2), keepdims=True, dtype=np.float64)
    for y in (
        ops.batch_norm(Tensor.from_host(device.queue, x), training=True),
        ops.batch_norm(Tensor.from_host(device.queue, x[..., 0]), training=True),
    ):
        assert np.isfinite(y.to_host()).all()
    y = ops.batch_norm(Tensor.from_host(device.queue, x), training=True).to_host()
    np.testing.assert_allclose(y, want, atol=2e-3)
    rows = ops.layer_norm(Tensor.from_host(device.queue, x), 300).to_host()
    np.testing.assert_allclose(
        rows, (x - x.mean(-1, keepdims=True, dtype=np.float64)) / x.std(-1, keepdims=True, dtype=np.float64), atol=2e-3
    )


def test_an_empty_batch_changes_nothing(device):
    mean, var = Tensor.zeros((3,), queue=device.queue), Tensor.ones((3,), queue=device.queue)
    x = Tensor.zeros((0, 3, 4), queue=device.queue, requires_grad=True)
    w = Tensor.ones((3,), queue=device.queue, requires_grad=True)
    y = ag.batch_norm(x, mean, var, w, training=True)
    y.backward(Tensor.zeros(y.shape, queue=device.queue))
    assert y.shape == (0, 3, 4) and x.grad.shape == (0, 3, 4)
    assert w.grad.tolist() == [0, 0, 0] and mean.tolist() == [0, 0, 0] and var.tolist() == [1, 1, 1]


def test_half_storage_with_float32_weights_and_statistics(device):
    x = np.random.default_rng(0).standard_normal((4, 3, 50)).astype(np.float16)
    w = Tensor.from_host(device.queue, np.array([1.0, 2.0, 3.0], np.float32))
    mean, var = Tensor.zeros((3,), queue=device.queue), Tensor.ones((3,), queue=device.queue)
    y, m, s = ops.batch_norm_train(Tensor.from_host(device.queue, x), w, None, mean, var)
    assert (y.dtype, m.dtype, s.dtype, mean.dtype) == ("float16", "float32", "float32", "float32")
    wide = x.astype(np.float64)
    want = (wide - wide.mean((0, 2), keepdims=True)) / wide.std((0, 2), keepdims=True) * np.array([1, 2, 3]).reshape(3, 1)
    np.testing.assert_allclose(y.to_host(), want, atol=5e-3)
    np.testing.assert_allclose(mean.to_host(), 0.1 * wide.mean((0, 2)), atol=1e-5)


@pytest.mark.parametrize("channels, span", [(1, 1000), (2, 1), (70, 9), (257, 3)])
def test_channels_whole_and_in_parts_agree(cl_device, monkeypatch, channels, span):
    from netcl.ops import batch_norm

    module = __import__("sys").modules["netcl.ops.batch_norm"]
    assert batch_norm is not module  # the package offers the op under that name
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((9, channels, span)).astype(np.float32) for _ in range(2))
    answers = []
    for fused in (False, True):
        monkeypatch.setattr(module, "_fuses", lambda queue, x, span, chosen=fused: chosen and span > 1)
        tx, tg = (Tensor.from_host(cl_device.queue, a) for a in (x, g))
        y, mean, rstd = ops.batch_norm_train(tx)
        answers.append([t.to_host() for t in (y, mean, rstd, *ops.batch_norm_grad(tg, tx, None, mean, rstd))])
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: ag.layer_norm(x, 6, w),
        lambda x, w: ag.rms_norm(x, 6, w),
        lambda x, w: ag.group_norm(ag.reshape(x, (2, 6, 2)), 3, w),
        lambda x, w: ag.batch_norm(ag.reshape(x, (4, 6)), None, None, w, training=True),
    ],
    ids=["layer", "rms", "group", "batch"],
)
def test_second_derivatives(call):
    rng = np.random.default_rng(0)
    x, w = (Tensor.from_host(rng.standard_normal(shape), dtype="float64").to("cpu").requires_grad_() for shape in ((4, 6), (6,)))
    assert ag.gradgradcheck(call, [x, w])


def test_wrong_calls(device):
    x = Tensor.zeros((2, 3), queue=device.queue)
    with pytest.raises(DtypeError, match=r"\[batch_norm\] mean and var must have the same dtype; mean=float32, var=float64"):
        ops.batch_norm_inference(x, np.zeros(3, np.float32), Tensor.zeros((3,), "float64", queue=device.queue))
    with pytest.raises(ShapeError, match=r"\[batch_norm_grad\] rstd must have shape \(3,\); rstd=\(2,\)$"):
        ops.batch_norm_grad(x, x, None, np.zeros(3, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ShapeError, match=r"\[batch_norm\] x must be \(N, C, ...\); x=\(3,\)"):
        ops.batch_norm(Tensor.zeros((3,), queue=device.queue), training=True)
    with pytest.raises(DtypeError, match=r"\[row_norm\] x must have a dtype that this op accepts"):
        ops.layer_norm(Tensor.zeros((2, 3), "int32", queue=device.queue), 3)


def test_backward_keeps_the_statistics_and_not_the_result():
    x = Tensor.ones((4, 3), device="cpu", requires_grad=True)
    node = ag.layer_norm(x, 3).grad_fn
    assert [None if kept is None else kept.shape for kept in node.saved[3]] == [None, (4,), (4,)]


@pytest.mark.parametrize("n", [pytest.param(768, marks=pytest.mark.matrix), 1000, 130, 17])
def test_rows_as_a_gpu_spreads_them(n, cl_device, unoptimized, monkeypatch, rng):
    """Four elements at a time, kept in registers, by a work-group: on whatever device there is."""
    monkeypatch.setattr(rows, "device_of", lambda queue: (False, 256, 2))
    monkeypatch.setattr(rows, "PART_ITEMS", 1)  # two groups for three rows: sums over several rows, then over parts
    spread = rows.row_spread(False, 256, n, False, n % 4 == 0)
    assert (spread.vec, spread.held > 0) == ((4, True) if n % 4 == 0 else (1, False))
    x, g, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, n), (3, n), (n,), (n,)))
    tx, tg, tw, tb = (Tensor.from_host(cl_device.queue, a) for a in (x, g, w, b))
    y, mean, rstd = ops.row_norm(tx, tw, tb, axes=1)
    want, wanted_mean, wanted_rstd = REGISTRY["row_norm"].ref(*(a.astype(np.float64) for a in (x, w, b)), axes=1)
    np.testing.assert_allclose(y.to_host(), want, rtol=1e-5, atol=1e-5)
    back = REGISTRY["row_norm_grads"].ref(*(a.astype(np.float64) for a in (g, x, w)), wanted_mean, wanted_rstd, axes=1)
    for found, wanted in zip(ops.row_norm_grads(tg, tx, tw, mean, rstd, axes=1), back, strict=True):
        np.testing.assert_allclose(found.to_host(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ops.row_norm_grad(tg, tx, tw, mean, rstd, axes=1).to_host(), back[0], rtol=1e-4, atol=1e-5)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(ops.softmax(tx).to_host(), e / e.sum(1, keepdims=True), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(ops.log_softmax(tx).to_host(), x - np.log(e.sum(1, keepdims=True)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 3, 16, 16), (9, 3, 130)])
def test_channels_as_a_gpu_spreads_them(shape, cl_device, unoptimized, monkeypatch, rng):
    monkeypatch.setattr(rows, "device_of", lambda queue: (False, 256, 64))
    monkeypatch.setattr(sys.modules["netcl.ops.batch_norm"], "FUSED_ELEMENTS", 0)
    x, g, w, b = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape, (3,), (3,)))
    tx, tg, tw, tb = (Tensor.from_host(cl_device.queue, a) for a in (x, g, w, b))
    y, mean, rstd = ops.batch_norm_train(tx, tw, tb)
    want = REGISTRY["batch_norm_train"].ref(*(a.astype(np.float64) for a in (x, w, b)))
    for got, exact in zip((y, mean, rstd), want, strict=True):
        np.testing.assert_allclose(got.to_host(), exact, rtol=1e-5, atol=1e-5)
    back = REGISTRY["batch_norm_grad"].ref(*(a.astype(np.float64) for a in (g, x, w)), *want[1:])
    for got, exact in zip(ops.batch_norm_grad(tg, tx, tw, mean, rstd), back, strict=True):
        np.testing.assert_allclose(got.to_host(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape, gpu, backward",
    [
        ((9, 3, 16, 16), (False, 256, 64), ["sum_parts", "join_sums", "batch_norm_grad_rows"]),
        ((9, 3, 5), (False, 256, 2), ["batch_norm_grad_channels"]),
        ((9, 3, 16, 16), None, ["batch_norm_grad_channels"]),
    ],
    ids=["parts", "whole", "cpu"],
)
def test_a_residual_and_a_relu_are_part_of_the_kernels(request, shape, gpu, backward, cl_device, monkeypatch, rng):
    if gpu:
        request.getfixturevalue("unoptimized")
    monkeypatch.setattr(rows, "device_of", lambda queue: gpu or (True, 256, 2))
    monkeypatch.setattr(sys.modules["netcl.ops.batch_norm"], "FUSED_ELEMENTS", 0)
    x, r, g, w, b = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape, shape, (3,), (3,)))
    wide = [a.astype(np.float64) for a in (x, r, g, w, b)]
    plain, mean, rstd = REGISTRY["batch_norm_train"].ref(wide[0], *wide[3:])
    want = np.maximum(plain + wide[1], 0)
    masked = np.where(want > 0, wide[2], 0)
    exact = [*REGISTRY["batch_norm_grad"].ref(masked, wide[0], wide[3], mean, rstd), masked]
    tx, tr, tw, tb = (Tensor.from_host(cl_device.queue, a).requires_grad_() for a in (x, r, w, b))
    tg, running = Tensor.from_host(cl_device.queue, g), [Tensor.zeros((3,), queue=cl_device.queue) for _ in range(2)]
    seen: list[str] = []
    hooks.launch_observers.append(lambda kernel, *_: seen.append(kernel.name))
    try:
        with eager_fusion(1):
            y = ag.relu(ag.batch_norm(tx, *running, tw, tb, training=True) + tr)
            np.testing.assert_allclose(running[0].to_host(), 0.1 * mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(y.to_host(), want, rtol=1e-4, atol=1e-5)
            forward, seen[:] = list(seen), []
            grads = ag.grad(y, [tx, tw, tb, tr], tg)
            for got, true in zip(grads, exact, strict=True):
                np.testing.assert_allclose(got.to_host(), true, rtol=1e-4, atol=1e-4)
    finally:
        hooks.launch_observers.pop()
    assert forward[-1] == "op_batch_norm_add_relu" and len(forward) == (3 if "sum_parts" in backward else 2)
    assert sorted(seen) == sorted([*backward, "op_relu_vjp"])
