"""Data pipes with torch's names: datasets that are chained by methods, ``pipe.map(f).filter(g).batch(8)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

from netcl.data.collate import default_collate
from netcl.data.dataset import Dataset, IterableDataset
from netcl.data.errors import message
from netcl.data.fetch import epoch_seed, get_worker_info
from netcl.data.sampler import BatchSampler, rng_of

__all__ = [
    "DataChunk", "IterDataPipe", "MapDataPipe", "functional_datapipe", "guaranteed_datapipes_determinism", "non_deterministic",
]  # fmt: skip
_deterministic: list[bool] = [False]


class DataChunk(list[Any]):
    """A list of the samples in one batch of a pipe."""


class IterDataPipe(IterableDataset):
    """An iterable dataset whose methods (``map``, ``filter``, ``batch``, ...) build pipes; ``IterDataPipe(iterable)`` wraps any iterable.

    >>> list(IterDataPipe(range(6)).filter(lambda x: x % 2).map(lambda x: x * 10).batch(2))
    [[10, 30], [50]]
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, iterable: Iterable[Any] = ()):
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.functions:
            raise AttributeError(message(type(self).__name__, f"unknown method {name!r}", f"known are {', '.join(self.functions)}"))
        return partial(self.functions[name], self)


class MapDataPipe(Dataset):
    """A dataset over a sequence; its methods are registered by :func:`functional_datapipe`."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    __getattr__ = IterDataPipe.__getattr__

    def __init__(self, sequence: Any = ()):
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, index: Any) -> Any:
        return self.sequence[index]


def functional_datapipe(name: str, enable_df_api_tracing: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that makes ``pipe.name(...)`` construct the decorated pipe over ``pipe``; the second argument is ignored."""

    def decorate(cls: Any) -> Any:
        if name in cls.functions:
            raise ValueError(message("functional_datapipe", "the name must not be registered already", name=name))
        cls.functions[name] = cls
        return cls

    return decorate


@contextmanager
def guaranteed_datapipes_determinism() -> Iterator[None]:
    """Forbid the construction of pipes marked :func:`non_deterministic` inside the block."""
    before, _deterministic[0] = _deterministic[0], True
    try:
        yield
    finally:
        _deterministic[0] = before


def non_deterministic(cls: Any) -> Any:
    """Mark a pipe class whose samples differ from run to run. Inside :func:`guaranteed_datapipes_determinism`, its constructor raises."""
    init = cls.__init__

    def checked(self: Any, *args: Any, **options: Any) -> None:
        if _deterministic[0]:
            what, remedy = "a deterministic pipe is required here", "leave the block of guaranteed_datapipes_determinism()"
            raise TypeError(message(cls.__name__, what, remedy))
        init(self, *args, **options)

    cls.__init__ = checked
    return cls


class _Stream(IterDataPipe):
    """Iterates over the results of the function ``name`` of :data:`_STREAMS`. It stores the name because lambdas cannot be pickled."""

    def __init__(self, name: str, *args: Any, **options: Any):
        self._call = name, args, options

    def __iter__(self) -> Iterator[Any]:
        name, args, options = self._call
        return iter(_STREAMS[name](*args, **options))


def _shuffled(source: Any, *, buffer_size: int = 10000, seed: Any = None) -> Iterator[Any]:
    rng, held = rng_of(epoch_seed() if seed is None else seed), []  # the same in all workers, which take their shares of the result
    for sample in source:
        held.append(sample)
        if len(held) > buffer_size:
            yield held.pop(int(rng.integers(len(held))))
    yield from (held[i] for i in rng.permutation(len(held)))


def _share(source: Any) -> Iterable[Any]:
    """Return the samples of this worker, every n-th; outside of workers, all samples."""
    worker = get_worker_info()
    return source if worker is None else islice(source, worker.id, None, worker.num_workers)


_STREAMS: dict[str, Callable[..., Iterable[Any]]] = {
    "map": lambda source, fn: map(fn, source), "filter": lambda source, filter_fn: filter(filter_fn, source),
    "batch": lambda source, batch_size, drop_last=False: map(DataChunk, BatchSampler(source, batch_size, drop_last)),
    "unbatch": chain.from_iterable, "collate": lambda source, collate_fn=default_collate: map(collate_fn, source), "shuffle": _shuffled,
    "concat": chain, "zip": zip, "sharding_filter": _share,
}  # fmt: skip
IterDataPipe.functions.update({name: partial(_Stream, name) for name in _STREAMS})
