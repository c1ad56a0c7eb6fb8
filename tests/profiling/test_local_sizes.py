"""Local sizes of hand-written kernels: measured, kept, taken; those that change a result are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from netcl.core.errors import ShapeError
from netcl.core.kernels.primitives import KernelSpec
from netcl.core.tensor import Tensor
from netcl.profiling import local_sizes
from netcl.runtime import tuning

TILED = KernelSpec("tiled", src="""__kernel void tiled(__global float* x, __global float* y) {
  y[get_global_id(0)] = x[get_global_id(0)] + (get_local_size(0) > 8 ? 0.0f : 1.0f);
}""")  # fmt: skip


@pytest.fixture(autouse=True)
def empty_store(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))


def test_a_local_size_that_changes_the_result_is_not_taken(cl_device, monkeypatch):
    queue = cl_device.queue
    x, y = Tensor.from_host(queue, np.arange(64, dtype=np.float32)), Tensor.zeros((64,), queue=queue)
    measured = []
    usual = local_sizes.timing.measure
    monkeypatch.setattr(local_sizes.timing, "measure", lambda run, **options: measured.append(run.args[2]) or usual(run, **options))
    chosen = local_sizes.autotune_local_size(TILED, queue, 64, x, y, budget=10.0)
    assert min(local[0] for local in measured) == 16 and chosen[0] > 8
    assert (y.to_host() == 0).all() and (x.to_host() == np.arange(64)).all()


def test_what_was_measured_is_taken_where_no_size_is_named(cl_device, monkeypatch):
    queue = cl_device.queue
    x, y = (Tensor.zeros((48,), queue=queue) for _ in range(2))
    spec = KernelSpec("kept", src=TILED.src.replace("tiled", "kept"))
    built = spec.build(queue)
    tuning.store.put(cl_device.profile, local_sizes._key(built, (48,)), {"local": [4]})
    assert built._local(queue, (48,), None) == (4,) and built._local(queue, (96,), None) == (96,)
    spec.run(queue, 48, None, x, y)
    assert (y.to_host() == 1).all()
    local_sizes.autotune_local_size(spec, queue, 48, x, y, budget=0.0)
    assert built._local(queue, (48,), None) == (48,)
    (file,) = tuning.store.folder().glob("*.json")
    assert [entry["local"] for entry in json.loads(file.read_text())["entries"].values()] == [[min(256, built.kernel.max_work_group)]]


def test_a_fixed_local_size_cannot_be_tuned(cl_device):
    spec = KernelSpec("fixed", src="__kernel __attribute__((reqd_work_group_size(4, 1, 1))) void fixed(__global float* x) { x[0] = 1.0f; }")
    with pytest.raises(ShapeError, match=r"\[autotune_local_size\] the kernel fixes its local size"):
        local_sizes.autotune_local_size(spec, cl_device.queue, 8, Tensor.zeros((8,), queue=cl_device.queue))
