"""``torch.distributed`` over :mod:`netcl.distributed` (ranks are started by ``mpiexec``), and ``torch.nn.parallel``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from netcl import distributed
from netcl.core import env
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn.module import Module

_group: list[distributed.World] = []


def _init(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1, **options: Any) -> None:
    world = distributed.world()
    expected = world_size if world_size > 0 else int(env.raw("WORLD_SIZE") or world.size)
    if expected != world.size or rank not in (-1, world.rank):
        what = "world_size must be the number of ranks that MPI started, and rank that of this process"
        remedy = f"start the ranks with mpiexec: mpiexec -n {expected} python -m netcl.torch script.py"
        raise RuntimeError(message("init_process_group", what, remedy, world_size=expected, started=world.size, rank=rank))
    _group[:] = [world]


def _world() -> distributed.World:
    if not _group:
        raise RuntimeError(message("torch.distributed", "a process group is required", "call init_process_group() first"))
    return _group[0]


def spawn(fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, **options: Any) -> None:
    """``torch.multiprocessing.spawn``: calls ``fn(0, *args)`` in this process. Several processes raise: MPI must start them."""
    if nprocs > 1:
        remedy = f"start the ranks with mpiexec -n {nprocs} python -m netcl.torch script.py, and call the function with its rank"
        raise RuntimeError(message("torch.multiprocessing.spawn", "ranks must be started by MPI", remedy, nprocs=nprocs))
    fn(0, *args)


def _all_reduce(tensor: Tensor, op: str = "sum", group: Any = None, async_op: bool = False) -> None:
    tensor.write(_world().all_reduce(tensor.to_host(), op))


def _broadcast_ranks(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> None:
    tensor.write(_world().broadcast(tensor.to_host(), src))


def _reduce(tensor: Tensor, dst: int, op: str = "sum", group: Any = None, async_op: bool = False) -> None:
    total = _world().all_reduce(tensor.to_host(), op)
    if _world().rank == dst:
        tensor.write(total)


def _all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
    for out, values in zip(tensor_list, _world().all_gather(tensor.to_host()), strict=True):
        out.write(values)


def _all_gather_into(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
    output_tensor.write(np.concatenate(_world().all_gather(input_tensor.to_host())).reshape(output_tensor.shape))


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """``torch.distributed.all_gather_object`` of values that JSON can hold."""
    object_list[:] = _world().all_gather_object(obj)


def _broadcast_objects(object_list: list[Any], src: int = 0, group: Any = None, device: Any = None) -> None:
    object_list[:] = _world().all_gather_object(object_list)[src]


def _ddp(module: Module, device_ids: Any = None, *unused: Any, broadcast_buffers: bool = True, **options: Any) -> Module:
    return distributed.DistributedDataParallel(module, _world(), broadcast_buffers=broadcast_buffers)


class OneDevice(Module):
    """``torch.nn.DataParallel`` over one device: forwards calls to its attribute ``module``."""

    def __init__(self, module: Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _data_parallel(module: Module, device_ids: Sequence[Any] | None = None, output_device: Any = None, dim: int = 0) -> Module:
    """``torch.nn.DataParallel`` over two or more ``device_ids``; by default over one, because OpenCL devices differ in speed."""
    if dim != 0:
        raise ValueError(message("DataParallel", "dim must be 0: batches are split along their first axis", dim=dim))
    devices = [f"cuda:{i}" if isinstance(i, int) else i for i in device_ids or ()]
    return distributed.DataParallel(module, devices) if len(devices) > 1 else OneDevice(module)


class NormOfRanks(distributed.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` over the ranks of the process group; without a group, over this process."""

    @property
    def world(self) -> distributed.World:  # type: ignore[override]
        return _group[0] if _group else distributed.SyncBatchNorm.world

    @staticmethod
    def convert_sync_batchnorm(module: Module, process_group: Any = None) -> Module:
        return distributed.convert_sync_batchnorm(module, _group[0] if _group else distributed.SyncBatchNorm.world)


NN: dict[str, Any] = {"DataParallel": _data_parallel, "SyncBatchNorm": NormOfRanks}
PARALLEL: dict[str, Any] = {
    **NN, "DistributedDataParallel": _ddp,
    "data_parallel": lambda module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None: _data_parallel(
        module, device_ids, output_device, dim
    )(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {})),
}  # fmt: skip
DISTRIBUTED: dict[str, Any] = {
    "is_available": lambda: True, "is_initialized": lambda: bool(_group), "is_nccl_available": lambda: False,
    "init_process_group": _init, "destroy_process_group": lambda group=None: _group.clear(),
    "get_rank": lambda group=None: _world().rank, "get_world_size": lambda group=None: _world().size,
    "barrier": lambda group=None, **options: _world().barrier(), "all_reduce": _all_reduce, "broadcast": _broadcast_ranks,
    "reduce": _reduce, "all_gather": _all_gather, "all_gather_into_tensor": _all_gather_into, "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_objects, "get_backend": lambda group=None: "mpi",
    "ReduceOp": SimpleNamespace(SUM="sum", AVG="mean", MAX="max", MIN="min", PRODUCT="prod"),
}  # fmt: skip
