"""Products beyond the rows' samples: every variant, odd sizes, special values, accuracy, plans, einsum, the kernel users launch."""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import ops, selftest
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine.algorithms import ALGORITHMS, last_chosen
from netcl.engine.registry import REGISTRY
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import amx, build_matmul_kernel, cpu, gemm, mma, nvidia
from netcl.ops.matmul.gemm import Extras, Matmul, Operands
from netcl.profiling import profile

RELU = Epilogue("float32", activation="relu")
CONFIGS = tuple(config for algorithm in ALGORITHMS["matmul"] for config in algorithm.samples)


def tensors(queue, *arrays, dtype=None):
    return [Tensor.from_host(queue, a, dtype) for a in arrays]


@contextmanager
def launched():
    """The global sizes of all kernels that are launched inside the block."""
    sizes = []
    observer = lambda kernel, queue, size, *rest: sizes.append(size)  # noqa: E731
    hooks.launch_observers.append(observer)
    try:
        yield sizes
    finally:
        hooks.launch_observers.remove(observer)


def config_id(config: KernelConfig) -> str:
    return "-".join([config.variant.name.lower(), *map(str, config.extra.values()), f"{config.tile_m}x{config.tile_n}"])


@pytest.fixture
def variant(request, monkeypatch, cl_device):
    """The selector answers every product with this configuration."""
    if request.param.extra.get("tier") == mma.MMA_TIER:
        monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")
        if not (nvidia.capable(cl_device.profile) and nvidia.trusted(cl_device.queue, mma.MMA_TIER, "float32", mma.run)):
            pytest.skip("the device has no matrix units that netcl knows")
    if request.param.extra.get("tier") == "simt":
        request.getfixturevalue("unoptimized")
    monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key: request.param if op == "matmul" else None)
    return request.param


@pytest.mark.parametrize("variant", CONFIGS, ids=config_id, indirect=True)
@pytest.mark.parametrize("name", ["matmul", "affine"])
def test_every_variant_passes_the_samples(name, variant, cl_device, in_turn):
    if variant.tile_m == 128 and cl_device.device_type == "cpu":
        pytest.skip("compilers for CPUs take minutes to unroll it")
    for case in in_turn(selftest.cases(REGISTRY[name], "float32", ()), variant.extra.get("tier", ""), cl_device, CONFIGS.index(variant)):
        selftest.check_forward(REGISTRY[name], case, cl_device, "float32")


@pytest.mark.parametrize("variant", [v for v in CONFIGS if v.tile_m < 128], ids=config_id, indirect=True)
def test_every_variant_at_odd_sizes(variant, cl_device, rng, in_turn):
    shapes = [(1, 257, 70), (67, 1, 300), (129, 131, 33), (24, 100, 1030)]
    for m, n, k in in_turn(shapes, variant.extra.get("tier", ""), cl_device, CONFIGS.index(variant)):
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
        wanted = a.astype(np.float64) @ b
        got = ops.matmul(*tensors(cl_device.queue, a, b)).to_host()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * math.sqrt(k), err_msg=f"{(m, n, k)}")


VECTORS = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, 32, 32, 8, 4, extra={"tier": "simt", "rows_per_item": 2})


SIDES = [(False, False), (False, True), (True, False), (True, True)]
LOADS = [pytest.param("float32", *sides) for sides in SIDES] + [
    pytest.param(dtype, *sides, marks=() if sides == (False, True) else pytest.mark.matrix)
    for dtype in ("float16", "bfloat16")
    for sides in SIDES
]


@pytest.mark.parametrize("variant", [VECTORS], ids=["vectors"], indirect=True)
@pytest.mark.parametrize(("dtype", "trans_a", "trans_b"), LOADS)
def test_tiles_are_loaded_four_values_at_a_time(variant, trans_a, trans_b, dtype, cl_device, rng):
    m, n, k = 44, 36, 20
    a, b = (rng.integers(-4, 4, s).astype(np.float32) for s in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)))
    got = ops.matmul(*tensors(cl_device.queue, a, b, dtype=dtype), transpose_a=trans_a, transpose_b=trans_b).to_host()
    wanted = (a.T if trans_a else a) @ (b.T if trans_b else b)
    np.testing.assert_allclose(got, wanted, rtol=1e-2 if dtype == "bfloat16" else 0)


