"""``python benchmarks/fresh.py``: one training step of a small CNN on the default device; the time is that of the process."""

import math

import numpy as np

import netcl.autograd as ag
from netcl import nn, optim
from netcl.bench import values
from netcl.core.tensor import Tensor


def small_cnn_step() -> float:
    """The loss of one training step of a small CNN: what ``fresh_process`` of train_steps.py times."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
                          nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 7 * 7, 10))  # fmt: skip
    update = optim.Adam(model.parameters(), lr=1e-3)
    loss = ag.cross_entropy(model(Tensor.from_host(values(32, 1, 28, 28))), Tensor.from_host(np.arange(32) % 10))
    loss.backward()
    update.step()
    return float(loss.item())


if __name__ == "__main__" and not math.isfinite(small_cnn_step()):
    raise SystemExit("the first loss is not finite")
