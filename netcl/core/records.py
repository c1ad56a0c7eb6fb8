"""``copy.replace`` of Python 3.13, for named tuples."""

from __future__ import annotations

from typing import TypeVar

_NamedTuple = TypeVar("_NamedTuple", bound=tuple)


def replaced(record: _NamedTuple, **changes: object) -> _NamedTuple:
    """A copy of a named tuple with other values in some fields."""
    return record._replace(**changes)  # type: ignore[attr-defined]
