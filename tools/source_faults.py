"""Seeds faults into the source of deferral, epilogues, views, versions and guards, and checks that tests catch each of them.

    python tools/source_faults.py [--list] [NAME ...]

Each row of FAULTS replaces one text in one file of a temporary copy of the tree and runs the tests that must fail there. The tool exits
with 1 if a fault survives, and with 2 if a text no longer occurs exactly once or tests do not run. `tools/seed_faults.py` does the same
for the formulas of the op table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    """One seeded fault: ``old`` occurs once in ``file`` and becomes ``new``; ``tests`` are arguments of pytest."""

    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_FUSION, _EPILOGUE, _TENSOR, _TAPE, _CAPTURE = (
    "netcl/engine/lazy_graph.py", "netcl/ops/pending_products.py", "netcl/core/tensor.py", "netcl/autograd/tape.py",
    "netcl/replay/compiled.py",
)  # fmt: skip
_OF_FUSION = ("tests/ops/test_fusion.py",)
_IN_PLACE = ("tests/autograd/test_in_place.py",)
_REPLAYS = ("tests/runtime/test_capture.py",)

FAULTS: dict[str, Fault] = {
    # ---- fusion: what joins a kernel, and what it reads
    "a formula joins under another shape": Fault(
        "fusion", _FUSION, "return seen == node.shape and (seen == shape or", "return (seen == shape or", _OF_FUSION
    ),
    "two views of one memory are one leaf": Fault(
        "fusion", "netcl/engine/schedule.py", "return id(owner), x.shape", "return (id(owner),)", _OF_FUSION
    ),
    "readers of a computed value are not noted": Fault(
        "fusion", _FUSION, "_note_readers(_shared_values(made), self.users)", "pass", _OF_FUSION
    ),
    "making room computes what makes room": Fault(
        "fusion", _FUSION, "deferral.waiting, deferral.held = [], 0", "deferral.held = 0", _OF_FUSION
    ),
    # ---- epilogues: what a product may end in
    "a pending product forgets its view": Fault(
        "epilogues", _EPILOGUE, "(*before, in_shape(t, shape), *after)", "(*before, t, *after)", _OF_FUSION
    ),
    "a bias follows the last axis of the view": Fault(
        "epilogues", _EPILOGUE, "seen == root.shape and root.by_column", "seen == of.shape and root.by_column", _OF_FUSION
    ),
    "a scale comes before the bias": Fault(
        "epilogues", _EPILOGUE, "if scale != 1 or bias is not None or not epilogue.plain", "if scale != 1 or not epilogue.plain", _OF_FUSION
    ),
    "a second activation replaces the first": Fault(
        "epilogues",
        _EPILOGUE,
        "return None if epilogue.activation or epilogue.result else",
        "return None if epilogue.result else",
        _OF_FUSION,
    ),
    # ---- views: memory under another shape
    "a view has writes of its own": Fault(
        "views", _TENSOR, "view.source, view.writes = x.source, writes", "view.source = x.source", _IN_PLACE
    ),
    "a view of a pending value has writes of its own": Fault(
        "views", _TENSOR, "        view.writes = writes\n        return view", "        return view", _IN_PLACE
    ),
    "a pending value keeps the shape it was computed in": Fault("views", _TENSOR, "memory.reshape(self.shape) if", "memory if", _OF_FUSION),
    "a value per row is read without its axes": Fault(
        "views",
        "netcl/engine/fused_kernel.py",
        "with_shape(x.made, space.kept) if x.narrow and space is not None else x.made",
        "x.made",
        _OF_FUSION,
    ),
    # ---- versions: writes in place
    "backward reads what was written": Fault(
        "versions", _TAPE, "if x.writes is not None and x.writes.last > order:", "if x.writes is None:", _IN_PLACE
    ),
    "a write is noted on one tensor only": Fault(
        "versions", "netcl/core/writes.py", "stamp(t.writes, now)", "t.writes = Writes((now,))", _IN_PLACE
    ),
    "a write does not wait for readers": Fault(
        "versions", _TENSOR, "        self._compute_readers()\n        wrote((self,))", "        wrote((self,))", _OF_FUSION
    ),
    "a result with a history is written": Fault("versions", _TENSOR, 'hooks.call("changing_history", self)', "pass", _IN_PLACE),
    # ---- guards: what a replay rests on
    "guards always hold": Fault("guards", _CAPTURE, "if not guards.hold():", "if False:", _REPLAYS),
    "every argument may move": Fault(
        "guards",
        _CAPTURE,
        "if not program.trusted[i] and (t.realize() if t.memory is None else t.memory) is not program.buffers[i]:",
        "if False:",
        _REPLAYS,
    ),
    "settings may change": Fault("guards", _CAPTURE, "if case.changed(settings):", "if False:", ("tests/runtime/test_capture_changes.py",)),
    "two runs need not agree": Fault(
        "guards", _CAPTURE, "if unlike and not excused:", "if False:", ("tests/runtime/test_compile_scenes.py",)
    ),
}


def misfits() -> list[str]:
    """Rows that no longer fit the tree: the text must occur exactly once, and the tests must exist."""
    found = []
    for name, fault in FAULTS.items():
        times = (ROOT / fault.file).read_text().count(fault.old)
        if times != 1:
            found.append(f"{name}: {fault.old!r} occurs {times} times in {fault.file}")
        found += [f"{name}: there is no {test}" for test in fault.tests if test.startswith("tests/") and not (ROOT / test).exists()]
    return found


def caught(fault: Fault) -> bool:
    """Whether the fault makes one of its tests fail, in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("netcl", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / fault.file
        target.write_text(target.read_text().replace(fault.old, fault.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "NETCL_CACHE_DIR": str(copy / "cache")}
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if ran.returncode not in (0, 1):
        print(ran.stdout[-2000:], ran.stderr[-2000:])
        sys.exit(2)
    return ran.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("names", nargs="*", help="faults to seed; all without")
    options = parser.parse_args()
    if options.list:
        print(*(f"{fault.area}: {name}" for name, fault in FAULTS.items()), sep="\n")
        return 0
    if wrong := misfits():
        print(*wrong, sep="\n")
        return 2
    survived = 0
    for name in options.names or FAULTS:
        ok = caught(FAULTS[name])
        survived += not ok
        print(f"{'caught' if ok else 'SURVIVED'}: {name}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
