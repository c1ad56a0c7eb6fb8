"""Checkpoints: the state of a run in one file, which is written completely or not at all, and checked before objects are changed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.device import get_active_device
from netcl.core.errors import message
from netcl.core.nested import map_leaves
from netcl.data.errors import check_count
from netcl.io import archive, tree
from netcl.io.archive import FileError, refusal, refusing
from netcl.io.model import fitting
from netcl.ops import random

log = logging.getLogger("netcl")

SAVE, LOAD = "save_checkpoint", "load_checkpoint"
_SEEDS = "netcl.host_rng"  # the name of the generator of seeds among the generators of a checkpoint
#: What is raised over states that are not made as they should be.
_NO_STATE = (TypeError, LookupError, AttributeError, ArithmeticError)
_CHECKPOINT_NAME = re.compile(r"step-(\d{6,})\.netcl")


class Checkpoint(NamedTuple):
    """The step, extra data, path and run id of a checkpoint; :func:`load_checkpoint` returns one."""

    step: int
    extra: Any
    path: Path
    run: str = ""


def save_checkpoint(
    path: str | os.PathLike[str], *, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None,
    loader: Any = None, ema: Any = None, rng: Any = None, step: int = 0, extra: Any = None, keep_last: int | None = None,
    run: str = "",
) -> Path:  # fmt: skip
    """Write a checkpoint and return its path.

    - **path**: a file, or a folder (existing, without a suffix, or with ``keep_last``) for a file ``step-000123.netcl``.
    - **model, optimizer, scheduler, scaler, loader, ema**: objects with ``state_dict()`` and ``load_state_dict()``.
    - **rng**: a NumPy generator, or a dictionary of generators. The random states of the model's and the active device are always saved,
      and so is the generator from which loaders and samplers without a seed draw theirs.
    - **extra**: any nesting of dictionaries, lists, numbers, strings, arrays and tensors.
    - **keep_last**: how many checkpoints to keep in the folder, including the new one; checkpoints with lower steps are removed.
    - **run**: the id of the run the checkpoint belongs to.
    """
    step = check_count(SAVE, "step", step, 0)
    if keep_last is not None:
        check_count(SAVE, "keep_last", keep_last)
    target = Path(path)
    if target.is_dir() or keep_last is not None or not target.suffix:
        target.mkdir(parents=True, exist_ok=True)
        target = target / f"step-{step:06d}.netcl"
    parts = _given(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader, ema=ema)
    states = {name: _state_of(name, part, SAVE) for name, part in parts.items()}
    states["random"] = [random.get_state(queue).as_dict() for queue in _queues(model)]
    states["rng"] = {name: generator.bit_generator.state for name, generator in {**_generators(rng, SAVE), _SEEDS: random.host_rng}.items()}
    packed, arrays = tree.pack({**states, "extra": extra}, op=SAVE)
    archive.write(target, {"kind": "checkpoint", "step": step, "run": str(run), "state": packed}, arrays, SAVE)
    if keep_last is not None:
        others = [path for path in checkpoints(target.parent) if path != target]
        for path in others[: max(0, len(others) - (keep_last - 1))]:
            path.unlink(missing_ok=True)
    return target


def load_checkpoint(
    path: str | os.PathLike[str], *, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None,
    loader: Any = None, ema: Any = None, rng: Any = None, max_bytes: int | None = None,
) -> Checkpoint:  # fmt: skip
    """Restore objects from a checkpoint, or from the latest one of a folder; returns ``step``, ``extra``, ``path`` and ``run``.

    The file must contain the state of every given object. Checksums, names, shapes and dtypes are checked before anything is changed.
    The model is loaded last. If loading a state still raises, every object except the model gets its old state back.
    """
    found = latest(path) if Path(path).is_dir() else Path(path)
    if found is None:
        raise FileNotFoundError(message(LOAD, "the folder must have a checkpoint", "they are named like step-000123.netcl", folder=path))
    if not found.exists():
        raise FileNotFoundError(message(LOAD, "the checkpoint must exist", file=found))
    step, state, run = _read(found, max_bytes)
    parts = _given(scheduler=scheduler, scaler=scaler, loader=loader, ema=ema, optimizer=optimizer, model=model)
    generators = _generators(rng, LOAD)
    if isinstance(saved := state.get("rng"), dict) and _SEEDS in saved:  # not in files of earlier versions
        generators[_SEEDS] = random.host_rng
    _check_fits(parts, generators, state, found)
    _restore_parts(parts, state, found)
    streams = state.get("random", [])
    if streams:  # on a machine with fewer devices the rest is dropped, on one with more the seed is shared
        random.manual_seed(streams[0]["seed"])
    for queue, stream in zip(_queues(model), streams, strict=False):
        random.set_state(stream, queue)
    for name, generator in generators.items():
        generator.bit_generator.state = state["rng"][name]
    return Checkpoint(step, _on_device(state.get("extra")), found, run)


def _read(found: Path, max_bytes: int | None = None) -> tuple[int, dict[str, Any], str]:
    """Return the step, the state and the run id of a checkpoint, after verifying the whole file."""
    meta, arrays = archive.read(found, LOAD, "checkpoint", max_bytes)
    state = tree.unpack(meta.get("state"), arrays, LOAD, tensor=_HostTensor)
    step = meta.get("step")
    if not isinstance(state, dict) or type(step) is not int or step < 0:
        what = f"{archive.META} must have a dictionary 'state' and an integer 'step' from 0 on"
        raise refusal(LOAD, what, state=type(state).__name__, step=repr(step), file=found)
    return step, state, str(meta.get("run", ""))


def run_of(path: str | os.PathLike[str]) -> str:
    """Return the id of the run a checkpoint belongs to; empty if it was saved without one."""
    return str(archive.read_meta(path, LOAD).get("run", ""))


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the checkpoints in a folder, in order of increasing step."""
    found = [(int(match[1]), path) for path in Path(folder).glob("step-*.netcl") if (match := _CHECKPOINT_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path of the checkpoint with the highest step in a folder, or ``None`` if there is no checkpoint."""
    found = checkpoints(folder)
    return found[-1] if found else None


def latest_whole(folder: str | os.PathLike[str]) -> Path | None:
    """Return the readable checkpoint with the highest step; ``None`` if ``folder`` has no checkpoint.

    Unreadable checkpoints with higher steps are renamed to ``step-000123.netcl.unreadable``, so that they are not overwritten, and a
    warning gives the reason for each. If no checkpoint can be read, none is renamed and the error of the newest is raised.
    """
    refused: list[tuple[Path, FileError | OSError]] = []
    for path in reversed(checkpoints(folder)):
        try:
            _read(path)
        except (FileError, OSError) as fault:
            refused.append((path, fault))
            continue
        for other, reason in refused:
            names = (other.with_name(f"{other.name}.unreadable{number or ''}") for number in count())
            aside = other.rename(next(name for name in names if not name.exists()))
            log.warning("%s; set aside as %s; going on from %s", reason, aside.name, path.name)
        return path
    if refused:
        raise refused[0][1]
    return None


class _HostTensor:
    """A tensor on the host; shape and dtype can be compared before device memory is allocated."""

    def __init__(self, stored: np.ndarray, dtype: str):
        self.stored, self.dtype, self.shape = stored, dtype, stored.shape


def _on_device(state: Any, queue: Any = None) -> Any:
    """Move the tensors of a state to a queue, or to the active device."""
    return map_leaves(state, lambda leaf: tree.tensor_of(leaf.stored, leaf.dtype, queue) if isinstance(leaf, _HostTensor) else leaf)


def _given(**parts: Any) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part is not None}


def _state_of(name: str, part: Any, op: str) -> Any:
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(part, method, None))]
    if missing:
        raise TypeError(message(op, f"the {name} must have a method {missing[0]}()", given=type(part).__name__))
    return part.state_dict()


def _generators(rng: Any, op: str) -> dict[str, np.random.Generator]:
    generators = rng if isinstance(rng, Mapping) else {} if rng is None else {"rng": rng}
    wrong = [name for name, generator in generators.items() if not isinstance(generator, np.random.Generator)]
    if wrong:
        raise TypeError(message(op, "rng must be a NumPy generator or a dictionary of them", "use np.random.default_rng", wrong=wrong))
    return dict(generators)


def _queues(model: Any) -> list[Any]:
    """Return the queues that draw random numbers: the queues of the model, then the queue of the active device, without duplicates."""
    tensors = [*model.parameters(), *model.buffers()] if model is not None and hasattr(model, "parameters") else []
    found: list[Any] = []
    for queue in [*(tensor.queue for tensor in tensors), get_active_device().queue]:
        if not any(queue is known for known in found):
            found.append(queue)
    return found


def _check_fits(parts: Mapping[str, Any], generators: Mapping[str, np.random.Generator], state: Mapping[str, Any], path: Path) -> None:
    absent = [name for name in parts if name not in state]
    if absent:
        there = [name for name in state if name not in ("random", "rng", "extra")]
        raise refusal(LOAD, f"the checkpoint must contain: {', '.join(absent)}", "pass only saved objects", saved=there, file=path)
    for name in sorted(parts, key=lambda name: name != "model"):  # what is wrong with the model explains the rest
        own = _state_of(name, parts[name], LOAD)
        if name == "model":
            _check_model(own, state[name], path)
        else:
            _check_same_form(name, own, state[name], path)
    _check_random(generators, state, path)


def _check_model(own: Mapping[str, Any], given: Any, path: Path) -> None:
    if not isinstance(given, dict) or not all(isinstance(value, _HostTensor | np.ndarray) for value in given.values()):
        raise refusal(LOAD, "the model of the checkpoint must be a dictionary of tensors", file=path)
    fitting(own, given, path, LOAD)
    kinds = {name: (given[name].dtype, own[name].dtype) for name in own}
    if other := [f"{name} is {mine}, the model has {its}" for name, (mine, its) in kinds.items() if str(mine) != str(its)]:
        raise refusal(LOAD, "weights must have the dtypes of the model", dtypes=f"[{'; '.join(other[:4])}]", count=len(other), file=path)


def _check_same_form(name: str, own: Any, given: Any, path: Path) -> None:
    """Raise unless the saved state ``given`` has the type of ``own``. For an optimizer, the sizes of parameter groups must match too."""
    if type(own) is not type(given):
        kinds = {"own": type(own).__name__, "checkpoint": type(given).__name__}
        raise refusal(LOAD, f"the state of the {name} in the checkpoint must have the same type as its current state", **kinds, file=path)
    if not isinstance(own, dict) or "param_groups" not in own:
        return
    sizes = [[len(group["params"]) for group in state["param_groups"]] if _grouped(state) else None for state in (own, given)]
    if sizes[0] != sizes[1]:
        what = f"the {name} of the checkpoint must have the same parameter groups"
        raise refusal(LOAD, what, "create the optimizer as in the run that saved it", own=sizes[0], checkpoint=sizes[1], file=path)


def _grouped(state: Any) -> bool:
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(group, dict) and isinstance(group.get("params"), list | tuple) for group in groups)


def _check_random(generators: Mapping[str, np.random.Generator], state: Mapping[str, Any], path: Path) -> None:
    streams, saved = state.get("random", []), state.get("rng", {})
    valid = isinstance(streams, list) and isinstance(saved, dict) and all(isinstance(stream, dict) for stream in streams)
    numbers = [stream.get(key) for stream in streams for key in ("seed", "counter")] if valid else []
    if not valid or not all(type(number) is int and 0 <= number < 2**64 for number in numbers):
        raise refusal(LOAD, "in the checkpoint, random must be a list of random stream states, and rng a dictionary", file=path)
    for name, generator in generators.items():
        kind = saved[name].get("bit_generator") if isinstance(saved.get(name), dict) else None
        own = generator.bit_generator.state["bit_generator"]
        if kind != own:
            what = f"the checkpoint must have a state of the same type for generator {name!r}"
            raise refusal(LOAD, what, own=own, checkpoint=kind, file=path)
        with refusing(LOAD, path, (ValueError, *_NO_STATE)):
            type(generator.bit_generator)().state = saved[name]


def _restore_parts(parts: Mapping[str, Any], state: Mapping[str, Any], path: Path) -> None:
    """Load the state of each part, the model last. If a part raises, restore the old state of every part except the model."""
    with ExitStack() as undo:
        for name, part in parts.items():
            if name != "model":  # which comes last and, having been checked, only ever fails with its device
                state_before = tree.pack(part.state_dict(), op=LOAD)
                undo.callback(lambda part, before: part.load_state_dict(tree.unpack(*before, LOAD)), part, state_before)
            with refusing(LOAD, path, _NO_STATE):
                part.load_state_dict(_on_device(state[name], getattr(part, "queue", None)))
        undo.pop_all()
