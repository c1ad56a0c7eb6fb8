"""Import of ONNX files as modules that run the graph mainly through netcl's ops; their float weights can be trained."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator, Mapping
from graphlib import TopologicalSorter
from itertools import zip_longest
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np

from netcl import nn
from netcl.core.device import require
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.io import tree
from netcl.io.archive import FileError, refusal, regular_file
from netcl.io.onnx import control, numeric, quantized, recurrent, selection, windows  # noqa: F401 (add their functions)
from netcl.io.onnx.bodies import IMPORT, GraphBody, GraphReader, declared
from netcl.io.onnx.imports import CONTROL, HOST, ON_DEVICE, TensorSequence, operators
from netcl.io.onnx.library import NARROW, ONNX_TYPES, library, numbers
from netcl.io.onnx.table import OnnxNode


def import_onnx(path: str | os.PathLike[str] | bytes, device: Any = None) -> OnnxModel:
    """Return the model in an ONNX file, or in its bytes, as a module on the active device or on ``device``.

    Float weights become parameters, and running statistics become buffers. They keep their names if these are free. Scalars, integers
    and the results of ``Constant`` nodes stay constants. A model with unsupported operators raises ``FileError`` with their names.
    """
    _, body, inputs = read_onnx(path)
    with nn.parameter.placed(device):
        return OnnxModel(body, inputs)


def read_onnx(path: str | os.PathLike[str] | bytes) -> tuple[Any, GraphBody, dict[str, tuple[str, Any]]]:
    """Return the ``ModelProto`` of a file or of its bytes, its graph, and the dtype and shape of each input that is not a weight."""
    model, folder = parse_onnx(path)
    body = _read_model(library(), model, folder, "bytes" if isinstance(path, bytes) else path)
    return model, body, {entry.name: declared(entry) for entry in model.graph.input if entry.name in body.inputs}


def parse_onnx(path: str | os.PathLike[str] | bytes) -> tuple[Any, Path | None]:
    """Return the checked ``ModelProto`` of a file or of its bytes, and the folder of its weight files (``None`` for bytes)."""
    onnx, undecodable = library(), importlib.import_module("google.protobuf.message").DecodeError
    data, folder = path, None
    if isinstance(path, bytes):
        path = "bytes"
    else:
        data, folder = Path(regular_file(path, IMPORT)).read_bytes(), Path(path).parent
    try:
        model = onnx.ModelProto.FromString(data)
        outside = folder is not None and any(map(onnx.external_data_helper.uses_external_data, _held_tensors(model)))
        _sort_nodes(model.graph)
        onnx.checker.check_model(os.fspath(path) if outside else model)
    except (onnx.checker.ValidationError, undecodable, ValueError, RuntimeError) as fault:  # RuntimeError: of names that no file can have
        raise refusal(IMPORT, "the file must be a complete ONNX model", reason=_first_line(fault), file=path) from fault
    if not model.graph.node and not model.graph.output:
        raise refusal(IMPORT, "the file must be a complete ONNX model", file=path)
    return model, folder


def _sort_nodes(graph: Any) -> None:
    """Bring the nodes into an order in which they can run, as onnxruntime does: its converter to float16 appends nodes."""

    def reads(node: Any) -> Iterator[str]:
        yield from node.input
        for body in (body for entry in node.attribute for body in (entry.g, *entry.graphs)):
            yield from (entry.name for entry in body.output)
            for inner in body.node:
                yield from reads(inner)

    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    before = {i: [makers[name] for name in reads(node) if name in makers] for i, node in enumerate(graph.node)}
    if any(j >= i for i, others in before.items() for j in others):
        order = [graph.node[i] for i in TopologicalSorter(before).static_order()]
        del graph.node[:]
        graph.node.extend(order)


def _held_tensors(model: Any) -> Iterator[Any]:
    """Yield the tensors of a model: weights and attributes, also those of functions and of graphs inside nodes."""
    bodies = [model.graph, *model.functions]
    for body in bodies:  # which grows
        yield from getattr(body, "initializer", ())
        for entry in (entry for node in body.node for entry in node.attribute):
            yield from (entry.t, *entry.tensors)
            bodies += [graph for graph in (entry.g, *entry.graphs) if graph.node]


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def _read_model(onnx: Any, model: Any, folder: Path | None, path: str | os.PathLike[str]) -> GraphBody:
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}
    graphs = GraphReader(model.functions, folder)
    try:
        codes = [entry.type.tensor_type.elem_type for entry in (*model.graph.input, *model.graph.output)]
        codes += [entry.i for node in model.graph.node for entry in node.attribute if entry.name in ("to", "output_dtype")]
        if any(code in NARROW for code in (*codes, *(entry.data_type for entry in _held_tensors(model)))):  # dtypes do not show them
            model = onnx.shape_inference.infer_shapes(model)
        body = graphs.graph(model.graph, opsets)
    except FileError as fault:
        raise FileError(f"{fault}; file={path}") from fault
    except (ValueError, TypeError, KeyError, RecursionError, onnx.defs.SchemaError, onnx.shape_inference.InferenceError) as fault:
        raise refusal(IMPORT, "a weight or attribute cannot be read", reason=_first_line(fault), file=path) from fault
    if graphs.unknown:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(graphs.unknown.items()))
        remedy = f"replace them before the export; {len(operators())} operators are known"
        raise refusal(IMPORT, f"the model has operators that are not known: {names}", remedy, file=path)
    return body


class OnnxModel(nn.Module):
    """The graph of an ONNX file. Call it with one tensor or array per input; several outputs are returned as a tuple.

    ``export_onnx`` saves the model; ``save_params``, ``save_safetensors`` and ``save_checkpoint`` save its weights, as for any module.
    """

    on_host: Collection[str] = ()  # inputs that stay on the host; a session sets them
    saved_by = "write it with export_onnx(model, path, x), or its weights with save_params, save_safetensors or save_checkpoint"

    def __init__(self, body: GraphBody, inputs: Mapping[str, tuple[str, Any]]):
        super().__init__()
        self.body, self.nodes, self.input_names, self.output_names = body, body.nodes, list(inputs), body.outputs
        self._host, self._inputs, self._count = require("cpu").queue, inputs, 0
        self._constants: set[int] = set()
        self._moved: dict[tuple[int, int], Tensor] = {}
        self._places: list[tuple[nn.Module, str, GraphBody, str]] = []  # of parameters and buffers: owner, name, and where nodes read them
        self._weights: list[Tensor] = []
        self._keep_values(body)

    def _keep_values(self, body: GraphBody) -> None:
        """Convert the weights and constants of a body and its inner bodies to tensors; float weights become parameters or buffers."""
        statistics = {name for node in body.nodes if node.kind == "BatchNormalization" for name in node.inputs[3:5]}
        for name, array in body.weights.items():
            body.values[name] = self._kept(body, name, array, name not in statistics)
        self._constants |= {id(x) for x in body.values.values()}
        body.weights, body.kept = {}, True
        for node in body.nodes:
            for inner in node.attributes.values():
                if isinstance(inner, GraphBody):
                    self._keep_values(inner)

    def _made_with(self, arguments: Mapping[str, Any]) -> None:
        super()._made_with({})  # the weights are on the device: no second copy of them on the host

    def extra_repr(self) -> str:
        return f"nodes={len(self.nodes)}, inputs={self.input_names}, outputs={self.output_names}"

    def _kept(self, body: GraphBody, name: str, array: np.ndarray, learned: bool) -> Tensor:
        """Return a tensor of an array: on the host for constants, integers and scalars, else a parameter (if ``learned``) or a buffer."""
        stored, dtype = tree.bits(array)
        if name in body.constants or array.dtype.kind in "biu" or array.ndim == 0:
            return tree.tensor_of(stored, dtype, self._host)
        tensor = tree.tensor_of(stored, dtype, nn.parameter.here())
        tensor = nn.Parameter(tensor) if learned else tensor
        owner, last = self._owner(name)
        self._places.append((owner, last, body, name))
        (owner.register_parameter if learned else owner.register_buffer)(last, tensor)
        return tensor

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return module and attribute of a weight: ``a.0`` and ``weight`` for ``a.0.weight``; if taken, the model and ``weight_1``."""
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            child = module.__dict__.get(part)
            if not part or (child is None and hasattr(module, part)) or (child is not None and not isinstance(child, nn.Module)):
                return self, self._numbered()
            if child is None:
                child = nn.Module()
                module.add_module(part, child)
            module = child
        return (module, last) if last and not hasattr(module, last) else (self, self._numbered())

    def _numbered(self) -> str:
        self._count += 1
        return f"weight_{self._count}"

    def forward(self, *inputs: Any) -> Any:
        """Run the graph; several outputs are returned as a tuple."""
        if len(inputs) != len(self.input_names):
            raise ValueError(message(IMPORT, f"the model takes {len(self.input_names)} inputs, got {len(inputs)}", names=self.input_names))
        self.weights()
        values: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for (name, (dtype, shape)), x in zip(self._inputs.items(), inputs, strict=True):
            values[name] = x if name in self.on_host else self._input(x, dtype)
            if shape is not None:
                _check_shape(name, values[name].shape, shape, sizes)
        made = [self._input(x) for x in self._execute(self.body, values)]
        return made[0] if len(made) == 1 else tuple(made)

    def weights(self) -> list[Tensor]:
        """Return the parameters and buffers that nodes read. The list stays the same object until a tensor is replaced or a body added."""
        found: list[Any] = [owner.__dict__.get(last) for owner, last, _, _ in self._places]
        if len(found) == len(self._weights) and all(map(is_, found, self._weights)):
            return self._weights
        if removed := [place[3] for place, x in zip(self._places, found, strict=True) if not isinstance(x, Tensor)]:
            raise ValueError(message(IMPORT, "weights of the graph must not be removed", "assign a tensor instead", weights=removed))
        self._constants -= {id(body.values[name]) for _, _, body, name in self._places}
        self._moved.clear()  # ids of replaced tensors are used again
        for (_, _, body, name), tensor in zip(self._places, found, strict=True):
            body.values[name] = tensor
        self._weights = found
        return found

    def _on_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args  # arrays become tensors of the declared dtype in forward

    def _input(self, x: Any, dtype: str = "") -> Any:
        if x is None:
            return x
        if isinstance(x, list) and not dtype:  # no tensor is declared
            return TensorSequence(self._input(part) for part in x)
        if not isinstance(x, Tensor):
            x = Tensor.from_host(self.queue, numbers(np.asarray(x)), *([dtype] if dtype else []))
        return x.to(self.queue) if x.queue is self._host and self.queue is not self._host else x

    def _execute(self, body: GraphBody, given: Mapping[str, Any]) -> list[Any]:
        """Return the outputs of a body; ``given`` holds its inputs and the values it reads from the enclosing graph."""
        values = {**given, **body.values}
        for node, dead in zip(body.nodes, body.dead, strict=True):
            results = self._run(node, values)
            values.update({name: x for name, x in zip(node.outputs, results, strict=False) if name})
            for name in dead:
                values.pop(name, None)
        return [values.get(name) for name in body.outputs]  # a function may leave out optional ones

    def _run(self, node: OnnxNode, values: Mapping[str, Any]) -> list[Any]:
        given = [values[name] if name else None for name in node.inputs]
        if node.kind in CONTROL:

            def call(name: str, *inputs: Any) -> list[Any]:
                body = node[name]
                outer = {name: values[name] for name in body.captured}
                return self._execute(body, {**outer, **dict(zip(body.inputs, map(self._on_host, inputs), strict=True))})

            made = node.read(node, call, *given)
        else:
            try:
                made = node.read(node, *self._arguments(node, given))
            except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as fault:
                if str(fault).startswith("["):
                    raise
                raise node.fault(f"the node cannot be computed: {_first_line(fault)}") from fault
        results = made if isinstance(made, tuple | list) and not isinstance(made, TensorSequence) else [made]
        if made is NotImplemented or (any(node.outputs[len(results) :]) and node.expand is not None):
            return self._expanded(node, given)
        if any(node.outputs[len(results) :]):
            raise node.fault(f"a node must have at most {len(results)} outputs", outputs=node.outputs)
        return [self._on_host(x) for x in results]

    def _on_host(self, x: Any) -> Any:
        """Return an array as a tensor on the host; tensors, sequences and ``None`` are returned unchanged."""
        return x if isinstance(x, Tensor | TensorSequence | None) else tree.tensor_of(*tree.bits(numbers(np.asarray(x))), self._host)

    def _expanded(self, node: OnnxNode, given: list[Any]) -> list[Any]:
        """Return the results of a node, computed by the body of its function."""
        codes = [*node.codes, *[0] * len(given)]
        body = node.expand([(0, ()) if x is None else (codes[i] or ONNX_TYPES[x.dtype], x.shape) for i, x in enumerate(given)])
        if not body.kept:
            self._keep_values(body)
        return self._execute(body, dict(zip_longest(body.inputs, given[: len(body.inputs)])))

    def _arguments(self, node: OnnxNode, given: list[Any]) -> list[Any]:
        pairs = list(zip_longest(given, node.formals))
        host = HOST if node.kind not in ON_DEVICE else {}
        places = (x.queue for x, name in pairs if isinstance(x, Tensor) and name not in host)
        queue = next((queue for queue in places if queue is not self._host), self._host)
        arguments: list[Any] = []
        for x, name in pairs:
            if name in host:  # an attribute in older opsets
                arguments.append(node[str(name)] if x is None else (np.atleast_1d(x.to_host()) if name == "axes" else x.to_host()).tolist())
            else:
                arguments.append(None if x is None else self._on(queue, x))
        while arguments and arguments[-1] is None:
            arguments.pop()
        return arguments

    def _on(self, queue: Any, x: Any) -> Any:
        """Return a value on ``queue``; moved constants are cached."""
        if not isinstance(x, Tensor) or x.queue is queue:
            return x
        if id(x) not in self._constants:
            return x.to(queue)
        key = (id(x), id(queue))
        if key not in self._moved:
            self._moved[key] = x.to(queue)
        return self._moved[key]


def _check_shape(name: str, shape: tuple[int, ...], wanted: Any, sizes: dict[str, int]) -> None:
    """Raise unless ``shape`` matches the declared shape ``wanted``; ``sizes`` collects the sizes of named dimensions in this call."""
    fits = len(shape) == len(wanted)
    for n, size in zip(shape, wanted, strict=fits) if fits else ():
        fits = fits and n == (n if size is None else sizes.setdefault(size, n) if isinstance(size, str) else size)
    if not fits:
        text = ", ".join("?" if size is None else str(size) for size in wanted)
        raise ShapeError(message(IMPORT, f"input {name!r} must have shape ({text}), got {shape}", dimensions=sizes))
