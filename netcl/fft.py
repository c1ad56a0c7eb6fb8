"""Fourier transforms under the names of ``torch.fft``, on the host. There is no complex dtype: a complex result is a :class:`Complex`.

>>> import netcl
>>> z = netcl.fft.rfft(netcl.tensor([1.0, 2.0, 3.0, 4.0]))
>>> z.real.tolist(), z.abs()[1].item()
([10.0, -2.0, -2.0], 2.8284270763397217)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from netcl.autograd.creation import made_here
from netcl.autograd.ops import twin
from netcl.core.dtype import DTYPES
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops.fft import transform_axes


class Complex:
    """A complex tensor: real tensors ``real`` and ``imag`` of one shape, with arithmetic, ``abs``, ``angle``, ``conj`` and indexing.

    It is not a ``Tensor``, and ops do not accept it. ``netcl.view_as_real`` makes a tensor with a last axis of 2, ``view_as_complex`` is
    the inverse.
    """

    real: Any
    imag: Any

    def __init__(self, real: Tensor, imag: Tensor):
        if real.shape != imag.shape or real.dtype != imag.dtype:
            what = "real and imag must have the same shape and dtype"
            raise ShapeError(message("complex", what, real=(real.shape, real.dtype), imag=(imag.shape, imag.dtype)))
        self.real, self.imag = real, imag

    shape = property(lambda self: self.real.shape)
    ndim = property(lambda self: self.real.ndim)
    device = property(lambda self: self.real.device)
    requires_grad = property(lambda self: self.real.requires_grad or self.imag.requires_grad)

    def __repr__(self) -> str:
        return f"Complex(real={self.real!r}, imag={self.imag!r})"

    def __len__(self) -> int:
        return len(self.real)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Raise ``DtypeError``: ops convert their arguments by NumPy, and no op accepts complex numbers."""
        raise DtypeError(message("complex", "ops require real tensors", "use z.abs(), z.real, z.imag, z.numpy() or netcl.view_as_real(z)"))

    def _each(self, function: Callable[[Any], Any]) -> Complex:
        return Complex(function(self.real), function(self.imag))

    def __getattr__(self, name: str) -> Any:
        """Return a method that applies ``reshape``, ``transpose``, ``detach``, ``to`` or ``sum`` to both parts."""
        if name not in ("reshape", "transpose", "detach", "to", "sum"):
            raise AttributeError(f"'Complex' object has no attribute {name!r}")
        return lambda *args, **options: self._each(lambda x: getattr(x, name)(*args, **options))

    def __getitem__(self, index: Any) -> Complex:
        return self._each(lambda x: x[index])

    def abs(self) -> Tensor:
        return twin("hypot")(self.real, self.imag)

    def angle(self) -> Tensor:
        return twin("atan2")(self.imag, self.real)

    def conj(self) -> Complex:
        return Complex(self.real, -self.imag)

    def numpy(self) -> np.ndarray:
        return self.real.numpy() + 1j * self.imag.numpy()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    __abs__ = abs

    def __neg__(self) -> Complex:
        return self._each(lambda x: -x)

    def __add__(self, other: Any) -> Complex:
        real, imag = _real_and_imaginary(other)
        return Complex(self.real + real, self.imag + imag)

    def __sub__(self, other: Any) -> Complex:
        return self + -other

    def __rsub__(self, other: Any) -> Complex:
        return -self + other

    def __mul__(self, other: Any) -> Complex:
        real, imag = _real_and_imaginary(other)
        return Complex(self.real * real - self.imag * imag, self.real * imag + self.imag * real)

    def __truediv__(self, other: Any) -> Complex:
        real, imag = _real_and_imaginary(other)
        size = real * real + imag * imag
        return Complex((self.real * real + self.imag * imag) / size, (self.imag * real - self.real * imag) / size)

    __radd__, __rmul__ = __add__, __mul__


def _real_and_imaginary(value: Any) -> tuple[Any, Any]:
    """Return the real and the imaginary part of a complex or real tensor or number."""
    if isinstance(value, Tensor):
        return value, Tensor.zeros(value.shape, value.dtype, queue=value.queue)
    return value.real, value.imag


def polar(abs: Tensor, angle: Tensor) -> Complex:
    """Return the complex tensor with these absolute values and angles."""
    return Complex(abs * twin("cos")(angle), abs * twin("sin")(angle))