def test_a_product_with_few_blocks_is_split_along_k(cl_device, unoptimized, monkeypatch, rng):
    config = KernelConfig(KernelVariant.MATMUL_TILED, 32, 32, 16, 2, extra={"tier": "simt"})
    monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key: config)
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((20, 4000), (30, 4000), (30,)))
    x, w, added = tensors(cl_device.queue, a, b, bias)
    with launched() as launches:
        got = ops.linear(x, w, added, activation="relu").to_host()
    assert len(launches) == (2 if cl_device.profile.max_compute_units > 1 else 1)
    np.testing.assert_allclose(got, np.maximum(a.astype(np.float64) @ b.T + bias, 0), rtol=1e-5, atol=1e-3)


GPU = {"device_type": "gpu", "max_compute_units": 132, "local_mem_size": 48 * 1024, "max_work_group_size": 1024}
POLICY = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, 128, 128, 16, 8, extra={"why": "large"})


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (16384, 384, 384), (384, 384, 16384), (1024, 1024, 1024), (64, 128, 784)])
def test_blocks_leave_few_units_of_a_gpu_idle(m, n, k, cl_device):
    """Work-groups fill whole waves of them: the slots that the last one leaves empty are a small part of all."""
    gpu = dataclasses.replace(cl_device.profile, **GPU)
    block, _ = gemm._best_block(Matmul(m, n, k, False, False, *("float32",) * 3, aligned=True), POLICY, gpu)
    groups = block.splits * math.ceil(m / block.m) * math.ceil(n / block.n)
    slots = math.ceil(groups / 132) * 132
    assert groups / slots > 0.85, block
    assert (block.splits > 1) == (k == 16384), block
    assert (block.k == 0) == (m == 64), block


def test_small_products_are_one_launch_on_a_gpu(cl_device, unoptimized, rng):
    m, n, k = 30, 50, 4100
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k), (n,)))
    p = Matmul(m, n, k, False, True, "float32", "float32", "float32", "float32", RELU, aligned=True)
    left, right, bias_tensor = tensors(cl_device.queue, a, b, bias)
    t = Operands(left, right, Tensor.empty((m, n), queue=cl_device.queue), bias_tensor)
    with launched() as launches:
        gemm._tiles(cl_device.queue, p, POLICY, dataclasses.replace(cl_device.profile, **GPU), t)
    assert len(launches) == 1 and math.prod(launches[0]) >= 64 * 132
    np.testing.assert_allclose(t.out.to_host(), np.maximum(a.astype(np.float64) @ b.T + bias, 0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, True)])
def test_a_product_with_fewer_tiles_than_cores_is_split_along_k(trans_a, trans_b, cl_device, rng):
    m, n, k = 5, 30, 1536
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (n,)))
    p = Matmul(m, n, k, trans_a, trans_b, "float32", "float32", "float32", "float32", RELU)
    many = dataclasses.replace(cl_device.profile, max_compute_units=64)
    left, right, bias_tensor = tensors(cl_device.queue, a, b, bias)
    t = Operands(left, right, Tensor.empty((m, n), queue=cl_device.queue), bias_tensor)
    with launched() as launches:
        cpu._panels(cl_device.queue, p, KernelConfig(KernelVariant.MATMUL_REGISTER_TILED), many, t)
    assert len(launches) == 2
    exact = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b) + bias
    np.testing.assert_allclose(t.out.to_host(), np.maximum(exact, 0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False)])
def test_half_products_are_summed_in_float32(device, dtype, trans_a, trans_b):
    """Deeper than a panel, so that sums are kept between panels: 4096 ones stop at 2048 in half."""
    m, n, k = 33, 200, 4096
    a = Tensor.ones((k, m) if trans_a else (m, k), dtype, queue=device.queue)
    b = Tensor.ones((n, k) if trans_b else (k, n), dtype, queue=device.queue)
    out = ops.matmul(a, b, transpose_a=trans_a, transpose_b=trans_b)
    assert out.dtype == dtype and (out.to_host() == k).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 40])
