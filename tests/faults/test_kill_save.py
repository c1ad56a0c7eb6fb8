"""A process that saves after every step is killed at random instants: the newest checkpoint always loads, and every loss of every
resumed run is, to the last bit, that of a run that was never interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SCRIPT = Path(__file__).with_name("kill_save.py")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.fault("process killed while it saves", "SIGKILL at seeded moments", "the last whole checkpoint resumes")
def test_a_killed_save_never_costs_more_than_itself(tmp_path, kills, full, tried):
    if kills > 15 and not full:
        pytest.skip("half a minute of the same; --full runs it")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, str(kills), "7"], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tried(found["killed"])
    assert found["killed"] == kills and found["wrong"] == []
    assert found["seen"] == sorted(found["seen"]) and len(set(found["seen"])) > kills // 5, "the run went on between the kills"
    whole = [name for name in found["left"] if name.startswith("step-")]
    assert 1 <= len(whole) <= 4 and len(found["left"]) - len(whole) <= kills
