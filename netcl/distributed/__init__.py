"""Training on several devices or machines: collectives, data parallelism, and worlds of threads or MPI processes."""

from netcl.core.device import DeviceManager
from netcl.distributed.checkpoint import load_checkpoint, manual_seed, save_checkpoint
from netcl.distributed.collectives import all_gather, all_reduce, all_reduce_p2p, broadcast, gather, reduce, scatter
from netcl.distributed.comm import LostRankError, World, thread_worlds, world
from netcl.distributed.data_parallel import (
    DataParallel,
    ReplicaOptimizer,
    broadcast_params,
    data_parallel_step,
    prepare_replicas,
    replicate_params,
    shard_batch,
    sync_grads,
)
from netcl.distributed.ddp import DistributedDataParallel
from netcl.distributed.loader import ShardedLoader
from netcl.distributed.sync_norm import SyncBatchNorm, convert_sync_batchnorm, without_sync
from netcl.distributed.zero import ShardedOptimizer

__all__ = [
    "DataParallel", "DeviceManager", "DistributedDataParallel", "LostRankError", "ReplicaOptimizer", "ShardedLoader", "ShardedOptimizer",
    "SyncBatchNorm", "World", "all_gather", "all_reduce", "all_reduce_p2p", "broadcast", "broadcast_params", "convert_sync_batchnorm",
    "data_parallel_step", "gather", "load_checkpoint", "manual_seed", "prepare_replicas", "reduce", "replicate_params",
    "save_checkpoint", "scatter", "shard_batch", "sync_grads", "thread_worlds", "without_sync",
    "world",
]  # fmt: skip
