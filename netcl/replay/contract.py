"""The contract of a compiled function: the values and calls it may use, and a guard for each of them.

A function, and every Python function that it names, may read the following by name: plain values, tensors, containers and small arrays,
objects of the user's classes, functions, and objects of netcl. :class:`Contract` finds these values, stores their state,
and compares it before every replay. A value or a call of any other kind is a ``problem`` with a name, and the function is not replayed.

:mod:`netcl.replay.names` lists the names; no control flow is followed. An attribute of a value without a name (an item, a result, a local
variable) is guarded in every object that the function can reach. Attributes of the user's objects are looked up in
``__dict__`` and in classes, not through ``__getattr__`` or properties.
"""

from __future__ import annotations

import abc
import builtins
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, lru_cache, partial
from importlib.util import resolve_name
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from netcl.core.tensor import Tensor
from netcl.replay.kinds import (
    BASES,
    CALLABLE,
    CONTAINERS,
    EXACTLY_PLAIN,
    IMPURE,
    NO_DICT,
    holds_values,
    impure_call,
    instance_dict,
    is_a,
    is_descriptor,
    is_layer,
    is_own_object,
    is_pure,
    is_read_by_methods,
    is_users,
    is_users_function,
    is_value_class,
    items_of,
    module_of,
    of_netcl,
    of_user,
    report_layer,
    same_value,
    unguarded,
    unreported,
)
from netcl.replay.names import ANY, FIRST, names_in

MOST_ITEMS = 64  # maximum items of a container; a larger one is refused, unless it holds only tensors
MOST_DEPTH = 8  # maximum depth of nested containers
MOST_FUNCTIONS = 5000  # maximum functions of a contract; methods count once per object

#: Special methods that are read only by the syntax and the names beside them. Those of a data class read all of its fields.
_ON_REQUEST: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("__init__", "__new__", "__post_init__", "__del__", "__init_subclass__", "__set_name__", "__class_getitem__"), ()),
    **dict.fromkeys(("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__replace__"), ("copy", "deepcopy", "replace")),
    **dict.fromkeys(
        ("__repr__", "__str__", "__format__"), ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "%", "str", "repr", "format")
    ),
    **dict.fromkeys(("__eq__", "__ne__"), tuple("COMPARE_OP CONTAINS_OP index count remove hash set eq ne contains groupby".split())),
}
#: Names that read attributes by names that are not in the code.
_READ_ANY = frozenset(("__dict__", "__getattribute__", "MATCH_CLASS", "attrgetter", "dir", "format", "format_map", "methodcaller", "vars"))
#: Names that lead to values without a guard, and names that set attributes by names that are not in the code.
_UNGUARDED = frozenset(("__closure__", "__globals__", "__subclasses__", "_version", "cell_contents"))
_SETTERS = frozenset(("__delattr__", "__setattr__"))
_READ_GRADIENTS = frozenset(("grad", "step", "clip_grad_norm_", "clip_grad_value_", "unscale_grads"))
_CALLED_BY_NETCL = frozenset(("step", "zero_grad", "parameters", "forward", "backward"))  # methods of any class
_READERS = (getattr, hasattr, vars, dir)
_METHOD_TYPES = (FunctionType, property, staticmethod, classmethod)
_DESCRIPTORS = ("builtins", "collections", "enum", "types", "typing", "abc")  # modules whose descriptors return what is stored
_MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "nothing"})()
_COMPUTED: Any = object()  # an attribute that is not stored
_CONTENTS: Any = vars(CellType)["cell_contents"]
_FACTORY = vars(defaultdict)["default_factory"]
_MRO = vars(type)["__mro__"]
_REGISTERED = property(lambda _: abc.get_cache_token())
_get = object.__getattribute__


