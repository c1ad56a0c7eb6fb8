"""Convolution layers. Weights have torch's layout; ``pad`` is an alias of ``padding``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn import init
from netcl.nn.module import Module
from netcl.nn.parameter import empty
from netcl.nn.volume import conv3d, conv_transpose3d, several

Sides = int | tuple[int, ...]
Pads = int | tuple[int, ...] | str
_PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class _Convolution(Module):
    """Base class of convolution layers: checks, parameters and padding."""

    axes = 2
    transposed = False

    def _setup(self, channels: tuple[int, int], kernel_size: Any, stride: Any, padding: Any, dilation: Any, groups: int, bias: bool,
               padding_mode: str = "zeros") -> None:  # fmt: skip
        self.in_channels, self.out_channels = channels
        self.groups, self.padding_mode = groups, padding_mode
        self.kernel_size = several(kernel_size, self.axes, "kernel_size")
        self.stride = several(stride, self.axes, "stride")
        self.dilation = several(dilation, self.axes, "dilation")
        self.padding = self._padding(padding)
        if groups < 1 or self.in_channels % groups or self.out_channels % groups:
            what = "groups must be at least 1 and divide in_channels and out_channels"
            raise ShapeError(message(type(self).__name__, what, channels=channels, groups=groups))
        if padding_mode not in _PADDING_MODES:
            remedy = f"known: {', '.join(_PADDING_MODES)}"
            raise ValueError(message(type(self).__name__, "unknown padding_mode", remedy, padding_mode=repr(padding_mode)))
        first, second = (self.in_channels, self.out_channels) if self.transposed else (self.out_channels, self.in_channels)
        self.weight = empty((first, second // groups, *self.kernel_size))
        self.bias = empty((self.out_channels,)) if bias else None
        self.reset_parameters()

    def _padding(self, padding: Any) -> Any:
        """Convert the padding to numbers, except ``"same"`` where the two sides get unequal padding."""
        if padding == "valid":
            return (0,) * self.axes
        if padding != "same":
            return several(padding, self.axes, "padding")
        total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if any(s != 1 for s in self.stride) or self.transposed:
            what = 'padding="same" requires stride 1 and no transposed convolution'
            raise ShapeError(message(type(self).__name__, what, "pad with netcl.autograd.pad first", stride=self.stride))
        return "same" if any(n % 2 for n in total) else tuple(n // 2 for n in total)

    def reset_parameters(self) -> None:
        """Reinitialize the parameters uniformly in ``[-b, b]``, ``b = 1 / sqrt(fan_in)``."""
        init.layer_(self.weight, self.bias)

    def _padded(self, x: Tensor) -> tuple[Tensor, Any]:
        """Pad ``x`` unless ``padding_mode`` is ``zeros``. Return ``x`` and the padding that the op must still apply."""
        if self.padding_mode == "zeros":
            return x, self.padding
        total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        pairs = [(n // 2, n - n // 2) for n in total] if self.padding == "same" else [(n, n) for n in self.padding]
        sides = [n for pair in reversed(pairs) for n in pair]
        return ag.pad(x, sides, mode=_PADDING_MODES[self.padding_mode]), (0,) * self.axes

    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        window = math.prod(self.kernel_size)
        if self.transposed:
            return 2 * args[0].size * (self.out_channels // self.groups) * window + output.size * (self.bias is not None)
        return output.size * (2 * (self.in_channels // self.groups) * window + (self.bias is not None))


class _Conv(_Convolution):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: Sides, stride: Sides = 1, padding: Pads = 0, dilation: Sides = 1,
                 groups: int = 1, bias: bool = True, padding_mode: str = "zeros", pad: Pads | None = None):  # fmt: skip
        super().__init__()
        padding = padding if pad is None else pad
        self._setup((in_channels, out_channels), kernel_size, stride, padding, dilation, groups, bias, padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        x, padding = self._padded(x)
        if self.axes == 3:
            return conv3d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        stride, pad, dilation = self.stride[0], padding if padding == "same" else padding[0], self.dilation[0]
        return ag.conv1d(x, self.weight, self.bias, stride=stride, padding=pad, dilation=dilation, groups=self.groups)


class Conv2d(_Conv):
    """A convolution of images: ``y[n, f] = b[f] + sum over c of w[f, c] * x[n, c]``, ``*`` being cross-correlation.

    - **in_channels**, **out_channels**, **kernel_size**, **stride**, **padding** (numbers or pairs, ``"valid"`` or ``"same"``),
      **dilation**, **groups**, **bias**, **padding_mode** (``zeros``, ``reflect``, ``replicate``, ``circular``): as in
      torch.
    - **pad**: another name of ``padding``.

    Shapes: ``x`` ``(N, in_channels, H, W)``, ``y`` ``(N, out_channels, H', W')``,
    ``weight`` ``(out_channels, in_channels / groups, kH, kW)``, ``H' = (H + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1``.

    >>> from netcl import nn, zeros
    >>> nn.Conv2d(3, 16, 3, stride=2, padding=1)(zeros((2, 3, 32, 32))).shape
    (2, 16, 16, 16)
    """

    def forward(self, x: Tensor) -> Tensor:
        x, padding = self._padded(x)
        return ag.conv2d(x, self.weight, self.bias, stride=self.stride, padding=padding, dilation=self.dilation, groups=self.groups)


class DepthwiseConv2d(Conv2d):
    """Convolves each channel separately: ``Conv2d`` with as many groups as channels.

    - **channels**, **multiplier**: the input has ``channels`` channels, the output ``channels * multiplier``.
    - **kernel_size**, **stride**, **padding**, **dilation**, **bias**, **padding_mode**, **pad**: as in :class:`Conv2d`.

    Shapes: ``x`` ``(N, channels, H, W)``, ``y`` ``(N, channels * multiplier, H', W')``, ``weight`` ``(channels * multiplier, 1, kH, kW)``.

    >>> from netcl import nn, zeros
    >>> nn.DepthwiseConv2d(8, 3, padding=1)(zeros((2, 8, 5, 5))).shape
    (2, 8, 5, 5)
    """

    def __init__(self, channels: int, kernel_size: Sides, stride: Sides = 1, padding: Pads = 0, dilation: Sides = 1, multiplier: int = 1,
                 bias: bool = True, padding_mode: str = "zeros", pad: Pads | None = None):  # fmt: skip
        super().__init__(channels, channels * multiplier, kernel_size, stride, padding, dilation, channels, bias, padding_mode, pad)


class _ConvTranspose(_Convolution):
    transposed = True

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Sides, stride: Sides = 1, padding: Sides = 0,
                 output_padding: Sides = 0, groups: int = 1, bias: bool = True, dilation: Sides = 1, padding_mode: str = "zeros",
                 pad: Sides | None = None):  # fmt: skip
        super().__init__()
        if padding_mode != "zeros":
            raise ValueError(message(type(self).__name__, 'padding_mode must be "zeros"', padding_mode=repr(padding_mode)))
        self._setup((in_channels, out_channels), kernel_size, stride, padding if pad is None else pad, dilation, groups, bias)
        self.output_padding = several(output_padding, self.axes, "output_padding")

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        extra = self.output_padding
        if output_size is not None:
            sizes = [int(n) for n in output_size][-self.axes :]
            rows = zip(self.stride, self.padding, self.dilation, self.kernel_size, strict=True)
            least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, (s, p, d, k) in zip(x.shape[-self.axes :], rows, strict=True)]
            extra = tuple(size - low for size, low in zip(sizes, least, strict=True))
            if any(not 0 <= n < s for n, s in zip(extra, self.stride, strict=True)):
                what = f"output_size must be at least {tuple(least)}, and exceed it by less than the stride"
                raise ShapeError(message(type(self).__name__, what, output_size=sizes, stride=self.stride))
        op: Any = conv_transpose3d if self.axes == 3 else ag.conv_transpose1d if self.axes == 1 else ag.conv_transpose2d
        given: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "output_padding": extra, "dilation": self.dilation}
        given = {name: size[0] for name, size in given.items()} if self.axes == 1 else given
        return op(x, self.weight, self.bias, groups=self.groups, **given)


class ConvTranspose2d(_ConvTranspose):
    """Transposed convolution: maps the output shape of ``Conv2d`` back to its input shape.

    - **in_channels**, **out_channels**, **kernel_size**, **stride**, **padding**, **output_padding** (added at the far ends, to choose
      among the input shapes that ``Conv2d`` maps to the same output shape), **groups**, **bias**, **dilation**: as in torch.
    - **pad**: another name of ``padding``.

    Shapes: ``x`` ``(N, in_channels, H, W)``, ``y`` ``(N, out_channels, H', W')``,
    ``weight`` ``(in_channels, out_channels / groups, kH, kW)``,
    ``H' = (H - 1) stride - 2 padding + dilation (kernel_size - 1) + output_padding + 1``.
    ``forward(x, output_size)`` computes the output padding from ``output_size``.

    >>> from netcl import nn, zeros
    >>> nn.ConvTranspose2d(16, 8, 2, stride=2)(zeros((1, 16, 7, 7))).shape
    (1, 8, 14, 14)
    """


def _of_axes(base: type[_Convolution], axes: int, of: str) -> Any:
    """Return the layer for signals (1 axis) or volumes (3 axes) whose form for images is ``Conv2d`` or ``ConvTranspose2d``."""
    kind, shape = ("ConvTranspose", (1, 8, 6, 8, 10)) if base.transposed else ("Conv", (1, 8, 3, 4, 5))
    doc = f"""{"The transpose of" if base.transposed else "A convolution of"} {of}, with the arguments of :class:`{kind}2d`.

    >>> from netcl import nn, zeros
    >>> nn.{kind}{axes}d(4, 8, {"2, stride=2" if base.transposed else "3, padding=1"})(zeros({(1, 4, 3, 4, 5)[: axes + 2]})).shape
    {shape[: axes + 2]}
    """
    return type(Module)(f"{kind}{axes}d", (base,), {"axes": axes, "__doc__": doc, "__module__": __name__})  # type: ignore[misc]


Conv1d, Conv3d = _of_axes(_Conv, 1, "signals ``(N, in_channels, L)``"), _of_axes(_Conv, 3, "volumes ``(N, in_channels, D, H, W)``")
ConvTranspose1d, ConvTranspose3d = _of_axes(_ConvTranspose, 1, ":class:`Conv1d`"), _of_axes(_ConvTranspose, 3, ":class:`Conv3d`")
