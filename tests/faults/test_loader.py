"""Worker processes of a DataLoader that raise, die, hang or lose their parent: named within seconds, and nothing is left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loader_faults.py")
SHARED = Path("/dev/shm")
ROOT = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") is not None

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="worker processes hand memory over as files do on Unix")


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(SHARED.iterdir()) if SHARED.exists() else set()
    yield
    left = (set(SHARED.iterdir()) if SHARED.exists() else set()) - before
    assert [path for path in left if "netcl" in path.name or path.name.startswith(("psm_", "pym-"))] == []


def run(*arguments, limit=120):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=limit)
    assert (done.returncode, done.stderr) == (0, "")  # workers that are no longer needed leave quietly
    return done.stdout


@pytest.mark.fault(
    "loader worker raises, dies, hangs or leaves",
    "each in a worker process",
    "named within seconds; the loader works again",
)
def test_a_worker_in_trouble_is_named(tried):
    tried(5)
    lines = run("trouble", "raises", "killed", "hangs", "leaves", "shape").splitlines()
    told = [re.fullmatch(r"(\w+): ([0-5]) batches, ([\d.]+) s: \[DataLoader\] worker 1 (.*)", line) for line in lines]
    assert all(told) and all(float(line[3]) < 10 for line in told), lines
    # A sudden end is noticed before what the other worker still has in hand; everything else is told in its turn.
    assert all(line[2] == "5" for line in told if line[1] not in ("killed", "leaves")), lines
    reasons = {line[1]: line[4] for line in told}
    assert re.match(r"raised KeyError: 'no such picture'; pid=\d+, batch=5", reasons["raises"])
    assert re.match(r"was killed by SIGKILL; pid=\d+", reasons["killed"])
    assert re.match(r"hangs: it must start a sample every 1.5 s; pid=\d+, batch=5", reasons["hangs"])
    assert re.match(r"ended with exit code 3; pid=\d+", reasons["leaves"])
    assert re.match(r"raised SampleError: \[DataLoader\] sample 33 must have the shape", reasons["shape"])


@pytest.mark.fault("sample that cannot travel", "a lock in a sample", "sample and worker are named")
def test_a_sample_that_cannot_travel_is_named():
    (line,) = run("trouble", "unpicklable").splitlines()
    assert re.match(r"unpicklable: \d batches, [\d.]+ s: \[DataLoader\] worker 1 raised \w+: .*lock.*batch=5", line, re.I), line


@pytest.mark.fault(
    "loader workers killed",
    "SIGKILL at 20 seeded moments, the start of the workers among them",
    "whole batches or an error; the loader works again",
)
def test_workers_killed_at_random_moments(tried):
    tried(20)
    assert re.fullmatch(r"(SIGKILL before batch \d: (whole|told)\n){20}", run("moments", "7", "20", "SIGKILL", limit=280))


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.fault("loader workers killed or stopped", "SIGKILL and SIGSTOP at 200 seeded moments", "the same")
def test_workers_killed_and_stopped_at_two_hundred_moments(tried):
    tried(200)
    said = run("moments", "8", "200", "SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", limit=2900)
    assert re.fullmatch(r"(SIG\w+ before batch \d: (whole|told)\n){200}", said)
    assert "SIGSTOP before batch" in said and "told" in said


@pytest.mark.fault("full `/dev/shm`", "a tmpfs of 256 KB that a file fills", "batches do not need it: all arrive")
def test_a_full_dev_shm_changes_nothing():
    command = f"mount -t tmpfs -o size=256k tmpfs /dev/shm && exec {sys.executable} {SCRIPT} full_shared_memory"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=120) if ROOT else None
    if done is None or "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("a file system of one's own needs Linux and root")
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_the_number_of_workers_changes_nothing():
    assert run("agree") == "agreed\n"


def test_what_samples_draw_is_repeatable_and_differs_by_worker():
    assert run("draws") == "drawn\n"


@pytest.mark.parametrize("order", ["context-first", "workers-first"])
def test_workers_and_a_context_in_either_order(cl_device, order):
    assert run("context", cl_device.platform_name, order) == "trained\n"


@pytest.mark.fault("no room for shared memory", "a limit on file sizes", "`MemoryError` with the remedy")
def test_no_room_for_shared_memory_is_said_at_once():
    assert re.match(
        r"\[SharedBatchRingBuffer\] the memory for shared batches cannot be allocated; bytes=\d+, .*; use fewer workers", run("no_memory")
    )


@pytest.mark.fault("transform that cannot travel", "a lambda", "named with the remedy")
def test_what_cannot_travel_to_a_worker_is_said():
    assert re.search(r"worker 0 cannot be started: .*lambda.*use_shared_mem=False, which makes the workers", run("lambda_transform"))


@pytest.mark.fault("parent of workers is killed", "SIGKILL", "workers end, nothing in `/dev/shm`")
def test_workers_leave_with_their_parent():
    with subprocess.Popen([sys.executable, SCRIPT, "wait_to_be_killed"], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    """A process nobody has collected yet counts as gone."""
    try:
        os.kill(pid, 0)
        return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
