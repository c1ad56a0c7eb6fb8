"""Programs that declare built-in functions themselves: the same results, and the driver's own declarations where the table has none."""

import numpy as np
import pytest

from netcl.core.device import manager
from netcl.core.kernels import builtins, program
from netcl.core.tensor import Tensor

#: A call of every form in the table; LANES is pasted, as rows.cl does.
EVERY_FORM = """
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define LANES 4
__kernel void every_form(__global float* x, __global int* n, __global half* h, __local float* shared) {
  const int i = get_group_id(0) * get_local_size(0) + get_local_id(0) + (int)(get_global_id(1) + get_num_groups(1) - get_global_size(1));
  float4 v = JOIN(vload, LANES)(i, x) + vload_half4(0, h);
  const int4 k = convert_int4_rte(v) + (int)abs(n[0]);
  v = fma(v, exp(-v), fmax(v, 0.5f)) + native_exp2(v) + pow(fabs(v), 0.5f + v * 0.0f) + clamp(v, 0.0f, 1.0f);
  v += dot(v, v.s3210) + shuffle(v, (uint4)(3, 0, 2, 1)) + convert_float4(shuffle((uchar2)(5, 9), (uchar4)(1, 0, 1, 1)));
  v.s0 += isnan(v.s1) + any(isinf(v)) + min(k.s0, 3) + max(mul_hi(k.s1, k.s2), 1) + as_float(as_uint(v.s3));
  shared[0] = v.s2;
  barrier(CLK_LOCAL_MEM_FENCE);
  v.s3 += shared[0];
  atomic_cmpxchg(n + 1, 7, 9);
  vstore_half_rte(v.s0, 4, h);
  vstore4(v, i, x);
}
"""


def results(handle, source):
    cl = program.platforms.opencl()
    x = Tensor.from_host(handle.queue, np.linspace(-1, 1, 4).astype(np.float32))
    n = Tensor.from_host(handle.queue, np.array([-3, 7], np.int32))
    h = Tensor.from_host(handle.queue, np.linspace(0, 1, 8).astype(np.float16))
    program.get(handle.queue, source, "every_form")(handle.queue, (1, 1), (1, 1), x, n, h, cl.LocalMemory(64))
    return x.to_host(), n.to_host(), h.to_host()


def test_results_do_not_change(cl_device, monkeypatch):
    assert builtins.declarations(EVERY_FORM) is not None
    declared = results(cl_device, EVERY_FORM)
    monkeypatch.setattr(builtins, "declarations", lambda source, inline: None)
    for ours, theirs in zip(declared, results(cl_device, EVERY_FORM + "// with the driver's declarations\n"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert declared[1].tolist() == [-3, 9]


#: Numbers for which a definition could err: signs of zero, NaN in either place, infinities.
SMALL_FUNCTIONS = """
__kernel void small_functions(__global const float* a, __global const float* b, __global float* y, __global const int* m, __global int* n) {
  const int i = get_global_id(0);
  const float x = a[i], z = b[i];
  const float4 v = (float4)(x, z, -x, 1.0f), w = vload4(0, b + i + 1);
  const float4 number = isnan(v) ? (float4)(-1.0f) : v, other = isnan(w) ? (float4)(2.5f) : w;  // max, min and clamp of NaN are not defined
  vstore4(max(number, other) + min(number, other.s1), 4 * i, y);
  vstore4(fmax(v, w), 4 * i + 1, y);
  vstore4(fmin(v, z) + clamp(number, -2.0f, 2.0f), 4 * i + 2, y);
  vstore4(convert_float4(isnan(v)) + fabs(v) + (float4)(isnan(x), fabs(z), fmax(x, z), fmin(x, z)), 4 * i + 3, y);
  n[2 * i] = min(m[i], 3) + max(m[i], -7) + clamp(m[i], -2, 9);
  n[2 * i + 1] = (int)min((size_t)i, (size_t)2) + max((int4)(m[i]), 1).s1;
}
"""


def test_definitions_have_the_results_of_the_driver(cl_device, monkeypatch, rng):
    queue = cl_device.queue
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, 3.5, -3.5], np.float32)
    a, b = (np.ascontiguousarray(x) for x in np.array(np.meshgrid(odd, odd)).reshape(2, -1))
    m = rng.integers(-(2**31), 2**31, a.size).astype(np.int32)

    def found(source):
        given = [Tensor.from_host(queue, x) for x in (a, np.append(b, odd[:8]), np.zeros((a.size, 16), np.float32), m)]
        n = Tensor.zeros((a.size, 2), "int32", queue=queue)
        program.get(queue, source, "small_functions")(queue, a.size, None, *given, n)
        return given[2].to_host(), n.to_host()

    assert "static inline" in (builtins.declarations(SMALL_FUNCTIONS, inline=True) or "")
    declarations = builtins.declarations
    monkeypatch.setattr(builtins, "declarations", lambda source, inline: declarations(source, True))
    ours = found(SMALL_FUNCTIONS)
    monkeypatch.setattr(builtins, "declarations", lambda source, inline: None)
    for mine, theirs in zip(ours, found(SMALL_FUNCTIONS + "// with the driver's functions\n"), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "call", ["ldexp(x[0], 2)", "select(x[0], x[1], 1)", "dot_acc_sat(n[0], n[1])", "native_tan(x[0])", "x[get_work_dim()]", "atomic_inc(n)"]
)
def test_calls_that_are_not_in_the_table(call):
    source = f"__kernel void other(__global float* x, volatile __global int* n) {{ x[0] = {call}; }}"
    assert builtins.declarations(source) is None
    assert builtins.declarations(source.replace(call, "exp(x[0])")) is not None


def test_words_in_comments_and_variables_are_no_calls():
    source = "// select(x) of all\n/* mix(a, b) */ __kernel void plain(__global float* x) { float step = 1, length = step; x[0] = length; }"
    assert builtins.declarations(source) == ""


def test_a_missing_declaration_falls_back(cl_device, capfd):
    """A name that only macros make is not seen."""
    source = "#define JOIN(a, b) a##b\n__kernel void pasted(__global float* x) { x[0] = JOIN(hyp, ot)(x[0], x[1]); }"
    assert builtins.declarations(source) == ""
    x = Tensor.from_host(cl_device.queue, np.array([3, 4], np.float32))
    program.get(cl_device.queue, source, "pasted")(cl_device.queue, 1, None, x)
    assert x.tolist() == [5, 4]
    capfd.readouterr()  # PoCL counts the errors of the first build there


def test_only_pocl_parses_every_declaration(cl_device):
    profile = manager.profile(cl_device.device)
    assert profile.has_quirk("parses_all_builtins") == profile.has_quirk("caches_programs") == (profile.brand == "pocl")
