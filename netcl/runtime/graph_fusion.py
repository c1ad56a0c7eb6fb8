"""``fuse_graph``: compiles a model in evaluation mode, or a function, to fewer and larger kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core.errors import ShapeError, message
from netcl.replay.compiled import CompiledFunction, compile
from netcl.replay.kinds import is_layer

__all__ = ["fuse_graph"]


def fuse_graph(target: Callable[..., Any], *example: Any) -> Any:
    """Compile a model in evaluation mode, or a function, and fuse its ops. The batch norms of a model are folded.

    The model itself is not changed, and a later change of its weights takes effect. With ``example``, the model is run and recorded at
    once. A model in training mode raises, because its batch norms cannot be folded.

    >>> import numpy as np
    >>> from netcl import nn
    >>> from netcl.runtime.graph_fusion import fuse_graph
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    >>> x = np.ones((1, 1, 4, 4), np.float32)
    >>> bool(np.allclose(fuse_graph(model, x)(x).to_host(), model(x).to_host(), atol=1e-5))
    True
    """
    if isinstance(target, CompiledFunction):
        target = target.function
    if not callable(target):
        raise TypeError(message("fuse_graph", "the argument must be a model or a function", given=type(target).__name__))
    if is_layer(target) and target.training:  # type: ignore[attr-defined]
        raise ShapeError(message("fuse_graph", "the model must be in evaluation mode", "call model.eval() first"))
    made = compile(target, fuse=True)
    for _ in range(3 if example else 0):  # two equal recordings, and the run before them
        made(*example)
    return made
