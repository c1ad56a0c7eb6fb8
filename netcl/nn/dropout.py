"""Dropout: random zeros while training, nothing afterwards."""

from __future__ import annotations

import netcl.autograd as ag
from netcl.core.errors import check_probability
from netcl.core.tensor import Tensor
from netcl.nn.module import Module


class Dropout(Module):
    """Zeros elements with probability ``p`` and scales the others by ``1 / (1 - p)``; the identity in evaluation mode.

    - **p**: the probability. ``inplace`` is taken and changes nothing.

    Shapes: the output has the input's.

    >>> from netcl import nn
    >>> nn.Dropout(0.5).eval()([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__()
        check_probability(type(self).__name__, "p", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ag.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Dropout2d(Dropout):
    """Zeros whole channels with probability ``p`` and scales the others by ``1 / (1 - p)``; the identity in evaluation mode.

    Shapes: ``(N, C, ...)`` in and out.

    >>> from netcl import nn, ones
    >>> y = nn.Dropout2d(0.5)(ones((4, 8, 3, 3))).to_host()
    >>> bool((y == y[:, :, :1, :1]).all())
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = ag.dropout(Tensor.ones((*x.shape[:2], *(1,) * (x.ndim - 2)), x.dtype, queue=x.queue), self.p)
        return ag.mul(x, kept)


Dropout1d = Dropout2d
