"""The base class of all optimizers: parameter groups, state, and the update of all parameters in few launches."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar

import numpy as np

from netcl import ops
from netcl.autograd.clipping import clip_factor
from netcl.autograd.tape import enable_grad
from netcl.core import dtype as dtypes
from netcl.core import recording
from netcl.core.errors import DeviceError, DtypeError, KernelBuildError, OutOfMemoryError, ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.ops import update

Group = dict[str, Any]
#: A fact that never holds: a recording in which state is created is not replayed, because a replay would create it again.
_ALWAYS_ANOTHER = object
#: Switches of torch's implementation; they are dropped when a torch state is loaded.
TORCH_SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})

#: Keys a group may have besides an optimizer's options; any other that resembles an option raises as misspelled.
EXTRA_OPTIONS = frozenset({"params", "name", "initial_lr"})

required = object()  # torch's mark of an option without a default

_COUNT = update.Rule("count", ("steps",), (), {"more": "steps + 1 - factor"}, {"steps": "more"})


def check_number(op: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``value`` is a number with ``low <= value < below``."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not low <= value < below:
        least = f"at least {low:g}" if low == round(low) else f"above {round(low)}"  # a bound one float above an integer excludes it
        most = "" if below == math.inf else f" and below {below:g}" if below == round(below) else f" and at most {round(below)}"
        raise ValueError(message(op, f"{name} must be a number, {least}{most}", **{name: repr(value)}))


def check_counts(op: str, **counts: Any) -> None:
    """Raise ``ValueError`` unless every value is a positive integer."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(message(op, f"{name} must be a positive integer", **{name: repr(value)}))


