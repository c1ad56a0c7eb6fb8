"""A model as a list of op calls. The model runs twice, on different values; both runs must call the same ops.

Values that are neither inputs nor results of an op are constants. A constant that is not a weight raises if it differs between the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.autograd.tape import modes
from netcl.core.nested import map_leaves, tensors_in
from netcl.core.tensor import Tensor
from netcl.engine.registry import Choice, Composite, Pointwise, Row, lookup_op
from netcl.io.archive import refusal
from netcl.nn.summary import evaluating

EXPORT = "export_onnx"


class Unsupported(Exception):
    """Raised for an op that ONNX cannot express, at least not with these arguments."""


@dataclass
class Call:
    """One call of an op: its tensors by name, its other arguments, its results.

    ``other`` is the same call in the second run; ``within`` names the op whose decomposition made the call.
    """

    row: Row
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: tuple[Tensor, ...]
    within: str = ""
    other: Call = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def label(self) -> str:
        """The op's name for errors, followed by the op whose decomposition called it."""
        return f"{self.name} in {self.within}" if self.within else self.name

    @property
    def out(self) -> Tensor:
        return self.outputs[0]

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name] if name in self.inputs else self.params[name]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the input tensors of the call, including those in ``params``."""
        yield from tensors_in([*self.inputs.values(), *self.params.values()])


class Trace:
    """The calls of one run. Ops in ``known`` are recorded directly. If a decomposition applies, its ops are recorded instead of the op."""

    def __init__(self, known: Container[str], decompositions: Mapping[str, Callable[..., Any]]):
        self.known, self.decompositions, self.within = known, decompositions, ""
        self.calls: list[Call] = []
        self.unknown: Counter[str] = Counter()
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.other: Trace | None = None

    @property
    def batched(self) -> Tensor:
        """The first input that has dimensions: its first one is the batch."""
        return next((x for x in self.inputs if x.ndim), self.inputs[0])

    def run(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Trace:
        """Call a function and record its ops; returns this trace."""
        self.inputs = tensors_in(inputs)
        with ag.no_grad(), _with_observer(self.observe):
            self.outputs = tensors_in(function(*inputs))
        return self

    def observe(self, row: Row | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an op and record it, unless it returns an input. Unknown composite ops are recorded as the ops they call.

        Without a row, ``function`` is a tensor that changes in place: ``args[0]`` takes its place in the recorded calls.
        """
        if row is None:
            for part in (self, *self.calls):
                for name in vars(part).keys() & {"inputs", "params", "outputs"}:
                    setattr(part, name, map_leaves(getattr(part, name), lambda leaf: args[0] if leaf is function else leaf))
            return None
        known = row.name in self.known or isinstance(row, Pointwise | Choice)
        decompose = self.decompositions.get(row.name)
        if not known and decompose is None and isinstance(row, Composite):
            return function(*args, **kwargs)
        with _with_observer(None):
            out = function(*args, **kwargs)
        inputs, params = _bound_arguments(row, args, kwargs)
        if any(out is part for part in inputs.values()):  # dropout in evaluation mode, a cast to the same dtype
            return out
        outputs = out if isinstance(out, tuple) else (out,)
        before, self.within = self.within, self.within or row.name
        try:
            parts = decompose(**inputs, **params) if decompose else NotImplemented
        except Unsupported as fault:
            self.unknown[str(fault)] += 1
            return out
        finally:
            self.within = before
        if parts is NotImplemented and not known and isinstance(row, Composite):
            return function(*args, **kwargs)
        if parts is not NotImplemented:  # the op's own result stands for that of its parts, so that the final comparison sees it
            parts = parts if isinstance(parts, tuple) else (parts,)
            cast, pairs = lookup_op("cast"), zip(parts, outputs, strict=True)
            self.calls += [Call(cast, {"x": part}, {}, (result,), row.name) for part, result in pairs]
            return out
        self.calls.append(Call(row, inputs, params, outputs, self.within))
        self.unknown[row.name] += not known
        return out


@contextmanager
def _with_observer(observer: Callable[..., Any] | None) -> Iterator[None]:
    before, modes.observer = modes.observer, observer
    try:
        yield
    finally:
        modes.observer = before


def _bound_arguments(row: Row, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(row, Pointwise | Choice):
        given = dict(zip((*row.inputs, *row.params), args, strict=False)) | dict(kwargs)
        return {name: given[name] for name in row.inputs}, {name: given[name] for name in row.params if name in given}
    inputs, params = row.bind(*args, **kwargs)
    return dict(zip(row.inputs, inputs, strict=True)), params


def _mapped(function: Callable[[Any], Tensor], value: Any) -> Any:
    """Apply a function to every leaf of nested tuples, such as an LSTM's two states; a list is a leaf."""
    return tuple(_mapped(function, part) for part in value) if isinstance(value, tuple) else function(value)


def trace(
    model: Callable[..., Any], samples: Sequence[Any], free_batch: bool, known: Container[str], decompositions: Mapping[str, Any]
) -> Trace:
    """Record a model on ``samples``, then on other values (one more row if ``free_batch``); returns the first trace, with ``other`` set."""
    queue = getattr(model, "queue", None)
    # Copies: one tensor may be given for several inputs.
    tensors = _mapped(lambda x: x.detach().clone() if isinstance(x, Tensor) else Tensor.from_host(queue, x), tuple(samples))
    with evaluating(model) if hasattr(model, "modules") else nullcontext():
        first = Trace(known, decompositions).run(model, tensors)
        second = Trace(known, decompositions).run(model, _mapped(lambda x: _varied(x, free_batch), tensors))
    if not first.outputs:
        raise refusal(EXPORT, "the model must return at least one tensor")
    names = [[call.label for call in run.calls] for run in (first, second)]
    if names[0] != names[1] or len(first.outputs) != len(second.outputs):
        at = next((i for i, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), min(map(len, names)))
        what = "the model must call the same ops and return the same number of tensors for all input values"
        raise refusal(EXPORT, what, "replace branches by where()", call=at, first=names[0][at : at + 1], second=names[1][at : at + 1])
    for call, other in zip(first.calls, second.calls, strict=True):
        call.other = other
    first.other = second
    return first


def _varied(x: Tensor, free_batch: bool) -> Tensor:
    """Return other values than those of ``x``: in another order, so that indices stay valid. Floats are also scaled and shifted.

    If all integers are equal, the last one is replaced by its neighbor toward 0, or 0 by 1. With ``free_batch``, one row is added unless
    ``x`` is a scalar.
    """
    values = x.to_host()
    other = np.flip(values)
    if values.dtype.kind == "f":
        other = other * 0.5 + (0.25 if (values != 0.5).any() else 0.5)
    elif np.array_equal(other, values):
        other = np.roll(values, 1)
        if values.size and np.array_equal(other, values):
            last = int(values.flat[-1])
            other.flat[-1] = last - (last > 0) + (last < 0) if last else 1
    if free_batch and other.ndim:
        other = np.concatenate([other, other[:1]])
    return Tensor.from_host(x.queue, other.astype(values.dtype), x.dtype)
