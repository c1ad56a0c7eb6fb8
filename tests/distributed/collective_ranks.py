"""Every collective of a world against NumPy; run by all ranks under mpiexec: ``mpiexec -n 8 python collective_ranks.py``."""

from __future__ import annotations

import sys

import numpy as np

from netcl.distributed import World, comm, mpi, world

SIZES = (0, 5, 1001)  # fewer elements than ranks, and parts of different lengths
EXACT = ("float64", "float32", "int64", "uint8", "bool")


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    """Small integers: their sums are exact in every order."""
    return np.random.default_rng([rank, size]).integers(0, 5, size).astype(dtype)


def check_reductions(ours: World, op: str, dtype: str) -> None:
    for size in SIZES:
        every = np.stack([values(rank, size, dtype) for rank in range(ours.size)])
        expected = getattr(np, op)(every, axis=0, **({"dtype": dtype} if op in ("sum", "mean") else {}))
        found = ours.all_reduce(every[ours.rank], op)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        part = ours.reduce_scatter(every[ours.rank], op)
        np.testing.assert_allclose(part, np.array_split(expected, ours.size)[ours.rank], rtol=1e-6)


def check_halves(ours: World) -> None:
    """Summed in float32 and rounded once: adding 2048 and then ones in float16 would stay at 2048."""
    found = ours.all_reduce(np.full(3, 2048 if ours.rank == 0 else 1, np.float16))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, np.full(3, 2048 + ours.size - 1, np.float16))
    assert (ours.all_reduce(np.full(2, 6e4, np.float16), "mean") == np.float16(6e4)).all()
    packed = ours.all_reduce(np.full(5, 256 if ours.rank == 0 else 1, np.float32), compress="bfloat16")
    np.testing.assert_allclose(packed, 256 + ours.size - 1, rtol=2**-8)


def check_nan(ours: World) -> None:
    with_nan = np.array([np.nan if ours.rank == ours.size // 2 else ours.rank, ours.rank], np.float64)
    for op, expected in (("sum", sum(range(ours.size))), ("max", ours.size - 1), ("min", 0)):
        np.testing.assert_array_equal(ours.all_reduce(with_nan, op), [np.nan, expected])


def check_order(ours: World) -> None:
    """In rank order to the bit if deterministic; the same bits on all ranks in any case."""
    every = [np.random.default_rng(rank).standard_normal(257).astype(np.float32) for rank in range(ours.size)]
    found = ours.all_reduce(every[ours.rank])
    for other in ours.all_gather(found):
        np.testing.assert_array_equal(other, found)
    in_order = every[0]
    for array in every[1:]:
        in_order = in_order + array
    np.testing.assert_allclose(found, in_order, rtol=1e-4, atol=1e-5)
    if ours.deterministic:
        np.testing.assert_array_equal(found, in_order)


def check_copies(ours: World) -> None:
    for rank, part in enumerate(ours.all_gather(np.full((ours.rank % 3, 2), ours.rank, np.int32))):
        assert part.shape == (rank % 3, 2) and (part == rank).all()
    for root in (0, ours.size - 1):
        for dtype in ("float32", "bool"):
            np.testing.assert_array_equal(ours.broadcast(values(ours.rank, 40, dtype), root), values(root, 40, dtype))
    gathered = ours.gather(ours.rank, 1)
    assert (gathered is None) == (ours.rank != 1)
    assert gathered is None or [int(part) for part in gathered] == list(range(ours.size))
    assert ours.all_gather_object(["rank", ours.rank]) == [["rank", rank] for rank in range(ours.size)]
    ours.barrier()


def main() -> None:
    ours = world()
    for ours.deterministic in (False, True):
        for dtype in EXACT:
            for op in ("sum", "mean", "max", "min"):
                if op != "mean" or dtype.startswith("float"):
                    check_reductions(ours, op, dtype)
        check_halves(ours)
        check_nan(ours)
        check_order(ours)
    check_copies(ours)
    comm.PIECE = mpi.PIECE = 16  # arrays in several pieces
    for ours.deterministic in (False, True):
        check_reductions(ours, "sum", "float32")
    check_copies(ours)
    if ours.rank == 0:
        sys.stdout.write(f"{ours.size} ranks agree with NumPy\n")


if __name__ == "__main__":
    main()
