"""The list that ``Module.parameters()`` returns; it is defined here so that guards of compiled functions know its type."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class NextList(list[T]):
    """A list that also supports ``next``: ``next(model.parameters())`` is the first tensor, a second call on the same list the next one.

    ``iter`` and ``len`` are a list's and do not depend on what ``next`` took.

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
