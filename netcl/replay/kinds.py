"""Values that a guard can compare, and calls that a replay may omit. All others are reported by name.

Objects are inspected by ``type`` and ``__dict__``, because the user's classes may override ``__class__`` and ``__getattr__``.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import io
import pathlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from netcl.core.next_list import NextList
from netcl.core.tensor import Tensor

EXACTLY_PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None)))
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, partial)
#: Classes of Python's library that a user's class may extend: they hold no state but what is guarded.
BASES = frozenset((object, SimpleNamespace, NextList, OrderedDict, defaultdict, Counter, decimal.Decimal, fractions.Fraction,
                   *CONTAINERS, *EXACTLY_PLAIN))  # fmt: skip
MOST_BYTES = 4096  # of an array
NO_DICT: dict[str, Any] = {}  # of an object without attributes of its own

#: Functions that are not pure, though those of their module are.
IMPURE = {
    "builtins": frozenset("__import__ breakpoint delattr eval exec globals input locals open print setattr".split()),
    "numpy": frozenset("dump fromfile geterr get_printoptions memmap seterr set_printoptions tofile".split()),
}
_IMPURE_MODULES = ("netcl.data", "netcl.io", "numpy.random", "numpy.lib._npyio", "numpy.lib.npyio", "numpy.lib._datasource")
_OF_VALUES = ("netcl.distributions.", "netcl.fft")  # modules whose objects hold numbers and tensors
#: Modules whose functions depend on their arguments alone.
_PURE = frozenset(
    "abc bisect builtins cmath collections contextlib copy copyreg dataclasses enum fractions functools heapq itertools math"
    " ml_dtypes netcl numbers numpy operator re reprlib sre statistics string struct types typing".split()
)
_LIBRARIES = {*sys.stdlib_module_names, "netcl", "numpy", "pyopencl", "pytools", "platformdirs", "ml_dtypes", "mpi4py"}
_VALUES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction, pathlib.PurePath,
           enum.Enum)  # fmt: skip
_FIXED = (type, ModuleType, CodeType, np.dtype, np.ufunc, type(np.sum), range, slice, re.Pattern, type(Ellipsis), type(NotImplemented),
          *_VALUES)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code defines
_MODULE: Any = vars(type)["__module__"]  # which a class may hide


def is_a(value: Any, kinds: Any) -> bool:
    """Whether ``value`` is an instance of ``kinds`` by its real class: an object may compute its ``__class__``."""
    return issubclass(type(value), kinds)


def instance_dict(value: Any) -> Mapping[str, Any]:
    """Return the ``__dict__`` of an object or a class; empty if there is none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return NO_DICT


def is_layer(value: Any) -> bool:
    """Whether ``value`` is a module: an object that reports its parameters and settings to the recorder."""
    return any("_report_to_recorder" in vars(kind) for kind in type(value).__mro__)


def unreported(layer: object) -> list[str]:
    """Return the attributes that methods of netcl may read in a layer, and that it does not report: functions, containers, objects."""
    if all(not of_netcl(module_of(kind)) or "_report_to_recorder" in vars(kind) for kind in type(layer).__mro__):
        return []  # its methods are the user's, and name what they read
    parts = [(name, part) for name, part in instance_dict(layer).items() if name[0] != "_" and not _is_reported(part)]
    return [name for name, part in parts if not unguarded(part)]


def _is_reported(value: object) -> bool:
    return (
        type(value) in EXACTLY_PLAIN
        or is_a(value, (Tensor, type))
        or is_layer(value)
        or (type(value) is tuple and all(map(_is_reported, value)))
    )


def report_layer(layer: Any) -> None:
    """Let a module report its parameters and settings to the active recorder."""
    layer._report_to_recorder()


def items_of(container: Any) -> Iterable[Any]:
    """Return the items of a container; of a dictionary, keys and values alternately."""
    return (part for pair in container.items() for part in pair) if is_a(container, dict) else container


def module_of(kind: Any) -> str:
    """Return the name of the module that defines a class or a function."""
    name = _MODULE.__get__(kind) if isinstance(kind, type) else getattr(kind, "__module__", None)
    return name if isinstance(name, str) else "builtins"


def of_netcl(module: str) -> bool:
    return module == "netcl" or module.startswith("netcl.")


def of_user(module: Any) -> bool:
    return not is_a(module, str) or module.partition(".")[0] not in _LIBRARIES


def is_own_object(value: Any) -> bool:
    """Whether ``value`` is an object that netcl defines."""
    return of_netcl(module_of(type(value)))


def holds_values(value: object) -> bool:
    """Whether ``value`` is an object of netcl, or of a class derived from netcl's, that the program sets and whose methods set nothing."""
    return any(module_of(kind).startswith(_OF_VALUES) for kind in type(value).__mro__)


