"""KernelSpec and its friends as people who write kernels meet them."""

import numpy as np
import pytest

import netcl
from netcl.core import platforms
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, ShapeError
from netcl.core.kernels.primitives import (
    MACRO_NAMES,
    PRIMITIVE_PREAMBLE,
    KernelSpec,
    PrimitiveBuilder,
    WorkGroupTuner,
    build_elementwise_kernel,
    check_expression,
    largest_divisor,
)
from netcl.core.tensor import Tensor


class FakeDevice:
    max_work_group_size = 200
    max_work_item_sizes = (200, 200, 64)


def test_the_preamble_has_the_promised_macros():
    assert set(MACRO_NAMES) >= set("LOAD STORE ADD SUB MUL DIV RELU EXP LOG SQRT TANH ABS MAX MIN WHERE".split())


def test_exactly_one_of_src_and_body():
    for wrong in ({}, {"src": "x", "body": "y"}):
        with pytest.raises(KernelBuildError, match=r"\[KernelSpec\] exactly one of src and body must be given, got (both|neither); name=k"):
            KernelSpec("k", **wrong)
    with pytest.raises(KernelBuildError, match="must be a C identifier"):
        KernelSpec("k; evil", body="x")


def test_body_form_gets_the_preamble_it_was_given():
    spec = KernelSpec("k", params=["int n"], body="return;")
    assert "ADD" not in spec.to_source()
    assert PRIMITIVE_PREAMBLE.strip() in KernelSpec("k", params=["int n"], preamble=PRIMITIVE_PREAMBLE, body="return;").to_source()


@pytest.mark.parametrize("own", ["#define MAX(a, b) fmax(a, b)\n", "float RELU(float x) { return x; }\n", "__constant int LOAD = 3;\n"])
def test_src_form_is_left_alone_where_names_clash(own):
    src = own + "__kernel void k(__global float* x) { x[0] = 1; }"
    assert KernelSpec("k", src=src).to_source() == src


def test_src_form_may_use_the_macros(cl_device):
    src = "__kernel void k(__global float* x) { x[get_global_id(0)] = RELU(SUB(LOAD(x, get_global_id(0)), 2.0f)); }"
    x = Tensor.from_host(cl_device.queue, np.arange(7, dtype=np.float32))
    KernelSpec("k", src=src).run(cl_device.queue, (7,), None, x)
    assert x.tolist() == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", ["context", "queue", "handle"])
def test_build_takes_context_queue_or_handle(cl_device, where):
    target = cl_device if where == "handle" else getattr(cl_device, where)
    kernel = KernelSpec("k", params=["__global int* x"], body="x[get_global_id(0)] = 5;").build(target)
    x = Tensor.zeros((3,), "int32", queue=cl_device.queue)
    kernel(cl_device.queue, (3,), None, x)
    assert x.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("n", "local"), [(1000, None), (1000, (64,)), (997, (64,)), (1, (256,)), (6, 4)])
def test_unguarded_kernels_are_never_run_past_the_end(cl_device, n, local):
    x = Tensor.zeros((n + 300,), "int32", queue=cl_device.queue)
    KernelSpec("k", params=["__global int* x"], body="x[get_global_id(0)] = 1;").run(cl_device.queue, (n,), local, x)
    assert x.to_host().sum() == n


def test_sizes_are_checked(cl_device):
    spec = KernelSpec("k", params=["__global int* x"], body="x[0] = 1;")
    x = Tensor.zeros((1,), "int32", queue=cl_device.queue)
    with pytest.raises(ShapeError, match=r"\[k\] global_size must not be negative; global_size=\(-1,\)"):
        spec.run(cl_device.queue, (-1,), None, x)
    with pytest.raises(ShapeError, match=r"\[k\] global_size and local_size must have the same number of dimensions"):
        spec.run(cl_device.queue, (4,), (2, 2), x)


