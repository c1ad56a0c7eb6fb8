"""Programs of a first run: compiled by builder processes while calls wait, with the results of a run that compiles them one by one."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from itertools import count

import numpy as np
import pytest

from netcl.core import env, memory, waiting_runs
from netcl.core.backend.opencl import backend_of
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError
from netcl.core.hooks import hooks
from netcl.core.kernels import builders, program
from netcl.core.tensor import Tensor, duplicate
from netcl.core.waiting_runs import BUILDER_THREAD, waiting
from netcl.engine.plan import planned
from netcl.ops.index import check_indices
from netcl.ops.matmul import nvidia
from netcl.replay.compiled import capture_graph
from netcl.runtime.cache import program_cache
from netcl.runtime.scheduler import Stream

NUMBERS = count()


@pytest.fixture
def device(cl_device, tmp_path, monkeypatch):
    """The device, with two builders and an empty cache of programs."""
    state = program.state(cl_device.queue)
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NETCL_BUILD_PROCESSES", "2")
    monkeypatch.setattr(hooks, "binary_store", program_cache)
    before = state.pop("builders", None)
    yield cl_device
    waiting_runs.drop()
    pool, state["builders"] = state.pop("builders", None), before
    if pool is not None:
        pool.close()
        builders._all_pools.remove(pool)


def op(formula: str, in_place: bool = False, filled: bool = False):
    """Return an op with a new program: a formula of ``x``, the element of its first operand; the result is ``filled`` with zeros before."""
    name = f"f{os.getpid()}_{next(NUMBERS)}"
    source = f"""__kernel void {name}(__global {"" if in_place else "const "}float* a, __global float* y, const int n) {{
        const int i = get_global_id(0); if (i < n) {{ const float x = a[i]; {"a" if in_place else "y"}[i] = {formula}; }} }}"""

    def function(x):
        y = (Tensor.zeros if filled else Tensor.empty)(x.shape, queue=x.queue)
        program.get_later(x.queue, source, name)(x.queue, x.size, None, x, y, x.size)
        return x if in_place else y

    return planned(name, function)


def array(device, *values: float) -> Tensor:
    return Tensor.from_host(device.queue, np.array(values, np.float32))


def test_calls_wait_until_a_value_is_read(device):
    x, before = array(device, 1, 2, 3), program.build_count()
    y = op("x * 2")(op("x + 1")(x))
    assert len(waiting) == 2 and program.build_count() == before
    assert y.tolist() == [4, 6, 8]
    assert not waiting and program.build_count() == before + 2
    assert "finish" not in vars(device.queue)


@pytest.mark.parametrize("wait", ["finish", "flush"])
def test_methods_of_the_queue_flush(device, wait):
    y = op("x * 2")(array(device, 1))
    getattr(device.queue, wait)()
    assert not waiting and y.tolist() == [2]


def test_the_second_call_of_a_plan_is_as_fast_as_ever(device):
    double = op("x * 2")
    assert double(array(device, 1)).tolist() == [2]
    y = double(array(device, 3))
    assert not waiting and y.tolist() == [6]


def test_commands_keep_their_order(device):
    """Uploads, fills, copies and writes in place, before and after the calls that wait for a program."""
    x = array(device, 1, 2, 3)
    y = op("x * 2")(x)
    copied = y.clone()
    op("x + 10", in_place=True)(y)
    zeros = Tensor.zeros(3, queue=device.queue)
    z = op("x - 1")(zeros)
    x.fill_(7)
    assert len(waiting) == 6
    w = op("x * 3")(x)
    zeros.from_host(np.array([4, 5, 6], np.float32))  # an upload enqueues what waits
    assert not waiting
    assert copied.tolist() == [2, 4, 6] and y.tolist() == [12, 14, 16]
    assert z.tolist() == [-1, -1, -1] and w.tolist() == [21, 21, 21] and zeros.tolist() == [4, 5, 6]


def test_memory_that_was_released_is_reused_in_order(device):
    double, n = op("x * 2"), 1000
    x = Tensor.from_host(device.queue, np.arange(n, dtype=np.float32))
    first = double(x)
    second = op("x + 1")(first)
    del first  # its memory goes to the next result
    third = op("x - 1")(second)
    del x
    fourth = double(third)
    assert waiting and np.array_equal(fourth.to_host(), (np.arange(n) * 2) * 2)
    assert np.array_equal(second.to_host(), np.arange(n) * 2 + 1)


def test_two_queues(device):
    stream, x = Stream(device), array(device, 1, 2)
    y = op("x * 2")(x)
    other = op("x + 5")(Tensor.from_host(stream.queue, np.array([1, 1], np.float32)))
    assert [run.queue for run in waiting] == [device.queue, stream.queue]
    assert other.tolist() == [6, 6] and len(waiting) == 1  # queues wait for their own programs only
    borrowed = stream.use(y)
    assert not waiting
    z = op("x * 10")(borrowed)
    del borrowed, y  # the memory is used until the run is enqueued
    overwritten = Tensor.from_host(device.queue, np.array([7, 7], np.float32))
    assert waiting and z.tolist() == [20, 40] and overwritten.tolist() == [7, 7]


def test_a_run_over_an_array_of_the_caller_does_not_wait(device):
    shared = np.arange(1024, dtype=np.float32)
    x = Tensor.from_host(device.queue, shared, share=True)
    first = op("x * 2")(array(device, 1))
    y = x * 3
    x += 1
    there = backend_of(device.queue).integrated  # elsewhere, x is a copy
    assert not (waiting and there)
    del x  # its array is released when the commands that use it have finished
    assert np.array_equal(shared, np.arange(1024) + there) and np.array_equal(y.to_host(), np.arange(1024) * 3) and first.tolist() == [2]


def test_a_destructor_in_the_thread_of_a_builder_does_not_wait(device):
    """Garbage collection may call it there, and the runs wait for that thread."""
    stream = Stream(device)
    held = [Tensor.from_host(device.queue, np.ones(1024, np.float32), share=True), stream.use(array(device, 1, 2))]
    y, z = op("x * 2")(array(device, 1)), op("x * 10")(held[1])
    thread = threading.Thread(target=held.clear, name=BUILDER_THREAD)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and len(waiting) == 2 and y.tolist() == [2] and z.tolist() == [10, 20]


def test_memory_of_another_queue_is_used_until_all_runs_are_enqueued(device):
    """The last command on borrowed memory is a copy, which holds no lease; the run before it does."""
    stream, ended = Stream(device), []
    borrowed = stream.use(array(device, 1, 2))
    z, copied = op("x * 10")(borrowed), duplicate(borrowed)
    weakref.finalize(borrowed.lease, lambda: ended.append(len(waiting)))
    del borrowed
    assert len(waiting) == 2 and copied.tolist() == [1, 2] and z.tolist() == [10, 20] and ended == [0]


def test_runs_of_before_are_not_recorded(device):
    """A recording without inputs begins while a run with a fill waits: replays must not repeat that fill."""
    x = array(device, 5, 5)
    total = op("y[i] + x", filled=True)(array(device, 1, 2))
    assert len(waiting) == 1
    add = op("x + 1", in_place=True)
    with capture_graph() as graph:
        graph.returns(add(total))
    assert [node.kind for node in graph.nodes] == ["launch"]
    graph.replay()
    assert total.tolist() == [3, 4] and x.tolist() == [5, 5]


def test_a_flush_while_an_op_is_planned(device):
    """The check of a kernel, inside planning, enqueues a waiting run with a fill, which planning itself does not allow."""
    y, key = op("y[i] + x", filled=True)(array(device, 1, 2)), f"check {next(NUMBERS)}"

    def function(x):
        assert nvidia.verdict(x.queue, "test", key, "float32", lambda queue: True, apart=False)
        return x.clone()

    z = planned(key, function)(array(device, 3))
    assert not [run for run in waiting if run.prepare is not None]
    assert z.tolist() == [3] and y.tolist() == [1, 2]


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_another_thread_appends_a_run_between_the_commands_of_a_plan(device, monkeypatch):
    accumulate, later = op("y[i] + x", filled=True), []
    x = array(device, 1, 2)
    assert accumulate(x).tolist() == [1, 2]
    backend, new, other = backend_of(device.queue), op("x * 2"), array(device, 4)
    fill = backend.fill

    def interleaved(*args):
        monkeypatch.setattr(backend, "fill", fill)
        in_thread(lambda: later.append(new(other)))
        fill(*args)

    monkeypatch.setattr(backend, "fill", interleaved)
    y = accumulate(x)
    assert waiting and y.tolist() == [1, 2] and later[0].tolist() == [8]


def test_another_thread_builds_the_program_of_a_plan_in_the_making(device):
    """The sizes of a launch are rounded up when its program is built: after it was written down, before the plan is complete."""
    name = f"f{os.getpid()}_{next(NUMBERS)}"
    source = f"""__kernel void {name}(__global const float* a, __global float* y, const int n) {{
        const int i = get_global_id(0); if (i < n) y[i] = 2 * a[i]; }}"""

    def function(x):
        y, kernel = Tensor.empty(x.shape, queue=x.queue), program.get_later(x.queue, source, name)
        kernel(x.queue, x.size, 64, x, y, x.size)
        in_thread(kernel.program.built)
        return y

    double, x = planned(name, function), array(device, *range(102))
    assert [double(x).tolist() for _ in range(2)] == [list(range(0, 204, 2))] * 2


def test_another_thread_releases_memory_of_its_waiting_run(device, monkeypatch):
    """The memory goes to a call that was about to be enqueued at once."""
    double, new, x, other = op("x * 2"), op("x + 7"), array(device, 1, 2), array(device, 4, 4)
    assert double(x).tolist() == [2, 4]
    lease = memory.Shelf.lease

    def interleaved(*args):
        monkeypatch.setattr(memory.Shelf, "lease", lease)
        in_thread(lambda: new(other))  # the result is released
        return lease(*args)

    monkeypatch.setattr(memory.Shelf, "lease", interleaved)
    assert double(x).tolist() == [2, 4]


def test_another_thread_removes_a_run_of_another_context(device):
    """The list changes while it is searched for the runs of a queue."""

    class Vanishing:
        @property
        def queue(self):
            if self in waiting:
                waiting.remove(self)

    double, x = op("x * 2"), array(device, 1, 2)
    assert double(x).tolist() == [2, 4]
    y = op("x + 1")(x)
    waiting.insert(0, Vanishing())
    z = double(y)  # behind the run that computes y
    assert z.tolist() == [4, 6]
    y = op("x + 1")(x)
    waiting.insert(0, Vanishing())
    assert y.tolist() == [2, 3]


def test_an_interrupt_after_a_run_was_enqueued_does_not_enqueue_it_again(device, monkeypatch):
    class Interrupting(list):
        def remove(self, run):
            raise KeyboardInterrupt

    x = array(device, 1, 2)
    op("x + 1", in_place=True)(x)
    with monkeypatch.context() as patch:
        patch.setattr(waiting_runs, "waiting", Interrupting(waiting))
        with pytest.raises(KeyboardInterrupt):
            waiting_runs.flush_waiting(device.queue)
    with pytest.raises(DeviceError, match="Ctrl-C"):
        x.tolist()
    waiting.clear()


def test_an_index_out_of_range_is_raised_after_a_build_error(device):
    table = array(device, 1, 2, 3)
    rows = table[Tensor.from_host(device.queue, np.array([0, 9]))]
    bad = op("undeclared")(table)
    with pytest.raises(KernelBuildError):
        check_indices(device.queue)
    with pytest.raises(IndexError):
        rows.tolist()
    with pytest.raises(KernelBuildError):
        bad.tolist()


def test_a_kernel_with_tensors_of_two_queues(device):
    stream = Stream(device)
    y = op("x * 2")(array(device, 1, 2))
    total = Tensor.empty((2,), queue=stream.queue)
    source = "__kernel void both(__global const float* a, __global float* y) { y[get_global_id(0)] = a[get_global_id(0)] + 1; }"
    program.get(stream.queue, source, "both")(stream.queue, 2, None, y, total)
    assert total.tolist() == [3, 5]


def test_an_error_in_the_source_is_raised_where_the_value_is_read(device):
    """It is raised at every read of what depends on it; other tensors, of calls before and after, keep their values."""
    x, changed = array(device, 1, 2), array(device, 5)
    good, bad = op("x * 2")(x), op("undeclared + x")(x)
    after, independent = op("x + 1")(bad), op("x * 3")(good)
    assert len(waiting) == 4
    for _ in range(2):
        with pytest.raises(KernelBuildError, match="undeclared"):
            bad.tolist()
        with pytest.raises(KernelBuildError, match="undeclared"):
            after.tolist()
    with pytest.raises(KernelBuildError, match="undeclared"):
        op("x * 2")(after)
    assert good.tolist() == [2, 4] and independent.tolist() == [6, 12] and changed.tolist() == [5]


def test_a_write_in_place_that_does_not_build_spoils_its_tensor(device):
    x, y = array(device, 1, 2), array(device, 3)
    alias = x.reshape(2, 1)
    op("undeclared", in_place=True)(x)
    with pytest.raises(KernelBuildError):
        y.from_host(np.array([4], np.float32))
    for spoiled in (x, alias):
        with pytest.raises(KernelBuildError):
            spoiled.tolist()
    assert y.from_host(np.array([4], np.float32)).tolist() == [4]


def test_nothing_waits_while_launches_are_observed(device):
    y, seen = op("x * 2")(array(device, 1)), []
    hooks.launch_observers.append(lambda kernel, *_: seen.append(kernel.name))
    try:
        z = op("x * 3")(y)
        assert not waiting
    finally:
        hooks.launch_observers.pop()
    assert len(seen) == 1 and z.tolist() == [6]


def test_a_check_of_kernels_does_not_wait_for_earlier_programs_nor_fail_for_them(device):
    bad, key = op("undeclared")(array(device, 1)), f"check {next(NUMBERS)}"
    assert nvidia.verdict(device.queue, "test", key, "float32", lambda queue: op("x * 2")(Tensor.from_host(queue, [3.0])).tolist() == [6])
    assert len(waiting) == 1
    with pytest.raises(KernelBuildError):
        nvidia.verdict(device.queue, "test", key + " here", "float32", lambda queue: True, apart=False)
    assert nvidia.verdict(device.queue, "test", key + " here", "float32", lambda queue: True, apart=False)
    with pytest.raises(KernelBuildError):
        bad.tolist()
    with pytest.warns(match="cannot be used"):
        assert not nvidia.verdict(
            device.queue, "test", key + " wrong", "float32", lambda queue: op("undeclared")(Tensor.from_host(queue, [3.0])).tolist()
        )


def test_an_error_of_memory_is_not_replaced_by_that_of_a_failed_tensor(device, monkeypatch):
    bad = op("undeclared")(array(device, 1))
    with pytest.raises(KernelBuildError):
        bad.tolist()
    pool = memory.get_persistent_pool(device.queue)
    monkeypatch.setattr(pool, "limit", 1 << 20)
    with pytest.raises(OutOfMemoryError, match="one allocation cannot be larger"):
        Tensor.empty((1 << 20,), queue=device.queue)
    with pytest.raises(KernelBuildError):
        bad.tolist()


def test_a_single_program_starts_no_builder(device):
    y = op("x * 2")(array(device, 1))
    assert waiting and program.state(device.queue)["builders"].threads == 0 and y.tolist() == [2]


def test_this_process_builds_what_a_killed_builder_leaves(device):
    x = array(device, 1, 2)
    y = x
    for _ in range(6):
        y = op("x + 1")(y)
    pool, deadline = program.state(device.queue)["builders"], time.monotonic() + 60
    while not pool.processes and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in list(pool.processes):
        process.kill()
    assert y.tolist() == [7, 8]


def test_a_local_size_is_limited_by_the_built_kernel(device):
    """A required size replaces that of the call, as it does for a kernel that is built."""
    name = f"f{os.getpid()}_{next(NUMBERS)}"
    source = f"""__kernel __attribute__((reqd_work_group_size(4, 1, 1))) void {name}(__global const float* a, __global float* y) {{
        y[get_global_id(0)] = a[get_global_id(0)] + get_local_size(0); }}"""

    def function(x):
        y = Tensor.empty(x.shape, queue=x.queue)
        program.get_later(x.queue, source, name)(x.queue, x.size, 2, x, y)
        return y

    y = planned(name, function)(array(device, *range(8)))
    assert waiting and y.tolist() == [i + 4 for i in range(8)]


def test_the_line_about_compiling_names_programs_of_builders(device):
    pool = builders.pool_of(program.state(device.queue))
    pool.current.append(builders.BuildJob(pool, (7, "gemm"), {"forms": [["", []]], "marked": False}, None))
    assert program.compiling() == (7, "gemm")
    pool.current.clear()


def test_no_builders_without_a_cache_folder_or_if_turned_off(device, monkeypatch):
    monkeypatch.setattr(env, "cache_dir", lambda: None)
    y = op("x * 2")(array(device, 1))
    assert not waiting and y.tolist() == [2]
    monkeypatch.undo()
    monkeypatch.setenv("NETCL_BUILD_PROCESSES", "0")
    y = op("x * 2")(array(device, 1))
    assert not waiting and y.tolist() == [2]


# ---- processes

STEP = """
import numpy as np, netcl as nc
from netcl import nn, optim
from netcl.core.kernels import program
from netcl.core.waiting_runs import BUILDER_THREAD, waiting
nc.manual_seed(0)
model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rng = np.random.default_rng(0)
x, y = nc.tensor(rng.standard_normal((2, 2, 4, 4)).astype(np.float32)), nc.tensor(rng.integers(0, 3, 2))
most = 0
def step(x, y):
    global most
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    most = max(most, len(waiting))
    optimizer.step()
    return loss
