"""netcl: deep learning on any OpenCL device.

Names are resolved at first use, so that ``import netcl`` touches no driver and works without pyopencl.
"""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from netcl.core import dispatch
from netcl.runtime import cache as _cache  # noqa: F401, registers the disk cache with core's door to the driver

__version__ = "0.1.0"
__all__ = ["bias_add", "build_matmul_kernel", "conv2d", "device", "elementwise_binary", "matmul", "reduce_sum", "relu", "softmax",
           "synchronize"]  # fmt: skip

_AUTOGRAD = "matmul elementwise_binary relu bias_add reduce_sum softmax conv2d no_grad tensor kernel"
_SHORTCUTS = {
    **dict.fromkeys(_AUTOGRAD.split(), "netcl.autograd"),
    "build_matmul_kernel": "netcl.ops.matmul",
    "manual_seed": "netcl.ops.random",
    **dict.fromkeys(("save", "load"), "netcl.io"),
    **dict.fromkeys(("device", "synchronize"), "netcl.core.device"),
    **dict.fromkeys(("get_matmul_precision", "set_matmul_precision"), "netcl.core.kernel_selector"),
    "Tensor": "netcl.core.tensor",
    "KernelSpec": "netcl.core.kernels.primitives",
    **dict.fromkeys(("compile", "capture_graph"), "netcl.runtime.capture"),
    **dict.fromkeys(("zeros", "ones", "full", "arange"), "netcl.core.tensor:Tensor"),
    "dtype": "netcl.core.dtype",
}

#: Dtypes under torch's names; not kept as globals, which would hide Python's own ``bool``, ``float`` and ``int`` here.
_DTYPES = tuple("bool uint8 int32 int int64 long float16 half bfloat16 float32 float float64 double".split())
_PACKAGES = ("amp", "autograd", "data", "distributed", "io", "nn", "ops", "optim", "profiling", "trainer")

dispatch.load_with(lambda: importlib.import_module("netcl.autograd"))
# Measured choices are asked for at the first use of a shape; nothing is loaded before.
dispatch.fill("tuned_local_size", lambda *asked: importlib.import_module("netcl.profiling.local_sizes").tuned(*asked))
dispatch.fill("tuned_kernel", lambda problem: importlib.import_module("netcl.profiling.autotuner").tuned(problem))


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"netcl.{name}")
    if name in _DTYPES:
        return importlib.import_module("netcl.core.dtype").lookup(name).name
    if name not in _SHORTCUTS:
        raise AttributeError(f"module 'netcl' has no attribute {name!r}")
    module, _, inside = _SHORTCUTS[name].partition(":")
    globals()[name] = value = reduce(getattr, [*filter(None, [inside]), name], importlib.import_module(module))
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_SHORTCUTS, *_DTYPES, *_PACKAGES])
