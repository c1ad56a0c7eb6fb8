"""Runs every row of the op table on devices of this machine and writes what became of it: the data of docs/portability.md.

    python tools/portability.py [--device pocl] [--device cpu] [--seconds 170] [ops ...]

One file per device, ``benchmarks/results/portability_<device>.json``. A run that ``--seconds`` ends is continued by the next; results of
another commit of the package or another driver are replaced. Each row runs its samples in float32, one in float16, and one gradient.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from netcl import selftest  # noqa: E402
from netcl.core.device import DeviceHandle, manager  # noqa: E402
from netcl.engine.registry import REGISTRY, Choice, Row  # noqa: E402
from netcl.profiling import quarantine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MOST_CASES = 3
_WORDS = {"ok": "passed", "FAILED": "failed"}


def check_row(row: Row, handle: DeviceHandle) -> dict[str, str]:
    """What became of each check: passed, failed with the error, or refused with the reason."""
    found = {}
    for check, dtype, function, most in (
        ("float32", "float32", selftest.check_forward, MOST_CASES),
        ("float16", "float16", selftest.check_forward, 1),
        ("gradient", "float32", selftest.check_gradient, 1),
    ):
        if check != "gradient" or row.differentiable:
            result = selftest.timed_result(row.name, check, partial(_each, row, handle, dtype, function, most))
            found[check] = _WORDS.get(result.state, result.state) + (f": {result.detail.splitlines()[0][:200]}" if result.detail else "")
    return found


def _each(row: Row, handle: DeviceHandle, dtype: str, function: Any, most: int) -> None:
    for part in row.rows if isinstance(row, Choice) else (row,):
        if part.ref is not None:
            for case in islice(selftest.cases(part, dtype, (257,)), most):
                function(part, case, handle, dtype)


def head(handle: DeviceHandle) -> dict[str, str]:
    """The device, its driver, and the commit of the package."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "netcl"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    if handle.backend == "cpu":
        import numpy

        return {"device": "NumPy", "platform": "NumPy", "driver": numpy.__version__, "commit": commit}
    device = handle.queue.device
    platform = device.platform
    facts = {"platform": f"{platform.name}, {platform.version}", "driver": device.driver_version}
    return {"device": handle.profile.title, **facts, "commit": commit}


def path_of(told: dict[str, str]) -> Path:
    name = "numpy" if told["device"] == "NumPy" else f"{told['platform'].split(',')[0]} {told['device']}"
    return RESULTS / f"portability_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')[:60]}.json"


def run(handle: DeviceHandle, names: list[str], seconds: float) -> bool:
    """Check rows for at most ``seconds``; whether all rows have a result."""
    told, began = head(handle), time.monotonic()
    path = path_of(told)
    known = json.loads(path.read_text()) if path.exists() else {}
    same = all(known.get(name) == value for name, value in told.items())
    rows: dict[str, Any] = {name: of for name, of in known.get("rows", {}).items() if same and name in REGISTRY}
    wanted = names or sorted(REGISTRY)
    for name in wanted:
        if time.monotonic() - began > seconds:
            break
        if name not in rows or names:
            rows[name] = check_row(REGISTRY[name], handle)
            bad = {check: state for check, state in rows[name].items() if state != "passed"}
            sys.stdout.write(f"{name:28s} {bad or 'passed'}\n")
            sys.stdout.flush()
    banned = dict(quarantine.tuned(handle.profile)) if handle.backend == "cl" else {}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    content = {**told, "date": date, "quarantined": banned, "rows": dict(sorted(rows.items()))}
    path.write_text(json.dumps(content, indent=0) + "\n")
    left = [name for name in REGISTRY if name not in rows]
    sys.stdout.write(f"{path.relative_to(ROOT)}: {len(rows)} rows, {len(left)} left{'; run it again' if left else ''}\n")
    return not left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", help="rows to check again; all that have no result yet if none is given")
    parser.add_argument("--device", action="append", help="a selector as in `netcl devices`; may be repeated; default: the active device")
    parser.add_argument("--seconds", type=float, default=170.0, help="per device; the row under way is finished")
    given = parser.parse_args()
    done = True
    for selector in given.device or ["auto"]:
        handle = manager.default(selector)
        if handle is None:
            parser.error(f"there is no device {selector!r}")
        done = run(handle, given.ops, given.seconds) and done
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
