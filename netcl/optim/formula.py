"""Optimizers that are a formula per element: SGD, Adam and most others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import Parameter, Signature
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.engine import opencl_text
from netcl.engine.registry import names_read_by, parse
from netcl.ops.update import PACK, Rule
from netcl.optim.optimizer import Group, Optimizer, check_betas, check_number, picked

__all__ = [
    "ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "AdamW8bit", "Adamax", "Lion", "Momentum", "NAdam", "RAdam", "RMSProp",
    "RMSprop", "Rprop",
]  # fmt: skip

_GRAD = {"grad": "g * (factor * sign) + decay * p"}
_RUNNING_MEAN = {"new_m": "m + (grad - m) * take1"}
MEANS = {**_RUNNING_MEAN, "new_v": "beta2 * v + take2 * grad * grad"}
# 1 - beta**n by expm1: the difference itself has few digits left while n is small.
CORRECTIONS = {"correction1": "-EXPM1((age + 1) * log_beta1)", "correction2": "-EXPM1((age + 1) * log_beta2)"}


@dataclass(frozen=True, eq=False)
class Formula:
    """The update rule of an optimizer, per element.

    - **options**: names in torch's order, with defaults; ``maximize``, ``master_weights`` and torch's switches are added to them.
    - **tensors**: the tensors of a parameter's state: the name in ``lines``, mapped to the name in the state dict.
    - **lines**: assignments in order; ``new_x`` is written to the tensor ``x``.
    - **numbers**: assignments over the options and ``age``, the steps taken before this one. The host computes them for every step, or
      the device if it counts the steps.
    """

    options: Mapping[str, Any]
    tensors: Mapping[str, str]
    lines: Mapping[str, str]
    numbers: Mapping[str, str] = field(default_factory=dict)


class FormulaOptimizer(Optimizer):
    """An optimizer whose step is a :class:`Formula` over the options of its group.

    The formula reads options by their names, and elements of tuples as ``beta1``, ``eta2``. :func:`option_readers` adds more numbers:
    ``sign`` (-1 to maximize), ``decay`` (weight decay added to the gradient), ``keep`` (decoupled weight decay), ``take1 = 1 - beta1``.
    """

    formula: ClassVar[Formula]
    #: Names of Python numbers in a parameter's state: the formula reads their values from before the step. The device cannot skip a step.
    kept: ClassVar[tuple[str, ...]] = ()
    counts = True
    _signature: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        cls.names = tuple(cls.formula.tensors.values())
        named = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)]
        named += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in cls.formula.options.items()]
        named += [Parameter(name, Parameter.KEYWORD_ONLY, default=False) for name in ("maximize", "master_weights")]
        cls._signature = Signature([*named, Parameter("switches", Parameter.VAR_KEYWORD)])
        if cls.__init__ is FormulaOptimizer.__init__:
            cls.__signature__ = cls._signature  # type: ignore[attr-defined]

    def __init__(self, params: Iterable[Any], *values: Any, **options: Any):
        given = self._signature.bind(params, *values, **options)
        given.apply_defaults()
        params, named, switches = given.arguments.pop("params"), given.arguments, given.arguments.pop("switches")
        super().__init__(params, {**named, "weight_decay": named.get("weight_decay", 0.0)}, switches)

    def check(self, group: Group) -> None:
        super().check(group)
        for name in ("eps", "lr_decay", "initial_accumulator_value", "momentum", "momentum_decay", "lambd"):
            if name in group:
                check_number(self.op, name, group[name])
        if "rho" in group:
            check_number(self.op, "rho", group["rho"], 0.0, 1.0 + 2**-52)
        if "betas" in group:
            check_betas(self.op, group["betas"])

    def tensors(self, group: Group) -> tuple[str, ...]:
        return tuple(self.formula_of(group).tensors.values())

    def formula_of(self, group: Group) -> Formula:
        """Return the formula for the options of a group."""
        return self.formula

    def compiled(self, group: Group) -> _Compiled:
        kind: Any = type(self)
        return compiled_formula(kind, self.formula_of(group))

    def rule(self, group: Group) -> Rule:
        kind: Any = type(self)
        return compiled_formula(kind, self.formula_of(group)).host

    def counted_rule(self, group: Group) -> Rule:
        return self.compiled(group).counted

    def _values(self, group: Group) -> dict[str, float]:
        """Return the numbers that the formula reads, except ``age`` and the numbers of a parameter's state (``kept``)."""
        return {name: read(group) for name, read in self.compiled(group).readers.items()}

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        values = self._values(group)
        return values if self.kept else values | _update_on_host(type(self), values, age)

    def _next_numbers(self, group: Group, rule: Rule, counted: Sequence[dict[str, Any]], age: int) -> list[float]:
        if "age" in rule.given:  # the device counts the steps and computes the numbers
            return picked(self.op, rule.scalars, self._values(group))
        if not self.kept:
            return super()._next_numbers(group, rule, counted, age)
        age, values = counted[0].get("step", 0) + 1, self._values(group)
        values |= {name: counted[0].get(name, start) for name, start in zip(self.kept, self.starts(group), strict=True)}
        values |= _update_on_host(type(self), values, age)
        numbers = picked(self.op, rule.scalars, values)
        for state in counted:
            state |= {"step": age, **{name: values[f"next_{name}"] for name in self.kept}}
        return numbers

    def starts(self, group: Group) -> tuple[float, ...]:
        """Return the initial values of the numbers of a parameter's state, in the order of ``kept``."""
        return ()

    def _together(
        self, group: Group, params: list[Tensor], names: Sequence[str], on_device: bool
    ) -> Iterator[tuple[int, bool, list[Tensor], list[dict[str, Any]]]]:
        """Group parameters as the base class does, and by the numbers of their state (``kept``)."""
        parts = super()._together(group, params, names, on_device)
        if not self.kept:
            yield from parts
            return
        for age, mastered, own, states in parts:
            lots: dict[tuple[Any, ...], list[int]] = {}
            for i, state in enumerate(states):
                lots.setdefault(tuple(state.get(name) for name in self.kept), []).append(i)
            for lot in lots.values():
                yield age, mastered, [own[i] for i in lot], [states[i] for i in lot]

    def _loaded_state(self, p: Tensor, number: int, saved: Mapping[str, Any], group: Group) -> dict[str, Any]:
        kept = {name: float(np.asarray(saved[name])) for name in self.kept if name in saved}
        return super()._loaded_state(p, number, {name: x for name, x in saved.items() if name not in kept}, group) | kept


