"""Writes docs/performance.md's summary, docs/results/ (a page per results file) and docs/plots/ from ``benchmarks/results``.

``python tools/docs_performance.py`` rewrites them; ``--check`` changes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import plots  # noqa: E402

RESULTS, PAGE, PICTURES, TABLES = ROOT / "benchmarks/results", ROOT / "docs/performance.md", ROOT / "docs/plots", ROOT / "docs/results"
MARKED = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)", re.S)
SWEEP = re.compile(r"sweep (?P<what>.+?) (?P<size>\d+)(?P<way>, .+)?$")
STEP = re.compile(r"(?P<model>[^,]+), step(?P<compiled>, compiled)?$")
SIZES = {
    "matmul": "side of the matrices",
    "conv": "images in the batch",
    "softmax": "rows of 1024",
    "ResNet-18 batch": "images in the batch",
}
#: What a results file holds, by the beginning of its name.
SUBJECTS = {
    "cases": "ops and models",
    "decode": "text generation",
    "llama": "language models against llama.cpp",
    "onnx": "ONNX sessions against onnxruntime",
    "recurrent": "recurrent layers",
    "sweep": "time against size",
    "zoo": "models of the zoo",
}
INDEX = """# Results

Each page shows one results file: every case with both times, their ratio and the target.

