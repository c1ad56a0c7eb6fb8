"""Dataset classes: the base classes, arrays in memory, and chains, stacks and subsets of datasets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import GenericAlias
from typing import Any

import numpy as np

from netcl.data.errors import message
from netcl.data.sampler import rng_of

__all__ = [
    "ChainDataset", "ConcatDataset", "Dataset", "IterableDataset", "StackDataset", "Subset", "TensorDataset", "random_split",
    "split_dataset",
]  # fmt: skip


class Dataset:
    """Base class of datasets with samples by index. Define ``__len__`` and ``__getitem__``; a sample is often a tuple of arrays.

    A dataset that can fetch many samples at once defines ``take(indices)``, which returns them stacked.

    >>> class Squares(Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return index, index * index
    >>> Squares()[3]
    (3, 9)
    """

    __class_getitem__: Any = classmethod(GenericAlias)  # Dataset[int], as in torch
    name: str = ""
    classes: Sequence[str] = ()

    def __len__(self) -> int:
        raise NotImplementedError(message(type(self).__name__, "a dataset must define __len__"))

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError(message(type(self).__name__, "a dataset must define __getitem__"))

    def __add__(self, other: Any) -> ConcatDataset:
        return ConcatDataset([self, other])


class IterableDataset:
    """Base class of datasets that are streams or have an unknown length. Define ``__iter__``.

    Every worker of a loader iterates over the dataset by itself; ``__iter__`` can select a part by :func:`~netcl.data.get_worker_info`.
    """

    __class_getitem__: Any = classmethod(GenericAlias)  # IterableDataset[int], as in torch

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(message(type(self).__name__, "an iterable dataset must define __iter__"))

    def __add__(self, other: Any) -> ChainDataset:
        return ChainDataset([self, other])


class ChainDataset(IterableDataset):
    """An iterable dataset that yields the samples of several iterable datasets, one dataset after the other."""

    def __init__(self, datasets: Iterable[Any]):
        self.datasets = list(datasets)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.datasets)


class ConcatDataset(Dataset):
    """A dataset with the samples of several datasets, one dataset after the other.

    >>> data = ConcatDataset([TensorDataset([1, 2]), TensorDataset([3])])
    >>> len(data), int(data[2]), int(data[-3])
    (3, 3, 1)
    """

    def __init__(self, datasets: Iterable[Any]):
        self.datasets = list(datasets)
        if not self.datasets or any(isinstance(dataset, IterableDataset) for dataset in self.datasets):
            what, remedy = "there must be at least one dataset, and none may be an IterableDataset", "chain iterable ones with ChainDataset"
            raise ValueError(message("ConcatDataset", what, remedy, datasets=[type(dataset).__name__ for dataset in self.datasets]))
        self.cumulative_sizes = np.cumsum([len(dataset) for dataset in self.datasets]).tolist()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(message("ConcatDataset", "index must be in [-samples, samples)", index=index, samples=len(self)))
        which = bisect_right(self.cumulative_sizes, at)
        return self.datasets[which][at - (self.cumulative_sizes[which - 1] if which else 0)]


class StackDataset(Dataset):
    """Combines datasets of equal length: a sample is a tuple with one sample of each dataset, or a dict if datasets are given by name."""

    def __init__(self, *datasets: Any, **named: Any):
        self.datasets: Any = named or datasets
        if bool(named) == bool(datasets) or len({len(dataset) for dataset in named.values() or datasets}) > 1:
            lengths = [len(dataset) for dataset in (*datasets, *named.values())]
            what = "there must be at least one dataset, all given by position or all by name, with equal lengths"
            raise ValueError(message("StackDataset", what, lengths=lengths, names=[*named]))

    def __len__(self) -> int:
        return len(next(iter(self.datasets.values() if isinstance(self.datasets, dict) else self.datasets)))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.datasets, dict):
            return {name: dataset[index] for name, dataset in self.datasets.items()}
        return tuple(dataset[index] for dataset in self.datasets)


class TensorDataset(Dataset):
    """A dataset of arrays of equal length; sample ``i`` is row ``i`` of each array.

    - **arrays**: NumPy arrays or anything that :func:`numpy.asarray` takes, including CPU tensors.
    - **name, classes**: the names of the dataset and of its classes, for display.

    >>> data = TensorDataset(np.zeros((3, 2)), [0, 1, 0], classes=["even", "odd"])
    >>> x, y = data[1]
    >>> len(data), x.shape, data.classes[y]
    (3, (2,), 'odd')
    """

    def __init__(self, *arrays: Any, name: str = "", classes: Sequence[str] = ()):
        if not arrays:
            raise ValueError(message("TensorDataset", "at least one array must be given"))
        self.arrays = tuple(np.asarray(array) for array in arrays)
        self.name, self.classes = name, tuple(classes)
        lengths = [array.shape[0] if array.ndim else None for array in self.arrays]
        if len(set(lengths)) > 1 or lengths[0] is None:
            raise ValueError(message("TensorDataset", "all arrays must have at least 1 dimension and the same length", lengths=lengths))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> Any:
        return _unwrapped(tuple(array[index] for array in self.arrays))

    def take(self, indices: np.ndarray) -> Any:
        """Return the samples at ``indices``, stacked."""
        return _unwrapped(tuple(array[indices] for array in self.arrays))


def taker(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """Return the method that fetches many samples at once, or ``None``. ``ndarray.take`` is not used: it indexes the flattened array.

    A ``take`` is also not used if a subclass has redefined ``__getitem__`` alone: it would return other samples.
    """
    if isinstance(dataset, np.ndarray):
        return dataset.__getitem__
    latest = next((name for cls in type(dataset).__mro__ for name in ("take", "__getitem__") if name in vars(cls)), "take")
    return None if hasattr(dataset, "__array__") or latest != "take" else getattr(dataset, "take", None)


def attributes(dataset: object) -> list[object]:
    """Return the attributes of a dataset, and of datasets, functions and short containers in them, for :func:`same_attributes`."""
    found: list[object] = []
    left, known = [dataset], set()
    while left and len(found) < 10_000:
        one = left.pop()
        if id(one) in known or isinstance(one, type):
            continue
        known.add(id(one))
        parts = (
            list(one) if isinstance(one, list | tuple) else list((one if isinstance(one, dict) else getattr(one, "__dict__", {})).values())
        )
        found += parts
        left += [x for x in parts if (len(x) < 100 if isinstance(x, list | tuple | dict) else callable(x) or hasattr(x, "__getitem__"))]
    return found


def same_attributes(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two results of :func:`attributes` hold the same objects, and equal numbers and strings."""
    plain = (bool, int, float, str, bytes)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or (type(a) is type(b) and isinstance(a, plain) and a == b) for a, b in pairs)


