"""Reading of a user's files as samples: tables (CSV), arrays (NPZ) and images (IDX), split for training, validation and testing.

A reader of :data:`READERS` returns :class:`Samples`. Their attribute ``reading`` describes as JSON how inputs were made from the file.
:func:`read_inputs` uses it to read further files in the same way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from netcl.data.dataset import Subset, TensorDataset
from netcl.data.errors import FormatError, message
from netcl.data.formats import read_idx, regular
from netcl.data.tables import number_of, read_csv_rows, read_numpy_arrays, whole_numbers

FilePath = str | os.PathLike[str]
CLASSIFICATION, REGRESSION = "classification", "regression"
_MOST_CLASSES = 20  # distinct whole numbers of a column up to which they are classes
_MOST_VALUES = 100  # distinct texts of a column


@dataclass(frozen=True)
class Samples:
    """The samples of a file in up to three parts; targets are int64 labels of ``classes``, or float32 numbers of shape (N, outputs)."""

    train: Any
    val: Any  # None without a part for validation
    test: Any
    classes: tuple[str, ...]
    reading: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitPlan:
    """Settings for targets and splits: the target's column, the task (inferred if empty), the fractions of the parts, and the seed."""

    target: str = ""
    task: str = ""
    val: float = 0.1
    test: float = 0.1
    seed: int = 0


