"""Plots with logarithmic axes as SVG text, readable on light and dark pages and without any library."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
COLOURS = ("#2f6fdb", "#d9622b", "#2b9a66", "#8a4fd0", "#a0842c", "#b0386b")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 72, 16, 34, 48
LEGEND = 280  # width of the names of numbered dots
STYLE = """<style>
text { font: 12px sans-serif; fill: #777; } .title { font-weight: 600; font-size: 14px; }
.grid { stroke: #8884; } .line { fill: none; stroke-width: 2; }
.roof { fill: none; stroke: #888; stroke-width: 1.5; stroke-dasharray: 5 4; }
</style>"""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from ``low`` to ``high``, drawn from pixel ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        part = (math.log(value) - math.log(self.low)) / (math.log(self.high / self.low) or 1.0)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten, or of a hundred or a thousand where there are many."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**p for p in range(first, last + 1, 1 + max(0, last - first) // 7)]


def axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis with a little room on both sides."""
    return Axis(min(values) / 1.5, max(values) * 1.5, start, end)


def short(value: float) -> str:
    """1500 as 1.5k.

    >>> [short(v) for v in (1e-6, 0.01, 100.0, 1e6)]
    ['1e-06', '0.01', '100', '1M']
    """
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points], dots: Mapping[str, tuple[float, float]] | None = None,
          roof: Points = ()) -> str:  # fmt: skip
    """Named lines (with a legend), numbered dots (with their names beside), and a dashed line above them; values must be positive."""
    dots = dots or {}
    every = [p for points in lines.values() for p in points] + list(dots.values()) + list(roof)
    x, y = axis([p[0] for p in every], LEFT, WIDTH - RIGHT), axis([p[1] for p in every], HEIGHT - BOTTOM, TOP)
    drawn = [STYLE, f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>', *_grid(x, y), *_names(x_name, y_name)]
    if roof:
        drawn.append(f'<polyline class="roof" points="{_path(roof, x, y)}"/>')
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        drawn.append(f'<polyline class="line" stroke="{colour}" points="{_path(points, x, y)}"/>')
        drawn += [f'<circle cx="{x.at(u):.1f}" cy="{y.at(v):.1f}" r="3" fill="{colour}"/>' for u, v in points]
        drawn.append(f'<text x="{LEFT + 10}" y="{TOP + 16 + 16 * i}" style="fill:{colour}">{html.escape(name)}</text>')
    taken: list[tuple[float, float]] = []
    for i, (name, (u, v)) in enumerate(dots.items()):
        paint = COLOURS[i % len(COLOURS)]
        drawn.append(f'<circle cx="{x.at(u):.1f}" cy="{y.at(v):.1f}" r="4" fill="{paint}"/>')
        drawn.append(f'<text x="{x.at(u) + 6:.1f}" y="{_free_row(x.at(u), y.at(v) + 4, taken):.1f}" style="fill:{paint}">{i + 1}</text>')
        drawn.append(f'<text x="{WIDTH}" y="{TOP + 12 + 15 * i}" style="fill:{paint}">{i + 1}  {html.escape(name)}</text>')
    width = WIDTH + (LEGEND if dots else 0)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">{"".join(drawn)}</svg>\n'


def _free_row(x: float, y: float, taken: list[tuple[float, float]], apart: float = 12.0, wide: float = 18.0) -> float:
    """The row nearest below ``y`` where no other label lies; the place is then taken."""
    while any(abs(x - u) < wide and abs(y - v) < apart for u, v in taken):
        y += apart / 2
    taken.append((x, y))
    return y


def _path(points: Points, x: Axis, y: Axis) -> str:
    return " ".join(f"{x.at(u):.1f},{y.at(v):.1f}" for u, v in points)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for t in x.ticks():
        parts.append(f'<line class="grid" x1="{x.at(t):.1f}" x2="{x.at(t):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x.at(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(t)}</text>')
    for t in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(t):.1f}" y2="{y.at(t):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y.at(t) + 4:.1f}" text-anchor="end">{short(t)}</text>')
    return parts


def _names(x_name: str, y_name: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(x_name)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_name)}</text>',
    ]


def bars(title: str, x_name: str, groups: Mapping[str, Mapping[str, float]], mark: float, mark_name: str) -> str:
    """Horizontal bars from zero, one group per name and one color per series, with a dashed vertical line at ``mark``."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    thick, left, top = 11, 170, 62
    pitch = thick * len(series) + 10
    bottom = top + pitch * len(groups)
    largest = max(value for group in groups.values() for value in group.values())
    scale = (WIDTH - left - 56) / max(largest, mark)
    drawn = [STYLE, f'<text class="title" x="16" y="20">{html.escape(title)}</text>']
    at = left + mark * scale
    drawn.append(f'<line class="roof" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 6}" y2="{bottom}"/>')
    for i, name in enumerate(series):
        drawn.append(f'<rect x="{16 + 150 * i}" y="32" width="11" height="11" rx="2" fill="{COLOURS[i]}"/>')
        drawn.append(f'<text x="{33 + 150 * i}" y="42">{html.escape(name)}</text>')
    for i, (name, group) in enumerate(groups.items()):
        y = top + pitch * i
        drawn.append(f'<text x="{left - 8}" y="{y + (pitch - 10) / 2 + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        for j, part in enumerate(series):
            if part in group:
                width, row = group[part] * scale, y + thick * j
                drawn.append(f'<rect x="{left}" y="{row}" width="{width:.1f}" height="{thick - 1}" rx="2" fill="{COLOURS[j]}"/>')
                drawn.append(f'<text x="{left + width + 4:.1f}" y="{row + 9}">{group[part]:.2f}</text>')
    drawn.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{html.escape(mark_name)}</text>')
    drawn.append(f'<text x="{(left + WIDTH) / 2}" y="{bottom + 34}" text-anchor="middle">{html.escape(x_name)}</text>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" role="img">{"".join(drawn)}</svg>\n'
