"""Optimizers whose update of an element depends on the whole tensor: LARS, LAMB, Adafactor, Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

from netcl import ops
from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import DeviceError, OutOfMemoryError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import update
from netcl.ops.update import Rule
from netcl.optim.formula import CORRECTIONS, MEANS, Formula, FormulaOptimizer, compiled_formula, option_readers
from netcl.optim.optimizer import Group, Optimizer, check_counts, check_number, picked, step_count

_LERP = Rule("lerp", ("x", "y"), ("take",), {"new_x": "x + (y - x) * take"}, {"x": "new_x"})
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_SCALED = {"direction": "g * (factor * sign)"}


class LayerwiseOptimizer(FormulaOptimizer):
    """An optimizer of two formulas with a refinement per tensor between them.

    ``formula`` computes a ``direction`` per element, :meth:`refine` changes the direction per tensor, and ``move`` updates the parameter.
    In ``move``, ``g`` is the refined direction, and ``factor`` is the number that :meth:`refine` also returns. Directions are computed for
    many parameters together, moves for one parameter at a time.
    """

    formula = Formula({}, {}, _SCALED)
    move: ClassVar[Formula]
    skips_on_device = False

    def refine(self, group: Group, p: Tensor, u: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        """Return the refined form of ``u``, the direction of parameter ``p``, and its factor."""
        raise NotImplementedError

    def rule(self, group: Group) -> Rule:
        return _with_direction(super().rule(group))

    def _values(self, group: Group) -> dict[str, float]:
        kind: Any = type(self)
        wanted = {*self.compiled(group).readers, *self._moved().readers}
        return {name: read(group) for name, read in option_readers(kind).items() if name in wanted}

    def _moved(self) -> Any:
        kind: Any = type(self)
        return compiled_formula(kind, kind.move)

    def _structure(self, state: Mapping[Tensor, Any]) -> tuple[Any, ...]:
        """Return the dependencies of a recorded step, with the options that :meth:`refine` may read: a replay uses recorded values."""
        read = [name for name in self.formula.options if name not in ("lr", "momentum", "betas")]
        return *super()._structure(state), *[group[name] for group in self.param_groups for name in read]

    def _now(self, group: Group, states: list[dict[str, Any]], rule: Rule) -> list[float]:
        """Return the values of ``rule.scalars`` for the step that was just counted."""
        numbers = self.numbers(group, step_count(states[0].get("step", 1)))
        return picked(self.op, rule.scalars, numbers)

    def _change(self, group, states, age, roles, factor, found_inf) -> None:
        if found_inf is not None:
            raise ValueError(message(self.op, "found_inf= cannot be used with this optimizer", "call GradScaler.step(optimizer)"))
        names = 2 + len(self.tensors(group))
        directions = [Tensor.empty(p.shape, dtypes.sum_dtype(p.dtype), queue=p.queue) for p in roles[0]]
        super()._change(group, states, age, [*roles[:names], directions], factor, None)
        rule = self._moved().host
        numbers = recording.again(partial(self._now, group, states, rule))
        if len(roles) > names:
            rule = rule.with_copy("p", "low")
        try:
            for i, p in enumerate(roles[0]):
                u, ratio = self.refine(group, p, directions[i], states[i])
                update.apply(rule, [[p], [u], *[[role[i]] for role in roles[2:]]], numbers, ratio)
        except (DeviceError, OutOfMemoryError) as error:
            raise update.partly(error) from None


@cache
def _with_direction(rule: Rule) -> Rule:
    return replace(rule, tensors=(*rule.tensors, "u"), writes={**rule.writes, "u": "direction"})


def _norms(*tensors: Tensor) -> list[Tensor]:
    return [update.norm_of_all([t])[0] for t in tensors]


class LARS(LayerwiseOptimizer):
    """:class:`SGD` with a learning rate per tensor: ``lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`` (You et al. 2017).

    Tensors whose norm, or whose gradient's norm, is 0 have the learning rate ``lr``.
    """

    formula = Formula(
        {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3, "eps": 1e-8}, {"m": "momentum_buffer"}, _SCALED
    )
    move = Formula(formula.options, formula.tensors, {"new_m": "momentum * m + lr * factor * (g + weight_decay * p)", "new_p": "p - new_m"})
    counts = False

    def refine(self, group: Group, p: Tensor, u: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        weight, gradient = _norms(p, u)
        below = ops.add(ops.add(gradient, ops.mul(weight, group["weight_decay"])), group["eps"])
        ratio = ops.div(ops.mul(weight, group["trust_coefficient"]), below)
        return u, ops.where(ops.gt(ops.mul(weight, gradient), 0), ratio, 1.0)


class LAMB(LayerwiseOptimizer):
    """:class:`Adam` whose update of each tensor is scaled to the norm ``lr * |p|``, unless the update or ``p`` is 0 (You et al. 2020)."""

    formula = Formula(
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
        {"m": "exp_avg", "v": "exp_avg_sq"},
        {"grad": "g * (factor * sign)", **MEANS, "direction": "new_m / correction1 / (SQRT(new_v / correction2) + eps) + weight_decay * p"},
        CORRECTIONS,
    )
    move = Formula(formula.options, formula.tensors, {"new_p": "p - lr * factor * g"})

    def refine(self, group: Group, p: Tensor, u: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        weight, direction = _norms(p, u)
        return u, ops.where(ops.gt(ops.mul(weight, direction), 0), ops.div(weight, direction), 1.0)


class Muon(LayerwiseOptimizer):
    """Updates matrices by their momentum, made nearly orthogonal by ``ns_steps`` Newton-Schulz iterations (Jordan et al. 2024).

    For matrices only: use :class:`AdamW` for biases, norms and embeddings. ``adjust_lr_fn`` is ``"original"`` (also ``None``) or
    ``"match_rms_adamw"``, as in torch. Iterations run in float32, or float64 for float64 parameters; torch's use bfloat16.
    """

    formula = Formula(
        {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7,
         "ns_steps": 5, "adjust_lr_fn": None},
        {"m": "momentum_buffer"},
        {"grad": "g * (factor * sign)", "new_m": "momentum * m + (1 - momentum) * grad",
         "direction": "new_m + nesterov * (1 - momentum) * (grad - new_m)"},
    )  # fmt: skip
    move = Formula(formula.options, formula.tensors, {"new_p": "p * (1 - lr * weight_decay) - lr * factor * g"})
    counts = False

    def check(self, group: Group) -> None:
        super().check(group)
        check_counts(self.op, ns_steps=group["ns_steps"])
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            what = 'adjust_lr_fn must be None, "original" or "match_rms_adamw"'
            raise ValueError(message(self.op, what, adjust_lr_fn=repr(group["adjust_lr_fn"])))
        other = next((p for p in group["params"] if isinstance(p, Tensor) and p.ndim != 2), None)
        if other is not None:
            what, remedy = "every parameter must be a matrix", "optimize the other parameters with AdamW"
            raise ShapeError(message(self.op, what, remedy, shape=other.shape))

    def refine(self, group: Group, p: Tensor, u: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        rows, columns = p.shape
        x = ops.transpose(u) if rows > columns else u
        a, b, c = group["ns_coefficients"]
        x = ops.div(x, ops.clamp(_norms(x)[0], group["eps"], math.inf))
        for _ in range(group["ns_steps"]):
            gram = ops.matmul(x, ops.transpose(x))  # type: ignore[operator]
            x = ops.add(ops.mul(x, a), ops.matmul(ops.add(ops.mul(gram, b), ops.mul(ops.matmul(gram, gram), c)), x))  # type: ignore[operator]
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        return ops.transpose(x) if rows > columns else x, 0.2 * math.sqrt(max(p.shape)) if matched else math.sqrt(max(1, rows / columns))


class Adafactor(LayerwiseOptimizer):
    """Divides gradients by a running root mean square, kept for a matrix as a number per row and per column (Shazeer & Stern 2018).

    Step n has the size ``min(lr, 1 / sqrt(n))`` times the parameter's root mean square. New squares enter the averages with weight
    ``n ** beta2_decay``. ``eps`` is a pair of lower bounds: for the root mean square of the gradient (``None``: the dtype's epsilon) and of
    the parameter. ``d`` is the largest root mean square of an update before it is scaled by the step size.
    """

    formula = Formula(
        {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
        {},
        _SCALED,
        {"take": "POW(age + 1, beta2_decay)", "rho": "MIN(lr, 1 / SQRT(age + 1))"},
    )
    move = Formula(formula.options, {}, {"new_p": "p * (1 - lr * weight_decay) - rho * factor * g"}, formula.numbers)

    def check(self, group: Group) -> None:
        Optimizer.check(self, group)
        floor, scale = group["eps"]
        for name, value in (("eps[0]", floor or 0.0), ("eps[1]", scale), ("-beta2_decay", -group["beta2_decay"])):
            check_number(self.op, name, value)
        check_number(self.op, "d", group["d"], 1.0)

    def state_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        return {"row_var": (*p.shape[:-1], 1), "col_var": (*p.shape[:-2], 1, *p.shape[-1:])}.get(name, p.shape)

    def _loaded_state(self, p: Tensor, number: int, saved: Mapping[str, Any], group: Group) -> dict[str, Any]:
        missing = [name for name in _factors(p) if saved and name not in saved]
        if missing:
            raise ValueError(message(self.op, f"the state of parameter {number} must have {missing[0]!r}", has=sorted(saved)))
        return super()._loaded_state(p, number, saved, group)

    def refine(self, group: Group, p: Tensor, u: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
        floor = _EPS[p.dtype] if group["eps"][0] is None else group["eps"][0]
        names = _factors(p)
        kept = [self.remembered(group, [p], [state], name)[0] for name in names]
        squares = ops.mul(u, u)
        means = [ops.mean(squares, axis, keepdims=True) for axis in (-1, -2)] if len(names) == 2 else [squares]
        take = recording.again(lambda: [self.numbers(group, step_count(state["step"]))["take"]])
        update.apply(_LERP, [kept, means], take)
        estimate = kept[0]
        if len(names) == 2:
            rows, columns = kept
            estimate = ops.div(ops.mul(rows, columns), ops.clamp(ops.mean(rows, -2, keepdims=True), floor, math.inf))
        u = ops.mul(ops.rsqrt(ops.clamp(estimate, floor * floor, math.inf)), u)
        weight, length = _norms(p, u)
        root = math.sqrt(p.size)
        scale = ops.maximum(ops.div(weight, root), group["eps"][1])
        return u, ops.div(scale, ops.maximum(ops.div(length, root * group["d"]), 1.0))


Adafactor.names = ("row_var", "col_var", "variance")


def _factors(p: Tensor) -> tuple[str, ...]:
    return Adafactor.names[:2] if p.ndim > 1 else Adafactor.names[2:]
