"""Worlds: the ranks that take part in a job, and collectives over host arrays.

One interface covers a world of one rank (every call is local), threads of one process, and the processes of an MPI job.
Reductions in rank order are built here on an all-to-all and an all-gather. In an all-reduce of n ranks, each rank sends about
``2 (n - 1) / n`` of the array's bytes, which is the minimum. Every rank gets the same bits in every run. Unless
:attr:`World.deterministic` is set, an MPI world uses MPI's own reductions instead where these are suitable.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import env
from netcl.core.errors import DtypeError, ShapeError, message

Arrays = list[np.ndarray]
#: Elements of an array that are reduced at once; byte counts must fit the 32 bits of MPI before version 4.
PIECE = 1 << 26

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
#: Characters of an error message that are sent to the other ranks.
_ERROR_TEXT = 500


class LostRankError(RuntimeError):
    """Raised when another rank died, failed, did not arrive in time, or made a different call or passed different arguments."""


class Failures:
    """Counts the failures that each rank has reported and keeps its last error text. Shared by all worlds of a job."""

    def __init__(self) -> None:
        self.reported: dict[int, tuple[int, str]] = {}

    def add(self, rank: int, text: str) -> tuple[int, str]:
        self.reported[rank] = self.reported.get(rank, (0, ""))[0] + 1, text
        return self.reported[rank]

    def ahead_of(self, rank: int) -> list[str]:
        """Return the errors of ranks that failed more often than ``rank``; failures that all ranks had in common are left out."""
        own = self.reported.get(rank, (0, ""))[0]
        return [f"rank {other} failed: {text}" for other, (count, text) in sorted(self.reported.items()) if count > own]

    def check(self, op: str, rank: int, size: int) -> None:
        """Raise if another rank has reported more failures than ``rank``."""
        texts = self.ahead_of(rank)
        if texts:
            raise LostRankError(message(op, "; ".join(texts), "see the traceback of that rank", waiting=f"rank {rank}", world=size))


def check_op(name: str, op: str, dtype: str) -> None:
    """Raise unless ``op`` is a known reduction that is defined for ``dtype``."""
    if op not in _COMBINE:
        raise ValueError(message(name, "unknown reduction", f"known: {', '.join(_COMBINE)}", op=repr(op)))
    if op == "mean" and not dtypes.lookup(dtype, name).is_float:
        raise DtypeError(message(name, "op='mean' requires a floating-point dtype", dtype=dtype))


def combine(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the elementwise reduction ``op`` of arrays of the same shape, in order."""
    return mean_of(op, reduce(_COMBINE[op], arrays), len(arrays))


def mean_of(op: str, total: np.ndarray, count: int) -> np.ndarray:
    """Return ``total / count``, in the dtype of ``total``, if ``op`` is ``"mean"``; otherwise ``total`` itself."""
    return total / np.asarray(count, total.dtype) if op == "mean" and count > 1 else total


