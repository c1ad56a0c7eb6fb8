"""Charts for a page: lines and points as SVG, matrices as tables, images as PNG, all embedded in the page."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import cycle
from operator import itemgetter

import numpy as np

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 26, 36
_COLOURS = ("#2f6fdb", "#d9622b", "#2b9a66", "#8a4fd0")
PLOT_STYLE = """
figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg.chart { width: 100%; height: auto; }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart text { fill: var(--dim); font-size: 11px; font-family: inherit; }
svg.chart polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
table.confusion td { text-align: right; min-width: 2.2em; }
"""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers inside a range.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3, 12)
    [4.0, 6.0, 8.0, 10.0, 12.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, series: Mapping[str, Points], x_label: str = "") -> str:
    """Return an SVG chart of named lines; many points are reduced to their extremes. Without finite points, the text is empty."""
    lines = {name: extremes([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]) for name, points in series.items()}
    everything = [point for points in lines.values() for point in points]
    if not everything:
        return ""
    xs, ys = ([point[i] for point in everything] for i in (0, 1))
    low, high = min(ys), max(ys)
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    frame = _Frame((min(xs), max(xs)), (low - room if low - room > 0 or low < 0 else 0.0, high + room))
    coloured = zip(lines.items(), cycle(_COLOURS), strict=False)
    strokes = [frame.line(name, points, colour) for (name, points), colour in coloured]
    return frame.figure(title, x_label, [*strokes, *_legend(list(lines))])


def extremes(points: Points, most: int = 2 * _WIDTH) -> Points:
    """Return ``points``. If there are more than ``most``, keep the lowest and the highest of each of ``most / 2`` consecutive parts.

    >>> extremes([(0, 5.0), (1, 9.0), (2, 1.0), (3, 4.0), (4, 4.5), (5, 4.2)], most=4)
    [(1, 9.0), (2, 1.0), (3, 4.0), (4, 4.5)]
    """
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 2))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [point for part in parts for point in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})]


def scatter_chart(title: str, points: Points, x_label: str = "", diagonal: float | None = 1.0, most: int = 2000) -> str:
    """Return an SVG chart of ``points`` and the line ``y = diagonal * x``, or ``y = 0`` for ``None``; empty without finite points."""
    shown = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    shown = shown[:: -(-len(shown) // most) or 1]
    if not shown:
        return ""
    xs, ys = ([point[i] for point in shown] for i in (0, 1))
    ends = [(x, (diagonal or 0.0) * x) for x in (min(xs), max(xs))]
    heights = [*ys, *(y for _, y in ends)]
    room = 0.05 * (max(heights) - min(heights)) or 1.0
    frame = _Frame((min(xs), max(xs)), (min(heights) - room, max(heights) + room))
    style = f'r="2" fill="{_COLOURS[0]}" opacity=".55"'
    dots = [f'<circle cx="{px:.1f}" cy="{py:.1f}" {style}/>' for px, py in (frame.at(*p) for p in shown)]
    return frame.figure(title, x_label, [frame.line("", ends, _COLOURS[1], True), *dots])


class _Frame:
    """The coordinate system of a chart: maps values to pixels, and draws axes and lines as SVG."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]):
        self.x_range, self.y_range = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5), y

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def line(self, name: str, points: Points, colour: str, faint: bool = False) -> str:
        places = [self.at(x, y) for x, y in points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        kind = ' class="faint"' if faint else ""
        dots = "" if faint or len(points) > 40 else "".join(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"><title>{html.escape(name)} {y:.4g} at {x:g}</title></circle>'
            for (px, py), (x, y) in zip(places, points, strict=True)
        )  # fmt: skip
        return f'<polyline{kind} stroke="{colour}" points="{path}"/>{dots}'

    def rows(self) -> list[str]:
        found = []
        for value in ticks(*self.y_range):
            y = self.at(self.x_range[0], value)[1]
            grid = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            found.append(f'{grid}<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        return found

    def figure(self, title: str, x_label: str, parts: Sequence[str]) -> str:
        middle = f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>'
        base = _HEIGHT - _BOTTOM + 15
        whole = [value for value in ticks(*self.x_range) if value == round(value)]  # epochs and steps are counted
        places = [(self.at(value, self.y_range[0])[0], value) for value in whole]
        columns = [f'<text x="{x:.1f}" y="{base}" text-anchor="middle">{value:g}</text>' for x, value in places]
        drawing, label = "".join([*self.rows(), *columns, middle, *parts]), html.escape(title)
        picture = f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{drawing}</svg>'
        return f"<figure><figcaption>{label}</figcaption>{picture}</figure>"


def _legend(names: Sequence[str]) -> list[str]:
    found, x = [], _WIDTH - _RIGHT - sum(18 + 7 * len(name) for name in names)
    for name, colour in zip(names, cycle(_COLOURS), strict=False):
        mark = f'<rect x="{x}" y="4" width="9" height="9" fill="{colour}"/>'
        found.append(f'{mark}<text x="{x + 12}" y="13">{html.escape(name)}</text>')
        x += 18 + 7 * len(name)
    return found


def confusion_table(matrix: np.ndarray, classes: Sequence[str]) -> str:
    """Return a confusion matrix as a table. Rows are true classes, columns predicted ones. Darker cells hold a larger share of the row."""
    most = matrix.sum(axis=1, keepdims=True).clip(1)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in classes)
    rows = []
    for i, name in enumerate(classes):
        cells = []
        for j, count in enumerate(matrix[i]):
            colour = "47,111,219" if i == j else "217,98,43"
            cells.append(f'<td style="background:rgba({colour},{(count / most[i, 0]) ** 0.5:.2f})">{count}</td>' if count else "<td></td>")
        rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    return f'<table class="confusion"><thead><tr><th>true \\ chosen</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def png(image: np.ndarray) -> str:
    """Return a uint8 image, (height, width) or (height, width, 3), as the data URL of a PNG."""
    rows = image.reshape(len(image), -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)  # each row begins with the number of its filter: none
    kind = 2 if image.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, kind, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", zlib.compress(raw, 9)) + _png_chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
