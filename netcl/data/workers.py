"""Workers that prefetch batches: processes that write to shared memory, or threads of this process.

Worker ``b mod n`` makes batch ``b``, and batches are delivered in order. Unless the dataset is iterable, ``n`` affects only the time.
Processes are started by forkserver or spawn, never by fork, because OpenCL drivers do not support fork.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np

from netcl.data.collate import WholeBatch
from netcl.data.errors import TransferError, WorkerError, message
from netcl.data.fetch import Fetch, Task, check_batch, fields_of
from netcl.data.shared_batch import SharedBatchRingBuffer

START_SECONDS = 60.0  # a worker imports the program's main module before it serves
_POLL = 0.2
_READY = "ready"
_WHOLE, _DESCRIBE = -1, -2  # in place of a slot: answer with the batch itself, or with the form of its arrays
_TRAVEL = (
    "define everything that worker processes use at the top of a module, without lambda, and put the program's own work under "
    "`if __name__ == '__main__':`; or pass use_shared_mem=False, which makes the workers threads"
)
_GUARD = "put the work of a program that starts workers under `if __name__ == '__main__':`"


class Caught:
    """Stores the error of a block instead of raising it. An error of a dataset is raised later, when its batch is consumed."""

    def __init__(self, kind: type[BaseException] = Exception):
        self.kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.error = error
        return isinstance(error, self.kind)


class _Failure(NamedTuple):
    """The description of an error in a worker process, because the exception itself may not be picklable."""

    summary: str
    trace: str


# ---- in the worker process


def _serve(pipe: Any, fetch: Fetch, number: int, workers: int, seed: int) -> None:
    """The main function of a worker process: answers each request until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    from netcl.data.augment_gpu import manual_seed

    random.seed(seed + number)  # what a dataset draws is repeatable, and differs by worker
    np.random.seed((seed + number) % 2**32)
    manual_seed(seed + number)
    fetch.begin(number, workers, seed)
    try:
        pipe.send(_READY)
        ring: SharedBatchRingBuffer | None = None
        while True:
            request = pipe.recv()
            if request is None:
                ring = SharedBatchRingBuffer.receive(pipe)
            else:
                pipe.send(_answer(fetch, ring, number, *request))
    except (EOFError, ConnectionError):
        return  # the parent has closed its end


def _leave_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _answer(fetch: Fetch, ring: SharedBatchRingBuffer | None, number: int, task: Task, slot: int) -> Any:
    """Run a task and return its batch. With a ring, write it to ``slot`` if it fits, and return its size. On error, return a ``_Failure``.

    If ``slot`` is ``_DESCRIBE``, return the fields of the batch instead, or ``None`` for a :class:`WholeBatch`.
    """
    with Caught() as caught:
        if slot == _DESCRIBE:
            first = fetch(task)
            return None if isinstance(first, WholeBatch) else fields_of(first)
        if ring is None:
            return fetch(task)
        beats = ring.beats

        def beat() -> None:
            beats[number] += 1

        arrays: Any = fetch(task, beat)
        check_batch(arrays, ring.fields, len(task.indices))
        if len(task.indices) > ring.batch_size:  # of a batch_sampler whose first batch was smaller
            return arrays
        ring.put(slot, arrays)
        return len(task.indices)
    error = caught.error
    assert error is not None
    return _Failure(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


# ---- in the process that trains


class _Process:
    """One worker process and the pipe to it."""

    def __init__(self, number: int, fetch: Fetch, workers: int, seed: int):
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, fetch, number, workers, seed), name=f"netcl-data-{number}", daemon=True)
        with Caught() as caught:  # any error of pickling the dataset
            self.process.start()
        theirs.close()
        if caught.error is not None:
            raise TransferError(message("DataLoader", f"worker {number} cannot be started: {caught.error}", _TRAVEL)) from caught.error
        self.place = {"pid": self.process.pid}

    def send(self, request: Any, ring: SharedBatchRingBuffer | None = None) -> None:
        """Send a request; ``None`` announces the memory of ``ring``."""
        try:
            self.pipe.send(request)
            if ring is not None:
                ring.send(self.pipe, self.process.pid or 0)
        except OSError:
            raise self.died() from None

    def receive(self, patience: Callable[[], None]) -> Any:
        """Wait for the next answer. ``patience()`` is called repeatedly meanwhile and raises if the worker hangs."""
        while True:
            ready = connection.wait([self.pipe, self.process.sentinel], _POLL)
            if self.pipe in ready:
                try:
                    return self.pipe.recv()
                except (EOFError, OSError):
                    raise self.died() from None
            if ready:
                raise self.died()
            patience()

    def died(self) -> WorkerError:
        self.process.join(2)
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            remedy = "if the system ended it for lack of memory: use fewer workers or smaller batches"
        else:
            how, remedy = f"ended with exit code {code}", f"stderr may say why; {_GUARD}"
        return WorkerError(message("DataLoader", f"worker {self.number} {how}", remedy, **self.place))

    def close(self) -> None:
        self.pipe.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


