"""Import of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from netcl.core.errors import message


def optional_module(name: str, op: str, what: str = "", remedy: str = "") -> Any:
    """Import and return a module of an optional package. If it is missing, raise ``ImportError`` with the install command."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ImportError(message(op, what or f"the package {package} is required", remedy or f"pip install {package}")) from None
