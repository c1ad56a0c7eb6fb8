"""Compilers that end the process: programs are built and launched in a child process first, and refused if that ends."""

from __future__ import annotations

import pytest

import netcl as nc
from netcl.core.kernels import probe, program

GOOD = """__kernel void good(__global float* x, float a, int n, __local float* room) {
  room[get_local_id(0)] = a;
  if (get_global_id(0) < n) x[get_global_id(0)] = room[get_local_id(0)];
}
__attribute__((reqd_work_group_size(4, 1, 1))) __kernel void fixed(__global float* x) { x[get_global_id(0)] = 2; }"""
ABORTS = "__kernel void aborts(__global float* x) { ((volatile __global float*)(size_t)x[0])[16] = 1; x[0] = 1; }"


@pytest.fixture
def fragile(cl_device, monkeypatch):
    monkeypatch.setattr(program.state(cl_device.queue), "fragile", True)
    monkeypatch.setattr(probe, "_known_aborts", {})
    yield cl_device
    for child in probe._children.values():
        child.close()
    probe._children.clear()


@pytest.mark.fault(
    "compiler ends the process", "a program that ends the process in which it is tried", "refused by name; the process lives"
)
def test_a_program_that_ends_a_process_is_refused(fragile):
    if fragile.device_type != "cpu":
        pytest.skip("a stray write ends the process only on CPUs")
    for _ in range(2):
        with pytest.raises(
            probe.CompilerAbort, match=r"\[build\] the driver's compiler cannot compile this program: the process ends with SIG"
        ):
            program.get(fragile.queue, ABORTS, "aborts")
    assert len(probe._known_aborts) == 1 and not probe._children


def test_programs_that_build_are_used(fragile):
    x = nc.zeros((4,), device=fragile)
    room = program.platforms.opencl().LocalMemory(64)
    program.get(fragile.queue, GOOD, "good")(fragile.queue, 4, 4, x, 3.0, 4, room)
    assert x.tolist() == [3.0] * 4 and probe._known_aborts == {}
    (child,) = probe._children.values()
    assert child.process.poll() is None
    with pytest.raises(program.KernelBuildError, match="undeclared"):
        program.get(fragile.queue, "__kernel void bad(__global float* x) { x[0] = undeclared; }", "bad")
    assert child.process.poll() is None


def test_only_drivers_that_need_it_are_tried_so(cl_device):
    assert program.state(cl_device.queue).fragile == ("rusticl" in cl_device.platform_name.lower())
