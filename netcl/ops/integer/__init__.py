"""Products of 8-bit integers, summed in int32, and the windows of images that convolutions multiply.

The family ``integer`` has one algorithm. Its ``when`` says whether integer products are faster on a device than exact products of floats
(:mod:`netcl.io.onnx.quantized`); on CPUs they are not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from netcl.core.device import handle_of
from netcl.core.errors import ShapeError, message
from netcl.core.kernel_selector import get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.engine import algorithms, launch
from netcl.engine.registry import S, op
from netcl.ops.conv import arrays
from netcl.ops.conv.geometry import Geometry, Padding, Pair, frozen, geometry, pair

__all__ = ["integer_columns", "integer_dot", "prefers_integers"]

SIDE, SIDES = (16, 64), {"cpu": (1, 8)}  # items of a group and sums of its tile along both axes: of every device, and by type of device
_BYTE_TYPES = {"int8": "char", "uint8": "uchar"}
#: Multiply-adds from which a brand of devices is faster with integers, than with an exact sum of float products (``"exact"``) and than with
#: one float product between DequantizeLinear and QuantizeLinear (``"qdq"``), by benchmarks/integer_products.py.
LEAST_PRODUCTS = {("nvidia", "exact"): 500_000}


def prefers_integers(a: Tensor, b: Tensor, work: int, other: str = "exact") -> bool:
    """Whether to multiply quantized tensors by :func:`integer_dot` rather than in the ``other`` form, for ``work`` multiply-adds.

    False on the NumPy backend and for dtypes of more than 8 bits. A name given by ``selector.register("integer_dot", condition, name)``
    means yes unless it is ``"float"``. Without a name, the algorithm of the family ``integer`` decides.
    """
    if a.array is not None or {a.dtype, b.dtype} - _BYTE_TYPES.keys():
        return False
    profile = handle_of(a.queue).profile
    if named := get_kernel_selector().select("integer_dot", (a.shape, b.shape), profile):
        return named != "float"
    return algorithms.ALGORITHMS["integer"][0].when((other, work), None, profile)


def _integer_dot_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.matmul(a.astype(np.int64), np.swapaxes(b.astype(np.int64), -1, -2)).astype(np.int32)


@op(
    vjp=None,
    ref=_integer_dot_numpy,
    samples=[
        S((1, 1), (1, 1), dtypes="int8", low=-128, high=128),
        S((3, 5), (2, 5), dtypes=("uint8", "int8"), low=(0, -128), high=(256, 128)),
        S((2, 9, 33), (17, 33), dtypes=("int8", "uint8"), low=(-128, 0), high=(128, 256)),
        S((5, 600), (6, 600), dtypes="uint8", low=250, high=256),
        S((3, 2, 6), (2, 3, 4, 6), dtypes=("int8", "uint8"), low=(-128, 0), high=(128, 256)),
        S((0, 4), (3, 4), dtypes="int8", low=-128, high=128),
        S((2, 0), (3, 0), dtypes="int8", low=-128, high=128),
    ],
    errors=[(S((3, 5), (2, 4), dtypes="int8"), r"\[integer_dot\] a must be \(\.\.\., M, K\) and b \(\.\.\., N, K\).*a\.shape=\(3, 5\)")],
)
def integer_dot(a: Tensor, b: Tensor) -> Tensor:
    """``a b'`` of int8 or uint8 as int32: ``(..., M, K)`` times ``(N, K)``, or ``(g, M, K)`` times ``(n, g, N, K)``. No gradient."""
    a, b = launch.as_tensors("integer_dot", a, b)
    for name, x in (("a", a), ("b", b)):
        launch.check_dtype("integer_dot", x, tuple(_BYTE_TYPES), name)
    lead, inner = b.shape[:-2], a.shape[:-2]
    if b.ndim < 2 or not a.shape or a.shape[-1] != b.shape[-1] or (lead and (a.ndim < 2 or lead[len(lead) - len(inner) :] != inner)):
        what = "a must be (..., M, K) and b (..., N, K), and the leading axes of b, if any, must end with those of a"
        raise ShapeError(message("integer_dot", what, **{"a.shape": a.shape, "b.shape": b.shape}))
    if a.array is not None:
        return launch.run_cpu(_integer_dot_numpy, a, b, dtype="int32")
    out = Tensor.empty((*lead, a.shape[-2], b.shape[-2]) if lead else (*a.shape[:-1], b.shape[0]), "int32", queue=a.queue)
    if out.size:
        rows, profile = a.shape[-2] if lead else math.prod(a.shape[:-1]), handle_of(a.queue).profile
        sizes = (math.prod(lead), rows, *b.shape[-2:], math.prod(inner) if lead else 1)
        _run_tiles(a.queue, sizes, None, profile, (a, b, out))
    return out


