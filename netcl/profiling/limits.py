"""What a device can do at the most: bytes and operations per second, measured once per context with two small kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from netcl.core.device import CPUQueue, handle_of
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

COPIED = 1 << 23  # elements: 64 MB moved, beyond the caches of most devices
STEPS = {True: 1 << 16, False: 1 << 12}  # multiply-adds of a chain, on CPUs and elsewhere: milliseconds on both
ROUNDS = 5

_SOURCE = """
__kernel void limit_copy(__global const float4* restrict x, __global float4* restrict y, const int n, const int chunk) {
  const int first = get_global_id(0) * chunk, end = min(n, first + chunk);
  for (int i = first; i < end; ++i) y[i] = x[i];
}

#pragma OPENCL FP_CONTRACT ON
// Eight independent chains of WIDTH lanes: enough to hide the latency of a multiply-add on every device so far.
__kernel void limit_multiply_add(__global float* out, const int steps, const float a) {
  const float t = get_global_id(0);
  REAL s0 = t, s1 = t + 1, s2 = t + 2, s3 = t + 3, s4 = t + 4, s5 = t + 5, s6 = t + 6, s7 = t + 7;
  for (int i = 0; i < steps; ++i) {
    s0 = s0 * a + a; s1 = s1 * a + a; s2 = s2 * a + a; s3 = s3 * a + a;
    s4 = s4 * a + a; s5 = s5 * a + a; s6 = s6 * a + a; s7 = s7 * a + a;
  }
  const REAL all = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
  out[get_global_id(0)] = FIRST(all);
}
"""


class Limits(NamedTuple):
    """Bytes and float32 operations per second."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved: float, flops: float) -> float:
        """The least time a kernel needs that moves so many bytes and computes so much."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second)


def limits(queue: Any) -> Limits | None:
    """The limits of a queue's device, measured at the first call; ``None`` on the NumPy backend."""
    if isinstance(queue, CPUQueue):
        return None
    state = program.state(queue)
    if ("profiling", "limits") not in state:
        state["profiling", "limits"] = _measured(queue)
    return state["profiling", "limits"]


def _measured(queue: Any) -> Limits:
    from netcl.profiling.events import Observer

    on_cpu = handle_of(queue).device_type == "cpu"
    units = handle_of(queue).profile.max_compute_units
    width = 8 if on_cpu else 1
    head = f"#define REAL {'float8' if on_cpu else 'float'}\n#define FIRST(v) {'(v).s0' if on_cpu else '(v)'}\n"
    copy, compute = (program.get(queue, head + _SOURCE, name) for name in ("limit_copy", "limit_multiply_add"))
    x, y = (Tensor.full((COPIED,), 1.0, queue=queue) for _ in range(2))
    items, chunk = (4 * units, -(-COPIED // 4 // (4 * units))) if on_cpu else (COPIED // 4, 1)
    busy, steps = units * (4 if on_cpu else 2048), STEPS[on_cpu]
    observer = Observer()
    observer.begin()
    for _ in range(ROUNDS):
        copy(queue, items, 1 if on_cpu else 64, x, y, COPIED // 4, chunk)
        compute(queue, busy, 1 if on_cpu else 64, y, steps, 0.5)
    observer.end()
    best = {name: min(run.seconds for run in observer.launches if run.name == name) for name in (copy.name, compute.name)}
    return Limits(8.0 * COPIED / best[copy.name], 16.0 * width * steps * busy / best[compute.name])
