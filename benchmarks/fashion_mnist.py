"""Fashion-MNIST with a CNN of LeNet's size: test accuracy and time per epoch, against PyTorch on the CPU in the same run.

    python benchmarks/fashion_mnist.py [selector] [--epochs 5] [--threads 2] [--root FOLDER] [--out FILE]

The images come from --root or from Debian's package dataset-fashion-mnist. Both sides start from the same weights, see batches of the
same size at the same learning rates, and take their epochs in turns. An epoch's time is that of loading and training, not of testing.
netcl's step is compiled (netcl.compile; --eager for the plain one) and fed by its DataLoader, batch by batch from the host; PyTorch's is
its usual eager one on --threads threads, and indexes the whole set in memory, which costs it less than a DataLoader would.
Without PyTorch only netcl runs. Status 1: accuracy below 90 %, or an epoch slower than PyTorch's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.data import DataLoader, TensorDataset, datasets

WANTED, LR, BATCH = 0.90, 3e-3, 64
Epoch = tuple[float, float]  # seconds, accuracy


def rate(step: int, steps: int) -> float:
    """Up for a twentieth of the run, then down along a cosine."""
    warm = max(1, steps // 20)
    return LR * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def network() -> nn.Sequential:
    """65,000 parameters; LeNet-5 has 62,000."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def with_netcl(model: nn.Sequential, train: TensorDataset, test: TensorDataset, epochs: int, handle: Any, eager: bool) -> Iterator[Epoch]:
    loader = DataLoader(train, BATCH, drop_last=True, shuffle=True, seed=0, device_queue=handle)
    held_out = DataLoader(test, 500, shuffle=False, device_queue=handle)
    optimizer = optim.Adam(model.parameters(), lr=LR)
    steps, done = epochs * len(loader), 0

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = ag.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = step if eager else netcl.compile(step)
    for _ in range(epochs):
        model.train()
        start = time.perf_counter()
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = rate(done, steps)
            run(x, y)
            done += 1
        netcl.synchronize(handle)
        seconds = time.perf_counter() - start
        model.eval()
        with ag.no_grad():
            right = sum(int((model(x).argmax(axis=1) == y).sum().item()) for x, y in held_out)
        yield seconds, right / len(test)


def with_torch(state: dict[str, np.ndarray], train: TensorDataset, test: TensorDataset, epochs: int, threads: int) -> Iterator[Epoch]:
    import torch
    from torch import nn as tnn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    model = tnn.Sequential(
        tnn.Conv2d(1, 16, 5, padding=2), tnn.BatchNorm2d(16), tnn.ReLU(), tnn.MaxPool2d(2),
        tnn.Conv2d(16, 32, 5), tnn.BatchNorm2d(32), tnn.ReLU(), tnn.MaxPool2d(2),
        tnn.Flatten(), tnn.Linear(800, 64), tnn.ReLU(), tnn.Linear(64, 10),
    )  # fmt: skip
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    (x, y), (test_x, test_y) = ([torch.from_numpy(array) for array in part.arrays] for part in (train, test))
    batches = len(train) // BATCH
    steps, done = epochs * batches, 0
    for epoch in range(epochs):
        model.train()
        start = time.perf_counter()
        order = torch.from_numpy(np.random.default_rng(epoch).permutation(len(train)))
        for batch in order[: batches * BATCH].reshape(batches, BATCH):
            optimizer.param_groups[0]["lr"] = rate(done, steps)
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            done += 1
        seconds = time.perf_counter() - start
        model.eval()
        with torch.no_grad():
            right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(test_x.split(500), test_y.split(500), strict=True))
        yield seconds, right / len(test)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selector", nargs="?", default="auto")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, help="only so many, to try the script")
    parser.add_argument("--eager", action="store_true", help="without netcl.compile")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    parts = datasets.fashion_mnist(arguments.root)
    train, test = (TensorDataset(*part.take(np.arange(min(len(part), arguments.samples or len(part)))), name=part.name) for part in parts)
    handle = netcl.device.manager.default(arguments.selector)
    assert handle is not None, f"no device is called {arguments.selector}"
    with netcl.device(arguments.selector):
        netcl.manual_seed(0)
        model = network()
        sides = {"netcl": with_netcl(model, train, test, arguments.epochs, handle, arguments.eager)}
        if importlib.util.find_spec("torch"):
            state = {name: tensor.to_host() for name, tensor in model.state_dict().items()}
            sides["torch"] = with_torch(state, train, test, arguments.epochs, arguments.threads)
        epochs: dict[str, list[Epoch]] = {name: [] for name in sides}
        for number in range(arguments.epochs):
            for name, side in sides.items():
                epochs[name].append(next(side))
                print(f"epoch {number + 1} {name}: {epochs[name][-1][0]:.2f} s, {epochs[name][-1][1]:.2%}", file=sys.stderr)
    result: dict[str, Any] = {"device": handle.device_name, "platform": handle.platform_name, "machine": platform.machine()}
    result |= {"threads": arguments.threads, "samples": len(train), "compiled": not arguments.eager}
    for name, measured in epochs.items():
        result[name] = {"seconds": [round(seconds, 3) for seconds, _ in measured], "accuracy": [share for _, share in measured]}
    best = {name: min(seconds for seconds, _ in measured) for name, measured in epochs.items()}
    result["ratio"] = round(best["netcl"] / best["torch"], 3) if "torch" in best else None
    print(text := json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return int(max(result["netcl"]["accuracy"]) < WANTED or (result["ratio"] or 0) > 1)


if __name__ == "__main__":
    sys.exit(main())
