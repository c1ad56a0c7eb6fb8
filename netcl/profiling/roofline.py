"""The peak performance of a device: bytes and operations per second, measured once per context with small kernels.

Data may come from a cache, which is many times as fast as memory. Bandwidth is therefore measured over sizes from caches to memory, and
a kernel is compared with the bandwidth at the largest measured size that does not exceed the bytes the kernel moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from netcl.core.device import CPUQueue, handle_of, profile_of
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.profiling.events import Observer

SMALLEST = 32 << 10  # bytes of the smallest size, per compute unit: the first cache of most
MEMORY = 128 << 20  # and of the largest, if the caches are not larger
GROWTH = 8
MOVED = 64 << 20  # bytes of a launch at least: milliseconds
STEPS = {True: 1 << 16, False: 1 << 12}  # multiply-adds of a chain, on CPUs and elsewhere: milliseconds on both
ROUNDS = 5
WIDTHS = (8, 16)  # lanes of vectors to try on CPUs: which is faster depends on registers and on how the driver cuts vectors

_MOVING = """
__kernel void limit_copy(__global const WIDE* restrict x, __global WIDE* restrict y, const int chunk, const int rounds) {
  for (int r = 0; r < rounds; ++r) {
    const int at = PLACE(r);
    for (int j = 0; j < chunk; ++j) y[at + j * APART] = x[at + j * APART] + (float)r;
  }
}

__kernel void limit_read(__global const WIDE* restrict x, __global const WIDE* restrict y, __global WIDE* restrict out,
                         const int chunk, const int rounds) {
  WIDE s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (int r = 0; r < rounds; ++r) {
    const int at = PLACE(r);
    for (int j = 0; j < chunk; j += 2) {
      s0 += x[at + j * APART];
      s1 += y[at + j * APART];
      s2 += x[at + (j + 1) * APART];
      s3 += y[at + (j + 1) * APART];
    }
  }
  out[get_global_id(0)] = s0 + s1 + s2 + s3;
}
"""
# A CPU's core goes over its own part again and again, which stays in its own caches. Elsewhere a launch finds what others left in the cache
# that all units share, so that a part goes from one unit to another.
_ON_CPU = """#define WIDE float16
#define PLACE(r) ((int)get_global_id(0) * chunk)
#define APART 1
"""
_ELSEWHERE = """#define WIDE float4
#define PLACE(r) (((int)get_global_id(0) + (r) * 4096) & ((int)get_global_size(0) - 1))
#define APART ((int)get_global_size(0))
"""

_COMPUTING = {
    # As in a product: sums that stay, over values that come. ARM has no other form of the instruction that needs no copy.
    True: """#pragma OPENCL FP_CONTRACT ON
__kernel void limit_multiply_add(__global float* out, __global const float* restrict x, const int steps) {
  const REAL y0 = LOAD(0, out), y1 = LOAD(1, out);
  REAL s0 = y0, s1 = y0, s2 = y0, s3 = y0, s4 = y1, s5 = y1, s6 = y1, s7 = y1;
  for (int i = 0; i < steps; ++i) {
    __global const float* p = x + (i & 15) * 4;
    s0 += p[0] * y0; s1 += p[1] * y0; s2 += p[2] * y0; s3 += p[3] * y0;
    s4 += p[0] * y1; s5 += p[1] * y1; s6 += p[2] * y1; s7 += p[3] * y1;
  }
  STORE(s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7, get_global_id(0) + 2, out);
}
""",
    False: """#pragma OPENCL FP_CONTRACT ON
