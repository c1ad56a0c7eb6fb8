"""The container of every ``.netcl`` file: an NPZ archive with JSON in ``__netcl_meta__``, written completely or not at all.

Files are not trusted: names and sizes of entries are checked before any entry is read, and every entry must match its CRC. Arrays of
objects raise, and nothing is ever unpickled or written to a path that a file names.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from netcl.core.errors import DtypeError, ShapeError, message, some
from netcl.data.formats import limit_for, npy_array, regular
from netcl.io.opcodes import Refused

fcntl: Any = None
with suppress(ImportError):  # Windows has none; there, a file that is being written cannot be removed anyway
    fcntl = importlib.import_module("fcntl")

VERSION = 1
META = "__netcl_meta__"
#: What a ``.netcl`` file may hold, and the function that opens it.
OPENED_BY = {"model": "load_model", "checkpoint": "load_checkpoint", "state": "netcl.load", "params": "load_params"}
_SWEEP_SECONDS = 60
#: What readers of zip archives raise over damaged bytes; a RecursionError, over JSON, is a RuntimeError.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, OSError)
_BAD_NAME = re.compile(r"^$|^[/~]|^[A-Za-z]:|\\|(^|/)\.\.?(/|$)|//|/$|[\x00-\x1f\x7f\ud800-\udfff]|^.{4096}")


class FileError(ValueError):
    """Raised for a file that is damaged, of another format, too new, or unsuitable for its target, and for values that cannot be saved."""


def refusal(op: str, what: str, remedy: str = "", **values: object) -> FileError:
    """Build a :class:`FileError` with the text of :func:`netcl.core.errors.message`."""
    return FileError(message(op, what, remedy, **values))


# ---- writing


@contextmanager
def filling(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the ``OSError`` of a full disk, quota or file size limit to an ``OSError`` that names ``path`` and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        remedy = "free space, or write to another folder"
        full = OSError(message("save", f"there is no room for the file: {error.strerror}", remedy, file=os.fspath(path)))
        full.errno = error.errno
        raise full from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces ``path`` once it is completely on disk. If writing fails, ``path`` is unchanged.

    As with a plain write, a symbolic link is followed, a read-only file raises, and an older file keeps its mode.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(message("save", "the folder must exist", "create it first", folder=target.parent))
    if target.exists() and not target.is_file():
        raise FileExistsError(message("save", "the path must not be a folder or a device", "name a file", path=repr(str(path))))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(message("save", "the file must be writable", "change its mode or name another file", path=repr(str(path))))
    _sweep(target.parent)
    temporary = target.with_name(f".writing-{secrets.token_hex(8)}")
    try:
        with filling(target), open(temporary, "x+b") as file:
            _lock_file(file.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _lock_file(descriptor: int) -> bool:
    """Lock a file without waiting. Return False if another process holds the lock. Without ``fcntl``, return True without locking."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def hold_folder(folder: str | os.PathLike[str], op: str) -> Callable[[], None]:
    """Lock a folder and return the function that releases it; raises if another process, or another caller, holds the folder.

    Warns on file systems without locks. Without ``fcntl``, nothing is locked.
    """
    if fcntl is None:
        return lambda: None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        remedy = "wait for that run, or name another folder"
        raise refusal(op, "the folder must not be in use by a run that has not ended", remedy, folder=folder) from None
    except OSError as error:
        what = f"the folder cannot be locked: {error}; no other run may use it"
        warnings.warn(message(op, what, folder=folder), stacklevel=3)
    return partial(os.close, descriptor)


def _sweep(folder: Path) -> None:
    """Remove the temporary files in ``folder`` that killed processes left behind, if they are older than a minute."""
    for path in folder.glob(".writing-*"):
        with suppress(OSError), open(path, "rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _SWEEP_SECONDS and _lock_file(file.fileno()):
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a renamed file in it is durable. Does nothing on Windows, which cannot open folders."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse this for folders
        pass
    finally:
        os.close(handle)


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], op: str) -> None:
    """Write arrays to an NPZ file at exactly ``path``; no suffix is added."""
    for name, array in arrays.items():
        if not isinstance(name, str) or bad_name(name):
            raise refusal(op, "every name must be usable as a file entry", "use letters, digits, dots and underscores", name=repr(name))
        if array.dtype.hasobject or array.dtype.kind not in "biufcU":
            raise refusal(op, f"an array must hold numbers or text, got dtype {array.dtype}", "convert it to numbers", name=name)
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # A fixed date: the same content gives the same bytes.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array, order="C"), allow_pickle=False)


