"""DataLoader: batches of a dataset, in an order a seed fixes, made ahead by workers, delivered as arrays or on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from netcl.data.errors import message
from netcl.data.fetch import Fetch, Task, steps
from netcl.data.workers import ProcessPool, ThreadPool

_ORDER, _DRAWS = 0, 1  # what random numbers are for: the order of an epoch, the transforms of a batch


class DataLoader:
    """Iterates over the batches of a dataset: ``for x, y in loader``.

    - **dataset**: has ``__len__`` and ``__getitem__``; with ``take(indices)`` as well, batches are fetched at once.
    - **batch_size, shuffle, drop_last**: one sample at a time and in order, as in torch; ``drop_last`` leaves out a last, smaller batch.
    - **num_workers**: 0 fetches in this thread. Workers stay from epoch to epoch; order and augmentations do not depend on their number.
    - **prefetch**: batches each worker makes ahead; 2 unless told.
    - **seed**: fixes order and augmentations; without one, each loader draws its own.
    - **transforms**: functions of a sample's ``x``, one or several; one with a parameter ``rng`` gets the batch's generator.
    - **use_shared_mem**: workers are processes that write into shared memory; ``False`` makes them threads.
    - **device_queue**: a queue or a device handle; batches are then tensors there, the next one on its way while one is worked on.
    - **augment**: functions of a whole batch ``(x, rng=...)``, of :mod:`netcl.data.augment` (in the workers) or of
      :mod:`netcl.data.augment_gpu` (on the device).
    - **pin_memory**: transfers go through page-locked memory, whatever NETCL_PINNED_H2D says.

    ``state_dict()`` is the position: within an epoch, after the batch last delivered. A worker that raises, dies or is silent for
    ``timeout`` seconds over one sample ends the iteration with a :class:`~netcl.data.errors.WorkerError` that names it.

    >>> from netcl.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(np.arange(5)), batch_size=2)
    >>> [batch.tolist() for batch in loader], len(loader)
    ([[0, 1], [2, 3], [4]], 3)
    """

    timeout: float = 10.0

    def __init__(
        self, dataset: Any, batch_size: int = 1, shuffle: bool = False, drop_last: bool = False, num_workers: int = 0,
        prefetch: int | None = None, seed: int | None = None, transforms: Any = None, use_shared_mem: bool = True,
        device_queue: Any = None, augment: Any = None, pin_memory: bool = False,
    ):  # fmt: skip
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            remedy = "write __len__ and __getitem__; what is only iterable goes into a list first"
            raise TypeError(message("DataLoader", "a dataset has a length and samples by number", remedy, given=type(dataset).__name__))
        _check_number("batch_size", batch_size, 1)
        _check_number("num_workers", num_workers, 0)
        _check_number("prefetch", 2 if prefetch is None else prefetch, 1)
        _check_number("seed", 0 if seed is None else seed, 0)
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, int(batch_size), bool(shuffle), bool(drop_last)
        self.num_workers, self.prefetch = int(num_workers), 2 if prefetch is None else int(prefetch)
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        self.use_shared_mem, self.device_queue, self.pin_memory = use_shared_mem, device_queue, pin_memory
        self.augment = augment
        here = [step.call for step in steps(augment, "augment") if not getattr(step.call, "on_device", False)]
        self._on_device = tuple(step for step in steps(augment, "augment") if getattr(step.call, "on_device", False))
        if self._on_device and device_queue is None:
            raise ValueError(message("DataLoader", "augmentations on the device need a device", "pass device_queue="))
        self._fetch = Fetch(dataset, transforms, here)
        self._pool: ProcessPool | ThreadPool | None = None
        self._epoch, self._batch, self._at_position = 0, 0, True
        self._iterations = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        n = len(self.dataset) / self.batch_size
        return math.floor(n) if self.drop_last else math.ceil(n)

    @property
    def epoch(self) -> int:
        """The epoch the loader is in, or, after one, the next."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        if not self._at_position:  # the last iteration was left in the middle
            self._epoch, self._batch = self._epoch + 1, 0
        self._at_position = False
        self._iterations += 1
        return self._epoch_from(self._epoch, self._batch, self._iterations)

    def _epoch_from(self, epoch: int, start: int, iteration: int) -> Iterator[Any]:
        batches = self._arrays(epoch, start)
        for batch in batches if self.device_queue is None else self._tensors(batches, epoch, start):
            self._batch += 1
            yield batch[0] if len(batch) == 1 else batch
            if iteration != self._iterations:
                what = "this iteration has ended: another one of the same loader began"
                raise RuntimeError(message("DataLoader", what, "make a second loader to have two at once"))
        self._epoch, self._batch, self._at_position = epoch + 1, 0, True

    # ---- batches

    def _tasks(self, epoch: int, start: int) -> Iterator[Task]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng((self.seed, _ORDER, epoch)).shuffle(order)
        for batch in range(start, len(self)):
            yield Task(batch, order[batch * self.batch_size : (batch + 1) * self.batch_size], self._key(epoch, batch))

    def _key(self, epoch: int, batch: int) -> tuple[int, ...]:
        return (self.seed, _DRAWS, epoch, batch)

    def _arrays(self, epoch: int, start: int) -> Iterator[tuple[np.ndarray, ...]]:
        """The batches as arrays; for a device they may still lie in a slot of the ring."""
        if not self.num_workers:
            for task in self._tasks(epoch, start):  # not map(): a StopIteration of the dataset would end the epoch without a word
                yield self._fetch(task)
        elif tasks := list(self._tasks(epoch, start)):
            pool = self._workers(tasks[0])
            copied = pool.shares_memory and self.device_queue is None
            for arrays in pool.run(tasks, self._tasks(epoch + 1, 0)):
                yield tuple(array.copy() for array in arrays) if copied else arrays

    def _tensors(self, batches: Iterator[tuple[np.ndarray, ...]], epoch: int, start: int) -> Iterator[tuple[Any, ...]]:
        """The batches on the device: while one is worked on, the next is on its way."""
        from netcl.data.augment_gpu import Feed

        feed = Feed(self.device_queue, self.pin_memory)
        sent: tuple[Any, ...] | None = None
        for batch, arrays in enumerate(chain(batches, [None]), start):
            tensors = None if sent is None else self._augmented(feed.ready(sent), epoch, batch - 1)
            sent = None if arrays is None else feed.send(arrays)
            if tensors is not None:
                yield tensors

    def _augmented(self, tensors: tuple[Any, ...], epoch: int, batch: int) -> tuple[Any, ...]:
        key = self._key(epoch, batch)
        rng = np.random.default_rng((*key, 1) if self._fetch.draws else key)  # not what was drawn on the host for the same batch
        for step in self._on_device:
            tensors = step(tensors, rng)
        return tensors

    def _workers(self, first: Task) -> ProcessPool | ThreadPool:
        if self._pool is None or self._pool.closed:
            ahead = self.num_workers * self.prefetch
            if self.use_shared_mem:
                self._pool = ProcessPool(self._fetch, self.num_workers, ahead, self.batch_size, first, self.timeout)
            else:
                self._pool = ThreadPool(self._fetch, self.num_workers, ahead, self.timeout)
        self._pool.timeout = self.timeout
        return self._pool

    # ---- position and end

    def state_dict(self) -> dict[str, int]:
        """The position: what :meth:`load_state_dict` needs to go on with the batch after the last one delivered."""
        return {"seed": self.seed, "epoch": self._epoch, "batch": self._batch, "batch_size": self.batch_size, "samples": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; the dataset and the batch size must be those it was taken with."""
        names = self.state_dict().keys()
        if state.keys() != names or any(
            isinstance(state[name], bool) or not isinstance(state[name], int) or state[name] < 0 for name in names
        ):
            raise ValueError(message("DataLoader", "this is not the state of a loader", state=dict(state), expected=list(names)))
        for name, own in (("batch_size", self.batch_size), ("samples", len(self.dataset))):
            if state[name] != own:
                raise ValueError(message("DataLoader", f"the state was taken with another {name}", state=state[name], loader=own))
        if state["batch"] > len(self):
            raise ValueError(message("DataLoader", "the epoch has fewer batches", batch=state["batch"], batches=len(self)))
        self.seed, self._epoch, self._batch, self._at_position = state["seed"], state["epoch"], state["batch"], True

    def worker_pids(self) -> list[int]:
        """The process numbers of the workers that live."""
        return self._pool.pids() if self._pool is not None else []

    def close(self) -> None:
        """End the workers and give shared memory back. The loader can still be used: it starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(message("DataLoader", f"{name} is a whole number from {least} on", **{name: repr(value)}))
