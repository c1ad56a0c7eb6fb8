"""Logs in files: JSON lines, CSV and TensorBoard. A resumed run continues them from its checkpoint."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from netcl.core.nested import map_leaves
from netcl.core.tensor import Tensor
from netcl.io.archive import filling, replacing
from netcl.io.packages import optional_module
from netcl.trainer.callbacks import Callback, Logs


def _finite_numbers(logs: Logs) -> dict[str, Any]:
    """Return the scalar numbers of logs; NaN and infinities, which JSON lacks, become ``None``."""
    return {name: _finite(value) for name, value in logs.items() if isinstance(value, int | float)}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_run_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as a JSON file, atomically; NaN and infinities become ``null``."""
    with replacing(path) as file:
        file.write(f"{json.dumps(map_leaves(dict(content), _finite), indent=1)}\n".encode())


class _LoggedBatch(NamedTuple):
    """A batch of training: its place, learning rate and loss, which nothing has waited for."""

    epoch: int
    batch: int
    step: int
    lr: float
    loss: Any


class JSONLLogger(Callback):
    """Writes a JSON object per line: ``{"kind": "step", ...}`` for every logged batch, ``{"kind": "epoch", ...}`` for every epoch.

    A step row has the norm of the gradients, if known. Its ``losses`` and ``lrs`` list the values of all batches since the previous step
    row. ``since`` is the step of the first of these batches. A checkpoint holds the batches that no row has yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._batches: list[_LoggedBatch] = []  # that no row has yet
        self._loaded: list[_LoggedBatch] = []  # the same, of a checkpoint

    def set_trainer(self, trainer: Any) -> None:
        super().set_trainer(trainer)
        trainer.measures_norm = True
        self._batches, self._loaded = [], []

    def on_train_begin(self, logs: Logs) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        step, at = self.trainer.step, (self.trainer.epoch, self.trainer.batch)
        earlier = read_jsonl(self.path) if step else []
        kept = [row for row in earlier if row["step"] <= step and (row.get("epoch", 0), row.get("batch", math.inf)) < at]
        with replacing(self.path) as file:
            file.writelines(f"{json.dumps(row)}\n".encode() for row in kept)
        self._began = time.perf_counter() - (kept[-1].get("time", 0.0) if kept else 0.0)
        written = max(((row.get("epoch", 0), row["batch"]) for row in kept if "batch" in row), default=(-1, -1))
        self._batches = [batch for batch in self._loaded if batch[:2] > written]

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        self._rate = self.trainer.learning_rates()[0]

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        trainer = self.trainer
        self._batches.append(_LoggedBatch(trainer.epoch, batch, trainer.step, self._rate, trainer.batch_loss))
        if trainer.log_due:
            self._write_batches({**logs, **({} if trainer.grad_norm is None else {"grad_norm": trainer.grad_norm.item()})})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._write_batches({})
        self._write("epoch", self.trainer.step, logs)

    def close(self) -> None:
        self._write_batches({})

    def state_dict(self) -> dict[str, Any]:
        return {"batches": [[*batch[:4], float(batch.loss.item())] for batch in self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tensor = partial(Tensor.from_host, self.trainer.queue)
        self._loaded = [_LoggedBatch._make([*batch[:4], tensor(np.float32(batch[4]))]) for batch in state.get("batches", ())]

    def _write_batches(self, logs: Logs) -> None:
        """Write a step row of the batches that no row has yet, if there are any; ``logs`` are further numbers of the last one."""
        pending, self._batches = self._batches, []
        if not pending:
            return
        values = [float(copy.wait()) for copy in [batch.loss.to_host_async() for batch in pending]]
        lists = {"since": pending[0].step, "losses": [_finite(float(f"{value:.7g}")) for value in values], "lrs": [b.lr for b in pending]}
        last = pending[-1]
        self._write("step", last.step, {"epoch": last.epoch, "batch": last.batch, "loss": values[-1], **logs, "lr": last.lr}, lists)

    def _write(self, kind: str, step: int, logs: Logs, lists: Logs | None = None) -> None:
        row = {"kind": kind, "step": step, **_finite_numbers(logs), "time": round(time.perf_counter() - self._began, 3)}
        row |= lists or {}
        with filling(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a :class:`JSONLLogger` file. Stops at a damaged line, which a killed process may leave; ``[]`` without a file."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if Path(path).exists() else []:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            break
        if not isinstance(row, dict) or "kind" not in row or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


class CSVLogger(Callback):
    """Writes one line of comma-separated numbers per epoch; the columns are those of the first epoch."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, str]] = []
        if epoch and self.path.exists():  # a new run replaces the file
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("epoch", "").isdecimal() and int(row["epoch"]) < epoch]
        rows.append({name: str(value) for name, value in _finite_numbers(logs).items()})
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        with replacing(self.path) as file:
            file.write(text.getvalue().encode())


class TensorBoard(Callback):
    """Writes the numbers as TensorBoard event files; needs ``tensorboardX`` (in the ``train`` extra)."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._make = optional_module("tensorboardX", "TensorBoard", "tensorboardX is required").SummaryWriter
        self._writer: Any = None

    def on_train_begin(self, logs: Logs) -> None:
        self._writer = self._make(str(self.folder), purge_step=self.trainer.step or None)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.trainer.log_due:
            self._add("step/", logs, self.trainer.step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._add("epoch/", logs, epoch)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, prefix: str, logs: Logs, at: int) -> None:
        for name, value in _finite_numbers(logs).items():
            if name != "epoch" and value is not None:
                self._writer.add_scalar(prefix + name, value, at)
