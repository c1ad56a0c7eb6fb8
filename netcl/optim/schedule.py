"""Learning-rate schedules: a scheduler takes the optimizer and changes ``lr`` of its groups in ``step``.

As in torch, many schedulers compute the new rate from the group's current rate, so several schedulers can share an optimizer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from netcl.core import recording
from netcl.core.errors import check_probability, message
from netcl.optim.optimizer import Group, Optimizer, check_counts, check_number

__all__ = [
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LRScheduler",
    "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "Scheduler",
    "SequentialLR", "StepLR", "WarmupCosine",
]  # fmt: skip


def _per_group(op: str, name: str, value: Any, count: int) -> list[Any]:
    """Return a list of one value per group; a single value is repeated for all groups."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(message(op, f"{name} must have one value per parameter group", given=len(values), groups=count))
    return values


def _check_optimizer(op: str, optimizer: Any) -> None:
    if not isinstance(getattr(optimizer, "param_groups", None), list):  # also optimizers in shares and of replicas
        raise TypeError(message(op, "the first argument must be the optimizer", given=type(optimizer).__name__))


class Described:
    """Base class of all schedules: the last rates, the state, and a ``repr`` with the settings, the step and the rates."""

    optimizer: Any
    _last_lr: list[float]
    _not_saved: tuple[str, ...] = ("optimizer",)

    def __repr__(self) -> str:
        plain = (bool, int, float, str)
        shown: dict[str, Any] = {name: value for name, value in vars(self).items() if name[0] != "_" and isinstance(value, plain)}
        shown["lr"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that this scheduler has last set, one per group."""
        recording.host_work("get_last_lr() of a scheduler")
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the optimizer and functions: numbers, strings, and lists and dicts of them."""
        return {key: value for key, value in vars(self).items() if key not in self._not_saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; entries that this scheduler does not have, such as torch's, are ignored."""
        own = self.state_dict()
        missing = sorted({"last_epoch", "_last_lr", "base_lrs", "best"} & set(own) - set(state_dict))
        if missing:
            raise ValueError(message(type(self).__name__, f"the state must have {missing[0]!r}", "was it saved by another scheduler?"))
        vars(self).update({key: state_dict[key] for key in own if key in state_dict})


class Scheduler(Described):
    """Base class of schedulers, which set the learning rate of every group at the start and at each :meth:`step`.

    A subclass defines :meth:`rates`, or ``get_lr()`` as in torch. ``last_epoch`` counts the steps; to resume, load the state of optimizer
    and scheduler.
    """

    from_initial = True  # whether a restart begins at the initial learning rates

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1):
        op = type(self).__name__
        _check_optimizer(op, optimizer)
        for i, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                remedy = "load the optimizer's state first, or leave last_epoch out"
                raise ValueError(message(op, f"group {i} has no 'initial_lr' to resume from", remedy, last_epoch=last_epoch))
        self.optimizer = optimizer
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self._advance(first=True)

    def rates(self, first: bool) -> Sequence[float]:
        """Return the learning rate of every group at ``last_epoch``; ``first`` is True in the constructor and at a restart."""
        return self.get_lr()

    def get_lr(self) -> Sequence[float]:
        """Return the learning rate of every group at ``last_epoch``, in schedules that do not define :meth:`rates`."""
        raise NotImplementedError(message(type(self).__name__, "a schedule must define get_lr() or rates()"))

    @property
    def groups(self) -> list[Group]:
        return self.optimizer.param_groups

    def present(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    def step(self) -> None:
        """Advance by one step (or epoch, depending on the unit of the schedule)."""
        recording.again(self._advance)

    def restart(self) -> None:
        """Restart at step 0, from the initial learning rates: :class:`SequentialLR` does this at a milestone."""
        for group, rate in zip(self.groups, self.base_lrs, strict=True) if self.from_initial else ():
            group["lr"] = rate
        self._begin()

    def _begin(self) -> None:
        self.last_epoch = -1
        self._advance(first=True)

    def _advance(self, first: bool = False) -> None:
        self.last_epoch += 1
        for group, rate in zip(self.groups, self.rates(first), strict=True):
            group["lr"] = rate
        self._last_lr = self.present()


class LambdaLR(Scheduler):
    """Sets the learning rate to ``initial lr * lr_lambda(step)``; one function, or one per group. Functions are not part of the state.

    >>> from netcl.core.tensor import Tensor
    >>> from netcl.optim import SGD
    >>> opt = SGD([Tensor.from_host([1.0])], lr=1.0)
    >>> schedule = LambdaLR(opt, lambda step: 0.5**step)
    >>> schedule.step()
    >>> opt.param_groups[0]["lr"]
    0.5
    """

    _not_saved = ("optimizer", "lr_lambdas")

    def __init__(self, optimizer: Optimizer, lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]], last_epoch: int = -1):
        op = type(self).__name__
        _check_optimizer(op, optimizer)
        self.lr_lambdas = _per_group(op, "lr_lambda", lr_lambda, len(optimizer.param_groups))
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        return [base * function(self.last_epoch) for base, function in zip(self.base_lrs, self.lr_lambdas, strict=True)]


