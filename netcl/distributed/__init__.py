"""Training on several devices or machines: collectives, data parallelism, and worlds of threads or MPI processes."""

from netcl.core.device import DeviceManager
from netcl.distributed import data_parallel
from netcl.distributed.checkpoint import load_checkpoint, manual_seed, save_checkpoint
from netcl.distributed.collectives import all_gather, all_reduce, all_reduce_p2p, broadcast, gather, reduce, scatter
from netcl.distributed.comm import LostRankError, World, thread_worlds, world
from netcl.distributed.data_parallel import *  # noqa: F403
from netcl.distributed.ddp import DistributedDataParallel
from netcl.distributed.loader import ShardedLoader
from netcl.distributed.sync_norm import SyncBatchNorm, convert_sync_batchnorm, without_sync
from netcl.distributed.zero import ShardedOptimizer

__all__ = [
    "DeviceManager", "DistributedDataParallel", "LostRankError", "ShardedLoader", "ShardedOptimizer", "SyncBatchNorm", "World",
    "all_gather", "all_reduce", "all_reduce_p2p", "broadcast", "convert_sync_batchnorm", "gather", "load_checkpoint", "manual_seed",
    "reduce", "save_checkpoint", "scatter", "thread_worlds", "without_sync", "world",
]  # fmt: skip
__all__ += data_parallel.__all__
__all__.sort()
