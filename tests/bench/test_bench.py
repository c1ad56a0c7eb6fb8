"""The way times are taken and told; nothing here depends on how fast anything is."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from netcl.bench import Setting, Way, interleave, setting
from netcl.core.hooks import hooks

ROOT = Path(__file__).parent.parent.parent


def script(path: str):
    folder = str((ROOT / path).parent)
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


comparison = script("benchmarks/comparison.py")
Case, Comparison, measure = comparison.Case, comparison.Comparison, comparison.measure
problems, steps, layers = (script(f"benchmarks/{name}.py") for name in ("problems", "steps", "layers"))


@pytest.fixture
def here():
    return setting("cpu", repeats=1, with_torch=False)


def sleeping(milliseconds: float, value: float) -> Way:
    return Way(lambda: time.sleep(milliseconds / 1e3), result=lambda: [np.array([value])])


def test_a_ratio_is_judged_by_its_target(here):
    targets = {"cpu": 0.6}
    case = Case(
        "nap", lambda where: {"ours": sleeping(2, 1.0), "torch": sleeping(20, 1.0)}, [Comparison(targets=targets)], work={"flop": 10.0}
    )
    (row,) = measure(case, here)
    assert row["met"] is True and row["ratio"] < 0.6 and row["flop_per_s"] == pytest.approx(10 / row["ours_s"])
    slow = Case("nap", lambda where: {"ours": sleeping(20, 1.0), "torch": sleeping(2, 1.0)}, [Comparison(targets=targets)])
    assert measure(slow, here)[0]["met"] is False


def test_a_wrong_result_is_not_timed(here):
    case = Case("lie", lambda where: {"ours": sleeping(0, 1.5), "torch": sleeping(1, 1.0)}, [Comparison(targets={"cpu": 1.0})])
    (row,) = measure(case, here)
    assert row["ours_s"] is None and row["met"] is None and "differs from torch's by 0.5" in row["skipped"]


def test_what_stands_apart_is_timed_after_the_others():
    order = []
    ways = {
        name: Way(lambda name=name: order.append(name) or time.sleep(0.03), apart=name == "numpy") for name in ("ours", "numpy", "torch")
    }
    assert list(interleave(ways, 2)) == ["ours", "numpy", "torch"]
    assert not {"ours", "torch"} & set(order[order.index("numpy") :])


def test_no_way_always_follows_the_same_other():
    order = []
    interleave({name: Way(lambda name=name: order.append(name) or time.sleep(0.06)) for name in "abc"}, 4)
    turns = [name for name, _ in itertools.groupby(order)]
    assert len({before for before, name in itertools.pairwise(turns) if name == "a"}) == 2


def test_an_absent_yardstick_is_told_and_ours_is_timed(here):
    (row,) = measure(problems.softmax(8, 16), here)
    assert row["ours_s"] > 0 and row["skipped"] == "torch: torch is not installed"


def test_what_is_put_off_is_computed_within_the_time(cl_device, monkeypatch):
    where = Setting(cl_device, repeats=1)
    x = where.tensor(np.ones(1 << 16, np.float32))
    launched = []
    monkeypatch.setattr(hooks, "launch_observers", [lambda kernel, *rest: launched.append(kernel.name)])
    where.ours(lambda: x * 2 + 1).run()
    assert launched


def test_targets_may_name_a_platform(here):
    pair = Comparison(yardstick=None, targets={"numpy": 3.0, "cpu": 1.0})
    assert comparison._target_for(pair, here.handle) == (3.0 if "numpy" in here.handle.platform_name.lower() else 1.0)


@pytest.mark.parametrize("case", [
    problems.matmul(5, 6, 7, "ab", 2), problems.conv(2, 3, 8, 4, 3, 2, "weight gradient"), problems.conv(2, 3, 8, 4, dtype="bfloat16"),
    layers.chain(1 << 14), problems.total(100),
    layers.layer_norm(4, 8, True), layers.batch_norm(2, 3, 4, True), steps.mlp_step(4, [Comparison("compiled"), Comparison()]),
], ids=lambda case: case.name)  # fmt: skip
def test_cases_run_on_a_device(case, device):
    where = Setting(device, repeats=1)
    rows = measure(case, where)
    assert any(row["ours_s"] is not None for row in rows)


def test_what_became_slower_is_told():
    compare = script("benchmarks/compare.py").compare
    facts = {"commit": "x"}

    def results(**ratios):
        rows = [{"case": name, "yardstick": "torch", "ratio": ratio} for name, ratio in ratios.items()]
        return {"facts": facts, "rows": [*rows, {"case": "start", "yardstick": None, "ours_s": 1.0, "ratio": None}]}

    lost, gained = compare(results(a=1.0, b=1.0, c=1.0, d=1.0), results(a=1.09, b=1.12, c=0.5))
    assert [line.split(":")[0] for line in lost] == ["b against torch", "d against torch"] and "+12%" in lost[0]
    assert [line.split(":")[0] for line in gained] == ["c against torch"]


CHILD = """
import json, os, sys
start = int(sys.argv[1])
print("@row " + json.dumps({"facts": {"commit": "x"}, "cases": ["a", "b", "c"]}), flush=True)
for name in "abc"[start:]:
    if name == "b":
        raise ValueError("planted")
    row = {"case": name, "yardstick": None, "ours_s": 1.0, "theirs_s": None, "ratio": None, "target": None, "met": None}
    print("@row " + json.dumps({"rows": [row]}), flush=True)
