"""Staging of copies to a device: page-locked memory is used where it is asked for, released by ``wait`` and capped."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.core import memory
from netcl.core.tensor import Tensor

VALUES = np.arange(1000, dtype=np.float32)  # 4000 bytes, a bucket of 4096


class Copying:
    """The event of a copy that has not ended."""

    command_execution_status = 1


@pytest.fixture
def pool(cl_device, monkeypatch):
    """A pinned pool of its own behind the device's queue."""
    fresh = memory.PinnedBufferPool(cl_device.queue)
    monkeypatch.setattr(memory, "get_pinned_pool", lambda queue: fresh)
    return fresh


@pytest.mark.parametrize("async_copy", [True, False, None])
def test_use_pinned_goes_through_the_pinned_pool(cl_device, pool, async_copy):
    made = Tensor.from_host(cl_device.queue, VALUES, use_pinned=True, async_copy=async_copy)
    assert (pool.stats.misses, pool.stats.bytes_allocated) == (1, 4096)
    made.wait()
    made.from_host(-VALUES, use_pinned=True, async_copy=async_copy)
    assert (pool.stats.hits, pool.stats.misses) == (1, 1)
    np.testing.assert_array_equal(made.wait().to_host(), -VALUES)
    assert pool.stats.bytes_cached == 4096


def test_pinned_memory_is_not_used_where_it_is_refused(cl_device, pool):
    made = Tensor.from_host(cl_device.queue, VALUES, use_pinned=False)
    np.testing.assert_array_equal(made.to_host(), VALUES)
    assert pool.stats.misses == 0 and made.pending_release is None


def test_pending_release_holds_the_staging_until_wait(cl_device, pool):
    made = Tensor.from_host(cl_device.queue, VALUES, use_pinned=True, async_copy=True)
    assert made.pending_event is not None and pool.stats.bytes_cached == 0
    release = made.pending_release
    made.wait()
    assert (made.pending_event, made.pending_release, pool.stats.bytes_cached) == (None, None, 4096)
    release()
    assert pool.stats.bytes_cached == 4096


def test_a_blocking_copy_leaves_nothing_pending(cl_device, pool):
    made = Tensor.from_host(cl_device.queue, VALUES, use_pinned=True, async_copy=False)
    assert (made.pending_event, made.pending_release, pool.stats.bytes_cached) == (None, None, 4096)


def test_staging_of_tensors_nobody_waits_for_is_leased_again(cl_device, pool):
    kept = []
    for _ in range(4):
        kept.append(Tensor.from_host(cl_device.queue, VALUES, use_pinned=True, async_copy=True))
        cl_device.queue.finish()
    assert (pool.stats.misses, pool.stats.hits) == (1, 3)
    assert all(np.array_equal(t.to_host(), VALUES) for t in kept)


def test_staging_is_not_leased_while_its_copy_runs(pool):
    event, lease = Copying(), pool.allocate(100)
    mapped = lease.buffer
    release = pool.release_after(lease, event)
    assert pool.allocate(100).buffer is not mapped
    release()  # before the copy has ended: free, but not yet for anyone
    assert pool.allocate(100).buffer is not mapped
    event.command_execution_status = 0
    assert any(pool.allocate(100).buffer is mapped for _ in range(3))


def test_free_pinned_memory_stays_below_the_cap(cl_device):
    pool = memory.PinnedBufferPool(cl_device.queue, max_cached_bytes=5 * 1024)
    leases = [pool.allocate(n) for n in (1024, 2048, 4096)]
    for lease in leases:
        lease.release()
    assert (pool.stats.bytes_cached, pool.stats.bytes_allocated) == (4096, 4096)
    assert pool.allocate(4096).buffer is not None and pool.stats.hits == 1


def test_the_cap_is_one_gigabyte_or_what_the_variable_says(cl_device, monkeypatch):
    monkeypatch.setenv("NETCL_MAX_CACHED_GB", "4")
    assert memory.PinnedBufferPool(cl_device.queue).max_cached_bytes == 1 << 30
    monkeypatch.setenv("NETCL_MAX_CACHED_GB", "0.5")
    assert memory.PinnedBufferPool(cl_device.queue).max_cached_bytes == 1 << 29


def test_empty_cache_frees_pinned_memory(cl_device, pool):
    made = Tensor.from_host(cl_device.queue, VALUES, use_pinned=True, async_copy=True)
    cl_device.queue.finish()
    memory.empty_cache()
    assert (pool.stats.bytes_allocated, pool.stats.bytes_cached) == (0, 0)
    np.testing.assert_array_equal(made.wait().to_host(), VALUES)


def test_persistent_may_be_set_at_any_time(device):
    t = Tensor.zeros((4,), queue=device.queue)
    assert t.persistent is False
    t.persistent = True
    assert t.persistent is True
    t.fill_(3.0)
    if t.pool_handle is not None:
        t.pool_handle.release()
        assert t.pool_handle.buffer is not None
    assert t.tolist() == [3.0] * 4
    t.persistent = False
    if t.pool_handle is not None:
        t.pool_handle.release()
        assert t.pool_handle.buffer is None


def test_the_constructor_marks_the_lease(cl_device):
    lease = memory.get_persistent_pool(cl_device.queue).allocate(64)
    made = Tensor(lease.buffer, (16,), "float32", cl_device.context, cl_device.queue, lease, persistent=True)
    lease.release()
    assert made.persistent and lease.buffer is made.buffer