def is_users(kind: type) -> bool:
    """Whether a class was written by the user, in Python."""
    if not kind.__flags__ & _HEAP_TYPE or not of_user(module_of(kind)):
        return False
    file = instance_dict(sys.modules.get(module_of(kind))).get("__file__")
    return not (isinstance(file, str) and file.endswith(tuple(EXTENSION_SUFFIXES)))


def is_descriptor(value: object) -> bool:
    """Whether an attribute of a class is computed: ``value`` in the class decides what is read from an object."""
    return any("__get__" in vars(kind) for kind in type(value).__mro__)


def is_read_by_methods(kind: type, called: Collection[str]) -> bool:
    """Whether methods of a library read attributes of objects of this class; ``called`` are special methods that are called."""
    if issubclass(kind, SimpleNamespace) and ("__eq__" in called or "__repr__" in called):
        return True
    return issubclass(kind, enum.Enum) or any(module_of(base) == "contextlib" for base in kind.__mro__)


def is_users_function(function: Any) -> bool:
    return (
        is_a(function, FunctionType)
        and of_user(function.__globals__.get("__name__"))
        and not function.__code__.co_filename.startswith("<op ")  # the function of a row
    )


def _base_is_known(kind: type) -> bool:
    module = module_of(kind)
    known = kind in BASES or issubclass(kind, (np.generic, enum.Enum, Tensor)) or of_netcl(module) or is_users(kind)
    return known or module in ("abc", "typing", "collections.abc", "contextlib")


def unguarded(value: Any) -> str:
    """Return a description of ``value`` if no guard compares values of its kind; else empty."""
    kind, module = type(value), module_of(type(value))
    if kind is np.ufunc and set("".join(value.types)) <= set("O->"):  # of np.frompyfunc: no name leads to the Python function that it calls
        return "a NumPy function of Python objects"
    if is_a(value, pathlib.Path):
        return f"a {kind.__name__}, which stands for a file"
    if kind in BASES or is_a(value, (Tensor, *_FIXED, *CALLABLE)) or (is_a(value, np.generic) and not is_a(value, np.void)):
        return ""
    if kind is np.ndarray:
        fits = value.nbytes <= MOST_BYTES and not value.dtype.hasobject
        return "" if fits else f"an array of {value.nbytes} bytes of {value.dtype} (up to {MOST_BYTES} bytes of numbers are compared)"
    if module.partition(".")[0] in ("_abc", "typing", "pyopencl"):
        return ""
    if of_netcl(module):
        hidden = module.startswith(_IMPURE_MODULES) or any("__next__" in vars(one) for one in kind.__mro__)
    else:
        hidden = not all(map(_base_is_known, kind.__mro__))
    return f"a {module}.{kind.__qualname__}" if hidden else ""


def is_pure(module: str, name: str) -> bool:
    module = module.lstrip("_")
    top = module.partition(".")[0]
    return top in _PURE and name not in IMPURE.get(top, ()) and not module.startswith(_IMPURE_MODULES)


def impure_call(function: Any) -> str:
    """Return the name of a library function whose result depends on more than its arguments, or that has side effects; else empty."""
    name = getattr(function, "__name__", "")
    if is_a(function, FunctionType):
        row = function.__code__.co_filename.startswith("<op ")
        module = "netcl" if row else str(function.__globals__.get("__name__", ""))
        return "" if is_pure(module, name) else f"{module}.{name}()"
    of = function.__self__ if is_a(function, BuiltinFunctionType) else getattr(function, "__objclass__", None)
    if of is None or isinstance(of, ModuleType):
        module = (of.__name__ if isinstance(of, ModuleType) else module_of(function)).lstrip("_")
        return "" if is_pure(module, name) else (name if module == "builtins" else f"{module}.{name}") + "()"
    kind = of if is_a(of, type) else type(of)
    known = is_a(of, (np.ndarray, np.generic, *CONTAINERS, *EXACTLY_PLAIN)) or (not is_a(of, type) and is_users(kind))
    return "" if known or is_pure(module_of(kind), name) else f"{name}() of a {module_of(kind)}.{kind.__qualname__}"


def is_value_class(kind: type) -> bool:
    """Whether a library class makes plain values, which share no state with anything else (exceptions and ``io.BytesIO``, too)."""
    return issubclass(kind, (*_VALUES, BaseException, io.BytesIO, io.StringIO)) and not issubclass(kind, pathlib.Path)


def same_value(old: Any, new: Any) -> bool:
    """Whether two plain values are equal; 0.0 is not -0.0, and NaN equals itself."""
    return type(old) is type(new) and (type(old) in EXACTLY_PLAIN or is_a(old, np.generic)) and repr(old) == repr(new)