def test_dot_products_of_every_height(rows, cl_device, rng):
    dot = KernelConfig(KernelVariant.MATMUL_VECTORIZED, extra={"tier": "cpu", "form": "dot"})
    a, b = tensors(cl_device.queue, rng.standard_normal((rows, 150)), rng.standard_normal((21, 150)), dtype="float32")
    found = gemm.product(a, b, (rows, 21), Extras(Epilogue("float32")), trans_b=True, config=dot).to_host()
    np.testing.assert_allclose(found, a.to_host() @ b.to_host().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "m, k, n, dtype", [(9, 70, 50, "float32"), (300, 1100, 97, "float32"), (35, 33, 400, "float16"), (20, 30, 65, "float64")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_recording_packs_a_weight_once_and_sees_its_changes(m, k, n, dtype, turned, cl_device, rng):
    x = Tensor.from_host(cl_device.queue, rng.standard_normal((m, k)), dtype)
    w = Tensor.from_host(cl_device.queue, rng.standard_normal((n, k) if turned else (k, n)), dtype, requires_grad=True)
    step = netcl.compile(lambda x: ag.relu(ag.matmul(x, w, transpose_b=turned) + x[:, :1]))
    tolerance = {"float32": 1e-5, "float16": 2e-3, "float64": 1e-12}[dtype] * math.sqrt(k)
    with ag.no_grad():
        for change in (0, 0, 1):
            w += change
            values = w.to_host().astype(np.float64)
            want = x.to_host().astype(np.float64) @ (values.T if turned else values) + x.to_host()[:, :1]
            np.testing.assert_allclose(step(x).to_host(), np.maximum(want, 0), rtol=tolerance, atol=tolerance * (1 + np.abs(want).max()))
        with profile(cl_device, roofline=False) as p:
            step(x)
    assert "pack_b" not in [event.name for event in p.events]


def test_mixed_dtypes_promote(device, rng):
    a, b = rng.standard_normal((3, 20)).astype(np.float16), rng.integers(-5, 5, (20, 4))
    out = ops.matmul(*tensors(device.queue, a, b))
    assert out.dtype == "float16"
    np.testing.assert_allclose(out.to_host(), a.astype(np.float64) @ b, rtol=2e-3, atol=2e-2)
    assert ops.matmul(*tensors(device.queue, a.astype(np.float32), a.T)).dtype == "float32"


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("size", [3, 40])
def test_integer_products_are_exact(device, dtype, size, rng):
    big = 2**30 if dtype == "int32" else 2**62
    a, b = rng.integers(-big, big, (size, size)).astype(dtype), rng.integers(-9, 9, (size, size)).astype(dtype)
    got = ops.matmul(*tensors(device.queue, a, b))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.to_host(), a @ b)


@pytest.mark.parametrize("size", [5, 70])
def test_nan_and_infinity_go_where_numpys_go(device, size):
    a = np.ones((size, size), np.float32)
    a[0, 1], a[1, 2], a[2, 0] = np.nan, np.inf, -np.inf
    b = np.ones((size, size), np.float32)
    b[2, 3] = 0  # inf * 0
    with np.errstate(invalid="ignore"):
        wanted = a @ b
    x, w = tensors(device.queue, a, b)
    np.testing.assert_array_equal(ops.matmul(x, w).to_host(), wanted)
    for name in ("relu", "sigmoid", "tanh"):
        got = ops.linear(x, ops.transpose(w), activation=name).to_host()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), err_msg=name)


def test_large_products_are_float32_accurate(device, rng):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((130, 700), (700, 150)))
    wanted = a.astype(np.float64) @ b
    assert np.abs(ops.matmul(*tensors(device.queue, a, b)).to_host() - wanted).max() < 4e-6 * np.abs(wanted).max()


