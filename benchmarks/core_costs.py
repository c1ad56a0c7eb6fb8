"""What core costs on the host: making and dropping tensors, launching a kernel.

    python benchmarks/core_costs.py [selector ...] [--out results/core_costs.json]

Ours and the bare driver call are interleaved in one run; the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from netcl.core import memory, platforms
from netcl.core.device import DeviceHandle, manager, synchronize
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

AXPY = """__kernel void axpy(__global const float* x, __global float* y, float a, int n) {
  int i = get_global_id(0); if (i < n) y[i] += a * x[i];
}"""
ROUNDS, LAUNCHES, TENSORS = 15, 500, 100_000


def best_microseconds(handle: DeviceHandle, count: int, **ways: Callable[[], object]) -> dict[str, float]:
    """Microseconds per call of each way, the best of interleaved rounds; the queue is drained between them."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(count):
                way()
            best[name] = min(best[name], (time.perf_counter() - start) / count)
            synchronize(handle)
    return {name: round(seconds * 1e6, 2) for name, seconds in best.items()}


def launch_cost(handle: DeviceHandle) -> dict[str, float]:
    """A launch through netcl (arguments, checks, sizes) against the bare enqueue of a kernel whose arguments are set."""
    q, n = handle.queue, 256
    x, y = (Tensor.from_host(q, np.ones(n, np.float32)) for _ in range(2))
    ours = program.get(q, AXPY, "axpy")
    ours(q, n, 64, x, y, 1.0, n)
    bare = ours.program.make("axpy")
    bare.set_scalar_arg_dtypes([None, None, np.float32, np.int32])
    bare.set_args(x.buffer, y.buffer, 1.0, n)
    enqueue = platforms.opencl().enqueue_nd_range_kernel
    return best_microseconds(handle, LAUNCHES, ours=lambda: ours(q, n, 64, x, y, 1.0, n), bare=lambda: enqueue(q, bare, (n,), (64,)))


def tensor_cost(handle: DeviceHandle) -> dict[str, float]:
    """100,000 tensors made and dropped: time each, pool hit rate, growth of the process."""
    q, pool = handle.queue, memory.get_persistent_pool(handle.queue)
    Tensor.empty((64, 128), queue=q)
    hits, misses, before = pool.stats.hits, pool.stats.misses, resident_kilobytes()
    start = time.perf_counter()
    for _ in range(TENSORS):
        Tensor.empty((64, 128), queue=q)
    each = (time.perf_counter() - start) / TENSORS * 1e6
    hits, misses = pool.stats.hits - hits, pool.stats.misses - misses
    costs = best_microseconds(handle, 1000, empty=lambda: Tensor.empty((64, 128), queue=q), zeros=lambda: Tensor.zeros((64, 128), queue=q))
    return {"microseconds_each": round(each, 2), "best_empty": costs["empty"], "best_zeros": costs["zeros"],
            "hit_rate": round(hits / (hits + misses), 5), "grown_kilobytes": resident_kilobytes() - before}  # fmt: skip


def pool_cost(handle: DeviceHandle) -> dict[str, dict[str, float]]:
    """A lease taken and given back, against one of PyOpenCL's memory pool; by kilobytes."""
    from pyopencl.tools import ImmediateAllocator, MemoryPool

    ours, theirs = memory.get_persistent_pool(handle.queue), MemoryPool(ImmediateAllocator(handle.queue))
    ways = {
        size: {"ours": partial(ours.allocate, size), "pyopencl": partial(theirs.allocate, size)} for size in (1 << 10, 1 << 16, 1 << 20)
    }
    return {str(size >> 10): best_microseconds(handle, 5000, **pair) for size, pair in ways.items()}


def resident_kilobytes() -> int:
    text = Path("/proc/self/status")
    return int(text.read_text().split("VmRSS:")[1].split()[0]) if text.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("selectors", nargs="*", default=["cl"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    results = {"commit": commit or "unknown", "machine": platform.machine(), "python": platform.python_version(), "devices": []}
    for selector in options.selectors:
        handle = manager.default(selector)
        if handle is None:
            raise SystemExit(f"no device {selector!r}")
        row = {"platform": handle.platform_name, "device": handle.device_name, "driver": handle.device.driver_version,
               "launch_us": launch_cost(handle), "tensor_us": tensor_cost(handle), "pool_us": pool_cost(handle)}  # fmt: skip
        results["devices"].append(row)
    text = json.dumps(results, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