class MultiplicativeLR(LambdaLR):
    """Multiplies the current learning rate by ``lr_lambda(step)`` at every step; one function, or one per group."""

    def rates(self, first: bool) -> Sequence[float]:
        factors = [1.0 if first else function(self.last_epoch) for function in self.lr_lambdas]
        return [lr * factor for lr, factor in zip(self.present(), factors, strict=True)]

    def restart(self) -> None:
        """Restart at step 0, but from the current learning rate, as torch does."""
        self.last_epoch = -1
        self._advance()


class StepLR(Scheduler):
    """Multiplies the learning rate by ``gamma`` every ``step_size`` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1):
        check_counts("StepLR", step_size=step_size)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        due = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return [lr * self.gamma for lr in self.present()] if due else self.present()


class MultiStepLR(Scheduler):
    """Multiplies the learning rate by ``gamma`` at each of the ``milestones`` (twice if a milestone is listed twice)."""

    def __init__(self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1):
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        times = self.milestones.count(self.last_epoch)
        return [lr * self.gamma**times for lr in self.present()] if times else self.present()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; milestones may be a dict of counts, as in torch."""
        super().load_state_dict(state_dict)
        if isinstance(self.milestones, Mapping):
            self.milestones = sorted(Counter({int(at): times for at, times in self.milestones.items()}).elements())


class ExponentialLR(Scheduler):
    """Multiplies the learning rate by ``gamma`` at every step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1):
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        return self.present() if first else [lr * self.gamma for lr in self.present()]


class ConstantLR(Scheduler):
    """Multiplies the learning rate by ``factor`` for the first ``total_iters`` steps."""

    def __init__(self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1):
        if not 0 < factor <= 1:
            raise ValueError(message("ConstantLR", "factor must be above 0 and at most 1", factor=factor))
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        if self.last_epoch == 0:
            return [lr * self.factor for lr in self.present()]
        return [lr * (1.0 / self.factor) for lr in self.present()] if self.last_epoch == self.total_iters else self.present()

    def restart(self) -> None:
        """Restart at step 0, from the initial learning rates; with ``total_iters=0`` they stay, as in torch."""
        super().restart()
        if not self.total_iters:
            for group, rate in zip(self.groups, self.base_lrs, strict=True):
                group["lr"] = rate
            self._last_lr = self.present()


class PolynomialLR(Scheduler):
    """Sets the learning rate to ``initial lr * (1 - step / total_iters) ** power``, then 0."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1):
        check_counts("PolynomialLR", total_iters=total_iters)
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        if first or self.last_epoch > self.total_iters:
            return self.present()
        factor = ((1.0 - self.last_epoch / self.total_iters) / (1.0 - (self.last_epoch - 1) / self.total_iters)) ** self.power
        return [lr * factor for lr in self.present()]


