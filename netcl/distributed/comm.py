"""Worlds: who takes part, and how values get from one to another.

One interface over three worlds: a world of one (every call is a no-op), threads of one process, and the processes of an MPI job.
A world moves host arrays with two primitives, :meth:`World.exchange` and :meth:`World.collect`; everything else is built on them here,
once. An all-reduce is an exchange of pieces, a sum in rank order and a collection of the sums: each rank sends ``2 (n - 1) / n`` of the
array's bytes, which is the least any all-reduce can send, and all ranks get the same bits whatever the timing was.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core import env
from netcl.core.errors import DtypeError, ShapeError, message

Arrays = list[np.ndarray]
#: Elements of a piece of a large array: counts of bytes must fit MPI's 32 bits.
PIECE = 1 << 26

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
_BFLOAT16 = dtypes.DTYPES["bfloat16"]
NOTHING = np.empty(0, np.uint8)
#: Characters of an error that the other ranks are told.
_LAST_WORDS = 500


class LostRankError(RuntimeError):
    """A rank died, never arrived, failed, or came with something else than the others."""


class Failures:
    """Which ranks have said that they failed, how often, and their last words. One for all worlds of a job."""

    def __init__(self) -> None:
        self.said: dict[int, tuple[int, str]] = {}

    def count(self, rank: int) -> int:
        return self.said.get(rank, (0, ""))[0]

    def without(self, rank: int) -> list[str]:
        """What ranks say that have failed without this one: what failed on all of them alike, all have left behind."""
        return [f"rank {other} failed: {text}" for other, (count, text) in sorted(self.said.items()) if count > self.count(rank)]

    def check(self, op: str, rank: int, size: int) -> None:
        """Raise if a rank has failed without this one."""
        texts = self.without(rank)
        if texts:
            remedy = "its own traceback tells where"
            raise LostRankError(message(op, "; ".join(texts), remedy, waiting=f"rank {rank}", world=size))


class _Together:
    """See :meth:`World.together`."""

    def __init__(self, world: World):
        self.world = world

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.world.failed(error)


def check_op(name: str, op: str, dtype: str) -> None:
    """Raise unless ``op`` is a known reduction that values of ``dtype`` have."""
    if op not in _COMBINE:
        raise ValueError(message(name, "unknown reduction", f"known: {', '.join(_COMBINE)}", op=repr(op)))
    if op == "mean" and not dtypes.lookup(dtype, name).is_float:
        raise DtypeError(message(name, "a mean needs floats", dtype=dtype))


def combine(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape, reduced in their order."""
    total = reduce(_COMBINE[op], arrays)
    return total / np.asarray(len(arrays), total.dtype) if op == "mean" else total


