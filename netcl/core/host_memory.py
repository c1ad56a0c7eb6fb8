"""Estimates how much memory this process may still allocate: address-space limit, control group, free memory of the machine.

CPU runtimes allocate from the process. PoCL aborts it when its own small allocations fail, so pools of CPUs check for free memory first.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

RESERVE = 32 << 20  # bytes reserved for the runtime, the compiler and Python
_EACH = 2 << 10  # bytes beside a buffer: the driver's record of it and the C library's
_left = 0  # bytes that may be taken before the limits are read again


def reserve(nbytes: int) -> bool:
    """Whether a buffer of ``nbytes`` can be allocated; if so, count it as allocated. Limits are read again after 32 MB at the latest."""
    global _left
    wanted = nbytes + _EACH
    if _left < wanted:
        _left = 0
        room = available_bytes() - RESERVE
        if room < wanted:
            return False
        _left = int(max(wanted, min(room / 16, RESERVE)))
    _left -= wanted
    return True


def available_bytes() -> float:
    """Return the bytes that can be allocated now; infinity where the system does not report a limit."""
    return min(_address_space(), _control_group(), _machine())


def release_unused() -> None:
    """Give unused memory of the C library back to the system; glibc would keep the memory of released small blocks."""
    with suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


def _heap() -> int:
    """Return the bytes that the C library holds but does not use; small allocations use these bytes first."""
    with suppress(OSError, AttributeError, TypeError):  # another C library
        asked = ctypes.CDLL(None).mallinfo2
        asked.restype = _Heap
        return int(asked().fordblks)
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _address_space() -> float:
    resource: Any = None
    with suppress(ImportError):  # Windows
        resource = importlib.import_module("resource")
    limit = -1 if resource is None else resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _text("/proc/self/statm").split()
    return limit - int(used[0]) * os.sysconf("SC_PAGE_SIZE") + _heap() if used and limit >= 0 else math.inf


def _control_group() -> float:
    """Return the bytes left to this process's control groups (version 2); inactive file caches count as free."""
    path = next((line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    found = [math.inf]
    for folder in () if path is None else (Path(path), *Path(path).parents):
        base = f"/sys/fs/cgroup{folder}".rstrip("/")
        most, used = _text(f"{base}/memory.max").strip(), _text(f"{base}/memory.current").strip()
        if most.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)$", _text(f"{base}/memory.stat"), re.M)
            found.append(int(most) - int(used) + (int(cached[1]) if cached else 0))
    return min(found)


def _machine() -> float:
    sizes = dict(re.findall(r"^(MemAvailable|SwapFree): +(\d+) kB$", _text("/proc/meminfo"), re.M))
    return 1024 * (int(sizes["MemAvailable"]) + int(sizes.get("SwapFree", 0))) if "MemAvailable" in sizes else math.inf
