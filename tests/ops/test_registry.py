"""The rules of rows, and what a row registered at run time gets."""

from __future__ import annotations

import numpy as np
import pytest

from netcl import ops
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.engine.pointwise import run_vjp
from netcl.engine.registry import REGISTRY, Pointwise, Reduction, S, alias, lookup_op, op, register, unregister


def row(fwd: str, vjp: tuple = ("g",), **columns) -> Pointwise:
    return Pointwise("bad", fwd, vjp, np.square, **columns)


@pytest.mark.parametrize(
    ("fwd", "text"),
    [
        ("v0 ** 2", "Pow is not in the expression language"),
        ("v0 if v0 > 0 else 0", "IfExp is not in the expression language"),
        ("0 < v0 < 1", "Compare is not in the expression language"),
        ("v0 and 1", "BoolOp is not in the expression language"),
        ("v0.real", "Attribute is not in the expression language"),
        ("v0[0]", "Subscript is not in the expression language"),
        ("(lambda: 1)()", "is not in the expression language|unknown function"),
        ("__import__('os')", "unknown function '__import__'"),
        ("sqrt(v0)", "unknown function 'sqrt'"),
        ("EXP(v0, v0)", "EXP must have 1 positional arguments"),
        ("EXP(x=v0)", "EXP must have 1 positional arguments"),
        ("v0 + 'a'", "a constant must be a number, got 'a'"),
        ("v0 + True", "a constant must be a number, got True"),
        ("v0 + beta", "unknown name 'beta'"),
        ("v0 + v1", "unknown name 'v1'"),
        ("v0 + out", "fwd must not read 'out'"),
        ("v0 + g", "unknown name 'g'"),
        ("v0 +", "is not an expression"),
        ("", "is not an expression"),
    ],
)
def test_expressions_outside_the_language_name_the_op(fwd, text):
    with pytest.raises(ValueError, match=rf"^\[bad\] .*({text})"):
        row(fwd)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"let": {"t": "v0 + out"}}, "unknown name 'out'"),
        ({"let": {"t": "u", "u": "v0"}}, "unknown name 'u'"),
        ({"let": {"out": "v0"}}, "must have lower-case names that are not taken, got 'out'"),
        ({"params": {"g": 1.0}}, "must have lower-case names that are not taken, got 'g'"),
        ({"params": {"Alpha": 1.0}}, "must have lower-case names that are not taken, got 'Alpha'"),
        ({"vjp": ("g * gamma",)}, "unknown name 'gamma'"),
        ({"vjp": ("g ** 2",)}, "Pow is not"),
        ({"inputs": ("a", "b")}, "one name per vjp"),
    ],
)
def test_columns_are_checked_as_well(columns, text):
    with pytest.raises(ValueError, match=rf"^\[bad\] .*{text}"):
        row(**{"fwd": "v0", **columns})


def test_names_of_ops():
    with pytest.raises(ValueError, match="the name of an op must consist of lower-case letters"):
        Pointwise("Bad name", "v0", ("g",), np.square)


def test_a_reduction_is_checked_too():
    with pytest.raises(ValueError, match=r"^\[bad\] 'v1': unknown name 'v1'"):
        Reduction("bad", "v0 + v1", "0", np.sum, None, map="v1")
    with pytest.raises(ValueError, match=r"^\[bad\] 'v0 \+ w': unknown name 'w'"):
        Reduction("bad", "v0 + w", "0", np.sum, None)


def test_names_are_taken_once():
    with pytest.raises(ValueError, match=r"^\[add\] an op of this name must not exist yet"):
        register(Pointwise("add", "v0 + v1", ("g", "g"), np.add))
    with pytest.raises(ValueError, match=r"^\[swish\] an op of this name must not exist yet"):
        register(Pointwise("swish", "v0", ("g",), np.abs))
    with pytest.raises(ValueError, match=r"^\[add\] an op of this name must not exist yet"):
        alias("add", "sub")
    assert lookup_op("swish") is REGISTRY["silu"]


def test_what_backward_keeps_is_read_off_the_formula():
    names = ("add", "relu", "exp", "log", "div", "sigmoid", "silu", "mul", "where", "rsqrt")
    assert {name: set(REGISTRY[name].saved()) for name in names} == {
        "add": set(), "relu": {"out"}, "exp": {"out"}, "log": {"v0"}, "div": {"out", "v1"}, "sigmoid": {"out"}, "silu": {"v0"},
        "mul": {"v0", "v1"}, "where": {"v0"}, "rsqrt": {"out"},
    }  # fmt: skip
    assert REGISTRY["sum"].saved() == frozenset()
    assert REGISTRY["amax"].saved() == {"x", "out"}


def test_dtypes_are_read_off_the_formula():
    names = ("add", "div", "exp", "eq", "isnan", "relu", "logical_not", "leaky_relu", "softplus")
    results = ("same", "float", "float", "bool", "bool", "same", "bool", "same", "float")
    assert tuple(REGISTRY[name].result for name in names) == results
    assert REGISTRY["where"].promoting == (1, 2)
    assert REGISTRY["logical_and"].promoting == (0, 1)


