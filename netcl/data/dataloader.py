"""DataLoader: batches of a dataset, optionally prefetched by workers and copied to a device."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from types import GenericAlias
from typing import Any

import numpy as np

from netcl.data.collate import WholeBatch, map_arrays, only_sample
from netcl.data.dataset import IterableDataset, attributes, same_attributes
from netcl.data.errors import check_count, message
from netcl.data.fetch import Fetch, Task, no_augmenting, steps
from netcl.data.sampler import BatchSampler, generators_of, rng_of
from netcl.data.workers import Caught, ProcessPool, ThreadPool

_ORDER, _DRAWS = 0, 1  # uses of random numbers: the order of an epoch, the transforms of a batch
#: What workers have a copy of, or other attributes depend on.
_SET_ONCE = {"dataset", "batch_size", "drop_last", "sampler", "batch_sampler", "num_workers", "collate_fn", "worker_init_fn", "augment"}


#: Called with a name, the begin and the end (``time.perf_counter``) of every wait for a batch. Filled by profilers.
batch_listeners: list[Callable[[str, float, float], None]] = []


def _timed(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches and report to :data:`batch_listeners` how long each took."""
    for number in count():
        began = time.perf_counter() if batch_listeners else 0.0
        try:
            batch = next(batches)
        except StopIteration:
            return
        for listener in list(batch_listeners) if began else ():
            listener(f"batch {number}", began, time.perf_counter())
        yield batch


