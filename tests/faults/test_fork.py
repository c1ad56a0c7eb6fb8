"""Forking with a live context: the parent goes on, the child is told at once what to do instead."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import os, sys, traceback
import numpy as np
from netcl.core.device import manager
from netcl.core.errors import DeviceError
from netcl.core.tensor import Tensor

handle = manager.default(sys.argv[1])
t = Tensor.from_host(handle.queue, np.arange(4, dtype=np.float32))
leased = Tensor.zeros((1000,), queue=handle.queue)

def use():
    {use}

child = os.fork()
if child == 0:
    del leased  # destructors must not touch the parent's driver
    try:
        use()
    except DeviceError as error:
        sys.stdout.write(str(error) + "\\n")
        sys.stdout.flush()
        os._exit(5)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
t.fill_(3)
assert t.tolist() == [3.0] * 4
assert Tensor.zeros((2,), queue=handle.queue).tolist() == [0, 0]
"""
USES = {
    "allocate": "Tensor.empty((1 << 20,), queue=handle.queue)",
    "pooled": "Tensor.zeros((1000,), queue=handle.queue)",
    "upload": "Tensor.from_host(handle.queue, [1.0])",
    "download": "t.to_host()",
    "device": "manager.default('cl')",
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.fault("process forks with a live context", "`os.fork`", "`DeviceError` in the child; the parent goes on")
def test_the_child_is_told_and_the_parent_goes_on(cl_device, use):
    script = textwrap.dedent(SCRIPT).replace("{use}", USES[use])
    run = subprocess.run([sys.executable, "-c", script, cl_device.platform_name], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "forked" in run.stdout
    assert "spawn" in run.stdout


def test_the_child_may_use_numpy(cl_device):
    use = "assert Tensor.zeros((2,), device='cpu').tolist() == [0, 0]; raise DeviceError('fine')"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).replace("{use}", use), cl_device.platform_name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


def test_workers_first_then_the_context(cl_device):
    script = textwrap.dedent("""
        import os, sys
        import netcl
        from netcl.core.device import manager
        from netcl.core.tensor import Tensor
        child = os.fork()
        handle = manager.default(sys.argv[1])
        assert Tensor.ones((2,), queue=handle.queue).tolist() == [1, 1]
        if child:
            _, status = os.waitpid(child, 0)
            assert status == 0
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, cl_device.platform_name], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert run.returncode == 0, run.stderr
