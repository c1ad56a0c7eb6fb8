"""Samplers, batches of any structure, streams, and netcl.utils.data."""

from __future__ import annotations

import os
from collections import namedtuple
from itertools import chain, islice

import numpy as np
import pytest

import netcl
from netcl import data
from netcl.core.device import device as use_device
from netcl.core.tensor import Tensor
from netcl.data import DataLoader, IterableDataset, SampleError, TensorDataset, WorkerError, get_worker_info
from netcl.utils import data as torch_data

Pair = namedtuple("Pair", ["x", "y"])


class Records(data.Dataset):
    """Ten samples of one structure."""

    def __init__(self, make=lambda i: {"x": np.full(3, i, np.float32), "meta": {"name": f"s{i}", "i": i}}):
        self.make = make

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.make(index)


class Stream(IterableDataset):
    """The numbers below n; each worker gives its own share."""

    def __init__(self, n=10):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


# ---- samplers


def test_random_samplers():
    assert sorted(data.RandomSampler(range(7), generator=1)) == list(range(7))
    assert list(data.RandomSampler(range(7), generator=1)) == list(data.RandomSampler(range(7), generator=1))
    drawn = list(data.RandomSampler(range(3), replacement=True, num_samples=3000, generator=1))
    assert len(drawn) == 3000 and min(np.bincount(drawn)) > 900
    assert list(islice(data.RandomSampler(range(3), True, 10**12, 1), 5)) == drawn[:5]
    few = data.RandomSampler(range(5), num_samples=12, generator=2)
    assert len(few) == len(list(few)) == 12 and sorted(list(few)[:5]) == list(range(5))
    assert sorted(data.SubsetRandomSampler([4, 8, 15], generator=0)) == [4, 8, 15]
    shared = netcl.Generator().manual_seed(0)
    orders = [list(sampler) for sampler in (data.RandomSampler(range(20), generator=shared),) * 2]
    orders += [part.indices.tolist() for _ in range(2) for part in data.random_split(range(20), [20], generator=shared)]
    assert len(set(map(tuple, orders))) == 4  # each draws on, as from torch's generators
    assert list(data.RandomSampler(range(20), generator=shared.manual_seed(0))) == orders[0]


def test_loaders_without_a_seed_follow_manual_seed():
    def orders():
        netcl.manual_seed(4)
        loaders = [DataLoader(TensorDataset(np.arange(20)), 20, shuffle=True) for _ in range(2)]
        made = [next(iter(loader)).tolist() for loader in loaders]
        return [*made, list(data.RandomSampler(range(20))), *(part.indices.tolist() for part in data.random_split(range(20), [20]))]

    first = orders()
    assert first == orders() and len(set(map(tuple, first))) == 4


def test_random_samplers_of_weights_and_parts():
    weighted = list(data.WeightedRandomSampler([0.0, 1.0, 3.0], 4000, generator=3))
    assert set(weighted) == {1, 2} and 0.7 < np.mean(np.array(weighted) == 2) < 0.8
    assert sorted(data.WeightedRandomSampler([1.0, 0.0, 5.0], 2, replacement=False, generator=0)) == [0, 2]
    assert list(data.SequentialSampler(range(3))) == [0, 1, 2]


def test_batches_of_a_sampler():
    assert list(data.BatchSampler(range(5), 2, True)) == [[0, 1], [2, 3]]
    assert [len(data.BatchSampler(range(5), 2, drop)) for drop in (True, False)] == [2, 3]


