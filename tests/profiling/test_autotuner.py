"""The tuner: nothing wrong wins, budgets hold, winners are found again and by neighbours, nothing is written unasked."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

import netcl.ops as F
from netcl.core.errors import DeviceError, DtypeError, ShapeError
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import algorithms
from netcl.profiling import autotuner
from netcl.profiling.autotuner import Autotuner, autotune, autotune_conv2d, autotune_matmul
from netcl.runtime import tuning

V = KernelVariant
NAIVE, WRONG, SLOW = (KernelConfig(V.MATMUL_NAIVE, tile_m=m) for m in (1, 2, 3))
POLICY = KernelConfig(V.MATMUL_TILED, extra={"why": "policy"})


@pytest.fixture(autouse=True)
def empty_store(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NETCL_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotuner, "_automatic", autotuner._Automatic())
    get_kernel_selector().clear_cache()
    yield tmp_path
    get_kernel_selector().clear_cache()


@pytest.fixture
def planted(monkeypatch):
    """A family whose configurations are a number of milliseconds each, and whose second one is fast and wrong."""
    took = {id(POLICY): 0.02, id(NAIVE): 0.004, id(WRONG): 0.0, id(SLOW): 0.05}

    def run(config, problem, operands):
        time.sleep(took[id(config)])
        exact = Tensor.from_host(operands[0].queue, operands[0].to_host() @ operands[1].to_host())
        return exact + 1e-2 if config is WRONG else exact

    def choices(self, problem):
        return [POLICY, WRONG, NAIVE, SLOW]

    monkeypatch.setattr(algorithms.Family, "configurations", choices)
    return {"matmul": running(run)}


def running(run):
    """The family of products with another way to run one: ``run(config, problem, operands)``."""
    family = algorithms.FAMILIES["matmul"]

    def case(problem):
        return family.case(problem)._replace(run=lambda config, *operands: run(config, problem, operands))

    return replace(family, case=case)


def test_a_fast_but_wrong_configuration_is_rejected(cl_device, planted):
    found = Autotuner(cl_device, families=planted).tune("matmul", 16, 24, 32)
    assert found.config is NAIVE and found.complete and found.stored and found.speedup > 1.3
    assert [trial.config for trial in found.rejected] == [WRONG] and "off by 0.01" in found.rejected[0].rejected
    assert found.trials[1].seconds == float("inf")


def test_one_that_cannot_run_is_rejected(cl_device, planted):
    def run(config, problem, operands):
        if config is NAIVE:
            raise ShapeError("no such tile")
        return planted["matmul"].run_with(config, problem, *operands)

    found = Autotuner(cl_device, families={"matmul": running(run)}).tune("matmul", 16, 24, 32)
    assert found.config is POLICY and "ShapeError: no such tile" in [trial.rejected for trial in found.trials]


def test_large_problems_are_checked_by_a_part_and_as_a_whole(cl_device, planted, monkeypatch):
    monkeypatch.setattr(autotuner, "CHECKED_PRODUCTS", 4 * 24 * 32)
    sizes = []

    def run(config, problem, operands):
        sizes.append(problem.shape)
        result = planted["matmul"].run_with(NAIVE, problem, *operands)
        return result + 1.0 if config is WRONG and problem.shape[0] == 16 else result

    found = Autotuner(cl_device, families={"matmul": running(run)}).tune("matmul", 16, 24, 32)
    assert {(4, 24, 32), (16, 24, 32)} == set(sizes) and [trial.config for trial in found.rejected] == [WRONG]


def test_the_budget_is_kept(cl_device, planted):
    found = Autotuner(cl_device, budget=0.0, families=planted).tune("matmul", 16, 24, 32)
    assert [trial.config for trial in found.trials] == [POLICY] and found.config is POLICY and not found.complete


def test_a_winner_is_found_again_also_by_neighbours(cl_device, monkeypatch):
    family = algorithms.FAMILIES["matmul"]
    problem = family.problem(64, 32, 32, profile=cl_device.profile)
    winner = family.configurations(problem)[-1]
    tuning.store.put(cl_device.profile, tuning.store_key(family, problem), {"config": tuning.to_json(winner), "seconds": 1.0})

    for strange in ("no list", "3", tuning.store_key(family, problem).replace("64", "1" + "0" * 400)):
        tuning.store.put(cl_device.profile, strange, {"config": None})

    def asked(*sizes, **flags):
        return tuning.tuned(family.problem(*sizes, profile=cl_device.profile, **flags))

    assert asked(64, 32, 32) == asked(60, 34, 30) == asked(128, 32, 32) == asked(128, 64, 32) == winner
    assert asked(256, 32, 32) is asked(64, 32, 32, trans_a=True) is asked(64, 32, 32, dtype="float16") is None
    assert get_kernel_selector().select_matmul_kernel(64, 32, 32) == winner
    a, b = (Tensor.from_host(cl_device.queue, np.ones(shape, np.float32)) for shape in ((64, 32), (32, 32)))
    assert (F.matmul(a, b).to_host() == 32).all()


def test_what_a_family_does_not_offer_is_not_taken_from_a_store(cl_device, monkeypatch):
    family = algorithms.FAMILIES["conv2d"]
    problem = family.problem(1, 8, 9, 9, 8, 3, 3, pad=1, profile=cl_device.profile)
    key = tuning.store_key(family, problem)
    for config in ({"variant": "CONV2D_NAIVE", "extra": {"MR": 999}}, {"variant": "GONE"}, [1], 5):
        tuning.store.put(cl_device.profile, key, {"config": config, "seconds": 1.0})
        assert tuning.tuned(problem) is None
    winograd = next(c for c in family.configurations(problem) if c.variant is V.CONV2D_WINOGRAD and "why" not in c.extra)
    tuning.store.put(cl_device.profile, key, {"config": tuning.to_json(winograd), "seconds": 1.0})
    assert tuning.tuned(problem) == winograd
    monkeypatch.setenv("NETCL_CONV_WINOGRAD", "0")
    assert tuning.tuned(problem) is None


def product(device, m, k, n):
    a, b = (Tensor.from_host(device.queue, np.ones(shape, np.float32)) for shape in ((m, k), (k, n)))
    return F.matmul(a, b)


def stored(folder):
    return [key for file in folder.glob("tuning/*.json") for key in json.loads(file.read_text())["entries"]]


def test_nothing_is_written_unasked(cl_device, empty_store, monkeypatch):
    for value in (None, "off", "on:0", "on:0.5"):
        if value is not None:
            monkeypatch.setenv("NETCL_AUTOTUNE", value)
        get_kernel_selector().clear_cache()
        product(cl_device, 20, 24, 28)
    assert not (empty_store / "tuning").exists()


def test_first_use_is_measured_when_asked_for_and_within_the_budget(cl_device, empty_store, monkeypatch, planted):
    from netcl.core.device import device

    monkeypatch.setitem(algorithms.FAMILIES, "matmul", planted["matmul"])
    monkeypatch.setenv("NETCL_AUTOTUNE", "on:60")
    family = planted["matmul"]
    problems = [family.problem(*sizes, profile=cl_device.profile) for sizes in ((16, 24, 32), (512, 24, 32))]
    with device(cl_device):
        for problem in problems:
            tuning.tuned(problem)
            tuning.tuned(problem)
    assert len(stored(empty_store)) == 2 and 0 < autotuner._automatic.spent < 60
    monkeypatch.setattr(autotuner._automatic, "spent", 60.0)
    with device(cl_device):
        tuning.tuned(family.problem(16, 24, 512, profile=cl_device.profile))
    assert len(stored(empty_store)) == 2


def test_by_name(cl_device, empty_store):
    config = autotune_matmul(8, 16, 32, "float32", cl_device.queue, budget=0.0)
    family = algorithms.FAMILIES["matmul"]
    assert config == family.configurations(family.problem(8, 16, 32, profile=cl_device.profile))[0]
    assert isinstance(autotune_conv2d(1, 2, 4, 4, 3, 3, 3, 1, 1, "float32", cl_device.queue, budget=0.0), KernelConfig)
    assert sorted(json.loads(key)[0] for key in stored(empty_store)) == ["conv2d", "matmul"]
    with pytest.raises(ShapeError, match=r"\[autotune\] op must be one that can be tuned; op='relu'"):
        Autotuner(cl_device).tune("relu", 4)
    with pytest.raises(ShapeError, match=r"\[autotune\] conv2d must have 7 sizes of at least 1; sizes=\(4, 4\)"):
        Autotuner(cl_device).tune("conv2d", 4, 4)
    with pytest.raises(DtypeError, match=r"dtype must be one of float32, float16, bfloat16, float64; dtype=int32"):
        Autotuner(cl_device).tune("matmul", 4, 4, 4, dtype="int32")


def test_a_function_is_tuned_as_a_whole_and_goes_on_where_time_ran_out(cl_device, planted, monkeypatch):
    monkeypatch.setitem(algorithms.FAMILIES, "matmul", planted["matmul"])
    told = []

    def work():
        product(cl_device, 8, 16, 32), product(cl_device, 30, 16, 32), product(cl_device, 32, 15, 33)

    results = autotune(work, 0.001, cl_device.queue)
    assert [result.complete for result in results] in ([], [False, False])
    results = autotune(work, 30.0, cl_device.queue, told.append)
    assert [result.problem.shape[0] for result in results] == [32, 8] and results == told
    assert [result.config for result in results] == [NAIVE, NAIVE] and all(result.complete for result in results)
    assert autotune(work, 30.0, cl_device.queue) == [] and len(autotune(work, 30.0, cl_device.queue, again=True)) == 2


def test_numpy_has_nothing_to_tune():
    from netcl.core.device import manager

    with pytest.raises(DeviceError, match="requires an OpenCL device"):
        autotune_matmul(4, 4, 4, queue=manager.default("cpu").queue)
