"""Per-kernel tables: as text, as an HTML fragment, and as a page in one file that needs no network."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from netcl.profiling.events import Launch
from netcl.profiling.roofline import Limits


@dataclass(frozen=True)
class KernelRow:
    """The times of all launches of one kernel.

    ``share`` is the fraction of all kernel time. ``gbs`` and ``gflops`` are the rates reached. ``roofline`` is the fraction of the device's
    limit that was reached: of memory or arithmetic, whichever limits the kernel. ``None`` means unknown: the limit of matrix units, or the
    bytes of a kernel that reads only a part of its buffers.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    flops: float
    share: float
    gbs: float | None
    gflops: float | None
    roofline: float | None


ReportRow = KernelRow | Mapping[str, Any]
_USES_MATRIX_UNITS = re.compile(r"(?:^|_)(?:wg)?mma(?:_|$)")  # the limit of ordinary arithmetic is not theirs
_BELIEVED = 1.5  # times the measured limit
COLUMNS = ("kernel", "calls", "ms", "share", "GB/s", "GFLOP/s", "of limit")
REPORT_STYLE = """
table.kernels { border-collapse: collapse; font: 14px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
table.kernels th, table.kernels td { padding: 2px 12px; text-align: right; border-bottom: 1px solid #8884; }
table.kernels th:first-child, table.kernels td:first-child { text-align: left; font-family: ui-monospace, monospace; }
table.kernels .bar { display: inline-block; height: 0.7em; margin-right: 6px; background: #48c; vertical-align: baseline; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 2em; font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark; }}{style}</style></head>
<body><h1>{title}</h1>
<p>{summary}</p>
{table}
</body></html>
"""


def rows_of(launches: Sequence[Launch], limits: Limits | None = None) -> list[KernelRow]:
    """Return one row per kernel, in descending order of time; without ``limits``, their ``roofline`` is ``None``."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.name, []).append(launch)
    total = sum(launch.seconds for launch in launches) or 1.0
    rows = [_kernel_row(name, of, total, limits) for name, of in found.items()]
    # Limits are what small kernels reached. One that is a little faster shows that the device can do more: it becomes the limit. One that
    # is far above does less than is counted: it reads parts of its buffers, as a lookup does, or saves multiplications, as Winograd does.
    rows = [replace(row, roofline=None) if (row.roofline or 0.0) > _BELIEVED else row for row in rows]
    most = max((row.roofline for row in rows if row.roofline is not None), default=0.0)
    if most > 1.0:
        rows = [replace(row, roofline=row.roofline and row.roofline / most) for row in rows]
    return sorted(rows, key=lambda row: -row.seconds)


def _kernel_row(name: str, launches: Sequence[Launch], total: float, limits: Limits | None) -> KernelRow:
    seconds, moved, flops = (sum(getattr(launch, of) for launch in launches) for of in ("seconds", "bytes", "flops"))
    gbs = moved / seconds / 1e9 if seconds else None
    gflops = flops / seconds / 1e9 if seconds and flops else None
    roofline = None
    if limits is not None and seconds and not _USES_MATRIX_UNITS.search(name):
        roofline = sum(limits.seconds(launch.bytes, launch.flops) for launch in launches) / seconds
    return KernelRow(name, len(launches), seconds, moved, flops, seconds / total, gbs, gflops, roofline)


def cells_of(row: ReportRow) -> tuple[str, ...]:
    """Return the cells of a row as text, in the order of :data:`COLUMNS`."""
    r = asdict(row) if isinstance(row, KernelRow) else row
    rates = [f"{r[key]:.1f}" if r[key] is not None else "" for key in ("gbs", "gflops")]
    limit = f"{100 * r['roofline']:.0f} %" if r["roofline"] is not None else ""
    return r["name"], f"{r['calls']}", f"{1e3 * r['seconds']:.3f}", f"{100 * r['share']:.1f} %", *rates, limit


def text_table(rows: Sequence[ReportRow]) -> str:
    """Return the rows as a text table for a terminal."""
    cells = [COLUMNS, *map(cells_of, rows)]
    first, *widths = (max(len(row[i]) for row in cells) for i in range(len(COLUMNS)))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in cells)


def kernel_table(rows: Sequence[ReportRow]) -> str:
    """Return the rows, or dicts read from a file, as an HTML table of the class ``kernels``, styled by :data:`REPORT_STYLE`."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return f'<table class="kernels">\n<tr>{head}</tr>\n' + "\n".join(map(_html_row, rows)) + "\n</table>"


def _html_row(row: ReportRow) -> str:
    name, calls, ms, share, *rest = (html.escape(cell) for cell in cells_of(row))
    bar = f'<span class="bar" style="width: {float(share.split()[0]):.0f}px"></span>'
    return f"<tr><td>{name}</td><td>{calls}</td><td>{ms}</td><td>{bar}{share}</td>" + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"


def save_report(path: str | os.PathLike[str], rows: Sequence[ReportRow], title: str = "kernels", summary: str = "") -> None:
    """Write the rows as a self-contained HTML page."""
    page = _PAGE.format(title=html.escape(title), style=REPORT_STYLE, summary=html.escape(summary), table=kernel_table(rows))
    Path(path).write_text(page, encoding="utf-8")