def test_shares_of_a_distributed_sampler():
    for shuffle in (False, True):
        parts = [list(data.DistributedSampler(range(10), 3, rank, shuffle)) for rank in range(3)]
        assert [len(part) for part in parts] == [4, 4, 4] and set(chain(*parts)) == set(range(10))
        parts = [list(data.DistributedSampler(range(10), 3, rank, shuffle, drop_last=True)) for rank in range(3)]
        assert len(set(chain(*parts))) == 9
    sampler = data.DistributedSampler(range(100), 2, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(data.DistributedSampler(range(1), 3, 2)) == [0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: data.RandomSampler(range(3), num_samples=0), r"\[RandomSampler\] num_samples must be a whole number of at least 1"),
        (lambda: data.WeightedRandomSampler([-1.0], 1), r"weights must be a vector of numbers >= 0 with a sum above 0; weights=\[-1.0\]"),
        (
            lambda: data.WeightedRandomSampler([1.0, 0.0], 2, False),
            r"num_samples must be at most the count of nonzero weights; num_samples=2, nonzero=1",
        ),
        (lambda: data.DistributedSampler(range(3)), r"with rank from 0 to num_replicas - 1; num_replicas=None, rank=None; pass both"),
        (lambda: DataLoader(Records(), shuffle=True, sampler=[0]), r"only one argument may choose the samples; given=shuffle, sampler"),
        (lambda: DataLoader(Stream(), shuffle=True), r"an iterable dataset cannot be shuffled or sampled; given=shuffle"),
        (lambda: DataLoader(Records(), 2, batch_sampler=[[0]]), r"batch_sampler cannot be combined with drop_last.*; batch_size=2"),
        (lambda: data.StackDataset([1, 2], [1]), r"all by name, with equal lengths; lengths=\[2, 1\]"),
        (lambda: data.ConcatDataset([Stream()]), r"one dataset, and none may be an IterableDataset; datasets=\['Stream'\]"),
        (lambda: DataLoader(Stream()).state_dict(), r"an iterable dataset has no position to resume from"),
    ],
)
def test_error_texts(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# ---- datasets


def test_datasets_of_datasets():
    both = data.TensorDataset([1, 2]) + data.TensorDataset([3, 4, 5])
    assert [int(both[i]) for i in (*range(5), -1)] == [1, 2, 3, 4, 5, 5] and both.cumulative_sizes == [2, 5]
    with pytest.raises(IndexError, match=r"\[ConcatDataset\] index must be in \[-samples, samples\); index=5, samples=5"):
        both[5]
    assert data.StackDataset([1, 2], "ab")[1] == (2, "b") and len(data.StackDataset([1, 2])) == 2
    assert data.StackDataset(x=[1, 2], y="ab")[0] == {"x": 1, "y": "a"}
    assert list(Stream(2) + Stream(3)) == [0, 1, 0, 1, 2]
    parts = data.random_split(range(10), [0.5, 0.3, 0.2], generator=np.random.default_rng(0))
    assert [len(part) for part in parts] == [5, 3, 2]


# ---- batches


def test_collate():
    batch = data.default_collate([Pair(1, ["a", (1.5, 2)]), Pair(2, ["b", (2.5, 3)])])
    assert type(batch) is Pair and batch.x.dtype == np.int64 and batch.x.tolist() == [1, 2]
    assert batch.y[0] == ["a", "b"] and [part.tolist() for part in batch.y[1]] == [[1.5, 2.5], [2, 3]]
    with pytest.raises(SampleError, match=r"samples of one batch must have equal shapes; shapes=\[\(2,\), \(3,\)\]; pad them"):
        data.default_collate([np.zeros(3), np.zeros(2)])
    with pytest.raises(SampleError, match=r"samples of one batch must have equal lengths; lengths=\[1, 2\]"):
        data.default_collate([(1,), (1, 2)])
    with pytest.raises(SampleError, match=r"or dicts, tuples and lists of them, got object; pass a collate_fn"):
        data.default_collate([object()])


def names(batches):
    return [batch["meta"]["name"] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_any_structure(workers):
    with DataLoader(Records(), 4, num_workers=workers, use_shared_mem=False) as loader:
        batches = list(loader)
    assert names(batches) == [["s0", "s1", "s2", "s3"], ["s4", "s5", "s6", "s7"], ["s8", "s9"]]
    assert batches[1]["x"].shape == (4, 3) and batches[2]["meta"]["i"].tolist() == [8, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_makes_ragged_batches(workers):
    ragged = Records(lambda i: np.arange(i))
    with DataLoader(ragged, 3, num_workers=workers, use_shared_mem=False, collate_fn=lambda s: [len(x) for x in s]) as loader:
        assert list(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert len(loader) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_of_a_loader(workers):
    plain = data.TensorDataset(np.arange(10))
    for options, wanted in (
        ({"sampler": [3, 1, 2], "batch_size": 2}, [[3, 1], [2]]),
        ({"sampler": [3, 1, 2], "batch_size": 2, "drop_last": True}, [[3, 1]]),
        ({"batch_sampler": [[1], [2, 3, 4], [5]]}, [[1], [2, 3, 4], [5]]),
    ):
        with DataLoader(plain, num_workers=workers, use_shared_mem=False, **options) as loader:
            for _ in range(2):
                assert [batch.tolist() for batch in loader] == wanted
            assert len(loader) == len(wanted)
    endless = data.RandomSampler(plain, replacement=True, num_samples=10**10, generator=0)
    with DataLoader(plain, 5, sampler=endless, num_workers=workers, use_shared_mem=False) as loader:
        assert [len(batch) for batch in islice(loader, 4)] == [5] * 4


def test_a_generator_fixes_the_order():
    orders = [[batch.tolist() for batch in DataLoader(range_set(), 3, True, generator=np.random.default_rng(4))] for _ in range(2)]
    assert orders[0] == orders[1]


def range_set():
    return data.TensorDataset(np.arange(10))


# ---- streams and workers


def test_streams():
    loader = DataLoader(Stream(), 4)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(list(DataLoader(Stream(), 4, drop_last=True))) == 2
    assert [a.tolist() + b.tolist() for a, b in zip(loader, loader, strict=True)][2] == [8, 9, 8, 9]
    with DataLoader(Stream(11), 2, num_workers=3, use_shared_mem=False) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8]]
    with pytest.raises(TypeError):
        len(loader)


def test_workers_are_set_up():
    seen = []

    def set_up(number):
        info = get_worker_info()
        seen.append((number, info.id, info.num_workers, info.seed))

    with DataLoader(range_set(), 5, num_workers=2, use_shared_mem=False, worker_init_fn=set_up, seed=7) as loader:
        assert len(list(loader)) == 2
    assert sorted(seen) == [(0, 0, 2, 7), (1, 1, 2, 8)] and get_worker_info() is None

    def fails(number):
        raise KeyError(number)

    with (
        DataLoader(range_set(), 5, num_workers=1, use_shared_mem=False, worker_init_fn=fails) as loader,
        pytest.raises(WorkerError, match="worker 0 raised KeyError: 0"),
    ):
        list(loader)


def test_worker_processes_send_any_structure():
    """One process, which serves dicts over its pipe."""
    if not hasattr(os, "fork"):
        pytest.skip("worker processes need POSIX")
    with DataLoader(data.StackDataset(x=np.arange(6.0), i=list(range(6))), 4, num_workers=1) as loader:
        loader.timeout = 60
        assert [{key: value.tolist() for key, value in batch.items()} for batch in loader] == [
            {"x": [0.0, 1.0, 2.0, 3.0], "i": [0, 1, 2, 3]},
            {"x": [4.0, 5.0], "i": [4, 5]},
        ]


# ---- netcl.utils.data


def test_torchs_loader_gives_tensors(device):
    with use_device(device.queue):
        batches = list(torch_data.DataLoader(Records(), 4, num_workers=0))
        assert isinstance(batches[0]["x"], Tensor) and batches[0]["x"].queue is device.queue
        assert names(batches)[2] == ["s8", "s9"] and batches[2]["meta"]["i"].tolist() == [8, 9]
        pairs = next(iter(torch_data.DataLoader(Records(lambda i: (np.float32(i), i)), batch_size=3)))
        assert type(pairs) is list and [part.tolist() for part in pairs] == [[0.0, 1.0, 2.0], [0, 1, 2]]
        (x,) = next(iter(torch_data.DataLoader(torch_data.TensorDataset(np.ones((4, 2), np.float32)), 4)))
        assert x.shape == (4, 2)
        assert torch_data.default_collate([1, 2]).tolist() == [1, 2]
        ragged = torch_data.DataLoader(Records(lambda i: np.arange(i)), 2, collate_fn=lambda s: np.concatenate(s))
        assert [batch.tolist() for batch in ragged][2] == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_torchs_loader_follows_the_seed():
    orders = []
    for seed in (3, 3, 4):
        netcl.manual_seed(seed)
        loader = torch_data.DataLoader(torch_data.TensorDataset(np.arange(40)), 40, shuffle=True, persistent_workers=False)
        orders.append([batch[0].tolist() for batch in loader])
    netcl.manual_seed(0)
    assert orders[0] == orders[1] != orders[2]
    loaders = [torch_data.DataLoader(torch_data.TensorDataset(np.arange(40)), 40, shuffle=True) for _ in range(2)]  # one per epoch
    assert len({tuple(batch[0].tolist()) for loader in loaders for batch in loader}) == 2


def test_loaders_see_tensors_of_a_dataset_that_were_written(device):
    labels = Tensor.from_host(device.queue, np.zeros(4, np.float32))
    dataset = torch_data.TensorDataset(labels)
    loaders = [torch_data.DataLoader(dataset, 4, num_workers=workers, use_shared_mem=False) for workers in (0, 1)]
    for expected in ([0.0] * 4, [1.0] * 4, [1.0, 5.0, 1.0, 1.0]):
        assert [next(iter(loader))[0].tolist() for loader in loaders] == [expected] * 2
        if expected[0] == 0.0:
            labels.add_(1.0)
        else:
            labels[1] = 5.0


def test_a_sampler_in_the_place_of_a_flag_is_refused():
    with pytest.raises(TypeError, match=r"\[DataLoader\] drop_last must be true or false; given=list; pass samplers by name"):
        DataLoader(range_set(), 2, False, [2, 1, 0])


# ---- samples that differ in type


@pytest.mark.parametrize("workers", [0, 2])
def test_values_that_do_not_fit_the_first_dtype_are_refused(workers):
    """A 16-bit image after an 8-bit one would wrap around, and a large number after a half become infinity."""
    for first, later in ((np.uint8(1), np.uint16(300)), (np.int8(0), np.int64(-200)), (np.float16(1), np.float32(1e6))):
        pair = Records(lambda i, samples=(first, later): np.array([samples[i % 2]]))
        loader = DataLoader(pair, 2, num_workers=workers, use_shared_mem=False)
        with loader, pytest.raises((SampleError, WorkerError), match="the values of sample 1 must fit the dtype of the first sample"):
            list(loader)
    fitting = Records(lambda i: np.uint16(2 * i) if i % 2 else np.uint8(i))
    assert next(iter(DataLoader(fitting, 4))).tolist() == [0, 2, 2, 6]


@pytest.mark.parametrize(
    "samples, reason",
    [
        (({"a": 1, "b": 2}, {"a": 1}), r"equal keys; keys=\['a'\], first=\['a', 'b'\]"),
        (({"a": 1}, {"a": 1, "b": 2}), r"equal keys; keys=\['a', 'b'\], first=\['a'\]"),
        (({"a": 1}, {"a": "x"}), r"equal types; types=\['int', 'str'\]"),
        (({"a": "x"}, {"a": 1}), r"equal types; types=\['int', 'str'\]"),
        (({"a": 1}, {"a": None}), r"equal types; types=\['NoneType', 'int'\]"),
        (({"a": (1, 2)}, {"a": 3}), r"equal types; types=\['int', 'tuple'\]"),
        (({"a": 1}, ("a", 1)), r"equal keys; keys=tuple, first=\['a'\]"),
    ],
)
def test_samples_of_unequal_structure_are_refused(samples, reason):
    with pytest.raises(SampleError, match=reason):
        next(iter(DataLoader(Records(lambda i: samples[i % 2]), 2)))


@pytest.mark.parametrize("indices", [[0.9, 1.2], [True, False], ["a"], [None]])
def test_indices_must_be_whole_numbers(indices):
    for given in ({"sampler": indices}, {"batch_sampler": [indices]}):
        with pytest.raises(TypeError, match=r"a sampler must yield whole numbers.*; indices=\["):
            list(DataLoader(Records(), **given))
    assert [len(batch) for batch in DataLoader(TensorDataset(np.arange(3)), batch_sampler=[[0], [], np.array([1, 2], np.int32)])] == [
        1,
        0,
        2,
    ]


def test_sequences_of_unequal_shapes_name_the_remedy():
    pairs = Records(lambda i: (np.zeros(3), (np.zeros(2), i)))
    with pytest.raises(
        SampleError, match=r"sample 0 must consist of numbers, arrays, or sequences of equal shapes.*collate_fn=default_collate"
    ):
        next(iter(DataLoader(pairs, 2)))
    x, (y, number) = next(iter(DataLoader(pairs, 2, collate_fn=data.default_collate)))
    assert x.shape == (2, 3) and y.shape == (2, 2) and number.tolist() == [0, 1]