def _close_all(workers: list[_Process], rings: list[SharedBatchRingBuffer]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.close()
    for ring in rings:
        ring.close()
    workers.clear()
    rings.clear()


class Pool:
    """Workers with queued tasks. The subclasses define how a task is sent, and how its batch is received.

    A worker has a ``number``, a ``place`` that error messages show, and a method ``receive``.
    """

    shares_memory = False
    _workers: list[Any]

    def __init__(self, ahead: int, timeout: float):
        self.ahead, self.timeout = ahead, timeout
        self._pending: deque[Task] = deque()
        self._lent: Task | None = None
        self.busy = False

    def __enter__(self) -> None:
        self.busy = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.busy = False
        if error is not None and not isinstance(error, GeneratorExit):  # a consumer that stops early leaves the pool unchanged
            self.close()

    def run(self, first: Task, others: Iterator[Task], following: Iterator[Task]) -> Iterator[Any]:
        """Yield the batches of the tasks in order, each valid until the next one is requested.

        After the last task, the tasks ``following`` are started, so that workers are not idle. Their batches are kept if the next run
        begins with these tasks. Runs must not overlap: ``busy`` is true during a run.
        """
        left = 1

        def counted() -> Iterator[Task]:
            nonlocal left
            for task in others:
                left += 1
                yield task
            yield from following

        with self:
            while self._pending and not self._pending[0].same_as(first):
                task = self._pending.popleft()
                self._answer(self._of(task), task)  # the answer is not used, so errors of its samples do not matter
                self._release(task)
            begun, coming = len(self._pending), counted()
            deque(islice(coming, max(begun - 1, 0)), maxlen=0)
            self._fill(coming if begun else chain([first], coming))
            while left:
                left -= 1
                if not self._pending:
                    raise WorkerError(message("DataLoader", "the loader must not be closed during an iteration"))
                task = self._pending.popleft()
                arrays = self._receive(task)
                self._lent = task
                self._fill(coming)
                try:
                    yield arrays
                finally:
                    if self._lent is task:
                        self._lent = None
                        self._release(task)

    @property
    def closed(self) -> bool:
        """Whether there are no workers."""
        return not self._workers

    def pids(self) -> list[int]:
        """Return the process ids of the workers; threads have none."""
        return []

    def close(self) -> None:
        """End the workers."""
        self._pending.clear()

    def _of(self, task: Task) -> Any:
        return self._workers[task.batch % len(self._workers)]

    def _fill(self, coming: Iterator[Task]) -> None:
        while len(self._pending) < self.ahead and (task := next(coming, None)) is not None:
            self._pending.append(task)
            self._send(task)

    def _send(self, task: Task) -> None:
        raise NotImplementedError

    def _receive(self, task: Task) -> Any:
        raise NotImplementedError

    def _release(self, task: Task) -> None:
        """Release the batch of a task after its use."""

    def _answer(self, worker: Any, task: Task) -> Any:
        return worker.receive(self._patience(worker, task, self.timeout))

    def _patience(self, worker: Any, task: Task, seconds: float) -> Callable[[], None]:
        """Return a function that raises after ``seconds`` without progress of the worker. Progress is a change of its beats."""
        seen, since = self._beats(worker), time.monotonic()

        def check() -> None:
            nonlocal seen, since
            beats = self._beats(worker)
            if beats != seen:
                seen, since = beats, time.monotonic()
            elif time.monotonic() - since > seconds:
                what = f"worker {worker.number} hangs: it must start a sample every {seconds:g} s"
                remedy = "if one sample may take that long, pass a larger timeout to the loader"
                raise WorkerError(message("DataLoader", what, remedy, **worker.place, batch=task.batch))

        return check

    def _beats(self, worker: Any) -> int:
        """Return how many samples a worker has started."""
        raise NotImplementedError


class ProcessPool(Pool):
    """Worker processes that write batches of arrays into the slots of one shared ring buffer, and send other batches through pipes."""

    shares_memory = True

    def __init__(self, fetch: Fetch, workers: int, ahead: int, batch_size: int, first: Task, timeout: float, seed: int = 0):
        if os.name == "nt":
            what = "worker processes cannot share memory as open files on Windows"
            raise WorkerError(message("DataLoader", what, "use_shared_mem=False makes the workers threads"))
        super().__init__(ahead, timeout)
        self._workers = []
        self._rings: list[SharedBatchRingBuffer] = []
        self._ring: SharedBatchRingBuffer | None = None
        self._slots: dict[tuple[int, ...], int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._workers, self._rings)
        with self:
            self._workers += [_Process(number, fetch, workers, seed) for number in range(workers)]
            self._share(first, batch_size, fetch.whole)

    def _share(self, first: Task, batch_size: int, whole: bool) -> None:
        """Determine the fields of batches from one sample of ``first``; if batches are arrays, share a new ring buffer with all workers."""
        for worker in self._workers:
            worker.receive(self._patience(worker, first, START_SECONDS))
        if whole:
            return
        self._workers[0].send((Task(first.batch, first.indices[:1], first.key), _DESCRIBE))
        fields = self._result(self._workers[0], first)
        if fields is None:
            return
        self._ring = SharedBatchRingBuffer(fields, batch_size, self.ahead + 1, len(self._workers))
        self._rings.append(self._ring)
        for worker in self._workers:
            worker.send(None, self._ring)

    def _send(self, task: Task) -> None:
        if self._ring is not None:
            self._slots[task.key] = self._ring.acquire()
        self._of(task).send((task, self._slots.get(task.key, _WHOLE)))

    def _receive(self, task: Task) -> Any:
        answer = self._result(self._of(task), task)
        if self._ring is None or isinstance(answer, tuple):
            return answer
        return self._ring.view(self._slots[task.key], len(task.indices))

    def _release(self, task: Task) -> None:
        slot = self._slots.pop(task.key, None)
        if slot is not None and self._ring is not None:  # otherwise the pool was closed meanwhile
            self._ring.release(slot)

    def _result(self, worker: _Process, task: Task) -> Any:
        answer = self._answer(worker, task)
        if isinstance(answer, _Failure):
            text = message("DataLoader", f"worker {worker.number} raised {answer.summary}", **worker.place, batch=task.batch)
            raise WorkerError(f"{text}\n\n{answer.trace}")
        return answer

    def _beats(self, worker: _Process) -> int:
        return int(self._ring.beats[worker.number]) if self._rings and self._ring is not None else -1

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def close(self) -> None:
        """End the workers and release the shared memory."""
        super().close()
        self._slots.clear()
        _close_all(self._workers, self._rings)


# ---- threads


class _Thread:
    """One worker thread with its two queues."""

    def __init__(self, number: int, fetch: Fetch, workers: int, seed: int):
        self.number, self.fetch, self.beats, self.begin = number, fetch, 0, partial(fetch.begin, number, workers, seed)
        self.inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"netcl-data-{number}", daemon=True)
        self.thread.start()
        self.place = {"thread": self.thread.name}

    def _serve(self) -> None:
        with Caught(BaseException) as begun:
            self.begin()
        while (task := self.inbox.get()) is not None:
            arrays = None
            with Caught(BaseException) as caught:  # a sys.exit() too: it would otherwise end the thread silently
                arrays = self.fetch(task, self._beat)
            self.outbox.put(begun.error or caught.error or arrays)

    def _beat(self) -> None:
        self.beats += 1

    def receive(self, patience: Callable[[], None]) -> Any:
        """Wait for the next answer. ``patience()`` is called repeatedly meanwhile and raises if the worker hangs."""
        while True:
            try:
                return self.outbox.get(timeout=_POLL)
            except queue.Empty:
                patience()


