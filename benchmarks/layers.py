"""Single layers, and formulas against the speed of memory: what ``benchmarks/run.py`` times beyond ``problems.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import problems
from comparison import Case, Comparison
from problems import Targets

import netcl.autograd as ag
from netcl import ops as F
from netcl.bench import Setting, Way, values
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

NEAR_COPY = 1.15  # times what copying the same bytes takes
COPY = """
__kernel void copied(__global const LANES* x, __global LANES* y, const int run) {
    for (int i = get_global_id(0) * run, end = i + run; i < end; ++i)
#ifdef STREAM
        __builtin_nontemporal_store(x[i], y + i);
#else
        y[i] = x[i];
#endif
}
"""
READ = """
__kernel void read_all(__global const LANES* a, __global const LANES* b, __global const LANES* c, __global float* never, const int run) {
    LANES sum = (LANES)(0.0f);
    for (int i = get_global_id(0) * run, end = i + run; i < end; ++i) sum += a[i] + b[i] + c[i];
    if (sum.s0 == 1e38f) never[0] = sum.s0 + sum.s1 + sum.s2 + sum.s3;
}
"""


# ---- products


def half_matmul(size: int, dtype: str, comparisons: Sequence[Comparison]) -> Case:
    """A square product of halves, against ours in float32 and torch's in the same dtype."""

    def make(where: Setting) -> dict[str, Way]:
        x, y = values(size, size), values(size, size, seed=1)
        a, b = (where.tensor(z) for z in (x, y))
        h, i = (F.cast(t, dtype) for t in (a, b))
        ways = {"ours": where.ours(lambda: F.matmul(h, i)), "ours in float32": where.ours(lambda: F.matmul(a, b))}
        if where.torch is not None:
            kind = getattr(where.torch, dtype)
            p, q = where.torch_tensor(x).to(kind), where.torch_tensor(y).to(kind)
        return ways | {"torch": where.theirs(lambda: where.torch.matmul(p, q))}

    return Case(f"matmul {size} {dtype}", make, comparisons, tolerance=0.1, work={"flop": 2.0 * size**3})


def linear(rows: int, features: int, outputs: int, targets: Targets | None = None) -> Case:
    """``x w' + bias``."""

    def make(where: Setting) -> dict[str, Way]:
        data = values(rows, features), values(outputs, features, seed=1), values(outputs, seed=2)
        ours = [where.tensor(z) for z in data]
        ways = {"ours": where.ours(lambda: F.linear(*ours))}
        theirs = [where.torch_tensor(z) for z in data] if where.torch else []
        return ways | {"torch": where.theirs(lambda: where.torch.nn.functional.linear(*theirs))}

    work = {"flop": 2.0 * rows * features * outputs, "bytes": 4.0 * (rows * features + features * outputs + rows * outputs)}
    return Case(f"linear {rows}x{features}x{outputs}", make, [Comparison(targets=targets or {})], work=work)


# ---- what memory limits


def chain(n: int, targets: dict[str, Targets] | None = None) -> Case:
    """The chain of ``problems.py``, beside what copying as many bytes and what reading the operands takes."""
    case = problems.chain(n, targets)

    def make(where: Setting) -> dict[str, Way]:
        operands = [where.tensor(values(n, seed=i)) for i in range(3)]
        return {"copy": _copy(where, 2 * n), "read": _read(where, *operands), **case.make(where)}

    rows = [Comparison(name, "copy", dict.fromkeys(("cpu", "gpu"), NEAR_COPY)) for name in ("ours", "compiled")]
    rows += [Comparison(name, "read") for name in ("ours", "compiled")]
    return replace(case, make=make, comparisons=[*case.comparisons, *rows])


def _copy(where: Setting, n: int) -> Way:
    """A kernel that copies n floats; on CPUs in whole lines past the caches, in runs as long as those of a formula."""
    source, target = (Tensor.zeros((n,), queue=where.handle.queue) for _ in range(2))
    return _moving(where, COPY, "copied", n, source, target)


