"""Every example runs with --smoke, in a process of its own as a reader would start it, and fits on a screen or two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NEEDS_OPENCL = {"heat", "kernel_with_gradient"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path, one_target, opencl_found):
    if path.stem in NEEDS_OPENCL and not opencl_found:
        pytest.skip("the example is about OpenCL")
    environment = {**os.environ, "NETCL_DEVICE": one_target.selector}
    done = subprocess.run([sys.executable, path, "--smoke"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_run(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 130
    assert f"python examples/{path.name}" in text.split('"""')[1]