losses = [step(x, y).item() for _ in range(2)]
compiled = nc.compile(step)
losses += [compiled(x, y).item() for _ in range(3)]
print(losses, [p.numpy().tobytes().hex() for p in model.parameters()], program.build_count())
assert (most > 3) == EXPECTED
"""


def script(text: str, folder, processes: str, **options) -> subprocess.Popen[str]:
    changes = {"NETCL_CACHE_DIR": str(folder), "NETCL_BUILD_PROCESSES": processes, "NETCL_PROGRESS": "off", "NETCL_FUSION": "0"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=pipe, stderr=pipe, text=True,
                            env={**os.environ, "NETCL_DEVICE": "cl:cpu", **changes}, **options)  # fmt: skip


@pytest.mark.usefixtures("cl_device")
def test_a_first_training_step_computes_what_it_computes_without_builders(tmp_path):
    outputs = []
    for processes in ("0", "2"):
        process = script(STEP.replace("EXPECTED", str(processes == "2")), tmp_path / processes, processes)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and err == "", err
        outputs.append(out)
    assert outputs[0] == outputs[1]


LEAVE = """
import os, signal, sys, time
import numpy as np, netcl as nc
from netcl.core.kernels import builders
from netcl.core.waiting_runs import BUILDER_THREAD, waiting
x = nc.tensor(np.ones(5, np.float32))
y = ((x * 2).exp() + 1).sum()
deadline = time.monotonic() + 60
while not builders._all_pools[0].processes and time.monotonic() < deadline:
    time.sleep(0.01)
