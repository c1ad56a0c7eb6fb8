"""The graphs of an ONNX file as lists of nodes: the main graph, the bodies of control flow, and functions.

A function is an operator that is defined by a graph of other operators, in the model or in the standard. A standard operator that
netcl does not compute itself is replaced by its definition, if it has one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.io.archive import bad_name, refusal
from netcl.io.onnx.imports import operators, reader
from netcl.io.onnx.library import NARROW, attribute, definition, dtype_of, library, numbers
from netcl.io.onnx.table import OnnxNode, entries_by_operator

IMPORT = "import_onnx"
#: Types of which several share a byte: ONNX's number and the bits of an element.
_PACKED_BITS = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}


class GraphBody:
    """A graph or function body: nodes in order of execution, weights by name, names of inputs and outputs.

    ``captured`` names the values taken from the enclosing graph. ``dead[i]`` names the values not needed after node ``i``. ``forms``
    holds the declared dtype and shape of each output. ``values`` holds the weights and constants as tensors.
    """

    def __init__(self, nodes: list[OnnxNode], weights: dict[str, np.ndarray], inputs: list[str], outputs: list[str], forms: Any = ()):
        self.nodes, self.weights, self.inputs, self.outputs, self.forms = [], weights, inputs, outputs, forms
        self.values: dict[str, Tensor] = {}
        self.kept = False  # whether values holds the weights
        for node in nodes:
            if node.kind == "Constant":
                weights[node.outputs[0]] = np.asarray(node.read(node))
            else:
                self.nodes.append(node)
        self.constants = {node.outputs[0] for node in nodes if node.kind == "Constant"}
        last = {name: i for i, node in enumerate(self.nodes) for name in (*node.inputs, *node.captured())}
        known = {*weights, *inputs, *(name for node in nodes for name in node.outputs), ""}
        self.captured = {*last, *outputs} - known
        self.dead: list[list[str]] = [[] for _ in self.nodes]
        for name, i in last.items():
            if name not in weights and name not in outputs:
                self.dead[i].append(name)


def op_kind(node: Any) -> str:
    """Return the name of a node's operator, prefixed with its domain unless that is the standard one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


