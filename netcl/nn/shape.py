"""Layers without parameters that reshape, rearrange or resize their input."""

from __future__ import annotations

from functools import partial

import netcl.autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.layer_class import layer_class
from netcl.nn.module import Module

_layer = partial(layer_class, globals())
Flatten = _layer(
    "Flatten(start_dim: int = 1, end_dim: int = -1)", "ag.flatten(x, start_dim, end_dim)",
    "Joins the axes ``start_dim`` to ``end_dim`` into one; by default all but the batch.\n\n"
    "Shapes: ``(N, C, H, W)`` becomes ``(N, C * H * W)``.", "nn.Flatten()(np.zeros((2, 3, 4, 5), np.float32)).shape", "(2, 60)",
)  # fmt: skip
PixelShuffle = _layer(
    "PixelShuffle(upscale_factor: int)", "ag.pixel_shuffle(x, upscale_factor)",
    "Turns channels into resolution: ``y[c, h r + i, w r + j] = x[c r^2 + i r + j, h, w]``.\n\n- **upscale_factor**: ``r``.\n\n"
    "Shapes: ``(N, C r^2, H, W)`` becomes ``(N, C, H r, W r)``.",
    "nn.PixelShuffle(2)(np.zeros((1, 8, 3, 3), np.float32)).shape", "(1, 2, 6, 6)",
)  # fmt: skip
PixelUnshuffle = _layer(
    "PixelUnshuffle(downscale_factor: int)", "ag.pixel_unshuffle(x, downscale_factor)",
    "The inverse of :class:`PixelShuffle`: turns resolution into channels.\n\n- **downscale_factor**: ``r``.\n\n"
    "Shapes: ``(N, C, H r, W r)`` becomes ``(N, C r^2, H, W)``.",
    "nn.PixelUnshuffle(2)(np.zeros((1, 2, 6, 6), np.float32)).shape", "(1, 8, 3, 3)",
)  # fmt: skip


class Unflatten(Module):
    """Splits the axis ``dim`` into axes of sizes ``unflattened_size``; one of them may be -1.

    Shapes: ``(N, C * H * W)`` becomes ``(N, C, H, W)`` with ``Unflatten(1, (C, H, W))``.

    >>> from netcl import nn, zeros
    >>> nn.Unflatten(1, (3, -1))(zeros((2, 60))).shape
    (2, 3, 20)
    """

    def __init__(self, dim: int, unflattened_size: tuple[int, ...]):
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        return ag.reshape(x, (*x.shape[:dim], *self.unflattened_size, *x.shape[dim + 1 :]))


class Upsample(Module):
    """Resizes signals, images or volumes, by repeated pixels unless another ``mode`` is given.

    - **size**: the size of the result; or **scale_factor**: the ratio of the new size to the old size.
    - **mode**: as in ``netcl.interpolate``: ``nearest``, ``nearest-exact``, ``area``, ``linear``, ``bilinear``, ``bicubic``, ``trilinear``.
    - **align_corners**: whether corners keep their values (``linear``, ``bilinear``, ``bicubic``, ``trilinear``).

    Shapes: ``(N, C, L)``, ``(N, C, H, W)`` or ``(N, C, D, H, W)`` in and out.

    >>> from netcl import nn, zeros
    >>> nn.Upsample(scale_factor=2)(zeros((1, 3, 4, 4))).shape
    (1, 3, 8, 8)
    """

    def __init__(self, size: int | tuple[int, int] | None = None, scale_factor: float | tuple[float, float] | None = None,
                 mode: str = "nearest", align_corners: bool = False):  # fmt: skip
        super().__init__()
        if (size is None) == (scale_factor is None):
            raise ValueError(message("Upsample", "exactly one of size and scale_factor is required", size=size, scale_factor=scale_factor))
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return ag.interpolate(x, size=self.size, scale_factor=self.scale_factor, mode=self.mode, align_corners=self.align_corners)
