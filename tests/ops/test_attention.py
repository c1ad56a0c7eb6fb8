"""Attention: torch's numbers, masks, shapes, and both kernel texts."""

import platform
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.capabilities import DeviceProfile
from netcl.core.errors import ShapeError
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine.algorithms import ALGORITHMS
from netcl.engine.launch import numpy_reference
from netcl.profiling import profile

GOLDEN = np.load(Path(__file__).parent.parent / "golden/rows.npz")
MODULE = sys.modules["netcl.ops.attention"]
CASES = {
    "attention": ("q k v", {}),
    "attention_causal": ("q k v", {"is_causal": True, "scale": 0.4}),
    "attention_seen": ("q k v", {"attn_mask": GOLDEN["seen"]}),
    "attention_added": ("q k v added", {}),
    "attention_grouped": ("q k2 v2", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_torchs_numbers(name, device):
    names, options = CASES[name]
    leaves = [Tensor.from_host(device.queue, GOLDEN[leaf], requires_grad=True) for leaf in names.split()]
    out = ag.scaled_dot_product_attention(*leaves, **options)
    out.backward(Tensor.from_host(device.queue, GOLDEN[f"{name}.g"]))
    np.testing.assert_allclose(out.to_host(), GOLDEN[f"{name}.out"], rtol=1e-5, atol=1e-6)
    for leaf, t in zip(names.split(), leaves, strict=True):
        want = GOLDEN[f"{name}.d_{leaf}"]
        np.testing.assert_allclose(t.grad.to_host(), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_causal", "attention_added", "attention_grouped"])
def test_the_kernels_of_gpus_give_torchs_numbers_too(name, cl_device, unoptimized, monkeypatch):
    if cl_device.device_type == "cpu" and "aarch64" in platform.machine():
        pytest.skip("PoCL 3.1 on aarch64 miscompiles kernels it would never be given; tests/test_oclgrind.py runs them")
    monkeypatch.setattr(MODULE, "choose_kernel", lambda q, k, p: MODULE.simt_config(16 * 1024, 64, False, p.sizes.bucket))
    get_kernel_selector().clear_cache()  # or the launches of an earlier call would be repeated
    test_torchs_numbers(name, cl_device)
    get_kernel_selector().clear_cache()


def test_tiles_of_matrix_units_fit_48_kilobytes():
    for (itemsize, depth), ((warps, columns), (warps_grad, columns_grad)) in MODULE.UNIT_TILES.items():
        forward, backward = 16 * warps + 2 * columns, 2 * (16 * warps_grad + columns_grad)  # lines: queries, keys, values and gradients
        assert max(forward, backward) * depth * itemsize <= 48 * 1024
        assert all(c == 16 or c % 32 == 0 for c in (columns, columns_grad))  # what mma.cl asks of its macros


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("heads, n, m, depth, depth_v, causal", [
    (4, 77, 130, 64, 64, False), (2, 65, 65, 32, 32, True), (2, 50, 90, 80, 40, False), (2, 150, 90, 128, 128, True),
])  # fmt: skip
def test_blocks_that_end_inside_a_tile(dtype, tolerance, heads, n, m, depth, depth_v, causal, device):
    rng = np.random.default_rng(0)
    shapes = ((2, heads, n, depth), (2, 2, m, depth), (2, 2, m, depth_v), (2, heads, n, depth_v))
    q, k, v, g = (Tensor.from_host(device.queue, rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
    got = ops.attention(q, k, v, causal=causal)
    got += ops.attention_grad(g, q, k, v, None, *got, causal=causal)
    exact = [t.to_host().astype(np.float64) for t in (q, k, v, g)]
    want = numpy_reference("attention", *exact[:3], None, causal=causal)
    want += numpy_reference("attention_grad", exact[3], *exact[:3], None, *want, causal=causal)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.to_host(), b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.fixture(params=[(True, 4), (True, 16), (False, 4)], ids=["heads", "heads, wide", "lanes"])
def by_head(request, cl_device, monkeypatch):
    """Both kinds of gradients on CPUs: one kernel for a head, with the tiles of short and of wide vectors, and two for its parts."""
    if cl_device.device_type != "cpu":
        pytest.skip("kernels of CPUs")
    (by_head, width), config = request.param, MODULE.cpu_config
    if config(width, False, 32) != config(cl_device.profile.vector_width, False, 32):
        request.getfixturevalue("unoptimized")  # kernels for other CPUs
    monkeypatch.setattr(MODULE, "choose_kernel", lambda queue, shapes, p: config(width, p.wide, p.sizes.bucket, by_head and p.grad))
    get_kernel_selector().clear_cache()  # or the launches of an earlier call would be repeated
    yield by_head
    get_kernel_selector().clear_cache()


GRADS = {
    "plain": ((2, 2, 33, 49, 32, 32), None, {}),
    "window": ((4, 4, 49, 49, 32, 32), (4, 49, 49), {}),
    "causal": ((2, 2, 70, 70, 64, 64), None, {"causal": True}),
    "causal, few queries": ((2, 2, 3, 40, 32, 32), (3, 40), {"causal": True}),
    "causal, few keys": ((2, 2, 85, 7, 32, 32), None, {"causal": True}),
    "grouped": ((6, 2, 37, 41, 48, 80), None, {"causal": True, "scale": 0.3}),
    "grouped and masked": ((4, 2, 40, 17, 32, 16), (2, 1, 40, 17), {}),
    "bool": ((2, 2, 20, 65, 32, 32), (20, 65), {"bool": True}),
    "padding": ((2, 2, 20, 65, 32, 32), (2, 1, 1, 65), {"bool": True}),
    "queries": ((2, 2, 20, 35, 32, 32), (2, 2, 20, 1), {"causal": True}),
    "through": ((2, 2, 1, 130, 64, 64), None, {"through": True}),
    "one": ((1, 1, 1, 1, 32, 32), (1, 1), {}),
}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", GRADS)
def test_gradients_on_cpus(name, dtype, tolerance, by_head, cl_device, full):
    """In float64 without --full: with and without a mask, and one of several head sizes, each of which takes seconds to compile."""
    (heads, of_keys, n, m, depth, depth_v), mask_shape, options = GRADS[name]
    if dtype != "float32" and name in ("window", "bool", "padding", "queries", "causal, few queries", "causal, few keys") and not full:
        pytest.skip("dtypes are tested by the others")
    if dtype == "float64" and name in ("causal", "grouped and masked", "through") and not full:
        pytest.skip("head sizes in float64 are left to --full")
    rng, options, wide = np.random.default_rng(0), dict(options), "float64" if dtype == "float64" else "float32"
    shapes = ((2, heads, n, depth), (2, of_keys, m, depth), (2, of_keys, m, depth_v), (2, heads, n, depth_v))
    q, k, v, g = (Tensor.from_host(cl_device.queue, rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
    drawn = None if mask_shape is None else rng.standard_normal(mask_shape).astype(wide)
    if options.pop("bool", False):
        drawn = drawn > -1
    mask = None if drawn is None else Tensor.from_host(cl_device.queue, drawn, drawn.dtype.name)
    through = rng.standard_normal((2, heads, n), np.float32) if options.pop("through", False) else None
    ours = None if through is None else Tensor.from_host(cl_device.queue, through, wide)
    known = ops.attention(q, k, v, mask, **options)
    with profile(roofline=False) as launches:
        got = ops.attention_grad(g, q, k, v, mask, *known, ours, mask_grad=True, **options)
        [t.realize() for t in got]
    names = [event.name for event in launches.events]
    assert "attention_key_grad" in names and ("attention_query_grad" not in names) == by_head
    exact = [t.to_host().astype(np.float64) for t in (q, k, v, g)]
    wanted = numpy_reference("attention", *exact[:3], drawn, **options)
    wanted = numpy_reference("attention_grad", exact[3], *exact[:3], drawn, *wanted, through, mask_grad=True, **options)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.to_host(), b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1.0))
    again = ops.attention_grad(g, q, k, v, mask, *known, ours, mask_grad=True, **options)
    assert all(a.to_host().tobytes() == b.to_host().tobytes() for a, b in zip(got, again, strict=True))
    alone = ops.attention_grad(g, q, k, v, mask, *known, ours, **options)
    assert all(a.to_host().tobytes() == b.to_host().tobytes() for a, b in zip(got[:3], alone, strict=True))


def test_a_query_that_sees_no_key_has_no_gradient_on_cpus(by_head, cl_device):
    rng, seen = np.random.default_rng(0), np.ones((20, 40), np.bool_)
    seen[3] = False
    x = [Tensor.from_host(cl_device.queue, rng.standard_normal((2, n, 32), np.float32)) for n in (20, 40, 40, 20)]
    known = ops.attention(*x[:3], Tensor.from_host(cl_device.queue, seen))
    found = ops.attention_grad(x[3], *x[:3], Tensor.from_host(cl_device.queue, seen), *known, mask_grad=True)
    assert all(np.isfinite(t.to_host()).all() for t in found)
    assert not found[0].to_host()[:, 3].any() and not found[3].to_host()[:, 3].any() and found[0].to_host()[:, 4].all()


def test_a_kernel_per_head_needs_heads_for_all_cores():
    rows = {row.name: row for row in ALGORITHMS["attention"]}

    def suits(batch, depth=64, dtype="float32", grad=True, cores=8, depth_v=None):
        problem = MODULE.AttentionProblem(MODULE.HeadSizes(batch, 4, 2, 50, 50, depth, depth_v or depth), dtype, grad)
        return rows["heads"].when(problem, None, DeviceProfile(*("",) * 5, device_type="cpu", max_compute_units=cores))

    assert suits(4) and suits(8) and suits(6) and suits(1, cores=2)  # 8, 16, 12 and 2 heads of keys and values
    assert not suits(2) and not suits(5)  # 4 of 8 cores busy, and 10 of 16 in two rounds
    assert suits(4, depth=48) and not suits(4, depth=40) and suits(4, depth=40, dtype="float64") and not suits(4, depth_v=24)
    assert not suits(4, grad=False)


def test_gradients_of_masks_have_the_dtype_of_the_mask(cl_device):
    """A bias in float32 beside values in 16 bits: its gradient is a sum over many windows and is not rounded before."""
    if cl_device.device_type != "cpu":
        pytest.skip("kernels of CPUs")
    rng = np.random.default_rng(0)
    q, k, v, g = (Tensor.from_host(cl_device.queue, rng.standard_normal((8, 2, 9, 16), np.float32), "bfloat16") for _ in range(4))
    mask = Tensor.from_host(cl_device.queue, rng.standard_normal((2, 9, 9), np.float32))
    found = ops.attention_grad(g, q, k, v, mask, *ops.attention(q, k, v, mask), mask_grad=True)
    assert [t.dtype for t in found] == ["bfloat16"] * 3 + ["float32"]


def test_an_infinite_key_leaves_the_others_finite(device):
    """Minus infinity in a key gives it the probability 0: the result must not become NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((40, 64)).astype(np.float32) for _ in range(3))
    q[:, 3], k[7, 3] = np.abs(q[:, 3]) + 0.1, -np.inf
    got = ops.attention(*(Tensor.from_host(device.queue, x) for x in (q, k, v)))[0].to_host()
    want = numpy_reference("attention", *(np.delete(x, 7, 0) if i else x for i, x in enumerate((q, k, v))), None)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_local_memory_limits_the_tiles(wide):
    for memory in (16, 32, 48, 64):
        for depth in (32, 64, 128, 256):
            config = MODULE.simt_config(memory * 1024, 256, wide, depth)
            d = config.defines
            rows, columns, chunk = d["RY"] * d["TY"], d["RX"] * d["TX"], d["CHUNK"]
            assert (8 if wide else 4) * (chunk * (rows + columns) + rows * columns) <= memory * 1024
            assert chunk * d["CHUNKS"] >= depth and config.rows == rows and config.local == (d["TX"] * d["TY"], 1)
            # what simt.cl asks of its macros
            assert d["TX"] % 8 == d["TY"] % 4 == d["RX"] % 4 == chunk % 32 == chunk % (4 * d["TX"]) == columns % 32 == 0
            assert d["RY"] <= d["TX"] and d["TX"] * d["TY"] % (chunk // 4) == 0 and chunk // 4 * (rows + 4) + 2 * rows <= rows * columns


def test_few_queries_take_tiles_of_few_rows():
    rows = [MODULE.simt_config(48 * 1024, 256, False, 64, queries).rows for queries in (1, 16, 32, 33, 1000)]
    assert rows == [16, 16, 32, 64, 64]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_row_that_sees_no_key_gives_zero_and_no_gradient(dropout, device):
    rng = np.random.default_rng(0)
    q, k, v = (Tensor.from_host(device.queue, rng.standard_normal((2, 5, 8)), requires_grad=True) for _ in range(3))
    seen = np.ones((5, 5), bool)
    seen[3] = False
    out = ag.scaled_dot_product_attention(q, k, v, seen, dropout_p=dropout)
    out.backward(Tensor.ones(out.shape, queue=device.queue))
    assert not out.to_host()[:, 3].any() and not q.grad.to_host()[:, 3].any()
    assert all(np.isfinite(t.grad.to_host()).all() for t in (q, k, v))


def test_nan_stays_in_its_row(device):
    q = np.zeros((3, 4), np.float32)
    q[1, 2] = np.nan
    k = v = Tensor.ones((5, 4), queue=device.queue)
    out = ops.scaled_dot_product_attention(Tensor.from_host(device.queue, q), k, v).to_host()
    assert np.isnan(out[1]).all() and (out[[0, 2]] == 1).all()


def test_no_matrix_of_scores_is_stored(cl_device):
    """Forward and backward of 4096 x 4096 scores, which would be 64 MB, ask the pool for less than 1 MB."""
    from netcl.core.memory import get_persistent_pool

    x, g = (Tensor.full((4096, 8), value, queue=cl_device.queue) for value in (0.0, 1.0))
    pool = get_persistent_pool(cl_device.queue)
    before = pool.stats.bytes_allocated
    out, logarithms = ops.attention(x, x, x)
    ops.attention_grad(g, x, x, x, None, out, logarithms)
    assert pool.stats.bytes_allocated - before < 1 << 20
    np.testing.assert_allclose(logarithms.to_host(), np.log(4096), rtol=1e-6)


@pytest.mark.parametrize("depth", [1, 31, 64, 65, 129, 256])
def test_head_sizes(device, depth):
    rng = np.random.default_rng(depth)
    q, k, v = (rng.uniform(-1, 1, (n, depth)).astype(np.float32) for n in (17, 33, 33))
    out, _ = ops.attention(*(Tensor.from_host(device.queue, t) for t in (q, k, v)))
    want, _ = numpy_reference("attention", q, k, v)
    np.testing.assert_allclose(out.to_host(), want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mask", [None, np.zeros((3, 0), np.bool_), np.zeros((3, 0), np.float32)], ids=["none", "bool", "float"])
def test_without_keys_the_result_is_zero(mask, dropout, device):
    q, k, v = (Tensor.ones((2, n, 8), queue=device.queue, requires_grad=True) for n in (3, 0, 0))
    out = ag.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
    out.sum().backward()
    assert np.array_equal(out.to_host(), np.zeros((2, 3, 8))) and not q.grad.to_host().any() and k.grad.shape == v.grad.shape == (2, 0, 8)


def test_dropout_keeps_the_mean(device):
    q = k = Tensor.zeros((64, 8), queue=device.queue)
    v = Tensor.ones((64, 8), queue=device.queue)
    out = ops.scaled_dot_product_attention(q, k, v, dropout_p=0.5).to_host()
    assert abs(out.mean() - 1) < 0.1 and out.std() > 0.01
    grouped = ops.scaled_dot_product_attention(*(Tensor.ones((1, h, 3, 4), queue=device.queue) for h in (4, 2, 2)), dropout_p=0.5)
    assert grouped.shape == (1, 4, 3, 4)


def test_second_derivatives():
    rng = np.random.default_rng(0)
    q, k, v = (
        Tensor.from_host(rng.standard_normal((h, n, 3)), dtype="float64").to("cpu").requires_grad_() for h, n in ((2, 3), (1, 4), (1, 4))
    )
    assert ag.gradgradcheck(lambda *t: ag.scaled_dot_product_attention(*t, causal=True), [q, k, v])


def test_rope_turns_back(device):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
    turned = ops.rope(Tensor.from_host(device.queue, x), offset=7)
    np.testing.assert_allclose(ops.rope(turned, offset=7, inverse=True).to_host(), x, atol=1e-6)
    at = ops.rope(Tensor.from_host(device.queue, x), np.arange(7, 12))
    np.testing.assert_allclose(at.to_host(), turned.to_host(), atol=1e-6)


def test_rope_makes_scores_depend_on_distance_only(device):
    rng = np.random.default_rng(0)
    q, k = (Tensor.from_host(device.queue, np.tile(rng.standard_normal((1, 16)), (20, 1)).astype(np.float32)) for _ in range(2))
    scores = ops.rope(q, offset=3).to_host() @ ops.rope(k, offset=3).to_host().T
    for diagonal in (-5, 0, 4):
        np.testing.assert_allclose(np.diag(scores, diagonal), np.diag(scores, diagonal)[0], rtol=1e-3, atol=1e-4)


def test_a_cache_is_written_behind_its_end_and_read_up_to_it(queue):
    """Token by token over a cache gives what one causal attention over all positions gives, also where the lengths differ."""
    rng, (batch, heads, groups, length, depth) = np.random.default_rng(0), (2, 4, 2, 80, 8)
    q, k, v = (rng.standard_normal((batch, n, length, depth), np.float32) for n in (heads, groups, groups))
    want = ops.scaled_dot_product_attention(*(Tensor.from_host(queue, x) for x in (q, k, v)), causal=True).to_host()
    keys, values = (Tensor.zeros((batch, groups, length + 3, depth), queue=queue) for _ in range(2))
    lengths = np.array([0, 9], np.int32)
    for cache, x in ((keys, k), (values, v)):
        cache[1, :, :9] = Tensor.from_host(queue, x[1, :, :9])
    for new in (5, 1, 60, 3):
        at = [slice(n, n + new) for n in lengths]
        fresh = [Tensor.from_host(queue, np.stack([x[b][:, at[b]] for b in range(batch)])) for x in (q, k, v)]
        got = ops.cached_attention(*fresh, keys, values, Tensor.from_host(queue, lengths)).to_host()
        for b in range(batch):
            np.testing.assert_allclose(got[b], want[b][:, at[b]], rtol=2e-5, atol=2e-6)
        lengths += new
    np.testing.assert_array_equal(keys.to_host()[1, :, :78], k[1, :, :78])
    np.testing.assert_array_equal(values.to_host()[0, :, 69:], 0)


@pytest.mark.parametrize("positions", [9, 300, 1500])
@pytest.mark.parametrize(("where", "value"), [("q", np.nan), ("q", np.inf), ("keys", np.nan), ("values", np.nan), ("v", np.nan)])
def test_what_is_not_finite_stays_visible_behind_a_cache(where, value, positions, device):
    """A softmax whose sum is NaN gives NaN, not 0, and only for the heads that see it."""
    rng, size = np.random.default_rng(positions), 8
    arrays = {
        name: rng.standard_normal((1, 2, n, size), np.float32)
        for name, n in (("q", 1), ("k", 1), ("v", 1), ("keys", positions), ("values", positions))
    }
    arrays[where][0, 0, 0] = value
    tensors = (Tensor.from_host(device.queue, a) for a in arrays.values())
    out = ops.cached_attention(*tensors, Tensor.from_host(device.queue, np.array([positions - 3], np.int32))).to_host()
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_cache_of_every_dtype_is_written(device, dtype):
    """NumPy computes 16-bit floats in copies of float32; the new keys and values must reach the cache itself."""
    rng, queue = np.random.default_rng(0), device.queue
    q, k, v = (Tensor.from_host(queue, rng.integers(-3, 4, (1, n, 2, 8)).astype(np.float32), dtype) for n in (4, 2, 2))
    keys, values = (Tensor.zeros((1, 2, 5, 8), dtype, queue=queue) for _ in range(2))
    ops.cached_attention(q, k, v, keys, values, Tensor.from_host(queue, np.array([1], np.int32)))
    for cache, fresh in ((keys, k), (values, v)):
        np.testing.assert_array_equal(cache.to_host()[:, :, 1:3], fresh.to_host())
        assert not cache.to_host()[:, :, [0, 3, 4]].any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("new", [1, 3])
def test_new_positions_must_fit_behind_those_of_the_cache(new, packed, device):
    def given(*shape):
        return Tensor.ones(shape, queue=device.queue)

    fresh = (given(2, new, 32), None, None) if packed else (given(2, 4, new, 4), given(2, 2, new, 4), given(2, 2, new, 4))
    keys, values = (Tensor.zeros((2, 2, 9, 4), queue=device.queue) for _ in range(2))
    for lengths in (*[[2, 9 - new]] * 4, np.array([9 - new, 0])):
        assert ops.cached_attention(*fresh, keys, values, lengths).shape[0] == 2
    full, before = np.array([2, 10 - new]), keys.to_host()
    for lengths in (full, full.tolist(), *([Tensor.from_host(device.queue, full)] if device.backend == "cpu" else [])):
        with pytest.raises(
            ShapeError, match=rf"the {new} new positions must fit into the 9 positions of the cache; lengths=\[2, {10 - new}\]"
        ):
            ops.cached_attention(*fresh, keys, values, lengths)
    np.testing.assert_array_equal(keys.to_host(), before)


@pytest.mark.parametrize("cache", [(1, 2, 9, 4), (2, 2, 2, 4), (2, 2, 9), (2, 3, 9, 4)])
def test_a_packed_projection_must_fit_the_cache(queue, cache):
    """Another batch, more new positions than the cache has, a cache without heads, and heads that do not divide."""
    keys, values = (Tensor.zeros(cache, queue=queue) for _ in range(2))
    with pytest.raises(ShapeError, match=r"\[cached_attention\] without k and v, q must be \(batch, new, "):
        ops.cached_attention(Tensor.zeros((2, 3, 32), queue=queue), None, None, keys, values, Tensor.zeros((2,), "int32", queue=queue))


# ---- views of a projection


def _parts(z, heads, of_keys, size):
    """Queries, keys and values side by side in each position."""
    parts = z.split([heads * size, of_keys * size, of_keys * size], -1)
    return [part.reshape(*z.shape[:-1], -1, size).transpose(-3, -2) for part in parts]


def _woven(z, heads, of_keys, size):
    """The query, the key and the value of each head side by side."""
    return list(z.reshape(*z.shape[:-1], heads, 3, size).permute(3, 0, 2, 1, 4))


def _unpacked(z, heads, of_keys, size):
    """As :func:`_parts`, by unpacking a tensor of three parts."""
    return list(z.reshape(*z.shape[:-1], 3, heads, size).permute(2, 0, 3, 1, 4))


#: How a projection is split; its leading axes, heads, heads of keys, head size; options of attention.
PROJECTIONS = {
    "parts": (_parts, (2, 20), 3, 3, 8, {}),
    "causal": (_parts, (2, 37), 2, 2, 32, {"is_causal": True}),
    "grouped": (_parts, (2, 20), 4, 2, 16, {"is_causal": True, "scale": 0.5}),
    "woven": (_woven, (2, 20), 3, 3, 8, {}),
    "unpacked": (_unpacked, (2, 20), 3, 3, 8, {}),
    "bool mask": (_parts, (2, 20), 3, 3, 8, {"attn_mask": np.random.default_rng(1).random((2, 1, 20, 20)) < 0.7}),
    "added mask": (_woven, (2, 20), 2, 2, 8, {"attn_mask": np.linspace(-1, 1, 400, dtype=np.float32).reshape(20, 20)}),
    "more batch axes": (_parts, (2, 3, 20), 2, 2, 8, {}),
    "unaligned": (_parts, (2, 20), 3, 3, 5, {}),
    "one position": (_parts, (2, 1), 3, 3, 8, {}),
    "one head": (_parts, (2, 20), 1, 1, 8, {}),
    "dropout": (_parts, (2, 20), 3, 3, 8, {"dropout_p": 1e-9}),
}


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_projection_gives_the_values_and_gradients_of_its_copied_parts(name, dtype, tolerance, device):
    split, lead, heads, of_keys, size, options = PROJECTIONS[name]
    rng, width = np.random.default_rng(0), (heads + 2 * of_keys) * size
    values, upstream = rng.standard_normal((*lead, width), np.float32), rng.standard_normal((*lead, heads * size), np.float32)
    seen = []
    for copied in (False, True):
        z = Tensor.from_host(device.queue, values, dtype, requires_grad=True)
        q, k, v = split(z * 1, heads, of_keys, size)
        if copied:
            q, k, v = (part.clone() for part in (q, k, v))
        out = ag.scaled_dot_product_attention(q, k, v, **options).transpose(-3, -2).reshape(*lead, heads * size)
        out.backward(Tensor.from_host(device.queue, upstream, dtype))
        seen.append((out.to_host(), z.grad.to_host()))
    for got, want in zip(*seen, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("split", [_parts, _woven, _unpacked])
def test_attention_of_a_projection_copies_nothing_on_gpus(split, cl_device):
    """CPUs copy the queries, the keys, the values and the gradient of the result, whose rows they read often."""
    z = Tensor.from_host(cl_device.queue, np.ones((2, 20, 3 * 2 * 8), np.float32), requires_grad=True)
    projected, upstream = z * 1, Tensor.ones((2, 20, 16), queue=cl_device.queue)

    def gradient():
        q, k, v = split(projected, 2, 2, 8)
        out = ag.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 20, 16)
        ag.grad(out, projected, upstream, retain_graph=True)[0].realize()

    gradient()  # the first call on a GPU also checks the kernels of its matrix units
    with profile(cl_device, roofline=False) as p:
        gradient()
    names = [event.name for event in p.events if event.name.startswith(("attention", "copy", "transpose"))]
    assert len(names) == (7 if cl_device.device_type == "cpu" else 3), names


@pytest.mark.parametrize("read_first", [False, True])
def test_writes_to_joined_heads_do_not_reach_the_result_of_attention(read_first, device):
    z = Tensor.from_host(device.queue, np.random.default_rng(0).standard_normal((2, 20, 48), np.float32), requires_grad=True)
    out = ag.scaled_dot_product_attention(*_parts(z * 1, 2, 2, 8))
    want = [t.to_host() for t in (out.detach().clone(), ag.grad(out.sum(), z, retain_graph=True)[0])]
    with ag.no_grad():
        joined, again = (out.detach().transpose(1, 2).reshape(2, 20, 16) for _ in range(2))
        if read_first:
            joined.realize()
            again.realize()
        joined += 1.0
        np.testing.assert_array_equal(joined.to_host(), np.swapaxes(want[0], 1, 2).reshape(2, 20, 16) + 1)
        np.testing.assert_array_equal(again.to_host(), np.swapaxes(want[0], 1, 2).reshape(2, 20, 16))
    np.testing.assert_array_equal(out.to_host(), want[0])
    np.testing.assert_allclose(ag.grad(out.sum(), z)[0].to_host(), want[1], rtol=1e-6, atol=1e-7)
