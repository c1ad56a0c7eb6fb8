"""Matrix units of NVIDIA GPUs: who may use them and which products they are given (everywhere, with made-up devices), and their products
where there are any."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from netcl.core import recording
from netcl.core.errors import KernelBuildError
from netcl.core.kernel_selector import KernelConfig, KernelVariant, set_matmul_precision
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.plan import command_list
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import gemm, mma, nvidia, wgmma
from netcl.ops.matmul.gemm import Extras, Matmul

GPU = {"device_type": "gpu", "max_compute_units": 132, "local_mem_size": 48 * 1024, "max_work_group_size": 1024}
SIMT = KernelConfig(KernelVariant.MATMUL_TILED, 32, 32, 16, 2, extra={"tier": "simt"})
SIDES = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")


@pytest.fixture
def ampere(cl_device, allowed, monkeypatch):
    """The profile of a device that can, and whose kernels were found right."""
    monkeypatch.setattr(nvidia, "trusted", lambda *asked: True)
    return dataclasses.replace(cl_device.profile, compute_capability=(8, 0), **GPU)


@pytest.fixture
def units(cl_device, allowed):
    """A queue whose device has matrix units that work."""
    for dtype in ("float32", "bfloat16", "float16"):
        if not (nvidia.capable(cl_device.profile) and nvidia.trusted(cl_device.queue, mma.MMA_TIER, dtype, mma.run)):
            pytest.skip("the device has no matrix units that netcl knows")
    return cl_device.queue


def product_of(m, n, k, a="float32", b=None, c=None, placed=True, **rest):
    return Matmul(m, n, k, False, False, a, b or a, c or a, placed=placed, **rest)


def takes(p, profile):
    """Whether the policy leaves a product to the units."""
    return gemm.product_algorithm(None, p, gemm.PORTABLE, profile)[0].name == mma.MMA_TIER


# ---- who may


@pytest.mark.parametrize(("capability", "wanted"), [(None, False), ((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_the_compute_capability_decides(capability, wanted, cl_device, allowed):
    assert nvidia.capable(dataclasses.replace(cl_device.profile, compute_capability=capability)) == wanted


def test_the_switch_forbids(ampere, monkeypatch, cl_device):
    p = product_of(4096, 4096, 4096)
    assert takes(p, ampere)
    monkeypatch.setenv("NETCL_KERNEL_STRATEGY", "portable")
    assert not takes(p, ampere)
    monkeypatch.delenv("NETCL_KERNEL_STRATEGY")
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "0")
    assert not takes(p, ampere)


def test_a_tier_is_trusted_only_after_a_right_product(cl_device):
    asked = []

    def right(queue, p, t):
        asked.append(p)
        gemm.multiply(queue, p, t, SIMT)

    def wrong(queue, p, t):
        gemm.multiply(queue, dataclasses.replace(p, k=p.k - 4), t, SIMT)

    def refused(queue, p, t):
        raise KernelBuildError("[build] no")

    state = program.state(cl_device.queue)
    recording.start(object())  # which knows nothing of what a recorder is told: a step does not record the check
    try:
        planning = command_list(cl_device.queue, ())  # the check itself is no part of the plan that is being made
        assert nvidia.trusted(planning, "right", "float32", right) and nvidia.trusted(cl_device.queue, "right", "float32", right)
        assert not planning.commands
        assert len(asked) == 1
        for name, product in (("wrong", wrong), ("refused", refused)):
            with pytest.warns(UserWarning, match=rf"\[matmul\] the kernels {name} cannot be used for float32.*; portable kernels are used"):
                assert not nvidia.trusted(cl_device.queue, name, "float32", product)
    finally:
        recording.stop()
        for name in ("right", "wrong", "refused"):
            state.pop(("matmul", name, "float32"), None)


# ---- which products


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (product_of(4096, 4096, 4096), "mma"),
        (product_of(1024, 1024, 1024, "bfloat16"), "mma"),
        (product_of(1000, 1001, 999, "float16"), "mma"),  # written out first
        (product_of(1024, 1024, 1024, "float16", b="float32", c="float32"), "mma"),
        (product_of(8, 8, 8), None),
        (product_of(8192, 8192, mma.MMA_SPLIT_DEPTH - 1), None),  # not exact enough
        (product_of(8192, 8192, mma.MMA_SPLIT_DEPTH - 1, "bfloat16"), "mma"),
        (product_of(40, 40, 40, "bfloat16"), None),
        (product_of(1024, 1024, 1024, "float64"), None),
        (product_of(1024, 1024, 1024, "int32"), None),
        (product_of(1024, 1024, 1024, "float32", b="int32"), None),
        (product_of(1024, 1024, 0), None),
    ],
)
def test_large_products_of_floats_are_taken(p, wanted, ampere, cl_device):
    assert takes(p, ampere) == (wanted is not None)


@pytest.mark.parametrize(("m", "n", "k", "splits"), [(4096, 4096, 4096, False), (384, 384, 16384, True), (16384, 384, 384, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_leave_few_units_idle(m, n, k, splits, dtype, ampere):
    tile, _ = mma.best(product_of(m, n, k, dtype), 132)
    groups = tile.splits * -(-m // tile.m) * -(-n // tile.n)
    assert (tile.splits > 1) == splits, tile
    assert groups >= 132, tile


@pytest.mark.parametrize(
    "tile", [tile for tiles in mma.MMA_TILES.values() for tile in tiles], ids=lambda tile: "x".join(map(str, tile[:3]))
)
def test_blocks_fit_what_every_such_device_has(tile):
    """And work-items copy whole lines of them: what mma.cl takes for granted."""
    size = next(size for size, tiles in mma.MMA_TILES.items() if tile in tiles)
    assert tile.stages * tile.k * (tile.m + tile.n) * size <= 48 * 1024
    assert tile.k * size in (64, 128) and tile.warp_m % 32 == tile.warp_n % 32 == 0 and tile.k * size // 32 % 2 == 0
    assert all(side * tile.k * size // 16 % tile.items == 0 for side in (tile.m, tile.n))
    assert all(tile.items % (line * size // 16) == 0 for line in (tile.k, tile.m, tile.n))


@pytest.fixture
def sources(monkeypatch):
    """Runs a product over letters, without compiling anything; gives the launches."""
    launches = []

    def kernel(name, **facts):
        def launched(queue, size, local, *args):
            buffers, numbers = "".join(x for x in args if isinstance(x, str)), tuple(x for x in args if not isinstance(x, str))
            launches.append(SimpleNamespace(name=name, buffers=buffers, numbers=numbers, **facts))

        return launched

    monkeypatch.setattr(gemm, "compiled", lambda queue, file, name, p, *rest, **macros: kernel(name, p=p, macros=macros))
    monkeypatch.setattr(launch, "kernel", lambda queue, module, file, name, *rest: kernel(name))

    def run(p, *tile):
        launches.clear()
        operands = SimpleNamespace(a="a", b="b", out="c", end=("d", "r", "c"), scale=1, sums=lambda count: "p")
        mma.run(SimpleNamespace(device=SimpleNamespace(max_compute_units=132)), p, operands, *tile)
        return list(launches)

    return run


@pytest.mark.parametrize(
    ("p", "names", "letters"),
    [
        (product_of(64, 72, 80, "float16"), ["gemm_mma"], "abdrc"),
        (product_of(64, 72, 76), ["gemm_mma"], "abdrc"),
        (product_of(64, 72, 76, "float16"), ["pad_lines", "gemm_mma"], "pbdrc"),
        (product_of(64, 71, 80, "float16"), ["pad_lines", "gemm_mma"], "apdrc"),
        (product_of(64, 72, 80, "float16", placed=False), ["pad_lines", "pad_lines", "gemm_mma"], "ppdrc"),
        (product_of(64, 72, 80, "float16", b="float32", c="float32"), ["pad_lines", "gemm_mma"], "pbdrc"),
    ],
)
def test_operands_are_written_out_only_where_they_must_be(p, names, letters, sources):
    launches = sources(p, mma.best(p, 1)[0]._replace(splits=1))
    assert [step.name for step in launches] == names and launches[-1].buffers == letters


def test_what_is_written_out_lies_one_after_the_other(sources):
    """A broadcast operand once; values of 16 bits are counted as half of those that the memory is made of."""
    p = product_of(5, 3, 7, "bfloat16", batch=(2, 3), a_strides=(105, 35), b_strides=(0, 0))
    a, b, main = sources(p, mma.MMA_TILES[2][-1])
    assert a.numbers == (7, 8, 5, 3, 105, 35, 0, 6 * 5) and b.numbers == (3, 8, 7, 1, 0, 0, 6 * 5 * 8, 7)
    lda, ldb, batch1, strides, first = main.numbers[3], main.numbers[4], main.numbers[6], main.numbers[7:11], main.numbers[11]
    assert (lda, ldb, batch1, strides, first) == (8, 8, 3, (120, 40, 0, 0), 240)


@pytest.mark.parametrize("width", [1, 7, 70, 301])
def test_written_out_lines_are_padded_with_zeros(width, cl_device):
    rng = np.random.default_rng(width)
    a, b = rng.standard_normal((2, 3, width), np.float32), rng.standard_normal((2, width, 8), np.float32)
    p = product_of(3, 8, width, batch=(1, 2), a_strides=(0, 3 * width), b_strides=(0, 8 * width))
    tensors = [Tensor.from_host(cl_device.queue, x) for x in (a, b)]
    (side, _), (left, right), _ = mma.written_out(cl_device.queue, p, "float32", gemm.Operands(*tensors, tensors[0]))
    lines = left.to_host()[: 6 * side.width].reshape(6, side.width)
    np.testing.assert_array_equal(lines, np.pad(a.reshape(6, width), ((0, 0), (0, side.width - width))))
    assert right is tensors[1] and side.width % 4 == 0 and side.strides == (0, 3 * side.width)


def test_precision_decides_how_float32_is_split(sources):
    p = product_of(64, 64, 64)
    try:
        for precision, terms in (("highest", 2), ("high", 2), ("medium", 1)):
            set_matmul_precision(precision)
            assert sources(p)[-1].macros["TERMS"] == terms
    finally:
        set_matmul_precision("highest")
    assert sources(product_of(64, 64, 64, "float16"))[-1].macros["TERMS"] == 1


def test_a_tuner_is_offered_the_tiles(ampere):
    family = algorithms.FAMILIES["matmul"]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        offered = family.configurations(family.problem(512, 512, 512, profile=ampere, dtype=dtype))
        assert set(mma.MMA_TILES[size]) == {t for t in mma.MMA_TILES[size] if t.config() in offered}
        for tile in mma.MMA_TILES[size]:
            assert mma.best(product_of(512, 512, 512, dtype), 132, tile.config())[0][:3] == tile[:3]
    plain = family.configurations(family.problem(512, 512, 512, profile=dataclasses.replace(ampere, compute_capability=None)))
    assert not any(config.extra.get("tier") == "mma" for config in plain)


@pytest.mark.parametrize("tiles", [mma.MMA_TILES, wgmma.WGMMA_TILES])
def test_a_configuration_for_other_hardware_is_done_portably(tiles, cl_device, rng):
    """A stored measurement may name a tier that the device, or the switch, no longer allows."""
    a, b = (Tensor.from_host(cl_device.queue, rng.standard_normal(shape, np.float32)) for shape in ((33, 20), (20, 9)))
    if nvidia.capable(cl_device.profile):
        pytest.skip("the device has them")
    got = gemm.product(a, b, (33, 9), Extras(Epilogue("float32")), config=tiles[4][0].config()).to_host()
    np.testing.assert_allclose(got, a.to_host() @ b.to_host(), rtol=1e-5, atol=1e-5)


# ---- what they give


WHOLE, ODD = (136, 200, 264), (67, 129, 301)
CASES = [
    *((dtype, tile, WHOLE) for dtype, tiles in (("float32", mma.MMA_TILES[4]), ("bfloat16", mma.MMA_TILES[2])) for tile in tiles),
    ("float16", mma.MMA_TILES[2][0], WHOLE), ("float32", mma.MMA_TILES[4][-1], ODD), ("bfloat16", mma.MMA_TILES[2][-1], ODD),
]  # fmt: skip


@pytest.mark.parametrize(("trans_a", "trans_b"), SIDES)
@pytest.mark.parametrize(("dtype", "tile", "sizes"), CASES, ids=str)
def test_products_on_the_units(dtype, tile, sizes, trans_a, trans_b, units, rng, exact_product):
    m, n, k = sizes
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)))
    a.flat[3], b.flat[-1] = np.inf, np.nan
    a, b, bias = Tensor.from_host(units, a, dtype), Tensor.from_host(units, b, dtype), rng.standard_normal(n, np.float32)
    extras = Extras(Epilogue(dtype, activation="relu", result="float32"), Tensor.from_host(units, bias))
    got = gemm.product(a, b, (m, n), extras, trans_a, trans_b, tile.config()).to_host()
    exact = exact_product(a, b, trans_a, trans_b) + bias
    exact = np.where(exact < 0, 0, exact)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    bound = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype] * np.abs(exact[finite]).max()
    np.testing.assert_allclose(got[finite], exact[finite], rtol=0, atol=bound)


@pytest.mark.parametrize("k", [1, 3, 8, 33, mma.MMA_SPLIT_DEPTH - 1, mma.MMA_SPLIT_DEPTH, 100, 1000])
def test_split_float32_is_within_four_times_a_plain_sum(k, units, rng, exact_product):
    a, b = (Tensor.from_host(units, rng.standard_normal(shape, np.float32)) for shape in ((256, k), (k, 256)))
    exact = exact_product(a, b, False, False)
    tile, plain = (
        gemm.product(a, b, (256, 256), Extras(Epilogue("float32")), config=config).to_host()
        for config in (mma.MMA_TILES[4][1].config(), KernelConfig(KernelVariant.MATMUL_NAIVE, extra={"tier": "simt"}))
    )
    assert np.abs(tile - exact).max() <= 4 * np.abs(plain - exact).max()
