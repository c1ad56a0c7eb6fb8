"""NPZ and safetensors files of arrays, and ``netcl.save`` / ``netcl.load``, which also handle ``.netcl`` and torch's files."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.io import archive, tree
from netcl.io.archive import META, refusal, refusing
from netcl.io.model import load_model, save_model
from netcl.io.packages import optional_module
from netcl.io.torch_format import load_torch, save_torch
from netcl.nn.parameter import queue_for

_DIGEST_KEY = "netcl.sha256"


def host_state(value: Any, op: str) -> dict[str, np.ndarray]:
    """Return the state of a module, or a dictionary of arrays and tensors, as arrays; bfloat16 arrays have the dtype of ``ml_dtypes``."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if not isinstance(state, Mapping):
        raise refusal(op, "the value must be a module or a dictionary of arrays", given=type(value).__name__)
    found: dict[str, np.ndarray] = {}
    for name, item in state.items():
        if isinstance(item, Tensor):
            found[name] = tree.from_bits(tree.host_bits(item), item.dtype)
        elif isinstance(item, np.ndarray | np.generic | int | float | list):
            found[name] = np.asarray(item)
        else:
            what = f"every item must be an array, got a {type(item).__name__}"
            raise refusal(op, what, "save nested states with netcl.save as .netcl or .pt", name=repr(name))
    return found


def save_params(params: Any, path: str | os.PathLike[str]) -> None:
    """Write a dictionary of arrays or tensors, or a module's state, to exactly ``path`` as an NPZ file, which ``np.load`` opens."""
    arrays = host_state(params, "save_params")
    stored = {name: tree.bits(array) for name, array in arrays.items()}
    wide = {name: dtype for name, (_, dtype) in stored.items() if dtype == "bfloat16"}
    if META in stored:
        raise refusal("save_params", "an array must not have a reserved name", "rename it", name=META)
    meta = {META: np.array(json.dumps({"version": archive.VERSION, "kind": "params", "dtypes": wide}))} if wide else {}
    archive.write_arrays(path, {**meta, **{name: array for name, (array, _) in stored.items()}}, "save_params")


