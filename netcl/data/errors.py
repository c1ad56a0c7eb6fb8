"""What goes wrong with data, in the form of netcl's other errors. Data stands alone, so it does not borrow them from core."""

from __future__ import annotations

from typing import Any

import numpy as np


def message(op: str, what: str, remedy: str = "", /, **values: object) -> str:
    """``[op] what is wrong; name=value, name=value; remedy``."""
    parts = [f"[{op}] {what}", ", ".join(f"{name}={value}" for name, value in values.items()), remedy]
    return "; ".join(part for part in parts if part)


def check_count(op: str, name: str, value: Any, least: int = 1) -> int:
    """``ValueError`` unless ``value`` is a whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(message(op, f"{name} must be a whole number from {least} on", **{name: repr(value)}))
    return int(value)


class WorkerError(RuntimeError):
    """A worker of a DataLoader raised, died, hung, or delivered what does not fit; the text names it."""


class SampleError(ValueError):
    """A sample that does not fit the others of its dataset."""


class FormatError(ValueError):
    """A file that is not what it should be; the text says where it differs."""