def test_batch_axes_broadcast_without_copies(cl_device, rng):
    """Two strides per operand are enough; only stranger patterns are written out first."""
    a, b = rng.standard_normal((3, 1, 4, 20, 30)).astype(np.float32), rng.standard_normal((1, 2, 1, 30, 10)).astype(np.float32)
    launched = []
    hooks.launch_observers.append(lambda kernel, *rest: launched.append(kernel.name))
    try:
        got = ops.matmul(*tensors(cl_device.queue, a, b))
        plain = ops.matmul(*tensors(cl_device.queue, a[:, 0], b[0, 0]))
    finally:
        hooks.launch_observers.pop()
    np.testing.assert_allclose(got.to_host(), np.matmul(a, b), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(plain.to_host(), np.matmul(a[:, 0], b[0, 0]), rtol=1e-4, atol=1e-4)
    assert [name.startswith("gemm") for name in launched][-1:] == [True]
    assert sum(name.startswith("copy") for name in launched) == 2


def test_a_new_size_does_not_recompile(cl_device, rng):
    def run(m, n, k):
        ops.matmul(*tensors(cl_device.queue, np.ones((m, k), np.float32), np.ones((k, n), np.float32)))

    run(100, 190, 140)
    before = program.build_count()
    for size in ((101, 190, 141), (90, 250, 75), (150, 125, 301)):  # of columns that leave the usual tile of CPUs nearly full
        run(*size)
    assert program.build_count() == before


def test_registered_kernels_replace_plans_made_before(cl_device, monkeypatch):
    a = Tensor.ones((40, 40), queue=cl_device.queue)
    ops.matmul(a, a)
    launched = []
    naive = KernelConfig(KernelVariant.MATMUL_NAIVE)
    monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key: naive)
    hooks.launch_observers.append(lambda kernel, *rest: launched.append(kernel.name))
    try:
        ops.matmul(a, a)
    finally:
        hooks.launch_observers.pop()
    assert launched == ["gemm_naive"]


def test_a_configuration_that_cannot_be_is_refused(cl_device, monkeypatch):
    nothing = r"\[matmul\] the tier and the variant of a configuration must belong to the same kernel; variant="
    for config, text in (
        (KernelConfig(KernelVariant.CONV2D_NAIVE), nothing + "CONV2D_NAIVE"),
        (KernelConfig(KernelVariant.MATMUL_TILED, extra={"tier": "none"}), nothing + "MATMUL_TILED, tier=none"),
        (KernelConfig(KernelVariant.MATMUL_TILED, 30, 32, 8, 4, extra={"tier": "simt"}), r"\[matmul\] tile sizes must be at least 1"),
    ):
        monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key, config=config: config)
        with pytest.raises(ShapeError, match=text):
            ops.matmul(Tensor.ones((50, 50), queue=cl_device.queue), Tensor.ones((50, 50), queue=cl_device.queue))


# ---- gradients


@pytest.mark.parametrize(
    "shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((4,), (4,))], ids=str
)
def test_second_derivatives(shapes, rng):
    queue = Tensor.zeros((), device="cpu").queue
    inputs = [Tensor.from_host(queue, rng.standard_normal(s), "float64", requires_grad=True) for s in shapes]
    assert ag.gradgradcheck(ag.matmul, inputs)


@pytest.mark.parametrize("activation", [None, "relu", "tanh", "sigmoid", "silu", "gelu"])
def test_second_derivatives_of_linear(activation, rng):
    queue = Tensor.zeros((), device="cpu").queue
    inputs = [Tensor.from_host(queue, rng.standard_normal(s), "float64", requires_grad=True) for s in ((3, 4), (5, 4), (5,))]
    assert ag.gradgradcheck(lambda x, w, b: ag.linear(x, w, b, activation), inputs)


def test_only_wanted_gradients_are_computed(cl_device):
    x = Tensor.ones((8, 20), queue=cl_device.queue)
    w = Tensor.ones((6, 20), queue=cl_device.queue, requires_grad=True)
    out = ag.linear(x, w)
    launched = []
    hooks.launch_observers.append(lambda kernel, *rest: launched.append(kernel.name))
    try:
        ag.grad(out, w, Tensor.ones(out.shape, queue=cl_device.queue))
    finally:
        hooks.launch_observers.pop()
    assert sum(name.startswith("gemm") for name in launched) == 1


# ---- einsum

EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)), ("ii->i", (4, 4)), ("ii", (4, 4)), ("ij->", (3, 4)),
    ("ij->ji", (3, 4)), ("i,j->ij", (3,), (4,)), ("ij,kl", (2, 3), (4, 2)), ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)),
    ("ijk,jil->kl", (3, 4, 5), (4, 3, 2)), ("a,ab,abc->abc", (2,), (2, 3), (2, 3, 4)),
    ("iij,jk->ik", (3, 3, 4), (4, 2)), ("i,i->", (5,), (5,)),
    ("ab,cd,bc->ad", (2, 3), (4, 5), (3, 4)), ("...,...->...", (2, 3), (3,)), ("iii->i", (3, 3, 3)), ("ji,j->i", (3, 4), (3,)),
    ("i...->...", (3, 4, 5)), (",ij->ij", (), (2, 3)), ("b...i,oi->b...o", (2, 3, 4), (5, 4)),
]  # fmt: skip


@pytest.mark.parametrize("case", EQUATIONS, ids=lambda case: case[0])
def test_einsum_is_numpys(case, device, rng):
    equation, *shapes = case
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    got = ops.einsum(equation, *tensors(device.queue, *arrays)).to_host()
    np.testing.assert_allclose(got, np.einsum(equation, *(a.astype(np.float64) for a in arrays)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", EQUATIONS, ids=lambda case: case[0])
def test_einsum_has_gradients(case, rng):
    equation, *shapes = case
    queue = Tensor.zeros((), device="cpu").queue
    inputs = [Tensor.from_host(queue, rng.standard_normal(s), "float64", requires_grad=True) for s in shapes]
    assert ag.gradcheck(lambda *xs: ag.einsum(equation, *xs), inputs)


@pytest.mark.parametrize(
    ("equation", "shapes", "text"),
    [
        ("ij,jk->ik", [(2, 3)], r"\[einsum\] the equation must have one term per operand; .*operands=1"),
        ("ij,jk->ik", [(2, 3), (4, 5)], r"\[einsum\] axes of one label must have the same size, got 3 and 4 for j"),
        ("ij->ik", [(2, 3)], r"\[einsum\] the result must name labels of the operands, each at most once"),
        ("i->i", [(2, 3)], r"\[einsum\] an operand must have one label per axis, got 1 labels for 2 axes"),
        ("i1->i", [(2, 3)], r"\[einsum\] the equation must consist of letters"),
        ("ijk...->i", [(2, 3)], r"\[einsum\] every operand must have an axis per label"),
    ],
)
def test_einsum_refuses(equation, shapes, text, device):
    with pytest.raises(ShapeError, match=text):
        ops.einsum(equation, *(Tensor.zeros(s, queue=device.queue) for s in shapes))


# ---- the kernel users launch


@pytest.mark.parametrize("dtype", ["float", "half", "int"])
@pytest.mark.parametrize("tile", [8, 16])
def test_the_built_kernel_multiplies(cl_device, tile, dtype, rng):
    m, n, k = 19, 37, 23
    a, b = (rng.integers(-4, 4, s).astype({"float": "f4", "half": "f2", "int": "i4"}[dtype]) for s in ((m, k), (k, n)))
    kernel = build_matmul_kernel(cl_device.context, tile=tile, dtype=dtype)
    x, y = tensors(cl_device.queue, a, b)
    for sizes in ((n, m), (m, n)):
        out = Tensor.zeros((m, n), x.dtype, queue=cl_device.queue)
        kernel(cl_device.queue, sizes, None, x, y, out, m, n, k)
        np.testing.assert_array_equal(out.to_host(), a @ b)


def test_a_tile_no_device_has_is_refused(cl_device):
    with pytest.raises(ShapeError, match=r"\[build_matmul_kernel\] tile must be from 1 to 64, .*; tile=100"):
        build_matmul_kernel(cl_device.context, tile=100)


def test_unknown_dtypes_are_refused(cl_device):
    with pytest.raises(DtypeError, match=r"\[build_matmul_kernel\] unknown dtype; dtype='complex64'"):
        build_matmul_kernel(cl_device.context, dtype="complex64")


def test_amx_is_invisible_where_it_is_not_asked_for(cl_device, monkeypatch):
    p = Matmul(256, 256, 2048, False, False, "float32", "float32", "float32")

    def chosen():
        return gemm.product_algorithm(cl_device.queue, p, POLICY, cl_device.profile)[0].name

    monkeypatch.delenv("NETCL_AMX", raising=False)
    assert chosen() != "amx"
    monkeypatch.setenv("NETCL_AMX", "1")
    there = cl_device.device_type == "cpu" and amx.granted() and amx._driver_works(cl_device.queue)
    assert (chosen() == "amx") == there


def test_amx_splits_only_where_the_bound_holds(monkeypatch):
    def terms(k, a="float32", b="float32", c="float32", precision="highest"):
        monkeypatch.setattr(amx, "get_matmul_precision", lambda: precision)
        return amx.terms_for(Matmul(64, 64, k, False, False, a, b, c))

    assert [terms(k) for k in (amx.AMX_SPLIT_DEPTH - 1, amx.AMX_SPLIT_DEPTH)] == [0, 2]
    assert [terms(64, precision=name) for name in ("highest", "high", "medium")] == [0, 2, 1]
    assert terms(64, "bfloat16", "bfloat16", "bfloat16") == 1
    assert terms(4096, "float16", "float16", "float16") == 0 and terms(4096, "float64", "float64", "float64") == 0


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, True)])
@pytest.mark.parametrize(("terms", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_amx_products(terms, dtype, trans_a, trans_b, cl_device, rng):
    if not (cl_device.device_type == "cpu" and amx.granted() and amx._driver_works(cl_device.queue)):
        pytest.skip("the device has no AMX")
    m, n, k = 45, 70, 130
    a, b, bias = (rng.standard_normal(s).astype(np.float32) for s in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n), (n,)))
    a.flat[3] = np.inf
    a, b = (Tensor.from_host(cl_device.queue, x, dtype) for x in (a, b))
    p = Matmul(m, n, k, trans_a, trans_b, dtype, dtype, "float32", "float32", RELU)
    t = Operands(a, b, Tensor.empty((m, n), queue=cl_device.queue), Tensor.from_host(cl_device.queue, bias))
    amx.run(cl_device.queue, p, t, terms, 2)
    got = t.out.to_host()
    left, right = (x.to_host().astype(np.float64) for x in (a, b))
    with np.errstate(invalid="ignore"):
        exact = (left.T if trans_a else left) @ (right.T if trans_b else right) + bias
    exact = np.where(exact < 0, 0, exact)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    np.testing.assert_allclose(got[finite], exact[finite], rtol=1e-4, atol=2e-3)


