"""Counters of wall time."""

from __future__ import annotations

import time

import pytest

from netcl.core.errors import DeviceError
from netcl.runtime import perf
from netcl.runtime.perf import PerfCounter, timing_region


class Queue:
    def __init__(self) -> None:
        self.finished = 0

    def finish(self) -> None:
        self.finished += 1


def test_counters_add_up():
    counter = PerfCounter()
    for seconds in (0.5, 1.5):
        counter.add("step", seconds)
    total = counter["step"]
    assert (total.calls, total.seconds, total.mean, total.shortest, total.longest) == (2, 2.0, 1.0, 0.5, 1.5)
    assert "step" in str(counter)
    counter.reset()
    assert counter.totals == {}


def test_a_region_waits_for_its_queue_and_counts_failures_too():
    counter, queue = PerfCounter(), Queue()
    with counter.region("sleep", queue):
        assert queue.finished == 1
        time.sleep(0.01)
    assert queue.finished == 2 and counter["sleep"].seconds >= 0.01
    with pytest.raises(ValueError, match="stop"), timing_region("fails", counter):
        raise ValueError("stop")
    assert counter["fails"].calls == 1
    with pytest.raises(DeviceError, match=r"\[timing_region\] queue must be a queue or a device handle; queue='gpu'"):
        counter.region("named", "gpu").__enter__()


def test_the_default_counter_and_listeners():
    heard = []
    perf.listeners.append(lambda *told: heard.append(told))
    try:
        with timing_region("test_perf"):
            pass
    finally:
        perf.listeners.pop()
    assert perf.counter.totals.pop("test_perf").calls == 1
    ((name, begin, end),) = heard
    assert name == "test_perf" and end >= begin
