"""Names of torch with arguments that netcl lacks: tensor classes, autocast, GradScaler, compile, checkpoint, ONNX export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl import amp, autograd, io
from netcl.amp.grad_scaler import GradScaler as Scaler
from netcl.core.tensor import Tensor
from netcl.nn.module import Module
from netcl.replay.compiled import compile as compile_function
from netcl.torch import files


class TensorClass(type):
    """Metaclass of ``torch.Tensor``, ``torch.LongTensor``, ...: instances are tensors of one or any dtype, made from sizes or values."""

    dtype: str | None

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and cls.dtype in (None, value.dtype)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, Tensor) if type(other) is not TensorClass else super().__subclasscheck__(other)

    def __call__(cls, *given: Any, device: Any = None) -> Tensor:
        dtype = cls.dtype or "float32"
        if all(isinstance(size, int) for size in given):
            return Tensor.empty(given or (0,), dtype, device=device)
        return autograd.tensor(given[0], dtype, device=device)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Tensor, name)


_TENSOR_TYPES = {"": None, "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
                 "Int": "int32", "Byte": "uint8", "Bool": "bool"}  # fmt: skip
TENSORS = {f"{kind}Tensor": TensorClass(f"{kind}Tensor", (), {"dtype": dtype}) for kind, dtype in _TENSOR_TYPES.items()}


class autocast(amp.autocast):
    """``torch.autocast``: the default dtype is float16 for ``"cuda"`` and bfloat16 for ``"cpu"``."""

    def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None):
        halves = {None: "bfloat16" if device_type == "cpu" else "float16", "float32": "float16"}
        super().__init__(enabled and dtype != "float32", halves.get(dtype, dtype))


class GradScaler(Scaler):
    """``torch.amp.GradScaler``: netcl's scaler, with ``scale`` as a method."""

    unscale_ = Scaler.unscale_grads

    def __init__(self, device: str = "cuda", *numbers: Any, **options: Any):
        super().__init__(*numbers, **options)

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
        """Return the state of the scaler, with the scale as a number."""
        return {**super().state_dict(), "scale": self.get_scale()}


def compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile``: functions are recorded and replayed, modules are returned unchanged. Options are ignored."""
    return compile if model is None else model if isinstance(model, Module) else compile_function(model)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **options: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``: recompute activations in backward. ``use_reentrant`` is ignored."""
    return autograd.checkpoint(function, *args, **options)


def export_onnx(model: Any, args: Any = (), f: Any = None, *, input_names: Any = None, output_names: Any = None, **options: Any) -> None:
    """``torch.onnx.export``: shapes are those of ``args``; options other than names are ignored."""
    samples = args if isinstance(args, tuple) else (args,)
    io.export_onnx(model, f, *samples, input_names=input_names or (), output_names=output_names or ())


AMP: dict[str, Any] = {"autocast": autocast, "GradScaler": GradScaler}
CUDA_AMP: dict[str, Any] = {
    "autocast": lambda enabled=True, dtype="float16", cache_enabled=True: autocast("cuda", dtype, enabled),
    "GradScaler": lambda *numbers, **options: GradScaler("cuda", *numbers, **options),
}
ROOT: dict[str, Any] = {
    **TENSORS, "Size": tuple, "autocast": autocast, "save": files.save, "load": files.load, "compile": compile,
    "strided": "strided", "contiguous_format": "contiguous_format", "channels_last": "channels_last", "preserve_format": "preserve_format",
    "set_num_threads": lambda number: None,  # NumPy and the OpenCL runtime have their own settings
}  # fmt: skip