def test_empty_products_have_empty_gradients(device):
    x, w = (Tensor.from_host(device.queue, np.ones(shape, np.float32), requires_grad=True) for shape in ((2, 3, 0), (4, 0)))
    (ag.linear(x, w).sum() + ag.matmul(x, w, transpose_b=True).sum()).backward()
    assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)


FEW_ROWS = [(1, 70, 132, True, "float32"), (3, 68, 200, False, "float32"), (8, 101, 64, True, "float32"), (4, 64, 72, True, "float16"),
            (2, 64, 68, False, "bfloat16")]  # fmt: skip


@pytest.mark.parametrize("m, n, k, turned, dtype", FEW_ROWS)
def test_few_rows(cl_device, rng, m, n, k, turned, dtype):
    """The kernel of GPUs for few rows, on every device: both orders of the weights, ends of rows and columns, a bias."""
    a, b, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k) if turned else (k, n), (n,)))
    left, right = tensors(cl_device.queue, a, b, dtype=dtype)
    config = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": "gemv"})
    extras = Extras(Epilogue("float32"), Tensor.from_host(cl_device.queue, bias))
    made = gemm.product(left, right, (m, n), extras, False, turned, config)
    assert last_chosen["matmul"].name == "gemv"
    left, right = (ops.cast(t, "float32").to_host().astype(np.float64) for t in (left, right))
    np.testing.assert_allclose(made.to_host(), left @ (right.T if turned else right) + bias, rtol=1e-4, atol=1e-4)


def test_few_rows_with_infinity(cl_device):
    """Work-items beyond the end of a row add nothing, whatever its last values are."""
    a, b = np.ones((1, 516), np.float32), np.ones((64, 516), np.float32)
    a[0, -1], b[::2] = np.inf, -1
    config = KernelConfig(KernelVariant.MATMUL_REGISTER_TILED, extra={"tier": "gemv"})
    made = gemm.product(*tensors(cl_device.queue, a, b), (1, 64), Extras(Epilogue("float32"), None), False, True, config)
    np.testing.assert_array_equal(made.to_host()[0], np.where(np.arange(64) % 2, np.inf, -np.inf))
