"""Kernel algorithms that compute wrong results on a device: caught by ``netcl selftest --full`` and left out afterwards."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

import netcl as nc
from netcl import cli, selftest
from netcl.core import kernel_selector
from netcl.core.errors import DeviceError
from netcl.engine import algorithms
from netcl.profiling import quarantine
from netcl.runtime import tuning

PRODUCT = (9, 70, 33)


@pytest.fixture
def planted(cl_device, monkeypatch, tmp_path):
    """The algorithm that a product of this device uses, replaced by one that leaves out the last term of every sum."""
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "store", tuning.TuningStore())
    monkeypatch.setattr(quarantine, "store", tuning.store)
    monkeypatch.setattr(quarantine, "_PROBLEMS", (("matmul", PRODUCT, {}),))
    kernel_selector.reload_environment()
    product(cl_device)
    good = algorithms.last_chosen["matmul"]
    table = algorithms.ALGORITHMS["matmul"]
    plain = next(a for a in table if a.name == "naive")
    bad = replace(good, run=lambda queue, p, config, profile, t: plain.run(queue, replace(p, k=p.k - 1), config, profile, t), samples=())
    monkeypatch.setitem(algorithms.ALGORITHMS, "matmul", [bad if a is good else a for a in table])
    kernel_selector.reload_environment()
    yield f"matmul/{good.name}"
    monkeypatch.undo()
    kernel_selector.reload_environment()


def product(device):
    m, n, k = PRODUCT
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    return float(np.abs((nc.tensor(a, device=device) @ nc.tensor(b, device=device)).numpy() - a @ b).max())


@pytest.mark.fault(
    "kernel that computes wrong results on a driver",
    "a planted algorithm that leaves out a term",
    "caught by `selftest --full`, quarantined by name; another kernel takes its place",
)
def test_a_wrong_kernel_is_caught_quarantined_and_replaced(planted, cl_device, cl_selector, capsys, caplog):
    assert product(cl_device) > 0.01
    caplog.set_level(logging.WARNING, "netcl")
    assert cli.main(["selftest", "relu", "--full", "--device", cl_selector]) == 0
    out = capsys.readouterr().out
    assert f"{planted}, variant: matmul {PRODUCT}" in out and "kernels quarantined" in out and "0 failed" in out
    assert product(cl_device) < 1e-4 and algorithms.last_chosen["matmul"].name != planted.partition("/")[2]
    assert any(f"[quarantine] not used, as they computed wrong results: {planted}" in line for line in caplog.messages)
    assert planted in tuning.quarantined(cl_device.profile)


def test_a_new_process_knows_what_is_quarantined(planted, cl_device):
    assert any(check.wrong for check in quarantine.check_variants(cl_device))
    fresh = tuning.TuningStore()
    assert "off by" in fresh.entries(cl_device.profile)["quarantine"][planted]


def test_a_wrong_kernel_that_cannot_be_quarantined_is_a_failure(planted, cl_device, monkeypatch):
    monkeypatch.setattr(tuning.store, "put", lambda *_: False)  # without a writable folder
    found = next(selftest.results(cl_device, ["relu"], full=True))
    assert (found.op, found.state) == (planted, "FAILED")


def test_where_every_kernel_is_wrong_the_op_refuses(planted, cl_device, monkeypatch):
    names = {f"matmul/{a.name}": "wrong" for a in algorithms.ALGORITHMS["matmul"]}
    tuning.store.put(cl_device.profile, "quarantine", names)
    kernel_selector.reload_environment()
    with pytest.raises(DeviceError, match=r"\[matmul\] no kernel of matmul can be used: .* computed wrong results on this device; device="):
        product(cl_device)


def test_the_refusal_tells_a_wrong_kernel_from_one_that_failed_its_probe(planted, cl_device, monkeypatch):
    name = planted.partition("/")[2]
    table = [a if a.name == name else replace(a, probe=lambda queue, problem, config: False) for a in algorithms.ALGORITHMS["matmul"]]
    monkeypatch.setitem(algorithms.ALGORITHMS, "matmul", table)
    tuning.store.put(cl_device.profile, "quarantine", {planted: "wrong", "conv2d/other": "wrong"})
    kernel_selector.reload_environment()
    said = rf"can be used: {name} computed wrong results on this device, and .+ did not build or failed the probe; device="
    with pytest.raises(DeviceError, match=said):
        product(cl_device)
