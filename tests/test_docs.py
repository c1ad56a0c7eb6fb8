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
API = ROOT / "docs" / "api"  # made when the site is built; tests/test_reference.py runs what is there
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent != API)]
GUIDES = [page for page in PAGES if page.parent in (ROOT / "docs", ROOT / "docs/tutorials") and page.name != "decisions.md"]
NEWCOMERS_PATH = ("index", "quickstart", "data", "make-it-faster", "io", "deploy", "serve")
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


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_page_is_short_and_starts_with_code(page):
    """Tables that the code makes do not count."""
    text = re.sub(r"<!-- (table: \w+|measured) -->.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert text.count("\n") <= 250 and len(text.split()) <= 1800
    first = re.search(r"^```(\w+)", text, re.M)
    assert first and first[1] in ("python", "pycon", "sh") and text.count("\n", 0, first.start()) < 16


def test_guides_stay_out_of_the_core():
    exempt = {"choose-a-device", "devices", "memory", "kernels", "errors", "environment", "reference"}
    blocks = {page.stem: "".join(block["code"] for block in BLOCK.finditer(page.read_text(encoding="utf-8"))) for page in GUIDES}
    assert [name for name, code in blocks.items() if re.search(r"(import|from) netcl\.core", code) and name not in exempt] == []


@pytest.mark.parametrize("step", range(len(NEWCOMERS_PATH) - 1))
def test_each_page_of_the_newcomers_path_leads_to_the_next(step):
    page, following = NEWCOMERS_PATH[step : step + 2]
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    last = text.rstrip().rpartition("\n\n")[2] if step else text.partition("<!-- cards -->")[2]
    assert re.search(r"\]\((\S+?)\.md", last)[1] == following


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
    few = "reference_packages=netcl.io,netcl.trainer,netcl.linalg"  # `make site` has every name
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-D", few, "-b", "html", ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(sphinx, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert "Train a CNN" in front and front.count("sd-card-title") == 4 and front.count("sd-tab-label") == 3
    assert "import_onnx" in (tmp_path / "site/api/netcl.io.import_onnx.html").read_text(encoding="utf-8")
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
