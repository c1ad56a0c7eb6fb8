"""What a process may still allocate, and pools that keep to it."""

from __future__ import annotations

import math
import platform
import subprocess
import sys

import pytest

from netcl.core import host_memory

LIMITED = """
import resource, sys
import numpy as np
from netcl.core import host_memory
from netcl.core.device import manager
from netcl.core.errors import OutOfMemoryError
from netcl.core.tensor import Tensor

queue = manager.default(sys.argv[1]).queue
values = np.ones(2500, np.float32)
x = Tensor.from_host(queue, values)
assert (x + 1).to_host()[0] == 2  # compiled
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20),) * 2)
kept = []
try:
    while len(kept) < 200_000:
        kept.append(Tensor.from_host(queue, values))
except OutOfMemoryError as error:
    print(str(error).split(";")[0], len(kept) > 100)
del kept[1000:]
again = [Tensor.from_host(queue, values) for _ in range(500)]
print((x + 2).to_host()[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits of Linux")
@pytest.mark.fault("address space is limited", "RLIMIT_AS and many small tensors", "`OutOfMemoryError`; PoCL would abort")
def test_many_small_tensors_under_an_address_space_limit_are_refused(cl_device):
    """PoCL aborted the process here. What is freed can be allocated again."""
    if cl_device.device_type != "cpu":
        pytest.skip("its memory is not the process's")
    done = subprocess.run([sys.executable, "-c", LIMITED, cl_device.platform_name], capture_output=True, text=True)
    refused = "[allocate] the process has no memory left (RLIMIT_AS, control group or machine) True"
    assert (done.returncode, done.stdout.splitlines()) == (0, [refused, "3.0"]), done.stderr[-2000:]


def test_the_limits_are_read_from_the_system(monkeypatch):
    mebi = 1 << 20
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/memory.max": f"{100 * mebi}\n",
        "/sys/fs/cgroup/a/memory.current": f"{80 * mebi}\n",
        "/sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {30 * mebi}\nactive_file 7\n",
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1024 kB\nSwapFree: 2048 kB\n",
    }
    monkeypatch.setattr(host_memory, "_text", lambda path: files.get(path, ""))
    assert host_memory._control_group() == 50 * mebi and host_memory._machine() == 3 * mebi
    files.clear()
    assert host_memory.available_bytes() == math.inf


def test_a_request_beyond_the_room_is_refused(monkeypatch):
    reads = []
    monkeypatch.setattr(host_memory, "_left", 0)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: reads.append(1) or host_memory.RESERVE + (1 << 20))
    assert not host_memory.reserve(2 << 20) and host_memory.reserve(1 << 10) and host_memory.reserve(1 << 10)
    assert len(reads) == 2  # the second small one is within what was granted


KEPT = """
import resource
from netcl.core import host_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

blocks = [bytes(80_000) for _ in range(1500)]
blocks[:] = blocks[::500] + blocks[-1:]
before = resident()
host_memory.release_unused()
print(before - resident() > 60_000_000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.fault("memory that the C library keeps", "blocks freed below one in use", "returned to the system")
def test_memory_the_c_library_keeps_goes_back_to_the_system():
    """A block that is in use above free ones keeps glibc from returning them by itself."""
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
