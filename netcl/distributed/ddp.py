"""One process per device, on one machine or many: every rank has the whole model and a part of each batch.

Gradients are averaged in buckets, in the order in which the first backward produces them. With ``overlap``, a complete bucket is copied
to the host and reduced by a thread while backward continues; the averages are written to ``.grad`` at the end of backward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from netcl.autograd.backward_pass import after_backward, expect_backward, expect_no_backward, walk_under_way
from netcl.autograd.tape import is_grad_enabled
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.distributed import comm
from netcl.distributed.collectives import Bucket, broadcast_each, bucketed, write_flat
from netcl.distributed.comm import LostRankError, World
from netcl.distributed.data_parallel import gradient_or_zeros
from netcl.nn.module import Module

log = logging.getLogger("netcl")

#: Seconds to wait, after backward failed, for buckets sent before: ranks that all fail alike have all sent them.
_PATIENCE = 1.0


class _Bucket:
    """Parameters whose gradients are reduced in one bucket, and how many gradients the current backward still has to add."""

    def __init__(self, number: int, params: dict[int, Tensor]):
        self.number, self.params, self.missing = number, params, 0  # parameters by their index in the model
        self.grads = Bucket([])
        self.sent: Future[np.ndarray] | None = None


class DistributedDataParallel(Module):
    """A model whose gradients are averaged over all ranks of a world during backward.

    Start the program with ``mpiexec -n 4 python train.py``; without mpiexec, the wrapper does nothing. All ranks start with the parameters
    and buffers of rank 0. With equal parts, a mean as loss and no batch norm, a step has the result of a step on the whole batch.

    - **module**: the model, on this rank's device.
    - **world**: :func:`netcl.distributed.world` by default. To reduce in rank order, first set ``world.deterministic``.
    - **bucket_mb**: megabytes that are reduced at once; small buckets overlap better, large ones cost fewer round trips.
    - **compress**: ``"bfloat16"`` halves the bytes of float32 gradients.
    - **overlap**: ``False`` reduces everything at the end of backward.
    - **broadcast_buffers**: copy the buffers (running statistics) of rank 0 to all ranks before each forward in training.

    The order of gradients is learned in the first backward. Later backwards may use more or fewer parameters, on all ranks or on some.
    A gradient that arrives after its bucket was sent raises; ``overlap=False`` has no such restriction. Parameters that no rank has used
    keep ``grad=None``. :func:`netcl.autograd.grad` returns the gradients of this rank alone.

    If backward raises on one rank, the others raise :class:`~netcl.distributed.comm.LostRankError` with its error and keep their own
    gradients. If backward raises on all ranks and all continue, nothing is reported.

    >>> from netcl import nn
    >>> model = DistributedDataParallel(nn.Linear(2, 1))
    >>> model([[1.0, 2.0]]).shape
    (1, 1)
    """

    def __init__(self, module: Module, world: World | None = None, bucket_mb: float = 4.0, compress: str | None = None,
                 overlap: bool = True, broadcast_buffers: bool = True):  # fmt: skip
        super().__init__()
        if not bucket_mb > 0:
            raise ValueError(message("DistributedDataParallel", "bucket_mb must be greater than 0", bucket_mb=bucket_mb))
        self.module = module
        self.world = world or comm.world()
        self.broadcast_buffers = broadcast_buffers
        #: Name, start and end (``time.perf_counter``) of every backward and of every bucket's reduction, for a trace of the overlap.
        self.spans: list[tuple[str, float, float]] = []
        self._overlaps, self._bytes, self._compress = overlap, int(bucket_mb * 2**20), compress
        self._sync, self._observed = True, False
        self._walk: object | None = None  # the backward that fills the buckets
        self._order = [p for p in module.parameters() if p.requires_grad]
        self._fired: dict[int, int] = {}  # gradients of each parameter so far in this backward
        self._counts: dict[int, int] = {}  # the same over the whole first backward
        self._buckets: list[_Bucket] = []
        self._begun = 0  # the number of buckets sent
        self._arrived = 0.0  # when the device had finished the gradients of the last bucket
        if self.world.size == 1:
            return
        names = [[name, list(p.shape), p.dtype, "learns" if p.requires_grad else "frozen"] for name, p in module.named_parameters()]
        self.world.agree("DistributedDataParallel", "the model's parameters", names)
        buffers = [[name, list(buffer.shape), buffer.dtype] for name, buffer in module.named_buffers()]
        self.world.agree("DistributedDataParallel", "the model's buffers", buffers)
        settings = [bucket_mb, compress, self.world.deterministic]
        self.world.agree("DistributedDataParallel", "bucket_mb, compress and deterministic", settings)
        broadcast_each([[tensor] for tensor in (*module.parameters(), *module.buffers())], self.world)
        # One thread, so that all ranks reduce the buckets in the same order, with messages apart from those of the caller.
        self._courier, self._thread = self.world.duplicate(), ThreadPoolExecutor(1, "netcl-courier")
        self._fill_buckets(range(len(self._order))[::-1])  # backward produces the gradients of the last layer first
        for i, p in enumerate(self._order):
            p.register_hook(partial(self._fires, i))

    def _fill_buckets(self, order: Sequence[int]) -> None:
        left = iter(order)
        groups = bucketed(([self._order[i]] for i in order), self._bytes)
        self._buckets = [_Bucket(number, {next(left): p for (p,) in group}) for number, group in enumerate(groups)]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.params}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; in training, first copy the buffers of rank 0 if ``broadcast_buffers`` is set."""
        if self.training and self._sync and self.world.size > 1:
            if self.broadcast_buffers:
                broadcast_each([[buffer] for buffer in self.module.buffers()], self.world)
            if is_grad_enabled():
                known = set(map(id, self._order))
                if new := [name for name, p in self.module.named_parameters() if p.requires_grad and id(p) not in known]:
                    what = "parameters must not be added or unfrozen after the model was wrapped: gradients would differ between ranks"
                    raise RuntimeError(message("DistributedDataParallel", what, "change the model first, then wrap it", new=new[:3]))
                expect_backward(self, self._failed)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the first backward outside the block averages the sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def bytes_sent(self) -> int:
        """The bytes of gradients this rank had to send so far."""
        return self._courier.bytes_sent if self.world.size > 1 else 0

    # ---- during backward

    def _fires(self, i: int, gradient: Tensor) -> None:
        """Count a gradient of parameter ``i`` that is about to be added; a parameter that is used twice gets two gradients."""
        if not self._sync:
            return
        if self._walk is not walk_under_way():  # also true after a backward that raised
            self._begin()
        while self._begun < len(self._buckets) and self._buckets[self._begun].missing == 0:
            self._send(self._buckets[self._begun])
        self._fired[i] = self._fired.get(i, 0) + 1
        if not (self._observed and self._overlaps):
            return
        bucket = self._bucket_of[i]
        if bucket.sent is not None:
            what = "every gradient must arrive before its bucket is sent, but the graph differs from that of the first step"
            raise RuntimeError(message("DistributedDataParallel", what, "pass overlap=False", shape=gradient.shape))
        if self._fired[i] <= self._counts.get(i, 0):  # gradients that the first step did not have are reduced but not awaited
            bucket.missing -= 1

    def _begin(self) -> None:
        self._fired, self._begun, self._walk = {}, 0, walk_under_way()
        self._started = time.perf_counter()
        for bucket in self._buckets:
            bucket.missing = sum(self._counts.get(i, 0) for i in bucket.params) if self._observed else -1
            bucket.sent = None
        after_backward(self._finish)

    def _send(self, bucket: _Bucket) -> None:
        if any(p.grad is None and i in self._fired for i, p in bucket.params.items()):
            what = "hooks must not take gradients of parameters away: they are averaged at the end of backward"
            raise RuntimeError(message("DistributedDataParallel", what, "step the optimizer after backward"))
        bucket.grads = Bucket([[gradient_or_zeros(p, p.grad)] for p in bucket.params.values()])
        used = [p.grad is not None for p in bucket.params.values()]
        bucket.sent = self._thread.submit(self._average, bucket, used)
        self._begun = bucket.number + 1

    def _average(self, bucket: _Bucket, used: Sequence[bool]) -> np.ndarray:
        """Return a bucket's averages, then a number per parameter, nonzero if a rank used the parameter. Runs in the background thread."""
        replicas = bucket.grads.joined(used)
        start = self._arrived = time.perf_counter()
        average = bucket.grads.reduced(self._courier, "mean", self._compress, replicas)
        self.spans.append((f"bucket {bucket.number}", start, time.perf_counter()))
        return average

    def _finish(self) -> None:
        self._walk = None
        for bucket in self._buckets[self._begun :]:
            self._send(bucket)
        # Wait for all buckets before writing the first: if a rank is lost, no gradient has been overwritten.
        averages = [bucket.sent.result() for bucket in self._buckets if bucket.sent is not None]
        for bucket, average in zip(self._buckets, averages, strict=True):
            write_flat(bucket.grads.groups, average)
            for p, (grad,), used in zip(bucket.params.values(), bucket.grads.groups, average[-len(bucket.params) :], strict=True):
                if used:
                    p.grad = grad
            bucket.sent, bucket.grads = None, Bucket([])  # do not keep gradients alive that zero_grad releases
        self.spans.append(("backward", self._started, self._arrived))
        if not self._observed:
            self._observe_order()
        expect_no_backward(self)

    def _failed(self, error: BaseException) -> None:
        """Report an error of this rank's backward to the other ranks. First wait, up to a timeout, for the buckets already sent."""
        expect_no_backward(self)
        if self._sync and not isinstance(error, LostRankError):
            wait_for([bucket.sent for bucket in self._buckets if bucket.sent is not None], _PATIENCE)
            self.world.failed(error)

    def _observe_order(self) -> None:
        """Order the buckets by the arrival of gradients on rank 0, and store how many gradients each parameter gets."""
        gathered = self.world.all_gather_object(list(self._fired.items()), "DistributedDataParallel")
        self._counts = dict(gathered[0])
        unused = [i for i in range(len(self._order)) if i not in self._counts]
        self._fill_buckets([*self._counts, *unused])
        self._observed = True
        if self._overlaps and any(dict(other) != self._counts for other in gathered):
            # Ranks that use different parameters cannot know when a bucket is complete.
            log.warning("[DistributedDataParallel] ranks use different parameters: gradients are sent at the end of backward")
            self._overlaps = False
