"""What is generated: the text of kernels, NumPy functions, fused chains, compositions of ops; and how shapes are walked."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest

from netcl import ops
from netcl.core.dtype import DTYPES
from netcl.core.errors import DeviceError, DtypeError, ShapeError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.expression import CText, compose, differentiate, evaluate
from netcl.engine.functions import FORMULA_FUNCTIONS, erf
from netcl.engine.map_kernel import collapse
from netcl.engine.opencl_text import Layout, Port, forward_body, kernel_source, numpy_function, vjp_body
from netcl.engine.pointwise import run
from netcl.engine.registry import REGISTRY, Op, Pointwise, parse

F32 = DTYPES["float32"]


def c(text: str, compute: str = "float") -> str:
    return CText(compute).statement(parse(text))


@pytest.mark.parametrize(
    ("expression", "compute", "text"),
    [
        ("v0 * (1 / 2)", "float", "v0 * (1.0f / 2.0f)"),
        ("v0 * (1 / 2)", "double", "v0 * (1.0 / 2.0)"),
        ("v0 + 3", "int", "v0 + 3"),
        ("v0 + 3", "long", "v0 + 3L"),
        ("-v0 * 1e-7", "float", "(-v0) * 1e-07f"),
        ("MAX(v0, 0)", "float", "netcl_max(v0, (real)(0.0f))"),
        ("MAX(v0, 0)", "int", "max(v0, (real)(0))"),
        ("v0 * (v0 > 0)", "float", "v0 * netcl_number((v0 > 0.0f))"),
        ("WHERE(v0, 1, 2)", "float", "netcl_where((v0 != (real)(0)), (real)(1.0f), (real)(2.0f))"),
        ("AND(v0 > 1, ISNAN(v1))", "float", "netcl_number(netcl_and((v0 > 1.0f), netcl_isnan(v1)))"),
        ("min * half", "float", "min_ * half_"),
        ("1", "float", "(real)(1.0f)"),
        ("(v0 + v1) * (v0 - v1)", "float", "(v0 + v1) * (v0 - v1)"),
    ],
)
def test_numbers_and_truth_values_in_c(expression, compute, text):
    assert c(expression, compute) == text


def test_a_kernel_reads_like_its_row():
    row = REGISTRY["leaky_relu"]
    text = kernel_source("leaky_relu", forward_body(row), [Port("v0", F32)], [Port("out", F32)], "float", Layout(width=4))
    assert "__kernel void op_leaky_relu(" in text
    assert "const float a_negative_slope" in text and "0.01" not in text
    assert "const real out = netcl_where((v0 > 0.0f), v0, (negative_slope_ * v0));" in text
    assert "netcl_max" not in text, "helpers that nothing calls are left out"
    assert "fp64" not in text


def test_half_and_double_ask_for_what_they_need():
    body = forward_body(REGISTRY["exp"])
    half = kernel_source("exp", body, [Port("v0", DTYPES["float16"])], [Port("out", DTYPES["float16"])], "float", Layout(width=16))
    assert "vloada_half16(0, p + i)" in half and "vstorea_half16_rte" in half and "cl_khr_fp16" not in half
    double = kernel_source("exp", body, [Port("v0", DTYPES["float64"])], [Port("out", DTYPES["float64"])], "double", Layout())
    assert double.startswith("#pragma OPENCL EXTENSION cl_khr_fp64 : enable")


def test_only_the_wanted_gradients_are_computed():
    body = vjp_body(REGISTRY["mul"], (True, False))
    assert body.inputs == ("g", "v1") and body.outputs == ("d0",)
    body = vjp_body(REGISTRY["softplus"], (True,))
    assert body.inputs == ("g", "v0") and body.scalars == ("beta", "threshold")
    assert [name for name, _ in body.lines] == ["z", "e", "d0"]


@pytest.mark.parametrize("name", FORMULA_FUNCTIONS)
def test_every_function_names_the_op_that_it_is(name):
    function = FORMULA_FUNCTIONS[name]
    row = REGISTRY[function.op]
    assert isinstance(row, Pointwise | Op) and len(row.inputs) == len(function.takes)


def test_erf_is_accurate():
    x = np.concatenate([np.linspace(-7, 7, 2001), [0.46875, -0.46875, 1e-300, np.inf, -np.inf]])
    np.testing.assert_allclose(erf(x), [math.erf(v) for v in x], rtol=1e-14, atol=0)
    assert np.isnan(erf(np.array([np.nan]))).all() and erf(np.float32(1)).dtype == np.float32


def test_numpy_functions_stay_in_their_dtype():
    row = REGISTRY["leaky_relu"]
    (out,) = numpy_function(forward_body(row), "float")(np.ones(3, np.float32), np.float32(0.1))
    assert out.dtype == np.float32
    (out,) = numpy_function(forward_body(REGISTRY["relu"]), "int")(np.array([-1, 2], np.int32))
    assert out.dtype == np.int32


# ---- compositions


class Numbers:
    """A namespace of ops over NumPy arrays."""

    def __getattr__(self, name):
        if name == "cast":
            return lambda x, dtype: x.astype(dtype)
        return lambda *args: REGISTRY[name].ref(*args)


DIFFERENTIABLE = [name for name, row in REGISTRY.items() if isinstance(row, Pointwise) and set(row.vjp) - {None, "0"}]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_composing_a_gradient_equals_its_kernel(name, rng):
    row = REGISTRY[name]
    low, high = row.domain[0] if isinstance(row.domain[0], tuple) else row.domain
    values = [rng.uniform(max(low, 0.75) if row.arity > 1 else low, high, 33) for _ in range(row.arity)]
    if name == "where":
        values[0] = (values[0] > 1).astype(float)
    g, out = rng.normal(size=33), np.asarray(row.ref(*values, **row.params), np.float64)
    body = vjp_body(row, tuple(text is not None for text in row.vjp))
    bound = {"g": g, "out": out, **{f"v{i}": x for i, x in enumerate(values)}, **row.params}
    by_kernel = numpy_function(body, "double")(*(bound[n] for n in (*body.inputs, *body.scalars)))
    by_ops = [0.0 if text == "0" else compose(text, bound, Numbers(), row.let) for text in row.vjp if text]
    for a, b in zip(by_ops, by_kernel, strict=True):
        np.testing.assert_allclose(np.broadcast_to(a, 33), np.broadcast_to(b, 33), rtol=1e-9, atol=1e-12)


def test_an_expression_of_the_user_is_differentiated(rng):
    a, b, g = rng.uniform(0.5, 2, 17), rng.uniform(0.5, 2, 17), rng.normal(size=17)
    text = "WHERE(v0 > 1, v0 * v1, EXP(v0) / v1) + MAX(v0, v1) * TANH(v0) + v1"
    grads = differentiate(text, {"v0": a, "v1": b}, g, Numbers())

    def f(x, y):
        return np.where(x > 1, x * y, np.exp(x) / y) + np.maximum(x, y) * np.tanh(x) + y

    h = 1e-6
    np.testing.assert_allclose(grads["v0"], g * (f(a + h, b) - f(a - h, b)) / (2 * h), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(grads["v1"], g * (f(a, b + h) - f(a, b - h)) / (2 * h), rtol=1e-6, atol=1e-8)
    assert differentiate("v0 * 2", {"v0": a, "v1": b}, g, Numbers())["v1"] is None


def test_numbers_alone_stay_numbers():
    assert evaluate(parse("1 / 4 + EXP(0)"), _composer()) == 1.25
    assert evaluate(parse("WHERE(1 > 2, 3, 4)"), _composer()) == 4


def _composer():
    from netcl.engine.expression import ThroughOps

    return ThroughOps({}, Numbers())


# ---- shapes, dtypes and launches


@pytest.mark.parametrize(
    ("shape", "shapes", "outer", "inner", "moves"),
    [
        ((8, 3, 5, 5), [(8, 3, 5, 5), (8, 3, 5, 5)], (), 600, (True, True)),
        ((8, 3, 5, 5), [(8, 3, 5, 5), (3, 1, 1)], (8, 3), 25, (True, False)),
        ((4, 6), [(4, 6), (6,)], (4,), 6, (True, True)),
        ((4, 6), [(4, 1), (1, 6)], (4,), 6, (False, True)),
        ((4, 6), [(4, 6), ()], (), 24, (True, False)),
        ((1, 1), [(1, 1), (1,)], (), 1, (True, True)),
        ((2, 1, 3, 1, 4), [(2, 1, 3, 1, 4), (3, 1, 4)], (2,), 12, (True, True)),
    ],
)
def test_axes_are_merged(shape, shapes, outer, inner, moves):
    walk = collapse(shape, shapes)
    assert (walk.outer, walk.inner, walk.moves) == (outer, inner, moves)


BROADCASTS = [
    ((4, 6), (6,)), ((4, 6), (4, 1)), ((4, 1), (1, 6)), ((5, 3, 7), (3, 1)), ((2, 3, 4, 5), (3, 1, 5)), ((2, 1, 4, 1), (3, 1, 5)),
    ((3, 1027), (1027,)), ((1031, 3), (3,)), ((64, 33), (64, 1)), ((40, 48), (48,)), ((), (3,)), ((1, 1), (1,)), ((0, 3), (3,)),
    ((2, 2, 2, 2, 2, 2), (2, 1, 2, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), BROADCASTS)
def test_broadcasting(device, rng, a, b):
    x, y = rng.normal(size=a).astype(np.float32), rng.normal(size=b).astype(np.float32)
    tx, ty = Tensor.from_host(device.queue, x), Tensor.from_host(device.queue, y)
    np.testing.assert_array_equal(ops.sub(tx, ty).to_host(), x - y)
    np.testing.assert_array_equal(ops.sub(ty, tx).to_host(), y - x)
    np.testing.assert_array_equal(ops.where(ops.gt(tx, 0), tx, ty).to_host(), np.where(x > 0, x, y))


def test_numbers_on_either_side(device):
    x = np.array([1.0, -2.0, 3.0], np.float32)
    t = Tensor.from_host(device.queue, x)
    np.testing.assert_array_equal(ops.sub(t, 1).to_host(), x - 1)
    np.testing.assert_array_equal(ops.sub(2.5, t).to_host(), 2.5 - x)
    np.testing.assert_array_equal(ops.mul(t, np.float64(2)).to_host(), x * 2)
    np.testing.assert_array_equal(ops.add(t, [1.0, 2.0, 3.0]).to_host(), x + np.array([1, 2, 3]))
    np.testing.assert_array_equal(ops.add(x, t).to_host(), x + x)
    assert ops.exp(2.0).shape == ()


PROMOTIONS = [
    ("int32", 2, "int32"), ("int32", 2.0, "float32"), ("bool", 1, "int64"), ("bool", True, "bool"), ("float16", 2.0, "float16"),
    ("uint8", 3, "uint8"), ("int64", "int32", "int64"), ("float16", "bfloat16", "float32"), ("int64", "float16", "float16"),
    ("float32", "float64", "float64"), ("bfloat16", 1, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "result"), PROMOTIONS)
def test_promotion(device, a, b, result):
    if "float64" in (a, b, result) and not device.profile.has_fp64:
        pytest.skip("no float64 on this device")
    x = Tensor.from_host(device.queue, np.ones(5), a)
    y = Tensor.from_host(device.queue, np.ones(5), b) if isinstance(b, str) else b
    assert ops.mul(x, y).dtype == result
    assert ops.eq(x, y).dtype == "bool"


def test_integers_are_exact(device):
    big = np.array([2**53 + 1, -(2**53) - 1, 2**62], np.int64)
    t = Tensor.from_host(device.queue, big)
    np.testing.assert_array_equal(ops.add(t, 1).to_host(), big + 1)
    np.testing.assert_array_equal(ops.eq(t, ops.add(t, 1)).to_host(), [False] * 3)
    np.testing.assert_array_equal(ops.maximum(t, 0).to_host(), np.maximum(big, 0))
    a = np.array([7, -7, 7, -7, 5, 2**31 - 1, -(2**31)], np.int32)
    b = np.array([3, 3, -3, -3, 0, -1, -1], np.int32)
    ta, tb = Tensor.from_host(device.queue, a), Tensor.from_host(device.queue, b)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(ops.fmod(ta, tb).to_host(), np.fmod(a, b))
        np.testing.assert_array_equal(ops.remainder(ta, tb).to_host(), np.remainder(a, b))
        np.testing.assert_array_equal(ops.floor_divide(ta, tb).to_host()[:-1], np.floor_divide(a, b)[:-1])
    np.testing.assert_array_equal(ops.pow(ta, 3).to_host()[:5], a[:5] ** 3)
    powers = ops.pow(Tensor.from_host(device.queue, np.array([1, -1, 2, -1], np.int32)), Tensor.full((4,), -3, "int32", queue=device.queue))
    np.testing.assert_array_equal(powers.to_host(), [1, -1, 0, -1])
    assert ops.div(ta, 2).dtype == "float32" and ops.sqrt(ta).dtype == "float32" and ops.floor(ta).dtype == "int32"
    np.testing.assert_array_equal(ops.clamp(ta, -1, 3).to_host(), np.clip(a, -1, 3))
    assert ops.clamp(ta, min=0).dtype == "int32"
    np.testing.assert_array_equal(ops.add(Tensor.from_host(device.queue, np.array([250], np.uint8)), 10).to_host(), [4])


def test_rounding_and_signs_are_numpys(device):
    x = np.array([-2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, np.nan, np.inf, -np.inf, 7.3, -7.3], np.float32)
    t = Tensor.from_host(device.queue, x)
    for name in ("round", "floor", "ceil", "trunc", "sign", "abs"):
        got, want = getattr(ops, name)(t).to_host(), REGISTRY[name].ref(x)
        np.testing.assert_array_equal(got, want, err_msg=name)
    for divisor in (3.0, -3.0, 0.5):
        with np.errstate(all="ignore"):
            for name in ("fmod", "remainder", "floor_divide"):
                want = REGISTRY[name].ref(x, np.float32(divisor))
                np.testing.assert_allclose(getattr(ops, name)(t, divisor).to_host(), want, err_msg=name)


UNSIGNED = [name for name, row in DTYPES.items() if row.host.kind in "bu"]


@pytest.mark.parametrize("source_dtype", DTYPES)
def test_cast_between_all_dtypes(device, source_dtype, full):
    """Between all on NumPy and with --full. Else to the next four: each dtype is loaded and stored in several programs."""
    names = [name for name in DTYPES if name != "float64" or device.profile.has_fp64]
    if source_dtype not in names:
        pytest.skip("no float64 on this device")
    if device.backend == "cl" and not full:
        names = (2 * names)[names.index(source_dtype) + 1 :][:4]
    values = np.array([0, 1, 2.5, 3.49, 100.7, -0.0] + ([-1.5, -7.9, 1e-3] if source_dtype not in UNSIGNED else []))
    x = np.tile(values, 200)  # long enough for vector loads
    t = Tensor.from_host(device.queue, x, source_dtype)
    held = t.to_host()
    for name in names:
        if name in UNSIGNED and name != "bool" and held.min() < 0:
            continue  # which bits a negative number becomes is nobody's promise
        want = Tensor.from_host(device.queue, held.astype(DTYPES[name].host), name).to_host()
        np.testing.assert_array_equal(ops.cast(t, name).to_host(), want, err_msg=f"{source_dtype} to {name}")
    assert ops.cast(t, source_dtype) is t


def test_out_is_written(device):
    x = Tensor.from_host(device.queue, np.ones(5, np.float32))
    out = Tensor.empty((5,), queue=device.queue)
    assert ops.add(x, x, out=out) is out
    np.testing.assert_array_equal(out.to_host(), np.full(5, 2))
    ops.mul(out, 3.0, out=out)
    np.testing.assert_array_equal(out.to_host(), np.full(5, 6))
    with pytest.raises(ShapeError, match=r"\[add\] out must have the shape of the result; out=\(5,\), result=\(1,\)"):
        ops.add(Tensor.from_host(device.queue, np.ones(1, np.float32)), 1.0, out=out)
    with pytest.raises(DtypeError, match=r"\[eq\] out must have the dtype of the result"):
        ops.eq(x, x, out=out)


def test_results_never_share_memory(device):
    x = Tensor.from_host(device.queue, np.array([1, 2], np.int32))
    y = ops.floor(x)
    ops.mul(y, 0, out=y)
    np.testing.assert_array_equal(x.to_host(), [1, 2])


def test_a_new_size_or_value_does_not_recompile(cl_device):
    def call(n, slope):
        x = Tensor.from_host(cl_device.queue, np.ones((n, 3, 5), np.float32))
        y = Tensor.from_host(cl_device.queue, np.ones((3, 1), np.float32))
        return ops.leaky_relu(ops.add(x, y), slope).to_host(), ops.sum(x, axis=1).to_host(), ops.mul(x, slope).to_host()

    call(2, 0.1)
    before = program.build_count()
    for n, slope in ((3, 0.2), (5, 0.3), (7, 1e-7)):
        call(n, slope)
    assert program.build_count() == before


def test_errors(device):
    queue = device.queue
    a, b = Tensor.from_host(queue, np.ones((3, 4), np.float32)), Tensor.from_host(queue, np.ones(5, np.float32))
    with pytest.raises(ShapeError, match=r"^\[add\] shapes must broadcast together; a.shape=\(3, 4\), b.shape=\(5,\)$"):
        ops.add(a, b)
    with pytest.raises(DtypeError, match=r"^\[neg\] inputs must have a numeric dtype, not bool; dtype=bool; cast first"):
        ops.neg(Tensor.from_host(queue, np.array([True])))
    with pytest.raises(TypeError, match=r"^\[leaky_relu\] negative_slope must be a number"):
        ops.leaky_relu(a, "x")
    with pytest.raises(ValueError, match=r'^\[gelu\] approximate must be "none" or "tanh"; approximate=\'exact\'$'):
        ops.gelu(a, approximate="exact")
    with pytest.raises(ValueError, match=r"^\[clamp\] min or max must be given"):
        ops.clamp(a)
    for number, name in ((2**32, "int32"), (2**63, "int64")):
        x = Tensor.from_host(queue, np.ones(3, name))
        for fits in (1, -(2 ** (31 if name == "int32" else 63))):  # what was called before decides nothing
            assert ops.add(x, fits).tolist() == [1 + fits] * 3
        with pytest.raises(DtypeError, match=rf"^\[add\] a number must be representable in {name}, got {number}"):
            ops.add(x, number)


def test_tensors_of_different_devices(cl_device):
    from netcl.core.device import manager

    a = Tensor.from_host(cl_device.queue, np.ones(3, np.float32))
    b = Tensor.from_host(manager.default("cpu").queue, np.ones(3, np.float32))
    with pytest.raises(DeviceError, match=r"^\[add\] all tensors must be on the same device and queue"):
        ops.add(a, b)


def test_float64_needs_the_device(cl_device, monkeypatch):
    x = Tensor.from_host(cl_device.queue, np.ones(3, np.float32))
    narrow = dataclasses.replace(cl_device.profile, has_fp64=False)
    monkeypatch.setattr(launch, "profile_of", lambda queue: narrow)
    with pytest.raises(
        DtypeError, match=r"^\[cast\] float64 requires a device with float64 arithmetic; .*cast to float32, or use the NumPy backend"
    ):
        run(Pointwise("cast", "v0", ("g",), np.abs), (x,), None, "float64")
    with pytest.raises(DtypeError, match=r"^\[cast\] float64 requires a device with float64 arithmetic"):
        ops.masked_fill(x, ops.gt(x, 0), Tensor.from_host(cl_device.queue, np.float64(2), "float64"))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_large_result_goes_past_the_caches_wherever_it_lies(cl_device, offset):
    n = (4 << 20) // 4 + 5
    values = np.arange(n + 1, dtype=np.float32)[offset : offset + n]
    expected = values + np.float32(1)
    shared = Tensor.from_host(cl_device.queue, values, share=True)
    fresh = ops.add(shared, 1.0)
    np.testing.assert_array_equal(fresh.to_host(), expected)
    np.testing.assert_array_equal(ops.add(shared, 1.0, out=shared).to_host(), expected)


def test_only_whole_lines_of_a_cpu_are_streamed():
    body, ports = forward_body(REGISTRY["exp"]), ([Port("v0", F32)], [Port("out", F32)])
    streams = [
        "__builtin_nontemporal_store" in kernel_source("exp", body, *ports, "float", Layout(0, width, True, "int", True, False, large))
        for width, large in ((16, True), (16, False), (1, True))
    ]
    assert streams == [True, False, False]


@pytest.mark.parametrize(("shape", "axis"), [((3000, 96), 0), ((600, 65), 0), ((5, 900, 10), 1), ((20, 3), 0)])
def test_columns_as_a_gpu_folds_them(shape, axis, cl_device, unoptimized, monkeypatch, rng):
    """In tiles, by a work-group each: on whatever device there is."""
    module = sys.modules["netcl.engine.reduction"]
    profile = dataclasses.replace(module.profile_of(cl_device.queue), device_type="gpu", max_compute_units=8, max_work_group_size=256)
    monkeypatch.setattr(module, "profile_of", lambda queue: profile)
    x = rng.standard_normal(shape)
    t = Tensor.from_host(cl_device.queue, x.astype(np.float32))
    np.testing.assert_allclose(ops.sum(t, axis=axis).to_host(), x.sum(axis), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ops.max(t, axis=axis).to_host(), x.astype(np.float32).max(axis))


def test_exp_below_is_exp_where_it_is_meant_for(device):
    host = np.concatenate([np.linspace(-87, 0, 4001), [-np.inf, -100.0, np.nan, 1e-3]]).astype(np.float32)
    got = ops.elementwise_unary(Tensor.from_host(device.queue, host), "EXP_BELOW(x)").to_host()
    np.testing.assert_allclose(got, np.exp(host.astype(np.float64)), rtol=3e-7, atol=2e-38)
