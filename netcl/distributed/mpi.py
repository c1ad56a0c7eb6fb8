"""The world of an MPI job, over mpi4py: MPI carries the bytes, this file waits with a limit and names who is missing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any

import numpy as np

from netcl.core import env
from netcl.core.errors import message
from netcl.distributed.comm import NOTHING, Arrays, Failures, LostRankError, World, late, wait_until

INSTALL = 'install the extra "mpi" of this checkout: pip install -e ".[mpi]"'
#: Variables that mpiexec of MPICH, Intel MPI, Open MPI or Slurm sets for the processes it starts, with their number.
_STARTED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMIX_RANK")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_CALL, _ANSWER, _FAILED = 7001, 7002, 7003
#: Seconds a rank has to answer a roll call before it counts as missing.
ROLL_CALL = 2.0
#: mpiexec forwards what a rank writes; seconds until a rank that ends the job may be sure that it was.
_LAST_WORDS = 0.3
#: mpiexec names a killed process by its pid alone: up to this many ranks, the job says once which rank that is.
_INTRODUCED = 64


def started_by_mpi() -> bool:
    """Whether mpiexec started this process."""
    return any(env.raw(name) is not None for name in _STARTED)


def rank_by_launcher() -> str:
    """The rank of this process by what mpiexec set for it, without starting MPI."""
    return next((text for name in _RANKS if (text := env.raw(name)) is not None), "?")


def engine() -> Any:
    """mpi4py's MPI, initialised; ``ImportError`` with the remedy without it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(message("distributed", f"mpi4py required: {error}", INSTALL)) from error
    return MPI


class MPIWorld(World):
    """All processes of the job, or of a communicator."""

    def __init__(self, timeout: float | None = None, like: MPIWorld | None = None):
        super().__init__(timeout)
        self.MPI = engine()
        self.comm: Any = (like.comm if like else self.MPI.COMM_WORLD).Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.calls: Any = like.calls if like else self.comm.Dup()
        self.failures: Failures = like.failures if like else Failures()
        self._abandoned: list[Callable[[], bool]] = []
        _end_job_on_error(self.MPI, self.rank)
        self.doing = "start"
        self.people: list[Any] = []
        self.people = self.tell([socket.gethostname(), os.getpid()], "start")
        if like is None and self.rank == 0 and 1 < self.size <= _INTRODUCED:
            sys.stderr.write(f"netcl: {', '.join(self._person(rank) for rank in range(self.size))}\n")

    def exchange(self, op: str, parts: Sequence[np.ndarray]) -> Arrays:
        mine = parts[self.rank]
        received = np.empty((self.size, mine.size), mine.dtype)
        self._all_to_all(op, parts, [received[rank] for rank in range(self.size)])
        return list(received)

    def _all_to_all(self, op: str, out: Sequence[np.ndarray], into: Sequence[np.ndarray]) -> None:
        """Point to point, so that each pair's bytes travel once and nothing is copied together first."""
        into[self.rank][...] = out[self.rank]
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [self.comm.Irecv([into[rank], self.MPI.BYTE], rank) for rank in reversed(others) if into[rank].nbytes]
        requests += [self.comm.Isend([out[rank], self.MPI.BYTE], rank) for rank in others if out[rank].nbytes]
        self.bytes_sent += sum(out[rank].nbytes for rank in others)
        self._wait(op, lambda: self.MPI.Request.Testall(requests))

    def _from_root(self, op: str, pieces: Sequence[np.ndarray], root: int) -> np.ndarray:
        mine = np.empty_like(pieces[self.rank])
        out = pieces if self.rank == root else [NOTHING] * self.size
        self._all_to_all(op, out, [mine if rank == root else NOTHING for rank in range(self.size)])
        return mine

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        counts = [length * mine.itemsize for length in lengths]
        starts = [0, *accumulate(lengths)]
        everything = np.empty(starts[-1], mine.dtype)
        sent = np.ascontiguousarray(mine)
        offsets = [start * mine.itemsize for start in starts[:-1]]
        request = self.comm.Iallgatherv([sent, self.MPI.BYTE], [everything, counts, offsets, self.MPI.BYTE])
        self.bytes_sent += mine.nbytes * (self.size - 1)
        self._wait(op, request.Test)
        return [everything[a:b] for a, b in pairwise(starts)]

    def say(self, op: str, text: bytes) -> list[bytes]:
        length = np.array([len(text)], np.int64)
        lengths = np.empty(self.size, np.int64)
        request = self.comm.Iallgather(length, lengths)
        self._wait(op, request.Test)
        given = np.frombuffer(text, np.uint8)
        return [part.tobytes() for part in self.collect(op, given, lengths.tolist())]

    def duplicate(self) -> World:
        return MPIWorld(self.timeout, self)

    def local_rank(self) -> int:
        return sum(1 for host, _ in self.people[: self.rank] if host == self.people[self.rank][0])

    def _person(self, rank: int) -> str:
        return "rank {0} is pid {2} on {1}".format(rank, *self.people[rank])

    # ---- waiting, and who is missing

    def _wait(self, op: str, done: Callable[[], bool]) -> None:
        self.doing = op
        arrived = False
        try:
            arrived = wait_until(done, self.timeout, self._attend)
        except self.MPI.Exception as error:
            raise LostRankError(message(op, f"MPI failed: {error}", rank=self.rank, world=self.size)) from error
        finally:
            if not arrived:  # what still may come is written to memory that only the request keeps
                self._abandoned.append(done)
        if not arrived:
            missing = self._roll_call()
            known = ", ".join(self._person(rank) for rank in missing if self.people)
            raise LostRankError(late(op, missing, self.timeout, self.size, waiting=f"rank {self.rank}", people=f"[{known}]"))

    def give_up(self, text: str) -> None:
        said = self.failures.said[self.rank] = self.failures.count(self.rank) + 1, text
        for rank in range(self.size):
            if rank != self.rank:
                self.calls.isend(said, rank, _FAILED)

    def _attend(self) -> None:
        """While this rank waits: answer those who call, hear of those who failed."""
        self._answer()
        self.failures.said.update(self._mail(_FAILED))
        if self.failures.said:
            self.failures.check(self.doing, self.rank, self.size)

    def _answer(self) -> None:
        """Tell those who ask that this rank is here."""
        for caller in self._mail(_CALL):
            self.calls.isend(self.doing, caller, _ANSWER)

    def _mail(self, kind: int) -> dict[int, Any]:
        """The messages of a kind that have come, by sender. A matched probe: several threads may look at once."""
        found, status = {}, self.MPI.Status()
        while (letter := self.calls.improbe(self.MPI.ANY_SOURCE, kind, status)) is not None:
            sender = status.Get_source()
            found[sender] = letter.recv()
        return found

    def _roll_call(self) -> list[int]:
        """The ranks that do not answer: they are dead, or busy with something that is no collective call."""
        others = {rank for rank in range(self.size) if rank != self.rank}
        for rank in others:
            self.calls.isend(self.doing, rank, _CALL)

        def all_here() -> bool:
            others.difference_update(self._mail(_ANSWER))
            return not others

        wait_until(all_here, ROLL_CALL, self._answer)
        return sorted(others)


def _end_job_on_error(MPI: Any, rank: int) -> None:
    """An error nobody caught ends the whole job and says on which rank it was: the others would wait for this one until their time-out."""
    usual = sys.excepthook
    if getattr(usual, "ends_job", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"netcl: rank {rank} ends the job: {error}\n{told}")
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        MPI.COMM_WORLD.Abort(1)

    hook.ends_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
