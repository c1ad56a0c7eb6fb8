"""Whole training steps, the update alone, the cost of a call, and a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch_models
from comparison import Case, Comparison
from steps import our_step, torch_step, train_step

from netcl import nn, optim
from netcl import ops as F
from netcl.bench import CHECKED_STEPS, WARM_CALLS, Setting, Way, enqueued, values
from netcl.core import env, memory
from netcl.runtime import capture


def resnet_step(batch: int, comparisons: Sequence[Comparison], amp: str = "") -> Case:
    """ResNet-18 with the CIFAR stem, SGD with momentum."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        return values(batch, 3, 32, 32), np.arange(batch, dtype=np.int64) % 10

    return train_step(f"ResNet-18 step, batch {batch}", nn.ResNet18, torch_models.resnet18, data, "SGD", {"lr": 0.01, "momentum": 0.9},
                      comparisons, amp)  # fmt: skip


def resnet_memory(batch: int, comparisons: Sequence[Comparison]) -> Case:
    """Bytes that training steps of a ResNet-18 take from the device at the most: ours with all that the pool holds, torch's in use."""

    def make(where: Setting) -> dict[str, Way]:
        x, y = values(batch, 3, 32, 32), np.arange(batch, dtype=np.int64) % 10
        options = {"lr": 0.01, "momentum": 0.9}

        def ours() -> float:
            memory.empty_cache()
            before = memory.memory_stats()["bytes_allocated"]
            step, data = our_step(nn.ResNet18(), "SGD", options), (where.tensor(x), where.tensor(y))
            for _ in range(CHECKED_STEPS):
                enqueued(step(*data))
            where.sync()
            return float(memory.memory_stats()["bytes_allocated"] - before)

        def theirs() -> float:
            where.torch.cuda.empty_cache()
            where.torch.cuda.reset_peak_memory_stats()
            before = where.torch.cuda.memory_allocated()
            step = torch_step(where, torch_models.resnet18, {}, x, y, "SGD", options)
            for _ in range(CHECKED_STEPS):
                step.run()
            where.torch_sync()
            return float(where.torch.cuda.max_memory_allocated() - before)

        on_cuda = where.torch_device == "cuda"
        return {"ours": Way(amount=ours), "torch": Way(amount=theirs) if on_cuda else Way(missing="torch tells what it holds on CUDA only")}

    return Case(f"ResNet-18 step, batch {batch}, memory", make, comparisons, unit="bytes")


def gpt_step(batch: int, comparisons: Sequence[Comparison], n_layer: int = 6, n_embd: int = 384, context: int = 256, amp: str = "") -> Case:
    """A GPT of characters with AdamW."""
    sizes: dict[str, Any] = {"vocab_size": 65, "block_size": context, "n_layer": n_layer, "n_head": 6, "n_embd": n_embd}

    def data() -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(0).integers(0, 65, (batch, context + 1))
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    return train_step(f"GPT step, batch {batch}", lambda: nn.GPT(**sizes), lambda torch: torch_models.gpt(torch, **sizes), data, "AdamW",
                      {"lr": 3e-4, "weight_decay": 0.1}, comparisons, amp)  # fmt: skip


def adam(comparisons: Sequence[Comparison]) -> Case:
    """Adam over the parameters of a ResNet-18 (11 million in 62 tensors)."""

    def make(where: Setting) -> dict[str, Way]:
        shapes = [p.shape for p in nn.ResNet18().parameters()]
        data = [(values(*shape, seed=i), values(*shape, seed=i + 1)) for i, shape in enumerate(shapes)]
        ours = [where.tensor(x, requires_grad=True) for x, _ in data]
        for p, (_, g) in zip(ours, data, strict=True):
            p.grad = where.tensor(g)
        update = optim.Adam(ours, lr=1e-3)
        ways = {"ours": Way(update.step, where.sync, lambda: _after(update.step, lambda: [p.to_host() for p in ours[:3]]))}
        for name, options in (("torch fused", {"fused": True}), ("torch", {})):
            ways[name] = _torch_adam(where, data, options)
        return ways

    return Case("Adam 11 M", make, comparisons, tolerance=1e-3, work={"bytes": 28.0 * 11_173_962})


def _after(step: Callable[[], Any], read: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    step()
    return read()


def _torch_adam(where: Setting, data: Sequence[tuple[np.ndarray, np.ndarray]], options: dict[str, Any]) -> Way:
    if where.torch is None:
        return where.theirs(lambda: None)
    params = [where.torch_tensor(x.copy()).requires_grad_() for x, _ in data]
    for p, (_, g) in zip(params, data, strict=True):
        p.grad = where.torch_tensor(g)
    update = where.torch.optim.Adam(params, lr=1e-3, **options)
    read: Callable[[], list[np.ndarray]] = lambda: [p.detach().cpu().numpy() for p in params[:3]]  # noqa: E731
    return Way(update.step, where.torch_sync, lambda: _after(update.step, read))


def call_cost(comparisons: Sequence[Comparison]) -> Case:
    """What the caller pays for one small op: lookup, allocation, arguments, enqueue, Tensor; and what torch's caller pays."""

    def make(where: Setting) -> dict[str, Way]:
        x = values(64, 64)
        a, b = where.tensor(x), where.tensor(x)
        p = where.torch_tensor(x) if where.torch else None
        ours = Way(lambda: F.maximum(a, b).buffer, where.sync, lambda: [F.maximum(a, b).to_host()], host_only=True)
        theirs = where.theirs(lambda: where.torch.maximum(p, p))
        theirs.host_only = True
        return {"ours": ours, "torch": theirs}

    return Case("host cost of one op", make, comparisons)


def replay_cost(comparisons: Sequence[Comparison]) -> Case:
    """What the caller pays for one launch of a replayed step: a training step of an MLP over its number of launches."""

    def make(where: Setting) -> dict[str, Way]:
        x, y = where.tensor(values(8, 64)), where.tensor(np.arange(8, dtype=np.int64))
        made = capture.compile(our_step(nn.MLP(64, [32, 32, 32, 32], 8), "Adam", {"lr": 1e-3}))
        for _ in range(WARM_CALLS):
            made(x, y)
        launches = sum(node.kind == "launch" for graph in made.graphs for node in graph.nodes)
        if not launches:
            return {"ours": Way(missing=f"it is not replayed: {'; '.join(made.refused)}")}
        return {"ours": Way(lambda: enqueued(made(x, y)), where.sync, host_only=True, units=launches)}

    return Case("host cost of one replayed launch", make, comparisons)


def fresh_process(comparisons: Sequence[Comparison]) -> Case:
    """From the start of Python to the end of a small CNN's first training step, compiled kernels on disk."""

    def make(where: Setting) -> dict[str, Way]:
        name = where.handle.platform_name if where.handle.backend == "cl" else "cpu"
        command = [sys.executable, str(Path(__file__).with_name("fresh.py"))]
        settings = {"NETCL_DEVICE": name, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": ""}

        def run() -> None:
            subprocess.run(command, env=env.for_child(**settings), check=True, timeout=300)

        return {"ours": Way(run)}

    return Case("first step of a small CNN in a fresh process", make, comparisons)
