"""Adam, AdamW and AdamW8bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.ops.update import PACK, Rule
from netcl.optim.optimizer import Group, Optimizer, check_betas, check_number


@cache
def _rule(amsgrad: bool, counted: bool = False) -> Rule:
    """Return the update rule; if ``counted``, the device reads the number of previous steps and computes the bias corrections."""
    lines = {
        "grad": "g * (factor * sign) + weight_decay * p",
        "new_m": "m + (grad - m) * take1",
        "new_v": "beta2 * v + take2 * grad * grad",
        **({"new_most": "MAX(most, new_v)"} if amsgrad else {}),
        "denominator": f"SQRT({'new_most' if amsgrad else 'new_v'}) * correction + eps",
        "new_p": "p * keep - step_size * new_m / denominator",
    }
    tensors, writes = ("p", "g", "m", "v", *["most"] * amsgrad), {"p": "new_p", "m": "new_m", "v": "new_v"}
    if amsgrad:
        writes["most"] = "new_most"
    scalars, name = ("weight_decay", "keep", "sign", "take1", "beta2", "take2", "eps"), "amsgrad" if amsgrad else "adam"
    if not counted:
        return Rule(name, tensors, ("step_size", "correction", *scalars), lines, writes)
    # 1 - beta**n by expm1: the difference itself has few digits left while n is small.
    once = {"step_size": "lr / -EXPM1((age + 1) * log_beta1)", "correction": "1 / SQRT(-EXPM1((age + 1) * log_beta2))"}
    return Rule(f"{name}_counted", tensors, ("lr", "log_beta1", "log_beta2", *scalars), lines, writes, ("factor", "age"), once)


@cache
def _packed_rule(counted: bool) -> Rule:
    plain, scales = _rule(False, counted), ("m_scale", "v_scale")
    writes = {**plain.writes, "m_scale": "new_m", "v_scale": "new_v"}
    return replace(plain, name=f"{plain.name}_packed", tensors=(*plain.tensors, *scales), writes=writes, packed=("m", "v", *scales))


class Adam(Optimizer):
    """The Adam optimizer: ``p -= lr * m / (sqrt(v) + eps)``, with bias-corrected running averages ``m`` of gradients and ``v`` of squares.

    ``amsgrad`` divides by the root of the largest average of squares so far. ``weight_decay`` adds ``weight_decay * p`` to the gradient.
    With ``decoupled_weight_decay``, as in :class:`AdamW`, weight decay shrinks the parameter instead. ``master_weights`` keeps float32
    copies of half parameters.

    >>> from netcl.core.tensor import Tensor
    >>> w = Tensor.from_host([1.0, 2.0], requires_grad=True)
    >>> opt = Adam([w], lr=0.5)
    >>> w.grad = Tensor.from_host([3.0, -100.0])
    >>> opt.step()
    >>> w.to_host().round(5).tolist()
    [0.5, 2.5]
    """

    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counts = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, decoupled_weight_decay: bool = False,
        master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay, "master_weights": master_weights,
        }, switches)  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        check_betas(self.op, group["betas"])
        check_number(self.op, "eps", group["eps"])

    def tensors(self, group: Group) -> tuple[str, ...]:
        return self.names if group["amsgrad"] else self.names[:2]

    def rule(self, group: Group) -> Rule:
        return _rule(bool(group["amsgrad"]))

    def counted_rule(self, group: Group) -> Rule:
        return _rule(bool(group["amsgrad"]), counted=True)

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        beta1, beta2 = group["betas"]
        decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
        return {
            "lr": group["lr"],
            "log_beta1": math.log(beta1) if beta1 else -math.inf,
            "log_beta2": math.log(beta2) if beta2 else -math.inf,
            "step_size": group["lr"] / (1 - beta1**age),
            "weight_decay": 0.0 if decoupled else decay,
            "keep": 1 - group["lr"] * decay if decoupled else 1.0,
            "sign": -1.0 if group["maximize"] else 1.0,
            "take1": 1 - beta1,
            "beta2": beta2,
            "take2": 1 - beta2,
            "correction": 1 / math.sqrt(1 - beta2**age),
            "eps": group["eps"],
        }


class AdamW(Adam):
    """:class:`Adam` whose weight decay multiplies the parameters by ``1 - lr * weight_decay`` and does not enter the averages."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True,
                         master_weights=master_weights, **switches)  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        if not group["decoupled_weight_decay"]:
            raise ValueError(message(self.op, "decoupled_weight_decay must be True", "use Adam"))


class AdamW8bit(AdamW):
    """:class:`AdamW` with averages of 8 bits per element, a quarter of the memory: a code per element and a scale per 256 elements.

    Codes have a similar relative precision for small and large values. A positive average of squares never becomes 0. Rounding chooses one
    of the two nearest codes by a hash of the parameter and its gradient: equal runs on a device give equal bits.
    """

    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")  # type: ignore[assignment]

    def check(self, group: Group) -> None:
        super().check(group)
        if group["amsgrad"]:
            raise ValueError(message(self.op, "amsgrad must be False", "use AdamW"))

    def tensors(self, group: Group) -> tuple[str, ...]:
        return self.names

    def rule(self, group: Group) -> Rule:
        return _packed_rule(False)

    def counted_rule(self, group: Group) -> Rule:
        return _packed_rule(True)

    def state_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        return (-(-p.size // PACK),) if name.endswith("scale") else p.shape

    def state_dtype(self, name: str, p: Tensor) -> str:
        return "float32" if name.endswith("scale") else "uint8" if name in self.names else super().state_dtype(name, p)