class Contract:
    """Guards for the current state of all values that a function reads. ``problem`` names the first value or call without a guard, if any.

    The values are kept alive, so that no other object takes their identity.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any] = ()):
        self.problem = ""
        self.whole = True  # no guard was left out
        self.own: list[Any] = []  # objects of netcl, which report to the recorder
        self._layers: dict[int, Any] = {}
        self._by_method: dict[int, object] = {}  # layers with a method of netcl that the function names
        self._calls_forward = self._reads_gradients = False
        self.loose: set[str] = set()
        self._optional: set[str] = set()
        self._on_request: set[str] = set()
        self._loose_stores: set[str] = set()
        self._set: set[str] = set()  # all attributes and names that are set
        self._stores: dict[tuple[int, str], tuple[Any, str, str]] = {}  # [holder, name, label]
        self._named: dict[tuple[int, str], list[Any]] = {}  # [holder, name, value, label]
        self._items: list[tuple[Callable[..., Any], Callable[..., int], Any, list[Any], str]] = []  # iterator, length, container, items
        self._arrays: list[tuple[Any, tuple[Any, ...], str]] = []
        self._tensors: dict[int, tuple[Tensor, Any, bool, str]] = {}
        self._functions: dict[int, tuple[FunctionType, CodeType, Any, Any]] = {}
        self._objects: dict[int, tuple[Any, type, str, set[str]]] = {}  # with the names that were looked up
        self._seen: dict[int, tuple[int, Any]] = {}  # depths; with the values, whose numbers stay their own
        self._walked: dict[tuple[int, int], Any] = {}
        self._pending: deque[tuple[Any, Any]] = deque()  # functions and the objects that they are methods of
        self._is_users: Callable[[Any], bool] = cache(is_users)
        first: Any = function
        self._first = first.__self__ if is_a(first, MethodType) else first  # walked even where netcl defines it
        self._visit(function, self._first.__name__ if is_a(self._first, (FunctionType, type)) else type(self._first).__name__)
        for value in arguments:
            self._visit(value, "an argument")
        self._close()
        self._finish()

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _close(self) -> None:
        """Walk pending functions, and look up attributes of unnamed values in every object, until no new values are found."""
        extent: Any = None
        while self._pending or extent != (extent := self._extent()):
            while self._pending:
                self._walk(*self._pending.popleft())
            for value, _, label, known in list(self._objects.values()):
                for name in sorted(self._names_of(value) - known):
                    known.add(name)
                    self._attribute(value, name, label)

    def _extent(self) -> tuple[int, ...]:
        return len(self.loose), len(self._optional), len(self._on_request), len(self._set), len(self._objects), len(self._walked)

    def _names_of(self, value: Any) -> set[str]:
        """Return the attributes that code may read from ``value`` without naming it: by local variables, by operators, inside netcl."""
        wanted, of_class = self.loose | self._optional, is_a(value, type)
        names = set() if of_class else set(instance_dict(value))
        if type(value) in (ModuleType, FunctionType):
            computing = {"__getattr__"} if is_a(value, ModuleType) and of_user(value.__name__) else set()
            return ({name for name in names if name[:2] != "__"} if ANY in wanted else wanted & names) | (names & computing)
        if of_class and not self._is_users(value):
            return set() if is_pure(module_of(value), "") else wanted & {name for kind in value.__mro__[:-1] for name in vars(kind)}
        kinds = [kind for kind in (*(value.__mro__ if of_class else ()), *type(value).__mro__) if self._is_users(kind)]
        defined = {name for kind in kinds for name in vars(kind)}
        names |= defined
        every = ANY in wanted or (not of_class and is_read_by_methods(type(value), self._on_request))
        found = ({name for name in names if name[:2] != "__"} if every else wanted & names) | (self._optional - {ANY})
        on_request = self._on_request | ({"__init__", "__new__", "__post_init__", "__del__", "__class_getitem__"} if of_class else set())
        methods = {name for kind in kinds for name, member in vars(kind).items() if is_a(member, _METHOD_TYPES)}
        on_request |= {"__eq__"} if "__hash__" in methods else set()  # a key of a dictionary
        found |= {name for name in methods if name[:2] == "__" == name[-2:] and (name not in _ON_REQUEST or name in on_request)}
        found |= methods & _CALLED_BY_NETCL
        if not of_class and holds_values(value):
            found |= set(instance_dict(value))
        if is_own_object(value) and not of_class and not is_layer(value):  # a method that is set in the object takes its place
            found |= (wanted | _CALLED_BY_NETCL) & {name for kind in type(value).__mro__ for name in vars(kind)}
        found |= {name for kind in kinds for name, member in vars(kind).items() if name in self._set and "__set__" in dir(type(member))}
        for base in (value if of_class else type(value)).__mro__ if kinds else ():
            if of_netcl(module_of(base)):  # netcl calls the methods that it defines
                found |= {name for name in vars(base).keys() & methods if name not in _ON_REQUEST}
        return found

    # ---- values

    def _visit(self, value: Any, label: str, depth: int = 0) -> None:
        """Guard the contents of a value. The holder of the value guards its identity."""
        kind = type(value)
        if kind in EXACTLY_PLAIN:
            return
        if problem := unguarded(value):
            self._refuse(f"it reads a value that is not guarded: {label} is {problem}")
        elif issubclass(kind, Tensor):
            self._tensors.setdefault(id(value), (value, value.realize(), value.requires_grad, label))
            if self._is_users(kind):
                self._object(value, label)
        elif kind is np.ndarray:
            self._arrays.append((value, _array_key(value), label))
        elif id(value) not in self._seen or self._seen[id(value)][0] > depth:
            self._seen[id(value)] = depth, value
            if issubclass(kind, CONTAINERS):
                self._container(value, label, depth)
            if issubclass(kind, CALLABLE):
                self._callable(value, label)
            elif not (issubclass(kind, CONTAINERS) and kind in BASES):
                self._object(value, label)

    def _container(self, value: Any, label: str, depth: int) -> None:
        base: Any = next(kind for kind in (OrderedDict, *CONTAINERS) if is_a(value, kind))  # a subclass may override its methods
        keys = [*base.__iter__(value)]
        if not (base in (list, tuple) and all(is_a(part, Tensor) for part in keys)):
            problem = f"a {type(value).__name__} of {len(keys)} items (up to {MOST_ITEMS} are compared)" if len(keys) > MOST_ITEMS else ""
            if problem or (depth >= MOST_DEPTH and keys):
                self._refuse(f"it reads a value that is not guarded: {label} is {problem or f'nested more than {MOST_DEPTH} deep'}")
                return
        self._items.append((base.__iter__, base.__len__, value, keys, label))
        if is_a(value, defaultdict):
            self._visit(self._guard(value, _Place(_FACTORY, value), "default_factory", label), label)
        if issubclass(base, dict):
            items = base.values(value)
            self._items.append((iter, len, items, [*items], label))
            for key, part in base.items(value):
                self._visit(key, f"a key of {label}", depth + 1)
                self._visit(part, f"{label}[{key!r}]" if type(key) is str else f"an item of {label}", depth + 1)
        else:
            for i, part in enumerate(keys):
                self._visit(part, f"{label}[{i}]", depth + 1)

    def _callable(self, value: Any, label: str) -> None:
        if is_a(value, partial):
            for part, called in ((value.func, label), (value.args, f"an argument of {label}"), (value.keywords, f"an argument of {label}")):
                self._visit(part, called)
        elif is_a(value, MethodType):
            self._visit(value.__self__, label)
            self._pending.append((value.__func__, value.__self__))
        elif is_a(value, FunctionType):
            self._pending.append((value, None))
            self._objects.setdefault(id(value), (value, type(value), label, set()))
        elif value in _READERS:
            self._refuse(f"it calls {value.__name__}() by another name")
        elif problem := impure_call(value):
            self._refuse(f"it reads a value that is not guarded: {label} is {problem}")
        elif (of := getattr(value, "__self__", None)) is not None and not is_a(of, (ModuleType, type)):
            self._visit(of, label)

    def _object(self, value: Any, label: str) -> None:
        kind = type(value)
        if issubclass(kind, type) and not (self._is_users(value) or is_pure(module_of(value), value.__name__) or is_value_class(value)):
            self._refuse(f"it calls {module_of(value)}.{value.__name__}()")
        if is_layer(value) and id(value) not in self._layers:
            for layer in value.modules():
                self._layers[id(layer)] = layer
                self._objects.setdefault(id(layer), (layer, type(layer), label if layer is value else type(layer).__name__, set()))
                for name in ("forward", *unreported(layer)):
                    self._attribute(layer, name, label if layer is value else type(layer).__name__)
        elif is_own_object(value) and "__wrapped__" in instance_dict(value):  # compiled
            self._visit(value.__wrapped__, label)
        if is_layer(value) or is_own_object(value):
            self.own.append(value)
        self._objects.setdefault(id(value), (value, kind, label, set()))
        for of in (kind, value) if is_a(value, type) else (kind,):
            if self._is_users(of):
                self._guard(of, _Place(_MRO, of), "__mro__", f"the base classes of {of.__name__}")

    # ---- attributes

    def _guard(self, owner: Any, holder: Any, name: str, label: str) -> Any:
        """Guard the value of a name in a mapping and return the value. ``owner`` identifies the mapping."""
        value = holder.get(name, _MISSING)
        self._named.setdefault((id(owner), name), [holder, name, value, label])
        return value

    def _attribute(self, value: Any, name: str, label: str) -> Any:
        """Guard and visit an attribute where it is stored: in the object, in a slot or in classes; returns it, or ``_COMPUTED``."""
        label = f"{label}.{name}"
        if is_a(value, ModuleType) and (type(value) is ModuleType or name in vars(value)):
            return self._of_module(value, name, label)
        own, found, of_class = instance_dict(value), _COMPUTED, is_a(value, type)
        if is_layer(value) and name not in own:
            kind = next((kind for kind in type(value).__mro__ if name in vars(kind)), None)
            if kind is not None and not self._is_users(kind) and is_a(vars(kind)[name], FunctionType):
                self._by_method[id(value)] = value  # what a method of netcl reads is not walked
        if not of_class and (name in own or name in self._optional):
            found = self._guard(value, own, name, label)
            reports = is_own_object(value) and not (is_layer(value) or holds_values(value) or value is self._first)
            if found is not _MISSING and not (reports and (is_a(found, Tensor) or is_own_object(found))):
                self._visit(found, label)
        elif is_own_object(value) and not of_class and not is_layer(value):
            self._guard(value, own, name, label)
        for kind in (*(value.__mro__ if of_class else ()), *type(value).__mro__):
            if self._is_users(kind) or value is self._first or (name == "forward" and is_layer(value)):
                if name in vars(kind) or found is _COMPUTED:
                    member = self._guard(kind, vars(kind), name, label)
                    stored = _COMPUTED if member is _MISSING else self._member(value, member, label)
                    found = stored if found is _COMPUTED or (stored is _COMPUTED and member is not _MISSING) else found
            elif of_class and found is _COMPUTED and name in vars(kind) and name[:2] != "__":
                self._of_library(getattr(value, name, None), label)  # a method of a library's class
        return found

    def _member(self, owner: Any, member: Any, label: str) -> Any:
        """If ``member`` is a function, queue it as a method of ``owner`` and return ``_COMPUTED``; visit and return any other value."""
        instance = None if is_a(owner, type) else owner
        if is_a(member, FunctionType):
            self._pending.append((member, instance))
        elif is_a(member, (staticmethod, classmethod)):
            of = None if is_a(member, staticmethod) else owner if instance is None else type(owner)
            self._pending.append((member.__func__, of))
        elif is_a(member, (property, cached_property)):
            first = owner if instance is None and not any(member in vars(kind).values() for kind in owner.__mro__) else instance
            self._pending += [(f, first) for f in ((member.fget, member.fset) if is_a(member, property) else (member.func,))]
        elif is_a(member, MemberDescriptorType):
            if instance is not None and is_a(owner, member.__objclass__):
                stored = self._guard(member, _Place(member, owner), str(id(owner)), label)
                self._visit(None if stored is _MISSING else stored, label)
                return stored
        elif not (module_of(type(member)).lstrip("_") in _DESCRIPTORS and is_descriptor(member)):
            self._visit(member, label)
            return _COMPUTED if is_descriptor(member) else member
        return _COMPUTED

    def _of_module(self, module: ModuleType, name: str, label: str) -> Any:
        if name not in vars(module):
            self._pending.append((vars(module).get("__getattr__") if of_user(module.__name__) else None, None))
            return _COMPUTED
        value = self._guard(vars(module), vars(module), name, label)
        if of_user(module.__name__):
            self._visit(value, label)
        elif module.__name__.startswith("numpy.random"):
            self._refuse(f"it reads a value that is not guarded: {label} is random")
        elif not (of_netcl(module.__name__) and not is_a(value, (type, *CALLABLE))):
            self._of_library(value, label)
        return value

    def _of_library(self, value: Any, label: str) -> None:
        """Guard a value of a library: its functions must be pure, its data is compared."""
        if is_a(value, (FunctionType, BuiltinFunctionType)) and not is_users_function(value):
            if module_of(value) in ("copy", "dataclasses") or value in _READERS:
                self.loose.add(ANY)
            if problem := impure_call(value):
                self._refuse(f"it calls {problem}")
        elif not is_a(value, ModuleType):
            self._visit(value, label)

    # ---- functions

    def _walk(self, function: Any, owner: Any) -> None:
        """Guard the globals, closure variables and attributes that a function uses. ``owner`` is the object whose method it is."""
        if not is_a(function, FunctionType) or (id(function), id(owner)) in self._walked:
            return
        self._walked[id(function), id(owner)] = function, owner
        if len(self._walked) > MOST_FUNCTIONS:
            self._refuse(f"it names more than {MOST_FUNCTIONS} functions")
            return
        if (inner := instance_dict(function).get("__wrapped__")) is not None:
            self._visit(inner, function.__name__)
        if not is_users_function(function) and function is not self._first and owner is not self._first:
            if problem := impure_call(function):
                self._refuse(f"it calls {problem}")
            for cell in function.__closure__ or ():  # a library may make a function of the user's functions, as singledispatch does
                held = _Place(_CONTENTS, cell).get("")
                parts = items_of(held) if is_a(held, (dict, list, tuple)) else (held,)
                if any(is_users_function(part) or (is_a(part, FunctionType) and not of_netcl(part.__module__)) for part in parts):
                    self._visit(held, function.__name__)
            return
        self._functions[id(function)] = function, function.__code__, function.__defaults__, function.__kwdefaults__
        for part in (function.__defaults__, function.__kwdefaults__):
            self._visit(part, f"a default of {function.__qualname__}")
        names = names_in(function.__code__)
        self.loose |= names.loose
        self._optional |= names.optional
        self._loose_stores |= names.loose_stores
        self._set |= names.loose_stores | {path[-1] for path in names.stores}
        used = names.syntax | names.loose | {name for path in names.paths for name in path}
        self._on_request |= {name for name, by in _ON_REQUEST.items() if name in used or not used.isdisjoint(by)}
        self._calls_forward |= "forward" in used
        self._reads_gradients |= not used.isdisjoint(_READ_GRADIENTS)
        if not used.isdisjoint(("isinstance", "issubclass", "MATCH_CLASS")):
            self._guard(abc, _Place(_REGISTERED, abc), "", "the subclasses registered with an abstract class")
        for name in sorted(used & (_UNGUARDED if function.__name__[:2] == "__" else _UNGUARDED | _SETTERS)):
            self._refuse(f"it uses {name}")
        if ANY in names.optional or used & _READ_ANY:
            self.loose.add(ANY)
        if "MATCH_CLASS" in used:
            self._optional.add("__match_args__")
        for module, level, name in sorted(names.imports):
            self._import(function, module, level, name)
        for first, *rest in sorted(names.paths):
            self._read(function, owner, first, rest)
        for first, *rest in sorted(names.stores):
            self._store(function, owner, first, rest)

    @staticmethod
    def _root(function: FunctionType, name: str) -> tuple[Any, Any]:
        """Return the owner and the mapping in which a name of a function is looked up."""
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            return cell, _Place(_CONTENTS, cell)
        return function.__globals__, function.__globals__

    def _read(self, function: FunctionType, owner: Any, first: str, rest: Sequence[str]) -> None:
        """Guard every value along a chain of names, such as ``model.layer.weight``."""
        if first == FIRST:
            if owner is None:
                self.loose.update(rest)
                return
            value, label = owner, self._objects[id(owner)][2] if id(owner) in self._objects else type(owner).__name__
        else:
            value, label = self._guard(*self._root(function, first), first, first), first
            if value is _MISSING and first in vars(builtins):
                value = self._guard(builtins, vars(builtins), first, first)
                if first in IMPURE["builtins"]:
                    self._refuse(f"it calls {first}()")
                return
        if value is _MISSING:
            return
        if not (rest and is_a(value, ModuleType)) and first != "__class__":
            self._visit(value, label)
        for i, name in enumerate(rest):
            value, label = self._attribute(value, name, label), f"{label}.{name}"
            if value is _COMPUTED or value is _MISSING:
                self.loose.update(rest[i + 1 :])
                return
        if rest and is_a(value, ModuleType):
            self._visit(value, label)

    def _import(self, function: FunctionType, module: str, level: int, name: str) -> None:
        module = resolve_name("." * level + module, function.__globals__.get("__package__") or "") if level else module
        found = self._guard(sys.modules, sys.modules, module, module)
        if found is _MISSING:
            self._refuse(f"it imports {module}, which is not loaded")
        elif name:
            value = self._attribute(found, name, module)
            self._visit(None if value is _COMPUTED else value, f"{module}.{name}")
        else:
            self._visit(found, module)
            self._visit(sys.modules[module.partition(".")[0]], module)

    def _store(self, function: FunctionType, owner: Any, first: str, rest: Sequence[str]) -> None:
        """Record which name or attribute a function sets."""
        at, holder = (owner, NO_DICT) if first == FIRST else self._root(function, first)
        if rest:
            value = owner if first == FIRST else holder.get(first)
            for name in rest[:-1]:
                value = _stored(value, name)
            if value is None:
                self._loose_stores.add(rest[-1])
                return
            at, holder = value, _holder(value, rest[-1])
        name = rest[-1] if rest else first
        self._stores[id(at), name] = holder, name, ".".join((first, *rest)).lstrip(".")

    # ---- comparing

    def _finish(self) -> None:
        """Sort the guards by how they are compared. A tensor that the function itself sets is guarded by shape and dtype alone."""
        objects = [(value, kind, label) for value, kind, label, _ in self._objects.values()]
        for value, _, label in objects:
            for name in self._loose_stores & instance_dict(value).keys():
                self._stores.setdefault((id(value), name), (instance_dict(value), name, f"{label}.{name}"))
        self._kinds: list[tuple[Any, str, Any, str]] = []
        for key, (holder, name, _) in self._stores.items():
            entry = self._named.get(key)
            if entry is not None and (is_a(entry[2], Tensor) or entry[2] is None or entry[2] is _MISSING):
                del self._named[key]
                self._kinds.append((holder, name, _tensor_kind(holder.get(name)), entry[3]))
                self._tensors = {i: one for i, one in self._tensors.items() if one[3] != entry[3]}
        named = self._named.values()
        self._mappings = [entry for entry in named if type(entry[0]) is not _Place]
        self._places = [[entry[0].read, *entry[2:]] for entry in named if type(entry[0]) is _Place]
        stateful = [one for one in objects if not is_a(one[0], (type, ModuleType))]
        self._instances = [one for one in stateful if is_layer(one[0]) or not is_own_object(one[0])]
        self._own_dicts = [(value, own, label) for value, _, label in self._instances
                           if (own := instance_dict(value)) is not NO_DICT and not is_own_object(value)]  # fmt: skip
        classes = {id(kind): kind for value, *_ in objects for kind in (value if is_a(value, type) else type(value)).__mro__}
        named_classes = [(vars(kind), f"class {kind.__name__}") for kind in classes.values() if self._is_users(kind)]
        self._name_lists = [(own, list(own), label) for own, label in (*[one[1:] for one in self._own_dicts], *named_classes)]
        self.state = (
            *[(label, _signature(value)) for _, _, value, label in named],
            *[(length(container), *map(_signature, items)) for _, length, container, items, _ in self._items],
            *[key for _, key, _ in self._arrays],
            *[(i, id(buffer), requires_grad) for i, (_, buffer, requires_grad, _) in self._tensors.items()],
            *[(id(function), id(code)) for function, code, *_ in self._functions.values()],
            *[(id(value), id(kind)) for value, kind, _ in self._instances],
            *[tuple(names) for _, names, _ in self._name_lists],
            *[(label, kind) for _, _, kind, label in self._kinds],
        )

    def leave_out(self, parts: Iterable[tuple[Any, str, Any]]) -> None:
        """Drop the guards of attributes that a recording guards itself; ``parts`` are (dictionary, name, value)."""
        self.whole = False
        guarded = {(id(holder), name): value for holder, name, value in parts}
        self._mappings = [entry for entry in self._mappings if (id(entry[0]), entry[1]) not in guarded]
        for value in guarded.values():
            self._tensors.pop(id(value), None)

    def equals(self, other: Contract) -> bool:
        """Whether two contracts were made over the same objects and equal values."""
        return self.state == other.state

    def changed(self, by_itself: bool = False) -> str:
        """Return the name of a value that no longer fits its guard; empty if none. ``by_itself`` skips tensors that the function sets.

        This runs before every replay, so most of it is plain loops over identities.
        """
        for entry in self._mappings:
            holder, name, value, label = entry
            now = holder.get(name, _MISSING)
            if now is not value:
                if not same_value(value, now):
                    return label
                entry[2] = now
        for entry in self._places:
            read, value, label = entry
            try:
                now = read()
            except (AttributeError, ValueError):  # an empty slot or variable
                now = _MISSING
            if now is not value:
                if not same_value(value, now):
                    return label
                entry[1] = now
        for value, kind, label in self._instances:
            if type(value) is not kind:
                return label
        for value, own, label in self._own_dicts:
            if _get(value, "__dict__") is not own:
                return label
        for own, names, label in self._name_lists:
            if list(own) != names:
                return label
        for t, buffer, requires_grad, label in self._tensors.values():
            if t.memory is not buffer or t.requires_grad is not requires_grad:
                return label
        for function, code, defaults, keywords in self._functions.values():
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ is not keywords:
                return function.__qualname__
        for iterate, length, container, items, label in self._items:
            if length(container) != len(items):
                return label
            for i, now in enumerate(iterate(container)):
                if now is not items[i]:
                    if not same_value(items[i], now):
                        return label
                    items[i] = now
        for array, key, label in self._arrays:
            if _array_key(array) != key:
                return label
        for holder, name, kind, label in () if by_itself else self._kinds:
            if _tensor_kind(holder.get(name)) != kind:
                return label
        return ""

    # ---- tensors

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the function reaches by name, alone or in objects of netcl."""
        return [*[one[0] for one in self._tensors.values()], *tensors_of(self.own)]

    def graded(self) -> list[Tensor]:
        """Return the tensors whose ``grad`` the function may read or set."""
        if not self._reads_gradients and "grad" not in self._set:
            return []
        return [*[one[0] for one in self._tensors.values()], *[t for t in tensors_of(self.own) if t.requires_grad]]

    def left(self) -> list[Left]:
        """Return the names and attributes that the function sets, with their current values."""
        return [Left(holder, name, holder.get(name), label) for holder, name, label in self._stores.values()]

    def carried(self) -> str:
        """Return a clause for an error message that names the tensors that the function sets itself; empty if there are none."""
        labels = ", ".join(label for *_, label in self._kinds)
        return f" except {labels}, which it sets itself" if labels else ""

    def report_uncalled(self) -> None:
        """Report to the recorder each module whose ``forward`` or another method the function may call without calling the module."""
        for layer in (self._layers if self._calls_forward else self._by_method).values():
            report_layer(layer)


