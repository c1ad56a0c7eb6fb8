"""netcl.utils.data beyond samplers: single samples, tensors as samples, workers per epoch, data pipes; and device= of loaders."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import netcl
from netcl import data
from netcl.core.tensor import Tensor
from netcl.data import DataLoader
from netcl.utils import data as torch_data


def twice(x):
    return 2 * x


def test_device_is_another_name_of_device_queue(device):
    for given in (device, device.queue):
        (x,) = DataLoader(data.TensorDataset(np.arange(4.0)), 4, device=given)
        assert isinstance(x, Tensor) and x.queue is device.queue and x.tolist() == [0, 1, 2, 3]
    (x,) = DataLoader(data.TensorDataset(np.arange(4.0)), 4, device="cpu")
    assert x.device == netcl.device("cpu")


def test_no_batches():
    with netcl.device("cpu"):
        samples = list(torch_data.DataLoader(data.TensorDataset(np.ones((3, 2)), np.arange(3)), batch_size=None))
        assert [(x.shape, int(y)) for x, y in samples] == [((2,), 0), ((2,), 1), ((2,), 2)] and isinstance(samples[0][0], Tensor)
        stream = torch_data.IterDataPipe(np.arange(i) for i in range(1, 4))
        assert [x.tolist() for x in torch_data.DataLoader(stream, batch_size=None)] == [[0], [0, 1], [0, 1, 2]]
    assert list(DataLoader(data.TensorDataset(np.arange(3)), None, collate_fn=twice)) == [0, 2, 4]
    with pytest.raises(ValueError, match="batch_size=None cannot be combined with drop_last or batch_sampler"):
        DataLoader(data.TensorDataset(np.arange(3)), None, drop_last=True)


def test_tensors_are_samples():
    with netcl.device("cpu"):
        x, y = netcl.ones(4, 2), netcl.arange(4)
        rows = torch_data.TensorDataset(x, y)
        assert rows.tensors[0] is x and rows[2][1].item() == 2 and type(rows[2]) is tuple and rows[1:3][0].shape == (2, 2)
        first, second = next(iter(torch_data.DataLoader(torch_data.Subset(rows, [3, 1]), batch_size=2)))
        assert first.shape == (2, 2) and second.tolist() == [3, 1]
        copied = pickle.loads(pickle.dumps(rows))
        assert np.asarray(copied[3][1]).item() == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_do_not_stay_see_the_dataset_of_the_epoch(persistent):
    started = []
    rows = data.TensorDataset(np.arange(4))
    loader = DataLoader(rows, 2, num_workers=1, use_shared_mem=False, worker_init_fn=started.append, persistent_workers=persistent)
    with loader:
        for _ in range(3):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert started == [0] * (1 if persistent else 3)


# ---- pipes


def test_pipes_of_streams():
    pipe = torch_data.IterDataPipe(range(10))
    assert list(pipe.map(twice).filter(lambda x: x % 4 == 0).batch(2, drop_last=True)) == [[0, 4], [8, 12]]
    assert list(pipe.batch(4).unbatch()) == list(range(10)) and type(next(iter(pipe.batch(2)))) is torch_data.DataChunk
    assert list(pipe.concat(range(2)))[-2:] == [0, 1] and list(pipe.zip("ab")) == [(0, "a"), (1, "b")]
    assert sorted(pipe.shuffle(buffer_size=3, seed=0)) == list(range(10)) != list(pipe.shuffle(buffer_size=3, seed=0))
    assert [batch.tolist() for batch in pipe.batch(5).collate()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    shared = DataLoader(pipe.sharding_filter(), 5, num_workers=2, use_shared_mem=False)
    assert sorted(np.concatenate(list(shared)).tolist()) == list(range(10))
    for workers in (0, 2):
        with DataLoader(pipe.shuffle().sharding_filter(), 5, num_workers=workers, use_shared_mem=False, seed=1) as loader:
            epochs = [np.concatenate(list(loader)).tolist() for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10)) and epochs[0] != epochs[1]
    assert list(pickle.loads(pickle.dumps(pipe.map(twice).batch(5))))[1] == [10, 12, 14, 16, 18]
    with pytest.raises(AttributeError, match=r"\[IterDataPipe\] unknown method 'mapp'; known are map, filter"):
        pipe.mapp(twice)


def test_pipes_of_samples_by_number():
    pipe = torch_data.MapDataPipe([3, 1, 2])
    assert len(pipe) == 3 and list(torch_data.Subset(pipe, [2, 0])) == [2, 3]
    with pytest.raises(AttributeError, match=r"\[MapDataPipe\] unknown method 'map'"):
        pipe.map(twice)


def test_pipes_of_ones_own():
    @torch_data.functional_datapipe("plus_for_test")
    @torch_data.non_deterministic
    class Plus(torch_data.IterDataPipe):
        def __init__(self, source, amount):
            self.source, self.amount = source, amount

        def __iter__(self):
            return (x + self.amount for x in self.source)

    try:
        assert list(torch_data.IterDataPipe([1, 2]).plus_for_test(5).map(twice)) == [12, 14]
        with (
            torch_data.guaranteed_datapipes_determinism(),
            pytest.raises(TypeError, match=r"\[Plus\] a deterministic pipe is required here"),
        ):
            torch_data.IterDataPipe([1]).plus_for_test(5)
        with pytest.raises(ValueError, match="the name must not be registered already; name=plus_for_test"):
            torch_data.functional_datapipe("plus_for_test")(Plus)
    finally:
        del torch_data.IterDataPipe.functions["plus_for_test"]


class Mapped(data.Dataset):
    """Numbers through a function, which a process that is not a fork cannot get if it has no name."""

    def __init__(self, function):
        self.function = function

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.function(index)


def test_workers_of_a_dataset_with_a_lambda_are_threads(caplog):
    with torch_data.DataLoader(Mapped(lambda index: float(index * 2)), batch_size=2, num_workers=2) as loader, netcl.device("cpu"):
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6], [8, 10]]
        assert loader.worker_pids() == []
    assert [r.message.count("threads are used instead of processes") for r in caplog.records] == [1]


def test_classes_take_the_type_of_their_samples():
    class Typed(torch_data.Dataset[int]):
        def __len__(self):
            return 2

        def __getitem__(self, index: int) -> int:
            return index

    class Backwards(torch_data.Sampler[int]):
        def __iter__(self):
            return iter([1, 0])

    loader: torch_data.DataLoader[int] = torch_data.DataLoader(Typed(), sampler=Backwards())
    with netcl.device("cpu"):
        assert [x.tolist() for x in loader] == [[1], [0]] and torch_data.IterableDataset[int].__origin__ is torch_data.IterableDataset
