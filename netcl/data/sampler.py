"""Samplers, with torch's names: they choose the samples of a loader and their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from types import GenericAlias
from typing import Any

import numpy as np

from netcl.data.errors import check_count, message

__all__ = [
    "BatchSampler", "DistributedSampler", "RandomSampler", "Sampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler",
]  # fmt: skip


def rng_of(generator: Any) -> np.random.Generator:
    """Return the given NumPy generator, or one seeded by an integer or ``initial_seed()``; ``None`` follows ``netcl.manual_seed``."""
    if generator is None:
        from netcl.data.augment_gpu import host_rng

        generator = int(host_rng.integers(2**63))
    seeds = not isinstance(generator, np.random.Generator) and hasattr(generator, "initial_seed")
    return np.random.default_rng(generator.initial_seed() if seeds else generator)


def generators_of(sampler: Any) -> list[np.random.Generator]:
    """Return the generators that a sampler, and the samplers inside it, draw from."""
    found = [sampler._rng] if isinstance(getattr(sampler, "_rng", None), np.random.Generator) else []
    return found + (generators_of(sampler.sampler) if hasattr(sampler, "sampler") else [])


class Sampler:
    """Base class of samplers, which yield sample indices. Define ``__iter__``, and ``__len__`` if their number is known."""

    __class_getitem__: Any = classmethod(GenericAlias)  # Sampler[int], as in torch

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(message(type(self).__name__, "a sampler must define __iter__"))


class SequentialSampler(Sampler):
    """Yields the indices of all samples, in the dataset's order."""

    def __init__(self, data_source: Sized):
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler):
    """Yields ``num_samples`` indices, by default all, in random order; with ``replacement``, an index may be drawn several times.

    >>> sorted(RandomSampler(range(4), generator=0))
    [0, 1, 2, 3]
    """

    def __init__(self, data_source: Sized, replacement: bool = False, num_samples: int | None = None, generator: Any = None):
        self.data_source, self.replacement, self._rng = data_source, replacement, rng_of(generator)
        self._num_samples = None if num_samples is None else check_count("RandomSampler", "num_samples", num_samples)

    @property
    def num_samples(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def _drawn(self) -> Iterator[int]:
        n = len(self.data_source)
        while n:  # in blocks: num_samples may be far more than fits into memory
            yield from (self._rng.integers(0, n, 1024) if self.replacement else self._rng.permutation(n)).tolist()

    def __iter__(self) -> Iterator[int]:
        return islice(self._drawn(), self.num_samples)

    def __len__(self) -> int:
        return self.num_samples


class SubsetRandomSampler(Sampler):
    """Yields the given ``indices`` in random order."""

    def __init__(self, indices: Sequence[int], generator: Any = None):
        self.indices, self._rng = indices, rng_of(generator)

    def __iter__(self) -> Iterator[int]:
        return (self.indices[i] for i in self._rng.permutation(len(self.indices)).tolist())

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler):
    """Yields ``num_samples`` indices, drawn with probabilities proportional to ``weights``."""

    def __init__(self, weights: Any, num_samples: int, replacement: bool = True, generator: Any = None):
        self.weights, self.replacement, self._rng = np.asarray(weights, np.float64), replacement, rng_of(generator)
        self.num_samples = check_count("WeightedRandomSampler", "num_samples", num_samples)
        if self.weights.ndim != 1 or not (self.weights >= 0).all() or not self.weights.sum() > 0:
            what = "weights must be a vector of numbers >= 0 with a sum above 0"
            raise ValueError(message("WeightedRandomSampler", what, weights=f"{weights!r:.80}"))
        nonzero = int(np.count_nonzero(self.weights))
        if not replacement and num_samples > nonzero:
            what = "without replacement, num_samples must be at most the count of nonzero weights"
            raise ValueError(message("WeightedRandomSampler", what, num_samples=num_samples, nonzero=nonzero))

    def __iter__(self) -> Iterator[int]:
        shares = self.weights / self.weights.sum()
        return iter(self._rng.choice(len(shares), self.num_samples, self.replacement, shares).tolist())

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler):
    """Groups the indices of another sampler into lists of ``batch_size``.

    >>> list(BatchSampler(range(5), batch_size=2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool):
        self.sampler, self.batch_size, self.drop_last = sampler, check_count("BatchSampler", "batch_size", batch_size), drop_last

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(self.sampler)
        while (batch := list(islice(numbers, self.batch_size))) and (len(batch) == self.batch_size or not self.drop_last):
            yield batch

    def __len__(self) -> int:
        n = len(self.sampler)  # type: ignore[arg-type]
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


class DistributedSampler(Sampler):
    """Yields the indices for process ``rank`` of ``num_replicas``; all processes draw the same order from ``seed`` and the epoch.

    Call ``set_epoch(epoch)`` before each epoch, or all epochs have the same order. All processes get equally many
    indices: if the samples do not divide evenly, the first are repeated or, with ``drop_last``, the last are left out.

    >>> [list(DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False,
    ):  # fmt: skip
        if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
            what = "num_replicas and rank must be given, with rank from 0 to num_replicas - 1"
            remedy = "pass both, for instance size and rank of MPI.COMM_WORLD"
            raise ValueError(message("DistributedSampler", what, remedy, num_replicas=num_replicas, rank=rank))
        self.dataset, self.num_replicas, self.rank, self.shuffle = dataset, num_replicas, rank, shuffle
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is drawn next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        n, total = len(self.dataset), len(self) * self.num_replicas
        order = np.random.default_rng((self.seed, self.epoch)).permutation(n) if self.shuffle else np.arange(n)
        return iter(np.resize(order, total)[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        n = len(self.dataset)
        return n // self.num_replicas if self.drop_last else -(-n // self.num_replicas)
