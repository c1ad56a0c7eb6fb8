"""HTML for notebooks, which ``_repr_html_`` of tensors, modules and histories returns."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_MOST = 10  # rows and columns of a table of values


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Build an HTML table with an optional caption; cells are escaped.

    >>> html_table("two", ["a"], [[1], ["<b>"]])
    '<table><caption>two</caption><tr><th>a</th></tr><tr><td>1</td></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    top = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{caption and f'<caption>{html.escape(caption)}</caption>'}{top and f'<tr>{top}</tr>'}{body}</table>"


def tensor_html(x: Any) -> str:
    """Return HTML: for a vector or matrix a table of its first and last rows and columns, for other tensors their ``repr``."""
    grad = ", requires_grad" if x.requires_grad else ""
    caption = f"Tensor {tuple(x.shape)} {x.dtype} on {x.device.device_name}{grad}"
    if x.ndim not in (1, 2) or not x.size:
        return f"<pre>{html.escape(repr(x))}</pre>"
    values = x.detach().to_host().reshape(-1, x.shape[-1])
    rows, columns = (_ends(n) for n in values.shape)
    form = "{:.4g}" if values.dtype.kind == "f" else "{}"
    cells = [["..." if i is None or j is None else form.format(values[i, j]) for j in columns] for i in rows]
    return html_table(caption, [], cells)


def _ends(count: int) -> list[int | None]:
    """Return the indices of an axis to show; ``None`` marks the place of omitted ones."""
    half = _MOST // 2
    return [*range(count)] if count <= _MOST else [*range(half), None, *range(count - half, count)]