| page | device | commit |
|---|---|---|
"""
Pages = dict[Path, str]
Result = tuple[str, dict[str, Any]]


def results() -> list[Result]:
    """Every results file of the runner with its name."""
    read = [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [(name, content) for name, content in read if "rows" in content and "made by" in content.get("facts", {})]


def render(page: str, found: list[Result]) -> Pages:
    """The summary page, the page of each results file, and their pictures."""
    written: Pages = {}
    index = INDEX
    for name, content in found:
        written[TABLES / f"{name}.md"] = "\n".join(_page(name, content, written)).rstrip("\n") + "\n"
        index += f"| [{_subject(name)}, {name}]({name}.md) | {_runtime(content['facts'])} | {content['facts']['commit']} |\n"
    written[TABLES / "index.md"] = index
    parts = [*_summary(found), *(part for name, content in found for part in _bars(name, content, written))]
    written[PAGE] = MARKED.sub(lambda _: "\n".join([*parts, ""]), page)
    return written


def _subject(name: str) -> str:
    return SUBJECTS.get(name.partition("_")[0], name)


def _device(facts: dict[str, Any]) -> str:
    """The name of a device, without what runtimes put before it."""
    return re.sub(r"^(pthread|cpu-[\w-]+?)-(?=Intel)|\(R\)| Processor$", "", facts["device"]).replace("pthread--0xd0c", "Neoverse N1")


def _runtime(facts: dict[str, Any]) -> str:
    platform = facts["platform"].replace("(R)", "").replace("Portable Computing Language", "PoCL")
    return f"{_device(facts)} ({platform}, driver {facts.get('driver', 'none')})"


def _summary(found: list[Result]) -> list[str]:
    """One line per results file: how many cases were compared with torch, the mean ratio and how many targets were met."""
    lines = ["| results | device | cases | geometric mean of the ratio | faster than PyTorch | targets met |", "|---|---|---|---|---|---|"]
    for name, content in found:
        rows = content["rows"]
        ratios = [row["ratio"] for row in rows if row.get("yardstick") == "torch" and row.get("ratio") and row.get("unit") != "bytes"]
        if not ratios:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        met = [row["met"] for row in rows if row.get("met") is not None]
        targets = f"{sum(met)} of {len(met)}" if met else ""
        where = f"[{_subject(name)}](results/{name}.md) | {_runtime(content['facts'])}"
        lines.append(f"| {where} | {len(ratios)} | {mean:.2f} | {sum(ratio < 1 for ratio in ratios)} | {targets} |")
    return [*lines, ""]


def _bars(name: str, content: dict[str, Any], written: Pages) -> list[str]:
    """A bar chart of the training steps of models: torch's time divided by netcl's."""
    groups: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        found = STEP.match(row["case"])
        if found and row.get("ratio"):
            groups.setdefault(found["model"], {})["netcl, compiled" if found["compiled"] else "netcl, eager"] = 1 / row["ratio"]
    if len(groups) < 3:
        return []
    facts = content["facts"]
    title = f"Speed of a training step on {_device(facts)}, relative to PyTorch {facts['versions']['torch']}"
    drawn = plots.bars(title, "PyTorch's time divided by netcl's, float32; longer is faster", groups, 1.0, "PyTorch (eager)")
    return _picture(written, f"{name}_steps", drawn, title, "plots")


def _page(name: str, content: dict[str, Any], written: Pages) -> list[str]:
    facts = content["facts"]
    held = f", held to {facts['threads']} cores" if facts["threads"] else ""
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    where = f"{facts['cpu'] or facts['machine']}{held}; torch on {facts['torch_device']}; {versions}"
    made = re.sub(r" --(out|commit) \S+", "", facts["made by"])
    lines = [f"# {_subject(name).capitalize()}: {_device(facts)}", "", f"```sh\n{made}\n```", ""]
    lines += [f"{_runtime(facts)}. {where}; commit {facts['commit']}.", ""]
    sweeps = [row for row in content["rows"] if row["case"].startswith("sweep ")]
    cases = [row for row in content["rows"] if not row["case"].startswith("sweep ")]
    lines += [*_roofline(name, facts, cases, written), *_table(cases)] if cases else []
    return lines + (_sweeps(name, facts, sweeps, written) if sweeps else [])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | netcl | compared with | its time | ratio | target | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "error" in row or "skipped" in row:
            lines.append(f"| {row['case']} | | | | | | {_cell(row.get('error') or row['skipped'])} |")
            continue
        verdict = {True: "met", False: "**missed**", None: ""}[row["met"]]
        if row.get("portable_met") and not row["met"]:
            verdict += f", portable kernels' {row['portable_target']:g} met"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        target = "" if row["target"] is None else f"{row['target']:g}" if row["yardstick"] else _time(row["target"])
        told = _bytes if row.get("unit") == "bytes" else _time
        times = f"{told(row['ours_s'])} | {row['yardstick'] or ''} | {told(row['theirs_s'])}"
        lines.append(f"| {row['case']} | {times} | {ratio} | {target} | {verdict} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """A message on one line, without folders of the machine it came from."""
    text = re.sub(r"/\S*/(\w+/\w+\.py)", r"\1", text)
    return " ".join(text.replace("|", "\\|").split())[:160]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * f >= 1 or u == "us")
    return f"{seconds * factor:.3g}\N{NO-BREAK SPACE}{unit}"


def _bytes(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}\N{NO-BREAK SPACE}MB"


def _picture(written: Pages, name: str, text: str, title: str, folder: str = "../plots") -> list[str]:
    written[PICTURES / f"{name}.svg"] = text
    return [f"![{title}]({folder}/{name}.svg)", ""]


def _roofline(name: str, facts: dict[str, Any], rows: list[dict[str, Any]], written: Pages) -> list[str]:
    """Work per byte against work per second; the roof is the best that was measured, so dots show what limits each case."""
    both = [row for row in rows if row.get("flop_per_s") and row.get("bytes_per_s")]
    points = {row["case"]: (row["flop_per_s"] / row["bytes_per_s"], row["flop_per_s"]) for row in both}
    if len(points) < 2:
        return []
    # What works on a few bytes has them in a cache: the roof is that of streams.
    streams = [row["bytes_per_s"] for row in both if row["flop_per_s"] < row["bytes_per_s"]]
    bandwidth, compute = max(streams, default=max(row["bytes_per_s"] for row in both)), max(row["flop_per_s"] for row in both)
    lowest, highest, ridge = min(p[0] for p in points.values()), max(p[0] for p in points.values()), compute / bandwidth
    roof = [(lowest, lowest * bandwidth), (ridge, compute), (max(highest, ridge), compute)]
    shown = {row["case"]: points[row["case"]] for row in both if row["target"] is not None} or points
    title = f"Roofline of {facts['device']}: {plots.short(round(bandwidth, -9))}B/s, {plots.short(round(compute, -9))}FLOP/s measured"
    return _picture(written, f"{name}_roofline", plots.chart(title, "FLOP per byte", "FLOP/s", {}, shown, roof), title)


def _sweeps(name: str, facts: dict[str, Any], rows: list[dict[str, Any]], written: Pages) -> list[str]:
    """A plot of time against size for each thing that was swept."""
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        found = SWEEP.match(row["case"])
        if found is None or row.get("ours_s") is None:
            continue
        of = lines.setdefault(found["what"], {})
        of.setdefault("ours" + (found["way"] or ""), []).append((float(found["size"]), row["ours_s"]))
        if row.get("theirs_s") and not found["way"]:
            of.setdefault(row["yardstick"], []).append((float(found["size"]), row["theirs_s"]))
    made = []
    for what, series in lines.items():
        title = f"{what.removesuffix(' batch')}: time against size on {facts['device']}"
        picture = plots.chart(title, SIZES.get(what, "elements"), "seconds", series)
        made += _picture(written, f"{name}_{what.split()[0].lower()}", picture, title)
        growth = {way: _growth(points) for way, points in series.items() if len(points) > 2}
        made += [f"Over the upper half of the sizes time grows as size to the power of {_powers(growth)}.", ""] if growth else []
    return made


def _growth(points: list[tuple[float, float]]) -> float:
    """The slope between the middle and the end in logarithms: 1 is linear."""
    (x, y), (u, v) = points[len(points) // 2], points[-1]
    return math.log(v / y) / math.log(u / x)


def _powers(growth: dict[str, float]) -> str:
    return ", ".join(f"{power:.2f} ({way})" for way, power in growth.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for path, text in render(PAGE.read_text(encoding="utf-8"), results()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not options.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run python tools/docs_performance.py")
    return int(bool(options.check and stale))


if __name__ == "__main__":
    sys.exit(main())
