"""Builds every OpenCL program and launches every kernel.

Programs are cached per context in memory; the store for compiled binaries and the observers of launches (capture,
profiling) are entries of :mod:`netcl.core.hooks`. Kernel objects carry their arguments in the driver, so eager launches use
one per thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from threading import get_ident
from typing import Any

import numpy as np

from netcl.core import env, platforms, recording
from netcl.core.commands import CommandList, Launch
from netcl.core.errors import DeviceError, KernelBuildError, OutOfMemoryError, ShapeError, message, some
from netcl.core.hooks import BinaryStore, hooks
from netcl.core.kernels import builders, builtins, compiler, probe, substitutes
from netcl.core.kernels.build_report import build_failure, kernel_names
from netcl.core.kernels.signature import POINTER, UNKNOWN, parameter_kinds
from netcl.core.queue_state import ContextState, context_state, free_memory, queue_state
from netcl.core.queue_state import forget as forget
from netcl.core.waiting_runs import flush_waiting, waiting

log = logging.getLogger("netcl")

LaunchSize = int | Sequence[int]
MAKE_ROOM = "use a smaller batch, or drop tensors and call netcl.core.memory.empty_cache()"
RELEASE = "repeat the call; if it fails again, restart the program: the driver may have lost the device"
_OUT_OF_RESOURCES, _OUT_OF_HOST_MEMORY = -5, -6  # pyopencl has no classes for these codes
_MOST_LAUNCH_SIZES = 4096  # per kernel
_MOST_RESETS = 8
_MOST_ELEMENTS = (1 << 31) - 1  # of tensors of kernels that take no 64-bit number
_builds = _programs = 0
build_listeners: list[Callable[[str, float, float], None]] = []  # called with the names, the begin and the end of every build
_building: Program | None = None  # the program that is built at this moment
_first_launches: deque[tuple[Program, Any]] = deque()  # of drivers that compile at launch: the program and the event, oldest first
_first_launches_lock = threading.Lock()


def build_count() -> int:
    """Return the number of programs this process has built from source; tests compare two readings."""
    return _builds


def program_count() -> int:
    """Return the number of programs this process has built or loaded."""
    return _programs


def compiling() -> tuple[int, str] | None:
    """Return the number (see :func:`program_count`) and the kernel names of the program that the driver is compiling, or ``None``."""
    other = None if _building is not None else builders.current()
    found = _building or next((program for program, event in list(_first_launches) if event.command_execution_status > 0), None)
    return other or (None if found is None else (found.number, kernel_names(found.source)))


def lacks_memory(error: Any) -> bool:
    """Whether a driver error means that memory or resources ran out."""
    return isinstance(error, platforms.opencl().MemoryError) or error.code in (_OUT_OF_RESOURCES, _OUT_OF_HOST_MEMORY)


def failure(op: str, what: str, error: Any) -> OutOfMemoryError | DeviceError:
    """Return the ``OutOfMemoryError`` or ``DeviceError`` for a driver error; ``what`` is the action that failed, such as ``to copy``."""
    if lacks_memory(error):
        return OutOfMemoryError(message(op, f"the device has no memory left {what} ({error})", MAKE_ROOM))
    return DeviceError(message(op, f"the driver failed {what} ({error})", RELEASE))


@contextmanager
def driver_errors(op: str, what: str) -> Iterator[None]:
    """Convert driver errors inside the block by :func:`failure`."""
    try:
        yield
    except platforms.opencl().Error as error:
        raise failure(op, what, error) from None


def state(queue: Any) -> ContextState:
    """Return the state of a queue's context."""
    try:
        return queue.netcl.context
    except AttributeError:
        return queue_state(queue).context  # type: ignore[return-value]


