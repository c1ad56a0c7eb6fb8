"""Per thread, how ops are deferred."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from netcl.core.backend import lifecycle


class Mode(NamedTuple):
    """How ops are deferred inside ``ag.jit_compile``: folds too, and with which compiler."""

    rows: bool = True
    fast_math: bool = False


class _Fusing(threading.local):
    """Per thread: the mode of the compiled function that runs now, if one does; who listens to deferred ops and to kernels' texts; the
    op that is being said in formulas."""

    mode: Mode | None = None
    trace: list[Any] | None = None
    shown: list[str] | None = None
    whole: Any = None

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}  # nodes by their number, weakly
        self.held = 0  # bytes of their inputs, and of those that are gone since this was last counted
        lifecycle.computing.add(threading.current_thread())


modes = _Fusing()


@contextmanager
def in_mode(mode: Mode | None) -> Iterator[None]:
    """Defer as ``mode`` says; ``None`` is the way of plain eager code."""
    before, modes.mode = modes.mode, mode
    try:
        yield
    finally:
        modes.mode = before
