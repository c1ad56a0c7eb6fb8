"""DistributedDataParallel over threads: graphs that change, backwards that fail, ranks that differ. Over MPI: test_mpi.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.data import SubsetRandomSampler, TensorDataset
from netcl.distributed import (
    DistributedDataParallel,
    LostRankError,
    ShardedLoader,
    convert_sync_batchnorm,
    thread_worlds,
    without_sync,
)

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((8, 6), np.float32), RNG.integers(0, 3, 8)


class Detour(nn.Module):
    """A layer in the middle that a call may leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.detour, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.long = False
        rng = np.random.default_rng(1)
        for p in self.parameters():
            p.write(rng.standard_normal(p.shape).astype(np.float32) * 0.3)

    def forward(self, x):
        x = ag.relu(self.first(x))
        return self.last(self.detour(x) if self.long else x)


def everywhere(size: int, call) -> list:
    def placed(world):
        with nn.parameter.placed("cpu"):
            return call(world)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(placed, thread_worlds(size, timeout=100)))


def step(parallel, optimizer, world):
    part = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
    x, y = (Tensor.from_host(parallel.module.first.weight.queue, values[part]) for values in (X, Y))
    ag.cross_entropy(parallel(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(world, ways=(False,), before=lambda model, run: None):
    model = Detour()
    parallel, optimizer = DistributedDataParallel(model, world), optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before(model, lambda: step(parallel, optimizer, world))
    for way in ways:
        model.long = way
        step(parallel, optimizer, world)
    return [p.to_host() for p in model.parameters()]


def check_as_one(call):
    (alone,) = everywhere(1, call)
    for found in everywhere(2, call):
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_come_and_go():
    check_as_one(lambda world: trained(world, ways=[False, False, True, True, False]))


def test_ranks_may_use_different_parameters_later_on():
    """The gradient of one that a rank has not used is 0 there."""
    first, second = everywhere(2, lambda world: trained(world, ways=[False, False, world.rank == 0, world.rank == 0]))
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_backward_that_raised_is_no_part_of_the_next():
    class Full(Exception):
        pass

    def fails(gradient):
        raise Full

    def before(model, run):
        handle = model.first.weight.register_hook(fails)
        with pytest.raises(Full):
            run()
        handle.remove()
        model.zero_grad()

    check_as_one(lambda world: trained(world, [False, False], before))


@pytest.mark.parametrize("where", ["on the way", "at once", "in the loss"])
def test_a_rank_that_fails_alone_is_named_at_once(where):
    """Long before the time-out; gradients of the others are averages all, or none."""

    def lonely(world):
        model = Detour()
        parallel, optimizer = DistributedDataParallel(model, world, bucket_mb=1e-5), optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(parallel, optimizer, world)
        out = parallel(Tensor.from_host(model.first.weight.queue, X))
        if world.rank == 1:
            with pytest.raises(ZeroDivisionError), world.together():
                if where == "in the loss":
                    raise ZeroDivisionError("full")
                (model.first.weight if where == "on the way" else out).register_hook(lambda gradient: 1 // 0)
                ag.sum(out).backward()
            return
        with parallel.no_sync():
            ag.sum(out).backward(retain_graph=True)
        own = [p.grad.to_host() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with pytest.raises(LostRankError, match=r"rank 1 failed: ZeroDivisionError: .*; waiting=rank [02], world=3; see the traceback"):
            ag.sum(out).backward()
        for found, gradient in zip([p.grad for p in model.parameters() if p.grad is not None], own, strict=True):
            np.testing.assert_array_equal(found.to_host(), gradient)

    began = time.monotonic()
    everywhere(3, lonely)
    assert time.monotonic() - began < 80


def test_ranks_with_other_buckets_are_named():
    def differ(world):
        with pytest.raises(LostRankError, match=r"must agree on bucket_mb, compress and deterministic: rank 2 has \[2, None, False\]"):
            DistributedDataParallel(Detour(), world, bucket_mb=2 if world.rank == 2 else 4)

    everywhere(3, differ)


def test_a_rank_with_other_buffers_is_named():
    def differ(world):
        model = Detour()
        model.register_buffer("seen", Tensor.zeros((3 + world.rank,)))
        with pytest.raises(LostRankError, match=r"must agree on the model's buffers: rank 1 has \[\['seen', \[4\], 'float32'\]\]"):
            DistributedDataParallel(model, world)

    everywhere(2, differ)


def test_an_optimizer_that_steps_during_backward_raises():
    """It would see the gradients of its rank alone."""

    def in_backward(world):
        model = Detour()
        parallel, optimizer = DistributedDataParallel(model, world), optim.SGD(model.parameters(), lr=0.1)
        model.last.bias.register_post_accumulate_grad_hook(lambda p: (optimizer.step(), p.zero_grad()))
        with pytest.raises(RuntimeError, match=r"hooks must not take gradients of parameters away.*step the optimizer after backward"):
            step(parallel, optimizer, world)

    everywhere(2, in_backward)


def test_a_rank_that_froze_something_is_named():
    def frozen_on_the_second(world):
        model = Detour()
        if world.rank:
            model.first.freeze()
        with pytest.raises(LostRankError, match=r"must agree on the model's parameters: rank 1 has .*frozen"):
            DistributedDataParallel(model, world)

    everywhere(2, frozen_on_the_second)


def test_batch_norms_without_bias():
    x, weight = RNG.standard_normal((8, 3, 2), np.float32), np.float32([1, 2, 3])

    def run(world):
        layer = convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False), world)
        layer.weight.write(weight)
        return layer(x[world.rank :: 2]).to_host(), without_sync(layer).bias

    whole = nn.BatchNorm1d(3, bias=False, device="cpu")
    whole.weight.write(weight)
    for rank, (part, bias) in enumerate(everywhere(2, run)):
        np.testing.assert_allclose(part, whole(x).to_host()[rank::2], atol=1e-5)
        assert bias is None


@pytest.mark.parametrize("change", ["unfreeze", "replace"])
def test_parameters_that_come_after_wrapping_raise(change):
    def call(world):
        model = Detour()
        model.first.requires_grad_(change != "unfreeze")
        parallel = DistributedDataParallel(model, world)
        if change == "unfreeze":
            model.first.requires_grad_(True)
        else:
            model.first = nn.Linear(6, 5)
        with pytest.raises(RuntimeError, match=r"must not be added or unfrozen after the model was wrapped.*new=\['first.weight'"):
            parallel(np.ones((2, 6), np.float32))

    everywhere(2, call)


def test_a_sampler_orders_the_samples_of_all_ranks_alike():
    data = TensorDataset(np.arange(17))

    def delivered(world, generator):
        loader = ShardedLoader(data, 4, seed=0, world=world, sampler=SubsetRandomSampler(range(7), generator))
        return len(loader), [batch.tolist() for batch in loader]

    parts = everywhere(2, lambda world: delivered(world, 5))
    assert [(count, len(batches)) for count, batches in parts] == [(2, 2)] * 2
    found = [number for _, batches in parts for batch in batches for number in batch]
    assert len(set(found)) == len(found) == 6  # of seven: parts have equal sizes
    with pytest.raises(LostRankError, match=r"\[ShardedLoader\] all ranks must agree on the order of the sampler"):
        everywhere(2, lambda world: delivered(world, world.rank))
    with pytest.raises(ShapeError, match="batch_sampler must not be given"):
        ShardedLoader(data, 1, seed=0, batch_sampler=[[0, 1]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_batch_norm_of_halves_over_ranks_sums_in_float32(dtype):
    x = RNG.standard_normal((2, 2, 200, 200), np.float32) + 3  # its sum overflows float16

    def normalized(world):
        layer = convert_sync_batchnorm(nn.BatchNorm2d(2).to(dtype), world)
        part = Tensor.from_host(layer.queue, x[world.rank :: world.size], dtype)
        return layer(part).to_host(), layer.running_mean.to_host()

    (alone,), ranks = everywhere(1, normalized), everywhere(2, normalized)
    np.testing.assert_allclose(np.concatenate([out for out, _ in ranks]), alone[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(ranks[0][1], alone[1], rtol=1e-2)
