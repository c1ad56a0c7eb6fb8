"""Which functions take part in a call, and what they name: read off their code, and seen while they run.

Those that are found in containers, come as arguments or belong to a class above have no name in the code that calls them.
"""

from __future__ import annotations

import builtins
import dis
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from netcl.core.tensor import Tensor

PLAIN = (bool, int, float, str, bytes, complex, np.generic, type(None))
CONTAINERS = (dict, list, tuple, deque)
#: Python's, and what netcl itself calls: their functions are not followed.
LIBRARIES = {*sys.stdlib_module_names, "netcl", "numpy", "pyopencl", "pytools", "platformdirs", "ml_dtypes", "mpi4py"}
MOST_ITEMS = 64  # of a container that is looked into, and
MOST_DEPTH = 8  # containers or objects in each other
MOST_FUNCTIONS = 5000  # that are followed, methods once for every layer

Place = tuple[Any, str | None]  # a closure's cell and None, or a dictionary of names and one of them
Path = tuple[str, ...]


def items_of(value: Any) -> Iterable[Any]:
    """What is in a container, the keys of a dictionary too."""
    return (part for pair in value.items() for part in pair) if isinstance(value, dict) else value


def bound(place: Place) -> Any:
    """What is there now; ``None`` for a name that is not bound."""
    holder, name = place
    if name is not None:
        return holder.get(name)
    try:
        return holder.cell_contents
    except ValueError:
        return None


def attribute(value: Any, name: str) -> Any:
    """An attribute that is simply there, in the object, in a slot or in its class; ``None`` for methods and what is computed."""
    own: Mapping[str, Any] = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            if isinstance(found, MemberDescriptorType):
                return getattr(value, name, None)
            return found if isinstance(found, (*PLAIN, Tensor, np.ndarray, dict, list, tuple, set)) else None
    return None


def _is_there(value: Any, name: str) -> bool:
    """Whether it has the attribute, though it be ``None``: it may be something else at the next call."""
    return attribute(value, name) is not None or name in getattr(value, "__dict__", ())


def _of_netcl(module: str | None) -> bool:
    return module is not None and (module == "netcl" or module.startswith("netcl."))


def is_own(value: Any) -> bool:
    """Whether it is netcl's, or code: nothing to look into."""
    if isinstance(value, (FunctionType, MethodType)):
        return True
    if isinstance(value, type):
        return _of_netcl(value.__module__)
    return _of_netcl(value.__name__) if isinstance(value, ModuleType) else _of_netcl(type(value).__module__) or is_layer(value)


def is_layer(value: Any) -> bool:
    """Whether it is a module, or looks like one."""
    return hasattr(value, "forward") and hasattr(value, "modules")


def _is_foreign(value: Any) -> bool:
    """Whether it is a function of the user's."""
    if isinstance(value, partial):
        return True
    return isinstance(value, (FunctionType, MethodType)) and str(value.__module__).partition(".")[0] not in LIBRARIES


class _Reads(NamedTuple):
    """What code reads: attributes by way of names (``a``, ``a.b``, ``a.b.c``), and those of things without a name; and what it sets."""

    paths: set[Path]
    loose: set[str]
    sets: set[Path]
    sets_loose: set[str]


_NAMED = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")
_BY_NAME = frozenset(("getattr", "vars", "attrgetter"))  # whoever calls these may mean any text in its code
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_FIRST = ""  # stands for the first argument, whatever its name: in a method, whose the method is


