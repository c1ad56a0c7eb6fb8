"""Whole training steps, the update alone, the cost of a call, and a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import amp as casts
from netcl import nn, optim
from netcl import ops as F
from netcl.bench import yardsticks
from netcl.bench.harness import Case, Comparison, Setting, Way, computed
from netcl.bench.problems import WARM_CALLS, Compiled, values
from netcl.core import env, memory
from netcl.core.tensor import Tensor
from netcl.runtime import capture

CHECKED_STEPS = 3


def train_step(name: str, model: Callable[[], Any], theirs: Callable[[Any], Any], batch: Callable[[], tuple[np.ndarray, np.ndarray]],
               optimizer: str, options: dict[str, Any], comparisons: Sequence[Comparison], amp: str = "") -> Case:  # fmt: skip
    """A training step on a fixed batch, eager and compiled, against torch with the same weights.

    The losses of the first steps must agree before anything is timed. ``amp`` is a dtype for the automatic casts of ``amp`` ways.
    """

    def make(where: Setting) -> dict[str, Way]:
        x, y = batch()
        on_device = where.tensor(x), where.tensor(y)
        first = model()
        weights = {key: t.to_host().copy() for key, t in first.state_dict().items()}
        eager = _our_step(first, optimizer, options)
        ways = {"ours": _losses(where, lambda: eager(*on_device))}
        again = model()
        again.load_state_dict(weights)
        ways["compiled"] = _replayed(where, Compiled(_our_step(again, optimizer, options), *on_device))
        if amp:
            ways["amp"] = _amp_way(where, model, weights, optimizer, options, on_device, amp)
            ways["torch amp"] = _torch_step(where, theirs, weights, x, y, optimizer, options, amp)
        return ways | {"torch": _torch_step(where, theirs, weights, x, y, optimizer, options)}

    return Case(name, make, comparisons, tolerance=0.05 if amp else 2e-2)


def _our_step(model: Any, optimizer: str, options: dict[str, Any], context: Callable[[], Any] = nullcontext) -> Callable[..., Any]:
    update = getattr(optim, optimizer)(model.parameters(), **options)

    def step(x: Any, y: Any) -> Any:
        update.zero_grad()
        with context():
            logits = model(x)
            loss = ag.cross_entropy(ag.reshape(logits, (-1, logits.shape[-1])), ag.reshape(y, (-1,)))
        loss.backward()
        update.step()
        return loss

    return step


def _losses(where: Setting, run: Callable[[], Any]) -> Way:
    """The way of a step; what is compared is the loss after a few of them."""
    return Way(lambda: computed(run()), where.sync, lambda: [_value([run() for _ in range(CHECKED_STEPS)][-1])])


def _replayed(where: Setting, step: Compiled) -> Way:
    """The way of a compiled step; its first calls were made when it was compiled."""
    if step.refused:
        return Way(missing=step.refused)
    return Way(lambda: computed(step.run()), where.sync, lambda: [_value(step.first[CHECKED_STEPS - 1])])


def _value(loss: Any) -> np.ndarray:
    return np.array([float(loss.to_host())])


def _amp_way(where: Setting, model: Callable[[], Any], weights: dict[str, Any], optimizer: str, options: dict[str, Any],
             data: tuple[Any, Any], dtype: str) -> Way:  # fmt: skip
    twin = model()
    twin.load_state_dict(weights)
    return _replayed(where, Compiled(_our_step(twin, optimizer, options, lambda: casts.autocast(dtype=dtype)), *data))


def _torch_step(where: Setting, make: Callable[[Any], Any], weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray,
                optimizer: str, options: dict[str, Any], amp: str = "") -> Way:  # fmt: skip
    if where.torch is None:
        return where.theirs(lambda: None)
    torch = where.torch
    model = make(torch)
    model.load_state_dict({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in weights.items()}, strict=False)
    layout = {"memory_format": torch.channels_last} if amp and x.ndim == 4 else {}
    model = model.to(where.torch_device, **layout).train()
    update = getattr(torch.optim, optimizer)(model.parameters(), **options)
    data, target = where.torch_tensor(x).to(**layout) if layout else where.torch_tensor(x), where.torch_tensor(y).reshape(-1)
    around = (lambda: torch.autocast(where.torch_device, getattr(torch, amp))) if amp else nullcontext

    def step() -> Any:
        update.zero_grad()
        with around():
            logits = model(data)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target)
        loss.backward()
        update.step()
        return loss

    def result() -> list[np.ndarray]:
        return [np.array([float(step().item()) for _ in range(CHECKED_STEPS)][-1:])]

    return Way(step, where.torch_sync, result)


def mlp_step(batch: int, comparisons: Sequence[Comparison]) -> Case:
    """784-128-10 with Adam."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        return values(batch, 784), np.arange(batch, dtype=np.int64) % 10

    return train_step(f"MLP 784-128-10 step, batch {batch}", lambda: nn.MLP(784, [128], 10), yardsticks.mlp, data, "Adam",
                      {"lr": 1e-3}, comparisons)  # fmt: skip


