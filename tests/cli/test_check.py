"""``netcl check``: kernels of a file, compiled and run under the sanitizer."""

from __future__ import annotations

import pytest

from netcl import cli
from netcl.autograd import sanitizer

FILE = """
__kernel void good(__global const float* x, __global float* y, int n) { int i = get_global_id(0); if (i < n) y[i] = 2 * x[i]; }
__kernel void outside(__global const float* x, __global float* y, const int n) { y[get_global_id(0)] = x[get_global_id(0) + 1]; }
__kernel void local_one(__global float* y, __local float* room) { y[0] = 1; }
"""


@pytest.mark.fault("faults in a kernel", "a planted read out of bounds, under Oclgrind", "found and named")
def test_faults_are_found(cl_device, tmp_path, capsys):
    if not sanitizer.available():
        pytest.skip("Oclgrind is not installed")
    (tmp_path / "kernels.cl").write_text(FILE)
    status = cli.main(["check", str(tmp_path / "kernels.cl"), "--device", cl_device.platform_name])
    out = capsys.readouterr().out
    assert status == 1 and "good: clean" in out and "local_one: not run" in out
    assert "outside: faults" in out and "Invalid read" in out
    assert cli.main(["check", str(tmp_path / "kernels.cl"), "good", "--device", cl_device.platform_name]) == 0


def test_what_does_not_compile_is_told(cl_device, tmp_path, capsys):
    (tmp_path / "bad.cl").write_text("__kernel void bad(__global float* x) { x[0] = y; }")
    assert cli.main(["check", str(tmp_path / "bad.cl"), "--device", cl_device.platform_name]) == 1
    assert "bad: does not compile" in capsys.readouterr().out
    (tmp_path / "empty.cl").write_text("// no __kernel void here()")
    assert cli.main(["check", str(tmp_path / "empty.cl"), "--device", cl_device.platform_name]) == 1
    assert "[check] the file has no kernel" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes", [["--local-size", "48"], ["--local-size", "8", "8"], ["--global-size", "1", "1", "1", "1"]], ids=["not a part", "axes", "four"]
)
def test_sizes_that_no_launch_has_are_refused(sizes, tmp_path, capsys):
    (tmp_path / "kernels.cl").write_text(FILE)
    assert cli.main(["check", str(tmp_path / "kernels.cl"), *sizes]) == 1
    assert "; global_size=[" in capsys.readouterr().err


def test_a_size_beyond_any_memory_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", str(tmp_path / "kernels.cl"), "--size", "999999999999"])
    assert "'999999999999' is not a whole number from 1 to 67108864" in capsys.readouterr().err


@pytest.mark.fault("kernel file that is no text", "bytes", "one line")
def test_a_file_that_is_no_text_is_told(tmp_path, capsys):
    (tmp_path / "kernels.cl").write_bytes(b"\xff\xfe")
    assert cli.main(["check", str(tmp_path / "kernels.cl"), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("[check] the file is not UTF-8 text: ")
