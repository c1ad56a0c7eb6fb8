"""``torch.device``, ``torch.cuda``, ``torch.accelerator``: CUDA devices are the OpenCL devices, best first."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from netcl.accelerator import is_available, synchronize
from netcl.core import device as core
from netcl.core import memory
from netcl.core.device import DeviceHandle, manager
from netcl.core.errors import DeviceError, OutOfMemoryError, message
from netcl.core.tensor import Tensor
from netcl.ops import random
from netcl.ops.random import manual_seed
from netcl.torch import adapters

_current = [0]


def _indices() -> list[str]:
    """Return selectors of the devices that "cuda" may select: the default device, then others by score. Empty if the default is NumPy."""
    best = core.require("auto")
    usable = sorted((f for f in manager.found() if core.score(f.profile)[0] >= 0), key=lambda f: core.score(f.profile), reverse=True)
    others = [f.index for f in usable if f.device != best.device]
    return [f.index for f in manager.found() if f.device == best.device] + others if best.backend == "cl" else []


def cuda_handle(selector: str | int) -> DeviceHandle | None:
    """Return the handle of ``"cuda"``, ``"cuda:1"``, ``"gpu"`` or a number; ``None`` for other selectors. Raises without such a device."""
    found = re.fullmatch(r"(?:cuda|gpu)(?::(\d+))?|(\d+)", str(selector))
    if found is None:
        return None
    number, there = int(found[1] or found[2] or _current[0]), _indices()
    if number >= len(there):
        what, remedy = "no such OpenCL device", 'use a number below torch.cuda.device_count(), or "cpu"; `netcl doctor` says what is wrong'
        raise DeviceError(message("netcl.torch", what, remedy, selector=repr(selector), devices=len(there)))
    return manager.default(there[number])


class device(core.device):
    """``torch.device``: ``"cpu"`` the NumPy backend, ``"cuda"`` and ``"cuda:1"`` OpenCL devices; an absent one raises at use."""

    _absent = ""

    def __init__(self, type: Any = "cpu", index: int | None = None):
        name = f"{type}:{index}" if index is not None and type != "cpu" else type
        numbered = re.fullmatch(r"cuda(?::(\d+))?", str(name))
        self._index = int(numbered[1]) if numbered and numbered[1] else type if isinstance(type, int) else None
        try:
            super().__init__("cpu" if re.fullmatch(r"cpu(:\d+)?", str(name)) else name)
        except DeviceError:
            if not numbered:
                raise
            self._absent = numbered[0]

    def __getattr__(self, name: str) -> DeviceHandle:
        if name != "handle":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return core.require(self._absent)

    def __eq__(self, other: object) -> bool:
        if self._absent or getattr(other, "_absent", ""):
            return isinstance(other, core.device | DeviceHandle) and str(self) == str(other)
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._absent) if self._absent else super().__hash__()

    @property
    def type(self) -> str:
        """``"cuda"`` for OpenCL devices, else ``"cpu"``."""
        return "cuda" if self._absent or self.handle.backend == "cl" else "cpu"

    @property
    def index(self) -> int | None:
        """The number that the device was created with, or ``None``."""
        return self._index

    def __str__(self) -> str:
        return self.type if self._index is None else f"{self.type}:{self._index}"

    def __repr__(self) -> str:
        return f"device(type={self.type!r}{'' if self._index is None else f', index={self._index}'})"


def _device_text(handle: Any) -> str:
    return f"cuda:{_cuda_number(handle)}" if handle.backend == "cl" else "cpu"


def _cuda_number(handle: Any) -> int | None:
    """Return the number of an OpenCL device among those that "cuda" may select; ``None`` for other devices."""
    there = [core.require(index).device for index in _indices()] if handle.backend == "cl" else []
    return there.index(handle.device) if handle.device in there else None


#: What ``x.device`` and ``x.is_cuda`` say to a script, by class; :func:`install_devices` sets it.
_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (DeviceHandle, "type", property(lambda handle: "cuda" if handle.backend == "cl" else "cpu")),
    (DeviceHandle, "index", property(_cuda_number)),
    (DeviceHandle, "__str__", _device_text),
    (DeviceHandle, "__repr__", lambda handle: f"device({_device_text(handle)!r})"),
    (Tensor, "is_cuda", property(lambda x: x.backend == "cl")),
    (Tensor, "type", adapters.tensor_type),
)
_default_before: list[Any] = []


def install_devices() -> None:
    """Make "cuda" select OpenCL devices, and make tensors report their device under torch's names."""
    manager.name_devices(cuda_handle)
    _default_before[:] = [vars(owner).get(name) for owner, name, _ in _ANSWERS]
    for owner, name, answer in _ANSWERS:
        setattr(owner, name, answer)


