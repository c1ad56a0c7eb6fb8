"""Driver calls that fail: any allocation, build, launch or transfer of a training step, with every kind of error, at every place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("driver_faults.py")


def run(target, *commands):
    done = subprocess.run([sys.executable, SCRIPT, target, *commands], capture_output=True, text=True, timeout=280)
    said = "".join(line for line in done.stderr.splitlines(True) if "[share] an array is kept for good" not in line)
    assert (done.returncode, said) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def target(cl_device, request):
    return request.node.callspec.params["cl_device"].selector


@pytest.mark.fault(
    "driver call of a training step fails",
    "every allocation, launch and transfer in turn, three statuses, once and for good; eager, compiled, while recording",
    "netcl error with op and remedy; parameters, moments and counts all old or all new; saved, trained on, no memory kept",
)
def test_a_training_step_survives_the_failure_of_each_of_its_driver_calls(target, tried):
    lines = run(
        target,
        "sweep:eager:INVALID_OPERATION:once",
        "sweep:compiled:OUT_OF_RESOURCES:always",
        "sweep:recorded:INVALID_OPERATION:once",
        "sweep:wide:MEM_OBJECT_ALLOCATION_FAILURE:always",
        "sweep:eager:OUT_OF_RESOURCES:once",
    )
    *told, mended = [tuple(map(int, re.fullmatch(r".*: (\d+) calls, (\d+) told", line).groups())) for line in lines]
    tried(sum(calls for calls, _ in (*told, mended)))
    assert all(calls == errors >= 5 for calls, errors in told), lines
    assert mended[1] < mended[0] / 2, mended  # a second attempt, after the pools were emptied, succeeds


@pytest.mark.fault(
    "driver fails to build, copy, map, cut memory or wait",
    "every program and kernel object once; every call of transfers, pinned and shared memory, streams, waits",
    "netcl error; the next call works, no memory kept",
)
def test_every_program_and_every_way_to_make_and_read_a_tensor_survives_a_failure(target, tried):
    cold, *doors = run(target, "cold", "doors")
    kinds = {kind for line in doors for kind in line.split(": ")[1].split()}
    assert kinds >= {"allocate", "launch", "transfer", "wait"} and len(doors) == 9
    tried(int(cold.split()[0]) + sum(len(line.split()) - 1 for line in doors))
    assert int(cold.split()[0]) >= 10  # programs and kernel objects
