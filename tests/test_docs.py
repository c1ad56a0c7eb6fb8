"""The docs run: every block of code in README, CONTRIBUTING and docs/, and every example in a docstring.

A ``python`` block is executed; a ``pycon`` block is a session whose printed answers are compared.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import netcl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<kind>python|pycon)\n(?P<code>.*?)^```$", re.M | re.S)
NEEDS_OPENCL = "<!-- needs OpenCL -->"
ONE_DEVICE = "<!-- one device -->"  # of a page that trains: once is enough
MODULES = sorted(m.name for m in pkgutil.walk_packages(netcl.__path__, "netcl.") if not m.name.endswith("__main__"))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_page(page: Path) -> None:
    """The blocks of a page in order and in one namespace, as a reader would type them."""
    text = page.read_text(encoding="utf-8")
    namespace: dict = {"__name__": f"docs_{page.stem}"}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        if block["kind"] == "python":
            exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)
        else:
            session = doctest.DocTestParser().get_doctest(block["code"], namespace, page.name, str(page), line)
            runner.run(session, clear_globs=False)
            namespace.update(session.globs)
    assert runner.failures == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page, device, request, one_target, tmp_path, monkeypatch):
    text, target = page.read_text(encoding="utf-8"), request.node.callspec.params["device"]
    if NEEDS_OPENCL in text and device.backend != "cl":
        pytest.skip("the page is about OpenCL")
    if ONE_DEVICE in text and target is not one_target:
        pytest.skip("the page runs on one device")
    monkeypatch.setenv("NETCL_DEVICE", target.selector)
    monkeypatch.chdir(tmp_path)
    run_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_page(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)  # code may look like links
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("index", ["docs/index.md", "docs/tutorials/index.md", "docs/internals/index.md", "docs/results/index.md"])
def test_every_page_is_in_the_contents(index):
    """The site's contents are made from these tables too."""
    path = ROOT / index
    text = re.sub(r"<!-- cards.*?end cards -->", "", path.read_text(encoding="utf-8"), flags=re.S)
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", text, re.M)
    there = {page.name for page in path.parent.glob("*.md")} | {f"{page.parent.name}/index.md" for page in path.parent.glob("*/index.md")}
    assert {*listed} == there - {"index.md"} and len(listed) == len({*listed})


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(sphinx, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert "Train a CNN" in front and front.count("sd-card-title") == 4 and front.count("sd-tab-label") == 3
    checked = subprocess.run([sys.executable, ROOT / "tools/site_check.py", tmp_path / "site"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_broken_links_and_raw_markup_of_a_site_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="top">[x](y.md) <code>**k**</code> <a href="b.html#no">b</a><a href="c.html">c</a></p>', encoding="utf-8"
    )
    (tmp_path / "b.html").write_text('<p>2**3 <a href="a.html#top">a</a><a href="https://example.org">e</a></p>', encoding="utf-8")
    checked = subprocess.run([sys.executable, ROOT / "tools/site_check.py", tmp_path], capture_output=True, text=True)
    lines = checked.stdout.splitlines()
    assert checked.returncode == 1 and [line.partition(":")[2].split("'")[0].strip() for line in lines] == [
        "no such anchor b.html#no",
        "broken link c.html",
        "raw markup",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, opencl_found):
    """Examples that ask for an OpenCL device by name are left out where there is none."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for session in doctest.DocTestFinder().find(importlib.import_module(name)):
        if opencl_found or not re.search(r'default\("(cl|gpu)', session.docstring or ""):
            runner.run(session)
    assert runner.failures == 0


def test_the_report_on_prose_counts_what_it_finds(tmp_path):
    (tmp_path / "page.md").write_text("word " * 31 + ".\n\nIt says so.\n" + "\n" * 250, encoding="utf-8")
    (tmp_path / "code.py").write_text(
        '"""No period"""\nraise ValueError("p is a probability, always")\nraise ValueError("p must be one")\n'
    )
    done = subprocess.run([sys.executable, ROOT / "tools/prose_report.py", tmp_path, "--counts"], capture_output=True, text=True)
    kinds = ("long sentence", "paraphrase", "error without a rule", "first line without a period", "long page")
    assert (done.returncode, done.stdout.strip()) == (0, "prose: " + ", ".join(f"1 x {kind}" for kind in kinds))
