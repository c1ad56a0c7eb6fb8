"""Fetching of samples and combination into batches. The same code runs in the caller, in threads and in worker processes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from netcl.data.collate import WholeBatch, default_collate, is_structured
from netcl.data.dataset import IterableDataset, taker
from netcl.data.errors import SampleError, message


class Task(NamedTuple):
    """One batch to make: its number in the epoch, the indices of its samples, and the seed of its random numbers."""

    batch: int
    indices: np.ndarray
    key: tuple[int, ...]

    def same_as(self, other: Task) -> bool:
        """Whether both tasks make the same batch."""
        return self.key == other.key and np.array_equal(self.indices, other.indices)


class Field(NamedTuple):
    """Shape and dtype of one array of a batch, per sample."""

    shape: tuple[int, ...]
    dtype: str


class Step(NamedTuple):
    """A transform or augmentation and its call signature: ``f(x)`` or ``f(x, y)``, with ``rng=rng`` if it has that parameter."""

    call: Callable[..., Any]
    wants_rng: bool
    with_labels: bool

    def __call__(self, arrays: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
        more = {"rng": rng} if self.wants_rng else {}
        if self.with_labels:
            return (*self.call(*arrays[:2], **more), *arrays[2:])
        return (self.call(arrays[0], **more), *arrays[1:])


def steps(calls: Any, parameter: str) -> tuple[Step, ...]:
    """Convert ``None``, a function or a sequence of functions to a tuple of :class:`Step`; errors name ``parameter``."""
    made = []
    for call in calls if isinstance(calls, Sequence) else () if calls is None else (calls,):
        if not callable(call):
            raise TypeError(message("DataLoader", f"{parameter} must be a function or a list of functions", given=repr(call)))
        try:
            wants_rng = "rng" in inspect.signature(call).parameters
        except (ValueError, TypeError):  # a C function without a signature
            wants_rng = False
        made.append(Step(call, wants_rng, getattr(call, "with_labels", False)))
    return tuple(made)


class WorkerInfo(NamedTuple):
    """Identifies a worker of a loader: its number, the number of workers, its seed, and its dataset (a copy in a worker process)."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


class _Local(threading.local):
    info: WorkerInfo | None = None
    epoch: tuple[int, ...] | None = None
    stream: tuple[Any, Iterator[Any]] | None = None
    rng: np.random.Generator | None = None


_local = _Local()


def get_worker_info() -> WorkerInfo | None:
    """Return the :class:`WorkerInfo` in a worker of a DataLoader; elsewhere ``None``."""
    return _local.info


def batch_rng() -> np.random.Generator | None:
    """Return the random generator of the batch that a loader is making, for use in a dataset; ``None`` outside a loader."""
    return _local.rng


def epoch_seed() -> tuple[int, ...] | None:
    """Return the seed that all workers of a loader share in an epoch of an iterable dataset; ``None`` outside a loader."""
    return _local.epoch


