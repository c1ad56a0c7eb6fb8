"""Products, convolutions and what memory limits, each in netcl, in torch and, where that is fair, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from comparison import Case, Comparison

import netcl.autograd as ag
from netcl import ops as F
from netcl.bench import Compiled, Setting, Way, values
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.kernels.primitives import build_elementwise_kernel
from netcl.core.tensor import Tensor
from netcl.engine import algorithms

Targets = dict[str, float]


# ---- products


def matmul(m: int, n: int, k: int, transposed: str = "", batch: int = 0, targets: Targets | None = None, name: str = "") -> Case:
    """``(m, k) x (k, n)``; ``transposed`` names the operands that are stored transposed: "", "a", "b" or "ab"."""
    lead = (batch,) if batch else ()

    def make(where: Setting) -> dict[str, Way]:
        x = values(*lead, *((k, m) if "a" in transposed else (m, k)))
        y = values(*lead, *((n, k) if "b" in transposed else (k, n)), seed=1)
        a, b = where.tensor(x), where.tensor(y)
        options = {"transpose_a": "a" in transposed, "transpose_b": "b" in transposed}
        ways = {"ours": where.ours(lambda: F.matmul(a, b, **options))}
        u, v = (np.swapaxes(z, -1, -2) if side in transposed else z for side, z in (("a", x), ("b", y)))
        if where.quick or not where.is_gpu:
            ways["numpy"] = Way(lambda: np.matmul(u, v), result=lambda: [np.matmul(u, v)], apart=True)
        return ways | {"torch": where.theirs(_torch_matmul(where, x, y, transposed))}

    named = name or f"matmul {m}" + (f" {transposed} transposed" if transposed else "")
    flop, moved = 2.0 * m * n * k * max(batch, 1), 4.0 * max(batch, 1) * (m * k + k * n + m * n)
    return Case(named, make, [Comparison(targets=targets or {})], work={"flop": flop, "bytes": moved})


def _torch_matmul(where: Setting, x: np.ndarray, y: np.ndarray, transposed: str) -> Callable[[], Any]:
    if where.torch is None:
        return lambda: None
    a, b = where.torch_tensor(x), where.torch_tensor(y)
    a, b = (a.transpose(-1, -2) if "a" in transposed else a), (b.transpose(-1, -2) if "b" in transposed else b)
    return lambda: where.torch.matmul(a, b)


# ---- convolutions


def conv(n: int, c: int, size: int, filters: int, kernel: int = 3, stride: int = 1, part: str = "forward",
         targets: Targets | None = None, dtype: str = "float32") -> Case:  # fmt: skip
    """A convolution as residual networks have them, or one of its gradients; in 16 bits torch's tensors have their channels last."""
    pad, out, half = kernel // 2, -(-size // stride), dtype != "float32"
    options: dict[str, Any] = {"stride": stride, "padding": pad}

    def make(where: Setting) -> dict[str, Way]:
        x, w, g = values(n, c, size, size), values(filters, c, kernel, kernel, seed=1) * 0.1, values(n, filters, out, out, seed=2)
        a, b, d = (F.cast(where.tensor(z), dtype) for z in (x, w, g))
        run = {
            "forward": lambda: F.conv2d(a, b, **options),
            "input gradient": lambda: F.conv2d_input_grad(d, b, size=(size, size), **options),
            "weight gradient": lambda: F.conv2d_weight_grad(d, a, kernel=(kernel, kernel), **options),
        }[part]
        return {"ours": where.ours(run), "torch": where.theirs(_torch_conv(where, x, w, g, stride, pad, part, dtype if half else ""))}

    name = f"conv {kernel}x{kernel}{f'/{stride}' if stride > 1 else ''} {n}x{c}x{size}x{size} to {filters} {part}" + f" {dtype}" * half
    moved = (2.0 if half else 4.0) * (n * c * size**2 + filters * c * kernel**2 + n * filters * out**2)
    work = {"flop": 2.0 * n * filters * c * kernel**2 * out**2, "bytes": moved}
    # cuDNN takes Winograd for some weight gradients: against float64 those were off by 5e-5 of the largest, ours by 3e-6 at most.
    # The last bit of a bfloat16 of several times the root mean square is 0.03 of that.
    tolerance = 5e-2 if half else 1e-3 if part == "weight gradient" else 1e-4
    return Case(name, make, [Comparison(targets=targets or {})], tolerance, work)


