"""Walks over tensors in nested lists, tuples and dictionaries: arguments and results of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from netcl.core.tensor import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a result, in order; a result may be nested in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def map_leaves(tree: Any, of: Callable[[Any], Any]) -> Any:
    """Return a result with ``of(leaf)`` in the place of everything that is not a list, a (named) tuple or a dictionary."""
    named = isinstance(tree, tuple) and hasattr(tree, "_fields") and not getattr(tree, "__dict__", None)
    if named or type(tree) in (list, tuple):
        parts = [map_leaves(part, of) for part in tree]
        return type(tree)(*parts) if named else type(tree)(parts)
    return {key: map_leaves(part, of) for key, part in tree.items()} if type(tree) is dict else of(tree)
