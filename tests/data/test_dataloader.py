"""Batches, their order, and the position in it. Worker processes are in tests/faults/test_loader.py."""

import sys
import time
from itertools import islice

import numpy as np
import pytest

from netcl import data
from netcl.core.backend.opencl import backend_of
from netcl.data import DataLoader, Dataset, SharedBatchRingBuffer, TensorDataset, WorkerError, augment, augment_gpu, default_collate
from netcl.data.fetch import Field
from netcl.io import load_checkpoint, save_checkpoint
from netcl.runtime.scheduler import Stream


class Numbered(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return np.full((1, 4, 5), index, np.float32), index


def noisy(x, rng):
    return x + rng.standard_normal(x.shape, np.float32)


def seen(loader):
    return [np.asarray(y).tolist() for _, y in loader]


def flat(batches):
    return [index for batch in batches for index in batch]


def same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_epoch_has_every_sample_once_and_each_epoch_another_order():
    loader = DataLoader(Numbered(), 5, shuffle=True, seed=1)
    first, second = seen(loader), seen(loader)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 3] and len(loader) == 5
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(23)) != flat(first)
    assert first != second
    assert seen(DataLoader(Numbered(), 5, shuffle=True, seed=1)) == first != seen(DataLoader(Numbered(), 5, shuffle=True, seed=2))
    assert flat(seen(DataLoader(Numbered(), 5, shuffle=False, drop_last=True))) == list(range(20))
    assert list(DataLoader(TensorDataset(np.zeros((0, 3))), num_workers=2)) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(workers):
    wanted = [
        batch
        for _ in range(2)
        for batch in DataLoader(Numbered(), 4, shuffle=True, seed=0, transforms=noisy, augment=augment.RandomCrop(3))
    ][:6]
    with DataLoader(
        Numbered(), 4, shuffle=True, seed=0, transforms=noisy, augment=augment.RandomCrop(3), num_workers=workers, use_shared_mem=False
    ) as loader:
        same(list(loader), wanted)


def test_workers_begin_the_next_epoch_while_this_one_is_used():
    class Counted(Numbered):
        fetched = 0

        def __getitem__(self, index):
            self.fetched += 1
            return super().__getitem__(index)

    counted = Counted()
    straight = DataLoader(Numbered(), 4, shuffle=True, seed=0)
    with DataLoader(counted, 4, shuffle=True, seed=0, num_workers=1, use_shared_mem=False) as loader:
        same(list(loader), list(straight))
        deadline = time.monotonic() + 10
        while counted.fetched < 23 + 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counted.fetched == 23 + 8  # two batches, as many as may be ahead
        same(list(loader), list(straight))
        loader.load_state_dict({**loader.state_dict(), "epoch": 0})
        same(list(loader), list(DataLoader(Numbered(), 4, shuffle=True, seed=0)))


class Scaled(Numbered):
    """Samples that depend on attributes of the dataset and of what it holds."""

    def __init__(self):
        self.factor, self.offsets = 1, [0]

    def __getitem__(self, index):
        return self.factor * index + self.offsets[0]


def test_workers_see_attributes_of_the_dataset_that_changed_between_epochs():
    dataset = Scaled()
    with DataLoader(data.Subset(dataset, [1, 2, 3]), 3, num_workers=1, use_shared_mem=False) as loader:
        assert [next(iter(loader)).tolist() for _ in range(2)] == [[1, 2, 3]] * 2
        dataset.factor = 2
        assert next(iter(loader)).tolist() == [2, 4, 6]
        dataset.offsets[0] = 1
        assert next(iter(loader)).tolist() == [3, 5, 7]
        for name in ("dataset", "collate_fn", "num_workers"):
            with pytest.raises(ValueError, match=rf"{name} must not be changed after the loader was made; make"):
                setattr(loader, name, 1)


def test_samples_fetched_at_once_are_the_same_samples():
    images = np.random.default_rng(0).random((23, 3, 2)).astype(np.float32)
    at_once = DataLoader(TensorDataset(images, np.arange(23)), 5, shuffle=True, seed=3)
    one_by_one = DataLoader(TensorDataset(images, np.arange(23)), 5, shuffle=True, seed=3, transforms=np.asarray)
    same(list(at_once), list(one_by_one))


def test_a_position_is_taken_up_in_the_middle_of_an_epoch(tmp_path):
    straight = DataLoader(Numbered(), 4, shuffle=True, seed=5, transforms=noisy)
    list(straight)
    wanted = list(straight)
    left = DataLoader(Numbered(), 4, shuffle=True, seed=5, transforms=noisy, num_workers=2, use_shared_mem=False)
    list(left)
    for number, _ in enumerate(left):
        if number == 2:
            path = save_checkpoint(tmp_path / "c.netcl", loader=left, step=9)
            break
    resumed = DataLoader(Numbered(), 4, shuffle=True, seed=99, transforms=noisy)
    load_checkpoint(path, loader=resumed)
    assert resumed.epoch == 1
    same(list(resumed), wanted[3:])
    same(list(resumed), list(straight))
    assert resumed.state_dict() == {"seed": 5, "epoch": 3, "batch": 0, "batch_size": 4, "samples": 23}


