"""Convolution kernels with an epilogue: residual, activation, cast, scale factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from netcl.core.kernels import program
from netcl.engine import launch
from netcl.ops.conv.convolution import INPUT_GRAD, WEIGHT_GRAD, Convolution, ConvOperands
from netcl.ops.matmul import gemm
from netcl.ops.pointwise import cast

CPU_FILES = "axes.cl ends.cl lanes.cl cpu.cl"


def widened(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``run``, an algorithm for the accumulation type only, so that it also supports float16 and bfloat16.

    Inputs of float16 and bfloat16 are cast before the launch. Results are rounded when they are stored or, for weight gradients, by a
    further cast.
    """

    def wide(queue: Any, conv: Convolution, config: Any, profile: Any, t: ConvOperands) -> None:
        if conv.dtype == conv.accumulator:
            return run(queue, conv, config, profile, t)
        source, weight = cast(t.source, conv.accumulator), cast(t.weight, conv.accumulator)
        if conv.kind == WEIGHT_GRAD:
            exact = t.room(*t.result.shape, dtype=conv.accumulator)
            run(queue, conv.wide, config, profile, ConvOperands(source, weight, exact))
            cast(exact, conv.dtype, out=t.result)
        else:
            bias = None if t.bias is None else cast(t.bias, conv.accumulator)
            run(queue, conv.wide, config, profile, t._replace(source=source, weight=weight, bias=bias))

    return wide


def launch_ending(
    queue: Any, conv: Convolution, t: ConvOperands, files: str, name: str, defines: dict[str, Any], size: Any, local: Any, *numbers: int
) -> None:
    """Launch a kernel with an epilogue; ``numbers`` are its arguments after the sizes of ``conv``."""
    kernel = ending_kernel(queue, conv, files, name, defines)
    kernel(queue, size, local, t.source, t.weight, *t.end, *conv.sizes, *numbers, t.scale)


def ending_kernel(queue: Any, conv: Convolution, files: str, name: str, defines: dict[str, Any], text: str = "") -> program.Kernel:
    """Return a kernel that applies the epilogue, on CPUs to ``VW`` values at a time. ``text`` is generated source before the kernel."""
    end, lanes, stored = conv.ending, defines.get("VW", 1), conv.ending.stored
    operands = {"X": conv.dtype, "W": conv.dtype, "B": conv.bias or conv.dtype, "Y": stored, "ADDED": end.residual or conv.dtype}
    fixed: dict[str, Any] = {"REAL": conv.compute, "PART": 1, "INPUT_GRAD": conv.kind == INPUT_GRAD, "BIAS": bool(conv.bias)}
    fixed |= {"ENDS": 1, "ADDED": bool(end.residual), "LATE": conv.epilogue is not None}
    text += end.source(conv.compute, lanes, scaled=conv.epilogue is not None)
    if lanes > 1:
        ends = (("ADDED", end.residual), ("Y", stored))
        found = [gemm.lane_macro(label, dtype, conv.compute, lanes, label == "Y") for label, dtype in ends if dtype]
        fixed |= {macro: value for macros, _ in found for macro, value in macros.items()}
        text += "".join(dict.fromkeys(functions for _, functions in found))
    return launch.kernel(queue, __file__, files, name, operands, {**fixed, **defines}, text)
