"""Fields of a registered ``KernelConfig`` decide which kernel runs, and with which local size; results stay right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from netcl import ops
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import KernelConfig, KernelSelector, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import reduction

V = KernelVariant


@pytest.fixture
def use(monkeypatch):
    """Register a configuration for an op, for this test alone."""
    selector = get_kernel_selector()
    monkeypatch.setattr(selector, "_registered", {})

    def register(op, config):
        selector.register(op, lambda shapes, device: True, config)

    yield register
    monkeypatch.undo()
    selector.clear_cache()


@pytest.fixture
def launches():
    """Name, local size and source of every launch."""
    seen = []

    def saw(kernel, queue, sizes, local, args, event):
        seen.append((kernel.name, local[0] if local else None, kernel.program.source))

    hooks.launch_observers.append(saw)
    yield seen
    hooks.launch_observers.remove(saw)


def random(rng, queue, *shape):
    values = rng.standard_normal(shape, np.float32)
    return values, Tensor.from_host(queue, values)


# ---- elementwise


@pytest.mark.parametrize("local", [1, 4, 32])
def test_local_size_of_elementwise_kernels(cl_device, rng, use, launches, local):
    values, x = random(rng, cl_device.queue, 5000)
    use("elementwise", KernelConfig(V.ELEMENTWISE_VECTORIZED, local_size_1d=local))
    np.testing.assert_array_equal(ops.neg(x).to_host(), -values)
    assert [(name, size) for name, size, _ in launches] == [("op_neg", local)]


@pytest.mark.parametrize("vectors", [True, False])
def test_elementwise_kernels_without_vectors(cl_device, rng, use, launches, vectors):
    values, x = random(rng, cl_device.queue, 5000)
    use("elementwise", KernelConfig(V.ELEMENTWISE_VECTORIZED, use_vectorization=vectors))
    np.testing.assert_array_equal(ops.abs(x).to_host(), np.abs(values))
    ((_, _, source),) = launches
    use("elementwise", KernelConfig(V.ELEMENTWISE_SCALAR))
    ops.abs(x)
    assert (launches[1][2] == source) is not vectors


def test_a_configuration_replaces_what_was_planned_before(cl_device, rng, use, launches):
    _, x = random(rng, cl_device.queue, 5000)
    ops.neg(x), ops.sum(x)
    launches.clear()
    use("elementwise", KernelConfig(V.ELEMENTWISE_VECTORIZED, local_size_1d=2))
    use("reduction", KernelConfig(V.REDUCTION_PARALLEL, local_size_1d=8))
    ops.neg(x), ops.sum(x)
    assert [row[:2] for row in launches] == [("op_neg", 2), ("reduce_group", 8)]


# ---- reductions


@pytest.mark.parametrize(
    "changes, kernel, local",
    [
        ({}, "reduce_group", None),
        ({"local_size_1d": 16}, "reduce_group", 16),
        ({"local_size_1d": 23}, "reduce_group", 16),
        ({"use_local_memory": False, "local_size_1d": 4}, "reduce_rows", 4),
        ({"variant": V.REDUCTION_SEQUENTIAL, "local_size_1d": 2}, "reduce_rows", 2),
    ],
)
def test_reductions_of_rows(cl_device, rng, use, launches, changes, kernel, local):
    values, x = random(rng, cl_device.queue, 6, 700)
    use("reduction", KernelConfig(**{"variant": V.REDUCTION_PARALLEL, **changes}))
    np.testing.assert_allclose(ops.sum(x, axis=1).to_host(), values.sum(1), rtol=1e-4, atol=1e-4)
    ((name, size, _),) = launches
    assert name == kernel and size == (local or min(256, cl_device.profile.max_work_group_size))


def test_reductions_of_columns_without_local_memory(cl_device, rng, use, launches):
    values, x = random(rng, cl_device.queue, 300, 6)
    use("reduction", KernelConfig(V.REDUCTION_PARALLEL, use_local_memory=False, local_size_1d=2))
    np.testing.assert_allclose(ops.sum(x, axis=0).to_host(), values.sum(0), rtol=1e-4, atol=1e-4)
    assert [row[:2] for row in launches] == [("reduce_columns", 2)]


@pytest.mark.parametrize("vectors", [True, False])
def test_reductions_without_vectors(cl_device, rng, use, launches, vectors):
    values, x = random(rng, cl_device.queue, 3, 256)
    use("reduction", KernelConfig(V.REDUCTION_SEQUENTIAL, use_vectorization=vectors))
    np.testing.assert_allclose(ops.sum(x, axis=1).to_host(), values.sum(1), rtol=1e-4, atol=1e-4)
    assert ("#define WIDTH 1\n" in launches[0][2]) is not vectors


# ---- products and convolutions


@pytest.mark.parametrize(
    "changes, kernel",
    [
        ({"use_local_memory": False}, "gemm_naive"),
        ({"use_local_memory": False, "use_vectorization": False}, "gemm_naive"),
        ({"variant": V.MATMUL_NAIVE}, "gemm_naive"),
        ({"use_vectorization": False, "variant": V.MATMUL_VECTORIZED}, "gemm_naive"),
    ],
)
def test_products(cl_device, rng, use, launches, changes, kernel):
    (a, x), (b, y) = random(rng, cl_device.queue, 24, 20), random(rng, cl_device.queue, 20, 28)
    use("matmul", KernelConfig(**{"variant": V.MATMUL_TILED, "local_size_1d": 16, **changes}))
    np.testing.assert_allclose(ops.matmul(x, y).to_host(), a @ b, rtol=1e-4, atol=1e-4)
    assert [row[:2] for row in launches] == [(kernel, 16)]


@pytest.mark.parametrize("vectors", [True, False])
def test_tiled_products_without_vectors(cl_device, unoptimized, rng, use, launches, vectors):
    (a, x), (b, y) = random(rng, cl_device.queue, 32, 32), random(rng, cl_device.queue, 32, 32)
    use("matmul", KernelConfig(V.MATMUL_TILED, 16, 16, 16, 4, use_vectorization=vectors, extra={"tier": "simt"}))
    np.testing.assert_allclose(ops.matmul(x, y).to_host(), a @ b, rtol=1e-4, atol=1e-4)
    ((name, _, source),) = launches
    assert name == "gemm_tiles" and ("#define C_QUADS 1\n" in source) is vectors
    assert vectors or "#define WIDTH 4\n" not in source


def conv_reference(x, w):
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,fcij->nfhw", windows, w)


@pytest.mark.parametrize(
    "changes, cpu, other",
    [
        ({"use_local_memory": False}, "conv_direct", "conv_naive"),
        ({"use_local_memory": False, "use_vectorization": False}, "conv_naive", "conv_naive"),
        ({"use_vectorization": False}, "conv_naive", "conv_gemm"),
    ],
)
def test_convolutions(cl_device, rng, use, launches, changes, cpu, other):
    (a, x), (b, w) = random(rng, cl_device.queue, 2, 5, 8, 7), random(rng, cl_device.queue, 6, 5, 3, 3)
    use("conv2d", KernelConfig(V.CONV2D_IMPLICIT_GEMM, local_size_1d=8, **changes))
    np.testing.assert_allclose(ops.conv2d(x, w).to_host(), conv_reference(a, b), rtol=1e-4, atol=1e-4)
    ((name, size, _),) = launches
    assert name == (cpu if cl_device.device_type == "cpu" else other)
    assert size == 8 or name != "conv_naive"


# ---- batch norm


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (5, 19)], ids=["rows", "columns"])
@pytest.mark.parametrize("variant", [None, V.BATCHNORM_FUSED, V.BATCHNORM_NAIVE])
def test_batch_norm_with_relu_runs_the_selected_variant(cl_device, rng, use, launches, shape, variant):
    if variant is not None:
        use("batchnorm", variant)
    selected = get_kernel_selector().select_batchnorm_kernel(*shape[:2], fuse_relu=True, training=False).variant
    values, x = random(rng, cl_device.queue, *shape)
    mean, var = rng.standard_normal((2, shape[1]), np.float32)
    var = np.abs(var) + 0.1
    got = ops.batch_norm(x, *(Tensor.from_host(cl_device.queue, a) for a in (mean, var)), fuse_relu=True).to_host()
    per_channel = (1, -1, *(1,) * (len(shape) - 2))
    plain = (values - mean.reshape(per_channel)) / np.sqrt(var + 1e-5).reshape(per_channel)
    np.testing.assert_allclose(got, np.maximum(plain, 0), rtol=1e-4, atol=1e-5)
    (apply, *rest) = [name for name, _, _ in launches]
    assert apply.startswith("norm_apply_")
    assert rest == ([] if selected is V.BATCHNORM_FUSED else ["op_relu"])
    assert selected is (variant or V.BATCHNORM_FUSED)


def test_the_fused_relu_lets_nan_through(device):
    x = Tensor.from_host(device.queue, np.array([[np.nan, -1.0], [2.0, 3.0]], np.float32))
    zeros, ones = Tensor.zeros((2,), queue=device.queue), Tensor.ones((2,), queue=device.queue)
    got = ops.batch_norm(x, zeros, ones, eps=0.0, fuse_relu=True).to_host()
    np.testing.assert_array_equal(got, [[np.nan, 0.0], [2.0, 3.0]])


# ---- what the policy says


def test_the_policy_says_what_runs(cl_device, rng, launches):
    """The answers for one-item-per-result kernels name the local size that is launched."""
    _, x = random(rng, cl_device.queue, 5, 4)
    selector = KernelSelector(cl_device.profile)
    ops.matmul(x, ops.permute(x, (1, 0)))
    config = selector.select_matmul_kernel(5, 5, 4)
    assert config.variant is V.MATMUL_NAIVE
    assert [row[:2] for row in launches if row[0].startswith("gemm")] == [("gemm_naive", config.local_size_1d)]


@pytest.mark.parametrize(
    "shape, kernel, local", [((9, 100, 1), "reduce_rows", 64), ((9, 1000, 1), "reduce_group", 256), ((1, 100, 64), "reduce_tile", 256)]
)
def test_the_policy_for_reductions_on_gpus(cl_device, shape, kernel, local):
    gpu = dataclasses.replace(cl_device.profile, name="some GPU", device_type="gpu", max_compute_units=32, max_work_group_size=1024)
    chosen = reduction.fold_layout(reduction.Shape3(*shape), "float32", gpu)
    assert (chosen.kernel, chosen.local) == (kernel, local)
