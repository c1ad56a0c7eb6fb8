"""Whether loading keeps up with training: steps on batches from a loader against steps on one batch that stays on the device.

    python benchmarks/loader.py [selector] [--workers 2] [--batch 64] [--steps 120] [--augment] [--root FASHION_MNIST] [--out FILE]

A LeNet-size CNN learns from images of 28 x 28 (Fashion-MNIST where it is found, else made-up ones of its size). Both ways are
interleaved in one run, the median step of each counts; the loader must stay within 10 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from netcl import nn, optim
from netcl.core.device import DeviceHandle, manager, synchronize
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, augment, datasets

ALLOWED, WARM_UP, ROUNDS = 1.10, 10, 4


def images(root: str | None) -> Any:
    try:
        return datasets.fashion_mnist(root)[0]
    except FileNotFoundError:
        return datasets.synthetic(samples=20_000)[0]


def trainer(handle: DeviceHandle) -> Any:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(handle)  # fmt: skip
    loss_of, optimizer = nn.CrossEntropyLoss(), optim.Adam(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def median_step(step: Any, batches: Iterator[tuple[Tensor, Tensor]], count: int, queue: Any) -> float:
    """Milliseconds of the median step; the queue is drained after each, as a step that logs its loss does."""
    times = []
    for x, y in itertools.islice(batches, count):
        step(x, y)
        synchronize(queue)
        times.append(time.perf_counter())
    return 1e3 * statistics.median(np.diff(times))


def measure(handle: DeviceHandle, arguments: argparse.Namespace) -> dict[str, Any]:
    step, dataset = trainer(handle), images(arguments.root)
    resident = tuple(Tensor.from_host(handle.queue, array) for array in dataset.take(np.arange(arguments.batch)))
    augmentation = augment.RandomCrop(28, padding=2) if arguments.augment else None
    results: dict[str, Any] = {"dataset": dataset.name, "batch": arguments.batch, "workers": arguments.workers}
    with DataLoader(dataset, arguments.batch, drop_last=True, shuffle=True, seed=0, num_workers=arguments.workers, device_queue=handle,
                    augment=augmentation) as loader:  # fmt: skip
        ways = {"resident": itertools.repeat(resident), "loader": endless(loader)}
        for batches in ways.values():
            median_step(step, batches, WARM_UP, handle.queue)
        rounds = [
            {name: median_step(step, ways[name], arguments.steps // ROUNDS + 1, handle.queue) for name in ways} for _ in range(ROUNDS)
        ]
    for name in ways:
        results[f"{name}_ms"] = round(statistics.median(one[name] for one in rounds), 3)
    return results | {"ratio": round(results["loader_ms"] / results["resident_ms"], 3), "allowed": ALLOWED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selector", nargs="?", default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--augment", action="store_true", help="random crops, made by the workers")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    handle = manager.default(arguments.selector)
    assert handle is not None, f"no device is called {arguments.selector}"
    result = {"device": handle.device_name, "platform": handle.platform_name, "machine": platform.machine()} | measure(handle, arguments)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return int(result["ratio"] > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
