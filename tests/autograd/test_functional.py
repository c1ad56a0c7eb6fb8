"""Derivatives of functions: netcl.autograd.functional and netcl.func."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import netcl
from netcl import func, nn
from netcl.autograd import functional
from netcl.core.errors import ShapeError


@pytest.fixture(autouse=True)
def on_device(device):
    with netcl.device(device):
        yield


def cubes(x):
    return (x**3).sum() + x[0] * x[1]


POINT = [1.0, 2.0, 3.0]
SECOND = np.diag([6.0, 12.0, 18.0]) + np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])
ONES = np.ones(3, np.float32)


def test_products_with_jacobians_and_hessians():
    x, v = netcl.tensor(POINT), netcl.ones(3)
    assert np.allclose(functional.hessian(cubes, x), SECOND) and np.allclose(functional.jacobian(lambda t: t**2, x), np.diag([2, 4, 6]))
    made = functional.jacobian(lambda a, b: (a * b, a.sum()), (x, x))
    assert np.allclose(made[0][1], np.diag(POINT)) and np.allclose(made[1][0], 1) and not made[1][1].to_host().any()
    assert np.allclose(functional.jvp(lambda t: t**2, x, v)[1], [2, 4, 6]) and np.allclose(
        functional.vjp(lambda t: t**2, x, v)[1], [2, 4, 6]
    )
    for product in (functional.hvp, functional.vhp):
        value, made = product(cubes, x, v)
        assert value.item() == 38 and np.allclose(made, SECOND @ ONES) and not made.requires_grad
    with pytest.raises(ShapeError, match=r"\[hvp\] the function must return one value; shape=\(3,\)"):
        functional.hvp(lambda t: t**2, x, v)


def test_transforms_nest():
    x = netcl.tensor(POINT)
    assert np.allclose(func.grad(cubes)(x), [5, 13, 27]) and not func.grad(cubes)(x).requires_grad
    assert np.allclose(func.hessian(cubes)(x), SECOND) and np.allclose(func.jacfwd(func.jacrev(cubes))(x), SECOND)
    assert np.allclose(func.grad(lambda t: func.grad(cubes)(t).sum())(x), SECOND @ ONES)
    made, (value, extra) = func.grad_and_value(lambda a, b: ((a * b).sum(), b), argnums=(0, 1), has_aux=True)(x, x * 2)
    assert np.allclose(made[0], [2, 4, 6]) and np.allclose(made[1], POINT) and value.item() == 28 and extra.shape == (3,)
    out, pull = func.vjp(lambda a, b: {"y": a * b}, x, x)
    assert np.allclose(out["y"], [1, 4, 9]) and np.allclose(pull({"y": netcl.ones(3)})[1], POINT)
    assert np.allclose(func.jvp(netcl.square, (x,), (netcl.ones(3),))[1], [2, 4, 6])


def test_gradients_reach_parameters_that_a_function_reads():
    w = nn.Parameter([2.0])
    slope = func.grad(lambda x: (w * x * x).sum())(netcl.tensor([3.0]))
    slope.backward()
    assert (slope.tolist(), w.grad.tolist()) == ([12.0], [6.0])


def test_functions_are_mapped_over_dimensions():
    a = netcl.arange(6.0).reshape(2, 3)
    assert func.vmap(netcl.dot)(a, a).tolist() == [5.0, 50.0]
    assert func.vmap(netcl.dot, in_dims=(1, None))(a, netcl.ones(2)).tolist() == [3.0, 5.0, 7.0]
    assert func.vmap(lambda x: {"y": x * 2}, out_dims=1)(a)["y"].shape == (3, 2)
    assert func.vmap(lambda d, s: d["k"] * s, in_dims=({"k": 0}, None))({"k": a}, 2.0).tolist() == (a * 2).tolist()
    with pytest.raises(ShapeError, match=r"\[vmap\] the mapped dimensions must have one common size; sizes=\[2, 3\]"):
        func.vmap(netcl.add)(a, netcl.ones(3))


def test_random_numbers_of_mapped_functions(device):
    a = netcl.zeros(3, 4, device=device)
    mapped = functools.partial(func.vmap, lambda x: netcl.rand_like(x) + netcl.dropout(x + 1.0))
    netcl.manual_seed(0)
    before = netcl.rand_like(a[0]).tolist()
    for draws in (mapped(), func.vmap(mapped(), randomness="different"), func.vmap(mapped(randomness="different"))):
        with pytest.raises(RuntimeError, match=r"\[vmap\] the function must not draw random numbers"):
            draws(a)
    generator = netcl.Generator().manual_seed(1)
    with pytest.raises(RuntimeError, match=r"\[vmap\] the function must not draw random numbers"):
        func.vmap(lambda x: netcl.rand(2, generator=generator, device=device))(a)
    assert func.vmap(lambda x: netcl.nn.functional.dropout(x, training=False))(a).tolist() == a.tolist()
    same, other = mapped(randomness="same")(a).to_host(), mapped(randomness="different")(a).to_host()
    assert (same == same[0]).all() and (same[0] != other[0]).all() and (other[0] != other[1]).all()
    shared = func.vmap(lambda x: netcl.rand(2, generator=generator, device=device), randomness="same")(a).to_host()
    assert (shared == shared[0]).all()
    assert netcl.rand_like(a[0]).tolist() != before
    inner = func.vmap(lambda x: netcl.rand_like(x), randomness="same")
    nested = func.vmap(inner, randomness="different")(a).to_host()
    assert (nested == nested[:, :1]).all() and (nested[0] != nested[1]).all()


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda a: func.vmap(lambda x, y: x)(a, 2.0), "only tensors can be mapped; dim=0, given=float"),
        (lambda a: func.vmap(lambda x: x, in_dims=2)(a), "in_dims must be a dimension of the argument; dim=2"),
        (lambda a: func.vmap(lambda x: x, in_dims=({"a": 0, "c": 0},))({"a": a, "b": a}), "in_dims must be .* nested like the arguments"),
        (lambda a: func.vmap(lambda x: x, in_dims=(0, 0))(a), "in_dims must be an integer, None, or nested like the arguments"),
        (lambda a: func.vmap(lambda x: x, out_dims=(0, 0))(a), "out_dims must be an integer, None, or nested like the results"),
        (lambda a: func.vmap(lambda x: x, out_dims=None)(a), "the function must return tensors, which are stacked along out_dims"),
        (lambda a: func.vmap(lambda x: (x, 2.0))(a), "the function must return tensors, .*given=float"),
        (lambda a: func.vmap(lambda x: x)(a[:0]), "the mapped dimensions must not be empty"),
        (lambda a: func.vmap(lambda x: x, chunk_size=0), "chunk_size must be positive or None"),
        (lambda a: func.vmap(lambda x: x, randomness="any"), "randomness must be 'error', 'same' or 'different'"),
    ],
)
def test_arguments_that_cannot_be_mapped(call, text):
    with pytest.raises(ValueError, match=text):
        call(netcl.ones(2, 3))


def test_modules_are_called_with_other_parameters():
    layer = nn.Linear(2, 1)
    x, given = netcl.ones(3, 2), {"weight": netcl.full((1, 2), 2.0), "bias": netcl.ones(1)}
    before = layer.weight
    assert func.functional_call(layer, given, x).tolist() == [[5.0]] * 3 and layer.weight is before

    def loss(parameters, one):
        return func.functional_call(layer, parameters, (one[None],)).square().sum()

    each = func.vmap(func.grad(loss), in_dims=(None, 0))(given, x)
    assert np.allclose(each["weight"], np.full((3, 1, 2), 10.0)) and each["bias"].shape == (3, 1)
    twins = nn.Sequential(layer, nn.Linear(1, 2), layer)
    twins[1].weight.data.fill_(1.0)
    twins[1].bias.data.fill_(0.0)
    assert func.functional_call(twins, {f"0.{name}": value for name, value in given.items()}, x)[0].tolist() == [21.0]
    parameters, buffers = func.stack_module_state([layer, nn.Linear(2, 1)])
    assert parameters["weight"].shape == (2, 1, 2) and parameters["weight"].requires_grad and buffers == {}
    with pytest.raises(ValueError, match=r"must have a parameter or buffer 'wieght'; has=\['weight', 'bias'\]|\[weight, bias\]"):
        func.functional_call(layer, {"wieght": x}, x)


def test_strict_checks_are_done_or_refused():
    x, layer = netcl.tensor(POINT), nn.Linear(3, 1)
    for call in (functional.jacobian, functional.hessian, functional.vjp, functional.jvp, functional.hvp):
        with pytest.raises(NotImplementedError, match="strict must be False"):
            call(cubes, x, strict=True)
    with pytest.raises(NotImplementedError, match="strict must be False"):
        func.jvp(cubes, (x,), (x,), strict=True)
    with pytest.raises(ValueError, match=r"strict=True requires every parameter and buffer; missing=\['bias'\]"):
        func.functional_call(layer, {"weight": layer.weight}, x, strict=True)
    assert func.functional_call(layer, {"weight": layer.weight}, x).shape == (1,)


def test_a_direction_may_be_left_out_only_for_one_value():
    assert [t.tolist() for t in functional.jvp(netcl.square, netcl.tensor([3.0]))] == [[9.0], [6.0]]
    with pytest.raises(ValueError, match=r"v must be given unless the input is one value; shapes=\[\(3,\)\]"):
        functional.jvp(cubes, netcl.tensor(POINT))


def test_functional_call_of_tied_parameters():
    with netcl.device("cpu"):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        model[1].weight = model[0].weight
        model[0].weight.data.fill_(5.0)
        x, two = netcl.ones(1, 1), netcl.full((1, 1), 2.0)
        assert func.functional_call(model, {"0.weight": two}, x).item() == 4.0
        assert func.functional_call(model, {"0.weight": two}, x, tie_weights=False).item() == 10.0
        with pytest.raises(ValueError, match=r"\[functional_call\] '1.weight' is the same parameter as another name"):
            func.functional_call(model, {"0.weight": two, "1.weight": x}, x)
        with pytest.raises(ValueError, match=r"\[functional_call\] every name must be in one dictionary only"):
            func.functional_call(model, ({"0.weight": two}, {"0.weight": x}), x)


def test_functional_call_counts_the_batches_of_given_buffers():
    layer = nn.BatchNorm1d(1, momentum=None)
    given = {"running_mean": netcl.ones(1), "running_var": netcl.ones(1), "num_batches_tracked": netcl.tensor(3)}
    func.functional_call(layer, given, netcl.tensor([[4.0], [6.0]]))
    assert given["num_batches_tracked"].item() == 4 and given["running_mean"].item() == 2.0
    assert layer.num_batches_tracked.item() == 0 and layer.running_mean.item() == 0.0
