"""Decides whether the matrix units of NVIDIA GPUs may be used. ``NETCL_MATRIX_UNITS=0`` disables them.

The units are used through inline PTX (ptx.cl), which is not part of OpenCL C. A device uses a tier built on them only if its compute
capability allows it and the tier is *trusted*: the driver has built the tier's kernels and a small test was correct. Otherwise other
kernels run. An algorithm's ``when`` calls :func:`capable`, which is cheap; its ``probe`` calls :func:`trusted` or :func:`verdict`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core import env, platforms, recording
from netcl.core.capabilities import DeviceProfile
from netcl.core.commands import device_queue
from netcl.core.dtype import DTYPES
from netcl.core.errors import KernelBuildError, message
from netcl.core.kernel_selector import Problem
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.core.waiting_runs import flush_waiting, waiting
from netcl.ops.matmul.gemm import Matmul, Operands

log = logging.getLogger("netcl")

#: The largest error of the self-check's product, relative to its largest value, by the dtype of the operands.
BOUNDS = {"float32": 2**-20, "float16": 2**-12, "bfloat16": 2**-12}


def capable(profile: DeviceProfile, least: tuple[int, int] = (8, 0), most: tuple[int, int] = (99, 0)) -> bool:
    """Whether a device is an NVIDIA GPU of compute capability ``least`` to ``most``, and its matrix units are not disabled."""
    capability = profile.compute_capability
    if capability is None or not least <= capability <= most:
        return False
    return env.value("NETCL_MATRIX_UNITS") and env.value("NETCL_KERNEL_STRATEGY") != "portable"


def tiles_for(problem: Problem, tiles: Mapping[int, Sequence[Any]], *capabilities: tuple[int, int]) -> Sequence[Any]:
    """Return the tuner's candidates: the ``tiles`` for the dtype's size in bytes; none if the device or the dtype does not suit."""
    suited = problem.dtype in BOUNDS and capable(problem.profile, *capabilities)
    return tiles[DTYPES[problem.dtype].itemsize] if suited else ()


def verdict(queue: Any, op: str, tier: str, dtype: str, right: Callable[[Any], bool], warns: bool = True, apart: bool = True) -> bool:
    """Return whether ``right(queue)`` confirms a tier's kernels for a dtype; false if the driver rejects them. Checked once per context.

    If it does not, a warning says so, unless ``warns`` is false. The check runs on the device immediately: its launches are not part of a
    recorded step or of a plan. Unless ``apart`` is false, it need not wait for the programs of earlier runs.
    """
    state, key = program.state(queue), (op, tier, dtype)
    if key not in state:
        on = _check_queue(device_queue(queue), apart)
        state[key] = False  # the check itself must not start another check
        try:
            with recording.paused():
                state[key] = right(on)
        except KernelBuildError as error:
            log.info("[%s] %s of %s does not build: %s", op, tier, dtype, str(error).splitlines()[0])
        log.info("[%s] %s of %s is %s; device=%s", op, tier, dtype, "used" if state[key] else "not used", state.device.name)
        if not state[key] and warns:
            what = f"the kernels {tier} cannot be used for {dtype}: a wrong result, or kernels that the driver does not build"
            warnings.warn(message(op, what, "portable kernels are used", device=state.device.name), stacklevel=2)
    return state[key]


def _check_queue(queue: Any, apart: bool) -> Any:
    """Return a queue without waiting runs for a check, which must not fail for their programs: another one, or ``queue`` after a flush."""
    if not waiting or not apart:
        flush_waiting(queue)
        return queue
    return platforms.opencl().CommandQueue(queue.context, queue.device)


def trusted(queue: Any, tier: str, dtype: str, run: Callable[[Any, Matmul, Operands], Any]) -> bool:
    """Whether the kernels of ``run(queue, product, operands)`` build and are correct for operands of a dtype."""
    return verdict(queue, "matmul", tier, dtype, lambda queue: multiplies_right(queue, dtype, run, BOUNDS[dtype]))


def multiplies_right(queue: object, dtype: str, run: Callable[[object, Matmul, Operands], object], bound: float) -> bool:
    """Whether the error of ``run`` is at most ``bound`` for a product of odd sizes, relative to its largest value."""
    rng, (m, n, k) = np.random.default_rng(0), (77, 136, 200)
    a, b = (Tensor.from_host(queue, rng.standard_normal(shape, np.float32), dtype) for shape in ((m, k), (k, n)))
    out = Tensor.empty((m, n), queue=queue)
    run(queue, Matmul(m, n, k, False, False, dtype, dtype, "float32", aligned=True), Operands(a, b, out))
    exact = a.to_host().astype(np.float64) @ b.to_host().astype(np.float64)
    return bool(np.abs(out.to_host() - exact).max() <= bound * np.abs(exact).max())
