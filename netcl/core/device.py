"""Devices: discovery, ranking, their contexts and queues, and the active device of a thread.

>>> from netcl.core.device import device
>>> with device("cpu") as dev:
...     dev.backend
'cpu'
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netcl.core import capabilities, env, platforms
from netcl.core.device_profile import DeviceProfile
from netcl.core.errors import DeviceError, EnvironmentVariableError, KernelBuildError, message
from netcl.core.hooks import hooks
from netcl.core.queue_state import QueueState, queue_state, queues

log = logging.getLogger("netcl")

SELECTORS = "auto, gpu, cpu (NumPy), cl, cl:cpu, cl:gpu, gpu:1, 0:1 (platform:device), part of a name, or a callable on the profile"

# "auto" takes the device of the highest rank; within a rank, the one with more compute units times clock.
RANKS: tuple[tuple[str, int, Callable[[DeviceProfile], bool]], ...] = (
    ("simulator", -1, lambda p: p.is_simulator),
    ("software GPU", -1, lambda p: p.family == "software-gpu"),
    ("discrete GPU", 60, lambda p: p.device_type == "gpu" and not p.is_integrated),
    ("integrated GPU", 50, lambda p: p.device_type == "gpu"),
    ("Intel's CPU runtime", 40, lambda p: p.family == "intel-cpu"),
    ("PoCL", 30, lambda p: p.family == "pocl-cpu"),
    ("CPU", 20, lambda p: p.device_type == "cpu"),
    ("accelerator", 10, lambda p: p.device_type == "accel"),
    ("other", 0, lambda p: True),
)

HALF_PROBE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
__kernel void half_probe(__global const float* x, __global float* out, int n) {
    int i = get_global_id(0);
    if (i >= n) return;
    half a = (half)x[2 * i], b = (half)x[2 * i + 1];
    out[3 * i] = (float)(a + b);
    out[3 * i + 1] = (float)(a * b);
    out[3 * i + 2] = (float)(a / b);
}
"""


class CPUQueue:
    """Replaces a command queue on the NumPy backend, where work is done when a call returns."""

    backend = "cpu"
    context = None
    device = None

    def __init__(self, name: str = "cpu"):
        self.name = name
        self.netcl = QueueState(self)

    def finish(self) -> None:
        """Do nothing: NumPy calls are complete when they return."""

    flush = finish

    def __repr__(self) -> str:
        return f"CPUQueue({self.name!r})"


@dataclass(frozen=True)
class DeviceHandle:
    """A device with its context and queue. Immutable; ``context, queue = handle`` unpacks."""

    platform_name: str
    device_name: str
    backend: str  # "cl" or "cpu"
    device_type: str  # "gpu" | "cpu" | "accel" | "other"
    context: Any  # cl.Context, None on the NumPy backend
    queue: Any  # cl.CommandQueue or CPUQueue

    def __iter__(self) -> Iterator[Any]:
        yield self.context
        yield self.queue

    @property
    def type(self) -> str:
        """torch's name for ``device_type``."""
        return self.device_type

    @property
    def device(self) -> Any:
        """The ``cl.Device``; ``None`` on the NumPy backend."""
        return self.queue.device

    @property
    def platform(self) -> Any:
        """The ``cl.Platform``; ``None`` on the NumPy backend."""
        return None if self.device is None else self.device.platform

    @property
    def profile(self) -> DeviceProfile:
        """The properties and limits of the device."""
        return manager.profile(self.device)


@dataclass(frozen=True)
class Found:
    """A device reported by the driver, with its platform and device numbers."""

    platform_index: int
    device_index: int
    platform: Any
    device: Any
    profile: DeviceProfile

    @property
    def index(self) -> str:
        return f"{self.platform_index}:{self.device_index}"

    @property
    def words(self) -> str:
        """The text in which a selector's name is searched: ``pocl`` finds "Portable Computing Language"."""
        p = self.profile
        return f"{p.platform}\n{p.name}\n{p.vendor}\n{p.brand}\n{p.family}".lower()


def score(profile: DeviceProfile) -> tuple[int, float]:
    """Return rank and estimated speed, by which devices are compared. ``auto`` never selects a device with a negative rank."""
    if not profile.available:
        return -2, 0.0
    rank = next(rank for _, rank, matches in RANKS if matches(profile))
    return rank, float(profile.max_compute_units * max(1, profile.max_clock_mhz))


