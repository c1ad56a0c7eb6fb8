"""Local sizes of user kernels. They are measured on request or by a tuner, stored, and used by launches without a local size."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from netcl.core.device import profile_of
from netcl.core.errors import OutOfMemoryError, ShapeError, message
from netcl.core.kernels.primitives import BuiltKernel, KernelSpec
from netcl.core.memory import get_persistent_pool
from netcl.core.tensor import Tensor
from netcl.profiling import timing
from netcl.runtime import tuning

LocalSizes = tuple[int, ...]
SAME_RESULT = 1e-5  # of the largest value: another order of a sum, not another result
TUNER_BUDGET = 0.25  # seconds after which a tuner's first launch measures no further candidate
_OUTER = (1, 2, 4, 8, 16, 32)


def candidates(sizes: LocalSizes, limit: int) -> list[LocalSizes]:
    """Return the local sizes to try: powers of two along each axis, together at most ``limit`` work-items.

    >>> candidates((100,), 64)
    [(1,), (2,), (4,), (8,), (16,), (32,), (64,)]
    """
    first = [1 << p for p in range(max(1, limit).bit_length()) if 1 << p <= max(sizes[0], 1)]
    axes = [first, *([n for n in _OUTER if n <= max(size, 1)] for size in sizes[1:])]
    return [local for local in itertools.product(*axes) if math.prod(local) <= limit]


def autotune_local_size(kernel: KernelSpec | BuiltKernel, queue: Any, global_size: int | Sequence[int], *args: Any,
                        budget: float = 2.0) -> LocalSizes:  # fmt: skip
    """Return the fastest local size for a launch, and store it for launches of this kernel and size that pass ``None``.

    A candidate counts only if its results equal those of the safe default, up to rounding. The tensors are restored afterwards.

    >>> from netcl.core.device import manager
    >>> queue = manager.default("cl").queue
    >>> x = Tensor.ones((64,), queue=queue)
    >>> spec = KernelSpec("twice", src="__kernel void twice(__global float* x) { x[get_global_id(0)] *= 2.0f; }")
    >>> len(autotune_local_size(spec, queue, 64, x, budget=0)), x.to_host().max().item()
    (1, 1.0)
    """
    queue = getattr(queue, "queue", queue)
    built = kernel.build(queue) if isinstance(kernel, KernelSpec) else kernel
    sizes = (global_size,) if isinstance(global_size, int) else tuple(int(n) for n in global_size)
    if built.kernel.required_local is not None or 0 in sizes:
        what = "the kernel must leave its local size open, and global_size must not contain 0"
        raise ShapeError(message("autotune_local_size", what, kernel=built.name, required=built.kernel.required_local, global_size=sizes))
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    before = [t.to_host().copy() for t in tensors]
    safe = built.kernel.clamp((256, 1, 1)[: len(sizes)])

    def outcome(local: LocalSizes) -> list[np.ndarray]:
        _restore(tensors, before)
        built.run(queue, sizes, local, *args)
        return [tensor.to_host().copy() for tensor in tensors]

    expected = outcome(safe)
    found = _fastest(queue, built, sizes, sizes, [safe, *candidates(sizes, built.kernel.max_work_group)], args, budget,
                     lambda local: _same_results(outcome(local), expected))  # fmt: skip
    _restore(tensors, before)
    return found


def _fastest(queue: Any, built: BuiltKernel, launched: LocalSizes, sizes: LocalSizes, tried: Sequence[LocalSizes], args: Sequence[Any],
             budget: float, correct: Callable[[LocalSizes], bool] = lambda local: True) -> LocalSizes:  # fmt: skip
    """Measure launches; store for ``sizes`` and return the fastest local size, or the first of ``tried`` if none is clearly faster."""
    start, times, usual = time.perf_counter(), dict[LocalSizes, float](), tried[0]
    for local in dict.fromkeys(tried):
        if times and time.perf_counter() - start > budget:
            break
        if correct(local):
            times[local] = timing.measure(partial(built.run, queue, launched, local, *args), repeat=5, warmup=1, queue=queue).best
    best = min(times, key=lambda local: times[local]) if times else usual
    chosen = best if times and times[best] < timing.MARGIN * times.get(usual, math.inf) else usual
    tuning.store.put(profile_of(queue), _kernel_key(built, sizes), {"local": list(chosen), "seconds": times.get(chosen)})
    built.kernel.program.state[built.slot(sizes)] = chosen
    return chosen


def _tune(queue: Any, built: BuiltKernel, sizes: LocalSizes, args: Sequence[Any]) -> LocalSizes | None:
    """Return the local size of a kernel that has a tuner: the stored size, else the fastest candidate, or ``None`` if none is measured.

    Sizes are stored per global size, rounded up to a power of two. Candidates write to scratch memory, because the output may be an input.
    """
    whole = (1 << max(sizes[0] - 1, 0).bit_length(),)
    known = built.kernel.program.state.get(built.slot(whole)) or tuned(queue, built, whole)
    (*inputs, out, count), tuner = args, built.spec.tuner
    nbytes = out.nbytes if isinstance(out, Tensor) else getattr(out, "size", 0)
    if known is not None or not nbytes or tuner is None:
        return known  # an output that is no memory is refused by the launch
    try:
        scratch = get_persistent_pool(queue).allocate(nbytes)
    except OutOfMemoryError:
        return None  # the launch itself may fit
    tried = [built.kernel.clamp((n,)) for n in tuner.candidates(queue.device)]
    return _fastest(queue, built, sizes, whole, tried, [*inputs, scratch.buffer, count], TUNER_BUDGET)


def _restore(tensors: Sequence[Tensor], before: Sequence[np.ndarray]) -> None:
    for tensor, values in zip(tensors, before, strict=True):
        tensor.from_host(values)


def _same_results(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    def close(a: np.ndarray, b: np.ndarray) -> bool:
        x, y = a.astype(np.float64), b.astype(np.float64)
        largest = float(np.max(np.abs(y), initial=0.0, where=np.isfinite(y)))
        return bool(np.allclose(x, y, rtol=SAME_RESULT, atol=SAME_RESULT * largest, equal_nan=True))

    return all(close(a, b) for a, b in zip(found, expected, strict=True))


def _kernel_key(built: BuiltKernel, sizes: LocalSizes) -> str:
    text = hashlib.sha256("\0".join([built.kernel.program.source, *built.kernel.program.options]).encode()).hexdigest()[:16]
    return json.dumps(["kernel", built.name, text, *sizes])


def tuned(queue: Any, built: BuiltKernel, sizes: LocalSizes, args: Sequence[Any] | None = None) -> LocalSizes | None:
    """Return the stored local size of a kernel, else the size that its tuner measures with ``args``; ``None`` if there is neither."""
    local = tuning.store.entries(profile_of(queue)).get(_kernel_key(built, sizes), {}).get("local")
    if not isinstance(local, list) or len(local) != len(sizes) or not all(isinstance(n, int) and n > 0 for n in local):
        return None if args is None else _tune(queue, built, sizes, args)
    return tuple(local)
