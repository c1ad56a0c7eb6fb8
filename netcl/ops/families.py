"""Kernel families as a tuner sees them: which configurations a problem has, how one of them is run, and what is right.

A *problem* is what the selector is asked (:class:`netcl.core.kernel_selector.Problem`); a *problem class* is what neighbouring shapes
share. Whoever measures takes candidates from :meth:`Family.configurations`, drops those whose result is further from
:meth:`Family.reference` than :meth:`Family.tolerance`, and gives the fastest to the selector's ``measured``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import kernel_selector
from netcl.core.device_profile import ExtendedDeviceProfile
from netcl.core.kernel_selector import KernelConfig, KernelVariant, Problem
from netcl.core.tensor import Tensor
from netcl.ops.conv import arrays, plans
from netcl.ops.conv import mma as conv_mma
from netcl.ops.conv.geometry import Geometry, geometry
from netcl.ops.finish import Finish
from netcl.ops.matmul import gemm, mma, wgmma

V = KernelVariant
# A plain sum of k products of values around one is wrong by about k roundings at worst; four times that is the house's bound.
_ROUNDINGS = 4.0
_UNIT = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_COARSE = {"highest": 1.0, "high": 16.0, "medium": 2.0**15}
# Rows, vectors of a register tile: what fills 32 registers, and 16.
_TILES = {32: ((6, 4), (12, 2), (8, 3), (4, 4)), 16: ((6, 2), (4, 3), (12, 1))}
_WINOGRAD_TILES = {32: ({"MR": 8, "NV": 3}, {"MR": 16, "NV": 1}), 16: ({"MR": 4, "NV": 3}, {"MR": 8, "NV": 1})}
_DEPTHS = (256, 512, 1024)
_TAPS_TILES = ((64, 64), (64, 128), (128, 64), (128, 128))
_SIMT_TILES = ((32, 32, 16, 2), (64, 64, 16, 4), (64, 64, 16, 8), (128, 64, 16, 8), (128, 128, 8, 8), (128, 128, 16, 8))


@dataclass(frozen=True)
class Family:
    """One op's kernels. ``depth`` is the number of products in a sum; the functions take a :class:`Problem` first."""

    op: str
    flags: dict[str, Any]
    space: Callable[[Problem], Iterator[KernelConfig]]
    depth: Callable[[Problem], int]
    inputs: Callable[[Problem], tuple[tuple[int, ...], ...]]
    run: Callable[[KernelConfig, Problem, tuple[Tensor, ...]], Tensor]
    exact: Callable[[Problem, tuple[np.ndarray, ...]], np.ndarray]

    def problem(self, *sizes: int, profile: ExtendedDeviceProfile, dtype: str = "float32", **flags: Any) -> Problem:
        """A problem of this family: ``(M, N, K)`` of a product, ``(N, C, H, W, F, KH, KW)`` of a convolution, and their flags."""
        chosen = {name: _shaped_like(flags.get(name, value), value) for name, value in self.flags.items()}
        return Problem(self.op, sizes, dtypes.lookup(dtype, self.op).name, chosen, profile)

    def problem_class(self, problem: Problem) -> tuple[Any, ...]:
        """What neighbouring shapes share: sizes rounded to powers of two, the dtype, the flags (a batch rounded likewise)."""
        rounded = {**problem.flags, **({"batches": _nearest_power(problem.flags["batches"])} if "batches" in problem.flags else {})}
        flags = tuple(f"{name}={value}".replace(" ", "") for name, value in sorted(rounded.items()))
        exact = 5 if len(problem.shape) == 7 else len(problem.shape)  # the window of a convolution is not rounded
        return (self.op, *map(_nearest_power, problem.shape[:exact]), *problem.shape[exact:], problem.dtype, *flags)

    def configurations(self, problem: Problem) -> list[KernelConfig]:
        """Candidates without duplicates; the first is what the policy would take."""
        found = [kernel_selector.decide(problem)]
        for config in self.space(problem):
            if config not in found:
                found.append(config)
        return found

    def operands(self, problem: Problem, queue: Any, seed: int = 0) -> tuple[Tensor, ...]:
        """Normal random operands of a problem."""
        rng = np.random.default_rng(seed)
        shapes = self.inputs(problem)
        return tuple(Tensor.from_host(queue, rng.standard_normal(shape, np.float32), problem.dtype) for shape in shapes)

    def run_with(self, config: KernelConfig, problem: Problem, *operands: Tensor) -> Tensor:
        """The result by one configuration; the first call compiles. The selector is not asked."""
        return self.run(config, problem, operands)

    def reference(self, problem: Problem, *operands: Tensor) -> np.ndarray:
        """The result in float64."""
        return self.exact(problem, tuple(np.asarray(t.to_host(), np.float64) for t in operands))

    def tolerance(self, problem: Problem, *operands: Tensor) -> float:
        """How far an element may be from the reference: four times a plain float32 sum's error, more where precision was given up."""
        depth, dtype = self.depth(problem), problem.dtype
        sums = _ROUNDINGS * _COARSE[kernel_selector.get_matmul_precision()] * 2.0**-23 * (depth + 8)
        largest = 8.0 * math.sqrt(depth)
        return _ROUNDINGS * _UNIT[dtype] * (depth + 8) if dtype == "float64" else sums + _UNIT.get(dtype, 0.0) * largest


