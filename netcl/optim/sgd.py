"""Stochastic gradient descent, with and without momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from netcl.core.errors import message
from netcl.ops.update import Rule
from netcl.optim.optimizer import Group, Optimizer, check_number


@cache
def _sgd_rule(momentum: bool, nesterov: bool) -> Rule:
    lines = {"grad": "g * (factor * sign) + weight_decay * p"}
    if momentum:
        lines["new_m"] = "momentum * m + take * grad"
    lines["move"] = "grad + momentum * new_m" if nesterov else "new_m" if momentum else "grad"
    lines["new_p"] = "p - lr * move"
    name = "nesterov" if nesterov else "momentum" if momentum else "sgd"
    if not momentum:
        return Rule(name, ("p", "g"), ("lr", "weight_decay", "sign"), lines, {"p": "new_p"})
    return Rule(name, ("p", "g", "m"), ("lr", "weight_decay", "sign", "momentum", "take"), lines, {"p": "new_p", "m": "new_m"})


class SGD(Optimizer):
    """Gradient descent: ``p -= lr * g``; with momentum ``m = momentum * m + (1 - dampening) * g`` and ``p -= lr * m``.

    The first step takes ``m = g``. ``weight_decay`` adds ``weight_decay * p`` to the gradient, ``nesterov`` moves by
    ``g + momentum * m``, ``maximize`` ascends. ``master_weights`` keeps float32 copies of half parameters.

    >>> from netcl.core.tensor import Tensor
    >>> w = Tensor.from_host([1.0, 2.0], requires_grad=True)
    >>> opt = SGD([w], lr=0.5)
    >>> w.grad = Tensor.from_host([1.0, -1.0])
    >>> opt.step()
    >>> w.tolist()
    [0.5, 2.5]
    """

    names = ("momentum_buffer",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "master_weights": master_weights,
        }, switches)  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self.op, "momentum", group["momentum"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            what = "nesterov requires a momentum and dampening=0"
            raise ValueError(message(self.op, what, momentum=group["momentum"], dampening=group["dampening"]))

    def tensors(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def rule(self, group: Group) -> Rule:
        return _sgd_rule(bool(group["momentum"]), bool(group["nesterov"]))

    @property
    def skips_on_device(self) -> bool:
        """Whether the device can skip a step: not with dampening, where the host must know whether the first step was skipped."""
        return not any(group["dampening"] for group in self.param_groups)

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
            "momentum": group["momentum"],
            "take": 1.0 if age == 1 else 1.0 - group["dampening"],
        }


class Momentum(SGD):
    """:class:`SGD` with a momentum of 0.9 unless another is given."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.9, **options: Any):
        super().__init__(params, lr, momentum, **options)
