"""One process per device, on one machine or many: every rank has the whole model and a part of the batch.

Gradients are averaged in buckets, in the order in which backward makes them. A bucket that is complete is copied to the host and handed
to a thread that talks to the other ranks, while backward goes on; at its end the averages are put into ``.grad``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from netcl.autograd.tape import after_backward, expect_backward, expect_no_backward, is_grad_enabled, walk_under_way
from netcl.core import dtype as dtypes
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.distributed import comm
from netcl.distributed.comm import LostRankError, World
from netcl.nn.module import Module

log = logging.getLogger("netcl")

#: Seconds in which buckets that were sent before backward failed may still arrive: ranks that fail alike have all sent them.
_PATIENCE = 1.0


class Span(NamedTuple):
    """When something happened, in seconds of ``time.perf_counter``."""

    name: str
    start: float
    end: float


class _Bucket:
    """Parameters of one dtype whose gradients travel together."""

    def __init__(self, number: int, params: Sequence[Tensor]):
        self.number = number
        self.params = list(params)
        self.waiting = 0
        self.sent: Future[np.ndarray] | None = None


class _Courier:
    """A thread that talks to the other ranks: takes buckets in order, so that all ranks send them in the same order."""

    def __init__(self, world: World, compress: str | None):
        self.world, self.compress = world, compress
        self.spans: list[Span] = []
        self.arrived = 0.0  # when the device had made the gradients of the last bucket
        self._thread = ThreadPoolExecutor(1, "netcl-courier")

    def send(self, name: str, copies: Sequence[Any], used: Sequence[bool]) -> Future[np.ndarray]:
        """Start averaging; the answer holds the averages of all copies and, behind them, which parameters any rank has used."""
        return self._thread.submit(self._average, name, copies, used)

    def _average(self, name: str, copies: Sequence[Any], used: Sequence[bool]) -> np.ndarray:
        values = [np.asarray(copy.wait()).reshape(-1) for copy in copies]
        wide = np.result_type(np.float32, *values)
        start = self.arrived = time.perf_counter()
        payload = np.concatenate([*values, np.asarray(used, wide)], dtype=wide)
        average = self.world.all_reduce(payload, "mean", compress=self.compress, check=False)
        self.spans.append(Span(name, start, time.perf_counter()))
        return average


class _Zeros:
    """In place of a copy to the host, where a parameter has no gradient on this rank."""

    def __init__(self, p: Tensor):
        self.values = np.zeros(p.size, dtypes.DTYPES[p.dtype].host)

    def wait(self) -> np.ndarray:
        return self.values


class DistributedDataParallel(Module):
    """A model whose gradients are averaged over all ranks of a world before anybody sees them.

    Start the program with ``mpiexec -n 4 python train.py``; without mpiexec the world has one rank and nothing happens. All ranks
    start with the parameters of rank 0. Give every rank a part of the batch of the same size, and each optimizer step is that
    of the whole batch.

    - **module**: the model, on this rank's device.
    - **world**: of :func:`netcl.distributed.world` if not given.
    - **bucket_mb**: how much is sent at once: small buckets overlap better, large ones cost fewer round trips.
    - **compress**: ``"bfloat16"`` halves the bytes of float32 gradients.
    - **overlap**: ``False`` sends everything at the end of backward.
    - **broadcast_buffers**: ranks take the buffers (running statistics) of rank 0 before each forward in training.

    The order in which gradients come is learned from the first backward. Parameters may be left out of later steps or join them, on all
    ranks or on some, as long as none gets a gradient after its bucket was sent, which is told; ``overlap=False`` takes anything.
    Parameters that no rank has used keep ``grad=None``.

    A backward that raises on one rank is told to the others, who wait for its gradients: they raise
    :class:`~netcl.distributed.comm.LostRankError` with its error, and keep the gradients of their own. Where it raises on all of them,
    and all go on, nothing is told.

    >>> from netcl import nn
    >>> model = DistributedDataParallel(nn.Linear(2, 1))
    >>> model([[1.0, 2.0]]).shape
    (1, 1)
    """

    def __init__(self, module: Module, world: World | None = None, bucket_mb: float = 4.0, compress: str | None = None,
                 overlap: bool = True, broadcast_buffers: bool = True):  # fmt: skip
        super().__init__()
        if not bucket_mb > 0:
            raise ValueError(message("DistributedDataParallel", "buckets must have a size", bucket_mb=bucket_mb))
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.world = world or comm.world()
        self._overlaps, self._bytes = overlap, int(bucket_mb * 2**20)
        self._sync, self._learned = True, False
        self._walk: object | None = None  # the backward that buckets are filled in
        self._order = [p for p in module.parameters() if p.requires_grad]
        self._fired: dict[int, int] = {}  # gradients that came so far in this backward, by parameter
        self._counts: dict[int, int] = {}  # and in all of the first
        self._buckets: list[_Bucket] = []
        self._begun = 0  # buckets that were sent
        if self.world.size > 1:
            self._start(compress)

    def _start(self, compress: str | None) -> None:
        names = [[name, list(p.shape), p.dtype, "learns" if p.requires_grad else "frozen"] for name, p in self.module.named_parameters()]
        self.world.agree("DistributedDataParallel", "the model's parameters", names)
        with_values = [*self.module.parameters(), *self.module.buffers()]
        for tensor in with_values:
            tensor.from_host(self.world.spread("DistributedDataParallel", tensor.to_host(), 0))
        self._courier = _Courier(self.world.duplicate(), compress)
        self._fill_buckets(self._order[::-1])  # backward makes the last layer's gradients first
        for p in self._order:
            p.register_hook(partial(self._fires, p))

    def _fill_buckets(self, order: Sequence[Tensor]) -> None:
        groups: list[list[Tensor]] = []
        filled = 0
        for p in order:
            if not groups or filled >= self._bytes or groups[-1][0].dtype != p.dtype:
                groups.append([])
                filled = 0
            groups[-1].append(p)
            filled += p.nbytes
        self._buckets = [_Bucket(number, group) for number, group in enumerate(groups)]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.params}

    # ---- use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        if self.training and self._sync and self.world.size > 1:
            for buffer in self.module.buffers() if self.broadcast_buffers else ():
                buffer.from_host(self.world.spread("broadcast_buffers", buffer.to_host(), 0))
            if is_grad_enabled():
                expect_backward(self, self._failed)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only add up on this rank; the first backward outside sends the sums. For gradient accumulation."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def spans(self) -> list[Span]:
        """When backward ran, and when each bucket was with the other ranks; for a trace that shows the overlap."""
        return self._courier.spans if self.world.size > 1 else []

    # ---- while backward runs

    def _fires(self, p: Tensor, gradient: Tensor) -> None:
        """A gradient of ``p`` is about to be added; a tensor used twice gets two."""
        if not self._sync:
            return
        if self._walk is not walk_under_way():  # one that raised before its end has left its own behind
            self._begin()
        self._send_full()
        self._fired[id(p)] = self._fired.get(id(p), 0) + 1
        if not (self._learned and self._overlaps):
            return
        bucket = self._bucket_of[id(p)]
        if bucket.sent is not None:
            what = "a parameter got a gradient after its bucket was sent: the graph is another than in the first step"
            raise RuntimeError(message("DistributedDataParallel", what, "pass overlap=False", shape=p.shape))
        if self._fired[id(p)] <= self._counts[id(p)]:  # one that was not used in the first step is not waited for, but taken along
            bucket.waiting -= 1

    def _begin(self) -> None:
        self._fired, self._begun, self._walk = {}, 0, walk_under_way()
        self._started = time.perf_counter()
        for bucket in self._buckets:
            bucket.waiting = sum(self._counts[id(p)] for p in bucket.params) if self._learned else -1
            bucket.sent = None
        after_backward(self._finish)

    def _send_full(self) -> None:
        """Send the buckets whose last gradient has been added by now, in order."""
        while self._begun < len(self._buckets) and self._buckets[self._begun].waiting == 0:
            self._send(self._buckets[self._begun])

    def _send(self, bucket: _Bucket) -> None:
        copies = [_Zeros(p) if p.grad is None else p.grad.to_host_async() for p in bucket.params]
        used = [p.grad is not None for p in bucket.params]
        bucket.sent = self._courier.send(f"bucket {bucket.number}", copies, used)
        self._begun = bucket.number + 1

    def _finish(self) -> None:
        self._walk = None
        for bucket in self._buckets[self._begun :]:
            self._send(bucket)
        # All of them before the first is put: with a rank lost half way, no gradient is an average and none half of one.
        averages = [bucket.sent.result() for bucket in self._buckets if bucket.sent is not None]
        for bucket, average in zip(self._buckets, averages, strict=True):
            self._put(bucket, average)
        self._courier.spans.append(Span("backward", self._started, self._courier.arrived))
        if not self._learned:
            self._learn()
        expect_no_backward(self)

    def _failed(self, error: BaseException) -> None:
        """Backward has raised on this rank."""
        expect_no_backward(self)
        if self._sync and not isinstance(error, LostRankError):
            wait_for([bucket.sent for bucket in self._buckets if bucket.sent is not None], _PATIENCE)
            self.world.failed(error)

    def _put(self, bucket: _Bucket, averages: np.ndarray) -> None:
        used = averages[len(averages) - len(bucket.params) :]
        start = 0
        for p, somewhere in zip(bucket.params, used, strict=True):
            values = averages[start : start + p.size].reshape(p.shape)
            start += p.size
            if somewhere and p.grad is not None:
                p.grad.from_host(values)
            elif somewhere:
                p.grad = Tensor.from_host(p.queue, values, p.dtype)

    def _learn(self) -> None:
        """Order the buckets as gradients came, by rank 0's account, and remember how many each parameter gets."""
        place = {id(p): i for i, p in enumerate(self._order)}
        came = [[place[key], count] for key, count in self._fired.items()]
        first = self.world.tell(came, "DistributedDataParallel")[0]
        counts = {id(self._order[i]): count for i, count in first}
        unused = [p for p in self._order if id(p) not in counts]
        same = self.world.tell(counts == self._fired, "DistributedDataParallel")
        self._fill_buckets([*(self._order[i] for i, _ in first), *unused])
        self._counts = {id(p): counts.get(id(p), 0) for p in self._order}
        self._learned = True
        if self._overlaps and not all(same):
            # Ranks that use different parameters cannot know when a bucket is full.
            log.warning("[DistributedDataParallel] ranks use different parameters: gradients are sent at the end of backward")
            self._overlaps = False
