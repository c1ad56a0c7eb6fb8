"""Convolution kernels with an epilogue: residual, activation, cast, scale factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core.kernels import program
from netcl.engine import launch
from netcl.ops.conv.job import INPUT_GRAD, WEIGHT_GRAD, ConvOperands, Job
from netcl.ops.matmul import gemm
from netcl.ops.pointwise import cast

CPU_FILES = "axes.cl ends.cl lanes.cl cpu.cl"


def widened(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``run``, an algorithm for the accumulation type only, so that it also supports float16 and bfloat16.

    Inputs of float16 and bfloat16 are cast before the launch. Results are rounded when they are stored or, for weight gradients, by a
    further cast.
    """

    def wide(queue: Any, job: Job, config: Any, profile: Any, t: ConvOperands) -> None:
        if job.dtype == job.accumulator:
            return run(queue, job, config, profile, t)
        source, weight = cast(t.source, job.accumulator), cast(t.weight, job.accumulator)
        if job.kind == WEIGHT_GRAD:
            exact = t.room(*t.result.shape, dtype=job.accumulator)
            run(queue, job.wide, config, profile, ConvOperands(source, weight, exact))
            cast(exact, job.dtype, out=t.result)
        else:
            bias = None if t.bias is None else cast(t.bias, job.accumulator)
            run(queue, job.wide, config, profile, t._replace(source=source, weight=weight, bias=bias))

    return wide


def launch_ending(
    queue: Any, job: Job, t: ConvOperands, files: str, name: str, defines: dict[str, Any], size: Any, local: Any, *numbers: int
) -> None:
    """Launch a kernel with an epilogue; ``numbers`` are its arguments after the sizes of ``job``."""
    kernel = ending_kernel(queue, job, files, name, defines)
    kernel(queue, size, local, t.source, t.weight, *t.end, *job.sizes, *numbers, t.scale)


def ending_kernel(queue: Any, job: Job, files: str, name: str, defines: dict[str, Any], text: str = "") -> program.Kernel:
    """Return a kernel that applies the epilogue, on CPUs to ``VW`` values at a time. ``text`` is generated source before the kernel."""
    end, lanes, stored = job.ending, defines.get("VW", 1), job.ending.stored
    operands = {"X": job.dtype, "W": job.dtype, "B": job.bias or job.dtype, "Y": stored, "ADDED": end.residual or job.dtype}
    fixed: dict[str, Any] = {"REAL": job.compute, "PART": 1, "INPUT_GRAD": job.kind == INPUT_GRAD, "BIAS": bool(job.bias)}
    fixed |= {"ENDS": 1, "ADDED": bool(end.residual), "LATE": job.finish is not None}
    text += end.source(job.compute, lanes, scaled=job.finish is not None)
    if lanes > 1:
        ends = (("ADDED", end.residual), ("Y", stored))
        found = [gemm.lane_macro(label, dtype, job.compute, lanes, label == "Y") for label, dtype in ends if dtype]
        fixed |= {macro: value for macros, _ in found for macro, value in macros.items()}
        text += "".join(dict.fromkeys(functions for _, functions in found))
    return launch.kernel(queue, __file__, files, name, operands, {**fixed, **defines}, text)
