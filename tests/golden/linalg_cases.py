"""Calls that torch and netcl write alike: ``call(t, *tensors)``, where ``t`` is one of the two, and the shapes of the tensors.

A shape becomes values from -1 to 1; an array is taken as it is. Results are compared as they are, so signs that a decomposition leaves
open are squared or multiplied away.
"""

from __future__ import annotations

import numpy as np

WELL = np.array([[2.0, 0.5, -0.3], [0.1, 1.5, 0.4], [-0.2, 0.3, 1.2]], np.float32)
SINGULAR = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.5, -1.0, 1.0]], np.float32)
SYMMETRIC = np.array([[2.0, 0.5, -0.3], [0.5, 1.0, 0.4], [-0.3, 0.4, 3.1]], np.float32)
BATCH = np.stack([SYMMETRIC, 2 * SYMMETRIC + np.eye(3, dtype=np.float32)])
INDEX = np.array([[0, 2, 0, 3], [1, 1, 2, 0]])
TIES = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -1.0, -1.0, 5.0, 5.0]], np.float32)
COUNTS = np.array([[3, 1, 3, 2, 1], [4, 4, 0, 0, 2]])
SORTED = np.array([-0.5, 0.0, 0.0, 0.7], np.float32)


def interpolated(**how):
    return lambda t, x: t.nn.functional.interpolate(x, **how)


def sampled(**how):
    return lambda t, x, grid: t.nn.functional.grid_sample(x, grid, **how)


def reduced(how, own):
    return lambda t, x, index, src: t.scatter_reduce(x, 1, index, src, how, include_self=own)


def parts(z):
    return z.real, z.imag