def _eventless(function: Any, queue: Any, kernel: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None) -> Callable[[], int]:
    """Return a launch without an event, as a function without arguments that returns the driver's status (0 for success)."""
    dimensions = len(sizes)
    array = ctypes.c_size_t * dimensions
    handles = ctypes.c_void_p(queue.int_ptr), ctypes.c_void_p(kernel.int_ptr)
    local_array = None if local is None else array(*local)
    return partial(function, *handles, ctypes.c_uint(dimensions), None, array(*sizes), local_array, ctypes.c_uint(0), None, None)


def get(queue: Any, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
    """Return the kernel ``name`` of ``source`` for a queue's context; it is built at most once per context."""
    return build(queue.context, source, options, state(queue)).kernel(name)


def get_later(queue: Any, source: str, name: str, options: Sequence[str] = ()) -> Kernel:
    """Return a kernel for a plan: as :func:`get` does, but its program may still be built by :mod:`netcl.core.kernels.builders`.

    An error in the source is raised when the kernel is launched.
    """
    return _program(queue.context, source, options, state(queue), later=True).kernel(name)


def build(context: Any, source: str, options: Sequence[str] = (), of: ContextState | None = None) -> Program:
    """Return the program of ``source`` for a context (``of`` is its state): from memory, from the binary store, or from the compiler."""
    found = _program(context, source, options, of or context_state(context))
    found.built()
    return found


def _program(context: Any, source: str, options: Sequence[str], of: ContextState, later: bool = False) -> Program:
    if platforms.forked_child:
        platforms.check_process()
    key = (source, tuple(options))
    with of.lock:
        if key not in of.programs:
            of.programs[key] = Program(context, of, source, tuple(options), later)
        return of.programs[key]


def unmarked(text: bytes) -> bytes:
    """Return edited PTX, see :func:`netcl.core.kernels.compiler.edited_ptx`; raises ``KernelBuildError`` for other binaries."""
    try:
        return compiler.edited_ptx(text)
    except ValueError as error:
        what = "the driver's binary must be PTX with lines marked for one processor"
        raise KernelBuildError(message("build", what, got=str(error))) from None


class Program:
    """A program and its kernels. It may be pending: a builder process compiles it, and :meth:`built` waits for that."""

    def __init__(self, context: Any, of: ContextState, source: str, options: tuple[str, ...], later: bool = False):
        global _programs
        _programs += 1
        self.number, self.source, self.options, self.state = _programs, source, options, of
        self._text = substitutes.substituted(source) if "wrong_conversions" in of.quirks else source
        self.kernels: dict[str, Kernel] = {}
        self._unsaved = False
        self._final: bytes | None = None  # the binary of the second pass; the driver may return that of the first
        self._job: builders.BuildJob | None = None
        self._context = None
        self.driver: Any = None  # the driver's program; None while it is pending
        cached = "caches_programs" in of.quirks and env.raw("POCL_KERNEL_CACHE") != "0"  # by the driver
        self._store = None if cached else hooks.binary_store
        if self._store is not None:
            self.driver = self._from_store(context, self._store)
        elif self.number == 1 and hooks.binary_store is not None:
            hooks.binary_store.announce_first_run()
        pool = builders.pool_of(of) if later and self.driver is None else None
        if pool is not None and env.value("NETCL_BUILD_PROCESSES") != 0 and env.cache_dir() is not None:
            self._context = context  # only until it is built: the state of a context must not keep the context alive
            request = {"forms": self._forms(), "marked": compiler.PTX_MARK.search(source) is not None}
            complete = hooks.binary_store is not None and "compiles_at_launch" not in of.quirks  # before the first launch
            save = partial(hooks.binary_store.save, self.key) if complete else None  # type: ignore[union-attr]
            self._job = pool.submit((self.number, kernel_names(source)), request, save)
        elif self.driver is None:
            self.driver = self._from_source(context)

    #: The name of the program's binary in the store.
    key = cached_property(lambda self: _binary_key(self.state.device, self._text, self.options))

    def built(self) -> Any:
        """Return the driver's program; waits for its builder, or builds it here if none has begun. Raises if it does not build."""
        if self.driver is None:
            with self.state.lock:
                if self.driver is None:
                    self.driver = self._from_builder() or self._from_source(self._context)
                    self._context = None
        return self.driver

    def _from_builder(self) -> Any:
        job, self._job = self._job, None
        binary = None if job is None else job.wait()
        if job is None or binary is None:
            return None
        try:
            built = self._from_binary(self._context, binary)
        except self.state.cl.Error as error:
            log.info("[build] a binary of a builder process was refused: %s", error)
            return None
        self._is_new(built, job.start, job.end, saved=job.save is not None)
        return built

    def _from_store(self, context: Any, store: BinaryStore) -> Any:
        binary = store.load(self.key)
        if binary is None:
            return None
        try:
            return self._from_binary(context, binary)
        except self.state.cl.Error as error:
            store.reject(self.key, f"the driver refused it: {error}")
            return None

    def _from_binary(self, context: Any, binary: bytes) -> Any:
        cl = self.state.cl
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)
            return compiler.from_binary(cl, context, binary)

    def _from_source(self, context: Any) -> Any:
        global _building
        cl, start = self.state.cl, time.perf_counter()
        forms = self._forms()
        if self.state.fragile and not probe.is_child:
            probe.check_compiles(self.state.device, self.key, self.source, tuple(forms[-1][1]))
        _building = self
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)  # Intel's runtime writes a log for every build; errors contain it
                built = compiler.from_source(cl, context, forms)
            if compiler.PTX_MARK.search(self.source):
                self._final = unmarked(compiler.binary_of(cl, built))
                built = self._from_binary(context, self._final)
        except cl.Error as error:
            if lacks_memory(error):
                raise failure("build", f"to build {kernel_names(self.source)}", error) from None
            raise KernelBuildError(build_failure(self.state.device, self.source, self.options, str(error))) from None
        finally:
            _building = None
        self._is_new(built, start, time.perf_counter())
        return built

    def _is_new(self, built: Any, start: float, end: float, saved: bool = False) -> None:
        """Count and report a program that was compiled, here or by a builder."""
        global _builds
        _builds += 1
        for listener in build_listeners:
            listener(kernel_names(self.source), start, end)
        self._unsaved = not saved
        if self._debug >= 2:
            names = built.get_info(self.state.cl.program_info.KERNEL_NAMES)
            log.warning("[build] %s in %.0f ms on %s", names, 1e3 * (end - start), self.state.device.name)
        if self._debug >= 4:
            log.warning("%s", self.source)

    def _forms(self) -> list[tuple[str, list[str]]]:
        """Return text and options of the program. A form without the driver's header precedes it if that compiles faster."""
        # Without -w compilers write "1 warning generated." past Python to the terminal.
        self._debug = env.value("NETCL_DEBUG")
        options = [*self.options, *([] if self._debug else ["-w"])]
        declared = None
        if "parses_all_builtins" in self.state.quirks and "-cl-std" not in " ".join(options):
            declared = builtins.declarations(self.source, inline="calls_builtins" in self.state.quirks)
        own = [] if declared is None else [(f"{declared}#line 1\n{self.source}", [*options, builtins.GUARD])]
        return [*own, (self._text, options)]

    def kernel(self, name: str) -> Kernel:
        """Return the kernel ``name``; the same object every time."""
        with self.state.lock:
            if name not in self.kernels:
                self.kernels[name] = Kernel(self, name)
            return self.kernels[name]

    def names(self) -> list[str]:
        """List the names of the kernels in the program."""
        return self.built().get_info(self.state.cl.program_info.KERNEL_NAMES).split(";")

    def make(self, name: str) -> Any:
        """Create a kernel object of the driver; each thread needs its own, because arguments are stored in it."""
        cl = self.state.cl
        try:
            return cl.Kernel(self.driver or self.built(), name)
        except cl.Error as error:
            if lacks_memory(error):
                raise failure(name, "to create the kernel object", error) from None
            what = f"the program has no kernel {name}"
            raise KernelBuildError(message("kernel", what, has=self.built().get_info(cl.program_info.KERNEL_NAMES))) from None

    def after_first_launch(self, event: Any) -> None:
        """Wait for ``event`` and store the binary, if it is not stored yet. PoCL compiles work-group functions at the first launch."""
        if "compiles_at_launch" in self.state.quirks:
            with _first_launches_lock:
                while _first_launches and _first_launches[0][1].command_execution_status <= 0:
                    _first_launches.popleft()
                _first_launches.append((self, event))
        if self._unsaved and self._store is not None:
            self._unsaved = False
            event.wait()  # PoCL 3.1 aborts if the binary of a running kernel is requested
            self._store.save(self.key, self._final or compiler.binary_of(self.state.cl, self.driver))


