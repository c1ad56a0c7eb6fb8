"""``torch.utils.tensorboard`` over tensorboardX (the extra ``train``)."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from netcl.core.tensor import Tensor
from netcl.io.packages import optional_module
from netcl.torch import adapters


def _without_tensors(value: Any) -> Any:
    """Return ``value`` with every tensor in it as an array."""
    if isinstance(value, Tensor):
        return value.to_host()
    if isinstance(value, dict):
        return {key: _without_tensors(part) for key, part in value.items()}
    return type(value)(map(_without_tensors, value)) if type(value) in (list, tuple) else value


class SummaryWriter:
    """tensorboardX's ``SummaryWriter`` with torch's constructor; its methods also take tensors."""

    def __init__(self, log_dir: Any = None, comment: str = "", purge_step: Any = None, max_queue: int = 10, flush_secs: int = 120,
                 filename_suffix: str = ""):  # fmt: skip
        make = optional_module("tensorboardX", "SummaryWriter", "tensorboardX is required").SummaryWriter
        folder = None if log_dir is None else str(log_dir)
        self._writer = make(folder, comment, purge_step, max_queue, flush_secs, filename_suffix)
        self.log_dir: str = self._writer.logdir

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self).get("_writer"), name)
        if not name.startswith("add_"):
            return value
        return wraps(value)(lambda *args, **options: value(*_without_tensors(args), **_without_tensors(options)))

    def add_graph(self, model: Any, input_to_model: Any = (), verbose: bool = False, use_strict_trace: bool = True) -> None:
        """Add the graph of a model as ONNX operators; needs the package ``onnx``."""
        optional_module("onnx", "add_graph")
        with TemporaryDirectory() as folder:
            adapters.export_onnx(model, input_to_model, path := str(Path(folder, "model.onnx")))
            self._writer.add_onnx_graph(path)

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