CASES = {
    "erfinv": (lambda t, x: t.erfinv(x), np.linspace(-0.99, 0.99, 23).astype(np.float32)),
    "lgamma": (lambda t, x: t.lgamma(x), np.linspace(0.1, 6, 23).astype(np.float32)),
    "digamma": (lambda t, x: t.digamma(x), np.array([-2.7, -0.4, 0.2, 1.0, 3.3, 40.0], np.float32)),
    "polygamma": (lambda t, x: t.polygamma(1, x), np.array([-2.7, -0.4, 0.2, 1.0, 3.3, 40.0], np.float32)),
    "cummax": (lambda t, x: t.cummax(x, dim=1), TIES),
    "cummin": (lambda t, x: t.cummin(x, dim=1), TIES),
    "logcumsumexp": (lambda t, x: t.logcumsumexp(x, dim=1), (3, 6)),
    "mode": (lambda t, x: t.mode(x, dim=1), COUNTS),
    "unfold": (lambda t, x: x.unfold(1, 3, 2), (2, 8, 3)),
    "histc": (lambda t, x: t.histc(x, bins=5, min=-0.5, max=0.75), (40,)),
    "searchsorted": (lambda t, s, v: (t.searchsorted(s, v), t.searchsorted(s, v, right=True)), SORTED,
        np.array([[-1, 0], [0.7, 2]], np.float32)),
    "bucketize": (lambda t, v, s: t.bucketize(v, s), (3, 4), SORTED),
    "index_put": (lambda t, x, i, v: x.index_put((i,), v, accumulate=True), (4, 3), np.array([2, 0, 2]), (3, 3)),
    "masked_scatter": (lambda t, x, m, s: x.masked_scatter(m, s), (3, 4), TIES[:, :4].repeat(2, 0)[:3] > 1, (12,)),
    "scatter_add": (lambda t, x, i, s: t.scatter(x.detach(), 1, i, s.detach(), reduce="add"), np.ones((2, 5), np.float32), INDEX,
        INDEX.astype(np.float32) + 1),
    **{f"scatter_{how}_{own}": (reduced(how, own), (2, 5), INDEX, (2, 4)) for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)},
    "cdist": (lambda t, a, b: t.cdist(a, b), (4, 3), (5, 3)),
    "bicubic": (interpolated(size=(7, 3), mode="bicubic"), (1, 2, 5, 4)),
    "bicubic_aligned": (interpolated(size=(7, 3), mode="bicubic", align_corners=True), (1, 2, 5, 4)),
    "bicubic_antialias": (interpolated(size=(3, 9), mode="bicubic", antialias=True), (1, 2, 8, 5)),
    "bilinear_antialias": (interpolated(size=(3, 9), mode="bilinear", antialias=True), (1, 2, 8, 5)),
    "bicubic_scale": (interpolated(scale_factor=1.7, mode="bicubic"), (1, 2, 5, 4)),
    "nearest_exact": (interpolated(size=(7, 3), mode="nearest-exact"), (1, 2, 5, 4)),
    "area": (interpolated(size=(3, 7), mode="area"), (1, 2, 5, 4)),
    "trilinear": (interpolated(size=(3, 5, 2), mode="trilinear"), (1, 2, 2, 3, 4)),
    "nearest_3d": (interpolated(size=(3, 5, 2)), (1, 2, 2, 3, 4)),
    "reflection": (sampled(padding_mode="reflection", align_corners=False), (1, 2, 4, 5),
        3 * np.linspace(-1, 0.93, 24, dtype=np.float32).reshape(1, 3, 4, 2)),
    "reflection_aligned": (sampled(padding_mode="reflection", align_corners=True), (1, 2, 4, 5),
        3 * np.linspace(-1, 0.93, 24, dtype=np.float32).reshape(1, 3, 4, 2)),
    **{f"grid_bicubic_{pad}_{align}": (sampled(mode="bicubic", padding_mode=pad, align_corners=align), (1, 2, 4, 3),
        1.7 * np.linspace(-1, 0.93, 24, dtype=np.float32).reshape(1, 3, 4, 2)) for pad in ("zeros", "border", "reflection")
        for align in (False, True)},
    **{f"grid_volume_{mode}_{pad}": (sampled(mode=mode, padding_mode=pad, align_corners=False), (1, 2, 3, 4, 2),
        1.4 * np.linspace(-1, 0.93, 36, dtype=np.float32).reshape(1, 2, 3, 2, 3)) for mode in ("bilinear", "nearest")
        for pad in ("zeros", "border", "reflection")},
    "affine_grid": (lambda t, theta: t.nn.functional.affine_grid(theta, (2, 3, 4, 5), align_corners=False), (2, 2, 3)),
    "conv2d_single": (lambda t, x, w, b: t.nn.functional.conv2d(x, w, b, padding=1), (3, 6, 5), (4, 3, 3, 3), (4,)),
    "conv1d_single": (lambda t, x, w: t.nn.functional.conv1d(x, w), (3, 6), (4, 3, 3)),
    "conv_transpose2d_single": (lambda t, x, w: t.nn.functional.conv_transpose2d(x, w, stride=2), (3, 3, 2), (3, 2, 3, 3)),
    "inv": (lambda t, a: t.linalg.inv(a), BATCH),
    "det": (lambda t, a: t.linalg.det(a), WELL),
    "det_singular": (lambda t, a: t.det(a), SINGULAR),
    "slogdet": (lambda t, a: t.linalg.slogdet(a).logabsdet, BATCH),
    "solve": (lambda t, a, b: t.linalg.solve(a, b), BATCH, (2, 3, 2)),
    "solve_vector": (lambda t, a, b: t.linalg.solve(a, b), WELL, (3,)),
    "solve_triangular": (lambda t, a, b: t.linalg.solve_triangular(a, b, upper=True, left=False), WELL, (2, 3)),
    "pinv": (lambda t, a: t.linalg.pinv(a), (4, 3)),
    "lstsq": (lambda t, a, b: t.linalg.lstsq(a, b).solution, (5, 3), (5, 2)),
    "cholesky": (lambda t, a: t.linalg.cholesky(a), BATCH),
    "cholesky_solve": (lambda t, b, a: t.cholesky_solve(b, t.tril(a)), (3, 2), np.linalg.cholesky(SYMMETRIC).astype(np.float32)),
    "qr": (lambda t, a: [x * x for x in t.linalg.qr(a)], (4, 3)),
    "qr_wide": (lambda t, a: [x * x for x in t.linalg.qr(a)], (2, 4)),
    "svd": (lambda t, a: [x * x for x in t.linalg.svd(a, full_matrices=False)], (2, 4, 3)),
    "svd_wide": (lambda t, a: [x * x for x in t.linalg.svd(a, full_matrices=False)], (3, 4)),
    "eigh": (lambda t, a: [x * x for x in t.linalg.eigh(a + a.transpose(-2, -1))], BATCH),
    "matrix_norms": (lambda t, a: [t.linalg.matrix_norm(a, ord=o) for o in ("fro", "nuc", 2, -2, 1, float("inf"))], (2, 4, 3)),
    "norm": (lambda t, a: (t.linalg.norm(a), t.linalg.norm(a, ord=2), t.linalg.vector_norm(a, ord=3, dim=1)), (4, 3)),
    "matrix_power": (lambda t, a: (t.matrix_power(a, 3), t.linalg.matrix_power(a, -2)), WELL),
    "matrix_exp": (lambda t, a: t.matrix_exp(3 * a), (3, 3)),
    "rank": (lambda t, a: t.linalg.matrix_rank(a), np.stack([WELL, SINGULAR])),
    "cross": (lambda t, a, b: t.linalg.cross(a, b), (4, 3), (4, 3)),
    "fft": (lambda t, x: parts(t.fft.fft(x, n=7, norm="ortho")), (3, 5)),
    "ifft": (lambda t, a, b: parts(t.fft.ifft(t.complex(a, b), dim=0)), (4, 3), (4, 3)),
    "rfft": (lambda t, x: parts(t.fft.rfft(x)), (3, 6)),
    "irfft": (lambda t, a, b: t.fft.irfft(t.complex(a, b), n=7), (3, 4), (3, 4)),
    "hfft": (lambda t, a, b: t.fft.hfft(t.complex(a, b)), (3, 4), (3, 4)),
    "ihfft": (lambda t, x: parts(t.fft.ihfft(x)), (3, 6)),
    "fft2": (lambda t, x: parts(t.fft.fft2(x)), (2, 3, 4)),
    "rfft2": (lambda t, x: parts(t.fft.rfft2(x, norm="forward")), (2, 3, 4)),
    "irfft2": (lambda t, a, b: t.fft.irfft2(t.complex(a, b), s=(3, 5)), (2, 3, 3), (2, 3, 3)),
    "fftn": (lambda t, x: parts(t.fft.fftn(x)), (2, 3, 4)),
    "fftshift": (lambda t, x: (t.fft.fftshift(x), t.fft.ifftshift(x, dim=1)), (3, 5)),
    "complex": (lambda t, a, b: parts(t.complex(a, b) * t.complex(b, a) / 2 - t.complex(a, b).conj()), (4,), (4,)),
    "polar": (lambda t, a, b: (t.polar(a, b).abs(), t.view_as_real(t.polar(a, b))), np.array([0.5, 2.0], np.float32), (2,)),
    "stft": (lambda t, x: parts(t.stft(x, 8, hop_length=3, window=t.hann_window(8), return_complex=True)), (2, 30)),
    "stft_plain": (lambda t, x: parts(t.stft(x, 8, win_length=6, center=False, normalized=True, onesided=False,
        window=t.ones(6), return_complex=True)), (20,)),
    "istft": (lambda t, x: t.istft(t.stft(x, 8, hop_length=2, window=t.hann_window(8), return_complex=True), 8, 2,
        window=t.hann_window(8), length=25), (2, 30)),
}  # fmt: skip


def inputs_of(name: str, given: list) -> list[np.ndarray]:
    """The arrays of a case."""
    rng = np.random.default_rng(sum(name.encode()))
    return [x if isinstance(x, np.ndarray) else rng.uniform(-1, 1, x).astype(np.float32) for x in given]
