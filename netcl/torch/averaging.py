"""``torch.optim.swa_utils``: models whose weights are averages, the schedule of that phase, and running statistics for such models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from netcl import autograd
from netcl.core.tensor import Tensor
from netcl.nn import BatchNorm1d
from netcl.nn.module import Module
from netcl.optim.schedule import LRScheduler


def get_swa_avg_fn() -> Callable[..., Tensor]:
    """Return the update of an equal average."""
    return lambda average, value, count: average + (value - average) / (count + 1)


def get_ema_avg_fn(decay: float = 0.999) -> Callable[..., Tensor]:
    """Return the update of an exponential average."""
    return lambda average, value, count: average * decay + value * (1 - decay)


def _for_lists(one: Callable[..., Tensor]) -> Callable[..., None]:
    def update(averages: list[Tensor], values: list[Tensor], count: Any) -> None:
        for average, value in zip(averages, values, strict=True):
            average.copy_(one(average, value, count))

    return update


class AveragedModel(Module):
    """A copy of a model whose parameters, and with ``use_buffers`` its buffers, are averages."""

    n_averaged: Tensor

    def __init__(self, model: Module, device: Any = None, avg_fn: Any = None, multi_avg_fn: Any = None, use_buffers: bool = False):
        super().__init__()
        self.module = copy.deepcopy(model).to(device) if device is not None else copy.deepcopy(model)
        self.register_buffer("n_averaged", autograd.tensor(0, "int64"))
        self._update, self.use_buffers = multi_avg_fn or _for_lists(avg_fn or get_swa_avg_fn()), use_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def update_parameters(self, model: Module) -> None:
        """Average with the parameters of ``model``; the first call copies them."""
        kinds = [Module.parameters, Module.buffers] if self.use_buffers else [Module.parameters]
        own, given = ([x.detach() for kind in kinds for x in kind(m)] for m in (self.module, model))
        count = int(self.n_averaged.item())
        with autograd.no_grad():
            if count == 0:
                for average, value in zip(own, given, strict=True):
                    average.copy_(value)
            else:
                self._update(own, [x.to(average.queue) for x, average in zip(given, own, strict=True)], count)
            for average, value in zip([] if self.use_buffers else self.module.buffers(), model.buffers(), strict=False):
                average.copy_(value)
            self.n_averaged += 1


class SWALR(LRScheduler):
    """Anneals the learning rates to ``swa_lr`` in ``anneal_epochs`` steps, by a cosine or a line, and keeps them."""

    from_initial = False

    def __init__(self, optimizer: Any, swa_lr: Any, anneal_epochs: int = 10, anneal_strategy: str = "cos", last_epoch: int = -1):
        given = swa_lr if isinstance(swa_lr, list | tuple) else [swa_lr] * len(optimizer.param_groups)
        for group, rate in zip(optimizer.param_groups, given, strict=True):
            group["swa_lr"] = rate
        self.anneal_epochs, self.anneal_strategy = anneal_epochs, anneal_strategy
        super().__init__(optimizer, last_epoch)

    def _share(self, epoch: int) -> float:
        done = max(0.0, min(1.0, epoch / max(1, self.anneal_epochs)))
        return (1 - math.cos(math.pi * done)) / 2 if self.anneal_strategy == "cos" else done

    def get_lr(self) -> list[float]:
        """Return the learning rates of this step."""
        step = max(self.last_epoch, 0 if self.anneal_epochs else 1)  # without an annealing, the first rate is swa_lr
        before, share = self._share(step - 1), self._share(step)
        rates = []
        for group in self.optimizer.param_groups:
            start = group["swa_lr"] if before == 1 else (group["lr"] - before * group["swa_lr"]) / (1 - before)
            rates.append(group["swa_lr"] * share + start * (1 - share))
        return rates


def update_bn(loader: Any, model: Module, device: Any = None) -> None:
    """Compute the running statistics of batch norms anew, as averages over the batches of a loader."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, BatchNorm1d.__base__)]  # type: ignore[arg-type]
    before = [m.momentum for m in layers]
    training = model.training
    for m in layers:
        m.reset_running_stats()
        m.momentum = None
    model.train()
    with autograd.no_grad():
        for batch in loader if layers else ():
            x = batch[0] if isinstance(batch, list | tuple) else batch
            model(x if device is None else x.to(device))
    for m, momentum in zip(layers, before, strict=True):
        m.momentum = momentum
    model.train(training)


SWA_NAMES: dict[str, Any] = {
    "AveragedModel": AveragedModel, "SWALR": SWALR, "update_bn": update_bn, "get_swa_avg_fn": get_swa_avg_fn,
    "get_ema_avg_fn": get_ema_avg_fn, "get_swa_multi_avg_fn": lambda: _for_lists(get_swa_avg_fn()),
    "get_ema_multi_avg_fn": lambda decay=0.999: _for_lists(get_ema_avg_fn(decay)),
}  # fmt: skip
