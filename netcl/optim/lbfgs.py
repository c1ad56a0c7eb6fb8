"""L-BFGS: a quasi-Newton method for whole batches, with an optional line search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl import ops
from netcl.autograd.tape import enable_grad, no_grad
from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import message
from netcl.core.tensor import Tensor, duplicate
from netcl.ops import update
from netcl.optim.optimizer import Group, Optimizer, check_counts, check_number

_ADD_SCALED = update.Rule("add_scaled", ("p", "g"), ("by",), {"new_p": "p + by * g"}, {"p": "new_p"})
_STATE_NUMBERS = ("t", "H_diag", "prev_loss", "func_evals", "n_iter")
_VECTORS, _HISTORY = ("d", "prev_flat_grad"), ("old_dirs", "old_stps", "ro")


def _inner_product(a: Tensor, b: Tensor) -> float:
    return float(ops.sum(ops.mul(a, b)))


def _largest(x: Tensor) -> float:
    return float(ops.max(ops.abs(x)))


class Point(NamedTuple):
    """A point of a line search: step length, loss, gradient, and slope along the line."""

    t: float
    loss: float
    gradient: Tensor
    slope: float


class LBFGS(Optimizer):
    """Moves along an approximate Newton direction, computed from the last ``history_size`` changes of parameters and gradients.

    ``step(closure)`` runs up to ``max_iter`` iterations and stops after ``max_eval`` calls of ``closure`` (default: ``5 * max_iter // 4``).
    ``closure`` computes the loss and its gradients. ``line_search_fn="strong_wolfe"`` chooses step lengths; the default is
    ``lr``, or less in the first iteration. There is one group of parameters, on one device. The host reads losses and slopes.

    >>> w = Tensor.from_host([3.0, -2.0], requires_grad=True)
    >>> opt = LBFGS([w], line_search_fn="strong_wolfe")
    >>> def closure():
    ...     opt.zero_grad()
    ...     loss = ((w - 1) ** 2).sum()
    ...     loss.backward()
    ...     return loss
    >>> _ = opt.step(closure)
    >>> w.to_host().round(4).tolist()
    [1.0, 1.0]
    """

    names = (*_VECTORS, *_HISTORY, *_STATE_NUMBERS)
    skips_on_device = False

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, max_iter: int = 20, max_eval: int | None = None, tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9, history_size: int = 100, line_search_fn: str | None = None, **switches: bool | None,
    ):  # fmt: skip
        max_eval = max_iter * 5 // 4 if max_eval is None else max_eval
        super().__init__(params, {
            "lr": lr, "max_iter": max_iter, "max_eval": max_eval, "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change, "history_size": history_size, "line_search_fn": line_search_fn,
        }, switches)  # fmt: skip

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(message(self.op, "there must be only one parameter group", "make an optimizer for each group"))
        super().add_param_group(group)

    def check(self, group: Group) -> None:
        for name in ("lr", "tolerance_grad", "tolerance_change"):
            check_number(self.op, name, group[name])
        check_counts(self.op, max_iter=group["max_iter"], max_eval=group["max_eval"], history_size=group["history_size"])
        search = group["line_search_fn"]
        if search not in (None, "strong_wolfe"):
            raise ValueError(message(self.op, "line_search_fn must be None or 'strong_wolfe'", line_search_fn=repr(search)))

    @property
    def params(self) -> list[Tensor]:
        return self.param_groups[0]["params"]

    def _gradient(self) -> Tensor:
        self.with_gradient(self.param_groups[0])  # raises if one does not fit
        kind = max((dtypes.sum_dtype(p.dtype) for p in self.params), key=lambda name: name == "float64")
        parts = [Tensor.zeros((p.size,), p.dtype, queue=p.queue) if p.grad is None else ops.reshape(p.grad.detach(), (-1,))
                 for p in self.params]  # fmt: skip
        return ops.cat([ops.cast(part, kind) for part in parts])

    def _move(self, by: float, direction: Tensor) -> None:
        parts = ops.split(direction, [p.size for p in self.params])
        update.apply(_ADD_SCALED, [self.params, [ops.reshape(x, p.shape) for x, p in zip(parts, self.params, strict=True)]], (by,))

    def _evaluate(self, closure: Callable[[], Any]) -> tuple[Any, float, Tensor]:
        with enable_grad():
            loss = closure()
        return loss, float(loss), self._gradient()

    def step(self, max_norm: Any = None, *, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Run up to ``max_iter`` iterations; returns the loss of the first evaluation."""
        both, closure = max_norm is not None and closure is not None, max_norm if closure is None else closure
        if both or options or not callable(closure):
            what = "step must be called with a function that computes the loss and its gradients, and nothing else"
            raise TypeError(message(self.op, what, "call step(closure)", given=type(closure).__name__))
        recording.host_work("LBFGS.step()")
        with no_grad():
            return self._iterate(closure)

    def _iterate(self, closure: Callable[[], Any]) -> Any:
        group, state = self.param_groups[0], self.state.setdefault(self.params[0], {"func_evals": 0, "n_iter": 0})
        first, loss, gradient = self._evaluate(closure)
        state["func_evals"] += 1
        evaluations = done = 1
        while _largest(gradient) > group["tolerance_grad"]:
            state["n_iter"] += 1
            d = state["d"] = self._direction(state, gradient, group["history_size"])
            state["prev_flat_grad"], state["prev_loss"] = gradient, loss
            slope = _inner_product(gradient, d)
            state["t"] = group["lr"] * (min(1.0, 1.0 / float(ops.sum(ops.abs(gradient)))) if state["n_iter"] == 1 else 1.0)
            if slope > -group["tolerance_change"]:
                break
            before, used = loss, 0
            if group["line_search_fn"] is not None:
                start, at = Point(0.0, loss, gradient, slope), partial(self._at, closure, [duplicate(p) for p in self.params], d)
                found, used = _strong_wolfe(at, start, state["t"], _largest(d), group["max_eval"] - evaluations)
                state["t"], loss, gradient = found.t, found.loss, found.gradient
                self._move(state["t"], d)
            else:
                self._move(state["t"], d)
                if done < group["max_iter"]:  # the last move of a step is not evaluated
                    _, loss, gradient = self._evaluate(closure)
                    used = 1
            evaluations += used
            state["func_evals"] += used
            stalled = _largest(d) * abs(state["t"]) <= group["tolerance_change"] or abs(loss - before) < group["tolerance_change"]
            if done == group["max_iter"] or evaluations >= group["max_eval"] or stalled:
                break
            done += 1
        return first

    def _at(self, closure: Callable[[], Any], start: list[Tensor], d: Tensor, t: float) -> Point:
        """Evaluate the point ``start + t * d``, then restore the parameters to ``start``."""
        self._move(t, d)
        _, loss, gradient = self._evaluate(closure)
        update.copy(self.params, start)
        return Point(t, loss, gradient, _inner_product(gradient, d))

    def _direction(self, state: dict[str, Any], gradient: Tensor, most: int) -> Tensor:
        """Return the search direction from the last ``most`` steps, by the two-loop recursion (Nocedal & Wright, algorithm 7.4)."""
        if state["n_iter"] == 1:
            state |= {"old_dirs": [], "old_stps": [], "ro": [], "H_diag": 1.0}
            return ops.neg(gradient)
        y, s = ops.sub(gradient, state["prev_flat_grad"]), ops.mul(state["d"], state["t"])
        curvature = _inner_product(y, s)
        if curvature > 1e-10:
            for name, value in zip(_HISTORY, (y, s, 1.0 / curvature), strict=True):
                state[name] = [*state[name], value][-most:]
            state["H_diag"] = curvature / _inner_product(y, y)
        history = list(zip(state["old_dirs"], state["old_stps"], state["ro"], strict=True))
        q, shares = ops.neg(gradient), []
        for y, s, ro in reversed(history):
            shares.append(_inner_product(s, q) * ro)
            q = ops.sub(q, ops.mul(y, shares[-1]))
        q = ops.mul(q, state["H_diag"])
        for y, s, ro in history:
            q = ops.add(q, ops.mul(s, shares.pop() - _inner_product(y, q) * ro))
        return q

    def _loaded_state(self, p: Tensor, number: int, saved: Mapping[str, Any], group: Group) -> dict[str, Any]:
        known = {name: value for name, value in saved.items() if value is not None and name != "al"}  # torch keeps a scratch list there
        unknown, missing = sorted(set(known) - set(self.names)), sorted({"func_evals", "n_iter"} - set(known))
        if unknown or missing:
            raise ValueError(message(self.op, "the state must be that of an LBFGS optimizer", unknown=unknown, missing=missing))
        return {name: _loaded(p, name, value) for name, value in known.items()}


def _loaded(p: Tensor, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_loaded(p, name, part) for part in value]
    array = np.asarray(value)
    if name in ("func_evals", "n_iter"):
        return int(array)
    return float(array) if not array.ndim else Tensor.from_host(p.queue, array, persistent=True)


def _cubic(a: Point, b: Point, bounds: tuple[float, float] | None = None) -> float:
    """Return the minimum of the cubic through two points and their slopes, clipped to ``bounds``; if none exists, the middle of the bounds.

    See Nocedal & Wright, equation 3.59.
    """
    a, b = (a, b) if a.t <= b.t else (b, a)
    low, high = bounds or (a.t, b.t)
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return (low + high) / 2
    d2 = square**0.5
    return min(max(b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2)), low), high)


