"""Device memory of a training step, against what backward must find again."""

import gc

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core import memory
from netcl.core.tensor import Tensor

LAYERS, CHANNELS, SIDE, BATCH = 6, 8, 32, 32
PLANE = BATCH * CHANNELS * SIDE * SIDE * 4  # bytes of what a layer makes: 1 MB
STEPS = 6
SMALL = 16 << 10  # bytes: a buffer or two of single numbers more, where the garbage collector comes late to what knew them


def network() -> nn.Module:
    layers = [(nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def held_by_steps(compiled: bool) -> tuple[int, int]:
    """What the pools hold more after the first steps, and after the last."""
    gc.collect()
    memory.empty_cache()
    before = memory.memory_stats()["bytes_allocated"]
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = ag.mean(ag.square(model(x)))
        loss.backward()
        optimizer.step()
        return loss

    run = netcl.compile(step) if compiled else step
    x, held = Tensor.from_host(np.ones((BATCH, CHANNELS, SIDE, SIDE), np.float32)), []
    for _ in range(STEPS):
        run(x)
        held.append(int(memory.memory_stats()["bytes_allocated"] - before))
    return held[2], held[-1]


def test_a_step_holds_little_more_than_backward_needs(cl_device):
    """Of a layer the input of its norm and of the next layer; beside these the batch, a gradient and what it becomes, and workspaces."""
    if not memory.get_persistent_pool(cl_device.queue).cuts:
        pytest.skip("large tensors are buffers of their own here, in four sizes per doubling")
    early, eager = held_by_steps(compiled=False)
    _, replayed = held_by_steps(compiled=True)
    kept = (2 * LAYERS + 1) * PLANE
    assert eager - early < SMALL
    assert kept < eager <= 1.1 * (kept + 3 * PLANE)
    assert replayed <= eager
