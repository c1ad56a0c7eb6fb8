"""data: datasets, the loader with its workers, augmentations. Emits NumPy batches, or tensors where a queue is bound."""

from __future__ import annotations

import importlib
from typing import Any

from netcl.data import augment, datasets, filters
from netcl.data.dataloader import DataLoader
from netcl.data.dataset import Dataset, Subset, TensorDataset, random_split, split_dataset
from netcl.data.errors import FormatError, SampleError, WorkerError
from netcl.data.shared_batch import SharedBatchRingBuffer

__all__ = [
    "DataLoader", "Dataset", "FormatError", "SampleError", "SharedBatchRingBuffer", "Subset", "TensorDataset", "WorkerError", "augment",
    "augment_gpu", "datasets", "filters", "random_split", "split_dataset",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "augment_gpu":  # the one part that needs netcl's ops
        return importlib.import_module("netcl.data.augment_gpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