class World:
    """``rank`` of ``size``; a world of one does nothing and costs nothing.

    - **timeout**: seconds after which a call that still waits for another rank raises :class:`LostRankError` naming it;
      ``NETCL_COMM_TIMEOUT`` unless given.
    - **bytes_sent**: what this rank has given to others so far, without the engine's headers.
    """

    rank = 0
    size = 1

    def __init__(self, timeout: float | None = None):
        self.timeout = float(env.value("NETCL_COMM_TIMEOUT") if timeout is None else timeout)
        self.bytes_sent = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # the copy of a model stays in the world of the model

    # ---- what a world of several provides

    def exchange(self, op: str, parts: Sequence[np.ndarray]) -> Arrays:
        """``parts[i]`` goes to rank i; from each rank, in order, what it had for this one, which has one length everywhere."""
        return list(parts)

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        """What each rank has, in order; ``lengths`` says how many elements that is."""
        return [mine]

    def say(self, op: str, text: bytes) -> list[bytes]:
        """A short text of every rank, in order."""
        return [text]

    def duplicate(self) -> World:
        """The same ranks with traffic of their own, for another thread."""
        return World(self.timeout)

    def local_rank(self) -> int:
        """The place of this rank among those of its machine."""
        return self.rank

    def give_up(self, text: str) -> None:
        """Say that this rank has failed, to all who wait for it or will."""

    # ---- what is built on it

    def failed(self, error: BaseException) -> None:
        """This rank cannot go on because of an error: the others raise :class:`LostRankError` with its text, where they wait for this
        rank or will, instead of waiting for the time-out. Once is enough; what another rank is to blame for is not told again.

        Ranks that have all failed, and as often, are in step again and may go on.
        """
        blamed = isinstance(error, Exception) and not isinstance(error, LostRankError)
        if self.size > 1 and blamed and not getattr(error, "netcl_told", False):
            error.netcl_told = True  # type: ignore[attr-defined]  # by the innermost block that it leaves
            self.give_up(f"{type(error).__name__}: {error}"[:_LAST_WORDS])

    def together(self) -> AbstractContextManager[None]:
        """A block that all ranks run: an error by which one leaves it is told to the others, see :meth:`failed`.

        >>> with World().together():
        ...     loss = 1.0
        """
        return _Together(self)

    def tell(self, value: Any, op: str = "tell") -> list[Any]:
        """A small JSON value of every rank, in order."""
        return [json.loads(text) for text in self.say(op, json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait for all."""
        self.say("barrier", b"")

    def agree(self, op: str, what: str, value: Any) -> None:
        """Raise on every rank, naming those that differ from most, unless all have the same ``value``."""
        if self.size == 1:
            return
        told = self.tell(value, op)
        usual = max(told, key=told.count)
        others = {rank: given for rank, given in enumerate(told) if given != usual}
        if others:
            differing = ", ".join(f"rank {rank} has {given}" for rank, given in others.items())
            raise LostRankError(message(op, f"the ranks do not agree on {what}: {differing}", most=usual, world=self.size))

    def all_reduce(self, array: Any, op: str = "sum", *, compress: str | None = None, check: bool = True) -> np.ndarray:
        """The sum, mean, maximum or minimum over all ranks, the same bits on each.

        ``compress="bfloat16"`` sends float32 values as 16 bits (sums are float32); ``check=False`` leaves out the comparison of
        shapes, a round trip that a caller who has made it once can save.
        """
        given = np.asarray(array)
        check_op("all_reduce", op, given.dtype.name)
        if check:
            self.agree("all_reduce", "what is reduced", [op, list(given.shape), given.dtype.name, compress])
        if self.size == 1:
            return given.copy()
        flat = given.reshape(-1)
        pieces = [self._reduced(flat[i : i + PIECE], op, compress) for i in range(0, flat.size, PIECE)]
        return np.concatenate(pieces or [flat]).astype(given.dtype, copy=False).reshape(given.shape)

    def reduce_scatter(self, array: np.ndarray, op: str = "sum", *, compress: str | None = None) -> np.ndarray:
        """The part of the reduced array that belongs to this rank (``np.array_split``'s); half of an all-reduce."""
        coder = _Coder(array, compress)
        parts = self.exchange("reduce_scatter", [coder.pack(part) for part in np.array_split(array.reshape(-1), self.size)])
        return combine(op, [coder.unpack(part) for part in parts])

    def _reduced(self, flat: np.ndarray, op: str, compress: str | None) -> np.ndarray:
        coder = _Coder(flat, compress)
        mine = coder.pack(self.reduce_scatter(flat, op, compress=compress))
        lengths = [part.size for part in np.array_split(flat, self.size)]
        return np.concatenate([coder.unpack(part) for part in self.collect("all_reduce", mine, lengths)])

    def all_gather(self, array: Any) -> Arrays:
        """The arrays of all ranks, in order; they may differ in their shapes."""
        mine = np.ascontiguousarray(array)
        shapes = self.tell([list(mine.shape), mine.dtype.str], "all_gather")
        lengths = [math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes]
        found = self.collect("all_gather", mine.reshape(-1).view(np.uint8), lengths)
        return [part.view(kind).reshape(shape) for part, (shape, kind) in zip(found, shapes, strict=True)]

    def broadcast(self, array: Any, root: int = 0) -> np.ndarray:
        """What ``root`` has, on all ranks."""
        self._check_root("broadcast", root)
        mine = np.ascontiguousarray(array)
        self.agree("broadcast", "what is broadcast", [list(mine.shape), mine.dtype.str, root])
        return self.spread("broadcast", mine, root)

    def spread(self, op: str, array: np.ndarray, root: int) -> np.ndarray:
        """:meth:`broadcast` of an array whose shape all ranks know: a piece to each rank, then all pieces to all."""
        if self.size == 1:
            return array.copy()
        pieces = np.array_split(np.ascontiguousarray(array).reshape(-1).view(np.uint8), self.size)
        mine = self._from_root(op, pieces, root)
        return np.concatenate(self.collect(op, mine, [piece.size for piece in pieces])).view(array.dtype).reshape(array.shape)

    def _from_root(self, op: str, pieces: Sequence[np.ndarray], root: int) -> np.ndarray:
        """This rank's piece of what the root has."""
        return pieces[0]

    def gather(self, array: Any, root: int = 0) -> Arrays | None:
        """The arrays of all ranks on ``root``; ``None`` elsewhere."""
        self._check_root("gather", root)
        found = self.all_gather(array)
        return found if self.rank == root else None

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise ShapeError(message(op, "there is no such rank", root=root, world=self.size))


class _Coder:
    """How values travel: as they are, or float32 as bfloat16."""

    def __init__(self, array: np.ndarray, compress: str | None):
        if compress not in (None, "bfloat16"):
            raise ValueError(message("all_reduce", "unknown compression", "known: bfloat16", compress=repr(compress)))
        self.short = compress is not None and array.dtype == np.float32

    def pack(self, values: np.ndarray) -> np.ndarray:
        return dtypes.encode(values, _BFLOAT16) if self.short else np.ascontiguousarray(values)

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        return dtypes.decode(stored, _BFLOAT16) if self.short else stored


# ---- threads of one process


class _Table:
    """Where threads meet: each leaves something, and when all have, each takes everything. Calls must come in one order."""

    def __init__(self, size: int, like: _Table | None = None):
        self.size = size
        self.changed: threading.Condition = like.changed if like else threading.Condition()
        self.failures: Failures = like.failures if like else Failures()
        self.rounds: dict[int, dict[int, Any]] = {}

    def swap(self, rank: int, number: int, op: str, value: Any, timeout: float) -> list[Any]:
        with self.changed:
            places = self.rounds.setdefault(number, {})
            places[rank] = (op, value)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(places) == self.size or self.failures.without(rank), timeout)
            if len(places) < self.size:
                self.failures.check(op, rank, self.size)
                missing = [other for other in range(self.size) if other not in places]
                raise LostRankError(late(op, missing, timeout, self.size))
            self.rounds.pop(number - 2, None)  # everyone is past it: all have come to the round after
        names = {name for name, _ in places.values()}
        if len(names) > 1:
            calls = ", ".join(f"rank {other} calls {places[other][0]}" for other in range(self.size))
            raise LostRankError(message(op, f"the ranks do not call the same: {calls}", world=self.size))
        return [places[other][1] for other in range(self.size)]


def late(op: str, missing: Sequence[int], timeout: float, size: int, **where: object) -> str:
    """The text of an error about ranks that did not come."""
    names = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
    remedy = "look for its own error above; NETCL_COMM_TIMEOUT sets how long others wait"
    return message(op, f"{names} did not arrive within {timeout:g} s", remedy, world=size, **where)


class ThreadWorld(World):
    """One rank of several threads; made by :func:`thread_worlds`."""

    def __init__(self, rank: int, table: _Table, timeout: float | None = None):
        super().__init__(timeout)
        self.rank, self.size, self.table = rank, table.size, table
        self.number = 0

    def _swap(self, op: str, value: Any) -> list[Any]:
        self.number += 1
        return self.table.swap(self.rank, self.number, op, value, self.timeout)

    def exchange(self, op: str, parts: Sequence[np.ndarray]) -> Arrays:
        self.bytes_sent += sum(part.nbytes for other, part in enumerate(parts) if other != self.rank)
        return [given[self.rank] for given in self._swap(op, list(parts))]

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        self.bytes_sent += mine.nbytes * (self.size - 1)
        return self._swap(op, mine)

    def say(self, op: str, text: bytes) -> list[bytes]:
        return self._swap(op, text)

    def _from_root(self, op: str, pieces: Sequence[np.ndarray], root: int) -> np.ndarray:
        return self.exchange(op, pieces if self.rank == root else [NOTHING] * self.size)[root]

    def duplicate(self) -> World:
        return ThreadWorld(self.rank, self._swap("duplicate", _Table(self.size, self.table))[0], self.timeout)

    def give_up(self, text: str) -> None:
        with self.table.changed:
            self.table.failures.said[self.rank] = self.table.failures.count(self.rank) + 1, text
            self.table.changed.notify_all()


def thread_worlds(size: int, timeout: float | None = None) -> list[World]:
    """One world for each of ``size`` threads.

    >>> [world.rank for world in thread_worlds(2)]
    [0, 1]
    """
    table = _Table(size)
    return [ThreadWorld(rank, table, timeout) for rank in range(size)] if size > 1 else [World(timeout)]


# ---- waiting

#: Seconds between two looks for others: longer ones delay every message by as much, shorter ones take the processor from the device.
LONGEST_PAUSE = 2e-4


def wait_until(done: Callable[[], bool], timeout: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Whether ``done()`` came true in time. Looks often at first, then sleeps between looks, so that others get the processor."""
    end, pause = time.monotonic() + timeout, 0.0
    while not done():
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(pause)
        pause = min(pause + 1e-5, LONGEST_PAUSE)
    return True


@lru_cache(maxsize=1)
def world() -> World:
    """The world this process is part of: of an MPI job if ``mpiexec`` started it, else a world of one (mpi4py is not needed then)."""
    from netcl.distributed import mpi

    return mpi.MPIWorld() if mpi.started_by_mpi() else World()
