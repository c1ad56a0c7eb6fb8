"""Support for Python's pickle: a module's attributes, with host values in place of tensors.

For programs that send modules to other processes. Restored tensors are on the device where a constructor would create them.
"""

from __future__ import annotations

import weakref
from typing import Any

from netcl.core.nested import map_leaves
from netcl.core.tensor import Tensor
from netcl.nn.parameter import here


class Recomputed(dict[Any, Any]):
    """Values that a module derives from its attributes, such as compiled steps. Deep copies and pickles of a module start without them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        return Recomputed()

    def __reduce__(self) -> Any:
        return Recomputed, ()


class _Stored:
    """A tensor in a pickle. There is one such object per tensor, so that pickle stores shared parameters once."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __reduce__(self) -> Any:
        tensor = self.tensor
        return _restored, (tensor.to_host(), tensor.dtype, tensor.requires_grad and tensor.grad_fn is None, tensor.persistent)


_known: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()  # by the tensor, which its entry keeps alive


def _restored(values: Any, dtype: str, requires_grad: bool, persistent: bool) -> Tensor:
    return Tensor.from_host(here(), values, dtype, requires_grad=requires_grad, persistent=persistent)


def to_stored(value: Any) -> Any:
    """Replace all tensors in a value, at any depth of lists, tuples and dicts, by a form that pickle accepts."""
    return map_leaves(value, lambda leaf: _known.setdefault(id(leaf), _Stored(leaf)) if isinstance(leaf, Tensor) else leaf)