// Eight independent chains: enough to hide the latency of a multiply-add on every device so far.
__kernel void limit_multiply_add(__global float* out, __global const float* restrict x, const int steps) {
  const float t = get_global_id(0), a = x[0];
  float s0 = t, s1 = t + 1, s2 = t + 2, s3 = t + 3, s4 = t + 4, s5 = t + 5, s6 = t + 6, s7 = t + 7;
  for (int i = 0; i < steps; ++i) {
    s0 = s0 * a + a; s1 = s1 * a + a; s2 = s2 * a + a; s3 = s3 * a + a;
    s4 = s4 * a + a; s5 = s5 * a + a; s6 = s6 * a + a; s7 = s7 * a + a;
  }
  out[get_global_id(0)] = s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7;
}
""",
}


class Limits(NamedTuple):
    """Measured peaks of a device: bytes per second by the size of the data, smallest first, and float32 operations per second."""

    bandwidths: tuple[tuple[int, float], ...]
    flops_per_second: float

    def seconds(self, moved: float, flops: float) -> float:
        """Return the minimum time of a kernel that moves ``moved`` bytes and computes ``flops`` operations."""
        rate = next((rate for size, rate in reversed(self.bandwidths) if size <= moved), self.bandwidths[0][1])
        return max(moved / rate, flops / self.flops_per_second)


def limits(queue: Any) -> Limits | None:
    """Return the limits of a queue's device, measured at the first call; ``None`` on the NumPy backend."""
    if isinstance(queue, CPUQueue):
        return None
    state = program.state(queue)
    if ("profiling", "limits") not in state:
        on_cpu, units = handle_of(queue).device_type == "cpu", profile_of(queue).max_compute_units
        state["profiling", "limits"] = Limits(_bandwidths(queue, on_cpu, units), _arithmetic(queue, on_cpu, units))
    return state["profiling", "limits"]


def _cache_sizes(queue: Any, units: int) -> list[int]:
    """Return the sizes to measure, in bytes: powers of two from ``SMALLEST * units`` to beyond the last cache, if memory allows."""
    profile = profile_of(queue)
    largest = min(max(MEMORY, 4 * profile.global_mem_cache_size), 2 * profile.max_alloc_size, profile.global_mem_size // 4)
    sizes, last = [_lower_power(SMALLEST * units)], _lower_power(largest)
    while sizes[-1] * GROWTH < last:
        sizes.append(sizes[-1] * GROWTH)
    return [*sizes, last] if sizes[-1] < last else sizes


def _lower_power(number: int) -> int:
    """Return the largest power of two that is at most ``number``."""
    return 1 << (number.bit_length() - 1)


def _bandwidths(queue: Any, on_cpu: bool, units: int) -> tuple[tuple[int, float], ...]:
    sizes, width = _cache_sizes(queue, units), 16 if on_cpu else 4
    source = (_ON_CPU if on_cpu else _ELSEWHERE) + _MOVING
    copy, read = (program.get(queue, source, name) for name in ("limit_copy", "limit_read"))
    x, y = (Tensor.full((sizes[-1] // 8,), 1.0, queue=queue) for _ in range(2))
    rates = []
    for size in sizes:
        count = size // 8 // width
        items = min(count // 4, _lower_power(4 * units if on_cpu else 2048 * units))
        rounds = max(1, MOVED // size)
        out, local = Tensor.empty((items * width,), queue=queue), 1 if on_cpu else min(64, items)
        calls = [(copy, (x, y, count // items, rounds)), (read, (x, y, out, count // items, rounds))]
        best = _shortest_times(queue, [(kernel, items, local, args) for kernel, args in calls])
        rates.append(rounds * size / min(best.values()))
    # A smaller size is never slower: where it seems so, something else ran meanwhile.
    return tuple((size, max(rates[i:])) for i, size in enumerate(sizes))


def _arithmetic(queue: Any, on_cpu: bool, units: int) -> float:
    steps, busy = STEPS[on_cpu], units * (4 if on_cpu else 2048)
    rates = []
    for width in WIDTHS if on_cpu else (1,):
        head = f"#define REAL float{width}\n#define LOAD vload{width}\n#define STORE vstore{width}\n" if on_cpu else ""
        kernel = program.get(queue, head + _COMPUTING[on_cpu], "limit_multiply_add")
        out, x = (Tensor.full((max(64, (busy + 2) * width),), 1e-6, queue=queue) for _ in range(2))
        best = _shortest_times(queue, [(kernel, busy, 1 if on_cpu else 64, (out, x, steps))])
        rates.append(16.0 * width * steps * busy / best[kernel.name])
    return max(rates)


def _shortest_times(queue: Any, calls: Sequence[tuple[Any, int, int, tuple[Any, ...]]]) -> Mapping[str, float]:
    """Return the shortest time of each kernel over a few rounds, in seconds, by name."""
    observer = Observer()
    observer.begin()
    for _ in range(ROUNDS):
        for kernel, items, local, args in calls:
            kernel(queue, items, local, *args)
    observer.end()
    return {kernel.name: min(run.seconds for run in observer.launches if run.name == kernel.name) for kernel, *_ in calls}
