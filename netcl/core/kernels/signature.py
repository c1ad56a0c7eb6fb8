"""Parses the parameters of a kernel from its source text.

Drivers report argument types only for programs built from source and only with an extra flag; the text is always
available. Types matter for speed: a typed Python number is set faster than an untyped NumPy scalar.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

_SCALARS = {
    "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32,
    "long": np.int64, "ulong": np.uint64, "float": np.float32, "double": np.float64, "size_t": np.uint64,
    "unsigned": np.uint32, "unsigned char": np.uint8, "unsigned short": np.uint16, "unsigned int": np.uint32,
    "unsigned long": np.uint64,
}  # fmt: skip
_DEFINITIONS = re.compile(r"kernel\b[^;{}]*?\bvoid\s+(\w+)\s*\(")  # begins with a word, for which a text is searched fast
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_QUALIFIERS = re.compile(r"\b(const|volatile|restrict|__restrict|__private|private|signed)\b")
_POINTED_TO = re.compile(r"((__)?(global|local|constant)\s+)?(struct\s+)?\w+\s*")
_TYPE_MACROS = re.compile(r"^#define (\w+) (\w+)$", re.M)
_PARAMETER_MACROS = re.compile(r"^#define (\w+_(?:POINTERS|NUMBERS))\b((?:[^\n]*\\\n)*[^\n]*)$", re.M)

POINTER = "pointer"
UNKNOWN = "unknown"


def parameters(source: str, name: str) -> tuple[str, ...] | None:
    """Return the declarations of a kernel's parameters; ``None`` if they are not literally in the text, or contain directives."""
    text = _COMMENTS.sub(" ", source)
    for found in _DEFINITIONS.finditer(text):
        if found[1] == name:
            break
    else:
        return None
    depth, end = 1, found.end()
    while end < len(text) and depth:
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    inner = text[found.end() : end - 1]
    if "_POINTERS" in inner or "_NUMBERS" in inner:  # macros for some of them; the first definition in the text counts
        known = dict(reversed(_PARAMETER_MACROS.findall(text)))
        inner = re.sub(r"\b\w+_(?:POINTERS|NUMBERS)\b", lambda macro: known.get(macro[0], "").replace("\\\n", " "), inner)
    if "#" in inner:
        return None
    parts, start = [], 0
    for i, ch in enumerate(inner + ","):
        depth += (ch in "([") - (ch in ")]")
        if ch == "," and depth == 0:
            if (part := inner[start:i].strip()) not in ("", "void"):
                parts.append(part)
            start = i + 1
    return tuple(parts)


@lru_cache(maxsize=4096)
def parameter_kinds(source: str, name: str) -> tuple[tuple[Any, ...], tuple[bool, ...]] | None:
    """Return the kind of each parameter of the kernel ``name``, and whether the kernel only reads it (a number, a pointer to ``const``).

    A kind is a NumPy scalar type, ``POINTER``, or ``UNKNOWN`` (a vector type, say). A type may be a macro (``const REAL eps``) if a line of
    the text defines it as a scalar. Returns ``None`` where :func:`parameters` does.
    """
    parts = parameters(source, name)
    if parts is None:
        return None
    macros: dict[str, str] = {}
    kinds: list[Any] = []
    read_only: list[bool] = []
    for part in parts:
        target, pointer, _ = part.partition("*")
        kind = " ".join(_QUALIFIERS.sub(" ", part).split()[:-1])
        if not (pointer or kind in _SCALARS or macros):  # a default further down yields to the first definition
            macros = dict(reversed(_TYPE_MACROS.findall(_COMMENTS.sub(" ", source))))
        plain = _POINTED_TO.fullmatch(_QUALIFIERS.sub("", target).strip())  # else a macro may stand for parameters
        kinds.append(POINTER if (pointer and plain) or "[" in part else _SCALARS.get(macros.get(kind, kind), UNKNOWN))
        read_only.append(not pointer or re.search(r"\bconst\b", target) is not None)
    return tuple(kinds), tuple(read_only)