class ThreadPool(Pool):
    """Worker threads, without processes and shared memory, for datasets that read files or run in NumPy."""

    def __init__(self, fetch: Fetch, workers: int, ahead: int, timeout: float, seed: int = 0):
        super().__init__(ahead, timeout)
        self._workers = [_Thread(number, fetch, workers, seed) for number in range(workers)]
        self._finalizer = weakref.finalize(self, _stop_threads, self._workers)
        self._fields: Any = None

    def _send(self, task: Task) -> None:
        self._of(task).inbox.put(task)

    def _beats(self, worker: _Thread) -> int:
        return worker.beats

    def _receive(self, task: Task) -> Any:
        worker = self._of(task)
        answer = self._answer(worker, task)
        if isinstance(answer, BaseException):
            text = f"worker {worker.number} raised {type(answer).__name__}: {answer}"
            raise WorkerError(message("DataLoader", text, **worker.place, batch=task.batch)) from answer
        return self._checked(answer, task, worker)

    def _checked(self, arrays: Any, task: Task, worker: _Thread) -> Any:
        if isinstance(arrays, WholeBatch):
            return arrays
        self._fields = self._fields or fields_of(arrays)
        try:
            check_batch(arrays, self._fields, len(task.indices))
        except ValueError as error:
            raise WorkerError(message("DataLoader", f"worker {worker.number} raised {error}", batch=task.batch)) from error
        return arrays

    def close(self) -> None:
        """End the threads; one that hangs in a dataset remains as a daemon."""
        super().close()
        _stop_threads(self._workers)


def _stop_threads(workers: list[_Thread]) -> None:
    for worker in workers:
        worker.inbox.put(None)
    workers.clear()
