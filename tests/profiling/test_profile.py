"""profile, EventTimer, traces, reports and wall times."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import numpy as np
import pytest

from netcl import ops
from netcl.core.device import device as using
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.profiling import EventTimer, KernelRow, compare, events, measure, profile, report, trace
from netcl.profiling.roofline import Limits, limits
from netcl.runtime.perf import timing_region
from netcl.runtime.scheduler import sibling_queue

LAUNCHES = [
    events.Launch("gemm_x", "dev", 0.0, 2e-3, (64,), (1,), 4_000_000, 8e9),
    events.Launch("<copy>", "dev", 3e-3, 4e-3, (64,), None, 1_000_000, 0.0),
    events.Launch("gemm_x", "dev", 4e-3, 5e-3, (64,), (1,), 2_000_000, 1e9),
]


@pytest.fixture
def product(cl_device):
    """A product and its sum, compiled before anybody measures."""
    a, b = Tensor.ones((33, 65)), Tensor.ones((65, 17))

    def run() -> float:
        return (a @ b).sum().item()

    run()
    return run


def test_every_kernel_is_seen_with_its_time_and_work(cl_device, product):
    with profile(roofline=False) as p, timing_region("both"):
        assert product() == product() == 33 * 65 * 17
    found = {row.name: row for row in p.rows}
    gemm = next(row for name, row in found.items() if name.startswith("gemm"))
    assert gemm.calls == 2 and gemm.flops == 2 * 2 * 33 * 65 * 17
    assert gemm.bytes >= 2 * 4 * (33 * 65 + 65 * 17 + 33 * 17)
    assert len(p.events) == sum(row.calls for row in p.rows) >= 4
    assert sum(row.share for row in p.rows) == pytest.approx(1)
    assert all(0 <= launch.start < launch.end < p.seconds + 1 for launch in p.events)
    assert [launch.start for launch in p.events] == sorted(launch.start for launch in p.events)
    assert [span.name for span in p.spans if span.lane == "regions"] == ["both"] and all(row.roofline is None for row in p.rows)
    assert gemm.name in str(p) and json.loads(json.dumps(p.to_dict()))["rows"][0] == asdict(p.rows[0])


@pytest.mark.parametrize(("causal", "pairs"), [(False, 5 * 7), (True, 1 + 2 + 3 + 4 + 5)])
def test_attention_counts_the_pairs_it_compares(cl_device, causal, pairs):
    q, k = (Tensor.ones((1, 2, rows, 8), queue=cl_device.queue) for rows in (5, 7))
    with profile(roofline=False) as p:
        ops.attention(q, k, k, None, causal=causal)[0].to_host()
    assert [row.flops for row in p.rows if row.name == "attention"] == [2 * 2 * pairs * (8 + 8)]


def test_what_is_deferred_belongs_to_the_block_it_was_written_in(cl_device):
    big = Tensor.ones((1 << 18,))
    before = big * 2.0
    with profile(roofline=False) as p:
        inside = big * 3.0 + 1.0
    assert p.events and all(launch.end <= p.seconds + 1 for launch in p.events)
    seen = len(p.events)
    assert (before.to_host()[0], inside.to_host()[0], len(p.events)) == (2.0, 4.0, seen)
    with EventTimer() as timer:
        later = big * 5.0
    assert timer.launches and later.to_host()[0] == 5.0
    assert measure(lambda: big * 7.0, repeat=2).best > 0


def test_nothing_is_left_behind(cl_device, product):
    with pytest.raises(RuntimeError, match="stop"), profile():
        raise RuntimeError("stop")
    with profile(roofline=False) as outer:
        with profile(roofline=False) as inner:
            product()
        product()
    assert len(outer.events) == 2 * len(inner.events) > 0
    assert hooks.launch_observers == [] and hooks.launch_queue is None
    product()
    assert len(outer.events) == 2 * len(inner.events)


def test_a_queue_with_timestamps_is_observed_as_it_runs(cl_device):
    from netcl.core.device import device, manager
    from netcl.runtime.scheduler import sibling_queue

    queue = sibling_queue(cl_device.queue, profiling=True)
    with device(manager.handle_of(queue)), profile(roofline=False) as p:
        assert events.timed_queue(queue) is queue
        assert (Tensor.ones((33, 65)) @ Tensor.ones((65, 17))).to_host()[0, 0] == 65
    assert any(launch.name.startswith("gemm") for launch in p.events)


def test_event_timer_counts_the_device(device):
    x = Tensor.ones((64, 64))
    with EventTimer(device) as timer:
        _ = (x @ x).to_host()
    assert 0 < timer.seconds <= timer.wall
    assert bool(timer.launches) == (device.backend == "cl")


def test_numpy_has_no_kernels_to_show():
    from netcl.core.device import device

    with device("cpu"), profile() as p:
        _ = Tensor.ones(3) + 1
    assert p.rows == [] and "0 launches" in str(p)


def test_rows_add_up_and_know_the_limit():
    gemm, copy = report.rows_of(LAUNCHES, Limits(((0, 8e9), (2_000_000, 4e9)), 6e12))
    assert (gemm.name, gemm.calls, gemm.bytes) == ("gemm_x", 2, 6_000_000)
    assert (gemm.seconds, gemm.share, gemm.gbs, gemm.gflops) == pytest.approx((3e-3, 0.75, 2.0, 3000.0))
    assert gemm.roofline == pytest.approx((8 / 6 + 0.5) / 3)  # arithmetic binds the first, memory the second, in ms of 3
    assert copy.gflops is None and copy.roofline == pytest.approx(0.125)  # its bytes fit into a cache
    lookup = events.Launch("gather", "dev", 0.0, 1e-3, (64,), None, 500_000_000, 0.0)  # of a table that it reads a few rows of
    with_lookup = report.rows_of([*LAUNCHES, lookup], Limits(((0, 8e9), (2_000_000, 4e9)), 6e12))
    assert {row.name: row.roofline for row in with_lookup} == {"gemm_x": gemm.roofline, "<copy>": copy.roofline, "gather": None}
    faster = dataclasses.replace(LAUNCHES[1], end=3e-3 + 1e-4)
    assert [row.roofline for row in report.rows_of([faster], Limits(((0, 8e9),), 6e12))] == [1.0]  # 1.25 times what was measured
    on_units = [dataclasses.replace(launch, name="gemm_wgmma") for launch in LAUNCHES]
    assert [row.roofline for row in report.rows_of(on_units, Limits(((0, 4e9),), 6e12))] == [None]


def test_no_kernel_is_faster_than_the_limit(cl_device):
    """Of small ones, whose data stay in caches, and of those of arithmetic alone."""
    if "Oclgrind" in cl_device.platform_name:
        pytest.skip("a simulator takes minutes to measure")
    x, y = (Tensor.ones((n, n), queue=cl_device.queue) for n in (64, 256))
    (x @ x + x).to_host(), (y @ y + y).to_host()
    with profile() as p:
        for _ in range(10):
            (x @ x + x).to_host(), (y @ y + y).to_host()
    assert (
        0 < max(row.roofline for row in p.rows if row.roofline is not None) <= 1
    )  # both times are measured, and on a busy machine far apart
    sizes, rates = zip(*limits(cl_device.queue).bandwidths, strict=True)
    assert sorted(sizes) == list(sizes) and sorted(rates, reverse=True) == list(rates)


def test_a_trace_has_what_perfetto_reads():
    told = json.loads(json.dumps(trace.events(LAUNCHES, [trace.Span("step", 0.0, 5e-3)])))
    kernels = [e for e in told if e["ph"] == "X" and e["cat"] == "kernel"]
    assert [(e["name"], e["ts"], e["dur"]) for e in kernels] == [("gemm_x", 0, 2000), ("<copy>", 3000, 1000), ("gemm_x", 4000, 1000)]
    assert kernels[0]["args"] == {"global": [64], "local": [1], "bytes": 4_000_000, "flops": 8e9}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in told if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in told if e["ph"] == "X"} == {"dev", "regions"}


def test_a_page_in_one_file(tmp_path):
    rows = report.rows_of(LAUNCHES)
    report.save_report(tmp_path / "r.html", rows, title="a <b>")
    page = (tmp_path / "r.html").read_text()
    assert "a &lt;b&gt;" in page and "&lt;copy&gt;" in page and "<copy>" not in page
    assert "http" not in page and "<script" not in page
    assert report.kernel_table([asdict(row) for row in rows]) == report.kernel_table(rows)
    assert report.text_table([KernelRow("k", 1, 1.0, 0, 0.0, 1.0, None, None, None)]).splitlines()[1].split() == [
        "k",
        "1",
        "1000.000",
        "100.0",
        "%",
    ]


def test_ways_are_timed_in_turns():
    order = []
    times = compare(a=lambda: order.append("a"), b=lambda: order.append("b"), repeat=3, warmup=1, calls=2)
    assert "".join(order) == "ab" + "aabb" * 3
    assert len(times["a"].rounds) == 3 and times["a"].best <= times["a"].median and times["a"].spread >= 0
    assert measure(lambda: np.ones(10), repeat=2).best > 0
    with pytest.raises(ValueError, match=r"\[measure\] repeat and calls must be at least 1; repeat=0, calls=1"):
        measure(lambda: None, repeat=0)


def test_a_replayed_step_is_seen_like_an_eager_one(cl_device):
    import netcl

    def step(x, y):
        return abs(x @ y) * 2.0  # recorded, the product alone would be one launch with the factor

    a, b = Tensor.ones((33, 65)), Tensor.ones((65, 17))
    twice = netcl.compile(step)
    for _ in range(4):
        twice(a, b)
    seen = []
    for call in (twice, step):
        with profile(roofline=False) as p:
            assert call(a, b).to_host()[0, 0] == 130
        seen.append([(launch.name, launch.flops) for launch in p.events])
    assert len(twice.graphs) == 1 and seen[0] == seen[1] and seen[0][0][1] == 2 * 33 * 65 * 17


def test_a_build_is_a_lane_of_the_trace(cl_device, monkeypatch):
    monkeypatch.setattr(hooks, "binary_store", None)
    source = "__kernel void a_kernel_of_this_test(__global float* x) { x[0] = 1.0f; }"
    with using(cl_device), profile(roofline=False) as p:
        program.get(cl_device.queue, source, "a_kernel_of_this_test")
    (span,) = p.spans
    assert span.lane == "compile" and span.name == "a_kernel_of_this_test" and 0 <= span.start <= span.end
    assert "compile" in [event["args"]["name"] for event in trace.events([], p.spans) if event["name"] == "thread_name"]


def test_a_trace_has_lanes_for_transfers_batches_and_launches(cl_device, tmp_path):
    from netcl.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(np.ones((4, 3), np.float32)), batch_size=2)
    with using(cl_device), profile(roofline=False) as p:
        for x in loader:
            (Tensor.from_host(x) * 2.0).to_host()
    assert [(copy.name, copy.bytes) for copy in p.transfers] == [("to device", 24), ("to host", 24)] * 2
    p.save_trace(tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in told if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in told if e["name"] == "thread_name"}
    spans = [(processes[e["pid"]], lanes[e["pid"], e["tid"]], e["name"]) for e in told if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in told if e["ph"] == "X")
    assert [name for process, lane, name in spans if (process, lane) == ("host", "loader")] == ["batch 0", "batch 1"]
    assert {process for process, _, _ in spans} == {"kernels", "transfers", "host"}
    kernel = p.events[0].name
    assert [name for process, lane, name in spans if lane == "launches"] == ["to device", kernel, "to host"] * 2
    loader_of_another = [name for *_, name in spans if name == "batch 2"]
    assert loader_of_another == [] and list(loader) and len(p.spans) == len([s for s in spans if s[0] == "host"])  # nobody listens now


def test_transfers_of_a_queue_with_timestamps_have_the_drivers_times(cl_device):
    queue = sibling_queue(cl_device.queue, profiling=True)
    x = Tensor.ones((1000,), queue=queue)
    with profile(cl_device, roofline=False) as p:
        (x + 1.0).to_host()
    (copy,) = [copy for copy in p.transfers if copy.name == "to host"]
    assert copy.bytes == 4000 and p.events[-1].end <= copy.start <= copy.end
