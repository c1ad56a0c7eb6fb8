"""Which functions take part in a call, and what they name: read off their code, and seen while they run.

Those that are found in containers, come as arguments or belong to a class above have no name in the code that calls them.
"""

from __future__ import annotations

import builtins
import dis
import gc
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from netcl.core.tensor import Tensor
from netcl.runtime.contract import (
    CONTAINERS,
    MOST_DEPTH,
    MOST_ITEMS,
    PLAIN,
    SETS,
    attribute,
    class_attribute,
    instance_dict,
    is_a,
    is_foreign,
    is_layer,
    is_of_users_class,
    items_of,
    method_of,
    module_of,
    of_netcl,
    of_user,
    unguarded,
    unvouched_call,
    unvouched_module,
)

MOST_FUNCTIONS = 5000  # that are followed, methods once for every layer

Place = tuple[Any, str | None]  # a closure's cell and None, or a dictionary of names and one of them
Path = tuple[str, ...]


def value_at(place: Place) -> Any:
    """What is there now; ``None`` for a name that is not bound."""
    holder, name = place
    if name is not None:
        return holder.get(name)
    try:
        return holder.cell_contents
    except ValueError:
        return None


class _Reads(NamedTuple):
    """What code reads: attributes by way of names (``a``, ``a.b``, ``a.b.c``), and those of things without a name; and what it sets."""

    paths: set[Path]
    loose: set[str]
    sets: set[Path]
    sets_loose: set[str]
    imports: set[Path]  # modules, and names of them


_NAMED = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")
_BY_NAME = frozenset(("getattr", "hasattr"))  # whoever calls these with a text names an attribute, and
_BY_ANY_NAME = frozenset(("vars", "attrgetter", "__dict__", "dir"))  # whoever uses these may mean any
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
#: What comes after ``self`` where an attribute of it is meant, and not the whole.
_OF_SELF = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER", "COPY", "DUP_TOP")
_FIRST = ""  # stands for the first argument, whatever its name: in a method, whose the method is


def _names_read(code: CodeType) -> _Reads:
    """Of a function and those inside it; what is only set, or always before it is read, is left out, and so are methods of things without a
    name of their own."""
    local: dict[str, Path] = dict.fromkeys((*code.co_varnames, *code.co_cellvars), ())
    local |= dict.fromkeys(code.co_varnames[: min(1, code.co_argcount)], (_FIRST,))
    reads = _Reads(set(), set(), set(), set(), set())
    path: Path = ()
    made: set[Path] = set()
    branched, module = False, ""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG")]
    for i, step in enumerate(steps):
        branched = branched or step.opcode in _JUMPS
        if step.opname.startswith(_NAMED) or step.opname == "STORE_FAST_LOAD_FAST":
            name = step.argval if isinstance(step.argval, str) else step.argval[-1]  # some load two
            path = local.get(name, (name,))
            following = steps[i + 1].opname if i + 1 < len(steps) else ""
            if (path == (_FIRST,) and not following.startswith(_OF_SELF)) or (
                name != step.argval and local.get(step.argval[0]) == (_FIRST,)
            ):
                reads.paths.add((_FIRST, ""))
            if name in _BY_NAME and name not in local:
                reads.loose.add(_attribute_named(steps[i + 1 : i + 12]))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not path:
                reads.loose.add(step.argval)
            path = (*path, step.argval) if path and (*path, step.argval) not in made else ()
        elif step.opname in ("COPY", "DUP_TOP") and step.arg in (None, 1):  # of ``a.b += 1``
            continue
        else:
            if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                if path and not branched and (*path, step.argval) not in reads.paths:
                    made.add((*path, step.argval))
                reads.sets.add((*path, step.argval)) if path else reads.sets_loose.add(step.argval)
            elif step.opname.endswith("_GLOBAL") or (step.opname.endswith("_DEREF") and step.argval in code.co_freevars):
                reads.sets.add((step.argval,))
            elif step.opname in ("IMPORT_NAME", "IMPORT_FROM"):
                module = step.argval if step.opname == "IMPORT_NAME" else module
                reads.imports.add((module,) if step.opname == "IMPORT_NAME" else (module, step.argval))
            elif step.opname == "MATCH_CLASS":
                reads.loose.add("*")
            path = ()
        reads.paths.add(path)
    reads.paths.discard(())
    if any(_BY_ANY_NAME.intersection(path) for path in reads.paths) or "__dict__" in reads.loose:
        reads.loose.add("*")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            _include(reads, _names_read(part), local)
    return reads


