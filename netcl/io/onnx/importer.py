"""Import of ONNX files as modules that run the graph through netcl's ops, and can therefore be trained."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from netcl import nn
from netcl.core.device import require
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io import tree
from netcl.io.archive import refusal, regular_file
from netcl.io.onnx import windows  # noqa: F401 (adds its functions)
from netcl.io.onnx.imports import HOST, operators, reader
from netcl.io.onnx.library import attribute, dtype_of, library, numbers
from netcl.io.onnx.table import Node, entries_by_operator

IMPORT = "import_onnx"


def import_onnx(path: str | os.PathLike[str], device: Any = None) -> OnnxModel:
    """The model of an ONNX file, as a module on the active device or on ``device``.

    Its float weights are parameters under their names in the file, so an exported model keeps its state dict. A model with operators
    that are not supported raises ``FileError`` with the names of all of them.
    """
    onnx, undecodable = library(), importlib.import_module("google.protobuf.message").DecodeError
    try:
        model = onnx.ModelProto.FromString(Path(regular_file(path, IMPORT)).read_bytes())
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, undecodable, ValueError) as fault:
        raise refusal(IMPORT, "the file is damaged or not an ONNX model", reason=_first_line(fault), file=path) from fault
    _check_is_supported(onnx, model, path)
    with nn.parameter.placed(device):
        return OnnxModel(*_model_parts(onnx, model, path))


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def _check_is_supported(onnx: Any, model: Any, path: object) -> None:
    if not model.graph.node and not model.graph.output:
        raise refusal(IMPORT, "the file is damaged or not an ONNX model", file=path)
    known = operators()
    unknown = Counter(_op_kind(node) for node in model.graph.node if _op_kind(node) not in known)
    if unknown:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        remedy = f"known are {len(known)} of the standard ones"
        raise refusal(IMPORT, f"the model has operators that are not known: {names}", remedy, file=path)
    held = [*model.graph.initializer, *(attribute.t for node in model.graph.node for attribute in node.attribute)]
    outside = [t.name for t in held if t.data_location == onnx.TensorProto.EXTERNAL]
    if outside or model.graph.sparse_initializer:
        what = "weights are stored outside of the file" if outside else "sparse weights are not supported"
        raise refusal(
            IMPORT, what, "save the model with everything in one file", count=len(outside or model.graph.sparse_initializer), file=path
        )


def _op_kind(node: Any) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def _model_parts(onnx: Any, model: Any, path: object) -> tuple[list[Node], dict[str, np.ndarray], list[str], list[str]]:
    """Nodes, weights, names of inputs and of outputs."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    try:
        weights = {entry.name: numbers(onnx.numpy_helper.to_array(entry)) for entry in model.graph.initializer}
        attributes = [{entry.name: attribute(entry) for entry in node.attribute} for node in model.graph.node]
        nodes = [Node(_op_kind(n), [*n.input], [*n.output], a, opset) for n, a in zip(model.graph.node, attributes, strict=True)]
    except (ValueError, TypeError, KeyError) as fault:  # an element type that does not exist
        raise refusal(IMPORT, "a weight or attribute cannot be read", reason=_first_line(fault), file=path) from fault
    entries = entries_by_operator()
    for node in nodes:
        node.read = reader(node, entries.get(node.kind, []))
    for entry in model.graph.initializer:
        dtype_of(entry.data_type)
    inputs = [entry.name for entry in model.graph.input if entry.name not in weights]
    return nodes, weights, inputs, [entry.name for entry in model.graph.output]


