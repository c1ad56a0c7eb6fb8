"""Named slots that upper layers fill, so that core can call an op or a probe without importing upward.

``Tensor.__add__`` calls ``dispatch.call("add", ...)``; ``autograd`` fills the slot ``add``. The root package
says, once, how the layer that fills the slots is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

slots: dict[str, Callable[..., Any]] = {}  # by name; who calls often looks here first
_loaders: list[Callable[[], Any]] = []


def fill(name: str, function: Callable[..., Any]) -> None:
    """Put ``function`` into the slot ``name``; a later layer may replace it (autograd replaces ops)."""
    slots[name] = function


def load_with(loader: Callable[[], Any]) -> None:
    """Name the import that fills the slots; it runs at the first call of an empty slot.

    It may return a function that makes what belongs into a slot, or returns ``None`` for names it does not know.
    """
    _loaders.append(loader)


def find(name: str) -> Callable[..., Any]:
    """The function in the slot ``name``."""
    for loader in _loaders:  # every time: who comes while another thread imports waits for that
        make = loader()
        if name not in slots and make is not None and (made := make(name)) is not None:
            slots[name] = made
    if name not in slots:
        raise NotImplementedError(f"[{name}] no layer of netcl has filled this slot")
    return slots[name]


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call what is in the slot ``name``."""
    return (slots.get(name) or find(name))(*args, **kwargs)
