"""The ``netcl`` command on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import netcl
from netcl import cli
from netcl import selftest as tests
from netcl.cli.command import COMMANDS, table
from netcl.core import env, platforms
from netcl.core.device import manager, score
from netcl.engine.registry import REGISTRY


def run(capsys, *arguments):
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_doctor_tells_what_it_found(capsys):
    status, text, _ = run(capsys, "doctor")
    usable = [found for found in manager.found() if score(found.profile)[0] >= 0]
    assert status == (0 if usable else 1)
    for found in manager.found():
        assert found.profile.title in text and found.index in text
    assert "Runtimes were looked for in:" in text and "libnvidia-opencl.so.1" in text
    assert ("Ready:" in text) is bool(usable)


def test_a_device_that_is_not_there_is_told_beside_those_that_are(capsys, monkeypatch):
    monkeypatch.setenv("NETCL_DEVICE", "no such device")
    status, text, _ = run(capsys, "doctor")
    assert status == 1 and "[no-such-device] [NETCL_DEVICE] no such device; selector='no such device'" in text
    assert "Not ready: NETCL_DEVICE names" in text and "NumPy" in text
    assert run(capsys, "devices")[0] == 0


def test_an_op_that_is_not_there_is_told(capsys):
    assert run(capsys, "selftest", "relo", "--device", "cpu") == (1, "", "[selftest] the op must exist; op='relo'; did you mean relu?\n")


def test_devices_marks_what_auto_means(capsys):
    status, text, _ = run(capsys, "devices")
    (starred,) = [line for line in text.splitlines() if line.startswith("*")]
    assert status == 0 and manager.default("auto").profile.title in starred
    assert len(text.splitlines()) == len(manager.found()) + 2


def test_env_lists_every_variable(capsys, monkeypatch):
    monkeypatch.setenv("NETCL_DEBUG", "2")
    status, text, _ = run(capsys, "env")
    assert status == 0 and all(name in text for name in env.VARIABLES)
    assert "2 (set)" in next(line for line in text.splitlines() if line.startswith("NETCL_DEBUG"))


def test_env_names_nonsense(capsys, monkeypatch):
    monkeypatch.setenv("NETCL_DEBUG", "loud")
    status, text, errors = run(capsys, "env")
    assert status == 1 and "loud (set)" in text
    assert errors.strip() == "[env] NETCL_DEBUG must have one of its legal values; value='loud'; legal: 0, 1, 2, 3, 4"


def test_nonsense_in_a_variable_ends_a_command_with_one_line(monkeypatch):
    environment = {**os.environ, "NETCL_VISIBLE_DEVICES": "no such device"}
    done = subprocess.run([sys.executable, "-m", "netcl", "devices"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("[env] NETCL_VISIBLE_DEVICES must name devices that exist; value='no such device'; there are: ")


def test_cache_info_and_clear(capsys, monkeypatch):
    from netcl.runtime import cache

    monkeypatch.setattr(cache, "info", lambda: {"folder": "/somewhere", "programs": 3})
    monkeypatch.setattr(cache, "clear", lambda: 3)
    status, text, _ = run(capsys, "cache", "info")
    assert status == 0 and text.split() == ["folder", "/somewhere", "programs", "3"]
    assert run(capsys, "cache", "clear")[:2] == (0, "removed 3 files\n")


def test_cache_info_is_wired(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    status, text, _ = run(capsys, "cache", "info")
    assert status == 0 and str(tmp_path) in text


def test_selftest_tells_what_every_op_did(capsys):
    status, text, _ = run(capsys, "selftest", "--device", "cpu", "relu", "sum")
    assert status == 0
    relu, total = (next(line for line in text.splitlines() if line.startswith(f"{op} ")) for op in ("relu", "sum"))
    assert "float32 ok" in relu and "special ok" in relu and "gradient ok" in total
    assert text.splitlines()[-1].endswith(" passed, 0 failed, 0 skipped")


def test_selftest_fails_with_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setitem(REGISTRY, "relu", replace(REGISTRY["relu"], ref=lambda x: x))
    status, text, _ = run(capsys, "selftest", "--device", "cpu", "relu")
    assert status == 1 and "float32 FAILED" in text and "relu, float32: Mismatch: [relu] got" in text


def test_ops_lists_the_table(capsys):
    status, text, _ = run(capsys, "ops")
    assert status == 0 and any(line.split()[:4] == ["relu", "pointwise", "gradient", "keep"] for line in text.splitlines())


def test_the_page_names_every_command():
    cli.parser()
    page = (Path(__file__).parent.parent / "docs/command-line.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`netcl {name}" not in page] == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-command"], ["cache"], ["cache", "burn"], ["check"], ["check", "f", "--size", "0"], ["tune", "--budget", "-1"]],
)
def test_wrong_usage_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and "usage: netcl" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.strip() == f"netcl {netcl.__version__}"


def test_tables_are_plain_text():
    assert table(("a", "long"), [("xyz", "1"), ("", "22")]) == "a    long\nxyz  1\n     22"


@pytest.mark.parametrize("name", ["netcl.cli.parser", "netcl.cli.main"], ids=["parsing", "loading"])
@pytest.mark.fault("Ctrl-C while a command starts", "while it is loaded and while it is parsed", "status 130, no traceback")
def test_ctrl_c_while_a_command_starts_has_its_status(monkeypatch, name):
    from netcl import __main__

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupted)
    assert __main__.main() == 130


def test_ops_can_be_filtered(capsys):
    status, text, _ = run(capsys, "ops", "Sigmoid")
    names = [line.split()[0] for line in text.splitlines()[1:]]
    assert status == 0 and {"sigmoid", "silu"} <= set(names) and "matmul" not in names
    status, _, err = run(capsys, "ops", "sigmod")
    assert status == 1 and err.startswith("[ops] filter must occur in an op's name or documentation; filter='sigmod'; did you mean sigmoid")


@pytest.mark.parametrize(("names", "numbers"), [(["relu"], [1, 4]), (["relu", "sum"], [1, 4, 7, 10])], ids=["one", "several"])
def test_selftest_says_how_long_it_will_take(capsys, monkeypatch, names, numbers):
    """From the first check on, whether it is one op or several: the seconds of a check so far, times those that are left."""
    timed = tests.timed_result
    monkeypatch.setattr(tests, "timed_result", lambda *given: replace(timed(*given), seconds=20.0))
    monkeypatch.setattr("netcl.cli.ops._ESTIMATE_EVERY", 3)
    status, text, _ = run(capsys, "selftest", *names, "--device", "cpu")
    total = sum(len(list(tests.row_checks(REGISTRY[name], manager.default("cpu")))) for name in names)
    left = [divmod(20 * (total - done), 60) for done in numbers]
    estimates = [line for line in text.splitlines() if line.startswith("-- ")]
    assert status == 0 and text.splitlines()[1] == estimates[0]
    assert estimates == [f"-- {n} of {total} checks; about {m} min {s} s left" for n, (m, s) in zip(numbers, left, strict=True)]


def test_without_a_checkout_the_commands_of_doctor_work(monkeypatch):
    """They name packages of the registry, not extras of a checkout or of another project's netcl."""
    for word in (platforms.PIP_CPU, platforms.PIP_OPENCL, platforms.install_command()):
        assert "-e" not in word.split() and "[" not in word and "netcl" not in word
