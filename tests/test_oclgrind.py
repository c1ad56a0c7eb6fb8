"""Every op's kernels under Oclgrind, on small shapes: no access out of bounds, no race.

Oclgrind's check of uninitialised values is left out here: version 21.10 reports values that were copied into buffers by the host, and
does not know every instruction. ``@netcl.kernel(check=True)`` keeps it on for single launches.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from netcl import ops, selftest
from netcl.autograd import sanitizer
from netcl.ops.registry import REGISTRY, Choice

PARTS = 8
NAMES = sorted(name for name, row in REGISTRY.items() if not isinstance(row, Choice) and row.ref is not None)
assert ops.names() and selftest.SIZES

SCRIPT = """
import sys
from netcl import ops, selftest
from netcl.core.device import manager
from netcl.ops.registry import REGISTRY
handle = manager.default("oclgrind")
for name in sys.argv[1:]:
    row = REGISTRY[name]
    small = [case for case in selftest.cases(row, "float32", (1, 37)) if sum(getattr(x, "size", 1) for x in case.inputs) <= 400]
    for case in small[:3]:
        selftest.check_forward(row, case, handle)
    if row.differentiable and small:
        selftest.check_gradient(row, small[-1 if len(small) < 3 else 2], handle)
    handle.queue.finish()
    print(name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_are_clean(part, tmp_path):
    if not sanitizer.available():
        pytest.skip("Oclgrind is not installed")
    names, log = NAMES[part::PARTS], tmp_path / "oclgrind.log"
    settings = {**sanitizer.SETTINGS, "OCLGRIND_UNINITIALIZED": "0", "OCLGRIND_LOG": str(log), "NETCL_CACHE_DIR": str(tmp_path)}
    env = {key: value for key, value in {**os.environ, **settings}.items() if value != "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}: {done.stderr[-3000:]}"
    assert done.stdout.split() == names
    said = log.read_text().strip() if log.exists() else ""
    assert not said, said[:3000]
