"""Names that torch and netcl share, with torch's arguments: tensor classes, generators, autocast, GradScaler, files, compile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from netcl import amp, autograd
from netcl.amp.grad_scaler import GradScaler as Scaler
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.io.state import load as load_file
from netcl.io.torch_format import save_torch
from netcl.nn.module import Module
from netcl.replay.compiled import compile as compile_function


class TensorClass(type):
    """``torch.Tensor``, ``torch.LongTensor``, ...: classes of netcl's tensors by dtype, and their constructors from sizes or values."""

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


_DTYPES = {"": None, "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
           "Byte": "uint8", "Bool": "bool"}  # fmt: skip
TENSORS = {f"{kind}Tensor": TensorClass(f"{kind}Tensor", (), {"dtype": dtype}) for kind, dtype in _DTYPES.items()}


class Generator(np.random.Generator):
    """``torch.Generator`` for samplers, loaders and ``random_split``."""

    def __init__(self, device: Any = "cpu"):
        super().__init__(np.random.PCG64(0))
        self._seed = 0

    def manual_seed(self, seed: int) -> Generator:
        """Start the numbers anew."""
        self.bit_generator.state = np.random.PCG64(seed).state
        self._seed = seed
        return self

    def initial_seed(self) -> int:
        """The seed that was set last."""
        return self._seed


class autocast(amp.autocast):
    """``torch.autocast``: the default dtype is float16 for ``"cuda"`` and bfloat16 for ``"cpu"``."""

    def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None):
        halves = {None: "bfloat16" if device_type == "cpu" else "float16", "float32": "float16"}
        super().__init__(enabled and dtype != "float32", halves.get(dtype, dtype))


class GradScaler(Scaler):
    """``torch.amp.GradScaler``: ``scale`` is a method here."""

    unscale_ = Scaler.unscale_grads

    def __init__(self, device: str = "cuda", *numbers: Any, **options: Any):
        super().__init__(*numbers, **options)

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        """The loss times the scale."""
        return self.scale_loss(outputs)

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.enabled

    def get_scale(self) -> float:
        """The scale; reading it waits for the device."""
        return float(Scaler.scale.__get__(self))

    def state_dict(self) -> dict[str, Any]:
        """The scale and what it follows, as numbers."""
        return {**super().state_dict(), "scale": self.get_scale()}


def save(obj: Any, f: Any, *unused: Any, **options: Any) -> None:
    """``torch.save`` into a path or a file: state dicts, and nestings of plain values and tensors. PyTorch reads the file."""
    if isinstance(obj, Module):
        remedy = "save the weights: torch.save(model.state_dict(), path)"
        raise TypeError(message("torch.save", "a whole module cannot be saved without pickle", remedy, module=type(obj).__name__))
    if isinstance(f, str | os.PathLike):
        return save_torch(obj, f)
    with tempfile.TemporaryDirectory() as folder:
        save_torch(obj, path := Path(folder, "state.pt"))
        f.write(path.read_bytes())


def load(f: Any, map_location: Any = None, *unused: Any, **options: Any) -> Any:
    """``torch.load`` of a path or a file, without pickle. Tensors are on ``map_location``, by default on the CPU."""
    place = next(iter(map_location.values())) if isinstance(map_location, dict) else map_location
    place = "cpu" if place is None or callable(place) else place
    if isinstance(f, str | os.PathLike):
        return load_file(f, place)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        path.write_bytes(f.read())
        return load_file(path, place)


def compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile``: functions are recorded and replayed, modules are returned as they are. Options are taken and change nothing."""
    return compile if model is None else model if isinstance(model, Module) else compile_function(model)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **options: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``."""
    return autograd.checkpoint(function, *args, **options)


AMP: dict[str, Any] = {"autocast": autocast, "GradScaler": GradScaler}
CUDA_AMP: dict[str, Any] = {
    "autocast": lambda enabled=True, dtype="float16", cache_enabled=True: autocast("cuda", dtype, enabled),
    "GradScaler": lambda *numbers, **options: GradScaler("cuda", *numbers, **options),
}
ROOT: dict[str, Any] = {
    **TENSORS, "Size": tuple, "Generator": Generator, "autocast": autocast, "save": save, "load": load, "compile": compile,
    "strided": "strided", "contiguous_format": "contiguous_format", "channels_last": "channels_last", "preserve_format": "preserve_format",
    "set_num_threads": lambda number: None,  # NumPy and the OpenCL runtime have their own settings
}  # fmt: skip