@cache
def option_readers(kind: Any) -> dict[str, Callable[[Group], float]]:
    """Return, for each number that a formula of the optimizer class ``kind`` may use, a function that reads it from a group's options."""
    options = {"weight_decay": 0.0, **kind.formula.options}
    found: dict[str, Callable[[Group], float]] = {name: itemgetter(name) for name, value in options.items() if not isinstance(value, tuple)}
    found["sign"] = lambda group: -1.0 if group["maximize"] else 1.0
    found["decay"] = lambda group: 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
    found["keep"] = lambda group: 1 - group["lr"] * group["weight_decay"] if group.get("decoupled_weight_decay") else 1.0
    for name in {"rho", "alpha"} & set(options):
        found["take"] = lambda group, name=name: 1 - group[name]  # type: ignore[misc]
    for name, values in options.items():
        for i in range(len(values) if isinstance(values, tuple) else 0):
            found[f"{name[:-1]}{i + 1}"] = lambda group, name=name, i=i: group[name][i]  # type: ignore[misc]
            if name == "betas":
                found[f"take{i + 1}"] = lambda group, i=i: 1 - group["betas"][i]  # type: ignore[misc]
                found[f"log_beta{i + 1}"] = lambda group, i=i: math.log(group["betas"][i]) if group["betas"][i] else -math.inf  # type: ignore[misc]
    return found


class _Compiled(NamedTuple):
    """The rules of a formula, with numbers computed on the host (``host``) or the device (``counted``), and the readers of its options."""

    host: Rule
    counted: Rule
    readers: dict[str, Callable[[Group], float]]


@cache
def compiled_formula(kind: Any, formula: Formula) -> _Compiled:
    tensors, lines, numbers = formula.tensors, formula.lines, formula.numbers
    used = {word for text in lines.values() for word in names_read_by(text)}
    ages = {word for text in numbers.values() for word in names_read_by(text)}
    readers = {name: read for name, read in option_readers(kind).items() if name in used | ages}
    writes = {x: f"new_{x}" for x in ("p", *tensors) if f"new_{x}" in lines}
    every, name = ("p", "g", *tensors), kind.__name__.lower()
    host = Rule(name, every, tuple(option for option in (*readers, *kind.kept, *numbers) if option in used), lines, writes)
    counted = Rule(f"{name}_counted", every, tuple(readers), lines, writes, ("factor", "age"), numbers) if numbers else host
    return _Compiled(host, counted, readers)