def weighted(generator):
    return data.WeightedRandomSampler(np.arange(23) + 1.0, 23, generator=generator)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"batch_size": 4, "sampler": data.RandomSampler(range(23))},
        lambda: {"batch_size": 4, "sampler": data.RandomSampler(range(23), replacement=True, num_samples=2000)},
        lambda: {"batch_size": 4, "sampler": data.SubsetRandomSampler(range(23), generator=np.random.Generator(np.random.MT19937()))},
        lambda: {"batch_sampler": data.BatchSampler(weighted(None), 4, drop_last=True)},
    ],
    ids=["random", "replacement", "subset", "weighted"],
)
def test_a_position_of_a_random_sampler_is_taken_up(tmp_path, options, workers):
    """The order of the epoch goes on, and so do those of later epochs, also where the epoch has ended."""
    for stop in (0, 1, 3, None):
        with DataLoader(Numbered(), **options(), num_workers=workers, use_shared_mem=False) as loader:
            list(loader)
            batches = iter(loader)
            list(islice(batches, stop))
            path = save_checkpoint(tmp_path / "c.netcl", loader=loader)
            wanted = [list(loader) if stop is None else list(batches), list(loader)]
        resumed = DataLoader(Numbered(), **options())
        load_checkpoint(path, loader=resumed)
        for rest in wanted:
            same(list(resumed), rest)


def test_a_position_of_another_sampler_is_refused():
    loader = DataLoader(Numbered(), 4, sampler=weighted(np.random.Generator(np.random.MT19937(3))))
    before = next(iter(DataLoader(Numbered(), 23, sampler=weighted(np.random.Generator(np.random.MT19937(3))))))
    with pytest.raises(ValueError, match="generators of the kinds that the samplers draw from"):
        loader.load_state_dict(DataLoader(Numbered(), 4, sampler=weighted(0)).state_dict())
    with pytest.raises(ValueError, match="must have the keys of state_dict"):
        loader.load_state_dict(DataLoader(Numbered(), 4, seed=0).state_dict())
    same([tuple(map(np.concatenate, zip(*loader, strict=True)))], [before])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_size": 8}, "must have the same batch_size; state=8, loader=4"),
        ({"samples": 7}, "must have the same samples"),
        ({"batch": 7}, "must be at most the number of batches"),
        ({"epoch": -1}, "must have the keys of state_dict"),
        ({"seed": "1"}, "must have the keys of state_dict"),
        ({"more": 1}, "must have the keys of state_dict"),
    ],
)
def test_a_position_of_another_loader_is_refused(change, reason):
    loader = DataLoader(Numbered(), 4, shuffle=True, seed=1)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=reason):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_iterations_may_overlap(workers):
    wanted = DataLoader(Numbered(), 4, shuffle=True, seed=1)
    epochs = [seen(wanted), seen(wanted)]
    with DataLoader(Numbered(), 4, shuffle=True, seed=1, num_workers=workers, use_shared_mem=False) as loader:
        first = iter(loader)
        begun = next(first)[1].tolist()
        assert seen(loader) == epochs[1] and loader.epoch == 2
        assert [begun, *seen(first)] == epochs[0]
        assert loader.epoch == 2
        loader.load_state_dict({**loader.state_dict(), "epoch": 0})
        assert [a[1].tolist() for a, _ in zip(loader, loader, strict=True)] == epochs[0]


class Odd(Dataset):
    """Three good samples, then whatever the function gives."""

    def __init__(self, function):
        self.function = function

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return (np.zeros(2, np.float32), 1) if index < 3 else self.function()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda: {"x": 1}, "sample 3 must consist of numbers or arrays, got a dict"),
        (lambda: (np.zeros(2, np.float32), 0.5), "the dtype of sample 3 must be castable to that of the first sample of its batch"),
        (lambda: next(iter(())), "StopIteration"),  # must not pass for the end of the epoch
    ],
)
def test_what_is_no_sample_ends_the_epoch_by_name(function, told):
    for workers in (0, 1):
        with (
            DataLoader(Odd(function), 4, shuffle=False, num_workers=workers, use_shared_mem=False) as loader,
            pytest.raises((ValueError, RuntimeError), match=told),
        ):
            list(loader)


def test_a_dataset_that_ends_its_thread_is_named_at_once():
    with (
        DataLoader(Odd(sys.exit), 1, shuffle=False, num_workers=2, use_shared_mem=False) as loader,
        pytest.raises(WorkerError, match="worker 1 raised SystemExit"),
    ):
        list(loader)


