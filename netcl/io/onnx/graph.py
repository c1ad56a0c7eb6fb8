"""An ONNX graph under construction: nodes, constants, and the names of the values of a trace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.engine.registry import lookup_op
from netcl.io import tree
from netcl.io.archive import refusal
from netcl.io.onnx.library import ONNX_TYPES, OPSET, library, schema
from netcl.io.onnx.trace import EXPORT, Call, Trace

_INDEX = {"tensor(int32)", "tensor(int64)"}
#: Types that an operator's schema leaves no choice of.
_FIXED_TYPES = {frozenset({"tensor(bool)"}): "bool", frozenset({"tensor(int64)"}): "int64"}


class Name(str):
    """A string with a ``dtype``: the name of a value in the graph."""

    dtype: str

    def __new__(cls, name: str, dtype: str) -> Name:
        self = super().__new__(cls, name)
        self.dtype = dtype
        return self


def _storage_key(t: Tensor) -> tuple[Any, ...]:
    place = id(t.pool_handle or t.buffer) if t.array is None else t.array.__array_interface__["data"][0]
    return place, t.shape, t.dtype


class OnnxGraph:
    """An ONNX graph that is built node by node from the calls of a trace."""

    def __init__(self, run: Trace, state: Mapping[str, Tensor], input_names: Sequence[str], output_names: Sequence[str]):
        self.run, self.nodes = run, list[Any]()
        self._taken = {*state, *input_names, *output_names}
        self._constants: dict[Name, np.ndarray] = {}
        self._names: dict[Any, Name] = {}  # of tensors, by id and by storage
        self._small: dict[tuple[str, bytes, tuple[int, ...]], Name] = {}
        self._numbers: Counter[str] = Counter()
        self._state = {key: name for name, tensor in state.items() for key in (id(tensor), _storage_key(tensor))}
        self._others = _twin_tensors(run)
        self._batch: Name | None = None
        for tensor, name in zip(run.inputs, input_names, strict=True):
            self.bind(tensor, Name(name, tensor.dtype))

    def bind(self, tensor: Tensor, name: Name) -> None:
        """Set the name of a tensor of the trace."""
        self._names[id(tensor)] = self._names[_storage_key(tensor)] = name

    def fresh(self, kind: str) -> str:
        """Return an unused name that starts with ``kind``."""
        while (name := f"{kind}_{self._numbers[kind]}") in self._taken:
            self._numbers[kind] += 1
        self._numbers[kind] += 1
        return name

    def value(self, x: Any, dtype: str | None = None) -> Name:
        """Return the name of a tensor or constant, cast to ``dtype``; by default, Python integers are int64 and floats float32."""
        if isinstance(x, Tensor):
            x = self._names.get(id(x)) or self._names.get(_storage_key(x)) or self._constant_tensor(x)
        elif not isinstance(x, Name):
            array = np.asarray(x)
            kind = dtype or (array.dtype.name if isinstance(x, np.ndarray) else "int64" if array.dtype.kind in "iu" else "float32")
            x = self.constant(array.astype(tree.bfloat16() if kind == "bfloat16" else dtypes.DTYPES[kind].storage))
        return self.cast(x, dtype or x.dtype)

    def truth(self, x: Any) -> Name:
        """Return the name of ``x`` converted to bool: true where it is not zero."""
        if not isinstance(x, Name | Tensor):
            return self.constant(np.asarray(x, bool))
        name = self.value(x)
        if name.dtype == "bool":
            return name
        dtype = "int32" if name.dtype == "uint8" else name.dtype
        return self.node("Not", [self.node("Equal", [name, 0], dtype)], "bool")

    def _constant_tensor(self, x: Tensor) -> Name:
        """Return the name of a weight or constant; a constant must have the same values in both traced runs.

        If all its elements are equal, its shape may depend on the batch.
        """
        state = self._state.get(id(x)) or self._state.get(_storage_key(x))
        other = self._others.get(id(x))
        same = state is not None or x is other
        if not same and other is not None and (x.ndim, x.dtype) == (other.ndim, other.dtype):
            mine, its = tree.host_bits(x), tree.host_bits(other)
            same = np.array_equal(mine, its)
            if x.shape != other.shape and mine.size and (mine == mine.flat[0]).all() and (its == mine.flat[0]).all():
                call = Call(lookup_op("expand"), {}, {}, (x,), other=Call(lookup_op("expand"), {}, {}, (other,)))
                value = self.constant(tree.from_bits(mine.reshape(-1)[:1], x.dtype))
                self._names[id(x)] = self.node("Expand", [value, self.sizes(call)], x.dtype)
                return self._names[id(x)]
        if not same:
            what = "a tensor that no op computes must have the same values in both traced runs"
            raise refusal(EXPORT, what, "compute it with ops, or pass dynamic_batch=False", shape=x.shape, dtype=x.dtype)
        name = self._names[id(x)] = Name(state or self.fresh("constant"), x.dtype)
        self._constants.setdefault(name, tree.host_bits(x))
        return name

    def constant(self, array: np.ndarray) -> Name:
        """Return the name of a constant; equal constants are stored once."""
        stored, dtype = tree.bits(array)
        key = (dtype, stored.tobytes(), stored.shape)
        if key not in self._small:
            name = self._small[key] = Name(self.fresh("constant"), dtype)
            self._constants[name] = stored
        return self._small[key]

    def node(self, kind: str, inputs: Sequence[Any], dtype: str, **attributes: Any) -> Name:
        """Add a node with one result; returns the name of the result."""
        return self.several(kind, inputs, 1, dtype, **attributes)[0]

    def several(self, kind: str, inputs: Sequence[Any], count: int, dtype: str, **attributes: Any) -> list[Name]:
        """Add a node with ``count`` results; returns their names.

        Inputs are names, tensors, numbers or ``None``; they are cast to the types that the operator's schema requires.
        ``dtype`` is the dtype of the results, or of the operands if the results are always bool or int64.
        """
        form = schema(kind, OPSET)
        result = form.outputs[0]
        names = []
        for i, x in enumerate(inputs):
            formal = form.inputs[min(i, len(form.inputs) - 1)]
            free = formal.variable == result.variable or result.types in _FIXED_TYPES
            names.append("" if x is None else self._operand(x, formal.types, free, dtype))
        while names and not names[-1]:
            names.pop()
        outs = [_FIXED_TYPES.get(form.outputs[min(i, len(form.outputs) - 1)].types, dtype) for i in range(count)]
        made = [Name(self.fresh(kind.lower()), out) for out in outs]
        given = {key: int(value) if isinstance(value, bool) else value for key, value in attributes.items() if value is not None}
        self.nodes.append(library().helper.make_node(kind, names, made, **given))
        return made

    def _operand(self, x: Any, types: frozenset[str], free: bool, dtype: str) -> Name:
        if types == {"tensor(bool)"}:
            return self.truth(x)
        if types <= _INDEX:
            return self.value(x, "int64")
        if free or isinstance(x, bool | int | float):
            return self.value(x, dtype)
        name = self.value(x)
        both_float = dtypes.DTYPES[name.dtype].is_float and dtypes.DTYPES[dtype].is_float and isinstance(x, Tensor | Name)
        return self.cast(name, dtype) if both_float else name

    def cast(self, name: Name, dtype: str) -> Name:
        """Return the name of the value cast to ``dtype``, after adding a ``Cast`` node if the dtype differs."""
        if name.dtype == dtype:
            return name
        made = Name(self.fresh("cast"), dtype)
        self.nodes.append(library().helper.make_node("Cast", [name], [made], to=ONNX_TYPES[dtype]))
        return made

    def sizes(self, call: Call, kept: Callable[[int], bool] = lambda axis: False) -> Name:
        """Return the name of a vector: the shape of a call's result, with 1 if ``kept(axis)``. A dynamic batch is read at run time."""
        mine, other = call.out.shape, call.other.out.shape
        parts, fixed = list[Name](), [1 if kept(axis) else n for axis, n in enumerate(mine)]
        for free, run in itertools.groupby(range(len(mine)), key=lambda axis: mine[axis] != other[axis] and not kept(axis)):
            axes = list(run)
            parts += [self._rows(mine[i], other[i], call) for i in axes] if free else [self.value([fixed[i] for i in axes])]
        if not parts:
            return self.constant(np.zeros(0, np.int64))
        return parts[0] if len(parts) == 1 else self.node("Concat", parts, "int64", axis=0)

    def _rows(self, mine: int, other: int, call: Call) -> Name:
        """Return the name of a size that is a multiple of the batch size; ``mine`` and ``other`` are its values in the two runs."""
        batched = self.run.batched
        batch = batched.shape[0]
        times, rest = divmod(mine, batch) if batch else (0, 1)
        if rest or other != times * (batch + 1):
            what = f"a size in {call.name} must be a multiple of the batch, or not depend on it"
            raise refusal(EXPORT, what, "pass dynamic_batch=False", sizes=(mine, other), batches=(batch, batch + 1))
        if self._batch is None:
            self._batch = self.node("Shape", [batched], batched.dtype, start=0, end=1)
        return self._batch if times == 1 else self.node("Mul", [self._batch, [times]], "int64")

    def stored(self) -> tuple[list[Any], list[Any]]:
        """Return initializers for the used weights, and nodes for the other used constants, so that a reader can tell them apart."""
        helper, used = library().helper, {name for node in self.nodes for name in node.input}
        weights, nodes = [], []
        for name, array in ((name, array) for name, array in self._constants.items() if name in used):
            data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
            tensor = helper.make_tensor(name, ONNX_TYPES[name.dtype], array.shape, data, raw=True)
            if name in self._state.values():
                weights.append(tensor)
            else:
                nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return weights, nodes


def _twin_tensors(run: Trace) -> dict[int, Tensor]:
    """Map the id of each call input and each output of the first run to the corresponding tensor of the second run."""
    found: dict[int, Tensor] = {}
    for call in run.calls:
        found |= {id(mine): other for mine, other in zip(call.tensors(), call.other.tensors(), strict=True)}
    if run.other is not None:
        found |= {id(mine): other for mine, other in zip(run.outputs, run.other.outputs, strict=True)}
    return found
