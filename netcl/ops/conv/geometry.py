"""Checks the arguments of a two-dimensional convolution and derives its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from netcl.core.errors import ShapeError, message

Pair = int | Sequence[int]
Padding = int | str | Sequence[Any]
FOUR = "x must have 4 dimensions (or 3, without a batch) and w 4"


class Geometry(NamedTuple):
    """A convolution of ``(n, c, h, w)`` with ``(f, c / groups, kh, kw)`` into ``(n, f, oh, ow)``; ``pad``: the padding (top, left)."""

    n: int
    c: int
    h: int
    w: int
    f: int
    kh: int
    kw: int
    oh: int
    ow: int
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.c, self.h, self.w

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        return self.f, self.c // self.groups, self.kh, self.kw

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.f, self.oh, self.ow

    @property
    def taps(self) -> int:
        return self.kh * self.kw

    @property
    def lying(self) -> Geometry:
        """The same convolution with long lines: planes are flattened for a 1 x 1 kernel, images of width 1 are transposed."""
        if (self.taps, *self.stride, *self.pad) == (1, 1, 1, 0, 0) and (self.oh, self.ow) == (self.h, self.w):
            return self._replace(h=1, w=self.h * self.w, oh=1, ow=self.oh * self.ow)
        if self.w != 1 or self.kw != 1 or self.ow != 1:
            return self
        stride, pad, dilation = (pair[::-1] for pair in (self.stride, self.pad, self.dilation))
        return self._replace(h=1, w=self.h, kh=1, kw=self.kh, oh=1, ow=self.oh, stride=stride, pad=pad, dilation=dilation)

    @property
    def is_plain_3x3(self) -> bool:
        """Whether Winograd's transforms apply: a 3 x 3 kernel without stride, dilation or groups."""
        return (self.kh, self.kw, *self.stride, *self.dilation, self.groups) == (3, 3, 1, 1, 1, 1, 1)


def frozen(value: Any) -> Any:
    """Convert lists to tuples and NumPy integers to Python's, so that arguments can be a cache key."""
    if isinstance(value, (list, tuple)):
        return tuple(frozen(part) for part in value)
    return int(value) if isinstance(value, np.integer) else value


def pair(op: str, name: str, value: Any, least: int) -> tuple[int, int]:
    """Return an integer, or a tuple (height, width), as a pair; raises ``ShapeError`` for other values and for numbers below ``least``.

    A tuple with one integer stands for that integer, as in torch.
    """
    both = value if isinstance(value, tuple) else (value, value)
    both = both * 2 if len(both) == 1 else both
    if len(both) != 2 or any(not isinstance(n, int) or isinstance(n, bool) for n in both):
        raise ShapeError(message(op, f"{name} must be one integer or two (height, width)", **{name: repr(value)}))
    if min(both) < least:
        raise ShapeError(message(op, f"{name} must be at least {least}", **{name: repr(value)}))
    return both


def window_spans(kernel: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, ...]:
    """Return how many pixels a dilated window covers along each axis."""
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))


