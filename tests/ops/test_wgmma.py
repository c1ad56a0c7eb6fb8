"""Products by wgmma: which it is given and how (everywhere, with a made-up device), and what it gives where there is such a device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from netcl.core.kernel_selector import set_matmul_precision
from netcl.core.tensor import Tensor
from netcl.engine import algorithms
from netcl.ops.epilogue import Epilogue
from netcl.ops.matmul import gemm, nvidia, wgmma
from netcl.ops.matmul.gemm import Extras, Matmul, Operands

GPU = {"device_type": "gpu", "max_compute_units": 132, "local_mem_size": 48 * 1024, "max_work_group_size": 1024}
SIDES = [(False, False), (False, True), (True, False), (True, True)]
CASES = [(dtype, tile) for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)) for tile in wgmma.WGMMA_TILES[size]]


@pytest.fixture
def hopper(cl_device, monkeypatch):
    """The profile of a device that can, and whose kernels were found right."""
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")
    monkeypatch.setattr(nvidia, "trusted", lambda *asked: True)
    return dataclasses.replace(cl_device.profile, compute_capability=(9, 0), **GPU)


@pytest.fixture
def units(cl_device, monkeypatch):
    """A queue whose device has these instructions."""
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "1")
    if not nvidia.capable(cl_device.profile, wgmma.CAPABILITY, wgmma.CAPABILITY):
        pytest.skip("the device has no wgmma")
    return cl_device.queue


def product_of(m, n, k, dtype="float32", sides=(False, False), **rest):
    return Matmul(m, n, k, *sides, dtype, rest.pop("b", dtype), rest.pop("c", dtype), **{"placed": True, **rest})


def takes(p, profile):
    """Whether the policy leaves a product to these instructions."""
    return gemm.product_algorithm(None, p, gemm.PORTABLE, profile)[0].name == wgmma.WGMMA_TIER


# ---- which products


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (product_of(4096, 4096, 4096), "wgmma"),
        (product_of(4096, 4096, 4096, "bfloat16"), "wgmma"),
        (product_of(1151, 1153, 384, sides=(False, True)), "wgmma"),  # rows of both are 384 long
        (product_of(64, 12544, 64, batch=(1, 36), a_strides=(0, 4096), b_strides=(0, 64 * 12544)), "wgmma"),
        (product_of(4096, 768, 50257), "wgmma"),  # these are copied into aligned rows
        (product_of(50257, 768, 8192, "bfloat16", sides=(True, False)), "wgmma"),
        (product_of(4096, 4096, 4096, placed=False), "wgmma"),
        (product_of(4096, 4096, 4096, "float16", b="float32", c="float32"), "wgmma"),
        (product_of(128, 126, 126), None),  # small: a copy would cost more than it saves
        (product_of(1024, 1024, 1024, "float64"), None),
        (product_of(8, 8, 8), None),
    ],
)
def test_large_products_are_taken(p, wanted, hopper, cl_device):
    assert takes(p, hopper) == (wanted is not None)


def test_only_this_capability_has_the_instructions(hopper, cl_device, monkeypatch):
    p = product_of(4096, 4096, 4096)
    for capability in ((8, 9), (10, 0), None):
        assert not takes(p, dataclasses.replace(hopper, compute_capability=capability))
    monkeypatch.setenv("NETCL_MATRIX_UNITS", "0")
    assert not takes(p, hopper)


def test_rounded_float32_is_left_to_the_tier_below():
    try:
        set_matmul_precision("medium")
        assert not wgmma.takes(product_of(64, 64, 64)) and wgmma.takes(product_of(64, 64, 64, "bfloat16"))
    finally:
        set_matmul_precision("highest")


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (product_of(4096, 4096, 4096, sides=(False, True)), (128, 128, False, 1)),
        (product_of(4096, 4096, 4096), (128, 128, True, 1)),  # so that the operand that would be turned is the left one
        (product_of(1024, 1024, 1024, sides=(True, True)), (128, 64, False, 1)),  # twice as many tiles: a processor each
        (product_of(64, 12544, 64, batch=(1, 36)), (64, 128, True, 1)),  # no rows that are not there
        (product_of(4096, 4096, 4096, "bfloat16"), (128, 256, False, 1)),
        (product_of(512, 2048, 2048, "float16", sides=(False, True)), (128, 64, False, 1)),  # a processor each again
    ],
)
def test_tiles_fit_the_product(p, wanted):
    tile, _ = wgmma.best_tile(p, 132)
    assert (tile.m, tile.n, tile.swapped, tile.splits) == wanted


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_few_tiles_share_a_long_sum(dtype):
    tile, _ = wgmma.best_tile(product_of(384, 384, 16384, dtype), 132)
    assert 100 <= tile.splits * -(-384 // tile.m) * -(-384 // tile.n) <= 264 and tile.splits > 1


@pytest.mark.parametrize(("dtype", "tile"), CASES, ids=str)
def test_stages_fit_local_memory(dtype, tile):
    """Static arrays may have 224 KB; a copier may be two stages ahead of the first that it has given away."""
    parts = 2 if dtype == "float32" else 1
    assert tile.stages * 128 * (128 + parts * tile.columns) <= 224 * 1024 and tile.stages >= 4
    assert tile.columns % 64 == 0 and (tile.m if not tile.swapped else tile.n) == wgmma.ROWS
    assert wgmma.best_tile(product_of(512, 512, 512, dtype), 132, tile.config())[0]._replace(splits=1, rate=tile.rate) == tile


def test_a_tuner_is_offered_the_tiles(hopper):
    family = algorithms.FAMILIES["matmul"]

    def offered(profile, dtype):
        found = family.configurations(family.problem(512, 512, 512, profile=profile, dtype=dtype))
        return [config for config in found if config.extra.get("tier") == wgmma.WGMMA_TIER]

    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert offered(hopper, dtype) == [tile.config() for tile in wgmma.WGMMA_TILES[size]]
    assert not offered(hopper, "float64")
    assert not offered(dataclasses.replace(hopper, compute_capability=(8, 0)), "float32")


# ---- what is asked of the assembler


@pytest.mark.parametrize(("dtype", "tile"), CASES, ids=str)
@pytest.mark.parametrize("sides", SIDES)
def test_instructions_name_all_their_sums(dtype, tile, sides):
    text = wgmma.instructions(product_of(64, 64, 64, dtype, sides), tile)
    lines = [line for line in text.splitlines() if "wgmma.mma_async" in line]
    assert len(lines) == (2 if dtype == "float32" else 1)
    for line in lines:
        assert line.count('"//@sm_90a ') == 1 and f".m64n{tile.columns}k" in line
        assert line.count('"+f"') + line.count('"=f"') == tile.columns // 2
        operands = tile.columns // 2 + (5 if dtype == "float32" else 2)
        assert f"%{operands - 1}," in line and f"%{operands}" not in line
    if dtype != "float32":  # rows of the left operand, columns of the right one: turned where they do not lie along k
        assert lines[0].split(";")[0].endswith(f", {int(sides[0])}, {int(not sides[1])}")


@pytest.mark.parametrize("splits", [1, 3])
def test_as_many_groups_as_there_are_processors(splits, monkeypatch):
    launches, sums = [], []

    def compiled(queue, file, name, p, *rest, **macros):
        return lambda queue, *launch: launches.append(SimpleNamespace(name=name, p=p, macros=macros, sizes=launch[:2], scale=launch[-1]))

    monkeypatch.setattr(gemm, "compiled", compiled)
    queue = SimpleNamespace(device=SimpleNamespace(max_compute_units=132))
    operands = SimpleNamespace(a="a", b="b", out="c", end=("d", "r", "c"), scale=0.5, sums=lambda count: sums.append(count) or "s")
    p = product_of(4096, 4096, 4096, "bfloat16", bias="float32")
    wgmma.run(queue, p, operands, wgmma.WGMMA_TILES[2][0]._replace(splits=splits))
    first = launches[0]
    assert first.sizes == (132 * 384, 384)
    assert [step.name for step in launches] == ["gemm_wgmma", "add_parts"][: 1 if splits == 1 else 2]
    assert first.p.c == ("bfloat16" if splits == 1 else "float32") and first.scale == (0.5 if splits == 1 else 1)
    assert first.macros["C_WIDTH"] == (4 if splits == 1 else 2) and sums == ([] if splits == 1 else [3 * 4096 * 4096])


# ---- what they give


# A kernel takes a second to build: all tiles lie all ways in two dtypes, the third and sums in parts are of the same text.
BUILT = [(dtype, tile, *sides, 1) for dtype, tile in CASES if dtype != "float16" for sides in SIDES]
BUILT += [("float16", wgmma.WGMMA_TILES[2][0], False, True, 1), ("float32", wgmma.WGMMA_TILES[4][0], False, True, 2)]


@pytest.mark.parametrize(("dtype", "tile", "trans_a", "trans_b", "splits"), BUILT, ids=str)
def test_products(dtype, tile, trans_a, trans_b, splits, units, rng, exact_product):
    """Edges in all directions, a bias and an activation, infinities and NaN; the same bits every time."""
    aligned = 264 if trans_a else 261, 135 if trans_b else 136, 525 if trans_a and not trans_b else 528
    for m, n, k in (aligned, (261, 135, 525)):
        check_product(m, n, k, dtype, tile._replace(splits=splits), trans_a, trans_b, units, rng, exact_product)


def check_product(m, n, k, dtype, tile, trans_a, trans_b, units, rng, exact_product):
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)))
    a.flat[3], a.flat[-5], b.flat[-1], b.flat[7] = np.inf, -np.inf, np.nan, 0
    a, b, bias = Tensor.from_host(units, a, dtype), Tensor.from_host(units, b, dtype), rng.standard_normal(n, np.float32)
    epilogue = Epilogue(dtype, activation="relu", result="float32")
    extras = Extras(epilogue, Tensor.from_host(units, bias))
    p, results = gemm.matmul_of(a, b, trans_a, trans_b, extras.bias, epilogue, False), []
    for _ in range(5):
        t = Operands(a, b, Tensor.empty((m, n), queue=units), extras.bias)
        wgmma.run(units, p, t, tile)
        results.append(t.out.to_host())
    exact = exact_product(a, b, trans_a, trans_b) + bias
    exact = np.where(exact < 0, 0, exact)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(results[0][~finite], exact[~finite])
    bound = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype] * np.abs(exact[finite]).max()
    np.testing.assert_allclose(results[0][finite], exact[finite], rtol=0, atol=bound)
    assert all(other.tobytes() == results[0].tobytes() for other in results[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_with_strides(dtype, units, rng, exact_product):
    a, b = (Tensor.from_host(units, rng.standard_normal(shape, np.float32), dtype) for shape in ((3, 4, 136, 40), (4, 40, 72)))
    exact = exact_product(a, b, False, False)
    for tile in wgmma.WGMMA_TILES[4 if dtype == "float32" else 2][1:3]:
        t = Operands(a, b, Tensor.empty((3, 4, 136, 72), dtype, queue=units))
        wgmma.run(units, gemm.matmul_of(a, b, False, False, None, Epilogue(dtype), False), t, tile)
        np.testing.assert_allclose(t.out.to_host(), exact, rtol=0, atol=(2e-6 if dtype == "float32" else 2**-8) * np.abs(exact).max())


def test_the_tier_is_trusted(units):
    for dtype in ("float32", "bfloat16", "float16"):
        assert nvidia.trusted(units, wgmma.WGMMA_TIER, dtype, wgmma.run)
