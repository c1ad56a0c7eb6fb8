"""``grad_fn``: what produced a tensor, as a function from its gradient to those of its inputs."""

from __future__ import annotations

import numpy as np
import pytest

import netcl.autograd as ag
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor


def leaf(device, *values, requires_grad=True):
    return Tensor.from_host(device.queue, np.array(values, np.float32), requires_grad=requires_grad)


def test_leaves_have_none(device):
    x = leaf(device, 1, 2)
    assert x.grad_fn is None and x.detach().grad_fn is None
    with ag.no_grad():
        assert ag.mul(x, x).grad_fn is None


def test_it_gives_the_gradients_of_the_inputs(device):
    x, y, g = leaf(device, 1, 2), leaf(device, 3, 4), leaf(device, 10, 100, requires_grad=False)
    product = ag.mul(x, y)
    for _ in range(2):  # nothing is released
        to_x, to_y = product.grad_fn(g)
        assert (to_x.tolist(), to_y.tolist()) == ([30, 400], [10, 200])
    assert x.grad is None and y.grad is None and to_x.grad_fn is None
    product.backward(g)
    assert (x.grad.tolist(), y.grad.tolist()) == ([30, 400], [10, 200])


def test_only_one_op_back(device):
    x = leaf(device, 1, 2)
    result = ag.exp(ag.mul(x, 0.0))
    (inner,) = result.grad_fn(leaf(device, 5, 6, requires_grad=False))
    assert inner.tolist() == [5, 6]


def test_inputs_that_require_none_get_none_and_broadcasts_are_summed(device):
    x, y = leaf(device, 2), leaf(device, 3, 4, requires_grad=False)
    to_x, to_y = ag.mul(x, y).grad_fn(leaf(device, 10, 100, requires_grad=False))
    assert to_x.shape == (1,) and to_x.tolist() == [430] and to_y is None


def test_several_outputs(device):
    x = leaf(device, 1, 2, 3, 4)
    first, second = ag.split(x, 2)
    ones = leaf(device, 1, 1, requires_grad=False)
    assert first.grad_fn is second.grad_fn
    (both,) = first.grad_fn(None, ones)
    assert both.tolist() == [0, 0, 1, 1]
    with pytest.raises(ShapeError, match=r"\[split\] expected one gradient or None for each of its 2 outputs, .*; given=1"):
        first.grad_fn(ones)


def test_repr_names_the_op(device):
    assert repr(ag.mul(leaf(device, 1, 2), 2.0).grad_fn) == "<mul: [(2,)]>"


def test_mistakes_are_told(device):
    x = leaf(device, 1, 2)
    y = ag.exp(x)
    with pytest.raises(ShapeError, match=r"\[exp\] a gradient must be a tensor of the output's shape; given=\(3,\), output=\(2,\)"):
        y.grad_fn(leaf(device, 1, 2, 3, requires_grad=False))
    with pytest.raises(ShapeError, match="given=ndarray"):
        y.grad_fn(np.ones(2, np.float32))
    ag.sum(y).backward()
    with pytest.raises(RuntimeError, match=r"\[exp\] backward has already released the memory of this graph; pass retain_graph=True"):
        y.grad_fn(leaf(device, 1, 1, requires_grad=False))


def test_a_function_of_your_own(device):
    class Twice(ag.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    out = Twice.apply(leaf(device, 1, 2))
    assert out.grad_fn(leaf(device, 3, 5, requires_grad=False))[0].tolist() == [6, 10]
    assert "Twice" in repr(out.grad_fn)
