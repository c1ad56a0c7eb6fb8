"""``InferenceSession``: an ONNX file on a device, with an interface like that of onnxruntime's class.

On OpenCL, the first run with a set of input shapes is eager, the second is recorded, and later runs are replayed. Models that cannot be
recorded, such as models with control flow over computed values, stay eager. Control flow over an input number gets a recording per value.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import netcl.autograd as ag
from netcl import nn
from netcl.core.device import CPUQueue, manager, require
from netcl.core.errors import DtypeError, message
from netcl.core.tensor import Tensor
from netcl.engine.lazy_graph import fusing
from netcl.io.onnx.bodies import declared
from netcl.io.onnx.importer import OnnxModel, read_onnx
from netcl.io.onnx.library import library, numbers
from netcl.io.onnx.table import OnnxNode
from netcl.onnx.rewrites import rewritten
from netcl.replay.compiled import CaptureError, capture_graph
from netcl.replay.fold_constants import KeptValues
from netcl.replay.graph import Graph

SESSION = "InferenceSession"
_ON_OPENCL, _ON_NUMPY = "OpenCLExecutionProvider", "CPUExecutionProvider"
MOST_SHAPES = 16  # sets of input shapes whose recordings are kept; the one that was used longest ago goes first
_CHOICES = ("bool", "int8", "int16", "int32", "int64", "uint8")  # dtypes of inputs that may choose a branch
_THREADS = "the OpenCL runtime owns the threads (PoCL: POCL_MAX_PTHREAD_COUNT)"
#: Options of onnxruntime: the default, and the reason why there is no other value here.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "graph_optimization_level": (99, ""),
    "enable_mem_pattern": (True, ""),
    "enable_cpu_mem_arena": (True, "memory is always pooled"),
    "enable_profiling": (False, "`netcl onnx bench FILE` prints the time per node, `netcl trace` that of kernels"),
    "execution_mode": (0, "nodes run in order"),
    "inter_op_num_threads": (0, _THREADS),
    "intra_op_num_threads": (0, _THREADS),
    "log_severity_level": (-1, "use logging.getLogger('netcl')"),
    "optimized_model_filepath": ("", "rewritten graphs are not written to files"),
}
_LEVELS = {"ORT_DISABLE_ALL": 0, "ORT_ENABLE_BASIC": 1, "ORT_ENABLE_EXTENDED": 2, "ORT_ENABLE_LAYOUT": 3, "ORT_ENABLE_ALL": 99}
GraphOptimizationLevel = IntEnum("GraphOptimizationLevel", _LEVELS)  # type: ignore[misc]
GraphOptimizationLevel.__doc__ = "``ORT_DISABLE_ALL`` runs the graph of the file unchanged; all other levels fold constants and fuse nodes."


class SessionOptions:
    """Session options: ``graph_optimization_level`` for rewrites, ``enable_mem_pattern`` for replay. Others must keep their defaults."""

    graph_optimization_level: int
    enable_mem_pattern: bool
    free_dimensions: dict[str, int]

    def __init__(self) -> None:
        vars(self).update({name: value for name, (value, _) in _OPTIONS.items()}, free_dimensions={})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OPTIONS:
            raise AttributeError(message("SessionOptions", "unknown option", f"known: {', '.join(_OPTIONS)}", option=name))
        value, (default, reason) = getattr(value, "value", value), _OPTIONS[name]  # of an enumeration, onnxruntime's too
        if reason and value != default:
            raise ValueError(message("SessionOptions", f"{name} must have its default value {default!r}", reason, given=value))
        vars(self)[name] = value

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fix the size of a symbolic dimension of the inputs."""
        self.free_dimensions[name] = int(size)


def get_available_providers() -> list[str]:
    """Return the providers of this machine: OpenCL if the default device is one, then NumPy on the CPU."""
    device = manager.default("auto")
    return [_ON_NUMPY] if device is None or isinstance(device.queue, CPUQueue) else [_ON_OPENCL, _ON_NUMPY]