def _attribute_named(steps: Sequence[dis.Instruction]) -> str:
    """The attribute that ``getattr`` reads, if it is a constant; ``*``, any, if not. ``steps`` follow the name ``getattr``."""
    rest = list(steps[1:]) if steps and steps[0].opname.startswith(_NAMED) and isinstance(steps[0].argval, str) else []
    while rest and rest[0].opname == "LOAD_ATTR":
        rest.pop(0)
    named = len(rest) > 1 and rest[0].opname == "LOAD_CONST" and isinstance(rest[0].argval, str)
    if named and rest[1].opname.startswith((*_NAMED, "LOAD_CONST")):  # a default
        rest.pop(1)
    ends = named and len(rest) > 1 and rest[1].opname in ("CALL", "CALL_FUNCTION")
    return rest[0].argval if ends else "*"


def _include(reads: _Reads, inner: _Reads, local: Mapping[str, Path]) -> None:
    """What a function inside another one reads and sets, as the other one sees it."""
    reads.loose.update(inner.loose)
    reads.imports.update(inner.imports)
    reads.sets_loose.update(inner.sets_loose)
    for paths, found, loose in ((inner.paths, reads.paths, reads.loose), (inner.sets, reads.sets, reads.sets_loose)):
        for name, *rest in paths:
            start = () if name == _FIRST else local.get(name, (name,))
            if start:
                found.add((*start, *rest))
            else:
                loose.update(rest)


class Seen:
    """A profiler that notes which functions of the user's run, and of which objects, and the first call that no guard vouches for.

    Layers whose ``forward`` runs without a call of the layer tell what they rest on all the same.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[int, CodeType], Callable[[], Any]] = {}  # with the object, weakly: those the step makes are gone after it
        self.problem = ""
        self._passed: set[CodeType] = set()
        self._aside: FrameType | None = None  # an import or a log message: what these run is no part of the step

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if self._aside is not None:
            if event == "return" and frame is self._aside:
                self._aside = None
        elif event == "call":
            if code not in self._passed:
                self._called(frame, code)
        elif event == "c_call" and not self.problem and code not in self._passed and _is_foreign_code(frame):
            hidden = arg in _READERS and arg.__name__ not in code.co_names
            self.problem = f"{arg.__name__}() by another name" if hidden else unvouched_call(arg)

    def _called(self, frame: FrameType, code: CodeType) -> None:
        forward, foreign = code.co_name == "forward", _is_foreign_code(frame)
        if not forward and not foreign:
            callback = "selfref" in code.co_varnames  # of a weak container, run where something dies: no call of the step
            what = "" if callback else unvouched_module(frame.f_globals.get("__name__"), code.co_name)
            if not what and frame.f_globals.get("__name__") not in _ASIDE:
                self._passed.add(code)
            elif not self.problem and frame.f_back is not None and _is_foreign_code(frame.f_back):
                self.problem = what
            if frame.f_globals.get("__name__") in _ASIDE:
                self._aside = frame
            return
        if code.co_name[0] == "<" and code.co_name != "<lambda>":
            return
        first: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        layer = is_layer(first)
        if forward and layer and class_attribute(type(first), "_tell_recorder") is not None:
            first._tell_recorder()
        if foreign:
            owner = first if layer or (is_of_users_class(first) and class_attribute(type(first), "__weakref__") is not None) else None
            self.calls[id(owner), code] = _nobody if owner is None else weakref.ref(owner)


_READERS = (getattr, hasattr, vars, dir)  # of attributes, whose names are in the code where these are
_ASIDE = frozenset(("importlib._bootstrap", "_frozen_importlib", "logging", "warnings"))


def _is_foreign_code(frame: FrameType) -> bool:
    """Whether a frame runs code of the user's; classes and rows that Python and netcl write have no module."""
    name = frame.f_globals.get("__name__")
    if isinstance(name, str) and name in sys.modules:
        return of_user(name)
    return not frame.f_code.co_filename.startswith(("<op ", "<frozen")) and "__builtins__" in frame.f_globals and name is None