def test_tuner():
    tuner = WorkGroupTuner()
    assert tuner.max_local == 256
    assert tuner.choose_local_size(FakeDevice()) == 128
    assert tuner.global_local_sizes(300, FakeDevice()) == ((384,), (128,))
    assert tuner.global_local_sizes(0, FakeDevice()) == ((128,), (128,))
    assert WorkGroupTuner(max_local=64).choose_local_size(FakeDevice()) == 64


def test_largest_divisor():
    assert [largest_divisor(n, 256) for n in (256, 257, 1000, 7)] == [256, 1, 250, 7]


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16", "int32"])
def test_elementwise_kernels(cl_device, dtype):
    spec, kernel = build_elementwise_kernel(cl_device.context, "mul_add", 2, "MUL(ADD(v0, v1), 2)", dtype=dtype)
    n = 257
    a, b = (Tensor.from_host(cl_device.queue, np.arange(n) % 7 + k, dtype) for k in (0, 1))
    out = Tensor.zeros((n,), dtype, queue=cl_device.queue)
    kernel(cl_device.queue, (n,), None, a, b, out, n)
    np.testing.assert_array_equal(out.to_host(), (np.arange(n) % 7) * 4 + 2)
    assert spec.name == "mul_add"


def test_half_kernels_are_what_the_page_says():
    spec, kernel = build_elementwise_kernel(None, "twice", 1, "MUL(v0, 2.0f)", dtype="half")
    assert kernel is None
    assert "#pragma OPENCL EXTENSION cl_khr_fp16 : enable" in spec.to_source()
    assert "-cl-fast-relaxed-math" in spec.options
    assert "-cl-fast-relaxed-math" not in build_elementwise_kernel(None, "twice", 1, "v0", dtype="float")[0].options


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("v0; system(1)", "must not contain ';'"),
        ("v0 } __kernel void x() {", "must not contain '}'"),
        ("v2", "unknown name v2"),
        ("get_global_id(0)", "unknown name get_global_id"),
        ('"a"', "must not contain '\"'"),
        ("", "empty"),
    ],
)
def test_expressions_pass_an_allow_list(expression, what):
    with pytest.raises(KernelBuildError, match=what.replace("(", r"\(")):
        check_expression(expression, 2)


def test_arity():
    with pytest.raises(ShapeError, match="arity must be at least 1"):
        PrimitiveBuilder().elementwise_spec("none", 0, "1")


@pytest.mark.parametrize("name", ["", "a b", "x(){} __kernel void y", "f//", "f\n#include", 'f"', "é", "1st", "a-b", "a;b"])
@pytest.mark.fault("kernel name with source in it", "`KernelSpec` and `PrimitiveBuilder`", "`KernelBuildError`")
def test_a_name_that_is_more_than_a_name_is_refused(name):
    with pytest.raises(KernelBuildError, match=r"^\[KernelSpec\] name must be a C identifier; name="):
        KernelSpec(name, params=["__global float* x"], body="x[0] = 1.0f;")
    with pytest.raises(KernelBuildError, match="must be a C identifier"):
        PrimitiveBuilder().elementwise_spec(name, 1, "v0")


@pytest.mark.parametrize(
    "option",
    ["", "-DX=1 -include f", "-include f.cl", "-DX='a'", '-DX="a"', "-DX=1\n#define Y", "-DX=1;", "file.cl", "-cl-x y", "-I a", "@f"],
)
@pytest.mark.fault("build option with source in it", "`-include`, quotes, newlines", "`KernelBuildError`")
def test_a_build_option_that_is_more_than_one_is_refused(option):
    with pytest.raises(KernelBuildError, match=r"^\[safe\] every build option must have a known form; option="):
        KernelSpec("safe", params=["__global float* x"], body="x[0] = 1.0f;", options=[option])
    with pytest.raises(KernelBuildError, match=r"every build option must have a known form"):
        netcl.kernel(body="out[i] = x[i];", options=[option])(_safe)


def _safe(x: "float32") -> "float32": ...  # noqa: F821


