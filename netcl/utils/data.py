"""``torch.utils.data`` by its names: :mod:`netcl.data`, but loaders and ``default_collate`` give tensors.

A loader's batches are on the active device, and its order follows :func:`netcl.manual_seed` unless a generator is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from netcl import data
from netcl.core.device import get_active_device
from netcl.core.tensor import Tensor
from netcl.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from netcl.data.collate import map_arrays
from netcl.data.dataset import taker
from netcl.ops import random

__all__ = [
    "BatchSampler", "ChainDataset", "ConcatDataset", "DataLoader", "Dataset", "DistributedSampler", "IterableDataset", "RandomSampler",
    "Sampler", "SequentialSampler", "StackDataset", "Subset", "SubsetRandomSampler", "TensorDataset", "WeightedRandomSampler",
    "default_collate", "default_convert", "get_worker_info", "random_split",
]  # fmt: skip


def default_convert(value: Any) -> Any:
    """``value`` with a tensor for every array in it."""
    return map_arrays(Tensor.from_host, value)


def default_collate(batch: Sequence[Any]) -> Any:
    """Samples as one batch of tensors; dicts, tuples and lists keep their structure, texts stay a list."""
    return default_convert(data.default_collate(batch))


class DataLoader(data.DataLoader):
    """:class:`netcl.data.DataLoader` with torch's arguments, whose batches are tensors on the active device.

    >>> x, y = next(iter(DataLoader(TensorDataset([[1.0], [2.0]], [0, 1]), batch_size=2)))
    >>> x.shape, y.tolist()
    ((2, 1), [0, 1])
    """

    def __init__(
        self, dataset: Any, batch_size: int = 1, shuffle: bool | None = None, sampler: Any = None, batch_sampler: Any = None,
        num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Callable[[int], None] | None = None, multiprocessing_context: Any = None, generator: Any = None,
        *, prefetch_factor: int | None = None, persistent_workers: bool = False, pin_memory_device: str = "", in_order: bool = True,
        **netcl_options: Any,
    ):  # fmt: skip
        at_once = taker(dataset) is not None and not isinstance(dataset, IterableDataset)
        netcl_options.setdefault("seed", random.get_state().as_dict()["seed"] if generator is None else None)
        super().__init__(
            dataset, batch_size, bool(shuffle), drop_last, num_workers, prefetch_factor, pin_memory=pin_memory, sampler=sampler,
            batch_sampler=batch_sampler, collate_fn=collate_fn or (None if at_once else data.default_collate), generator=generator,
            worker_init_fn=worker_init_fn, persistent_workers=persistent_workers, timeout=timeout or math.inf, **netcl_options,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        if self.device_queue is None:
            self.device_queue = get_active_device()
        return super().__iter__()

    def _delivered(self, batch: tuple[Any, ...]) -> Any:
        return list(batch)
