"""Collectives over the tensors of one process, one tensor per device, and buckets of tensors that are reduced and broadcast together.

A *group* holds the copies of one tensor, one per replica of this process. ``DataParallel`` has several replicas in a world of one rank.
``DistributedDataParallel`` has one replica in a world of several ranks. Both use the same buckets. Values go through the host between
devices and ranks; reductions, broadcasts and gathers among tensors of one queue of a process stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from netcl import ops
from netcl.core import dtype as dtypes
from netcl.core.device import require
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.distributed.comm import World, check_op, combine
from netcl.ops import update

Tensors = Sequence[Tensor]

_ON_DEVICE = {"sum": ops.add, "mean": ops.add, "max": ops.maximum, "min": ops.minimum}
#: Bytes of one replica's tensors in a bucket.
BUCKET = 1 << 22
ALONE = World(0.0)


def queues_of(devices: Iterable[Any]) -> list[Any]:
    """Return the queue of each device, given as a selector, a handle or a queue; raises if no device is given."""
    found = []
    for device in devices:
        if not hasattr(device, "finish"):
            device = (device if hasattr(device, "queue") else require(device, strict=True, op="distributed")).queue
        found.append(device)
    if not found:
        raise DeviceError(message("distributed", "at least one device must be given, got none"))
    return found


def checked_tensors(name: str, tensors: Tensors, root: int = 0, alike: bool = True) -> list[Tensor]:
    """Return ``tensors`` as a list. Raises if it is empty, if dtypes or (with ``alike``) shapes differ, or if ``root`` is out of range."""
    given = list(tensors)
    if not given:
        raise ShapeError(message(name, "at least one tensor must be given, got none"))
    for i, t in enumerate(given):
        if not isinstance(t, Tensor):
            raise TypeError(message(name, f"item {i} must be a Tensor", type=type(t).__name__))
        if alike and t.shape != given[0].shape:
            raise ShapeError(message(name, f"tensor {i} must have the shape of tensor 0", first=given[0].shape, other=t.shape))
        if t.dtype != given[0].dtype:
            raise DtypeError(message(name, f"tensor {i} must have the dtype of tensor 0", first=given[0].dtype, other=t.dtype))
    if not 0 <= root < len(given):
        raise ShapeError(message(name, f"root must be an index from 0 to {len(given) - 1}", root=root))
    return given


def _one_queue(given: Tensors) -> bool:
    return all(t.queue is given[0].queue for t in given)


# ---- many groups at once


def bucketed(groups: Iterable[Tensors], limit: int = BUCKET) -> list[list[Tensors]]:
    """Split groups (one tensor per replica each), in order, into buckets of one dtype with about ``limit`` bytes per replica."""
    buckets: list[list[Tensors]] = []
    filled = 0
    for group in groups:
        if not buckets or filled >= limit or buckets[-1][0][0].dtype != group[0].dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(group)
        filled += group[0].nbytes
    return buckets


def wide_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype in which values of ``dtype`` are sent and reduced: float32 for float16 and bfloat16, else the same."""
    return np.dtype(np.float32) if dtype in dtypes.HALVES else dtypes.DTYPES[dtype].host


class Bucket:
    """Groups (one tensor per replica) of one dtype. Their tensors are copied to the host and joined into one flat array per replica."""

    def __init__(self, groups: Sequence[Tensors]):
        self.groups = groups
        self._copies = [[t.to_host_async() for t in group] for group in groups]

    def joined(self, flags: Sequence[bool] = ()) -> list[np.ndarray]:
        """Return the flat array of each replica, with ``flags`` appended; halves are widened to float32."""
        replicas = [[np.asarray(copy.wait()).reshape(-1) for copy in copies] for copies in zip(*self._copies, strict=True)]
        self._copies.clear()
        wide = wide_dtype(self.groups[0][0].dtype)
        return [np.concatenate([*values, np.asarray(flags, wide)], dtype=wide) for values in replicas]

    def reduced(self, world: World, op: str, compress: str | None = None, joined: Sequence[np.ndarray] = ()) -> np.ndarray:
        """Reduce ``joined`` (default: from :meth:`joined`) over the replicas, then over the ranks of ``world``; returns the flat result."""
        local = combine(op, joined or self.joined())
        return local if world.size == 1 else world.all_reduce(local, op, compress=compress, check=False)


def write_flat(groups: Iterable[Tensors], values: np.ndarray) -> None:
    """Overwrite the tensors of groups, on every replica, with consecutive values of a flat array."""
    start = 0
    for group in groups:
        for t in group:
            t.from_host(values[start : start + t.size].reshape(t.shape))
        start += group[0].size


def all_reduce_each(groups: Iterable[Tensors], op: str = "sum", count: int | None = None) -> None:
    """Overwrite the first ``count`` tensors (default: all) of every group (one per replica) with the reduction ``op`` of all."""
    given = [group for group in groups if len(group) > 1]
    for group in given:
        if _one_queue(group):
            update.copy(group[:count], [_reduced_on_device(group, op)] * len(group[:count]))
    buckets = map(Bucket, bucketed(group for group in given if not _one_queue(group)))
    bucket = next(buckets, None)
    while bucket is not None:
        coming = next(buckets, None)  # its copies are under way while this one is reduced on the host
        write_flat([group[:count] for group in bucket.groups], bucket.reduced(ALONE, op))
        bucket = coming


