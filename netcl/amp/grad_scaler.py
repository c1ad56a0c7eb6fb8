"""GradScaler: scales the loss so that gradients fit the range of float16, and adapts the scale.

The scale, the number of good steps and the result of the gradient check stay on the device. With one device and an optimizer with
``skips_on_device``, the device also decides whether to skip a step. Otherwise :meth:`GradScaler.step` waits for the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from netcl import ops
from netcl.core import recording
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.ops import update

_LEAST = 2.0**-100  # beyond this, one over the scale is not a float, and a gradient of 0 would become NaN

_UPDATE = update.Rule(
    "loss_scale",
    ("scale", "inverse", "streak"),
    ("growth", "backoff", "interval"),
    {
        "good": "streak + 1",
        "grown": "WHERE(good >= interval, scale * growth, scale)",
        "next": f"WHERE(factor > 0, MAX(scale * backoff, {_LEAST!r}), WHERE(ISFINITE(grown), grown, scale))",
        "back": "1 / next",
        "run": "WHERE(factor > 0, 0, WHERE(good >= interval, 0, good))",
    },
    {"scale": "next", "inverse": "back", "streak": "run"},
)


class _Numbers(NamedTuple):
    """The numbers of a scaler on a device: the scale, its reciprocal, and the good steps since the scale changed."""

    scale: Tensor
    inverse: Tensor
    streak: Tensor


class GradScaler:
    """Scales losses up before backward and gradients down before the step; skips steps whose gradients are not finite.

    - **init_scale**: the first factor. Powers of two change no digit of a gradient.
    - **growth_factor**, **growth_interval**: after ``growth_interval`` good steps in a row the scale grows by ``growth_factor``.
    - **backoff_factor**: multiplies the scale after an overflow. The step is skipped: parameters, optimizer state and the
      number of steps do not change.
    - **enabled**: ``False`` makes every method act without a scale.

    Each device checks its gradients in one pass and keeps the result. Reading ``scale`` or ``state_dict()`` waits for the device; a
    training loop need not read them.

    >>> from netcl.optim import SGD
    >>> w = Tensor.from_host([1.0], requires_grad=True)
    >>> opt, scaler = SGD([w], lr=0.1), GradScaler(init_scale=4.0)
    >>> loss = (w * w).sum()
    >>> scaler.scale_loss(loss).backward()
    >>> w.grad.item()
    8.0
    >>> scaler.step(opt)
    >>> scaler.update()
    >>> round(w.item(), 4), scaler.scale
    (0.8, 4.0)
    """

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000,
        enabled: bool = True,
    ):  # fmt: skip
        _check_scale(init_scale, growth_factor, backoff_factor, growth_interval)
        self.growth_factor, self.backoff_factor, self.growth_interval = float(growth_factor), float(backoff_factor), int(growth_interval)
        self.enabled = enabled
        self._start = (float(init_scale), 0)
        self._devices: dict[Any, _Numbers] = {}
        self._found: dict[Any, Tensor] = {}
        self._unscaled: dict[int, dict[Any, Tensor]] = {}
        self._stepped: set[int] = set()

    # ---- a step

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; call ``.backward()`` on the result."""
        return loss * self._on(loss).scale if self._is_enabled() else loss

    def unscale_grads(self, optimizer: Any, params: Iterable[Tensor] | None = None) -> None:
        """Divide the gradients by the scale, in place, to inspect or clip them before :meth:`step`.

        ``params`` are the parameters whose gradients are divided; by default all of the optimizer's. They must include those.
        """
        if not self._is_enabled():
            return
        self._check_first("unscale_grads", optimizer)
        if self._known(self._unscaled, id(optimizer)) is not None:
            what = "the gradients of an optimizer must be unscaled only once"
            raise RuntimeError(message("unscale_grads", what, "call it once between backward and update()"))
        gradients = update.by_context(_scaled_gradients(optimizer, params))
        found = self._check(gradients)
        recording.again(lambda: self._unscaled.update({id(optimizer): found}))
        for place, tensors in gradients.items():
            update.scale(tensors, self._devices[place].inverse)

    def step(self, optimizer: Any, params: Iterable[Tensor] | None = None, max_norm: float | None = None) -> Tensor | None:
        """Take an optimizer's step with unscaled gradients, unless a gradient is not finite.

        ``max_norm`` clips the gradients inside the step and returns their norm, as ``optimizer.step(max_norm)`` does. With one
        device and ``optimizer.skips_on_device`` the device decides; else the host waits, and ``None`` is returned for a skipped step.
        """
        options = {} if max_norm is None else {"max_norm": max_norm}
        if not self._is_enabled():
            return optimizer.step(**options)
        self._check_first("step", optimizer)
        found = self._known(self._unscaled, id(optimizer))
        gradients = {} if found is not None else update.by_context(_scaled_gradients(optimizer, params))
        if found is None:
            found = self._check(gradients, max_norm is not None)
        if len(found) == 1 and getattr(optimizer, "skips_on_device", False):
            ((place, verdict),) = found.items()
            inverse = {"grad_scale": self._devices[place].inverse} if gradients else {}
            norm = optimizer.step(**options, **inverse, found_inf=verdict)
        elif any([verdict.item() for verdict in found.values()]):
            norm = None
        else:
            for place, tensors in gradients.items():
                update.scale(tensors, self._devices[place].inverse)
            norm = optimizer.step(**options)
        recording.again(partial(self._stepped.add, id(optimizer)))
        return norm

    def _check_first(self, op: str, optimizer: Any) -> None:
        """Raise if an optimizer has stepped since :meth:`update`: its gradients may be unscaled, and the scale is adapted once."""
        recording.requires(lambda: id(optimizer) in self._stepped)
        if id(optimizer) in self._stepped:
            raise RuntimeError(
                message(op, "an optimizer must step only once between two calls of update()", "call update() after the step")
            )

    def update(self) -> None:
        """Adapt the scale to the result of the steps since the last call; call it once per training step."""
        if self._is_enabled() and not self._found:
            raise RuntimeError(message("update", "step() or unscale_grads() must be called before update()", "call step(optimizer) first"))
        if not any(map(recording.made, self._found.values())):
            recording.requires(lambda: {place: id(verdict) for place, verdict in self._found.items()})
        rates = recording.again(lambda: [self.growth_factor, self.backoff_factor, float(self.growth_interval)])
        for place, verdict in self._found.items():
            update.apply(_UPDATE, [[number] for number in self._devices[place]], rates, verdict)
        recording.again(self._found.clear)
        recording.again(self._unscaled.clear)
        recording.again(self._stepped.clear)

    def _is_enabled(self) -> bool:
        recording.requires(lambda: self.enabled)
        return self.enabled

    def _known(self, entries: Mapping[Any, Any], key: Any) -> Any:
        """Return ``entries[key]`` or ``None``. Replays require the same entry, unless the step being recorded made the entry."""
        entry = entries.get(key)
        verdicts = entry.values() if isinstance(entry, dict) else [entry]
        if entry is None or not any(map(recording.made, verdicts)):
            recording.requires(lambda: id(entries.get(key)))
        return entry

    # ---- the numbers

    @property
    def scale(self) -> float:
        """The factor of the next loss; reading it waits for the device."""
        if not self.enabled:
            return 1.0
        return float(next(iter(self._devices.values())).scale.item()) if self._devices else self._start[0]

    @property
    def found_inf(self) -> Tensor | None:
        """A 0-d device tensor: 1 if a check since :meth:`update` found a gradient that is not finite, else 0. ``None`` without a check."""
        return next(iter(self._found.values()), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the settings as plain numbers, to resume a run; waits for the device."""
        streak = next(iter(self._devices.values())).streak.item() if self._devices else self._start[1]
        return {"scale": self.scale, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
                "growth_interval": self.growth_interval, "growth_tracker": int(streak), "enabled": self.enabled}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict` (torch's has the same names); numbers on the device are overwritten in place."""
        missing = sorted({"scale", "growth_factor", "backoff_factor", "growth_interval"} - set(state))
        if missing:
            raise ValueError(message("GradScaler", f"the state dict must have the key {missing[0]!r}", has=sorted(map(str, state))))
        if self.enabled and not state.get("enabled", True):
            remedy = "start a new scaler, or make this one with enabled=False"
            raise ValueError(message("GradScaler", "an enabled scaler must load the state of an enabled one", remedy))
        scale, interval = float(state["scale"]), int(state["growth_interval"])
        _check_scale(scale, state["growth_factor"], state["backoff_factor"], interval)
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = interval
        self._start = (scale, int(state.get("growth_tracker", state.get("_growth_tracker", 0))))
        for numbers in self._devices.values():
            self._fill(numbers)

    def _on(self, like: Tensor) -> _Numbers:
        """Return the numbers on the device of a tensor; a new device starts from the initial scale."""
        numbers = self._devices.get(like.context)
        if numbers is None:
            made = (Tensor.empty((), queue=like.queue, persistent=True) for _ in range(3))
            numbers = self._devices[like.context] = _Numbers(*made)
            self._fill(numbers)
        return numbers

    def _fill(self, numbers: _Numbers) -> None:
        scale, streak = self._start
        for tensor, value in zip(numbers, (scale, 1 / scale, streak), strict=True):
            tensor.fill_(value)

    def _check(self, gradients: Mapping[Any, Sequence[Tensor]], clips: bool = False) -> dict[Any, Tensor]:
        """Return a 0-d tensor per device: 1 if a gradient or, with ``clips``, their norm is not finite, else 0; :meth:`update` reads it."""
        found = {}
        for place, tensors in gradients.items():
            self._on(tensors[0])
            found[place] = update.nonfinite([update.norm_of_all(tensors)[0]] if clips else tensors)
            earlier = self._known(self._found, place)
            both = found[place] if earlier is None else ops.maximum(earlier, found[place])
            recording.again(partial(self._found.__setitem__, place, both))
        return found


def _check_scale(scale: Any, growth: float, backoff: float, interval: int) -> None:
    if not isinstance(scale, int | float):
        what = "init_scale must be a number"
        raise TypeError(message("GradScaler", what, "leave a device out: every device keeps its own scale", init_scale=repr(scale)))
    for name, value, fine, limits in (
        ("init_scale", scale, _LEAST <= scale < 2.0**128, "in [2**-100, 2**128)"), ("growth_factor", growth, growth > 1, "above 1"),
        ("backoff_factor", backoff, 0 < backoff < 1, "between 0 and 1"), ("growth_interval", interval, interval >= 1, "at least 1"),
    ):  # fmt: skip
        if not fine:
            raise ValueError(message("GradScaler", f"{name} must be {limits}", **{name: repr(value)}))


def _scaled_gradients(optimizer: Any, params: Iterable[Tensor] | None) -> list[Tensor]:
    own = getattr(optimizer, "params", None) or [p for group in optimizer.param_groups for p in group["params"]]
    given = list(own if params is None else params)  # of sharded or replicated optimizers, all parameters: they need a common decision
    if params is not None and any(p.grad is not None and all(p is not other for other in given) for p in own):
        what = "params must hold every parameter of the optimizer that has a gradient"
        raise ValueError(message("GradScaler", what, "the others would be updated by scaled gradients", given=len(given), has=len(own)))
    found = [p.grad for p in given if p.grad is not None]
    if not found:
        remedy = "call scaler.scale_loss(loss).backward() first"
        raise RuntimeError(message("GradScaler", "at least one parameter must have a gradient", remedy))
    return found
