"""What is gathered from which place, in what order, and what is told to the loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from netcl.core import platforms, system_packages
from netcl.core.errors import DeviceError
from netcl.core.platforms import Places, Runtime, gather_runtimes

PLACEHOLDER = "/opt/anaconda1anaconda2anaconda3/lib/"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in platforms.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("NETCL_CACHE_DIR", str(folder))
    return folder


def put(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def names(runtimes):
    return {runtime.name: runtime for runtime in runtimes}


def test_icd_files_of_the_loader(tmp_path):
    library = put(tmp_path / "lib/libone.so")
    put(tmp_path / "vendors/one.icd", f"{library}\n")
    put(tmp_path / "vendors/two.icd", "libtwo.so.1")
    put(tmp_path / "vendors/empty.icd", "")
    put(tmp_path / "vendors/readme.txt", "libthree.so")
    found = names(gather_runtimes(Places(loader_folders=(tmp_path / "vendors",), library_folders=(tmp_path / "lib",))))
    assert set(found) == {"one", "two"}
    assert found["one"].path == str(library) and found["one"].known and found["one"].origin == "system"
    assert found["two"].path is None and found["two"].library == "libtwo.so.1"


def test_folders_the_loader_does_not_read(tmp_path):
    put(tmp_path / "local/pocl.icd", str(put(tmp_path / "lib/libpocl.so.2")))
    (runtime,) = gather_runtimes(Places(loader_folders=(tmp_path / "none",), other_folders=(tmp_path / "local",)))
    assert (runtime.name, runtime.known) == ("pocl", False)


@pytest.mark.parametrize("bundled", [True, False])
def test_wheels_next_to_pyopencl(tmp_path, bundled):
    library = put(tmp_path / ".libs/libpocl-21062cec.so")
    put(tmp_path / ".libs/pocl.icd", "libpocl-21062cec.so")
    (runtime,) = gather_runtimes(Places(wheel_folder=tmp_path / ".libs", bundled_loader=bundled))
    assert (runtime.origin, runtime.path, runtime.known) == ("wheel", str(library), bundled)


def test_intels_wheel_with_its_placeholder(tmp_path):
    library = put(tmp_path / "lib/libintelocl.so")
    put(tmp_path / "etc/OpenCL/vendors/intel-cpu.icd", f"{PLACEHOLDER}libintelocl.so")
    put(tmp_path / "etc/OpenCL/vendors/intel-fpga_emu.icd", f"{PLACEHOLDER}libintelocl_emu.so")
    (runtime,) = gather_runtimes(Places(prefixes=(tmp_path,)))
    assert (runtime.name, runtime.library, runtime.origin, runtime.known) == ("intel-cpu", str(library), "wheel", False)


def test_intels_wheel_whose_library_is_gone(tmp_path):
    put(tmp_path / "etc/OpenCL/vendors/intel-cpu.icd", f"{PLACEHOLDER}libintelocl.so")
    (runtime,) = gather_runtimes(Places(prefixes=(tmp_path,)))
    assert runtime.error == "the library that its .icd file names does not exist" and "intel-opencl-rt" in runtime.remedy


def test_a_prefix_whose_icd_files_are_right_is_taken_as_it_is(tmp_path):
    library = put(tmp_path / "elsewhere/libpocl.so")
    put(tmp_path / "etc/OpenCL/vendors/pocl.icd", str(library))
    (runtime,) = gather_runtimes(Places(prefixes=(tmp_path,)))
    assert runtime.library == str(library)


def test_a_driver_library_without_an_icd_file(tmp_path):
    library = put(tmp_path / "lib/libnvidia-opencl.so.1")
    places = Places(loader_folders=(tmp_path / "vendors",), library_folders=(tmp_path / "lib",), drivers=platforms.DRIVERS[:1])
    (runtime,) = gather_runtimes(places)
    assert (runtime.name, runtime.library, runtime.known) == ("nvidia", str(library), False)


@pytest.mark.parametrize("text", ["libnvidia-opencl.so.1", "{folder}/libnvidia-opencl.so.1", "{folder}/libnvidia-opencl.so.580.1"])
def test_no_library_is_registered_twice(tmp_path, text):
    folder = tmp_path / "lib"
    put(folder / "libnvidia-opencl.so.580.1")
    (folder / "libnvidia-opencl.so.1").symlink_to("libnvidia-opencl.so.580.1")
    put(tmp_path / "vendors/nvidia.icd", text.format(folder=folder))
    places = Places(loader_folders=(tmp_path / "vendors",), library_folders=(folder,), drivers=platforms.DRIVERS[:1])
    (runtime,) = gather_runtimes(places)
    assert runtime.known and runtime.source.endswith("nvidia.icd")


def test_the_linker_configuration_is_read(tmp_path, monkeypatch):
    included = put(tmp_path / "conf.d/a.conf", "# comment\n/opt/driver/lib  # trailing\n")
    main = put(tmp_path / "ld.so.conf", f"include {included.parent}/*.conf\n\n/opt/last\n")
    assert list(platforms._linker_configuration(main)) == [Path("/opt/driver/lib"), Path("/opt/last")]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/first::/second")
    assert list(platforms._library_folders())[:2] == [Path("/first"), Path("/second")]


@pytest.mark.parametrize("name", platforms.USER_VARIABLES)
def test_what_the_user_set_wins(name, tmp_path, monkeypatch):
    monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(platforms, "_bundled_loader", lambda: False)
    monkeypatch.setattr(platforms, "_state", platforms.PlatformState())
    monkeypatch.setattr(platforms, "register_runtimes", lambda runtimes: pytest.fail("the user's setting was overruled"))
    state = platforms.prepare()
    assert state.setting == (name, str(tmp_path)) and state.folder is None
    assert os.environ[name] == str(tmp_path)


def test_libraries_a_bundled_loader_would_not_read_are_registered(tmp_path, monkeypatch):
    library = put(tmp_path / "libmine.so.1", "library")
    monkeypatch.setenv("OCL_ICD_FILENAMES", f"{library}:libnowhere.so")
    monkeypatch.setattr(platforms, "_bundled_loader", lambda: True)
    assert platforms.user_setting() is None
    mine, nowhere = [runtime for runtime in gather_runtimes(Places.here()) if runtime.origin == "OCL_ICD_FILENAMES"]
    assert (mine.name, mine.path, mine.known) == ("mine", str(library), False)
    assert (nowhere.name, nowhere.path) == ("nowhere", None)


def test_places_follow_the_users_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))
    here = Places.here()
    assert here.loader_folders == (tmp_path,) and platforms.LOADER_FOLDER in here.other_folders
    monkeypatch.setenv("OCL_ICD_VENDORS", str(put(tmp_path / "one.icd", "libone.so")))
    (runtime,) = [runtime for runtime in gather_runtimes(Places.here()) if runtime.known and runtime.origin == "system"]
    assert runtime.library == "libone.so"


def test_a_folder_of_ours_is_not_the_users(tmp_path, monkeypatch):
    put(tmp_path / platforms.MARK, "{}")
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))
    assert platforms.user_setting() is None
    monkeypatch.setenv("OCL_ICD_VENDORS", "")
    assert platforms.user_setting() is None


def good(name, tmp_path, known=False, origin="driver library"):
    library = put(tmp_path / f"lib/lib{name}.so")
    return Runtime(name, str(library), str(library), origin, str(library), known)


def test_the_folder_lists_everything_the_loader_would_not_find_itself(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(platforms, "loadable", lambda runtimes: list(runtimes))
    system, wheel, added = good("a", tmp_path, True, "system"), good("b", tmp_path, True, "wheel"), good("c", tmp_path)
    folder, checked = platforms.register_runtimes([system, wheel, added])
    assert folder.parent == cache / "icd" and checked == [system, wheel, added]
    listed = {file.name: file.read_text().strip() for file in folder.glob("*.icd")}
    assert listed == {"00-a.icd": system.library, "01-c.icd": added.library}  # its loader reads pyopencl's folder besides


def test_verdicts_are_kept_until_a_file_changes(tmp_path, cache, monkeypatch):
    checks = []
    monkeypatch.setattr(platforms, "loadable", lambda runtimes: checks.append(runtimes) or list(runtimes))
    runtime = good("a", tmp_path)
    folder, _ = platforms.register_runtimes([runtime])
    assert platforms.register_runtimes([runtime])[0] == folder and len(checks) == 1
    (folder / "00-a.icd").unlink()  # damage is repaired, without asking again
    platforms.register_runtimes([runtime])
    assert (folder / "00-a.icd").read_text() == runtime.library + "\n" and len(checks) == 1
    (folder / platforms.MARK).write_text("{ not json")
    assert platforms.register_runtimes([runtime])[0] == folder and len(checks) == 2
    put(tmp_path / "lib/libneeded.so")  # what a library needs has come: the folder's time stamp changes
    assert platforms.register_runtimes([runtime])[0] != folder and len(checks) == 3


def test_what_does_not_load_is_left_out_and_remembered(tmp_path, cache):
    runtime = good("broken", tmp_path)  # an empty file
    for _ in range(2):
        folder, (verdict,) = platforms.register_runtimes([runtime])
        assert "file too short" in verdict.error and "reinstall" in verdict.remedy
        assert list(folder.glob("*.icd")) == []
    assert json.loads((folder / platforms.MARK).read_text())["left_out"][runtime.library] == [verdict.error, verdict.remedy]


def test_without_a_cache_folder_a_temporary_one_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms.env, "cache_dir", lambda: None)
    monkeypatch.setattr(platforms, "loadable", lambda runtimes: list(runtimes))
    folder, _ = platforms.register_runtimes([good("a", tmp_path)])
    assert (folder / "00-a.icd").is_file() and folder.stat().st_mode & 0o077 == 0


def test_a_full_disk_costs_only_what_had_to_be_registered(tmp_path, cache, monkeypatch, caplog):
    def full(runtimes):
        raise OSError(28, "No space left on device")

    runtime = good("a", tmp_path)
    monkeypatch.setattr(platforms, "_state", platforms.PlatformState(runtimes=[runtime]))
    monkeypatch.setattr(platforms, "register_runtimes", full)
    platforms._configure_loader()
    assert platforms._state.folder is None and "OCL_ICD_VENDORS" not in os.environ
    assert "[platforms] runtimes could not be registered; runtimes=a, error=[Errno 28] No space left on device" in caplog.text


def test_a_library_that_is_no_driver_is_told():
    library = next((path for path in platforms.mapped_libraries() if os.path.basename(path).startswith(("libc.so", "libc-"))), None)
    if library is None:
        pytest.skip("this system does not tell which libraries are loaded")
    (verdict,) = platforms.loadable([Runtime("libc", library, library, "driver library", library, False)])
    assert verdict.error == "it has no OpenCL entry points"


def test_real_runtimes_pass_the_check():
    known = [runtime for runtime in platforms.runtimes() if not runtime.error and runtime.known]
    if not known:
        pytest.skip("no OpenCL runtime is installed")
    assert [runtime.error for runtime in platforms.loadable(known)] == [""] * len(known)


@pytest.mark.parametrize(
    "error, remedy",
    [
        ("libimf.so: cannot open shared object file: No such file or directory", "pip install intel-cmplr-lib-rt tbb"),
        ("libtbb.so.12: cannot open shared object file: No such file or directory", "pip install intel-cmplr-lib-rt tbb"),
        ("libz.so.1: cannot open shared object file: No such file or directory", "apt-get install zlib1g"),
        ("libfoo.so.3: cannot open shared object file: No such file or directory", "install the package that provides libfoo.so.3"),
        ("/x/libfoo.so: wrong ELF class: ELFCLASS32", "another kind of machine"),
        ("/x/libfoo.so: version `GLIBC_2.99' not found", "newer system image"),
        ("something new", "reinstall it"),
    ],
)
def test_remedies(error, remedy):
    assert remedy in platforms.remedy_for(Runtime("x", "/x/libx.so", None, "wheel", "", False), error)


@pytest.mark.parametrize(
    "system, machine, command",
    [
        ("linux", "x86_64", "pip install pyopencl pocl-binary-distribution"),
        ("linux", "aarch64", "sudo apt-get install pocl-opencl-icd"),
        ("darwin", "arm64", "brew install pocl"),
        ("win32", "AMD64", platforms.OWN_PACKAGE),
    ],
)
def test_the_command_that_installs_a_runtime(system, machine, command, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platforms.platform, "machine", lambda: machine)
    monkeypatch.setattr(system_packages, "package_manager", lambda: {"linux": "apt-get", "darwin": "brew"}.get(system, ""))
    monkeypatch.setattr(system_packages, "is_root", lambda: False)
    assert platforms.install_command() == command


def test_nothing_is_gathered_where_the_system_registers_runtimes(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platforms, "_state", platforms.PlatformState())
    state = platforms.prepare()
    assert state.prepared and state.runtimes == [] and state.folder is None


def test_without_pyopencl_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(platforms, "_state", platforms.PlatformState(prepared=True))
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(ImportError, match=r"^pyopencl required: .*pip install pyopencl"):
        platforms.opencl()
    assert platforms.available() is False


def test_the_loader_and_the_platforms_of_this_machine():
    if not platforms.available():
        pytest.skip("no OpenCL platform here")
    assert platforms.opencl() is sys.modules["pyopencl"]
    assert len(platforms.cl_platforms()) >= 1
    loader = platforms.loader_path()
    assert loader is None or os.path.basename(loader).startswith("libOpenCL")


def test_a_forked_child_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(platforms, "forked_child", False)
    platforms.check_process()
    platforms.mark_forked_child()
    with pytest.raises(DeviceError, match=r'\[fork\] OpenCL cannot be used in a forked child.*"spawn"'):
        platforms.check_process()


def test_child_processes_look_for_themselves(tmp_path):
    """The variable that was set for this process's loader is inherited; it must not pass for the user's wish."""
    inner = "from netcl.core import platforms as p; p.prepare(); print(p._state.setting, [r.name for r in p.runtimes()], flush=True)"
    lines = ["import subprocess, sys", inner, "p.available()", f"subprocess.run([sys.executable, '-c', {inner!r}], check=True)"]
    outer = "; ".join(lines)
    environment = {**os.environ, "NETCL_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, env=environment, check=True)
    parent, child = done.stdout.splitlines()
    assert parent == child and parent.startswith("None")
