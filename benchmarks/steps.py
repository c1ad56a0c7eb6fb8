"""Training steps in netcl and in torch, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from comparison import Case, Comparison

import netcl.autograd as ag
from netcl import amp as casts
from netcl import nn, optim
from netcl.bench import Compiled, Setting, Way, last_loss, training_step, values


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
        ways = {"ours": replace(where.ours(lambda: eager(*on_device)), result=lambda: last_loss(lambda: eager(*on_device)))}
        again = model()
        again.load_state_dict(weights)
        ways["compiled"] = Compiled(our_step(again, optimizer, options), *on_device).losses(where)
        if amp:
            ways["amp"] = _amp_way(where, model, weights, optimizer, options, on_device, amp)
            ways["torch amp"] = torch_step(where, theirs, weights, x, y, optimizer, options, amp)
        return ways | {"torch": torch_step(where, theirs, weights, x, y, optimizer, options)}

    return Case(name, make, comparisons, tolerance=0.05 if amp else 2e-2)


def our_step(model: Any, optimizer: str, options: dict[str, Any], context: Callable[[], Any] = nullcontext) -> Callable[..., Any]:
    """A training step of ``model``: ``(x, y)`` to its loss."""
    return training_step(model, getattr(optim, optimizer)(model.parameters(), **options), ag.cross_entropy, context)


def _amp_way(where: Setting, model: Callable[[], Any], weights: dict[str, Any], optimizer: str, options: dict[str, Any],
             data: tuple[Any, Any], dtype: str) -> Way:  # fmt: skip
    twin = model()
    twin.load_state_dict(weights)
    return Compiled(our_step(twin, optimizer, options, lambda: casts.autocast(dtype=dtype)), *data).losses(where)


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

    step = training_step(model, update, torch.nn.functional.cross_entropy, around)
    return Way(lambda: step(data, target), where.torch_sync, lambda: last_loss(lambda: step(data, target)))


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
