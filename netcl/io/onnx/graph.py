"""A graph under construction: nodes, constants, and the names of the values of a trace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.io import tree
from netcl.io.archive import refusal
from netcl.io.onnx.library import library, type_of
from netcl.io.onnx.trace import OP, Call, Trace


class Unsupported(Exception):
    """An op that ONNX cannot express, at least not with these arguments."""


class Name(str):
    """The name of a value, with its dtype."""

    dtype: str

    def __new__(cls, name: str, dtype: str) -> Name:
        self = super().__new__(cls, name)
        self.dtype = dtype
        return self


def _storage_key(t: Tensor) -> tuple[Any, ...]:
    place = id(t.pool_handle or t.buffer) if t.array is None else t.array.__array_interface__["data"][0]
    return place, t.shape, t.dtype


class Graph:
    """Takes the calls of a trace one after the other; ``rules`` say what each becomes."""

    def __init__(self, run: Trace, state: Mapping[str, Tensor], input_names: Sequence[str], output_names: Sequence[str], free_batch: bool):
        self.run, self.free_batch = run, free_batch
        self._taken = {*state, *input_names, *output_names}
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self._types: dict[str, str] = {}
        self._weights: set[str] = set()
        self._names: dict[int, Name] = {}
        self._memory: dict[tuple[Any, ...], Name] = {}
        self._small: dict[tuple[str, bytes, tuple[int, ...]], Name] = {}
        self._numbers: Counter[str] = Counter()
        self._state: dict[Any, str] = {id(tensor): name for name, tensor in state.items()} | {
            _storage_key(tensor): name for name, tensor in state.items()
        }
        self._others = _twin_tensors(run)
        self._batch: Name | None = None
        for tensor, name in zip(run.inputs, input_names, strict=True):
            self.bind(tensor, Name(name, tensor.dtype))

    # ---- names

    def bind(self, tensor: Tensor, name: Name) -> None:
        """Give a value of the trace a name."""
        self._names[id(tensor)] = self._memory[_storage_key(tensor)] = name

    def fresh(self, kind: str) -> str:
        """A name that is not used yet."""
        while (name := f"{kind}_{self._numbers[kind]}") in self._taken:
            self._numbers[kind] += 1
        self._numbers[kind] += 1
        return name

    def value(self, x: Any, dtype: str | None = None) -> Name:
        """The name of a tensor, or of a number as a constant, in a dtype."""
        name = self._tensor(x) if isinstance(x, Tensor) else self.constant(np.asarray(x, _numpy_dtype(dtype or "float32")))
        return self.cast(name, dtype or name.dtype)

    def _tensor(self, x: Tensor) -> Name:
        found = self._names.get(id(x)) or self._memory.get(_storage_key(x))
        if found is None:
            found = self._constant_tensor(x)
            self._names[id(x)] = found
        return found

    def _constant_tensor(self, x: Tensor) -> Name:
        """A weight, or a constant of the model: the same in both runs, or it is none."""
        state = self._state.get(id(x)) or self._state.get(_storage_key(x))
        other = self._others.get(id(x))
        if state is None and (other is None or not _same_values(x, other)):
            what = "a value was computed outside of the ops, or depends on the batch"
            raise refusal(OP, what, "compute it with ops, or pass dynamic_batch=False", shape=x.shape, dtype=x.dtype)
        name = Name(state or self.fresh("constant"), x.dtype)
        if state is not None:
            self._weights.add(name)
        if name not in self.constants:
            self.constants[name] = tree.host_bits(x)
            self._types[name] = x.dtype
        return name

    def constant(self, array: np.ndarray) -> Name:
        """A constant; equal ones are stored once."""
        stored, dtype = tree.bits(array)
        key = (dtype, stored.tobytes(), stored.shape)
        if key not in self._small:
            name = self._small[key] = Name(self.fresh("constant"), dtype)
            self.constants[name], self._types[name] = stored, dtype
        return self._small[key]

    def integers(self, values: Sequence[int]) -> Name:
        """A vector of int64."""
        return self.constant(np.array(values, np.int64))

    # ---- nodes

    def node(self, kind: str, inputs: Sequence[str | None], dtype: str, **attributes: Any) -> Name:
        """Add a node with one result."""
        return self.several(kind, inputs, 1, dtype, **attributes)[0]

    def several(self, kind: str, inputs: Sequence[str | None], count: int, dtype: str, **attributes: Any) -> list[Name]:
        """Add a node with several results."""
        names = [Name(self.fresh(kind.lower()), dtype) for _ in range(count)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(library().helper.make_node(kind, [name or "" for name in inputs], names, **given))
        return names

    def cast(self, name: Name, dtype: str) -> Name:
        """The value in another dtype."""
        return name if name.dtype == dtype else self.node("Cast", [name], dtype, to=type_of(dtype))

    # ---- sizes

    def sizes(self, call: Call, kept: Callable[[int], bool] = lambda axis: False) -> Name:
        """The shape of a call's result as a vector; axes that ``kept`` names are 1. The batch, if it is free, is read at run time."""
        mine, other = call.out.shape, call.other.out.shape
        parts: list[Name] = []
        for free, run in itertools.groupby(range(len(mine)), key=lambda axis: mine[axis] != other[axis] and not kept(axis)):
            axes = list(run)
            parts += (
                [self._rows(mine[i], other[i], call) for i in axes] if free else [self.integers([1 if kept(i) else mine[i] for i in axes])]
            )
        return parts[0] if len(parts) == 1 else self.node("Concat", parts, "int64", axis=0) if parts else self.integers([])

    def _rows(self, mine: int, other: int, call: Call) -> Name:
        """A size that is a multiple of the batch."""
        batch = self.run.inputs[0].shape[0]
        times, rest = divmod(mine, batch) if batch else (0, 1)
        if rest or other != times * (batch + 1):
            raise refusal(OP, f"a size in {call.name} depends on the batch in an odd way", "pass dynamic_batch=False", sizes=(mine, other))
        if self._batch is None:
            self._batch = self.node("Shape", [self.value(self.run.inputs[0])], "int64", start=0, end=1)
        return self._batch if times == 1 else self.node("Mul", [self._batch, self.integers([times])], "int64")

    # ---- the result

    def initializers(self) -> list[Any]:
        """The weights that are used, as ONNX has them."""
        return [self._proto(name) for name in self._used() if name in self._weights]

    def constant_nodes(self) -> list[Any]:
        """Every other constant that is used, as a node: what reads the model can tell it from a weight."""
        make = library().helper.make_node
        return [make("Constant", [], [name], value=self._proto(name)) for name in self._used() if name not in self._weights]

    def _used(self) -> list[str]:
        used = {name for node in self.nodes for name in node.input}
        return [name for name in self.constants if name in used]

    def _proto(self, name: str) -> Any:
        array = self.constants[name]
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        return library().helper.make_tensor(name, type_of(self._types[name]), array.shape, data, raw=True)


def _numpy_dtype(dtype: str) -> Any:
    return tree.bfloat16() if dtype == "bfloat16" else dtypes.DTYPES[dtype].storage


def _twin_tensors(run: Trace) -> dict[int, Tensor]:
    """Every tensor that goes into a call, with its twin of the second run."""
    found: dict[int, Tensor] = {}
    for call in run.calls:
        found |= {id(mine): other for mine, other in zip(call.tensors(), call.other.tensors(), strict=True)}
    if run.other is not None:
        found |= {id(mine): other for mine, other in zip(run.outputs, run.other.outputs, strict=True)}
    return found


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and np.array_equal(tree.host_bits(a), tree.host_bits(b)))
