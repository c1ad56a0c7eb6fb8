"""Profiling that stays on: what it keeps per launch is bounded."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import netcl as nc
from netcl import profiling


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.fault("profiling left on", "a million launches in windows of ten thousand", "every launch is counted; memory returns")
def test_a_million_launches_are_counted_and_leave_no_memory(cl_device):
    x = nc.ones((64,), device=cl_device)
    marks = []
    for window in range(100):
        with profiling.profile() as run:
            for _ in range(10_000):
                x + 1.0
            nc.synchronize(cl_device)
        assert sum(row.calls for row in run.rows) >= 10_000, window
        del run
        gc.collect()
        marks.append(resident())
    assert marks[-1] - marks[20] < 50, marks[::10]
