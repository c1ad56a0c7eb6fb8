"""Names of torch with arguments that netcl lacks, and settings that change nothing here: tensor classes, autocast, compile, jit, ..."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, Final

from netcl import amp, autograd, io, nn
from netcl.accelerator import is_available
from netcl.amp.grad_scaler import GradScaler as Scaler
from netcl.autograd.functional import leaves_of, with_leaves
from netcl.core.errors import OutOfMemoryError, message
from netcl.core.tensor import Tensor
from netcl.nn import Sequential, functional
from netcl.nn.module import Module
from netcl.ops import random
from netcl.ops.random import Generator
from netcl.replay.compiled import compile as compile_function
from netcl.torch import files


class TensorClass(type):
    """Metaclass of ``torch.Tensor``, ``torch.LongTensor``, ...: instances are tensors of one or any dtype, made from sizes or values."""

    dtype: str | None
    device: str | None

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and cls.dtype in (None, value.dtype) and (cls.device is None or value.backend == "cl")

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, Tensor) if type(other) is not TensorClass else super().__subclasscheck__(other)

    def __call__(cls, *given: Any, device: Any = None) -> Tensor:
        dtype, device = cls.dtype or "float32", device or cls.device
        if all(isinstance(size, int) for size in given):
            return Tensor.empty(given or (0,), dtype, device=device)
        return autograd.tensor(given[0], dtype, device=device)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Tensor, name)

    def __setattr__(cls, name: str, value: object) -> None:  # a script adds or replaces a method
        setattr(Tensor, name, value)


_TENSOR_TYPES = {"": None, "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
                 "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip
TENSORS, CUDA_TENSORS = (
    {f"{kind}Tensor": TensorClass(f"{kind}Tensor", (), {"dtype": dtype, "device": device}) for kind, dtype in _TENSOR_TYPES.items()}
    for device in (None, "cuda")
)


def tensor_type(x: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """``Tensor.type``: the name of the type, "torch.FloatTensor", or the tensor converted to a type, such a name or a dtype."""
    if dtype is None:
        kind = next((kind for kind, name in _TENSOR_TYPES.items() if name == x.dtype), str(x.dtype).title())
        return f"torch.{'cuda.' if x.backend == 'cl' else ''}{kind}Tensor"
    if isinstance(dtype, str):
        dtype = (CUDA_TENSORS if ".cuda." in dtype else TENSORS).get(dtype.rpartition(".")[2], dtype)
    return x.to(dtype.device or "cpu", dtype.dtype or "float32") if isinstance(dtype, TensorClass) else x.to(dtype)


def _has_device(name: str, device_type: object) -> bool:
    """Return whether the device of an autocast or a scaler exists; warns if it does not, as torch does."""
    found = str(device_type).split(":")[0] != "cuda" or is_available()
    if not found:
        warnings.warn(message(name, f"there is no OpenCL device: {name} is disabled", device_type=repr(device_type)), stacklevel=3)
    return found


class autocast(amp.autocast):
    """``torch.autocast``: the default dtype is float16 for ``"cuda"`` and bfloat16 for ``"cpu"``."""

    def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None):
        halves = {None: "bfloat16" if device_type == "cpu" else "float16", "float32": "float16"}
        super().__init__(enabled and dtype != "float32" and _has_device("autocast", device_type), halves.get(dtype, dtype))


def custom_fwd(fwd: Any = None, *, device_type: str | None = None, cast_inputs: Any = None) -> Any:
    """``torch.amp.custom_fwd``: under autocast, ``cast_inputs`` is the dtype of floating-point inputs, and casts are off in forward."""
    if fwd is None:
        return partial(custom_fwd, cast_inputs=cast_inputs)

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.half = None if cast_inputs else amp.get_autocast_dtype()
        if cast_inputs is None or not amp.is_autocast_enabled():
            return fwd(ctx, *args, **kwargs)
        with amp.autocast(enabled=False):
            return fwd(ctx, *(x.to(cast_inputs) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args), **kwargs)

    return run


def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """``torch.amp.custom_bwd``: backward under the autocast of its ``custom_fwd``."""
    if bwd is None:
        return custom_bwd

    def run(ctx: Any, *gradients: Any) -> Any:
        with amp.autocast(ctx.half is not None, ctx.half or "float16"):
            return bwd(ctx, *gradients)

    return run


def _with_implicit_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A softmax of ``torch.nn.functional``: without ``dim`` it is along the first axis of 0, 1 and 3 dimensions, else the second."""

    def call(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return function(input if dtype is None else input.to(dtype), (0 if input.ndim in (0, 1, 3) else 1) if dim is None else dim)

    return call


FUNCTIONAL: dict[str, Any] = {name: _with_implicit_dim(getattr(functional, name)) for name in ("softmax", "log_softmax", "softmin")}


class _SoftmaxLayer(nn.Softmax):
    """A softmax layer of ``torch.nn``, with torch's ``dim`` if none is given."""

    function: Callable[..., Tensor]

    def __init__(self, dim: int | None = None):
        super().__init__(dim)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input, self.dim)


