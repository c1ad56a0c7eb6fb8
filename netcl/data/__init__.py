"""Datasets, samplers, augmentations, and the ``DataLoader``, which delivers NumPy batches or, with a device, tensors."""

from __future__ import annotations

import importlib
from typing import Any

from netcl.data import augment, datasets, filters, sampler, tables
from netcl.data.collate import default_collate
from netcl.data.dataloader import DataLoader
from netcl.data.dataset import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
    split_dataset,
)
from netcl.data.errors import FormatError, SampleError, WorkerError
from netcl.data.fetch import WorkerInfo, get_worker_info
from netcl.data.sampler import *  # noqa: F403
from netcl.data.shared_batch import SharedBatchRingBuffer

__all__ = [
    "ChainDataset", "ConcatDataset", "DataLoader", "Dataset", "FormatError", "IterableDataset", "SampleError", "SharedBatchRingBuffer",
    "StackDataset", "Subset", "TensorDataset", "WorkerError", "WorkerInfo", "augment", "augment_gpu", "datasets",  # noqa: F405
    "default_collate", "filters", "get_worker_info", "random_split", "split_dataset", "tables",
]  # fmt: skip
__all__ += sampler.__all__


def __getattr__(name: str) -> Any:
    if name == "augment_gpu":  # the one part that needs netcl's ops
        return importlib.import_module("netcl.data.augment_gpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
