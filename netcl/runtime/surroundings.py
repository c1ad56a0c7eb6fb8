"""What a function reads from around it: closures, globals, attributes, settings in dicts and lists, and that of the functions it calls.

A recording rests on all of it, and nothing of it shows in the launches. So it is told at every call, and another answer is another
recording. Of netcl's own objects only what the function names is told, and no tensors: the rest they tell themselves, and much of what they
hold (learning rates, gradients) may change.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.runtime.contract import (
    CONTAINERS,
    EXACTLY_PLAIN,
    MOST_BYTES,
    MOST_DEPTH,
    MOST_ITEMS,
    PLAIN,
    SETS,
    Vet,
    attribute,
    instance_dict,
    is_a,
    is_layer,
    is_own,
    items_of,
    loose_names,
    stored_names,
    tensors_of,
)
from netcl.runtime.followed import Path, Place, Search, Seen, value_at

_OF_OWN = (*PLAIN, list, dict)


class Left:
    """Something that a function sets, and what is there now. Replays write its memory, and do not set it."""

    def __init__(self, place: Place, path: Path):
        self._place, self._path = place, path
        self.owner = self._at(path[:-1])
        self.value = self._at(path)
        self.name = path[-1] if path else place[1] or ""

    def _at(self, path: Path) -> Any:
        value = value_at(self._place)
        for name in path:
            value = attribute(value, name)
        return value

    def is_there(self) -> bool:
        """Whether it is what it was."""
        now, was = self._at(self._path), self.value
        return now is was or (is_a(was, PLAIN) and type(now) is type(was) and now == was)

    def tensors(self) -> list[Tensor]:
        """It, or those in it."""
        held = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return [t for t in held if isinstance(t, Tensor)]


class Surroundings:
    """Calling it gives what a function reads around it, as a key, and the objects whose numbers are in that key."""

    def __init__(self, function: Callable[..., Any]):
        self._search = Search(function)
        self._watched: list[tuple[Place, list[Path]]] = []
        self._loose: frozenset[str] = frozenset()
        self._of_class: dict[type, tuple[str, ...]] = {}
        self._kinds: dict[type, tuple[bool, bool]] = {}
        self._objects: set[type] = set()  # classes known to be neither plain values, tensors nor containers
        self._told: list[Any] = []
        self._kept: list[Any] = []
        self._depths: dict[int, int] = {}  # of what was gone into

    def __call__(self, arguments: Sequence[Any] = ()) -> tuple[tuple[Any, ...], list[Any]]:
        self._told, self._kept, self._depths = [], [], {}
        for place, paths in self._watched:
            root = value_at(place)
            self._tell(root, 0)
            for path in paths:
                self._follow(root, path)
        for value in arguments:  # objects, of which the function may read what it names
            if not is_a(value, Tensor):
                self._tell(value, 0)
        return tuple(self._told), self._kept

    def unguarded(self, arguments: Sequence[Any]) -> tuple[str, list[Tensor]]:
        """What the function reads that no guard compares, by name, empty if there is nothing; and the tensors that it reaches."""
        vet = Vet(self._loose)
        found = self._vetted(vet, arguments)
        return found, [*vet.tensors, *tensors_of(vet.own)]

    def _vetted(self, vet: Vet, arguments: Sequence[Any]) -> str:
        for place, paths in self._watched:
            root, name = value_at(place), self._search.names.get((id(place[0]), place[1]), "a value")
            found = vet(root, name)
            for path in () if found else paths:
                value, called = root, name
                for part in path:
                    of_layer = is_layer(value)
                    value, called = attribute(value, part), f"{called}.{part}"
                    found = found or ("" if of_layer and is_layer(value) else vet(value, called))
            if found:
                return found
        given = (vet(value, "an argument") for value in arguments)
        return next((found for found in given if found), "") or next(iter(self._search.random), "")

    def fixed(self) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, Any, Any]]]:
        """What must stay the same object: names of classes and libraries; of functions, their code and their defaults."""
        functions = [(f, f.__code__, f.__defaults__) for f in self._search.functions.values()]
        return self._search.fixed(), functions

    def search(self, arguments: Sequence[Any]) -> bool:
        """Look again which functions take part, as things are now; whether more is told from now on."""
        before = self._search.extent
        self._search.walk([value for value in arguments if not is_a(value, Tensor)])
        if self._search.extent == before:
            return False
        self._watched, self._loose = self._search.watched(), frozenset(self._search.loose)
        self._of_class.clear()
        return True

    @contextmanager
    def observed(self, arguments: Sequence[Any]) -> Iterator[Seen]:
        """Note which functions run inside the block, in this thread; no other profiler may be at work there.

        No garbage is collected meanwhile: that would run functions which have nothing to do with this one.
        """
        seen, collects = Seen(), gc.isenabled()
        gc.disable()
        sys.setprofile(seen)
        try:
            yield seen
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            self._search.add(seen.calls, arguments)

    @property
    def complete(self) -> bool:
        """Whether all functions were followed, or there were too many."""
        return self._search.complete

    def left(self, arguments: Sequence[Any]) -> list[Left]:
        """What the functions set, as it is now."""
        places: list[tuple[Place, Path]] = list(self._search.sets.values())
        for value in arguments:
            if not is_a(value, Tensor) and not is_own(value):
                places += [(({"": value}, ""), (name,)) for name in self._search.sets_loose if name in instance_dict(value)]
        return [Left(place, path) for place, path in places]

    def _follow(self, value: Any, path: Path) -> None:
        """Tell what is reached from a value by attributes."""
        for name in path:
            own, of_layer = self._whose(value)
            value = attribute(value, name)
            if not own or (is_a(value, Tensor) or is_layer(value) or not is_own(value) if of_layer else not is_a(value, Tensor)):
                self._tell(value, 0)

    def _whose(self, value: Any) -> tuple[bool, bool]:
        """Whether it is netcl's, and whether it is a layer: that of its class, but for modules and classes."""
        kind = type(value)
        found = self._kinds.get(kind)
        if found is None:
            found = is_own(value), is_layer(value)
            if not issubclass(kind, (ModuleType, type)):
                self._kinds[kind] = found
        return found

    def _tell(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in self._objects:
            self._tell_object(value, depth)
        elif kind in EXACTLY_PLAIN or issubclass(kind, np.generic):
            self._told += (kind, value if value and value == value else repr(value))  # 0.0 is not -0.0, and NaN is itself
        elif issubclass(kind, Tensor):
            # not kept: a recording has an eye of its own on whether it is still there
            self._told += (id(value), id(value.buffer), value.requires_grad)
        elif issubclass(kind, CONTAINERS) or issubclass(kind, SETS):
            self._tell_items(value, depth)
        elif kind is np.ndarray and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
            self._told += (value.shape, value.dtype, value.tobytes())
        else:
            if kind is not np.ndarray:
                self._objects.add(kind)
            self._tell_object(value, depth)

    def _tell_object(self, value: object, depth: int) -> None:
        self._told += (id(value), type(value))
        self._kept.append(value)
        if self._loose and self._goes_into(value, depth):
            self._tell_loose(value, depth)

    def _goes_into(self, value: Any, depth: int) -> bool:
        """Whether what is in something is told: once, and not too far in."""
        if depth >= self._depths.get(id(value), MOST_DEPTH):
            return False
        self._depths[id(value)] = depth
        return True

    def _tell_items(self, value: Any, depth: int) -> None:
        self._told += (type(value), len(value))
        if len(value) > MOST_ITEMS:  # of tensors alone, or the function is refused
            self._told += [(id(item), item.requires_grad) for item in value if is_a(item, Tensor)]
        elif self._goes_into(value, depth):
            for item in items_of(value):
                self._tell(item, depth + 1)
            if self._loose and instance_dict(value):  # of a user's class
                self._tell_loose(value, depth)

    def _tell_loose(self, value: Any, depth: int) -> None:
        """The attributes that are read of nameless things, which this may be one of; of netcl's own, numbers and containers."""
        kind = type(value)
        of_class = self._of_class.get(kind)
        if of_class is None:
            of_class = self._of_class[kind] = tuple(loose_names(kind, self._loose))
        own = instance_dict(value)
        if not of_class and self._loose.isdisjoint(own) and "*" not in self._loose and not issubclass(kind, type):
            return  # the usual case
        names = [*stored_names(value, own, self._loose), *of_class]
        kinds = _OF_OWN if self._whose(value)[0] and not is_a(value, FunctionType) else object
        for name in names:
            part = attribute(value, name)
            if is_a(part, kinds):
                self._told.append(name)
                self._tell(part, depth + 1)
