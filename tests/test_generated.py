"""What is generated from the code is what is checked in."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docs_tables():
    return tool("docs_tables")


def check(name):
    """Run a tool in a process of its own: other tests may have registered ops in this one."""
    return subprocess.run([sys.executable, ROOT / f"tools/{name}.py", "--check"], capture_output=True, text=True, timeout=120)


def test_the_signatures_of_the_ops_are_up_to_date():
    done = check("op_stubs")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tables_of_the_docs_are_up_to_date():
    done = check("docs_tables")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_is_on_some_page(docs_tables):
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(found["name"] for found in docs_tables.TABLE.finditer(pages)) == sorted(docs_tables.TABLES)


def test_a_stale_table_is_rewritten(docs_tables):
    page = "before\n<!-- table: environment -->\nout of date\n<!-- end -->\nafter\n"
    new = docs_tables.render(page)
    assert "out of date" not in new and "| `NETCL_DEVICE` | `auto` |" in new
    assert new.startswith("before\n<!-- table: environment -->\n") and new.endswith("<!-- end -->\nafter\n")
    assert docs_tables.render(new) == new


def test_the_table_of_faults_is_long_enough_names_none_twice_and_none_ended_badly(docs_tables):
    rows = [row.split(" | ") for row in docs_tables.faults().splitlines()[2:]]
    assert len(rows) >= 80 and len({row[0] for row in rows}) == len(rows)
    tried = [row for row in rows if row[3].isdigit()]
    assert len(tried) >= 80 and all(int(row[3]) >= 1 for row in tried)
    assert [row[0] for row in tried if row[4] != "0"] == []


def test_every_promise_of_the_security_page_has_its_test():
    named = re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    path = ""
    for given, name in named:
        path = given or path
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)
    assert len(named) >= 15
