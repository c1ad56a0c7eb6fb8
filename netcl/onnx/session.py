"""``InferenceSession``: an ONNX file that runs on an OpenCL device, with the interface of onnxruntime's class.

The first run with a set of input shapes is eager. The second is recorded, later ones replay the recording on planned memory. A graph that
reads values on the host, as control flow does, stays eager.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.device import CPUQueue, require
from netcl.core.errors import DeviceError, DtypeError, message
from netcl.core.tensor import Tensor
from netcl.engine.lazy_graph import fusing
from netcl.io.onnx.bodies import declared
from netcl.io.onnx.importer import OnnxModel, declared_inputs, read_onnx
from netcl.io.onnx.library import library, numbers
from netcl.io.onnx.table import Node
from netcl.onnx.options import NUMPY, OPENCL, SESSION, GraphOptimizationLevel, SessionOptions, device_selector
from netcl.onnx.rewrites import rewritten
from netcl.replay.compiled import CaptureError, capture_graph
from netcl.replay.graph import Graph

MOST_PLANS = 16  # sets of input shapes whose recordings are kept; the one that was used longest ago goes first


class NodeArg(NamedTuple):
    """An input or output: its type as onnxruntime writes it, its shape (numbers, names, ``None``; empty if unknown), NumPy's dtype."""

    name: str
    type: str
    shape: list[int | str | None]
    dtype: Any


def node_arg(entry: Any) -> NodeArg:
    """What a ``ValueInfoProto`` declares."""
    kind, names = entry.type.tensor_type, library().TensorProto.DataType
    if entry.type.HasField("tensor_type"):
        dtype = library().helper.tensor_dtype_to_np_dtype(kind.elem_type) if kind.elem_type else None
        return NodeArg(entry.name, f"tensor({names.Name(kind.elem_type).lower()})", declared(entry)[1] or [], dtype)
    code = entry.type.sequence_type.elem_type.tensor_type.elem_type
    return NodeArg(entry.name, f"seq(tensor({names.Name(code).lower()}))", [], None)


class SessionModel(OnnxModel):
    """The module of a session. ``timings``, if it is a list, gets each node of the graph and the seconds that it ran."""

    timings: list[tuple[Node, float]] | None = None

    def _run(self, node: Node, values: Mapping[str, Any]) -> list[Any]:
        timings, self.timings, start = self.timings, None, time.perf_counter()  # nodes of bodies inside count for this one
        made = super()._run(node, values)
        if timings is not None:
            for x in made:
                x.realize() if isinstance(x, Tensor) else None
            self.queue.finish()
            timings.append((node, time.perf_counter() - start))
        self.timings = timings
        return made


