"""Ctrl-C while a kernel runs for a minute: the process leaves with status 130 within about three seconds."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netcl.core import platforms
from netcl.core.backend.lifecycle import GRACE_SECONDS
from netcl.core.backend.opencl import interruptible_finish
from netcl.core.errors import DeviceError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

SLOW = """__kernel void slow(__global float* x, long rounds) {
  float v = x[get_global_id(0)];
  for (long i = 0; i < rounds; ++i) v = v * 0.999999f + sin(v);
  x[get_global_id(0)] = v;
}"""
START = f"""
import sys, time
import numpy as np
from netcl.core.device import manager
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.core.backend.opencl import interruptible_finish
from netcl.core.backend import lifecycle
lifecycle.GRACE_SECONDS = float(sys.argv[2])
handle = manager.default(sys.argv[1])
x = Tensor.from_host(handle.queue, np.ones(1, np.float32))
slow = program.get(handle.queue, {SLOW!r}, "slow")
slow(handle.queue, 1, None, x, 10)
x.to_host()
slow(handle.queue, 1, None, x, 100_000_000_000)
handle.queue.flush()
print("running", flush=True)
"""
ENDLESS = """__kernel void endless(__global float* x) {
  volatile int go = 1;
  while (go) x[get_global_id(0)] += 1;
}"""
WAYS = {
    "blocking read": "x.to_host()",
    "finish": "handle.queue.finish()",
    "interruptible": "interruptible_finish(handle.queue, timeout=120)",
    "python": "time.sleep(120)",
}


@contextmanager
def start(device, wait: str, grace: float = 0.5) -> Iterator[subprocess.Popen]:
    """A process whose kernel runs for an hour, with less grace than by default; it does not outlive a test that fails."""
    command = [sys.executable, "-c", textwrap.dedent(START) + wait, device.platform_name, str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            time.sleep(0.3)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.fault("Ctrl-C while a kernel runs", "SIGINT inside the driver", "status 130 within the grace time")
def test_ctrl_c_leaves_with_130(cl_device, way):
    with start(cl_device, WAYS[way], GRACE_SECONDS if way == "blocking read" else 0.5) as process:
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130
        assert time.monotonic() - begin < 10 * GRACE_SECONDS  # of an hour; the rest is for a busy machine


@pytest.mark.fault("kernel that never ends", "an endless loop, then Ctrl-C", "status 130 within the grace time; the driver ends the kernel")
def test_a_kernel_that_never_ends_is_left_by_ctrl_c(cl_device):
    if cl_device.device_type == "gpu" and "NVIDIA" not in cl_device.platform_name:
        pytest.skip("whether a GPU ends a kernel whose process is gone is up to its driver")
    launch = 'print("running", flush=True)\nendless(handle.queue, 1, None, x)\nx.to_host()'
    script = START.replace('print("running", flush=True)\n', "").replace("x, 100_000_000_000", "x, 10")
    script += f'endless = program.get(handle.queue, {ENDLESS!r}, "endless")\n{launch}'
    with subprocess.Popen([sys.executable, "-c", script, cl_device.platform_name, "0.5"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "running\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=100) == 130
        finally:
            process.kill()


@pytest.mark.fault("two Ctrl-C", "SIGINT twice", "leaves at once, 130")
def test_a_second_ctrl_c_leaves_at_once(cl_device):
    with start(cl_device, "x.to_host()", grace=1000) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130


def test_work_that_wants_to_finish_has_all_the_time_until_a_second_ctrl_c(cl_device):
    wait = "from netcl.core.backend.lifecycle import finishing_first\nwith finishing_first():\n    x.to_host()"
    with start(cl_device, wait) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # three times the grace
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130


def test_a_program_that_handles_ctrl_c_goes_on(cl_device):
    script = textwrap.dedent(START.replace("100_000_000_000", "10")) + textwrap.dedent("""
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(1)  # longer than the grace time: only a stuck driver ends a process
            print(x.to_host().shape, flush=True)
        sys.exit(7)
    """)
    with subprocess.Popen([sys.executable, "-c", script, cl_device.platform_name, "0.5"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["running\n", "ready\n"]
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "(1,)\n"
        assert process.wait(timeout=100) == 7


def test_finish_within_a_time_limit(cl_device):
    x = Tensor.ones((1,), queue=cl_device.queue)
    slow = program.get(cl_device.queue, SLOW, "slow")
    slow(cl_device.queue, 1, None, x, 1)  # a new program's first launch is waited for, to store its binary
    slow(cl_device.queue, 1, None, x, 5_000_000)
    assert interruptible_finish(cl_device.queue, timeout=0.02) is False
    assert interruptible_finish(cl_device.queue, timeout=250) is True


class _Marker:
    """An event whose status is the next of those given, then the last."""

    def __init__(self, *statuses: int):
        self.statuses = list(statuses)

    @property
    def command_execution_status(self) -> int:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def test_finish_without_threads_raises_the_drivers_error(cl_device, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert interruptible_finish(cl_device.queue) is True
    for marker, expected in ((_Marker(3, 2, 0), True), (_Marker(1), False)):
        monkeypatch.setattr(platforms.opencl(), "enqueue_marker", lambda queue, marker=marker: marker)
        assert interruptible_finish(cl_device.queue, timeout=0.05) is expected
    for status, text in ((-5, "OUT_OF_RESOURCES"), (-9999, "status -9999")):
        monkeypatch.setattr(platforms.opencl(), "enqueue_marker", lambda queue, status=status: _Marker(2, status))
        with pytest.raises(DeviceError, match=rf"\[finish\] the queue cannot finish: {text}"):
            interruptible_finish(cl_device.queue)


@pytest.mark.fault("program has a SIGINT handler", "its own", "kept")
def test_the_programs_own_handler_is_kept(cl_device):
    script = textwrap.dedent("""
        import signal, sys
        def mine(signum, frame): pass
        signal.signal(signal.SIGINT, mine)
        from netcl.core.device import manager
        from netcl.core.tensor import Tensor
        Tensor.zeros((1,), queue=manager.default(sys.argv[1]).queue)
        assert signal.getsignal(signal.SIGINT) is mine
    """)
    assert subprocess.run([sys.executable, "-c", script, cl_device.platform_name], timeout=60, env=os.environ).returncode == 0
