"""Image datasets, transforms, grids and models under torchvision's names. PIL images and image files need Pillow (extra ``vision``)."""

from __future__ import annotations

import importlib
from typing import Any

_PARTS = ("datasets", "functional", "models", "ops", "transforms", "utils")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"netcl.vision.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PARTS]