def _nearest_power(n: int) -> int:
    return 1 << max(0, round(math.log2(max(1, n))))


def _shaped_like(value: Any, default: Any) -> Any:
    return (value, value) if isinstance(default, tuple) and isinstance(value, int) else value


def _simt(variant: KernelVariant) -> Iterator[KernelConfig]:
    for m, n, k, per_item in _SIMT_TILES:
        yield KernelConfig(variant, m, n, k, per_item, extra={"tier": "simt"})


# ---- products


def _matmul_space(problem: Problem) -> Iterator[KernelConfig]:
    if not problem.is_cpu:
        yield from (block.config() for block in gemm.BLOCKS)
        yield from mma.configurations(problem.profile, problem.dtype)
        yield from wgmma.configurations(problem.profile, problem.dtype)
        return
    flags = problem.flags
    for form in ("dot",) if flags["trans_b"] and not flags["trans_a"] else () if flags["trans_b"] else ("unpacked",):
        yield KernelConfig(V.MATMUL_VECTORIZED, extra={"tier": "cpu", "form": form})
    for rows, vectors in _TILES[problem.profile.vector_registers]:
        for depth in (d for d in _DEPTHS if d < 2 * problem.shape[2] or d == _DEPTHS[0]):
            yield KernelConfig(V.MATMUL_REGISTER_TILED, extra={"tier": "cpu", "form": "panel", "MR": rows, "NV": vectors, "KC": depth})


def _matmul_inputs(problem: Problem) -> tuple[tuple[int, ...], ...]:
    m, n, k = problem.shape
    batch = () if problem.flags["batches"] == 1 else (problem.flags["batches"],)
    return (*batch, *((k, m) if problem.flags["trans_a"] else (m, k))), (*batch, *((n, k) if problem.flags["trans_b"] else (k, n)))


def _matmul_run(config: KernelConfig, problem: Problem, operands: tuple[Tensor, ...]) -> Tensor:
    (a, b), flags = operands, problem.flags
    shape = (*a.shape[:-2], *problem.shape[:2])
    return gemm.product(a, b, shape, gemm.Extras(Finish(problem.dtype)), flags["trans_a"], flags["trans_b"], config)


