"""Pooling layers. ``pad`` is another name of ``padding``."""

from __future__ import annotations

from functools import partial
from typing import Any

import netcl.autograd as ag  # noqa: F401, the expressions below are in it
from netcl.nn.layer_class import export_layers, layer_class
from netcl.nn.module import Module

_layer = partial(layer_class, globals())


class _Pool(Module):
    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return args[0].size


class _MaxPool(_Pool):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
                 pad: Any = None):  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding if pad is None else pad, dilation, ceil_mode


class _AvgPool(_Pool):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, count_include_pad: bool = True,
                 pad: Any = None):  # fmt: skip
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding if pad is None else pad, ceil_mode, count_include_pad


class _Adaptive(_Pool):
    def __init__(self, output_size: Any):
        super().__init__()
        self.output_size = output_size


MaxPool1d = _layer(
    "MaxPool1d", "ag.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode)",
    "The largest value of each window of signals; padding never wins.\n\n"
    "- **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **dilation**, **ceil_mode**: as in torch.\n\n"
    "Shapes: ``(N, C, L)`` becomes ``(N, C, (L + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1)``.",
    "nn.MaxPool1d(2)([[[1.0, 3.0, 2.0, 0.0]]]).tolist()", "[[[3.0, 2.0]]]", _MaxPool,
)  # fmt: skip
MaxPool2d = _layer(
    "MaxPool2d", "ag.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)",
    "The largest value of each window of images; padding never wins.\n\n"
    "- **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **dilation** (numbers or pairs), **ceil_mode**: as in\n"
    "  torch.\n\n"
    "Shapes: ``(N, C, H, W)`` becomes ``(N, C, H', W')`` with ``H' = (H + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1``.",
    "nn.MaxPool2d(2)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[[[3.0]]]]", _MaxPool,
)  # fmt: skip
AvgPool1d = _layer(
    "AvgPool1d", "ag.avg_pool1d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)",
    "The mean of each window of signals.\n\n"
    "- **kernel_size**, **stride** (by default ``kernel_size``), **padding**, **ceil_mode**, **count_include_pad**: as in torch.\n\n"
    "Shapes: ``(N, C, L)`` becomes ``(N, C, (L + 2 padding - kernel_size) // stride + 1)``.",
    "nn.AvgPool1d(2)([[[1.0, 3.0, 2.0, 0.0]]]).tolist()", "[[[2.0, 1.0]]]", _AvgPool,
)  # fmt: skip
AvgPool2d = _layer(
    "AvgPool2d", "ag.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)",
    "The mean of each window of images.\n\n"
    "- **kernel_size**, **stride** (by default ``kernel_size``), **padding** (numbers or pairs), **ceil_mode**, **count_include_pad**: as\n"
    "  in torch.\n\nShapes: ``(N, C, H, W)`` becomes ``(N, C, H', W')`` with ``H' = (H + 2 padding - kernel_size) // stride + 1``.",
    "nn.AvgPool2d(2)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[[[1.5]]]]", _AvgPool,
)  # fmt: skip
AdaptiveAvgPool1d = _layer(
    "AdaptiveAvgPool1d", "ag.adaptive_avg_pool1d(x, output_size)",
    "Means over windows chosen so that ``output_size`` values remain.\n\nShapes: ``(N, C, L)`` becomes ``(N, C, output_size)``.",
    "nn.AdaptiveAvgPool1d(1)([[[1.0, 3.0]]]).tolist()", "[[[2.0]]]", _Adaptive,
)  # fmt: skip
AdaptiveAvgPool2d = _layer(
    "AdaptiveAvgPool2d", "ag.adaptive_avg_pool2d(x, output_size)",
    "Means over windows chosen so that images of ``output_size`` (a number, or height and width) remain.\n\n"
    "Shapes: ``(N, C, H, W)`` becomes ``(N, C, *output_size)``.",
    "nn.AdaptiveAvgPool2d(1)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[[[1.5]]]]", _Adaptive,
)  # fmt: skip
AdaptiveMaxPool1d = _layer(
    "AdaptiveMaxPool1d", "ag.squeeze(ag.adaptive_max_pool2d(ag.unsqueeze(x, 2), (1, output_size)), 2)",
    "Largest values of windows chosen so that ``output_size`` values remain.\n\nShapes: ``(N, C, L)`` becomes ``(N, C, output_size)``.",
    "nn.AdaptiveMaxPool1d(1)([[[1.0, 3.0]]]).tolist()", "[[[3.0]]]", _Adaptive,
)  # fmt: skip
AdaptiveMaxPool2d = _layer(
    "AdaptiveMaxPool2d", "ag.adaptive_max_pool2d(x, output_size)",
    "Largest values of windows chosen so that images of ``output_size`` (a number, or height and width) remain.\n\n"
    "Shapes: ``(N, C, H, W)`` becomes ``(N, C, *output_size)``.",
    "nn.AdaptiveMaxPool2d(1)([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[[[3.0]]]]", _Adaptive,
)  # fmt: skip
GlobalAvgPool2d = _layer(
    "GlobalAvgPool2d", "ag.mean(x, axis=(2, 3))", "The mean of each channel.\n\nShapes: ``(N, C, H, W)`` becomes ``(N, C)``.",
    "nn.GlobalAvgPool2d()([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[1.5]]", _Pool,
)  # fmt: skip
GlobalMaxPool2d = _layer(
    "GlobalMaxPool2d", "ag.amax(x, axis=(2, 3))", "The largest value of each channel.\n\nShapes: ``(N, C, H, W)`` becomes ``(N, C)``.",
    "nn.GlobalMaxPool2d()([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", "[[3.0]]", _Pool,
)  # fmt: skip
export_layers(globals())
