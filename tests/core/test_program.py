"""The one door: building, launching, what a failure says, and what a launch costs in objects."""

import threading

import numpy as np
import pytest

from netcl.core import platforms
from netcl.core.device import CPUQueue
from netcl.core.errors import DeviceError, KernelBuildError, ShapeError
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.kernels.primitives import KernelSpec
from netcl.core.kernels.signature import POINTER, UNKNOWN, parameter_kinds
from netcl.core.tensor import Tensor

AXPY = """
// y += a * x; the comment mentions __kernel void axpy(int wrong)
__kernel void axpy(__global const float* x, __global float* restrict y, const float a, int n) {
  const int i = get_global_id(0);
  if (i < n) y[i] += a * x[i];
}
"""


def test_signatures_are_read_from_the_text():
    assert parameter_kinds(AXPY, "axpy") == ((POINTER, POINTER, np.float32, np.int32), (True, False, True, True))
    text = "kernel void f(unsigned int a, uchar b, float4 c, REAL d) {}"
    assert parameter_kinds(text, "f") == ((np.uint32, np.uint8, UNKNOWN, UNKNOWN), (True,) * 4)
    assert parameter_kinds("__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void f(void) {}", "f") == ((), ())
    assert parameter_kinds("KERNEL(f)", "f") is None
    assert parameter_kinds("kernel void f(global const T* restrict a, MORE __global const T* b, MORE int c) {}", "f") == (
        (POINTER, UNKNOWN, UNKNOWN), (True,) * 3
    )  # fmt: skip
    assert parameter_kinds("__kernel void f(int a,\n#ifdef B\nint b,\n#endif\nint c) {}", "f") is None


PTX = b""".version 8.8
.target sm_90, texmode_independent
// target sm_90
	// begin inline asm
	//@sm_90a wgmma.fence.sync.aligned;
	//@sm_90a wgmma.wait_group.sync.aligned 0;
	// end inline asm
\0"""


def test_marked_lines_of_a_drivers_text_come_into_force():
    text = program.unmarked(PTX).decode()
    assert "//@" not in text and not text.endswith("\0")
    assert text.splitlines()[1:3] == [".target sm_90a, texmode_independent", "// target sm_90"]
    assert text.splitlines()[4:6] == ["\twgmma.fence.sync.aligned;", "\twgmma.wait_group.sync.aligned 0;"]


@pytest.mark.parametrize("text", [b"\x7fELF //@sm_90a x", b".target sm_90\n", PTX + b"//@sm_100a x\n"], ids=["binary", "unmarked", "mixed"])
def test_a_text_that_is_not_marked_for_one_processor_is_refused(text):
    with pytest.raises(KernelBuildError, match=r"\[build\] the driver's binary must be PTX"):
        program.unmarked(text)


def test_a_marked_source_does_not_build_where_the_driver_gives_no_such_text(cl_device):
    if cl_device.profile.compute_capability:
        pytest.skip("this driver gives such a text")
    with pytest.raises(KernelBuildError, match="must be PTX"):
        program.get(cl_device.queue, AXPY + "//@sm_90a nothing\n", "axpy")


@pytest.mark.parametrize("n", [1, 3, 255, 257, 1000])
def test_launch_rounds_up_and_takes_plain_numbers(cl_device, n):
    q = cl_device.queue
    x, y = (Tensor.from_host(q, np.full(n, v, np.float32)) for v in (1, 2))
    event = program.get(q, AXPY, "axpy")(q, n, 64, x, y, 3, n)
    event.wait()
    assert y.tolist() == [5.0] * n


def test_untyped_parameters_take_plain_numbers_too(cl_device):
    q = cl_device.queue
    source = "#define KERNEL(name) __kernel void name\nKERNEL(put)(__global float* x, int i, float v) { x[i] = v; }"
    x = Tensor.zeros((4,), queue=q)
    program.get(q, source, "put")(q, 1, None, x, 2, 7.5)
    assert x.tolist() == [0, 0, 7.5, 0]


def test_nothing_is_built_twice(cl_device):
    q = cl_device.queue
    first = program.get(q, AXPY, "axpy")
    before = program.build_count()
    assert program.get(q, AXPY, "axpy") is first
    assert program.build_count() == before


def test_an_empty_launch_is_no_launch(cl_device):
    q = cl_device.queue
    x = Tensor.zeros((0,), queue=q)
    assert program.get(q, AXPY, "axpy")(q, 0, 64, x, x, 1.0, 0) is None


def test_required_work_group_sizes_win(cl_device):
    q = cl_device.queue
    source = (
        "__kernel __attribute__((reqd_work_group_size(4, 1, 1))) void four(__global int* x) { x[get_global_id(0)] = get_local_size(0); }"
    )
    x = Tensor.zeros((8,), "int32", queue=q)
    kernel = program.get(q, source, "four")
    assert kernel.required_local == (4, 1, 1)
    kernel(q, 5, 64, x)
    assert x.tolist() == [4] * 8


def test_local_sizes_are_clamped(cl_device):
    kernel = program.get(cl_device.queue, AXPY, "axpy")
    assert np.prod(kernel.clamp((1 << 20,))) <= kernel.max_work_group
    assert np.prod(kernel.clamp((1 << 10, 1 << 10))) <= kernel.max_work_group


def test_argument_count(cl_device):
    q = cl_device.queue
    with pytest.raises(ShapeError, match=r"\[axpy\] the kernel expected 4 arguments, got 1"):
        program.get(q, AXPY, "axpy")(q, 1, None, 1.0)