class LinearLR(Scheduler):
    """Multiplies the learning rate by a factor that changes linearly from ``start_factor`` to ``end_factor`` in ``total_iters`` steps."""

    def __init__(
        self, optimizer: Optimizer, start_factor: float = 1.0 / 3, end_factor: float = 1.0, total_iters: int = 5, last_epoch: int = -1
    ):
        if not 0 < start_factor <= 1:
            raise ValueError(message("LinearLR", "start_factor must be above 0 and at most 1", start_factor=start_factor))
        if not 0 <= end_factor <= 1:
            raise ValueError(message("LinearLR", "end_factor must be from 0 to 1", end_factor=end_factor))
        check_counts("LinearLR", total_iters=total_iters)
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        if self.last_epoch == 0:
            return [lr * self.start_factor for lr in self.present()]
        if first or self.last_epoch > self.total_iters:
            return self.present()
        rise = self.end_factor - self.start_factor
        before = self.total_iters * self.start_factor + (self.last_epoch - 1) * rise
        factor = max(1.0 + rise / before, 0.0)  # rounding may give a rate slightly below 0, which optimizers reject
        return [lr * factor for lr in self.present()]


class CosineAnnealingLR(Scheduler):
    """Lowers the learning rate along half a cosine to ``eta_min`` in ``T_max`` steps, and raises it again in as many steps."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1):
        check_counts("CosineAnnealingLR", T_max=T_max)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        if first:
            return self.present()
        if (self.last_epoch - 1 - self.T_max) % (2 * self.T_max) == 0:  # the rate is eta_min: a ratio would divide by 0
            rise = 1 - math.cos(math.pi / self.T_max)
            return [lr + (base - self.eta_min) * rise / 2 for lr, base in zip(self.present(), self.base_lrs, strict=True)]
        now, before = (1 + math.cos(math.pi * step / self.T_max) for step in (self.last_epoch, self.last_epoch - 1))
        return [now / before * (lr - self.eta_min) + self.eta_min for lr in self.present()]


class CosineAnnealingWarmRestarts(Scheduler):
    """Lowers the learning rate along half a cosine to ``eta_min`` in ``T_0`` steps, then restarts with ``T_mult`` times as many."""

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1):
        check_counts("CosineAnnealingWarmRestarts", T_0=T_0, T_mult=T_mult)
        self.T_0, self.T_i, self.T_mult, self.eta_min, self.T_cur = T_0, T_0, T_mult, eta_min, 0.0
        super().__init__(optimizer, last_epoch)

    def step(self, epoch: float | None = None) -> None:
        """Advance by one step, or to ``epoch``, which may be a fraction: ``epoch + batch / batches``."""
        if epoch is None:
            super().step()
        else:
            check_number("CosineAnnealingWarmRestarts", "epoch", epoch)
            recording.host_work("step(epoch) of a scheduler")
            self._go_to(epoch)
            self._advance()

    def _go_to(self, epoch: float) -> None:
        """Set the state to one step before ``epoch``, so that :meth:`_advance` reaches ``epoch``."""
        self.T_i, self.T_cur, self.last_epoch = self.T_0, epoch, math.floor(epoch) - 1
        while self.T_cur >= self.T_i:
            self.T_cur, self.T_i = self.T_cur - self.T_i, self.T_i * self.T_mult
        self.T_cur -= 1

    def _advance(self, first: bool = False) -> None:
        if first:
            self._go_to(self.last_epoch + 1)
        self.T_cur += 1
        if self.T_cur >= self.T_i:
            self.T_cur, self.T_i = self.T_cur % self.T_i, self.T_i * self.T_mult
        super()._advance(first)

    def rates(self, first: bool) -> Sequence[float]:
        share = (1 + math.cos(math.pi * self.T_cur / self.T_i)) / 2
        return [self.eta_min + (base - self.eta_min) * share for base in self.base_lrs]


class WarmupCosine(Scheduler):
    """Raises the learning rate linearly for ``warmup_steps``, then lowers it along half a cosine to ``min_lr`` at ``total_steps``.

    The first rate is ``start_factor`` times the initial one, by default ``1 / (warmup_steps + 1)``, so that no step is lost
    at a rate of 0.

    >>> from netcl.core.tensor import Tensor
    >>> from netcl.optim import SGD
    >>> opt = SGD([Tensor.from_host([1.0])], lr=1.0)
    >>> schedule = WarmupCosine(opt, warmup_steps=3, total_steps=5)
    >>> rates = [opt.param_groups[0]["lr"]]
    >>> for _ in range(5):
    ...     schedule.step()
    ...     rates.append(round(opt.param_groups[0]["lr"], 6))
    >>> rates
    [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int, total_steps: int, min_lr: float = 0.0, start_factor: float | None = None,
        last_epoch: int = -1,
    ):  # fmt: skip
        check_counts("WarmupCosine", total_steps=total_steps)
        if not 0 <= warmup_steps < total_steps:
            what = "warmup_steps must be from 0 to total_steps - 1"
            raise ValueError(message("WarmupCosine", what, warmup_steps=warmup_steps, total_steps=total_steps))
        self.warmup_steps, self.total_steps, self.min_lr = warmup_steps, total_steps, min_lr
        self.start_factor = 1 / (warmup_steps + 1) if start_factor is None else start_factor
        check_number("WarmupCosine", "start_factor", self.start_factor)
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        step, warm = self.last_epoch, self.warmup_steps
        if step < warm:
            factor = self.start_factor + (1 - self.start_factor) * step / warm
            return [base * factor for base in self.base_lrs]
        done = min((step - warm) / (self.total_steps - warm), 1.0)
        return [self.min_lr + (base - self.min_lr) * (1 + math.cos(math.pi * done)) / 2 for base in self.base_lrs]


