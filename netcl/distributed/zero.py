"""Optimizer state in shares: every rank keeps and updates a part of the parameters, then gives the others the new values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.tensor import Tensor
from netcl.distributed import comm
from netcl.distributed.comm import World
from netcl.ops import update


class ShardedOptimizer:
    """ZeRO stage 1: of n ranks each holds about 1/n of the optimizer's state.

    Gradients must be averaged already (:class:`~netcl.distributed.ddp.DistributedDataParallel` does it). After a step each rank has the new
    values of its own parameters and collects the others', which is what the all-reduce of gradients costs once more in one direction.

    - **params**: all parameters, in the same order on every rank; no groups.
    - **make**: makes the optimizer of a list of parameters: ``lambda params: Adam(params, lr=1e-3)``.
    - **world**: of :func:`netcl.distributed.world` if not given.

    >>> from netcl import nn, optim
    >>> model = nn.Linear(2, 1)
    >>> opt = ShardedOptimizer(model.parameters(), lambda params: optim.Adam(params, lr=1e-3))
    >>> len(opt.own)
    2
    """

    skips_on_device = True  # or by asking, but never by leaving a step out: the other ranks wait in it

    def __init__(self, params: Iterable[Tensor], make: Callable[[list[Tensor]], Any], world: World | None = None):
        self.world = world or comm.world()
        self.params = list(params)
        self.owner = _owners([p.size for p in self.params], self.world.size)
        self.own = [p for p, rank in zip(self.params, self.owner, strict=True) if rank == self.world.rank]
        # A rank without a share still needs an optimizer with options, for its schedule.
        self.inner = make(self.own or [Tensor.zeros((1,), queue=self.params[0].queue, requires_grad=True)])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of this rank's part; schedulers change options here, the same on all ranks."""
        return self.inner.param_groups

    def step(self, max_norm: float | None = None, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        """Update this rank's parameters, collect the others'. ``max_norm`` bounds the norm of *all* gradients, as without shares.

        ``grad_scale`` and ``found_inf`` are for a :class:`~netcl.amp.grad_scaler.GradScaler`, as of any optimizer.
        """
        total = None
        gradients = [p.grad for p in self.params if p.grad is not None]
        if grad_scale is not None:
            update.scale(gradients, grad_scale)
        if max_norm is not None and gradients:
            total, factor = update.norm(gradients, 2.0, max_norm)
            update.scale(gradients, factor)
        if found_inf is None or self.inner.skips_on_device:
            self.inner.step(**({} if found_inf is None else {"found_inf": found_inf}))
        elif not found_inf.item():
            self.inner.step()
        if self.world.size > 1:
            self._collect()
        return total

    def _collect(self) -> None:
        kinds = sorted({p.dtype for p in self.params})
        for kind in kinds:
            shares = [[p for p, rank in zip(self.params, self.owner, strict=True) if rank == r and p.dtype == kind]
                      for r in range(self.world.size)]  # fmt: skip
            mine = [p.to_host_async() for p in shares[self.world.rank]]
            flat = np.concatenate([np.asarray(copy.wait()).reshape(-1) for copy in mine] or [np.empty(0, dtypes.DTYPES[kind].host)])
            parts = self.world.collect("ShardedOptimizer", flat, [sum(p.size for p in share) for share in shares])
            for rank, (share, values) in enumerate(zip(shares, parts, strict=True)):
                if rank != self.world.rank:
                    _write_back(share, values)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self.params:
            p.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as one optimizer over all parameters would give it; every rank must call this.

        A run with another number of ranks, or without shares, goes on from it.
        """
        return _gathered_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's share of a whole state."""
        numbers = [i for i, rank in enumerate(self.owner) if rank == self.world.rank]
        place = {number: i for i, number in enumerate(numbers)}
        mine = {place[int(number)]: saved for number, saved in state["state"].items() if int(number) in place}
        options = {name: value for name, value in state["param_groups"][0].items() if name != "params"}
        count = max(1, len(numbers))
        self.inner.load_state_dict({"state": mine, "param_groups": [{**options, "params": list(range(count))}]})


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """A rank for every parameter: the largest first, each to the rank that has least."""
    loads = [0] * ranks
    owner = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return owner


def _write_back(params: list[Tensor], values: np.ndarray) -> None:
    start = 0
    for p in params:
        p.from_host(values[start : start + p.size].reshape(p.shape))
        start += p.size


def _gathered_state(sharded: ShardedOptimizer) -> dict[str, Any]:
    """The state of all ranks under the numbers of the parameters."""
    inner = sharded.inner.state_dict()
    numbers = [i for i, rank in enumerate(sharded.owner) if rank == sharded.world.rank]
    plain = {number: {name: value for name, value in inner["state"].get(i, {}).items() if not isinstance(value, Tensor)}
             for i, number in enumerate(numbers)}  # fmt: skip
    names = {number: sorted(name for name, value in inner["state"].get(i, {}).items() if isinstance(value, Tensor))
             for i, number in enumerate(numbers)}  # fmt: skip
    told = sharded.world.tell([[number, plain[number], names[number]] for number in numbers], "state_dict")
    state: dict[int, dict[str, Any]] = {}
    for number, options, tensors in sorted((row for rows in told for row in rows), key=lambda row: row[0]):
        p, rank = sharded.params[number], sharded.owner[number]
        found = dict(options)
        kind = dtypes.sum_dtype(p.dtype)  # as an optimizer keeps it
        for name in tensors:
            own = inner["state"][numbers.index(number)][name].to_host() if rank == sharded.world.rank else np.empty(p.shape, kind)
            found[name] = Tensor.from_host(p.queue, sharded.world.broadcast(own, rank, check=False), kind)
        if found:
            state[number] = found
    groups = [{**{k: v for k, v in inner["param_groups"][0].items() if k != "params"}, "params": list(range(len(sharded.params)))}]
    return {"state": state, "param_groups": groups}