def test_a_missing_kernel_is_named(cl_device):
    with pytest.raises(KernelBuildError, match=r"\[kernel\] the program has no kernel nope; has=axpy"):
        program.get(cl_device.queue, AXPY, "nope")


def test_a_tensor_of_another_context_is_refused(cl_device):
    cl = program.platforms.opencl()
    device = cl_device.context.devices[0]
    context = cl.Context([device])  # kept: a queue of Intel's runtime does not keep it
    other = cl.CommandQueue(context)
    x = Tensor.zeros((4,), queue=other)
    y = Tensor.zeros((4,), queue=cl_device.queue)
    with pytest.raises(DeviceError, match=r"\[axpy\] all tensors must be in the OpenCL context of the queue; .*move it with"):
        program.get(cl_device.queue, AXPY, "axpy")(cl_device.queue, 4, None, x, y, 1.0, 4)


def test_a_second_queue_of_the_same_context_works(cl_device):
    cl = program.platforms.opencl()
    second = cl.CommandQueue(cl_device.context)
    x, y = (Tensor.from_host(cl_device.queue, np.ones(4, np.float32)) for _ in range(2))
    cl_device.queue.finish()
    program.get(second, AXPY, "axpy")(second, 4, None, x, y, 1.0, 4)
    second.finish()
    assert y.tolist() == [2.0] * 4
    assert program.state(second) is program.state(cl_device.queue)


def test_a_build_failure_can_be_acted_on(cl_device, tmp_path, monkeypatch):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    source = "\n".join(["// line one", "__kernel void bad(__global float* x) {", "  x[0] = undefined_name;", "}", ""])
    with pytest.raises(KernelBuildError) as caught:
        program.build(cl_device.context, source, ("-D SIZE=4",))
    text = str(caught.value)
    assert text.startswith("[build] the driver cannot compile the kernel source; kernel=bad, device=")
    assert cl_device.context.devices[0].name in text
    assert "options=-D SIZE=4" in text
    assert "undefined_name" in text
    assert ">    3 |   x[0] = undefined_name;" in text
    saved = text.split("source saved as ")[1].strip()
    with open(saved) as file:
        assert file.read() == source


def test_kernels_are_not_shared_between_threads(cl_device):
    q = cl_device.queue
    kernel = program.get(q, AXPY, "axpy")
    n, rounds = 1000, 50
    results: dict[int, np.ndarray] = {}
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            cl = program.platforms.opencl()
            own = cl.CommandQueue(cl_device.context)
            x, y = Tensor.from_host(own, np.full(n, k, np.float32)), Tensor.zeros((n,), queue=own)
            for _ in range(rounds):
                kernel(own, n, 64, x, y, 1.0, n)
            results[k] = y.to_host()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for k in range(1, 5):
        np.testing.assert_array_equal(results[k], np.full(n, k * rounds, np.float32))


def test_observers_see_every_launch(cl_device):
    q, seen = cl_device.queue, []

    def observer(kernel, queue, sizes, local, args, event):
        seen.append((kernel.name, sizes, local, len(args)))

    hooks.launch_observers.append(observer)
    try:
        x = Tensor.zeros((100,), queue=q)
        program.get(q, AXPY, "axpy")(q, 100, 32, x, x, 0.0, 100)
    finally:
        hooks.launch_observers.remove(observer)
    assert seen == [("axpy", (128,), (32,), 4)]


def test_builds_are_told_when_asked(cl_device, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("NETCL_DEBUG", "4")
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    program.build(cl_device.context, AXPY + "// told\n")
    assert "[build] axpy in" in caplog.text
    assert "// told" in caplog.text


def test_the_numpy_backend_has_no_kernels():
    with pytest.raises(DeviceError, match=r"\[axpy\] a kernel requires an OpenCL device"):
        KernelSpec("axpy", src=AXPY).build(CPUQueue())


@pytest.fixture(params=[False, True], ids=["pyopencl", "eventless"])
def launching(request, cl_device, monkeypatch):
    """Both ways to the driver, on whatever device; the kind of device decides otherwise."""
    function = platforms.loader_function("clEnqueueNDRangeKernel") if request.param else None
    if request.param and function is None:
        pytest.skip("the system does not tell which OpenCL loader is in use")
    monkeypatch.setattr(program.state(cl_device.queue), "eventless", function)
    return cl_device.queue


def test_sized_launches_take_memory_and_numbers(launching):
    q, n = launching, 100
    sized = program.get(q, AXPY, "axpy").sized((128,), (64,), (n,))
    for factor in (2.0, -0.0, 0.0, 3.0):
        x, y = (Tensor.from_host(q, np.ones(n, np.float32)) for _ in range(2))
        sized(q, (0, x.buffer, 1, y.buffer), (factor,))
        assert y.to_host().tolist() == [1 + factor] * n


def test_prepared_launches_repeat_and_tell_what_is_wrong(launching):
    q, n = launching, 100
    x, y, z = (Tensor.from_host(q, np.ones(n, np.float32)) for _ in range(3))
    kernel = program.get(q, AXPY, "axpy")
    launch = program.Prepared(kernel, q, (128,), (64,), (x.buffer, y.buffer, 2.0, n))
    launch.call()
    launch.set(1, z.buffer)
    launch.set(2, 4.0)
    launch.call()
    assert (y.to_host()[0], z.to_host()[0]) == (3.0, 5.0)
    wrong = program.Prepared(kernel, q, (128,), (1 << 20,), (x.buffer, y.buffer, 2.0, n))
    with pytest.raises(program.platforms.opencl().LogicError):
        if not wrong.answers or wrong.call():
            wrong.observed()
