"""Initialization of parameters, under torch's names: ``init.kaiming_uniform_(layer.weight)``.

Functions whose name ends with ``_`` overwrite tensors in place and, except ``layer_``, return them. Random numbers come from ``generator=``
or else the counter-based generator of the tensor's device, which ``netcl.manual_seed`` seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.autograd.creation import with_generator
from netcl.core.device import queue_of
from netcl.core.dtype import sum_dtype
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.parameter import draws_values, placed


def skipped() -> placed:
    """Turn the functions that draw random values off inside the block, in this thread, for weights that are loaded next."""
    return placed(blank=True)


def _drawing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function`` with a ``generator=`` parameter; the returned function does nothing inside :func:`skipped`."""
    draw = with_generator(function)
    return wraps(draw)(lambda tensor, *args, **options: draw(tensor, *args, **options) if draws_values() else tensor)


def _random_values(kind: str, tensor: Tensor) -> np.ndarray:
    """Return ``uniform`` or normal random numbers for a tensor, as float64; a half tensor gets the numbers of a float32 tensor."""
    draw = ag.rand if kind == "uniform" else ag.randn
    return draw(tensor.shape, dtype=sum_dtype(tensor.dtype), queue=tensor.queue).to_host().astype(np.float64)


def _put(tensor: Tensor, values: np.ndarray) -> Tensor:
    return tensor.from_host(values.astype(sum_dtype(tensor.dtype)))


# ---- given values


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with the value ``val``."""
    with ag.no_grad():
        return tensor.fill_(val)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with zeros."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with ones."""
    return constant_(tensor, 1.0)


def eye_(tensor: Tensor) -> Tensor:
    """Fill a matrix with ones on the diagonal, zeros elsewhere."""
    if tensor.ndim != 2:
        raise ShapeError(message("eye_", "the tensor must be a matrix", shape=tensor.shape))
    return _put(tensor, np.eye(tensor.shape[0], tensor.shape[1]))


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Fill convolution weights so that as many channels as possible pass unchanged."""
    if tensor.ndim not in (3, 4, 5):
        raise ShapeError(message("dirac_", "the tensor must have 3, 4 or 5 dimensions, as convolution weights do", shape=tensor.shape))
    if tensor.shape[0] % groups:
        raise ShapeError(message("dirac_", "groups must divide the number of filters", shape=tensor.shape, groups=groups))
    values = np.zeros(tensor.shape)
    per_group, middle = tensor.shape[0] // groups, tuple(n // 2 for n in tensor.shape[2:])
    for group in range(groups):
        for channel in range(min(per_group, tensor.shape[1])):
            index = (group * per_group + channel, channel, *middle)
            values[index] = 1
    return _put(tensor, values)


# ---- random values


@_drawing
def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Fill with values drawn uniformly between ``a`` and ``b``.

    >>> from netcl import Tensor, nn
    >>> t = nn.init.uniform_(Tensor.empty((100,)), -2.0, 2.0)
    >>> bool((abs(t.to_host()) <= 2).all())
    True
    """
    return _put(tensor, a + (b - a) * _random_values("uniform", tensor))


@_drawing
def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill with values drawn from a normal distribution."""
    return _put(tensor, mean + std * _random_values("normal", tensor))


@_drawing
def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """Fill with values drawn from a normal distribution truncated to ``a .. b``, by inversion: one random number per value."""
    low, high = (math.erf((limit - mean) / std / math.sqrt(2)) for limit in (a, b))
    values = low + (high - low) * _random_values("uniform", tensor)
    inverse = ag.erfinv(Tensor.from_host(queue_of("cpu"), values, "float64")).to_host()
    return _put(tensor, np.clip(mean + std * math.sqrt(2) * inverse, a, b))


@_drawing
def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill with ``gain`` times a random matrix whose rows (or columns, if fewer) are orthonormal; trailing axes are flattened."""
    if tensor.ndim < 2:
        raise ShapeError(message("orthogonal_", "the tensor must have at least two dimensions", shape=tensor.shape))
    if tensor.size == 0:
        return tensor
    flat = _random_values("normal", tensor).reshape(tensor.shape[0], -1)
    tall = flat if flat.shape[0] >= flat.shape[1] else flat.T
    q, r = np.linalg.qr(tall)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)  # makes the distribution uniform
    return _put(tensor, gain * (q if tall is flat else q.T).reshape(tensor.shape))