class DataLoader:
    """Iterates over the batches of a dataset: ``for x, y in loader``.

    - **dataset**: has ``__len__`` and ``__getitem__``, or is an :class:`~netcl.data.IterableDataset`. If it has ``take(indices)`` and
      there are no ``transforms`` and no ``collate_fn``, batches are fetched at once.
    - **batch_size, shuffle, drop_last**: by default one sample at a time, in order; ``drop_last`` leaves out a smaller last batch.
      ``batch_size=None`` delivers single samples, without a batch dimension.
    - **num_workers**: 0 fetches in this thread. Workers stay from epoch to epoch, unless ``persistent_workers=False`` or an attribute of
      the dataset has changed. Except for iterable datasets, order and augmentations do not depend on their number.
    - **prefetch**: batches each worker makes ahead; 2 by default.
    - **seed**: fixes order and augmentations; without one, each loader draws its own, which follows ``netcl.manual_seed``. Worker processes
      seed ``random``, ``numpy.random`` and netcl's generator with the sum of this seed and their number.
    - **transforms**: one or several functions of a sample's ``x``; a function with a parameter ``rng`` gets a seeded generator.
    - **use_shared_mem**: workers are processes that write arrays into shared memory; ``False`` makes them threads.
    - **device_queue** or **device**: a queue, a device handle or a selector; arrays of batches become tensors there, and the
      next batch is copied while the current one is used.
    - **augment**: functions of a whole batch ``(x, rng=...)``, of :mod:`netcl.data.augment` (in the workers) or of
      :mod:`netcl.data.augment_gpu` (on the device).
    - **pin_memory**: transfers to devices with their own memory use page-locked memory, whatever NETCL_PINNED_H2D says.
    - **sampler**: yields sample indices; replaces ``shuffle``.
    - **batch_sampler**: yields lists of sample indices; replaces ``shuffle``, ``batch_size`` and ``drop_last``.
    - **collate_fn**: makes a batch of a list of samples. Without one, arrays are stacked; dicts, named tuples and strings are batched by
      :func:`~netcl.data.default_collate`.
    - **worker_init_fn**: called with the worker's number in every worker that starts; **generator**: draws a missing ``seed``.
    - **timeout**: seconds that a worker may spend on one sample, or on a batch that is fetched at once or is not of arrays; 10 by default.

    Every worker reads an iterable dataset to its end. Several iterations may run at once. ``state_dict()`` holds the position. A worker
    that raises, dies or exceeds ``timeout`` ends the iteration with a :class:`~netcl.data.errors.WorkerError` that names the worker.

    >>> from netcl.data import TensorDataset
    >>> loader = DataLoader(TensorDataset(np.arange(5)), batch_size=2)
    >>> [batch.tolist() for batch in loader], len(loader)
    ([[0, 1], [2, 3], [4]], 3)
    """

    __class_getitem__: Any = classmethod(GenericAlias)  # DataLoader[int], as in torch
    timeout: float = 10.0

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool = False, drop_last: bool = False, num_workers: int = 0,
        prefetch: int | None = None, seed: int | None = None, transforms: Any = None, use_shared_mem: bool = True,
        device_queue: Any = None, augment: Any = None, pin_memory: bool = False, *, sampler: Any = None, batch_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None, worker_init_fn: Callable[[int], None] | None = None, generator: Any = None,
        persistent_workers: bool = True, timeout: float | None = None, device: Any = None,
    ):  # fmt: skip
        if batch_size is None:
            if drop_last or batch_sampler is not None:
                what = "batch_size=None cannot be combined with drop_last or batch_sampler"
                raise ValueError(message("DataLoader", what, "leave them out"))
            batch_size, collate_fn = 1, partial(only_sample, collate_fn)
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool | int | np.bool_):  # torch has a sampler in the place of drop_last
                raise TypeError(message("DataLoader", f"{name} must be true or false", "pass samplers by name", given=type(flag).__name__))
        streams = isinstance(dataset, IterableDataset)
        if not streams and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            remedy = "write __len__ and __getitem__, or derive from IterableDataset"
            raise TypeError(message("DataLoader", "a dataset must have __len__ and __getitem__", remedy, given=type(dataset).__name__))
        self.batch_size = check_count("DataLoader", "batch_size", batch_size)
        self.num_workers = check_count("DataLoader", "num_workers", num_workers, 0)
        self.prefetch = check_count("DataLoader", "prefetch", 2 if prefetch is None else prefetch)
        self.seed = check_count("DataLoader", "seed", int(rng_of(generator).integers(2**32)) if seed is None else seed, 0)
        self.dataset, self.shuffle, self.drop_last = dataset, bool(shuffle), bool(drop_last)
        _check_samplers(sampler, batch_sampler, shuffle, drop_last, self.batch_size, streams)
        self.sampler = sampler
        self.batch_sampler = BatchSampler(sampler, self.batch_size, self.drop_last) if sampler is not None else batch_sampler
        self.timeout = self.timeout if timeout is None else timeout
        self.collate_fn, self.worker_init_fn, self.persistent_workers = collate_fn, worker_init_fn, persistent_workers
        device_queue = device if device_queue is None else device_queue
        self.use_shared_mem, self.device_queue, self.pin_memory = use_shared_mem, device_queue, pin_memory
        self.augment = augment
        augmenting = steps(augment, "augment")
        here = [step.call for step in augmenting if not getattr(step.call, "on_device", False)]
        self._on_device = tuple(step for step in augmenting if getattr(step.call, "on_device", False))
        if self._on_device and device_queue is None:
            raise ValueError(message("DataLoader", "augmentations on the device require a device", "pass device="))
        self._fetch = Fetch(dataset, transforms, here, collate_fn, worker_init_fn, self.drop_last)
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pool: ProcessPool | ThreadPool | None = None
        self._sent: list[object] = []  # the attributes of the dataset when the workers began
        self.epoch = 0  # the current one or, after one has ended, the next
        self._batch, self._at_position = 0, True
        self._generators = generators_of(self.batch_sampler)
        self._drawn_from: list[Any] = []  # the states of the generators when the epoch began
        self._iterations = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_ONCE and name in vars(self):
            raise ValueError(message("DataLoader", f"{name} must not be changed after the loader was made", "make another loader"))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        streams = isinstance(self.dataset, IterableDataset)
        of = type(self.dataset).__name__ if streams else f"{type(self.dataset).__name__} of {len(self.dataset)}, {len(self)} batches"
        shown = {name: getattr(self, name) for name in ("batch_size", "shuffle", "drop_last", "num_workers")}
        return f"{type(self).__name__}({of}, {', '.join(f'{name}={value}' for name, value in shown.items())}, epoch={self.epoch})"

    def __len__(self) -> int:
        """The number of batches per epoch."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        n = len(self.dataset) / self.batch_size
        return math.floor(n) if self.drop_last else math.ceil(n)

    def __iter__(self) -> Iterator[Any]:
        if not self._at_position:  # the last iteration was left in the middle
            self.epoch, self._batch = self.epoch + 1, 0
        self._at_position = False
        self._iterations, self._drawn_from = self._iterations + 1, self._generator_states()
        return self._epoch_from(self.epoch, self._batch, self._iterations)

    def _epoch_from(self, epoch: int, start: int, iteration: int) -> Iterator[Any]:
        batches = self._live(self._arrays(epoch, start))
        for batch in _timed(batches if self.device_queue is None else self._tensors(batches, epoch, start)):
            if iteration == self._iterations:  # of several iterations, the one started last is the loader's position
                self._batch += 1
            yield batch.value if isinstance(batch, WholeBatch) else self._delivered(batch)
        if iteration == self._iterations:
            self.epoch, self._batch, self._at_position = epoch + 1, 0, True

    def _delivered(self, batch: tuple[Any, ...]) -> Any:
        return batch[0] if len(batch) == 1 else batch

    def _live(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches without the end markers of workers; the last marker ends the epoch."""
        ended: set[int] = set()
        workers = max(self.num_workers, 1)
        for number, batch in enumerate(batches):
            if isinstance(batch, WholeBatch) and batch.ended:
                ended.add(number % workers)
                if len(ended) == workers:
                    return
            else:
                yield batch

    def _tasks(self, epoch: int, start: int) -> Iterator[Task]:
        if self._fetch.streams:
            blank = np.zeros(self.batch_size, np.int64)
            yield from (Task(batch, blank, self._key(epoch, batch)) for batch in count())
        if self.batch_sampler is not None:
            for batch, indices in enumerate(self.batch_sampler):
                if batch >= start:
                    yield Task(batch, _whole_numbers(indices), self._key(epoch, batch))
            return
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng((self.seed, _ORDER, epoch)).shuffle(order)
        for batch in range(start, len(self)):
            yield Task(batch, order[batch * self.batch_size : (batch + 1) * self.batch_size], self._key(epoch, batch))

    def _key(self, epoch: int, batch: int) -> tuple[int, ...]:
        return (self.seed, _DRAWS, epoch, batch)

    def _arrays(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield each batch as a tuple of arrays or a ``WholeBatch``. For a device, the arrays may be views of a slot of the ring buffer."""
        tasks = self._tasks(epoch, start)
        if not self.num_workers:
            stream = iter(self.dataset) if self._fetch.streams else None
            for task in tasks:  # not map(): a StopIteration of the dataset would end the epoch without a word
                yield self._fetch(task) if stream is None else self._fetch.of_stream(stream, task)
        elif (first := next(tasks, None)) is not None:
            pool = self._workers(first)
            copied = pool.shares_memory and self.device_queue is None
            drawn_here = self.batch_sampler is None and not self._fetch.streams and self.persistent_workers
            following: Iterator[Task] = self._tasks(epoch + 1, 0) if drawn_here else iter(())
            try:
                for arrays in pool.run(first, tasks, following):
                    yield tuple(array.copy() for array in arrays) if copied and not isinstance(arrays, WholeBatch) else arrays
            finally:
                if pool is not self._pool or not self.persistent_workers:
                    pool.close()

    def _tensors(self, batches: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches on the device; the next batch is copied while the current one is used."""
        from netcl.data.augment_gpu import Feed

        feed = Feed(self.device_queue, self.pin_memory)
        sent: tuple[Any, ...] | None = None
        before: Any = None
        for batch in count(start):
            with Caught() as caught:  # is raised after the batch that has been copied
                arrays = next(batches, None)
            tensors: Any = None
            if sent is not None:
                ready = iter(feed.ready(sent))
                tensors = self._augmented(map_arrays(lambda _: next(ready), before), epoch, batch - 1)  # noqa: B023
            if caught.error is None and arrays is not None:
                leaves: list[np.ndarray] = []
                map_arrays(leaves.append, arrays)
                sent, before = feed.send(tuple(leaves)), arrays
            if tensors is not None:
                yield tensors
            if caught.error is not None:
                raise caught.error
            if arrays is None:
                return

    def _augmented(self, tensors: Any, epoch: int, batch: int) -> Any:
        if self._on_device and isinstance(tensors, WholeBatch):
            raise no_augmenting()
        key = self._key(epoch, batch)
        rng = np.random.default_rng((*key, 1) if self._fetch.draws else key)  # not what was drawn on the host for the same batch
        for step in self._on_device:
            tensors = step(tensors, rng)
        return tensors

    def _workers(self, first: Task) -> ProcessPool | ThreadPool:
        held = attributes(self.dataset)
        if self._pool is None or self._pool.closed or not (self._pool.busy or same_attributes(held, self._sent)):
            if self._pool is not None:
                self._pool.close()
            self._pool, self._sent = self._new_workers(first), held
        if self._pool.busy:
            self._others.add(another := self._new_workers(first))
            return another
        self._pool.timeout = self.timeout
        return self._pool

    def _new_workers(self, first: Task) -> ProcessPool | ThreadPool:
        ahead, most = self.num_workers * self.prefetch, max(self.batch_size, len(first.indices))
        seed = self.seed + first.key[2] * self.num_workers  # plus the number of a worker; workers of other epochs have other seeds
        if self.use_shared_mem:
            return ProcessPool(self._fetch, self.num_workers, ahead, most, first, self.timeout, seed)
        return ThreadPool(self._fetch, self.num_workers, ahead, self.timeout, seed)

    def _generator_states(self) -> list[Any]:
        return [generator.bit_generator.state for generator in self._generators]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch; :meth:`load_state_dict` continues there.

        It includes the generators of netcl's random samplers. Any other sampler must yield the same order again.
        """
        if self._fetch.streams:
            raise ValueError(message("DataLoader", "an iterable dataset has no position to resume from", "save its own state"))
        state = {"seed": self.seed, "epoch": self.epoch, "batch": self._batch, "batch_size": self.batch_size, "samples": len(self.dataset)}
        if not self._generators:
            return state
        return {**state, "generators": self._generator_states() if self._at_position else self._drawn_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position; dataset and batch size must be those of the saved loader."""
        names = self.state_dict().keys()
        numbers = [state[name] for name in names & state.keys() if name != "generators"]
        if state.keys() != names or any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
            what = "the state must have the keys of state_dict(), each a whole number of at least 0 except generators"
            raise ValueError(message("DataLoader", what, state=dict(state), names=list(names)))
        for name, own in (("batch_size", self.batch_size), ("samples", len(self.dataset))):
            if state[name] != own:
                raise ValueError(message("DataLoader", f"state and loader must have the same {name}", state=state[name], loader=own))
        if state["batch"] > len(self):
            what = "the batch of the state must be at most the number of batches"
            raise ValueError(message("DataLoader", what, batch=state["batch"], batches=len(self)))
        self._set_generators(state.get("generators", []))
        self.seed, self.epoch, self._batch, self._at_position = state["seed"], state["epoch"], state["batch"], True

    def _set_generators(self, states: Any) -> None:
        before = self._generator_states()
        try:
            for generator, state in zip(self._generators, states, strict=True):
                generator.bit_generator.state = state
        except (ValueError, TypeError, KeyError, OverflowError) as fault:
            for generator, state in zip(self._generators, before, strict=True):
                generator.bit_generator.state = state
            what = "the state must have generators of the kinds that the samplers draw from"
            raise ValueError(message("DataLoader", what, "use the samplers of the saved loader", reason=fault)) from None

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers; empty for threads or without workers."""
        return self._pool.pids() if self._pool is not None else []

    def close(self) -> None:
        """End the workers and release the shared memory. The loader can still be used: the next iteration starts new workers."""
        for pool in [*self._others, *filter(None, [self._pool])]:
            pool.close()
        self._pool = None

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_numbers(indices: Any) -> np.ndarray:
    """Return the indices of a batch as int64; raises unless they are whole numbers."""
    found = np.asarray(indices)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        what = "a sampler must yield whole numbers, and a batch_sampler sequences of them"
        raise TypeError(message("DataLoader", what, indices=f"{indices!r:.80}"))
    return found.astype(np.int64)


def _check_samplers(sampler: Any, batch_sampler: Any, shuffle: Any, drop_last: Any, batch_size: int, streams: bool) -> None:
    """Raise if the arguments cannot be combined with each other, or with an iterable dataset (``streams``)."""
    given = [name for name, value in (("shuffle", shuffle), ("sampler", sampler is not None), ("batch_sampler", batch_sampler is not None))
             if value]  # fmt: skip
    if len(given) > 1 or (given and streams):
        what = "an iterable dataset cannot be shuffled or sampled" if streams else "only one argument may choose the samples"
        raise ValueError(message("DataLoader", what, given=", ".join(given)))
    if batch_sampler is not None and (batch_size != 1 or drop_last):
        what = "batch_sampler cannot be combined with drop_last or a batch_size other than 1"
        raise ValueError(message("DataLoader", what, batch_size=batch_size, drop_last=drop_last))
