"""Pooling layers. ``pad`` is another name of ``padding``."""

from __future__ import annotations

from typing import Any

import netcl.autograd as ag
from netcl.core.tensor import Tensor
from netcl.nn.module import Module

Pair = int | tuple[int, int]


class _Pool(Module):
    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return args[0].size


class _MaxPool(_Pool):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
                 pad: Any = None):  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding if pad is None else pad, dilation, ceil_mode


class MaxPool1d(_MaxPool):
    """The largest value of each window of signals; padding never wins.

    - **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **dilation**, **ceil_mode**: as in torch.

    Shapes: ``(N, C, L)`` becomes ``(N, C, (L + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1)``.

    >>> from netcl import nn
    >>> nn.MaxPool1d(2)([[[1.0, 3.0, 2.0, 0.0]]]).tolist()
    [[[3.0, 2.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.max_pool1d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class MaxPool2d(_MaxPool):
    """The largest value of each window of images; padding never wins.

    - **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **dilation** (numbers or pairs), **ceil_mode**: as in torch.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C, H', W')`` with ``H' = (H + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1``.

    >>> from netcl import nn
    >>> nn.MaxPool2d(2)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[[[3.0]]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class _AvgPool(_Pool):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
                 pad: Any = None):  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding if pad is None else pad, ceil_mode, count_include_pad


class AvgPool1d(_AvgPool):
    """The mean of each window of signals.

    - **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **ceil_mode**, **count_include_pad**: as in torch.

    Shapes: ``(N, C, L)`` becomes ``(N, C, (L + 2 padding - kernel_size) // stride + 1)``.

    >>> from netcl import nn
    >>> nn.AvgPool1d(2)([[[1.0, 3.0, 2.0, 0.0]]]).tolist()
    [[[2.0, 1.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.avg_pool1d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class AvgPool2d(_AvgPool):
    """The mean of each window of images.

    - **kernel_size**, **stride** (by default ``kernel_size``), **padding** (numbers or pairs), **ceil_mode**, **count_include_pad**: as in
      torch.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C, H', W')`` with ``H' = (H + 2 padding - kernel_size) // stride + 1``.

    >>> from netcl import nn
    >>> nn.AvgPool2d(2)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[[[1.5]]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.avg_pool2d(x, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad)


class _Adaptive(_Pool):
    def __init__(self, output_size: Any):
        super().__init__()
        self.output_size = output_size


class AdaptiveAvgPool1d(_Adaptive):
    """Means over windows chosen so that ``output_size`` values remain.

    Shapes: ``(N, C, L)`` becomes ``(N, C, output_size)``.

    >>> from netcl import nn
    >>> nn.AdaptiveAvgPool1d(1)([[[1.0, 3.0]]]).tolist()
    [[[2.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.adaptive_avg_pool1d(x, self.output_size)


class AdaptiveAvgPool2d(_Adaptive):
    """Means over windows chosen so that images of ``output_size`` (a number, or height and width) remain.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C, *output_size)``.

    >>> from netcl import nn
    >>> nn.AdaptiveAvgPool2d(1)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[[[1.5]]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.adaptive_avg_pool2d(x, self.output_size)


class AdaptiveMaxPool1d(_Adaptive):
    """Largest values of windows chosen so that ``output_size`` values remain.

    Shapes: ``(N, C, L)`` becomes ``(N, C, output_size)``.

    >>> from netcl import nn
    >>> nn.AdaptiveMaxPool1d(1)([[[1.0, 3.0]]]).tolist()
    [[[3.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.squeeze(ag.adaptive_max_pool2d(ag.unsqueeze(x, 2), (1, self.output_size)), 2)


class AdaptiveMaxPool2d(_Adaptive):
    """Largest values of windows chosen so that images of ``output_size`` (a number, or height and width) remain.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C, *output_size)``.

    >>> from netcl import nn
    >>> nn.AdaptiveMaxPool2d(1)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[[[3.0]]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.adaptive_max_pool2d(x, self.output_size)


class GlobalAvgPool2d(_Pool):
    """The mean of each channel.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C)``.

    >>> from netcl import nn
    >>> nn.GlobalAvgPool2d()([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[1.5]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.mean(x, axis=(2, 3))


class GlobalMaxPool2d(_Pool):
    """The largest value of each channel.

    Shapes: ``(N, C, H, W)`` becomes ``(N, C)``.

    >>> from netcl import nn
    >>> nn.GlobalMaxPool2d()([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()
    [[3.0]]
    """

    def forward(self, x: Tensor) -> Tensor:
        return ag.amax(x, axis=(2, 3))
