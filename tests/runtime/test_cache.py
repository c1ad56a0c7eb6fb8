"""Compiled programs on disk: reused, never trusted blindly, shared by many processes."""

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.runtime.cache import ProgramCache, program_cache

SCALE = "__kernel void scale(__global float* x, float factor, int n) { int i = get_global_id(0); if (i < n) x[i] *= factor; }\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("POCL_KERNEL_CACHE", "0")  # else PoCL's cache is used instead
    monkeypatch.setattr(program_cache, "_warned", False)
    monkeypatch.setattr(hooks, "binary_store", program_cache)
    return tmp_path


def run(handle, source) -> list[float]:
    """Launch as a process without a memory cache would."""
    program.state(handle.queue).programs.clear()
    x = Tensor.from_host(handle.queue, [1.0, 2.0, 3.0])
    program.get(handle.queue, source, "scale")(handle.queue, 3, None, x, 2.0, 3)
    return x.tolist()


def entry(folder: Path) -> Path:
    (path,) = folder.glob("programs/*/*.clb")
    return path


def test_the_second_build_comes_from_disk(cl_device, folder):
    source = SCALE + "// second build\n"
    assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert program_cache.info()["programs"] == 1
    before = program.build_count()
    assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert program.build_count() == before


def test_what_a_second_pass_made_is_what_is_kept(cl_device, folder, monkeypatch):
    """Here the second pass is another program, so that the two can be told apart."""
    other = SCALE.replace("*= factor", "+= factor")
    run(cl_device, other)
    final = program_cache.load(program.build(cl_device.queue.context, other).key)
    program_cache.clear()
    seen = []
    monkeypatch.setattr(program, "unmarked", lambda binary: seen.append(binary) or final)
    source = SCALE + "//@sm_90a only a comment in the first pass\n"
    assert run(cl_device, source) == [3.0, 4.0, 5.0]
    assert len(seen) == 1 and entry(folder).read_bytes().endswith(final)
    before = program.build_count()
    assert run(cl_device, source) == [3.0, 4.0, 5.0]
    assert program.build_count() == before and len(seen) == 1


def test_no_binary_is_read_from_a_driver_that_caches_programs(cl_device, folder, monkeypatch):
    """PoCL would compile every kernel once more for it."""
    monkeypatch.delenv("POCL_KERNEL_CACHE")
    assert run(cl_device, SCALE + "// cached by the driver\n") == [2.0, 4.0, 6.0]
    assert program_cache.info()["programs"] == int(not cl_device.profile.has_quirk("caches_programs"))


@pytest.mark.parametrize("where", [0, 20, 60, "middle", -1])
@pytest.mark.fault("bit of a cached program flips", "a byte of the file", "rebuilt, one warning")
def test_a_flipped_byte_is_rebuilt_with_one_warning(cl_device, folder, where):
    source = SCALE + f"// flipped {where}\n"
    run(cl_device, source)
    path = entry(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if where == "middle" else where] ^= 0xFF
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"\[cache\] a compiled program was rebuilt: the file is damaged") as caught:
        assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert len(caught) == 1
    before = program.build_count()
    assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert program.build_count() == before


@pytest.mark.parametrize("keep", [0, 1, 10, 40, 100])
@pytest.mark.fault("cached program is cut", "a short file", "rebuilt")
def test_a_truncated_entry_is_rebuilt(cl_device, folder, keep):
    source = SCALE + f"// truncated {keep}\n"
    run(cl_device, source)
    path = entry(folder)
    path.write_bytes(path.read_bytes()[:keep])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert len(caught) <= 1


@pytest.mark.fault("driver refuses a cached program", "a sound file with other content", "rebuilt")
def test_a_sound_file_the_driver_refuses_is_rebuilt(cl_device, folder):
    source = SCALE + "// foreign\n"
    run(cl_device, source)
    key = entry(folder).stem
    ProgramCache().save(key, b"this is not a binary of any driver")
    with pytest.warns(RuntimeWarning, match="the driver refused it"):
        assert run(cl_device, source) == [2.0, 4.0, 6.0]


def test_stale_leftovers_do_not_matter(cl_device, folder):
    source = SCALE + "// stale\n"
    run(cl_device, source)
    for name in ("lock", ".writing-abandoned"):
        (entry(folder).parent / name).write_bytes(b"")
    assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert program_cache.clear() == 3
    assert program_cache.info() == {"folder": str(folder / "programs"), "programs": 0, "bytes": 0}


