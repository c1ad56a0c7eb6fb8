"""Datasets of ``torchvision.datasets`` by their names: nothing is downloaded, and files are read as untrusted input."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.data.dataset import Dataset
from netcl.data.datasets import FASHION_CLASSES, idx_arrays
from netcl.data.errors import FormatError
from netcl.data.formats import CIFAR10_CLASSES, read_cifar10, read_cifar100, regular
from netcl.io import opcodes
from netcl.io.opcodes import Allowed, Attributes, Refused
from netcl.vision.functional import host_tensor, pillow, to_pil_image

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # decoders that Pillow may use: no other programs, no scripts
_DIGIT_CLASSES = ("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four", "5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine")
_KANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")


def default_loader(path: Any, mode: str = "RGB") -> Any:
    """Read an image file as a PIL image in ``mode``.

    Gray values of 16 bits become their upper 8 bits unless ``mode`` holds more. Raises ``FormatError`` for files that are damaged, of
    another format than :data:`IMG_EXTENSIONS` names, of gray values of 32 bits, or larger than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    image, op = pillow(), "default_loader"
    bomb = (image.DecompressionBombError, image.DecompressionBombWarning)
    with warnings.catch_warnings(), regular(path, op).open("rb") as file:
        warnings.simplefilter("error", image.DecompressionBombWarning)
        try:
            found = image.open(file, formats=_FORMATS)
            if found.mode[0] in "IF" and mode[0] not in "IF":
                found = _eight_bits(found, path)
            return found.convert(mode)
        except bomb as error:
            remedy = "if you trust the file, raise PIL.Image.MAX_IMAGE_PIXELS"
            raise FormatError(message(op, "the image must not have more pixels than the limit", remedy, reason=error, file=path)) from None
        except FormatError:
            raise
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            raise FormatError(message(op, "the file must be a complete image", reason=error, file=path)) from None


def _eight_bits(found: Any, path: Any) -> Any:
    """Return a gray image of 16 or 32 bits in 8 bits. Pillow itself cuts every value at 255, which makes most pictures white."""
    values = np.asarray(found)
    if found.mode.startswith("I;16") or (found.mode == "I" and found.format in ("PNG", "PPM")):  # which older Pillows hold in 32 bits
        values = values.astype(np.int64) >> 8
    elif not ((values >= 0) & (values <= 255) & (values == np.rint(values))).all():
        what, remedy = "gray values must have 8 or 16 bits", "scale them to 0..255, or pass a loader"
        raise FormatError(message("default_loader", what, remedy, mode=found.mode, low=values.min(), high=values.max(), file=path))
    return pillow().fromarray(values.astype(np.uint8))


pil_loader = default_loader


class VisionDataset(Dataset):
    """A dataset with transforms: ``transform`` of the image, ``target_transform`` of the label, or ``transforms`` of both."""

    def __init__(self, root: Any = None, transforms: Any = None, transform: Any = None, target_transform: Any = None):
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError(message(type(self).__name__, "transforms must not be combined with transform or target_transform"))
        self.root, self.transforms, self.transform, self.target_transform = root, transforms, transform, target_transform

    def _transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        if self.transforms is not None:
            return self.transforms(image, target)
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, root={self.root!r}, transform={self.transform!r})"


