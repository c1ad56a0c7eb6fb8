"""Random expression graphs of 10 to 30 ops: values and gradients on every device against the NumPy backend."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import netcl.autograd as ag
from netcl.core.device import manager

ROWS, COLUMNS = 5, 7
#: Ops that keep values within a few units, so that rounding stays comparable however they are stacked.
UNARY = {
    "tanh": ag.tanh,
    "sigmoid": ag.sigmoid,
    "sin": ag.sin,
    "softplus": lambda x: ag.softplus(ag.tanh(x)),
    "gelu": lambda x: ag.gelu(ag.sin(x)),
    "halved": lambda x: x * 0.5,
    "from two": lambda x: 2.0 - ag.tanh(x),
    "rsqrt": lambda x: ag.rsqrt(x * x + 1.0),
    "row mean": lambda x: x - ag.mean(x, axis=1, keepdims=True),
    "column sum": lambda x: ag.tanh(x + ag.sum(x, axis=0, keepdims=True) * 0.1),
    "softmax": lambda x: ag.softmax(x, axis=1),
    "logsumexp": lambda x: ag.tanh(x - ag.logsumexp(x, axis=1, keepdims=True)),
    "there and back": lambda x: ag.permute(ag.tanh(ag.permute(x, (1, 0))), (1, 0)),
    "reshaped": lambda x: ag.reshape(ag.sin(ag.reshape(x, (COLUMNS, ROWS))), (ROWS, COLUMNS)),
    "gram": lambda x: ag.tanh(ag.matmul(ag.matmul(x, ag.permute(x, (1, 0))), x) * 0.05),
}
BINARY = {
    "add": lambda a, b: (a + b) * 0.5,
    "sub": lambda a, b: (a - b) * 0.5,
    "mul": lambda a, b: ag.tanh(a) * ag.tanh(b),
    "div": lambda a, b: ag.tanh(a) / (b * b + 1.0),
    "where": lambda a, b: ag.where(a > 0.1, a, b),
    "lerp": lambda a, b: ag.lerp(a, b, 0.3),
    "atan2": lambda a, b: ag.atan2(a, b * b + 0.5),
}

step = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 1000), st.integers(0, 1000))


def run(steps, leaves):
    """The graph over leaves: each step takes earlier values; everything made counts into the result."""
    values = list(leaves)
    for name, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
    total = values[-1]
    for value in values[len(leaves) : -1]:
        total = total + value * 0.1
    return total


def evaluate(steps, arrays, queue):
    leaves = [ag.tensor(a, requires_grad=True, queue=queue) for a in arrays]
    out = run(steps, leaves)
    out.sum().backward()
    return out.to_host(), [np.zeros(a.shape) if leaf.grad is None else leaf.grad.to_host() for a, leaf in zip(arrays, leaves, strict=True)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(steps=st.lists(step, min_size=10, max_size=30), seed=st.integers(0, 2**16))
def check(queue, steps, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32) for _ in range(3)]
    value, grads = evaluate(steps, arrays, queue)
    wanted, wanted_grads = evaluate(steps, arrays, manager.default("cpu").queue)
    np.testing.assert_allclose(value, wanted, rtol=2e-4, atol=2e-4)
    scale = max(1.0, *(float(np.abs(g).max()) for g in wanted_grads))
    for got, want in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3 * scale)


def test_random_graphs_agree_with_numpy(cl_device):
    check(cl_device.queue)


@pytest.mark.parametrize("name", sorted({*UNARY, *BINARY}))
def test_every_piece_has_a_right_gradient(name, device):
    rng = np.random.default_rng(3)
    values = [rng.uniform(-1, 1, (ROWS, COLUMNS)) for _ in range(1 if name in UNARY else 2)]
    inputs = [ag.tensor(v, requires_grad=True, queue=device.queue) for v in values]
    assert ag.gradcheck(UNARY.get(name) or BINARY[name], inputs)