def _check_momentum(op: str, optimizer: Optimizer, cycle_momentum: bool) -> None:
    if cycle_momentum and not {"momentum", "betas"} & set(optimizer.defaults):
        raise ValueError(message(op, "the optimizer must have momentum or betas", "pass cycle_momentum=False"))


def _set_momentum(group: Group, momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum


#: The height of a cycle by mode, from gamma and the number of the cycle (of the step in ``exp_range``).
_HEIGHTS: dict[str, Callable[[float, float], float]] = {
    "triangular": lambda gamma, cycle: 1.0,
    "triangular2": lambda gamma, cycle: 1 / 2.0 ** (cycle - 1),
    "exp_range": lambda gamma, step: gamma**step,
}


class CyclicLR(Scheduler):
    """Repeatedly raises the rate from ``base_lr`` to ``max_lr`` in ``step_size_up`` steps and lowers it again in ``step_size_down``.

    ``mode`` scales the height of a cycle: ``"triangular"`` keeps it, ``"triangular2"`` halves it in every cycle, ``"exp_range"``
    multiplies it by ``gamma`` at every step. ``scale_fn`` replaces the mode; it takes the cycle, or the step if ``scale_mode`` is
    ``"iterations"``. ``cycle_momentum`` lowers the momentum (or first beta) while the rate rises, and raises it while the rate falls.
    """

    _not_saved = ("optimizer", "scale_fn")

    def __init__(
        self, optimizer: Optimizer, base_lr: float | Sequence[float], max_lr: float | Sequence[float], step_size_up: int = 2000,
        step_size_down: int | None = None, mode: str = "triangular", gamma: float = 1.0, scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle", cycle_momentum: bool = True, base_momentum: float | Sequence[float] = 0.8,
        max_momentum: float | Sequence[float] = 0.9, last_epoch: int = -1,
    ):  # fmt: skip
        op = "CyclicLR"
        _check_optimizer(op, optimizer)
        _check_momentum(op, optimizer, cycle_momentum)
        if mode not in _HEIGHTS and scale_fn is None:
            raise ValueError(message(op, f"mode must be one of {', '.join(_HEIGHTS)}", "or pass scale_fn", mode=repr(mode)))
        count = len(optimizer.param_groups)
        down = step_size_up if step_size_down is None else step_size_down
        self.total_size = float(step_size_up) + float(down)
        self.step_ratio = float(step_size_up) / self.total_size
        self.mode, self.gamma, self.cycle_momentum = mode, gamma, cycle_momentum
        self.scale_fn = scale_fn
        self.scale_mode = scale_mode if scale_fn else "iterations" if mode == "exp_range" else "cycle"
        starts, self.max_lrs = (_per_group(op, name, x, count) for name, x in (("base_lr", base_lr), ("max_lr", max_lr)))
        self.base_momentums = _per_group(op, "base_momentum", base_momentum, count)
        self.max_momentums = _per_group(op, "max_momentum", max_momentum, count)
        if last_epoch == -1:
            for group, lr in zip(optimizer.param_groups, starts, strict=True):
                group["lr"] = lr
        super().__init__(optimizer, last_epoch)
        self.base_lrs = starts

    def rates(self, first: bool) -> Sequence[float]:
        cycle = math.floor(1 + self.last_epoch / self.total_size)
        x = 1.0 + self.last_epoch / self.total_size - cycle
        height = x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)
        at = cycle if self.scale_mode == "cycle" else self.last_epoch
        scale = _HEIGHTS[self.mode](self.gamma, at) if self.scale_fn is None else self.scale_fn(at)
        if self.cycle_momentum:
            for group, low, high in zip(self.groups, self.base_momentums, self.max_momentums, strict=True):
                _set_momentum(group, high - (high - low) * height * scale)
        return [low + (high - low) * height * scale for low, high in zip(self.base_lrs, self.max_lrs, strict=True)]