def check_betas(op: str, betas: Any) -> None:
    """Raise ``ValueError`` unless ``betas`` are two numbers in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(message(op, "betas must be a tuple or list of two numbers", betas=repr(betas)))
    for i, beta in enumerate(betas, 1):
        check_number(op, f"beta{i}", beta, 0.0, 1.0)


def picked(op: str, names: Sequence[str], numbers: Mapping[str, Any]) -> list[Any]:
    """Return some numbers by name; raises ``TypeError`` for ``None``, which a user may have set in a parameter group."""
    values = [numbers[name] for name in names]
    if None in values:
        raise TypeError(message(op, "options of parameter groups must be numbers, got None", option=names[values.index(None)]))
    return values


class Optimizer:
    """Base class of optimizers, which update parameters by their gradients.

    ``params`` are tensors, or dicts with the key ``"params"`` and options of their own: parameter groups. A subclass defines
    the new value of an element (:meth:`rule`), the state of each parameter (:meth:`tensors`) and the numbers that
    change from step to step (:meth:`numbers`).

    ``param_groups`` is a list of dicts that may be changed between steps (``opt.param_groups[0]["lr"] = 0.01``); ``state``
    maps a parameter to its state. A step skips parameters without a gradient.
    """

    #: Every name a parameter's state may have, in torch's order.
    names: ClassVar[tuple[str, ...]] = ()
    #: Whether the number of a parameter's steps is part of its state.
    counts: ClassVar[bool] = False

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any], switches: Mapping[str, Any] | None = None):
        self.op = type(self).__name__
        given_switches = switches or {}
        if unknown := sorted(set(given_switches) - TORCH_SWITCHES):
            known = ", ".join(inspect.signature(type(self)).parameters)
            raise TypeError(message(self.op, f"unknown option {unknown[0]!r}", f"known are {known}"))
        if given_switches.get("differentiable"):  # the other switches do not change results
            raise ValueError(message(self.op, "differentiable must be False", "leave it out"))
        if isinstance(params, Tensor):
            raise TypeError(message(self.op, "params must be a list", "pass [tensor], or model.parameters()", shape=params.shape))
        if hasattr(params, "parameters"):
            raise TypeError(message(self.op, "params must be a list", "pass model.parameters()", given=type(params).__name__))
        given = list(params)
        if not given:
            raise ValueError(message(self.op, "params must not be empty", "pass model.parameters()"))
        self.defaults = dict(defaults)
        self.param_groups: list[Group] = []
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._places: dict[int, str] = {}
        for group in given if isinstance(given[0], Mapping) else [{"params": given}]:
            self.add_param_group(group)

    # ---- defined by subclasses

    def rule(self, group: Group) -> update.Rule:
        """Return the update rule of one element; its tensors are ``p``, ``g`` and one per name of :meth:`tensors`."""
        raise NotImplementedError

    def counted_rule(self, group: Group) -> update.Rule:
        """Return the rule of a step that the device may skip. It reads ``age``, the number of earlier steps, from device memory.

        Equal to :meth:`rule` if no scalar depends on the age.
        """
        return self.rule(group)

    @property
    def skips_on_device(self) -> bool:
        """Whether ``step(found_inf=...)`` can skip the update on the device."""
        return True

    def tensors(self, group: Group) -> tuple[str, ...]:
        """List the names of the state tensors of each parameter of a group."""
        raise NotImplementedError

    def numbers(self, group: Group, age: int) -> Mapping[str, float]:
        """Return the values of the rule's scalars in step number ``age`` of the parameters, counted from 1."""
        raise NotImplementedError

    def initial(self, name: str, group: Group) -> float:
        """Return the initial value of the state tensor ``name``."""
        return 0.0

    def state_shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        """Return the shape of the state tensor ``name`` of parameter ``p``."""
        return p.shape

    def state_dtype(self, name: str, p: Tensor) -> str:
        """Return the dtype of the state tensor ``name`` of parameter ``p``: float32 also for half parameters."""
        return dtypes.sum_dtype(p.dtype)

    def check(self, group: Group) -> None:
        """Raise if an option of a group is out of range."""
        for name in ("lr", "weight_decay"):
            if name in group:  # optimizers of users may have neither
                check_number(self.op, name, group[name])

    # ---- groups

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters with their own options; missing options are the optimizer's defaults.

        >>> from netcl.optim import SGD
        >>> a, b = (Tensor.from_host([1.0], requires_grad=True) for _ in range(2))
        >>> opt = SGD([a], lr=0.1)
        >>> opt.add_param_group({"params": [b], "lr": 0.01})
        >>> [group["lr"] for group in opt.param_groups]
        [0.1, 0.01]
        """
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(message(self.op, "a parameter group must be a dict with the key 'params'", has=_keys(group)))
        params = group["params"]
        made = {**self.defaults, **group, "params": [params] if isinstance(params, Tensor) else list(params)}
        for name in set(group) - set(self.defaults) - EXTRA_OPTIONS:  # scripts keep values of their own, such as lr_scale
            if get_close_matches(name, self.defaults, cutoff=0.7):
                raise ValueError(message(self.op, f"a parameter group has no option {name!r}", f"known are {', '.join(self.defaults)}"))
        if not made["params"]:
            raise ValueError(message(self.op, "a parameter group must not be empty", group=len(self.param_groups)))
        self.check(made)
        places: dict[int, str] = {}
        for i, p in enumerate(made["params"]):
            place = f"parameter {i} of group {len(self.param_groups)}"
            self._check_parameter(p, place, places)
            places[id(p)] = place
        self._places |= places
        self.param_groups.append(made)

    def _check_parameter(self, p: Any, place: str, earlier: Mapping[int, str]) -> None:
        if not isinstance(p, Tensor):
            raise TypeError(message(self.op, f"{place} must be a Tensor", "pass model.parameters()", type=type(p).__name__))
        if not dtypes.DTYPES[p.dtype].is_float:
            raise DtypeError(message(self.op, f"{place} must have a floating-point dtype", dtype=p.dtype, shape=p.shape))
        if p.grad_fn is not None:
            remedy = "optimize the tensor it was computed from, or its detach()"
            raise ValueError(message(self.op, f"{place} must be a leaf tensor", remedy, by=p.grad_fn.name, shape=p.shape))
        again = earlier.get(id(p)) or self._places.get(id(p))
        if again:
            raise ValueError(message(self.op, f"{place} must be given only once", "name every parameter once", first=again, shape=p.shape))

    # ---- steps

    def step(
        self, max_norm: float | Callable[[], Any] | None = None, *, closure: Callable[[], Any] | None = None,
        grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Update every parameter that has a gradient; returns ``None`` unless ``closure`` or ``max_norm`` is given.

        If the driver fails before the first launch, nothing has changed and the step can be repeated. If it fails later, the error says
        that a part of the update was done.

        ``step(closure)`` first calls the function with gradients enabled, and returns its result, the loss, as in torch.

        ``max_norm`` scales the gradients down if the norm of all gradients together is larger. The update does the scaling, so ``.grad``
        keeps its values. The norm is returned as a 0-d tensor, without waiting for the device.

        ``grad_scale`` and ``found_inf`` are 0-d tensors on the device (from :class:`netcl.amp.GradScaler`). The update multiplies gradients
        by ``grad_scale`` and is skipped if ``found_inf`` is 1. The host does not wait for the device: the device counts the steps, and
        :meth:`state_dict` reads the count.
        """
        if closure is not None or callable(max_norm):
            with enable_grad():
                loss = closure() if closure is not None else max_norm()  # type: ignore[operator,misc]
            self.step(None if callable(max_norm) else max_norm, grad_scale=grad_scale, found_inf=found_inf)
            return loss
        live = [(group, self.with_gradient(group)) for group in self.param_groups]
        total, factor = self._factor(live, max_norm, grad_scale)
        counters: list[Tensor] = []
        done = 0
        try:
            for group, params in live:
                for age, states, roles in self._roles(group, params, found_inf is not None):
                    self._change(group, states, age, roles, factor, found_inf)
                    counters += [age] if isinstance(age, Tensor) else []
                    done += 1
        except (DeviceError, OutOfMemoryError) as error:
            raise update.partly(error) if done else error from None
        if counters and found_inf is not None:
            update.apply(_COUNT, [counters], (), found_inf)
        recording.requires(partial(self._structure, self.state))
        return total

    def _change(
        self, group: Group, states: list[dict[str, Any]], age: int | Tensor, roles: list[list[Any]], factor: Tensor | float,
        found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        given: dict[str, Tensor] = {}
        counting = self.counts and not isinstance(age, Tensor)
        if self.counts:
            recording.requires(partial(_of_one_age, states, None if counting else age))
        if isinstance(age, Tensor):
            rule, given["age"], age = self.counted_rule(group), age, 1
        else:
            rule = self.rule(group)
        undo = partial(_uncount, states if counting else ())
        numbers = recording.again(partial(self._next_numbers, group, rule, states if counting else (), age), undo)
        used = rule if len(roles) == len(rule.tensors) else rule.with_copy("p", "low")
        if found_inf is not None:
            used, given["skip"] = used.guarded(), found_inf
        try:
            update.apply(used, roles, numbers, factor, **given)
        except (DeviceError, OutOfMemoryError, KernelBuildError):
            undo()  # nothing was launched, and the step can be repeated
            raise

    def _next_numbers(self, group: Group, rule: update.Rule, counted: Sequence[dict[str, Any]], age: int) -> list[float]:
        """Increment the step count of parameters that share it; returns the scalars of the update in the order of ``rule.scalars``."""
        age = step_count(counted[0].get("step", 0)) + 1 if counted else age
        numbers = picked(self.op, rule.scalars, self.numbers(group, age))
        for state in counted:
            state["step"] = age
        return numbers

    def _structure(self, state: Mapping[Tensor, Any]) -> tuple[Any, ...]:
        """Return the dependencies of a recorded step: rules, parameters, their state, frozen parameters with a gradient."""
        groups = [(id(g), self.rule(g), g["master_weights"], *map(id, g["params"])) for g in self.param_groups]
        left = [p.grad is not None for group in self.param_groups for p in group["params"] if not p.requires_grad]
        return self.state is state, *map(id, state.values()), *map(len, state.values()), *groups, *left

    def _factor(
        self, live: Sequence[tuple[Group, list[Tensor]]], max_norm: float | None, grad_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | float]:
        """Return the norm of all gradients (``None`` without clipping) and the factor by which the update multiplies gradients."""
        unclipped: Tensor | float = 1.0 if grad_scale is None else grad_scale
        if max_norm is None:
            return None, unclipped
        check_number(self.op, "max_norm", max_norm)
        gradients = [g for _, params in live for p in params if (g := p.grad) is not None]
        if not gradients:
            return None, unclipped
        if grad_scale is None:
            return clip_factor(gradients, max_norm)
        total = ops.mul(update.norm_of_all(gradients)[0], grad_scale)
        return total, ops.mul(ops.minimum(ops.div(max_norm, ops.add(total, 1e-6)), 1.0), grad_scale)

    def with_gradient(self, group: Group) -> list[Tensor]:
        """Return the parameters of a group that have a gradient; raises if a gradient does not fit its parameter."""
        found = []
        for p in group["params"]:
            g = p.grad
            if g is not None:
                if g.shape != p.shape or g.queue is not p.queue or g.dtype is not p.dtype:
                    self._check_gradient(p, g)
                found.append(p)
        return found

    def _check_gradient(self, p: Tensor, g: Tensor) -> None:
        if g.shape != p.shape:
            raise ShapeError(message(self.op, "a gradient must have the shape of its parameter", gradient=g.shape, parameter=p.shape))
        if g.queue is not p.queue and (p.context is None or g.context != p.context):
            where = {"gradient": g.device.device_name, "parameter": p.device.device_name}
            raise DeviceError(message(self.op, "a gradient must be on the device of its parameter", shape=p.shape, **where))
        if not dtypes.DTYPES[g.dtype].is_float:
            raise DtypeError(message(self.op, "a gradient must have a floating-point dtype", dtype=g.dtype, shape=g.shape))

    def _roles(
        self, group: Group, params: list[Tensor], on_device: bool
    ) -> Iterator[tuple[int | Tensor, list[dict[str, Any]], list[list[Any]]]]:
        """Group parameters by step count. Yields the count or its device tensor, the states, and a list per tensor of the rule."""
        names = self.tensors(group)
        for age, mastered, own, states in self._together(group, params, names, on_device):
            roles: list[list[Any]] = [[p.grad for p in own], *[self.remembered(group, own, states, name) for name in names]]
            steps = self._counter(group, own, states) if on_device and self.counts else age
            masters = [self._master(p, state) for p, state in zip(own, states, strict=True)] if mastered else own
            yield steps, states, [masters, *roles, *([own] if mastered else [])]

    def _together(
        self, group: Group, params: list[Tensor], names: Sequence[str], on_device: bool
    ) -> Iterator[tuple[int, bool, list[Tensor], list[dict[str, Any]]]]:
        """Group parameters by step count and by whether they have master weights. Yields count, flag, parameters and states."""
        states: list[Any] = [self.state.get(p) for p in params]
        if None in states:
            states = [self.state.setdefault(p, {}) for p in params]
        ages = self._ages(states, names, on_device)
        if not group["master_weights"] and len(set(ages)) == 1:
            yield ages[0], False, params, states
            return
        lots: dict[tuple[int, bool], list[int]] = {}
        for i, p in enumerate(params):
            lots.setdefault((ages[i], group["master_weights"] and p.dtype in dtypes.HALVES), []).append(i)
        for (age, mastered), lot in lots.items():
            yield age, mastered, [params[i] for i in lot], [states[i] for i in lot]

    def _ages(self, states: Sequence[dict[str, Any]], names: Sequence[str], on_device: bool) -> list[int]:
        """Return the number of this step for each parameter; without step counts, 1 for its first step and 2 for all others.

        With ``on_device``, parameters that share a device counter get the same number, which identifies the counter.
        """
        if not self.counts:
            return [2 if names and names[0] in state else 1 for state in states]
        steps = [state.get("step", 0) for state in states]
        if on_device:
            return [id(n) if isinstance(n, Tensor) else n for n in steps]
        return [(n if type(n) is int else step_count(n)) + 1 for n in steps]

    def _counter(self, group: Group, own: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> Tensor:
        """Return the device counter of the steps of these parameters. They share the counter until a step leaves one of them out."""
        steps = states[0].get("step", 0)
        if isinstance(steps, Tensor):
            sharing = sum(self.state.get(p, {}).get("step") is steps for p in group["params"])
            if sharing == len(states):
                return steps
            counter = duplicate(steps)
        else:
            counter = Tensor.full((), steps, "float32", queue=own[0].queue, persistent=True)
        for state in states:
            state["step"] = counter
        recording.requires(_ALWAYS_ANOTHER)
        return counter

    def remembered(self, group: Group, own: list[Tensor], states: list[dict[str, Any]], name: str) -> list[Tensor]:
        """Return the state tensor ``name`` of each parameter; creates missing tensors, and moves each to the device of its parameter."""
        found: list[Any] = [state.get(name) for state in states]
        for i in [i for i, (p, t) in enumerate(zip(own, found, strict=True)) if t is None or t.queue is not p.queue]:
            p, old = own[i], found[i]
            recording.requires(_ALWAYS_ANOTHER)
            if old is None:
                kind, start = self.state_dtype(name, p), self.initial(name, group)
                found[i] = states[i][name] = Tensor.full(self.state_shape(name, p), start, kind, queue=p.queue, persistent=True)
            else:
                found[i] = states[i][name] = old.to(p.queue)
        return found

    def _master(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        if "master" not in state:
            recording.requires(_ALWAYS_ANOTHER)
            state["master"] = Tensor.empty(p.shape, "float32", queue=p.queue, persistent=True)
            update.copy([state["master"]], [p])
        elif state["master"].queue is not p.queue:
            state["master"] = state["master"].to(p.queue)
        return state["master"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to ``None`` or, with ``set_to_none=False``, fill them with zeros in place."""
        if set_to_none:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
                    if recording.listening:
                        recording.leaf(p)
            return
        gradients = [g for p in self._parameters() if (g := p.grad) is not None]
        for g in gradients:
            g.grad_fn, g._requires_grad = None, False
        update.apply(update.ZERO, [gradients])

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout: ``state`` by parameter index, and ``param_groups``.

        The tensors are the optimizer's own, not copies: a later step changes them.
        """
        number = {id(p): i for i, p in enumerate(self._parameters())}
        groups = [{**{key: value for key, value in group.items() if key != "params"}, "params": [number[id(p)] for p in group["params"]]}
                  for group in self.param_groups]  # fmt: skip
        states = {number[id(p)]: {key: step_count(value) if key == "step" else value for key, value in state.items()}
                  for p, state in self.state.items()}  # fmt: skip
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, or from one that torch made for the same parameters in the same order.

        Tensors may be netcl's, NumPy arrays or anything with ``__array__``; they are copied. Nothing is changed if something
        does not match.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError(message(self.op, "the state must have the keys 'state' and 'param_groups'", has=_keys(state_dict)))
        groups = self._loaded_groups(state_dict["param_groups"])
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = dict(zip(numbers, self._parameters(), strict=True))
        group_of = {id(p): group for group in groups for p in group["params"]}
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for number, saved in state_dict["state"].items():
            number = int(number) if isinstance(number, str) and number.isdecimal() else number
            if number not in parameters:
                what = f"every parameter of the state must be in a group, got {number!r}"
                raise ValueError(message(self.op, what, parameters=len(numbers)))
            p = parameters[number]
            state[p] = self._loaded_state(p, number, saved, group_of[id(p)])
        self.state = state
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.clear()
            group.update(loaded)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _loaded_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[Group]:
        have, given = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if have != given:
            what = "every group of the state must have as many parameters as the group of the optimizer"
            raise ValueError(message(self.op, what, parameters_of_groups=have, saved=given))
        loaded = []
        for group, of in zip(self.param_groups, saved, strict=True):
            options = {key: self._plain(value) for key, value in of.items() if key not in TORCH_SWITCHES and key != "params"}
            made = {**group, **options, "params": group["params"]}
            self.check(made)
            loaded.append(made)
        return loaded

    def _plain(self, value: Any) -> Any:
        """Convert an option that a file stored as a list or a 0-d array back to a tuple or a number."""
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(part) for part in value)
        return value.item() if hasattr(value, "item") else value

    def _loaded_state(self, p: Tensor, number: int, saved: Mapping[str, Any], group: Group) -> dict[str, Any]:
        given = {name: value for name, value in saved.items() if value is not None}
        if type(self).tensors is Optimizer.tensors:  # an optimizer of the user, with a step of its own
            return {name: v.to(p.queue, copy=True) if isinstance(v, Tensor) else copy(v) for name, v in given.items()}
        unknown = sorted(set(given) - {*self.names, "master"} - ({"step"} if self.counts else set()))
        if unknown:
            remedy = f"known are {', '.join(self.names)}: was it saved by another optimizer?"
            raise ValueError(message(self.op, f"unknown entry {unknown[0]!r} in the state of parameter {number}", remedy))
        missing = [name for name in (*(("step",) if self.counts else ()), *self.tensors(group)) if given and name not in given]
        if missing:
            raise ValueError(message(self.op, f"the state of parameter {number} must have {missing[0]!r}", has=_keys(given)))
        made: dict[str, Any] = {"step": int(np.asarray(given["step"]))} if "step" in given else {}
        for name in (*self.names, "master"):
            if name in given:
                values = np.asarray(given[name])
                if values.shape != (wanted := self.state_shape(name, p)):
                    what = f"{name!r} of parameter {number} must have the shape that the optimizer expects"
                    raise ShapeError(message(self.op, what, state=values.shape, expected=wanted))
                made[name] = Tensor.from_host(p.queue, values, self.state_dtype(name, p), persistent=True)
        return made

    def __repr__(self) -> str:
        lines = [f"  group {i}: {len(group['params'])} parameters, " + ", ".join(f"{k}={v}" for k, v in group.items() if k != "params")
                 for i, group in enumerate(self.param_groups)]  # fmt: skip
        return "\n".join([f"{self.op}(", *lines, ")"])


def _uncount(states: Sequence[dict[str, Any]]) -> None:
    """Undo the step count of parameters whose update was not launched."""
    for state in states:
        state["step"] -= 1


def _of_one_age(states: Sequence[dict[str, Any]], counter: Any) -> bool:
    """Whether parameters that are updated together still share a step count: a host number, or the device tensor ``counter``."""
    first = states[0].get("step", 0) if counter is None else counter
    for state in states:
        steps = state.get("step", 0)
        if steps is not first and (isinstance(steps, Tensor) or isinstance(first, Tensor) or steps != first):
            return False
    return True


def step_count(steps: int | Tensor) -> int:
    """Return ``steps`` as an integer; waits for the device if it is a tensor."""
    return int(steps.item()) if isinstance(steps, Tensor) else steps


def _keys(of: Any) -> list[str]:
    return sorted(map(str, of)) if isinstance(of, Mapping) else [type(of).__name__]
