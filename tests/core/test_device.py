"""Which device is chosen, on made-up machines and on this one; handles, selectors, threads."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import netcl
from netcl.core import device as module
from netcl.core import platforms
from netcl.core.capabilities import DeviceProfile
from netcl.core.device import CPUQueue, DeviceHandle, DeviceManager, device, get_active_device, handle_of, manager, set_active_device
from netcl.core.errors import DeviceError, EnvironmentVariableError

GPU, CPU, ACCEL, ANY = 4, 2, 8, 15
NVIDIA = ("NVIDIA CUDA", "NVIDIA Corporation", "NVIDIA H200", GPU, {"max_compute_units": 132, "max_clock_frequency": 1980})
NVIDIA_SMALL = ("NVIDIA CUDA", "NVIDIA Corporation", "NVIDIA T400", GPU, {"max_compute_units": 6, "max_clock_frequency": 1420})
APU = ("AMD Accelerated Parallel Processing", "Advanced Micro Devices, Inc.", "gfx1103", GPU, {"host_unified_memory": 1})
INTEL_CPU = ("Intel(R) OpenCL", "Intel(R) Corporation", "Intel(R) Xeon(R) Processor", CPU, {"max_compute_units": 2})
POCL = ("Portable Computing Language", "GenuineIntel", "cpu-skylake-avx512", CPU, {"max_compute_units": 64})
RUSTICL_CPU = ("rusticl", "Mesa", "some core", CPU, {"max_compute_units": 64})
LLVMPIPE = ("rusticl", "Mesa/X.org", "llvmpipe (LLVM 15.0.6, 128 bits)", CPU, {"max_compute_units": 8})
OCLGRIND = ("Oclgrind", "Oclgrind", "Oclgrind Simulator", ANY, {})
FPGA = ("Acme FPGA", "Acme", "board", ACCEL, {})
BROKEN_GPU = ("Acme", "Acme", "no compiler", GPU, {"compiler_available": 0})


class DriverError(Exception):
    pass


class MadeUpPlatform(SimpleNamespace):
    def get_devices(self):
        if self.error:
            raise DriverError("DEVICE_NOT_FOUND")
        return self.list


class MadeUpQueue(SimpleNamespace):
    def finish(self): ...


class MadeUpDevice(SimpleNamespace):
    __hash__ = object.__hash__


def machine(monkeypatch, *rows, error=False):
    """A DeviceManager that sees the given devices, each on a platform of its own."""
    found = []
    for platform_name, vendor, name, bits, facts in rows:
        platform = MadeUpPlatform(name=platform_name, vendor=vendor, error=error, list=[])
        platform.list.append(
            MadeUpDevice(name=name, vendor=vendor, version="OpenCL 3.0", type=bits, extensions="", platform=platform, **facts)
        )
        found.append(platform)
    cl = SimpleNamespace(
        Error=DriverError,
        Context=lambda devices: SimpleNamespace(devices=devices),
        CommandQueue=lambda context, dev, properties: MadeUpQueue(context=context, device=dev, properties=properties),
        command_queue_properties=SimpleNamespace(PROFILING_ENABLE=2),
    )
    monkeypatch.setattr(platforms, "opencl", lambda: cl)
    monkeypatch.setattr(platforms, "cl_platforms", lambda: found)
    for variable in ("NETCL_DEVICE", "NETCL_PLATFORM_FILTER", "NETCL_VISIBLE_DEVICES", "NETCL_PROFILE_EVENTS"):
        monkeypatch.delenv(variable, raising=False)
    return DeviceManager()


def chosen(made_up, selector="auto", **options):
    handle = made_up.default(selector, **options)
    return handle and handle.device_name


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([POCL, INTEL_CPU], INTEL_CPU),
        ([POCL, NVIDIA, INTEL_CPU], NVIDIA),
        ([APU, NVIDIA_SMALL], NVIDIA_SMALL),
        ([NVIDIA_SMALL, NVIDIA], NVIDIA),
        ([APU, INTEL_CPU], APU),
        ([RUSTICL_CPU, POCL], POCL),
        ([FPGA, RUSTICL_CPU], RUSTICL_CPU),
        ([OCLGRIND, FPGA], FPGA),
        ([OCLGRIND, POCL], POCL),
        ([LLVMPIPE, POCL], POCL),
        ([BROKEN_GPU, POCL], POCL),
    ],
    ids=lambda value: "+".join(row[2] for row in value) if isinstance(value, list) else value[2],
)
def test_auto_takes_the_best(monkeypatch, rows, expected):
    for order in (rows, rows[::-1]):
        assert chosen(machine(monkeypatch, *order)) == expected[2]


@pytest.mark.parametrize("rows", [[], [OCLGRIND], [LLVMPIPE], [OCLGRIND, LLVMPIPE, BROKEN_GPU]])
def test_auto_is_numpy_where_nothing_is_fit_for_work(monkeypatch, rows):
    made_up = machine(monkeypatch, *rows)
    handle = made_up.default("auto")
    assert (handle.backend, handle.context, handle.device, handle.platform) == ("cpu", None, None, None)
    assert made_up.default("cl") is None and made_up.default("cl:cpu") is None and made_up.default("gpu", strict=True) is None


@pytest.mark.parametrize(
    "selector, expected",
    [
        ("cl", NVIDIA), ("cl:cpu", INTEL_CPU), ("cl:gpu", NVIDIA), ("gpu", NVIDIA), ("gpu:0", NVIDIA_SMALL), ("gpu:1", NVIDIA),
        ("cl:gpu:1", NVIDIA), ("cl:cpu:0", POCL), ("0:0", OCLGRIND), ("3:0", INTEL_CPU), ("pocl", POCL),
        ("PORTABLE", POCL), ("t400", NVIDIA_SMALL),
        ("oclgrind", OCLGRIND), ("llvmpipe", LLVMPIPE), ("hopper", NVIDIA), (" GPU ", NVIDIA), (1, POCL), ("1", POCL),
        (lambda p: p.device_type == "cpu", INTEL_CPU), (lambda p: p.is_simulator, OCLGRIND),
        (lambda p: p.max_compute_units < 10, NVIDIA_SMALL),
    ],
)  # fmt: skip
def test_selectors(monkeypatch, selector, expected):
    made_up = machine(monkeypatch, OCLGRIND, POCL, NVIDIA_SMALL, INTEL_CPU, NVIDIA, LLVMPIPE)
    assert chosen(made_up, selector) == expected[2]


@pytest.mark.parametrize("selector", ["gpu:2", "9:0", "0:7", "no such name", 17, -1, lambda p: False, "cl:accel", "cl:gpu:5"])
def test_a_device_that_does_not_exist_is_none(monkeypatch, selector):
    assert machine(monkeypatch, POCL, NVIDIA).default(selector) is None


def test_cpu_is_numpy_even_with_opencl_cpus(monkeypatch):
    assert chosen(machine(monkeypatch, POCL), "cpu") == "NumPy"


def test_gpu_without_a_gpu_warns_once(monkeypatch):
    made_up = machine(monkeypatch, OCLGRIND, POCL)
    with pytest.warns(
        RuntimeWarning, match=r"\[device\] there is no GPU, using another OpenCL device; device=cpu-skylake-avx512; .*strict=True"
    ) as caught:
        assert chosen(made_up, "gpu") == POCL[2]
    assert len(caught) == 1
    assert chosen(made_up, "gpu") == POCL[2]
    assert made_up.default("gpu", strict=True) is None


def test_a_broken_driver_does_not_hide_the_others(monkeypatch):
    made_up = machine(monkeypatch, POCL)
    broken = MadeUpPlatform(name="Clover", vendor="Mesa", error=True, list=[])
    working = platforms.cl_platforms()
    monkeypatch.setattr(platforms, "cl_platforms", lambda: [broken, *working])
    assert [found.index for found in made_up.found()] == ["1:0"]


def test_a_library_that_is_registered_twice_shows_once(monkeypatch):
    made_up = machine(monkeypatch, POCL)
    working = platforms.cl_platforms()
    monkeypatch.setattr(platforms, "cl_platforms", lambda: working * 2)
    assert len(made_up.discover()) == 1


def test_one_handle_per_selector_and_one_context_per_device(monkeypatch):
    made_up = machine(monkeypatch, POCL, NVIDIA)
    assert made_up.default("auto") is made_up.default("auto") is made_up.default("gpu") is made_up.default("1:0")
    assert made_up.default("auto").context is not made_up.default("pocl").context


def test_the_environment_hides_devices(monkeypatch):
    made_up = machine(monkeypatch, OCLGRIND, POCL, NVIDIA)
    monkeypatch.setenv("NETCL_PLATFORM_FILTER", "POCL")
    assert [found.index for found in made_up.found()] == ["1:0"]
    assert DeviceManager().default("1:0").device_name == POCL[2]  # numbers stay those of the driver
    monkeypatch.setenv("NETCL_PLATFORM_FILTER", "")
    monkeypatch.setenv("NETCL_VISIBLE_DEVICES", "0:0, nvidia")
    assert [found.profile.name for found in DeviceManager().found()] == [OCLGRIND[2], NVIDIA[2]]
    monkeypatch.setenv("NETCL_VISIBLE_DEVICES", "none")
    assert DeviceManager().default("auto").backend == "cpu"
    monkeypatch.setenv("NETCL_VISIBLE_DEVICES", "radeon")
    with pytest.raises(
        EnvironmentVariableError,
        match=r"\[env\] NETCL_VISIBLE_DEVICES must name devices that exist; value='radeon'; there are: 0:0 Oclgrind, 1:0",
    ):
        DeviceManager().found()


def test_profiling_queues_on_request(monkeypatch):
    assert machine(monkeypatch, POCL).default("cl").queue.properties == 0
    made_up = machine(monkeypatch, POCL)
    monkeypatch.setenv("NETCL_PROFILE_EVENTS", "1")
    assert made_up.default("cl").queue.properties == 2


def test_the_chosen_device_is_told_once(monkeypatch, caplog):
    made_up = machine(monkeypatch, POCL)
    monkeypatch.setenv("NETCL_DEBUG", "1")
    before = module.log.level
    try:
        with caplog.at_level(logging.INFO, logger="netcl"):
            made_up.default("auto")
            made_up.default("cl")
    finally:
        module.log.setLevel(before)
    assert [record.getMessage() for record in caplog.records] == [f"device: {POCL[2]} (cpu) of {POCL[0]}"]


def test_nonsense_selectors_are_refused(monkeypatch):
    with pytest.raises(DeviceError, match=r"\[device\] the argument must be a device selector; selector=3\.5; use auto, gpu"):
        machine(monkeypatch, POCL).default(3.5)


def test_device_raises_and_lists_what_there_is():
    with pytest.raises(DeviceError, match=r"\[device\] no such device; selector='no such name'; there are: .*cpu NumPy"):
        device("no such name")


def test_a_forked_child_is_refused(monkeypatch):
    made_up = machine(monkeypatch, POCL)
    monkeypatch.setattr(platforms, "forked_child", True)
    with pytest.raises(DeviceError, match=r"\[fork\] OpenCL cannot be used in a forked child .*spawn"):
        made_up.default("cl")
    assert made_up.default("cpu").backend == "cpu"


def test_the_fields_of_a_handle():
    names = [field.name for field in dataclasses.fields(DeviceHandle)]
    assert names == ["platform_name", "device_name", "backend", "device_type", "context", "queue"]
    handle = manager.default("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.queue = None
    context, queue = handle
    assert context is None and isinstance(queue, CPUQueue) and (queue.backend, queue.name, queue.context) == ("cpu", "cpu", None)
    assert queue.finish() is None and queue.flush() is None
    assert CPUQueue("other").name == "other"


def test_a_real_handle(cl_device):
    context, queue = cl_device
    assert (context, queue) == (cl_device.context, cl_device.queue) and queue.context == context
    assert cl_device.device.name.strip() == cl_device.device_name and cl_device.platform.name.strip() == cl_device.platform_name
    assert cl_device.profile.device_type == cl_device.device_type
    assert (cl_device.platform, cl_device.device) in manager.discover() and cl_device.device in manager.devices
    out_of_order = platforms.opencl().command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    assert not queue.properties & out_of_order


def test_handles_of_queues(cl_device):
    cl = platforms.opencl()
    assert handle_of(cl_device.queue) is cl_device
    assert manager.default(cl_device.device) is cl_device and manager.default(cl_device.queue) is cl_device
    foreign = cl.CommandQueue(cl_device.context)
    handle = handle_of(foreign)
    assert handle.queue == foreign and handle.context == cl_device.context and handle_of(foreign) is handle
    assert handle is not cl_device and handle.device_name == cl_device.device_name
    own = CPUQueue("mine")
    assert handle_of(own).queue is own and handle_of(manager.default("cpu").queue) is manager.default("cpu")


def test_blocks_nest_and_give_the_previous_device_back(device):
    outer = get_active_device()
    assert outer is device
    numpy_device = module.device("cpu")
    with numpy_device as first:
        assert get_active_device() is first is manager.default("cpu")
        with module.device(device) as second, numpy_device:
            assert second is device and get_active_device() is first
        with pytest.raises(KeyError), module.device(device):
            raise KeyError
        assert get_active_device() is first
    assert get_active_device() is outer


def test_the_active_device_belongs_to_the_thread(monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "auto")
    seen = []
    with device("cpu"):
        worker = threading.Thread(target=lambda: seen.append(get_active_device()))
        worker.start()
        worker.join()
        assert get_active_device() is manager.default("cpu")
    assert seen == [manager.default("auto")]


def test_setting_the_active_device(monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "auto")
    set_active_device(manager.default("cpu"))
    try:
        assert get_active_device() is manager.default("cpu")
    finally:
        set_active_device(None)
    assert get_active_device() is manager.default("auto")
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    assert get_active_device() is manager.default("cpu")
    monkeypatch.setenv("NETCL_DEVICE", "no such name")
    with pytest.raises(DeviceError, match=r"\[NETCL_DEVICE\] no such device; selector='no such name'; there are: "):
        get_active_device()


def test_netcl_device_says_what_auto_means(monkeypatch):
    made_up = machine(monkeypatch, OCLGRIND, POCL, NVIDIA)
    for selector, expected in (("oclgrind", OCLGRIND), ("cl:cpu", POCL), ("auto", NVIDIA), ("", NVIDIA)):
        monkeypatch.setenv("NETCL_DEVICE", selector)
        assert chosen(made_up) == expected[2]
        assert chosen(made_up, "gpu") == NVIDIA[2]
    monkeypatch.setenv("NETCL_DEVICE", "radeon")
    with pytest.raises(DeviceError, match=r"\[NETCL_DEVICE\] no such device; selector='radeon'; there are: 0:0 Oclgrind"):
        made_up.default("auto")
    assert chosen(made_up, "pocl") == POCL[2]


def test_netcl_device_is_one_class(device):
    assert netcl.device is module.device and netcl.device.manager is manager
    assert netcl.device.profile(device.queue) is device.profile


def test_threads_get_the_same_handle():
    fresh, seen = DeviceManager(), []
    workers = [threading.Thread(target=lambda: seen.append(fresh.default("auto"))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(seen) == 8 and len({id(handle) for handle in seen}) == 1


def test_half_probe_compares_numbers(monkeypatch):
    """A driver that builds the kernel and computes nonsense does not have half arithmetic."""
    from netcl.core.kernels import program

    def buffers(queue):
        return lambda nbytes: np.zeros(nbytes // 4, np.float32)

    def probe(wrong):
        def launch(queue, global_size, local_size, x, out, n):
            a, b = x[0::2].astype(np.float16), x[1::2].astype(np.float16)
            out.reshape(n, 3)[:] = np.stack([a + b, a * b, a / b], axis=1) + wrong

        monkeypatch.setattr(program, "get", lambda queue, source, name: launch)
        made_up = machine(monkeypatch, NVIDIA)
        cl = platforms.opencl()
        cl.tools = SimpleNamespace(ImmediateAllocator=buffers)
        cl.enqueue_copy = lambda queue, target, source: target.reshape(-1).__setitem__(slice(None), source.reshape(-1))
        dev = made_up.devices[0]
        return made_up.half_arithmetic(made_up.profile(dev))

    assert probe(0) is True
    assert probe(np.float32(0.1)) is False


def test_oclgrind_is_never_chosen_by_itself(tmp_path, opencl_found):
    """With the real simulator registered, "auto" is something else."""
    library = next((r.path for r in platforms.runtimes() if "oclgrind" in r.library.lower() and r.path and not r.error), None)
    if library is None:
        pytest.skip("Oclgrind is not installed")
    (tmp_path / "oclgrind.icd").write_text(library)
    code = "from netcl.core.device import manager as m; print(m.default('auto').device_name); print(m.default('oclgrind').device_name)"
    env = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    automatic, named = done.stdout.splitlines()
    assert automatic != "Oclgrind Simulator" and named == "Oclgrind Simulator"
    if opencl_found:
        names = [found.profile.name for found in manager.found()]
        assert "Oclgrind Simulator" in names and manager.default("auto").device_name != "Oclgrind Simulator"


def test_a_profile_is_enough_to_score():
    plain = DeviceProfile("g", "v", "p", "1", "1", "gpu", max_compute_units=2, max_clock_mhz=100)
    assert module.score(plain) == (60, 200.0)
    assert module.score(dataclasses.replace(plain, available=False))[0] < 0


@pytest.mark.parametrize("given", [False, True])
def test_synchronize_computes_what_is_deferred(cl_device, given):
    from netcl.engine import lazy_graph

    x = netcl.Tensor.from_host(cl_device.queue, np.ones(8, np.float32))
    with lazy_graph.fusing():
        y = x + 1
    cl_device.queue.finish()
    assert lazy_graph.waiting_node(y) is not None
    netcl.synchronize(*[cl_device] * given)
    assert lazy_graph.waiting_node(y) is None and y.to_host().tolist() == [2.0] * 8


def test_synchronize_waits_for_the_given_device():
    waited = []
    queue = MadeUpQueue(finish=lambda: waited.append(1))
    netcl.synchronize(queue)
    assert waited == [1]
    netcl.synchronize("cpu")
    with pytest.raises(DeviceError, match="no such device"):
        netcl.synchronize("no such name")
