"""Builder processes: they compile the programs of a first run in parallel, while this process plans the calls that follow.

Drivers compile under a lock, so threads do not help. A builder is :mod:`netcl.core.kernels.compiler` as a script; a thread of this process
feeds it and keeps its answers. Where a builder ends or fails, this process builds the program itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from netcl.core import env, platforms
from netcl.core.hooks import hooks
from netcl.core.kernels import compiler
from netcl.core.waiting_runs import BUILDER_THREAD

MOST_BUILDERS, _LEAST_CORES = 14, 4
_ROOM = 1 << 32  # bytes of device memory per builder, whose context takes some hundred megabytes
_IDLE_SECONDS = 5.0


class BuildJob:
    """A program to compile. It is *queued*, then *begun* by a builder, then *done*; its binary is ``None`` if the builder failed."""

    def __init__(self, pool: BuilderPool, label: tuple[int, str], request: dict[str, Any], save: Callable[[bytes], None] | None):
        self.label, self.request, self.save = label, request, save
        self.weight = request["marked"], len(request["forms"][-1][0])  # a marked program is assembled twice
        self.pool = pool
        self.begun = self.done = False
        self.binary: bytes | None = None
        self.start = self.end = 0.0

    def wait(self) -> bytes | None:
        """Return the binary; ``None`` if no builder has begun the job, which is then no longer queued, or its builder failed."""
        with self.pool.changed:
            if self in self.pool.queued:
                self.pool.queued.remove(self)
            while self.begun and not self.done:
                self.pool.changed.wait()
        return self.binary


class BuilderPool:
    """The builder processes of one device, started when there is work for them and ended when they are idle."""

    def __init__(self, device: Any, most: int):
        same = device.platform.get_devices()
        self.command = [sys.executable, "-c", f"import runpy; runpy.run_path({compiler.__file__!r}, run_name='__main__')",
                        device.platform.name, str(same.index(device)), device.name]  # fmt: skip
        self.most = most
        self.changed = threading.Condition()
        self.queued: list[BuildJob] = []
        self.current: list[BuildJob] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.threads = 0
        self.closed = False

    def submit(self, label: tuple[int, str], request: dict[str, Any], save: Callable[[bytes], None] | None) -> BuildJob:
        """Queue a job; starts another builder for each job behind the first. This process builds a single one sooner.

        ``label`` is the program's number and its kernels; ``save`` stores the binary.
        """
        job = BuildJob(self, label, request, save)
        with self.changed:
            self.queued.append(job)
            free = self.threads - len(self.current)  # idle or starting
            if not self.closed and free < len(self.queued) - 1 and sum(pool.threads for pool in _all_pools) < self.most:
                try:
                    threading.Thread(target=self._serve, name=BUILDER_THREAD, daemon=True).start()
                    self.threads += 1
                except RuntimeError:  # at exit
                    self.closed = True
            self.changed.notify()
        return job

    def _serve(self) -> None:
        """Run one builder process, in a thread of its own."""
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env.for_child()) as process:
                self.processes.append(process)
                try:
                    _exchange(process, b"")  # it is ready
                    while (job := self._next()) is not None:
                        try:
                            job.binary = _exchange(process, json.dumps(job.request).encode() + b"\n")
                            if job.binary and job.save is not None:
                                job.save(job.binary)
                        finally:
                            self._finished(job)
                finally:
                    process.kill()
                    self.processes.remove(process)
        except (OSError, ValueError):  # the builder has ended: this process builds what is left
            with self.changed:
                self.most -= 1
        finally:
            with self.changed:
                self.threads -= 1

    def _next(self) -> BuildJob | None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.queued or self.closed, _IDLE_SECONDS) or self.closed:
                return None
            job = max(self.queued, key=lambda job: job.weight)  # the longest first, so that none is left at the end
            self.queued.remove(job)
            job.begun, job.start = True, time.perf_counter()
            self.current.append(job)
            return job

    def _finished(self, job: BuildJob) -> None:
        with self.changed:
            job.done, job.end = True, time.perf_counter()
            self.current.remove(job)
            self.changed.notify_all()

    def close(self) -> None:
        """End all builders."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for process in list(self.processes):
            process.kill()
            process.wait()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """Return what a builder answers; raises ``OSError`` or ``ValueError`` if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    size = int(process.stdout.readline())
    binary = process.stdout.read(max(size, 0))
    return binary if 0 < size == len(binary) else None


_all_pools: list[BuilderPool] = []


def pool_of(state: Any) -> BuilderPool | None:
    """Return the builders for the device of a context, created at first use; ``None`` where programs are built in this process."""
    if "builders" not in state:
        most = 0 if state.fragile else _most_builders(state.device)
        state["builders"] = pool = BuilderPool(state.device, most) if most else None
        if pool is not None:
            _all_pools.append(pool)
    return state["builders"]


def _most_builders(device: Any) -> int:
    """Return the most builders for a device. By default, only GPUs with a binary store have some."""
    wanted, cores = env.value("NETCL_BUILD_PROCESSES"), getattr(os, "sched_getaffinity", lambda _: ())(0)
    if hooks.binary_store is None or not cores or "python" not in os.path.basename(sys.executable):
        return 0  # the executable is another program if Python is embedded in it
    if wanted is not None:
        return wanted
    gpu = device.type & platforms.opencl().device_type.GPU
    return min(len(cores) - 2, MOST_BUILDERS, device.global_mem_size // _ROOM) if gpu and len(cores) >= _LEAST_CORES else 0


def current() -> tuple[int, str] | None:
    """Return the label of the oldest program that a builder compiles at this moment."""
    return next((job.label for pool in _all_pools for job in pool.current[:1]), None)


def close() -> None:
    """End all builders, at exit."""
    for pool in _all_pools:
        pool.close()
