"""Replay against eager: the same losses, how much Python is left, how much device memory is held.

    python benchmarks/replay.py [selector] [--models mlp resnet18 gpt] [--size small|full|gpu] [--steps 100] [--out results/replay.json]

Each way runs in a process of its own, over the same batches and from the same seed, with dropout in the GPT, a schedule, and clipping by
norm. ``host_ms`` is the time the calling thread spends per step, ``python_ms`` what is left of it when the driver's calls are taken out:
of a replay they are replaced by nothing, of eager code they are taken to cost what they cost the replay. ``bytes`` is what the pools hold
at the most over the last steps, ``most_bytes`` over all of them: the first ones of a compiled step run as eager code does and are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core import memory
from netcl.core.device import device
from netcl.core.tensor import Tensor

TIMED = 20  # steps at the end of a run that are timed
GPT = {"vocab_size": 65, "n_head": 6, "dropout": 0.1}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "mlp": {"batch": 64},
        "resnet18": {"width": 8, "image": 8, "batch": 4},
        "gpt": {**GPT, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32, "batch": 4},
    },
    "full": {
        "mlp": {"batch": 64},
        "resnet18": {"width": 64, "image": 32, "batch": 8},
        "gpt": {**GPT, "block_size": 256, "n_layer": 6, "n_embd": 384, "batch": 4},
    },
    "gpu": {
        "mlp": {"batch": 64},
        "resnet18": {"width": 64, "image": 32, "batch": 128},
        "gpt": {**GPT, "block_size": 256, "n_layer": 6, "n_embd": 384, "batch": 64},
    },
}
Batch = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]


def mlp(batch: int) -> tuple[Any, Any, Batch]:
    model = nn.MLP(784, [128], 10)
    make = lambda rng: (rng.standard_normal((batch, 784), np.float32), rng.integers(0, 10, batch))  # noqa: E731
    return model, optim.Adam(model.parameters(), lr=1e-3), make


def resnet18(batch: int, image: int, width: int) -> tuple[Any, Any, Batch]:
    model = nn.ResNet18(width=width)
    make = lambda rng: (rng.standard_normal((batch, 3, image, image), np.float32), rng.integers(0, 10, batch))  # noqa: E731
    return model, optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4), make


def gpt(batch: int, **shape: Any) -> tuple[Any, Any, Batch]:
    model = nn.GPT(**shape)

    def make(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(0, shape["vocab_size"], (batch, shape["block_size"] + 1))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    return model, optim.AdamW(model.parameters(), lr=3e-4), make


MODELS: dict[str, Callable[..., tuple[Any, Any, Batch]]] = {"mlp": mlp, "resnet18": resnet18, "gpt": gpt}


def one_run(selector: str, name: str, shape: dict[str, Any], compiled: bool, steps: int) -> dict[str, Any]:
    """A run of one way: losses, times of the last steps, bytes held."""
    with device(selector) as handle:
        netcl.manual_seed(0)
        model, optimizer, make = MODELS[name](**shape)
        schedule = optim.CosineAnnealingLR(optimizer, steps)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            logits = model(x)
            loss = ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), ag.reshape(y, (-1,)))
            loss.backward()
            optimizer.step(max_norm=1.0)
            schedule.step()
            return loss

        run = netcl.compile(step) if compiled else step
        rng, losses, held = np.random.default_rng(1), [], np.zeros(steps, np.int64)
        times = np.zeros(2)
        for i in range(steps):
            x, y = (Tensor.from_host(handle.queue, part) for part in make(rng))
            netcl.synchronize(handle)
            start = time.thread_time(), time.perf_counter()
            losses.append(run(x, y))
            host = time.thread_time() - start[0]
            netcl.synchronize(handle)
            if i >= steps - TIMED:
                times += host, time.perf_counter() - start[1]
            held[i] = memory.memory_stats()["bytes_allocated"]
        host_ms, wall_ms = 1e3 * times / TIMED
        found = {"host_ms": host_ms, "wall_ms": wall_ms, "bytes": int(held[-TIMED:].max()), "most_bytes": int(held.max()),
                 "losses": [float(loss.item()) for loss in losses]}  # fmt: skip
        return {**found, **(_graph(run, x, y) if compiled else {})}


def _graph(run: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What the graph is made of, and what a replay costs without the driver's calls."""
    if not run.graphs:
        return {"refused": run.refused}
    (graph,) = run.graphs
    launches = sum(node.kind == "launch" for node in graph.nodes)
    graph._calls[:] = [partial(int)] * len(graph._calls)  # nothing, called from C as the driver is
    start = time.thread_time()
    for _ in range(TIMED):
        run(x, y)
    python_ms = 1e3 * (time.thread_time() - start) / TIMED
    return {"launches": launches, "transfers": len(graph.nodes) - launches, "planned_bytes": graph.planned_bytes, "python_ms": python_ms}


def in_a_process(selector: str, name: str, size: str, compiled: bool, steps: int) -> dict[str, Any]:
    """The same in a process of its own, whose pools start empty."""
    way = ["--one", "compiled" if compiled else "eager"]
    command = [sys.executable, __file__, selector, "--models", name, "--size", size, "--steps", str(steps), *way]
    keep_everything = {**os.environ, "NETCL_MAX_CACHED_GB": "1000"}  # so that what pools hold is what a step needed at the most
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=keep_everything)
    return json.loads(done.stdout.splitlines()[-1])


def compared(selector: str, name: str, size: str, steps: int) -> dict[str, Any]:
    """Both ways of a model, and what they amount to."""
    eager, replay = (in_a_process(selector, name, size, compiled, steps) for compiled in (False, True))
    same = eager.pop("losses") == (losses := replay.pop("losses"))
    driver = replay["host_ms"] - replay.get("python_ms", 0.0)
    eager["python_ms"] = eager["host_ms"] - driver
    ratios = {"same_losses": same, "python": replay.get("python_ms", float("nan")) / eager["python_ms"],
              "host": replay["host_ms"] / eager["host_ms"], "wall": replay["wall_ms"] / eager["wall_ms"],
              "bytes": replay["bytes"] / eager["bytes"], "most_bytes": replay["most_bytes"] / eager["most_bytes"]}  # fmt: skip
    return {"shape": SIZES[size][name], "eager": eager, "replay": replay, "ratios": ratios, "first_and_last_loss": [losses[0], losses[-1]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selector", nargs="?", default="cl")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--size", default="full", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=("eager", "compiled"), help="one way only, in this process")
    given = parser.parse_args()
    if given.one:
        (name,) = given.models
        print(json.dumps(one_run(given.selector, name, SIZES[given.size][name], given.one == "compiled", given.steps)))
        return
    with device(given.selector) as handle:
        where = {"device": handle.device_name, "python": platform.python_version(), "machine": platform.machine()}
    report = {**where, "size": given.size, "steps": given.steps,
              "models": {name: compared(given.selector, name, given.size, given.steps) for name in given.models}}  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
