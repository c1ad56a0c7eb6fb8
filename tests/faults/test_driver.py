"""Driver calls that fail: any allocation, build, launch or transfer of a training step, with every kind of error, at every place."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("driver_faults.py")


def run(target, *commands):
    done = subprocess.run([sys.executable, SCRIPT, target, *commands], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_training_step_survives_the_failure_of_each_of_its_driver_calls(cl_device, request):
    eager, compiled, recorded, wide = run(
        request.node.callspec.params["cl_device"].selector,
        "sweep:eager:INVALID_OPERATION:once",
        "sweep:compiled:OUT_OF_RESOURCES:always",
        "sweep:recorded:INVALID_OPERATION:once",
        "sweep:wide:MEM_OBJECT_ALLOCATION_FAILURE:always",
    )
    for line in (eager, compiled, recorded, wide):
        calls, told = map(int, re.fullmatch(r".*: (\d+) calls, (\d+) told", line).groups())
        assert calls == told >= 10, line


def test_what_a_second_attempt_mends_is_not_told(cl_device, request):
    (line,) = run(request.node.callspec.params["cl_device"].selector, "sweep:eager:OUT_OF_RESOURCES:once")
    calls, told = map(int, re.fullmatch(r".*: (\d+) calls, (\d+) told", line).groups())
    assert told < calls / 2, line


def test_every_program_and_kernel_object_may_fail_once(cl_device, request):
    (line,) = run(request.node.callspec.params["cl_device"].selector, "cold")
    assert int(line.split()[0]) >= 10


def test_every_way_to_make_and_to_read_a_tensor_survives_a_failure(cl_device, request):
    lines = run(request.node.callspec.params["cl_device"].selector, "doors")
    kinds = {kind for line in lines for kind in line.split(": ")[1].split()}
    assert kinds >= {"allocate", "launch", "transfer"} and len(lines) == 8
