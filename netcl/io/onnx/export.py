"""Export of models to ONNX files, by tracing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io import archive
from netcl.io.archive import refusal
from netcl.io.onnx import windows  # noqa: F401 (adds its functions)
from netcl.io.onnx.decompositions import DECOMPOSITIONS
from netcl.io.onnx.exports import EXPORTS, emit
from netcl.io.onnx.graph import OnnxGraph
from netcl.io.onnx.library import IR_VERSION, ONNX_TYPES, OPSET, library
from netcl.io.onnx.table import STRUCTURED
from netcl.io.onnx.trace import EXPORT, Trace, Unsupported, trace

log = logging.getLogger("netcl")


def export_onnx(
    model: Callable[..., Any], path: str | os.PathLike[str], *samples: Any, input_names: Sequence[str] = (),
    output_names: Sequence[str] = (), dynamic_batch: bool = False, check: bool = True,
) -> None:  # fmt: skip
    """Write a model, or any function of tensors, as an ONNX file.

    - **samples**: one example (tensor, array, or tuple of them) per argument, with the shape and dtype of the input.
    - **input_names, output_names**: names of inputs and outputs; by default ``input``, ``input_1``.. and ``output``, ``output_1``..
    - **dynamic_batch**: leave the size of the first dimension of all inputs open.
    - **check**: compare with onnxruntime on the samples if it is installed; a warning is logged if onnxruntime lacks an operator.

    The model runs in evaluation mode and its ops are recorded, so only the Python branches that the samples take are exported. A model
    with ops that ONNX cannot express raises ``FileError`` with their names.
    """
    onnx = library()
    if not samples:
        raise refusal(EXPORT, "a sample of every input must be given", "pass one array or tensor per input")
    run = trace(model, samples, dynamic_batch, {*EXPORTS, *STRUCTURED}, DECOMPOSITIONS)
    owner: Any = model
    state = {**dict(owner.named_parameters()), **dict(owner.named_buffers())} if hasattr(owner, "named_parameters") else {}
    inputs = _tensor_names("input", run.inputs, input_names, state)
    outputs = _tensor_names("output", run.outputs, output_names, {*state, *inputs})
    graph = OnnxGraph(run, state, inputs, outputs)
    _emit(graph, run)
    made = _proto(onnx, graph, run, outputs)
    try:
        onnx.checker.check_model(made, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as fault:
        raise refusal(EXPORT, "the exported graph must be valid ONNX", reason=str(fault)) from fault
    if check and importlib.util.find_spec("onnxruntime"):
        _compare_runs(made, run)
    with archive.replacing(path) as file:
        file.write(made.SerializeToString())


def _tensor_names(kind: str, tensors: Sequence[Tensor], given: Sequence[str], taken: Container[str]) -> list[str]:
    """Name each input or output. No name is in ``taken``, because ONNX takes a weight named like an input as that input's default."""
    names = list(given) or [kind if i == 0 else f"{kind}_{i}" for i in range(len(tensors))]
    if len(names) != len(tensors) or len(set(names)) != len(names):
        raise refusal(EXPORT, f"there must be one name per {kind}, each different", names=names, count=len(tensors))
    clash = [name for name in names if name in taken]
    if clash and given:
        others = "a weight" if kind == "input" else "a weight or an input"
        raise refusal(EXPORT, f"the name of an {kind} must not be that of {others}", names=clash)
    return [f"model_{name}" if name in taken else name for name in names]


def _emit(graph: OnnxGraph, run: Trace) -> None:
    """Add the nodes of all calls, or raise with the names of ops that cannot be exported."""
    missing = Counter(run.unknown)
    if not +missing:
        for call in run.calls:
            try:
                emit(graph, call)
            except Unsupported as fault:
                missing[f"{fault} in {call.within}" if call.within else str(fault)] += 1
                for out in call.outputs:  # so that the remaining ops are checked as well
                    graph.bind(out, graph.constant(np.zeros(1, np.float32)))
    if names := sorted(+missing):
        what = f"the model has ops that cannot be exported: {', '.join(names)}"
        raise refusal(EXPORT, what, "write them with other ops", count=len(names))


def _proto(onnx: Any, graph: OnnxGraph, run: Trace, outputs: Sequence[str]) -> Any:
    helper = onnx.helper
    made = [graph.value(out) for out in run.outputs]
    for name, output in zip(made, outputs, strict=True):
        graph.nodes.append(helper.make_node("Identity", [name], [output]))

    def info(name: str, tensor: Tensor, other: Tensor) -> Any:
        pairs = zip(tensor.shape, other.shape, strict=True)
        shape = [n if n == m else "batch" if (n, m) == batch else None for n, m in pairs]
        return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], shape)

    assert run.other is not None
    batch = tuple(n for one in (run, run.other) for n in one.batched.shape[:1])
    inputs = [info(str(graph.value(x)), x, y) for x, y in zip(run.inputs, run.other.inputs, strict=True)]
    results = [info(name, x, y) for name, x, y in zip(outputs, run.outputs, run.other.outputs, strict=True)]
    weights, constants = graph.stored()
    body = helper.make_graph([*constants, *graph.nodes], "netcl", inputs, results, weights)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(body, producer_name="netcl", opset_imports=opsets, ir_version=IR_VERSION)


def _compare_runs(made: Any, run: Trace) -> None:
    """Raise unless onnxruntime reproduces the results of both traced runs; only warn if it lacks an operator."""
    runtime = importlib.import_module("onnxruntime")
    errors, quiet = runtime.capi.onnxruntime_pybind11_state, runtime.SessionOptions()
    quiet.log_severity_level = 3
    try:
        session = runtime.InferenceSession(made.SerializeToString(), quiet, providers=["CPUExecutionProvider"])
    except errors.NotImplemented as missing:  # bfloat16, for instance; the graph is valid all the same
        log.warning("%s", message(EXPORT, "the file could not be compared: onnxruntime cannot run it", reason=missing))
        return
    assert run.other is not None
    for one in (run, run.other):
        feeds = {entry.name: x.to_host() for entry, x in zip(session.get_inputs(), one.inputs, strict=True)}
        try:
            results = session.run(None, feeds)
        except (errors.Fail, errors.InvalidArgument, errors.RuntimeException) as fault:
            raise refusal(EXPORT, "onnxruntime cannot run the graph", "check=False writes it unchecked", reason=str(fault)) from fault
        for index, (got, out) in enumerate(zip(results, one.outputs, strict=True)):
            wanted = out.to_host().astype(np.float64)
            scale = 1e-3 * max(1.0, np.abs(wanted).max(initial=0.0, where=np.isfinite(wanted)))
            if got.shape != wanted.shape or not np.allclose(got.astype(np.float64), wanted, rtol=0, atol=scale, equal_nan=True):
                error = np.abs(got.astype(np.float64) - wanted).max(initial=0.0) if got.shape == wanted.shape else math.nan
                what = "outputs of onnxruntime must have the same shape and differ by at most 1e-3 of the largest value (or of 1)"
                raise refusal(EXPORT, what, output=index, largest_difference=error, shape=got.shape, expected=wanted.shape)
