"""The names in the code of a function, listed with :mod:`dis`. No control flow is followed."""

from __future__ import annotations

import dis
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

Path = tuple[str, ...]
FIRST = ""  # stands for the first argument in a path: in a method, the object that it belongs to
ANY = "*"  # stands for every attribute
_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "STORE_FAST_LOAD_FAST")
_SKIPPED = ("PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG")


class Names(NamedTuple):
    """The names in a function's code: attribute chains that begin at a name (``paths``), attributes of other expressions (``loose``)."""

    paths: set[Path]
    loose: set[str]
    optional: set[str]  # attributes that may be missing: arguments of getattr and hasattr
    stores: set[Path]
    loose_stores: set[str]
    imports: set[tuple[str, int, str]]  # module, level, name
    syntax: set[str]


def names_in(code: CodeType) -> Names:
    """Return the names in a function and in the functions inside it."""
    found = Names(*(set() for _ in Names.__annotations__))
    steps: list[dis.Instruction] = []
    joined = set()  # indices of steps that code jumps to: the value on the stack has several sources
    for step in dis.get_instructions(code):
        if step.is_jump_target:
            joined.add(len(steps))
        if step.opname not in _SKIPPED:
            steps.append(step)
    parts = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    local: dict[str, Path] = dict.fromkeys((*code.co_varnames, *code.co_cellvars), ())
    first = code.co_varnames[0] if code.co_argcount else ""
    stored = {name for step in steps if step.opname.startswith(("STORE_FAST", "STORE_DEREF")) for name in _both(step.argval)}
    if first and first not in stored.union(*(path for part in parts for path in part.stores if len(path) == 1)):
        local[first] = (FIRST,)
    path: Path = ()
    module = "", 0
    for i, step in enumerate(steps):
        name, op = step.argval, step.opname
        if i in joined:
            found.paths.add(path)
            path = ()
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, name) if path else ()
            found.loose.update(() if path else (name,))
            continue
        if op in ("COPY", "DUP_TOP") and step.arg in (None, 1):  # of ``a.b += 1``
            continue
        if op in ("STORE_ATTR", "DELETE_ATTR"):
            found.stores.update([(*path, name)] if path else ())
            found.loose_stores.update(() if path else (name,))
        found.paths.add(path)
        path = ()
        if op.startswith(_LOADS):
            name = _both(name)[-1]
            path = local.get(name, (name,))
            if name in ("getattr", "hasattr") and name not in local:
                found.optional.add(_constant_name(steps[i + 1 : i + 12]))
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL") or (op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars):
            found.stores.add((name,))
        elif op == "IMPORT_NAME":
            module = name, steps[i - 2].argval if i > 1 and isinstance(steps[i - 2].argval, int) else 0
            found.imports.add((*module, ""))
        elif op == "IMPORT_FROM":
            found.imports.add((*module, name))
        elif op.startswith("LOAD_SUPER"):
            found.loose.add(name)
        found.syntax.add("%" if op == "BINARY_MODULO" or (op == "BINARY_OP" and "%" in step.argrepr) else op)
    found.paths.update((path, ()))
    found.paths.remove(())
    for part in parts:
        _include(found, part, local)
    return found


def _both(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) else (argval,)


def _constant_name(steps: Sequence[dis.Instruction]) -> str:
    """Return the attribute that ``getattr`` reads, if it is a constant; else ``*``. ``steps`` follow the name ``getattr``."""
    rest = list(steps[1:]) if steps and steps[0].opname.startswith(_LOADS) and isinstance(steps[0].argval, str) else []
    while rest and rest[0].opname == "LOAD_ATTR":
        rest.pop(0)
    named = len(rest) > 1 and rest[0].opname == "LOAD_CONST" and isinstance(rest[0].argval, str)
    if named and rest[1].opname.startswith((*_LOADS, "LOAD_CONST", "LOAD_SMALL_INT")):  # a default
        rest.pop(1)
    return rest[0].argval if named and len(rest) > 1 and rest[1].opname in ("CALL", "CALL_FUNCTION") else ANY


def _include(found: Names, inner: Names, local: Mapping[str, Path]) -> None:
    """Add the names of a nested function, resolved in the enclosing function."""
    for name in ("loose", "optional", "loose_stores", "imports", "syntax"):
        getattr(found, name).update(getattr(inner, name))
    for mine, loose, paths in ((found.paths, found.loose, inner.paths), (found.stores, found.loose_stores, inner.stores)):
        for name, *rest in paths:
            start = () if name == FIRST else local.get(name, (name,))
            if start:
                mine.add((*start, *rest))
            else:
                loose.update(rest)
