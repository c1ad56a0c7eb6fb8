"""What a compiled function may read and call. Values are guarded by kind; a value or call of any other kind is refused by name.

Nothing here runs the user's code: attributes are looked up in ``__dict__`` and in classes, never through ``__getattr__`` or properties.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import logging
import pathlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from importlib.machinery import EXTENSION_SUFFIXES
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, TypeGuard

import numpy as np

from netcl.core.tensor import Tensor

PLAIN = (bool, int, float, str, bytes, complex, np.generic, type(None))
EXACTLY_PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None)))
CONTAINERS = (dict, list, tuple, deque)
SETS = (set, frozenset)
MOST_ITEMS = 64  # of a container whose items are compared at every call
MOST_DEPTH = 8  # of containers and objects inside each other
MOST_BYTES = 4096  # of an array whose values are compared at every call
#: Python's modules, netcl and what netcl calls: their functions are not the user's.
LIBRARIES = {*sys.stdlib_module_names, "netcl", "numpy", "pyopencl", "pytools", "platformdirs", "ml_dtypes", "mpi4py"}
#: Modules of functions that depend on their arguments alone.
PURE = frozenset(
    "abc bisect builtins cmath collections contextlib copy copyreg dataclasses enum fractions frozen_importlib"
    " frozen_importlib_external functools heapq importlib itertools math ml_dtypes netcl numbers numpy operator re sre statistics"
    " string struct types typing".split()
)
#: Functions of those modules that depend on more, or do more than return a value.
IMPURE = {
    "builtins": frozenset(("breakpoint", "delattr", "eval", "exec", "globals", "input", "open", "print", "setattr")),
    "numpy": frozenset(("dump", "fromfile", "tofile")),
}
IMPURE_MODULES = ("netcl.data", "netcl.io", "numpy.random", "numpy.lib._npyio", "numpy.lib.npyio", "numpy.lib._datasource")
_CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, partial)
_FIXED = (type, ModuleType, CodeType, np.dtype, np.ufunc, type(np.sum), range, slice, re.Pattern, property, staticmethod, classmethod,
          datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction, pathlib.PurePath,
          enum.Enum, logging.Logger, type(Ellipsis), type(NotImplemented))  # fmt: skip
#: Classes of Python's library that a user's class may extend: they hold no state but what is guarded.
_BASES = frozenset((object, SimpleNamespace, OrderedDict, defaultdict, Counter, decimal.Decimal, fractions.Fraction,
                    *CONTAINERS, *SETS, *EXACTLY_PLAIN))  # fmt: skip
_NOTHING: dict[str, Any] = {}
_MODULE: Any = vars(type)["__module__"]  # which a class may hide
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_a(value: Any, kinds: Any) -> bool:
    """``isinstance`` by the real class: an object may compute its ``__class__``."""
    return issubclass(type(value), kinds)


def instance_dict(value: Any) -> Mapping[str, Any]:
    """The ``__dict__`` of an object or a class; empty if there is none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NOTHING


def class_attribute(kind: type, name: str) -> Any:
    """What a class or a class above it defines under a name, descriptors as they are; ``None`` if nothing does."""
    for one in kind.__mro__:
        if name in one.__dict__:
            return one.__dict__[name]
    return None


def attribute(value: Any, name: str) -> Any:
    """An attribute that is stored: in the object, in a slot or in its class. ``None`` for methods and what is computed."""
    own = instance_dict(value)
    if name in own:
        return own[name]
    found = class_attribute(value if is_a(value, type) else type(value), name)
    if is_a(found, MemberDescriptorType):
        try:
            return found.__get__(value) if is_a(value, found.__objclass__) else None
        except AttributeError:
            return None
    return None if class_attribute(type(found), "__get__") is not None and not is_a(found, type) else found


def method_of(kind: type, name: str) -> Any:
    """The function behind a method or a property of a class, if Python defines it."""
    found = class_attribute(kind, name)
    if is_a(found, property):
        found = found.fget
    elif is_a(found, cached_property):
        found = found.func
    elif is_a(found, (staticmethod, classmethod)):
        found = found.__func__
    return found


def items_of(value: Any) -> Iterable[Any]:
    """What is in a container, the keys of a dictionary too."""
    return (part for pair in value.items() for part in pair) if is_a(value, dict) else value


def module_of(kind: Any) -> str:
    """The name of the module that a class or a function comes from."""
    name = _MODULE.__get__(kind) if isinstance(kind, type) else getattr(kind, "__module__", None)
    return name if isinstance(name, str) else "builtins"