class _Own:
    """A thread's kernel object of the driver. Arguments stay set in it, so unchanged numbers are not set again.

    ``numbers`` are the numbers that are set, if known. ``set_memory`` and ``set_numbers`` are pyopencl's own faster setters; if
    ``set_numbers`` is ``None``, use ``set_args``.
    """

    __slots__ = ("kernel", "lenders", "numbers", "set_memory", "set_numbers")

    def __init__(self, kernel: Any, kinds: tuple[Any, ...]):
        self.kernel = kernel
        self.lenders: list[Any] = []  # queues of tensors in the current launch that differ from its own queue
        self.numbers: tuple[Any, ...] | None = None
        self.set_memory: Any = getattr(kernel, "_set_arg_multi", None)
        self.set_numbers: Any = getattr(kernel, "_set_arg_buf_pack_multi", None) if self.set_memory and UNKNOWN not in kinds else None
        if self.set_numbers is None and UNKNOWN not in kinds:
            kernel.set_scalar_arg_dtypes([None if kind is POINTER else kind for kind in kinds])  # for set_args; takes 0.2 ms


def _wait_before_more(lenders: list[Any], queue: Any, event: Any) -> None:
    """Make ``lenders``, other queues whose tensors a launch uses, wait for the launch before they write to or reuse that memory."""
    queue.flush()
    for lender in lenders:
        with driver_errors("launch", "to enqueue a barrier"):
            platforms.opencl().enqueue_barrier(lender, wait_for=[event])
    lenders.clear()


