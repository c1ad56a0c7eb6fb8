"""Named slots that upper layers fill, so that core can call an op or a probe without importing upward.

``Tensor.__add__`` calls ``dispatch.call("add", ...)``; ``autograd`` fills the slot ``add``. The root package
says, once, how the layer that fills the slots is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

slots: dict[str, Callable[..., Any]] = {}  # by name; who calls often looks here first
_loaders: list[Callable[[], Any]] = []
_makers: list[Callable[[str], Callable[..., Any] | None]] = []


def fill(name: str, function: Callable[..., Any]) -> None:
    """Put ``function`` into the slot ``name``; a later layer may replace it (autograd replaces ops)."""
    slots[name] = function


def fill_with(maker: Callable[[str], Callable[..., Any] | None]) -> None:
    """Name the function that makes what belongs into an empty slot, or returns ``None``; it runs at the first call of the slot."""
    _makers.append(maker)


def load_with(loader: Callable[[], Any]) -> None:
    """Name the import that fills the slots; it runs at the first call of an empty slot."""
    _loaders.append(loader)


def find(name: str) -> Callable[..., Any]:
    """The function in the slot ``name``."""
    if name not in slots:
        for loader in _loaders:  # every time: who comes while another thread imports waits for that
            loader()
    if name not in slots:
        made = next((made for maker in _makers if (made := maker(name)) is not None), None)
        if made is None:
            raise NotImplementedError(f"[{name}] no layer of netcl has filled this slot")
        slots[name] = made
    return slots[name]


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call what is in the slot ``name``."""
    return (slots.get(name) or find(name))(*args, **kwargs)