def conv_transpose(n: int, c: int, size: int, filters: int, kernel: int, stride: int = 2, pad: int = 0) -> Case:
    """A transposed convolution as generators and U-Nets have them; on OpenCL CPUs also by the kernel for every other convolution."""
    out = (size - 1) * stride - 2 * pad + kernel

    def make(where: Setting) -> dict[str, Way]:
        x, w = values(n, c, size, size), values(c, filters, kernel, kernel, seed=1) * 0.1
        a, b = where.tensor(x), where.tensor(w)
        ways = {"ours": where.ours(lambda: F.conv_transpose2d(a, b, stride=stride, padding=pad)), "panel": Way(missing="for CPUs only")}
        if where.handle.backend == "cl" and not where.is_gpu:
            family = algorithms.FAMILIES["conv2d_input_grad"]
            problem = family.problem(n, filters, out, out, c, kernel, kernel, profile=where.handle.profile, stride=stride, pad=pad)
            panel = KernelConfig(KernelVariant.CONV2D_IM2COL, extra={"tier": "cpu", "form": "panel"})
            ways["panel"] = where.ours(lambda: family.run_with(panel, problem, a, b))
        p, q = (where.torch_tensor(z) if where.torch else z for z in (x, w))
        return ways | {"torch": where.theirs(lambda: where.torch.nn.functional.conv_transpose2d(p, q, None, stride, pad))}

    work = {"flop": 2.0 * n * c * filters * kernel**2 * size**2}
    name = f"conv transpose {kernel}x{kernel}/{stride} {n}x{c}x{size}x{size} to {filters}"
    return Case(name, make, [Comparison(), Comparison("ours", "panel")], 1e-4, work)


def _torch_conv(where: Setting, x: np.ndarray, w: np.ndarray, g: np.ndarray, stride: int, pad: int, part: str,
                half: str) -> Callable[[], Any]:  # fmt: skip
    if where.torch is None:
        return lambda: None
    a, b, d = (where.torch_tensor(z) for z in (x, w, g))
    if half:
        a, b, d = (t.to(getattr(where.torch, half), memory_format=where.torch.channels_last) for t in (a, b, d))
    if part == "forward":
        return lambda: where.torch.nn.functional.conv2d(a, b, None, stride, pad)
    mask, pick = ([True, False, False], 0) if part == "input gradient" else ([False, True, False], 1)
    back = where.torch.ops.aten.convolution_backward
    return lambda: back(d, a, b, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, mask)[pick]


# ---- what memory limits


def chain(n: int, targets: dict[str, Targets] | None = None) -> Case:
    """``relu(a * b + c) * 0.5 + a``: op by op, compiled, and as a kernel written for it."""

    def make(where: Setting) -> dict[str, Way]:
        data = [values(n, seed=i) for i in range(3)]
        a, b, c = (where.tensor(z) for z in data)

        def formula(a: Any, b: Any, c: Any) -> Any:
            return ag.relu(a * b + c) * 0.5 + a

        ways = {"ours": where.ours(lambda: formula(a, b, c)), "compiled": Compiled(formula, a, b, c).way(where)}
        ways["kernel"] = _chain_kernel(where, a, b, c)
        u, v, w = (where.torch_tensor(z) if where.torch else z for z in data)
        return ways | {"torch": where.theirs(lambda: where.torch.relu(u * v + w) * 0.5 + u)}

    rows = [Comparison(name, targets=(targets or {}).get(name, {})) for name in ("ours", "compiled", "kernel")]
    return Case(f"chain 2^{round(math.log2(n), 1):g}", make, rows, work={"bytes": 16.0 * n, "flop": 5.0 * n})


def _chain_kernel(where: Setting, a: Any, b: Any, c: Any) -> Way:
    if where.handle.backend != "cl":
        return Way(missing="there are no kernels without OpenCL")
    _, kernel = build_elementwise_kernel(where.handle.context, "chain", 3, "ADD(MUL(RELU(ADD(MUL(v0, v1), v2)), 0.5f), v0)")
    assert kernel is not None
    local, n = (256,), a.size

    def run() -> Any:
        out = Tensor.empty((n,), queue=a.queue)
        kernel.run(a.queue, (n,), local, a, b, c, out, n)
        return out

    return where.ours(run)


def softmax(rows: int, columns: int, targets: Targets | None = None) -> Case:
    """Over the last axis."""

    def make(where: Setting) -> dict[str, Way]:
        x = values(rows, columns)
        a = where.tensor(x)
        t = where.torch_tensor(x) if where.torch else x
        return {"ours": where.ours(lambda: F.softmax(a, axis=-1)), "torch": where.theirs(lambda: where.torch.softmax(t, -1))}

    work = {"bytes": 8.0 * rows * columns, "flop": 5.0 * rows * columns}
    return Case(f"softmax {rows}x{columns}", make, [Comparison(targets=targets or {})], work=work)


def total(n: int, targets: Targets | None = None) -> Case:
    """The sum of everything."""

    def make(where: Setting) -> dict[str, Way]:
        x = np.abs(values(n))
        a = where.tensor(x)
        t = where.torch_tensor(x) if where.torch else x
        ways = {"ours": where.ours(lambda: F.sum(a))}
        if not where.is_gpu:
            ways["numpy"] = Way(lambda: x.sum(), result=lambda: [x.sum()], apart=True)
        return ways | {"torch": where.theirs(lambda: t.sum())}

    return Case(
        f"sum 2^{round(math.log2(n), 1):g}",
        make,
        [Comparison(targets=targets or {})],
        tolerance=1e-4,
        work={"bytes": 4.0 * n, "flop": float(n)},
    )