def _read(where: Setting, a: Tensor, b: Tensor, c: Tensor) -> Way:
    """A kernel that reads three tensors and writes nothing."""
    return _moving(where, READ, "read_all", a.size, a, b, c, Tensor.zeros((1,), queue=where.handle.queue))


def _moving(where: Setting, source: str, name: str, n: int, *tensors: Tensor) -> Way:
    if where.handle.backend != "cl":
        return Way(missing="there are no kernels without OpenCL")
    lanes, run, local = (4, 1, 256) if where.is_gpu else (16, 1024, 1)
    kernel = program.get(where.handle.queue, source.replace("LANES", f"float{lanes}"), name, () if where.is_gpu else ("-DSTREAM",))
    return Way(lambda: kernel(where.handle.queue, n // lanes // run, local, *tensors, run), where.sync)


# ---- norms


def layer_norm(rows: int, width: int, backward: bool, targets: Targets | None = None) -> Case:
    """Layer norm forward, or forward and backward."""

    def make(where: Setting) -> dict[str, Way]:
        data = [values(rows, width), values(width, seed=1), values(width, seed=2)]
        g = values(rows, width, seed=3)
        x, w, b = (where.tensor(z, requires_grad=backward) for z in data)
        ours = _with_backward(lambda: ag.layer_norm(x, (width,), w, b), [x, w, b], where.tensor(g), backward)
        if where.torch is None:
            return {"ours": where.ours(ours), "torch": where.theirs(ours)}
        p, q, r = (where.torch_tensor(z).requires_grad_(backward) for z in data)
        layer = where.torch.nn.functional.layer_norm
        theirs = _torch_backward(where, lambda: layer(p, (width,), q, r), [p, q, r], g, backward)
        return {"ours": where.ours(ours), "torch": where.theirs(theirs)}

    name = f"layer norm {rows}x{width} {'forward and backward' if backward else 'forward'}"
    return Case(name, make, [Comparison(targets=targets or {})], tolerance=2e-3, work={"bytes": (20.0 if backward else 8.0) * rows * width})


def batch_norm(n: int, c: int, size: int, backward: bool, targets: Targets | None = None) -> Case:
    """Batch norm in training and ReLU, forward, or forward and backward."""

    def make(where: Setting) -> dict[str, Way]:
        data = [values(n, c, size, size), 1 + 0.1 * values(c, seed=1), values(c, seed=2)]
        g = values(n, c, size, size, seed=3)
        x, w, b = (where.tensor(z, requires_grad=backward) for z in data)
        mean, var = where.tensor(np.zeros(c, np.float32)), where.tensor(np.ones(c, np.float32))
        ours = _with_backward(lambda: ag.relu(ag.batch_norm(x, mean, var, w, b, training=True)), [x, w, b], where.tensor(g), backward)
        if where.torch is None:
            return {"ours": where.ours(ours), "torch": where.theirs(ours)}
        p, q, r = (where.torch_tensor(z).requires_grad_(backward) for z in data)
        u, v = where.torch_tensor(np.zeros(c, np.float32)), where.torch_tensor(np.ones(c, np.float32))
        functional = where.torch.nn.functional
        theirs = _torch_backward(where, lambda: functional.relu(functional.batch_norm(p, u, v, q, r, True)), [p, q, r], g, backward)
        return {"ours": where.ours(ours), "torch": where.theirs(theirs)}

    name = f"batch norm + relu {n}x{c}x{size}x{size} {'forward and backward' if backward else 'forward'}"
    return Case(
        name, make, [Comparison(targets=targets or {})], tolerance=2e-3, work={"bytes": (20.0 if backward else 8.0) * n * c * size**2}
    )


def _with_backward(forward: Callable[[], Any], inputs: Sequence[Any], upstream: Any, backward: bool) -> Callable[[], Any]:
    if not backward:
        return forward

    def run() -> list[Any]:
        return list(ag.grad(forward(), inputs, upstream))

    return run


def _torch_backward(where: Setting, forward: Callable[[], Any], inputs: Sequence[Any], g: np.ndarray, backward: bool) -> Callable[[], Any]:
    if not backward:
        return forward
    upstream = where.torch_tensor(g)
    return lambda: list(where.torch.autograd.grad(forward(), inputs, upstream))