def resnet_step(batch: int, comparisons: Sequence[Comparison], amp: str = "") -> Case:
    """ResNet-18 with the CIFAR stem, SGD with momentum."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        return values(batch, 3, 32, 32), np.arange(batch, dtype=np.int64) % 10

    return train_step(f"ResNet-18 step, batch {batch}", nn.ResNet18, yardsticks.resnet18, data, "SGD", {"lr": 0.01, "momentum": 0.9},
                      comparisons, amp)  # fmt: skip


def resnet_memory(batch: int, comparisons: Sequence[Comparison]) -> Case:
    """Bytes that training steps of a ResNet-18 take from the device at the most: ours with all that the pool holds, torch's in use."""

    def make(where: Setting) -> dict[str, Way]:
        x, y = values(batch, 3, 32, 32), np.arange(batch, dtype=np.int64) % 10
        options = {"lr": 0.01, "momentum": 0.9}

        def ours() -> float:
            memory.empty_cache()
            before = memory.memory_stats()["bytes_allocated"]
            step, data = _our_step(nn.ResNet18(), "SGD", options), (where.tensor(x), where.tensor(y))
            for _ in range(CHECKED_STEPS):
                computed(step(*data))
            where.sync()
            return float(memory.memory_stats()["bytes_allocated"] - before)

        def theirs() -> float:
            where.torch.cuda.empty_cache()
            where.torch.cuda.reset_peak_memory_stats()
            before = where.torch.cuda.memory_allocated()
            step = _torch_step(where, yardsticks.resnet18, {}, x, y, "SGD", options)
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

    return train_step(f"GPT step, batch {batch}", lambda: nn.GPT(**sizes), lambda torch: yardsticks.gpt(torch, **sizes), data, "AdamW",
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
        made = capture.compile(_our_step(nn.MLP(64, [32, 32, 32, 32], 8), "Adam", {"lr": 1e-3}))
        for _ in range(WARM_CALLS):
            made(x, y)
        launches = sum(node.kind == "launch" for graph in made.graphs for node in graph.nodes)
        if not launches:
            return {"ours": Way(missing=f"it is not replayed: {'; '.join(made.refused)}")}
        return {"ours": Way(lambda: computed(made(x, y)), where.sync, host_only=True, units=launches)}

    return Case("host cost of one replayed launch", make, comparisons)


def fresh_process(comparisons: Sequence[Comparison]) -> Case:
    """From the start of Python to the end of a small CNN's first training step, compiled kernels on disk."""

    def make(where: Setting) -> dict[str, Way]:
        name = where.handle.platform_name if where.handle.backend == "cl" else "cpu"
        command = [sys.executable, "-m", "netcl.bench.fresh"]
        settings = {"NETCL_DEVICE": name, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": ""}

        def run() -> None:
            subprocess.run(command, env=env.for_child(**settings), check=True, timeout=300)

        return {"ours": Way(run)}

    return Case("first step of a small CNN in a fresh process", make, comparisons)


def small_cnn_step() -> float:
    """The loss of one training step of a small CNN: what :func:`fresh_process` times."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
                          nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 7 * 7, 10))  # fmt: skip
    update = optim.Adam(model.parameters(), lr=1e-3)
    loss = ag.cross_entropy(model(Tensor.from_host(values(32, 1, 28, 28))), Tensor.from_host(np.arange(32) % 10))
    loss.backward()
    update.step()
    return float(loss.item())