def uninstall_devices() -> None:
    """Undo :func:`install_devices`."""
    manager.name_devices()
    for (owner, name, _), value in zip(_ANSWERS, _default_before, strict=True):
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def device_count() -> int:
    """Return the number of OpenCL devices that "cuda" may select; 0 if the default device is the NumPy backend."""
    return len(_indices())


def _handle(which: Any) -> DeviceHandle:
    return core.require("cuda" if which is None else which)


def _properties(which: Any = None) -> Any:
    profile = _handle(which).profile
    return SimpleNamespace(name=profile.name, total_memory=profile.global_mem_size, multi_processor_count=profile.max_compute_units)


def _set_device(which: Any) -> None:
    """Make "cuda" select the device with this number."""
    number = getattr(which, "index", which)
    _current[0] = int(str(number).rpartition(":")[2]) if number is not None else 0
    manager.name_devices(cuda_handle)  # forgets what "cuda" meant


def _capability(which: Any = None) -> tuple[int, int]:
    """``torch.cuda.get_device_capability``: NVIDIA's compute capability; other devices have none and raise."""
    found = _handle(which).profile.compute_capability
    if found is None:
        what, remedy = "only NVIDIA devices have a compute capability", "test torch.cuda.is_bf16_supported() instead"
        raise DeviceError(message("torch.cuda", what, remedy, device=_handle(which).device_name))
    return found


class Event:
    """``torch.cuda.Event``: :meth:`record` waits for the device and notes the time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        synchronize()
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between the two records."""
        return (end_event._seconds - self._seconds) * 1000

    def synchronize(self) -> None:
        """Do nothing: what was recorded has finished."""

    def query(self) -> bool:
        return True


def rng_state(device: Any = None) -> Tensor:
    """``torch.get_rng_state``: the position of the random numbers as a tensor of bytes, which can be saved."""
    host = random.host_rng.bit_generator.state["state"]
    words = [host[name] >> shift & 2**64 - 1 for name in ("state", "inc") for shift in (0, 64)]
    values = np.array([*random.get_state().as_dict().values(), *words], np.uint64)
    return Tensor.from_host(core.require("cpu").queue, values.view(np.uint8))


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    """``torch.set_rng_state``: continue from a result of :func:`rng_state`."""
    seed, counter, *words = map(int, new_state.to_host().view(np.uint64))
    random.set_state({"seed": seed, "counter": counter})
    if words:  # which states of earlier versions do not have
        state, inc = words[0] + (words[1] << 64), words[2] + (words[3] << 64)
        random.host_rng.bit_generator.state = {**random.host_rng.bit_generator.state, "state": {"state": state, "inc": inc}}


def _memory(name: str) -> Any:
    return lambda device=None: memory.memory_stats()[name]


MEMORY_FIGURES: dict[str, Any] = {
    "memory_allocated": _memory("bytes_in_use"), "max_memory_allocated": _memory("peak_bytes_in_use"),
    "memory_reserved": _memory("bytes_allocated"), "max_memory_reserved": _memory("peak_bytes_allocated"),
    "empty_cache": memory.empty_cache, **dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated"), lambda device=None: memory.reset_peak_memory_stats()),
}  # fmt: skip
CUDA: dict[str, Any] = {
    **MEMORY_FIGURES, "Event": Event, "get_device_capability": _capability, "init": lambda: None, "is_initialized": is_available,
    "get_rng_state": rng_state, "set_rng_state": set_rng_state, "get_rng_state_all": lambda: [rng_state()],
    "set_rng_state_all": lambda states: set_rng_state(states[0]),
    "is_available": is_available, "device_count": device_count, "current_device": lambda: _current[0], "set_device": _set_device,
    "get_device_name": lambda device=None: _handle(device).device_name, "get_device_properties": _properties,
    "synchronize": synchronize, "manual_seed": manual_seed, "manual_seed_all": manual_seed, "is_bf16_supported": is_available,
    "OutOfMemoryError": OutOfMemoryError,
    "memory_summary": lambda device=None, abbreviated=False: memory.memory_summary(), "device": device,
}  # fmt: skip
ACCELERATOR: dict[str, Any] = {
    **MEMORY_FIGURES,
    "is_available": is_available, "device_count": device_count, "synchronize": synchronize,
    "current_accelerator": lambda check_available=False: device("cuda") if is_available() else None,
    "current_device_index": CUDA["current_device"], "set_device_index": _set_device,
}  # fmt: skip