class NodeArg(NamedTuple):
    """An input or output: its type as onnxruntime writes it, its shape (numbers, names, ``None``; empty if unknown), NumPy's dtype."""

    name: str
    type: str
    shape: list[int | str | None]
    dtype: Any


def node_arg(entry: Any) -> NodeArg:
    """Return the name, type, shape and dtype that a ``ValueInfoProto`` declares."""
    optional = entry.type.HasField("optional_type")
    kind = entry.type.optional_type.elem_type if optional else entry.type
    plain = kind.HasField("tensor_type")
    code = (kind if plain else kind.sequence_type.elem_type).tensor_type.elem_type
    text = f"tensor({library().TensorProto.DataType.Name(code).lower()})"
    text = text if plain else f"seq({text})"
    dtype = library().helper.tensor_dtype_to_np_dtype(code) if plain else None
    return NodeArg(entry.name, f"optional({text})" if optional else text, declared(entry)[1] or [], dtype)


class SessionModel(OnnxModel):
    """The module of a session. If ``timings`` is a list, a run appends each node of the graph and its time in seconds."""

    timings: list[tuple[OnnxNode, float]] | None = None

    def _run(self, node: OnnxNode, values: Mapping[str, Any]) -> list[Any]:
        if self.timings is None:
            return super()._run(node, values)
        timings, self.timings, start = self.timings, None, time.perf_counter()  # nodes of bodies inside count for this one
        made = super()._run(node, values)
        _ = [x.realize() for x in made if isinstance(x, Tensor)]
        self.queue.finish()
        timings.append((node, time.perf_counter() - start))
        self.timings = timings
        return made