"""


def test_a_case_that_fails_does_not_end_the_run(monkeypatch, tmp_path, capsys):
    run = script("benchmarks/run.py")
    started = subprocess.Popen
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda command, **options: started([sys.executable, "-c", CHILD, command[-1].split("=")[1]], **options)
    )
    out = tmp_path / "new" / "results.json"
    run.run(argparse.Namespace(list=False, limit=60, out=out))
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == ["a", "b", "c"] and rows[1]["error"] == "ValueError: planted"


def test_plots_are_well_formed_and_the_page_is_up_to_date():
    plots, page = script("tools/plots.py"), script("tools/docs_performance.py")
    picture = plots.chart("a < b", "x", "y", {"ours": [(1, 1e-3), (1024, 2.0)]}, {"dot & dot": (3.0, 0.1)}, [(1, 1), (10, 2)])
    assert {"polyline", "circle", "line", "text"} <= {node.tag.split("}")[1] for node in ElementTree.fromstring(picture).iter()}
    row = {"case": "sweep sum 1024", "yardstick": "torch", "ours_s": 1e-5, "theirs_s": 2e-5, "ratio": 0.5, "target": None, "met": None}
    facts = {
        "device": "d",
        "platform": "p",
        "cpu": "",
        "machine": "m",
        "threads": 2,
        "torch_device": "cpu",
        "versions": {},
        "commit": "c",
        "made by": "x",
    }
    made = page.render(
        "# x\n<!-- measured -->\nold\n<!-- end -->\n", [("some", {"facts": facts, "rows": [row, row | {"case": "sweep sum 2048"}]})]
    )
    assert "old" not in made[page.PAGE] and "results/some.md" in made[page.PAGE]
    assert "plots/some_sum.svg" in made[page.TABLES / "some.md"] and page.PICTURES / "some_sum.svg" in made
    cases = [row | {"case": "sum", "flop_per_s": 1e9, "bytes_per_s": 4e9, "target": 1.0, "met": True},
             row | {"case": "matmul", "flop_per_s": 1e11, "bytes_per_s": 5e9, "target": 0.1, "met": False},
             row | {"case": "memory", "unit": "bytes", "ours_s": 2.0**20}, {"case": "lost", "error": "gone | away"}]  # fmt: skip
    made = page.render("<!-- measured -->\n<!-- end -->\n", [("some", {"facts": facts, "rows": cases})])
    assert "4GB/s, 100GFLOP/s measured" in made[page.PICTURES / "some_roofline.svg"]
    table = made[page.TABLES / "some.md"]
    assert "**missed**" in table and "| 1\N{NO-BREAK SPACE}MB |" in table and "gone \\| away" in table
    steps = [row | {"case": f"{name}, step{way}"} for name in "abc" for way in ("", ", compiled")]
    made = page.render("<!-- measured -->\n<!-- end -->\n", [("some", {"facts": facts | {"versions": {"torch": "2"}}, "rows": steps})])
    bars = ElementTree.fromstring(made[page.PICTURES / "some_steps.svg"])
    assert "plots/some_steps.svg" in made[page.PAGE] and sum(node.tag.endswith("rect") for node in bars.iter()) == 2 + 6
    done = subprocess.run([sys.executable, ROOT / "tools/docs_performance.py", "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