class OneCycleLR(Scheduler):
    """Raises the rate from ``max_lr / div_factor`` to ``max_lr`` in a fraction ``pct_start`` of the steps, then lowers it to a minimum.

    The length is ``total_steps``, or ``epochs * steps_per_epoch``. The minimum is the first rate divided by ``final_div_factor``.
    ``three_phase`` lowers the rate to the first rate in as many steps as raised it, then to the minimum. ``cycle_momentum`` lowers
    the momentum (or first beta) from ``max_momentum`` to ``base_momentum`` while the rate rises, and raises it while the rate falls.
    """

    def __init__(
        self, optimizer: Optimizer, max_lr: float | Sequence[float], total_steps: int | None = None, epochs: int | None = None,
        steps_per_epoch: int | None = None, pct_start: float = 0.3, anneal_strategy: str = "cos", cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85, max_momentum: float | Sequence[float] = 0.95, div_factor: float = 25.0,
        final_div_factor: float = 1e4, three_phase: bool = False, last_epoch: int = -1,
    ):  # fmt: skip
        op = "OneCycleLR"
        _check_optimizer(op, optimizer)
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                remedy = "pass total_steps, or epochs and steps_per_epoch"
                raise ValueError(message(op, "the length of the cycle must be given", remedy))
            check_counts(op, epochs=epochs, steps_per_epoch=steps_per_epoch)
            total_steps = epochs * steps_per_epoch
        check_counts(op, total_steps=total_steps)
        self.total_steps = total_steps
        check_probability(op, "pct_start", pct_start)
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(message(op, "anneal_strategy must be 'cos' or 'linear'", anneal_strategy=repr(anneal_strategy)))
        _check_momentum(op, optimizer, cycle_momentum)
        self.anneal_strategy, self.cycle_momentum, self.optimizer = anneal_strategy, cycle_momentum, optimizer
        self.phases = _phases(self.total_steps, pct_start, three_phase)
        if last_epoch == -1:
            momenta = {"base_momentum": base_momentum, "max_momentum": max_momentum} if cycle_momentum else {}
            for name, value in {"max_lr": max_lr, **momenta}.items():  # the groups hold the extremes of the cycle, as in torch
                for group, given in zip(self.groups, _per_group(op, name, value, len(self.groups)), strict=True):
                    group[name] = given
            for group in self.groups:
                group["initial_lr"] = group["max_lr"] / div_factor
                group["min_lr"] = group["initial_lr"] / final_div_factor
        super().__init__(optimizer, last_epoch)

    def rates(self, first: bool) -> Sequence[float]:
        if self.last_epoch > self.total_steps:
            what, remedy = "step must be at most total_steps", "make total_steps larger, or stop stepping the scheduler"
            raise ValueError(message("OneCycleLR", what, remedy, step=self.last_epoch, total_steps=self.total_steps))
        at = next((i for i, phase in enumerate(self.phases) if self.last_epoch <= phase[0]), len(self.phases) - 1)
        start = self.phases[at - 1][0] if at else 0.0
        end, *ends = self.phases[at]
        done = (self.last_epoch - start) / (end - start)
        for group in self.groups if self.cycle_momentum else ():
            _set_momentum(group, self._between(group[ends[2]], group[ends[3]], done))
        return [self._between(group[ends[0]], group[ends[1]], done) for group in self.groups]

    def _between(self, start: float, end: float, done: float) -> float:
        if self.anneal_strategy == "linear":
            return (end - start) * done + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * done) + 1)


