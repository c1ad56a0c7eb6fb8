"""The table of algorithms, and what a tuner takes from it: candidates that are right, classes that neighbours share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import netcl
import netcl.ops as F
from netcl.core.errors import ShapeError
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import algorithms
from netcl.ops.conv import plans
from netcl.ops.conv.geometry import geometry
from netcl.ops.matmul import gemm

WINDOWS = (1, 8, 5, 6, 7, 3, 3)
PROBLEMS = [("matmul", (9, 70, 33), {"trans_b": True}), ("conv2d", WINDOWS, {"pad": 1}), ("conv2d_weight_grad", WINDOWS, {"pad": 1})]


#: Kernels without a measurement: those of groups of one or two filters, and of configurations that ask for them by name.
UNMEASURED = {("conv2d", "rows"), ("conv2d", "naive"), ("quantized", "strips")}
TABLE = [algorithm for table in algorithms.ALGORITHMS.values() for algorithm in table]


@pytest.mark.parametrize("algorithm", TABLE, ids=lambda a: f"{a.family}-{a.name}")
def test_every_algorithm_is_documented_and_names_what_exists(algorithm):
    folder = Path(netcl.__file__).parent / "ops" / algorithm.family.removesuffix("2d")
    assert all((folder / file).exists() for file in algorithm.kernels.split()) and algorithm.doc
    if (algorithm.family, algorithm.name) not in UNMEASURED:
        results, _, case = algorithm.wins.partition(": ")
        folder = Path(__file__).parents[2] / ("docs" if results.endswith(".md") else "benchmarks/results")
        assert case and case in (folder / results).read_text(encoding="utf-8")
    assert [a.name for a in algorithms.ALGORITHMS[algorithm.family]].count(algorithm.name) == 1


def test_samples_run_the_algorithm_they_belong_to(cl_device):
    """Each of them for one of the op's shapes at least, whatever the device."""
    sizes = [geometry("conv2d", (2, c, 9, 8), (c, c, k, k), 1, k // 2, 1, 1) for k in (1, 3) for c in (8, 40)]
    sizes.append(geometry("conv2d", (2, 8, 9, 8), (8, 1, 3, 3), 1, 1, 1, 8))
    for algorithm in algorithms.ALGORITHMS["conv2d"]:
        for config in algorithm.samples:
            convolutions = [
                plans.Convolution(kind, g, "float32") for kind in (plans.FORWARD, plans.INPUT_GRAD, plans.WEIGHT_GRAD) for g in sizes
            ]
            assert algorithm in [
                plans.convolution_algorithm(cl_device.queue, conv, config, cl_device.profile)[0] for conv in convolutions
            ], algorithm.name
    products = [gemm.Matmul(8, 64, 70, False, turned, *("float32",) * 3) for turned in (False, True)]
    for algorithm in algorithms.ALGORITHMS["matmul"]:
        for config in algorithm.samples if not algorithm.needs else ():
            assert algorithm in [gemm.product_algorithm(cl_device.queue, p, config, cl_device.profile)[0] for p in products], algorithm.name


def test_the_cheapest_that_applies_is_chosen_and_a_named_one_before_it(monkeypatch):
    def made(name, cost, **columns):
        return algorithms.Algorithm("toys", name, "", "", "", None, tiers=(name,), cost=lambda *asked: cost, **columns)

    refused, cheap, dear, other = (
        made("refused", 1, probe=lambda *asked: False), made("cheap", 2), made("dear", 3), made("other", 0, device="cpu"),
    )  # fmt: skip
    monkeypatch.setitem(algorithms.ALGORITHMS, "toys", [dear, other, cheap, refused])

    def chosen(**extra):
        gpu = SimpleNamespace(device_type="gpu", platform="toys", name="toy", driver_version="1")
        return algorithms.choose_algorithm("toys", None, None, KernelConfig(KernelVariant.MATMUL_NAIVE, extra=extra), gpu)

    assert chosen() is cheap and chosen(tier="dear") is dear and chosen(tier="refused") is None
    with pytest.raises(ShapeError, match=r"\[toys\] the tier and the variant of a configuration must belong to the same kernel; .*tier=x"):
        chosen(tier="x")


@pytest.fixture
def precision():
    yield
    netcl.set_matmul_precision("highest")


@pytest.mark.parametrize("op, sizes, flags", PROBLEMS)
def test_candidates_are_right(op, sizes, flags, cl_device):
    family = algorithms.FAMILIES[op]
    problem = family.problem(*sizes, profile=cl_device.profile, **flags)
    operands = family.operands(problem, cl_device.queue)
    exact, bound = family.reference(problem, *operands), family.tolerance(problem, *operands)
    candidates = family.configurations(problem)
    assert "why" in candidates[0].extra and len(candidates) > 3 and bound < 1e-3 * np.abs(exact).max()
    for config in (candidates[0], candidates[-1]):
        assert np.abs(family.run_with(config, problem, *operands).to_host() - exact).max() <= bound


def test_neighbours_share_a_class(cl_device):
    family = algorithms.FAMILIES["matmul"]
    near, same, far, turned = (
        family.problem_class(family.problem(*sizes, profile=cl_device.profile, **flags))
        for sizes, flags in (((500, 64, 70), {}), ((512, 64, 64), {}), ((512, 64, 128), {}), ((512, 64, 64), {"trans_a": True}))
    )
    assert near == same and far != same and turned != same


def test_a_measured_gradient_is_its_own(cl_device, monkeypatch):
    asked = []
    monkeypatch.setattr(get_kernel_selector(), "measured", lambda op, key: asked.append(key))
    dy, w = (Tensor.from_host(cl_device.queue, np.ones(shape, np.float32)) for shape in ((1, 2, 3, 3), (2, 2, 3, 3)))
    F.conv2d_input_grad(dy, w, size=(5, 5), dilation=1)
    assert [(key[0], key[1]) for key in asked] == [("conv2d_input_grad", (1, 2, 5, 5, 2, 3, 3))]
    wanted = algorithms.FAMILIES["conv2d_input_grad"].problem(1, 2, 5, 5, 2, 3, 3, profile=cl_device.profile)
    assert asked[0] == wanted.key


def test_precision_names_what_may_be_lost(precision, cl_device):
    selector, family = get_kernel_selector(), algorithms.FAMILIES["matmul"]
    problem, revision = family.problem(64, 64, 64, profile=cl_device.profile), selector.revision
    exact = family.tolerance(problem)
    netcl.set_matmul_precision("high")
    assert netcl.get_matmul_precision() == "high" and selector.revision > revision and family.tolerance(problem) > exact
    with pytest.raises(ValueError, match=r"\[set_matmul_precision\] precision must be one of highest, high, medium; precision='low'"):
        netcl.set_matmul_precision("low")


def test_dilation_is_read_from_shapes():
    chosen = get_kernel_selector().select("conv2d", ((1, 4, 9, 9), (4, 4, 3, 3), (1, 1), (0, 0), (2, 2)))
    assert isinstance(chosen, KernelConfig) and chosen.variant is not KernelVariant.CONV2D_WINOGRAD


def _plain_error(rows, columns):
    """The largest error of dot products that are summed in float32 one term after another."""
    plain = np.cumsum(rows[:, :, None] * columns[None], axis=1, dtype=np.float32)[:, -1]
    return np.abs(plain - rows.astype(np.float64) @ columns.astype(np.float64)).max()


@pytest.mark.parametrize(
    "op, sizes",
    [("matmul", (48, 64, 3000)), ("conv2d", (1, 64, 9, 9, 24, 3, 3)), ("conv2d_weight_grad", (3, 8, 32, 32, 8, 1, 1))],
)
def test_the_chosen_kernel_is_as_exact_as_a_plain_sum(op, sizes, cl_device, rng):
    family = algorithms.FAMILIES[op]
    problem = family.problem(*sizes, profile=cl_device.profile)
    operands = family.operands(problem, cl_device.queue)
    error = np.abs(family.run_with(family.configurations(problem)[0], problem, *operands).to_host() - family.reference(problem, *operands))
    depth = family.case(problem).depth
    rows, columns = rng.standard_normal((32, depth), np.float32), rng.standard_normal((depth, 48), np.float32)
    assert error.max() <= 4 * _plain_error(rows, columns)
