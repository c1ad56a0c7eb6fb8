"""The table of NETCL_* environment variables: type, default, meaning. No other module reads the environment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from netcl.core.errors import EnvironmentVariableError, message

FUSE_FROM = 1 << 16  # elements; below, separate launches cost less than deferring
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _flag(text: str) -> bool:
    low = text.strip().lower()
    if low not in _YES + _NO:
        raise ValueError
    return low in _YES


def _one_of_words(*legal: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        low = text.strip().lower()
        if low not in legal:
            raise ValueError
        return low

    return parse


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _process_count(text: str) -> int | None:
    """Parse a number of processes; ``auto`` gives ``None``."""
    value = None if text.strip().lower() == "auto" else int(text)
    if value is not None and value < 0:
        raise ValueError
    return value


def _least_elements(text: str) -> int:
    """Parse a threshold in elements: ``0`` or off gives 0, which means never; ``1`` or on gives the default."""
    low = text.strip().lower()
    value = int(low) if low.isdigit() else _flag(low)
    return FUSE_FROM if value == 1 else int(value)


def _autotune(text: str) -> tuple[str, float | None]:
    """Parse ``on``, ``off`` or ``force``, optionally with a budget in seconds (``on:5``), to the mode and the budget or ``None``."""
    mode, _, seconds = text.strip().lower().partition(":")
    if mode not in ("off", "on", "force"):
        raise ValueError
    return mode, _positive_number(seconds) if seconds else None


def _index_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


@dataclass(frozen=True)
class Variable:
    """A NETCL_* environment variable: how it is parsed, its default, its legal values and its effect."""

    name: str
    parse: Callable[[str], Any]
    default: str
    legal: str
    doc: str


_VARIABLE_ROWS = (
    Variable("NETCL_DEVICE", str.strip, "auto", "auto, gpu, cpu, cl, cl:cpu, gpu:1, 0:1 (platform:device), part of a name",
             "The device used when the program names none."),
    Variable("NETCL_PLATFORM_FILTER", str.strip, "", "part of a platform's name, any case",
             "Only platforms whose name contains this are seen."),
    Variable("NETCL_VISIBLE_DEVICES", _index_list, "", "selectors separated by commas: 0:0,1:0 or pocl",
             "Only these devices are seen; empty means all."),
    Variable("NETCL_CACHE_DIR", _path, "", "a folder", "Where compiled kernels and measured configurations are kept."),
    Variable("NETCL_BUILD_PROCESSES", _process_count, "auto", "auto, or a number of processes, 0 or more",
             "How many processes compile kernels in parallel in a first run. auto starts some for GPUs; 0 compiles in the program itself."),
    Variable("NETCL_KERNEL_STRATEGY", _one_of_words("auto", "portable", "optimized"), "auto", "auto, portable, optimized",
             "Forces portable or optimized kernels; auto decides by the device."),
    Variable("NETCL_CONV_WINOGRAD", _flag, "1", "0, 1", "0 disables the selection of Winograd for 3x3 convolutions."),
    Variable("NETCL_CONV_TILED_LOCAL", _flag, "0", "0, 1", "1 allows the tiled-local convolution on small outputs."),
    Variable("NETCL_AMX", _flag, "0", "0, 1", "1 lets products use the AMX tile registers of x86 CPUs that have them (amx_bf16)."),
    Variable("NETCL_MATRIX_UNITS", _flag, "1", "0, 1",
             "0 forbids the matrix units of NVIDIA GPUs (compute capability 8.0 and more), which are used once a check found them right."),
    Variable("NETCL_MAX_CACHED_GB", _positive_number, "4", "a number of gigabytes, 0 or more",
             "How much free device memory a PersistentBufferPool may keep; not set, a quarter of a GPU's memory if that is more."),
    Variable("NETCL_ASYNC_H2D", _flag, "1", "0, 1", "Default of Tensor.from_host(async_copy=...)."),
    Variable("NETCL_PINNED_H2D", _flag, "1", "0, 1", "Default of Tensor.from_host(use_pinned=...)."),
    Variable("NETCL_PROFILE_EVENTS", _flag, "0", "0, 1", "1 requests profiling on every queue made from then on."),
    Variable("NETCL_AUTOTUNE", _autotune, "off", "off, on, force, or with a budget in seconds: on:5",
             "Whether unmeasured kernel configurations are measured at first use; the seconds are for the whole process, 10 by default."),
    Variable("NETCL_FUSION", _least_elements, "1", "0, 1, or a number of elements",
             "Chains of pointwise ops over large tensors, and products with what follows them, run as one kernel in plain eager code, when "
             "a value is first needed. 0 turns that off, a number says from how many elements on. Read once, when netcl is loaded."),
    Variable("NETCL_DEBUG", ("0", "1", "2", "3", "4").index, "0", "0, 1, 2, 3, 4",
             "What is told on stderr: 1 device chosen, 2 kernels built, 3 timings and fusion, 4 generated source."),
    Variable("NETCL_COMM_TIMEOUT", _positive_number, "300", "seconds",
             "How long a distributed call waits for the other ranks before it names who is missing."),
    Variable("NETCL_PROGRESS", _one_of_words("auto", "bar", "plain", "off"), "auto", "auto, bar, plain, off",
             "How progress is shown; auto is a moving line on a terminal and in a notebook, and plain lines elsewhere."),
    Variable("NETCL_API_KEY", str.strip, "", "any text", "The key that `netcl serve` asks requests for; empty means none."),
    Variable("NETCL_TRACEBACK", _one_of_words("short", "full"), "short", "short, full",
             "Whether tracebacks of netcl's errors leave netcl's own frames out and end in the line of the program. full shows all."),
)  # fmt: skip

VARIABLES: dict[str, Variable] = {row.name: row for row in _VARIABLE_ROWS}


def value(name: str) -> Any:
    """Return the parsed value of a NETCL_* variable or of its default; an illegal value raises ``EnvironmentVariableError``."""
    row = VARIABLES[name]
    text = os.environ.get(name, row.default)
    try:
        return row.parse(text)
    except ValueError:
        what = f"{name} must have one of its legal values"
        raise EnvironmentVariableError(message("env", what, f"legal: {row.legal}", value=repr(text))) from None


def raw(name: str) -> str | None:
    """Return the unparsed value of any variable; ``None`` if unset."""
    return os.environ.get(name)


def set_variable(name: str, text: str) -> None:
    """Set a variable of this process: that of the OpenCL loader, or NETCL_DEVICE in a rank."""
    os.environ[name] = text


def cache_dir() -> Path | None:
    """Return the folder for compiled kernels and measurements, created if necessary; ``None`` if it cannot be created or written to."""
    folder = value("NETCL_CACHE_DIR") or user_cache_path("netcl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, for instance one in :func:`cache_dir`: a reader sees the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)  # there only after an error or an interrupt


def remove_file(path: Path) -> bool:
    """Remove a file of :func:`cache_dir`; returns whether that was possible: the folder may be read-only, the file another user's."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def for_child(**changes: str) -> dict[str, str]:
    """Return the environment of a child process: that of this process with ``changes``."""
    return {**os.environ, **changes}
