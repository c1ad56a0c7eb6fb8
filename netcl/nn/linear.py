"""Linear and bilinear layers."""

from __future__ import annotations

import math
from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import empty


class Linear(Module):
    """An affine map of the last axis: ``y = x W^T + b``.

    - **in_features**, **out_features**: sizes of the last axis of ``x`` and ``y``.
    - **bias**: whether to add ``b``; otherwise ``bias`` is ``None``.

    Shapes: ``x`` ``(..., in_features)``, ``y`` ``(..., out_features)``, ``weight`` ``(out_features, in_features)``,
    ``bias`` ``(out_features,)``. Weight and bias start uniform in ``[-k, k]``, ``k = 1 / sqrt(in_features)``.

    >>> from netcl import nn
    >>> nn.Linear(4, 2)([[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 2)
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = empty((out_features, in_features))
        self.bias = empty((out_features,)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize weight and bias."""
        init.layer_(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ag.affine(x, self.weight, self.bias)

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return output.size * (2 * self.in_features + (self.bias is not None))


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``y_k = x1^T W_k x2 + b_k`` over the last axes."""
    outs, one, two = weight.shape
    outer = ag.mul(ag.reshape(input1, (-1, one, 1)), ag.reshape(input2, (-1, 1, two)))
    flat = ag.linear(ag.reshape(outer, (-1, one * two)), ag.reshape(weight, (outs, -1)), bias)
    return ag.reshape(flat, (*input1.shape[:-1], outs))


class Bilinear(Module):
    """A map that is linear in each of two inputs: ``y_k = x1^T W_k x2 + b_k``.

    - **in1_features**, **in2_features**, **out_features**: sizes of the last axes.
    - **bias**: whether there is a ``b``.

    Shapes: ``x1`` ``(..., in1_features)``, ``x2`` ``(..., in2_features)``, ``y`` ``(..., out_features)``.

    >>> from netcl import nn
    >>> nn.Bilinear(3, 4, 2)([[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0, 4.0]]).shape
    (1, 2)
    """

    def __init__(self, in1_features: int, in2_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self.weight = empty((out_features, in1_features, in2_features))
        self.bias = empty((out_features,)) if bias else None
        init.layer_(self.weight, self.bias, fan_in=in1_features)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return bilinear(x1, x2, self.weight, self.bias)

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return output.size * 2 * self.in1_features * self.in2_features + math.prod(args[0].shape) * self.in2_features


FUNCTIONS = ["bilinear"]
