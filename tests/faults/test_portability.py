"""The child processes of tools/portability.py: a row that ends its process, or hangs, costs no other row its result."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

import portability

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    if "abort" in line:
        os.abort()
    if "leave" in line:
        sys.exit(3)
    if "hang" in line:
        time.sleep(600)
    print(json.dumps({"float32": "passed"}), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="names signals")
@pytest.mark.fault(
    "driver ends or hangs a process of the portability run",
    "a row that aborts, one that leaves, one that hangs",
    "these rows are recorded as failed; all others have their results",
)
def test_a_row_that_ends_its_process_costs_no_other():
    names = ["a", "abort", "b", "leave", "c", "hang", "d"]
    rows = portability.Children([sys.executable, "-c", CHILD], names, 2, 200.0, 2.0).rows
    assert {name: rows[name] for name in "abcd"} == {name: {"float32": "passed"} for name in "abcd"}
    assert rows["abort"] == {"float32": "failed: the process ends with SIGABRT"}
    assert rows["leave"] == {"float32": "failed: the process ends with status 3"}
    assert rows["hang"] == {"float32": "failed: no result within 2 s"}


def test_rows_under_way_at_the_end_of_the_time_are_left():
    assert portability.Children([sys.executable, "-c", CHILD], ["hang", "a"], 1, 0.0, 5.0).rows == {}
