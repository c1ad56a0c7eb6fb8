"""Models in one file: the architecture as data, and the weights.

>>> import tempfile, pathlib
>>> from netcl import nn
>>> from netcl.io import load_model, save_model
>>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
>>> with tempfile.TemporaryDirectory() as folder:
...     save_model(model, pathlib.Path(folder) / "model.netcl")
...     again = load_model(pathlib.Path(folder) / "model.netcl")
>>> again([[1.0, 2.0, 3.0, 4.0]]).tolist() == model([[1.0, 2.0, 3.0, 4.0]]).tolist()
True
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from netcl import nn
from netcl.core import dtype as dtypes
from netcl.core.errors import OutOfMemoryError
from netcl.core.tensor import Tensor
from netcl.io import archive, tree
from netcl.io.archive import names_differ, refusal
from netcl.nn.parameter import OBJECT_BYTES, placed, queue_for, stand_on
from netcl.ops import random
from netcl.replay.compiled import CompiledFunction

_NOT_BUILT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError, OutOfMemoryError)


def save_model(model: Any, path: str | os.PathLike[str], *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a model's architecture and weights to exactly ``path``; its classes must be known to ``nn.register_layer``.

    The file is an NPZ archive that ``np.load`` opens, with JSON (``type``, ``config``, ``version``) in ``__netcl_meta__``. An older file is
    replaced only once the new one is completely on disk. For a compiled model, the original module is written. ``notes`` is JSON for
    :func:`read_notes`, such as the preprocessing and the class names. To resume training, use ``save_checkpoint`` instead.
    """
    if isinstance(model, CompiledFunction):
        model = model.function
    config = nn.config_of(model)
    state = model.state_dict()
    arrays = {name: tree.host_bits(tensor) for name, tensor in state.items()}
    first: dict[int, str] = {}  # names of weights; those of a shared weight map to its first
    names = {name: first.setdefault(id(tensor), name) for name, tensor in _own_tensors(model).items()}
    meta = {
        "kind": "model",
        "type": config["type"],
        "config": tree.pack(config, op="save_model")[0],
        "dtypes": {name: tensor.dtype for name, tensor in state.items()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "tied": {name: other for name, other in names.items() if name != other},
        "training": model.training,
        "switched": [name for name, part in model.named_modules(remove_duplicate=False) if part.training != model.training],
        "notes": dict(notes or {}),
    }
    archive.write(path, meta, arrays, "save_model")


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's own tensor objects by name. ``state_dict()`` would return other objects over the same memory."""
    places = {name: name.rpartition(".") for name in model.state_dict()}
    return {name: getattr(model.get_submodule(owner), last) for name, (owner, _, last) in places.items()}


def read_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the notes in a file written by :func:`save_model`; an empty dictionary if it has none."""
    notes = archive.read_meta(path, "load_model").get("notes", {})
    if not isinstance(notes, dict):
        raise refusal("load_model", f"notes in {archive.META} must be a JSON object", given=type(notes).__name__, file=path)
    return notes


def _tie(model: Any, tied: Any, path: object) -> None:
    """Tie the weights that were tied in the saved model; ``tied`` maps names to names. Raises unless both weights have the same shape."""
    state = _own_tensors(model)
    for name, other in tied.items() if isinstance(tied, dict) else [("", "")]:
        if not isinstance(other, str) or not {name, other} <= state.keys() or state[name].shape != state[other].shape:
            what = f"tied in {archive.META} must map names to names of weights with the same shape"
            raise refusal("load_model", what, name=repr(name), other=repr(other), file=path)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, state[other])


def load_model(path: str | os.PathLike[str], device: Any = None, *, max_bytes: int | None = None) -> Any:
    """Load the model from a file written by :func:`save_model`, on the active device or on ``device`` (a selector, handle or queue)."""
    meta, arrays = archive.read(path, "load_model", "model", max_bytes)
    stored = meta.get("dtypes")
    if not isinstance(stored, dict) or not isinstance(meta.get("frozen"), list):
        raise refusal("load_model", f"{archive.META} must have an object dtypes and a list frozen", keys=sorted(meta), file=path)
    names_differ("load_model", path, "weights", stored, arrays)
    values = {name: _decoded(array, stored[name], name, path) for name, array in arrays.items()}
    # Parameters are built as float32, whatever they are stored as; the rest is for buffers that are not in the file.
    room = max_bytes if max_bytes is not None else sum(4 * array.nbytes + OBJECT_BYTES for array in arrays.values()) + (1 << 20)
    model = _built_model(meta, path, device, room)
    fitting(model.state_dict(), values, path, "load_model")
    _tie(model, meta.get("tied", {}), path)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in stored and tensor.dtype != stored[name]:
            stand_on(tensor, tensor.detach().to(stored[name]))
        if name in meta["frozen"]:
            tensor.requires_grad = False
    model.load_state_dict(values)
    model.train(bool(meta.get("training", True)))
    parts, switched = dict(model.named_modules()), meta.get("switched", [])
    if not isinstance(switched, list) or not all(isinstance(name, str) and name in parts for name in switched):
        raise refusal("load_model", f"switched in {archive.META} must be a list of names of modules", file=path)
    for name in switched:  # batch norms in evaluation mode in a model that is trained, for instance
        parts[name].training = not model.training
    return model


def _built_model(meta: Mapping[str, Any], path: object, device: Any, room: int) -> Any:
    queue = queue_for(device)
    before = random.get_state(queue)  # fresh weights are drawn and thrown away: the program's own numbers must not change
    try:
        with placed(queue, max_bytes=room):
            return nn.build(tree.unpack(meta.get("config"), {}, "load_model"))
    except _NOT_BUILT as fault:
        what = "the model of the file cannot be built"
        raise refusal("load_model", what, reason=f"{type(fault).__name__}: {fault}", file=path) from fault
    finally:
        random.set_state(before, queue)


def _decoded(array: np.ndarray, dtype: Any, name: str, path: object) -> np.ndarray:
    row = dtypes.DTYPES.get(dtype) if isinstance(dtype, str) else None
    if row is None or row.storage != array.dtype:
        raise refusal("load_model", "a weight must have the declared dtype", name=name, array=array.dtype, declared=dtype, file=path)
    return dtypes.decode(array, row)


def fitting(own: Mapping[str, Any], given: Mapping[str, np.ndarray], path: object, op: str) -> None:
    """Raise unless ``given`` has the names and shapes of ``own``, the weights of a model."""
    names_differ(op, path, f"weights of the file ({len(given)})", own, given)
    wrong = [f"{name} is {given[name].shape}, the model has {own[name].shape}" for name in own if own[name].shape != given[name].shape]
    if wrong:
        raise refusal(op, "weights must have the shapes of the model", shapes=f"[{'; '.join(wrong[:4])}]", count=len(wrong), file=path)
