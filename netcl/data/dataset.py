"""Datasets: anything with a length and samples, arrays in memory, and parts of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from netcl.data.errors import message


class Dataset:
    """Samples by number. Write ``__len__`` and ``__getitem__``; a sample is an array or a tuple of them, mostly ``(x, y)``.

    A dataset that can fetch many samples at once says so with a method ``take(indices)`` that returns them stacked.

    >>> class Squares(Dataset):
    ...     def __len__(self):
    ...         return 4
    ...
    ...     def __getitem__(self, index):
    ...         return index, index * index
    >>> Squares()[3]
    (3, 9)
    """

    name: str = ""
    classes: Sequence[str] = ()

    def __len__(self) -> int:
        raise NotImplementedError(message(type(self).__name__, "a dataset needs a method __len__"))

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError(message(type(self).__name__, "a dataset needs a method __getitem__"))


class TensorDataset(Dataset):
    """Arrays of equal length; sample ``i`` is row ``i`` of each.

    - **arrays**: NumPy arrays or anything :func:`numpy.asarray` takes, tensors of the CPU included.
    - **name, classes**: for people: what the set is called and what its labels mean.

    >>> data = TensorDataset(np.zeros((3, 2)), [0, 1, 0], classes=["even", "odd"])
    >>> x, y = data[1]
    >>> len(data), x.shape, data.classes[y]
    (3, (2,), 'odd')
    """

    def __init__(self, *arrays: Any, name: str = "", classes: Sequence[str] = ()):
        if not arrays:
            raise ValueError(message("TensorDataset", "at least one array is needed"))
        self.arrays = tuple(np.asarray(array) for array in arrays)
        self.name, self.classes = name, tuple(classes)
        lengths = [array.shape[0] if array.ndim else None for array in self.arrays]
        if len(set(lengths)) > 1 or lengths[0] is None:
            raise ValueError(message("TensorDataset", "all arrays must have the same length", lengths=lengths))

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> Any:
        return _unwrapped(tuple(array[index] for array in self.arrays))

    def take(self, indices: np.ndarray) -> Any:
        """Many samples at once, stacked."""
        return _unwrapped(tuple(array[indices] for array in self.arrays))


def taker(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """The method that fetches many samples at once, or ``None``. An array's own ``take`` is not meant: it counts single numbers."""
    if isinstance(dataset, np.ndarray):
        return dataset.__getitem__
    return None if hasattr(dataset, "__array__") else getattr(dataset, "take", None)


class Subset(Dataset):
    """The samples of a dataset with the given numbers, in the given order."""

    def __init__(self, dataset: Any, indices: Sequence[int] | np.ndarray):
        self.dataset, self.indices = dataset, np.asarray(indices, np.int64).reshape(-1)
        n = len(dataset)
        wrong = self.indices[(self.indices < 0) | (self.indices >= n)]
        if wrong.size:
            raise IndexError(message("Subset", "there is no sample with this number", index=int(wrong[0]), samples=n))
        self.name, self.classes = getattr(dataset, "name", ""), getattr(dataset, "classes", ())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    @property
    def take(self) -> Callable[[np.ndarray], Any]:
        """Many samples at once, where the dataset has that."""
        whole = taker(self.dataset)
        if whole is None:
            raise AttributeError("take")
        return lambda indices: whole(self.indices[indices])


def random_split(dataset: Any, lengths: Sequence[float], seed: int | None = None) -> list[Subset]:
    """Parts of a dataset drawn at random, each sample in one of them.

    - **lengths**: numbers of samples that add up to the dataset's, or fractions that add up to 1.
    - **seed**: the same seed draws the same parts.

    >>> train, test = random_split(TensorDataset(np.arange(10)), [0.8, 0.2], seed=0)
    >>> len(train), len(test)
    (8, 2)
    """
    return _parts(dataset, np.random.default_rng(seed).permutation(len(dataset)), lengths, "random_split")


def split_dataset(dataset: Any, lengths: Sequence[float]) -> list[Subset]:
    """Parts of a dataset in its own order, as :func:`random_split` but without drawing: for series, and for one part per device.

    >>> [part.indices.tolist() for part in split_dataset(TensorDataset(np.arange(5)), [0.4, 0.6])]
    [[0, 1], [2, 3, 4]]
    """
    return _parts(dataset, np.arange(len(dataset)), lengths, "split_dataset")


def _parts(dataset: Any, order: np.ndarray, lengths: Sequence[float], op: str) -> list[Subset]:
    sizes = _sizes(lengths, len(order), op)
    return [Subset(dataset, part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _sizes(lengths: Sequence[float], n: int, op: str) -> list[int]:
    """Whole numbers of samples; what fractions leave over goes to the first parts, one each."""
    if not len(lengths) or any(length < 0 for length in lengths):
        raise ValueError(message(op, "lengths are numbers of samples or fractions", lengths=list(lengths)))
    if all(isinstance(length, int | np.integer) for length in lengths):
        sizes = [int(length) for length in lengths]
    elif abs(sum(lengths) - 1) < 1e-6:
        sizes = [int(np.floor(n * length + 1e-9)) for length in lengths]
        sizes = [size + (i < n - sum(sizes)) for i, size in enumerate(sizes)]
    else:
        raise ValueError(message(op, "fractions must add up to 1", lengths=list(lengths)))
    if sum(sizes) != n:
        raise ValueError(message(op, "lengths must add up to the dataset's", lengths=list(lengths), samples=n))
    return sizes


def _unwrapped(arrays: tuple[Any, ...]) -> Any:
    return arrays if len(arrays) > 1 else arrays[0]
