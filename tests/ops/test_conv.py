"""Convolutions beyond the samples of their rows: every kernel on every device, PyTorch's numbers, gradients of gradients."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import netcl.ops as F
from netcl.core.device import handle_of
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.core.tensor import Tensor
from netcl.ops import registry

OPS = ("conv2d", "conv2d_input_grad", "conv2d_weight_grad")
V = KernelVariant
KERNELS = {
    "cpu-panel": KernelConfig(V.CONV2D_IMPLICIT_GEMM, extra={"tier": "cpu"}),
    "cpu-panel-in-pieces": KernelConfig(V.CONV2D_IM2COL, extra={"tier": "cpu", "KC": 64, "ROWS": 12, "NT": 2}),
    "cpu-rows": KernelConfig(V.CONV2D_NAIVE, extra={"tier": "cpu"}),
    "simt-gemm": KernelConfig(V.CONV2D_IMPLICIT_GEMM, tile_k=16, extra={"tier": "simt"}),
    "simt-gemm-wide": KernelConfig(V.CONV2D_IMPLICIT_GEMM, tile_m=64, tile_n=64, tile_k=8, work_per_thread=8, extra={"tier": "simt"}),
    "simt-im2col": KernelConfig(V.CONV2D_IM2COL, extra={"tier": "simt"}),
    "simt-tiled": KernelConfig(V.CONV2D_TILED_LOCAL, extra={"tier": "simt"}),
    "simt-naive": KernelConfig(V.CONV2D_NAIVE, extra={"tier": "simt"}),
}


@contextmanager
def forced(config: KernelConfig):
    """Every convolution by one kernel."""
    selector = get_kernel_selector()
    before = dict(selector._registered)
    for op in OPS:
        selector.register(op, lambda shapes, profile: True, config)
    try:
        yield
    finally:
        selector._registered.clear()
        selector._registered.update(before)


def call(name, queue, arrays, kwargs, dtype=None):
    """The op's result on the host."""
    tensors = [None if a is None else Tensor.from_host(queue, a, dtype) for a in arrays]
    return getattr(F, name)(*tensors, **kwargs).to_host()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", OPS)
def test_every_kernel_meets_every_sample(cl_queue, name, kernel, tol):
    row = registry.lookup(name)
    with forced(KERNELS[kernel]):
        for sample in row.samples:
            arrays = sample.arrays()
            got = call(name, cl_queue, arrays, sample.kwargs)
            want = row.ref(*(None if a is None else a.astype(np.float64) for a in arrays), **sample.kwargs)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=f"{kernel} {sample}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_takes_every_dtype(cl_queue, kernel, dtype, tol):
    if dtype == "float64" and not handle_of(cl_queue).profile.has_fp64:
        pytest.skip("the device has no float64")
    with forced(KERNELS[kernel]):
        for name in OPS:
            row = registry.lookup(name)
            for sample in row.samples[1:3]:
                arrays = [Tensor.from_host(cl_queue, a, dtype).to_host() if a is not None else None for a in sample.arrays(dtype=dtype)]
                got = call(name, cl_queue, arrays, sample.kwargs, dtype)
                want = row.ref(*(None if a is None else a.astype(np.float64) for a in arrays), **sample.kwargs)
                scale = np.abs(want).max()
                np.testing.assert_allclose(got / scale, want / scale, **tol[dtype], err_msg=f"{name} {sample}")
