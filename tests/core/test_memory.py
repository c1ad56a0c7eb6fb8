"""Pools: buckets, leases, caps, eviction, statistics, and what an impossible allocation says."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from netcl.core import memory, recording
from netcl.core.errors import OutOfMemoryError, ShapeError
from netcl.core.memory import BufferPool, PersistentBufferPool, PoolStats, eighth_steps, power_of_two
from netcl.core.tensor import Tensor, with_shape


def test_buckets():
    assert [power_of_two(n) for n in (0, 1, 1024, 1025, 5000)] == [1024, 1024, 1024, 2048, 8192]
    assert [eighth_steps(n) for n in (1, 65536, 65537, 100_000)] == [1024, 65536, 81920, 114688]
    for n in range(70_000, 50_000_000, 777_777):
        assert n <= eighth_steps(n) <= n * 1.25
    assert eighth_steps((256 << 20) + 1) == 288 << 20


def test_hit_rate_without_requests_is_zero():
    assert PoolStats().hit_rate == 0.0
    assert PoolStats(hits=3, misses=1).hit_rate == 0.75


def test_a_released_buffer_is_reused(cl_device):
    pool = BufferPool(cl_device.context)
    first = pool.allocate(3000)
    buffer = first.buffer
    assert first.buffer.size >= 3000
    first.release()
    assert pool.stats.bytes_cached == 4096
    second = pool.allocate(4000)
    assert second.buffer is buffer
    assert (pool.stats.hits, pool.stats.misses, pool.stats.bytes_allocated) == (1, 1, 4096)


def test_release_is_idempotent(cl_device):
    pool = BufferPool(cl_device.context)
    stale = pool.allocate(64)
    stale.release()
    lease = pool.allocate(64)
    stale.release()
    pool.release(stale)
    assert lease.buffer is not None
    assert pool.stats.bytes_cached == 0


def test_dropping_a_lease_returns_it(cl_device):
    pool = BufferPool(cl_device.context)
    pool.allocate(64)
    gc.collect()
    assert pool.stats.bytes_cached == 1024


def test_clear_keeps_leases(cl_device):
    pool = BufferPool(cl_device.context)
    kept, gone = pool.allocate(64), pool.allocate(64)
    gone.release()
    pool.clear()
    assert (pool.stats.bytes_allocated, pool.stats.bytes_cached) == (1024, 0)
    assert kept.buffer is not None


def test_special_flags_are_not_pooled(cl_device):
    pool = BufferPool(cl_device.context)
    handle = pool.allocate(64, flags=type(pool._flags)(pool._flags | 1 << 4))
    handle.release()
    assert pool.stats.bytes_cached == 0


def test_the_cap_evicts_what_was_used_least_recently(cl_device):
    pool = PersistentBufferPool(cl_device.context, max_cached_bytes=4096)
    old, new, newest = pool.allocate(2048), pool.allocate(1024), pool.allocate(2048 + 1024)
    for handle in (old, new, newest):
        handle.release()
    stats = pool.get_stats()
    assert stats["buckets"] == {4096: 1}
    assert stats["bytes_cached"] == stats["bytes_allocated"] == 4096
    assert set(stats) == {"hits", "misses", "hit_rate", "bytes_allocated", "bytes_cached", "buckets"}


def test_the_cap_per_bucket(cl_device):
    pool = PersistentBufferPool(cl_device.context, max_per_bucket=2)
    for handle in [pool.allocate(64) for _ in range(5)]:
        handle.release()
    assert pool.get_stats()["buckets"] == {1024: 2}


def test_the_default_cap_is_the_environments(cl_device, monkeypatch):
    monkeypatch.setenv("NETCL_MAX_CACHED_GB", "0.5")
    assert PersistentBufferPool(cl_device.context).max_cached_bytes == 1 << 29


@pytest.fixture
def cut_pool(cl_device):
    """A pool whose large leases are pieces."""
    pool = PersistentBufferPool(cl_device.context)
    if not pool.cuts:
        pytest.skip("memory of this device is not cut into pieces")
    return pool


MB = 1 << 20


def test_pieces_of_all_sizes_share_memory(cut_pool):
    whole = cut_pool.allocate(8 * MB)
    whole.release()
    parts = [cut_pool.allocate(n * MB) for n in (5, 2, 1)]
    assert (cut_pool.stats.bytes_allocated, cut_pool.stats.bytes_cached, cut_pool.stats.misses) == (8 * MB, 0, 1)
    assert [part.buffer.size for part in parts] == [5 * MB, 2 * MB, MB]
    parts.pop(1).release()
    assert cut_pool.get_stats()["buckets"] == {2 * MB: 1}
    parts.pop(1).release()
    assert cut_pool.get_stats()["buckets"] == {3 * MB: 1}
    assert cut_pool.allocate(3 * MB).buffer.size == 3 * MB
    del parts
    again = cut_pool.allocate(8 * MB)
    assert (cut_pool.stats.bytes_allocated, cut_pool.stats.misses, again.buffer.size) == (8 * MB, 1, 8 * MB)


def test_free_segments_become_one_that_holds_more(cut_pool):
    for lease in [cut_pool.allocate(n * MB) for n in (3, 4, 5)]:
        lease.release()
    cut_pool.allocate(8 * MB)
    assert (cut_pool.stats.bytes_allocated, cut_pool.get_stats()["buckets"]) == (12 * MB, {3 * MB: 1, 9 * MB: 1})
    kept = cut_pool.allocate(9 * MB)
    cut_pool.clear()
    assert cut_pool.stats.bytes_allocated == kept.nbytes


def test_large_tensors_do_not_touch_each_other(cl_device, rng):
    live, arrays = [], []
    for _ in range(60):
        array = rng.standard_normal(int(rng.integers(70_000, 200_000))).astype("f")
        live.append(Tensor.from_host(cl_device.queue, array) + 1.0)
        arrays.append(array)
        if len(live) > 6:
            at = int(rng.integers(len(live)))
            np.testing.assert_array_equal(live.pop(at).to_host(), arrays.pop(at) + np.float32(1))
    for t, array in zip(live, arrays, strict=True):
        np.testing.assert_array_equal(t.to_host(), array + np.float32(1))


def test_the_cap_holds_for_large_leases(cl_device):
    pool = PersistentBufferPool(cl_device.context, max_cached_bytes=5 * MB)
    leases = [pool.allocate(n * MB) for n in (3, 4, 2)]
    assert pool.stats.bytes_allocated == 9 * MB
    for lease in leases:
        lease.release()
    assert pool.stats.bytes_cached == pool.stats.bytes_allocated <= 5 * MB


def test_a_persistent_lease_is_not_released_by_hand(cl_device):
    t = Tensor.zeros((4,), queue=cl_device.queue, persistent=True)
    buffer = t.pool_handle.buffer
    t.pool_handle.release()
    assert t.pool_handle.buffer is buffer


def test_one_allocation_over_the_limit(cl_device, monkeypatch):
    pool = memory.get_persistent_pool(cl_device.queue)
    limit = min(pool.limit, 128 * MB)  # which OpenCL wants every device to allow, and some allow no more
    monkeypatch.setattr(pool, "limit", limit)
    pool.clear()  # a free buffer of that size would serve the request
    with pytest.raises(
        OutOfMemoryError, match=r"\[allocate\] one allocation cannot be larger than the device allows; tensor=.*float32.*limit="
    ):
        Tensor.empty((limit // 4 + 1024,), queue=cl_device.queue)


def test_pressure_evicts_and_retries_once(cl_device):
    pool = BufferPool(cl_device.context)
    pool.allocate(1 << 20).release()
    create, calls = pool._create, []

    def failing(*args):
        calls.append(pool.stats.bytes_cached)
        if len(calls) == 1:
            raise memory.platforms.opencl().MemoryError(_allocation_failure())
        return create(*args)

    pool._create = failing
    assert pool.allocate(1 << 22).buffer is not None
    assert calls == [1 << 20, 0]


def test_no_room_names_the_largest_live_tensors(cl_device):
    pool = memory.get_persistent_pool(cl_device.queue)
    big = Tensor.empty((3, 1 << 20), queue=cl_device.queue)
    create = pool._create

    def failing(*args):
        raise memory.platforms.opencl().MemoryError(_allocation_failure())

    pool._create = failing
    try:
        with pytest.raises(OutOfMemoryError, match=r"no memory left \(.*\); .*largest live tensors: \(3, 1048576\) float32 12.0 MB"):
            Tensor.empty((5, 1 << 20), queue=cl_device.queue)
    finally:
        pool._create = create
    assert big.shape == (3, 1 << 20)


def _allocation_failure():
    cl = memory.platforms.opencl()
    try:
        cl.Buffer(cl.create_some_context(interactive=False), cl.mem_flags.READ_WRITE, 1 << 62)
    except cl.Error as error:
        return error.args[0]
    pytest.skip("this driver accepts any size")


def test_negative_sizes(cl_device):
    with pytest.raises(ShapeError, match=r"\[allocate\] nbytes must not be negative; nbytes=-1"):
        BufferPool(cl_device.context).allocate(-1)


def test_pinned_memory_waits_for_its_copy(cl_device):
    pool = memory.PinnedBufferPool(cl_device.queue)

    class Copying:
        command_execution_status = 1

    lease = pool.allocate(100)
    mapped = lease.buffer
    mapped[:3] = (1, 2, 3)
    busy = Copying()
    pool.release(lease, busy)
    other = pool.allocate(100)
    assert other.buffer is not mapped
    busy.command_execution_status = 0
    assert pool.allocate(100).buffer is mapped


def test_zero_copy_sees_host_writes(cl_device):
    array = np.arange(1024, dtype=np.float32)
    buffer = memory.create_zero_copy_buffer(cl_device.queue, array)
    back = np.empty_like(array)
    memory.platforms.opencl().enqueue_copy(cl_device.queue, back, buffer)
    np.testing.assert_array_equal(back, array)
    with pytest.raises(ShapeError, match="must be contiguous"):
        memory.create_zero_copy_buffer(cl_device.queue, array[::2])


def test_probes(cl_device):
    if cl_device.device_type == "cpu":
        assert memory.is_integrated_gpu(cl_device.queue) is True
    assert [memory.has_svm_support(SimpleNamespace(device=SimpleNamespace(get_info=lambda _, n=n: n))) for n in (0, 1)] == [False, True]
    assert memory.has_svm_support(cl_device.queue) or cl_device.device.version.startswith(("OpenCL 1.", "OpenCL 3."))  # 2.x has it
    assert memory.create_pinned_buffer(cl_device.queue, 100).size >= 100


def test_summary_and_stats(cl_device):
    kept = Tensor.zeros((1000,), queue=cl_device.queue)
    stats = memory.memory_stats()
    assert stats["bytes_in_use"] == stats["bytes_allocated"] - stats["bytes_cached"] >= kept.nbytes
    assert cl_device.context.devices[0].name[:30] in memory.memory_summary()
    memory.empty_cache()
    assert memory.memory_stats()["bytes_cached"] == 0


def test_a_hundred_thousand_tensors_stay_flat(cl_device):
    pool = memory.get_persistent_pool(cl_device.queue)
    Tensor.empty((16, 16), queue=cl_device.queue)
    held, hits, misses = pool.stats.bytes_allocated, pool.stats.hits, pool.stats.misses
    for _ in range(100_000):
        Tensor.empty((16, 16), queue=cl_device.queue)
    assert pool.stats.bytes_allocated == held
    hits, misses = pool.stats.hits - hits, pool.stats.misses - misses
    assert hits / (hits + misses) > 0.99


def test_views_share_the_lease(cl_device):
    pool = memory.get_persistent_pool(cl_device.queue)
    gc.collect()  # or what other tests left would be freed below
    memory.empty_cache()
    t = Tensor.zeros((4, 4), queue=cl_device.queue)
    view = with_shape(t, (16,))
    del t
    gc.collect()
    assert pool.stats.bytes_cached == 0
    assert view.to_host().tolist() == [0.0] * 16
    del view
    gc.collect()
    assert pool.stats.bytes_cached == 1024


def test_peaks_of_memory(cl_device):
    try:
        memory.reset_peak_memory_stats()
        before = memory.memory_stats()
        assert before["peak_bytes_in_use"] == before["bytes_in_use"] and before["peak_bytes_allocated"] == before["bytes_allocated"]
        first = Tensor.zeros((1 << 20,), queue=cl_device.queue)
        second = Tensor.zeros((1 << 20,), queue=cl_device.queue)
        del first, second
        third = Tensor.zeros((1 << 20,), queue=cl_device.queue)  # not a new peak
        after = memory.memory_stats()
        assert after["bytes_in_use"] - before["bytes_in_use"] == 4 << 20 == third.nbytes
        assert after["peak_bytes_in_use"] - before["bytes_in_use"] == 8 << 20
        assert after["peak_bytes_allocated"] >= after["peak_bytes_in_use"]
        memory.reset_peak_memory_stats()
        assert memory.memory_stats()["peak_bytes_in_use"] == after["bytes_in_use"]
    finally:
        recording.watch_leases(None)
    stats = memory.memory_stats()
    assert stats["peak_bytes_in_use"] == stats["peak_bytes_allocated"] and not recording.listening