class Left(NamedTuple):
    """A name or attribute that a function sets. A replay does not set it again, but overwrites the memory of its tensors."""

    holder: Any
    name: str
    value: Any
    label: str

    def is_there(self) -> bool:
        """Whether the name still has the value that the recording set."""
        now = self.holder.get(self.name)
        return now is self.value or same_value(self.value, now)

    def tensors(self) -> list[Tensor]:
        held = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return [t for t in held if isinstance(t, Tensor)]


class _Place:
    """A slot of an object or a variable of a closure, as a mapping. ``read`` raises if the slot or variable is empty."""

    def __init__(self, descriptor: Any, owner: Any):
        self.owner = owner
        self.read = partial(descriptor.__get__, owner)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self.read()
        except (AttributeError, ValueError):
            return default


def _holder(value: Any, name: str) -> Any:
    """Return the mapping in which an object stores an attribute."""
    slot = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return _Place(slot, value) if is_a(slot, MemberDescriptorType) else instance_dict(value)


def _stored(value: Any, name: str) -> Any:
    """Return an attribute that is stored in the object or its class; ``None`` for a computed attribute."""
    found = _holder(value, name).get(name)
    for kind in (value if is_a(value, type) else type(value)).__mro__ if found is None else ():
        if name in vars(kind):
            found = vars(kind)[name]
            return None if is_descriptor(found) else found
    return found


