"""What an error of the driver's compiler says: the log, the lines of source that it names, and where the source is saved."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from netcl.core import env
from netcl.core.errors import message, some


def build_failure(device: Any, source: str, options: tuple[str, ...], text: str) -> str:
    """Save the source and return the text of a build error: the log, the lines it refers to, the device, the path of the source."""
    build_log = text.split("\n\n(options:")[0].split("\n(options:")[0].partition(f"{device.name}'")[2].partition("\n")[2].strip() or text
    lines = source.split("\n")
    marked = sorted({int(n) for n in re.findall(r":(\d+):\d+", build_log) if 0 < int(n) <= len(lines)})
    shown = sorted({k for n in marked[:5] for k in range(max(1, n - 2), min(len(lines), n + 2) + 1)}) or range(1, min(len(lines), 12) + 1)
    listing = "\n".join(f"{'>' if n in marked else ' '}{n:5d} | {lines[n - 1]}" for n in shown)
    seen = {"kernel": kernel_names(source), "device": device.name, "options": " ".join(options) or "none"}
    what = message("build", "the driver cannot compile the kernel source", **seen)
    saved = _saved_source(source)
    return f"{what}\n\n{build_log}\n\n{listing}\n\nsource {saved}"


@lru_cache(maxsize=256)
def kernel_names(source: str) -> str:
    """Return the names of the kernels in a source as one text, shortened if there are many."""
    return some(re.findall(r"\bkernel\b[^;{]*?\bvoid\s+(\w+)\s*\(", source.replace("__kernel", "kernel"))) or "a program without a kernel"


def _saved_source(source: str) -> str:
    folder = env.cache_dir()
    if folder is None:
        return "not saved: there is no writable cache folder (set NETCL_CACHE_DIR)"
    path: Path = folder / "failed" / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return f"saved as {path}"
