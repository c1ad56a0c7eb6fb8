"""Datasets, samplers, augmentations, and the ``DataLoader``, which delivers NumPy batches or, with a device, tensors."""

from __future__ import annotations

import importlib
from typing import Any

from netcl.data import augment, dataset, datasets, filters, sampler, tables
from netcl.data.collate import default_collate
from netcl.data.dataloader import DataLoader
from netcl.data.dataset import *  # noqa: F403
from netcl.data.errors import FormatError, SampleError, WorkerError
from netcl.data.fetch import WorkerInfo, get_worker_info
from netcl.data.sampler import *  # noqa: F403
from netcl.data.shared_batch import SharedBatchRingBuffer

__all__ = [
    "DataLoader", "FormatError", "SampleError", "SharedBatchRingBuffer", "WorkerError", "WorkerInfo", "augment", "augment_gpu",  # noqa: F405
    "datasets", "default_collate", "filters", "get_worker_info", "tables",
]  # fmt: skip
__all__ += dataset.__all__
__all__ += sampler.__all__
__all__.sort()


def __getattr__(name: str) -> Any:
    if name == "augment_gpu":  # the one part that needs netcl's ops
        return importlib.import_module("netcl.data.augment_gpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
