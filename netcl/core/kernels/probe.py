"""Builds and launches a program in a child process first, for drivers whose compiler can abort the process.

Mesa's rusticl generates code at the first launch, and LLVM aborts the process on an instruction it cannot select (22.3.6 on aarch64: every
load of halves). If the child process ends or hangs, the program is rejected and the reason is cached.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from netcl.core import env, platforms
from netcl.core.errors import KernelBuildError, message
from netcl.core.kernels.signature import parameters

_PROBE_SECONDS = 300  # a compilation that takes longer counts as an abort
_BYTES = 1 << 20  # of every buffer of a probe
_LOCAL_BYTES = 1 << 12


class CompilerAbort(KernelBuildError):
    """Raised for a program on which the driver's compiler aborts the process."""


class _Child:
    """A child process that builds and launches the programs sent to it, for one device."""

    def __init__(self, device: Any):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        command = [sys.executable, "-c", f"from {__name__} import answer_probes; answer_probes()", device.platform.name, device.name]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=env.for_child())
        atexit.register(self.close)

    def run(self, request: dict[str, Any]) -> str:
        """Build and launch a program in the child; returns why the child failed, or an empty string."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], _PROBE_SECONDS)
            if ready and self.process.stdout.readline():
                return ""
        except BrokenPipeError:
            ready = [self.process.stdout]
        return self._reason() if ready else f"the compiler takes longer than {_PROBE_SECONDS} s"

    def _reason(self) -> str:
        status = self.process.wait()
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        line_found = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "nothing")
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the process ends with {ended}, after: {re.sub(r'0x[0-9a-f]+: ?', '', line_found)[:200]}"

    def close(self) -> None:
        atexit.unregister(self.close)
        self.process.kill()
        self.process.communicate()
        self.log.close()


is_child = False  # whether this process is a child, which runs the programs itself
_children: dict[tuple[str, str], _Child] = {}
_known_aborts: dict[str, str] = {}  # by the key of the program
_lock = threading.Lock()


def check_compiles(device: Any, key: str, source: str, options: tuple[str, ...]) -> None:
    """Raise :class:`CompilerAbort` if building or launching a program ends or hangs a child process; the reason is cached under ``key``."""
    place = device.platform.name, device.name
    with _lock:
        if key not in _known_aborts:
            if place not in _children:
                _children[place] = _Child(device)
            reason = _children[place].run({"source": source, "options": options})
            if not reason:
                return
            _children.pop(place).close()
            _known_aborts[key] = reason
    what = f"the driver's compiler cannot compile this program: {_known_aborts[key]}"
    raise CompilerAbort(message("build", what, "use another device, or the NumPy backend", device=device.name))


def answer_probes() -> None:
    """Serve requests in the child process: launch every kernel of each program once, with zeroed buffers and every number 1."""
    from netcl.core.kernels import program

    global is_child
    is_child = True
    cl = platforms.opencl()
    platform_name, device_name = sys.argv[1:]
    (device,) = [d for p in platforms.cl_platforms() if p.name == platform_name for d in p.get_devices() if d.name == device_name][:1]
    context = cl.Context([device])  # held, because queues of Intel's runtime do not keep their context
    queue = cl.CommandQueue(context)
    memory = cl.tools.ImmediateAllocator(queue)(_BYTES)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            built = program.build(context, request["source"], request["options"])
            for name in built.names():
                texts = parameters(request["source"], name)
                kernel = built.kernel(name)
                local = [cl.LocalMemory(_LOCAL_BYTES) if re.search(r"\b(__)?local\b", text) else None for text in texts or ()]
                args = [local[i] if local and local[i] else 1 if callable(kind) else memory for i, kind in enumerate(kernel.kinds)]
                cl.enqueue_fill_buffer(queue, memory, bytes(4), 0, _BYTES)  # places that a kernel reads lie inside
                kernel.enqueue(queue, _with_arguments(kernel, args), kernel.required_local or (1,), kernel.required_local)
            queue.finish()
        except (cl.Error, KernelBuildError):
            pass  # an error is not an abort: the parent raises it itself
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _with_arguments(kernel: Any, args: list[Any]) -> Any:
    made = kernel.program.make(kernel.name)
    for index, (kind, value) in enumerate(zip(kernel.kinds, args, strict=True)):
        made.set_arg(index, kind(value) if callable(kind) else value)
    return made