class DeviceManager:
    """Finds devices and returns their handles; all names of a physical device give the same handle, with one context and queue.

    >>> DeviceManager().default("cpu").device_name
    'NumPy'
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: list[Found] | None = None
        self._chosen: dict[Any, DeviceHandle | None] = {}
        self._by_device: dict[Any, DeviceHandle] = {}
        self._foreign: weakref.WeakValueDictionary[int, DeviceHandle] = weakref.WeakValueDictionary()
        self._profiles: dict[Any, DeviceProfile] = {}
        self._half: dict[Any, bool] = {}
        self._warned_no_gpu = False
        self._named: Callable[[str | int], DeviceHandle | None] = lambda selector: None
        self._numpy = DeviceHandle("NumPy", "NumPy", "cpu", "cpu", None, CPUQueue())

    def discover(self) -> list[tuple[Any, Any]]:
        """List platform and device of each device that the environment does not filter out; empty without pyopencl."""
        return [(found.platform, found.device) for found in self.found()]

    @property
    def devices(self) -> list[Any]:
        """Every ``cl.Device`` that :meth:`discover` finds."""
        return [found.device for found in self.found()]

    def found(self) -> list[Found]:
        """List the devices that the environment does not filter out, with their numbers and profiles."""
        with self._lock:
            if self._found is None:
                platforms.check_process()
                self._found = self._visible(self._everything())
            return list(self._found)

    def profile(self, dev: Any) -> DeviceProfile:
        """Return the profile of a ``cl.Device``, read once; ``None`` gives the profile of the NumPy backend."""
        try:
            return self._profiles[dev]
        except KeyError:
            facts = capabilities.numpy_profile() if dev is None else capabilities.device_profile(dev)
            return self._profiles.setdefault(dev, replace(facts, half_probe=self.half_arithmetic))

    def default(self, device: Any = "auto", strict: bool = False) -> DeviceHandle | None:
        """Return a device's handle; ``None`` if there is no such device. ``"auto"`` raises if ``NETCL_DEVICE`` names an unknown device.

        - ``"auto"``: ``NETCL_DEVICE`` if set, else the best OpenCL device, else NumPy.
        - ``"gpu"``: the best GPU. Without a GPU, the best OpenCL device and, once, a warning; with ``strict``, ``None``.
        - ``"cpu"`` (NumPy), ``"cl"`` (the best OpenCL device), ``"cl:cpu"``, ``"gpu:1"``, ``"0:1"`` (platform:device), or a number.
        - Part of a name, a callable that takes the profile, a ``cl.Device``, a queue, a tensor or a handle.
        """
        if isinstance(device, DeviceHandle):
            return device
        if isinstance(device, str):
            device = device.strip().lower() or "auto"
        elif not isinstance(device, int):
            return self._resolve_object(device)
        if platforms.forked_child and device != "cpu":
            platforms.check_process()
        preferred = env.raw("NETCL_DEVICE") if device == "auto" else None
        try:
            return self._chosen[device, strict, preferred]
        except KeyError:
            with self._lock:
                chosen = self._preferred(strict) if preferred else self._named(device) or self._resolve(device, strict)
                return self._chosen.setdefault((device, strict, preferred), chosen)

    def name_devices(self, function: Callable[[str | int], DeviceHandle | None] = lambda selector: None) -> None:
        """Set a function that resolves selectors first and returns ``None`` for unknown ones. Without an argument, remove the function."""
        with self._lock:
            self._named = function
            self._chosen.clear()

    def handle_of(self, queue: Any) -> DeviceHandle:
        """Return the handle of a queue, including queues that netcl did not create."""
        queue = queue_state(queue).queue  # the device queue behind a command list
        if isinstance(queue, CPUQueue):
            same = queue is self._numpy.queue
            return self._numpy if same else DeviceHandle("NumPy", "NumPy", "cpu", "cpu", None, queue)
        own = self._by_device.get(queue.device)
        if own is not None and own.queue == queue:
            return own
        with self._lock:
            handle = self._foreign.get(queue.int_ptr)
            if handle is None:
                handle = self._foreign[queue.int_ptr] = self._handle(queue.context, queue)
            return handle

    def partition(self, device: Any = "auto", count: int = 2) -> list[DeviceHandle]:
        """Split a device into ``count`` equal parts of its compute units; returns their handles, each with its own context and queue.

        Use it for data-parallel training on one CPU, or to leave cores to other work. CPU runtimes support this; few GPUs do.
        """
        whole = require(device, strict=True)
        cl = platforms.opencl()
        units = whole.profile.max_compute_units // count if whole.backend == "cl" and count > 0 else 0
        if not units:
            what = f"device must be an OpenCL device, and count must be from 1 to its number of compute units, got {count}"
            raise DeviceError(message("partition", what, device=whole.device_name, units=whole.profile.max_compute_units))
        try:
            parts = whole.device.create_sub_devices([cl.device_partition_property.EQUALLY, units])
        except cl.Error as error:
            what = f"the driver cannot split the device into {count} parts: {error}"
            raise DeviceError(message("partition", what, device=whole.device_name)) from error
        # Hold the context while its queue is created: queues of Intel's runtime do not keep it.
        contexts = [cl.Context([part]) for part in parts[:count]]
        return [self.handle_of(cl.CommandQueue(context)) for context in contexts]

    def describe(self) -> str:
        """Describe all devices in one line, for error messages."""
        try:
            names = [f"{found.index} {found.profile.platform} / {found.profile.name}" for found in self.found()]
        except EnvironmentVariableError as error:
            return str(error)
        return "; ".join([*names, "cpu NumPy"])

    def _everything(self) -> list[Found]:
        try:
            cl_platforms = platforms.cl_platforms()
        except ImportError as error:
            log.info("%s", error)
            return []
        found, seen = [], set()
        for p, platform in enumerate(cl_platforms):
            for d, dev in enumerate(_devices_of(platform)):
                if dev not in seen:  # a library that is registered twice reports the same devices again
                    seen.add(dev)
                    found.append(Found(p, d, platform, dev, self.profile(dev)))
        return found

    def _visible(self, found: list[Found]) -> list[Found]:
        """Return the devices that NETCL_PLATFORM_FILTER and NETCL_VISIBLE_DEVICES allow; their numbers stay those of the driver."""
        part = env.value("NETCL_PLATFORM_FILTER").lower()
        kept = [f for f in found if part in f"{f.profile.platform}\n{f.platform.vendor}\n{f.profile.brand}".lower()]
        names = env.value("NETCL_VISIBLE_DEVICES")
        if not names or names == ("none",):
            return [] if names else kept
        visible = [f for f in kept if any(_matches(name, f) for name in names)]
        for name in names:
            if not any(_matches(name, f) for f in kept):
                there = ", ".join(f"{f.index} {f.profile.platform}" for f in kept) or "none"
                what = "NETCL_VISIBLE_DEVICES must name devices that exist"
                raise EnvironmentVariableError(message("env", what, f"there are: {there}", value=repr(name)))
        return visible

    def _preferred(self, strict: bool) -> DeviceHandle:
        """Return the handle of the device that NETCL_DEVICE names; raises if it does not exist."""
        text = env.value("NETCL_DEVICE").lower() or "auto"
        handle = self._resolve(text, strict)
        if handle is None:
            raise DeviceError(message("NETCL_DEVICE", "no such device", f"there are: {self.describe()}", selector=repr(text)))
        return handle

    def _resolve(self, device: str | int, strict: bool) -> DeviceHandle | None:
        if device in ("cpu", "numpy"):
            return self._numpy
        if device == "gpu":
            return self._gpu(strict)
        best = self._handle_for(_device_named(device, self.found()))
        return self._numpy if best is None and device == "auto" else best

    def _resolve_object(self, thing: Any) -> DeviceHandle | None:
        if isinstance(thing, device):
            return thing.handle
        if hasattr(thing, "queue"):  # a Tensor
            return self.handle_of(thing.queue)
        if hasattr(thing, "finish"):
            return self.handle_of(thing)
        if hasattr(thing, "create_sub_devices"):  # a cl.Device
            return self._make(thing)
        if callable(thing):
            return self._handle_for(_highest_score([f for f in self.found() if thing(f.profile)], named=True))
        raise DeviceError(message("device", "the argument must be a device selector", f"use {SELECTORS}", selector=repr(thing)))

    def _gpu(self, strict: bool) -> DeviceHandle | None:
        found = self.found()
        gpu = _highest_score([f for f in found if f.profile.device_type == "gpu"])
        if gpu is not None or strict:
            return self._handle_for(gpu)
        handle = self._handle_for(_highest_score(found))
        if handle is not None and not self._warned_no_gpu:
            self._warned_no_gpu = True
            remedy = 'device("gpu", strict=True) raises instead, device("auto") accepts any device'
            text = message("device", "there is no GPU, using another OpenCL device", remedy, device=handle.device_name)
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return handle

    def _handle_for(self, found: Found | None) -> DeviceHandle | None:
        return None if found is None else self._make(found.device)

    def _make(self, dev: Any) -> DeviceHandle:
        """Return the handle of a physical device; the first call creates its context and in-order queue."""
        with self._lock:
            if dev not in self._by_device:
                platforms.check_process()
                cl = platforms.opencl()
                properties = cl.command_queue_properties.PROFILING_ENABLE if env.value("NETCL_PROFILE_EVENTS") else 0
                context = cl.Context([dev])
                handle = self._by_device[dev] = self._handle(context, cl.CommandQueue(context, dev, properties=properties))
                _debug(f"device: {handle.device_name} ({handle.device_type}) of {handle.platform_name}")
            return self._by_device[dev]

    def _handle(self, context: Any, queue: Any) -> DeviceHandle:
        profile = self.profile(queue.device)
        return DeviceHandle(profile.platform, profile.name, "cl", profile.device_type, context, queue)

    def half_arithmetic(self, profile: DeviceProfile) -> bool:
        """Whether half arithmetic on the device gives correct results; measured once per device."""
        if profile.device is None or (not profile.has_fp16 and self.profile(profile.device).has_quirk("lists_fp16")):
            return False
        with self._lock:
            if profile.device not in self._half:
                self._half[profile.device] = _computes_in_half(self._make(profile.device))
            return self._half[profile.device]


def _devices_of(platform: Any) -> list[Any]:
    """List the devices of a platform; an error gives an empty list, because a broken driver must not hide the others."""
    cl = platforms.opencl()
    try:
        return list(platform.get_devices())
    except cl.Error as error:
        log.info("platform %s reports no devices: %s", platform.name, error)
        return []


def _matches(selector: str, found: Found) -> bool:
    """Whether a name, a number or ``gpu``, ``cl:cpu`` ... selects this device."""
    low = selector.strip().lower()
    if re.fullmatch(r"\d+:\d+", low):
        return low == found.index
    kind = re.fullmatch(r"(?:cl:)?(gpu|cpu|accel)", low)
    return found.profile.device_type == kind[1] if kind else low in found.words


def _highest_score(found: list[Found], named: bool = False) -> Found | None:
    """Return the device with the highest score, or ``None``; simulators, software GPUs and unavailable devices count only if ``named``."""
    ranked = [(score(f.profile), -position, f) for position, f in enumerate(found)]
    fit = [row for row in ranked if named or row[0][0] >= 0]
    return max(fit, key=lambda row: row[:2])[2] if fit else None


def _device_named(selector: str | int, found: list[Found]) -> Found | None:
    """Return the device for a selector other than ``cpu`` and ``gpu``; ``None`` if there is none."""
    if isinstance(selector, int) or selector.isdecimal():
        number = int(selector)
        return found[number] if 0 <= number < len(found) else None
    if selector in ("auto", "cl"):
        return _highest_score(found)
    numbered = re.fullmatch(r"(?:cl:)?(gpu|cpu|accel):(\d+)", selector)
    if numbered:
        same = [f for f in found if f.profile.device_type == numbered[1] and score(f.profile)[0] >= 0]
        return same[int(numbered[2])] if int(numbered[2]) < len(same) else None
    kind = re.fullmatch(r"cl:(gpu|cpu|accel)|accel", selector) is not None
    return _highest_score([f for f in found if _matches(selector, f)], named=not kind)


def _debug(text: str) -> None:
    """Log a text at level INFO; with NETCL_DEBUG, it is shown even if the program has not configured logging."""
    if env.value("NETCL_DEBUG") >= 1:
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler(sys.stderr))
        if not log.isEnabledFor(logging.INFO):
            log.setLevel(logging.INFO)
    log.info("%s", text)


def _computes_in_half(handle: DeviceHandle) -> bool:
    from netcl.core.kernels import program

    values = np.array([1.5, 2.25, 1 / 3, 3.0, 1000.0, 24.0, 6.1e-5, 3.0, -0.1, 0.7, 2049.0, 1.0, 300.0, 100.0, 1e-3, 1e-2], np.float32)
    a, b = values[0::2].astype(np.float16), values[1::2].astype(np.float16)
    expected = np.stack([a + b, a * b, a / b], axis=1).astype(np.float32)
    try:
        kernel = program.get(handle.queue, HALF_PROBE, "half_probe")
    except KernelBuildError as error:
        log.debug("no half arithmetic on %s: %s", handle.device_name, error)
        return False
    computed = np.empty_like(expected)
    cl = platforms.opencl()
    allocate = cl.tools.ImmediateAllocator(handle.queue)  # two small buffers outside of the pools, released at once
    source, target = allocate(values.nbytes), allocate(expected.nbytes)
    cl.enqueue_copy(handle.queue, source, values)
    kernel(handle.queue, (len(a),), None, source, target, len(a))
    cl.enqueue_copy(handle.queue, computed, target)
    # Two units in the last place of half; a device that flushes subnormal halves to zero is still right.
    return bool(np.allclose(computed, expected, rtol=2e-3, atol=6.2e-5))


manager = DeviceManager()
handle_of = manager.handle_of


class _EnteredDevices(threading.local):
    """The ``device(...)`` blocks of the current thread, innermost last, and the device set by ``set_active_device``."""

    def __init__(self) -> None:
        self.stack: list[DeviceHandle] = []
        self.base: DeviceHandle | None = None


_active = _EnteredDevices()


class device:
    """A device, and a context manager that makes it the current thread's: ``with device("gpu") as dev``.

    Blocks nest, and the previous device is restored on exit. Raises :class:`DeviceError` if there is no such device.
    ``device.manager`` is the process-wide :class:`DeviceManager`, ``device.profile(queue)`` the profile of a queue's device.
    """

    manager = manager

    def __init__(self, selector: Any = "auto", strict: bool | int = False):
        if not isinstance(strict, bool):  # torch's device("cpu", 0)
            selector, strict = selector if selector == "cpu" else f"{selector}:{strict}", False
        self.handle = require(selector, strict)

    @property
    def type(self) -> str:
        """``"gpu"``, ``"cpu"``, ``"accel"`` or ``"other"``."""
        return self.handle.device_type

    @property
    def index(self) -> int | None:
        """Always ``None``: a handle names one device."""
        return None

    def __eq__(self, other: object) -> bool:
        return self.handle == (other.handle if isinstance(other, device) else other)

    def __hash__(self) -> int:
        return hash(self.handle)

    def __enter__(self) -> DeviceHandle:
        _active.stack.append(self.handle)
        return self.handle

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.handle)

    def __repr__(self) -> str:
        return f"device({self.handle.device_name!r} of {self.handle.platform_name!r})"

    @staticmethod
    def profile(queue: Any) -> DeviceProfile:
        """Return the profile of the device behind a queue or handle."""
        return manager.profile(queue.device)


def require(selector: Any, strict: bool = False, op: str = "device") -> DeviceHandle:
    """Return the handle of a device, as :meth:`DeviceManager.default` does; raises :class:`DeviceError` with ``op`` if there is none."""
    handle = manager.default(selector, strict)
    if handle is not None:
        return handle
    remedy = f"there are: {manager.describe()}"
    if not platforms.available():
        remedy += f"; `netcl doctor` says what is missing, {platforms.install_command()} installs a CPU runtime"
    raise DeviceError(message(op, "no such device", remedy, selector=repr(selector)))


def profile_of(queue: Any) -> DeviceProfile:
    """Return the profile of a queue's device, kept in the state of its context."""
    try:
        state = queue.netcl.context
    except AttributeError:
        state = queue_state(queue).context
    if state is None:
        return manager.profile(None)
    if state.profile is None:
        state.profile = manager.profile(state.device)
    return state.profile