def _run_tiles(queue: Any, sizes: tuple[int, ...], config: Any, profile: Any, t: tuple[Tensor, ...]) -> None:
    """Launch dot.cl with work-groups of ``side`` x ``side`` items for tiles of ``tile`` x ``tile`` sums."""
    (side, tile), (batches, m, n) = SIDES.get(profile.device_type, SIDE), sizes[:3]
    defines: dict[str, int | float | str] = {"A": _BYTE_TYPES[t[0].dtype], "B": _BYTE_TYPES[t[1].dtype], "SIDE": side, "TILE": tile}
    if (profile.compute_capability or (0, 0)) >= (6, 1):
        defines["DP4A"] = '"dp4a.{}32.{}32 %0, %1, %2, 0;"'.format(*(x.dtype.replace("i", "s")[0] for x in t[:2]))
    kernel = launch.kernel(queue, __file__, "dot.cl", "integer_dot", defines=defines)
    kernel(queue, (-(-n // tile) * batches * side, -(-m // tile) * side), (side, side), *t, *sizes[1:])


algorithms.add(
    "integer", "tiles", "dot.cl", "a group for 64 x 64 sums; on CPUs, by request only, an item for 8 x 8",
    "integer_products_h200.json: matmul 512x768 to 768", _run_tiles,
    when=lambda problem, config, profile: problem[1] >= LEAST_PRODUCTS.get((profile.brand, problem[0]), math.inf),
)  # fmt: skip


def _unfold_of(x: tuple[int, ...], kernel: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1, groups: int = 1) -> Geometry:
    weight = (groups, x[1] // groups if len(x) == 4 else 1, *pair("integer_columns", "kernel_size", frozen(kernel), 1))
    return geometry("integer_columns", x, weight, frozen(stride), frozen(padding), frozen(dilation), groups)


def _integer_columns_numpy(x: np.ndarray, zero: np.ndarray | None, kernel_size: Pair, **options: Any) -> np.ndarray:
    g = _unfold_of(x.shape, kernel_size, **options)
    seen = arrays.windows(x, (g.oh, g.ow), (g.kh, g.kw), g.stride, g.pad, g.dilation, 0 if zero is None else zero.item())
    seen = seen.reshape(g.n, g.groups, g.c // g.groups, g.oh, g.ow, g.taps).transpose(0, 1, 3, 4, 2, 5)
    return seen.reshape(*seen.shape[:4], g.c // g.groups * g.taps)


@op(
    vjp=None,
    ref=_integer_columns_numpy,
    samples=[
        S((2, 4, 5, 6), (), dtypes="uint8", low=0, high=256, kernel_size=3, stride=(2, 1), padding=((1, 2), (0, 1)), groups=2),
        S((1, 3, 4, 4), None, dtypes="int8", low=-128, high=128, kernel_size=(2, 1), dilation=2, padding=1),
        S((0, 3, 4, 4), None, dtypes="int8", low=-128, high=128, kernel_size=1),
    ],
    errors=[(S((1, 3, 4, 4), None, dtypes="int8", kernel_size=5), r"\[integer_columns\] the kernel must fit the padded input")],
)
def integer_columns(x: Tensor, zero: Tensor | None, kernel_size: Pair, stride: Pair = 1, padding: Padding = 0, dilation: Pair = 1,
                    groups: int = 1) -> Tensor:  # fmt: skip
    """Windows of int8 or uint8 images, ``(n, groups, height, width, channels / groups * taps)``, padded with ``zero``. No gradient."""
    (x,) = launch.as_tensors("integer_columns", x)
    launch.check_dtype("integer_columns", x, tuple(_BYTE_TYPES), "x")
    g = _unfold_of(x.shape, kernel_size, stride, padding, dilation, groups)
    if zero is not None and (zero.size != 1 or zero.dtype != x.dtype):
        raise ShapeError(message("integer_columns", f"zero must be one value of dtype {x.dtype}", shape=zero.shape, dtype=zero.dtype))
    if x.array is not None:
        options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return launch.run_cpu(_integer_columns_numpy, x, zero, kernel_size, **options)
    out = Tensor.empty((g.n, groups, g.oh, g.ow, g.c // groups * g.taps), x.dtype, queue=x.queue)
    if out.size:
        defines: dict[str, int | float | str] = {"X": _BYTE_TYPES[x.dtype], "ZERO": int(zero is not None)}
        kernel = launch.kernel(x.queue, __file__, "columns.cl", "integer_columns", defines=defines)
        numbers = (g.c // groups, g.h, g.w, g.kh, g.kw, g.oh, g.ow, *g.stride, *g.pad, *g.dilation)
        kernel(x.queue, (out.size // g.taps,), None, x, x if zero is None else zero, out, *numbers)
    return out