class InferenceSession:
    """A model in an ONNX file, or in bytes, ready to run.

    ``device`` is a selector as in ``netcl devices``; ``"auto"`` is NumPy if ``providers`` begins with ``CPUExecutionProvider``. Threads may
    share a session: runs take turns. A write to a weight takes effect in runs that start after the write. ``rewrites`` counts the rewrites
    by name, ``model`` is the module.
    """

    def __init__(
        self, path_or_bytes: str | Path | bytes, sess_options: SessionOptions | None = None, providers: Any = None, *, device: Any = "auto"
    ):
        if not isinstance(sess_options, SessionOptions | None):
            raise TypeError(message(SESSION, "sess_options must be netcl.onnx.SessionOptions", given=type(sess_options).__name__))
        if unknown := [name for name in providers or () if name not in (_ON_OPENCL, _ON_NUMPY)]:
            remedy = f"{_ON_OPENCL} reaches GPUs and CPUs through OpenCL, device= selects one of them; {_ON_NUMPY} is NumPy"
            raise ValueError(message(SESSION, f"providers must be {_ON_OPENCL} or {_ON_NUMPY}", remedy, providers=unknown))
        self._options = sess_options or SessionOptions()
        proto, body, inputs = read_onnx(path_or_bytes)
        sizes = self._options.free_dimensions
        known = {size for _, shape in inputs.values() for size in shape or () if isinstance(size, str)}
        if absent := sizes.keys() - known:
            what = "an overridden dimension must be a symbolic dimension of the inputs"
            raise ValueError(message(SESSION, what, dimensions=sorted(absent), known=sorted(known)))
        inputs = {name: (dtype, shape and [sizes.get(size, size) for size in shape]) for name, (dtype, shape) in inputs.items()}
        entries = [node_arg(entry) for entry in proto.graph.input if entry.name in inputs]
        self._inputs = {entry.name: entry._replace(shape=inputs[entry.name][1] or []) for entry in entries}
        self._outputs = {entry.name: node_arg(entry) for entry in proto.graph.output}
        body, self.rewrites = rewritten(body) if self._options.graph_optimization_level else (body, Counter())
        handle = require("cpu" if device == "auto" and [*(providers or ())][:1] == [_ON_NUMPY] else device, op=SESSION)
        with nn.parameter.placed(handle):
            self.model = SessionModel(body, inputs).eval()
        self._queue, self._eager = handle.queue, not self._options.enable_mem_pattern or isinstance(handle.queue, CPUQueue)
        self._stored = {name: numbers(np.empty(0, entry.dtype)).dtype.name for name, entry in self._inputs.items() if entry.dtype}
        self._plans: OrderedDict[Any, Graph | str] = OrderedDict()
        self._kept, self._leases = KeptValues(), list[Any]()
        self._lock = threading.Lock()

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs that a run needs, in the order of the file."""
        return list(self._inputs.values())

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs, in the order of the file."""
        return list(self._outputs.values())

    def get_providers(self) -> list[str]:
        """Return a list with the one provider that runs the model."""
        return [_ON_NUMPY if isinstance(self.model.queue, CPUQueue) else _ON_OPENCL]

    @property
    def plans(self) -> dict[tuple[tuple[int, ...], ...], str]:
        """The mode of the next run, by input shapes of past runs: ``"replay"``, ``"record"``, or the reason why the run is eager."""
        return {tuple(shape for shape, *_ in key): "replay" if isinstance(x, Graph) else x or "record" for key, x in self._plans.items()}

    @property
    def commands(self) -> int:
        """The number of commands that a replay for the latest input shapes enqueues; 0 if they have no recording."""
        last = next(reversed(self._plans.values()), "")
        return last.commands if isinstance(last, Graph) else 0

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: None = None) -> list[Any]:
        """Run the model; returns the named outputs, or all of them, as arrays. A sequence is returned as a list of arrays.

        ``input_feed`` holds an array or a tensor for each input. Arrays must have the declared dtype; lists are converted.
        """
        if run_options is not None:
            raise ValueError(message(SESSION, "run_options must be None: a run has no options here", given=type(run_options).__name__))
        names = [self.output(name).name for name in output_names or self.model.output_names]
        with self._lock:
            made = self._executed(input_feed)
            return [self.array(name, made[name]) for name in names]

    def io_binding(self) -> IOBinding:
        """Return a binding of inputs and outputs to tensors on the device."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding) -> None:
        """Run on bound inputs; results stay on the device."""
        with self._lock, ag.no_grad():
            made = self._executed(iobinding.inputs)
            for name, target in iobinding.outputs.items():
                x = made[name]
                if target is not None and (target.shape, target.dtype) != (x.shape, x.dtype):
                    what = f"the tensor of output {name!r} must have shape {x.shape} and dtype {x.dtype}"
                    raise ValueError(message("IOBinding", what, given=f"{target.shape} {target.dtype}"))
                iobinding.results[name] = x if target is None else target.copy_(x)
                iobinding.results[name].realize()  # deferred values belong to a thread

    def node_times(self, input_feed: Mapping[str, Any]) -> list[tuple[OnnxNode, float]]:
        """Return each node of the graph and the seconds that it takes in an eager run; each node ends before the next starts."""
        with self._lock, ag.no_grad():
            tensors, found = self._tensors(input_feed), list[tuple[OnnxNode, float]]()
            self.model.timings = found
            self.model(*tensors)
            self.model.timings = None
        return found

    def output(self, name: str) -> NodeArg:
        """Return an output by its name; raises if there is none."""
        if name not in self._outputs:
            raise ValueError(message(SESSION, "the model has no such output", f"there are: {', '.join(self._outputs)}", output=repr(name)))
        return self._outputs[name]

    def tensor(self, name: str, x: Any) -> Any:
        """Check a value for the input ``name`` and return it as a tensor on that input's device; a sequence is returned as a list."""
        if name not in self._inputs:
            raise ValueError(message(SESSION, "the model has no such input", f"it takes: {', '.join(self._inputs)}", input=repr(name)))
        entry = self._inputs[name]
        if entry.dtype is None or (x is None and entry.type.startswith("optional")):  # a sequence, or no value
            return x and [part if isinstance(part, Tensor) else np.asarray(part) for part in x]
        held = self._stored[name]
        x = x if isinstance(x, Tensor) else np.asarray(x, None if hasattr(x, "dtype") else entry.dtype)
        wanted, convert = (held, "to") if isinstance(x, Tensor) else (entry.dtype, "astype")
        if x.dtype != wanted:
            what = f"input {name!r} must have dtype {wanted} ({entry.type}), got {x.dtype}"
            raise DtypeError(message(SESSION, what, f"convert it, for instance with x.{convert}('{wanted}')"))
        queue = require("cpu").queue if name in self.model.on_host else self._queue
        return x.to(queue) if isinstance(x, Tensor) else Tensor.from_host(queue, numbers(x), held)

    def array(self, name: str, x: Any) -> Any:
        """Return an output as an array of the declared dtype, a sequence as a list of arrays, and ``None`` unchanged."""
        if not isinstance(x, Tensor):
            return x if x is None else [part.to_host() for part in x]
        return x.to_host().astype(self._outputs[name].dtype or x.dtype, copy=False)

    def _tensors(self, feed: Mapping[str, Any]) -> list[Any]:
        if missing := self._inputs.keys() - feed.keys():
            raise ValueError(message(SESSION, "all inputs must be given", f"it takes: {', '.join(self._inputs)}", missing=sorted(missing)))
        made = {name: self.tensor(name, x) for name, x in feed.items()}
        return [made[name] for name in self._inputs]

    def _executed(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name, by replay if there is a recording for these shapes."""
        tensors = self._tensors(feed)
        with ag.no_grad():
            plan, given = self._plan(tensors), [x for x, name in zip(tensors, self._inputs, strict=True) if name not in self.model.on_host]
            made = plan.run(given) if isinstance(plan, Graph) and plan.meets(given) is None else self.model(*tensors)
        return dict(zip(self.model.output_names, made if isinstance(made, tuple) else (made,), strict=True))

    def _plan(self, tensors: Sequence[Any]) -> Graph | str:
        """Return the recording for these shapes, made at their second run, or the reason for none (empty: a later run may record)."""
        # Sequences, empty tensors, and one tensor for two inputs are not recorded.
        recordable = not self._eager and all(isinstance(x, Tensor) and x.size for x in tensors)
        if not recordable or len({id(x.realize()) for x in tensors}) < len(tensors):
            return ""
        leases = [x.lease for x in self.model.weights()]
        if leases != self._leases:  # a weight has other memory: recordings hold the old one, and results that depend on it
            self._plans.clear()
            self._kept, self._leases = KeptValues(), leases
        host = self.model.on_host
        named = list(zip(self._inputs, tensors, strict=True))
        key = tuple((x.shape, x.dtype, *([x.item()] if name in host else [])) for name, x in named)
        if self._plans.get(key) == "":
            try:
                with capture_graph(inputs=[x for name, x in named if name not in host], kept=self._kept) as graph, fusing():
                    graph.returns(self.model(*tensors))
                self._plans[key] = graph
            except CaptureError as fault:
                choices = {name for name, x in named if x.size == 1 and x.dtype in _CHOICES}
                if choices > {*host}:  # they may choose a branch or a size: their values are part of keys from here on
                    self.model.on_host = choices
                    del self._plans[key]
                    return ""
                self._plans[key] = str(fault)
        plan = self._plans.setdefault(key, "")
        self._plans.move_to_end(key)
        if len(self._plans) > MOST_SHAPES:
            self._plans.popitem(last=False)
        return plan


class IOBinding:
    """Inputs and outputs of a session as tensors. An output that is bound without a tensor is allocated at each run."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Tensor | None] = {}
        self.results: dict[str, Any] = {}

    def bind_input(self, name: str, value: Any) -> None:
        """Bind a tensor, or an array that is copied to the device now."""
        self.inputs[name] = self._session.tensor(name, value)

    bind_cpu_input = bind_input

    def bind_output(self, name: str, tensor: Tensor | None = None) -> None:
        """Keep an output on the device, in this tensor or in a new one."""
        self.outputs[self._session.output(name).name] = tensor

    def get_outputs(self) -> list[Any]:
        """Return the results of the last run, as tensors in the order of binding."""
        return list(self.results.values())

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return the results of the last run, as arrays in the order of binding."""
        return [self._session.array(name, x) for name, x in self.results.items()]
