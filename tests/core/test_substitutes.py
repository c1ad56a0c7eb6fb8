"""Conversions of halves that do not call the driver's, and substitutes for what a driver compiles wrongly, on every driver."""

from __future__ import annotations

import re

import numpy as np
import pytest

import netcl as nc
from netcl.core.kernels import program, substitutes
from netcl.engine.opencl_text import loose_halves

LOADS = "__kernel void load(__global const half* h, __global float* x) { const int i = get_global_id(0); LOAD }"
STORES = "__kernel void store(__global const float* x, __global half* h) { const int i = get_global_id(0); STORE }"
COMPARES = """__kernel void compare(__global const KIND* x, __global int* y) {
  const int i = get_global_id(0);
  const long v = (long)(x[i]), w = convert_long(x[i]);
  y[i] = (v < 0) + 2 * (v > 3) + 4 * (w <= -2) + 8 * (w >= 1);
}"""


def launch(device, source, name, items, *tensors):
    program.get(device.queue, with_substitutes(device, source), name)(device.queue, items, None, *tensors)


def with_substitutes(device, source):
    return source if device.profile.has_quirk("wrong_conversions") else substitutes.substituted(source)


FORMS = [("substitute", width) for width in (1, 2, 4, 8, 16)] + [("loose", width) for width in (2, 4, 8, 16)]


@pytest.mark.parametrize("form, width", FORMS)
def test_every_half_is_loaded(cl_device, form, width):
    bits = np.arange(1 << 16, dtype=np.uint16)
    h, x = nc.tensor(bits.view(np.float16), device=cl_device), nc.zeros((1 << 16,), device=cl_device)
    value = f"vload_half{width}(i, h)" if form == "substitute" else f"load_float16_{width}(h + {width} * i)"
    load = "x[i] = vload_half(i, h);" if width == 1 else f"vstore{width}({value}, i, x);"
    functions = loose_halves("float16", width) if form == "loose" else ""
    launch(cl_device, functions + LOADS.replace("LOAD", load), "load", (1 << 16) // width, h, x)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(x.to_host(), expected)
    assert np.array_equal(np.signbit(x.to_host()), np.signbit(expected))


@pytest.mark.parametrize("form, width", FORMS)
def test_floats_are_rounded_to_the_nearest_even_half(cl_device, form, width):
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)  # 0 to infinity
    ties = (halves[:-2] + halves[1:-1]) / 2
    near = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    more = np.array([65519.996, 65520, 1e30, 1e-30, 2**-25, 1e-40, np.inf, np.nan], np.float32)
    values = np.concatenate([halves, ties, *near, more])
    values = np.concatenate([values, -values, np.zeros(-2 * len(values) % 16, np.float32)]).astype(np.float32)
    values.view(np.uint32)[-1] = 0x7F800001  # a NaN of which the upper bits alone are infinity
    x, h = nc.tensor(values, device=cl_device), nc.zeros((len(values),), dtype="float16", device=cl_device)
    store = "vstore_half_rte(x[i], i, h);" if width == 1 else f"vstore_half{width}_rte(vload{width}(i, x), i, h);"
    store = f"store_float16_{width}(vload{width}(i, x), h + {width} * i);" if form == "loose" else store
    functions = loose_halves("float16", width) if form == "loose" else ""
    launch(cl_device, functions + STORES.replace("STORE", store), "store", len(values) // width, x, h)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(h.to_host(), expected)
    assert np.array_equal(np.signbit(h.to_host()), np.signbit(expected))


@pytest.mark.parametrize("kind, dtype", [("int", "int32"), ("long", "int64"), ("uchar", "uint8"), ("float", "float32")])
def test_converted_integers_are_compared_as_longs(cl_device, kind, dtype):
    values = np.array([0, 1, 3, 4, 100] if dtype == "uint8" else [-100, -3, -2, -1, 0, 1, 3, 4, 100], dtype)
    x, y = nc.tensor(values, device=cl_device), nc.zeros((len(values),), dtype="int32", device=cl_device)
    launch(cl_device, COMPARES.replace("KIND", kind), "compare", len(values), x, y)
    wanted = (values < 0) + 2 * (values > 3) + 4 * (values.astype("int64") <= -2) + 8 * (values >= 1)
    assert y.tolist() == wanted.tolist()


def test_errors_name_the_lines_of_the_program(cl_device):
    bad = "// vload_half (long)(1)\n__kernel void bad(__global float* x) {\n  x[0] = undeclared;\n}"
    with pytest.raises(program.KernelBuildError) as caught:
        program.get(cl_device.queue, with_substitutes(cl_device, bad), "bad")
    assert re.search(r">\s+\d+ \|   x\[0\] = undeclared;", str(caught.value))


def test_other_programs_stay_as_they_are():
    source = "__kernel void k(__global long* x) { x[0] = (long)1; }"
    assert substitutes.substituted(source) == source