SOFTMAX_LAYERS = {
    name: type(name, (_SoftmaxLayer,), {"function": staticmethod(FUNCTIONAL[function])})
    for name, function in (("Softmax", "softmax"), ("LogSoftmax", "log_softmax"), ("Softmin", "softmin"))
}


class GradScaler(Scaler):
    """``torch.amp.GradScaler``: netcl's scaler, with ``scale`` as a method."""

    unscale_ = Scaler.unscale_grads

    def __init__(self, device: str = "cuda", *numbers: Any, **options: Any):
        super().__init__(*numbers, **options)
        self.enabled = self.enabled and _has_device("GradScaler", device)

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        """Return the loss times the scale."""
        return self.scale_loss(outputs)

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.enabled

    def get_scale(self) -> float:
        """Return the scale; waits for the device."""
        return float(Scaler.scale.__get__(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the state with torch's names and the scale as a number; empty if the scaler is disabled."""
        state = {**super().state_dict(), "scale": self.get_scale()}
        return {"_growth_tracker": state.pop("growth_tracker"), **state} if state.pop("enabled") else {}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue from a :meth:`state_dict`; a disabled scaler ignores it."""
        if self.enabled:
            super().load_state_dict(state_dict)


class _FindsNaN(autograd.set_detect_anomaly):
    """``torch.autograd.set_detect_anomaly``: only NaN is an anomaly, because masks have infinities."""

    def __init__(self, mode: bool, check_nan: bool = True):
        super().__init__("nan" if mode and check_nan else False)


def compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile``: functions are recorded and replayed, modules are returned unchanged. Options are ignored."""
    return compile if model is None else model if isinstance(model, Module) else compile_function(model)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True,
    determinism_check: str = "default", debug: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """``torch.utils.checkpoint.checkpoint``: recompute activations in backward. Options are ignored; random numbers are repeated."""
    return autograd.checkpoint(function, *args, **options)


def checkpoint_sequential(functions: Any, segments: int, input: Tensor, use_reentrant: bool | None = None, **options: Any) -> Tensor:
    """``torch.utils.checkpoint.checkpoint_sequential``: layers in segments; all but the last recompute activations in backward."""
    layers = list(functions)
    size = len(layers) // segments
    for start in range(0, size * (segments - 1), size):
        input = autograd.checkpoint(Sequential(*layers[start : start + size]), input)
    return Sequential(*layers[size * (segments - 1) :])(input)


def manual_seed(seed: int) -> Generator:
    """``torch.manual_seed``: seed all devices; returns a generator with the same seed."""
    random.manual_seed(seed)
    return Generator().manual_seed(seed)


def where(condition: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.where``: with a condition alone, the coordinates of its elements that are true, a tensor per dimension."""
    return autograd.where(condition, *args, **kwargs) if args or kwargs else tuple(autograd.nonzero(condition).unbind(1))


@contextmanager
def record_function(name: str, args: Any = None) -> Iterator[None]:
    """``torch.profiler.record_function``: a label, which netcl's profiler does not read."""
    yield


def _repeated(count: int) -> Callable[[Any], tuple[Any, ...]]:
    return lambda x: tuple(x) if isinstance(x, Iterable) else (x,) * count


TUPLES: dict[str, Any] = {f"_{name}": _repeated(n) for n, name in enumerate(("single", "pair", "triple", "quadruple"), 1)}


def export_onnx(model: Any, args: Any = (), f: Any = None, *, input_names: Any = None, output_names: Any = None, **options: Any) -> None:
    """``torch.onnx.export``: shapes are those of ``args``; options other than names are ignored."""
    samples = args if isinstance(args, tuple) else (args,)
    io.export_onnx(model, f, *samples, input_names=input_names or (), output_names=output_names or ())


class SDPBackend(Enum):
    """``torch.nn.attention.SDPBackend``: names of torch's kernels."""

    ERROR, MATH, FLASH_ATTENTION, EFFICIENT_ATTENTION, CUDNN_ATTENTION, OVERRIDEABLE = range(-1, 5)


@contextmanager
def _any_kernel(*backends: Any, **options: Any) -> Iterator[None]:
    """``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.sdp_kernel``: netcl chooses the kernel of attention by measurements."""
    yield


def _as_it_is(function: Any = None, *unused: Any, **options: Any) -> Any:
    """Return a function or a module unchanged; without one, a decorator that does."""
    return _as_it_is if function is None or isinstance(function, bool) else function


#: ``torch.utils._pytree``, which published models use; the specification of a tree is the tree.
PYTREE: dict[str, Any] = {
    "tree_flatten": lambda tree: (leaves_of(tree), tree), "tree_unflatten": lambda leaves, spec: with_leaves(spec, iter(leaves)),
    "tree_leaves": leaves_of, "tree_map": lambda f, tree, *rest: with_leaves(tree, map(f, leaves_of(tree), *map(leaves_of, rest))),
}  # fmt: skip
FLAT: dict[str, Any] = {
    "_flatten_dense_tensors": lambda tensors: autograd.cat([x.reshape(-1) for x in tensors]),
    "_unflatten_dense_tensors": lambda flat, tensors: tuple(
        part.reshape(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)
    ),
}
ATTENTION: dict[str, Any] = {"SDPBackend": SDPBackend, "sdpa_kernel": _any_kernel}
#: ``torch.jit`` and ``torch.compiler``: code stays Python. ``trace``, ``save`` and ``load`` are missing.
JIT: dict[str, Any] = {
    **dict.fromkeys(("script", "ignore", "unused", "export", "script_method", "interface", "trace"), _as_it_is), "Final": Final,
    **dict.fromkeys(("is_scripting", "is_tracing"), lambda: False), "ScriptModule": Module, "annotate": lambda kind, value: value,
}  # fmt: skip
COMPILER: dict[str, Any] = {"compile": compile, "disable": _as_it_is, **dict.fromkeys(("is_compiling", "is_exporting"), lambda: False)}
AUTOGRAD: dict[str, Any] = {
    "Variable": lambda data, requires_grad=False: data.detach().requires_grad_(requires_grad),
    "detect_anomaly": lambda check_nan=True: _FindsNaN(True, check_nan), "set_detect_anomaly": _FindsNaN,
}  # fmt: skip
_CUSTOM = {"custom_fwd": custom_fwd, "custom_bwd": custom_bwd}
AMP: dict[str, Any] = {"autocast": autocast, "GradScaler": GradScaler, **_CUSTOM}
CUDA_AMP: dict[str, Any] = {
    **_CUSTOM,
    "autocast": lambda enabled=True, dtype="float16", cache_enabled=True: autocast("cuda", dtype, enabled),
    "GradScaler": lambda *numbers, **options: GradScaler("cuda", *numbers, **options),
}
ROOT: dict[str, Any] = {
    **TENSORS, "Size": tuple, "autocast": autocast, "save": files.save, "load": files.load, "compile": compile,
    **{name: name for name in ("complex64", "complex128")},  # which every function refuses
    "strided": "strided", "contiguous_format": "contiguous_format", "channels_last": "channels_last", "preserve_format": "preserve_format",
    "manual_seed": manual_seed, "where": where, "OutOfMemoryError": OutOfMemoryError, "get_num_threads": os.cpu_count,
    "set_num_threads": lambda number: None,  # NumPy and the OpenCL runtime have their own settings
    "is_autocast_enabled": lambda device_type="cuda": amp.is_autocast_enabled(),
    "get_autocast_dtype": lambda device_type="cuda": amp.get_autocast_dtype() or ("bfloat16" if device_type == "cpu" else "float16"),
    "use_deterministic_algorithms": lambda mode, *, warn_only=False: None, "are_deterministic_algorithms_enabled": lambda: True,
}  # fmt: skip
