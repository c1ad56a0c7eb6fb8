"""Modules as data: ``config_of`` describes a module of a registered class as data for JSON, ``build`` makes a module from it.

A row describes a module: ``{"type": name, "args": [...] or {...}}``, with optional ``kwargs`` and replaced ``children``. A module that is
an argument is a row, too. Only registered names are allowed, so that a file can call only registered constructors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core.errors import did_you_mean, message
from netcl.core.tensor import Tensor
from netcl.nn.parameter import here, placed

LayerRow = dict[str, Any]
_ROW_KEYS = {"type", "args", "kwargs", "children"}
_ROW_FORM = 'a row is {"type": ..., "args": [...] or {...}}'
_MAX_DEPTH = 64
_constructors: dict[str, Callable[..., Any]] = {}
_names: dict[Any, str] = {}


def register_layer(name: str | Callable[..., Any], constructor: Callable[..., Any] | None = None) -> Any:
    """Register a class, or a function that returns a module, under a name, so that models with it can be saved and built.

    ``register_layer("Swish", Swish)``, or as a decorator: ``@register_layer`` and ``@register_layer("Swish")``.

    >>> import netcl
    >>> from netcl import nn
    >>> @nn.register_layer
    ... class Twice(nn.Module):
    ...     def forward(self, x):
    ...         return x * 2.0
    >>> nn.build_sequential(None, [{"type": "Twice"}])(netcl.tensor([3.0])).tolist()
    [6.0]
    >>> nn.unregister_layer("Twice")
    """
    if not isinstance(name, str):
        return register_layer(name.__name__, name)
    if constructor is None:
        return lambda made: register_layer(name, made)
    known = _constructors.get(name, constructor)
    if known is not constructor and _place(known) != _place(constructor):
        remedy = "choose another name, or call unregister_layer first"
        raise ValueError(message("register_layer", f"{name!r} cannot be registered twice", remedy))
    _constructors[name] = constructor
    _names.setdefault(constructor, name)
    return constructor


def _place(constructor: Callable[..., Any]) -> tuple[str, str]:
    """Return a class's module and qualified name. A class redefined in a notebook has equal names and replaces the registered class."""
    return constructor.__module__, constructor.__qualname__


def unregister_layer(name: str) -> None:
    """Remove a registered name."""
    _names.pop(constructor_of(name), None)
    del _constructors[name]


def registered() -> list[str]:
    """List the names of the registered layers."""
    return sorted(_constructors)


class UnknownLayerError(ValueError):
    """Raised for a name that is not registered, such as the ``type`` of a row."""


def constructor_of(name: Any) -> Callable[..., Any]:
    """Return the constructor registered under a name."""
    if isinstance(name, str) and name in _constructors:
        return _constructors[name]
    remedy = did_you_mean(name, _constructors, "register_layer adds your own class")
    raise UnknownLayerError(message("factory", "the type must be a registered layer", remedy, type=repr(name)))


# ---- from modules to rows


def config_of(module: Any) -> LayerRow:
    """Return the description that rebuilds a module, without its weights: a dict of plain data for JSON.

    >>> from netcl import nn
    >>> nn.config_of(nn.Linear(3, 2))
    {'type': 'Linear', 'args': {'in_features': 3, 'out_features': 2, 'bias': True}}
    """
    cls = type(module)
    if cls not in _names:
        raise ValueError(message("config", f"the class {cls.__name__} is not registered", cls.saved_by))
    row: LayerRow = {"type": _names[cls]}
    positional, named = module._constructor_arguments()
    where = f"{cls.__name__}("
    if positional or not named:
        row["args"] = [_encode(value, where) for value in positional]
        if named:
            row["kwargs"] = {name: _encode(value, where + name) for name, value in named.items()}
    else:
        row["args"] = {name: _encode(value, where + name) for name, value in named.items()}
    children = {path: None if child is None else config_of(child) for path, child in module._changed_children()}
    return {**row, "children": children} if children else row


