"""Products that wait one op long: an activation of a matrix product or a convolution is computed in its kernel.

Inside functions that are compiled, ``affine`` and ``conv2d`` leave a :class:`Product`. If the next op is an activation and nobody holds
what it was applied to, the kernel with that activation runs; anything else has the plain product computed first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.ops import fusion
from netcl.ops.conv.geometry import frozen, geometry
from netcl.ops.elementwise import later
from netcl.ops.registry import REGISTRY, Op

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_AFFINE = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "gelu_erf": "gelu"}


class _Waiting:
    """What tensors rest on while it is not decided which kernel computes them."""

    __slots__ = ("__weakref__", "inputs", "made", "name", "tensors")

    def __init__(self, name: str, inputs: tuple[Any, ...]):
        self.name, self.inputs = name, inputs
        self.made: Tensor | None = None
        self.tensors: list[weakref.ref[Tensor]] = []

    def seen_by(self, tensor: Tensor) -> None:
        """A further tensor rests on this."""
        self.tensors.append(weakref.ref(tensor))

    def alive(self) -> bool:
        """Whether a tensor still rests on this."""
        return any(ref() is not None for ref in self.tensors)

    def compute(self, wanted: Sequence[Any] = ()) -> Tensor:
        """The tensor that owns the values."""
        if self.made is None:
            with fusion.in_mode(None):
                self.made = self.run()
            self.inputs = ()
        return self.made

    def run(self) -> Tensor:
        raise NotImplementedError


class Product(_Waiting):
    """A product with its inputs; ``finished`` runs it with an activation, of those it ``knows``."""

    __slots__ = ("call", "finished", "knows")

    def __init__(self, name: str, inputs: tuple[Any, ...], call: Callable[[], Tensor], knows: Any, finished: Callable[[str], Tensor]):
        super().__init__(name, tuple(x for x in inputs if x is not None))
        self.call, self.knows, self.finished = call, knows, finished

    def run(self) -> Tensor:
        return self.call()


class Activated(_Waiting):
    """An activation of a product."""

    __slots__ = ("plain", "product")

    def __init__(self, name: str, product: Product, plain: Callable[[Tensor], Tensor]):
        super().__init__(name, ())
        self.product: Product | None = product
        self.plain = plain

    def run(self) -> Tensor:
        product, self.product = self.product, None  # let go of: what is held is computed before its inputs change
        assert product is not None
        if product.made is None and not product.alive():
            return product.finished(self.name)
        return self.plain(product.compute())


def _deferred(waiting: _Waiting, shape: tuple[int, ...], like: Tensor) -> Tensor:
    made = Tensor._deferred(waiting, shape, like.dtype, like.queue)
    fusion.register(waiting)
    return made


def activated(name: str, x: Any) -> Tensor | None:
    """The activation ``name`` of a product that waits, to be computed with it; ``None`` where that cannot be."""
    source = x._source if isinstance(x, Tensor) else None
    if type(source) is not Product or source.made is not None or name not in source.knows:
        return None
    row = REGISTRY[name]
    return _deferred(Activated(name, source, lambda t: fusion.plain(row, t)), x.shape, x)


later.finish = activated


def _usable(*tensors: Any) -> bool:
    """Whether the operands are tensors of one float dtype on one queue; everything else is the op's own business."""
    first = tensors[0]
    return isinstance(first, Tensor) and first.dtype in _FLOATS and all(
        t is None or (isinstance(t, Tensor) and t.dtype == first.dtype and t.queue is first.queue) for t in tensors
    )  # fmt: skip


def _call(name: str) -> Callable[..., Tensor]:
    row = REGISTRY[name]
    assert isinstance(row, Op)
    return row.call


def affine(x: Any, w: Any, bias: Any = None) -> Tensor | None:
    """``x w' + bias`` that waits for an activation."""
    if not _usable(x, w, bias) or not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[1] or not x.size or not w.size:
        return None
    if bias is not None and bias.shape != w.shape[:1]:
        return None
    args = (x.detach(), w.detach(), None if bias is None else bias.detach())
    plain, finished = _call("affine"), _call("affine_activated")
    product = Product("affine", args, lambda: plain(*args), _AFFINE, lambda name: finished(*args, activation=_AFFINE[name]))
    return _deferred(product, (*x.shape[:-1], w.shape[0]), x)


def conv2d(
    x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1, pad: Any = None
) -> Tensor | None:
    """A convolution that waits for a relu."""
    if not _usable(x, w, bias) or not x.size or not w.size or (bias is not None and bias.shape != w.shape[:1]):
        return None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "pad": pad}
    try:
        shape = geometry("conv2d", x.shape, w.shape, *map(frozen, (stride, padding if pad is None else pad, dilation, groups))).y_shape
    except (ShapeError, TypeError, ValueError):  # the op says it in its own words
        return None
    args = (x.detach(), w.detach(), None if bias is None else bias.detach())
    plain, finished = _call("conv2d"), _call("conv2d_relu")
    product = Product("conv2d", args, lambda: plain(*args, **options), ("relu",), lambda name: finished(*args, **options))
    return _deferred(product, shape, x)
