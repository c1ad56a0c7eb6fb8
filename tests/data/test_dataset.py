"""Datasets and their parts."""

import numpy as np
import pytest

from netcl.data import DataLoader, Dataset, Subset, TensorDataset, random_split, split_dataset


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index * index


def test_arrays_must_have_one_length():
    with pytest.raises(
        ValueError, match=r"\[TensorDataset\] all arrays must have at least 1 dimension and the same length; lengths=\[3, 2\]"
    ):
        TensorDataset(np.zeros(3), np.zeros(2))


def test_a_subset_takes_at_once_only_where_its_dataset_can():
    arrays = TensorDataset(np.arange(10), np.arange(10) * 2, classes=["a", "b"])
    part = Subset(Subset(arrays, [9, 7, 5]), [2, 0])
    assert [values.tolist() for values in part.take(np.array([1, 0]))] == [[9, 5], [18, 10]]
    assert part.classes == ("a", "b")
    assert not hasattr(Subset(Squares(), [1]), "take")
    assert Subset(Squares(), [3])[0] == 9
    with pytest.raises(IndexError, match=r"index=10, samples=10"):
        Subset(Squares(), [0, 10])


def test_a_redefined_getitem_is_not_passed_over():
    class Tenfold(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x * 10, y

    class WithTake(Tenfold):
        def take(self, indices):
            return self.arrays[0][indices] * 10, self.arrays[1][indices]

    class Wrapped:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            return getattr(self.__dict__["dataset"], name)

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            return self.dataset[index]

    data = Tenfold(np.arange(4.0), np.arange(4))
    for given in (data, Subset(data, range(4)), WithTake(*data.arrays), Wrapped(data)):
        (x, y), *_ = DataLoader(given, 4)
        assert x.tolist() == [0, 10, 20, 30] and y.tolist() == [0, 1, 2, 3]
    assert not hasattr(Subset(data, [0]), "take") and hasattr(Subset(WithTake(*data.arrays), [0]), "take")


def test_an_array_is_a_dataset_of_its_rows():
    rows = np.arange(12.0).reshape(6, 2)
    for data in (rows, Subset(rows, range(6)), list(rows)):
        batches = list(DataLoader(data, 4, shuffle=False))
        assert [batch.tolist() for batch in batches] == [rows[:4].tolist(), rows[4:].tolist()]
    with pytest.raises(TypeError, match=r"\[DataLoader\] a dataset must have __len__ and __getitem__; given=generator"):
        DataLoader((row for row in rows), 4)


@pytest.mark.parametrize(("lengths", "sizes"), [([7, 3], [7, 3]), ([0.5, 0.25, 0.25], [6, 2, 2]), ([1.0, 0.0], [10, 0])])
def test_parts_hold_every_sample_once(lengths, sizes):
    for parts in (random_split(Squares(), lengths, seed=1), split_dataset(Squares(), lengths)):
        assert [len(part) for part in parts] == sizes
        assert sorted(i for part in parts for i in part.indices) == list(range(10))


def test_a_seed_fixes_the_parts():
    first, again, other = (random_split(Squares(), [5, 5], seed)[0].indices.tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("lengths", [[5, 6], [0.5, 0.6], [-1, 11], []])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match=r"\[random_split\]"):
        random_split(Squares(), lengths)
