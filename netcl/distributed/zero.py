"""Sharded optimizer state: every rank updates a part of the parameters and sends the new values to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.distributed import comm
from netcl.distributed.collectives import Bucket, wide_dtype, write_flat
from netcl.distributed.comm import World
from netcl.ops import update


class ShardedOptimizer:
    """An optimizer with sharded state (ZeRO stage 1): each of n ranks holds about 1/n of the state.

    Gradients must be averaged before :meth:`step`, as :class:`~netcl.distributed.ddp.DistributedDataParallel` does. After a step the new
    parameters are gathered, which costs half the bytes of the all-reduce of gradients.

    - **params**: all parameters, in the same order on every rank; no groups.
    - **make**: returns an optimizer for a list of parameters: ``lambda params: Adam(params, lr=1e-3)``.
    - **world**: :func:`netcl.distributed.world` by default.

    >>> from netcl import nn, optim
    >>> model = nn.Linear(2, 1)
    >>> opt = ShardedOptimizer(model.parameters(), lambda params: optim.Adam(params, lr=1e-3))
    >>> len(opt.own)
    2
    """

    skips_on_device = True  # a GradScaler must call step() on every rank, since ranks wait for each other in it

    def __init__(self, params: Iterable[Tensor], make: Callable[[list[Tensor]], Any], world: World | None = None):
        self.world = world or comm.world()
        self.params = list(params)
        self.owner = _owners([p.size for p in self.params], self.world.size)
        self._numbers = [i for i, rank in enumerate(self.owner) if rank == self.world.rank]
        self.own = [self.params[i] for i in self._numbers]
        # A rank without parameters still needs an optimizer, whose options a scheduler changes.
        given = self.own or [Tensor.zeros((1,), queue=self.params[0].queue, requires_grad=True)]
        self.inner = make(given)
        if [[id(p) for p in group["params"]] for group in self.param_groups] != [[id(p) for p in given]]:
            what = "make must return an optimizer of one group with the given parameters, in their order"
            raise ValueError(message("ShardedOptimizer", what, groups=[len(group["params"]) for group in self.param_groups]))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of this rank's optimizer; schedulers must change options alike on all ranks."""
        return self.inner.param_groups

    def step(self, max_norm: float | None = None, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        """Update this rank's parameters and receive the others; returns the norm of all gradients if ``max_norm`` is given.

        ``grad_scale`` and ``found_inf`` come from a :class:`~netcl.amp.grad_scaler.GradScaler`.
        """
        total = None
        gradients = [p.grad for p in self.params if p.grad is not None]
        if grad_scale is not None:
            update.scale(gradients, grad_scale)
        if max_norm is not None and gradients:
            total, factor = update.norm_of_all(gradients, 2.0, max_norm)
            update.scale(gradients, factor)
        if found_inf is None or self.inner.skips_on_device:
            self.inner.step(**({} if found_inf is None else {"found_inf": found_inf}))
        elif not found_inf.item():
            self.inner.step()
        if self.world.size > 1:
            self._collect()
        return total

    def _collect(self) -> None:
        """Exchange the new values: every rank sends the values of its own parameters."""
        for dtype in sorted({p.dtype for p in self.params}):
            shares: list[list[list[Tensor]]] = [[] for _ in range(self.world.size)]
            for p, rank in zip(self.params, self.owner, strict=True):
                if p.dtype == dtype:
                    shares[rank].append([p])
            mine = shares[self.world.rank]
            values = Bucket(mine).joined()[0] if mine else np.empty(0, wide_dtype(dtype))
            parts = self.world.collect("ShardedOptimizer", values, [sum(p.size for (p,) in share) for share in shares])
            for share, part in zip(shares, parts, strict=True):
                if share is not mine:
                    write_flat(share, part)

    def zero_grad(self) -> None:
        """Set all gradients to ``None``."""
        for p in self.params:
            p.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as one optimizer over all parameters would return it; every rank must call this.

        The state can be loaded with another number of ranks, or by an optimizer without shards.
        """
        inner = self.inner.state_dict()
        own = {number: inner["state"].get(i, {}) for i, number in enumerate(self._numbers)}
        tensors = {number: {name: value for name, value in found.items() if isinstance(value, Tensor)} for number, found in own.items()}
        described = [
            [n, {k: v for k, v in found.items() if k not in tensors[n]}, [[k, t.shape, t.dtype] for k, t in sorted(tensors[n].items())]]
            for n, found in own.items()
        ]
        gathered = self.world.all_gather_object(described, "state_dict")
        state: dict[int, dict[str, Any]] = {}
        for number, found, forms in sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0]):
            for name, shape, dtype in forms:
                values = own[number][name].to_host() if number in own else np.empty(shape, dtypes.lookup(dtype).host)
                values = self.world.broadcast(values, self.owner[number], check=False)
                found[name] = Tensor.from_host(self.params[number].queue, values, dtype)
            if found:
                state[number] = found
        return {"state": state, "param_groups": [{**inner["param_groups"][0], "params": list(range(len(self.params)))}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shard of a whole state."""
        index = {number: i for i, number in enumerate(self._numbers)}
        mine = {index[int(number)]: saved for number, saved in state["state"].items() if int(number) in index}
        options = {**state["param_groups"][0], "params": list(range(max(1, len(index))))}
        self.inner.load_state_dict({"state": mine, "param_groups": [options]})


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """Return the rank that owns each parameter: in descending size, each goes to the rank with the fewest elements so far."""
    loads = [0] * ranks
    owner = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return owner
