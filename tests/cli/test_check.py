"""``netcl check``: kernels of a file, compiled and run under the sanitizer."""

from __future__ import annotations

import re

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import cli
from netcl.autograd import sanitizer
from netcl.core.errors import KernelBuildError

FILE = """
__kernel void good(__global const float* x, __global float* y, int n) { int i = get_global_id(0); if (i < n) y[i] = 2 * x[i]; }
__kernel void outside(__global const float* x, __global float* y, const int n) { y[get_global_id(0)] = x[get_global_id(0) + 1]; }
__kernel void local_one(__global float* y, __local float* room) { y[0] = 1; }
"""


@pytest.mark.fault("faults in a kernel", "a planted read out of bounds, under Oclgrind", "found and named")
def test_faults_are_found(cl_device, tmp_path, capsys):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    (tmp_path / "kernels.cl").write_text(FILE)
    status = cli.main(["check", str(tmp_path / "kernels.cl"), "--device", cl_device.platform_name])
    out = capsys.readouterr().out
    assert status == 1 and "good: clean" in out and "local_one: not run" in out
    assert "outside: faults" in out and "Invalid read" in out
    assert cli.main(["check", str(tmp_path / "kernels.cl"), "good", "--device", cl_device.platform_name]) == 0


#: Bodies over x, out, i and n, with 64 work-items in one group; and what the sanitizer says.
BUGS = {
    "read_behind": ("out[i] = x[i + 1];", "Invalid read of size 4 at global memory"),
    "read_before": ("out[i] = x[i - 1];", "Invalid read of size 4 at global memory"),
    "write_behind": ("out[i + 1] = x[i];", "Invalid write of size 4 at global memory"),
    "local_behind": (
        "__local float room[64]; room[i + 8] = x[i]; barrier(CLK_LOCAL_MEM_FENCE); out[i] = room[i + 8];",
        "Invalid write of size 4 at local memory",
    ),
    "private_behind": (
        "float own[4]; for (int k = 0; k < 4; ++k) own[k] = x[k]; out[i] = own[n];",
        "Invalid read of size 4 at private memory",
    ),
    "race_of_writes": ("out[0] = x[i];", "Write-write data race at global memory"),
    "race_of_neighbours": ("out[i] = x[i]; out[i] = out[(i + 1) % n] + 1.0f;", "Read-write data race at global memory"),
    "missing_barrier": ("__local float room[64]; room[i] = x[i]; out[i] = room[63 - i];", "local memory|Uninitialized value"),
    "uninitialised_local": (
        "__local float room[64]; if (i < 8) room[i] = x[i]; barrier(CLK_LOCAL_MEM_FENCE); out[i] = room[i] > 0.5f ? 1.0f : 2.0f;",
        "ninitialized value",
    ),
    "uninitialised_private": ("float v; if (n < 0) v = x[i]; if (v > 0.5f) out[i] = 2.0f; else out[i] = 3.0f;", "ninitialized value"),
    "divergent_barrier": ("if (i < 4) barrier(CLK_LOCAL_MEM_FENCE); out[i] = x[i];", "divergence detected"),
    "null_pointer": ("__global const float* none = 0; out[i] = none[i] + x[i];", "Invalid read of size 4 at global memory address 0x0"),
}
BUG_FILE = "".join(
    f"__kernel void {name}(__global const float* x, __global float* out, int n) {{ int i = get_global_id(0); {body} }}\n"
    for name, (body, _) in {**BUGS, "clean": ("out[i] = 2 * x[i];", "")}.items()
)


@pytest.mark.soak
@pytest.mark.fault("twelve kinds of bugs in kernels", "`netcl check` on a file that has one of each", "twelve found and named")
def test_twelve_planted_bugs_are_found(tmp_path, capsys, tried):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    (tmp_path / "bugs.cl").write_text(BUG_FILE)
    assert cli.main(["check", str(tmp_path / "bugs.cl"), "--local-size", "64", "--device", "cpu"]) == 1
    parts = re.split(r"^(\w+): (?=faults$|clean$)", capsys.readouterr().out, flags=re.M)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    tried(len(BUGS))
    assert found.pop("clean").strip() == "clean" and found.keys() == BUGS.keys()
    assert [name for name, (_, words) in BUGS.items() if not re.search(words, found[name])] == []


@pytest.mark.soak
@pytest.mark.parametrize("name", BUGS)
@pytest.mark.fault("bug in a kernel of `@netcl.kernel(check=True)`", "the same twelve", "`KernelBuildError` with the report")
def test_twelve_planted_bugs_are_found_at_the_first_call(cl_device, name):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    body, words = BUGS[name]

    def planted(x):
        pass

    planted.__annotations__["x"] = "float32"

    kernel = netcl.kernel(planted, body=body, check=True)
    with pytest.raises(
        KernelBuildError, match=rf"(?s)\[planted\] the kernel must run without faults, but the sanitizer found some.*({words})"
    ):
        kernel(ag.tensor(np.arange(64.0), queue=cl_device.queue))