class GraphReader:
    """Reads the graphs of a model. ``unknown`` counts the operators that cannot be imported."""

    def __init__(self, functions: Iterable[Any] = (), folder: Path | None = None, tables: Any = None):
        self.functions = {(f.domain, f.name, f.overload): f for f in functions}
        self.folder, self.codes, self.unknown = folder, dict[str, int](), Counter[str]()
        self.tables = tables or (entries_by_operator(), operators())
        self._expanded: dict[Any, GraphBody | None] = {}

    def graph(self, proto: Any, opsets: Mapping[str, int], outer: Mapping[str, Any] | None = None) -> GraphBody:
        """Return the body of a graph; ``outer`` holds the attributes of the enclosing function, if there is one."""
        if proto.sparse_initializer:
            count = len(proto.sparse_initializer)
            raise refusal(IMPORT, "sparse weights are not supported", "save the model with dense weights", count=count)
        self.codes |= {entry.name: entry.data_type for entry in proto.initializer}
        tensors = [entry for entry in (*proto.input, *proto.value_info, *proto.output) if entry.type.HasField("tensor_type")]
        self.codes |= {entry.name: entry.type.tensor_type.elem_type for entry in tensors}
        weights = {entry.name: self.array(entry) for entry in proto.initializer}
        nodes = [node for entry in proto.node if (node := self.node(entry, opsets, outer or {}))]
        inputs = [entry.name for entry in proto.input if entry.name not in weights]
        return GraphBody(nodes, weights, inputs, [entry.name for entry in proto.output], [declared(entry) for entry in proto.output])

    def node(self, proto: Any, opsets: Mapping[str, int], outer: Mapping[str, Any]) -> OnnxNode | None:
        """Return a node, or ``None`` for an unknown operator. Operators that cannot be imported are counted in ``unknown``."""
        kind, domain = op_kind(proto), "" if proto.domain == "ai.onnx" else proto.domain
        opset = opsets.get(domain, 1)
        sources = {entry.name: outer.get(entry.ref_attr_name) if entry.ref_attr_name else entry for entry in proto.attribute}
        given = {name: entry for name, entry in sources.items() if entry is not None}
        local = self.functions.get((proto.domain, proto.op_type, proto.overload))
        standard = None if local else standard_function(kind, opset)
        if not local and kind not in self.tables[1] and standard is None:
            self.unknown[kind] += 1
            return None
        attributes = {name: self._value(entry, opsets, outer) for name, entry in given.items()}
        made = OnnxNode(kind, [*proto.input], [*proto.output], attributes, opset)
        made.codes = [self.codes.get(name, 0) for name in made.inputs]
        if local:
            body = self._function(local, given, made.codes)
            made.expand, made.read = lambda types: body, lambda *inputs: NotImplemented
            return made
        if standard is not None:
            made.expand = FunctionCall(standard, proto, given, opset, self.tables)
            if kind not in self.tables[1] and standard.has_function:
                made.expand([])
                self.unknown += made.expand.unknown
        made.read = reader(made, self.tables[0].get(kind, []))
        return made

    def _value(self, entry: Any, opsets: Mapping[str, int], outer: Mapping[str, Any]) -> Any:
        if entry.type == entry.GRAPH:
            return self.graph(entry.g, opsets, outer)
        if entry.type == entry.TENSOR:
            return self.array(entry.t)
        return attribute(entry)

    def _function(self, proto: Any, given: Mapping[str, Any], codes: Sequence[int]) -> GraphBody:
        """Return the cached body of a function for the attributes ``given`` and the element types ``codes`` of a call."""
        key = (proto.domain, proto.name, proto.overload, *codes, *(given[name].SerializeToString() for name in sorted(given)))
        if key not in self._expanded:
            self._expanded[key] = None
            self._expanded[key] = self.function(proto, given, codes)
        body = self._expanded[key]
        if body is None:
            raise refusal(IMPORT, "a function must not call itself", function=proto.name)
        return body

    def function(self, proto: Any, given: Mapping[str, Any], codes: Sequence[int]) -> GraphBody:
        """Build the body of a function from the attributes ``given`` of the calling node and the element types ``codes`` of its inputs."""
        outer = {**{entry.name: entry for entry in proto.attribute_proto}, **given}
        opsets = {entry.domain: entry.version for entry in proto.opset_import}
        around, self.codes = self.codes, dict(zip(proto.input, codes, strict=False))
        nodes = [node for entry in proto.node if (node := self.node(entry, opsets, outer))]
        self.codes = around
        return GraphBody(nodes, {}, [*proto.input], [*proto.output])

    def array(self, entry: Any) -> np.ndarray:
        """Return the values of a ``TensorProto``; external data is read from its file, memory-mapped where possible."""
        dtype_of(entry.data_type)
        if entry.data_location != entry.EXTERNAL:
            return numbers(library().numpy_helper.to_array(entry))
        place = {item.key: item.value for item in entry.external_data}
        location = place.get("location", "")
        if self.folder is None:
            what = "a model with external data must be given by its path"
            raise refusal(IMPORT, what, "pass the path instead of the bytes", weight=entry.name)
        path = self.folder / location
        kind = library().helper.tensor_dtype_to_np_dtype(entry.data_type)
        if len(place) < len(keys := [item.key for item in entry.external_data]):
            raise refusal(IMPORT, "keys of external data must be unique", weight=entry.name, keys=keys)
        if bad_name(location) or not path.is_file() or path.resolve().parent != path.parent.resolve() or path.is_symlink():
            what = "external data must be in a regular file in the folder of the model"
            raise refusal(IMPORT, what, weight=entry.name, location=location)
        start, size = int(place.get("offset", 0)), int(np.prod(entry.dims, dtype=object))
        wanted = -(-size * _PACKED_BITS.get(entry.data_type, 8 * kind.itemsize) // 8)
        if not 0 <= start <= start + wanted <= os.path.getsize(path) or int(place.get("length", wanted)) != wanted:
            what = f"external data must have {wanted} bytes and lie within its file of {os.path.getsize(path)} bytes"
            raise refusal(IMPORT, what, weight=entry.name, location=location, offset=start, length=place.get("length"))
        if entry.data_type not in _PACKED_BITS and size:
            return numbers(np.memmap(path, kind.newbyteorder("<"), "r", start, tuple(entry.dims)))
        raw = bytes(np.memmap(path, np.uint8, "r", start, (wanted,))) if wanted else b""
        packed = library().TensorProto(dims=entry.dims, data_type=entry.data_type, raw_data=raw)
        return numbers(library().numpy_helper.to_array(packed))


@cache
def standard_function(kind: str, opset: int) -> Any:
    """Return the schema of a tensor operator that ONNX defines as a function of other operators; ``None`` for any other operator."""
    domain, _, name = kind.rpartition("::")
    if not library().defs.has(name, domain):
        return None
    form = definition(kind, opset)
    if not (form.has_function or form.has_context_dependent_function):
        return None
    return form if all(kind.startswith("tensor(") for side in (form.inputs, form.outputs) for x in side for kind in x.types) else None


class FunctionCall:
    """A node whose operator ONNX defines as a function. A call returns the function body for given types of inputs."""

    def __init__(self, form: Any, proto: Any, given: Mapping[str, Any], opset: int, tables: Any):
        self.form, self.given, self.opset, self.tables, self.unknown = form, given, opset, tables, Counter[str]()
        self.proto = type(proto)(op_type=proto.op_type, domain=proto.domain, input=proto.input, output=proto.output)
        for name, entry in given.items():
            self.proto.attribute.add().CopyFrom(entry)
            self.proto.attribute[-1].name = name
        self.bodies: dict[Any, GraphBody] = {}

    def __call__(self, types: Sequence[tuple[int, tuple[int, ...]]]) -> GraphBody:
        """Return the body for inputs of these element types and shapes; an absent input has element type 0."""
        for sizes in (False, True):  # few definitions need to know sizes: one body serves all shapes of the others
            fixed = self.form.has_function  # only narrow types, which dtypes do not show, make a difference
            key = tuple(code * (code in NARROW) if fixed else (code, shape if sizes else len(shape)) for code, shape in types)
            if key not in self.bodies:
                defaults = {name: entry.default_value for name, entry in self.form.attributes.items() if entry.default_value.name}
                graphs = GraphReader(tables=self.tables)
                self.bodies[key] = graphs.function(self._proto(types, sizes), {**defaults, **self.given}, [code for code, _ in types])
                self.unknown = graphs.unknown
            if self.bodies[key].nodes:
                break
        if not self.form.has_function and (self.unknown or not self.bodies[key].nodes):
            what = "by operators that can be imported" if self.unknown else "for the types of its inputs"
            raise refusal(IMPORT, f"{self.form.name} must be defined {what}", operators=[*self.unknown], types=[*types])
        return self.bodies[key]

    def _proto(self, types: Sequence[tuple[int, tuple[int, ...]]], sizes: bool) -> Any:
        onnx, form = library(), self.form
        versions = form.function_opset_versions if form.has_function else form.context_dependent_function_opset_versions
        version = max((v for v in versions if v <= self.opset), default=versions[0])
        if form.has_function:
            return onnx.FunctionProto.FromString(form.get_function_with_opset_version(version))
        make = onnx.helper.make_tensor_type_proto
        given = [make(code, shape if sizes else [None] * len(shape)) if code else onnx.TypeProto() for code, shape in types]
        texts = self.proto.SerializeToString(), [entry.SerializeToString() for entry in given]
        data = form.get_context_dependent_function_with_opset_version(version, *texts)
        return onnx.FunctionProto.FromString(data)


def declared(entry: Any) -> tuple[str, list[int | str | None] | None]:
    """Return the declared dtype (empty if unknown) and shape (``None`` if unknown) of a value; sizes are numbers, names or ``None``."""
    kind = entry.type.tensor_type
    if not entry.type.HasField("tensor_type"):
        return "", None
    # Some exporters write -1 or "?" for sizes that are not fixed, the same for all of them.
    given = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim]
    sizes = [None if size in (-1, "?", "") else size for size in given]
    return dtype_of(kind.elem_type) if kind.elem_type else "", sizes if kind.HasField("shape") else None