def paddings(op: str, padding: Any, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> Any:
    """Return ``((top, bottom), (left, right))`` for ``padding``: an integer, a pair, a pair of pairs, ``"valid"`` or ``"same"``."""
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding == "same":
        if stride != (1, 1):
            raise ShapeError(message(op, "padding='same' requires stride 1", "pass the padding as numbers", stride=stride))
        return tuple(((span - 1) // 2, span // 2) for span in window_spans(kernel, dilation))
    if isinstance(padding, str):
        raise ShapeError(message(op, "padding must be a number, a pair, a pair of pairs, 'same' or 'valid'", padding=repr(padding)))
    if isinstance(padding, tuple) and len(padding) == 2 and all(isinstance(side, tuple) for side in padding):
        return pair(op, "padding", padding[0], 0), pair(op, "padding", padding[1], 0)
    top, left = pair(op, "padding", padding, 0)
    return (top, top), (left, left)


@lru_cache(maxsize=4096)
def geometry(op: str, x: tuple[int, ...], w: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    """Return the sizes of a convolution; raises a ``ShapeError`` that names the invalid argument. Arguments must be :func:`frozen`."""
    if len(x) != 4 or len(w) != 4:
        remedy = "x is (batch, channels, height, width), w is (filters, channels / groups, height, width)"
        raise ShapeError(message(op, FOUR, remedy, **{"x.shape": x, "w.shape": w}))
    _check_channels(op, x, w, groups)
    strides, dilations = pair(op, "stride", stride, 1), pair(op, "dilation", dilation, 1)
    kernel = (w[2], w[3])
    edges = paddings(op, padding, kernel, strides, dilations)
    spans = window_spans(kernel, dilations)
    sizes = tuple(n + sum(edge) for n, edge in zip(x[2:], edges, strict=True))
    if any(size < span for size, span in zip(sizes, spans, strict=True)):
        what = f"the kernel must fit the padded input, got {spans[0]} x {spans[1]} pixels for an input of {sizes[0]} x {sizes[1]}"
        raise ShapeError(message(op, what, **{"x.shape": x, "w.shape": w, "padding": padding, "dilation": dilation}))
    oh, ow = ((size - span) // step + 1 for size, span, step in zip(sizes, spans, strides, strict=True))
    return Geometry(*x, w[0], *kernel, oh, ow, strides, (edges[0][0], edges[1][0]), dilations, groups)


def _check_channels(op: str, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> None:
    shapes: dict[str, object] = {"x.shape": x, "w.shape": w}
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise ShapeError(message(op, "groups must be an integer of at least 1", groups=repr(groups)))
    if groups > 1:
        shapes["groups"] = groups
    if min(w) < 1 or x[1] < 1:
        raise ShapeError(message(op, "the numbers of channels and filters and the kernel size must be at least 1", **shapes))
    if w[1] * groups != x[1]:
        wanted, what = w[1] * groups, f"x must have {w[1] * groups} channels (w.shape[1] * groups), got {x[1]}"
        last = f"put the channels first: x.permute(0, {len(x) - 1}, {', '.join(map(str, range(1, len(x) - 1)))})"
        remedy = last if x[-1] == wanted else "x is (batch, channels, ...): set in_channels of the layer to the channels of x"
        raise ShapeError(message(op, what, remedy, **shapes))
    if w[0] % groups:
        raise ShapeError(message(op, f"the number of filters must be a multiple of groups, got {w[0]} and {groups}", **shapes))


def transposed_size(
    op: str, x: tuple[int, ...], w: tuple[int, ...], stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> tuple[int, int]:
    """Return the height and width of a transposed convolution's result."""
    if len(x) != 4 or len(w) != 4:
        remedy = "x is (batch, channels, height, width), w is (channels, filters / groups, height, width)"
        raise ShapeError(message(op, FOUR, remedy, **{"x.shape": x, "w.shape": w}))
    strides, dilations = pair(op, "stride", stride, 1), pair(op, "dilation", dilation, 1)
    extra = pair(op, "output_padding", output_padding, 0)
    if any(more >= step for more, step in zip(extra, strides, strict=True)):
        raise ShapeError(message(op, "output_padding must be smaller than the stride", output_padding=output_padding, stride=stride))
    edges = paddings(op, padding, (w[2], w[3]), strides, dilations)
    rows = zip(x[2:], w[2:], strides, edges, dilations, extra, strict=True)
    height, width = ((n - 1) * step - sum(edge) + d * (k - 1) + more + 1 for n, k, step, edge, d, more in rows)
    if min(height, width) < 1:
        what = f"the result must not be empty, got {height} x {width} pixels"
        raise ShapeError(message(op, what, **{"x.shape": x, "w.shape": w, "padding": padding}))
    return height, width
