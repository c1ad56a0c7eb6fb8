"""A stand-in for pyopencl that counts allocations, builds, launches, transfers and waits, and lets any fail with the driver's own error.

netcl needs no hook for it: it is put where :func:`netcl.core.platforms.opencl` keeps the module.
"""

from contextlib import contextmanager
from types import ModuleType

from netcl.core import platforms
from netcl.core.hooks import hooks
from netcl.core.kernels import program

__name__ = "pyopencl.failing"  # netcl.compile follows the user's functions, and these are not

#: The class of pyopencl that carries each status.
CLASSES = {"OUT_OF_RESOURCES": "RuntimeError", "MEM_OBJECT_ALLOCATION_FAILURE": "MemoryError", "INVALID_OPERATION": "LogicError"}


class Driver(ModuleType):
    """pyopencl with calls that fail: ``fails(kind, what)`` returns the status of the call that is about to be made, or nothing."""

    def __init__(self, real):
        super().__init__("pyopencl")
        self._real, self.fails, self.calls = real, _never, []
        self._wrap_objects()
        for kind, names in {"launch": ("nd_range_kernel", "barrier", "marker"), "transfer": ("copy", "fill_buffer", "map_buffer")}.items():
            for name in names:
                setattr(self, f"enqueue_{name}", self._counted(kind, getattr(real, f"enqueue_{name}")))

    def __getattr__(self, name):
        return getattr(self._real, name)

    def call(self, kind, what=""):
        self.calls.append(kind)
        status = self.fails(kind, what)
        if status:
            record = self._real._cl._ErrorRecord(msg="injected", code=getattr(self._real.status_code, status), routine=kind)
            raise getattr(self._real, CLASSES[status])(record)

    def _counted(self, kind, function):
        def counted(*args, **more):
            self.call(kind)
            return function(*args, **more)

        return counted

    def _wrap_objects(self):
        driver, real = self, self._real

        class Buffer(real.Buffer):
            def __init__(self, *args, **more):
                driver.call("allocate")
                super().__init__(*args, **more)

            def get_sub_region(self, *args):
                driver.call("allocate")
                return super().get_sub_region(*args)

        class Program(real.Program):
            def __init__(self, *args):
                super().__init__(*args)
                self.text = str(args[1:])

            def build(self, *args, **more):
                driver.call("build", self.text)
                return super().build(*args, **more)

        def kernel(built, name):
            driver.call("build", f"{built.text} {name}")
            return real.Kernel(built, name)

        class CommandQueue(real.CommandQueue):
            def finish(self):
                driver.call("wait")
                super().finish()

        self.Buffer, self.Program, self.Kernel, self.CommandQueue = Buffer, Program, kernel, CommandQueue

    @contextmanager
    def failing(self, fails):
        """Inside, ``fails(kind, what)`` decides; ``calls`` are counted from 0."""
        self.calls, self.fails = [], fails
        try:
            yield
        finally:
            self.fails = _never

    def failing_at(self, number, status, once):
        """The call of this number fails inside; without ``once``, so does every later one."""

        def fails(kind, what):
            at = len(self.calls)
            return status if at == number or (at > number and not once) else ""

        return self.failing(fails)


def _never(kind, what):
    return ""


def install():
    """Put the stand-in in pyopencl's place, for the whole process."""
    platforms._state.module = Driver(platforms.opencl())
    program._loader_function = _no_function  # launches without an event go past pyopencl: with this all go through it
    hooks.binary_store = None
    return platforms._state.module


def _no_function(name):
    return None