class DatasetFolder(VisionDataset):
    """Files in a folder per class: ``root/class/.../file``. Classes are sorted by name; empty classes raise unless ``allow_empty``.

    - **loader**: loads a sample from a path; **extensions** or **is_valid_file**: which files are samples.
    """

    def __init__(
        self, root: Any, loader: Callable[[str], Any], extensions: Sequence[str] | None = None, transform: Any = None,
        target_transform: Any = None, is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False,
    ):  # fmt: skip
        super().__init__(root, transform=transform, target_transform=target_transform)
        if (extensions is None) == (is_valid_file is None):
            raise ValueError(message(type(self).__name__, "exactly one of extensions and is_valid_file must be given"))
        self.loader, self.extensions = loader, extensions
        self.classes, self.class_to_idx = self.find_classes(root)
        self.samples = self.make_dataset(root, self.class_to_idx, extensions, is_valid_file, allow_empty)
        self.targets = [label for _, label in self.samples]

    def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
        """Return the sorted names of the subfolders, and their numbers by name; raises if there are none."""
        if not Path(directory).is_dir():
            raise FileNotFoundError(message(type(self).__name__, "the folder must exist", folder=directory))
        classes = sorted(entry.name for entry in Path(directory).iterdir() if entry.is_dir())
        if not classes:
            what, remedy = "the folder must have one subfolder per class", "put images into root/class/"
            raise FileNotFoundError(message(type(self).__name__, what, remedy, folder=directory))
        return classes, {name: number for number, name in enumerate(classes)}

    @staticmethod
    def make_dataset(
        directory: Any, class_to_idx: dict[str, int], extensions: Sequence[str] | None = None,
        is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False,
    ) -> list[tuple[str, int]]:  # fmt: skip
        """Return the paths of all samples with the numbers of their classes, in torchvision's order; links are followed."""
        endings = tuple(ending.lower() for ending in ([extensions] if isinstance(extensions, str) else extensions or ()))
        valid = is_valid_file or (lambda path: path.lower().endswith(endings))
        found, empty = [], []
        for name, number in sorted(class_to_idx.items()):
            folders = sorted((folder, sorted(files)) for folder, _, files in os.walk(Path(directory, name), followlinks=True))
            paths = [path for folder, files in folders for file in files if valid(path := os.path.join(folder, file))]
            found += [(path, number) for path in paths]
            empty += [] if paths else [name]
        if empty and not allow_empty:
            what, remedy = "every class must have at least one file", "remove its folder, or pass allow_empty=True"
            raise FileNotFoundError(message("DatasetFolder", what, remedy, classes=empty, extensions=list(endings)))
        return found

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        return self._transformed(self.loader(path), target)


class ImageFolder(DatasetFolder):
    """Images in a folder per class: ``root/cat/1.png``. A sample is ``(image, class number)``."""

    def __init__(
        self, root: Any, transform: Any = None, target_transform: Any = None, loader: Callable[[str], Any] = default_loader,
        is_valid_file: Callable[[str], bool] | None = None, allow_empty: bool = False,
    ):  # fmt: skip
        extensions = IMG_EXTENSIONS if is_valid_file is None else None
        super().__init__(root, loader, extensions, transform, target_transform, is_valid_file, allow_empty)
        self.imgs = self.samples


class FakeData(VisionDataset):
    """Random images, reproducible by index, for trying a program without data."""

    def __init__(
        self, size: int = 1000, image_size: Sequence[int] = (3, 224, 224), num_classes: int = 10, transform: Any = None,
        target_transform: Any = None, random_offset: int = 0,
    ):  # fmt: skip
        super().__init__(transform=transform, target_transform=target_transform)
        self.size, self.image_size, self.num_classes, self.random_offset = size, tuple(image_size), num_classes, random_offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(message("FakeData", "index must be in [0, samples)", index=index, samples=self.size))
        rng = np.random.default_rng((self.random_offset, index))
        pixels = np.moveaxis(rng.integers(0, 256, self.image_size, np.uint8), 0, -1)
        return self._transformed(to_pil_image(pixels), int(rng.integers(self.num_classes)))


class _Bundle(VisionDataset):
    """Base class of datasets of small images that are stored in a few files and held in memory."""

    data: Any
    targets: Any
    source: str
    folders: tuple[str, ...]

    def __init__(self, root: Any, train: bool = True, transform: Any = None, target_transform: Any = None, download: bool = False):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.train, name = train, type(self).__name__
        places = [Path(root, folder) for folder in self.folders]
        try:
            self._read(next((place for place in places if place.is_dir()), Path(root)))
        except FileNotFoundError as error:
            remedy = f"download them from {self.source} into {places[0]}"
            raise FileNotFoundError(message(name, "the files are missing, and netcl downloads nothing", remedy, missing=error)) from None
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def _read(self, folder: Path) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        pixels, label = (_item(values, index) for values in (self.data, self.targets))  # which a program may have replaced
        return self._transformed(pillow().fromarray(np.ascontiguousarray(pixels)), int(label))


def _item(values: Any, index: int) -> Any:
    """Return an item of an array, a list or a tensor."""
    if isinstance(values, Tensor):
        return values[index].to_host() if values.array is None else values.array[index]
    return values[index]


class MNIST(_Bundle):
    """Handwritten digits of 28 x 28, from their IDX files, gzipped or not, in ``root/MNIST/raw``, ``root/MNIST`` or ``root``."""

    source, folders = "https://yann.lecun.com/exdb/mnist", ("MNIST/raw", "MNIST")
    classes = _DIGIT_CLASSES

    def _read(self, folder: Path) -> None:
        name = type(self).__name__
        arrays = idx_arrays(name, folder, "train" if self.train else "t10k", len(self.classes))
        self.data, self.targets = map(host_tensor, arrays)


