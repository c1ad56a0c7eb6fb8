"""A running average of a model's weights, for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.ops import update
from netcl.optim.optimizer import check_number

_RULE = update.Rule("ema", ("e", "p"), ("take",), {"new_e": "e + (p - e) * take"}, {"e": "new_e"})


def _named(model: Any) -> dict[str, Tensor]:
    """Return the parameters of a module, a mapping or a list by name."""
    if hasattr(model, "named_parameters"):
        pairs: Iterable[tuple[str, Any]] = model.named_parameters()
    elif isinstance(model, Mapping):
        pairs = model.items()
    else:
        pairs = ((str(i), p) for i, p in enumerate([model] if isinstance(model, Tensor) else model))
    named = dict(pairs)
    for name, p in named.items():
        if not isinstance(p, Tensor) or not dtypes.DTYPES[p.dtype].is_float:
            given = getattr(p, "dtype", type(p).__name__)
            raise TypeError(message("ModelEMA", f"{name!r} must be a tensor of floats", "pass a module or its parameters", given=given))
    if not named:
        raise ValueError(message("ModelEMA", "the model must have parameters", "pass a module or its parameters"))
    return named


class ModelEMA:
    """Keeps ``shadow = decay * shadow + (1 - decay) * weight`` for every parameter of a model.

    Call :meth:`update` after each optimizer step; ``with ema.applied(): ...`` evaluates with the averages. Averages of half
    parameters are kept in float32. Buffers (running statistics) are not averaged. ``warmup`` lets early averages follow
    faster: step n uses a decay of at most ``(1 + n) / (10 + n)``.

    ``model`` is a module, a dict of tensors by name, or a list of tensors.

    >>> w = Tensor.from_host([1.0])
    >>> ema = ModelEMA([w], decay=0.5)
    >>> ema.update(), w.from_host([3.0]), ema.update()  # doctest: +ELLIPSIS
    (None, Tensor(...), None)
    >>> with ema.applied():
    ...     w.tolist()
    [2.0]
    >>> w.tolist()
    [3.0]
    """

    def __init__(self, model: Any, decay: float = 0.999, *, warmup: bool = False):
        check_number("ModelEMA", "decay", decay, 0.0, 1.0 + 2**-52)
        self.decay = float(decay)
        self.warmup = warmup
        self.updates = 0
        self.parameters = _named(model)
        kinds = {name: dtypes.sum_dtype(p.dtype) for name, p in self.parameters.items()}
        self.shadow = {name: Tensor.empty(p.shape, kinds[name], queue=p.queue, persistent=True) for name, p in self.parameters.items()}
        self._kept: list[Tensor] | None = None
        update.copy(list(self.shadow.values()), list(self.parameters.values()))

    def update(self) -> None:
        """Update the averages with the current parameters."""
        if self._kept is not None:
            raise RuntimeError(message("ModelEMA", "the averages must not be applied during update()", "call restore() first"))
        take = recording.again(self._next_share)
        update.apply(_RULE, [list(self.shadow.values()), list(self.parameters.values())], (take,))

    def _next_share(self) -> float:
        """Count an update; returns the weight of the new parameters in the averages."""
        self.updates += 1
        return 1 - (min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay)

    def apply(self) -> None:
        """Copy the averages to the model; :meth:`restore` restores its own weights."""
        if self._kept is not None:
            raise RuntimeError(message("ModelEMA", "the averages must not be applied twice", "call restore() first"))
        self._kept = [duplicate(p) for p in self.parameters.values()]
        update.copy(list(self.parameters.values()), list(self.shadow.values()))

    def restore(self) -> None:
        """Restore the model's own weights after :meth:`apply`."""
        if self._kept is None:
            raise RuntimeError(message("ModelEMA", "apply() must be called before restore()", "call apply() first"))
        update.copy(list(self.parameters.values()), self._kept)
        self._kept = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the averages to the model inside the block."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name (the tensors themselves, not copies), the decay, ``warmup`` and the number of updates."""
        return {"decay": self.decay, "warmup": self.warmup, "updates": self.updates, "shadow": dict(self.shadow)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; nothing is changed if a name or a shape does not match."""
        saved = state_dict["shadow"]
        missing, unexpected = (sorted(set(a) - set(b)) for a, b in ((self.shadow, saved), (saved, self.shadow)))
        if missing or unexpected:
            what = "the state dict must have exactly the parameters of the model"
            raise ValueError(message("ModelEMA", what, missing=missing, unexpected=unexpected))
        values = {name: np.asarray(saved[name]) for name in self.shadow}
        for name, t in self.shadow.items():
            if values[name].shape != t.shape:
                raise ShapeError(message("ModelEMA", f"{name!r} must have shape {t.shape}, as the parameter has", saved=values[name].shape))
        self.decay, self.updates = float(state_dict["decay"]), int(state_dict["updates"])
        self.warmup = bool(state_dict.get("warmup", self.warmup))
        for name, t in self.shadow.items():
            t.from_host(values[name])
