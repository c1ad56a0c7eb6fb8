"""A range test that finds a learning rate: the rate grows with every step until the loss diverges.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from netcl.core.errors import message

if TYPE_CHECKING:
    from netcl.trainer.trainer import Trainer

_SMOOTHING = 0.9
_DIVERGED = 4.0  # times the lowest loss


@dataclass(frozen=True)
class RateTest:
    """The learning rates that were tried, the smoothed loss at each, and ``suggestion``: a tenth of the rate with the lowest loss."""

    rates: list[float]
    losses: list[float]
    suggestion: float


def find_lr(trainer: Trainer, data: Iterable[Any], low: float = 1e-6, high: float = 1.0, steps: int = 100) -> RateTest:
    """Train while the learning rate rises from ``low`` to ``high``, then restore the trainer; returns the losses and a suggested rate.

    The test ends after ``steps`` batches, or when the loss diverges.
    """
    if not (0 < low < high < math.inf) or steps < 10:
        what = "low and high must be finite with 0 < low < high, and steps must be at least 10"
        raise ValueError(message("find_lr", what, low=low, high=high, steps=steps))
    rates, losses, mean = [], list[float](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "before.netcl"
        trainer.save(kept)
        trainer.model.train()
        batches = islice(chain.from_iterable(repeat(data, steps)), steps)  # without any batch, it ends too
        for i, ((x, y), rate) in enumerate(zip(batches, np.geomspace(low, high, steps).tolist(), strict=False)):
            trainer.batch, trainer.batches = i, steps  # what a progress line shows
            for group in trainer.optimizer.param_groups:
                group["lr"] = rate
            mean = _SMOOTHING * mean + (1 - _SMOOTHING) * float(trainer.train_on_batch(x, y).item())
            smooth = mean / (1 - _SMOOTHING ** (i + 1))
            if not math.isfinite(smooth) or smooth > _DIVERGED * min(losses, default=math.inf):
                break
            rates.append(rate)
            losses.append(smooth)
        trainer.load(kept)
    if not losses:
        raise ValueError(message("find_lr", "data must have at least one batch, with a finite loss at learning rate low", low=low))
    return RateTest(rates, losses, float(f"{rates[int(np.argmin(losses))] / 10:.2g}"))
