"""Every public name has an example, and it runs: what the pages of the site show (tools/reference_pages.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from netcl.core import recording

TOOLS = Path(__file__).parent.parent / "tools"
spec = importlib.util.spec_from_file_location("reference_pages", TOOLS / "reference_pages.py")
pages = sys.modules["reference_pages"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)

PACKAGES = sorted({symbol.name.rpartition(".")[0] for symbol in pages.unique()} - {"netcl"})
LETTERS = ("abc", "def", "ghijkl", "mno", "pqr", "stuvwxyz")


def run_all(names, opencl=False):
    """Runs the examples of names; those that need a package that is not installed are skipped in the end."""
    lacking = []
    for symbol in names:
        code = pages.example(symbol)
        assert code, f"{symbol.name} has no example: add one to tools/reference_examples.txt or to its docstring"
        if pages.needs_opencl(code) is not opencl:
            continue
        try:
            lines = pages.session(symbol).splitlines()
        except ImportError as error:
            lacking.append(f"{symbol.name}: {error}")
        else:
            recording.watch_leases(None)  # what reset_peak_memory_stats() turns on
            assert any(not line.startswith((">>>", "...")) for line in lines), f"the example of {symbol.name} prints nothing"
    if lacking:
        pytest.skip("; ".join(lacking))


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_a_package(package, monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    run_all(symbol for symbol in pages.unique() if symbol.name.rpartition(".")[0] == package)


@pytest.mark.parametrize("letters", LETTERS)
def test_examples_at_the_root(letters, monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    run_all(symbol for symbol in pages.unique() if symbol.name == f"netcl.{symbol.short}" and symbol.short[0].lower() in letters)


@pytest.mark.slow
def test_examples_on_opencl(opencl_found, monkeypatch):
    if not opencl_found:
        pytest.skip("there is no OpenCL device")
    monkeypatch.setenv("NETCL_DEVICE", "cpu")
    run_all(pages.unique(), opencl=True)


def test_every_example_of_the_file_belongs_to_a_name():
    assert {*pages.written()} - {*pages.symbols()} == set()


def test_an_example_has_its_imports_and_its_output():
    code = pages.with_imports("w = nn.Linear(2, 1).weight\nfor k in range(2):\n    print(k, w.shape)\nnp.ones(1)\n", sys)
    assert pages.run(code).splitlines() == [
        ">>> import numpy as np", ">>> from netcl import nn", ">>> w = nn.Linear(2, 1).weight", ">>> for k in range(2):",
        "...     print(k, w.shape)", "...", "0 (1, 2)", "1 (1, 2)", ">>> np.ones(1)", "array([1.])",
    ]  # fmt: skip


def test_a_page_has_signature_parameters_example_and_members():
    text = dict(pages.pages("netcl.trainer"))["netcl.trainer.EarlyStopping"]
    assert "netcl.trainer.EarlyStopping(monitor='val_loss', patience=5" in text
    assert "| `patience` | `int` | `5` |" in text and "```pycon\n>>> " in text and "| `state_dict()` |" in text
