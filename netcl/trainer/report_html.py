"""The report of a run: one self-contained HTML page without scripts."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.errors import message
from netcl.core.notebook import html_table
from netcl.io import FileError
from netcl.io.archive import read_arrays, replacing
from netcl.profiling import report as kernels
from netcl.trainer import plot
from netcl.trainer.logs import read_jsonl
from netcl.trainer.recipe import Recipe
from netcl.trainer.run import read_json

PAGE_STYLE = """
:root { color-scheme: light dark; --line: #d8dce3; --dim: #5d6675; --back: #fff; --text: #1b2330; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --line: #39414e; --dim: #9aa4b2; --back: #14181f; --text: #e6e9ee; --card: #1c222b; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1040px; padding: 24px; }
body { background: var(--back); color: var(--text); }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 10px; }
.dim { color: var(--dim); }
.facts, .charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-top: 16px; }
.charts { grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); }
.facts div, .charts figure { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.facts b { display: block; font-size: 22px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { border: 1px solid var(--line); padding: 3px 8px; text-align: left; }
.samples { display: flex; flex-wrap: wrap; gap: 10px; }
.samples figure { background: var(--card); border-radius: 6px; padding: 6px; text-align: center; font-size: 12px; }
.samples img { width: 72px; height: 72px; image-rendering: pixelated; display: block; margin: auto; }
.samples .wrong { outline: 2px solid #d9622b; }
pre { white-space: pre-wrap; background: var(--card); padding: 12px; border-radius: 8px; }
"""


def write_report(folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, by default as ``report.html`` in its folder, and return its path."""
    target = Path(folder) / "report.html" if path is None else Path(path)
    text = page(folder).encode(errors="replace")  # a class may have the name of a folder that is no UTF-8
    special = target.exists() and not target.is_file()  # /dev/stdout
    with open(target, "wb") if special else replacing(target) as file:
        file.write(text)
    return target


def page(folder: str | os.PathLike[str]) -> str:
    """Return the report of a run as HTML."""
    config = read_json(folder, "config.json")
    if "title" in config:  # of the Report callback
        title = str(config.pop("title"))
    else:
        config = {**Recipe().to_dict(), **config}
        title = f"{config['data']} / {config['model']}"
    with _reading(folder, "log.jsonl"):
        curves = _section("Curves", f'<div class="charts">{_charts(read_jsonl(Path(folder) / "log.jsonl"))}</div>')
    finished = all((Path(folder) / name).exists() for name in ("results.json", *(["profile.json"] if "data" in config else [])))
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(_finished(folder, curves) if finished else ("<p class='dim'>This run is not finished.</p>", curves)),
        _section("Settings", _table(config)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    style = f"<style>{PAGE_STYLE}{plot.PLOT_STYLE}{kernels.REPORT_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}{style}</head><body>{''.join(parts)}</body></html>\n"


def _finished(folder: str | os.PathLike[str], curves: str) -> list[str]:
    """Return the sections of the page about a finished run; ``curves`` is the HTML of its charts."""
    results = read_json(folder, "results.json")
    with _reading(folder, "results.json"):
        place, classes = results["environment"], [str(name) for name in results["classes"]]
        head = [f"<p class='dim'>{html.escape(place['device'])}, {html.escape(place['finished'])}</p>", _facts_html(results)]
        text = _section("Text", f"<pre>{html.escape(results['text'])}</pre>") if "text" in results else ""
        where = _section("Environment", _table(place))
        spent = results.get("phases", {})
        total = sum(spent.values())
        rows = [[name, f"{seconds:.2f}", f"{seconds / total:.0%}"] for name, seconds in spent.items()] if total else []
        phases = _section("Time by phase", _grid(("phase", "seconds", "share"), rows)) if rows else ""
    with _reading(folder, "samples.npz"):
        predictions = _predictions(Path(folder) / "samples.npz", classes)
    slowest = ""
    if (Path(folder) / "profile.json").exists():  # the Report callback makes none on the NumPy backend
        with _reading(folder, "profile.json"):
            table = kernels.kernel_table(read_json(folder, "profile.json")["rows"][:15])
            slowest = _section("Slowest kernels", f'<div class="scroll">{table}</div>')
    return [*head, curves, *predictions, text, phases, slowest, where]


@contextmanager
def _reading(folder: str | os.PathLike[str], name: str) -> Iterator[None]:
    """Convert errors that a block raises for invalid content of a run's file ``name`` to a ``FileError`` that names the file."""
    try:
        yield
    except FileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as fault:
        what = f"{name} cannot be read: {type(fault).__name__}: {fault}".splitlines()[0]
        raise FileError(message("report", what, "restore the file, or repeat the run", folder=folder)) from fault


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _facts_html(results: Mapping[str, Any]) -> str:
    shown = {f"test {name}": value for name, value in results["test"].items()} | results.get("last_epoch", {})
    numbers = {
        name: "nan" if value is None else f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}" for name, value in shown.items()
    }
    best = results.get("best") or {}
    numbers |= {"weights of epoch": f"{best['epoch']} of {best['of']}"} if best else {}
    numbers |= {"device memory": f"{results['memory'] / 2**20:,.0f} MiB"} if results.get("memory") else {}
    numbers |= {"steps": f"{results['steps']:,}", "parameters": f"{results['parameters']:,}", "training": f"{results['seconds']:.1f} s"}
    return f'<div class="facts">{"".join(f"<div>{html.escape(name)}<b>{value}</b></div>" for name, value in numbers.items())}</div>'


def _charts(rows: Sequence[Mapping[str, Any]]) -> str:
    epochs = [row for row in rows if row["kind"] == "epoch"]
    charts = []
    for name in [name for name in epochs[-1] if f"val_{name}" in epochs[-1]] if epochs else ():
        lines = {"train": _points_of(epochs, name), "validation": _points_of(epochs, f"val_{name}")}
        charts.append(plot.line_chart(name, lines, "epoch"))
    steps = [row for row in rows if row["kind"] == "step"]
    columns = (("loss of every step", "loss", "losses"), ("learning rate", "lr", "lrs"), ("gradient norm", "grad_norm", ""))
    for title, name, listed in columns:
        charts.append(plot.line_chart(title, {name: [point for row in steps for point in _per_step(row, name, listed)]}, "step"))
    charts.append(plot.line_chart("samples per second", {"training": _points_of(epochs, "samples_per_second")}, "epoch"))
    return "".join(charts)


def _per_step(row: Mapping[str, Any], name: str, listed: str) -> list[tuple[float, float]]:
    """Return points (step, value) of a log row: the list ``row[listed]``, one value per batch since the previous row, or ``row[name]``."""
    values = row.get(listed) or [row.get(name)]
    first = row.get("since", row["step"]) if len(values) > 1 else row["step"]
    apart = (row["step"] - first) / max(1, len(values) - 1)  # 1, or a part of it where several batches make a step
    return [(first + i * apart, value) for i, value in enumerate(values) if value is not None]


def _points_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["epoch"] + 1, row[name]) for row in rows if row.get(name) is not None]


def _predictions(path: Path, classes: Sequence[str]) -> list[str]:
    if not path.exists():
        return []
    kept = read_arrays(path, "report")
    if "targets" in kept:
        return _residuals(kept)
    matrix = _section("Confusion matrix", f'<div class="scroll">{plot.confusion_table(kept["confusion"], classes)}</div>')
    rows = list(zip(kept["labels"], kept["chosen"], kept["likely"], strict=True))
    if "images" not in kept:
        wrong = [[row + 1, classes[label], classes[chosen], f"{likely:.0%}"] for row, (label, chosen, likely) in
                 zip(kept["rows"], rows, strict=True) if label != chosen]  # fmt: skip
        return [matrix, _section("Worst mistakes", _grid(("test row", "true", "chosen", "probability"), wrong))]
    samples = [_sample(image, classes, *row) for image, row in zip(kept["images"], rows, strict=True)]
    wrong_first = '<p class="dim">Test images: mistakes first, those the model is surest of at the front.</p>'
    return [matrix, _section("Predictions", f'{wrong_first}<div class="samples">{"".join(samples)}</div>')]


def _residuals(kept: Mapping[str, np.ndarray]) -> list[str]:
    """Return the sections of a regression: charts of outputs and residuals over the targets, and the largest residuals."""
    targets, outputs = (kept[name].reshape(len(kept[name]), -1) for name in ("targets", "outputs"))
    pairs = list(zip(targets.ravel().tolist(), outputs.ravel().tolist(), strict=True))
    apart = [(target, output - target) for target, output in pairs]
    charts = plot.scatter_chart("predicted over true", pairs, "true") + plot.scatter_chart("residuals", apart, "true", None)
    worst = []
    for row, column in zip(kept["rows"], kept.get("columns", [0] * len(kept["rows"])), strict=True):
        true, predicted = targets[row, column], outputs[row, column]
        place = [row + 1] if targets.shape[1] == 1 else [row + 1, column + 1]
        worst.append([*place, f"{true:.6g}", f"{predicted:.6g}", f"{predicted - true:+.4g}"])
    header = ("test row", *([] if targets.shape[1] == 1 else ["output"]), "true", "predicted", "difference")
    return [_section("Residuals", f'<div class="charts">{charts}</div>'), _section("Worst mistakes", _grid(header, worst))]


def _grid(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return f'<div class="scroll">{html_table("", header, rows)}</div>' if rows else "<p class='dim'>None.</p>"


def _sample(image: np.ndarray, classes: Sequence[str], true: int, predicted: int, likely: float) -> str:
    label, chosen = classes[true], classes[predicted]
    shown = image[0] if len(image) == 1 else np.ascontiguousarray(image[:3].transpose(1, 2, 0))
    caption = html.escape(chosen if chosen == label else f"{chosen}, is {label}")
    kind = "" if chosen == label else ' class="wrong"'
    picture = f'<img alt="{html.escape(label)}" src="{plot.png(shown)}">'
    return f'<figure{kind}>{picture}{caption}<br><span class="dim">{likely:.0%}</span></figure>'


def _table(values: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in values.items() if value not in ("", {}, None)}
    rows = "".join(
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>" for name, value in shown.items()
    )
    return f'<div class="scroll"><table>{rows}</table></div>'
