"""Optimizer state in shares under a GradScaler: ranks see one verdict and one norm, though each steps with a part of the gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from netcl import amp, optim
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.distributed import ShardedOptimizer, load_checkpoint, save_checkpoint, thread_worlds

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


def _listed(state):
    """A state dict with lists in place of tensors, which later steps change."""
    values = {}
    for number, own in state["state"].items():
        values[number] = {name: (value.dtype, value.tolist()) if isinstance(value, Tensor) else value for name, value in own.items()}
    return {"state": values, "param_groups": state["param_groups"]}


@pytest.mark.parametrize(("ranks", "make"), [(2, _adam), (3, _adam), (2, optim.AdamW8bit)])
def test_a_state_dict_is_that_of_one_optimizer_and_resumes_through_a_checkpoint(ranks, make, tmp_path):
    """Three ranks for two parameters: one has nothing to update."""

    def stepped(optimizer, params, steps):
        for _ in range(steps):
            for i, p in enumerate(params):
                p.grad = Tensor.from_host(p.queue, np.full(p.shape, i + 1.0, np.float32))
            optimizer.step()
        return optimizer

    def made():
        return [Tensor.from_host(manager.default("cpu").queue, np.ones(size, np.float32), requires_grad=True) for size in (3, 2)]

    def run(world):
        params = made()
        optimizer = stepped(ShardedOptimizer(params, make, world), params, 2)
        listed = _listed(optimizer.state_dict())
        save_checkpoint(tmp_path / "step.netcl", world=world, optimizer=optimizer, step=2)
        later = ShardedOptimizer(params, make, world)
        load_checkpoint(tmp_path / "step.netcl", world=world, optimizer=later)
        stepped(later, params, 1)
        return listed, params

    params = made()
    whole = stepped(make(params), params, 2)
    expected = _listed(whole.state_dict())
    stepped(whole, params, 1)
    with ThreadPoolExecutor(ranks) as pool:
        for state, found in pool.map(run, thread_worlds(ranks, timeout=100)):
            assert state == expected
            for ours, theirs in zip(found, params, strict=True):
                np.testing.assert_array_equal(ours.to_host(), theirs.to_host())


def test_the_inner_optimizer_has_one_group_in_the_given_order():
    params = [Tensor.from_host(np.ones(2, np.float32), requires_grad=True) for _ in range(2)]
    for groups in ([[0], [1]], [[1, 0]], [[0]]):
        with pytest.raises(ValueError, match=r"\[ShardedOptimizer\] make must return an optimizer of one group with the given parameters"):
            ShardedOptimizer(params, lambda given, groups=groups: optim.Adam([{"params": [given[i] for i in group]} for group in groups]))
