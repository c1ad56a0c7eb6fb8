"""The one door to the driver: every OpenCL program is built here and every kernel is launched here.

Programs are cached per context in memory; a store for compiled binaries and observers of launches (capture,
profiling) are registered from the layers above. Kernel objects carry their arguments in the driver and are therefore
never shared between threads.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from netcl.core import env, platforms
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, ShapeError, message
from netcl.core.kernels.signature import POINTER, UNKNOWN, parameter_kinds, read_only

log = logging.getLogger("netcl")

Size = int | Sequence[int]
LaunchObserver = Callable[["Kernel", Any, tuple[int, ...], tuple[int, ...] | None, tuple[Any, ...], Any], None]


class BinaryStore(Protocol):
    """Where compiled programs survive the process; ``runtime.cache`` registers one."""

    def load(self, key: str) -> bytes | None: ...
    def save(self, key: str, binary: bytes) -> None: ...
    def reject(self, key: str, reason: str) -> None: ...


binary_store: BinaryStore | None = None
launch_observers: list[LaunchObserver] = []
launch_queue: Callable[[Any], Any] | None = None  # filled by profiling: the queue, with timestamps, that launches go to meanwhile
free_memory: Callable[[], None] | None = None  # filled by core.memory: what to do before a launch is tried again
before_write: Callable[[Any], None] | None = None  # filled by ops.fusion: told the lease or array that is about to be changed
awaited: dict[int, Any] = {}  # filled by ops.fusion: by id, the leases and arrays that before_write has something to do for
_builds = 0


def build_count() -> int:
    """How many programs this process has built from source: a test of "nothing was recompiled" compares two readings."""
    return _builds


class ContextState(dict):
    """What belongs to one context: its programs, and whatever ops cache under keys that start with their name."""

    def __init__(self, context: Any):
        super().__init__()
        self.device = context.devices[0]
        self.programs: dict[tuple[str, tuple[str, ...]], Program] = {}
        self.lock = threading.RLock()
        self.max_work_group = int(self.device.max_work_group_size)
        self.max_items = tuple(int(n) for n in self.device.max_work_item_sizes)


_states: weakref.WeakKeyDictionary[Any, ContextState] = weakref.WeakKeyDictionary()
_states_lock = threading.Lock()


def context_state(context: Any) -> ContextState:
    """The state of a context, made at first use."""
    with _states_lock:
        if context not in _states:
            _states[context] = ContextState(context)
        return _states[context]


def state(queue: Any) -> ContextState:
    """The state of a queue's context; kept on the queue because a lookup by context costs a microsecond."""
    try:
        return queue._netcl_state
    except AttributeError:
        queue._netcl_state = context_state(queue.context)
        return queue._netcl_state


def forget(key: Any) -> None:
    """Drop what every context keeps under ``key``."""
    with _states_lock:
        for of in _states.values():
            of.pop(key, None)