@_drawing
def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01) -> Tensor:
    """Fill a matrix with normal values; at least a fraction ``sparsity`` of each column is zero."""
    if tensor.ndim != 2:
        raise ShapeError(message("sparse_", "the tensor must be a matrix", shape=tensor.shape))
    values = std * _random_values("normal", tensor)
    zeros = math.ceil(sparsity * tensor.shape[0])
    order = np.argsort(_random_values("uniform", tensor), axis=0)
    np.put_along_axis(values, order[:zeros], 0.0, axis=0)
    return _put(tensor, values)


# ---- scaled by the number of connections


def fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """Return the fan-in (inputs per output) and the fan-out (outputs per input) of the layer with these weights.

    >>> from netcl import Tensor, nn
    >>> nn.init.fan_in_and_fan_out(Tensor.empty((16, 3, 5, 5)))
    (75, 400)
    """
    if tensor.ndim < 2:
        raise ShapeError(message("init", "the tensor must have at least two dimensions for fan in and fan out", shape=tensor.shape))
    window = math.prod(tensor.shape[2:])
    return tensor.shape[1] * window, tensor.shape[0] * window


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the gain of a nonlinearity, by which initial values are scaled.

    >>> from netcl import nn
    >>> nn.init.calculate_gain("relu") ** 2
    2.0000000000000004
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1 + (0.01 if param is None else param) ** 2))
    linear = ("linear", "sigmoid", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    known = {"tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 0.75, **dict.fromkeys(linear, 1.0)}
    if nonlinearity not in known:
        remedy = f"known: leaky_relu, {', '.join(known)}"
        raise ValueError(message("calculate_gain", "unknown nonlinearity", remedy, nonlinearity=repr(nonlinearity)))
    return known[nonlinearity]


def _xavier_std(tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2.0 / max(1, sum(fan_in_and_fan_out(tensor))))


@_drawing
def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill with uniform values of variance ``2 gain**2 / (fan_in + fan_out)`` (Glorot and Bengio 2010)."""
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound)


@_drawing
def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill with normal values of variance ``2 gain**2 / (fan_in + fan_out)``."""
    return normal_(tensor, 0.0, _xavier_std(tensor, gain))


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(message("kaiming", "mode must be fan_in or fan_out", mode=repr(mode)))
    fan = fan_in_and_fan_out(tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(max(1, fan))


@_drawing
def kaiming_uniform_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Fill with uniform values of variance ``gain**2 / fan``; ``nonlinearity`` and its slope ``a`` set ``gain``, ``mode`` sets ``fan``.

    >>> import netcl
    >>> from netcl import nn
    >>> w = nn.init.kaiming_uniform_(netcl.Tensor.empty((256, 100)), nonlinearity="relu")
    >>> round(float(w.to_host().std()), 2)
    0.14
    """
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


@_drawing
def kaiming_normal_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Fill with normal values of variance ``gain**2 / fan``, as in :func:`kaiming_uniform_` (He et al. 2015)."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))


def layer_(weight: Tensor, bias: Any = None, fan_in: int | None = None) -> None:
    """Initialize linear and convolution layers as torch does: weight and bias uniform in ``[-k, k]``, ``k = 1 / sqrt(fan_in)``."""
    fan = fan_in if fan_in is not None else fan_in_and_fan_out(weight)[0]
    bound = 1 / math.sqrt(fan) if fan > 0 else 0.0
    uniform_(weight, -bound, bound)
    if bias is not None:
        uniform_(bias, -bound, bound)
