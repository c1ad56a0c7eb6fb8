"""Measured kernel configurations on disk: one JSON file per device and driver, and configurations shipped for known devices.

A file holds entries by problem class. Writes merge (under a lock, except on Windows) and replace the file in one piece, so several
processes may tune at once; a damaged file is removed, with a warning. :mod:`netcl.profiling.autotuner` defines the meaning of entries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from netcl.core import env
from netcl.core.capabilities import DeviceProfile
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem, get_matmul_precision
from netcl.engine.algorithms import FAMILIES, Family

try:
    import fcntl
except ImportError:  # Windows: two processes that finish at the same moment may lose one entry, never the file
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("netcl")
NEAR, FAR = 1, 2  # powers of two by which one size, and all of them together, may differ between neighbors
TUNED_DTYPES = ("float32", "float16", "bfloat16", "float64")
FORMAT = 2  # grows when configurations change their meaning: older files are then begun anew
SHIPPED = Path(__file__).with_name("tuned.json")
Entry = Mapping[str, Any]
_PLAIN = {field.name: field.default for field in fields(KernelConfig) if field.name not in ("variant", "extra")}


def to_json(config: KernelConfig) -> dict[str, Any]:
    """Convert a configuration to plain data, only the fields that differ from the defaults.

    >>> to_json(KernelConfig(KernelVariant.MATMUL_TILED, tile_k=16, extra={"why": "large", "tier": "simt"}))
    {'variant': 'MATMUL_TILED', 'tile_k': 16, 'extra': {'tier': 'simt'}}
    """
    changed = {name: getattr(config, name) for name, default in _PLAIN.items() if getattr(config, name) != default}
    extra = {name: value for name, value in config.extra.items() if name != "why"}
    return {"variant": config.variant.name, **changed, **({"extra": extra} if extra else {})}


def from_json(data: Mapping[str, Any]) -> KernelConfig:
    """Convert the data of :func:`to_json` back; raises ``ValueError`` for other data."""
    try:
        given = dict(data)
        variant = KernelVariant[given.pop("variant")]
        if "local_size_2d" in given:
            given["local_size_2d"] = tuple(given["local_size_2d"])
        return KernelConfig(variant, **given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"data must be a kernel configuration as to_json returns it, got {data!r}") from error


class TuningStore:
    """Measured kernel configurations by device and problem class. The user's entries take precedence over those shipped with netcl."""

    def __init__(self, shipped: Path = SHIPPED) -> None:
        self._shipped = shipped
        self._read: dict[Path, tuple[Any, dict[str, Entry]]] = {}
        self._warned = False

    def folder(self) -> Path | None:
        """Return the folder of the user's tuning files; ``None`` if no folder is writable."""
        base = env.cache_dir()
        return None if base is None else base / "tuning"

    def path(self, profile: DeviceProfile) -> Path | None:
        """Return the file of a device and driver; ``None`` without a writable folder."""
        folder = self.folder()
        facts = (profile.platform, profile.name, profile.driver_version)
        label = re.sub(r"[^a-z0-9]+", "-", profile.name.lower()).strip("-")[:40]
        return None if folder is None else folder / f"{label}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}.json"

    def entries(self, profile: DeviceProfile) -> dict[str, Entry]:
        """Return all entries of a device, by problem class."""
        path = self.path(profile)
        own = {} if path is None else self._own(path)
        shipped = _shipped(self._shipped).get((profile.platform, profile.name), {})
        return {**shipped, **own} if own else shipped

    def put(self, profile: DeviceProfile, key: str, entry: Entry) -> bool:
        """Store an entry; returns whether it could be written."""
        path = self.path(profile)
        if path is None:
            return False
        head = {"format": FORMAT, "platform": profile.platform, "device": profile.name, "driver": profile.driver_version}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_suffix(".lock"), "a") as lock:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                merged = {**self._own(path), key: entry}
                env.replace_file(path, json.dumps({**head, "entries": merged}, indent=1, sort_keys=True).encode())
        except OSError as error:
            log.info("[tuning] a measured configuration was not saved: %s", error)
            return False
        return True

    def clear(self) -> int:
        """Remove all tuning files in the cache folder, not the shipped entries; returns the number of devices that had one."""
        folder, gone = self.folder(), 0
        for path in folder.glob("*") if folder and folder.exists() else ():
            gone += path.suffix == ".json"
            path.unlink(missing_ok=True)
        return gone

    def info(self) -> dict[str, Any]:
        """Return the folder, and the number of entries in it."""
        folder = self.folder()
        files = sorted(folder.glob("*.json")) if folder and folder.exists() else []
        return {"tuning folder": str(folder or "none"), "tuned problems": sum(len(self._own(path)) for path in files)}

    def _own(self, path: Path) -> dict[str, Entry]:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = self._read[path] = (stamp, _parsed(path.read_bytes()))
            return known[1]
        except OSError:
            return {}
        except ValueError as error:
            env.remove_file(path)
            if not self._warned:
                self._warned = True
                text = f"[tuning] measured configurations were lost and will be measured again: {error}; file={path}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return {}


