"""Dropout: random elements or channels are dropped in training; the identity in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import netcl.autograd as ag
from netcl.autograd.in_place import overwrite
from netcl.core.errors import ShapeError, check_probability, message
from netcl.core.tensor import Tensor
from netcl.nn.layer_class import function_layer
from netcl.nn.module import Module


class Dropout(Module):
    """Zeros elements with probability ``p`` and scales the others by ``1 / (1 - p)``; the identity in evaluation mode.

    - **p**: the probability. **inplace**: whether the result is also the new value of the input.

    Shapes: the output has the shape of the input.

    >>> from netcl import nn
    >>> nn.Dropout(0.5).eval()([1.0, 2.0]).tolist()
    [1.0, 2.0]
    """

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__()
        check_probability(type(self).__name__, "p", p)
        self.p, self.inplace = p, inplace

    def forward(self, x: Tensor) -> Tensor:
        return overwrite(ag.dropout, x, self.p) if self.inplace and self.training else ag.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def dropout2d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero channels of ``(N, C, ...)`` with probability ``p``, scale the others by ``1 / (1 - p)``; the identity unless ``training``."""
    check_probability("dropout2d", "p", p)
    if inplace and training:
        return overwrite(dropout2d, input, p)
    return ag.mul(input, ag.dropout(_ones(input, channels=True), p)) if training and p else input


def _unbatched(name: str, axes: int) -> Callable[..., Tensor]:
    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        single = input.ndim == axes + 1
        if inplace and training:
            return overwrite(drop, input, p)
        out = dropout2d(ag.unsqueeze(input, 0) if single else input, p, training)
        return ag.squeeze(out, 0) if single else out

    drop.__name__ = drop.__qualname__ = name
    drop.__doc__ = f""":func:`dropout2d` of ``(N, C, ...)``; an input with {axes + 1} axes has channels first and no batch, as in torch."""
    return drop


dropout1d, dropout3d = _unbatched("dropout1d", 1), _unbatched("dropout3d", 3)


def _ones(x: Tensor, channels: bool) -> Tensor:
    """Return ones in the shape of ``x``, or ``(N, C, 1, ...)`` with ``channels``."""
    if channels and x.ndim < 2:
        raise ShapeError(message("dropout", "dropout of channels must have at least 2 dimensions (batch, channels, ...)", shape=x.shape))
    return Tensor.ones((*x.shape[:2], *(1,) * (x.ndim - 2)) if channels else x.shape, x.dtype, queue=x.queue)


def _alpha(input: Tensor, p: float, training: bool, channels: bool) -> Tensor:
    check_probability("alpha_dropout", "p", p)
    if not training or p == 0:
        return input
    if p == 1:
        return ag.mul(input, 0.0)
    low = -1.7580993408473766  # -scale * alpha of SELU: its limit
    scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    kept = ag.gt(ag.dropout(_ones(input, channels), p), 0.0)
    return ag.add(ag.mul(ag.where(kept, input, low), scale), -scale * p * low)


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """In training, apply dropout for SELU: dropped elements become the negative limit of SELU, then mean and variance are restored."""
    return overwrite(_alpha, input, p, True, False) if inplace and training else _alpha(input, p, training, channels=False)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Apply :func:`alpha_dropout` to whole channels."""
    return overwrite(_alpha, input, p, True, True) if inplace and training else _alpha(input, p, training, channels=True)


_layer = partial(function_layer, globals(), base=Dropout)
Dropout1d = _layer("Dropout1d", dropout1d, "nn.Dropout1d().eval()([[1.0, 2.0]]).tolist()", "[[1.0, 2.0]]")
Dropout2d = _layer("Dropout2d", dropout2d, "nn.Dropout2d()(np.ones((4, 8, 3, 3), np.float32)).to_host().std((2, 3)).max().item()", "0.0")
Dropout3d = _layer("Dropout3d", dropout3d, "nn.Dropout3d().eval()([[[[[1.0, 2.0]]]]]).tolist()", "[[[[[1.0, 2.0]]]]]")
AlphaDropout = _layer("AlphaDropout", alpha_dropout, "nn.AlphaDropout(0.5).eval()([1.0, 2.0]).tolist()", "[1.0, 2.0]")
FeatureAlphaDropout = _layer(
    "FeatureAlphaDropout", feature_alpha_dropout, "nn.FeatureAlphaDropout().eval()([1.0, 2.0]).tolist()", "[1.0, 2.0]"
)
FUNCTIONS = ["alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"]
