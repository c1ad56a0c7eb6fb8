"""Lion: the sign of a momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from netcl.ops.update import Rule
from netcl.optim.optimizer import Group, Optimizer, check_betas

_RULE = Rule(
    "lion",
    ("p", "g", "m"),
    ("lr", "keep", "sign", "beta1", "take1", "take2"),
    {
        "grad": "g * (factor * sign)",
        "new_p": "p * keep - lr * SIGN(beta1 * m + take1 * grad)",
        "new_m": "m + (grad - m) * take2",
    },
    {"p": "new_p", "m": "new_m"},
)


class Lion(Optimizer):
    """``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``, then ``m = beta2 * m + (1 - beta2) * g``.

    Every element moves by ``lr``, so learning rates are 3 to 10 times smaller than Adam's and weight decays as much larger
    (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").
    """

    names = ("exp_avg",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, *,
        maximize: bool = False, master_weights: bool = False,
    ):  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "master_weights": master_weights,
        })  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        check_betas(self.op, group["betas"])

    def tensors(self, group: Group) -> tuple[str, ...]:
        return self.names

    def rule(self, group: Group) -> Rule:
        return _RULE

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "keep": 1 - group["lr"] * group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
            "beta1": beta1,
            "take1": 1 - beta1,
            "take2": 1 - beta2,
        }