def test_samples_are_data():
    sample = S((2, 3), (4,), None, [(1,), (2,)], dtypes=("float32", "int64", "", "float32"), low=(0, 2, 0, 0), high=(1, 5, 0, 1))
    a, b, c, d = sample.arrays()
    assert a.dtype == np.float32 and a.shape == (2, 3) and c is None
    assert b.dtype == np.int64 and b.min() >= 2 and b.max() < 5
    assert [x.shape for x in d] == [(1,), (2,)]
    again = S((2, 3)).arrays()[0]
    np.testing.assert_array_equal(again, S((2, 3)).arrays()[0])
    assert S((2,)).arrays(dtype="float64")[0].dtype == np.float64


def test_structured_rows_read_their_inputs_from_the_annotations():
    def vjp(F, g, x_shape, w, axis):
        return None

    def scale(x: Tensor, w: Tensor | None = None, axis: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Doc."""
        return x

    op(vjp=vjp, ref=None, name="scale_for_test")(scale)
    try:
        made = REGISTRY["scale_for_test"]
        assert made.inputs == ("x", "w") and made.saved() == {"w"} and made.doc == "Doc." and made.differentiable
        assert made.bind(1, axis=3) == ((1, None), {"axis": 3})
        with pytest.raises(ValueError, match=r"^\[twice\] its vjp has the unknown parameter 'y'"):
            op(vjp=lambda F, y: None, ref=None, name="twice")(scale)
        with pytest.raises(ValueError, match=r"^\[twice\] the first parameter of its vjp must be F"):
            op(vjp=lambda g: None, ref=None, name="twice")(scale)
    finally:
        unregister("scale_for_test")


def test_a_row_registered_at_run_time_is_an_op(device):
    made = Pointwise(
        "smish", "v0 * t", ("g * (t + v0 * (1 - t * t) * k * s / (1 + s))",), lambda x, k: x * np.tanh(k * np.log1p(1 / (1 + np.exp(-x)))),
        let={"e": "EXP(-ABS(v0))", "s": "WHERE(v0 >= 0, 1, e) / (1 + e)", "t": "TANH(k * LOG1P(s))"}, params={"k": 1.0},
        doc="One row.",
    )  # fmt: skip
    register(made)
    try:
        x = np.linspace(-4, 4, 1037).astype(np.float32)
        t = Tensor.from_host(device.queue, x)
        np.testing.assert_allclose(ops.smish(t, 2.0).to_host(), made.ref(x.astype(np.float64), 2.0), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(ops.smish(t).to_host(), made.ref(x.astype(np.float64), 1.0), rtol=2e-5, atol=1e-6)
        assert ops.smish.__doc__ == "One row." and "smish" in dir(ops)
        g = Tensor.from_host(device.queue, np.ones_like(x))
        (grad,) = run_vjp(made, g, None, (t,), {"k": 1.0}, (True,))
        assert grad.shape == x.shape and np.isfinite(grad.to_host()).all()
    finally:
        unregister("smish")
    with pytest.raises(AttributeError, match="smish"):
        _ = ops.smish


def test_a_reduction_registered_at_run_time_is_an_op(device):
    register(Reduction("hypotenuse", "SQRT(v0 * v0 + v1 * v1)", "0", lambda x, axis=None: np.sqrt((x * x).sum(axis)), None, map="ABS(v0)"))
    try:
        x = np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32)
        t = Tensor.from_host(device.queue, x)
        for axis in (0, 1, None):
            np.testing.assert_allclose(ops.hypotenuse(t, axis=axis).to_host(), np.sqrt((x.astype(float) ** 2).sum(axis)), rtol=1e-5)
    finally:
        unregister("hypotenuse")


def test_ops_have_no_tape(device):
    x = Tensor.from_host(device.queue, np.ones((3, 2), np.float32), requires_grad=True)
    for y in (ops.exp(x), ops.add(x, 1.0), ops.gelu(x, "tanh"), ops.sum(x, axis=0), ops.cumsum(x, axis=0), ops.cast(x, "float16")):
        assert y.grad_fn is None and not y.requires_grad


def test_every_row_says_what_it_is():
    for name, made in REGISTRY.items():
        assert made.doc, name
        assert made.amp in ("half", "float", "wide", "keep"), name
        assert made.name == name


@pytest.mark.parametrize("name", ["linear", "softmax", "matmul"])
def test_a_forgotten_return_is_told(name):
    with pytest.raises(
        TypeError, match=rf"\[{name}\] the first argument must be a tensor, got None; check that the function before returns"
    ):
        ops.function(name)(None, np.ones((3, 3), np.float32))


def test_one_axis_means_one(device):
    for made in (ops.cumsum(Tensor.full((), 2.5), axis=0), ops.cumsum(Tensor.full((), 2.5), axis=-1, reverse=True)):
        assert (made.shape, made.item()) == ((), 2.5)  # a number has an axis to walk along, as in torch
    with pytest.raises(ShapeError, match=r"\[cumsum\] axis must be one integer; axis=\(0, 1\)"):
        ops.cumsum(np.ones((2, 3), np.float32), axis=(0, 1))
