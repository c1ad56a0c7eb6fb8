"""Pooling layers for signals, images and volumes. In max and average pools, ``pad`` is an alias of ``padding``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import netcl.autograd as ag  # noqa: F401, the expressions below are in it
from netcl.core.tensor import Tensor
from netcl.nn import volume
from netcl.nn.layer_class import layer_class
from netcl.nn.module import Module
from netcl.nn.volume import Sizes


class _Pool(Module):
    def flops(self, args: tuple[Any, ...], output: Any) -> int:
        return args[0].size


class _Windowed(_Pool):
    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, pad: Sizes | None = None):
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding = padding if pad is None else pad


class _Unpool(_Windowed):
    axes = 0

    def __init__(self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0):
        super().__init__(kernel_size, stride, padding)

    def forward(self, input: Tensor, indices: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        unpool = getattr(volume, f"max_unpool{self.axes}d")
        return unpool(input, indices, self.kernel_size, self.stride, self.padding, output_size)


_OF = {1: ("signals", "(N, C, L)"), 2: ("images", "(N, C, H, W)"), 3: ("volumes", "(N, C, D, H, W)")}
_WINDOWS = "**kernel_size**, **stride** (by default ``kernel_size``), **padding**"
_PLACES = "**return_indices** (also returns the flat index of each maximum)"
_ADAPTIVE = "of windows of {of}, chosen so that the result has the size ``output_size`` (a number, or one per axis)."


def _pools(kind: str, settings: str, arguments: str, doc: str, sizes: Sequence[int] = (1, 2, 3), base: type[Module] = _Pool) -> list[Any]:
    """Return the layers of one kind of pooling for signals, images and volumes. The doctests pool 4 values per axis to 2."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.replace("LP", "Lp"))[1:]
    given, made = "2, 2" if kind == "LPPool" else "2", []
    for axes in sizes:
        function, (of, shape) = f"{name}{axes}d", _OF[axes]
        call = f"{'volume' if function in volume.FUNCTIONS else 'ag'}.{function}(x, {arguments})"
        shown, gives = f"nn.{kind}{axes}d({given})(np.ones((1, 1{', 4' * axes}), np.float32)).shape", f"(1, 1{', 2' * axes})"
        text = f"{doc.format(of=of)}\n\nShapes: ``{shape}`` in and out."
        made.append(layer_class(globals(), f"{kind}{axes}d({settings})", call, text, shown, gives, base))
    return made


_KERNEL, _PAD = "kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0", "pad: Sizes | None = None"
MaxPool1d, MaxPool2d, MaxPool3d = _pools(
    "MaxPool", f"{_KERNEL}, dilation: Sizes = 1, return_indices: bool = False, ceil_mode: bool = False, {_PAD}",
    "kernel_size, stride, padding, dilation, ceil_mode, return_indices",
    f"The largest value of each window of {{of}}; padding counts as ``-inf``.\n\n- {_WINDOWS}, **dilation**, {_PLACES},\n  **ceil_mode**: "
    "as in torch; sizes are one number, or one per axis.", base=_Windowed,
)  # fmt: skip
_MEAN = f"Means of windows of {{of}}.\n\n- {_WINDOWS}, **ceil_mode**, **count_include_pad**,\n  **divisor_override** (not 1d): as in torch."
_AVERAGE = f"{_KERNEL}, ceil_mode: bool = False, count_include_pad: bool = True"
_AVERAGED = "kernel_size, stride, padding, ceil_mode, count_include_pad"
(AvgPool1d,) = _pools("AvgPool", f"{_AVERAGE}, {_PAD}", _AVERAGED, _MEAN, (1,), _Windowed)
AvgPool2d, AvgPool3d = _pools(
    "AvgPool", f"{_AVERAGE}, divisor_override: int | None = None, {_PAD}", f"{_AVERAGED}, divisor_override", _MEAN, (2, 3), _Windowed
)
AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d = _pools("AdaptiveAvgPool", "output_size: Any", "output_size", f"Means {_ADAPTIVE}")
AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d = _pools(
    "AdaptiveMaxPool", "output_size: Any, return_indices: bool = False", "output_size, return_indices",
    f"Largest values {_ADAPTIVE}\n\n- {_PLACES}.",
)  # fmt: skip
LPPool1d, LPPool2d, LPPool3d = _pools(
    "LPPool", "norm_type: float, kernel_size: Sizes, stride: Sizes | None = None, ceil_mode: bool = False",
    "norm_type, kernel_size, stride, ceil_mode", "``max(0, sum(x^p))^(1/p)`` of each window of {of}, ``p`` being **norm_type**.",
)  # fmt: skip


def _unpool(axes: int) -> Any:
    name, shape = f"MaxUnpool{axes}d", (1, 1, *range(2, 2 * axes + 2, 2))
    doc = f"""Puts values of {_OF[axes][0]} back at the indices that :class:`MaxPool{axes}d` returned, with zeros elsewhere.

    ``forward(input, indices, output_size)``: ``output_size`` selects one of the sizes that the pool maps to the same size.

    >>> from netcl import nn, ones
    >>> nn.{name}(2)(*nn.MaxPool{axes}d(2, return_indices=True)(ones({shape}))).shape
    {shape}
    """
    return type(Module)(name, (_Unpool,), {"axes": axes, "__doc__": doc, "__module__": __name__})  # type: ignore[misc]


MaxUnpool1d, MaxUnpool2d, MaxUnpool3d = map(_unpool, (1, 2, 3))
GlobalAvgPool2d, GlobalMaxPool2d = (
    layer_class(globals(), f"Global{kind}Pool2d", f"ag.{op}(x, axis=(2, 3))",
                f"The {what} of each channel.\n\nShapes: ``(N, C, H, W)`` becomes ``(N, C)``.",
                f"nn.Global{kind}Pool2d()([[[[1.0, 3.0], [2.0, 0.0]]]]).tolist()", gives, _Pool)
    for kind, op, what, gives in (("Avg", "mean", "mean", "[[1.5]]"), ("Max", "amax", "largest value", "[[3.0]]"))
)  # fmt: skip
