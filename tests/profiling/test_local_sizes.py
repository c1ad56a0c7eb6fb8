"""Local sizes of hand-written kernels: measured on request or by a tuner, kept, taken; those that change a result are not."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from netcl.core.errors import KernelBuildError, ShapeError
from netcl.core.hooks import hooks
from netcl.core.kernels.primitives import KernelSpec, PrimitiveBuilder, WorkGroupTuner, build_elementwise_kernel
from netcl.core.tensor import Tensor
from netcl.profiling import local_sizes, timing
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
    tuning.store.put(cl_device.profile, local_sizes._kernel_key(built, (48,)), {"local": [4]})
    assert built._local(queue, (48,), None) == (4,) and built._local(queue, (96,), None) == (96,)
    spec.run(queue, 48, None, x, y)
    assert (y.to_host() == 1).all()
    local_sizes.autotune_local_size(spec, queue, 48, x, y, budget=0.0)
    assert built._local(queue, (48,), None) == (48,)
    (file,) = tuning.store.folder().glob("*.json")
    assert [entry["local"] for entry in json.loads(file.read_text())["entries"].values()] == [[min(256, built.kernel.max_work_group)]]


def test_a_fixed_local_size_cannot_be_tuned(cl_device):
    spec = KernelSpec("fixed", src="__kernel __attribute__((reqd_work_group_size(4, 1, 1))) void fixed(__global float* x) { x[0] = 1.0f; }")
    with pytest.raises(ShapeError, match=r"\[autotune_local_size\] the kernel must leave its local size open"):
        local_sizes.autotune_local_size(spec, cl_device.queue, 8, Tensor.zeros((8,), queue=cl_device.queue))


# ---- tuners of a PrimitiveBuilder


NUMBERS = itertools.count()  # kernels are kept with their context: every test has its own


class Trial:
    """Stands in for the clock: the local sizes that were measured, and those of all launches of a kernel."""

    def __init__(self, monkeypatch, fastest):
        self.measured, self.launched = [], []
        monkeypatch.setattr(local_sizes.timing, "measure", self.measure)
        monkeypatch.setattr(local_sizes, "TUNER_BUDGET", float("inf"))
        monkeypatch.setattr(hooks, "launch_observers", [*hooks.launch_observers, self.saw])
        self.fastest = fastest

    def measure(self, run, **options):
        local = run.args[2]
        self.measured.append(local[0])
        run()
        return timing.Timing((0.5 if local[0] == self.fastest else 1.0,))

    def saw(self, kernel, queue, sizes, local, args, event):
        self.launched.append(local[0])


class Sizes(WorkGroupTuner):
    """Tries 16, 4 and 8."""

    def candidates(self, device):
        return 16, 4, 8


def twice_plus(cl_device, name, tuner, dtype="float"):
    spec = PrimitiveBuilder(dtype, tuner).elementwise_spec(f"{name}_{next(NUMBERS)}", 1, "ADD(MUL(v0, 2), 1)")
    return spec.build(cl_device.context)


def test_a_tuner_measures_its_candidates_and_launches_the_fastest(cl_device, monkeypatch):
    trial, queue = Trial(monkeypatch, fastest=4), cl_device.queue
    x, out = Tensor.from_host(queue, np.arange(100, dtype=np.float32)), Tensor.zeros((100,), queue=queue)
    kernel = twice_plus(cl_device, "tuned_first", Sizes())
    kernel(queue, (100,), None, x, out, 100)
    assert trial.measured == [16, 4, 8] and trial.launched == [16, 4, 8, 4]
    np.testing.assert_array_equal(out.to_host(), 2 * np.arange(100) + 1)
    kernel(queue, (100,), None, x, out, 100)
    kernel(queue, (65,), None, x, out, 65)  # the same power of two
    assert trial.measured == [16, 4, 8] and trial.launched[3:] == [4, 4, 4]
    kernel(queue, (64,), None, x, out, 64)
    assert trial.measured == [16, 4, 8] * 2
    kernel(queue, (100,), (8,), x, out, 100)  # a local size that is named wins
    assert trial.launched[-1] == 8


def test_what_a_tuner_chose_is_found_in_the_store(cl_device, monkeypatch):
    trial, queue = Trial(monkeypatch, fastest=8), cl_device.queue
    x = Tensor.zeros((100,), queue=queue)
    kernel = twice_plus(cl_device, "tuned_stored", Sizes())
    kernel(queue, 100, None, x, Tensor.zeros((100,), queue=queue), 100)
    (file,) = tuning.store.folder().glob("*.json")
    assert [entry["local"] for entry in json.loads(file.read_text())["entries"].values()] == [[8]]
    for sizes in ((100,), (128,)):
        del kernel.kernel.program.state[kernel.slot(sizes)]  # as in another process
    kernel(queue, 100, None, x, Tensor.zeros((100,), queue=queue), 100)
    assert trial.measured == [16, 4, 8] and trial.launched == [16, 4, 8, 8, 8]


def test_measuring_does_not_touch_the_output(cl_device, monkeypatch):
    Trial(monkeypatch, fastest=8)
    x = Tensor.from_host(cl_device.queue, np.arange(50))
    kernel = twice_plus(cl_device, "tuned_in_place", Sizes(), x.dtype)
    kernel(cl_device.queue, (50,), None, x.buffer, x.buffer, 50)
    np.testing.assert_array_equal(x.to_host(), 2 * np.arange(50) + 1)


def test_no_candidate_that_is_not_clearly_faster_is_taken(cl_device, monkeypatch):
    trial, x = Trial(monkeypatch, fastest=None), Tensor.zeros((10,), queue=cl_device.queue)
    twice_plus(cl_device, "tuned_alike", Sizes())(cl_device.queue, (10,), None, x, x, 10)
    assert trial.launched == [16, 4, 8, 16]


def test_without_a_tuner_nothing_is_measured(cl_device, monkeypatch):
    trial, x = Trial(monkeypatch, fastest=4), Tensor.zeros((10,), queue=cl_device.queue)
    kernel = twice_plus(cl_device, "untuned", None)
    kernel(cl_device.queue, (10,), None, x, x, 10)
    assert trial.measured == [] and trial.launched == [min(256, kernel.kernel.max_work_group)]


def test_the_default_tuner_measures_what_the_device_allows(cl_device, monkeypatch):
    trial, x = Trial(monkeypatch, fastest=None), Tensor.zeros((10,), queue=cl_device.queue)
    tuner = PrimitiveBuilder().tuner
    _, kernel = build_elementwise_kernel(cl_device.context, f"tuned_default_{next(NUMBERS)}", 1, "v0")
    kernel(cl_device.queue, (10,), None, x, x, 10)
    assert trial.measured == sorted(set(tuner.candidates(cl_device.queue.device)), reverse=True)
    assert trial.measured[0] == tuner.choose_local_size(cl_device.queue.device)
    assert WorkGroupTuner(max_local=64).candidates(cl_device.queue.device)[0] <= 64


def test_a_tuner_is_for_guarded_kernels():
    with pytest.raises(KernelBuildError, match=r"\[KernelSpec\] a tuner requires guarded=True; name=k; measure an unguarded kernel with"):
        KernelSpec("k", src="__kernel void k() {}", tuner=WorkGroupTuner())
