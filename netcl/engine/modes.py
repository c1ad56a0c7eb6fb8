"""Per thread, how ops are deferred; and what the modules of fusion do for those below them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from netcl.core.backend import lifecycle
from netcl.core.tensor import Tensor


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


class _Later:
    """Filled by the modules of fusion, which rest on this one."""

    defer: Callable[..., Tensor]  # a formula as a deferred tensor
    fold: Callable[..., Tensor | None]  # a reduction as one, or None
    finish: Callable[..., Tensor | None]  # an op in the kernel of the product before it, or None
    settle: Callable[..., Tensor]  # a tensor that waits for such an op, or a formula where that will not be
    follows: frozenset[str] = frozenset()  # the ops for which that may be
    worth: Callable[..., bool]  # whether plain eager code should
    run: Callable[..., None]  # compute nodes together


later = _Later()


@contextmanager
def in_mode(mode: Mode | None) -> Iterator[None]:
    """Defer as ``mode`` says; ``None`` is the way of plain eager code."""
    before, modes.mode = modes.mode, mode
    try:
        yield
    finally:
        modes.mode = before
