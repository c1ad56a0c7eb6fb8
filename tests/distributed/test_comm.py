"""Worlds: the same answers from threads and from a world of one, the least bytes, and names for those who are missing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from netcl.distributed import LostRankError, thread_worlds
from netcl.distributed.comm import World


def everywhere(size: int, call, timeout: float = 20.0) -> list:
    """``call(world)`` on every rank of a world of threads, in order of the ranks."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, thread_worlds(size, timeout)))


def values(rank: int, shape=(7, 3)) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "expected"), [("sum", np.sum), ("mean", np.mean), ("max", np.max), ("min", np.min)])
def test_all_reduce(size, op, expected):
    found = everywhere(size, lambda world: world.all_reduce(values(world.rank), op))
    for other in found:
        np.testing.assert_array_equal(other, found[0])
    np.testing.assert_allclose(found[0], expected([values(rank) for rank in range(size)], axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (257,)])
def test_all_reduce_of_odd_sizes(shape):
    found = everywhere(3, lambda world: world.all_reduce(np.full(shape, world.rank + 1.0)))
    assert [other.shape for other in found] == [shape] * 3
    assert all((other == 6.0).all() for other in found)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(0,), (2,), (4, 5)])
def test_reduce_scatter_returns_the_parts_of_an_all_reduce(op, shape):
    whole = everywhere(3, lambda world: world.all_reduce(values(world.rank, shape), op))[0]
    parts = everywhere(3, lambda world: world.reduce_scatter(values(world.rank, shape), op))
    np.testing.assert_array_equal(np.concatenate(parts), whole.reshape(-1))


def test_halves_are_reduced_in_float32_and_rounded_once():
    """In float16, 2048 + 1 is 2048."""
    large = np.array([2048.0, 6e4], np.float16)
    found = everywhere(3, lambda world: world.all_reduce(large if world.rank == 0 else np.ones(2, np.float16)))
    assert [(other.dtype, other.tolist()) for other in found] == [(np.float16, [2050.0, 6e4])] * 3


def test_bfloat16_arrays_stay_bfloat16():
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    found = everywhere(3, lambda world: world.all_reduce(np.full(2, 256 if world.rank == 0 else 1, bfloat16)))
    assert [(other.dtype, other.tolist()) for other in found] == [(bfloat16, [258.0, 258.0])] * 3
    assert [part.dtype for part in everywhere(2, lambda world: world.all_gather(np.ones(2, bfloat16)))[0]] == [bfloat16] * 2


def test_a_rank_may_reuse_its_array_at_once():
    def run(world):
        mine = values(world.rank)
        found = world.broadcast(mine), world.reduce_scatter(mine), world.all_gather(mine)
        mine[...] = np.nan
        world.barrier()
        return found

    for sent, part, parts in everywhere(3, run):
        np.testing.assert_array_equal(sent, values(0))
        assert not np.isnan(part).any()
        np.testing.assert_array_equal(np.stack(parts), np.stack([values(rank) for rank in range(3)]))


def test_an_array_in_pieces(monkeypatch):
    monkeypatch.setattr("netcl.distributed.comm.PIECE", 4)
    found = everywhere(2, lambda world: world.all_reduce(values(world.rank)))
    np.testing.assert_array_equal(found[0], values(0) + values(1))