def _reads(code: CodeType) -> _Reads:
    """Of a function and those inside it; what is only set, or always before it is read, is left out, and so are methods of things without a
    name of their own."""
    local: dict[str, Path] = dict.fromkeys((*code.co_varnames, *code.co_cellvars), ())
    local |= dict.fromkeys(code.co_varnames[: min(1, code.co_argcount)], (_FIRST,))
    reads = _Reads(set(), set(), set(), set())
    path: Path = ()
    made: set[Path] = set()
    branched = False
    for step in dis.get_instructions(code):
        branched = branched or step.opcode in _JUMPS
        if step.opname.startswith(_NAMED):
            name = step.argval if isinstance(step.argval, str) else step.argval[-1]  # some load two
            path = local.get(name, (name,))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not path and step.opname == "LOAD_ATTR" and "NULL" not in step.argrepr:
                reads.loose.add(step.argval)
            path = (*path, step.argval) if path and (*path, step.argval) not in made else ()
        else:
            if step.opname == "STORE_ATTR":
                if path and not branched and (*path, step.argval) not in reads.paths:
                    made.add((*path, step.argval))
                reads.sets.add((*path, step.argval)) if path else reads.sets_loose.add(step.argval)
            elif step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars):
                reads.sets.add((step.argval,))
            path = ()
        reads.paths.add(path)
    reads.paths.discard(())
    if any(_BY_NAME.intersection(path) for path in reads.paths):
        reads.loose.update(part for part in code.co_consts if isinstance(part, str) and part.isidentifier())
    for part in code.co_consts:
        if isinstance(part, CodeType):
            _include(reads, _reads(part), local)
    return reads


def _include(reads: _Reads, inner: _Reads, local: Mapping[str, Path]) -> None:
    """What a function inside another one reads and sets, as the other one sees it."""
    reads.loose.update(inner.loose)
    reads.sets_loose.update(inner.sets_loose)
    for paths, found, loose in ((inner.paths, reads.paths, reads.loose), (inner.sets, reads.sets, reads.sets_loose)):
        for name, *rest in paths:
            start = () if name == _FIRST else local.get(name, (name,))
            if start:
                found.add((*start, *rest))
            else:
                loose.update(rest)