def of_netcl(module: str | None) -> bool:
    return module is not None and (module == "netcl" or module.startswith("netcl."))


def is_layer(value: Any) -> bool:
    """Whether it is a module."""
    return class_attribute(type(value), "_tell_recorder") is not None


def is_own(value: Any) -> bool:
    """Whether it is netcl's, or code."""
    if is_a(value, (FunctionType, MethodType)):
        return True
    if is_a(value, type):
        return of_netcl(module_of(value))
    return of_netcl(value.__name__) if is_a(value, ModuleType) else of_netcl(module_of(type(value))) or is_layer(value)


def of_user(module: Any) -> bool:
    """Whether a module, by its name, is the user's."""
    return not is_a(module, str) or module.partition(".")[0] not in LIBRARIES


def is_foreign(value: Any) -> bool:
    """Whether it is a function of the user's."""
    if is_a(value, partial):
        return True
    function = value.__func__ if is_a(value, MethodType) else value
    return (
        is_a(function, FunctionType)
        and of_user(function.__globals__.get("__name__"))
        and not function.__code__.co_filename.startswith("<op ")
    )


def is_of_users_class(value: Any) -> bool:
    """Whether it is an instance of a class that the user wrote in Python."""
    kind = type(value)
    return bool(kind.__flags__ & _MADE_BY_PYTHON) and of_user(module_of(kind)) and not _is_extension(module_of(kind))


def all_tensors(value: Any) -> TypeGuard[list[Tensor]]:
    """Whether it is a list or tuple of tensors alone, which may be long."""
    return type(value) in (list, tuple) and all(is_a(part, Tensor) for part in value)


def _is_extension(module: str) -> bool:
    file = instance_dict(sys.modules.get(module)).get("__file__")
    return isinstance(file, str) and file.endswith(tuple(EXTENSION_SUFFIXES))


def _base_is_known(kind: type) -> bool:
    module = module_of(kind)
    if kind in _BASES or issubclass(kind, (np.generic, enum.Enum, Tensor)) or module in ("abc", "typing", "collections.abc", "contextlib"):
        return True
    return of_netcl(module) or (bool(kind.__flags__ & _MADE_BY_PYTHON) and of_user(module) and not _is_extension(module))


def unguarded(value: Any) -> str:
    """What a value is, if it is of a kind that no guard compares; else empty."""
    kind = type(value)
    if kind in EXACTLY_PLAIN or is_a(value, (Tensor, *_FIXED, *_CALLABLE)) or kind in _BASES:
        return ""
    if is_a(value, np.generic) and not is_a(value, np.void):
        return ""
    module = module_of(kind)
    if kind is np.ndarray:
        if value.dtype.hasobject or value.nbytes > MOST_BYTES:
            return f"an array of {value.nbytes} bytes of {value.dtype} (up to {MOST_BYTES} bytes of numbers are compared)"
        return ""
    if module.partition(".")[0] in ("typing", "pyopencl"):
        return ""
    if of_netcl(module):
        hidden = module.startswith(IMPURE_MODULES) or class_attribute(kind, "__next__") is not None
    else:
        hidden = not all(map(_base_is_known, kind.__mro__))
    return f"a {module}.{kind.__qualname__}" if hidden else ""


