"""Every row of the op table, forward and backward, inside a compiled function: the same values as without, call by call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import ops, selftest
from netcl.core.tensor import Tensor
from netcl.engine import registry

CALLS = 5  # one to see, two to record, two to replay
NOT_REPLAYED = {"nonzero": "it reads values on the host"}  # how many elements it has is known only when they are counted
ROWS = sorted(name for name in ops.names() if any(True for _ in selftest.cases(registry.lookup_op(name))))


def rolled(values: Any, by: int) -> Any:
    """The same values in other places, so that every call has its own and all are in the row's domain."""
    if isinstance(values, list):
        return [rolled(part, by) for part in values]
    return np.roll(values.reshape(-1), by).reshape(values.shape) if isinstance(values, np.ndarray) and values.size else values


@pytest.mark.matrix
@pytest.mark.parametrize("name", ROWS)
def test_row(cl_device, name):
    filled = (case for case in selftest.cases(registry.lookup_op(name)) if any(isinstance(x, np.ndarray) and x.size for x in case.inputs))
    case = next(filled, None)
    if case is None:
        pytest.skip("the row takes no arrays")

    def forward_and_backward(*inputs):
        given = [x.detach().requires_grad_() if isinstance(x, Tensor) and x.dtype == "float32" else x for x in inputs]
        out = getattr(ag, name)(*given, **case.kwargs)
        outputs = [part for part in (out if isinstance(out, tuple | list) else [out]) if isinstance(part, Tensor)]
        leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        gradients = ag.grad(ag.sum(outputs[0]), leaves, allow_unused=True) if leaves and outputs[0].requires_grad else ()
        return [part.detach() for part in (*outputs, *gradients) if part is not None]

    compiled = netcl.compile(forward_and_backward)
    for i in range(CALLS):
        inputs = [selftest._sent_to_device(rolled(values, i), cl_device, "float32") for values in case.inputs]
        told = []
        for function in (forward_and_backward, compiled):
            netcl.manual_seed(i)
            told.append([part.to_host() for part in function(*inputs)])
        assert len(told[0]) == len(told[1])
        for want, got in zip(*told, strict=True):
            np.testing.assert_array_equal(got, want)
    if name in NOT_REPLAYED:
        assert compiled.graphs == [] and NOT_REPLAYED[name] in compiled.refused[0]
    else:
        assert len(compiled.graphs) == 1, compiled.refused


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_products_and_their_activations(cl_device, rng, activation, dtype):
    """An activation, and its gradient, may run in the kernel of a product; the values are those of eager code, to the bit."""
    weights = [Tensor.from_host(rng.normal(size=shape).astype("float32")).to(dtype).requires_grad_() for shape in [(9, 6), (5, 9)]]

    def step(x, more):
        hidden = getattr(ag, activation)(ag.linear(x, weights[0]))
        gradients = ag.grad((ag.linear(hidden, weights[1]) ** 2).sum(), [hidden, *weights] if more else weights)
        return [part.detach() for part in (hidden, *gradients)]

    for more in (False, True):
        compiled = netcl.compile(lambda x, more=more: step(x, more))
        for _ in range(CALLS):
            x = Tensor.from_host(rng.normal(size=(7, 6)).astype("float32")).to(dtype)
            for want, got in zip(step(x, more), compiled(x), strict=True):
                np.testing.assert_array_equal(got.to_host(), want.to_host())
        assert len(compiled.graphs) == 1, compiled.refused
        if activation == "relu" and not more:
            assert "relu" not in compiled.graphs[0].table()
