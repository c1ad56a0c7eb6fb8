"""Describes one convolution or gradient to compute: its sizes and its tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from netcl.core import dtype as dtypes
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.core.tensor import Tensor
from netcl.ops.conv.geometry import Geometry
from netcl.ops.epilogue import Epilogue

GROUPS_PER_UNIT = 4  # work-groups per compute unit that keep a device busy and balance the load of cores
FEW_RESULTS = 64 * 64  # of a tile of most kernels
THIN = 2  # filters of a group up to which tiles are mostly empty
FORWARD, INPUT_GRAD, WEIGHT_GRAD = "conv2d", "conv2d_input_grad", "conv2d_weight_grad"


def tier_config(variant: KernelVariant, tier: str, **extra: Any) -> KernelConfig:
    """Return a configuration that selects kernels of a tier: ``cpu`` or ``simt``."""
    return KernelConfig(variant, extra={"tier": tier, **extra})


class Convolution(NamedTuple):
    """One convolution: which of the three passes, its sizes, dtype and epilogue."""

    kind: str
    g: Geometry
    dtype: str
    bias: str = ""  # its dtype; empty: there is none
    relu: bool = False
    epilogue: Epilogue | None = None  # the epilogue if it is more than relu
    kept: bool = False  # the weights are constants of a recording: what is computed from them alone is computed once

    @property
    def ending(self) -> Epilogue:
        """The epilogue after the sums and the bias."""
        return self.epilogue or Epilogue(self.dtype, activation="relu" if self.relu else "")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size arguments of every kernel: input, result, kernel, options. Channels are per group. An input gradient's input is dy."""
        g, (c, m) = self.g, (self.g.c // self.g.groups, self.g.f // self.g.groups)
        source, result = (g.h, g.w), (g.oh, g.ow)
        if self.kind == INPUT_GRAD:
            c, m, source, result = m, c, result, source
        return (g.n, c, *source, m, *result, g.kh, g.kw, *g.stride, *g.pad, *g.dilation, g.groups)

    @property
    def filters(self) -> int:
        """The rows of a group's result: its filters, or the channels of an input gradient."""
        return self.sizes[4]

    @property
    def classes(self) -> int:
        return math.prod(self.g.stride) if self.kind == INPUT_GRAD else 1

    @property
    def class_size(self) -> tuple[int, int]:
        """The height and width of the result. In an input gradient: of the largest set of pixels with equal positions modulo the stride."""
        g = self.g
        return (-(-g.h // g.stride[0]), -(-g.w // g.stride[1])) if self.kind == INPUT_GRAD else (g.oh, g.ow)

    @property
    def pixels(self) -> int:
        return self.g.n * math.prod(self.class_size)

    @property
    def products(self) -> int:
        """The number of multiply-adds."""
        return math.prod(self.g.w_shape) * self.g.n * self.g.oh * self.g.ow

    def is_few(self, units: int) -> bool:
        """Whether the results are too few for one tile per compute unit; false for weight gradients."""
        return self.kind != WEIGHT_GRAD and self.pixels * self.filters * self.classes * self.g.groups < FEW_RESULTS * units

    @property
    def compute(self) -> str:
        """The OpenCL C type in which sums are computed."""
        return dtypes.DTYPES[self.dtype].c_compute

    @property
    def accumulator(self) -> str:
        """The dtype in which sums are computed."""
        return dtypes.sum_dtype(self.dtype)

    def variant(self, config: KernelConfig) -> KernelVariant:
        """Return the configuration's variant, or CONV2D_NAIVE for groups of one or two filters unless ``form`` is tiles."""
        return KernelVariant.CONV2D_NAIVE if self.filters <= THIN and config.extra.get("form") != "tiles" else config.variant

    @property
    def bare(self) -> Convolution:
        """The same convolution without an epilogue."""
        return self._replace(bias="", relu=False, epilogue=None)

    @property
    def wide(self) -> Convolution:
        """The same convolution with inputs in the accumulation type and the same epilogue."""
        if self.dtype == self.accumulator:
            return self
        return self._replace(dtype=self.accumulator, bias=self.bias and self.accumulator, epilogue=self.ending)


class ConvOperands(NamedTuple):
    """The tensors and the scale factor of a pass. In a weight gradient, the first three tensors are x, dy and dw."""

    source: Tensor
    weight: Tensor
    result: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    scale: float = 1

    @property
    def end(self) -> tuple[Tensor, Tensor, Tensor]:
        """The last tensors of kernels with an epilogue: bias, residual and result. An existing tensor stands in for a missing one."""
        return self.weight if self.bias is None else self.bias, self.result if self.residual is None else self.residual, self.result

    def room(self, *shape: int, dtype: str) -> Tensor:
        """Allocate scratch memory."""
        return Tensor.empty(shape, dtype, queue=self.result.queue)
