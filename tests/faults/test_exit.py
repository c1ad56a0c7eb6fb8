"""The end of a process whose daemon threads use a device, as those of servers do."""

import subprocess
import sys

import pytest

SCRIPT = """
import queue, sys, threading
import numpy as np
import netcl.autograd as ag
from netcl.core.device import manager
from netcl.core.tensor import Tensor

x = Tensor.from_host(manager.default(sys.argv[1]).queue, np.ones((64, 64), np.float32))
began = threading.Event()

def work():
    while True:
        y = ag.relu(ag.matmul(x, x))
        {then}
        began.set()

threading.Thread(target=work, daemon=True).start()
began.wait()
sys.exit(3)
"""


@pytest.mark.parametrize("then", ["pass", "y.to_host()", "began.set(); queue.Queue().get()"], ids=["launches", "reads", "waits"])
@pytest.mark.fault("daemon thread computes at exit", "a thread in an endless loop of ops", "the process ends in time with its own status")
def test_a_daemon_thread_that_computes_neither_hangs_nor_aborts_the_exit(cl_device, then):
    command = [sys.executable, "-c", SCRIPT.format(then=then), cl_device.platform_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and "Traceback" not in done.stderr and "terminate" not in done.stderr
