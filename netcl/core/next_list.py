"""The list that ``Module.parameters()`` returns; it is defined here so that guards of compiled functions know its type."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class NextList(list[T]):
    """A list that also supports ``next``: ``next(model.parameters())`` returns the first tensor.

    Each further ``next`` on the same list returns the following element. ``next`` does not affect ``iter`` and ``len``.

    >>> both = NextList("ab")
    >>> next(both), next(both), list(both)
    ('a', 'b', ['a', 'b'])
    """

    _taken = 0

    def __next__(self) -> T:
        if self._taken >= len(self):
            raise StopIteration
        self._taken += 1
        return self[self._taken - 1]
