"""Session options and execution providers, under onnxruntime's names."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from netcl.core.device import CPUQueue, manager
from netcl.core.errors import message

SESSION = "InferenceSession"
OPENCL, NUMPY = "OpenCLExecutionProvider", "CPUExecutionProvider"


class GraphOptimizationLevel(IntEnum):
    """How far a graph is rewritten: ``ORT_DISABLE_ALL`` runs it as it is in the file, every other level folds and fuses."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


_THREADS = "the OpenCL runtime owns the threads (PoCL: POCL_MAX_PTHREAD_COUNT)"
#: Options of onnxruntime that can only have their defaults here: the default, and the reason.
_FIXED = {
    "enable_cpu_mem_arena": (True, "memory is always pooled"),
    "enable_mem_reuse": (True, "memory is always reused"),
    "enable_profiling": (False, "`netcl onnx bench FILE` prints the time per node, `netcl trace` that of kernels"),
    "execution_mode": (0, "nodes run in order"),
    "inter_op_num_threads": (0, _THREADS),
    "intra_op_num_threads": (0, _THREADS),
    "log_severity_level": (-1, "use logging.getLogger('netcl')"),
    "optimized_model_filepath": ("", "rewritten graphs are not written to files"),
    "use_deterministic_compute": (False, "kernels are not selected by it"),
}
_CHOSEN = ("graph_optimization_level", "enable_mem_pattern")


class SessionOptions:
    """Options of a session. Those of onnxruntime without a meaning here accept only their default value.

    ``graph_optimization_level`` turns rewrites of the graph off or on. ``enable_mem_pattern=False`` turns replay off: every run is eager.
    """

    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    enable_mem_pattern: bool = True

    free_dimensions: dict[str, int]

    def __init__(self) -> None:
        self.__dict__["free_dimensions"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        value = getattr(value, "value", value)  # of an enumeration, onnxruntime's too
        if name in _FIXED and value != _FIXED[name][0]:
            raise ValueError(message("SessionOptions", f"{name} must have its default value", _FIXED[name][1], given=value))
        if name not in _FIXED and name not in _CHOSEN:
            known = ", ".join((*_CHOSEN, "add_free_dimension_override_by_name", *_FIXED))
            raise AttributeError(message("SessionOptions", "there is no such option", f"there are: {known}", option=name))
        self.__dict__[name] = GraphOptimizationLevel(value) if name == _CHOSEN[0] else value

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fix the size of a symbolic dimension of the inputs."""
        self.free_dimensions[name] = int(size)


def get_available_providers() -> list[str]:
    """The providers of this machine, the fastest first: OpenCL if it has a device, and NumPy on the CPU."""
    device = manager.default("auto")
    return [NUMPY] if device is None or isinstance(device.queue, CPUQueue) else [OPENCL, NUMPY]


def device_selector(providers: Iterable[Any] | None, device: Any) -> Any:
    """The device that a list of providers selects: its first entry, if ``device`` is ``"auto"``."""
    names = [entry if isinstance(entry, str) else entry[0] for entry in providers or ()]
    for entry, name in zip(providers or (), names, strict=True):
        if name not in (OPENCL, NUMPY):
            remedy = f"{OPENCL} reaches GPUs and CPUs through OpenCL, device= selects one of them; {NUMPY} is NumPy"
            raise ValueError(message(SESSION, "there is no such provider", remedy, provider=repr(name)))
        if entry is not name and len(entry) > 1 and entry[1]:
            raise ValueError(message(SESSION, "providers take no options", "select a device with device=", options=entry[1]))
    return "cpu" if device == "auto" and names[:1] == [NUMPY] else device