def _parsed(data: bytes) -> dict[str, Entry]:
    """Parse the entries of a file; raises ``ValueError`` for other content. A file of another format version has no entries."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("brackets must not be nested too deeply") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        raise ValueError("the file must be a JSON object with entries")
    if content.get("format") != FORMAT:
        return {}
    if not all(isinstance(entry, dict) for entry in content["entries"].values()):
        raise ValueError("every entry must be a JSON object")
    return content["entries"]


@cache
def _shipped(path: Path) -> dict[tuple[str, str], dict[str, Entry]]:
    content = json.loads(path.read_text()) if path.exists() else {"devices": []}
    return {(row["platform"], row["device"]): row["entries"] for row in content["devices"]}


store = TuningStore()
warned_of: set[tuple[str, str]] = set()  # devices with quarantined algorithms: platform and name


def tuned(problem: Problem) -> KernelConfig | None:
    """Return the measured configuration of a problem or of a neighboring one; ``None`` if the policy decides.

    With ``NETCL_AUTOTUNE``, a problem that was not measured yet is measured now, as long as the budget lasts.
    """
    mode, seconds = env.value("NETCL_AUTOTUNE")
    asked = None if mode == "off" and not store.entries(problem.profile) else with_all_flags(problem)
    if asked is None:
        return None
    if mode != "off":
        hooks.upper(".profiling.autotuner").search_automatically(asked, mode, seconds)
    entry = recall(asked)
    if not entry or not entry.get("config"):
        return None
    try:
        config = from_json(entry["config"])
    except ValueError:
        return None
    return config if config in FAMILIES[asked.op].configurations(asked) else None  # the family may not offer it for this problem


def with_all_flags(problem: Problem) -> Problem | None:
    """Return the problem with every flag of its family; ``None`` for problems that are not tuned."""
    family = FAMILIES.get(problem.op)
    if family is None or problem.dtype not in TUNED_DTYPES or 0 in problem.shape:
        return None
    return family.problem(*problem.shape, profile=problem.profile, dtype=problem.dtype, **problem.flags)


def store_key(family: Family, problem: Problem) -> str:
    """Return the name of a problem's class in the store. It includes the precision, which determines the allowed kernels."""
    return json.dumps([*family.problem_class(problem), get_matmul_precision()])


def recall(problem: Problem, near: bool = True) -> Entry | None:
    """Return the entry of a problem's class or, with ``near``, of the nearest class with slightly different sizes; else ``None``."""
    entries = store.entries(problem.profile)
    key = store_key(FAMILIES[problem.op], problem)
    if key in entries or not near or not entries:
        return entries.get(key)
    wanted = _problem_class(key)
    ranked = sorted((distance, other) for other in entries if (distance := _distance(wanted, _problem_class(other))) is not None)
    return entries[ranked[0][1]] if ranked else None


def _problem_class(key: str) -> list[Any]:
    """Return the problem class that :func:`store_key` encoded in a key; empty for any other key."""
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        return []
    return parts if isinstance(parts, list) else []


def _distance(one: list[Any], other: list[Any]) -> float | None:
    """Return how many doublings of sizes lead from one problem class to another; ``None`` for classes that are not neighbors."""
    if len(one) != len(other) or [type(a) for a in one] != [type(b) for b in other]:
        return None
    sizes = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, int)]
    if any(a != b for a, b in zip(one, other, strict=True) if not isinstance(a, int)) or any(min(pair) < 1 for pair in sizes):
        return None
    apart = [abs(math.log2(a) - math.log2(b)) for a, b in sizes]
    windows = apart[5:] if len(sizes) == 7 else []  # of a convolution: 3x3 is no neighbor of 5x5
    return sum(apart) if max(apart, default=0) <= NEAR and sum(apart) <= FAR and not any(windows) else None


def quarantined(profile: DeviceProfile) -> Mapping[str, str]:
    """Return the error of each quarantined algorithm of a device, by ``family/name``; the first call for a device warns about them."""
    banned = store.entries(profile).get("quarantine", {})
    if banned and (profile.platform, profile.name) not in warned_of:
        warned_of.add((profile.platform, profile.name))
        what = "[quarantine] not used, as they computed wrong results: %s; device=%s; `netcl selftest --full` checks again"
        log.warning(what, ", ".join(sorted(banned)), profile.name)
    return banned
