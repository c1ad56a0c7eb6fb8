"""Batch norm with the statistics of the whole batch, over all ranks of a world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.dtype import sum_dtype
from netcl.core.tensor import Tensor
from netcl.distributed.comm import World
from netcl.nn.module import Module
from netcl.nn.norm import BatchNorm2d, _BatchNorm


class _WorldSum(ag.Function):
    """The sum of a tensor over all ranks. Backward sums gradients too: the loss of every rank depends on the tensors of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return Tensor.from_host(x.queue, world.all_reduce(x.to_host()), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Tensor.from_host(gradient.queue, ctx.world.all_reduce(gradient.to_host()), gradient.dtype), None


class SyncBatchNorm(_BatchNorm):
    """Batch norm that uses mean and variance over all ranks of a world in training.

    The variance is the mean of squared distances from the mean. Besides the sample count, forward computes two sums over the world;
    backward also computes two. Ranks may have parts of different sizes. Save models through :func:`without_sync`.
    """

    ranks = (2, 3, 4, 5)
    saved_by = "save netcl.distributed.without_sync(model)"
    world = World(0.0)
    plain: type[_BatchNorm] = BatchNorm2d

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        world = self.world
        if not self.training or world.size == 1:
            return super().forward(x)
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        shape = tuple(-1 if axis == 1 else 1 for axis in range(x.ndim))
        dtype, x = x.dtype, ag.cast(x, sum_dtype(x.dtype))  # sums of halves overflow
        count = float(world.all_reduce(np.float64(x.size // x.shape[1])))
        mean = _WorldSum.apply(ag.sum(x, axis=axes), world) / count
        centred = x - ag.reshape(mean, shape)
        variance = _WorldSum.apply(ag.sum(centred * centred, axis=axes), world) / count
        if self.running_mean is not None and self.running_var is not None:
            momentum = self._count()
            with ag.no_grad():
                unbiased = ag.mul(variance.detach(), count / max(count - 1.0, 1.0))
                for running, new in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
                    running.write(ag.lerp(running, new, momentum))
        result = centred * ag.reshape(ag.rsqrt(variance + self.eps), shape)
        if self.weight is not None:
            result = result * ag.reshape(self.weight, shape)
        return ag.cast(result if self.bias is None else result + ag.reshape(self.bias, shape), dtype)


def convert_sync_batchnorm(module: Module, world: World) -> Module:
    """Replace every batch norm in a model, in place, by a :class:`SyncBatchNorm` with the same tensors.

    Returns the model; a new object only if the model itself is a batch norm.
    """
    return _replaced_norms(module, lambda norm: _same_norm(SyncBatchNorm, norm, world=world, plain=type(norm)))


def without_sync(module: Module) -> Module:
    """Return a copy of a model with ordinary batch norms, which can be saved and loaded without a world."""
    return _replaced_norms(copy.deepcopy(module), lambda norm: _same_norm(norm.plain, norm) if isinstance(norm, SyncBatchNorm) else norm)


def _replaced_norms(module: Module, change: Callable[[_BatchNorm], _BatchNorm]) -> Module:
    if isinstance(module, _BatchNorm):
        return change(module)
    for name, child in list(module.named_children()):
        new = _replaced_norms(child, change)
        if new is not child:
            setattr(module, name, new)
    return module


def _same_norm(kind: type[_BatchNorm], norm: _BatchNorm, **more: Any) -> _BatchNorm:
    """Return a batch norm of another class with the same tensors, so that existing optimizers keep working."""
    settings = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made = kind(*settings, bias=norm.bias is not None).to(norm.queue)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(norm, name) is not None:
            object.__setattr__(made, name, getattr(norm, name))
    made.__dict__.update(training=norm.training, **more)
    if norm.num_batches_tracked is not None:
        made.num_batches_tracked = norm.num_batches_tracked
    return made
