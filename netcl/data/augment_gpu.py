"""Transfers of batches to the device, and the augmentations that run there.

This is the only module of ``netcl.data`` that uses tensors, ops and the seed of ``netcl.manual_seed``. Augmentations draw a few numbers per
image on the host and change pixels on the device. With the same generator, results equal those of :mod:`netcl.data.augment` up to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from netcl import ops
from netcl.core.memory import is_integrated_gpu
from netcl.core.tensor import Tensor
from netcl.data import augment
from netcl.ops.random import host_rng as host_rng
from netcl.ops.random import manual_seed as manual_seed
from netcl.runtime.scheduler import Stream

__all__ = [
    "ColorJitter", "CutMix", "Cutout", "Feed", "Mixup", "Normalize", "RandomAffine", "RandomCrop", "RandomErasing",
    "RandomHorizontalFlip", "RandomRotation", "RandomVerticalFlip",
]  # fmt: skip


class Feed:
    """Copies batches to a device while the device computes on earlier batches.

    On a device with its own memory, copies run in a separate stream and overlap kernels; ``pinned`` uses page-locked memory.
    If host and device share memory, a copy is finished when :meth:`send` returns.
    """

    def __init__(self, device_queue: Any, pinned: bool = False):
        selected: Any = Tensor.empty((0,), device=device_queue) if isinstance(device_queue, str | int) else device_queue
        self.queue = getattr(selected, "queue", selected)
        shared = getattr(self.queue, "context", None) is None or is_integrated_gpu(self.queue)
        self.pinned = True if pinned and not shared else None
        self._copies = None if shared else Stream(self.queue)

    def send(self, arrays: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
        """Start copying arrays to tensors. The arrays may be changed when this returns; the tensors may be used after :meth:`ready`."""
        queue = self.queue if self._copies is None else self._copies.queue
        tensors = tuple(Tensor.from_host(queue, array, use_pinned=self.pinned) for array in arrays)
        queue.flush()
        return tensors

    def ready(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make the device's queue wait for all copies so far; returns tensors for this queue. Call it before the next :meth:`send`."""
        if self._copies is None:
            return tensors
        kernels = Stream.of(self.queue)
        return tuple(kernels.use(tensor) for tensor in tensors)


def _like(x: Any, array: np.ndarray) -> Any:
    """Return an array as a tensor on the device of ``x``."""
    return Tensor.from_host(x.queue, array)


def _warped(x: Any, matrix: np.ndarray, size: tuple[int, int], mode: str) -> Any:
    """Sample images of ``size`` from ``x`` by ``grid_sample``; ``matrix`` (N, 2, 3) maps pixels of the result to pixels of ``x``."""
    height, width = x.shape[2:]
    scale = np.array([2 / width, 2 / height], np.float32)
    matrix = matrix * scale[:, None]
    matrix[:, :, 2] += scale / 2 - 1
    row, column = np.meshgrid(np.arange(size[0]), np.arange(size[1]), indexing="ij")
    pixels = np.stack([column, row, np.ones_like(row)], -1).reshape(1, -1, 3).astype(np.float32)
    points = ops.matmul(_like(x, pixels), _like(x, np.ascontiguousarray(matrix.transpose(0, 2, 1))))  # type: ignore[operator]
    return ops.grid_sample(x, ops.reshape(points, (x.shape[0], *size, 2)), mode=mode)


def _boxes(x: Any, box: tuple[np.ndarray, ...]) -> Any:
    """Return :func:`netcl.data.augment.inside` of ``box`` as a tensor on the device of ``x``."""
    rows, columns = (_like(x, np.arange(n, dtype=np.float32).reshape(shape)) for n, shape in
                     ((x.shape[2], (1, 1, -1, 1)), (x.shape[3], (1, 1, 1, -1))))  # fmt: skip
    top, bottom, left, right = (_like(x, values.astype(np.float32)) for values in box)
    down = ops.logical_and(ops.ge(rows, top), ops.lt(rows, bottom))
    return ops.logical_and(down, ops.logical_and(ops.ge(columns, left), ops.lt(columns, right)))


class _OnDevice:  # documented by their NumPy counterparts
    on_device = True


class Normalize(_OnDevice, augment.Normalize):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return ops.div(ops.sub(x, _like(x, self.mean)), _like(x, self.std))


class RandomHorizontalFlip(_OnDevice, augment.RandomHorizontalFlip):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return ops.where(_like(x, drawn[0].reshape(-1, 1, 1, 1)), ops.flip(x, self.axis), x)


class RandomVerticalFlip(RandomHorizontalFlip):
    axis = -2


class RandomCrop(_OnDevice, augment.RandomCrop):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        top, left = drawn
        matrix = np.tile(np.eye(2, 3, dtype=np.float32), (len(top), 1, 1))
        matrix[:, :, 2] = np.stack([left, top], -1)
        return _warped(x, matrix, self.size, "nearest")


class RandomAffine(_OnDevice, augment.RandomAffine):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return _warped(x, drawn[0], x.shape[2:], "bilinear")


class RandomRotation(_OnDevice, augment.RandomRotation):
    apply = RandomAffine.apply


class ColorJitter(_OnDevice, augment.ColorJitter):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        brightness, contrast, saturation = (_like(x, factor) for factor in drawn)
        x = ops.mul(x, brightness)
        if self.contrast:
            x = ops.lerp(ops.mean(x, axis=(1, 2, 3), keepdims=True), x, contrast)
        if self.saturation and x.shape[1] == 3:
            x = ops.lerp(ops.mean(x, axis=1, keepdims=True), x, saturation)
        return x


class RandomErasing(_OnDevice, augment.RandomErasing):
    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return ops.where(_boxes(x, drawn), self.value, x)


class Cutout(_OnDevice, augment.Cutout):
    apply = RandomErasing.apply


class Mixup(_OnDevice, augment.Mixup):
    def mixed(self, x: Any, partner: np.ndarray, share: np.ndarray) -> Any:
        weight = _like(x, share.reshape(-1, *[1] * (len(x.shape) - 1)))
        return ops.lerp(x, ops.index_select(x, 0, _like(x, partner)), weight)

    def one_hot(self, y: Any) -> Any:
        return ops.one_hot(y, self.classes, dtype="float32")


class CutMix(Mixup):
    draw = augment.CutMix.draw

    def apply(self, x: Any, *drawn: np.ndarray) -> Any:
        return ops.where(_boxes(x, drawn[2:]), ops.index_select(x, 0, _like(x, drawn[0])), x)
