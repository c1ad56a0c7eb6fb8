"""Names of ``torch.utils.data`` over :mod:`netcl.data`; loaders and ``default_collate`` convert arrays to tensors.

By default, a loader's batches are on the active device, and its order follows :func:`netcl.manual_seed`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from netcl import data
from netcl.core.device import get_active_device, require
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.core.writes import writes_of
from netcl.data import datapipes, sampler
from netcl.data.collate import map_arrays
from netcl.data.datapipes import *  # noqa: F403
from netcl.data.dataset import ChainDataset, ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, random_split, taker
from netcl.data.errors import TransferError
from netcl.data.fetch import Task, get_worker_info
from netcl.data.sampler import *  # noqa: F403
from netcl.data.workers import ProcessPool, ThreadPool

log = logging.getLogger("netcl")

__all__ = ["ChainDataset", "ConcatDataset", "DataLoader", "Dataset", "IterableDataset", "StackDataset", "Subset", "TensorDataset",
           "default_collate", "default_convert", "get_worker_info", "random_split"]  # fmt: skip
__all__ += sampler.__all__
__all__ += datapipes.__all__


def default_convert(value: Any) -> Any:
    """Return ``value`` with every array in it converted to a tensor."""
    return map_arrays(Tensor.from_host, value)


def default_collate(batch: Sequence[Any]) -> Any:
    """Join samples into one batch of tensors; dicts, tuples and lists keep their structure, strings become a list."""
    return default_convert(data.default_collate(batch))


class TensorDataset(data.TensorDataset):
    """Tensors of equal length; sample ``i`` is the tuple of row ``i`` of each tensor.

    >>> TensorDataset(Tensor.from_host([1.0, 2.0]))[1][0].item()
    2.0
    """

    def __init__(self, *tensors: Any):
        super().__init__(*tensors)
        self.tensors = tuple(t if isinstance(t, Tensor) else Tensor.from_host(t) for t in tensors)
        self._read = [writes_of(t).last for t in self.tensors]  # when the tensors were written that the arrays are copies of

    def __getitem__(self, index: Any) -> Any:
        return tuple(t[index] for t in self.tensors)

    def take(self, indices: np.ndarray) -> Any:
        """Return the samples at ``indices``, stacked, as arrays."""
        self._refresh()
        return super().take(indices)

    def __getstate__(self) -> dict[str, Any]:
        self._refresh()
        return {**vars(self), "tensors": self.arrays}  # worker processes read arrays alone

    def _refresh(self) -> None:
        """Copy the tensors to the host again if one was written in place."""
        if isinstance(self.tensors[0], Tensor) and (now := [writes_of(t).last for t in self.tensors]) != self._read:
            self.arrays, self._read = tuple(np.array(t) for t in self.tensors), now


class DataLoader(data.DataLoader):
    """:class:`netcl.data.DataLoader` with torch's arguments. Batches are tensors, by default on the active device.

    >>> x, y = next(iter(DataLoader(TensorDataset([[1.0], [2.0]], [0, 1]), batch_size=2)))
    >>> x.shape, y.tolist()
    ((2, 1), [0, 1])
    """

    processes = True  # whether workers may be processes; ``python -m netcl.torch`` looks at its script

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = None, sampler: Any = None, batch_sampler: Any = None,
        num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Callable[[int], None] | None = None, multiprocessing_context: Any = None, generator: Any = None,
        *, prefetch_factor: int | None = None, persistent_workers: bool = False, pin_memory_device: str = "", in_order: bool = True,
        **netcl_options: Any,
    ):  # fmt: skip
        if num_workers and not self.processes and netcl_options.setdefault("use_shared_mem", False) is False:
            what = "worker processes require `if __name__ == '__main__':` in the script, which they would otherwise run again"
            log.warning(message("DataLoader", what, "threads are used instead", num_workers=num_workers))
        at_once = taker(dataset) is not None and not isinstance(dataset, IterableDataset)
        if collate_fn is None and batch_size is not None and not at_once:
            collate_fn = data.default_collate
        super().__init__(
            dataset, batch_size, bool(shuffle), drop_last, num_workers, prefetch_factor, pin_memory=pin_memory, sampler=sampler,
            batch_sampler=batch_sampler, collate_fn=collate_fn, generator=generator,
            worker_init_fn=worker_init_fn, persistent_workers=persistent_workers, timeout=timeout or math.inf, **netcl_options,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        if self.device_queue is None:
            self.device_queue = get_active_device()
        return super().__iter__()

    def _new_workers(self, first: Task) -> ProcessPool | ThreadPool:
        """Start workers. Functions without a name, such as lambdas, cannot be sent to processes that are not forks: threads use them."""
        try:
            return super()._new_workers(first)
        except TransferError as error:
            known = {"num_workers": self.num_workers, "reason": error.__cause__}
            log.warning(message("DataLoader", "threads are used instead of processes", **known))
            self.use_shared_mem = False
            return super()._new_workers(first)

    def _delivered(self, batch: tuple[Any, ...]) -> Any:
        return list(batch)


def _arrived(values: Any, dtype: str) -> Tensor:
    return Tensor.from_host(require("cpu").queue, values, dtype)


# In datasets of worker processes; pickle itself still refuses tensors.
ForkingPickler.register(Tensor, lambda x: (_arrived, (x.to_host(), str(x.dtype))))
