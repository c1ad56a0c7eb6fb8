"""``torch.save``, ``torch.load`` and ``torch.serialization``, without Python's pickle module.

State dicts and nested tensors or plain values become files that PyTorch reads. A whole module becomes a file of ``netcl.save``: its
class name, constructor arguments and weights; loading it requires its classes, see :func:`load`.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from netcl.accelerator import is_available
from netcl.core import env
from netcl.core.errors import message
from netcl.core.nested import tensors_in
from netcl.io.model import save_model
from netcl.io.state import load as load_file
from netcl.io.torch_format import save_torch
from netcl.nn import factory
from netcl.nn.module import Module

_DEVICE_MARK = b"netcl: cuda"
_allowed: list[Any] = []


@contextmanager
def _registered(classes: Iterable[Any]) -> Iterator[None]:
    """Register module classes inside the block, so that such modules can be saved and loaded."""
    before = set(factory.registered())
    known = {factory.constructor_of(name) for name in before}
    made = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, Module) and cls not in known]
    for cls in dict.fromkeys(made):
        factory.register_layer(f"{cls.__module__}:{cls.__qualname__}", cls)
    try:
        yield
    finally:
        for name in set(factory.registered()) - before:
            factory.unregister_layer(name)


def save(obj: Any, f: Any, *unused: Any, **options: Any) -> None:
    """``torch.save`` to a path or a file. If all tensors are on an OpenCL device, :func:`load` puts them on "cuda" by default."""
    if not isinstance(f, str | os.PathLike):
        with tempfile.TemporaryDirectory() as folder:
            save(obj, path := Path(folder, "state.pt"))
            f.write(path.read_bytes())
        return
    tensors = tensors_in(obj.state_dict() if isinstance(obj, Module) else obj)
    marked = {x.backend for x in tensors} == {"cl"}
    target = Path(f).with_name(f".writing-{secrets.token_hex(8)}") if marked else f
    try:
        if isinstance(obj, Module):
            with _registered(type(part) for part in obj.modules()):
                save_model(obj, target)
        else:
            save_torch(obj, target)
        if marked:
            with zipfile.ZipFile(target, "a") as archive:
                archive.comment = _DEVICE_MARK
            os.replace(target, f)
    finally:
        if marked:
            Path(target).unlink(missing_ok=True)


def _saved_on(f: str | os.PathLike[str]) -> str:
    """Return the device for ``map_location=None``: "cuda" if all tensors were on an OpenCL device and there is one, else "cpu"."""
    if not zipfile.is_zipfile(f) or not is_available():
        return "cpu"
    with zipfile.ZipFile(f) as archive:
        return "cuda" if archive.comment == _DEVICE_MARK else "cpu"


def load(f: Any, map_location: Any = None, pickle_module: Any = None, *, weights_only: bool | None = None, **options: Any) -> Any:
    """``torch.load`` of a path or a file. Tensors go to ``map_location``; by default to "cuda" if all were saved on it, else to "cpu".

    To load a whole module, list its unregistered classes in :func:`safe_globals`, or pass ``weights_only=False`` to find imported ones.
    """
    if not isinstance(f, str | os.PathLike):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state.pt")
            path.write_bytes(f.read())
            return load(path, map_location, weights_only=weights_only)
    imported = [v for m in list(sys.modules.values()) for v in list(vars(m).values())] if weights_only is False else []
    with _registered([*_allowed, *(v for v in imported if isinstance(v, type) and issubclass(v, Module))]):
        try:
            return load_file(f, map_location=_saved_on(f) if map_location is None else map_location)
        except ValueError as error:
            if not isinstance(error.__cause__, factory.UnknownLayerError):
                raise
            remedy = "name its classes: torch.serialization.safe_globals([Net]), or pass weights_only=False"
            raise ValueError(message("torch.load", "the file holds a whole module of an unknown class", remedy, reason=error)) from error


@contextmanager
def safe_globals(classes: Iterable[Any]) -> Iterator[None]:
    """Allow ``torch.load`` to make modules of these classes inside the block."""
    before = list(_allowed)
    _allowed.extend(classes)
    try:
        yield
    finally:
        _allowed[:] = before


def hub_folder() -> str:
    """Return torch's folder of downloaded files, ``~/.cache/torch/hub``; ``TORCH_HOME`` moves it."""
    return str(Path(env.raw("TORCH_HOME") or Path.home() / ".cache" / "torch") / "hub")


def load_from_hub(
    url: str, model_dir: Any = None, map_location: Any = None, progress: bool = True, check_hash: bool = False,
    file_name: str | None = None, weights_only: bool = False,
) -> Any:  # fmt: skip
    """``torch.hub.load_state_dict_from_url`` of a file that is already in ``model_dir``: nothing is downloaded."""
    path = Path(model_dir or Path(hub_folder(), "checkpoints"), file_name or Path(urlparse(url).path).name)
    if not path.is_file():
        raise FileNotFoundError(message("torch.hub", "the file must be there: netcl downloads nothing", f"download {url}", path=path))
    return load(path, map_location)


SERIALIZATION: dict[str, Any] = {
    "save": save, "load": load, "safe_globals": safe_globals, "add_safe_globals": _allowed.extend, "clear_safe_globals": _allowed.clear,
    "get_safe_globals": lambda: list(_allowed),
}  # fmt: skip


def download_url_to_file(url: str, dst: str, hash_prefix: str | None = None, progress: bool = True) -> None:
    """``torch.hub.download_url_to_file``: raises, because nothing is downloaded."""
    raise OSError(message("torch.hub", "a file must be there: netcl downloads nothing", f"download {url}", path=dst))


HUB: dict[str, Any] = {
    "get_dir": hub_folder, "load_state_dict_from_url": load_from_hub, "download_url_to_file": download_url_to_file,
    "urlparse": urlparse, "HASH_REGEX": re.compile(r"-([a-f0-9]*)\."),
}  # fmt: skip
