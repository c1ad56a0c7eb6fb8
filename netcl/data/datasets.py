"""Datasets by name: bundled digits, MNIST and its variants, CIFAR-10, text, and synthetic ones. Nothing is downloaded.

Images are float32 of shape (N, channels, height, width), labels int64. Images from files are in 0..1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl.data.dataset import Dataset, TensorDataset
from netcl.data.errors import FormatError, message
from netcl.data.formats import CIFAR10_CLASSES, read_cifar10, read_idx, regular

Split = tuple[TensorDataset, TensorDataset]
PathLike = str | os.PathLike[str]

_SYSTEM = Path("/usr/share/datasets")  # where Debian's packages dataset-fashion-mnist and its like put their files
_DIGITS = tuple(str(digit) for digit in range(10))
FASHION_CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def digits() -> Split:
    """Return the handwritten digits that are part of netcl: 1,442 for training and 355 for testing, of 8 x 8 pixels.

    Every fifth sample of each class is for testing. Source and license are in ``netcl/data/digits/NOTICE.md``.

    >>> train, test = digits()
    >>> len(train), len(test), train[0][0].shape
    (1442, 355, (1, 8, 8))
    """
    folder = Path(__file__).with_name("digits")
    images, labels = read_idx(folder / "images-idx3-ubyte.gz"), read_idx(folder / "labels-idx1-ubyte.gz")
    x, y = (images[:, None] / np.float32(16)).astype(np.float32), labels.astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in np.unique(y):
        test[np.flatnonzero(y == label)[4::5]] = True
    return tuple(TensorDataset(x[part], y[part], name="digits", classes=_DIGITS) for part in (~test, test))  # type: ignore[return-value]


def mnist(root: PathLike | None = None) -> Split:
    """Return MNIST's training and test data from its four IDX files, gzipped or not, in ``root`` or where a system package puts them."""
    return _idx_images("mnist", root, _DIGITS)


def fashion_mnist(root: PathLike | None = None) -> Split:
    """Return Fashion-MNIST's training and test data from IDX files in ``root``, or where Debian's ``dataset-fashion-mnist`` puts them."""
    return _idx_images("fashion-mnist", root, FASHION_CLASSES)


def _idx_images(name: str, root: PathLike | None, classes: Sequence[str]) -> Split:
    folder = Path(root) if root is not None else _SYSTEM / name
    parts = [idx_arrays(name, folder, part, len(classes)) for part in ("train", "t10k")]
    return tuple(TensorDataset(_unit_range(x[:, None]), y, name=name, classes=classes) for x, y in parts)  # type: ignore[return-value]


