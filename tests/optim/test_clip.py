"""Clipping against torch, and what it does with NaN, several devices and nothing at all."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from netcl import optim
from netcl.core.device import manager
from netcl.core.errors import DeviceError, DtypeError
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.ops import update

GOLDEN = Path(__file__).parent.parent / "golden" / "optim.npz"
ORDERS = {"2": 2.0, "1": 1.0, "inf": math.inf, "3": 3.0}


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as file:
        return dict(file)


def parameters(queue) -> list[Tensor]:
    params = []
    for i in range(sum(key.startswith("start.") for key in golden())):
        p = Tensor.zeros(golden()[f"start.{i}"].shape, queue=queue, requires_grad=True)
        p.grad = Tensor.from_host(queue, np.asarray(golden()[f"gradients.{i}"][0]))
        params.append(p)
    return params


def one(queue, values) -> Tensor:
    p = Tensor.zeros((len(values),), queue=queue, requires_grad=True)
    p.grad = Tensor.from_host(queue, np.array(values, np.float32))
    return p


@pytest.mark.parametrize("clip", [optim.clip_grad_norm, optim.clip_grad_norm_device])
@pytest.mark.parametrize("name", ORDERS)
def test_norm_and_gradients_are_torchs(name, clip, queue):
    params = parameters(queue)
    norm = clip(params, 2.0, ORDERS[name])
    assert isinstance(norm, float) if clip is optim.clip_grad_norm else norm.shape == ()
    np.testing.assert_allclose(float(norm), golden()[f"norm.{name}"], rtol=1e-6)
    found = np.concatenate([p.grad.to_host().reshape(-1) for p in params])
    np.testing.assert_allclose(found, golden()[f"clipped.{name}"], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("clip", [optim.clip_grad_norm, optim.clip_grad_norm_device])
def test_small_gradients_keep_their_bits(clip, queue):
    p = one(queue, [3.0, -4.0])
    assert float(clip(p, 100.0)) == 5.0
    assert p.grad.tolist() == [3.0, -4.0]


def test_norms_of_long_tensors_are_accurate(queue, rng):
    x = rng.standard_normal(300_001).astype(np.float32)
    total, _ = update.norm_of_all([Tensor.from_host(queue, x)])
    np.testing.assert_allclose(total.item(), np.linalg.norm(x.astype(np.float64)), rtol=3e-7)


def test_dtypes_may_differ(queue):
    tensors = [Tensor.from_host(queue, np.array([x], np.float32), dtype) for x, dtype in ((2, "float32"), (3, "float16"), (6, "bfloat16"))]
    total, factor = update.norm_of_all(tensors, 2.0, 3.5)
    assert total.item() == 7.0 and total.dtype == "float32"
    np.testing.assert_allclose(factor.item(), 0.5, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad, queue):
    values = [1.0, bad, 2.0]
    for order in (2.0, 1.0, math.inf, 3.0):
        norm = optim.clip_grad_norm_device([one(queue, [5.0] * 40), one(queue, values)], 1.0, order).item()
        assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    with pytest.raises(FloatingPointError, match=r"\[clip_grad_norm\] the norm of the gradients must be finite; norm=(nan|inf);"):
        optim.clip_grad_norm(one(queue, values), 1.0, error_if_nonfinite=True)
    p = one(queue, values)
    optim.clip_grad_norm(p, 1.0)
    assert np.isnan(p.grad.to_host()).any()
    assert update.nonfinite([one(queue, [1.0]).grad, one(queue, values).grad]).item() == 1.0
    assert update.nonfinite([one(queue, [1.0, 3e38]).grad]).item() == 0.0


def test_values(queue):
    p = one(queue, [0.5, -7.0, math.inf, math.nan])
    optim.clip_grad_value([p], 1.0)
    np.testing.assert_array_equal(p.grad.to_host(), [0.5, -1.0, 1.0, math.nan])


def test_nothing_to_clip(queue):
    p = Tensor.zeros((2,), queue=queue, requires_grad=True)
    assert optim.clip_grad_norm([p], 1.0) == 0.0
    assert optim.clip_grad_norm_device([p], 1.0).item() == 0.0
    optim.clip_grad_value([p], 1.0)
    empty = one(queue, [])
    assert optim.clip_grad_norm([empty], 1.0) == 0.0


def test_several_devices(cl_queue):
    params = [one(cl_queue, [3.0]), one(manager.default("cpu").queue, [4.0])]
    with pytest.raises(DeviceError, match=r"\[clip_grad_norm_device\] all gradients must be on the same device; .*use clip_grad_norm"):
        optim.clip_grad_norm_device(params, 1.0)
    with pytest.raises(DeviceError, match=r"\[norm_2\] all tensors must be on the same device; .*call it once per device"):
        update.norm_of_all([p.grad for p in params])
    assert optim.clip_grad_norm(params, 1.0) == 5.0
    np.testing.assert_allclose([p.grad.item() for p in params], [0.6, 0.8], rtol=1e-6)


def test_error_texts(queue):
    p = one(queue, [1.0])
    with pytest.raises(ValueError, match=r"\[clip_grad_norm\] max_norm must be a number, at least 0; max_norm=-1"):
        optim.clip_grad_norm([p], -1)
    with pytest.raises(ValueError, match=r"\[clip_grad_norm_device\] norm_type must be a positive number or infinity; norm_type=0"):
        optim.clip_grad_norm_device([p], 1.0, 0)
    with pytest.raises(ValueError, match=r"\[clip_grad_value\] clip_value must be a number, at least 0; clip_value=nan"):
        optim.clip_grad_value([p], math.nan)
    with pytest.raises(ValueError, match=r"\[norm\] order must be a positive number or infinity; order=-1.0"):
        update.norm_of_all([p.grad], -1)
    with pytest.raises(ValueError, match=r"\[norm_2\] at least one tensor must be given"):
        update.norm_of_all([])
    with pytest.raises(DtypeError, match=r"\[nonfinite\] a tensor must have a dtype that this op accepts; dtype=int32"):
        update.nonfinite([Tensor.zeros((2,), "int32", queue=queue)])


def test_sixty_gradients_take_three_launches(cl_queue):
    params = [one(cl_queue, [1.0] * (i + 1)) for i in range(60)]
    optim.clip_grad_norm_device(params, 1.0)
    seen = []
    hooks.launch_observers.append(lambda kernel, *_: seen.append(kernel.name))
    try:
        optim.clip_grad_norm_device(params, 1.0)
    finally:
        hooks.launch_observers.pop()
    assert seen == ["fold", "finish", "update"]