def _matmul_exact(problem: Problem, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    a, b = operands
    return np.matmul(np.swapaxes(a, -1, -2) if problem.flags["trans_a"] else a, np.swapaxes(b, -1, -2) if problem.flags["trans_b"] else b)


# ---- convolutions


def _conv_space(problem: Problem) -> Iterator[KernelConfig]:
    winograd, panels = problem.shape[5:] == (3, 3) and problem.flags["groups"] == 1, problem.is_cpu and problem.op != plans.WEIGHT_GRAD
    if winograd and problem.flags["stride"] == problem.flags["dilation"] == (1, 1):
        yield KernelConfig(V.CONV2D_WINOGRAD, extra={"winograd_channels": 1})
        for tile in _WINOGRAD_TILES[problem.profile.vector_registers] if panels else ():
            yield KernelConfig(V.CONV2D_WINOGRAD, extra={"tier": "cpu", "winograd_channels": 1, **tile})
    if not problem.is_cpu:
        yield from conv_mma.configurations(problem.profile, problem.dtype)
        yield KernelConfig(V.CONV2D_IM2COL, extra={"tier": "simt"})
        for m, n in _TAPS_TILES:
            yield KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra={"tier": "simt", "form": "taps", "BM": m, "BN": n})
        for config in _simt(V.CONV2D_IMPLICIT_GEMM):
            yield replace(config, extra={**config.extra, "form": "gemm"})
        return
    for form in ("filters",) if problem.op == plans.WEIGHT_GRAD else ("filters", "pixels"):
        yield KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra={"tier": "cpu", "form": form})
    forms = ("rows", "panel") if problem.op == plans.WEIGHT_GRAD else ("panel",)
    for rows, vectors in _TILES[problem.profile.vector_registers]:
        for form, depth in itertools.product(forms, _DEPTHS[1:]):
            block = {"KB": depth // 4} if problem.op == plans.WEIGHT_GRAD else {}
            yield KernelConfig(V.CONV2D_IM2COL, extra={"tier": "cpu", "form": form, "MR": rows, "NV": vectors, "KC": depth, **block})


def _geometry(problem: Problem) -> Geometry:
    n, c, h, w, f, kh, kw = problem.shape
    flags = problem.flags
    weights = (f, c // flags["groups"], kh, kw)
    return geometry(problem.op, (n, c, h, w), weights, flags["stride"], flags["pad"], flags["dilation"], flags["groups"])


def _conv_depth(problem: Problem) -> int:
    g = _geometry(problem)
    if problem.op == plans.WEIGHT_GRAD:
        return g.n * g.oh * g.ow
    return (g.f if problem.op == plans.INPUT_GRAD else g.c) // g.groups * g.taps


def _conv_inputs(problem: Problem) -> tuple[tuple[int, ...], ...]:
    g = _geometry(problem)
    return {plans.FORWARD: (g.x_shape, g.w_shape), plans.INPUT_GRAD: (g.y_shape, g.w_shape)}.get(problem.op, (g.y_shape, g.x_shape))


def _conv_run(config: KernelConfig, problem: Problem, operands: tuple[Tensor, ...]) -> Tensor:
    g, (first, second) = _geometry(problem), operands
    shape = {plans.FORWARD: g.y_shape, plans.INPUT_GRAD: g.x_shape}.get(problem.op, g.w_shape)
    result = Tensor.empty(shape, problem.dtype, queue=first.queue)
    given = (second, first) if problem.op == plans.WEIGHT_GRAD else (first, second, second)
    plans.run(plans.Job(problem.op, g, problem.dtype), first.queue, *given, result, config=config)
    return result


def _conv_exact(problem: Problem, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    g, (first, second) = _geometry(problem), operands
    if problem.op == plans.WEIGHT_GRAD:
        return arrays.weight_grad(first, second, g=g)
    return (arrays.forward if problem.op == plans.FORWARD else arrays.input_grad)(first, second, None, g=g)


_CONV_FLAGS = {"stride": (1, 1), "pad": (0, 0), "dilation": (1, 1), "groups": 1}
_CONV = Family(plans.FORWARD, _CONV_FLAGS, _conv_space, _conv_depth, _conv_inputs, _conv_run, _conv_exact)
FAMILIES: dict[str, Family] = {
    "matmul": Family(
        "matmul", {"trans_a": False, "trans_b": False, "batches": 1}, _matmul_space, lambda p: p.shape[2], _matmul_inputs, _matmul_run,
        _matmul_exact,
    ),
    **{op: replace(_CONV, op=op) for op in (plans.FORWARD, plans.INPUT_GRAD, plans.WEIGHT_GRAD)},
}  # fmt: skip
