"""Arrays and tables of users that Python's own readers cannot open."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.data.files import READERS, SplitPlan
from netcl.data.formats import FormatError
from netcl.data.tables import from_csv, read_numpy_arrays


@pytest.mark.parametrize(("field", "value"), [(6, 0xFF), (8, 0x01)], ids=["later version", "encrypted"])
@pytest.mark.fault("NPZ file of a later ZIP version, or encrypted", "bytes of its directory", "`FormatError`")
def test_an_archive_that_python_cannot_open_is_refused(tmp_path, field, value):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones(3))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + field] |= value
    data[data.index(b"PK\x03\x04") + field - 2] |= value
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match="the file must be a complete NPY or NPZ file"):
        read_numpy_arrays(path, "from_npz")


def table(tmp_path, text: str):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_whole_targets_are_exact(tmp_path):
    large = [9007199254740993, 9007199254740992, -(2**63), 2**63 - 1]
    rows = "".join(f"{i},{value}\n" for i, value in enumerate(large))
    assert from_csv(table(tmp_path, f"a,b\n{rows}")).arrays[1].tolist() == large
    found = READERS["csv"](table(tmp_path, "a,b\n" + rows * 4), SplitPlan(target="b", val=0, test=0.25))
    assert found.classes == tuple(map(str, sorted(large)))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a,b\n1,10\n2,\n", "line 3 must have a target; column=b"),
        ("a,b\n1_0,1\n", "every field of line 2 must be a number; reason=could not convert string to float .*: '1_0'"),
        ("a,b\n1e39,1\n", "every field of line 2 must be a number; reason=could not convert string to float .*: '1e39'"),
        ("a,b\n1,0.5\n2,1e39\n", "targets must be numbers of at most 3.4e.38, or words; largest=1e.39, file="),
        ("a,b,b\n1,2,3\n", "a column that is named must not be there twice; column=b"),
    ],
)
def test_cells_that_would_change_are_refused(tmp_path, text, reason):
    with pytest.raises(FormatError, match=reason):
        from_csv(table(tmp_path, text), target="b")


def test_numerals_of_python_are_text(tmp_path):
    read = from_csv(table(tmp_path, "a,b\n1,1_0\n2,10\n"))
    assert (read.arrays[1].tolist(), read.classes) == ([1, 0], ("10", "1_0"))


@pytest.mark.parametrize("cell, options", [("nan", {"task": "classification"}), ("inf", {"task": "classification"}), ("-inf", {})])
def test_targets_must_be_finite(tmp_path, cell, options):
    with pytest.raises(FormatError, match="every target must be finite; row=1"):
        READERS["csv"](table(tmp_path, "a,b\n" + f"1,0\n2,{cell}\n" * 8), SplitPlan(target="b", **options))


def test_equal_numbers_have_the_deviation_1(tmp_path):
    """Not the rounding error of their mean, by which other numbers would become 1e16."""
    read = READERS["csv"](table(tmp_path, "a,b\n" + "1234.7,0.3\n" * 79), SplitPlan(target="b", task="regression")).reading
    assert read["columns"] == [{"name": "a", "mean": 1234.7, "scale": 1.0}] and (read["mean"], read["scale"]) == ([0.3], [1.0])


@pytest.mark.parametrize("header", ["a,b", "b,a"])
def test_numbers_without_a_deviation_in_float64_are_refused(tmp_path, header):
    text = f"{header}\n" + "1e200,1.5\n2e200,2\n3e200,2.5\n" * 8
    with pytest.raises(FormatError, match=r"a mean and a deviation within float64; column=(a|targets), largest=3e.200"):
        READERS["csv"](table(tmp_path, text), SplitPlan(target="b", task="regression"))


@pytest.mark.parametrize("header", ["a,b", "b,a"])
def test_one_text_among_many_numbers_is_refused(tmp_path, header):
    """The numbers would be as many categories."""
    text = f"{header}\n" + "".join(f"{i},{i % 3}\n" for i in range(30)) + "N/A,1\n"
    with pytest.raises(FormatError, match=r"a column of numbers must not contain text, got 'N/A'; column=[ab], texts=1, numbers=30"):
        READERS["csv"](table(tmp_path, text), SplitPlan(target="b"))
    few = READERS["csv"](table(tmp_path, "a,b\n" + "0,1\n1,2\n3+,1\n" * 20), SplitPlan(target="b"))
    assert few.reading["columns"][0]["values"] == ["0", "1", "3+"]


def test_infinite_inputs_are_refused(tmp_path):
    with pytest.raises(FormatError, match="a column of numbers must be finite; column=a, row=2"):
        READERS["csv"](table(tmp_path, "a,b\n" + "1,0\ninf,1\n,1\n" * 8), SplitPlan(target="b"))
