"""A data loader whose batches are split over the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from netcl.core.errors import ShapeError, message
from netcl.data import DataLoader
from netcl.data.fetch import Task
from netcl.distributed import comm
from netcl.distributed.comm import World


class ShardedLoader(DataLoader):
    """A :class:`~netcl.data.DataLoader` with which each rank loads only its part of every batch.

    ``batch_size`` counts the samples of all ranks. Parts have equal sizes: an incomplete last batch drops up to ``world.size - 1`` samples.
    The order is that of one loader over the whole dataset, so a saved position can be loaded with any number of ranks.

    - **seed**: required, and the same on all ranks.
    - **world**: :func:`netcl.distributed.world` by default.
    - **sampler**: must yield the same order on all ranks; random ones need the same ``generator=``.

    >>> from netcl.data import TensorDataset
    >>> loader = ShardedLoader(TensorDataset(np.arange(5)), batch_size=4, seed=0)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4]]
    """

    def __init__(self, dataset: Any, batch_size: int, *, seed: int, world: World | None = None, **options: Any):
        super().__init__(dataset, batch_size, seed=seed, **options)
        self.world = world or comm.world()
        if options.get("batch_sampler") is not None or batch_size is None or batch_size % self.world.size:
            what = "batch_size must be a multiple of the number of ranks, and batch_sampler must not be given"
            raise ShapeError(message("ShardedLoader", what, batch_size=batch_size, ranks=self.world.size))
        self.world.agree("ShardedLoader", "the length of the dataset, batch_size and seed", [len(dataset), batch_size, seed])

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset if self.sampler is None else self.sampler), self.batch_size)
        return full + (not self.drop_last and rest >= self.world.size)

    def _tasks(self, epoch: int, start: int) -> Iterator[Task]:
        size, rank = self.world.size, self.world.rank
        for task in super()._tasks(epoch, start):
            if self.sampler is not None and task.batch == start:  # others order the samples by the seed
                self.world.agree("ShardedLoader", "the order of the sampler (generator= must be the same)", task.indices.tolist())
            usable = len(task.indices) - len(task.indices) % size
            if usable:
                yield task._replace(indices=np.split(task.indices[:usable], size)[rank])

    def _key(self, epoch: int, batch: int) -> tuple[int, ...]:
        return (*super()._key(epoch, batch), self.world.rank)