class OnnxModel(nn.Module):
    """The graph of an ONNX file. Call it with one tensor or array per input; several outputs come as a tuple.

    Its weights are saved as any module's are (``save_params``, ``save_safetensors``, ``save_checkpoint``), the whole of it by
    ``export_onnx``.
    """

    saved_by = "write it with export_onnx(model, path, x), or its weights with save_params, save_safetensors or save_checkpoint"

    def __init__(self, nodes: list[Node], weights: Mapping[str, np.ndarray], inputs: list[str], outputs: list[str]):
        super().__init__()
        self.nodes, self.input_names, self.output_names = [node for node in nodes if node.kind != "Constant"], inputs, outputs
        self._host = require("cpu").queue
        self._values: dict[str, Tensor] = {}
        statistics = {name for node in nodes if node.kind == "BatchNormalization" for name in node.inputs[3:5]}
        for name, array in weights.items():
            self._values[name] = self._kept(name, array, learned=name not in statistics)
        for node in nodes:
            if node.kind == "Constant":
                self._values[node.outputs[0]] = self._run(node, [])[0]
        self._constants = {id(x) for x in self._values.values()}
        self._last = {name: i for i, node in enumerate(self.nodes) for name in node.inputs if name not in self._values}
        self._moved: dict[tuple[int, int], Tensor] = {}

    def _made_with(self, arguments: Mapping[str, Any]) -> None:
        super()._made_with({})  # the weights are on the device: no second copy of them on the host

    def extra_repr(self) -> str:
        return f"nodes={len(self.nodes)}, inputs={self.input_names}, outputs={self.output_names}"

    def _kept(self, name: str, array: np.ndarray, learned: bool) -> Tensor:
        """Weights are parameters, statistics buffers; numbers that say sizes and places stay on the host."""
        stored, dtype = tree.bits(array)
        if array.dtype.kind in "biu" or array.ndim == 0:
            return tree.tensor_of(stored, dtype, self._host)
        tensor = tree.tensor_of(stored, dtype, nn.parameter.here())
        tensor.requires_grad, tensor.persistent = learned, True
        owner, last = self._owner(name)
        if learned:
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor)
        return tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a weight: ``layer.0.weight`` is ``weight`` of module ``0`` of module ``layer``."""
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            child = module.__dict__.get(part)
            if not part or (child is None and hasattr(module, part)) or (child is not None and not isinstance(child, nn.Module)):
                return self, f"weight_{len(self._values)}"
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        return (module, last) if last and not hasattr(module, last) else (self, f"weight_{len(self._values)}")

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        if len(inputs) != len(self.input_names):
            raise ValueError(message(IMPORT, f"the model takes {len(self.input_names)} inputs", names=self.input_names, given=len(inputs)))
        values = {**self._values, **{name: self._input(x) for name, x in zip(self.input_names, inputs, strict=True)}}
        for i, node in enumerate(self.nodes):
            results = self._run(node, [values[name] if name else None for name in node.inputs])
            values.update({name: x for name, x in zip(node.outputs, results, strict=False) if name})
            for name in {name for name in node.inputs if self._last.get(name) == i} - set(self.output_names):
                values.pop(name, None)
        made = [self._input(values[name]) for name in self.output_names]
        return made[0] if len(made) == 1 else tuple(made)

    def _input(self, x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else Tensor.from_host(self.queue, np.asarray(x))
        return x.to(self.queue) if x.queue is self._host and self.queue is not self._host else x

    def _run(self, node: Node, given: list[Tensor | None]) -> list[Tensor]:
        pairs = list(zip_longest(given, node.formals))
        queue = next((x.queue for x, name in pairs if x is not None and name not in HOST and x.queue is not self._host), self._host)
        arguments: list[Any] = []
        for x, name in pairs:
            if name in HOST:  # an attribute in older opsets
                arguments.append(node[str(name)] if x is None else x.to_host().tolist())
            else:
                arguments.append(None if x is None else self._on(queue, x))
        while arguments and arguments[-1] is None:
            arguments.pop()
        made = node.read(node, *arguments)
        results = made if isinstance(made, tuple | list) else [made]
        if any(node.outputs[len(results) :]):
            raise node.fault(f"only the first {len(results)} outputs are supported", outputs=node.outputs)
        return [x if isinstance(x, Tensor) else tree.tensor_of(*tree.bits(x), self._host) for x in results]

    def _on(self, queue: Any, x: Tensor) -> Tensor:
        """A value where the others are; constants are moved once."""
        if x.queue is queue:
            return x
        if id(x) not in self._constants:
            return x.to(queue)
        key = (id(x), id(queue))
        if key not in self._moved:
            self._moved[key] = x.to(queue)
        return self._moved[key]
