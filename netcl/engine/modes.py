"""The deferral mode of each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from netcl.core.backend import lifecycle


class Mode(NamedTuple):
    """The settings of fusing code, such as ``ag.jit_compile``: whether folds are deferred too, and whether kernels use fast math."""

    rows: bool = True
    fast_math: bool = False


class _Fusing(threading.local):
    """The deferral state of a thread: its mode, its deferred nodes, collected kernel sources, and the op being expressed in formulas."""

    mode: Mode | None = None
    trace: list[Any] | None = None
    shown: list[str] | None = None
    whole: Any = None

    def __init__(self) -> None:
        self.waiting: list[Any] = []  # weak references to pending nodes, in the order in which they were deferred
        self.held = 0  # bytes of their inputs; includes the inputs of nodes dropped since the last count
        lifecycle.computing.add(threading.current_thread())


deferral = _Fusing()


@contextmanager
def in_mode(mode: Mode | None) -> Iterator[None]:
    """Set the deferral mode inside the block; ``None`` is the mode outside of ``ag.jit_compile``."""
    before, deferral.mode = deferral.mode, mode
    try:
        yield
    finally:
        deferral.mode = before