def _phases(total: int, pct_start: float, three: bool) -> list[list[Any]]:
    """Return for each phase its last step and the keys of a group for its first and last learning rate and momentum."""
    up = [float(pct_start * total) - 1, "initial_lr", "max_lr", "max_momentum", "base_momentum"]
    if not three:
        return [up, [total - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"]]
    down = [float(2 * pct_start * total) - 2, "max_lr", "initial_lr", "base_momentum", "max_momentum"]
    return [up, down, [total - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum"]]


class _Several(Scheduler):
    """Base class of schedulers that combine several schedulers of one optimizer; the state includes all their states."""

    _not_saved = ("optimizer", "_schedulers")

    def __init__(self, optimizer: Any, schedulers: Sequence[Any]):
        op = type(self).__name__
        _check_optimizer(op, optimizer)
        for i, scheduler in enumerate(schedulers):
            if not isinstance(scheduler, Scheduler):
                what = f"scheduler {i} must be a Scheduler, whose step() takes no metric"
                raise TypeError(message(op, what, "step a ReduceLROnPlateau by itself", given=type(scheduler).__name__))
            if scheduler.optimizer is not optimizer:
                what = f"scheduler {i} must belong to the same optimizer as the others"
                raise ValueError(message(op, what, given=type(scheduler).__name__))
        self.optimizer, self._schedulers = optimizer, list(schedulers)

    @property
    def base_lrs(self) -> list[float]:  # type: ignore[override]
        return self._schedulers[0].base_lrs

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        parts = state_dict.get("_schedulers", ())
        if len(parts) != len(self._schedulers):
            what = "the state must have as many schedulers as this one"
            raise ValueError(message(type(self).__name__, what, schedulers=len(self._schedulers), saved=len(parts)))
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "_schedulers"})
        for scheduler, part in zip(self._schedulers, parts, strict=True):
            scheduler.load_state_dict(part)


class ChainedScheduler(_Several):
    """Several schedulers at once: each changes the learning rate that the previous one has set."""

    def __init__(self, schedulers: Sequence[Scheduler], optimizer: Optimizer | None = None):
        if not schedulers:
            raise ValueError(message("ChainedScheduler", "schedulers must not be empty"))
        super().__init__(optimizer or schedulers[0].optimizer, schedulers)
        self._last_lr = self.present()

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        return self._schedulers[0].last_epoch

    def _begin(self) -> None:
        for scheduler in self._schedulers:
            scheduler._begin()
        self._last_lr = self.present()

    def _advance(self, first: bool = False) -> None:
        for scheduler in self._schedulers:
            scheduler._advance()
        self._last_lr = self.present()


class SequentialLR(_Several):
    """Runs one scheduler after the other. Each begins at its milestone by :meth:`Scheduler.restart`; most start from the initial rate."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Scheduler], milestones: Sequence[int], last_epoch: int = -1):
        if not schedulers or len(milestones) != len(schedulers) - 1:
            what = "there must be at least one scheduler, and one milestone fewer than schedulers"
            raise ValueError(message("SequentialLR", what, schedulers=len(schedulers), milestones=len(milestones)))
        super().__init__(optimizer, schedulers)
        self._milestones, self.last_epoch = list(milestones), last_epoch
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self._advance(first=True)

    def _advance(self, first: bool = False) -> None:
        self.last_epoch += 1
        at = bisect_right(self._milestones, self.last_epoch)
        if first:
            self._schedulers[at]._begin()
        elif at and self._milestones[at - 1] == self.last_epoch:
            self._schedulers[at].restart()
        else:
            self._schedulers[at]._advance()
        self._last_lr = self.present()


class ReduceLROnPlateau(Described):
    """Multiplies the learning rate by ``factor`` when a metric has not improved for more than ``patience`` steps.

    ``mode`` is ``"min"`` if smaller values are better, else ``"max"``. ``threshold`` is the least improvement that counts: a fraction of
    the best value, or with ``threshold_mode="abs"`` a difference. After a reduction ``cooldown`` steps are not counted. No rate is
    lowered below ``min_lr``, and changes of at most ``eps`` are not made.

    >>> from netcl.core.tensor import Tensor
    >>> from netcl.optim import SGD
    >>> opt = SGD([Tensor.from_host([1.0])], lr=1.0)
    >>> schedule = ReduceLROnPlateau(opt, patience=0)
    >>> for loss in (1.0, 2.0):
    ...     schedule.step(loss)
    >>> opt.param_groups[0]["lr"]
    0.1
    """

    def __init__(
        self, optimizer: Optimizer, mode: str = "min", factor: float = 0.1, patience: int = 10, threshold: float = 1e-4,
        threshold_mode: str = "rel", cooldown: int = 0, min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ):  # fmt: skip
        op = "ReduceLROnPlateau"
        _check_optimizer(op, optimizer)
        check_number(op, "factor", factor, 0.0, 1.0)
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            what = "mode must be 'min' or 'max', and threshold_mode 'rel' or 'abs'"
            raise ValueError(message(op, what, mode=repr(mode), threshold_mode=repr(threshold_mode)))
        self.optimizer = optimizer
        self.mode, self.factor, self.patience, self.cooldown = mode, factor, patience, cooldown
        self.threshold, self.threshold_mode, self.eps = threshold, threshold_mode, eps
        self.min_lrs = _per_group(op, "min_lr", min_lr, len(optimizer.param_groups))
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = self.last_epoch = 0
        self._last_lr = [group["lr"] for group in optimizer.param_groups]

    def _is_better(self, value: float) -> bool:
        if self.threshold_mode == "rel":
            return value < self.best * (1.0 - self.threshold) if self.mode == "min" else value > self.best * (1.0 + self.threshold)
        return value < self.best - self.threshold if self.mode == "min" else value > self.best + self.threshold

    def step(self, metrics: Any) -> None:
        """Count an epoch with its metric, a number or a tensor with one element, and reduce the rates on a plateau."""
        value = float(metrics)
        recording.again(lambda: self._advance(value))

    def _advance(self, value: float) -> None:
        self.last_epoch += 1
        better = self._is_better(value)
        self.num_bad_epochs = 0 if better else self.num_bad_epochs + 1
        self.best = value if better else self.best
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        groups = self.optimizer.param_groups
        if self.num_bad_epochs > self.patience:
            for group, least in zip(groups, _per_group("ReduceLROnPlateau", "min_lr", self.min_lrs, len(groups)), strict=True):
                rate = max(group["lr"] * self.factor, least)
                if group["lr"] - rate > self.eps:
                    group["lr"] = rate
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in groups]


LRScheduler = Scheduler  # torch's name
