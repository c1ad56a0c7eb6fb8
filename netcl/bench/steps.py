"""Training steps in netcl and in torch, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import amp as casts
from netcl import nn, optim
from netcl.bench.harness import Case, Comparison, Setting, Way, enqueued
from netcl.bench.problems import Compiled, values

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
        eager = our_step(first, optimizer, options)
        ways = {"ours": _losses(where, lambda: eager(*on_device))}
        again = model()
        again.load_state_dict(weights)
        ways["compiled"] = _replayed(where, Compiled(our_step(again, optimizer, options), *on_device))
        if amp:
            ways["amp"] = _amp_way(where, model, weights, optimizer, options, on_device, amp)
            ways["torch amp"] = torch_step(where, theirs, weights, x, y, optimizer, options, amp)
        return ways | {"torch": torch_step(where, theirs, weights, x, y, optimizer, options)}

    return Case(name, make, comparisons, tolerance=0.05 if amp else 2e-2)


def our_step(model: Any, optimizer: str, options: dict[str, Any], context: Callable[[], Any] = nullcontext) -> Callable[..., Any]:
    """A training step of ``model``: ``(x, y)`` to its loss."""
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
    return Way(lambda: enqueued(run()), where.sync, lambda: [_loss_value([run() for _ in range(CHECKED_STEPS)][-1])])


def _replayed(where: Setting, step: Compiled) -> Way:
    """The way of a compiled step; its first calls were made when it was compiled."""
    if step.refused:
        return Way(missing=step.refused)
    return Way(lambda: enqueued(step.run()), where.sync, lambda: [_loss_value(step.first[CHECKED_STEPS - 1])])


def _loss_value(loss: Any) -> np.ndarray:
    return np.array([float(loss.to_host())])


def _amp_way(where: Setting, model: Callable[[], Any], weights: dict[str, Any], optimizer: str, options: dict[str, Any],
             data: tuple[Any, Any], dtype: str) -> Way:  # fmt: skip
    twin = model()
    twin.load_state_dict(weights)
    return _replayed(where, Compiled(our_step(twin, optimizer, options, lambda: casts.autocast(dtype=dtype)), *data))


def torch_step(where: Setting, make: Callable[[Any], Any], weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray,
                optimizer: str, options: dict[str, Any], amp: str = "") -> Way:  # fmt: skip
    """The same step in torch."""
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


def _torch_mlp(torch: Any) -> Any:
    """784-128-10, named as :class:`netcl.nn.MLP` names its layers."""
    nn = torch.nn

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    return Model()


def mlp_step(batch: int, comparisons: Sequence[Comparison]) -> Case:
    """784-128-10 with Adam."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        return values(batch, 784), np.arange(batch, dtype=np.int64) % 10

    return train_step(f"MLP 784-128-10 step, batch {batch}", lambda: nn.MLP(784, [128], 10), _torch_mlp, data, "Adam",
                      {"lr": 1e-3}, comparisons)  # fmt: skip