class Subset(Dataset):
    """A dataset with the samples of another dataset at the given ``indices``, in that order."""

    def __init__(self, dataset: Any, indices: Sequence[int] | np.ndarray):
        self.dataset, self.indices = dataset, np.asarray(indices, np.int64).reshape(-1)
        n = len(dataset)
        wrong = self.indices[(self.indices < 0) | (self.indices >= n)]
        if wrong.size:
            raise IndexError(message("Subset", "indices must be in [0, samples)", index=int(wrong[0]), samples=n))
        self.name, self.classes = getattr(dataset, "name", ""), getattr(dataset, "classes", ())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    @property
    def take(self) -> Callable[[np.ndarray], Any]:
        """A function that returns the stacked samples at given indices. The attribute is missing if the dataset has no ``take``."""
        whole = taker(self.dataset)
        if whole is None:
            raise AttributeError(f"the dataset of a Subset must have a method take, got {type(self.dataset).__name__}")
        return lambda indices: whole(self.indices[indices])


def random_split(dataset: Any, lengths: Sequence[float], seed: int | None = None, *, generator: Any = None) -> list[Subset]:
    """Split a dataset randomly; each sample is in one part.

    - **lengths**: numbers of samples that add up to ``len(dataset)``, or fractions that add up to 1.
    - **seed**: the same seed draws the same parts; **generator**: a generator to draw from, as in torch.

    >>> train, test = random_split(TensorDataset(np.arange(10)), [0.8, 0.2], seed=0)
    >>> len(train), len(test)
    (8, 2)
    """
    rng = rng_of(seed if generator is None else generator)
    return _subsets(dataset, rng.permutation(len(dataset)), lengths, "random_split")


def split_dataset(dataset: Any, lengths: Sequence[float]) -> list[Subset]:
    """Split a dataset in its own order, with the lengths of :func:`random_split`: for time series, or for one part per device.

    >>> [part.indices.tolist() for part in split_dataset(TensorDataset(np.arange(5)), [0.4, 0.6])]
    [[0, 1], [2, 3, 4]]
    """
    return _subsets(dataset, np.arange(len(dataset)), lengths, "split_dataset")


def _subsets(dataset: Any, order: np.ndarray, lengths: Sequence[float], op: str) -> list[Subset]:
    """Cut ``order`` into parts; samples left over by rounding fractions go to the first parts, one each."""
    n = len(order)
    if not len(lengths) or any(length < 0 for length in lengths):
        raise ValueError(message(op, "there must be at least one length, and none may be negative", lengths=list(lengths)))
    if all(isinstance(length, int | np.integer) for length in lengths):
        sizes = [int(length) for length in lengths]
    elif abs(sum(lengths) - 1) < 1e-6:
        sizes = [int(np.floor(n * length + 1e-9)) for length in lengths]
        sizes = [size + (i < n - sum(sizes)) for i, size in enumerate(sizes)]
    else:
        raise ValueError(message(op, "lengths must be whole numbers, or fractions that add up to 1", lengths=list(lengths)))
    if sum(sizes) != n:
        raise ValueError(message(op, "lengths must add up to the number of samples", lengths=list(lengths), samples=n))
    return [Subset(dataset, part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _unwrapped(arrays: tuple[Any, ...]) -> Any:
    return arrays if len(arrays) > 1 else arrays[0]
