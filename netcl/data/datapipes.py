"""torch's data pipes: datasets that are chained by methods, ``pipe.map(f).filter(g).batch(8)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

from netcl.data.collate import default_collate
from netcl.data.dataset import Dataset, IterableDataset
from netcl.data.errors import message
from netcl.data.fetch import get_worker_info
from netcl.data.sampler import rng_of

_deterministic: list[bool] = [False]


class DataChunk(list[Any]):
    """The samples of a batch of a pipe."""


class _Functional:
    """Methods that were registered by name: each makes a pipe over this one."""

    functions: ClassVar[dict[str, Callable[..., Any]]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.functions:
            raise AttributeError(message(type(self).__name__, f"there is no method {name!r}", f"known are {', '.join(self.functions)}"))
        return partial(self.functions[name], self)

    @classmethod
    def register_datapipe_as_function(cls, name: str, made: Callable[..., Any]) -> None:
        """Make ``pipe.name(...)`` mean ``made(pipe, ...)``."""
        if name in cls.functions:
            raise ValueError(message("functional_datapipe", "the name is taken", name=name))
        cls.functions[name] = made


class IterDataPipe(_Functional, IterableDataset):
    """An iterable dataset with the methods ``map``, ``filter``, ``batch``, ``unbatch``, ``collate``, ``shuffle``, ``concat``, ``zip`` and
    ``sharding_filter``, and those of :func:`functional_datapipe`. ``IterDataPipe(iterable)`` wraps anything that can be iterated over.

    >>> list(IterDataPipe(range(6)).filter(lambda x: x % 2).map(lambda x: x * 10).batch(2))
    [[10, 30], [50]]
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, iterable: Iterable[Any] = ()):
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class MapDataPipe(_Functional, Dataset):
    """A dataset with the methods ``map``, ``batch``, ``shuffle``, ``concat`` and ``zip``; ``MapDataPipe(sequence)`` wraps a sequence.

    >>> pipe = MapDataPipe([1, 2, 3]).map(lambda x: x + 1)
    >>> len(pipe), pipe[2]
    (3, 4)
    """

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, sequence: Any = ()):
        self.sequence = sequence

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, index: Any) -> Any:
        return self.sequence[index]


def functional_datapipe(name: str, enable_df_api_tracing: bool = False) -> Callable[[Any], Any]:
    """A decorator: ``pipe.name(...)`` makes the decorated pipe over ``pipe``."""

    def decorate(cls: Any) -> Any:
        kind = MapDataPipe if issubclass(cls, MapDataPipe) else IterDataPipe
        kind.register_datapipe_as_function(name, cls)
        return cls

    return decorate


@contextmanager
def guaranteed_datapipes_determinism() -> Iterator[None]:
    """Within the block, pipes that were marked :func:`non_deterministic` cannot be made."""
    before, _deterministic[0] = _deterministic[0], True
    try:
        yield
    finally:
        _deterministic[0] = before


def non_deterministic(cls: Any) -> Any:
    """A decorator of pipes whose samples differ from run to run."""
    init = cls.__init__

    def checked(self: Any, *args: Any, **options: Any) -> None:
        if _deterministic[0]:
            what, remedy = "the pipe is not deterministic", "leave the block of guaranteed_datapipes_determinism()"
            raise TypeError(message(cls.__name__, what, remedy))
        init(self, *args, **options)

    cls.__init__ = checked
    return cls


# ---- methods


class _Stream(IterDataPipe):
    """A function of pipes that yields samples."""

    def __init__(self, function: Callable[..., Iterator[Any]], *args: Any, **options: Any):
        self._make = partial(function, *args, **options)

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class _Chosen(MapDataPipe):
    """Samples that a function of their number gives."""

    def __init__(self, length: int, function: Callable[[int], Any]):
        self._length, self._function = length, function

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(message("MapDataPipe", "there is no sample with this number", index=index, samples=self._length))
        return self._function(index)


def _batches(source: Any, batch_size: int, drop_last: bool = False) -> Iterator[DataChunk]:
    samples = iter(source)
    while (batch := DataChunk(islice(samples, batch_size))) and (len(batch) == batch_size or not drop_last):
        yield batch


def _shuffled(source: Any, *, buffer_size: int = 10000, seed: Any = None) -> Iterator[Any]:
    rng, held = rng_of(seed), []
    for sample in source:
        held.append(sample)
        if len(held) > buffer_size:
            at = int(rng.integers(len(held)))
            held[at], held[-1] = held[-1], held[at]
            yield held.pop()
    yield from (held[i] for i in rng.permutation(len(held)))


def _share(source: Any) -> Iterator[Any]:
    """The samples of this worker: every n-th."""
    worker = get_worker_info()
    return iter(source) if worker is None else islice(source, worker.id, None, worker.num_workers)


def _collated(source: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> Iterator[Any]:
    return map(collate_fn, source)


_STREAMS: dict[str, Callable[..., Iterator[Any]]] = {
    "map": lambda source, fn: map(fn, source), "filter": lambda source, filter_fn: filter(filter_fn, source), "batch": _batches,
    "unbatch": chain.from_iterable, "collate": _collated, "shuffle": _shuffled, "concat": chain, "zip": zip, "sharding_filter": _share,
}  # fmt: skip
IterDataPipe.functions.update({name: partial(_Stream, function) for name, function in _STREAMS.items()})


def _map_shuffled(source: Any, *, indices: Any = None, seed: Any = None) -> MapDataPipe:
    order = rng_of(seed).permutation(len(source) if indices is None else indices).tolist()
    return _Chosen(len(order), lambda i: source[order[i]])


def _map_batched(source: Any, batch_size: int, drop_last: bool = False) -> MapDataPipe:
    n = len(source)
    return _Chosen(n // batch_size if drop_last else -(-n // batch_size),
                   lambda i: DataChunk(source[j] for j in range(i * batch_size, min((i + 1) * batch_size, n))))  # fmt: skip


def _map_concat(*sources: Any) -> MapDataPipe:
    whole = [(source, i) for source in sources for i in range(len(source))]
    return _Chosen(len(whole), lambda i: whole[i][0][whole[i][1]])


MapDataPipe.functions.update({
    "map": lambda source, fn: _Chosen(len(source), lambda i: fn(source[i])), "batch": _map_batched, "shuffle": _map_shuffled,
    "concat": _map_concat, "zip": lambda *sources: _Chosen(min(map(len, sources)), lambda i: tuple(source[i] for source in sources)),
})  # fmt: skip