class World:
    """One rank of a job, number ``rank`` of ``size``, with collectives over host arrays; in a world of one rank they are local.

    - **timeout**: seconds after which a call that waits for another rank raises :class:`LostRankError`; ``NETCL_COMM_TIMEOUT`` by default.
    - **deterministic**: reduce in rank order, which gives the same bits in every run with the same number of ranks. A world of threads
      always reduces in rank order. If this is false, an MPI world leaves the order to MPI, which needs fewer messages in a large world.
      Set this on all ranks before a model is wrapped.
    - **bytes_sent**: the payload bytes this rank had to send so far. MPI may send more, in particular in small messages.
    """

    rank = 0
    size = 1
    deterministic = False

    def __init__(self, timeout: float | None = None):
        self.timeout = float(env.value("NETCL_COMM_TIMEOUT") if timeout is None else timeout)
        self.bytes_sent = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # the copy of a model stays in the world of the model

    # ---- primitives that a world of several ranks overrides

    def _all_to_all(self, op: str, flat: np.ndarray, ends: Sequence[int]) -> Arrays:
        """Send ``flat[ends[i]:ends[i + 1]]`` to rank i; returns the parts that all ranks sent to this rank, in rank order."""
        return [flat.copy()]

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        """Return the flat arrays of all ranks, in order; ``lengths`` are their element counts, known to every rank."""
        return [mine.copy()]

    def _collect_text(self, op: str, text: bytes) -> list[bytes]:
        return [text]

    def _from_root(self, array: np.ndarray, root: int) -> np.ndarray:
        return array.copy()

    def duplicate(self) -> World:
        """Return a world of the same ranks with separate messages, for use from another thread."""
        return World(self.timeout)

    def local_rank(self) -> int:
        """Return the index of this rank among the ranks of its machine."""
        return self.rank

    def _report_failure(self, text: str) -> None:
        """Send an error text to all other ranks."""

    # ---- failures and agreement

    def failed(self, error: BaseException | None) -> None:
        """Report an error of this rank: the others raise :class:`LostRankError` with its text instead of waiting for the timeout.

        Each error is reported once. Interrupts and :class:`LostRankError` are not reported. Ranks may continue if all failed equally often.
        """
        own = isinstance(error, Exception) and not isinstance(error, LostRankError)
        if self.size > 1 and own and not getattr(error, "netcl_reported", False):
            error.netcl_reported = True  # type: ignore[union-attr]  # by the innermost block that it leaves
            self._report_failure(f"{type(error).__name__}: {error}"[:_ERROR_TEXT])

    def together(self) -> AbstractContextManager[Any]:
        """Return a context manager for code that all ranks run. An error in the block is reported to the other ranks by :meth:`failed`.

        >>> with World().together():
        ...     loss = 1.0
        """
        block = ExitStack()
        block.push(lambda kind, error, trace: self.failed(error))
        return block

    def all_gather_object(self, value: Any, op: str = "all_gather_object") -> list[Any]:
        """Exchange a small value that JSON can hold; returns the values of all ranks, in rank order. Tuples become lists."""
        if not _has_text_keys(value):
            what, remedy = "keys of dictionaries must be strings: JSON would convert others", "pass list(value.items())"
            raise TypeError(message(op, what, remedy, value=value))
        return [json.loads(text) for text in self._collect_text(op, json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._collect_text("barrier", b"")

    def agree(self, op: str, what: str, value: Any) -> None:
        """Raise on every rank unless all pass the same JSON ``value``; the error names ``what`` and the differing ranks."""
        if self.size == 1:
            return
        texts = self._collect_text(op, json.dumps(value, sort_keys=True).encode())
        ((usual, count),) = Counter(texts).most_common(1)
        if count < self.size:
            differing = ", ".join(f"rank {rank} has {json.loads(text)}" for rank, text in enumerate(texts) if text != usual)
            raise LostRankError(message(op, f"all ranks must agree on {what}: {differing}", most=json.loads(usual), world=self.size))

    # ---- collectives

    def all_reduce(self, array: Any, op: str = "sum", *, compress: str | None = None, check: bool = True) -> np.ndarray:
        """Return the sum, mean, maximum or minimum over all ranks, equal on every rank.

        float16 and bfloat16 values are reduced in float32 and rounded once.

        - **compress**: ``"bfloat16"`` sends float32 values as 16 bits; sums are made in float32, in rank order.
        - **check**: compare shapes and dtypes of all ranks first, which costs a round trip.
        """
        given = np.asarray(array)
        flat = self._checked("all_reduce", given, op, compress, check)
        if self.size == 1:
            return given.copy()
        pieces = [self._all_reduced(flat[i : i + PIECE], op, compress) for i in range(0, flat.size, PIECE)]
        return _rounded_to(np.concatenate(pieces or [flat]), given.dtype).reshape(given.shape)

    def reduce_scatter(self, array: Any, op: str = "sum", *, compress: str | None = None, check: bool = True) -> np.ndarray:
        """Return this rank's part of the reduced flat array, cut as ``np.array_split`` does; sends half the bytes of :meth:`all_reduce`."""
        given = np.asarray(array)
        flat = self._checked("reduce_scatter", given, op, compress, check)
        return _rounded_to(self._reduce_scattered(flat, op, compress), given.dtype)

    def _checked(self, name: str, given: np.ndarray, op: str, compress: str | None, check: bool) -> np.ndarray:
        """Validate the arguments of a reduction and return the flat values, halves widened to float32."""
        check_op(name, op, given.dtype.name)
        if compress not in (None, "bfloat16"):
            raise ValueError(message(name, "compress must be None or 'bfloat16'", compress=repr(compress)))
        if check:
            what = "op, shape, dtype, compress and deterministic"
            self.agree(name, what, [op, list(given.shape), given.dtype.name, compress, self.deterministic])
        return given.reshape(-1).astype(np.float32 if given.dtype.name in dtypes.HALVES else given.dtype, copy=False)

    def _all_reduced(self, flat: np.ndarray, op: str, compress: str | None) -> np.ndarray:
        mine = _compressed(self._reduce_scattered(flat, op, compress), compress)
        lengths = [b - a for a, b in pairwise(self.part_ends(flat.size))]
        return np.concatenate([_decompressed(part, flat, compress) for part in self.collect("all_reduce", mine, lengths)])

    def _reduce_scattered(self, flat: np.ndarray, op: str, compress: str | None) -> np.ndarray:
        parts = self._all_to_all("reduce_scatter", _compressed(flat, compress), self.part_ends(flat.size))
        return combine(op, [_decompressed(part, flat, compress) for part in parts])

    def part_ends(self, count: int) -> list[int]:
        """Return the offsets at which ``np.array_split`` cuts ``count`` elements for the ranks, including 0 and ``count``."""
        size, rest = divmod(count, self.size)
        return [0, *accumulate(size + (rank < rest) for rank in range(self.size))]

    def all_gather(self, array: Any) -> Arrays:
        """Return the arrays of all ranks, in order; shapes and dtypes may differ."""
        mine = np.asarray(array, order="C")
        kind = mine.dtype.name if mine.dtype.kind == "V" else mine.dtype.str  # the str of bfloat16 is that of two raw bytes
        shapes = self.all_gather_object([list(mine.shape), kind], "all_gather")
        lengths = [math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes]
        found = self.collect("all_gather", mine.reshape(-1).view(np.uint8), lengths)
        return [part.view(kind).reshape(shape) for part, (shape, kind) in zip(found, shapes, strict=True)]

    def broadcast(self, array: Any, root: int = 0, *, check: bool = True) -> np.ndarray:
        """Return the array of rank ``root``. Each rank must pass an array of that shape and dtype; ``check`` compares them first."""
        self._check_root("broadcast", root)
        mine = np.asarray(array, order="C")
        if check:
            self.agree("broadcast", "shape, dtype and root", [list(mine.shape), mine.dtype.str, root])
        return self._from_root(mine, root)

    def gather(self, array: Any, root: int = 0) -> Arrays | None:
        """Return the arrays of all ranks on ``root``, in rank order; ``None`` on other ranks."""
        self._check_root("gather", root)
        found = self.all_gather(array)
        return found if self.rank == root else None

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise ShapeError(message(op, f"root must be a rank from 0 to {self.size - 1}", root=root))


def _has_text_keys(value: Any) -> bool:
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return (not isinstance(value, dict) or all(isinstance(key, str) for key in value)) and all(map(_has_text_keys, parts))


def _rounded_to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return values if values.dtype == dtype else dtypes.encode(values, dtypes.lookup(dtype.name)).view(dtype)


def _compressed(values: np.ndarray, compress: str | None) -> np.ndarray:
    return dtypes.encode(values, dtypes.DTYPES["bfloat16"]) if compress and values.dtype == np.float32 else values


def _decompressed(stored: np.ndarray, values: np.ndarray, compress: str | None) -> np.ndarray:
    return dtypes.decode(stored, dtypes.DTYPES["bfloat16"]) if compress and values.dtype == np.float32 else stored


# ---- threads of one process


def late(op: str, missing: Sequence[int], timeout: float, size: int, **where: object) -> str:
    """Return the error text for ranks that did not arrive in time."""
    names = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
    remedy = "look for an error of that rank above, or set NETCL_COMM_TIMEOUT to more seconds if it is slow"
    return message(op, f"{names} did not arrive within {timeout:g} s", remedy, world=size, **where)


class _Table:
    """State shared by the ranks of a world of threads. Call number k of each rank belongs to round k."""

    def __init__(self, like: _Table | None = None):
        self.changed: threading.Condition = like.changed if like else threading.Condition()
        self.failures: Failures = like.failures if like else Failures()
        self.rounds: dict[int, dict[int, Any]] = {}


class ThreadWorld(World):
    """One rank of a world of threads; made by :func:`thread_worlds`. Sent arrays are copied, so the sender may overwrite them."""

    def __init__(self, rank: int, size: int, table: _Table, timeout: float | None = None):
        super().__init__(timeout)
        self.rank, self.size, self.table, self.number = rank, size, table, 0

    def _swap(self, op: str, value: Any) -> list[Any]:
        """Publish ``value``, wait for the values of all other ranks and return all of them, in rank order."""
        self.number += 1
        table = self.table
        with table.changed:
            found = table.rounds.setdefault(self.number, {})
            found[self.rank] = (op, value)
            table.changed.notify_all()
            table.changed.wait_for(lambda: len(found) == self.size or table.failures.ahead_of(self.rank), self.timeout)
            if len(found) < self.size:
                table.failures.check(op, self.rank, self.size)
                raise LostRankError(late(op, [other for other in range(self.size) if other not in found], self.timeout, self.size))
            table.rounds.pop(self.number - 2, None)  # every rank has reached the round after it
        if len({name for name, _ in found.values()}) > 1:
            calls = ", ".join(f"rank {other} calls {found[other][0]}" for other in range(self.size))
            raise LostRankError(message(op, f"all ranks must make the same call: {calls}", world=self.size))
        return [found[other][1] for other in range(self.size)]

    def _all_to_all(self, op: str, flat: np.ndarray, ends: Sequence[int]) -> Arrays:
        begin, end = ends[self.rank : self.rank + 2]
        self.bytes_sent += flat.nbytes - flat[begin:end].nbytes
        return [given[begin:end] for given in self._swap(op, flat.copy())]

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        self.bytes_sent += mine.nbytes * (self.size - 1)
        return [part.copy() for part in self._swap(op, mine.copy())]  # every rank may change its results

    def _collect_text(self, op: str, text: bytes) -> list[bytes]:
        return self._swap(op, text)

    def _from_root(self, array: np.ndarray, root: int) -> np.ndarray:
        self.bytes_sent += array.nbytes * (self.rank == root)
        return self._swap("broadcast", array.copy() if self.rank == root else None)[root].copy()

    def duplicate(self) -> World:
        return ThreadWorld(self.rank, self.size, self._swap("duplicate", _Table(self.table))[0], self.timeout)

    def _report_failure(self, text: str) -> None:
        with self.table.changed:
            self.table.failures.add(self.rank, text)
            self.table.changed.notify_all()


def thread_worlds(size: int, timeout: float | None = None) -> list[World]:
    """Return one world for each of ``size`` threads.

    >>> [world.rank for world in thread_worlds(2)]
    [0, 1]
    """
    if size < 1:
        raise ValueError(message("thread_worlds", "size must be at least 1", size=size))
    table = _Table()
    return [ThreadWorld(rank, size, table, timeout) for rank in range(size)] if size > 1 else [World(timeout)]


@lru_cache(maxsize=1)
def world() -> World:
    """Return the world of this process: the MPI job if ``mpiexec`` started the process, else a single rank without mpi4py."""
    from netcl.distributed import mpi

    return mpi.MPIWorld() if mpi.started_by_mpi() else World()
