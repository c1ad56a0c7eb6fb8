"""Optimizer state in shares under a GradScaler: ranks see one verdict and one norm, though each steps with a part of the gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from netcl import amp, optim
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.distributed import ShardedOptimizer, thread_worlds

GRADIENTS = ([3.0, 4.0], [np.inf, 1.0], [1.0, 2.0])  # of the first parameter; the second always has ones


def _adam(params):
    return optim.Adam(params, lr=0.1)


def _dampened(params):
    return optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


def _trained(make, world=None):
    queue = manager.default("cpu").queue
    params = [Tensor.from_host(queue, np.full(2, 5.0, np.float32), requires_grad=True) for _ in range(2)]
    optimizer = make(params) if world is None else ShardedOptimizer(params, make, world)
    scaler = amp.GradScaler(init_scale=8.0)
    for gradient in GRADIENTS:
        for p, values in zip(params, (gradient, [1.0, 1.0]), strict=True):
            p.grad = Tensor.from_host(queue, np.asarray(values, np.float32) * np.float32(scaler.scale))
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return [*[p.to_host() for p in params], np.float32(scaler.scale)]


@pytest.mark.parametrize("make", [_adam, _dampened])
def test_an_overflow_in_one_share_skips_the_step_on_all_ranks(make):
    alone = _trained(make)
    assert alone[-1] == 4.0  # one overflow
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda world: _trained(make, world), thread_worlds(2, timeout=100)))
    for found in ranks:
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
