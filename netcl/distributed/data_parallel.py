"""Data parallel training on several devices of one process: each device has a replica of the model and a part of every batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import amp
from netcl.core.device import manager, score, set_active_device
from netcl.core.errors import DeviceError, ShapeError, message
from netcl.core.tensor import Tensor, duplicate
from netcl.core.writes import writes_of
from netcl.distributed import collectives
from netcl.distributed.collectives import queues_of
from netcl.distributed.comm import thread_worlds
from netcl.distributed.sync_norm import convert_sync_batchnorm, without_sync
from netcl.nn.hooks import take_hooks
from netcl.nn.module import Module
from netcl.ops import update

__all__ = [
    "DataParallel", "ReplicaOptimizer", "broadcast_params", "data_parallel_step", "prepare_replicas", "replicate_params", "shard_batch",
    "sync_grads",
]  # fmt: skip
ReplicaParameters = list[Tensor]


def all_devices() -> list[Any]:
    """Return the selectors of all OpenCL devices except simulators and software GPUs; ``["cpu"]``, which is NumPy, if there are none."""
    return [found.index for found in manager.found() if score(found.profile)[0] >= 0] or ["cpu"]


def shard_batch(batch: Any, devices: Sequence[Any], weights: Sequence[float] | None = None) -> list[tuple[Tensor, ...]]:
    """Split a batch (an array, a tensor or several) along the first axis; returns one tuple of tensors per device.

    ``weights`` are the devices' shares of the batch, equal by default.

    >>> import numpy as np
    >>> shards = shard_batch((np.zeros((5, 2), np.float32), np.arange(5)), ["cpu", "cpu"])
    >>> [x.shape for x, y in shards]
    [(2, 2), (3, 2)]
    """
    parts = [batch] if isinstance(batch, Tensor | np.ndarray) else list(batch)
    lengths = {len(part) for part in parts}
    if len(lengths) != 1:
        what = "batch must hold at least one array, and all of the same length"
        raise ShapeError(message("shard_batch", what, lengths=[len(part) for part in parts]))
    queues = queues_of(devices)
    return list(zip(*(collectives.scatter(part, queues, weights) for part in parts), strict=True))


def replicate_params(params: Iterable[Tensor], devices: Sequence[Any]) -> list[ReplicaParameters]:
    """Return one list of copies of ``params`` per device; the copies require gradients where the originals do."""
    originals = [(p.to_host(), p) for p in params]
    return [
        [Tensor.from_host(queue, values, p.dtype, requires_grad=p.requires_grad, persistent=True) for values, p in originals]
        for queue in queues_of(devices)
    ]


def _lists(op: str, replicas: Sequence[Any]) -> list[ReplicaParameters]:
    """Return a list of parameters per replica (a module or a list). Raises without replicas, or if numbers of parameters differ."""
    given = [list(r.parameters()) if hasattr(r, "parameters") else list(r) for r in replicas]
    if not given:
        raise ShapeError(message(op, "at least one replica must be given, got none"))
    if len({len(params) for params in given}) > 1:
        raise ShapeError(message(op, "replicas must have equally many parameters", numbers=[len(params) for params in given]))
    return given


def broadcast_params(replicas: Sequence[Any], root: int = 0) -> None:
    """Overwrite the parameters of all replicas with those of ``replicas[root]``."""
    groups = zip(*_lists("broadcast_params", replicas), strict=True)
    checked = [collectives.checked_tensors("broadcast_params", same, root) for same in groups]
    collectives.broadcast_each([[same[root], *same[:root], *same[root + 1 :]] for same in checked])


def prepare_replicas(model: Module, devices: Sequence[Any]) -> list[Module]:
    """Return a replica of a model on every device; the first is the model itself, moved to the first device."""
    queues = queues_of(devices)
    replicas = [model, *(copy.deepcopy(model) for _ in queues[1:])]
    return [replica.to(queue) for replica, queue in zip(replicas, queues, strict=True)]


def sync_grads(replicas: Sequence[Any], op: str = "mean", weights: Sequence[float] | None = None) -> None:
    """Overwrite the gradients of every replica with their mean over all replicas, or with the reduction ``op``.

    With ``weights``, one number per replica, the result is the weighted mean and ``op`` is ignored.
    A parameter without a gradient on any replica is skipped; one with a gradient on some replicas only is an error.
    """
    found = []
    for number, same in enumerate(zip(*_lists("sync_grads", replicas), strict=True)):
        without = [i for i, p in enumerate(same) if p.grad is None]
        if 0 < len(without) < len(same):
            what = f"parameter {number} must have a gradient on all replicas or on none"
            raise ShapeError(message("sync_grads", what, "run backward on all of them", without=without, shape=same[0].shape))
        if not without:
            found.append(collectives.checked_tensors("sync_grads", [p.grad for p in same]))
    if weights is not None:
        op = "sum"
        for replica, share in enumerate(np.asarray(weights, np.float64) / np.sum(weights)):
            update.scale([grads[replica] for grads in found], float(share))
    collectives.all_reduce_each(found, op)


def data_parallel_step(
    forward_fn: Callable[..., Tensor], param_replicas: Sequence[Any], optimizers: Sequence[Any], batch: Any, *,
    weights: Sequence[float] | None = None, max_norm: float | None = None,
) -> float:  # fmt: skip
    """Run one training step on several devices; returns the mean loss of the whole batch.

    - **forward_fn**: ``forward_fn(replica, *shard)`` returns the mean loss of a shard.
    - **param_replicas**: one list of parameters, or one module, per device.
    - **optimizers**: one per replica.
    - **batch**: arrays or tensors of one length, split evenly or by ``weights``.
    - **max_norm**: passed to ``step`` of every optimizer.
    """
    lists = _lists("data_parallel_step", param_replicas)
    if len(optimizers) != len(lists):
        what = "there must be one optimizer per replica"
        raise ShapeError(message("data_parallel_step", what, optimizers=len(optimizers), replicas=len(lists)))
    queues = [params[0].queue for params in lists]
    shards = shard_batch(batch, queues, weights)
    sizes = [len(shard[0]) for shard in shards]
    busy = [i for i, size in enumerate(sizes) if size]

    def run(i: int) -> Tensor:
        loss = forward_fn(param_replicas[i], *shards[i])
        loss.backward()
        return loss

    losses = parallel(run, busy, queues)
    for i in set(range(len(sizes))) - set(busy):  # an empty shard has gradients of zero
        for p, other in zip(lists[i], lists[busy[0]], strict=True):
            p.grad = None if other.grad is None else gradient_or_zeros(p, None)
    sync_grads(lists, weights=sizes)
    for optimizer in optimizers:
        optimizer.step(max_norm=max_norm) if max_norm is not None else optimizer.step()
        optimizer.zero_grad()
    return float(sum(loss.item() * sizes[i] for loss, i in zip(losses, busy, strict=True)) / sum(sizes))


def gradient_or_zeros(p: Tensor, grad: Tensor | None) -> Tensor:
    """Return ``grad``, or zeros like ``p`` if it is ``None`` because this replica or rank has not used ``p``."""
    return Tensor.zeros(p.shape, p.dtype, queue=p.queue) if grad is None else grad


def parallel(run: Callable[[int], Any], places: Sequence[int], queues: Sequence[Any]) -> list[Any]:
    """Call ``run(i)`` for each of ``places`` in its own thread, with the caller's modes and the device of ``queues[i]`` as active device.

    Returns the results. Modes are gradient recording and autocast. A single call, or calls on devices that share an OpenCL context, run
    one after another in the caller's thread, with the caller's active device.
    """
    if len(places) == 1 or _share_context(queues):
        return [run(i) for i in places]
    recording, half = ag.is_grad_enabled(), amp.get_autocast_dtype()

    def placed(i: int) -> Any:
        set_active_device(manager.handle_of(queues[i]))
        with ag.set_grad_enabled(recording), amp.autocast(half is not None, half or "float16"):
            return run(i)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(placed, places))


def _share_context(queues: Sequence[Any]) -> bool:
    pointers = [queue.context.int_ptr for queue in queues if queue.context is not None]
    return len(set(pointers)) < len(pointers)


class DataParallel(Module):
    """A model replicated on several devices, which may be of different types.

    ``forward`` splits the batch along its first axis, runs each part on its device and joins the results on the first device. ``backward``
    runs on all devices and leaves the sum of their gradients in ``.grad`` of the parameters of ``module``.

    - **module**: the model; it becomes the replica of the first device.
    - **devices**: selectors, handles or queues; by default all except simulators and software GPUs.
    - **weights**: shares of the batch; by default devices with different names are measured on the first training batch.
    - **sync_batchnorm**: compute the statistics of batch norm over the whole batch instead of each device's part.

    An optimizer over ``parameters()`` updates the model, and the other replicas are refreshed before the next forward. An optimizer from
    :meth:`optimizer` steps every replica with the gradients of ``parameters()``; nothing is refreshed. Other changes of the parameters,
    such as a loaded checkpoint, also refresh the replicas.

    >>> from netcl import nn
    >>> parallel = DataParallel(nn.Linear(2, 1), devices=["cpu", "cpu"])
    >>> parallel([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).shape
    (3, 1)
    """

    def __init__(self, module: Module, devices: Sequence[Any] | None = None, weights: Sequence[float] | None = None,
                 sync_batchnorm: bool = False):  # fmt: skip
        super().__init__()
        queues = queues_of(devices if devices is not None else all_devices())
        self.module = module
        self.weights = None if weights is None else list(weights)
        replicas = prepare_replicas(module, queues)
        if sync_batchnorm:
            if _share_context(queues):
                what = "sync_batchnorm requires devices that do not share a context"
                raise DeviceError(message("DataParallel", what, "name other devices, or leave sync_batchnorm out", devices=len(queues)))
            for replica, world in zip(replicas, thread_worlds(len(queues)), strict=True):
                convert_sync_batchnorm(replica, world)
        self._synced = sync_batchnorm and len(queues) > 1
        self.replicas = replicas  # a list is not registered: the state dict is that of one model
        self._copied = list(module.modules())
        self._known: list[int] | None = None  # parameter versions after the last step that all replicas took
        self._known_buffers: list[int] = []  # buffer versions of all replicas when all were equal

    @property
    def queues(self) -> list[Any]:
        """The queues of the replicas, in order."""
        return [replica.queue for replica in self.replicas]

    def train(self, mode: bool = True) -> DataParallel:
        super().train(mode)
        for replica in self.replicas[1:]:
            replica.train(mode)
        return self

    def forward(self, *inputs: Any) -> Tensor:
        """Run every replica on its part of the batch and join the results on the first device."""
        self._check_replicas()
        if self._known != self._written():
            self.refresh()
        elif not self.training and self._known_buffers != self._written_buffers():
            self._share_buffers()
        given = tuple(x if isinstance(x, Tensor) else Tensor.from_host(self.queues[0], x) for x in inputs)
        if self.training and self.weights is None:
            self.measure(*given)
        return _Split.apply(self, len(given), *given, *self.module.parameters())

    def _check_replicas(self) -> None:
        """Freeze parameters and change hooks of replicas as those of the model. Raise if the model has other modules or dtypes."""
        changed = [*map(id, self.module.modules())] != [*map(id, self._copied)]
        for first, *others in () if changed else zip(*(replica.parameters() for replica in self.replicas), strict=True):
            for p in others:
                p.requires_grad = first.requires_grad
                changed |= p.dtype != first.dtype
        if changed:
            what = "modules and dtypes of the model must not change after it was wrapped: its replicas would not"
            raise RuntimeError(message("DataParallel", what, "change the model first, then wrap it"))
        for model, *others in zip(*(replica.modules() for replica in self.replicas), strict=True):
            for other in others:
                take_hooks(other, model)

    def refresh(self) -> None:
        """Overwrite the parameters and buffers of all replicas with those of the first."""
        collectives.broadcast_each(zip(*(replica.parameters() for replica in self.replicas), strict=True))
        self._share_buffers()
        if self._known is not None:
            self._replicas_are_equal()

    def _written(self) -> list[int]:
        return [writes_of(p).last for p in self.module.parameters()]

    def _share_buffers(self) -> None:
        """Overwrite the buffers of all replicas: in training, each takes the running statistics of its own part of the batch."""
        collectives.broadcast_each(zip(*(replica.buffers() for replica in self.replicas), strict=True))
        self._known_buffers = self._written_buffers()

    def _written_buffers(self) -> list[int]:
        return [writes_of(buffer).last for replica in self.replicas for buffer in replica.buffers()]

    def _replicas_are_equal(self) -> None:
        self._known = self._written()

    def measure(self, *inputs: Tensor) -> list[float]:
        """Set and return ``weights``: the rows per second of forward on each device, or 1 if all devices have the same name."""
        self.weights = [1.0] * len(self.replicas)
        rows = max(1, len(inputs[0]) // len(self.replicas))
        different = len({manager.handle_of(queue).device_name for queue in self.queues}) > 1
        for i, replica in enumerate(self.replicas if different else ()):
            given = [Tensor.from_host(replica.queue, x.to_host()[:rows], x.dtype) for x in inputs]
            alone = without_sync(replica)  # a copy: its batch norms have their own statistics and wait for no other replica
            with ag.no_grad():
                alone(*given).to_host()  # builds the kernels
                start = time.perf_counter()
                for _ in range(3):
                    alone(*given).to_host()
            self.weights[i] = rows / (time.perf_counter() - start)
        return self.weights

    def optimizer(self, make: Callable[[ReplicaParameters], Any]) -> ReplicaOptimizer:
        """Return one optimizer that steps every replica: ``parallel.optimizer(lambda params: SGD(params, lr=0.1))``."""
        self.refresh()
        self._replicas_are_equal()
        return ReplicaOptimizer([make(replica.parameters()) for replica in self.replicas], self._replicas_are_equal)


class _Split(ag.Function):
    """Runs forward on all replicas in parallel and records one graph per replica; backward runs through these graphs in parallel."""

    @staticmethod
    def forward(ctx: Any, owner: DataParallel, count: int, *tensors: Tensor) -> Tensor:
        ctx.owner, ctx.inputs = owner, tensors[:count]
        shards = ctx.shards = shard_batch([x.detach() for x in ctx.inputs], owner.queues, owner.weights)
        for shard in shards:
            for x, original in zip(shard, tensors, strict=False):
                x.requires_grad = original.requires_grad
        ctx.busy = [i for i, shard in enumerate(shards) if len(shard[0])]
        if not ctx.busy:
            raise ShapeError(message("DataParallel", "the batch must have at least one row", shapes=[x.shape for x in ctx.inputs]))
        if owner._synced and owner.training and len(ctx.busy) < len(shards):
            what = "with sync_batchnorm, a batch must have at least one row for each device in training"
            raise ShapeError(message("DataParallel", what, "drop incomplete last batches", rows=[len(shard[0]) for shard in shards]))
        record = any(ctx.needs_input_grad)

        def run(i: int) -> Tensor:
            with ag.set_grad_enabled(record):
                return owner.replicas[i](*shards[i])

        ctx.outputs = dict(zip(ctx.busy, parallel(run, ctx.busy, owner.queues), strict=True))
        for i, out in ctx.outputs.items():
            if not isinstance(out, Tensor) or not out.ndim or len(out) % len(shards[i][0]):
                what = "the model must return one tensor whose first axis is that of the batch, or a multiple of it"
                given = {"shape": out.shape, "rows": len(shards[i][0])} if isinstance(out, Tensor) else {"given": type(out).__name__}
                raise ShapeError(message("DataParallel", what, **given))
        return collectives.gather([out.detach() for out in ctx.outputs.values()])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        owner, queues = ctx.owner, ctx.owner.queues
        ends = np.cumsum([len(out) for out in ctx.outputs.values()])
        parts = dict(zip(ctx.busy, np.split(gradient.to_host(), ends[:-1]), strict=True))

        def run(i: int) -> list[Tensor | None]:
            part = Tensor.from_host(queues[i], parts[i], gradient.dtype)
            wanted = [*ctx.shards[i], *owner.replicas[i].parameters()]
            return list(ag.grad(ctx.outputs[i], [t for t in wanted if t.requires_grad], part, allow_unused=True))

        found = parallel(run, ctx.busy, queues)
        inputs = [x.requires_grad for x in ctx.inputs]
        joined = iter([collectives.gather([grads[k] for grads in found]) for k in range(sum(inputs))])
        sums = iter(_summed(owner, {i: grads[sum(inputs) :] for i, grads in zip(ctx.busy, found, strict=True)}))
        learned = [p.requires_grad for p in owner.module.parameters()]
        return (None, None, *(next(joined) if wants else None for wants in inputs), *(next(sums) if wants else None for wants in learned))


def _summed(owner: DataParallel, found: dict[int, list[Tensor | None]]) -> list[Tensor | None]:
    """Return the sum of each parameter's gradients over the replicas, on the device of the first."""
    params = [[p for p in replica.parameters() if p.requires_grad] for replica in owner.replicas]
    nothing = [None] * len(params[0])
    grads = [found.get(i, nothing) for i in range(len(params))]
    used = [k for k, same in enumerate(zip(*grads, strict=True)) if any(g is not None for g in same)]
    totals, *others = ([gradient_or_zeros(p[k], g[k]) for k in used] for p, g in zip(params, grads, strict=True))
    totals = [duplicate(total) for total in totals]  # a gradient rule may return memory that is still read elsewhere
    collectives.all_reduce_each(zip(totals, *others, strict=True), count=1)
    first = dict(zip(used, totals, strict=True))
    return [first.get(k) for k in range(len(nothing))]


class ReplicaOptimizer:
    """The optimizers of equal replicas, used as one; all get the gradients of the first replica, so the replicas stay equal."""

    def __init__(self, optimizers: Sequence[Any], stepped: Callable[[], None] = lambda: None):
        self.optimizers = list(optimizers)
        self._stepped = stepped

    @property
    def params(self) -> list[Tensor]:
        """The parameters of the first replica, whose gradients a gradient scaler must unscale."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the first optimizer; the others take over changed options at the next step."""
        return self.optimizers[0].param_groups

    def step(self, max_norm: float | None = None) -> Any:
        """Step every optimizer with the options and gradients of the first; returns the result of the first."""
        copied = []
        for first, *others in zip(*(optimizer.param_groups for optimizer in self.optimizers), strict=True):
            for group in others:
                group.update({name: value for name, value in first.items() if name != "params"})
            for p, *copies in zip(first["params"], *(group["params"] for group in others), strict=True):
                for other in copies:
                    other.grad = None if p.grad is None else Tensor.empty(p.grad.shape, p.grad.dtype, queue=other.queue)
                copied += [] if p.grad is None else [[p.grad, *(other.grad for other in copies)]]
        collectives.broadcast_each(copied)
        first, *_ = [optimizer.step(max_norm=max_norm) for optimizer in self.optimizers]
        self._stepped()
        return first

    def zero_grad(self) -> None:
        """Set all gradients to ``None``."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the first optimizer; all are equal."""
        return self.optimizers[0].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load one state into every optimizer."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(state)
