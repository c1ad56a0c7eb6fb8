"""The world of an MPI job, over mpi4py. Non-blocking collectives are polled; if they time out, the error names the missing ranks."""

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
from netcl.distributed.comm import PIECE, Arrays, Failures, LostRankError, World, late, mean_of

INSTALL = "pip install mpi4py mpich"
#: Variables that mpiexec of MPICH, Intel MPI, Open MPI or Slurm sets for the processes it starts.
_STARTED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMIX_RANK")
_MPI_OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN"}
_CALL, _ANSWER, _FAILED = 7001, 7002, 7003
#: Seconds a rank has to answer a roll call before it counts as missing.
ROLL_CALL = 2.0
#: Seconds until mpiexec has forwarded the output of a rank that is about to abort the job.
_FLUSH = 0.3
#: Up to this many ranks the job prints which pid each rank has: mpiexec names a killed process by its pid alone.
_INTRODUCED = 64
#: The longest pause between two polls, in seconds: it delays messages, while a shorter one takes processor time from the device.
LONGEST_PAUSE = 2e-4


def started_by_mpi() -> bool:
    """Whether mpiexec started this process."""
    return any(env.raw(name) is not None for name in _STARTED)


class MPIWorld(World):
    """One rank of an MPI job, whose world has all processes of the job and its own communicator."""

    def __init__(self, timeout: float | None = None, like: MPIWorld | None = None):
        super().__init__(timeout)
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(message("distributed", f"a process started by mpiexec requires mpi4py: {error}", INSTALL)) from error
        self.MPI = MPI
        self.comm: Any = (like.comm if like else self.MPI.COMM_WORLD).Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.deterministic = like is not None and like.deterministic
        self.calls: Any = like.calls if like else self.comm.Dup()
        self.failures: Failures = like.failures if like else Failures()
        self._abandoned: list[Callable[[], bool]] = []
        _abort_job_on_error(self.MPI, self.rank)
        self.doing = "start"
        self.processes: list[Any] = []
        self.processes = self.all_gather_object([socket.gethostname(), os.getpid()], "start")
        if like is None and self.rank == 0 and 1 < self.size <= _INTRODUCED:
            sys.stderr.write(f"netcl: {', '.join(self._process(rank) for rank in range(self.size))}\n")

    def _native(self, flat: np.ndarray, op: str, compress: str | None) -> bool:
        """Whether MPI reduces ``flat``. False if ``deterministic``, for bools, for compressed sums, and for max and min of floats (NaN)."""
        summed = op in ("sum", "mean") and not (compress and flat.dtype == np.float32)
        return not self.deterministic and flat.dtype.kind in ("iuf" if summed else "iu")

    def _all_reduced(self, flat: np.ndarray, op: str, compress: str | None) -> np.ndarray:
        if not self._native(flat, op, compress):
            return super()._all_reduced(flat, op, compress)
        total = np.empty_like(flat)
        self._wait("all_reduce", self.comm.Iallreduce(flat, total, getattr(self.MPI, _MPI_OPS[op])).Test)
        self.bytes_sent += 2 * flat.nbytes * (self.size - 1) // self.size
        return mean_of(op, total, self.size)

    def _reduce_scattered(self, flat: np.ndarray, op: str, compress: str | None) -> np.ndarray:
        if not self._native(flat, op, compress):
            return super()._reduce_scattered(flat, op, compress)
        counts = [b - a for a, b in pairwise(self.part_ends(flat.size))]
        mine = np.empty(counts[self.rank], flat.dtype)
        self._wait("reduce_scatter", self.comm.Ireduce_scatter(flat, mine, counts, getattr(self.MPI, _MPI_OPS[op])).Test)
        self.bytes_sent += flat.nbytes - mine.nbytes
        return mean_of(op, mine, self.size)

    def _all_to_all(self, op: str, flat: np.ndarray, ends: Sequence[int]) -> Arrays:
        length = ends[self.rank + 1] - ends[self.rank]
        received = np.empty((self.size, length), flat.dtype)
        counts, offsets = [(b - a) * flat.itemsize for a, b in pairwise(ends)], [a * flat.itemsize for a in ends[:-1]]
        own = [received.strides[0]] * self.size, [rank * received.strides[0] for rank in range(self.size)]
        request = self.comm.Ialltoallv([flat, counts, offsets, self.MPI.BYTE], [received, *own, self.MPI.BYTE])
        self.bytes_sent += flat.nbytes - counts[self.rank]
        self._wait(op, request.Test)
        return list(received)

    def collect(self, op: str, mine: np.ndarray, lengths: Sequence[int]) -> Arrays:
        starts = [0, *accumulate(lengths)]
        everything = np.empty(starts[-1], mine.dtype)
        counts, offsets = [length * mine.itemsize for length in lengths], [start * mine.itemsize for start in starts[:-1]]
        request = self.comm.Iallgatherv([np.ascontiguousarray(mine), self.MPI.BYTE], [everything, counts, offsets, self.MPI.BYTE])
        self.bytes_sent += mine.nbytes * (self.size - 1)
        self._wait(op, request.Test)
        return [everything[a:b] for a, b in pairwise(starts)]

    def _collect_text(self, op: str, text: bytes) -> list[bytes]:
        lengths = np.empty(self.size, np.int64)
        self._wait(op, self.comm.Iallgather(np.array([len(text)], np.int64), lengths).Test)
        return [part.tobytes() for part in self.collect(op, np.frombuffer(text, np.uint8), lengths.tolist())]

    def _from_root(self, array: np.ndarray, root: int) -> np.ndarray:
        result = array.copy()
        content = result.reshape(-1).view(np.uint8)
        for i in range(0, content.size, PIECE):
            self._wait("broadcast", self.comm.Ibcast([content[i : i + PIECE], self.MPI.BYTE], root).Test)
        self.bytes_sent += array.nbytes * (self.rank == root)
        return result

    def duplicate(self) -> World:
        return MPIWorld(self.timeout, self)

    def local_rank(self) -> int:
        return sum(1 for host, _ in self.processes[: self.rank] if host == self.processes[self.rank][0])

    def _process(self, rank: int) -> str:
        return "rank {0} is pid {2} on {1}".format(rank, *self.processes[rank])

    # ---- waiting, and finding out who is missing

    def _wait(self, op: str, done: Callable[[], bool]) -> None:
        """Poll a request until it completes; raise :class:`LostRankError` at the timeout or when another rank reports a failure."""
        self.doing = op
        arrived = False
        try:
            arrived = _poll(done, self.timeout, self._attend)
        except self.MPI.Exception as error:
            raise LostRankError(message(op, f"MPI failed: {error}", rank=self.rank, world=self.size)) from error
        finally:
            if not arrived:  # keep the request and thereby its buffers, which MPI may still write to
                self._abandoned.append(done)
        if not arrived:
            missing = self._roll_call()
            known = ", ".join(self._process(rank) for rank in missing if self.processes)
            raise LostRankError(late(op, missing, self.timeout, self.size, waiting=f"rank {self.rank}", processes=f"[{known}]"))

    def _report_failure(self, text: str) -> None:
        report = self.failures.add(self.rank, text)
        for rank in range(self.size):
            if rank != self.rank:
                self.calls.isend(report, rank, _FAILED)

    def _attend(self) -> None:
        """Answer the roll calls of other ranks, and raise if another rank has reported a failure. Called between two polls."""
        self._answer()
        self.failures.reported.update(self._mail(_FAILED))
        if self.failures.reported:
            self.failures.check(self.doing, self.rank, self.size)

    def _answer(self) -> None:
        for caller in self._mail(_CALL):
            self.calls.isend(self.doing, caller, _ANSWER)

    def _mail(self, tag: int) -> dict[int, Any]:
        """Return the messages with a tag that have arrived, by sender. Matched probes let several threads receive at once."""
        found, status = {}, self.MPI.Status()
        while (letter := self.calls.improbe(self.MPI.ANY_SOURCE, tag, status)) is not None:
            sender = status.Get_source()
            found[sender] = letter.recv()
        return found

    def _roll_call(self) -> list[int]:
        """Return the ranks that do not answer within :data:`ROLL_CALL` seconds: they are dead, or not in a collective call."""
        others = {rank for rank in range(self.size) if rank != self.rank}
        for rank in others:
            self.calls.isend(self.doing, rank, _CALL)

        def all_here() -> bool:
            others.difference_update(self._mail(_ANSWER))
            return not others

        _poll(all_here, ROLL_CALL, self._answer)
        return sorted(others)


def _poll(done: Callable[[], bool], timeout: float, meanwhile: Callable[[], None]) -> bool:
    """Poll until ``done()`` is true; returns False after ``timeout`` seconds. Growing pauses let other threads and ranks run."""
    end, pause = time.monotonic() + timeout, 0.0
    while not done():
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(pause)
        pause = min(pause + 1e-5, LONGEST_PAUSE)
    return True


def _abort_job_on_error(MPI: Any, rank: int) -> None:
    """Make an uncaught error abort the whole job and name this rank; otherwise the other ranks would wait for the timeout."""
    usual = sys.excepthook
    if getattr(usual, "ends_job", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"netcl: rank {rank} ends the job: {error}\n{text}")
        sys.stderr.flush()
        time.sleep(_FLUSH)
        MPI.COMM_WORLD.Abort(1)

    hook.ends_job = True  # type: ignore[attr-defined]
    sys.excepthook = hook