def test_a_loader_closed_in_the_middle_says_so():
    loader = DataLoader(Numbered(), 4, shuffle=True, seed=1, num_workers=1, use_shared_mem=False)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(WorkerError, match="must not be closed during"):
        next(batches)
    assert len(list(loader)) == 6


def test_defaults_are_torchs():
    loader = DataLoader(TensorDataset(np.arange(4)))
    assert [batch.tolist() for batch in loader] == [[0], [1], [2], [3]]
    assert (loader.batch_size, loader.shuffle, loader.drop_last, loader.num_workers) == (1, False, False, 0)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"num_workers": -1}, {"prefetch": 0}, {"seed": -1}, {"batch_size": 2.0}])
def test_numbers_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=rf"\[DataLoader\] {next(iter(arguments))} must be a whole number"):
        DataLoader(Numbered(), **arguments)


def test_a_ring_refuses_what_does_not_fit():
    ring = SharedBatchRingBuffer([Field((3,), "float32"), Field((), "int64")], batch_size=4, slots=2)
    ring.put(1, (np.ones((4, 3), np.float32), np.arange(4)))
    ring.put(0, (np.zeros((2, 3), np.float32), np.arange(2)))
    assert ring.view(1, 4)[0].sum() == 12 and ring.view(1, 4)[1].tolist() == [0, 1, 2, 3]
    for x in (np.ones((4, 2), np.float32), np.ones((4, 3)), np.ones((5, 3), np.float32)):
        with pytest.raises(ValueError, match="every batch must have the shapes and dtypes of the first"):
            ring.put(0, (x, np.arange(len(x))))
    with pytest.raises(
        MemoryError, match=r"\[SharedBatchRingBuffer\] the memory for shared batches cannot be allocated.*bytes=\d+.*use_shared_mem=False"
    ):
        SharedBatchRingBuffer([Field((1 << 40,), "float64")], batch_size=1 << 20, slots=8)
    ring.close()


# ---- on a device


def test_batches_on_a_device(device):
    wanted = list(DataLoader(Numbered(), 4, shuffle=True, seed=0, transforms=noisy))
    for queue, workers in ((device, 0), (device.queue, 2)):
        loader = DataLoader(
            Numbered(), 4, shuffle=True, seed=0, transforms=noisy, device_queue=queue, num_workers=workers, use_shared_mem=False
        )
        batches = list(loader)
        assert batches[0][0].queue is device.queue and batches[0][0].shape == (4, 1, 4, 5) and loader.epoch == 1
        same([[tensor.to_host() for tensor in batch] for batch in batches], wanted)


def test_copies_beside_kernels_keep_their_order(cl_device):
    """As on a device with memory of its own: copies in a second queue, buffers reused while kernels still read them."""
    feed = augment_gpu.Feed(cl_device)
    feed._copies = Stream(cl_device)
    backend_of(feed._copies.queue).integrated = False
    total, coming = 0, feed.send((np.zeros((64, 64), np.float32),))
    for number in range(1, 30):
        (x,) = feed.ready(coming)
        coming = feed.send((np.full((64, 64), number, np.float32),))
        total = x + total
    assert total.to_host().tolist() == np.full((64, 64), sum(range(29))).tolist()
    assert x.queue is cl_device.queue and coming[0].queue is not cl_device.queue


def test_device_augmentation_is_seeded_by_the_loader(device):
    images = TensorDataset(np.random.default_rng(0).random((12, 3, 8, 8)).astype(np.float32), np.arange(12))
    on_host = list(DataLoader(images, 4, shuffle=True, seed=2, augment=augment.RandomCrop(8, padding=2)))
    there = DataLoader(images, 4, shuffle=True, seed=2, augment=augment_gpu.RandomCrop(8, padding=2), device_queue=device)
    same(on_host, [[tensor.to_host() for tensor in batch] for batch in there])
    both = DataLoader(
        images, 4, shuffle=True, seed=2, transforms=lambda x, rng: x, augment=augment_gpu.RandomCrop(8, padding=2), device_queue=device
    )
    assert not any(np.array_equal(x, y.to_host()) for (x, _), (y, _) in zip(on_host, both, strict=True))  # draws of their own
    with pytest.raises(ValueError, match=r"require a device; pass device="):
        DataLoader(images, augment=augment_gpu.RandomCrop(8))
    with pytest.raises(ValueError, match="augment requires batches of arrays"):
        list(DataLoader(images, collate_fn=default_collate, augment=augment_gpu.RandomCrop(8), device=device))


def test_a_batch_before_one_that_fails_is_delivered(device):
    data = [np.float32(1), np.float32(2), np.ones(2)]  # the second batch has samples of unlike shapes
    batches = iter(DataLoader(data, sampler=[0, 1, 1, 2], batch_size=2, device=device))
    assert next(batches).to_host().tolist() == [1, 2]
    with pytest.raises(ValueError, match="must have the shape of the first sample"):
        next(batches)