def get(queue: Any, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
    """The kernel ``name`` of ``source`` for a queue's context; built at most once per context."""
    return build(queue.context, source, options, state(queue)).kernel(name)


def build(context: Any, source: str, options: Sequence[str] = (), of: ContextState | None = None) -> Program:
    """The program of ``source`` for a context: from memory, from the binary store, or from the compiler."""
    platforms.check_process()
    of = of or context_state(context)
    key = (source, tuple(options))
    with of.lock:
        if key not in of.programs:
            of.programs[key] = Program(context, of, source, tuple(options))
        return of.programs[key]


@contextmanager
def _quiet(cl: Any) -> Iterator[None]:
    """Intel's runtime answers every build with a log; a failure carries it in the error, a success need not tell it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        yield


class Program:
    """A built program and its kernels."""

    def __init__(self, context: Any, of: ContextState, source: str, options: tuple[str, ...]):
        self.source = source
        self.options = options
        self.state = of
        self.key = _binary_key(of.device, source, options)
        self.kernels: dict[str, Kernel] = {}
        self._unsaved = False
        self._built = self._from_store(context) or self._from_source(context)

    def _from_store(self, context: Any) -> Any:
        binary = binary_store.load(self.key) if binary_store else None
        if binary is None:
            return None
        cl = platforms.opencl()
        try:
            with _quiet(cl):
                return cl.Program(context, [self.state.device], [binary]).build()
        except cl.Error as error:
            assert binary_store is not None
            binary_store.reject(self.key, f"the driver refused it: {error}")
            return None

    def _from_source(self, context: Any) -> Any:
        global _builds
        cl = platforms.opencl()
        start = time.perf_counter()
        try:
            with _quiet(cl):
                built = cl.Program(context, self.source).build(options=list(self.options), cache_dir=False)
        except cl.RuntimeError as error:
            raise KernelBuildError(_build_failure(self.state.device, self.source, self.options, str(error))) from None
        _builds += 1
        self._unsaved = binary_store is not None
        if env.value("NETCL_DEBUG") >= 2:
            names = built.get_info(cl.program_info.KERNEL_NAMES)
            log.warning("[build] %s in %.0f ms on %s", names, 1e3 * (time.perf_counter() - start), self.state.device.name)
        if env.value("NETCL_DEBUG") >= 4:
            log.warning("%s", self.source)
        return built

    def kernel(self, name: str) -> Kernel:
        """The kernel ``name``; the same object every time."""
        with self.state.lock:
            if name not in self.kernels:
                self.kernels[name] = Kernel(self, name)
            return self.kernels[name]

    def make(self, name: str) -> Any:
        """A new driver-side kernel object: one per thread, since arguments are stored in it."""
        cl = platforms.opencl()
        try:
            return cl.Kernel(self._built, name)
        except cl.Error:
            what = f"the program has no kernel {name}"
            raise KernelBuildError(message("kernel", what, has=self._built.get_info(cl.program_info.KERNEL_NAMES))) from None

    def save_after_launch(self, event: Any) -> None:
        """Store the binary. PoCL compiles work-group functions at the first launch, so the time to ask is after it."""
        if self._unsaved and binary_store is not None:
            self._unsaved = False
            event.wait()  # PoCL 3.1 aborts when it is asked for the binary of a kernel that is running
            cl = platforms.opencl()
            binary_store.save(self.key, bytes(self._built.get_info(cl.program_info.BINARIES)[0]))


class _Own:
    """A thread's own driver-side kernel. Sizes stay set in it: where they are the same again, only memory is set, in a third of the time.

    ``numbers`` are the sizes that are set; ``None`` where a launch sets everything.
    """

    __slots__ = ("kernel", "numbers", "set_memory")

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.numbers: list[Any] | None = None
        self.set_memory: Any = getattr(kernel, "_set_arg_multi", None)  # what set_args itself calls


class Kernel:
    """A kernel that can be called: ``kernel(queue, global_size, local_size, *arguments)``.

    Arguments are Tensors, buffers, local memory or Python numbers. A global size that is no multiple of the local size
    is rounded up: a kernel launched this way guards itself with its element count.
    """

    def __init__(self, program: Program, name: str):
        self.name = name
        self.program = program
        self._threads = threading.local()
        self._launched = False
        first = self._object()
        kinds = parameter_kinds(program.source, name)
        self.kinds = kinds if kinds is not None and len(kinds) == first.num_args else (UNKNOWN,) * first.num_args
        self._pointers = tuple(i for i, kind in enumerate(self.kinds) if kind is POINTER or kind is UNKNOWN)
        reads_only = self.reads_only()
        self._written = frozenset(i for i in self._pointers if not reads_only[i])
        self._memory = len(self._pointers)
        self._places = [x for i in range(self._memory) for x in (i, None)]
        in_front = self._pointers == tuple(range(self._memory)) and UNKNOWN not in self.kinds
        self._ends_in_sizes = in_front and not {np.float32, np.float64} & set(self.kinds[self._memory :])
        self._threads.own = _Own(self._typed(first))
        cl = platforms.opencl()
        info, device = cl.kernel_work_group_info, program.state.device
        self.max_work_group = int(first.get_work_group_info(info.WORK_GROUP_SIZE, device))
        required = tuple(first.get_work_group_info(info.COMPILE_WORK_GROUP_SIZE, device))
        self.required_local = required if any(required) else None
        self.enqueue = cl.enqueue_nd_range_kernel
        self.no_memory = cl.MemoryError

    def _object(self) -> Any:
        return self.program.make(self.name)

    def _typed(self, kernel: Any) -> Any:
        if UNKNOWN not in self.kinds:
            kernel.set_scalar_arg_dtypes([None if kind == POINTER else kind for kind in self.kinds])
        return kernel

    def __call__(self, queue: Any, global_size: Size, local_size: Size | None, *args: Any) -> Any:
        """Enqueue the kernel; returns its event."""
        if platforms.forked_child:
            platforms.check_process()
        own = getattr(self._threads, "own", None)
        if own is None:
            own = self._threads.own = _Own(self._typed(self._object()))
        if len(args) != len(self.kinds):
            raise ShapeError(message(self.name, f"the kernel takes {len(self.kinds)} arguments, {len(args)} were given"))
        plain, kernel = self._driver_arguments(queue, args), own.kernel
        if own.numbers is not None and own.numbers == plain[self._memory :]:
            places = self._places.copy()
            places[1::2] = plain[: self._memory]
            own.set_memory(tuple(places))
        else:
            self._set_all(own, plain)
        sizes, local = self._sizes(global_size, local_size)
        if 0 in sizes:
            return None
        target = queue if launch_queue is None else launch_queue(queue)
        try:
            event = self.enqueue(target, kernel, sizes, local)
        except self.no_memory:
            event = self._retry(target, kernel, sizes, local)
        if not self._launched:
            self._launched = True
            self.program.save_after_launch(event)
        for observer in launch_observers:
            observer(self, queue, sizes, local, args, event)
        return event

    def _set_all(self, own: _Own, plain: list[Any]) -> None:
        own.numbers = None
        own.kernel.set_args(*plain)
        if self._ends_in_sizes and own.set_memory is not None:
            own.numbers = plain[self._memory :]

    def reads_only(self) -> tuple[bool, ...]:
        """Per argument, whether the kernel promises not to write there; a signature that cannot be read promises nothing."""
        known = read_only(self.program.source, self.name)
        return known if known is not None and len(known) == len(self.kinds) else (False,) * len(self.kinds)

    def prepare(self, queue: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: Sequence[Any]) -> Prepared:
        """A launch of this kernel that can be repeated: sizes as an observer was told them, buffers and numbers as arguments."""
        return Prepared(self, queue, sizes, local, args)

    def _retry(self, queue: Any, kernel: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None) -> Any:
        """Drivers commit memory at the first launch, not at allocation: free what the pools hold and try once more."""
        if free_memory is not None:
            free_memory()
        queue.finish()
        try:
            return self.enqueue(queue, kernel, sizes, local)
        except self.no_memory as error:
            remedy = "use a smaller batch, or drop tensors and call netcl.core.memory.empty_cache()"
            raise OutOfMemoryError(message(self.name, f"the device has no room left at launch ({error})", remedy)) from None

    def _driver_arguments(self, queue: Any, args: tuple[Any, ...]) -> list[Any]:
        plain = list(args)
        for i in self._pointers:
            arg = args[i]
            try:
                plain[i] = arg.buffer
            except AttributeError:  # a buffer, local memory, or a number whose type the text does not tell
                if self.kinds[i] is UNKNOWN and isinstance(arg, (bool, int, float)):
                    plain[i] = np.float32(arg) if isinstance(arg, float) else np.int32(arg)
                continue
            if arg.queue is not queue:
                self._check_context(queue, arg)
            if awaited and i in self._written and id(arg.pool_handle) in awaited and before_write is not None:
                before_write(arg.pool_handle)
        return plain

    def _check_context(self, queue: Any, tensor: Any) -> None:
        if tensor.context != queue.context:
            what = "a tensor lives in another OpenCL context than the queue"
            raise DeviceError(message(self.name, what, "move it with tensor.to(device)", tensor=tensor.device, shape=tensor.shape))
        if tensor.pending_event is not None:
            tensor.wait()

    def _sizes(self, global_size: Size, local_size: Size | None) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        if type(global_size) is int and type(local_size) is int and local_size <= self.max_work_group and self.required_local is None:
            return (-(-global_size // local_size) * local_size,), (local_size,)
        sizes = (global_size,) if isinstance(global_size, int) else tuple(global_size)
        if self.required_local is not None:
            local: tuple[int, ...] | None = self.required_local[: len(sizes)]
        elif local_size is None:
            return sizes, None
        else:
            local = self.clamp((local_size,) if isinstance(local_size, int) else tuple(local_size))
        assert local is not None
        for size, step in zip(sizes, local, strict=True):
            if size % step:
                return tuple(-(-s // n) * n for s, n in zip(sizes, local, strict=True)), local
        return sizes, local

    def clamp(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The local size, halved along its longest side until device and kernel allow it."""
        limit = self.max_work_group
        if len(local) == 1 and local[0] <= limit:
            return local
        sides = [min(side, most) for side, most in zip(local, self.program.state.max_items, strict=False)]
        while int(np.prod(sides)) > limit:
            longest = sides.index(max(sides))
            sides[longest] = max(1, sides[longest] // 2)
        return tuple(sides)


class Prepared:
    """A launch with a driver-side kernel of its own, whose arguments stay set: ``call()`` is nothing but the enqueue.

    ``set(index, value)`` changes an argument for the launches to come.
    """

    __slots__ = ("_object", "_set_number", "call", "kernel", "local", "queue", "sizes")

    def __init__(self, kernel: Kernel, queue: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: Sequence[Any]):
        self.kernel, self.queue, self.sizes, self.local = kernel, queue, sizes, local
        self._object = kernel._object()
        # set_arg tries a number as every kind of memory object first, which takes 25 us
        self._set_number = getattr(self._object, "_set_arg_buf", self._object.set_arg)
        for index, value in enumerate(kernel._driver_arguments(queue, tuple(args))):
            self.set(index, value)
        self.call = partial(kernel.enqueue, queue, self._object, sizes, local)

    def observed(self) -> Any:
        """The launch as eager code would make it now, on the queue that profiling asks for; returns its event."""
        target = self.queue if launch_queue is None else launch_queue(self.queue)
        return self.kernel.enqueue(target, self._object, self.sizes, self.local)

    def set(self, index: int, value: Any) -> None:
        """Set an argument: a buffer, local memory, or a number, which takes the type the kernel's text says."""
        kind = self.kernel.kinds[index]
        if callable(kind):
            self._set_number(index, kind(value))
        else:
            self._object.set_arg(index, value)


_FORMAT = "2"  # of what is stored; 1 held binaries of kernels that were still running, which PoCL cannot load


def _binary_key(device: Any, source: str, options: tuple[str, ...]) -> str:
    platform = device.platform
    parts = (_FORMAT, source, "\0".join(options), device.name, device.driver_version, device.version, platform.name, platform.version)
    return hashlib.sha256("\1".join(parts).encode()).hexdigest()


def _build_failure(device: Any, source: str, options: tuple[str, ...], text: str) -> str:
    """Everything a person needs to mend a kernel: the log, the lines it means, the device, the saved source."""
    build_log = text.split("\n\n(options:")[0].split("\n(options:")[0].partition(f"{device.name}'")[2].partition("\n")[2].strip() or text
    lines = source.split("\n")
    marked = sorted({int(n) for n in re.findall(r":(\d+):\d+", build_log) if 0 < int(n) <= len(lines)})
    shown = sorted({k for n in marked[:5] for k in range(max(1, n - 2), min(len(lines), n + 2) + 1)}) or range(1, min(len(lines), 12) + 1)
    listing = "\n".join(f"{'>' if n in marked else ' '}{n:5d} | {lines[n - 1]}" for n in shown)
    what = message("build", "the driver refused the kernel source", device=device.name, options=" ".join(options) or "none")
    saved = _save_source(source)
    return f"{what}\n\n{build_log}\n\n{listing}\n\nsource saved as {saved}"


def _save_source(source: str) -> str:
    folder = env.cache_dir()
    if folder is None:
        return "nowhere: there is no writable cache folder (set NETCL_CACHE_DIR)"
    path: Path = folder / "failed" / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return str(path)
