"""Datasets from CSV and NPZ files."""

from __future__ import annotations

import csv
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from netcl.data.dataset import TensorDataset
from netcl.data.errors import FormatError, message
from netcl.data.formats import limit_for, npy_array, refused, regular

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FIELD = 1 << 16  # maximum characters of a field: numbers and labels are far shorter


def from_csv(
    path: str | os.PathLike[str], target: str | int | None = -1, columns: Sequence[str] | None = None, delimiter: str = ",",
    header: bool = True,
) -> TensorDataset:  # fmt: skip
    """Read a CSV file as a dataset of ``(x, y)``: ``y`` is the column ``target``, ``x`` the other columns as float32.

    - **target**: the name or number of a column; ``None`` gives ``x`` alone. Strings become int64 labels, and their sorted values are
      the ``classes``; whole numbers become int64, others float32.
    - **columns**: names of the columns of ``x``; by default all but the target.
    - **header**: whether the first line names the columns.

    Raises :class:`~netcl.data.FormatError` with the invalid line.
    """
    rows = read_csv_rows(path, "from_csv", delimiter)
    names = rows.pop(0)[1] if header and rows else [str(i) for i in range(len(rows[0][1]) if rows else 0)]
    if not rows:
        raise refused("from_csv", "the file must have at least one row of values", path)
    wrong = next(((line, row) for line, row in rows if len(row) != len(names)), None)
    if wrong is not None:
        what = f"line {wrong[0]} must have as many fields as the first line"
        raise refused("from_csv", what, path, fields=len(wrong[1]), expected=len(names))
    at = None if target is None else _column_index(names, target, path)
    chosen = [_column_index(names, name, path) for name in columns] if columns else [i for i in range(len(names)) if i != at]
    x = np.array([_table_numbers(row, chosen, line, path) for line, row in rows], np.float32)
    if at is None:
        return TensorDataset(x, name=Path(path).name)
    missing = next((line for line, row in rows if not row[at].strip()), None)
    if missing is not None:
        raise refused("from_csv", f"line {missing} must have a target", path, "fill it in, or remove the line", column=names[at])
    y, classes = _labels([row[at].strip() for _, row in rows], path)
    return TensorDataset(x, y, name=Path(path).name, classes=classes)


def read_csv_rows(path: str | os.PathLike[str], op: str, delimiter: str = "") -> list[tuple[int, list[str]]]:
    """Return the number and fields of every nonempty line of a CSV file; an empty ``delimiter`` is detected from the first line."""
    found = regular(path, op)
    limit = csv.field_size_limit(_FIELD)
    try:
        with found.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter or max(",;\t|", key=first.count), strict=True)
            return [(reader.line_num, row) for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise refused(op, "the file must be a CSV file in UTF-8", path, reason=error) from None
    finally:
        csv.field_size_limit(limit)


def _column_index(names: Sequence[str], wanted: str | int, path: Any) -> int:
    if isinstance(wanted, str) and names.count(wanted) > 1:
        raise refused("from_csv", "a column that is named must not be there twice", path, "name it by its number", column=wanted)
    if isinstance(wanted, int) and -len(names) <= wanted < len(names):
        return wanted % len(names)
    if wanted not in names:
        raise ValueError(message("from_csv", "target and columns must be in the file", column=wanted, columns=list(names), file=path))
    return list(names).index(str(wanted))


def _table_numbers(row: Sequence[str], chosen: Sequence[int], line: int, path: Any) -> list[float]:
    try:
        return [number_of(row[i], _FLOAT32_MAX) for i in chosen]
    except ValueError as error:
        remedy = "name the columns of numbers: columns=[...]"
        raise FormatError(message("from_csv", f"every field of line {line} must be a number", remedy, reason=error, file=path)) from None


def number_of(text: str, largest: float = sys.float_info.max) -> float:
    """Convert a cell to a float. Raises ``ValueError`` for numbers beyond ``largest``, and for ``1_0``, which only Python reads as 10."""
    value = float(text)
    if "_" in text or (abs(value) > largest and any(map(str.isdigit, text))):
        raise ValueError(f"could not convert string to float of at most {largest:.3g}: {text!r}")
    return value


def whole_numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Convert cells to int64, exactly; ``None`` if one of them is not written as an integer, or does not fit."""
    if not all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) for text in texts):
        return None
    found = [int(text) for text in texts]
    return np.array(found, np.int64) if not found or (min(found) >= -(2**63) and max(found) < 2**63) else None


def _labels(texts: Sequence[str], path: str | os.PathLike[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    if (integers := whole_numbers(texts)) is not None:
        return integers, ()
    try:
        values = np.array([number_of(text) for text in texts])
    except ValueError:
        classes = sorted(set(texts))
        place = {name: i for i, name in enumerate(classes)}
        return np.array([place[text] for text in texts], np.int64), tuple(classes)
    whole = (values == np.rint(values)).all() and (np.abs(values) < 2**53).all()  # infinity is no integer, nor is a float beyond
    if not whole and (np.isfinite(values) & (np.abs(values) > _FLOAT32_MAX)).any():
        what, largest = f"targets must be numbers of at most {_FLOAT32_MAX:.3g}, or words", np.abs(values[np.isfinite(values)]).max()
        raise FormatError(message("from_csv", what, "scale the targets", largest=largest, file=path))
    return values.astype(np.int64 if whole else np.float32), ()


def from_npz(path: str | os.PathLike[str], *names: str, max_bytes: int | None = None) -> TensorDataset:
    """Read the arrays ``names`` of an NPZ file as a dataset, in that order; without names, all arrays in the order of the file.

    Raises for arrays of Python objects, or if all arrays exceed ``max_bytes`` in total (default: 200 times the file, at least 64 MiB).
    """
    arrays = read_numpy_arrays(path, "from_npz", max_bytes)
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(message("from_npz", "names must be arrays in the file", array=missing[0], arrays=list(arrays), file=path))
    return TensorDataset(*[arrays[name] for name in names or arrays], name=Path(path).name)


def read_numpy_arrays(path: str | os.PathLike[str], op: str, max_bytes: int | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an NPZ file by name; the array of an NPY file is called ``x``. Sizes are checked before anything is unpacked."""
    found = regular(path, op)

    def array(entry: str, data: np.ndarray) -> np.ndarray:
        return npy_array(data, lambda what, remedy="", **values: refused(op, what, path, remedy, entry=entry, **values))

    limit = limit_for(found.stat().st_size, max_bytes)
    try:
        if found.suffix == ".npy":
            return {"x": array(found.name, np.fromfile(found, np.uint8))}
        with zipfile.ZipFile(found) as archive:
            promised = sum(entry.file_size for entry in archive.infolist())
            if promised > limit:
                remedy = "if you trust the file, pass max_bytes= to from_npz"
                raise refused(op, "the arrays must not be larger than max_bytes", path, remedy, bytes=promised, max_bytes=limit)
            names = archive.namelist()
            return {name.removesuffix(".npy"): array(name, np.frombuffer(archive.read(name), np.uint8).copy()) for name in names}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError) as error:  # encrypted, or of a later version of ZIP
        raise refused(op, "the file must be a complete NPY or NPZ file", path, reason=error) from None
