"""Discrete Fourier transforms. Complex numbers are pairs (real, imaginary) along a last axis of 2, as in ``torch.view_as_real``.

NumPy computes the three ``fft_*`` ops on the host, so they wait for the device. ``netcl.fft`` has torch's functions, built on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import S, composite
from netcl.ops.linalg import on_host


def _complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


def _pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], -1)


@on_host("x", vjp=lambda F, g, axes, forward, scale: F.fft_pairs(g, axes, not forward, scale), ref="numpy", amp="float", tol=4,
         samples=[S((5, 2), axes=(0,)), S((3, 4, 2), axes=(0, 1), forward=False, scale=0.25)])  # fmt: skip
def fft_pairs(x, axes, forward=True, scale=1.0):
    """Fourier transform of (real, imaginary) pairs along axes, or the unnormalized inverse, times ``scale``. Computed on the host."""
    return _pairs(np.fft.fftn(_complex(x), axes=axes) if forward else np.fft.ifftn(_complex(x), axes=axes, norm="forward")) * scale


def _from_real_vjp(F, g, x_shape, axis, scale):
    n, at = x_shape[axis], axis % len(x_shape)
    whole = F.pad(g, (0, 0) * (len(x_shape) - at) + (0, n - g.shape[at]))
    return F.select(F.fft_pairs(whole, (at,), False, scale), -1, 0)


@on_host("x", vjp=_from_real_vjp, ref="numpy", amp="float", tol=4, samples=[S((6,)), S((5, 3), axis=0, scale=0.5), S((2, 5))])
def fft_from_real(x, axis=-1, scale=1.0):
    """Return the first half of the Fourier transform of real numbers along an axis, as pairs, times ``scale``. Computed on the host."""
    return _pairs(np.fft.rfft(x, axis=axis)) * scale


def _to_real_vjp(F, g, n, axis, scale):
    at = axis % len(g.shape)
    halves = F.fft_from_real(g, at, scale)
    twice = np.where((np.arange(n // 2 + 1) * 2) % n == 0, 1.0, 2.0)
    return F.mul(halves, Tensor.from_host(g.queue, twice.reshape(-1, *(1,) * (len(g.shape) - at)), g.dtype))


@on_host("x", vjp=_to_real_vjp, ref="numpy", amp="float", tol=4,
         samples=[S((4, 2), n=6), S((3, 2, 2), n=5, axis=0, scale=0.2)])  # fmt: skip
def fft_to_real(x, n, axis=-1, scale=1.0):
    """The unnormalized inverse of :func:`fft_from_real`: ``n`` real numbers along an axis, times ``scale``. Computed on the host."""
    return np.fft.irfft(_complex(x), n, axis, norm="forward") * scale


# ---- short-time transforms


def _padded_window(F: Any, name: str, x: Tensor, window: Any, n_fft: int, win_length: int | None) -> Tensor:
    """Return the window, by default ones, centered and padded with zeros to ``n_fft`` elements."""
    length = n_fft if win_length is None else win_length
    made = Tensor.ones((length,), x.dtype, queue=x.queue) if window is None else window
    if made.shape != (length,) or not 0 < length <= n_fft:
        what = "window must have win_length elements, and win_length must be from 1 to n_fft"
        raise ShapeError(message(name, what, n_fft=n_fft, win_length=length, **{"window.shape": made.shape}))
    left = (n_fft - length) // 2
    return F.pad(made, (left, n_fft - length - left)) if length < n_fft else made


@composite(ref="numpy", samples=[S((20,), n_fft=8), S((2, 17), n_fft=6, hop_length=3, center=False, onesided=False)],
         inputs=("x",), amp="float",
           tol=4, errors=[(S((4,), n_fft=9, center=False),
           r"\[stft\] n_fft must be between 1 and the length of the signal, padding included; n_fft=9, length=4"),
                          (S((2, 2, 9), n_fft=4), r"\[stft\] x must be a signal \(length,\) or signals \(batch, length\)")])  # fmt: skip
def stft_pairs(
    F: Any, x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool = True,
) -> Tensor:  # fmt: skip
    """Fourier transforms of overlapping windows of signals, ``(..., frequencies, frames, 2)``; ``netcl.stft`` takes torch's arguments."""
    (x,) = launch.as_tensors("stft", x)
    if x.ndim not in (1, 2):
        raise ShapeError(message("stft", "x must be a signal (length,) or signals (batch, length)", **{"x.shape": x.shape}))
    padded = F.pad(x, (n_fft // 2, n_fft // 2), pad_mode) if center else x
    if not 0 < n_fft <= padded.shape[-1]:
        what = "n_fft must be between 1 and the length of the signal, padding included"
        raise ShapeError(message("stft", what, n_fft=n_fft, length=padded.shape[-1]))
    shaped = _padded_window(F, "stft", x, window, n_fft, win_length)
    frames = F.mul(F.unfold(padded, -1, n_fft, hop_length or n_fft // 4), shaped)
    scale = n_fft**-0.5 if normalized else 1.0
    if onesided:
        made = F.fft_from_real(frames, -1, scale)
    else:
        made = F.fft_pairs(F.stack([frames, F.mul(frames, 0)], -1), (frames.ndim - 1,), True, scale)
    return F.transpose(made, -3, -2)


def _overlapped(F: Any, frames: Tensor, step: int) -> Tensor:
    """Sum overlapping frames ``(..., frames, size)`` along one axis: the transpose of ``unfold``."""
    *lead, count, size = frames.shape
    at = (np.arange(count)[:, None] * step + np.arange(size)).reshape(-1)
    zeros = Tensor.zeros((*lead, (count - 1) * step + size), frames.dtype, queue=frames.queue)
    index = Tensor.from_host(frames.queue, at)
    return F.index_add(zeros, len(lead), index, F.reshape(frames, (*lead, count * size)))


@composite(ref=None, inputs=("x",), amp="float", samples=[S((5, 4, 2), n_fft=8)])
def istft_pairs(
    F: Any, x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
    center: bool = True, normalized: bool = False, onesided: bool = True, length: int | None = None,
) -> Tensor:  # fmt: skip
    """The signals whose :func:`stft_pairs` is nearest to ``x``; ``netcl.istft`` takes torch's arguments."""
    (x,) = launch.as_tensors("istft", x)
    step = hop_length or n_fft // 4
    shaped = _padded_window(F, "istft", x, window, n_fft, win_length)
    turned, scale = F.transpose(x, -3, -2), n_fft**-0.5 if normalized else 1 / n_fft
    if onesided:
        frames = F.fft_to_real(turned, n_fft, turned.ndim - 2, scale)
    else:
        frames = F.select(F.fft_pairs(turned, (turned.ndim - 2,), False, scale), -1, 0)
    total = _overlapped(F, F.mul(frames, shaped), step)
    weight = _overlapped(F, F.expand(F.square(shaped), (frames.shape[-2], n_fft)), step)
    first = n_fft // 2 if center else 0
    size = total.shape[-1] - 2 * first if length is None else min(length, total.shape[-1] - first)
    weight = F.narrow(weight, 0, first, size)
    if (np.abs(weight.to_host()) < 1e-11).any():
        raise ShapeError(message("istft", "the windows must cover the signal, but leave gaps", "use a smaller hop_length", hop_length=step))
    made = F.div(F.narrow(total, -1, first, size), weight)
    return made if length in (None, size) else F.pad(made, (0, length - size))


def transform_axes(name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    """Return axes as non-negative integers; all axes for ``None``."""
    given: Sequence[int] = range(ndim) if axes is None else (axes,) if isinstance(axes, int) else axes
    return tuple(launch.check_axis(name, axis, ndim) for axis in given)