def parts(labels: np.ndarray | None, samples: int, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Divide sample indices at random: one array per fraction, then the rest. With ``labels``, each class is divided by these fractions.

    >>> [part.tolist() for part in parts(np.array([0, 1] * 4), 8, [0.25], seed=0)]
    [[4, 7], [0, 1, 2, 3, 5, 6]]
    """
    rng = np.random.default_rng(seed)
    found: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in [None] if labels is None else np.unique(labels):
        own = rng.permutation(samples if labels is None else np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(fractions) * len(own)).astype(int)
        for part, indices in zip(found, np.split(own, cuts), strict=True):
            part.append(indices)
    return [np.sort(np.concatenate(part)) for part in found]


def held_out(dataset: Any, labels: np.ndarray | None, fraction: float, seed: int) -> tuple[Any, Any]:
    """Split a dataset into a training and a validation part; the latter is ``None`` for the fraction 0."""
    if not fraction:
        return dataset, None
    val, train = parts(labels, len(dataset), [fraction], seed)
    _check_parts("training or validation", train=len(train), validation=len(val))
    return Subset(dataset, train), Subset(dataset, val)


def _check_parts(what: str, **sizes: int) -> None:
    if not all(sizes.values()):
        what = f"every part must have at least one sample, got none for {what}"
        raise ValueError(message("data", what, "add samples, or change the splits", **sizes))


# ---- targets


def _task(op: str, values: np.ndarray, given: str) -> str:
    """Return ``given``, if set. Otherwise return classification for strings, bools or few distinct whole numbers, else regression."""
    if given not in ("", CLASSIFICATION, REGRESSION):
        raise ValueError(message(op, f"task must be {CLASSIFICATION}, {REGRESSION} or empty", task=repr(given)))
    numeric = values.dtype.kind in "iuf"
    if given == REGRESSION and not numeric:
        what = "targets of a regression must be numbers"
        raise ValueError(message(op, what, f"use --task {CLASSIFICATION}", targets=values[:3].tolist()))
    if given == CLASSIFICATION and values.ndim != 1:
        what = "targets of a classification must be one label per sample, or one-hot rows"
        raise ValueError(message(op, what, f"use --task {REGRESSION}", targets=values.shape))
    if given:
        return given
    whole = values.dtype.kind in "iu" or (numeric and bool((values == np.rint(values)).all()))
    return CLASSIFICATION if not numeric or (values.ndim == 1 and whole and len(np.unique(values)) <= _MOST_CLASSES) else REGRESSION


def _targets(op: str, values: np.ndarray, plan: SplitPlan, train: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Return labels and their ``classes`` or, for a regression, scaled targets and the ``mean`` and ``scale`` of the training part."""
    if values.dtype.kind == "f" and not (found := np.isfinite(values.reshape(len(values), -1)).all(axis=1)).all():
        raise FormatError(message(op, "every target must be finite", row=int(np.flatnonzero(~found)[0])))
    if _task(op, values, plan.task) == CLASSIFICATION:
        names, labels = np.unique(values, return_inverse=True)
        whole = values.dtype.kind == "f"
        return labels.reshape(-1).astype(np.int64), {"classes": [str(int(name) if whole and name == int(name) else name) for name in names]}
    columns = values.reshape(len(values), -1).astype(np.float64)
    described = [_mean_and_scale(op, "targets", column) for column in columns[train].T]
    mean, scale = (list(each) for each in zip(*described, strict=True))
    return ((columns - mean) / scale).astype(np.float32), {"mean": mean, "scale": scale}


def _mean_and_scale(op: str, name: str, numbers: np.ndarray) -> tuple[float, float]:
    """Return the mean and the deviation of numbers; 1 as the deviation of equal numbers, whose computed one may be a rounding error."""
    if not numbers.size or numbers.min() == numbers.max():
        return (float(numbers[0]) if numbers.size else 0.0), 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean, scale = float(numbers.mean()), float(numbers.std())
    if not 0 < scale < math.inf:  # so is a mean beyond float64
        what = "numbers must have a mean and a deviation within float64"
        raise FormatError(message(op, what, "scale the column, or drop it", column=name, largest=float(np.abs(numbers).max())))
    return mean, scale


# ---- tables


def read_table(path: FilePath) -> tuple[list[str], list[list[str]]]:
    """Read the header and the rows of a CSV file, separated by comma, semicolon, tab or bar."""
    (_, first), *others = read_csv_rows(path, "csv") or [(0, [])]
    header, rows = [name.strip() for name in first], []
    for line, row in others:
        if any(cell.strip() for cell in row):
            if len(row) != len(header):
                what = "every line must have as many cells as the header"
                raise FormatError(message("csv", what, line=line, cells=len(row), header=len(header), file=path))
            rows.append([cell.strip() for cell in row])
    if not rows or len(set(header)) != len(header) or "" in header:
        what = "a table must have a header of different, non-empty column names, and at least one more line"
        raise FormatError(message("csv", what, header=header[:8], rows=len(rows), file=path))
    return header, rows


def _numbers(column: str, cells: Sequence[str]) -> np.ndarray | None:
    """Convert cells to float64, empty ones to NaN; ``None`` for a column of text. Raises for decimal commas and mixed columns."""
    found, texts = {"": math.nan}, list[str]()
    for cell in dict.fromkeys(filter(None, cells)):
        try:
            found[cell] = number_of(cell)
        except ValueError:
            texts.append(cell)
    if not texts:
        return np.array([found[cell] for cell in cells])
    if all(re.fullmatch(r"[+-]?\d+(,\d+)*", cell) for cell in cells if cell):
        what = "numbers must be written with a decimal point, and without separators of thousands"
        raise FormatError(message("csv", what, cell=texts[0], column=column))
    if len(found) > _MOST_CLASSES + 1:  # not categories such as 0, 1, 2 and 3+
        what, remedy = "a column of numbers must not contain text", "leave the cell empty if the value is missing"
        raise FormatError(message("csv", f"{what}, got {texts[0]!r}", remedy, column=column, texts=len(texts), numbers=len(found) - 1))
    return None


def _column(name: str, cells: Sequence[str], train: np.ndarray) -> dict[str, Any]:
    """Return how an input column is encoded: numbers by the mean and scale of the training part, strings by its distinct values."""
    numbers = _numbers(name, cells)
    if numbers is not None:
        mean, scale = _mean_and_scale("csv", name, numbers[train][np.isfinite(numbers[train])])
        return {"name": name, "mean": mean, "scale": scale}
    values = sorted({cells[i] for i in train})
    if len(values) > _MOST_VALUES:
        what, remedy = f"a text column must have at most {_MOST_VALUES} distinct values", f"drop it: --data-options 'drop=[\"{name}\"]'"
        raise FormatError(message("csv", what, remedy, column=name, values=len(values)))
    return {"name": name, "values": values}


def _encoded(columns: Sequence[Mapping[str, Any]], header: Sequence[str], rows: Sequence[Sequence[str]], path: FilePath) -> np.ndarray:
    missing = [column["name"] for column in columns if column["name"] not in header]
    if missing:
        raise FormatError(message("csv", "all columns of the training table are required", missing=missing, header=list(header), file=path))
    found = []
    for column in columns:
        cells = [row[header.index(column["name"])] for row in rows]
        if "values" in column:
            found += [np.array([cell == value for cell in cells], np.float64) for value in column["values"]]
            continue
        if (numbers := _numbers(column["name"], cells)) is None:
            text = next(cell for cell in cells if _numbers(column["name"], [cell]) is None)
            raise FormatError(message("csv", f"a column of numbers must not contain text, got {text!r}", column=column["name"], file=path))
        if (infinite := np.flatnonzero(np.isinf(numbers))).size:
            what, remedy = "a column of numbers must be finite", "leave the cell empty if the value is missing"
            raise FormatError(message("csv", what, remedy, column=column["name"], row=int(infinite[0]) + 1, file=path))
        scaled = (numbers - column["mean"]) / column["scale"]
        found.append(np.where(np.isfinite(scaled), scaled, 0.0))  # an empty cell is the mean
    return np.stack(found, axis=1).astype(np.float32)


def _csv(path: Path, plan: SplitPlan, drop: Sequence[str] = ()) -> Samples:
    header, rows = read_table(path)
    unknown = [name for name in (plan.target, *drop) if name not in header]
    if unknown:
        what = "target and drop must be columns of the table" if plan.target else "the column to predict must be named"
        remedy = f"columns are {', '.join(header)}; --target names the one to predict"
        raise ValueError(message("csv", what, remedy, column=unknown[0] or None, file=path))
    cells = [row[header.index(plan.target)] for row in rows]
    if "" in cells:
        remedy = "fill it in, or remove the line"
        raise FormatError(message("csv", "every target must be given", remedy, row=cells.index("") + 1, column=plan.target))
    numbers = _numbers(plan.target, cells)
    integers = whole_numbers(cells)  # exact: floats beyond 2**53 would join different ones
    values = integers if integers is not None else np.array(cells) if numbers is None else numbers
    stratified = values if _task("csv", values, plan.task) == CLASSIFICATION else None
    val, test, train = parts(stratified, len(rows), [plan.val, plan.test], plan.seed)
    y, described = _targets("csv", values, plan, train)
    inputs = [name for name in header if name not in (plan.target, *drop)]
    columns = [_column(name, [row[header.index(name)] for row in rows], train) for name in inputs]
    reading = {"kind": "csv", "columns": columns, "target": plan.target, **described}
    return _split(_encoded(columns, header, rows, path), y, (train, val, test), reading, path, plan.val > 0)


def _split(x: np.ndarray, y: np.ndarray, indices: Sequence[np.ndarray], reading: dict[str, Any], path: Path, wants_val: bool) -> Samples:
    train, val, test = indices
    sizes = {"train": len(train), "test": len(test), **({"validation": len(val)} if wants_val else {})}
    _check_parts(" and ".join(name for name, size in sizes.items() if not size), **sizes)
    whole = TensorDataset(x, y, name=path.name, classes=reading.get("classes", ()))
    reading = {**reading, "shape": list(x.shape[1:])}
    return Samples(Subset(whole, train), Subset(whole, val) if len(val) else None, Subset(whole, test), tuple(whole.classes), reading)


# ---- arrays and images


def _pictures(x: np.ndarray) -> np.ndarray:
    """Convert inputs to float32; bytes are divided by 255, and images of one channel get a channel axis."""
    scaled = x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)
    return scaled[:, None] if scaled.ndim == 3 else scaled