@pytest.mark.fault("cache folder cannot be written", "a file in its place", "builds go on without it")
def test_nothing_can_be_written(cl_device, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("NETCL_CACHE_DIR", str(blocked / "cache"))
    assert run(cl_device, SCALE + "// nowhere\n") == [2.0, 4.0, 6.0]
    assert program_cache.info()["folder"] == "none"


def test_a_full_disk_leaves_no_part_of_an_entry(folder, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("netcl.core.env.os.replace", full)
    ProgramCache().save("aa1", b"x" * 100)
    assert ProgramCache().info()["programs"] == 0


def test_a_damaged_entry_in_a_folder_that_is_read_only(cl_device, folder, monkeypatch):
    source = SCALE + "// read-only\n"
    run(cl_device, source)
    entry(folder).write_bytes(b"damaged")

    def refuse(*arguments, **options):
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="rebuilt: the file is damaged"):
        assert run(cl_device, source) == [2.0, 4.0, 6.0]
    assert program_cache.trim(0) == 0


def test_the_oldest_entries_go_first(folder):
    cache = ProgramCache()
    for i, key in enumerate(("aa1", "bb2", "cc3")):
        cache.save(key, b"x" * 100)
        path = cache._path(key)
        import os

        os.utime(path, (i, i))
    size = cache.info()["bytes"] // 3
    assert cache.trim(max_bytes=2 * size) == 1
    assert cache.load("aa1") is None
    assert cache.load("cc3") == b"x" * 100


def test_the_key_knows_source_options_and_device(cl_device):
    device = program.state(cl_device.queue).device
    keys = {program._binary_key(device, s, o) for s in ("a", "b") for o in ((), ("-D X=1",))}
    assert len(keys) == 4


@pytest.mark.fault("eight processes build one kernel", "at once", "all work, the cache is sound")
def test_eight_processes_build_the_same_kernel(cl_device, tmp_path):
    script = textwrap.dedent(f"""
        import sys, warnings
        warnings.simplefilter("error")
        from netcl.core.device import manager
        from netcl.core.kernels import program
        from netcl.core.tensor import Tensor
        handle = manager.default(sys.argv[1])
        x = Tensor.from_host(handle.queue, [1.0, 2.0, 3.0])
        program.get(handle.queue, {SCALE!r}, "scale")(handle.queue, 3, None, x, 2.0, 3)
        assert x.tolist() == [2.0, 4.0, 6.0]
    """)
    import os

    env = {**os.environ, "NETCL_CACHE_DIR": str(tmp_path), "POCL_KERNEL_CACHE": "0"}
    command = [sys.executable, "-c", script, cl_device.platform_name]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    for process in running:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert len(list(tmp_path.glob("programs/*/*.clb"))) == 1


def test_a_first_run_is_told_about_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path))
    cache = ProgramCache()
    assert cache.load("ab" * 32) is None and cache.load("cd" * 32) is None
    assert [record.getMessage() for record in caplog.records] == ["netcl: compiling kernels for the first time; the next start is quick"]
    cache.save("ab" * 32, b"binary")
    assert ProgramCache().load("cd" * 32) is None and len(caplog.records) == 1
    monkeypatch.setenv("NETCL_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("NETCL_PROGRESS", "off")
    assert ProgramCache().load("ab" * 32) is None and len(caplog.records) == 1


@pytest.mark.fault("cached programs are swapped", "one file under the name of another", "not run; rebuilt")
def test_a_binary_under_the_name_of_another_does_not_run(cl_device, folder):
    """A file that is sound in itself, but was made of another source."""
    plus = SCALE.replace("*= factor", "+= factor")
    assert run(cl_device, plus) == [3.0, 4.0, 5.0]
    other = entry(folder)
    content = other.read_bytes()
    other.unlink()
    source = SCALE + "// swapped\n"
    assert run(cl_device, source) == [2.0, 4.0, 6.0]
    entry(folder).write_bytes(content)
    with pytest.warns(RuntimeWarning, match="a compiled program was rebuilt: the file is damaged or of another program"):
        assert run(cl_device, source) == [2.0, 4.0, 6.0]