def view_as_real(input: Complex) -> Tensor:
    """Return real and imaginary part along a new last axis. Unlike in torch, the result has its own memory."""
    return twin("stack")([input.real, input.imag], -1)


def view_as_complex(input: Tensor) -> Complex:
    """Return the complex tensor whose real and imaginary parts lie along the last axis, which must have size 2."""
    if not input.shape or input.shape[-1] != 2:
        raise ShapeError(message("view_as_complex", "the last axis must have 2 elements", shape=input.shape))
    return Complex(twin("select")(input, -1, 0), twin("select")(input, -1, 1))


def real(input: Any) -> Tensor:
    """Return the real part."""
    return input.real


def imag(input: Any) -> Tensor:
    """Return the imaginary part of a complex tensor; raises for a real one."""
    if isinstance(input, Complex):
        return input.imag
    raise DtypeError(message("imag", "the argument must be a complex tensor", dtype=input.dtype))


def conj(input: Any) -> Any:
    """Return the complex conjugate; a real tensor is returned unchanged."""
    return input.conj() if isinstance(input, Complex) else input


def angle(input: Any) -> Tensor:
    """Return the angle; for real numbers 0, or pi where they are negative."""
    return input.angle() if isinstance(input, Complex) else twin("atan2")(_real_and_imaginary(input)[1], input + 0.0)  # of -0.0, 0


def is_complex(input: Any) -> bool:
    """Whether the argument is a complex tensor."""
    return isinstance(input, Complex)


# ---- transforms


def _floats(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) and DTYPES[x.dtype].is_float else twin("cast")(x, "float32")


def _scale(name: str, norm: str | None, size: int, forward: bool) -> float:
    powers = {"backward": 0.0 if forward else 1.0, "ortho": 0.5, "forward": 1.0 if forward else 0.0}
    if norm not in (None, *powers):
        raise ValueError(message(name, 'norm must be "backward", "ortho" or "forward"', norm=repr(norm)))
    return size ** -powers[norm or "backward"]


def _resized(x: Tensor, axis: int, size: int) -> Tensor:
    """Return ``x`` with an axis cut to ``size`` elements, or padded with zeros."""
    return x if x.shape[axis] == size else twin("pad")(x, (0, 0) * (x.ndim - 1 - axis) + (0, size - x.shape[axis]))