def write(path: str | os.PathLike[str], meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray], op: str) -> None:
    """Write a ``.netcl`` file: ``meta`` as JSON, with the checksum of every array, and the arrays."""
    if META in arrays:
        raise refusal(op, "an array must not have a reserved name", "rename it", name=META)
    sums = {name: checksum(array) for name, array in arrays.items()}
    text = json.dumps({"version": VERSION, **meta, "sha256": sums}, allow_nan=False)
    write_arrays(path, {META: np.array(text), **arrays}, op)


def checksum(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's dtype, shape and bytes, in hexadecimal."""
    digest = hashlib.sha256(f"{array.dtype.newbyteorder('<').str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


# ---- reading


class Archive(NamedTuple):
    """The content of a ``.netcl`` file: its metadata, and its arrays by name."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


def bad_name(name: str) -> bool:
    """Whether an entry's name is empty, too long, has control characters, or is not a plain relative path."""
    return _BAD_NAME.search(name) is not None


@contextmanager
def refusing(op: str, path: str | os.PathLike[str], kinds: tuple[type[BaseException], ...] = _DAMAGED) -> Iterator[None]:
    """Convert errors of the types ``kinds``, which damaged files cause in readers, to a :class:`FileError` that names the file."""
    try:
        yield
    except (FileError, DtypeError, ShapeError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Refused as fault:
        raise refusal(op, str(fault), file=path) from None
    except kinds as fault:
        reason = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
        remedy = "pass a complete file of the right format" if op.startswith("load") else ""
        raise refusal(op, "the file must be undamaged and of the right format", remedy, reason=reason, file=path) from fault


def regular_file(path: str | os.PathLike[str], op: str) -> str | os.PathLike[str]:
    """Return the path; raises for a pipe or a device, because opening those may block."""
    return regular(path, op, refusal)


class Entries:
    """The entries of a zip archive, checked before any is read."""

    def __init__(self, path: str | os.PathLike[str], op: str, max_bytes: int | None = None):
        self.path, self.op = path, op
        with refusing(op, path):
            self.zip = zipfile.ZipFile(regular_file(path, op))
        try:
            # Of the file that is open: another may have taken its name since.
            self.size = os.fstat(self.zip.fp.fileno()).st_size  # type: ignore[union-attr]
            self.limit = limit_for(self.size, max_bytes)
            self.infos = self._checked()
        except FileError:
            self.zip.close()
            raise

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *exc: object) -> None:
        self.zip.close()

    def refuse(self, what: str, remedy: str = "", **values: object) -> FileError:
        """Build a :class:`FileError` that names this file."""
        return refusal(self.op, what, remedy, **values, file=self.path)

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        file, infos = self.zip.fp, dict[str, zipfile.ZipInfo]()
        file.seek(-22 - len(self.zip.comment), os.SEEK_END)  # type: ignore[union-attr]
        count, start = struct.unpack("<10xH4xL2x", file.read(22))  # type: ignore[union-attr]
        # zipfile does not compare them with the entries it finds; the largest numbers refer to a zip64 record.
        if count not in (0xFFFF, len(self.zip.infolist())) or start not in (0xFFFFFFFF, self.zip.start_dir):
            raise self.refuse("the directory of the archive must be undamaged", entries=count, found=len(self.zip.infolist()))
        packed, total = 0, 0
        for info in self.zip.infolist():
            if bad_name(info.filename):
                raise self.refuse("the name of an entry must be a plain relative path", name=repr(info.filename))
            if info.filename in infos:
                raise self.refuse("entries must have different names", name=repr(info.filename))
            if info.flag_bits & 1:
                raise self.refuse("an entry must not be encrypted", name=repr(info.filename))
            infos[info.filename] = info
            packed, total = packed + info.compress_size, total + info.file_size
        if packed > self.size:
            raise self.refuse(f"entries must not overlap or be truncated, got {packed} bytes of entries", file_bytes=self.size)
        if total > self.limit:
            remedy = "if you trust the file, pass max_bytes="
            raise self.refuse("the file must not unpack to more than the limit", remedy, unpacked=total, limit=self.limit)
        return infos

    def read(self, name: str) -> np.ndarray:
        """Read the bytes of an entry into new memory and check their length and CRC."""
        info = self.infos[name]
        with refusing(self.op, f"{self.path}:{name}"), self.zip.open(info) as entry:
            data = np.empty(info.file_size, np.uint8)
            at = 0
            while at < data.size:
                got = entry.readinto(data[at:].data)  # type: ignore[attr-defined]
                if not got:
                    raise EOFError(f"the entry must have {data.size} bytes, got {at}")
                at += got
            if entry.read(1):
                raise EOFError(f"the entry must have {data.size} bytes, got more")
        return data


def read_arrays(path: str | os.PathLike[str], op: str, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an NPZ file; raises for arrays of objects, because they are pickled."""
    with Entries(path, op, max_bytes) as entries:
        found = {}
        for name in entries.infos:
            if not name.endswith(".npy") or bad_name(name[:-4]):
                raise entries.refuse("every entry must be an array in NPY format", name=repr(name))
            found[name[:-4]] = array_of(entries, name)
    return found


def array_of(entries: Entries, name: str) -> np.ndarray:
    """Read the array of an NPY entry."""
    return npy_array(entries.read(name), lambda what, remedy="", **values: entries.refuse(what, remedy, name=repr(name), **values))


def read(path: str | os.PathLike[str], op: str, kind: str, max_bytes: int | None = None) -> Archive:
    """Read a ``.netcl`` file and verify every checksum; raises unless the type of its content is ``kind``, such as ``model``."""
    arrays = read_arrays(path, op, max_bytes)
    meta = parse_meta(arrays.pop(META, None), path, op)
    if meta["kind"] != kind:
        remedy = OPENED_BY.get(meta["kind"], "")
        raise refusal(op, f"the file must hold a {kind}, got a {meta['kind']}", remedy and f"{remedy} opens it", file=path)
    sums = meta.pop("sha256", None)
    if not isinstance(sums, dict):
        raise refusal(op, "the file must have checksums", "save it again with netcl", file=path)
    names_differ(op, path, "entries", sums, arrays)
    for name, array in arrays.items():
        if checksum(array) != sums[name]:
            raise refusal(op, "every entry must match its checksum", "the file was damaged or changed", name=repr(name), file=path)
    return Archive(meta, arrays)


def read_meta(path: str | os.PathLike[str], op: str, max_bytes: int | None = None) -> dict[str, Any]:
    """Read the metadata of a ``.netcl`` file, without its arrays."""
    with Entries(path, op, max_bytes) as entries:
        return parse_meta(array_of(entries, f"{META}.npy") if f"{META}.npy" in entries.infos else None, path, op)


def parse_meta(stored: np.ndarray | None, path: str | os.PathLike[str], op: str) -> dict[str, Any]:
    """Return the JSON of ``__netcl_meta__``; raises if it is missing or malformed, or if the file requires a newer netcl."""
    if stored is None or stored.dtype.kind != "U" or stored.shape != ():
        raise refusal(op, f"the file must have a text entry {META}", "load_params opens NPZ files without one", file=path)
    with refusing(op, path):
        meta = json.loads(str(stored))
    version = meta.get("version") if isinstance(meta, dict) else None
    if type(version) is not int or version < 1 or not isinstance(meta.get("kind"), str):
        raise refusal(op, f"{META} must have a version of at least 1 and a kind", version=repr(version), file=path)
    if version > VERSION:
        raise refusal(op, "the file requires a newer netcl", "update netcl", version=version, known=VERSION, file=path)
    return meta


def names_differ(op: str, path: object, what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise :class:`FileError` with the missing and the unexpected names, if there are any."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        values = {key: some(names) for key, names in (("missing", missing), ("unexpected", extra)) if names}
        raise refusal(op, f"the {what} must have the expected names", **values, file=path)