def load_params(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of an NPZ or ``.netcl`` file; the checksums of a ``.netcl`` file are not verified."""
    arrays = archive.read_arrays(path, "load_params", max_bytes)
    wide = archive.parse_meta(arrays.pop(META), path, "load_params").get("dtypes", {}) if META in arrays else {}
    names = [name for name, dtype in wide.items() if dtype == "bfloat16"] if isinstance(wide, dict) else [""]
    if any(name not in arrays or arrays[name].dtype != np.uint16 for name in names):
        raise refusal("load_params", f"every bfloat16 array that {META} names must be in the file, as uint16", file=path)
    return {name: tree.from_bits(array, wide.get(name, "")) for name, array in arrays.items()}


def safetensors_library() -> Any:
    """Return the package safetensors; raises ``ImportError`` with the install command if it is missing."""
    optional_module("safetensors.numpy", "safetensors", remedy="pip install safetensors ml_dtypes")
    return importlib.import_module("safetensors")


def refusing_safetensors(path: str | os.PathLike[str], op: str) -> AbstractContextManager[None]:
    """Convert errors of safetensors over damaged files to a :class:`FileError` that names the file."""
    # AttributeError: of a dtype that NumPy lacks.
    return refusing(op, path, (safetensors_library().SafetensorError, AttributeError, ValueError, OSError))


def save_safetensors(params: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write a dictionary of arrays or tensors (or a module's state) as a safetensors file, with a checksum in its metadata."""
    library = safetensors_library()
    state = host_state(params, "save_safetensors")
    # The library takes the address of an array and ignores its strides.
    arrays = {name: np.array(array, array.dtype.newbyteorder("="), order="C") for name, array in state.items()}
    for name, array in arrays.items():
        if (array.dtype.kind not in "biuf" and array.dtype.name not in ("complex64", "bfloat16")) or array.dtype.itemsize > 8:
            what = f"the dtype must exist in safetensors, got {array.dtype}"
            raise refusal("save_safetensors", what, "convert the array", name=repr(name))
    notes = {"format": "pt", **(metadata or {}), _DIGEST_KEY: _content_digest(arrays)}
    with archive.replacing(path) as file:
        file.write(library.numpy.save(arrays, metadata=notes))


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file; bfloat16 needs ``ml_dtypes``."""
    library, found = safetensors_library(), {}
    # Says what is wrong: the library takes a file that it may not read for one that is not there.
    with open(archive.regular_file(path, "load_safetensors"), "rb"):
        pass
    with refusing_safetensors(path, "load_safetensors"), library.safe_open(path, framework="np") as file:
        notes = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if file.get_slice(name).get_dtype() == "BF16":
                tree.bfloat16()
            found[name] = np.array(file.get_tensor(name))
    if _DIGEST_KEY in notes and notes[_DIGEST_KEY] != _content_digest(found):
        raise refusal("load_safetensors", "the arrays must match their checksum", "the file was damaged or changed", file=path)
    return found


def _content_digest(arrays: Mapping[str, np.ndarray]) -> str:
    sums = [[name, archive.checksum(tree.bits(array)[0])] for name, array in sorted(arrays.items())]
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


_SAVERS: dict[str, Callable[[Any, Any], Any]] = {
    ".npz": save_params, ".safetensors": save_safetensors, ".pt": save_torch, ".pth": save_torch, ".bin": save_torch,
}  # fmt: skip


def save(value: Any, path: Any) -> None:
    """Write a module, a state dict or any nesting of plain values, arrays and tensors, in the format that the suffix names.

    ``.netcl`` keeps a module with its architecture, or nested values. ``.pt``, ``.pth`` and ``.bin`` keep a state dict or nested values.
    ``.npz`` and ``.safetensors`` keep one dictionary of arrays. If ``path`` is an open file, torch's format is written.
    """
    if hasattr(path, "write"):
        with tempfile.TemporaryDirectory() as folder:
            save(value, name := Path(folder, "state.pt"))
            path.write(name.read_bytes())
        return
    suffix = Path(path).suffix.lower()
    if suffix in _SAVERS:
        _SAVERS[suffix](value, path)
    elif suffix != ".netcl":
        raise refusal("save", "the suffix must name a known format", f"known: .netcl, {', '.join(_SAVERS)}", file=path)
    elif hasattr(value, "state_dict"):
        save_model(value, path)
    else:
        state, arrays = tree.pack(value, op="save")
        archive.write(path, {"kind": "state", "state": state}, arrays, "save")


def load(path: Any, device: Any = None, *, map_location: Any = None, weights_only: bool = True, max_bytes: int | None = None) -> Any:
    """Load a file that :func:`save`, torch, safetensors or NumPy wrote; its format is recognized by its content.

    A saved model becomes a module. Tensors are created on ``device``, by default the active one; so are arrays, unless the file is a
    ``.netcl`` file. ``load_params``, ``load_safetensors`` and ``load_torch`` return NumPy arrays instead. ``map_location`` is torch's
    name for ``device``. ``weights_only`` is ignored: nothing is ever unpickled.
    """
    if hasattr(path, "read"):
        with tempfile.TemporaryDirectory() as folder:
            name = Path(folder, "state.pt")
            name.write_bytes(path.read())
            return load(name, device, map_location=map_location, max_bytes=max_bytes)
    place = next(iter(map_location.values())) if isinstance(map_location, Mapping) else map_location
    device = ("cpu" if callable(place) else place) if device is None else device
    queue = queue_for(device)
    with open(archive.regular_file(path, "load"), "rb") as file:
        head = file.read(9)
    if head[:2] == b"PK":
        with archive.Entries(path, "load", max_bytes) as entries:
            names = set(entries.infos)
        if f"{META}.npy" in names:
            return _load_netcl(path, device, queue, max_bytes)
        if all(name.endswith(".npy") for name in names):
            return _tensors(load_params(path, max_bytes=max_bytes), queue)
    if head[:2] in (b"PK", b"\x80\x02"):
        return load_torch(path, max_bytes=max_bytes, convert=lambda array: Tensor.from_host(queue, array, _dtype(array)))
    if head[8:9] == b"{":
        return _tensors(load_safetensors(path), queue)
    raise refusal("load", "the file must be from netcl, torch, safetensors or NumPy (.npz)", "import_onnx opens ONNX models", file=path)


def _tensors(arrays: Mapping[str, np.ndarray], queue: Any) -> dict[str, Tensor]:
    return {name: Tensor.from_host(queue, array, _dtype(array)) for name, array in arrays.items()}


def _dtype(array: np.ndarray) -> str | None:
    return "float64" if array.dtype == np.float64 else None


def _load_netcl(path: str | os.PathLike[str], device: Any, queue: Any, max_bytes: int | None) -> Any:
    kind = archive.read_meta(path, "load", max_bytes)["kind"]
    if kind == "params":
        return _tensors(load_params(path, max_bytes=max_bytes), queue)
    if kind == "model":
        return load_model(path, device, max_bytes=max_bytes)
    meta, arrays = archive.read(path, "load", "state", max_bytes)
    return tree.unpack(meta.get("state"), arrays, "load", lambda stored, dtype: tree.tensor_of(stored, dtype, queue))