@cache
def _host_function(kind: Any, known: tuple[str, ...]) -> Any:
    lines = tuple((name, parse(text, kind.__name__)) for name, text in kind.formula.numbers.items())
    return opencl_text.numpy_function(opencl_text.Body((), (*known, "age"), lines, tuple(kind.formula.numbers)), "double")


def _update_on_host(kind: Any, values: Mapping[str, float], age: int) -> dict[str, float]:
    """Return the formula's numbers for step number ``age``, counted from 1; empty if the formula has none."""
    if not kind.formula.numbers:
        return {}
    given = picked(kind.__name__, tuple(values), values)
    with np.errstate(all="ignore"):
        found = _host_function(kind, tuple(values))(*map(np.float64, given), np.float64(age - 1))
    return {name: float(value) for name, value in zip(kind.formula.numbers, found, strict=True)}


class SGD(FormulaOptimizer):
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

    formula = Formula(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        {"m": "momentum_buffer"},
        {**_GRAD, "new_m": "momentum * m + take * grad"},
    )
    counts = False

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, master_weights=master_weights,
                         **switches)  # fmt: skip

    def check(self, group: Group) -> None:
        super().check(group)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            what = "nesterov requires a momentum and dampening=0"
            raise ValueError(message(self.op, what, momentum=group["momentum"], dampening=group["dampening"]))

    def formula_of(self, group: Group) -> Formula:
        return _sgd(bool(group["momentum"]), bool(group["nesterov"]))

    @property
    def skips_on_device(self) -> bool:
        """Whether the device can skip a step: not with dampening, where the host must know whether the first step was skipped."""
        return not any(group["dampening"] for group in self.param_groups)

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        # A literal takes less time than the readers of the formula; the same for Adam.
        return {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "take": 1.0 if age == 1 else 1.0 - group["dampening"],
            "decay": group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
        }


@cache
def _sgd(momentum: bool, nesterov: bool) -> Formula:
    if not momentum:
        return replace(SGD.formula, tensors={}, lines={**_GRAD, "new_p": "p - lr * grad"})
    move = "(grad + momentum * new_m)" if nesterov else "new_m"
    return replace(SGD.formula, lines={**SGD.formula.lines, "new_p": f"p - lr * {move}"}, numbers={"take": "1 - dampening"})