def _signature(value: Any) -> Any:
    """Return the part of a value that contracts compare: a plain value itself, the class of a container, the identity of anything else."""
    kind = type(value)
    if kind in EXACTLY_PLAIN or issubclass(kind, np.generic):
        return kind, repr(value)
    return kind if kind in CONTAINERS else id(value)


def _array_key(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


def _tensor_kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.requires_grad) if is_a(value, Tensor) else None if value is None else id(value)


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in values: alone, in containers, in closures, and in objects of netcl, such as the state of an optimizer."""
    waiting, seen, found = list(values), set(), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or type(value) in EXACTLY_PLAIN or is_a(value, (type, ModuleType)):
            continue
        seen.add(id(value))
        if is_a(value, Tensor):
            found.append(value)
        elif is_a(value, CONTAINERS):
            waiting += items_of(value)
        elif is_a(value, partial):
            waiting += (value.func, *value.args, *value.keywords.values())
        elif is_a(value, MethodType):
            waiting.append(value.__self__)
        elif is_a(value, FunctionType):
            waiting += [*(_Place(_CONTENTS, cell).get("") for cell in value.__closure__ or ()), *instance_dict(value).values()]
        elif is_layer(value) or is_own_object(value):
            kind: Any = type(value)
            waiting += [*(_Place(slot, value).get("") for slot in _slots_of(kind)), *instance_dict(value).values()]
    return found


@lru_cache(1024)  # a recording may walk the plans of a queue: thousands of objects of few classes
def _slots_of(kind: type) -> list[MemberDescriptorType]:
    return [x for base in kind.__mro__ for x in vars(base).values() if is_a(x, MemberDescriptorType) and issubclass(kind, x.__objclass__)]
