"""Reads a user's pictures from one folder per class. Pictures are decoded once, cropped to one size and kept as uint8."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.data.dataset import Dataset, Subset
from netcl.data.files import Samples, SplitPlan, held_out, parts
from netcl.vision.datasets import ImageFolder, default_loader
from netcl.vision.functional import pillow

_PART_FOLDERS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}


def picture(path: str | os.PathLike[str], shape: Sequence[int]) -> np.ndarray:
    """Read a picture, turned as its EXIF data say, cropped around its center and resized, as uint8 of ``shape`` (C, height, width)."""
    ops = pillow("ImageOps")
    cut = ops.fit(ops.exif_transpose(default_loader(path, "L" if shape[0] == 1 else "RGB")), (shape[2], shape[1]))
    return np.asarray(cut, np.uint8).reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)


class Pictures(Dataset):
    """A dataset of decoded pictures and their labels; pictures are float32 in 0..1."""

    def __init__(self, files: Sequence[tuple[str, int]], shape: Sequence[int]):
        self.pixels = np.stack([picture(path, shape) for path, _ in files])
        self.labels = np.array([label for _, label in files], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.take(np.asarray(index))

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self.pixels[indices].astype(np.float32) / np.float32(255), self.labels[indices]


def read_folder(path: Path, plan: SplitPlan, size: int = 64, channels: int = 3) -> Samples:
    """Return the pictures of ``path/CLASS/...``, or of ``path/train/CLASS/...`` with ``test`` or ``val`` beside it."""
    if type(size) is not int or size < 1 or channels not in (1, 3):
        raise ValueError(message("folder", "size must be a whole number of at least 1, and channels 1 or 3", size=size, channels=channels))
    inside = {entry.name.lower(): entry for entry in path.iterdir() if entry.is_dir()}
    roots = {part: next((inside[name] for name in names if name in inside), None) for part, names in _PART_FOLDERS.items()}
    shape, whole = (channels, size, size), roots["train"] and (roots["test"] or roots["val"])
    found = {part: ImageFolder(root) for part, root in (roots if whole else {"train": path}).items() if root}
    classes = tuple(found["train"].classes)
    if any(tuple(part.classes) != classes for part in found.values()):
        names = {part: list(data.classes) for part, data in found.items()}
        raise ValueError(message("folder", "train, val and test must have folders for the same classes", **names))
    train, val, test = (Pictures(found[part].samples, shape) if part in found else None for part in ("train", "val", "test"))
    reading = {"kind": "image", "dtype": "uint8", "classes": list(classes), "shape": list(shape)}
    assert train is not None
    if test is None:
        drawn_share = plan.val if val is None else 0.0
        indices = parts(train.labels, len(train), [drawn_share, plan.test], plan.seed)
        if not all(map(len, indices[0 if drawn_share else 1 :])):
            sizes = dict(zip(("validation", "test", "train"), map(len, indices), strict=True))
            raise ValueError(message("folder", "every part must get at least one picture", "add pictures, or change the splits", **sizes))
        cut = [Subset(train, part) if len(part) else None for part in indices]
        return Samples(cut[2], cut[0] if val is None else val, cut[1], classes, reading)
    kept, drawn = (train, val) if val is not None else held_out(train, train.labels, plan.val, plan.seed)
    return Samples(kept, drawn, test, classes, reading)
