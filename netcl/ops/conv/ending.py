"""Convolutions whose kernels end in what follows them: residual, activation, cast, a number as factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from netcl.core.dtype import DTYPES, HALVES
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.opencl_text import loose_halves
from netcl.ops.conv.job import INPUT_GRAD, Job, Launch
from netcl.ops.pointwise import cast


@dataclass(frozen=True)
class Ending:
    """The launch of such a kernel: ``prepare`` makes of source and weights what it reads, ``widen`` is what they are cast to before."""

    kernel: Callable[..., None]
    size: Any
    local: Any
    numbers: tuple[int, ...]
    prepare: Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]] | None = None
    widen: str = ""

    def __call__(
        self, queue: Any, source: Tensor, weight: Tensor, bias: Tensor, result: Tensor, residual: Tensor | None = None, scale: float = 1
    ) -> None:
        if self.widen:
            absent = bias is weight
            source, weight = cast(source, self.widen), cast(weight, self.widen)
            bias = weight if absent else cast(bias, self.widen)
        read = (source, weight) if self.prepare is None else self.prepare(queue, source, weight)
        added = result if residual is None else residual
        self.kernel(queue, self.size, self.local, *read, bias, added, result, *self.numbers, scale)


def widened(plan: Callable[..., Launch]) -> Callable[..., Launch]:
    """A plan for every dtype, of one for the type sums are kept in.

    Half and bfloat16 are storage only there: a pass widens them, and the kernels know one type. Results are rounded as they are stored,
    or in one pass more where the kernel cannot.
    """

    def make(queue: Any, job: Job, config: Any, profile: Any) -> Launch:
        go = plan(queue, job.wide, config, profile)
        if job.dtype == job.accumulator:
            return go
        if isinstance(go, Ending):
            return replace(go, widen=job.accumulator)

        def wide(queue: Any, *tensors: Tensor) -> None:
            *inputs, result = tensors
            known = {id(t): cast(t, job.accumulator) for t in inputs}
            exact = Tensor.empty(result.shape, job.accumulator, queue=queue)
            go(queue, *(known[id(t)] for t in inputs), exact)
            cast(exact, job.dtype, out=result)

        return wide

    return make


def kernel(queue: Any, job: Job, files: str, name: str, defines: dict[str, Any], text: str = "") -> program.Kernel:
    """A kernel that calls ``finish``: ``VW`` values at a time on CPUs. ``text`` is what else it builds on."""
    end, lanes, stored = job.ending, defines.get("VW", 1), job.ending.stored
    operands = {"X": job.dtype, "W": job.dtype, "B": job.dtype, "Y": stored, "ADDED": end.residual or job.dtype}
    fixed: dict[str, Any] = {"REAL": job.compute, "PART": 1, "INPUT_GRAD": job.kind == INPUT_GRAD, "BIAS": job.bias}
    fixed |= {"ENDS": 1, "ADDED": bool(end.residual), "LATE": job.finish is not None}
    macros, functions = _access(end.residual, stored, job.compute, lanes) if lanes > 1 else ({}, "")
    text += end.source(job.compute, lanes, scaled=job.finish is not None) + functions
    return launch.kernel(queue, __file__, files, name, operands, {**fixed, **macros, **defines}, text)


def _access(residual: str, stored: str, real: str, lanes: int) -> tuple[dict[str, str], str]:
    """The macros by which a CPU's kernel reads and stores vectors of dtypes where it can, and the functions they call."""
    macros: dict[str, str] = {}
    ways = (("ADDED_LANES(p)", residual, "VECTOR(__global const, p)", "load_{}_{}(p)"),
            ("Y_LANES(x, p)", stored, "VECTOR(__global, p) = (x)", "store_{}_{}(x, p)"))  # fmt: skip
    for macro, dtype, plain, paired in ways:
        if dtype and DTYPES[dtype].c_storage == real:
            macros[macro] = plain
        elif dtype in HALVES and real == "float":
            macros[macro] = paired.format(dtype, lanes)
    halves = dict.fromkeys(dtype for dtype in (residual, stored) if dtype in HALVES and real == "float")
    return macros, "".join(loose_halves(dtype, lanes) for dtype in halves)
