"""The sets that can be named, and what their parsers refuse."""

import gzip
import os
import struct
import tracemalloc

import numpy as np
import pytest

from netcl.data import FormatError, datasets
from netcl.data.formats import read_cifar10, read_idx


def idx_bytes(array, kind=0x08):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_digits_are_real_whole_and_split_once():
    train, test = datasets.digits()
    assert (len(train), len(test), train.classes[3]) == (1442, 355, "3")
    assert train.arrays[0].dtype == np.float32 and train.arrays[1].dtype == np.int64
    assert np.bincount(np.concatenate([train.arrays[1], test.arrays[1]])).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    means = np.stack([train.arrays[0][train.arrays[1] == digit].mean(0).ravel() for digit in range(10)])
    x, y = test.arrays[0].reshape(len(test), -1), test.arrays[1]
    nearest = ((x[:, None] - means) ** 2).sum(-1).argmin(1)
    assert (nearest == y).mean() > 0.85  # pictures and labels belong together


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [(">u1", 0x08), (">i2", 0x0B), (">f4", 0x0D)])
def test_idx_files_come_back(tmp_path, zipped, dtype, kind):
    array = np.arange(-6, 6).reshape(2, 3, 2).astype(dtype)
    content = idx_bytes(array, kind)
    (tmp_path / "a").write_bytes(gzip.compress(content) if zipped else content)
    read = read_idx(tmp_path / "a")
    np.testing.assert_array_equal(read, array)
    assert read.dtype.isnative and read.flags.writeable


WHOLE = idx_bytes(np.zeros((3, 4), np.uint8))
HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)
ROGUE = bytes([0, 0, 8, 2]) + struct.pack(">2I", 60000, 50000)  # three gigabytes promised, nothing there


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "must be an IDX file"),
        (b"PNG and more", "must be an IDX file; begins=50 4e 47 20"),
        (bytes([0, 0, 8, 0]), "must be an IDX file"),
        (bytes([0, 0, 7, 1, 0, 0, 0, 1, 5]), "must be an IDX file"),
        (WHOLE[:9], "must not end in its header"),
        (WHOLE[:-1], "as long as its header says"),
        (WHOLE + b"x", "as long as its header says|must end after"),
        (HUGE, "as long as its header says|must not exceed max_bytes"),
        (ROGUE, "as long as its header says|must not exceed max_bytes"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.fault("wrong IDX files", "magic, sizes, types", "`FormatError`")
def test_idx_files_that_are_not_right_are_refused(tmp_path, content, reason, zipped):
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(FormatError, match=rf"\[read_idx\] .*({reason}).*file="):
        read_idx(path)


@pytest.mark.fault("gzipped IDX file that grows", "0.4 MB that unpack to 70 MB", "refused before it is unpacked")
def test_a_small_file_cannot_take_gigabytes(tmp_path):
    """A header and a body that agree, of zeros that gzip packs a thousandfold: refused before the body is unpacked."""
    path, count = tmp_path / "a", 70 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(bytes([0, 0, 8, 1]) + struct.pack(">I", count))
        for _ in range(70):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"must not exceed max_bytes; shape=\(73400320,\).*pass max_bytes="):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert read_idx(path, max_bytes=count).shape == (count,)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("read", [read_idx, read_cifar10, datasets.text])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match=r"the file must not be a pipe or a device.*name a regular file"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize("cut", [15, 25, -9, -1])
@pytest.mark.fault("damaged gzip file", "cut at several places", "`FormatError`")
def test_a_damaged_gzip_file_is_refused(tmp_path, cut):
    rng = np.random.default_rng(0)
    (tmp_path / "a").write_bytes(gzip.compress(idx_bytes(rng.integers(0, 256, (9, 9), np.uint8)))[:cut])
    with pytest.raises(FormatError, match="damaged"):
        read_idx(tmp_path / "a")


def write_fashion(folder, images, labels, zipped=True):
    for part in ("train", "t10k"):
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            name = f"{part}-{what}-ubyte" + (".gz" if zipped else "")
            (folder / name).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion_mnist_from_its_files(tmp_path, zipped):
    images = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(5, 6, 7)
    write_fashion(tmp_path, images, np.arange(5, dtype=np.uint8), zipped)
    train, test = datasets.load("fashion_mnist", tmp_path)
    assert train.arrays[0].shape == (5, 1, 6, 7) and train.classes[4] == "Coat" and len(test) == 5
    np.testing.assert_allclose(train.arrays[0][:, 0] * 255, images, rtol=1e-6)


def test_images_without_their_labels_are_refused(tmp_path):
    write_fashion(tmp_path, np.zeros((5, 2, 2), np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(FormatError, match="with one label each"):
        datasets.fashion_mnist(tmp_path)
    write_fashion(tmp_path, np.zeros((5, 2, 2), np.uint8), np.full(5, 10, np.uint8))
    with pytest.raises(FormatError, match="labels must be below the number of classes; label=10"):
        datasets.fashion_mnist(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the file must exist.*download the four files .* give it as root="):
        datasets.mnist(tmp_path / "nowhere")


def test_cifar10_from_its_files(tmp_path):
    rng = np.random.default_rng(0)
    for i, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        records = rng.integers(0, 256, (2, 1 + 3 * 32 * 32), np.uint8)
        records[:, 0] = i
        (tmp_path / name).write_bytes(records.tobytes())
    train, test = datasets.cifar10(tmp_path)
    assert train.arrays[0].shape == (10, 3, 32, 32) and test.arrays[1].tolist() == [5, 5]
    np.testing.assert_allclose(test.arrays[0][1].ravel() * 255, records[1, 1:], rtol=1e-6)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(records.tobytes()[:-1])
    with pytest.raises(FormatError, match="the file must have one or more whole records; bytes=6145, record=3073"):
        read_cifar10(path)
    records[1, 0] = 10
    path.write_bytes(records.tobytes())
    with pytest.raises(FormatError, match="a label must be below 10; record=1, label=10"):
        datasets.cifar10(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"missing=\['test_batch.bin'\]"):
        datasets.cifar10(tmp_path)


def test_text_is_windows_of_bytes(tmp_path):
    (tmp_path / "t.txt").write_bytes(bytes(range(256)) * 4)
    train, test = datasets.text(tmp_path / "t.txt", block=8)
    x, y = train.take(np.array([0, 300]))
    np.testing.assert_array_equal(x[1], train[300][0])
    np.testing.assert_array_equal(y[:, :-1], x[:, 1:])
    assert len(train) == 1024 - 102 - 8 and (test[len(test) - 1][1][-1] <= 255) and train.name == "t.txt"
    with pytest.raises(ValueError, match=r"must leave block \+ 1 bytes"):
        datasets.text(tmp_path / "t.txt", block=600)


def test_names():
    train, _ = datasets.load("synthetic")
    assert train.arrays[0].shape == (1024, 1, 28, 28)
    with pytest.raises(ValueError, match=r"unknown dataset; name=imagenet, known=\['digits', "):
        datasets.load("imagenet")
    with pytest.raises(ValueError, match="requires root="):
        datasets.load("cifar10")