class Kernel:
    """A callable kernel: ``kernel(queue, global_size, local_size, *arguments)``.

    Arguments are Tensors, buffers, local memory or Python numbers. The global size is rounded up to a multiple of a given local
    size, so the kernel must check its element count.
    """

    def __init__(self, program: Program, name: str):
        self.name = name
        self.program = program
        self._threads = threading.local()
        self.launched = False
        parsed = parameter_kinds(program.source, name)
        first = None
        if program.driver is not None or parsed is None or UNKNOWN in parsed[0]:
            first = program.make(name)
            if parsed is None or len(parsed[0]) != first.num_args:
                parsed = (UNKNOWN,) * first.num_args, (False,) * first.num_args
        #: Per argument: its kind, and whether it is declared const (all ``False`` if the signature cannot be parsed).
        kinds, self.reads_only = parsed
        self.kinds = kinds
        self._count = len(kinds)
        self.pointers = [i for i, kind in enumerate(kinds) if kind is POINTER or kind is UNKNOWN]  # arguments that are or may be memory
        self._scalars = [i for i in range(self._count) if i not in self.pointers]
        self._in_front = self.pointers == list(range(len(self.pointers)))
        self._places = [x for i in self._scalars for x in (i, np.dtype(kinds[i]).char.encode(), None)]
        self._takes_long = not {np.int64, np.uint64, UNKNOWN}.isdisjoint(kinds)
        self._comparable = {np.float32, np.float64}.isdisjoint(kinds)  # 0.0 and -0.0 are equal
        self._known_sizes: dict[Any, tuple[tuple[int, ...], tuple[int, ...] | None]] = {}
        cl = program.state.cl
        self._local_argument = cl.LocalMemory
        self.enqueue = cl.enqueue_nd_range_kernel
        self.failed = cl.Error
        if first is not None:
            self._threads.own = _Own(first, kinds)

    @cached_property
    def _limits(self) -> tuple[int, tuple[int, ...] | None, int]:
        state, asked = self.program.state, self._own().kernel.get_work_group_info
        info, device = state.cl.kernel_work_group_info, state.device
        required = tuple(asked(info.COMPILE_WORK_GROUP_SIZE, device))
        return int(asked(info.WORK_GROUP_SIZE, device)), required if any(required) else None, int(asked(info.LOCAL_MEM_SIZE, device))

    # The most work-items of a group, and the local size that the source requires.
    max_work_group = property(lambda self: self._limits[0])
    required_local = property(lambda self: self._limits[1])

    def _own(self) -> _Own:
        """Return the calling thread's kernel object."""
        if not hasattr(self._threads, "own"):
            self._threads.own = self.new_object()
        return self._threads.own

    def new_object(self) -> _Own:
        """Create another kernel object of the driver, with arguments of its own."""
        made = self.program.make(self.name)
        if made.num_args != self._count:
            what = f"the kernel must have the {self._count} parameters that its text declares, got {made.num_args}"
            raise KernelBuildError(message(self.name, what))
        return _Own(made, self.kinds)

    def __call__(self, queue: Any, global_size: LaunchSize, local_size: LaunchSize | None, *args: Any) -> Any:
        """Enqueue the kernel; returns its event, or ``None`` if a global size is 0 or the queue is a command list."""
        if platforms.forked_child:
            platforms.check_process()
        if len(args) != self._count:
            raise ShapeError(message(self.name, f"the kernel expected {len(self.kinds)} arguments, got {len(args)}"))
        if type(queue) is CommandList:
            return self._write_down(queue, global_size, local_size, args)
        try:
            own = self._threads.own
        except AttributeError:
            own = self._own()
        self._set(own, queue, args)
        if waiting:
            flush_waiting(queue)
            self._set(own, queue, args)  # another launch of this kernel may have been enqueued
        try:
            sizes, local = self._known_sizes[global_size, local_size]
        except (KeyError, TypeError):  # a new pair, or an unhashable list
            sizes, local = self._remember_sizes(global_size, local_size)
        if 0 in sizes:
            return None
        target = queue if hooks.launch_queue is None else hooks.launch_queue(queue)
        try:
            event = self.enqueue(target, own.kernel, sizes, local)
        except self.failed as error:
            event = self._retry(target, own.kernel, sizes, local, error)
        if not self.launched:
            self.launched = True
            self.program.after_first_launch(event)
        if own.lenders:
            _wait_before_more(own.lenders, target, event)
        for observer in hooks.launch_observers:
            observer(self, queue, sizes, local, args, event)
        return event

    def _write_down(self, commands: CommandList, global_size: LaunchSize, local_size: LaunchSize | None, args: tuple[Any, ...]) -> None:
        sizes = (global_size,) if isinstance(global_size, int) else tuple(global_size)
        local = (local_size,) if isinstance(local_size, int) else None if local_size is None else tuple(local_size)
        if not self._takes_long and any([math.prod(getattr(args[i], "shape", ())) > _MOST_ELEMENTS for i in self.pointers]):
            raise self._too_large([args[i] for i in self._scalars])
        if 0 not in sizes:
            commands.launch(self, sizes, local, args)

    def resolved(self, launch: Launch) -> Launch:
        """Return a launch with the sizes that the driver gets; raises if the kernel's limits do not allow them. Waits for the program."""
        sizes, local = self._sizes(launch.sizes, launch.local, launch.args)
        return launch._replace(sizes=sizes, local=local)

    def _too_large(self, numbers: Sequence[Any]) -> ShapeError:
        what = "the kernel indexes with 32 bits, so tensors must have fewer than 2^31 elements"
        return ShapeError(message(self.name, what, "work on parts of the tensor", sizes=some([str(n) for n in numbers])))

    def _set(self, own: _Own, queue: Any, args: tuple[Any, ...]) -> None:
        if own.set_numbers is None:
            own.kernel.set_args(*self._driver_arguments(queue, args))
            return
        own.set_memory(tuple(self._memory(queue, args)))
        numbers = args[len(self.pointers) :] if self._in_front else tuple([args[i] for i in self._scalars])
        if own.numbers != numbers or not self._comparable:
            self._set_numbers(own, numbers)

    def _set_numbers(self, own: _Own, numbers: tuple[Any, ...]) -> None:
        own.numbers = None
        if numbers:
            places = self._places.copy()
            places[2::3] = numbers
            try:
                own.set_numbers(tuple(places))
            except RuntimeError as error:
                if "bad_cast" in str(error):
                    raise self._too_large(numbers) from None
                raise
        own.numbers = numbers

    def sized(self, sizes: tuple[int, ...], local: tuple[int, ...] | None, numbers: tuple[Any, ...]) -> Sized | None:
        """Return this kernel with fixed sizes and numbers; ``None`` unless its argument types are known and its buffers come first."""
        usable = self._in_front and self._own().set_numbers is not None
        return Sized(self, sizes, local, numbers) if usable else None

    def _retry(self, queue: Any, kernel: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, error: Any) -> Any:
        """If ``error`` is a lack of memory, which a launch can cause, free the pools, launch again and return the event; else raise."""
        if not lacks_memory(error):
            raise self._refused(sizes, local, error) from None
        free_memory()
        try:
            queue.finish()
            return self.enqueue(queue, kernel, sizes, local)
        except self.failed as again:
            raise failure(self.name, "to launch the kernel", again) from None

    def _refused(self, sizes: tuple[int, ...], local: tuple[int, ...] | None, why: Any) -> DeviceError:
        """Return the error for a rejected launch, with the limits it may exceed."""
        device = self.program.state.device
        seen = {"global_size": sizes, "local_size": local, "max_work_group": self.max_work_group, "max_items": self.program.state.max_items,
                "device": device.name}  # fmt: skip
        return DeviceError(message(self.name, f"the driver cannot launch the kernel ({why})", "stay within the limits shown", **seen))

    def _check_local_memory(self, args: Sequence[Any]) -> None:
        """Raise if a kernel and its local arguments need more local memory than the driver can take without an abort."""
        limit = self.program.state.local_limit
        needed = self._limits[2] + sum([arg.size for arg in args if type(arg) is self._local_argument])
        if needed > limit:
            what = "the kernel needs more local memory than the device has"
            raise DeviceError(message(self.name, what, "use smaller tiles", bytes=needed, limit=limit))

    def _memory(self, queue: Any, args: tuple[Any, ...]) -> list[Any]:
        """Realize the tensors; return index and buffer of every memory argument in one list, and of numbers too if types are unknown."""
        found: list[Any] = []
        readers = hooks.readers
        for i in self.pointers:
            arg = args[i]
            found.append(i)
            memory = getattr(arg, "memory", None)
            if memory is None:
                realize = getattr(arg, "realize", None)
                if realize is None:  # a buffer, local memory, or a number
                    found.append(arg)
                    if type(arg) is self._local_argument:
                        self._check_local_memory(args)
                    continue
                memory = realize()
            found.append(memory)
            if arg.queue is not queue:
                self._check_context(queue, arg)
            if readers and not self.reads_only[i] and id(arg.lease) in readers:
                readers.compute(arg.lease)
        return found

    def _driver_arguments(self, queue: Any, args: tuple[Any, ...]) -> list[Any]:
        plain = list(args)
        flat = self._memory(queue, args)
        for i, arg in zip(flat[::2], flat[1::2], strict=True):
            number = self.kinds[i] is UNKNOWN and isinstance(arg, (bool, int, float))
            plain[i] = arg if not number else np.float32(arg) if isinstance(arg, float) else np.int32(arg)
        return plain

    def _check_context(self, queue: Any, tensor: Any) -> None:
        if tensor.context != queue.context:
            what = "all tensors must be in the OpenCL context of the queue"
            raise DeviceError(message(self.name, what, "move it with tensor.to(device)", tensor=tensor.device, shape=tensor.shape))
        if tensor.pending_event is not None:
            tensor.wait()
        if tensor.queue != queue:
            recording.host_work("a kernel uses a tensor of another queue")
            flush_waiting(tensor.queue)
            lender, target = (of if hooks.launch_queue is None else hooks.launch_queue(of) for of in (tensor.queue, queue))
            cl = self.program.state.cl
            with driver_errors(self.name, "to enqueue a barrier"):
                cl.enqueue_barrier(target, wait_for=[cl.enqueue_marker(lender)])
            lender.flush()  # waiting for a marker that was never submitted does not end
            self._own().lenders.append(lender)

    def _remember_sizes(self, global_size: LaunchSize, local_size: LaunchSize | None) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        key = global_size if isinstance(global_size, int) else tuple(global_size)
        local_key = local_size if local_size is None or isinstance(local_size, int) else tuple(local_size)
        found = self._sizes((key,) if isinstance(key, int) else key, (local_key,) if isinstance(local_key, int) else local_key)
        if len(self._known_sizes) >= _MOST_LAUNCH_SIZES:
            self._known_sizes.clear()
        self._known_sizes[key, local_key] = found
        return found

    def _sizes(
        self, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: Sequence[Any] = ()
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the sizes that the driver gets; raises if the limits of kernel and device do not allow the launch."""
        self._check_local_memory(args)
        state, required = self.program.state, self._limits[1]
        if not 1 <= len(sizes) <= len(state.max_items):
            raise self._refused(sizes, None, f"a launch must have 1 to {len(state.max_items)} dimensions")
        if required is not None:
            local = required[: len(sizes)]
            if math.prod(required) > state.max_work_group:
                raise self._refused(sizes, local, "the work-group size that the kernel requires is larger than the device allows")
        elif local is None:
            return sizes, None
        else:
            local = self.clamp(local)
        for size, step in zip(sizes, local, strict=True):
            if size % step:
                return tuple([-(-s // n) * n for s, n in zip(sizes, local, strict=True)]), local
        return sizes, local

    def clamp(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return a local size that device and kernel allow: limit every dimension, then halve the largest until the product fits."""
        limit = self._limits[0]
        if len(local) == 1 and local[0] <= limit:
            return local
        sides = [min(side, most) for side, most in zip(local, self.program.state.max_items, strict=False)]
        while int(np.prod(sides)) > limit:
            longest = sides.index(max(sides))
            sides[longest] = max(1, sides[longest] // 2)
        return tuple(sides)


class Sized:
    """A kernel with fixed sizes and numbers: a launch of a plan, whose runs differ only in their buffers.

    ``sized(queue, (0, buffer, 1, buffer, ..))`` enqueues it on the given queue. It does not call observers, so it must not be used
    while ``hooks.launch_observers`` has entries. It makes a kernel object of its own once other launches of the thread have set other
    numbers in the shared one :data:`_MOST_RESETS` times.
    """

    __slots__ = ("_driver", "_enqueue", "_eventless", "_own", "_resets", "_threads", "kernel", "local", "numbers", "sizes")

    def __init__(self, kernel: Kernel, sizes: tuple[int, ...], local: tuple[int, ...] | None, numbers: tuple[Any, ...]):
        self.kernel, self.sizes, self.local, self.numbers = kernel, sizes, local, numbers
        self._enqueue, self._threads, self._driver = kernel.enqueue, kernel._threads, kernel.program.state.eventless
        self._eventless: tuple[_Own, Any, Callable[[], int]] | None = None  # of the first thread and its queue
        self._own: tuple[int, _Own] | None = None  # the thread that uses it, and the object: one assignment, as threads race for it
        self._resets = 0

    def __call__(self, queue: Any, memory: tuple[Any, ...], first: tuple[Any, ...] = ()) -> None:
        """Enqueue with ``memory`` (argument indices and buffers, alternating); the numbers ``first`` precede the fixed ones."""
        if platforms.forked_child:
            platforms.check_process()
        owned = self._own
        if owned is not None and owned[0] == get_ident():
            own = owned[1]
        else:
            try:
                own = self._threads.own
            except AttributeError:
                own = self.kernel._own()
        if first:
            numbers = first + self.numbers
            if own.numbers != numbers or 0 in first:  # 0.0 and -0.0 are equal
                self.kernel._set_numbers(own, numbers)
        elif own.numbers is not self.numbers:
            if self._resets == _MOST_RESETS:
                own = self.kernel.new_object()
                self._own, self._eventless = (get_ident(), own), None
            self._resets += 1
            self.kernel._set_numbers(own, self.numbers)
        own.set_memory(memory)
        prepared = self._eventless
        if prepared is not None and prepared[0] is own and prepared[1] is queue and not prepared[2]():
            return
        try:
            event = self._enqueue(queue, own.kernel, self.sizes, self.local)
        except self.kernel.failed as error:
            event = self.kernel._retry(queue, own.kernel, self.sizes, self.local, error)
        if not self.kernel.launched:
            self.kernel.launched = True
            self.kernel.program.after_first_launch(event)
        if self._driver is not None and prepared is None:
            self._eventless = own, queue, _eventless(self._driver, queue, own.kernel, self.sizes, self.local)


class Prepared:
    """A launch with its own kernel object, whose arguments stay set: ``call()`` only enqueues. Replays consist of these.

    It is made from the arguments of a launch observer. ``set(index, value)`` changes an argument for later launches. If ``answers``,
    ``call()`` returns a status instead of raising; on a status other than 0, ``observed()`` launches again or raises the error.
    """

    __slots__ = ("_object", "_set_number", "answers", "call", "kernel", "local", "queue", "sizes")

    def __init__(self, kernel: Kernel, queue: Any, sizes: tuple[int, ...], local: tuple[int, ...] | None, args: Sequence[Any]):
        self.kernel, self.queue, self.sizes, self.local = kernel, queue, sizes, local
        self._object = kernel.program.make(kernel.name)
        # set_arg first tries to convert a number to each kind of memory object, which takes 25 us
        self._set_number = getattr(self._object, "_set_arg_buf", self._object.set_arg)
        for index, value in enumerate(kernel._driver_arguments(queue, tuple(args))):
            self.set(index, value)
        function = kernel.program.state.eventless
        self.answers = function is not None
        args = (queue, self._object, sizes, local)
        self.call: Callable[[], Any] = partial(kernel.enqueue, *args) if function is None else _eventless(function, *args)

    def observed(self) -> Any:
        """Launch as eager code does, on the profiling queue if there is one; returns the event."""
        flush_waiting(self.queue)
        target = self.queue if hooks.launch_queue is None else hooks.launch_queue(self.queue)
        return self.kernel.enqueue(target, self._object, self.sizes, self.local)

    def set(self, index: int, value: Any) -> None:
        """Set an argument: a buffer, local memory, or a number, which is converted to the declared type."""
        kind = self.kernel.kinds[index]
        if callable(kind):
            self._set_number(index, kind(value))
        else:
            self._object.set_arg(index, value)


_FORMAT = "2"  # of the binary store; 1 contained binaries of running kernels, which PoCL cannot load


def _binary_key(device: Any, source: str, options: tuple[str, ...]) -> str:
    platform = device.platform
    parts = (_FORMAT, source, "\0".join(options), device.name, device.driver_version, device.version, platform.name, platform.version)
    return hashlib.sha256("\1".join(parts).encode()).hexdigest()
