"""netcl: deep learning on any OpenCL device.

Names are resolved at first use, so that ``import netcl`` touches no driver and works without pyopencl.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from functools import partial as _partial
from typing import Any

from netcl.core import tracebacks as _tracebacks
from netcl.core.hooks import hooks
from netcl.runtime import cache as _cache  # noqa: F401, registers the disk cache with core's door to the driver

__version__ = "0.1.0"
__all__ = ["bias_add", "build_matmul_kernel", "conv2d", "device", "elementwise_binary", "matmul", "reduce_sum", "relu", "softmax",
           "synchronize"]  # fmt: skip

_AUTOGRAD = """matmul elementwise_binary relu bias_add reduce_sum softmax conv2d no_grad enable_grad set_grad_enabled is_grad_enabled
    tensor kernel"""
_SHORTCUTS = {
    **dict.fromkeys(_AUTOGRAD.split(), "netcl.autograd"),
    **dict.fromkeys(("zeros", "ones", "full", "arange"), "netcl.autograd.creation"),
    "build_matmul_kernel": "netcl.ops.matmul",
    **dict.fromkeys(("Generator", "manual_seed"), "netcl.ops.random"),
    **dict.fromkeys(("save", "load"), "netcl.io"),
    **dict.fromkeys(("device", "synchronize"), "netcl.core.device"),
    **dict.fromkeys(("get_matmul_precision", "set_matmul_precision"), "netcl.core.kernel_selector"),
    "Tensor": "netcl.core.tensor",
    "KernelSpec": "netcl.core.kernels.primitives",
    **dict.fromkeys(("compile", "capture_graph"), "netcl.replay.compiled"),
    **dict.fromkeys(("autocast", "is_autocast_enabled"), "netcl.amp"),
    "dtype": "netcl.core.dtype",
    **dict.fromkeys("angle conj imag is_complex istft polar real stft view_as_complex view_as_real".split(), "netcl.fft"),
}
#: Functions of torch.nn.functional that torch has at its root as well.
_FUNCTIONALS = """alpha_dropout bilinear celu channel_shuffle conv3d conv_tbc conv_transpose3d cosine_embedding_loss feature_alpha_dropout
    hardshrink hinge_embedding_loss margin_ranking_loss max_pool3d native_channel_shuffle pairwise_distance pdist poisson_nll_loss rrelu
    threshold triplet_margin_loss"""
#: torch's names for what is here under another: where it is.
_RENAMED = {
    **{name: ("netcl.nn.functional", name) for name in _FUNCTIONALS.split()},
    "complex": ("netcl.fft", "Complex"),
    "get_float32_matmul_precision": ("netcl.core.kernel_selector", "get_matmul_precision"),
    "set_float32_matmul_precision": ("netcl.core.kernel_selector", "set_matmul_precision"),
    "quantize": ("netcl.nn.quantized", "quantize_model"),
    "set_anomaly_enabled": ("netcl.autograd", "set_detect_anomaly"),
}
#: Methods of tensors that torch has as functions, too; so are all that write in place.
_METHODS = """adjoint allclose clone detach equal get_device is_floating_point is_nonzero is_same_size is_signed
    is_conj is_neg is_inference is_distributed numel positive t""".split()
_NUMBERS = {"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan, "newaxis": None}

#: Dtypes under torch's names; not kept as globals, which would hide Python's own ``bool``, ``float`` and ``int`` here.
_DTYPES = """bool uint8 int8 int16 short uint16 int32 int uint32 int64 long uint64 float16 half bfloat16 float32 float float64
    double""".split()
_PACKAGES = """accelerator amp autograd data distributed distributions fft func io linalg models nn onnx ops optim profiling testing
    trainer utils vision""".split()

# They import when they are first called.
hooks.op = lambda name: importlib.import_module("netcl.autograd").find(name)
hooks.upper = _partial(importlib.import_module, package="netcl")
_tracebacks.install_tracebacks()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"netcl.{name}")
    if name in _DTYPES:
        return importlib.import_module("netcl.core.dtype").lookup(name).name
    if name in _NUMBERS:
        return _NUMBERS[name]
    if name in _SHORTCUTS or name in _RENAMED:
        module, name_there = _RENAMED.get(name) or (_SHORTCUTS[name], name)
        value = getattr(importlib.import_module(module), name_there)
    elif name[0] == "_" or importlib.util.find_spec(f"netcl.{name}") is not None:  # a module that is not imported yet
        raise AttributeError(f"module 'netcl' has no attribute {name!r}")
    else:
        value = _of_torch(name)
    globals()[name] = value
    return value


def _of_torch(name: str) -> Any:
    """Return netcl's equivalent of torch's function ``name``: a creation function, a differentiable op, or a tensor method."""
    creation, autograd, tensor = (importlib.import_module(f"netcl.{path}") for path in ("autograd.creation", "autograd", "core.tensor"))
    if name in creation.CREATION_FUNCTIONS:
        return creation.CREATION_FUNCTIONS[name]
    if name in autograd.LASTING:
        return getattr(autograd, name)
    if name in _METHODS or (name[-1] == "_" and name[0] != "_" and hasattr(tensor.Tensor, name)):
        return getattr(tensor.Tensor, name)
    near = difflib.get_close_matches(name, __dir__(), n=3)
    hint = f"; the nearest names are {', '.join(near)}" if near else ""
    raise AttributeError(f"module 'netcl' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    creation, autograd = importlib.import_module("netcl.autograd.creation"), importlib.import_module("netcl.autograd")
    torchs = (*_RENAMED, *_METHODS, *_NUMBERS, *creation.CREATION_FUNCTIONS, *autograd.LASTING)
    return sorted({*globals(), *_SHORTCUTS, *_DTYPES, *_PACKAGES, *torchs})