class Fetch:
    """Makes the batch of a task: fetches and transforms its samples, stacks them, and augments the whole batch."""

    def __init__(self, dataset: Any, transforms: Any, augment: Any, collate_fn: Any, worker_init_fn: Any, drop_last: bool):
        self.dataset, self.collate_fn, self.worker_init_fn, self.drop_last = dataset, collate_fn, worker_init_fn, drop_last
        self.streams = isinstance(dataset, IterableDataset)
        self.transforms, self.augment = steps(transforms, "transforms"), steps(augment, "augment")
        self.draws = any(step.wants_rng for step in (*self.transforms, *self.augment))  # from the generator of the batch
        self.whole = self.streams or collate_fn is not None  # every batch is a WholeBatch; else the samples decide

    def begin(self, number: int, workers: int, seed: int) -> None:
        """Set the worker's info and call ``worker_init_fn``; called once at the start of a worker."""
        _local.info = WorkerInfo(number, workers, seed + number, self.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(number)

    def __call__(self, task: Task, beat: Callable[[], None] = lambda: None) -> tuple[np.ndarray, ...] | WholeBatch:
        """Return the arrays of a batch, or a :class:`WholeBatch`. ``beat()`` is called while samples are fetched, to detect a hang."""
        beat()
        if self.streams:
            if _local.stream is None or _local.stream[0] != task.key[:-1]:
                _local.stream = task.key[:-1], iter(self.dataset)
            return self.of_stream(_local.stream[1], task, beat)
        take = None if self.transforms or self.whole else taker(self.dataset)
        rng = _local.rng = np.random.default_rng(task.key)
        try:
            arrays = self._stacked(task.indices, rng, beat) if take is None else _fields(take(task.indices))
        finally:
            _local.rng = None
        if isinstance(arrays, WholeBatch):
            return arrays
        for step in self.augment:
            arrays = step(arrays, rng)
        return tuple(np.ascontiguousarray(array) for array in arrays)

    def of_stream(self, stream: Iterator[Any], task: Task, beat: Callable[[], None] = lambda: None) -> WholeBatch:
        """Return the next batch of an iterable dataset; ``ended`` is set if no samples are left, or too few and ``drop_last`` is set."""
        samples: list[Any] = []
        _local.rng, _local.epoch = np.random.default_rng(task.key), task.key[:-1]
        try:
            for sample in islice(stream, len(task.indices)):
                beat()
                samples.append(self._transformed(sample, np.random.default_rng((*task.key, len(samples)))))
        finally:
            _local.rng = _local.epoch = None
        if not samples or (self.drop_last and len(samples) < len(task.indices)):
            return WholeBatch(None, ended=True)
        return self._collated(samples)

    def _collated(self, samples: list[Any]) -> WholeBatch:
        if self.augment:
            raise no_augmenting()
        return WholeBatch((self.collate_fn or default_collate)(samples))

    def _transformed(self, sample: Any, rng: np.random.Generator) -> Any:
        """Apply the transforms to a sample, or to the first item of a tuple or list; transforms that take labels get two items."""
        if not self.transforms:
            return sample
        fields = _fields(sample)
        for step in self.transforms:
            fields = step(fields, rng)
        return fields if isinstance(sample, tuple | list) else fields[0]

    def _stacked(self, indices: np.ndarray, rng: np.random.Generator, beat: Callable[[], None]) -> tuple[np.ndarray, ...] | WholeBatch:
        start = self.dataset[int(indices[0])]
        if self.whole or is_structured(start):
            samples = [self._transformed(start, rng)]
            for index in indices[1:]:
                beat()
                samples.append(self._transformed(self.dataset[int(index)], rng))
            return self._collated(samples)
        first = self._sample(int(indices[0]), rng, start)
        columns = [np.empty((len(indices), *field.shape), field.dtype) for field in first]
        for row, index in enumerate(indices):
            beat()
            sample = first if row == 0 else self._sample(int(index), rng)
            _check_alike(sample, first, int(index))
            for column, field in zip(columns, sample, strict=True):
                column[row] = field
        return tuple(columns)

    def _sample(self, index: int, rng: np.random.Generator, given: Any = None) -> tuple[np.ndarray, ...]:
        sample = _fields(self.dataset[index] if given is None else given)
        for step in self.transforms:
            sample = step(sample, rng)
        return tuple(_array(field, index) for field in sample)


def no_augmenting() -> SampleError:
    """Return the error of ``augment`` with batches that are not tuples of arrays."""
    what = "augment requires batches of arrays, not of other structures"
    return SampleError(message("DataLoader", what, "augment in the dataset, in transforms or in collate_fn"))


def _array(field: Any, index: int) -> np.ndarray:
    try:
        array = np.asarray(field)
    except ValueError as fault:
        what, remedy = f"sample {index} must consist of numbers, arrays, or sequences of equal shapes", "pass collate_fn=default_collate"
        raise SampleError(message("DataLoader", what, remedy, reason=fault)) from None
    if array.dtype.hasobject:
        what = f"sample {index} must consist of numbers or arrays, got a {type(field).__name__}"
        raise SampleError(message("DataLoader", what, "return arrays, numbers, or tuples of them: (x, y)"))
    return array


def _fields(sample: Any) -> tuple[Any, ...]:
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def _check_alike(sample: tuple[np.ndarray, ...], first: tuple[np.ndarray, ...], index: int) -> None:
    for field, before in zip(sample, first, strict=False):
        if not np.can_cast(field.dtype, before.dtype, "same_kind"):
            what = f"the dtype of sample {index} must be castable to that of the first sample of its batch"
            raise SampleError(message("DataLoader", what, "cast the samples in transforms", dtype=field.dtype, first=before.dtype))
        if field.dtype != before.dtype and not _keeps_values(field, before.dtype):
            what = f"the values of sample {index} must fit the dtype of the first sample of its batch"
            raise SampleError(message("DataLoader", what, "cast the samples in transforms", dtype=field.dtype, first=before.dtype))
    shapes = [[field.shape for field in fields] for fields in (sample, first)]
    if shapes[0] != shapes[1]:
        what, remedy = f"sample {index} must have the shape of the first sample of its batch", "pad or crop the samples in transforms"
        raise SampleError(message("DataLoader", what, remedy, shapes=shapes[0], first=shapes[1]))


def _keeps_values(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether integers keep their values in ``dtype``, and finite numbers stay finite."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    return bool((cast == array).all() if dtype.kind in "iu" else (np.isfinite(cast) | ~np.isfinite(array)).all())


def check_batch(arrays: tuple[np.ndarray, ...], fields: Sequence[Field], count: int) -> None:
    """Raise unless a batch of ``count`` samples has the shapes and dtypes of the loader's first batch."""
    found = [(array.shape, str(array.dtype)) for array in arrays]
    wanted = [((count, *field.shape), field.dtype) for field in fields]
    if found != wanted:
        what, remedy = "every batch must have the shapes and dtypes of the first", "pad, crop or cast the samples in transforms"
        raise SampleError(message("DataLoader", what, remedy, batch=found, expected=wanted))


def fields_of(arrays: tuple[np.ndarray, ...]) -> list[Field]:
    """Return shape and dtype of the samples of a batch."""
    return [Field(array.shape[1:], str(array.dtype)) for array in arrays]