def _class_numbers(y: np.ndarray, task: str) -> np.ndarray:
    """Return a single column without its axis, and one-hot rows as labels unless the task is a regression; else ``y``."""
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    one_hot = y.ndim == 2 and y.dtype.kind in "iufb" and np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()
    return y.argmax(axis=1) if one_hot and task != REGRESSION else y


def _arrays(op: str, path: Path, plan: SplitPlan, x: np.ndarray, y: np.ndarray, tested: tuple[np.ndarray, np.ndarray] | None) -> Samples:
    """Make samples from arrays; ``tested`` holds the inputs and targets of the file's test part, if it has one."""
    for inputs, targets in ((x, y), *([tested] if tested else [])):
        if inputs.dtype.kind not in "iufb" or len(inputs) != len(targets) or inputs.ndim < 2:
            what = "inputs must be numbers with at least 2 dimensions (samples, ...), with one target for each sample"
            raise FormatError(message(op, what, x=inputs.shape, y=targets.shape, dtype=inputs.dtype, file=path))
        if inputs.ndim == 4 and inputs.shape[3] in (1, 3, 4) and min(inputs.shape[1:3]) > 4:
            what, remedy = "images must have their channels before height and width", "x.transpose(0, 3, 1, 2)"
            raise FormatError(message(op, what, remedy, x=inputs.shape, file=path))
    if tested and (x.dtype == np.uint8) != (tested[0].dtype == np.uint8):  # only bytes are divided by 255
        what = "inputs for training and for the test must both be bytes, or neither"
        raise FormatError(message(op, what, "cast one of them", train=x.dtype, test=tested[0].dtype, file=path))
    y, tested = _class_numbers(y, plan.task), tested and (tested[0], _class_numbers(tested[1], plan.task))
    stratified = y if _task(op, np.concatenate((y, tested[1])) if tested else y, plan.task) == CLASSIFICATION else None
    fractions = [plan.val] if tested else [plan.val, plan.test]
    val, *rest = parts(stratified, len(y), fractions, plan.seed)
    test, train = (np.arange(len(y), len(y) + len(tested[1])), rest[0]) if tested else (rest[0], rest[1])
    x, y = (np.concatenate(pair) for pair in zip((x, y), tested, strict=True)) if tested else (x, y)
    targets, described = _targets(op, y, plan, train)
    reading = {"kind": "image" if x.ndim > 2 else "array", **({"dtype": str(x.dtype)} if x.dtype.kind in "iu" else {}), **described}
    return _split(_pictures(x), targets, (train, val, test), reading, path, plan.val > 0)


