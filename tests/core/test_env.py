"""The environment table: every variable, its default, and what nonsense is told."""

import ast
import subprocess
import sys

import pytest

from netcl.core import env
from netcl.core.errors import EnvironmentVariableError
from tests.conftest import ROOT

DEFAULTS = {
    "NETCL_KERNEL_STRATEGY": "auto", "NETCL_CONV_WINOGRAD": True, "NETCL_CONV_TILED_LOCAL": False, "NETCL_MAX_CACHED_GB": 4.0,
    "NETCL_ASYNC_H2D": True, "NETCL_PINNED_H2D": True, "NETCL_PROFILE_EVENTS": False, "NETCL_DEVICE": "auto", "NETCL_PLATFORM_FILTER": "",
    "NETCL_VISIBLE_DEVICES": (), "NETCL_CACHE_DIR": None, "NETCL_AUTOTUNE": ("off", None), "NETCL_DEBUG": 0, "NETCL_PROGRESS": "auto",
}  # fmt: skip
NONSENSE = {
    "NETCL_KERNEL_STRATEGY": "fast", "NETCL_CONV_WINOGRAD": "maybe", "NETCL_CONV_TILED_LOCAL": "2", "NETCL_MAX_CACHED_GB": "-1",
    "NETCL_ASYNC_H2D": "", "NETCL_PINNED_H2D": "x", "NETCL_PROFILE_EVENTS": "yep", "NETCL_AUTOTUNE": "on:soon", "NETCL_DEBUG": "5",
    "NETCL_PROGRESS": "loud",
}  # fmt: skip


def test_the_table_has_every_promised_variable():
    assert set(DEFAULTS) <= set(env.VARIABLES)
    assert all(row.doc and row.legal for row in env.VARIABLES.values())


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert env.value(name) == DEFAULTS[name]
    assert env.raw(name) is None


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_names_the_variable_and_its_legal_values(name, monkeypatch):
    monkeypatch.setenv(name, NONSENSE[name])
    with pytest.raises(EnvironmentVariableError) as caught:
        env.value(name)
    text = str(caught.value)
    assert text.startswith(f"[env] {name} must have one of its legal values; value={NONSENSE[name]!r}; legal: ")
    assert env.VARIABLES[name].legal in text


@pytest.mark.parametrize("text", ["nan", "inf", "four", ""])
def test_sizes_are_finite_numbers(text, monkeypatch):
    monkeypatch.setenv("NETCL_MAX_CACHED_GB", text)
    with pytest.raises(EnvironmentVariableError):
        env.value("NETCL_MAX_CACHED_GB")


def test_values(monkeypatch):
    for name, text, value in (
        ("NETCL_AUTOTUNE", "force:2.5", ("force", 2.5)),
        ("NETCL_VISIBLE_DEVICES", "0:0, pocl", ("0:0", "pocl")),
        ("NETCL_ASYNC_H2D", "off", False),
        ("NETCL_KERNEL_STRATEGY", " Portable ", "portable"),
    ):
        monkeypatch.setenv(name, text)
        assert env.value(name) == value


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path / "new"))
    assert env.cache_dir() == tmp_path / "new"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert env.cache_dir() is None


def test_what_is_set_around_tests_does_not_reach_them():
    """Where they run and what is compiled already does."""
    around = {"NETCL_PROGRESS": "off", "NETCL_FUSION": "0", "NETCL_DEVICE": "cpu", "NETCL_CACHE_DIR": "kept"}
    program = f"import os, tests.conftest; print([name for name in {list(around)} if name in os.environ])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env.for_child(**around), cwd=ROOT, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == ["NETCL_DEVICE", "NETCL_CACHE_DIR"]
