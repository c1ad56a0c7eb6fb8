"""Checkpoints of a world: rank 0 writes one file, any number of ranks goes on from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl import io
from netcl.core.errors import message
from netcl.distributed import comm
from netcl.distributed.comm import LostRankError, World
from netcl.distributed.data_parallel import DataParallel
from netcl.distributed.ddp import DistributedDataParallel
from netcl.distributed.zero import ShardedOptimizer
from netcl.ops import random


def manual_seed(seed: int, world: World | None = None) -> None:
    """Seed this rank's random numbers: known from ``seed`` and rank, different on every rank, so that no two drop out the same."""
    ours = world or comm.world()
    random.manual_seed(_rank_seed(seed, ours.rank))


def _rank_seed(seed: int, *place: int) -> int:
    return int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def save_checkpoint(path: str | os.PathLike[str], *, world: World | None = None, extra: Any = None, **parts: Any) -> Path | None:
    """:func:`netcl.io.save_checkpoint` by rank 0, with the random streams of all ranks; every rank calls it, and waits.

    Returns the path on rank 0. A wrapped model (``DistributedDataParallel``) is saved as itself, and can be loaded without the wrapper.
    """
    ours = world or comm.world()
    parts["model"] = unwrapped(parts.get("model"))
    streams = ours.tell(random.get_state(_queue_of(parts["model"])).as_dict(), "save_checkpoint")
    if isinstance(parts.get("optimizer"), ShardedOptimizer):  # its state lies on all ranks
        parts["optimizer"] = _Taken(parts["optimizer"].state_dict())
    written, problem = None, ""
    if ours.rank == 0:
        try:
            written = io.save_checkpoint(path, extra={"streams": streams, "extra": extra}, **parts)
        except (OSError, ValueError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
    told = ours.tell(problem, "save_checkpoint")[0]
    if told:
        raise LostRankError(message("save_checkpoint", f"rank 0 could not write: {told}", path=path))
    return written


def load_checkpoint(path: str | os.PathLike[str], *, world: World | None = None, **parts: Any) -> io.Checkpoint:
    """:func:`netcl.io.load_checkpoint` on every rank; only rank 0 needs to have the file.

    With the number of ranks it was saved with, random streams go on where they were; with another, new ones are drawn from that of rank 0.
    """
    ours = world or comm.world()
    parts["model"] = unwrapped(parts.get("model"))
    with tempfile.TemporaryDirectory() as folder:
        loaded = io.load_checkpoint(
            _received(Path(path), Path(folder), ours), **{name: part for name, part in parts.items() if part is not None}
        )
    kept = loaded.extra if isinstance(loaded.extra, dict) and "streams" in loaded.extra else {"streams": [], "extra": loaded.extra}
    _put_stream(kept["streams"], _queue_of(parts["model"]), ours, loaded.step)
    return loaded._replace(extra=kept["extra"], path=Path(path))


def _queue_of(model: Any) -> Any:
    """Where a model draws its random numbers; ``None`` is the active device."""
    return getattr(model, "queue", None)


def _put_stream(streams: Sequence[Mapping[str, int]], queue: Any, ours: World, step: int) -> None:
    """This rank's own stream: what a file of one process holds is the same on all ranks until here."""
    if len(streams) == ours.size:
        random.set_state(streams[ours.rank], queue)
    elif streams or ours.size > 1:
        first = streams[0] if streams else random.get_state(queue).as_dict()
        random.manual_seed(_rank_seed(first["seed"], step, ours.rank))


def _received(path: Path, folder: Path, world: World) -> Path:
    """The checkpoint, copied from rank 0 where this rank is another."""
    if world.size == 1:
        return path
    found = io.latest(path) if path.is_dir() else path
    there = world.rank == 0 and found is not None and found.is_file()
    if not world.tell(there, "load_checkpoint")[0]:
        raise FileNotFoundError(message("load_checkpoint", "rank 0 has no such checkpoint", path=path))
    content = np.fromfile(found, np.uint8) if world.rank == 0 and found is not None else np.empty(0, np.uint8)
    size = world.tell(int(content.size), "load_checkpoint")[0]
    content = content if world.rank == 0 else np.empty(size, np.uint8)
    target = folder / "received.netcl"
    world.broadcast(content, check=False).tofile(target)
    return target


def unwrapped(model: Any) -> Any:
    """The model that replicas or ranks share: they come and go, it is what is kept."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


class _Taken:
    """A state that was collected already."""

    def __init__(self, state: Any):
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