_ARRAY_NAMES = (("x", "y"), ("X", "y"), ("x_train", "y_train"), ("X_train", "y_train"), ("images", "labels"), ("data", "target"))


def _npz(path: Path, plan: SplitPlan) -> Samples:
    found = read_numpy_arrays(path, "npz")
    names = next((pair for pair in _ARRAY_NAMES if set(pair) <= found.keys()), None)
    if names is None:
        remedy = f"name them {' or '.join('/'.join(pair) for pair in _ARRAY_NAMES[::2])}"
        raise FormatError(message("npz", "the file must have arrays of inputs and targets", remedy, arrays=sorted(found), file=path))
    ends = [name.replace("train", "test") for name in names]
    tested = (found[ends[0]], found[ends[1]]) if "train" in names[0] and set(ends) <= found.keys() else None
    return _arrays("npz", path, plan, found[names[0]], found[names[1]], tested)


def _idx_folder(path: Path, plan: SplitPlan) -> Samples:
    """Return the samples of IDX files with ``images`` and ``labels`` in their names; ``t10k`` or ``test`` marks the test part."""
    files = sorted(file for file in path.iterdir() if "ubyte" in file.name or "idx" in file.name) if path.is_dir() else []
    tested, own = ([file for file in files if ("t10k" in file.name or "test" in file.name) == kind] for kind in (True, False))

    def pair(chosen: Sequence[Path]) -> tuple[np.ndarray, np.ndarray] | None:
        found = [next((file for file in chosen if word in file.name), None) for word in ("images", "labels")]
        return (read_idx(found[0]), read_idx(found[1])) if found[0] and found[1] else None

    train = pair(own)
    if train is None:
        remedy = "name a folder with files like train-images-idx3-ubyte and train-labels-idx1-ubyte, gzipped or not"
        raise FileNotFoundError(message("idx", "images and labels must exist", remedy, folder=path, files=[file.name for file in files]))
    return _arrays("idx", path, plan, *train, pair(tested))


READERS: dict[str, Callable[..., Samples]] = {"csv": _csv, "npz": _npz, "idx": _idx_folder}


def read_inputs(path: FilePath, reading: Mapping[str, Any]) -> np.ndarray:
    """Return the inputs of a file for a trained model; ``reading`` is from the :class:`Samples` that the model was trained on."""
    file = regular(path, "predict")
    if reading.get("kind") == "csv":
        header, rows = read_table(file)
        return _encoded(reading["columns"], header, rows, file)
    if file.suffix in (".npz", ".npy"):
        found = read_numpy_arrays(file, "npz")
        if not found:
            raise FormatError(message("predict", "the file must have at least one array", file=file))
        given = found[next((pair[0] for pair in _ARRAY_NAMES if pair[0] in found), next(iter(found)))]
    elif "idx" in file.name or "ubyte" in file.name:
        given = read_idx(file)
    else:
        raise FormatError(message("predict", "the file must be .npz, .npy or IDX, or a picture for a model of images", file=file))
    trained, integers = reading.get("dtype", ""), given.dtype.kind in "iu"
    if given.dtype.kind not in "iufb" or (trained and integers and (given.dtype == np.uint8) != (trained == "uint8")):
        # Only bytes are divided by 255. Floats may have been scaled by whoever wrote them.
        what, remedy = "inputs must be numbers, and bytes where the model was trained on bytes", "cast the array: x.astype(...)"
        raise FormatError(message("predict", what, remedy, dtype=given.dtype, trained=trained, file=file))
    x = _pictures(given)
    if list(x.shape[1:]) != list(reading["shape"]):
        what = "an input must have the shape that the model was trained on"
        raise FormatError(message("predict", what, shape=x.shape[1:], expected=tuple(reading["shape"]), file=file))
    return x
