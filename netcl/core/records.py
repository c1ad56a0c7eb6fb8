"""``copy.replace`` of Python 3.13, for named tuples."""

from __future__ import annotations

from typing import Any, TypeVar

_Record = TypeVar("_Record", bound=tuple)


def replaced(record: _Record, **changes: Any) -> _Record:
    """A copy of a named tuple with other values in some fields."""
    return record._replace(**changes)  # type: ignore[attr-defined]
