"""Gradient clipping, by the total norm or by value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from netcl.core.errors import DeviceError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.ops import update

Parameters = Tensor | Iterable[Tensor]


def _gradients(op: str, parameters: Parameters, **bound: Any) -> list[Tensor]:
    for name, value in bound.items():
        if isinstance(value, str) or not value >= 0:
            raise ValueError(message(op, f"{name} must be a number, at least 0", **{name: repr(value)}))
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [p.grad for p in given if p.grad is not None]


def _check_order(op: str, norm_type: Any) -> float:
    if isinstance(norm_type, str) or not float(norm_type) > 0:
        raise ShapeError(message(op, "norm_type must be a positive number or infinity", norm_type=repr(norm_type)))
    return float(norm_type)


def _host_norm(devices: Sequence[Sequence[Tensor]], order: float) -> float:
    """Return the total norm of tensors, given per device; all device norms are enqueued before the first is read."""
    norms = [total.item() for total in [update.norm_of_all(tensors, order)[0] for tensors in devices]]
    if len(norms) == 1:
        return float(norms[0])
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(np.array(norms, np.float64), order))


def clip_factor(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, Tensor | float]:
    """Return the total norm (a tensor) and the factor that limits it to ``max_norm``: a tensor on a single device, else a number."""
    devices = list(update.by_context(gradients).values())
    if len(devices) == 1:
        return update.norm_of_all(gradients, 2.0, max_norm)
    total = _host_norm(devices, 2.0)
    return Tensor.from_host(gradients[0].queue, np.float32(total)), _factor(total, max_norm)


def _factor(total: float, max_norm: float) -> float:
    factor = max_norm / (total + 1e-6)
    return 1.0 if factor > 1 else factor  # a NaN stays one


def clip_grad_norm(parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
    """Scale gradients in place so that their total norm is at most ``max_norm``; returns the norm.

    Waits for the device, because the norm is a Python number. ``norm_type`` is the order: a positive number or ``math.inf``.
    A NaN norm makes all gradients NaN. An infinite norm makes finite elements 0, others NaN. ``error_if_nonfinite`` raises instead.

    >>> w = Tensor.from_host([0.0, 0.0], requires_grad=True)
    >>> w.grad = Tensor.from_host([30.0, 40.0])
    >>> clip_grad_norm([w], max_norm=5.0)
    50.0
    >>> w.grad.to_host().round(4).tolist()
    [3.0, 4.0]
    """
    op = "clip_grad_norm"
    gradients, order = _gradients(op, parameters, max_norm=max_norm), _check_order(op, norm_type)
    if not gradients:
        return 0.0
    total = _host_norm(list(update.by_context(gradients).values()), order)
    if error_if_nonfinite and not math.isfinite(total):
        remedy = "skip this step, or find the first bad op with netcl.autograd.detect_anomaly()"
        raise FloatingPointError(message(op, "the norm of the gradients must be finite", remedy, norm=total))
    factor = _factor(total, max_norm)
    if factor != 1.0:
        update.scale(gradients, factor)
    return total


def clip_grad_norm_device(parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip like :func:`clip_grad_norm`, but without waiting for the device: the norm is returned as a 0-d tensor.

    All gradients must be on one device.
    """
    op = "clip_grad_norm_device"
    gradients, order = _gradients(op, parameters, max_norm=max_norm), _check_order(op, norm_type)
    if not gradients:
        return Tensor.zeros(())
    devices = list(update.by_context(gradients).values())
    if len(devices) > 1:
        places = [tensors[0].device.device_name for tensors in devices]
        raise DeviceError(message(op, "all gradients must be on the same device", "use clip_grad_norm", devices=places))
    total, factor = update.norm_of_all(gradients, order, max_norm)
    update.scale(gradients, factor)
    return total


def clip_grad_value(parameters: Parameters, clip_value: float) -> None:
    """Clamp every element of the gradients to ``-clip_value .. clip_value``, in place.

    >>> w = Tensor.from_host([0.0, 0.0], requires_grad=True)
    >>> w.grad = Tensor.from_host([0.5, -7.0])
    >>> clip_grad_value([w], 1.0)
    >>> w.grad.tolist()
    [0.5, -1.0]
    """
    update.apply(update.CLAMP, [_gradients("clip_grad_value", parameters, clip_value=clip_value)], (float(clip_value),))