def _nobody() -> None:
    return None


def _taken_apart(function: Any) -> tuple[Any, Any]:
    """Whose method it is, and the function itself."""
    return (function.__self__, function.__func__) if is_a(function, MethodType) else (None, function)


class Search:
    """The functions that take part in a call, as far as they can be seen, and where they read. What was found stays."""

    def __init__(self, function: Callable[..., Any]):
        self.loose: set[str] = set()
        self.sets: dict[tuple[int, str | None, Path], tuple[Place, Path]] = {}
        self.sets_loose: set[str] = set()
        self.names: dict[tuple[int, str | None], str] = {}  # of places, for people
        self.functions: dict[int, FunctionType] = {}
        self.methods: dict[tuple[type, str], None] = {}
        self.library: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}  # names of modules that are not the user's
        self.random: dict[str, None] = {}  # functions of NumPy that are
        self.layers: dict[int, Any] = {}
        self._roots: dict[tuple[int, str | None], tuple[Place, set[Path]]] = {}
        self._holders: dict[int, dict[str, Any]] = {}
        self._function = function
        self._first = _taken_apart(function)[0]
        self._observed: list[Any] = []
        self.complete = True
        self._waiting: list[Any] = []
        self._reach: dict[tuple[Any, ...], Path] = {}
        self._seen: dict[tuple[int, int], Any] = {}  # with the functions themselves, whose numbers stay their own then

    def walk(self, arguments: Sequence[Any]) -> None:
        """From the function, its arguments and what was seen to run, over all that can be called."""
        self._waiting, self._seen = [self._function, *self._observed], {}
        self._go_on(list(arguments))
        while self._waiting and len(self._seen) < MOST_FUNCTIONS:
            one = self._waiting.pop()
            owner, code = _taken_apart(one)
            if (id(owner), id(code)) not in self._seen:
                self._seen[id(owner), id(code)] = one
                self._open(owner, code)
        self.complete = self.complete and not self._waiting

    def fixed(self) -> list[tuple[Any, str, Any]]:
        """What must stay the same object, as it is now, in mappings by name: methods of classes, and names of modules that are not the
        user's. An attribute that hides another one is none of a mapping above."""
        found = [(names, name, names.get(name)) for names, name in self.library.values()]
        for kind, name in self.methods:
            for one in kind.__mro__:
                found.append((vars(one), name, vars(one).get(name)))
                if name in vars(one):
                    break
        return found

    @property
    def extent(self) -> tuple[int, int]:
        """How much was found: it only grows."""
        return len(self.loose), sum(len(paths) for _, paths in self._roots.values())

    def add(self, calls: Mapping[tuple[int, CodeType], Callable[[], Any]], arguments: Sequence[Any]) -> None:
        """Functions that were seen to run: those that the walk had not come to. Code does not know whose it is, and the collector does."""
        given = {id(value) for value in arguments if not is_layer(value)}  # whose attributes are compared anyway
        known = set()
        for one in self._seen.values():
            owner, function = _taken_apart(one)
            known.add((id(owner if is_layer(owner) or is_of_users_class(owner) else None), getattr(function, "__code__", None)
                       if is_a(function, FunctionType) else None))  # fmt: skip
        new = [(code, None if number in given else owner()) for (number, code), owner in calls.items()
               if (number, code) not in known and (owner is _nobody or owner() is not None)]  # fmt: skip
        codes = {code for code, _ in new}
        functions = [f for f in gc.get_referrers(*codes) if is_a(f, FunctionType) and f.__code__ in codes] if codes else []
        for code, owner in new:
            found = [f for f in functions if f.__code__ is code]
            self._observed += found if owner is None else [MethodType(f, owner) for f in found]

    def watched(self) -> list[tuple[Place, list[Path]]]:
        """The places that are told at every call, each with the attributes that are read from there on."""
        for layer in self.layers.values():  # compared if they are called; they may also be read without a call
            names = [name for name in self.loose if name in instance_dict(layer)]
            for name in names:
                self._note((self._held(layer), ""), (name,), f"a {type(layer).__name__}")
        return [(place, [path for path in paths if not any(path == other[: len(path)] for other in paths - {path})])
                for place, paths in self._roots.values()]  # fmt: skip

    def _open(self, owner: Any, function: Any) -> None:
        own = instance_dict(function)
        inner = function.func if is_a(function, partial) else own.get("__wrapped__")
        if inner is not None:
            self._waiting.append(inner)
        if is_a(function, partial):
            self._note_values([*function.args, *function.keywords.values()], "an argument of a partial")
        if not is_a(function, FunctionType):
            self._go_on(function)
            return
        if is_foreign(function):
            self.functions[id(function)] = function
        called = f"a default of {function.__qualname__}"
        self._note_values(function.__defaults__ or (), called)
        for name in function.__kwdefaults__ or ():
            self._note((function.__kwdefaults__, name), (), called)
        reads = _names_read(function.__code__)
        self.loose |= reads.loose
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.sets_loose |= reads.sets_loose
        for first, *rest in reads.sets:
            self._note_set(owner, (cells[first], None) if first in cells else (function.__globals__, first), tuple(rest))
        for name, *rest in sorted(reads.imports):
            self._note((sys.modules, name), tuple(rest), name)
        for first, *rest in sorted(reads.paths):
            if first == _FIRST:
                if rest == [""] or "__dict__" in rest:  # goes to where its attributes are read without a name
                    if owner is not None:
                        self._note((self._held(owner), ""), (), f"a {type(owner).__name__}")
                elif rest:
                    self._note_attribute(owner, rest)
            elif first in cells:
                self._note((cells[first], None), tuple(rest), first)
            elif first in function.__globals__ or not hasattr(builtins, first):
                self._note((function.__globals__, first), tuple(rest), first)
            else:
                for names in (function.__globals__, vars(builtins)):
                    self.library[id(names), first] = names, first

    def _note_values(self, values: Sequence[Any], called: str) -> None:
        """Arguments that are fixed, as objects that may change."""
        for value in values:
            if not is_a(value, PLAIN):
                self._note((self._held(value), ""), (), called)

    def _note(self, place: Place, path: Path, called: str) -> None:
        value = value_at(place)
        if is_a(value, ModuleType) and not of_user(value.__name__):
            self._note_library(value, path, called)
            return
        self.names.setdefault((id(place[0]), place[1]), called)
        self._note_reader(value)
        if is_a(value, ModuleType) and path:
            self._note((vars(value), path[0]), path[1:], f"{called}.{path[0]}")
            path = ()
        # as it was found first: an attribute that comes later is one that the step sets
        real = self._reach.setdefault((id(place[0]), place[1], id(value), path), _reached(value, path))
        if real or not ((is_a(value, type) and not of_user(module_of(value))) or (path and place[1] == "")):
            self._roots.setdefault((id(place[0]), place[1]), (place, set()))[1].add(real)
        self._go_on(value)
        for name in path[: len(real) + 1]:
            self._method(value, name)
            value = attribute(value, name)
            self._go_on(value)

    def _note_library(self, module: ModuleType, path: Path, called: str) -> None:
        """A name of a module that is not the user's: functions and classes must stay the same, other values are compared."""
        if not path or path[0] not in vars(module):
            return
        value, called = vars(module)[path[0]], f"{called}.{path[0]}"
        self.library[id(vars(module)), path[0]] = vars(module), path[0]
        self._note_reader(value)
        if is_a(value, ModuleType):
            self._note_library(value, path[1:], called)
        elif module.__name__.startswith("numpy.random"):
            self.random.setdefault(f"{called} is random")
        elif not of_netcl(module.__name__) and (unguarded(value) or is_a(value, (*CONTAINERS, *SETS, np.ndarray))):
            self._note((vars(module), path[0]), path[1:], called)

    def _note_reader(self, value: Any) -> None:
        """Copies and conversions of a library read all attributes of what they are given."""
        if is_a(value, FunctionType) and module_of(value) in ("copy", "dataclasses"):
            self.loose.add("*")

    def _note_attribute(self, owner: Any, path: list[str]) -> None:
        name, *rest = path
        if owner is None:  # of whatever comes as the first argument
            self.loose.update(path)
            return
        part = attribute(owner, name)
        told = name in instance_dict(owner) and ((is_a(part, (*PLAIN, Tensor)) and name[0] != "_") or is_layer(part))
        itself = told if is_layer(owner) else of_netcl(module_of(type(owner))) and is_a(part, (*CONTAINERS, set)) and not rest
        if not itself:  # a layer tells its numbers, parameters and parts itself, unless they are private
            self._note((self._held(owner), ""), tuple(path), f"a {type(owner).__name__}")
        self._method(owner, name)

    def _note_set(self, owner: Any, place: Place, path: Path) -> None:
        if place[1] == _FIRST:
            if owner is None:
                self.sets_loose.add(path[-1])
            if owner is None or is_layer(owner):  # which tells its tensors itself
                return
            place = self._held(owner), ""
        self.sets[id(place[0]), place[1], path] = place, path

    def _held(self, value: Any) -> dict[str, Any]:
        """A place for something that has no name here."""
        return self._holders.setdefault(id(value), {"": value})

    def _method(self, owner: Any, name: str) -> None:
        kind = owner if is_a(owner, type) else type(owner)
        method = method_of(kind, name)
        if method is None and kind is owner:
            kind = type(owner)
            method = method_of(kind, name)
        if is_a(method, FunctionType) and (is_foreign(method) or owner is self._first):
            static = is_a(class_attribute(kind, name), staticmethod)
            self._waiting.append(method if static else MethodType(method, owner))
            self.methods[kind, name] = None

    def _go_on(self, value: Any, depth: int = 0) -> None:
        """Follow a value that may be called, or holds some that may."""
        if is_foreign(value):
            self._waiting.append(value)
        elif is_a(value, (*CONTAINERS, *SETS)):
            for item in items_of(value) if depth < MOST_DEPTH and len(value) <= MOST_ITEMS else ():
                self._go_on(item, depth + 1)
        elif is_layer(value):
            for layer in value.modules():
                self._method(layer, "forward")
                if any("forward" in vars(kind) for kind in type(layer).__mro__[:-2]):  # not that of Module, which is none
                    self.methods[type(layer), "forward"] = None
                self.layers[id(layer)] = layer
        elif not is_a(value, type):
            self._method(value, "__call__")
            if of_netcl(module_of(type(value))) and "__wrapped__" in instance_dict(value):  # compiled
                self._go_on(value.__wrapped__, depth + 1)


def _reached(value: Any, path: Path) -> Path:
    """The part of a path that leads over attributes of objects; the rest are methods, or of things made when they are asked for."""
    for i, name in enumerate(path):
        if is_a(value, ModuleType) or (attribute(value, name) is None and name not in instance_dict(value)):
            return path[:i]
        value = attribute(value, name)
    return path