class Vet:
    """Finds the first value, among those a function reads, that no guard compares. ``loose`` are attributes read of nameless things."""

    def __init__(self, loose: frozenset[str]):
        self.tensors: list[Tensor] = []  # that it met, and
        self.own: list[Any] = []  # objects of netcl, which hold some
        self._loose = loose
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any, name: str, depth: int = 0) -> str:
        """The name and kind of that value; empty if there is none."""
        what = unguarded(value)
        if what:
            return f"{name} is {what}"
        if self._seen.get(id(value), MOST_DEPTH + 1) <= depth:
            return ""
        self._seen[id(value)] = depth
        if is_a(value, Tensor):
            self.tensors.append(value)
        elif is_own(value) and not is_a(value, _CALLABLE):
            self.own.append(value)
        if is_a(value, (*CONTAINERS, *SETS)):
            return self._items(value, name, depth)
        if is_a(value, BuiltinFunctionType) and (what := unvouched_call(value)):
            return f"{name} is {what}"
        if is_a(value, (MethodType, BuiltinFunctionType, MethodWrapperType)):
            return "" if value.__self__ is None else self(value.__self__, name, depth)
        if is_a(value, partial):
            return self._first([(part, f"a part of {name}") for part in (value.func, *value.args, *value.keywords.values())], depth)
        return self._attributes(value, name, depth)

    def _items(self, value: Any, name: str, depth: int) -> str:
        if all_tensors(value):
            self.tensors += value
            return ""
        if len(value) > MOST_ITEMS:
            return f"{name} is a {type(value).__name__} of {len(value)} items (up to {MOST_ITEMS} are compared)"
        if depth >= MOST_DEPTH and len(value):
            return f"{name} is nested more than {MOST_DEPTH} deep"
        if is_a(value, dict):
            return self._first(
                [(part, f"{name}[{key!r}]" if type(key) is str else f"an item of {name}") for key, part in value.items()], depth
            )
        return self._first([(part, f"{name}[{i}]") for i, part in enumerate(value)], depth)

    def _attributes(self, value: Any, name: str, depth: int) -> str:
        if is_a(value, ModuleType) and ("*" in self._loose and of_user(value.__name__)):
            return f"{name} is a module, some of whose attributes are read by computed names"
        own = instance_dict(value)
        names = [*stored_names(value, own, self._loose), *loose_names(type(value), self._loose)]
        parts = [(attribute(value, part), f"{name}.{part}") for part in names]
        kinds = (*PLAIN, list, dict) if is_own(value) and not is_a(value, FunctionType) else object
        return self._first([(part, called) for part, called in parts if is_a(part, kinds)], depth)

    def _first(self, parts: Iterable[tuple[Any, str]], depth: int) -> str:
        return next((found for part, name in parts if (found := self(part, name, depth + 1))), "")


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors that objects of netcl hold: parameters, the state of an optimizer."""
    waiting, seen, found = list(values), set(), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_a(value, (*PLAIN, type, ModuleType)):
            continue
        seen.add(id(value))
        if is_a(value, Tensor):
            found.append(value)
        elif is_a(value, (*CONTAINERS, *SETS)):
            waiting += items_of(value)
        elif is_own(value):
            waiting += instance_dict(value).values()
            waiting += [attribute(value, name) for name in loose_names(type(value), frozenset("*"))]
    return found


def stored_names(value: Any, own: Mapping[str, Any], loose: frozenset[str]) -> list[str]:
    """Those of some names that are in the ``__dict__`` of an object, or anywhere in a class; ``*`` stands for all."""
    if issubclass(type(value), type):
        return [name for name in loose if class_attribute(value, name) is not None]
    return list(own) if "*" in loose else [name for name in loose if name in own]


def loose_names(kind: type, loose: frozenset[str]) -> list[str]:
    """Those of some names that a class stores for its instances; ``*`` stands for all of its slots."""
    slots = (
        [name for one in kind.__mro__ for name, part in one.__dict__.items() if is_a(part, MemberDescriptorType)] if "*" in loose else []
    )
    return [*[name for name in loose if class_attribute(kind, name) is not None], *slots]


def unvouched_call(function: Any) -> str:
    """The name of a function written in C, if its result depends on more than its arguments or it does more than return one."""
    name = getattr(function, "__name__", "")
    of = function.__self__ if is_a(function, BuiltinFunctionType) else getattr(function, "__objclass__", None)
    if of is None or isinstance(of, ModuleType):
        module = (of.__name__ if isinstance(of, ModuleType) else module_of(function)).lstrip("_")
        return "" if _is_pure(module, name) else (name if module == "builtins" else f"{module}.{name}") + "()"
    kind = of if is_a(of, type) else type(of)
    known = _is_pure(module_of(kind).lstrip("_"), name) if is_a(of, type) else not unguarded_method(of)
    return "" if known else f"{name}() of a {module_of(kind)}.{kind.__qualname__}"


def unguarded_method(owner: Any) -> bool:
    """Whether methods of an object written in C may depend on what no guard compares."""
    kind = type(owner)
    if is_a(owner, (np.ndarray, *PLAIN, *CONTAINERS, *SETS)) or is_of_users_class(owner):
        return False
    return not _is_pure(module_of(kind).lstrip("_"), "") or is_a(owner, logging.Logger)


def unvouched_module(module: Any, name: str) -> str:
    """The name of a function of a library, written in Python, by the same measure."""
    if of_user(module):
        return ""
    return "" if _is_pure(module.lstrip("_"), name) else f"{module}.{name}()"


def _is_pure(module: str, name: str) -> bool:
    top = module.partition(".")[0]
    return top in PURE and name not in IMPURE.get(top, ()) and not module.startswith(IMPURE_MODULES)
