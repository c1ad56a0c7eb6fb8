"""Collective calls over the devices of one process: the NumPy backend beside each device, and several tensors of one device."""

from __future__ import annotations

import numpy as np
import pytest

from netcl import distributed
from netcl.core.device import manager
from netcl.core.tensor import Tensor
from netcl.distributed import collectives


@pytest.fixture(params=["beside NumPy", "on one device"])
def queues(request, device) -> list:
    other = manager.default("cpu").queue if request.param == "beside NumPy" else device.queue
    return [device.queue, other, device.queue]


def tensors(queues, shape=(5, 3), dtype="float32") -> list[Tensor]:
    return [Tensor.from_host(q, np.arange(15).reshape(shape) * (i + 1), dtype) for i, q in enumerate(queues)]


def stack(queues) -> np.ndarray:
    return np.stack([t.to_host() for t in tensors(queues)])


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("call", [distributed.all_reduce, distributed.all_reduce_p2p])
def test_all_reduce_writes_into_all(queues, op, call):
    given = tensors(queues)
    found = call(given, op)
    expected = getattr(np, op)(stack(queues), axis=0)
    for t, original in zip(found, given, strict=True):
        assert t is original
        np.testing.assert_allclose(t.to_host(), expected, rtol=1e-6)


def test_reduce_broadcast_gather(queues):
    given = tensors(queues)
    assert distributed.reduce(given, root=1) is given[1]
    np.testing.assert_array_equal(given[1].to_host(), stack(queues).sum(0))
    distributed.broadcast(given, root=2)
    assert all((t.to_host() == stack(queues)[2]).all() for t in given)
    given = tensors(queues)
    joined = distributed.gather(given, root=1)
    assert joined.queue is given[1].queue
    np.testing.assert_array_equal(joined.to_host(), np.concatenate(list(stack(queues))))
    for t, own in zip(distributed.all_gather(given, axis=1), given, strict=True):
        assert t.queue is own.queue
        np.testing.assert_array_equal(t.to_host(), np.concatenate(list(stack(queues)), axis=1))


def test_scatter_loses_no_row(queues):
    x = np.arange(22, dtype=np.float32).reshape(11, 2)
    parts = distributed.scatter(x, queues)
    np.testing.assert_array_equal(np.concatenate([t.to_host() for t in parts]), x)
    assert [len(t) for t in distributed.scatter(Tensor.from_host(queues[0], x), queues, [1, 0, 3])] == [3, 0, 8]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64"])
def test_other_dtypes(queues, dtype):
    for t in distributed.all_reduce(tensors(queues, dtype=dtype)):
        assert t.dtype == dtype
        np.testing.assert_array_equal(t.to_host(), np.arange(15).reshape(5, 3) * 6)


@pytest.mark.parametrize("call", [distributed.all_reduce, distributed.all_reduce_p2p])
def test_means_of_halves_do_not_overflow_and_ints_have_none(queues, call):
    large = [Tensor.from_host(q, np.full(4, 6e4), "float16") for q in queues]
    assert all((t.to_host() == np.float16(6e4)).all() for t in call(large, "mean"))
    with pytest.raises(TypeError, match="op='mean' requires a floating-point dtype; dtype=int64"):
        call(tensors(queues, dtype="int64"), "mean")


def test_many_tensors_are_reduced_in_buckets_of_one_dtype(queues):
    kinds = ["float32", "float32", "float16", "int64", "float32"]
    groups = [tensors(queues, dtype=kind) for kind in kinds]
    assert [len(bucket) for bucket in collectives.bucketed(groups)] == [2, 1, 1, 1]
    assert [len(bucket) for bucket in collectives.bucketed(groups, limit=1)] == [1] * 5
    collectives.all_reduce_each(groups)
    for group, kind in zip(groups, kinds, strict=True):
        for t in group:
            assert t.dtype == kind
            np.testing.assert_array_equal(t.to_host(), np.arange(15).reshape(5, 3) * 6)


def test_sync_grads(queues):
    replicas = distributed.replicate_params([Tensor.from_host([1.0, 2.0], requires_grad=True), Tensor.from_host([3.0])], queues)
    distributed.sync_grads(replicas)  # no gradients at all: nothing to do
    for i, params in enumerate(replicas):
        params[0].grad = Tensor.from_host(params[0].queue, np.full(2, i + 1.0, np.float32))
    distributed.sync_grads(replicas)
    assert [params[0].grad.tolist() for params in replicas] == [[2.0, 2.0]] * 3
    assert [params[1].grad for params in replicas] == [None] * 3
    for i, params in enumerate(replicas):
        params[0].grad = Tensor.from_host(params[0].queue, np.full(2, i + 1.0, np.float32))
    distributed.sync_grads(replicas, weights=[1, 0, 1])
    assert [params[0].grad.tolist() for params in replicas] == [[2.0, 2.0]] * 3
    replicas[1][0].grad = None
    with pytest.raises(ValueError, match=r"\[sync_grads\] parameter 0 must have a gradient on all replicas or on none; without=\[1\]"):
        distributed.sync_grads(replicas)


def test_refusals(queues):
    a, b, c = tensors(queues)
    with pytest.raises(ValueError, match=r"\[all_reduce\] tensor 1 must have the shape of tensor 0; first=\(5, 3\), other=\(3,\)"):
        distributed.all_reduce([a, Tensor.from_host(b.queue, np.zeros(3, np.float32))])
    with pytest.raises(TypeError, match=r"\[broadcast\] tensor 1 must have the dtype"):
        distributed.broadcast([a, Tensor.from_host(b.queue, np.zeros((5, 3), np.int64))])
    with pytest.raises(ValueError, match=r"\[gather\] root must be an index from 0 to 2; root=3"):
        distributed.gather([a, b, c], root=3)
    for call, axis, other in ((distributed.gather, 0, (5, 4)), (distributed.all_gather, 1, (4, 3)), (distributed.gather, 2, (5, 3))):
        with pytest.raises(ValueError, match=r"\[\w+\] .*axis"):
            call([a, Tensor.from_host(b.queue, np.zeros(other, np.float32))], axis=axis)
    with pytest.raises(ValueError, match=r"unknown reduction; op='and'"):
        distributed.reduce([a, b], op="and")
