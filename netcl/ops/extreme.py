"""``max`` and ``min`` with torch's and NumPy's signatures, built on ``amax``, ``argmax``, ``maximum`` and their counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.reduction import Axis
from netcl.engine.registry import S, composite
from netcl.ops.sort import Ordered, ordered

_EXTREME_SAMPLES = [S((257,)), S((3, 5), axis=1), S((3, 5, 7), dim=1), S((33, 4), dim=-1, keepdim=True),
                    S((6,), dim=0, dtypes="int32", high=9)]  # fmt: skip
_DOCS = {"max": """The largest element; with ``dim``, ``(values, indices)`` along it, as in torch; with ``axis``, values only, as in NumPy.

A tensor in place of ``dim`` is compared elementwise, as by ``maximum``. The gradient of ``values`` goes to the elements at
``indices``; that of a fold without ``dim`` is shared by all elements that are the largest.

>>> from netcl import ops
>>> values, indices = ops.max(Tensor.from_host([[1.0, 5.0], [7.0, 2.0]]), 1)
>>> values.tolist(), indices.tolist()
([5.0, 7.0], [1, 0])
""", "min": "The smallest element; ``dim``, ``axis`` and a second tensor as in :func:`max`."}  # fmt: skip


def _register_extreme(name: str) -> None:
    def call(F: Any, x: Tensor, dim: Any = None, keepdim: bool = False, *, axis: Axis = None, keepdims: bool = False,
             out: Tensor | None = None) -> Tensor | Ordered:  # fmt: skip
        fold, place, larger = (F.amax, F.argmax, F.maximum) if name == "max" else (F.amin, F.argmin, F.minimum)
        if dim is None:
            return fold(x, axis=axis, keepdims=keepdims or keepdim, out=out)
        if axis is not None or out is not None:
            what, shape = "dim must not be combined with axis or out", getattr(out, "shape", None)
            raise ShapeError(message(name, what, "pass axis without dim to get only the values", dim=dim, axis=axis, out=shape))
        if isinstance(dim, Tensor | np.ndarray):
            return larger(x, dim)
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            remedy = f"several axes: a{name}(x, {dim!r})" if isinstance(dim, tuple | list) else ""
            raise ShapeError(message(name, "dim must be one integer or a tensor", remedy, dim=repr(dim)))
        (x,) = launch.as_tensors(name, x)
        return ordered(F, x, dim, place(x, dim, True), keepdim)

    errors = [(S((3, 2), dim=2), rf"\[arg{name}\] axis must be in range for 2 dimensions, got 2"), (S((3, 2), dim=(0, 1)),
               rf"\[{name}\] dim must be one integer or a tensor; dim=\(0, 1\); several axes: a{name}\(x, \(0, 1\)\)")]  # fmt: skip
    composite(ref="numpy", name=name, inputs=("x",), samples=_EXTREME_SAMPLES, errors=errors, doc=_DOCS[name])(call)


_register_extreme("max")
_register_extreme("min")