class Momentum(SGD):
    """:class:`SGD` with a momentum of 0.9 unless another is given."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.9, **options: Any):
        super().__init__(params, lr, momentum, **options)


class Adam(FormulaOptimizer):
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

    formula = Formula(
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "decoupled_weight_decay": False},
        {"m": "exp_avg", "v": "exp_avg_sq", "most": "max_exp_avg_sq"},
        {**_GRAD, **MEANS, "new_most": "MAX(most, new_v)", "new_p": "p * keep - step_size * new_m / (SQRT(new_most) * correction + eps)"},
        {**CORRECTIONS, "step_size": "lr / correction1", "correction": "1 / SQRT(correction2)"},
    )

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False, decoupled_weight_decay: bool = False,
        master_weights: bool = False, **switches: bool | None,
    ):  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay, maximize=maximize,
                         master_weights=master_weights, **switches)  # fmt: skip

    def formula_of(self, group: Group) -> Formula:
        return Adam.formula if group["amsgrad"] else _ADAM

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        (beta1, beta2), decay, decoupled = group["betas"], group["weight_decay"], group["decoupled_weight_decay"]
        return {
            "step_size": group["lr"] / (1 - beta1**age),
            "correction": 1 / math.sqrt(1 - beta2**age),
            "decay": 0.0 if decoupled else decay,
            "keep": 1 - group["lr"] * decay if decoupled else 1.0,
            "sign": -1.0 if group["maximize"] else 1.0,
            "take1": 1 - beta1,
            "beta2": beta2,
            "take2": 1 - beta2,
            "eps": group["eps"],
        }


_ADAM = replace(
    Adam.formula, tensors={name: Adam.formula.tensors[name] for name in "mv"},
    lines={name: text.replace("most", "v") for name, text in Adam.formula.lines.items() if name != "new_most"},
)  # fmt: skip


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

    formula = replace(Adam.formula, tensors={**_ADAM.tensors, "m_scale": "exp_avg_scale", "v_scale": "exp_avg_sq_scale"})

    def check(self, group: Group) -> None:
        super().check(group)
        if group["amsgrad"]:
            raise ValueError(message(self.op, "amsgrad must be False", "use AdamW"))

    def formula_of(self, group: Group) -> Formula:
        return _ADAM_8BIT

    def rule(self, group: Group) -> Rule:
        return _packed(super().rule(group))

    def counted_rule(self, group: Group) -> Rule:
        return _packed(super().counted_rule(group))

    def state_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        return (-(-p.size // PACK),) if name.endswith("scale") else p.shape

    def state_dtype(self, name: str, p: Tensor) -> str:
        return "float32" if name.endswith("scale") else "uint8" if name in self.names else super().state_dtype(name, p)


_ADAM_8BIT = replace(_ADAM, tensors=AdamW8bit.formula.tensors)


@cache
def _packed(rule: Rule) -> Rule:
    scales = {"m_scale": "new_m", "v_scale": "new_v"}
    return replace(rule, name=f"{rule.name}_packed", writes={**rule.writes, **scales}, packed=("m", "v", *scales))


class Adagrad(FormulaOptimizer):
    """Divides gradients by the root of their summed squares: in step n, ``p -= lr / (1 + (n - 1) * lr_decay) * g / (sqrt(sum) + eps)``."""

    formula = Formula(
        {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        {"s": "sum"},
        {**_GRAD, "new_s": "s + grad * grad", "new_p": "p - rate * grad / (SQRT(new_s) + eps)"},
        {"rate": "lr / (1 + age * lr_decay)"},
    )

    def initial(self, name: str, group: Group) -> float:
        return group["initial_accumulator_value"]


class Adadelta(FormulaOptimizer):
    """Scales the gradient by the ratio of two running root mean squares: past updates over gradients."""

    formula = Formula(
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        {"v": "square_avg", "u": "acc_delta"},
        {
            **_GRAD,
            "new_v": "rho * v + take * grad * grad",
            "delta": "SQRT(u + eps) / SQRT(new_v + eps) * grad",
            "new_u": "rho * u + take * delta * delta",
            "new_p": "p - lr * delta",
        },
    )


class Lion(FormulaOptimizer):
    """The Lion optimizer: ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``, then ``m = beta2 * m + (1 - beta2) * g``.

    Without weight decay nearly every element moves by ``lr``. The authors use 3 to 10 times smaller rates than for Adam, and larger decays
    (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").
    """

    formula = Formula(
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        {"m": "exp_avg"},
        {
            "grad": "g * (factor * sign)",
            "new_p": "p * (1 - lr * weight_decay) - lr * SIGN(beta1 * m + take1 * grad)",
            "new_m": "m + (grad - m) * take2",
        },
    )
    counts = False


class RMSProp(FormulaOptimizer):
    """Divides the gradient by the root of a running average of its square: ``p -= lr * g / (sqrt(v) + eps)``.

    ``centered`` divides by the standard deviation instead, ``momentum`` accumulates the updates, ``weight_decay`` adds
    ``weight_decay * p`` to the gradient. ``master_weights`` keeps float32 copies of half parameters.
    """

    formula = Formula(
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
        {"v": "square_avg", "m": "momentum_buffer", "mean": "grad_avg"},
        {**_GRAD, "new_v": "alpha * v + take * grad * grad"},
    )

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self.op, "alpha", group["alpha"])

    def formula_of(self, group: Group) -> Formula:
        return _rmsprop(bool(group["centered"]), bool(group["momentum"]))


@cache
def _rmsprop(centered: bool, momentum: bool) -> Formula:
    whole = RMSProp.formula
    # Rounding can make the difference negative where a gradient hardly changes.
    mean = {"new_mean": "mean + (grad - mean) * take", "spread": "MAX(new_v - new_mean * new_mean, 0)"} if centered else {"spread": "new_v"}
    move = {"new_m": "momentum * m + grad / (SQRT(spread) + eps)"} if momentum else {"new_m": "grad / (SQRT(spread) + eps)"}
    tensors = {name: whole.tensors[name] for name in ("v", *["mean"] * centered, *["m"] * momentum)}
    return Formula(whole.options, tensors, {**whole.lines, **mean, **move, "new_p": "p - lr * new_m"})


RMSprop = RMSProp  # torch's spelling


class Adamax(FormulaOptimizer):
    """:class:`~netcl.optim.Adam` that divides by a decaying maximum, ``u = max(beta2 * u, |g| + eps)``, not by a root mean square."""

    formula = Formula(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        {"m": "exp_avg", "u": "exp_inf"},
        {**_GRAD, **_RUNNING_MEAN, "new_u": "MAX(beta2 * u, ABS(grad) + eps)", "new_p": "p - lr / correction1 * new_m / new_u"},
        {"correction1": CORRECTIONS["correction1"]},
    )


class RAdam(FormulaOptimizer):
    """:class:`~netcl.optim.Adam` without the denominator while its variance is too large: in the first steps (Liu et al. 2019)."""

    formula = Formula(
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False},
        {"m": "exp_avg", "v": "exp_avg_sq"},
        {**_GRAD, **MEANS, "new_p": "p * keep - lr / correction1 * new_m * (plain + adaptive / (SQRT(new_v) + eps))"},
        {
            **CORRECTIONS,
            "limit": "2 / take2 - 1",
            "length": "limit - 2 * (age + 1) * (1 - correction2) / correction2",
            "ratio": "(length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)",
            "adaptive": "WHERE(length > 5, SQRT(MAX(ratio, 0) * correction2), 0)",
            "plain": "WHERE(length > 5, 0, 1)",
        },
    )


class NAdam(FormulaOptimizer):
    """:class:`~netcl.optim.Adam` with Nesterov momentum; ``momentum_decay`` is how fast its coefficient rises (Dozat 2016)."""

    formula = Formula(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
        {"m": "exp_avg", "v": "exp_avg_sq"},
        {**_GRAD, **MEANS, "new_p": "p * keep - (share_g * grad + share_m * new_m) / (SQRT(new_v / correction2) + eps)"},
        {
            "correction2": CORRECTIONS["correction2"],
            "mu": "beta1 * (1 - 0.5 * POW(0.96, (age + 1) * momentum_decay))",
            "next_mu": "beta1 * (1 - 0.5 * POW(0.96, (age + 2) * momentum_decay))",
            "next_mu_product": "mu_product * mu",
            "share_g": "lr * (1 - mu) / (1 - next_mu_product)",
            "share_m": "lr * next_mu / (1 - next_mu_product * next_mu)",
        },
    )
    kept, skips_on_device = ("mu_product",), False  # a skipped step would change what the host keeps

    def starts(self, group: Group) -> tuple[float, ...]:
        return (1.0,)


class ASGD(FormulaOptimizer):
    """Stochastic gradient descent that keeps the average of the parameters, ``ax`` in the state, from step ``t0`` on."""

    formula = Formula(
        {"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
        {"a": "ax"},
        {**_GRAD, "new_p": "p * (1 - lambd * eta) - eta * grad", "new_a": "a + (new_p - a) * mu"},
        {"next_eta": "lr / POW(1 + lambd * lr * (age + 1), alpha)", "next_mu": "1 / MAX(1, age + 1 - t0)"},
    )
    kept, skips_on_device = ("eta", "mu"), False

    def starts(self, group: Group) -> tuple[float, ...]:
        return group["lr"], 1.0


class Rprop(FormulaOptimizer):
    """Moves each element by its own step size, which grows while the gradient keeps its sign and shrinks when the sign changes.

    For full batches only.
    """

    formula = Formula(
        {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
        {"b": "prev", "s": "step_size"},
        {
            "grad": "g * (factor * sign)",
            "turn": "grad * b",
            "change": "WHERE(turn > 0, eta2, WHERE(turn < 0, eta1, 1))",
            "new_s": "MIN(MAX(s * change, step_size1), step_size2)",
            "new_b": "WHERE(turn < 0, 0, grad)",
            "new_p": "p - SIGN(new_b) * new_s",
        },
    )

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self.op, "etas[0]", group["etas"][0], 2**-1074, 1.0)
        check_number(self.op, "etas[1]", group["etas"][1], 1.0 + 2**-52)

    def initial(self, name: str, group: Group) -> float:
        return group["lr"] if name == "step_size" else 0.0
