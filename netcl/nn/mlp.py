"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from netcl.core.tensor import Tensor
from netcl.nn.activation import make_activation
from netcl.nn.container import Sequential
from netcl.nn.dropout import Dropout
from netcl.nn.linear import Linear
from netcl.nn.module import Module
from netcl.nn.norm import BatchNorm1d, LayerNorm
from netcl.nn.shape import Flatten


class MLP(Module):
    """Linear layers with activations in between: ``y = W_n f(... f(W_1 x + b_1)) + b_n``.

    - **in_features**, **out_features**: width of the input (all axes after the batch, flattened) and of the output.
    - **hidden**: widths of the layers in between.
    - **activation**: the name of the activation, ``relu`` by default.
    - **norm**: ``batch``, ``layer`` or ``None``, before activations. **dropout**: after activations. **bias**: whether layers have biases.

    Shapes: ``(N, ...)`` becomes ``(N, out_features)``.

    >>> from netcl import nn, zeros
    >>> nn.MLP(784, [256, 128], 10)(zeros((2, 1, 28, 28))).shape
    (2, 10)
    """

    def __init__(self, in_features: int, hidden: Sequence[int], out_features: int, activation: str = "relu", norm: str | None = None,
                 dropout: float = 0.0, bias: bool = True):  # fmt: skip
        super().__init__()
        layers: list[Module] = [Flatten()]
        widths = [in_features, *hidden]
        for before, width in pairwise(widths):
            layers.append(Linear(before, width, bias))
            if norm is not None:
                layers.append(BatchNorm1d(width) if norm == "batch" else LayerNorm(width))
            layers.append(make_activation(activation))
            if dropout:
                layers.append(Dropout(dropout))
        self.layers = Sequential(*layers, Linear(widths[-1], out_features, bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
