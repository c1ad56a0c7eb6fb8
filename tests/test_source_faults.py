"""The table of seeded faults still fits the tree; seeding them takes `python tools/source_faults.py`."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

PATH = Path(__file__).parent.parent / "tools/source_faults.py"


def test_every_seeded_fault_still_has_its_place():
    spec = importlib.util.spec_from_file_location("source_faults", PATH)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.misfits() == []
    assert all(fault.old != fault.new for fault in tool.FAULTS.values())
    assert Counter(fault.area for fault in tool.FAULTS.values()) == dict.fromkeys(("fusion", "epilogues", "views", "versions", "guards"), 4)