class Seen:
    """A profiler that notes which functions of others run, and of which layers; layers that were not called, but their ``forward``, tell
    what they rest on all the same."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, CodeType], Callable[[], Any]] = {}  # with the layer, weakly: those the step makes are gone after it
        self._passed: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._passed:
            return
        forward = code.co_name == "forward"
        name = frame.f_globals.get("__name__")
        foreign = name in sys.modules and name.partition(".")[0] not in LIBRARIES and (code.co_name[0] != "<" or code.co_name == "<lambda>")
        if not forward and not foreign:
            self._passed.add(code)
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        owner: Any = first if is_layer(first) and not isinstance(first, type) else None
        if forward and hasattr(owner, "_tell_recorder"):
            owner._tell_recorder()
        if foreign:
            self.calls[id(owner), code] = _nobody if owner is None else weakref.ref(owner)


def _nobody() -> None:
    return None


class Search:
    """The functions that take part in a call, as far as they can be seen, and where they read. What was found stays."""

    def __init__(self, function: Callable[..., Any]):
        self.loose: set[str] = set()
        self.sets: dict[tuple[int, str | None, Path], tuple[Place, Path]] = {}
        self.sets_loose: set[str] = set()
        self._roots: dict[tuple[int, str | None], tuple[Place, set[Path]]] = {}
        self._holders: dict[int, dict[str, Any]] = {}
        self._function = function
        self._first = getattr(function, "__self__", None)
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
            owner, code = getattr(one, "__self__", None), getattr(one, "__func__", one)
            if (id(owner), id(code)) not in self._seen:
                self._seen[id(owner), id(code)] = one
                self._open(owner, code)
        self.complete = self.complete and not self._waiting

    @property
    def extent(self) -> tuple[int, int]:
        """How much was found: it only grows."""
        return len(self.loose), sum(len(paths) for _, paths in self._roots.values())

    def add(self, calls: Mapping[tuple[int, CodeType], Callable[[], Any]]) -> None:
        """Functions that were seen to run: those that the walk had not come to. Code does not know whose it is, and the collector does."""
        known = {(id(owner if is_layer(owner := getattr(one, "__self__", None)) else None), getattr(one, "__code__", None))
                 for one in self._seen.values()}  # fmt: skip
        new = [(code, owner()) for (number, code), owner in calls.items()
               if (number, code) not in known and (owner is _nobody or owner() is not None)]  # fmt: skip
        codes = {code for code, _ in new}
        functions = [f for f in gc.get_referrers(*codes) if isinstance(f, FunctionType) and f.__code__ in codes] if codes else []
        for code, owner in new:
            found = [f for f in functions if f.__code__ is code]
            self._observed += found if owner is None else [MethodType(f, owner) for f in found]

    def watched(self) -> list[tuple[Place, list[Path]]]:
        """The places that are told at every call, each with the attributes that are read from there on."""
        return [(place, [path for path in paths if not any(path == other[: len(path)] for other in paths - {path})])
                for place, paths in self._roots.values()]  # fmt: skip

    def _open(self, owner: Any, function: Any) -> None:
        inner = function.func if isinstance(function, partial) else getattr(function, "__wrapped__", None)
        if inner is not None:
            self._waiting.append(inner)
        if isinstance(function, partial):
            self._note_values([*function.args, *function.keywords.values()])
        if not isinstance(function, FunctionType):
            self._go_on(function)
            return
        self._note_values([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        reads = _reads(function.__code__)
        self.loose |= reads.loose
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.sets_loose |= reads.sets_loose
        for first, *rest in reads.sets:
            self._note_set(owner, (cells[first], None) if first in cells else (function.__globals__, first), tuple(rest))
        for first, *rest in sorted(reads.paths):
            if first == _FIRST:
                if rest:
                    self._note_attribute(owner, rest)
            elif first in cells:
                self._note((cells[first], None), tuple(rest))
            elif first in function.__globals__ or not hasattr(builtins, first):
                self._note((function.__globals__, first), tuple(rest))

    def _note_values(self, values: Sequence[Any]) -> None:
        """Arguments that are fixed, as objects that may change."""
        for value in values:
            if not isinstance(value, PLAIN):
                self._note((self._held(value), ""), ())

    def _note(self, place: Place, path: Path) -> None:
        value = bound(place)
        if isinstance(value, ModuleType):
            if path and not _of_netcl(value.__name__) and path[0] in vars(value):
                self._note((vars(value), path[0]), path[1:])
            return
        # as it was found first: an attribute that comes later is one that the step sets
        real = self._reach.setdefault((id(place[0]), place[1], id(value), path), _reached(value, path))
        if real or not (isinstance(value, type) or (path and place[1] == "")):
            self._roots.setdefault((id(place[0]), place[1]), (place, set()))[1].add(real)
        self._go_on(value)
        for name in path[: len(real) + 1]:
            self._method(value, name)
            value = attribute(value, name)
            self._go_on(value)

    def _note_attribute(self, owner: Any, path: list[str]) -> None:
        name, *rest = path
        if owner is None:  # of whatever comes as the first argument
            self.loose.update(path)
            return
        part = attribute(owner, name)
        told = (isinstance(part, (*PLAIN, Tensor)) and name[0] != "_") or is_layer(part)
        itself = told if is_layer(owner) else _of_netcl(type(owner).__module__) and isinstance(part, (*CONTAINERS, set)) and not rest
        if not itself:  # a layer tells its numbers, parameters and parts itself, unless they are private
            self._note((self._held(owner), ""), tuple(path))
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
        method = getattr(type(owner), name, None)
        method = method.fget if isinstance(method, property) else method
        if isinstance(method, FunctionType) and (_is_foreign(method) or owner is self._first):
            self._waiting.append(MethodType(method, owner))

    def _go_on(self, value: Any, depth: int = 0) -> None:
        """Follow a value that may be called, or holds some that may."""
        if _is_foreign(value):
            self._waiting.append(value)
        elif isinstance(value, CONTAINERS):
            for item in items_of(value) if depth < MOST_DEPTH and len(value) <= MOST_ITEMS else ():
                self._go_on(item, depth + 1)
        elif is_layer(value) and not isinstance(value, type):
            for layer in value.modules():
                self._method(layer, "forward")
        elif not isinstance(value, type):
            self._method(value, "__call__")


def _reached(value: Any, path: Path) -> Path:
    """The part of a path that leads over attributes of objects; the rest are methods, or of things made when they are asked for."""
    for i, name in enumerate(path):
        if isinstance(value, (ModuleType, FunctionType)) or not _is_there(value, name):
            return path[:i]
        value = attribute(value, name)
    return path
