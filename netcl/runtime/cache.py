"""A disk cache of compiled programs, so that later processes need not compile them.

A file holds one program: a header, a checksum of key and binary, and the driver's binary. Files are replaced atomically, so many
processes may share the folder without locks. The program of an invalid file is compiled again, with one warning per process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from netcl.core import env
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.kernels.program import Kernel as KernelHandle

__all__ = ["KernelHandle", "ProgramCache", "clear", "info", "program_cache"]

log = logging.getLogger("netcl")
_MAGIC = b"netcl program 2\n"
_DIGEST = 32
MAX_BYTES = 1 << 30  # the oldest entries go when the folder outgrows this
_TRIM_EVERY = 64
_COUNTS, _MOST_KINDS = "programs.json", 256  # programs by kind of run, and the most kinds


def _binary_digest(key: str, binary: bytes) -> bytes:
    """Hash a binary with its key, so that a renamed file does not run in place of another."""
    return hashlib.sha256(key.encode() + b"\0" + binary).digest()


class ProgramCache:
    """A disk cache of binaries, keyed by source, options, device, driver and platform version; ``get`` returns kernels."""

    def __init__(self) -> None:
        self._warned = False
        self._announced = False
        self._saved = 0

    def folder(self) -> Path | None:
        """Return the folder of the binaries; ``None`` if no folder is writable."""
        base = env.cache_dir()
        return None if base is None else base / "programs"

    def get(self, queue: Any, source: str, name: str, options: tuple[str, ...] = ()) -> KernelHandle:
        """Return the kernel ``name`` of ``source``: from memory, from disk, or compiled."""
        return program.get(queue, source, name, options)

    def load(self, key: str) -> bytes | None:
        """Return the binary of a key, or ``None``; a damaged file is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes() if path else b""
        except OSError:
            self.announce_first_run()
            return None
        if not data:
            return None
        digest, binary = data[len(_MAGIC) : len(_MAGIC) + _DIGEST], data[len(_MAGIC) + _DIGEST :]
        if not data.startswith(_MAGIC) or _binary_digest(key, binary) != digest:
            self.reject(key, "the file is damaged or of another program")
            return None
        return binary

    def announce_first_run(self) -> None:
        """If there is no cache folder yet, report once that the first run takes longer, because it compiles all its kernels."""
        if self._announced or env.value("NETCL_PROGRESS") == "off":
            return
        self._announced, folder = True, self.folder()
        if folder is not None and not folder.exists():
            log.warning("netcl: compiling kernels for the first time; the next start is quick")
            with suppress(OSError):  # nothing is saved then
                folder.mkdir(parents=True, exist_ok=True)

    def save(self, key: str, binary: bytes) -> None:
        """Store a binary; if the folder is not writable, the program is compiled again next time."""
        path = self._path(key)
        if path is None:
            return
        try:
            env.replace_file(path, _MAGIC + _binary_digest(key, binary) + binary)
        except OSError as error:
            log.info("[cache] a compiled program was not saved: %s", error)
        self._saved += 1
        if self._saved % _TRIM_EVERY == 0:
            self.trim()

    def reject(self, key: str, reason: str) -> None:
        """Remove an entry that cannot be used; warns once per process."""
        path = self._path(key)
        if path is not None:
            env.remove_file(path)
        if not self._warned:
            self._warned = True
            warnings.warn(f"[cache] a compiled program was rebuilt: {reason}; file={path}", RuntimeWarning, stacklevel=2)

    def trim(self, max_bytes: int = MAX_BYTES) -> int:
        """Remove the oldest entries until the folder holds at most ``max_bytes``; returns how many were removed."""
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        excess, gone = sum(size for _, _, size in entries) - max_bytes, 0
        for path, _, size in entries:
            if excess <= 0:
                break
            if env.remove_file(path):
                excess, gone = excess - size, gone + 1
        return gone

    def info(self) -> dict[str, Any]:
        """Return the folder, the number of programs and their bytes."""
        sizes = [size for _, _, size in self._entries()]
        return {"folder": str(self.folder() or "none"), "programs": len(sizes), "bytes": sum(sizes)}

    def clear(self) -> int:
        """Remove every entry, including partly written ones; returns how many were removed."""
        gone = 0
        for path, _, _ in self._entries():
            path.unlink(missing_ok=True)
            gone += 1
        return gone

    def _path(self, key: str) -> Path | None:
        folder = self.folder()
        return None if folder is None else folder / key[:2] / f"{key}.clb"

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        folder = self.folder()
        for path in folder.glob("*/*") if folder and folder.exists() else ():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process removed it meanwhile
            yield path, status.st_mtime, status.st_size

    def needed(self, kind: str) -> int:
        """Return how many programs earlier runs with the key ``kind`` needed at most; 0 if unknown."""
        return self._counts().get(kind, 0)

    def remember(self, kind: str, programs: int) -> None:
        """Store how many programs a run with the key ``kind`` needed, unless an earlier run needed more."""
        base, counts = env.cache_dir(), self._counts()
        if base is None or programs <= counts.get(kind, 0):
            return
        counts[kind] = programs
        try:
            env.replace_file(base / _COUNTS, json.dumps(dict(list(counts.items())[-_MOST_KINDS:])).encode())
        except OSError as error:
            log.info("[cache] the number of programs was not saved: %s", error)

    def _counts(self) -> dict[str, int]:
        base = env.cache_dir()
        try:
            found = json.loads((base / _COUNTS).read_bytes()) if base else {}
        except (OSError, ValueError):
            found = {}  # there is none, or it is damaged
        return {kind: n for kind, n in found.items() if isinstance(n, int)} if isinstance(found, dict) else {}


program_cache = ProgramCache()
info = program_cache.info
clear = program_cache.clear
hooks.binary_store = program_cache