def broadcast_each(groups: Iterable[Tensors], world: World = ALONE) -> None:
    """Overwrite the tensors of every group, on all ranks of ``world``, with the first tensor of that group on rank 0."""
    given = list(groups)
    for firsts in bucketed([group[0]] for group in given) if world.size > 1 else ():
        write_flat(firsts, world.broadcast(Bucket(firsts).joined()[0], check=False))
    far = [[first, *(t for t in others if t.queue is not first.queue)] for first, *others in given]
    for bucket in bucketed(group for group in far if len(group) > 1):
        write_flat([group[1:] for group in bucket], Bucket([group[:1] for group in bucket]).joined()[0])
    near: dict[tuple[Any, str], list[tuple[Tensor, Tensor]]] = {}
    for first, *others in given:
        near.setdefault((id(first.queue), first.dtype), []).extend((t, first) for t in others if t.queue is first.queue)
    for pairs in near.values():
        if pairs:
            update.copy([t for t, _ in pairs], [first for _, first in pairs])


def _reduced_on_device(given: Tensors, op: str) -> Tensor:
    total, *others = [t.detach().to("float32") if t.dtype in dtypes.HALVES else t for t in given]
    for t in others:
        total = _ON_DEVICE[op](total, t)
    return ops.mul(total, 1.0 / len(given)) if op == "mean" else total


# ---- one group


def all_reduce(tensors: Tensors, op: str = "sum") -> list[Tensor]:
    """Overwrite every tensor with the elementwise ``sum``, ``mean``, ``max`` or ``min`` of all tensors, and return the tensors.

    >>> a, b = Tensor.from_host([1.0, 2.0]), Tensor.from_host([10.0, 20.0])
    >>> [t.tolist() for t in all_reduce([a, b])]
    [[11.0, 22.0], [11.0, 22.0]]
    """
    given = checked_tensors("all_reduce", tensors)
    check_op("all_reduce", op, given[0].dtype)
    all_reduce_each([given], op)
    return given


all_reduce_p2p = all_reduce  # through the host, exchanging pieces between devices would move more bytes


def reduce(tensors: Tensors, root: int = 0, op: str = "sum") -> Tensor:
    """Overwrite the tensor at ``root`` with the reduction of all and return it."""
    given = checked_tensors("reduce", tensors, root)
    check_op("reduce", op, given[0].dtype)
    if _one_queue(given):
        update.copy([given[root]], [_reduced_on_device(given, op)])
        return given[root]
    return given[root].from_host(Bucket([given]).reduced(ALONE, op).reshape(given[root].shape))


def broadcast(tensors: Tensors, root: int = 0) -> list[Tensor]:
    """Overwrite every tensor with the one at ``root`` and return all of them."""
    given = checked_tensors("broadcast", tensors, root)
    broadcast_each([[given[root], *given[:root], *given[root + 1 :]]])
    return given


def scatter(tensor: Tensor | np.ndarray, devices: Sequence[Any], weights: Sequence[float] | None = None) -> list[Tensor]:
    """Split a tensor along its first axis, evenly or in proportion to ``weights``, into one tensor per device."""
    where = queues_of(devices)
    values = tensor.to_host() if isinstance(tensor, Tensor) else np.asarray(tensor)
    if not values.ndim:
        raise ShapeError(message("scatter", "tensor must have at least 1 dimension, got 0"))
    dtype = tensor.dtype if isinstance(tensor, Tensor) else None
    return [Tensor.from_host(queue, part, dtype) for queue, part in zip(where, split_rows(values, len(where), weights), strict=True)]


def split_rows(values: Any, count: int, weights: Sequence[float] | None = None) -> list[Any]:
    """Return ``values`` cut into ``count`` consecutive parts in proportion to ``weights``, rounded so that no row is lost."""
    shares = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (count,) or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        what = "weights must be one number >= 0 per device, with a finite sum above 0"
        raise ShapeError(message("scatter", what, weights=weights, devices=count))
    ends = np.rint(np.cumsum(shares) / shares.sum() * len(values)).astype(int).tolist()
    return [values[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _gathered(name: str, given: list[Tensor], axis: int, roots: Tensors) -> list[Tensor]:
    """Return the tensors joined along ``axis``, once per root, on that root's device."""
    if _one_queue(given):
        joined = ops.cat(given, axis)
        return [joined, *(duplicate(joined) for _ in roots[1:])]
    if not -given[0].ndim <= axis < given[0].ndim or len({(*t.shape[:axis], *t.shape[axis:][1:], t.ndim) for t in given}) > 1:
        what = "axis must be an axis of all tensors, and their shapes must be equal except along it"
        raise ShapeError(message(name, what, shapes=[t.shape for t in given], axis=axis))
    copies = [t.to_host_async() for t in given]
    values = np.concatenate([copy.wait() for copy in copies], axis)
    return [Tensor.from_host(t.queue, values, t.dtype) for t in roots]


def gather(tensors: Tensors, root: int = 0, axis: int = 0) -> Tensor:
    """Return all tensors joined along ``axis`` on the device of the tensor at ``root``."""
    given = checked_tensors("gather", tensors, root, alike=False)
    return _gathered("gather", given, axis, [given[root]])[0]


def all_gather(tensors: Tensors, axis: int = 0) -> list[Tensor]:
    """Return one result per tensor: all tensors joined along ``axis``, on the device of that tensor."""
    given = checked_tensors("all_gather", tensors, alike=False)
    return _gathered("all_gather", given, axis, given)
