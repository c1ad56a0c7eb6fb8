"""RMSProp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from netcl.ops.update import Rule
from netcl.optim.optimizer import Group, Optimizer, check_number


@cache
def _rule(centered: bool, momentum: bool) -> Rule:
    lines = {"grad": "g * (factor * sign) + weight_decay * p", "new_v": "alpha * v + take * grad * grad"}
    tensors, writes = ["p", "g", "v"], {"p": "new_p", "v": "new_v"}
    variance = "new_v"
    if centered:
        lines["new_mean"] = "mean + (grad - mean) * take"
        # Rounding can make the difference negative where a gradient hardly changes.
        variance = "MAX(new_v - new_mean * new_mean, 0)"
        tensors.append("mean")
        writes["mean"] = "new_mean"
    lines["move"] = f"grad / (SQRT({variance}) + eps)"
    if momentum:
        lines["new_m"] = "momentum * m + move"
        tensors.append("m")
        writes["m"] = "new_m"
    lines["new_p"] = f"p - lr * {'new_m' if momentum else 'move'}"
    name = "_".join(["rmsprop", *["centered"] * centered, *["momentum"] * momentum])
    return Rule(name, tuple(tensors), ("lr", "weight_decay", "sign", "alpha", "take", "eps", "momentum"), lines, writes)


class RMSProp(Optimizer):
    """Divides the gradient by the root of a running average of its square: ``p -= lr * g / (sqrt(v) + eps)``.

    ``centered`` divides by the standard deviation instead, ``momentum`` averages the moves, ``weight_decay`` adds
    ``weight_decay * p`` to the gradient. ``master_weights`` keeps float32 copies of half parameters.
    """

    names = ("square_avg", "momentum_buffer", "grad_avg")
    counts = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False, master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered,
            "maximize": maximize, "master_weights": master_weights,
        }, switches)  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self.op, "alpha", group["alpha"])
        check_number(self.op, "eps", group["eps"])
        check_number(self.op, "momentum", group["momentum"])

    def tensors(self, group: Group) -> tuple[str, ...]:
        return ("square_avg", *["grad_avg"] * bool(group["centered"]), *["momentum_buffer"] * bool(group["momentum"]))

    def rule(self, group: Group) -> Rule:
        return _rule(bool(group["centered"]), bool(group["momentum"]))

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
            "alpha": group["alpha"],
            "take": 1 - group["alpha"],
            "eps": group["eps"],
            "momentum": group["momentum"],
        }


RMSprop = RMSProp  # torch's spelling
