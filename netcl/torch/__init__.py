"""Run PyTorch scripts on OpenCL devices: with ``python -m netcl.torch script.py arguments``, ``import torch`` imports netcl.

Importing this package changes nothing. :func:`install` puts modules named ``torch`` and ``torchvision`` into ``sys.modules``,
:func:`uninstall` removes them, :func:`run` does both around a script. ``"cuda"`` is the best OpenCL device (``NETCL_DEVICE`` chooses
another), ``"cpu"`` the NumPy backend; tensors that name no device are on the CPU unless ``device`` is given.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netcl.core.device import chosen_device, set_active_device
from netcl.core.errors import message
from netcl.torch import devices
from netcl.torch.names import MissingNameError, modules, nearest
from netcl.torch.scan import is_guarded, missing
from netcl.utils.data import DataLoader

__all__ = ["MissingNameError", "install", "missing", "run", "uninstall"]

#: Holds ``torch.py`` and ``torchvision.py``, which install the modules in worker processes: those inherit ``sys.path``.
_WORKERS = str(Path(__file__).with_name("workers"))
_before: list[Any] = []  # the device that uninstall() restores


def install(device: Any = "cpu") -> None:
    """Make ``import torch`` and ``import torchvision`` import netcl until :func:`uninstall`.

    ``device`` is the device of tensors that are created without one. Raises ``RuntimeError`` if PyTorch itself is already imported.
    """
    if _before:
        return
    ours = modules()
    foreign = next((name for name in ours if name in sys.modules), None)
    if foreign is not None:
        what, remedy = f"{foreign} must not be imported yet", "install before anything imports it: python -m netcl.torch script.py"
        raise RuntimeError(message("netcl.torch", what, remedy, file=getattr(sys.modules[foreign], "__file__", None)))
    _before.append(chosen_device())
    devices.install_devices()
    set_active_device(device)
    sys.modules.update(ours)
    sys.path.insert(0, _WORKERS)


def uninstall() -> None:
    """Undo :func:`install`: ``import torch`` finds PyTorch again, if it is installed, and ``"cuda"`` has its earlier meaning."""
    if not _before:
        return
    for name, module in modules().items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    if _WORKERS in sys.path:
        sys.path.remove(_WORKERS)
    devices.uninstall_devices()
    set_active_device(_before.pop())


def run(path: str | os.PathLike[str], argv: Sequence[str] = (), device: Any = "cpu") -> dict[str, Any]:
    """Run a PyTorch script as ``__main__`` with the arguments ``argv``; returns its globals.

    A name that netcl lacks raises :class:`MissingNameError`, whose text also lists the other missing names of the script.
    """
    absent = missing(path)
    before = sys.argv, sys.path[:]
    DataLoader.processes = is_guarded(path)
    sys.argv, sys.path[:] = [os.fspath(path), *argv], [str(Path(path).resolve().parent), *sys.path]
    install(device)
    try:
        return runpy.run_path(os.fspath(path), run_name="__main__")
    except MissingNameError as error:
        raise _explained(error.full_name, absent) from error
    except ImportError as error:  # "cannot import name 'x' from 'torch.y'", or "No module named 'torch.z'"
        if str(error.name).split(".")[0] not in ("torch", "torchvision"):
            raise
        name = re.sub(r"cannot import name '(\w+)' from '([\w.]+)'.*|No module named '(.*)'", r"\2.\1\3", str(error)).strip(".")
        raise _explained(name, absent) from error
    finally:
        uninstall()
        sys.argv, sys.path[:] = before
        DataLoader.processes = True


def _explained(name: str, absent: dict[str, str]) -> MissingNameError:
    same = [n for n in absent if n == name or n.startswith(f"{name}.")][:1]
    found = {"at": absent[same[0]]} if same else {}
    others = [f"{other} ({place})" for other, place in absent.items() if other not in same]
    remedy = f"the script also needs {', '.join(others)}" if others else ""
    return MissingNameError(message("netcl.torch", f"netcl has no {same[0] if same else name}{nearest(name)}", remedy, **found), name)
