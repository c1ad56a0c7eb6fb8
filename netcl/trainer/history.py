"""The history of a run: the numbers of each epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from netcl.core import notebook
from netcl.core.errors import message
from netcl.io.packages import optional_module


class History(Mapping[str, list[float]]):
    """The numbers of a run: ``history["loss"]`` has one value per epoch; ``history.rows`` has one dictionary per epoch.

    >>> history = History([{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.0}])
    >>> history["loss"], history.last["loss"], history.best("loss")
    ([2.0, 1.0], 1.0, 1)
    """

    def __init__(self, rows: list[dict[str, Any]] | None = None):
        self.rows: list[dict[str, Any]] = [] if rows is None else rows

    @property
    def epoch(self) -> list[int]:
        """The index of each epoch, from 0."""
        return [int(row["epoch"]) for row in self.rows]

    @property
    def history(self) -> dict[str, list[float]]:
        """All columns as a dictionary, as in Keras."""
        return dict(self)

    @property
    def last(self) -> dict[str, Any]:
        """The row of the last epoch; empty before the first."""
        return self.rows[-1] if self.rows else {}

    def best(self, name: str, mode: str = "min") -> int:
        """Return the epoch with the lowest (or, with ``mode="max"``, highest) value of a column; NaN is never the best."""
        rows = [row for row in self.rows if name in row and row[name] == row[name]]
        if not rows or mode not in ("min", "max"):
            what = "name must be a column of the history with a number, and mode must be 'min' or 'max'"
            raise ValueError(message("History.best", what, name=name, mode=mode, columns=list(self)))
        return int((min if mode == "min" else max)(rows, key=lambda row: row[name])["epoch"])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot all columns except times over the epochs, each with its validation column, and return the figure; needs matplotlib.

        - **path**: also write the figure into this file.
        """
        remedy = "pip install matplotlib, or write an HTML report with the Report callback or netcl report RUN"
        figures = optional_module("matplotlib.figure", "History.plot", "matplotlib is required", remedy)
        hidden = ("seconds", "samples_per_second")
        names = [name for name in self if not name.startswith("val_") and name not in hidden]
        if not names:
            raise ValueError(message("History.plot", "the history must have at least one epoch", "call fit first"))
        figure = figures.Figure(figsize=(4.0 * len(names), 3.0), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for column, label in ((name, "train"), (f"val_{name}", "validation")):
                rows = [row for row in self.rows if column in row]
                if rows:
                    axes.plot([row["epoch"] + 1 for row in rows], [row[column] for row in rows], label=label, marker=".")
            axes.set(title=name, xlabel="epoch")
            axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def __getitem__(self, name: str) -> list[float]:
        if not any(name in row for row in self.rows):
            raise KeyError(name)
        return [row[name] for row in self.rows if name in row]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for row in self.rows for name in row if name != "epoch"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _repr_html_(self) -> str:
        numbers = [[f"{row[name]:.4g}" if name in row else "" for name in self] for row in self.rows]
        rows = [(row["epoch"] + 1, *cells) for row, cells in zip(self.rows, numbers, strict=True)]
        return notebook.html_table("History", ("epoch", *self), rows)

    def __repr__(self) -> str:
        return f"History({len(self.rows)} epochs, {', '.join(self)})"
