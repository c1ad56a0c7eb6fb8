"""A training step of a model leaves nothing behind. ``benchmarks/step_memory.py`` runs a thousand steps and reads the process as well."""

import gc

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core import memory

rng = np.random.default_rng(0)


def _images(model):
    return ag.cross_entropy(model(rng.standard_normal((4, 3, 8, 8), np.float32)), rng.integers(0, 10, 4))


def _tokens(model):
    tokens = rng.integers(0, 65, (4, 17))
    return model.loss(tokens[:, :-1], tokens[:, 1:])


CASES = {
    "resnet18": (lambda: nn.ResNet18(width=8), _images, optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "gpt": (lambda: nn.GPT(65, block_size=16, n_layer=2, n_head=2, n_embd=32), _tokens, optim.AdamW, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_pools_hold_after_many_steps_what_they_held(cl_device, name):
    make, loss_of, kind, options = CASES[name]
    model = make()
    optimizer = kind(model.parameters(), **options)
    readings = []
    for steps in (20, 20):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step(max_norm=1.0)
        gc.collect()
        cl_device.queue.finish()
        readings.append({key: memory.memory_stats()[key] for key in ("bytes_allocated", "bytes_in_use", "misses")})
    assert readings[0] == readings[1]
