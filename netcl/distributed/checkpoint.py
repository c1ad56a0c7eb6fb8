"""Checkpoints of a world: rank 0 writes one file, and any number of ranks can resume from it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
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
    """Seed this rank's random numbers from ``seed`` and its rank: reproducible, and different on every rank."""
    random.manual_seed(_rank_seed(seed, (world or comm.world()).rank))


def _rank_seed(seed: int, *place: int) -> int:
    return int(np.random.SeedSequence([seed, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def save_checkpoint(path: str | os.PathLike[str], *, world: World | None = None, extra: Any = None, **parts: Any) -> Path | None:
    """Write a checkpoint on rank 0 that also holds the random states of all ranks; every rank must call this.

    Takes the arguments of :func:`netcl.io.save_checkpoint`. Returns the path on rank 0, ``None`` on other ranks. A model wrapped in
    ``DataParallel`` or ``DistributedDataParallel`` is saved without its wrapper. If rank 0 cannot write, all raise ``LostRankError``.
    """
    ours = world or comm.world()
    model = parts["model"] = unwrapped(parts.get("model"))
    streams = ours.all_gather_object(random.get_state(getattr(model, "queue", None)).as_dict(), "save_checkpoint")
    if isinstance(parts.get("optimizer"), ShardedOptimizer):  # gathered from all ranks
        sharded, state = parts["optimizer"], parts["optimizer"].state_dict()
        parts["optimizer"] = SimpleNamespace(state_dict=lambda: state, load_state_dict=sharded.load_state_dict)
    written, problem = None, ""
    if ours.rank == 0:
        try:
            written = io.save_checkpoint(path, extra={"streams": streams, "extra": extra}, **parts)
        except (OSError, ValueError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
    failure = ours.all_gather_object(problem, "save_checkpoint")[0]
    if failure:
        raise LostRankError(message("save_checkpoint", f"rank 0 could not write the checkpoint: {failure}", path=path))
    return written


def load_checkpoint(path: str | os.PathLike[str], *, world: World | None = None, **parts: Any) -> io.Checkpoint:
    """Load a checkpoint on every rank; only rank 0 needs to have the file.

    Takes the arguments of :func:`netcl.io.load_checkpoint`. If the number of ranks is unchanged, each rank resumes its random state.
    Otherwise each rank is seeded anew from rank 0's saved seed, the step and its rank.
    """
    ours = world or comm.world()
    model = parts["model"] = unwrapped(parts.get("model"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(path) if ours.size == 1 else _received(Path(path), Path(folder), ours)
        loaded = io.load_checkpoint(file, **{name: part for name, part in parts.items() if part is not None})
    kept = loaded.extra if isinstance(loaded.extra, dict) and "streams" in loaded.extra else {"streams": [], "extra": loaded.extra}
    streams, queue = kept["streams"], getattr(model, "queue", None)
    if len(streams) == ours.size:
        random.set_state(streams[ours.rank], queue)
    elif streams or ours.size > 1:
        first = streams[0] if streams else random.get_state(queue).as_dict()
        random.manual_seed(_rank_seed(first["seed"], loaded.step, ours.rank))
    return loaded._replace(extra=kept["extra"], path=Path(path))


def _received(path: Path, folder: Path, world: World) -> Path:
    """Write a copy of rank 0's checkpoint to ``folder`` and return its path."""
    found = io.latest(path) if path.is_dir() else path
    there = world.rank == 0 and found is not None and found.is_file()
    content = np.fromfile(found, np.uint8) if there and found is not None else np.empty(0, np.uint8)
    size = world.all_gather_object(content.size if there else None, "load_checkpoint")[0]
    if size is None:
        raise FileNotFoundError(message("load_checkpoint", "path must be a checkpoint, or a folder with checkpoints, on rank 0", path=path))
    target = folder / "received.netcl"
    world.broadcast(content if world.rank == 0 else np.empty(size, np.uint8), check=False).tofile(target)
    return target


def unwrapped(model: Any) -> Any:
    """Return the model inside a ``DataParallel`` or ``DistributedDataParallel``; any other model itself."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model
