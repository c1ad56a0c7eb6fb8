"""Exceptions of ``netcl.data``. ``message`` repeats the form of netcl's other errors, because ``netcl.core`` is not imported here."""

from __future__ import annotations

from typing import Any

import numpy as np


def message(op: str, what: str, remedy: str = "", /, **values: object) -> str:
    """Build an error message of the form ``[op] what; name=value, name=value; remedy``."""
    parts = [f"[{op}] {what}", ", ".join(f"{name}={value}" for name, value in values.items()), remedy]
    return "; ".join(part for part in parts if part)


def check_count(op: str, name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int; raises ``ValueError`` unless it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(message(op, f"{name} must be a whole number of at least {least}", **{name: repr(value)}))
    return int(value)


class WorkerError(RuntimeError):
    """Raised when a worker of a DataLoader raises, dies, hangs, or delivers an invalid batch; the message names the worker."""


class TransferError(WorkerError):
    """Raised when the dataset or a function of a DataLoader cannot be sent to a worker process."""


class SampleError(ValueError):
    """Raised for a sample that cannot be batched, or that does not match the other samples of its dataset."""


class FormatError(ValueError):
    """Raised for a file with invalid content."""