def _transformed(name: str, input: Any, sizes: Any, dims: Any, norm: str | None, forward: bool, kind: str) -> Any:
    """Return the transform along ``dims``; ``kind``: complex to complex (``cc``), real to complex (``rc``) or complex to real (``cr``)."""
    if kind == "rc" and isinstance(input, Complex):
        raise DtypeError(message(name, "the argument must be a real tensor", f"use {name.replace('rf', 'f').replace('ih', 'i')}"))
    given = input if kind == "rc" or isinstance(input, Complex) else Complex(*_real_and_imaginary(_floats(input)))
    x, ndim = _floats(given) if kind == "rc" else view_as_real(given), input.ndim
    sizes = None if sizes is None else (sizes,) if isinstance(sizes, int) else tuple(sizes)
    axes = tuple(range(ndim - len(sizes), ndim)) if dims is None and sizes is not None else transform_axes(name, dims, ndim)
    size_name, remedy = "s" if name[-1] in "2n" else "n", ""
    if sizes is None:
        remedy = f"by default, {size_name} follows the shape of the input"
        sizes = [input.shape[a] for a in axes]
        sizes = [*sizes[:-1], 2 * (sizes[-1] - 1)] if kind == "cr" else sizes
    if len(sizes) != len(axes) or min(sizes, default=0) < 1:
        what = "s must have one size of at least 1 per axis" if size_name == "s" else "n must be one size of at least 1"
        raise ShapeError(message(name, what, remedy, **{size_name: tuple(sizes)}, dim=dims, shape=input.shape))
    for axis, size in zip(axes, sizes, strict=True):
        x = _resized(x, axis, size // 2 + 1 if kind == "cr" and axis == axes[-1] else size)
    scale, others = _scale(name, norm, math.prod(sizes), forward), axes[:-1]
    if kind == "cc":
        return view_as_complex(twin("fft_pairs")(x, axes, forward, scale))
    if kind == "rc":
        x = twin("fft_from_real")(x, axes[-1], scale)
        return view_as_complex(twin("fft_pairs")(x, others, True, 1.0) if others else x)
    x = twin("fft_pairs")(x, others, False, 1.0) if others else x
    return twin("fft_to_real")(x, sizes[-1], axes[-1], scale)


def _transform_function(name: str, forward: bool, kind: str, what: str) -> Callable[..., Any]:
    def along_one(input: Any, n: int | None = None, dim: Any = -1, norm: str | None = None) -> Any:
        return _transformed(name, input, n, dim, norm, forward, kind)

    def along_several(input: Any, s: Any = None, dim: Any = (-2, -1) if name[-1] == "2" else None, norm: str | None = None) -> Any:
        return _transformed(name, input, s, dim, norm, forward, kind)

    call: Any = along_several if name[-1] in "2n" else along_one
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{what} along {'an axis' if name[-1] not in '2n' else 'two axes' if name[-1] == '2' else 'axes'}, as in torch.fft."
    return call


for _end in ("", "2", "n"):
    for _head, _how in {"fft": (True, "cc", "Return the Fourier transform"), "ifft": (False, "cc", "Return the inverse Fourier transform"),
                        "rfft": (True, "rc", "Return the first half of the Fourier transform of real numbers"),
                        "irfft": (False, "cr", "Return the real numbers whose transform begins with the input")}.items():  # fmt: skip
        globals()[_head + _end] = _transform_function(_head + _end, *_how)


def hfft(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """Return the real transform of a Hermitian-symmetric signal. ``input`` is the first half of the signal. Scaled as ``fft``."""
    return _transformed("hfft", conj(input), n, dim, norm, True, "cr")


def ihfft(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Complex:
    """Return the first half of the Hermitian-symmetric inverse transform of a real tensor: the inverse of :func:`hfft`."""
    return _transformed("ihfft", input, n, dim, norm, False, "rc").conj()


def fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, **options: Any) -> Tensor:
    """Return the frequencies of a transform of ``n`` samples, in cycles per unit of the sample spacing ``d``."""
    return made_here(np.fft.fftfreq(n, d), dtype or "float32", options)


def rfftfreq(n: int, d: float = 1.0, **options: Any) -> Tensor:
    """Return the frequencies of an ``rfft`` of ``n`` samples, from 0 up; see :func:`fftfreq`."""
    return fftfreq(n, d, **options)[: n // 2 + 1].abs()


def _shift_spectrum(input: Any, dim: Any, sign: int) -> Any:
    axes = transform_axes("fftshift", dim, input.ndim)
    shifts = [sign * (input.shape[a] // 2) for a in axes]
    return input._each(lambda x: twin("roll")(x, shifts, axes)) if isinstance(input, Complex) else twin("roll")(input, shifts, axes)


def fftshift(input: Any, dim: Any = None) -> Any:
    """Return the input with the zero frequency moved to the middle of the axes."""
    return _shift_spectrum(input, dim, 1)


def ifftshift(input: Any, dim: Any = None) -> Any:
    """Return the input with the zero frequency moved back from the middle: the inverse of :func:`fftshift`."""
    return _shift_spectrum(input, dim, -1)


def stft(input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
         center: bool = True, pad_mode: str = "reflect", normalized: bool = False, onesided: bool | None = None,
         return_complex: bool = True) -> Any:  # fmt: skip
    """Return short-time Fourier transforms ``(..., frequencies, frames)``. ``return_complex=False`` gives reals with a last axis of 2."""
    made = twin("stft_pairs")(input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided is not False)
    return view_as_complex(made) if return_complex else made


def istft(input: Any, n_fft: int, hop_length: int | None = None, win_length: int | None = None, window: Tensor | None = None,
          center: bool = True, normalized: bool = False, onesided: bool | None = None, length: int | None = None,
          return_complex: bool = False) -> Tensor:  # fmt: skip
    """Return the inverse short-time Fourier transform of a complex tensor, or of a real tensor with a last axis of 2."""
    if return_complex:
        raise DtypeError(message("istft", "return_complex=True cannot be used: signals are real", "pass return_complex=False"))
    pairs = view_as_real(input) if isinstance(input, Complex) else input
    return twin("istft_pairs")(pairs, n_fft, hop_length, win_length, window, center, normalized, onesided is not False, length)