def test_build_options_of_known_forms_are_taken():
    options = ["-DX", "-D X=1", "-DY=(1.5f+2)", "-cl-fast-relaxed-math", "-cl-std=CL1.2", "-I/usr/include", "-w", "-Werror", "-g"]
    assert KernelSpec("fine", body="int x = 0;", options=options).options == options


@pytest.mark.parametrize(
    "expression",
    ["v0) + (v1", "v0), (v1", "v0, v1", "(v0", "v0 // v1", "v0 /* v1", "v0 = v1", "&v0", "*(v0)", "v0 + *v1", "v0<:1:>", "v0 %: v1",
     "v0++", "v0 ? v1 : )", "v0; v1", "v0 { v1", 'v0 "', "v0 \\\n v1", "v0 # v1", "v\u00e9", "get_global_id(0)", "printf(v0)", "out"],
)  # fmt: skip
@pytest.mark.fault("expression that leaves its place", "comments, digraphs, parentheses, pointers, assignments", "`KernelBuildError`")
def test_an_expression_that_leaves_its_place_is_refused_by_name(expression):
    with pytest.raises(KernelBuildError, match=r"^\[mine\] "):
        PrimitiveBuilder().elementwise_spec("mine", 2, expression)


@pytest.mark.parametrize("expression", ["v0 * v1", "-v0 * (v1 + 1.0f)", "v0 <= v1 ? v0 : v1", "FMA(v0, v1, -v0)", "v0 == v1 && !(v0 > v1)"])
def test_expressions_that_are_fine(expression):
    known = expression.replace("FMA", "fma")
    assert known in PrimitiveBuilder().elementwise_spec("mine", 2, known).to_source()


@pytest.mark.fault("kernel does not compile", "an undeclared name", "kernel, line and the driver's log")
def test_a_build_error_names_kernel_line_and_log(cl_device):
    spec = KernelSpec("broken", params=["__global float* x"], body="x[0] = 1.0f;\n  x[1] = nonsense;")
    with pytest.raises(KernelBuildError, match=r"kernel=broken.*(?s:.)*nonsense") as told:
        spec.build(cl_device)
    assert str(told.value).startswith("[build] the driver cannot compile the kernel source; kernel=broken, device=")


@pytest.mark.fault("kernel wants too much local memory", "more than the device has", "`DeviceError` with both figures")
def test_more_local_memory_than_there_is_is_refused(cl_device):
    limit = int(cl_device.queue.device.local_mem_size)
    x = Tensor.zeros((64,), queue=cl_device.queue)
    wants = KernelSpec(
        "wants", params=["__global float* x", "__local float* l"], body="l[get_local_id(0)] = 1.0f; x[get_global_id(0)] = l[0];"
    )
    text = rf"^\[wants\] the kernel needs more local memory.*; bytes=\d+, limit={limit}; use smaller tiles"
    if cl_device.platform_name != "Portable Computing Language":  # whose driver says it in its own words
        text = r"^\[wants\] "
    with pytest.raises((DeviceError, OutOfMemoryError), match=text):
        wants.run(cl_device.queue, 64, 64, x, platforms.opencl().LocalMemory(limit + 64))
    wants.run(cl_device.queue, 64, 64, x, platforms.opencl().LocalMemory(256))


@pytest.mark.fault("launch larger than the device allows", "four dimensions; a work-group of 2^20", "`DeviceError`; it is reduced")
def test_a_work_group_larger_than_the_device_allows_is_refused(cl_device):
    x = Tensor.zeros((64,), queue=cl_device.queue)
    built = KernelSpec("plain", params=["__global float* x"], body="x[get_global_id(0)] = 1.0f;").build(cl_device)
    with pytest.raises(
        DeviceError, match=r"^\[plain\] the driver cannot launch the kernel \(a launch must have 1 to 3 dimensions\); global_size="
    ):
        built.kernel(cl_device.queue, (2, 2, 2, 2), None, x)
    built.run(cl_device.queue, 64, 1 << 20, x)  # a local size is a wish: it is reduced
    assert x.tolist() == [1.0] * 64
