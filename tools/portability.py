"""Runs every row of the op table on devices of this machine and writes what became of it: the data of docs/portability.md.

    python tools/portability.py [--device pocl] [--device cpu] [--jobs 8] [--seconds 160] [--commit HASH] [ops ...]

One file per device, ``benchmarks/results/portability_<device>.json``. Each row runs its samples in float32, one in float16, one gradient.
``--jobs`` child processes share the rows; a row that ends its process is recorded as failed, and the others go on. A run that ``--seconds``
ends is continued by the next; results of another commit of the package or another driver are replaced. ``--commit`` names the commit where
there is no git repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import threading
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
from netcl.runtime import tuning  # noqa: E402

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


def head(handle: DeviceHandle, commit: str = "") -> dict[str, str]:
    """The device, its driver, and the commit of the package."""
    if not commit:
        git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "netcl"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    if handle.backend == "cpu":
        import numpy

        return {"device": "NumPy", "platform": "NumPy", "driver": numpy.__version__, "commit": commit}
    device = handle.queue.device
    facts = {"platform": f"{device.platform.name}, {device.platform.version}", "driver": device.driver_version}
    return {"device": handle.profile.title, **facts, "commit": commit}


def path_of(told: dict[str, str]) -> Path:
    name = "numpy" if told["device"] == "NumPy" else f"{told['platform'].split(',')[0]} {told['device']}"
    return RESULTS / f"portability_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')[:120]}.json"


def answer(handle: DeviceHandle) -> int:
    """A child process: reads names of rows, writes what became of each as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # drivers print
    for line in sys.stdin:
        answers.write(json.dumps(check_row(REGISTRY[line.strip()], handle)) + "\n")
        answers.flush()
    return 0


class Children:
    """Processes that check the rows of one device, at most ``jobs`` at a time."""

    def __init__(self, command: list[str], names: list[str], jobs: int, seconds: float, row_seconds: float):
        self.command, self.row_seconds = command, row_seconds
        self.names: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            self.names.put(name)
        self.deadline = time.monotonic() + seconds
        self.rows: dict[str, dict[str, str]] = {}
        threads = [threading.Thread(target=self._work) for _ in range(min(jobs, len(names)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        """Start a process, and another after a row that ended one, until there is no row or no time left."""
        while time.monotonic() < self.deadline and not self.names.empty():
            with subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                while self._one(child):
                    pass
                child.kill()

    def _one(self, child: Any) -> bool:
        """Check the next row; whether the process may check another."""
        left = self.deadline - time.monotonic()
        try:
            name = self.names.get_nowait()
        except queue.Empty:
            return False
        if left <= 0:
            return False
        limit, late = min(left, self.row_seconds), threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        clock = threading.Timer(limit, end)
        clock.start()
        try:
            child.stdin.write(name + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        clock.cancel()
        if not line and late.is_set() and limit == left:
            return False  # the next run takes this row
        status = 0 if line else child.wait()
        ended = f"the process ends with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
        lost = {"float32": f"failed: {f'no result within {limit:.0f} s' if late.is_set() else ended}"}
        self.rows[name] = json.loads(line) if line else lost
        bad = {check: state for check, state in self.rows[name].items() if state != "passed"}
        sys.stdout.write(f"{name:28s} {bad or 'passed'}\n")
        sys.stdout.flush()
        return bool(line)


def run(selector: str, handle: DeviceHandle, given: argparse.Namespace) -> bool:
    """Check rows for at most ``given.seconds``; whether all rows have a result."""
    told = head(handle, given.commit)
    path = path_of(told)
    known = json.loads(path.read_text()) if path.exists() else {}
    same = all(known.get(name) == value for name, value in told.items())
    rows: dict[str, Any] = {name: of for name, of in known.get("rows", {}).items() if same and name in REGISTRY}
    command = [sys.executable, __file__, "--child", "--device", selector]
    wanted = given.ops or [name for name in sorted(REGISTRY) if name not in rows]
    rows |= Children(command, wanted, given.jobs, given.seconds, given.seconds / 2).rows
    banned = dict(tuning.quarantined(handle.profile)) if handle.backend == "cl" else {}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    content = {**told, "machine": platform.machine(), "date": date, "quarantined": banned, "rows": dict(sorted(rows.items()))}
    path.write_text(json.dumps(content, indent=0) + "\n")
    left = [name for name in REGISTRY if name not in rows]
    sys.stdout.write(f"{path.relative_to(ROOT)}: {len(rows)} rows, {len(left)} left{'; run it again' if left else ''}\n")
    return not left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", help="rows to check again; all that have no result yet if none is given")
    parser.add_argument("--device", action="append", help="a selector as in `netcl devices`; may be repeated; default: the active device")
    parser.add_argument("--jobs", type=int, default=1, help="child processes that share the rows")
    parser.add_argument("--seconds", type=float, default=160.0, help="per device; rows under way are then left to the next run")
    parser.add_argument("--commit", default="", help="recorded commit of the package; default: what git says")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    done = True
    for selector in given.device or ["auto"]:
        handle = manager.default(selector)
        if handle is None:
            parser.error(f"there is no device {selector!r}")
        if given.child:
            return answer(handle)
        done = run(selector, handle, given) and done
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