assert waiting
print(*[process.pid for process in builders._all_pools[0].processes], flush=True)
HOW
"""


@pytest.mark.parametrize("how", ["", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGINT)", "os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.usefixtures("cl_device")
def test_a_process_that_ends_leaves_no_builder(how, tmp_path):
    process = script(LEAVE.replace("HOW", how), tmp_path, "2")
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, 3, -signal.SIGINT, -signal.SIGKILL, 130)
    assert err == "" or "KeyboardInterrupt" in err
    pids, deadline = [int(pid) for pid in out.split()], time.monotonic() + 20
    assert pids
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


STUCK = """
import os, signal, sys, threading, time
import numpy as np, netcl as nc
from netcl.core.kernels import builders, program
x = nc.tensor(np.ones(5, np.float32))
pool = builders.pool_of(program.state(x.queue))
pool.command = [sys.executable, "-c", "import os, time; os.write(1, b'0' + bytes([10])); time.sleep(100)"]
y = ((x * 2).exp() + 1).sum()
deadline = time.monotonic() + 60
while not pool.current and time.monotonic() < deadline:
    time.sleep(0.01)
print(*[process.pid for process in pool.processes], flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
y.tolist()
"""


@pytest.mark.usefixtures("cl_device")
def test_ctrl_c_ends_a_process_that_waits_for_a_builder(tmp_path):
    process, start = script(STUCK, tmp_path, "2"), time.monotonic()
    out, err = process.communicate(timeout=90)
    assert process.returncode in (-signal.SIGINT, 130) and "KeyboardInterrupt" in err and time.monotonic() - start < 80
    assert out.split() and not [pid for pid in out.split() if os.path.exists(f"/proc/{pid}")]
