"""Streams: order where memory is shared, and memory that is not handed out while a stream still reads it."""

from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from netcl import ops
from netcl.core import recording
from netcl.core.device import get_active_device, manager
from netcl.core.errors import DeviceError
from netcl.core.memory import memory_stats
from netcl.core.tensor import Tensor
from netcl.runtime.scheduler import Stream

N = 192


def test_work_of_one_stream_is_seen_by_another(device):
    main, one, two = Stream.of(device.queue), Stream(), Stream(device)
    x = Tensor.full((N, N), 1.0)
    for _ in range(8):
        product = x @ x  # takes a while: whoever does not wait reads what was there before
        with one:
            assert get_active_device() is one.handle
            a, b = one.use(product) + 1.0, one.use(product) * 3.0
        with two:
            c = two.use(a) * two.use(b)
        x = main.use(c) * (1 / (3 * N * (N + 1.0)))
        np.testing.assert_allclose(x.to_host(), 1.0, rtol=1e-5)
    assert get_active_device() is device


def test_memory_is_not_handed_out_while_a_stream_reads_it(cl_device):
    stream = Stream()
    pool = x = None
    for round_ in range(6):
        x = Tensor.full((N, N), float(round_ + 1))
        pool = x.pool_handle.pool
        with stream:
            y = stream.use(x)
            for _ in range(3):
                z = y @ y  # the last reader of x's memory may still be waiting to start
        del x, y
        other = [Tensor.full((N, N), -1e9) for _ in range(3)]  # one of them has x's memory again
        np.testing.assert_allclose(z.to_host(), N * (round_ + 1.0) ** 2, rtol=1e-5)
        del other
    assert pool.stats.hits > 0


def test_memory_of_a_stream_goes_with_it(cl_device):
    def allocated() -> int:
        gc.collect()
        return memory_stats()["bytes_allocated"]

    before = allocated()
    for _ in range(3):
        with Stream(cl_device) as stream:
            assert Tensor.ones(1 << 18, queue=stream.queue).to_host()[-1] == 1.0
        del stream
    assert allocated() <= before


def test_waiting_both_ways_ends(cl_device):
    """Each waits for what the other has been given, never for what it will be given: there is no circle."""
    a, b = Stream(), Stream()
    with a:
        x = Tensor.ones((N, N))
    with b:
        y = Tensor.ones((N, N))
    for _ in range(20):
        a.wait_for(b)
        b.wait_for(a)
        with a:
            x = x @ x * (1.0 / N)
        with b:
            y = y @ y * (1.0 / N)
    done = threading.Event()
    threading.Thread(target=lambda: (a.synchronize(), b.finish(), done.set()), daemon=True).start()
    assert done.wait(60)
    event = a.record()
    assert b.wait_for(event).wait_for(x) is b and a.wait_for(cl_device.queue) is a
    a.synchronize()
    assert x.to_host()[0, 0] == pytest.approx(y.to_host()[0, 0], rel=1e-4)


def test_kernels_over_tensors_of_two_streams_wait_both_ways(cl_device):
    """Before it begins for what it reads, and what it reads is not changed before it has ended."""
    stream, queue, n = Stream(cl_device), cl_device.queue, 512
    mine, mean = Tensor.ones((n, n), queue=stream.queue), [Tensor.full((n, n), 1 / n, queue=q) for q in (queue, stream.queue)]
    theirs = Tensor.ones((n, n), queue=queue)
    for _ in range(6):
        theirs, mine = ops.matmul(theirs, mean[0]), ops.matmul(mine, mean[1])  # ones, after a while
    late = ops.matmul(Tensor.ones((n, n), queue=stream.queue), theirs)
    read = Tensor.full((n, n), 2.0, queue=queue)
    kept = ops.matmul(mine, read)
    read.fill_(7.0)
    np.testing.assert_allclose(late.to_host(), n, rtol=1e-4)
    np.testing.assert_allclose(kept.to_host(), 2 * n, rtol=1e-4)


def test_numpy_streams_do_nothing():
    handle = manager.default("cpu")
    stream, other = Stream("cpu"), Stream.of(handle.queue)
    x = Tensor.ones(3, queue=handle.queue)
    assert stream.queue is handle.queue and stream.use(x) is x
    assert stream.wait_for(other).wait_for(x) is stream and stream.record() is None
    stream.synchronize()
    with stream:
        assert (Tensor.ones(3) + stream.use(x)).tolist() == [2.0, 2.0, 2.0]


def test_devices_are_named_in_errors(cl_device):
    with pytest.raises(DeviceError, match=r"\[Stream\] no such device"):
        Stream("no such thing")
    x = Tensor.ones(3, queue=manager.default("cpu").queue)
    assert Stream().use(x) is x
    with pytest.raises(DeviceError, match=r"\[Stream.wait_for\] the argument must be a stream, .*; given=int"):
        Stream().wait_for(3)
    with pytest.raises(TypeError, match=r"\[Stream.use\] the argument must be a tensor; given=list"):
        Stream().use([1.0])
    with pytest.raises(DeviceError, match=r"\[add\] .*use one in the other's stream"):
        Tensor.ones(3, queue=cl_device.queue) + Stream().use(Tensor.ones(3, queue=cl_device.queue))


def test_a_borrowed_tensor_may_be_freed_while_a_step_is_recorded(cl_device):
    """Garbage collection frees one at any time; this is no work of the step, and the owner's queue must still wait for the stream."""
    stream, failed = Stream(), []
    borrowed = [stream.use(Tensor.full((N, N), 1.0))]
    before, sys.unraisablehook = sys.unraisablehook, failed.append
    try:
        with recording.replaced_by(SimpleNamespace()):  # has nothing that could be called
            borrowed.clear()
    finally:
        sys.unraisablehook = before
    assert not failed