class InferenceSession:
    """A model in an ONNX file, or in bytes, ready to run.

    ``device`` is a selector as in ``netcl devices``. ``providers`` may name ``"OpenCLExecutionProvider"`` and ``"CPUExecutionProvider"``
    (NumPy); the first counts where ``device`` is ``"auto"``. Threads may share a session: runs take turns. ``rewrites`` counts what was
    folded and fused, ``model`` is the module.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        *,
        device: Any = "auto",
    ):
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(message(SESSION, "sess_options must be netcl.onnx.SessionOptions", given=type(sess_options).__name__))
        self._options = sess_options or SessionOptions()
        proto, body = read_onnx(path_or_bytes)
        inputs = declared_inputs(proto, body)
        sizes = self._options.free_dimensions
        inputs = {name: (dtype, shape and [sizes.get(size, size) for size in shape]) for name, (dtype, shape) in inputs.items()}
        self._inputs = [node_arg(entry)._replace(shape=inputs[entry.name][1] or []) for entry in proto.graph.input if entry.name in inputs]
        self._outputs = [node_arg(entry) for entry in proto.graph.output]
        self.rewrites: dict[str, int] = {}
        if self._options.graph_optimization_level is not GraphOptimizationLevel.ORT_DISABLE_ALL:
            body, self.rewrites = rewritten(body)
        handle = require(device_selector(providers, device), op=SESSION)
        if isinstance(handle.queue, CPUQueue) and list(providers or ()) == [OPENCL]:
            raise DeviceError(message(SESSION, "there is no OpenCL device", f"add {NUMPY} to providers", device=handle.device_name))
        with nn.parameter.placed(handle):
            self.model = SessionModel(body, inputs).eval()
        self._plans: OrderedDict[Any, Graph | str] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"InferenceSession(inputs={self.model.input_names}, outputs={self.model.output_names}, providers={self.get_providers()})"

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that a run needs, in the order of the file."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the order of the file."""
        return list(self._outputs)

    def get_providers(self) -> list[str]:
        """The provider that runs the model."""
        return [NUMPY if isinstance(self.model.queue, CPUQueue) else OPENCL]

    @property
    def plans(self) -> dict[tuple[tuple[int, ...], ...], str]:
        """The input shapes that runs had, and the next run with them: ``"replay"``, ``"record"``, or the reason why it is eager."""
        return {tuple(shape for shape, _ in key): "replay" if isinstance(x, Graph) else x or "record" for key, x in self._plans.items()}

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: None = None) -> list[Any]:
        """The outputs with these names, or all of them, as arrays; a sequence is a list of arrays.

        ``input_feed`` holds an array or a tensor for each input. Arrays must have the declared dtype; lists are converted.
        """
        _refuse_run_options(run_options)
        places = self._places(output_names)
        with self._lock:
            made = self._executed(input_feed)
            return [self._array(self._outputs[i], made[i]) for i in places]

    def io_binding(self) -> IOBinding:
        """A binding of inputs and outputs to tensors on the device."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: None = None) -> None:
        """Run on bound inputs; results stay on the device."""
        _refuse_run_options(run_options)
        with self._lock, ag.no_grad():
            made = dict(zip(self.model.output_names, self._executed(iobinding.inputs), strict=True))
            iobinding.results = {name: _stored(made[name], target) for name, target in iobinding.outputs.items()}

    def node_times(self, input_feed: Mapping[str, Any]) -> list[tuple[Node, float]]:
        """Each node of the graph and the seconds that it takes in an eager run; the device finishes one before the next starts."""
        tensors = self._tensors(input_feed)
        with self._lock, ag.no_grad():
            found: list[tuple[Node, float]] = []
            self.model.timings = found
            self.model(*tensors)
            self.model.timings = None
        return found

    # ---- inputs and outputs

    def _places(self, names: Iterable[str] | None) -> list[int]:
        known = [entry.name for entry in self._outputs]
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise ValueError(message(SESSION, "the model has no such outputs", f"there are: {', '.join(known)}", outputs=unknown))
        return [known.index(name) for name in names] if names else list(range(len(known)))

    def _tensors(self, feed: Mapping[str, Any]) -> list[Any]:
        names = [entry.name for entry in self._inputs]
        missing, unknown = [name for name in names if name not in feed], [name for name in feed if name not in names]
        if missing or unknown:
            what = "inputs are missing" if missing else "the model has no such inputs"
            raise ValueError(message(SESSION, what, f"the model takes: {', '.join(names)}", inputs=missing or unknown))
        return [self._tensor(entry, feed[entry.name]) for entry in self._inputs]

    def _tensor(self, entry: NodeArg, x: Any) -> Any:
        if entry.dtype is None:  # a sequence
            return [part if isinstance(part, Tensor) else np.asarray(part) for part in x]
        held = numbers(np.empty(0, entry.dtype)).dtype.name
        x = x if isinstance(x, Tensor) else np.asarray(x, None if hasattr(x, "dtype") else entry.dtype)
        if x.dtype != (held if isinstance(x, Tensor) else entry.dtype):
            what = f"input {entry.name!r} must have dtype {entry.dtype.name} ({entry.type}), got {x.dtype}"
            raise DtypeError(message(SESSION, what, f"convert it, for instance with x.astype({entry.dtype.name!r})"))
        return x.to(self.model.queue) if isinstance(x, Tensor) else Tensor.from_host(self.model.queue, numbers(x), held)

    def _array(self, entry: NodeArg, x: Any) -> Any:
        if isinstance(x, Tensor):
            array = x.to_host()
            return array if entry.dtype is None or array.dtype == entry.dtype else array.astype(entry.dtype)
        return x if x is None else [part.to_host() for part in x]

    # ---- running it

    def _executed(self, feed: Mapping[str, Any]) -> list[Any]:
        """The outputs, by replay if there is a recording for these shapes."""
        tensors = self._tensors(feed)
        with ag.no_grad():
            plan = self._plan(tensors) if self._can_record(tensors) else None
            replayed = isinstance(plan, Graph) and plan.meets(tensors) is None
            made = plan.replay(tensors) if replayed else self.model(*tensors)  # type: ignore[union-attr]
        return list(made) if isinstance(made, tuple) else [made]

    def _plan(self, tensors: Sequence[Tensor]) -> Graph | str | None:
        """The recording for these shapes, made at their second run; the reason if there cannot be one."""
        key = tuple((x.shape, x.dtype) for x in tensors)
        if key not in self._plans:
            self._plans[key] = ""
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
            return None
        self._plans.move_to_end(key)
        if self._plans[key] == "":
            try:
                with capture_graph(inputs=tensors) as graph, fusing():
                    graph.returns(self.model(*tensors))
                self._plans[key] = graph
            except CaptureError as fault:
                self._plans[key] = str(fault)
        return self._plans[key]

    def _can_record(self, tensors: Sequence[Any]) -> bool:
        if not self._options.enable_mem_pattern or isinstance(self.model.queue, CPUQueue):
            return False
        plain = all(isinstance(x, Tensor) and math.prod(x.shape) for x in tensors)
        return plain and len({id(x.realize()) for x in tensors}) == len(tensors)


def _refuse_run_options(options: Any) -> None:
    if options is not None:
        raise ValueError(message(SESSION, "run_options must be None: a run has no options here", given=type(options).__name__))


def _stored(x: Any, target: Tensor | None) -> Any:
    """A result, in the tensor that is bound to it if there is one; computed, since deferred values belong to a thread."""
    if target is not None and (target.shape, target.dtype) != (x.shape, x.dtype):
        what = f"the tensor of an output must have shape {x.shape} and dtype {x.dtype}, got {target.shape} and {target.dtype}"
        raise ValueError(message("IOBinding", what))
    x = x if target is None else target.copy_(x)
    if isinstance(x, Tensor):
        x.realize()
    return x


class IOBinding:
    """Inputs and outputs of a session as tensors: what is bound stays on the device between runs.

    ``session.run_with_iobinding(binding)`` runs it. An output that is bound without a tensor is a new tensor at each run.
    """

    def __init__(self, session: InferenceSession):
        self._session = session
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Tensor | None] = {}
        self.results: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Copy an array to the device and bind it."""
        known = {entry.name: entry for entry in self._session.get_inputs()}
        if name not in known:
            raise ValueError(message("IOBinding", "the model has no such input", f"there are: {', '.join(known)}", input=repr(name)))
        self.inputs[name] = self._session._tensor(known[name], arr_on_cpu)

    def bind_input(self, name: str, tensor: Tensor) -> None:
        """Bind a tensor. Pointers are refused: OpenCL buffers have none."""
        if not isinstance(tensor, Tensor):
            raise TypeError(message("IOBinding", "bind_input takes a tensor", "bind_cpu_input takes arrays", given=type(tensor).__name__))
        self.inputs[name] = tensor

    def bind_output(self, name: str, tensor: Tensor | None = None) -> None:
        """Keep an output on the device, in this tensor or in a new one."""
        self._session._places([name])
        self.outputs[name] = tensor

    def get_outputs(self) -> list[Any]:
        """The results of the last run, as tensors in the order of binding."""
        return list(self.results.values())

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The results of the last run, as arrays in the order of binding."""
        entries = {entry.name: entry for entry in self._session.get_outputs()}
        return [self._session._array(entries[name], x) for name, x in self.results.items()]
