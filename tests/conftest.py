"""Every test that asks for a device runs on every GPU, on one OpenCL runtime for the CPU (PoCL where there is one) and on NumPy.

``--full`` takes every CPU runtime. ``NETCL_TEST=intel,numpy`` takes the devices whose id, platform or device name contains one of
the words. Simulators and software GPUs are slow and run only when named: ``NETCL_TEST=oclgrind``, ``NETCL_TEST=llvmpipe``.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from platform import machine

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
WORDS = tuple(word.strip().lower() for word in os.environ.get("NETCL_TEST", "").split(",") if word.strip())
SHORT_NAMES = {"Portable Computing Language": "PoCL"}
ONLY_WHEN_NAMED = ("oclgrind", "llvmpipe")
EVERY_RUNTIME = False  # set by --full

# What netcl does must be what tests say it does, whatever is set around them; only where they run is the caller's to choose.
THE_CALLERS = ("NETCL_TEST", "NETCL_DEVICE", "NETCL_PLATFORM_FILTER", "NETCL_VISIBLE_DEVICES", "NETCL_CACHE_DIR")
LEFT_OUT = [name for name in sorted(os.environ) if name.startswith("NETCL_") and name not in THE_CALLERS]
for name in LEFT_OUT:
    del os.environ[name]

# Tests start hundreds of processes: none shall compile the sources of netcl anew, whatever images of containers set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Kept between runs, so that only the first one compiles kernels.
os.environ.setdefault("NETCL_CACHE_DIR", str(ROOT / ".pytest_cache" / "netcl"))
if any(word in ("llvmpipe", "rusticl") for word in WORDS):
    os.environ.setdefault("RUSTICL_ENABLE", "llvmpipe")

# A shell has what it starts in the background ignore Ctrl-C, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOL: dict[str, dict[str, float]] = {
    "float64": {"rtol": 1e-12, "atol": 1e-12},
    "float32": {"rtol": 1e-5, "atol": 1e-6},
    "float16": {"rtol": 2e-3, "atol": 1e-4},
    "bfloat16": {"rtol": 1.6e-2, "atol": 1e-3},
    **{name: {"rtol": 0.0, "atol": 0.0} for name in ("int64", "int32", "uint8", "bool")},
}


@contextmanager
def eager_fusion(least: int) -> Iterator[None]:
    """Within the block, eager code defers ops from ``least`` elements on; 0 means never. Plans, which hold such decisions, are dropped."""
    from netcl.core.kernels import program
    from netcl.engine import lazy_graph

    before, lazy_graph.EAGER_FROM = lazy_graph.EAGER_FROM, least
    program.forget("plans")
    try:
        yield
    finally:
        lazy_graph.EAGER_FROM = before
        program.forget("plans")


@dataclass(frozen=True)
class Target:
    """A device tests run on: the selector that names it to netcl and the id a test report shows."""

    id: str
    selector: str
    names: str
    is_cpu: bool

    def has(self, words: tuple[str, ...]) -> bool:
        return any(word in f"{self.id} {self.names}".lower() for word in words)


NUMPY = Target("numpy", "cpu", "numpy", is_cpu=True)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _devices_of(platform) -> list:
    """A platform without devices is an error to OpenCL, and none to us."""
    from netcl.core import platforms

    try:
        return platform.get_devices()
    except platforms.opencl().Error:
        return []


@cache
def opencl_targets() -> tuple[Target, ...]:
    """The OpenCL devices, in the order of their names: workers of one run must agree on it."""
    from netcl.core import platforms

    if not platforms.available():
        return ()
    found = []
    for p, platform in enumerate(platforms.cl_platforms()):
        for d, device in enumerate(_devices_of(platform)):
            platform_name = SHORT_NAMES.get(platform.name, platform.name)
            is_cpu = bool(device.type & platforms.opencl().device_type.CPU)
            found.append(Target(_slug(f"{platform_name} {device.name}"), f"{p}:{d}", f"{platform.name} {device.name}", is_cpu))
    found.sort(key=lambda target: (target.id, target.selector))
    ids = [target.id for target in found]
    return tuple(replace(target, id=f"{target.id}-{target.selector}") if ids.count(target.id) > 1 else target for target in found)


def wanted_targets() -> list[Target]:
    if WORDS:
        return [target for target in (NUMPY, *opencl_targets()) if target.has(WORDS)]
    found = [target for target in opencl_targets() if not target.has(ONLY_WHEN_NAMED)]
    cpus = sorted((target for target in found if target.is_cpu), key=lambda target: not target.has(("pocl",)))
    left_out = [] if EVERY_RUNTIME else [target for target in cpus if target.names != cpus[0].names]
    return [NUMPY, *(target for target in found if target not in left_out)]


def first_target() -> Target:
    """The first GPU of this run, else its CPU runtime, else NumPy: what runs tests that name no device."""
    return min((target for target in wanted_targets() if target is not NUMPY), key=lambda target: target.is_cpu, default=NUMPY)


def pytest_configure(config: pytest.Config) -> None:
    global EVERY_RUNTIME
    EVERY_RUNTIME = config.getoption("--full")
    if WORDS and not wanted_targets():
        there = ", ".join(target.id for target in (NUMPY, *opencl_targets()))
        raise pytest.UsageError(f"NETCL_TEST={','.join(WORDS)} names none of the devices here: {there}")
    if not EVERY_RUNTIME:  # other runtimes, if there are any, would compile for what names no device, in each worker and each child
        os.environ.setdefault("NETCL_DEVICE", first_target().selector)
    if all("Portable Computing" in target.names for target in wanted_targets() if target != NUMPY):
        _leave_binaries_to_the_driver()


def _leave_binaries_to_the_driver() -> None:
    """PoCL keeps what it compiled on disk by itself; asking it for a binary compiles every kernel once more: half the time."""
    import netcl.runtime.cache  # noqa: F401 (it fills the place)
    from netcl.core.hooks import hooks

    hooks.binary_store = None


def _devices_line() -> str:
    line = "netcl devices: " + ", ".join(target.id for target in wanted_targets())
    return line if opencl_targets() else f"{line} only: no OpenCL runtime was found, and `netcl doctor` says how to get one"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="every CPU runtime, and what is marked `matrix` on OpenCL devices: every op in every dtype, every kernel",
    )
    parser.addoption("--soak", action="store_true", help="only what is marked `soak`: faults made many times, networks, large tensors")
    parser.addoption(
        "--fault-records", metavar="FILE", type=Path, help="keep there how often each fault was tried, and how often it ended badly"
    )


@pytest.fixture
def tried(record_property):
    """``tried(n)``: the test made its fault ``n`` times; once unless it says so."""
    return partial(record_property, "tried")


#: By test: how often its fault was tried, and how often it ended badly.
FAULTS: dict[str, dict[str, int]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "fault" in report.keywords and not report.skipped and (report.when == "call" or report.failed):
        record = FAULTS.setdefault(report.nodeid.partition("[")[0].removeprefix("tests/"), {"tried": 0, "bad": 0})
        record["tried"] += dict(report.user_properties).get("tried", 1)
        record["bad"] += report.failed


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--fault-records")
    if path and not hasattr(session.config, "workerinput"):
        known = json.loads(path.read_text()) if path.exists() else {}
        git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "netcl"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        known |= {test: {**record, "machine": machine(), "date": date, "commit": commit} for test, record in FAULTS.items()}
        path.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--full``, leave the marked part of the matrix to NumPy: on OpenCL devices it compiles for half an hour."""
    soak, full = config.getoption("--soak"), config.getoption("--full")
    kept, left = [], []
    for item in items:
        matrix = not full and item.get_closest_marker("matrix") and _target(item) != NUMPY
        (left if matrix or bool(item.get_closest_marker("soak")) != soak else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Keep the collected tests, 400,000 objects, out of garbage collections: a full one took 0.2 s, and tests of leaks request many."""
    gc.collect()
    gc.freeze()


def _target(item: pytest.Item) -> Target | None:
    values = getattr(item, "callspec", None)
    return next((values.params[name] for name in ("device", "cl_device") if values and name in values.params), None)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether ``--full`` was asked for."""
    return request.config.getoption("--full")


@pytest.fixture
def in_turn(full: bool):
    """``in_turn(items, tier, handle, turn)``: what a kernel of a tier is tried with on a device. Everything with ``--full``; else every
    eighth item, or every sixteenth where the device never chooses the tier, and at least one. The next ``turn`` takes the next items:
    kernels share them.
    """

    def choose(items, tier: str, handle, turn: int = 0) -> list:
        own = (tier == "cpu") == (handle.device_type == "cpu")
        items = list(items)
        step = 1 if full else min(8 if own else 16, len(items))
        return items[turn % step :: step]

    return choose


def pytest_report_header() -> list[str]:
    return [_devices_line(), *([f"netcl variables left out, as tests set their own: {', '.join(LEFT_OUT)}"] if LEFT_OUT else [])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not opencl_targets():
        terminalreporter.write_line(_devices_line(), yellow=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, without in (("device", None), ("cl_device", NUMPY)):
        if fixture in metafunc.fixturenames:
            targets = [target for target in wanted_targets() if target != without]
            metafunc.parametrize(fixture, targets, ids=[target.id for target in targets], indirect=True)


@pytest.fixture(scope="module", autouse=True)
def no_plans_of_other_files() -> None:
    """Start a file without the plans of op calls that earlier files made: recordings walk the plans of their queue when they look for
    memory of unknown origin. With the plans of the whole suite, that walk was most of the time of ``test_compile_scenes.py``.
    """
    from netcl.core import queue_state

    queue_state.forget("plans")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator:
    """The handle of a device, OpenCL or NumPy, made the active one for the test."""
    from netcl.core.device import device as activate

    with activate(request.param.selector) as handle:
        assert handle is not None, f"netcl does not find {request.param}"
        yield handle


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Wait for what a test launched and did not read: pytest changes ``os.environ`` after it, and PoCL, which compiles in a thread of its
    own, aborts the process if that happens while it starts the linker.
    """
    try:
        return (yield)
    finally:
        given = getattr(item, "funcargs", {})
        for handle in [given[name] for name in ("device", "cl_device") if name in given]:
            handle.queue.finish()


@pytest.fixture
def cl_device(request: pytest.FixtureRequest) -> Iterator:
    """The handle of an OpenCL device, made the active one for the test."""
    from netcl.core.device import device as activate

    with activate(request.param.selector) as handle:
        assert handle is not None and handle.backend == "cl", f"netcl does not find {request.param}"
        yield handle


@pytest.fixture
def unoptimized(cl_device) -> Iterator[None]:
    """CPUs compile without optimization, in a third of the time: for tests of kernels that a CPU runs in these tests alone.

    No later test gets such a kernel: the context's caches are what they were. PoCL 5.0 aborts when it compiles a few of them this way.
    """
    from netcl.core.kernels import program

    if cl_device.device_type != "cpu" or re.search(r"PoCL ([4-9]|\d\d)", cl_device.device.platform.version):
        yield
        return
    make, cached = program._program, program.state(cl_device.queue)
    before = dict(cached)
    program._program = lambda context, text, options, *rest, **later: make(context, text, (*options, "-cl-opt-disable"), *rest, **later)
    try:
        yield
    finally:
        program._program = make
        cached.clear()
        cached.update(before)
        program.forget("row plans")
        program.forget("plans")


@pytest.fixture
def cl_selector(request: pytest.FixtureRequest, cl_device) -> str:
    """The numbers by which a command line names ``cl_device``: two platforms may have the same name."""
    return request.node.callspec.params["cl_device"].selector


@pytest.fixture(scope="session")
def opencl_found() -> bool:
    """Whether any OpenCL device takes part in this run."""
    return any(target is not NUMPY for target in wanted_targets())


@pytest.fixture(scope="session")
def one_target() -> Target:
    """For what need not run on every device."""
    return first_target()


@pytest.fixture
def queue(device):
    """The queue of ``device``."""
    return device.queue


@pytest.fixture
def cl_queue(cl_device):
    """The queue of ``cl_device``."""
    return cl_device.queue


@pytest.fixture
def tol() -> dict[str, dict[str, float]]:
    """Tolerances by dtype, as keyword arguments of ``np.testing.assert_allclose``."""
    return TOL


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is the same in every run and differs between tests."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A NumPy generator started from ``seed``."""
    return np.random.default_rng(seed)


@pytest.fixture
def exact_product():
    """A function: the product of two stacks of matrices in float64."""

    def exact(a, b, trans_a: bool, trans_b: bool) -> np.ndarray:
        a, b = (x.to_host().astype(np.float64) for x in (a, b))
        with np.errstate(invalid="ignore"):
            return np.matmul(np.swapaxes(a, -1, -2) if trans_a else a, np.swapaxes(b, -1, -2) if trans_b else b)

    return exact