@pytest.mark.parametrize("size", [2, 4])
def test_an_all_reduce_sends_the_least_there_is(size):
    n = 1 << 12

    def sent(world):
        world.all_reduce(np.ones(n, np.float32), check=False)
        return world.bytes_sent

    assert everywhere(size, sent) == [2 * (size - 1) * n * 4 // size] * size


def test_compression_halves_the_bytes_and_keeps_eight_bits():
    def run(world):
        return world.all_reduce(values(world.rank, (1 << 10,)), compress="bfloat16", check=False), world.bytes_sent

    (first, sent), (second, _) = everywhere(2, run)
    np.testing.assert_array_equal(first, second)
    assert sent == (1 << 10) * 2
    exact = values(0, (1 << 10,)) + values(1, (1 << 10,))
    np.testing.assert_allclose(first, exact, rtol=2**-7, atol=2**-6)
    assert np.abs(first - exact).max() > 0  # it was compressed


def test_gather_broadcast_tell():
    def run(world):
        parts = world.all_gather(np.full(world.rank + 1, world.rank + 10))
        world.barrier()
        for part in parts:  # every rank has its own
            part -= 10
        return (
            [part.tolist() for part in parts],
            world.broadcast(values(world.rank), 2),
            world.all_gather_object(world.rank),
            world.gather(world.rank, 1),
        )

    for rank, (parts, sent, told, gathered) in enumerate(everywhere(3, run)):
        assert parts == [[0], [1, 1], [2, 2, 2]]
        np.testing.assert_array_equal(sent, values(2))
        assert told == [0, 1, 2]
        assert (gathered is not None) == (rank == 1)


def test_a_world_of_one_is_a_copy():
    world, x = World(), values(0)
    assert not any(np.shares_memory(x, made) for made in (world.all_reduce(x), *world.all_gather(x)))
    np.testing.assert_array_equal(world.broadcast(x), x)
    world.barrier()
    assert world.bytes_sent == 0


@pytest.mark.fault("ranks with other shapes", "an all-reduce", "named by all before anything is sent")
def test_a_rank_with_another_shape_is_named_by_all():
    def run(world):
        with pytest.raises(
            LostRankError, match=r"must agree on op, shape, dtype, compress and deterministic: rank 1 has \['sum', \[2\]"
        ) as caught:
            world.all_reduce(np.zeros(2 if world.rank == 1 else 3))
        return str(caught.value)

    assert len(set(everywhere(3, run))) == 1


def test_a_rank_that_calls_something_else_is_named():
    def run(world):
        with pytest.raises(LostRankError, match=r"must make the same call: rank 0 calls all_gather_object, rank 1 calls barrier"):
            world.barrier() if world.rank else world.all_gather_object(1)

    everywhere(2, run)


def _late(world: World) -> None:
    with pytest.raises(LostRankError):
        world.barrier()


@pytest.mark.fault("rank never arrives", "one that does not call", "named in time")
def test_a_rank_that_never_arrives_is_named_in_time():
    first, _second, third = thread_worlds(3, timeout=2)
    threading.Thread(target=_late, args=(third,), daemon=True).start()
    start = time.monotonic()
    with pytest.raises(LostRankError, match=r"\[barrier\] rank 1 did not arrive within 2 s; world=3; .*NETCL_COMM_TIMEOUT"):
        first.barrier()
    assert time.monotonic() - start < 50


def test_duplicates_do_not_disturb_each_other():
    def run(world):
        twin = world.duplicate()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(lambda: [twin.all_gather_object(["twin", i]) for i in range(20)])
            own = [world.all_gather_object(["own", i]) for i in range(20)]
            return own, other.result()

    for own, twin in everywhere(2, run):
        assert own == [[["own", i]] * 2 for i in range(20)]
        assert twin == [[["twin", i]] * 2 for i in range(20)]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"\[all_reduce\] unknown reduction; op='product'; known: sum"):
        World().all_reduce(np.ones(1), "product")
    with pytest.raises(TypeError, match=r"\[all_reduce\] op='mean' requires a floating-point dtype; dtype=int64"):
        World().all_reduce(np.ones(1, np.int64), "mean")
    with pytest.raises(ValueError, match=r"root must be a rank from 0 to 0; root=1"):
        World().broadcast(np.ones(1), 1)
    with pytest.raises(TypeError, match=r"keys of dictionaries must be strings.*value=\[\{1: 2\}\]; pass list\(value.items\(\)\)"):
        World().all_gather_object([{1: 2}])
    with pytest.raises(ValueError, match=r"compress must be None or 'bfloat16'"):
        everywhere(2, lambda world: world.all_reduce(np.ones(4, np.float32), compress="int4", check=False))
