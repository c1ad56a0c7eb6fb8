"""Collective calls over the devices of one process, one tensor per device, whatever the devices are.

Values go through the host: every copy to it is started before the first is waited for, and copies back are not waited for at all.
Tensors of one context stay on their device. Results are written into the given tensors where torch does so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from netcl import ops
from netcl.core import dtype as dtypes
from netcl.core.device import require
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.tensor import Tensor
from netcl.distributed.comm import check_op, combine
from netcl.ops import update

Tensors = Sequence[Tensor]

_ON_DEVICE = {"sum": ops.add, "mean": ops.add, "max": ops.maximum, "min": ops.minimum}


def queues_of(devices: Iterable[Any]) -> list[Any]:
    """The queues of selectors, handles or queues."""
    found = []
    for device in devices:
        if not hasattr(device, "finish"):
            device = (device if hasattr(device, "queue") else require(device, strict=True, op="distributed")).queue
        found.append(device)
    if not found:
        raise DeviceError(message("distributed", "there are no devices", "name at least one"))
    return found


def _checked_tensors(name: str, tensors: Tensors, alike: bool = True) -> list[Tensor]:
    given = list(tensors)
    if not given:
        raise ShapeError(message(name, "there are no tensors"))
    for i, t in enumerate(given):
        if not isinstance(t, Tensor):
            raise TypeError(message(name, f"item {i} is not a Tensor", type=type(t).__name__))
        if alike and t.shape != given[0].shape:
            raise ShapeError(message(name, f"tensor {i} has another shape than tensor 0", first=given[0].shape, other=t.shape))
        if t.dtype != given[0].dtype:
            raise DtypeError(message(name, f"tensor {i} has another dtype than tensor 0", first=given[0].dtype, other=t.dtype))
    return given


def _check_root(name: str, given: Tensors, root: int) -> None:
    if not 0 <= root < len(given):
        raise ShapeError(message(name, "there is no such tensor", root=root, tensors=len(given)))


def _one_queue(given: Tensors) -> bool:
    return all(t.queue is given[0].queue for t in given)


def reduced(given: Sequence[Tensor], op: str, copies: Sequence[Any] = ()) -> np.ndarray:
    """The reduction over all tensors, on the host, in the dtype sums are made in; ``copies`` are theirs, if they are under way already."""
    under_way = copies or [t.to_host_async() for t in given]
    wide = np.dtype(np.float32) if given[0].dtype in dtypes.HALVES else dtypes.DTYPES[given[0].dtype].host
    return combine(op, [copy.wait().astype(wide, copy=False) for copy in under_way])


def _reduced_on_device(given: Sequence[Tensor], op: str) -> Tensor:
    total, *others = [t.detach().to("float32") if t.dtype in dtypes.HALVES else t for t in given]
    for t in others:
        total = _ON_DEVICE[op](total, t)
    return ops.mul(total, 1.0 / len(given)) if op == "mean" else total


def all_reduce(tensors: Tensors, op: str = "sum") -> list[Tensor]:
    """The sum, mean, maximum or minimum of the tensors, written into every one of them.

    >>> a, b = Tensor.from_host([1.0, 2.0]), Tensor.from_host([10.0, 20.0])
    >>> [t.tolist() for t in all_reduce([a, b])]
    [[11.0, 22.0], [11.0, 22.0]]
    """
    given = _checked_tensors("all_reduce", tensors)
    check_op("all_reduce", op, given[0].dtype)
    if len(given) == 1:
        return given
    if _one_queue(given):
        total = _reduced_on_device(given, op)
        update.copy(given, [total] * len(given))
        return given
    values = reduced(given, op)
    return [t.from_host(values) for t in given]


#: Bytes of tensors whose copies to the host are started together, while those before are summed there.
BUCKET = 1 << 22


def all_reduce_each(rows: Iterable[Tensors], op: str = "sum") -> None:
    """:func:`all_reduce` of many rows of tensors; while one bucket of them is summed on the host, the next is on its way there."""
    waiting: list[tuple[list[Tensor], list[Any]]] = []
    for bucket in _buckets(_checked_tensors("all_reduce", row) for row in rows):
        coming = [(row, [] if len(row) == 1 or _one_queue(row) else [t.to_host_async() for t in row]) for row in bucket]
        _finish_rows(waiting, op)
        waiting = coming
    _finish_rows(waiting, op)


def _buckets(rows: Iterable[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    bucket: list[list[Tensor]] = []
    for row in rows:
        bucket.append(row)
        if sum(first.nbytes for first, *_ in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _finish_rows(rows: Sequence[tuple[list[Tensor], list[Any]]], op: str) -> None:
    for row, copies in rows:
        if not copies:
            all_reduce(row, op)
            continue
        values = reduced(row, op, copies)
        for t in row:
            t.from_host(values)


def all_reduce_p2p(tensors: Tensors, op: str = "sum") -> list[Tensor]:
    """:func:`all_reduce` in pieces, each reduced by one device: no device receives more than it needs, and all compute.

    Device i is sent its piece by all others, reduces it, and sends the result to all: the ring's amount of bytes per device.
    """
    given = _checked_tensors("all_reduce_p2p", tensors)
    check_op("all_reduce_p2p", op, given[0].dtype)
    if len(given) == 1 or _one_queue(given) or not given[0].size:
        return all_reduce(given, op)
    cuts = np.array_split(np.arange(given[0].size), len(given))
    pieces = [(int(cut[0]), int(cut[0]) + len(cut)) for cut in cuts if len(cut)]
    copies = [[ops.narrow(ops.reshape(t, (-1,)), 0, a, b - a).to_host_async() for a, b in pieces] for t in given]
    results = []
    for i in range(len(pieces)):
        owner = given[i].queue
        arrived = [Tensor.from_host(owner, row[i].wait(), given[0].dtype) for row in copies]
        results.append(_reduced_on_device(arrived, op).to_host_async())
    values = np.concatenate([copy.wait() for copy in results]).reshape(given[0].shape)
    return [t.from_host(values) for t in given]


def reduce(tensors: Tensors, root: int = 0, op: str = "sum") -> Tensor:
    """The reduction of the tensors, written into the one at ``root``, which is returned."""
    given = _checked_tensors("reduce", tensors)
    check_op("reduce", op, given[0].dtype)
    _check_root("reduce", given, root)
    if _one_queue(given):
        update.copy([given[root]], [_reduced_on_device(given, op)])
        return given[root]
    return given[root].from_host(reduced(given, op))


def broadcast(tensors: Tensors, root: int = 0) -> list[Tensor]:
    """Overwrite every tensor with the one at ``root``."""
    given = _checked_tensors("broadcast", tensors)
    _check_root("broadcast", given, root)
    others = [t for i, t in enumerate(given) if i != root]
    near = [t for t in others if t.queue is given[root].queue]
    if near:
        update.copy(near, [given[root]] * len(near))
    far = [t for t in others if t.queue is not given[root].queue]
    values = given[root].to_host() if far else None
    for t in far:
        t.from_host(values)
    return given


def scatter(tensor: Tensor | np.ndarray, devices: Sequence[Any], weights: Sequence[float] | None = None) -> list[Tensor]:
    """Rows of one tensor, spread over devices: as equal as they can be, or in proportion to ``weights``."""
    where = queues_of(devices)
    values = tensor.to_host() if isinstance(tensor, Tensor) else np.asarray(tensor)
    if not values.ndim:
        raise ShapeError(message("scatter", "a 0-d tensor has no rows"))
    dtype = tensor.dtype if isinstance(tensor, Tensor) else None
    return [Tensor.from_host(queue, part, dtype) for queue, part in zip(where, split_rows(values, len(where), weights), strict=True)]


def split_rows(values: Any, count: int, weights: Sequence[float] | None = None) -> list[Any]:
    """Rows cut into ``count`` parts of one kind each, in order; every part's size is its share, rounded so that none is lost."""
    shares = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (count,) or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        raise ShapeError(message("scatter", "one weight per device is needed, none negative", weights=weights, devices=count))
    ends = np.rint(np.cumsum(shares) / shares.sum() * len(values)).astype(int).tolist()
    return [values[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _joined_on_host(name: str, given: Tensors, axis: int) -> np.ndarray:
    """All tensors joined along an axis, on the host."""
    if not -given[0].ndim <= axis < given[0].ndim or len({(*t.shape[:axis], *t.shape[axis:][1:], t.ndim) for t in given}) > 1:
        raise ShapeError(message(name, "shapes may differ only along the axis", shapes=[t.shape for t in given], axis=axis))
    copies = [t.to_host_async() for t in given]
    return np.concatenate([copy.wait() for copy in copies], axis)


def gather(tensors: Tensors, root: int = 0, axis: int = 0) -> Tensor:
    """All tensors joined along ``axis`` on the device of the one at ``root``."""
    given = _checked_tensors("gather", tensors, alike=False)
    _check_root("gather", given, root)
    if _one_queue(given):
        return ops.cat(given, axis)
    return Tensor.from_host(given[root].queue, _joined_on_host("gather", given, axis), given[root].dtype)


def all_gather(tensors: Tensors, axis: int = 0) -> list[Tensor]:
    """All tensors joined along ``axis``, on the device of each."""
    given = _checked_tensors("all_gather", tensors, alike=False)
    if _one_queue(given):
        joined = ops.cat(given, axis)
        return [joined, *(joined._copy() for _ in given[1:])]
    values = _joined_on_host("all_gather", given, axis)
    return [Tensor.from_host(t.queue, values, t.dtype) for t in given]