def _strong_wolfe(at: Callable[[float], Point], start: Point, t: float, size: float, most: int) -> tuple[Point, int]:
    """Return a point with sufficient decrease and a small slope, or the best one found, and the number of evaluations ``at(t)``."""

    def too_high(new: Point) -> bool:
        return new.loss > start.loss + 1e-4 * new.t * start.slope

    before, new, used = start, at(t), 1
    while used <= most:
        if too_high(new) or (used > 2 and new.loss >= before.loss) or (new.slope >= 0 and abs(new.slope) > -0.9 * start.slope):
            break
        if abs(new.slope) <= -0.9 * start.slope:
            return new, used
        before, new = new, at(_cubic(before, new, (new.t + 0.01 * (new.t - before.t), new.t * 10)))
        used += 1
    else:
        before = start
    ends, tight = sorted((before, new), key=lambda point: point.loss), False  # the lower end first
    while used <= most and abs(ends[1].t - ends[0].t) * size >= 1e-9:
        low, high = sorted(point.t for point in ends)
        t, margin = _cubic(ends[0], ends[1]), 0.1 * (high - low)
        if min(high - t, t - low) < margin:
            if tight or t >= high or t <= low:
                t, tight = (high - margin if abs(t - high) < abs(t - low) else low + margin), False
            else:
                tight = True
        else:
            tight = False
        new = at(t)
        used += 1
        if too_high(new) or new.loss >= ends[0].loss:
            ends = sorted((ends[0], new), key=lambda point: point.loss)
            continue
        if abs(new.slope) <= -0.9 * start.slope:
            return new, used
        ends = [new, ends[0] if new.slope * (ends[1].t - ends[0].t) >= 0 else ends[1]]
    return ends[0], used