class FashionMNIST(MNIST):
    """Clothes of 28 x 28 in ten classes, in MNIST's format, in ``root/FashionMNIST/raw``."""

    source, folders = "https://github.com/zalandoresearch/fashion-mnist", ("FashionMNIST/raw", "FashionMNIST")
    classes = FASHION_CLASSES


class KMNIST(MNIST):
    """Handwritten Japanese characters of 28 x 28 in ten classes, in MNIST's format, in ``root/KMNIST/raw``."""

    source, folders = "http://codh.rois.ac.jp/kmnist", ("KMNIST/raw", "KMNIST")
    classes = _KANA


class CIFAR10(_Bundle):
    """Photographs of 32 x 32 pixels in ten classes, from ``root/cifar-10-batches-py`` (not unpickled) or ``cifar-10-batches-bin``."""

    source, folders = "https://www.cs.toronto.edu/~kriz/cifar.html", ("cifar-10-batches-py", "cifar-10-batches-bin")
    classes: Sequence[str] = CIFAR10_CLASSES
    _files = ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"])
    _reader, _key = staticmethod(read_cifar10), "labels"

    def _read(self, folder: Path) -> None:
        names = self._files[0 if self.train else 1]
        pickled = (folder / names[0]).exists()
        parts = [_cifar_arrays(folder / name, self._key) if pickled else self._reader(folder / f"{name}.bin") for name in names]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self.data, self.targets = np.ascontiguousarray(np.moveaxis(pixels, 1, -1)), labels.tolist()


class CIFAR100(CIFAR10):
    """Photographs of 32 x 32 in a hundred classes, from the files in ``root/cifar-100-python`` or ``root/cifar-100-binary``."""

    folders = ("cifar-100-python", "cifar-100-binary")
    _files = (["train"], ["test"])
    _reader, _key = staticmethod(read_cifar100), "fine_labels"

    def _read(self, folder: Path) -> None:
        super()._read(folder)
        if (folder / "meta").exists():
            self.classes = [str(name) for name in _unpacked(folder / "meta").get("fine_label_names", ())]
        else:
            self.classes = regular(folder / "fine_label_names.txt", "CIFAR100").read_text(encoding="utf-8").split()[:100]


class _Described(Attributes):
    """An array or a dtype in a pickle, as its stored arguments and state; it is not constructed."""

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments, self.state = arguments, ()

    def build(self, state: Any) -> None:
        self.state = state


_NUMPY = ("core.multiarray._reconstruct", "_core.multiarray._reconstruct", "dtype", "ndarray")  # NumPy 2 renamed its core
_ALLOWED = {f"numpy.{name}": Allowed(f"numpy.{name}", _Described) for name in _NUMPY}


def _unpacked(path: Path) -> dict[str, Any]:
    """Return the dictionary in a file of CIFAR's Python version. The pickle is read without running any code in it."""
    try:
        made, _ = opcodes.run_program(regular(path, "CIFAR").read_bytes(), _ALLOWED, lambda reference: None)
    except Refused as error:
        raise FormatError(message("CIFAR", "the file must be one of CIFAR's Python version", reason=error, file=path)) from None
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in made.items()} if isinstance(made, dict) else {}


def _cifar_arrays(path: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3, 32, 32) and labels (N,) of a file of CIFAR's Python version."""
    made = _unpacked(path)
    labels, state = made.get(key), getattr(made.get("data"), "state", ())
    parts: tuple[Any, ...] = state if isinstance(state, tuple) and len(state) == 5 else (None,) * 5
    _, shape, dtype, order, content = parts
    content = content.encode("latin-1") if isinstance(content, str) else content
    limit = 10 if key == "labels" else 100
    numbers = labels if isinstance(labels, list) and all(isinstance(n, int) and 0 <= n < limit for n in labels) else [-1]
    kind = getattr(dtype, "arguments", None) or ("",)
    right = (shape, order, kind[0]) == ((len(numbers), 3072), False, "u1") and isinstance(content, bytes)
    if not right or min(numbers, default=0) < 0 or len(content) != len(numbers) * 3072:
        what = f"the file must hold uint8 images of 3072 bytes and one label from 0 to {limit - 1} for each"
        raise FormatError(message("CIFAR", what, keys=sorted(made), shape=shape, file=path))
    return np.frombuffer(content, np.uint8).reshape(-1, 3, 32, 32), np.array(numbers, np.uint8)