def get_active_device() -> DeviceHandle:
    """Return the device of this thread: from the innermost ``device(...)`` block, else from ``set_active_device``, else the default."""
    if _active.stack:
        return _active.stack[-1]
    if _active.base is not None:
        return _active.base
    return require("auto")


def chosen_device() -> DeviceHandle | None:
    """Return the device chosen by a ``device(...)`` block or :func:`set_active_device`; ``None`` where the default is active."""
    return _active.stack[-1] if _active.stack else _active.base


def queue_of(place: Any = None) -> Any:
    """Return the queue for a queue, a handle, a ``device(...)`` or a selector; ``None`` selects the active device."""
    return place if hasattr(place, "finish") else (get_active_device() if place is None else require(place)).queue


def synchronize(device: Any = None) -> None:
    """Compute all deferred values of this thread, then wait until a device (default: every device in use) has finished.

    ``device`` is a selector, a handle, a queue or a tensor. ``queue.finish()`` waits only for launched work; a deferred value is launched
    when it is read. A deferred value without references is never computed, so keep a reference to a result that you time.
    """
    from netcl.core.kernels import program

    hooks.settle()
    for queue in queues() if device is None else [queue_of(device)]:
        with program.driver_errors("synchronize", "to complete work that was launched before"):
            queue.finish()


def set_active_device(handle: Any) -> None:
    """Set the device of this thread outside of ``device(...)`` blocks: a handle or a selector; ``None`` restores the default."""
    _active.base = None if handle is None else require(handle)
