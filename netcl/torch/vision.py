"""The parts of torchvision that netcl has: MNIST, FashionMNIST and CIFAR10 from files that are there, and a few transforms.

Images are uint8 arrays of shape (height, width, channels) where torchvision has Pillow's images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.data import augment, datasets
from netcl.data.dataset import Dataset
from netcl.ops.random import get_state


class _Images(Dataset):
    """A dataset with torchvision's constructor. Nothing is downloaded: ``download=`` is taken and changes nothing."""

    def __init__(self, root: Any, train: bool = True, transform: Any = None, target_transform: Any = None, download: bool = False):
        source, folders = type(self).source  # type: ignore[attr-defined]
        there = next((folder for folder in (Path(root, part) for part in folders) if folder.is_dir()), root)
        images, labels = source(there)[0 if train else 1].arrays
        self.data = np.round(np.moveaxis(images, 1, -1) * 255).astype(np.uint8)
        self.targets = labels.tolist()
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, label = self.data[index], self.targets[index]
        image = image if self.transform is None else self.transform(image)
        return image, label if self.target_transform is None else self.target_transform(label)


DATASETS: dict[str, Any] = {
    name: type(name, (_Images,), {"source": (source, (f"{name}/raw", name)), "__module__": __name__, "__doc__": f"torchvision's {name}."})
    for name, source in (("MNIST", datasets.mnist), ("FashionMNIST", datasets.fashion_mnist), ("CIFAR10", datasets.cifar10))
}
globals().update(DATASETS)


class Compose:
    """Transforms, one after the other."""

    def __init__(self, transforms: list[Callable[[Any], Any]]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        return reduce(lambda made, transform: transform(made), self.transforms, image)


class ToTensor:
    """An image (height, width, channels), as an array or of Pillow, as a tensor (channels, height, width); uint8 becomes 0..1."""

    def __call__(self, image: Any) -> Tensor:
        array = np.asarray(image)
        array = np.moveaxis(array if array.ndim == 3 else array[..., None], -1, 0)
        return Tensor.from_host(array.astype(np.float32) / 255 if array.dtype == np.uint8 else array)


class _Change:
    """An augmentation of :mod:`netcl.data.augment` for one image: an array (H, W, C) or a tensor (C, H, W). Follows ``manual_seed``."""

    change: Callable[..., augment.Augmentation]

    def __init__(self, *given: Any, **options: Any):
        self.part = type(self).change(*given, **options)
        self.rng: np.random.Generator | None = None

    def __call__(self, image: Any) -> Any:
        self.rng = self.rng or np.random.default_rng(get_state().as_dict()["seed"])
        if isinstance(image, Tensor):
            return Tensor.from_host(image.queue, self.part(image.to_host(), self.rng))
        return np.moveaxis(self.part(np.moveaxis(np.asarray(image), -1, 0), self.rng), 0, -1)


TRANSFORMS: dict[str, Any] = {
    "Compose": Compose, "ToTensor": ToTensor, "Lambda": lambda lambd: lambd,
    **{change.__name__: type(change.__name__, (_Change,), {"change": change, "__module__": __name__, "__doc__": change.__doc__})
       for change in (augment.Normalize, augment.RandomCrop, augment.RandomHorizontalFlip, augment.RandomVerticalFlip)},
}  # fmt: skip
globals().update({name: value for name, value in TRANSFORMS.items() if name != "Lambda"})  # found by name in worker processes
