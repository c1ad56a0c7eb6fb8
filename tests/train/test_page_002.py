"""The six steps of a training loop, as page 002 prints them."""

from pathlib import Path

import numpy as np
import pytest

import netcl as nc
from netcl import nn, optim
from netcl.core.tensor import Tensor
from netcl.io import load_model

SNIPPET = compile((Path(__file__).parent.parent / "seeds/002_training_step.py").read_text(encoding="utf-8"), "page 002", "exec")


@pytest.mark.parametrize("one_hot", [False, True], ids=["integer labels", "one-hot labels"])
def test_the_loop_runs_as_printed_and_the_loss_falls(device, one_hot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nc.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    y = np.eye(2, dtype=np.float32)[labels] if one_hot else labels
    model = nn.Sequential(device.queue, nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    synced, losses = [], []
    supplied = {
        "Tensor": Tensor, "queue": device.queue, "model": model, "opt": optim.Adam(model.parameters(), lr=0.05),
        "replicas": [], "sync_grads": synced.append,
    }  # fmt: skip

    def loader(rounds=30):
        for _ in range(rounds):
            yield x, y
            losses.append(supplied["loss"].item())

    supplied["loader"] = loader()
    exec(SNIPPET, supplied)
    assert losses[-1] < 0.3 * losses[0]
    assert len(synced) == 30
    again = load_model("ckpt.netcl", device=device)
    batch = Tensor.from_host(device.queue, x)
    np.testing.assert_array_equal(again(batch).to_host(), model(batch).to_host())