@pytest.mark.soak
@pytest.mark.fault("kernel that does not end under the sanitizer", "an endless loop", "ended at the time limit, and said")
def test_a_kernel_that_does_not_end_is_told(monkeypatch):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    monkeypatch.setattr(sanitizer, "_SECONDS", 5)
    endless = "__kernel void endless(__global float* y) { volatile int go = 1; while (go) ; y[0] = 1; }"
    said = sanitizer.check_launch(endless, "endless", [1], None, [np.zeros(1, np.float32)])
    assert said.endswith("the launch did not end within 5 s")


#: Kernels without a fault, and whether Oclgrind 21.10 can check their uninitialised values.
CLEAN = {
    "vectors": ("if (i < n / 4) { float4 v = vload4(i, x); vstore4((float4)(v.w, v.z, v.y, v.x), i, out); }", True),
    "groups": ("__local float4 room[64]; room[i] = (float4)(x[i]); barrier(CLK_LOCAL_MEM_FENCE); out[i] = room[63 - i].y;", True),
    "vectors_of_three": ("if (i < n / 4) { float4 v = vload4(i, x); vstore4((float4)(v.w, v.zyx), i, out); }", False),
    "private_pointers": ("float whole; float part = fract(x[i], &whole); out[i] = whole + part;", False),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.fault(
    "Oclgrind's own check fails on a kernel that has no fault",
    "vectors of three elements, functions that write through a private pointer",
    "run without the check of uninitialised values, which is said; no false report",
)
def test_a_kernel_without_faults_has_no_report(name, caplog):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")
    body, checked = CLEAN[name]
    source = f"__kernel void {name}(__global const float* x, __global float* out, int n) {{ int i = get_global_id(0); {body} }}"
    assert sanitizer.check_launch(source, name, [64], [64], [np.ones(64, np.float32), np.zeros(64, np.float32), 64]) == ""
    assert not (checked and caplog.messages)


@pytest.mark.parametrize("own", ["OCLGRIND FATAL ERROR (./src/plugins/Uninitialized.cpp:194)", "the process ended with SIGSEGV"])
def test_a_check_that_fails_by_itself_is_left_out_and_said(own, monkeypatch, caplog):
    settings = []

    def report(request, log, child):
        settings.append(child.get("OCLGRIND_UNINITIALIZED"))
        return own if settings == ["1"] else "Invalid read"

    monkeypatch.setattr(sanitizer, "oclgrind_available", lambda: True)
    monkeypatch.setattr(sanitizer, "_child_report", report)
    assert sanitizer.check_launch("", "planted", [1], None, [1]) == "Invalid read" and settings == ["1", None]
    assert "[sanitizer] uninitialized values were not checked" in caplog.text and "kernel=planted" in caplog.text


def test_what_does_not_compile_is_told(cl_device, tmp_path, capsys):
    (tmp_path / "bad.cl").write_text("__kernel void bad(__global float* x) { x[0] = y; }")
    assert cli.main(["check", str(tmp_path / "bad.cl"), "--device", cl_device.platform_name]) == 1
    assert "bad: does not compile" in capsys.readouterr().out
    (tmp_path / "empty.cl").write_text("// no __kernel void here()")
    assert cli.main(["check", str(tmp_path / "empty.cl"), "--device", cl_device.platform_name]) == 1
    assert "[check] the file must have at least one kernel" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes", [["--local-size", "48"], ["--local-size", "8", "8"], ["--global-size", "1", "1", "1", "1"]], ids=["not a part", "axes", "four"]
)
def test_sizes_that_no_launch_has_are_refused(sizes, tmp_path, capsys):
    (tmp_path / "kernels.cl").write_text(FILE)
    assert cli.main(["check", str(tmp_path / "kernels.cl"), *sizes]) == 1
    assert "; global_size=[" in capsys.readouterr().err


@pytest.mark.fault("size beyond any memory", "`netcl check --size 999999999999`", "one line, status 2")
def test_a_size_beyond_any_memory_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", str(tmp_path / "kernels.cl"), "--size", "999999999999"])
    assert "must be a whole number from 1 to 67108864, got '999999999999'" in capsys.readouterr().err


@pytest.mark.fault("kernel file that is no text", "bytes", "one line")
def test_a_file_that_is_no_text_is_told(tmp_path, capsys):
    (tmp_path / "kernels.cl").write_bytes(b"\xff\xfe")
    assert cli.main(["check", str(tmp_path / "kernels.cl"), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("[check] the file must be UTF-8 text: ")