def idx_arrays(name: str, folder: Path, part: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, H, W) in uint8 and labels (N,) in int64 of the part "train" or "t10k" of a set of IDX files."""
    images, labels = (read_idx(_file(name, folder, f"{part}-{what}-ubyte")) for what in ("images-idx3", "labels-idx1"))
    if images.ndim != 3 or labels.shape != images.shape[:1] or images.dtype != np.uint8:
        what = "images must be uint8 of shape (N, H, W), with one label each"
        raise FormatError(message(name, what, images=images.shape, labels=labels.shape, dtype=images.dtype, folder=folder))
    if labels.size and int(labels.max()) >= classes:
        raise FormatError(message(name, "labels must be below the number of classes", label=int(labels.max()), classes=classes))
    return images, labels.astype(np.int64)


def _file(name: str, folder: Path, stem: str) -> Path:
    """Return the file ``stem``, gzipped or not, with ``-idx`` or ``.idx`` in its name."""
    spellings = (stem, stem.replace("-idx", ".idx"))
    for candidate in [folder / f"{spelling}{suffix}" for spelling in spellings for suffix in ("", ".gz")]:
        if candidate.exists():
            return candidate
    remedy = "download the four files (names end with -ubyte.gz) into a folder and give it as root= (or to `netcl train --root`)"
    if name == "fashion-mnist":
        remedy = "on Debian: apt-get install dataset-fashion-mnist; or give the folder that holds the files as root="
    raise FileNotFoundError(message(name, "the file must exist", remedy, folder=folder, file=f"{stem}[.gz]"))


def cifar10(root: PathLike) -> Split:
    """Return training and test data of CIFAR-10 from binary files ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``."""
    folder = Path(root)
    folder = folder / "cifar-10-batches-bin" if (folder / "cifar-10-batches-bin").is_dir() else folder
    names = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
    missing = [name for files in names.values() for name in files if not (folder / name).exists()]
    if missing:
        remedy = "unpack cifar-10-binary.tar.gz and give its folder as root="
        raise FileNotFoundError(message("cifar10", "all files must exist", remedy, folder=folder, missing=missing))

    def part(files: Sequence[str]) -> TensorDataset:
        x, y = (np.concatenate(arrays) for arrays in zip(*(read_cifar10(folder / name) for name in files), strict=True))
        return TensorDataset(_unit_range(x), y.astype(np.int64), name="cifar10", classes=CIFAR10_CLASSES)

    return part(names["train"]), part(names["test"])


def _unit_range(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / np.float32(255)


class Bytes(Dataset):
    """Windows of a text, one every ``step`` bytes. A sample is a pair: ``block`` bytes, and the ``block`` bytes that start one byte later.

    >>> x, y = Bytes(b"hello", block=3)[1]
    >>> bytes(x.astype(np.uint8)), bytes(y.astype(np.uint8))
    (b'ell', b'llo')
    """

    vocabulary = 256

    def __init__(self, content: bytes, block: int = 128, step: int = 1, name: str = "text"):
        if block < 1 or step < 1:
            raise ValueError(message("Bytes", "block and step must be at least 1", block=block, step=step))
        if len(content) < block + 1:
            raise ValueError(message("Bytes", "the text must have at least block + 1 bytes", bytes=len(content), block=block))
        self.content, self.block, self.step, self.name = np.frombuffer(content, np.uint8), block, step, name

    def __len__(self) -> int:
        return (len(self.content) - self.block - 1) // self.step + 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(message("Bytes", "index must be in [0, windows)", index=index, windows=len(self)))
        window = self.content[index * self.step : index * self.step + self.block + 1].astype(np.int64)
        return window[:-1], window[1:]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows at ``indices``, stacked."""
        windows = self.content[np.asarray(indices)[:, None] * self.step + np.arange(self.block + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def text(path: PathLike, block: int = 128, step: int = 1, test: float = 0.1) -> tuple[Bytes, Bytes]:
    """Split a text file into training text and a last fraction ``test`` for testing; returns a :class:`Bytes` dataset of each."""
    content = regular(path, "text").read_bytes()
    cut = len(content) - max(block + 1, int(len(content) * test))
    if cut < block + 1:
        what = "the file must leave block + 1 bytes for each of the training and test parts"
        raise ValueError(message("text", what, bytes=len(content), block=block, test=test, file=path))
    return Bytes(content[:cut], block, step, Path(path).name), Bytes(content[cut:], block, block, Path(path).name)


def synthetic(samples: int = 1024, shape: Sequence[int] = (1, 28, 28), classes: int = 10, noise: float = 0.3, seed: int = 0) -> Split:
    """Return generated training images, and a fifth as many test images. An image is the coarse pattern of its class plus noise.

    >>> train, test = synthetic(samples=100, shape=(3, 8, 8), classes=4)
    >>> train.arrays[0].shape, len(test), sorted(set(train.arrays[1].tolist()))
    ((100, 3, 8, 8), 20, [0, 1, 2, 3])
    """
    if samples < 1 or classes < 1:
        raise ValueError(message("synthetic", "samples and classes must be at least 1", samples=samples, classes=classes))
    rng = np.random.default_rng(seed)
    coarse = rng.random((classes, *shape[:-2], *(max(1, n // 4) for n in shape[-2:])), np.float32)
    rows, columns = (np.arange(n) * k // n for n, k in zip(shape[-2:], coarse.shape[-2:], strict=True))
    patterns = coarse[..., rows[:, None], columns]

    def part(n: int) -> TensorDataset:
        y = rng.permutation(np.arange(n) % classes)
        x = patterns[y] + noise * rng.standard_normal((n, *shape), np.float32)
        return TensorDataset(x.astype(np.float32), y, name="synthetic", classes=[str(label) for label in range(classes)])

    return part(samples), part(max(1, samples // 5))


_LOADERS: tuple[Callable[..., Any], ...] = (digits, mnist, fashion_mnist, cifar10, synthetic, text)
DATASET_NAMES = {loader.__name__.replace("_", "-"): loader for loader in _LOADERS}


def load(name: str, root: PathLike | None = None) -> Any:
    """Load a dataset by name as ``(train, test)``; ``root`` is its folder or, for ``"text"``, its file.

    >>> train, test = load("digits")
    """
    key = name.lower().replace("_", "-")
    if key not in DATASET_NAMES:
        raise ValueError(message("datasets.load", "unknown dataset", name=name, known=list(DATASET_NAMES)))
    if root is None and key in ("cifar10", "text"):
        what = f"{key} requires root="
        raise ValueError(message("datasets.load", what, "pass its file" if key == "text" else "pass the folder of its files"))
    return DATASET_NAMES[key]() if root is None else DATASET_NAMES[key](root)
