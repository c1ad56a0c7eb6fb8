"""Memory of a training step over many steps: what the pools hold and what the process has, at points along the way.

    python benchmarks/step_memory.py [selector ...] [--steps 1000] [--size small|full] [--out results/step_memory.json]

ResNet-18 with the CIFAR stem and a GPT, a fresh batch from the host every step, with SGD and AdamW. ``small`` keeps the layers of both and
narrows them, so that a thousand steps take minutes on two cores; ``full`` is 64 channels wide on 32 x 32 images, and 10 M parameters.
A run is flat when the pools hold at every point what they held at the first, and the process grew by less than ``GROWTH`` per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from core_costs import resident_kilobytes

import netcl.autograd as ag
from netcl import nn, optim
from netcl.core import memory
from netcl.core.device import DeviceHandle, device, synchronize
from netcl.ops import random

WARM_UP = 50  # steps until every kernel is built and every bucket filled
POINTS = 8
GROWTH = 4096  # bytes per step: less than any tensor that a step could leave behind
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "small": {
        "resnet18": {"width": 8, "image": 8, "batch": 4},
        "gpt": {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32, "batch": 4},
    },
    "full": {
        "resnet18": {"width": 64, "image": 32, "batch": 32},
        "gpt": {"vocab_size": 65, "block_size": 128, "n_layer": 6, "n_head": 6, "n_embd": 384, "batch": 16},
    },
}
Step = Callable[[], None]


def resnet18(width: int, image: int, batch: int) -> Step:
    """A step of ResNet-18 over random images."""
    model = nn.ResNet18(width=width)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    rng = np.random.default_rng(0)

    def step() -> None:
        images = rng.standard_normal((batch, 3, image, image), np.float32)
        _update(optimizer, ag.cross_entropy(model(images), rng.integers(0, 10, batch)))

    return step


def gpt(batch: int, **shape: int) -> Step:
    """A step of a GPT over random tokens."""
    model = nn.GPT(**shape)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    rng = np.random.default_rng(0)

    def step() -> None:
        tokens = rng.integers(0, shape["vocab_size"], (batch, shape["block_size"] + 1))
        logits = model(tokens[:, :-1])
        _update(optimizer, ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), tokens[:, 1:].reshape(-1)))

    return step


def _update(optimizer: Any, loss: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(max_norm=1.0)


MODELS: dict[str, Callable[..., Step]] = {"resnet18": resnet18, "gpt": gpt}


def measure(handle: DeviceHandle, step: Step, steps: int) -> dict[str, Any]:
    """Run ``steps`` steps after the warm-up and read the counters at ``POINTS`` points."""
    points = []
    wanted = {round(steps * i / POINTS) for i in range(POINTS + 1)}
    for done in range(-WARM_UP, steps + 1):
        if done in wanted:
            points.append({"step": done, **_reading(handle)})
        if done < steps:
            step()
    first, last = points[0], points[-1]
    grown = 1024 * (last["resident_kilobytes"] - first["resident_kilobytes"])
    flat = all(p["bytes_in_use"] == first["bytes_in_use"] for p in points) and grown < GROWTH * steps
    return {"flat": flat and last["pool_bytes"] == first["pool_bytes"], "grown_bytes_per_step": round(grown / steps, 1), "points": points}


def _reading(handle: DeviceHandle) -> dict[str, int]:
    synchronize(handle)
    gc.collect()
    stats = memory.memory_stats()
    return {"pool_bytes": int(stats["bytes_allocated"]), "bytes_in_use": int(stats["bytes_in_use"]),
            "resident_kilobytes": resident_kilobytes()}  # fmt: skip


def run(selector: str, size: str, steps: int) -> list[dict[str, Any]]:
    """Every model on one device."""
    rows = []
    for name, make in MODELS.items():
        memory.empty_cache()
        with device(selector) as handle:
            if handle is None:
                raise SystemExit(f"no device {selector!r}")
            random.manual_seed(0)
            driver = handle.device.driver_version if handle.backend == "cl" else f"NumPy {np.__version__}"
            row = {"model": name, **SIZES[size][name], "platform": handle.platform_name, "device": handle.device_name, "driver": driver}
            rows.append({**row, "steps": steps, **measure(handle, make(**SIZES[size][name]), steps)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("selectors", nargs="*", default=["cl"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    results = {"commit": commit or "unknown", "machine": platform.machine(), "python": platform.python_version(),
               "runs": [row for selector in options.selectors for row in run(selector, options.size, options.steps)]}  # fmt: skip
    text = json.dumps(results, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    if not all(row["flat"] for row in results["runs"]):
        raise SystemExit("memory of a step is not flat")


if __name__ == "__main__":
    main()
