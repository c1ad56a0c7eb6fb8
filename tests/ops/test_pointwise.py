"""What samples of a row cannot show: ties, zeros under powers, casts, extreme parameters."""

import math

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import selftest
from netcl.core.errors import DtypeError
from netcl.core.kernels.primitives import build_elementwise_kernel
from netcl.core.tensor import Tensor
from tests.conftest import eager_fusion


def gradients(device, op, *values, **params):
    leaves = [ag.tensor(np.array(v, np.float32), requires_grad=True, queue=device.queue) for v in values]
    op(*leaves, **params).sum().backward()
    return [leaf.grad.tolist() for leaf in leaves]


@pytest.mark.parametrize("op", [ag.maximum, ag.minimum], ids=["maximum", "minimum"])
def test_ties_share_the_gradient(op, device):
    assert gradients(device, op, [1.0, 2.0], [1.0, 2.0]) == [[0.5, 0.5], [0.5, 0.5]]
    high, low = ([1.0, 0.0], [0.0, 1.0]) if op is ag.maximum else ([0.0, 1.0], [1.0, 0.0])
    assert gradients(device, op, [3.0, 1.0], [1.0, 3.0]) == [high, low]


def test_powers_of_zero(device):
    """As torch has them: d/dx x^0 is 0, d/dx 0^1 is 1, d/dx 0^2 is 0, and d/dp 0^p is 0 for p above 0."""
    base, exponent = gradients(device, ag.pow, [0.0, 0.0, 0.0, 3.0], [0.0, 1.0, 2.0, 0.0])
    assert base == [0.0, 1.0, 0.0, 0.0]
    assert exponent[1:3] == [0.0, 0.0]
    assert exponent[3] == pytest.approx(np.log(3.0))
    assert gradients(device, lambda x: ag.pow(x, 2.0), [-3.0])[0] == [-6.0]
    assert gradients(device, lambda x: ag.pow(x, 3.0), [-2.0])[0] == [pytest.approx(12.0)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_gradient_of_a_cast_is_cast_back(dtype, device):
    x = ag.tensor(np.array([1.5, -2.0], np.float32), requires_grad=True, queue=device.queue)
    (ag.cast(x, dtype) * 2.0).sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == ("float32", [2.0, 2.0])


def test_large_arguments_neither_overflow_nor_lose_their_gradient(device):
    big = [-200.0, 200.0]
    assert gradients(device, ag.elu, big)[0] == [0.0, 1.0]
    assert gradients(device, ag.sigmoid, big)[0] == [0.0, 0.0]
    assert gradients(device, ag.softplus, big)[0] == [0.0, 1.0]
    assert gradients(device, ag.log_sigmoid, big)[0] == [1.0, 0.0]
    assert ag.softplus(ag.tensor(big, queue=device.queue)).tolist() == [0.0, 200.0]
    assert ag.logsumexp(ag.tensor([1000.0, 1000.0], queue=device.queue)).item() == pytest.approx(1000 + np.log(2))


def test_numbers_that_are_equal_but_not_the_same(device):
    x = ag.tensor(np.array([1.0, -1.0], np.float32), queue=device.queue)
    for number in (2.0, 2.0, 0.0, -0.0, 0.0, True, 1, 1.0):  # a number that is set already is not set again
        found = (x * number).to_host()
        assert np.array_equal(found, x.to_host() * np.float32(number))
        assert np.array_equal(np.signbit(found), np.signbit(x.to_host() * np.float32(number)))


def test_gradients_where_a_formula_divides_by_zero_are_torchs(device):
    assert gradients(device, lambda x: ag.std(x, axis=1), [[5.0, 5.0, 5.0]]) == [[[0.0, 0.0, 0.0]]]
    assert gradients(device, ag.atan2, [0.0], [0.0]) == [[0.0], [0.0]]
    assert np.isnan(gradients(device, ag.logsumexp, [np.nan, 1.0])).all()


def test_a_tensor_without_axes_widens_none_of_its_kind(device):
    half = ag.tensor(np.ones(3), "float16", requires_grad=True, queue=device.queue)
    scale = ag.tensor(0.5, requires_grad=True, queue=device.queue)
    product = half * scale
    product.sum().backward()
    assert (product.dtype, half.grad.dtype, scale.grad.dtype, scale.grad.item()) == ("float16", "float16", "float32", 3.0)
    whole = ag.tensor([3, 5], "int32", queue=device.queue)
    assert ((half * np.float32(2)).dtype, (whole * scale).dtype, (whole + ag.tensor(1, queue=device.queue)).dtype) == (
        "float16", "float32", "int32",
    )  # fmt: skip
    assert (ag.tensor(1, "int32", queue=device.queue) * ag.tensor(2, queue=device.queue)).dtype == "int64"


def _one(device):
    return ag.tensor(np.ones((1, 1), np.float32), queue=device.queue)


RELUS = {
    "relu": lambda x, device: ag.relu(x),
    "compiled": lambda x, device: ag.jit_compile(lambda x: ag.relu(x * 1.0))(x),
    "expression": lambda x, device: ag.elementwise_unary(x, "RELU(x)"),
    "row": lambda x, device: ag.jit_compile(lambda x: ag.relu(x + 0 * ag.sum(x * 0 == 0, axis=-1, keepdims=True)))(x),
    "linear": lambda x, device: ag.linear(x.reshape((-1, 1)), _one(device), activation="relu").reshape(x.shape),
    "pending matmul": lambda x, device: ag.relu(x.reshape((-1, 1)) @ _one(device)).reshape(x.shape),
    "pending conv2d": lambda x, device: ag.relu(ag.conv2d(x.reshape((1, 1, 1, -1)), _one(device).reshape((1, 1, 1, 1)))).reshape(x.shape),
    "conv2d_relu": lambda x, device: ag.conv2d_relu(x.reshape((1, 1, 1, -1)), _one(device).reshape((1, 1, 1, 1))).reshape(x.shape),
}


@pytest.mark.parametrize("name", RELUS)
def test_every_relu_treats_infinities_zeros_and_nan_alike(device, name):
    """As torch: +0 for -Inf and negative numbers, NaN stays; the gradient is 0 up to 0 and 1 above and at NaN."""
    values = np.array([-np.inf, -3.0, 0.0, 2.0, np.inf, np.nan] * 3, np.float32)
    with eager_fusion(1):
        x = ag.tensor(values, requires_grad=True, queue=device.queue)
        y = RELUS[name](x, device)
        y.sum().backward()
    np.testing.assert_array_equal(y.to_host(), np.array([0.0, 0.0, 0.0, 2.0, np.inf, np.nan] * 3))
    assert not np.signbit(y.to_host()[:3]).any()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 3


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_an_infinite_angle_changes_no_other(device, name):
    values = np.tile(np.array([np.inf, 0.0067634, 0.003, -7.5e-5, -0.0, 1.0, 2.5, 1e-9, 0.015, -np.inf, 0.0157, 1e9], np.float32), 5)
    x = ag.tensor(values, requires_grad=True, queue=device.queue)
    y = getattr(ag, name)(x)
    with np.errstate(invalid="ignore"):
        wanted = getattr(np, name)(values.astype(np.float64))
    wanted[np.isinf(values)] = np.nan
    np.testing.assert_allclose(y.to_host(), wanted, rtol=2e-6)
    assert np.signbit(y.to_host()[4]) == np.signbit(wanted[4])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_divide"])
def test_a_special_dividend_changes_no_other(device, name, dtype):
    a = np.repeat([1.46952615, -4.03264364, 2.5, -1e-3], 8).astype(dtype)
    b = np.repeat([1.0118773, 2.18624778, -0.7, 3.0], 8).astype(dtype)
    a[::8], a[1::8], a[2::8], a[3::8] = [0.0, -0.0, 0.0, -0.0], np.inf, np.nan, 1e-30
    y = getattr(ag, name)(*(Tensor.from_host(device.queue, v, dtype) for v in (a, b))).to_host()
    with np.errstate(invalid="ignore"):
        wanted = getattr(np, name)(a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(y, wanted, rtol=1e-5 if dtype == "float32" else 1e-12)


def test_relu_of_the_primitive_preamble_is_that_of_the_op(cl_device):
    _, kernel = build_elementwise_kernel(cl_device.context, "rectified", 1, "RELU(v0)")
    x = ag.tensor(np.array([-np.inf, -3.0, 0.0, 2.0, np.inf, np.nan], np.float32), queue=cl_device.queue)
    y = ag.tensor(np.full(6, 7.0, np.float32), queue=cl_device.queue)
    kernel(cl_device.queue, (6,), None, x.buffer, y.buffer, np.int32(6))
    np.testing.assert_array_equal(y.to_host(), [0.0, 0.0, 0.0, 2.0, np.inf, np.nan])
    assert not np.signbit(y.to_host()[:3]).any()


def test_gradient_of_mish_far_from_0(device):
    assert gradients(device, ag.mish, [1e5, 1e30, -1e5, -1e30]) == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("other", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logaddexp2_promotes_as_logaddexp_and_rounds_once(device, dtype, other):
    a, b = (netcl.tensor(values, dtype=kind, device=device) for values, kind in (([0, 1, 3, -7], dtype), ([1, 1, 2, 1], other)))
    out = ag.logaddexp2(a, b)
    assert out.dtype == ag.logaddexp(a, b).dtype == netcl.promote_types(dtype, other)
    wide = Tensor.from_host(device.queue, np.logaddexp2(np.float32([0, 1, 3, -7]), np.float32([1, 1, 2, 1])))
    tolerance = 1e-6 if out.dtype == "float32" else 1e-7
    np.testing.assert_allclose(out.to_host(), wide.to(out.dtype).to_host(), rtol=tolerance)


SMOOTH = {"sigmoid": 0.0, "silu": 0.5, "softplus": 0.25, "log_sigmoid": -0.25, "mish": 0.64, "gelu": 0.7978846}  # second derivatives at 0


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative_at_0(device, name):
    for options in [{"approximate": "tanh"}, {}] if name == "gelu" else [{}]:
        x = ag.tensor(np.zeros(3, np.float32), requires_grad=True, queue=device.queue)
        (first,) = ag.grad(getattr(ag, name)(x, **options).sum(), x, create_graph=True)
        (second,) = ag.grad(first.sum(), x)
        np.testing.assert_allclose(second.to_host(), SMOOTH[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2"])
def test_second_derivative_where_both_are_equal(device, name):
    scale = np.log(2) if name == "logaddexp2" else 1.0
    a, b = (ag.tensor(np.float32([0, 2, -9]), requires_grad=True, queue=device.queue) for _ in range(2))
    (first,) = ag.grad(getattr(ag, name)(a, b).sum(), a, create_graph=True)
    both = ag.grad(first.sum(), [a, b])
    np.testing.assert_allclose([t.to_host() for t in both], scale * np.array([[0.25] * 3, [-0.25] * 3]), rtol=1e-6)


def test_logaddexp_of_equal_infinities(device):
    out = ag.logaddexp(*(ag.tensor(np.float32([np.inf, -np.inf, 3e38]), queue=device.queue) for _ in range(2)))
    np.testing.assert_array_equal(out.to_host(), np.float32([np.inf, -np.inf, 3e38]))


def test_gradient_of_logit_at_the_ends(device):
    assert gradients(device, ag.logit, [0.0, 0.5, 1.0]) == [[np.inf, 4.0, np.inf]]


@pytest.mark.parametrize("zeros", [0, 1, 2, 4])
def test_second_derivatives_of_a_product_with_zeros(device, zeros):
    values = np.float32([2.0, -3.0, 0.5, 5.0])
    values[:zeros] = 0
    x = ag.tensor(values, requires_grad=True, queue=device.queue)
    (first,) = ag.grad(ag.prod(x), x, create_graph=True)
    (second,) = ag.grad(first.sum(), x)
    rest = lambda *left_out: np.prod(np.delete(values, left_out))  # noqa: E731
    np.testing.assert_allclose(first.to_host(), [rest(i) for i in range(4)], rtol=1e-6)
    np.testing.assert_allclose(second.to_host(), [sum(rest(i, j) for j in range(4) if j != i) for i in range(4)], rtol=1e-6)


def test_gradient_of_a_product_over_two_axes(device, rng):
    values = rng.uniform(0.5, 1.5, (2, 3, 4)).astype(np.float32)
    x = ag.tensor(values, requires_grad=True, queue=device.queue)
    ag.prod(x, axis=(0, 2)).sum().backward()
    np.testing.assert_allclose(x.grad.to_host(), values.prod((0, 2), keepdims=True) / values, rtol=1e-5)


OUT_OF_RANGE = {
    "where": lambda x: netcl.where(x > 2, x, 300),
    "maximum": lambda x: netcl.maximum(x, 300),
    "clamp": lambda x: x.clamp(max=-1),
    "floor_divide": lambda x: x // -1,
    "remainder": lambda x: x % -3,
    "masked_fill": lambda x: x.masked_fill(x > 2, -1),
    "scatter": lambda x: x.scatter(0, netcl.tensor([0]), 300),
    "setitem": lambda x: x.__setitem__(0, 300),
    "from_host": lambda x: netcl.tensor([300], dtype="uint8"),
}


@pytest.mark.parametrize("op", OUT_OF_RANGE)
def test_numbers_that_become_narrow_elements_must_fit(op, device):
    x = Tensor.from_host(np.array([1, 5, 200], np.uint8))
    for _ in range(2):
        with pytest.raises(DtypeError, match="must be representable in uint8"):
            OUT_OF_RANGE[op](x)
    assert netcl.where(x > 2, x, 255).tolist() == [255, 5, 200]
    with pytest.raises(DtypeError, match="must be representable in uint8"):
        netcl.where(x > 2, x, 256)  # with the plan of the call before
    assert (x + 300).tolist() == [45, 49, 244]  # wraps around, as in torch


def test_integers_of_a_list_must_fit_in_int64():
    with pytest.raises(DtypeError, match=r"\[from_host\] integers must be representable in int64; lowest=1.0, highest=9.22"):
        netcl.tensor([2**63, 1])
    assert netcl.tensor([2.0**63, 1]).dtype == "float32" and netcl.tensor([2**63, 1], dtype="uint64").tolist() == [2**63, 1]


@pytest.mark.parametrize(
    ("dtype", "least", "powers"), [("float16", 2.0**-24, 39), ("float32", 2.0**-149, 276), ("bfloat16", 2.0**-126, 250)]
)
def test_ldexp_reaches_every_number(dtype, least, powers, device):
    with netcl.device(device):
        x = netcl.tensor([least, 0.0, math.inf, 1.0], dtype=dtype)
        assert netcl.ldexp(x, netcl.tensor([powers])).tolist()[:3] == [least * 2.0**powers, 0.0, math.inf]
        assert netcl.ldexp(x, netcl.tensor([-(2**40)])).tolist() == [0.0, 0.0, math.inf, 0.0]


def test_powers_of_one_half_are_those_of_any_exponent(device):
    x = Tensor.from_host(np.array([-np.inf, -0.0, -1.0, 4.0, np.inf], np.float32))
    expected = [np.inf, 0.0, np.nan, 2.0, np.inf]
    for half in (0.5, Tensor.from_host(np.full(5, 0.5, np.float32))):
        np.testing.assert_array_equal((x**half).to_host(), expected)
        assert not np.signbit((x**half).to_host()[1])


def test_erfinv_of_float64_keeps_its_digits_near_one(device):
    if not selftest.supports(device, "float64"):
        pytest.skip("the device has no float64")
    x = np.array([1e-9, -0.5, 0.99, -1 + 1e-5, 1 - 1e-10, 1 - 2.0**-53, 1.0])
    want = [8.86226925452758e-10, -0.47693627620447, 1.8213863677184496, -3.123413274341571, 4.572824958544925, 5.8635847487551676, np.inf]
    found = ag.erfinv(Tensor.from_host(device.queue, x, "float64")).to_host()
    np.testing.assert_allclose(found, want, rtol=1e-14)


def test_bounds_are_numbers_or_tensors(device):
    x, bound = [1.0, 5.0], [3.0, 2.0]
    with netcl.device(device):
        assert netcl.clamp_max(netcl.tensor(x), netcl.tensor(bound)).tolist() == [1.0, 2.0]
        assert netcl.tensor(x).clamp_min_(netcl.tensor(2.0)).tolist() == [2.0, 5.0]
        assert netcl.clamp_min(netcl.tensor([1, 5]), 2.5).tolist() == [2.5, 5.0]
        with pytest.raises(TypeError, match=r"\[leaky_relu\] negative_slope must be a number, got a tensor; shape=\(2,\); pass x.item\(\)"):
            netcl.leaky_relu(netcl.tensor(x), netcl.tensor(bound))
    assert gradients(device, ag.clamp_max, x, bound) == [[1.0, 0.0], [0.0, 1.0]]


def test_a_correction_that_is_none_is_one(device):
    with netcl.device(device):
        x = netcl.tensor([1.0, 2.0, 4.0], requires_grad=True)
        np.testing.assert_allclose(x.detach().std(correction=None).item(), np.std([1.0, 2.0, 4.0], ddof=1), rtol=1e-6)
        assert netcl.std_mean(x.detach(), correction=None)[0].item() == x.detach().std().item()
        x.var(correction=None).backward()
        np.testing.assert_allclose(x.grad.to_host(), np.array([1.0, 2.0, 4.0]) - 7 / 3, rtol=1e-5)