def _encode(value: Any, where: str) -> Any:
    """Return a constructor argument as data for JSON; raises if it has no such form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        parts = [_encode(part, where) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise TypeError(message("config", f"keys of {where}) must be strings", keys=list(value)))
        return {key: _encode(part, where) for key, part in value.items()}
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": value.dtype}
    if isinstance(value, np.generic):
        return value.item()
    if callable(value) and value in _names:
        return {"class": _names[value]}
    if hasattr(value, "_constructor_arguments"):
        return config_of(value)
    remedy = "pass numbers, strings, lists, modules or registered classes to the constructor"
    raise TypeError(message("config", f"the argument {where}) cannot be written as JSON", remedy, value=repr(value)))


# ---- from rows to modules


def build(config: Mapping[str, Any], queue: Any = None) -> Any:
    """Build the module described by ``config`` (from :func:`config_of`) with fresh weights, on ``queue`` or the active device.

    >>> from netcl import nn
    >>> nn.build({"type": "Linear", "args": [3, 2]})
    Linear(in_features=3, out_features=2, bias=True)
    """
    with placed(queue):
        return _build(config, 0)


def build_sequential(queue: Any, config: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> Any:
    """Return a ``Sequential`` of the rows in ``config`` on a queue or handle (``None``: the active device). One row gives just its module.

    >>> from netcl import nn
    >>> rows = [{"type": "Linear", "args": {"in_features": 4, "out_features": 8}}, {"type": "ReLU"}, {"type": "Linear", "args": [8, 2]}]
    >>> nn.build_sequential(None, rows)([[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 2)
    """
    if isinstance(config, Mapping):
        return build_sequential(queue, config["layers"]) if "layers" in config else build(config, queue)
    if not isinstance(config, list | tuple):
        raise TypeError(message("build_sequential", "the configuration must be a list of rows", _ROW_FORM, config=repr(config)))
    with placed(queue):
        return constructor_of("Sequential")(*[_build(row, 1) for row in config])


def _build(row: Any, depth: int) -> Any:
    _check_row(row, depth)
    make, args, kwargs = constructor_of(row["type"]), row.get("args") or [], row.get("kwargs") or {}
    listed, rest = ([], {**args, **kwargs}) if isinstance(args, Mapping) else (args, kwargs)
    positional, named = [_decode(value, depth) for value in listed], {name: _decode(value, depth) for name, value in rest.items()}
    _check_arguments(row["type"], make, positional, named)
    module = make(*positional, **named)
    for path, child in (row.get("children") or {}).items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, None if child is None else _build(child, depth + 1))
    return module


def _check_row(row: Any, depth: int) -> None:
    if not isinstance(row, Mapping) or "type" not in row or not set(row) <= _ROW_KEYS:
        raise ValueError(message("factory", "a row must be a mapping of type, args, kwargs and children", _ROW_FORM, row=repr(row)[:200]))
    if depth > _MAX_DEPTH:
        raise ValueError(message("factory", "the description must not be nested deeper than the limit", limit=_MAX_DEPTH))
    wrong = [key for key, kinds in (("args", list | tuple | Mapping), ("kwargs", Mapping), ("children", Mapping))
             if not isinstance(row.get(key) or {}, kinds)]  # fmt: skip
    if wrong:
        raise ValueError(message("factory", "args must be a list or mapping, kwargs and children mappings", _ROW_FORM, row=repr(row)[:200]))


def _check_arguments(name: str, make: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise an error with the layer's name and signature for wrong arguments."""
    signature = inspect.signature(make)
    own = {key: value for key, value in named.items() if key != "dtype" or key in signature.parameters}  # every constructor takes a dtype
    try:
        signature.bind(*positional, **own)
    except TypeError as fault:
        raise ValueError(message("factory", f"wrong arguments for {name}: {fault}", f"expected {signature}")) from None


def _decode(value: Any, depth: int) -> Any:
    if isinstance(value, list | tuple):
        parts = [_decode(part, depth) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"class"}:
        return constructor_of(value["class"])
    if set(value) == {"tensor", "dtype"}:
        return Tensor.from_host(here(), value["tensor"], value["dtype"])
    if "type" in value and set(value) <= _ROW_KEYS:
        return _build(value, depth + 1)
    return {key: _decode(part, depth) for key, part in value.items()}
